//! Floating-point elements as files hold them, one at a time.

use crate::tensor::DType;

/// Element `index` of floating-point elements at any alignment. Panics if they are integers or end before it.
pub(super) fn float_at(dtype: DType, bytes: &[u8], index: usize) -> f32 {
    let bytes = &bytes[index * dtype.size()..(index + 1) * dtype.size()];
    let [first, second] = [bytes[0], bytes[1]];
    match dtype {
        DType::F32 => f32::from_le_bytes([first, second, bytes[2], bytes[3]]),
        DType::F16 => half::f16::from_le_bytes([first, second]).to_f32(),
        DType::BF16 => half::bf16::from_le_bytes([first, second]).to_f32(),
        DType::I8 | DType::U8 | DType::I32 | DType::I64 => panic!("{dtype:?} is no floating-point type"),
    }
}

/// Whether f16 represents the number exactly.
pub(super) fn f16_holds(x: f32) -> bool {
    half::f16::from_f32(x).to_f32() == x
}
