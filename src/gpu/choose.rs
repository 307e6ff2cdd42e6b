//! Chooses a device by policy, or explains why each device is refused.

use std::time::Duration;

use super::GpuError;
use super::enumerate::list_devices;
use super::info::{DeviceInfo, DeviceKind, QueueKind};

/// The policy by which a device is chosen.
#[derive(Debug, Clone, Default)]
pub struct DevicePolicy {
    /// An index from `unicorn devices`, or a part of the device's name (case is ignored). `None`: the best GPU.
    pub device: Option<String>,
    /// Whether a device of type CPU (software Vulkan) is accepted. If false, it is refused even if `device` names it.
    pub allow_software: bool,
    /// Whether the validation layer is loaded. The next wait fails if the layer has reported a message.
    pub validation: bool,
    /// Whether every dispatch is timed with timestamp queries.
    pub profile: bool,
    /// The kind of queue to use. `None`: a compute queue without graphics if the device has one, because the desktop
    /// does not use that queue.
    pub queue: Option<QueueKind>,
    /// The device counts as hung if it finishes no submit for this time during a wait. `None`: 10 s for a GPU, and
    /// 120 s for software Vulkan, which compiles a shader when it first runs it.
    pub hang_timeout: Option<Duration>,
}

/// Advice for users whose Vulkan loader lists no device.
pub const NO_DRIVER_HINT: &str = "is a driver installed (mesa-vulkan-drivers), and may this user open \
                                  /dev/dri/renderD* (group render)? `unicorn doctor` checks both";

/// The device that [`Device::open`](super::Device::open) would open. This function does not open it.
pub fn chosen_device(policy: &DevicePolicy) -> Result<DeviceInfo, GpuError> {
    let mut seen = list_devices()?;
    let index = choose(policy, &seen)?;
    Ok(seen.swap_remove(index))
}

/// The index of the device to open. The error lists all devices and the reason why each is refused.
pub fn choose(policy: &DevicePolicy, seen: &[DeviceInfo]) -> Result<usize, GpuError> {
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
        [] => format!("the Vulkan loader lists no device; {NO_DRIVER_HINT}"),
        seen => format!("found: {}", seen.iter().map(describe).collect::<Vec<_>>().join("; ")),
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
        [] => Err(GpuError::NoDevice(format!("--device {wanted:?} matches no device; {}", all()))),
        [d] => match refusal(d) {
            None => Ok(d.index),
            Some(_) => Err(GpuError::NoDevice(describe(d))),
        },
        several => Err(GpuError::NoDevice(format!(
            "--device {wanted:?} matches several devices, use an index instead: {}",
            several.iter().map(|d| describe(d)).collect::<Vec<_>>().join("; ")
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{Caps, HeapInfo};

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
                read: None,
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
    fn discrete_gpus_come_before_integrated_gpus_and_software() {
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
    fn refusals_name_the_devices_and_the_missing_features() {
        let mut old = device(0, "Old GPU", DeviceKind::Discrete, 4);
        old.missing.push("Vulkan 1.3".into());
        let error = choose(&policy(None, true), &[old.clone()]).unwrap_err().to_string();
        assert!(error.contains("[0] Old GPU (discrete GPU): lacks Vulkan 1.3"), "{error}");
        let error = choose(&policy(Some("radeon"), false), &[old.clone()]).unwrap_err().to_string();
        assert!(error.contains("\"radeon\" matches no device; found: [0] Old GPU"), "{error}");
        let error = choose(&policy(None, false), &[]).unwrap_err().to_string();
        assert!(error.contains("the Vulkan loader lists no device"), "{error}");
        let twin = device(1, "Old GPU 2", DeviceKind::Discrete, 4);
        let error = choose(&policy(Some("old"), false), &[old, twin]).unwrap_err().to_string();
        assert!(error.contains("matches several devices"), "{error}");
    }
}
