//! Checks of the NPU: the PCI bus, kernel and driver, the device node, the IOMMU, locked memory, XRT's libraries, and
//! what the driver said in the kernel's log. Where `npu.mode` wants the NPU, the shim and the kernels are looked for too.
//!
//! A server computes without the NPU, so no finding here is a problem: what was never set up is a note, and what was set
//! up and cannot work is a warning. `npu.mode = "require"` makes each of them a problem, since the start is refused then.

use super::finding::{Finding, Severity};
use super::gpu::denied;
use super::machine::{Machine, Package, Pci, version};
#[cfg(feature = "npu")]
use crate::cli::offload;
use crate::cli::terminal::bytes;
use crate::config::{Config, NpuMode};

const AMD: u64 = 0x1022;
const XDNA1: u64 = 0x1502;
const XDNA2: u64 = 0x17f0;
/// The first kernel with amdxdna.
const FIRST_KERNEL: (u32, u32) = (6, 14);
/// XRT locks a heap of so much for the device when it opens it.
const HEAP_BYTES: u64 = 64 << 20;
/// XRT 2.13, which Debian 12 and 13 have, has no `hw_context`.
const FIRST_XRT: (u32, u32) = (2, 14);
const CORE: &str = "libxrt_coreutil.so.2.";
const DRIVER: &str = "libxrt_driver_xdna.so.2.";

/// A line of amdxdna in the kernel's log: a part of it, code, cause, and what to do.
const SYMPTOMS: [(&str, &str, &str, &str); 5] = [
    (
        "SVA bind device failed",
        "npu-sva",
        "the IOMMU does not share page tables with the NPU",
        "enable IOMMU (SVM) in the firmware, and take amd_iommu=off off the kernel's parameters",
    ),
    (
        "Enable PASID failed",
        "npu-sva",
        "the IOMMU does not share page tables with the NPU",
        "enable IOMMU (SVM) in the firmware, and take amd_iommu=off off the kernel's parameters",
    ),
    (
        "Incompatible firmware protocol",
        "npu-firmware",
        "the kernel's driver and the NPU's firmware are of different times",
        "update kernel and linux-firmware together, and restart",
    ),
    (
        "firmware is not alive",
        "npu-firmware",
        "the NPU's firmware is wrong or stale",
        "update linux-firmware, and switch the machine off and on",
    ),
    (
        "smu cmd",
        "npu-smu",
        "the power controller did not answer the driver",
        "switch the machine off and on; if it comes again, take a newer kernel",
    ),
];

pub fn check(machine: &Machine, config: &Config, log: &std::io::Result<Vec<String>>) -> Vec<Finding> {
    let mut findings = found(machine, config, log);
    if config.npu.mode == NpuMode::Require {
        let keeps = |finding: &&mut Finding| {
            finding.severity > Severity::Ok && !finding.code.ends_with("-unread") || finding.code == "no-npu"
        };
        findings.iter_mut().filter(keeps).for_each(|finding| finding.severity = Severity::Problem);
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
            true => Finding::note("no-npu", "the processor has an NPU, and the PCI bus does not")
                .cause("the firmware has it switched off")
                .firmware("IPU (also NPU, AI engine): enabled")
                .read(FOLDER),
            false if is_wanted => Finding::note("no-npu", "there is no NPU, and npu.mode requires one")
                .cause("neither the PCI bus nor the processor's name shows one")
                .act("set npu.mode to auto or off")
                .read(FOLDER),
            false => Finding::ok("npu", "there is no NPU"),
        }];
    };
    let found = format!("NPU 1022:{:04x} at {}", npu.device, npu.address);
    let mut findings = vec![match npu.device {
        XDNA2 => Finding::note("xdna2", format!("{found} is of the second generation (XDNA2)"))
            .cause("programs for XDNA1, the NPU of Phoenix and Hawk Point, do not run on it")
            .read(&npu.folder),
        _ => Finding::ok("npu", format!("{found}, XDNA1")).read(&npu.folder),
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
            Err(closed) => denied(
                Finding::warning("npu-group", format!("/{NODE} cannot be opened: {}", closed.error)),
                &closed,
            )
            .read("proc/self/status")
            .read("etc/group"),
        };
    }
    let found = format!("there is no /{NODE}");
    match machine.kernel_version() {
        Some((major, minor)) if (major, minor) < FIRST_KERNEL && npu.driver.is_none() => {
            Finding::note("npu-kernel-old", found)
                .cause(format!("Linux {major}.{minor} has no driver for it; amdxdna is in 6.14 and later"))
                .act("take a kernel of 6.14 or later, or AMD's driver package")
                .read("proc/sys/kernel/osrelease")
        }
        _ => {
            let cause = match npu.driver.as_deref() {
                Some(driver) => format!("the NPU is bound to {driver}, which made no node"),
                None => "no driver is bound to the NPU: amdxdna is not loaded, or gave it up".into(),
            };
            Finding::warning("npu-no-node", found)
                .cause(cause)
                .command("sudo modprobe amdxdna")
                .command("sudo dmesg | grep amdxdna")
                .read(&npu.folder)
        }
    }
}

fn iommu(machine: &Machine) -> Finding {
    const GROUPS: &str = "sys/kernel/iommu_groups";
    if !machine.names(GROUPS, "").is_empty() {
        return Finding::ok("iommu", "the IOMMU is on").read(GROUPS);
    }
    let finding = Finding::warning("iommu-off", "the IOMMU is off").read(GROUPS);
    let cause = "amdxdna reaches memory through the IOMMU alone";
    match machine.kernel_parameters().into_iter().find(|p| p == "amd_iommu=off" || p == "iommu=off") {
        Some(parameter) => {
            let finding = finding.cause(format!("`{parameter}`; {cause}")).read("proc/cmdline");
            machine.remove_parameter(finding, parameter)
        }
        None => {
            finding.cause(format!("the firmware has it switched off; {cause}")).firmware("IOMMU: enabled")
        }
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
        (Some("unlimited"), _) => Finding::ok("memlock", "memory may be locked without limit").read(LIMITS),
        (_, Some(limit)) if limit >= 4 * HEAP_BYTES => {
            Finding::ok("memlock", format!("{} may be locked", bytes(limit))).read(LIMITS)
        }
        (_, Some(limit)) => Finding::warning("memlock-low", format!("{} may be locked", bytes(limit)))
            .cause(
                "XRT locks 64 MiB when it opens the NPU, and every buffer; beyond the limit mmap says EAGAIN",
            )
            .command("echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/memlock.conf")
            .act("log out and in again; in a unit of systemd: LimitMEMLOCK=infinity")
            .read(LIMITS),
        (_, None) => Finding::note("memlock-unread", "not known: no limit of locked memory").read(LIMITS),
    }
}

/// XRT and its plugin for the NPU, whose file names end in their versions.
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
                .cause("it has no hw_context, without which nothing runs on this NPU")
                .read(&path);
            machine.install(finding, Package::Xrt)
        }
        (Some((core, path)), None) => {
            let finding = Finding::warning(
                "xrt-driver-missing",
                format!("XRT {} has no libxrt_driver_xdna", shown(core)),
            )
            .cause("XRT finds no NPU without its plugin (`0 devices found`)")
            .read(&path);
            machine.install(finding, Package::Xrt)
        }
        (Some((core, path)), Some((driver, plugin))) if core != driver => {
            let found = format!("XRT is {}, its plugin for the NPU {}", shown(core), shown(driver));
            let finding = Finding::warning("xrt-skew", found)
                .cause("the two are built together, and other pairs find no NPU, or end in undefined symbols")
                .read(&path)
                .read(&plugin);
            machine.install(finding, Package::Xrt)
        }
        (Some((core, path)), Some(_)) => {
            Finding::ok("xrt", format!("XRT {} with its plugin for the NPU", shown(core))).read(&path)
        }
    }
}

/// The library that calls XRT.
#[cfg(feature = "npu")]
fn shim(machine: &Machine, config: &Config) -> Finding {
    let path = offload::shim(config);
    let shown = path.display();
    if machine.exists(&below_root(&path)) {
        return Finding::ok("npu-shim", format!("{shown} is there"));
    }
    Finding::warning("npu-shim-missing", format!("there is no {shown}"))
        .cause("programs reach XRT through C++ alone, and this library does so for unicorn")
        .command("make npu-shim install")
        .act("in the repository's folder, with libxrt-dev of the XRT that is installed; or set npu.shim")
}

/// The compiled kernels. Whether they are sound, and for which models, `unicorn npu list` says.
#[cfg(feature = "npu")]
fn kernels(machine: &Machine, config: &Config) -> Finding {
    let Some(folder) = offload::kernels_folder(config) else {
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
                .cause("the NPU's programs are compiled on the machine that runs them");
            match &config.model.path {
                Some(model) => finding.command(format!("unicorn npu build-kernels --model {model}")),
                None => finding.act("unicorn npu build-kernels --model, with the model's path or name"),
            }
        }
        count => Finding::ok("npu-kernels", format!("{shown} has {count} kernels")),
    }
}

/// A path of the configuration as the machine's files are named: below its root.
#[cfg(feature = "npu")]
fn below_root(path: &std::path::Path) -> String {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    path.to_string_lossy().trim_start_matches('/').to_owned()
}

/// The last line of each symptom. "smu still busy" alone is noise, and is none.
fn symptoms(log: &[String]) -> Vec<Finding> {
    let mut findings: Vec<Finding> = Vec::new();
    for (part, code, cause, act) in SYMPTOMS {
        let hit = log.iter().rev().find(|line| {
            line.contains("amdxdna") && line.contains(part) && (part != "smu cmd" || line.contains("failed"))
        });
        if let Some(line) = hit
            && !findings.iter().any(|finding| finding.code == code)
        {
            findings.push(Finding::warning(code, line.as_str()).cause(cause).act(act).read("dev/kmsg"));
        }
    }
    findings
}
