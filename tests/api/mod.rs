//! The HTTP API over the scripted runner: every route, field, event and error. No test here needs a Vulkan device.

mod auth;
mod chat_completions;
mod completions;
mod connections;
mod control_tokens;
mod disconnect;
mod embeddings;
mod encodings;
mod health;
mod messages;
mod model_names;
mod native_calls;
mod ollama;
mod openapi;
mod other_fields;
mod page;
mod prefix_sharing;
mod random_bodies;
mod recorded_refusals;
mod responses;
mod routes;
mod server_errors;
mod structured_output;
mod thoughts;
mod token_fields;
mod tool_calls;
