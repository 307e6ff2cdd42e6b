//! The NPU for the commands: opens it for a load, and has `unicorn npu`, `unicorn npu-process`, `unicorn bench npu` and
//! the doctor's checks. This folder belongs to the same layer as `cli`.

#[cfg(feature = "npu")]
mod bench;
#[cfg(feature = "npu")]
mod build;
mod doctor;
#[cfg(feature = "npu")]
mod kernels;
#[cfg(feature = "npu")]
mod process;
#[cfg(feature = "npu")]
mod start;
#[cfg(feature = "npu")]
mod tool;
#[cfg(feature = "npu")]
mod toolchain;
#[cfg(not(feature = "npu"))]
mod without;

pub use doctor::check;
#[cfg(not(feature = "npu"))]
pub use without::{Npu, bench, npu_process, planned, reader};
#[cfg(feature = "npu")]
pub use {
    bench::bench,
    kernels::{build_kernels, list},
    process::npu_process,
    start::{Npu, planned, reader},
};
