//! Whole models on a device: goldens, the demo model, placement in memory, the self-test and the tuner.

mod demo;
mod golden;
mod placement;
mod self_test;
mod tune;
