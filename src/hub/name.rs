//! Names of models of the hub as a user types them: `ORG/NAME`, `ORG/NAME@REVISION`, `ORG/NAME:FILE`.
//!
//! Every part of a name becomes part of a path on disk and of a URL, so this module checks each part, once. File names
//! from the server go through [`check_file`] as well, because the server is not trusted more than the user.

use std::fmt;
use std::str::FromStr;

/// The hub's own limit on a name, and the limit of common file systems on a path component.
const MAX_NAME: usize = 96;
const MAX_COMPONENT: usize = 255;
const MAX_PATH: usize = 1024;

/// The revision of a name that does not give one.
pub const MAIN: &str = "main";

/// The error for a text that is not the name of a model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NameError(String);

/// `ORG/NAME`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RepoId(String);

/// A repository, and optionally a revision and a file of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelName {
    pub repo: RepoId,
    /// A branch, a tag, a commit, or `refs/pr/N`; `None` means `main`.
    pub revision: Option<String>,
    /// A file of the repository, or the quantization tag at the end of a file's name (`Q4_0`).
    pub file: Option<String>,
}

impl RepoId {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name without the organisation.
    pub fn name(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or(&self.0)
    }

    /// The folder of this repository in a cache.
    pub(super) fn folder(&self) -> String {
        format!("models--{}", self.0.replace('/', "--"))
    }

    /// Reads back what [`RepoId::folder`] made; `None` for any other folder.
    pub(super) fn from_folder(folder: &str) -> Option<Self> {
        let (org, name) = folder.strip_prefix("models--")?.split_once("--")?;
        format!("{org}/{name}").parse().ok()
    }
}

impl fmt::Display for RepoId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for RepoId {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let good = |part: &str| {
            (1..=MAX_NAME).contains(&part.len())
                && part.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
                && !part.starts_with(['.', '-'])
                && !part.ends_with(['.', '-'])
                && !part.contains("..")
                && !part.contains("--")
        };
        match text.split_once('/') {
            Some((org, name)) if good(org) && good(name) => Ok(Self(text.to_owned())),
            _ => Err(NameError(format!(
                "{text:?} is not the name of a model on the hub; expected ORG/NAME, ORG/NAME@REVISION or ORG/NAME:FILE"
            ))),
        }
    }
}

impl FromStr for ModelName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let (rest, file) = split(text, ':');
        let (repo, revision) = split(rest, '@');
        if let Some(file) = file {
            check_file(file).map_err(|problem| NameError(format!("{text:?}: {file:?} {problem}")))?;
        }
        if let Some(revision) = revision {
            check_revision(revision).map_err(|problem| NameError(format!("{text:?}: {problem}")))?;
        }
        let repo = repo.parse()?;
        Ok(Self { repo, revision: revision.map(str::to_owned), file: file.map(str::to_owned) })
    }
}

impl ModelName {
    /// Reads a name as clients of other servers write it too: with the hub's host before it (`hf.co/ORG/NAME:Q4_K_M`), or
    /// with Ollama's tag `:latest` after it.
    pub fn read(text: &str) -> Result<Self, NameError> {
        let text = text.trim();
        let without_host = text.strip_prefix("https://").unwrap_or(text);
        let without_host =
            ["hf.co/", "huggingface.co/"].into_iter().find_map(|host| without_host.strip_prefix(host));
        let text = without_host.unwrap_or(text);
        text.strip_suffix(":latest").unwrap_or(text).parse()
    }

    /// Whether the revision is a commit, and no branch or tag.
    pub fn is_commit(&self) -> bool {
        self.revision.as_deref().is_some_and(is_commit)
    }

    /// The revision, or `main` if the name has none.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(MAIN)
    }

    /// This revision of the repository, with another file.
    pub fn with_file(&self, file: &str) -> Self {
        Self { file: Some(file.to_owned()), ..self.clone() }
    }
}

/// Writes the name as a user types it.
impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.repo)?;
        if let Some(revision) = &self.revision {
            write!(f, "@{revision}")?;
        }
        if let Some(file) = &self.file {
            write!(f, ":{file}")?;
        }
        Ok(())
    }
}

fn split(text: &str, at: char) -> (&str, Option<&str>) {
    text.split_once(at).map_or((text, None), |(before, after)| (before, Some(after)))
}

fn check_revision(revision: &str) -> Result<(), String> {
    let good = |part: &str| {
        !part.is_empty()
            && part.len() <= MAX_COMPONENT
            && !part.starts_with(['.', '-'])
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "._-+".contains(c))
            && !part.contains("..")
    };
    if revision.len() <= MAX_PATH && revision.split('/').all(good) {
        return Ok(());
    }
    Err(format!(
        "{revision:?} is not a revision; expected a branch, a tag or a commit (as in ORG/NAME@REVISION:FILE)"
    ))
}

/// Checks that `path` is a relative path without `.` and `..`. The error text continues a sentence that begins with the
/// path.
pub(super) fn check_file(path: &str) -> Result<(), &'static str> {
    if path.is_empty() || path.len() > MAX_PATH {
        return Err("is not a file name: it is empty or too long");
    }
    if path.chars().any(|c| c.is_control() || c == '\\') {
        return Err("is not a file name: it has control characters or backslashes");
    }
    // An absolute path begins with an empty part.
    if path
        .split('/')
        .any(|part| part.is_empty() || part == "." || part == ".." || part.len() > MAX_COMPONENT)
    {
        return Err("is not a path inside the repository");
    }
    Ok(())
}

/// Whether this is the full hash of a commit.
pub(super) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}
