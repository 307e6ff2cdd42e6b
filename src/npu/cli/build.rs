//! `unicorn npu build-kernels`: builds the kernels of a model from the source in this binary, with the steps of
//! `npu/kernels/README.md`.
//!
//! A kernel is built in a folder next to the stored kernels, checked, and moved to its place in one step. Its record
//! has a hash of the source, of the tools' versions, and of the steps. A kernel with the same hash is not built again.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use sha2::{Digest, Sha256};

use super::tool::Run;
use super::toolchain::Toolchain;
use crate::cli::args::BuildKernels;
use crate::cli::error::Error;
use crate::cli::terminal::print;
use crate::cli::{load, log};
use crate::config::Config;
use crate::model::arch;
use crate::npu::contract::{Bucket, ContractError, MAX_GROUPS, Shape};
use crate::npu::store::{self, Record, file_stem};

/// The kernel's source. An installed binary has no other copy.
const SOURCE: [(&str, &str); 4] = [
    ("attention.py", include_str!("../../../npu/kernels/attention.py")),
    ("schedule.py", include_str!("../../../npu/kernels/schedule.py")),
    ("tables.py", include_str!("../../../npu/kernels/tables.py")),
    ("attention.cc", include_str!("../../../npu/kernels/attention.cc")),
];

/// This file contains the steps, so the hash includes its text.
const STEPS: &str = include_str!("build.rs");

/// The beginning of the names of folders in which kernels are built.
const WORK_PREFIX: &str = ".build-";

/// Builds the missing kernels into `folder`.
pub fn build_kernels(config: &Config, args: &BuildKernels, folder: &Path) -> Result<(), Error> {
    let wanted = wanted(config, args)?;
    let at = |path: &Path| {
        let path = path.to_owned();
        move |error| Error::File { path, error }
    };
    // Each tool runs in a separate folder.
    let folder = &std::path::absolute(folder).map_err(at(folder))?;
    std::fs::create_dir_all(folder).map_err(at(folder))?;
    let lock = File::create(folder.join(".lock")).map_err(at(folder))?;
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        let problem = "another `unicorn npu build-kernels` builds into this folder; wait until it is done";
        return Err(Error::Argument(format!("{}: {problem}", folder.display())));
    }
    remove_remains(folder);
    let work = || tempfile::Builder::new().prefix(WORK_PREFIX).tempdir_in(folder).map_err(at(folder));
    let tools = Toolchain::find(args, work()?.path())?;
    let mut built = 0;
    for (index, (shape, bucket)) in wanted.iter().enumerate() {
        let (stem, since) = (file_stem(*shape, *bucket), Instant::now());
        let key = key(&stem, &tools);
        let progress = format!("[{}/{}] {stem}", index + 1, wanted.len());
        let stored = store::record(folder, &stem).filter(|record| record.key == key);
        if !args.force && stored.is_some() && store::read(folder, &stem).is_ok() {
            log::say(format_args!("{progress}: built before"));
            continue;
        }
        log::say(format_args!("{progress}: building"));
        let work = work()?;
        let kernel = Kernel { stem: &stem, shape: *shape, bucket: *bucket, tools: &tools };
        let log = folder.join(format!("{stem}.log"));
        let limit = Duration::from_secs(args.tool_limit_s.into());
        kernel.build(work.path(), &log, limit).map_err(|error| match error {
            Error::Tool { tool, problem } => Error::Tool {
                tool,
                problem: format!(
                    "{problem}, while it built {stem}; all of the output is in {}",
                    log.display()
                ),
            },
            error => error,
        })?;
        kernel.keep(work.path(), folder, key)?;
        let _ = std::fs::remove_file(&log);
        built += 1;
        log::say(format_args!("{progress}: built in {:.0} s", since.elapsed().as_secs_f64()));
    }
    let there = wanted.len() - built;
    print(&format!("{}: {built} kernels built, {there} were there\n", folder.display()))
}

/// Removes the folders of builds that were killed. No other build uses this folder now, because the lock is held.
fn remove_remains(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(WORK_PREFIX.as_bytes()) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// The requested kernels: for each number of rows and groups, one that walks over all keys for each number of keys, and
/// for layers with a window another one, with a short walk.
fn wanted(config: &Config, args: &BuildKernels) -> Result<Vec<(Shape, Bucket)>, Error> {
    let refused = |error: ContractError| Error::Argument(error.to_string());
    let (head_dim, heads, window, kv_heads) = match (&args.model, args.head_dim, args.heads_per_group) {
        (Some(model), ..) => {
            let (model, _) = arch::load(&load::files_at(Path::new(model), &config.model)?)?;
            let heads = model.heads();
            // The numbers of a config are far below 2^32, or the contract refuses the largest.
            let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
            let window = model.window().map(number);
            (number(heads.head_dim), number(heads.group()), window, number(heads.num_key_value_heads))
        }
        (None, Some(head_dim), Some(heads)) => (head_dim, heads, args.window, MAX_GROUPS),
        _ => unreachable!("clap asks for a model or for a shape"),
    };
    let full = Shape::new(head_dim, heads, None).map_err(refused)?;
    let windowed =
        window.map(|window| Shape::new(head_dim, heads, Some(window))).transpose().map_err(refused)?;
    let groups = if args.groups.is_empty() { standard_groups(kv_heads) } else { args.groups.clone() };
    let mut wanted = Vec::new();
    for &groups in &groups {
        for &rows in &args.rows {
            for &keys in &args.keys {
                let bucket = Bucket::new(rows, keys, groups).map_err(refused)?;
                full.fits(bucket).map_err(refused)?;
                wanted.push((full, bucket));
            }
            if let Some(windowed) = windowed {
                // No job of this kernel has more keys than fit into the smallest bucket.
                wanted.push((windowed, Bucket::of_job(windowed, rows, 1, 0, groups).map_err(refused)?));
            }
        }
    }
    let mut stems = std::collections::HashSet::new();
    wanted.retain(|(shape, bucket)| stems.insert(file_stem(*shape, *bucket)));
    Ok(wanted)
}

/// KV heads of a dispatch, so that the NPU can compute half of a model's KV heads, or all of them.
fn standard_groups(kv_heads: u32) -> Vec<u32> {
    let mut groups = vec![(kv_heads / 2).clamp(1, MAX_GROUPS), kv_heads.min(MAX_GROUPS)];
    groups.dedup();
    groups
}

/// The inputs and the steps of a kernel's build.
fn key(stem: &str, tools: &Toolchain) -> String {
    let mut hash = Sha256::new();
    let texts = SOURCE.iter().flat_map(|(name, text)| [*name, *text]).chain([STEPS, stem]);
    for text in texts.chain(tools.versions.iter().map(String::as_str)) {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    }
    format!("{:x}", hash.finalize())
}

struct Kernel<'a> {
    stem: &'a str,
    shape: Shape,
    bucket: Bucket,
    tools: &'a Toolchain,
}

impl Kernel<'_> {
    /// Makes `attention.xclbin` and `attention.bin` in the folder `work`.
    fn build(&self, work: &Path, log: &Path, limit: Duration) -> Result<(), Error> {
        for (name, text) in SOURCE {
            let path = work.join(name);
            std::fs::write(&path, text).map_err(|error| Error::File { path, error })?;
        }
        let _ = std::fs::remove_file(log);
        let Self { shape, bucket, tools, .. } = self;
        let run = |name: &str, mut command: std::process::Command, output: Option<&str>| {
            let output = output.map(|name| work.join(name));
            Run { name, limit, log }.run(command.current_dir(work), output.as_deref())
        };

        let mut design = tools.python("attention.py");
        let numbers = [
            ("--head-dim", shape.head_dim()),
            ("--heads-per-group", shape.heads_per_group()),
            ("--rows", bucket.rows()),
            ("--keys", bucket.keys()),
            ("--groups", bucket.groups()),
        ];
        for (option, number) in numbers.into_iter().chain(shape.window().map(|window| ("--window", window))) {
            design.arg(option).arg(number.to_string());
        }
        run("attention.py", design, Some("design.mlir"))?;
        run("tables.py", tools.python("tables.py"), Some("exp_tables.h"))?;

        let mut clang = tools.clang();
        clang.args(["--target=aie2-none-unknown-elf", "-O2", "-std=c++20", "-DNDEBUG", "-I", "."]);
        let blocks = shape.pass_rows() / shape.tile();
        for (name, number) in [
            ("HEAD_DIM", shape.head_dim()),
            ("TILE", shape.tile()),
            ("PASS_ROWS", shape.pass_rows()),
            ("WALK_STEP", if shape.window().is_some() { blocks } else { 0 }),
        ] {
            clang.arg(format!("-D{name}={number}"));
        }
        clang.args(["-c", "attention.cc", "-o", "attention.o"]);
        run("clang++", clang, None)?;

        let mut aiecc = tools.aiecc();
        aiecc.args(["--no-xchesscc", "--no-xbridge"]);
        aiecc.arg(format!("--peano={}", tools.peano.display()));
        aiecc.args(["--aie-generate-xclbin", "--aie-generate-npu-insts"]);
        aiecc.args(["--xclbin-name=attention.xclbin", "--npu-insts-name=attention.bin", "design.mlir"]);
        run("aiecc.py", aiecc, None)
    }

    /// Checks the built files, and moves them to their place. A reader sees the old kernel, no kernel, or the new one.
    fn keep(&self, work: &Path, folder: &Path, key: String) -> Result<(), Error> {
        let at = |path: &Path| {
            let path = path.to_owned();
            move |error| Error::File { path, error }
        };
        let read = |name: &str| -> Result<(PathBuf, Vec<u8>), Error> {
            let path = work.join(name);
            let bytes = std::fs::read(&path).map_err(|error| Error::Tool {
                tool: "aiecc.py".into(),
                problem: format!("wrote no {name} for {}: {error}", self.stem),
            })?;
            Ok((path, bytes))
        };
        let ((new_xclbin, container), (new_bin, instructions)) =
            (read("attention.xclbin")?, read("attention.bin")?);
        store::validate(self.shape, self.bucket, &container, &instructions).map_err(|error| Error::Tool {
            tool: "aiecc.py".into(),
            problem: format!("wrote for {} what is no kernel of this program: {}", self.stem, error.message),
        })?;
        let record = Record::new(key, self.tools.versions.clone(), &container, &instructions);
        let new_json = work.join("record.json");
        let text = serde_json::to_vec_pretty(&record).expect("a record is JSON");
        std::fs::write(&new_json, text).map_err(at(&new_json))?;
        // A kernel exists if its container exists, so the container is removed first and added last.
        let [xclbin, bin, json] = store::paths(folder, self.stem);
        match std::fs::remove_file(&xclbin) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(at(&xclbin)(error)),
            _ => {}
        }
        for (from, to) in [(new_bin, bin), (new_json, json), (new_xclbin, xclbin)] {
            std::fs::rename(from, &to).map_err(at(&to))?;
        }
        Ok(())
    }
}
