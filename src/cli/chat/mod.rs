//! `unicorn chat`: a conversation on the terminal, similar to `ollama run` and `llama-cli`.
//!
//! A line that begins with `/` is a command to the program, and never a message to the model. Answers go to standard
//! output, and everything else to standard error. So the output of a piped conversation has only the answers.

mod command;
mod input;

use std::fmt::Write as _;
use std::io::IsTerminal;

use super::args::Sampling;
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
pub use input::piped_text;
use input::{Input, Typed};

/// The other side of a conversation.
pub trait Partner {
    /// The model's name.
    fn model(&self) -> &str;

    /// Prints the answer to the last of `turns`, and returns its text. `interrupt` stops the answer; then the text until now
    /// is returned.
    fn answer(
        &mut self,
        sampling: &Sampling,
        turns: &[Message],
        interrupt: impl Future<Output = std::io::Result<()>>,
    ) -> Result<String, Error>;

    /// Whether no answer can follow after this error.
    fn ends_with(&self, error: &Error) -> bool;

    /// How much of the context the conversation takes.
    fn context(&self, sampling: &Sampling, turns: &[Message]) -> String;

    fn defaults(&self) -> Defaults;
}

/// The sampling defaults of a model.
#[derive(Debug, Clone, Copy)]
pub struct Defaults {
    pub temperature: f32,
    pub top_p: f32,
    pub top_k: u32,
    pub min_p: f32,
}

/// Loads the configured model, and talks to it.
pub fn chat(config: &Config, sampling: Sampling, with_history: bool) -> Result<(), Error> {
    request(&sampling)?; // reports wrong options before the model is loaded
    let files = load::files(&config.model)?;
    let input = input(with_history)?;
    let loading = EraseOnInterrupt::watch(None);
    let service = load::service(&files, config)?;
    drop(loading);
    let _end = EndEngine(service.engine().clone());
    converse(Here { service, model: load::model_id(&files, config), runtime: runtime()? }, input, sampling)
}

/// The messages of a person. They must be created before other code registers a handler for SIGINT: the line editor replaces
/// earlier handlers, and others are called in addition to it.
pub fn input(with_history: bool) -> Result<Input, Error> {
    if std::io::stdin().is_terminal() { Input::terminal(with_history) } else { Ok(Input::Piped) }
}

/// Reads a message, answers it, and repeats until the input ends. Later messages are answered after one that was not; if
/// the messages came from a pipe, the conversation ends with an error then.
pub fn converse(partner: impl Partner, mut input: Input, sampling: Sampling) -> Result<(), Error> {
    let is_terminal = matches!(input, Input::Terminal(_));
    let (mut asked, mut unanswered) = (0, 0);
    let mut chat = Chat { partner, sampling, turns: Vec::new() };
    if is_terminal {
        note(format_args!(
            "{}. Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands.",
            chat.partner.model()
        ));
    }
    loop {
        let message = match input.read()? {
            Typed::Message(message) => message,
            Typed::Discarded => {
                note("(Ctrl-D leaves)");
                continue;
            }
            Typed::End => break,
        };
        match Command::of(&message) {
            None if message.trim().is_empty() => {}
            None => {
                input.remember(&message);
                asked += 1;
                chat.turns.push(Message::new("user", command::unquoted(&message)));
                // On a terminal, the editor reads Ctrl-C as a key while the user types. It is a signal only during an
                // answer. With piped input, Ctrl-C ends the program.
                let interrupt = async {
                    match is_terminal {
                        true => tokio::signal::ctrl_c().await,
                        false => std::future::pending().await,
                    }
                };
                match chat.partner.answer(&chat.sampling, &chat.turns, interrupt) {
                    // The answer was stopped before its first text, so the question is removed from the conversation.
                    Ok(text) if text.is_empty() => drop(chat.turns.pop()),
                    Ok(text) => chat.turns.push(Message::new("assistant", &text)),
                    // Without a reader of the answers, such as `head` that has ended, no answer can be printed.
                    Err(error @ Error::Output(_)) => return Err(error),
                    Err(error) if chat.partner.ends_with(&error) => return Err(error),
                    Err(error) => {
                        chat.turns.pop();
                        unanswered += 1;
                        say(format_args!("error: {error} (/new starts a new conversation)"));
                    }
                }
                if is_terminal {
                    note("");
                }
            }
            Some(Ok(Command::Leave)) => break,
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
    // A person has read the errors; a script reads the exit status.
    match is_terminal || unanswered == 0 {
        true => Ok(()),
        false => Err(Error::Unanswered { unanswered, asked }),
    }
}

/// A model that this process has loaded.
struct Here {
    service: Service,
    model: String,
    runtime: tokio::runtime::Runtime,
}

impl Here {
    fn request(sampling: &Sampling, turns: &[Message]) -> Result<GenerateRequest, Error> {
        let mut request = request(sampling)?;
        request.messages.extend(turns.iter().cloned());
        Ok(request)
    }
}

impl Partner for Here {
    fn model(&self) -> &str {
        &self.model
    }

    fn answer(
        &mut self,
        sampling: &Sampling,
        turns: &[Message],
        interrupt: impl Future<Output = std::io::Result<()>>,
    ) -> Result<String, Error> {
        let request = Self::request(sampling, turns)?;
        self.runtime.block_on(answer(&self.service, &request, interrupt))
    }

    fn ends_with(&self, error: &Error) -> bool {
        matches!(
            error,
            Error::Engine(EngineError::Lost(_) | EngineError::Bug(_)) | Error::Submit(SubmitError::Engine(_))
        )
    }

    /// The tokens of the conversation, including the start of the next turn.
    fn context(&self, sampling: &Sampling, turns: &[Message]) -> String {
        let request = Self::request(sampling, turns).ok().filter(|request| !request.messages.is_empty());
        let ids = request.and_then(|request| self.service.conversation(&request).ok());
        let context = self.service.engine().limits().max_context;
        format!("{} of {context} tokens", ids.map_or(0, |ids| ids.len()))
    }

    fn defaults(&self) -> Defaults {
        let params = self.service.sampling_params(&Default::default());
        Defaults {
            temperature: params.temperature,
            top_p: params.top_p,
            top_k: params.top_k,
            min_p: params.min_p,
        }
    }
}

/// A conversation.
struct Chat<P> {
    partner: P,
    sampling: Sampling,
    /// The messages of user and assistant, alternating.
    turns: Vec<Message>,
}

impl<P: Partner> Chat<P> {
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
        let mut text = format!("{:<12} {}\n", "model", self.partner.model());
        let _ = writeln!(text, "{:<12} {}", "context", self.partner.context(&self.sampling, &self.turns));
        for name in command::PARAMETERS {
            let _ = writeln!(text, "{}", self.parameter(name));
        }
        let system = self.sampling.system.as_deref().unwrap_or("none");
        let _ = write!(text, "{:<12} {system}", "system");
        text
    }

    /// A line with the value of a parameter.
    fn parameter(&self, name: &str) -> String {
        let set = &self.sampling;
        let defaults = self.partner.defaults();
        let temperature = set.temperature.unwrap_or(defaults.temperature);
        let top_p = set.top_p.unwrap_or(defaults.top_p);
        let top_k = set.top_k.unwrap_or(defaults.top_k);
        let min_p = set.min_p.unwrap_or(defaults.min_p);
        let default = |is_set: bool| if is_set { "" } else { " (default)" };
        let off = |value: String, is_off: bool| if is_off { format!("{value}, off") } else { value };
        let value = match name {
            "temperature" => format!("{temperature}{}", default(set.temperature.is_some())),
            "top_p" => off(top_p.to_string(), top_p == 1.0) + default(set.top_p.is_some()),
            "top_k" => off(top_k.to_string(), top_k == 0) + default(set.top_k.is_some()),
            "min_p" => off(min_p.to_string(), min_p == 0.0) + default(set.min_p.is_some()),
            "seed" => set.seed.map_or("random for each answer".into(), |seed| seed.to_string()),
            "max_tokens" => set.max_tokens.map_or("limited only by the context".into(), |n| n.to_string()),
            "stop" if set.stop.is_empty() => "none".into(),
            "stop" => set.stop.iter().map(|text| format!("{text:?}")).collect::<Vec<_>>().join(", "),
            other => unreachable!("{other} is not a parameter"),
        };
        format!("{name:<12} {value}")
    }
}
