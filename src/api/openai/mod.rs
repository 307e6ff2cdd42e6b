//! OpenAI's wire formats: chat, completions, responses, embeddings, token counts, models.

pub(in crate::api) mod chat;
pub(in crate::api) mod completions;
pub(in crate::api) mod conversation;
pub(in crate::api) mod embeddings;
pub(in crate::api) mod grammar;
pub(in crate::api) mod input_tokens;
pub(in crate::api) mod logprobs;
pub(in crate::api) mod models;
pub(in crate::api) mod options;
pub(in crate::api) mod other_fields;
pub(in crate::api) mod prompts;
pub(in crate::api) mod responses;
pub(in crate::api) mod tools;
