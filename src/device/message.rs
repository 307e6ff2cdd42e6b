//! The messages between a server and its device process. The server sends one [`Task`]; the process answers with
//! [`Load`]s, and after the last one with [`Ready`]. Then the server sends [`Call`]s, and [`Question`]s on a second
//! channel.

use std::borrow::Cow;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::loading::Loading;
use super::report::{DeviceReport, NpuReport};
use crate::checkpoint::HeldNames;
use crate::config::Courtesy;
use crate::model::words;
use crate::model::{Batch, DraftRequest, Limits, PoolBlock, RunnerError, Sampled, Sampling};

/// The model to load. The files of `model` follow, then those of `draft`, then the socket of the second channel.
#[derive(Serialize, Deserialize)]
pub(super) struct Task {
    /// The server's options as TOML.
    pub options: String,
    pub model: HeldNames,
    pub draft: Option<HeldNames>,
    /// The number of token ids of the tokenizer. Only the server reads the tokenizer.
    pub vocab_size: usize,
    /// The state of the NPU at the first load of this model; `None` at the first load.
    pub npu: Option<NpuReport>,
}

/// The child's messages during a load. The last message is `Done` or `Refused`. After the first [`Loading::Tuning`] the
/// child waits for a [`Measure`].
#[derive(Serialize, Deserialize)]
pub(super) enum Load {
    Doing(Loading),
    Done(Box<DeviceReport>),
    Refused(Refusal),
}

/// No other model computes now, so the child may measure the device, until its next message.
#[derive(Serialize, Deserialize)]
pub(super) struct Measure;

/// Why the child did not load the model.
#[derive(Debug, Serialize, Deserialize)]
pub struct Refusal {
    pub message: String,
    pub exit_code: u8,
}

/// The messages that the server may send at any time.
#[derive(Serialize, Deserialize)]
pub(super) enum Question {
    /// Asks for a [`DeviceState`](super::DeviceState).
    Observe,
    /// Sets the log filter. This has no answer.
    Log(String),
}

/// The child answers [`Call::Wait`], [`Call::Draft`], [`Call::Probe`], [`Call::EncodeImage`], [`Call::ReadBlocks`] and
/// [`Call::WriteBlocks`]. If another call fails, the failure is the answer to the next of these six.
#[derive(Serialize, Deserialize)]
pub(super) enum Call<'a> {
    Submit(Cow<'a, Batch>, Cow<'a, Sampling>),
    Masks(Vec<Words>),
    Courtesy(Courtesy),
    /// Waits for the oldest step.
    Wait,
    Draft(Cow<'a, [DraftRequest]>),
    Probe,
    /// Encodes an image: the slot, the width and height, and the pixels.
    EncodeImage(u32, [usize; 2], Bytes<'a>),
    ReadBlocks(Cow<'a, [PoolBlock]>),
    WriteBlocks(Cow<'a, [PoolBlock]>, Bytes<'a>),
}

/// The most bytes of a KV block that a message can have. A message has a whole block.
pub const MAX_BLOCK_BYTES: u64 = 48 << 20;

/// The facts about the child's runner, sent once.
#[derive(Serialize, Deserialize)]
pub(super) struct Ready {
    pub limits: Limits,
    pub has_draft: bool,
    pub attention_path: u32,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Answer<'a> {
    /// A step's results, and the attention path from then on.
    Sampled(Sampled, u32),
    Drafted(Vec<Vec<u32>>),
    Probed,
    Encoded,
    Blocks(Bytes<'a>),
    Written,
    Failed(RunnerError),
}

/// Bytes that are not copied one by one.
pub(super) struct Bytes<'a>(pub Cow<'a, [u8]>);

impl Serialize for Bytes<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Bytes<'_> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        <&[u8]>::deserialize(deserializer).map(|bytes| Bytes(Cow::Owned(bytes.to_vec())))
    }
}

/// The words of a mask.
#[derive(Serialize, Deserialize)]
pub(super) struct Words(#[serde(with = "words")] pub Arc<[u32]>);
