//! A scripted [`Runner`] that checks every batch, for tests of the engine and the API.
//!
//! Its KV cache stores tokens instead of keys and values. Each place of a block holds the token that was written there
//! and a hash of all tokens up to it. So a step that reads a block that was shared, copied, freed or reused wrongly
//! fails. With a draft model there is a second cache, for that model.
//!
//! The embeddings of an image are a hash of its size and pixels. A token of an image depends on this hash and on its row, and
//! not on its id. So a block with a part of another image fails, too. Scripts see other ids in the place of images
//! ([`seen`]).

use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use unicorn::config::Courtesy;
use unicorn::engine::PromptImage;
use unicorn::model::offload::LEAST_TOKENS;
use unicorn::model::{
    Batch, BatchSequence, BlockCopy, DraftRequest, Draw, Input, KvLimits, KvPool, Limits, Logprobs,
    PoolBlock, Runner, RunnerError, RunnerFactory, Sampled, Sampling, Ticket, first_seen,
};

/// A test that waits for this long counts as hanging. Software Vulkan compiles kernels within a request, and on a busy
/// machine those of one model take a minute.
pub const HANG: Duration = Duration::from_secs(180);

pub fn fake_limits() -> Limits {
    Limits {
        max_batch_tokens: 16,
        max_sequences: 2,
        max_draws: 2,
        max_in_flight: 1,
        kv: kv_with(64, 32),
        max_context: 200,
        vocab_size: 512,
        hidden_size: 3,
        step_bytes: Vec::new(),
        block_bytes: Vec::new(),
        images: None,
    }
}

/// A KV cache with a pool of `full` blocks without a window, and a pool of `sliding` blocks with one.
pub fn kv_with(full: usize, sliding: usize) -> KvLimits {
    let pools = vec![KvPool { window: None, blocks: full }, KvPool { window: Some(10), blocks: sliding }];
    KvLimits { block_size: 4, pools }
}

/// Returns the id to sample after `tokens`, which are the prompt and the answer until now, for one draw.
pub type Script = Box<dyn FnMut(&[u32], &Draw) -> u32 + Send>;

/// A script that depends on every id before and on the seed. In three of four cases it repeats the id nine places
/// before, so that prompt lookup finds something.
pub fn mixed(vocab_size: usize) -> Script {
    Box::new(move |tokens, draw| mix(tokens, draw.seed, vocab_size))
}

fn fold(h: u64, x: u64) -> u64 {
    (h ^ x).wrapping_mul(0x0100_0000_01b3).rotate_left(17)
}

fn mix(tokens: &[u32], seed: u64, vocab_size: usize) -> u32 {
    let hash = tokens.iter().fold(seed, |h, id| fold(h, u64::from(*id)));
    match tokens.len().checked_sub(9) {
        Some(before) if hash >> 60 < 12 => tokens[before],
        _ => (hash % vocab_size as u64) as u32,
    }
}

/// The answer of [`mixed`]: up to `n` ids, without `end` and the ids after it.
pub fn mixed_answer(prompt: &[u32], n: usize, seed: u64, vocab_size: usize, end: u32) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..n {
        match mix(&tokens, seed, vocab_size) {
            id if id == end => break,
            id => tokens.push(id),
        }
    }
    tokens.split_off(prompt.len())
}

/// A script that answers every prompt with `answer` and then with `end`.
pub fn says(answer: &[u32], end: u32) -> Script {
    let answer = answer.to_vec();
    Box::new(move |tokens, _| {
        let said = (0..=answer.len())
            .rev()
            .find(|n| tokens.ends_with(&answer[..*n]))
            .expect("the empty answer always matches");
        answer.get(said).copied().unwrap_or(end)
    })
}

/// The first allowed id from `id` on, in a circle. If a bias forces an id, that one.
fn allowed(id: u32, tokens: &[u32], draw: &Draw, mask: Option<&[u32]>, vocab_size: u32) -> u32 {
    let bias = draw.biases(tokens.len());
    if let Some((forced, _)) = bias.iter().find(|(_, bias)| *bias >= 1e20) {
        return *forced;
    }
    let biased = |id| bias.iter().any(|(other, bias)| *other == id && *bias <= -100.0);
    let masked = |id: u32| mask.is_some_and(|m| m[id as usize / 32] >> (id % 32) & 1 == 0);
    let mut all = (id..vocab_size).chain(0..id);
    all.find(|id| !biased(*id) && !masked(*id)).expect("an allowed id")
}

/// The log probabilities that the fake runner reports: `id` first, and the ids after it with lower values.
pub fn fake_logprobs(id: u32, n: usize) -> Logprobs {
    Logprobs { drawn: -0.5, top: (0..n as u32).map(|i| (id + i, -0.5 - i as f32)).collect() }
}

/// The hidden state of a token: the id, the position, and 1 to count tokens.
fn fake_state(position: usize, id: u32) -> [f32; 3] {
    [id as f32, position as f32, 1.0]
}

/// The mean of the hidden states of a prompt.
pub fn fake_pooled(prompt: &[u32]) -> Vec<f32> {
    let n = prompt.len() as f32;
    let states = prompt.iter().enumerate().map(|(position, id)| fake_state(position, *id));
    states
        .fold(vec![0.0; 3], |sums, state| sums.iter().zip(state).map(|(a, b)| a + b).collect())
        .iter()
        .map(|sum| sum / n)
        .collect()
}

/// The id that scripts see for a token of an image with these pixels.
fn seen_id(image: u64, row: usize, vocab_size: usize) -> u32 {
    (fold(image, row as u64) % vocab_size as u64) as u32
}

fn embeddings([width, height]: [usize; 2], pixels: &[u8]) -> u64 {
    let size = fold(fold(0x1234_5678_9abc_def1, width as u64), height as u64);
    pixels.iter().fold(size, |h, byte| fold(h, u64::from(*byte)))
}

/// The ids that scripts see for a prompt with images.
pub fn seen(prompt: &[u32], images: &[PromptImage], vocab_size: usize) -> Vec<u32> {
    let mut seen = prompt.to_vec();
    for PromptImage { positions, size, pixels, .. } in images {
        for (row, position) in positions.clone().enumerate() {
            seen[position] = seen_id(embeddings(*size, pixels), row, vocab_size);
        }
    }
    seen
}

/// An image in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Encoded {
    embeddings: u64,
    tokens: usize,
}

/// A token in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Token {
    id: u32,
    /// Its image, and its row there.
    image: Option<(Encoded, usize)>,
}

impl Token {
    fn fold_into(self, hash: u64) -> u64 {
        match self.image {
            Some((image, row)) => fold(fold(hash, image.embeddings), !(row as u64)),
            None => fold(hash, u64::from(self.id) + 1),
        }
    }

    fn seen(self, vocab_size: usize) -> u32 {
        self.image.map_or(self.id, |(image, row)| seen_id(image.embeddings, row, vocab_size))
    }
}

/// The content of a place in a block: a token, and the hash of all tokens up to it.
type Place = Option<(Token, u64)>;

/// The KV cache of one model.
struct Cache {
    kv: KvLimits,
    pools: Vec<Vec<Place>>,
}

impl Cache {
    fn new(kv: KvLimits) -> Self {
        let pools = kv.pools.iter().map(|pool| vec![None; pool.blocks * kv.block_size]).collect();
        Self { kv, pools }
    }

    /// The index in a pool of a position of a sequence.
    fn place(&self, s: &BatchSequence, pool: usize, position: usize) -> usize {
        let size = self.kv.block_size;
        let block = s.blocks[pool].get(position / size);
        let block = block.unwrap_or_else(|| panic!("no block for position {position} in pool {pool}"));
        block as usize * size + position % size
    }

    fn copy(&mut self, copies: &[BlockCopy]) {
        let size = self.kv.block_size;
        for copy in copies {
            let from = copy.from as usize * size;
            self.pools[copy.pool].copy_within(from..from + size, copy.to as usize * size);
        }
    }

    /// The tokens before `start` in the blocks of the sequence, and their hash. Panics if the blocks are not of one
    /// text, or if the pools differ.
    fn tokens_before(&self, s: &BatchSequence) -> (Vec<Token>, u64) {
        let (mut tokens, mut hash) = (Vec::new(), 0);
        for position in 0..s.start {
            let held = self.pools[0][self.place(s, 0, position)];
            let (token, chain) = held.unwrap_or_else(|| panic!("position {position} was never computed"));
            hash = token.fold_into(hash);
            assert_eq!(chain, hash, "position {position} holds another text");
            tokens.push(token);
            for (pool, limits) in self.kv.pools.iter().enumerate().skip(1) {
                if position >= first_seen(limits.window, s.start) {
                    let other = self.pools[pool][self.place(s, pool, position)];
                    assert_eq!(other, held, "position {position} of pool {pool} holds another text");
                }
            }
        }
        (tokens, hash)
    }

    fn write(&mut self, s: &BatchSequence, position: usize, place: (Token, u64)) {
        for pool in 0..self.pools.len() {
            let at = self.place(s, pool, position);
            self.pools[pool][at] = Some(place);
        }
    }
}

/// Bytes of a place when blocks are read and written.
const PLACE_BYTES: usize = 40;

/// The bytes of a place. They are all zero if the place is empty.
fn place_bytes(place: &Place) -> [u8; PLACE_BYTES] {
    let words = place.map_or([0; 5], |(token, hash)| {
        let (image, row) = token.image.unwrap_or((Encoded { embeddings: 0, tokens: 0 }, 0));
        let kind = 1 + u64::from(token.image.is_some());
        [kind << 32 | u64::from(token.id), image.embeddings, image.tokens as u64, row as u64, hash]
    });
    let mut bytes = [0; PLACE_BYTES];
    bytes.copy_from_slice(&words.map(u64::to_ne_bytes).concat());
    bytes
}

/// The place that has these bytes.
fn place_of(bytes: [u8; PLACE_BYTES]) -> Place {
    let [id, embeddings, tokens, row, hash] =
        std::array::from_fn(|i| u64::from_ne_bytes(bytes[8 * i..8 * i + 8].try_into().expect("8 bytes")));
    let image = (Encoded { embeddings, tokens: tokens as usize }, row as usize);
    let image = (id >> 32 == 2).then_some(image);
    (id >> 32 > 0).then_some((Token { id: id as u32, image }, hash))
}

impl Cache {
    fn places(&mut self, PoolBlock { pool, block }: PoolBlock) -> &mut [Place] {
        let size = self.kv.block_size;
        &mut self.pools[pool][block as usize * size..][..size]
    }
}

fn ids_of(tokens: &[Token]) -> Vec<u32> {
    tokens.iter().map(|token| token.id).collect()
}

pub struct FakeRunner {
    limits: Limits,
    script: Script,
    cache: Cache,
    /// The draft model's cache. Its window is smaller.
    draft: Option<Cache>,
    wrong: u64,
    /// The last sampled id, by slot.
    sampled: Vec<Option<u32>>,
    /// The tokens, by slot and position.
    history: Vec<Vec<u32>>,
    /// Sums of hidden states, by slot.
    sums: Vec<[f32; 3]>,
    /// The images by slot.
    images: Vec<Option<Encoded>>,
    tickets: u64,
    /// Whether courtesy limits the runner to one step in flight.
    is_bound: bool,
    pending: VecDeque<(Ticket, Sampled)>,
    /// The last step and the texts of its sequences, while it waits for masks.
    unmasked: Option<(Batch, Sampling, Vec<Vec<Token>>)>,
    control: Control,
}

impl FakeRunner {
    pub fn new(limits: Limits, script: Script) -> (Box<Self>, Control) {
        let control = Control::default();
        let runner = Self {
            script,
            cache: Cache::new(limits.kv.clone()),
            draft: None,
            wrong: 0,
            sampled: vec![None; limits.max_sequences],
            history: vec![vec![u32::MAX; limits.max_context]; limits.max_sequences],
            sums: vec![[f32::NAN; 3]; limits.max_sequences],
            images: vec![None; limits.images.map_or(0, |images| images.slots)],
            limits,
            tickets: 0,
            is_bound: false,
            pending: VecDeque::new(),
            unmasked: None,
            control: control.clone(),
        };
        (Box::new(runner), control)
    }

    /// A runner with a draft model. Its draft tokens follow the script, except that about `wrong` of four are wrong.
    pub fn with_draft(limits: Limits, script: Script, wrong: u64) -> (Box<Self>, Control) {
        let (mut runner, control) = Self::new(limits, script);
        runner.wrong = wrong;
        let mut kv = runner.limits.kv.clone();
        kv.pools.iter_mut().for_each(|pool| pool.window = pool.window.map(|window| window.div_ceil(2)));
        runner.draft = Some(Cache::new(kv));
        (runner, control)
    }

    /// A runner whose blocks are read and written, so that its conversations can be on disk.
    pub fn with_disk(mut self: Box<Self>) -> Box<Self> {
        let caches = if self.draft.is_some() { 2 } else { 1 };
        let bytes = (caches * PLACE_BYTES * self.limits.kv.block_size) as u64;
        self.limits.block_bytes = vec![bytes; self.limits.kv.pools.len()];
        self
    }

    /// The caches: the model's, and the draft model's.
    fn caches(&mut self) -> impl Iterator<Item = &mut Cache> {
        [Some(&mut self.cache), self.draft.as_mut()].into_iter().flatten()
    }

    /// This runner with another runner's control.
    pub fn controlled_by(mut self: Box<Self>, control: &Control) -> Box<Self> {
        self.control = control.clone();
        self
    }

    fn check_shape(&self, batch: &Batch, sampling: &Sampling) {
        let limits = &self.limits;
        assert!(!batch.sequences.is_empty() && batch.sequences.len() <= limits.max_sequences, "{batch:?}");
        assert!(batch.num_tokens() <= limits.max_batch_tokens, "{} tokens in a step", batch.num_tokens());
        let mut slots = HashSet::new();
        let mut written = HashSet::new();
        for s in &batch.sequences {
            let end = s.start + s.input.len();
            assert!(!s.input.is_empty() && end <= limits.max_context, "positions {}..{end}", s.start);
            assert!(slots.insert(s.slot) && (s.slot as usize) < limits.max_sequences, "slot {}", s.slot);
            assert_eq!(s.blocks.len(), limits.kv.pools.len(), "pools");
            for (pool, position) in
                (0..s.blocks.len()).flat_map(|pool| (s.start..end).map(move |p| (pool, p)))
            {
                let place = self.cache.place(s, pool, position);
                assert!(written.insert((pool, place)), "position {position} is written by two sequences");
            }
        }
        assert!(sampling.pooling.is_sorted_by(|a, b| a.sequence < b.sequence), "{:?}", sampling.pooling);
        let order: Vec<_> = sampling.draws.iter().map(|d| (d.sequence, d.token)).collect();
        assert!(order.is_sorted(), "draws in order: {order:?}");
        assert!(sampling.draws.len() <= limits.max_draws, "{} draws", sampling.draws.len());
        for draw in &sampling.draws {
            assert!(
                draw.token < batch.sequences[draw.sequence].input.len()
                    && (draw.slot as usize) < limits.max_sequences
            );
        }
    }

    /// The tokens of an input with these ids, after the tokens `before`. Panics unless it has whole images, or the rest
    /// of an image whose beginning is in the cache, within every window.
    fn tokens(&self, s: &BatchSequence, ids: &[u32], before: &[Token]) -> Vec<Token> {
        let mut tokens: Vec<Token> = ids.iter().map(|id| Token { id: *id, image: None }).collect();
        let (mut free, mut begun) = (0, before.last().and_then(|last| last.image));
        for span in &s.images {
            assert!(matches!(s.input, Input::Ids(_)), "an image must be in the prompt");
            let image = self.images[span.slot as usize].expect("the slot has an image");
            assert!(
                free <= span.start && span.row + span.tokens == image.tokens,
                "{span:?} is not in order, or split: {image:?}"
            );
            assert!(span.row == 0 || span.start == 0, "{span:?} has no beginning");
            if span.row > 0 {
                let rows = before[s.start - span.row..].iter().map(|token| token.image);
                assert!(rows.eq((0..span.row).map(|row| Some((image, row)))), "{span:?} begins otherwise");
                let mut windows = self.limits.kv.pools.iter().map(|pool| first_seen(pool.window, s.start));
                assert!(windows.all(|first| first <= s.start - span.row), "{span:?} begins before a window");
                begun = None;
            }
            for (row, token) in (span.row..).zip(&mut tokens[span.start..][..span.tokens]) {
                token.image = Some((image, row));
            }
            free = span.start + span.tokens;
        }
        assert!(
            begun.is_none_or(|(image, row)| row + 1 == image.tokens),
            "the input lacks the rest of an image"
        );
        tokens
    }

    /// Computes the results of a step.
    fn sample(&mut self, batch: &Batch, sampling: &Sampling, texts: &[Vec<Token>], masks: &[Arc<[u32]>]) {
        let (mut ids, mut logprobs) = (Vec::new(), Vec::new());
        let mut masks = masks.iter();
        for draw in &sampling.draws {
            let end = batch.sequences[draw.sequence].start + draw.token + 1;
            let text = &texts[draw.sequence][..end];
            if draw.params.penalizes() {
                let slot = batch.sequences[draw.sequence].slot as usize;
                assert_eq!(self.history[slot][..end], ids_of(text), "the history of slot {slot}");
            }
            let mask = draw.masked.then(|| &**masks.next().expect("a mask for each masked draw"));
            let text: Vec<u32> = text.iter().map(|token| token.seen(self.limits.vocab_size)).collect();
            let id = allowed((self.script)(&text, draw), &text, draw, mask, self.limits.vocab_size as u32);
            logprobs.push(draw.logprobs.map(|n| fake_logprobs(id, n)));
            self.sampled[draw.slot as usize] = Some(id);
            ids.push((!self.control.take_not_finite()).then_some(id));
        }
        let mut pooled = Vec::new();
        for pooling in &sampling.pooling {
            let s = &batch.sequences[pooling.sequence];
            let sums = &mut self.sums[s.slot as usize];
            if s.start == 0 {
                *sums = [0.0; 3];
            }
            assert_eq!(sums[2], s.start as f32, "hidden states of slot {} that are added up", s.slot);
            let text = &texts[pooling.sequence];
            for (position, token) in (s.start..).zip(&text[s.start..]) {
                sums.iter_mut().zip(fake_state(position, token.id)).for_each(|(sum, state)| *sum += state);
            }
            if pooling.last {
                let is_finite = !self.control.take_not_finite();
                pooled.push(sums.iter().map(|sum| if is_finite { *sum } else { f32::NAN }).collect());
            }
        }
        assert!(masks.next().is_none(), "more masks than masked draws");
        self.pending.push_back((Ticket(self.tickets), Sampled { ids, logprobs, pooled, used_experts: 0 }));
    }
}

impl Runner for FakeRunner {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn attention_path(&self) -> u32 {
        self.control.lock().attention_path
    }

    fn submit(&mut self, batch: &Batch, sampling: &Sampling) -> Result<Ticket, RunnerError> {
        let most = if self.is_bound { 1 } else { self.limits.max_in_flight };
        assert!(self.pending.len() < most, "too many steps in flight");
        assert!(self.unmasked.is_none(), "a step was submitted before the masks of the last one");
        self.check_shape(batch, sampling);
        self.control.record(batch, self.pending.len())?;
        self.cache.copy(&batch.copies);
        // All sequences read what the blocks held before this step.
        let before: Vec<_> = batch.sequences.iter().map(|s| self.cache.tokens_before(s)).collect();
        if let Some(draft) = &mut self.draft {
            draft.copy(&batch.copies);
            for (s, before) in batch.sequences.iter().zip(&before) {
                assert_eq!(draft.tokens_before(s), *before, "the draft model's blocks hold another text");
            }
        }
        let mut texts = Vec::new();
        for (s, (mut tokens, mut hash)) in batch.sequences.iter().zip(before) {
            let ids = match &s.input {
                Input::Ids(ids) => ids.clone(),
                Input::LastSampled => {
                    vec![self.sampled[s.slot as usize].expect("LastSampled needs a sampled id")]
                }
            };
            for (position, token) in (s.start..).zip(self.tokens(s, &ids, &tokens)) {
                assert!((token.id as usize) < self.limits.vocab_size, "id {}", token.id);
                hash = token.fold_into(hash);
                tokens.push(token);
                for cache in [Some(&mut self.cache), self.draft.as_mut()].into_iter().flatten() {
                    cache.write(s, position, (token, hash));
                }
            }
            let row = &mut self.history[s.slot as usize];
            if let Some(known) = &s.history {
                assert_eq!(known.len(), s.start, "history before the first token");
                row[..s.start].copy_from_slice(known);
            }
            row[s.start..tokens.len()].copy_from_slice(&ids);
            texts.push(tokens);
        }
        for copy in &batch.history_copies {
            let from = self.history[copy.from as usize][..copy.tokens].to_vec();
            self.history[copy.to as usize][..copy.tokens].copy_from_slice(&from);
        }
        let known = batch.sequences.iter().filter_map(|s| Some(s.history.as_ref()?.len()));
        assert!(known.sum::<usize>() <= self.limits.max_context, "history of a step");
        self.tickets += 1;
        if sampling.draws.iter().any(|draw| draw.masked) {
            self.unmasked = Some((batch.clone(), sampling.clone(), texts));
        } else {
            self.sample(batch, sampling, &texts, &[]);
        }
        Ok(Ticket(self.tickets))
    }

    fn masks(&mut self, ticket: &Ticket, words: &[Arc<[u32]>]) -> Result<(), RunnerError> {
        assert_eq!(*ticket, Ticket(self.tickets), "masks must belong to the last step");
        let (batch, sampling, texts) = self.unmasked.take().expect("a step with masked draws");
        self.sample(&batch, &sampling, &texts, words);
        Ok(())
    }

    fn set_courtesy(&mut self, courtesy: Courtesy) -> Result<(), RunnerError> {
        self.is_bound = courtesy.is_bound();
        self.control.set(|s| s.courtesies.push((s.batches.len(), courtesy)));
        Ok(())
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Sampled, RunnerError> {
        assert!(self.unmasked.is_none(), "wait was called before the step got its masks");
        let (expected, sampled) = self.pending.pop_front().expect("a wait without a submit");
        assert_eq!(ticket, expected, "tickets are waited for in order");
        self.control.pass()?;
        Ok(sampled)
    }

    fn encode_image(&mut self, slot: u32, size: [usize; 2], pixels: &[u8]) -> Result<(), RunnerError> {
        let limits = self.limits.images.expect("the model takes images");
        let tokens = limits.tokens_of(size).expect("a size that the model takes");
        assert_eq!(pixels.len(), limits.pixel_bytes(tokens), "bytes of pixels");
        assert!(self.unmasked.is_none(), "an image was encoded before the masks of the last step");
        // Steps in flight have read the slot when they were submitted.
        self.images[slot as usize] = Some(Encoded { embeddings: embeddings(size, pixels), tokens });
        self.control.encode(slot, pixels, self.pending.len())
    }

    fn read_blocks(&mut self, blocks: &[PoolBlock]) -> Result<Vec<u8>, RunnerError> {
        assert!(self.pending.is_empty(), "blocks were read while a step is in flight");
        self.control.set(|state| state.read_blocks += blocks.len());
        let mut bytes = Vec::new();
        for block in blocks {
            let of_caches = self.caches().flat_map(|cache| cache.places(*block).iter().flat_map(place_bytes));
            bytes.extend(of_caches);
        }
        Ok(bytes)
    }

    fn write_blocks(&mut self, blocks: &[PoolBlock], bytes: &[u8]) -> Result<(), RunnerError> {
        assert!(self.pending.is_empty(), "blocks were written while a step is in flight");
        self.control.set(|state| state.written_blocks += blocks.len());
        let mut places = bytes.as_chunks().0.iter();
        for block in blocks {
            for cache in self.caches() {
                for place in cache.places(*block) {
                    *place = place_of(*places.next().expect("bytes of each place"));
                }
            }
        }
        assert!(places.next().is_none(), "bytes after the blocks");
        Ok(())
    }

    fn has_draft(&self) -> bool {
        self.draft.is_some()
    }

    fn draft(&mut self, requests: &[DraftRequest]) -> Result<Vec<Vec<u32>>, RunnerError> {
        let cache = self.draft.as_mut().expect("a draft model");
        assert!(self.pending.is_empty(), "draft tokens were requested while a step is in flight");
        assert!(!requests.is_empty() && requests.len() <= self.limits.max_sequences, "{requests:?}");
        let mut written = HashSet::new();
        let mut all = Vec::new();
        for DraftRequest { sequence: s, draw, num_draft_tokens: wanted } in requests {
            let Input::Ids(known) = &s.input else { panic!("draft tokens need a known last id") };
            assert!(known.len() == 1 && *wanted > 0 && s.history.is_none(), "{s:?}");
            assert!(s.start + wanted < self.limits.max_context, "draft tokens beyond the context");
            let (mut tokens, mut hash) = self.cache.tokens_before(s);
            assert_eq!(
                cache.tokens_before(s),
                (tokens.clone(), hash),
                "the draft model's blocks hold another text"
            );
            let (mut id, mut draft_tokens) = (known[0], Vec::new());
            for position in s.start..s.start + wanted {
                assert!(draw.slot == s.slot && !draw.masked && draw.logprobs.is_none(), "{draw:?}");
                let token = Token { id, image: None };
                hash = token.fold_into(hash);
                tokens.push(token);
                assert!(written.insert(cache.place(s, 0, position)), "position {position} twice");
                cache.write(s, position, (token, hash));
                let row = &mut self.history[s.slot as usize];
                row[position] = id;
                if draw.params.penalizes() {
                    assert_eq!(row[..=position], ids_of(&tokens), "the history of slot {}", s.slot);
                }
                let vocab_size = self.limits.vocab_size as u32;
                let text: Vec<u32> = tokens.iter().map(|token| token.seen(self.limits.vocab_size)).collect();
                id = allowed((self.script)(&text, draw), &text, draw, None, vocab_size);
                id = if hash >> 62 < self.wrong { (id + 1) % vocab_size } else { id };
                draft_tokens.push(id);
            }
            self.sampled[s.slot as usize] = None;
            all.push(draft_tokens);
        }
        self.control.drafted(&all);
        Ok(all)
    }

    fn probe(&mut self) -> Result<(), RunnerError> {
        assert!(self.pending.is_empty(), "a probe while a step is in flight");
        self.control.probe()
    }
}

impl Drop for FakeRunner {
    fn drop(&mut self) {
        let Ok(mut state) = self.control.0.0.lock() else { return };
        if state.slow_drop {
            drop(state);
            std::thread::sleep(Duration::from_millis(100));
            state = self.control.lock();
        }
        let held = self.control.0.1.wait_timeout_while(state, HANG, |s| s.hold_drop);
        held.expect("no test panics under this lock").0.dropped = true;
    }
}

/// Starts fake runners with the control of the first one, without limit unless the test says otherwise.
pub struct FakeFactory {
    make: Box<dyn FnMut() -> Box<FakeRunner> + Send>,
    control: Control,
}

impl FakeFactory {
    pub fn new(control: &Control, make: impl FnMut() -> Box<FakeRunner> + Send + 'static) -> Box<Self> {
        Box::new(Self { make: Box::new(make), control: control.clone() })
    }
}

impl RunnerFactory for FakeFactory {
    fn start(&mut self, cancelled: &Arc<AtomicBool>) -> Result<Box<dyn Runner>, RunnerError> {
        self.control.set(|s| s.starts += 1);
        while self.control.lock().hold_starts {
            if cancelled.load(Ordering::Acquire) {
                return Err(RunnerError::Lost("cancelled".into()));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if self.control.lock().fail_starts {
            return Err(RunnerError::Lost("it does not come back".into()));
        }
        Ok((self.make)().controlled_by(&self.control))
    }
}

/// The test's control of the runner: which steps end, and which fail.
#[derive(Clone, Default)]
pub struct Control(Arc<(Mutex<ControlState>, Condvar)>);

/// An image that was encoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoding {
    pub slot: u32,
    pub pixels: Vec<u8>,
    /// Number of steps that were submitted before, and of those that were then in flight.
    pub steps: usize,
    pub in_flight: usize,
}

#[derive(Default)]
struct ControlState {
    batches: Vec<Batch>,
    /// For each batch, the number of other steps in flight when it was submitted.
    in_flight: Vec<usize>,
    courtesies: Vec<(usize, Courtesy)>,
    read_blocks: usize,
    written_blocks: usize,
    drafts: Vec<Vec<Vec<u32>>>,
    encodings: Vec<Encoding>,
    fail_encodings_at: Vec<usize>,
    attention_path: u32,
    draws: usize,
    /// The number of steps that may end. `None` = no limit.
    allowed: Option<usize>,
    finished: usize,
    fail_submit_at: Option<usize>,
    fail_wait_at: Option<usize>,
    not_finite_at: Option<usize>,
    /// A step with this id in its input is lost.
    poison: Option<u32>,
    poisoned: bool,
    /// The NPU fails at a prompt with this id in its input.
    npu_poison: Option<u32>,
    npu_failed: bool,
    starts: usize,
    hold_starts: bool,
    fail_starts: bool,
    probes: usize,
    fail_probes: bool,
    hold_probes: bool,
    slow_drop: bool,
    hold_drop: bool,
    dropped: bool,
}

impl Control {
    fn lock(&self) -> MutexGuard<'_, ControlState> {
        self.0.0.lock().expect("no test panics under this lock")
    }

    fn set(&self, change: impl FnOnce(&mut ControlState)) {
        change(&mut self.lock());
        self.0.1.notify_all();
    }

    pub fn set_attention_path(&self, path: u32) {
        self.set(|s| s.attention_path = path);
    }

    fn wait_until(&self, what: &str, ready: impl Fn(&ControlState) -> bool) -> MutexGuard<'_, ControlState> {
        let (state, timeout) = self
            .0
            .1
            .wait_timeout_while(self.lock(), HANG, |s| !ready(s))
            .expect("no test panics under this lock");
        assert!(!timeout.timed_out(), "hung: {what}");
        state
    }

    /// Lets `n` steps in total end. The next one blocks.
    pub fn allow(&self, n: usize) {
        self.set(|s| s.allowed = Some(n));
    }

    pub fn release(&self) {
        self.set(|s| s.allowed = None);
    }

    /// The device refuses step `n`, counted from 0.
    pub fn fail_submit_at(&self, n: usize) {
        self.set(|s| s.fail_submit_at = Some(n));
    }

    /// Encoding `n`, counted from 0, loses the device.
    pub fn fail_encoding_at(&self, n: usize) {
        self.set(|s| s.fail_encodings_at.push(n));
    }

    /// Every step with this id in its input is lost while it runs.
    pub fn poison(&self, id: u32) {
        self.set(|s| s.poison = Some(id));
    }

    /// The NPU fails at every prompt chunk with this id in its input, if the chunk is the longest of its step.
    pub fn fail_npu_at(&self, id: u32) {
        self.set(|s| s.npu_poison = Some(id));
    }

    /// How many runners a factory was told to start.
    pub fn starts(&self) -> usize {
        self.lock().starts
    }

    /// Whether a factory blocks before it starts a runner.
    pub fn hold_starts(&self, hold: bool) {
        self.set(|s| s.hold_starts = hold);
    }

    pub fn fail_starts(&self) {
        self.set(|s| s.fail_starts = true);
    }

    /// Step `n`, counted from 0, is lost while it runs.
    pub fn fail_wait_at(&self, n: usize) {
        self.set(|s| s.fail_wait_at = Some(n));
    }

    /// For draw or pooled prompt `n`, counted from 0, the logits or the hidden states are not finite.
    pub fn not_finite_at(&self, n: usize) {
        self.set(|s| s.not_finite_at = Some(n));
    }

    /// Probes report wrong results from now on.
    pub fn fail_probes(&self) {
        self.set(|s| s.fail_probes = true);
    }

    /// Whether probes block.
    pub fn hold_probes(&self, hold: bool) {
        self.set(|s| s.hold_probes = hold);
    }

    pub fn probes(&self) -> usize {
        self.lock().probes
    }

    /// The runner's destructor takes some time, as a driver's does.
    pub fn drop_slowly(&self) {
        self.set(|s| s.slow_drop = true);
    }

    /// Whether the runner's destructor blocks.
    pub fn hold_drop(&self, hold: bool) {
        self.set(|s| s.hold_drop = hold);
    }

    /// Whether the runner's destructor has ended.
    pub fn dropped(&self) -> bool {
        self.lock().dropped
    }

    /// Waits until `n` steps are submitted.
    pub fn submitted(&self, n: usize) {
        drop(self.wait_until("steps to be submitted", |s| s.batches.len() >= n));
    }

    pub fn batches(&self) -> Vec<Batch> {
        self.lock().batches.clone()
    }

    /// Every batch, with the number of other steps in flight when it was submitted.
    pub fn batches_with_steps_in_flight(&self) -> Vec<(Batch, usize)> {
        let state = self.lock();
        state.batches.iter().cloned().zip(state.in_flight.iter().copied()).collect()
    }

    /// The number of blocks that were read, and of those that were written.
    pub fn copied_blocks(&self) -> [usize; 2] {
        let state = self.lock();
        [state.read_blocks, state.written_blocks]
    }

    /// The number of ids of prompts that were computed.
    pub fn computed_ids(&self) -> usize {
        let batches = self.batches();
        let inputs = batches.iter().flat_map(|batch| &batch.sequences).map(|sequence| &sequence.input);
        inputs.map(|input| if let Input::Ids(ids) = input { ids.len() } else { 0 }).sum()
    }

    /// Every courtesy that runners got, with the number of steps submitted before.
    pub fn courtesies(&self) -> Vec<(usize, Courtesy)> {
        self.lock().courtesies.clone()
    }

    /// The draft tokens of each call of the draft model, by request.
    pub fn drafts(&self) -> Vec<Vec<Vec<u32>>> {
        self.lock().drafts.clone()
    }

    /// The encoded images.
    pub fn encodings(&self) -> Vec<Encoding> {
        self.lock().encodings.clone()
    }

    fn encode(&self, slot: u32, pixels: &[u8], in_flight: usize) -> Result<(), RunnerError> {
        let mut state = self.lock();
        let (steps, encoded) = (state.batches.len(), state.encodings.len());
        state.encodings.push(Encoding { slot, pixels: pixels.to_vec(), steps, in_flight });
        match state.fail_encodings_at.contains(&encoded) {
            true => Err(RunnerError::Lost("the encoder hangs".into())),
            false => Ok(()),
        }
    }

    fn drafted(&self, drafts: &[Vec<u32>]) {
        self.set(|s| s.drafts.push(drafts.to_vec()));
    }

    fn take_not_finite(&self) -> bool {
        let mut state = self.lock();
        state.draws += 1;
        state.not_finite_at == Some(state.draws - 1)
    }

    fn record(&self, batch: &Batch, in_flight: usize) -> Result<(), RunnerError> {
        let mut state = self.lock();
        let submitted = state.batches.len();
        if state.fail_submit_at.take_if(|at| *at == submitted).is_some() {
            drop(state);
            // Like a failing wait, it fails only when the test allows the step.
            drop(self.wait_until("a step to be allowed", |s| s.allowed.is_none_or(|n| s.finished < n)));
            return Err(RunnerError::Lost("out of rings".into()));
        }
        let has = |s: &BatchSequence, id: u32| matches!(&s.input, Input::Ids(ids) if ids.contains(&id));
        state.poisoned |= state.poison.is_some_and(|id| batch.sequences.iter().any(|s| has(s, id)));
        let shared = batch.sequences.iter().rev().max_by_key(|s| s.input.len());
        let shared = shared.filter(|s| s.input.len() >= LEAST_TOKENS && state.attention_path != 0);
        state.npu_failed |= state.npu_poison.is_some_and(|id| shared.is_some_and(|s| has(s, id)));
        state.batches.push(batch.clone());
        state.in_flight.push(in_flight);
        self.0.1.notify_all();
        Ok(())
    }

    fn probe(&self) -> Result<(), RunnerError> {
        self.set(|s| s.probes += 1);
        let state = self.wait_until("a probe to be released", |s| !s.hold_probes);
        if state.fail_probes { Err(RunnerError::Wrong("came back wrong".into())) } else { Ok(()) }
    }

    fn pass(&self) -> Result<(), RunnerError> {
        let mut state = self.wait_until("a step to be allowed", |s| s.allowed.is_none_or(|n| s.finished < n));
        let finished = state.finished;
        let is_lost = state.fail_wait_at.take_if(|at| *at == finished).is_some();
        if std::mem::take(&mut state.npu_failed) {
            return Err(RunnerError::Coprocessor("npu-timeout: it hangs".into()));
        }
        if std::mem::take(&mut state.poisoned) || is_lost {
            return Err(RunnerError::Lost("ring timeout".into()));
        }
        state.finished += 1;
        Ok(())
    }
}
