//! OpenAI's second format: bodies of `/v1/responses`, and what is answered there.

use utoipa::IntoParams;
use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::Schema;
use utoipa::openapi::{RefOr, Required};

use crate::api::fields::{PROBABILITY, TEMPERATURE, TOKENS, TOP_LOGPROBS};
use crate::api::openai::logprobs::TokenLogprob;
use crate::api::openai::responses::items::PAGE;
use crate::api::openapi::bodies::{cache_salt, function, model};
use crate::api::openapi::schema::{
    Shape, any_object, any_of, anything, count, described, flag, integer, kind, list, list_of, named,
    not_true, nothing, number, or_null, string, word,
};
use crate::session::MAX_TOOLS;

described! {
    ResponsesRequest [InputItem, InputPart, FunctionTool, FunctionChoice] => request();
    InputItem [InputPart] => input_item();
    InputPart [] => input_part();
    FunctionTool [] => function(Shape::new("").takes("type", kind("function")), "parameters").build();
    FunctionChoice [] => choice();
    ResponseObject [OutputMessage, FunctionCall, ResponsesUsage] => response();
    OutputMessage [OutputText] => Shape::new("")
        .needs("id", string(""))
        .needs("type", kind("message"))
        .needs("status", status())
        .needs("role", kind("assistant"))
        .needs("content", list_of(named::<OutputText>()))
        .build();
    OutputText [TokenLogprob] => Shape::new("")
        .needs("type", kind("output_text"))
        .needs("text", string(""))
        .needs("annotations", list(anything(""), 0..=0, ""))
        .needs("logprobs", list_of(named::<TokenLogprob>()))
        .build();
    FunctionCall [] => Shape::new("")
        .needs("id", string(""))
        .needs("type", kind("function_call"))
        .needs("status", status())
        .needs("call_id", string(""))
        .needs("name", string(""))
        .needs("arguments", string("JSON; cut where the answer is."))
        .build();
    ResponsesUsage [] => usage();
    ResponseEvent [ResponseObject, OutputMessage, OutputText, FunctionCall, TokenLogprob] => event();
    ItemList [] => Shape::new("")
        .needs("object", kind("list"))
        .needs("data", list_of(item()))
        .needs("first_id", string("Empty where there are none."))
        .needs("last_id", string("Empty where there are none."))
        .needs("has_more", flag(""))
        .build();
    DeletedResponse [] => Shape::new("")
        .needs("id", string(""))
        .needs("object", kind("response"))
        .needs("deleted", flag(""))
        .build();
}

/// Parameters of a response that is kept.
pub(in crate::api) enum StreamQuery {}

impl IntoParams for StreamQuery {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        vec![optional("stream", flag("Not to be had."))]
    }
}

/// Parameters of a list of items.
pub(in crate::api) enum PageQuery {}

impl IntoParams for PageQuery {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        let most = *PAGE.start() as i64..=*PAGE.end() as i64;
        vec![
            optional("limit", integer(most, "Items of the page.")),
            optional("order", word(&["asc", "desc"], "The last first, if it is absent.")),
            optional("after", string("The id of an item, behind which the page begins.")),
        ]
    }
}

fn optional(name: &str, schema: Schema) -> Parameter {
    let parameter = ParameterBuilder::new().name(name).parameter_in(ParameterIn::Query);
    parameter.required(Required::False).schema(Some(schema)).build()
}

/// As it came, with what may be left out.
fn item() -> Schema {
    Shape::new("").needs("id", string("")).needs("type", string("")).and_more().build()
}

fn status() -> Schema {
    word(&["in_progress", "completed", "incomplete"], "")
}

fn request() -> Schema {
    let input = any_of(
        [
            string("").into(),
            list(named::<InputItem>(), 1..=usize::MAX, "One of them a message, at least.").into(),
        ],
        "",
    );
    let format = any_of(
        [
            Shape::new("").needs("type", word(&["text", "json_object"], "")).build().into(),
            Shape::new("")
                .needs("type", kind("json_schema"))
                .needs("name", string(""))
                .takes("strict", flag("Every keyword is enforced, or it is an error."))
                .needs("schema", any_object(""))
                .build()
                .into(),
        ],
        "What the answer must be.",
    );
    Shape::new("Unknown fields are ignored.")
        .takes("model", model())
        .needs("input", input)
        .takes("instructions", string("The system text of this response alone."))
        .takes(
            "previous_response_id",
            string("One that is kept for who asks; the conversation goes on from there."),
        )
        .takes("store", flag("Whether the response is kept; it is, if this is absent."))
        .takes("stream", flag("Server-sent events."))
        .takes("max_output_tokens", integer(TOKENS, "As many as the context holds, if it is absent."))
        .takes("temperature", number(TEMPERATURE, "0 is greedy."))
        .takes("top_p", number(PROBABILITY, ""))
        .takes("top_logprobs", integer(TOP_LOGPROBS, ""))
        .takes(
            "include",
            list(string(""), 0..=usize::MAX, "`message.output_text.logprobs` counts, others are ignored."),
        )
        .takes("text", Shape::new("").takes("format", format).build())
        .takes("tools", list(named::<FunctionTool>(), 0..=MAX_TOOLS, "Their names differ."))
        .takes("tool_choice", named::<FunctionChoice>())
        .takes(
            "parallel_tool_calls",
            flag("Whether one answer may make several calls; it may, if it is absent."),
        )
        .takes("cache_salt", cache_salt())
        .takes("metadata", any_object("Repeated."))
        .takes("prompt_cache_key", string("Repeated."))
        .takes("safety_identifier", string("Repeated."))
        .takes("user", string("Repeated."))
        .takes("truncation", word(&["auto", "disabled"], "What is too long is an error with either."))
        .takes("background", not_true("Not to be had."))
        .takes("conversation", nothing("Not to be had."))
        .takes("prompt", nothing("Not to be had."))
        .build()
}

fn input_part() -> Schema {
    any_of(
        [
            Shape::new("")
                .needs("type", word(&["input_text", "output_text", "text"], ""))
                .needs("text", string(""))
                .build()
                .into(),
            Shape::new("").needs("type", kind("refusal")).needs("refusal", string("")).build().into(),
        ],
        "",
    )
}

fn input_item() -> Schema {
    let text =
        || any_of([string("").into(), list_of(named::<InputPart>()).into()], "Parts are joined as they are.");
    let of = |name| Shape::new("").needs("type", kind(name));
    any_of(
        [
            Shape::new("")
                .takes("type", kind("message"))
                .needs("role", word(&["user", "assistant", "system", "developer"], ""))
                .needs("content", text())
                .build()
                .into(),
            of("function_call")
                .needs("call_id", string(""))
                .needs("name", string(""))
                .takes(
                    "arguments",
                    any_of([string("JSON.").into(), any_object("The same, parsed.").into()], ""),
                )
                .build()
                .into(),
            of("function_call_output")
                .needs("call_id", string("That of a call before this."))
                .needs("output", text())
                .build()
                .into(),
            of("reasoning").build().into(),
        ],
        "",
    )
}

fn choice() -> Schema {
    let one = || {
        Shape::new("").takes("type", kind("function")).needs("name", string("That of a tool that is there."))
    };
    let allowed = Shape::new("Of the tools, these.")
        .needs("type", kind("allowed_tools"))
        .needs("mode", word(&["auto", "required"], ""))
        .needs("tools", list(one().build(), 1..=MAX_TOOLS, ""));
    any_of([word(&["none", "auto", "required"], "").into(), one().build().into(), allowed.build().into()], "")
}

fn output() -> RefOr<Schema> {
    any_of([named::<OutputMessage>(), named::<FunctionCall>()], "").into()
}

fn response() -> Schema {
    let error =
        Shape::new("").needs("code", string("")).needs("message", string("For the person who asked."));
    let incomplete = Shape::new("").needs("reason", kind("max_output_tokens"));
    let reasoning = Shape::new("").needs("effort", nothing("")).needs("summary", nothing(""));
    let text = |about| or_null(string(about).into());
    Shape::new("")
        .needs("id", string(""))
        .needs("object", kind("response"))
        .needs("created_at", count())
        .needs("completed_at", or_null(count().into()))
        .needs("status", word(&["in_progress", "completed", "incomplete", "failed"], ""))
        .needs("error", or_null(error.build().into()))
        .needs("incomplete_details", or_null(incomplete.build().into()))
        .needs("model", string(""))
        .needs("output", list_of(output()))
        .needs("usage", or_null(named::<ResponsesUsage>()))
        .needs("background", flag(""))
        .needs("instructions", text(""))
        .needs("max_output_tokens", or_null(count().into()))
        .needs("max_tool_calls", nothing(""))
        .needs("metadata", any_object(""))
        .needs("parallel_tool_calls", flag(""))
        .needs("previous_response_id", text(""))
        .needs("prompt_cache_key", text(""))
        .needs("reasoning", reasoning.build())
        .needs("safety_identifier", text(""))
        .needs("service_tier", kind("default"))
        .needs("store", flag("Whether it is kept."))
        .needs("temperature", or_null(number(TEMPERATURE, "").into()))
        .needs("text", Shape::new("").needs("format", any_object("As it was asked for.")).build())
        .needs("tool_choice", any_of([string("").into(), any_object("").into()], "As it was asked for."))
        .needs("tools", list_of(any_object("")))
        .needs("top_logprobs", integer(TOP_LOGPROBS, ""))
        .needs("top_p", or_null(number(PROBABILITY, "").into()))
        .needs("truncation", kind("disabled"))
        .needs("user", text(""))
        .build()
}

fn usage() -> Schema {
    let one = |name| Shape::new("").needs(name, count());
    Shape::new("")
        .needs("input_tokens", count())
        .needs("input_tokens_details", one("cached_tokens").needs("cache_write_tokens", count()).build())
        .needs("output_tokens", count())
        .needs("output_tokens_details", one("reasoning_tokens").build())
        .needs("total_tokens", count())
        .build()
}

fn event() -> Schema {
    let of = |names: &[&str]| Shape::new("").needs("type", word(names, "")).needs("sequence_number", count());
    let at = |names: &[&str]| of(names).needs("item_id", string("")).needs("output_index", count());
    let within = |names: &[&str]| at(names).needs("content_index", count());
    let logprobs = || list_of(named::<TokenLogprob>());
    let whole = [
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ];
    any_of(
        [
            of(&whole).needs("response", named::<ResponseObject>()).build().into(),
            of(&["response.output_item.added", "response.output_item.done"])
                .needs("output_index", count())
                .needs("item", output())
                .build()
                .into(),
            within(&["response.content_part.added", "response.content_part.done"])
                .needs("part", named::<OutputText>())
                .build()
                .into(),
            within(&["response.output_text.delta"])
                .needs("delta", string(""))
                .needs("logprobs", logprobs())
                .build()
                .into(),
            within(&["response.output_text.done"])
                .needs("text", string(""))
                .needs("logprobs", logprobs())
                .build()
                .into(),
            at(&["response.function_call_arguments.delta"]).needs("delta", string("")).build().into(),
            at(&["response.function_call_arguments.done"])
                .needs("name", string(""))
                .needs("arguments", string(""))
                .build()
                .into(),
        ],
        "",
    )
}
