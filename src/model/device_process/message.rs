//! The messages between a parent and its device process.

use std::borrow::Cow;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::model::{Batch, DraftRequest, Limits, RunnerError, Sampled, Sampling};

/// What the parent asks for. The child answers [`Call::Wait`], [`Call::Draft`] and [`Call::Probe`]; a failure of the
/// others is the answer to the next of these.
#[derive(Serialize, Deserialize)]
pub(super) enum Call<'a> {
    Submit(Cow<'a, Batch>, Cow<'a, Sampling>),
    Masks(Vec<Words>),
    /// Waits for the oldest step.
    Wait,
    Draft(Cow<'a, [DraftRequest]>),
    Probe,
}

/// What the child says once, when its runner is there.
#[derive(Serialize, Deserialize)]
pub(super) struct Ready {
    pub limits: Limits,
    pub has_draft: bool,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Answer {
    Sampled(Sampled),
    Drafted(Vec<Vec<u32>>),
    Probed,
    Failed(RunnerError),
}

/// The words of a mask, sent as bytes: most of them have many bits, and numbers that are sent as numbers take more bytes
/// the larger they are.
pub(super) struct Words(pub Arc<[u32]>);

impl Serialize for Words {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(bytemuck::cast_slice(&self.0))
    }
}

impl<'de> Deserialize<'de> for Words {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = <&[u8]>::deserialize(deserializer)?;
        let words =
            bytes.chunks_exact(4).map(|word| u32::from_ne_bytes([word[0], word[1], word[2], word[3]]));
        Ok(Words(words.collect()))
    }
}
