//! A compiled shader, and what it does with the memory that it reaches.

use super::need::Need;

/// One compiled shader of the kernel table, a variant of a kernel; all of it is read back from its SPIR-V.
#[derive(Debug)]
pub struct Shader {
    pub name: &'static str,
    pub kernel: &'static str,
    /// Specialization constants: (id, name), ascending.
    pub constants: &'static [(u32, &'static str)],
    /// The push constants that are addresses, in order, and what is done with the memory behind each.
    pub pointers: &'static [(&'static str, Access)],
    /// Whether it follows addresses that it finds in memory; it reads there.
    pub follows: bool,
    pub needs: &'static [Need],
    /// Invocations of a workgroup.
    pub workgroup: [u32; 3],
    /// Bytes of shared memory, by the constants.
    pub shared_bytes: fn(&[u32]) -> u32,
    pub spirv: &'static [u8],
}

/// What a shader does with the memory behind an address.
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
