//! The Vulkan instance: loader, validation layer, and the log of validation messages.

use std::ffi::{CStr, c_void};
use std::sync::{Arc, Mutex};

use ash::{Entry, ext, vk};

use super::GpuError;

const VALIDATION_LAYER: &CStr = c"VK_LAYER_KHRONOS_validation";

/// The messages of the validation layer. The next wait on the device fails if there is a message.
#[derive(Debug, Default)]
pub struct ValidationLog(Mutex<Vec<String>>);

impl ValidationLog {
    /// Returns the messages and clears the log, for tests that provoke a message.
    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }

    pub(super) fn check(&self) -> Result<(), GpuError> {
        match self.0.lock().unwrap().first() {
            None => Ok(()),
            Some(message) => Err(GpuError::Validation(message.clone())),
        }
    }
}

pub(super) struct Instance {
    pub raw: ash::Instance,
    pub debug: Option<ext::debug_utils::Instance>,
    messenger: vk::DebugUtilsMessengerEXT,
    pub log: Arc<ValidationLog>,
    /// The Vulkan version of the validation layer; `u32::MAX` without the layer.
    pub layer_version: u32,
    // Must be dropped last: dropping it unloads the Vulkan loader.
    pub entry: Entry,
}

impl Instance {
    pub fn new(validation: bool) -> Result<Instance, GpuError> {
        // SAFETY: loading libvulkan runs the initialisers of the system's Vulkan loader, which is trusted.
        let entry = unsafe { Entry::load() }.map_err(|e| {
            GpuError::Unusable(format!(
                "no Vulkan loader (libvulkan.so.1): {e}; install the package libvulkan1 (`make setup` does)"
            ))
        })?;
        Instance::of(entry, validation)
    }

    /// An instance of the loader or driver `entry`.
    pub fn of(entry: Entry, validation: bool) -> Result<Instance, GpuError> {
        let app = vk::ApplicationInfo::default()
            .application_name(c"unicorn")
            .engine_name(c"unicorn-execution-engine")
            .api_version(vk::API_VERSION_1_3);

        let mut layer_version = u32::MAX;
        let mut layers = Vec::new();
        let mut extensions = Vec::new();
        if validation {
            // SAFETY: the entry is loaded.
            let available = unsafe { entry.enumerate_instance_layer_properties() }
                .map_err(GpuError::of("vkEnumerateInstanceLayerProperties"))?;
            let layer = available.iter().find(|l| l.layer_name_as_c_str() == Ok(VALIDATION_LAYER));
            let missing = "validation was requested, but the layer VK_LAYER_KHRONOS_validation is not installed; install the \
                           package vulkan-validationlayers (`make setup-test` does)";
            layer_version = layer.ok_or_else(|| GpuError::Unusable(missing.into()))?.spec_version;
            layers.push(VALIDATION_LAYER.as_ptr());
            extensions.push(ext::debug_utils::NAME.as_ptr());
        }

        let log = Arc::new(ValidationLog::default());
        let mut messenger_info = messenger_info(&log);
        let mut info = vk::InstanceCreateInfo::default()
            .application_info(&app)
            .enabled_layer_names(&layers)
            .enabled_extension_names(&extensions);
        if validation {
            info = info.push_next(&mut messenger_info);
        }
        // SAFETY: `info` and what it points to live across the call; the log outlives the instance (a field).
        let raw = unsafe { entry.create_instance(&info, None) }.map_err(GpuError::of("vkCreateInstance"))?;

        let mut instance = Instance {
            raw,
            debug: None,
            messenger: vk::DebugUtilsMessengerEXT::null(),
            log: log.clone(),
            layer_version,
            entry,
        };
        if validation {
            let debug = ext::debug_utils::Instance::new(&instance.entry, &instance.raw);
            // SAFETY: the extension is enabled; `instance.log` keeps the log, which is the user data, alive.
            instance.messenger =
                unsafe { debug.create_debug_utils_messenger(&self::messenger_info(&log), None) }
                    .map_err(GpuError::of("vkCreateDebugUtilsMessengerEXT"))?;
            instance.debug = Some(debug);
        }
        Ok(instance)
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // SAFETY: the owner of this instance has destroyed its logical device before.
        unsafe {
            if let Some(debug) = &self.debug {
                debug.destroy_debug_utils_messenger(self.messenger, None);
            }
            self.raw.destroy_instance(None);
        }
    }
}

fn messenger_info(log: &Arc<ValidationLog>) -> vk::DebugUtilsMessengerCreateInfoEXT<'static> {
    vk::DebugUtilsMessengerCreateInfoEXT::default()
        .message_severity(
            vk::DebugUtilsMessageSeverityFlagsEXT::WARNING | vk::DebugUtilsMessageSeverityFlagsEXT::ERROR,
        )
        .message_type(vk::DebugUtilsMessageTypeFlagsEXT::VALIDATION)
        .pfn_user_callback(Some(on_message))
        .user_data(Arc::as_ptr(log) as *mut c_void)
}

unsafe extern "system" fn on_message(
    _severity: vk::DebugUtilsMessageSeverityFlagsEXT,
    _types: vk::DebugUtilsMessageTypeFlagsEXT,
    data: *const vk::DebugUtilsMessengerCallbackDataEXT<'_>,
    user: *mut c_void,
) -> vk::Bool32 {
    // SAFETY: Vulkan passes valid callback data; `user` is the log that the instance keeps alive.
    let (message, log) = unsafe { ((*data).message_as_c_str(), &*(user as *const ValidationLog)) };
    let message = message.map_or("(no text)".into(), |m| m.to_string_lossy().into_owned());
    tracing::error!(target: "vulkan", "{message}");
    log.0.lock().unwrap().push(message);
    vk::FALSE
}
