//! A Vulkan layer that makes calls fail on command, to see from outside what the shipped program does about it.
//!
//! `cargo build --example fault_layer` puts it into the folder `examples` of the build. The loader puts it between any
//! program and its driver where the environment says so, and `manifest.json` beside this file leaves the library to the
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
//! CALL:WHICH=RESULT
//!   CALL    submit (vkQueueSubmit2), wait (vkWaitSemaphores), begin, end (vkBeginCommandBuffer, vkEndCommandBuffer)
//!   WHICH   40: the 40th call, once; 40-42: three of them; 40+: that one and all after it. The first is 1.
//!   RESULT  what it returns: OUT_OF_HOST_MEMORY, OUT_OF_DEVICE_MEMORY, DEVICE_LOST, UNKNOWN, or TIMEOUT
//! ```
//!
//! A call that fails does not reach the driver. After the first DEVICE_LOST, every submit and wait of the process
//! returns that, as a lost device stays lost. Each fault says a line on stderr when it first strikes; words that cannot
//! be read end the process.
//!
//! What comes between loader and layer is written down in the loader's LoaderLayerInterface.md and vk_layer.h; ash has
//! none of it.

use std::ffi::{CStr, c_char, c_void};
use std::io::Write;
use std::sync::Mutex;

use ash::vk::{self, Handle};

// --- what fails -----------------------------------------------------------------------------------------

#[derive(Clone, Copy, PartialEq)]
enum Call {
    Submit,
    Wait,
    Begin,
    End,
}

const CALLS: [(&str, Call); 4] =
    [("submit", Call::Submit), ("wait", Call::Wait), ("begin", Call::Begin), ("end", Call::End)];

const RESULTS: [(&str, vk::Result); 5] = [
    ("OUT_OF_HOST_MEMORY", vk::Result::ERROR_OUT_OF_HOST_MEMORY),
    ("OUT_OF_DEVICE_MEMORY", vk::Result::ERROR_OUT_OF_DEVICE_MEMORY),
    ("DEVICE_LOST", vk::Result::ERROR_DEVICE_LOST),
    ("UNKNOWN", vk::Result::ERROR_UNKNOWN),
    ("TIMEOUT", vk::Result::TIMEOUT),
];

struct Fault {
    call: Call,
    /// Counted from 1, both included.
    first: u64,
    last: u64,
    result: vk::Result,
    /// As it was given.
    text: String,
}

impl Fault {
    /// `submit:40+=DEVICE_LOST`
    fn parse(text: &str) -> Option<Fault> {
        let (call, rest) = text.split_once(':')?;
        let (which, result) = rest.split_once('=')?;
        let (first, last) = match (which.strip_suffix('+'), which.split_once('-')) {
            (Some(first), _) => (first.parse().ok()?, u64::MAX),
            (None, Some((first, last))) => (first.parse().ok()?, last.parse().ok()?),
            (None, None) => (which.parse().ok()?, which.parse().ok()?),
        };
        let (_, call) = *CALLS.iter().find(|(name, _)| *name == call)?;
        let (_, result) = *RESULTS.iter().find(|(name, _)| *name == result)?;
        (1 <= first && first <= last).then(|| Fault { call, first, last, result, text: text.to_owned() })
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
                    "{word:?} is no fault: expected CALL:WHICH=RESULT, see tests/fault_layer/lib.rs"
                ));
                std::process::abort()
            })
        });
        Plan { faults: faults.collect(), text, counts: [0; CALLS.len()] }
    }

    /// Counts one call.
    fn strike(&mut self, call: Call) -> Option<vk::Result> {
        let count = &mut self.counts[call as usize];
        *count += 1;
        let strikes = |f: &&Fault| f.call == call && (f.first..=f.last).contains(count);
        let fault = self.faults.iter().find(strikes)?;
        if fault.first == *count {
            say(&fault.text);
        }
        Some(fault.result)
    }
}

struct Faults {
    /// None before the first call.
    environment: Option<Plan>,
    file: Plan,
    lost: bool,
}

static FAULTS: Mutex<Faults> = Mutex::new(Faults { environment: None, file: Plan::EMPTY, lost: false });

/// What `call` returns instead of reaching the driver.
fn strike(call: Call) -> Option<vk::Result> {
    let mut faults = FAULTS.lock().expect("nothing panics under this lock");
    let Faults { environment, file, lost } = &mut *faults;
    if let Some(path) = std::env::var_os("FAULT_LAYER_FILE") {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        if text != file.text {
            *file = Plan::read(text);
        }
    }
    let environment =
        environment.get_or_insert_with(|| Plan::read(std::env::var("FAULT_LAYER").unwrap_or_default()));
    let (one, other) = (environment.strike(call), file.strike(call));
    let result = one.or(other);
    *lost |= result == Some(vk::Result::ERROR_DEVICE_LOST);
    if *lost && matches!(call, Call::Submit | Call::Wait) {
        return Some(vk::Result::ERROR_DEVICE_LOST);
    }
    result
}

/// A line for whoever reads the program's stderr, if anybody does.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "fault_layer: {line}");
}

// --- where it strikes -----------------------------------------------------------------------------------

unsafe extern "system" fn queue_submit2(
    queue: vk::Queue,
    count: u32,
    submits: *const vk::SubmitInfo2<'_>,
    fence: vk::Fence,
) -> vk::Result {
    match strike(Call::Submit) {
        Some(result) => result,
        // SAFETY: the program's own call, handed on.
        None => unsafe {
            let below = device_below(queue).queue_submit2.expect("the device has it");
            below(queue, count, submits, fence)
        },
    }
}

unsafe extern "system" fn wait_semaphores(
    device: vk::Device,
    info: *const vk::SemaphoreWaitInfo<'_>,
    timeout: u64,
) -> vk::Result {
    match strike(Call::Wait) {
        Some(result) => result,
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
        Some(result) => result,
        // SAFETY: the program's own call, handed on.
        None => unsafe { (device_below(commands).begin_command_buffer)(commands, info) },
    }
}

unsafe extern "system" fn end_command_buffer(commands: vk::CommandBuffer) -> vk::Result {
    match strike(Call::End) {
        Some(result) => result,
        // SAFETY: the program's own call, handed on.
        None => unsafe { (device_below(commands).end_command_buffer)(commands) },
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
        "vkBeginCommandBuffer" => begin_command_buffer as *const (),
        "vkEndCommandBuffer" => end_command_buffer as *const (),
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
    /// Not every device has these two; a program that found them here has one that does.
    queue_submit2: Option<vk::PFN_vkQueueSubmit2>,
    wait_semaphores: Option<vk::PFN_vkWaitSemaphores>,
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
        // SAFETY: every structure of a chain begins with its type and the next one; only behind the type that the
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
        let below = DeviceBelow {
            key: key(device),
            get_device_proc_addr,
            destroy_device: typed(find(c"vkDestroyDevice")).expect("every device has it"),
            queue_submit2: typed(submit),
            wait_semaphores: typed(wait),
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
