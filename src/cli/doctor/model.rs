//! Checks of a model on this machine: whether it was pulled, whether it fits (with the same plan as a load), and how
//! fast the disk reads it. Of several models, only their small files are read.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::finding::Finding;
use super::machine::{Machine, Pci};
use super::memory::{Sizes, pages_limit};
use crate::cli::args;
use crate::cli::devices::Loader;
use crate::cli::error::Error;
use crate::cli::load::{self, Room};
use crate::cli::models;
use crate::cli::plan;
use crate::cli::terminal::bytes;
use crate::config::Config;
use crate::hub::{Cache, HubError, ModelName};
use crate::model::arch;
use crate::model::memory::Fit;

/// Maximum bytes and time for the measurement of the disk.
const DISK_BYTES: u64 = 256 << 20;
const DISK_TIME: Duration = Duration::from_secs(5);
/// Alignment of direct reads (`O_DIRECT`), in the file and in memory.
const SECTOR: usize = 4096;
const PIECE: usize = 4 << 20;
/// Bytes per second. A slower disk makes the start of a server slow.
const SLOW_BYTES_PER_S: f64 = 500e6;
/// The speed is not reported for fewer bytes than this, because the latency of the first access dominates their time.
const MIN_RATED_BYTES: u64 = 32 << 20;

/// Replaces the names of the model and its draft with the paths of the pulled models. Returns a finding if one of them
/// is missing. With another root, paths of that machine's configuration are below that root, but the path of `--model`
/// is on this machine.
pub fn locate(machine: &Machine, config: &mut Config, args: &args::Doctor) -> Option<Finding> {
    if args.shape.is_some() {
        return None;
    }
    let is_below_root = machine.is_redirected() && args.model.is_none();
    if is_below_root {
        let Config { model, models, .. } = config;
        for path in [&mut model.path, &mut model.draft, &mut models.dir].into_iter().flatten() {
            if path.starts_with('/') {
                *path = machine.path(path).to_string_lossy().into_owned();
            }
        }
    }
    let caches = match is_below_root {
        // It is not known which user's cache a server on that machine would use.
        true => config.models.dir.iter().map(Cache::system).collect(),
        false => models::caches(config),
    };
    let mut names = [&mut config.model.path, &mut config.model.draft].into_iter().flatten();
    names.find_map(|name| models::find(&caches, name).err()).map(missing_model)
}

/// The finding about a model that cannot be served because it is not on the machine.
fn missing_model(error: Error) -> Finding {
    match error {
        Error::Hub(HubError::NotPulled { name, roots }) if roots.is_empty() => Finding::note(
            "fit-unknown",
            format!("unknown: whether {name} was pulled, and whether it fits"),
        )
        .cause("the configuration has no models.dir, and it is not known which user's cache has the model"),
        Error::Hub(HubError::NotPulled { name, roots }) => {
            let roots: Vec<String> = roots.iter().map(|root| root.display().to_string()).collect();
            Finding::problem(
                "model-not-pulled",
                format!("the configured model {name} is not on this machine"),
            )
            .cause(format!("it is not in {}", roots.join(" or ")))
            .command(pull(&name))
        }
        Error::Hub(HubError::Partial { name }) => Finding::problem(
            "model-partial",
            format!("the configured model {name} is only partly on this machine"),
        )
        .cause("its pull was interrupted; another pull continues where it stopped")
        .command(pull(&name)),
        error => Finding::problem("model-unreadable", error.to_string()),
    }
}

/// The command that pulls a model, quoted for the shell.
fn pull(name: &ModelName) -> String {
    let name = name.to_string();
    match name.chars().all(|c| c.is_ascii_alphanumeric() || "/@:._-+".contains(c)) {
        true => format!("unicorn pull {name}"),
        false => format!("unicorn pull '{}'", name.replace('\'', r"'\''")),
    }
}

pub fn check(
    machine: &Machine,
    loader: &Loader,
    gpu: Option<&Pci>,
    config: &Config,
    args: &args::Doctor,
) -> Vec<Finding> {
    let path = config.model.path.as_deref().filter(|_| args.shape.is_none());
    let mut findings = Vec::new();
    if config.model.path.is_none() && args.shape.is_none() && !machine.is_redirected() {
        findings.extend(unusable_of_list(config));
    }
    if path.is_some() || args.shape.is_some() {
        findings.extend(fit(machine, loader, gpu, config, args, path));
    }
    match (args.disk, path) {
        (true, Some(path)) => findings.push(disk(Path::new(path))),
        (true, None) => {
            findings.push(Finding::note("disk-unread", "not measured: --disk reads the files of --model"))
        }
        (false, _) => {}
    }
    findings
}

/// The finding about the first of several models that cannot be read.
fn unusable_of_list(config: &Config) -> Option<Finding> {
    let read = models::listed(config).and_then(|list| {
        list.iter().try_for_each(|(_, config)| Ok(arch::load(&load::files(&config.model)?).map(drop)?))
    });
    read.err().map(missing_model)
}

fn fit(
    machine: &Machine,
    loader: &Loader,
    gpu: Option<&Pci>,
    config: &Config,
    args: &args::Doctor,
    path: Option<&str>,
) -> Vec<Finding> {
    let Ok(device) = loader.chosen(config) else {
        return vec![Finding::note(
            "fit-unknown",
            "unknown: whether the model fits, because there is no device",
        )];
    };
    let planned = args::Planned {
        model: path.map(str::to_owned),
        shape: args.shape,
        scheme: args.scheme,
        draft: config.model.draft.clone().filter(|_| path.is_some()),
        ..args::Planned::default()
    };
    let sizes = gpu.and_then(|gpu| Sizes::read(machine, gpu));
    let room = device.room(config);
    let fit = match plan::fit(config, &planned, &room) {
        Ok(outcome) => outcome,
        Err(error) => return vec![Finding::problem("model-unreadable", error.to_string())],
    };
    let fit = match fit {
        Ok(fit) => fit,
        Err(error) => {
            let mut finding = Finding::problem("does-not-fit", error.to_string());
            if let Some(sizes) = sizes
                && fits_with(config, &planned, &sizes)
            {
                finding = finding.cause(format!(
                    "the GPU can access only {} of host memory; {} are possible",
                    bytes(sizes.gtt),
                    bytes(sizes.reachable_gtt())
                ));
                finding = machine.add_parameter(finding, pages_limit(sizes.reachable_gtt()));
            }
            if error.largest_context > 0 {
                finding = finding.option(format!("--context {}", error.largest_context));
            } else if let Some((option, _)) = &error.smaller {
                finding = finding.option(option.as_str());
            }
            return vec![finding];
        }
    };
    let placed = fit.plan.bytes();
    let assumption = planned.assumption().map(|text| format!(" ({text})")).unwrap_or_default();
    let found =
        format!("the model takes {} with a context of {} tokens{assumption}", bytes(placed), fit.context);
    let mut findings = vec![Finding::ok("fit", found)];
    findings.extend(spilled_ffn_weights(&room, &fit));
    let free = sizes.map(|sizes| sizes.free + sizes.carve_out.saturating_sub(sizes.carve_out_used));
    if let Some(free) = free.filter(|free| *free < placed) {
        let found = format!("the model takes {}, but only {} are free now", bytes(placed), bytes(free));
        let finding = Finding::warning("memory-taken", found)
            .cause("RADV lets unicorn allocate memory that other programs use; the device is lost at its first use")
            .command("ps -eo rss,pid,comm --sort=-rss | head")
            .read_from("proc/meminfo");
        findings.push(finding);
    }
    findings
}

/// Checks that most FFN weights do not spill from the faster memory into the slower one.
fn spilled_ffn_weights(room: &Room, fit: &Fit) -> Option<Finding> {
    let is_in_vram = fit.plan.has_ffn_in_vram();
    if is_in_vram == room.ffn_choice().is_vram_first {
        return None;
    }
    let finding = Finding::warning("ffn-heap-full", room.slow_ffn_heap(is_in_vram)?)
        .cause("the faster memory has no room for most FFN weights, and decoding reads them for every token")
        .option("a lower engine.context, kv.dtype = \"int8\" or a smaller model.quantize leaves more room");
    Some(finding)
}

/// Whether the model fits if GTT has the proposed size. A tenth stays free for other programs, as in a load.
fn fits_with(config: &Config, planned: &args::Planned, sizes: &Sizes) -> bool {
    let gtt = sizes.reachable_gtt();
    if gtt <= sizes.gtt {
        return false;
    }
    let room = load::room(config, Some((sizes.carve_out / 10 * 9, gtt / 10 * 9)));
    room.is_ok_and(|room| plan::fit(config, planned, &room).is_ok_and(|outcome| outcome.is_ok()))
}

/// Measures the disk of the model's largest file.
fn disk(model: &Path) -> Finding {
    let Some((file, total)) = largest(model) else {
        return Finding::note("disk-unread", format!("not measured: {} has no files", model.display()));
    };
    let (read, time, is_direct) = match speed(&file) {
        Ok(measured) => measured,
        Err(error) => {
            return Finding::note("disk-unread", format!("not measured: {}: {error}", file.display()));
        }
    };
    if read < MIN_RATED_BYTES {
        let found = format!(
            "{} in {:.2} s: not enough data to measure the speed of the disk",
            bytes(read),
            time.as_secs_f64()
        );
        return Finding::ok("disk", found);
    }
    let rate = read as f64 / time.as_secs_f64().max(1e-9);
    let how = if is_direct { "without the page cache" } else { "possibly from the page cache" };
    let found = format!(
        "{} in {:.2} s, {:.2} GB/s, {how}: at that speed, {} take {:.0} s",
        bytes(read),
        time.as_secs_f64(),
        rate / 1e9,
        bytes(total),
        total as f64 / rate.max(1.0)
    );
    match is_direct && rate < SLOW_BYTES_PER_S {
        false => Finding::ok("disk", found),
        true => Finding::warning("disk-slow", found)
            .cause("a load reads every byte of the model once")
            .act("move the model to an NVMe disk"),
    }
}

/// The largest file of a model, and the bytes of all its files.
fn largest(model: &Path) -> Option<(PathBuf, u64)> {
    if model.is_file() {
        return Some((model.to_owned(), fs::metadata(model).ok()?.len()));
    }
    let files = fs::read_dir(model).ok()?.filter_map(|entry| {
        let path = entry.ok()?.path();
        // The files of a pulled model are links.
        let metadata = fs::metadata(&path).ok()?;
        metadata.is_file().then_some((metadata.len(), path))
    });
    let files: Vec<(u64, PathBuf)> = files.collect();
    let total = files.iter().map(|(size, _)| size).sum();
    Some((files.into_iter().max()?.1, total))
}

/// Bytes read, the time they took, and whether the reads bypassed the page cache.
fn speed(path: &Path) -> io::Result<(u64, Duration, bool)> {
    let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path);
    // Some file systems do not support direct reads. They report this when the file is opened or first read.
    match direct.and_then(read_pieces) {
        Ok((read, time)) => Ok((read, time, true)),
        Err(_) => File::open(path).and_then(read_pieces).map(|(read, time)| (read, time, false)),
    }
}

fn read_pieces(mut file: File) -> io::Result<(u64, Duration)> {
    let mut memory = vec![0; PIECE + SECTOR];
    let start = memory.as_ptr().align_offset(SECTOR).min(SECTOR);
    let since = Instant::now();
    let mut read = 0;
    while read < DISK_BYTES && since.elapsed() < DISK_TIME {
        match file.read(&mut memory[start..start + PIECE])? {
            0 => break,
            n => read += n as u64,
        }
    }
    Ok((read, since.elapsed()))
}
