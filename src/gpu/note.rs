//! Notes of submitted dispatches, for the laboratory. Only a device of the null driver takes notes.

use super::pipeline::PUSH_BYTES;
use super::placement::Class;
use super::shader::Shader;

/// A dispatch as it was submitted.
#[derive(Debug, Clone)]
pub struct Note {
    pub shader: &'static Shader,
    /// The values of the specialization constants, in the order of `Shader::constants`.
    pub constants: Vec<u32>,
    /// The part of the model that was recorded ([`Recorder::label`](super::Recorder::label)).
    pub label: &'static str,
    /// The number of barriers between this dispatch and the one before it in the command buffer.
    pub barriers: u64,
    pub groups: [u32; 3],
    pub ranges: Vec<NotedRange>,
    pub(super) push: [u8; PUSH_BYTES as usize],
}

/// A range of memory that a dispatch accesses.
#[derive(Debug, Clone)]
pub struct NotedRange {
    /// The name of the shader's address that points to it.
    pub pointer: &'static str,
    pub class: Class,
    pub bytes: u64,
    /// Its bytes at the time of the submit, if the host can read them.
    pub(super) contents: Option<Vec<u8>>,
}

impl Note {
    /// The push constants, of the type that belongs to the shader.
    pub fn push<P: bytemuck::Pod>(&self) -> P {
        bytemuck::pod_read_unaligned(&self.push[..size_of::<P>()])
    }

    /// The first `count` elements of the array at an address, which the host has written.
    pub fn array<T: bytemuck::Pod>(&self, pointer: &str, count: usize) -> Vec<T> {
        let range = self.ranges.iter().find(|range| range.pointer == pointer);
        let contents = range.and_then(|range| range.contents.as_ref());
        let contents = contents.unwrap_or_else(|| panic!("{}: no contents of {pointer}", self.shader.name));
        contents.chunks_exact(size_of::<T>()).take(count).map(bytemuck::pod_read_unaligned).collect()
    }
}
