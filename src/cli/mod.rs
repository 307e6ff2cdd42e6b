//! The commands of the binary: parses the command line, runs the command, and prints errors.
//!
//! Every failure prints one line, `error: ...`, and exits with code 1. If the command line cannot be parsed, the exit
//! code is 2. `serve` has more exit codes, which show a supervisor whether a restart may help
//! (`error::Error::exit_code`). Answers and results go to standard output, everything else to standard error. Only
//! `load` loads a model onto a device. No file here uses Vulkan types.

pub(crate) mod args;
pub(crate) mod bench;
mod chat;
mod config_command;
pub(crate) mod configuration;
mod device_process;
mod devices;
pub(crate) mod doctor;
pub(crate) mod energy;
pub(crate) mod error;
mod eval;
mod generate;
mod inspect;
mod kv;
pub(crate) mod load;
pub(crate) mod log;
mod manual;
pub(crate) mod models;
mod names;
mod plan;
pub(crate) mod process;
pub(crate) mod progress;
mod pull;
mod quantize;
mod remote;
mod serve;
pub(crate) mod terminal;
pub(crate) mod version;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use clap::{ArgMatches, CommandFactory as _, FromArgMatches as _};
use tracing_subscriber::EnvFilter;

use args::{Command, CommandLine, KvCommand, Models};
use configuration::{Configured, configure, verbosity};
use error::Error;
use log::Log;
pub use manual::command_line;
use progress::EraseOnInterrupt;
use serve::Reload;

use crate::config::Config;
use crate::npu::cli as npu;

/// Runs the process's command line.
pub fn main() -> ExitCode {
    // clap handles only the short version (`-V`). The long one queries the drivers of the machine.
    if std::env::args_os().nth(1).is_some_and(|argument| argument == "--version") {
        return match version::version() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                log::say(format_args!("error: {error}"));
                ExitCode::FAILURE
            }
        };
    }
    let matches = CommandLine::command().get_matches();
    let CommandLine { command } =
        CommandLine::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let serving = matches!(command, Command::Serve(_) | Command::DeviceProcess | Command::NpuProcess);
    // These commands use the exit codes of `serve`.
    let with_codes = serving || matches!(command, Command::Config(_));
    let root = if let Command::Doctor(args) = &command { args.root.clone() } else { None };
    let (configured, verbose) = (configure(&matches, root.as_deref()), verbosity(&matches));
    let ended =
        run_logged(configured, verbose, serving, |configured, log| run(command, matches, configured, log));
    exit_code(ended, |error| if with_codes { error.exit_code().into() } else { ExitCode::FAILURE })
}

/// Starts the log and runs a command with it. A panic is an error.
pub(crate) fn run_logged(
    configured: Result<Configured, Error>,
    verbose: u8,
    serving: bool,
    run: impl FnOnce(Configured, &Log) -> Result<(), Error>,
) -> Result<(), Error> {
    let configured = configured?;
    // The log is dropped before the error is printed, so that the error is the last line.
    let format = configured.config.log.format;
    let log = Log::start(log_filter(verbose, serving, &configured.config), format, serving);
    tracing::debug!("configuration files: {}", configured.sources());
    configured.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    catch_unwind(AssertUnwindSafe(|| run(configured, &log))).unwrap_or(Err(Error::Panicked))
}

/// Prints the error of a command, if it failed, and returns the exit code of the process.
pub(crate) fn exit_code(ended: Result<(), Error>, of_error: impl Fn(&Error) -> ExitCode) -> ExitCode {
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of a pipe has closed it (`| head`), which is not an error.
        Err(Error::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            log::say(format_args!("error: {error}"));
            of_error(&error)
        }
    }
}

fn run(
    mut command: Command,
    matches: ArgMatches,
    mut configured: Configured,
    log: &Log,
) -> Result<(), Error> {
    let _erased = match &command {
        Command::Pull(_) | Command::Quantize(_) => Some(EraseOnInterrupt::watch(Some(
            "interrupted: run the same command again to continue where it stopped",
        ))),
        // These handle Ctrl-C themselves.
        Command::Serve(_)
        | Command::Chat(_)
        | Command::Run(_)
        | Command::DeviceProcess
        | Command::NpuProcess => None,
        #[cfg(feature = "npu")]
        Command::Npu(_) => None,
        _ => Some(EraseOnInterrupt::watch(None)),
    };
    models::locate(&mut configured.config, &mut command)?;
    let config = &configured.config;
    match command {
        Command::Serve(args) => {
            let (verbose, level) = (verbosity(&matches), log.level.clone());
            let set_log = move |config: &Config| {
                let filter = log_filter(verbose, true, config);
                let text = filter.to_string();
                level.set(filter);
                text
            };
            let reread = move || configure(&matches, None);
            let filter = log_filter(verbose, true, config).to_string();
            serve::serve(
                config,
                args.root.as_deref(),
                Reload { reread: std::sync::Arc::new(reread), set_log: Box::new(set_log) },
                filter,
            )
        }
        Command::Generate(args) => generate::generate(config, &args.sampling, &args.prompt),
        Command::Chat(args) => chat::chat(config, args.sampling, !args.no_history),
        Command::Devices(args) => devices::devices(args.json),
        Command::Doctor(args) => doctor::doctor(config, &args),
        Command::Eval(args) => eval::eval(config, args),
        Command::Quantize(args) => quantize::quantize(config, &args),
        Command::Inspect(args) => inspect::inspect(config, &args),
        Command::Plan(args) => plan::plan(config, &args),
        Command::Bench(args) => bench::bench(config, &args),
        Command::Pull(args) => remote::pull(config, &args),
        Command::Run(args) => remote::run(config, args),
        Command::List(args) => remote::list(config, &args),
        Command::Ps(args) => remote::ps(config, &args),
        Command::Show(args) => remote::show(config, &args),
        Command::Stop(args) => remote::stop(config, &args),
        Command::Rm(args) => remote::rm(config, &args),
        Command::Config(command) => config_command::config(&configured, &command),
        Command::Completions { shell } => manual::completions(shell),
        Command::ManPages { folder } => manual::pages(&folder),
        Command::DeviceProcess => device_process::device_process(log.level.clone()),
        #[cfg(feature = "npu")]
        Command::Npu(args::Npu::BuildKernels(args)) => npu::build_kernels(config, &args),
        #[cfg(feature = "npu")]
        Command::Npu(args::Npu::List(args)) => npu::list(config, &args.folder),
        Command::NpuProcess => npu::npu_process(),
        Command::Kv(KvCommand::Clear(_)) => kv::clear(&config.kv_disk),
        Command::Models(Models::List(args)) => models::list(config, args.json),
        Command::Models(Models::Rm(args)) => models::remove(config, &args.name, args.yes),
    }
}

/// The log level: `info` for a server, `warn` for other commands. The option `log.level` overrides that, `-v` overrides
/// the option, and `RUST_LOG` overrides everything.
fn log_filter(verbose: u8, serving: bool, config: &Config) -> EnvFilter {
    let level = match (verbose, serving, &config.log.level) {
        (0, _, Some(level)) => level,
        (0, false, None) => "warn",
        (0, true, None) => "info",
        (1, ..) => "info,unicorn=debug",
        _ => "debug,unicorn=trace",
    };
    EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level))
}
