//! `unicorn devices`: lists the devices that the Vulkan loader finds, with their memory and the features that each
//! lacks. The doctor on another machine can read the output of `--json`.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::error::Error;
use super::load::{self, Room};
use super::terminal::{bytes, print};
use crate::config::Config;
use crate::gpu::placement::Machine;
use crate::gpu::{self, Caps, DeviceInfo, DeviceKind, GpuError, HeapInfo, Need};

/// The devices of the Vulkan loader, or its error.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Loader {
    Devices(Vec<Listed>),
    Error(String),
}

/// The facts about a Vulkan device that choosing it and planning for it need.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Listed {
    pub name: String,
    pub kind: DeviceKind,
    /// Driver name and version, e.g. `radv Mesa 25.0.7`.
    pub driver: String,
    pub vulkan: (u32, u32),
    pub heaps: Vec<HeapInfo>,
    pub max_allocation_bytes: u64,
    /// The required features that the device lacks.
    pub missing: Vec<String>,
}

impl Listed {
    fn of(device: DeviceInfo) -> Listed {
        Listed {
            name: device.name,
            kind: device.kind,
            driver: device.driver,
            vulkan: device.caps.api_version,
            heaps: device.heaps,
            max_allocation_bytes: device.max_allocation_bytes,
            missing: device.missing,
        }
    }

    /// A [`DeviceInfo`] for choosing and planning; its other fields are empty.
    fn info(&self, index: usize) -> DeviceInfo {
        DeviceInfo {
            index,
            name: self.name.clone(),
            kind: self.kind,
            driver: self.driver.clone(),
            vendor_id: 0,
            queues: Vec::new(),
            heaps: self.heaps.clone(),
            caps: Caps::default(),
            max_allocation_bytes: self.max_allocation_bytes,
            max_storage_buffer_bytes: 0,
            pci: None,
            missing: self.missing.clone(),
        }
    }

    pub fn is_software(&self) -> bool {
        self.kind == DeviceKind::Cpu
    }

    pub fn is_integrated(&self) -> bool {
        self.kind == DeviceKind::Integrated
    }

    /// The memory that a load would plan for.
    pub fn room(&self, config: &Config) -> Room {
        let machine = Machine::of(&self.heaps, self.kind, self.max_allocation_bytes);
        Room { machine, limits: load::limits(&config.memory), is_software: self.is_software() }
    }
}

impl Loader {
    pub fn ask() -> Loader {
        match gpu::list_devices() {
            Ok(devices) => Loader::Devices(devices.into_iter().map(Listed::of).collect()),
            Err(error) => Loader::Error(error.to_string()),
        }
    }

    pub fn devices(&self) -> &[Listed] {
        match self {
            Loader::Devices(devices) => devices,
            Loader::Error(_) => &[],
        }
    }

    /// The device that a load would open, or why there is none.
    pub fn chosen(&self, config: &Config) -> Result<&Listed, String> {
        if let Loader::Error(error) = self {
            return Err(error.clone());
        }
        let listed = self.devices();
        let seen: Vec<DeviceInfo> =
            listed.iter().enumerate().map(|(index, device)| device.info(index)).collect();
        let chosen = gpu::choose(&load::policy(config, false), &seen);
        chosen.map(|index| &listed[index]).map_err(|error: GpuError| error.to_string())
    }
}

pub fn devices(json: bool) -> Result<(), Error> {
    let devices = gpu::list_devices()?;
    if json {
        let loader = Loader::Devices(devices.into_iter().map(Listed::of).collect());
        let json = serde_json::to_string_pretty(&loader).expect("strings and numbers");
        return print(&format!("{json}\n"));
    }
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

/// How fast a heap was read, as the end of a line; empty if this was not measured.
pub fn read_at(heap: &HeapInfo) -> String {
    heap.read.map_or(String::new(), |read| format!(", read at {:.1} GB/s", read.gb_per_s()))
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
            format!("{} {local}, {} free{}", bytes(heap.size_bytes), bytes(heap.free_bytes), read_at(heap)),
        );
    }
    line("allocation", format!("at most {}", bytes(device.max_allocation_bytes)));
    line("buffer", format!("at most {} per storage buffer binding", bytes(device.max_storage_buffer_bytes)));
    let (least, most) = caps.subgroup_sizes;
    let sizes = if least == most { String::new() } else { format!("; {least} to {most} on request") };
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
