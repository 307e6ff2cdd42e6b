//! A Vulkan layer that makes calls fail on command, to see from outside what the shipped program does about it.
//!
//! `cargo build --example fault_layer` puts it into the folder `examples` of the build. The loader puts it between any
//! program and its driver where the environment says so, and `manifest.json` next to this file leaves the library to the
//! search path:
//!
//! ```text
//! VK_INSTANCE_LAYERS=VK_LAYER_UNICORN_fault VK_ADD_LAYER_PATH=tests/fault_layer LD_LIBRARY_PATH=target/debug/examples
//! FAULT_LAYER="submit:40=OUT_OF_DEVICE_MEMORY"
//! ```
//!
//! `FAULT_LAYER` has the faults from the process's first call on. `FAULT_LAYER_FILE` names a file that is read again at
//! every call: once its text is another, its faults count from there. Both have the same words, with commas between
//! several:
//!
//! ```text
//! CALL:WHICH=FAULT
//!   CALL    submit (vkQueueSubmit2), wait (vkWaitSemaphores), begin, end (vkBeginCommandBuffer, vkEndCommandBuffer),
//!           address (vkGetBufferDeviceAddress)
//!   WHICH   40: the 40th call, once; 40-42: three of them; 40+: that one and all after it. The first is 1.
//!           Or, of a submit, words:7.8.9: those that find these 32-bit words one after the other in memory that the
//!           program has mapped, such as a prompt with these token ids
//!   FAULT   what it returns: OUT_OF_HOST_MEMORY, OUT_OF_DEVICE_MEMORY, DEVICE_LOST, UNKNOWN, or TIMEOUT;
//!           an address is MAP_FAILED then, as Mesa's software driver has it where its own mmap failed;
//!           SEGV: the process gets that signal; of a submit also HANG: it is taken and never ends, nor does any submit
//!           after it; and DROPPED: it ends and has computed nothing
//! ```
//!
//! A call that fails does not reach the driver. After the first DEVICE_LOST, every submit and wait of the process
//! returns that, as a lost device stays lost. Each fault says a line on stderr when it first strikes; words that cannot
//! be read end the process.
//!
//! A program whose device process ends starts another, which reads the same file. A fault of that file that strikes one
//! call, or a few, strikes in one process only: it is noted in a file next to it, whose name ends in `.struck`, until the
//! text is another.
//!
//! What comes between loader and layer is written down in the loader's LoaderLayerInterface.md and vk_layer.h; ash has
//! none of it.

use std::ffi::{CStr, c_char, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use ash::vk::{self, Handle};

// --- what fails -----------------------------------------------------------------------------------------

#[derive(Clone, Copy, PartialEq)]
enum Call {
    Submit,
    Wait,
    Begin,
    End,
    Address,
}

const CALLS: [(&str, Call); 5] = [
    ("submit", Call::Submit),
    ("wait", Call::Wait),
    ("begin", Call::Begin),
    ("end", Call::End),
    ("address", Call::Address),
];

#[derive(Clone, Copy, PartialEq)]
enum Effect {
    Returns(vk::Result),
    Segv,
    Hang,
    Dropped,
}

const EFFECTS: [(&str, Effect); 8] = [
    ("OUT_OF_HOST_MEMORY", Effect::Returns(vk::Result::ERROR_OUT_OF_HOST_MEMORY)),
    ("OUT_OF_DEVICE_MEMORY", Effect::Returns(vk::Result::ERROR_OUT_OF_DEVICE_MEMORY)),
    ("DEVICE_LOST", LOST),
    ("UNKNOWN", Effect::Returns(vk::Result::ERROR_UNKNOWN)),
    ("TIMEOUT", Effect::Returns(vk::Result::TIMEOUT)),
    ("SEGV", Effect::Segv),
    ("HANG", Effect::Hang),
    ("DROPPED", Effect::Dropped),
];

const LOST: Effect = Effect::Returns(vk::Result::ERROR_DEVICE_LOST);

struct Fault {
    call: Call,
    /// Counted from 1, both included.
    first: u64,
    last: u64,
    /// Strikes the submits that find these words in mapped memory, if there are any.
    words: Vec<u32>,
    effect: Effect,
    /// As it was given.
    text: String,
}

impl Fault {
    /// `submit:40+=DEVICE_LOST`
    fn parse(text: &str) -> Option<Fault> {
        let (call, rest) = text.split_once(':')?;
        let (which, effect) = rest.split_once('=')?;
        let words = which.strip_prefix("words:");
        let words = words.map(|words| words.split('.').map(str::parse).collect::<Result<Vec<u32>, _>>());
        let words = words.transpose().ok()?.unwrap_or_default();
        let (first, last) = match (words.is_empty(), which.strip_suffix('+'), which.split_once('-')) {
            (false, ..) => (1, u64::MAX),
            (true, Some(first), _) => (first.parse().ok()?, u64::MAX),
            (true, None, Some((first, last))) => (first.parse().ok()?, last.parse().ok()?),
            (true, None, None) => (which.parse().ok()?, which.parse().ok()?),
        };
        let (_, call) = *CALLS.iter().find(|(name, _)| *name == call)?;
        let (_, effect) = *EFFECTS.iter().find(|(name, _)| *name == effect)?;
        let is_submits = matches!(effect, Effect::Hang | Effect::Dropped) || !words.is_empty();
        let is_known = call == Call::Submit || !is_submits;
        (is_known && 1 <= first && first <= last).then(|| Fault {
            call,
            first,
            last,
            words,
            effect,
            text: text.to_owned(),
        })
    }
}

/// The faults of one text, and how many of each call there were since.
struct Plan {
    text: String,
    faults: Vec<Fault>,
    counts: [u64; CALLS.len()],
}

impl Plan {
    const EMPTY: Plan = Plan { text: String::new(), faults: Vec::new(), counts: [0; CALLS.len()] };

    fn read(text: String) -> Plan {
        let words = text.split(',').map(str::trim).filter(|word| !word.is_empty());
        let faults = words.map(|word| {
            Fault::parse(word).unwrap_or_else(|| {
                say(&format!(
                    "{word:?} is no fault: expected CALL:WHICH=FAULT, see tests/fault_layer/lib.rs"
                ));
                std::process::abort()
            })
        });
        Plan { faults: faults.collect(), text, counts: [0; CALLS.len()] }
    }

    /// Counts one call. `struck` is the file of the faults that are over.
    fn strike(&mut self, call: Call, struck: Option<&Path>) -> Option<Effect> {
        let count = &mut self.counts[call as usize];
        *count += 1;
        let strikes = |f: &&Fault| {
            f.call == call
                && (f.first..=f.last).contains(count)
                && (f.words.is_empty() || are_mapped(&f.words))
        };
        let fault = self.faults.iter().find(strikes)?;
        if fault.first == *count || !fault.words.is_empty() {
            say(&fault.text);
            if let Some(struck) = struck.filter(|_| fault.last < u64::MAX) {
                let file = std::fs::OpenOptions::new().create(true).append(true).open(struck);
                let _ = file.and_then(|mut file| writeln!(file, "{}", note(&self.text, fault)));
            }
        }
        Some(fault.effect)
    }

    /// Forgets the faults that another process has met.
    fn without(mut self, struck: &str) -> Plan {
        self.faults.retain(|fault| !struck.lines().any(|line| line == note(&self.text, fault)));
        self
    }
}

/// How a text's fault is noted that has struck.
fn note(text: &str, fault: &Fault) -> String {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    format!("{:016x} {}", hasher.finish(), fault.text)
}

struct Faults {
    /// None before the first call.
    environment: Option<Plan>,
    file: Plan,
    lost: bool,
    hangs: bool,
}

static FAULTS: Mutex<Faults> =
    Mutex::new(Faults { environment: None, file: Plan::EMPTY, lost: false, hangs: false });

/// What becomes of `call` instead of reaching the driver.
fn strike(call: Call) -> Option<Effect> {
    let mut faults = FAULTS.lock().expect("nothing panics under this lock");
    let Faults { environment, file, lost, hangs } = &mut *faults;
    let path = std::env::var_os("FAULT_LAYER_FILE").map(PathBuf::from);
    let struck = path.as_ref().map(|path| path.with_extension("struck"));
    if let (Some(path), Some(struck)) = (&path, &struck) {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        if text != file.text {
            *file = Plan::read(text).without(&std::fs::read_to_string(struck).unwrap_or_default());
        }
    }
    let environment =
        environment.get_or_insert_with(|| Plan::read(std::env::var("FAULT_LAYER").unwrap_or_default()));
    let (one, other) = (environment.strike(call, None), file.strike(call, struck.as_deref()));
    let effect = one.or(other);
    *lost |= effect == Some(LOST);
    *hangs |= effect == Some(Effect::Hang);
    if *lost && matches!(call, Call::Submit | Call::Wait) {
        return Some(LOST);
    }
    if effect == Some(Effect::Segv) {
        // SAFETY: none; that is its purpose.
        unsafe { std::ptr::null_mut::<u8>().write_volatile(0) };
    }
    if *hangs && call == Call::Submit { Some(Effect::Hang) } else { effect }
}

/// What a call other than a submit returns where a fault strikes.
fn result_of(effect: Effect) -> vk::Result {
    match effect {
        Effect::Returns(result) => result,
        Effect::Segv | Effect::Hang | Effect::Dropped => vk::Result::ERROR_UNKNOWN,
    }
}

/// A line on the program's stderr, which may have no reader.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "fault_layer: {line}");
}

// --- what the program has mapped ------------------------------------------------------------------------

/// A device memory: its handle, its bytes, and where the whole of it is mapped.
struct Memory {
    handle: u64,
    bytes: u64,
    mapped: Option<usize>,
}

static MEMORIES: Mutex<Vec<Memory>> = Mutex::new(Vec::new());

fn memories() -> MutexGuard<'static, Vec<Memory>> {
    MEMORIES.lock().expect("nothing panics under this lock")
}

/// Words of mapped memory that are looked at together.
const CHUNK: usize = 1024;

/// Whether these words stand one after the other in mapped memory.
fn are_mapped(words: &[u32]) -> bool {
    memories().iter().any(|memory| {
        let Some(at) = memory.mapped else { return false };
        // SAFETY: the program mapped the whole of it. A word that the driver writes meanwhile is the old one or the new.
        let all = unsafe { std::slice::from_raw_parts(at as *const u32, memory.bytes as usize / 4) };
        // Most of it is not the first word, which is seen many words at a time.
        let begins = |at: &usize| all[*at..].starts_with(words);
        all.chunks(CHUNK).enumerate().any(|(i, chunk)| {
            let has_first = chunk.iter().fold(false, |any, word| any | (*word == words[0]));
            has_first && (i * CHUNK..i * CHUNK + chunk.len()).any(|at| begins(&at))
        })
    })
}

unsafe extern "system" fn allocate_memory(
    device: vk::Device,
    info: *const vk::MemoryAllocateInfo<'_>,
    allocator: *const vk::AllocationCallbacks<'_>,
    memory: *mut vk::DeviceMemory,
) -> vk::Result {
    // SAFETY: the program's own call, handed on; where it succeeded, `memory` was written.
    unsafe {
        let result = (device_below(device).allocate_memory)(device, info, allocator, memory);
        if result == vk::Result::SUCCESS {
            let (handle, bytes) = ((*memory).as_raw(), (*info).allocation_size);
            memories().push(Memory { handle, bytes, mapped: None });
        }
        result
    }
}

unsafe extern "system" fn free_memory(
    device: vk::Device,
    memory: vk::DeviceMemory,
    allocator: *const vk::AllocationCallbacks<'_>,
) {
    memories().retain(|known| known.handle != memory.as_raw());
    // SAFETY: the program's own call, handed on.
    unsafe { (device_below(device).free_memory)(device, memory, allocator) }
}

unsafe extern "system" fn map_memory(
    device: vk::Device,
    memory: vk::DeviceMemory,
    offset: vk::DeviceSize,
    size: vk::DeviceSize,
    flags: vk::MemoryMapFlags,
    data: *mut *mut c_void,
) -> vk::Result {
    // SAFETY: the program's own call, handed on; where it succeeded, `data` was written.
    unsafe {
        let result = (device_below(device).map_memory)(device, memory, offset, size, flags, data);
        if result == vk::Result::SUCCESS && (offset, size) == (0, vk::WHOLE_SIZE) {
            let mut memories = memories();
            let known = memories.iter_mut().find(|known| known.handle == memory.as_raw());
            known.expect("it was allocated through this layer").mapped = Some(*data as usize);
        }
        result
    }
}

unsafe extern "system" fn unmap_memory(device: vk::Device, memory: vk::DeviceMemory) {
    memories()
        .iter_mut()
        .filter(|known| known.handle == memory.as_raw())
        .for_each(|known| known.mapped = None);
    // SAFETY: the program's own call, handed on.
    unsafe { (device_below(device).unmap_memory)(device, memory) }
}

// --- where it strikes -----------------------------------------------------------------------------------

unsafe extern "system" fn queue_submit2(
    queue: vk::Queue,
    count: u32,
    submits: *const vk::SubmitInfo2<'_>,
    fence: vk::Fence,
) -> vk::Result {
    let effect = strike(Call::Submit);
    // SAFETY: the program's own call, handed on, as it is or without its command buffers.
    unsafe {
        let below = device_below(queue).queue_submit2.expect("the device has it");
        match effect {
            None => below(queue, count, submits, fence),
            Some(Effect::Dropped) => {
                let mut empty = std::slice::from_raw_parts(submits, count as usize).to_vec();
                empty.iter_mut().for_each(|submit| submit.command_buffer_info_count = 0);
                below(queue, count, empty.as_ptr(), fence)
            }
            Some(Effect::Hang) => vk::Result::SUCCESS,
            Some(effect) => result_of(effect),
        }
    }
}

unsafe extern "system" fn wait_semaphores(
    device: vk::Device,
    info: *const vk::SemaphoreWaitInfo<'_>,
    timeout: u64,
) -> vk::Result {
    match strike(Call::Wait) {
        Some(effect) => result_of(effect),
        // SAFETY: the program's own call, handed on.
        None => unsafe {
            let below = device_below(device).wait_semaphores.expect("the device has it");
            below(device, info, timeout)
        },
    }
}

unsafe extern "system" fn begin_command_buffer(
    commands: vk::CommandBuffer,
    info: *const vk::CommandBufferBeginInfo<'_>,
) -> vk::Result {
    match strike(Call::Begin) {
        Some(effect) => result_of(effect),
        // SAFETY: the program's own call, handed on.
        None => unsafe { (device_below(commands).begin_command_buffer)(commands, info) },
    }
}

unsafe extern "system" fn end_command_buffer(commands: vk::CommandBuffer) -> vk::Result {
    match strike(Call::End) {
        Some(effect) => result_of(effect),
        // SAFETY: the program's own call, handed on.
        None => unsafe { (device_below(commands).end_command_buffer)(commands) },
    }
}

unsafe extern "system" fn get_buffer_device_address(
    device: vk::Device,
    info: *const vk::BufferDeviceAddressInfo<'_>,
) -> vk::DeviceAddress {
    match strike(Call::Address) {
        Some(_) => u64::MAX,
        // SAFETY: the program's own call, handed on.
        None => unsafe {
            let below = device_below(device).get_buffer_device_address.expect("the device has it");
            below(device, info)
        },
    }
}

/// This layer's own functions.
fn own(name: &CStr) -> vk::PFN_vkVoidFunction {
    let function: *const () = match name.to_str().ok()? {
        "vkCreateInstance" => create_instance as *const (),
        "vkDestroyInstance" => destroy_instance as *const (),
        "vkGetInstanceProcAddr" => get_instance_proc_addr as *const (),
        "vkCreateDevice" => create_device as *const (),
        _ => return own_of_device(name),
    };
    // SAFETY: Vulkan hands every function around by this type, and calls it by its own.
    Some(unsafe { std::mem::transmute::<*const (), unsafe extern "system" fn()>(function) })
}

/// Functions of the layer that belong to a device.
fn own_of_device(name: &CStr) -> vk::PFN_vkVoidFunction {
    let function: *const () = match name.to_str().ok()? {
        "vkGetDeviceProcAddr" => get_device_proc_addr as *const (),
        "vkDestroyDevice" => destroy_device as *const (),
        "vkQueueSubmit2" | "vkQueueSubmit2KHR" => queue_submit2 as *const (),
        "vkWaitSemaphores" | "vkWaitSemaphoresKHR" => wait_semaphores as *const (),
        "vkAllocateMemory" => allocate_memory as *const (),
        "vkFreeMemory" => free_memory as *const (),
        "vkMapMemory" => map_memory as *const (),
        "vkUnmapMemory" => unmap_memory as *const (),
        "vkBeginCommandBuffer" => begin_command_buffer as *const (),
        "vkEndCommandBuffer" => end_command_buffer as *const (),
        "vkGetBufferDeviceAddress" | "vkGetBufferDeviceAddressKHR" => get_buffer_device_address as *const (),
        _ => return None,
    };
    // SAFETY: as above.
    Some(unsafe { std::mem::transmute::<*const (), unsafe extern "system" fn()>(function) })
}

// --- between loader and driver --------------------------------------------------------------------------

/// VkNegotiateLayerInterface
#[repr(C)]
pub struct NegotiateLayerInterface {
    s_type: i32,
    next: *mut c_void,
    version: u32,
    get_instance_proc_addr: Option<vk::PFN_vkGetInstanceProcAddr>,
    get_device_proc_addr: Option<vk::PFN_vkGetDeviceProcAddr>,
    get_physical_device_proc_addr: Option<vk::PFN_vkGetInstanceProcAddr>,
}

/// VkLayerInstanceCreateInfo and VkLayerDeviceCreateInfo, of which the loader chains several: `link` is only in one
/// whose function is [`LINK_INFO`].
#[repr(C)]
struct LayerCreateInfo<Link> {
    s_type: vk::StructureType,
    next: *const c_void,
    function: i32,
    link: *mut Link,
}

/// VK_LAYER_LINK_INFO
const LINK_INFO: i32 = 0;

/// VkLayerInstanceLink: what the layer below is called by.
#[repr(C)]
struct InstanceLink {
    next: *mut InstanceLink,
    get_instance_proc_addr: vk::PFN_vkGetInstanceProcAddr,
    get_physical_device_proc_addr: Option<vk::PFN_vkGetInstanceProcAddr>,
}

/// VkLayerDeviceLink
#[repr(C)]
struct DeviceLink {
    next: *mut DeviceLink,
    get_instance_proc_addr: vk::PFN_vkGetInstanceProcAddr,
    get_device_proc_addr: vk::PFN_vkGetDeviceProcAddr,
}

/// What lies below this layer.
#[derive(Clone, Copy)]
struct InstanceBelow {
    key: usize,
    instance: vk::Instance,
    get_instance_proc_addr: vk::PFN_vkGetInstanceProcAddr,
    destroy_instance: vk::PFN_vkDestroyInstance,
}

#[derive(Clone, Copy)]
struct DeviceBelow {
    key: usize,
    get_device_proc_addr: vk::PFN_vkGetDeviceProcAddr,
    destroy_device: vk::PFN_vkDestroyDevice,
    /// Not every device has these three; a program that found them here has one that does.
    queue_submit2: Option<vk::PFN_vkQueueSubmit2>,
    wait_semaphores: Option<vk::PFN_vkWaitSemaphores>,
    get_buffer_device_address: Option<vk::PFN_vkGetBufferDeviceAddress>,
    allocate_memory: vk::PFN_vkAllocateMemory,
    free_memory: vk::PFN_vkFreeMemory,
    map_memory: vk::PFN_vkMapMemory,
    unmap_memory: vk::PFN_vkUnmapMemory,
    begin_command_buffer: vk::PFN_vkBeginCommandBuffer,
    end_command_buffer: vk::PFN_vkEndCommandBuffer,
}

static INSTANCES: Mutex<Vec<InstanceBelow>> = Mutex::new(Vec::new());
static DEVICES: Mutex<Vec<DeviceBelow>> = Mutex::new(Vec::new());

/// A handle begins with the address of the loader's table: devices share theirs with their queues and command buffers,
/// and instances with their physical devices.
///
/// # Safety
///
/// The handle is alive, and one of those.
unsafe fn key(handle: impl Handle) -> usize {
    // SAFETY: per this function's contract.
    unsafe { *(handle.as_raw() as *const usize) }
}

/// # Safety
///
/// The handle is as for [`key`].
unsafe fn instance_below(handle: impl Handle) -> InstanceBelow {
    // SAFETY: per this function's contract.
    let key = unsafe { key(handle) };
    let instances = INSTANCES.lock().expect("nothing panics under this lock");
    *instances.iter().find(|below| below.key == key).expect("the instance was made through this layer")
}

/// # Safety
///
/// The handle is as for [`key`].
unsafe fn device_below(handle: impl Handle) -> DeviceBelow {
    // SAFETY: per this function's contract.
    let key = unsafe { key(handle) };
    let devices = DEVICES.lock().expect("nothing panics under this lock");
    *devices.iter().find(|below| below.key == key).expect("the device was made through this layer")
}

/// The function of the type that the caller says its name has.
///
/// # Safety
///
/// `F` is a pointer to a function, of that type.
unsafe fn typed<F: Copy>(function: vk::PFN_vkVoidFunction) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<vk::PFN_vkVoidFunction>()) };
    // SAFETY: per this function's contract; a null pointer was sorted out.
    function.map(|function| unsafe { std::mem::transmute_copy(&function) })
}

/// Takes the next layer's link out of what the loader chained for this one, so that the next finds its own.
///
/// # Safety
///
/// `next` begins a sound chain of `pNext`, whose structures of `s_type` are the loader's, to be written.
unsafe fn link<Link>(
    mut next: *const c_void,
    s_type: vk::StructureType,
    after: impl Fn(&Link) -> *mut Link,
) -> Option<*const Link> {
    while !next.is_null() {
        let info = next as *mut LayerCreateInfo<Link>;
        // SAFETY: every structure of a chain begins with its type and the next one; only after the type that the
        // loader alone gives is there more.
        unsafe {
            if (*info).s_type == s_type && (*info).function == LINK_INFO {
                let link = (*info).link;
                (*info).link = after(&*link);
                return Some(link);
            }
            next = (*info).next;
        }
    }
    None
}

/// What the loader looks for in the library.
///
/// # Safety
///
/// `interface` is the loader's, to be written.
// SAFETY: nothing else in the process has this name.
#[unsafe(no_mangle)]
pub unsafe extern "system" fn vkNegotiateLoaderLayerInterfaceVersion(
    interface: *mut NegotiateLayerInterface,
) -> vk::Result {
    // SAFETY: per this function's contract.
    let interface = unsafe { &mut *interface };
    if interface.version < 2 {
        return vk::Result::ERROR_INITIALIZATION_FAILED;
    }
    interface.version = 2;
    interface.get_instance_proc_addr = Some(get_instance_proc_addr);
    interface.get_device_proc_addr = Some(get_device_proc_addr);
    interface.get_physical_device_proc_addr = None;
    vk::Result::SUCCESS
}

unsafe extern "system" fn get_instance_proc_addr(
    instance: vk::Instance,
    name: *const c_char,
) -> vk::PFN_vkVoidFunction {
    // SAFETY: Vulkan hands over a string that ends.
    if let Some(function) = own(unsafe { CStr::from_ptr(name) }) {
        return Some(function);
    }
    if instance.is_null() {
        return None;
    }
    // SAFETY: the program's own call, handed on.
    unsafe { (instance_below(instance).get_instance_proc_addr)(instance, name) }
}

unsafe extern "system" fn get_device_proc_addr(
    device: vk::Device,
    name: *const c_char,
) -> vk::PFN_vkVoidFunction {
    // SAFETY: the program's own call, handed on.
    let below = unsafe { (device_below(device).get_device_proc_addr)(device, name) };
    // What the device has not, this layer has not either.
    below?;
    // SAFETY: Vulkan hands over a string that ends.
    own_of_device(unsafe { CStr::from_ptr(name) }).or(below)
}

unsafe extern "system" fn create_instance(
    info: *const vk::InstanceCreateInfo<'_>,
    allocator: *const vk::AllocationCallbacks<'_>,
    instance: *mut vk::Instance,
) -> vk::Result {
    // SAFETY: the loader's own call: `info` is sound and has this layer's link in its chain; what it names below has
    // the types that Vulkan gives those names; a new instance is alive.
    unsafe {
        let chain = (*info).p_next;
        let Some(link) =
            link(chain, vk::StructureType::LOADER_INSTANCE_CREATE_INFO, |link: &InstanceLink| link.next)
        else {
            return vk::Result::ERROR_INITIALIZATION_FAILED;
        };
        let get_instance_proc_addr = (*link).get_instance_proc_addr;
        let create = get_instance_proc_addr(vk::Instance::null(), c"vkCreateInstance".as_ptr());
        let Some(create) = typed::<vk::PFN_vkCreateInstance>(create) else {
            return vk::Result::ERROR_INITIALIZATION_FAILED;
        };
        let result = create(info, allocator, instance);
        if result != vk::Result::SUCCESS {
            return result;
        }
        let instance = *instance;
        let destroy = get_instance_proc_addr(instance, c"vkDestroyInstance".as_ptr());
        let below = InstanceBelow {
            key: key(instance),
            instance,
            get_instance_proc_addr,
            destroy_instance: typed(destroy).expect("every instance has it"),
        };
        INSTANCES.lock().expect("nothing panics under this lock").push(below);
        result
    }
}

unsafe extern "system" fn destroy_instance(
    instance: vk::Instance,
    allocator: *const vk::AllocationCallbacks<'_>,
) {
    if instance.is_null() {
        return;
    }
    // SAFETY: the program's own call, handed on; until then the instance is alive.
    unsafe {
        let below = instance_below(instance);
        INSTANCES.lock().expect("nothing panics under this lock").retain(|other| other.key != below.key);
        (below.destroy_instance)(instance, allocator);
    }
}

unsafe extern "system" fn create_device(
    physical: vk::PhysicalDevice,
    info: *const vk::DeviceCreateInfo<'_>,
    allocator: *const vk::AllocationCallbacks<'_>,
    device: *mut vk::Device,
) -> vk::Result {
    // SAFETY: as for an instance.
    unsafe {
        let chain = (*info).p_next;
        let Some(link) =
            link(chain, vk::StructureType::LOADER_DEVICE_CREATE_INFO, |link: &DeviceLink| link.next)
        else {
            return vk::Result::ERROR_INITIALIZATION_FAILED;
        };
        let DeviceLink { get_instance_proc_addr, get_device_proc_addr, .. } = *link;
        let instance = instance_below(physical).instance;
        let create = get_instance_proc_addr(instance, c"vkCreateDevice".as_ptr());
        let Some(create) = typed::<vk::PFN_vkCreateDevice>(create) else {
            return vk::Result::ERROR_INITIALIZATION_FAILED;
        };
        let result = create(physical, info, allocator, device);
        if result != vk::Result::SUCCESS {
            return result;
        }
        let device = *device;
        let find = |name: &CStr| get_device_proc_addr(device, name.as_ptr());
        // By their extensions alone, before Vulkan 1.3 and 1.2.
        let submit = find(c"vkQueueSubmit2").or(find(c"vkQueueSubmit2KHR"));
        let wait = find(c"vkWaitSemaphores").or(find(c"vkWaitSemaphoresKHR"));
        let address = find(c"vkGetBufferDeviceAddress").or(find(c"vkGetBufferDeviceAddressKHR"));
        let below = DeviceBelow {
            key: key(device),
            get_device_proc_addr,
            destroy_device: typed(find(c"vkDestroyDevice")).expect("every device has it"),
            queue_submit2: typed(submit),
            wait_semaphores: typed(wait),
            get_buffer_device_address: typed(address),
            allocate_memory: typed(find(c"vkAllocateMemory")).expect("every device has it"),
            free_memory: typed(find(c"vkFreeMemory")).expect("every device has it"),
            map_memory: typed(find(c"vkMapMemory")).expect("every device has it"),
            unmap_memory: typed(find(c"vkUnmapMemory")).expect("every device has it"),
            begin_command_buffer: typed(find(c"vkBeginCommandBuffer")).expect("every device has it"),
            end_command_buffer: typed(find(c"vkEndCommandBuffer")).expect("every device has it"),
        };
        DEVICES.lock().expect("nothing panics under this lock").push(below);
        result
    }
}

unsafe extern "system" fn destroy_device(device: vk::Device, allocator: *const vk::AllocationCallbacks<'_>) {
    if device.is_null() {
        return;
    }
    // SAFETY: the program's own call, handed on; until then the device is alive.
    unsafe {
        let below = device_below(device);
        DEVICES.lock().expect("nothing panics under this lock").retain(|other| other.key != below.key);
        (below.destroy_device)(device, allocator);
    }
}
