//! Fields of other servers' requests that this server does not have, and whether each is ignored or refused. Fields that
//! only another route of this server has are included.
//!
//! A client that sends such a field was written for another server, or for another route. A field that would change the
//! answer is refused by name, unless its value turns it off. A field that cannot change the answer is ignored, so that the
//! client works. Names in none of the tables are ignored as well.
//!
//! The tables are in the document, as `x-other-fields` of the body's schema, where `docs/api.md` and the tests read them.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::{Value, json};
use utoipa::openapi::RefOr;
use utoipa::openapi::extensions::Extensions;
use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::{PartialSchema, ToSchema};

use crate::api::wire::unsupported;

/// A field of requests to `server`.
pub(in crate::api) struct OtherField {
    name: &'static str,
    server: &'static str,
    treatment: Treatment,
}

pub(in crate::api) enum Treatment {
    /// Ignored. The text says why the field cannot change an answer of this server.
    Ignored(&'static str),
    /// Refused, except with one of these values. The text says what to do.
    Refused(&'static [Off], &'static str),
}

/// A value that turns a field off. Null always does.
#[derive(Clone, Copy)]
pub(in crate::api) enum Off {
    False,
    True,
    Number(f64),
    EmptyText,
    EmptyList,
    EmptyObject,
    Word(&'static str),
}

impl Off {
    fn value(self) -> Value {
        match self {
            Self::False => json!(false),
            Self::True => json!(true),
            Self::Number(n) if n.fract() == 0.0 => json!(n as i64),
            Self::Number(n) => json!(n),
            Self::EmptyText => json!(""),
            Self::EmptyList => json!([]),
            Self::EmptyObject => json!({}),
            Self::Word(word) => json!(word),
        }
    }

    fn is(self, value: &Value) -> bool {
        match self {
            Self::Number(n) => value.as_f64() == Some(n),
            other => *value == other.value(),
        }
    }
}

const fn ignored(name: &'static str, server: &'static str, why: &'static str) -> OtherField {
    OtherField { name, server, treatment: Treatment::Ignored(why) }
}

const fn refused(
    name: &'static str,
    server: &'static str,
    off: &'static [Off],
    instead: &'static str,
) -> OtherField {
    OtherField { name, server, treatment: Treatment::Refused(off, instead) }
}

const OPENAI: &str = "OpenAI";
const VLLM: &str = "vLLM";
const LLAMA: &str = "llama.cpp";
const OLLAMA: &str = "Ollama";
const ANTHROPIC: &str = "Anthropic";
const TGI: &str = "TGI";

const ZERO: &[Off] = &[Off::Number(0.0)];
const ONE: &[Off] = &[Off::Number(1.0)];
const MINUS_ONE: &[Off] = &[Off::Number(-1.0)];
const ZERO_OR_LESS: &[Off] = &[Off::Number(0.0), Off::Number(-1.0)];
const FALSE: &[Off] = &[Off::False];
const TRUE: &[Off] = &[Off::True];
const NO_TEXT: &[Off] = &[Off::EmptyText];
const NO_LIST: &[Off] = &[Off::EmptyList];
const NO_OBJECT: &[Off] = &[Off::EmptyObject];
const NO_TEXTS: &[Off] = &[Off::EmptyList, Off::EmptyText];
const NEVER_OFF: &[Off] = &[];

const SAMPLERS: &str = "this server samples with temperature, top_k, top_p and min_p";
const NO_MIROSTAT: &str = "it belongs to mirostat, which is refused";
const NO_DRY: &str = "it belongs to dry_multiplier, which is refused";
const NO_XTC: &str = "it belongs to xtc_probability, which is refused";
const NO_BEAMS: &str = "it belongs to use_beam_search, which is refused";
const OWN_FIELDS: &str = "thoughts come in fields of their own";
const AS_EFFORT: &str = "use reasoning_effort in a chat, reasoning in a response, thinking in a message";
const AS_BUDGET: &str = "use thinking_token_budget in a chat, reasoning.max_tokens in a response, thinking.budget_tokens in a message";
const SPECULATION: &str = "speculation changes how fast an answer comes, and not the answer";
const CACHING: &str = "the prefix cache is always on";
const STORES_NOTHING: &str = "the server keeps no chats";
const ONE_MODEL: &str = "engine.idle_unload_s, or keep_alive of the last request of Ollama's API, says when the model is unloaded";
const MEDIA_FIXED: &str = "the file of every image is read in the same way";
const OWN_TEMPLATE: &str =
    "the checkpoint's own chat template is used; use /v1/completions for a prompt of your own";
const ONLY_IN_CHATS: &str = "chats and completions have it";
const AS_A_MESSAGE: &str = "send it as a message of the role system";
const IN_THE_BODY: &str = "put the options into the body itself: temperature, top_k, max_tokens";

/// Fields of every body that asks for an answer.
const OF_ANSWERS: &[OtherField] = &[
    refused("mirostat", LLAMA, ZERO, SAMPLERS),
    ignored("mirostat_tau", LLAMA, NO_MIROSTAT),
    ignored("mirostat_eta", LLAMA, NO_MIROSTAT),
    refused("typical_p", LLAMA, ONE, SAMPLERS),
    refused("tfs_z", LLAMA, ONE, SAMPLERS),
    refused("top_n_sigma", LLAMA, ZERO_OR_LESS, SAMPLERS),
    refused("xtc_probability", LLAMA, ZERO, SAMPLERS),
    ignored("xtc_threshold", LLAMA, NO_XTC),
    refused("dry_multiplier", LLAMA, ZERO, SAMPLERS),
    ignored("dry_base", LLAMA, NO_DRY),
    ignored("dry_allowed_length", LLAMA, NO_DRY),
    ignored("dry_penalty_last_n", LLAMA, NO_DRY),
    ignored("dry_sequence_breakers", LLAMA, NO_DRY),
    refused("dynatemp_range", LLAMA, ZERO, SAMPLERS),
    ignored("dynatemp_exponent", LLAMA, "it belongs to dynatemp_range, which is refused"),
    refused("adaptive_target", LLAMA, MINUS_ONE, SAMPLERS),
    ignored("adaptive_decay", LLAMA, "it belongs to adaptive_target, which is refused"),
    refused("min_keep", LLAMA, ZERO, SAMPLERS),
    refused("samplers", LLAMA, NO_TEXTS, "the order is min_p, top_k, top_p"),
    refused("repeat_last_n", LLAMA, MINUS_ONE, "penalties look at the whole text; leave it out"),
    refused("n_probs", LLAMA, ZERO, "use logprobs"),
    refused("post_sampling_probs", LLAMA, FALSE, "logprobs are those before sampling"),
    refused("n_indent", LLAMA, ZERO, "this server does not have it"),
    refused("t_max_predict_ms", LLAMA, ZERO_OR_LESS, "use max_tokens, or close the connection"),
    refused("t_max_prompt_ms", LLAMA, ZERO_OR_LESS, "close the connection"),
    refused("grammar_lazy", LLAMA, FALSE, "a grammar holds the whole answer"),
    refused("grammar_triggers", LLAMA, NO_LIST, "a grammar holds the whole answer"),
    refused("lora", LLAMA, NO_LIST, "this server has no adapters"),
    refused("return_tokens", LLAMA, FALSE, "use return_token_ids"),
    refused("return_progress", LLAMA, FALSE, "this server does not have it"),
    refused("response_fields", LLAMA, NO_LIST, "this server does not have it"),
    refused("verbose", LLAMA, FALSE, "this server does not have it"),
    refused("n_cmpl", LLAMA, ONE, "use n"),
    refused("parse_tool_calls", LLAMA, TRUE, "leave out tools to get plain text"),
    ignored("cache_prompt", LLAMA, CACHING),
    ignored("n_cache_reuse", LLAMA, CACHING),
    ignored("id_slot", LLAMA, "answers share the cache by blocks, and there are no slots"),
    ignored("n_keep", LLAMA, "no context is ever shifted"),
    ignored("n_discard", LLAMA, "no context is ever shifted"),
    ignored("backend_sampling", LLAMA, "the device always samples"),
    ignored("reasoning_format", LLAMA, OWN_FIELDS),
    refused("reasoning_budget_tokens", LLAMA, MINUS_ONE, AS_BUDGET),
    ignored("sse_ping_interval", LLAMA, "a comment comes every 5 s while nothing else does"),
    ignored("speculative.n_max", LLAMA, SPECULATION),
    ignored("speculative.n_min", LLAMA, SPECULATION),
    ignored("speculative.p_min", LLAMA, SPECULATION),
    refused("use_beam_search", VLLM, FALSE, "use n and a temperature"),
    ignored("length_penalty", VLLM, NO_BEAMS),
    refused("prompt_logprobs", VLLM, NEVER_OFF, "use echo and logprobs of /v1/completions"),
    refused("truncation_side", VLLM, &[Off::Word("left")], "a prompt is cut from its beginning"),
    refused("logprob_token_ids", VLLM, NO_LIST, "use top_logprobs"),
    refused("include_stop_str_in_output", VLLM, FALSE, "a stop text is no part of the answer"),
    refused("skip_special_tokens", VLLM, TRUE, "special tokens have no text; use return_token_ids"),
    ignored("spaces_between_special_tokens", VLLM, "special tokens have no text"),
    refused("return_tokens_as_token_ids", VLLM, FALSE, "use return_token_ids"),
    refused("repetition_detection", VLLM, NEVER_OFF, "use stop or repetition_penalty"),
    refused("vllm_xargs", VLLM, NO_OBJECT, "this server does not have it"),
    refused("watermarking", VLLM, FALSE, "this server does not have it"),
    ignored("priority", VLLM, "use the header X-Unicorn-Priority"),
    ignored("request_id", VLLM, "use the header x-request-id"),
    ignored("kv_transfer_params", VLLM, "there is one server"),
    ignored("media_io_kwargs", VLLM, MEDIA_FIXED),
    refused("format", OLLAMA, NO_TEXT, "use response_format"),
    refused("options", OLLAMA, NO_OBJECT, IN_THE_BODY),
    refused("template", OLLAMA, NO_TEXT, OWN_TEMPLATE),
    ignored("keep_alive", OLLAMA, ONE_MODEL),
    refused("think", OLLAMA, TRUE, AS_EFFORT),
];

/// Fields of chats and completions, which other bodies have themselves or cannot have.
const OF_CHATS_AND_COMPLETIONS: &[OtherField] = &[
    ignored("user", OPENAI, "it names the client's own user"),
    ignored("metadata", OPENAI, STORES_NOTHING),
    refused("num_predict", OLLAMA, MINUS_ONE, "use max_tokens"),
    refused("max_new_tokens", TGI, NEVER_OFF, "use max_tokens"),
    refused("max_output_tokens", OPENAI, NEVER_OFF, "use max_tokens"),
    refused("stop_sequences", ANTHROPIC, NO_LIST, "use stop"),
];

const OF_CHATS: &[OtherField] = &[
    refused("instructions", OPENAI, NO_TEXT, AS_A_MESSAGE),
    refused("previous_response_id", OPENAI, NEVER_OFF, "use /v1/responses"),
    refused("system", ANTHROPIC, NO_TEXTS, AS_A_MESSAGE),
    refused("output_config", ANTHROPIC, NO_OBJECT, "use response_format"),
    refused("audio", OPENAI, NEVER_OFF, "this server answers with text only"),
    refused("web_search_options", OPENAI, NEVER_OFF, "this server searches nothing"),
    ignored("store", OPENAI, STORES_NOTHING),
    ignored("service_tier", OPENAI, "all requests have the same"),
    ignored("prediction", OPENAI, SPECULATION),
    ignored("prompt_cache_key", OPENAI, "the prefix cache finds prompts by themselves; use cache_salt"),
    ignored("prompt_cache_retention", OPENAI, CACHING),
    ignored("safety_identifier", OPENAI, "it names the client's own user"),
    ignored("verbosity", OPENAI, "the model knows no verbosity; say in the prompt what you want"),
    refused("best_of", VLLM, ONE, "use n: all answers are returned"),
    refused("echo", VLLM, FALSE, "use /v1/completions"),
    refused("add_special_tokens", VLLM, FALSE, OWN_TEMPLATE),
    refused("chat_template", VLLM, NO_TEXT, OWN_TEMPLATE),
    refused("documents", VLLM, NO_LIST, "put them into a message"),
    refused("return_prompt_text", VLLM, FALSE, "use return_token_ids"),
    ignored("include_reasoning", VLLM, OWN_FIELDS),
];

const OF_COMPLETIONS: &[OtherField] = &[
    ignored("thinking_token_budget", VLLM, "a completion has its thoughts in its text"),
    refused("max_completion_tokens", OPENAI, NEVER_OFF, "use max_tokens"),
    refused("top_logprobs", OPENAI, ZERO, "use logprobs"),
    refused("tools", OPENAI, NO_LIST, "use /v1/chat/completions"),
    ignored("mm_processor_kwargs", VLLM, "a completion has no images"),
    refused("prompt_embeds", VLLM, NEVER_OFF, "send a text or token ids as prompt"),
    refused("add_special_tokens", VLLM, TRUE, "send token ids as prompt"),
    refused("raw", OLLAMA, &[Off::False, Off::True], "a prompt is always raw"),
];

/// What chats and completions have, and responses and Anthropic's messages do not.
const OF_RESPONSES_AND_MESSAGES: &[OtherField] = &[
    refused("n", OPENAI, ONE, ONLY_IN_CHATS),
    refused("seed", OPENAI, NEVER_OFF, ONLY_IN_CHATS),
    refused("logit_bias", OPENAI, NO_OBJECT, ONLY_IN_CHATS),
    refused("presence_penalty", OPENAI, ZERO, ONLY_IN_CHATS),
    refused("frequency_penalty", OPENAI, ZERO, ONLY_IN_CHATS),
    refused("repetition_penalty", VLLM, ONE, ONLY_IN_CHATS),
    refused("min_p", VLLM, ZERO, ONLY_IN_CHATS),
    refused("ignore_eos", VLLM, FALSE, ONLY_IN_CHATS),
    refused("thinking_token_budget", VLLM, NEVER_OFF, AS_BUDGET),
    refused("reasoning_effort", OPENAI, NEVER_OFF, AS_EFFORT),
];

/// What a chat has, and a response has under another name or not at all.
const OF_RESPONSES: &[OtherField] = &[
    ignored("service_tier", OPENAI, "all requests have the same"),
    ignored("max_tool_calls", OPENAI, "the server runs no tools"),
    ignored("prompt_cache_retention", OPENAI, CACHING),
    refused("max_tokens", OPENAI, NEVER_OFF, "use max_output_tokens"),
    refused("max_completion_tokens", OPENAI, NEVER_OFF, "use max_output_tokens"),
    refused("response_format", OPENAI, NEVER_OFF, "use text.format"),
    refused("stop", OPENAI, NO_TEXTS, ONLY_IN_CHATS),
    refused("top_k", VLLM, ZERO_OR_LESS, ONLY_IN_CHATS),
    refused("structured_outputs", VLLM, NEVER_OFF, "use text.format"),
    refused("stop_sequences", ANTHROPIC, NO_LIST, "chats and completions have stop"),
    refused("system", ANTHROPIC, NO_TEXTS, "use instructions"),
];

/// What a chat has, and one of Anthropic's messages has under another name or not at all.
const OF_MESSAGES: &[OtherField] = &[
    refused("max_completion_tokens", OPENAI, NEVER_OFF, "use max_tokens"),
    refused("max_output_tokens", OPENAI, NEVER_OFF, "use max_tokens"),
    refused("response_format", OPENAI, NEVER_OFF, "use output_config.format"),
    refused("stop", OPENAI, NO_TEXTS, "use stop_sequences"),
    refused("instructions", OPENAI, NO_TEXT, "use system"),
    refused("logprobs", OPENAI, FALSE, ONLY_IN_CHATS),
    refused("top_logprobs", OPENAI, ZERO, ONLY_IN_CHATS),
    refused("structured_outputs", VLLM, NEVER_OFF, "use output_config.format"),
    refused("mm_processor_kwargs", VLLM, NO_OBJECT, "use image_tokens"),
];

const BY_SERVER: &str = "the server's own options decide it at its start";

/// Options of Ollama's `options` that this server does not have.
const OF_OLLAMA_OPTIONS: &[OtherField] = &[
    ignored("num_keep", OLLAMA, "no context is ever shifted"),
    ignored("num_batch", OLLAMA, BY_SERVER),
    ignored("num_gpu", OLLAMA, "the GPU computes all layers"),
    ignored("main_gpu", OLLAMA, BY_SERVER),
    ignored("use_mmap", OLLAMA, BY_SERVER),
    ignored("use_mlock", OLLAMA, BY_SERVER),
    ignored("num_thread", OLLAMA, "the GPU computes all layers"),
    ignored("numa", OLLAMA, BY_SERVER),
    ignored("low_vram", OLLAMA, BY_SERVER),
    ignored("f16_kv", OLLAMA, BY_SERVER),
    ignored("draft_num_predict", OLLAMA, SPECULATION),
    ignored("repeat_last_n", OLLAMA, "penalties look at the whole text"),
    ignored("penalize_newline", OLLAMA, "newer versions of Ollama ignore it too"),
    ignored("typical_p", OLLAMA, SAMPLERS),
    ignored("tfs_z", OLLAMA, SAMPLERS),
    ignored("mirostat", OLLAMA, SAMPLERS),
    ignored("mirostat_tau", OLLAMA, SAMPLERS),
    ignored("mirostat_eta", OLLAMA, SAMPLERS),
];

/// The tables of one body.
pub(in crate::api) trait Tables {
    const TABLES: &[&[OtherField]];
}

pub(in crate::api) struct Chat;
pub(in crate::api) struct Completion;
pub(in crate::api) struct Response;
pub(in crate::api) struct Message;
pub(in crate::api) struct OllamaOptions;

impl Tables for Chat {
    const TABLES: &[&[OtherField]] = &[OF_ANSWERS, OF_CHATS_AND_COMPLETIONS, OF_CHATS];
}

impl Tables for Completion {
    const TABLES: &[&[OtherField]] = &[OF_ANSWERS, OF_CHATS_AND_COMPLETIONS, OF_COMPLETIONS];
}

impl Tables for OllamaOptions {
    const TABLES: &[&[OtherField]] = &[OF_OLLAMA_OPTIONS];
}

impl Tables for Response {
    const TABLES: &[&[OtherField]] = &[OF_ANSWERS, OF_RESPONSES_AND_MESSAGES, OF_RESPONSES];
}

impl Tables for Message {
    const TABLES: &[&[OtherField]] = &[OF_ANSWERS, OF_RESPONSES_AND_MESSAGES, OF_MESSAGES];
}

/// The fields of a body that are in the tables `T`. Reading them refuses the body, or keeps nothing.
pub(in crate::api) struct OtherFields<T>(PhantomData<T>);

fn fields<T: Tables>() -> impl Iterator<Item = &'static OtherField> {
    T::TABLES.iter().copied().flatten()
}

impl<'de, T: Tables> Deserialize<'de> for OtherFields<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read<T>(PhantomData<T>);

        impl<'de, T: Tables> Visitor<'de> for Read<T> {
            type Value = OtherFields<T>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut body: A) -> Result<Self::Value, A::Error> {
                while let Some(name) = body.next_key::<String>()? {
                    match fields::<T>().find(|field| field.name == name).map(|field| &field.treatment) {
                        Some(Treatment::Refused(off, instead)) => {
                            body.next_value_seed(IsOff(off, instead))?
                        }
                        Some(Treatment::Ignored(_)) | None => body.next_value::<IgnoredAny>().map(|_| ())?,
                    }
                }
                Ok(OtherFields(PhantomData))
            }
        }

        deserializer.deserialize_map(Read(PhantomData))
    }
}

/// Reads a value that must turn its field off.
struct IsOff(&'static [Off], &'static str);

impl<'de> DeserializeSeed<'de> for IsOff {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        let Self(off, instead) = self;
        let value = Value::deserialize(deserializer)?;
        if value.is_null() || off.iter().any(|off| off.is(&value)) {
            return Ok(());
        }
        Err(unsupported(format_args!("this server does not do that: {instead}")))
    }
}

impl<T: Tables> PartialSchema for OtherFields<T> {
    fn schema() -> RefOr<utoipa::openapi::schema::Schema> {
        let described: Vec<Value> = fields::<T>().map(described).collect();
        let extensions = Extensions::builder().add("x-other-fields", described).build();
        let nothing = ObjectBuilder::new().schema_type(Type::Object).extensions(Some(extensions));
        RefOr::T(nothing.build().into())
    }
}

impl<T: Tables> ToSchema for OtherFields<T> {}

fn described(field: &OtherField) -> Value {
    let OtherField { name, server, treatment } = field;
    match treatment {
        Treatment::Ignored(why) => {
            json!({"name": name, "server": server, "treatment": "ignored", "about": why})
        }
        Treatment::Refused(off, instead) => {
            let off: Vec<Value> = off.iter().map(|off| off.value()).collect();
            json!({"name": name, "server": server, "treatment": "refused", "off": off, "about": instead})
        }
    }
}
