//! The configuration of a command: from files, then the environment, then the command line. Later values win.
//!
//! Without `--config`, the files are `/etc/unicorn/config.toml` and then `/etc/unicorn/conf.d/*.toml`, sorted by name.
//! `UNICORN_CONFIG_DIR` replaces `/etc/unicorn`. `unicorn doctor --root FOLDER` reads `FOLDER/etc/unicorn`.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::args::{self, Bench, Benchmarked, Command, Common, ConfigCommand, Eval, Models};
use super::error::Error;
use crate::config::{Config, Layer, NpuMode};
use crate::file;
use crate::tensor::{KvDtype, Precision};

const SYSTEM: &str = "/etc/unicorn";
const SYSTEM_VARIABLE: &str = "UNICORN_CONFIG_DIR";
/// Maximum bytes of a configuration file.
const MAX_BYTES: u64 = 1 << 20;
/// Maximum number of files in `conf.d`.
const MAX_FILES: usize = 256;

/// A configuration, its sources, and the warnings about it.
pub struct Configured {
    pub config: Config,
    /// Later layers win.
    pub layers: Vec<Layer>,
    pub files: Vec<PathBuf>,
    pub warnings: Vec<String>,
}

impl Configured {
    /// A description of the configuration files for the user.
    pub fn sources(&self) -> String {
        match self.files.is_empty() {
            true => "none, all options have their defaults".into(),
            false => self.files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(", "),
        }
    }
}

/// The options of a command that every command has, and its groups of options that set configuration options, of which
/// later ones win. `None`: the command reads no configuration.
pub(crate) type Options<'a> = Option<(&'a Common, Vec<&'a dyn ConfigOptions>)>;

/// The configuration of a command.
pub fn configure(command: &Command) -> Result<Configured, Error> {
    let root = match command {
        Command::Doctor(args::Doctor { root, .. }) => root.as_deref(),
        _ => None,
    };
    configure_from(options(command), root)
}

/// The configuration from defaults, files, environment and the options of a command. The configuration files are those
/// of this machine, or of the machine that has its files in `root`.
pub(crate) fn configure_from(options: Options<'_>, root: Option<&Path>) -> Result<Configured, Error> {
    let files = match &options {
        None => Vec::new(),
        Some((Common { config: Some(path), .. }, _)) => vec![path.clone()],
        Some(_) => system_files(&match root {
            Some(root) => root.join(SYSTEM.trim_start_matches('/')),
            None => std::env::var_os(SYSTEM_VARIABLE).map_or(SYSTEM.into(), PathBuf::from),
        })?,
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
    let mut flags = Layer::flags();
    options.into_iter().flat_map(|(_, groups)| groups).for_each(|group| group.set(&mut flags));
    layers.push(flags);
    let config = Config::from_layers(&layers)?;
    Ok(Configured { config, layers, files, warnings })
}

/// How often the command line has `-v`.
pub fn verbosity(command: &Command) -> u8 {
    options(command).map_or(0, |(common, _)| common.verbose)
}

/// The configuration files in the system's folder, in the order in which they are read. All of them are optional.
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

/// Options of the command line that set options of the configuration.
pub(crate) trait ConfigOptions {
    fn set(&self, flags: &mut Layer);
}

fn options(command: &Command) -> Options<'_> {
    Some(match command {
        Command::Serve(args) => (&args.options.common, vec![&args.options]),
        Command::Config(ConfigCommand::Check(options) | ConfigCommand::Show(options)) => {
            (&options.common, vec![options])
        }
        Command::Generate(args) => (&args.common, vec![&args.engine]),
        Command::Chat(args) => (&args.common, vec![&args.engine]),
        Command::Devices(args) => (&args.common, vec![]),
        Command::Doctor(args) => (&args.common, vec![args]),
        Command::Eval(Eval::Logits(args)) => (&args.evaluated.common, vec![&Exact, &args.evaluated]),
        Command::Eval(Eval::Perplexity(args)) => {
            (&args.evaluated.common, vec![&Exact, &args.evaluated, &args.tokenizer])
        }
        Command::Quantize(args) => (&args.common, vec![&Exact, &args.tokenizer, &args.load, &args.npu]),
        Command::Inspect(args) => (&args.common, vec![&args.files]),
        Command::Plan(args) => (&args.common, vec![&args.quantize, &args.npu, &args.fit, &args.memory]),
        Command::Bench(args) => options_of_benchmark(args),
        Command::Pull(args) => (&args.common, vec![&args.models_dir]),
        Command::Models(Models::List(args)) => (&args.common, vec![&args.models_dir]),
        Command::Models(Models::Rm(args)) => (&args.common, vec![&args.models_dir]),
        #[cfg(feature = "npu")]
        Command::Npu(args::Npu::BuildKernels(args)) => (&args.common, vec![&args.files]),
        #[cfg(feature = "npu")]
        Command::Npu(args::Npu::List(args)) => (&args.common, vec![]),
        // The build of a package runs these. Their output must not depend on the configuration of the machine.
        Command::Completions { .. } | Command::ManPages { .. } => return None,
        // The server sends its options to these processes. They must not read a file that has changed since its start.
        Command::DeviceProcess | Command::NpuProcess => return None,
    })
}

fn options_of_benchmark(args: &Bench) -> (&Common, Vec<&dyn ConfigOptions>) {
    match args.benchmarked() {
        Benchmarked::Engine(args) => (&args.common, vec![&args.engine]),
        Benchmarked::Npu(args) => (&args.common, vec![&args.model]),
        Benchmarked::Serve(args) => (&args.common, vec![]),
    }
}

/// Overrides options of the configuration, so that commands whose results are compared with other implementations
/// compute in f32. Options of the command line override these again, to measure the loss of other types.
struct Exact;

impl ConfigOptions for Exact {
    fn set(&self, flags: &mut Layer) {
        flags.set("npu", "mode", NpuMode::Off.name());
        flags.set("kv", "dtype", KvDtype::F32.name());
        flags.set("model", "precision", Precision::F32.name());
    }
}

impl ConfigOptions for args::ServeOptions {
    fn set(&self, flags: &mut Layer) {
        let Self { engine, name, host, port, api_key_file, common: _ } = self;
        engine.set(flags);
        flags.set_given("model", "name", name.clone());
        flags.set_given("server", "host", host.clone());
        flags.set_given("server", "port", port.map(i64::from));
        flags.set_given("server", "api_key_file", api_key_file.clone());
    }
}

impl ConfigOptions for args::EngineOptions {
    fn set(&self, flags: &mut Layer) {
        let Self { model, draft, npu } = self;
        model.set(flags);
        flags.set_given("model", "draft", draft.clone());
        npu.set(flags);
    }
}

impl ConfigOptions for args::ModelOptions {
    fn set(&self, flags: &mut Layer) {
        let Self { model, quantize, tokenizer, load, memory } = self;
        flags.set_given("model", "path", model.clone());
        quantize.set(flags);
        tokenizer.set(flags);
        load.set(flags);
        memory.set(flags);
    }
}

impl ConfigOptions for args::Evaluated {
    fn set(&self, flags: &mut Layer) {
        let Self { model, quantize, load, npu, common: _ } = self;
        flags.set("model", "path", model.clone());
        quantize.set(flags);
        load.set(flags);
        npu.set(flags);
    }
}

impl ConfigOptions for args::Doctor {
    fn set(&self, flags: &mut Layer) {
        flags.set_given("model", "path", self.model.clone());
        self.quantize.set(flags);
        self.npu.set(flags);
        self.fit.set(flags);
    }
}

impl ConfigOptions for args::LoadOptions {
    fn set(&self, flags: &mut Layer) {
        let Self { fit, precision, no_tune } = self;
        fit.set(flags);
        precision.set(flags);
        flags.set_given("gpu", "tune", no_tune.then_some(false));
    }
}

impl ConfigOptions for args::FitOptions {
    fn set(&self, flags: &mut Layer) {
        let Self { device, files, context, kv } = self;
        device.set(flags);
        files.set(flags);
        flags.set_given("engine", "context", context.map(i64::from));
        kv.set(flags);
    }
}

impl ConfigOptions for args::DeviceOptions {
    fn set(&self, flags: &mut Layer) {
        let Self { device, allow_software_vulkan } = self;
        flags.set_given("hardware", "device", device.clone());
        flags.set_given("hardware", "allow_software_vulkan", allow_software_vulkan.then_some(true));
    }
}

impl ConfigOptions for args::FileOptions {
    fn set(&self, flags: &mut Layer) {
        let Self { models_dir, model_config } = self;
        models_dir.set(flags);
        flags.set_given("model", "config", model_config.clone());
    }
}

impl ConfigOptions for args::MemoryOptions {
    fn set(&self, flags: &mut Layer) {
        let Self { vram, gtt, reserve, ffn_heap } = self;
        for (option, bytes) in [("vram", vram), ("gtt", gtt), ("reserve", reserve)] {
            flags.set_given("memory", option, bytes.map(|bytes| bytes.to_string()));
        }
        flags.set_given("memory", "ffn_heap", ffn_heap.map(|heap| heap.name()));
    }
}

impl ConfigOptions for args::ModelsDirOption {
    fn set(&self, flags: &mut Layer) {
        flags.set_given("models", "dir", self.models_dir.clone());
    }
}

impl ConfigOptions for args::TokenizerOption {
    fn set(&self, flags: &mut Layer) {
        flags.set_given("model", "tokenizer", self.tokenizer.clone());
    }
}

impl ConfigOptions for args::QuantizeOption {
    fn set(&self, flags: &mut Layer) {
        flags.set_given("model", "quantize", self.quantize.map(|mode| mode.name()));
    }
}

impl ConfigOptions for args::PrecisionOption {
    fn set(&self, flags: &mut Layer) {
        flags.set_given("model", "precision", self.precision.map(|precision| precision.name()));
    }
}

impl ConfigOptions for args::KvOption {
    fn set(&self, flags: &mut Layer) {
        flags.set_given("kv", "dtype", self.kv.map(|dtype| dtype.name()));
    }
}

impl ConfigOptions for args::NpuOption {
    fn set(&self, flags: &mut Layer) {
        flags.set_given("npu", "mode", self.npu.map(|mode| mode.name()));
    }
}
