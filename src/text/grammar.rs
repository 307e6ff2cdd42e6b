//! Grammars: constraints on an answer, applied as masks over the vocabulary.
//!
//! A [`GrammarSource`] is compiled once ([`Grammars::compile`]). Each answer starts its own [`Constraint`], which takes
//! the sampled ids and returns a mask of the ids that may come next. The only special tokens in a mask are the ones
//! that end an answer, and only where the grammar may end. The `llguidance` crate parses grammars and computes masks.
//!
//! A grammar comes with a request and is not trusted. Bounds apply to its size, the time and the threads to compile it,
//! its states, the work for one mask, and the total time for the masks of an answer. Exceeding a bound is a
//! [`TextError`]. Compiling recurses along a schema's references, so it runs on a thread whose stack is large enough
//! for the most references that a grammar can have. White space between tokens of JSON is also bounded, because
//! otherwise a model may write white space without end.

use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{CancellationHandle, JsonCompileOptions, Matcher, ParserFactory, TokenParser};
use serde_json::{Value, json};

use super::calls::{self, CallFormat, CallTool};
use super::error::TextError;
use super::gbnf;
use super::refusal::Refusal;
use super::schema::{self, Problem, SchemaPart};
use super::tokenizer::Tokenizer;

/// Longest source of a grammar, in bytes.
pub const MAX_GRAMMAR_BYTES: usize = 256 << 10;
/// Most choices of a [`GrammarSource::Choice`].
pub const MAX_CHOICES: usize = 4096;

/// Number of compiled grammars in the cache.
const CACHED: usize = 32;
/// Time limit for compiling one grammar. Usually llguidance's own limit of steps is reached long before.
const COMPILE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time budget of one answer's grammar on the engine's thread, which all other requests wait for. The budget begins
/// with `TIME`. Each token adds `TIME_PER_TOKEN`, up to `TIME`. A token usually takes about 50 µs; the limits are much
/// larger, because the machine may be busy.
const TIME: Duration = Duration::from_secs(2);
const TIME_PER_TOKEN: Duration = Duration::from_millis(20);
/// How often the clock thread checks for constraints whose time is over.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Most grammars that are compiled at the same time. A compilation that has timed out counts until it ends.
const MAX_COMPILING: usize = 4;
/// Nested references need a few KiB each, and a grammar can have about 10,000 references.
const COMPILE_STACK_BYTES: usize = 256 << 20;
/// Most states of one answer's lexer; each needs 1 to 2 KiB.
const MAX_LEXER_STATES: usize = 50_000;
/// Most items in one row of the parser. The items are the possible continuations at one position in the text. An
/// optional property of an object is four items. An ambiguous grammar has one item for each way to parse the text. The
/// work for a mask is quadratic in the number of items.
const MAX_ITEMS: usize = 2000;
/// Longest token that a grammar may use, because the trie's nodes count their depth in 10 bits.
const MAX_TOKEN_BYTES: usize = 512;
/// Most bytes of all tokens together, because the trie counts its nodes in 22 bits.
const MAX_VOCABULARY_BYTES: usize = (1 << 22) - 1;
/// White space allowed between two tokens of JSON: none, one space, or a line end and an indentation.
const WHITESPACE: &str = r" |\r?\n[ \t]{0,40}";

/// The source of a grammar, which an answer must match.
#[derive(Debug, Clone, PartialEq)]
pub enum GrammarSource {
    /// JSON. With `strict`, a keyword of the schema that cannot be enforced is an error. Otherwise such keywords are
    /// ignored.
    JsonSchema { schema: Value, strict: bool },
    /// JSON of the schema `form`. It refers to the client's schemas in `parts`: "#/$defs/0" is the first. An error in a
    /// single part is a [`TextError::Schema`].
    JsonParts { form: Value, parts: Vec<SchemaPart> },
    /// A call of one of these tools, or a list of at most `most` calls in a format that has lists, without the control
    /// tokens around it. An error in the schema of a tool is a [`TextError::Schema`].
    Call { format: CallFormat, tools: Vec<CallTool>, most: usize },
    /// A regular expression that matches the whole answer, in the syntax of the `regex` crate, without look-around.
    Regex(String),
    /// A grammar in llguidance's dialect of Lark. The rule `start` matches the whole answer.
    Lark(String),
    /// A grammar in llama.cpp's GBNF. The rule `root` matches the whole answer.
    Gbnf(String),
    /// One of the listed texts.
    Choice(Vec<String>),
}

impl GrammarSource {
    /// Any JSON object.
    pub fn json_object() -> Self {
        Self::JsonSchema { schema: json!({"type": "object"}), strict: true }
    }

    /// The key in the cache: two different sources have different keys.
    fn key(&self) -> String {
        match self {
            Self::JsonSchema { schema, strict: true } => format!("strict {schema}"),
            Self::JsonSchema { schema, strict: false } => format!("json {schema}"),
            Self::JsonParts { form, parts } => {
                let parts = parts.iter().map(|SchemaPart { schema, strict }| format!(" {strict} {schema}"));
                format!("parts {form}{}", parts.collect::<String>())
            }
            Self::Call { format, tools, most } => {
                let tools =
                    tools.iter().map(|CallTool { name, parameters: SchemaPart { schema, strict } }| {
                        format!(" {} {strict} {schema}", json!(name))
                    });
                format!("call {} {most}{}", format.syntax.name, tools.collect::<String>())
            }
            Self::Regex(regex) => format!("regex {regex}"),
            Self::Lark(grammar) => format!("lark {grammar}"),
            Self::Gbnf(grammar) => format!("gbnf {grammar}"),
            Self::Choice(choices) => format!("choice {}", json!(choices)),
        }
    }

    /// Checks the source and prepares it for the thread that compiles. Returns errors that are found without compiling.
    fn prepared(&self) -> Result<Prepared, TextError> {
        let refuse = |problem: String| Err(TextError::Grammar(problem));
        let grammar = match self {
            Self::JsonSchema { schema, strict } => {
                let parts = vec![SchemaPart { schema: schema.clone(), strict: *strict }];
                return Ok(Prepared::Schemas { form: SchemaPart::reference(0), parts });
            }
            Self::JsonParts { form, parts } => {
                return Ok(Prepared::Schemas { form: form.clone(), parts: parts.clone() });
            }
            Self::Call { format, tools, most } => {
                return Ok(Prepared::Call { format: format.clone(), tools: tools.clone(), most: *most });
            }
            Self::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Self::Lark(grammar) if grammar.contains("::=") => {
                return refuse(
                    "expected Lark, where a rule is written \"start: ...\", and not with \"::=\"".into(),
                );
            }
            Self::Lark(grammar) => TopLevelGrammar::from_lark(grammar.clone()),
            Self::Gbnf(grammar) => match gbnf::to_lark(grammar).map_err(TextError::Grammar)? {
                lark if lark.len() > MAX_GRAMMAR_BYTES => {
                    let bytes = lark.len();
                    return refuse(format!(
                        "{bytes} bytes long as Lark, at most {MAX_GRAMMAR_BYTES} are accepted"
                    ));
                }
                lark => TopLevelGrammar::from_lark(lark),
            },
            Self::Choice(choices) if choices.is_empty() => {
                return refuse("there is nothing to choose from".into());
            }
            Self::Choice(choices) if choices.len() > MAX_CHOICES => {
                return refuse(format!("{} choices, at most {MAX_CHOICES} are accepted", choices.len()));
            }
            Self::Choice(choices) => {
                // Lark writes strings as JSON does. All choices are one terminal: as alternatives of a rule, each would be an
                // item of the parser, which has room for fewer (`MAX_ITEMS`).
                let choices: Vec<String> = choices.iter().map(|choice| json!(choice).to_string()).collect();
                TopLevelGrammar::from_lark(format!("start: CHOICE\nCHOICE: {}", choices.join(" | ")))
            }
        };
        Ok(Prepared::Grammar(grammar))
    }
}

/// A source that was checked and can be compiled.
enum Prepared {
    Grammar(TopLevelGrammar),
    Schemas { form: Value, parts: Vec<SchemaPart> },
    Call { format: CallFormat, tools: Vec<CallTool>, most: usize },
}

impl Prepared {
    /// Compiles the source, and gives up some time after `until`: llguidance has limits of its own for each run.
    fn parser(self, factory: &ParserFactory, until: Instant) -> Result<TokenParser, TextError> {
        let run = |grammar| factory.create_parser(grammar).map_err(|error| Refusal::new(&error.to_string()));
        match self {
            Self::Grammar(grammar) => run(grammar).map_err(|refusal| TextError::Grammar(refusal.text)),
            Self::Schemas { form, parts } => {
                let compiled = schema::compile(&form, &parts, until, |schema| run(json_grammar(schema)));
                compiled.map_err(problem_of_part)
            }
            Self::Call { format, tools, most } => {
                let parts: Vec<SchemaPart> = tools.iter().map(|tool| tool.parameters.clone()).collect();
                let form = calls::form(&format, &tools, most);
                let prepared = schema::compile(&form, &parts, until, |schema| {
                    run(json_grammar(schema.clone())).map(|_| schema)
                });
                let lark = calls::lark(&format, &tools, &prepared.map_err(problem_of_part)?, &with_options)
                    .map_err(|(part, problem)| TextError::Schema { part, problem })?;
                run(TopLevelGrammar::from_lark(lark)).map_err(|refusal| TextError::Grammar(refusal.text))
            }
        }
    }
}

fn problem_of_part(Problem { part, text }: Problem) -> TextError {
    match part {
        Some(part) => TextError::Schema { part, problem: text },
        None => TextError::Grammar(text),
    }
}

/// A grammar of JSON in which every keyword of the schema is enforced.
fn json_grammar(schema: Value) -> TopLevelGrammar {
    TopLevelGrammar::from_json_schema(with_options(schema))
}

/// A schema with the options of its JSON.
fn with_options(mut schema: Value) -> Value {
    let whitespace_pattern = Some(WHITESPACE.into());
    JsonCompileOptions { whitespace_pattern, ..JsonCompileOptions::default() }.apply_to(&mut schema);
    schema
}

/// Compiles grammars for one model. Caches the most recently used ones.
pub struct Grammars {
    vocabulary: Arc<Vocabulary>,
    /// Created by [`Grammars::prepare`] or for the first grammar. That takes a second for a large vocabulary.
    factory: OnceLock<Result<Arc<ParserFactory>, TextError>>,
    /// Most recently used first.
    cache: Mutex<Vec<(String, Grammar)>>,
    compiling: Arc<Compiling>,
    /// Number of compilations since the start, failed ones included.
    compiled: AtomicU64,
}

/// The data that all grammars of one model share.
struct Vocabulary {
    tokenizer: Tokenizer,
    /// Number of the model's ids, which are `0..rows`.
    rows: usize,
    /// Ids that end an answer, as a list.
    stops: Vec<TokenId>,
    /// Mask of the ids that are text. As in every mask here, `id` is bit `id % 32` of word `id / 32`.
    text: Vec<u32>,
    /// Mask of the ids that end an answer.
    ends: Arc<[u32]>,
    /// Mask for free text: all ids, including special tokens and ids without a token.
    all: Arc<[u32]>,
    all_but_ends: Arc<[u32]>,
    /// Mask of the ids that the grammar of a call may allow: text, and the control tokens within a call.
    text_of_calls: Vec<u32>,
    /// Mask of the ids that consist of white space.
    blanks: Vec<u32>,
    /// Mask of the ids whose first character other than white space opens an object or an array.
    openers: Vec<u32>,
}

/// A compiled grammar.
#[derive(Clone)]
pub struct Grammar {
    vocabulary: Arc<Vocabulary>,
    /// A matcher at the start of the grammar. Each answer gets a copy.
    matcher: Arc<Matcher>,
    is_call: bool,
}

/// The position of one answer in its grammar.
pub struct Constraint {
    vocabulary: Arc<Vocabulary>,
    matcher: Matcher,
    is_call: bool,
    applies: Applies,
    /// Time left of the answer's limit.
    time: Duration,
    clock: Arc<Clock>,
}

impl Clone for Constraint {
    fn clone(&self) -> Self {
        let Self { vocabulary, matcher, is_call, applies, time, .. } = self;
        Self::new(vocabulary, matcher.clone(), *is_call, *applies, *time)
    }
}

/// Whether the grammar applies to an answer.
#[derive(Clone, Copy, PartialEq)]
enum Applies {
    Yes,
    /// Undecided: the answer has only white space and control tokens without text until now.
    IfOpened,
    No,
}

impl Grammars {
    /// `rows` is the number of the model's ids. Each of `stop_token_ids` ends an answer.
    pub fn new(tokenizer: Tokenizer, rows: usize, stop_token_ids: &[u32]) -> Self {
        let stops: Vec<TokenId> = stop_token_ids.iter().copied().filter(|id| (*id as usize) < rows).collect();
        // The syntax of thoughts and calls is no text, even if the tokenizer's file does not list it as special.
        let is_text = |id: u32| !tokenizer.is_control(id) && !stops.contains(&id) && tokenizer.contains(id);
        let text = mask_of(rows, (0..rows as u32).filter(|id| is_text(*id)));
        let ends = mask_of(rows, stops.iter().copied()).into();
        let all = mask_of(rows, 0..rows as u32).into();
        let all_but_ends = mask_of(rows, (0..rows as u32).filter(|id| !stops.contains(id))).into();
        let starts = |id: u32, with: fn(&[u8]) -> bool| {
            is_set(&text, id) && tokenizer.token_bytes(id).is_some_and(|bytes| with(bytes.trim_ascii_start()))
        };
        let blanks = mask_of(rows, (0..rows as u32).filter(|id| starts(*id, |bytes| bytes.is_empty())));
        let opens = |bytes: &[u8]| matches!(bytes.first(), Some(b'{' | b'['));
        let openers = mask_of(rows, (0..rows as u32).filter(|id| starts(*id, opens)));
        let text_of_calls = text.clone();
        let vocabulary = Arc::new(Vocabulary {
            tokenizer,
            rows,
            stops,
            text,
            ends,
            all,
            all_but_ends,
            text_of_calls,
            blanks,
            openers,
        });
        Self {
            vocabulary,
            factory: OnceLock::new(),
            cache: Mutex::new(Vec::new()),
            compiling: Arc::default(),
            compiled: AtomicU64::new(0),
        }
    }

    /// Grammars of calls in this format may be compiled.
    #[must_use]
    pub fn with_calls(mut self, format: &CallFormat) -> Self {
        let vocabulary = Arc::get_mut(&mut self.vocabulary).expect("no grammar is compiled yet");
        let within = format.tokens.iter().flat_map(|tokens| [tokens.mark, tokens.call_id]).flatten();
        for id in within.filter(|id| (*id as usize) < vocabulary.rows) {
            vocabulary.text_of_calls[id as usize / 32] |= 1 << (id % 32);
        }
        self
    }

    /// The mask of the ids that consist of white space.
    pub fn blanks(&self) -> &[u32] {
        &self.vocabulary.blanks
    }

    /// Prepares the vocabulary, so that the first grammar does not wait for it. If that fails, the first grammar gets
    /// the error.
    pub fn prepare(&self) {
        let _ = self.factory();
    }

    /// Whether the vocabulary is prepared, so that the next grammar does not wait for it.
    pub fn is_prepared(&self) -> bool {
        self.factory.get().is_some()
    }

    fn factory(&self) -> Result<Arc<ParserFactory>, TextError> {
        self.factory.get_or_init(|| self.vocabulary.factory().map(Arc::new)).clone()
    }

    /// Compiles a grammar within [`COMPILE_TIMEOUT`], usually in a few milliseconds. Does not wait if the grammar is in
    /// the cache, or if the source has an error that is found without compiling.
    pub fn compile(&self, source: &GrammarSource) -> Result<Grammar, TextError> {
        let key = bounded_key(source)?;
        if let Some(grammar) = self.cached(&key) {
            return Ok(grammar);
        }
        let is_call = matches!(source, GrammarSource::Call { .. });
        let grammar =
            self.compile_uncached(source.prepared()?, is_call).map_err(|error| match (source, error) {
                (GrammarSource::JsonSchema { .. }, TextError::Schema { problem, .. }) => {
                    TextError::Grammar(problem)
                }
                (_, error) => error,
            })?;
        self.keep(key, grammar.clone());
        Ok(grammar)
    }

    /// Number of compilations since the start, failed ones included.
    pub fn compiled(&self) -> u64 {
        self.compiled.load(Ordering::Relaxed)
    }

    fn compile_uncached(&self, prepared: Prepared, is_call: bool) -> Result<Grammar, TextError> {
        let matcher = self.matcher(self.factory()?, prepared)?;
        let vocabulary = Arc::clone(&self.vocabulary);
        let grammar = Grammar { vocabulary, matcher: Arc::new(matcher), is_call };
        // A grammar that allows no first id is an error. The first mask gives the reason.
        grammar.start().mask(true)?;
        Ok(grammar)
    }

    fn cached(&self, key: &str) -> Option<Grammar> {
        let mut cache = self.cache.lock().expect("nothing panics under this lock");
        let index = cache.iter().position(|(other, _)| other == key)?;
        cache[..=index].rotate_right(1);
        Some(cache[0].1.clone())
    }

    fn keep(&self, key: String, grammar: Grammar) {
        let mut cache = self.cache.lock().expect("nothing panics under this lock");
        cache.retain(|(other, _)| *other != key);
        cache.truncate(CACHED - 1);
        cache.insert(0, (key, grammar));
    }

    fn matcher(&self, factory: Arc<ParserFactory>, prepared: Prepared) -> Result<Matcher, TextError> {
        let permit = CompilePermit::take(&self.compiling)?;
        self.compiled.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = sync_channel(1);
        let until = Instant::now() + COMPILE_TIMEOUT;
        let work = move || {
            let parser = prepared.parser(&factory, until);
            drop(permit);
            // The receiver is gone if the compilation timed out.
            let _ = sender.send(parser.map(|parser| Matcher::new(Ok(parser)).into_cancellable()));
        };
        let thread = thread::Builder::new().name("grammar".into()).stack_size(COMPILE_STACK_BYTES);
        let refuse = |problem: String| TextError::Grammar(problem);
        let no_thread = |error: std::io::Error| TextError::NoThread {
            doing: "compiling a grammar",
            error: error.to_string(),
        };
        thread.spawn(work).map_err(no_thread)?;
        match receiver.recv_timeout(COMPILE_TIMEOUT) {
            Ok(matcher) => matcher,
            Err(RecvTimeoutError::Timeout) => {
                let seconds = COMPILE_TIMEOUT.as_secs_f64();
                Err(refuse(format!("it takes more than {seconds} s to compile; make it simpler")))
            }
            Err(RecvTimeoutError::Disconnected) => Err(refuse("it cannot be compiled".into())),
        }
    }
}

/// The source's key in the cache. The key has about the size of the source, so this check bounds both.
fn bounded_key(source: &GrammarSource) -> Result<String, TextError> {
    let problem = |bytes: usize| format!("{bytes} bytes long, at most {MAX_GRAMMAR_BYTES} are accepted");
    let key = source.key();
    if key.len() <= MAX_GRAMMAR_BYTES {
        return Ok(key);
    }
    let parts: Vec<&SchemaPart> = match source {
        GrammarSource::JsonParts { parts, .. } => parts.iter().collect(),
        GrammarSource::Call { tools, .. } => tools.iter().map(|tool| &tool.parameters).collect(),
        _ => Vec::new(),
    };
    for (part, SchemaPart { schema, .. }) in parts.into_iter().enumerate() {
        let bytes = schema.to_string().len();
        if bytes > MAX_GRAMMAR_BYTES {
            return Err(TextError::Schema { part, problem: problem(bytes) });
        }
    }
    Err(TextError::Grammar(problem(key.len())))
}

/// Counts the threads that are compiling a grammar.
#[derive(Default)]
struct Compiling {
    threads: Mutex<usize>,
    ended: Condvar,
}

/// A permit to compile a grammar. Dropping it lets another thread compile.
struct CompilePermit(Arc<Compiling>);

impl CompilePermit {
    fn take(compiling: &Arc<Compiling>) -> Result<Self, TextError> {
        let threads = compiling.threads.lock().expect("nothing panics under this lock");
        let (mut threads, waited) = compiling
            .ended
            .wait_timeout_while(threads, COMPILE_TIMEOUT, |threads| *threads >= MAX_COMPILING)
            .expect("nothing panics under this lock");
        if waited.timed_out() {
            return Err(TextError::OthersCompile);
        }
        *threads += 1;
        Ok(Self(Arc::clone(compiling)))
    }
}

impl Drop for CompilePermit {
    fn drop(&mut self) {
        *self.0.threads.lock().expect("nothing panics under this lock") -= 1;
        self.0.ended.notify_one();
    }
}

impl Vocabulary {
    fn factory(self: &Arc<Self>) -> Result<ParserFactory, TextError> {
        let refuse = |problem: String| {
            TextError::Grammar(format!("this model cannot be used with grammars: {problem}"))
        };
        if self.stops.is_empty() {
            return Err(refuse("it has no stop token".into()));
        }
        let bytes = |id: u32| {
            let bytes = if is_set(&self.text, id) { self.tokenizer.token_bytes(id) } else { None };
            bytes.filter(|bytes| bytes.len() <= MAX_TOKEN_BYTES).unwrap_or_default()
        };
        let tokens: Vec<Vec<u8>> = (0..self.rows as u32).map(bytes).collect();
        let total: usize = tokens.iter().map(Vec::len).sum();
        if total > MAX_VOCABULARY_BYTES {
            return Err(refuse(format!(
                "its vocabulary has {total} bytes; at most {MAX_VOCABULARY_BYTES} are supported"
            )));
        }
        let info = TokRxInfo::new(self.rows as u32, self.stops[0]);
        let trie = TokTrie::from(&info, &tokens).with_eos_tokens(&self.stops);
        let env: TokEnv = Arc::new(Environment { vocabulary: Arc::clone(self), trie });
        let none = InferenceCapabilities::default();
        let mut factory = ParserFactory::new(&env, none, &SlicedBiasComputer::general_slices())
            .map_err(|error| refuse(error.to_string()))?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.max_lexer_states = MAX_LEXER_STATES;
        limits.max_items_in_row = MAX_ITEMS;
        limits.verbose_errors = false;
        Ok(factory)
    }
}

/// The tokenizer for llguidance.
struct Environment {
    vocabulary: Arc<Vocabulary>,
    trie: TokTrie,
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// Tokenizes a text that the grammar forces. The result of the real tokenizer is preferred to greedy tokenization,
    /// because the model was trained on it.
    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            let ids = self.vocabulary.tokenizer.encode(text, false).unwrap_or_default();
            // The name of a control token in a grammar is text, and must not become the id of that token.
            let is_text =
                |id: &TokenId| (*id as usize) < self.vocabulary.rows && is_set(&self.vocabulary.text, *id);
            if ids.iter().all(is_text) && self.trie.decode_raw(&ids) == text.as_bytes() {
                ids
            } else {
                self.trie.greedy_tokenize(text.as_bytes())
            }
        })
    }
}

impl Grammar {
    /// A constraint for a new answer. It shares no state with other answers.
    pub fn start(&self) -> Constraint {
        Constraint::new(&self.vocabulary, self.matcher.deep_clone(), self.is_call, Applies::Yes, TIME)
    }

    /// A constraint for a new answer that may be free text. The grammar applies only if the first character other than
    /// white space is `{` or `[`. It applies from that character.
    pub fn start_if_opened(&self) -> Constraint {
        Constraint { applies: Applies::IfOpened, ..self.start() }
    }
}

impl Constraint {
    fn new(
        vocabulary: &Arc<Vocabulary>,
        matcher: Matcher,
        is_call: bool,
        applies: Applies,
        time: Duration,
    ) -> Self {
        let clock = Clock::new(matcher.cancellation_handle().unwrap_or_default());
        Self { vocabulary: Arc::clone(vocabulary), matcher, is_call, applies, time, clock }
    }

    /// Runs the matcher, and subtracts the time from the answer's budget. Fails if the budget is used up.
    fn timed<T, E: Display>(
        &mut self,
        work: impl FnOnce(&mut Matcher) -> Result<T, E>,
    ) -> Result<T, TextError> {
        let since = Instant::now();
        self.clock.stop_at(Some(since + self.time));
        let done = work(&mut self.matcher);
        self.clock.stop_at(None);
        let left = self.time.checked_sub(since.elapsed());
        self.time = left.unwrap_or_default();
        if left.is_none() || self.clock.handle.is_cancelled() {
            return Err(TextError::Grammar("it takes too long to follow; make it simpler".into()));
        }
        done.map_err(|error| TextError::Grammar(Refusal::new(&error.to_string()).text))
    }

    /// Takes the next id of the answer. The last mask must have allowed it.
    pub fn push(&mut self, id: u32) -> Result<(), TextError> {
        let Vocabulary { tokenizer, blanks, openers, .. } = &*self.vocabulary;
        // A control token without text decides nothing. Llama 3 writes one before some calls.
        let decides = !is_set(blanks, id) && !tokenizer.is_special(id);
        if self.applies == Applies::IfOpened && decides {
            self.applies = if is_set(openers, id) { Applies::Yes } else { Applies::No };
        }
        if self.applies != Applies::Yes {
            return Ok(());
        }
        // The budget never exceeds `TIME`, so a single token cannot use the time that a thousand tokens did not need.
        self.time = (self.time + TIME_PER_TOKEN).min(TIME);
        self.timed(|matcher| matcher.consume_token(id))
    }

    /// The ids that may come next, at least one: `id` is bit `id % 32` of word `id / 32`. If the grammar may end here,
    /// the mask includes the ids that end the answer. `may_end = false` excludes them, unless there are no others.
    pub fn mask(&mut self, may_end: bool) -> Result<Arc<[u32]>, TextError> {
        let vocabulary = Arc::clone(&self.vocabulary);
        let Vocabulary { text, text_of_calls, ends, all, all_but_ends, openers, .. } = &*vocabulary;
        let text = if self.is_call { text_of_calls } else { text };
        let free = if may_end { all } else { all_but_ends };
        if self.applies == Applies::No {
            return Ok(Arc::clone(free));
        }
        let mask = self.timed(Matcher::compute_mask_or_eos)?;
        let and = |allowed: &[u32]| -> Vec<u32> {
            mask.as_slice().iter().zip(allowed).map(|(mask, allowed)| mask & allowed).collect()
        };
        let texts = and(text);
        if self.applies == Applies::IfOpened {
            let either = free.iter().zip(openers).zip(texts);
            return Ok(either.map(|((free, openers), text)| free & !openers | text & openers).collect());
        }
        let none = texts.iter().all(|word| *word == 0);
        if !none && !may_end {
            return Ok(texts.into());
        }
        let mask: Arc<[u32]> = texts.iter().zip(and(ends)).map(|(text, end)| text | end).collect();
        if mask.iter().all(|word| *word == 0) {
            return Err(TextError::Grammar(
                "no token of this model's vocabulary can continue the answer".into(),
            ));
        }
        Ok(mask)
    }

    /// The ids that may come next, at least one, in a part of an answer. Where the grammar may end, the mask includes
    /// `after` instead of the ids that end the answer.
    pub fn part_mask(&mut self, after: &[u32]) -> Result<Arc<[u32]>, TextError> {
        let mask = self.mask(true)?;
        let ends = &self.vocabulary.ends;
        let may_end = mask.iter().zip(&**ends).any(|(word, end)| word & end != 0);
        if !may_end {
            return Ok(mask);
        }
        Ok(mask.iter().zip(&**ends).zip(after).map(|((word, end), after)| word & !end | after).collect())
    }

    /// Whether the answer is free text, so that the grammar no longer applies.
    pub fn is_free(&self) -> bool {
        self.applies == Applies::No
    }

    /// The mask of the ids that end an answer.
    pub fn ends(&self) -> Arc<[u32]> {
        Arc::clone(&self.vocabulary.ends)
    }
}

/// Cancels one answer's grammar when its time is over. One thread checks the clocks of all answers.
struct Clock {
    /// The deadline in milliseconds since [`Clocks::start`], or `NEVER`.
    at: AtomicU64,
    handle: CancellationHandle,
}

struct Clocks {
    start: Instant,
    all: Mutex<Vec<Weak<Clock>>>,
    more: Condvar,
}

impl Clock {
    const NEVER: u64 = u64::MAX;

    fn new(handle: CancellationHandle) -> Arc<Self> {
        let clock = Arc::new(Self { at: AtomicU64::new(Self::NEVER), handle });
        let clocks = Clocks::get();
        clocks.all.lock().expect("nothing panics under this lock").push(Arc::downgrade(&clock));
        clocks.more.notify_one();
        clock
    }

    fn stop_at(&self, at: Option<Instant>) {
        let since_start = |at: Instant| at.duration_since(Clocks::get().start).as_millis() as u64;
        self.at.store(at.map_or(Self::NEVER, since_start), Ordering::Relaxed);
    }
}

impl Clocks {
    /// The clocks of the process, created when the first answer with a grammar starts.
    fn get() -> &'static Self {
        static CLOCKS: OnceLock<Clocks> = OnceLock::new();
        CLOCKS.get_or_init(|| {
            // The new thread waits in `get` until this initialization ends.
            let thread = thread::Builder::new().name("grammar clock".into());
            if let Err(error) = thread.spawn(|| Clocks::get().cancel_expired()) {
                tracing::warn!(
                    "cannot start the thread that interrupts slow grammars, so one may compute a whole mask first: {error}"
                );
            }
            Clocks { start: Instant::now(), all: Mutex::default(), more: Condvar::new() }
        })
    }

    /// Cancels constraints whose time is over, every [`CHECK_INTERVAL`].
    fn cancel_expired(&self) {
        loop {
            let mut all = self.all.lock().expect("nothing panics under this lock");
            while all.is_empty() {
                all = self.more.wait(all).expect("nothing panics under this lock");
            }
            let now = self.start.elapsed().as_millis() as u64;
            all.retain(|clock| {
                let clock = clock.upgrade();
                if let Some(clock) = clock.as_ref().filter(|clock| clock.at.load(Ordering::Relaxed) <= now) {
                    clock.handle.cancel();
                }
                clock.is_some()
            });
            drop(all);
            thread::sleep(CHECK_INTERVAL);
        }
    }
}

/// A mask of `rows` bits in which the bits of `ids` are set: `id` is bit `id % 32` of word `id / 32`.
pub fn mask_of(rows: usize, ids: impl IntoIterator<Item = u32>) -> Vec<u32> {
    let mut words = vec![0; rows.div_ceil(32)];
    for id in ids {
        words[id as usize / 32] |= 1 << (id % 32);
    }
    words
}

fn is_set(words: &[u32], id: u32) -> bool {
    words[id as usize / 32] >> (id % 32) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_cancels_only_its_own_constraint() {
        let [late, never] = [CancellationHandle::default(), CancellationHandle::default()];
        let (clock, other) = (Clock::new(late.clone()), Clock::new(never.clone()));
        clock.stop_at(Some(Instant::now() + 3 * CHECK_INTERVAL));
        assert!(!late.is_cancelled());
        let since = Instant::now();
        while !late.is_cancelled() {
            assert!(since.elapsed() < Duration::from_secs(30), "the clock thread does not run");
            thread::sleep(CHECK_INTERVAL);
        }
        assert!(!never.is_cancelled());
        drop((clock, other));
    }

    #[test]
    fn an_answer_whose_time_is_over_does_not_end_others() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tokenizer-mini/tokenizer.json");
        let tokenizer = Tokenizer::from_bytes(&std::fs::read(path).unwrap(), "tokenizer.json").unwrap();
        let grammars = Grammars::new(tokenizer, 512, &[1]);
        let grammar = grammars.compile(&GrammarSource::json_object()).unwrap();
        let (mut slow, mut other) = (grammar.start(), grammar.start());
        slow.time = Duration::ZERO;
        let problem = slow.mask(true).unwrap_err().to_string();
        assert!(problem.contains("too long to follow"), "{problem}");
        other.mask(true).unwrap();
        grammars.compile(&GrammarSource::json_object()).unwrap().start().mask(true).unwrap();
    }
}
