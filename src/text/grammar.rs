//! Grammars: what an answer must be, as masks over the vocabulary.
//!
//! A [`GrammarSource`] is compiled once ([`Grammars::compile`]); each answer starts a [`Constraint`] of its own, which is told
//! the ids that were drawn and says which may come next. Special tokens never may, but for those that end an answer, and
//! these only where the grammar may end. Parsing is the `llguidance` crate's.
//!
//! A grammar comes with a request, from strangers. Its size, the time and the threads for compiling it, its states, the
//! work for one mask, and the time that an answer's masks take are bounded; what is beyond a bound is a [`TextError`]. Compiling recurses along a schema's references,
//! so it has a thread with a stack for as many as may be in one. White space between tokens of JSON is bounded too: a model
//! that pads would do so for ever.

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
use super::tokenizer::Tokenizer;

/// Longest grammar, in bytes of its text.
pub const MAX_GRAMMAR_BYTES: usize = 256 << 10;
/// Most choices of a [`GrammarSource::Choice`].
pub const MAX_CHOICES: usize = 4096;

/// Grammars that stay compiled.
const CACHED: usize = 32;
/// Time for compiling one; the fuel that llguidance counts ends it long before on any machine, as a rule.
const COMPILE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time that one answer's grammar may take of the engine's thread, for which all others wait: so much in all, and so much for
/// each token. A token takes some 50 µs as a rule; these are far beyond it, for machines that are busy otherwise.
const TIME: Duration = Duration::from_secs(2);
const TIME_PER_TOKEN: Duration = Duration::from_millis(20);
/// Time for finding out which of several schemas cannot be compiled, in all.
const BLAME: Duration = Duration::from_secs(1);
/// How often somebody looks whether it is over.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// Grammars compiled at once, those included that took too long and have not ended yet.
const MAX_COMPILING: usize = 4;
/// References that follow each other need a few KiB each, and a grammar has room for some 10,000 of them.
const COMPILE_STACK_BYTES: usize = 256 << 20;
/// States of one answer's lexer; 1 to 2 KiB each.
const MAX_LEXER_STATES: usize = 50_000;
/// Items of one row of the parser: what may go on at one place in the text. An optional property of an object is four of them;
/// an ambiguous grammar has one for each way to read the text, and the work for a mask grows with their square.
const MAX_ITEMS: usize = 2000;
/// Properties of one object that may be left out: with more, [`MAX_ITEMS`] would end the answer behind the first of them.
const MAX_OPTIONAL: usize = 480;
/// A token longer than that is in no grammar: the trie's nodes count their depth in 10 bits.
const MAX_TOKEN_BYTES: usize = 512;
/// Bytes of all tokens together; the trie counts its nodes in 22 bits.
const MAX_VOCABULARY_BYTES: usize = (1 << 22) - 1;
/// What may stand between two tokens of JSON: nothing, a space, or a line's end and an indentation.
const WHITESPACE: &str = r" |\r?\n[ \t]{0,40}";

/// What an answer must be.
#[derive(Debug, Clone, PartialEq)]
pub enum GrammarSource {
    /// JSON. Of `strict` schemas every keyword is enforced, or it is an error; of others, keywords that cannot be are left
    /// to the model.
    JsonSchema { schema: Value, strict: bool },
    /// Text that matches as a whole; the syntax is that of the `regex` crate, without look-around.
    Regex(String),
    /// The dialect of Lark that llguidance reads; the rule `start` is the answer.
    Lark(String),
    /// One of these texts.
    Choice(Vec<String>),
}

impl GrammarSource {
    /// Any JSON object.
    pub fn json_object() -> Self {
        Self::JsonSchema { schema: json!({"type": "object"}), strict: true }
    }

    /// Its text, in which two that differ differ.
    fn key(&self) -> String {
        match self {
            Self::JsonSchema { schema, strict: true } => format!("strict {schema}"),
            Self::JsonSchema { schema, strict: false } => format!("json {schema}"),
            Self::Regex(regex) => format!("regex {regex}"),
            Self::Lark(grammar) => format!("lark {grammar}"),
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

/// Of the objects that a schema describes, the most properties of one that may be left out.
fn most_optional(schema: &Value) -> Option<usize> {
    let of_all = |schemas: &mut dyn Iterator<Item = &Value>| schemas.filter_map(most_optional).max();
    match schema {
        Value::Object(map) => {
            let required = map.get("required").and_then(Value::as_array).into_iter().flatten();
            let required: HashSet<&str> = required.filter_map(Value::as_str).collect();
            let properties = map.get("properties").and_then(Value::as_object);
            let own =
                properties.map(|all| all.keys().filter(|name| !required.contains(name.as_str())).count());
            let inner = map.iter().filter_map(|(keyword, value)| match (keyword.as_str(), value) {
                // Data, whatever it looks like.
                ("const" | "enum" | "default" | "examples", _) => None,
                // Names of their own, and schemas behind them.
                ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(named)) => {
                    of_all(&mut named.values())
                }
                (_, value) => most_optional(value),
            });
            inner.max().max(own)
        }
        Value::Array(items) => of_all(&mut items.iter()),
        _ => None,
    }
}

/// The first place of a schema where llguidance 1.9 lets a number be the bound that it excludes: a whole one, where the bound
/// on the other side has the same integer part.
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

/// Compiles grammars for one model, and keeps the last few.
pub struct Grammars {
    vocabulary: Arc<Vocabulary>,
    /// Made by [`Grammars::prepare`], or for the first grammar: it takes a second for a large vocabulary.
    factory: OnceLock<Result<Arc<ParserFactory>, TextError>>,
    /// Last used first.
    cache: Mutex<Vec<(String, Grammar)>>,
    compiling: Arc<Compiling>,
    /// Since the start, those that failed too.
    compiled: AtomicU64,
}

/// What all grammars of one model share.
struct Vocabulary {
    tokenizer: Tokenizer,
    /// Ids are `0..rows`.
    rows: usize,
    /// Those of `rows` that end an answer.
    stops: Vec<TokenId>,
    /// Bit `id % 32` of word `id / 32`, as in every mask here: ids that stand for text.
    text: Vec<u32>,
    /// Ids that end an answer.
    ends: Arc<[u32]>,
    /// What free text may go on with: all ids, also special ones, and those that no token has.
    all: Arc<[u32]>,
    all_but_ends: Arc<[u32]>,
    /// Ids that are nothing but white space.
    blanks: Vec<u32>,
    /// Ids whose first character beside white space opens an object or an array.
    openers: Vec<u32>,
}

/// A grammar, compiled.
#[derive(Clone)]
pub struct Grammar {
    vocabulary: Arc<Vocabulary>,
    /// At its start.
    matcher: Arc<Matcher>,
}

/// Where one answer stands in its grammar.
pub struct Constraint {
    vocabulary: Arc<Vocabulary>,
    matcher: Matcher,
    holds: Constrains,
    /// That is left of what it may take.
    time: Duration,
    clock: Arc<Clock>,
}

impl Clone for Constraint {
    fn clone(&self) -> Self {
        let Self { vocabulary, matcher, holds, time, .. } = self;
        Self::new(vocabulary, matcher.clone(), *holds, *time)
    }
}

/// Whether an answer is held to its grammar.
#[derive(Clone, Copy, PartialEq)]
enum Constrains {
    Yes,
    /// Nothing but white space has come.
    IfOpened,
    No,
}

impl Grammars {
    /// For a model with `rows` ids, of which those of `stop_token_ids` end an answer.
    pub fn new(tokenizer: Tokenizer, rows: usize, stop_token_ids: &[u32]) -> Self {
        let stops: Vec<TokenId> = stop_token_ids.iter().copied().filter(|id| (*id as usize) < rows).collect();
        let is_text = |id: u32| !tokenizer.is_special(id) && !stops.contains(&id) && tokenizer.contains(id);
        let text = words(rows, (0..rows as u32).filter(|id| is_text(*id)));
        let ends = words(rows, stops.iter().copied()).into();
        let all = words(rows, 0..rows as u32).into();
        let all_but_ends = words(rows, (0..rows as u32).filter(|id| !stops.contains(id))).into();
        let starts = |id: u32, with: fn(&[u8]) -> bool| {
            holds(&text, id) && tokenizer.token_bytes(id).is_some_and(|bytes| with(bytes.trim_ascii_start()))
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

    /// Makes what the first grammar would wait for. What can go wrong with it, that grammar is told.
    pub fn prepare(&self) {
        let _ = self.factory();
    }

    /// Whether the next grammar does not wait for that.
    pub fn is_prepared(&self) -> bool {
        self.factory.get().is_some()
    }

    fn factory(&self) -> Result<Arc<ParserFactory>, TextError> {
        self.factory.get_or_init(|| self.vocabulary.factory().map(Arc::new)).clone()
    }

    /// Takes up to [`COMPILE_TIMEOUT`], a few milliseconds as a rule; at once where the same one was compiled lately, or where
    /// its text alone shows what is wrong with it.
    pub fn compile(&self, source: &GrammarSource) -> Result<Grammar, TextError> {
        let key = bounded_key(source)?;
        if let Some(grammar) = self.cached(&key) {
            return Ok(grammar);
        }
        let grammar = self.compiled_within(source.grammar()?, COMPILE_TIMEOUT)?;
        self.keep(key, grammar.clone());
        Ok(grammar)
    }

    /// The first of `parts` that is to blame where `whole`, which has them all, cannot be compiled, and why; none where that is
    /// no single one, or where nobody finds out within [`BLAME`]. What their texts alone show costs nothing, and where that is
    /// what is wrong with `whole` too, nothing is compiled. No part is kept: nobody asks for it.
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
                // One that was not done in time may be sound.
                return (since.elapsed() < BLAME).then_some((part, error));
            }
        }
        None
    }

    /// Grammars that were compiled since the start, those that failed too.
    pub fn compiled(&self) -> u64 {
        self.compiled.load(Ordering::Relaxed)
    }

    fn compiled_within(&self, top: TopLevelGrammar, patience: Duration) -> Result<Grammar, TextError> {
        let matcher = self.matcher(self.factory()?, top, patience)?;
        let grammar = Grammar { vocabulary: Arc::clone(&self.vocabulary), matcher: Arc::new(matcher) };
        // A grammar without a first id is none; and its first mask names what is wrong with it.
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
            // Nobody may wait any more.
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

/// What there is to compile, or what its text alone shows to be wrong with it.
fn read(source: &GrammarSource) -> Result<TopLevelGrammar, TextError> {
    bounded_key(source)?;
    source.grammar()
}

/// A key is as long as the text of its grammar, and that has a bound.
fn bounded_key(source: &GrammarSource) -> Result<String, TextError> {
    let key = source.key();
    if key.len() > MAX_GRAMMAR_BYTES {
        let problem = format!("{} bytes long, at most {MAX_GRAMMAR_BYTES} are accepted", key.len());
        return Err(TextError::Grammar(problem));
    }
    Ok(key)
}

/// Those that compile a grammar now.
#[derive(Default)]
struct Compiling {
    threads: Mutex<usize>,
    ended: Condvar,
}

/// A place among them, free again when dropped.
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
            let bytes = if holds(&self.text, id) { self.tokenizer.token_bytes(id) } else { None };
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

/// What llguidance sees of the tokenizer.
struct Environment {
    vocabulary: Arc<Vocabulary>,
    trie: TokTrie,
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// As the model was taught to write the text, where a grammar leaves no choice of it.
    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            let ids = self.vocabulary.tokenizer.encode(text, false).unwrap_or_default();
            // A control token written out in a grammar is text, and not that token.
            let is_text =
                |id: &TokenId| (*id as usize) < self.vocabulary.rows && holds(&self.vocabulary.text, *id);
            if ids.iter().all(is_text) && self.trie.decode_raw(&ids) == text.as_bytes() {
                ids
            } else {
                self.trie.greedy_tokenize(text.as_bytes())
            }
        })
    }
}

impl Grammar {
    /// For a new answer. Nothing of it is shared with other answers.
    pub fn start(&self) -> Constraint {
        Constraint::new(&self.vocabulary, self.matcher.deep_clone(), Constrains::Yes, TIME)
    }

    /// For a new answer, which may be any text: only one that begins with `{` or `[`, behind white space or none, is held to
    /// the grammar from there on.
    pub fn start_if_opened(&self) -> Constraint {
        Constraint { holds: Constrains::IfOpened, ..self.start() }
    }
}

impl Constraint {
    fn new(vocabulary: &Arc<Vocabulary>, matcher: Matcher, holds: Constrains, time: Duration) -> Self {
        let clock = Clock::new(matcher.cancellation_handle().unwrap_or_default());
        Self { vocabulary: Arc::clone(vocabulary), matcher, holds, time, clock }
    }

    /// What llguidance does within the time that is left.
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

    /// Takes the next id of the answer, one that the last mask allowed.
    pub fn push(&mut self, id: u32) -> Result<(), TextError> {
        let Vocabulary { blanks, openers, .. } = &*self.vocabulary;
        if self.holds == Constrains::IfOpened && !holds(blanks, id) {
            self.holds = if holds(openers, id) { Constrains::Yes } else { Constrains::No };
        }
        if self.holds != Constrains::Yes {
            return Ok(());
        }
        // What a thousand tokens did not need is not for one to take.
        self.time = (self.time + TIME_PER_TOKEN).min(TIME);
        self.timed(|matcher| matcher.consume_token(id))
    }

    /// Which ids may come next, at least one: bit `id % 32` of word `id / 32`. Ids that end the answer are among them where
    /// the grammar may end, unless `may_end` says that they may not yet; where nothing else may come, they are nevertheless.
    pub fn mask(&mut self, may_end: bool) -> Result<Arc<[u32]>, TextError> {
        let vocabulary = Arc::clone(&self.vocabulary);
        let Vocabulary { text, ends, all, all_but_ends, openers, .. } = &*vocabulary;
        let free = if may_end { all } else { all_but_ends };
        if self.holds == Constrains::No {
            return Ok(Arc::clone(free));
        }
        let mask = self.timed(Matcher::compute_mask_or_eos)?;
        let and = |allowed: &[u32]| -> Vec<u32> {
            mask.as_slice().iter().zip(allowed).map(|(mask, allowed)| mask & allowed).collect()
        };
        let texts = and(text);
        if self.holds == Constrains::IfOpened {
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

    /// Whether the answer is not held to the grammar, nor will be.
    pub fn is_free(&self) -> bool {
        self.holds == Constrains::No
    }

    /// The ids that end an answer, as a mask.
    pub fn ends(&self) -> Arc<[u32]> {
        Arc::clone(&self.vocabulary.ends)
    }
}

/// Stops what one answer's grammar does when its time is over. All that are there are looked after by one thread.
struct Clock {
    /// Milliseconds since [`Clocks::start`]; never is the largest number.
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
    /// The process's, from the first grammar on.
    fn get() -> &'static Self {
        static CLOCKS: OnceLock<Clocks> = OnceLock::new();
        CLOCKS.get_or_init(|| {
            // It begins by waiting for what is made here.
            let look = thread::Builder::new().name("grammar clock".into()).spawn(|| Clocks::get().look());
            if let Err(error) = look {
                tracing::warn!(
                    "no thread that stops a grammar under way: it is stopped behind a mask: {error}"
                );
            }
            Clocks { start: Instant::now(), all: Mutex::default(), more: Condvar::new() }
        })
    }

    /// Looks at them again and again, while there are any.
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

/// A mask of `rows` bits with these set.
fn words(rows: usize, ids: impl Iterator<Item = u32>) -> Vec<u32> {
    let mut words = vec![0; rows.div_ceil(32)];
    for id in ids {
        words[id as usize / 32] |= 1 << (id % 32);
    }
    words
}

fn holds(words: &[u32], id: u32) -> bool {
    words[id as usize / 32] >> (id % 32) & 1 == 1
}

/// What llguidance says, as the person who wrote the grammar should read it: one line, and no state of the parser.
fn problem(message: &str) -> TextError {
    const MAX_CHARS: usize = 160;
    // Where it panics it says so itself, and catches it.
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
        // Of several lines the one that says why.
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
