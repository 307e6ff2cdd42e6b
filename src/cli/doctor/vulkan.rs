//! Checks of Vulkan: loader, driver manifests, version of Mesa, the device and its heaps.

use serde_json::Value;

use super::finding::Finding;
use super::machine::{Machine, Package, version};
use crate::cli::devices::{Listed, Loader, read_at};
use crate::cli::load::Room;
use crate::cli::terminal::bytes;
use crate::config::Config;

/// The oldest major version of Mesa that this project is tested with.
pub const MIN_MESA: u32 = 24;
/// Folders of driver manifests, in the order in which the loader reads them.
const MANIFESTS: [&str; 3] = ["usr/local/share/vulkan/icd.d", "etc/vulkan/icd.d", "usr/share/vulkan/icd.d"];
/// The library of Mesa's driver for AMD GPUs.
const RADV: &str = "libvulkan_radeon.so";

/// The manifest (ICD file) of a driver.
struct Manifest {
    path: String,
    library: String,
}

/// Whether a driver's library can be loaded.
enum Library {
    Usable,
    Missing,
    Is32Bit,
}

/// All checks of Vulkan. `amd`: whether the machine has an AMD GPU.
pub fn check(machine: &Machine, loader: &Loader, config: &Config, amd: bool) -> Vec<Finding> {
    let mut findings =
        vec![loader_library(machine, loader), drivers(machine, amd), device(machine, loader, config)];
    if let Ok(device) = loader.chosen(config) {
        findings.push(mesa(machine, device));
        findings.push(heaps(device));
        findings.extend(ffn_heap(&device.room(config)));
    }
    findings
}

fn loader_library(machine: &Machine, loader: &Loader) -> Finding {
    const CODE: &str = "loader";
    match (machine.libraries("libvulkan.so.1").first(), loader) {
        (Some(path), _) => Finding::ok(CODE, format!("Vulkan loader /{path}")).read_from(path),
        (None, Loader::Devices(_)) => Finding::ok(CODE, "the Vulkan loader works; its file was not found"),
        (None, Loader::Error(error)) => {
            let finding = Finding::problem("no-loader", error.as_str())
                .cause("Vulkan programs find their driver through libvulkan.so.1, which is not installed");
            machine.install(finding, Package::VulkanLoader)
        }
    }
}

fn manifests(machine: &Machine) -> Vec<Manifest> {
    let in_folder = |folder: &&str| {
        let names = machine.names(folder, "").into_iter().filter(|name| name.ends_with(".json"));
        let paths = names.map(|name| format!("{folder}/{name}"));
        let read = paths.filter_map(|path| {
            let json: Value = serde_json::from_str(&machine.read(&path).ok()?).ok()?;
            let library = json["ICD"]["library_path"].as_str()?.to_owned();
            Some(Manifest { path, library })
        });
        read.collect::<Vec<_>>()
    };
    MANIFESTS.iter().flat_map(in_folder).collect()
}

/// Checks the library that a manifest names: by an absolute path, by a path relative to the manifest, or by a name for
/// the dynamic linker.
fn library(machine: &Machine, manifest: &Manifest) -> Library {
    let path = match &manifest.library {
        path if path.starts_with('/') => Some(path.trim_start_matches('/').to_owned()),
        path if path.contains('/') => {
            manifest.path.rsplit_once('/').map(|(folder, _)| format!("{folder}/{path}"))
        }
        name => machine.libraries(name).into_iter().find(|path| path.ends_with(name.as_str())),
    };
    // The fifth byte of an ELF file is 1 for 32 bits, and 2 for 64 bits.
    match path.and_then(|path| machine.head::<5>(&path).ok()) {
        None => Library::Missing,
        Some([0x7f, b'E', b'L', b'F', 1]) => Library::Is32Bit,
        Some(_) => Library::Usable,
    }
}

/// Checks that the driver of the AMD GPU is installed, or any driver if there is no AMD GPU.
fn drivers(machine: &Machine, amd: bool) -> Finding {
    const CODE: &str = "vulkan-driver";
    let all = manifests(machine);
    let names = |all: &[Manifest]| all.iter().map(|m| m.library.clone()).collect::<Vec<_>>().join(", ");
    let install = |finding: Finding| machine.install(finding, Package::Radv);
    if all.is_empty() {
        let finding = Finding::problem("no-vulkan-driver", "no Vulkan driver is installed")
            .cause(format!("/{} and /{} have no driver manifest", MANIFESTS[1], MANIFESTS[2]))
            .read_from(MANIFESTS[1])
            .read_from(MANIFESTS[2]);
        return install(finding);
    }
    if !amd {
        return Finding::ok(CODE, format!("drivers: {}", names(&all)));
    }
    let radv: Vec<&Manifest> = all.iter().filter(|manifest| manifest.library.ends_with(RADV)).collect();
    let Some(first) = radv.first() else {
        let finding = Finding::problem("no-radv", "Mesa's driver for AMD GPUs (RADV) is not installed")
            .cause(format!("the driver manifests name only {}", names(&all)))
            .read_from(&all[0].path);
        return install(finding);
    };
    let libraries: Vec<Library> = radv.iter().map(|manifest| library(machine, manifest)).collect();
    if libraries.iter().any(|library| matches!(library, Library::Usable)) {
        return Finding::ok(CODE, format!("RADV, from /{}", first.path)).read_from(&first.path);
    }
    let finding = if libraries.iter().any(|library| matches!(library, Library::Is32Bit)) {
        Finding::problem("radv-32-bit", "RADV is installed only for 32-bit programs")
            .cause(format!("{} is a 32-bit library, which a 64-bit program cannot load", first.library))
    } else {
        Finding::problem("radv-library", format!("/{} names a library that does not exist", first.path))
            .cause(format!("{} is not in a folder of the dynamic linker", first.library))
    };
    install(finding.read_from(&first.path))
}

fn device(machine: &Machine, loader: &Loader, config: &Config) -> Finding {
    let reason = match loader.chosen(config) {
        Ok(device) => {
            let (major, minor) = device.vulkan;
            let found =
                format!("{} ({}), {}, Vulkan {major}.{minor}", device.name, device.kind, device.driver);
            return match device.is_software() {
                false => Finding::ok("device", found),
                true => Finding::warning("software-device", found)
                    .cause("hardware.allow_software_vulkan allows a device on the CPU, which is slow")
                    .option("omit --allow-software-vulkan to accept only a GPU"),
            };
        }
        Err(reason) => reason,
    };
    let devices = loader.devices();
    let lacking: Vec<&Listed> = devices.iter().filter(|device| !device.missing.is_empty()).collect();
    if let Some(device) = lacking.iter().find(|device| !device.is_software()) {
        let found = format!("{} ({}) lacks {}", device.name, device.driver, device.missing.join(", "));
        let finding = Finding::problem("device-lacks", found);
        return match mesa_version(&device.driver) {
            Some(mesa) if mesa < MIN_MESA => {
                machine.install(finding.cause(format!("Mesa {mesa} is too old")), Package::NewerRadv)
            }
            _ => finding
                .cause("the GPU or its driver does not support it")
                .act("update the driver, or use another GPU"),
        };
    }
    let finding = if devices.is_empty() {
        Finding::problem("no-device", "the Vulkan loader lists no device")
            .cause("no driver found a GPU that it can open; see the other findings")
    } else if devices.iter().all(Listed::is_software) {
        let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
        Finding::problem("software-only", format!("the only Vulkan device is software: {}", names.join(", ")))
            .cause("no driver found a GPU that it can open; see the other findings")
    } else {
        Finding::problem("device-not-chosen", reason).cause("hardware.device does not name a usable device")
    };
    finding.option("--allow-software-vulkan to compute on the CPU, which is slow")
}

/// The major version of Mesa in a driver's description; `None` for other drivers.
fn mesa_version(driver: &str) -> Option<u32> {
    Some(version(driver.split_once("Mesa ")?.1)?.0)
}

fn mesa(machine: &Machine, device: &Listed) -> Finding {
    match mesa_version(&device.driver) {
        None => Finding::ok("mesa", format!("the driver is not from Mesa: {}", device.driver)),
        Some(mesa) if mesa >= MIN_MESA => Finding::ok("mesa", device.driver.clone()),
        Some(_) => {
            let finding = Finding::warning("mesa-old", device.driver.clone())
                .cause(format!("this program is tested with Mesa {MIN_MESA} and later"));
            machine.install(finding, Package::NewerRadv)
        }
    }
}

fn heaps(device: &Listed) -> Finding {
    let name = |local| if local { "device-local" } else { "host" };
    let each = device
        .heaps
        .iter()
        .map(|heap| format!("{} {}{}", bytes(heap.size_bytes), name(heap.device_local), read_at(heap)));
    let total: u64 = device.heaps.iter().map(|heap| heap.size_bytes).fold(0, u64::saturating_add);
    let split = device.is_integrated() && device.driver.starts_with("radv") && device.heaps.len() > 1;
    let why = if split {
        "; RADV splits an APU's memory into heaps of two thirds and one third, and unicorn uses both"
    } else {
        ""
    };
    let read = match device.heaps.iter().filter_map(|heap| heap.read).map(|read| read.measured_at).max() {
        Some(measured_at) => {
            let date = jiff::Timestamp::from_second(measured_at as i64).unwrap_or_default();
            format!("; the reading speed was measured at {date}")
        }
        None if device.is_software() => String::new(),
        None => "; how fast they are read was not measured (the first load or --heaps does)".into(),
    };
    let largest = bytes(device.max_allocation_bytes);
    Finding::ok(
        "heaps",
        format!(
            "{}; {} in total, at most {largest} per allocation{why}{read}",
            each.collect::<Vec<_>>().join(" and "),
            bytes(total)
        ),
    )
}

/// Checks that the configuration does not place FFN weights in the slower memory.
fn ffn_heap(room: &Room) -> Option<Finding> {
    let finding = Finding::warning("ffn-heap-slow", room.slow_ffn_heap(room.ffn_choice().is_vram_first)?)
        .cause("memory.ffn_heap names the slower memory, and decoding reads FFN weights for every token")
        .option("memory.ffn_heap = \"auto\"");
    Some(finding)
}
