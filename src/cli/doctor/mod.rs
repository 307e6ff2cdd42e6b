//! `unicorn doctor`: checks a machine for everything that prevents a server from running or makes it slow. For each
//! finding, it shows the cause and what to do. It changes nothing, and starts nothing except the Vulkan loader. With
//! `--heaps`, it also runs kernels on the device, and stores how fast they read memory.
//!
//! The checks read files below a root (`machine.rs`), and ask the Vulkan loader. `--root` replaces `/` by another
//! folder, and the loader by the `vulkan.json` in that folder. So a machine can be checked from another one, and a
//! broken machine can be a test case. A fact that cannot be read becomes a note, and never counts as ok.

pub(crate) mod finding;
pub(crate) mod gpu;
pub(crate) mod machine;
mod memory;
mod model;
mod service;
mod vulkan;

use std::path::Path;

use finding::{Finding, Report, Severity};
pub use gpu::{gpus, integrated};
pub use machine::{Machine, Pci};

use super::args;
use super::devices::Loader;
use super::error::Error;
use super::load;
use super::terminal::print;
use crate::config::Config;
use crate::model::heaps;
use crate::npu;

/// The file with the loader's answer, below a redirected root.
const VULKAN: &str = "vulkan.json";
/// No machine has more memory than this. Larger sizes in `vulkan.json` are reduced to it.
const MAX_BYTES: u64 = 1 << 48;
const MIN_ALLOCATION: u64 = 1 << 20;

pub fn doctor(config: &Config, args: &args::Doctor) -> Result<(), Error> {
    let machine = Machine::new(args.root.as_deref());
    if let Some(root) = &args.root
        && !root.is_dir()
    {
        return Err(Error::Argument(format!("--root {}: there is no such folder", root.display())));
    }
    let root = args.root.as_deref().unwrap_or(Path::new("/"));
    let mut config = config.clone();
    let missing_model = model::locate(&machine, &mut config, args);
    let report = Report::new(root.display().to_string(), findings(&machine, &config, args, missing_model));
    print(&match (args.json, args.fix) {
        (true, _) => report.as_json(),
        (false, true) => report.as_script(),
        (false, false) => report.as_text(),
    })?;
    match report.problems() {
        0 => Ok(()),
        n => Err(Error::DoctorProblems(n)),
    }
}

/// All findings. `missing_model` is the finding about a model that is not on the machine; the checks of the model are
/// skipped then.
fn findings(
    machine: &Machine,
    config: &Config,
    args: &args::Doctor,
    missing_model: Option<Finding>,
) -> Vec<Finding> {
    let log = machine.kernel_log();
    let gpus = gpu::gpus(machine);
    let gpu = gpus.first();
    let is_amd = gpu.is_some_and(|gpu| gpu.vendor == gpu::AMD);
    let mut findings = vec![machine_summary(machine)];

    let mut of_gpu = gpu::check(machine, gpu, &log, config);
    // What is measured here is in the answer of the loader below.
    of_gpu.extend(args.heaps.then(|| measure_heaps(config)).flatten());
    let loader = match loader(machine) {
        Ok(loader) => {
            of_gpu.extend(vulkan::check(machine, &loader, config, is_amd));
            loader
        }
        Err(finding) => {
            of_gpu.push(*finding);
            Loader::Devices(Vec::new())
        }
    };
    // If a load finds its device, none of these findings prevents the server from running.
    if loader.chosen(config).is_ok() {
        for finding in of_gpu.iter_mut().filter(|finding| finding.severity == Severity::Problem) {
            finding.severity = Severity::Warning;
        }
    }
    findings.extend(of_gpu);
    findings.extend(memory::check(machine, gpu.filter(|_| is_amd)));
    match missing_model {
        Some(finding) => findings.push(finding),
        None => findings.extend(model::check(machine, &loader, gpu.filter(|_| is_amd), config, args)),
    }
    findings.extend(service::check(machine, config));
    findings.extend(npu::cli::check(machine, config, &log));
    findings
}

/// Measures how fast the device reads its heaps. Returns a finding if this was not possible.
fn measure_heaps(config: &Config) -> Option<Finding> {
    let why = match load::device(config).map(|device| heaps::measure(&device)) {
        Ok(Ok(Ok(()))) => return None,
        Ok(Ok(Err(why))) => why.to_string(),
        Ok(Err(error)) => error.to_string(),
        Err(error) => error.to_string(),
    };
    Some(Finding::note("heaps-unread", format!("not measured: how fast the device reads its memory: {why}")))
}

/// The answer of the Vulkan loader, or the contents of `vulkan.json` below a redirected root.
fn loader(machine: &Machine) -> Result<Loader, Box<Finding>> {
    if !machine.is_redirected() {
        return Ok(Loader::ask());
    }
    let text = machine.read(VULKAN).map_err(|error| Box::new(Finding::unread("vulkan", VULKAN, &error)))?;
    let mut loader: Loader = serde_json::from_str(&text).map_err(|error| {
        let found = format!("unknown: /{VULKAN} is not the output of `unicorn devices --json`: {error}");
        Box::new(Finding::note("vulkan-unread", found))
    })?;
    if let Loader::Devices(devices) = &mut loader {
        for device in devices {
            device.max_allocation_bytes = device.max_allocation_bytes.clamp(MIN_ALLOCATION, MAX_BYTES);
            for heap in &mut device.heaps {
                heap.size_bytes = heap.size_bytes.min(MAX_BYTES);
                heap.free_bytes = heap.free_bytes.min(heap.size_bytes);
            }
        }
    }
    Ok(loader)
}

/// Product, processor, distribution and kernel, for a reader of the report who does not know the machine.
fn machine_summary(machine: &Machine) -> Finding {
    let cpu = machine.read("proc/cpuinfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("model name"))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    });
    let parts = [
        machine.read("sys/class/dmi/id/product_name").ok(),
        cpu,
        machine.system("PRETTY_NAME"),
        machine.read("proc/sys/kernel/osrelease").ok().map(|release| format!("Linux {release}")),
    ];
    let known: Vec<String> = parts.into_iter().flatten().filter(|part| !part.is_empty()).collect();
    match known.is_empty() {
        true => Finding::note("machine-unread", "unknown: which machine this is"),
        false => Finding::ok("machine", known.join(", ")),
    }
}
