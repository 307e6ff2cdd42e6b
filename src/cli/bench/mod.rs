//! `unicorn bench`: measures the engine in this process, or a server as its clients see it.

pub(crate) mod client;
mod engine;
mod prompts;
pub(crate) mod report;
pub(crate) mod serve;
pub(crate) mod statistics;

use super::args::{self, Benchmarked};
use super::error::Error;
use crate::config::Config;
use crate::npu;

pub fn bench(config: &Config, args: &args::Bench) -> Result<(), Error> {
    match args.benchmarked() {
        Benchmarked::Engine(args) => engine::engine(config, args),
        Benchmarked::Npu(args) => npu::cli::bench(config, args),
        Benchmarked::Serve(args) => serve::serve(args),
    }
}
