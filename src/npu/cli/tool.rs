//! Runs a tool of another project with a time limit, and keeps its output. The processes that the tool started end
//! together with it.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::signal::unix::{SignalKind, signal};

use crate::cli::error::Error;
use crate::cli::log;

/// Interval of the checks whether a tool has ended.
const TICK: Duration = Duration::from_millis(20);
/// Maximum length of a failed tool's output that is shown.
const TAIL_LINES: usize = 15;
const TAIL_BYTES: u64 = 8192;

/// How a tool is run: its name for messages, its time limit, and the file to which its output is appended.
pub struct Run<'a> {
    pub name: &'a str,
    pub limit: Duration,
    pub log: &'a Path,
}

impl Run<'_> {
    /// Runs a command to its end. Standard output goes to the file `output`, or otherwise into the log, as standard
    /// error does. The last lines of the log are shown if the command fails.
    pub fn run(&self, command: &mut Command, output: Option<&Path>) -> Result<(), Error> {
        let ended = self.end_of(command, output);
        ended.map_err(|problem| {
            for line in tail(self.log) {
                log::say(format_args!("  {line}"));
            }
            Error::Tool { tool: self.name.to_owned(), problem }
        })
    }

    /// [`Run::run`] without output on standard error.
    pub fn end_of(&self, command: &mut Command, output: Option<&Path>) -> Result<(), String> {
        let at = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
        let log = OpenOptions::new().create(true).append(true).open(self.log);
        let log = log.map_err(|error| at(self.log, error))?;
        let to = match output {
            Some(path) => File::create(path).map_err(|error| at(path, error))?,
            None => log.try_clone().map_err(|error| at(self.log, error))?,
        };
        // A separate process group, so that the processes that the tool starts can be ended, too.
        let command = command.stdin(Stdio::null()).stdout(to).stderr(log).process_group(0);
        let program = command.get_program().display().to_string();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| format!("cannot start the runtime: {error}"))?;
        runtime.block_on(async {
            // Signal handlers are installed before the child starts. Otherwise a signal could end this process and
            // leave the child running.
            let caught =
                signal(SignalKind::interrupt()).and_then(|i| Ok((i, signal(SignalKind::terminate())?)));
            let (mut interrupt, mut terminate) = caught.map_err(|error| format!("signals: {error}"))?;
            let mut child = command.spawn().map_err(|error| format!("{program} cannot be run: {error}"))?;
            let problem = tokio::select! {
                ended = ended(&mut child) => match ended {
                    Ok(status) if status.success() => return Ok(()),
                    Ok(status) => how(status),
                    Err(error) => format!("its end cannot be seen: {error}"),
                },
                () = tokio::time::sleep(self.limit) => {
                    let seconds = self.limit.as_secs();
                    format!("not done after {seconds} s, and ended; --tool-limit-s gives it longer")
                }
                _ = interrupt.recv() => "ended, since this command was interrupted".into(),
                _ = terminate.recv() => "ended, since this command was told to end".into(),
            };
            let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
            let _ = child.wait();
            Err(problem)
        })
    }
}

async fn ended(child: &mut Child) -> std::io::Result<ExitStatus> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        tokio::time::sleep(TICK).await;
    }
}

fn how(status: ExitStatus) -> String {
    match status.code() {
        Some(code) => format!("failed with exit status {code}"),
        None => format!("was ended by signal {}", status.signal().unwrap_or(0)),
    }
}

/// The last lines of a file, without control sequences of terminals.
fn tail(path: &Path) -> Vec<String> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|mut file| {
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
        file.take(TAIL_BYTES).read_to_end(&mut bytes)
    });
    if read.is_err() {
        return Vec::new();
    }
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let lines: Vec<String> = text.lines().map(plain).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].to_vec()
}

/// A line without colours and other control characters.
fn plain(line: &str) -> String {
    let mut rest = line.chars();
    let mut text = String::new();
    while let Some(c) = rest.next() {
        match c {
            // A sequence such as ESC [ 31 m ends with a letter.
            '\x1b' => drop(rest.by_ref().find(char::is_ascii_alphabetic)),
            '\t' => text.push(' '),
            c if c.is_control() => {}
            c => text.push(c),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_steers_no_terminal() {
        assert_eq!(plain("\x1b[1;31merror:\x1b[0m a\tb\r\x07 ä"), "error: a b ä");
        assert_eq!(plain("\x1b[31"), "");
    }

    #[test]
    fn the_last_lines_are_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let text: String = (0..3000).map(|i| format!("line {i}\n")).collect();
        std::fs::write(&path, text).unwrap();
        let lines = tail(&path);
        assert_eq!((lines.len(), lines[14].as_str()), (15, "line 2999"));
        assert!(tail(&folder.path().join("absent")).is_empty());
    }
}
