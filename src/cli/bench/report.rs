//! The commit that reports name.

use crate::cli::version::COMMIT;

/// The source tree in which this binary was built. A release contains its commit instead, and no path of a source tree.
const SOURCES: Option<&str> = match COMMIT {
    Some(_) => None,
    None => Some(env!("CARGO_MANIFEST_DIR")),
};

/// The commit that this binary was built from: the commit of the release, or of the source tree, if the tree still
/// exists; `+` marks uncommitted changes. On another machine, `UNICORN_COMMIT` gives the commit.
pub fn commit() -> String {
    let described = || {
        let describe = ["describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"];
        let output =
            std::process::Command::new("git").arg("-C").arg(SOURCES?).args(describe).output().ok()?;
        let text = String::from_utf8(output.stdout).ok().filter(|_| output.status.success())?;
        Some(text.trim().to_owned())
    };
    let said = || std::env::var("UNICORN_COMMIT").ok().filter(|commit| !commit.is_empty());
    COMMIT.map(str::to_owned).or_else(described).or_else(said).unwrap_or_else(|| "unknown".into())
}
