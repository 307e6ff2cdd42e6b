//! `unicorn generate`: prints one answer to the terminal. `unicorn chat` uses it for its answers too.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use futures::StreamExt;

use super::args;
use super::error::Error;
use super::load::{self, EndEngine};
use super::log::note;
use super::progress::{self, Spinner};
use super::terminal::{dim, has_colors, print};
use crate::config::Config;
use crate::engine::Timings;
use crate::session::{GenerateRequest, Reason, Service};
use crate::text::{Message, StopMatcher};

/// Prints the answer to a prompt while it is generated.
pub fn generate(config: &Config, sampling: &args::Sampling, prompt: &str) -> Result<(), Error> {
    let mut request = request(sampling)?;
    let files = load::files(&config.model)?;
    let service = load::service(&files, config)?;
    let _end = EndEngine(service.engine().clone());
    request.messages.push(Message::new("user", prompt));
    // Ctrl-C ends the program, as usual.
    runtime()?.block_on(answer(&service, &request, std::future::pending())).map(drop)
}

pub fn runtime() -> Result<tokio::runtime::Runtime, Error> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::Runtime)
}

/// Prints an answer while it is generated, and returns its text. `interrupt` stops the answer; then the text until now
/// is returned.
pub async fn answer(
    service: &Service,
    request: &GenerateRequest,
    interrupt: impl Future<Output = std::io::Result<()>>,
) -> Result<String, Error> {
    let (engine, mut answer) = service.prepare(request)?.decoded()?;
    let prompt_n = engine.prompt.len();
    let mut tokens = service.engine().submit(engine)?;
    let mut text = String::new();
    let mut interrupt = std::pin::pin!(interrupt);
    let mut patience = std::pin::pin!(tokio::time::sleep(progress::PATIENCE));
    let mut is_prefill = true;
    let (mut spinner, mut is_thinking) = (None, false);
    loop {
        let event = tokio::select! {
            event = tokens.next() => event,
            () = &mut patience, if is_prefill && spinner.is_none() => {
                spinner = Some(Spinner::start(format!("reading {prompt_n} tokens")));
                continue;
            }
            result = &mut interrupt => {
                result.map_err(Error::Runtime)?;
                None
            }
        };
        is_prefill = false;
        spinner = None;
        let Some(event) = event else {
            print("\n")?;
            note("(stopped)");
            return Ok(text);
        };
        let delta = match answer.push(event) {
            Ok(delta) => delta,
            Err(error) => {
                print("\n")?;
                return Err(error.into());
            }
        };
        let has_begun = !delta.text.is_empty() || delta.end.is_some();
        is_thinking = show_thought(&delta.thought, has_begun, is_thinking);
        print(&delta.text)?;
        text.push_str(&delta.text);
        if let Some(reason) = delta.end {
            print("\n")?;
            Statistics::of(reason, &delta.timings).show();
            return Ok(text);
        }
    }
}

/// Shows what the model thinks on standard error if that is a terminal, since standard output has the answer alone.
/// `has_begun` is whether the answer's text follows now. Returns whether it has not begun after a thought.
pub fn show_thought(thought: &str, has_begun: bool, is_thinking: bool) -> bool {
    let mut out = std::io::stderr();
    let is_shown = !thought.is_empty() && out.is_terminal();
    // A terminal that is gone ends the program when it prints the answer.
    if is_shown {
        let _ = write!(out, "{}", dim(thought, has_colors(&out)));
    }
    let ends = is_thinking && has_begun;
    if ends {
        let _ = write!(out, "\n\n");
    }
    (is_thinking || is_shown) && !ends
}

/// A request with only the system prompt, if there is one.
pub fn request(args: &args::Sampling) -> Result<GenerateRequest, Error> {
    StopMatcher::new(&args.stop)?; // reports wrong stop texts before the model is loaded
    Ok(GenerateRequest {
        messages: args.system.iter().map(|text| Message::new("system", text)).collect(),
        max_tokens: args.max_tokens.map(|n| n as usize),
        sampling: args.options(),
        seed: args.seed,
        stop: args.stop.clone(),
        ..GenerateRequest::default()
    })
}

/// What is shown of an answer after its end.
pub struct Statistics {
    pub predicted_n: usize,
    pub per_second: Option<f64>,
    /// From the request to the first token.
    pub first: Duration,
    pub prompt_n: usize,
    pub cached_n: usize,
    pub is_cut: bool,
}

impl Statistics {
    fn of(reason: Reason, timings: &Timings) -> Self {
        let Timings { queue, prefill, prompt_n, cached_n, predicted_n, .. } = *timings;
        let per_second = timings.predicted_per_second();
        let is_cut = reason == Reason::Length;
        Self { predicted_n, per_second, first: queue + prefill, prompt_n, cached_n, is_cut }
    }

    /// Prints one line, if standard error is a terminal.
    pub fn show(&self) {
        if !std::io::stderr().is_terminal() {
            return;
        }
        let &Self { predicted_n, per_second, first, prompt_n, cached_n, is_cut } = self;
        let mut parts = vec![format!("{predicted_n} {}", if predicted_n == 1 { "token" } else { "tokens" })];
        parts.extend(per_second.map(|rate| format!("{rate:.1} tokens/s")));
        parts.push(format!("first after {:.2} s", first.as_secs_f64()));
        let cached = if cached_n > 0 { format!(", {cached_n} from the cache") } else { String::new() };
        parts.push(format!("prompt of {prompt_n}{cached}"));
        parts.extend(is_cut.then(|| "cut at the token limit".into()));
        note(parts.join(" \u{b7} "));
    }
}
