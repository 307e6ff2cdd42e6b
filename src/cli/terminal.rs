//! Prints text to standard output, for a person or a program.

use std::io::Write;

use super::error::Error;
pub use crate::config::show_bytes as bytes;

pub fn print(text: &str) -> Result<(), Error> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Error::Output)
}
