//! `unicorn chat`: a conversation on the terminal, similar to `ollama run` and `llama-cli`.
//!
//! A line that begins with `/` is a command to the program, and never a message to the model. Answers go to standard
//! output, and everything else to standard error. So the output of a piped conversation has only the answers.

mod command;
mod input;

use std::fmt::Write as _;
use std::io::IsTerminal;

use super::args;
use super::error::Error;
use super::generate::{answer, request, runtime};
use super::load::{self, EndEngine};
use super::log::{note, say};
use super::progress::EraseOnInterrupt;
use crate::config::Config;
use crate::engine::{EngineError, SubmitError};
use crate::session::{GenerateRequest, Service};
use crate::text::Message;

use command::{Command, HELP};
use input::{Input, Typed};

/// Reads a message, answers it, and repeats until the input ends.
pub fn chat(config: &Config, args: args::Chat) -> Result<(), Error> {
    let args::Chat { sampling, no_history, .. } = args;
    request(&sampling)?; // reports wrong options before the model is loaded
    let files = load::files(&config.model)?;
    let is_terminal = std::io::stdin().is_terminal();
    // The line editor must be created before other code registers a handler for SIGINT. The editor replaces earlier
    // handlers; the others are called in addition to it.
    let mut input = if is_terminal { Input::terminal(!no_history)? } else { Input::Piped };
    let loading = EraseOnInterrupt::watch(None);
    let service = load::service(&files, config)?;
    drop(loading);
    let _end = EndEngine(service.engine().clone());
    let runtime = runtime()?;
    let mut chat = Chat { service, model: load::model_id(&files, config), sampling, turns: Vec::new() };
    if is_terminal {
        note(format_args!(
            "{}. Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands.",
            chat.model
        ));
    }
    loop {
        let message = match input.read()? {
            Typed::Message(message) => message,
            Typed::Discarded => {
                note("(Ctrl-D leaves)");
                continue;
            }
            Typed::End => return Ok(()),
        };
        match Command::of(&message) {
            None if message.trim().is_empty() => {}
            None => {
                input.remember(&message);
                chat.turns.push(Message::new("user", command::unquoted(&message)));
                // On a terminal, the editor reads Ctrl-C as a key while the user types. It is a signal only during an
                // answer. With piped input, Ctrl-C ends the program.
                let interrupt = async {
                    match is_terminal {
                        true => tokio::signal::ctrl_c().await,
                        false => std::future::pending().await,
                    }
                };
                match runtime.block_on(answer(&chat.service, &chat.request()?, interrupt)) {
                    // The answer was stopped before its first text, so the question is removed from the conversation.
                    Ok(text) if text.is_empty() => drop(chat.turns.pop()),
                    Ok(text) => chat.turns.push(Message::new("assistant", &text)),
                    Err(
                        error @ (Error::Engine(EngineError::Lost(_) | EngineError::Bug(_))
                        | Error::Submit(SubmitError::Engine(_))),
                    ) => return Err(error),
                    Err(error) => {
                        chat.turns.pop();
                        say(format_args!("error: {error} (/new starts a new conversation)"));
                    }
                }
                if is_terminal {
                    note("");
                }
            }
            Some(Ok(Command::Leave)) => return Ok(()),
            Some(Ok(command)) => {
                input.remember(&message);
                chat.execute(command);
            }
            Some(Err(problem)) => {
                input.remember(&message);
                note(problem);
            }
        }
    }
}

/// A conversation, and what is needed to answer it.
struct Chat {
    service: Service,
    model: String,
    sampling: args::Sampling,
    /// The messages of user and assistant, alternating.
    turns: Vec<Message>,
}

impl Chat {
    fn request(&self) -> Result<GenerateRequest, Error> {
        let mut request = request(&self.sampling)?;
        request.messages.extend(self.turns.iter().cloned());
        Ok(request)
    }

    fn execute(&mut self, command: Command) {
        match command {
            Command::Help => note(HELP),
            Command::New => {
                self.turns.clear();
                note("(a new conversation)");
            }
            Command::ShowSystem => note(match &self.sampling.system {
                Some(text) => text,
                None => "(no system prompt)",
            }),
            Command::System(text) => {
                note(if text.is_empty() { "(no system prompt)" } else { "(system prompt set)" });
                self.sampling.system = Some(text).filter(|text| !text.is_empty());
            }
            Command::Set(name, value) => match command::set(&mut self.sampling, &name, &value) {
                Ok(()) => note(self.parameter(&name)),
                Err(problem) => note(problem),
            },
            Command::Show => note(self.show()),
            Command::Leave => unreachable!("the caller leaves"),
        }
    }

    fn show(&self) -> String {
        let mut text = format!("{:<12} {}\n", "model", self.model);
        let context = self.service.engine().limits().max_context;
        let _ = writeln!(text, "{:<12} {} of {context} tokens", "context", self.used());
        for name in command::PARAMETERS {
            let _ = writeln!(text, "{}", self.parameter(name));
        }
        let system = self.sampling.system.as_deref().unwrap_or("none");
        let _ = write!(text, "{:<12} {system}", "system");
        text
    }

    /// The number of tokens of the conversation, including the start of the next turn.
    fn used(&self) -> usize {
        let request = self.request().ok().filter(|request| !request.messages.is_empty());
        request.and_then(|request| self.service.conversation(&request).ok()).map_or(0, |ids| ids.len())
    }

    /// A line with the value of a parameter.
    fn parameter(&self, name: &str) -> String {
        let set = &self.sampling;
        let params = self.service.sampling_params(&set.options());
        let default = |is_set: bool| if is_set { "" } else { " (default)" };
        let off = |value: String, is_off: bool| if is_off { format!("{value}, off") } else { value };
        let value = match name {
            "temperature" => format!("{}{}", params.temperature, default(set.temperature.is_some())),
            "top_p" => off(params.top_p.to_string(), params.top_p == 1.0) + default(set.top_p.is_some()),
            "top_k" => off(params.top_k.to_string(), params.top_k == 0) + default(set.top_k.is_some()),
            "min_p" => off(params.min_p.to_string(), params.min_p == 0.0) + default(set.min_p.is_some()),
            "seed" => set.seed.map_or("random for each answer".into(), |seed| seed.to_string()),
            "max_tokens" => set.max_tokens.map_or("limited only by the context".into(), |n| n.to_string()),
            "stop" if set.stop.is_empty() => "none".into(),
            "stop" => set.stop.iter().map(|text| format!("{text:?}")).collect::<Vec<_>>().join(", "),
            other => unreachable!("{other} is not a parameter"),
        };
        format!("{name:<12} {value}")
    }
}
