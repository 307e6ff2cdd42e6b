//! The device: which one by policy, its queue, and the one timeline every submission is ordered on.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ash::{ext, khr, vk};
use serde::{Deserialize, Serialize};

use super::GpuError;
use super::cache::Cache;
use super::caps::Caps;
use super::instance::{Instance, ValidationLog};
use super::memory::Heaps;
use super::pipeline::Pipelines;
use super::placement::Machine;
use super::recorder::{Counts, Profile, Rehearsal};
use super::residency::{self, Held};

/// Longest any wait on the GPU may last before the device counts as hung.
const WAIT_LIMIT: Duration = Duration::from_secs(120);

/// The version of Vulkan that brought `VK_KHR_cooperative_matrix`.
const COOPERATIVE_MATRIX_SINCE: u32 = vk::make_api_version(0, 1, 3, 255);

/// How long a call may be refused for want of memory before that is an error.
const MEMORY_LIMIT: Duration = Duration::from_secs(5);
/// The pauses between its attempts: the first, each twice the one before, up to the last.
const MEMORY_PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(100));

/// Which device to open.
#[derive(Debug, Clone, Default)]
pub struct DevicePolicy {
    /// Index from `unicorn devices`, or part of the device's name in any case. `None`: the best GPU.
    pub device: Option<String>,
    /// Accept a device of type CPU. Off, software Vulkan is refused, named or not.
    pub allow_software: bool,
    /// Load the validation layer; any message it reports then fails the next wait.
    pub validation: bool,
    /// Time every dispatch with timestamp queries.
    pub profile: bool,
    /// The kind of its queue. `None`: one that the desktop does not share.
    pub queue: Option<QueueKind>,
}

/// What a queue can do beside computing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum QueueKind {
    Compute,
    Graphics,
}

impl fmt::Display for QueueKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            QueueKind::Compute => "compute",
            QueueKind::Graphics => "graphics",
        })
    }
}

/// A family of queues that compute.
#[derive(Debug, Clone, Copy)]
pub(super) struct QueueFamily {
    pub kind: QueueKind,
    pub index: u32,
    /// Valid bits of a timestamp; 0 where its queues write none.
    timestamp_bits: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceKind {
    Discrete,
    Integrated,
    Virtual,
    Other,
    /// Software Vulkan.
    Cpu,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DeviceKind::Discrete => "discrete GPU",
            DeviceKind::Integrated => "integrated GPU",
            DeviceKind::Virtual => "virtual GPU",
            DeviceKind::Other => "other",
            DeviceKind::Cpu => "software (CPU)",
        })
    }
}

/// One memory heap as the driver reports it.
#[derive(Debug, Clone)]
pub struct HeapInfo {
    pub device_local: bool,
    /// The host may write and read it without flushing.
    pub host_visible: bool,
    /// Whether any memory type there is one that this program uses.
    pub usable: bool,
    pub size_bytes: u64,
    /// What this process may still allocate: `VK_EXT_memory_budget` clamped to the heap's size.
    pub free_bytes: u64,
}

/// A Vulkan device as `unicorn devices` shows it.
#[derive(Debug, Clone)]
pub struct DeviceInfo {
    pub index: usize,
    pub name: String,
    pub kind: DeviceKind,
    /// Driver name and version, e.g. `radv Mesa 25.0.7`.
    pub driver: String,
    /// By PCI.
    pub vendor_id: u32,
    /// The kinds of queues that compute, the one first that is taken where nobody asks for another.
    pub queues: Vec<QueueKind>,
    pub heaps: Vec<HeapInfo>,
    pub caps: Caps,
    pub max_allocation_bytes: u64,
    pub max_storage_buffer_bytes: u64,
    /// PCI address, e.g. `0000:c5:00.0`, where the driver tells it.
    pub pci: Option<String>,
    /// What this program needs and the device lacks; empty if it can run.
    pub missing: Vec<String>,
}

impl DeviceInfo {
    /// Its memory, for the placement policy.
    pub fn machine(&self) -> Machine {
        Machine::of(&self.heaps, self.kind, self.max_allocation_bytes)
    }
}

/// Every Vulkan device the loader shows, usable or not.
pub fn list_devices() -> Result<Vec<DeviceInfo>, GpuError> {
    let instance = Instance::new(false)?;
    Ok(enumerate(&instance)?.into_iter().map(|c| c.info).collect())
}

pub(super) struct Candidate {
    pub raw: vk::PhysicalDevice,
    /// The first of each kind; one with compute and no graphics first, for its queue is not shared with the desktop's.
    pub queues: Vec<QueueFamily>,
    memory_budget: bool,
    pipeline_cache_uuid: [u8; 16],
    driver_version: u32,
    device_id: u32,
    timestamp_period_ns: f32,
    pub info: DeviceInfo,
}

pub(super) fn enumerate(instance: &Instance) -> Result<Vec<Candidate>, GpuError> {
    // SAFETY: the instance is alive.
    let raws = unsafe { instance.raw.enumerate_physical_devices() }
        .map_err(GpuError::of("vkEnumeratePhysicalDevices"))?;
    Ok(raws.into_iter().enumerate().map(|(index, raw)| inspect(instance, index, raw)).collect())
}

fn inspect(instance: &Instance, index: usize, raw: vk::PhysicalDevice) -> Candidate {
    let vk_instance = &instance.raw;
    let mut driver = vk::PhysicalDeviceDriverProperties::default();
    let mut limits3 = vk::PhysicalDeviceMaintenance3Properties::default();
    let mut limits4 = vk::PhysicalDeviceMaintenance4Properties::default();
    let mut properties = vk::PhysicalDeviceProperties2::default()
        .push_next(&mut driver)
        .push_next(&mut limits3)
        .push_next(&mut limits4);
    // SAFETY: `raw` comes from this instance; the chains are local and well formed. Devices older than
    // Vulkan 1.3 ignore structures that they do not know.
    let (families, extensions) = unsafe {
        vk_instance.get_physical_device_properties2(raw, &mut properties);
        (
            vk_instance.get_physical_device_queue_family_properties(raw),
            vk_instance.enumerate_device_extension_properties(raw).unwrap_or_default(),
        )
    };
    let properties = properties.properties;
    let has = |name: &std::ffi::CStr| extensions.iter().any(|e| e.extension_name_as_c_str() == Ok(name));
    let memory_budget = has(ext::memory_budget::NAME);
    let pci = has(ext::pci_bus_info::NAME).then(|| {
        let mut pci = vk::PhysicalDevicePCIBusInfoPropertiesEXT::default();
        let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut pci);
        // SAFETY: as above; the device has the extension that the chained structure is of.
        unsafe { vk_instance.get_physical_device_properties2(raw, &mut properties) };
        let (domain, bus, slot, function) = (pci.pci_domain, pci.pci_bus, pci.pci_device, pci.pci_function);
        format!("{domain:04x}:{bus:02x}:{slot:02x}.{function}")
    });
    let heaps = super::memory::heap_infos(vk_instance, raw, memory_budget);
    let mut queues: Vec<QueueFamily> = Vec::new();
    for (index, family) in families.iter().enumerate() {
        let has = |flags| family.queue_flags.contains(flags);
        let kind = if has(vk::QueueFlags::GRAPHICS) { QueueKind::Graphics } else { QueueKind::Compute };
        if has(vk::QueueFlags::COMPUTE) && !queues.iter().any(|q| q.kind == kind) {
            queues.push(QueueFamily {
                kind,
                index: index as u32,
                timestamp_bits: family.timestamp_valid_bits,
            });
        }
    }
    queues.sort_by_key(|q| q.kind == QueueKind::Graphics);

    // A validation layer reports what it does not know.
    let may_have = |name: &std::ffi::CStr| {
        let since = if name == khr::cooperative_matrix::NAME { COOPERATIVE_MATRIX_SINCE } else { 0 };
        has(name) && instance.layer_version >= since
    };
    let caps = Caps::read(&instance.entry, vk_instance, raw, &may_have);
    let mut missing = caps.missing_to_run();
    let mut need = |have: bool, what: &str| {
        if !have {
            missing.push(what.to_string());
        }
    };
    need(!queues.is_empty(), "a compute queue");
    need(heaps.iter().any(|h| h.size_bytes > 0), "a memory heap");

    let text = |s: Result<&std::ffi::CStr, _>| {
        s.map_or(String::new(), |s: &std::ffi::CStr| s.to_string_lossy().into_owned())
    };
    Candidate {
        raw,
        memory_budget,
        pipeline_cache_uuid: properties.pipeline_cache_uuid,
        driver_version: properties.driver_version,
        device_id: properties.device_id,
        timestamp_period_ns: properties.limits.timestamp_period,
        info: DeviceInfo {
            index,
            name: text(properties.device_name_as_c_str()),
            kind: match properties.device_type {
                vk::PhysicalDeviceType::DISCRETE_GPU => DeviceKind::Discrete,
                vk::PhysicalDeviceType::INTEGRATED_GPU => DeviceKind::Integrated,
                vk::PhysicalDeviceType::VIRTUAL_GPU => DeviceKind::Virtual,
                vk::PhysicalDeviceType::CPU => DeviceKind::Cpu,
                _ => DeviceKind::Other,
            },
            driver: format!(
                "{} {}",
                text(driver.driver_name_as_c_str()),
                text(driver.driver_info_as_c_str())
            ),
            vendor_id: properties.vendor_id,
            queues: queues.iter().map(|queue| queue.kind).collect(),
            heaps,
            caps,
            max_allocation_bytes: limits3.max_memory_allocation_size.min(limits4.max_buffer_size),
            max_storage_buffer_bytes: properties.limits.max_storage_buffer_range.into(),
            pci,
            missing,
        },
        queues,
    }
}

/// What to look at where the loader shows no device.
pub const NO_DRIVER_HINT: &str = "is a driver installed (mesa-vulkan-drivers), and may this user open /dev/dri/renderD* \
                                  (group render)?";

/// The device that [`Device::open`] would take, not opened.
pub fn chosen_device(policy: &DevicePolicy) -> Result<DeviceInfo, GpuError> {
    let mut seen = list_devices()?;
    let index = choose(policy, &seen)?;
    Ok(seen.swap_remove(index))
}

/// Picks a device, or says which were seen and why none will do.
fn choose(policy: &DevicePolicy, seen: &[DeviceInfo]) -> Result<usize, GpuError> {
    let refusal = |d: &DeviceInfo| -> Option<String> {
        if d.kind == DeviceKind::Cpu && !policy.allow_software {
            Some("software Vulkan, refused without --allow-software-vulkan".into())
        } else if !d.missing.is_empty() {
            Some(format!("lacks {}", d.missing.join(", ")))
        } else {
            None
        }
    };
    let describe = |d: &DeviceInfo| {
        let why = refusal(d).map_or(String::new(), |why| format!(": {why}"));
        format!("[{}] {} ({}){why}", d.index, d.name, d.kind)
    };
    let all = || match seen {
        [] => format!("the Vulkan loader shows none; {NO_DRIVER_HINT}"),
        seen => format!("seen: {}", seen.iter().map(describe).collect::<Vec<_>>().join("; ")),
    };

    let Some(wanted) = &policy.device else {
        return seen
            .iter()
            .filter(|d| refusal(d).is_none())
            .min_by_key(|d| {
                let local = d.heaps.iter().filter(|h| h.device_local).map(|h| h.size_bytes).max();
                (d.kind, std::cmp::Reverse(local))
            })
            .map(|d| d.index)
            .ok_or_else(|| GpuError::NoDevice(all()));
    };
    let matches: Vec<&DeviceInfo> = match wanted.parse::<usize>() {
        Ok(index) => seen.iter().filter(|d| d.index == index).collect(),
        Err(_) => seen.iter().filter(|d| d.name.to_lowercase().contains(&wanted.to_lowercase())).collect(),
    };
    match matches.as_slice() {
        [] => Err(GpuError::NoDevice(format!("--device {wanted:?} matches none; {}", all()))),
        [d] => match refusal(d) {
            None => Ok(d.index),
            Some(_) => Err(GpuError::NoDevice(describe(d))),
        },
        several => Err(GpuError::NoDevice(format!(
            "--device {wanted:?} matches several, give an index: {}",
            several.iter().map(|d| describe(d)).collect::<Vec<_>>().join("; ")
        ))),
    }
}

/// An open device. Everything made on it holds an `Arc` of it.
pub struct Device {
    pub(super) debug: Option<ext::debug_utils::Device>,
    pub(super) physical: vk::PhysicalDevice,
    pub(super) queue_family: u32,
    queue_kind: QueueKind,
    pub(super) memory_budget: bool,
    pub(super) timestamp_period_ns: f32,
    pub(super) timestamp_bits: u32,
    pub(super) heaps: Heaps,
    /// What is kept of it from run to run.
    pub(super) cache: Cache,
    pub(super) pipelines: Pipelines,
    pub(super) profile: Option<Mutex<Profile>>,
    info: DeviceInfo,
    queue: Mutex<QueueState>,
    timeline: vk::Semaphore,
    lost: AtomicBool,
    rehearsal: Mutex<Rehearsal>,
    /// What was submitted.
    counts: Mutex<Counts>,
    /// Calls that were refused for want of memory, and taken later.
    short_of_memory: AtomicU64,
    /// The timeline is known to have come so far.
    reached: AtomicU64,
    // Last, in this order: the logical device goes before the instance.
    pub(super) raw: RawDevice,
    pub(super) instance: Instance,
}

/// The logical device; destroyed on every way out of [`Device::open`], too.
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

        let extensions: &[_] = if chosen.memory_budget { &[ext::memory_budget::NAME] } else { &[] };
        let caps = &chosen.info.caps;
        let raw = caps.create_device(&instance.raw, chosen.raw, family.index, extensions, false)?;
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
            timestamp_period_ns: chosen.timestamp_period_ns,
            timestamp_bits: family.timestamp_bits,
            heaps,
            cache,
            pipelines,
            profile: profile.then(|| Mutex::new(Profile::default())),
            info: chosen.info,
            queue: Mutex::new(QueueState { raw: queue, last_value: 0 }),
            timeline,
            lost: AtomicBool::new(false),
            rehearsal: Mutex::default(),
            counts: Mutex::default(),
            short_of_memory: AtomicU64::new(0),
            reached: AtomicU64::new(0),
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

    /// Whether its queue is one that the desktop may share.
    pub fn queue_kind(&self) -> QueueKind {
        self.queue_kind
    }

    /// What was kept of the device under this name, by this driver and these shaders.
    pub fn kept(&self, name: &str) -> Option<Vec<u8>> {
        self.cache.read(name)
    }

    /// Keeps that for the next start. What cannot be kept costs time, not answers: it is logged and left.
    pub fn keep(&self, name: &str, data: &[u8]) {
        self.cache.write(name, data);
    }

    /// What the kernel says this process holds of the device; `None` where it says nothing.
    pub fn held(&self) -> Option<Held> {
        residency::held(std::path::Path::new("/proc/self"), self.info.pci.as_deref()?)
    }

    pub fn validation_log(&self) -> &Arc<ValidationLog> {
        &self.instance.log
    }

    /// Whether a call has found the device lost, or nobody knows any more what it is doing. Never becomes false again.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Between two timestamps of its compute queue; the counter may have begun anew.
    pub(super) fn nanoseconds(&self, from: u64, to: u64) -> u64 {
        let mask = u64::MAX >> (64 - self.timestamp_bits.clamp(1, 64));
        ((to.wrapping_sub(from) & mask) as f64 * f64::from(self.timestamp_period_ns)) as u64
    }

    /// GPU time per kernel since the last call; empty unless opened with `profile`.
    pub fn take_profile(&self) -> Profile {
        self.profile.as_ref().map_or(Profile::default(), |p| std::mem::take(&mut p.lock().unwrap()))
    }

    /// What was submitted since the device was opened. That of a step is the difference of two readings around it.
    pub fn counts(&self) -> Counts {
        *self.counts.lock().unwrap()
    }

    pub(super) fn count(&self, counts: &Counts) {
        *self.counts.lock().unwrap() += *counts;
    }

    /// Has what is recorded from now on put in another order between barriers, which must change nothing, or forget what
    /// one shader writes, which must not go unnoticed. For tests.
    #[doc(hidden)]
    pub fn rehearse(&self, rehearsal: Rehearsal) {
        *self.rehearsal.lock().unwrap() = rehearsal;
    }

    #[doc(hidden)]
    pub fn rehearsed(&self) -> Rehearsal {
        self.rehearsal.lock().unwrap().clone()
    }

    /// Debug name of a Vulkan object; without validation, nothing reads it.
    pub(super) fn name(&self, object: impl vk::Handle, name: &str) {
        let Some(debug) = &self.debug else { return };
        let name = std::ffi::CString::new(name.replace('\0', " ")).expect("no interior NUL");
        let info = vk::DebugUtilsObjectNameInfoEXT::default().object_handle(object).object_name(&name);
        // SAFETY: the object was just made on this device. A failed naming changes nothing.
        let _ = unsafe { debug.set_debug_utils_object_name(&info) };
    }

    /// Makes a call of the step path, and makes it again while the driver has no memory for it: for some seconds, in which
    /// steps end and other programs let go of theirs. Vulkan allows that: "VK_ERROR_OUT_OF_*_MEMORY errors do not modify any
    /// currently existing Vulkan objects" (Return Codes); and where a submit fails so, "the implementation must ensure that
    /// the state and contents of any resources or synchronization primitives referenced [...] is unaffected by the call or
    /// its failure" (vkQueueSubmit2).
    pub(super) fn patiently<T>(&self, mut call: impl FnMut() -> Result<T, GpuError>) -> Result<T, GpuError> {
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
                        self.lose();
                    }
                    if let (Ok(_), Some((since, during, result))) = (&other, refused) {
                        self.tell_of_shortage(&during, result, attempts, since);
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

    /// A warning at the first, second, fourth, eighth such call and so on: a machine that is short of memory all the time
    /// does not fill the log.
    fn tell_of_shortage(&self, during: &str, result: vk::Result, attempts: u64, since: Instant) {
        let calls = self.short_of_memory.fetch_add(1, Ordering::Relaxed) + 1;
        if calls.is_power_of_two() {
            let ms = since.elapsed().as_millis();
            tracing::warn!(
                "{during}: the driver had no memory for it ({result}), and took it at attempt {attempts}, {ms} ms later; \
                 {calls} calls so far: other programs use the GPU or much memory"
            );
        }
    }

    /// Queues a recorded command buffer behind everything submitted before; returns its timeline value.
    pub(super) fn submit(&self, commands: &[vk::CommandBuffer], what: &str) -> Result<u64, GpuError> {
        let info = |raw: &vk::CommandBuffer| vk::CommandBufferSubmitInfo::default().command_buffer(*raw);
        let commands: Vec<_> = commands.iter().map(info).collect();
        let attempt = || {
            // Not across the pauses between attempts: others submit meanwhile, and have values of their own.
            let mut queue = self.queue.lock().unwrap();
            let value = queue.last_value + 1;
            let signal = [vk::SemaphoreSubmitInfo::default()
                .semaphore(self.timeline)
                .value(value)
                .stage_mask(vk::PipelineStageFlags2::ALL_COMMANDS)];
            let submit =
                [vk::SubmitInfo2::default().command_buffer_infos(&commands).signal_semaphore_infos(&signal)];
            // SAFETY: the queue is locked; the recorder keeps what the commands use alive until `value` passes.
            unsafe { self.raw.queue_submit2(queue.raw, &submit, vk::Fence::null()) }
                .map_err(GpuError::of(what))?;
            queue.last_value = value;
            Ok(value)
        };
        self.patiently(attempt).inspect_err(|error| {
            // One that was refused for want of memory is known not to run.
            if !matches!(error, GpuError::NoMemory { .. }) {
                self.lose();
            }
        })
    }

    /// Blocks until the timeline has reached `value`; at most two minutes.
    pub fn wait(&self, value: u64, what: &str) -> Result<(), GpuError> {
        if self.reached.load(Ordering::Acquire) >= value {
            return Ok(()); // many are waited for that one submit had
        }
        let (semaphores, values) = ([self.timeline], [value]);
        let info = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&values);
        let wait = || {
            // SAFETY: the semaphore is this device's.
            let result = unsafe { self.raw.wait_semaphores(&info, WAIT_LIMIT.as_nanos() as u64) };
            result.map_err(|result| match result {
                vk::Result::TIMEOUT => {
                    GpuError::Timeout { during: what.to_string(), seconds: WAIT_LIMIT.as_secs() }
                }
                result => GpuError::of(what)(result),
            })
        };
        // Whatever it was, the work may still run.
        self.patiently(wait).inspect_err(|_| self.lose())?;
        self.reached.fetch_max(value, Ordering::AcqRel);
        self.instance.log.check()
    }

    /// Whether what was submitted last may be destroyed with all that it uses. Of a device that was lost, commands may never
    /// end: they, and so the device, are left to the end of the process.
    pub(super) fn is_at_rest(self: &Arc<Device>, pending: Option<u64>) -> bool {
        if let Some(value) = pending.filter(|_| !self.is_lost()) {
            // A lost or hung device is reported elsewhere; here it only matters that nothing is in use.
            let _ = self.wait(value, "the last step before release");
        }
        if self.is_lost() {
            std::mem::forget(Arc::clone(self));
        }
        !self.is_lost()
    }

    fn lose(&self) {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn device(index: usize, name: &str, kind: DeviceKind, gib: u64) -> DeviceInfo {
        DeviceInfo {
            index,
            name: name.into(),
            kind,
            vendor_id: 0,
            queues: vec![QueueKind::Compute],
            driver: "test".into(),
            caps: Caps::default(),
            heaps: vec![HeapInfo {
                device_local: true,
                host_visible: true,
                usable: true,
                size_bytes: gib << 30,
                free_bytes: gib << 30,
            }],
            max_allocation_bytes: 1 << 31,
            max_storage_buffer_bytes: 1 << 31,
            pci: None,
            missing: Vec::new(),
        }
    }

    fn policy(device: Option<&str>, allow_software: bool) -> DevicePolicy {
        DevicePolicy { device: device.map(String::from), allow_software, ..DevicePolicy::default() }
    }

    #[test]
    fn discrete_before_integrated_before_software() {
        let seen = [
            device(0, "llvmpipe", DeviceKind::Cpu, 90),
            device(1, "AMD Radeon 780M (RADV PHOENIX)", DeviceKind::Integrated, 60),
            device(2, "AMD Radeon RX 7600", DeviceKind::Discrete, 8),
            device(3, "AMD Radeon RX 7900", DeviceKind::Discrete, 24),
        ];
        assert_eq!(choose(&policy(None, false), &seen).unwrap(), 3);
        assert_eq!(choose(&policy(None, true), &seen[..2]).unwrap(), 1);
        assert_eq!(choose(&policy(Some("780m"), false), &seen).unwrap(), 1);
        assert_eq!(choose(&policy(Some("2"), false), &seen).unwrap(), 2);
    }

    #[test]
    fn software_is_refused_unless_allowed_even_by_name() {
        let seen = [device(0, "llvmpipe", DeviceKind::Cpu, 90)];
        for wanted in [None, Some("llvmpipe"), Some("0")] {
            let error = choose(&policy(wanted, false), &seen).unwrap_err().to_string();
            assert!(error.contains("[0] llvmpipe") && error.contains("--allow-software-vulkan"), "{error}");
            assert_eq!(choose(&policy(wanted, true), &seen).unwrap(), 0);
        }
    }

    #[test]
    fn refusals_name_what_was_seen_and_what_is_missing() {
        let mut old = device(0, "Old GPU", DeviceKind::Discrete, 4);
        old.missing.push("Vulkan 1.3".into());
        let error = choose(&policy(None, true), &[old.clone()]).unwrap_err().to_string();
        assert!(error.contains("[0] Old GPU (discrete GPU): lacks Vulkan 1.3"), "{error}");
        let error = choose(&policy(Some("radeon"), false), &[old.clone()]).unwrap_err().to_string();
        assert!(error.contains("\"radeon\" matches none; seen: [0] Old GPU"), "{error}");
        let error = choose(&policy(None, false), &[]).unwrap_err().to_string();
        assert!(error.contains("the Vulkan loader shows none"), "{error}");
        let twin = device(1, "Old GPU 2", DeviceKind::Discrete, 4);
        let error = choose(&policy(Some("old"), false), &[old, twin]).unwrap_err().to_string();
        assert!(error.contains("matches several"), "{error}");
    }
}
