//! The command line, as clap parses it.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;

use crate::config::{Courtesy, FfnHeap, KvChoice, NpuMode, parse_bytes};
use crate::hub::ModelName;
use crate::model::SamplingOptions;
use crate::model::arch;
use crate::model::spec::Shape;
use crate::model::tensors::{InputGroup, Role, TensorSpec};
use crate::tensor::{Bits, Precision, QuantizeMode, Scales, Scheme, VisionMode};
use crate::text::CallSyntax;

#[derive(Debug, Parser)]
#[command(name = "unicorn", version, about = "A local LLM server in Vulkan compute shaders", long_about = None)]
pub struct CommandLine {
    #[command(subcommand)]
    pub command: Command,
}

// Each command has only the groups of options that affect it. An argument whose id is the name of an option of the
// configuration, such as `server.port`, sets that option (`configuration.rs`). The value of an omitted option comes from
// the environment, the configuration files, or the defaults. Some options have aliases: their names in llama.cpp's
// server and in vLLM.

/// The id of the positional argument that sets `model.path`, as --model does.
pub const MODEL: &str = "MODEL";

/// Options of every command that reads the configuration.
#[derive(Debug, Clone, Args)]
pub struct Common {
    /// Configuration file to read instead of /etc/unicorn/config.toml and /etc/unicorn/conf.d/*.toml; `unicorn config
    /// show` lists every option
    #[arg(long, env = "UNICORN_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Log more; -vv logs everything
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// The choice of the Vulkan device.
#[derive(Debug, Clone, Args)]
pub struct DeviceOptions {
    /// Vulkan device: its index, or a part of its name, as `unicorn devices` shows them
    #[arg(long, id = "hardware.device", value_name = "NAME|INDEX")]
    pub device: Option<String>,
    /// Accept a software Vulkan device, which runs on the CPU: slow, for tests and demonstrations
    #[arg(long, id = "hardware.allow_software_vulkan")]
    pub allow_software_vulkan: bool,
}

/// The folder of pulled models.
#[derive(Debug, Clone, Args)]
pub struct ModelsDirOption {
    /// Folder of pulled models [default: the cache that Hugging Face tools share]
    #[arg(long, id = "models.dir", value_name = "FOLDER")]
    pub models_dir: Option<String>,
}

/// The files of a checkpoint.
#[derive(Debug, Clone, Args)]
pub struct FileOptions {
    #[command(flatten)]
    pub models_dir: ModelsDirOption,
    /// config.json, or its folder, for a checkpoint without one
    #[arg(long, id = "model.config", value_name = "PATH")]
    pub model_config: Option<String>,
}

#[derive(Debug, Clone, Args)]
pub struct TokenizerOption {
    /// tokenizer.json, or its folder, for a checkpoint without one
    #[arg(long, id = "model.tokenizer", value_name = "PATH")]
    pub tokenizer: Option<String>,
}

#[derive(Debug, Clone, Args)]
pub struct TemplateOption {
    /// Chat template in Jinja, for a checkpoint without one, or instead of its own
    #[arg(long, id = "model.chat_template", value_name = "FILE", visible_alias = "chat-template-file")]
    pub chat_template: Option<String>,
}

#[derive(Debug, Clone, Args)]
pub struct QuantizeOption {
    /// Quantize the weights while loading: none, int8-row, int4-g32, int4-g128, int4-g128-emb8, emb8
    #[arg(long, id = "model.quantize", value_name = "MODE")]
    pub quantize: Option<QuantizeMode>,
}

#[derive(Debug, Clone, Args)]
pub struct PrecisionOption {
    /// Type of the activations in matrix products: fast (int8 with integer weights), f32 [default: fast; eval and
    /// quantize: f32]
    #[arg(long, id = "model.precision", value_name = "MODE")]
    pub precision: Option<Precision>,
}

#[derive(Debug, Clone, Args)]
pub struct VisionOption {
    /// Load the tower with which a model reads images: auto (if it fits into memory), on, off
    #[arg(long, id = "model.vision", value_name = "MODE")]
    pub vision: Option<VisionMode>,
    /// Most tokens of an image whose request does not ask for more or fewer: 70, 140, 280, 560, 1120 [default: 280]
    #[arg(long, id = "model.image_tokens", value_name = "TOKENS")]
    pub image_tokens: Option<usize>,
    /// Most tokens that a request may ask for, for an image: 70, 140, 280, 560, 1120 [default: 1120]
    #[arg(long, id = "model.max_image_tokens", value_name = "TOKENS")]
    pub max_image_tokens: Option<usize>,
}

#[derive(Debug, Clone, Args)]
pub struct KvOption {
    /// Type of keys and values in the cache: auto (int8 where it shortens a step, otherwise f16), f16, int8, f32
    /// [default: auto; eval and quantize: f32]
    #[arg(long, id = "kv.dtype", value_name = "TYPE")]
    pub kv: Option<KvChoice>,
}

#[derive(Debug, Clone, Args)]
pub struct NpuOption {
    /// Compute part of the attention of prompts on the NPU: off, auto (if the NPU can and is not slower), require
    #[arg(long, id = "npu.mode", value_name = "MODE")]
    pub npu: Option<NpuMode>,
}

/// The options that decide whether a model fits into memory.
#[derive(Debug, Clone, Args)]
pub struct FitOptions {
    #[command(flatten)]
    pub device: DeviceOptions,
    #[command(flatten)]
    pub files: FileOptions,
    /// Maximum number of tokens of a prompt and its answer together
    #[arg(long, short = 'c', id = "engine.context", value_name = "TOKENS", visible_aliases = ["ctx-size", "max-model-len"])]
    pub context: Option<u32>,
    #[command(flatten)]
    pub kv: KvOption,
}

/// The options of every command that loads a model onto a device.
#[derive(Debug, Clone, Args)]
pub struct LoadOptions {
    #[command(flatten)]
    pub fit: FitOptions,
    #[command(flatten)]
    pub precision: PrecisionOption,
    /// Do not measure which kernels are fastest on the GPU; choose them by instruction counts
    #[arg(long = "no-tune", id = "gpu.tune", action = clap::ArgAction::SetFalse)]
    pub tune: bool,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve the OpenAI API
    Serve(Serve),
    /// Answer one prompt on the terminal
    Generate(Generate),
    /// Chat with the model on the terminal
    Chat(Chat),
    /// List the Vulkan devices, and the required features that each of them lacks
    Devices(Devices),
    /// Check this machine (drivers, permissions, memory, kernel parameters, NPU), and say how to fix each finding
    Doctor(Doctor),
    /// Evaluate a model on given tokens or text
    #[command(subcommand)]
    Eval(Eval),
    /// Convert a checkpoint to a quantized one in the native format, which loads fastest
    Quantize(Quantize),
    /// Show the contents of a checkpoint: format, shape, quantization schemes, sizes
    Inspect(Inspect),
    /// Show how a model would be placed in memory, and the longest context that fits; needs no GPU
    Plan(Plan),
    /// Measure the engine, load time and memory, or a server under load
    Bench(Box<Bench>),
    /// Pull a model from the Hugging Face hub, or resume an interrupted pull
    Pull(Pull),
    /// Talk to a model: of a running server, or else loaded by this command; pulls it if needed
    Run(Run),
    /// List the models of a running server with their states, or else the pulled models
    #[command(visible_alias = "ls")]
    List(List),
    /// List the loaded models of a running server
    Ps(Ps),
    /// Describe a model of a running server, or else a pulled model
    Show(Show),
    /// Unload a model of a running server
    Stop(Stop),
    /// Remove a pulled model, in a running server or else on this disk
    Rm(Rm),
    /// List or remove pulled models on this disk
    #[command(subcommand)]
    Models(Models),
    /// Remove conversations that the server keeps on disk
    #[command(subcommand)]
    Kv(KvCommand),
    /// Build the kernels for the NPU of a Ryzen AI processor, or list them
    #[cfg(feature = "npu")]
    #[command(subcommand)]
    Npu(Npu),
    /// Check the configuration, or show it
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Print the completion script for a shell, for `source <(unicorn completions bash)`; packages install it
    Completions { shell: Shell },
    /// Write a manual page for each command into a folder
    #[command(hide = true)]
    ManPages { folder: PathBuf },
    /// Run the GPU for `unicorn serve`, which starts this process
    #[command(hide = true)]
    DeviceProcess,
    /// Run the NPU for the process that holds the model, which starts this process
    #[command(hide = true)]
    NpuProcess,
}

#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Check files, environment and options as `serve` does before it loads the model; exits with status 78 and an
    /// error message if they are wrong
    Check(ServeOptions),
    /// Show every option as TOML, with the file, variable or option that set it
    Show(ServeOptions),
}

/// The options of a command that loads the configured model.
#[derive(Debug, Clone, Args)]
pub struct ModelOptions {
    /// Folder of a checkpoint, a GGUF file, or the name of a pulled model [default: the demo model in this
    /// binary]
    #[arg(long, short = 'm', id = "model.path", value_name = "FOLDER|FILE|ORG/NAME")]
    pub model: Option<String>,
    #[command(flatten)]
    pub quantize: QuantizeOption,
    #[command(flatten)]
    pub tokenizer: TokenizerOption,
    #[command(flatten)]
    pub load: LoadOptions,
    #[command(flatten)]
    pub memory: MemoryOptions,
}

/// The model without the name of its option, as `vllm serve MODEL` takes it.
#[derive(Debug, Clone, Args)]
pub struct ModelArgument {
    /// The same as --model
    #[arg(id = MODEL, value_name = "FOLDER|FILE|ORG/NAME", conflicts_with = "model.path")]
    pub model: Option<String>,
}

/// The options of a command that generates text: the model, its draft model and the NPU.
#[derive(Debug, Clone, Args)]
pub struct EngineOptions {
    #[command(flatten)]
    pub model: ModelOptions,
    /// Draft model for speculative decoding: a smaller model with the same tokenizer. It speeds answers up and does not
    /// change them
    #[arg(long, id = "model.draft", value_name = "FOLDER|FILE|ORG/NAME", visible_alias = "model-draft")]
    pub draft: Option<String>,
    #[command(flatten)]
    pub npu: NpuOption,
}

/// Limits on the use of a device's memory.
#[derive(Debug, Clone, Args)]
pub struct MemoryOptions {
    /// Use at most this much of the GPU's own memory (VRAM), such as 16GiB or 512MiB; 16G means 16GiB
    #[arg(long, id = "memory.vram", value_name = "SIZE", value_parser = parse_bytes)]
    pub vram: Option<u64>,
    /// Use at most this much of the host memory that the GPU can access (GTT)
    #[arg(long, id = "memory.gtt", value_name = "SIZE", value_parser = parse_bytes)]
    pub gtt: Option<u64>,
    /// Leave this much memory free for other programs
    #[arg(long, id = "memory.reserve", value_name = "SIZE", value_parser = parse_bytes)]
    pub reserve: Option<u64>,
    /// The heap in which an integrated GPU's feed-forward weights are placed first: auto (the one that is read faster),
    /// gtt, vram [default: auto]
    #[arg(long, id = "memory.ffn_heap", value_name = "HEAP")]
    pub ffn_heap: Option<FfnHeap>,
}

/// The options of `serve`, which `config` checks and shows.
#[derive(Debug, Clone, Args)]
pub struct ServeOptions {
    #[command(flatten)]
    pub model: ModelArgument,
    #[command(flatten)]
    pub engine: EngineOptions,
    #[command(flatten)]
    pub template: TemplateOption,
    /// Syntax in which the model calls tools [default: as its chat template writes calls]
    #[arg(long, id = "model.tool_call_parser", value_name = "NAME", value_parser = PossibleValuesParser::new(CallSyntax::names()))]
    pub tool_call_parser: Option<String>,
    #[command(flatten)]
    pub vision: VisionOption,
    /// Id of the model in the API [default: the folder's name]
    #[arg(long, id = "model.name", value_name = "NAME", visible_aliases = ["alias", "served-model-name"])]
    pub name: Option<String>,
    /// Maximum number of answers that are computed at the same time, 1 to 64 [default: 16; 4 for each of several models]
    #[arg(long, id = "engine.sequences", value_name = "N", visible_aliases = ["parallel", "max-num-seqs"])]
    pub sequences: Option<usize>,
    /// Address to listen on [default: 127.0.0.1]
    #[arg(long, id = "server.host", value_name = "HOST")]
    pub host: Option<String>,
    /// TCP port; 0 selects a free port [default: 8010]
    #[arg(long, id = "server.port", value_name = "PORT")]
    pub port: Option<u16>,
    /// File of accepted API keys, one per line; required if other machines can reach the address
    #[arg(long, id = "server.api_key_file", value_name = "FILE")]
    pub api_key_file: Option<String>,
    #[command(flatten)]
    pub common: Common,
}

#[derive(Debug, Clone, Args)]
pub struct Serve {
    #[command(flatten)]
    pub options: ServeOptions,
    /// Folder to read the energy counters from, instead of /; for tests
    #[arg(long, value_name = "FOLDER", hide = true)]
    pub root: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct Generate {
    #[command(flatten)]
    pub model: ModelArgument,
    #[command(flatten)]
    pub engine: EngineOptions,
    #[command(flatten)]
    pub template: TemplateOption,
    /// The prompt to answer
    #[arg(long, short, value_name = "TEXT")]
    pub prompt: String,
    #[command(flatten)]
    pub sampling: Sampling,
    #[command(flatten)]
    pub common: Common,
}

#[derive(Debug, Args)]
pub struct Chat {
    #[command(flatten)]
    pub model: ModelArgument,
    #[command(flatten)]
    pub engine: EngineOptions,
    #[command(flatten)]
    pub template: TemplateOption,
    #[command(flatten)]
    pub sampling: Sampling,
    /// Do not read or write the history of typed lines
    #[arg(long)]
    pub no_history: bool,
    #[command(flatten)]
    pub common: Common,
}

#[derive(Debug, Args)]
pub struct Devices {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub common: Common,
}

/// Sampling options. An omitted option has the model's own default.
#[derive(Debug, Args)]
pub struct Sampling {
    /// System prompt: instructions before the conversation
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Maximum number of tokens of the answer
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: Option<u32>,
    /// Sampling temperature, at most 2; 0 is greedy
    #[arg(long, value_parser = in_range::<0, 2>)]
    pub temperature: Option<f32>,
    /// Sample from the most likely tokens whose probabilities add up to this; 1 is off
    #[arg(long, value_parser = in_range::<0, 1>)]
    pub top_p: Option<f32>,
    /// Sample from this many of the most likely tokens; 0 is off
    #[arg(long)]
    pub top_k: Option<u32>,
    /// Leave out tokens less likely than this fraction of the most likely token's probability; 0 is off
    #[arg(long, value_parser = in_range::<0, 1>)]
    pub min_p: Option<f32>,
    /// Random seed; the same seed gives the same answer
    #[arg(long)]
    pub seed: Option<u64>,
    /// End the answer before this text; may be given up to 16 times
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
}

impl Sampling {
    pub fn options(&self) -> SamplingOptions {
        let &Self { temperature, top_p, top_k, min_p, .. } = self;
        SamplingOptions { temperature, top_p, top_k, min_p, ..SamplingOptions::default() }
    }
}

#[derive(Debug, Subcommand)]
pub enum Eval {
    /// Write the logits at every position as the tensor `logits`, f32 [n, vocabulary]
    Logits(EvalLogits),
    /// Report the perplexity of a text: exp of the mean negative log likelihood per token
    Perplexity(EvalPerplexity),
}

#[derive(Debug, Args)]
pub struct EvalLogits {
    #[command(flatten)]
    pub evaluated: Evaluated,
    /// Token ids, separated by commas
    #[arg(long, value_delimiter = ',', required = true, value_name = "IDS")]
    pub tokens: Vec<u32>,
    /// Safetensors file to write
    #[arg(long, value_name = "FILE")]
    pub output: PathBuf,
}

#[derive(Debug, Args)]
pub struct EvalPerplexity {
    #[command(flatten)]
    pub evaluated: Evaluated,
    /// Text file in UTF-8
    #[arg(long, value_name = "FILE")]
    pub text: PathBuf,
    #[command(flatten)]
    pub tokenizer: TokenizerOption,
}

/// The model of `eval`, whose results are compared with other implementations.
#[derive(Debug, Args)]
pub struct Evaluated {
    /// Folder of a checkpoint, or the name of a pulled model
    pub model: String,
    #[command(flatten)]
    pub quantize: QuantizeOption,
    #[command(flatten)]
    pub load: LoadOptions,
    #[command(flatten)]
    pub npu: NpuOption,
    #[command(flatten)]
    pub common: Common,
}

/// The quantization scheme of each class of matrices.
#[derive(Debug, Args)]
pub struct Schemes {
    /// Scheme of attention and feed-forward matrices: int4-g32, int4-g128, int8-row, bf16, or keep (the source's
    /// scheme)
    #[arg(long, value_name = "SCHEME", default_value_t = Target::DEFAULT)]
    pub scheme: Target,
    /// Scheme of the attention matrices [default: --scheme]
    #[arg(long, value_name = "SCHEME")]
    pub attention: Option<Target>,
    /// Scheme of the feed-forward matrices [default: --scheme]
    #[arg(long, value_name = "SCHEME")]
    pub feed_forward: Option<Target>,
    /// Scheme of the embedding, which is also the output head [default: int8-row; with --scheme bf16 or keep, the same
    /// as --scheme]
    #[arg(long, value_name = "SCHEME")]
    pub embedding: Option<Target>,
}

impl Schemes {
    pub fn of(&self, class: Class) -> Target {
        match class {
            Class::Attention => self.attention.unwrap_or(self.scheme),
            Class::FeedForward => self.feed_forward.unwrap_or(self.scheme),
            Class::Embedding => self.embedding.unwrap_or(match self.scheme {
                Target(None | Some(Scheme::F32 | Scheme::F16 | Scheme::Bf16)) => self.scheme,
                Target(Some(_)) => Target(Some(Scheme::Int8Row)),
            }),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "kebab-case")]
pub enum Class {
    Attention,
    FeedForward,
    Embedding,
}

impl Class {
    pub const ALL: [Class; 3] = [Class::Attention, Class::FeedForward, Class::Embedding];

    /// The class of a tensor; `None` for a norm, a bias, a tensor of a router or of residual streams, and a matrix that keeps its scheme. The head has
    /// the scheme of the embedding.
    pub fn of(spec: &TensorSpec) -> Option<Class> {
        match spec.role {
            Role::Embedding | Role::Head | Role::PerLayerEmbedding => Some(Class::Embedding),
            Role::Projection(InputGroup::Qkv | InputGroup::Output) => Some(Class::Attention),
            Role::Projection(_) => Some(Class::FeedForward),
            Role::KeptMatrix
            | Role::Norm
            | Role::Bias
            | Role::Router
            | Role::Coefficients
            | Role::Factors => None,
        }
    }
}

/// A scheme to convert to; `None` keeps the scheme of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target(pub Option<Scheme>);

impl Target {
    /// The default of `unicorn quantize`, and of `unicorn plan --shape`.
    pub const DEFAULT: Target = Target(Some(Scheme::int4(32)));
}

impl std::str::FromStr for Target {
    type Err = String;
    fn from_str(name: &str) -> Result<Target, String> {
        if name == "keep" {
            return Ok(Target(None));
        }
        match name.parse()? {
            Scheme::Int { bits, scales, .. }
                if scales != Scales::Symmetric || !matches!(bits, Bits::Four | Bits::Eight) =>
            {
                Err(format!("{name} can be read, but not written: this program does not quantize to it"))
            }
            scheme => Ok(Target(Some(scheme))),
        }
    }
}

/// Parses any scheme that a checkpoint may have, including schemes that this program cannot quantize to.
fn any_scheme(name: &str) -> Result<Target, String> {
    Ok(Target(Some(name.parse()?)))
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            None => f.write_str("keep"),
            Some(scheme) => scheme.fmt(f),
        }
    }
}

/// How values are rounded to integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum RoundingMethod {
    /// For each group, search the scale with the smallest squared error
    Search,
    /// Scale by the largest value and round to the nearest integer: faster, and less accurate
    Nearest,
}

#[derive(Debug, Args)]
pub struct Quantize {
    /// The checkpoint: a folder of safetensors, a GGUF file, or the name of a pulled model. The values of its vision
    /// tower are kept
    pub source: String,
    /// Folder to write: new, empty, or written by an earlier run of this command
    pub destination: PathBuf,
    #[command(flatten)]
    pub schemes: Schemes,
    /// How int4 weights are rounded
    #[arg(long, value_enum, default_value = "search")]
    pub rounding: RoundingMethod,
    /// Weight the rounding errors by the size of the activations, which the source model computes on the device from
    /// this text
    #[arg(long, value_name = "FILE")]
    pub calibrate: Option<PathBuf>,
    /// Compare the result with the source on this text: perplexity, and the mean KL divergence. This also works for a
    /// folder that an earlier run has finished
    #[arg(long, value_name = "FILE")]
    pub eval: Option<PathBuf>,
    #[command(flatten)]
    pub tokenizer: TokenizerOption,
    #[command(flatten)]
    pub load: LoadOptions,
    #[command(flatten)]
    pub npu: NpuOption,
    #[command(flatten)]
    pub common: Common,
}

#[derive(Debug, Args)]
pub struct Inspect {
    /// A checkpoint in any format that can be read, or the name of a pulled model
    pub model: String,
    /// Check every file against its checksum
    #[arg(long)]
    pub verify: bool,
    /// List every tensor
    #[arg(long)]
    pub tensors: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub files: FileOptions,
    #[command(flatten)]
    pub common: Common,
}

/// Plans for this machine, or for a machine with the given --vram and --gtt.
#[derive(Debug, Args)]
pub struct Plan {
    #[command(flatten)]
    pub planned: Planned,
    /// Number of concurrent conversations, each with the whole context
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub sequences: u32,
    #[command(flatten)]
    pub quantize: QuantizeOption,
    #[command(flatten)]
    pub vision: VisionOption,
    #[command(flatten)]
    pub npu: NpuOption,
    #[command(flatten)]
    pub fit: FitOptions,
    #[command(flatten)]
    pub memory: MemoryOptions,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub common: Common,
}

/// A checkpoint or a published shape, with an optional draft model.
#[derive(Debug, Default, Args)]
#[command(group(clap::ArgGroup::new("what").required(true).args(["model", "shape"])))]
pub struct Planned {
    /// A checkpoint in any format that can be read, or the name of a pulled model
    pub model: Option<String>,
    #[arg(long, help = arch::shape_names(", "), value_parser = arch::shape, conflicts_with_all = ["model.quantize", "model.config"])]
    pub shape: Option<Shape>,
    /// Scheme of the shape's attention and feed-forward matrices: int4-g32, int4-g128, int8-row, bf16 or another scheme
    /// of docs/formats.md [default: int4-g32]
    #[arg(long, value_name = "SCHEME", value_parser = any_scheme, conflicts_with = "model")]
    pub scheme: Option<Target>,
    /// Scheme of the attention matrices [default: --scheme]
    #[arg(long, value_name = "SCHEME", value_parser = any_scheme, conflicts_with = "model")]
    pub attention: Option<Target>,
    /// Scheme of the feed-forward matrices [default: --scheme]
    #[arg(long, value_name = "SCHEME", value_parser = any_scheme, conflicts_with = "model")]
    pub feed_forward: Option<Target>,
    /// Scheme of the embedding, which is also the output head [default: int8-row; with --scheme bf16, bf16]
    #[arg(long, value_name = "SCHEME", value_parser = any_scheme, conflicts_with = "model")]
    pub embedding: Option<Target>,
    /// Checkpoint of a draft model
    #[arg(long, value_name = "MODEL")]
    pub draft: Option<String>,
}

impl Planned {
    /// A note for the output that the default scheme was assumed; `None` if `--scheme` was given.
    pub fn assumption(&self) -> Option<String> {
        let is_assumed = self.shape.is_some() && self.scheme.is_none();
        is_assumed.then(|| format!("{} is assumed, since no --scheme was given", Target::DEFAULT))
    }
}

#[derive(Debug, Args)]
pub struct Doctor {
    /// Check whether this model fits [default: the configured model]
    #[arg(long, id = "model.path", value_name = "FOLDER|FILE|ORG/NAME", conflicts_with = "shape")]
    pub model: Option<String>,
    #[arg(long, help = format!("Check whether a published shape fits: {}", arch::shape_names(", ")), value_parser = arch::shape, conflicts_with_all = ["model.quantize", "model.config"])]
    pub shape: Option<Shape>,
    /// Scheme of the shape's matrices, as in `unicorn plan` [default: int4-g32]
    #[arg(long, value_name = "SCHEME", value_parser = any_scheme, requires = "shape")]
    pub scheme: Option<Target>,
    /// Measure the disk: read up to 256 MiB of the model without the page cache, and estimate the time of a load
    #[arg(long)]
    pub disk: bool,
    /// Measure how fast the GPU reads each of its memories, as the first load does, and keep the result for later loads
    #[arg(long, conflicts_with = "root")]
    pub heaps: bool,
    /// Print the commands and settings that fix the findings, without running them
    #[arg(long)]
    pub fix: bool,
    /// Print one JSON object
    #[arg(long, conflicts_with = "fix")]
    pub json: bool,
    /// Check another machine: this folder has copies of its /sys, /proc, /dev, /etc, /usr and /lib, and the output of
    /// `unicorn devices --json` as vulkan.json
    #[arg(long, value_name = "FOLDER")]
    pub root: Option<PathBuf>,
    #[command(flatten)]
    pub quantize: QuantizeOption,
    #[command(flatten)]
    pub npu: NpuOption,
    #[command(flatten)]
    pub fit: FitOptions,
    #[command(flatten)]
    pub common: Common,
}

/// A benchmark; without a subcommand, that of the engine.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Bench {
    #[command(subcommand)]
    pub what: Option<Benchmark>,
    #[command(flatten)]
    pub engine: BenchEngine,
}

#[derive(Debug, Subcommand)]
pub enum Benchmark {
    /// Measure the engine in this process (the default): load time, prefill and decode speed, memory
    Engine(BenchEngine),
    /// Compute a prompt alternately with and without the NPU: time, the GPU's share of it, and energy
    Npu(BenchNpu),
    /// Measure a server with the OpenAI API, as its clients see it
    Serve(BenchServe),
}

#[derive(Debug, Args)]
pub struct BenchEngine {
    #[command(flatten)]
    pub engine: EngineOptions,
    /// Tokens to prefill
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub prompt_tokens: u32,
    /// Tokens to decode
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..))]
    pub generate_tokens: u32,
    /// Measured runs, after one to warm up; the median is reported
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,
    /// Also decode this many sequences together, each after its own prompt; several numbers, separated by commas
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=64))]
    pub streams: Vec<u32>,
    /// Also measure with these shares of the GPU's time, in the form of `engine.courtesy`, separated by commas; the
    /// runs alternate
    #[arg(long, value_name = "SHARE,...", value_delimiter = ',')]
    pub courtesy: Vec<Courtesy>,
    /// Also measure the time of every kernel on the device; the timestamps cost a little speed
    #[arg(long)]
    pub profile: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Folder to read the energy counters from, instead of /; for tests
    #[arg(long, value_name = "FOLDER", hide = true)]
    pub root: Option<PathBuf>,
    #[command(flatten)]
    pub common: Common,
}

#[derive(Debug, Args)]
pub struct BenchNpu {
    #[command(flatten)]
    pub model: ModelOptions,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(32..=131_072))]
    pub prompt_tokens: u32,
    /// Measured runs of each share, after one to warm up; medians are reported
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Folder to read the energy counters from, instead of /
    #[arg(long, value_name = "FOLDER", hide = true)]
    pub root: Option<PathBuf>,
    #[command(flatten)]
    pub common: Common,
}

/// The way in which requests arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, strum::Display)]
#[strum(serialize_all = "kebab-case")]
pub enum Scenario {
    /// Streams that each send the next request as soon as the previous one is answered, at each --concurrency in turn
    Closed,
    /// First chats alone, then chats while long prompts arrive at half of the rate that the server can process without
    /// chats
    Mixed,
    /// Chats of two turns: time to the first token of the second turn
    SecondTurn,
}

/// The server that receives requests.
#[derive(Debug, Args)]
pub struct ServerOptions {
    /// Base address of the API, http or https; no proxy is used
    #[arg(long, default_value = "http://127.0.0.1:8010/v1")]
    pub url: String,
    /// Id of the model [default: the only model that the server lists]
    #[arg(long, value_name = "ID")]
    pub model: Option<String>,
    /// API key, sent as a bearer token
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Longest time for one request
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub timeout_s: u32,
}

#[derive(Debug, Args)]
pub struct BenchServe {
    #[command(flatten)]
    pub server: ServerOptions,
    #[arg(long, value_enum, default_value_t = Scenario::Closed)]
    pub scenario: Scenario,
    /// Requests of each stream, one after the other; with second-turn, the number of chats
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub requests: u32,
    /// Maximum number of tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub max_tokens: u32,
    /// Make every answer exactly that long, with the field `ignore_eos`, which vLLM, SGLang and llama.cpp also accept
    #[arg(long)]
    pub ignore_eos: bool,
    /// Sampling temperature, at most 2; 0 is greedy, so that every server does the same work
    #[arg(long, default_value_t = 0.0, value_parser = in_range::<0, 2>)]
    pub temperature: f32,
    /// Seed of the prompts. If a seed was used before, the server may have cached its prompts [default: a new seed]
    #[arg(long)]
    pub seed: Option<u64>,
    /// Approximate length of a prompt; closed and mixed [default: 128]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub prompt_tokens: Option<u32>,
    /// Numbers of streams; closed [default: 1,2,4,8,16,32,64]
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub concurrency: Option<Vec<u32>>,
    /// Number of chats; mixed [default: 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub chats: Option<u32>,
    /// Approximate length of a long prompt; mixed [default: 4000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub long_tokens: Option<u32>,
    /// Number of long prompts; mixed [default: 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub long_requests: Option<u32>,
    /// Approximate length of the first turn's question; second-turn [default: 2000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub history_tokens: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub common: Common,
}

/// The running server that a command asks.
#[derive(Debug, Clone, Args)]
pub struct RunningServer {
    /// Address of the server, such as http://192.168.0.7:8010 [default: server.host and server.port]. Its API key is read
    /// from UNICORN_API_KEY
    #[arg(long, value_name = "URL")]
    pub url: Option<String>,
    #[command(flatten)]
    pub common: Common,
}

#[derive(Debug, Args)]
pub struct Run {
    /// A model that the server lists, a model of the hub (ORG/NAME:FILE), one of the short names, a folder or a file
    pub model: String,
    /// The prompt to answer. Without one, a conversation begins. Text from a pipe is added to it
    pub prompt: Vec<String>,
    #[command(flatten)]
    pub sampling: Sampling,
    /// Picture to ask about; several with several --image. They are sent with the first message to a server, whose model sees
    /// images
    #[arg(long, value_name = "FILE")]
    pub image: Vec<PathBuf>,
    /// Do not read or write the history of typed lines
    #[arg(long)]
    pub no_history: bool,
    /// Load the model in this command, also if a server runs
    #[arg(long)]
    pub here: bool,
    /// Pull a missing model without asking
    #[arg(long, short)]
    pub yes: bool,
    #[command(flatten)]
    pub server: RunningServer,
    /// Maximum number of tokens of a prompt and its answer together, if this command loads the model
    #[arg(long, short = 'c', id = "engine.context", value_name = "TOKENS")]
    pub context: Option<u32>,
    #[command(flatten)]
    pub device: DeviceOptions,
    #[command(flatten)]
    pub models_dir: ModelsDirOption,
}

#[derive(Debug, Args)]
pub struct List {
    /// Print one JSON array
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub server: RunningServer,
    #[command(flatten)]
    pub models_dir: ModelsDirOption,
}

#[derive(Debug, Args)]
pub struct Ps {
    /// Print one JSON array
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub server: RunningServer,
}

#[derive(Debug, Args)]
pub struct Show {
    /// A model that `unicorn list` lists
    pub model: String,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub server: RunningServer,
    #[command(flatten)]
    pub models_dir: ModelsDirOption,
}

#[derive(Debug, Args)]
pub struct Stop {
    /// A model that `unicorn ps` lists
    pub model: String,
    #[command(flatten)]
    pub server: RunningServer,
}

#[derive(Debug, Args)]
pub struct Rm {
    /// Models that `unicorn list` lists
    #[arg(required = true)]
    pub model: Vec<String>,
    /// Do not ask for confirmation
    #[arg(long, short)]
    pub yes: bool,
    #[command(flatten)]
    pub server: RunningServer,
    #[command(flatten)]
    pub models_dir: ModelsDirOption,
}

#[derive(Debug, Args)]
pub struct Pull {
    /// The repository, with safetensors and config.json, or with GGUF files. The file name or the quantization (`Q4_0`)
    /// selects one of several GGUF files. Some models have short names, which docs/operations.md
    /// lists
    #[arg(value_name = "ORG/NAME[@REVISION][:FILE]", value_parser = super::names::read_name)]
    pub name: ModelName,
    /// Pull into this user's folder. Without it, a running server that serves pulled models pulls into its own folder
    #[arg(long)]
    pub user: bool,
    #[command(flatten)]
    pub server: RunningServer,
    #[command(flatten)]
    pub models_dir: ModelsDirOption,
}

#[derive(Debug, Subcommand)]
pub enum KvCommand {
    /// Remove all conversations in the folder of kv.disk.path
    #[command(
        long_about = "Remove all conversations in the folder of kv.disk.path.\n\nNo server may use the folder. A running \
        server empties it itself: send it POST /kv/clear."
    )]
    Clear(KvClear),
}

#[derive(Debug, Args)]
pub struct KvClear {
    #[command(flatten)]
    pub common: Common,
}

#[derive(Debug, Subcommand)]
pub enum Models {
    /// Show the pulled models: name, format, size, folder
    List(ModelsList),
    /// Remove a pulled model, or one revision or file of it, with the data that no other model needs
    Rm(ModelsRm),
}

#[derive(Debug, Args)]
pub struct ModelsList {
    /// Print one JSON array
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub models_dir: ModelsDirOption,
    #[command(flatten)]
    pub common: Common,
}

#[derive(Debug, Args)]
pub struct ModelsRm {
    #[arg(value_name = "ORG/NAME[@REVISION][:FILE]", value_parser = super::names::read_name)]
    pub name: ModelName,
    /// Do not ask for confirmation
    #[arg(long, short)]
    pub yes: bool,
    #[command(flatten)]
    pub models_dir: ModelsDirOption,
    #[command(flatten)]
    pub common: Common,
}

#[cfg(feature = "npu")]
#[derive(Debug, Subcommand)]
pub enum Npu {
    /// Compile the NPU's attention kernels for a model, with this machine's mlir-aie, Peano and XRT
    BuildKernels(Box<BuildKernels>),
    /// Show the built kernels, and why some of them cannot be used
    List(NpuList),
}

#[cfg(feature = "npu")]
#[derive(Debug, Args)]
pub struct NpuList {
    #[command(flatten)]
    pub folder: KernelFolder,
    #[command(flatten)]
    pub common: Common,
}

#[cfg(feature = "npu")]
#[derive(Debug, Args)]
pub struct KernelFolder {
    /// Folder of the NPU's kernels [default: unicorn/npu in the user's cache]
    #[arg(long, value_name = "FOLDER")]
    pub kernels: Option<PathBuf>,
}

#[cfg(feature = "npu")]
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("what").required(true))]
pub struct BuildKernels {
    /// The model to build for: the folder of a checkpoint, a GGUF file, or the name of a pulled model
    #[arg(long, value_name = "FOLDER|FILE|ORG/NAME", group = "what",
          conflicts_with_all = ["heads_per_group", "window"])]
    pub model: Option<String>,
    /// Without --model: the dimension of a head: 64, 128, 256
    #[arg(long, value_name = "N", group = "what", requires = "heads_per_group")]
    pub head_dim: Option<u32>,
    /// Without --model: the query heads for each KV head: 2, 4
    #[arg(long, value_name = "N", requires = "head_dim")]
    pub heads_per_group: Option<u32>,
    /// Without --model: the sliding window of the layers [default: no sliding window]
    #[arg(long, value_name = "TOKENS", requires = "head_dim")]
    pub window: Option<u32>,
    /// KV heads of a dispatch, 1 to 4; builds a kernel for each number [default: half of the model's KV heads, and all
    /// of them; at most 4]
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=4))]
    pub groups: Vec<u32>,
    /// Prompt tokens of a dispatch, 256 or 512; builds a kernel for each number; 512 is for an engine.prefill_chunk
    /// above 256
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [256])]
    pub rows: Vec<u32>,
    /// Keys of a dispatch of a layer without a sliding window, a power of two from 512 to 131072; builds a kernel for
    /// each number
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [2048])]
    pub keys: Vec<u32>,
    #[command(flatten)]
    pub folder: KernelFolder,
    /// The Python interpreter that has mlir-aie [default: python3]
    #[arg(long, value_name = "FILE")]
    pub python: Option<PathBuf>,
    /// Folder of Peano, the compiler for the NPU's cores [default: PEANO_INSTALL_DIR, or the folder of the Python
    /// package llvm-aie]
    #[arg(long, value_name = "FOLDER")]
    pub peano: Option<PathBuf>,
    /// Build again the kernels that exist already
    #[arg(long)]
    pub force: bool,
    /// Longest run time of one tool
    #[arg(long, value_name = "SECONDS", default_value_t = 3600, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub tool_limit_s: u32,
    #[command(flatten)]
    pub files: FileOptions,
    #[command(flatten)]
    pub common: Common,
}

fn in_range<const LOW: u8, const HIGH: u8>(text: &str) -> Result<f32, String> {
    let expected = || format!("expected a number from {LOW} to {HIGH}");
    let value: f32 = text.parse().map_err(|_| expected())?;
    (f32::from(LOW)..=f32::from(HIGH)).contains(&value).then_some(value).ok_or_else(expected)
}
