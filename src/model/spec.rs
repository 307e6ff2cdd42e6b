//! The description of a model as data: what its layers compute, and its tensors. An architecture's folder produces it
//! from a config; the runner, the memory plan and the reference pass read it, and know no architecture.

use serde_json::Value;

use super::config::ConfigError;
use super::runner::BlockPool;
use super::tensors::{ModelTensors, TensorSpec};
use crate::checkpoint::gguf::GgufArch;

/// An architecture.
#[derive(Debug)]
pub struct Arch {
    /// The name in messages.
    pub name: &'static str,
    /// The values of `model_type` in `config.json`.
    pub model_types: &'static [&'static str],
    /// Reads a `config.json`. The second argument is the file's name in messages.
    pub read: fn(&Value, &str) -> Result<ModelSpec, ConfigError>,
    pub gguf: &'static GgufArch,
    /// The names of the sizes that benchmarks measure by default, separated by commas.
    pub measured: &'static str,
    /// The name of a published model on the hub, as an example.
    pub hub_example: &'static str,
    /// The published sizes, from the smallest to the largest.
    pub shapes: &'static [Shape],
}

impl PartialEq for Arch {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

/// A model that can be computed.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    pub arch: &'static Arch,
    /// Number of rows of the embedding; the tokenizer may know fewer ids.
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    /// Number of query heads, a multiple of `num_key_value_heads`.
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    /// Dimension of a head, a multiple of 4 from 32 to 256.
    pub head_dim: usize,
    /// Factor of attention scores.
    pub score_scale: f64,
    pub norm_eps: f32,
    pub norm_weight: NormWeight,
    /// Factor of the embeddings that enter the first layer.
    pub embed_scale: f32,
    pub max_position_embeddings: usize,
    pub layers: Vec<LayerSpec>,
    /// The RoPE tables of the layers.
    pub ropes: Vec<RopeSpec>,
    pub tensors: ModelTensors<TensorSpec>,
    /// Ids that each end an answer; ascending, below `vocab_size`.
    pub eos_token_ids: Vec<u32>,
    pub bos_token_id: u32,
    pub pad_token_id: u32,
}

/// What distinguishes one layer from the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSpec {
    /// The number of positions that the attention of a token sees, its own included; `None` = all.
    pub window: Option<usize>,
    /// Index in [`ModelSpec::ropes`].
    pub rope: usize,
}

impl LayerSpec {
    /// The pool of the layer's KV blocks.
    pub fn pool(&self) -> BlockPool {
        match self.window {
            Some(_) => BlockPool::Sliding,
            None => BlockPool::Full,
        }
    }
}

/// A table of rotations: the angle of pair `i` at position `p` is `p * theta^(-2i / head_dim) / factor`.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeSpec {
    /// The layers that use it, in messages.
    pub name: &'static str,
    pub theta: f64,
    pub factor: f64,
}

/// The factor by which a norm multiplies, from the stored weight `w`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormWeight {
    /// `w`
    AsStored,
    /// `1 + w`
    OnePlus,
}

impl ModelSpec {
    /// The number of positions that windowed layers see; `None` if no layer has a window.
    pub fn window(&self) -> Option<usize> {
        self.layers.iter().find_map(|layer| layer.window)
    }

    /// The number of layers whose KV blocks are in a pool.
    pub fn layers_of(&self, pool: BlockPool) -> usize {
        self.layers.iter().filter(|layer| layer.pool() == pool).count()
    }
}

/// A published size of an architecture, for plans and synthetic checkpoints, which need real shapes and no weights.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// The model's name on the hub.
    pub name: &'static str,
    config_json: fn() -> String,
    read: fn(&Value, &str) -> Result<ModelSpec, ConfigError>,
}

impl PartialEq for Shape {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Shape {
    /// A shape whose `config.json` is the result of `config_json`; `read` reads it.
    pub(super) const fn new(
        name: &'static str,
        config_json: fn() -> String,
        read: fn(&Value, &str) -> Result<ModelSpec, ConfigError>,
    ) -> Self {
        Self { name, config_json, read }
    }

    /// The text of a `config.json`.
    pub fn config_json(&self) -> String {
        (self.config_json)()
    }

    pub fn spec(&self) -> ModelSpec {
        let config = serde_json::from_str(&self.config_json()).expect("the config is JSON");
        (self.read)(&config, self.name).expect("a published config is valid")
    }
}
