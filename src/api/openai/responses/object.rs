//! The response object, and the events of its stream.

use std::sync::Arc;

use serde::{Serialize, Serializer};
use serde_json::value::{RawValue, to_raw_value};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{AdditionalProperties, ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

use crate::api::error::ApiError;
use crate::api::openai::logprobs::TokenLogprob;
use crate::api::thinking::{Effort, ReasoningOptions};
use crate::api::tools::PartialCall;
use crate::api::wire::reply::{Assistant, Function, ListName, replies};
use crate::api::wire::union::words;
use crate::engine::{EngineError, Timings};
use crate::model::SamplingParams;
use crate::session::{Reason, Tools};

words! {
    ObjectName { Response = "response" };
    ResponseStatus { InProgress = "in_progress", Completed = "completed", Incomplete = "incomplete", Failed = "failed" };
    ErrorCode {
        ServerError = "server_error", RateLimitExceeded = "rate_limit_exceeded", InvalidPrompt = "invalid_prompt",
        ContextLengthExceeded = "context_length_exceeded"
    };
    IncompleteReason { MaxOutputTokens = "max_output_tokens" };
    ServiceTier { Default = "default" };
    Truncation { Disabled = "disabled" };
    ItemStatus { InProgress = "in_progress", Completed = "completed", Incomplete = "incomplete" };
}

replies! {
    /// A response. In the first events of a stream, its output is empty.
    #[derive(Clone)]
    pub(in crate::api) struct ResponseObject {
        pub id: String,
        #[schema(inline)]
        pub object: ObjectName,
        pub created_at: u64,
        pub completed_at: Option<u64>,
        pub status: ResponseStatus,
        pub error: Option<ResponseError>,
        pub incomplete_details: Option<IncompleteDetails>,
        pub model: String,
        pub output: Vec<OutputItem>,
        pub usage: Option<ResponsesUsage>,
        #[serde(flatten)]
        pub request: RepeatedRequest,
    }

    #[derive(Clone)]
    pub(in crate::api) struct ResponseError {
        #[schema(inline)]
        pub code: ErrorCode,
        /// What went wrong, for a person to read.
        pub message: String,
    }

    #[derive(Clone)]
    pub(in crate::api) struct IncompleteDetails {
        #[schema(inline)]
        pub reason: IncompleteReason,
    }

    /// Fields of a response that repeat its request, and fixed values for what a request cannot ask for.
    #[derive(Debug, Clone)]
    pub(in crate::api) struct RepeatedRequest {
        pub background: bool,
        pub instructions: Option<String>,
        pub max_output_tokens: Option<usize>,
        /// Always null.
        pub max_tool_calls: Option<usize>,
        #[schema(value_type = Object)]
        pub metadata: SharedJson,
        pub parallel_tool_calls: bool,
        pub previous_response_id: Option<String>,
        pub prompt_cache_key: Option<String>,
        pub reasoning: Reasoning,
        pub safety_identifier: Option<String>,
        #[schema(inline)]
        pub service_tier: ServiceTier,
        /// Whether the response is stored.
        pub store: bool,
        /// The value that was used: the request's, or the model's default.
        pub temperature: Option<f64>,
        pub text: TextFormat,
        /// The request's own value.
        #[schema(value_type = Value)]
        pub tool_choice: SharedJson,
        #[schema(value_type = Vec<RepeatedTool>)]
        pub tools: SharedJson,
        pub top_logprobs: i64,
        /// The value that was used: the request's, or the model's default.
        pub top_p: Option<f64>,
        #[schema(inline)]
        pub truncation: Truncation,
        pub user: Option<String>,
        /// What of the request was left out. Absent if nothing was.
        pub warnings?: Vec<String>,
    }
}

impl ResponseError {
    /// The error in OpenAI's words for an error within a stream. Those are fewer than the codes of a status, and clients decide
    /// by them whether to send the request again.
    pub fn new(error: &ApiError) -> Self {
        let code = match (error, error.status().as_u16()) {
            // OpenAI's list does not have this code, but its service sends it, and Codex then shortens the conversation.
            (ApiError::Context { .. }, _) => ErrorCode::ContextLengthExceeded,
            (_, 429) => ErrorCode::RateLimitExceeded,
            // The same request would succeed for a client that reads its answer.
            (ApiError::Engine(EngineError::SlowReader), _) => ErrorCode::ServerError,
            // A stream cannot have the header that says so any longer.
            _ if error.would_fail_again() => ErrorCode::InvalidPrompt,
            (_, 400..500) => ErrorCode::InvalidPrompt,
            _ => ErrorCode::ServerError,
        };
        Self { code, message: error.to_string() }
    }
}

impl RepeatedRequest {
    /// Fills in the sampling values that the request left to the model's defaults.
    pub fn use_sampling(&mut self, sampling: &SamplingParams) {
        // The shortest decimal of an f32 is the number that its author wrote.
        let written = |value: f32| value.to_string().parse().ok();
        self.temperature = self.temperature.or_else(|| written(sampling.temperature));
        self.top_p = self.top_p.or_else(|| written(sampling.top_p));
    }
}

replies! {
    /// The request's own effort. There are no summaries: thoughts are in the output as they are.
    #[derive(Debug, Clone, Default)]
    pub(in crate::api) struct Reasoning {
        #[schema(inline)]
        effort: Option<Effort>,
        /// Always null.
        summary: Option<String>,
    }

    #[derive(Debug, Clone)]
    pub(in crate::api) struct TextFormat {
        /// The request's own value.
        #[schema(value_type = Object)]
        pub format: SharedJson,
    }

    /// A tool of the request, with defaults for what the request left out.
    #[derive(Debug, Clone)]
    pub(in crate::api) struct RepeatedTool {
        #[schema(inline)]
        r#type: Function,
        name: String,
        description: Option<String>,
        #[schema(value_type = Object)]
        parameters: SharedJson,
        strict: bool,
    }
}

impl Reasoning {
    pub fn new(asked: Option<&ReasoningOptions>) -> Self {
        Self { effort: asked.and_then(|asked| asked.effort.clone()), summary: None }
    }
}

/// A JSON value as text, which all copies share. The memory of the value itself may be many times as large, and a request may
/// wait for a long time.
#[derive(Debug, Clone)]
pub(in crate::api) struct SharedJson(Arc<RawValue>);

impl SharedJson {
    pub fn new(value: &impl Serialize) -> Self {
        Self(to_raw_value(value).expect("JSON, whose keys are texts").into())
    }
}

impl Serialize for SharedJson {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl RepeatedTool {
    /// All tools of a request, as a JSON list.
    pub fn all(tools: &Tools) -> SharedJson {
        let tool = |tool: &crate::session::Tool| Self {
            r#type: Function::Function,
            name: tool.name.clone(),
            description: tool.description.clone(),
            parameters: SharedJson::new(&tool.parameters),
            strict: tool.strict,
        };
        SharedJson::new(&tools.list.iter().map(tool).collect::<Vec<_>>())
    }
}

/// An item of a response's output.
#[derive(Clone, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(in crate::api) enum OutputItem {
    /// What the model thought.
    Reasoning {
        id: String,
        status: ItemStatus,
        /// Always empty.
        summary: Vec<String>,
        content: Vec<ReasoningPart>,
    },
    Message {
        id: String,
        status: ItemStatus,
        #[schema(inline)]
        role: Assistant,
        content: Vec<OutputPart>,
    },
    FunctionCall {
        id: String,
        status: ItemStatus,
        call_id: String,
        name: String,
        /// The arguments as JSON, which is incomplete if the end of the answer cut it.
        arguments: String,
    },
}

/// A part of a thought.
#[derive(Clone, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(in crate::api) enum ReasoningPart {
    ReasoningText { text: String },
}

/// A part of an output message.
#[derive(Clone, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(in crate::api) enum OutputPart {
    OutputText {
        text: String,
        /// Always empty.
        annotations: Vec<String>,
        logprobs: Vec<TokenLogprob>,
    },
}

impl OutputPart {
    pub fn text(text: &str, logprobs: &[TokenLogprob]) -> Self {
        let (text, logprobs) = (text.to_owned(), logprobs.to_vec());
        Self::OutputText { text, annotations: Vec::new(), logprobs }
    }
}

impl OutputItem {
    /// The item of a call that has come to its end, or was cut.
    pub fn from_call(call: &PartialCall) -> Self {
        let status = if call.is_complete() { ItemStatus::Completed } else { ItemStatus::Incomplete };
        Self::call(call, status, call.arguments.clone())
    }

    /// The item of a call that begins.
    pub fn from_begun_call(call: &PartialCall) -> Self {
        Self::call(call, ItemStatus::InProgress, String::new())
    }

    fn call(call: &PartialCall, status: ItemStatus, arguments: String) -> Self {
        let call_id = format!("call_{}", call.id);
        Self::FunctionCall { id: item_id(call), status, call_id, name: call.name.clone(), arguments }
    }
}

/// The id of a call's item.
pub(in crate::api) fn item_id(call: &PartialCall) -> String {
    format!("fc_{}", call.id)
}

replies! {
    /// The numbers of tokens of the conversation and of the answer.
    #[derive(Clone)]
    pub(in crate::api) struct ResponsesUsage {
        input_tokens: usize,
        input_tokens_details: InputTokensDetails,
        output_tokens: usize,
        output_tokens_details: OutputTokensDetails,
        total_tokens: usize,
    }

    #[derive(Clone)]
    struct InputTokensDetails {
        cached_tokens: usize,
        cache_write_tokens: usize,
    }

    #[derive(Clone)]
    struct OutputTokensDetails {
        reasoning_tokens: usize,
    }
}

impl ResponsesUsage {
    pub fn new(timings: &Timings) -> Self {
        let Timings { prompt_n, cached_n, predicted_n, thought_n, .. } = *timings;
        Self {
            input_tokens: prompt_n,
            input_tokens_details: InputTokensDetails { cached_tokens: cached_n, cache_write_tokens: 0 },
            output_tokens: predicted_n,
            output_tokens_details: OutputTokensDetails { reasoning_tokens: thought_n },
            total_tokens: prompt_n + predicted_n,
        }
    }
}

/// One event of a stream, with its number.
#[derive(Serialize, ToSchema)]
#[schema(as = ResponseEvent)]
pub(in crate::api) struct NumberedEvent {
    #[serde(flatten)]
    pub event: ResponseEvent,
    pub sequence_number: u64,
}

#[derive(Clone, Serialize, ToSchema)]
#[serde(tag = "type")]
#[schema(as = ResponseEventKind)]
pub(in crate::api) enum ResponseEvent {
    #[serde(rename = "response.created")]
    Created { response: ResponseObject },
    #[serde(rename = "response.in_progress")]
    InProgress { response: ResponseObject },
    #[serde(rename = "response.completed")]
    Completed { response: ResponseObject },
    #[serde(rename = "response.incomplete")]
    Incomplete { response: ResponseObject },
    #[serde(rename = "response.failed")]
    Failed { response: ResponseObject },
    #[serde(rename = "response.output_item.added")]
    ItemAdded { output_index: usize, item: OutputItem },
    #[serde(rename = "response.output_item.done")]
    ItemDone { output_index: usize, item: OutputItem },
    #[serde(rename = "response.content_part.added")]
    PartAdded { item_id: String, output_index: usize, content_index: usize, part: OutputPart },
    #[serde(rename = "response.content_part.done")]
    PartDone { item_id: String, output_index: usize, content_index: usize, part: OutputPart },
    #[serde(rename = "response.reasoning_text.delta")]
    ReasoningDelta { item_id: String, output_index: usize, content_index: usize, delta: String },
    #[serde(rename = "response.reasoning_text.done")]
    ReasoningDone { item_id: String, output_index: usize, content_index: usize, text: String },
    #[serde(rename = "response.output_text.delta")]
    TextDelta {
        item_id: String,
        output_index: usize,
        content_index: usize,
        delta: String,
        logprobs: Vec<TokenLogprob>,
    },
    #[serde(rename = "response.output_text.done")]
    TextDone {
        item_id: String,
        output_index: usize,
        content_index: usize,
        text: String,
        logprobs: Vec<TokenLogprob>,
    },
    #[serde(rename = "response.function_call_arguments.delta")]
    ArgumentsDelta { item_id: String, output_index: usize, delta: String },
    #[serde(rename = "response.function_call_arguments.done")]
    ArgumentsDone { item_id: String, output_index: usize, name: String, arguments: String },
}

impl ResponseEvent {
    /// The last event of a stream whose answer ended without an error.
    pub fn ended(reason: Reason, response: ResponseObject) -> Self {
        match reason {
            Reason::Stop | Reason::Called => Self::Completed { response },
            Reason::Length => Self::Incomplete { response },
        }
    }
}

replies! {
    /// A deleted response.
    pub(in crate::api) struct DeletedResponse {
        pub id: String,
        #[schema(inline)]
        pub object: ObjectName,
        pub deleted: bool,
    }
}

/// A page of the items of a conversation.
#[derive(ToSchema)]
#[allow(dead_code, reason = "a page is assembled from stored JSON; this type describes it")]
pub(in crate::api) struct ItemList {
    #[schema(inline)]
    object: ListName,
    data: Vec<KeptItem>,
    /// The first item's id; empty if there are no items.
    first_id: String,
    /// The last item's id; empty if there are no items.
    last_id: String,
    has_more: bool,
}

/// An item as the client sent it, with defaults for what the client left out.
enum KeptItem {}

impl PartialSchema for KeptItem {
    fn schema() -> RefOr<Schema> {
        let text = || ObjectBuilder::new().schema_type(Type::String).build();
        let item = ObjectBuilder::new().schema_type(Type::Object);
        let item = item.property("id", text()).required("id").property("type", text()).required("type");
        RefOr::T(item.additional_properties(Some(AdditionalProperties::FreeForm(true))).build().into())
    }
}

impl ToSchema for KeptItem {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::library::LibraryError;

    #[test]
    fn copies_of_repeated_values_share_one_text() {
        let value = serde_json::json!({"a": [1, null, "x"]});
        let shared = SharedJson::new(&value);
        let format = TextFormat { format: shared.clone() };
        assert!(Arc::ptr_eq(&shared.0, &format.format.0));
        assert_eq!(serde_json::to_value(format).expect("JSON"), serde_json::json!({"format": value}));
    }

    #[test]
    fn an_error_within_a_stream_says_whether_the_request_is_at_fault() {
        let context = ApiError::context("the prompt has 9 tokens, and the context 8");
        let full = LibraryError::QueueFull { model: "m".into(), waiting: 3 };
        for (error, code) in [
            (context, "context_length_exceeded"),
            (ApiError::invalid("tools[0].parameters", "expected a schema"), "invalid_prompt"),
            (ApiError::Library(LibraryError::Gone("m".into())), "invalid_prompt"),
            (ApiError::QueueFull { waiting: 3 }, "rate_limit_exceeded"),
            (ApiError::Library(full), "rate_limit_exceeded"),
            (ApiError::Engine(EngineError::SlowReader), "server_error"),
            (ApiError::Engine(EngineError::LostTwice("ring timeout".into())), "invalid_prompt"),
            (ApiError::Engine(EngineError::NotFinite), "invalid_prompt"),
            (ApiError::Engine(EngineError::Lost("ring timeout".into())), "server_error"),
            (ApiError::Loading, "server_error"),
        ] {
            let found = serde_json::to_value(ResponseError::new(&error)).expect("JSON");
            assert_eq!(found, serde_json::json!({"code": code, "message": error.to_string()}));
        }
    }
}
