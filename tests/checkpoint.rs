//! Checkpoints: reading them, refusing bad ones, and quantizing them bit for bit.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use half::{bf16, f16};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::support::data;
use unicorn::checkpoint::{Checkpoint, ModelFiles};
use unicorn::model::config::Gemma3Config;
use unicorn::model::weights::Gemma3Weights;
use unicorn::quantize::{dequantize_row, grouping, quantize_row, quantize_rows};
use unicorn::tensor::{DType, QuantizeMode, Scheme};

const GEMMA3_SETS: [&str; 3] = ["tiny-a", "tiny-b", "tiny-27b-ratio"];

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn open(path: &Path) -> (Gemma3Config, Checkpoint) {
    let files = ModelFiles::open(path).unwrap();
    (Gemma3Config::load(&files).unwrap().0, Checkpoint::open(&files).unwrap())
}

// ---- Real layouts -------------------------------------------------------------------------------------

#[test]
fn every_layout_loads_with_its_weights() {
    // (folder, layers, language tensors' first name, vision tensors skipped)
    let cases = [
        ("gemma3/tiny-a", 8, "model.embed_tokens.weight", 0),
        ("gemma3/tiny-b", 7, "model.embed_tokens.weight", 0),
        ("gemma3/tiny-27b-ratio", 6, "language_model.model.embed_tokens.weight", 39),
        ("transformers5/tiny-27b-l2", 2, "model.language_model.embed_tokens.weight", 39),
    ];
    for (folder, layers, embedding, vision) in cases {
        let (config, checkpoint) = open(&data(folder));
        let weights = Gemma3Weights::collect(&checkpoint, &config).unwrap();
        assert_eq!(weights.layers.len(), layers, "{folder}");
        assert_eq!(weights.embed_tokens.name, embedding, "{folder}");
        assert_eq!(weights.skipped_vision, vision, "{folder}");
        assert_eq!(weights.iter().count() + vision, checkpoint.len(), "{folder}");
        let bytes: u64 = weights.iter().map(|t| t.data.len() as u64).sum();
        assert_eq!(bytes + weights.skipped_bytes, checkpoint.total_bytes(), "{folder}");
        for tensor in weights.iter() {
            tensor.check_finite().unwrap();
        }
    }
}

#[test]
fn tensors_are_those_of_the_safetensors_crate() {
    for folder in ["gemma3/tiny-a", "gemma3/tiny-b", "gemma3/tiny-27b-ratio", "transformers5/tiny-27b-l2"] {
        let checkpoint = Checkpoint::open(&ModelFiles::open(&data(folder)).unwrap()).unwrap();
        let mut seen = 0;
        for entry in fs::read_dir(data(folder)).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if !name.starts_with("model") || !name.ends_with(".safetensors") {
                continue;
            }
            let bytes = fs::read(&path).unwrap();
            for (name, expected) in safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors() {
                let tensor = checkpoint.get(&name).unwrap();
                assert_eq!(
                    (tensor.shape, tensor.data),
                    (expected.shape(), expected.data()),
                    "{folder} {name}"
                );
                assert_eq!(tensor.dtype, DType::BF16, "{folder} {name}");
                seen += 1;
            }
        }
        assert_eq!((checkpoint.len(), checkpoint.iter().count()), (seen, seen), "{folder}");
    }
}

/// The names of every way in which transformers 5 saves, given the shapes they have and zeros inside.
#[test]
fn every_tensor_naming_is_understood() {
    for folder in ["tiny-a", "tiny-27b-ratio", "tiny-27b-l2"] {
        let folder = data("transformers5").join(folder);
        for list in ["tensor_names.json", "tensor_names.internal.json", "tensor_names.sharded.json"] {
            if !folder.join(list).exists() {
                continue;
            }
            let mut files: BTreeMap<String, Vec<(String, DType, Vec<usize>)>> = BTreeMap::new();
            let mut weight_map = serde_json::Map::new();
            for (name, info) in read_json(&folder.join(list)).as_object().unwrap() {
                assert_eq!(info["dtype"], "BF16");
                let shape = info["shape"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap() as usize);
                let file = info["file"].as_str().unwrap().to_string();
                weight_map.insert(name.clone(), file.clone().into());
                files.entry(file).or_default().push((name.clone(), DType::BF16, shape.collect()));
            }
            let model = TempDir::new().unwrap();
            fs::copy(folder.join("config.json"), model.path().join("config.json")).unwrap();
            for (file, tensors) in &files {
                fs::write(model.path().join(file), file_of_zeros(tensors)).unwrap();
            }
            if files.len() > 1 {
                let index = json!({ "metadata": {}, "weight_map": weight_map });
                fs::write(model.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
            }
            let (config, checkpoint) = open(model.path());
            let weights = Gemma3Weights::collect(&checkpoint, &config)
                .unwrap_or_else(|e| panic!("{} {list}: {e}", folder.display()));
            assert_eq!(weights.layers.len(), config.num_hidden_layers);
            assert_eq!(weights.iter().count() + weights.skipped_vision, weight_map.len());
        }
    }
}

#[test]
fn rows_widen_exactly_from_every_float_type() {
    let values = [0.0f32, -0.0, 1.0, -2.5, 6.1035156e-5, 5.9604645e-8, 65504.0, 0.33325195];
    let model = TempDir::new().unwrap();
    let f32s: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let f16s: Vec<u8> = values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
    let bf16s: Vec<u8> = values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect();
    let ints = vec![7u8; 8];
    // The odd-sized tensor in front leaves the others unaligned.
    let file = safetensors_file(&[
        ("odd", "U8", &[1], &[1]),
        ("a", "F32", &[4, 2], &f32s),
        ("b", "F16", &[4, 2], &f16s),
        ("c", "BF16", &[4, 2], &bf16s),
        ("d", "I8", &[4, 2], &ints),
    ]);
    fs::write(model.path().join("model.safetensors"), file).unwrap();
    let checkpoint = Checkpoint::open(&ModelFiles::open(model.path()).unwrap()).unwrap();
    let names: Vec<_> = checkpoint.iter().map(|t| t.name).collect();
    assert_eq!(names, ["odd", "a", "b", "c", "d"]);
    for name in ["a", "b"] {
        assert_eq!(checkpoint.get(name).unwrap().to_f32().unwrap(), values, "{name}");
    }
    let rounded: Vec<f32> = values.iter().map(|v| bf16::from_f32(*v).to_f32()).collect();
    let c = checkpoint.get("c").unwrap();
    assert_eq!(c.to_f32().unwrap(), rounded);
    assert_eq!(c.rows_f32(1..3).unwrap(), rounded[2..6]);
    assert_eq!(c.row_bytes(3..4), &bf16s[12..]);
    assert_eq!((c.rows(), c.cols(), c.num_elements()), (4, 2, 8));
    for result in
        [checkpoint.get("d").unwrap().to_f32().map(|_| ()), checkpoint.get("d").unwrap().check_finite()]
    {
        assert!(result.unwrap_err().to_string().ends_with("tensor d: holds I8; expected F32, F16 or BF16"));
    }
    assert!(checkpoint.get("e").is_none());
}

#[test]
fn values_that_are_no_numbers_are_refused_by_place() {
    for (dtype, bad) in [("F32", vec![0, 0, 0x80, 0x7F]), ("F16", vec![0, 0xFC]), ("BF16", vec![0xC0, 0xFF])]
    {
        let mut bytes = vec![0u8; 12 * bad.len()];
        bytes[7 * bad.len()..8 * bad.len()].copy_from_slice(&bad);
        let model = TempDir::new().unwrap();
        let file = safetensors_file(&[("w", dtype, &[4, 3], &bytes)]);
        fs::write(model.path().join("model.safetensors"), file).unwrap();
        let checkpoint = Checkpoint::open(&ModelFiles::open(model.path()).unwrap()).unwrap();
        let w = checkpoint.get("w").unwrap();
        let (mut q, mut scales) = (vec![0; 12], vec![f16::ZERO; 4]);
        assert!(w.rows_f32(0..2).is_ok());
        for error in [
            w.to_f32().unwrap_err(),
            w.rows_f32(2..3).unwrap_err(),
            w.check_finite().unwrap_err(),
            quantize_rows(&w, 0..4, Scheme::Int8Row, &mut q, &mut scales).unwrap_err(),
        ] {
            let error = error.to_string();
            assert!(
                error.ends_with(
                    "model.safetensors: tensor w: row 2, column 1 is NaN or infinite; expected a finite number"
                ),
                "{dtype}: {error}"
            );
        }
    }
}

#[test]
fn embedded_files_are_read_like_a_folder() {
    static FILES: [(&str, &[u8]); 3] = [
        ("config.json", include_bytes!("data/gemma3/tiny-b/config.json")),
        ("generation_config.json", include_bytes!("data/gemma3/tiny-b/generation_config.json")),
        ("model.safetensors", include_bytes!("data/gemma3/tiny-a/model.safetensors")),
    ];
    let files = ModelFiles::embedded("demo", &FILES);
    assert_eq!(files.name(), "demo");
    assert_eq!(files.read("config.json").unwrap().unwrap(), FILES[0].1);
    assert!(files.read("tokenizer.json").unwrap().is_none());
    let (config, generation) = Gemma3Config::load(&files).unwrap();
    assert_eq!((config.vocab_size, generation.top_k), (320, Some(64)));
    // The config is another model's than the tensors.
    let checkpoint = Checkpoint::open(&files).unwrap();
    assert_eq!(
        Gemma3Weights::collect(&checkpoint, &config).unwrap_err().to_string(),
        "demo (embedded)/model.safetensors: tensor model.embed_tokens.weight has shape [512, 128]; config.json \
         asks for [320, 96] (vocab_size, hidden_size)"
    );
}

// ---- Quantizer ----------------------------------------------------------------------------------------

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn quantizer_is_bit_exact_by_the_manifests() {
    for set in GEMMA3_SETS {
        let (_, checkpoint) = open(&data(format!("gemma3/{set}")));
        let manifest = read_json(&data(format!("gemma3/{set}")).join("quant_manifest.json"));
        let mut checked = 0;
        for (mode, tensors) in manifest.as_object().unwrap() {
            let modes = QuantizeMode::ALL.into_iter();
            let mode = modes.clone().find(|m| m.name() == mode.replace('_', "-")).expect(mode);
            for (name, expected) in tensors.as_object().unwrap() {
                let tensor = checkpoint.get(name).unwrap();
                let is_embedding = name.contains("embed_tokens");
                let scheme = if is_embedding { mode.embedding() } else { mode.projections() }.unwrap();
                let (rows, cols) = (tensor.rows(), tensor.cols());
                let groups = cols.div_ceil(grouping(scheme, cols).unwrap().0);
                assert_eq!(expected["q_shape"], json!([rows, cols]));
                assert_eq!(expected["scale_shape"], json!([rows, groups]));
                let (mut q, mut scales) = (vec![0i8; rows * cols], vec![f16::ZERO; rows * groups]);
                // In two pieces, as a caller with a bounded staging buffer does it.
                let cut = rows / 3;
                let (q0, q1) = q.split_at_mut(cut * cols);
                let (s0, s1) = scales.split_at_mut(cut * groups);
                quantize_rows(&tensor, 0..cut, scheme, q0, s0).unwrap();
                quantize_rows(&tensor, cut..rows, scheme, q1, s1).unwrap();
                let q: Vec<u8> = q.iter().map(|q| *q as u8).collect();
                let scales: Vec<u8> = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
                assert_eq!(sha256(&q), expected["q_sha256"], "{set} {mode} {name} q");
                assert_eq!(sha256(&scales), expected["scale_sha256"], "{set} {mode} {name} scale");
                checked += 1;
            }
        }
        // Four modes, seven projections a layer, and the embedding once.
        let layers = HashMap::from([("tiny-a", 8), ("tiny-b", 7), ("tiny-27b-ratio", 6)])[set];
        assert_eq!(checked, 4 * 7 * layers + 1, "{set}");
    }
}

/// The golden set holds one tensor in full: a difference would show where it is, not only that it is.
#[test]
fn quantized_tensor_equals_the_golden_one() {
    let bytes = fs::read(data("gemma3/tiny-a/goldens.safetensors")).unwrap();
    let goldens = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let (_, checkpoint) = open(&data("gemma3/tiny-a"));
    let tensor = checkpoint.get("model.layers.0.self_attn.k_proj.weight").unwrap();
    for mode in [QuantizeMode::Int4G32, QuantizeMode::Int4G128, QuantizeMode::Int8Row] {
        let name = mode.name().replace('-', "_");
        let golden = |part: &str| goldens.tensor(&format!("qtensor.{name}.{part}")).unwrap();
        let scheme = mode.projections().unwrap();
        let (rows, cols) = (tensor.rows(), tensor.cols());
        let groups = cols.div_ceil(grouping(scheme, cols).unwrap().0);
        let (mut q, mut scales) = (vec![0i8; rows * cols], vec![f16::ZERO; rows * groups]);
        quantize_rows(&tensor, 0..rows, scheme, &mut q, &mut scales).unwrap();
        let golden_q: Vec<i8> = golden("q").data().iter().map(|b| *b as i8).collect();
        let golden_scales: Vec<f16> =
            golden("scale").data().chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect();
        assert_eq!(q, golden_q, "{mode}");
        assert_eq!(scales, golden_scales, "{mode}");
    }
}

#[test]
fn edge_rows_quantize_as_the_reference_says() {
    let (_, checkpoint) = open(&data("gemma3/tiny-a"));
    let tensor = checkpoint.get("model.layers.0.mlp.gate_proj.weight").unwrap();
    let row = |row: usize| {
        let x = tensor.rows_f32(row..row + 1).unwrap();
        let (mut q, mut scales, mut y) = (vec![0i8; 128], vec![f16::ZERO; 1], vec![0.0; 128]);
        quantize_row(&x, 128, 7, &mut q, &mut scales).unwrap();
        dequantize_row(&q, &scales, 128, &mut y);
        (x, q, scales[0], y)
    };
    let (x, q, s, y) = row(3);
    assert!(x.iter().chain(&y).all(|v| *v == 0.0) && q.iter().all(|q| *q == 0) && s == f16::ZERO);
    let (x, q, s, y) = row(5);
    assert!(x.iter().any(|x| *x != 0.0) && s == f16::ZERO, "row 5's scale underflows");
    assert!(q.iter().all(|q| *q == 0) && y.iter().all(|y| *y == 0.0));
    let (_, _, s, _) = row(7);
    assert!(s > f16::ZERO && s < f16::MIN_POSITIVE, "row 7's scale is subnormal");
    let (x, q, s, _) = row(9);
    assert!(s > f16::ZERO && s < f16::MIN_POSITIVE, "row 9's scale is subnormal");
    let clipped = x.iter().zip(&q).filter(|(x, q)| (**x / s.to_f32()).abs() >= 7.5 && q.abs() == 7).count();
    assert!(clipped > 0, "row 9 clips");
    let (x, q, s, y) = row(11);
    assert_eq!(s.to_f32(), 0.25);
    let ties = x.iter().zip(&q).filter(|(x, _)| (**x / 0.25).fract().abs() == 0.5);
    assert!(ties.clone().count() > 0 && ties.clone().all(|(_, q)| q % 2 == 0), "ties go to even");
    assert!(q.iter().zip(&y).all(|(q, y)| *y == *q as f32 * 0.25));
}

#[test]
fn short_groups_do_not_straddle_rows() {
    // 5 columns in groups of 2: three groups, the last of one column.
    let row = [1.0f32, -3.5, 0.0, 0.0, 14.0];
    let (mut q, mut scales, mut y) = ([9i8; 5], [f16::ONE; 3], [0.0f32; 5]);
    quantize_row(&row, 2, 7, &mut q, &mut scales).unwrap();
    assert_eq!((q, scales.map(f16::to_f32)), ([2, -7, 0, 0, 7], [0.5, 0.0, 2.0]));
    dequantize_row(&q, &scales, 2, &mut y);
    assert_eq!(y, [1.0, -3.5, 0.0, 0.0, 14.0]);
    // 65504 * 7 is the largest value an f16 scale can hold; beyond its rounding it would be infinite.
    let largest = [65504.0f32 * 7.0];
    quantize_row(&largest, 1, 7, &mut [0], &mut [f16::ZERO]).unwrap();
    let error = quantize_row(&[0.0, 65520.0 * 7.0], 1, 7, &mut [0; 2], &mut [f16::ZERO; 2]).unwrap_err();
    assert_eq!(error.to_string(), "values from column 1 on are too large for an f16 scale");
    let error = quantize_row(&[1.0, f32::NAN], 2, 7, &mut [0; 2], &mut [f16::ZERO]).unwrap_err();
    assert_eq!(error.to_string(), "a value near column 0 is NaN or infinite; expected finite numbers");
}

// ---- Files for the tests ------------------------------------------------------------------------------

type TensorSpec<'a> = (&'a str, &'a str, &'a [u64], &'a [u8]);

/// A well-formed file of these tensors (name, dtype, shape, bytes).
fn safetensors_file(tensors: &[TensorSpec]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert((*name).into(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        data.extend_from_slice(bytes);
    }
    with_header(&Value::Object(header).to_string(), &data)
}

fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

fn file_of_zeros(tensors: &[(String, DType, Vec<usize>)]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, dtype, shape) in tensors {
        let start = end;
        end += shape.iter().product::<usize>() * dtype.size();
        header.insert(
            name.clone(),
            json!({"dtype": format!("{dtype:?}"), "shape": shape, "data_offsets": [start, end]}),
        );
    }
    with_header(&Value::Object(header).to_string(), &vec![0; end])
}
