//! Merges TOML files, environment and command line into one validated [`Config`]. No I/O: the caller reads files and
//! the environment.
//!
//! `config/default.toml` lists and explains all options with their defaults. The structs here mirror it, and a
//! test fails if a field is missing there. An unknown option is an error that names the option and its source.

use std::ffi::OsString;
use std::fmt::{Display, Write as _};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};
use strum::{IntoStaticStr, VariantArray};
use toml::{Table, Value};

use crate::tensor::{KvDtype, Precision, QuantizeMode, VisionMode, option_values};

option_values!(LogFormat, FfnHeap, KvChoice, SharePrefixes, NpuMode, NpuPreference, NpuSharing);

/// The documented defaults, as TOML.
pub const DEFAULT_TOML: &str = include_str!("../config/default.toml");
const ENV_PREFIX: &str = "UNICORN_";
/// Variables with that prefix that are not options, without the prefix: the configuration file, the system's
/// configuration folder, the user's folders, the replacement of `/run`, the API keys of a server, the API key that a command
/// sends to a server, and the commit of the build.
const OUR_VARIABLES: [&str; 8] =
    ["CONFIG", "CONFIG_DIR", "CACHE_DIR", "STATE_DIR", "RUN_DIR", "API_KEYS", "API_KEY", "COMMIT"];
/// Prefixes of the variables of the project's tools and tests.
const OUR_PREFIXES: [&str; 2] = ["TEST_", "SKIP_"];
/// Tokens of prompt and answer of each of several models, if neither the model nor `engine.context` says how many: a model
/// alone takes as many as fit, and several models share the memory.
const SEVERAL_CONTEXT: usize = 16_384;
/// The conversations of each of several models, if neither the model nor `engine.sequences` says how many.
const SEVERAL_SEQUENCES: u32 = 4;
/// Advice about variables that Kubernetes and Docker set for each service.
const KUBERNETES: &str = " (a container platform sets it for a service of that name: rename the service, or set \
                          enableServiceLinks to false)";

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    pub log: Log,
    pub server: Server,
    pub model: Model,
    pub tokenizer: Tokenizer,
    pub models: Models,
    pub hardware: Hardware,
    pub gpu: Gpu,
    pub memory: Memory,
    pub engine: Engine,
    pub kv: Kv,
    #[serde(rename = "kv.disk")]
    pub kv_disk: KvDisk,
    pub npu: Npu,
    /// All merged options.
    #[serde(skip)]
    options: Table,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Log {
    /// A level or directives. `None` = the default of the command.
    pub level: Option<String>,
    /// `None` = [`LogFormat::Journal`] if standard error goes to systemd's journal, otherwise [`LogFormat::Text`].
    #[serde(default, deserialize_with = "parsed")]
    pub format: Option<LogFormat>,
}

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, VariantArray, IntoStaticStr)]
#[strum(serialize_all = "lowercase", const_into_str)]
pub enum LogFormat {
    Text,
    /// One JSON object per line.
    Json,
    /// Text with a syslog priority prefix, for systemd's journal.
    Journal,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Server {
    pub host: String,
    pub port: u16,
    /// A second port. `None` = there is none.
    pub ollama_port: Option<u16>,
    /// Maximum number of waiting requests.
    pub queue: usize,
    /// Maximum number of requests of one client in progress.
    pub requests_per_client: usize,
    pub max_body_bytes: usize,
    /// Maximum number of responses that are kept for later requests, and maximum of their bytes.
    pub stored_responses: usize,
    pub stored_response_bytes: usize,
    /// Maximum number of open connections.
    pub connections: usize,
    pub head_timeout_s: u64,
    pub idle_timeout_s: u64,
    pub shutdown_grace_s: u64,
    /// Additional names of the model that requests may use.
    pub model_aliases: Vec<String>,
    /// Whether requests may use any model name.
    pub any_model_name: bool,
    pub api_key_file: Option<String>,
    /// Whether clients on other machines need no API key.
    pub allow_keyless: bool,
    pub allowed_hosts: Vec<String>,
    pub cors_origins: Vec<String>,
    /// PEM files. Both are set, or neither.
    pub tls_cert: Option<String>,
    pub tls_key: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// `None` = the embedded demo model.
    pub path: Option<String>,
    pub name: Option<String>,
    /// Path of config.json. `None` = in the model's folder.
    pub config: Option<String>,
    /// Path of tokenizer.json. `None` = in the model's folder.
    pub tokenizer: Option<String>,
    /// Path of a chat template. `None` = the checkpoint's own.
    pub chat_template: Option<String>,
    /// The syntax of the model's tool calls. `None` = as its chat template writes them.
    pub tool_call_parser: Option<String>,
    /// The draft model for speculative decoding.
    pub draft: Option<String>,
    pub quantize: QuantizeMode,
    pub precision: Precision,
    /// Whether the tower that reads images is loaded.
    pub vision: VisionMode,
    /// The most tokens of an image whose request does not ask for more or fewer; one of [`IMAGE_TOKENS`].
    pub image_tokens: usize,
    /// The most tokens of an image; one of [`IMAGE_TOKENS`], and at least `image_tokens`.
    pub max_image_tokens: usize,
}

/// The numbers of tokens that an image may have at most, if its model lets a request choose.
pub const IMAGE_TOKENS: [usize; 5] = [70, 140, 280, 560, 1120];

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tokenizer {
    /// Whether the text of a control token in a message becomes that control token.
    pub special_in_content: bool,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Models {
    /// The folder of pulled models. `None` = the shared cache of Hugging Face tools.
    pub dir: Option<String>,
    /// The models of a server with several. They are not served if `model.path` names a model.
    pub serve: Vec<ServedModel>,
    /// Whether a server with several models also serves every pulled model.
    pub pulled: bool,
}

/// One of several models that a server serves. An option that is absent has the value of the section in parentheses.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServedModel {
    /// Required.
    pub path: String,
    pub name: Option<String>,
    /// Additional names of the model that requests may use.
    pub aliases: Vec<String>,
    pub config: Option<String>,
    pub tokenizer: Option<String>,
    pub chat_template: Option<String>,
    pub tool_call_parser: Option<String>,
    /// Variables that the chat template gets from requests that do not set them, such as `enable_thinking`.
    pub template_kwargs: Table,
    pub draft: Option<String>,
    /// The sampling of requests that do not set it, in place of the model's own.
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    /// (`model`)
    pub quantize: Option<String>,
    /// (`model`)
    pub precision: Option<String>,
    /// (`model`)
    pub vision: Option<String>,
    /// (`model`)
    pub image_tokens: Option<u32>,
    /// (`model`)
    pub max_image_tokens: Option<u32>,
    /// Tokens (`engine`).
    pub context: Option<u32>,
    /// (`engine`)
    pub sequences: Option<u32>,
    /// `kv.dtype`
    pub kv: Option<String>,
    /// Seconds until an idle model is unloaded (`engine.idle_unload_s`); 0 = never.
    pub ttl_s: Option<u32>,
    /// Whether the server loads the model at its start.
    pub preload: bool,
    /// Whether the model is never unloaded for another one.
    pub pin: bool,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    pub device: Option<String>,
    pub allow_software_vulkan: bool,
    pub validation: bool,
    /// Whether to refuse a model that Linux does not report in the GPU's memory. Otherwise the log warns.
    pub strict: bool,
    /// How long the GPU may have work and complete none of it. `None` = the default of the kind of device.
    pub hang_timeout_s: Option<usize>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    pub max_submit_ms: u64,
    /// Whether to measure once which kernels are the fastest on a device for the model's matrices, and how fast the
    /// device reads its memory.
    pub tune: bool,
    /// Whether the time of every kernel is measured while serving.
    pub profile: bool,
}

/// Sizes in bytes. `None` = what the driver reports, or for `reserve` a default.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    #[serde(default, deserialize_with = "byte_size")]
    pub vram: Option<u64>,
    #[serde(default, deserialize_with = "byte_size")]
    pub gtt: Option<u64>,
    #[serde(default, deserialize_with = "byte_size")]
    pub reserve: Option<u64>,
    pub ffn_heap: FfnHeap,
}

/// The heap that FFN weights fill first on an integrated GPU, which can access all memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, VariantArray, IntoStaticStr)]
#[strum(serialize_all = "lowercase", const_into_str)]
pub enum FfnHeap {
    /// The one that was read faster; GTT if neither was read clearly faster, or if they were not measured.
    #[default]
    Auto,
    /// Host memory, so that the GPU's own memory stays free for everything else.
    Gtt,
    Vram,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Engine {
    /// Tokens. `None` = as many as the model and the memory allow.
    pub context: Option<usize>,
    /// Tokens.
    pub prefill_chunk: usize,
    pub sequences: usize,
    pub token_gap_ms: u64,
    pub speculation_tokens: usize,
    /// Seconds. `None` = never unload an idle model.
    pub idle_unload_s: Option<usize>,
    pub courtesy: Courtesy,
}

/// The share of the GPU's time that a process may use, from [`Courtesy::LEAST`] to 1. 1 = no limit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Courtesy(f64);

impl Courtesy {
    pub const NONE: Courtesy = Courtesy(1.0);
    /// With a smaller share, a token of a 27B would take more than two seconds on an integrated GPU.
    pub const LEAST: f64 = 0.1;

    pub fn share(self) -> f64 {
        self.0
    }

    /// Whether the share limits the GPU's time.
    pub fn is_bound(self) -> bool {
        self.0 < 1.0
    }
}

impl TryFrom<f64> for Courtesy {
    type Error = String;

    fn try_from(share: f64) -> Result<Self, String> {
        match (Self::LEAST..=1.0).contains(&share) {
            true => Ok(Self(share)),
            false => Err(format!(
                "expected a share of the GPU's time from {} to 1, got {share}; 1 = no limit, and with less than {} \
                 answers would be too slow",
                Self::LEAST,
                Self::LEAST
            )),
        }
    }
}

impl From<Courtesy> for f64 {
    fn from(courtesy: Courtesy) -> f64 {
        courtesy.share()
    }
}

impl FromStr for Courtesy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let share: f64 = text.parse().map_err(|_| format!("expected a number, got {text:?}"))?;
        share.try_into()
    }
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kv {
    pub dtype: KvChoice,
    /// Tokens.
    pub block_size: usize,
    /// Bytes. `None` = half of the sliding layers' cache.
    #[serde(default, deserialize_with = "byte_size")]
    pub snapshot_bytes: Option<u64>,
    /// Whether a load fails if the memory does not hold `engine.sequences` whole contexts.
    pub whole_contexts: bool,
    /// `None` = [`SharePrefixes::Key`] if there are several API keys, otherwise [`SharePrefixes::All`].
    #[serde(default, deserialize_with = "parsed")]
    pub share_prefixes: Option<SharePrefixes>,
}

/// Where conversations are kept, so that they survive the end of the server.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvDisk {
    /// A folder. `None` = conversations are kept only in device memory.
    pub path: Option<String>,
    /// The most bytes of files.
    #[serde(deserialize_with = "some_bytes")]
    pub max_bytes: u64,
}

/// The element type of keys and values, as configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, VariantArray, IntoStaticStr)]
#[strum(serialize_all = "lowercase", const_into_str)]
pub enum KvChoice {
    /// The load chooses it by the model, the device and the limits.
    Auto,
    F16,
    Int8,
    F32,
}

impl KvChoice {
    /// The configured type; `None` = the load chooses it.
    pub fn fixed(self) -> Option<KvDtype> {
        match self {
            Self::Auto => None,
            Self::F16 => Some(KvDtype::F16),
            Self::Int8 => Some(KvDtype::Int8),
            Self::F32 => Some(KvDtype::F32),
        }
    }
}

/// Which requests share cached prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, VariantArray, IntoStaticStr)]
#[strum(serialize_all = "lowercase", const_into_str)]
pub enum SharePrefixes {
    /// Requests with the same API key. Without keys, requests from the same address.
    Key,
    /// All requests.
    All,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Npu {
    pub mode: NpuMode,
    pub prefer: NpuPreference,
    /// KV heads whose attention the NPU computes. `None` = the fastest number, which is measured.
    pub kv_heads: Option<usize>,
    /// Maximum number of keys that a chunk of a prompt may see to be computed with the NPU.
    pub keys: usize,
    pub deadline_ms: u64,
    pub sharing: NpuSharing,
    /// `None` = in the folder of the binary, then in `../lib/unicorn`.
    pub shim: Option<String>,
    /// `None` = the folder where `unicorn npu build-kernels` writes.
    pub kernels: Option<String>,
}

/// Whether the NPU computes a part of the attention of prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, VariantArray, IntoStaticStr)]
#[strum(serialize_all = "lowercase", const_into_str)]
pub enum NpuMode {
    Off,
    /// If it can, and prompts do not get slower.
    Auto,
    /// Always. If the NPU cannot be used, that is an error.
    Require,
}

/// When mode auto uses the NPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, VariantArray, IntoStaticStr)]
#[strum(serialize_all = "lowercase", const_into_str)]
pub enum NpuPreference {
    /// Only if prompts do not get slower.
    Speed,
    /// Even if prompts get slower, because the NPU takes less power than the GPU.
    Energy,
}

/// How the GPU and the NPU pass arrays to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, VariantArray, IntoStaticStr)]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum NpuSharing {
    /// The host copies them.
    Copy,
    /// The NPU reads and writes the GPU's buffers, which are dma-bufs.
    DmaBuf,
}

/// An error of one line, which names the option and its source.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{source_name}: {problem}")]
pub struct ConfigError {
    source_name: String,
    problem: String,
}

/// Options from one source; later layers win.
#[derive(Debug, Clone)]
pub struct Layer {
    name: String,
    options: Table,
}

impl Layer {
    /// Parses the text of a configuration file. Errors use `name` for the file.
    pub fn file(name: &str, text: &str) -> Result<Self, ConfigError> {
        let options = text.parse::<Table>().map_err(|error| ConfigError {
            source_name: name.to_owned(),
            problem: format!("not valid TOML: {}", one_line(&error.to_string())),
        })?;
        Ok(Self { name: name.to_owned(), options: with_subsections(options) })
    }

    /// Reads the variables `UNICORN_SECTION_OPTION`. Returns a warning for each other variable with the prefix, because
    /// container platforms set such variables for their services. A name that differs from an option by one or two
    /// letters is an error, because it is probably a typing mistake.
    pub fn environment(
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<(Self, Vec<String>), ConfigError> {
        let defaults = defaults();
        let (mut layer, mut warnings) =
            (Self { name: "environment".into(), options: Table::new() }, Vec::new());
        for (variable, text) in variables {
            let Some(path) = variable.strip_prefix(ENV_PREFIX).filter(|path| !is_ours(path)) else {
                continue;
            };
            let error = |problem| ConfigError { source_name: "environment".into(), problem };
            let path = path.to_ascii_lowercase();
            let mut options = options(defaults);
            let found = options.find(|(section, option, _)| path == variable_of(section, option));
            let Some((section, option, default)) = found else {
                if let Some((section, option)) = nearest(&path, defaults, '_') {
                    let near = format!("{ENV_PREFIX}{}", variable_of(section, option)).to_ascii_uppercase();
                    return Err(error(misspelt(&variable, &near)));
                }
                warnings.push(format!("{variable} in the environment is not an option and is ignored"));
                continue;
            };
            let value = parse_like(default, &text).map_err(|problem| {
                let advice = if text.starts_with("tcp://") { KUBERNETES } else { "" };
                error(format!("{variable}: {problem}{advice}"))
            })?;
            layer.insert(section, option, value);
        }
        Ok((layer, warnings))
    }

    /// An empty layer for the command line. [`Layer::set`] fills it.
    pub fn flags() -> Self {
        Self { name: "command line".into(), options: Table::new() }
    }

    /// Sets an option, such as `server.port`, to the value of a text. Panics if there is no such option, or if it has
    /// another type.
    pub fn set(&mut self, path: &str, text: &str) {
        let (section, option) = path.rsplit_once('.').expect("a section and an option");
        let value = parse_like(&defaults()[section][option], text);
        self.insert(section, option, value.expect("a value of the option's type"));
    }

    fn insert(&mut self, section: &str, option: &str, value: Value) {
        let table = self.options.entry(section).or_insert_with(|| Value::Table(Table::new()));
        table.as_table_mut().expect("sections are tables").insert(option.to_owned(), value);
    }
}

impl Config {
    /// The defaults, overlaid by `layers` in order.
    pub fn from_layers(layers: &[Layer]) -> Result<Self, ConfigError> {
        let mut merged = defaults().clone();
        let mut config = Self::read(&merged).expect("config/default.toml is valid");
        // Layers are read one at a time, so that an error names its layer.
        for layer in layers {
            let overlaid = overlay(&mut merged, &layer.options).and_then(|()| Self::read(&merged));
            config = overlaid.map_err(|problem| ConfigError { source_name: layer.name.clone(), problem })?;
        }
        Ok(config)
    }

    /// All options as TOML, for another process of this binary; [`Config::from_toml`] reads them.
    pub fn to_toml(&self) -> String {
        toml::to_string(&self.options).expect("options are TOML")
    }

    /// All options as TOML. A comment after each one has its source: the last of `layers` that sets it, or `default`.
    pub fn describe(&self, layers: &[Layer]) -> String {
        let mut text = String::new();
        for (section, options) in &self.options {
            let _ = writeln!(text, "{}[{section}]", if text.is_empty() { "" } else { "\n" });
            for (option, value) in options.as_table().expect("sections are tables") {
                let sets =
                    |layer: &&Layer| layer.options.get(section).is_some_and(|set| set.get(option).is_some());
                let source = layers.iter().rfind(sets).map_or("default", |layer| &layer.name);
                let _ = writeln!(text, "{:<40} # {source}", format!("{option} = {value}"));
            }
        }
        text
    }

    /// The options of one of several models, which has the rest of its options from this configuration.
    pub fn of_model(&self, model: &ServedModel) -> Result<Self, String> {
        let within = [
            ("temperature", model.temperature, 0.0..=2.0),
            ("top_p", model.top_p, 0.0..=1.0),
            ("min_p", model.min_p, 0.0..=1.0),
            ("repetition_penalty", model.repetition_penalty, 0.01..=10.0),
        ];
        for (option, value, range) in within {
            if let Some(value) = value.filter(|value| !range.contains(value)) {
                return Err(format!("{option}: expected {} to {}, got {value}", range.start(), range.end()));
            }
        }
        let mut options = self.options.clone();
        let text = |option: &Option<String>| Value::from(option.clone().unwrap_or_default());
        // These belong to one model, so that of the section `model` is not taken.
        let own = [
            ("path", Value::from(model.path.clone())),
            ("name", text(&model.name)),
            ("config", text(&model.config)),
            ("tokenizer", text(&model.tokenizer)),
            ("chat_template", text(&model.chat_template)),
            ("tool_call_parser", text(&model.tool_call_parser)),
            ("draft", text(&model.draft)),
        ];
        for (option, value) in own {
            options["model"][option] = value;
        }
        // The default is for a model that has the memory alone.
        let is_default = Value::from(self.engine.sequences as i64) == defaults()["engine"]["sequences"];
        let sequences = model.sequences.or(is_default.then_some(SEVERAL_SEQUENCES));
        let changed = [
            ("model", "quantize", model.quantize.clone().map(Value::from)),
            ("model", "precision", model.precision.clone().map(Value::from)),
            ("model", "vision", model.vision.clone().map(Value::from)),
            ("model", "image_tokens", model.image_tokens.map(Value::from)),
            ("model", "max_image_tokens", model.max_image_tokens.map(Value::from)),
            ("engine", "context", model.context.map(Value::from)),
            ("engine", "sequences", sequences.map(Value::from)),
            ("engine", "idle_unload_s", model.ttl_s.map(Value::from)),
            ("kv", "dtype", model.kv.clone().map(Value::from)),
            ("kv", "whole_contexts", Some(Value::from(true))),
        ];
        for (section, option, value) in changed {
            if let Some(value) = value {
                options[section][option] = value;
            }
        }
        options["models"]["serve"] = Value::Array(Vec::new());
        Self::read(&options)
    }

    /// These options with the list of models of `other`.
    pub fn with_list_of(&self, other: &Self) -> Self {
        let mut config = self.clone();
        config.models = Models { dir: self.models.dir.clone(), ..other.models.clone() };
        for option in ["serve", "pulled"] {
            config.options["models"][option] = other.options["models"][option].clone();
        }
        config
    }

    /// The options of one of several models, whose files allow at most `longest` tokens of context.
    pub fn with_bounded_context(self, longest: usize) -> Self {
        if self.engine.context.is_some() {
            return self;
        }
        let mut options = self.options;
        options["engine"]["context"] = Value::from(SEVERAL_CONTEXT.min(longest) as i64);
        Self::read(&options).expect("a context may have any length")
    }

    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        Self::from_layers(&[Layer::file("the options of the server", text)?])
    }

    /// The options whose values differ in `other`, as `section.option`.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let both = options(&self.options).zip(options(&other.options));
        // Both sides have every option, in alphabetical order.
        let differing = both.filter(|((.., one), (.., another))| one != another);
        differing.map(|((section, option, _), _)| format!("{section}.{option}")).collect()
    }

    /// Reads the merged options. An error names the option.
    fn read(merged: &Table) -> Result<Self, String> {
        let defaults = defaults();
        let parse = |mut merged: Table| {
            // An option whose default is "" or 0 is `None` as long as it has that value.
            for (section, option, default) in options(defaults) {
                let is_nothing = default.as_str() == Some("") || default.as_integer() == Some(0);
                if is_nothing && merged[section][option] == *default {
                    merged[section].as_table_mut().expect("sections are tables").remove(option);
                }
            }
            Value::Table(merged).try_into::<Config>()
        };
        let mut config = parse(merged.clone()).map_err(|error| {
            // The invalid option fails even if every other option has its default.
            let mut culprits = options(merged).filter(|(section, option, value)| {
                let mut alone = defaults.clone();
                alone[*section][*option] = (*value).clone();
                parse(alone).is_err()
            });
            let culprit = culprits.next().map(|(section, option, _)| format!("{section}.{option}"));
            format!("{}: {}", culprit.unwrap_or_default(), in_words(&one_line(error.message())))
        })?;
        config.options = merged.clone();
        let Config { log, server, model, engine, gpu, kv, npu, .. } = &config;
        if let Some(level) = &log.level {
            check_level(level).map_err(|problem| format!("log.level: {problem}"))?;
        }
        let in_range = |option: &str, value: u64, low: u64, high: u64| {
            let problem = || format!("{option}: expected {low} to {high}, got {value}");
            (low..=high).contains(&value).then_some(()).ok_or_else(problem)
        };
        in_range("hardware.hang_timeout_s", config.hardware.hang_timeout_s.unwrap_or(0) as u64, 0, 600)?;
        in_range("server.queue", server.queue as u64, 1, 4096)?;
        in_range("server.requests_per_client", server.requests_per_client as u64, 1, 4096)?;
        in_range("server.connections", server.connections as u64, 1, 65_536)?;
        in_range("server.head_timeout_s", server.head_timeout_s, 1, 300)?;
        in_range("server.idle_timeout_s", server.idle_timeout_s, 1, 3600)?;
        in_range("server.max_body_bytes", server.max_body_bytes as u64, 1024, 1 << 30)?;
        in_range("server.stored_responses", server.stored_responses as u64, 0, 1 << 20)?;
        in_range("server.stored_response_bytes", server.stored_response_bytes as u64, 0, 1 << 40)?;
        in_range("server.shutdown_grace_s", server.shutdown_grace_s, 0, 3600)?;
        for (option, tokens) in
            [("model.image_tokens", model.image_tokens), ("model.max_image_tokens", model.max_image_tokens)]
        {
            if !IMAGE_TOKENS.contains(&tokens) {
                return Err(format!("{option}: expected one of {IMAGE_TOKENS:?}, got {tokens}"));
            }
        }
        if model.image_tokens > model.max_image_tokens {
            return Err(format!(
                "model.image_tokens: expected at most model.max_image_tokens, which is {}, got {}",
                model.max_image_tokens, model.image_tokens
            ));
        }
        in_range("gpu.max_submit_ms", gpu.max_submit_ms, 1, 1000)?;
        in_range("engine.prefill_chunk", engine.prefill_chunk as u64, 1, 8192)?;
        in_range("engine.sequences", engine.sequences as u64, 1, 64)?;
        in_range("engine.token_gap_ms", engine.token_gap_ms, 1, 60_000)?;
        in_range("engine.idle_unload_s", engine.idle_unload_s.unwrap_or(0) as u64, 0, 604_800)?;
        in_range("engine.speculation_tokens", engine.speculation_tokens as u64, 0, 64)?;
        in_range("kv.block_size", kv.block_size as u64, 1, 256)?;
        in_range("kv.disk.max_bytes", config.kv_disk.max_bytes, 1 << 20, 1 << 50)?;
        in_range("npu.kv_heads", npu.kv_heads.unwrap_or(0) as u64, 0, 64)?;
        in_range("npu.keys", npu.keys as u64, 512, 16_384)?;
        in_range("npu.deadline_ms", npu.deadline_ms, 100, 5000)?;
        // The GPU waits while the NPU computes, so the NPU's deadline must pass before the GPU counts as hung.
        const AROUND_MS: u64 = 4000;
        if let Some(hang) = config.hardware.hang_timeout_s
            && npu.mode != NpuMode::Off
            && hang as u64 * 1000 <= npu.deadline_ms + AROUND_MS
        {
            return Err(format!(
                "hardware.hang_timeout_s: expected more than npu.deadline_ms + {} s, because the GPU waits for the NPU; \
                 got {hang} s",
                AROUND_MS / 1000
            ));
        }
        if !cfg!(feature = "npu") && npu.mode != NpuMode::Off {
            return Err("npu.mode: this program was built without the feature npu".into());
        }
        for (i, model) in config.models.serve.iter().enumerate() {
            let invalid = |problem| format!("models.serve, number {}: {problem}", i + 1);
            if model.path.is_empty() {
                return Err(invalid("path: expected the path or the name of a model, got nothing".into()));
            }
            config.of_model(model).map_err(invalid)?;
        }
        if server.host.is_empty() {
            return Err("server.host: expected an address or a host name, got nothing".into());
        }
        if server.model_aliases.iter().any(String::is_empty) {
            return Err("server.model_aliases: expected names, got an empty one".into());
        }
        for host in &server.allowed_hosts {
            check_host(host).map_err(|problem| format!("server.allowed_hosts: {problem}"))?;
        }
        for origin in &server.cors_origins {
            check_origin(origin).map_err(|problem| format!("server.cors_origins: {problem}"))?;
        }
        if server.tls_cert.is_some() != server.tls_key.is_some() {
            let given = if server.tls_cert.is_some() { "tls_cert" } else { "tls_key" };
            return Err(format!(
                "server.{given}: only one of tls_cert and tls_key is set; expected both or neither"
            ));
        }
        Ok(config)
    }
}

/// Accepts a level, or directives separated by commas: `info,unicorn=debug`.
fn check_level(level: &str) -> Result<(), String> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    // A single unknown word would be read as a module's name, and only that module would be logged.
    let known = |directive: &str| {
        let level = directive.rsplit_once('=').map_or(directive, |(_, level)| level);
        LEVELS.contains(&level.trim().to_ascii_lowercase().as_str())
    };
    if level.split(',').all(known) {
        return Ok(());
    }
    Err(format!(
        "expected one of {}, or directives such as info,unicorn=debug, got {level:?}",
        LEVELS.join(", ")
    ))
}

fn check_host(host: &str) -> Result<(), String> {
    let sound = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if !host.is_empty() && host.chars().all(sound) {
        return Ok(());
    }
    Err(format!("expected a host name without port, such as box.lan, got {host:?}"))
}

/// Accepts `*`, or an origin in the form that browsers send.
fn check_origin(origin: &str) -> Result<(), String> {
    let sound = |c: char| c.is_ascii_graphic() && !"/,\"*@".contains(c);
    let named = origin.split_once("://").is_some_and(|(scheme, host)| {
        !scheme.is_empty()
            && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
            && !host.is_empty()
            && host.chars().all(sound)
    });
    if named || origin == "*" {
        return Ok(());
    }
    Err(format!(
        "expected \"*\" or an origin such as http://localhost:3000, without a path or a final slash, got {origin:?}"
    ))
}

/// A folder in the user's home for files that are not configuration.
#[derive(Debug, Clone, Copy)]
pub enum UserFolder {
    /// Files that can be created again: measured kernels, compiled pipelines.
    Cache,
    /// Files that must persist: the history of the terminal chat.
    State,
}

impl UserFolder {
    /// The path from the environment: the project's variable, or else the folder `unicorn` at the place of the XDG base
    /// directory specification. `None` if the environment has neither these variables nor `HOME`.
    pub fn path(self, variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
        let (own, xdg, in_home) = match self {
            Self::Cache => ("UNICORN_CACHE_DIR", "XDG_CACHE_HOME", ".cache"),
            Self::State => ("UNICORN_STATE_DIR", "XDG_STATE_HOME", ".local/state"),
        };
        let path = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let users = || path(xdg).or_else(|| Some(path("HOME")?.join(in_home)));
        path(own).or_else(|| Some(users()?.join("unicorn")))
    }
}

fn is_ours(path: &str) -> bool {
    OUR_VARIABLES.contains(&path) || OUR_PREFIXES.iter().any(|prefix| path.starts_with(prefix))
}

fn defaults() -> &'static Table {
    static DEFAULTS: LazyLock<Table> =
        LazyLock::new(|| with_subsections(DEFAULT_TOML.parse().expect("config/default.toml is valid TOML")));
    &DEFAULTS
}

/// The sections with those inside them as sections of their own: `disk` in `kv` is `kv.disk`.
fn with_subsections(sections: Table) -> Table {
    let mut all = Table::new();
    for (name, mut section) in sections {
        if let Some(options) = section.as_table_mut() {
            let inner: Vec<String> =
                options.iter().filter(|(_, value)| value.is_table()).map(|(name, _)| name.clone()).collect();
            for subsection in inner {
                let options = options.remove(&subsection).expect("just seen");
                all.insert(format!("{name}.{subsection}"), options);
            }
        }
        all.insert(name, section);
    }
    all
}

/// The end of the name of an option's variable, in small letters.
fn variable_of(section: &str, option: &str) -> String {
    format!("{}_{option}", section.replace('.', "_"))
}

/// Every option as (section, name, default).
fn options(defaults: &Table) -> impl Iterator<Item = (&str, &str, &Value)> {
    defaults.iter().flat_map(|(section, options)| {
        let options = options.as_table().expect("sections are tables");
        options.iter().map(move |(name, default)| (section.as_str(), name.as_str(), default))
    })
}

/// The section and name of the option whose path, such as `server_port`, differs from `path` by at most two letters.
fn nearest<'a>(path: &str, defaults: &'a Table, between: char) -> Option<(&'a str, &'a str)> {
    const NEAR: usize = 2;
    let paths = options(defaults).map(|(section, option, _)| (section, option));
    let distance =
        |section, option| strsim::damerau_levenshtein(path, &format!("{section}{between}{option}"));
    let near = paths.map(|(section, option)| (distance(section, option), section, option)).min();
    near.filter(|(distance, ..)| *distance <= NEAR).map(|(_, section, option)| (section, option))
}

/// The option that was probably meant by an unknown one: an option with a similar path, or the only option of that name
/// in another section.
fn probably_meant(section: &str, option: &str, defaults: &Table) -> Option<String> {
    let elsewhere = || {
        let mut named = options(defaults).filter(|(_, name, _)| *name == option);
        named.next().map(|(section, name, _)| (section, name)).filter(|_| named.next().is_none())
    };
    let near = nearest(&format!("{section}.{option}"), defaults, '.').or_else(elsewhere);
    near.map(|(section, option)| format!("{section}.{option}"))
}

fn overlay(merged: &mut Table, layer: &Table) -> Result<(), String> {
    for (section, options) in layer {
        if !merged.contains_key(section) {
            let first = options.as_table().and_then(|options| options.keys().next());
            let (option, near) = match first {
                Some(first) => (format!("{section}.{first}"), probably_meant(section, first, merged)),
                None => (section.to_owned(), probably_meant("", section, merged)),
            };
            return Err(unknown(&option, near, merged));
        }
        let Value::Table(options) = options else {
            return Err(format!("{section}: expected a section, [{section}], got a value"));
        };
        for (option, value) in options {
            let table = merged[section].as_table().expect("sections are tables");
            if !table.contains_key(option) {
                let near = probably_meant(section, option, merged);
                return Err(unknown(&format!("{section}.{option}"), near, table));
            }
            merged[section][option] = value.clone();
        }
    }
    Ok(())
}

fn unknown(option: &str, near: Option<String>, among: &Table) -> String {
    let expected = || among.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
    near.map_or_else(
        || format!("unknown option {option}; expected one of {}", expected()),
        |near| misspelt(option, &near),
    )
}

fn misspelt(option: &str, near: &str) -> String {
    format!("unknown option {option}; did you mean {near}?")
}

/// Parses the text of a variable as the type of the option's default value.
fn parse_like(default: &Value, text: &str) -> Result<Value, String> {
    match default {
        Value::Boolean(_) => {
            text.parse().map(Value::Boolean).map_err(|_| format!("expected true or false, got {text:?}"))
        }
        Value::Integer(_) => {
            text.parse().map(Value::Integer).map_err(|_| format!("expected an integer, got {text:?}"))
        }
        Value::Float(_) => {
            text.parse().map(Value::Float).map_err(|_| format!("expected a number, got {text:?}"))
        }
        Value::Array(_) => {
            let items = text.split(',').map(str::trim).filter(|item| !item.is_empty());
            Ok(Value::Array(items.map(|item| Value::String(item.to_owned())).collect()))
        }
        _ => Ok(Value::String(text.to_owned())),
    }
}

fn byte_size<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<u64>, D::Error> {
    some_bytes(d).map(Some)
}

fn some_bytes<'de, D: serde::Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    let bytes = match Value::deserialize(d)? {
        Value::String(text) => parse_bytes(&text),
        other => Err(format!("expected a size in quotes, such as \"16GiB\", got {other}")),
    };
    bytes.map_err(serde::de::Error::custom)
}

fn parsed<'de, D: serde::Deserializer<'de>, T: FromStr<Err: Display>>(d: D) -> Result<Option<T>, D::Error> {
    let parsed = String::deserialize(d)?.parse();
    parsed.map(Some).map_err(|problem| serde::de::Error::custom(format!("{problem}; nothing is the default")))
}

const BYTE_UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];

/// Parses a size in bytes: a number with a binary unit (`16GiB`, `1.5 GiB`, `512MiB`), or a number alone. K, M, G and T
/// mean KiB to TiB. `GB` is refused because it is ambiguous: 10^9 or 2^30 bytes.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let expected =
        || format!("expected a size such as 16GiB (or 16G, which is the same) or 512MiB, got {text:?}");
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(trimmed.len());
    let (number, unit) = (&trimmed[..digits], trimmed[digits..].trim());
    let power = match unit {
        "" => 0,
        unit => {
            let is_it =
                |name: &&str| *name == unit || (unit.len() == 1 && name[..1].eq_ignore_ascii_case(unit));
            BYTE_UNITS.iter().position(is_it).ok_or_else(expected)?
        }
    };
    let bytes = match number.parse::<u64>() {
        Ok(whole) => whole.checked_mul(1 << (10 * power)).ok_or_else(expected)?,
        Err(_) => {
            let number: f64 = number.parse().map_err(|_| expected())?;
            (number * 1024f64.powi(power as i32)).round() as u64
        }
    };
    if bytes > 1 << 50 { Err(expected()) } else { Ok(bytes) }
}

/// A number of bytes in binary units, for output to users.
pub fn show_bytes(n: u64) -> String {
    if n < 1024 {
        return format!("{n} B");
    }
    let power = (n.ilog2() / 10).min(BYTE_UNITS.len() as u32 - 1);
    format!("{:.1} {}", n as f64 / 1024f64.powi(power as i32), BYTE_UNITS[power as usize])
}

/// An error of a parser without the names of Rust's types of numbers.
fn in_words(problem: &str) -> String {
    let types = [
        ("u16", "a whole number from 0 to 65535"),
        ("u32", "a whole number, not negative"),
        ("u64", "a whole number, not negative"),
        ("usize", "a whole number, not negative"),
        ("f32", "a number"),
        ("f64", "a number"),
        ("a sequence", "a list"),
    ];
    let meant = types.iter().find_map(|(name, meaning)| {
        let start = problem.strip_suffix(name)?.strip_suffix("expected ")?;
        Some(format!("{start}expected {meaning}"))
    });
    meant.unwrap_or_else(|| problem.to_owned())
}

/// Joins the lines of a TOML parser's error.
fn one_line(message: &str) -> String {
    message.lines().map(str::trim).filter(|l| !l.is_empty()).collect::<Vec<_>>().join(" ")
}
