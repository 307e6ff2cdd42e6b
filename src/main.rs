//! The `unicorn` binary: everything is in the library, so that tests and documentation reach it.

use std::process::ExitCode;

fn main() -> ExitCode {
    unicorn::cli::main()
}
