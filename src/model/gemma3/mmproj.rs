//! The vision tower of a Gemma-3 in a GGUF file of its own, as llama.cpp's converter writes it.
//!
//! Names and keys are those of llama.cpp. Old files have the two matrices of the feed-forward network under each
//! other's name; their shapes tell.

use serde_json::{Value as Json, json};

use crate::checkpoint::gguf::{self, GgufTensors, GgufTower, HeaderError, Pixels, TowerKeys};

pub(super) const TOWERS: &[GgufTower] =
    &[GgufTower { projector: "gemma3", pixels: Pixels { mean: 0.5, std: 0.5 }, config, tensor }];

/// The largest side of an image in pixels. The reader of `config.json` allows less.
const MAX_SIDE: u64 = 1 << 16;
/// Patches along a side of the square that becomes one token.
const USUAL_POOL: u64 = 4;

/// Generates the fields `vision_config` and `mm_tokens_per_image`.
fn config(keys: &TowerKeys) -> Result<Json, HeaderError> {
    let (image_size, patch_size) = (keys.required("image_size")?, keys.required("patch_size")?);
    let pool = keys.pool(USUAL_POOL)?;
    if image_size > MAX_SIDE || patch_size == 0 {
        let problem = format!(
            "is {image_size}, with patches of {patch_size}; expected at most {MAX_SIDE}, and patches of at least 1"
        );
        return Err(keys.error("image_size", problem));
    }
    let across = image_size / patch_size;
    if !across.is_multiple_of(pool) {
        let problem = format!("is {pool}; expected a divisor of the {across} patches along a side");
        return Err(keys.error("projector.scale_factor", problem));
    }
    let vision = json!({
        "hidden_act": "gelu_pytorch_tanh",
        "image_size": image_size,
        "patch_size": patch_size,
        "hidden_size": keys.required("embedding_length")?,
        "intermediate_size": keys.required("feed_forward_length")?,
        "num_hidden_layers": keys.required("block_count")?,
        "num_attention_heads": keys.required("attention.head_count")?,
        "layer_norm_eps": keys.epsilon()?,
    });
    Ok(json!({"vision_config": vision, "mm_tokens_per_image": (across / pool).pow(2)}))
}

/// The name of a tensor in Hugging Face's checkpoints.
fn tensor(name: &str, tensors: &GgufTensors) -> Option<String> {
    match name {
        "v.position_embd.weight" => {
            return Some("vision_tower.embeddings.position_embedding.weight".into());
        }
        "mm.soft_emb_norm.weight" => return Some("multi_modal_projector.mm_soft_emb_norm.weight".into()),
        // A parameter of its own in Hugging Face's, so it has no `.weight` there.
        "mm.input_projection.weight" => {
            return Some("multi_modal_projector.mm_input_projection_weight".into());
        }
        _ => {}
    }
    let (part, what) = name.rsplit_once('.').filter(|(_, what)| ["weight", "bias"].contains(what))?;
    match part {
        "v.patch_embd" => return Some(format!("vision_tower.embeddings.patch_embedding.{what}")),
        "v.post_ln" => return Some(format!("vision_tower.post_layernorm.{what}")),
        _ => {}
    }
    let (layer, part, what) = gguf::tower_layer_part(name)?;
    let part = match part {
        "ln1" => "layer_norm1",
        "ln2" => "layer_norm2",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_out" => "self_attn.out_proj",
        "ffn_up" | "ffn_down" if (part == "ffn_up") != is_swapped(layer, tensors) => "mlp.fc1",
        "ffn_up" | "ffn_down" => "mlp.fc2",
        _ => return None,
    };
    Some(format!("vision_tower.encoder.layers.{layer}.{part}.{what}"))
}

/// Whether the matrices of a layer's feed-forward network have each other's name: the one that makes the results of the
/// layer then makes more of them than the layer is wide.
fn is_swapped(layer: u32, tensors: &GgufTensors) -> bool {
    let shape = |part: &str| tensors.shape(&format!("v.blk.{layer}.{part}.weight"));
    match (shape("ffn_down"), shape("attn_out")) {
        (Some([rows, columns]), Some([width, _])) => columns == width && rows != width,
        _ => false,
    }
}
