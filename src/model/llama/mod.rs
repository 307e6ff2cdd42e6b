//! Llama, and what is built like it: Mistral, SmolLM.
//!
//! Mistral's layers may have a window. In GGUF files, the rows of queries and keys are interleaved, and the RoPE scaling
//! of Llama 3 is a tensor.

mod shapes;

use serde_json::Value;

use super::config::{ConfigError, Level, MAX_POSITIONS};
use super::dense::{self, Defaults, Dense, NAMES};
use super::spec::{Arch, ModelSpec, Shape};
use crate::checkpoint::gguf::{GgufArch, GgufTokens};

pub(super) static ARCH: Arch = Arch {
    name: "Llama",
    model_types: &["llama", "mistral"],
    read,
    gguf: &GGUF,
    measured: "smollm2-135m,llama-3.1-8b",
    hub_example: "HuggingFaceTB/SmolLM2-135M-Instruct",
    short_names: &[("llama3.1:8b", "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M")],
    shapes: &SHAPES,
};

static SHAPES: [Shape; shapes::COUNT] = shapes::published(read);

static GGUF: GgufArch = GgufArch {
    name: "llama",
    config: |keys, tensors| dense::gguf_config("llama", &GGUF.tokens, keys, tensors),
    layer_tensor: |name, what| NAMES.of_gguf(name, what),
    interleaved: &["attn_q", "attn_k"],
    towers: &[],
    tokens: GgufTokens {
        bos: Some(1),
        eos: 2,
        pad: 0,
        own_model: None,
        add_space_prefix: true,
        end: &["</s>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>"],
        control: &["<s>", "</s>", "<unk>"],
    },
};

/// transformers' `LlamaConfig`.
static LLAMA: Dense = Dense {
    names: NAMES,
    defaults: Defaults {
        vocab_size: 32_000,
        hidden_size: 4096,
        intermediate_size: 11_008,
        num_hidden_layers: 32,
        num_attention_heads: 32,
        num_key_value_heads: None,
        head_dim: None,
        max_position_embeddings: 2048,
        bos_token_id: Some(1),
        eos_token_id: Some(2),
    },
    // The class has no window, and ignores the field.
    window: |_| Ok(None),
    mixture: None,
};

/// transformers' `MistralConfig`.
static MISTRAL: Dense = Dense {
    names: NAMES,
    defaults: Defaults {
        vocab_size: 32_000,
        hidden_size: 4096,
        intermediate_size: 14_336,
        num_hidden_layers: 32,
        num_attention_heads: 32,
        num_key_value_heads: Some(8),
        head_dim: None,
        max_position_embeddings: 131_072,
        bos_token_id: Some(1),
        eos_token_id: Some(2),
    },
    window: mistral_window,
    mixture: None,
};

/// Without the field, the class has a window of 4096. `null` is no window.
fn mistral_window(config: &Level) -> Result<Option<usize>, ConfigError> {
    const NAME: &str = "sliding_window";
    match config.object.get(NAME) {
        None => Ok(Some(4096)),
        Some(Value::Null) => Ok(None),
        Some(value) => Ok(Some(config.whole(NAME, value, 1..=MAX_POSITIONS)? as usize)),
    }
}

fn read(config: &Value, file_name: &str) -> Result<ModelSpec, ConfigError> {
    let model_type = Level::root(config, file_name)?.text("model_type")?;
    let class = if model_type == Some("mistral") { &MISTRAL } else { &LLAMA };
    dense::read(&ARCH, class, config, file_name)
}
