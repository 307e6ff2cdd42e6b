//! The commands of the terminal chat, and the message in a typed text.

use std::error::Error as _;

use clap::Parser;

use crate::cli::args::Sampling;
use crate::text::StopMatcher;

/// The quotes at the start and the end of a text of several lines.
const QUOTES: &str = "\"\"\"";

/// The names that `/set` accepts. They are the names of the API.
pub const PARAMETERS: [&str; 7] = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop"];

pub const COMMANDS: [&str; 10] =
    ["/help", "/new", "/clear", "/system", "/set", "/show", "/bye", "/exit", "/quit", "/?"];

/// Lines have at most 80 characters, the width of a small terminal.
pub const HELP: &str = "\
/new, /clear       begin a new conversation
/system [TEXT]     show the system prompt, or set it; \"\" removes it
/set NAME VALUE    temperature, top_p, top_k, min_p, seed, max_tokens or stop;
                   the value `default` restores the model's default
/show              show model, context in use, parameters and system prompt
/bye, /exit        leave; also Ctrl-D
/help, /?          show this list
\"\"\"                begin a message of several lines; the same quotes end it
Ctrl-C             stop the answer, or discard the line

A pasted text of several lines is one message. To send a line that begins
with /, put a space before it.";

#[derive(Debug, PartialEq, Eq)]
pub enum Command {
    Help,
    New,
    ShowSystem,
    System(String),
    Set(String, String),
    Show,
    Leave,
}

impl Command {
    /// Parses a text as a command. `None` means that the text is a message. A line that begins with `/` and is not a
    /// known command is an error, because the user meant a command. A text of several lines is a message then: only the
    /// known commands accept several lines.
    pub fn of(text: &str) -> Option<Result<Command, String>> {
        text.starts_with('/').then_some(())?;
        let (word, rest) = split(text);
        let rest = rest.trim();
        Some(Ok(match word {
            "/help" | "/?" => Command::Help,
            "/new" | "/clear" => Command::New,
            "/system" if rest.is_empty() => Command::ShowSystem,
            "/system" => system(rest),
            "/show" => Command::Show,
            "/bye" | "/exit" | "/quit" => Command::Leave,
            "/set" => return Some(assignment(rest)),
            _ if text.trim_end().contains('\n') => return None,
            _ => {
                return Some(Err(format!(
                    "unknown command {word:?}: /help lists the commands; put a space before the line to send it to \
                     the model"
                )));
            }
        }))
    }
}

/// Parses the arguments of `/set`. As in `ollama run`, the word `parameter` may precede the name, and the name `system`
/// sets the system prompt.
fn assignment(text: &str) -> Result<Command, String> {
    let (name, value) = match split(text) {
        ("parameter", rest) => split(rest.trim()),
        pair => pair,
    };
    let value = value.trim();
    match name {
        "system" => Ok(system(value)),
        name if !PARAMETERS.contains(&name) => {
            let names = PARAMETERS.join(", ");
            Err(format!("/set NAME VALUE: unknown parameter {name:?}; expected one of {names}, or system"))
        }
        name if value.is_empty() => Err(format!("/set {name}: expected a value, or the word `default`")),
        name => Ok(Command::Set(name.to_owned(), value.to_owned())),
    }
}

fn split(text: &str) -> (&str, &str) {
    text.split_once(char::is_whitespace).unwrap_or((text, ""))
}

/// Whether a message or a system prompt began with three quotes, and the three quotes at its end are still missing.
pub fn is_open(text: &str) -> bool {
    let text = text.trim_start();
    let prompt = ["/system", "/set system"].iter().find_map(|command| text.strip_prefix(command));
    let quoted = prompt.unwrap_or(text).trim_start().strip_prefix(QUOTES);
    quoted.is_some_and(|rest| !rest.trim_end().ends_with(QUOTES))
}

/// A text without the three quotes around it, and without the line breaks next to them.
pub fn unquoted(text: &str) -> &str {
    let Some(rest) = text.trim().strip_prefix(QUOTES) else { return text };
    let rest = rest.strip_suffix(QUOTES).unwrap_or(rest);
    let rest = rest.strip_prefix('\n').unwrap_or(rest);
    rest.strip_suffix('\n').unwrap_or(rest)
}

/// A system prompt. It may also be in one pair of quotes. An empty pair removes the prompt.
fn system(text: &str) -> Command {
    let inner = text.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    let plain = inner.filter(|inner| !inner.starts_with('"') && !inner.ends_with('"'));
    Command::System(plain.unwrap_or_else(|| unquoted(text)).to_owned())
}

/// The sampling options of the command line. `/set` parses and checks its values with them.
#[derive(Parser)]
#[command(no_binary_name = true)]
struct Options {
    #[command(flatten)]
    sampling: Sampling,
}

/// Sets a parameter. The value `default` restores the model's default.
pub fn set(sampling: &mut Sampling, name: &str, value: &str) -> Result<(), String> {
    let values = match (value, name) {
        ("default", _) => Vec::new(),
        (_, "stop") => stop_texts(value)?,
        _ => vec![value.to_owned()],
    };
    let options = values.iter().map(|value| format!("--{}={value}", name.replace('_', "-")));
    let new = Options::try_parse_from(options).map_err(|error| {
        let problem = error.source().map_or_else(|| error.to_string(), ToString::to_string);
        format!("{name}: {value:?}: {problem}")
    })?;
    let new = new.sampling;
    match name {
        "temperature" => sampling.temperature = new.temperature,
        "top_p" => sampling.top_p = new.top_p,
        "top_k" => sampling.top_k = new.top_k,
        "min_p" => sampling.min_p = new.min_p,
        "seed" => sampling.seed = new.seed,
        "max_tokens" => sampling.max_tokens = new.max_tokens,
        "stop" => {
            StopMatcher::new(&new.stop).map_err(|error| error.to_string())?;
            sampling.stop = new.stop;
        }
        other => unreachable!("{other} is not a parameter"),
    }
    Ok(())
}

/// Parses stop texts: one plain text, a JSON string, or a JSON list of strings.
fn stop_texts(value: &str) -> Result<Vec<String>, String> {
    let expected = |error| format!("stop: {error}; expected a text, a JSON string, or a JSON list of them");
    match value.as_bytes()[0] {
        b'[' => serde_json::from_str(value).map_err(expected),
        b'"' => serde_json::from_str(value).map(|text| vec![text]).map_err(expected),
        _ => Ok(vec![value.to_owned()]),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory;

    use super::*;

    fn sampling() -> Sampling {
        Options::try_parse_from([""; 0]).unwrap_or_else(|error| panic!("{error}")).sampling
    }

    #[test]
    fn a_line_with_a_slash_is_a_command_or_an_error() {
        let of = |text: &str| Command::of(text).map(Result::ok);
        let set = |name: &str, value: &str| Some(Some(Command::Set(name.into(), value.into())));
        for (text, expected) in [
            ("hello", None),
            (" /help is a command", None),
            ("", None),
            ("/help", Some(Some(Command::Help))),
            ("/?", Some(Some(Command::Help))),
            ("/clear ", Some(Some(Command::New))),
            ("/system", Some(Some(Command::ShowSystem))),
            ("/system Be brief.", Some(Some(Command::System("Be brief.".into())))),
            ("/system \"\"", Some(Some(Command::System(String::new())))),
            ("/system \"\"\"\na\nb\n\"\"\"", Some(Some(Command::System("a\nb".into())))),
            ("/set temperature 0.5", set("temperature", "0.5")),
            ("/set parameter stop a b", set("stop", "a b")),
            ("/set system Be brief.", Some(Some(Command::System("Be brief.".into())))),
            ("/bye", Some(Some(Command::Leave))),
            // As in `ollama run`, a path is an unknown command.
            ("/etc/passwd is what?", Some(None)),
            ("/hlep", Some(None)),
            ("/", Some(None)),
            ("/set", Some(None)),
            ("/set heat 3", Some(None)),
            ("/set temperature", Some(None)),
            // Only known commands accept several lines, so this pasted text is a message.
            ("// a comment\nfn main() {}", None),
        ] {
            assert_eq!(of(text), expected, "{text:?}");
        }
    }

    #[test]
    fn three_quotes_delimit_several_lines() {
        for (text, open, message) in [
            ("\"\"\"", true, ""),
            ("\"\"\"a\nb", true, "a\nb"),
            ("\"\"\"a\nb\"\"\"", false, "a\nb"),
            ("\"\"\"\na \"\"\" b\n\"\"\" ", false, "a \"\"\" b"),
            ("\"quoted\"", false, "\"quoted\""),
            ("/system \"\"\"a", true, "/system \"\"\"a"),
            ("/set system \"\"\"a", true, "/set system \"\"\"a"),
            ("/system a", false, "/system a"),
            ("systems \"\"\"", false, "systems \"\"\""),
        ] {
            assert_eq!((is_open(text), unquoted(text)), (open, message), "{text:?}");
        }
    }

    #[test]
    fn parameters_are_the_sampling_options_with_their_limits() {
        let options = Options::command();
        let names = options.get_arguments().map(|option| option.get_id().as_str());
        let names: BTreeSet<&str> = names.filter(|name| *name != "system").collect();
        assert_eq!(names, BTreeSet::from(PARAMETERS));
        assert!(
            PARAMETERS.iter().all(|name| HELP.contains(name)) && HELP.lines().all(|line| line.len() <= 80)
        );
        let mut sampling = sampling();
        for (name, value) in [
            ("temperature", "0.5"),
            ("top_p", "0.25"),
            ("top_k", "3"),
            ("min_p", "0"),
            ("seed", "7"),
            ("max_tokens", "9"),
            ("stop", r#"["\n", "end"]"#),
        ] {
            set(&mut sampling, name, value).unwrap();
        }
        assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k), (Some(0.5), Some(0.25), Some(3)));
        assert_eq!((sampling.min_p, sampling.seed, sampling.max_tokens), (Some(0.0), Some(7), Some(9)));
        assert_eq!(sampling.stop, ["\n", "end"]);
        for (name, value, part) in [
            ("temperature", "3", "expected a number from 0 to 2"),
            ("max_tokens", "0", "1..="),
            ("seed", "-1", "invalid digit"),
            ("stop", "[1]", "JSON"),
        ] {
            let problem = set(&mut sampling, name, value).unwrap_err();
            assert!(problem.starts_with(name) && problem.contains(part), "{problem}");
        }
        assert_eq!(
            (sampling.temperature, sampling.max_tokens),
            (Some(0.5), Some(9)),
            "refused values change nothing"
        );
        for name in PARAMETERS {
            set(&mut sampling, name, "default").unwrap();
        }
        assert!(sampling.temperature.is_none() && sampling.seed.is_none() && sampling.stop.is_empty());
        set(&mut sampling, "stop", "two words").unwrap();
        assert_eq!(sampling.stop, ["two words"]);
    }
}
