//! Tools in OpenAI's formats. In a chat, a function's fields are in a separate object; in responses, they are next to
//! `type`.

use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::tools::{Choice, Definition, ParametersSchema, TOOL_CHOICE, chosen, tool_list};
use crate::api::wire::bounded::{List, ToolName};
use crate::api::wire::union::{Anything, BesideText, TextOr, words};
use crate::api::wire::{field, required, short};
use crate::session::{MAX_TOOLS, Tools};

words! {
    /// The type of tools and of calls: functions are the only one.
    FunctionType { Function = "function" } or Other;
    ToolChoiceWord { None = "none", Auto = "auto", Required = "required" } or Other;
    /// Whether the answer may or must call one of the allowed tools.
    AllowedMode { Auto = "auto", Required = "required" };
    ToolChoiceType { Function = "function", AllowedTools = "allowed_tools" } or Other;
    LegacyFunctionCall { None = "none", Auto = "auto" };
}

type ChatTools = List<ChatTool, 0, MAX_TOOLS>;
type ChatChoice = TextOr<ChatToolChoice, ToolChoiceWord>;
type NamedTools = List<NamedTool, 1, MAX_TOOLS>;
type FunctionTools = List<FunctionTool, 0, MAX_TOOLS>;
type ResponseChoice = TextOr<FunctionChoice, ToolChoiceWord>;
type NamedFunctions = List<NamedFunction, 1, MAX_TOOLS>;

/// Refuses tools and calls that are no functions.
pub(in crate::api) fn check_type(at: &str, kind: Option<&FunctionType>) -> Result<(), ApiError> {
    match kind {
        None | Some(FunctionType::Function) => Ok(()),
        Some(FunctionType::Other(other)) => Err(no_function(at, other)),
    }
}

fn no_function(at: &str, kind: &str) -> ApiError {
    ApiError::unsupported(field(at, "type"), only_functions(kind))
}

fn only_functions(kind: &str) -> String {
    format!("this server has \"function\" alone, not {:?}", short(kind))
}

/// A tool of a response: a function that the model may call.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct FunctionTool {
    /// Tools of other types are left out. The field `warnings` of the response names them.
    r#type: Option<FunctionType>,
    #[schema(required, nullable = false)]
    name: Option<ToolName>,
    description: Option<String>,
    parameters: Option<ParametersSchema>,
    /// Enforce every keyword of the schema; a keyword that cannot be enforced is an error.
    strict: Option<bool>,
}

/// A tool of a chat.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = Tool)]
pub(in crate::api) struct ChatTool {
    r#type: Option<FunctionType>,
    #[schema(required, nullable = false)]
    function: Option<ToolFunction>,
}

/// A function that the model may call.
#[derive(Debug, Deserialize, ToSchema)]
struct ToolFunction {
    #[schema(required, nullable = false)]
    name: Option<ToolName>,
    description: Option<String>,
    parameters: Option<ParametersSchema>,
    /// Enforce every keyword of the schema; a keyword that cannot be enforced is an error.
    strict: Option<bool>,
}

/// A chat's fields for tools.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct ChatToolFields {
    /// The tools that the model may call. Their names must be unique.
    #[schema(inline)]
    tools: Option<ChatTools>,
    #[schema(inline)]
    tool_choice: Option<ChatChoice>,
    /// Whether one answer may make several calls; true by default.
    parallel_tool_calls: Option<bool>,
    /// Not supported: use `tools`.
    functions: Option<Vec<Anything>>,
    /// Replaced by `tool_choice`; only `none` and `auto` are accepted.
    #[schema(value_type = Option<LegacyFunctionCall>)]
    function_call: Option<Value>,
}

/// The tools that must or may be called.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ToolChoice)]
struct ChatToolChoice {
    r#type: Option<ToolChoiceType>,
    function: Option<FunctionName>,
    allowed_tools: Option<AllowedTools>,
}

#[derive(Debug, Deserialize, ToSchema)]
struct FunctionName {
    /// The name of one of `tools`.
    name: String,
}

/// The tools that may be called, out of `tools`.
#[derive(Debug, Deserialize, ToSchema)]
struct AllowedTools {
    mode: AllowedMode,
    #[schema(inline)]
    tools: NamedTools,
}

#[derive(Debug, Deserialize, ToSchema)]
struct NamedTool {
    r#type: Option<FunctionType>,
    function: FunctionName,
}

impl BesideText for ChatToolChoice {
    const NAME: &str = "an object";
    const IS_LIST: bool = false;
}

impl ChatToolFields {
    pub fn tools(self) -> Result<Tools, ApiError> {
        self.refuse_functions()?;
        let items = self.tools.unwrap_or_default().0.into_iter().enumerate();
        let definition = |(i, tool): (usize, ChatTool)| {
            let at = format!("tools[{i}]");
            check_type(&at, tool.r#type.as_ref())?;
            let function = required(tool.function, &at, "function")?;
            let ToolFunction { name, description, parameters, strict } = function;
            Ok(Definition { at: field(&at, "function"), name, description, parameters, strict })
        };
        let list = tool_list(items.map(definition), "parameters")?;
        let choice = choice_of(self.tool_choice, ChatToolChoice::choice)?;
        chosen(list, choice, self.parallel_tool_calls.unwrap_or(true))
    }

    /// Refuses the fields that `tools` and `tool_choice` have replaced, if they ask for anything.
    fn refuse_functions(&self) -> Result<(), ApiError> {
        let call = self.function_call.as_ref();
        let off = |choice: &Value| choice == "none";
        if call.is_some_and(|choice| !off(choice) && choice != "auto") {
            let problem = "was replaced by tool_choice, which this server has";
            return Err(ApiError::unsupported("function_call", problem));
        }
        let functions = self.functions.as_ref().is_some_and(|functions| !functions.is_empty());
        if functions && !call.is_some_and(off) {
            return Err(ApiError::unsupported("functions", "was replaced by tools, which this server has"));
        }
        Ok(())
    }
}

impl ChatToolChoice {
    fn choice(self) -> Result<Choice, ApiError> {
        match self.r#type {
            None | Some(ToolChoiceType::Function) => {
                let FunctionName { name } = required(self.function, TOOL_CHOICE, "function")?;
                Ok(Choice::One { at: "tool_choice.function.name".into(), name })
            }
            Some(ToolChoiceType::AllowedTools) => {
                let AllowedTools { mode, tools } =
                    required(self.allowed_tools, TOOL_CHOICE, "allowed_tools")?;
                let named = tools.0.into_iter().map(|tool| (tool.r#type, tool.function.name));
                allowed(&mode, named, "tool_choice.allowed_tools.tools", "function.name")
            }
            Some(ToolChoiceType::Other(other)) => Err(no_function(TOOL_CHOICE, &other)),
        }
    }
}

/// The choice in the field `tool_choice`; `read` reads it from an object.
fn choice_of<T>(
    choice: Option<TextOr<T, ToolChoiceWord>>,
    read: impl FnOnce(T) -> Result<Choice, ApiError>,
) -> Result<Choice, ApiError> {
    let word = match choice {
        None => return Ok(Choice::Auto),
        Some(TextOr::Other(choice)) => return read(choice),
        Some(TextOr::Text(word)) => word,
    };
    match word {
        ToolChoiceWord::None => Ok(Choice::None),
        ToolChoiceWord::Auto => Ok(Choice::Auto),
        ToolChoiceWord::Required => Ok(Choice::Required),
        ToolChoiceWord::Other(other) => {
            let problem = format!("expected none, auto, required or an object, got {:?}", short(&other));
            Err(ApiError::invalid(TOOL_CHOICE, problem))
        }
    }
}

/// The choice among some tools, which come with their types and names. `at` is their field, and `name` the path of a
/// name in each.
fn allowed(
    mode: &AllowedMode,
    named: impl Iterator<Item = (Option<FunctionType>, String)>,
    at: &str,
    name: &str,
) -> Result<Choice, ApiError> {
    let tool = |(i, (kind, called)): (usize, (Option<FunctionType>, String))| {
        let at = format!("{at}[{i}]");
        check_type(&at, kind.as_ref())?;
        Ok((field(&at, name), called))
    };
    let tools = named.enumerate().map(tool).collect::<Result<_, ApiError>>()?;
    Ok(Choice::Allowed { must_call: *mode == AllowedMode::Required, tools })
}

/// The tool fields of a request for a response.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct ResponseToolFields {
    /// The tools that the model may call. Their names must be unique.
    #[schema(inline)]
    tools: Option<FunctionTools>,
    #[schema(inline)]
    tool_choice: Option<ResponseChoice>,
    /// Whether one answer may make several calls; true by default.
    parallel_tool_calls: Option<bool>,
}

/// The function that must be called, or the functions that may be called.
#[derive(Debug, Deserialize, ToSchema)]
struct FunctionChoice {
    r#type: Option<ToolChoiceType>,
    /// The name of one of `tools`.
    name: Option<String>,
    mode: Option<AllowedMode>,
    #[schema(inline)]
    tools: Option<NamedFunctions>,
}

#[derive(Debug, Deserialize, ToSchema)]
struct NamedFunction {
    r#type: Option<FunctionType>,
    name: String,
}

impl BesideText for FunctionChoice {
    const NAME: &str = "an object";
    const IS_LIST: bool = false;
}

impl ResponseToolFields {
    /// The functions, and a warning for each tool of another type, which is left out. Codex always sends such tools, and
    /// works without them.
    pub fn tools(self) -> Result<(Tools, Vec<String>), ApiError> {
        let (mut functions, mut warnings) = (Vec::new(), Vec::new());
        for (i, tool) in self.tools.unwrap_or_default().0.into_iter().enumerate() {
            let at = format!("tools[{i}]");
            let FunctionTool { r#type, name, description, parameters, strict } = tool;
            match r#type {
                Some(FunctionType::Other(other)) => {
                    warnings.push(format!("{at} is left out: {}", only_functions(&other)));
                }
                None | Some(FunctionType::Function) => {
                    functions.push(Definition { at, name, description, parameters, strict });
                }
            }
        }
        let list = tool_list(functions.into_iter().map(Ok), "parameters")?;
        let choice = choice_of(self.tool_choice, FunctionChoice::choice)?;
        Ok((chosen(list, choice, self.parallel_tool_calls.unwrap_or(true))?, warnings))
    }
}

impl FunctionChoice {
    fn choice(self) -> Result<Choice, ApiError> {
        match self.r#type {
            None | Some(ToolChoiceType::Function) => {
                let name = required(self.name, TOOL_CHOICE, "name")?;
                Ok(Choice::One { at: "tool_choice.name".into(), name })
            }
            Some(ToolChoiceType::AllowedTools) => {
                let mode = required(self.mode, TOOL_CHOICE, "mode")?;
                let tools = required(self.tools, TOOL_CHOICE, "tools")?.0;
                let named = tools.into_iter().map(|tool| (tool.r#type, tool.name));
                allowed(&mode, named, "tool_choice.tools", "name")
            }
            Some(ToolChoiceType::Other(other)) => Err(no_function(TOOL_CHOICE, &other)),
        }
    }
}
