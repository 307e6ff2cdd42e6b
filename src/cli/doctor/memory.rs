//! Checks of memory: the memory of the machine, the GPU's share of it, and the kernel parameters that set the share.

use super::finding::Finding;
use super::gpu::integrated;
use super::machine::{Machine, Pci};
use crate::cli::terminal::bytes;

const GIB: u64 = 1 << 30;
/// TTM counts in pages of this size on x86.
const PAGE_BYTES: u64 = 4096;
/// A carve-out of this size or more gets a note.
const LARGE_CARVE_OUT: u64 = 8 * GIB;
/// Less free memory than this is not enough for a server and a desktop.
const LOW_MEMORY: u64 = 2 * GIB;

/// Sizes of a machine's memory in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub total: u64,
    pub free: u64,
    /// The memory that the firmware reserves for the GPU: an APU's VRAM.
    pub carve_out: u64,
    pub carve_out_used: u64,
    /// The host memory that the GPU can access.
    pub gtt: u64,
}

impl Sizes {
    /// The sizes of a machine with this integrated GPU; `None` if a file cannot be read.
    pub fn read(machine: &Machine, gpu: &Pci) -> Option<Sizes> {
        let number = |name: &str| machine.number(&format!("{}/mem_info_{name}", gpu.folder)).ok();
        let sizes = Sizes {
            total: machine.memory("MemTotal")?,
            free: machine.memory("MemAvailable")?,
            carve_out: number("vram_total")?,
            carve_out_used: number("vram_used").unwrap_or(0),
            gtt: number("gtt_total")?,
        };
        // The files are not trusted. With this limit, sums of the sizes cannot overflow.
        let all = [sizes.total, sizes.free, sizes.carve_out, sizes.carve_out_used, sizes.gtt];
        all.iter().all(|size| *size < 1 << 48).then_some(sizes)
    }

    /// The proposed GTT size in bytes, a multiple of 1 GiB. It leaves an eighth of the memory, and at least 8 GiB, to
    /// the rest of the system.
    pub fn reachable_gtt(&self) -> u64 {
        self.total.saturating_sub((self.total / 8).max(8 * GIB)) / GIB * GIB
    }
}

/// The kernel parameter that sets the GTT size to `gtt` bytes.
pub fn pages_limit(gtt: u64) -> String {
    format!("ttm.pages_limit={}", gtt / PAGE_BYTES)
}

pub fn check(machine: &Machine, gpu: Option<&Pci>) -> Vec<Finding> {
    let mut findings = vec![ram(machine)];
    let Some(gpu) = gpu.filter(|gpu| gpu.driver.as_deref() == Some("amdgpu")) else { return findings };
    findings.extend(parameters(machine));
    match Sizes::read(machine, gpu) {
        Some(sizes) if integrated(gpu).is_some() => {
            findings.push(carve_out(&sizes, gpu));
            findings.push(gtt(machine, &sizes, gpu));
        }
        Some(sizes) => {
            let found = format!("{} VRAM, {} GTT", bytes(sizes.carve_out), bytes(sizes.gtt));
            findings.push(Finding::ok("gpu-memory", found).read_from(&gpu.folder));
        }
        None => {
            let finding = Finding::note("gpu-memory-unread", "the size of the GPU's memory is unknown")
                .cause("amdgpu's mem_info_vram_total or mem_info_gtt_total, or /proc/meminfo, has no number")
                .read_from(&gpu.folder);
            findings.push(finding);
        }
    }
    findings
}

fn ram(machine: &Machine) -> Finding {
    const PATH: &str = "proc/meminfo";
    let (Some(total), Some(free)) = (machine.memory("MemTotal"), machine.memory("MemAvailable")) else {
        return Finding::note("memory-unread", "unknown: /proc/meminfo has no sizes").read_from(PATH);
    };
    let found = format!("{} of memory, {} free", bytes(total), bytes(free));
    match free < LOW_MEMORY {
        false => Finding::ok("memory", found).read_from(PATH),
        true => Finding::warning("memory-low", found)
            .cause("other programs use the memory")
            .command("ps -eo rss,pid,comm --sort=-rss | head")
            .read_from(PATH),
    }
}

/// Checks for kernel parameters that are deprecated, or that the kernel ignores.
fn parameters(machine: &Machine) -> Vec<Finding> {
    const CMDLINE: &str = "proc/cmdline";
    const GTTSIZE: &str = "sys/module/amdgpu/parameters/gttsize";
    let mut findings = Vec::new();
    let live = machine.read(GTTSIZE).ok().and_then(|text| text.parse::<i64>().ok()).filter(|mib| *mib > 0);
    if let Some(mib) = live.and_then(|mib| u64::try_from(mib).ok()) {
        let finding = Finding::warning("gttsize-set", format!("amdgpu.gttsize is {mib} MiB"))
            .cause(
                "the parameter is deprecated; if TTM's own limit is lower, allocations above that limit fail",
            )
            .read_from(GTTSIZE);
        let finding = match machine.kernel_parameter("amdgpu.gttsize") {
            Some(value) => machine.remove_parameter(finding, format!("amdgpu.gttsize={value}")),
            None => finding.command("grep -rn gttsize /etc/modprobe.d"),
        };
        findings.push(machine.add_parameter(finding, pages_limit(mib.saturating_mul(1 << 20))));
    }
    for (name, module) in [("amdgpu.gtt_size", None), ("amdttm.pages_limit", Some("sys/module/amdttm"))] {
        let Some(value) = machine.kernel_parameter(name) else { continue };
        if module.is_some_and(|module| machine.exists(module)) {
            continue;
        }
        let cause = match module {
            None => "amdgpu has no such parameter",
            Some(_) => "the module amdttm belongs to AMD's driver package; the kernel's own module is ttm",
        };
        let finding = Finding::warning("parameter-ignored", format!("the kernel ignores `{name}={value}`"))
            .cause(cause)
            .read_from(CMDLINE);
        let finding = machine.remove_parameter(finding, format!("{name}={value}"));
        findings.push(match value.parse::<u64>() {
            Ok(pages) if module.is_some() => {
                machine.add_parameter(finding, format!("ttm.pages_limit={pages}"))
            }
            Ok(mib) => machine.add_parameter(finding, pages_limit(mib.saturating_mul(1 << 20))),
            Err(_) => finding,
        });
    }
    findings
}

fn carve_out(sizes: &Sizes, gpu: &Pci) -> Finding {
    const SETTING: &str =
        "UMA frame buffer size (also iGPU memory, dedicated graphics memory): Auto, or 512 MB";
    let Sizes { total, carve_out, .. } = *sizes;
    let found =
        format!("the firmware reserves {} for the GPU, and leaves {}", bytes(carve_out), bytes(total));
    let finding = if carve_out > total {
        Finding::warning("carve-out-large", found)
    } else if carve_out >= LARGE_CARVE_OUT {
        Finding::note("carve-out-large", found)
    } else {
        return Finding::ok("carve-out", found).read_from(&gpu.folder);
    };
    finding
        .cause(
            "no other program can use the reserved memory, and the GPU can access the rest at the same speed",
        )
        .firmware(SETTING)
        .read_from(&gpu.folder)
}

fn gtt(machine: &Machine, sizes: &Sizes, gpu: &Pci) -> Finding {
    let Sizes { total, carve_out, gtt, .. } = *sizes;
    let found =
        format!("GTT: the GPU can access {} of host memory, plus {} VRAM", bytes(gtt), bytes(carve_out));
    let wanted = sizes.reachable_gtt();
    let finding = if gtt > total / 100 * 95 {
        Finding::warning("gtt-too-large", found).cause(format!(
            "RADV lets programs allocate all of this, but the whole system has only {}",
            bytes(total)
        ))
    } else if gtt <= total / 100 * 55 && wanted > gtt {
        Finding::note("gtt-default", found).cause(
            "by default, the kernel sets ttm.pages_limit to half of the memory; a large model needs more",
        )
    } else {
        return Finding::ok("gtt", found).read_from(&gpu.folder);
    };
    let finding = finding.read_from(&gpu.folder).read_from("sys/module/ttm/parameters/pages_limit");
    if wanted == 0 { finding } else { machine.add_parameter(finding, pages_limit(wanted)) }
}
