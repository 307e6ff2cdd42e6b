//! The kernel's twin, `npu::tile`, on the shapes of models. It computes much, so it is here and not among the unit tests,
//! which are compiled without optimization.

use unicorn::npu::contract::{Job, RowRange};
use unicorn::npu::tile::{Inputs, Reference, attend};

/// The shapes of Gemma-3, and of the demo model: name, head_dim, heads in a group, KV heads of a dispatch, window (their
/// `config.json`).
const GEMMA_3: [(&str, u32, u32, u32, u32); 6] = [
    ("270M", 256, 4, 1, 512),
    ("1B", 256, 4, 1, 512),
    ("4B", 256, 2, 2, 1024),
    ("12B", 256, 2, 1, 1024),
    ("27B", 128, 2, 2, 1024),
    ("demo", 64, 2, 2, 64),
];

/// On random data no error is more than two thirds of its bound. Rows that see few keys come closest to it, because
/// errors do not cancel there.
const MARGIN: f64 = 2.0 / 3.0;

#[test]
fn every_gemma_3_is_within_the_margin() {
    for (seed, (name, head_dim, heads, groups, window)) in GEMMA_3.into_iter().enumerate() {
        for (window, first, len) in
            [(None, 0, 40), (None, 300, 23), (Some(window), 0, 40), (Some(window), window + 76, 37)]
        {
            let (_, job) =
                Job::plan(head_dim, heads, window, groups, RowRange { first, len }).expect("a plan");
            for score_deviation in [0.5, 3.0, 8.0] {
                let inputs = Inputs::random(&job, seed as u64, score_deviation);
                let worst = Reference::new(&job, &inputs).worst(&attend(&job, &inputs.rounded()));
                let what =
                    format!("{name}, {window:?}, {len} rows from {first}, deviation {score_deviation}");
                println!("{what}: {worst:.3} of the bound");
                assert!(worst <= MARGIN, "{what}: {worst:.3} of the bound, {MARGIN} is expected");
            }
        }
    }
}
