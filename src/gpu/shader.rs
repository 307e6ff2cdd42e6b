//! A compiled shader, and its accesses to memory.

use super::need::Need;

/// One compiled variant of a kernel. All fields are read from its SPIR-V.
#[derive(Debug)]
pub struct Shader {
    pub name: &'static str,
    pub kernel: &'static str,
    /// Specialization constants as (id, name), with ascending ids.
    pub constants: &'static [(u32, &'static str)],
    /// The push constants that are addresses, in order, each with the shader's access to the memory behind it.
    pub pointers: &'static [(&'static str, Access)],
    /// Whether the shader follows addresses that it loads from memory; it only reads through them.
    pub follows: bool,
    pub needs: &'static [Need],
    /// Invocations of a workgroup.
    pub workgroup: [u32; 3],
    /// Bytes of shared memory, given the specialization constants.
    pub shared_bytes: fn(&[u32]) -> u32,
    pub spirv: &'static [u8],
}

/// A shader's access to the memory behind an address.
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
