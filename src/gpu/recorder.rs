//! Recording and submitting work. A [`Recorder`] derives barriers from what each command declares it reads and
//! writes, and keeps those buffers alive until the device has finished with them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ash::vk;

use super::GpuError;
use super::device::Device;
use super::memory::{Buffer, Chunk};
use super::pipeline::Pipeline;

/// Timed commands per command buffer; later ones run untimed, and the profile says how many.
const MAX_TIMED: u32 = 2048;

/// GPU time per kernel.
#[derive(Debug, Clone, Default)]
pub struct Profile {
    /// Kernel -> (dispatches, nanoseconds).
    pub kernels: BTreeMap<String, (u64, u64)>,
    pub untimed: u64,
}

/// A command buffer that is recorded, submitted, waited for, and recorded again.
pub struct CommandBuffer {
    device: Arc<Device>,
    pool: vk::CommandPool,
    raw: vk::CommandBuffer,
    /// Two timestamps around all of it; null where the device has none.
    span: vk::QueryPool,
    queries: vk::QueryPool,
    timed: Vec<String>,
    untimed: u64,
    took: Option<Duration>,
    /// What the commands use, by address of the chunk.
    retained: BTreeMap<usize, Arc<Chunk>>,
    /// Timeline value of the last submission, while it may still be running.
    pending: Option<u64>,
}

impl CommandBuffer {
    pub fn new(device: &Arc<Device>, name: &str) -> Result<CommandBuffer, GpuError> {
        let info = vk::CommandPoolCreateInfo::default().queue_family_index(device.queue_family);
        // SAFETY: the device is alive; handles are destroyed in Drop.
        let pool = unsafe { device.raw.create_command_pool(&info, None) }
            .map_err(GpuError::of("vkCreateCommandPool"))?;
        let mut commands = CommandBuffer {
            device: device.clone(),
            pool,
            raw: vk::CommandBuffer::null(),
            span: vk::QueryPool::null(),
            queries: vk::QueryPool::null(),
            timed: Vec::new(),
            untimed: 0,
            took: None,
            retained: BTreeMap::new(),
            pending: None,
        };
        let info = vk::CommandBufferAllocateInfo::default().command_pool(pool).command_buffer_count(1);
        // SAFETY: the pool was just made.
        commands.raw = unsafe { device.raw.allocate_command_buffers(&info) }
            .map_err(GpuError::of("vkAllocateCommandBuffers"))?[0];
        let queries = |count: u32| {
            let info =
                vk::QueryPoolCreateInfo::default().query_type(vk::QueryType::TIMESTAMP).query_count(count);
            // SAFETY: as above.
            unsafe { device.raw.create_query_pool(&info, None) }.map_err(GpuError::of("vkCreateQueryPool"))
        };
        if device.timestamp_bits > 0 {
            commands.span = queries(2)?;
        }
        if device.profile.is_some() {
            commands.queries = queries(2 * MAX_TIMED)?;
        }
        device.name(commands.raw, name);
        Ok(commands)
    }

    /// Starts recording anew, after waiting for the last submission.
    pub fn begin(&mut self) -> Result<Recorder<'_>, GpuError> {
        self.wait()?;
        // SAFETY: the last submission has finished.
        unsafe {
            self.device
                .raw
                .reset_command_pool(self.pool, vk::CommandPoolResetFlags::empty())
                .map_err(GpuError::of("vkResetCommandPool"))?;
            let info =
                vk::CommandBufferBeginInfo::default().flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT);
            self.device
                .raw
                .begin_command_buffer(self.raw, &info)
                .map_err(GpuError::of("vkBeginCommandBuffer"))?;
            if self.queries != vk::QueryPool::null() {
                self.device.raw.reset_query_pool(self.queries, 0, 2 * MAX_TIMED);
            }
            if self.span != vk::QueryPool::null() {
                self.device.raw.reset_query_pool(self.span, 0, 2);
            }
        }
        let mut recorder = Recorder { commands: self, since_barrier: Accesses::default() };
        // Orders this buffer behind everything submitted before it.
        recorder.barrier();
        recorder.timestamp(recorder.commands.span, 0, vk::PipelineStageFlags2::COMPUTE_SHADER);
        Ok(recorder)
    }

    /// Waits for the last submission, if any, and adds its times to the device's profile.
    pub fn wait(&mut self) -> Result<(), GpuError> {
        let Some(value) = self.pending else { return Ok(()) };
        self.device.wait(value, "a submitted step")?;
        self.pending = None;
        self.retained.clear();
        self.took = self.span_time()?;
        self.collect_times()
    }

    /// What the last submission that was waited for took on the device, where that has a clock.
    pub fn took(&self) -> Option<Duration> {
        self.took
    }

    fn span_time(&self) -> Result<Option<Duration>, GpuError> {
        if self.span == vk::QueryPool::null() {
            return Ok(None);
        }
        let mut ticks = [0u64; 2];
        // SAFETY: both queries were written by the finished submission.
        unsafe {
            self.device.raw.get_query_pool_results(self.span, 0, &mut ticks, vk::QueryResultFlags::TYPE_64)
        }
        .map_err(GpuError::of("vkGetQueryPoolResults"))?;
        Ok(Some(Duration::from_nanos(self.device.nanoseconds(ticks[0], ticks[1]))))
    }

    fn collect_times(&mut self) -> Result<(), GpuError> {
        let Some(profile) = &self.device.profile else { return Ok(()) };
        let mut ticks = vec![0u64; 2 * self.timed.len()];
        if !ticks.is_empty() {
            // SAFETY: the queries were written by the finished submission.
            unsafe {
                self.device.raw.get_query_pool_results(
                    self.queries,
                    0,
                    &mut ticks,
                    vk::QueryResultFlags::TYPE_64,
                )
            }
            .map_err(GpuError::of("vkGetQueryPoolResults"))?;
        }
        let mut profile = profile.lock().unwrap();
        for (name, span) in self.timed.drain(..).zip(ticks.chunks_exact(2)) {
            let ns = self.device.nanoseconds(span[0], span[1]);
            let entry = profile.kernels.entry(name).or_default();
            entry.0 += 1;
            entry.1 += ns;
        }
        profile.untimed += std::mem::take(&mut self.untimed);
        Ok(())
    }
}

impl Drop for CommandBuffer {
    fn drop(&mut self) {
        if self.device.is_lost() {
            // Its commands may never end: they, and so the device, are left to the end of the process.
            std::mem::forget(self.device.clone());
            return;
        }
        if let Some(value) = self.pending {
            // A lost or hung device is reported elsewhere; here it only matters that nothing is in use.
            let _ = self.device.wait(value, "the last step before release");
        }
        if self.device.is_lost() {
            std::mem::forget(self.device.clone());
            return;
        }
        // SAFETY: the last submission has finished.
        unsafe {
            self.device.raw.destroy_query_pool(self.queries, None);
            self.device.raw.destroy_query_pool(self.span, None);
            self.device.raw.destroy_command_pool(self.pool, None);
        }
    }
}

/// An address range.
type Range = std::ops::Range<u64>;

/// What was read and written since the last barrier.
#[derive(Default)]
struct Accesses {
    reads: Vec<Range>,
    writes: Vec<Range>,
}

impl Accesses {
    /// Whether a command must come behind a barrier: it reads what was written, or writes what was read or written.
    fn conflict(&self, reads: &[Range], writes: &[Range]) -> bool {
        let overlap =
            |a: &[Range], b: &[Range]| a.iter().any(|a| b.iter().any(|b| a.start < b.end && b.start < a.end));
        overlap(&self.writes, reads) || overlap(&self.writes, writes) || overlap(&self.reads, writes)
    }
}

/// A command buffer being recorded.
pub struct Recorder<'a> {
    commands: &'a mut CommandBuffer,
    since_barrier: Accesses,
}

impl Recorder<'_> {
    /// Runs `groups` workgroups. `reads` and `writes` are all that the shader touches: barriers and lifetimes
    /// follow from them.
    pub fn dispatch<P: bytemuck::NoUninit>(
        &mut self,
        pipeline: &Pipeline,
        push: &P,
        groups: [u32; 3],
        reads: &[&Buffer],
        writes: &[&Buffer],
    ) {
        assert!(groups.iter().all(|&g| g > 0 && g <= 65535), "{}: {groups:?} workgroups", pipeline.name);
        self.order(reads, writes);
        let time = self.start_timing(&pipeline.name);
        let device = &self.commands.device;
        // SAFETY: recording is open; the pipeline belongs to the device; the push constants fit the layout.
        unsafe {
            let raw = self.commands.raw;
            device.raw.cmd_bind_pipeline(raw, vk::PipelineBindPoint::COMPUTE, pipeline.raw);
            device.raw.cmd_push_constants(
                raw,
                device.pipelines.layout,
                vk::ShaderStageFlags::COMPUTE,
                0,
                bytemuck::bytes_of(push),
            );
            device.raw.cmd_dispatch(raw, groups[0], groups[1], groups[2]);
        }
        self.stop_timing(time);
    }

    /// Copies `bytes` between buffers.
    pub fn copy(&mut self, from: &Buffer, to: &Buffer, bytes: u64) {
        assert!(bytes <= from.size() && bytes <= to.size(), "copy beyond a buffer");
        self.order(&[from], &[to]);
        let region = [vk::BufferCopy::default().src_offset(from.offset).dst_offset(to.offset).size(bytes)];
        // SAFETY: recording is open; the region lies in both buffers.
        unsafe {
            self.commands.device.raw.cmd_copy_buffer(
                self.commands.raw,
                from.chunk.raw,
                to.chunk.raw,
                &region,
            );
        }
    }

    /// Sets every 32-bit word of a buffer (rounded down to words).
    pub fn fill(&mut self, buffer: &Buffer, word: u32) {
        self.order(&[], &[buffer]);
        // SAFETY: recording is open; offset and size are multiples of 4 within the buffer.
        unsafe {
            self.commands.device.raw.cmd_fill_buffer(
                self.commands.raw,
                buffer.chunk.raw,
                buffer.offset,
                buffer.size() & !3,
                word,
            );
        }
    }

    /// Ends recording and queues the work. What it wrote is visible to the host once the timeline has reached
    /// the value returned.
    pub fn submit(self, what: &str) -> Result<u64, GpuError> {
        let device = self.commands.device.clone();
        self.timestamp(self.commands.span, 1, vk::PipelineStageFlags2::ALL_COMMANDS);
        let to_host = [vk::MemoryBarrier2::default()
            .src_stage_mask(vk::PipelineStageFlags2::ALL_COMMANDS)
            .src_access_mask(vk::AccessFlags2::MEMORY_WRITE)
            .dst_stage_mask(vk::PipelineStageFlags2::HOST)
            .dst_access_mask(vk::AccessFlags2::HOST_READ)];
        // SAFETY: recording is open.
        unsafe {
            device.raw.cmd_pipeline_barrier2(
                self.commands.raw,
                &vk::DependencyInfo::default().memory_barriers(&to_host),
            );
            device.raw.end_command_buffer(self.commands.raw).map_err(GpuError::of("vkEndCommandBuffer"))?;
        }
        let value = device.submit(self.commands.raw, what)?;
        self.commands.pending = Some(value);
        Ok(value)
    }

    /// Puts a barrier before a command if it conflicts with one recorded since the last barrier.
    fn order(&mut self, reads: &[&Buffer], writes: &[&Buffer]) {
        let ranges = |buffers: &[&Buffer]| -> Vec<Range> {
            buffers.iter().map(|b| b.address()..b.address() + b.size()).collect()
        };
        let (read, written) = (ranges(reads), ranges(writes));
        if self.since_barrier.conflict(&read, &written) {
            self.barrier();
        }
        self.since_barrier.reads.extend(read);
        self.since_barrier.writes.extend(written);
        for buffer in reads.iter().chain(writes) {
            let key = Arc::as_ptr(&buffer.chunk) as usize;
            self.commands.retained.entry(key).or_insert_with(|| buffer.chunk.clone());
        }
    }

    fn barrier(&mut self) {
        let stages = vk::PipelineStageFlags2::COMPUTE_SHADER | vk::PipelineStageFlags2::ALL_TRANSFER;
        let barrier = [vk::MemoryBarrier2::default()
            .src_stage_mask(stages)
            .src_access_mask(vk::AccessFlags2::MEMORY_WRITE)
            .dst_stage_mask(stages)
            .dst_access_mask(vk::AccessFlags2::MEMORY_READ | vk::AccessFlags2::MEMORY_WRITE)];
        // SAFETY: recording is open.
        unsafe {
            self.commands.device.raw.cmd_pipeline_barrier2(
                self.commands.raw,
                &vk::DependencyInfo::default().memory_barriers(&barrier),
            );
        }
        self.since_barrier = Accesses::default();
    }

    fn start_timing(&mut self, name: &str) -> Option<u32> {
        let commands = &mut *self.commands;
        if commands.queries == vk::QueryPool::null() {
            return None;
        }
        let index = commands.timed.len() as u32;
        if index == MAX_TIMED {
            commands.untimed += 1;
            return None;
        }
        commands.timed.push(name.to_string());
        self.timestamp(self.commands.queries, 2 * index, vk::PipelineStageFlags2::TOP_OF_PIPE);
        Some(index)
    }

    fn stop_timing(&mut self, index: Option<u32>) {
        if let Some(index) = index {
            self.timestamp(self.commands.queries, 2 * index + 1, vk::PipelineStageFlags2::COMPUTE_SHADER);
        }
    }

    fn timestamp(&self, pool: vk::QueryPool, query: u32, stage: vk::PipelineStageFlags2) {
        if pool == vk::QueryPool::null() {
            return;
        }
        let commands = &*self.commands;
        // SAFETY: recording is open, and each query is written once per recording.
        unsafe { commands.device.raw.cmd_write_timestamp2(commands.raw, stage, pool, query) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::single_range_in_vec_init)] // address ranges, not lists of numbers
    fn barriers_stand_where_an_access_would_overtake_a_write() {
        let seen = Accesses { reads: vec![0..10, 50..60], writes: vec![100..200] };
        // (reads, writes, whether they conflict)
        let cases: [(&[Range], &[Range], bool); 9] = [
            (&[0..10], &[], false),             // read after read
            (&[10..20], &[20..30], false),      // nothing in common
            (&[199..210], &[], true),           // read after write, one byte
            (&[200..210], &[60..100], false),   // adjacent on all sides
            (&[], &[0..1], true),               // write after read
            (&[], &[150..160], true),           // write after write
            (&[300..400], &[40..51], true),     // write after read, at an edge
            (&[300..400, 120..121], &[], true), // the second of several
            (&[], &[], false),
        ];
        for (reads, writes, expected) in cases {
            assert_eq!(seen.conflict(reads, writes), expected, "{reads:?} {writes:?}");
        }
        assert!(!Accesses::default().conflict(&[0..10], &[0..10]));
    }
}
