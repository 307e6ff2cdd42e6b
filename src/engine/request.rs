//! Requests to the engine, and the clients that they belong to.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest as _, Sha256};

use super::mask::TokenMask;
use crate::model::SamplingParams;

/// The client that a request is charged to: an API key, or an address.
pub type ClientId = u64;

/// A salt of the prefix cache: a prompt finds only blocks that were computed under the same salt. Salts are compared
/// byte by byte. The default is the empty salt, which has no special meaning.
///
/// The salt includes the attention path ([`Runner::attention_path`](crate::model::Runner::attention_path)), so that an
/// answer of one path never uses blocks of another.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct CacheSalt {
    bytes: Arc<[u8]>,
    attention_path: u32,
}

impl CacheSalt {
    pub fn new(bytes: impl Into<Arc<[u8]>>) -> Self {
        Self { bytes: bytes.into(), attention_path: 0 }
    }

    /// The same bytes with another attention path.
    pub(super) fn on_path(&self, attention_path: u32) -> Self {
        Self { bytes: Arc::clone(&self.bytes), attention_path }
    }

    /// A SHA-256 of the salt and of what identifies a model, the same in every process.
    pub(super) fn digest(&self, model: &[u8; 32]) -> [u8; 32] {
        let mut hasher = Sha256::new();
        hasher.update(model);
        hasher.update(self.attention_path.to_le_bytes());
        hasher.update(&self.bytes);
        hasher.finalize().into()
    }
}

/// Hides the bytes: a client that knows a salt can find out which prompts other clients sent under it.
impl fmt::Debug for CacheSalt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CacheSalt({} bytes, path {})", self.bytes.len(), self.attention_path)
    }
}

/// The scheduling class of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Priority {
    /// A user waits for the answer.
    #[default]
    Interactive,
    /// The request runs only if no interactive request runs or waits. Its blocks in the prefix cache are evicted before
    /// the blocks of interactive requests.
    Background,
}

/// How long the engine keeps the idle model after a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KeepAlive {
    /// As long as [`EngineConfig::idle_unload`](super::EngineConfig::idle_unload) says.
    #[default]
    Configured,
    For(Duration),
    Forever,
}

/// Maximum number of unread events of one answer. This is enough for a reader that pauses for some seconds.
pub const EVENTS: usize = 1024;

/// Maximum length of an engine's queue.
pub const MAX_QUEUE: usize = 4096;

/// The SHA-256 of an image's size and pixels.
pub type ImageHash = [u8; 32];

/// An image in a prompt.
#[derive(Clone, PartialEq, Eq)]
pub struct PromptImage {
    /// The positions of its tokens: [`ImageLimits::tokens_of`](crate::model::ImageLimits::tokens_of) its size.
    pub positions: Range<usize>,
    /// Images with the same hash are taken for the same image.
    pub hash: ImageHash,
    /// The width and height in pixels.
    pub size: [usize; 2],
    /// Red, green and blue, `[height, width, 3]`, as [`Runner::encode_image`](crate::model::Runner::encode_image) takes it.
    pub pixels: Arc<[u8]>,
}

impl PromptImage {
    /// Whether some of its tokens are before `position`, and others are not.
    pub fn is_split_at(&self, position: usize) -> bool {
        self.positions.start < position && position < self.positions.end
    }
}

/// Without the pixels, of which there are millions.
impl fmt::Debug for PromptImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PromptImage({:?})", self.positions)
    }
}

/// A prompt, and how to answer it. Ids are `0..limits.vocab_size`.
#[derive(Debug, Clone)]
pub struct Request {
    pub prompt: Vec<u32>,
    /// The images of the prompt, in ascending order of positions, which do not overlap. Any ids may be at these positions.
    pub images: Vec<PromptImage>,
    /// How the ids of all answers are drawn.
    pub sampling: Arc<SamplingParams>,
    /// The seed of the first answer.
    pub seed: u64,
    /// Maximum number of ids to generate. `None`: as many as the context has room for after the prompt.
    pub max_tokens: Option<usize>,
    /// Decides which ids may come next. Each answer gets its own copy.
    pub mask: Option<Box<dyn TokenMask>>,
    /// Requests log probabilities of all ids of the prompt except the first, and of this many of the most likely
    /// alternatives at each position. Such a prompt does not use blocks of the prefix cache, and has no images.
    pub prompt_logprobs: Option<usize>,
    /// Requests the mean of the prompt's hidden states instead of an answer. All fields above except `prompt` are then
    /// ignored. Such a prompt has no images.
    pub pooling: bool,
    /// The seeds of additional answers to the same prompt. The prompt is computed once.
    pub more_seeds: Vec<u64>,
    /// The scheduler shares the device fairly between clients.
    pub client: ClientId,
    /// The salt under which the prefix cache finds and stores the prompt.
    pub cache_salt: CacheSalt,
    pub priority: Priority,
    pub keep_alive: KeepAlive,
}

impl Request {
    /// One greedy answer, as long as the context allows, of interactive priority, for client 0, under the empty salt.
    pub fn new(prompt: Vec<u32>) -> Self {
        Self {
            prompt,
            images: Vec::new(),
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
            keep_alive: KeepAlive::Configured,
        }
    }
}
