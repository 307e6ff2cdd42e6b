//! The interface of an NPU that computes the attention of prompt tokens for some KV heads of a layer.
//!
//! This file has the interface, the choice of the work for the NPU, and the counts of its work. `shared_step.rs` runs a
//! step in which the NPU takes part. The choice depends only on the batch, and never on the speed of the NPU. So an
//! answer has the same bits each time, as long as the NPU does not fail. The NPU computes in bf16, so answers with and
//! without it differ within a bound.
//!
//! [`NpuProcess`](super::process::NpuProcess) is the implementation that a server uses; tests have others. After its
//! first failure, an NPU is not used again. "The device" is the GPU.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use serde::{Deserialize, Serialize};

use crate::gpu::{Buffer, timed};
use crate::kernels::AttentionShape;
use crate::model::offload::{
    AttentionShare, MOST_TOKENS, OffloadBuffers, OffloadError, OffloadLimits, longest_chunk,
};
use crate::model::{Batch, BatchSequence, Input, KvPool, RunnerError, first_seen};

/// One layer's attention of consecutive prompt tokens of one sequence, for the KV heads from 0 to `kv_heads`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OffloadJob {
    /// The number of keys that a token sees, including its own; `None` = all keys.
    pub window: Option<usize>,
    /// The position of row 0, and the number of rows.
    pub first: usize,
    pub rows: usize,
    pub kv_heads: usize,
}

/// The layout of the arrays of a job: queries bf16 `[kv_head][head][row_stride][head_dim]`; keys and values bf16
/// `[kv_head][key_stride][head_dim]`, whose key 0 is at position `first_key`; output f32 in the layout of the queries.
/// Queries are already scaled. The inputs are 0 after the last row and key, and at keys that no row sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OffloadRoom {
    pub first_key: usize,
    pub keys: usize,
    pub key_stride: usize,
    pub row_stride: usize,
}

/// Computes softmax(q K) V.
pub trait AttentionUnit: Send {
    /// Makes the NPU read and write the device's own buffers from now on: queries, keys, values, and the output, each
    /// from its start. The implementation tests that this works. No job may be in progress.
    fn share(&mut self, _buffers: [&Buffer; 4]) -> Result<(), OffloadError> {
        Err(not_shared("the unit reads and writes no memory but its own"))
    }

    /// The layout of the arrays for this job. `None` = the NPU cannot compute the job, and the device computes all of
    /// it. The result is always the same for the same job.
    fn room(&self, job: &OffloadJob) -> Option<OffloadRoom>;

    /// Passes queries, keys and values to the NPU, and returns without waiting for the result. `inputs` is `None` if
    /// they are in shared buffers. [`AttentionUnit::finish`] gets the output. Both calls have time limits. After an
    /// error, the NPU is not called again.
    fn begin(&mut self, job: &OffloadJob, inputs: Option<[&[u8]; 3]>) -> Result<(), OffloadError>;

    /// Waits for the job, and writes all of the output. `output` is `None` if the output is in a shared buffer. Rows
    /// after the job's last row may have any values.
    fn finish(&mut self, output: Option<&mut [u8]>) -> Result<(), OffloadError>;
}

/// The error if an NPU and a device cannot share memory.
pub fn not_shared(why: impl fmt::Display) -> OffloadError {
    let message = format!("{why}; npu.sharing = \"copy\" needs no shared memory");
    OffloadError { code: "npu-dma-buf".into(), message }
}

/// What happens if the NPU fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum OffloadPolicy {
    /// The device computes the NPU's share from then on.
    Auto,
    /// The runner and every later step fail.
    Require,
}

/// An NPU, and how it is used.
pub struct Offload {
    pub unit: Box<dyn AttentionUnit>,
    /// The number of KV heads that the NPU computes, in every job.
    pub kv_heads: usize,
    pub policy: OffloadPolicy,
}

/// The counts of an NPU's work.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct OffloadCounts {
    /// Number of layers whose output was used, and of the tokens of all of them. A token counts once in each layer.
    pub dispatches: u64,
    pub tokens: u64,
    /// Failures by error code. After each of them, the device computes the NPU's share.
    pub fallbacks: Vec<(String, u64)>,
    /// Layers that were planned for the NPU, but computed by the device because the NPU had failed.
    pub recomputed: u64,
    /// Seconds that the host spent in calls of the NPU.
    pub seconds: f64,
    /// The failure after which the NPU is no longer used.
    pub quarantined: Option<String>,
}

impl OffloadCounts {
    /// Adds a number of failures with this code.
    pub fn add_fallbacks(&mut self, code: &str, count: u64) {
        match self.fallbacks.iter_mut().find(|(counted, _)| counted == code) {
            Some((_, sum)) => *sum += count,
            None => self.fallbacks.push((code.to_owned(), count)),
        }
    }
}

/// The counts of an NPU. Other threads may read them while steps run.
#[derive(Clone)]
pub struct OffloadWatch(Arc<Mutex<OffloadCounts>>);

impl OffloadWatch {
    pub fn counts(&self) -> OffloadCounts {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, OffloadCounts> {
        self.0.lock().expect("nothing panics under this lock")
    }
}

/// The part of a step's attention that the NPU computes.
#[derive(Debug, Clone)]
pub(super) struct UnitShare {
    pub attention: AttentionShare,
    /// The position of the first row.
    pub first: usize,
    /// The layout of the arrays for the layers of each pool; `None` = the device computes all of these layers.
    rooms: Vec<Option<OffloadRoom>>,
}

impl UnitShare {
    pub fn room(&self, pool: usize) -> Option<OffloadRoom> {
        self.rooms[pool]
    }

    pub fn job(&self, window: Option<usize>) -> OffloadJob {
        let AttentionShare { rows, kv_heads, .. } = &self.attention;
        OffloadJob { window, first: self.first, rows: rows.len(), kv_heads: *kv_heads }
    }
}

struct Copies {
    inputs: [Vec<u8>; 3],
    output: Vec<u8>,
}

impl Copies {
    fn of(buffers: &OffloadBuffers) -> Copies {
        let OffloadBuffers { queries, keys, values, output, .. } = buffers;
        let room = |buffer: &Buffer| vec![0; buffer.size() as usize];
        Copies { inputs: [queries, keys, values].map(room), output: room(output) }
    }
}

/// An NPU that is attached to a model, and its counts.
pub(super) struct Attached {
    /// `None` after a failure.
    unit: Option<Box<dyn AttentionUnit>>,
    kv_heads: usize,
    policy: OffloadPolicy,
    counts: OffloadWatch,
    /// The host's copies of a job's inputs and output; `None` if the NPU shares the device's buffers.
    copies: Option<Copies>,
    /// The first failure.
    failure: Option<OffloadError>,
}

impl Attached {
    pub fn new(offload: Offload, buffers: &OffloadBuffers) -> Result<Attached, OffloadError> {
        let Offload { mut unit, kv_heads, policy } = offload;
        let copies = if buffers.limits.shared {
            let OffloadBuffers { queries, keys, values, output, .. } = buffers;
            unit.share([queries, keys, values, output])?;
            None
        } else {
            Some(Copies::of(buffers))
        };
        let counts = OffloadWatch(Arc::default());
        Ok(Attached { unit: Some(unit), kv_heads, policy, counts, copies, failure: None })
    }

    pub fn watch(&self) -> OffloadWatch {
        self.counts.clone()
    }

    pub fn forget_counts(&self) {
        *self.counts.lock() = OffloadCounts::default();
    }

    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Sets the number of KV heads that the NPU computes; 0 for none.
    pub fn set_kv_heads(&mut self, kv_heads: usize) {
        self.kv_heads = kv_heads;
    }

    pub fn is_usable(&self) -> bool {
        self.unit.is_some()
    }

    /// Fails if the NPU is required and has failed.
    pub fn check(&self) -> Result<(), RunnerError> {
        match (&self.failure, self.policy) {
            (Some(failure), OffloadPolicy::Require) => Err(RunnerError::Coprocessor(failure.to_string())),
            _ => Ok(()),
        }
    }

    /// The part of a batch's attention that the NPU computes: the attention of the longest prompt, or of a part of it.
    ///
    /// `drawn` has the rows after which ids are drawn. A sequence with several such rows checks drafts, or scores its
    /// text. The device computes all attention of these sequences.
    pub fn share(
        &self,
        batch: &Batch,
        drawn: &[u32],
        pools: &[KvPool],
        limits: &OffloadLimits,
    ) -> Option<UnitShare> {
        if !self.is_usable() || self.kv_heads == 0 {
            return None;
        }
        let mut ends = Vec::with_capacity(batch.sequences.len());
        let chunks = batch.sequences.iter().map(|sequence| {
            let (tokens, first) = (sequence.input.len(), ends.last().copied().unwrap_or(0));
            ends.push(first + tokens);
            let rows = first..first + tokens;
            // A prompt with several answers draws several times after the same row.
            let mut drawn = drawn.iter().filter(|row| rows.contains(&(**row as usize)));
            let is_one = drawn.next().is_none_or(|first| drawn.all(|row| row == first));
            // The NPU's kernels are causal, but the tokens of an image see each other in both directions.
            let is_text = matches!(sequence.input, Input::Ids(_)) && sequence.images.is_empty();
            (is_text && is_one).then_some(tokens)
        });
        let sequence = longest_chunk(chunks)?;
        let BatchSequence { start: first, input, .. } = &batch.sequences[sequence];
        let (row, kv_heads) = (ends[sequence] - input.len(), self.kv_heads);
        // The NPU may have no kernel for the largest number of rows of a job.
        [MOST_TOKENS, MOST_TOKENS / 2].into_iter().find_map(|most| {
            let rows = row..row + input.len().min(most);
            let attention = AttentionShare { rows, sequence, kv_heads, keys: Vec::new() };
            let mut share = UnitShare { attention, first: *first, rooms: Vec::new() };
            let rooms = pools.iter().map(|pool| self.room(&share.job(pool.window), limits));
            share.rooms = rooms.collect();
            share.attention.keys = share.rooms.iter().map(|room| room.map(|room| room.keys)).collect();
            share.rooms.iter().any(Option::is_some).then_some(share)
        })
    }

    /// The layout of a job's arrays, if the NPU accepts the job, and if the buffers are large enough.
    fn room(&self, job: &OffloadJob, limits: &OffloadLimits) -> Option<OffloadRoom> {
        let room = self.unit.as_ref()?.room(job)?;
        let OffloadRoom { first_key, keys, key_stride, row_stride } = room;
        let seen = first_seen(job.window, job.first);
        assert!(first_key <= seen && first_key + keys == job.first + job.rows, "{room:?} for {job:?}");
        assert!(keys <= key_stride && job.rows <= row_stride, "{room:?} for {job:?}");
        (row_stride <= MOST_TOKENS && key_stride <= limits.keys).then_some(room)
    }

    /// Passes the inputs that the device wrote to the NPU. An error is a failure of the runner.
    pub fn begin(
        &mut self,
        job: &OffloadJob,
        room: &OffloadRoom,
        shape: &AttentionShape,
        buffers: &OffloadBuffers,
    ) -> Result<(), RunnerError> {
        let (queries, keys) =
            (2 * outputs(job, room, shape), 2 * job.kv_heads * room.key_stride * shape.head_dim);
        let Some(unit) = &mut self.unit else { return Ok(()) };
        let inputs = self.copies.as_mut().map(|copies| {
            let OffloadBuffers { queries: q, keys: k, values: v, .. } = buffers;
            let [to_q, to_k, to_v] = &mut copies.inputs;
            [(q, to_q, queries), (k, to_k, keys), (v, to_v, keys)].map(|(from, to, bytes)| {
                from.read(0, &mut to[..bytes]);
                &to[..bytes]
            })
        });
        let (result, took) = timed(|| unit.begin(job, inputs));
        self.counts.lock().seconds += took.as_secs_f64();
        result.or_else(|error| self.fail(error))
    }

    /// Waits for the NPU's output, and writes it to the device's buffer. Returns `false` if the NPU failed.
    pub fn finish(
        &mut self,
        job: &OffloadJob,
        room: &OffloadRoom,
        shape: &AttentionShape,
        buffers: &OffloadBuffers,
    ) -> Result<bool, RunnerError> {
        let Some(unit) = &mut self.unit else { return Ok(false) };
        let bytes = 4 * outputs(job, room, shape);
        let mut output = self.copies.as_mut().map(|copies| &mut copies.output[..bytes]);
        let (result, took) = timed(|| unit.finish(output.as_deref_mut()));
        self.counts.lock().seconds += took.as_secs_f64();
        match (result, output) {
            (Ok(()), Some(output)) => buffers.output.write(0, output),
            (Ok(()), None) => {}
            (Err(error), _) => self.fail(error)?,
        }
        Ok(self.is_usable())
    }

    /// Counts a job whose output the device uses.
    pub fn used(&mut self, job: &OffloadJob) {
        let mut counts = self.counts.lock();
        counts.dispatches += 1;
        counts.tokens += job.rows as u64;
    }

    /// Counts a layer in which the device computes the NPU's share.
    pub fn recomputed(&mut self) {
        self.counts.lock().recomputed += 1;
    }

    /// Stores the NPU's failure. The NPU is not used again.
    fn fail(&mut self, error: OffloadError) -> Result<(), RunnerError> {
        tracing::warn!("the NPU is not used any more: {error}");
        let mut counts = self.counts.lock();
        counts.quarantined = Some(error.to_string());
        let is_required = self.policy == OffloadPolicy::Require;
        if !is_required {
            counts.add_fallbacks(&error.code, 1);
        }
        drop(counts);
        // If the NPU hangs, its process takes seconds to end. No step may wait for that.
        if let Some(unit) = self.unit.take() {
            thread::spawn(move || drop(unit));
        }
        self.failure = Some(error);
        self.check()
    }
}

/// The number of elements of a job's queries, which is also the number of elements of its output.
fn outputs(job: &OffloadJob, room: &OffloadRoom, shape: &AttentionShape) -> usize {
    job.kv_heads * (shape.num_heads / shape.num_kv_heads) * room.row_stride * shape.head_dim
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An implementation that computes nothing.
    struct Idle {
        row_stride: usize,
        key_stride: usize,
    }

    impl AttentionUnit for Idle {
        fn room(&self, job: &OffloadJob) -> Option<OffloadRoom> {
            let keys = job.first + job.rows;
            let Idle { row_stride, key_stride } = *self;
            let fits = keys <= key_stride && job.rows <= row_stride;
            fits.then_some(OffloadRoom { first_key: 0, keys, key_stride, row_stride })
        }

        fn begin(&mut self, _: &OffloadJob, _: Option<[&[u8]; 3]>) -> Result<(), OffloadError> {
            Ok(())
        }

        fn finish(&mut self, _: Option<&mut [u8]>) -> Result<(), OffloadError> {
            Ok(())
        }
    }

    fn attached(unit: Idle, policy: OffloadPolicy) -> Attached {
        Attached {
            unit: Some(Box::new(unit)),
            kv_heads: 2,
            policy,
            counts: OffloadWatch(Arc::default()),
            copies: None,
            failure: None,
        }
    }

    /// A batch of sequences, each with `(start, known ids)`; 0 ids = the id that was sampled last.
    fn batch(sequences: &[(usize, usize)]) -> Batch {
        let each = sequences.iter().map(|&(start, ids)| BatchSequence {
            slot: 0,
            start,
            input: if ids == 0 { Input::LastSampled } else { Input::Ids(vec![7; ids]) },
            blocks: Vec::new(),
            images: Vec::new(),
            history: None,
        });
        Batch { sequences: each.collect(), ..Batch::default() }
    }

    const POOLS: [KvPool; 2] = [KvPool { window: None, blocks: 0 }, KvPool { window: Some(64), blocks: 0 }];
    const LIMITS: OffloadLimits = OffloadLimits { kv_heads: 2, keys: 4096, shared: false };

    #[test]
    fn the_longest_prompt_of_a_batch_is_shared() {
        let unit = attached(Idle { row_stride: 512, key_stride: 4096 }, OffloadPolicy::Auto);
        let share = |sequences: &[(usize, usize)]| {
            let share = unit.share(&batch(sequences), &[], &POOLS, &LIMITS)?;
            Some((share.attention.sequence, share.attention.rows, share.first))
        };
        assert_eq!(share(&[(0, 31), (900, 0)]), None, "too few tokens");
        assert_eq!(share(&[(0, 32)]), Some((0, 0..32, 0)));
        assert_eq!(share(&[(5, 0), (70, 40), (3, 41), (9, 41)]), Some((2, 41..82, 3)));
        assert_eq!(share(&[(1, 2), (0, 700), (0, 800)]), Some((1, 2..514, 0)), "512 tokens at most");
        assert_eq!(share(&[(4080, 40)]), None, "the unit has no room");
        // One id is drawn after a prompt, and several after drafts to be checked.
        let of = |drawn: &[u32]| {
            Some(unit.share(&batch(&[(3, 40), (0, 33)]), drawn, &POOLS, &LIMITS)?.attention.sequence)
        };
        assert_eq!([of(&[39, 72]), of(&[38, 39, 72]), of(&[3, 4, 40, 72])], [Some(0), Some(1), None]);
        assert_eq!(of(&[39, 39, 39, 72]), Some(0), "three answers to the first prompt");
    }

    #[test]
    fn the_device_computes_a_job_that_the_buffers_cannot_hold() {
        let share = |row_stride, key_stride| {
            let unit = attached(Idle { row_stride, key_stride }, OffloadPolicy::Auto);
            unit.share(&batch(&[(0, 100)]), &[], &POOLS, &LIMITS).is_some()
        };
        assert!(share(512, 4096) && share(100, 100));
        assert!(!share(513, 4096) && !share(512, 4097));
    }

    #[test]
    fn a_chunk_that_is_too_long_for_the_unit_is_shared_in_part() {
        let unit = attached(Idle { row_stride: 256, key_stride: 4096 }, OffloadPolicy::Auto);
        let rows = |start, tokens| {
            Some(unit.share(&batch(&[(start, tokens)]), &[], &POOLS, &LIMITS)?.attention.rows)
        };
        assert_eq!([rows(0, 200), rows(0, 256), rows(9, 257)], [Some(0..200), Some(0..256), Some(0..256)]);
        assert_eq!(rows(4000, 512), None, "too many keys");
    }

    #[test]
    fn a_unit_that_failed_is_not_used_again() {
        let error = || OffloadError { code: "broken".into(), message: "it smokes".into() };
        let mut unit = attached(Idle { row_stride: 512, key_stride: 4096 }, OffloadPolicy::Auto);
        assert_eq!((unit.fail(error()), unit.check()), (Ok(()), Ok(())));
        assert!(!unit.is_usable() && unit.share(&batch(&[(0, 100)]), &[], &POOLS, &LIMITS).is_none());
        let counts = unit.watch().counts();
        assert_eq!(counts.fallbacks, [("broken".to_owned(), 1)]);
        assert_eq!(counts.quarantined.as_deref(), Some("broken: it smokes"));
        let mut unit = attached(Idle { row_stride: 512, key_stride: 4096 }, OffloadPolicy::Require);
        let failure = RunnerError::Coprocessor("broken: it smokes".into());
        assert_eq!((unit.fail(error()), unit.check()), (Err(failure.clone()), Err(failure.clone())));
        assert_eq!(
            (unit.watch().counts().fallbacks, failure.to_string()),
            (vec![], "broken: it smokes".into())
        );
    }
}
