//! Moves bytes from the host into device memory: straight, where the host reaches it and the bytes come as they are;
//! else through two staging buffers, so that filling one overlaps the copy of the other.

use std::sync::Arc;

use rayon::prelude::*;

use super::{Arena, Buffer, Class, CommandBuffer, Device, GpuError, MemoryKind};

/// Bytes of one staging buffer.
const STAGING_BYTES: u64 = 16 << 20;

/// Bytes read straight to the device between two words of progress.
const STRAIGHT_BYTES: u64 = 128 << 20;
/// Bytes read by one task.
const READ_BYTES: usize = 2 << 20;

/// Staging for a load; dropped when the load is over.
pub struct Uploader {
    halves: [(Buffer, CommandBuffer); 2],
    next: usize,
    scratch: Vec<u8>,
    staged: bool,
}

impl Uploader {
    pub fn new(device: &Arc<Device>) -> Result<Uploader, GpuError> {
        let mut arena = Arena::new(device);
        let mut half = || {
            let buffer = arena.alloc(MemoryKind::Upload, Class::Staging, STAGING_BYTES, "staging")?;
            Ok::<_, GpuError>((buffer, CommandBuffer::new(device, "upload")?))
        };
        Ok(Uploader { halves: [half()?, half()?], next: 0, scratch: Vec::new(), staged: false })
    }

    /// Goes through staging also where the host reaches the device's memory: as on a card, for tests without one.
    #[doc(hidden)]
    pub fn staged(self) -> Uploader {
        Uploader { staged: true, ..self }
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

    /// Fills `to` on all cores: `read(offset, piece)` writes the bytes that belong at byte `offset`, in any order, and
    /// does not look at what was there. Into the device's memory itself where the host reaches it. `each` hears how many
    /// bytes are there, now and then.
    pub fn fill_reading<E: From<GpuError> + Send>(
        &mut self,
        to: &mut Buffer,
        read: impl Fn(u64, &mut [u8]) -> Result<(), E> + Sync,
        each: &mut dyn FnMut(u64),
    ) -> Result<(), E> {
        let all = |start: u64, bytes: &mut [u8]| {
            let pieces = bytes.par_chunks_mut(READ_BYTES).enumerate();
            pieces.try_for_each(|(i, piece)| read(start + (i * READ_BYTES) as u64, piece))
        };
        let size = to.size();
        let straight = !self.staged && to.mapped().is_some();
        let step = if straight { STRAIGHT_BYTES } else { STAGING_BYTES };
        for start in (0..size).step_by(step as usize) {
            let bytes = step.min(size - start);
            let mut part = to.slice(start, bytes);
            if straight {
                all(start, part.mapped().expect("a part of mapped memory"))?;
            } else {
                let (staging, commands) = &mut self.halves[self.next];
                self.next = 1 - self.next;
                commands.wait()?;
                let mapped = staging.mapped().expect("staging memory is the host's to write");
                all(start, &mut mapped[..bytes as usize])?;
                let mut recorder = commands.begin()?;
                recorder.copy(staging, &part, bytes);
                recorder.submit("upload")?;
            }
            each(start + bytes);
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
