//! Checks of the GPU below Vulkan: the PCI bus, the kernel driver and its parameters, device nodes, permissions,
//! resets.

use std::io;

use super::finding::Finding;
use super::machine::{Machine, NodeError, Pci};
use crate::cli::load;
use crate::config::Config;

pub const AMD: u64 = 0x1002;
/// PCI class 03: display controllers.
const DISPLAY: u64 = 0x03;
/// AMD's integrated GPUs by PCI device id, from `amdgpu.ids` of libdrm and from `pci.ids`.
const INTEGRATED: [(u64, &str); 9] = [
    (0x15bf, "Phoenix (Radeon 780M, 760M, 740M)"),
    (0x15c8, "Phoenix 2 (Radeon 740M)"),
    (0x1900, "Hawk Point (Radeon 780M, 760M)"),
    (0x1901, "Hawk Point 2"),
    (0x150e, "Strix Point (Radeon 890M, 880M)"),
    (0x1586, "Strix Halo (Radeon 8060S, 8050S)"),
    (0x1114, "Krackan Point (Radeon 860M, 840M)"),
    (0x1681, "Rembrandt (Radeon 680M, 660M)"),
    (0x1638, "Cezanne"),
];
const LOCKUP_TIMEOUT: &str = "sys/module/amdgpu/parameters/lockup_timeout";

/// The name of an AMD integrated GPU; `None` for other GPUs.
pub fn integrated(gpu: &Pci) -> Option<&'static str> {
    let found = INTEGRATED.iter().find(|(device, _)| gpu.vendor == AMD && gpu.device == *device);
    found.map(|(_, name)| *name)
}

/// All GPUs, AMD's first.
pub fn gpus(machine: &Machine) -> Vec<Pci> {
    let mut gpus: Vec<Pci> = machine.pci().into_iter().filter(|pci| pci.class >> 16 == DISPLAY).collect();
    gpus.sort_by_key(|gpu| gpu.vendor != AMD);
    gpus
}

pub fn check(
    machine: &Machine,
    gpu: Option<&Pci>,
    log: &io::Result<Vec<String>>,
    config: &Config,
) -> Vec<Finding> {
    const FOLDER: &str = "sys/bus/pci/devices";
    let Some(gpu) = gpu else {
        let finding = Finding::problem("no-gpu", "there is no GPU on the PCI bus")
            .cause("a virtual machine or a container has only the GPUs that are passed through to it")
            .act("give this system the GPU, or run unicorn where the GPU is")
            .read_from(FOLDER);
        return vec![finding];
    };
    let driver = gpu.driver.as_deref().unwrap_or("no driver");
    let id = format!("{:04x}:{:04x} at {}, {driver}", gpu.vendor, gpu.device, gpu.address);
    if gpu.vendor != AMD {
        let finding = Finding::note("gpu-not-amd", format!("the GPU is not an AMD GPU: {id}"))
            .cause("the doctor can check the kernel driver and the memory only for amdgpu")
            .read_from(&gpu.folder);
        // NVIDIA's own driver has other device nodes.
        let has_render_node = gpu.driver.as_deref() != Some("nvidia");
        return [finding].into_iter().chain(has_render_node.then(|| render_access(machine))).collect();
    }
    let name = integrated(gpu).unwrap_or("AMD GPU");
    let mut findings = vec![Finding::ok("gpu", format!("{name}, {id}")).read_from(&gpu.folder)];
    findings.push(kernel_driver(machine, gpu));
    if gpu.driver.as_deref() == Some("amdgpu") {
        findings.push(render_access(machine));
        findings.push(lockup_timeout(machine, config));
    }
    findings.push(resets(machine, gpu, log));
    findings
}

fn kernel_driver(machine: &Machine, gpu: &Pci) -> Finding {
    let parameters = machine.kernel_parameters();
    let has =
        |wanted: &[&str]| parameters.iter().find(|parameter| wanted.contains(&parameter.as_str())).cloned();
    match gpu.driver.as_deref() {
        Some("amdgpu") => Finding::ok("kernel-driver", "the GPU is bound to amdgpu"),
        Some("vfio-pci") => Finding::problem("gpu-passed-through", "the GPU is bound to vfio-pci")
            .cause("the GPU is reserved for a virtual machine")
            .act("run unicorn in that virtual machine, or remove the GPU's id from vfio-pci.ids")
            .read_from(&gpu.folder),
        driver => {
            let found = match driver {
                None => "no driver is bound to the GPU".to_owned(),
                Some(driver) => format!("the GPU is bound to {driver} instead of amdgpu"),
            };
            if let Some(parameter) = has(&["nomodeset", "amdgpu.modeset=0"]) {
                let finding = Finding::problem("nomodeset", found)
                    .cause(format!("the kernel parameter `{parameter}` disables amdgpu"))
                    .read_from("proc/cmdline");
                return machine.remove_parameter(finding, parameter);
            }
            let finding = Finding::problem("no-amdgpu", found).read_from(&gpu.folder);
            match blacklist(machine) {
                Some(path) => finding
                    .cause(format!("/{path} prevents the loading of amdgpu"))
                    .command(format!("sudo sed -i '/^ *blacklist  *amdgpu/d' /{path} && sudo modprobe amdgpu"))
                    .read_from(&path),
                None => finding
                    .cause(
                        "amdgpu is not loaded, or does not support the GPU: firmware is missing, or the kernel is old",
                    )
                    .command("sudo modprobe amdgpu")
                    .command("sudo dmesg | grep amdgpu"),
            }
        }
    }
}

/// The file in which amdgpu is blacklisted.
fn blacklist(machine: &Machine) -> Option<String> {
    const FOLDER: &str = "etc/modprobe.d";
    let paths = machine.names(FOLDER, "").into_iter().map(|name| format!("{FOLDER}/{name}"));
    paths.into_iter().find(|path| {
        let text = machine.read(path).unwrap_or_default();
        text.lines().any(|line| line.split_whitespace().collect::<Vec<_>>() == ["blacklist", "amdgpu"])
            // The path becomes part of a shell command.
            && path.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c))
    })
}

fn render_access(machine: &Machine) -> Finding {
    const FOLDER: &str = "dev/dri";
    let nodes = machine.names(FOLDER, "renderD");
    let Some(node) = nodes.first().map(|name| format!("{FOLDER}/{name}")) else {
        return Finding::problem("no-render-node", "there is no /dev/dri/renderD*")
            .cause("the container has no access to the device, or udev did not create it")
            .act("in a container: docker run --device /dev/dri ..., or lxc's dev0: /dev/dri/renderD128")
            .read_from(FOLDER);
    };
    match machine.may_open(&node) {
        Ok(()) => Finding::ok("render-access", format!("/{node} can be opened")),
        Err(node_error) => explain_node_error(
            Finding::problem("render-group", format!("/{node} cannot be opened: {}", node_error.error)),
            &node_error,
        )
        .read_from("proc/self/status")
        .read_from("etc/group"),
    }
}

/// Adds why a device node cannot be opened, and what to do.
pub fn explain_node_error(finding: Finding, node_error: &NodeError) -> Finding {
    if node_error.error.kind() != io::ErrorKind::PermissionDenied {
        return finding
            .cause("the driver refuses to open it; the kernel log says why")
            .command("sudo dmesg | tail -50");
    }
    match node_error.group.as_deref() {
        // A bug of udev in systemd 258: https://github.com/systemd/systemd/issues/39110
        None | Some("root") => finding
            .cause("the node belongs to root only: udev did not give it to the group `render`")
            .command("sudo udevadm trigger --subsystem-match=drm --subsystem-match=accel"),
        Some(group) if node_error.joined_later => finding
            .cause(format!("the user was added to the group `{group}` after this login"))
            .act("log out and in again, or restart the service"),
        Some(group) => finding
            .cause(format!("the user is not in the group `{group}`"))
            .command(format!("sudo usermod -aG {group} \"$USER\""))
            .act("log out and in again, or restart the service"),
    }
}

fn lockup_timeout(machine: &Machine, config: &Config) -> Finding {
    const CODE: &str = "lockup-timeout";
    let parameter = match machine.read(LOCKUP_TIMEOUT) {
        Ok(parameter) => parameter,
        Err(error) => return Finding::unread(CODE, LOCKUP_TIMEOUT, &error),
    };
    let shown = match parameter.as_str() {
        "" | "(null)" | "0" => "the kernel's default".to_owned(),
        parameter => format!("{parameter} ms"),
    };
    let wanted = config.gpu.max_submit_ms;
    match load::longest_submit(&parameter) {
        None => Finding::note("lockup-timeout-off", format!("amdgpu waits forever for a hung GPU: {shown}"))
            .cause("amdgpu.lockup_timeout is negative; only unicorn's hardware.hang_timeout_s ends the wait")
            .read_from(LOCKUP_TIMEOUT),
        Some(longest) if longest.as_millis() < u128::from(wanted) => {
            let longest = longest.as_millis();
            let finding = Finding::warning("lockup-timeout-low", format!("amdgpu resets the GPU early: {shown}"))
                .cause(format!(
                    "unicorn limits a submit to a quarter of that, {longest} ms, although gpu.max_submit_ms is {wanted}"
                ))
                .read_from(LOCKUP_TIMEOUT);
            machine.add_parameter(finding, "amdgpu.lockup_timeout=10000".into())
        }
        Some(_) => Finding::ok(CODE, format!("amdgpu waits long enough for a submit: {shown}"))
            .read_from(LOCKUP_TIMEOUT),
    }
}

/// Looks for resets of the GPU since boot in the kernel log, and for the kernel's dump of the last reset, which exists
/// for some minutes.
fn resets(machine: &Machine, gpu: &Pci, log: &io::Result<Vec<String>>) -> Finding {
    const CODE: &str = "gpu-resets";
    const LOG: &str = "dev/kmsg";
    let is_timeout = |line: &&String| {
        line.contains("amdgpu")
            && (line.contains("ring ") && line.contains(" timeout") || line.contains("GPU reset begin"))
    };
    let lines: Vec<&String> = log.iter().flatten().filter(is_timeout).collect();
    let dump = format!("{}/devcoredump", gpu.folder);
    let finding = match (lines.last(), log) {
        (Some(line), _) => {
            let found = format!("the kernel log reports a hung or reset GPU {}: {line}", times(lines.len()));
            Finding::warning("gpu-reset", found).read_from(LOG)
        }
        (None, _) if machine.exists(&dump) => {
            Finding::warning("gpu-reset", "the kernel has a dump of a hung GPU").read_from(&dump)
        }
        (None, Err(error)) => {
            let finding = Finding::unread(CODE, LOG, error);
            return match error.kind() {
                io::ErrorKind::NotFound => {
                    finding.cause("there is no kernel log here, as in most containers")
                }
                _ => finding
                    .cause("only root may read the kernel log, which shows resets of the GPU")
                    .command("sudo unicorn doctor"),
            };
        }
        (None, Ok(_)) => return Finding::ok(CODE, "the kernel log has no reset of the GPU").read_from(LOG),
    };
    finding
        .cause("a submit took longer than amdgpu's timeout, or the driver, firmware or memory failed")
        .command("sudo dmesg | grep -A5 -e timeout -e 'GPU reset'")
        .option("lower gpu.max_submit_ms if this happens again while unicorn serves")
}

fn times(n: usize) -> String {
    if n == 1 { "once".into() } else { format!("{n} times, most recently") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_cannot_be_opened_has_a_cause() {
        let cause = |kind: io::ErrorKind, group: Option<&str>| {
            let node_error =
                NodeError { error: kind.into(), group: group.map(str::to_owned), joined_later: false };
            explain_node_error(Finding::problem("render-group", ""), &node_error).cause.expect("a cause")
        };
        use io::ErrorKind::{NotFound, PermissionDenied};
        assert!(cause(PermissionDenied, Some("video")).ends_with("not in the group `video`"));
        assert!(cause(PermissionDenied, Some("root")).starts_with("the node belongs to root only"));
        assert!(cause(PermissionDenied, None).starts_with("the node belongs to root only"));
        assert!(cause(NotFound, Some("render")).starts_with("the driver refuses to open it"));
    }
}
