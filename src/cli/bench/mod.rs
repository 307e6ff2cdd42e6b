//! `unicorn bench`: measures the engine of this process, a model's steps, kernels alone, or a server over HTTP as its clients
//! see it; or has the compilers of GPUs that are not here judge the kernels.

mod client;
mod engine;
mod isa;
mod kernels;
mod model;
mod prompts;
mod report;
mod serve;
mod statistics;

use super::args::{self, Benchmarked};
use super::error::Error;
use crate::config::Config;

pub fn bench(config: &Config, args: &args::Bench) -> Result<(), Error> {
    match args.benchmarked() {
        Benchmarked::Engine(args) => engine::engine(config, args),
        Benchmarked::Kernels(args) => kernels::kernels(config, args),
        Benchmarked::Model(args) => model::model(config, args),
        Benchmarked::Serve(args) => serve::serve(args),
        Benchmarked::Isa(args) => isa::isa(config, args),
    }
}
