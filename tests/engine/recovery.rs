//! The engine when its device is lost and another runner replaces it: answers continue without a visible difference.

use std::sync::Arc;
use std::time::Duration;

use unicorn::engine::{
    Engine, EngineConfig, EngineError, EngineHandle, EngineState, Event, KeepAlive, Request, Restriction,
    SchedulerConfig, TokenMask,
};
use unicorn::model::{Batch, Limits};

use crate::support::engine::{END, assert_all_free, collect, request};
use crate::support::fake_runner::{
    Control, FakeFactory, FakeRunner, HANG, fake_limits, kv_with, mixed, mixed_answer,
};
use crate::support::waits::wait_until;

/// Room for four sequences, with two steps in flight.
fn four() -> Limits {
    Limits { max_sequences: 4, max_draws: 8, max_in_flight: 2, kv: kv_with(200, 64), ..fake_limits() }
}

/// Answers have ids below this. Prompts may have larger ids.
const IDS: usize = 500;

const MINUTES: Duration = Duration::from_secs(600);

fn start(limits: Limits, with_draft: bool, idle_unload: Option<Duration>) -> (EngineHandle, Control) {
    let make = move || match with_draft {
        true => FakeRunner::with_draft(limits.clone(), mixed(IDS), 1),
        false => FakeRunner::new(limits.clone(), mixed(IDS)),
    };
    let (runner, control) = make();
    let factory = FakeFactory::new(&control, move || make().0);
    // This gap is longer than any step, so the size of chunks does not depend on the load of the machine.
    let scheduler = SchedulerConfig { gap: MINUTES, ..SchedulerConfig::default() };
    let config = EngineConfig { queue: 16, scheduler, idle_unload, ..EngineConfig::default() };
    (Engine::start_recoverable(runner, factory, Arc::default(), config), control)
}

fn answer_to(prompt: &[u32], max_tokens: usize) -> Vec<u32> {
    mixed_answer(prompt, max_tokens, 0, IDS, END)
}

/// Prompts that need several chunks, and prompts that need one.
fn prompts() -> Vec<Vec<u32>> {
    [40, 3, 17, 25, 9].iter().map(|len| (0..*len).map(|i| (i * 5 + len) % 512).collect()).collect()
}

fn wait_for(engine: &EngineHandle, state: EngineState) {
    wait_until(&format!("{state:?}"), || engine.state() == state);
}

/// All ids of each answer to a request, and the last event.
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
            let (engine, control) = start(four(), with_draft, None);
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
    /// Allows only even ids.
    #[derive(Clone)]
    struct Even;
    impl TokenMask for Even {
        fn mask(&mut self, _: &[u32]) -> Arc<[u32]> {
            Arc::new([0x5555_5555; 16])
        }
        fn restriction(&mut self, _: &[u32]) -> Restriction {
            Restriction::Binding
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
        let one = || requests().into_iter().nth(n).expect("a request");
        let (engine, _) = start(four(), false, None);
        let without = answers(&engine, one());
        for at in 0..12 {
            let (engine, control) = start(four(), false, None);
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
    let (engine, control) = start(four(), false, None);
    control.allow(0);
    control.fail_wait_at(12);
    let mut streams: Vec<_> =
        prompts().iter().map(|prompt| engine.submit(request(prompt, 40)).expect("accepted")).collect();
    control.release();
    streams.iter_mut().for_each(|stream| drop(collect(stream)));
    let batches = control.batches();
    let wide = |batch: &Batch| batch.sequences.len() > 1;
    let lost = batches.iter().take(14).rposition(wide).expect("several sequences in a lost step");
    let alone = batches[lost + 1..].iter().take_while(|batch| !wide(batch)).count();
    // Replaying four prompts with their answers takes more steps than this: each step has at most sixteen tokens.
    assert!(alone > 6, "{alone} steps had one sequence");
    assert!(batches[lost + 1 + alone..].iter().any(wide), "later, sequences must share steps again");
    let starts_over = batches[lost + 1..].iter().filter(|batch| batch.sequences[0].start == 0);
    assert!(starts_over.count() >= 4, "no state of the lost device may be used");
}

#[test]
fn a_prompt_that_loses_the_device_twice_fails_alone() {
    let (engine, control) = start(four(), false, None);
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

/// Clients repeat a request that failed, so the same prompt comes several times within a minute.
#[test]
fn a_prompt_that_loses_the_device_fails_with_all_its_answers_each_time() {
    let (engine, control) = start(four(), false, None);
    control.poison(511);
    for _ in 0..3 {
        let (answers, last) = answers(&engine, Request { more_seeds: vec![1, 2], ..request(&[511; 30], 9) });
        assert_eq!(answers, vec![Vec::<u32>::new(); 3]);
        assert!(matches!(last, Event::Failed(EngineError::LostTwice(_))), "{last:?}");
        assert_all_free(&engine);
    }
    assert_eq!((engine.stats().losses, engine.health()), (6, Ok(())));
}

/// A prompt whose client has left is not computed alone, so it is taken for the reason.
#[test]
fn losses_by_prompts_whose_clients_leave_do_not_end_the_engine() {
    let (engine, control) = start(four(), false, None);
    control.poison(511);
    for _ in 0..4 {
        control.allow(0);
        let steps = control.batches().len();
        let losing = engine.submit(request(&[511; 30], 20)).expect("accepted");
        control.submitted(steps + 2);
        drop(losing);
        control.release();
        let prompt = [5; 3];
        assert_eq!(
            collect(&mut engine.submit(request(&prompt, 9)).expect("accepted")).0,
            answer_to(&prompt, 9)
        );
        assert_all_free(&engine);
    }
    assert_eq!((engine.stats().losses, engine.health()), (4, Ok(())));
}

/// The client leaves before the loss, while a step with its prompt is in flight.
#[test]
fn a_loss_in_a_step_of_a_client_that_has_left_does_not_count() {
    let (engine, control) = start(four(), false, None);
    control.allow(0);
    control.fail_wait_at(2);
    let prompt = [5, 6, 7];
    let mut decoded = engine.submit(request(&prompt, 60)).expect("accepted");
    control.submitted(2);
    let left = engine.submit(request(&[8; 30], 20)).expect("accepted");
    control.allow(1);
    control.submitted(3);
    drop(left);
    control.release();
    assert_eq!(collect(&mut decoded).0, answer_to(&prompt, 60));
    control.fail_probes();
    engine.probe();
    wait_until("the failed probe is noticed", || engine.stats().losses == 2);
    let again = collect(&mut engine.submit(request(&prompt, 9)).expect("accepted")).0;
    assert_eq!(again, answer_to(&prompt, 9));
}

/// The limits of [`four`], with steps long enough for prompts that the NPU computes.
fn long() -> Limits {
    Limits { max_batch_tokens: 128, kv: kv_with(200, 200), ..four() }
}

/// The number and the timing of failed requests do not matter: each one ends immediately, and the device is not lost.
#[test]
fn a_prompt_on_which_the_npu_fails_ends_and_the_others_continue() {
    let (engine, control) = start(long(), false, None);
    let poison = 511;
    control.set_attention_path(2);
    control.fail_npu_at(poison);
    let failing: Vec<u32> = (100..160).map(|i| if i == 150 { poison } else { i }).collect();
    let (early, other_prompt): (Vec<u32>, Vec<u32>) = ([5; 3].into(), (0..45).collect());
    // Chunks are short while another sequence decodes, until the engine knows how long steps take.
    assert_eq!(collect(&mut engine.submit(request(&early, 9)).expect("accepted")).0, answer_to(&early, 9));
    for round in 1..=4 {
        // Results that were already computed must not be lost: the decoding sequence keeps its tokens.
        let steps = control.batches().len();
        control.allow(0);
        let mut decoded = engine.submit(request(&early, 60)).expect("accepted");
        control.submitted(steps + 1);
        let mut failed = engine.submit(request(&failing, 20)).expect("accepted");
        let mut other = engine.submit(request(&other_prompt, 20)).expect("accepted");
        control.release();
        let (ids, last) = collect(&mut failed);
        assert_eq!(
            (ids, last),
            (vec![], Event::Failed(EngineError::Coprocessor("npu-timeout: it hangs".into())))
        );
        for (stream, prompt, n) in [(&mut decoded, &early, 60), (&mut other, &other_prompt, 20)] {
            let (ids, last) = collect(stream);
            assert!(matches!(last, Event::Finished { .. }), "{last:?}");
            assert_eq!(ids, answer_to(prompt, n), "round {round}");
        }
        assert_all_free(&engine);
        assert_eq!((control.starts(), engine.stats().losses, engine.health()), (round, 0, Ok(())));
    }
    // No replayed request runs alone, because only suspects of a device loss do.
    let replays = control.batches();
    let wide = replays.iter().filter(|batch| batch.sequences.len() > 1 && batch.sequences[0].start == 0);
    assert!(wide.count() >= 4, "replayed requests must share steps immediately");
    // Failures of the NPU must not count towards giving up the device at a later loss.
    control.fail_probes();
    engine.probe();
    wait_until("the failed probe is noticed", || engine.stats().losses > 0);
    assert_eq!(collect(&mut engine.submit(request(&early, 9)).expect("accepted")).0, answer_to(&early, 9));
}

/// A delayed step is sent to the NPU even if the client of its prompt has left. The other requests of that step are not
/// suspects, and no number of such failures ends the engine.
#[test]
fn an_npu_failure_on_an_abandoned_prompt_affects_no_other_request() {
    let (engine, control) = start(long(), false, None);
    let poison = 511;
    control.set_attention_path(2);
    control.fail_npu_at(poison);
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
    println!("the NPU failed {} times", engine.stats().coprocessor_failures);
}

#[test]
fn a_prompt_on_which_the_npu_fails_fails_with_all_its_answers() {
    let (engine, control) = start(long(), false, None);
    control.set_attention_path(1);
    control.fail_npu_at(511);
    // The answers fork in the step that fails, or in the step after it.
    for len in [60, 150] {
        let (answers, last) =
            answers(&engine, Request { more_seeds: vec![1, 2], ..request(&vec![511; len], 9) });
        assert_eq!(answers, vec![Vec::<u32>::new(); 3]);
        assert!(matches!(last, Event::Failed(EngineError::Coprocessor(_))), "{last:?}");
        wait_for(&engine, EngineState::Ready);
        assert_all_free(&engine);
    }
    assert_eq!((engine.stats().losses, control.starts()), (0, 2));
}

#[test]
fn a_second_loss_within_a_minute_without_a_suspect_ends_the_engine() {
    let (engine, control) = start(four(), false, None);
    control.fail_wait_at(3);
    let prompt = [1; 20];
    let (ids, _) = collect(&mut engine.submit(request(&prompt, 100)).expect("accepted"));
    assert_eq!(ids, answer_to(&prompt, 100));
    assert_all_free(&engine);
    control.fail_probes();
    engine.probe();
    assert!(engine.join(HANG), "the engine must end");
    assert!(matches!(engine.ended(), Some(EngineError::Lost(why)) if why.contains("came back wrong")));
    assert_eq!((engine.state(), engine.stats().losses), (EngineState::Lost, 2));
}

#[test]
fn a_device_that_does_not_recover_ends_the_engine_and_all_answers() {
    let (engine, control) = start(four(), false, None);
    control.fail_starts();
    control.fail_wait_at(2);
    let (_, last) = collect(&mut engine.submit(request(&[1; 20], 50)).expect("accepted"));
    assert!(matches!(last, Event::Failed(EngineError::Lost(why)) if why.contains("does not come back")));
    assert!(engine.join(HANG));
}

#[test]
fn requests_are_accepted_during_recovery_and_an_abort_ends_it() {
    let (engine, control) = start(four(), false, None);
    control.hold_starts(true);
    control.fail_wait_at(2);
    let mut stream = engine.submit(request(&[1; 20], 50)).expect("accepted");
    wait_for(&engine, EngineState::Recovering);
    let mut later = engine.submit(request(&[2; 20], 5)).expect("accepted meanwhile");
    assert_eq!(engine.health(), Ok(()));
    control.hold_starts(false);
    assert_eq!(collect(&mut later).0.len(), 5);
    assert_eq!(collect(&mut stream).0, answer_to(&[1; 20], 50));

    let (engine, control) = start(four(), false, None);
    control.hold_starts(true);
    control.fail_wait_at(2);
    let mut stream = engine.submit(request(&[1; 20], 50)).expect("accepted");
    wait_for(&engine, EngineState::Recovering);
    engine.abort();
    assert!(engine.join(HANG), "a cancelled start must not block the engine");
    assert_eq!(collect(&mut stream).1, Event::Failed(EngineError::ShuttingDown));
    assert_eq!(engine.ended(), None);
}

#[test]
fn an_idle_model_is_unloaded_and_loaded_again_for_the_next_request() {
    let (engine, control) = start(four(), false, Some(Duration::from_millis(50)));
    for round in 1..4 {
        wait_for(&engine, EngineState::Unloaded);
        assert!(control.dropped(), "the runner must be dropped");
        // A probe of an unloaded model does nothing.
        engine.probe();
        let prompt = [round; 20];
        let (ids, _) = collect(&mut engine.submit(request(&prompt, 9)).expect("accepted"));
        assert_eq!(ids, answer_to(&prompt, 9));
        assert_eq!(control.starts(), round as usize);
    }
    assert_eq!((control.probes(), engine.stats().losses), (0, 0));
    // A request that is aborted immediately may or may not load the model.
    for _ in 0..50 {
        wait_for(&engine, EngineState::Unloaded);
        drop(engine.submit(request(&[1; 20], 9)).expect("accepted"));
        wait_until("the request leaves the queue", || engine.stats().waiting == 0);
    }
    assert_eq!(
        collect(&mut engine.submit(request(&[1; 20], 9)).expect("accepted")).0,
        answer_to(&[1; 20], 9)
    );

    let (engine, control) = start(four(), false, Some(MINUTES));
    collect(&mut engine.submit(request(&[1; 20], 9)).expect("accepted"));
    assert_eq!((engine.state(), control.starts()), (EngineState::Ready, 0));
}

/// A request may say how long the engine keeps the model after it. The next request without a wish ends that.
#[test]
fn requests_and_commands_decide_how_long_the_model_is_kept() {
    let (engine, control) = start(four(), false, None);
    let ask = |keep_alive| {
        let asked = Request { keep_alive, ..request(&[1; 20], 9) };
        assert_eq!(collect(&mut engine.submit(asked).expect("accepted")).0, answer_to(&[1; 20], 9));
    };
    ask(KeepAlive::For(Duration::ZERO));
    wait_for(&engine, EngineState::Unloaded);
    assert_eq!(engine.kept_for(), None);
    ask(KeepAlive::Configured);
    assert_eq!((engine.state(), control.starts(), engine.kept_for()), (EngineState::Ready, 1, None));

    engine.unload().expect("accepted");
    wait_for(&engine, EngineState::Unloaded);
    let mut loaded = engine.load(KeepAlive::For(MINUTES)).expect("accepted");
    wait_until("the model is loaded", || loaded.try_recv().is_ok());
    assert_eq!((engine.state(), control.starts()), (EngineState::Ready, 2));
    let kept = engine.kept_for().expect("a time");
    assert!(kept > MINUTES - HANG && kept <= MINUTES, "{kept:?}");
    // A probe does not keep the model longer.
    engine.probe();
    // A loaded model is not loaded again, and answers in progress are not lost.
    control.allow(0);
    let mut stream = engine.submit(request(&[2; 20], 9)).expect("accepted");
    let mut loaded = engine.load(KeepAlive::Forever).expect("accepted");
    engine.unload().expect("accepted");
    control.release();
    assert_eq!(collect(&mut stream).0, answer_to(&[2; 20], 9));
    wait_for(&engine, EngineState::Unloaded);
    assert_eq!((loaded.try_recv(), control.starts()), (Ok(()), 2));
    // A client that does not wait for the load.
    drop(engine.load(KeepAlive::Forever).expect("accepted"));
    ask(KeepAlive::Forever);
    assert_eq!((engine.state(), engine.kept_for()), (EngineState::Ready, None));

    // An engine that cannot load the model again keeps it.
    let engine = Engine::start(FakeRunner::new(four(), mixed(IDS)).0, EngineConfig::default());
    engine.unload().expect("accepted");
    let (ids, _) = collect(&mut engine.submit(request(&[1; 20], 9)).expect("accepted"));
    assert_eq!((ids, engine.state()), (answer_to(&[1; 20], 9), EngineState::Ready));
    engine.abort();
    assert!(engine.join(HANG) && engine.load(KeepAlive::Forever).is_err());
}
