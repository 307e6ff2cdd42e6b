//! `unicorn run`: a prompt or a conversation with a model of a running server, or with a model that this process loads.

use std::fs::File;
use std::io::IsTerminal as _;
use std::path::Path;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;
use ureq::http::Method;

use super::client::Client;
use super::{models_of, number, pull_through, text, untagged};
use crate::cli::args::{self, Sampling};
use crate::cli::chat::{self, Defaults, Partner};
use crate::cli::error::Error;
use crate::cli::generate::{self, Statistics, show_thought};
use crate::cli::log::note;
use crate::cli::progress::{EraseOnInterrupt, PATIENCE, Spinner};
use crate::cli::terminal::print;
use crate::cli::{models, names, pull};
use crate::config::{self, Config};
use crate::file::read_to_end;
use crate::hub::HubError;
use crate::image::Limits;
use crate::text::Message;

/// Lines of an answer that were not printed yet.
const MAX_LINES: usize = 64;

pub fn run(config: &Config, args: args::Run) -> Result<(), Error> {
    generate::request(&args.sampling)?; // reports wrong options before anything else
    let prompt = prompt(&args.prompt.join(" "))?;
    let client = match args.here || Path::new(&args.model).exists() {
        true => None,
        false => Client::find(config, args.server.url.as_deref())?,
    };
    match client {
        Some(client) => on_server(&client, args, prompt),
        None if !args.image.is_empty() => Err(Error::Argument(
            "--image needs a running server: `unicorn serve` starts one, or --url gives its address".into(),
        )),
        None => here(config, args, prompt),
    }
}

/// The prompt of the command line with the text from a pipe before it. `None` = there is none: a conversation begins.
fn prompt(words: &str) -> Result<Option<String>, Error> {
    let is_terminal = std::io::stdin().is_terminal();
    let piped = if is_terminal { String::new() } else { chat::piped_text()? };
    let parts: Vec<&str> = [piped.trim_end(), words].into_iter().filter(|part| !part.is_empty()).collect();
    match parts.is_empty() {
        true if is_terminal => Ok(None),
        true => Err(Error::Argument("there is no prompt: give one, or run the command on a terminal".into())),
        false => Ok(Some(parts.join("\n\n"))),
    }
}

/// Loads the model in this process.
fn here(config: &Config, args: args::Run, prompt: Option<String>) -> Result<(), Error> {
    let mut config = config.clone();
    // The other options of this section are those of the configured model.
    let config::Model { quantize, precision, vision, image_tokens, max_image_tokens, .. } = config.model;
    config.model = config::Model {
        path: Some(args.model),
        name: None,
        config: None,
        tokenizer: None,
        chat_template: None,
        tool_call_parser: None,
        draft: None,
        quantize,
        precision,
        vision,
        image_tokens,
        max_image_tokens,
    };
    let found = models::locate_configured(&mut config);
    if let Err(Error::Hub(HubError::NotPulled { name, .. } | HubError::Partial { name, .. })) = &found {
        if !args.yes && !models::confirm(&format!("{name} was not pulled. Pull it"))? {
            return found;
        }
        let path = pull::pull(&config, name)?.display().to_string();
        config.model.name = Some(name.repo.name().to_owned());
        config.model.path = Some(path);
    } else {
        found?;
    }
    match prompt {
        Some(prompt) => {
            let _erased = EraseOnInterrupt::watch(None);
            generate::generate(&config, &args.sampling, &prompt)
        }
        None => chat::chat(&config, args.sampling, !args.no_history),
    }
}

/// Talks to the model of a server.
fn on_server(client: &Client, args: args::Run, prompt: Option<String>) -> Result<(), Error> {
    let images = args.image.iter().map(|file| picture(file)).collect::<Result<Vec<_>, _>>()?;
    // Created before a handler for SIGINT.
    let input = prompt.is_none().then(|| chat::input(!args.no_history)).transpose()?;
    // The line editor ignores Ctrl-C while it reads no line, so here it must end the question and the pull.
    let erased = EraseOnInterrupt::watch(None);
    let ask = || client.ask(&Method::POST, "/api/show", &json!({"model": args.model}));
    let shown = match ask() {
        Err(Error::Remote { status: Some(404), .. }) => {
            let name = names::read_name(&args.model);
            let name = name.map_err(|error| not_served(client, &args.model, &error.to_string()))?;
            if !args.yes && !models::confirm(&format!("{name} is not served at {}. Pull it", client.url()))? {
                return Err(Error::Argument(format!("{name} was not pulled")));
            }
            pull_through(client, &name)?;
            ask()?
        }
        shown => shown?,
    };
    let mut partner = Remote { images, ..Remote::new(client.clone(), args.model, &shown)? };
    match (prompt, input) {
        (Some(prompt), _) => {
            let turns = [Message::new("user", &prompt)];
            partner.answer(&args.sampling, &turns, std::future::pending()).map(drop)
        }
        (None, Some(input)) => {
            drop(erased);
            chat::converse(partner, input, args.sampling)
        }
        (None, None) => unreachable!("without a prompt there is an input"),
    }
}

/// The file of a picture in base64.
fn picture(file: &Path) -> Result<String, Error> {
    let most = Limits::default().max_bytes as u64;
    let read = File::open(file).and_then(|file| read_to_end(file, most));
    let bytes = read.map_err(|error| Error::File { path: file.to_owned(), error })?;
    Ok(STANDARD.encode(bytes))
}

fn not_served(client: &Client, model: &str, problem: &str) -> Error {
    let served = client.get("/api/tags").ok();
    let names: Vec<String> =
        served.iter().flat_map(models_of).map(|model| untagged(&text(&model["name"]))).collect();
    Error::Argument(format!(
        "{model:?} is not served at {}, which has {}; {problem}",
        client.url(),
        names.join(", ")
    ))
}

/// A model of a running server.
struct Remote {
    client: Client,
    model: String,
    /// The pictures of the first message, in base64.
    images: Vec<String>,
    context: u64,
    /// Tokens of the last prompt and its answer.
    used: u64,
    defaults: Defaults,
    runtime: tokio::runtime::Runtime,
}

impl Remote {
    /// `shown` is what the server says about the model.
    fn new(client: Client, model: String, shown: &Value) -> Result<Self, Error> {
        let parameters = text(&shown["parameters"]);
        let value = |wanted: &str, otherwise: f32| {
            let line = parameters.lines().find_map(|line| line.strip_prefix(wanted)?.trim().parse().ok());
            line.unwrap_or(otherwise)
        };
        let defaults = Defaults {
            temperature: value("temperature ", 1.0),
            top_p: value("top_p ", 1.0),
            top_k: value("top_k ", 0.0) as u32,
            min_p: value("min_p ", 0.0),
        };
        let context = number(&shown["details"]["context_length"]);
        Ok(Self {
            client,
            model,
            images: Vec::new(),
            context,
            used: 0,
            defaults,
            runtime: generate::runtime()?,
        })
    }

    fn body(&self, sampling: &Sampling, turns: &[Message]) -> Value {
        let mut options = Map::new();
        let mut set = |name: &str, value: Option<Value>| {
            if let Some(value) = value {
                options.insert(name.to_owned(), value);
            }
        };
        set("temperature", sampling.temperature.map(Value::from));
        set("top_p", sampling.top_p.map(Value::from));
        set("top_k", sampling.top_k.map(Value::from));
        set("min_p", sampling.min_p.map(Value::from));
        set("seed", sampling.seed.map(Value::from));
        set("num_predict", sampling.max_tokens.map(Value::from));
        set("stop", Some(&sampling.stop).filter(|stop| !stop.is_empty()).map(|stop| json!(stop)));
        let system = sampling.system.iter().map(|text| json!({"role": "system", "content": text}));
        let first = turns.iter().position(|turn| turn.role == "user");
        let turns = turns.iter().enumerate().map(|(i, turn)| {
            let mut message = json!({"role": turn.role, "content": turn.content});
            if first == Some(i) && !self.images.is_empty() {
                message["images"] = json!(self.images);
            }
            message
        });
        json!({"model": self.model, "messages": system.chain(turns).collect::<Vec<_>>(), "options": options})
    }
}

impl Partner for Remote {
    fn model(&self) -> &str {
        &self.model
    }

    fn answer(
        &mut self,
        sampling: &Sampling,
        turns: &[Message],
        interrupt: impl Future<Output = std::io::Result<()>>,
    ) -> Result<String, Error> {
        let (body, client) = (self.body(sampling, turns), self.client.clone());
        let (lines, mut received) = mpsc::channel(MAX_LINES);
        // The thread ends with the answer. After an interrupt, it closes the connection at the next line, which stops the
        // answer on the server.
        std::thread::spawn(move || {
            let sent = client.stream("/api/chat", &body, |line| Ok(lines.blocking_send(Ok(line)).is_ok()));
            if let Err(error) = sent {
                let _ = lines.blocking_send(Err(error));
            }
        });
        let used = &mut self.used;
        let cut = self.client.failed("the answer ended early".into());
        self.runtime.block_on(async move {
            let mut interrupt = std::pin::pin!(interrupt);
            let mut patience = std::pin::pin!(tokio::time::sleep(PATIENCE));
            let (mut answer, mut is_thinking) = (String::new(), false);
            let (mut is_waiting, mut spinner) = (true, None);
            loop {
                let line = tokio::select! {
                    line = received.recv() => line.unwrap_or(Err(Error::Argument(cut.to_string()))),
                    () = &mut patience, if is_waiting && spinner.is_none() => {
                        spinner = Some(Spinner::start("waiting for the model".to_owned()));
                        continue;
                    }
                    result = &mut interrupt => {
                        result.map_err(Error::Runtime)?;
                        drop(spinner);
                        print("\n")?;
                        note("(stopped)");
                        return Ok(answer);
                    }
                };
                (is_waiting, spinner) = (false, None);
                let line = line.inspect_err(|_| drop(print("\n")))?;
                let message = &line["message"];
                let (thought, piece) = (text(&message["thinking"]), text(&message["content"]));
                let is_last = line["done"] == true;
                is_thinking = show_thought(&thought, !piece.is_empty() || is_last, is_thinking);
                print(&piece)?;
                answer += &piece;
                if is_last {
                    print("\n")?;
                    *used = number(&line["prompt_eval_count"]) + number(&line["eval_count"]);
                    statistics(&line).show();
                    return Ok(answer);
                }
            }
        })
    }

    fn ends_with(&self, error: &Error) -> bool {
        // Without a status, the server is gone or the answer broke off.
        matches!(error, Error::Remote { status: None, .. })
    }

    fn context(&self, _: &Sampling, turns: &[Message]) -> String {
        format!("{} of {} tokens", if turns.is_empty() { 0 } else { self.used }, self.context)
    }

    fn defaults(&self) -> Defaults {
        self.defaults
    }
}

/// What the last line of an answer says about it.
fn statistics(line: &Value) -> Statistics {
    let time = |field: &str| Duration::from_nanos(number(&line[field]));
    let (n, spent) = (number(&line["eval_count"]), time("eval_duration").as_secs_f64());
    Statistics {
        predicted_n: n as usize,
        per_second: (n > 1 && spent > 0.0).then(|| (n - 1) as f64 / spent),
        first: time("load_duration") + time("prompt_eval_duration"),
        prompt_n: number(&line["prompt_eval_count"]) as usize,
        cached_n: 0,
        is_cut: line["done_reason"] == "length",
    }
}
