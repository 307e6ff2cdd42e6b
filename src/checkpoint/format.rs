//! Checkpoint formats.

use std::fmt;

#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    Safetensors,
    Gguf,
    Native,
    /// The layer files of the original project.
    Legacy,
    Gptq,
    Awq,
    CompressedTensors,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Safetensors => "safetensors",
            Format::Gguf => "gguf",
            Format::Native => "native",
            Format::Legacy => "layer files of the original project",
            Format::Gptq => "safetensors, packed by GPTQ",
            Format::Awq => "safetensors, packed by AWQ",
            Format::CompressedTensors => "safetensors, packed by compressed-tensors",
        })
    }
}
