//! Grammars: constraints on an answer, applied as masks over the vocabulary.
//!
//! A [`GrammarSource`] is compiled once ([`Grammars::compile`]). Each answer starts its own [`Constraint`], which takes
//! the sampled ids and returns a mask of the ids that may come next. The only special tokens in a mask are the ones
//! that end an answer, and only where the grammar may end. Parsing is the `llguidance` crate's.
//!
//! A grammar comes with a request, from strangers. Bounds apply to its size, the time and the threads for compiling it,
//! its states, the work for one mask, and the time that an answer's masks take. Exceeding a bound is a [`TextError`].
//! Compiling recurses along a schema's references, so it runs on a thread whose stack suffices for as many references
//! as a grammar can hold. White space between tokens of JSON is bounded too: a model that pads would go on for ever.

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

use super::error::TextError;
use super::gbnf;
use super::refusal::Refusal;
use super::schema::{self, Problem, SchemaPart};
use super::tokenizer::Tokenizer;

/// Longest source of a grammar, in bytes.
pub const MAX_GRAMMAR_BYTES: usize = 256 << 10;
/// Most choices of a [`GrammarSource::Choice`].
pub const MAX_CHOICES: usize = 4096;

/// How many compiled grammars the cache keeps.
const CACHED: usize = 32;
/// Time limit for compiling one grammar. On any machine llguidance's own limit of steps usually ends it long before.
const COMPILE_TIMEOUT: Duration = Duration::from_secs(10);
/// Limits for the time that one answer's grammar may take on the engine's thread, while all other requests wait: one
/// for the whole answer, one for each token. A token usually takes some 50 µs; both limits are far beyond that, for
/// busy machines.
const TIME: Duration = Duration::from_secs(2);
const TIME_PER_TOKEN: Duration = Duration::from_millis(20);
/// How often the clock thread looks for constraints whose time is over.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// Most grammars that are compiled at once. A compilation that has timed out counts until it ends.
const MAX_COMPILING: usize = 4;
/// Each reference that follows another needs a few KiB, and a grammar has room for some 10,000 references.
const COMPILE_STACK_BYTES: usize = 256 << 20;
/// Most states of one answer's lexer; each takes 1 to 2 KiB.
const MAX_LEXER_STATES: usize = 50_000;
/// Most items in one row of the parser, which are the possible continuations at one place in the text. An optional
/// property of an object is four items. An ambiguous grammar has one for each way to read the text, and the work for a
/// mask grows with the square of their number.
const MAX_ITEMS: usize = 2000;
/// Longest token that a grammar may use, because the trie's nodes count their depth in 10 bits.
const MAX_TOKEN_BYTES: usize = 512;
/// Most bytes of all tokens together, because the trie counts its nodes in 22 bits.
const MAX_VOCABULARY_BYTES: usize = (1 << 22) - 1;
/// White space allowed between two tokens of JSON: nothing, a space, or a line end and an indentation.
const WHITESPACE: &str = r" |\r?\n[ \t]{0,40}";

/// What an answer must match.
#[derive(Debug, Clone, PartialEq)]
pub enum GrammarSource {
    /// JSON. With `strict`, every keyword of the schema is enforced, and one that cannot be enforced is an error.
    /// Otherwise such keywords are left to the model.
    JsonSchema { schema: Value, strict: bool },
    /// JSON of the schema `form`, which refers to the schemas of a client in `parts`: "#/$defs/0" is the first. An
    /// error that is one part's alone is a [`TextError::Schema`].
    JsonParts { form: Value, parts: Vec<SchemaPart> },
    /// A regular expression that matches the whole answer, in the syntax of the `regex` crate, without look-around.
    Regex(String),
    /// A grammar in llguidance's dialect of Lark; the rule `start` is the answer.
    Lark(String),
    /// A grammar in llama.cpp's GBNF; the rule `root` is the answer.
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
            Self::Regex(regex) => format!("regex {regex}"),
            Self::Lark(grammar) => format!("lark {grammar}"),
            Self::Gbnf(grammar) => format!("gbnf {grammar}"),
            Self::Choice(choices) => format!("choice {}", json!(choices)),
        }
    }

    /// What the compiling thread gets, or the error that the text alone shows.
    fn read(&self) -> Result<Read, TextError> {
        let refuse = |problem: String| Err(TextError::Grammar(problem));
        let grammar = match self {
            Self::JsonSchema { schema, strict } => {
                let parts = vec![SchemaPart { schema: schema.clone(), strict: *strict }];
                return Ok(Read::Schemas { form: json!({"$ref": "#/$defs/0"}), parts });
            }
            Self::JsonParts { form, parts } => {
                return Ok(Read::Schemas { form: form.clone(), parts: parts.clone() });
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
                // Lark writes strings as JSON does.
                let choices: Vec<String> = choices.iter().map(|choice| json!(choice).to_string()).collect();
                TopLevelGrammar::from_lark(format!("start: {}", choices.join(" | ")))
            }
        };
        Ok(Read::Grammar(grammar))
    }
}

/// A source on its way to a parser.
enum Read {
    Grammar(TopLevelGrammar),
    Schemas { form: Value, parts: Vec<SchemaPart> },
}

impl Read {
    fn parser(self, factory: &ParserFactory) -> Result<TokenParser, TextError> {
        let run = |grammar| factory.create_parser(grammar).map_err(|error| Refusal::new(&error.to_string()));
        match self {
            Self::Grammar(grammar) => run(grammar).map_err(|refusal| TextError::Grammar(refusal.text)),
            Self::Schemas { form, parts } => {
                let compiled = schema::compile(&form, &parts, |schema| run(json_grammar(schema)));
                compiled.map_err(|Problem { part, text }| match part {
                    Some(part) => TextError::Schema { part, problem: text },
                    None => TextError::Grammar(text),
                })
            }
        }
    }
}

/// A grammar of JSON in which every keyword of the schema is enforced.
fn json_grammar(mut schema: Value) -> TopLevelGrammar {
    let whitespace_pattern = Some(WHITESPACE.into());
    JsonCompileOptions { whitespace_pattern, ..JsonCompileOptions::default() }.apply_to(&mut schema);
    TopLevelGrammar::from_json_schema(schema)
}

/// Compiles grammars for one model, and caches the last few.
pub struct Grammars {
    vocabulary: Arc<Vocabulary>,
    /// Made by [`Grammars::prepare`], or for the first grammar; takes a second for a large vocabulary.
    factory: OnceLock<Result<Arc<ParserFactory>, TextError>>,
    /// Most recently used first.
    cache: Mutex<Vec<(String, Grammar)>>,
    compiling: Arc<Compiling>,
    /// Compilations since the start, failed ones included.
    compiled: AtomicU64,
}

/// The data that all grammars of one model share.
struct Vocabulary {
    tokenizer: Tokenizer,
    /// Number of the model's ids, which are `0..rows`.
    rows: usize,
    /// Ids that end an answer, as a list.
    stops: Vec<TokenId>,
    /// Mask of the ids that stand for text. As in every mask here, `id` is bit `id % 32` of word `id / 32`.
    text: Vec<u32>,
    /// Mask of the ids that end an answer.
    ends: Arc<[u32]>,
    /// Mask for free text: all ids, including special tokens and ids without a token.
    all: Arc<[u32]>,
    all_but_ends: Arc<[u32]>,
    /// Mask of the ids that consist of white space.
    blanks: Vec<u32>,
    /// Mask of the ids whose first character other than white space opens an object or an array.
    openers: Vec<u32>,
}

/// A compiled grammar.
#[derive(Clone)]
pub struct Grammar {
    vocabulary: Arc<Vocabulary>,
    /// A matcher at the start of the grammar; each answer gets a copy.
    matcher: Arc<Matcher>,
}

/// The position of one answer in its grammar.
pub struct Constraint {
    vocabulary: Arc<Vocabulary>,
    matcher: Matcher,
    applies: Applies,
    /// Time left of the answer's limit.
    time: Duration,
    clock: Arc<Clock>,
}

impl Clone for Constraint {
    fn clone(&self) -> Self {
        let Self { vocabulary, matcher, applies, time, .. } = self;
        Self::new(vocabulary, matcher.clone(), *applies, *time)
    }
}

/// Whether the grammar applies to an answer.
#[derive(Clone, Copy, PartialEq)]
enum Applies {
    Yes,
    /// Undecided: nothing but white space has come so far.
    IfOpened,
    No,
}

impl Grammars {
    /// For a model with `rows` ids. An id of `stop_token_ids` ends an answer.
    pub fn new(tokenizer: Tokenizer, rows: usize, stop_token_ids: &[u32]) -> Self {
        let stops: Vec<TokenId> = stop_token_ids.iter().copied().filter(|id| (*id as usize) < rows).collect();
        let is_text = |id: u32| !tokenizer.is_special(id) && !stops.contains(&id) && tokenizer.contains(id);
        let text = words(rows, (0..rows as u32).filter(|id| is_text(*id)));
        let ends = words(rows, stops.iter().copied()).into();
        let all = words(rows, 0..rows as u32).into();
        let all_but_ends = words(rows, (0..rows as u32).filter(|id| !stops.contains(id))).into();
        let starts = |id: u32, with: fn(&[u8]) -> bool| {
            is_set(&text, id) && tokenizer.token_bytes(id).is_some_and(|bytes| with(bytes.trim_ascii_start()))
        };
        let blanks = words(rows, (0..rows as u32).filter(|id| starts(*id, |bytes| bytes.is_empty())));
        let opens = |bytes: &[u8]| matches!(bytes.first(), Some(b'{' | b'['));
        let openers = words(rows, (0..rows as u32).filter(|id| starts(*id, opens)));
        let vocabulary =
            Arc::new(Vocabulary { tokenizer, rows, stops, text, ends, all, all_but_ends, blanks, openers });
        Self {
            vocabulary,
            factory: OnceLock::new(),
            cache: Mutex::new(Vec::new()),
            compiling: Arc::default(),
            compiled: AtomicU64::new(0),
        }
    }

    /// Prepares the vocabulary, for which the first grammar would wait. If that fails, the first grammar gets the
    /// error.
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

    /// Compiles a grammar within [`COMPILE_TIMEOUT`], usually in a few milliseconds. Returns at once where the cache
    /// has the grammar, or where the text alone shows an error.
    pub fn compile(&self, source: &GrammarSource) -> Result<Grammar, TextError> {
        let key = bounded_key(source)?;
        if let Some(grammar) = self.cached(&key) {
            return Ok(grammar);
        }
        let grammar = self.compiled_now(source.read()?).map_err(|error| match (source, error) {
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

    fn compiled_now(&self, read: Read) -> Result<Grammar, TextError> {
        let matcher = self.matcher(self.factory()?, read)?;
        let grammar = Grammar { vocabulary: Arc::clone(&self.vocabulary), matcher: Arc::new(matcher) };
        // A grammar that allows no first id is an error, and the first mask names the reason.
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

    fn matcher(&self, factory: Arc<ParserFactory>, read: Read) -> Result<Matcher, TextError> {
        let turn = Turn::take(&self.compiling)?;
        self.compiled.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = sync_channel(1);
        let work = move || {
            let parser = read.parser(&factory);
            drop(turn);
            // The receiver may have given up.
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

/// The source's key in the cache. The key is as long as the source, so this check bounds both.
fn bounded_key(source: &GrammarSource) -> Result<String, TextError> {
    let problem = |bytes: usize| format!("{bytes} bytes long, at most {MAX_GRAMMAR_BYTES} are accepted");
    let key = source.key();
    if key.len() <= MAX_GRAMMAR_BYTES {
        return Ok(key);
    }
    if let GrammarSource::JsonParts { parts, .. } = source {
        for (part, SchemaPart { schema, .. }) in parts.iter().enumerate() {
            let bytes = schema.to_string().len();
            if bytes > MAX_GRAMMAR_BYTES {
                return Err(TextError::Schema { part, problem: problem(bytes) });
            }
        }
    }
    Err(TextError::Grammar(problem(key.len())))
}

/// Counts the threads that compile a grammar now.
#[derive(Default)]
struct Compiling {
    threads: Mutex<usize>,
    ended: Condvar,
}

/// A permit to compile; dropping it frees the place.
struct Turn(Arc<Compiling>);

impl Turn {
    fn take(compiling: &Arc<Compiling>) -> Result<Self, TextError> {
        let threads = compiling.threads.lock().expect("nothing panics under this lock");
        let (mut threads, waited) = compiling
            .ended
            .wait_timeout_while(threads, COMPILE_TIMEOUT, |threads| *threads >= MAX_COMPILING)
            .expect("nothing panics under this lock");
        if waited.timed_out() {
            return Err(TextError::Grammar("others take too long to compile; try again".into()));
        }
        *threads += 1;
        Ok(Self(Arc::clone(compiling)))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *self.0.threads.lock().expect("nothing panics under this lock") -= 1;
        self.0.ended.notify_one();
    }
}

impl Vocabulary {
    fn factory(self: &Arc<Self>) -> Result<ParserFactory, TextError> {
        let refuse = |problem: String| TextError::Grammar(format!("this model takes no grammars: {problem}"));
        if self.stops.is_empty() {
            return Err(refuse("no token ends its answers".into()));
        }
        let bytes = |id: u32| {
            let bytes = if is_set(&self.text, id) { self.tokenizer.token_bytes(id) } else { None };
            bytes.filter(|bytes| bytes.len() <= MAX_TOKEN_BYTES).unwrap_or_default()
        };
        let tokens: Vec<Vec<u8>> = (0..self.rows as u32).map(bytes).collect();
        let total: usize = tokens.iter().map(Vec::len).sum();
        if total > MAX_VOCABULARY_BYTES {
            return Err(refuse(format!("its vocabulary has {total} bytes, {MAX_VOCABULARY_BYTES} fit")));
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

/// The tokenizer as llguidance sees it.
struct Environment {
    vocabulary: Arc<Vocabulary>,
    trie: TokTrie,
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// Tokenizes a text that the grammar forces. The tokenizer's own ids are preferred, because the model was trained
    /// on them.
    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            let ids = self.vocabulary.tokenizer.encode(text, false).unwrap_or_default();
            // A control token written out in a grammar is text, and must not become that token's id.
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
    /// A constraint for a new answer, which shares no state with other answers.
    pub fn start(&self) -> Constraint {
        Constraint::new(&self.vocabulary, self.matcher.deep_clone(), Applies::Yes, TIME)
    }

    /// A constraint for a new answer that may be any text. The grammar applies only to an answer whose first character
    /// other than white space is `{` or `[`, from that character on.
    pub fn start_if_opened(&self) -> Constraint {
        Constraint { applies: Applies::IfOpened, ..self.start() }
    }
}

impl Constraint {
    fn new(vocabulary: &Arc<Vocabulary>, matcher: Matcher, applies: Applies, time: Duration) -> Self {
        let clock = Clock::new(matcher.cancellation_handle().unwrap_or_default());
        Self { vocabulary: Arc::clone(vocabulary), matcher, applies, time, clock }
    }

    /// Runs the matcher, and charges the time to the answer; an error once the answer's time is over.
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
        let Vocabulary { blanks, openers, .. } = &*self.vocabulary;
        if self.applies == Applies::IfOpened && !is_set(blanks, id) {
            self.applies = if is_set(openers, id) { Applies::Yes } else { Applies::No };
        }
        if self.applies != Applies::Yes {
            return Ok(());
        }
        // The allowance does not accumulate beyond `TIME`: a token may not spend what a thousand tokens before it
        // saved.
        self.time = (self.time + TIME_PER_TOKEN).min(TIME);
        self.timed(|matcher| matcher.consume_token(id))
    }

    /// The ids that may come next, at least one: `id` is bit `id % 32` of word `id / 32`. Where the grammar may end,
    /// the mask includes the ids that end the answer. `may_end = false` excludes them, unless nothing else may come.
    pub fn mask(&mut self, may_end: bool) -> Result<Arc<[u32]>, TextError> {
        let vocabulary = Arc::clone(&self.vocabulary);
        let Vocabulary { text, ends, all, all_but_ends, openers, .. } = &*vocabulary;
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
            return Err(TextError::Grammar("no text of this model's vocabulary can follow it".into()));
        }
        Ok(mask)
    }

    /// Whether the answer is free text, to which the grammar will never apply.
    pub fn is_free(&self) -> bool {
        self.applies == Applies::No
    }

    /// The mask of the ids that end an answer.
    pub fn ends(&self) -> Arc<[u32]> {
        Arc::clone(&self.vocabulary.ends)
    }
}

/// Cancels one answer's grammar when its time is over. One thread watches the clocks of all answers.
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
    /// The process's clocks; the first grammar creates them.
    fn get() -> &'static Self {
        static CLOCKS: OnceLock<Clocks> = OnceLock::new();
        CLOCKS.get_or_init(|| {
            // The new thread waits in `get` until this initialization ends.
            let look = thread::Builder::new().name("grammar clock".into()).spawn(|| Clocks::get().look());
            if let Err(error) = look {
                tracing::warn!(
                    "no thread that stops a grammar under way: it is stopped behind a mask: {error}"
                );
            }
            Clocks { start: Instant::now(), all: Mutex::default(), more: Condvar::new() }
        })
    }

    /// Cancels constraints whose time is over, at intervals, as long as there are any.
    fn look(&self) {
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
            thread::sleep(LOOK_AGAIN);
        }
    }
}

/// A mask of `rows` bits in which the bits of `ids` are set.
fn words(rows: usize, ids: impl Iterator<Item = u32>) -> Vec<u32> {
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
    fn a_clock_stops_what_it_is_for_and_nothing_else() {
        let [late, never] = [CancellationHandle::default(), CancellationHandle::default()];
        let (clock, other) = (Clock::new(late.clone()), Clock::new(never.clone()));
        clock.stop_at(Some(Instant::now() + 3 * LOOK_AGAIN));
        assert!(!late.is_cancelled());
        let since = Instant::now();
        while !late.is_cancelled() {
            assert!(since.elapsed() < Duration::from_secs(30), "nobody looks");
            thread::sleep(LOOK_AGAIN);
        }
        assert!(!never.is_cancelled());
        drop((clock, other));
    }

    #[test]
    fn an_answer_whose_time_is_over_ends_alone() {
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
