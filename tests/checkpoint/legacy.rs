//! The original project's layer files are read bit for bit, their defects are found, and bad files are refused.
//!
//! `tests/data/legacy` holds files of that project's own quantizer, and SHA-256 sums of the values that its
//! dequantization yields.

use std::fs;

use half::bf16;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use tempfile::TempDir;

use unicorn::checkpoint::Checkpoint;
use unicorn::model::arch::{self, open_files};
use unicorn::model::load::LoadOptions;
use unicorn::model::weights::Weights;
use unicorn::tensor::{Bits, QuantizedRow, Scales, Scheme};

use crate::support::checkpoints::{
    ByName as _, folder_of, le_bytes, mutate, opened, read_all, refusal, sha256, values_both_ways,
    with_header,
};
use crate::support::damaged::DamagedReadings;
use crate::support::data;
use crate::support::goldens::{Goldens, check_prompts, load};
use crate::support::json::read_json;
use crate::support::legacy_files::{
    LayerTensor, asymmetric, grouped, layer_file, layer_of_all_schemes, shared, symmetric,
};
use crate::support::program::{assert_error, output, printed, printed_json, unicorn, unicorn_on_software};

const BOUND: f32 = 1e-3;

#[test]
fn every_tensor_has_the_checksum_of_the_manifest() {
    let folder = data("legacy/tiny-a");
    let checkpoint = opened(&folder);
    let manifest: Value = read_json(&folder.join("quant_manifest.json"));
    let manifest = manifest.as_object().unwrap();
    assert_eq!((checkpoint.iter().len(), manifest.len()), (145, 145));
    for (name, expected) in manifest {
        let tensor = checkpoint.get(name).unwrap_or_else(|| panic!("{name}"));
        let (values, again) = values_both_ways(&tensor);
        assert_eq!(sha256(&le_bytes(&values)), expected["dequant_f32_sha256"], "{name}");
        assert_eq!(json!(tensor.shape), expected["shape"], "{name}");
        assert!(tensor.file.ends_with(expected["file"].as_str().unwrap()), "{name} in {}", tensor.file);
        assert!(values.iter().zip(&again).all(|(a, b)| a == b), "{name} as {}", tensor.scheme().unwrap());
    }
}

#[test]
fn groups_that_straddle_rows_and_end_short_are_read() {
    let folder = data("legacy/tiny-a");
    let (checkpoint, goldens) = (opened(&folder), Goldens::open(&folder));
    let layer = "vision_tower.vision_model.encoder.layers.0.mlp";
    for (name, shape) in
        [("fc1.weight", &[50, 36][..]), ("fc1.bias", &[50]), ("fc2.weight", &[36, 50]), ("fc2.bias", &[36])]
    {
        let name = format!("{layer}.{name}");
        let tensor = checkpoint.get(&name).unwrap();
        assert_eq!(tensor.shape, shape, "{name}");
        let expected: Vec<f32> = goldens.view(&format!("dequant.{name}"));
        assert_eq!(tensor.to_f32().unwrap(), expected, "{name}");
        // Loading reads ranges of rows from the middle of a tensor.
        if let [rows, cols] = *shape {
            assert_eq!(
                tensor.rows_f32(rows - 3..rows - 1).unwrap(),
                expected[(rows - 3) * cols..][..2 * cols]
            );
        }
        // Groups straddle rows here, so no piece of 16 columns is sure to have one scale.
        assert_eq!(tensor.scheme().unwrap(), Scheme::F32, "{name}");
    }
}

#[test]
fn files_of_a_layer_are_merged_and_vision_tensors_are_skipped() {
    let folder = data("legacy/tiny-a");
    let files = open_files(&folder).unwrap();
    let (config, _) = arch::load(&files).unwrap();
    let checkpoint = Checkpoint::open(&files).unwrap();
    let weights = Weights::collect(&checkpoint, &config).unwrap();
    assert_eq!((weights.tensors.layers.len(), weights.tensors.iter().count()), (8, 8 * 13 + 2));
    assert_eq!(weights.tensors.iter().count() + weights.skipped_vision, checkpoint.iter().len());
    // The source's shards are divided within layer 4, so its tensors are in two files.
    let layer_4: std::collections::BTreeSet<_> =
        weights.tensors.iter().filter(|t| t.name.contains(".layers.4.")).map(|t| t.file).collect();
    assert_eq!(layer_4.len(), 2, "{layer_4:?}");
    // The scheme that each scheme of the file becomes on the device. None needs more bytes than in the file.
    let whole_row = |cols: u32| Scheme::Int { bits: Bits::Eight, group: cols, scales: Scales::Affine };
    assert_eq!(weights.tensors.embed_tokens.scheme().unwrap(), whole_row(128));
    for layer in &weights.tensors.layers {
        assert_eq!(layer.projections.q_proj.scheme().unwrap(), Scheme::Int8Row);
        assert_eq!(layer.projections.down_proj.unwrap().scheme().unwrap(), Scheme::int4(128));
        assert_eq!(layer.norms.input_layernorm.scheme().unwrap(), whole_row(128));
    }
}

/// Defects of all tensors, each after the name of its tensor.
fn defects(checkpoint: &Checkpoint) -> Vec<String> {
    checkpoint.iter().filter_map(|t| Some(format!("{}: {}", t.name, t.defect()?))).collect()
}

#[test]
fn saturated_tensors_are_reported_by_name() {
    let folder = data("legacy/tiny-a");
    let checkpoint = opened(&folder);
    let manifest: Value = read_json(&folder.join("quant_manifest.json"));
    let defects = defects(&checkpoint);
    let found = |name: &str| defects.iter().find(|d| d.starts_with(&format!("{name}: ")));
    // The manifest has the errors that the writer measured, which the files do not contain. A tensor is damaged if it
    // lost more than two steps of the scale. Rounding to integers in bf16 loses at most two steps here.
    let mut damaged = 0;
    for (name, facts) in
        manifest.as_object().unwrap().iter().filter(|(_, f)| f["scheme"] == "int8_asymmetric")
    {
        let mut values = checkpoint.get(name).unwrap().to_f32().unwrap();
        values.sort_by(f32::total_cmp);
        let step =
            values.windows(2).map(|pair| pair[1] - pair[0]).filter(|step| *step > 0.0).reduce(f32::min);
        let error = facts["max_abs_err"].as_f64().unwrap() as f32;
        // If all values are equal, all were cut off.
        let lost = step.is_none_or(|step| error > 2.0 * step);
        assert_eq!(found(name).is_some_and(|d| d.contains("saturated")), lost, "{name}: {facts}");
        damaged += usize::from(lost);
    }
    assert_eq!(damaged, 10);
    let norm = "language_model.model.layers.1.pre_feedforward_layernorm.weight";
    let found = found(norm).unwrap();
    assert!(found.ends_with("clamped to 0: 5 of 128 values saturated, by up to 0.2557068"), "{found}");

    let weights = arch::load(&open_files(&folder).unwrap()).unwrap().0;
    let weights = Weights::collect(&checkpoint, &weights).unwrap();
    // Only the language model's defects count, because the vision tower's tensors are not used.
    assert_eq!(weights.defects().iter().filter(|defect| defect.contains("saturated")).count(), 5);
    assert!(weights.defects().contains(found));
}

#[test]
fn a_legacy_checkpoint_matches_the_oracle() {
    let folder = data("legacy/tiny-a");
    let goldens = Goldens::open(&folder);
    let mut model = load(&folder, &LoadOptions::default());
    check_prompts(&mut model, &goldens, "", "", BOUND, "legacy");
}

/// A folder with only the layer files, as the original project writes them.
fn bare() -> TempDir {
    let bare = TempDir::new().unwrap();
    for entry in fs::read_dir(data("legacy/tiny-a")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.contains("_layer_") || name.contains("_shared") {
            fs::copy(&path, bare.path().join(name)).unwrap();
        }
    }
    bare
}

#[test]
fn config_and_tokenizer_are_read_from_the_given_paths() {
    let bare = bare();
    let files = || open_files(bare.path()).unwrap();
    let error = arch::load(&files()).unwrap_err().to_string();
    assert!(
        error.ends_with(": holds no config.json; give the original model's config.json with --model-config"),
        "{error}"
    );

    let config = data("legacy/tiny-a/config.json");
    let expected = fs::read(&config).unwrap();
    for path in [config.as_path(), &data("legacy/tiny-a")] {
        let files = files().with_config(path).unwrap();
        assert_eq!(*files.read("config.json").unwrap().unwrap(), *expected);
        assert_eq!(files.display("config.json"), config.display().to_string());
        assert_eq!(Checkpoint::open(&files).unwrap().iter().len(), 145);
    }
    // The files of a tokenizer folder belong together. A tokenizer.json that is given alone replaces only that file.
    fs::write(bare.path().join("tokenizer_config.json"), "own").unwrap();
    fs::write(bare.path().join("chat_template.jinja"), "own").unwrap();
    let mini = data("tokenizer-mini");
    let folder = files().with_tokenizer(&mini).unwrap();
    let file = files().with_tokenizer(&mini.join("tokenizer.json")).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        let given = fs::read(mini.join(name)).unwrap();
        assert_eq!(*folder.read(name).unwrap().unwrap(), *given, "{name}");
        let alone = if name == "tokenizer.json" { given } else { b"own".to_vec() };
        assert_eq!(*file.read(name).unwrap().unwrap(), *alone, "{name}");
    }
    let without = files().with_config(&data("legacy/tiny-a")).unwrap();
    fs::write(bare.path().join("generation_config.json"), "{}").unwrap();
    assert!(without.read("generation_config.json").unwrap().is_none());

    for (path, expected) in [
        (
            bare.path().to_path_buf(),
            "holds no tokenizer.json; expected a tokenizer.json, or a folder that holds one",
        ),
        (
            bare.path().join("x"),
            "is not a file or folder; expected a tokenizer.json, or a folder that holds one",
        ),
    ] {
        let error = files().with_tokenizer(&path).unwrap_err().to_string();
        assert_eq!(error, format!("{}: {expected}", path.display()));
    }
}

#[test]
fn the_binary_runs_layer_files_and_names_missing_files() {
    let bare = bare();
    let model = bare.path().to_str().unwrap();
    let original = data("legacy/tiny-a");
    let original = original.to_str().unwrap();
    let tokenizer = data("tokenizer-mini");
    let tokenizer = tokenizer.to_str().unwrap();

    assert_error(unicorn(&["inspect", model]), 1, &[model, "holds no config.json", "--model-config"]);
    let prompt =
        ["generate", "--model", model, "--model-config", original, "--prompt", "x", "--max-tokens", "1"];
    assert_error(unicorn(&prompt), 1, &[model, "holds no tokenizer.json", "--tokenizer"]);

    let facts = printed_json(unicorn(&["inspect", model, "--model-config", original, "--json"]));
    assert_eq!(facts["format"], "legacy");
    assert!(facts["defects"].as_array().unwrap().iter().any(|d| d.as_str().unwrap().contains("saturated")));
    let stdout = printed(unicorn(&["inspect", model, "--model-config", original]));
    assert!(
        stdout.contains("layer files of the original project") && stdout.contains("saturated"),
        "{stdout}"
    );

    let mut command = unicorn_on_software(&[&prompt[..], &["--allow-software-vulkan"]].concat());
    command.env("UNICORN_MODEL_TOKENIZER", tokenizer);
    let (code, _, stderr) = output(command);
    assert_eq!(code, 0, "{stderr}");
    let warnings = stderr
        .lines()
        .filter(|line| line.contains("the quantizer that wrote this checkpoint cut values off"));
    assert_eq!(warnings.count(), 1, "{stderr}");
}

// ---- Generated files -------------------------------------------------------------------------------------

/// Files by name.
type Files = Vec<(&'static str, Vec<u8>)>;

#[test]
fn defects_of_the_writer_are_found_from_scales_and_zero_points() {
    let ones = vec![1i8; 200];
    let cases = [
        (symmetric("a", &[3], 0.0, &[0, 1, 2]), Some("scale 0: reads as zeros")),
        (symmetric("a", &[3], 0.5, &[0, 1, -127]), None),
        (grouped("a", &[2, 100], &[0.5, 0.0], &ones), Some("1 of 2 groups have scale 0: read as zeros")),
        (grouped("a", &[2, 100], &[0.5, 0.25], &ones), None),
        (asymmetric("a", &[3], 0.0, 0.0, &[7, 7, 7]), Some("constant when written: reads as zeros")),
        (
            asymmetric("a", &[4], 0.5, 0.0, &[1, 20, 255, 255]),
            Some("all positive, zero point clamped to 0: 2 of 4 values saturated, by up to 0.5"),
        ),
        (
            asymmetric("a", &[4], 0.5, 255.0, &[0, 20, 254, 0]),
            Some("all negative, zero point clamped to 255: 2 of 4 values saturated, by up to 0.5"),
        ),
        (
            asymmetric("a", &[2], 0.5, 0.0, &[255, 255]),
            Some("all positive, zero point clamped to 0: 2 of 2 values saturated, by up to 127.5 or more"),
        ),
        // The smallest or largest value of these tensors is zero itself, so nothing was cut off.
        (asymmetric("a", &[3], 0.5, 0.0, &[0, 20, 255]), None),
        (asymmetric("a", &[3], 0.5, 255.0, &[0, 20, 255]), None),
        (asymmetric("a", &[3], 0.5, 100.0, &[0, 255, 255]), None),
    ];
    for (tensor, expected) in cases {
        let what = format!("{tensor:?}");
        let folder = folder_of(&[("m_shared.safetensors", layer_file(&[tensor]))]);
        let expected = Vec::from_iter(expected.map(|problem| format!("a: {problem}")));
        assert_eq!(defects(&opened(folder.path())), expected, "{what}");
    }
}

#[test]
fn scales_outside_the_range_of_f16_are_kept_without_loss() {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    // bf16 can represent these scales. For f16 they are too small or too large.
    for scale in [1e-9f32, 1e9] {
        let q: Vec<i8> = (0..3 * 64).map(|_| rng.random_range(-7..=7)).collect();
        let bytes: Vec<u8> = q.iter().map(|q| q.unsigned_abs() * 30).collect();
        let tensors = [
            symmetric("symmetric", &[3, 64], scale, &q),
            grouped("grouped", &[3, 64], &[scale, 0.125], &q),
            asymmetric("asymmetric", &[3, 64], bf16::from_f32(scale).to_f32(), 7.0, &bytes),
            // The scale has 24 bits, as in a float32 source. Its products are rounded, here and on the device.
            asymmetric("wide", &[3, 64], 0.1, 7.0, &bytes),
        ];
        let folder = folder_of(&[("m_shared.safetensors", layer_file(&tensors))]);
        let checkpoint = opened(folder.path());
        for name in ["symmetric", "grouped", "asymmetric"] {
            let tensor = checkpoint.get(name).unwrap();
            let scheme = Scheme::Int { bits: Bits::Eight, group: 64, scales: Scales::Affine };
            assert_eq!(tensor.scheme().unwrap(), scheme, "{name}");
            let (values, again) = values_both_ways(&tensor);
            assert_eq!(values, again, "{name} {scale}");
            assert!(values.iter().any(|x| *x != 0.0));
        }
        let wide = checkpoint.get("wide").unwrap();
        assert_eq!(wide.scheme().unwrap(), Scheme::F32);
        assert_eq!(wide.to_f32().unwrap()[5], (f32::from(bytes[5]) - 7.0) * 0.1);
    }
}

#[test]
fn bad_layer_files_are_refused_with_file_and_tensor() {
    let layer = |tensors: &[LayerTensor]| vec![shared(), ("m_layer_3.safetensors", layer_file(tensors))];
    let name = "x.layers.3.w";
    let good = || symmetric(name, &[2, 2], 0.5, &[1, 2, 3, 4]);
    let changed = |change: &dyn Fn(&mut LayerTensor)| {
        let mut tensor = good();
        change(&mut tensor);
        layer(&[tensor])
    };
    let raw = |metadata: Value, header: Value, bytes: &[u8]| {
        let mut header = header.as_object().unwrap().clone();
        header.insert("__metadata__".into(), metadata);
        vec![shared(), ("m_layer_3.safetensors", with_header(&Value::Object(header).to_string(), bytes))]
    };
    let i8_2 = json!({"dtype": "I8", "shape": [2], "data_offsets": [0, 2]});
    let (symmetric_of, one_layer) = (json!({name: "int8_symmetric"}), "m_layer_3.safetensors");
    let of_scale_type =
        layer(&[(name.into(), "int8_asymmetric", "U8", vec![1], vec![1], "BF16", vec![2], vec![0; 4])]);
    // What is wrong with the tensor x.layers.3.w of the layer's file.
    let tensors: Vec<(Files, &str)> = vec![
        (
            changed(&|t| t.1 = "int3"),
            "w: has scheme \"int3\" in the file's metadata; expected int8_symmetric, int4_grouped or int8_asymmetric",
        ),
        (changed(&|t| t.2 = "U8"), "w: is U8; expected I8 by its scheme, int8_symmetric"),
        (changed(&|t| t.1 = "int8_asymmetric"), "w: is I8; expected U8 by its scheme, int8_asymmetric"),
        (
            changed(&|t| t.1 = "int4_grouped"),
            "w_scale: has shape []; expected [1] by the scheme, int4_grouped",
        ),
        (changed(&|t| t.5 = "I8"), "w_scale: I8 [] takes 1 bytes, but its offsets span 2"),
        (
            changed(&|t| (t.5, t.7) = ("I8", vec![1])),
            "w_scale: is I8; expected BF16, F16 or F32 by the scheme, int8_symmetric",
        ),
        (of_scale_type, "w_scale: is BF16; expected F32 by the scheme, int8_asymmetric"),
        (
            changed(&|t| t.7 = bf16::NAN.to_le_bytes().to_vec()),
            "w_scale: element 0 is NaN or infinite; expected a finite number",
        ),
        (layer(&[symmetric(name, &[3, 0], 0.5, &[])]), "w: has shape [3, 0]; expected values"),
        (
            layer(&[asymmetric(name, &[2], 0.5, 256.0, &[1, 2])]),
            "w_scale: has zero point 256; expected a whole number from 0 to 255",
        ),
        (
            layer(&[asymmetric(name, &[2], 0.5, 2.5, &[1, 2])]),
            "w_scale: has zero point 2.5; expected a whole number from 0 to 255",
        ),
        (
            raw(json!({}), json!({name: i8_2}), &[1, 2]),
            "w: has no scheme in the file's metadata; expected one, as in layer files of the original project",
        ),
        (
            raw(symmetric_of.clone(), json!({name: i8_2}), &[1, 2]),
            "w_scale: is missing; expected the scales of x.layers.3.w",
        ),
        (raw(symmetric_of, json!({}), &[]), "w: has a scheme in the file's metadata, but is not in the file"),
    ];
    for (files, expected) in tensors {
        let error = refusal(folder_of(&files).path());
        assert_eq!(error, format!("{one_layer}: tensor x.layers.3.{expected}"));
    }
    let files: [(Files, &str); 5] = [
        (
            vec![(one_layer, layer_file(&[good()]))],
            ": has layer files, but no *_shared.safetensors with the embedding",
        ),
        (
            layer(&[symmetric("x.layers.4.w", &[1], 0.5, &[1])]),
            "tensor x.layers.4.w: is in a file of layer 3; expected layers.3 in its name",
        ),
        (
            layer(&[symmetric("norm", &[1], 0.5, &[1])]),
            "tensor norm: is in a file of layer 3; expected layers.3 in its name",
        ),
        (
            vec![("m_shared.safetensors", layer_file(&[good()]))],
            "tensor x.layers.3.w: is in a file of shared tensors; expected no layers.N in its name",
        ),
        (
            vec![
                shared(),
                (one_layer, layer_file(&[good()])),
                ("n_layer_3.safetensors", layer_file(&[good()])),
            ],
            "m_layer_3.safetensors; expected it in one file",
        ),
    ];
    for (files, expected) in files {
        let error = refusal(folder_of(&files).path());
        assert!(error.contains(expected), "{error:?}, expected {expected:?}");
    }
    // A byte outside the int4 range is found when its row is read.
    let folder =
        folder_of(&layer(&[grouped(name, &[2, 32], &[0.5], &[&[1i8; 40][..], &[9], &[1; 23]].concat())]));
    let checkpoint = opened(folder.path());
    let tensor = checkpoint.get(name).unwrap();
    let mut row = QuantizedRow::new(tensor.scheme().unwrap(), 32);
    tensor.quantized_row_into(0, &mut row).unwrap();
    for error in [tensor.quantized_row_into(1, &mut row).unwrap_err(), tensor.to_f32().unwrap_err()] {
        let expected = "tensor x.layers.3.w: row 1, column 8 is 9; expected -7 to 7 in int4_grouped";
        assert!(error.to_string().ends_with(expected), "{error}");
    }
}

#[test]
fn damaged_layer_files_are_refused_or_read() {
    const SEED: u64 = 31;
    println!("seed {SEED}");
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let whole = layer_of_all_schemes();
    let folder = folder_of(&[shared(), ("m_layer_1.safetensors", whole.clone())]);
    assert_eq!(read_all(folder.path()), Ok(5));
    let mut readings = DamagedReadings::default();
    for round in 0..4000 {
        let damaged = mutate(&whole, &mut rng);
        fs::write(folder.path().join("m_layer_1.safetensors"), &damaged).unwrap();
        readings.add(damaged.len(), format_args!("round {round}"), || read_all(folder.path()));
    }
    let DamagedReadings { read, most_bytes, .. } = readings;
    println!("{read} of 4000 read, at most {most_bytes} bytes held");
    assert!((2001..3600).contains(&read), "{read} were read; expected most of them, and not all");
}
