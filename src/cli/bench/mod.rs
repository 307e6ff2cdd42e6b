//! `unicorn bench`: measures the engine in this process, or a server as its clients see it.

pub(crate) mod client;
mod engine;
mod prompts;
pub(crate) mod serve;
pub(crate) mod statistics;

use super::args::{self, Benchmark};
use super::error::Error;
use crate::config::Config;
use crate::npu;

pub fn bench(config: &Config, args: &args::Bench) -> Result<(), Error> {
    match &args.what {
        None => engine::engine(config, &args.engine),
        Some(Benchmark::Engine(args)) => engine::engine(config, args),
        Some(Benchmark::Npu(args)) => npu::cli::bench(config, args),
        Some(Benchmark::Serve(args)) => serve::serve(args),
    }
}
