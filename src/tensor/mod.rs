//! Element types, device layouts of weight matrices, and quantization modes. No I/O, and no GPU.

use strum::{Display, IntoStaticStr, VariantArray};

mod dtype;
mod layout;

pub use dtype::DType;
pub(crate) use layout::clear_tiles;
pub use layout::{
    Bits, LAYOUT_VERSION, QuantizedRow, Scales, Scheme, TILE_ROWS, pack_plain_row, pack_row,
    unpack_plain_row, unpack_row,
};

/// Makes an enum with the derives [`VariantArray`], [`IntoStaticStr`] and [`Display`] of `strum` the type of an option:
/// it is read from the names of its variants.
macro_rules! option_values {
    ($($name:ident),+) => {$(
        impl $name {
            pub const ALL: [Self; <Self as strum::VariantArray>::VARIANTS.len()] =
                *<Self as strum::VariantArray>::VARIANTS.first_chunk().expect("all variants");

            pub const fn name(self) -> &'static str {
                self.into_str()
            }
        }

        impl std::str::FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                let found = Self::ALL.into_iter().find(|value| value.name() == text);
                found.ok_or_else(|| {
                    format!("expected one of {}, got {text:?}", Self::ALL.map(Self::name).join(", "))
                })
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                <String as serde::Deserialize>::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }
    )+};
}
pub(crate) use option_values;

option_values!(KvDtype, Precision, QuantizeMode, VisionMode);

/// Element type of keys and values in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, VariantArray, IntoStaticStr, Display)]
#[strum(serialize_all = "lowercase", const_into_str)]
pub enum KvDtype {
    F32,
    #[default]
    F16,
    /// Integers in -127..=127, with one f32 scale for each token and head.
    Int8,
}

impl KvDtype {
    /// Bytes of a block of the cache: the keys or the values of `rows` pairs of a token and a KV head. int8 integers
    /// are followed by their scales, padded to a multiple of 16 bytes (`shaders/common/kv.glsl`).
    pub const fn block_bytes(self, rows: usize, head_dim: usize) -> usize {
        let scales = if matches!(self, Self::Int8) { 4 * rows.next_multiple_of(4) } else { 0 };
        rows * head_dim * self.element_bytes() + scales
    }

    pub const fn element_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
            Self::Int8 => 1,
        }
    }

    /// The number of a key's elements that are stored together: as many as 16 bytes hold if they divide the head,
    /// otherwise four.
    pub const fn key_unit(self, head_dim: usize) -> usize {
        let most = 16 / self.element_bytes();
        if head_dim.is_multiple_of(most) { most } else { 4 }
    }

    /// Bytes of one token and head, of the keys or of the values, with the scale of int8.
    pub const fn row_bytes(self, head_dim: usize) -> usize {
        head_dim * self.element_bytes() + if matches!(self, Self::Int8) { 4 } else { 0 }
    }
}

/// Element type of the activations in matrix products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, VariantArray, IntoStaticStr, Display)]
#[strum(serialize_all = "lowercase", const_into_str)]
pub enum Precision {
    /// f32 in all products. Used for comparisons with reference models.
    #[default]
    F32,
    /// int8 for integer matrices, f32 for all others.
    Fast,
}

impl Precision {
    /// Whether activations are quantized to int8 for matrices of `scheme`.
    pub const fn quantizes(self, scheme: Scheme) -> bool {
        matches!(self, Precision::Fast) && matches!(scheme, Scheme::Int8Row | Scheme::Int { .. })
    }
}

/// `--vision`: whether the tower that reads images is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, VariantArray, IntoStaticStr, Display)]
#[strum(serialize_all = "lowercase", const_into_str)]
pub enum VisionMode {
    /// If the model has one, and if it fits into memory.
    #[default]
    Auto,
    /// A model without one, or with one that does not fit, is refused.
    On,
    Off,
}

/// `--quantize`: how to quantize an unquantized checkpoint while it is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, VariantArray, IntoStaticStr, Display)]
#[strum(serialize_all = "lowercase", const_into_str)]
pub enum QuantizeMode {
    /// Keep the checkpoint's element type.
    #[default]
    None,
    #[strum(serialize = "int8-row")]
    Int8Row,
    #[strum(serialize = "int4-g32")]
    Int4G32,
    #[strum(serialize = "int4-g128")]
    Int4G128,
    /// int4 in groups of 128 for the projections, int8 rows for the (tied) embedding.
    #[strum(serialize = "int4-g128-emb8")]
    Int4G128Emb8,
    /// int8 rows for the (tied) embedding only. For Google's QAT files, which are int4 with an f16 embedding.
    #[strum(serialize = "emb8")]
    Emb8,
}

impl QuantizeMode {
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
