//! A compiled shader and its memory accesses.

use super::need::Need;

/// One compiled variant of a kernel. `build.rs` reads all fields from its SPIR-V.
#[derive(Debug)]
pub struct Shader {
    pub name: &'static str,
    pub kernel: &'static str,
    /// Specialization constants as (id, name), with ascending ids.
    pub constants: &'static [(u32, &'static str)],
    /// The push constants that are buffer addresses, in order, with the shader's access to each buffer.
    pub pointers: &'static [(&'static str, Access)],
    /// Whether the shader loads addresses from memory and follows them. It only reads through such addresses.
    pub follows: bool,
    pub needs: &'static [Need],
    /// Number of invocations of a workgroup, in x, y and z.
    pub workgroup: [u32; 3],
    /// Bytes of shared memory, from the specialization constants. Panics if [`sum_of_aligned`] does.
    pub shared_bytes: fn(&[u32]) -> u32,
    pub spirv: &'static [u8],
}

/// The sum of the sizes of a shader's shared arrays, from which it loads cooperative matrices. Vulkan requires that these
/// begin at multiples of 16 bytes (VUID-RuntimeSpirv-OpCooperativeMatrixLoadKHR-08986), but places shared arrays at
/// multiples of their elements' size. Drivers leave no gaps, so arrays are aligned if all their sizes are. On an NVIDIA
/// H200, one array of 8 bytes made every product wrong.
///
/// # Panics
///
/// If a size is not a multiple of 16.
pub(crate) fn sum_of_aligned(bytes: &[u32]) -> u32 {
    let is_aligned = bytes.iter().all(|bytes| bytes.is_multiple_of(16));
    assert!(is_aligned, "the shared arrays of a shader with cooperative matrices have {bytes:?} bytes");
    bytes.iter().sum()
}

/// A shader's access to a buffer through its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The variant does not use the address.
    None,
    Read,
    Write,
    ReadWrite,
}

impl Access {
    pub fn writes(self) -> bool {
        matches!(self, Access::Write | Access::ReadWrite)
    }
}
