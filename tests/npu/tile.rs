//! The kernel's twin, `npu::tile`, on the shapes of models. It computes much, so it is here and not among the unit tests,
//! which are compiled without optimization.

use unicorn::npu::contract::{Job, RowRange};
use unicorn::npu::tile::{Inputs, Reference, attend, attend_where};

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

/// A faulty kernel exceeds its bound at least by this factor, so that the result does not depend on the random data.
const FAULT: f64 = 4.0;

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

/// The bound finds plausible errors of a kernel.
#[test]
fn faults_exceed_the_bound_by_far() {
    for seed in [10, 11, 12] {
        check_faults(seed);
    }
}

fn check_faults(seed: u64) {
    let (head_dim, heads, window) = (256, 2, 1024);
    let range = RowRange { first: 1200, len: 200 };
    let (_, job) = Job::plan(head_dim, heads, Some(window), 1, range).expect("a plan");
    let inputs = Inputs::random(&job, seed, 5.0);
    let (reference, rounded) = (Reference::new(&job, &inputs), inputs.rounded());
    let faulty = |what: &str, output: &[f32]| {
        let worst = reference.worst(output);
        println!("seed {seed}, {what}: {worst:.1} bounds");
        assert!(worst > FAULT, "seed {seed}, {what}: only {worst:.2} bounds");
    };
    let sound = attend(&job, &rounded);
    assert!(reference.worst(&sound) <= MARGIN);

    let masked = |sees: &dyn Fn(u32, u32) -> bool| attend_where(&job, &rounded, sees);
    let positions = |row, key| (job.row0() + row, job.key0() + key);
    for tile in [5, 40, job.keys() / 16 - 1] {
        faulty(&format!("tile {tile} dropped"), &masked(&|r, k| job.sees(r, k) && k / 16 != tile));
    }
    let edge = |window: u32| {
        masked(&|r, k| {
            let (row, key) = positions(r, k);
            key <= row && key + window > row && k < job.keys()
        })
    };
    faulty("a window longer by 1", &edge(window + 1));
    faulty("a window shorter by 1", &edge(window - 1));
    faulty(
        "a row's own key hidden",
        &masked(&|r, k| job.sees(r, k) && positions(r, 0).0 != positions(0, k).1),
    );
    faulty("the next key seen", &masked(&|r, k| job.sees(r, k) || job.key0() + k == job.row0() + r + 1));
    faulty("no mask", &masked(&|_, k| k < job.keys()));
    faulty("a row too late", &masked(&|r, k| job.sees(r + 1, k)));

    let mut poisoned = sound.clone();
    poisoned[7] = f32::NAN;
    assert_eq!(reference.worst(&poisoned), f64::INFINITY);
    assert_eq!(reference.worst(&sound[1..]), f64::INFINITY);
    faulty("nothing written", &vec![0.0; sound.len()]);
}
