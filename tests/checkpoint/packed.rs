//! GPTQ, AWQ and compressed-tensors checkpoints are read without loss. Other kinds are refused by name.
//!
//! Those projects' own code packed the files in `tests/data/packed`, and unpacked them again for the goldens
//! (`tools/packed_goldens`).

use std::fs;
use std::path::PathBuf;

use half::bf16;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use unicorn::model::arch::{self, open_files};
use unicorn::model::load::LoadOptions;
use unicorn::model::weights::Weights;
use unicorn::tensor::{Bits, Scales, Scheme};

use crate::support::checkpoints::{
    self, ByName as _, le_bytes, mutate, opened, read_all, refusal, sha256, values_both_ways, with_header,
};
use crate::support::damaged::DamagedReadings;
use crate::support::goldens::Goldens;
use crate::support::json::read_json;
use crate::support::packed_files::{PackedPart, awq, compressed, f16s, file, gptq, gptq_parts, words};
use crate::support::tables::rows;
use crate::support::{data, goldens};

const BOUND: f32 = 1e-3;

/// Each checkpoint, and the schemes on the device of its q_proj (128 columns) and its down_proj (256 columns).
fn variants() -> Vec<(&'static str, Scheme, Scheme)> {
    let int4 = |group, scales| Scheme::Int { bits: Bits::Four, group, scales };
    let same = |name, scheme| (name, scheme, scheme);
    let zero_8 = |group| Scheme::Int { bits: Bits::Eight, group, scales: Scales::ZeroPoint };
    vec![
        same("gptq-v1-g128-sym", Scheme::int4(128)),
        same("gptq-v1-g64", int4(64, Scales::ZeroPoint)),
        same("gptq-v1-g32-gptqmodel", int4(32, Scales::ZeroPoint)),
        same("gptq-v2-g128", int4(128, Scales::ZeroPoint)),
        ("gptq-v2-row-8bit", zero_8(128), zero_8(256)),
        same("awq-g128", int4(128, Scales::ZeroPoint)),
        same("awq-g32", int4(32, Scales::ZeroPoint)),
        same("compressed-g128-sym", Scheme::int4(128)),
        same("compressed-g32", int4(32, Scales::ZeroPoint)),
        ("compressed-row-sym", Scheme::int4(128), Scheme::int4(256)),
        same("compressed-row-sym-8bit", Scheme::Int8Row),
    ]
}

fn folder_of(variant: &str) -> PathBuf {
    data("packed").join(variant)
}

#[test]
fn every_tensor_equals_what_the_packages_unpack() {
    for (variant, q_proj, down_proj) in variants() {
        let folder = folder_of(variant);
        let checkpoint = opened(&folder);
        let hashes: Value = read_json(&folder.join("dequantized.json"));
        for (name, expected) in hashes.as_object().unwrap() {
            let tensor = checkpoint.get(name).unwrap_or_else(|| panic!("{variant}: {name}"));
            let (values, again) = values_both_ways(&tensor);
            assert_eq!(sha256(&le_bytes(&values)), *expected, "{variant}: {name}");
            assert!(values.iter().zip(&again).all(|(a, b)| a == b), "{variant}: {name} on the device");
        }
        let format = serde_json::to_value(checkpoint.format()).unwrap();
        assert!(
            variant.starts_with(format.as_str().unwrap().trim_end_matches("-tensors")),
            "{variant}: {format}"
        );
        let files = open_files(&folder).unwrap();
        let (config, _) = arch::load(&files).unwrap();
        let weights = Weights::collect(&checkpoint, &config).unwrap();
        assert_eq!(weights.tensors.iter().count(), hashes.as_object().unwrap().len(), "{variant}");
        assert_eq!(
            weights.tensors.iter().count() + weights.skipped_vision,
            checkpoint.iter().len(),
            "{variant}"
        );
        for layer in &weights.tensors.layers {
            assert_eq!(layer.projections.q_proj.scheme().unwrap(), q_proj, "{variant}");
            assert_eq!(layer.projections.down_proj.unwrap().scheme().unwrap(), down_proj, "{variant}");
        }
        // Every byte belongs to a tensor, except those of parts that describe the layout of the others.
        let size = fs::metadata(folder.join("model.safetensors")).unwrap().len();
        assert!((size * 9 / 10..size).contains(&checkpoint.total_bytes()), "{variant}");
    }
}

/// The packages pack each expert's matrices as any other matrix. Here the dense networks of both layers become the experts
/// of one layer, by their names alone.
#[test]
fn experts_equal_what_the_packages_unpack() {
    for (variant, ..) in variants() {
        let bytes = fs::read(folder_of(variant).join("model.safetensors")).unwrap();
        let length = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header = std::str::from_utf8(&bytes[8..length]).unwrap().to_owned();
        for expert in 0..2 {
            header =
                header.replace(&format!("layers.{expert}.mlp."), &format!("layers.0.mlp.experts.{expert}."));
        }
        let config = fs::read(folder_of(variant).join("config.json")).unwrap();
        let folder = checkpoints::folder_of(&[
            ("config.json", config),
            ("model.safetensors", with_header(&header, &bytes[length..])),
        ]);
        let checkpoint = opened(folder.path());
        let hashes: Value = read_json(&folder_of(variant).join("dequantized.json"));
        for matrix in ["gate_proj", "up_proj", "down_proj"] {
            let (prefix, _) =
                hashes.as_object().unwrap().keys().find_map(|name| name.split_once("layers.0.mlp.")).unwrap();
            let name = format!("{prefix}layers.0.mlp.experts.{matrix}.weight");
            let tensor = checkpoint.get(&name).unwrap_or_else(|| panic!("{variant}: {name}"));
            let (values, again) = values_both_ways(&tensor);
            assert!(values.iter().zip(&again).all(|(a, b)| a == b), "{variant}: {name} on the device");
            for (expert, values) in values.chunks_exact(values.len() / 2).enumerate() {
                let expected = &hashes[format!("{prefix}layers.{expert}.mlp.{matrix}.weight")];
                assert_eq!(sha256(&le_bytes(values)), *expected, "{variant}: {name}, expert {expert}");
            }
        }
    }
}

#[test]
fn packed_checkpoints_match_the_oracle() {
    for (variant, ..) in variants() {
        let folder = folder_of(variant);
        let goldens = Goldens::open(&folder);
        let mut model = goldens::load(&folder, &LoadOptions::default());
        let got = goldens::all_logits(&mut model, &goldens.tokens("tokens"));
        let difference = goldens::max_difference(&got, &goldens.view("logits"));
        println!("{variant}: max |difference| {difference:.2e}");
        assert!(difference <= BOUND, "{variant}: {difference}");
    }
}

// ---- Generated files -------------------------------------------------------------------------------------

fn bf16s(scales: &[f32]) -> Vec<u8> {
    scales.iter().flat_map(|s| bf16::from_f32(*s).to_le_bytes()).collect()
}

fn folder(quantization: Option<Value>, parts: &[PackedPart]) -> TempDir {
    let folder = TempDir::new().unwrap();
    let config = quantization.map_or(json!({}), |q| json!({"quantization_config": q}));
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    fs::write(folder.path().join("model.safetensors"), file(parts)).unwrap();
    folder
}

fn awq_parts() -> Vec<PackedPart> {
    vec![
        ("p.qweight", "I32", vec![64, 1], words(0..64)),
        ("p.qzeros", "I32", vec![2, 1], words([0x7654_3210, 0x0123_4567])),
        ("p.scales", "F16", vec![2, 8], f16s(&[0.5; 16])),
    ]
}

/// A matrix of 10 rows, so the last word of zero points has padding.
fn compressed_parts() -> Vec<PackedPart> {
    let shape = [10i64, 64].iter().flat_map(|n| n.to_le_bytes()).collect();
    vec![
        ("p.weight_packed", "I32", vec![10, 8], words(0..80)),
        ("p.weight_scale", "BF16", vec![10, 2], bf16s(&[0.5; 20])),
        ("p.weight_zero_point", "I32", vec![2, 2], words([0x7654_3210, 0, 0xFFFF_FF99, 0])),
        ("p.weight_shape", "I64", vec![2], shape),
    ]
}

#[test]
fn integers_and_zero_points_are_read_from_where_each_format_stores_them() {
    // GPTQ: word 3 * 8 + 2 holds columns 24 to 31 of row 2, lowest bits first. The zero point of group 0 is 2.
    let f = folder(Some(gptq()), &gptq_parts());
    let p = opened(f.path()).get("p.weight").unwrap().to_f32().unwrap();
    assert_eq!(p[2 * 64 + 24], 0.5 * (f32::from((3u8 * 8 + 2 + 1) & 15) - 2.0));
    assert_eq!(p[2 * 64 + 25], 0.5 * (f32::from((3u8 * 8 + 2 + 1) >> 4) - 2.0));
    // AWQ: eight rows are in the 4-bit places 0 4 1 5 2 6 3 7 of a word, so row 1 is in place 4.
    let mut parts = awq_parts();
    parts[0].3 = words((0..64).map(|_| 0x7654_3210));
    let f = folder(Some(awq()), &parts);
    let p = opened(f.path()).get("p.weight").unwrap().to_f32().unwrap();
    let order = [0u8, 4, 1, 5, 2, 6, 3, 7].map(f32::from);
    for (row, place) in order.into_iter().enumerate() {
        // In group 0, the zero points are the same word as the weights. In group 1, they are in the reverse order.
        assert_eq!((p[row * 64], p[row * 64 + 32]), (0.0, 0.5 * (place - (7.0 - place))), "row {row}");
    }
    // compressed-tensors: the zero point of row 9 is the second one in the second word.
    let f = folder(Some(compressed()), &compressed_parts());
    let p = opened(f.path()).get("p.weight").unwrap().to_f32().unwrap();
    assert_eq!(p[9 * 64], 0.5 * (f32::from(72u8 & 15) - 9.0));
}

#[test]
fn zero_points_of_gptq_version_1_are_stored_minus_one() {
    let at = |quantization: Value, zeros: u32| {
        let mut parts = gptq_parts();
        parts[0].3 = words([0; 64]);
        parts[1].3 = words([zeros; 2]);
        let f = folder(Some(quantization), &parts);
        let checkpoint = opened(f.path());
        let tensor = checkpoint.get("p.weight").unwrap();
        let values =
            (0..8).map(|row| tensor.rows_f32(row..row + 1).map(|x| -2.0 * x[0]).map_err(|e| e.to_string()));
        (values.collect::<Vec<_>>(), tensor.scheme().unwrap())
    };
    let mut v1 = gptq();
    v1["checkpoint_format"] = json!("gptq");
    let mut unnamed = gptq();
    unnamed.as_object_mut().unwrap().remove("checkpoint_format");
    let mut by_gptqmodel = v1.clone();
    by_gptqmodel["meta"] = json!({"quantizer": ["gptqmodel:2.2.0"]});
    let ok = |zeros: [u8; 8]| zeros.map(|z| Ok(f32::from(z))).to_vec();
    let zero = Scheme::Int { bits: Bits::Four, group: 32, scales: Scales::ZeroPoint };
    assert_eq!(at(gptq(), 0x7654_3210), (ok([0, 1, 2, 3, 4, 5, 6, 7]), zero));
    for config in [&v1, &unnamed, &by_gptqmodel] {
        assert_eq!(at(config.clone(), 0x7654_3210), (ok([1, 2, 3, 4, 5, 6, 7, 8]), zero));
        assert_eq!(at(config.clone(), 0x7777_7777), (ok([8; 8]), Scheme::int4(32)));
    }
    assert_eq!(at(gptq(), 0x8888_8888), (ok([8; 8]), Scheme::int4(32)));
    // GPTQModel subtracts 1 from the whole word, so 0 borrows from the next zero point (here 3, 0, 3, ..). Adding 1 to
    // the word undoes this. AutoGPTQ subtracts from each zero point, and a stored 15 is an error.
    let written = 0x3333_3303u32.wrapping_sub(0x1111_1111);
    assert_eq!(at(by_gptqmodel, written), (ok([3, 0, 3, 3, 3, 3, 3, 3]), zero));
    let (values, _) = at(v1, 0xFFFF_FFF2);
    assert_eq!(values[0], Ok(3.0));
    let error = values[1].clone().unwrap_err();
    assert!(error.contains("tensor p.weight: row 1, group 0: its zero point is stored as 15"), "{error}");
}

#[test]
fn bf16_scales_outside_the_range_of_f16_are_kept_without_loss() {
    for (zeros, bias) in [(true, 0.0), (false, 8.0)] {
        let mut parts = compressed_parts();
        parts[1].3 = bf16s(&[1e-9, 3e9].repeat(10));
        let mut config = compressed();
        config["config_groups"]["group_0"]["weights"]["symmetric"] = json!(!zeros);
        if !zeros {
            parts.remove(2);
        }
        let f = folder(Some(config), &parts);
        let checkpoint = opened(f.path());
        let tensor = checkpoint.get("p.weight").unwrap();
        assert_eq!(
            tensor.scheme().unwrap(),
            Scheme::Int { bits: Bits::Four, group: 32, scales: Scales::Affine }
        );
        let (values, again) = values_both_ways(&tensor);
        assert_eq!(values, again);
        // In row 1, column 8 is the low 4 bits of word 9, which are 9. The zero point of the columns from 32 on is 0,
        // or 8 if there are none.
        let (small, large) = (bf16::from_f32(1e-9).to_f32(), bf16::from_f32(3e9).to_f32());
        assert_eq!(values[64 + 8], small * (9.0 - if zeros { 1.0 } else { 8.0 }));
        assert_eq!(values[64 + 32], large * (12.0 - bias));
    }
}

#[test]
fn modules_are_read_with_their_own_settings_from_the_config() {
    let mut quantization = gptq();
    quantization["dynamic"] = json!({"+:.*p": {"bits": 8, "group_size": 64}});
    // 8 rows of 32 columns with 8 bits, in one group.
    let parts: Vec<PackedPart> = vec![
        ("p.qweight", "I32", vec![8, 8], words([0x0302_01FF; 64])),
        ("p.qzeros", "I32", vec![1, 2], words([0x0403_0201; 2])),
        ("p.scales", "F16", vec![1, 8], f16s(&[0.5; 8])),
        ("q.weight", "F16", vec![1], f16s(&[2.0])),
    ];
    let f = folder(Some(quantization), &parts);
    let checkpoint = opened(f.path());
    let p = checkpoint.get("p.weight").unwrap();
    assert_eq!(p.shape, [8, 32]);
    assert_eq!(p.rows_f32(1..2).unwrap()[..4], [126.5, -0.5, 0.0, 0.5]);
    assert_eq!(values_both_ways(&p).0, values_both_ways(&p).1);
    assert_eq!(checkpoint.get("q.weight").unwrap().to_f32().unwrap(), [2.0]);
    assert_eq!(checkpoint.iter().map(|t| t.name).collect::<Vec<_>>(), ["p.weight", "q.weight"]);
}

/// Writers of symmetric weights may store zero points although all are half the range.
#[test]
fn zero_points_at_half_the_range_are_not_stored_on_the_device() {
    let mut parts = compressed_parts();
    // With ten rows, the last word's padding is read as zero points that differ.
    let zero = Scheme::Int { bits: Bits::Four, group: 32, scales: Scales::ZeroPoint };
    for (rows, scheme) in [(10usize, zero), (8, Scheme::int4(32))] {
        let shape = [rows as i64, 64].iter().flat_map(|n| n.to_le_bytes()).collect();
        parts[0] = ("p.weight_packed", "I32", vec![rows, 8], words(0..rows as u32 * 8));
        parts[1] = ("p.weight_scale", "BF16", vec![rows, 2], bf16s(&vec![0.5; rows * 2]));
        parts[2] = (
            "p.weight_zero_point",
            "I32",
            vec![rows.div_ceil(8), 2],
            words(vec![0x8888_8888; rows.div_ceil(8) * 2]),
        );
        parts[3] = ("p.weight_shape", "I64", vec![2], shape);
        let f = folder(Some(compressed()), &parts);
        let checkpoint = opened(f.path());
        let tensor = checkpoint.get("p.weight").unwrap();
        assert_eq!(tensor.scheme().unwrap(), scheme);
        let (values, again) = values_both_ways(&tensor);
        assert_eq!((values[0], values[1]), (-4.0, -4.0));
        assert_eq!(values, again);
    }
}

/// The parts of a matrix may be in different shards.
#[test]
fn parts_of_a_matrix_are_found_in_different_shards() {
    let f = folder(Some(gptq()), &gptq_parts());
    let expected = opened(f.path()).get("p.weight").unwrap().to_f32().unwrap();
    fs::remove_file(f.path().join("model.safetensors")).unwrap();
    let mut weight_map = Map::new();
    for (i, part) in gptq_parts().into_iter().enumerate() {
        let name = format!("{i}.safetensors");
        weight_map.insert(part.0.into(), json!(name));
        fs::write(f.path().join(name), file(&[part])).unwrap();
    }
    let index = json!({"weight_map": weight_map}).to_string();
    fs::write(f.path().join("model.safetensors.index.json"), index).unwrap();
    let checkpoint = opened(f.path());
    assert_eq!(checkpoint.get("p.weight").unwrap().to_f32().unwrap(), expected);
    assert_eq!(checkpoint.iter().len(), 1);
}

#[test]
fn older_configs_are_read_as_newer_ones() {
    let values = |config: &Value, parts: &[PackedPart]| {
        let f = folder(None, parts);
        fs::write(f.path().join("config.json"), config.to_string()).unwrap();
        opened(f.path()).get("p.weight").unwrap().to_f32().unwrap()
    };
    let [new, old] = ["quantization_config", "compression_config"]
        .map(|name| values(&json!({name: compressed()}), &compressed_parts()));
    assert_eq!(old, new);
    let mut unnamed = awq();
    unnamed.as_object_mut().unwrap().remove("version");
    let [new, old] = [awq(), unnamed].map(|awq| values(&json!({"quantization_config": awq}), &awq_parts()));
    assert_eq!(old, new);
}

/// AutoGPTQ wrote quantize_config.json before transformers read GPTQ, with these fields.
#[test]
fn gptq_checkpoints_may_be_described_in_a_file_of_their_own() {
    for variant in ["gptq-v1-g128-sym", "gptq-v1-g64", "gptq-v2-g128"] {
        let source = folder_of(variant);
        let mut config: Value = read_json(&source.join("config.json"));
        let packing = config.as_object_mut().unwrap().remove("quantization_config").unwrap();
        let mut old = json!({"damp_percent": 0.01, "true_sequential": true, "model_name_or_path": null});
        for field in ["bits", "group_size", "desc_act", "sym"] {
            old[field] = packing[field].clone();
        }
        if packing["checkpoint_format"] == "gptq_v2" {
            old["checkpoint_format"] = json!("gptq_v2");
        }
        let weights = fs::read(source.join("model.safetensors")).unwrap();
        let with = |old: Option<&Value>| {
            let mut files = vec![
                ("config.json", config.to_string().into_bytes()),
                ("model.safetensors", weights.clone()),
            ];
            files.extend(old.map(|old| ("quantize_config.json", old.to_string().into_bytes())));
            checkpoints::folder_of(&files)
        };
        let folder = with(Some(&old));
        let (read, new) = (opened(folder.path()), opened(&source));
        assert_eq!((read.format(), read.iter().len()), (new.format(), new.iter().len()), "{variant}");
        for tensor in new.iter() {
            let same = read.get(tensor.name).unwrap().to_f32().unwrap();
            assert_eq!(same, tensor.to_f32().unwrap(), "{variant}: {}", tensor.name);
        }
        let error = refusal(with(None).path());
        assert!(error.contains("config.json has no quantization_config"), "{variant}: {error}");
        let others = [
            (json!([]), "is a list; expected an object"),
            (json!({"quant_method": "awq", "bits": 4}), "quant_method is \"awq\"; expected \"gptq\""),
            (json!({"bits": 3}), "bits is 3; expected 4 or 8"),
            (json!({"bits": 4, "checkpoint_format": "marlin"}), "checkpoint_format is \"marlin\"; expected"),
        ];
        for (old, expected) in others {
            let error = refusal(with(Some(&old)).path());
            assert!(error.contains(&format!("quantize_config.json: {expected}")), "{variant}: {error}");
        }
    }
}

#[test]
fn unsupported_quantization_configs_are_refused_with_the_field() {
    // A format, the place of one field, and its value; or a whole config.
    let cases = r#"
{"quant_method": "bitsandbytes"}
    => quant_method is "bitsandbytes"; expected "gptq", "awq" or "compressed-tensors", or the original
    checkpoint in BF16, F16 or F32
{}
    => quant_method is missing; expected "gptq", "awq" or "compressed-tensors", or the original checkpoint in
    BF16, F16 or F32
{"quant_method": 3} => quant_method is 3; expected a string
gptq /bits 3 => bits is 3; expected 4 or 8
gptq /bits "4" => bits is "4"; expected 4 or 8
gptq /group_size -2 => group_size is -2; expected a number of columns, or -1 for the whole row
gptq /group_size 0 => group_size is 0; expected a number of columns, or -1 for the whole row
gptq /checkpoint_format "marlin" => checkpoint_format is "marlin"; expected "gptq" or "gptq_v2"
gptq /pack_dtype "int16" => pack_dtype is "int16"; expected "int32"
awq /version "gemv" => version is "gemv"; expected "gemm"
awq /bits 8 => bits is 8; expected 4
awq /zero_point false => zero_point is false; expected true
compressed /format "float-quantized" => format is "float-quantized"; expected "pack-quantized"
compressed /config_groups {} => config_groups is an object; expected 1 to 64 groups
compressed /config_groups/group_0/input_activations {"num_bits": 8}
    => config_groups.group_0.input_activations is an object; expected null, because activations are not
    quantized here
compressed /config_groups/group_0/weights null
    => config_groups.group_0.weights is missing; expected how the weights are quantized
compressed /config_groups/group_0/weights/type "float"
    => config_groups.group_0.weights.type is "float"; expected "int"
compressed /config_groups/group_0/weights/num_bits 2
    => config_groups.group_0.weights.num_bits is 2; expected 4 or 8
compressed /config_groups/group_0/weights/strategy "tensor"
    => config_groups.group_0.weights.strategy is "tensor"; expected "group" or "channel"
compressed /kv_cache_scheme {"num_bits": 8}
    => kv_cache_scheme is an object; expected null, because the KV cache is not quantized here
"#;
    for (change, expected) in rows(cases) {
        let quantization = match change.splitn(3, ' ').collect::<Vec<_>>()[..] {
            [format, path, value] if path.starts_with('/') => {
                let mut config = match format {
                    "gptq" => gptq(),
                    "awq" => awq(),
                    _ => compressed(),
                };
                let (parent, field) = path.rsplit_once('/').unwrap();
                config.pointer_mut(parent).unwrap()[field] = serde_json::from_str(value).unwrap();
                config
            }
            _ => serde_json::from_str(&change).unwrap(),
        };
        let f = folder(Some(quantization.clone()), &[]);
        let error = refusal(f.path());
        assert_eq!(error, format!("config.json: quantization_config.{expected}"));
        // transformers 5 stores the quantization config in text_config.
        let nested = json!({"text_config": {"quantization_config": quantization}}).to_string();
        fs::write(f.path().join("config.json"), nested).unwrap();
        assert_eq!(refusal(f.path()), error);
    }
}

#[test]
fn parts_that_contradict_each_other_are_refused_by_name() {
    type Change = Box<dyn Fn(&mut Vec<PackedPart>)>;
    let change =
        |i: usize, change: fn(&mut PackedPart)| -> Change { Box::new(move |parts| change(&mut parts[i])) };
    let remove = |i: usize| -> Change { Box::new(move |parts| drop(parts.remove(i))) };
    let gptq_cases: Vec<(Change, &str)> = vec![
        (remove(0), "p.qweight: is missing"),
        (remove(1), "p.qzeros: is missing"),
        (remove(2), "p.scales: is missing"),
        (change(0, |p| p.2 = vec![64]), "p.qweight: has shape [64]; expected two dimensions"),
        (change(0, |p| p.2 = vec![16, 4]), "p.qweight: has 4 rows of weights; expected a multiple of 8"),
        (change(0, |p| p.2 = vec![4, 16]), "p.scales: is F16 [2, 8]; expected F16 or BF16 [1, 16]"),
        (change(1, |p| p.2 = vec![1, 2]), "p.qzeros: is I32 [1, 2]; expected I32 [2, 1]"),
        (change(2, |p| p.2 = vec![1, 16]), "p.scales: is F16 [1, 16]; expected F16 or BF16 [2, 8]"),
        (
            change(2, |p| (p.1, p.3) = ("F32", vec![0; 64])),
            "p.scales: is F32 [2, 8]; expected F16 or BF16 [2, 8]",
        ),
        (
            change(3, |p| p.3 = words((0..64).map(|col| col % 2))),
            "p.g_idx: puts column 1 into group 1: columns in activation order (desc_act, actorder) are not supported; \
             expected groups of 32 consecutive columns",
        ),
        (change(3, |p| (p.2, p.3) = (vec![1], words([0]))), "p.g_idx: is I32 [1]; expected I32 [64]"),
        (
            Box::new(|parts| parts.push(("p.weight", "F16", vec![1], f16s(&[1.0])))),
            "p.weight: is stored both unpacked and packed; expected one of them",
        ),
    ];
    let awq_cases: Vec<(Change, &str)> = vec![
        (remove(1), "p.qzeros: is missing"),
        (change(0, |p| (p.2, p.3) = (vec![0, 1], vec![])), "p.qweight: is empty"),
        (change(0, |p| p.2 = vec![32, 2]), "p.scales: is F16 [2, 8]; expected F16 or BF16 [1, 16]"),
        (change(1, |p| p.2 = vec![1, 2]), "p.qzeros: is I32 [1, 2]; expected I32 [2, 1]"),
    ];
    let compressed_cases: Vec<(Change, &str)> = vec![
        (remove(0), "p.weight_packed: is missing"),
        (remove(3), "p.weight_shape: is missing"),
        (
            remove(2),
            "p.weight_zero_point: is missing, but the weights are not symmetric according to quantization_config",
        ),
        (
            change(3, |p| p.3 = [11i64, 64].iter().flat_map(|n| n.to_le_bytes()).collect()),
            "p.weight_shape: is [11, 64]; the matrix's 10 rows of 8 words and 2 scales do not match it in any of \
             quantization_config.config_groups",
        ),
        (
            change(3, |p| p.3 = [10i64, -64].iter().flat_map(|n| n.to_le_bytes()).collect()),
            "p.weight_shape: is [10, -64]; the matrix's 10 rows of 8 words and 2 scales do not match it in any of \
             quantization_config.config_groups",
        ),
        (
            change(1, |p| p.2 = vec![20, 1]),
            "p.weight_shape: is [10, 64]; the matrix's 10 rows of 8 words and 1 scales do not match it in any of \
             quantization_config.config_groups",
        ),
        (change(2, |p| p.2 = vec![4, 1]), "p.weight_zero_point: is I32 [4, 1]; expected I32 [2, 2]"),
    ];
    for (config, parts, cases) in [
        (gptq(), gptq_parts(), gptq_cases),
        (awq(), awq_parts(), awq_cases),
        (compressed(), compressed_parts(), compressed_cases),
    ] {
        assert_eq!(opened(folder(Some(config.clone()), &parts).path()).iter().len(), 1);
        for (change, expected) in cases {
            let mut parts = parts.clone();
            change(&mut parts);
            let error = refusal(folder(Some(config.clone()), &parts).path());
            assert_eq!(error, format!("model.safetensors: tensor {expected}"));
        }
        // Groups of 24 columns straddle the blocks of the device's layout.
        let narrow = config.to_string().replace("\"group_size\":32", "\"group_size\":24");
        let narrow: Value = serde_json::from_str(&narrow).unwrap();
        let error = refusal(folder(Some(narrow), &parts).path());
        let straddled = error.contains("scales groups of 24 columns; expected a multiple of 32");
        assert!(
            straddled || error.contains("expected F16 or BF16 [3, 8]") || error.contains("do not match it"),
            "{error}"
        );

        let error = refusal(folder(None, &parts).path());
        let expected = "is a packed matrix, but config.json has no quantization_config";
        assert!(error.contains(expected), "{error}");
    }
    let mut by_activation = gptq();
    by_activation["desc_act"] = json!(true);
    // This g_idx keeps the order of the columns.
    opened(folder(Some(by_activation.clone()), &gptq_parts()).path());
    let error = refusal(folder(Some(by_activation), &gptq_parts()[..3]).path());
    assert!(error.ends_with("tensor p.g_idx: is missing"), "{error}");
    // A scale that is not finite is found when its row is read.
    let mut parts = gptq_parts();
    parts[2].3 = f16s(&[&[0.5f32; 11][..], &[f32::NAN], &[0.5; 4]].concat());
    let f = folder(Some(gptq()), &parts);
    let error = opened(f.path()).get("p.weight").unwrap().to_f32().unwrap_err().to_string();
    let expected = "tensor p.weight: row 3, group 1: its scale is NaN or infinite; expected a finite number";
    assert!(error.ends_with(expected), "{error}");
}

#[test]
fn damaged_packed_files_are_refused_or_read() {
    const SEED: u64 = 32;
    println!("seed {SEED}");
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let mut dynamic = gptq();
    dynamic["dynamic"] = json!({"+:x": {"bits": 8}});
    let configs = [
        (gptq(), gptq_parts()),
        (dynamic, gptq_parts()),
        (awq(), awq_parts()),
        (compressed(), compressed_parts()),
    ];
    let mut readings = DamagedReadings::default();
    for (config, parts) in configs {
        let f = folder(Some(config.clone()), &parts);
        assert_eq!(read_all(f.path()), Ok(1));
        let whole = file(&parts);
        for round in 0..1000 {
            // In every tenth round the config does not match the parts.
            let mut described = config.to_string();
            if round % 10 == 0 {
                let (old, new) = [
                    ("32", "64"),
                    ("32", "-1"),
                    ("32", "16"),
                    ("4", "8"),
                    ("gptq_v2", "gptq"),
                    ("32", "1e9"),
                ][rng.random_range(0..6)];
                described = described.replacen(&format!(":{old}"), &format!(":{new}"), 1);
                described = described.replacen(&format!(":\"{old}"), &format!(":\"{new}"), 1);
            }
            let described = format!("{{\"quantization_config\":{described}}}");
            fs::write(f.path().join("config.json"), described).unwrap();
            let damaged = mutate(&whole, &mut rng);
            fs::write(f.path().join("model.safetensors"), &damaged).unwrap();
            readings.add(damaged.len(), format_args!("round {round}"), || read_all(f.path()));
        }
    }
    let DamagedReadings { read, most_bytes, .. } = readings;
    println!("{read} of 4000 read, at most {most_bytes} bytes held");
    assert!((2001..3600).contains(&read), "{read} were read; expected most of them, and not all");
}
