//! Moves bytes from the host into device memory through two staging buffers, so that filling one overlaps the
//! copy of the other.

use std::sync::Arc;

use super::{Arena, Buffer, Class, CommandBuffer, Device, GpuError, MemoryKind};

/// Bytes of one staging buffer.
const STAGING_BYTES: u64 = 16 << 20;

/// Staging for a load; dropped when the load is over.
pub struct Uploader {
    halves: [(Buffer, CommandBuffer); 2],
    next: usize,
    scratch: Vec<u8>,
}

impl Uploader {
    pub fn new(device: &Arc<Device>) -> Result<Uploader, GpuError> {
        let mut arena = Arena::new(device);
        let mut half = || {
            let buffer = arena.alloc(MemoryKind::Upload, Class::Staging, STAGING_BYTES, "staging")?;
            Ok::<_, GpuError>((buffer, CommandBuffer::new(device, "upload")?))
        };
        Ok(Uploader { halves: [half()?, half()?], next: 0, scratch: Vec::new() })
    }

    /// Fills `to` piece by piece: `produce(offset, piece)` writes the bytes that belong at byte `offset`. Every
    /// piece but the last is a multiple of `unit` bytes.
    pub fn fill_with<E: From<GpuError>>(
        &mut self,
        to: &Buffer,
        unit: u64,
        mut produce: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        assert!(unit > 0 && unit <= STAGING_BYTES, "a unit of {unit} bytes does not fit the staging buffer");
        let piece = STAGING_BYTES / unit * unit;
        let mut offset = 0;
        while offset < to.size() {
            let bytes = piece.min(to.size() - offset);
            // Produced in ordinary memory first: staging memory may be write-combined, and must not be read.
            self.scratch.clear();
            self.scratch.resize(bytes as usize, 0);
            produce(offset, &mut self.scratch)?;
            let (staging, commands) = &mut self.halves[self.next];
            self.next = 1 - self.next;
            commands.wait()?;
            staging.write(0, &self.scratch);
            let mut recorder = commands.begin()?;
            recorder.copy(staging, &to.slice(offset, bytes), bytes);
            recorder.submit("upload")?;
            offset += bytes;
        }
        Ok(())
    }

    /// Copies `data` to the start of `to`.
    pub fn upload<T: bytemuck::NoUninit>(&mut self, to: &Buffer, data: &[T]) -> Result<(), GpuError> {
        let bytes: &[u8] = bytemuck::cast_slice(data);
        let to = to.slice(0, bytes.len() as u64);
        self.fill_with(&to, 4, |offset, piece| {
            piece.copy_from_slice(&bytes[offset as usize..][..piece.len()]);
            Ok(())
        })
    }

    /// Waits until every byte has arrived.
    pub fn finish(mut self) -> Result<(), GpuError> {
        self.halves.iter_mut().try_for_each(|(_, commands)| commands.wait())
    }
}
