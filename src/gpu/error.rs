//! Errors of the Vulkan layer, with messages for the user.

use ash::vk;

/// An error of the Vulkan layer. The computation never falls back to another device after an error.
#[derive(Debug, Clone, thiserror::Error)]
pub enum GpuError {
    #[error("no usable Vulkan device: {0}")]
    NoDevice(String),
    /// The loader, a layer or a thread is missing, or the device lacks what a shader needs.
    #[error("{0}")]
    Unusable(String),
    /// Memory for a buffer cannot be allocated. The device is still usable.
    #[error("{0}")]
    NoRoom(String),
    #[error("the GPU was lost during {during}; see `dmesg` for the driver's reason, then restart")]
    DeviceLost { during: String },
    #[error("the GPU did not finish {during} within {seconds} s")]
    Timeout { during: String, seconds: u64 },
    #[error(
        "{during}: the driver had no memory for this call, in {attempts} attempts within {seconds} s ({result}); \
         stop other programs that use the GPU or a lot of memory, or raise memory.reserve"
    )]
    NoMemory { during: String, attempts: u64, seconds: u64, result: vk::Result },
    #[error("validation: {0}")]
    Validation(String),
    #[error("{call} failed: {result}")]
    Vulkan { call: String, result: vk::Result },
}

impl GpuError {
    /// Whether an allocation failed because memory is short. The device is still usable.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, GpuError::NoRoom(_))
    }

    /// Whether the device or its driver refused what it was asked for, such as a pipeline. The device is still usable,
    /// and memory is not short.
    pub fn is_refusal(&self) -> bool {
        match self {
            GpuError::Unusable(_) => true,
            GpuError::Vulkan { result, .. } => !matches!(
                *result,
                vk::Result::ERROR_OUT_OF_HOST_MEMORY | vk::Result::ERROR_OUT_OF_DEVICE_MEMORY
            ),
            _ => false,
        }
    }

    /// Converts the `vk::Result` of the call that is named `call`.
    pub(super) fn of(call: &str) -> impl FnOnce(vk::Result) -> GpuError + '_ {
        move |result| match result {
            vk::Result::ERROR_DEVICE_LOST => GpuError::DeviceLost { during: call.to_string() },
            result => GpuError::Vulkan { call: call.to_string(), result },
        }
    }
}
