//! The messages between a parent and its device process.

use std::borrow::Cow;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::config::Courtesy;
use crate::model::runner::words;
use crate::model::{Batch, DraftRequest, Limits, RunnerError, Sampled, Sampling};

/// What the parent asks for. The child answers [`Call::Wait`], [`Call::Draft`] and [`Call::Probe`]; a failure of the
/// others is the answer to the next of these.
#[derive(Serialize, Deserialize)]
pub(super) enum Call<'a> {
    Submit(Cow<'a, Batch>, Cow<'a, Sampling>),
    Masks(Vec<Words>),
    Courtesy(Courtesy),
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
    pub attention_path: u32,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Answer {
    /// A step's results, and the attention path from then on.
    Sampled(Sampled, u32),
    Drafted(Vec<Vec<u32>>),
    Probed,
    Failed(RunnerError),
}

/// The words of a mask.
#[derive(Serialize, Deserialize)]
pub(super) struct Words(#[serde(with = "words")] pub Arc<[u32]>);
