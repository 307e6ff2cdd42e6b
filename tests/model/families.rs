//! The families against the oracle: Gemma 4, Llama, Mistral, Qwen 2, Qwen 3 (`tests/data/families/README.md`).
//!
//! The weakest likely mistake changes a logit by 3e-3 (another epsilon); the bound is 1e-3.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;
use unicorn::checkpoint::Checkpoint;
use unicorn::model::arch::{self, open_files};
use unicorn::model::load::{LoadOptions, Source};
use unicorn::model::model_runner::ModelRunner;
use unicorn::model::weights::Weights;
use unicorn::model::{Runner, SamplingParams, twin};
use unicorn::tensor::{KvDtype, Precision, QuantizeMode, VisionMode};

use crate::support::checkpoints::copy_of;
use crate::support::driver::{Driver, greedy, plain_sequence};
use crate::support::goldens::{
    Goldens, all_logits, check_prompts, load, load_files, max_difference, rows_at,
};
use crate::support::program::{printed, unicorn};
use crate::support::reference::divergence;
use crate::support::{data, device, in_turn};

const BOUND: f32 = 1e-3;
const SETS: [&str; 13] = [
    "tiny-gemma3n",
    "tiny-gemma4-12b",
    "tiny-gemma4-26b",
    "tiny-gemma4-31b",
    "tiny-gemma4-e2b",
    "tiny-llama",
    "tiny-llama-tied",
    "tiny-mistral-null",
    "tiny-mistral-window",
    "tiny-qwen2",
    "tiny-qwen3",
    "tiny-qwen3-tied",
    "tiny-qwen3-moe",
];
/// One model of each family.
const FAMILIES: [&str; 9] = [
    "tiny-gemma4-31b",
    "tiny-llama",
    "tiny-mistral-window",
    "tiny-qwen2",
    "tiny-qwen3",
    "tiny-gemma4-26b",
    "tiny-qwen3-moe",
    "tiny-gemma4-e2b",
    "tiny-gemma3n",
];

fn folder(set: &str) -> PathBuf {
    data("families").join(set)
}

/// The sets, each with its choices ([`in_turn`]).
fn with_choices<T: Copy>(sets: &[&'static str], choices: &[T]) -> Vec<(&'static str, T)> {
    let of = |(turn, set): (usize, &&'static str)| {
        in_turn(choices, turn).iter().map(|choice| (*set, *choice)).collect::<Vec<_>>()
    };
    sets.iter().enumerate().flat_map(of).collect()
}

/// A copy of a set with another `config.json`.
fn with_config(set: &str, config: &Value) -> TempDir {
    let to = copy_of(&folder(set));
    std::fs::write(to.path().join("config.json"), config.to_string()).unwrap();
    to
}

fn config(set: &str, file: &str) -> Value {
    serde_json::from_slice(&std::fs::read(folder(set).join(file)).unwrap()).unwrap()
}

fn check_logits(model: &mut ModelRunner, goldens: &Goldens, what: &str) {
    for prompt in ["short", "mid", "long"] {
        let tokens = goldens.tokens(&format!("tokens.{prompt}"));
        let expected = goldens.view::<f32>(&format!("logits.{prompt}"));
        let difference = max_difference(&all_logits(model, &tokens), &expected);
        println!("{what} {prompt}: max |difference| {difference:.2e}");
        assert!(difference <= BOUND, "{what} {prompt}: {difference}");
    }
}

#[test]
fn each_family_matches_the_oracle() {
    for set in SETS {
        let goldens = Goldens::open(&folder(set));
        let mut model = load(&folder(set), &LoadOptions::default());
        check_logits(&mut model, &goldens, set);
        for prompt in ["short", "mid", "long"] {
            let tokens = goldens.tokens(&format!("tokens.{prompt}"));
            let expected = goldens.tokens(&format!("greedy.{prompt}.tokens"));
            assert_eq!(greedy(&mut model, &tokens, expected.len(), 64, &[]), expected, "{set} {prompt}");
        }
    }
}

#[test]
fn each_family_matches_its_dequantized_goldens() {
    let modes = [QuantizeMode::Int4G128, QuantizeMode::Int4G32, QuantizeMode::Int8Row];
    for (set, mode) in with_choices(&SETS, &modes) {
        let goldens = Goldens::open(&folder(set));
        let name = mode.name().replace('-', "_");
        let options = LoadOptions { quantize: mode, ..LoadOptions::default() };
        let (of, what) = (format!("q.{name}."), format!("{set} {mode}"));
        check_prompts(&mut load(&folder(set), &options), &goldens, &of, "q.", BOUND, &what);
    }
}

#[test]
fn configs_of_transformers_5_are_read_as_those_of_transformers_4() {
    for set in ["tiny-llama", "tiny-llama-tied", "tiny-mistral-null", "tiny-mistral-window"] {
        let read = |file: &str| arch::read(&config(set, file), file).unwrap();
        let (old, new) = (read("config.json"), read("config.tf5.json"));
        assert_eq!(old.ropes, new.ropes, "{set}");
        assert_eq!((&old.layers, &old.tensors), (&new.layers, &new.tensors), "{set}");
    }
}

#[test]
fn yarn_matches_the_oracle() {
    let goldens = Goldens::open(&folder("tiny-qwen3"));
    let scaled = with_config("tiny-qwen3", &config("tiny-qwen3", "config_yarn.json"));
    let mut model = load(scaled.path(), &LoadOptions::default());
    let frequencies = model.config().ropes[0].frequencies(32);
    for (got, expected) in frequencies.iter().zip(goldens.view::<f32>("yarn.inv_freq")) {
        assert!((got / f64::from(expected) - 1.0).abs() < 1e-6, "{got} {expected}");
    }
    let vocab = model.config().vocab_size;
    let mid = all_logits(&mut model, &goldens.tokens("tokens.mid"));
    assert!(max_difference(&mid, &goldens.view("yarn.logits.mid")) <= BOUND);
    let long = all_logits(&mut model, &goldens.tokens("tokens.long"));
    let long = rows_at(&long, &goldens.tokens("yarn.positions.long"), vocab);
    assert!(max_difference(&long, &goldens.view("yarn.logits.long")) <= BOUND);
}

#[test]
fn gguf_files_match_the_oracle_with_their_weights() {
    for (set, files) in [
        ("tiny-llama", &["tiny-llama-F32", "tiny-llama-Q8_0", "tiny-llama-Q4_0"][..]),
        ("tiny-gemma4-31b", &["tiny-31b-Q4_0", "tiny-31b-Q4_K_M"]),
        ("tiny-qwen2", &["tiny-qwen2-Q8_0"]),
        ("tiny-qwen3", &["tiny-qwen3-Q4_K_M"]),
        ("tiny-gemma4-26b", &["tiny-26b-Q8_0", "tiny-26b-Q4_0"]),
        ("tiny-gemma4-e2b", &["tiny-e2b-Q4_0"]),
        ("tiny-gemma3n", &["tiny-3n-Q4_0"]),
        ("tiny-qwen3-moe", &["tiny-qwen3-moe-Q4_0"]),
    ] {
        let folder = folder(set).join("gguf");
        let base = Goldens::read(&folder.join("base.safetensors"));
        for file in files {
            let goldens = Goldens::read(&folder.join(format!("{file}.goldens.safetensors")));
            let files = open_files(&folder.join(format!("{file}.gguf"))).unwrap();
            let mut model = load_files(&files, &LoadOptions::default()).unwrap();
            let vocab = model.config().vocab_size;
            for prompt in ["short", "mid", "long"] {
                let tokens = base.tokens(&format!("tokens.{prompt}"));
                let all = all_logits(&mut model, &tokens);
                let got = rows_at(&all, &base.tokens(&format!("positions.{prompt}")), vocab);
                let exact = max_difference(&got, &goldens.view(&format!("exact.logits.{prompt}")));
                println!("{file} {prompt}: max |difference| {exact:.2e}");
                assert!(exact <= BOUND, "{file} {prompt}: {exact}");
            }
        }
    }
}

/// The rows of queries and keys that a GGUF file interleaves are read in the order of the original checkpoint.
#[test]
fn interleaved_rows_are_read_in_the_original_order() {
    let original = open_files(&folder("tiny-llama")).unwrap();
    let file = open_files(&folder("tiny-llama").join("gguf/tiny-llama-F32.gguf")).unwrap();
    let [original, file] = [&original, &file].map(|files| Checkpoint::open(files).unwrap());
    let mut interleaved = 0;
    for tensor in original.iter() {
        let same = file.iter().find(|other| other.name == tensor.name);
        let same = same.unwrap_or_else(|| panic!("{} is not in the file", tensor.name));
        interleaved += usize::from(same.interleaved.is_some());
        assert_eq!(same.to_f32().unwrap(), tensor.to_f32().unwrap(), "{}", tensor.name);
    }
    assert_eq!(interleaved, 6, "queries and keys of three layers");
}

/// Products have other tiles, layers other submits, and matrices other shards in each of these ways.
#[test]
fn chunks_batches_and_precisions_keep_the_contract_of_each_family() {
    for (set, kv) in FAMILIES
        .into_iter()
        .zip([KvDtype::F16, KvDtype::F16, KvDtype::Int8, KvDtype::Int8].into_iter().cycle())
    {
        let goldens = Goldens::open(&folder(set));
        let tokens = goldens.tokens("tokens.long");
        let quantize = QuantizeMode::Int4G128Emb8;
        let fast = LoadOptions { quantize, kv, precision: Precision::Fast, ..LoadOptions::default() };
        let mut whole = load(&folder(set), &fast);
        let expected = all_logits(&mut whole, &tokens);
        for (max_batch_tokens, max_shard_bytes) in [(1, None), (7, Some(1)), (100, None)] {
            let options = LoadOptions { max_batch_tokens, max_shard_bytes, ..fast };
            let got = all_logits(&mut load(&folder(set), &options), &tokens);
            assert!(got == expected, "{set}: chunks of {max_batch_tokens}, shards of {max_shard_bytes:?}");
        }
        let sequences = || {
            (0..3)
                .map(|id| plain_sequence(id, tokens[id as usize * 9..].to_vec(), SamplingParams::GREEDY, 12))
        };
        let limits = whole.limits().clone();
        let together = Driver::new(&mut whole, limits.clone()).run(sequences().collect()).answers;
        for sequence in sequences() {
            let id = sequence.id;
            let alone = Driver::new(&mut whole, limits.clone()).run(vec![sequence]).answers;
            assert_eq!(alone[&id], together[&id], "{set}");
        }
        // A prompt that repeats itself, with guesses; and again, from the prefix cache.
        let repeated = tokens[..48].repeat(2);
        let expected = greedy(&mut whole, &repeated, 12, 7, &[]);
        let mut driver = Driver::new(&mut whole, limits);
        for round in 0..2 {
            let run = driver.run(vec![plain_sequence(9, repeated.clone(), SamplingParams::GREEDY, 12)]);
            assert_eq!(run.answers[&9], expected, "{set}, run {round}");
            assert_eq!(run.cached[&9] > 0, round > 0, "{set}, run {round}: cached tokens");
        }
    }
}

/// int8 activations change which experts a token uses where two of them are nearly equal, and with random weights these
/// compute something else. So the bound of the average is wide, and that of the median is not.
#[test]
fn int8_activations_keep_the_distributions_of_mixtures() {
    for set in ["tiny-gemma4-26b", "tiny-qwen3-moe", "tiny-gemma4-31b", "tiny-qwen3"] {
        let tokens = Goldens::open(&folder(set)).tokens("tokens.long");
        for quantize in [QuantizeMode::Int8Row, QuantizeMode::Int4G32] {
            let [exact, fast] =
                [(Precision::F32, KvDtype::F32), (Precision::Fast, KvDtype::F16)].map(|(precision, kv)| {
                    let options = LoadOptions { quantize, precision, kv, ..LoadOptions::default() };
                    let mut model = load(&folder(set), &options);
                    (model.config().vocab_size, all_logits(&mut model, &tokens))
                });
            let vocab = exact.0;
            let (kl, same) = divergence(&exact.1, &fast.1, vocab);
            let rows = exact.1.chunks(vocab).zip(fast.1.chunks(vocab));
            let mut each: Vec<f64> = rows.map(|(exact, fast)| divergence(exact, fast, vocab).0).collect();
            each.sort_by(f64::total_cmp);
            let median = each[each.len() / 2];
            println!(
                "{set} {quantize}: KL {kl:.1e} nats on average, {median:.1e} in the median; the same best id at {:.1} %",
                100.0 * same
            );
            assert!(median <= 1e-2 && kl <= 0.1, "{set} {quantize}");
        }
    }
}

#[test]
fn a_correct_device_passes_the_self_test_of_each_family() {
    let choices = [
        (QuantizeMode::None, Precision::F32, KvDtype::F32),
        (QuantizeMode::Int4G128Emb8, Precision::Fast, KvDtype::Int8),
        (QuantizeMode::Int8Row, Precision::Fast, KvDtype::F16),
    ];
    for (set, (quantize, precision, kv)) in with_choices(&FAMILIES, &choices) {
        let options = LoadOptions { quantize, precision, kv, ..LoadOptions::default() };
        let mut model = load(&folder(set), &options);
        let tested = model.self_test().unwrap_or_else(|error| panic!("{set} {quantize}: {error}"));
        assert!(tested.untested.is_empty(), "{set}: {tested:?}");
        if set == "tiny-qwen2" || model.config().mixture.is_some() {
            let missed = model.missed_damage().expect("right");
            assert!(missed.is_empty(), "{set}: {missed:#?}");
        }
    }
}

/// The program converts each family, and the device computes what the CPU computed for every layer.
#[test]
fn each_family_is_quantized_and_its_layers_are_checked() {
    let gguf = [
        ("tiny-llama", "tiny-llama-Q4_0"),
        ("tiny-qwen3", "tiny-qwen3-Q4_K_M"),
        ("tiny-gemma4-31b", "tiny-31b-Q4_K_M"),
    ];
    let gguf = gguf.map(|(set, file)| folder(set).join(format!("gguf/{file}.gguf")));
    let sources = FAMILIES.map(folder).into_iter().chain(gguf);
    for source in sources {
        let to = tempfile::tempdir().unwrap();
        let native = to.path().join("native");
        let path = |path: &Path| path.to_str().unwrap().to_owned();
        printed(unicorn(&["quantize", &path(&source), &path(&native), "--scheme", "keep"]));
        let [from, into] = [&source, &native].map(|path| open_files(path).unwrap());
        let [mut stored, mut converted] = [&from, &into].map(|files| {
            let options =
                LoadOptions { precision: Precision::Fast, kv: KvDtype::F16, ..LoadOptions::default() };
            load_files(files, &options).unwrap()
        });
        let layers = converted.config().layers.len();
        assert_eq!(converted.self_test().expect("right").layers, Ok(layers), "{}", source.display());
        let tokens: Vec<u32> = (0..30).map(|i| (i * 37 + 5) % 200).collect();
        let same = all_logits(&mut stored, &tokens) == all_logits(&mut converted, &tokens);
        assert!(same, "{}: other logits", source.display());
    }
}

#[test]
fn the_twin_of_the_forward_pass_matches_the_oracle_for_each_family() {
    for set in SETS {
        let (goldens, files) = (Goldens::open(&folder(set)), open_files(&folder(set)).unwrap());
        let (spec, _) = arch::load(&files).unwrap();
        let checkpoint = Checkpoint::open(&files).unwrap();
        let weights = Weights::collect(&checkpoint, &spec).unwrap();
        let (tokens, vocab) = (goldens.tokens("tokens.mid"), spec.vocab_size);
        let expected = goldens.view::<f32>("logits.mid");
        let values = twin::values_of(&checkpoint, &weights, &spec, tokens, vocab, &mut |_| {}).unwrap();
        let off = max_difference(&values.logits.values, &expected[expected.len() - vocab..]);
        assert!(off <= BOUND, "{set}: {off}");
    }
}

#[test]
fn configs_that_cannot_be_computed_are_refused_by_name() {
    let of_text = |experts: usize, used: usize| {
        json!({
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": true,
            "num_experts": experts,
            "top_k_experts": used,
            "moe_intermediate_size": 64,
        })
    };
    let of_e2b = |field: &str, value: usize| {
        let mut text = config("tiny-gemma4-e2b", "config.json")["text_config"].take();
        text[field] = json!(value);
        text
    };
    for (set, field, value, expected) in [
        ("tiny-llama", "attention_bias", json!(true), "attention_bias is true; only checkpoints with false"),
        ("tiny-llama", "mlp_bias", json!(true), "mlp_bias is true"),
        (
            "tiny-llama",
            "hidden_act",
            json!("gelu"),
            "hidden_act \"gelu\" is not supported; expected \"silu\"",
        ),
        ("tiny-llama", "head_dim", json!(12), "head_dim is 12; expected a whole number from 16 to 512"),
        ("tiny-llama", "head_dim", json!(18), "head_dim is 18; expected a multiple of 4 from 16 to 512"),
        ("tiny-llama", "num_key_value_heads", json!(3), "expected a multiple of num_key_value_heads (3)"),
        (
            "tiny-llama",
            "rope_scaling",
            json!({"rope_type": "dynamic", "factor": 2.0}),
            "rope_scaling.rope_type \"dynamic\" is not supported; expected \"default\", \"linear\", \"llama3\" or \
             \"yarn\"",
        ),
        (
            "tiny-llama",
            "rope_scaling",
            json!({"type": "longrope"}),
            "rope_scaling.rope_type \"longrope\" is not",
        ),
        (
            "tiny-llama",
            "rope_scaling",
            json!({"rope_type": "llama3", "factor": 8.0}),
            "rope_scaling.low_freq_factor is missing; expected a number",
        ),
        (
            "tiny-llama",
            "rope_parameters",
            json!({"rope_type": "default", "rope_theta": 1e4}),
            "rope_theta contradicts rope_parameters",
        ),
        ("tiny-llama", "layer_types", json!(["full_attention"]), "layer_types has 1 entries; expected"),
        (
            "tiny-qwen3",
            "layer_types",
            json!(["full_attention", "sliding_attention", "full_attention"]),
            "layer_types[1] is \"sliding_attention\"; expected \"full_attention\"",
        ),
        ("tiny-qwen3", "attention_bias", json!(true), "attention_bias is true"),
        ("tiny-qwen2", "use_sliding_window", json!(true), "use_sliding_window is true"),
        (
            "tiny-qwen2",
            "rope_scaling",
            json!({"rope_type": "yarn", "factor": 4.0, "mscale": 1.0}),
            "rope_scaling.mscale is 1.0; expected null: it is not computed",
        ),
        (
            "tiny-gemma4-31b",
            "enable_moe_block",
            json!(true),
            "num_experts is missing; expected a number, because",
        ),
        ("tiny-gemma4-26b", "text_config", of_text(300, 8), "num_experts is 300; at most 256 experts"),
        ("tiny-gemma4-26b", "text_config", of_text(8, 9), "top_k_experts is 9; expected 1 to 8"),
        (
            "tiny-qwen3-moe",
            "moe_intermediate_size",
            json!(48),
            "is 48; expected a multiple of 32 in a mixture of experts",
        ),
        ("tiny-gemma4-31b", "hidden_size_per_layer_input", json!(18), "is 18; expected a multiple of 4"),
        (
            "tiny-gemma4-e2b",
            "text_config",
            of_e2b("vocab_size_per_layer_input", 500),
            "is 500; expected vocab_size (512)",
        ),
        ("tiny-llama", "partial_rotary_factor", json!(0.5), "partial_rotary_factor is 0.5; expected 1"),
        ("tiny-gemma3n", "altup_num_inputs", json!(2), "altup_num_inputs is 2; expected 4"),
        ("tiny-gemma3n", "altup_active_idx", json!(1), "altup_active_idx is 1; expected 0"),
        ("tiny-gemma3n", "altup_correct_scale", json!(false), "altup_correct_scale is false; only"),
        ("tiny-gemma3n", "hidden_size_per_layer_input", json!(18), "is 18; expected a multiple of 4"),
        (
            "tiny-gemma3n",
            "activation_sparsity_pattern",
            json!([0.95]),
            "has 1 entries; expected num_hidden_layers (10)",
        ),
        ("tiny-gemma3n", "activation_sparsity_pattern", json!(0.95), "is 0.95; expected a list"),
        ("tiny-gemma3n", "intermediate_size", json!([128, 64]), "has 2 entries; expected num_hidden_layers"),
        ("tiny-gemma4-31b", "num_kv_shared_layers", json!(8), "is 8; expected at most 7 layers"),
        (
            "tiny-gemma4-31b",
            "num_kv_shared_layers",
            json!(6),
            "is 6; expected a layer of the type full_attention before these, for layer 1",
        ),
        (
            "tiny-gemma4-31b",
            "use_bidirectional_attention",
            json!("all"),
            "is \"all\"; expected \"vision\" or null",
        ),
        ("tiny-gemma4-31b", "tie_word_embeddings", json!(false), "tie_word_embeddings is false; only"),
        (
            "tiny-gemma4-31b",
            "per_layer_config",
            json!({"1": {"head_dim": 260}}),
            "per_layer_config.1.head_dim is 260; expected a multiple of 8 from 16 to 512",
        ),
        (
            "tiny-gemma4-31b",
            "per_layer_config",
            json!({"6": {"num_key_value_heads": 3}}),
            "num_attention_heads is 8; expected a multiple of num_key_value_heads (3)",
        ),
        ("tiny-gemma4-31b", "suppress_tokens", json!([512]), "suppress_tokens is 512; expected an id below"),
        (
            "tiny-qwen2",
            "model_type",
            json!("mamba"),
            "model_type \"mamba\" is not supported; expected \"gemma3\" or",
        ),
    ] {
        let mut config = config(set, "config.json");
        config[field] = value;
        let error = arch::read(&config, "config.json").expect_err(field).to_string();
        assert!(error.contains(expected) && error.lines().count() == 1, "{error}");
        assert!(error.starts_with("config.json: "), "{error}");
    }
}

#[test]
fn tensors_that_do_not_match_the_config_are_refused_by_name() {
    for (set, field, value, expected) in [
        ("tiny-llama-tied", "tie_word_embeddings", json!(false), "tensor lm_head.weight is missing"),
        (
            "tiny-llama",
            "tie_word_embeddings",
            json!(true),
            "tensor lm_head.weight is not equal to the embedding",
        ),
        ("tiny-llama", "intermediate_size", json!(96), "(intermediate_size, hidden_size)"),
        ("tiny-llama", "num_hidden_layers", json!(2), "beyond the layers of config.json"),
        ("tiny-qwen2", "model_type", json!("llama"), "no part of a Llama language model"),
        ("tiny-qwen3", "model_type", json!("qwen2"), "self_attn.q_proj.bias"),
        ("tiny-llama", "model_type", json!("qwen3"), "self_attn.q_norm.weight"),
    ] {
        let mut config = config(set, "config.json");
        config[field] = value;
        if field == "num_hidden_layers" {
            config.as_object_mut().unwrap().remove("layer_types");
        }
        let changed = with_config(set, &config);
        let files = open_files(changed.path()).unwrap();
        let error = Source::open(&files).unwrap().weights().expect_err(field).to_string();
        assert!(error.contains(expected) && error.lines().count() == 1, "{set} {field}: {error}");
    }
}

/// `global_head_dim` and its relative, as published, and the `per_layer_config` that transformers writes.
#[test]
fn both_ways_to_give_layers_other_heads_mean_the_same() {
    let written = config("tiny-gemma4-31b", "config.json");
    let mut published = written.clone();
    let fields = published.as_object_mut().unwrap();
    fields.remove("per_layer_config");
    fields.insert("global_head_dim".into(), json!(32));
    fields.insert("num_global_key_value_heads".into(), json!(2));
    let [written, published] = [written, published].map(|config| arch::read(&config, "config.json").unwrap());
    assert_eq!((&written.layers, &written.tensors), (&published.layers, &published.tensors));

    // What the published 31B stores for a layer with a window and for one without.
    let spec = arch::shape("gemma-4-31b").unwrap().spec();
    let shape = |name: &str| spec.tensors.iter().find(|tensor| tensor.name == name).map(|t| t.shape.clone());
    assert_eq!(shape("layers.10.self_attn.q_proj"), Some(vec![8192, 5376]));
    assert_eq!(shape("layers.10.self_attn.k_proj"), Some(vec![4096, 5376]));
    assert_eq!(shape("layers.10.self_attn.v_proj"), Some(vec![4096, 5376]));
    assert_eq!(shape("layers.11.self_attn.q_proj"), Some(vec![16_384, 5376]));
    assert_eq!(shape("layers.11.self_attn.k_proj"), Some(vec![2048, 5376]));
    assert_eq!(shape("layers.11.self_attn.v_proj"), None);
    assert_eq!(shape("layers.11.self_attn.k_norm"), Some(vec![512]));
    assert_eq!(shape("layers.11.layer_scalar"), Some(vec![1]));
}

/// The layers of the E-sizes whose keys and values others use are those of the published models.
#[test]
fn the_last_layers_of_e_sizes_use_the_keys_and_values_of_others() {
    for (name, shared, [sliding, full], widths) in
        [("gemma-4-e2b", 20, [13, 14], [6144, 12_288]), ("gemma-4-e4b", 18, [22, 23], [10_240, 10_240])]
    {
        let spec = arch::shape(name).unwrap().spec();
        let own = spec.layers.len() - shared;
        for (i, (layer, tensors)) in spec.layers.iter().zip(&spec.tensors.layers).enumerate() {
            let source = if layer.window.is_some() { sliding } else { full };
            assert_eq!(layer.kv_source, (i >= own).then_some(source), "{name}: layer {i}");
            assert_eq!(layer.intermediate_size, widths[usize::from(i >= own)], "{name}: layer {i}");
            let has_keys = tensors.projections.k_proj.is_some() && tensors.norms.k_norm.is_some();
            assert_eq!(
                (has_keys, tensors.projections.v_proj.is_some()),
                (i < own, i < own),
                "{name}: layer {i}"
            );
        }
        let per_layer = spec.tensors.per_layer.as_ref().expect("per-layer embeddings");
        assert_eq!(per_layer.embed_tokens_per_layer.shape, [262_144, 256 * spec.layers.len()]);
        // The larger half of the weights is a table, of which a token reads a row.
        let all: u64 = spec.tensors.iter().map(|tensor| tensor.elements()).sum();
        let table = per_layer.embed_tokens_per_layer.elements();
        assert!((0.35..0.6).contains(&(table as f64 / all as f64)), "{name}: {table} of {all}");
    }
}

/// Four streams of the published sizes, of which both have one table with an embedding for each layer.
#[test]
fn the_published_sizes_with_streams_have_the_published_layers() {
    for (name, layers, width) in [("gemma-3n-e2b", 30, 8192), ("gemma-3n-e4b", 35, 16_384)] {
        let spec = arch::shape(name).unwrap().spec();
        assert_eq!(spec.layers.len(), layers);
        for (i, (layer, tensors)) in spec.layers.iter().zip(&spec.tensors.layers).enumerate() {
            assert_eq!(layer.window, (i % 5 != 4).then_some(512), "{name}: layer {i}");
            let source = if layer.window.is_some() { 18 } else { 19 };
            assert_eq!(layer.kv_source, (i >= 20).then_some(source), "{name}: layer {i}");
            assert_eq!(layer.intermediate_size, width);
            // 95 % of normally distributed numbers are below.
            assert_eq!(layer.gate_cutoff, (i < 10).then_some(1.644_853_6), "{name}: layer {i}");
            assert_eq!(tensors.kept.linear_left.as_ref().map(|left| &left.shape[..]), Some(&[64, 2048][..]));
        }
        let per_layer = spec.tensors.per_layer.as_ref().expect("per-layer embeddings");
        assert_eq!(per_layer.embed_tokens_per_layer.shape, [262_144, 256 * layers]);
        let streams = spec.tensors.streams.as_ref().expect("residual streams");
        assert_eq!(streams.iter().map(|matrix| matrix.elements()).sum::<u64>(), 6 * 2048 * 2048);
    }
}

/// Ids of images and sounds have no per-layer embeddings of their own. They have those of the first id.
#[test]
fn ids_beyond_the_per_layer_embeddings_have_those_of_the_first_id() {
    const ROWS: usize = 100;
    const TABLE: &str = "model.embed_tokens_per_layer.weight";
    let bytes = std::fs::read(folder("tiny-gemma3n").join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let table = file.tensor(TABLE).unwrap();
    let row = table.data().len() / table.shape()[0];
    // A table with fewer rows, and one with the first row in place of the others.
    let short = table.data()[..ROWS * row].to_vec();
    let repeated = [short.clone(), table.data()[..row].repeat(table.shape()[0] - ROWS)].concat();
    let tokens = Goldens::open(&folder("tiny-gemma3n")).tokens("tokens.long");
    assert!(tokens.iter().any(|id| *id as usize >= ROWS), "{tokens:?}");
    let logits = [(short, ROWS), (repeated, table.shape()[0])].map(|(data, rows)| {
        let mut config = config("tiny-gemma3n", "config.json");
        config["vocab_size_per_layer_input"] = json!(rows);
        let changed = with_config("tiny-gemma3n", &config);
        let view = |name: &str, view: safetensors::tensor::TensorView<'_>| {
            let (shape, data) = match name {
                TABLE => (vec![rows, view.shape()[1]], data.clone()),
                _ => (view.shape().to_vec(), view.data().to_vec()),
            };
            (name.to_owned(), view.dtype(), shape, data)
        };
        let tensors: Vec<_> = file.tensors().into_iter().map(|(name, of)| view(&name, of)).collect();
        let views = tensors.iter().map(|(name, dtype, shape, data)| {
            (name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
        safetensors::serialize_to_file(views, None, &changed.path().join("model.safetensors")).unwrap();
        all_logits(&mut load(changed.path(), &LoadOptions::default()), &tokens)
    });
    assert!(logits[0] == logits[1]);
}

/// A picture for a model that cannot compute images is refused, and the reason is said when the model is loaded.
#[test]
fn an_e_size_reads_texts_and_not_images() {
    let source = open_files(&folder("tiny-gemma4-e2b")).unwrap();
    let config = arch::read(&config("tiny-gemma4-e2b", "config.json"), "config.json").unwrap();
    let why = config.vision.expect_err("a tower with clipped linear maps");
    assert!(why.contains("use_clipped_linears"), "{why}");
    let error = load_files(&source, &LoadOptions { vision: VisionMode::On, ..LoadOptions::default() });
    let error = error.err().expect("--vision on cannot be had").to_string();
    assert!(error.contains("use_clipped_linears"), "{error}");
    let model = load_files(&source, &LoadOptions::default()).unwrap();
    assert!(model.limits().images.is_none());
}

/// The model cards of Qwen say to add YaRN to `config.json`, whose context stays that of the model without it.
#[test]
fn yarn_makes_the_context_longer() {
    let longest = |stated: usize, scaling: Value| {
        let mut config = config("tiny-qwen3-tied", "config.json");
        config["max_position_embeddings"] = json!(stated);
        config["rope_scaling"] = scaling;
        arch::read(&config, "config.json").unwrap().max_position_embeddings
    };
    let yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768});
    assert_eq!(longest(40_960, yarn.clone()), 131_072);
    assert_eq!(longest(262_144, yarn), 262_144);
    assert_eq!(longest(32_768, json!({"rope_type": "yarn", "factor": 2.0})), 65_536);
    assert_eq!(longest(4096, json!({"rope_type": "yarn", "factor": 10_000.0})), 1 << 24);
    assert_eq!(longest(16_384, json!({"rope_type": "linear", "factor": 4.0})), 16_384);
}

/// The config of a published multimodal checkpoint has the language model's fields in `text_config`.
#[test]
fn a_model_with_streams_reads_texts_of_a_multimodal_config_and_not_images() {
    let text = config("tiny-gemma3n", "config.json");
    let alone = arch::read(&text, "config.json").unwrap();
    let both = json!({
        "model_type": "gemma3n",
        "text_config": text,
        "vision_config": {"architecture": "mobilenetv5_300m_enc", "model_type": "gemma3n_vision"},
        "audio_config": {"model_type": "gemma3n_audio"},
    });
    let both = arch::read(&both, "config.json").unwrap();
    assert_eq!((&both.layers, &both.tensors, &both.ropes), (&alone.layers, &alone.tensors, &alone.ropes));
    let why = both.vision.expect_err("a tower that is not computed");
    assert!(why.contains("images cannot be computed by models with per-layer embeddings"), "{why}");
}

/// A published count includes every weight and norm once.
#[test]
fn the_published_shapes_have_the_published_numbers_of_parameters() {
    for (name, parameters) in [
        ("smollm2-135m", 134_515_008u64),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("mistral-7b-v0.3", 7_248_023_552),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
    ] {
        let spec = arch::shape(name).unwrap().spec();
        let sum: u64 = spec.tensors.iter().map(|tensor| tensor.elements()).sum();
        assert_eq!(sum, parameters, "{name}");
    }
}

/// The answer stays as it is with a draft model that is the same, another of its family, or of another family, whose
/// vocabulary is smaller. Only one of the two may have per-layer embeddings, or several residual streams.
#[test]
fn a_model_of_any_family_can_be_the_draft() {
    use unicorn::model::draft::{self, Drafted};
    let options = LoadOptions { sequences: 4, ..LoadOptions::default() };
    for (of, set) in [
        ("tiny-qwen3", "tiny-qwen3"),
        ("tiny-qwen3", "tiny-qwen3-tied"),
        ("tiny-qwen3", "tiny-llama-tied"),
        ("tiny-gemma4-26b", "tiny-gemma4-e2b"),
        ("tiny-gemma4-e2b", "tiny-gemma4-e2b"),
        ("tiny-gemma3n", "tiny-gemma3n"),
        ("tiny-gemma4-e2b", "tiny-gemma3n"),
    ] {
        let files = open_files(&folder(of)).unwrap();
        let tokens = Goldens::open(&folder(of)).tokens("tokens.mid");
        let expected = greedy(&mut load(&folder(of), &options), &tokens, 20, 64, &[]);
        let draft_files = open_files(&folder(set)).unwrap();
        let [model, draft_model] = [&files, &draft_files].map(|files| Source::open(files).unwrap());
        let (model, draft_model) =
            draft::load(&device(), &model, &draft_model, &options, &mut |_| {}).unwrap();
        let mut drafted = Drafted::new(model, draft_model);
        let limits = drafted.limits().clone();
        let sequence = plain_sequence(0, tokens.clone(), SamplingParams::GREEDY, 20);
        let answers = Driver::new(&mut drafted, limits).run(vec![sequence]).answers;
        assert_eq!(answers[&0], expected, "{set} for {of}");
    }
}
