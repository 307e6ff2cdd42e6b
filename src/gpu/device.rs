//! An open device: its queue, and the timeline semaphore that orders all submits.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ash::{ext, vk};

use super::GpuError;
use super::cache::Cache;
use super::choose::{DevicePolicy, choose};
use super::counts::{Counts, Profile};
use super::courtesy::Pacer;
use super::enumerate::enumerate;
use super::external_memory::Handles;
use super::heaps::{Heaps, heap_infos};
use super::info::{DeviceInfo, DeviceKind, QueueKind, ReadSpeed};
use super::instance::{Instance, ValidationLog};
use super::note::Note;
use super::null_driver;
use super::pipeline::{Pipeline, Pipelines};
use super::placement::{Class, Machine};
use super::read_speeds;
use super::rehearsal::Rehearsal;
use super::residency::{self, MemoryUse};
use super::shader::Shader;
use crate::config::Courtesy;

/// The default hang timeouts of a GPU and of software Vulkan ([`DevicePolicy::hang_timeout`]).
const HANG_TIMEOUT: Duration = Duration::from_secs(10);
const SOFTWARE_HANG_TIMEOUT: Duration = Duration::from_secs(120);
/// How often progress is counted during a gap between submits. Threads that watch [`Device::progress`] have much longer
/// timeouts.
const GAP_SLICE: Duration = Duration::from_millis(50);
/// How often a wait checks whether the device makes progress.
const WAIT_SLICE: Duration = Duration::from_millis(250);

/// How long a call is retried while the driver is out of memory.
const MEMORY_RETRY_LIMIT: Duration = Duration::from_secs(5);
/// The first pause between retries, and the longest. Each pause is twice the one before.
const MEMORY_RETRY_PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(100));

/// An open device. All objects created on it hold an `Arc` of it.
pub struct Device {
    debug: Option<ext::debug_utils::Device>,
    physical: vk::PhysicalDevice,
    pub(super) queue_family: u32,
    queue_kind: QueueKind,
    memory_budget: bool,
    /// How memory is shared with a device outside Vulkan. `None`: it cannot be shared.
    pub(super) handles: Option<Handles>,
    /// Whether buffers can have guard pages.
    pub(super) imports_host_memory: bool,
    timestamp_period_ns: f32,
    pub(super) timestamp_bits: u32,
    pub(super) heaps: Heaps,
    /// Files that are kept between runs.
    cache: Cache,
    /// How fast each heap was read, in the driver's order.
    reads: Mutex<Vec<Option<ReadSpeed>>>,
    pub(super) pipelines: Pipelines,
    pub(super) profile: Option<Mutex<Profile>>,
    info: DeviceInfo,
    queue: Mutex<QueueState>,
    timeline: vk::Semaphore,
    hang_timeout: Duration,
    lost: AtomicBool,
    rehearsal: Mutex<Rehearsal>,
    /// The dispatches of all submits. `None`: the device executes them.
    pub(super) notes: Option<Mutex<Vec<Note>>>,
    /// Sums over all submits.
    counts: Mutex<Counts>,
    /// Number of calls that succeeded only in a retry, because the driver was out of memory.
    short_of_memory: AtomicU64,
    /// The highest value that the timeline semaphore is known to have reached.
    reached: AtomicU64,
    pacer: Mutex<Pacer>,
    /// Progress of the host: slices of gaps between submits, compiled pipelines, pieces of uploaded weights.
    host_progress: AtomicU64,
    /// Nanoseconds for which submits were delayed by the limit on the device's time.
    rested_ns: AtomicU64,
    /// Nanoseconds for which the device computed timed submissions.
    busy_ns: AtomicU64,
    // Keep these fields last and in this order: the logical device must be dropped before the instance.
    pub(super) raw: RawDevice,
    pub(super) instance: Instance,
}

/// The logical device. It is also destroyed if [`Device::open`] fails.
pub(super) struct RawDevice(pub(super) ash::Device);

impl std::ops::Deref for RawDevice {
    type Target = ash::Device;
    fn deref(&self) -> &ash::Device {
        &self.0
    }
}

impl Drop for RawDevice {
    fn drop(&mut self) {
        // SAFETY: the owner has destroyed everything that was created on the device.
        unsafe { self.0.destroy_device(None) }
    }
}

struct QueueState {
    raw: vk::Queue,
    last_value: u64,
}

impl Device {
    pub fn open(policy: &DevicePolicy) -> Result<Arc<Device>, GpuError> {
        Device::open_of(Instance::new(policy.validation)?, policy, None)
    }

    /// A device that executes nothing, and notes every dispatch that is submitted.
    pub fn open_null() -> Result<Arc<Device>, GpuError> {
        let instance = Instance::of(null_driver::entry(), false)?;
        Device::open_of(instance, &DevicePolicy::default(), Some(Mutex::default()))
    }

    fn open_of(
        instance: Instance,
        policy: &DevicePolicy,
        notes: Option<Mutex<Vec<Note>>>,
    ) -> Result<Arc<Device>, GpuError> {
        let mut candidates = enumerate(&instance)?;
        let infos: Vec<_> = candidates.iter().map(|c| c.info.clone()).collect();
        let chosen = candidates.swap_remove(choose(policy, &infos)?);
        let mut queues = chosen.queues.iter();
        let family = match policy.queue {
            None => *queues.next().expect("a usable device has a compute queue"),
            Some(kind) => *queues.find(|queue| queue.kind == kind).ok_or_else(|| {
                GpuError::NoDevice(format!("{} has no {kind} queue that supports compute", chosen.info.name))
            })?,
        };

        let mut extensions = if chosen.memory_budget { vec![ext::memory_budget::NAME] } else { Vec::new() };
        extensions.extend(chosen.handles.iter().flat_map(|handles| handles.extensions()));
        extensions.extend(chosen.imports_host_memory.then_some(ext::external_memory_host::NAME));
        let caps = &chosen.info.caps;
        let raw = caps.create_device(&instance.raw, chosen.raw, family.index, &extensions, false)?;
        let raw = RawDevice(raw);
        // SAFETY: the device was created with this queue family and index.
        let queue = unsafe { raw.get_device_queue(family.index, 0) };

        let debug = instance.debug.is_some().then(|| ext::debug_utils::Device::new(&instance.raw, &raw));
        let cache = chosen.cache;
        let pipelines = Pipelines::new(&raw, &cache)?;
        let mut kind = vk::SemaphoreTypeCreateInfo::default()
            .semaphore_type(vk::SemaphoreType::TIMELINE)
            .initial_value(0);
        let info = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
        // SAFETY: the device is alive.
        let timeline = unsafe { raw.create_semaphore(&info, None) }
            // SAFETY: no pipeline was created yet.
            .inspect_err(|_| unsafe { pipelines.destroy(&raw) })
            .map_err(GpuError::of("vkCreateSemaphore"))?;
        let heaps = Heaps::new(&instance.raw, chosen.raw);
        let hang_timeout = policy.hang_timeout.unwrap_or(match chosen.info.kind {
            DeviceKind::Cpu => SOFTWARE_HANG_TIMEOUT,
            _ => HANG_TIMEOUT,
        });
        let profile = policy.profile && family.timestamp_bits > 0;
        if policy.profile && !profile {
            tracing::warn!(
                "{}: the compute queue has no timestamps, so kernels cannot be timed",
                chosen.info.name
            );
        }
        let device = Device {
            debug,
            physical: chosen.raw,
            queue_family: family.index,
            queue_kind: family.kind,
            memory_budget: chosen.memory_budget,
            handles: chosen.handles,
            imports_host_memory: chosen.imports_host_memory,
            timestamp_period_ns: chosen.timestamp_period_ns,
            timestamp_bits: family.timestamp_bits,
            heaps,
            cache,
            reads: Mutex::new(chosen.info.heaps.iter().map(|heap| heap.read).collect()),
            pipelines,
            profile: profile.then(|| Mutex::new(Profile::default())),
            info: chosen.info,
            queue: Mutex::new(QueueState { raw: queue, last_value: 0 }),
            timeline,
            hang_timeout,
            lost: AtomicBool::new(false),
            rehearsal: Mutex::default(),
            notes,
            counts: Mutex::default(),
            short_of_memory: AtomicU64::new(0),
            reached: AtomicU64::new(0),
            pacer: Mutex::default(),
            host_progress: AtomicU64::new(0),
            rested_ns: AtomicU64::new(0),
            busy_ns: AtomicU64::new(0),
            raw,
            instance,
        };
        device.name(device.timeline, "timeline");
        if device.info.kind == DeviceKind::Cpu {
            tracing::warn!(
                "running on software Vulkan ({}): results are correct, but slow; no GPU is used",
                device.info.name
            );
        }
        Ok(Arc::new(device))
    }

    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Whether this device can share memory with a device outside Vulkan.
    pub fn can_share(&self) -> bool {
        self.handles.is_some()
    }

    /// The kind of queue in use; the desktop may share a graphics queue.
    pub fn queue_kind(&self) -> QueueKind {
        self.queue_kind
    }

    /// Number of `vkAllocateMemory` calls since the device was opened. It stays constant after a model is loaded.
    pub fn allocations(&self) -> u64 {
        self.heaps.allocations.load(Ordering::Relaxed)
    }

    /// The device's memory, with the bytes that are free now, and the speeds that are known now.
    pub fn machine(&self) -> Machine {
        let mut heaps = heap_infos(&self.instance.raw, self.physical, self.memory_budget);
        let reads = self.reads.lock().unwrap();
        heaps.iter_mut().zip(&*reads).for_each(|(heap, read)| heap.read = *read);
        if !self.memory_budget {
            for (heap, taken) in heaps.iter_mut().zip(&self.heaps.allocated) {
                heap.free_bytes = heap.size_bytes.saturating_sub(taken.load(Ordering::Relaxed));
            }
        }
        Machine::of(&heaps, self.info.kind, self.info.max_allocation_bytes)
    }

    /// The free bytes and the size of the heap with the driver's index `heap`.
    pub(super) fn free_bytes(&self, heap: usize) -> (u64, u64) {
        let machine = self.machine();
        let heap = machine.heaps.iter().find(|h| h.index == heap).expect("a heap with usable memory types");
        (heap.free, heap.size)
    }

    /// The pipeline of `shader` with `constants` (in the order of `Shader::constants`). It is compiled at first use.
    pub fn pipeline(&self, shader: &'static Shader, constants: &[u32]) -> Result<Arc<Pipeline>, GpuError> {
        let made = |pipeline, name: &str| {
            self.note_progress();
            self.name(pipeline, name);
        };
        self.pipelines.get(&self.raw, &self.info, shader, constants, made)
    }

    /// Saves the pipeline cache for the next start.
    pub fn save_pipeline_cache(&self) {
        self.pipelines.save(&self.raw, &self.cache);
    }

    /// The data that was cached under `name` for this driver and these shaders.
    pub fn read_cached(&self, name: &str) -> Option<Vec<u8>> {
        self.cache.read(name)
    }

    /// Caches `data` under `name` for the next start. A failed write is logged and ignored.
    pub fn write_cached(&self, name: &str, data: &[u8]) {
        self.cache.write(name, data);
    }

    /// Keeps how fast the device reads each of its heaps now, in bytes per second and the driver's order, for this start
    /// and for later ones.
    pub fn keep_read_speeds(&self, bytes_per_s: &[Option<u64>]) {
        assert_eq!(bytes_per_s.len(), self.info.heaps.len(), "a speed, or none, for each heap");
        let measured_at = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let read =
            |bytes_per_s: &Option<u64>| bytes_per_s.map(|bytes_per_s| ReadSpeed { bytes_per_s, measured_at });
        let reads: Vec<_> = bytes_per_s.iter().map(read).collect();
        read_speeds::store(&self.cache, &self.info.heaps, &reads);
        *self.reads.lock().unwrap() = reads;
    }

    /// Device memory of this process as the Linux kernel reports it. `None`: the kernel does not report it.
    pub fn memory_use(&self) -> Option<MemoryUse> {
        residency::memory_use(std::path::Path::new("/proc/self"), self.info.pci.as_deref()?)
    }

    pub fn validation_log(&self) -> &Arc<ValidationLog> {
        &self.instance.log
    }

    /// Whether the device was lost, or a call failed while submitted work may still run. A lost device stays lost.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Nanoseconds between two timestamps of the queue. The counter may have wrapped around once in between.
    pub(super) fn nanoseconds(&self, from: u64, to: u64) -> u64 {
        let mask = u64::MAX >> (64 - self.timestamp_bits.clamp(1, 64));
        ((to.wrapping_sub(from) & mask) as f64 * f64::from(self.timestamp_period_ns)) as u64
    }

    /// GPU time per kernel since the last call. It is empty if the device was opened without `profile`.
    pub fn take_profile(&self) -> Profile {
        self.profile.as_ref().map_or(Profile::default(), |p| std::mem::take(&mut p.lock().unwrap()))
    }

    /// Sums over all submits since the device was opened. The counts of a step are the difference of two readings.
    pub fn counts(&self) -> Counts {
        *self.counts.lock().unwrap()
    }

    pub(super) fn count(&self, counts: &Counts) {
        *self.counts.lock().unwrap() += *counts;
    }

    /// Counts bytes that a submitted step reads, where its recording could not know their number.
    pub fn count_read(&self, class: Class, bytes: u64) {
        self.counts.lock().unwrap().declare(class, bytes);
    }

    /// For tests: changes how later commands are recorded. Another order of the commands between barriers must not
    /// change any result. If the recorder ignores the accesses of one shader, a test must fail.
    #[doc(hidden)]
    pub fn rehearse(&self, rehearsal: Rehearsal) {
        *self.rehearsal.lock().unwrap() = rehearsal;
    }

    #[doc(hidden)]
    pub fn rehearsed(&self) -> Rehearsal {
        self.rehearsal.lock().unwrap().clone()
    }

    /// The dispatches that were submitted since the last call. Empty if the device executes them.
    pub fn take_notes(&self) -> Vec<Note> {
        self.notes.as_ref().map_or(Vec::new(), |notes| std::mem::take(&mut notes.lock().unwrap()))
    }

    /// Gives a Vulkan object a debug name, if the validation layer is loaded.
    pub(super) fn name(&self, object: impl vk::Handle, name: &str) {
        let Some(debug) = &self.debug else { return };
        let name = std::ffi::CString::new(name.replace('\0', " ")).expect("no interior NUL");
        let info = vk::DebugUtilsObjectNameInfoEXT::default().object_handle(object).object_name(&name);
        // SAFETY: the object was just created on this device. A failure is ignored: the object has no name then.
        let _ = unsafe { debug.set_debug_utils_object_name(&info) };
    }

    /// Makes a call, and retries it for [`MEMORY_RETRY_LIMIT`] while the driver is out of memory. Meanwhile, steps may
    /// end and other programs may free memory. Vulkan allows a retry: "VK_ERROR_OUT_OF_*_MEMORY errors do not modify
    /// any currently existing Vulkan objects" (Return Codes). If a submit fails with such an error, "the implementation
    /// must ensure that the state and contents of any resources or synchronization primitives referenced [...] is
    /// unaffected by the call or its failure" (vkQueueSubmit2).
    pub(super) fn retry_out_of_memory<T>(
        &self,
        mut call: impl FnMut() -> Result<T, GpuError>,
    ) -> Result<T, GpuError> {
        use vk::Result as R;
        let mut attempts = 1;
        let (mut pause, longest) = MEMORY_RETRY_PAUSES;
        let mut first_failure: Option<(Instant, String, vk::Result)> = None;
        loop {
            let (during, result) = match call() {
                Err(GpuError::Vulkan {
                    call,
                    result: result @ (R::ERROR_OUT_OF_HOST_MEMORY | R::ERROR_OUT_OF_DEVICE_MEMORY),
                }) => (call, result),
                other => {
                    if let Err(GpuError::DeviceLost { .. }) = other {
                        self.mark_lost();
                    }
                    if let (Ok(_), Some((since, during, result))) = (&other, first_failure) {
                        self.warn_of_shortage(&during, result, attempts, since);
                    }
                    return other;
                }
            };
            let (since, ..) = first_failure.get_or_insert((Instant::now(), during.clone(), result));
            if since.elapsed() >= MEMORY_RETRY_LIMIT {
                return Err(GpuError::NoMemory {
                    during,
                    attempts,
                    seconds: MEMORY_RETRY_LIMIT.as_secs(),
                    result,
                });
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(longest);
            attempts += 1;
        }
    }

    /// Warns about the 1st, 2nd, 4th, 8th such call and so on, so that a long shortage does not fill the log.
    fn warn_of_shortage(&self, during: &str, result: vk::Result, attempts: u64, since: Instant) {
        let calls = self.short_of_memory.fetch_add(1, Ordering::Relaxed) + 1;
        if calls.is_power_of_two() {
            let ms = since.elapsed().as_millis();
            tracing::warn!(
                "{during}: the driver had no memory for this call ({result}); attempt {attempts} succeeded, \
                 {ms} ms later. This has happened to {calls} calls: other programs use the GPU or a lot of memory"
            );
        }
    }

    /// Number of calls that succeeded only in a retry, because the driver was out of memory at first.
    pub fn memory_shortages(&self) -> u64 {
        self.short_of_memory.load(Ordering::Relaxed)
    }

    /// How long the device may finish no submit during a wait until it counts as hung.
    pub fn hang_timeout(&self) -> Duration {
        self.hang_timeout
    }

    /// A counter that grows with each finished submit, during a gap between submits, with each compiled pipeline, and
    /// with each loaded piece of weights. If it does not grow while work is in progress, the device hangs.
    pub fn progress(&self) -> u64 {
        self.finished() + self.host_progress.load(Ordering::Relaxed)
    }

    /// Counts a piece of work that the host has done as progress.
    pub(super) fn note_progress(&self) {
        self.host_progress.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of submits that the device has finished.
    fn finished(&self) -> u64 {
        // SAFETY: the semaphore belongs to this device.
        unsafe { self.raw.get_semaphore_counter_value(self.timeline) }.unwrap_or(0)
    }

    /// Limits the share of the device's time that later submits take. Each submit then waits until the device has
    /// finished all earlier submits, and for an idle gap after them. Results do not depend on the limit.
    pub fn set_courtesy(&self, courtesy: Courtesy) {
        self.pacer.lock().unwrap().set(courtesy);
    }

    pub fn courtesy(&self) -> Courtesy {
        self.pacer.lock().unwrap().courtesy()
    }

    /// How long submits were delayed by [`Device::set_courtesy`] since the device was opened.
    pub fn rested(&self) -> Duration {
        Duration::from_nanos(self.rested_ns.load(Ordering::Relaxed))
    }

    /// How long the device computed timed submissions since it was opened, by its timestamps. `None`: its queue has no
    /// timestamps.
    pub fn busy(&self) -> Option<Duration> {
        (self.timestamp_bits > 0).then(|| Duration::from_nanos(self.busy_ns.load(Ordering::Relaxed)))
    }

    pub(super) fn count_busy(&self, took: Duration) {
        self.busy_ns.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Waits until the device has finished all submits and was idle for the gap that [`Device::set_courtesy`] requires.
    fn wait_for_gap(&self) -> Result<(), GpuError> {
        if !self.courtesy().is_bound() {
            return Ok(());
        }
        let last = self.queue.lock().unwrap().last_value;
        self.wait(last, "the previous submit")?;
        let Some(until) = self.pacer.lock().unwrap().idle_until() else { return Ok(()) };
        let began = Instant::now();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            std::thread::sleep(left.min(GAP_SLICE));
            self.note_progress();
        }
        self.rested_ns.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Submits recorded command buffers to the queue, after a gap if [`Device::set_courtesy`] requires one. Returns the
    /// value that the timeline semaphore reaches when they have finished.
    pub(super) fn submit_to_queue(
        &self,
        commands: &[vk::CommandBuffer],
        what: &str,
    ) -> Result<u64, GpuError> {
        let info = |raw: &vk::CommandBuffer| vk::CommandBufferSubmitInfo::default().command_buffer(*raw);
        let commands: Vec<_> = commands.iter().map(info).collect();
        self.wait_for_gap()?;
        let attempt = || {
            // The queue is not locked during the pauses between attempts, so other threads may submit meanwhile. That
            // is why each attempt takes the next value.
            let mut queue = self.queue.lock().unwrap();
            let value = queue.last_value + 1;
            let signal = [vk::SemaphoreSubmitInfo::default()
                .semaphore(self.timeline)
                .value(value)
                .stage_mask(vk::PipelineStageFlags2::ALL_COMMANDS)];
            let submit =
                [vk::SubmitInfo2::default().command_buffer_infos(&commands).signal_semaphore_infos(&signal)];
            let began = Instant::now();
            // SAFETY: the queue is locked; the command buffers keep what they use alive until `value` is reached.
            unsafe { self.raw.queue_submit2(queue.raw, &submit, vk::Fence::null()) }
                .map_err(GpuError::of(what))?;
            queue.last_value = value;
            self.pacer.lock().unwrap().submitted(value, began);
            Ok(value)
        };
        self.retry_out_of_memory(attempt).inspect_err(|error| {
            // A submit that failed because memory was short does not run.
            if !matches!(error, GpuError::NoMemory { .. }) {
                self.mark_lost();
            }
        })
    }

    /// Blocks until the timeline semaphore has reached `value`. Fails if the device finishes no submit for the hang
    /// timeout.
    pub fn wait(&self, value: u64, what: &str) -> Result<(), GpuError> {
        if self.reached.load(Ordering::Acquire) >= value {
            return Ok(()); // no call of the driver: several objects wait for the same submit
        }
        let (semaphores, values) = ([self.timeline], [value]);
        let info = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&values);
        let wait = || {
            // The wait counts slices instead of reading the clock: if the process was stopped meanwhile, the device
            // does not count as hung.
            let (mut reached, mut still) = (self.finished(), Duration::ZERO);
            loop {
                // SAFETY: the semaphore belongs to this device.
                match unsafe { self.raw.wait_semaphores(&info, WAIT_SLICE.as_nanos() as u64) } {
                    Err(vk::Result::TIMEOUT) => {}
                    result => return result.map_err(GpuError::of(what)),
                }
                let now = self.finished();
                still = if now == reached { still + WAIT_SLICE } else { Duration::ZERO };
                reached = now;
                if still >= self.hang_timeout {
                    let seconds = self.hang_timeout.as_secs();
                    return Err(GpuError::Timeout { during: what.to_string(), seconds });
                }
            }
        };
        // After any error, the submitted work may still run.
        self.retry_out_of_memory(wait).inspect_err(|_| self.mark_lost())?;
        self.reached.fetch_max(value, Ordering::AcqRel);
        self.pacer.lock().unwrap().finished(value, Instant::now());
        self.instance.log.check()
    }

    /// Waits for the submission `pending`, and returns whether its command buffers may be destroyed. Commands of a lost
    /// device may never end, so they and the device are leaked until the process ends.
    pub(super) fn finish_before_release(self: &Arc<Device>, pending: Option<u64>) -> bool {
        if let Some(value) = pending.filter(|_| !self.is_lost()) {
            // The error is reported elsewhere; the check below only needs to know whether the device was lost.
            let _ = self.wait(value, "the last step before release");
        }
        if self.is_lost() {
            std::mem::forget(Arc::clone(self));
        }
        !self.is_lost()
    }

    fn mark_lost(&self) {
        self.lost.store(true, Ordering::Relaxed);
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: buffers and command buffers hold an Arc of the device, so all of them were dropped before. Each of
        // them waited for its last use; if the device was lost, they leaked it, and this function does not run.
        unsafe {
            let _ = self.raw.device_wait_idle();
            self.pipelines.destroy(&self.raw);
            self.raw.destroy_semaphore(self.timeline, None);
        }
        // Every wait checks the validation log; this reports messages after the last wait.
        if let Err(error) = self.instance.log.check() {
            tracing::error!("{error}");
        }
    }
}
