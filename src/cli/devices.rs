//! `unicorn devices`: lists the devices that the Vulkan loader finds, with their memory and the features that each
//! lacks.

use std::fmt::Write as _;

use super::error::Error;
use super::terminal::{bytes, print};
use crate::gpu::{self, DeviceInfo, DeviceKind, Need};

pub fn devices() -> Result<(), Error> {
    let devices = gpu::list_devices()?;
    if devices.is_empty() {
        return print(&format!("no Vulkan device was found: {}\n", gpu::NO_DRIVER_HINT));
    }
    print(&devices.iter().map(describe).collect::<String>())
}

/// A line for each Vulkan device: its name and its driver.
pub fn drivers() -> Vec<String> {
    match gpu::list_devices() {
        Ok(devices) if devices.is_empty() => vec!["no Vulkan device was found".into()],
        Ok(devices) => devices.iter().map(|device| format!("{}, {}", device.name, device.driver)).collect(),
        Err(error) => vec![error.to_string()],
    }
}

fn describe(device: &DeviceInfo) -> String {
    let caps = &device.caps;
    let (major, minor) = caps.api_version;
    let mut text = format!("{}: {}\n", device.index, device.name);
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "   {name:<12} {value}");
    };
    line("kind", device.kind.to_string());
    line("driver", format!("{}, Vulkan {major}.{minor}", device.driver));
    for (i, heap) in device.heaps.iter().enumerate() {
        let local = if heap.device_local { "device-local" } else { "host" };
        line(
            &format!("heap {i}"),
            format!("{} {local}, {} free", bytes(heap.size_bytes), bytes(heap.free_bytes)),
        );
    }
    line("allocation", format!("at most {}", bytes(device.max_allocation_bytes)));
    line("buffer", format!("at most {} at once in a shader", bytes(device.max_storage_buffer_bytes)));
    let (least, most) = caps.subgroup_sizes;
    let sizes = if least == most { String::new() } else { format!("; {least} to {most} may be asked for") };
    line("subgroup", format!("{} invocations{sizes}", caps.subgroup_size));
    let how = match (caps.has(Need::IntegerDotProduct), caps.integer_dot_accelerated) {
        (true, true) => "accelerated",
        (true, false) => "as several instructions",
        (false, _) => "none",
    };
    line("int8 dots", how.to_string());
    if caps.cooperative_matrices.is_empty() {
        line("matrices", "no VK_KHR_cooperative_matrix".to_string());
    }
    for shape in &caps.cooperative_matrices {
        line("matrices", shape.to_string());
    }
    let usable = if !device.missing.is_empty() {
        format!("no: it lacks {}", device.missing.join(", "))
    } else if device.kind == DeviceKind::Cpu {
        "with --allow-software-vulkan: it is software on the CPU, and slow".into()
    } else {
        "yes".into()
    };
    line("usable", usable);
    text
}
