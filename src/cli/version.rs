//! `unicorn --version`: the facts for a bug report about the build and the machine's Vulkan drivers.

use std::fmt::Write as _;

use super::devices;
use super::error::Error;
use super::terminal::print;

/// The commit of this build. Only `make release` sets the variable, because a change of it recompiles everything.
pub const COMMIT: Option<&str> = option_env!("UNICORN_BUILD_COMMIT");

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
