//! Several models in one server: which of them are loaded, who waits, and who answers.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::{Request, StatusCode, header};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use unicorn::api::{self, AccessPolicy, Server};
use unicorn::engine::{Engine, EngineConfig, EngineState, KeepAlive};
use unicorn::library::{
    Library, LibraryError, Listed, Loaded, Loader, Model, ModelNames, ModelReport, PullReport, PullStep,
    Store, StoreError, Turns,
};
use unicorn::model::Limits;
use unicorn::session::Service;
use unicorn::text::CallFormat;

use crate::support::app::{DEFAULTS, END_OF_TURN, OPTIONS, limits};
use crate::support::fake_runner::{Control, FakeFactory, FakeRunner, Script, kv_with, says};
use crate::support::http::{get, post, post_to, send, send_json};
use crate::support::server::report;
use crate::support::tokenizers::{gemma_template, tokenizer};
use crate::support::waits::{until, wait_until};

/// The device memory of the tests, and what most models take of it.
const BUDGET: u64 = 200 * MIB;
const HALF: u64 = 100 * MIB;
const MIB: u64 = 1 << 20;

const TURNS: Turns = Turns {
    settle: Duration::from_millis(5),
    patience: Duration::from_millis(100),
    longest: Duration::from_secs(20),
    retry: Duration::ZERO,
    unload: Duration::from_secs(60),
    queue: 64,
    queue_of_one: 64,
};

/// What all models of a test hold on their device.
#[derive(Default)]
struct Device {
    held: AtomicU64,
    most: AtomicU64,
}

/// The memory of one runner, freed when the runner is dropped.
struct Held(Arc<Device>, u64);

impl Held {
    fn new(device: &Arc<Device>, bytes: u64) -> Self {
        let now = device.held.fetch_add(bytes, Ordering::SeqCst) + bytes;
        device.most.fetch_max(now, Ordering::SeqCst);
        Self(Arc::clone(device), bytes)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.held.fetch_sub(self.1, Ordering::SeqCst);
    }
}

/// A model that answers everything with its own text.
struct FakeModel {
    text: String,
    bytes: u64,
    device: Arc<Device>,
    loads: AtomicUsize,
    /// How long a load takes, in milliseconds.
    load_ms: AtomicU64,
    fails: AtomicBool,
    /// A load does not end.
    is_held: AtomicBool,
    panics: AtomicBool,
    control: Mutex<Option<Control>>,
}

impl FakeModel {
    fn new(device: &Arc<Device>, text: &str, bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            text: text.into(),
            bytes,
            device: Arc::clone(device),
            loads: AtomicUsize::new(0),
            load_ms: AtomicU64::new(0),
            fails: AtomicBool::new(false),
            is_held: AtomicBool::new(false),
            panics: AtomicBool::new(false),
            control: Mutex::default(),
        })
    }

    fn runner(&self) -> (Box<FakeRunner>, Control) {
        let ids = tokenizer().encode(&self.text, false).expect("encodes");
        let (mut says, held) = (says(&ids, END_OF_TURN), Held::new(&self.device, self.bytes));
        let script: Script = Box::new(move |tokens, draw| {
            let _ = &held;
            says(tokens, draw)
        });
        FakeRunner::new(Limits { max_sequences: 2, kv: kv_with(400, 64), ..limits() }, script)
    }

    /// The control of the model's runners. Panics before the first load.
    fn control(&self) -> Control {
        self.control.lock().expect("no panic").clone().expect("the model was loaded")
    }
}

struct FakeLoader(Arc<FakeModel>);

impl Loader for FakeLoader {
    fn plan(&self, budget: u64) -> Result<u64, String> {
        let bytes = self.0.bytes;
        if bytes > budget {
            return Err(format!("it takes {} of {} MiB", bytes / MIB, budget / MIB));
        }
        Ok(bytes)
    }

    fn load(&self) -> Result<Loaded, String> {
        self.0.loads.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(self.0.load_ms.load(Ordering::SeqCst)));
        wait_until("the load may end", || !self.0.is_held.load(Ordering::SeqCst));
        assert!(!self.0.panics.load(Ordering::SeqCst), "a test's panic");
        if self.0.fails.load(Ordering::SeqCst) {
            return Err("the disk is broken".into());
        }
        let (runner, control) = self.0.runner();
        *self.0.control.lock().expect("no panic") = Some(control.clone());
        let of_factory = Arc::clone(&self.0);
        let factory = FakeFactory::new(&control, move || {
            of_factory.loads.fetch_add(1, Ordering::SeqCst);
            of_factory.runner().0
        });
        let config = EngineConfig { queue: 64, ..EngineConfig::default() };
        let engine = Engine::start_recoverable(runner, factory, Arc::default(), config);
        let (tokenizer, template) = (tokenizer(), gemma_template());
        let calls = CallFormat::of(&template, &tokenizer);
        let service = Service::new(engine, tokenizer, template, calls, DEFAULTS, vec![1, END_OF_TURN]);
        let mut report: ModelReport = report();
        report.device.usable_bytes = BUDGET;
        report.device.placements.truncate(1);
        report.device.placements[0].bytes = self.0.bytes;
        Ok(Loaded { service, report })
    }
}

struct App {
    router: Router,
    server: Arc<Server>,
    device: Arc<Device>,
    models: Vec<Arc<FakeModel>>,
}

/// A server with models `a`, `b`, ..., which answer with these texts and take these bytes.
fn app(texts: &[(&str, u64)], turns: Turns, pinned: &[usize]) -> App {
    let device = Arc::new(Device::default());
    let models: Vec<_> = texts.iter().map(|(text, bytes)| FakeModel::new(&device, text, *bytes)).collect();
    let served = models.iter().enumerate().map(|(i, model)| {
        let names = ModelNames { id: id(i), aliases: vec![format!("alias-{}", id(i))], any: false };
        let loader: Box<dyn Loader> = Box::new(FakeLoader(Arc::clone(model)));
        (Arc::new(Model::new(names).pinned(pinned.contains(&i))), loader)
    });
    let library = Library::of_several(served, false, turns);
    let server = Server::new(library, OPTIONS, AccessPolicy::default());
    App { router: api::router(Arc::clone(&server)), server, device, models }
}

fn id(i: usize) -> String {
    char::from(b'a' + i as u8).to_string()
}

fn chat(model: &str) -> Value {
    json!({"model": model, "messages": [{"role": "user", "content": "Who are you?"}]})
}

async fn ask(router: &Router, model: &str) -> (StatusCode, Value) {
    let (status, _, answer) = send_json(router, post(chat(model).to_string())).await;
    (status, answer)
}

/// The text of an answer, which must be of the model `id`.
async fn text(router: &Router, model: &str, id: &str) -> String {
    let (status, answer) = ask(router, model).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["model"], id);
    answer["choices"][0]["message"]["content"].as_str().expect("a text").to_owned()
}

/// The state of each model in `/v1/models`, by its id.
async fn states(router: &Router) -> Vec<String> {
    let (_, _, list) = send_json(router, get("/v1/models")).await;
    let models = list["data"].as_array().expect("a list").iter();
    let ids = models.filter(|model| model["id"] == model["display_name"]);
    ids.map(|model| model["status"]["value"].as_str().expect("a text").to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_is_loaded_for_its_first_request_and_the_longest_idle_one_leaves() {
    let app = app(&[("ant", HALF), ("bee", HALF), ("cat", HALF)], TURNS, &[]);
    // All loads take as long, and each model is idle for clearly longer than the next one.
    app.models.iter().for_each(|model| model.load_ms.store(100, Ordering::SeqCst));
    let idle = || tokio::time::sleep(Duration::from_millis(500));
    assert_eq!(states(&app.router).await, ["unloaded", "unloaded", "unloaded"]);
    let (status, _, health) = send_json(&app.router, get("/health")).await;
    assert!(status == 200 && health["status"] == "unloaded", "{status} {health}");

    assert_eq!(text(&app.router, "a", "a").await, "ant");
    idle().await;
    assert_eq!(text(&app.router, "alias-b", "b").await, "bee");
    assert_eq!(text(&app.router, "b:latest", "b").await, "bee");
    assert_eq!(states(&app.router).await, ["loaded", "loaded", "unloaded"]);
    assert_eq!(text(&app.router, "c", "c").await, "cat");
    assert_eq!(
        states(&app.router).await,
        ["unloaded", "loaded", "loaded"],
        "`a` was idle for the longest time"
    );
    idle().await;
    assert_eq!(text(&app.router, "c", "c").await, "cat");
    // The engine of `a` loads it again.
    assert_eq!(text(&app.router, "a", "a").await, "ant");
    assert_eq!(states(&app.router).await, ["loaded", "unloaded", "loaded"]);
    let loads: Vec<_> = app.models.iter().map(|model| model.loads.load(Ordering::SeqCst)).collect();
    assert_eq!(loads, [2, 1, 1]);
    assert_eq!(app.device.held.load(Ordering::SeqCst), 2 * HALF);
    assert_eq!(app.device.most.load(Ordering::SeqCst), BUDGET, "the models that leave are unloaded first");

    let (_, _, status) = send_json(&app.router, get("/status")).await;
    let held: Vec<_> = status["models"].as_array().expect("a list").iter().map(|m| &m["bytes"]).collect();
    assert_eq!(held, [HALF, 0, HALF]);
    let (status, answer) = ask(&app.router, "d").await;
    assert_eq!(status, 404);
    assert!(answer["error"]["message"].as_str().expect("a text").contains("\"a, b, c\""), "{answer}");
    // A request without a model means the first.
    let body = json!({"messages": [{"role": "user", "content": "Hello"}]}).to_string();
    assert_eq!(send_json(&app.router, post(body)).await.2["model"], "a");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_loads_the_model_that_it_names_and_unloads_only_that() {
    let app = app(&[("ant", HALF), ("bee", HALF), ("cat", HALF)], TURNS, &[]);
    let models = ["c", "b", "a", "c", "b"];
    let bodies = [
        ("/tokenize", json!({"content": "x"})),
        ("/v1/embeddings", json!({"input": "x"})),
        ("/v1/messages/count_tokens", json!({"messages": [{"role": "user", "content": "x"}]})),
        ("/api/embed", json!({"input": "x"})),
        ("/models/load", json!({})),
    ];
    for (model, (path, body)) in models.into_iter().zip(bodies) {
        let mut body = body;
        body["model"] = model.into();
        let (status, _, answer) = send_json(&app.router, post_to(path, body.to_string())).await;
        assert_eq!(status, 200, "{path}: {answer}");
        let index = usize::from(model.as_bytes()[0] - b'a');
        assert_eq!(states(&app.router).await[index], "loaded", "{path}");
    }
    // A request to unload loads nothing. One of the models is not loaded now.
    assert_eq!(states(&app.router).await.iter().filter(|state| *state == "loaded").count(), 2);
    let loads = || app.models.iter().map(|model| model.loads.load(Ordering::SeqCst)).sum::<usize>();
    let before = loads();
    for model in ["a", "b"] {
        let body = json!({"model": model}).to_string();
        assert_eq!(send_json(&app.router, post_to("/models/unload", body)).await.0, 200);
    }
    let unload = json!({"model": "c", "keep_alive": 0}).to_string();
    assert_eq!(send_json(&app.router, post_to("/api/generate", unload)).await.2["done_reason"], "unload");
    until("all memory is free", || app.device.held.load(Ordering::SeqCst) == 0).await;
    assert_eq!(states(&app.router).await, ["unloaded"; 3]);
    assert_eq!(loads(), before);
    let (_, _, running) = send_json(&app.router, get("/api/ps")).await;
    assert_eq!(running["models"], json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn busy_and_pinned_models_keep_their_memory_and_the_error_names_them() {
    let turns = Turns { longest: Duration::from_millis(300), ..TURNS };
    let app = app(&[("ant", HALF), ("bee", HALF), ("cat", HALF), ("dog", 2 * BUDGET)], turns, &[0]);
    assert_eq!(text(&app.router, "a", "a").await, "ant");
    assert_eq!(text(&app.router, "b", "b").await, "bee");
    // The next answer of `b` does not end.
    app.models[1].control().allow(0);
    let router = app.router.clone();
    let busy = tokio::spawn(async move { text(&router, "b", "b").await });
    until("the request runs", || app.server.library().engines()[1].stats().running > 0).await;
    let (status, answer) = ask(&app.router, "c").await;
    assert_eq!((status.as_u16(), &answer["error"]["code"]), (503, &json!("no_room")), "{answer}");
    let message = answer["error"]["message"].as_str().expect("a text");
    assert!(message.contains("it takes 100 MiB of 200 MiB, and \"a\" holds 100 MiB, pinned; \"b\" holds 100 MiB, used by 1 request;"), "{message}");
    // A model that waited for long in vain does not stop the others for ever.
    assert_eq!(text(&app.router, "a", "a").await, "ant");
    app.models[1].control().release();
    assert_eq!(busy.await.expect("no panic"), "bee");
    assert_eq!(text(&app.router, "c", "c").await, "cat");
    assert_eq!(states(&app.router).await[..3], ["loaded", "unloaded", "loaded"]);

    let (status, answer) = ask(&app.router, "d").await;
    assert_eq!((status.as_u16(), &answer["error"]["code"]), (503, &json!("load_failed")), "{answer}");
    let message = answer["error"]["message"].as_str().expect("a text");
    assert!(message.contains("it takes 400 of 200 MiB"), "{message}");
    assert_eq!(
        states(&app.router).await[..3],
        ["loaded", "unloaded", "loaded"],
        "nothing was unloaded for it"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_load_fails_the_requests_that_wait_and_the_next_one_tries_again() {
    let app = app(&[("ant", HALF), ("bee", HALF)], TURNS, &[]);
    app.models[0].fails.store(true, Ordering::SeqCst);
    let (status, answer) = ask(&app.router, "a").await;
    assert_eq!((status.as_u16(), &answer["error"]["code"]), (503, &json!("load_failed")), "{answer}");
    assert!(answer["error"]["message"].as_str().expect("a text").contains("the disk is broken"), "{answer}");
    app.models[0].fails.store(false, Ordering::SeqCst);
    assert_eq!(text(&app.router, "a", "a").await, "ant");

    // The engine of `a` is lost for good, and the next request starts another one.
    app.models[0].control().fail_starts();
    app.models[0].control().fail_probes();
    app.server.library().engines()[0].probe();
    until("the engine ends", || {
        app.server.library().engines().first().is_none_or(|engine| engine.ended().is_some())
    })
    .await;
    // It may still hold its memory. The request waits until that is free.
    assert_eq!(text(&app.router, "a", "a").await, "ant");
    assert_eq!(app.device.held.load(Ordering::SeqCst), HALF);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_memory_of_an_engine_that_does_not_end_counts_until_it_does() {
    let turns = Turns { unload: Duration::from_millis(100), ..TURNS };
    let most = 3 * BUDGET / 4;
    let app = app(&[("ant", most), ("bee", most)], turns, &[]);
    assert_eq!(text(&app.router, "a", "a").await, "ant");
    let hung = app.models[0].control();
    hung.hold_drop(true);
    let (status, answer) = ask(&app.router, "b").await;
    assert_eq!((status.as_u16(), &answer["error"]["code"]), (503, &json!("load_failed")), "{answer}");
    let message = answer["error"]["message"].as_str().expect("a text");
    assert!(message.contains("\"a\" was unloaded for it") && message.contains("does not end"), "{message}");
    let (status, answer) = ask(&app.router, "a").await;
    assert!(status == 503 && answer.to_string().contains("does not end"), "{answer}");
    assert_eq!(app.models[1].loads.load(Ordering::SeqCst), 0, "its memory is not free");

    hung.hold_drop(false);
    assert_eq!(text(&app.router, "b", "b").await, "bee");
    assert_eq!(text(&app.router, "a", "a").await, "ant");
    assert_eq!(app.device.most.load(Ordering::SeqCst), most);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_its_engine_loaded_for_a_client_that_left_counts_as_loaded() {
    let most = 3 * BUDGET / 4;
    let app = app(&[("ant", most), ("bee", most)], TURNS, &[]);
    assert_eq!(text(&app.router, "a", "a").await, "ant");
    let engine = app.server.library().engines().remove(0);
    engine.unload().expect("the engine runs");
    until("it is unloaded", || engine.state() == EngineState::Unloaded).await;
    assert_eq!(states(&app.router).await, ["unloaded", "unloaded"]);
    let loaded = engine.load(KeepAlive::Configured).expect("the engine runs").recv().await;
    assert_eq!(loaded, Some(()));
    assert_eq!(states(&app.router).await, ["loaded", "unloaded"]);
    assert_eq!(text(&app.router, "b", "b").await, "bee");
    assert_eq!(app.device.most.load(Ordering::SeqCst), most, "`a` was unloaded first");
}

#[tokio::test(flavor = "multi_thread")]
async fn after_the_end_was_requested_no_model_is_loaded() {
    let app = app(&[("ant", HALF), ("bee", HALF)], TURNS, &[]);
    assert_eq!(text(&app.router, "a", "a").await, "ant");
    app.server.library().drain();
    for model in ["a", "b"] {
        let (status, answer) = ask(&app.router, model).await;
        assert_eq!((status.as_u16(), &answer["error"]["code"]), (503, &json!("shutting_down")), "{answer}");
    }
    assert_eq!(app.models[1].loads.load(Ordering::SeqCst), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_pinned_ones_leave_no_room_for_is_refused_at_once() {
    let app = app(&[("ant", HALF), ("bee", HALF + MIB), ("cat", HALF)], TURNS, &[0]);
    assert_eq!(text(&app.router, "a", "a").await, "ant");
    let (status, answer) = ask(&app.router, "b").await;
    assert_eq!((status.as_u16(), &answer["error"]["code"]), (503, &json!("no_room")), "{answer}");
    assert_eq!(text(&app.router, "c", "c").await, "cat");
    assert_eq!(states(&app.router).await, ["loaded", "unloaded", "loaded"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_answers_the_request_that_it_was_loaded_for_before_it_leaves() {
    let app = app(&[("ant", BUDGET), ("bee", BUDGET)], TURNS, &[]);
    for model in &app.models {
        // Longer than the patience of the request for the other model.
        model.load_ms.store(2 * TURNS.patience.as_millis() as u64, Ordering::SeqCst);
    }
    let (a, b) = tokio::join!(text(&app.router, "a", "a"), text(&app.router, "b", "b"));
    assert_eq!([a, b], ["ant", "bee"]);
    let loads: Vec<_> = app.models.iter().map(|model| model.loads.load(Ordering::SeqCst)).collect();
    assert_eq!(loads, [1, 1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_leave_and_loads_that_panic_leave_nothing_behind() {
    let app = app(&[("ant", BUDGET), ("bee", BUDGET)], TURNS, &[]);
    app.models[0].load_ms.store(1000, Ordering::SeqCst);
    let router = app.router.clone();
    let asking = tokio::spawn(async move { ask(&router, "a").await });
    until("the load begins", || app.models[0].loads.load(Ordering::SeqCst) > 0).await;
    assert_eq!(app.server.library().waiting(0), 1);
    asking.abort();
    assert!(asking.await.expect_err("it was aborted").is_cancelled());
    assert_eq!(app.server.library().waiting(0), 0);
    // The load continues, and the model can leave, because no request uses it.
    assert_eq!(text(&app.router, "b", "b").await, "bee");
    assert_eq!(app.models[0].loads.load(Ordering::SeqCst), 1);

    app.models[0].panics.store(true, Ordering::SeqCst);
    app.server.library().engines()[0].abort();
    let (status, answer) = ask(&app.router, "a").await;
    assert_eq!((status.as_u16(), &answer["error"]["code"]), (503, &json!("load_failed")), "{answer}");
    app.models[0].panics.store(false, Ordering::SeqCst);
    assert_eq!(text(&app.router, "a", "a").await, "ant");
    assert_eq!(app.device.held.load(Ordering::SeqCst), BUDGET);
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_requests_are_bounded_and_failed_loads_are_not_repeated_at_once() {
    let turns = Turns { queue: 3, queue_of_one: 2, retry: Duration::from_secs(60), ..TURNS };
    let app = app(&[("ant", BUDGET), ("bee", BUDGET)], turns, &[]);
    app.models[0].load_ms.store(2000, Ordering::SeqCst);
    app.models[0].fails.store(true, Ordering::SeqCst);
    let asked: Vec<_> = (0..2)
        .map(|_| {
            let router = app.router.clone();
            tokio::spawn(async move { ask(&router, "a").await })
        })
        .collect();
    until("two requests wait", || app.server.library().waiting(0) == 2).await;
    let (status, answer) = ask(&app.router, "b").await;
    assert_eq!((status.as_u16(), &answer["error"]["code"]), (429, &json!("queue_full")), "{answer}");
    for asked in asked {
        assert_eq!(asked.await.expect("no panic").0, 503);
    }
    let (status, answer) = ask(&app.router, "a").await;
    assert_eq!((status.as_u16(), &answer["error"]["code"]), (503, &json!("load_failed")), "{answer}");
    assert_eq!(app.models[0].loads.load(Ordering::SeqCst), 1);
    assert_eq!(text(&app.router, "b", "b").await, "bee");
}

/// A load may measure the device, so that a probe of another model would have to wait.
#[tokio::test(flavor = "multi_thread")]
async fn health_needs_no_probe_while_a_model_is_loaded() {
    const STALE: Duration = Duration::from_millis(5100);
    let app = app(&[("ant", HALF), ("bee", HALF)], TURNS, &[]);
    assert_eq!(text(&app.router, "a", "a").await, "ant");
    let control = app.models[0].control();
    control.hold_probes(true);
    tokio::time::sleep(STALE).await;
    app.models[1].is_held.store(true, Ordering::SeqCst);
    let router = app.router.clone();
    let asked = tokio::spawn(async move { text(&router, "b", "b").await });
    until("the load begins", || app.models[1].loads.load(Ordering::SeqCst) > 0).await;
    let (status, _, health) = send_json(&app.router, get("/health")).await;
    assert!(status == 200 && health["status"] == "ok", "{status} {health}");
    assert_eq!(control.probes(), 0);
    control.hold_probes(false);
    app.models[1].is_held.store(false, Ordering::SeqCst);
    assert_eq!(asked.await.expect("no panic"), "bee");
}

/// Sixteen clients, each with its own order of models, on memory for two of five.
#[tokio::test(flavor = "multi_thread")]
async fn many_clients_of_many_models_get_the_right_answers_within_the_memory() {
    let texts = [("ant", HALF), ("bee", HALF), ("cat", 60 * MIB), ("dog", 40 * MIB), ("eel", BUDGET)];
    let app = app(&texts, TURNS, &[]);
    let clients = (0..16).map(|client| {
        let router = app.router.clone();
        tokio::spawn(async move {
            let mut rng = ChaCha8Rng::seed_from_u64(client);
            for _ in 0..8 {
                let i = rng.random_range(0..5);
                assert_eq!(text(&router, &id(i), &id(i)).await, texts[i].0);
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.expect("no panic");
    }
    assert!(app.device.most.load(Ordering::SeqCst) <= BUDGET, "the models never had more than the memory");
    let swaps: usize = app.models.iter().map(|model| model.loads.load(Ordering::SeqCst)).sum();
    assert!(swaps < 16 * 8 / 2, "{swaps} loads for {} requests", 16 * 8);
}

/// A stream of each format, from the beginning of its model's load.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_begins_with_the_load_of_its_model_and_ends_with_the_loads_error() {
    let app = app(&[("ant", BUDGET), ("bee", BUDGET), ("cat", BUDGET), ("dog", BUDGET)], TURNS, &[]);
    app.models.iter().for_each(|model| model.load_ms.store(400, Ordering::SeqCst));
    let body = |path: &str, model: &str| {
        let mut body = match path {
            "/v1/completions" => json!({"prompt": "Hello"}),
            "/v1/responses" => json!({"input": "Hello"}),
            _ => json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}),
        };
        body["model"] = model.into();
        body["stream"] = true.into();
        body.to_string()
    };
    let text_of = async |path: &str, model: &str| {
        let (status, headers, bytes) = send(&app.router, post_to(path, body(path, model))).await;
        (status.as_u16(), headers, String::from_utf8(bytes).expect("UTF-8"))
    };
    let routes = [
        ("/v1/chat/completions", "[DONE]", "load_failed"),
        ("/v1/completions", "[DONE]", "load_failed"),
        ("/v1/messages", "message_stop", "the disk is broken"),
        ("/v1/responses", "response.completed", "the disk is broken"),
    ];
    for (i, (path, end, _)) in routes.into_iter().enumerate() {
        let model = id(i);
        let (status, headers, text) = text_of(path, &model).await;
        assert_eq!((status, &headers[header::CONTENT_TYPE]), (200, &"text/event-stream".parse().unwrap()));
        let comment = format!(": loading \"{model}\": waiting\n\n");
        assert!(text.starts_with(&comment) && text.contains(end), "{path}: {text}");
        assert!(!text.contains("error\":{"), "{path}: {text}");
        // The model is loaded: no comment.
        let (_, _, text) = text_of(path, &model).await;
        assert!(!text.contains("loading") && text.contains(end), "{path}: {text}");
    }
    app.models[0].fails.store(true, Ordering::SeqCst);
    app.server.library().engines()[0].abort();
    for (path, _, part) in routes {
        let (status, _, text) = text_of(path, "a").await;
        assert!(status == 200 && text.starts_with(": loading") && text.contains(part), "{path}: {text}");
    }
    // Lines of JSON have no comments, so the status can tell.
    for path in ["/api/chat", "/api/generate"] {
        assert_eq!(text_of(path, "a").await.0, 503, "{path}");
    }
    // Neither has an answer that is not streamed.
    assert_eq!(ask(&app.router, "a").await.0, 503);
}

/// A model with the id `x` that is not in a library yet.
fn listed(model: &Arc<FakeModel>) -> Listed {
    Listed::New(Arc::new(Model::new("x".into())), Box::new(FakeLoader(Arc::clone(model))))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_leaves_the_list_answers_its_requests_and_is_then_unloaded() {
    let app = app(&[("ant", HALF), ("bee", HALF)], TURNS, &[]);
    let library = app.server.library();
    assert_eq!(text(&app.router, "a", "a").await, "ant");
    assert_eq!(text(&app.router, "b", "b").await, "bee");
    let control = app.models[0].control();
    control.allow(0);
    let router = app.router.clone();
    let asked = tokio::spawn(async move { text(&router, "a", "a").await });
    until("the request runs", || app.server.library().engines()[0].stats().running > 0).await;

    // The second model becomes the first, and a new one is the second.
    let fox = FakeModel::new(&app.device, "fox", HALF);
    assert_eq!(library.replace(vec![Listed::Kept(1), listed(&fox)]), [1, 2]);
    assert_eq!(states(&app.router).await, ["loaded", "unloaded"]);
    let (status, answer) = ask(&app.router, "a").await;
    assert_eq!((status.as_u16(), &answer["error"]["code"]), (404, &json!("model_not_found")), "{answer}");
    let body = json!({"messages": [{"role": "user", "content": "Hello"}]}).to_string();
    assert_eq!(send_json(&app.router, post(body)).await.2["model"], "b");
    assert_eq!(app.device.held.load(Ordering::SeqCst), BUDGET, "`a` still answers");
    control.release();
    assert_eq!(asked.await.expect("no panic"), "ant");
    until("the memory of one model is free", || app.device.held.load(Ordering::SeqCst) <= HALF).await;
    assert_eq!(text(&app.router, "x", "x").await, "fox");
    assert_eq!(states(&app.router).await, ["loaded", "loaded"]);
    assert_eq!(app.models[1].loads.load(Ordering::SeqCst), 1, "`b` stayed loaded");
    assert!(library.engines().len() == 2, "the engine of `a` has ended");

    // A request that found the model before it left the list.
    library.replace(vec![Listed::Kept(1)]);
    until("the memory of one model is free", || app.device.held.load(Ordering::SeqCst) <= HALF).await;
    let gone = library.admit(2, 0).await.err();
    assert_eq!(gone, Some(LibraryError::Gone("x".into())));
    assert_eq!(fox.loads.load(Ordering::SeqCst), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_waits_for_a_replaced_model_is_answered_by_its_successor() {
    let app = app(&[("ant", BUDGET), ("bee", BUDGET)], TURNS, &[]);
    assert_eq!(text(&app.router, "a", "a").await, "ant");
    app.models[0].control().allow(0);
    let asking = |model: &'static str| {
        let router = app.router.clone();
        tokio::spawn(async move { ask(&router, model).await })
    };
    let (busy, waiting, leaving) = (asking("a"), asking("b"), asking("alias-b"));
    let library = app.server.library();
    until("two requests wait", || library.waiting(1) == 2).await;
    let bug = FakeModel::new(&app.device, "bug", HALF);
    let successor = Listed::New(Arc::new(Model::new("b".into())), Box::new(FakeLoader(Arc::clone(&bug))));
    assert_eq!(library.replace(vec![Listed::Kept(0), successor]), [0, 2]);
    // The successor has the name, and no alias.
    assert_eq!(leaving.await.expect("no panic").0, 404);
    app.models[0].control().release();
    let (status, answer) = waiting.await.expect("no panic");
    assert_eq!(
        (status.as_u16(), &answer["choices"][0]["message"]["content"]),
        (200, &json!("bug")),
        "{answer}"
    );
    assert_eq!(busy.await.expect("no panic").0, 200);
    assert_eq!(app.models[1].loads.load(Ordering::SeqCst), 0);
}

/// Pulls `new`, in as many steps as its file has bytes.
struct FakeStore {
    model: Arc<FakeModel>,
    bytes: u64,
    downloads: Arc<Downloads>,
}

#[derive(Default)]
struct Downloads {
    begun: AtomicUsize,
    stopped: AtomicUsize,
}

impl Store for FakeStore {
    fn is_on(&self) -> bool {
        true
    }

    fn pull(
        &self,
        library: &Library,
        name: &str,
        known: Option<usize>,
        report: &mut PullReport<'_>,
    ) -> Result<(), StoreError> {
        if name != "new" {
            return Err(StoreError::NotFound(format!("there is no {name:?}")));
        }
        report(PullStep::List);
        self.downloads.begun.fetch_add(1, Ordering::SeqCst);
        let (path, digest, total) = ("model.gguf", "sha256:00", self.bytes);
        for completed in 0..=total {
            if !report(PullStep::File { path, digest, total, completed }) {
                self.downloads.stopped.fetch_add(1, Ordering::SeqCst);
                return Err(StoreError::Hub("stopped".into()));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        report(PullStep::Add);
        if known.is_none() {
            let model = Arc::new(Model::new("new".into()));
            library.replace(vec![
                Listed::Kept(0),
                Listed::New(model, Box::new(FakeLoader(Arc::clone(&self.model)))),
            ]);
        }
        Ok(())
    }

    fn check_delete(&self, index: usize) -> Result<(), StoreError> {
        match index {
            0 => Err(StoreError::Conflict("it is in the configuration".into())),
            _ => Ok(()),
        }
    }

    fn delete(&self, library: &Library, index: usize) -> Result<(), StoreError> {
        self.check_delete(index)?;
        library.replace(vec![Listed::Kept(0)]);
        Ok(())
    }
}

fn with_store(bytes: u64) -> (Router, Arc<Downloads>) {
    let (device, downloads) = (Arc::new(Device::default()), Arc::<Downloads>::default());
    let [ant, new] = ["ant", "new"].map(|text| FakeModel::new(&device, text, HALF));
    let loader: Box<dyn Loader> = Box::new(FakeLoader(ant));
    let library = Library::of_several([(Arc::new(Model::new("a".into())), loader)], false, TURNS)
        .with_store(FakeStore { model: new, bytes, downloads: Arc::clone(&downloads) });
    (api::router(Server::new(library, OPTIONS, AccessPolicy::default())), downloads)
}

/// A request from `address`, and of a page of `origin`.
fn from(mut request: Request<Body>, address: &str, origin: Option<&str>) -> Request<Body> {
    let address: SocketAddr = format!("{address}:5000").parse().expect("an address");
    request.extensions_mut().insert(ConnectInfo(address));
    if let Some(origin) = origin {
        request.headers_mut().insert(header::ORIGIN, origin.parse().expect("an origin"));
    }
    request
}

fn delete(model: &str) -> Request<Body> {
    let mut request = post_to("/api/delete", json!({"model": model}).to_string());
    *request.method_mut() = "DELETE".parse().expect("a method");
    request
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pull_reports_its_progress_and_the_model_answers_until_it_is_deleted() {
    let (router, _) = with_store(40);
    let pull = |body: Value| from(post_to("/api/pull", body.to_string()), "127.0.0.1", None);
    let (status, headers, bytes) = send(&router, pull(json!({"model": "new"}))).await;
    assert_eq!(
        (status.as_u16(), &headers[header::CONTENT_TYPE]),
        (200, &"application/x-ndjson".parse().unwrap())
    );
    let text_of = String::from_utf8(bytes).expect("UTF-8");
    let lines: Vec<Value> = text_of.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    assert_eq!(lines[0], json!({"status": "pulling manifest"}));
    let file = json!({"status": "pulling model.gguf", "digest": "sha256:00", "total": 40, "completed": 40});
    assert_eq!(
        lines[lines.len() - 3..],
        [file, json!({"status": "writing manifest"}), json!({"status": "success"})]
    );
    assert!(lines.len() < 20, "progress is not reported for every byte: {text_of}");
    assert_eq!(text(&router, "new", "new").await, "new");
    let (status, _, answer) = send_json(&router, pull(json!({"model": "new", "stream": false}))).await;
    assert_eq!((status.as_u16(), answer), (200, json!({"status": "success"})));

    let failed = pull(json!({"model": "other", "stream": false}));
    let (status, _, answer) = send_json(&router, failed).await;
    assert_eq!((status.as_u16(), answer), (404, json!({"error": "there is no \"other\""})));
    let (status, _, bytes) = send(&router, pull(json!({"model": "other"}))).await;
    let text_of = String::from_utf8(bytes).expect("UTF-8");
    assert!(status == 200 && text_of.lines().last().expect("a line").contains("{\"error\":"), "{text_of}");

    let (status, _, answer) = send_json(&router, from(delete("a"), "127.0.0.1", None)).await;
    assert!(
        status == 409 && answer["error"].as_str().is_some_and(|e| e.contains("configuration")),
        "{answer}"
    );
    let (status, _, body) = send(&router, from(delete("new"), "127.0.0.1", None)).await;
    assert_eq!((status.as_u16(), body.len()), (200, 0));
    assert_eq!(ask(&router, "new").await.0, 404);
    let (status, _, answer) = send_json(&router, from(delete("new"), "127.0.0.1", None)).await;
    assert_eq!((status.as_u16(), answer), (404, json!({"error": "model 'new' not found"})));
}

#[tokio::test(flavor = "multi_thread")]
async fn only_programs_of_this_machine_and_keys_pull_and_delete() {
    let (router, _) = with_store(1);
    for name in ["x-forwarded-for", "via", "forwarded", "x-real-ip", "sec-fetch-site"] {
        let mut request = from(delete("a"), "127.0.0.1", None);
        request.headers_mut().insert(name, "x".parse().expect("a value"));
        assert_eq!(send(&router, request).await.0, 403, "a proxy or a page: {name}");
    }
    let pull = |model: &str| post_to("/api/pull", json!({"model": model, "stream": false}).to_string());
    let page = Some("http://127.0.0.1:8010");
    for (address, origin) in [("192.168.0.7", None), ("127.0.0.1", page), ("[::ffff:10.0.0.1]", None)] {
        for request in [pull("new"), delete("a")] {
            let mut request = from(request, address, origin);
            request.headers_mut().insert(header::HOST, "127.0.0.1:8010".parse().expect("a host"));
            let (status, _, answer) = send_json(&router, request).await;
            assert!(
                status == 403 && answer["error"].as_str().is_some_and(|e| e.contains("API key")),
                "{answer}"
            );
        }
        // A served model needs no download.
        if origin.is_none() {
            let (status, _, answer) = send_json(&router, from(pull("a"), address, None)).await;
            assert_eq!((status.as_u16(), answer), (200, json!({"status": "success"})));
        }
    }
    for address in ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]"] {
        assert_eq!(send_json(&router, from(pull("new"), address, None)).await.0, 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_download_stops_when_its_client_is_gone() {
    let (router, downloads) = with_store(1 << 40);
    for (number, stream) in [(1, true), (2, false)] {
        let body = json!({"model": "new", "stream": stream}).to_string();
        let request = from(post_to("/api/pull", body), "127.0.0.1", None);
        let asked = tokio::spawn({
            let router = router.clone();
            async move { send(&router, request).await }
        });
        until("the download begins", || downloads.begun.load(Ordering::SeqCst) == number).await;
        asked.abort();
        until("the download stops", || downloads.stopped.load(Ordering::SeqCst) == number).await;
    }
}
