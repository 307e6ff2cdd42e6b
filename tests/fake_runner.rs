//! A scripted [`Runner`] that checks every batch it is handed, for the tests of the engine and of the API.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use unicorn::model::{Batch, Input, Limits, Runner, RunnerError, Sampled, Sampling, SamplingParams, Ticket};

/// A test that waits this long hangs.
pub const HANG: Duration = Duration::from_secs(30);

pub const LIMITS: Limits = Limits {
    max_batch_tokens: 16,
    max_sequences: 2,
    block_size: 4,
    num_blocks: 64,
    max_context: 200,
    vocab_size: 512,
};

/// The id after `prompt` and `n` generated ones.
pub type Script = Box<dyn FnMut(&[u32], usize, SamplingParams) -> u32 + Send>;

/// A script that depends on every id of the prompt, on the position, and on the seed.
pub fn mixed(vocab_size: usize) -> Script {
    Box::new(move |prompt, n, sampling| mix(prompt, n, sampling.seed, vocab_size))
}

pub fn mix(prompt: &[u32], n: usize, seed: u64, vocab_size: usize) -> u32 {
    let fold = |h: u64, x: u64| (h ^ x).wrapping_mul(0x0100_0000_01b3).rotate_left(17);
    let hash = prompt.iter().fold(fold(seed, n as u64), |h, id| fold(h, u64::from(*id)));
    (hash % vocab_size as u64) as u32
}

/// A script that answers every prompt with `answer`, and then with `end` for ever.
pub fn says(answer: &[u32], end: u32) -> Script {
    let answer = answer.to_vec();
    Box::new(move |_, n, _| answer.get(n).copied().unwrap_or(end))
}

pub struct FakeRunner {
    limits: Limits,
    script: Script,
    slots: HashMap<u32, Slot>,
    tickets: u64,
    pending: VecDeque<(Ticket, Sampled)>,
    control: Control,
}

/// What the device would hold for a slot.
#[derive(Default)]
struct Slot {
    prompt: Vec<u32>,
    computed: usize,
    sampled: usize,
    /// The step before this one drew an id.
    fresh: bool,
    block_table: Vec<u32>,
}

impl FakeRunner {
    pub fn new(limits: Limits, script: Script) -> (Box<Self>, Control) {
        let control = Control::default();
        let runner = Self {
            limits,
            script,
            slots: HashMap::new(),
            tickets: 0,
            pending: VecDeque::new(),
            control: control.clone(),
        };
        (Box::new(runner), control)
    }

    fn check_shape(&self, batch: &Batch, sampling: &Sampling) {
        let limits = &self.limits;
        assert!(!batch.sequences.is_empty() && batch.sequences.len() <= limits.max_sequences, "{batch:?}");
        assert!(batch.num_tokens() <= limits.max_batch_tokens, "{} tokens in a step", batch.num_tokens());
        let mut slots = HashSet::new();
        let mut blocks = HashSet::new();
        for s in &batch.sequences {
            let end = s.start + s.input.len();
            assert!(!s.input.is_empty() && end <= limits.max_context, "positions {}..{end}", s.start);
            assert!(slots.insert(s.slot) && (s.slot as usize) < limits.max_sequences, "slot {}", s.slot);
            assert_eq!(s.block_table.len(), end.div_ceil(limits.block_size), "blocks for {end} positions");
            for block in &s.block_table {
                assert!((*block as usize) < limits.num_blocks, "block {block} of {}", limits.num_blocks);
                assert!(blocks.insert(*block), "block {block} is used twice");
            }
        }
        let indices: Vec<usize> = sampling.requests.iter().map(|(i, _)| *i).collect();
        assert!(indices.is_sorted_by(|a, b| a < b) && indices.iter().all(|i| *i < batch.sequences.len()));
    }
}

impl Runner for FakeRunner {
    fn limits(&self) -> Limits {
        self.limits
    }

    fn submit(&mut self, batch: &Batch, sampling: &Sampling) -> Result<Ticket, RunnerError> {
        self.check_shape(batch, sampling);
        self.control.record(batch)?;
        for s in &batch.sequences {
            let slot = self.slots.entry(s.slot).or_default();
            if s.start == 0 {
                *slot = Slot::default();
            }
            assert_eq!(s.start, slot.computed, "the sequence goes on where its last step ended");
            assert!(
                s.block_table.starts_with(&slot.block_table),
                "a sequence keeps its blocks while it runs"
            );
            match &s.input {
                Input::Ids(ids) => {
                    assert!(ids.iter().all(|id| (*id as usize) < self.limits.vocab_size));
                    assert_eq!(slot.sampled, 0, "prompt ids after an answer began");
                    slot.prompt.extend(ids);
                }
                Input::LastSampled => assert!(slot.fresh, "LastSampled, and the step before drew nothing"),
            }
            slot.computed += s.input.len();
            slot.block_table.clone_from(&s.block_table);
            slot.fresh = false;
        }
        let mut ids = Vec::new();
        for (index, params) in &sampling.requests {
            let slot = self.slots.get_mut(&batch.sequences[*index].slot).expect("just seen");
            ids.push((self.script)(&slot.prompt, slot.sampled, *params));
            slot.sampled += 1;
            slot.fresh = true;
        }
        self.tickets += 1;
        self.pending.push_back((Ticket(self.tickets), Sampled { ids }));
        Ok(Ticket(self.tickets))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Sampled, RunnerError> {
        let (expected, sampled) = self.pending.pop_front().expect("a wait without a submit");
        assert_eq!(ticket, expected, "tickets are waited for in order");
        self.control.pass()?;
        Ok(sampled)
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
        state.dropped = true;
    }
}

/// The test's hold on the runner: which steps pass, and which fail.
#[derive(Clone, Default)]
pub struct Control(Arc<(Mutex<ControlState>, Condvar)>);

#[derive(Default)]
struct ControlState {
    batches: Vec<Batch>,
    /// Steps that may finish; none is all.
    allowed: Option<usize>,
    finished: usize,
    fail_submit_at: Option<usize>,
    fail_wait_at: Option<usize>,
    not_finite_at: Option<usize>,
    slow_drop: bool,
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

    fn wait_until(&self, what: &str, ready: impl Fn(&ControlState) -> bool) -> MutexGuard<'_, ControlState> {
        let (state, timeout) = self
            .0
            .1
            .wait_timeout_while(self.lock(), HANG, |s| !ready(s))
            .expect("no test panics under this lock");
        assert!(!timeout.timed_out(), "hung: {what}");
        state
    }

    /// Lets `n` steps in all finish; the next one waits.
    pub fn allow(&self, n: usize) {
        self.set(|s| s.allowed = Some(n));
    }

    pub fn release(&self) {
        self.set(|s| s.allowed = None);
    }

    /// The `n`-th step, from 0, is refused by the device.
    pub fn fail_submit_at(&self, n: usize) {
        self.set(|s| s.fail_submit_at = Some(n));
    }

    /// The `n`-th step, from 0, is lost under way.
    pub fn fail_wait_at(&self, n: usize) {
        self.set(|s| s.fail_wait_at = Some(n));
    }

    /// The `n`-th step, from 0, yields logits that nothing can be sampled from.
    pub fn not_finite_at(&self, n: usize) {
        self.set(|s| s.not_finite_at = Some(n));
    }

    /// The runner takes its time to end, as a driver does.
    pub fn drop_slowly(&self) {
        self.set(|s| s.slow_drop = true);
    }

    /// Whether the runner's destructor has ended.
    pub fn dropped(&self) -> bool {
        self.lock().dropped
    }

    /// Returns once `n` steps were submitted.
    pub fn submitted(&self, n: usize) {
        drop(self.wait_until("steps to be submitted", |s| s.batches.len() >= n));
    }

    pub fn batches(&self) -> Vec<Batch> {
        self.lock().batches.clone()
    }

    fn record(&self, batch: &Batch) -> Result<(), RunnerError> {
        let mut state = self.lock();
        if state.fail_submit_at == Some(state.batches.len()) {
            drop(state);
            // Like a failing wait: not before the test has let it go on.
            drop(self.wait_until("a step to be allowed", |s| s.allowed.is_none_or(|n| s.finished < n)));
            return Err(RunnerError::Device("out of rings".into()));
        }
        state.batches.push(batch.clone());
        self.0.1.notify_all();
        Ok(())
    }

    fn pass(&self) -> Result<(), RunnerError> {
        let mut state = self.wait_until("a step to be allowed", |s| s.allowed.is_none_or(|n| s.finished < n));
        if state.fail_wait_at == Some(state.finished) {
            return Err(RunnerError::DeviceLost("ring timeout".into()));
        }
        state.finished += 1;
        if state.not_finite_at == Some(state.finished - 1) {
            return Err(RunnerError::NotFinite);
        }
        Ok(())
    }
}
