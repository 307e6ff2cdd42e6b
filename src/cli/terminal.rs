//! Text for the person at the terminal, or for the program that reads standard output.

use std::io::Write;

use super::error::Error;
pub use crate::config::show_bytes as bytes;

pub fn print(text: &str) -> Result<(), Error> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Error::Output)
}
