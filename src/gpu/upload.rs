//! Uploads bytes from the host to device memory. Bytes that need no conversion are read directly into mapped memory.
//! All other bytes go through two staging buffers, so that the host fills one while the device copies the other.

use std::sync::Arc;

use rayon::ThreadPool;
use rayon::prelude::*;

use super::{Arena, Buffer, Class, CommandBuffer, Device, GpuError, MemoryKind};

/// Bytes of one staging buffer.
const STAGING_BYTES: u64 = 16 << 20;

/// The most bytes that one task reads.
const READ_BYTES: usize = 2 << 20;

/// Number of threads that read files. More threads than cores are useful, because they mostly wait for the disk.
const READERS: usize = 8;

/// Fills a slice with the bytes that belong at a byte offset of a buffer. It must not read the slice.
type Read<'a, E> = dyn Fn(u64, &mut [u8]) -> Result<(), E> + Send + Sync + 'a;

/// A buffer and the function that reads its bytes.
struct QueuedRead<'a, E> {
    to: Buffer,
    read: Box<Read<'a, E>>,
}

/// The staging buffers and queued reads of a load. Drop it after the load to free the staging buffers. Reads fail with
/// an `E`.
pub struct Uploader<'a, E> {
    device: Arc<Device>,
    queued: Vec<QueuedRead<'a, E>>,
    /// The two staging buffers, each with the command buffer of its copies.
    halves: [(Buffer, CommandBuffer); 2],
    /// The index of the half to use next.
    next: usize,
    scratch: Vec<u8>,
    /// Whether mapped memory is filled through staging, too.
    staged: bool,
    /// The threads that read files, from the first queued read on. Many uploads are small and read nothing.
    readers: Option<ThreadPool>,
}

impl<'a, E: From<GpuError> + Send> Uploader<'a, E> {
    pub fn new(device: &Arc<Device>) -> Result<Self, GpuError> {
        let mut arena = Arena::new(device);
        let mut half = || {
            let buffer = arena.alloc(MemoryKind::Upload, Class::Staging, STAGING_BYTES, "staging")?;
            Ok::<_, GpuError>((buffer, CommandBuffer::new(device, "upload")?))
        };
        Ok(Uploader {
            device: Arc::clone(device),
            queued: Vec::new(),
            halves: [half()?, half()?],
            next: 0,
            scratch: Vec::new(),
            staged: false,
            readers: None,
        })
    }

    /// Makes all uploads use staging, even if device memory is mapped, so that tests cover discrete GPUs.
    #[doc(hidden)]
    pub fn staged(self) -> Self {
        Uploader { staged: true, ..self }
    }

    /// Whether the device executes nothing, so that no byte matters. Nothing is read or copied then.
    pub fn discards(&self) -> bool {
        self.device.notes.is_some()
    }

    /// Fills `to` piece by piece: `produce(offset, piece)` writes the bytes that belong at byte `offset`. The size of
    /// each piece is a multiple of `unit` bytes, except the last.
    pub fn fill_with(
        &mut self,
        to: &Buffer,
        unit: u64,
        mut produce: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        assert!(unit > 0 && unit <= STAGING_BYTES, "a unit of {unit} bytes does not fit the staging buffer");
        if self.discards() {
            return Ok(());
        }
        let piece = STAGING_BYTES / unit * unit;
        let mut offset = 0;
        while offset < to.size() {
            let bytes = piece.min(to.size() - offset);
            // `produce` writes to ordinary memory first, because it may read its output: staging memory may be
            // write-combined, and reading it is slow.
            self.scratch.clear();
            self.scratch.resize(bytes as usize, 0);
            produce(offset, &mut self.scratch)?;
            let (staging, commands) = &mut self.halves[self.next];
            self.next = 1 - self.next;
            commands.wait()?;
            staging.write(0, &self.scratch);
            let mut recorder = commands.begin()?;
            recorder.copy(staging, &to.slice(offset, bytes), bytes);
            recorder.submit_alone("upload")?;
            offset += bytes;
            self.device.note_progress();
        }
        Ok(())
    }

    /// Queues a read that fills `to`; [`Uploader::read_queued`] runs it. `read(offset, piece)` writes the bytes that
    /// belong at byte `offset`.
    pub fn queue(&mut self, to: &Buffer, read: impl Fn(u64, &mut [u8]) -> Result<(), E> + Send + Sync + 'a) {
        if self.discards() {
            return;
        }
        self.queued.push(QueuedRead { to: to.clone(), read: Box::new(read) });
    }

    /// Runs all queued reads, with several threads and in any order. Mapped memory is filled directly. Panics if two
    /// reads fill the same bytes.
    pub fn read_queued(&mut self) -> Result<(), E> {
        let mut queued = std::mem::take(&mut self.queued);
        if queued.is_empty() {
            return Ok(());
        }
        let mut ranges: Vec<_> = queued.iter().map(|r| (r.to.address(), r.to.size())).collect();
        ranges.sort_unstable();
        let apart = ranges.is_sorted_by(|(first, size), (next, _)| first + size <= *next);
        assert!(apart, "two reads fill the same bytes");

        let (mut direct, mut staged) = (Vec::new(), Vec::new());
        for QueuedRead { to, read } in &mut queued {
            let read: &Read<E> = read;
            let offsets = (0..to.size()).step_by(READ_BYTES);
            if self.staged || !to.is_mapped() {
                staged.extend(
                    offsets.map(|offset| (&*to, read, offset, (to.size() - offset).min(READ_BYTES as u64))),
                );
            } else if let Some(mapped) = to.mapped() {
                direct.extend(
                    offsets.zip(mapped.chunks_mut(READ_BYTES)).map(|(offset, piece)| (read, offset, piece)),
                );
            }
        }
        let readers = match &mut self.readers {
            Some(readers) => readers,
            none => none.insert(start_readers()?),
        };
        read_all(readers, &self.device, direct)?;
        let mut rest = &staged[..];
        while !rest.is_empty() {
            // Each round reads as many pieces as fit into a staging buffer.
            let mut room = STAGING_BYTES;
            let fits = rest
                .iter()
                .take_while(|(.., bytes)| room.checked_sub(*bytes).inspect(|left| room = *left).is_some());
            let (now, later) = rest.split_at(fits.count());
            rest = later;
            let half = self.next;
            self.next = 1 - half;
            self.halves[half].1.wait()?;
            let mut mapped = self.halves[half].0.mapped().expect("staging memory is mapped");
            let pieces = now.iter().map(|&(_, read, offset, bytes)| {
                let piece = mapped.split_off_mut(..bytes as usize).expect("counted above");
                (read, offset, piece)
            });
            read_all(readers, &self.device, pieces.collect())?;
            let (staging, commands) = &mut self.halves[half];
            let mut recorder = commands.begin()?;
            let mut at = 0;
            for (to, _, offset, bytes) in now {
                recorder.copy(&staging.slice(at, *bytes), &to.slice(*offset, *bytes), *bytes);
                at += bytes;
            }
            recorder.submit_alone("upload")?;
        }
        Ok(())
    }

    /// Copies `data` to the start of `to`.
    pub fn upload<T: bytemuck::NoUninit>(&mut self, to: &Buffer, data: &[T]) -> Result<(), E> {
        let bytes: &[u8] = bytemuck::cast_slice(data);
        let to = to.slice(0, bytes.len() as u64);
        self.fill_with(&to, 4, |offset, piece| {
            piece.copy_from_slice(&bytes[offset as usize..][..piece.len()]);
            Ok(())
        })
    }

    /// Runs all queued reads, and waits until all bytes are on the device.
    pub fn finish(mut self) -> Result<(), E> {
        self.read_queued()?;
        Ok(self.halves.iter_mut().try_for_each(|(_, commands)| commands.wait())?)
    }
}

fn start_readers() -> Result<ThreadPool, GpuError> {
    let readers = rayon::ThreadPoolBuilder::new().num_threads(READERS).thread_name(|i| format!("reader {i}"));
    readers.build().map_err(|error| {
        GpuError::Unusable(format!(
            "the system cannot start a thread for reading weights: {error}; this process has too little memory or too \
             many threads (`ulimit -v`, `ulimit -u`, MemoryMax=, TasksMax=)"
        ))
    })
}

/// Runs the reads. The threads take the pieces in order, because disks read sequential data faster.
fn read_all<E: Send>(
    readers: &ThreadPool,
    device: &Device,
    pieces: Vec<(&Read<E>, u64, &mut [u8])>,
) -> Result<(), E> {
    let pieces = pieces.into_iter().par_bridge();
    readers.install(|| {
        pieces.try_for_each(|(read, offset, piece)| read(offset, piece).inspect(|()| device.note_progress()))
    })
}
