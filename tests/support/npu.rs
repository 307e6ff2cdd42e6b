//! NPU kernels for the demo model, built with a fake toolchain (tests/npu/toolchain), and the double of the XRT shim.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use tempfile::TempDir;

use super::program::{example, output, unicorn};
use super::{demo, root};

/// Adds the options and the environment with which `unicorn npu build-kernels` finds the fake toolchain.
pub fn with_toolchain(command: &mut Command) {
    let toolchain = root().join("tests/npu/toolchain");
    command.arg("--python").arg(toolchain.join("bin/python-with-mlir-aie"));
    command.env("PEANO_INSTALL_DIR", toolchain.join("llvm-aie"));
    with_tools_in_path(command);
}

/// Puts the folder of the fake programs first in PATH.
pub fn with_tools_in_path(command: &mut Command) {
    let path = std::env::var_os("PATH").expect("a PATH");
    let tools = root().join("tests/npu/toolchain/bin");
    let folders = [tools].into_iter().chain(std::env::split_paths(&path));
    command.env("PATH", std::env::join_paths(folders).expect("folders without colons"));
}

/// A folder with kernels for the demo model: for one and for two of its KV heads, with and without its window. The
/// double computes their results on the CPU. A real NPU could not run them.
pub fn demo_kernels() -> &'static Path {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let mut command = unicorn(&["npu", "build-kernels", "--groups", "1,2", "--rows", "256"]);
        command.args(["--keys", "512"]).arg("--kernels").arg(folder.path());
        command.arg("--model").arg(demo::folder());
        with_toolchain(&mut command);
        let (code, stdout, stderr) = output(command);
        assert_eq!(code, 0, "{stdout}{stderr}");
        folder
    });
    folder.path()
}

/// A folder with only those kernels for the demo model that have `part` in their names.
pub fn demo_kernels_with(part: &str) -> TempDir {
    let kernels = tempfile::tempdir().expect("a folder");
    for entry in std::fs::read_dir(demo_kernels()).expect("kernels").flatten() {
        if entry.file_name().to_string_lossy().contains(part) {
            std::fs::copy(entry.path(), kernels.path().join(entry.file_name())).expect("a copy");
        }
    }
    kernels
}

/// The shared object of the double, which replaces the XRT shim.
pub fn double() -> PathBuf {
    example("npu_double")
}
