//! The input of the terminal chat, typed or piped, message by message.
//!
//! Typed lines are kept in a history for the arrow keys. A file, which only its owner can read, keeps them between
//! runs. Piped input is not kept.

use std::borrow::Cow;
use std::fs::{self, DirBuilder};
use std::io::{BufRead, ErrorKind, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustyline::completion::Completer;
use rustyline::config::{Behavior, ColorMode};
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::{Hint, Hinter};
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Context, Editor, Helper};

use super::command::{COMMANDS, PARAMETERS, is_open};
use crate::cli::error::Error;
use crate::cli::terminal::{dim, has_colors};
use crate::config::UserFolder;

/// Maximum number of texts in the history, and maximum bytes of one. Longer texts are not kept.
const HISTORY_ENTRIES: usize = 1000;
const ENTRY_BYTES: usize = 16 << 10;
/// Maximum bytes of the history file. This program writes no larger one.
const HISTORY_BYTES: u64 = 2 * (HISTORY_ENTRIES * ENTRY_BYTES) as u64;
/// Maximum bytes of a piped message, far more than fit into any context.
const PIPED_BYTES: usize = 16 << 20;

pub enum Input {
    Terminal(Box<LineEditor>),
    Piped,
}

pub enum Typed {
    Message(String),
    /// Ctrl-C discarded the line.
    Discarded,
    End,
}

impl Input {
    /// The line editor of a terminal. `with_history`: read the texts of earlier runs, and keep those of this run.
    pub fn terminal(with_history: bool) -> Result<Input, Error> {
        let colors = has_colors(&std::io::stdout());
        let config = rustyline::Config::builder()
            // If the answers are redirected to a file, the prompt still goes to the terminal.
            .behavior(Behavior::PreferTerm)
            .color_mode(if colors { ColorMode::Enabled } else { ColorMode::Disabled })
            .max_history_size(HISTORY_ENTRIES)
            .map_err(Error::Terminal)?
            .build();
        let mut editor = Editor::with_config(config).map_err(Error::Terminal)?;
        editor.set_helper(Some(Assistant { colors }));
        let mut line_editor = LineEditor { editor, history: None };
        if with_history {
            line_editor.open_history();
        }
        Ok(Input::Terminal(Box::new(line_editor)))
    }

    /// The next message.
    pub fn read(&mut self) -> Result<Typed, Error> {
        match self {
            Input::Terminal(line_editor) => match line_editor.editor.readline("> ") {
                Ok(text) => Ok(Typed::Message(text)),
                Err(ReadlineError::Interrupted) => Ok(Typed::Discarded),
                Err(ReadlineError::Eof) => Ok(Typed::End),
                Err(error) => Err(Error::Terminal(error)),
            },
            Input::Piped => {
                let text = piped(&mut std::io::stdin().lock())?;
                Ok(text.map_or(Typed::End, Typed::Message))
            }
        }
    }

    /// Adds a text to the history.
    pub fn remember(&mut self, text: &str) {
        if let Input::Terminal(line_editor) = self
            && text.len() <= ENTRY_BYTES
        {
            line_editor.remember(text);
        }
    }
}

/// All of the piped input, as one message.
pub fn piped_text() -> Result<String, Error> {
    let mut text = Vec::new();
    let read = std::io::stdin().lock().take(PIPED_BYTES as u64 + 1).read_to_end(&mut text);
    read.map_err(|error| Error::Terminal(error.into()))?;
    if text.len() > PIPED_BYTES {
        return Err(too_long());
    }
    String::from_utf8(text).map_err(|_| refused("a message is not UTF-8"))
}

fn refused(problem: &str) -> Error {
    Error::Argument(format!("standard input: {problem}"))
}

fn too_long() -> Error {
    refused(&format!("a message is longer than {} MiB", PIPED_BYTES >> 20))
}

/// Reads a line, or the lines between three quotes and the next three quotes; `None` at the end of the input. A last
/// message without a line end or without closing quotes is returned too.
fn piped(input: &mut impl BufRead) -> Result<Option<String>, Error> {
    let mut text = String::new();
    loop {
        let room = PIPED_BYTES - text.len();
        let mut line = Vec::new();
        let read = input.take(room as u64).read_until(b'\n', &mut line);
        read.map_err(|error| Error::Terminal(error.into()))?;
        let is_whole = line.ends_with(b"\n");
        if line.len() == room && !is_whole {
            return Err(too_long());
        }
        let is_end = line.is_empty();
        text += std::str::from_utf8(&line).map_err(|_| refused("a message is not UTF-8"))?;
        if is_end && text.is_empty() {
            return Ok(None);
        }
        if is_end || !is_open(&text) {
            return Ok(Some(text.trim_end_matches(['\r', '\n']).to_owned()));
        }
    }
}

/// The line editor of a terminal, and the history of typed texts.
pub struct LineEditor {
    editor: Editor<Assistant, FileHistory>,
    /// The file of the history; `None` if texts are not kept.
    history: Option<PathBuf>,
}

impl LineEditor {
    /// Loads the texts of earlier runs. If this fails, the chat works without a history file.
    fn open_history(&mut self) {
        let Some(folder) = UserFolder::State.path(|name| std::env::var_os(name)) else { return };
        let file = folder.join("chat_history");
        match self.load(&folder, &file) {
            Ok(()) => self.history = Some(file),
            Err(problem) => {
                tracing::warn!("{}: {problem}: the lines of this chat are not kept", file.display())
            }
        }
    }

    fn load(&mut self, folder: &Path, file: &Path) -> Result<(), String> {
        let created = DirBuilder::new().recursive(true).mode(0o700).create(folder);
        created.map_err(|error| error.to_string())?;
        match fs::metadata(file) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error.to_string()),
            Ok(found) if !found.is_file() => Err("not a regular file".into()),
            Ok(found) if found.len() > HISTORY_BYTES => {
                Err(format!("larger than {} MiB, the limit of a history file", HISTORY_BYTES >> 20))
            }
            Ok(_) => self.editor.load_history(file).map_err(|error| error.to_string()),
        }
    }

    fn remember(&mut self, text: &str) {
        // If this fails, only the arrow keys do not show the text.
        let _ = self.editor.add_history_entry(text);
        let Some(file) = &self.history else { return };
        if let Err(error) = self.editor.append_history(file) {
            tracing::warn!("{}: {error}: further lines of this chat are not kept", file.display());
            self.history = None;
        }
    }
}

/// The helper of the line editor: a placeholder, completion of commands, and texts of several lines.
struct Assistant {
    colors: bool,
}

/// The hint that an empty line shows. It is not part of the line.
struct Placeholder;

impl Hint for Placeholder {
    fn display(&self) -> &str {
        "Message, or /help"
    }

    fn completion(&self) -> Option<&str> {
        None
    }
}

impl Hinter for Assistant {
    type Hint = Placeholder;

    fn hint(&self, line: &str, _: usize, _: &Context<'_>) -> Option<Placeholder> {
        (self.colors && line.is_empty()).then_some(Placeholder)
    }
}

impl Highlighter for Assistant {
    fn highlight_hint<'h>(&self, hint: &'h str) -> Cow<'h, str> {
        dim(hint, self.colors)
    }
}

impl Validator for Assistant {
    fn validate(&self, typed: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(match is_open(typed.input()) {
            true => ValidationResult::Incomplete,
            false => ValidationResult::Valid(None),
        })
    }
}

impl Completer for Assistant {
    type Candidate = String;

    fn complete(&self, line: &str, at: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<String>)> {
        let typed = &line[..at];
        let (start, words) = match typed.strip_prefix("/set ") {
            Some(_) => ("/set ".len(), &PARAMETERS[..]),
            None if typed.starts_with('/') => (0, &COMMANDS[..]),
            None => return Ok((at, Vec::new())),
        };
        let fitting = words.iter().filter(|word| word.starts_with(&typed[start..]));
        Ok((start, fitting.map(|word| format!("{word} ")).collect()))
    }
}

impl Helper for Assistant {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piped_message_is_a_line_or_a_quoted_text() {
        let all = "one\r\n\n\"\"\"two\nlines\"\"\"\n/new\n\"\"\"cut\noff";
        let mut input = all.as_bytes();
        let mut messages = Vec::new();
        while let Some(message) = piped(&mut input).expect("sound") {
            messages.push(message);
        }
        assert_eq!(messages, ["one", "", "\"\"\"two\nlines\"\"\"", "/new", "\"\"\"cut\noff"]);
        for (input, part) in [(&b"\xff\n"[..], "not UTF-8"), (&vec![b'x'; PIPED_BYTES + 1], "16 MiB")] {
            let mut input = input;
            let Err(error) = piped(&mut input) else { panic!("{part}") };
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
