//! The NPU's kernels of the demo model, built with stand-ins for the toolchain (tests/npu/toolchain), and the double of
//! the shim over XRT.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use tempfile::TempDir;

use super::program::{example, output, unicorn};
use super::{demo, root};

/// Options of `unicorn npu build-kernels` and an environment in which it finds the stand-ins.
pub fn with_toolchain(command: &mut Command) {
    let toolchain = root().join("tests/npu/toolchain");
    command.arg("--python").arg(toolchain.join("bin/python-with-mlir-aie"));
    command.env("PEANO_INSTALL_DIR", toolchain.join("llvm-aie"));
    with_tools_in_path(command);
}

/// Has the stand-ins' folder of programs before the others.
pub fn with_tools_in_path(command: &mut Command) {
    let path = std::env::var_os("PATH").expect("a PATH");
    let tools = root().join("tests/npu/toolchain/bin");
    let folders = [tools].into_iter().chain(std::env::split_paths(&path));
    command.env("PATH", std::env::join_paths(folders).expect("folders without colons"));
}

/// A folder with kernels for the demo model: for one and for two of its KV heads, with and without its window. The
/// double computes what they are for; no NPU could run them.
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

/// The demo model's kernels with `part` in their names.
pub fn demo_kernels_with(part: &str) -> TempDir {
    let kernels = tempfile::tempdir().expect("a folder");
    for entry in std::fs::read_dir(demo_kernels()).expect("kernels").flatten() {
        if entry.file_name().to_string_lossy().contains(part) {
            std::fs::copy(entry.path(), kernels.path().join(entry.file_name())).expect("a copy");
        }
    }
    kernels
}

/// The shared object that stands in for the shim over XRT.
pub fn double() -> PathBuf {
    example("npu_double")
}
