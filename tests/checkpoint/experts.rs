//! The matrices of experts, in each way that checkpoints store them.

use std::fs;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use tempfile::TempDir;

use crate::support::checkpoints::{
    ByName, StoredTensor, folder_of, le_bytes, mutate, opened, read_all, refusal, safetensors_file,
};
use crate::support::damaged::DamagedReadings;

const GATE: &str = "model.layers.0.mlp.experts.0.gate_proj.weight";
const OTHER_GATE: &str = "model.layers.0.mlp.experts.1.gate_proj.weight";
const FUSED: &str = "model.layers.0.experts.gate_up_proj";
const DOWN: &str = "model.layers.0.experts.down_proj";

fn folder(tensors: &[StoredTensor]) -> TempDir {
    folder_of(&[("model.safetensors", safetensors_file(tensors))])
}

/// Consecutive numbers from `first`.
fn numbers(first: usize, count: usize) -> Vec<f32> {
    (first..first + count).map(|n| n as f32).collect()
}

#[test]
fn a_tensor_for_each_expert_becomes_one_of_all() {
    // The file has them in another order.
    let [zero, one] = [numbers(0, 6), numbers(6, 6)].map(|values| le_bytes(&values));
    let folder = folder(&[(OTHER_GATE, "F32", &[2, 3], &one), (GATE, "F32", &[2, 3], &zero)]);
    let checkpoint = opened(folder.path());
    assert_eq!(checkpoint.iter().len(), 1);
    let all = checkpoint.get("model.layers.0.mlp.experts.gate_proj.weight").expect("all experts");
    assert_eq!((all.shape, all.rows(), all.cols(), all.stored_bytes()), (&[2, 2, 3][..], 4, 3, 48));
    assert_eq!(all.to_f32().unwrap(), numbers(0, 12));
    assert_eq!(all.rows_f32(1..3).unwrap(), numbers(3, 6), "rows of both");
}

#[test]
fn gate_and_up_in_one_tensor_become_two() {
    let (fused, down) = (le_bytes(&numbers(0, 2 * 4 * 3)), le_bytes(&numbers(100, 2 * 3 * 2)));
    let folder = folder(&[(FUSED, "F32", &[2, 4, 3], &fused), (DOWN, "F32", &[2, 3, 2], &down)]);
    let checkpoint = opened(folder.path());
    let values = |name: &str| {
        let tensor = checkpoint.get(&format!("model.layers.0.experts.{name}.weight")).expect("a tensor");
        (tensor.shape.to_vec(), tensor.to_f32().unwrap())
    };
    // The rows of gate come before those of up, in each expert.
    assert_eq!(values("gate_proj"), (vec![2, 2, 3], [numbers(0, 6), numbers(12, 6)].concat()));
    assert_eq!(values("up_proj"), (vec![2, 2, 3], [numbers(6, 6), numbers(18, 6)].concat()));
    assert_eq!(values("down_proj"), (vec![2, 3, 2], numbers(100, 12)));
    assert_eq!(checkpoint.iter().len(), 3);
}

#[test]
fn experts_that_do_not_match_are_refused_by_name() {
    let (six, four) = (le_bytes(&numbers(0, 6)), le_bytes(&numbers(0, 4)));
    let half: Vec<u8> = vec![0; 12];
    let third = "model.layers.0.mlp.experts.2.gate_proj.weight";
    let whole = "model.layers.0.mlp.experts.gate_proj.weight";
    let cases: [(&[StoredTensor], &str); 6] = [
        (
            &[(GATE, "F32", &[2, 3], &six), (third, "F32", &[2, 3], &six)],
            "is the tensor of expert 2, and that of expert 1 is missing",
        ),
        (
            &[(GATE, "F32", &[2, 3], &six), (OTHER_GATE, "F32", &[2, 2], &four)],
            "has shape [2, 2] in f32, and the same tensor of expert 0 [2, 3] in f32; expected the same for all experts",
        ),
        (
            &[(GATE, "F32", &[2, 3], &six), (OTHER_GATE, "F16", &[2, 3], &half)],
            "has shape [2, 3] in f16, and the same tensor of expert 0 [2, 3] in f32; expected the same for all experts",
        ),
        (&[(GATE, "F32", &[6], &six), (OTHER_GATE, "F32", &[6], &six)], "has shape [6]; expected a matrix"),
        (
            &[(GATE, "F32", &[2, 3], &six), (whole, "F32", &[1, 2, 3], &six)],
            "is stored for single experts and for all of them; expected it once",
        ),
        (&[(FUSED, "F32", &[0, 2, 3], &[])], "has shape [0, 2, 3]; expected at least one of each"),
    ];
    for (tensors, expected) in cases {
        let folder = folder(tensors);
        let error = refusal(folder.path());
        assert!(error.contains(expected), "{error}");
        assert!(error.starts_with("model.safetensors: tensor model.layers.0."), "{error}");
    }
}

#[test]
fn damaged_experts_are_read_or_refused() {
    let (two, fused) = (le_bytes(&numbers(0, 6)), le_bytes(&numbers(0, 24)));
    let whole = safetensors_file(&[
        (GATE, "F32", &[2, 3], &two),
        (OTHER_GATE, "F32", &[2, 3], &two),
        (FUSED, "F32", &[2, 4, 3], &fused),
        (DOWN, "F32", &[2, 4, 3], &fused),
    ]);
    let folder = folder_of(&[("model.safetensors", whole.clone())]);
    let mut readings = DamagedReadings::default();
    for seed in 0..3000 {
        let damaged = mutate(&whole, &mut ChaCha8Rng::seed_from_u64(seed));
        fs::write(folder.path().join("model.safetensors"), &damaged).unwrap();
        readings.add(damaged.len(), format_args!("seed {seed}"), || read_all(folder.path()));
    }
    println!("{} read, {} refused", readings.read, readings.refused);
    assert!(readings.read > 500 && readings.refused > 500);
}
