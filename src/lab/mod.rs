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

use clap::{CommandFactory, Parser};

use self::args::{Command, CommandLine};
use crate::cli::configuration::{Options, configure_from};
use crate::cli::error::Error;
use crate::cli::progress::EraseOnInterrupt;
use crate::cli::{exit_code, models, run_logged};
use crate::config::Config;

/// Runs the process's command line.
pub fn main() -> ExitCode {
    let CommandLine { command } = CommandLine::parse();
    let options = options(&command);
    let verbose = options.as_ref().map_or(0, |(common, _)| common.verbose);
    let configured = configure_from(options, None);
    let ended = run_logged(configured, verbose, false, |mut configured, _| {
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

fn options(command: &Command) -> Options<'_> {
    Some(match command {
        Command::Isa(args) => (&args.common, vec![&args.quantize, &args.precision, &args.kv]),
        Command::Kernels(args) => (&args.common, vec![&args.device, &args.precision, &args.kv]),
        Command::Model(args) => (&args.common, vec![&args.model, &args.npu]),
        Command::Synth(args) => (&args.common, vec![]),
        Command::Soak(args) => (&args.common, vec![]),
        Command::NpuProcess => return None,
    })
}

/// clap's description of the command line, without the command `help`.
pub fn command_line() -> clap::Command {
    CommandLine::command().disable_help_subcommand(true)
}
