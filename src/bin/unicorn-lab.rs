//! The `unicorn-lab` binary. All code is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    unicorn::lab::main()
}
