//! Prompts with images: the scripted runner checks that no image is split, and that its rows belong to one image.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use unicorn::engine::{
    Engine, EngineConfig, EngineError, EngineHandle, EngineState, Event, Fork, KeepAlive, PromptImage,
    Request, SchedulerConfig, Sequence, SubmitError, TokenStream,
};
use unicorn::model::{Batch, ImageLimits, ImageSizes, ImageSpan, Limits, SamplingParams};

use crate::support::driver::{Driver, plain_sequence};
use crate::support::engine::{END, assert_all_free, collect, image_at, image_of_size, request};
use crate::support::fake_runner::{
    Control, FakeFactory, FakeRunner, fake_limits, kv_with, mixed, mixed_answer, says, seen,
};
use crate::support::waits::wait_until;

/// The tokens of an image: no multiple of a block of four.
const TOKENS: usize = 6;

/// Room for four sequences, with two steps in flight, and for the embeddings of `slots` images.
fn limits(slots: usize) -> Limits {
    Limits {
        max_sequences: 4,
        max_draws: 8,
        max_in_flight: 2,
        kv: kv_with(200, 64),
        images: Some(image_limits(TOKENS, slots)),
        ..fake_limits()
    }
}

/// Images of one size, with so many tokens each.
fn image_limits(tokens: usize, slots: usize) -> ImageLimits {
    ImageLimits { sizes: ImageSizes::Fixed { side: 1 }, tokens, usual_tokens: tokens, slots }
}

fn image(start: usize, n: u8) -> PromptImage {
    image_at(start, TOKENS, n)
}

/// A text of `len` ids with images.
#[derive(Debug, Clone)]
struct Prompt {
    ids: Vec<u32>,
    images: Vec<PromptImage>,
}

impl Prompt {
    /// `images` are pairs of a position and the number of an image. The ids there are all the same.
    fn new(len: usize, images: &[(usize, u8)]) -> Self {
        Self::with(len, images.iter().map(|(start, n)| image(*start, *n)).collect())
    }

    fn with(len: usize, images: Vec<PromptImage>) -> Self {
        let mut ids: Vec<u32> = (0..len as u32).map(|i| (i * 5 + 3) % 512).collect();
        images.iter().for_each(|image| ids[image.positions.clone()].fill(7));
        Self { ids, images }
    }

    fn request(&self, max_tokens: usize) -> Request {
        Request { images: self.images.clone(), ..request(&self.ids, max_tokens) }
    }

    fn sequence(&self, id: u64, max_tokens: usize) -> Sequence {
        Sequence::new(id, self.request(max_tokens), max_tokens)
    }

    fn answer(&self, max_tokens: usize, seed: u64) -> Vec<u32> {
        mixed_answer(&seen(&self.ids, &self.images, 512), max_tokens, seed, 512, END)
    }
}

/// Prompts that begin or end with an image, have several or the same one twice, and differ only in their images.
fn prompts() -> Vec<Prompt> {
    let images: [(usize, &[(usize, u8)]); 8] = [
        (40, &[(11, 1)]),
        (40, &[(11, 2)]),
        (40, &[(0, 1), (6, 2), (12, 1)]),
        (17, &[(11, 3)]),
        (6, &[(0, 2)]),
        (33, &[(3, 1), (20, 1)]),
        (33, &[]),
        (50, &[(11, 1), (30, 4), (44, 5)]),
    ];
    images.into_iter().map(|(len, images)| Prompt::new(len, images)).collect()
}

fn start(limits: Limits, with_draft: bool) -> (EngineHandle, Control) {
    let make = move || match with_draft {
        true => FakeRunner::with_draft(limits.clone(), mixed(512), 1),
        false => FakeRunner::new(limits.clone(), mixed(512)),
    };
    let (runner, control) = make();
    let factory = FakeFactory::new(&control, move || make().0);
    // This gap is longer than any step, so the size of chunks does not depend on the load of the machine.
    let scheduler = SchedulerConfig { gap: Duration::from_secs(600), ..SchedulerConfig::default() };
    let config = EngineConfig { queue: 64, scheduler, ..EngineConfig::default() };
    (Engine::start_recoverable(runner, factory, Arc::default(), config), control)
}

/// The ids of two answers.
fn both(mut stream: TokenStream) -> [Vec<u32>; 2] {
    let mut answers = [vec![], vec![]];
    while let Some(event) = stream.blocking_next() {
        match event {
            Event::Token { choice, id, .. } => answers[choice].push(id),
            Event::Finished { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    answers
}

/// The number of tokens that the prefix cache had for an answer.
fn cached(engine: &EngineHandle, prompt: &Prompt) -> usize {
    let (ids, last) = collect(&mut engine.submit(prompt.request(5)).expect("accepted"));
    assert_eq!(ids, prompt.answer(5, 0), "{prompt:?}");
    let Event::Finished { timings, .. } = last else { panic!("{last:?}") };
    timings.cached_n
}

fn spans(batches: &[Batch]) -> Vec<ImageSpan> {
    batches.iter().flat_map(|batch| &batch.sequences).flat_map(|s| s.images.clone()).collect()
}

#[test]
fn images_that_cannot_be_computed_are_refused() {
    let refused = |engine: &EngineHandle, request| engine.submit(request).err().expect("refused");
    let wanted = Prompt::new(20, &[(3, 1)]).request(5);
    let (engine, _) = start(fake_limits(), false);
    assert_eq!(refused(&engine, wanted.clone()), SubmitError::NoImages);
    let (engine, control) = start(limits(2), false);
    let scored = Request { prompt_logprobs: Some(1), ..wanted.clone() };
    assert_eq!(refused(&engine, scored), SubmitError::ImagesScored);
    let pooled = Request { pooling: true, ..wanted.clone() };
    assert_eq!(refused(&engine, pooled), SubmitError::ImagesPooled);

    let mut short = image(3, 1);
    short.positions.end -= 1;
    let pixels = PromptImage { pixels: [1; 4].into(), ..image(3, 1) };
    for images in [
        vec![image(3, 1), image(8, 1)],
        vec![image(13, 1), image(3, 1)],
        vec![image(15, 1)],
        vec![short],
        vec![pixels],
    ] {
        let wrong = Request { images, ..wanted.clone() };
        assert!(catch_unwind(AssertUnwindSafe(|| engine.submit(wrong))).is_err(), "a caller's bug");
    }
    assert!(control.batches().is_empty() && control.encodings().is_empty());
    assert_eq!(engine.health(), Ok(()));
}

#[test]
fn answers_about_images_do_not_depend_on_batches_chunks_slots_and_the_cache() {
    for (case, with_draft) in (0..12).zip([false, true].into_iter().cycle()) {
        let limits = Limits {
            max_batch_tokens: [6, 7, 11, 16, 40][case % 5],
            max_in_flight: 1 + case % 2,
            ..limits([1, 2, 5][case % 3])
        };
        let (engine, control) = start(limits.clone(), with_draft);
        // The second time, the cache has all prompts.
        for round in 0..2 {
            control.allow(control.batches().len());
            let two = |prompt: &Prompt| Request { more_seeds: vec![9], ..prompt.request(20) };
            let streams: Vec<_> =
                prompts().iter().map(|prompt| engine.submit(two(prompt)).expect("accepted")).collect();
            control.release();
            for (stream, prompt) in streams.into_iter().zip(prompts()) {
                let expected = [0, 9].map(|seed| prompt.answer(20, seed));
                assert_eq!(both(stream), expected, "round {round}, {prompt:?}, {limits:?}");
            }
        }
        assert_all_free(&engine);
        // The results of a step do not wait until an image of the next step is encoded.
        assert!(control.encodings().iter().all(|encoding| encoding.in_flight == 0), "{limits:?}");
        let stats = engine.stats();
        let (encoded, spans) = (control.encodings().len() as u64, spans(&control.batches()).len() as u64);
        assert_eq!((stats.images_encoded, stats.images_encoded + stats.image_hits), (encoded, spans));
        assert!(stats.image_encoding_ns > 0 && stats.image_encoding_ns < u64::MAX / 2);
    }
}

#[test]
fn images_of_different_lengths_are_each_computed_as_a_whole() {
    // Widths, heights and beginnings: of the most tokens and of one, side by side, and at both ends of a prompt.
    let prompts: Vec<Prompt> = [
        (40, &[([6, 1], 3), ([1, 1], 9), ([2, 2], 10), ([3, 1], 30)][..]),
        (40, &[([2, 3], 3), ([1, 1], 9), ([2, 2], 10)]),
        (40, &[([3, 2], 3), ([1, 1], 9), ([2, 2], 10)]),
        (17, &[([1, 5], 0), ([1, 4], 13)]),
        (9, &[([3, 1], 6)]),
    ]
    .into_iter()
    .map(|(len, images)| {
        Prompt::with(len, images.iter().map(|(size, start)| image_of_size(*start, *size, 1)).collect())
    })
    .collect();
    for (max_batch_tokens, slots) in [(6, 1), (7, 2), (11, 1), (40, 3)] {
        let sizes = ImageSizes::ByTokens { unit: 1, longest: usize::MAX };
        let images = Some(ImageLimits { sizes, ..image_limits(TOKENS, slots) });
        let (engine, control) = start(Limits { max_batch_tokens, images, ..limits(slots) }, false);
        for _ in 0..2 {
            let streams: Vec<_> =
                prompts.iter().map(|prompt| engine.submit(prompt.request(20)).expect("accepted")).collect();
            for (mut stream, prompt) in streams.into_iter().zip(&prompts) {
                assert_eq!(collect(&mut stream).0, prompt.answer(20, 0), "{prompt:?}, {max_batch_tokens}");
            }
        }
        assert!(control.encodings().len() >= 8, "the prompts have eight different images");
        assert_all_free(&engine);
    }
}

#[test]
fn the_same_ids_with_different_images_share_neither_blocks_nor_slots() {
    let (engine, control) = start(limits(4), false);
    let [one, other, none] = [&[(10, 1)][..], &[(10, 2)], &[]]
        .map(|images| Prompt { ids: vec![7; 40], ..Prompt::new(40, images) });
    assert_eq!([&one, &other, &none].map(|prompt| cached(&engine, prompt)), [0, 8, 8]);
    assert_eq!([&one, &other, &none].map(|prompt| cached(&engine, prompt)), [36; 3]);
    let moved = Prompt { images: vec![image(11, 1)], ..one.clone() };
    assert_eq!(cached(&engine, &moved), 8, "the same image one position later");
    let encoded: Vec<_> = control.encodings().into_iter().map(|e| (e.slot, e.pixels[0])).collect();
    assert_eq!(encoded, [(0, 1), (1, 2)], "the embeddings do not depend on the position");
    assert_all_free(&engine);
}

#[test]
fn another_question_about_an_image_finds_the_image_in_the_cache() {
    let (engine, control) = start(limits(1), false);
    let first = Prompt::new(30, &[(5, 1)]);
    let mut second = first.clone();
    second.ids[20..].fill(1);
    assert_eq!([&first, &second].map(|prompt| cached(&engine, prompt)), [0, 20]);
    assert_eq!(control.encodings().len(), 1);
    assert_eq!(spans(&control.batches()), [ImageSpan { start: 5, tokens: TOKENS, slot: 0, row: 0 }]);

    // The last block in the cache ends within the image. The rest of the image needs the embeddings.
    let end = Prompt { ids: first.ids[..11].to_vec(), ..first };
    let before = control.batches().len();
    assert_eq!([&end, &end].map(|prompt| cached(&engine, prompt)), [8, 8]);
    let rest = ImageSpan { start: 0, tokens: 3, slot: 0, row: 3 };
    assert_eq!(spans(&control.batches()[before..]), [rest, rest]);
    let stats = engine.stats();
    assert_eq!((stats.images_encoded, stats.image_hits), (1, 2));

    // Another image takes the only slot.
    cached(&engine, &Prompt::new(30, &[(5, 2)]));
    assert_eq!(cached(&engine, &end), 8);
    let encoded: Vec<_> = control.encodings().iter().map(|encoding| encoding.pixels[0]).collect();
    assert_eq!(encoded, [1, 2, 1]);
    assert_all_free(&engine);
}

#[test]
fn an_image_twice_in_a_step_is_encoded_once() {
    let (engine, control) = start(Limits { max_batch_tokens: 64, ..limits(1) }, false);
    assert_eq!(cached(&engine, &Prompt::new(40, &[(2, 1), (9, 1), (30, 1)])), 0);
    assert_eq!((control.encodings().len(), spans(&control.batches()).len()), (1, 3));
    let stats = engine.stats();
    assert_eq!((stats.images_encoded, stats.image_hits), (1, 2));
}

/// The tokens of each step of one prompt.
fn chunks(limits: &Limits, prompt: &Prompt) -> Vec<usize> {
    let (mut runner, control) = FakeRunner::new(limits.clone(), mixed(512));
    let run = Driver::new(&mut *runner, limits.clone()).run(vec![prompt.sequence(0, 3)]);
    assert_eq!(run.answers[&0], prompt.answer(3, 0));
    let all = control.batches();
    let shares = all.iter().map(|batch| &batch.sequences[0]);
    shares.filter(|s| s.start < prompt.ids.len()).map(|s| s.input.len()).collect()
}

#[test]
fn a_chunk_ends_before_an_image_that_it_has_no_room_for() {
    let limits = |max_batch_tokens, slots| Limits { max_batch_tokens, ..limits(slots) };
    let prompt = Prompt::new(30, &[(10, 1), (20, 2)]);
    assert_eq!(chunks(&limits(12, 2), &prompt), [10, 10, 10]);
    assert_eq!(chunks(&limits(17, 2), &prompt), [17, 13]);
    assert_eq!(chunks(&limits(6, 2), &prompt), [6, 4, 6, 4, 6, 4]);
    assert_eq!(chunks(&limits(40, 2), &prompt), [30]);
    assert_eq!(chunks(&limits(40, 1), &prompt), [20, 10], "the step has no slot for the second image");
    let prompt = Prompt::new(16, &[(0, 1), (10, 2)]);
    assert_eq!(chunks(&limits(15, 2), &prompt), [10, 6], "the prompt ends with an image");
}

#[test]
fn a_step_that_others_wait_for_has_one_new_image() {
    let tokens = 20;
    let limits =
        |slots| Limits { max_batch_tokens: 90, images: Some(image_limits(tokens, slots)), ..limits(slots) };
    let prompt = |n: u8| {
        let images = vec![image_at(0, tokens, n), image_at(tokens, tokens, n + 1)];
        Prompt { images, ids: vec![7; 2 * tokens + 1] }
    };
    let run = |streams: u64| {
        let (mut runner, control) = FakeRunner::new(limits(8), mixed(512));
        let text = |id| plain_sequence(id, vec![1, 2, id as u32], SamplingParams::GREEDY, 60);
        let mut sequences: Vec<Sequence> = (0..streams).map(text).collect();
        let prompts = [1, 3].map(prompt);
        sequences.extend((streams..).zip(&prompts).map(|(id, prompt)| prompt.sequence(id, 4)));
        let mut driver = Driver::new(&mut *runner, limits(8));
        let run =
            driver.run_staggered(sequences, |i| if i < streams as usize { 0 } else { 3 * streams as usize });
        for (id, prompt) in (streams..).zip(&prompts) {
            assert_eq!(run.answers[&id], prompt.answer(4, 0));
        }
        control
    };
    let control = run(1);
    let steps: Vec<usize> = control.encodings().iter().map(|encoding| encoding.steps).collect();
    assert!(
        steps.len() == 4 && steps.is_sorted_by(|a, b| a < b),
        "images are encoded before steps {steps:?}"
    );
    // The first chunk exceeds the gap for the rest of its image, but not for more.
    for batch in control.batches() {
        let prefill: Vec<usize> = batch.sequences.iter().map(|s| s.input.len()).filter(|n| *n > 16).collect();
        assert!(prefill.is_empty() || prefill == [tokens], "{prefill:?}");
    }
    let alone: Vec<usize> = run(0).encodings().iter().map(|encoding| encoding.steps).collect();
    assert_eq!(alone, [0, 0, 1, 2], "two images while nothing decodes, then one a step");
}

/// Each step has a decode, which leaves no room for the image.
#[test]
fn an_image_as_long_as_a_step_does_not_wait_until_all_streams_end() {
    let limits = Limits { max_batch_tokens: TOKENS, ..limits(1) };
    let (mut runner, control) = FakeRunner::new(limits.clone(), mixed(512));
    let config = SchedulerConfig { patience: 10, ..SchedulerConfig::default() };
    let prompt = Prompt::new(20, &[(3, 1)]);
    let text = plain_sequence(0, vec![1, 2, 3], SamplingParams::GREEDY, 150);
    let mut driver = Driver::with(&mut *runner, limits, config);
    let run = driver.run(vec![text, prompt.sequence(1, 4)]);
    assert_eq!((run.answers[&0].len(), &run.answers[&1]), (150, &prompt.answer(4, 0)));
    let encoded = control.encodings()[0].steps;
    assert!(encoded < 20, "the image waited for {encoded} steps");
}

#[test]
fn sequences_with_images_are_preempted_and_continue() {
    for (slots, with_draft) in [(1, false), (3, true)] {
        let limits = Limits { kv: kv_with(30, 20), max_context: 100, max_batch_tokens: 20, ..limits(slots) };
        let (mut runner, _) = match with_draft {
            true => FakeRunner::with_draft(limits.clone(), mixed(512), 1),
            false => FakeRunner::new(limits.clone(), mixed(512)),
        };
        let mut sequences = Vec::new();
        for (id, prompt) in (0..).step_by(2).zip(prompts()) {
            let mut sequence = prompt.sequence(id, 45);
            sequence.forks = vec![Fork { id: id + 1, seed: 9 }];
            sequences.push(sequence);
        }
        let mut driver = Driver::new(&mut *runner, limits);
        let run = driver.run_staggered(sequences, |i| 7 * i);
        assert!(run.preemptions > 0, "nothing was preempted");
        for (id, prompt) in (0..).step_by(2).zip(prompts()) {
            assert_eq!(run.answers[&id], prompt.answer(45, 0), "{prompt:?}");
            assert_eq!(run.answers[&(id + 1)], prompt.answer(45, 9), "{prompt:?}");
        }
    }
}

#[test]
fn a_device_that_is_lost_at_an_image_or_later_changes_no_answer() {
    for at in 0..12 {
        let (engine, control) = start(limits(2), at % 3 == 0);
        control.allow(0);
        match at % 2 {
            0 => control.fail_encoding_at(at / 2),
            _ => control.fail_wait_at(at),
        }
        let streams: Vec<_> =
            prompts().iter().map(|prompt| engine.submit(prompt.request(15)).expect("accepted")).collect();
        control.release();
        for (mut stream, prompt) in streams.into_iter().zip(prompts()) {
            assert_eq!(collect(&mut stream).0, prompt.answer(15, 0), "lost at {at}: {prompt:?}");
        }
        assert_eq!((engine.stats().losses, control.starts()), (1, 1), "lost at {at}");
        assert_all_free(&engine);
    }
}

#[test]
fn an_image_that_loses_the_device_twice_fails_only_its_own_request() {
    let (engine, control) = start(limits(2), false);
    control.allow(4);
    let mut text = engine.submit(request(&[1, 2, 3], 60)).expect("accepted");
    control.submitted(4);
    control.fail_encoding_at(0);
    control.fail_encoding_at(1);
    let prompt = Prompt::new(20, &[(3, 1)]);
    let mut failing = engine.submit(prompt.request(5)).expect("accepted");
    control.release();
    assert!(matches!(collect(&mut failing).1, Event::Failed(EngineError::LostTwice(_))));
    assert_eq!(collect(&mut text).0, mixed_answer(&[1, 2, 3], 60, 0, 512, END));
    assert_eq!(cached(&engine, &prompt), 0, "the third encoding succeeds");
    assert_all_free(&engine);
}

#[test]
fn a_model_that_is_loaded_again_encodes_its_images_again() {
    let (engine, control) = start(limits(2), false);
    let prompt = Prompt::new(20, &[(3, 1)]);
    for loads in 1..4 {
        let last = Request { keep_alive: KeepAlive::For(Duration::ZERO), ..prompt.request(5) };
        assert_eq!(collect(&mut engine.submit(last).expect("accepted")).0, prompt.answer(5, 0));
        wait_until("the model is unloaded", || engine.state() == EngineState::Unloaded);
        assert_eq!(control.encodings().len(), loads);
    }
}

#[test]
fn draft_tokens_from_the_positions_of_an_image_change_no_answer() {
    let (runner, _) = FakeRunner::new(limits(1), says(&[7; 30], END));
    let engine = Engine::start(runner, EngineConfig::default());
    let prompt = Prompt::new(20, &[(3, 1)]);
    let (ids, last) = collect(&mut engine.submit(prompt.request(50)).expect("accepted"));
    assert_eq!(ids, [7; 30]);
    let Event::Finished { timings, .. } = last else { panic!("{last:?}") };
    assert!(timings.drafts.accepted > 10, "{:?}", timings.drafts);
}
