//! Jinja with bounded cost: minijinja parses and runs a template, and this file limits the time and memory of a
//! rendering.
//!
//! minijinja limits the number of instructions, which is not enough: a single instruction may double a string, search a
//! long text in another, or print a list that contains another list twice, nested forty times. Freeing a value recurses
//! into nested lists. So this file inserts instructions into the compiled template. Before each instruction whose work
//! depends on its operands, one counts the size of the operands. After each instruction that makes a value, one counts
//! the value. The arguments of filters, tests, functions and methods are counted as well, and so is the output.
//!
//! | bound | on |
//! |---|---|
//! | [`MAX_VALUE_BYTES`] | one value: its text, plus [`VALUE_BYTES`] for each occurrence of a value in it |
//! | [`MAX_WORK_BYTES`] | all values that one rendering reads and makes, measured in the same way |
//! | [`MAX_WRITTEN_BYTES`] | all output of a rendering, including captured output that becomes a value |
//! | [`MAX_DEPTH`] | nesting of values |
//! | [`FUEL`], [`MAX_RECURSION`] | instructions; nesting of macros, blocks and loops |
//! | [`MAX_TAG_TOKENS`], [`COMPILE_STACK_BYTES`] | the recursion of the compiler |
//! | [`TIME_LIMIT`] | any cost that the other bounds miss |
//!
//! Therefore every value can be printed, compared and freed at bounded cost, and the memory of a rendering is bounded
//! by its budget of work. A namespace can contain data, but not a namespace, a loop or a macro. So values have no
//! reference cycles, and all values are freed when the rendering ends.
//!
//! minijinja makes some lists lazily (a slice, a sum, the result of a filter). This file evaluates them immediately,
//! because minijinja reads lazy lists of lazy lists by recursion. A template cannot include, import or extend another
//! one, because there is only one. minijinja's instructions may change in any release, so `Cargo.toml` pins its
//! version.

use std::collections::BTreeMap;
use std::io;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use indexmap::IndexMap;
use jiff::Timestamp;
use minijinja::machinery::{
    CompiledTemplate, Instruction, Instructions, TemplateConfig, Token, Vm, WhitespaceConfig,
    make_string_output, tokenize,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Object, Rest, Value, ValueKind, from_args};
use minijinja::{
    AutoEscape, Environment, Error, ErrorKind, State, escape_formatter, filters, functions, tests,
};
use self_cell::self_cell;
use serde_json::Value as Json;

use super::content::{is_python_space, python_trim};
use super::error::MAX_TEXT_BYTES;

/// Largest value, plus the bytes of the conversation.
const MAX_VALUE_BYTES: usize = 4 * MAX_TEXT_BYTES;
/// Most bytes that one rendering reads and makes, plus [`WORK_PER_BYTE`] for each byte of the conversation. Published templates'
/// template needs 3 per byte.
const MAX_WORK_BYTES: usize = 512 << 20;
const WORK_PER_BYTE: usize = 16;
/// Most bytes that one rendering writes, plus [`WRITTEN_PER_BYTE`] for each byte of the conversation. The output of a
/// macro is written twice: by the macro and by its caller.
const MAX_WRITTEN_BYTES: usize = 32 << 20;
const WRITTEN_PER_BYTE: usize = 8;
/// The size of a value within another value, in addition to its text.
const VALUE_BYTES: usize = 64;
const MAX_DEPTH: usize = 64;
/// The cost of each pass of a loop, and of each outer variable that a macro uses. Both need time and memory in
/// minijinja itself.
const STEP_BYTES: usize = 128;
/// Most instructions of one rendering, inserted ones included. The templates in use run about 50 per message.
pub(super) const FUEL: u64 = 10_000_000;
/// Deepest recursion. A stack of 2 MiB is enough for more.
const MAX_RECURSION: usize = 100;
/// Deepest nesting of filters that apply filters (`map`).
const MAX_FILTERS: usize = 8;
/// Time limit of a rendering. A rendering usually takes about 100 µs.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// Most tokens of one tag. The longest known tag, a table of languages, has about 2,500. The time to compile an
/// expression is quadratic in the number of its operators.
const MAX_TAG_TOKENS: usize = 4096;
/// Stack size of the thread that compiles. Each operator of an expression, and each `elif`, needs one or two KiB.
const COMPILE_STACK_BYTES: usize = 256 << 20;

const NAME: &str = "chat";
/// The block with the whole template. No template can use this name.
const MAIN_BLOCK: &str = "";
/// The name under which a rendering's state keeps its [`Meter`].
const METER: &str = "meter";

/// The bound that a rendering exceeded.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Exceeded(pub String);

fn exceeded(problem: impl Into<String>) -> Error {
    Error::from(ErrorKind::InvalidOperation).with_source(Exceeded(problem.into()))
}

type Blocks<'source> = BTreeMap<&'source str, Instructions<'source>>;

self_cell!(
    /// A compiled template.
    pub(super) struct Program {
        owner: Box<str>,
        #[covariant]
        dependent: Blocks,
    }

    impl {Debug}
);

impl Program {
    /// Compiles a template in a thread with a large stack. The outer error is that the thread cannot be started.
    pub(super) fn compile(source: &str) -> io::Result<Result<Self, Error>> {
        let compile = || Self::try_new(source.into(), |source| compile(source));
        let program = thread::scope(|scope| {
            let thread = thread::Builder::new().name("template".into()).stack_size(COMPILE_STACK_BYTES);
            thread.spawn_scoped(scope, compile).map(|thread| thread.join())
        });
        Ok(program?.unwrap_or_else(|_| Err(exceeded("internal error of minijinja"))))
    }

    /// Renders the template with `context` into `out`. The conversation in `context` has `conversation_bytes`.
    /// Functions of the template use `now` as the current time.
    pub(super) fn render(
        &self,
        environment: &Environment<'static>,
        context: Value,
        conversation_bytes: usize,
        now: Timestamp,
        out: impl io::Write,
    ) -> Result<(), Error> {
        let meter = Meter { now, ..Meter::new(conversation_bytes, Instant::now() + TIME_LIMIT) };
        self.render_by(environment, context, meter, out)
    }

    fn render_by(
        &self,
        environment: &Environment<'static>,
        context: Value,
        meter: Meter,
        out: impl io::Write,
    ) -> Result<(), Error> {
        // minijinja gives access to its state only after a rendering has started. So an empty template creates the
        // state, the meter is stored in it, and then the block with the whole template is rendered to `out`.
        let (start, mut nothing) = (Instructions::new(NAME, ""), String::new());
        let nowhere = &mut make_string_output(&mut nothing);
        let vm = Vm::new(environment);
        let (_, mut state) = vm.eval(&start, context, self.borrow_dependent(), nowhere, AutoEscape::None)?;
        state.set_temp(METER, Value::from_object(meter));
        state.render_block_to_write(MAIN_BLOCK, out)
    }
}

/// Refuses sources that must not be compiled: those with the operator `*`, which the compiler evaluates if its operands
/// are constants, and those with a tag that is too long.
fn check_tags(source: &str) -> Result<(), Error> {
    let mut tokens = 0;
    for token in tokenize(source, false, SyntaxConfig, whitespace()) {
        // The compiler reports syntax errors.
        let Ok((token, span)) = token else { break };
        tokens += 1;
        let line = span.start_line;
        match token {
            Token::VariableStart | Token::BlockStart => tokens = 0,
            Token::Mul | Token::Pow => {
                let problem =
                    "uses the operator *, which is refused because its cost has no bound; write it without *";
                return Err(exceeded(format!("line {line} {problem}")));
            }
            _ if tokens > MAX_TAG_TOKENS => {
                let problem = format!("is in a tag of more than {MAX_TAG_TOKENS} tokens; split the tag");
                return Err(exceeded(format!("line {line} {problem}")));
            }
            _ => {}
        }
    }
    Ok(())
}

fn whitespace() -> WhitespaceConfig {
    WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true }
}

fn compile(source: &str) -> Result<Blocks<'_>, Error> {
    check_tags(source)?;
    let config = TemplateConfig {
        syntax_config: SyntaxConfig,
        ws_config: whitespace(),
        default_auto_escape: Arc::new(|_| AutoEscape::None),
    };
    let compiled = CompiledTemplate::new(NAME, source, &config)?;
    let mut blocks = Blocks::from([(MAIN_BLOCK, bounded(&compiled.instructions)?)]);
    for (name, code) in &compiled.blocks {
        blocks.insert(name, bounded(code)?);
    }
    Ok(blocks)
}

/// Names of the inserted instructions. Each is a filter whose name no template can use. The filters that count operands
/// return the operands unchanged.
const READS: &str = "#reads";
const JOINS: &str = "#joins";
const SIZES: &str = "#sizes";
const ITEM: &str = "#item";
const COMPARES: &str = "#compares";
const CONTAINS: &str = "#contains";
const KEEPS: &str = "#keeps";
const CHANGES: &str = "#changes";
const STEP: &str = "#step";
const MADE: &str = "#made";
const NESTED: &str = "#nested";

/// Inserts the counting instructions into a template's code.
fn bounded<'source>(code: &Instructions<'source>) -> Result<Instructions<'source>, Error> {
    let instructions: Vec<_> = (0..code.len() as u32).filter_map(|at| code.get(at).cloned()).collect();
    let mut reached = vec![false; instructions.len() + 1];
    for mut instruction in instructions.iter().cloned() {
        target(&mut instruction).into_iter().for_each(|at| reached[*at as usize] = true);
    }
    // `begins[i]` is the new position of instruction `i`, or of the counting instruction in front of it.
    let mut begins = Vec::with_capacity(reached.len());
    let mut parts = Vec::with_capacity(instructions.len());
    let mut length = 0;
    for (at, instruction) in instructions.iter().enumerate() {
        let before = at.checked_sub(1).filter(|_| !reached[at]);
        let constant = before.and_then(|before| small_constant(&instructions[before]));
        let line = code.get_line(at as u32);
        let part = with_counting(instruction, constant).map_err(|problem| {
            exceeded(line.map_or(problem.to_owned(), |line| format!("line {line} {problem}")))
        })?;
        begins.push(length);
        length += part.len() as u32;
        parts.push(part);
    }
    begins.push(length);
    let mut bounded = Instructions::new(code.name(), code.source());
    for (at, part) in (0u32..).zip(parts) {
        for mut instruction in part {
            if let Some(at) = target(&mut instruction) {
                *at = begins[*at as usize];
            }
            match (code.get_span(at), code.get_line(at)) {
                (Some(span), _) => bounded.add_with_span(instruction, span),
                (None, Some(line)) => bounded.add_with_line(instruction, line as u16),
                (None, None) => bounded.add(instruction),
            };
        }
    }
    Ok(bounded)
}

/// The position to which an instruction may jump.
fn target<'a>(instruction: &'a mut Instruction) -> Option<&'a mut u32> {
    match instruction {
        Instruction::Iterate(at)
        | Instruction::Jump(at)
        | Instruction::JumpIfFalse(at)
        | Instruction::JumpIfFalseOrPop(at)
        | Instruction::JumpIfTrueOrPop(at)
        | Instruction::BuildMacro(_, at, _) => Some(at),
        _ => None,
    }
}

/// The constant that an instruction loads, if a comparison with it is cheap.
fn small_constant<'a>(instruction: &'a Instruction) -> Option<&'a Value> {
    let Instruction::LoadConst(value) = instruction else { return None };
    let is_small = |value: &&Value| {
        value.as_object().is_none() && value.as_str().is_none_or(|text| text.len() <= VALUE_BYTES)
    };
    Some(value).filter(is_small)
}

/// An instruction with its counting instructions. `constant` is the operand on top of the stack, if it is a small
/// constant. The error text continues a sentence that begins with the line.
fn with_counting<'source>(
    instruction: &Instruction<'source>,
    constant: Option<&Value>,
) -> Result<Vec<Instruction<'source>>, &'static str> {
    use Instruction as I;
    // minijinja caches filters in a table. This index is outside the table, so the filter is not cached.
    const NOT_CACHED: u8 = !0;
    let count = |what: &'static str, operands: usize| I::ApplyFilter(what, Some(operands as u16), NOT_CACHED);
    let before = |what: &'static str, operands: usize| {
        let counted = vec![count(what, operands)];
        let more = (operands > 1).then(|| I::UnpackList(operands));
        counted.into_iter().chain(more).chain([instruction.clone()]).collect::<Vec<_>>()
    };
    let and = |mut part: Vec<I<'source>>, what: &'static str| {
        part.push(count(what, 1));
        part
    };
    let same = vec![instruction.clone()];
    let after = |what: &'static str| and(vec![instruction.clone()], what);
    Ok(match instruction {
        I::EmitRaw(text) => vec![I::LoadConst(Value::from_safe_string((*text).to_owned())), I::Emit],
        I::SetAttr(_) => before(KEEPS, 2),
        I::CallMethod("changed", Some(operands)) => before(CHANGES, (*operands).into()),
        // A lookup by a constant name has a small fixed cost.
        I::GetItem if constant.is_none_or(|key| key.as_str().is_none()) => before(ITEM, 2),
        I::Slice => and(before(SIZES, 4), MADE),
        I::Add => and(before(SIZES, 2), MADE),
        I::StringConcat => vec![count(JOINS, 2)],
        I::In => before(CONTAINS, 2),
        I::Eq | I::Ne | I::Gt | I::Gte | I::Lt | I::Lte if constant.is_none() => before(COMPARES, 2),
        // One of the comparisons above, or `in`: minijinja's API does not say which.
        I::CompareAndPreserve(_) => before(READS, 2),
        I::PushLoop(_) => before(SIZES, 1),
        I::BuildMap(_) | I::BuildKwargs(_) | I::BuildList(_) => after(NESTED),
        I::EndCapture => after(MADE),
        I::Iterate(_) => vec![instruction.clone(), count(STEP, 0), I::DiscardTop],
        I::Enclose(_) | I::BuildMacro(..) => vec![count(STEP, 0), I::DiscardTop, instruction.clone()],
        I::Include(_) | I::LoadBlocks | I::ExportLocals => {
            return Err(
                "includes, imports or extends a template, but there is only one, so this is recursion",
            );
        }
        I::Mul | I::Pow | I::MergeKwargs(_) | I::UnpackLists(_) => return Err("uses the operator *"),
        // All other instructions are listed, so that the compiler reports those that a new version of minijinja adds.
        I::Lookup(_) | I::StoreLocal(_) | I::LoadConst(_) | I::GetAttr(_) | I::GetItem | I::UnpackList(_) => {
            same
        }
        I::Eq | I::Ne | I::Gt | I::Gte | I::Lt | I::Lte | I::Not | I::IsUndefined => same,
        I::Sub | I::Div | I::IntDiv | I::Rem | I::Neg => same,
        I::Jump(_) | I::JumpIfFalse(_) | I::JumpIfFalseOrPop(_) | I::JumpIfTrueOrPop(_) => same,
        I::DupTop | I::DiscardTop | I::Swap | I::PushDidNotIterate | I::GetClosure | I::Return => same,
        I::PushWith | I::PopFrame | I::PopLoopFrame | I::PushAutoEscape | I::PopAutoEscape => same,
        I::CallBlock(_) | I::FastSuper | I::FastRecurse | I::BeginCapture(_) => same,
        // The functions that these call are wrapped, and the wrappers count arguments and results.
        I::Emit | I::ApplyFilter(..) | I::PerformTest(..) => same,
        I::CallFunction(..) | I::CallMethod(..) | I::CallObject(_) => same,
    })
}

/// The remaining budget of one rendering.
#[derive(Debug)]
struct Meter {
    /// Largest size of a value, in bytes.
    largest: usize,
    work: Budget,
    written: Budget,
    /// Current nesting of filters.
    filters: AtomicUsize,
    deadline: Instant,
    now: Timestamp,
}

impl Object for Meter {}

/// The time that the rendering of `state` uses as the current time.
pub(super) fn now(state: &State) -> Timestamp {
    Meter::of(state).now
}

#[derive(Debug)]
struct Budget {
    all: usize,
    left: AtomicUsize,
}

impl Budget {
    fn new(all: usize) -> Self {
        Self { all, left: all.into() }
    }

    fn take(&self, bytes: usize, what: &str) -> Result<(), Error> {
        let left = self.left.load(Ordering::Relaxed).checked_sub(bytes);
        let left =
            left.ok_or_else(|| exceeded(format!("{what} more than {} MiB in total", self.all >> 20)))?;
        self.left.store(left, Ordering::Relaxed);
        Ok(())
    }
}

impl Meter {
    fn new(conversation_bytes: usize, deadline: Instant) -> Self {
        let work = Budget::new(MAX_WORK_BYTES + WORK_PER_BYTE * conversation_bytes);
        let written = Budget::new(MAX_WRITTEN_BYTES + WRITTEN_PER_BYTE * conversation_bytes);
        let largest = MAX_VALUE_BYTES + conversation_bytes;
        Self { largest, work, written, filters: 0.into(), deadline, now: Timestamp::UNIX_EPOCH }
    }

    fn of(state: &State) -> Arc<Self> {
        let meter = state.get_temp(METER).and_then(|meter| meter.downcast_object());
        meter.expect("a rendering begins with its meter")
    }

    /// Refuses a value larger than `largest`.
    fn check(&self, bytes: usize) -> Result<usize, Error> {
        if bytes > self.largest {
            return Err(exceeded(format!("makes a value of more than {} MiB", self.largest >> 20)));
        }
        Ok(bytes)
    }

    /// Charges `bytes` of work, and checks the time.
    fn take(&self, bytes: usize) -> Result<(), Error> {
        self.work.take(bytes, "reads and makes values of")?;
        if Instant::now() > self.deadline {
            return Err(exceeded(format!("takes more than {} s", TIME_LIMIT.as_secs())));
        }
        Ok(())
    }

    fn write(&self, value: &Value) -> Result<(), Error> {
        let bytes = self.deep_size(value)?;
        self.take(bytes)?;
        self.written.take(bytes, "writes")
    }

    /// The size of a value with all values in it. A value that occurs several times is counted several times.
    fn deep_size(&self, value: &Value) -> Result<usize, Error> {
        let mut left = self.largest;
        self.subtract(value, MAX_DEPTH, &mut left)?;
        Ok(self.largest - left)
    }

    fn subtract(&self, value: &Value, depth: usize, left: &mut usize) -> Result<(), Error> {
        let own = value.as_str().map_or(0, str::len) + VALUE_BYTES;
        *left = left.checked_sub(own).map_or_else(|| self.check(usize::MAX), Ok)?;
        let Some(object) = value.as_object() else { return Ok(()) };
        let Some(depth) = depth.checked_sub(1) else {
            return Err(exceeded(format!("nests values more than {MAX_DEPTH} deep")));
        };
        match value.kind() {
            ValueKind::Map => object.try_iter_pairs().into_iter().flatten().try_for_each(|(key, value)| {
                self.subtract(&key, depth, left)?;
                self.subtract(&value, depth, left)
            }),
            _ => {
                object.try_iter().into_iter().flatten().try_for_each(|item| self.subtract(&item, depth, left))
            }
        }
    }

    fn deep_sizes(&self, values: &[Value]) -> Result<usize, Error> {
        values.iter().try_fold(0usize, |sum, value| Ok(sum.saturating_add(self.deep_size(value)?)))
    }
}

/// The size of a value. The values in it count [`VALUE_BYTES`] each, without their contents.
fn size(value: &Value) -> usize {
    value
        .as_str()
        .map_or_else(|| items(value).saturating_mul(VALUE_BYTES), str::len)
        .saturating_add(VALUE_BYTES)
}

/// Number of items of an iteration over the value.
fn items(value: &Value) -> usize {
    match value.as_str() {
        Some(text) => text.chars().count(),
        None => value.as_object().and_then(|object| object.enumerator_len()).unwrap_or(0),
    }
}

/// Computes the cost in bytes of a function or an instruction from its arguments.
type Cost = fn(&Meter, &[Value]) -> Result<usize, Error>;

/// For functions that read all arguments completely.
const ALL: Cost = |meter, given| meter.deep_sizes(given);
/// For functions that read the characters of texts, but not the items of lists and maps.
const TEXTS: Cost = |_, given| {
    Ok(given
        .iter()
        .map(|value| value.as_str().map_or(0, str::len) + VALUE_BYTES)
        .fold(0, usize::saturating_add))
};
/// For functions that read the items of each argument, but not the contents of the items.
const EACH: Cost = |_, given| Ok(given.iter().map(size).fold(0, usize::saturating_add));
/// For functions that read one item of the first argument.
const ONE: Cost = |meter, given| {
    let (value, key) = first(given);
    // Indexing a text or an iterator walks it from the start.
    let is_walked = matches!(value.kind(), ValueKind::String | ValueKind::Iterable);
    Ok(meter.deep_sizes(key)?.saturating_add(if is_walked { size(value) } else { 0 }))
};
/// For functions that apply all other arguments to each item of the first.
const LISTED: Cost = |meter, given| {
    let (list, with) = first(given);
    let list = meter.check(items(list).saturating_mul(VALUE_BYTES))?;
    Ok(list.saturating_add((list / VALUE_BYTES).saturating_mul(meter.deep_sizes(with)?)))
};
/// For functions that compare the items of the first argument with each other.
const SORTED: Cost = |meter, given| {
    let (list, _) = first(given);
    let all = LISTED(meter, given)?.saturating_add(meter.deep_size(list)?);
    Ok(all.saturating_mul(1 + items(list).max(1).ilog2() as usize))
};
/// For functions that compare two arguments up to the first difference.
const COMPARED: Cost = |meter, given| match given {
    [a, b] if a.as_object().is_none() || b.as_object().is_none() => Ok(size(a).min(size(b))),
    _ => ALL(meter, given),
};
/// For functions that search the first argument in the second; a map is searched by key.
const SOUGHT: Cost = |meter, given| match given {
    [key, map] if map.kind() == ValueKind::Map => meter.deep_size(key),
    _ => ALL(meter, given),
};
/// For functions that write the items of the first argument with the second between them.
const JOINED: Cost = |meter, given| {
    let (list, _) = first(given);
    meter.check(LISTED(meter, given)?.saturating_add(meter.deep_size(list)?))
};
/// For functions that write the third argument in place of each occurrence of the second in the first.
const REPLACED: Cost = |meter, given| {
    let times = match given {
        [text, from, ..] => match (text.as_str(), from.as_str()) {
            (Some(text), Some(from)) => text.matches(from).count(),
            _ => meter.deep_size(text)?,
        },
        _ => 0,
    };
    let more = times.saturating_mul(given.get(2).and_then(Value::as_str).map_or(VALUE_BYTES, str::len));
    meter.check(meter.deep_sizes(given)?.saturating_add(more))
};
/// For functions that split the first argument at each occurrence of the second.
const SPLIT: Cost = |meter, given| {
    let (text, at) = first(given);
    let pieces = text.as_str().map_or(0, |text| match at.first().and_then(Value::as_str) {
        Some(at) => text.matches(at).count(),
        None => text.matches(char::is_whitespace).count(),
    });
    let pieces = meter.check(pieces.saturating_mul(VALUE_BYTES))?;
    Ok(meter.deep_sizes(given)?.saturating_add(pieces))
};
/// For functions that search each character of the first argument in the second.
const STRIPPED: Cost = |meter, given| {
    let chars = given.get(1).and_then(Value::as_str).map_or(1, |chars| chars.len().max(1));
    Ok(meter.deep_sizes(given)?.saturating_mul(chars))
};

fn first(given: &[Value]) -> (&Value, &[Value]) {
    given.split_first().unwrap_or((&Value::UNDEFINED, &[]))
}

/// The kind of a function's result.
#[derive(Clone, Copy, PartialEq)]
enum Gives {
    /// A text, a number, or an existing value.
    One,
    List,
    /// Values nested deeper than the arguments.
    Nested,
}

/// Checks the size of a new value, and evaluates it if it is a lazy list.
fn eager(meter: &Meter, value: Value) -> Result<Value, Error> {
    meter.check(size(&value))?;
    match value.kind() {
        ValueKind::Iterable => Ok(value.try_iter()?.collect::<Vec<_>>().into()),
        _ => Ok(value),
    }
}

/// Checks a new value. If the function nests values, their contents are counted as well.
fn made(meter: &Meter, value: Value, gives: Gives) -> Result<Value, Error> {
    let value = eager(meter, value)?;
    if gives == Gives::Nested {
        meter.take(meter.deep_size(&value)?)?;
    }
    if is_data(&value) && !holds_data(&value) {
        return Err(exceeded(ONLY_DATA));
    }
    Ok(value)
}

const ONLY_DATA: &str = "stores a namespace, a loop or a macro where only data can be stored";

/// Whether the value is immutable data and not a namespace, loop or macro. The values in it are data as well, because
/// each new collection is checked when it is made.
fn is_data(value: &Value) -> bool {
    let Some(object) = value.as_object() else { return true };
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => true,
        // The type of maps in a template, and the type of minijinja's maps for structs.
        ValueKind::Map => {
            object.downcast_ref::<IndexMap<Value, Value>>().is_some()
                || object.type_name().ends_with("::StaticKeyMap")
        }
        _ => false,
    }
}

fn holds_data(value: &Value) -> bool {
    let Some(object) = value.as_object() else { return true };
    match value.kind() {
        ValueKind::Map => {
            let mut pairs = object.try_iter_pairs().into_iter().flatten();
            pairs.all(|(key, value)| is_data(&key) && is_data(&value))
        }
        _ => object.try_iter().into_iter().flatten().all(|item| is_data(&item)),
    }
}

/// Calls `function`, and charges its arguments and its result.
fn call(
    state: &State,
    function: impl FnOnce(&[Value]) -> Result<Value, Error>,
    (cost, gives): (Cost, Gives),
    given: &[Value],
) -> Result<Value, Error> {
    let meter = Meter::of(state);
    let cost = cost(&meter, given)?;
    meter.take(cost)?;
    if meter.filters.fetch_add(1, Ordering::Relaxed) >= MAX_FILTERS {
        return Err(exceeded(format!("nests filters more than {MAX_FILTERS} deep")));
    }
    let value = function(given)?;
    meter.filters.fetch_sub(1, Ordering::Relaxed);
    // Quotes and escapes may make a text larger than the arguments.
    meter.take(value.as_str().map_or(0, |text| text.len().saturating_sub(cost)))?;
    if gives == Gives::One { Ok(value) } else { made(&meter, value, gives) }
}

/// An environment with the filters of Jinja2 that have a bounded cost, its tests, and the functions and methods of
/// Python that templates use.
pub(super) fn environment() -> Environment<'static> {
    // Start from an empty environment, so that a new version of minijinja cannot add functions.
    let mut environment = Environment::empty();
    environment.set_debug(false);
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(MAX_RECURSION);
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|out, state, value| {
        Meter::of(state).write(value)?;
        escape_formatter(out, state, value)
    });
    add_checks(&mut environment);
    add_filters(&mut environment);
    add_tests(&mut environment);
    environment.add_global("range", Value::from_function(functions::range));
    add_function(&mut environment, "dict", Value::from_function(functions::dict));
    let namespace = Value::from_function(functions::namespace);
    environment.add_function("namespace", move |state: &State, given: Rest<Value>| {
        if !given.iter().all(holds_data) {
            return Err(exceeded(ONLY_DATA));
        }
        call(state, |given| namespace.call(state, given), (EACH, Gives::One), &given)
    });
    environment
}

pub(super) fn add_function(environment: &mut Environment<'static>, name: &'static str, function: Value) {
    environment.add_function(name, move |state: &State, given: Rest<Value>| {
        call(state, |given| function.call(state, given), (ALL, Gives::Nested), &given)
    });
}

fn add_checks(environment: &mut Environment<'static>) {
    let operands = |given: Rest<Value>| match &given[..] {
        [one] => one.clone(),
        // `UnpackList` pushes the items in reverse.
        all => all.iter().rev().cloned().collect::<Vec<_>>().into(),
    };
    for (name, cost) in [(READS, ALL), (SIZES, EACH), (ITEM, ONE), (COMPARES, COMPARED), (CONTAINS, SOUGHT)] {
        environment.add_filter(name, move |state: &State, given: Rest<Value>| -> Result<Value, Error> {
            let meter = Meter::of(state);
            meter.take(cost(&meter, &given)?)?;
            Ok(operands(given))
        });
    }
    environment.add_filter(JOINS, |state: &State, given: Rest<Value>| {
        call(
            state,
            |given| Ok(Value::from(given.iter().map(Value::to_string).collect::<String>())),
            (ALL, Gives::One),
            &given,
        )
    });
    // `KEEPS` gets a value and the namespace that stores it. `CHANGES` gets a loop and the values that the loop stores
    // for the next pass.
    for (name, kept) in [(KEEPS, 0..1), (CHANGES, 1..usize::MAX)] {
        environment.add_filter(name, move |given: Rest<Value>| {
            let is_kept = |(at, value): (usize, &Value)| !kept.contains(&at) || is_data(value);
            if given.iter().enumerate().all(is_kept) { Ok(operands(given)) } else { Err(exceeded(ONLY_DATA)) }
        });
    }
    environment.add_filter(MADE, |state: &State, value: Value| eager(&Meter::of(state), value));
    environment
        .add_filter(NESTED, |state: &State, value: Value| made(&Meter::of(state), value, Gives::Nested));
    environment
        .add_filter(STEP, |state: &State| Meter::of(state).take(STEP_BYTES).map(|()| Value::UNDEFINED));
}

/// Pairs of `(name, function)`.
macro_rules! named {
    ($module:ident: $($name:literal $function:ident),*) => {
        [$(($name, Value::from_function($module::$function))),*]
    };
}

fn add_filters(environment: &mut Environment<'static>) {
    let mut add = |cost: Cost, gives: Gives, filters: &[(&'static str, Value)]| {
        for (name, filter) in filters.iter().cloned() {
            environment.add_filter(name, move |state: &State, given: Rest<Value>| {
                call(state, |given| filter.call(state, given), (cost, gives), &given)
            });
        }
    };
    let texts = named!(filters: "abs" abs, "d" default, "default" default, "first" first, "float" float, "int" int,
        "length" length, "count" length, "round" round);
    add(TEXTS, Gives::One, &texts);
    add(ONE, Gives::One, &named!(filters: "attr" attr));
    add(LISTED, Gives::One, &named!(filters: "last" last, "sum" sum));
    let listed = named!(filters: "list" list, "map" map, "reject" reject, "rejectattr" rejectattr, "reverse" reverse,
        "select" select, "selectattr" selectattr);
    add(LISTED, Gives::List, &listed);
    add(LISTED, Gives::Nested, &named!(filters: "items" items));
    add(SORTED, Gives::One, &named!(filters: "max" max, "min" min));
    add(SORTED, Gives::List, &named!(filters: "sort" sort, "unique" unique));
    add(SORTED, Gives::Nested, &named!(filters: "dictsort" dictsort, "groupby" groupby));
    let all = named!(filters: "capitalize" capitalize, "e" escape, "escape" escape, "lower" lower, "safe" safe,
        "string" string, "title" title, "upper" upper);
    add(ALL, Gives::One, &all);
    add(JOINED, Gives::One, &named!(filters: "join" join));
    add(REPLACED, Gives::One, &named!(filters: "replace" replace));
    add(STRIPPED, Gives::One, &[("trim", Value::from_function(trim))]);
    environment.add_filter("tojson", |state: &State, given: Rest<Value>| {
        call(state, |given| tojson(&Meter::of(state), given), (ALL, Gives::One), &given)
    });
}

fn add_tests(environment: &mut Environment<'static>) {
    let mut add = |cost: Cost, tests: &[(&'static str, Value)]| {
        for (name, test) in tests.iter().cloned() {
            environment.add_test(name, move |state: &State, given: Rest<Value>| {
                call(state, |given| test.call(state, given), (cost, Gives::One), &given)
                    .map(|value| value.is_true())
            });
        }
    };
    let texts = named!(tests: "boolean" is_boolean, "defined" is_defined, "divisibleby" is_divisibleby,
        "escaped" is_safe, "even" is_even, "false" is_false, "filter" is_filter, "float" is_float, "int" is_integer,
        "integer" is_integer, "lower" is_lower, "mapping" is_mapping, "none" is_none, "number" is_number,
        "odd" is_odd, "safe" is_safe, "sequence" is_sequence, "string" is_string, "test" is_test, "true" is_true,
        "undefined" is_undefined, "upper" is_upper);
    add(TEXTS, &texts);
    // minijinja can iterate over none, like over an empty list. Some templates use this test to detect null content.
    let is_iterable = |value: &Value| !value.is_none() && value.try_iter().is_ok();
    add(TEXTS, &[("iterable", Value::from_function(is_iterable))]);
    let compared = named!(tests: "==" is_eq, "eq" is_eq, "equalto" is_eq, "!=" is_ne, "ne" is_ne, "<" is_lt, "lt" is_lt,
        "lessthan" is_lt, "<=" is_le, "le" is_le, ">" is_gt, "gt" is_gt, "greaterthan" is_gt, ">=" is_ge, "ge" is_ge,
        "sameas" is_sameas);
    add(COMPARED, &compared);
    add(SOUGHT, &named!(tests: "in" is_in));
    add(ALL, &named!(tests: "endingwith" is_endingwith, "startingwith" is_startingwith));
}

fn trim(text: String, chars: Option<String>) -> String {
    match chars {
        None => python_trim(&text).to_owned(),
        Some(chars) => text.trim_matches(|c| chars.contains(c)).to_owned(),
    }
}

/// The JSON of a value, as Python's `json.dumps(value, ensure_ascii=False)` writes it. Templates give only an indentation.
fn tojson(meter: &Meter, given: &[Value]) -> Result<Value, Error> {
    let (value, kwargs): (Value, Kwargs) = from_args(given)?;
    let indent: Option<usize> = kwargs.get("indent")?;
    kwargs.get::<Option<bool>>("ensure_ascii")?;
    kwargs.assert_all_used()?;
    if let Some(indent) = indent.filter(|indent| *indent > MAX_INDENT) {
        return Err(exceeded(format!("indents JSON by {indent}; at most {MAX_INDENT} are accepted")));
    }
    let json = serde_json::to_value(&value).map_err(|error| exceeded(format!("writes no JSON: {error}")))?;
    let mut text = String::new();
    write_json(&json, indent, 0, &mut text);
    meter.check(text.len())?;
    Ok(Value::from(text))
}

/// The largest indentation of JSON.
const MAX_INDENT: usize = 8;

fn write_json(value: &Json, indent: Option<usize>, depth: usize, out: &mut String) {
    let line = |depth: usize, out: &mut String| {
        if let Some(indent) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent.saturating_mul(depth)));
        }
    };
    let comma = if indent.is_some() { "," } else { ", " };
    let (open, close, count) = match value {
        Json::Array(items) => ('[', ']', items.len()),
        Json::Object(members) => ('{', '}', members.len()),
        other => return out.push_str(&other.to_string()),
    };
    out.push(open);
    let begin = |i: usize, out: &mut String| {
        out.push_str(if i > 0 { comma } else { "" });
        line(depth + 1, out);
    };
    match value {
        Json::Array(items) => items.iter().enumerate().for_each(|(i, item)| {
            begin(i, out);
            write_json(item, indent, depth + 1, out);
        }),
        Json::Object(members) => members.iter().enumerate().for_each(|(i, (name, member))| {
            begin(i, out);
            out.push_str(&Json::from(name.as_str()).to_string());
            out.push_str(": ");
            write_json(member, indent, depth + 1, out);
        }),
        _ => {}
    }
    if count > 0 {
        line(depth, out);
    }
    out.push(close);
}

fn method(state: &State, value: &Value, name: &str, given: &[Value]) -> Result<Value, Error> {
    let with_value = |values: &[Value]| [slice::from_ref(value), values].concat();
    let (cost, gives, all): (Cost, _, _) = match (value.kind(), name, given) {
        (ValueKind::String, "join", [list, ..]) => (JOINED, Gives::One, vec![list.clone(), value.clone()]),
        (ValueKind::String, "replace", _) => (REPLACED, Gives::One, with_value(given)),
        (ValueKind::String, "split", _) => (SPLIT, Gives::List, with_value(given)),
        (ValueKind::String, "splitlines", _) => (SPLIT, Gives::List, with_value(&[Value::from("\n")])),
        (ValueKind::String, "strip" | "lstrip" | "rstrip", _) => (STRIPPED, Gives::One, with_value(given)),
        (ValueKind::Map, "get", _) => (ONE, Gives::One, with_value(given)),
        (ValueKind::Map, "items", _) => (LISTED, Gives::Nested, with_value(&[])),
        (ValueKind::Map, "keys" | "values", _) => (LISTED, Gives::List, with_value(&[])),
        // The name may be a key of the map, whose value (a macro, for example) is called.
        (ValueKind::Map, ..) => (TEXTS, Gives::One, with_value(&[])),
        _ => (ALL, Gives::One, with_value(given)),
    };
    call(state, |_| python_method(state, value, name, given), (cost, gives), &all)
}

/// Python's methods. The ones that strip use Python's definition of whitespace.
fn python_method(state: &State, value: &Value, name: &str, given: &[Value]) -> Result<Value, Error> {
    match (value.as_str(), name, given) {
        (Some(text), "strip", []) => Ok(Value::from(python_trim(text))),
        (Some(text), "lstrip", []) => Ok(Value::from(text.trim_start_matches(is_python_space))),
        (Some(text), "rstrip", []) => Ok(Value::from(text.trim_end_matches(is_python_space))),
        // The width in a `format` call can request any amount of memory.
        (Some(_), "format", _) => Err(Error::from(ErrorKind::UnknownMethod)),
        // minijinja would search for an empty string forever.
        (Some(text), "count", [sought]) if sought.as_str() == Some("") => {
            Ok(Value::from(text.chars().count() + 1))
        }
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, given),
    }
}

#[cfg(test)]
mod unit_tests {
    use super::*;

    fn stop(source: &str, meter: Meter) -> String {
        let program = Program::compile(source).unwrap().unwrap();
        let error = program.render_by(&environment(), Value::UNDEFINED, meter, io::sink()).unwrap_err();
        std::error::Error::source(&error).expect("a reason").to_string()
    }

    #[test]
    fn a_rendering_whose_time_is_over_ends() {
        let over = || Meter::new(0, Instant::now());
        for source in ["{% for i in range(9) %}{% endfor %}", "{{ 1 }}", "x"] {
            assert_eq!(stop(source, over()), "takes more than 10 s", "{source}");
        }
    }

    #[test]
    fn values_on_the_stack_together_are_bounded() {
        // Many values that exist only on the stack. Each is smaller than the largest size of one value.
        let many =
            format!("{{% set x = '{}' %}}{{{{ dict({}) }}}}", "x".repeat(10_000), "a=x~1, ".repeat(600));
        let few = Meter { work: Budget::new(1 << 20), ..Meter::new(0, Instant::now() + TIME_LIMIT) };
        assert_eq!(stop(&many, few), "reads and makes values of more than 1 MiB in total");
    }

    #[test]
    fn multiplication_is_found_in_tags_only() {
        let line_of = |source: &str| {
            let error = check_tags(source).err()?;
            let problem = std::error::Error::source(&error).expect("a reason").to_string();
            problem.split(' ').nth(1).and_then(|line| line.parse::<usize>().ok())
        };
        assert_eq!(line_of("a * b {# * #} {{ '*' }} {{ \"\\\"*\" }} *"), None);
        assert_eq!(line_of("\n{{ a\n * b }}"), Some(3));
        assert_eq!(line_of("{% set x = 2 ** 3 %}"), Some(1));
        assert_eq!(line_of("{{ {'a': {'b': 1}} * 2 }}"), Some(1));
        assert_eq!(line_of("{# '{{' #}{{ 'it' }} don't {{ 1*1 }}"), Some(1));
        assert_eq!(line_of("{{"), None);
    }
}
