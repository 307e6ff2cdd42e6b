//! The engine against the scripted runner, which checks the batches; and the scheduler alone, by random operations.

use std::time::{Duration, Instant};

use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use unicorn::engine::{
    Engine, EngineConfig, EngineError, EngineHandle, Event, FinishReason, Request, Scheduler, Sequence,
    SubmitError, TokenStream,
};
use unicorn::model::{Input, Limits, Sampled, SamplingParams};

use crate::fake_runner::{Control, FakeRunner, HANG, LIMITS, Script, mix, mixed, says};

const END: u32 = 106;

fn start(limits: Limits, script: Script) -> (EngineHandle, Control) {
    let (runner, control) = FakeRunner::new(limits, script);
    (Engine::start(runner, EngineConfig { queue: 4 }), control)
}

fn request(prompt: &[u32], max_tokens: usize) -> Request {
    Request {
        prompt: prompt.to_vec(),
        sampling: SamplingParams::GREEDY,
        max_tokens: Some(max_tokens),
        stop_token_ids: vec![END],
    }
}

/// Every event to the end; ids, and the last one.
fn collect(stream: &mut TokenStream) -> (Vec<u32>, Event) {
    let mut ids = Vec::new();
    loop {
        match stream.blocking_next().expect("a last event comes before the end") {
            Event::Token { id, .. } => ids.push(id),
            last => {
                assert_eq!(stream.blocking_next(), None, "nothing follows the last event");
                return (ids, last);
            }
        }
    }
}

fn finish_reason(event: &Event) -> FinishReason {
    match event {
        Event::Finished { reason, .. } => *reason,
        other => panic!("expected an answer's end, got {other:?}"),
    }
}

/// Until nothing runs or waits: all blocks must be free then.
fn assert_all_free(engine: &EngineHandle) {
    let since = Instant::now();
    loop {
        let stats = engine.stats();
        if stats.running == 0 && stats.waiting == 0 && stats.free_blocks == stats.total_blocks {
            return;
        }
        assert!(since.elapsed() < HANG, "never came to rest: {stats:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn an_answer_is_prefilled_in_chunks_and_then_decoded_from_the_device() {
    let (engine, control) = start(LIMITS, says(&[7, 8, 9], END));
    let prompt: Vec<u32> = (0..37).collect();
    let (ids, last) = collect(&mut engine.submit(request(&prompt, 10)).expect("accepted"));
    assert_eq!(ids, [7, 8, 9]);
    let Event::Finished { reason: FinishReason::Stop, timings } = last else { panic!("{last:?}") };
    assert_eq!((timings.prompt_n, timings.predicted_n), (37, 4), "the stop id is counted, not handed out");

    let inputs: Vec<Input> = control.batches().iter().map(|b| b.sequences[0].input.clone()).collect();
    let chunk = |r: std::ops::Range<usize>| Input::Ids(prompt[r].to_vec());
    let decode = Input::LastSampled;
    assert_eq!(inputs, [chunk(0..16), chunk(16..32), chunk(32..37), decode.clone(), decode.clone(), decode]);
    assert_all_free(&engine);
}

#[test]
fn max_tokens_ends_an_answer_and_the_default_is_what_the_context_leaves() {
    let (engine, _) = start(LIMITS, says(&[], 5));
    let (ids, last) = collect(&mut engine.submit(request(&[1, 2], 3)).expect("accepted"));
    assert_eq!((ids.len(), finish_reason(&last)), (3, FinishReason::Length));

    let rest = Request { max_tokens: None, ..request(&[1; 150], 1) };
    let (ids, last) = collect(&mut engine.submit(rest).expect("accepted"));
    assert_eq!((ids.len(), finish_reason(&last)), (50, FinishReason::Length));
    assert_all_free(&engine);
}

#[test]
fn a_request_that_cannot_be_answered_is_refused_with_its_numbers() {
    let (engine, control) = start(LIMITS, says(&[], END));
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

    // The longest that fits.
    let (ids, _) = collect(&mut engine.submit(request(&[1; 199], 1)).expect("accepted"));
    assert!(ids.is_empty(), "END at once");
    assert_eq!(control.batches().len(), 13);
}

#[test]
fn a_full_queue_refuses_and_every_accepted_request_is_answered_in_order() {
    let (engine, control) = start(LIMITS, mixed(100));
    control.allow(0);
    let mut running = engine.submit(request(&[9], 5)).expect("runs");
    control.submitted(1);
    let mut queued: Vec<_> = (0..4).map(|i| engine.submit(request(&[i], 5)).expect("waits")).collect();
    assert_eq!(engine.submit(request(&[1], 5)).err(), Some(SubmitError::QueueFull { waiting: 4 }));
    assert_eq!(engine.stats().waiting, 4);

    control.release();
    assert_eq!(collect(&mut running).0.len(), 5);
    for (i, stream) in queued.iter_mut().enumerate() {
        let expected: Vec<u32> = (0..5).map(|n| mix(&[i as u32], n, 0, 100)).collect();
        assert_eq!(collect(stream).0, expected);
    }
    assert!(engine.submit(request(&[1], 5)).is_ok(), "there is room again");
}

#[test]
fn dropping_the_stream_cancels_at_every_stage() {
    // 0 steps done is while the first prefill chunk runs; 2 is the last chunk; more are decodes.
    for steps in 0..8 {
        let (engine, control) = start(LIMITS, says(&[], 5));
        control.allow(steps);
        let stream = engine.submit(request(&[1; 40], 100)).expect("accepted");
        let waiting = engine.submit(request(&[2; 4], 1)).expect("accepted");
        control.submitted(steps + 1);
        drop(stream);
        control.allow(steps + 1);
        let mut waiting = waiting;
        control.submitted(steps + 2);
        let next = control.batches()[steps + 1].clone();
        assert_eq!(next.sequences[0].input, Input::Ids(vec![2; 4]), "cancelled after {steps} steps, ran on");
        control.release();
        assert_eq!(finish_reason(&collect(&mut waiting).1), FinishReason::Length);
        assert_all_free(&engine);
    }
}

#[test]
fn a_cancelled_request_in_the_queue_never_runs_and_gives_its_place_back() {
    let (engine, control) = start(LIMITS, says(&[], END));
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
fn a_reader_that_never_reads_delays_nobody() {
    let (engine, _) = start(LIMITS, says(&[], 5));
    let mut unread = engine.submit(request(&[1], 199)).expect("accepted");
    let (ids, _) = collect(&mut engine.submit(request(&[2], 10)).expect("accepted"));
    assert_eq!(ids.len(), 10);
    assert_eq!(collect(&mut unread).0.len(), 199, "and finds all of it later");
}

#[test]
fn a_lost_device_fails_all_requests_and_those_after() {
    for (on_submit, at) in [(true, 0), (true, 4), (false, 0), (false, 4)] {
        let (engine, control) = start(LIMITS, says(&[], 5));
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
        assert!(engine.join(HANG), "the engine ends");
        assert!(matches!(engine.health(), Err(EngineError::Lost(_))));
        assert!(matches!(
            engine.submit(request(&[1], 1)).err(),
            Some(SubmitError::Engine(EngineError::Lost(_)))
        ));
        assert_all_free(&engine);
    }
}

#[test]
fn logits_that_are_not_finite_fail_one_request_alone() {
    for at in [0, 3] {
        let (engine, control) = start(LIMITS, says(&[], 5));
        control.allow(0);
        control.not_finite_at(at);
        let mut failing = engine.submit(request(&[1; 20], 50)).expect("accepted");
        let mut next = engine.submit(request(&[2; 20], 3)).expect("accepted");
        control.release();
        let (ids, last) = collect(&mut failing);
        assert_eq!((ids.len(), last), (at.saturating_sub(1), Event::Failed(EngineError::NotFinite)));
        let (ids, last) = collect(&mut next);
        assert_eq!((ids.len(), finish_reason(&last)), (3, FinishReason::Length));
        assert_eq!(engine.health(), Ok(()));
        assert_all_free(&engine);
    }
}

#[test]
fn a_panicking_runner_is_a_lost_engine_and_no_hang() {
    let (engine, _) = start(LIMITS, Box::new(|_, _, _| panic!("a bug, made for this test")));
    let mut stream = engine.submit(request(&[1], 1)).expect("accepted");
    assert!(matches!(collect(&mut stream).1, Event::Failed(EngineError::Lost(_))));
    assert!(engine.join(HANG) && engine.health().is_err());
}

#[test]
fn join_waits_for_the_runners_destructor() {
    let (engine, control) = start(LIMITS, says(&[], 5));
    control.drop_slowly();
    engine.abort();
    assert!(engine.join(HANG));
    assert!(control.dropped(), "the process may exit now, and the device is still being given back");

    let (engine, control) = start(LIMITS, Box::new(|_, _, _| panic!("a bug, made for this test")));
    control.drop_slowly();
    let mut stream = engine.submit(request(&[1], 1)).expect("accepted");
    assert!(matches!(collect(&mut stream).1, Event::Failed(EngineError::Lost(_))));
    assert!(engine.join(HANG) && control.dropped());
}

#[test]
fn drain_answers_what_it_has_and_abort_does_not() {
    let (engine, control) = start(LIMITS, says(&[], 5));
    control.allow(0);
    let mut streams: Vec<_> = (0..3).map(|_| engine.submit(request(&[1], 20)).expect("accepted")).collect();
    engine.drain();
    assert_eq!(engine.submit(request(&[1], 1)).err(), Some(EngineError::ShuttingDown.into()));
    assert!(!engine.join(Duration::from_millis(1)), "work is left");
    control.release();
    for stream in &mut streams {
        assert_eq!(finish_reason(&collect(stream).1), FinishReason::Length);
    }
    assert!(engine.join(HANG));

    let (engine, control) = start(LIMITS, says(&[], 5));
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

    // An idle engine ends too, by either way, and when its last handle goes.
    let (engine, _) = start(LIMITS, says(&[], 5));
    engine.drain();
    assert!(engine.join(HANG));
}

#[test]
fn random_requests_and_cancellations_leave_every_answer_exact_and_every_block_free() {
    let seed = 0x0e47;
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    for _ in 0..20 {
        let block_size = rng.random_range(1..9);
        let max_context: usize = rng.random_range(8..120);
        let limits = Limits {
            max_batch_tokens: rng.random_range(1..40),
            max_sequences: 1,
            block_size,
            num_blocks: max_context.div_ceil(block_size) + rng.random_range(0..3),
            max_context,
            vocab_size: 512,
        };
        let (engine, _) = start(limits, mixed(512));
        for _ in 0..20 {
            let len = rng.random_range(1..max_context);
            let prompt: Vec<u32> = (0..len).map(|_| rng.random_range(0..512)).collect();
            let max_tokens = rng.random_range(1..=max_context - len);
            let mut stream = match engine.submit(request(&prompt, max_tokens)) {
                Ok(stream) => stream,
                Err(SubmitError::QueueFull { .. }) => continue,
                Err(e) => panic!("{e} for {limits:?}"),
            };
            match rng.random_range(0..3) {
                0 => drop(stream),
                1 => {
                    let read = rng.random_range(0..4);
                    (0..read).for_each(|_| drop(stream.blocking_next()));
                }
                _ => {
                    let all: Vec<u32> = (0..max_tokens).map(|n| mix(&prompt, n, 0, 512)).collect();
                    let expected: Vec<u32> = all.iter().copied().take_while(|id| *id != END).collect();
                    assert_eq!(collect(&mut stream).0, expected, "{limits:?}");
                }
            }
        }
        assert_all_free(&engine);
    }
}

#[test]
fn the_scheduler_keeps_its_invariants_under_random_operations() {
    let seed = 0x5c4e;
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut scheduler = Scheduler::new(LIMITS);
    let mut alive: Vec<u64> = Vec::new();
    for id in 0..20_000 {
        match rng.random_range(0..10) {
            0 if alive.len() < 6 => {
                let len = rng.random_range(1..150);
                scheduler.add(Sequence {
                    id,
                    prompt: vec![1; len],
                    sampling: SamplingParams::GREEDY,
                    max_tokens: rng.random_range(1..=200 - len),
                    stop_token_ids: vec![END],
                    computed: 0,
                    generated: 0,
                    blocks: Vec::new(),
                });
                alive.push(id);
            }
            1 => {
                if let Some(id) = alive.choose(&mut rng).copied() {
                    scheduler.remove(id);
                    alive.retain(|a| *a != id);
                }
            }
            _ => {
                let Some(step) = scheduler.schedule() else {
                    assert!(alive.is_empty(), "sequences wait and nothing runs");
                    continue;
                };
                let end = rng.random_range(0..30) == 0;
                let ids = step.sampling.requests.iter().map(|_| if end { END } else { 7 }).collect();
                for output in scheduler.commit(&step, &Sampled { ids }) {
                    assert_eq!(output.token.is_none(), output.finish == Some(FinishReason::Stop));
                    alive.retain(|a| output.finish.is_none() || *a != output.id);
                }
            }
        }
        scheduler.check();
        assert_eq!(alive.len(), scheduler.num_waiting() + scheduler.num_running());
    }
}
