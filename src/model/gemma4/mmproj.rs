//! The vision towers of a Gemma 4 in GGUF files of their own, as llama.cpp's converter writes them: `gemma4v` has a
//! transformer (26B-A4B, 31B), and `gemma4uv` has none (12B).
//!
//! Names and keys are those of llama.cpp. No key says how many columns and rows have an embedding, how long a head is,
//! and whether the means of patches are standardized; tensors tell. The epsilon is that of all norms but the layer norms of
//! `gemma4uv`, and the base of RoPE is the published one.
//!
//! Refuses clipped linear maps, which the towers of E2B and E4B have.

use serde_json::{Value as Json, json};

use crate::checkpoint::gguf::{self, GgufTensors, GgufTower, HeaderError, Pixels, TowerKeys};

/// The towers scale levels from 0 to 1 themselves.
const PIXELS: Pixels = Pixels { mean: 0.0, std: 1.0 };

pub(super) const TOWERS: &[GgufTower] = &[
    GgufTower { projector: "gemma4v", pixels: PIXELS, config: axial, tensor: of_axial },
    GgufTower { projector: "gemma4uv", pixels: PIXELS, config: linear, tensor: of_linear },
];

/// Patches along a side of the square that becomes one token.
const USUAL_POOL: u64 = 3;

/// Generates the fields of a tower with a transformer. The models that have one, but for those with clipped linear maps,
/// let tokens of an image see each other.
fn axial(keys: &TowerKeys) -> Result<Json, HeaderError> {
    const BOUNDS: [&str; 4] = [".input_min", ".input_max", ".output_min", ".output_max"];
    let is_bound = |name: &&str| name.starts_with("v.") && BOUNDS.iter().any(|end| name.ends_with(end));
    if let Some(name) = keys.tensors.names().find(is_bound) {
        let problem = "is a bound of a clipped linear map (use_clipped_linears), which cannot be computed";
        return Err(HeaderError::tensor(name, problem));
    }
    let heads = keys.required("attention.head_count")?;
    const NORM: &str = "v.blk.0.attn_q_norm.weight";
    let head_dim = match keys.tensors.shape(NORM) {
        Some([head_dim]) => *head_dim,
        other => return Err(wrong_shape(NORM, other, "[head_dim]")),
    };
    let vision = json!({
        "hidden_activation": "gelu_pytorch_tanh",
        "patch_size": keys.required("patch_size")?,
        "pooling_kernel_size": keys.pool(USUAL_POOL)?,
        "position_embedding_size": positions(keys.tensors)?,
        "hidden_size": keys.required("embedding_length")?,
        "intermediate_size": keys.required("feed_forward_length")?,
        "num_hidden_layers": keys.required("block_count")?,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.whole("attention.head_count_kv")?.unwrap_or(heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.epsilon()?,
        "standardize": keys.tensors.has("v.std_bias") || keys.tensors.has("v.std_scale"),
    });
    Ok(json!({"use_bidirectional_attention": "vision", "vision_config": vision}))
}

/// Generates the fields of a tower without a transformer, which makes the model a unified one.
fn linear(keys: &TowerKeys) -> Result<Json, HeaderError> {
    let vision = json!({
        "patch_size": keys.required("patch_size")?,
        "pooling_kernel_size": keys.pool(USUAL_POOL)?,
        "mm_embed_dim": keys.required("embedding_length")?,
        "mm_posemb_size": positions(keys.tensors)?,
        "rms_norm_eps": keys.epsilon()?,
    });
    Ok(json!({"model_type": "gemma4_unified_text", "vision_config": vision}))
}

/// The columns, and the rows, that have an embedding.
fn positions(tensors: &GgufTensors) -> Result<usize, HeaderError> {
    const NAME: &str = "v.position_embd.weight";
    match tensors.shape(NAME) {
        Some([2, positions, _]) => Ok(*positions),
        other => Err(wrong_shape(NAME, other, "[2, positions, width]")),
    }
}

fn wrong_shape(name: &str, found: Option<&[usize]>, expected: &str) -> HeaderError {
    let found = found.map_or("is missing".into(), |shape| format!("has the shape {shape:?}"));
    HeaderError::tensor(name, format!("{found}; expected {expected}"))
}

/// The name in Hugging Face's checkpoints of a tensor of a tower with a transformer.
fn of_axial(name: &str, _: &GgufTensors) -> Option<String> {
    let outside = match name {
        "v.patch_embd.weight" => "vision_tower.patch_embedder.input_proj.weight",
        "v.position_embd.weight" => "vision_tower.patch_embedder.position_embedding_table",
        "v.std_bias" => "vision_tower.std_bias",
        "v.std_scale" => "vision_tower.std_scale",
        "mm.input_projection.weight" => PROJECTION,
        _ => {
            let (layer, part, _) = gguf::tower_layer_part(name).filter(|(.., what)| *what == "weight")?;
            let part = match part {
                "ln1" => "input_layernorm",
                "attn_q" => "self_attn.q_proj.linear",
                "attn_k" => "self_attn.k_proj.linear",
                "attn_v" => "self_attn.v_proj.linear",
                "attn_q_norm" => "self_attn.q_norm",
                "attn_k_norm" => "self_attn.k_norm",
                "attn_out" => "self_attn.o_proj.linear",
                "attn_post_norm" => "post_attention_layernorm",
                "ln2" => "pre_feedforward_layernorm",
                "ffn_gate" => "mlp.gate_proj.linear",
                "ffn_up" => "mlp.up_proj.linear",
                "ffn_down" => "mlp.down_proj.linear",
                "ffn_post_norm" => "post_feedforward_layernorm",
                _ => return None,
            };
            return Some(format!("vision_tower.encoder.layers.{layer}.{part}.weight"));
        }
    };
    Some(outside.into())
}

/// The name in Hugging Face's checkpoints of a tensor of a tower without a transformer.
fn of_linear(name: &str, _: &GgufTensors) -> Option<String> {
    match name {
        "v.position_embd.weight" => return Some("vision_embedder.pos_embedding".into()),
        "mm.input_projection.weight" => return Some(PROJECTION.into()),
        _ => {}
    }
    let (part, what) = name.rsplit_once('.').filter(|(_, what)| ["weight", "bias"].contains(what))?;
    let part = match part {
        "v.patch_norm.1" => "patch_ln1",
        "v.patch_embd" => "patch_dense",
        "v.patch_norm.2" => "patch_ln2",
        "v.patch_norm.3" => "pos_norm",
        _ => return None,
    };
    Some(format!("vision_embedder.{part}.{what}"))
}

const PROJECTION: &str = "embed_vision.embedding_projection.weight";
