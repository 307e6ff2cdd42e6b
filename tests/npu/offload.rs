//! Attention that the device shares with a coprocessor. The coprocessor here is a twin on the CPU: it computes in f64
//! from arrays in bf16. It checks the arrays that it receives, and can fail on request.
//!
//! # The bound
//!
//! Queries, keys and values are rounded to bf16, each number by up to 2^-9 of its size. A score of one query and one
//! key is a sum of products, each with a relative error of up to 2 · 2^-9. Rounding goes up as often as down, so a
//! score has an error of about 2^-8 of its size, and scores of a normed query and key are small numbers. The relative
//! error of a weight is the error of its score, and the weighted sum of values averages these errors. So attention of a
//! layer has an error of about 2^-8 of its size, and the norm after it passes that on to the residual stream. The
//! errors of layers are independent: their sum is less than 2^-8 for each layer. [`bound`] allows that fraction of the
//! largest logit. If the coprocessor computes something else, the error must exceed the bound. A test shows that for
//! each kind of mistake.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use half::bf16;
use unicorn::engine::Sequence;
use unicorn::gpu::Device;
use unicorn::model::arch::open_files;
use unicorn::model::draft::{self, Drafted};
use unicorn::model::load::{LoadOptions, Source};
use unicorn::model::model_runner::ModelRunner;
use unicorn::model::offload::{LEAST_TOKENS, MOST_TOKENS, OffloadError, OffloadLimits};
use unicorn::model::{
    Batch, BatchSequence, BlockList, Draw, Input, Runner, RunnerError, Sampling, SamplingParams, Ticket,
};
use unicorn::npu::attention::{AttentionUnit, Offload, OffloadJob, OffloadPolicy, OffloadRoom};
use unicorn::tensor::KvDtype;

use crate::support::driver::{Driver, Run, plain_sequence};
use crate::support::goldens::{Goldens, all_logits, load, max_difference};
use crate::support::{data, demo, policy};

/// The fault of a twin.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// The job with this number fails when it begins, or when it ends.
    Begin(usize),
    Finish(usize),
    /// The output is: zeros; the first row's output in every row; the heads in another order; attention without a
    /// window.
    Zeros,
    FirstRow,
    OtherHeads,
    NoWindow,
}

/// Jobs that a twin received.
type Jobs = Arc<Mutex<Vec<OffloadJob>>>;

struct Twin {
    /// Query heads of a KV head, and their dimension.
    group: usize,
    head_dim: usize,
    fault: Fault,
    /// Whether the twin computes layers with a window, and layers without.
    kinds: [bool; 2],
    jobs: Jobs,
    output: Option<Vec<f32>>,
}

fn room(job: &OffloadJob) -> OffloadRoom {
    let seen = job.window.map_or(0, |window| (job.first + 1).saturating_sub(window));
    // The first key is at a multiple of 7, independent of block sizes, so the arrays have keys that no row sees.
    let first_key = seen / 7 * 7;
    let keys = job.first + job.rows - first_key;
    let row_stride = (job.rows + 3).min(MOST_TOKENS);
    OffloadRoom { first_key, keys, key_stride: keys.next_multiple_of(20), row_stride }
}

fn numbers(bytes: &[u8]) -> Vec<f64> {
    let all = bytes.as_chunks().0.iter();
    all.map(|bytes| f64::from(bf16::from_le_bytes(*bytes).to_f32())).collect()
}

impl AttentionUnit for Twin {
    fn room(&self, job: &OffloadJob) -> Option<OffloadRoom> {
        self.kinds[usize::from(job.window.is_none())].then(|| room(job))
    }

    fn begin(&mut self, job: &OffloadJob, inputs: Option<[&[u8]; 3]>) -> Result<(), OffloadError> {
        assert!(self.output.is_none(), "a second job at the same time");
        let mut jobs = self.jobs.lock().unwrap();
        jobs.push(*job);
        if self.fault == Fault::Begin(jobs.len() - 1) {
            return Err(OffloadError { code: "twin-begin".into(), message: "it does not begin".into() });
        }
        let OffloadRoom { first_key, keys: count, key_stride, row_stride } = room(job);
        let (d, heads) = (self.head_dim, job.kv_heads * self.group);
        let [queries, keys, values] = inputs.expect("the twin shares no memory").map(numbers);
        assert_eq!(queries.len(), heads * row_stride * d);
        assert_eq!([keys.len(), values.len()], [job.kv_heads * key_stride * d; 2]);
        // Numbers that no row needs are 0.
        let seen = job.window.map_or(0, |window| (job.first + 1).saturating_sub(window));
        for (at, head) in keys.chunks(key_stride * d).chain(values.chunks(key_stride * d)).enumerate() {
            let (before, rest) = head.split_at((seen - first_key) * d);
            let after = &rest[(count - (seen - first_key)) * d..];
            assert!(before.iter().chain(after).all(|value| *value == 0.0), "array {at} of {job:?}");
            assert!(head.iter().all(|value| value.is_finite()), "array {at} of {job:?}");
        }
        let mut output = vec![f32::NAN; queries.len()];
        for head in 0..heads {
            let rows = &queries[head * row_stride * d..][..row_stride * d];
            assert!(rows[job.rows * d..].iter().all(|value| *value == 0.0), "queries after the last row");
            let of_head = |all: &[f64], key: usize| {
                let at = (head / self.group * key_stride + key) * d;
                all[at..at + d].to_vec()
            };
            for row in 0..job.rows {
                let position = job.first + row;
                let window = if self.fault == Fault::NoWindow { None } else { job.window };
                let first = window.map_or(seen, |window| (position + 1).saturating_sub(window));
                let query = &rows[row * d..][..d];
                let scores: Vec<f64> = (first..=position)
                    .map(|key| of_head(&keys, key - first_key).iter().zip(query).map(|(k, q)| k * q).sum())
                    .collect();
                let most = scores.iter().copied().fold(f64::MIN, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
                let sum: f64 = weights.iter().sum();
                let mut result = vec![0.0; d];
                for (key, weight) in (first..).zip(&weights) {
                    let value = of_head(&values, key - first_key);
                    result.iter_mut().zip(value).for_each(|(to, value)| *to += weight / sum * value);
                }
                let head = if self.fault == Fault::OtherHeads { heads - 1 - head } else { head };
                let to = &mut output[(head * row_stride + row) * d..][..d];
                to.iter_mut().zip(result).for_each(|(to, from)| *to = from as f32);
            }
            if self.fault == Fault::FirstRow {
                let first = output[head * row_stride * d..][..d].to_vec();
                let rows = output[head * row_stride * d..][..job.rows * d].chunks_exact_mut(d);
                rows.for_each(|row| row.copy_from_slice(&first));
            }
        }
        if self.fault == Fault::Zeros {
            output.fill(0.0);
        }
        self.output = Some(output);
        Ok(())
    }

    fn finish(&mut self, output: Option<&mut [u8]>) -> Result<(), OffloadError> {
        let output = output.expect("the twin shares no memory");
        let result = self.output.take().expect("a job was begun");
        if self.fault == Fault::Finish(self.jobs.lock().unwrap().len() - 1) {
            output.fill(0xff);
            return Err(OffloadError { code: "twin-finish".into(), message: "it does not end".into() });
        }
        output.copy_from_slice(bytemuck::cast_slice(&result));
        Ok(())
    }
}

/// Buffers that are large enough for any job of the models in this file.
fn options(options: LoadOptions) -> LoadOptions {
    LoadOptions { offload: Some(OffloadLimits { kv_heads: 4, keys: 4096, shared: false }), ..options }
}

fn twin(model: &ModelRunner, fault: Fault) -> (Twin, Jobs) {
    let (c, jobs) = (model.config(), Jobs::default());
    let (group, head_dim) = (c.heads().group(), c.heads().head_dim);
    let twin = Twin { group, head_dim, fault, kinds: [true; 2], jobs: jobs.clone(), output: None };
    (twin, jobs)
}

fn attach(model: &mut ModelRunner, fault: Fault, kv_heads: usize, policy: OffloadPolicy) -> Jobs {
    let (unit, jobs) = twin(model, fault);
    model.attach_offload(Offload { unit: Box::new(unit), kv_heads, policy }).unwrap();
    jobs
}

/// See the documentation of this file.
fn bound(model: &ModelRunner, logits: &[f32]) -> f32 {
    let largest = logits.iter().fold(0f32, |a, b| a.max(b.abs()));
    model.config().layers.len() as f32 * 2f32.powi(-8) * largest
}

fn prompt(variant: &str) -> Vec<u32> {
    Goldens::open(&data("gemma3").join(variant)).tokens("tokens.long")
}

/// The number of jobs for a prompt in chunks: one in each layer for each chunk that is long enough.
fn jobs_of(model: &ModelRunner, tokens: usize, chunk: usize) -> (u64, u64) {
    let layers = model.config().layers.len();
    let chunks = (0..tokens).step_by(chunk).map(|first| chunk.min(tokens - first));
    let long: Vec<usize> = chunks.filter(|tokens| *tokens >= LEAST_TOKENS).collect();
    ((layers * long.len()) as u64, (layers * long.iter().sum::<usize>()) as u64)
}

#[test]
fn logits_with_a_unit_are_those_of_bf16_attention() {
    for variant in ["tiny-a", "tiny-b", "tiny-27b-ratio"] {
        let folder = data("gemma3").join(variant);
        let tokens = prompt(variant);
        for kv in KvDtype::ALL {
            let mut model = load(&folder, &options(LoadOptions { kv, ..LoadOptions::default() }));
            let plain = all_logits(&mut model, &tokens);
            let bound = bound(&model, &plain);
            let groups = model.config().heads().num_key_value_heads;
            for kv_heads in [groups.div_ceil(2), groups] {
                let jobs = attach(&mut model, Fault::None, kv_heads, OffloadPolicy::Require);
                let got = all_logits(&mut model, &tokens);
                let difference = max_difference(&got, &plain);
                println!("{variant}, {kv}, {kv_heads} of {groups} KV heads: {difference:.1e} of {bound:.1e}");
                assert!(difference <= bound, "{variant}, {kv}, {kv_heads}: {difference} of {bound}");
                assert!(difference > 0.0, "{variant}, {kv}, {kv_heads}: no bit of the unit's is used");
                let counts = model.offload_counts().unwrap();
                // Logits are computed in chunks of 32 tokens. The rest of the prompt is too short.
                assert_eq!((counts.dispatches, counts.tokens), jobs_of(&model, tokens.len(), 32));
                assert_eq!((counts.recomputed, counts.quarantined), (0, None));
                let jobs = jobs.lock().unwrap();
                assert_eq!(jobs.len() as u64, counts.dispatches);
                let layers = model.config().layers.len();
                assert_eq!((jobs[0].first, jobs[layers].first, jobs[layers].rows), (0, 32, 32));
                assert!(jobs.iter().all(|job| job.kv_heads == kv_heads));
            }
        }
    }
}

#[test]
fn whatever_a_unit_computes_wrong_shows_in_the_logits() {
    let tokens = prompt("tiny-a");
    let mut model = load(&data("gemma3/tiny-a"), &options(LoadOptions::default()));
    let plain = all_logits(&mut model, &tokens);
    let bound = bound(&model, &plain);
    for fault in [Fault::Zeros, Fault::FirstRow, Fault::OtherHeads, Fault::NoWindow] {
        attach(&mut model, fault, 2, OffloadPolicy::Require);
        let difference = max_difference(&all_logits(&mut model, &tokens), &plain);
        println!("{fault:?}: {difference:.1e}, and {bound:.1e} is allowed");
        assert!(difference > 2.0 * bound, "{fault:?}: {difference}");
    }
}

#[test]
fn the_demo_model_keeps_to_the_bound_too() {
    let tokens = demo::quick_prompts(220).max_by_key(|prompt| prompt.len()).unwrap();
    let mut model =
        load(&demo::folder(), &options(LoadOptions { max_context: Some(512), ..LoadOptions::default() }));
    let plain = all_logits(&mut model, tokens);
    let bound = bound(&model, &plain);
    for kv_heads in [1, 2] {
        attach(&mut model, Fault::None, kv_heads, OffloadPolicy::Auto);
        let difference = max_difference(&all_logits(&mut model, tokens), &plain);
        println!("{} tokens, {kv_heads} KV heads: {difference:.1e} of {bound:.1e}", tokens.len());
        assert!(difference > 0.0 && difference <= bound, "{kv_heads} KV heads: {difference}");
        assert_eq!(model.offload_counts().unwrap().dispatches, jobs_of(&model, tokens.len(), 32).0);
    }
}

fn sequence(id: u64, tokens: &[u32], answer: usize) -> Sequence {
    let params = SamplingParams { logprobs: Some(0), ..SamplingParams::GREEDY };
    plain_sequence(id, tokens.to_vec(), params, answer)
}

/// A prompt whose final hidden states are pooled.
fn pooled(id: u64, tokens: &[u32]) -> Sequence {
    let mut sequence = sequence(id, tokens, 1);
    sequence.request.pooling = true;
    sequence
}

fn run(model: &mut dyn Runner, sequences: Vec<Sequence>) -> Run {
    let limits = model.limits().clone();
    Driver::new(model, limits).run(sequences)
}

/// One sequence's part of a step: its slot, the number of tokens before, and its ids; no ids = the id sampled last.
type Piece<'a> = (u32, usize, &'a [u32]);

/// Submits a step in which every sequence draws the likeliest id after its last token. The last draw has a mask that
/// allows every id, so the step's closing submit waits for the mask.
fn submit(model: &mut ModelRunner, pieces: &[Piece<'_>]) -> Ticket {
    let blocks = 256 / model.limits().kv.block_size as u32;
    let sequence = |&(slot, start, ids): &Piece<'_>| BatchSequence {
        slot,
        start,
        input: if ids.is_empty() { Input::LastSampled } else { Input::Ids(ids.to_vec()) },
        blocks: vec![
            BlockList { first: 0, ids: (slot * blocks..(slot + 1) * blocks).collect() },
            BlockList { first: 0, ids: (slot * blocks..(slot + 1) * blocks).rev().collect() },
        ],
        images: Vec::new(),
        history: None,
    };
    let batch = Batch { sequences: pieces.iter().map(sequence).collect(), ..Batch::default() };
    let draw = |(sequence, &(slot, ..)): (usize, &Piece<'_>)| Draw {
        sequence,
        token: batch.sequences[sequence].input.len() - 1,
        slot,
        params: Arc::new(SamplingParams::GREEDY),
        seed: 0,
        prompt_len: 1,
        masked: sequence + 1 == pieces.len(),
        logprobs: Some(9),
    };
    let draws = pieces.iter().enumerate().map(draw).collect();
    let ticket = model.submit(&batch, &Sampling { draws, ..Sampling::default() }).unwrap();
    let all = vec![u32::MAX; model.limits().vocab_size.div_ceil(32)];
    model.masks(&ticket, &[all.into()]).unwrap();
    ticket
}

/// Two prompts in chunks at the same time, together with a short prompt and a decode, and with two steps in flight.
/// Sequences that are not shared keep the same bits.
#[test]
fn sequences_beside_a_shared_prompt_have_the_bits_that_they_have_alone() {
    let tokens = prompt("tiny-a");
    for kv in KvDtype::ALL {
        let load_options = LoadOptions { kv, sequences: 4, max_context: Some(256), ..LoadOptions::default() };
        let mut model = load(&data("gemma3/tiny-a"), &options(load_options));
        let logits = all_logits(&mut model, &tokens);
        let bound = 2.0 * bound(&model, &logits);
        let steps = |model: &mut ModelRunner| {
            let first = submit(model, &[(0, 0, &tokens[..20]), (1, 0, &tokens[..10])]);
            let second = submit(
                model,
                &[(0, 20, &[]), (1, 10, &tokens[10..110]), (2, 0, &tokens[30..90]), (3, 0, &tokens[..31])],
            );
            let first = model.wait(first).unwrap();
            let third =
                submit(model, &[(2, 60, &tokens[90..180]), (0, 21, &[]), (1, 110, &tokens[110..151])]);
            let second = model.wait(second).unwrap();
            [first, second, model.wait(third).unwrap()]
        };
        let plain = steps(&mut model);
        for kv_heads in [1, 2] {
            let jobs = attach(&mut model, Fault::None, kv_heads, OffloadPolicy::Require);
            let got = steps(&mut model);
            // For each step, the rows whose own attention was shared, in this step or before.
            let shared = [vec![], vec![1], vec![0, 2]];
            for (step, (got, plain)) in got.iter().zip(&plain).enumerate() {
                for row in 0..plain.ids.len() {
                    let what = format!("{kv}, {kv_heads} KV heads, step {step}, row {row}");
                    let [got_top, plain_top] = [got, plain].map(|all| all.logprobs[row].clone().unwrap().top);
                    if !shared[step].contains(&row) {
                        assert_eq!((got.ids[row], &got_top), (plain.ids[row], &plain_top), "{what}");
                        continue;
                    }
                    // The error of the nth largest log probability is at most the logits' error plus the error of their
                    // sum.
                    let [got, plain] =
                        [got_top, plain_top].map(|top| top.iter().map(|(_, l)| *l).collect::<Vec<_>>());
                    let difference = max_difference(&got, &plain);
                    println!("{what}: {difference:.1e} of {bound:.1e}");
                    assert!(difference > 0.0 && difference <= bound, "{what}: {difference}");
                }
            }
            let layers = model.config().layers.len();
            let jobs = jobs.lock().unwrap();
            let spans: Vec<_> = jobs.iter().map(|job| (job.first, job.rows)).collect();
            assert_eq!(spans, [vec![(10, 100); layers], vec![(60, 90); layers]].concat());
        }
    }
}

/// A layer's submits are split in every way: as one piece, into single parts, and by rows.
#[test]
fn the_cut_of_a_shared_step_changes_no_bit() {
    let tokens = prompt("tiny-27b-ratio");
    let all = |max_submit: Duration, kv_heads: usize| {
        let load_options =
            LoadOptions { max_submit, max_context: Some(512), sequences: 4, ..LoadOptions::default() };
        let mut model = load(&data("gemma3/tiny-27b-ratio"), &options(load_options));
        attach(&mut model, Fault::None, kv_heads, OffloadPolicy::Require);
        let sequences = vec![sequence(0, &tokens[..9], 12), pooled(1, &tokens), pooled(2, &tokens[5..60])];
        let got = run(&mut model, sequences);
        assert!(model.offload_counts().unwrap().dispatches > 0);
        (got.answers[&0].clone(), got.pooled[&1].clone(), got.pooled[&2].clone())
    };
    for kv_heads in [1, 3, 4] {
        let whole = all(LoadOptions::default().max_submit, kv_heads);
        assert!(all(Duration::ZERO, kv_heads) == whole, "{kv_heads} KV heads");
    }
}

#[test]
fn a_unit_that_fails_is_replaced_by_the_device() {
    let tokens = prompt("tiny-a");
    for max_submit in [LoadOptions::default().max_submit, Duration::ZERO] {
        let load_options = options(LoadOptions { max_submit, ..LoadOptions::default() });
        let mut model = load(&data("gemma3/tiny-a"), &load_options);
        let plain = all_logits(&mut model, &tokens);
        let (bound, layers) = (bound(&model, &plain), model.config().layers.len());
        for (fault, at, code) in [
            (Fault::Begin(0), 0, "twin-begin"),
            (Fault::Finish(0), 0, "twin-finish"),
            (Fault::Begin(layers + 3), layers + 3, "twin-begin"),
            (Fault::Finish(2 * layers - 1), 2 * layers - 1, "twin-finish"),
        ] {
            for kv_heads in [1, 2] {
                let jobs = attach(&mut model, fault, kv_heads, OffloadPolicy::Auto);
                let got = all_logits(&mut model, &tokens);
                let difference = max_difference(&got, &plain);
                match at {
                    // The device has computed everything.
                    0 => assert!(got == plain, "{fault:?}, {kv_heads} KV heads: {difference}"),
                    _ => assert!(difference > 0.0 && difference <= bound, "{fault:?}: {difference}"),
                }
                let counts = model.offload_counts().unwrap();
                assert_eq!(counts.dispatches, at as u64, "{fault:?}");
                assert_eq!(counts.fallbacks, [(code.to_owned(), 1)], "{fault:?}");
                // The failed layer, and the later layers of its step.
                assert_eq!(counts.recomputed as usize, layers - at % layers, "{fault:?}");
                assert!(counts.quarantined.unwrap().starts_with(code), "{fault:?}");
                assert_eq!(jobs.lock().unwrap().len(), at + 1, "{fault:?}: the unit is used no more");
                assert!(all_logits(&mut model, &tokens) == plain, "{fault:?}: afterwards");
            }
        }
    }
}

fn prompt_batch(model: &ModelRunner, tokens: &[u32]) -> Batch {
    let ids = (0..tokens.len().div_ceil(model.limits().kv.block_size) as u32).collect();
    let sequence = BatchSequence {
        slot: 0,
        start: 0,
        input: Input::Ids(tokens.to_vec()),
        blocks: vec![BlockList { first: 0, ids }; model.limits().kv.pools.len()],
        images: Vec::new(),
        history: None,
    };
    Batch { sequences: vec![sequence], ..Batch::default() }
}

#[test]
fn a_unit_that_is_required_and_fails_ends_the_runner() {
    let tokens = prompt("tiny-a");
    for (fault, failure) in [
        (Fault::Begin(2), "twin-begin: it does not begin"),
        (Fault::Finish(2), "twin-finish: it does not end"),
    ] {
        let mut model = load(&data("gemma3/tiny-a"), &options(LoadOptions::default()));
        attach(&mut model, fault, 2, OffloadPolicy::Require);
        let failure = RunnerError::Coprocessor(failure.into());
        // Work that the coprocessor does not take is computed before the failure, but not after it.
        let short = prompt_batch(&model, &tokens[..LEAST_TOKENS - 1]);
        let ticket = model.submit(&short, &Sampling::default()).unwrap();
        model.wait(ticket).unwrap();
        let long = prompt_batch(&model, &tokens[..LEAST_TOKENS]);
        assert_eq!(model.submit(&long, &Sampling::default()).unwrap_err(), failure);
        assert_eq!(model.submit(&long, &Sampling::default()).unwrap_err(), failure);
        assert_eq!(model.submit(&short, &Sampling::default()).unwrap_err(), failure);
        let counts = model.offload_counts().unwrap();
        assert_eq!((counts.dispatches, counts.recomputed, counts.fallbacks), (2, 0, vec![]));
        assert_eq!(counts.quarantined, Some(failure.to_string()));
    }
}

#[test]
fn layers_that_a_unit_has_no_room_for_are_the_devices_own() {
    let tokens = prompt("tiny-a");
    let mut model = load(&data("gemma3/tiny-a"), &options(LoadOptions::default()));
    let plain = all_logits(&mut model, &tokens);
    let windowed = model.config().layers.len() - 1;
    for (kinds, layers) in [([false, false], 0), ([true, false], windowed), ([false, true], 1)] {
        let (unit, jobs) = twin(&model, Fault::None);
        let unit = Box::new(Twin { kinds, ..unit });
        model.attach_offload(Offload { unit, kv_heads: 2, policy: OffloadPolicy::Require }).unwrap();
        let got = all_logits(&mut model, &tokens);
        let difference = max_difference(&got, &plain);
        assert_eq!(got == plain, layers == 0, "{kinds:?}");
        assert!(difference <= bound(&model, &plain), "{kinds:?}: {difference}");
        let chunks = (tokens.len() / 32) as u64;
        assert_eq!(model.offload_counts().unwrap().dispatches, chunks * layers as u64, "{kinds:?}");
        let jobs = jobs.lock().unwrap();
        assert!(jobs.iter().all(|job| kinds[usize::from(job.window.is_none())]), "{kinds:?}");
    }
}

/// A draft model, the self-test, and calibration compute only on the device.
#[test]
fn what_is_no_prompt_of_the_model_is_not_shared() {
    let tokens = prompt("tiny-a");
    let [files, draft_files] =
        ["tiny-a", "tiny-b"].map(|variant| open_files(&data("gemma3").join(variant)).unwrap());
    let device = Device::open(&policy()).unwrap();
    let load_options = options(LoadOptions { max_context: Some(512), ..LoadOptions::default() });
    let (mut model, draft_model) = draft::load(
        &device,
        &Source::open(&files).unwrap(),
        &Source::open(&draft_files).unwrap(),
        &load_options,
        &mut |_| {},
    )
    .unwrap();
    let jobs = attach(&mut model, Fault::None, 2, OffloadPolicy::Require);
    model.self_test().unwrap();
    assert_eq!(model.offload_counts().unwrap().dispatches, 0);
    let layers = model.config().layers.len();
    let got = run(&mut Drafted::new(model, draft_model), vec![sequence(0, &tokens[..100], 12)]);
    assert_eq!(got.answers[&0].len(), 12);
    let jobs = jobs.lock().unwrap();
    assert_eq!(jobs.len(), layers, "{jobs:?}");
    assert!(jobs.iter().all(|job| (job.first, job.rows) == (0, 100)));
}

#[test]
fn a_unit_needs_room_that_the_load_made() {
    let folder = data("gemma3/tiny-a");
    let attach = |load_options: &LoadOptions, kv_heads: usize| {
        let mut model = load(&folder, load_options);
        let (unit, _) = twin(&model, Fault::None);
        let offload = Offload { unit: Box::new(unit), kv_heads, policy: OffloadPolicy::Auto };
        model.attach_offload(offload).map_err(|error| error.to_string())
    };
    let refusal = attach(&LoadOptions::default(), 1).unwrap_err();
    assert!(refusal.contains("without room") && refusal.contains("LoadOptions::offload"), "{refusal}");
    let calibrating = options(LoadOptions { moments: true, ..LoadOptions::default() });
    assert!(attach(&calibrating, 1).unwrap_err().contains("calibration"));
    let small = LoadOptions {
        offload: Some(OffloadLimits { kv_heads: 1, keys: 64, shared: false }),
        ..LoadOptions::default()
    };
    assert!(attach(&small, 2).unwrap_err().contains("2 KV heads; expected 1 to 1"));
    assert!(attach(&options(LoadOptions::default()), 3).unwrap_err().contains("expected 1 to 2"));
    assert!(attach(&options(LoadOptions::default()), 0).is_err());
    assert_eq!(attach(&small, 1), Ok(()));
}

#[test]
fn a_shared_step_takes_no_memory_after_the_load() {
    let tokens = prompt("tiny-a");
    // The test uses a separate device, because other tests allocate on the shared one at the same time.
    let device = Device::open(&policy()).unwrap();
    let files = open_files(&data("gemma3/tiny-a")).unwrap();
    // Deep in the prompt, a job has more keys than the buffers hold.
    let limits = OffloadLimits { kv_heads: 2, keys: 100, shared: false };
    let load_options = LoadOptions { offload: Some(limits), ..LoadOptions::default() };
    let mut model =
        ModelRunner::load(&device, &Source::open(&files).unwrap(), &load_options, &mut |_| {}).unwrap();
    let jobs = attach(&mut model, Fault::None, 2, OffloadPolicy::Require);
    let before = device.allocations();
    all_logits(&mut model, &tokens);
    assert_eq!(device.allocations(), before);
    let jobs = jobs.lock().unwrap();
    assert!(jobs.iter().all(|job| room(job).key_stride <= 100));
    assert!(jobs.iter().any(|job| job.first > 100), "layers with a window");
}
