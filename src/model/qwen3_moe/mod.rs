//! Qwen 3 with experts: instead of a dense feed-forward network, most or all layers have experts. The router's input is
//! theirs, the normed residual stream.

use serde_json::{Value, json};

use super::config::{ConfigError, Level, MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LAYERS};
use super::dense::{self, Defaults, Dense, full_attention};
use super::qwen2;
use super::qwen3::WITH_QK_NORMS;
use super::spec::{Arch, FeedForward, Mixture, ModelSpec, Shape};
use super::tensors::{Layer, Names, Projections, RouterTensors};
use crate::checkpoint::gguf::GgufArch;
use crate::kernels::Experts;

pub(super) static ARCH: Arch = Arch {
    name: "Qwen 3 MoE",
    model_types: &["qwen3_moe"],
    read,
    gguf: &GGUF,
    measured: "qwen3-30b-a3b",
    hub_example: "Qwen/Qwen3-30B-A3B",
    short_names: &[("qwen3:30b", "Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M")],
    shapes: &SHAPES,
};

static SHAPES: [Shape; 1] = [Shape::new("qwen3-30b-a3b", published, read)];

static GGUF: GgufArch = GgufArch {
    name: "qwen3moe",
    config: |keys, tensors| {
        let mut config = dense::gguf_config_without_experts("qwen3_moe", &GGUF.tokens, keys, tensors)?;
        config["num_experts"] = json!(keys.required("expert_count")?);
        config["num_experts_per_tok"] = json!(keys.required("expert_used_count")?);
        config["moe_intermediate_size"] = json!(keys.required("expert_feed_forward_length")?);
        // No converter writes it. llama.cpp's weights of a token's experts always add up to 1.
        config["norm_topk_prob"] = json!(true);
        Ok(config)
    },
    layer_tensor: |name, what| NAMES.of_gguf(name, what),
    interleaved: &[],
    towers: &[],
    tokens: qwen2::TOKENS,
};

const NAMES: Layer<Names> = Layer {
    projections: Projections {
        expert_gate_proj: Some(Names::of("mlp.experts.gate_proj", "ffn_gate_exps")),
        expert_up_proj: Some(Names::of("mlp.experts.up_proj", "ffn_up_exps")),
        expert_down_proj: Some(Names::of("mlp.experts.down_proj", "ffn_down_exps")),
        ..WITH_QK_NORMS.projections
    },
    router: RouterTensors {
        proj: Some(Names::of("mlp.gate", "ffn_gate_inp")),
        scale: None,
        per_expert_scale: None,
    },
    ..WITH_QK_NORMS
};

/// transformers' `Qwen3MoeConfig`.
static DENSE: Dense = Dense {
    names: NAMES,
    defaults: Defaults {
        vocab_size: 151_936,
        hidden_size: 2048,
        intermediate_size: 6144,
        num_hidden_layers: 24,
        num_attention_heads: 32,
        num_key_value_heads: Some(4),
        head_dim: None,
        max_position_embeddings: 32_768,
        bos_token_id: None,
        eos_token_id: None,
    },
    window: full_attention,
    mixture: Some(mixture),
};

fn read(config: &Value, file_name: &str) -> Result<ModelSpec, ConfigError> {
    dense::read(&ARCH, &DENSE, config, file_name)
}

/// The experts, and what each of `layers` layers has. transformers 5 saves `num_experts` as `num_local_experts`.
fn mixture(
    level: &Level,
    hidden_size: usize,
    layers: usize,
) -> Result<(Mixture, Vec<FeedForward>), ConfigError> {
    let of_count = if level.get("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
    let names = [of_count, "num_experts_per_tok", "moe_intermediate_size"];
    let mixture = Mixture {
        experts: Experts {
            count: level.optional_size(names[0], 128, 1..=MAX_HIDDEN)?,
            per_token: level.optional_size(names[1], 8, 1..=MAX_HIDDEN)?,
            renormalizes: level.flag("norm_topk_prob")?.unwrap_or(false),
        },
        intermediate_size: level.optional_size(names[2], 768, 1..=MAX_INTERMEDIATE)?,
        router_factor: 1.0,
    };
    let mixture = mixture.check(level, hidden_size, names)?;
    let dense = level.ids("mlp_only_layers")?;
    let step = level.optional_size("decoder_sparse_step", 1, 1..=MAX_LAYERS)?;
    let of_layer = |layer: usize| match dense.contains(&(layer as u32)) || !(layer + 1).is_multiple_of(step) {
        true => FeedForward::Dense,
        false => FeedForward::Experts,
    };
    Ok((mixture, (0..layers).map(of_layer).collect()))
}

/// The `config.json` of the published size.
fn published() -> String {
    let config = json!({
        "architectures": ["Qwen3MoeForCausalLM"],
        "bos_token_id": 151_643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151_645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40_960,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": true,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": false,
        "use_sliding_window": false,
        "vocab_size": 151_936,
    });
    config.to_string()
}
