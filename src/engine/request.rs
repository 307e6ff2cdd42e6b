//! What is asked of the engine, and whose it is.

use std::fmt;
use std::sync::Arc;

use super::mask::TokenMask;
use crate::model::SamplingParams;

/// Who asks, as far as fairness goes: an API key, or an address.
pub type ClientId = u64;

/// Who may share what is computed: a prompt finds in the prefix cache what came with the same salt, and nothing else. It is
/// compared byte by byte; the empty one, the default, is as good as any other.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct CacheSalt(Arc<[u8]>);

impl CacheSalt {
    pub fn new(bytes: impl Into<Arc<[u8]>>) -> Self {
        Self(bytes.into())
    }
}

/// Not the bytes: who knows them finds what others have asked.
impl fmt::Debug for CacheSalt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CacheSalt({} bytes)", self.0.len())
    }
}

/// Who goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Priority {
    /// Somebody waits for it.
    #[default]
    Interactive,
    /// Gets on where no interactive request is there, and what it leaves in the prefix cache goes before what those left.
    Background,
}

/// Events of each answer of a request that may wait for its reader: some seconds of an answer, or a reader's pause.
pub const EVENTS: usize = 1024;

/// The longest queue that an engine may have.
pub const MAX_QUEUE: usize = 4096;

/// One prompt and how to answer it. Ids are `0..limits.vocab_size`.
#[derive(Debug, Clone)]
pub struct Request {
    pub prompt: Vec<u32>,
    /// How the ids of all its answers are drawn.
    pub sampling: Arc<SamplingParams>,
    /// The seed of the first answer.
    pub seed: u64,
    /// Ids to generate at most; none is what the context leaves after the prompt.
    pub max_tokens: Option<usize>,
    /// Which ids may come next; each answer has its own.
    pub mask: Option<Box<dyn TokenMask>>,
    /// Log probabilities of the prompt's ids but the first, and of so many of the most likely ones in their places. The prompt is computed afresh for them.
    pub prompt_logprobs: Option<usize>,
    /// The mean of the prompt's hidden states is wanted, and no answer: of what is above, the prompt alone counts.
    pub pooling: bool,
    /// Seeds of further answers to the same prompt, which is computed once.
    pub more_seeds: Vec<u64>,
    /// Who asks, for fairness between clients.
    pub client: ClientId,
    /// With whom it shares the prefix cache.
    pub cache_salt: CacheSalt,
    pub priority: Priority,
}

impl Request {
    /// One greedy answer, as long as the context allows, of interactive priority, whose cached prefix is everybody's who
    /// gives no salt.
    pub fn new(prompt: Vec<u32>) -> Self {
        Self {
            prompt,
            sampling: Arc::new(SamplingParams::GREEDY),
            seed: 0,
            max_tokens: None,
            mask: None,
            prompt_logprobs: None,
            pooling: false,
            more_seeds: Vec::new(),
            client: 0,
            cache_salt: CacheSalt::default(),
            priority: Priority::Interactive,
        }
    }
}
