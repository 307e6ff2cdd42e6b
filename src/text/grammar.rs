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

use std::collections::HashSet;
use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{CancellationHandle, JsonCompileOptions, Matcher, ParserFactory};
use serde_json::{Value, json};

use super::error::TextError;
use super::gbnf;
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
/// Time limit for finding out which of several schemas cannot be compiled, for all of them together.
const BLAME: Duration = Duration::from_secs(1);
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
/// Most optional properties of one object. With more, [`MAX_ITEMS`] would end the answer behind the first of them.
const MAX_OPTIONAL: usize = 480;
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
            Self::Regex(regex) => format!("regex {regex}"),
            Self::Lark(grammar) => format!("lark {grammar}"),
            Self::Gbnf(grammar) => format!("gbnf {grammar}"),
            Self::Choice(choices) => format!("choice {}", json!(choices)),
        }
    }

    fn grammar(&self) -> Result<TopLevelGrammar, TextError> {
        let refuse = |problem: String| Err(TextError::Grammar(problem));
        match self {
            Self::JsonSchema { schema, strict } => {
                if let Some(n) = most_optional(schema).filter(|n| *n > MAX_OPTIONAL) {
                    let problem = "properties of one object are optional";
                    return refuse(format!(
                        "{n} {problem}, at most {MAX_OPTIONAL} are supported; require some of them"
                    ));
                }
                let mut schema = match schema {
                    Value::Bool(true) => json!({}),
                    Value::Object(_) => schema.clone(),
                    Value::Bool(false) => return refuse("the schema is false: no JSON matches it".into()),
                    _ => return refuse("a schema is an object".into()),
                };
                if *strict && let Some(problem) = unenforced_bound(&schema) {
                    return refuse(problem);
                }
                let options = JsonCompileOptions {
                    whitespace_pattern: Some(WHITESPACE.into()),
                    lenient: !strict,
                    ..JsonCompileOptions::default()
                };
                options.apply_to(&mut schema);
                Ok(TopLevelGrammar::from_json_schema(schema))
            }
            Self::Regex(regex) => Ok(TopLevelGrammar::from_regex(regex)),
            Self::Lark(grammar) if grammar.contains("::=") => {
                refuse("expected Lark, where a rule is written \"start: ...\", and not with \"::=\"".into())
            }
            Self::Lark(grammar) => Ok(TopLevelGrammar::from_lark(grammar.clone())),
            Self::Gbnf(grammar) => match gbnf::to_lark(grammar).map_err(TextError::Grammar)? {
                lark if lark.len() > MAX_GRAMMAR_BYTES => refuse(format!(
                    "{} bytes long as Lark, at most {MAX_GRAMMAR_BYTES} are accepted",
                    lark.len()
                )),
                lark => Ok(TopLevelGrammar::from_lark(lark)),
            },
            Self::Choice(choices) if choices.is_empty() => refuse("there is nothing to choose from".into()),
            Self::Choice(choices) if choices.len() > MAX_CHOICES => {
                refuse(format!("{} choices, at most {MAX_CHOICES} are accepted", choices.len()))
            }
            Self::Choice(choices) => {
                // Lark writes strings as JSON does.
                let choices: Vec<String> = choices.iter().map(|choice| json!(choice).to_string()).collect();
                Ok(TopLevelGrammar::from_lark(format!("start: {}", choices.join(" | "))))
            }
        }
    }
}

/// The largest number of optional properties of any object that a schema describes.
fn most_optional(schema: &Value) -> Option<usize> {
    let largest = |schemas: &mut dyn Iterator<Item = &Value>| schemas.filter_map(most_optional).max();
    match schema {
        Value::Object(map) => {
            let required = map.get("required").and_then(Value::as_array).into_iter().flatten();
            let required: HashSet<&str> = required.filter_map(Value::as_str).collect();
            let properties = map.get("properties").and_then(Value::as_object);
            let own =
                properties.map(|all| all.keys().filter(|name| !required.contains(name.as_str())).count());
            let inner = map.iter().filter_map(|(keyword, value)| match (keyword.as_str(), value) {
                // These keywords hold data, which is no schema even where it looks like one.
                ("const" | "enum" | "default" | "examples", _) => None,
                // These keywords hold schemas under names that the schema's author chose.
                ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(named)) => {
                    largest(&mut named.values())
                }
                (_, value) => most_optional(value),
            });
            inner.max().max(own)
        }
        Value::Array(items) => largest(&mut items.iter()),
        _ => None,
    }
}

/// The first place in a schema where llguidance 1.9 accepts a number that an exclusive bound excludes. That happens
/// with a whole number as the exclusive bound, if the bound on the other side has the same integer part.
fn unenforced_bound(schema: &Value) -> Option<String> {
    let bound = |name: &str| schema.get(name).and_then(Value::as_f64);
    for (excluded, others) in [
        ("exclusiveMinimum", ["maximum", "exclusiveMaximum"]),
        ("exclusiveMaximum", ["minimum", "exclusiveMinimum"]),
    ] {
        let Some(whole) = bound(excluded).filter(|bound| bound.fract() == 0.0) else { continue };
        let near = |name: &&str| bound(name).is_some_and(|other| other.trunc() == whole);
        if let Some(other) = others.into_iter().find(near) {
            return Some(format!("{excluded} {whole} cannot be enforced beside a {other} within 1 of it"));
        }
    }
    match schema {
        Value::Object(map) => map.values().find_map(unenforced_bound),
        Value::Array(items) => items.iter().find_map(unenforced_bound),
        _ => None,
    }
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
        let grammar = self.compiled_within(source.grammar()?, COMPILE_TIMEOUT)?;
        self.keep(key, grammar.clone());
        Ok(grammar)
    }

    /// Finds the first of `parts` that cannot be compiled, and says why. `whole` is the grammar that has all parts and
    /// failed. Returns `None` where no single part is at fault, or where [`BLAME`] is over first. Errors that the texts
    /// alone show are found without compiling; where such an error is in `whole`, nothing is compiled. No part enters
    /// the cache, since nobody asks for it again.
    pub fn blame<T>(
        &self,
        whole: &GrammarSource,
        parts: impl IntoIterator<Item = (T, GrammarSource)>,
    ) -> Option<(T, TextError)> {
        let mut sound = Vec::new();
        for (part, source) in parts {
            match read(&source) {
                Ok(top) => sound.push((part, top)),
                Err(error) => return Some((part, error)),
            }
        }
        read(whole).ok()?;
        let since = Instant::now();
        for (part, top) in sound {
            let left = BLAME.checked_sub(since.elapsed())?;
            if let Err(error) = self.compiled_within(top, left) {
                // A part that ran out of time may be sound.
                return (since.elapsed() < BLAME).then_some((part, error));
            }
        }
        None
    }

    /// Number of compilations since the start, failed ones included.
    pub fn compiled(&self) -> u64 {
        self.compiled.load(Ordering::Relaxed)
    }

    fn compiled_within(&self, top: TopLevelGrammar, patience: Duration) -> Result<Grammar, TextError> {
        let matcher = self.matcher(self.factory()?, top, patience)?;
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

    fn matcher(
        &self,
        factory: Arc<ParserFactory>,
        grammar: TopLevelGrammar,
        patience: Duration,
    ) -> Result<Matcher, TextError> {
        let turn = Turn::take(&self.compiling, patience)?;
        self.compiled.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = sync_channel(1);
        let work = move || {
            let parser = factory.create_parser(grammar).map_err(|error| problem(&error.to_string()));
            drop(turn);
            // The receiver may have given up.
            let _ = sender.send(parser.map(|parser| Matcher::new(Ok(parser)).into_cancellable()));
        };
        let thread = thread::Builder::new().name("grammar".into()).stack_size(COMPILE_STACK_BYTES);
        let refuse = |problem: String| TextError::Grammar(problem);
        thread.spawn(work).map_err(|error| refuse(format!("no thread to compile it: {error}")))?;
        match receiver.recv_timeout(patience) {
            Ok(matcher) => matcher,
            Err(RecvTimeoutError::Timeout) => {
                let seconds = patience.as_secs_f64();
                Err(refuse(format!("it takes more than {seconds} s to compile; make it simpler")))
            }
            Err(RecvTimeoutError::Disconnected) => Err(refuse("it cannot be compiled".into())),
        }
    }
}

/// The grammar of a source, or the error that its text alone shows.
fn read(source: &GrammarSource) -> Result<TopLevelGrammar, TextError> {
    bounded_key(source)?;
    source.grammar()
}

/// The source's key in the cache. The key is as long as the source, so this check bounds both.
fn bounded_key(source: &GrammarSource) -> Result<String, TextError> {
    let key = source.key();
    if key.len() > MAX_GRAMMAR_BYTES {
        let problem = format!("{} bytes long, at most {MAX_GRAMMAR_BYTES} are accepted", key.len());
        return Err(TextError::Grammar(problem));
    }
    Ok(key)
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
    fn take(compiling: &Arc<Compiling>, patience: Duration) -> Result<Self, TextError> {
        let threads = compiling.threads.lock().expect("nothing panics under this lock");
        let (mut threads, waited) = compiling
            .ended
            .wait_timeout_while(threads, patience, |threads| *threads >= MAX_COMPILING)
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
        done.map_err(|error| problem(&error.to_string()))
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

/// Rewrites an error of llguidance for the person who wrote the grammar: one line, without the parser's state.
fn problem(message: &str) -> TextError {
    const MAX_CHARS: usize = 160;
    // llguidance catches its own panics and reports them with this prefix.
    if message.starts_with("panic:") {
        return TextError::Grammar("it cannot be compiled: llguidance met a bug in itself".into());
    }
    let line = message.lines().next().unwrap_or_default().trim();
    let said = if let Some(keywords) = line.strip_prefix("Unimplemented keys: ") {
        format!("keywords that are not supported: {keywords}")
    } else if line.starts_with("oneOf constraints") {
        "oneOf is supported where types or constants tell its options apart; use anyOf".to_owned()
    } else if line.starts_with("Only absolute $ref") {
        let reference = line.rsplit("; ref ").next().unwrap_or_default();
        format!("$ref is supported within the schema alone (\"#/...\"), not {reference}")
    } else if line.contains("regex parse error") {
        // The error of the regex crate has several lines, and this one gives the reason.
        let why = message.lines().find_map(|line| line.trim().strip_prefix("error: "));
        format!("a regular expression cannot be read: {}", why.unwrap_or("it is none"))
    } else {
        line.to_owned()
    };
    TextError::Grammar(said.chars().take(MAX_CHARS).collect())
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
