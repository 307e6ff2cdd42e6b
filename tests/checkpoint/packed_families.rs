//! GPTQ, AWQ and compressed-tensors checkpoints of every family compute what their matrices stand for.
//!
//! Each projection of a small model gets random integers of 4 bits with zero points. They are packed in the three
//! ways, and stored as the floating-point values that they stand for.

use std::path::Path;

use half::f16;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use tempfile::TempDir;

use unicorn::model::arch::open_files;
use unicorn::model::load::{LoadOptions, Source};

use crate::support::checkpoints::{folder_of, le_bytes, opened, safetensors_file};
use crate::support::goldens::{all_logits, load, max_difference};
use crate::support::json::read_json;
use crate::support::packed_files::{awq, compressed, gptq, words};
use crate::support::{data, in_turn};

/// Columns of a group.
const GROUP: usize = 32;

/// Largest difference of a logit. Both sides compute in f32, with sums in another order.
const BOUND: f32 = 1e-4;

/// Tensors of a file: name, element type, shape, bytes.
type Parts = Vec<(String, &'static str, Vec<usize>, Vec<u8>)>;
/// How a matrix of this name is stored.
type Form = fn(&Matrix, &str) -> Parts;

/// Integers of 4 bits. Each group of a row has a zero point and a scale.
struct Matrix {
    rows: usize,
    cols: usize,
    /// `[rows][cols]`
    weights: Vec<u8>,
    /// `[rows][groups]`
    zeros: Vec<u8>,
    scales: Vec<f16>,
}

impl Matrix {
    fn random(rows: usize, cols: usize, rng: &mut ChaCha8Rng) -> Matrix {
        let groups = rows * cols / GROUP;
        Matrix {
            rows,
            cols,
            weights: (0..rows * cols).map(|_| rng.random_range(0..16)).collect(),
            zeros: (0..groups).map(|_| rng.random_range(1..16)).collect(),
            scales: (0..groups).map(|_| f16::from_f32(rng.random_range(0.004..0.02))).collect(),
        }
    }

    fn groups(&self) -> usize {
        self.cols / GROUP
    }

    fn weight(&self, row: usize, col: usize) -> u8 {
        self.weights[row * self.cols + col]
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        self.zeros[row * self.groups() + group]
    }

    fn values(&self) -> Vec<f32> {
        let value = |i: usize| {
            let group = i / GROUP;
            self.scales[group].to_f32() * (f32::from(self.weights[i]) - f32::from(self.zeros[group]))
        };
        (0..self.weights.len()).map(value).collect()
    }

    /// Scales as `[rows][groups]`, or transposed.
    fn scale_bytes(&self, transposed: bool) -> Vec<u8> {
        let (rows, groups) = (self.rows, self.groups());
        let order: Vec<usize> = match transposed {
            false => (0..rows * groups).collect(),
            true => (0..groups).flat_map(|g| (0..rows).map(move |row| row * groups + g)).collect(),
        };
        order.into_iter().flat_map(|i| self.scales[i].to_le_bytes()).collect()
    }

    /// Words of eight columns; zero points of eight rows.
    fn gptq(&self, name: &str) -> Parts {
        let (rows, cols, groups) = (self.rows, self.cols, self.groups());
        let weights = packed(cols / 8, rows, |word, row, i| self.weight(row, word * 8 + i));
        let zeros = packed(groups, rows / 8, |group, word, i| self.zero(word * 8 + i, group));
        vec![
            (format!("{name}.qweight"), "I32", vec![cols / 8, rows], weights),
            (format!("{name}.qzeros"), "I32", vec![groups, rows / 8], zeros),
            (format!("{name}.scales"), "F16", vec![groups, rows], self.scale_bytes(true)),
            (format!("{name}.g_idx"), "I32", vec![cols], words((0..cols).map(|col| (col / GROUP) as u32))),
        ]
    }

    /// Words of eight rows, in an order of their own.
    fn awq(&self, name: &str) -> Parts {
        const ROWS: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
        let (rows, cols, groups) = (self.rows, self.cols, self.groups());
        let weights = packed(cols, rows / 8, |col, word, i| self.weight(word * 8 + ROWS[i], col));
        let zeros = packed(groups, rows / 8, |group, word, i| self.zero(word * 8 + ROWS[i], group));
        vec![
            (format!("{name}.qweight"), "I32", vec![cols, rows / 8], weights),
            (format!("{name}.qzeros"), "I32", vec![groups, rows / 8], zeros),
            (format!("{name}.scales"), "F16", vec![groups, rows], self.scale_bytes(true)),
        ]
    }

    /// Words of eight columns, row after row; zero points of eight rows.
    fn compressed(&self, name: &str) -> Parts {
        let (rows, cols, groups) = (self.rows, self.cols, self.groups());
        let weights = packed(rows, cols / 8, |row, word, i| self.weight(row, word * 8 + i));
        let zeros = packed(rows / 8, groups, |word, group, i| self.zero(word * 8 + i, group));
        let shape = [rows, cols].iter().flat_map(|n| (*n as i64).to_le_bytes()).collect();
        vec![
            (format!("{name}.weight_packed"), "I32", vec![rows, cols / 8], weights),
            (format!("{name}.weight_scale"), "F16", vec![rows, groups], self.scale_bytes(false)),
            (format!("{name}.weight_zero_point"), "I32", vec![rows / 8, groups], zeros),
            (format!("{name}.weight_shape"), "I64", vec![2], shape),
        ]
    }

    fn plain(&self, name: &str) -> Parts {
        vec![(format!("{name}.weight"), "F32", vec![self.rows, self.cols], le_bytes(&self.values()))]
    }
}

/// `outer` times `inner` words of eight integers, the lowest bits first. `of` gets both indices and the place.
fn packed(outer: usize, inner: usize, of: impl Fn(usize, usize, usize) -> u8) -> Vec<u8> {
    let word = |n: usize| (0..8).fold(0, |word, i| word | u32::from(of(n / inner, n % inner, i)) << (4 * i));
    words((0..outer * inner).map(word))
}

/// The model of `set` with random projections, stored by `form`.
fn model(set: &Path, quantization: Option<Value>, form: Form) -> TempDir {
    let mut rng = ChaCha8Rng::seed_from_u64(38);
    let mut config: Value = read_json(&set.join("config.json"));
    if let Some(quantization) = quantization {
        config["quantization_config"] = quantization;
    }
    let checkpoint = opened(set);
    let mut tensors: Vec<_> = checkpoint.iter().collect();
    tensors.sort_by_key(|tensor| tensor.name.to_owned());
    let mut parts = Parts::new();
    for tensor in tensors {
        match tensor.name.strip_suffix("_proj.weight") {
            Some(name) => {
                // Experts are packed one by one.
                let names: Vec<String> = match *tensor.shape {
                    [experts, _, _] => {
                        (0..experts).map(|n| name.replace(".experts.", &format!(".experts.{n}."))).collect()
                    }
                    _ => vec![name.to_owned()],
                };
                let rows = tensor.rows() / names.len();
                for name in names {
                    let matrix = Matrix::random(rows, tensor.cols(), &mut rng);
                    parts.extend(form(&matrix, &format!("{name}_proj")));
                }
            }
            None => {
                let values = le_bytes(&tensor.to_f32().unwrap());
                parts.push((tensor.name.to_owned(), "F32", tensor.shape.to_vec(), values));
            }
        }
    }
    let stored: Vec<_> =
        parts.iter().map(|(name, dtype, shape, bytes)| (&name[..], *dtype, &shape[..], &bytes[..])).collect();
    folder_of(&[
        ("config.json", config.to_string().into_bytes()),
        ("model.safetensors", safetensors_file(&stored)),
    ])
}

/// Each family is packed in one of the three ways, or with `UNICORN_TEST_KERNELS=all` in each of them.
#[test]
fn packed_matrices_of_every_family_compute_what_they_stand_for() {
    const SETS: [&str; 6] = [
        "tiny-gemma4-31b",
        "tiny-llama",
        "tiny-mistral-window",
        "tiny-qwen2",
        "tiny-qwen3-tied",
        "tiny-qwen3-moe",
    ];
    for (i, set) in SETS.into_iter().enumerate() {
        let set = data("families").join(set);
        let tokens: Vec<u32> = (0..40).map(|i| (i * 37 + 5) % 200).collect();
        let logits = |folder: &Path| all_logits(&mut load(folder, &LoadOptions::default()), &tokens);
        let plain = logits(model(&set, None, Matrix::plain).path());
        let others = max_difference(&plain, &logits(&set));
        assert!(others > 1000.0 * BOUND, "{}: the matrices are not random: {others}", set.display());
        let forms: [(Value, Form); 3] =
            [(gptq(), Matrix::gptq), (awq(), Matrix::awq), (compressed(), Matrix::compressed)];
        for (quantization, form) in in_turn(&forms, i).iter().cloned() {
            let name = quantization["quant_method"].clone();
            let got = logits(model(&set, Some(quantization), form).path());
            let difference = max_difference(&got, &plain);
            println!("{} {name}: max |difference| {difference:.2e}", set.display());
            assert!(difference <= BOUND, "{} {name}: {difference}", set.display());
        }
    }
}

/// AutoGPTQ writes a bias for every matrix: zeros, where the model has none.
#[test]
fn biases_of_zeros_in_a_gptq_checkpoint_are_left_out_and_others_are_refused() {
    fn with_bias(matrix: &Matrix, name: &str, byte: u8) -> Parts {
        let bias = (format!("{name}.bias"), "F16", vec![matrix.rows], vec![byte; 2 * matrix.rows]);
        [matrix.gptq(name), vec![bias]].concat()
    }
    let set = data("families").join("tiny-llama");
    let weights = |form: Form| {
        let folder = model(&set, Some(gptq()), form);
        let files = open_files(folder.path()).unwrap();
        let source = Source::open(&files).unwrap();
        source.weights().map(|weights| weights.tensors.iter().count()).map_err(|error| error.to_string())
    };
    let plain = weights(Matrix::gptq).unwrap();
    assert_eq!(weights(|matrix, name| with_bias(matrix, name, 0)), Ok(plain));
    let error = weights(|matrix, name| with_bias(matrix, name, 0x3c)).unwrap_err();
    assert!(
        error.contains("model.layers.0.mlp.down_proj.bias and 20 more are no part of a Llama"),
        "{error}"
    );
}
