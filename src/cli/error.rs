//! Errors of the commands: one line for the person at the terminal.

use std::path::PathBuf;

use crate::api::{KeysError, TlsError};
use crate::checkpoint::CheckpointError;
use crate::config::ConfigError;
use crate::device::StartError;
use crate::engine::{EngineError, SubmitError};
use crate::gpu::GpuError;
use crate::hub::HubError;
use crate::kv_disk::KvStoreError;
use crate::library::LibraryError;
use crate::model::RunnerError;
use crate::model::config::ConfigError as ModelConfigError;
use crate::model::load::LoadError;
use crate::session::SessionError;
use crate::text::TextError;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{}: {error}", path.display())]
    File { path: PathBuf, error: std::io::Error },
    /// `other` selects another port.
    #[error(
        "port {port} of {host} is taken by another program: stop it, or choose another port with {other}"
    )]
    PortTaken { host: String, port: u16, other: String },
    #[error("cannot listen on {host}, port {port}: {error}")]
    Listen { host: String, port: u16, error: std::io::Error },
    #[error(
        "other machines can reach {0}, and there is no API key: give a file of keys with --api-key-file, listen on \
         127.0.0.1, or set server.allow_keyless to allow clients without a key"
    )]
    Keyless(std::net::SocketAddr),
    #[error(transparent)]
    Keys(#[from] KeysError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(
        "server.connections = {connections} needs {needed} open files, but the limit of this process is {most}: \
         raise the limit (`ulimit -n`, or LimitNOFILE= in systemd), or lower server.connections"
    )]
    OpenFiles { connections: usize, needed: u64, most: u64 },
    #[error("kv.disk.path: {0}")]
    KvStore(#[from] KvStoreError),
    #[error("cannot serve: {0}")]
    Serve(std::io::Error),
    #[error("cannot start the runtime: {0}")]
    Runtime(std::io::Error),
    #[error("{what} could not be read within {seconds} s: the disk or network of the files does not answer")]
    ReloadTimeout { what: &'static str, seconds: u64 },
    #[error("the configuration was not read: {0} earlier readings still wait for their disk or network")]
    TooManyReloads(usize),
    #[error("cannot write to standard output: {0}")]
    Output(std::io::Error),
    /// A running server that a command asks.
    #[error("the server at {url}: {problem}")]
    Remote { url: String, status: Option<u16>, problem: String },
    #[error("terminal input failed: {0}")]
    Terminal(rustyline::error::ReadlineError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    ModelSpec(#[from] ModelConfigError),
    #[error(transparent)]
    Weights(#[from] crate::model::weights::WeightsError),
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[error(transparent)]
    DoesNotFit(#[from] Box<crate::model::memory::DoesNotFit>),
    #[error("{0}; or describe a machine with --vram and --gtt")]
    NoMachine(GpuError),
    #[error(transparent)]
    Hub(#[from] HubError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Text(#[from] TextError),
    #[error(transparent)]
    Submit(#[from] SubmitError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Library(#[from] LibraryError),
    #[error(transparent)]
    Runner(#[from] RunnerError),
    #[error(transparent)]
    Session(#[from] SessionError),
    /// A wrong argument or input that the parser of the command line cannot detect.
    #[error("{0}")]
    Argument(String),
    /// A tool, a compiler, or the URL of a server, which a command uses, and the problem with it.
    #[error("{tool}: {problem}")]
    Tool { tool: String, problem: String },
    #[error(transparent)]
    Start(#[from] StartError),
    /// The NPU is required, and cannot be used: the doctor's code, and the message.
    #[error("the NPU is required (npu.mode), but cannot be used: {message} ({code})")]
    Npu { code: String, message: String },
    #[error("the channel to the device process failed: {0}")]
    Channel(std::io::Error),
    #[error("internal error while loading the model (see the messages above)")]
    LoadPanicked,
    /// The number of problems that the doctor found, which its report lists.
    #[error("{}", doctor_problems(*.0))]
    DoctorProblems(usize),
    /// Messages of a pipe without an answer. The error of each was printed.
    #[error("{unanswered} of {asked} messages were not answered: see the errors above")]
    Unanswered { unanswered: usize, asked: usize },
    #[error("internal error (see the messages above)")]
    Panicked,
}

impl Error {
    /// The exit code of `serve`, similar to sysexits.h. It shows a supervisor whether a restart may help:
    /// - 1: the system refuses threads, memory or files;
    /// - 70: an internal error;
    /// - 75: the device is lost, missing, or short of memory;
    /// - 76: the device computes wrong results; a restart does not help;
    /// - 78: configuration, model, port or keys are wrong; a restart does not help.
    pub fn exit_code(&self) -> u8 {
        const SYSTEM: u8 = 1;
        const SOFTWARE: u8 = 70;
        const DEVICE: u8 = 75;
        const WRONG: u8 = 76;
        const CONFIGURATION: u8 = 78;
        match self {
            Self::Start(StartError::Refused(refusal)) => refusal.exit_code,
            Self::Start(StartError::Channel(_)) => SYSTEM,
            Self::Npu { code, .. } if ["npu-self-test", "npu-no-output"].contains(&code.as_str()) => WRONG,
            // A restart may help: the NPU may be free or respond then.
            Self::Npu { code, .. }
                if ["npu-timeout", "npu-command-state", "npu-no-columns", "npu-process"]
                    .contains(&code.as_str()) =>
            {
                DEVICE
            }
            Self::Runner(RunnerError::Wrong(_)) | Self::Start(StartError::Runner(RunnerError::Wrong(_))) => {
                WRONG
            }
            Self::Gpu(_)
            | Self::NoMachine(_)
            | Self::Runner(_)
            | Self::Start(_)
            | Self::Load(LoadError::Gpu(_) | LoadError::NotResident(_))
            | Self::Engine(EngineError::Lost(_))
            | Self::Session(SessionError::Engine(EngineError::Lost(_))) => DEVICE,
            Self::LoadPanicked | Self::Panicked | Self::Engine(_) | Self::Submit(_) | Self::Session(_) => {
                SOFTWARE
            }
            // A restart may help: more memory or threads may be available then.
            Self::Text(TextError::NoThread { .. })
            | Self::Checkpoint(CheckpointError::NoMemory { .. })
            | Self::ModelSpec(ModelConfigError::Checkpoint(CheckpointError::NoMemory { .. }))
            | Self::Load(LoadError::Checkpoint(CheckpointError::NoMemory { .. }))
            | Self::Load(LoadError::Config(ModelConfigError::Checkpoint(CheckpointError::NoMemory {
                ..
            })))
            // The server that uses the folder may have ended then.
            | Self::KvStore(KvStoreError::Busy { .. })
            | Self::Library(_)
            | Self::Serve(_)
            | Self::Runtime(_)
            | Self::ReloadTimeout { .. }
            | Self::TooManyReloads(_)
            | Self::Output(_)
            | Self::Channel(_)
            | Self::Remote { .. }
            | Self::Terminal(_)
            | Self::Tool { .. }
            | Self::Unanswered { .. }
            | Self::DoctorProblems(_) => SYSTEM,
            Self::File { .. }
            | Self::PortTaken { .. }
            | Self::Listen { .. }
            | Self::Keyless(_)
            | Self::Keys(_)
            | Self::Tls(_)
            | Self::OpenFiles { .. }
            | Self::Config(_)
            | Self::Checkpoint(_)
            | Self::ModelSpec(_)
            | Self::Weights(_)
            | Self::DoesNotFit(_)
            | Self::Hub(_)
            | Self::Load(_)
            | Self::Text(_)
            | Self::Npu { .. }
            | Self::KvStore(_)
            | Self::Argument(_) => CONFIGURATION,
        }
    }
}

fn doctor_problems(problems: usize) -> String {
    match problems {
        1 => "1 problem of this machine prevents `unicorn serve` from running: see above".into(),
        n => format!("{n} problems of this machine prevent `unicorn serve` from running: see above"),
    }
}
