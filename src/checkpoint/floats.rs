//! Reads single floating-point elements from bytes of a file.

use crate::tensor::DType;

/// Element `index` of little-endian floating-point elements, at any alignment. Panics if `dtype` is an integer type, or
/// `index` is out of range.
pub(super) fn float_at(dtype: DType, bytes: &[u8], index: usize) -> f32 {
    let bytes = &bytes[index * dtype.size()..(index + 1) * dtype.size()];
    let [first, second] = [bytes[0], bytes[1]];
    match dtype {
        DType::F32 => f32::from_le_bytes([first, second, bytes[2], bytes[3]]),
        DType::F16 => half::f16::from_le_bytes([first, second]).to_f32(),
        DType::BF16 => half::bf16::from_le_bytes([first, second]).to_f32(),
        DType::I8 | DType::U8 | DType::I32 | DType::I64 => panic!("{dtype:?} is not a floating-point type"),
    }
}

/// Whether f16 represents `x` exactly.
pub(super) fn f16_holds(x: f32) -> bool {
    half::f16::from_f32(x).to_f32() == x
}
