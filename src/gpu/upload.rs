//! Moves bytes from the host into device memory. They go directly if the host can reach the memory and the bytes need
//! no conversion. Otherwise they go through two staging buffers, so that filling one overlaps the copy of the other.

use std::sync::Arc;

use rayon::ThreadPool;
use rayon::prelude::*;

use super::{Arena, Buffer, Class, CommandBuffer, Device, GpuError, MemoryKind};

/// Bytes of one staging buffer.
const STAGING_BYTES: u64 = 16 << 20;

/// Bytes that one task reads.
const READ_BYTES: usize = 2 << 20;

/// Number of threads that read. There are more of them than most machines have cores, because they wait for the disk
/// most of the time.
const READERS: usize = 8;

/// Fills a slice with the bytes that belong at a byte offset of a buffer, without reading the slice.
type Read<'a, E> = dyn Fn(u64, &mut [u8]) -> Result<(), E> + Send + Sync + 'a;

/// A buffer and the function that reads its bytes.
struct Reading<'a, E> {
    to: Buffer,
    read: Box<Read<'a, E>>,
}

/// The staging buffers and queued reads of a load, which are dropped when the load is over. Reads fail with an `E`.
pub struct Uploader<'a, E> {
    device: Arc<Device>,
    readings: Vec<Reading<'a, E>>,
    halves: [(Buffer, CommandBuffer); 2],
    next: usize,
    scratch: Vec<u8>,
    staged: bool,
    readers: ThreadPool,
}

impl<'a, E: From<GpuError> + Send> Uploader<'a, E> {
    pub fn new(device: &Arc<Device>) -> Result<Self, GpuError> {
        let mut arena = Arena::new(device);
        let mut half = || {
            let buffer = arena.alloc(MemoryKind::Upload, Class::Staging, STAGING_BYTES, "staging")?;
            Ok::<_, GpuError>((buffer, CommandBuffer::new(device, "upload")?))
        };
        let readers =
            rayon::ThreadPoolBuilder::new().num_threads(READERS).thread_name(|i| format!("reader {i}"));
        let readers = readers
            .build()
            .map_err(|error| GpuError::NoThread { doing: "reading weights", error: error.to_string() })?;
        Ok(Uploader {
            device: Arc::clone(device),
            readings: Vec::new(),
            halves: [half()?, half()?],
            next: 0,
            scratch: Vec::new(),
            staged: false,
            readers,
        })
    }

    /// Makes uploads use staging even if the host can reach the device's memory, so that tests cover discrete GPUs
    /// without having one.
    #[doc(hidden)]
    pub fn staged(self) -> Self {
        Uploader { staged: true, ..self }
    }

    /// Fills `to` piece by piece: `produce(offset, piece)` writes the bytes that belong at byte `offset`. Every
    /// piece but the last is a multiple of `unit` bytes.
    pub fn fill_with(
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
            // Bytes are produced in ordinary memory first: staging memory may be write-combined, and must not be read.
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

    /// Queues a read that [`Uploader::read_queued`] fills `to` by: `read(offset, piece)` writes the bytes that belong
    /// at byte `offset`.
    pub fn queue(&mut self, to: &Buffer, read: impl Fn(u64, &mut [u8]) -> Result<(), E> + Send + Sync + 'a) {
        self.readings.push(Reading { to: to.clone(), read: Box::new(read) });
    }

    /// Reads everything that is queued, several pieces at a time and in any order, directly into device memory where
    /// the host can reach it. Panics if two reads fill the same bytes.
    pub fn read_queued(&mut self) -> Result<(), E> {
        let mut readings = std::mem::take(&mut self.readings);
        let mut ranges: Vec<_> = readings.iter().map(|r| (r.to.address(), r.to.size())).collect();
        ranges.sort_unstable();
        let apart = ranges.is_sorted_by(|(first, size), (next, _)| first + size <= *next);
        assert!(apart, "two readings fill the same bytes");

        let (mut straight, mut staged) = (Vec::new(), Vec::new());
        for Reading { to, read } in &mut readings {
            let read: &Read<E> = read;
            let offsets = (0..to.size()).step_by(READ_BYTES);
            if self.staged || !to.is_mapped() {
                staged.extend(
                    offsets.map(|offset| (&*to, read, offset, (to.size() - offset).min(READ_BYTES as u64))),
                );
            } else if let Some(mapped) = to.mapped() {
                straight.extend(
                    offsets.zip(mapped.chunks_mut(READ_BYTES)).map(|(offset, piece)| (read, offset, piece)),
                );
            }
        }
        read_all(&self.readers, &self.device, straight)?;
        let mut rest = &staged[..];
        while !rest.is_empty() {
            // Each round reads as many pieces as fit a staging buffer.
            let mut room = STAGING_BYTES;
            let fits = rest
                .iter()
                .take_while(|(.., bytes)| room.checked_sub(*bytes).inspect(|left| room = *left).is_some());
            let (now, later) = rest.split_at(fits.count());
            rest = later;
            let half = self.next;
            self.next = 1 - half;
            self.halves[half].1.wait()?;
            let mut mapped = self.halves[half].0.mapped().expect("staging memory is the host's to write");
            let pieces = now.iter().map(|&(_, read, offset, bytes)| {
                let piece = mapped.split_off_mut(..bytes as usize).expect("counted above");
                (read, offset, piece)
            });
            read_all(&self.readers, &self.device, pieces.collect())?;
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

    /// Reads everything that is queued, and waits until every byte is on the device.
    pub fn finish(mut self) -> Result<(), E> {
        self.read_queued()?;
        Ok(self.halves.iter_mut().try_for_each(|(_, commands)| commands.wait())?)
    }
}

/// Runs the reads. Threads take the pieces in order, which disks read faster.
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
