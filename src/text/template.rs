//! Chat templates: a checkpoint's own Jinja, or the built-in one of its family, if there is one.
//!
//! Templates run in the same environment as in transformers: `trim_blocks` and `lstrip_blocks`, Python's string
//! methods, `raise_exception`, `strftime_now` (in UTC), `break` and `continue`, the special tokens as variables, and `tools` and
//! `documents` set to none.
//!
//! A template comes with a checkpoint and is not trusted. Its source, its output and its work are bounded (`jinja.rs`).
//! A panic of the engine becomes an error. Operations that can request any amount of memory with a single number are
//! refused: the operator `*`, as in `[0] * 10**12`, and the filters `batch`, `format`, `indent` and `slice`.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{LazyLock, OnceLock};

use jiff::Timestamp;
use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind, State};
use serde::Deserialize;

use super::chat::{Message, Order};
use super::content::python_trim;
use super::error::{MAX_TEXT_BYTES, TextError};
use super::family::Family;
use super::jinja::{self, Exceeded, FUEL, Program};
use super::kwargs::{self, TemplateKwargs};
use super::panics::panic_text;
use super::tokenizer::Tokenizer;

/// Longest template source, in bytes. The longest templates in use have about 20 KiB.
const MAX_TEMPLATE_BYTES: usize = 256 << 10;

/// Longest message of `raise_exception`, in characters.
const MAX_RAISED_CHARS: usize = 1000;

/// The filters, tests and functions that every template can use.
static ENVIRONMENT: LazyLock<Environment<'static>> = LazyLock::new(|| {
    let mut environment = jinja::environment();
    jinja::add_function(&mut environment, "raise_exception", Value::from_function(raise_exception));
    jinja::add_function(&mut environment, "strftime_now", Value::from_function(strftime_now));
    environment
});

/// The files of a checkpoint that define its chat format. Each may be missing.
#[derive(Debug, Clone, Copy, Default)]
pub struct ChatFiles<'a> {
    /// `tokenizer_config.json`: `chat_template`, `bos_token`, `eos_token`.
    pub tokenizer_config: Option<&'a [u8]>,
    /// `chat_template.jinja`, which takes precedence over the template in `tokenizer_config.json`.
    pub chat_template_jinja: Option<&'a [u8]>,
}

/// How a prompt ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PromptEnding {
    /// With the beginning of a new turn of the assistant.
    #[default]
    Answer,
    /// Within the last message, which is from the assistant. The answer continues this message.
    Continued,
    /// With the last message, without a new turn.
    Closed,
}

/// What a template renders.
#[derive(Debug, Clone, Copy)]
pub struct TemplateInput<'a> {
    pub messages: &'a [Message],
    /// The tools that the model may call, in OpenAI's form. Templates that know no tools ignore them.
    pub tools: &'a [serde_json::Value],
    pub kwargs: &'a TemplateKwargs,
    pub ending: PromptEnding,
}

impl<'a> TemplateInput<'a> {
    /// A conversation without tools.
    pub fn new(messages: &'a [Message], ending: PromptEnding, kwargs: &'a TemplateKwargs) -> Self {
        Self { messages, tools: &[], kwargs, ending }
    }
}

/// A compiled chat template, or none: such a model completes texts only.
#[derive(Debug)]
pub struct ChatTemplate {
    program: Option<Program>,
    /// The template's text; empty if there is none.
    source: String,
    origin: String,
    special_tokens: SpecialTokens,
    /// Which conversations it accepts, found when the first one is arranged.
    order: OnceLock<Order>,
}

#[derive(Debug, Clone)]
struct SpecialTokens {
    bos: Option<String>,
    eos: Option<String>,
}

impl ChatTemplate {
    /// The checkpoint's template, or the built-in one of the tokenizer's family if the checkpoint has none. A template
    /// that does not compile is an error, because the model was not trained on the prompts of another template. Without
    /// any template, conversations are refused.
    ///
    /// If `tokenizer_config.json` has no `bos_token` or no `eos_token`, the family's value is used.
    pub fn from_checkpoint(files: ChatFiles<'_>, tokenizer: &Tokenizer) -> Result<Self, TextError> {
        const CONFIG: &str = "tokenizer_config.json";
        let config = match files.tokenizer_config {
            Some(bytes) => serde_json::from_slice(bytes).map_err(|e| template_error(CONFIG, e))?,
            None => TokenizerConfig::default(),
        };
        let family: Option<&Family> = tokenizer.family();
        let special_tokens = SpecialTokens {
            bos: special_token(&config.bos_token, "bos_token", family.and_then(|family| family.bos))?,
            eos: special_token(&config.eos_token, "eos_token", family.map(|family| family.end_of_turn))?,
        };
        if let Some(bytes) = files.chat_template_jinja {
            let origin = "chat_template.jinja";
            let source =
                std::str::from_utf8(bytes).map_err(|e| template_error(origin, format!("not UTF-8: {e}")))?;
            return Self::compile(source, origin, special_tokens);
        }
        match &config.chat_template {
            None => match family.and_then(|family| family.template) {
                Some(built_in) => Self::compile(built_in.source, built_in.origin, special_tokens),
                None => Ok(Self {
                    program: None,
                    source: String::new(),
                    origin: "none: conversations are refused".to_owned(),
                    special_tokens,
                    order: OnceLock::new(),
                }),
            },
            Some(named) => {
                let source = default_template(named).map_err(|problem| template_error(CONFIG, problem))?;
                Self::compile(source, "tokenizer_config.json: chat_template", special_tokens)
            }
        }
    }

    /// The text of the template; empty if there is none.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Where the template comes from, for logs.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// The text of a conversation. It already includes `<bos>`, so encode it without adding special tokens.
    ///
    /// Messages are passed to the template unchanged. Call [`Self::arrange`] first: some templates refuse a conversation
    /// whose roles do not alternate. `add_generation_prompt` begins a turn of the model at the end.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, TextError> {
        let ending = if add_generation_prompt { PromptEnding::Answer } else { PromptEnding::Closed };
        self.text(&TemplateInput::new(messages, ending, &TemplateKwargs::default()))
    }

    /// The text of a conversation.
    pub fn text(&self, input: &TemplateInput<'_>) -> Result<String, TextError> {
        self.write(input, Timestamp::now(), MAX_TEXT_BYTES)
    }

    /// A conversation in an order that the template accepts, with all of its text.
    pub fn arrange(&self, messages: &[Message]) -> Vec<Message> {
        let accepts = |messages: &[Message]| {
            let text = self.render(messages, true).unwrap_or_default();
            let mut rest = text.as_str();
            messages.iter().all(|message| match rest.find(message.content.text()) {
                Some(at) => {
                    rest = &rest[at + message.content.text().len()..];
                    true
                }
                None => false,
            })
        };
        self.order.get_or_init(|| Order::find(accepts)).arrange(messages)
    }

    /// The text of a conversation at the time `now`, of at most `limit` bytes.
    pub(super) fn write(
        &self,
        input: &TemplateInput<'_>,
        now: Timestamp,
        limit: usize,
    ) -> Result<String, TextError> {
        match input.ending {
            PromptEnding::Continued => self.continued(input, now, limit),
            PromptEnding::Answer | PromptEnding::Closed => self.run(input, now, limit),
        }
    }

    /// The text of a conversation that begins a new turn at the end, or does not.
    fn run(&self, input: &TemplateInput<'_>, now: Timestamp, limit: usize) -> Result<String, TextError> {
        let TemplateInput { messages, tools, kwargs, ending } = *input;
        let program = self.program.as_ref().ok_or(TextError::NoTemplate)?;
        if messages.is_empty() {
            return Err(TextError::NoMessages);
        }
        let context = minijinja::context! {
            messages,
            add_generation_prompt => ending == PromptEnding::Answer,
            tools => if tools.is_empty() { Value::from(()) } else { Value::from_serialize(tools) },
            documents => Value::from(()),
        };
        let special = |token: &Option<String>| token.clone().map_or(Value::UNDEFINED, Value::from);
        let context = minijinja::context! {
            bos_token => special(&self.special_tokens.bos),
            eos_token => special(&self.special_tokens.eos),
            ..context
        };
        let context = minijinja::context! { ..context, ..kwargs.value() };
        let message_bytes: usize = messages.iter().map(Message::bytes).sum();
        let tool_bytes: usize = tools.iter().map(kwargs::bytes).sum();
        let conversation_bytes = message_bytes + tool_bytes + kwargs.bytes();
        let mut out = BoundedText { text: Vec::new(), overflow: 0, limit };
        // minijinja may panic: `loop.cycle()` divides by the number of its arguments.
        let render = || program.render(&ENVIRONMENT, context, conversation_bytes, now, &mut out);
        let rendered = catch_unwind(AssertUnwindSafe(render))
            .map_err(|panic| template_error(&self.origin, describe_panic(&*panic)))?;
        match rendered {
            _ if out.overflow > 0 => Err(TextError::TooLong { bytes: out.text.len() + out.overflow, limit }),
            Ok(_) => Ok(String::from_utf8(out.text).expect("minijinja writes whole strings")),
            Err(error) => Err(raised_message(&error)
                .map_or_else(|| template_error(&self.origin, describe(&error)), TextError::Raised)),
        }
    }

    /// The text of a conversation whose last turn the model continues. It ends with the text of that turn.
    fn continued(
        &self,
        input: &TemplateInput<'_>,
        now: Timestamp,
        limit: usize,
    ) -> Result<String, TextError> {
        // The template renders this mark instead of the last turn's text, because it may change or repeat that text.
        const MARK: &str = "\u{2}the text to continue\u{3}";
        let Some((last, before)) = input.messages.split_last() else { return Err(TextError::NoMessages) };
        let (mut content, text) = last.content.split_last_text();
        content.push_text(MARK);
        let marked = [before, &[Message { content, ..last.clone() }]].concat();
        let marked = TemplateInput { messages: &marked, ending: PromptEnding::Closed, ..*input };
        let mut rendered = self.run(&marked, now, limit)?;
        let Some(at) = rendered.rfind(MARK) else {
            let problem = "changes the text of the last turn, so the model cannot continue that turn";
            return Err(template_error(&self.origin, problem));
        };
        rendered.truncate(at);
        rendered.push_str(python_trim(text));
        if rendered.len() > limit {
            return Err(TextError::TooLong { bytes: rendered.len(), limit });
        }
        Ok(rendered)
    }

    fn compile(source: &str, origin: &str, special_tokens: SpecialTokens) -> Result<Self, TextError> {
        if source.len() > MAX_TEMPLATE_BYTES {
            let problem = format!("{} bytes long; at most {MAX_TEMPLATE_BYTES} are accepted", source.len());
            return Err(template_error(origin, problem));
        }
        let no_thread = |error: std::io::Error| TextError::NoThread {
            doing: "compiling the chat template",
            error: error.to_string(),
        };
        let program = Program::compile(source).map_err(no_thread)?;
        let program = program.map_err(|e| template_error(origin, describe(&e)))?;
        let order = OnceLock::new();
        let (source, origin) = (source.to_owned(), origin.to_owned());
        Ok(Self { program: Some(program), source, origin, special_tokens, order })
    }
}

/// The part of tokenizer_config.json that this module reads.
#[derive(Deserialize, Default)]
struct TokenizerConfig {
    chat_template: Option<serde_json::Value>,
    // `None` = no such key, `Some(Null)` = the key is null.
    #[serde(default, deserialize_with = "present")]
    bos_token: Option<serde_json::Value>,
    #[serde(default, deserialize_with = "present")]
    eos_token: Option<serde_json::Value>,
}

fn present<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<serde_json::Value>, D::Error> {
    serde_json::Value::deserialize(deserializer).map(Some)
}

/// The text of a special token. The field is a string, an object with `content`, or null for a model without this
/// token. `absent` is the text if there is no such field.
fn special_token(
    field: &Option<serde_json::Value>,
    name: &str,
    absent: Option<&str>,
) -> Result<Option<String>, TextError> {
    use serde_json::Value as Json;
    match field {
        None => Ok(absent.map(str::to_owned)),
        Some(Json::Null) => Ok(None),
        Some(Json::String(token)) => Ok(Some(token.clone())),
        Some(Json::Object(token)) if token.get("content").is_some_and(Json::is_string) => {
            Ok(token["content"].as_str().map(str::to_owned))
        }
        Some(_) => Err(template_error(
            "tokenizer_config.json",
            format!("{name} is neither a string, nor an object with content, nor null"),
        )),
    }
}

/// The source in `chat_template`, which is a text or a list of `{"name", "template"}`. Of a list, the template
/// "default" is used, or the only one.
fn default_template(field: &serde_json::Value) -> Result<&str, String> {
    if let Some(source) = field.as_str() {
        return Ok(source);
    }
    let list = field.as_array().ok_or("chat_template is neither a string nor a list of named templates")?;
    let mut named = Vec::with_capacity(list.len());
    for entry in list {
        match (entry["name"].as_str(), entry["template"].as_str()) {
            (Some(name), Some(template)) => named.push((name, template)),
            _ => return Err("chat_template has an entry without a name or a template".to_owned()),
        }
    }
    if let Some((_, template)) = named.iter().find(|(name, _)| *name == "default") {
        return Ok(template);
    }
    match named.as_slice() {
        [(_, only)] => Ok(only),
        _ => {
            let names: Vec<_> = named.iter().map(|(name, _)| *name).collect();
            Err(format!("chat_template has no template named \"default\", only [{}]", names.join(", ")))
        }
    }
}

/// The rendered text, of at most `limit` bytes. `overflow` is the length of the write that exceeded the limit.
struct BoundedText {
    text: Vec<u8>,
    overflow: usize,
    limit: usize,
}

impl io::Write for BoundedText {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.text.len() + bytes.len() > self.limit {
            self.overflow = bytes.len();
            return Err(io::Error::other("rendered text too long"));
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The source of an error that the template raised by `raise_exception`, with the template's message.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: String) -> Result<String, Error> {
    let message: String = message.chars().take(MAX_RAISED_CHARS).collect();
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn raised_message(error: &Error) -> Option<String> {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(Raised(message)) = error.downcast_ref() {
            return Some(message.clone());
        }
        cause = error.source();
    }
    None
}

fn template_error(origin: &str, problem: impl ToString) -> TextError {
    TextError::Template { origin: origin.to_owned(), problem: problem.to_string() }
}

/// One line for an error: its innermost cause, and the line of the template if it is known.
fn describe(error: &Error) -> String {
    let mut error = error;
    while let Some(cause) = std::error::Error::source(error).and_then(|cause| cause.downcast_ref()) {
        error = cause;
    }
    if error.kind() == ErrorKind::OutOfFuel {
        return format!("did not end within {FUEL} instructions");
    }
    let mut text = match std::error::Error::source(error).and_then(|cause| cause.downcast_ref()) {
        Some(Exceeded(problem)) => problem.clone(),
        None => error.kind().to_string(),
    };
    if let Some(detail) = error.detail() {
        text.push_str(": ");
        text.extend(detail.split_whitespace().flat_map(|word| [word, " "]));
        text.truncate(text.trim_end().len());
    }
    if let Some(line) = error.line() {
        text.push_str(&format!(" (line {line})"));
    }
    text
}

fn describe_panic(panic: &(dyn Any + Send)) -> String {
    format!("the template engine failed: {}", panic_text(panic).unwrap_or("unknown"))
}

fn strftime_now(state: &State, format: String) -> Result<String, Error> {
    strftime(&format, jinja::now(state))
}

/// The date and time in UTC, by the directives of C's strftime, in English.
fn strftime(format: &str, time: Timestamp) -> Result<String, Error> {
    let problem = |error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}"));
    jiff::fmt::strtime::format(format, time).map_err(problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_equal_the_output_of_gnu_date() {
        // The expected texts are the output of `date -u -d @N +...` from GNU coreutils.
        let format = "%Y-%m-%d %H:%M:%S|%d %b %Y|%A, %B %-d|%a %e %I %p %y 100%%";
        for (seconds, expected) in [
            (0, "1970-01-01 00:00:00|01 Jan 1970|Thursday, January 1|Thu  1 12 AM 70 100%"),
            (951_782_399, "2000-02-28 23:59:59|28 Feb 2000|Monday, February 28|Mon 28 11 PM 00 100%"),
            (951_782_400, "2000-02-29 00:00:00|29 Feb 2000|Tuesday, February 29|Tue 29 12 AM 00 100%"),
            (1_772_323_200, "2026-03-01 00:00:00|01 Mar 2026|Sunday, March 1|Sun  1 12 AM 26 100%"),
            (4_107_585_845, "2100-03-01 12:04:05|01 Mar 2100|Monday, March 1|Mon  1 12 PM 00 100%"),
        ] {
            let time = Timestamp::from_second(seconds).unwrap();
            assert_eq!(strftime(format, time).unwrap(), expected);
        }
        let unknown = strftime("%!", Timestamp::UNIX_EPOCH).unwrap_err().to_string();
        assert!(unknown.contains("strftime_now"), "{unknown}");
    }
}
