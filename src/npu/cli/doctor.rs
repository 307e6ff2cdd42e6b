//! Checks of the NPU: the PCI bus, kernel and driver, the device node, the IOMMU, locked memory, XRT's libraries, and
//! the driver's messages in the kernel log. If `npu.mode` is not off, also the shim and the kernels.
//!
//! A server can run without the NPU, so no finding here is a problem. A part that was never set up is a note. A part
//! that was set up and cannot work is a warning. With `npu.mode = "require"` they are problems, because the server then
//! refuses to start.

#[cfg(feature = "npu")]
use super::start;
use crate::cli::doctor::finding::{Finding, Severity};
use crate::cli::doctor::gpu::explain_node_error;
use crate::cli::doctor::machine::{Machine, Package, Pci, version};
use crate::cli::terminal::bytes;
use crate::config::{Config, NpuMode};

const AMD: u64 = 0x1022;
const XDNA1: u64 = 0x1502;
const XDNA2: u64 = 0x17f0;
/// The first Linux version with amdxdna.
const FIRST_KERNEL: (u32, u32) = (6, 14);
/// The size of the heap that XRT locks when it opens the device.
const HEAP_BYTES: u64 = 64 << 20;
/// XRT 2.13, which Debian 12 and 13 have, has no `hw_context`.
const FIRST_XRT: (u32, u32) = (2, 14);
const CORE: &str = "libxrt_coreutil.so.2.";
const DRIVER: &str = "libxrt_driver_xdna.so.2.";

/// Errors of amdxdna in the kernel log: a part of the line, and the code, cause and remedy of the finding.
const SYMPTOMS: [(&str, &str, &str, &str); 5] = [
    (
        "SVA bind device failed",
        "npu-sva",
        "the IOMMU does not share page tables with the NPU",
        "enable IOMMU (SVM) in the firmware, and remove the kernel parameter amd_iommu=off",
    ),
    (
        "Enable PASID failed",
        "npu-sva",
        "the IOMMU does not share page tables with the NPU",
        "enable IOMMU (SVM) in the firmware, and remove the kernel parameter amd_iommu=off",
    ),
    (
        "Incompatible firmware protocol",
        "npu-firmware",
        "the kernel driver and the NPU's firmware have incompatible versions",
        "update kernel and linux-firmware together, and restart",
    ),
    (
        "firmware is not alive",
        "npu-firmware",
        "the NPU's firmware is wrong or outdated",
        "update linux-firmware, and power the machine off and on",
    ),
    (
        "smu cmd",
        "npu-smu",
        "the power controller did not answer the driver",
        "power the machine off and on; if the error returns, use a newer kernel",
    ),
];

pub fn check(machine: &Machine, config: &Config, log: &std::io::Result<Vec<String>>) -> Vec<Finding> {
    let mut findings = found(machine, config, log);
    if config.npu.mode == NpuMode::Require {
        let prevents_start = |finding: &&mut Finding| {
            finding.severity > Severity::Ok && !finding.code.ends_with("-unread") || finding.code == "no-npu"
        };
        findings.iter_mut().filter(prevents_start).for_each(|finding| finding.severity = Severity::Problem);
    }
    findings
}

fn found(machine: &Machine, config: &Config, log: &std::io::Result<Vec<String>>) -> Vec<Finding> {
    const FOLDER: &str = "sys/bus/pci/devices";
    let is_npu = |pci: &Pci| pci.vendor == AMD && matches!(pci.device, XDNA1 | XDNA2);
    let Some(npu) = machine.pci().into_iter().find(is_npu) else {
        let ryzen_ai = machine.read("proc/cpuinfo").unwrap_or_default();
        let has_one = ["7840", "7940", "8840", "8845", "8940", "8945", "Ryzen AI"];
        let is_wanted = config.npu.mode == NpuMode::Require;
        return vec![match has_one.iter().any(|model| ryzen_ai.contains(model)) {
            true => Finding::note("no-npu", "the processor has an NPU, but it is not on the PCI bus")
                .cause("the NPU is disabled in the firmware")
                .firmware("IPU (also NPU, AI engine): enabled")
                .read_from(FOLDER),
            false if is_wanted => Finding::note("no-npu", "there is no NPU, but npu.mode requires one")
                .cause("there is no NPU on the PCI bus, and the processor's name does not indicate one")
                .act("set npu.mode to auto or off")
                .read_from(FOLDER),
            false => Finding::ok("npu", "there is no NPU"),
        }];
    };
    let found = format!("NPU 1022:{:04x} at {}", npu.device, npu.address);
    let mut findings = vec![match npu.device {
        XDNA2 => Finding::note("xdna2", format!("{found} is an NPU of the second generation (XDNA2)"))
            .cause("programs for XDNA1, the NPU of Phoenix and Hawk Point, do not run on it")
            .read_from(&npu.folder),
        _ => Finding::ok("npu", format!("{found}, XDNA1")).read_from(&npu.folder),
    }];
    findings.push(node(machine, &npu));
    findings.push(iommu(machine));
    findings.push(locked_memory(machine));
    findings.push(libraries(machine));
    #[cfg(feature = "npu")]
    if config.npu.mode != NpuMode::Off {
        findings.extend([shim(machine, config), kernels(machine, config)]);
    }
    findings.extend(log.iter().flat_map(|log| symptoms(log)));
    findings
}

fn node(machine: &Machine, npu: &Pci) -> Finding {
    const NODE: &str = "dev/accel/accel0";
    if machine.exists(NODE) {
        return match machine.may_open(NODE) {
            Ok(()) => Finding::ok("npu-node", format!("/{NODE} can be opened")),
            Err(node_error) => explain_node_error(
                Finding::warning("npu-group", format!("/{NODE} cannot be opened: {}", node_error.error)),
                &node_error,
            )
            .read_from("proc/self/status")
            .read_from("etc/group"),
        };
    }
    let found = format!("there is no /{NODE}");
    match machine.kernel_version() {
        Some((major, minor)) if (major, minor) < FIRST_KERNEL && npu.driver.is_none() => {
            Finding::note("npu-kernel-old", found)
                .cause(format!(
                    "Linux {major}.{minor} has no driver for the NPU; Linux 6.14 and later have amdxdna"
                ))
                .act("use Linux 6.14 or later, or AMD's driver package")
                .read_from("proc/sys/kernel/osrelease")
        }
        _ => {
            let cause = match npu.driver.as_deref() {
                Some(driver) => format!("the NPU is bound to {driver}, which did not create the node"),
                None => {
                    "no driver is bound to the NPU: amdxdna is not loaded, or could not start the NPU".into()
                }
            };
            Finding::warning("npu-no-node", found)
                .cause(cause)
                .command("sudo modprobe amdxdna")
                .command("sudo dmesg | grep amdxdna")
                .read_from(&npu.folder)
        }
    }
}

fn iommu(machine: &Machine) -> Finding {
    const GROUPS: &str = "sys/kernel/iommu_groups";
    if !machine.names(GROUPS, "").is_empty() {
        return Finding::ok("iommu", "the IOMMU is on").read_from(GROUPS);
    }
    let finding = Finding::warning("iommu-off", "the IOMMU is off").read_from(GROUPS);
    let cause = "amdxdna can access memory only through the IOMMU";
    match machine.kernel_parameters().into_iter().find(|p| p == "amd_iommu=off" || p == "iommu=off") {
        Some(parameter) => {
            let finding =
                finding.cause(format!("kernel parameter `{parameter}`; {cause}")).read_from("proc/cmdline");
            machine.remove_parameter(finding, parameter)
        }
        None => finding.cause(format!("it is disabled in the firmware; {cause}")).firmware("IOMMU: enabled"),
    }
}

fn locked_memory(machine: &Machine) -> Finding {
    const LIMITS: &str = "proc/self/limits";
    let text = match machine.read(LIMITS) {
        Ok(text) => text,
        Err(error) => return Finding::unread("memlock", LIMITS, &error),
    };
    let line = text.lines().find_map(|line| line.strip_prefix("Max locked memory"));
    let soft = line.and_then(|line| line.split_whitespace().next());
    match (soft, soft.and_then(|soft| soft.parse::<u64>().ok())) {
        (Some("unlimited"), _) => Finding::ok("memlock", "memory may be locked without limit").read_from(LIMITS),
        (_, Some(limit)) if limit >= 4 * HEAP_BYTES => {
            Finding::ok("memlock", format!("{} may be locked", bytes(limit))).read_from(LIMITS)
        }
        (_, Some(limit)) => Finding::warning("memlock-low", format!("{} may be locked", bytes(limit)))
            .cause(
                "XRT locks 64 MiB when it opens the NPU, and every buffer; above the limit, mmap fails with EAGAIN",
            )
            .command("echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/memlock.conf")
            .act("log out and in again; for a systemd service: LimitMEMLOCK=infinity")
            .read_from(LIMITS),
        (_, None) => Finding::note("memlock-unread", "unknown: the limit of locked memory").read_from(LIMITS),
    }
}

/// Checks XRT and its plugin for the NPU. The versions are the ends of the file names.
fn libraries(machine: &Machine) -> Finding {
    let newest = |prefix: &str| {
        let found = machine.libraries(prefix).into_iter().filter_map(|path| {
            let version = version(path.rsplit_once(".so.")?.1)?;
            Some((version, path))
        });
        found.max()
    };
    let shown = |(major, minor): (u32, u32)| format!("{major}.{minor}");
    match (newest(CORE), newest(DRIVER)) {
        (None, _) => {
            let finding = Finding::note("xrt-missing", "XRT is not installed")
                .cause("programs reach the NPU through libxrt_coreutil.so.2");
            machine.install(finding, Package::Xrt)
        }
        (Some((core, path)), _) if core < FIRST_XRT => {
            let finding = Finding::warning("xrt-old", format!("XRT is {}", shown(core)))
                .cause("it has no hw_context, which every program for this NPU needs")
                .read_from(&path);
            machine.install(finding, Package::Xrt)
        }
        (Some((core, path)), None) => {
            let finding = Finding::warning(
                "xrt-driver-missing",
                format!("XRT {} has no libxrt_driver_xdna", shown(core)),
            )
            .cause("without this plugin, XRT finds no NPU (`0 devices found`)")
            .read_from(&path);
            machine.install(finding, Package::Xrt)
        }
        (Some((core, path)), Some((driver, plugin))) if core != driver => {
            let found = format!("XRT is {}, but its plugin for the NPU is {}", shown(core), shown(driver));
            let finding = Finding::warning("xrt-skew", found)
                .cause(
                    "both must have the same version; otherwise XRT finds no NPU, or symbols are undefined",
                )
                .read_from(&path)
                .read_from(&plugin);
            machine.install(finding, Package::Xrt)
        }
        (Some((core, path)), Some(_)) => {
            Finding::ok("xrt", format!("XRT {} with its plugin for the NPU", shown(core))).read_from(&path)
        }
    }
}

/// The library that calls XRT.
#[cfg(feature = "npu")]
fn shim(machine: &Machine, config: &Config) -> Finding {
    let path = start::shim(config);
    let shown = path.display();
    if machine.exists(&below_root(&path)) {
        return Finding::ok("npu-shim", format!("{shown} is installed"));
    }
    Finding::warning("npu-shim-missing", format!("there is no {shown}"))
        .cause("XRT has only a C++ interface, and unicorn calls it through this library")
        .command("make npu-shim install")
        .act("run this in the repository, with the libxrt-dev of the installed XRT; or set npu.shim")
}

/// Counts the compiled kernels. `unicorn npu list` checks them, and shows their models.
#[cfg(feature = "npu")]
fn kernels(machine: &Machine, config: &Config) -> Finding {
    let Some(folder) = start::kernels_folder(config) else {
        return Finding::warning("npu-kernel-missing", "there is no folder for the NPU's kernels")
            .cause("neither HOME nor UNICORN_CACHE_DIR is set")
            .act("set npu.kernels");
    };
    let names = machine.names(&below_root(&folder), "attention-");
    let count = names.iter().filter(|name| name.ends_with(".xclbin")).count();
    let shown = folder.display();
    match count {
        0 => {
            let finding = Finding::warning("npu-kernel-missing", format!("{shown} has no kernels"))
                .cause("the kernels must be compiled on the machine that runs them");
            match &config.model.path {
                Some(model) => finding.command(format!("unicorn npu build-kernels --model {model}")),
                None => finding.act("run `unicorn npu build-kernels --model` with the model's path or name"),
            }
        }
        count => Finding::ok("npu-kernels", format!("{shown} has {count} kernels")),
    }
}

/// A path of the configuration, relative to the root of the machine.
#[cfg(feature = "npu")]
fn below_root(path: &std::path::Path) -> String {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    path.to_string_lossy().trim_start_matches('/').to_owned()
}

/// Findings about the amdxdna errors in the kernel log, with the last line of each. "smu still busy" alone is a debug
/// message, not a finding.
fn symptoms(log: &[String]) -> Vec<Finding> {
    let mut findings: Vec<Finding> = Vec::new();
    for (part, code, cause, act) in SYMPTOMS {
        let hit = log.iter().rev().find(|line| {
            line.contains("amdxdna") && line.contains(part) && (part != "smu cmd" || line.contains("failed"))
        });
        if let Some(line) = hit
            && !findings.iter().any(|finding| finding.code == code)
        {
            findings.push(Finding::warning(code, line.as_str()).cause(cause).act(act).read_from("dev/kmsg"));
        }
    }
    findings
}
