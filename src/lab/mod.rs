//! The laboratory, the library of the binary `unicorn-lab`: measures kernels and the steps of a model, predicts the
//! speed of GPUs that are not present, writes checkpoints of random weights, and soak-tests a server.
//!
//! The server does not use this module, and no other module imports it. The packages do not contain the binary.

mod args;
pub mod assembly;
mod comparison;
pub mod cost;
mod isa;
pub mod judge;
pub mod kernel_cases;
mod kernels;
mod model;
mod soak;
mod synth;

use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _};

use self::args::{Command, CommandLine};
use crate::cli::configuration::{configure, verbosity};
use crate::cli::error::Error;
use crate::cli::progress::EraseOnInterrupt;
use crate::cli::{exit_code, models, run_logged};
use crate::config::Config;

/// Runs the process's command line.
pub fn main() -> ExitCode {
    let matches = CommandLine::command().get_matches();
    let CommandLine { command } =
        CommandLine::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let ended = run_logged(configure(&matches, None), verbosity(&matches), false, |mut configured, _| {
        let advice = "interrupted: run the same command again to continue where it stopped";
        let _erased = match &command {
            Command::NpuProcess => None,
            Command::Synth(_) => Some(EraseOnInterrupt::watch(Some(advice))),
            _ => Some(EraseOnInterrupt::watch(None)),
        };
        if let Command::Model(_) = command {
            models::locate_configured(&mut configured.config)?;
        }
        run(&command, &configured.config)
    });
    exit_code(ended, |_| ExitCode::FAILURE)
}

fn run(command: &Command, config: &Config) -> Result<(), Error> {
    match command {
        Command::Isa(args) => isa::isa(config, args),
        Command::Kernels(args) => kernels::kernels(config, args),
        Command::Model(args) => model::model(config, args),
        Command::Synth(args) => synth::synth(args),
        Command::Soak(args) => soak::soak(args),
        Command::NpuProcess => crate::npu::cli::npu_process(),
    }
}

/// clap's description of the command line, without the command `help`.
pub fn command_line() -> clap::Command {
    CommandLine::command().disable_help_subcommand(true)
}
