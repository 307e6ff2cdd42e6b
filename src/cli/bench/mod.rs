//! `unicorn bench`: measures the engine in this process, a model's steps, kernels alone, or a server from its clients'
//! side. It also predicts the speed of GPUs that are not here, from what their compilers make of the kernels.

mod client;
mod engine;
mod isa;
mod kernels;
mod model;
mod prompts;
pub(crate) mod report;
mod serve;
mod soak;
pub(crate) mod statistics;

use super::args::{self, Benchmarked};
use super::error::Error;
use crate::config::Config;
use crate::npu;

pub fn bench(config: &Config, args: &args::Bench) -> Result<(), Error> {
    match args.benchmarked() {
        Benchmarked::Engine(args) => engine::engine(config, args),
        Benchmarked::Kernels(args) => kernels::kernels(config, args),
        Benchmarked::Model(args) => model::model(config, args),
        Benchmarked::Npu(args) => npu::cli::bench(config, args),
        Benchmarked::Serve(args) => match args.soak {
            None => serve::serve(args),
            Some(length) => soak::soak(args, length),
        },
        Benchmarked::Isa(args) => isa::isa(config, args),
    }
}
