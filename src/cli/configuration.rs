//! The configuration of a command: the files, the environment and the command line in their order.
//!
//! Without `--config` the files are the system's: `/etc/unicorn/config.toml`, and then `/etc/unicorn/conf.d/*.toml` in the
//! order of their names. `UNICORN_CONFIG_DIR` names another folder for both. `unicorn doctor --root FOLDER` reads those of
//! the machine whose files lie in that folder.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::args::{self, Command, Global};
use super::error::Error;
use crate::config::{Config, Layer, NpuMode};
use crate::file;
use crate::tensor::{KvDtype, Precision};

const SYSTEM: &str = "/etc/unicorn";
const SYSTEM_VARIABLE: &str = "UNICORN_CONFIG_DIR";
/// The most bytes of a file.
const MAX_BYTES: u64 = 1 << 20;
/// The most files in `conf.d`.
const MAX_FILES: usize = 256;

/// A configuration, where it came from, and the warnings about it.
pub struct Configured {
    pub config: Config,
    /// Later ones win.
    pub layers: Vec<Layer>,
    pub files: Vec<PathBuf>,
    pub warnings: Vec<String>,
}

/// The configuration from defaults, files, environment and flags.
pub fn configure(global: &Global, command: &Command) -> Result<Configured, Error> {
    let files = match &global.config {
        // The server sends its options. A file that has changed since is not to end a process that drives its GPU.
        _ if matches!(command, Command::DeviceProcess | Command::NpuProcess) => Vec::new(),
        // A package writes these, whatever the machine's configuration is.
        _ if matches!(command, Command::Completions { .. } | Command::ManPages { .. }) => Vec::new(),
        Some(path) => vec![path.clone()],
        None => system_files(&system_folder(command))?,
    };
    let mut layers = Vec::new();
    for path in &files {
        let text =
            file::read_text(path, MAX_BYTES).map_err(|error| Error::File { path: path.clone(), error })?;
        layers.push(Layer::file(&path.display().to_string(), &text)?);
    }
    let variables =
        std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)));
    let (environment, warnings) = Layer::environment(variables)?;
    layers.push(environment);
    layers.push(flags(global, command));
    let config = Config::from_layers(&layers)?;
    Ok(Configured { config, layers, files, warnings })
}

/// The folder of the system's files, on this machine or on the one that the doctor is to check.
fn system_folder(command: &Command) -> PathBuf {
    match command {
        Command::Doctor(args::Doctor { root: Some(root), .. }) => root.join(SYSTEM.trim_start_matches('/')),
        _ => std::env::var_os(SYSTEM_VARIABLE).map_or(SYSTEM.into(), PathBuf::from),
    }
}

/// The files in the system's folder, in the order in which they are read. None of them must be there.
fn system_files(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let at = |path: &Path| {
        let path = path.to_owned();
        |error| Error::File { path, error }
    };
    let main = folder.join("config.toml");
    let mut files = Vec::new();
    if main.try_exists().map_err(at(&main))? {
        files.push(main);
    }
    let more = folder.join("conf.d");
    let entries = match std::fs::read_dir(&more) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(files),
        Err(error) => return Err(at(&more)(error)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry.map_err(at(&more))?.file_name();
        let is_hidden = name.as_encoded_bytes().starts_with(b".");
        if !is_hidden && Path::new(&name).extension().is_some_and(|extension| extension == "toml") {
            names.push(name);
        }
        if names.len() > MAX_FILES {
            return Err(Error::Argument(format!("{}: more than {MAX_FILES} files", more.display())));
        }
    }
    names.sort();
    files.extend(names.iter().map(|name| more.join(name)));
    Ok(files)
}

/// The options that the command line sets.
fn flags(global: &Global, command: &Command) -> Layer {
    let mut flags = Layer::flags();
    set_global(&mut flags, global, command);
    set_model(&mut flags, command);
    set_memory(&mut flags, command);
    if let Command::Serve(args::Serve { name, host, port, api_key_file, .. }) = command {
        if let Some(name) = name {
            flags.set("model", "name", name.clone());
        }
        if let Some(host) = host {
            flags.set("server", "host", host.clone());
        }
        if let Some(port) = port {
            flags.set("server", "port", i64::from(*port));
        }
        if let Some(file) = api_key_file {
            flags.set("server", "api_key_file", file.clone());
        }
    }
    flags
}

fn set_global(flags: &mut Layer, global: &Global, command: &Command) {
    if let Some(device) = &global.device {
        flags.set("hardware", "device", device.clone());
    }
    if global.no_tune {
        flags.set("gpu", "tune", false);
    }
    if global.allow_software_vulkan {
        flags.set("hardware", "allow_software_vulkan", true);
    }
    // Comparisons with other implementations need exact f32. Explicit options override that, to measure the loss.
    let is_exact = matches!(command, Command::Eval(_) | Command::Quantize(_));
    if let Some(mode) = global.npu.or(is_exact.then_some(NpuMode::Off)) {
        flags.set("npu", "mode", mode.name());
    }
    if let Some(mode) = global.quantize {
        flags.set("model", "quantize", mode.name());
    }
    for (option, path) in [("config", &global.model_config), ("tokenizer", &global.tokenizer)] {
        if let Some(path) = path {
            flags.set("model", option, path.clone());
        }
    }
    if let Some(dir) = &global.models_dir {
        flags.set("models", "dir", dir.clone());
    }
    if let Some(context) = global.context {
        flags.set("engine", "context", i64::from(context));
    }
    if let Some(dtype) = global.kv.or(is_exact.then_some(KvDtype::F32)) {
        flags.set("kv", "dtype", dtype.name());
    }
    if let Some(precision) = global.precision.or(is_exact.then_some(Precision::F32)) {
        flags.set("model", "precision", precision.name());
    }
}

/// The model and the draft that a command names.
fn set_model(flags: &mut Layer, command: &Command) {
    let model = match command {
        Command::Serve(args::Serve { model, .. }) => model.model.as_deref(),
        Command::Generate(args::Generate { model, .. }) => model.model.as_deref(),
        Command::Doctor(args::Doctor { model, .. }) => model.as_deref(),
        Command::Chat(args::Chat { model, .. }) => model.model.as_deref(),
        Command::Bench(args) => args.model(),
        Command::Eval(args::Eval::Logits { model, .. } | args::Eval::Perplexity { model, .. }) => {
            Some(model.as_str())
        }
        Command::Devices { .. }
        | Command::Quantize(_)
        | Command::Inspect(_)
        | Command::Synth(_)
        | Command::Plan(_)
        | Command::Pull(_)
        | Command::Config(_)
        | Command::Models(_)
        | Command::Completions { .. }
        | Command::ManPages { .. }
        | Command::DeviceProcess
        | Command::NpuProcess => None,
        #[cfg(feature = "npu")]
        Command::Npu(_) => None,
    };
    if let Some(model) = model {
        flags.set("model", "path", model);
    }
    let draft = match command {
        Command::Serve(args::Serve { model, .. }) => model.draft.as_deref(),
        Command::Generate(args::Generate { model, .. }) => model.draft.as_deref(),
        Command::Chat(args::Chat { model, .. }) => model.draft.as_deref(),
        Command::Bench(args) => args.draft(),
        _ => None,
    };
    if let Some(draft) = draft {
        flags.set("model", "draft", draft);
    }
}

fn set_memory(flags: &mut Layer, command: &Command) {
    let memory = match command {
        Command::Serve(args::Serve { model, .. }) => Some(&model.memory),
        Command::Generate(args::Generate { model, .. }) => Some(&model.memory),
        Command::Chat(args::Chat { model, .. }) => Some(&model.memory),
        Command::Bench(args) => args.memory(),
        Command::Plan(args::Plan { memory, .. }) => Some(memory),
        _ => None,
    };
    if let Some(memory) = memory {
        for (option, bytes) in [("vram", memory.vram), ("gtt", memory.gtt), ("reserve", memory.reserve)] {
            if let Some(bytes) = bytes {
                flags.set("memory", option, bytes.to_string());
            }
        }
        if let Some(heap) = memory.ffn_heap {
            flags.set("memory", "ffn_heap", heap.name());
        }
    }
}
