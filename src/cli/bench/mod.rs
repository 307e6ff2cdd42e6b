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

use super::args::{self, What};
use super::error::Error;
use crate::config::Config;

pub fn bench(config: &Config, args: &args::Bench) -> Result<(), Error> {
    match args.what() {
        What::Engine(args) => engine::engine(config, args),
        What::Kernels(args) => kernels::kernels(config, args),
        What::Model(args) => model::model(config, args),
        What::Serve(args) => serve::serve(args),
        What::Isa(args) => isa::isa(config, args),
    }
}
