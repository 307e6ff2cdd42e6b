//! Checkpoint formats.

#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, strum::Display)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "lowercase")]
pub enum Format {
    Safetensors,
    Gguf,
    Native,
    #[strum(to_string = "layer files of the original project")]
    Legacy,
    #[strum(to_string = "safetensors, packed by GPTQ")]
    Gptq,
    #[strum(to_string = "safetensors, packed by AWQ")]
    Awq,
    #[strum(to_string = "safetensors, packed by compressed-tensors")]
    CompressedTensors,
}
