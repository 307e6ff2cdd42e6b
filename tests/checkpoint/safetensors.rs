//! Reading checkpoints, refusing bad ones, and quantizing them bit for bit.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use half::{bf16, f16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use tempfile::TempDir;

use unicorn::checkpoint::{Checkpoint, CheckpointError, MAX_READ_BYTES, ModelFiles, Tensor};
use unicorn::model::SamplingOptions;
use unicorn::model::arch::{self, open_files};
use unicorn::model::config::GenerationConfig;
use unicorn::model::config::LayerType;
use unicorn::model::gemma3;
use unicorn::model::rope::RopeScaling;
use unicorn::model::spec::ModelSpec;
use unicorn::model::vision::VisionSpec;
use unicorn::model::weights::Weights;
use unicorn::quantize::{Rounding, grouping, pack_tiles, quantize_row};
use unicorn::tensor::{DType, QuantizeMode, QuantizedRow, Scheme, TILE_ROWS, unpack_row};

use crate::support::checkpoints::{
    ByName as _, StoredTensor, folder_of, mutate, opened, plain, refusal, safetensors_file, sha256,
    with_header,
};
use crate::support::damaged::DamagedReadings;
use crate::support::data;
use crate::support::json::{read_json, with};
use crate::support::reference::dequantize_row;
use crate::support::tables::rows;

const GEMMA3_SETS: [&str; 3] = ["tiny-a", "tiny-b", "tiny-27b-ratio"];

fn open(path: &Path) -> (ModelSpec, Checkpoint) {
    let files = open_files(path).unwrap();
    (arch::load(&files).unwrap().0, Checkpoint::open(&files).unwrap())
}

// ---- Real layouts -------------------------------------------------------------------------------------

#[test]
fn every_layout_loads_with_its_weights() {
    // Folder, number of layers, name of the embedding, number of skipped vision tensors.
    let cases = [
        ("gemma3/tiny-a", 8, "model.embed_tokens.weight", 0),
        ("gemma3/tiny-b", 7, "model.embed_tokens.weight", 0),
        ("gemma3/tiny-27b-ratio", 6, "language_model.model.embed_tokens.weight", 39),
        ("transformers5/tiny-27b-l2", 2, "model.language_model.embed_tokens.weight", 39),
        ("../../models/demo", 6, "model.embed_tokens.weight", 0),
    ];
    for (folder, layers, embedding, vision) in cases {
        let (config, checkpoint) = open(&data(folder));
        let weights = Weights::collect(&checkpoint, &config).unwrap();
        assert_eq!(weights.tensors.layers.len(), layers, "{folder}");
        assert_eq!(weights.tensors.embed_tokens.name, embedding, "{folder}");
        assert_eq!(weights.skipped_vision, vision, "{folder}");
        assert_eq!(weights.tensors.iter().count() + vision, checkpoint.iter().len(), "{folder}");
        let bytes: u64 = weights.tensors.iter().map(|t| t.stored_bytes()).sum();
        assert_eq!(bytes + weights.skipped_bytes, checkpoint.total_bytes(), "{folder}");
        for tensor in weights.tensors.iter() {
            tensor.to_f32().unwrap();
        }
    }
}

#[test]
fn tensors_equal_those_that_the_safetensors_crate_reads() {
    for folder in ["gemma3/tiny-a", "gemma3/tiny-b", "gemma3/tiny-27b-ratio", "transformers5/tiny-27b-l2"] {
        let checkpoint = opened(&data(folder));
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
                let (dtype, data) = plain(&tensor).unwrap();
                let (found, wanted) = ((tensor.shape, data), (expected.shape(), expected.data()));
                assert_eq!(found, wanted, "{folder} {name}");
                assert_eq!(dtype, DType::BF16, "{folder} {name}");
                seen += 1;
            }
        }
        assert_eq!((checkpoint.iter().len(), checkpoint.iter().count()), (seen, seen), "{folder}");
    }
}

/// Tensor names and shapes of every layout that transformers 5 saves. All values are zero.
#[test]
fn every_tensor_naming_of_transformers_loads() {
    for folder in ["tiny-a", "tiny-27b-ratio", "tiny-27b-l2"] {
        let folder = data("transformers5").join(folder);
        for list in ["tensor_names.json", "tensor_names.internal.json", "tensor_names.sharded.json"] {
            if !folder.join(list).exists() {
                continue;
            }
            let mut files: BTreeMap<String, Tensors> = BTreeMap::new();
            let mut weight_map = serde_json::Map::new();
            for (name, info) in read_json::<Value>(&folder.join(list)).as_object().unwrap() {
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
            let weights = Weights::collect(&checkpoint, &config)
                .unwrap_or_else(|e| panic!("{} {list}: {e}", folder.display()));
            assert_eq!(weights.tensors.layers.len(), config.layers.len());
            assert_eq!(weights.tensors.iter().count() + weights.skipped_vision, weight_map.len());
        }
    }
}

#[test]
fn rows_of_every_float_type_convert_to_f32_exactly() {
    let values = [0.0f32, -0.0, 1.0, -2.5, 6.1035156e-5, 5.9604645e-8, 65504.0, 0.33325195];
    let model = TempDir::new().unwrap();
    let f32s: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let f16s: Vec<u8> = values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
    let bf16s: Vec<u8> = values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect();
    let ints = vec![7u8; 8];
    // The first tensor has 1 byte, so the others are not aligned.
    let file = safetensors_file(&[
        ("odd", "U8", &[1], &[1]),
        ("a", "F32", &[4, 2], &f32s),
        ("b", "F16", &[4, 2], &f16s),
        ("c", "BF16", &[4, 2], &bf16s),
        ("d", "I8", &[4, 2], &ints),
    ]);
    fs::write(model.path().join("model.safetensors"), file).unwrap();
    let checkpoint = opened(model.path());
    let names: Vec<_> = checkpoint.iter().map(|t| t.name).collect();
    assert_eq!(names, ["odd", "a", "b", "c", "d"]);
    for name in ["a", "b"] {
        assert_eq!(checkpoint.get(name).unwrap().to_f32().unwrap(), values, "{name}");
    }
    let rounded: Vec<f32> = values.iter().map(|v| bf16::from_f32(*v).to_f32()).collect();
    let c = checkpoint.get("c").unwrap();
    assert_eq!(c.to_f32().unwrap(), rounded);
    assert_eq!(c.rows_f32(1..3).unwrap(), rounded[2..6]);
    assert_eq!((c.rows(), c.cols(), c.num_elements()), (4, 2, 8));
    let error = checkpoint.get("d").unwrap().to_f32().unwrap_err().to_string();
    assert!(error.ends_with("tensor d: holds I8; expected F32, F16 or BF16"), "{error}");
    assert!(checkpoint.get("e").is_none());
}

#[test]
fn values_that_are_not_finite_are_refused_with_row_and_column() {
    for (dtype, bad) in [("F32", vec![0, 0, 0x80, 0x7F]), ("F16", vec![0, 0xFC]), ("BF16", vec![0xC0, 0xFF])]
    {
        let mut bytes = vec![0u8; 12 * bad.len()];
        bytes[7 * bad.len()..8 * bad.len()].copy_from_slice(&bad);
        let model = TempDir::new().unwrap();
        let file = safetensors_file(&[("w", dtype, &[4, 3], &bytes)]);
        fs::write(model.path().join("model.safetensors"), file).unwrap();
        let checkpoint = opened(model.path());
        let w = checkpoint.get("w").unwrap();
        assert!(w.rows_f32(0..2).is_ok());
        for error in [
            w.to_f32().unwrap_err(),
            w.rows_f32(2..3).unwrap_err(),
            // Packed as a load packs it: without loss, and rounded.
            pack(&w, w.scheme().unwrap()).unwrap_err(),
            pack(&w, Scheme::Int8Row).unwrap_err(),
        ] {
            let expected =
                "model.safetensors: tensor w: row 2, column 1 is NaN or infinite; expected a finite number";
            assert!(error.to_string().ends_with(expected), "{dtype}: {error}");
        }
    }
}

#[test]
fn embedded_files_are_read_like_files_of_a_folder() {
    static FILES: [(&str, &[u8]); 3] = [
        ("config.json", include_bytes!("../data/gemma3/tiny-b/config.json")),
        ("generation_config.json", include_bytes!("../data/gemma3/tiny-b/generation_config.json")),
        ("model.safetensors", include_bytes!("../data/gemma3/tiny-a/model.safetensors")),
    ];
    let files = ModelFiles::embedded("demo", &FILES);
    assert_eq!(files.name(), "demo");
    assert_eq!(files.read("config.json").unwrap().unwrap(), FILES[0].1);
    assert!(files.read("tokenizer.json").unwrap().is_none());
    let (config, generation) = arch::load(&files).unwrap();
    assert_eq!((config.vocab_size, generation.sampling.top_k), (320, Some(64)));
    // The config of another model than the tensors.
    let checkpoint = Checkpoint::open(&files).unwrap();
    assert_eq!(
        Weights::collect(&checkpoint, &config).unwrap_err().to_string(),
        "demo (embedded)/model.safetensors: tensor model.embed_tokens.weight has shape [512, 128]; config.json \
         asks for [320, 96] (vocab_size, hidden_size)"
    );
}

// ---- Quantizer ----------------------------------------------------------------------------------------

/// A tensor's blocks and scales, packed in two calls.
fn pack(tensor: &Tensor, scheme: Scheme) -> Result<(Vec<u8>, Vec<u8>), CheckpointError> {
    let (rows, cols) = (tensor.rows(), tensor.cols());
    let mut blocks = vec![0; scheme.block_bytes(rows, cols) as usize];
    let mut scales = vec![0; scheme.scale_bytes(rows, cols) as usize];
    let tiles = rows.div_ceil(TILE_ROWS);
    let cut = tiles / 3;
    let (b0, b1) = blocks.split_at_mut(cut * scheme.tile_bytes(cols));
    let (s0, s1) = scales.split_at_mut(cut * scheme.tile_scale_bytes(cols));
    pack_tiles(scheme, Rounding::Nearest, tensor, 0..cut, b0, s0)?;
    pack_tiles(scheme, Rounding::Nearest, tensor, cut..tiles, b1, s1)?;
    Ok((blocks, scales))
}

/// The integers and scales of a tensor, row-major. They pass through the tiles that a load makes.
fn quantized(tensor: &Tensor, scheme: Scheme) -> (Vec<i8>, Vec<u8>) {
    let (blocks, scales) = pack(tensor, scheme).unwrap();
    let (block_bytes, scale_bytes) =
        (scheme.tile_bytes(tensor.cols()), scheme.tile_scale_bytes(tensor.cols()));
    let mut row = QuantizedRow::new(scheme, tensor.cols());
    let mut all = (Vec::new(), Vec::new());
    for index in 0..tensor.rows() {
        let (tile, lane) = (index / TILE_ROWS, index % TILE_ROWS);
        let (blocks, scales) =
            (&blocks[tile * block_bytes..][..block_bytes], &scales[tile * scale_bytes..][..scale_bytes]);
        unpack_row(scheme, lane, blocks, scales, &mut row);
        all.0.extend_from_slice(&row.q);
        all.1.extend_from_slice(&row.scales);
    }
    all
}

#[test]
fn quantized_tensors_have_the_checksums_of_the_manifests() {
    for set in GEMMA3_SETS {
        let (_, checkpoint) = open(&data(format!("gemma3/{set}")));
        let manifest: Value = read_json(&data(format!("gemma3/{set}")).join("quant_manifest.json"));
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
                let (q, scales) = quantized(&tensor, scheme);
                let q: Vec<u8> = q.iter().map(|q| *q as u8).collect();
                assert_eq!(sha256(&q), expected["q_sha256"], "{set} {mode} {name} q");
                assert_eq!(sha256(&scales), expected["scale_sha256"], "{set} {mode} {name} scale");
                checked += 1;
            }
        }
        // Four modes with seven projections a layer, and the embedding once.
        let layers = HashMap::from([("tiny-a", 8), ("tiny-b", 7), ("tiny-27b-ratio", 6)])[set];
        assert_eq!(checked, 4 * 7 * layers + 1, "{set}");
    }
}

#[test]
fn rows_with_extreme_scales_are_quantized_like_the_reference() {
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
fn the_last_group_of_a_row_may_be_short() {
    // Five columns in groups of two make three groups. The last has one column.
    let row = [1.0f32, -3.5, 0.0, 0.0, 14.0];
    let (mut q, mut scales, mut y) = ([9i8; 5], [f16::ONE; 3], [0.0f32; 5]);
    quantize_row(&row, 2, 7, &mut q, &mut scales).unwrap();
    assert_eq!((q, scales.map(f16::to_f32)), ([2, -7, 0, 0, 7], [0.5, 0.0, 2.0]));
    dequantize_row(&q, &scales, 2, &mut y);
    assert_eq!(y, [1.0, -3.5, 0.0, 0.0, 14.0]);
    // The largest scale of an f16 is 65504, and the largest integer is 7. A larger value needs a scale that rounds to
    // infinity.
    let largest = [65504.0f32 * 7.0];
    quantize_row(&largest, 1, 7, &mut [0], &mut [f16::ZERO]).unwrap();
    let error = quantize_row(&[0.0, 65520.0 * 7.0], 1, 7, &mut [0; 2], &mut [f16::ZERO; 2]).unwrap_err();
    assert_eq!(error.to_string(), "the values of the group at column 1 are too large for an f16 scale");
    let error = quantize_row(&[1.0, f32::NAN], 2, 7, &mut [0; 2], &mut [f16::ZERO]).unwrap_err();
    assert_eq!(error.to_string(), "a value near column 0 is NaN or infinite; expected finite numbers");
}

// ---- Files for the tests ------------------------------------------------------------------------------

type Tensors = Vec<(String, DType, Vec<usize>)>;

fn file_of_zeros(tensors: &Tensors) -> Vec<u8> {
    let bytes = |(_, dtype, shape): &(_, DType, Vec<usize>)| shape.iter().product::<usize>() * dtype.size();
    let zeros = vec![0; tensors.iter().map(bytes).max().unwrap_or(0)];
    let dtypes: Vec<String> = tensors.iter().map(|(_, dtype, _)| format!("{dtype:?}")).collect();
    let stored = tensors.iter().zip(&dtypes).map(|(tensor, dtype)| {
        let (name, _, shape) = tensor;
        (&name[..], &dtype[..], &shape[..], &zeros[..bytes(tensor)])
    });
    safetensors_file(&stored.collect::<Vec<_>>())
}

// ---- Configs ------------------------------------------------------------------------------------------

fn config(json: Value) -> Result<gemma3::Config, String> {
    arch::read(&json, "config.json").map_err(|e| e.to_string())?;
    gemma3::Config::from_json(json.to_string().as_bytes(), "config.json").map_err(|e| e.to_string())
}

/// The published sizes, with exactly the fields that their config.json files have.
#[test]
fn configs_of_the_published_sizes_are_read() {
    let linear8 = json!({"factor": 8.0, "rope_type": "linear"});
    let wrapped = |text: Value| {
        json!({
            "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eos_token_id": [1, 106],
            "image_token_index": 262144, "model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16",
            "mm_tokens_per_image": 256,
            "vision_config": {
                "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
                "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": false
            }
        })
    };
    let sized =
        |[hidden_size, intermediate_size, num_hidden_layers, heads, kv_heads]: [usize; 5]| gemma3::Config {
            vocab_size: 262_208,
            hidden_size,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim: 256,
            rms_norm_eps: 1e-6,
            max_position_embeddings: 131_072,
            query_pre_attn_scalar: 256.0,
            sliding_window: 1024,
            layer_types: Vec::new(),
            rope_theta: 1e6,
            rope_local_base_freq: 1e4,
            rope_scaling_factor: 8.0,
            eos_token_ids: vec![1, 106],
            bos_token_id: Some(2),
            vision: Ok(None),
            tie_word_embeddings: true,
        };
    let cases = [
        (
            wrapped(json!({
                "model_type": "gemma3_text", "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504,
                "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16,
                "query_pre_attn_scalar": 168, "rope_scaling": linear8, "sliding_window": 1024
            })),
            gemma3::Config {
                head_dim: 128,
                query_pre_attn_scalar: 168.0,
                ..sized([5376, 21504, 62, 32, 16])
            },
            10,
        ),
        (
            wrapped(json!({
                "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360,
                "num_attention_heads": 16, "num_hidden_layers": 48, "num_key_value_heads": 8,
                "rope_scaling": linear8, "sliding_window": 1024
            })),
            sized([3840, 15360, 48, 16, 8]),
            8,
        ),
        // The numbers of heads are the defaults.
        (
            wrapped(json!({
                "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
                "num_hidden_layers": 34, "rope_scaling": linear8, "sliding_window": 1024
            })),
            sized([2560, 10240, 34, 8, 4]),
            5,
        ),
        (
            json!({
                "architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attn_logit_softcapping": null,
                "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
                "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
                "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768,
                "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26,
                "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
                "rope_local_base_freq": 10000, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512,
                "sliding_window_pattern": 6, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 262144
            }),
            gemma3::Config {
                vocab_size: 262_144,
                max_position_embeddings: 32768,
                sliding_window: 512,
                rope_scaling_factor: 1.0,
                ..sized([1152, 6912, 26, 4, 1])
            },
            4,
        ),
    ];
    for (json, mut expected, full_layers) in cases {
        let json_has_tower = json.get("vision_config").is_some();
        let found = config(json).unwrap();
        expected.layer_types = (1..=expected.num_hidden_layers)
            .map(|i| if i % 6 == 0 { LayerType::FullAttention } else { LayerType::SlidingAttention })
            .collect();
        if let Ok(Some(tower)) = &found.vision {
            let VisionSpec { hidden_size, text_hidden_size, .. } = *tower;
            let layers = tower.transformer().expect("a transformer");
            let sizes = [hidden_size, layers.intermediate_size, layers.num_hidden_layers];
            assert_eq!(sizes, [1152, 4304, 27]);
            assert_eq!((layers.num_attention_heads, layers.head_dim), (16, 72));
            assert_eq!((tower.grid([896; 2]), tower.pool, tower.fixed_tokens()), ([64; 2], 4, Some(256)));
            assert_eq!((tower.norm_eps, text_hidden_size), (1e-6, expected.hidden_size));
        }
        assert_eq!(matches!(found.vision, Ok(Some(_))), json_has_tower, "{:?}", found.vision);
        expected.vision.clone_from(&found.vision);
        assert_eq!(found, expected);
        let full = found.layer_types.iter().filter(|t| **t == LayerType::FullAttention).count();
        assert_eq!(full, full_layers);
    }
}

/// transformers 5 wrote the new configs from the old ones, so both must yield the same values.
#[test]
fn configs_of_transformers_4_and_5_are_read_alike() {
    for set in ["tiny-a", "tiny-27b-ratio"] {
        let load = |folder: &str| {
            let files = open_files(&data(format!("{folder}/{set}"))).unwrap();
            arch::load(&files).unwrap()
        };
        let (old, old_generation) = load("gemma3");
        let (new, _) = load("transformers5");
        assert_eq!(old, new, "{set}");
        let ropes: Vec<_> = old.ropes.iter().map(|rope| (rope.scaling.clone(), rope.theta)).collect();
        assert_eq!(ropes, [(RopeScaling::Unscaled, 1e4), (RopeScaling::Linear { factor: 8.0 }, 1e6)]);
        assert_eq!(old.eos_token_ids, [1, 106]);
        let expected = GenerationConfig {
            do_sample: Some(true),
            sampling: SamplingOptions { top_k: Some(64), top_p: Some(0.95), ..SamplingOptions::default() },
            eos_token_ids: vec![1, 106],
            suppress_tokens: Vec::new(),
        };
        assert_eq!(old_generation, expected);
    }
    // layer_types has precedence over the sliding_window_pattern in the same file.
    let (config, _) = open(&data("transformers5/tiny-27b-l2"));
    let windows: Vec<_> = config.layers.iter().map(|layer| layer.window.is_some()).collect();
    assert_eq!(windows, [true, false]);
    let (config, _) = open(&data("gemma3/tiny-b"));
    let full: Vec<_> = (0..config.layers.len()).filter(|i| config.layers[*i].window.is_none()).collect();
    assert_eq!((full, &config.ropes[1].scaling), (vec![2, 5], &RopeScaling::Unscaled));
}

#[test]
fn config_fields_are_read_as_transformers_reads_them() {
    let base = |extra: Value| {
        let mut json = json!({"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 4});
        json.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        config(json)
    };
    let full = |config: gemma3::Config| -> Vec<bool> {
        config.layer_types.iter().map(|t| *t == LayerType::FullAttention).collect()
    };
    for name in ["sliding_window_pattern", "_sliding_window_pattern"] {
        assert_eq!(full(base(json!({name: 2})).unwrap()), [false, true, false, true]);
        assert_eq!(full(base(json!({name: 1})).unwrap()), [true; 4]);
    }
    // A model without sliding layers has no window, whatever the config says.
    let window = |pattern: u64| base(json!({"sliding_window_pattern": pattern, "sliding_window": null}));
    assert_eq!(window(1).map(|config| config.spec().window()), Ok(None));
    let named = base(json!({"sliding_window_pattern": 1, "sliding_window": 512})).unwrap();
    assert_eq!((named.spec().window(), base(json!({})).unwrap().spec().window()), (None, Some(4096)));
    assert!(window(2).unwrap_err().contains("sliding_window is null"), "{:?}", window(2));
    // Older configs call this key `type`.
    let factor = |json: Value| base(json!({"rope_scaling": json})).map(|c| c.rope_scaling_factor);
    assert_eq!(factor(json!({"type": "linear", "factor": 4})), Ok(4.0));
    assert_eq!(factor(json!({"type": "default"})), Ok(1.0));
    assert_eq!(factor(json!(null)), Ok(1.0));
    // As transformers 5 writes it, without scaling, and with the default theta of the sliding layers.
    let parameters =
        json!({"full_attention": {"rope_type": "default", "rope_theta": 5e5}, "sliding_attention": {}});
    let config = base(json!({"rope_parameters": parameters, "rope_local_base_freq": 2e4})).unwrap();
    assert_eq!((config.rope_theta, config.rope_local_base_freq, config.rope_scaling_factor), (5e5, 2e4, 1.0));
    // eos_token_id may be one id or several, at both levels. If it is absent, it is 1.
    assert_eq!(base(json!({})).unwrap().eos_token_ids, [1]);
    assert_eq!(base(json!({"eos_token_id": 7})).unwrap().eos_token_ids, [7]);
    let nested = json!({
        "model_type": "gemma3", "eos_token_id": [106, 1], "bos_token_id": 5,
        "text_config": {"hidden_size": 64, "eos_token_id": 3, "pad_token_id": null, "head_dim": 64.0}
    });
    let config = self::config(nested).unwrap();
    assert_eq!(config.eos_token_ids, [1, 3, 106]);
    assert_eq!((config.bos_token_id, config.head_dim), (Some(5), 64));
}

#[test]
fn unsupported_configs_are_refused_with_the_name_of_the_field() {
    let cases = r#"
{"model_type": null}
    => model_type is missing; expected "gemma3" or "gemma3_text" or "gemma3n" or "gemma3n_text" or "gemma4" or "gemma4_text" or "gemma4_unified" or "gemma4_unified_text" or "llama" or "mistral" or "qwen2" or "qwen3" or "qwen3_moe"
{"model_type": "mamba"}
    => model_type "mamba" is not supported; expected "gemma3" or "gemma3_text" or "gemma3n" or "gemma3n_text" or "gemma4" or "gemma4_text" or "gemma4_unified" or "gemma4_unified_text" or "llama" or "mistral" or "qwen2" or "qwen3" or "qwen3_moe"
{"model_type": 3} => model_type is 3; expected a string
{"model_type": "gemma3", "hidden_size": null}
    => text_config is missing; expected the language model's fields there
{"text_config": []} => text_config is a list; expected an object
{"text_config": {"model_type": "gemma3n_text"}}
    => text_config.model_type "gemma3n_text" is not supported; expected "gemma3_text"
{"text_config": {"hidden_size": "big"}}
    => text_config.hidden_size is "big"; expected a whole number from 1 to 65536
{"hidden_size": 0} => hidden_size is 0; expected a whole number from 1 to 65536
{"hidden_size": -64} => hidden_size is -64; expected a whole number from 1 to 65536
{"hidden_size": 64.5} => hidden_size is 64.5; expected a whole number from 1 to 65536
{"intermediate_size": 1e300} => intermediate_size is 1e+300; expected a whole number from 1 to 131072
{"vocab_size": 18446744073709551615}
    => vocab_size is 18446744073709551615; expected a whole number from 1 to 1048576
{"num_hidden_layers": null} => num_hidden_layers is null; expected a whole number from 1 to 1024
{"num_attention_heads": [8]} => num_attention_heads is a list; expected a whole number from 1 to 1024
{"num_attention_heads": 6, "num_key_value_heads": 4}
    => num_attention_heads is 6; expected a multiple of num_key_value_heads (4)
{"head_dim": 516} => head_dim is 516; expected a whole number from 16 to 512
{"head_dim": 34} => head_dim is 34; expected a multiple of 4 from 16 to 512
// Tiles of such a matrix would not fit the upload's staging buffer.
{"num_attention_heads": 1024, "num_key_value_heads": 1024, "head_dim": 256}
    => num_attention_heads times head_dim (256) is 262144; expected at most 131072
{"rms_norm_eps": 0} => rms_norm_eps is 0; expected a number from 0.000000000000000000000000000001 to 1
{"query_pre_attn_scalar": -1} => query_pre_attn_scalar is -1; expected a number from 0.001 to 1000000
{"sliding_window": 0} => sliding_window is 0; expected a whole number from 1 to 16777216
{"sliding_window_pattern": 0} => sliding_window_pattern is 0; expected a whole number from 1 to 1024
{"sliding_window_pattern": 6, "_sliding_window_pattern": 2}
    => _sliding_window_pattern is 2, but sliding_window_pattern is another number
{"layer_types": "all"} => layer_types is "all"; expected a list
{"layer_types": ["full_attention"]} => layer_types has 1 entries; expected num_hidden_layers (2)
{"layer_types": ["full_attention", "chunked_attention"]}
    => layer_types[1] is "chunked_attention"; expected "sliding_attention" or "full_attention"
{"rope_theta": 0} => rope_theta is 0; expected a number from 1 to 1000000000000
{"rope_scaling": 8} => rope_scaling is 8; expected an object
{"rope_scaling": {"rope_type": "yarn", "factor": 8}}
    => rope_scaling.rope_type "yarn" is not supported; expected "linear" or "default"
{"rope_scaling": {"factor": 8}} => rope_scaling.rope_type is missing; expected "linear" or "default"
{"rope_scaling": {"type": "linear"}} => rope_scaling.factor is missing; expected a number
{"rope_scaling": {"type": "linear", "factor": 0.5}}
    => rope_scaling.factor is 0.5; expected a number from 1 to 10000
{"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 8}}
    => rope_scaling.rope_type is "default", but type is "linear"; expected one type
{"rope_parameters": {"rope_type": "linear", "factor": 8}}
    => rope_parameters.full_attention is missing; expected the rope parameters of that layer type
{"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 8}}}
    => rope_parameters.sliding_attention.factor scales sliding layers; only full-attention layers may be
    scaled
{"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}, "sliding_attention": {}}}
    => rope_parameters.full_attention.partial_rotary_factor is 0.5; expected 1
{"rope_scaling": {"type": "linear", "factor": 8},
    "rope_parameters": {"full_attention": {}, "sliding_attention": {}}}
    => rope_scaling contradicts rope_parameters; expected one of them, or both alike
{"rope_theta": 1e5, "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {}}}
    => rope_theta contradicts rope_parameters; expected one of them, or both alike
{"attention_bias": true} => attention_bias is true; only checkpoints with false can be computed
{"use_bidirectional_attention": true}
    => use_bidirectional_attention is true; only checkpoints with false can be computed
{"tie_word_embeddings": false} => tie_word_embeddings is false; only checkpoints with true can be computed
{"text_config": {"tie_word_embeddings": false}}
    => text_config.tie_word_embeddings is false; only checkpoints with true can be computed
{"final_logit_softcapping": 30.0}
    => final_logit_softcapping is 30.0; expected null: Gemma-3 has no soft capping
{"attn_logit_softcapping": 50.0} => attn_logit_softcapping is 50.0; expected null: Gemma-3 has no soft capping
{"hidden_activation": "silu"} => hidden_activation "silu" is not supported; expected "gelu_pytorch_tanh"
{"eos_token_id": [1, 512]} => eos_token_id is 512; expected an id below vocab_size (512)
{"eos_token_id": -1} => eos_token_id is -1; expected a whole number from 0 to 4294967295
{"bos_token_id": 4000} => bos_token_id is 4000; expected an id below vocab_size (512)
"#;
    let sound = json!({
        "model_type": "gemma3_text", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2
    });
    config(sound.clone()).unwrap();
    for (change, expected) in rows(cases) {
        let json = with(sound.clone(), serde_json::from_str(&change).unwrap());
        assert_eq!(config(json), Err(format!("config.json: {expected}")));
    }
    let raw = |bytes: &[u8]| gemma3::Config::from_json(bytes, "config.json").unwrap_err().to_string();
    assert_eq!(raw(b"[1]"), "config.json: is a list; expected a JSON object");
    assert_eq!(raw(b""), "config.json: is not valid JSON: EOF while parsing a value at line 1 column 0");
    assert_eq!(
        raw(&[b'['; 5000]),
        "config.json: is not valid JSON: recursion limit exceeded at line 1 column 128"
    );
    assert_eq!(raw(&[b' '; 1 << 21]), "config.json: has 2097152 bytes; expected at most 1048576");

    let generation = r#"
{"temperature": -1} => temperature is -1; expected a number from 0 to 100
{"top_p": 1.5} => top_p is 1.5; expected a number from 0 to 1
{"top_k": 0.5} => top_k is 0.5; expected a whole number from 0 to 4294967295
{"do_sample": "yes"} => do_sample is "yes"; expected true or false
{"eos_token_id": ["</s>"]} => eos_token_id is "</s>"; expected a whole number from 0 to 4294967295
"#;
    for (json, expected) in rows(generation) {
        let error = GenerationConfig::from_json(json.as_bytes(), "generation_config.json").unwrap_err();
        assert_eq!(error.to_string(), format!("generation_config.json: {expected}"));
    }
    let off = GenerationConfig::from_json(br#"{"top_k": -1}"#, "generation_config.json").unwrap();
    assert_eq!(off.sampling.top_k, Some(0));
}

// ---- Bad files ----------------------------------------------------------------------------------------

/// The error for a folder with these files.
fn problem(files: &[(&str, Vec<u8>)]) -> String {
    refusal(folder_of(files).path())
}

#[test]
fn bad_safetensors_files_are_refused_with_the_name_of_the_tensor() {
    let good = safetensors_file(&[("a", "U8", &[4], &[1; 4]), ("b", "BF16", &[2, 2], &[0; 8])]);
    let entry = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#)
    };
    let of_a = entry("U8", "[4]", "[0,4]");
    let announces = "truncated, or not a safetensors file: its first 8 bytes announce a header of";
    let long_name = format!(r#"{{"a\nb{}":{}}}"#, "c".repeat(300), entry("U9", "[4]", "[0,4]"));
    let no_utf8 =
        with_header("{\"\u{fffd}", &[]).iter().map(|b| if *b == 0xEF { 0xFF } else { *b }).collect();
    let mut cases: Vec<(Vec<u8>, String)> = [
        (vec![], "truncated: 0 bytes, too few for a safetensors file"),
        (vec![0; 7], "truncated: 7 bytes, too few for a safetensors file"),
        (good[..20].to_vec(), &format!("{announces} 110 bytes, but 12 bytes follow")),
        (
            [&u64::MAX.to_le_bytes()[..], b"{}"].concat(),
            &format!("{announces} 18446744073709551615 bytes, but 2 bytes follow"),
        ),
        (
            b"PK\x03\x04 a zip archive".to_vec(),
            &format!("{announces} 8800140462016121680 bytes, but 10 bytes follow"),
        ),
        (
            good[..good.len() - 1].to_vec(),
            "tensor b: its bytes end at 12, but the file's end at 11: the file is truncated or corrupt",
        ),
        ([&good[..], &[0; 3]].concat(), "3 bytes follow the last tensor; expected none"),
        (
            no_utf8,
            "its header is not a valid safetensors header: EOF while parsing a string at line 1 column 5",
        ),
        (
            with_header(&long_name, &[0; 4]),
            "NAME: element type \"U9\" is not supported; expected F32, F16, BF16, I8, U8, I32 or I64",
        ),
    ]
    .map(|(bytes, expected)| (bytes, expected.to_owned()))
    .into();
    // `A` is a sound entry.
    let headers = r#"
{ => EOF while parsing an object at line 1 column 1
[] => invalid type: sequence, expected an object at line 1 column 0
{"a":{"dtype":"U8","shape":[0]}} => entry a: missing field `data_offsets` at line 1 column 31
{"__metadata__":{"format":1}}
    => entry __metadata__: invalid type: integer `1`, expected a string at line 1 column 27
{"a":A,"b":{"dtype":"BF16","shape":[-2,2],"data_offsets":[4,12]}}
    => entry b: invalid value: integer `-2`, expected u64 at line 1 column 84
{"a":A,"a":A} => entry a: occurs twice at line 1 column 56
"#;
    cases.extend(rows(headers).into_iter().map(|(header, expected)| {
        let expected = format!("its header is not a valid safetensors header: {expected}");
        (with_header(&header.replace('A', &of_a), &[0; 4]), expected)
    }));
    // Element type, shape and offsets of a tensor b. A sound tensor with 4 bytes is before it.
    let second = r#"
F64 [1] [4,12] => element type "F64" is not supported; expected F32, F16, BF16, I8, U8, I32 or I64
BF16 [2,3] [4,12] => BF16 [2, 3] takes 12 bytes, but its offsets span 8
BF16 [4294967296,4294967296] [4,12] => BF16 [4294967296, 4294967296] is larger than any file
BF16 [1,1,1,1,1,1,1,1,4] [4,12] => has 9 dimensions; expected at most 8
BF16 [4] [12,4] => its bytes end at 4, before they begin at 12
BF16 [4] [2,10] => overlaps the tensor before it: its bytes begin at 2, expected 4
BF16 [3] [6,12] => leaves a gap before it: its bytes begin at 6, expected 4
BF16 [4] [18446744073709551600,18446744073709551608]
    => its bytes end at 18446744073709551608, but the file's end at 12: the file is truncated or corrupt
BF16 [9223372036854775807] [4,18446744073709551615]
    => BF16 [9223372036854775807] takes 18446744073709551614 bytes, but its offsets span 18446744073709551611
"#;
    cases.extend(rows(second).into_iter().map(|(tensor, expected)| {
        let [dtype, shape, offsets] = tensor.split(' ').collect::<Vec<_>>()[..] else { panic!("{tensor}") };
        let header = format!(r#"{{"a":{of_a},"b":{}}}"#, entry(dtype, shape, offsets));
        (with_header(&header, &[0; 12]), format!("tensor b: {expected}"))
    }));
    let mut wrong = Vec::new();
    for (bytes, expected) in cases {
        let found = problem(&[("model.safetensors", bytes)]);
        let found = found.replace(&format!("tensor a\\nb{}…", "c".repeat(197)), "NAME");
        if found != format!("model.safetensors: {expected}") {
            wrong.push(format!("found    {found}\nexpected {expected}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // A header above the size limit is refused before it is read. The file is sparse on disk.
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    fs::write(&path, (1u64 << 30).to_le_bytes()).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len((1 << 30) + 8).unwrap();
    assert_eq!(
        refusal(folder.path()),
        "model.safetensors: its header has 1073741824 bytes; expected at most 16777216"
    );
}

#[test]
fn bad_shard_indexes_are_refused_with_the_name_of_the_tensor() {
    let name = "model.safetensors.index.json";
    let one = safetensors_file(&[("a", "U8", &[4], &[1; 4])]);
    let other = safetensors_file(&[("b", "U8", &[4], &[1; 4])]);
    let both = safetensors_file(&[("a", "U8", &[4], &[1; 4]), ("b", "U8", &[4], &[1; 4])]);
    let with = |index: Value, shards: &[&[u8]]| {
        let names = ["1.safetensors", "2.safetensors"].into_iter();
        let shards = names.zip(shards).map(|(name, bytes)| (name, bytes.to_vec()));
        problem(&shards.chain([(name, index.to_string().into_bytes())]).collect::<Vec<_>>())
    };
    let map = |map: Value| json!({"metadata": {}, "weight_map": map});

    let none = "DIR: holds neither model.safetensors nor model.safetensors.index.json nor unicorn.json";
    assert_eq!(problem(&[]), none);
    let good = map(json!({"a": "1.safetensors", "b": "2.safetensors"}));
    let twice = "2.safetensors: tensor a: is also in 1.safetensors; expected it in one file";
    let missing = "model.safetensors.index.json: tensor b: the index places it, and 0 more, in 2.safetensors, \
                   which is missing";
    let cut = "2.safetensors: truncated, or not a safetensors file: its first 8 bytes announce a header of 53 bytes, \
               but 42 bytes follow";
    let shards: [(&[&[u8]], &str); 4] =
        [(&[&one], missing), (&[&one, &one], twice), (&[&one, &both], twice), (&[&one, &other[..50]], cut)];
    for (shards, expected) in shards {
        assert_eq!(with(good.clone(), shards), expected);
    }
    let indexes = r#"
{"metadata": {}} => is not a valid index of shards: missing field `weight_map` at line 1 column 15
{"metadata": {}, "weight_map": {"a": 1}}
    => is not a valid index of shards: entry a: invalid type: integer `1`, expected a string at line 1 column 34
{"metadata": {}, "weight_map": {"a": "1.safetensors", "c": "2.safetensors"}}
    => tensor c: the index places it in 2.safetensors; it is in none of the shards
{"metadata": {}, "weight_map": {"a": "2.safetensors", "b": "1.safetensors"}}
    => tensor a: the index places it in 2.safetensors; it is in 1.safetensors
"#;
    for (index, expected) in rows(indexes) {
        let found = with(serde_json::from_str(&index).unwrap(), &[&one, &other]);
        assert_eq!(found, format!("{name}: {expected}"));
    }
    for outside in ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "", "a\\b", "a\0b"] {
        let found = with(map(json!({"a": outside})), &[&one, &other]);
        assert_eq!(found, format!("{name}: tensor a: names {outside:?}; expected a file of the same folder"));
    }
}

#[test]
fn links_out_of_the_folder_and_files_that_are_not_regular_are_refused() {
    use std::os::unix::fs::symlink;
    let index = json!({"weight_map": {"a": "1.safetensors"}}).to_string();
    let shard = safetensors_file(&[("a", "U8", &[4], &[1; 4])]);
    let root = TempDir::new().unwrap();
    let root = fs::canonicalize(root.path()).unwrap();
    let model = |name: &str| {
        let folder = root.join(name);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("model.safetensors.index.json"), &index).unwrap();
        folder
    };
    fs::create_dir_all(root.join("blobs")).unwrap();
    fs::write(root.join("blobs/1234"), &shard).unwrap();

    let outside = model("outside");
    symlink(root.join("blobs/1234"), outside.join("1.safetensors")).unwrap();
    assert_eq!(
        refusal(&outside),
        format!(
            "model.safetensors.index.json: tensor a: names \"1.safetensors\", a link to {}; expected a file of the \
             same folder",
            root.join("blobs/1234").display()
        )
    );
    // The layout of the Hugging Face cache.
    let cached = model("snapshots/0123abcd");
    symlink("../../blobs/1234", cached.join("1.safetensors")).unwrap();
    let checkpoint = opened(&cached);
    assert_eq!(plain(&checkpoint.get("a").unwrap()).unwrap().1, [1; 4]);

    let dangling = model("dangling");
    symlink("nowhere", dangling.join("1.safetensors")).unwrap();
    assert!(refusal(&dangling).ends_with("in 1.safetensors, which is missing"));
    let directory = model("directory");
    fs::create_dir(directory.join("1.safetensors")).unwrap();
    assert_eq!(
        refusal(&directory),
        "model.safetensors.index.json: tensor a: names \"1.safetensors\", which cannot be used: 1.safetensors: is \
         not a regular file, but a folder"
    );
    // Opening a pipe would block.
    let pipe = root.join("pipe");
    fs::create_dir(&pipe).unwrap();
    let made = std::process::Command::new("mkfifo").arg(pipe.join("model.safetensors")).status().unwrap();
    assert!(made.success());
    assert_eq!(refusal(&pipe), "model.safetensors: is not a regular file, but a pipe");

    let files = open_files(&outside).unwrap();
    let big = outside.join("tokenizer.json");
    fs::File::create(&big).unwrap().set_len(MAX_READ_BYTES + 1).unwrap();
    let error = files.read("tokenizer.json").unwrap_err().to_string();
    assert_eq!(error, format!("{}: has 67108865 bytes; expected at most 67108864", big.display()));
    for (path, expected) in [
        (
            root.join("none"),
            "no such file or folder; a model is a folder with config.json, tokenizer.json and model.safetensors, a \
             GGUF file, or the name of a model that `unicorn pull` fetched",
        ),
        (big.clone(), "is not a GGUF file; for other formats, give the folder of the model"),
    ] {
        let error = open_files(&path).unwrap_err().to_string();
        assert_eq!(error, format!("{}: {expected}", path.display()));
    }
    assert_eq!(
        arch::load(&files).unwrap_err().to_string(),
        format!(
            "{}: holds no config.json; give the original model's config.json with --model-config",
            outside.display()
        )
    );
}

/// The config of a small but complete model, and its tensors by name and shape.
fn small_model() -> (Value, Vec<(String, Vec<usize>)>) {
    let config = json!({
        "model_type": "gemma3_text", "vocab_size": 16, "hidden_size": 24, "intermediate_size": 20,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"], "eos_token_id": [1, 3],
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 8, "rope_theta": 1e6
    });
    let mut tensors =
        vec![("model.embed_tokens.weight".to_string(), vec![16, 24]), ("model.norm.weight".into(), vec![24])];
    for layer in 0..2 {
        for (name, shape) in [
            ("input_layernorm", vec![24]),
            ("post_attention_layernorm", vec![24]),
            ("pre_feedforward_layernorm", vec![24]),
            ("post_feedforward_layernorm", vec![24]),
            ("self_attn.q_norm", vec![32]),
            ("self_attn.k_norm", vec![32]),
            ("self_attn.q_proj", vec![64, 24]),
            ("self_attn.k_proj", vec![32, 24]),
            ("self_attn.v_proj", vec![32, 24]),
            ("self_attn.o_proj", vec![24, 64]),
            ("mlp.gate_proj", vec![20, 24]),
            ("mlp.up_proj", vec![20, 24]),
            ("mlp.down_proj", vec![24, 20]),
        ] {
            tensors.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    (config, tensors)
}

#[test]
fn tensors_that_contradict_the_config_are_refused_by_name() {
    type Case<'a> = (&'a dyn Fn(&mut Tensors), &'a str);
    let (config, tensors) = small_model();
    let config = self::config(config).unwrap().spec();
    let good: Tensors = tensors.into_iter().map(|(name, shape)| (name, DType::BF16, shape)).collect();
    let collect = |change: &dyn Fn(&mut Tensors)| -> Result<usize, String> {
        let mut tensors = good.clone();
        change(&mut tensors);
        let folder = TempDir::new().unwrap();
        fs::write(folder.path().join("model.safetensors"), file_of_zeros(&tensors)).unwrap();
        let checkpoint = opened(folder.path());
        let folder = folder.path().display().to_string();
        Weights::collect(&checkpoint, &config)
            .map(|weights| weights.skipped_vision)
            .map_err(|e| e.to_string().replace(&format!("{folder}/"), "").replace(&folder, "DIR"))
    };
    let add = |name: &'static str, dtype: DType, shape: &'static [usize]| {
        move |tensors: &mut Tensors| tensors.push((name.into(), dtype, shape.to_vec()))
    };
    assert_eq!(collect(&|_| ()), Ok(0));
    assert_eq!(collect(&add("model.vision_tower.encoder.layers.0.mlp.fc1.weight", DType::F32, &[2])), Ok(1));
    assert_eq!(collect(&add("multi_modal_projector.mm_soft_emb_norm.weight", DType::F32, &[2])), Ok(1));
    // A file may hold the tied head as well.
    assert_eq!(collect(&add("lm_head.weight", DType::BF16, &[16, 24])), Ok(0));

    let cases: [Case; 10] = [
        (
            &|t| t.retain(|(name, ..)| !name.contains("q_norm")),
            "DIR: tensor model.layers.0.self_attn.q_norm.weight and 1 more are missing; config.json asks for it with \
             shape [32]",
        ),
        (
            &|t| t.retain(|(name, ..)| name != "model.norm.weight"),
            "DIR: tensor model.norm.weight is missing; config.json asks for it with shape [24]",
        ),
        (
            &|t| t[8].2 = vec![64, 20],
            "model.safetensors: tensor model.layers.0.self_attn.q_proj.weight has shape [64, 20]; config.json asks \
             for [64, 24] (num_attention_heads * head_dim, hidden_size)",
        ),
        (
            &|t| t[1].2 = vec![1, 24],
            "model.safetensors: tensor model.norm.weight has shape [1, 24]; config.json asks for [24] (hidden_size)",
        ),
        (
            &|t| t[2].1 = DType::I8,
            "model.safetensors: tensor model.layers.0.input_layernorm.weight: holds I8; expected F32, F16 or BF16",
        ),
        (
            &add("model.layers.2.input_layernorm.weight", DType::BF16, &[24]),
            "model.safetensors: tensor model.layers.2.input_layernorm.weight is beyond the layers of config.json \
             (num_hidden_layers 2)",
        ),
        (
            &add("language_model.model.norm.weight", DType::BF16, &[24]),
            "model.safetensors: tensor language_model.model.norm.weight is another name of the same weight as \
             model.norm.weight; expected one of them",
        ),
        (
            &add("model.layers.1.self_attn.q_proj.bias", DType::BF16, &[64]),
            "model.safetensors: tensor model.layers.1.self_attn.q_proj.bias is no part of a Gemma-3 language model; \
             expected its weights, vision_tower, multi_modal_projector and a tied lm_head only",
        ),
        (
            &|t| {
                add("score.weight", DType::F32, &[2])(t);
                add("model.vision_tower_adapter.weight", DType::F32, &[2])(t);
            },
            "model.safetensors: tensor model.vision_tower_adapter.weight and 1 more are no part of a Gemma-3 language model; expected its \
             weights, vision_tower, multi_modal_projector and a tied lm_head only",
        ),
        (
            &add("lm_head.weight", DType::F32, &[16, 24]),
            "model.safetensors: tensor lm_head.weight is not equal to the embedding; expected the copy of it that a \
             tied head is",
        ),
    ];
    for (change, expected) in cases {
        assert_eq!(collect(change), Err(expected.into()));
    }
}

/// Damages one file of a small model at random, and loads all of it. The load fails with an error of one line, or every
/// tensor is as its header says.
#[test]
fn damaged_models_are_refused_or_read_within_bounds() {
    const ROUNDS: u64 = 3000;
    let seed: u64 = 0x5EED_2026;
    println!("seed {seed:#x}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);

    let (config, tensors) = small_model();
    let mut shards = [Vec::new(), Vec::new()];
    let mut weight_map = serde_json::Map::new();
    for (i, (name, shape)) in tensors.iter().enumerate() {
        let bytes: Vec<u8> = (0..shape.iter().product())
            .flat_map(|_| bf16::from_f32(rng.random_range(-1.0f32..1.0)).to_le_bytes())
            .collect();
        shards[i * 2 / tensors.len()].push((name.as_str(), shape, bytes));
        weight_map.insert(name.clone(), format!("{}.safetensors", i * 2 / tensors.len()).into());
    }
    let shards = shards.map(|shard| {
        let stored: Vec<StoredTensor> = shard.iter().map(|(n, s, b)| (*n, "BF16", &s[..], &b[..])).collect();
        safetensors_file(&stored)
    });
    let generation = json!({"eos_token_id": [1, 3], "top_k": 64, "top_p": 0.95, "do_sample": true});
    let files = [
        ("0.safetensors", shards[0].clone()),
        ("1.safetensors", shards[1].clone()),
        ("model.safetensors.index.json", json!({"weight_map": weight_map}).to_string().into_bytes()),
        ("config.json", config.to_string().into_bytes()),
        ("generation_config.json", generation.to_string().into_bytes()),
    ];
    let folder = folder_of(&files);
    assert_eq!(load_to_the_end(folder.path()), Ok(()));

    // Each round creates the file again, because some file systems flush a file that is truncated and rewritten.
    let put = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::remove_file(&path).unwrap();
        fs::write(path, bytes).unwrap();
    };
    let whole: usize = files.iter().map(|(_, bytes)| bytes.len()).sum();
    let (mut readings, mut past_header) = (DamagedReadings::default(), 0);
    for round in 0..ROUNDS {
        let mut rng = ChaCha8Rng::seed_from_u64(seed.wrapping_add(round));
        let (name, bytes) = &files[rng.random_range(0..files.len())];
        let mut damaged = bytes.clone();
        if name.ends_with(".safetensors") && rng.random_bool(0.8) {
            damaged = mutate(bytes, &mut rng);
        } else {
            for _ in 0..rng.random_range(1..=3) {
                damage(&mut damaged, &mut rng);
            }
        }
        put(name, &damaged);
        let held = whole - bytes.len() + damaged.len();
        let seed = seed.wrapping_add(round);
        readings.add(held, format_args!("round {round}: {name} damaged with seed {seed:#x}"), || {
            let loaded = std::panic::catch_unwind(|| load_to_the_end(folder.path()));
            loaded.unwrap_or_else(|_| panic!("round {round}: {name} damaged with seed {seed:#x}"))
        });
        past_header += u64::from(Checkpoint::open(&open_files(folder.path()).unwrap()).is_ok());
        put(name, bytes);
    }
    let DamagedReadings { read: loaded, refused, most_bytes } = readings;
    // A changed weight, or a changed name that nothing reads, is no error.
    println!(
        "{past_header} past the header, {refused} refused, {loaded} loaded, at most {most_bytes} bytes held for {whole}"
    );
    assert!(refused as u64 > ROUNDS / 2 && loaded as u64 > ROUNDS / 50, "{refused} refused, {loaded} loaded");
    assert!(past_header > ROUNDS / 2, "{past_header} past the header");
}

/// Opens the model, collects its tensors, reads them all and quantizes the weights.
fn load_to_the_end(folder: &Path) -> Result<(), String> {
    let files = open_files(folder).map_err(|e| e.to_string())?;
    let (config, _) = arch::load(&files).map_err(|e| e.to_string())?;
    let checkpoint = Checkpoint::open(&files).map_err(|e| e.to_string())?;
    for tensor in checkpoint.iter() {
        let (dtype, data) = plain(&tensor).expect("safetensors as they are");
        assert_eq!(data.len(), tensor.num_elements() * dtype.size());
        std::hint::black_box(data.iter().fold(0u8, |sum, b| sum.wrapping_add(*b)));
    }
    // The safetensors crate must accept every file that is accepted here, and yield the same data.
    for (file, ..) in checkpoint.fingerprint() {
        let bytes = fs::read(&file).unwrap();
        let theirs = safetensors::SafeTensors::deserialize(&bytes).expect("a file that was accepted");
        for tensor in checkpoint.iter().filter(|t| t.file == file) {
            let expected = theirs.tensor(tensor.name).unwrap();
            let data = plain(&tensor).expect("safetensors as they are").1;
            assert_eq!((tensor.shape, data), (expected.shape(), expected.data()));
        }
    }
    let weights = Weights::collect(&checkpoint, &config).map_err(|e| e.to_string())?;
    for tensor in weights.tensors.iter() {
        let cols = tensor.cols();
        let (mut q, mut scales) = (vec![0; cols], vec![f16::ZERO; cols.div_ceil(32)]);
        for row in tensor.to_f32().map_err(|e| e.to_string())?.chunks(cols) {
            quantize_row(row, 32, 7, &mut q, &mut scales).map_err(|e| e.to_string())?;
            assert!(q.iter().all(|q| (-7..=7).contains(q)) && scales.iter().all(|s| s.is_finite()));
        }
    }
    Ok(())
}

/// One random change of a byte, of a range of bytes, of the length, or of a number in the JSON.
fn damage(bytes: &mut Vec<u8>, rng: &mut ChaCha8Rng) {
    const WORDS: [&str; 16] = [
        "0",
        "1",
        "-1",
        "3",
        "7",
        "1e308",
        "0.5",
        "4294967296",
        "9223372036854775807",
        "18446744073709551615",
        "99999999999999999999",
        "null",
        "\"\"",
        "[]",
        "{}",
        "[[[[[[",
    ];
    let len = bytes.len();
    if len < 16 {
        bytes.extend_from_slice(b"{\"weight_map\":{}}");
        return;
    }
    // Most bytes of a shard are weights, which may have any value. The header is what can be wrong.
    let head = len.min(2600);
    let at = if rng.random_bool(0.9) { rng.random_range(0..head) } else { rng.random_range(0..len) };
    let stretch = at..(at + rng.random_range(1..40)).min(len);
    match rng.random_range(0..14) {
        0 => bytes[at] ^= 1 << rng.random_range(0..8),
        1 => bytes[at] = rng.random(),
        2 => drop(bytes.drain(stretch)),
        3 => {
            let copy = bytes[stretch].to_vec();
            drop(bytes.splice(at..at, copy));
        }
        4 => bytes.truncate(at),
        5 => bytes[..8].copy_from_slice(&rng.random_range(0..=len as u64 * 2).to_le_bytes()),
        6 => bytes.extend((0..rng.random_range(1..64)).map(|i| i as u8)),
        _ => {
            // Replaces a run of digits. The header's length is corrected, so that the JSON parser sees the change.
            let digit = |b: &u8| b.is_ascii_digit();
            let Some(start) = (8.max(at)..len).find(|i| digit(&bytes[*i])) else { return };
            let end = (start..len).find(|i| !digit(&bytes[*i])).unwrap_or(len);
            let word = WORDS[rng.random_range(0..WORDS.len())];
            drop(bytes.splice(start..end, word.bytes()));
            let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            if header < len as u64 && (start as u64) < header + 8 {
                let changed = header + word.len() as u64 - (end - start) as u64;
                bytes[..8].copy_from_slice(&changed.to_le_bytes());
            }
        }
    }
}
