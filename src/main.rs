//! The `unicorn` binary. All code is in the library, so that tests and documentation can use it.

use std::process::ExitCode;

fn main() -> ExitCode {
    unicorn::cli::main()
}
