//! The description of a model as data: what its layers compute, and its tensors. An architecture's folder produces it
//! from a config; the runner, the memory plan and the reference pass read it, and know no architecture.

use serde_json::{Map, Value};

use super::config::{ConfigError, Level, MAX_HEAD_DIM, MAX_HEADS, MAX_INTERMEDIATE};
use super::rope::RopeSpec;
use super::runner::KvPool;
use super::tensors::{Layer, LayerSizes, ModelTensors, TensorSpec};
use super::vision::VisionSpec;
use crate::checkpoint::gguf::GgufArch;
use crate::kernels::{Experts, HiddenAct, LayerKind, MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN, head_dim_multiple};
use crate::tensor::TILE_ROWS;

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
    /// Short names for files on the hub, which are those that Ollama's users know.
    pub short_names: &'static [(&'static str, &'static str)],
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
    /// The largest width of dense feed-forward networks.
    pub intermediate_size: usize,
    /// The embeddings that every layer has of a token, besides the one that enters the first layer.
    pub per_layer: Option<PerLayerInputs>,
    /// The residual streams, in a model with more than one.
    pub streams: Option<ResidualStreams>,
    /// Names of tensors that a checkpoint may have and no layer uses, without the prefix of the language model.
    pub unused_tensors: Vec<String>,
    pub mixture: Option<Mixture>,
    /// The tower that reads images, if the config describes one, or why it cannot be computed. A checkpoint may lack its
    /// tensors.
    pub vision: Result<Option<VisionSpec>, String>,
    /// Factor of attention scores.
    pub score_scale: f64,
    /// Whether values have a norm without weights.
    pub has_value_norm: bool,
    /// The activation of the gate in the feed-forward network.
    pub hidden_act: HiddenAct,
    pub norm_eps: f32,
    pub norm_weight: NormWeight,
    /// Factor of the embeddings that enter the first layer.
    pub embed_scale: f32,
    /// The logits `x` become `c * tanh(x / c)` with this `c`, if there is one.
    pub final_logit_softcap: Option<f32>,
    pub max_position_embeddings: usize,
    pub layers: Vec<LayerSpec>,
    /// The RoPE tables of the layers.
    pub ropes: Vec<RopeSpec>,
    pub tensors: ModelTensors<TensorSpec>,
    /// Ids that each end an answer; ascending, below `vocab_size`.
    pub eos_token_ids: Vec<u32>,
    /// Ids that are never drawn.
    pub suppress_tokens: Vec<u32>,
    /// The id that begins texts. The tokenizer decides whether it is put in front of them.
    pub bos_token_id: Option<u32>,
}

/// The embeddings that every layer has of a token. They are the sum of a row of a table and of a product with the embedding
/// that enters the first layer, which is normed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PerLayerInputs {
    /// Elements in one layer.
    pub width: usize,
    /// Factor of the rows of the table.
    pub embed_scale: f32,
    /// Factor of the product.
    pub projection_scale: f32,
    /// Factor of the sum.
    pub sum_scale: f32,
}

/// Several residual streams, of which layers compute the first. A layer also adds a learned residual (Laurel,
/// <https://arxiv.org/abs/2411.07501>): the input of attention, and its product with two matrices, which is normed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResidualStreams {
    /// Rows of the first matrix, which are the columns of the second one.
    pub laurel_rank: usize,
}

/// What distinguishes one layer from the others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerSpec {
    /// The number of positions that the attention of a token sees, its own included; `None` = all.
    pub window: Option<usize>,
    /// Index in [`ModelSpec::ropes`].
    pub rope: usize,
    pub heads: AttentionHeads,
    /// Whether `k_proj` computes the values too: they are the keys before norm and RoPE.
    pub has_values_of_keys: bool,
    /// The earlier layer whose keys and values this layer uses, in place of its own. It has the same window and heads.
    pub kv_source: Option<usize>,
    /// The width of the dense feed-forward network.
    pub intermediate_size: usize,
    /// Only the elements of the gate that exceed the mean by so many standard deviations are not 0.
    pub gate_cutoff: Option<f32>,
    pub feed_forward: FeedForward,
}

/// What a layer has after attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeedForward {
    /// A network that all tokens use.
    Dense,
    /// Experts, of which each token uses a few.
    Experts,
    /// Both, side by side. The norms of both results are added.
    DenseAndExperts,
}

/// The experts of a model's layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mixture {
    pub experts: Experts,
    /// The width of an expert.
    pub intermediate_size: usize,
    /// Factor of the router's logits.
    pub router_factor: f32,
}

/// The heads of a layer's attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionHeads {
    /// Number of query heads, a multiple of `num_key_value_heads`.
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    /// Dimension of a head, from 16 to 512: a multiple of 4, above 256 of 8.
    pub head_dim: usize,
}

impl AttentionHeads {
    /// The heads of a config's layers. Without `num_key_value_heads` or `head_dim`, `kv_heads` and `head_dim` compute
    /// them from the number of query heads.
    pub(super) fn read(
        level: &Level,
        heads: usize,
        kv_heads: impl Fn(usize) -> usize,
        head_dim: impl Fn(usize) -> usize,
    ) -> Result<AttentionHeads, ConfigError> {
        let num_attention_heads = level.size("num_attention_heads", heads, 1..=MAX_HEADS)?;
        let num_key_value_heads =
            level.optional_size("num_key_value_heads", kv_heads(num_attention_heads), 1..=MAX_HEADS)?;
        let head_dim = level.optional_size("head_dim", head_dim(num_attention_heads), 16..=MAX_HEAD_DIM)?;
        check_head_dim(level, "head_dim", head_dim)?;
        let heads = AttentionHeads { num_attention_heads, num_key_value_heads, head_dim };
        check_group(level, &heads)?;
        Ok(heads)
    }

    /// The heads of layers with another size or other KV heads.
    pub(super) fn with(
        self,
        level: &Level,
        num_key_value_heads: usize,
        (name, head_dim): (&str, usize),
    ) -> Result<AttentionHeads, ConfigError> {
        check_head_dim(level, name, head_dim)?;
        let heads = AttentionHeads { num_key_value_heads, head_dim, ..self };
        check_group(level, &heads)?;
        Ok(heads)
    }

    /// Number of query heads per KV head.
    pub fn group(&self) -> usize {
        self.num_attention_heads / self.num_key_value_heads
    }

    /// Number of elements of a token's queries.
    pub fn q_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Number of elements of a token's keys, and of its values.
    pub fn kv_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }
}

fn check_head_dim(level: &Level, name: &str, head_dim: usize) -> Result<(), ConfigError> {
    let multiple = head_dim_multiple(head_dim);
    if head_dim.is_multiple_of(multiple) && (16..=MAX_HEAD_DIM).contains(&(head_dim as u64)) {
        return Ok(());
    }
    let problem = format!("is {head_dim}; expected a multiple of {multiple} from 16 to {MAX_HEAD_DIM}");
    Err(level.error(name, problem))
}

fn check_group(level: &Level, heads: &AttentionHeads) -> Result<(), ConfigError> {
    let &AttentionHeads { num_attention_heads: queries, num_key_value_heads: keys, head_dim } = heads;
    let problem = match queries * head_dim {
        _ if !queries.is_multiple_of(keys) => {
            format!("is {queries}; expected a multiple of num_key_value_heads ({keys})")
        }
        width if width > MAX_INTERMEDIATE as usize => {
            format!("times head_dim ({head_dim}) is {width}; expected at most {MAX_INTERMEDIATE}")
        }
        _ => return Ok(()),
    };
    Err(level.error("num_attention_heads", problem))
}

impl Mixture {
    /// Checks what the kernels need. `names` are the fields of the number of experts, of the number that a token uses, and
    /// of their width.
    pub(super) fn check(
        self,
        level: &Level,
        hidden_size: usize,
        names: [&str; 3],
    ) -> Result<Mixture, ConfigError> {
        let Experts { count, per_token, .. } = self.experts;
        let [of_count, of_used, of_width] = names;
        if !(1..=MAX_EXPERTS).contains(&count) {
            let problem = format!("is {count}; at most {MAX_EXPERTS} experts can be computed");
            return Err(level.error(of_count, problem));
        }
        let most = MAX_EXPERTS_PER_TOKEN.min(count);
        if !(1..=most).contains(&per_token) {
            return Err(level.error(of_used, format!("is {per_token}; expected 1 to {most}")));
        }
        for (name, size) in [(of_width, self.intermediate_size), ("hidden_size", hidden_size)] {
            if !size.is_multiple_of(TILE_ROWS) {
                let problem =
                    format!("is {size}; expected a multiple of {TILE_ROWS} in a mixture of experts");
                return Err(level.error(name, problem));
            }
        }
        Ok(self)
    }
}

/// What the layers of a group have in common. One pool has the KV blocks of a group's layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvGroup {
    /// As [`LayerSpec::window`].
    pub window: Option<usize>,
    pub heads: AttentionHeads,
}

impl LayerSpec {
    /// The sizes of the layer's tensors.
    pub(super) fn sizes(&self) -> LayerSizes {
        LayerSizes {
            q_width: self.heads.q_width(),
            kv_width: self.heads.kv_width(),
            head_dim: self.heads.head_dim,
            has_k_proj: self.kv_source.is_none(),
            has_v_proj: self.kv_source.is_none() && !self.has_values_of_keys,
            intermediate_size: self.intermediate_size,
            has_mlp: self.feed_forward != FeedForward::Experts,
            has_experts: self.feed_forward != FeedForward::Dense,
        }
    }

    fn kv_group(&self) -> KvGroup {
        KvGroup { window: self.window, heads: self.heads }
    }
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
    /// What the kernels of a layer compute, apart from shapes. It is the same in all layers of a model.
    pub fn layer_kind(&self) -> LayerKind {
        let Layer { norms, biases, .. } = &self.tensors.layers[0];
        LayerKind {
            activation: self.hidden_act,
            has_post_norms: norms.post_attention_layernorm.is_some(),
            has_qk_norms: norms.q_norm.is_some(),
            has_biases: biases.q_proj.is_some(),
            has_value_norm: self.has_value_norm,
            experts: self.mixture.map(|mixture| mixture.experts),
            has_expert_norm: norms.pre_feedforward_layernorm_2.is_some(),
            has_streams: self.streams.is_some(),
        }
    }

    /// The matrix that computes the logits: that of the embedding, unless the model has another one.
    pub fn head(&self) -> &TensorSpec {
        self.tensors.lm_head.as_ref().unwrap_or(&self.tensors.embed_tokens)
    }

    /// The largest number of positions that layers with a window see; `None` if no layer has a window.
    pub fn window(&self) -> Option<usize> {
        self.layers.iter().filter_map(|layer| layer.window).max()
    }

    /// The part of the elements of a tensor that one token multiplies: experts are used in part.
    pub fn share_per_token(&self, spec: &TensorSpec) -> f64 {
        match self.mixture {
            Some(Mixture { experts, .. }) if spec.is_of_experts() => {
                experts.per_token as f64 / experts.count as f64
            }
            _ => 1.0,
        }
    }

    /// The heads of the first layer.
    pub fn heads(&self) -> AttentionHeads {
        self.layers[0].heads
    }

    /// The heads of all layers, each once.
    pub fn distinct_heads(&self) -> Vec<AttentionHeads> {
        each_once(self.layers.iter().map(|layer| layer.heads))
    }

    /// The heads of the layers with this window, or of the first layer if there are none.
    pub fn heads_in(&self, window: Option<usize>) -> AttentionHeads {
        let same = self.layers.iter().find(|layer| layer.window == window);
        same.unwrap_or(&self.layers[0]).heads
    }

    /// The dimension of the heads that a table of [`ModelSpec::ropes`] rotates: that of the layers that use it.
    pub fn rope_dim(&self, rope: usize) -> usize {
        let used = self.layers.iter().find(|layer| layer.rope == rope);
        used.map_or(self.heads().head_dim, |layer| layer.heads.head_dim)
    }

    /// The distinct groups of the layers. Groups without a window come first, and there is at least one, even if all
    /// layers have windows: its blocks stand for all tokens of a sequence.
    pub fn kv_groups(&self) -> Vec<KvGroup> {
        let mut groups = each_once(self.layers.iter().map(LayerSpec::kv_group));
        groups.sort_by_key(|group| group.window.is_some());
        if let Some(&group) = groups.first().filter(|group| group.window.is_some()) {
            groups.insert(0, KvGroup { window: None, ..group });
        }
        groups
    }

    /// A pool for each group of the layers, without blocks.
    pub fn kv_pools(&self) -> Vec<KvPool> {
        self.kv_groups().iter().map(|group| KvPool { window: group.window, blocks: 0 }).collect()
    }

    /// The index of each layer's pool in `pools`, which are this model's pools, or those of the model that it drafts
    /// for. Each group has a pool of its own, with the smallest window that is large enough; `None` if there are too few
    /// pools.
    pub fn pools_of_layers(&self, pools: &[KvPool]) -> Option<Vec<usize>> {
        let reach = |window: Option<usize>| window.unwrap_or(usize::MAX);
        let groups = self.kv_groups();
        let mut taken: Vec<usize> = Vec::new();
        for group in &groups {
            let free = (0..pools.len()).filter(|pool| !taken.contains(pool));
            let suffices = free.filter(|pool| reach(pools[*pool].window) >= reach(group.window));
            taken.push(suffices.min_by_key(|pool| reach(pools[*pool].window))?);
        }
        let group_of = |layer: &LayerSpec| groups.iter().position(|group| *group == layer.kv_group());
        self.layers.iter().map(|layer| Some(taken[group_of(layer)?])).collect()
    }
}

/// The distinct elements, in the order in which they appear first.
pub(super) fn each_once<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut once = Vec::new();
    for one in all {
        if !once.contains(&one) {
            once.push(one);
        }
    }
    once
}

/// A published size of an architecture, for plans and synthetic checkpoints, which need real shapes and no weights.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// The model's name on the hub.
    pub name: &'static str,
    config_json: fn() -> String,
    /// The fields of `config.json` that describe the vision tower.
    tower: Option<fn() -> Value>,
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
        Self { name, config_json, tower: None, read }
    }

    /// The same shape, of a model with a vision tower. `tower` returns the fields of `config.json` that describe it.
    pub(super) const fn with_tower(self, tower: fn() -> Value) -> Self {
        Self { tower: Some(tower), ..self }
    }

    /// The text of a `config.json` of the language model alone.
    pub fn config_json(&self) -> String {
        (self.config_json)()
    }

    /// The language model alone.
    pub fn spec(&self) -> ModelSpec {
        self.read_with(Map::new())
    }

    /// The language model, with its vision tower if it has one.
    pub fn spec_with_tower(&self) -> ModelSpec {
        let Some(fields) = self.tower else { return self.spec() };
        let Value::Object(tower) = fields() else { panic!("{}: fields of a tower", self.name) };
        self.read_with(tower)
    }

    /// The vision tower, if the model has one.
    pub fn tower(&self) -> Option<VisionSpec> {
        self.spec_with_tower().vision.expect("a published tower is valid")
    }

    /// Reads the config with these fields besides.
    fn read_with(&self, more: Map<String, Value>) -> ModelSpec {
        let mut config: Map<_, _> = serde_json::from_str(&self.config_json()).expect("the config is JSON");
        config.extend(more);
        (self.read)(&config.into(), self.name).expect("a published config is valid")
    }
}
