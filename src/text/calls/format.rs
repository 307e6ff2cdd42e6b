//! The syntax of calls that a checkpoint uses, found from its chat template and its vocabulary.

use serde_json::json;

use crate::text::chat::{Message, ToolCall};
use crate::text::family::{self, CallBody, CallSyntax};
use crate::text::kwargs::TemplateKwargs;
use crate::text::template::{ChatTemplate, PromptEnding, TemplateInput};
use crate::text::tokenizer::Tokenizer;

/// How the models of a checkpoint call tools.
#[derive(Debug, Clone, PartialEq)]
pub struct CallFormat {
    pub syntax: &'static CallSyntax,
    /// `None` = calls have no control tokens.
    pub tokens: Option<CallTokens>,
}

/// The ids of the control tokens around calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallTokens {
    pub open: u32,
    /// `None` = a call ends with the next one, or with the answer.
    pub close: Option<u32>,
    /// Ends an answer with calls, in addition to the model's own tokens.
    pub end: Option<u32>,
    /// The control token within a call: the quotes of a text, or what separates the name from the arguments.
    pub(in crate::text) mark: Option<u32>,
    /// The control token after which the model writes an id of the call. The server gives calls ids of its own.
    pub(in crate::text) call_id: Option<u32>,
    /// All control tokens of the syntax, which are never text of an answer.
    pub(in crate::text) all: Vec<u32>,
}

impl CallFormat {
    /// A format without control tokens, for models whose template knows no tools.
    pub fn plain() -> Self {
        Self { syntax: family::plain_json(), tokens: None }
    }

    /// The format that a checkpoint's template writes, if the vocabulary has its tokens. Otherwise the plain format.
    pub fn of(template: &ChatTemplate, tokenizer: &Tokenizer) -> Self {
        let Some(written) = written_call(template) else { return Self::plain() };
        let is_written = |syntax: &&CallSyntax| {
            let mut beginnings = syntax.beginnings(TOOL).into_iter();
            syntax.in_template && beginnings.any(|text| written.contains(&without_white_space(&text)))
        };
        let mut formats = family::call_syntaxes()
            .filter(is_written)
            .filter_map(|syntax| Self::with(syntax, tokenizer).ok());
        formats.next().unwrap_or_else(Self::plain)
    }

    /// The format with this name. An error names a control token that the vocabulary lacks.
    pub fn named(name: &str, tokenizer: &Tokenizer) -> Result<Self, String> {
        let Some(syntax) = CallSyntax::named(name) else {
            let known: Vec<&str> = CallSyntax::names().collect();
            return Err(format!("expected one of {}, got {name:?}", known.join(", ")));
        };
        Self::with(syntax, tokenizer).map_err(|token| {
            format!(
                "calls in the syntax {name:?} need the token {token:?}, which this model's vocabulary lacks"
            )
        })
    }

    /// The error is the name of a missing token.
    fn with(syntax: &'static CallSyntax, tokenizer: &Tokenizer) -> Result<Self, &'static str> {
        let id = |token: &'static str| tokenizer.token_id(token).ok_or(token);
        let Some(marks) = &syntax.marks else { return Ok(Self { syntax, tokens: None }) };
        let mark = match syntax.body {
            CallBody::Bare { quote: mark } | CallBody::Named { mark, .. } => Some(id(mark)?),
            CallBody::Json { .. } | CallBody::Tagged => None,
        };
        let call_id = match syntax.body {
            CallBody::Named { id, .. } => tokenizer.token_id(id),
            _ => None,
        };
        let (open, close) = (id(marks.open)?, marks.close.map(id).transpose()?);
        let end = marks.end.map(id).transpose()?;
        let others = marks.others.iter().filter_map(|token| tokenizer.token_id(token));
        let all = [Some(open), close, end, mark, call_id].into_iter().flatten().chain(others).collect();
        Ok(Self { syntax, tokens: Some(CallTokens { open, close, end, mark, call_id, all }) })
    }
}

/// A tool of the conversation with which templates are tried, and the words of its description.
const TOOL: &str = "find_unicorns";
const DESCRIPTION: &str = "It finds unicorns in a meadow.";

/// What a template writes for a call of [`TOOL`], without white space. `None` = the template does not describe tools.
fn written_call(template: &ChatTemplate) -> Option<String> {
    let parameters = json!({"type": "object", "properties": {"meadow": {"type": "string"}}});
    let function = json!({"name": TOOL, "description": DESCRIPTION, "parameters": parameters});
    let tools = [json!({"type": "function", "function": function})];
    let id = "000000000";
    let call = ToolCall::new(id.to_owned(), TOOL.to_owned(), "{\"meadow\": \"green\"}");
    let messages = [
        Message::new("user", "Where are they?"),
        Message { tool_calls: vec![call], ..Message::new("assistant", "") },
        Message::result("There.", id, TOOL),
    ];
    let kwargs = TemplateKwargs::default();
    let input =
        TemplateInput { tools: &tools, ..TemplateInput::new(&messages, PromptEnding::Answer, &kwargs) };
    let text = template.text(&input).ok()?;
    text.contains(DESCRIPTION).then(|| without_white_space(&text))
}

fn without_white_space(text: &str) -> String {
    text.split_whitespace().collect()
}
