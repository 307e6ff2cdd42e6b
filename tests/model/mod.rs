//! Whole models on a device: goldens of each family, the sizes of images, the demo model, the pools of KV blocks, placement in memory, the self-test and the tuner.

mod demo;
mod families;
mod golden;
mod heaps;
mod image_sizes;
mod kv_groups;
mod placement;
mod self_test;
mod smollm2;
mod tune;
mod vision;
