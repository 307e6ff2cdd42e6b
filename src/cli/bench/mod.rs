//! `unicorn bench`: measures the engine of this process, or a server over HTTP as its clients see it.

mod client;
mod engine;
mod prompts;
mod serve;
mod statistics;

pub use engine::resident_bytes;

use super::args;
use super::error::Error;
use crate::config::Config;

pub fn bench(config: &Config, args: &args::Bench) -> Result<(), Error> {
    match (args.engine(), &args.what) {
        (_, Some(args::Benchmark::Serve(args))) => serve::serve(args),
        (Some(args), _) => engine::engine(config, args),
        (None, _) => unreachable!("what is not a server is the engine"),
    }
}
