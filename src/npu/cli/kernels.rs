//! `unicorn npu`: builds the kernels of a Ryzen AI's NPU with the toolchain of this machine, and lists them.

use std::path::PathBuf;

use super::build;
use super::start::kernels_folder;
use crate::cli::args::{BuildKernels, KernelFolder};
use crate::cli::error::Error;
use crate::cli::terminal::print;
use crate::config::Config;
use crate::npu::store::{Store, file_stem, record};

pub fn build_kernels(config: &Config, args: &BuildKernels) -> Result<(), Error> {
    build::build_kernels(config, args, &folder(config, &args.folder)?)
}

/// Prints a line for each stored kernel.
pub fn list(config: &Config, args: &KernelFolder) -> Result<(), Error> {
    let folder = folder(config, args)?;
    let store = Store::open(&folder).map_err(|error| Error::Argument(error.to_string()))?;
    let mut text = String::new();
    for kernel in store.kernels() {
        let stem = file_stem(kernel.shape, kernel.bucket);
        let built = record(&folder, &stem).map(|record| record.toolchain.join(", "));
        let built =
            built.map_or("no record of its toolchain".to_owned(), |tools| format!("built with {tools}"));
        text.push_str(&format!("{stem}  valid, {built}\n"));
    }
    for (name, error) in store.refused() {
        text.push_str(&format!("{name}  not valid: {}\n", error.message));
    }
    if text.is_empty() {
        text = format!("{}: no kernels; `unicorn npu build-kernels` builds them\n", folder.display());
    }
    print(&text)
}

fn folder(config: &Config, args: &KernelFolder) -> Result<PathBuf, Error> {
    args.kernels.clone().or_else(|| kernels_folder(config)).ok_or_else(|| {
        Error::Argument("no folder for the NPU's kernels: HOME is not set; name one with --kernels".into())
    })
}
