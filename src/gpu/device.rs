//! An open device: its queue, and the one timeline that orders all submits.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ash::{ext, vk};

use super::GpuError;
use super::cache::Cache;
use super::choose::{DevicePolicy, choose};
use super::counts::{Counts, Profile};
use super::courtesy::Pacer;
use super::enumerate::enumerate;
use super::external_memory::Handles;
use super::heaps::{Heaps, heap_infos};
use super::info::{DeviceInfo, DeviceKind, QueueKind};
use super::instance::{Instance, ValidationLog};
use super::pipeline::{Pipeline, Pipelines};
use super::placement::Machine;
use super::rehearsal::Rehearsal;
use super::residency::{self, MemoryUse};
use super::shader::Shader;
use crate::config::Courtesy;

/// How long a GPU, and software Vulkan, may finish nothing before they count as hung, where the policy does not say.
const HANG_TIMEOUT: Duration = Duration::from_secs(10);
const SOFTWARE_HANG_TIMEOUT: Duration = Duration::from_secs(120);
/// How often a gap between submits is told as progress. Whoever watches [`Device::progress`] waits for much longer.
const REST: Duration = Duration::from_millis(50);
/// How often a wait looks whether the device gets on.
const SLICE: Duration = Duration::from_millis(250);

/// How long a call is retried while the driver is out of memory.
const MEMORY_LIMIT: Duration = Duration::from_secs(5);
/// The first pause between retries, which doubles from then on, and the longest pause.
const MEMORY_PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(100));

/// An open device. Everything made on it holds an `Arc` of it.
pub struct Device {
    debug: Option<ext::debug_utils::Device>,
    physical: vk::PhysicalDevice,
    pub(super) queue_family: u32,
    queue_kind: QueueKind,
    memory_budget: bool,
    /// How memory is shared with a device outside Vulkan, if it can be.
    pub(super) handles: Option<Handles>,
    timestamp_period_ns: f32,
    pub(super) timestamp_bits: u32,
    pub(super) heaps: Heaps,
    /// Files that the device keeps from run to run.
    cache: Cache,
    pub(super) pipelines: Pipelines,
    pub(super) profile: Option<Mutex<Profile>>,
    info: DeviceInfo,
    queue: Mutex<QueueState>,
    timeline: vk::Semaphore,
    hang_timeout: Duration,
    lost: AtomicBool,
    rehearsal: Mutex<Rehearsal>,
    /// Sums over all submissions.
    counts: Mutex<Counts>,
    /// Calls that succeeded after the driver was out of memory.
    short_of_memory: AtomicU64,
    /// The highest value that the timeline is known to have reached.
    reached: AtomicU64,
    pacer: Mutex<Pacer>,
    /// What the host got done for the device: slices of gaps between submits, pipelines, pieces of weights.
    done_by_host: AtomicU64,
    /// Nanoseconds for which submits were held back, and for which the device computed timed submissions.
    rested_ns: AtomicU64,
    busy_ns: AtomicU64,
    // The last fields, in this order, because the logical device must be dropped before the instance.
    pub(super) raw: RawDevice,
    pub(super) instance: Instance,
}

/// The logical device. It is destroyed on every way out of [`Device::open`], too.
pub(super) struct RawDevice(pub(super) ash::Device);

impl std::ops::Deref for RawDevice {
    type Target = ash::Device;
    fn deref(&self) -> &ash::Device {
        &self.0
    }
}

impl Drop for RawDevice {
    fn drop(&mut self) {
        // SAFETY: the owner destroyed what was made on the device.
        unsafe { self.0.destroy_device(None) }
    }
}

struct QueueState {
    raw: vk::Queue,
    last_value: u64,
}

impl Device {
    pub fn open(policy: &DevicePolicy) -> Result<Arc<Device>, GpuError> {
        let instance = Instance::new(policy.validation)?;
        let mut candidates = enumerate(&instance)?;
        let infos: Vec<_> = candidates.iter().map(|c| c.info.clone()).collect();
        let chosen = candidates.swap_remove(choose(policy, &infos)?);
        let mut queues = chosen.queues.iter();
        let family = match policy.queue {
            None => *queues.next().expect("a usable device has a compute queue"),
            Some(kind) => *queues.find(|queue| queue.kind == kind).ok_or_else(|| {
                GpuError::NoDevice(format!("{} has no {kind} queue that computes", chosen.info.name))
            })?,
        };

        let mut extensions = if chosen.memory_budget { vec![ext::memory_budget::NAME] } else { Vec::new() };
        extensions.extend(chosen.handles.iter().flat_map(|handles| handles.extensions()));
        let caps = &chosen.info.caps;
        let raw = caps.create_device(&instance.raw, chosen.raw, family.index, &extensions, false)?;
        let raw = RawDevice(raw);
        // SAFETY: family and index were asked for above.
        let queue = unsafe { raw.get_device_queue(family.index, 0) };

        let debug = instance.debug.is_some().then(|| ext::debug_utils::Device::new(&instance.raw, &raw));
        let cache_key = format!(
            "{:04x}-{:04x}-{:08x}-{}",
            chosen.info.vendor_id,
            chosen.device_id,
            chosen.driver_version,
            chosen.pipeline_cache_uuid.iter().map(|b| format!("{b:02x}")).collect::<String>()
        );
        let cache = Cache::new(cache_key);
        let pipelines = Pipelines::new(&raw, &cache)?;
        let mut kind = vk::SemaphoreTypeCreateInfo::default()
            .semaphore_type(vk::SemaphoreType::TIMELINE)
            .initial_value(0);
        let info = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
        // SAFETY: the device is alive.
        let timeline = unsafe { raw.create_semaphore(&info, None) }
            // SAFETY: no pipeline was made yet.
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
                "{}: its compute queue has no timestamps, so no kernel can be timed",
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
            timestamp_period_ns: chosen.timestamp_period_ns,
            timestamp_bits: family.timestamp_bits,
            heaps,
            cache,
            pipelines,
            profile: profile.then(|| Mutex::new(Profile::default())),
            info: chosen.info,
            queue: Mutex::new(QueueState { raw: queue, last_value: 0 }),
            timeline,
            hang_timeout,
            lost: AtomicBool::new(false),
            rehearsal: Mutex::default(),
            counts: Mutex::default(),
            short_of_memory: AtomicU64::new(0),
            reached: AtomicU64::new(0),
            pacer: Mutex::default(),
            done_by_host: AtomicU64::new(0),
            rested_ns: AtomicU64::new(0),
            busy_ns: AtomicU64::new(0),
            raw,
            instance,
        };
        device.name(device.timeline, "timeline");
        if device.info.kind == DeviceKind::Cpu {
            tracing::warn!(
                "running on software Vulkan ({}): right, but slow; no GPU computes anything here",
                device.info.name
            );
        }
        Ok(Arc::new(device))
    }

    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Whether memory of this device can be shared with a device outside Vulkan.
    pub fn can_share(&self) -> bool {
        self.handles.is_some()
    }

    /// The kind of queue in use; the desktop may share a graphics queue.
    pub fn queue_kind(&self) -> QueueKind {
        self.queue_kind
    }

    /// `vkAllocateMemory` calls since the device was opened: constant once a model is loaded.
    pub fn allocations(&self) -> u64 {
        self.heaps.allocations.load(Ordering::Relaxed)
    }

    /// The device's memory, with what is free now.
    pub fn machine(&self) -> Machine {
        let mut heaps = heap_infos(&self.instance.raw, self.physical, self.memory_budget);
        if !self.memory_budget {
            for (heap, taken) in heaps.iter_mut().zip(&self.heaps.allocated) {
                heap.free_bytes = heap.size_bytes.saturating_sub(taken.load(Ordering::Relaxed));
            }
        }
        Machine::of(&heaps, self.info.kind, self.info.max_allocation_bytes)
    }

    /// Free bytes and size in bytes of the heap with the driver's index `heap`.
    pub(super) fn free_bytes(&self, heap: usize) -> (u64, u64) {
        let machine = self.machine();
        let heap = machine.heaps.iter().find(|h| h.index == heap).expect("a heap with usable memory types");
        (heap.free, heap.size)
    }

    /// The pipeline of `shader` with `constants` (in the order of `Shader::constants`), made at first use.
    pub fn pipeline(&self, shader: &'static Shader, constants: &[u32]) -> Result<Arc<Pipeline>, GpuError> {
        let made = |pipeline, name: &str| {
            self.get_on();
            self.name(pipeline, name);
        };
        self.pipelines.get(&self.raw, &self.info, shader, constants, made)
    }

    /// Keeps the pipeline cache for the next start.
    pub fn save_pipeline_cache(&self) {
        self.pipelines.save(&self.raw, &self.cache);
    }

    /// The data that was cached under `name` with this driver and these shaders.
    pub fn read_cached(&self, name: &str) -> Option<Vec<u8>> {
        self.cache.read(name)
    }

    /// Caches `data` under `name` for the next start. A failed write is logged and ignored: it costs time, not answers.
    pub fn write_cached(&self, name: &str, data: &[u8]) {
        self.cache.write(name, data);
    }

    /// Device memory of this process as the kernel reports it; `None` where the kernel reports none.
    pub fn memory_use(&self) -> Option<MemoryUse> {
        residency::memory_use(std::path::Path::new("/proc/self"), self.info.pci.as_deref()?)
    }

    pub fn validation_log(&self) -> &Arc<ValidationLog> {
        &self.instance.log
    }

    /// Whether a call found the device lost, or failed such that submitted work may still run. A lost device stays
    /// lost.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Nanoseconds between two timestamps of the queue; the counter may have wrapped around in between.
    pub(super) fn nanoseconds(&self, from: u64, to: u64) -> u64 {
        let mask = u64::MAX >> (64 - self.timestamp_bits.clamp(1, 64));
        ((to.wrapping_sub(from) & mask) as f64 * f64::from(self.timestamp_period_ns)) as u64
    }

    /// GPU time per kernel since the last call; empty unless opened with `profile`.
    pub fn take_profile(&self) -> Profile {
        self.profile.as_ref().map_or(Profile::default(), |p| std::mem::take(&mut p.lock().unwrap()))
    }

    /// Sums over all submissions since the device was opened. The counts of a step are the difference of two readings.
    pub fn counts(&self) -> Counts {
        *self.counts.lock().unwrap()
    }

    pub(super) fn count(&self, counts: &Counts) {
        *self.counts.lock().unwrap() += *counts;
    }

    /// Changes how commands are recorded from now on, for tests. Commands between barriers come in another order, which
    /// must change nothing; or the writes of one shader are ignored, which a test must notice.
    #[doc(hidden)]
    pub fn rehearse(&self, rehearsal: Rehearsal) {
        *self.rehearsal.lock().unwrap() = rehearsal;
    }

    #[doc(hidden)]
    pub fn rehearsed(&self) -> Rehearsal {
        self.rehearsal.lock().unwrap().clone()
    }

    /// Gives a Vulkan object a debug name. Nothing reads the name without validation.
    pub(super) fn name(&self, object: impl vk::Handle, name: &str) {
        let Some(debug) = &self.debug else { return };
        let name = std::ffi::CString::new(name.replace('\0', " ")).expect("no interior NUL");
        let info = vk::DebugUtilsObjectNameInfoEXT::default().object_handle(object).object_name(&name);
        // SAFETY: the object was just made on this device. A failed naming changes nothing.
        let _ = unsafe { debug.set_debug_utils_object_name(&info) };
    }

    /// Makes a call, and retries it for [`MEMORY_LIMIT`] while the driver is out of memory: steps end meanwhile, and
    /// other programs free memory. Vulkan allows that: "VK_ERROR_OUT_OF_*_MEMORY errors do not modify any currently
    /// existing Vulkan objects" (Return Codes). If a submit fails so, "the implementation must ensure that the state
    /// and contents of any resources or synchronization primitives referenced [...] is unaffected by the call or its
    /// failure" (vkQueueSubmit2).
    pub(super) fn retry_out_of_memory<T>(
        &self,
        mut call: impl FnMut() -> Result<T, GpuError>,
    ) -> Result<T, GpuError> {
        use vk::Result as R;
        let mut attempts = 1;
        let (mut pause, longest) = MEMORY_PAUSES;
        let mut refused: Option<(Instant, String, vk::Result)> = None;
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
                    if let (Ok(_), Some((since, during, result))) = (&other, refused) {
                        self.warn_of_shortage(&during, result, attempts, since);
                    }
                    return other;
                }
            };
            let (since, ..) = refused.get_or_insert((Instant::now(), during.clone(), result));
            if since.elapsed() >= MEMORY_LIMIT {
                return Err(GpuError::NoMemory { during, attempts, seconds: MEMORY_LIMIT.as_secs(), result });
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(longest);
            attempts += 1;
        }
    }

    /// Warns at the first, second, fourth, eighth such call and so on, so that a lasting shortage does not fill the
    /// log.
    fn warn_of_shortage(&self, during: &str, result: vk::Result, attempts: u64, since: Instant) {
        let calls = self.short_of_memory.fetch_add(1, Ordering::Relaxed) + 1;
        if calls.is_power_of_two() {
            let ms = since.elapsed().as_millis();
            tracing::warn!(
                "{during}: the driver had no memory for it ({result}), and took it at attempt {attempts}, {ms} ms later; \
                 {calls} calls so far: other programs use the GPU or much memory"
            );
        }
    }

    /// How many calls the driver had no memory for at first, and took later.
    pub fn memory_shortages(&self) -> u64 {
        self.short_of_memory.load(Ordering::Relaxed)
    }

    /// How long the device may finish nothing of what it was given, until it counts as hung.
    pub fn hang_timeout(&self) -> Duration {
        self.hang_timeout
    }

    /// A number that grows with each submit that the device finishes, while a gap keeps it idle, and with each pipeline
    /// and each piece of a load. If it stands still while work is under way, the device hangs.
    pub fn progress(&self) -> u64 {
        self.finished() + self.done_by_host.load(Ordering::Relaxed)
    }

    /// Counts a piece of the host's work for the device as progress.
    pub(super) fn get_on(&self) {
        self.done_by_host.fetch_add(1, Ordering::Relaxed);
    }

    /// How many submits the device has finished.
    fn finished(&self) -> u64 {
        // SAFETY: the semaphore is this device's.
        unsafe { self.raw.get_semaphore_counter_value(self.timeline) }.unwrap_or(0)
    }

    /// Bounds the share of the device's time that the submits from now on take. Each submit then waits until the device
    /// has finished all others, and for a gap behind them. Results do not depend on it.
    pub fn set_courtesy(&self, courtesy: Courtesy) {
        self.pacer.lock().unwrap().set(courtesy);
    }

    pub fn courtesy(&self) -> Courtesy {
        self.pacer.lock().unwrap().courtesy()
    }

    /// How long submits were held back for the sake of courtesy, since the device was opened.
    pub fn rested(&self) -> Duration {
        Duration::from_nanos(self.rested_ns.load(Ordering::Relaxed))
    }

    /// How long the device computed steps, by its own clock, since it was opened; `None` if its queue has no clock.
    pub fn busy(&self) -> Option<Duration> {
        (self.timestamp_bits > 0).then(|| Duration::from_nanos(self.busy_ns.load(Ordering::Relaxed)))
    }

    pub(super) fn count_busy(&self, took: Duration) {
        self.busy_ns.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Leaves the device idle for as long as courtesy wants before the next submit.
    fn rest(&self) -> Result<(), GpuError> {
        if !self.courtesy().is_bound() {
            return Ok(());
        }
        let last = self.queue.lock().unwrap().last_value;
        self.wait(last, "the submit before this one")?;
        let Some(until) = self.pacer.lock().unwrap().idle_until() else { return Ok(()) };
        let began = Instant::now();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            std::thread::sleep(left.min(REST));
            self.get_on();
        }
        self.rested_ns.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Puts recorded command buffers on the queue, behind everything submitted before, and at once unless courtesy wants
    /// a gap ([`Device::set_courtesy`]). Returns the timeline value that the device reaches when they have run.
    pub(super) fn submit_to_queue(
        &self,
        commands: &[vk::CommandBuffer],
        what: &str,
    ) -> Result<u64, GpuError> {
        let info = |raw: &vk::CommandBuffer| vk::CommandBufferSubmitInfo::default().command_buffer(*raw);
        let commands: Vec<_> = commands.iter().map(info).collect();
        self.rest()?;
        let attempt = || {
            // The queue is not locked during the pauses between attempts. Other threads submit with values of their own
            // meanwhile.
            let mut queue = self.queue.lock().unwrap();
            let value = queue.last_value + 1;
            let signal = [vk::SemaphoreSubmitInfo::default()
                .semaphore(self.timeline)
                .value(value)
                .stage_mask(vk::PipelineStageFlags2::ALL_COMMANDS)];
            let submit =
                [vk::SubmitInfo2::default().command_buffer_infos(&commands).signal_semaphore_infos(&signal)];
            let began = Instant::now();
            // SAFETY: the queue is locked; the recorder keeps what the commands use alive until `value` passes.
            unsafe { self.raw.queue_submit2(queue.raw, &submit, vk::Fence::null()) }
                .map_err(GpuError::of(what))?;
            queue.last_value = value;
            self.pacer.lock().unwrap().submitted(value, began);
            Ok(value)
        };
        self.retry_out_of_memory(attempt).inspect_err(|error| {
            // A submit that failed for want of memory is known not to run.
            if !matches!(error, GpuError::NoMemory { .. }) {
                self.mark_lost();
            }
        })
    }

    /// Blocks until the timeline has reached `value`. Fails if the device finishes nothing for the policy's time.
    pub fn wait(&self, value: u64, what: &str) -> Result<(), GpuError> {
        if self.reached.load(Ordering::Acquire) >= value {
            return Ok(()); // many are waited for that one submit had
        }
        let (semaphores, values) = ([self.timeline], [value]);
        let info = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&values);
        let wait = || {
            // Slices are counted instead of time, so that a process that was stopped meanwhile does not blame the device.
            let (mut reached, mut still) = (self.finished(), Duration::ZERO);
            loop {
                // SAFETY: the semaphore is this device's.
                match unsafe { self.raw.wait_semaphores(&info, SLICE.as_nanos() as u64) } {
                    Err(vk::Result::TIMEOUT) => {}
                    result => return result.map_err(GpuError::of(what)),
                }
                let now = self.finished();
                still = if now == reached { still + SLICE } else { Duration::ZERO };
                reached = now;
                if still >= self.hang_timeout {
                    let seconds = self.hang_timeout.as_secs();
                    return Err(GpuError::Timeout { during: what.to_string(), seconds });
                }
            }
        };
        // Whatever the error was, the work may still run.
        self.retry_out_of_memory(wait).inspect_err(|_| self.mark_lost())?;
        self.reached.fetch_max(value, Ordering::AcqRel);
        self.pacer.lock().unwrap().finished(value, Instant::now());
        self.instance.log.check()
    }

    /// Waits for the submission `pending`, and says whether its command buffers may be destroyed. Commands of a lost
    /// device may never end: they and the device are leaked until the process ends.
    pub(super) fn finish_before_release(self: &Arc<Device>, pending: Option<u64>) -> bool {
        if let Some(value) = pending.filter(|_| !self.is_lost()) {
            // A lost or hung device is reported elsewhere; here it only matters that nothing is in use.
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
        // SAFETY: buffers and command buffers hold an Arc of the device, so none is alive here; each waited for its own
        // last use, or, where the device was lost, keeps it from being dropped at all.
        unsafe {
            let _ = self.raw.device_wait_idle();
            self.pipelines.destroy(&self.raw);
            self.raw.destroy_semaphore(self.timeline, None);
        }
        // The validation log was checked at every wait; this is what came after the last one.
        if let Err(error) = self.instance.log.check() {
            tracing::error!("{error}");
        }
    }
}
