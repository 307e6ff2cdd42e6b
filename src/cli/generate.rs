//! `unicorn generate`: prints one answer to the terminal. `unicorn chat` uses it for its answers too.

use std::io::{IsTerminal, Write};

use futures::StreamExt;

use super::args;
use super::error::Error;
use super::load::{self, EndEngine};
use super::log::note;
use super::progress::{self, Spinner};
use super::terminal::{dim, has_colors, print};
use crate::config::Config;
use crate::engine::Timings;
use crate::session::{Delta, GenerateRequest, Reason, Service};
use crate::text::{Message, StopMatcher};

/// Prints the answer to `args.prompt` while it is generated.
pub fn generate(config: &Config, args: args::Generate) -> Result<(), Error> {
    let mut request = request(&args.sampling)?;
    let files = load::files(&config.model)?;
    let service = load::service(&files, config)?;
    let _end = EndEngine(service.engine().clone());
    request.messages.push(Message::new("user", &args.prompt));
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
    let (engine, mut answer) = service.prepare(request)?;
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
        is_thinking = show_thought(&delta, is_thinking);
        print(&delta.text)?;
        text.push_str(&delta.text);
        if let Some(reason) = delta.end {
            print("\n")?;
            print_statistics(reason, &delta.timings);
            return Ok(text);
        }
    }
}

/// Shows what the model thinks on standard error if that is a terminal, since standard output has the answer alone. Returns
/// whether the answer's text has not begun after it.
fn show_thought(delta: &Delta, is_thinking: bool) -> bool {
    let mut out = std::io::stderr();
    let is_shown = !delta.thought.is_empty() && out.is_terminal();
    // A terminal that is gone ends the program when it prints the answer.
    if is_shown {
        let _ = write!(out, "{}", dim(&delta.thought, has_colors(&out)));
    }
    let ends = is_thinking && (!delta.text.is_empty() || delta.end.is_some());
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

/// Prints the statistics of an answer, and whether it was cut, if standard error is a terminal.
fn print_statistics(reason: Reason, timings: &Timings) {
    if !std::io::stderr().is_terminal() {
        return;
    }
    let Timings { queue, prefill, prompt_n, cached_n, predicted_n, .. } = *timings;
    let mut parts = vec![format!("{predicted_n} {}", if predicted_n == 1 { "token" } else { "tokens" })];
    parts.extend(timings.predicted_per_second().map(|rate| format!("{rate:.1} tokens/s")));
    parts.push(format!("first after {:.2} s", (queue + prefill).as_secs_f64()));
    let cached = if cached_n > 0 { format!(", {cached_n} from the cache") } else { String::new() };
    parts.push(format!("prompt of {prompt_n}{cached}"));
    parts.extend((reason == Reason::Length).then(|| "cut at the token limit".into()));
    note(parts.join(" \u{b7} "));
}
