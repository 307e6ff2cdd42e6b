//! Element types of tensors.

/// Element type of a checkpoint tensor, as safetensors names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::EnumString, strum::IntoStaticStr)]
pub enum DType {
    F32,
    F16,
    BF16,
    I8,
    U8,
    I32,
    I64,
}

impl DType {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::I8 | DType::U8 => 1,
            DType::I64 => 8,
        }
    }

    /// Writes values as elements of a floating-point type, little endian, each rounded to nearest. Panics if the type is an
    /// integer, or if `out` has not the bytes of the elements.
    pub fn write(self, values: &[f32], out: &mut [u8]) {
        assert_eq!(out.len(), values.len() * self.size(), "bytes of {self:?}");
        match self {
            DType::F32 => out.chunks_exact_mut(4).zip(values).for_each(|(to, x)| {
                to.copy_from_slice(&x.to_le_bytes());
            }),
            DType::F16 => out.chunks_exact_mut(2).zip(values).for_each(|(to, x)| {
                to.copy_from_slice(&half::f16::from_f32(*x).to_le_bytes());
            }),
            DType::BF16 => out.chunks_exact_mut(2).zip(values).for_each(|(to, x)| {
                to.copy_from_slice(&half::bf16::from_f32(*x).to_le_bytes());
            }),
            DType::I8 | DType::U8 | DType::I32 | DType::I64 => {
                panic!("{self:?} is not a floating-point type")
            }
        }
    }
}
