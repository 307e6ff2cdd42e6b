//! The engine when its device is lost and another runner takes over: answers go on as if nothing had been.

use std::sync::Arc;
use std::time::{Duration, Instant};

use unicorn::engine::{
    Engine, EngineConfig, EngineError, EngineHandle, EngineState, Event, Request, SchedulerConfig, TokenMask,
};
use unicorn::model::{Batch, KvLimits, Limits};

use crate::support::engine::{END, assert_all_free, collect, request};
use crate::support::fake_runner::{Control, FakeFactory, FakeRunner, HANG, LIMITS, mixed, mixed_answer};

/// Room for four sequences, two steps in flight.
const FOUR: Limits = Limits {
    max_sequences: 4,
    max_draws: 8,
    max_in_flight: 2,
    kv: KvLimits { block_size: 4, full_blocks: 200, sliding_blocks: 64, sliding_window: Some(10) },
    ..LIMITS
};

/// Ids that may come in an answer; prompts may have others.
const IDS: usize = 500;

const MINUTES: Duration = Duration::from_secs(600);

fn start(limits: Limits, with_draft: bool, idle_unload: Option<Duration>) -> (EngineHandle, Control) {
    let make = move || match with_draft {
        true => FakeRunner::with_draft(limits, mixed(IDS), 1),
        false => FakeRunner::new(limits, mixed(IDS)),
    };
    let (runner, control) = make();
    let factory = FakeFactory::new(&control, move || make().0);
    // No step takes as long as this gap, so chunks do not depend on how busy the machine is.
    let scheduler = SchedulerConfig { gap: MINUTES, ..SchedulerConfig::default() };
    let config = EngineConfig { queue: 16, scheduler, idle_unload, ..EngineConfig::default() };
    (Engine::start_recoverable(runner, factory, Arc::default(), config), control)
}

fn answer_to(prompt: &[u32], max_tokens: usize) -> Vec<u32> {
    mixed_answer(prompt, max_tokens, 0, IDS, END)
}

/// Prompts of several chunks, and of one.
fn prompts() -> Vec<Vec<u32>> {
    [40, 3, 17, 25, 9].iter().map(|len| (0..*len).map(|i| (i * 5 + len) % 512).collect()).collect()
}

fn wait_for(engine: &EngineHandle, state: EngineState) {
    let since = Instant::now();
    while engine.state() != state {
        assert!(since.elapsed() < HANG, "never {state:?}: {:?}", engine.state());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// All ids of each answer of a request, and its last event.
fn answers(engine: &EngineHandle, request: Request) -> (Vec<Vec<u32>>, Event) {
    let mut answers = vec![Vec::new(); 1 + request.more_seeds.len()];
    let mut stream = engine.submit(request).expect("accepted");
    let mut last = None;
    while let Some(event) = stream.blocking_next() {
        if let Event::Token { choice, id, .. } = event {
            answers[choice].push(id);
        }
        last = Some(event);
    }
    (answers, last.expect("an event"))
}

#[test]
fn a_device_loss_at_any_step_changes_no_answer() {
    for with_draft in [false, true] {
        for at in 0..20 {
            let (engine, control) = start(FOUR, with_draft, None);
            control.allow(0);
            if at % 2 == 0 {
                control.fail_wait_at(at)
            } else {
                control.fail_submit_at(at)
            }
            let mut streams = Vec::new();
            for prompt in prompts() {
                streams.push((engine.submit(request(&prompt, 30)).expect("accepted"), prompt));
            }
            control.release();
            for (stream, prompt) in &mut streams {
                let (ids, last) = collect(stream);
                assert!(matches!(last, Event::Finished { .. }), "{last:?} with a loss at {at}");
                assert_eq!(ids, answer_to(prompt, 30), "with a loss at {at}");
            }
            assert_all_free(&engine);
            assert_eq!((engine.stats().losses, control.starts(), engine.health()), (1, 1, Ok(())), "at {at}");
        }
    }
}

#[test]
fn forks_masks_scores_and_embeddings_survive_a_device_loss() {
    /// Allows even ids alone.
    #[derive(Clone)]
    struct Even;
    impl TokenMask for Even {
        fn mask(&mut self, _: &[u32]) -> Arc<[u32]> {
            Arc::new([0x5555_5555; 16])
        }
        fn is_free(&mut self, _: &[u32]) -> bool {
            false
        }
        fn boxed_clone(&self) -> Box<dyn TokenMask> {
            Box::new(self.clone())
        }
    }
    let prompt = &prompts()[0];
    let requests = || {
        let seeds = vec![7, 8];
        let forked = Request { more_seeds: seeds, ..request(prompt, 12) };
        let masked = Request { mask: Some(Box::new(Even)), ..request(prompt, 12) };
        let scored = Request { prompt_logprobs: Some(2), ..request(prompt, 12) };
        let pooled = Request { pooling: true, ..request(prompt, 1) };
        [forked, masked, scored, pooled]
    };
    for (n, _) in requests().iter().enumerate() {
        let one = || requests().into_iter().nth(n).expect("one of them");
        let (engine, _) = start(FOUR, false, None);
        let without = answers(&engine, one());
        for at in 0..12 {
            let (engine, control) = start(FOUR, false, None);
            control.fail_wait_at(at);
            let (ids, last) = answers(&engine, one());
            assert_eq!(ids, without.0, "request {n} with a loss at {at}");
            assert!(matches!(last, Event::Finished { .. }), "{last:?}");
            assert_all_free(&engine);
        }
    }
}

#[test]
fn requests_of_a_lost_step_run_alone_until_they_have_caught_up() {
    let (engine, control) = start(FOUR, false, None);
    control.allow(0);
    control.fail_wait_at(12);
    let mut streams: Vec<_> =
        prompts().iter().map(|prompt| engine.submit(request(prompt, 40)).expect("accepted")).collect();
    control.release();
    streams.iter_mut().for_each(|stream| drop(collect(stream)));
    let batches = control.batches();
    let wide = |batch: &Batch| batch.sequences.len() > 1;
    let lost = batches.iter().take(14).rposition(wide).expect("several shared the lost steps");
    let alone = batches[lost + 1..].iter().take_while(|batch| !wide(batch)).count();
    // Four prompts with what was answered to them take more steps than this, of sixteen tokens each.
    assert!(alone > 6, "{alone} steps were of one sequence");
    assert!(batches[lost + 1 + alone..].iter().any(wide), "later they share steps again");
    let starts_over = batches[lost + 1..].iter().filter(|batch| batch.sequences[0].start == 0);
    assert!(starts_over.count() >= 4, "nothing that the lost device held is used");
}

#[test]
fn a_prompt_that_loses_the_device_twice_fails_alone() {
    let (engine, control) = start(FOUR, false, None);
    let poison = 511;
    control.poison(poison);
    control.allow(0);
    let mut streams = Vec::new();
    for (i, prompt) in prompts().into_iter().enumerate() {
        let prompt = if i == 2 { vec![1, 2, poison, 4] } else { prompt };
        streams.push((engine.submit(request(&prompt, 30)).expect("accepted"), prompt));
    }
    control.release();
    for (i, (stream, prompt)) in streams.iter_mut().enumerate() {
        let (ids, last) = collect(stream);
        if i == 2 {
            assert!(
                matches!(&last, Event::Failed(EngineError::LostTwice(why)) if why.contains("ring timeout")),
                "{last:?}"
            );
        } else {
            assert!(matches!(last, Event::Finished { .. }), "{last:?}");
            assert_eq!(ids, answer_to(prompt, 30));
        }
    }
    assert_all_free(&engine);
    assert_eq!((engine.stats().losses, engine.health()), (2, Ok(())));
}

#[test]
fn a_prompt_that_loses_the_device_fails_with_all_its_answers() {
    let (engine, control) = start(FOUR, false, None);
    control.poison(511);
    let (answers, last) = answers(&engine, Request { more_seeds: vec![1, 2], ..request(&[511; 30], 9) });
    assert_eq!(answers, vec![Vec::<u32>::new(); 3]);
    assert!(matches!(last, Event::Failed(EngineError::LostTwice(_))), "{last:?}");
    assert_all_free(&engine);
}

/// The limits of [`FOUR`] with steps that hold prompts that a unit gets.
const LONG: Limits =
    Limits { max_batch_tokens: 128, kv: KvLimits { sliding_blocks: 200, ..FOUR.kv }, ..FOUR };

/// However many requests the unit fails at, and however soon: each ends at once, and the device is not lost.
#[test]
fn a_prompt_on_which_the_npu_fails_ends_and_the_others_continue() {
    let (engine, control) = start(LONG, false, None);
    let poison = 511;
    control.set_attention_path(2);
    control.fail_unit_at(poison);
    let failing: Vec<u32> = (100..160).map(|i| if i == 150 { poison } else { i }).collect();
    let (early, beside): (Vec<u32>, Vec<u32>) = ([5; 3].into(), (0..45).collect());
    // Chunks beside a decode are short until the engine knows how long steps take.
    assert_eq!(collect(&mut engine.submit(request(&early, 9)).expect("accepted")).0, answer_to(&early, 9));
    for round in 1..=4 {
        // What was computed so far is not taken away: a decode has its tokens, and more of them.
        let steps = control.batches().len();
        control.allow(0);
        let mut decoded = engine.submit(request(&early, 60)).expect("accepted");
        control.submitted(steps + 1);
        let mut failed = engine.submit(request(&failing, 20)).expect("accepted");
        let mut other = engine.submit(request(&beside, 20)).expect("accepted");
        control.release();
        let (ids, last) = collect(&mut failed);
        assert_eq!(
            (ids, last),
            (vec![], Event::Failed(EngineError::Offload("npu-timeout: it hangs".into())))
        );
        for (stream, prompt, n) in [(&mut decoded, &early, 60), (&mut other, &beside, 20)] {
            let (ids, last) = collect(stream);
            assert!(matches!(last, Event::Finished { .. }), "{last:?}");
            assert_eq!(ids, answer_to(prompt, n), "round {round}");
        }
        assert_all_free(&engine);
        assert_eq!((control.starts(), engine.stats().losses, engine.health()), (round, 0, Ok(())));
    }
    // Nobody was alone meanwhile, as those are who may have lost a device.
    let replays = control.batches();
    let wide = replays.iter().filter(|batch| batch.sequences.len() > 1 && batch.sequences[0].start == 0);
    assert!(wide.count() >= 4, "they share steps at once");
    // A unit's failures are no reason to give a device up that is lost later.
    control.fail_probes();
    engine.probe();
    let since = Instant::now();
    while engine.stats().losses == 0 {
        assert!(since.elapsed() < HANG, "the probe never fails");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(collect(&mut engine.submit(request(&early, 9)).expect("accepted")).0, answer_to(&early, 9));
}

/// A step that is held back goes to the unit also where its prompt's reader has left. Whoever is beside it is no suspect,
/// and no number of such failures ends the engine.
#[test]
fn an_npu_failure_on_an_abandoned_prompt_affects_no_other_request() {
    let (engine, control) = start(LONG, false, None);
    let poison = 511;
    control.set_attention_path(2);
    control.fail_unit_at(poison);
    let failing: Vec<u32> = (100..160).map(|i| if i == 150 { poison } else { i }).collect();
    for round in 0..16 {
        let steps = control.batches().len();
        control.allow(steps);
        let mut decoded = engine.submit(request(&[5; 3], 60)).expect("accepted");
        control.submitted(steps + 1);
        let failed = engine.submit(request(&failing, 20)).expect("accepted");
        control.allow(steps + round % 4);
        std::thread::sleep(Duration::from_millis(round as u64 / 4));
        drop(failed);
        control.release();
        assert_eq!(collect(&mut decoded).0, answer_to(&[5; 3], 60), "round {round}");
        assert_all_free(&engine);
        assert_eq!((engine.stats().losses, engine.health()), (0, Ok(())), "round {round}");
    }
    println!("the unit failed {} times", engine.stats().unit_failures);
}

#[test]
fn a_prompt_on_which_the_npu_fails_fails_with_all_its_answers() {
    let (engine, control) = start(LONG, false, None);
    control.set_attention_path(1);
    control.fail_unit_at(511);
    // The answers part in the step that fails, or in the one behind it.
    for len in [60, 150] {
        let (answers, last) =
            answers(&engine, Request { more_seeds: vec![1, 2], ..request(&vec![511; len], 9) });
        assert_eq!(answers, vec![Vec::<u32>::new(); 3]);
        assert!(matches!(last, Event::Failed(EngineError::Offload(_))), "{last:?}");
        wait_for(&engine, EngineState::Ready);
        assert_all_free(&engine);
    }
    assert_eq!((engine.stats().losses, control.starts()), (0, 2));
}

#[test]
fn a_second_loss_within_a_minute_without_a_suspect_ends_the_engine() {
    let (engine, control) = start(FOUR, false, None);
    control.fail_wait_at(3);
    let prompt = [1; 20];
    let (ids, _) = collect(&mut engine.submit(request(&prompt, 100)).expect("accepted"));
    assert_eq!(ids, answer_to(&prompt, 100));
    assert_all_free(&engine);
    control.fail_probes();
    engine.probe();
    assert!(engine.join(HANG), "it ends");
    assert!(matches!(engine.ended(), Some(EngineError::Lost(why)) if why.contains("came back wrong")));
    assert_eq!((engine.state(), engine.stats().losses), (EngineState::Lost, 2));
}

#[test]
fn a_device_that_does_not_recover_ends_the_engine_and_all_answers() {
    let (engine, control) = start(FOUR, false, None);
    control.fail_starts();
    control.fail_wait_at(2);
    let (_, last) = collect(&mut engine.submit(request(&[1; 20], 50)).expect("accepted"));
    assert!(matches!(last, Event::Failed(EngineError::Lost(why)) if why.contains("does not come back")));
    assert!(engine.join(HANG));
}

#[test]
fn requests_are_accepted_during_recovery_and_an_abort_ends_it() {
    let (engine, control) = start(FOUR, false, None);
    control.hold_starts(true);
    control.fail_wait_at(2);
    let mut stream = engine.submit(request(&[1; 20], 50)).expect("accepted");
    wait_for(&engine, EngineState::Recovering);
    let mut later = engine.submit(request(&[2; 20], 5)).expect("accepted meanwhile");
    assert_eq!(engine.health(), Ok(()));
    control.hold_starts(false);
    assert_eq!(collect(&mut later).0.len(), 5);
    assert_eq!(collect(&mut stream).0, answer_to(&[1; 20], 50));

    let (engine, control) = start(FOUR, false, None);
    control.hold_starts(true);
    control.fail_wait_at(2);
    let mut stream = engine.submit(request(&[1; 20], 50)).expect("accepted");
    wait_for(&engine, EngineState::Recovering);
    engine.abort();
    assert!(engine.join(HANG), "a start that is cancelled does not hold it");
    assert_eq!(collect(&mut stream).1, Event::Failed(EngineError::ShuttingDown));
    assert_eq!(engine.ended(), None);
}

#[test]
fn an_idle_model_is_unloaded_and_loaded_again_for_the_next_request() {
    let (engine, control) = start(FOUR, false, Some(Duration::from_millis(50)));
    for round in 1..4 {
        wait_for(&engine, EngineState::Unloaded);
        assert!(control.dropped(), "nothing of it is left");
        // A probe of a model that is not there is none.
        engine.probe();
        let prompt = [round; 20];
        let (ids, _) = collect(&mut engine.submit(request(&prompt, 9)).expect("accepted"));
        assert_eq!(ids, answer_to(&prompt, 9));
        assert_eq!(control.starts(), round as usize);
    }
    assert_eq!((control.probes(), engine.stats().losses), (0, 0));
    // Whoever leaves at once leaves it unloaded, or has it loaded for nobody, by chance.
    for _ in 0..50 {
        wait_for(&engine, EngineState::Unloaded);
        drop(engine.submit(request(&[1; 20], 9)).expect("accepted"));
        let since = Instant::now();
        while engine.stats().waiting > 0 {
            assert!(since.elapsed() < HANG, "never taken off the queue");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert_eq!(
        collect(&mut engine.submit(request(&[1; 20], 9)).expect("accepted")).0,
        answer_to(&[1; 20], 9)
    );

    let (engine, control) = start(FOUR, false, Some(MINUTES));
    collect(&mut engine.submit(request(&[1; 20], 9)).expect("accepted"));
    assert_eq!((engine.state(), control.starts()), (EngineState::Ready, 0));
}
