//! `unicorn generate` and `unicorn chat`: one answer, or a conversation, on the terminal.
//!
//! A conversation stays in memory: neither it nor the typed lines are written to disk.

use std::io::IsTerminal;

use futures::StreamExt;
use rustyline::error::ReadlineError;

use super::args;
use super::error::Error;
use super::load::{self, EndEngine};
use super::log;
use super::progress::{self, Spinner};
use super::terminal::print;
use crate::config::Config;
use crate::engine::{EngineError, SubmitError, Timings};
use crate::session::{Delta, End, GenerateRequest, Reason, Service, SessionError};
use crate::text::{Message, StopMatcher};

/// Prints the answer to `args.prompt` while it is generated.
pub fn generate(config: &Config, args: args::Generate) -> Result<(), Error> {
    let mut request = request(args.sampling)?;
    let files = load::files(&config.model)?;
    let service = load::service(&files, config)?;
    let _end = EndEngine(service.engine().clone());
    request.messages.push(Message::new("user", &args.prompt));
    // Ctrl-C ends the program, as usual.
    runtime()?.block_on(answer(&service, &request, std::future::pending())).map(drop)
}

/// Reads a line, answers it, and repeats. Ctrl-C ends an answer, Ctrl-D the program.
pub fn chat(config: &Config, args: args::Chat) -> Result<(), Error> {
    let mut request = request(args.sampling)?;
    let files = load::files(&config.model)?;
    let service = load::service(&files, config)?;
    let _end = EndEngine(service.engine().clone());
    let opening = request.messages.len();
    // Ctrl-C is a signal only during an answer; the editor reads it as a key.
    let runtime = runtime()?;
    let mut editor = rustyline::DefaultEditor::new().map_err(Error::Terminal)?;
    if std::io::stdin().is_terminal() {
        log::say("Ctrl-C stops an answer, Ctrl-D leaves; /new starts a new conversation.");
    }
    loop {
        let line = match editor.readline("> ") {
            Ok(line) => line,
            Err(ReadlineError::Interrupted) => {
                log::say("(Ctrl-D leaves)");
                continue;
            }
            Err(ReadlineError::Eof) => return Ok(()),
            Err(error) => return Err(Error::Terminal(error)),
        };
        match line.trim() {
            "" => continue,
            "/new" => {
                request.messages.truncate(opening);
                log::say("(a new conversation)");
                continue;
            }
            "/quit" | "/exit" => return Ok(()),
            _ => {}
        }
        // A line that cannot be kept for the arrow keys is no reason to stop.
        let _ = editor.add_history_entry(&line);
        request.messages.push(Message::new("user", &line));
        match runtime.block_on(answer(&service, &request, tokio::signal::ctrl_c())) {
            Ok(text) => request.messages.push(Message::new("assistant", &text)),
            Err(
                error @ (Error::Engine(EngineError::Lost(_) | EngineError::Bug(_))
                | Error::Submit(SubmitError::Engine(_))),
            ) => return Err(error),
            Err(error) => {
                request.messages.pop();
                log::say(format_args!("error: {error} (/new starts a new conversation)"));
            }
        }
    }
}

fn runtime() -> Result<tokio::runtime::Runtime, Error> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::Runtime)
}

/// Prints an answer while it is generated, and returns its text. `interrupt` ends the answer; its text so far is
/// returned.
async fn answer(
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
    let mut reading = true;
    let mut spinner = None;
    loop {
        let event = tokio::select! {
            event = tokens.next() => event,
            () = &mut patience, if reading && spinner.is_none() => {
                spinner = Some(Spinner::start(format!("reading {prompt_n} tokens")));
                continue;
            }
            result = &mut interrupt => {
                result.map_err(Error::Runtime)?;
                None
            }
        };
        reading = false;
        spinner = None;
        let Some(event) = event else {
            print("\n")?;
            log::say("(stopped)");
            return Ok(text);
        };
        let Delta { text: more, end, .. } = answer.push(event);
        print(&more)?;
        text.push_str(&more);
        match end {
            None => {}
            Some(End::Finished { reason, timings }) => {
                print("\n")?;
                say_how(reason, &timings);
                return Ok(text);
            }
            Some(End::Failed(error)) => {
                print("\n")?;
                return Err(error.into());
            }
            Some(End::OffGrammar(problem)) => {
                print("\n")?;
                return Err(SessionError::Grammar(problem).into());
            }
        }
    }
}

fn request(args: args::Sampling) -> Result<GenerateRequest, Error> {
    StopMatcher::new(&args.stop)?; // fails before a model is loaded in vain
    Ok(GenerateRequest {
        messages: args.system.iter().map(|text| Message::new("system", text)).collect(),
        max_tokens: args.max_tokens.map(|n| n as usize),
        sampling: args.options(),
        seed: args.seed,
        stop: args.stop,
        ..GenerateRequest::default()
    })
}

/// Prints the speed of an answer, and whether it was cut, if a person watches the terminal.
fn say_how(reason: Reason, timings: &Timings) {
    if !std::io::stderr().is_terminal() {
        return;
    }
    let Timings { prefill, decode, prompt_n, predicted_n, .. } = *timings;
    let cut = if reason == Reason::Length { "; cut at its longest" } else { "" };
    let rate = predicted_n.saturating_sub(1) as f64 / decode.as_secs_f64().max(1e-9);
    let prefill_s = prefill.as_secs_f64();
    log::say(format_args!(
        "({prompt_n} tokens read in {prefill_s:.2} s, {predicted_n} written at {rate:.1} per second{cut})"
    ));
}
