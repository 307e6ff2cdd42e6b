//! A server with the scripted runner and the mini tokenizer, for tests of the API.

use std::fs;
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, UNIX_EPOCH};

use axum::Router;
use serde_json::{Value, json};
use unicorn::api::{self, AccessPolicy, Options, Server};
use unicorn::engine::{Engine, EngineConfig, EngineHandle};
use unicorn::library::ModelCard;
use unicorn::model::{ImageLimits, ImageSizes, Limits, SamplingOptions};
use unicorn::session::Service;
use unicorn::text::{CallFormat, ChatFiles, ChatTemplate, Tokenizer};

use super::checkpoints::sha256;
use super::data;
use super::fake_runner::{Control, FakeRunner, HANG, Script, fake_limits, kv_with, says};
use super::tokenizers::{GoldenTemplate, gemma_template, image_tokenizer, llama_cpp_file, tokenizer};

/// The model's id in the API.
pub const MODEL: &str = "makers/tiny-gemma";

/// Gemma's `<end_of_turn>`, the id that ends an answer.
pub const END_OF_TURN: u32 = 106;

/// The model's sampling options, for requests without their own.
pub const DEFAULTS: SamplingOptions = SamplingOptions {
    temperature: Some(0.9),
    top_k: Some(64),
    top_p: Some(0.95),
    min_p: Some(0.0),
    repetition_penalty: Some(1.25),
    presence_penalty: None,
    frequency_penalty: None,
};

/// Limits of the server, small enough for tests to reach them.
pub const OPTIONS: Options = Options {
    max_body_bytes: 64 << 10,
    body_stall: Duration::from_secs(2),
    body_grace: Duration::from_secs(10),
    permit_timeout: Duration::from_secs(150),
    wrong_key_pause: Duration::ZERO,
    stored_responses: 9,
    stored_response_bytes: 1 << 20,
    share_prefixes: None,
    keep_alive: Duration::from_millis(20),
    event_interval: Duration::from_secs(60),
    device_timeout: Duration::from_secs(3),
    lost_log_lines: || 0,
};

/// A server, its routes, its engine, and the control of its runner.
pub struct App {
    pub router: Router,
    pub server: Arc<Server>,
    pub engine: EngineHandle,
    pub control: Control,
}

/// The limits of a small model: one sequence at a time, and a context of 600 tokens.
pub fn limits() -> Limits {
    let kv = kv_with(150, 32);
    Limits { max_batch_tokens: 32, kv, max_context: 600, max_sequences: 1, ..fake_limits() }
}

/// Like [`limits`], with room for many tools in the context.
fn long_limits() -> Limits {
    Limits { kv: kv_with(2100, 32), max_context: 8000, ..limits() }
}

/// An app whose model answers as the script says.
pub fn app(script: Script) -> App {
    app_with(limits(), OPTIONS, DEFAULTS, script)
}

/// Like [`app`], with the caller's limits, options and defaults.
pub fn app_with(limits: Limits, options: Options, defaults: SamplingOptions, script: Script) -> App {
    let server = Server::new(MODEL, options, AccessPolicy::default());
    loaded(server, limits, defaults, script)
}

/// An app with this access policy, whose model answers with `text`. It runs two sequences at the same time.
pub fn app_with_policy(policy: AccessPolicy, text: &str) -> App {
    let ids = tokenizer().encode(text, false).expect("encodes");
    let more = Limits { max_sequences: 2, ..limits() };
    loaded(Server::new(MODEL, OPTIONS, policy), more, DEFAULTS, says(&ids, END_OF_TURN))
}

/// `server` with the scripted model loaded. The engine's queue has two places.
pub fn loaded(server: Arc<Server>, limits: Limits, defaults: SamplingOptions, script: Script) -> App {
    loaded_with_queue(2, server, limits, defaults, script)
}

/// Like [`loaded`], with `queue` places in the engine's queue.
pub fn loaded_with_queue(
    queue: usize,
    server: Arc<Server>,
    limits: Limits,
    defaults: SamplingOptions,
    script: Script,
) -> App {
    let text = (tokenizer(), gemma_template(), vec![1, END_OF_TURN]);
    loaded_as(queue, server, limits, defaults, script, text)
}

/// Like [`loaded_with_queue`], with this tokenizer and template, and with these ids that end an answer.
fn loaded_as(
    queue: usize,
    server: Arc<Server>,
    limits: Limits,
    defaults: SamplingOptions,
    script: Script,
    (tokenizer, template, stops): (Tokenizer, ChatTemplate, Vec<u32>),
) -> App {
    listen_everywhere();
    let (runner, control) = FakeRunner::new(limits, script);
    let engine = Engine::start(runner, EngineConfig { queue, ..EngineConfig::default() });
    let calls = CallFormat::of(&template, &tokenizer);
    let takes_images = engine.limits().images.is_some();
    let card = ModelCard { takes_images, ..card(&tokenizer, &template) };
    server.library().first().1.set_card(card);
    server.library().first().1.set_ready(Service::new(
        engine.clone(),
        tokenizer,
        template,
        calls,
        defaults,
        stops,
    ));
    App { router: api::router(Arc::clone(&server)), server, engine, control }
}

/// How the scripted model takes images, if it does.
pub const IMAGES: ImageLimits =
    ImageLimits { sizes: ImageSizes::Fixed { side: IMAGE_SIDE }, tokens: 16, usual_tokens: 16, slots: 4 };
pub const IMAGE_SIDE: usize = 28;

/// How a scripted model takes images of different numbers of tokens. A token has few pixels, for speed.
pub const SIZED_IMAGES: ImageLimits = ImageLimits {
    sizes: ImageSizes::ByTokens { unit: 2, longest: 280 },
    tokens: 280,
    usual_tokens: 140,
    slots: 4,
};

/// The limits of such a model.
pub fn sized_image_limits() -> Limits {
    let kv = kv_with(600, 200);
    Limits { images: Some(SIZED_IMAGES), max_batch_tokens: 300, kv, max_context: 2000, ..limits() }
}

/// The limits of a model that takes images. It has embeddings for the tokens of images.
pub fn image_limits() -> Limits {
    Limits { images: Some(IMAGES), vocab_size: 576, ..limits() }
}

/// An app whose model takes images. A body may have a megabyte.
pub fn app_that_takes_images(script: Script) -> App {
    let options = Options { max_body_bytes: 1 << 20, stored_response_bytes: 200_000, ..OPTIONS };
    let server = Server::new(MODEL, options, AccessPolicy::default());
    let text = (image_tokenizer(), gemma_template(), vec![1, END_OF_TURN]);
    loaded_as(2, server, image_limits(), DEFAULTS, script, text)
}

/// A service without an API, of a model with these limits and this tokenizer.
pub fn service_with(limits: Limits, tokenizer: Tokenizer) -> Service {
    let (runner, _) = FakeRunner::new(limits, says(&[], END_OF_TURN));
    let engine = Engine::start(runner, EngineConfig::default());
    let template = gemma_template();
    let calls = CallFormat::of(&template, &tokenizer);
    Service::new(engine, tokenizer, template, calls, DEFAULTS, vec![1, END_OF_TURN])
}

/// What the files of the scripted model say about it.
fn card(tokenizer: &Tokenizer, template: &ChatTemplate) -> ModelCard {
    ModelCard {
        format: "safetensors".into(),
        architecture: "gemma3".into(),
        parameters: 27_432_406_640,
        quantization: "int4-g128".into(),
        bytes: 14_000_000_000,
        modified: Some(UNIX_EPOCH + Duration::from_secs(1_800_000_000)),
        digest: "0123456789abcdef".repeat(4),
        context: 131_072,
        hidden_size: 3,
        layers: 62,
        vocab_size: tokenizer.vocab_size(),
        template: template.source().to_owned(),
        can_think: tokenizer.thought_tokens().is_some(),
        takes_images: false,
    }
}

/// A family of models, with its tokenizer and template.
pub struct FamilyText {
    pub tokenizer: Tokenizer,
    /// `tokenizer_config.json`.
    config: Vec<u8>,
    jinja: Vec<u8>,
}

/// Control tokens of Mistral's vocabularies.
const MISTRAL: [&str; 17] = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
    "[ARGS]",
    "[CALL_ID]",
    "[THINK]",
    "[/THINK]",
];
/// Those of the vocabularies until 2024.
const OLDER_MISTRAL: &[&str] = MISTRAL.split_at(10).0;

impl FamilyText {
    /// A family in `tests/data/families`.
    pub fn new(name: &str) -> FamilyText {
        let (tokenizer, template) = match name {
            "qwen" => ("qwen-tokenizer", "qwen-tokenizer"),
            // Qwen 3.5 has the control tokens of Qwen.
            "qwen35" => ("qwen-tokenizer", "qwen35-template"),
            "gemma4" => ("gemma4-tokenizer", "gemma4-tokenizer"),
            // With the tokens around images.
            "gemma4-images" => ("../gemma4-vision/vis4-a", "../gemma4-vision/vis4-a"),
            other => panic!("no family {other}"),
        };
        let read = |folder: &str, file: &str| {
            fs::read(data("families").join(folder).join(file))
                .unwrap_or_else(|e| panic!("{folder}/{file}: {e}"))
        };
        FamilyText {
            tokenizer: tokenizer_with(None, tokenizer),
            config: read(tokenizer, "tokenizer_config.json"),
            jinja: read(template, "chat_template.jinja"),
        }
    }

    /// A family whose template is in llama.cpp's tree. `None` = the template is not available.
    pub fn of_llama_cpp(golden: &GoldenTemplate) -> Option<FamilyText> {
        let jinja = fs::read(llama_cpp_file(&format!("{}.jinja", golden.name))?).expect("a readable file");
        assert_eq!(sha256(&jinja), golden.sha256, "{}: the goldens are of another template", golden.name);
        let tokenizer = match golden.syntax.as_str() {
            "llama3_json" => tokenizer_with(None, "tiny-llama"),
            "mistral" => tokenizer_with(Some(OLDER_MISTRAL), "qwen-tokenizer"),
            "mistral_args" => tokenizer_with(Some(&MISTRAL), "qwen-tokenizer"),
            _ => tokenizer_with(None, "qwen-tokenizer"),
        };
        let config = json!({"bos_token": golden.bos_token, "eos_token": golden.eos_token});
        Some(FamilyText { tokenizer, config: config.to_string().into_bytes(), jinja })
    }

    pub fn template(&self) -> ChatTemplate {
        let files =
            ChatFiles { tokenizer_config: Some(&self.config), chat_template_jinja: Some(&self.jinja) };
        ChatTemplate::from_checkpoint(files, &self.tokenizer).expect("a sound template")
    }

    /// The id that ends a turn.
    pub fn end(&self) -> u32 {
        self.tokenizer.end_of_turn().expect("a family with turns")
    }

    /// The ids of a text in which the names of control tokens are text.
    pub fn plain(&self, text: &str) -> Vec<u32> {
        self.tokenizer.encode_text(text, false).expect("encodes")
    }

    /// An app whose model is of this family, and answers as the script says.
    pub fn app(&self, script: Script) -> App {
        self.app_with(long_limits(), script)
    }

    /// Like [`Self::app`], with these limits.
    pub fn app_with(&self, limits: Limits, script: Script) -> App {
        let server = Server::new(MODEL, OPTIONS, AccessPolicy::default());
        let text = (self.tokenizer.clone(), self.template(), vec![self.end()]);
        loaded_as(2, server, limits, DEFAULTS, script, text)
    }

    /// The service of such a model without an API.
    pub fn service(&self, script: Script) -> Service {
        self.service_with(long_limits(), script)
    }

    /// Like [`Self::service`], with these limits.
    pub fn service_with(&self, limits: Limits, script: Script) -> Service {
        let (runner, _) = FakeRunner::new(limits, script);
        let engine = Engine::start(runner, EngineConfig::default());
        let (tokenizer, template) = (self.tokenizer.clone(), self.template());
        let calls = CallFormat::of(&template, &tokenizer);
        Service::new(engine, tokenizer, template, calls, DEFAULTS, vec![self.end()])
    }
}

/// The tokenizer in a folder of `tests/data/families`, with other control tokens if there are any.
fn tokenizer_with(control: Option<&[&str]>, folder: &str) -> Tokenizer {
    let bytes = fs::read(data("families").join(folder).join("tokenizer.json")).expect("a tokenizer");
    let mut file: Value = serde_json::from_slice(&bytes).expect("JSON");
    if let Some(control) = control {
        let first = file["model"]["vocab"].as_object().expect("a vocabulary").len();
        let token = |(i, content): (usize, &&str)| {
            json!({
                "id": first + i, "content": content, "special": true, "normalized": false, "single_word": false,
                "lstrip": false, "rstrip": false,
            })
        };
        file["added_tokens"] = control.iter().enumerate().map(token).collect();
    }
    Tokenizer::from_bytes(file.to_string().as_bytes(), folder).expect("a sound tokenizer")
}

/// Installs a global subscriber that accepts every event and records none. `tracing` caches for each call site whether
/// any subscriber is interested. Without the global subscriber, a call site that runs while another thread sets up its
/// own subscriber could be cached as disabled, and be missing in that thread's log.
pub fn listen_everywhere() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        tracing::subscriber::set_global_default(tracing_subscriber::registry()).expect("the first")
    });
}

/// An app whose model answers everything with `text`.
pub fn app_that_says(text: &str) -> App {
    let ids = tokenizer().encode(text, false).expect("encodes");
    app(says(&ids, END_OF_TURN))
}

/// An app whose model repeats "a" without end. It runs two sequences at the same time.
pub fn endless() -> App {
    let kv = kv_with(2500, 32);
    let limits = Limits { max_sequences: 2, max_draws: 2, max_context: 4000, kv, ..limits() };
    let a = tokenizer().encode("a", false).expect("encodes")[0];
    // Only the clients end requests, because the timeout is too long for a test.
    let options = Options { body_stall: 4 * HANG, ..OPTIONS };
    loaded(Server::new(MODEL, options, AccessPolicy::default()), limits, DEFAULTS, says(&[], a))
}

/// The routes of a server that answers everything with `text`, and the number of ids that it samples for an answer.
pub fn router_that_says(text: &str) -> (Router, usize) {
    let ids = tokenizer().encode(text, false).expect("encodes");
    (app_with_policy(AccessPolicy::default(), text).router, ids.len() + 1)
}

/// The routes of a server that answers everything with `text`, with a long context and a long queue.
pub fn router_for_many(text: &str) -> Router {
    let ids = tokenizer().encode(text, false).expect("encodes");
    let kv = kv_with(2500, 32);
    let limits = Limits { max_sequences: 2, max_draws: 4, max_context: 4000, kv, ..limits() };
    let server = Server::new(MODEL, OPTIONS, AccessPolicy::default());
    loaded_with_queue(64, server, limits, DEFAULTS, says(&ids, END_OF_TURN)).router
}

/// An app whose model answers with `text`, and the ids of the last prompt that it got.
pub fn app_that_shows_its_prompt(text: &str) -> (App, Arc<Mutex<Vec<u32>>>) {
    let (script, seen) = shows_its_prompt(text);
    (app(script), seen)
}

/// A script that answers with `text`, and the ids of the last prompt that it got.
pub fn shows_its_prompt(text: &str) -> (Script, Arc<Mutex<Vec<u32>>>) {
    recorded(says(&tokenizer().encode(text, false).expect("encodes"), END_OF_TURN))
}

/// A script that answers as `answer` does, and the ids of the last prompt that it got.
pub fn recorded(mut answer: Script) -> (Script, Arc<Mutex<Vec<u32>>>) {
    let seen: Arc<Mutex<Vec<u32>>> = Arc::default();
    let (record, mut last) = (Arc::clone(&seen), Vec::new());
    let script: Script = Box::new(move |tokens, draw| {
        // Later calls of the same answer get the ids of the previous call and the sampled id.
        if tokens != last {
            *record.lock().expect("no test panics with it") = tokens.to_vec();
        }
        let id = answer(tokens, draw);
        last = [tokens, &[id]].concat();
        id
    });
    (script, seen)
}

/// The ids of a prompt in Gemma's format, without its `<bos>`.
pub fn prompt_ids(text: &str) -> Vec<u32> {
    tokenizer().encode(&format!("<bos>{text}"), false).expect("encodes")
}
