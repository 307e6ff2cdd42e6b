//! The command line of `unicorn-lab`, as clap parses it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand};

use crate::cli::args::{
    Common, DeviceOptions, KvOption, ModelOptions, NpuOption, PrecisionOption, QuantizeOption, Schemes,
    ServerOptions, Target,
};
use crate::model::arch;
use crate::model::spec::Shape;

#[derive(Debug, Parser)]
#[command(name = "unicorn-lab", version, about = "Measures and predicts the Unicorn Execution Engine", long_about = None)]
pub struct CommandLine {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Compile every kernel for an AMD GPU, which this machine need not have, and predict the speed of each model size
    /// from the assembly
    ///
    /// --quantize selects the type of the weights [default: int4-g128-emb8], --kv the type of keys and values (auto is
    /// f16 here). If Mesa 26 is in the current folder (`make setup-devices`), it compiles the kernels too.
    Isa(Isa),
    /// Measure each hot kernel alone at the shapes of published models, and compare it with the limits of the device
    ///
    /// --kv selects the type of keys and values (auto is f16 here).
    Kernels(Kernels),
    /// Measure the steps of a model without the engine: prompts of several lengths, and decodes of several batch sizes
    /// at several context depths
    Model(Box<Model>),
    /// Write a native checkpoint of random weights in the shape of a published model
    Synth(Synth),
    /// Send requests to every route of this project's server for a time, and check that equal requests get equal
    /// answers, and that nothing is lost or leaks
    Soak(Soak),
    /// Run the NPU for the process that holds the model, which starts this process
    #[command(hide = true)]
    NpuProcess,
}

#[derive(Debug, Args)]
pub struct Budget {
    /// Longest time for the whole benchmark; cases that have not begun by then are skipped
    #[arg(long, value_name = "SECONDS")]
    pub budget_s: Option<u32>,
}

impl Budget {
    /// Starts the time, and returns a function that says why no further case may begin. `None` = it may.
    pub fn start(&self) -> impl Fn() -> Option<String> {
        let (since, budget) = (Instant::now(), self.budget_s);
        move || {
            let over = budget.filter(|budget| since.elapsed() >= Duration::from_secs((*budget).into()))?;
            Some(format!("the {over} s of --budget-s are over"))
        }
    }
}

#[derive(Debug, Args)]
pub struct Isa {
    /// The GPU: phoenix (Radeon 780M), gfx1150 (890M) or gfx1151 (8060S)
    #[arg(long, value_name = "GPU", default_value = "phoenix")]
    pub device: String,
    /// Predict only these sizes [default: all]
    #[arg(long, value_name = "SHAPE,...", value_delimiter = ',', value_parser = arch::shape)]
    pub shape: Vec<Shape>,
    /// Tokens in each sequence's KV cache at the predicted decode step
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(..=131_071))]
    pub depth: u32,
    /// Compile only the pipelines that the predictions use, which takes a fraction of the time
    #[arg(long)]
    pub used: bool,
    /// Also write the assembly of every compiled pipeline, one file each
    #[arg(long, value_name = "FOLDER")]
    pub assembly: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Compile the pipelines that standard input lists on the device that the environment selects, and print the result. The
    /// command runs itself with this option
    #[arg(long, hide = true)]
    pub compile: bool,
    #[command(flatten)]
    pub quantize: QuantizeOption,
    #[command(flatten)]
    pub precision: PrecisionOption,
    #[command(flatten)]
    pub kv: KvOption,
    #[command(flatten)]
    pub common: Common,
}

#[derive(Debug, Args)]
pub struct Kernels {
    #[arg(long, help = arch::shape_names(", "), value_name = "SHAPE,...", value_delimiter = ',', default_value = arch::measured_shapes(),
          value_parser = arch::shape)]
    pub shape: Vec<Shape>,
    /// Schemes of the layers' matrices: int4-g32, int4-g128, int8-row, bf16
    #[arg(long, value_name = "SCHEME,...", value_delimiter = ',', default_value = "int4-g32,int4-g128")]
    pub scheme: Vec<Target>,
    /// Scheme of the embedding, which is also the output head
    #[arg(long, value_name = "SCHEME", default_value = "int8-row")]
    pub embedding: Target,
    /// Tokens of a step
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,8,128",
          value_parser = clap::value_parser!(u32).range(1..=8192))]
    pub tokens: Vec<u32>,
    /// Context depths: tokens in the context before the tokens of the step
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "2048,8192",
          value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub depth: Vec<u32>,
    /// Measure only the cases whose names contain this text
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
    /// Measured runs of each case, after two to warm up; the median is reported
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,
    #[command(flatten)]
    pub budget: Budget,
    /// Compare with an earlier report that --json printed
    #[arg(long, value_name = "FILE")]
    pub compare: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub device: DeviceOptions,
    #[command(flatten)]
    pub precision: PrecisionOption,
    #[command(flatten)]
    pub kv: KvOption,
    #[command(flatten)]
    pub common: Common,
}

#[derive(Debug, Args)]
pub struct Model {
    #[command(flatten)]
    pub model: ModelOptions,
    /// Lengths of the prompts, in tokens
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "128,512,2048,8192",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub prefill: Vec<u32>,
    /// Context depths: tokens in the context before the decoded tokens
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "0,2048,8192",
          value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub depth: Vec<u32>,
    /// Batch sizes: numbers of sequences that are decoded together, at each depth
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,2,4,8,16,32,64",
          value_parser = clap::value_parser!(u32).range(1..=64))]
    pub batch: Vec<u32>,
    /// Steps of each decode
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub steps: u32,
    /// Measured runs of each case, after a short one to warm up; the median is reported
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,
    /// Longest time for a case. A case whose single run would take longer is skipped; others get fewer runs
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub limit_s: u32,
    #[command(flatten)]
    pub budget: Budget,
    /// Compare with an earlier report that --json printed
    #[arg(long, value_name = "FILE")]
    pub compare: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub npu: NpuOption,
    #[command(flatten)]
    pub common: Common,
}

#[derive(Debug, Args)]
pub struct Synth {
    #[arg(long, help = arch::shape_names(", "), value_parser = arch::shape)]
    pub shape: Shape,
    #[command(flatten)]
    pub schemes: Schemes,
    /// Seed of the weights; the same seed writes the same bytes
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Folder to write
    pub destination: PathBuf,
    #[command(flatten)]
    pub common: Common,
}

#[derive(Debug, Args)]
pub struct Soak {
    /// How long: a time (30m, 90s, 2h), or a number of rounds (3r) in each of which every client sends all requests
    #[arg(default_value = "30m")]
    pub length: SoakLength,
    /// Number of clients
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub concurrency: u32,
    /// Process of the server on this machine: the soak test watches its memory and file descriptors, and sends it
    /// SIGHUP
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(2..=1 << 30))]
    pub pid: Option<u32>,
    /// File of the server's fault layer (FAULT_LAYER_FILE): through it, the soak test causes the loss of the device, at
    /// most once a minute
    #[arg(long, value_name = "FILE")]
    pub fault_file: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub server: ServerOptions,
    #[command(flatten)]
    pub common: Common,
}

/// The length of a soak test: a time, or how many times every client sends all requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SoakLength {
    Time(Duration),
    Rounds(u32),
}

impl std::str::FromStr for SoakLength {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        const DAY_S: u32 = 86_400;
        let expected =
            || format!("expected a time such as 30m, 90s or 2h, at most a day, or rounds: 1r to {DAY_S}r");
        let (number, unit) = text.split_at(text.len() - text.chars().next_back().map_or(0, char::len_utf8));
        let number: u32 = number.parse().map_err(|_| expected())?;
        let factor = match unit {
            "s" | "r" => 1,
            "m" => 60,
            "h" => 3600,
            _ => return Err(expected()),
        };
        match number.checked_mul(factor) {
            Some(n @ 1..=DAY_S) if unit == "r" => Ok(Self::Rounds(n)),
            Some(seconds @ 1..=DAY_S) => Ok(Self::Time(Duration::from_secs(seconds.into()))),
            _ => Err(expected()),
        }
    }
}

impl std::fmt::Display for SoakLength {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Time(time) => write!(f, "{} s", time.as_secs()),
            Self::Rounds(1) => f.write_str("1 round"),
            Self::Rounds(rounds) => write!(f, "{rounds} rounds"),
        }
    }
}
