//! The commands of the binary: parses the command line, runs the command, and prints errors.
//!
//! Every failure is one line, `error: ...`, with exit code 1. A command line that cannot be parsed exits with code 2.
//! `serve` has exit codes that tell a supervisor whether to start it again (`error::Error::exit_code`). Answers and
//! results go to standard output, everything else to standard error. Only `load` brings a model onto a device. No
//! file here names a Vulkan type.

mod args;
mod bench;
mod device_process;
mod devices;
mod error;
mod eval;
mod generate;
mod inspect;
mod load;
mod log;
mod models;
mod plan;
mod process;
mod progress;
mod pull;
mod quantize;
mod serve;
mod synth;
mod terminal;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use args::{Command, CommandLine, Global};
use error::Error;
use log::Log;
use serve::Reload;

use crate::config::{Config, Layer};
use crate::tensor::{KvDtype, Precision};

/// Runs the process's command line.
pub fn main() -> ExitCode {
    let CommandLine { global, command } = CommandLine::parse();
    let serving = matches!(command, Command::Serve(_) | Command::DeviceProcess);
    let ended = config(&global, &command).and_then(|(config, warnings)| {
        // The log is dropped before the error is printed, so that the error is the last line. The journal adds its own
        // times.
        let with_time = serving && std::env::var_os("JOURNAL_STREAM").is_none();
        let log = Log::start(log_filter(&global, serving, &config), with_time);
        warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        let run = AssertUnwindSafe(|| run(&global, command, config, &log));
        catch_unwind(run).unwrap_or(Err(Error::Panicked))
    });
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        // A reader that closed its end (`| head`) has read what it needed.
        Err(Error::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            log::say(format_args!("error: {error}"));
            if serving { error.exit_code().into() } else { ExitCode::FAILURE }
        }
    }
}

fn run(global: &Global, mut command: Command, mut config: Config, log: &Log) -> Result<(), Error> {
    models::locate(&mut config, &mut command)?;
    match command {
        Command::Serve(args) => {
            let (level, global) = (log.level.clone(), global.clone());
            let set_log = {
                let global = global.clone();
                move |config: &Config| {
                    let filter = log_filter(&global, true, config);
                    let text = filter.to_string();
                    level.set(filter);
                    text
                }
            };
            let reread = {
                let global = global.clone();
                move || self::config(&global, &Command::Serve(args.clone()))
            };
            let filter = log_filter(&global, true, &config).to_string();
            serve::serve(&config, Reload { reread: Box::new(reread), set_log: Box::new(set_log) }, filter)
        }
        Command::Generate(args) => generate::generate(&config, args),
        Command::Chat(args) => generate::chat(&config, args),
        Command::Devices => devices::devices(),
        Command::Eval(args) => eval::eval(&config, args),
        Command::Quantize(args) => quantize::quantize(&config, &args),
        Command::Inspect(args) => inspect::inspect(&config, &args),
        Command::Synth(args) => synth::synth(&args),
        Command::Plan(args) => plan::plan(&config, &args),
        Command::Bench(args) => bench::bench(&config, &args),
        Command::Pull(args) => pull::pull(&config, &args.name),
        Command::DeviceProcess => device_process::device_process(log.level.clone()),
        Command::Models(args::Models::List { json }) => models::list(&config, json),
        Command::Models(args::Models::Rm { name, yes }) => models::remove(&config, &name, yes),
    }
}

/// The log level: `info` for a server, `warn` for other commands. The option `log.level` overrides that, `-v` overrides
/// the option, and `RUST_LOG` overrides everything.
fn log_filter(global: &Global, serving: bool, config: &Config) -> EnvFilter {
    let level = match (global.verbose, serving, &config.log.level) {
        (0, _, Some(level)) => level,
        (0, false, None) => "warn",
        (0, true, None) => "info",
        (1, ..) => "info,unicorn=debug",
        _ => "debug,unicorn=trace",
    };
    EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level))
}

/// The configuration from defaults, file, environment and flags, with the warnings about it.
fn config(global: &Global, command: &Command) -> Result<(Config, Vec<String>), Error> {
    let mut layers = Vec::new();
    if let Some(path) = &global.config {
        let text =
            std::fs::read_to_string(path).map_err(|error| Error::File { path: path.clone(), error })?;
        layers.push(Layer::file(&path.display().to_string(), &text)?);
    }
    let variables =
        std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)));
    let (environment, warnings) = Layer::environment(variables)?;
    layers.push(environment);

    layers.push(flags(global, command));
    Ok((Config::from_layers(&layers)?, warnings))
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
    // Comparisons with other implementations need exact f32. Explicit options override that, to measure the loss.
    let is_exact = matches!(command, Command::Eval(_) | Command::Quantize(_));
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
        Command::Chat(args::Chat { model, .. }) => model.model.as_deref(),
        Command::Bench(args) => args.model(),
        Command::Eval(args::Eval::Logits { model, .. } | args::Eval::Perplexity { model, .. }) => {
            Some(model.as_str())
        }
        Command::Devices
        | Command::Quantize(_)
        | Command::Inspect(_)
        | Command::Synth(_)
        | Command::Plan(_)
        | Command::Pull(_)
        | Command::Models(_)
        | Command::DeviceProcess => None,
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
