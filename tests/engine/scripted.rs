//! The engine with the scripted runner, which checks the batches, and the scheduler alone with random operations.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{Hash, Hasher};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use unicorn::engine::{
    CacheSalt, EVENTS, Energy, EnergyCounter, Engine, EngineConfig, EngineError, EngineHandle, Event,
    FinishReason, Fork, Joules, Lease, Load, Pace, Priority, PromptImage, Request, Restriction, Scheduler,
    SchedulerConfig, SharedMask, SubmitError, TokenMask, draft,
};
use unicorn::model::offload::LEAST_TOKENS;
use unicorn::model::{
    Batch, Draw, ImageLimits, ImageSizes, Input, KvLimits, KvPool, Limits, Logprobs, Runner, SamplingParams,
};

use crate::support::driver::plain_sequence;
use crate::support::engine::{END, assert_all_free, collect, image_at, image_of_size, request};
use crate::support::fake_runner::{
    Control, FakeRunner, HANG, Script, fake_limits, fake_logprobs, fake_pooled, kv_with, mixed, mixed_answer,
    says, seen,
};
use crate::support::waits::wait_until;

fn start(limits: Limits, script: Script) -> (EngineHandle, Control) {
    start_on(FakeRunner::new(limits, script))
}

fn start_on((runner, control): (Box<FakeRunner>, Control)) -> (EngineHandle, Control) {
    (Engine::start(runner, EngineConfig { queue: 4, ..EngineConfig::default() }), control)
}

/// An energy counter that grows with every reading by a seeded random amount.
#[derive(Debug)]
struct FakeCounter {
    random: Mutex<ChaCha8Rng>,
    readings: Mutex<Vec<f64>>,
    /// Every reading from this one on fails.
    fails_from: usize,
}

impl FakeCounter {
    fn new(seed: u64, fails_from: usize) -> Arc<Self> {
        let random = Mutex::new(ChaCha8Rng::seed_from_u64(seed));
        Arc::new(Self { random, readings: Mutex::default(), fails_from })
    }

    /// The energy between the first reading and the last.
    fn used(&self) -> f64 {
        let readings = self.readings.lock().expect("no panic");
        readings.last().expect("readings") - readings[0]
    }
}

impl EnergyCounter for FakeCounter {
    fn source(&self) -> &'static str {
        "fake"
    }

    fn read(&self) -> Option<Energy> {
        let mut readings = self.readings.lock().expect("no panic");
        let joules = readings.last().unwrap_or(&1e3) + self.random.lock().expect("no panic").random::<f64>();
        readings.push(joules);
        (readings.len() <= self.fails_from).then_some(Energy { joules, gaps: 0 })
    }
}

/// Limits with slots for only one sequence at a time.
fn one_slot() -> Limits {
    Limits { max_sequences: 1, max_draws: 1, ..fake_limits() }
}

/// A mask that allows even ids after an even number of ids and odd ids after an odd number. From `free_after` ids on,
/// it allows all ids.
#[derive(Clone, Default)]
struct Parity {
    seen: Vec<u32>,
    free_after: Option<usize>,
}

impl TokenMask for Parity {
    fn mask(&mut self, answer: &[u32]) -> Arc<[u32]> {
        let before = answer.len().saturating_sub(1);
        assert!(self.seen == answer || self.seen == answer[..before], "{:?}, then {answer:?}", self.seen);
        let restriction = self.restriction(answer);
        assert_eq!(restriction, Restriction::Binding, "asked for a mask although all ids are allowed");
        self.seen = answer.to_vec();
        Arc::new([0x5555_5555 << (answer.len() % 2); 16])
    }

    fn restriction(&mut self, answer: &[u32]) -> Restriction {
        if self.free_after.is_some_and(|n| answer.len() >= n) {
            Restriction::Over
        } else {
            Restriction::Binding
        }
    }

    fn boxed_clone(&self) -> Box<dyn TokenMask> {
        Box::new(self.clone())
    }
}

/// A mask that allows only odd ids after a multiple of four. After every other id, it is idle.
#[derive(Clone)]
struct OddAfterFours;

impl TokenMask for OddAfterFours {
    fn mask(&mut self, answer: &[u32]) -> Arc<[u32]> {
        assert_eq!(self.restriction(answer), Restriction::Binding, "asked for an idle mask");
        Arc::new([0xaaaa_aaaa; 16])
    }

    fn restriction(&mut self, answer: &[u32]) -> Restriction {
        match answer.last() {
            Some(id) if id % 4 == 0 => Restriction::Binding,
            _ => Restriction::Idle,
        }
    }

    fn boxed_clone(&self) -> Box<dyn TokenMask> {
        Box::new(self.clone())
    }
}

fn finish_reason(event: &Event) -> FinishReason {
    match event {
        Event::Finished { reason, .. } => *reason,
        other => panic!("expected an answer's end, got {other:?}"),
    }
}

#[test]
fn an_answer_is_prefilled_in_chunks_and_decoded_with_ids_on_the_device() {
    // The second step is submitted before the host reads the first, so the host does not know the first step's ids.
    let (engine, control) = start(Limits { max_in_flight: 2, ..fake_limits() }, says(&[207, 208, 209], END));
    let prompt: Vec<u32> = (0..37).collect();
    let (ids, last) = collect(&mut engine.submit(request(&prompt, 10)).expect("accepted"));
    assert_eq!(ids, [207, 208, 209]);
    let Event::Finished { reason: FinishReason::Stop(END), timings, .. } = last else { panic!("{last:?}") };
    assert_eq!((timings.prompt_n, timings.predicted_n), (37, 4), "the stop id is counted but not sent");

    let inputs: Vec<Input> = control.batches().iter().map(|b| b.sequences[0].input.clone()).collect();
    let chunk = |r: std::ops::Range<usize>| Input::Ids(prompt[r].to_vec());
    let decode = Input::LastSampled;
    let decodes = inputs.iter().skip(3).filter(|input| **input == decode).count();
    assert_eq!(inputs[..3], [chunk(0..16), chunk(16..32), chunk(32..37)]);
    // One more step may have been in progress when the host read the end.
    assert!(decodes == inputs.len() - 3 && (3..=4).contains(&decodes), "{inputs:?}");
    assert_all_free(&engine);
}

/// The energy of every answer to `requests`, which are all submitted before the first step ends.
fn energies(
    limits: Limits,
    counter: &Arc<FakeCounter>,
    requests: impl IntoIterator<Item = Request>,
) -> Vec<Option<Joules>> {
    let (runner, control) = FakeRunner::new(limits.clone(), mixed(limits.vocab_size));
    let energy = Some(Arc::clone(counter) as Arc<dyn EnergyCounter>);
    let engine = Engine::start(runner, EngineConfig { energy, ..EngineConfig::default() });
    control.allow(0);
    let streams: Vec<_> = requests.into_iter().map(|r| engine.submit(r).expect("accepted")).collect();
    control.release();
    let mut energies = Vec::new();
    for mut stream in streams {
        while let Some(event) = stream.blocking_next() {
            match event {
                Event::Finished { timings, .. } => energies.push(timings.energy),
                Event::Failed(error) => panic!("{error}"),
                _ => {}
            }
        }
    }
    assert_all_free(&engine);
    energies
}

#[test]
fn the_energy_of_all_answers_adds_up_to_the_energy_of_the_machine() {
    let kv = kv_with(1000, 500);
    for (seed, sequences, in_flight) in [(1, 1, 1), (2, 1, 2), (3, 4, 2), (4, 16, 1), (5, 16, 2)] {
        let limits = Limits {
            max_sequences: sequences,
            max_draws: 2 * sequences,
            max_in_flight: in_flight,
            kv: kv.clone(),
            ..fake_limits()
        };
        let counter = FakeCounter::new(seed, usize::MAX);
        let requests = (0..24).map(|i| Request {
            seed: i,
            more_seeds: if sequences > 1 && i % 5 == 0 { vec![100 + i, 200 + i] } else { Vec::new() },
            ..request(&(0..3 + 5 * i as u32).collect::<Vec<_>>(), 1 + i as usize)
        });
        let shown = format!("seed {seed}, {sequences} sequences, {in_flight} steps in flight");
        let energies: Option<Vec<Joules>> = energies(limits, &counter, requests).into_iter().collect();
        let energies = energies.expect("the energy of every answer is known");
        let sum: f64 = energies.iter().map(|energy| energy.prompt + energy.predicted).sum();
        assert!((sum - counter.used()).abs() < 1e-6, "{shown}: {sum} J instead of {} J", counter.used());
        assert!(energies.iter().any(|energy| energy.prompt > 0.0 && energy.predicted > 0.0), "{shown}");
        // An answer of one token has no step after its first token.
        assert_eq!(
            energies.iter().filter(|energy| energy.predicted == 0.0).count(),
            if sequences > 1 { 3 } else { 1 },
            "{shown}"
        );
    }
}

#[test]
fn an_answer_reports_no_energy_unless_all_of_it_is_known() {
    // Without a counter, the energy is not known.
    let (engine, _) = start(fake_limits(), says(&[207], END));
    let (_, last) = collect(&mut engine.submit(request(&[1, 2], 5)).expect("accepted"));
    let Event::Finished { timings, .. } = last else { panic!("{last:?}") };
    assert_eq!(timings.energy, None);

    // The counter fails during the second answer.
    let requests = || [request(&[1, 2], 3), request(&[3, 4], 3)];
    let known = |fails_from| {
        let energies = energies(one_slot(), &FakeCounter::new(7, fails_from), requests());
        energies.iter().map(Option::is_some).collect::<Vec<_>>()
    };
    assert_eq!(known(usize::MAX), [true, true]);
    assert_eq!(known(5), [true, false]);
    assert_eq!(known(2), [false, false]);
}

#[test]
fn max_tokens_ends_an_answer_and_defaults_to_the_rest_of_the_context() {
    let (engine, _) = start(fake_limits(), says(&[], 5));
    let (ids, last) = collect(&mut engine.submit(request(&[1, 2], 3)).expect("accepted"));
    assert_eq!((ids.len(), finish_reason(&last)), (3, FinishReason::Length));

    let rest = Request { max_tokens: None, ..request(&[1; 150], 1) };
    let (ids, last) = collect(&mut engine.submit(rest).expect("accepted"));
    assert_eq!((ids.len(), finish_reason(&last)), (50, FinishReason::Length));
    assert_all_free(&engine);
}

#[test]
fn a_request_outside_the_limits_is_refused_with_the_numbers() {
    let (engine, control) = start(fake_limits(), says(&[], END));
    let refused = |r| engine.submit(r).err().expect("refused");
    let context = 200;
    let overflow = |prompt, max_tokens| SubmitError::ContextExceeded { prompt, max_tokens, context };
    assert_eq!(refused(request(&[1; 200], 1)), overflow(200, None));
    assert_eq!(refused(request(&[1; 150], 51)), overflow(150, Some(51)));
    assert_eq!(refused(request(&[1], usize::MAX)), overflow(1, Some(usize::MAX)));
    assert_eq!(refused(request(&[], 1)), SubmitError::EmptyPrompt);
    assert_eq!(refused(request(&[1], 0)), SubmitError::NoTokens);
    assert_eq!(refused(request(&[1, 512], 1)), SubmitError::TokenOutOfRange { id: 512, vocab_size: 512 });
    assert!(
        overflow(150, Some(51)).to_string().contains("150")
            && overflow(200, None).to_string().contains("200")
    );

    // The longest request that fits.
    let (ids, _) = collect(&mut engine.submit(request(&[1; 199], 1)).expect("accepted"));
    assert!(ids.is_empty(), "expected END as the first token");
    assert_eq!(control.batches().len(), 13);
    let more = Request { more_seeds: vec![1, 2], ..request(&[1], 1) };
    assert_eq!(refused(more), SubmitError::TooManyAnswers { n: 3, most: 2 });
}

#[test]
fn a_mask_is_called_with_every_id_before_the_next_one() {
    let limits = Limits { max_in_flight: 2, max_sequences: 4, max_draws: 4, ..fake_limits() };
    let (engine, control) = start(limits, mixed(512));
    let mut masked =
        Request { mask: Some(Box::new(Parity::default())), more_seeds: vec![1], ..request(&[1, 2, 3], 12) };
    Arc::make_mut(&mut masked.sampling).logprobs = Some(2);
    let mut free = engine.submit(request(&[1, 2], 12)).unwrap();
    let mut stream = engine.submit(masked).unwrap();
    let mut counts = [0u32; 2];
    while let Some(event) = stream.blocking_next() {
        let Event::Token { choice, id, logprobs, .. } = event else {
            continue;
        };
        assert_eq!(id % 2, counts[choice] % 2, "id {} of answer {choice}", counts[choice]);
        assert_eq!(logprobs, Some(fake_logprobs(id, 2)));
        counts[choice] += 1;
    }
    assert!(counts.iter().all(|n| *n > 3), "{counts:?}");
    assert_eq!(collect(&mut free).0, mixed_answer(&[1, 2], 12, 0, 512, END));
    let inputs = control.batches().into_iter().flat_map(|batch| batch.sequences);
    assert!(
        inputs.into_iter().any(|s| s.input == Input::LastSampled),
        "unmasked sequences must not wait for the host"
    );
}

#[test]
fn an_answer_whose_mask_becomes_free_runs_ahead_of_the_host() {
    let limits = Limits { max_in_flight: 2, ..fake_limits() };
    let answer = [2, 3, 4, 50, 60, 70, 80];
    for (free_after, n) in [(Some(3), 7), (Some(1), 7), (None, 3)] {
        let (engine, control) = start(limits.clone(), says(&answer, END));
        let mask = Box::new(Parity { free_after, ..Parity::default() });
        let request = Request { mask: Some(mask), ..request(&[1], 9) };
        let (ids, _) = collect(&mut engine.submit(request).unwrap());
        assert_eq!(ids[..n], answer[..n], "{free_after:?}");
        let inputs = control.batches().into_iter().flat_map(|batch| batch.sequences);
        let ahead = inputs.filter(|sequence| sequence.input == Input::LastSampled).count();
        assert_eq!(ahead > 0, free_after.is_some(), "{free_after:?}: {ahead} steps ahead of the host");
    }
}

#[test]
fn ids_drawn_ahead_of_a_mask_that_becomes_binding_are_drawn_again() {
    // The script says an id of its own after every text, so an id that was drawn without the mask would show. Prompt
    // lookup finds draft tokens in the second script.
    let repeats = [3, 5, 7, 8, 11, 13, 4, 6].repeat(12);
    let scripts: [fn(&[u32]) -> Script; 2] = [|_| mixed(512), |repeats| says(repeats, END)];
    for script in scripts {
        let run = |max_in_flight| {
            let (engine, control) = start(Limits { max_in_flight, ..fake_limits() }, script(&repeats));
            let mut request = Request {
                mask: Some(Box::new(OddAfterFours)),
                more_seeds: vec![1],
                ..request(&[3, 5, 7, 8, 11, 13, 4, 6], 60)
            };
            Arc::make_mut(&mut request.sampling).presence_penalty = 0.5;
            let mut stream = engine.submit(request).unwrap();
            let mut answers = [vec![], vec![]];
            while let Some(event) = stream.blocking_next() {
                if let Event::Token { choice, id, .. } = event {
                    answers[choice].push(id);
                }
            }
            let batches = control.batches();
            let inputs = batches.iter().flat_map(|batch| &batch.sequences);
            let ahead = inputs.filter(|sequence| sequence.input == Input::LastSampled).count();
            assert_all_free(&engine);
            (answers, ahead)
        };
        let ((answers, ahead), (alone, _)) = (run(2), run(1));
        assert_eq!(answers, alone, "the mask does not depend on the steps in flight");
        for ids in answers {
            let fours = ids.windows(2).filter(|pair| pair[0] % 4 == 0).count();
            assert!(ids.windows(2).all(|pair| pair[0] % 4 != 0 || pair[1] % 2 == 1), "{ids:?}");
            assert!(ids.len() > 8 && fours > 0, "{ids:?}");
        }
        assert!(ahead > 0, "an idle mask lets steps overlap");
    }
}

#[test]
fn no_stop_id_comes_before_min_tokens() {
    let limits = Limits { max_in_flight: 2, ..fake_limits() };
    for min_tokens in [0, 1, 5] {
        let (engine, _) = start(limits.clone(), says(&[40, 41], END));
        let mut request = request(&[1, 2, 3], 30);
        Arc::make_mut(&mut request.sampling).min_tokens = min_tokens;
        let (ids, last) = collect(&mut engine.submit(request).unwrap());
        // If the stop id is forbidden, the fake runner takes the next id, and then the script begins again.
        let expected: &[u32] = if min_tokens == 5 { &[40, 41, END + 1, 40, 41] } else { &[40, 41] };
        assert_eq!((&ids[..], finish_reason(&last)), (expected, FinishReason::Stop(END)), "{min_tokens}");
    }
}

#[test]
fn a_full_queue_refuses_and_accepted_requests_are_answered_in_order() {
    let (engine, control) = start(one_slot(), mixed(100));
    control.allow(0);
    let mut running = engine.submit(request(&[9], 5)).expect("runs");
    control.submitted(1);
    let mut queued: Vec<_> = (0..2).map(|i| engine.submit(request(&[i], 5)).expect("waits")).collect();
    let background = Request { priority: Priority::Background, ..request(&[1], 5) };
    let refused = engine.submit(background.clone()).err();
    assert_eq!(
        refused,
        Some(SubmitError::QueueFull { waiting: 2 }),
        "half of the queue is for interactive requests"
    );
    queued.extend((2..4).map(|i| engine.submit(request(&[i], 5)).expect("waits")));
    assert_eq!(engine.submit(request(&[1], 5)).err(), Some(SubmitError::QueueFull { waiting: 4 }));
    assert_eq!(engine.stats().waiting, 4);

    control.release();
    assert_eq!(collect(&mut running).0.len(), 5);
    for (i, stream) in queued.iter_mut().enumerate() {
        assert_eq!(collect(stream).0, mixed_answer(&[i as u32], 5, 0, 100, END));
    }
    assert!(engine.submit(background).is_ok(), "the queue must have room again");
}

#[test]
fn dropping_the_stream_cancels_at_every_stage() {
    // With 0 steps done, the first prefill chunk runs. Step 2 has the last chunk, and later steps are decode steps.
    for steps in 0..8 {
        let (engine, control) = start(one_slot(), says(&[], 5));
        control.allow(steps);
        let stream = engine.submit(request(&[1; 40], 100)).expect("accepted");
        let waiting = engine.submit(request(&[2; 4], 1)).expect("accepted");
        control.submitted(steps + 1);
        drop(stream);
        control.allow(steps + 1);
        let mut waiting = waiting;
        control.submitted(steps + 2);
        let next = control.batches()[steps + 1].clone();
        assert_eq!(next.sequences[0].input, Input::Ids(vec![2; 4]), "not cancelled after {steps} steps");
        control.release();
        assert_eq!(finish_reason(&collect(&mut waiting).1), FinishReason::Length);
        assert_all_free(&engine);
    }
}

#[test]
fn a_cancelled_request_in_the_queue_never_runs_and_frees_its_place() {
    let (engine, control) = start(one_slot(), says(&[], END));
    control.allow(0);
    let mut running = engine.submit(request(&[1], 5)).expect("runs");
    control.submitted(1);
    for _ in 0..4 {
        drop(engine.submit(request(&[2], 5)).expect("waits"));
    }
    control.release();
    collect(&mut running);
    assert_all_free(&engine);
    assert_eq!(control.batches().len(), 1);
}

#[test]
fn a_reader_that_never_reads_delays_no_other_and_is_cancelled() {
    let kv = kv_with(1024, 32);
    let (engine, _) = start(Limits { max_context: 4096, kv, ..fake_limits() }, says(&[], 5));
    let mut patient = engine.submit(request(&[1], 200)).expect("accepted");
    let mut unread = engine.submit(request(&[1], 4000)).expect("accepted");
    let (ids, _) = collect(&mut engine.submit(request(&[2], 10)).expect("accepted"));
    assert_eq!(ids.len(), 10);
    assert_eq!(collect(&mut patient).0.len(), 200, "events below the limit must be kept");
    assert_all_free(&engine);
    let (ids, last) = collect(&mut unread);
    assert_eq!((ids.len(), last), (EVENTS, Event::Failed(EngineError::SlowReader)));
}

#[test]
fn a_lost_device_fails_all_current_and_later_requests() {
    for (on_submit, at) in [(true, 0), (true, 4), (false, 0), (false, 4)] {
        let (engine, control) = start(one_slot(), says(&[], 5));
        control.allow(0);
        if on_submit {
            control.fail_submit_at(at)
        } else {
            control.fail_wait_at(at)
        }
        let mut streams: Vec<_> =
            (0..3).map(|_| engine.submit(request(&[1; 20], 50)).expect("accepted")).collect();
        control.release();
        let why = if on_submit { "out of rings" } else { "ring timeout" };
        for stream in &mut streams {
            match collect(stream).1 {
                Event::Failed(EngineError::Lost(text)) => assert!(text.contains(why), "{text}"),
                other => panic!("expected a failure, got {other:?}"),
            }
        }
        assert!(engine.join(HANG), "the engine did not end");
        assert!(matches!(engine.health(), Err(EngineError::Lost(_))));
        assert!(matches!(
            engine.submit(request(&[1], 1)).err(),
            Some(SubmitError::Engine(EngineError::Lost(_)))
        ));
        assert_all_free(&engine);
    }
}

#[test]
fn logits_that_are_not_finite_fail_only_their_request() {
    for at in [0, 3] {
        let (engine, control) = start(one_slot(), says(&[], 5));
        control.allow(0);
        control.not_finite_at(at);
        let mut failing = engine.submit(request(&[1; 20], 50)).expect("accepted");
        let mut next = engine.submit(request(&[2; 20], 3)).expect("accepted");
        control.release();
        let (ids, last) = collect(&mut failing);
        assert_eq!((ids.len(), last), (at, Event::Failed(EngineError::NotFinite)));
        let (ids, last) = collect(&mut next);
        assert_eq!((ids.len(), finish_reason(&last)), (3, FinishReason::Length));
        assert_eq!(engine.health(), Ok(()));
        assert_all_free(&engine);
    }

    // The two requests also share steps. Draw 2 is the second request's draw in their first common step.
    let (engine, control) = start(fake_limits(), says(&[], 5));
    control.allow(0);
    control.not_finite_at(2);
    let mut first = engine.submit(request(&[1; 4], 9)).expect("accepted");
    control.submitted(1);
    let mut failing = engine.submit(request(&[2; 4], 9)).expect("accepted");
    control.release();
    assert_eq!(collect(&mut first).0, [5; 9]);
    assert_eq!(collect(&mut failing).1, Event::Failed(EngineError::NotFinite));
    assert_all_free(&engine);
}

fn cached_of(last: &Event) -> usize {
    match last {
        Event::Finished { timings, .. } => timings.cached_n,
        other => panic!("expected an answer's end, got {other:?}"),
    }
}

#[test]
fn logits_that_are_not_finite_leave_nothing_in_the_prefix_cache() {
    let limits = Limits { max_draws: 9, max_in_flight: 2, ..fake_limits() };
    let prompt: Vec<u32> = (0..41).collect();
    let plain = request(&prompt, 20);
    let scored = Request { prompt_logprobs: Some(1), ..plain.clone() };
    let pooled = Request { pooling: true, ..plain.clone() };
    // Each case is a request and the draw that fails: the first id, an id within the answer, an id within the prompt,
    // and the hidden states.
    for (failing, at) in [(&plain, 0), (&plain, 5), (&scored, 20), (&pooled, 0)] {
        let (engine, control) = start(limits.clone(), mixed(512));
        control.not_finite_at(at);
        let (_, last) = collect(&mut engine.submit(failing.clone()).expect("accepted"));
        assert_eq!(last, Event::Failed(EngineError::NotFinite), "draw {at}");
        assert_all_free(&engine);
        let stats = engine.stats();
        assert_eq!((stats.full.cached, stats.sliding.cached), (0, 0), "draw {at}");
        for expected in [0, 40] {
            let (ids, last) = collect(&mut engine.submit(plain.clone()).expect("accepted"));
            assert_eq!(ids, mixed_answer(&prompt, 20, 0, 512, END));
            assert_eq!(cached_of(&last), expected, "draw {at}");
        }
        assert_all_free(&engine);
    }
}

#[test]
fn a_request_that_shares_a_failing_prompt_continues_and_is_not_cached() {
    let (engine, control) =
        start(Limits { max_sequences: 3, max_draws: 3, ..fake_limits() }, unpredictable());
    let prompt: Vec<u32> = (0..41).collect();
    let longer = [&prompt[..], &[7]].concat();
    // Step 2 has the first draw. Step 8 is the first that both requests share, with draws 6 and 7. Draw 8 is the first
    // request's draw in the next step.
    control.allow(7);
    control.not_finite_at(8);
    let mut failing = engine.submit(request(&prompt, 60)).expect("accepted");
    control.submitted(8);
    let mut sharing = engine.submit(request(&longer, 60)).expect("accepted");
    control.release();
    let (ids, last) = collect(&mut failing);
    assert_eq!((ids.len(), last), (7, Event::Failed(EngineError::NotFinite)));
    let (answer, last) = collect(&mut sharing);
    assert_eq!(answer, unpredictable_answer(&longer, 60));
    assert_eq!(cached_of(&last), 40, "it began before the failure");
    assert_all_free(&engine);
    let find = |prompt: &[u32]| {
        let (ids, last) = collect(&mut engine.submit(request(prompt, 1)).expect("accepted"));
        assert_eq!(ids, unpredictable_answer(prompt, 1));
        cached_of(&last)
    };
    assert_eq!([find(&prompt), find(&prompt)], [0, 40]);
    assert_eq!(
        find(&[&longer[..], &answer].concat()),
        40,
        "blocks computed after the failure must not be found"
    );
    assert_all_free(&engine);
}

#[test]
fn each_answer_of_a_request_buffers_events_for_a_paused_reader() {
    let kv = kv_with(1024, 32);
    let limits = Limits { max_context: 2048, max_sequences: 3, max_draws: 3, kv, ..fake_limits() };
    let (engine, _) = start(limits, says(&[], 5));
    let several = Request { more_seeds: vec![1, 2], ..request(&[1], EVENTS - 1) };
    let mut stream = engine.submit(several).expect("accepted");
    // When a later request has ended, all of these answers have ended too.
    collect(&mut engine.submit(request(&[2], 1)).expect("accepted"));
    assert_all_free(&engine);
    let (mut ids, mut ends) = ([0; 3], [None; 3]);
    while let Some(event) = stream.blocking_next() {
        match event {
            Event::Token { choice, .. } => ids[choice] += 1,
            Event::Finished { choice, reason, .. } => ends[choice] = Some(reason),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((ids, ends), ([EVENTS - 1; 3], [Some(FinishReason::Length); 3]));
}

#[test]
fn a_panicking_runner_is_an_internal_error_and_not_a_hang() {
    let (engine, _) = start(fake_limits(), Box::new(|_, _| panic!("a bug, made for this test")));
    let mut stream = engine.submit(request(&[1], 1)).expect("accepted");
    assert!(matches!(collect(&mut stream).1, Event::Failed(EngineError::Bug(_))));
    assert!(engine.join(HANG) && matches!(engine.health(), Err(EngineError::Bug(_))));
    let refused = engine.submit(request(&[1], 1)).err();
    assert!(matches!(refused, Some(SubmitError::Engine(EngineError::Bug(_)))), "{refused:?}");
}

#[test]
fn an_engine_reports_why_it_ended_unless_it_was_told_to_end() {
    let bug = |_: &[u32], _: &Draw| panic!("a bug, made for this test");
    let lost = |error: Option<EngineError>| matches!(error, Some(EngineError::Lost(why)) if why.contains("ring timeout"));
    for end in [EngineHandle::drain, EngineHandle::abort] {
        let (engine, _) = start(fake_limits(), says(&[], END));
        assert_eq!(engine.ended(), None, "it still runs");
        end(&engine);
        assert!(engine.join(HANG));
        assert_eq!(engine.ended(), None);

        // The cause of the end stays the same, whatever is called later.
        let (engine, control) = start(fake_limits(), says(&[], END));
        control.fail_wait_at(0);
        collect(&mut engine.submit(request(&[1], 1)).expect("accepted"));
        assert!(lost(engine.ended()), "the cause must be known before the answers fail");
        end(&engine);
        assert!(engine.join(HANG) && lost(engine.ended()));

        let (engine, _) = start(fake_limits(), Box::new(bug));
        collect(&mut engine.submit(request(&[1], 1)).expect("accepted"));
        assert!(
            matches!(engine.ended(), Some(EngineError::Bug(_))),
            "the cause must be known before the answers fail"
        );
        end(&engine);
        assert!(engine.join(HANG) && matches!(engine.ended(), Some(EngineError::Bug(_))));
    }
}

#[test]
fn every_answer_fails_before_the_runner_is_dropped() {
    let bug = |_: &[u32], _: &Draw| panic!("a bug, made for this test");
    for lost in [true, false] {
        let script: Script = if lost { says(&[], END) } else { Box::new(bug) };
        let (engine, control) = start(one_slot(), script);
        control.hold_drop(true);
        control.allow(0);
        control.fail_wait_at(0);
        // The engine panics immediately. It accepts or refuses requests that come during this time.
        let mut streams: Vec<_> = (0..3).filter_map(|_| engine.submit(request(&[1], 5)).ok()).collect();
        assert!(!streams.is_empty());
        control.release();
        for stream in &mut streams {
            let last = collect(stream).1;
            assert!(
                matches!(
                    (&last, lost),
                    (Event::Failed(EngineError::Lost(_)), true) | (Event::Failed(EngineError::Bug(_)), false)
                ),
                "{last:?}"
            );
        }
        assert!(
            !control.dropped() && !engine.join(Duration::from_millis(1)),
            "the runner must not be dropped yet"
        );
        assert!(engine.submit(request(&[1], 1)).is_err());
        control.hold_drop(false);
        assert!(engine.join(HANG) && control.dropped());
    }
}

#[test]
fn waiting_requests_without_a_possible_step_are_an_internal_error() {
    // With this limit no step can be submitted.
    let (engine, _) = start(Limits { max_in_flight: 0, ..fake_limits() }, says(&[], END));
    let mut stream = engine.submit(request(&[1], 1)).expect("accepted");
    assert!(engine.join(HANG), "the engine loops without work");
    assert!(matches!(collect(&mut stream).1, Event::Failed(EngineError::Bug(_))));
}

#[test]
fn a_scheduler_that_should_be_idle_panics_with_its_state() {
    let mut scheduler = Scheduler::new(one_slot(), SchedulerConfig::default());
    scheduler.expect_idle();
    for id in 1..30 {
        let mut sequence = plain_sequence(id, vec![433; 12], SamplingParams::GREEDY, 27);
        sequence.request.priority = if id < 3 { Priority::Interactive } else { Priority::Background };
        scheduler.add(sequence);
    }
    scheduler.schedule(&Pace::new()).expect("the first step can be scheduled");
    let panic = std::panic::catch_unwind(AssertUnwindSafe(|| scheduler.expect_idle()))
        .expect_err("the scheduler is not idle");
    let state = panic.downcast_ref::<String>().expect("a message");
    println!("{state}");
    for part in [
        "28 waiting",
        "1 running",
        "step 1",
        "sequence 1, interactive, 12 + 0 of 27 tokens, 0 computed, 12 submitted, 1 drawn",
        "sequence 2, interactive, 12 + 0 of 27 tokens",
        "sequence 3, background",
        "61 of 64",
        "29 of 32",
        "slots",
    ] {
        assert!(state.contains(part), "{part:?} is not in it");
    }
    assert!(!state.contains("433") && !state.contains('\n') && state.len() < 2000, "{} bytes", state.len());
}

/// A mask that allows every id and reports a computing time for each call.
#[derive(Clone)]
struct Slow {
    each: Duration,
    took: Duration,
}

impl TokenMask for Slow {
    fn mask(&mut self, _: &[u32]) -> Arc<[u32]> {
        self.took += self.each;
        Arc::new([u32::MAX; 16])
    }

    fn restriction(&mut self, _: &[u32]) -> Restriction {
        Restriction::Binding
    }

    fn take_time(&mut self) -> Duration {
        std::mem::take(&mut self.took)
    }

    fn boxed_clone(&self) -> Box<dyn TokenMask> {
        Box::new(Self { took: Duration::ZERO, ..*self })
    }
}

#[test]
fn the_computing_time_of_a_grammar_counts_for_its_client() {
    // Client 2 has the first answer, of 40 tokens. Client 1 has the answer with a mask, of 10 tokens.
    let order = |each: Duration, cancelled: bool| {
        let (mut runner, _) = FakeRunner::new(one_slot(), says(&[], 5));
        let mut scheduler = Scheduler::new(one_slot(), SchedulerConfig::default());
        for (id, client, tokens) in [(0, 2, 40), (1, 1, 10), (2, 1, 10), (3, 2, 10)] {
            let mut sequence = plain_sequence(id, vec![1; 4], SamplingParams::GREEDY, tokens);
            sequence.request.client = client;
            if id == 1 {
                sequence.mask = Some(SharedMask::new(Box::new(Slow { each, took: Duration::ZERO })));
            }
            scheduler.add(sequence);
        }
        let (mut pace, mut order, mut masked) = (Pace::new(), Vec::new(), 0);
        while let Some(step) = scheduler.schedule(&pace) {
            let ids: Vec<u64> = step.shares.iter().map(|share| share.id).collect();
            order.extend(ids.iter().filter(|id| !order.contains(*id)).copied().collect::<Vec<_>>());
            let ticket = step.submit(&mut *runner).expect("never fails");
            masked += usize::from(ids == [1]);
            // The client may disconnect while the last step of its answer is in progress.
            if cancelled && masked == 10 {
                masked = 0;
                scheduler.remove(1);
            }
            pace.observe(step.load, Duration::from_millis(5) * step.load.tokens as u32);
            scheduler.commit(&step, &runner.wait(ticket).expect("never fails"));
        }
        order
    };
    for cancelled in [false, true] {
        assert_eq!(order(Duration::ZERO, cancelled), [0, 1, 2, 3], "client 1 has used fewer tokens");
        // A token takes 5 ms. Client 2 has used 43 tokens, and client 1 has used 13 tokens and the time of its mask.
        assert_eq!(order(Duration::from_millis(10), cancelled), [0, 1, 2, 3], "the mask counts as 20 tokens");
        assert_eq!(order(Duration::from_millis(20), cancelled), [0, 1, 3, 2], "the mask counts as 40 tokens");
    }
}

/// A client of one engine waits for a step of each other engine between two tokens.
#[test]
fn engines_that_share_a_device_share_the_gap() {
    let mut limits = fake_limits();
    (limits.max_batch_tokens, limits.max_context) = (1000, 1000);
    limits.kv = kv_with(1000, 1000);
    let config = SchedulerConfig { gap: Duration::from_millis(100), ..SchedulerConfig::default() };
    // A token takes a millisecond.
    let mut pace = Pace::new();
    for tokens in [100, 7, 300, 20, 900, 50] {
        pace.observe(Load { tokens, keys: 0 }, Duration::from_millis(tokens as u64));
    }
    let tokens_of_a_step = |engines: usize| {
        let mut scheduler = Scheduler::new(limits.clone(), config);
        scheduler.set_engines(engines);
        scheduler.add(plain_sequence(0, vec![1; 900], SamplingParams::GREEDY, 9));
        scheduler.schedule(&pace).expect("a step").load.tokens
    };
    assert_eq!(tokens_of_a_step(1), 900, "no client waits");
    for (engines, expected) in [(2, 50), (4, 25)] {
        let tokens = tokens_of_a_step(engines);
        assert!(tokens.abs_diff(expected) <= 2, "{tokens} of {expected}");
    }
}

/// An engine with work for several steps in flight gives the device to a load that measures it.
#[test]
fn a_load_gets_the_device_between_two_steps_of_a_long_answer() {
    let lease = Arc::<Lease>::default();
    let limits = Limits { max_in_flight: 2, ..fake_limits() };
    let (runner, control) = FakeRunner::new(limits, says(&[], 5));
    let config = EngineConfig { queue: 4, lease: Some(Arc::clone(&lease)), ..EngineConfig::default() };
    let engine = Engine::start(runner, config);
    control.allow(0);
    let mut stream = engine.submit(request(&[1], 190)).expect("accepted");
    control.submitted(2);
    let is_waiting = Arc::<AtomicBool>::default();
    let load = std::thread::spawn({
        let is_waiting = Arc::clone(&is_waiting);
        move || {
            lease.take(|| {
                is_waiting.store(true, Ordering::SeqCst);
                false
            })
        }
    });
    wait_until("the load waits", || is_waiting.load(Ordering::SeqCst));
    control.release();
    let turn = load.join().expect("no panic").expect("its turn comes");
    assert_eq!(engine.stats().running, 1, "the answer has not ended");
    let steps = engine.stats().steps;
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(engine.stats().steps, steps, "the load has the device alone");
    drop(turn);
    assert_eq!(collect(&mut stream).0.len(), 190);
}

#[test]
fn join_waits_for_the_runners_destructor() {
    let (engine, control) = start(fake_limits(), says(&[], 5));
    control.drop_slowly();
    engine.abort();
    assert!(engine.join(HANG));
    assert!(control.dropped(), "join returned before the runner was dropped");

    let (engine, control) = start(fake_limits(), Box::new(|_, _| panic!("a bug, made for this test")));
    control.drop_slowly();
    let mut stream = engine.submit(request(&[1], 1)).expect("accepted");
    assert!(matches!(collect(&mut stream).1, Event::Failed(EngineError::Bug(_))));
    assert!(engine.join(HANG) && control.dropped());
}

#[test]
fn drain_answers_accepted_requests_and_abort_does_not() {
    let (engine, control) = start(fake_limits(), says(&[], 5));
    control.allow(0);
    let mut streams: Vec<_> = (0..3).map(|_| engine.submit(request(&[1], 20)).expect("accepted")).collect();
    engine.drain();
    assert_eq!(engine.submit(request(&[1], 1)).err(), Some(EngineError::ShuttingDown.into()));
    assert!(!engine.join(Duration::from_millis(1)), "the engine must answer first");
    control.release();
    for stream in &mut streams {
        assert_eq!(finish_reason(&collect(stream).1), FinishReason::Length);
    }
    assert!(engine.join(HANG));

    let (engine, control) = start(one_slot(), says(&[], 5));
    control.allow(3);
    let mut streams: Vec<_> = (0..3).map(|_| engine.submit(request(&[1], 20)).expect("accepted")).collect();
    control.submitted(4);
    engine.abort();
    control.release();
    for stream in &mut streams {
        assert_eq!(collect(stream).1, Event::Failed(EngineError::ShuttingDown));
    }
    assert!(engine.join(HANG));
    assert_all_free(&engine);

    // An idle engine ends by either call, and also when its last handle is dropped.
    let (engine, _) = start(fake_limits(), says(&[], 5));
    engine.drain();
    assert!(engine.join(HANG));
}

#[test]
fn requests_in_a_batch_get_the_same_answers_as_alone() {
    let limits = Limits { max_sequences: 8, max_draws: 8, max_in_flight: 2, ..fake_limits() };
    let (engine, control) = start(limits, mixed(512));
    control.allow(0);
    let prompts: Vec<Vec<u32>> =
        (0..4).map(|i| (0..10 + 7 * i).map(|t| (t * 31 + i) % 512).collect()).collect();
    let mut streams: Vec<_> =
        prompts.iter().map(|p| engine.submit(request(p, 12)).expect("accepted")).collect();
    control.release();
    for (stream, prompt) in streams.iter_mut().zip(&prompts) {
        assert_eq!(collect(stream).0, mixed_answer(prompt, 12, 0, 512, END));
    }
    assert!(
        control.batches().iter().any(|batch| batch.sequences.len() > 2),
        "the sequences must share steps"
    );
    assert_all_free(&engine);
}

#[test]
fn a_computed_prompt_is_found_in_the_prefix_cache() {
    let (engine, control) = start(fake_limits(), mixed(512));
    let prompt: Vec<u32> = (0..61).collect();
    let cached = |event: &Event| match event {
        Event::Finished { timings, .. } => timings.cached_n,
        other => panic!("{other:?}"),
    };
    let (answer, last) = collect(&mut engine.submit(request(&prompt, 20)).expect("accepted"));
    assert_eq!(cached(&last), 0);
    // A second request for the same text finds all of it in the cache, except the last block, which is not full.
    let (again, last) = collect(&mut engine.submit(request(&prompt, 20)).expect("accepted"));
    assert_eq!((again, cached(&last)), (answer.clone(), 60));
    // The next turn of the conversation also finds the answer in the cache, except the block at its end.
    let steps = control.batches().len();
    let turn: Vec<u32> = prompt.iter().chain(&answer).copied().chain([1, 2, 3]).collect();
    let (next, last) = collect(&mut engine.submit(request(&turn, 5)).expect("accepted"));
    assert_eq!(next, mixed_answer(&turn, 5, 0, 512, END));
    let computed = prompt.len() + answer.len() - 1;
    assert_eq!(cached(&last), computed / 4 * 4);
    let first = &control.batches()[steps].sequences[0];
    assert_eq!((first.start, first.input.len()), (computed / 4 * 4, turn.len() - computed / 4 * 4));
    // This text begins in the same way, but differs within the window. Only blocks whose whole window is equal can be
    // used.
    let (other, last) =
        collect(&mut engine.submit(request(&[&prompt[..30], &[7; 20][..]].concat(), 5)).expect("accepted"));
    assert_eq!(other, mixed_answer(&[&prompt[..30], &[7; 20][..]].concat(), 5, 0, 512, END));
    assert_eq!(cached(&last), 28);
    assert_all_free(&engine);
}

#[test]
fn a_prompt_is_found_in_the_prefix_cache_only_under_its_own_salt() {
    let kv = kv_with(512, 256);
    let (engine, _) = start(Limits { max_sequences: 4, max_draws: 4, kv, ..fake_limits() }, mixed(512));
    let prompt: Vec<u32> = (0..61).collect();
    // Returns the answers and the number of tokens that were found in the cache.
    let ask = |prompt: &[u32], salt: &[u8]| {
        let request =
            Request { cache_salt: CacheSalt::new(salt), more_seeds: vec![7], ..request(prompt, 20) };
        let mut stream = engine.submit(request).expect("accepted");
        let (mut answers, mut cached) = ([vec![], vec![]], 0);
        while let Some(event) = stream.blocking_next() {
            match event {
                Event::Token { choice, id, .. } => answers[choice].push(id),
                Event::Finished { timings, .. } => cached = timings.cached_n,
                other => panic!("{other:?}"),
            }
        }
        (answers, cached)
    };
    let (answers, cached) = ask(&prompt, b"");
    assert_eq!(cached, 0);
    let found = [b"".as_slice(), b"a", b"a", b"b", b"ab", b"b", b""].map(|salt| ask(&prompt, salt).1);
    assert_eq!(found, [60, 0, 60, 0, 0, 60, 60]);
    // Forks store their answers under the salt of their parent.
    for (answer, other) in answers.iter().zip([b"c", b"d"]) {
        let turn = [&prompt[..], answer, &[1, 2, 3]].concat();
        let computed = prompt.len() + answer.len() - 1;
        let found = [other.as_slice(), b"a", b""].map(|salt| ask(&turn, salt).1);
        assert_eq!(found, [0, computed / 4 * 4, computed / 4 * 4]);
    }
    assert_all_free(&engine);
}

/// Attention paths agree only within a tolerance. So answers are not built on blocks that another path computed.
#[test]
fn a_prompt_is_found_in_the_prefix_cache_only_on_its_attention_path() {
    let kv = kv_with(512, 256);
    let (engine, control) = start(Limits { kv, ..fake_limits() }, mixed(512));
    let prompt: Vec<u32> = (0..61).collect();
    let found = [0, 0, 8, 8, 0, 8, 3].map(|path| {
        control.set_attention_path(path);
        match collect(&mut engine.submit(request(&prompt, 20)).expect("accepted")).1 {
            Event::Finished { timings, .. } => timings.cached_n,
            other => panic!("{other:?}"),
        }
    });
    assert_eq!(found, [0, 60, 0, 60, 60, 60, 0]);
    assert_all_free(&engine);
}

/// The runner blocks while the NPU computes its part of a step. The result of a decode step in flight would be delayed
/// by that time.
#[test]
fn a_prompt_step_shared_with_the_npu_is_the_only_step_in_flight() {
    let kv = kv_with(200, 100);
    let limits = Limits {
        max_batch_tokens: 64,
        max_sequences: 3,
        max_draws: 3,
        max_in_flight: 2,
        kv,
        ..fake_limits()
    };
    let script = || Box::new(|tokens: &[u32], _: &Draw| 200 + tokens.len() as u32);
    let is_long = |batch: &Batch| batch.sequences.iter().any(|s| s.input.len() >= LEAST_TOKENS);
    for path in [0, 2] {
        let (runner, control) = FakeRunner::new(limits.clone(), script());
        // No step takes as long as this gap, so the chunks do not depend on the load of the machine.
        let scheduler = SchedulerConfig { gap: Duration::from_secs(600), ..SchedulerConfig::default() };
        let engine = Engine::start(runner, EngineConfig { scheduler, ..EngineConfig::default() });
        control.set_attention_path(path);
        control.allow(6);
        let mut decoded = engine.submit(request(&[1, 2, 3], 120)).expect("accepted");
        control.submitted(7);
        // No two prompts begin in the same way.
        let prompts = [150, 31, 90].map(|len| (len..2 * len).collect::<Vec<u32>>());
        let streams = prompts.each_ref().map(|prompt| engine.submit(request(prompt, 20)).expect("accepted"));
        control.release();
        for (mut stream, prompt) in streams.into_iter().zip(&prompts) {
            let first = 200 + prompt.len() as u32;
            assert_eq!(collect(&mut stream).0, (first..first + 20).collect::<Vec<u32>>());
        }
        assert_eq!(collect(&mut decoded).0, (203..323).collect::<Vec<u32>>());
        assert_all_free(&engine);
        let (long, short): (Vec<_>, Vec<_>) =
            control.batches_with_steps_in_flight().into_iter().partition(|(batch, _)| is_long(batch));
        let overlap = |steps: &[(Batch, usize)]| steps.iter().filter(|(_, others)| *others > 0).count();
        assert!(long.len() >= 3 && long.iter().all(|(batch, _)| batch.sequences.len() > 1), "{}", long.len());
        assert_eq!(overlap(&long) > 0, path == 0, "{} of {}, path {path}", overlap(&long), long.len());
        assert!(overlap(&short) > short.len() / 2, "{} of {}", overlap(&short), short.len());
    }
}

/// The sequences of a delayed step may be cancelled before it is submitted.
#[test]
fn all_sequences_of_a_delayed_step_may_be_cancelled() {
    let kv = kv_with(200, 100);
    let limits = Limits { max_batch_tokens: 64, max_in_flight: 2, kv, ..fake_limits() };
    let (engine, control) = start(limits, mixed(512));
    control.set_attention_path(1);
    for round in 0..8 {
        let steps = control.batches().len();
        control.allow(steps);
        let decoded = engine.submit(request(&[round, 2, 3], 100)).expect("accepted");
        control.submitted(steps + 1);
        let long = engine.submit(request(&[round; 100], 100)).expect("accepted");
        control.allow(steps + round as usize % 4);
        drop((decoded, long));
        control.release();
        assert_all_free(&engine);
    }
    let prompt: Vec<u32> = (0..100).collect();
    let (ids, _) = collect(&mut engine.submit(request(&prompt, 50)).expect("accepted"));
    assert_eq!(ids, mixed_answer(&prompt, 50, 0, 512, END));
}

#[test]
fn answers_to_one_prompt_share_its_blocks() {
    let limits = Limits { max_sequences: 4, max_draws: 4, max_in_flight: 2, ..fake_limits() };
    let (engine, control) = start(limits, mixed(512));
    let prompt: Vec<u32> = (0..37).collect();
    let several = Request { more_seeds: vec![5, 6], ..request(&prompt, 30) };
    let mut stream = engine.submit(several).expect("accepted");
    let mut answers: HashMap<usize, Vec<u32>> = HashMap::new();
    let mut ends = 0;
    while let Some(event) = stream.blocking_next() {
        match event {
            Event::Token { choice, id, .. } => answers.entry(choice).or_default().push(id),
            Event::Finished { .. } => ends += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(ends, 3);
    for (choice, seed) in [0, 5, 6].into_iter().enumerate() {
        assert_eq!(answers[&choice], mixed_answer(&prompt, 30, seed, 512, END), "choice {choice}");
    }
    let batches = control.batches();
    let prompt_tokens: usize =
        batches.iter().flat_map(|b| &b.sequences).filter(|s| s.start < 37).map(|s| s.input.len()).sum();
    assert_eq!(prompt_tokens, 37, "the prompt was computed once");
    let copies: usize = batches.iter().map(|b| b.copies.len()).sum();
    assert_eq!(copies, 4, "one block is copied for two of three answers in two pools");
    assert_all_free(&engine);
}

#[test]
fn a_scored_prompt_is_computed_also_if_it_is_cached() {
    let limits =
        Limits { max_batch_tokens: 16, max_draws: 5, max_sequences: 4, max_in_flight: 2, ..fake_limits() };
    let (engine, control) = start(limits, mixed(512));
    let prompt: Vec<u32> = (0..37).collect();
    collect(&mut engine.submit(request(&prompt, 5)).expect("accepted"));
    let scored = Request { prompt_logprobs: Some(2), more_seeds: vec![9], ..request(&prompt, 5) };
    let mut stream = engine.submit(scored).expect("accepted");
    let expected: Vec<Logprobs> = (1..37).map(|id| fake_logprobs(id, 2)).collect();
    assert_eq!(stream.blocking_next(), Some(Event::Prompt { logprobs: expected }));
    let mut answers = [vec![], vec![]];
    while let Some(event) = stream.blocking_next() {
        match event {
            Event::Token { choice, id, timings, .. } => {
                assert_eq!(timings.cached_n, 0, "a scored prompt must not come from the cache");
                answers[choice].push(id);
            }
            Event::Finished { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    for (answer, seed) in answers.iter().zip([0, 9]) {
        assert_eq!(*answer, mixed_answer(&prompt, 5, seed, 512, END));
    }
    assert!(
        control.batches().iter().any(|b| { b.sequences.iter().any(|s| s.start == 36 && s.input.len() == 1) })
    );
    // A prompt of one token has no scores.
    let alone = Request { prompt_logprobs: Some(0), ..request(&prompt[..1], 1) };
    let first = engine.submit(alone).expect("accepted").blocking_next();
    assert_eq!(first, Some(Event::Prompt { logprobs: vec![] }));
    assert_all_free(&engine);
}

#[test]
fn a_pooled_prompt_is_computed_again_and_not_cached() {
    let limits =
        Limits { max_batch_tokens: 16, max_sequences: 4, max_draws: 4, max_in_flight: 2, ..fake_limits() };
    let (engine, control) = start(limits, mixed(512));
    let prompt: Vec<u32> = (0..37).map(|i| i * 5 % 64).collect();
    let pooled = |prompt: &[u32]| Request { pooling: true, ..Request::new(prompt.to_vec()) };
    let embed = |prompt: &[u32]| {
        let mut stream = engine.submit(pooled(prompt)).expect("accepted");
        let Some(Event::Pooled { state }) = stream.blocking_next() else { panic!("a state comes first") };
        assert_eq!(state, fake_pooled(prompt));
        let Some(Event::Finished { timings, .. }) = stream.blocking_next() else { panic!("then the end") };
        assert_eq!((timings.prompt_n, timings.cached_n, timings.predicted_n), (prompt.len(), 0, 0));
        assert_eq!(stream.blocking_next(), None);
    };
    embed(&prompt);
    assert_all_free(&engine);
    assert_eq!(engine.stats().full.cached, 0, "a pooled prompt must not be cached");
    // Pooling does not use cached blocks of an answer, and leaves them in the cache.
    let answer = |expected: usize| {
        let (ids, last) = collect(&mut engine.submit(request(&prompt, 5)).expect("accepted"));
        assert_eq!(ids, mixed_answer(&prompt, 5, 0, 512, END));
        let Event::Finished { timings, .. } = last else { panic!("{last:?}") };
        assert_eq!(timings.cached_n, expected);
    };
    answer(0);
    embed(&prompt);
    embed(&prompt[..1]);
    answer(36);
    // Several prompts are pooled at the same time, together with a sequence that decodes.
    control.allow(control.batches().len());
    let mut others: Vec<_> =
        (20..23).map(|n| (n, engine.submit(pooled(&prompt[..n])).expect("accepted"))).collect();
    let mut decoding = engine.submit(request(&prompt[1..], 5)).expect("accepted");
    control.release();
    for (n, stream) in &mut others {
        assert_eq!(stream.blocking_next(), Some(Event::Pooled { state: fake_pooled(&prompt[..*n]) }));
    }
    assert_eq!(collect(&mut decoding).0, mixed_answer(&prompt[1..], 5, 0, 512, END));
    drop(others);
    assert_all_free(&engine);
}

#[test]
fn a_stopped_answer_does_not_affect_other_answers_to_its_prompt() {
    let limits = Limits { max_sequences: 4, max_draws: 4, max_in_flight: 2, ..fake_limits() };
    let prompt: Vec<u32> = (0..37).collect();
    for unwanted in 0..3 {
        let (engine, control) = start(limits.clone(), mixed(512));
        // The first chunk of the prompt is in progress at this point.
        control.allow(0);
        let mut stream =
            engine.submit(Request { more_seeds: vec![5, 6], ..request(&prompt, 30) }).expect("accepted");
        stream.stop(unwanted);
        control.release();
        let mut answers = vec![Vec::new(); 3];
        while let Some(event) = stream.blocking_next() {
            match event {
                Event::Token { choice, id, .. } => answers[choice].push(id),
                Event::Finished { choice, .. } => assert_ne!(choice, unwanted),
                other => panic!("{other:?}"),
            }
        }
        for (choice, seed) in [0, 5, 6].into_iter().enumerate() {
            let expected =
                if choice == unwanted { vec![] } else { mixed_answer(&prompt, 30, seed, 512, END) };
            assert_eq!(answers[choice], expected, "without {unwanted}: choice {choice}");
        }
        assert_all_free(&engine);
    }
}

#[test]
fn an_answer_cancelled_during_a_prompt_step_does_not_affect_the_others() {
    let limits = Limits { max_draws: 16, ..fake_limits() };
    let prompt: Vec<u32> = (0..37).collect();
    let (interactive, background) = (Priority::Interactive, Priority::Background);
    for (priority, scored) in [(interactive, Some(1)), (background, None), (background, Some(1))] {
        let (mut runner, _) = FakeRunner::new(limits.clone(), mixed(512));
        let mut scheduler = Scheduler::new(limits.clone(), SchedulerConfig::default());
        let mut sequence = plain_sequence(0, prompt.clone(), SamplingParams::GREEDY, 9);
        (sequence.request.priority, sequence.request.prompt_logprobs) = (priority, scored);
        sequence.forks = vec![Fork { id: 1, seed: 0 }];
        scheduler.add(sequence);
        let (mut answer, mut scores) = (Vec::new(), None);
        for steps in 0.. {
            let Some(step) = scheduler.schedule(&Pace::new()) else { break };
            let ticket = step.submit(&mut *runner).expect("never fails");
            if steps == 1 {
                scheduler.remove(0);
            }
            for output in scheduler.commit(&step, &runner.wait(ticket).expect("never fails")) {
                assert_eq!(output.id, 1);
                answer.extend(output.token);
                scores = scores.or(output.prompt);
            }
        }
        assert!(scheduler.is_idle(), "{priority:?}: the scheduler waits for a completed step");
        assert_eq!(answer, mixed_answer(&prompt, 9, 0, 512, END), "{priority:?}");
        let expected = |n| (1..37).map(|id| fake_logprobs(id, n)).collect::<Vec<_>>();
        assert_eq!(scores, scored.map(expected), "{priority:?}");
    }
}

#[test]
fn interactive_requests_preempt_background_ones_which_end_later() {
    let (engine, control) = start(one_slot(), says(&[], 5));
    control.allow(0);
    let background = |n| Request { priority: Priority::Background, ..request(&[n; 4], 40) };
    let mut first = engine.submit(background(1)).expect("accepted");
    control.submitted(1);
    let mut second = engine.submit(background(2)).expect("accepted");
    let mut interactive = engine.submit(request(&[3; 4], 10)).expect("accepted");
    control.release();
    assert_eq!(collect(&mut interactive).0.len(), 10);
    assert_eq!((collect(&mut first).0.len(), collect(&mut second).0.len()), (40, 40));
    let batches = control.batches();
    let starts: Vec<&Input> =
        batches.iter().filter(|b| b.sequences[0].start == 0).map(|b| &b.sequences[0].input).collect();
    assert_eq!(starts[1], &Input::Ids(vec![3; 4]), "the running background request must be preempted");
    assert!(engine.stats().preemptions >= 1);
    assert_all_free(&engine);
}

/// The tokens of each step: the first position and the number. `None` if a step has more than one sequence.
fn steps_alone(batches: &[Batch]) -> Option<Vec<(usize, usize)>> {
    let alone = |batch: &Batch| match &batch.sequences[..] {
        [sequence] => Some((sequence.start, sequence.input.len())),
        _ => None,
    };
    batches.iter().map(alone).collect()
}

#[test]
fn an_interactive_request_runs_as_if_there_were_no_background_request() {
    let prompt: Vec<u32> = (100..140).collect();
    for with_draft in [false, true] {
        let (engine, control) = start_on(fake(wide(), with_draft));
        let (expected, _) = collect(&mut engine.submit(request(&prompt, 20)).expect("accepted"));
        let steps = steps_alone(&control.batches()).expect("the only request");

        let (engine, control) = start_on(fake(wide(), with_draft));
        control.allow(3);
        let background = |n| Request { priority: Priority::Background, ..request(&[n; 30], 60) };
        let mut decoding = engine.submit(background(1)).expect("accepted");
        control.submitted(4);
        let mut waiting = engine.submit(background(2)).expect("accepted");
        let mut interactive = engine.submit(request(&prompt, 20)).expect("accepted");
        control.release();
        assert_eq!(collect(&mut interactive).0, expected);
        for (n, stream) in [(1, &mut decoding), (2, &mut waiting)] {
            assert_eq!(
                collect(stream).0,
                mixed_answer(&[n; 30], 60, 0, 512, END),
                "draft model: {with_draft}"
            );
        }
        let batches = control.batches();
        let of_prompt = |batch: &Batch| batch.sequences[0].input == Input::Ids(prompt.clone());
        let first = batches.iter().position(of_prompt).expect("it was computed");
        assert_eq!(first, 4, "the request waits for one step in progress");
        assert_eq!(batches[0].num_tokens(), 16, "a background step must be short");
        let found = steps_alone(&batches[first..first + steps.len()]);
        assert_eq!(found, Some(steps), "draft model: {with_draft}");
        assert_all_free(&engine);
    }
}

#[test]
fn background_requests_evict_only_cached_blocks_of_background_requests() {
    let chat: Vec<u32> = (0..61).collect();
    let ask = |engine: &EngineHandle, prompt: &[u32], priority| {
        let request = Request { priority, ..request(prompt, 20) };
        let (answer, last) = collect(&mut engine.submit(request).expect("accepted"));
        let Event::Finished { timings, .. } = last else { panic!("{last:?}") };
        (answer, timings.cached_n)
    };
    let (background, interactive) = (Priority::Background, Priority::Interactive);
    // The cases differ in which request computed the chat first, and which requests come before its next turn.
    for (first, others, kept) in
        [(interactive, background, 80), (background, background, 80), (interactive, interactive, 0)]
    {
        let (engine, _) = start(fake_limits(), says(&[7; 20], END));
        ask(&engine, &chat, first);
        let (answer, _) = ask(&engine, &chat, interactive);
        // Each request takes a third of the blocks. A request about the chat itself takes no other blocks.
        for n in 0..12 {
            ask(&engine, &[n + 100; 61], others);
        }
        if others == background {
            ask(&engine, &chat[..50], background);
        }
        let turn = [&chat[..], &answer, &[1, 2, 3]].concat();
        let (_, cached) = ask(&engine, &turn, interactive);
        assert_eq!(cached, kept, "{first:?}, then {others:?}");
        assert_all_free(&engine);
    }
}

#[test]
fn a_client_with_many_requests_does_not_delay_another_client() {
    let (engine, control) = start(one_slot(), says(&[], 5));
    control.allow(0);
    let of = |client, n: u32| Request { client, ..request(&[n; 4], 5) };
    let mut streams = vec![engine.submit(of(1, 1)).expect("runs")];
    control.submitted(1);
    streams.extend((2..5).map(|n| engine.submit(of(1, n)).expect("waits")));
    streams.push(engine.submit(of(2, 9)).expect("waits"));
    control.release();
    streams.iter_mut().for_each(|stream| assert_eq!(collect(stream).0, [5; 5]));
    let firsts = control.batches().into_iter().map(|b| b.sequences[0].clone()).filter(|s| s.start == 0);
    let order: Vec<Input> = firsts.map(|s| s.input).collect();
    let ids = |n| Input::Ids(vec![n; 4]);
    assert_eq!(order, [ids(1), ids(9), ids(2), ids(3), ids(4)], "the client with the fewest tokens is next");
}

fn fake(limits: Limits, with_draft: bool) -> (Box<FakeRunner>, Control) {
    if with_draft {
        FakeRunner::with_draft(limits, mixed(512), 1)
    } else {
        FakeRunner::new(limits, mixed(512))
    }
}

/// A script that depends on every id before and has no repetitions, so prompt lookup finds nothing.
fn unpredictable() -> Script {
    Box::new(|tokens, _| {
        let sum = tokens.iter().fold(7u32, |sum, id| sum.wrapping_mul(31).wrapping_add(*id + 1));
        200 + (sum.wrapping_mul(0x9e37_79b9) >> 8) % 300
    })
}

fn unpredictable_answer(prompt: &[u32], n: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    let mut script = unpredictable();
    let draw = Draw {
        sequence: 0,
        token: 0,
        slot: 0,
        params: SamplingParams::GREEDY.into(),
        seed: 0,
        prompt_len: prompt.len(),
        masked: false,
        logprobs: None,
    };
    (0..n).for_each(|_| tokens.push(script(&tokens, &draw)));
    tokens.split_off(prompt.len())
}

/// Limits with room for draft tokens of eight sequences.
fn wide() -> Limits {
    let kv = kv_with(512, 256);
    Limits { max_batch_tokens: 64, max_sequences: 16, max_draws: 16, max_in_flight: 2, kv, ..fake_limits() }
}

#[test]
fn a_draft_model_saves_passes_and_changes_no_answer() {
    for (wrong, most_steps) in [(0, 16), (1, 50), (4, 106)] {
        let (engine, control) = start_on(FakeRunner::with_draft(wide(), unpredictable(), wrong));
        let (ids, last) = collect(&mut engine.submit(request(&[1, 2, 3], 100)).expect("accepted"));
        assert_eq!(ids, unpredictable_answer(&[1, 2, 3], 100), "{wrong} of 4 draft tokens are wrong");
        let Event::Finished { timings, .. } = last else { panic!("{last:?}") };
        let (steps, chains) = (control.batches().len(), control.drafts());
        let [proposed, accepted] = [chains.iter().flatten().flatten().count(), timings.drafts.accepted];
        println!("{wrong} of 4 wrong: {steps} steps, {accepted} of {proposed} draft tokens were accepted");
        assert!(steps <= most_steps, "{steps} steps for 100 ids, {wrong} of 4 draft tokens wrong");
        assert_eq!((timings.drafts.proposed, steps + accepted >= 100), (proposed, true));
        // The prompt is one step. Each later step counts for the rate, however many ids it yields.
        let decoded = timings.predicted_n - timings.first_n;
        assert!((1..=8).contains(&timings.first_n) && timings.decode_steps < steps, "{timings:?}");
        let rate = decoded as f64 / timings.decode.as_secs_f64();
        assert_eq!(timings.predicted_per_second(), Some(rate), "{timings:?}");
        assert_all_free(&engine);
        let stats = engine.stats();
        assert_eq!((stats.drafts.model, stats.drafts.lookup.proposed), (timings.drafts, 0));
        match wrong {
            0 => assert_eq!(accepted, proposed, "all draft tokens must be accepted"),
            // After failures, the draft model is tried again less and less often.
            4 => assert!(accepted == 0 && (4..=10).contains(&chains.len()), "{chains:?}"),
            _ => assert!(accepted < proposed),
        }
    }
}

#[test]
fn sequences_share_the_batch_room_for_draft_tokens() {
    for (n, each) in [(1, 15), (2, 7), (5, 2), (8, 1), (9, 0), (16, 0)] {
        let (engine, control) = start_on(FakeRunner::with_draft(wide(), unpredictable(), 0));
        control.allow(0);
        let mut streams: Vec<_> =
            (0..4).map(|i| engine.submit(request(&[i, 7], 60)).expect("accepted")).take(n).collect();
        control.submitted(1);
        // Only as many requests as the queue holds can wait at the same time.
        while streams.len() < n {
            let i = streams.len() as u32;
            match engine.submit(request(&[i, 7], 60)) {
                Ok(stream) => streams.push(stream),
                Err(SubmitError::QueueFull { .. }) => control.allow(control.batches().len()),
                Err(error) => panic!("{error}"),
            }
        }
        control.release();
        for (i, stream) in streams.iter_mut().enumerate() {
            assert_eq!(collect(stream).0, unpredictable_answer(&[i as u32, 7], 60), "{n} streams");
        }
        let together = control.drafts().into_iter().filter(|chain| chain.len() == n);
        let most = together.flatten().map(|drafted| drafted.len()).max().unwrap_or(0);
        assert_eq!(most, each, "{n} streams");
        assert_all_free(&engine);
    }
}

/// Random limits. At least one sequence of full length fits.
fn random_limits(rng: &mut ChaCha8Rng) -> Limits {
    let block_size = rng.random_range(1..9);
    let max_context: usize = rng.random_range(8..120);
    let max_batch_tokens = rng.random_range(1..40);
    let max_sequences = rng.random_range(1..8);
    // One to three pools. The first has no window; others may have none either, as for heads of another size.
    let mut windows = vec![None];
    for _ in 0..rng.random_range(0..3) {
        windows.push(rng.random_bool(0.8).then(|| rng.random_range(1..40)));
    }
    let pools = windows.into_iter().map(|window| KvPool { window, blocks: 0 }).collect();
    let mut kv = KvLimits { block_size, pools };
    let least = kv.most_blocks(max_context, max_batch_tokens);
    for (pool, least) in kv.pools.iter_mut().zip(least) {
        pool.blocks = least * rng.random_range(1..4) + rng.random_range(0..5);
    }
    Limits {
        max_batch_tokens,
        max_sequences,
        max_draws: max_sequences + rng.random_range(0..3),
        max_in_flight: rng.random_range(1..3),
        kv,
        max_context,
        vocab_size: 512,
        hidden_size: 3,
        step_bytes: Vec::new(),
        block_bytes: Vec::new(),
        images: rng.random_bool(0.7).then(|| {
            let tokens = rng.random_range(1..=max_batch_tokens.min(12));
            let slots = rng.random_range(1..4);
            let sizes = match rng.random() {
                true => ImageSizes::ByTokens { unit: 1, longest: usize::MAX },
                false => ImageSizes::Fixed { side: 1 },
            };
            ImageLimits { sizes, tokens, usual_tokens: tokens, slots }
        }),
    }
}

/// Up to two images of a few, at random positions of a prompt. The prompt may then end with the last one.
fn random_images(rng: &mut ChaCha8Rng, limits: &Limits, prompt: &mut Vec<u32>) -> Vec<PromptImage> {
    let Some(ImageLimits { sizes, tokens: most, .. }) = limits.images else { return Vec::new() };
    let (mut images, mut free) = (Vec::new(), 0);
    for _ in 0..rng.random_range(0..3) {
        // Many prompts have an image at the same position.
        let start = free + [0, 0, 1, rng.random_range(0..100)].choose(rng).expect("not empty");
        let image = match sizes {
            ImageSizes::Fixed { .. } => image_at(start, most, rng.random_range(0..2)),
            ImageSizes::ByTokens { .. } => {
                // Few images, so that the same one comes again. Two sizes have as many tokens as each other.
                let sizes = [[most, 1], [1, most], [most.div_ceil(2), 1]];
                image_of_size(start, *sizes.choose(rng).expect("not empty"), rng.random_range(0..2))
            }
        };
        if image.positions.end <= prompt.len() {
            free = image.positions.end;
            images.push(image);
        }
    }
    if free > 0 && rng.random_bool(0.3) {
        prompt.truncate(free);
    }
    images
}

#[test]
fn random_requests_and_cancellations_keep_answers_exact_and_free_all_blocks() {
    let seed = 0x0e47;
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    for _ in 0..40 {
        let limits = random_limits(&mut rng);
        let with_draft = rng.random();
        let (engine, _) = start_on(fake(limits.clone(), with_draft));
        let mut open = Vec::new();
        for _ in 0..30 {
            let len = rng.random_range(1..limits.max_context);
            // There are few different texts, so that many begin in the same way.
            let mut prompt: Vec<u32> =
                (0..len).map(|i| if i % 40 == 39 { rng.random_range(0..3) } else { i as u32 }).collect();
            let max_tokens = rng.random_range(1..=limits.max_context - len);
            let more_seeds: Vec<u64> =
                (0..rng.random_range(0..limits.max_sequences.min(3))).map(|_| rng.random()).collect();
            let images = random_images(&mut rng, &limits, &mut prompt);
            let seen = seen(&prompt, &images, 512);
            let priority = if rng.random() { Priority::Interactive } else { Priority::Background };
            let client = rng.random_range(0..3);
            let plain = request(&prompt, max_tokens);
            let wanted = Request { images, more_seeds: more_seeds.clone(), priority, client, ..plain };
            match engine.submit(wanted) {
                Ok(stream) => open.push((stream, seen, max_tokens, more_seeds)),
                Err(SubmitError::QueueFull { .. }) => {}
                Err(e) => panic!("{e} for {limits:?}"),
            }
            if open.len() > 3 || rng.random_bool(0.2) {
                let Some((mut stream, seen, max_tokens, more_seeds)) = open.pop() else {
                    continue;
                };
                if rng.random_bool(0.3) {
                    (0..rng.random_range(0..4)).for_each(|_| drop(stream.blocking_next()));
                    continue;
                }
                let mut answers = vec![Vec::new(); 1 + more_seeds.len()];
                while let Some(event) = stream.blocking_next() {
                    match event {
                        Event::Token { choice, id, .. } => answers[choice].push(id),
                        Event::Finished { .. } => {}
                        other => panic!("{other:?} for {limits:?}"),
                    }
                }
                for (seed, answer) in [0].iter().chain(&more_seeds).zip(answers) {
                    assert_eq!(answer, mixed_answer(&seen, max_tokens, *seed, 512, END), "{limits:?}");
                }
            }
        }
        drop(open);
        assert_all_free(&engine);
    }
}

/// A hash for each prefix of a text, the shortest first.
fn beginnings(text: &[u32]) -> impl Iterator<Item = u64> {
    let mut hasher = DefaultHasher::new();
    text.iter().map(move |id| {
        id.hash(&mut hasher);
        hasher.finish()
    })
}

/// A text with its salt and its family, which is the id of the first of the sequences that answer one prompt.
type KnownText = (usize, u64, Vec<u32>);

/// Records which family was the first to compute each prefix of a text under its salt.
fn compute(firsts: &mut HashMap<(usize, u64), u64>, (salt, family, text): &KnownText) {
    beginnings(text).for_each(|text| {
        firsts.entry((*salt, text)).or_insert(*family);
    });
}

/// Random operations: add, cancel, finish, preempt, fork, evict, with one or two steps in flight. After each operation,
/// every block is free or cached, or its reference count equals the number of tables that contain it. The blocks of a
/// table hold the sequence's text, which the fake runner checks. Blocks found in the cache were computed under the same
/// salt. Steps stay within their budgets, and no sequence starves.
#[test]
fn the_scheduler_keeps_its_invariants_under_random_operations() {
    let seed = 0x5c4e;
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let (mut operations, mut preemptions, mut forks, mut hits, mut longest_wait) = (0u64, 0, 0, 0, 0);
    let (mut accepted, mut drafted, mut drafts, mut pooled) = (0, 0, 0, 0);
    let (mut losses, mut at_fault, mut encoded, mut split) = (0, 0, 0, 0);
    while operations < 120_000 {
        let limits = random_limits(&mut rng);
        let config = SchedulerConfig {
            checks: true,
            patience: 50,
            turn_blocks: rng.random_range(0..40),
            speculation_tokens: rng.random_range(0..12),
            gap: Duration::from_millis(rng.random_range(1..60)),
            stores_turns: false,
            draft_model: rng.random(),
        };
        let (mut runner, _) = fake(limits.clone(), config.draft_model);
        let mut scheduler = Scheduler::new(limits.clone(), config);
        let (mut pace, mut in_flight) = (Pace::new(), VecDeque::new());
        // The unfinished answers, and the operation at which each last got tokens.
        let mut alive: BTreeMap<u64, u64> = BTreeMap::new();
        let mut texts: HashMap<u64, KnownText> = HashMap::new();
        let mut firsts = HashMap::new();
        let mut next_id = 0;
        let mut lost_at = 0;
        for now in 0..3_000 {
            operations += 1;
            // After a loss, sequences are computed alone for a time. Another loss soon after must occur during that
            // time.
            let is_soon = now < lost_at + 12;
            if rng.random_bool(if is_soon { 0.1 } else { 0.002 }) {
                lost_at = now;
                let in_progress = scheduler.sequences_in(in_flight.iter().map(|(_, step)| step));
                let gone = scheduler.restart(&in_progress);
                assert!(gone.iter().all(|id| !scheduler.knows(*id)));
                (losses, at_fault) = (losses + 1, at_fault + gone.len());
                alive.retain(|id, _| scheduler.knows(*id));
                in_flight.clear();
                runner = fake(limits.clone(), config.draft_model).0;
            }
            match rng.random_range(0..12) {
                0 | 1 if alive.len() < 12 => {
                    let len = rng.random_range(1..limits.max_context);
                    let text = |i: usize| (i as u32 * 7 + if i > 20 { 1 } else { 0 }) % 512;
                    let mut tokens: Vec<u32> = (0..len).map(text).collect();
                    if rng.random() {
                        *tokens.last_mut().expect("not empty") = rng.random_range(0..512);
                    }
                    if rng.random_bool(0.3) {
                        tokens.fill_with(|| rng.random_range(0..2));
                    }
                    let images = random_images(&mut rng, &limits, &mut tokens);
                    let seen = seen(&tokens, &images, 512);
                    let salt = rng.random_range(0..3);
                    let mut sequence = plain_sequence(
                        next_id,
                        tokens.clone(),
                        SamplingParams::GREEDY,
                        rng.random_range(1..=limits.max_context - len),
                    );
                    let sampling = Arc::make_mut(&mut sequence.request.sampling);
                    sampling.stop_token_ids = vec![END];
                    sequence.request.cache_salt = CacheSalt::new(["", "a", "b"][salt].as_bytes());
                    // For such a sequence the fake runner compares the history with the blocks, and calls the mask.
                    sampling.presence_penalty = if rng.random() { 0.5 } else { 0.0 };
                    sampling.min_tokens = rng.random_range(0..3);
                    // Scores and pooled states are computed for texts only.
                    let is_text = images.is_empty();
                    sequence.request.images = images;
                    sequence.request.prompt_logprobs = (is_text && rng.random_bool(0.2)).then_some(1);
                    sequence.request.pooling = is_text && rng.random_bool(0.2);
                    let mask: Option<Box<dyn TokenMask>> = match rng.random_range(0..10) {
                        0 | 1 => Some(Box::new(Parity::default())),
                        2 | 3 => Some(Box::new(OddAfterFours)),
                        _ => None,
                    };
                    sequence.mask = mask.map(SharedMask::new);
                    sequence.request.client = rng.random_range(0..3);
                    sequence.request.priority =
                        if rng.random() { Priority::Interactive } else { Priority::Background };
                    let n = if !sequence.request.pooling && rng.random_bool(0.3) {
                        rng.random_range(0..limits.max_sequences.min(4))
                    } else {
                        0
                    };
                    sequence.forks = (0..n as u64).map(|i| Fork { id: next_id + 1 + i, seed: i }).collect();
                    forks += n;
                    let ids = next_id..=next_id + n as u64;
                    alive.extend(ids.clone().map(|id| (id, now)));
                    texts.extend(ids.map(|id| (id, (salt, next_id, seen.clone()))));
                    next_id += 1 + n as u64;
                    scheduler.add(sequence);
                }
                2 => {
                    let ids: Vec<u64> = alive.keys().copied().collect();
                    if let Some(id) = ids.choose(&mut rng) {
                        scheduler.remove(*id);
                        alive.remove(id);
                    }
                }
                _ => {
                    let (mut room, mut step) = (in_flight.len() < limits.max_in_flight, None);
                    // The engine always calls the draft model first, but nothing may depend on that.
                    if room && rng.random_bool(0.9) {
                        room = draft(&mut scheduler, &mut *runner, in_flight.len())
                            .expect("never fails")
                            .is_some();
                        // Sequences may be cancelled or added before the draft tokens are used.
                        room &= rng.random_bool(0.9);
                    }
                    if room {
                        step = scheduler.schedule(&pace);
                        if step.is_none() && in_flight.is_empty() {
                            scheduler.expect_idle();
                        }
                    }
                    if let Some(step) = step {
                        let ticket = step.submit(&mut *runner).expect("never fails");
                        encoded += step.encodings.len();
                        let spans = step.batch.sequences.iter().flat_map(|s| &s.images);
                        split += spans.filter(|span| span.row > 0).count();
                        alive.extend(step.shares.iter().map(|share| (share.id, now)));
                        step.shares.iter().for_each(|share| compute(&mut firsts, &texts[&share.id]));
                        in_flight.push_back((ticket, step));
                    }
                    let full = in_flight.len() == limits.max_in_flight;
                    if (full || rng.random_bool(0.5))
                        && let Some((ticket, step)) = in_flight.pop_front()
                    {
                        // The time of a step grows with its tokens and keys.
                        let ms = 5 + step.load.tokens as u64 + step.load.keys / 64;
                        pace.observe(step.load, Duration::from_millis(ms));
                        let mut sampled = runner.wait(ticket).expect("never fails");
                        sampled.ids.iter_mut().filter(|_| rng.random_bool(0.002)).for_each(|id| *id = None);
                        sampled
                            .pooled
                            .iter_mut()
                            .filter(|_| rng.random_bool(0.02))
                            .for_each(|s| s[1] = f32::NAN);
                        for output in scheduler.commit(&step, &sampled) {
                            let known = texts.get_mut(&output.id).expect("it was added");
                            known.2.extend(output.token);
                            compute(&mut firsts, known);
                            if output.cached_tokens > 0 {
                                let (salt, family, text) = known;
                                let found =
                                    beginnings(&text[..output.cached_tokens]).last().expect("not empty");
                                assert_ne!(
                                    firsts[&(*salt, found)],
                                    *family,
                                    "found under another salt: {limits:?}"
                                );
                            }
                            if let Some(end) = &output.end {
                                let nothing = output.token.is_none() && output.pooled.is_none();
                                assert_eq!(nothing, *end != Ok(FinishReason::Length));
                                alive.remove(&output.id).expect("it was unfinished");
                            }
                            pooled += usize::from(output.pooled.is_some());
                            hits += usize::from(output.cached_tokens > 0);
                            accepted += usize::from(output.end.is_some()) * output.drafts.accepted;
                        }
                        // The output may belong to a sequence that was removed while its step was in progress.
                        alive.retain(|id, _| scheduler.knows(*id));
                    }
                }
            }
            scheduler.check();
            if alive.is_empty() {
                assert!(scheduler.is_idle(), "the scheduler is busy without a sequence");
            }
            // Every sequence has at most 120 steps, and may wait for 50 others.
            let waited = alive.values().map(|since| now - since).max().unwrap_or(0);
            longest_wait = longest_wait.max(waited);
            assert!(waited < 1200, "a sequence starves: {waited} operations, {limits:?}");
        }
        // All remaining sequences must end.
        let mut steps = 0;
        while !scheduler.is_idle() || !in_flight.is_empty() {
            steps += 1;
            assert!(steps < 20_000, "the scheduler never becomes idle: {limits:?}");
            if in_flight.len() < limits.max_in_flight
                && let Some(step) = scheduler.schedule(&pace)
            {
                in_flight.push_back((step.submit(&mut *runner).expect("never fails"), step));
            }
            let (ticket, step) = in_flight.pop_front().expect("a step in flight");
            scheduler.commit(&step, &runner.wait(ticket).expect("never fails"));
        }
        for with_window in [false, true] {
            assert_eq!(scheduler.usage(with_window).held, 0, "pools with a window: {with_window}");
        }
        preemptions += scheduler.preemptions();
        let model = scheduler.drafts().model;
        assert!(config.draft_model || model.proposed == 0, "{model:?}");
        (drafted, drafts) = (drafted + model.proposed, drafts + model.accepted);
    }
    println!(
        "{operations} operations, {preemptions} preemptions, {forks} forks, {hits} cached, {pooled} pooled, {accepted} draft tokens accepted; \
         {drafts} of {drafted} by the draft model; {encoded} images, {split} found in part; waited {longest_wait}"
    );
    assert!(encoded > 500 && split > 40, "too few images");
    assert!(losses > 100 && at_fault > 10, "{losses} losses, {at_fault} at fault");
    assert!(pooled > 500, "too few pooled prompts");
    assert!(preemptions > 500 && forks > 500 && hits > 500 && accepted > 500, "too few events of some kind");
    assert!(drafts > 500 && drafted > drafts + 100, "the draft model is right always or never");
}

#[test]
fn the_length_of_the_queue_can_change_while_requests_wait() {
    let (engine, control) = start(one_slot(), says(&[7], END));
    control.allow(0);
    let ask = || engine.submit(request(&[1, 2, 3], 2));
    let mut taken = vec![ask().expect("it runs")];
    control.submitted(1);
    engine.set_queue(1);
    taken.push(ask().expect("it waits"));
    assert_eq!(ask().err(), Some(SubmitError::QueueFull { waiting: 1 }));
    engine.set_queue(3);
    taken.extend([ask().expect("there is room"), ask().expect("there is room")]);
    assert_eq!(ask().err(), Some(SubmitError::QueueFull { waiting: 3 }));
    engine.set_queue(2);
    assert_eq!(
        ask().err(),
        Some(SubmitError::QueueFull { waiting: 3 }),
        "waiting requests stay in the queue"
    );
    control.release();
    for mut stream in taken {
        let last = std::iter::from_fn(|| stream.blocking_next()).last();
        assert!(matches!(last, Some(Event::Finished { .. })), "{last:?}");
    }
}
