//! Errors of the Vulkan layer, with messages for the user.

use ash::vk;

/// An error of the Vulkan layer. The computation never falls back to another device after an error.
#[derive(Debug, Clone, thiserror::Error)]
pub enum GpuError {
    #[error("no Vulkan loader (libvulkan.so.1): {0}; install the package libvulkan1 (`make setup` does)")]
    NoLoader(String),
    #[error(
        "validation was requested, but the layer VK_LAYER_KHRONOS_validation is not installed; \
         install the package vulkan-validationlayers (`make setup-test` does)"
    )]
    NoValidationLayer,
    #[error("no usable Vulkan device: {0}")]
    NoDevice(String),
    #[error(
        "{name}: needs {asked} bytes in {heap}, but only {free} of {total} bytes are free; choose a smaller \
         --quantize mode or --context, or free GPU memory"
    )]
    OutOfMemory { name: String, heap: String, asked: u64, free: u64, total: u64 },
    #[error(
        "{name}: needs one allocation of {asked} bytes, but the device allows at most {limit} bytes per allocation"
    )]
    TooLarge { name: String, asked: u64, limit: u64 },
    #[error("{name} cannot run on {device}: it lacks {missing}")]
    Unsupported { name: String, device: String, missing: String },
    #[error("the GPU was lost during {during}; see `dmesg` for the driver's reason, then restart")]
    DeviceLost { during: String },
    #[error("the GPU did not finish {during} within {seconds} s")]
    Timeout { during: String, seconds: u64 },
    #[error(
        "{during}: the driver had no memory for this call, in {attempts} attempts within {seconds} s ({result}); \
         stop other programs that use the GPU or a lot of memory, or raise memory.reserve"
    )]
    NoMemory { during: String, attempts: u64, seconds: u64, result: vk::Result },
    #[error(
        "{name}: the driver had no memory for {asked} bytes, but returned the invalid address {at:#x} instead of an \
         error; this process has too little memory (`ulimit -v`, MemoryMax=)"
    )]
    NoAddress { name: String, asked: u64, at: u64 },
    #[error(
        "the system cannot start a thread for {doing}: {error}; this process has too little memory or too many threads \
         (`ulimit -v`, `ulimit -u`, MemoryMax=, TasksMax=)"
    )]
    NoThread { doing: &'static str, error: String },
    #[error("validation: {0}")]
    Validation(String),
    #[error("{call} failed: {result}")]
    Vulkan { call: String, result: vk::Result },
}

impl GpuError {
    /// Whether an allocation failed because memory is short. The device is still usable.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, GpuError::OutOfMemory { .. } | GpuError::TooLarge { .. } | GpuError::NoAddress { .. })
    }

    /// Converts the `vk::Result` of the call that is named `call`.
    pub(super) fn of(call: &str) -> impl FnOnce(vk::Result) -> GpuError + '_ {
        move |result| match result {
            vk::Result::ERROR_DEVICE_LOST => GpuError::DeviceLost { during: call.to_string() },
            result => GpuError::Vulkan { call: call.to_string(), result },
        }
    }
}
