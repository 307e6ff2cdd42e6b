//! Element types, device layouts of weight matrices, and quantization modes. No I/O, and no GPU.

use std::fmt;
use std::str::FromStr;

mod dtype;
mod layout;

pub use dtype::DType;
pub(crate) use layout::clear_tiles;
pub use layout::{
    Bits, LAYOUT_VERSION, QuantizedRow, Scales, Scheme, TILE_ROWS, pack_plain_row, pack_row,
    unpack_plain_row, unpack_row,
};

/// Element type of keys and values in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum KvDtype {
    F32,
    #[default]
    F16,
    /// Integers in -127..=127, with one f32 scale for each token and head.
    Int8,
}

impl KvDtype {
    pub const ALL: [KvDtype; 3] = [Self::F32, Self::F16, Self::Int8];

    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Int8 => "int8",
        }
    }

    /// Bytes of one token and head, of the keys or of the values.
    pub const fn row_bytes(self, head_dim: usize) -> usize {
        match self {
            Self::F32 => 4 * head_dim,
            Self::F16 => 2 * head_dim,
            Self::Int8 => head_dim + 4,
        }
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KvDtype {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|dtype| dtype.name() == text);
        found.ok_or_else(|| format!("expected f32, f16 or int8, got {text:?}"))
    }
}

/// Element type of the activations in matrix products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Precision {
    /// f32 in all products. Used for comparisons with reference models.
    #[default]
    F32,
    /// int8 for integer matrices, f32 for all others.
    Fast,
}

impl Precision {
    pub const ALL: [Precision; 2] = [Precision::F32, Precision::Fast];

    pub const fn name(self) -> &'static str {
        match self {
            Precision::F32 => "f32",
            Precision::Fast => "fast",
        }
    }

    /// Whether activations are quantized to int8 for matrices of `scheme`.
    pub const fn quantizes(self, scheme: Scheme) -> bool {
        matches!(self, Precision::Fast) && matches!(scheme, Scheme::Int8Row | Scheme::Int { .. })
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Precision {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|precision| precision.name() == text);
        found.ok_or_else(|| format!("expected f32 or fast, got {text:?}"))
    }
}

/// `--quantize`: how to quantize an unquantized checkpoint while it is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum QuantizeMode {
    /// Keep the checkpoint's element type.
    #[default]
    None,
    Int8Row,
    Int4G32,
    Int4G128,
    /// int4 in groups of 128 for the projections, int8 rows for the (tied) embedding.
    Int4G128Emb8,
    /// int8 rows for the (tied) embedding only. For Google's QAT files, which are int4 with an f16 embedding.
    Emb8,
}

impl QuantizeMode {
    pub const ALL: [QuantizeMode; 6] =
        [Self::None, Self::Int8Row, Self::Int4G32, Self::Int4G128, Self::Int4G128Emb8, Self::Emb8];

    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Int8Row => "int8-row",
            Self::Int4G32 => "int4-g32",
            Self::Int4G128 => "int4-g128",
            Self::Int4G128Emb8 => "int4-g128-emb8",
            Self::Emb8 => "emb8",
        }
    }

    /// Scheme of the seven projections of a layer. `None` = keep the checkpoint's element type.
    pub const fn projections(self) -> Option<Scheme> {
        match self {
            Self::None | Self::Emb8 => None,
            Self::Int8Row => Some(Scheme::Int8Row),
            Self::Int4G32 => Some(Scheme::int4(32)),
            Self::Int4G128 | Self::Int4G128Emb8 => Some(Scheme::int4(128)),
        }
    }

    /// Scheme of the embedding, which is used for lookup and for logits. `None` = keep the checkpoint's element type.
    pub const fn embedding(self) -> Option<Scheme> {
        match self {
            Self::Int4G128Emb8 | Self::Emb8 => Some(Scheme::Int8Row),
            _ => None,
        }
    }
}

impl fmt::Display for QuantizeMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for QuantizeMode {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|m| m.name() == s).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|m| m.name()).collect();
            format!("unknown mode {s:?}; expected one of {}", names.join(", "))
        })
    }
}
