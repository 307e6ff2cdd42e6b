//! Models: a checkpoint's config and weights, and the forward pass over the device.
//!
//! This module does not know requests, queues or clocks: the engine above hands it a [`Batch`] of plain arrays.

pub mod arch;
pub mod config;
mod dense;
pub mod draft;
mod evaluate;
mod forward;
pub mod gemma3;
mod gemma3n;
mod gemma4;
pub mod heaps;
pub mod model_runner;
mod kv_blocks;
mod layer_check;
mod layers;
mod llama;
pub mod load;
pub mod memory;
pub mod offload;
mod qwen2;
mod qwen3;
mod qwen3_moe;
pub(crate) mod rates;
pub mod rig;
pub mod rope;
mod runner;
mod sampling;
#[doc(hidden)]
pub mod self_test;
pub mod spec;
pub(crate) mod step;
mod streams;
pub(crate) mod submits;
pub mod tensors;
pub mod tune;
pub mod twin;
pub mod vision;
pub mod weights;

pub use crate::gpu::Counts;
pub(crate) use offload::longest_chunk;
pub(crate) use runner::words;
pub use runner::{
    Batch, BatchSequence, BlockCopy, BlockList, DraftRequest, Draw, HistoryCopy, ImageBudget, ImageLimits,
    ImageSizes, ImageSpan, Input, KvLimits, KvPool, Limits, Logprobs, MAX_BIASES, MAX_LOGPROBS, PoolBlock,
    Pooling, Runner, RunnerError, RunnerFactory, Sampled, Sampling, Ticket, first_seen,
};
pub use sampling::{SamplingOptions, SamplingParams};
