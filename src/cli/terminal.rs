//! Output to the terminal.

use std::borrow::Cow;
use std::io::{IsTerminal, Write};

use super::error::Error;
pub use crate::config::show_bytes as bytes;

pub fn print(text: &str) -> Result<(), Error> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Error::Output)
}

/// Whether a stream shows colours: it is a terminal with colours, and `NO_COLOR` is not set (no-color.org).
pub fn has_colors(stream: &impl IsTerminal) -> bool {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    stream.is_terminal() && set("NO_COLOR").is_none() && set("TERM").is_none_or(|term| term != "dumb")
}

/// A dimmed text, if there are colours.
pub fn dim(text: &str, colors: bool) -> Cow<'_, str> {
    if colors && !text.is_empty() { format!("\x1b[2m{text}\x1b[0m").into() } else { text.into() }
}
