//! Records commands and submits them. A [`Recorder`] derives barriers from the address ranges that each command reads
//! and writes, and keeps the buffers alive as long as the recording exists. The accesses of a dispatch come from
//! [`Shader::pointers`](super::Shader::pointers).
//!
//! There are two ways to submit:
//!
//! - Steps record with [`CommandBuffer::record_for_one_submit`] or [`CommandBuffer::record_for_many_submits`]. A
//!   [`Submission`] then submits several command buffers together and measures their GPU time. A `Submission` can be
//!   used again after its last submit has finished.
//! - Work outside of steps, like uploads, records with [`CommandBuffer::begin`]. [`Recorder::submit_alone`] ends the
//!   recording and submits it once.
//!
//! Both call [`Device::submit_to_queue`], which returns a value of the device's timeline semaphore. No other code
//! submits.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use ash::vk;

use super::GpuError;
use super::counts::Counts;
use super::device::Device;
use super::memory::{Buffer, Chunk};
use super::note::{Note, NotedRange};
use super::pipeline::{PUSH_BYTES, Pipeline};
use super::rehearsal::{Order, Rehearsal};
use super::shader::Access;

/// The most dispatches of a command buffer that are timed. The profile counts the others as untimed.
const MAX_TIMED: u32 = 256;

/// The most workgroups of a dispatch in each direction, which every Vulkan device allows.
pub const MAX_WORKGROUPS: u32 = 65_535;
/// Bytes of the workgroup counts that an indirect dispatch reads: three u32.
pub const INDIRECT_BYTES: u64 = 12;

/// The arguments of a kernel's dispatch; `build.rs` generates a struct for each kernel.
pub trait Arguments {
    const KERNEL: &'static str;
    /// The push constants in the shader's layout.
    type Push: bytemuck::NoUninit;

    /// The buffers that the push constants' addresses point to, in the order of
    /// [`Shader::pointers`](super::Shader::pointers). `None` is allowed for an address that the variant does not use,
    /// and for an address whose name ends in `_or_none`.
    fn buffers(&self) -> impl Iterator<Item = Option<&Buffer>>;

    /// The buffers whose addresses the shader loads from memory. The shader only reads them.
    fn followed(&self) -> &[&Buffer];

    fn push(&self) -> Self::Push;
}

/// Command buffers that are submitted together, and the timestamps that they write.
struct CommandPool {
    device: Arc<Device>,
    raw: vk::CommandPool,
    /// Null without timestamps.
    queries: vk::QueryPool,
    num_queries: u32,
    /// Timeline value of the last submit, while it may still be running.
    pending: Option<u64>,
}

impl CommandPool {
    fn new<const N: usize>(
        device: &Arc<Device>,
        num_queries: u32,
    ) -> Result<(CommandPool, [vk::CommandBuffer; N]), GpuError> {
        let info = vk::CommandPoolCreateInfo::default().queue_family_index(device.queue_family);
        // SAFETY: the device is alive; the pool is destroyed in Drop.
        let raw = unsafe { device.raw.create_command_pool(&info, None) }
            .map_err(GpuError::of("vkCreateCommandPool"))?;
        let queries = vk::QueryPool::null();
        let mut pool = CommandPool { device: device.clone(), raw, queries, num_queries, pending: None };
        let info = vk::CommandBufferAllocateInfo::default().command_pool(raw).command_buffer_count(N as u32);
        // SAFETY: the pool was just created.
        let buffers = unsafe { device.raw.allocate_command_buffers(&info) }
            .map_err(GpuError::of("vkAllocateCommandBuffers"))?;
        if num_queries > 0 {
            let info = vk::QueryPoolCreateInfo::default()
                .query_type(vk::QueryType::TIMESTAMP)
                .query_count(num_queries);
            // SAFETY: the device is alive; the queries are destroyed in Drop.
            pool.queries = unsafe { device.raw.create_query_pool(&info, None) }
                .map_err(GpuError::of("vkCreateQueryPool"))?;
        }
        Ok((pool, buffers.try_into().expect("as many as requested")))
    }

    /// Waits for the last submit. Returns false if there was none since the last wait.
    fn wait(&mut self) -> Result<bool, GpuError> {
        let Some(value) = self.pending else { return Ok(false) };
        self.device.wait(value, "a submitted step")?;
        self.pending = None;
        Ok(true)
    }

    /// Resets the queries for the next submit. The last one must have finished.
    fn reset_queries(&self) {
        if self.num_queries > 0 {
            // SAFETY: the last submit has finished.
            unsafe { self.device.raw.reset_query_pool(self.queries, 0, self.num_queries) };
        }
    }

    /// Reads the first timestamps. The submit that writes them must have finished.
    fn read_timestamps(&self, ticks: &mut [u64]) -> Result<(), GpuError> {
        if ticks.is_empty() {
            return Ok(());
        }
        // SAFETY: there are enough queries.
        self.device.retry_out_of_memory(|| unsafe {
            let flags = vk::QueryResultFlags::TYPE_64;
            let read = self.device.raw.get_query_pool_results(self.queries, 0, ticks, flags);
            read.map_err(GpuError::of("vkGetQueryPoolResults"))
        })
    }
}

impl Drop for CommandPool {
    fn drop(&mut self) {
        if self.device.finish_before_release(self.pending) {
            // SAFETY: the last submit has finished.
            unsafe {
                self.device.raw.destroy_query_pool(self.queries, None);
                self.device.raw.destroy_command_pool(self.raw, None);
            }
        }
    }
}

/// A command buffer. It can be submitted or recorded again after its last submit has finished.
pub struct CommandBuffer {
    /// Must be dropped before `retained`: dropping it waits for the last submit.
    pool: CommandPool,
    raw: vk::CommandBuffer,
    /// The kernel names of the timed dispatches.
    timed: Vec<String>,
    /// The number of dispatches that are not timed because no queries are left.
    untimed: u64,
    /// Chunks that the recorded commands use, by the address of the `Chunk` on the host.
    retained: BTreeMap<usize, Arc<Chunk>>,
    /// Counts of the recorded commands.
    counts: Counts,
    /// The recorded dispatches, if the device takes notes.
    noted: Vec<NotedDispatch>,
}

impl CommandBuffer {
    pub fn new(device: &Arc<Device>, name: &str) -> Result<CommandBuffer, GpuError> {
        device.retry_out_of_memory(|| CommandBuffer::try_new(device, name))
    }

    fn try_new(device: &Arc<Device>, name: &str) -> Result<CommandBuffer, GpuError> {
        let num_queries = if device.profile.is_some() { 2 * MAX_TIMED } else { 0 };
        let (pool, [raw]) = CommandPool::new(device, num_queries)?;
        device.name(raw, name);
        Ok(CommandBuffer {
            pool,
            raw,
            timed: Vec::new(),
            untimed: 0,
            retained: BTreeMap::new(),
            counts: Counts::default(),
            noted: Vec::new(),
        })
    }

    /// Records commands that a [`Submission`] submits once, in place of the last recording. `record` is called again if
    /// the driver was out of memory.
    pub fn record_for_one_submit(
        &mut self,
        record: &mut dyn FnMut(&mut Recorder<'_>),
    ) -> Result<(), GpuError> {
        self.record_with(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT, record)
    }

    /// Records commands that [`Submission`]s may submit any number of times, in place of the last recording. `record`
    /// is called again if the driver was out of memory.
    pub fn record_for_many_submits(
        &mut self,
        record: &mut dyn FnMut(&mut Recorder<'_>),
    ) -> Result<(), GpuError> {
        self.record_with(vk::CommandBufferUsageFlags::empty(), record)
    }

    fn record_with(
        &mut self,
        usage: vk::CommandBufferUsageFlags,
        record: &mut dyn FnMut(&mut Recorder<'_>),
    ) -> Result<(), GpuError> {
        let device = self.pool.device.clone();
        // If `vkEndCommandBuffer` fails, the recording is invalid and must be recorded again from the start.
        device.retry_out_of_memory(|| {
            let mut recorder = self.begin_with(usage)?;
            record(&mut recorder);
            recorder.flush();
            recorder.commands.end()
        })
    }

    /// Waits for the last submit, and starts a recording for [`Recorder::submit_alone`], which fails if the driver is
    /// out of memory.
    pub fn begin(&mut self) -> Result<Recorder<'_>, GpuError> {
        self.begin_with(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT)
    }

    fn begin_with(&mut self, usage: vk::CommandBufferUsageFlags) -> Result<Recorder<'_>, GpuError> {
        self.wait()?;
        self.retained.clear();
        self.timed.clear();
        self.untimed = 0;
        self.counts = Counts::default();
        self.noted.clear();
        let CommandPool { device, raw: pool, .. } = &self.pool;
        let (raw, flags) = (&device.raw, vk::CommandPoolResetFlags::empty());
        let info = vk::CommandBufferBeginInfo::default().flags(usage);
        // SAFETY: the last submit has finished.
        device.retry_out_of_memory(|| unsafe {
            raw.reset_command_pool(*pool, flags).map_err(GpuError::of("vkResetCommandPool"))?;
            raw.begin_command_buffer(self.raw, &info).map_err(GpuError::of("vkBeginCommandBuffer"))
        })?;
        let rehearsal = device.rehearsed();
        let mut recorder = Recorder {
            commands: self,
            since_barrier: Accesses::default(),
            scope: Scope::all(),
            sees_counts: true,
            written: BTreeSet::new(),
            rehearsal,
            deferred: Vec::new(),
            label: "",
        };
        // Orders this command buffer after everything that was submitted before it.
        recorder.barrier(Scope::all());
        Ok(recorder)
    }

    /// Waits for the last submit, if any, and adds its kernel times to the device's profile.
    pub fn wait(&mut self) -> Result<(), GpuError> {
        if self.pool.wait()? { self.collect_times() } else { Ok(()) }
    }

    fn end(&mut self) -> Result<(), GpuError> {
        // SAFETY: recording is open.
        unsafe { self.pool.device.raw.end_command_buffer(self.raw) }
            .map_err(GpuError::of("vkEndCommandBuffer"))
    }

    /// Waits for the last submit, and resets the queries for the next one.
    fn make_ready(&mut self) -> Result<(), GpuError> {
        self.wait()?;
        self.pool.reset_queries();
        Ok(())
    }

    fn was_submitted(&mut self, value: u64) {
        self.pool.pending = Some(value);
        self.pool.device.count(&self.counts);
        if let Some(notes) = &self.pool.device.notes {
            notes.lock().unwrap().extend(self.noted.iter().map(NotedDispatch::submitted));
        }
    }

    fn collect_times(&mut self) -> Result<(), GpuError> {
        let Some(profile) = &self.pool.device.profile else { return Ok(()) };
        let mut ticks = vec![0u64; 2 * self.timed.len()];
        self.pool.read_timestamps(&mut ticks)?;
        let mut profile = profile.lock().unwrap();
        for (name, span) in self.timed.iter().zip(ticks.chunks_exact(2)) {
            let ns = self.pool.device.nanoseconds(span[0], span[1]);
            let entry = profile.kernels.entry(name.clone()).or_default();
            entry.0 += 1;
            entry.1 += ns;
        }
        profile.untimed += self.untimed;
        Ok(())
    }
}

/// Submits several command buffers together, and measures their GPU time. It can be used any number of times.
pub struct Submission {
    /// With timestamps at the start and the end of the submission, if it is timed.
    pool: CommandPool,
    /// Two command buffers that are recorded once, and submitted before and after the others. They write the
    /// timestamps, and `end` makes all writes visible to the host.
    begin: vk::CommandBuffer,
    end: vk::CommandBuffer,
    took: Option<Duration>,
}

impl Submission {
    pub fn new(device: &Arc<Device>) -> Result<Submission, GpuError> {
        device.retry_out_of_memory(|| Submission::try_new(device, device.timestamp_bits > 0))
    }

    /// A submission that is not timed. If a faulty driver drops the commands but reports them as finished, no missing
    /// timestamp reveals it; only wrong results do.
    pub fn untimed(device: &Arc<Device>) -> Result<Submission, GpuError> {
        device.retry_out_of_memory(|| Submission::try_new(device, false))
    }

    fn try_new(device: &Arc<Device>, timed: bool) -> Result<Submission, GpuError> {
        let (pool, [begin, end]) = CommandPool::new(device, if timed { 2 } else { 0 })?;
        let stages = [vk::PipelineStageFlags2::COMPUTE_SHADER, vk::PipelineStageFlags2::ALL_COMMANDS];
        for (query, (raw, stage)) in (0..).zip([begin, end].into_iter().zip(stages)) {
            // SAFETY: the command buffers were just created; each query is written once in a submission.
            unsafe {
                let info = vk::CommandBufferBeginInfo::default();
                device.raw.begin_command_buffer(raw, &info).map_err(GpuError::of("vkBeginCommandBuffer"))?;
                if timed {
                    device.raw.cmd_write_timestamp2(raw, stage, pool.queries, query);
                }
                if raw == end {
                    make_visible_to_host(device, raw);
                }
                device.raw.end_command_buffer(raw).map_err(GpuError::of("vkEndCommandBuffer"))?;
            }
        }
        Ok(Submission { pool, begin, end, took: None })
    }

    /// Waits until no command buffer is running any longer, and submits them in this order. Their writes are visible to
    /// the host after [`Submission::wait`].
    pub fn submit(&mut self, recorded: &mut [&mut CommandBuffer], what: &str) -> Result<(), GpuError> {
        self.wait()?;
        let mut all = vec![self.begin];
        for commands in recorded.iter_mut() {
            commands.make_ready()?;
            all.push(commands.raw);
        }
        all.push(self.end);
        self.pool.reset_queries();
        let value = self.pool.device.submit_to_queue(&all, what)?;
        self.pool.pending = Some(value);
        recorded.iter_mut().for_each(|commands| commands.was_submitted(value));
        Ok(())
    }

    pub fn wait(&mut self) -> Result<(), GpuError> {
        if !self.pool.wait()? || self.pool.num_queries == 0 {
            return Ok(());
        }
        let mut ticks = [0u64; 2];
        self.pool.read_timestamps(&mut ticks)?;
        let took = Duration::from_nanos(self.pool.device.nanoseconds(ticks[0], ticks[1]));
        self.pool.device.count_busy(took);
        self.took = Some(took);
        Ok(())
    }

    /// GPU time of the last submit that was waited for. `None`: there was none, or it has no timestamps.
    pub fn took(&self) -> Option<Duration> {
        self.took
    }
}

/// Records a barrier that makes all writes visible to the host.
fn make_visible_to_host(device: &Device, raw: vk::CommandBuffer) {
    let to_host = [vk::MemoryBarrier2::default()
        .src_stage_mask(Scope::all().stages)
        .src_access_mask(Scope::all().writes)
        .dst_stage_mask(vk::PipelineStageFlags2::HOST)
        .dst_access_mask(vk::AccessFlags2::HOST_READ)];
    // SAFETY: recording is open.
    unsafe {
        device.raw.cmd_pipeline_barrier2(raw, &vk::DependencyInfo::default().memory_barriers(&to_host));
    }
}

/// An address range.
type Range = std::ops::Range<u64>;

/// The address ranges that commands read and write.
#[derive(Default)]
struct Accesses {
    reads: Vec<Range>,
    writes: Vec<Range>,
}

impl Accesses {
    /// Whether a command with the accesses `other` needs a barrier before it, because it reads memory that was written,
    /// or writes memory that was read or written.
    fn conflict(&self, other: &Accesses) -> bool {
        overlap(&self.writes, &other.reads)
            || overlap(&self.writes, &other.writes)
            || overlap(&self.reads, &other.writes)
    }
}

fn overlap(a: &[Range], b: &[Range]) -> bool {
    a.iter().any(|a| b.iter().any(|b| a.start < b.end && b.start < a.end))
}

/// Stages of the pipeline, and how commands access memory there. A barrier waits only for stages that were used, because
/// a driver may flush more caches for others: RADV flushes those of the graphics pipeline for transfers on a graphics
/// queue.
#[derive(Debug, Clone, Copy, Default)]
struct Scope {
    stages: vk::PipelineStageFlags2,
    reads: vk::AccessFlags2,
    writes: vk::AccessFlags2,
}

impl Scope {
    const DISPATCH: Scope = Scope {
        stages: vk::PipelineStageFlags2::COMPUTE_SHADER,
        reads: vk::AccessFlags2::SHADER_STORAGE_READ,
        writes: vk::AccessFlags2::SHADER_STORAGE_WRITE,
    };
    /// Copies and fills.
    const TRANSFER: Scope = Scope {
        stages: vk::PipelineStageFlags2::ALL_TRANSFER,
        reads: vk::AccessFlags2::TRANSFER_READ,
        writes: vk::AccessFlags2::TRANSFER_WRITE,
    };
    /// Reads of workgroup counts that a command wrote. They happen before any shader runs. Counts that the host wrote
    /// before the submit need no barrier.
    const COUNTS: Scope = Scope {
        stages: vk::PipelineStageFlags2::DRAW_INDIRECT,
        reads: vk::AccessFlags2::INDIRECT_COMMAND_READ,
        writes: vk::AccessFlags2::NONE,
    };

    fn all() -> Scope {
        Scope::DISPATCH.and(Scope::TRANSFER).and(Scope::COUNTS)
    }

    fn and(self, other: Scope) -> Scope {
        Scope {
            stages: self.stages | other.stages,
            reads: self.reads | other.reads,
            writes: self.writes | other.writes,
        }
    }

    fn reads_counts(self) -> bool {
        self.stages.contains(Scope::COUNTS.stages)
    }
}

fn range(buffer: &Buffer) -> Range {
    buffer.address()..buffer.address() + buffer.size()
}

/// The workgroup counts of a dispatch.
enum Groups {
    Direct([u32; 3]),
    /// The device reads the counts from this buffer when the dispatch runs.
    Indirect(Buffer),
}

/// A command between two barriers whose place in their order a [`Rehearsal`] chooses, with its name for the profile.
type Deferred = (Option<String>, Box<dyn FnOnce(&Device, vk::CommandBuffer)>);

/// A command buffer being recorded.
pub struct Recorder<'a> {
    commands: &'a mut CommandBuffer,
    /// Accesses of the commands since the last barrier, and their scope.
    since_barrier: Accesses,
    scope: Scope,
    /// Whether the last barrier made earlier writes visible to reads of workgroup counts.
    sees_counts: bool,
    /// Starts and ends of all ranges that the commands write.
    written: BTreeSet<(u64, u64)>,
    rehearsal: Rehearsal,
    /// Commands since the last barrier, if the rehearsal reorders them; empty otherwise.
    deferred: Vec<Deferred>,
    label: &'static str,
}

impl Recorder<'_> {
    /// Names the part of the model that the next dispatches compute, for [`Note`]s.
    pub fn label(&mut self, label: &'static str) {
        self.label = label;
    }

    /// Dispatches `groups` workgroups. The recorder derives barriers and lifetimes from the shader's accesses. Panics
    /// if two addresses point to the same memory and the shader writes through one of them: a shader that works in
    /// place must use a single address.
    pub fn dispatch<A: Arguments>(&mut self, pipeline: &Pipeline, arguments: &A, groups: [u32; 3]) {
        let name = &pipeline.name;
        assert!(groups.iter().all(|&g| g > 0 && g <= MAX_WORKGROUPS), "{name}: {groups:?} workgroups");
        self.dispatch_groups(pipeline, arguments, Groups::Direct(groups));
    }

    /// Like [`Recorder::dispatch`], but the device reads the workgroup counts from `groups` when the dispatch runs:
    /// three u32, each at most [`MAX_WORKGROUPS`]. If one is 0, no workgroup runs.
    pub fn dispatch_indirect<A: Arguments>(&mut self, pipeline: &Pipeline, arguments: &A, groups: &Buffer) {
        self.dispatch_groups(pipeline, arguments, Groups::Indirect(groups.slice(0, INDIRECT_BYTES)));
    }

    fn dispatch_groups<A: Arguments>(&mut self, pipeline: &Pipeline, arguments: &A, groups: Groups) {
        let Pipeline { name, shader, .. } = pipeline;
        assert!(shader.kernel == A::KERNEL, "{name} got the arguments of {}", A::KERNEL);
        let followed = arguments.followed();
        assert!(shader.follows || followed.is_empty(), "{name} loads no addresses from memory");
        let read = match &groups {
            Groups::Direct(_) => None,
            Groups::Indirect(counts) => Some(counts),
        };
        let mut used: Vec<&Buffer> = followed.iter().copied().chain(read).collect();
        let mut accesses = Accesses { reads: used.iter().map(|b| range(b)).collect(), writes: Vec::new() };
        for (buffer, (pointer, access)) in arguments.buffers().zip(shader.pointers) {
            if *access == Access::None || buffer.is_none() && pointer.ends_with("_or_none") {
                continue;
            }
            let buffer = buffer
                .unwrap_or_else(|| panic!("{name} uses {pointer}, but the caller passed no buffer for it"));
            used.push(buffer);
            let one = [range(buffer)];
            let is_shared =
                overlap(&accesses.writes, &one) || access.writes() && overlap(&accesses.reads, &one);
            assert!(
                !is_shared,
                "{name}: {pointer} overlaps the memory of another address, and the shader writes through one of them"
            );
            let [one] = one;
            match access {
                _ if self.rehearsal.forgets(shader.name, pointer) => {}
                access if access.writes() => accesses.writes.push(one),
                _ => accesses.reads.push(one),
            }
        }
        let scope = self.scope_of_dispatch(read);
        self.order_after_conflicts(&used, accesses, scope);
        self.commands.counts.dispatches += 1;
        let values = arguments.push();
        let bytes = bytemuck::bytes_of(&values);
        let mut push = [0; PUSH_BYTES as usize];
        push[..bytes.len()].copy_from_slice(bytes);
        if self.commands.pool.device.notes.is_some() {
            let pointers = arguments.buffers().zip(shader.pointers);
            let accessed = pointers.filter(|(_, (_, access))| *access != Access::None);
            let buffers = accessed.filter_map(|(buffer, (pointer, _))| Some((*pointer, buffer?.clone())));
            self.note(pipeline, &groups, buffers.collect(), push);
        }
        let name = (self.commands.pool.num_queries > 0).then(|| name.clone());
        let (pipeline, bytes) = (pipeline.raw, bytes.len());
        self.add(name, move |Device { raw, pipelines, .. }, commands| {
            let (point, stage) = (vk::PipelineBindPoint::COMPUTE, vk::ShaderStageFlags::COMPUTE);
            // SAFETY: recording is open; the pipeline belongs to the device and the buffer is retained; the push
            // constants fit the layout.
            unsafe {
                raw.cmd_bind_pipeline(commands, point, pipeline);
                raw.cmd_push_constants(commands, pipelines.layout, stage, 0, &push[..bytes]);
                match groups {
                    Groups::Direct([x, y, z]) => raw.cmd_dispatch(commands, x, y, z),
                    Groups::Indirect(counts) => {
                        raw.cmd_dispatch_indirect(commands, counts.chunk.raw, counts.offset)
                    }
                }
            }
        });
    }

    /// The scope of a dispatch, which may read its workgroup counts from a buffer.
    fn scope_of_dispatch(&self, counts: Option<&Buffer>) -> Scope {
        let is_written = |counts: &Buffer| {
            let counts = range(counts);
            self.written.iter().any(|&(start, end)| start < counts.end && counts.start < end)
        };
        let counts = if counts.is_some_and(is_written) { Scope::COUNTS } else { Scope::default() };
        Scope::DISPATCH.and(counts)
    }

    fn note(
        &mut self,
        pipeline: &Pipeline,
        groups: &Groups,
        buffers: Vec<(&'static str, Buffer)>,
        push: [u8; PUSH_BYTES as usize],
    ) {
        let CommandBuffer { noted, counts, .. } = &mut *self.commands;
        let before: u64 = noted.iter().map(|noted| noted.note.barriers).sum();
        let (groups, read) = match groups {
            Groups::Direct(groups) => (*groups, None),
            Groups::Indirect(counts) => ([0; 3], Some(counts.clone())),
        };
        let note = Note {
            shader: pipeline.shader,
            constants: pipeline.constants.clone(),
            label: self.label,
            barriers: counts.barriers - before,
            groups,
            ranges: Vec::new(),
            push,
        };
        noted.push(NotedDispatch { note, groups: read, buffers });
    }

    /// Copies `bytes` between buffers.
    pub fn copy(&mut self, from: &Buffer, to: &Buffer, bytes: u64) {
        let (from, to) = (from.slice(0, bytes), to.slice(0, bytes));
        let mut accesses = Accesses { reads: vec![range(&from)], writes: vec![range(&to)] };
        assert!(!overlap(&accesses.reads, &accesses.writes), "source and destination of a copy overlap");
        if self.rehearsal.forgets("copy", "to") {
            accesses.writes.clear();
        }
        self.order_after_conflicts(&[&from, &to], accesses, Scope::TRANSFER);
        self.commands.counts.copies += 1;
        let region = vk::BufferCopy::default().src_offset(from.offset).dst_offset(to.offset).size(bytes);
        let (from, to) = (from.chunk.raw, to.chunk.raw);
        self.add(None, move |device, commands| {
            // SAFETY: recording is open; the buffers are retained, and the region is inside them.
            unsafe { device.raw.cmd_copy_buffer(commands, from, to, &[region]) }
        });
    }

    /// Sets every 32-bit word of a buffer (rounded down to words).
    pub fn fill(&mut self, buffer: &Buffer, word: u32) {
        let mut accesses = Accesses { reads: Vec::new(), writes: vec![range(buffer)] };
        if self.rehearsal.forgets("fill", "buffer") {
            accesses.writes.clear();
        }
        self.order_after_conflicts(&[buffer], accesses, Scope::TRANSFER);
        let (raw, offset, bytes) = (buffer.chunk.raw, buffer.offset, buffer.size() & !3);
        self.add(None, move |device, commands| {
            // SAFETY: recording is open; the buffer is retained; offset and size are multiples of 4, inside it.
            unsafe { device.raw.cmd_fill_buffer(commands, raw, offset, bytes, word) }
        });
    }

    /// Releases shared buffers to the device outside Vulkan, after all commands that were recorded until now.
    pub fn release(&mut self, buffers: &[&Buffer]) {
        self.transfer(buffers, |own, other| (own, other));
    }

    /// Acquires shared buffers from the device outside Vulkan, before all later commands.
    pub fn acquire(&mut self, buffers: &[&Buffer]) {
        self.transfer(buffers, |own, other| (other, own));
    }

    /// Transfers the ownership of shared buffers. `way` returns the source and the destination queue family, given this
    /// device's family and the family of the device outside.
    fn transfer(&mut self, buffers: &[&Buffer], way: impl Fn(u32, u32) -> (u32, u32)) {
        assert!(
            buffers.iter().all(|buffer| buffer.chunk.is_shared),
            "transferring a buffer whose memory is not shared"
        );
        self.order_after_conflicts(buffers, Accesses::default(), Scope::default());
        self.barrier(Scope::all());
        let device = &self.commands.pool.device;
        let handles = device.handles.expect("a device that shares memory");
        let (from, to) = way(device.queue_family, handles.family());
        let stages = vk::PipelineStageFlags2::ALL_COMMANDS;
        let all = vk::AccessFlags2::MEMORY_READ | vk::AccessFlags2::MEMORY_WRITE;
        let barriers: Vec<_> = buffers
            .iter()
            .map(|buffer| {
                vk::BufferMemoryBarrier2::default()
                    .src_stage_mask(stages)
                    .src_access_mask(all)
                    .dst_stage_mask(stages)
                    .dst_access_mask(all)
                    .src_queue_family_index(from)
                    .dst_queue_family_index(to)
                    .buffer(buffer.chunk.raw)
                    .offset(buffer.offset)
                    .size(buffer.size())
            })
            .collect();
        let info = vk::DependencyInfo::default().buffer_memory_barriers(&barriers);
        // SAFETY: recording is open, and the buffers are retained.
        unsafe { device.raw.cmd_pipeline_barrier2(self.commands.raw, &info) }
    }

    /// Ends the recording and submits only this command buffer, once. The writes are visible to the host when the
    /// timeline semaphore has reached the returned value.
    pub fn submit_alone(mut self, what: &str) -> Result<u64, GpuError> {
        self.flush();
        let Recorder { commands, .. } = self;
        make_visible_to_host(&commands.pool.device, commands.raw);
        commands.end()?;
        commands.make_ready()?;
        let value = commands.pool.device.submit_to_queue(&[commands.raw], what)?;
        commands.was_submitted(value);
        Ok(value)
    }

    /// Records a barrier if these accesses conflict with a command since the last barrier, or if the command reads
    /// workgroup counts that the last barrier did not make visible. Keeps the buffers that the command uses alive.
    fn order_after_conflicts(&mut self, used: &[&Buffer], accesses: Accesses, scope: Scope) {
        if self.since_barrier.conflict(&accesses) || scope.reads_counts() && !self.sees_counts {
            self.barrier(scope);
        }
        self.scope = self.scope.and(scope);
        self.written.extend(accesses.writes.iter().map(|range| (range.start, range.end)));
        self.since_barrier.reads.extend(accesses.reads);
        self.since_barrier.writes.extend(accesses.writes);
        for buffer in used {
            self.commands.counts.declare(buffer.chunk.class, buffer.accessed);
            let key = Arc::as_ptr(&buffer.chunk) as usize;
            self.commands.retained.entry(key).or_insert_with(|| buffer.chunk.clone());
        }
    }

    fn add(&mut self, name: Option<String>, record: impl FnOnce(&Device, vk::CommandBuffer) + 'static) {
        match self.rehearsal.order {
            Order::AsRecorded => self.emit(name, record),
            _ => self.deferred.push((name, Box::new(record))),
        }
    }

    /// Records the deferred commands, in the rehearsal's order.
    fn flush(&mut self) {
        let mut deferred = std::mem::take(&mut self.deferred);
        match self.rehearsal.order {
            Order::AsRecorded => {}
            Order::Reversed => deferred.reverse(),
            Order::Shuffled(seed) => {
                let groups = self.commands.counts.barriers;
                let mut keyed: Vec<_> = deferred.into_iter().enumerate().collect();
                keyed.sort_by_cached_key(|(i, _)| {
                    let mut hash = DefaultHasher::new();
                    (seed, groups, i).hash(&mut hash);
                    hash.finish()
                });
                deferred = keyed.into_iter().map(|(_, command)| command).collect();
            }
        }
        deferred.into_iter().for_each(|(name, record)| self.emit(name, record));
    }

    /// Records a command, between two timestamps if it has a name and there are queries left.
    fn emit(&mut self, name: Option<String>, record: impl FnOnce(&Device, vk::CommandBuffer)) {
        let CommandBuffer { pool: CommandPool { device, queries, .. }, raw, timed, untimed, .. } =
            &mut *self.commands;
        let query = 2 * timed.len() as u32;
        let is_timed = name.is_some() && query < 2 * MAX_TIMED;
        match name {
            Some(name) if is_timed => timed.push(name),
            Some(_) => *untimed += 1,
            None => {}
        }
        let timestamp = |query, stage| {
            if is_timed {
                // SAFETY: recording is open, and each query is written once per recording.
                unsafe { device.raw.cmd_write_timestamp2(*raw, stage, *queries, query) }
            }
        };
        timestamp(query, vk::PipelineStageFlags2::TOP_OF_PIPE);
        record(device, *raw);
        timestamp(query + 1, vk::PipelineStageFlags2::COMPUTE_SHADER);
    }

    /// Orders the commands since the last barrier before all later dispatches, copies and fills, and before later reads
    /// of workgroup counts if `before` has them. Drivers flush for what was written before; letting copies continue costs
    /// nothing more than letting dispatches. Each barrier waits for a command that the previous one orders, so all
    /// earlier commands are ordered, too.
    fn barrier(&mut self, before: Scope) {
        self.flush();
        self.commands.counts.barriers += 1;
        let before = before.and(Scope::DISPATCH).and(Scope::TRANSFER);
        let barrier = [vk::MemoryBarrier2::default()
            .src_stage_mask(self.scope.stages)
            .src_access_mask(self.scope.writes)
            .dst_stage_mask(before.stages)
            .dst_access_mask(before.reads | before.writes)];
        (self.scope, self.sees_counts) = (Scope::default(), before.reads_counts());
        // SAFETY: recording is open.
        unsafe {
            self.commands.pool.device.raw.cmd_pipeline_barrier2(
                self.commands.raw,
                &vk::DependencyInfo::default().memory_barriers(&barrier),
            );
        }
        self.since_barrier = Accesses::default();
    }
}

/// A recorded dispatch, which becomes a [`Note`] at each submit of its command buffer.
struct NotedDispatch {
    /// Without groups that the device reads, and without ranges.
    note: Note,
    /// Where the device reads the numbers of groups. The note has zeros if it computes them itself.
    groups: Option<Buffer>,
    buffers: Vec<(&'static str, Buffer)>,
}

impl NotedDispatch {
    /// The dispatch, with the bytes that are in memory now.
    fn submitted(&self) -> Note {
        let mut note = self.note.clone();
        if let Some(groups) = self.groups.as_ref().filter(|groups| groups.is_mapped()) {
            groups.slice(0, INDIRECT_BYTES).read(0, &mut note.groups);
        }
        let range = |(pointer, buffer): &(&'static str, Buffer)| {
            let contents = buffer.is_mapped().then(|| {
                let mut bytes = vec![0u8; buffer.size() as usize];
                buffer.read(0, &mut bytes);
                bytes
            });
            NotedRange { pointer, class: buffer.chunk.class, bytes: buffer.size(), contents }
        };
        note.ranges = self.buffers.iter().map(range).collect();
        note
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::null_driver::tests::take_barriers;
    use crate::gpu::{Arena, Class, MemoryKind};

    #[test]
    #[allow(clippy::single_range_in_vec_init)] // address ranges, not lists of numbers
    fn accesses_conflict_if_they_overlap_and_one_of_them_writes() {
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
            let accesses = Accesses { reads: reads.to_vec(), writes: writes.to_vec() };
            assert_eq!(seen.conflict(&accesses), expected, "{reads:?} {writes:?}");
        }
        let all = Accesses { reads: vec![0..10], writes: vec![0..10] };
        assert!(!Accesses::default().conflict(&all));
    }

    #[test]
    fn a_barrier_waits_only_for_the_stages_of_the_commands_since_the_last_one() {
        use vk::{AccessFlags2 as Access, PipelineStageFlags2 as Stage};
        let device = Device::open_null().expect("a device");
        let mut arena = Arena::new(&device);
        let buffers = ["x", "y", "counts"]
            .map(|name| arena.alloc(MemoryKind::Device, Class::Activations, 64, name).expect("memory"));
        let [x, y, counts] = &buffers;
        let mut commands = CommandBuffer::new(&device, "test").expect("a command buffer");
        take_barriers();
        let mut recorder = commands.begin().expect("a recording");
        let (compute, transfer, indirect) =
            (Stage::COMPUTE_SHADER, Stage::ALL_TRANSFER, Stage::DRAW_INDIRECT);
        let shader = Access::SHADER_STORAGE_READ | Access::SHADER_STORAGE_WRITE;
        let copies = Access::TRANSFER_READ | Access::TRANSFER_WRITE;
        let writes = Access::SHADER_STORAGE_WRITE | Access::TRANSFER_WRITE;
        let all = compute | transfer | indirect;
        let expected = (all, writes, all, shader | copies | Access::INDIRECT_COMMAND_READ);
        assert_eq!(take_barriers(), [expected], "the first one orders all submits before");

        let dispatch =
            |recorder: &mut Recorder<'_>, reads: &Buffer, writes: &Buffer, counts: Option<&Buffer>| {
                let scope = recorder.scope_of_dispatch(counts);
                let counts = counts.map(range);
                let reads = [range(reads)].into_iter().chain(counts).collect();
                recorder.order_after_conflicts(&[], Accesses { reads, writes: vec![range(writes)] }, scope);
            };
        // Whatever a barrier waits for, it lets dispatches, copies and fills continue.
        let (to, accesses) = (compute | transfer, shader | copies);
        let computed = (compute, Access::SHADER_STORAGE_WRITE, to, accesses);
        let transferred = (transfer, Access::TRANSFER_WRITE, to, accesses);
        recorder.fill(x, 0);
        dispatch(&mut recorder, x, y, None);
        assert_eq!(take_barriers(), [transferred]);
        dispatch(&mut recorder, y, x, Some(counts));
        assert_eq!(take_barriers(), [computed], "the host wrote the counts");
        recorder.copy(counts, y, 64);
        assert_eq!(take_barriers(), [computed]);
        recorder.fill(counts, 1);
        assert_eq!(take_barriers(), [transferred]);
        dispatch(&mut recorder, y, x, None);
        assert_eq!(take_barriers(), [], "the copy to y is before the last barrier");
        dispatch(&mut recorder, y, x, Some(counts));
        let counted = (to, writes, to | indirect, accesses | Access::INDIRECT_COMMAND_READ);
        assert_eq!(take_barriers(), [counted], "a command wrote the counts");
    }
}
