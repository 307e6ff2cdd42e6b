//! The findings of `unicorn doctor`, and the three forms in which they are printed.

use serde::Serialize;

/// How much a finding matters to `unicorn serve`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, strum::Display)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Severity {
    Ok,
    /// Worth knowing; also a fact that could not be read.
    Note,
    /// Costs speed or memory, or will cause a failure later.
    Warning,
    /// Prevents `unicorn serve` from running.
    Problem,
}

/// How a user fixes a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RemedyKind {
    /// A command of the shell.
    Command,
    /// A parameter to add to the kernel's command line.
    KernelParameter,
    /// A parameter to remove from the kernel's command line.
    KernelParameterRemoved,
    /// A setting of the machine's firmware (BIOS).
    Firmware,
    /// An option of `unicorn`.
    Option,
    /// An action for which there is no command.
    Act,
}

#[derive(Debug, Clone, Serialize)]
pub struct Remedy {
    pub kind: RemedyKind,
    pub text: String,
    /// The line that `--fix` prints: the command itself, or a shell comment.
    pub line: String,
}

#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    pub severity: Severity,
    /// Stable between versions; `docs/doctor.md` lists all codes.
    pub code: String,
    pub found: String,
    pub cause: Option<String>,
    pub remedies: Vec<Remedy>,
    /// The files that the finding is based on, as absolute paths of the machine.
    pub read: Vec<String>,
}

impl Finding {
    fn new(severity: Severity, code: &str, found: impl Into<String>) -> Finding {
        Finding {
            severity,
            code: code.into(),
            // The text may come from a file. Control characters in it must not reach the terminal.
            found: found.into().replace(char::is_control, " "),
            cause: None,
            remedies: Vec::new(),
            read: Vec::new(),
        }
    }

    pub fn ok(code: &str, found: impl Into<String>) -> Finding {
        Finding::new(Severity::Ok, code, found)
    }

    pub fn note(code: &str, found: impl Into<String>) -> Finding {
        Finding::new(Severity::Note, code, found)
    }

    pub fn warning(code: &str, found: impl Into<String>) -> Finding {
        Finding::new(Severity::Warning, code, found)
    }

    pub fn problem(code: &str, found: impl Into<String>) -> Finding {
        Finding::new(Severity::Problem, code, found)
    }

    /// A fact that could not be read. This is a note, and neither `ok` nor a problem.
    pub fn unread(code: &str, path: &str, error: &std::io::Error) -> Finding {
        Finding::note(&format!("{code}-unread"), format!("unknown: /{path}: {error}")).read_from(path)
    }

    pub fn cause(mut self, cause: impl Into<String>) -> Finding {
        self.cause = Some(cause.into());
        self
    }

    /// Names a file that the finding is based on, by its path relative to the root.
    pub fn read_from(mut self, path: &str) -> Finding {
        self.read.push(format!("/{path}"));
        self
    }

    pub fn command(self, command: impl Into<String>) -> Finding {
        let command = command.into();
        self.remedy(RemedyKind::Command, command.clone(), command)
    }

    pub fn firmware(self, setting: &str) -> Finding {
        self.remedy(RemedyKind::Firmware, setting.into(), format!("# firmware (BIOS): {setting}"))
    }

    pub fn option(self, option: impl Into<String>) -> Finding {
        let option = option.into();
        let line = format!("# option of unicorn: {option}");
        self.remedy(RemedyKind::Option, option, line)
    }

    pub fn act(self, act: &str) -> Finding {
        self.remedy(RemedyKind::Act, act.into(), format!("# {act}"))
    }

    pub fn remedy(mut self, kind: RemedyKind, text: String, line: String) -> Finding {
        self.remedies.push(Remedy { kind, text, line });
        self
    }
}

/// All findings about a machine, in the order of the checks.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The version of the JSON format.
    version: u32,
    root: String,
    problems: usize,
    warnings: usize,
    notes: usize,
    exit_status: u8,
    findings: Vec<Finding>,
}

impl Report {
    pub fn new(root: String, findings: Vec<Finding>) -> Report {
        let count = |severity| findings.iter().filter(|finding| finding.severity == severity).count();
        let problems = count(Severity::Problem);
        Report {
            version: 1,
            root,
            problems,
            warnings: count(Severity::Warning),
            notes: count(Severity::Note),
            exit_status: u8::from(problems > 0),
            findings,
        }
    }

    pub fn problems(&self) -> usize {
        self.problems
    }

    pub fn as_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("strings and numbers") + "\n"
    }

    /// Findings for a person. The most severe ones are last, so that they are directly above the shell prompt.
    pub fn as_text(&self) -> String {
        let mut sorted: Vec<&Finding> = self.findings.iter().collect();
        sorted.sort_by_key(|finding| finding.severity);
        let mut text = String::new();
        for finding in sorted {
            text += &format!("{:<8} {:<22} {}\n", finding.severity, finding.code, finding.found);
            if finding.severity == Severity::Ok {
                continue;
            }
            let mut row = |name: &str, value: &str| text += &format!("         {name:<22} {value}\n");
            finding.cause.iter().for_each(|cause| row("  cause", cause));
            for remedy in &finding.remedies {
                let name = match remedy.kind {
                    RemedyKind::Command => "  run",
                    RemedyKind::KernelParameter => "  kernel parameter",
                    RemedyKind::KernelParameterRemoved => "  remove parameter",
                    RemedyKind::Firmware => "  in the firmware",
                    RemedyKind::Option => "  option",
                    RemedyKind::Act => "  do",
                };
                row(name, &remedy.text);
            }
            if !finding.read.is_empty() {
                row("  read from", &finding.read.join(", "));
            }
        }
        let counted = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
        let counts = [(self.problems, "problem"), (self.warnings, "warning"), (self.notes, "note")];
        text + &format!("\n{}\n", counts.map(|(n, what)| counted(n, what)).join(", "))
    }

    /// The lines of all remedies, as a shell script. The user is to read it before running it.
    pub fn as_script(&self) -> String {
        let lines = self.findings.iter().flat_map(|finding| &finding.remedies);
        lines.map(|remedy| format!("{}\n", remedy.line)).collect()
    }
}
