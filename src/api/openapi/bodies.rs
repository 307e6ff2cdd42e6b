//! Bodies of requests. They are read by hand, so that each error names its field, and so what they may be is written down
//! here; with the very constants that the readers check against. What no schema can say is left to errors: a prompt that is too
//! long, an id beyond the vocabulary, fields that exclude each other, a grammar that does not compile.

use utoipa::openapi::schema::Schema;

use crate::api::fields::{
    ANSWERS, BIAS, MAX_STOPS, PENALTY, PROBABILITY, REPETITION_PENALTY, TEMPERATURE, TOKENS, TOP_K,
    TOP_LOGPROBS,
};
use crate::api::openai::prompts::{DIMENSIONS, MAX_INPUTS, MAX_PROMPTS};
use crate::api::openapi::schema::{
    Shape, any_object, any_of, anything, described, flag, integer, integer_of_64_bits, kind, list, map,
    named, not_true, nothing, number, string, string_of, token_id, word,
};
use crate::api::sharing::SALT_BYTES;
use crate::api::tools::MAX_NAME_BYTES;
use crate::session::MAX_TOOLS;
use crate::text::{MAX_CHOICES, MAX_STOP_BYTES};

described! {
    ChatCompletionRequest [ChatMessage, Tool, ToolChoice, ResponseFormat] => chat();
    CompletionRequest [ResponseFormat] => completion();
    EmbeddingsRequest [] => embeddings();
    TokenizeRequest [ChatMessage, Tool, ToolChoice] => tokenize();
    DetokenizeRequest [] => detokenize();
    NamedModel [] => Shape::new("Unknown fields are ignored.").takes("model", model()).build();
    ChatMessage [TextPart] => message();
    TextPart [] => Shape::new("").needs("type", word(&["text"], "")).needs("text", string("")).build();
    Tool [] => tool();
    ToolChoice [] => tool_choice();
    ResponseFormat [] => response_format();
}

pub(in crate::api) fn model() -> Schema {
    string("The id that `/v1/models` names, which is taken where this is absent or empty.")
}

fn chat() -> Schema {
    let body = Shape::new("Unknown fields are ignored.")
        .takes("model", model())
        .needs("messages", messages())
        .takes("max_completion_tokens", integer(TOKENS, "As many as the context holds, if it is absent."))
        .takes(
            "max_tokens",
            integer(TOKENS, "The older name; `max_completion_tokens` counts where both are there."),
        )
        .takes("logprobs", flag("Log probabilities of the answer's tokens."))
        .takes("top_logprobs", integer(TOP_LOGPROBS, "Alternatives to each; above 0 only with `logprobs`."))
        .takes("modalities", list(word(&["text"], ""), 0..=usize::MAX, ""));
    ending(tools(options(body))).build()
}

fn messages() -> Schema {
    list(named::<ChatMessage>(), 1..=usize::MAX, "")
}

/// What chats and completions have beside the prompt.
fn options(body: Shape) -> Shape {
    let id = string_of(1..=usize::MAX, Some(r"^\+?[0-9]+$"), "");
    let usage = Shape::new("").takes("include_usage", flag("`usage` in a last event of its own."));
    let stop = || string_of(1..=MAX_STOP_BYTES, None, "");
    body.takes("stream", flag("Server-sent events."))
        .takes("stream_options", usage.build())
        .takes("temperature", number(TEMPERATURE, "0 is greedy."))
        .takes("top_p", number(PROBABILITY, ""))
        .takes("top_k", integer(TOP_K, "0 and -1 are off."))
        .takes("min_p", number(PROBABILITY, ""))
        .takes("presence_penalty", number(PENALTY, ""))
        .takes("frequency_penalty", number(PENALTY, ""))
        .takes("repetition_penalty", number(REPETITION_PENALTY, "vLLM's name."))
        .takes("repeat_penalty", number(REPETITION_PENALTY, "llama.cpp's name for it."))
        .takes("logit_bias", map(id, number(BIAS, ""), "What is added to a token's logit, by id."))
        .takes("seed", integer_of_64_bits("The same seed gives the same answer."))
        .takes(
            "stop",
            any_of([stop().into(), list(stop(), 0..=MAX_STOPS, "").into()], "The answer ends before these."),
        )
        .takes("min_tokens", integer(0..=*TOKENS.end(), "At most as many as the answer may have."))
        .takes("ignore_eos", flag("The answer goes on to its limit."))
        .takes("cache_salt", cache_salt())
        .takes("n", integer(ANSWERS, "Answers; no more than the server runs at once."))
        .takes("response_format", named::<ResponseFormat>())
        .takes("structured_outputs", structured_outputs())
        .takes("guided_json", json_schema())
        .takes("guided_regex", string(""))
        .takes("guided_choice", choices())
        .takes("guided_grammar", string("Lark, as llguidance reads it."))
}

/// vLLM's.
pub(in crate::api) fn cache_salt() -> Schema {
    string_of(SALT_BYTES, None, "Who has the same salt shares the prefix cache, and nobody else does.")
}

fn json_schema() -> Schema {
    any_of([any_object("").into(), string("The same as text.").into()], "A JSON schema.")
}

fn choices() -> Schema {
    list(string(""), 1..=MAX_CHOICES, "")
}

/// vLLM's.
fn structured_outputs() -> Schema {
    Shape::new("What the answer must be: one of these, or a `response_format`.")
        .takes("json", json_schema())
        .takes("regex", string(""))
        .takes("choice", choices())
        .takes("grammar", string("Lark, as llguidance reads it."))
        .takes("json_object", flag("Any JSON object."))
        .takes("structural_tag", not_true("Not to be had."))
        .takes("whitespace_pattern", not_true("Not to be had."))
        .takes("disable_any_whitespace", not_true("Not to be had."))
        .takes("disable_additional_properties", not_true("Not to be had."))
        .build()
}

fn response_format() -> Schema {
    let of = |name| Shape::new("").needs("type", kind(name));
    let schema = Shape::new("")
        .takes("name", string(""))
        .takes("strict", flag("Every keyword is enforced, or it is an error."))
        .needs("schema", any_object(""));
    any_of(
        [
            of("text").build().into(),
            of("json_object").takes("schema", any_object("llama.cpp's.")).build().into(),
            of("json_schema").needs("json_schema", schema.build()).build().into(),
        ],
        "What the answer must be.",
    )
}

fn tools(body: Shape) -> Shape {
    body.takes("tools", list(named::<Tool>(), 0..=MAX_TOOLS, "Their names differ."))
        .takes("tool_choice", named::<ToolChoice>())
        .takes(
            "parallel_tool_calls",
            flag("Whether one answer may make several calls; it may, if it is absent."),
        )
        .takes("functions", list(anything(""), 0..=usize::MAX, "Replaced by `tools`, and refused."))
        .takes("function_call", word(&["none", "auto"], "Replaced by `tool_choice`."))
}

fn function_name(about: &str) -> Schema {
    string_of(1..=MAX_NAME_BYTES, Some(r"^[^\u0000-\u001f\u007f-\u009f]*$"), about)
}

fn tool() -> Schema {
    let function = function(Shape::new(""), "parameters");
    Shape::new("").takes("type", kind("function")).needs("function", function.build()).build()
}

/// A function's fields; `schema` is what the one with its arguments is called.
pub(in crate::api) fn function(shape: Shape, schema: &str) -> Shape {
    shape
        .needs("name", function_name(""))
        .takes("description", string(""))
        .takes(schema, arguments_schema())
        .takes("strict", flag("Every keyword of the schema is enforced, or it is an error."))
}

pub(in crate::api) fn arguments_schema() -> Schema {
    Shape::new("A JSON schema of an object.").may("type", kind("object")).build()
}

fn tool_choice() -> Schema {
    let one = || {
        let function = Shape::new("").needs("name", string("That of a tool that is there."));
        Shape::new("").takes("type", kind("function")).needs("function", function.build()).build()
    };
    let allowed = Shape::new("Of the tools, these.")
        .needs("mode", word(&["auto", "required"], ""))
        .needs("tools", list(one(), 1..=MAX_TOOLS, ""));
    let some = Shape::new("").needs("type", kind("allowed_tools")).needs("allowed_tools", allowed.build());
    any_of([word(&["none", "auto", "required"], "").into(), one().into(), some.build().into()], "")
}

/// vLLM's two fields.
fn ending(body: Shape) -> Shape {
    body.takes(
        "continue_final_message",
        flag("The last message is the beginning of the answer, and the assistant's."),
    )
    .takes(
        "add_generation_prompt",
        flag("Whether an answer begins behind the last message; not with the other one."),
    )
}

fn message() -> Schema {
    let text = || {
        any_of(
            [string("").into(), list(named::<TextPart>(), 0..=usize::MAX, "Joined as they are.").into()],
            "",
        )
    };
    let of = |roles: &[&str]| {
        Shape::new("")
            .needs("role", word(roles, ""))
            .takes("function_call", nothing("Replaced by `tool_calls`."))
    };
    let no_calls = || list(anything(""), 0..=0, "Only an assistant's message has them.");
    let function = Shape::new("")
        .needs("name", string(""))
        .takes("arguments", any_of([string("JSON.").into(), any_object("The same, parsed.").into()], ""));
    let call = Shape::new("")
        .needs("id", string(""))
        .takes("type", kind("function"))
        .needs("function", function.build());
    any_of(
        [
            of(&["system", "developer", "user"])
                .needs("content", text())
                .takes("tool_calls", no_calls())
                .build()
                .into(),
            of(&["assistant"])
                .takes("content", text())
                .takes("tool_calls", list(call.build(), 0..=MAX_TOOLS, ""))
                .build()
                .into(),
            of(&["tool"])
                .takes("content", text())
                .needs("tool_call_id", string("That of a call in a message before this."))
                .takes("tool_calls", no_calls())
                .build()
                .into(),
        ],
        "",
    )
}

/// A text, token ids, or a list of those; up to `most`.
fn prompt(most: usize, text: fn() -> Schema, about: &str) -> Schema {
    let ids = || list(token_id(), 1..=usize::MAX, "Ids of tokens that the model has.");
    let each = any_of([text().into(), ids().into()], "");
    any_of([text().into(), ids().into(), list(each, 1..=most, "").into()], about)
}

fn completion() -> Schema {
    let body = Shape::new("Unknown fields are ignored.")
        .takes("model", model())
        .needs("prompt", prompt(MAX_PROMPTS, || string(""), "What to go on from."))
        .takes("max_tokens", integer(0..=*TOKENS.end(), "16, if it is absent; 0 only with `echo`."))
        .takes(
            "logprobs",
            integer(TOP_LOGPROBS, "Log probabilities of the tokens, and of so many alternatives."),
        )
        .takes("echo", flag("The answer begins with the prompt, and `logprobs` has its tokens."))
        .takes("suffix", string_of(0..=0, None, "Not to be had."))
        .takes("best_of", integer(ANSWERS, "The same as `n`: all answers are returned."));
    options(body).build()
}

fn embeddings() -> Schema {
    Shape::new("Unknown fields are ignored.")
        .takes("model", model())
        .needs("input", prompt(MAX_INPUTS, || string_of(1..=usize::MAX, None, ""), "What to embed."))
        .takes("encoding_format", word(&["float", "base64"], "`float`, if it is absent."))
        .takes("dimensions", integer(DIMENSIONS, "As many as the model has; it is not made to be cut."))
        .build()
}

fn tokenize() -> Schema {
    let body = |about| {
        let body = Shape::new(about).takes("model", model());
        let body =
            body.takes("content", string("")).takes("prompt", string("")).takes("messages", messages());
        let body =
            body.takes("add_special", flag("With `content`: the ids that begin a text; absent is false."));
        let body = body.takes("add_special_tokens", flag("The same with `prompt`; absent is true."));
        let body = body.takes("with_pieces", flag("With `content`: each id with its text."));
        body.takes("return_token_strs", flag("With `prompt` or `messages`: the text of each id."))
    };
    let conversation = ending(tools(body("vLLM's words, for a conversation.")));
    any_of(
        [
            body("llama.cpp's words.").needs("content", string("")).build().into(),
            body("vLLM's words.").needs("prompt", string("")).build().into(),
            conversation.needs("messages", messages()).build().into(),
        ],
        "Unknown fields are ignored.",
    )
}

fn detokenize() -> Schema {
    Shape::new("Unknown fields are ignored.")
        .takes("model", model())
        .needs("tokens", list(token_id(), 0..=usize::MAX, "Ids of tokens that the model has."))
        .build()
}
