//! Anthropic's words: bodies of `/v1/messages`, and what is answered there.

use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;

use crate::api::anthropic::request::{TEMPERATURE, TOP_K};
use crate::api::fields::{PROBABILITY, TOKENS};
use crate::api::openapi::bodies::{cache_salt, function, model};
use crate::api::openapi::schema::{
    Shape, any_object, any_of, anything, count, described, flag, integer, kind, list, list_of, named,
    nothing, number, or_null, string, string_of, word,
};
use crate::session::MAX_TOOLS;
use crate::text::{MAX_STOP_BYTES, MAX_STOPS};

described! {
    MessagesRequest [MessageParam, MessageText, CustomTool] => request();
    CountTokensRequest [MessageParam, MessageText, CustomTool] => conversation().build();
    MessageParam [MessageText] => message_param();
    MessageText [] => Shape::new("").needs("type", kind("text")).needs("text", string("")).build();
    CustomTool [] => function(Shape::new("").takes("type", kind("custom")), "input_schema")
        .needs("input_schema", super::bodies::arguments_schema())
        .build();
    Message [MessageText, MessageToolUse, MessageUsage] => message();
    MessageToolUse [] => Shape::new("")
        .needs("type", kind("tool_use"))
        .needs("id", string(""))
        .needs("name", string(""))
        .needs("input", any_object(""))
        .build();
    MessageUsage [] => Shape::new("Of the prompt, what the prefix cache had does not count as input.")
        .needs("input_tokens", count())
        .needs("cache_creation_input_tokens", count())
        .needs("cache_read_input_tokens", count())
        .needs("output_tokens", count())
        .build();
    MessageEvent [Message, MessageText, MessageToolUse, MessageUsage, AnthropicError] => event();
    TokenCount [] => Shape::new("").needs("input_tokens", count()).build();
    AnthropicError [] => error();
}

fn text() -> Schema {
    any_of([string("").into(), list_of(named::<MessageText>()).into()], "Blocks are paragraphs.")
}

fn request() -> Schema {
    let stop = string_of(1..=MAX_STOP_BYTES, None, "");
    conversation()
        .needs("max_tokens", integer(TOKENS, "The context may end before."))
        .takes("stop_sequences", list(stop, 0..=MAX_STOPS, "The answer ends before these."))
        .takes("stream", flag("Server-sent events."))
        .takes("temperature", number(TEMPERATURE, "0 is greedy."))
        .takes("top_p", number(PROBABILITY, ""))
        .takes("top_k", integer(TOP_K, "0 is off."))
        .takes("cache_salt", cache_salt())
        .build()
}

fn conversation() -> Shape {
    let format = Shape::new("What the answer must be: every keyword of the schema is enforced, or an error.")
        .needs("type", kind("json_schema"))
        .needs("schema", any_object(""));
    let choice = |kinds: &[&str]| {
        let choice = Shape::new("").needs("type", word(kinds, ""));
        choice.takes("disable_parallel_tool_use", flag("At most one call."))
    };
    let one = choice(&["tool"]).needs("name", string("That of a tool that is there."));
    Shape::new("Unknown fields are ignored, and so are `metadata`, `cache_control` and `thinking`.")
        .takes("model", model())
        .needs(
            "messages",
            list(named::<MessageParam>(), 1..=usize::MAX, "The last may be the beginning of the answer."),
        )
        .takes("system", text())
        .takes("tools", list(named::<CustomTool>(), 0..=MAX_TOOLS, "Their names differ."))
        .takes(
            "tool_choice",
            any_of([choice(&["auto", "none", "any"]).build().into(), one.build().into()], ""),
        )
        .takes("output_config", Shape::new("").takes("format", format.build()).build())
        .takes("container", nothing("Not to be had."))
        .takes("thread", nothing("Not to be had."))
        .takes("mcp_servers", list(anything(""), 0..=0, "Not to be had."))
}

fn message_param() -> Schema {
    let of = |role: &str, blocks: RefOr<Schema>| {
        let content = any_of([string("").into(), list_of(blocks).into()], "Blocks of text are paragraphs.");
        Shape::new("").needs("role", kind(role)).needs("content", content).build().into()
    };
    let result = Shape::new("")
        .needs("type", kind("tool_result"))
        .needs("tool_use_id", string("That of a call in the message before."))
        .takes("content", text())
        .takes("is_error", flag(""));
    let thoughts = Shape::new("Ignored.").needs("type", word(&["thinking", "redacted_thinking"], ""));
    let user = any_of([named::<MessageText>(), result.build().into()], "");
    let call = Shape::new("")
        .needs("type", kind("tool_use"))
        .needs("id", string(""))
        .needs("name", string(""))
        .needs("input", any_object(""));
    let assistant = any_of([named::<MessageText>(), call.build().into(), thoughts.build().into()], "");
    any_of(
        [of("user", user.into()), of("assistant", assistant.into()), of("system", named::<MessageText>())],
        "",
    )
}

fn stop_reason() -> RefOr<Schema> {
    let words = ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"];
    or_null(word(&words, "").into())
}

fn message() -> Schema {
    Shape::new("")
        .needs("id", string(""))
        .needs("type", kind("message"))
        .needs("role", kind("assistant"))
        .needs("model", string(""))
        .needs("content", list_of(any_of([named::<MessageText>(), named::<MessageToolUse>()], "")))
        .needs("stop_reason", stop_reason())
        .needs("stop_sequence", or_null(string("The one that ended it.").into()))
        .needs("usage", named::<MessageUsage>())
        .build()
}

fn event() -> Schema {
    let of = |name| Shape::new("").needs("type", kind(name));
    let at = |name| of(name).needs("index", count());
    let text = of("text_delta").needs("text", string(""));
    let input = of("input_json_delta").needs("partial_json", string(""));
    let delta =
        Shape::new("").needs("stop_reason", stop_reason()).needs("stop_sequence", or_null(string("").into()));
    any_of(
        [
            of("message_start").needs("message", named::<Message>()).build().into(),
            at("content_block_start")
                .needs("content_block", any_of([named::<MessageText>(), named::<MessageToolUse>()], ""))
                .build()
                .into(),
            of("ping").build().into(),
            at("content_block_delta")
                .needs("delta", any_of([text.build().into(), input.build().into()], ""))
                .build()
                .into(),
            at("content_block_stop").build().into(),
            of("message_delta")
                .needs("delta", delta.build())
                .needs("usage", named::<MessageUsage>())
                .build()
                .into(),
            of("message_stop").build().into(),
            named::<AnthropicError>(),
        ],
        "",
    )
}

fn error() -> Schema {
    let error = Shape::new("")
        .needs("type", string(""))
        .needs("message", string("For the person who asked."))
        .may("details", Shape::new("").needs("error_code", string("For the program that asked.")).build());
    Shape::new("")
        .needs("type", kind("error"))
        .needs("error", error.build())
        .may("request_id", string("Not in a stream."))
        .build()
}
