//! Kernels alone: against their twins, in any order, and as the target's compiler translates them.

mod experts;
mod fast;
mod hazards;
mod streams;
mod target_compile;
mod twins;
mod vision;
