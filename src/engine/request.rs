//! A request to the engine, and the client that it belongs to.

use std::fmt;
use std::sync::Arc;

use super::mask::TokenMask;
use crate::model::SamplingParams;

/// The client that a request is charged to: an API key, or an address.
pub type ClientId = u64;

/// A salt of the prefix cache: a prompt finds only blocks that were computed under the same salt. Salts are compared
/// byte by byte. The default is the empty salt, which has no special meaning.
///
/// The attention path is a part of it ([`Runner::attention_path`](crate::model::Runner::attention_path)), so that an
/// answer of one path is never built on blocks of another.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct CacheSalt {
    bytes: Arc<[u8]>,
    attention_path: u32,
}

impl CacheSalt {
    pub fn new(bytes: impl Into<Arc<[u8]>>) -> Self {
        Self { bytes: bytes.into(), attention_path: 0 }
    }

    /// The salt of the same bytes on another attention path.
    pub(super) fn on_path(&self, attention_path: u32) -> Self {
        Self { bytes: Arc::clone(&self.bytes), attention_path }
    }
}

/// The bytes are hidden, because anyone who knows a salt can find out what others have asked.
impl fmt::Debug for CacheSalt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CacheSalt({} bytes, path {})", self.bytes.len(), self.attention_path)
    }
}

/// The class of a request, which decides what goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Priority {
    /// A person waits for the answer.
    #[default]
    Interactive,
    /// The request runs only if no interactive request runs or waits. Its blocks in the prefix cache are evicted before
    /// the blocks of interactive requests.
    Background,
}

/// The most events of one answer that wait for the reader: some seconds of an answer, or a pause of the reader.
pub const EVENTS: usize = 1024;

/// The longest queue that an engine may have.
pub const MAX_QUEUE: usize = 4096;

/// A prompt, and how to answer it. Ids are `0..limits.vocab_size`.
#[derive(Debug, Clone)]
pub struct Request {
    pub prompt: Vec<u32>,
    /// How the ids of all answers are drawn.
    pub sampling: Arc<SamplingParams>,
    /// The seed of the first answer.
    pub seed: u64,
    /// The most ids to generate; `None` for all that the context leaves behind the prompt.
    pub max_tokens: Option<usize>,
    /// Says which ids may come next; each answer gets a copy of its own.
    pub mask: Option<Box<dyn TokenMask>>,
    /// Asks for log probabilities of the prompt's ids but the first, and of this many of the most likely ids in their
    /// places. The prefix cache does not help such a prompt.
    pub prompt_logprobs: Option<usize>,
    /// Asks for the mean of the prompt's hidden states in place of an answer. All fields above but `prompt` are ignored
    /// then.
    pub pooling: bool,
    /// The seeds of further answers to the same prompt, which is computed once.
    pub more_seeds: Vec<u64>,
    /// The client, for fairness between clients.
    pub client: ClientId,
    /// The salt under which the prefix cache finds and keeps the prompt.
    pub cache_salt: CacheSalt,
    pub priority: Priority,
}

impl Request {
    /// One greedy answer, as long as the context allows, of interactive priority, for client 0, under the empty salt.
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
