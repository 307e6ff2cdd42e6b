//! The commit of this build, and `unicorn --version`: the facts for a bug report about the build and the machine's
//! Vulkan drivers.

use std::fmt::Write as _;

use super::devices;
use super::error::Error;
use super::terminal::print;

/// The commit of this build. Only `make release` sets the variable, because a change of it recompiles everything.
const COMMIT: Option<&str> = option_env!("UNICORN_BUILD_COMMIT");

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

pub fn version() -> Result<(), Error> {
    let mut text = format!("unicorn {}\n", env!("CARGO_PKG_VERSION"));
    let mut line = |name: &str, value: &str| {
        let _ = writeln!(text, "   {name:<9} {value}");
    };
    line("commit", COMMIT.unwrap_or("not recorded: `make release` records it"));
    line("platform", &format!("{} {}", std::env::consts::OS, std::env::consts::ARCH));
    line("features", if cfg!(feature = "npu") { "npu" } else { "none" });
    line("kernels", env!("SHADER_HASH"));
    for driver in devices::drivers() {
        line("driver", &driver);
    }
    print(&text)
}
