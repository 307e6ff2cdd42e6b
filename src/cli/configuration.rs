//! The configuration of a command: from files, then the environment, then the command line. Later values win.
//!
//! Without `--config`, the files are `/etc/unicorn/config.toml` and then `/etc/unicorn/conf.d/*.toml`, sorted by name.
//! `UNICORN_CONFIG_DIR` replaces `/etc/unicorn`. `unicorn doctor --root FOLDER` reads `FOLDER/etc/unicorn`.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{ArgMatches, Id};

use super::args::MODEL;
use super::error::Error;
use crate::config::{Config, Layer, NpuMode};
use crate::file;
use crate::tensor::{KvDtype, Precision, VisionMode};

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

/// The configuration from defaults, files, environment and command line. The configuration files are those of this
/// machine, or of the machine that has its files in `root`. A command without the option `--config` reads no files.
pub fn configure(matches: &ArgMatches, root: Option<&Path>) -> Result<Configured, Error> {
    let files = match last(matches).try_get_one::<PathBuf>("config") {
        Err(_) => Vec::new(),
        Ok(Some(path)) => vec![path.clone()],
        Ok(None) => system_files(&match root {
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
    layers.push(flags(matches));
    let config = Config::from_layers(&layers)?;
    Ok(Configured { config, layers, files, warnings })
}

/// How often the command line has `-v`.
pub fn verbosity(matches: &ArgMatches) -> u8 {
    last(matches).try_get_one("verbose").ok().flatten().copied().unwrap_or(0)
}

/// The arguments of the command, which may be a subcommand of a subcommand.
fn last(matches: &ArgMatches) -> &ArgMatches {
    matches.subcommand().map_or(matches, |(_, arguments)| last(arguments))
}

/// The options that the command line sets: the arguments whose id is the name of an option, and [`MODEL`].
fn flags(matches: &ArgMatches) -> Layer {
    let mut flags = Layer::flags();
    // The results of these commands are compared with those of other implementations, so they compute in f32. Options of
    // the command line override this, to measure the loss of other types.
    if let Some("eval" | "quantize") = matches.subcommand_name() {
        flags.set("npu.mode", NpuMode::Off.name());
        flags.set("kv.dtype", KvDtype::F32.name());
        flags.set("model.precision", Precision::F32.name());
    }
    // The other commands take texts only, or no model.
    if !matches!(matches.subcommand_name(), Some("serve" | "device-process" | "plan" | "config")) {
        flags.set("model.vision", VisionMode::Off.name());
    }
    let matches = last(matches);
    if let Ok(Some(model)) = matches.try_get_one::<String>(MODEL) {
        flags.set("model.path", model);
    }
    for id in matches.ids().map(Id::as_str).filter(|id| id.contains('.')) {
        if matches.value_source(id) == Some(ValueSource::CommandLine) {
            let text = matches.get_raw(id).and_then(|mut values| values.next()?.to_str());
            // A size is set in bytes.
            let bytes = matches.try_get_one(id).ok().flatten().map(u64::to_string);
            flags.set(id, bytes.as_deref().or(text).expect("options of the configuration have UTF-8 values"));
        }
    }
    flags
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
