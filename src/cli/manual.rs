//! The manual pages and shell completions that a package installs. Both are generated from clap's description of the
//! command line.

use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;

use super::args::CommandLine;
use super::error::Error;
use super::terminal::print;

pub fn completions(shell: Shell) -> Result<(), Error> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command_line(), "unicorn", &mut text);
    print(&String::from_utf8_lossy(&text))
}

/// Writes `unicorn.1`, and a page for each command: `unicorn-serve.1`.
pub fn pages(folder: &Path) -> Result<(), Error> {
    let at = |error| Error::File { path: folder.to_owned(), error };
    std::fs::create_dir_all(folder).map_err(at)?;
    clap_mangen::generate_to(command_line(), folder).map_err(at)
}

/// clap's description of the command line, without the command `help`, which would add a page and a completion for
/// every other command.
pub fn command_line() -> clap::Command {
    CommandLine::command().disable_help_subcommand(true)
}
