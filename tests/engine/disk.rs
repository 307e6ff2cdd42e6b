//! Conversations on disk: the engine resumes them after a restart, an unload and a loss of the device. The scripted runner
//! checks that the blocks that are read back belong to the text.

use std::fs;
use std::path::Path;
use std::time::Duration;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use unicorn::engine::{
    CacheSalt, DiskConfig, Engine, EngineConfig, EngineHandle, EngineState, Event, Priority, PromptImage,
    ReadRule, Request, SchedulerConfig,
};
use unicorn::kv_disk::{Address, KvStore, KvStoreError};
use unicorn::model::{ImageLimits, ImageSizes, Limits};

use crate::support::engine::{END, assert_all_free, collect, image_at, request};
use crate::support::fake_runner::{
    Control, FakeFactory, FakeRunner, HANG, fake_limits, kv_with, mixed, mixed_answer, seen,
};
use crate::support::waits::wait_until;
use crate::support::{fuzz_bodies, rounds};

/// Answers have ids below this.
const IDS: usize = 500;
const BLOCK: usize = 4;
/// More than all files of a test.
const PLENTY: u64 = 1 << 30;
const MODEL: [u8; 32] = [7; 32];

fn limits() -> Limits {
    let images = ImageLimits { sizes: ImageSizes::Fixed { side: 1 }, tokens: 6, usual_tokens: 6, slots: 2 };
    Limits {
        max_sequences: 4,
        max_draws: 8,
        max_in_flight: 2,
        kv: kv_with(200, 64),
        images: Some(images),
        ..fake_limits()
    }
}

/// An engine with a store, and what it was started with.
struct Server {
    engine: EngineHandle,
    control: Control,
    store: KvStore,
}

#[derive(Clone, Copy)]
struct Options {
    max_bytes: u64,
    model: [u8; 32],
    with_draft: bool,
    idle_unload: Option<Duration>,
    /// Blocks of the pool with a window; 0 = there is no such pool, and texts may be longer.
    sliding: usize,
    speculation_tokens: usize,
}

const USUAL: Options = Options {
    max_bytes: PLENTY,
    model: MODEL,
    with_draft: false,
    idle_unload: None,
    sliding: 64,
    speculation_tokens: 16,
};

/// Opens a folder. A thread of the engine before may still read, until it finds that nothing waits for it.
fn open(folder: &Path, max_bytes: u64) -> KvStore {
    let mut opened = None;
    wait_until("the folder to be free", || {
        opened = match KvStore::open(folder, max_bytes) {
            Err(KvStoreError::Busy { .. }) => None,
            store => Some(store.unwrap()),
        };
        opened.is_some()
    });
    opened.expect("just opened")
}

impl Server {
    fn start(folder: &Path, options: Options) -> Self {
        let Options { max_bytes, model, with_draft, idle_unload, sliding, speculation_tokens } = options;
        let mut limits = Limits { kv: kv_with(200, sliding), ..limits() };
        if sliding == 0 {
            limits.kv.pools.pop();
            limits.max_context = 600;
        }
        let make = move || {
            let (runner, control) = match with_draft {
                true => FakeRunner::with_draft(limits.clone(), mixed(IDS), 1),
                false => FakeRunner::new(limits.clone(), mixed(IDS)),
            };
            (runner.with_disk(), control)
        };
        let (runner, control) = make();
        let factory = FakeFactory::new(&control, move || make().0);
        let store = open(folder, max_bytes);
        let disk = Some(DiskConfig { store: store.clone(), model, reads: ReadRule::Always });
        // Longer than any step, so that the size of chunks does not depend on the load of the machine.
        let gap = Duration::from_secs(600);
        let scheduler = SchedulerConfig { gap, speculation_tokens, ..SchedulerConfig::default() };
        let config = EngineConfig { queue: 16, scheduler, disk, idle_unload, ..EngineConfig::default() };
        let engine = Engine::start_recoverable(runner, factory, Default::default(), config);
        Self { engine, control, store }
    }

    /// The answer to a prompt, and the number of tokens that were cached.
    fn answer(&self, request: Request) -> (Vec<u32>, usize) {
        let (ids, last) = collect(&mut self.engine.submit(request).unwrap());
        let Event::Finished { timings, .. } = last else { panic!("{last:?}") };
        (ids, timings.cached_n)
    }

    /// Ends the engine, and waits until its conversations are on the disk.
    fn stop(self) {
        self.engine.drain();
        assert!(self.engine.join(HANG), "the engine ends");
        assert!(self.store.flush(HANG), "everything is written");
    }
}

/// The answer of a server that ends after it, with the number of tokens that were cached.
fn answer_alone(folder: &Path, options: Options, request: Request) -> (Vec<u32>, usize) {
    let server = Server::start(folder, options);
    let answered = server.answer(request);
    server.stop();
    answered
}

fn expected(prompt: &[u32], max_tokens: usize) -> Vec<u32> {
    mixed_answer(prompt, max_tokens, 0, IDS, END)
}

/// A prompt whose ids do not end an answer.
fn prompt(len: u32, salt: u32) -> Vec<u32> {
    (0..len).map(|i| (i * 7 + salt * 13) % 97).collect()
}

fn salted(prompt: &[u32], salt: &str) -> Request {
    Request { cache_salt: CacheSalt::new(salt.as_bytes()), ..request(prompt, 8) }
}

/// The whole blocks before the last token.
fn whole(tokens: usize) -> usize {
    (tokens - 1) / BLOCK * BLOCK
}

#[test]
fn a_conversation_continues_after_a_restart() {
    for with_draft in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let options = Options { with_draft, ..USUAL };
        let first = Server::start(&folder.path().join("kv"), options);
        let mut text = prompt(101, 1);
        let (answer, cached) = first.answer(request(&text, 30));
        assert_eq!((&answer, cached), (&expected(&text, 30), 0));
        first.stop();

        // The next turn has the answer but its last tokens, which a template may write in another way.
        text.extend(&answer[..answer.len() - 3]);
        text.extend(prompt(9, 2));
        let second = Server::start(&folder.path().join("kv"), options);
        let (answer, cached) = second.answer(request(&text, 30));
        assert_eq!(answer, expected(&text, 30), "with a draft model: {with_draft}");
        // The windows at the answer's end reach back to this position.
        assert_eq!(cached, 128, "with a draft model: {with_draft}");
        let stats = second.engine.stats().disk;
        assert_eq!((stats.hits, stats.hit_tokens, stats.failed_reads), (1, 128, 0), "{stats:?}");
        assert!(second.control.computed_ids() <= text.len() - 128 + 30 * 6, "the rest was computed");
        assert_all_free(&second.engine);
        second.stop();

        let third = Server::start(&folder.path().join("kv"), options);
        text.extend(&answer);
        text.push(1);
        let (again, cached) = third.answer(request(&text, 5));
        // The answer's last id was drawn and not computed.
        assert_eq!((again, cached), (expected(&text, 5), whole(text.len() - 1)));
        third.stop();
    }
}

#[test]
fn another_salt_or_model_finds_nothing_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kv");
    let text = prompt(70, 1);
    answer_alone(&path, USUAL, salted(&text, "a"));
    let cached = |options: Options, salt: &str| {
        let (answer, cached) = answer_alone(&path, options, salted(&text, salt));
        assert_eq!(answer, expected(&text, 8));
        cached
    };
    assert_eq!(cached(USUAL, "b"), 0, "another salt");
    assert_eq!(cached(USUAL, ""), 0, "no salt");
    assert_eq!(cached(Options { model: [8; 32], ..USUAL }, "a"), 0, "another model");
    assert_eq!(cached(USUAL, "a"), 68);
}

#[test]
fn an_image_is_part_of_the_address() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kv");
    let mut text = prompt(60, 1);
    text[21..27].fill(7);
    let with = |n: u8| Request { images: vec![image_at(21, 6, n)], ..request(&text, 8) };
    let answer = |n: u8| {
        let (answer, cached) = answer_alone(&path, USUAL, with(n));
        let seen = seen(&text, &[image_at(21, 6, n)], limits().vocab_size);
        assert_eq!(answer, expected(&seen, 8), "image {n}");
        cached
    };
    assert_eq!([answer(1), answer(1)], [0, 56]);
    // The text before another image is the same, but its windows are not kept.
    assert_eq!([answer(2), answer(2)], [0, 56]);
}

#[test]
fn damaged_files_are_computed_again_and_removed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kv");
    let text = prompt(150, 1);
    answer_alone(&path, USUAL, request(&text, 8));
    let files: Vec<_> = fs::read_dir(&path)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir())
        .flat_map(|path| fs::read_dir(path).unwrap())
        .map(|entry| entry.unwrap().path())
        .collect();
    assert!(files.len() >= 4, "{files:?}");
    for path in &files {
        let mut bytes = fs::read(path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(path, bytes).unwrap();
    }
    let second = Server::start(&path, USUAL);
    let (answer, cached) = second.answer(request(&text, 8));
    assert_eq!((answer, cached), (expected(&text, 8), 0));
    let (stats, store) = (second.engine.stats().disk, second.store.stats());
    assert!(stats.hits == 0 && stats.failed_reads > 0 && store.damaged_entries > 0, "{stats:?} {store:?}");
    second.stop();
    // The files of a text are found one after another, and written again.
    let mut cached = 0;
    for _ in 0..files.len() {
        let (answer, found) = answer_alone(&path, USUAL, request(&text, 8));
        assert_eq!(answer, expected(&text, 8));
        cached = found;
    }
    assert_eq!(cached, 148, "they were written again");
}

#[test]
fn a_mutated_entry_is_refused_unless_its_bytes_are_the_same() {
    let seed = 0xf112;
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kv");
    let (address, length) = fuzz_bodies::KV_ENTRY;
    let payload: Vec<u8> = (0..length).map(|_| rng.random()).collect();
    let store = KvStore::open(&path, PLENTY).unwrap();
    assert!(store.write(Address::new(address), payload.clone(), store.now()) && store.flush(HANG));
    let file = fs::read_dir(path.join("07")).unwrap().next().unwrap().unwrap().path();
    let whole = fs::read(file).unwrap();
    assert_eq!(fuzz_bodies::kv_entry(whole.clone()), Some(payload));
    for round in 0..rounds(4000) {
        let mut bytes = whole.clone();
        for _ in 0..rng.random_range(1..4) {
            match rng.random_range(0..3) {
                0 => bytes.truncate(rng.random_range(0..=bytes.len())),
                1 => bytes.extend((0..rng.random_range(1..20)).map(|_| rng.random::<u8>())),
                // The fields at the beginning are hit often.
                _ if !bytes.is_empty() => {
                    let most = if rng.random() { bytes.len() } else { bytes.len().min(70) };
                    let at = rng.random_range(0..most);
                    bytes[at] = rng.random();
                }
                _ => {}
            }
        }
        let is_same = bytes == whole;
        assert_eq!(fuzz_bodies::kv_entry(bytes).is_some(), is_same, "round {round}");
    }
}

#[test]
fn an_unloaded_model_resumes_from_disk() {
    let folder = tempfile::tempdir().unwrap();
    let options = Options { idle_unload: Some(Duration::from_millis(20)), ..USUAL };
    let server = Server::start(&folder.path().join("kv"), options);
    let text = prompt(90, 3);
    server.answer(request(&text, 8));
    wait_until("the model to be unloaded", || server.engine.state() == EngineState::Unloaded);
    assert!(server.store.flush(HANG));
    assert_eq!(server.answer(request(&text, 8)), (expected(&text, 8), 88));
    server.stop();
}

#[test]
fn a_lost_device_computes_only_what_is_not_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&folder.path().join("kv"), USUAL);
    let text = prompt(120, 4);
    server.control.allow(8 + 4);
    let mut stream = server.engine.submit(request(&text, 30)).unwrap();
    // The prompt's blocks are stored while the answer is computed.
    wait_until("the prompt to be stored", || {
        server.store.flush(HANG)
            && server.store.stats().entries >= 3
            && server.control.copied_blocks()[0] >= 30
    });
    let before = server.control.computed_ids();
    server.control.fail_wait_at(12);
    server.control.allow(usize::MAX);
    let (ids, last) = collect(&mut stream);
    assert_eq!(ids, expected(&text, 30));
    assert!(matches!(last, Event::Finished { .. }), "{last:?}");
    let stats = server.engine.stats();
    assert_eq!((stats.losses, stats.disk.hits), (1, 1), "{stats:?}");
    assert!(server.control.computed_ids() - before < 120, "the prompt was not computed again");
    server.stop();
}

/// Steps do not overlap as long as entries wait, and their blocks may be taken meanwhile.
#[test]
fn small_entries_are_saved_together_between_two_steps() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&folder.path().join("kv"), Options { speculation_tokens: 0, ..USUAL });
    let text = prompt(120, 4);
    // The step after the one that ends the prompt is in flight when that one ends.
    server.control.allow(9);
    let mut stream =
        server.engine.submit(Request { max_tokens: Some(30), ..Request::new(text.clone()) }).unwrap();
    server.control.submitted(10);
    // The pool without a window has an entry of 29 blocks, and the one with a window has three of one block.
    assert_eq!(server.control.copied_blocks()[0], 29 + 3);
    server.control.allow(usize::MAX);
    assert!(matches!(collect(&mut stream).1, Event::Finished { .. }));
    let steps = server.control.batches_with_steps_in_flight();
    let alone: Vec<usize> = (9..16).filter(|step| steps[*step].1 == 0).collect();
    assert_eq!(alone, [9], "the first one after the entries were saved");
    server.stop();
}

/// What is left of a text after its end was evicted is of use.
#[test]
fn the_end_of_a_text_is_evicted_first() {
    let options = Options { sliding: 0, ..USUAL };
    let text = prompt(500, 1);
    for (left, cached) in [(2, 256), (1, 128)] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kv");
        assert_eq!(answer_alone(&path, options, request(&text, 8)), (expected(&text, 8), 0));
        // Three entries of 128 tokens, and smaller ones at the ends of the prompt and of the answer.
        let stats = open(&path, PLENTY).stats();
        assert_eq!(stats.entries, 5, "{stats:?}");
        let max_bytes = (left + 1) * stats.bytes / stats.entries;
        assert_eq!(open(&path, max_bytes).stats().entries, left);
        let again = answer_alone(&path, options, request(&text, 8));
        assert_eq!(again, (expected(&text, 8), cached), "{left} entries");
    }
}

/// What is read does not delay others: they get tokens while one waits for the disk.
#[test]
fn clients_of_one_text_and_of_others_all_get_their_answers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kv");
    let texts: Vec<Vec<u32>> = (0..6).map(|i| prompt(60 + 10 * i, i)).collect();
    let first = Server::start(&path, USUAL);
    for text in &texts[..4] {
        first.answer(request(text, 8));
    }
    first.stop();
    let second = Server::start(&path, USUAL);
    let all: Vec<&Vec<u32>> = texts.iter().chain(&texts).collect();
    let mut streams: Vec<_> =
        all.iter().map(|text| second.engine.submit(request(text, 8)).unwrap()).collect();
    for (stream, text) in streams.iter_mut().zip(all) {
        assert_eq!(collect(stream).0, expected(text, 8));
    }
    // Texts that are stored meanwhile may be read for their second requests.
    assert!(second.engine.stats().disk.hits >= 4, "{:?}", second.engine.stats().disk);
    assert_all_free(&second.engine);
    second.stop();
}

/// A background request whose text is read waits while interactive requests, whose texts are on the disk too, are answered.
#[test]
fn interactive_requests_do_not_wait_for_a_background_request_with_a_text_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kv");
    let texts: Vec<Vec<u32>> = (0..3).map(|i| prompt(90 + i, i)).collect();
    let first = Server::start(&path, USUAL);
    for text in &texts {
        first.answer(request(text, 8));
    }
    first.stop();
    let second = Server::start(&path, USUAL);
    let background = Request { priority: Priority::Background, ..request(&texts[0], 8) };
    let mut streams: Vec<_> = [background.clone(), request(&texts[1], 8), background, request(&texts[2], 8)]
        .into_iter()
        .map(|asked| second.engine.submit(asked).unwrap())
        .collect();
    for (stream, text) in streams.iter_mut().zip([&texts[0], &texts[1], &texts[0], &texts[2]]) {
        assert_eq!(collect(stream).0, expected(text, 8));
    }
    assert_all_free(&second.engine);
    second.stop();
}

/// Whether a request that arrives while another one decodes shares a step with it. Its text is on the disk if `is_stored`.
fn joins_a_long_answer(is_stored: bool, sliding: usize) -> bool {
    let folder = tempfile::tempdir().unwrap();
    let options = Options { sliding, speculation_tokens: 0, ..USUAL };
    let path = folder.path().join("kv");
    let text = prompt(90, 2);
    if is_stored {
        answer_alone(&path, options, request(&text, 8));
    }
    let server = Server::start(&path, options);
    server.control.allow(20);
    // Ids that the script does not end.
    let mut long =
        server.engine.submit(Request { max_tokens: Some(150), ..Request::new(prompt(9, 1)) }).unwrap();
    server.control.submitted(20);
    let mut late = server.engine.submit(request(&text, 8)).unwrap();
    // Steps take a millisecond each, so that the disk is read before the long answer ends.
    let answered = std::thread::scope(|scope| {
        let answer = scope.spawn(|| collect(&mut late).0);
        for step in 21.. {
            if answer.is_finished() {
                break;
            }
            server.control.allow(step);
            std::thread::sleep(Duration::from_millis(1));
        }
        server.control.allow(usize::MAX);
        answer.join().expect("no panic")
    });
    assert_eq!(answered, expected(&text, 8));
    let shared = server.control.batches().iter().any(|batch| batch.sequences.len() == 2);
    assert!(matches!(collect(&mut long).1, Event::Finished { .. }));
    assert_eq!(server.engine.stats().disk.hits, u64::from(is_stored));
    server.stop();
    shared
}

#[test]
fn a_request_joins_an_answer_that_decodes_without_a_pause() {
    for is_stored in [false, true] {
        assert!(joins_a_long_answer(is_stored, 64), "stored: {is_stored}");
    }
}

/// In the pool with a window there is room for one sequence after what the first one and the reserved blocks take.
#[test]
fn a_sequence_has_a_place_if_blocks_are_reserved_for_it() {
    assert!(joins_a_long_answer(true, 14));
}

#[test]
fn a_text_whose_logits_are_not_finite_is_not_found_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kv");
    let text = prompt(150, 5);
    answer_alone(&path, USUAL, request(&text, 8));
    let server = Server::start(&path, USUAL);
    server.control.not_finite_at(3);
    let (_, last) = collect(&mut server.engine.submit(request(&text, 8)).unwrap());
    assert!(matches!(last, Event::Failed(_)), "{last:?}");
    assert_eq!(server.engine.stats().disk.hits, 1);
    assert_eq!(server.answer(request(&text, 8)), (expected(&text, 8), 0), "it is computed again");
    server.stop();
    let again = answer_alone(&path, USUAL, request(&text, 8));
    assert_eq!(again, (expected(&text, 8), 148), "and then stored again");
}

#[test]
fn a_store_that_cannot_write_changes_no_answer() {
    let folder = tempfile::tempdir().unwrap();
    // No entry fits.
    let server = Server::start(&folder.path().join("kv"), Options { max_bytes: 100, ..USUAL });
    let text = prompt(90, 3);
    assert_eq!(server.answer(request(&text, 8)).0, expected(&text, 8));
    wait_until("dropped entries", || server.engine.stats().disk.lost_entries > 0);
    server.stop();
}

/// Random conversations with restarts, losses, damage, images, salts and too little room on the disk.
#[test]
fn random_conversations_are_answered_as_without_a_disk() {
    let seed = 0xd15c;
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut hits = 0;
    for with_draft in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kv");
        let mut texts: Vec<(Vec<u32>, Vec<PromptImage>)> = vec![(prompt(5, 0), Vec::new())];
        for _ in 0..30 {
            let max_bytes = if rng.random_bool(0.3) { 30_000 } else { PLENTY };
            let server = Server::start(&path, Options { max_bytes, with_draft, ..USUAL });
            if rng.random_bool(0.2) {
                server.control.fail_wait_at(rng.random_range(0..20));
            }
            let mut running = Vec::new();
            for _ in 0..rng.random_range(1..8) {
                let (mut ids, mut images) = texts[rng.random_range(0..texts.len())].clone();
                let len = rng.random_range(1..40);
                ids.extend((0..len).map(|_| rng.random_range(0..90)));
                let last = images.last().map_or(0, |image: &PromptImage| image.positions.end);
                if ids.len() > last + 8 && rng.random_bool(0.2) {
                    let start = rng.random_range(last..ids.len() - 7);
                    images.push(image_at(start, 6, rng.random_range(0..3)));
                    ids[start..start + 6].fill(7);
                }
                ids.truncate(150);
                images.retain(|image| image.positions.end < ids.len());
                let salt = CacheSalt::new([b'a' + rng.random_range(0..2)]);
                let priority =
                    if rng.random_bool(0.3) { Priority::Background } else { Priority::Interactive };
                let asked =
                    Request { images: images.clone(), cache_salt: salt, priority, ..request(&ids, 12) };
                running.push((server.engine.submit(asked).unwrap(), ids, images));
            }
            for (mut stream, ids, images) in running {
                let (answer, last) = collect(&mut stream);
                let seen = seen(&ids, &images, limits().vocab_size);
                assert_eq!(answer, expected(&seen, 12), "{last:?}");
                texts.push((ids, images));
                if texts.len() > 12 {
                    texts.remove(rng.random_range(0..12));
                }
            }
            hits += server.engine.stats().disk.hits;
            server.stop();
        }
    }
    println!("{hits} hits");
    assert!(hits > 20, "too few hits: {hits}");
}
