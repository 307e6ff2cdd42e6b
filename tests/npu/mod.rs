//! The NPU: its containers, its shim, its process, and attention that is shared with it.

mod containers;
mod offload;
mod process;
mod shim;
mod tile;
