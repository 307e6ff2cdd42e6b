//! What the architectures of plain dense decoders have in common: the fields of their configs, their layers, tensors and
//! GGUF files. What distinguishes them is data ([`Dense`]), so that each folder has little more than that.
//!
//! A layer has a norm before attention, and one before the feed-forward network, which SiLU gates. Norm weights are used
//! as stored. Optional are norms of queries and keys, biases of queries, keys and values, a window, and a head of its own.

mod config;
mod gguf;
mod tensors;

pub(super) use config::{Defaults, Dense, full_attention, read};
pub(super) use gguf::{config as gguf_config, config_without_experts as gguf_config_without_experts};
pub(super) use tensors::NAMES;
