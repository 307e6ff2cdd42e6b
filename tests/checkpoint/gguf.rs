//! GGUF: invalid headers, tensors compared bit by bit, the config from the metadata, tokenizers, and logits of every
//! reference file (`tests/data/gguf`) on the device.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs;
use std::path::Path;

use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;
use serde_json::Value as Json;
use strum::VariantArray;
use tempfile::TempDir;
use unicorn::checkpoint::{Checkpoint, Encoding, GgmlType, ModelFiles};
use unicorn::model::SamplingOptions;
use unicorn::model::arch::{self, open_files};
use unicorn::model::config::GenerationConfig;
use unicorn::model::config::LayerType;
use unicorn::model::gemma3;
use unicorn::model::load::LoadOptions;
use unicorn::model::weights::Weights;
use unicorn::tensor::{QuantizeMode, QuantizedRow, pack_row, unpack_row};
use unicorn::text::Tokenizer;

use crate::support::checkpoints::{ByName as _, hex, integers, le_bytes, plain, sha256};
use crate::support::driver::greedy;
use crate::support::fuzz_bodies::Accepted;
use crate::support::goldens::{Goldens, all_logits, load_files, max_difference, rows_at};
use crate::support::json::read_json;
use crate::support::program::{assert_error, printed, printed_json, unicorn, unicorn_on_software};
use crate::support::tokenizers::real_tokenizer_json;
use crate::support::{self, data, fuzz_bodies, legacy_files, packed_files, wants_all};

/// Folder and name of every reference file.
const FILES: [(&str, &str); 8] = [
    ("gguf-a", "gguf-a-zoo"),
    ("gguf-a", "gguf-a-Q4_K_M"),
    ("gguf-s", "gguf-s-BF16"),
    ("gguf-s", "gguf-s-Q4_0-embF16"),
    ("gguf-s", "gguf-s-Q4_K_M"),
    ("gguf-s", "gguf-s-Q4_1-pure"),
    ("gguf-s", "gguf-s-Q8_0"),
    ("gguf-62", "gguf-62-Q8_0"),
];

fn reference(folder: &str, file: &str) -> ModelFiles {
    open_files(&data("gguf").join(folder).join(format!("{file}.gguf"))).unwrap()
}

// --- writing GGUF -------------------------------------------------------------------------------------------

/// Declares the metadata values, with a conversion from the type of each.
macro_rules! values {
    ($($name:ident($type:ty)),*) => {
        #[derive(Debug, Clone)]
        enum Val {
            $($name($type),)*
            /// A value of any type, given as its bytes.
            Raw(u32, Vec<u8>),
        }

        $(impl From<$type> for Val {
            fn from(value: $type) -> Val {
                Val::$name(value)
            }
        })*
    };
}
values!(
    U32(u32),
    U64(u64),
    I32(i32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Floats(Vec<f32>),
    Ints(Vec<i32>),
    Flags(Vec<bool>)
);

impl From<&str> for Val {
    fn from(value: &str) -> Val {
        Val::Text(value.into())
    }
}

fn put_text(out: &mut Vec<u8>, text: &[u8]) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text);
}

impl Val {
    fn put(&self, out: &mut Vec<u8>) {
        fn array<T>(out: &mut Vec<u8>, kind: u32, items: &[T], put: impl Fn(&mut Vec<u8>, &T)) {
            out.extend(9u32.to_le_bytes());
            out.extend(kind.to_le_bytes());
            out.extend((items.len() as u64).to_le_bytes());
            items.iter().for_each(|item| put(out, item));
        }
        let mut scalar = |kind: u32, bytes: &[u8]| {
            out.extend(kind.to_le_bytes());
            out.extend(bytes);
        };
        match self {
            Val::U32(n) => scalar(4, &n.to_le_bytes()),
            Val::I32(n) => scalar(5, &n.to_le_bytes()),
            Val::F32(n) => scalar(6, &n.to_le_bytes()),
            Val::Bool(flag) => scalar(7, &[u8::from(*flag)]),
            Val::U64(n) => scalar(10, &n.to_le_bytes()),
            Val::Raw(kind, bytes) => scalar(*kind, bytes),
            Val::Text(text) => {
                out.extend(8u32.to_le_bytes());
                put_text(out, text.as_bytes());
            }
            Val::Texts(texts) => array(out, 8, texts, |out, text| put_text(out, text.as_bytes())),
            Val::Floats(items) => array(out, 6, items, |out, n| out.extend(n.to_le_bytes())),
            Val::Ints(items) => array(out, 5, items, |out, n| out.extend(n.to_le_bytes())),
            Val::Flags(items) => array(out, 7, items, |out, flag| out.push(u8::from(*flag))),
        }
    }
}

#[derive(Debug, Clone)]
struct TensorSpec {
    name: String,
    /// The dimensions. The first one is contiguous in memory.
    dims: Vec<u64>,
    kind: u32,
    bytes: Vec<u8>,
    /// The offset that the header gives for the tensor's bytes. `None` = the true offset.
    offset: Option<u64>,
}

/// A key, and its new value. `None` removes the key.
type Change<'a> = (&'a str, Option<Val>);

fn some(value: impl Into<Val>) -> Option<Val> {
    Some(value.into())
}

/// A GGUF file that tests write and corrupt.
#[derive(Debug, Clone)]
struct Writer {
    version: u32,
    keys: Vec<(String, Val)>,
    tensors: Vec<TensorSpec>,
    alignment: u64,
}

impl Writer {
    fn new() -> Self {
        Self { version: 3, keys: Vec::new(), tensors: Vec::new(), alignment: 32 }
    }

    fn set(&mut self, key: &str, value: impl Into<Val>) -> &mut Self {
        let value = value.into();
        match self.keys.iter_mut().find(|(k, _)| k == key) {
            Some(entry) => entry.1 = value,
            None => self.keys.push((key.into(), value)),
        }
        self
    }

    /// Sets or removes the keys of `changes`.
    fn changed(mut self, changes: &[Change]) -> Self {
        for (key, value) in changes {
            match value {
                Some(value) => self.set(key, value.clone()),
                None => self.remove(key),
            };
        }
        self
    }

    fn remove(&mut self, key: &str) -> &mut Self {
        self.keys.retain(|(k, _)| k != key);
        self
    }

    fn tensor(&mut self, name: &str, dims: &[u64], kind: u32, bytes: Vec<u8>) -> &mut Self {
        self.tensors.push(TensorSpec { name: name.into(), dims: dims.into(), kind, bytes, offset: None });
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            put_text(&mut out, key.as_bytes());
            value.put(&mut out);
        }
        let mut offset = 0u64;
        for tensor in &self.tensors {
            put_text(&mut out, tensor.name.as_bytes());
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend(tensor.offset.unwrap_or(offset).to_le_bytes());
            offset = (offset + tensor.bytes.len() as u64).next_multiple_of(self.alignment);
        }
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(self.alignment as usize), 0);
            out.extend(&tensor.bytes);
        }
        out
    }

    fn files(&self) -> ModelFiles {
        in_memory(self.bytes())
    }
}

fn in_memory(bytes: Vec<u8>) -> ModelFiles {
    ModelFiles::in_memory("m", [("m.gguf".to_owned(), bytes)], arch::gguf_archs())
}

/// ggml's type number, values per block and bytes per block of each quantized type.
const BLOCKS: [(u32, usize, usize); 12] = [
    (2, 32, 18),
    (3, 32, 20),
    (6, 32, 22),
    (7, 32, 24),
    (8, 32, 34),
    (10, 256, 84),
    (11, 256, 110),
    (12, 256, 144),
    (13, 256, 176),
    (14, 256, 210),
    (20, 32, 18),
    (23, 256, 136),
];

/// Offsets of the f16 scales in a block of a quantized type.
const fn scales_at(kind: u32) -> &'static [usize] {
    match kind {
        2 | 6 | 8 | 20 | 23 => &[0],
        10 => &[80, 82],
        11 => &[108],
        14 => &[208],
        _ => &[0, 2],
    }
}

/// ggml's type number and bytes per value of the plain types.
const PLAIN: [(u32, usize); 3] = [(0, 4), (1, 2), (30, 2)];

fn tensor_bytes(kind: u32, values: usize) -> usize {
    match BLOCKS.iter().find(|(k, ..)| *k == kind) {
        Some((_, block, bytes)) => values / block * bytes,
        None => values * PLAIN.iter().find(|(k, _)| *k == kind).unwrap().1,
    }
}

/// The types of a small model's matrices: of the embedding, then of the layer's. Together they are all quantized types.
const SMALL_TYPES: [[u32; 8]; 2] = [[8, 2, 3, 6, 7, 12, 13, 14], [20, 23, 11, 10, 1, 1, 1, 1]];

/// A complete model with one layer, whose rows have 256 values. Its matrices have these types and small values. The
/// vocabulary has all byte tokens.
fn small_model(rng: &mut ChaCha8Rng, [embedding, of_layer @ ..]: [u32; 8]) -> Writer {
    let mut file = Writer::new();
    file.set("general.architecture", "gemma3")
        .set("general.sampling.top_k", 64i32)
        .set("general.sampling.top_p", 0.95f32)
        .set("gemma3.block_count", 1u32)
        .set("gemma3.context_length", 4096u32)
        .set("gemma3.embedding_length", 256u32)
        .set("gemma3.feed_forward_length", 256u32)
        .set("gemma3.attention.head_count", 8u32)
        .set("gemma3.attention.head_count_kv", 1u32)
        .set("gemma3.attention.key_length", 32u32)
        .set("gemma3.attention.value_length", 32u32)
        .set("gemma3.attention.layer_norm_rms_epsilon", 1e-6f32)
        .set("gemma3.attention.sliding_window", 16u32)
        .set("gemma3.attention.sliding_window_pattern", vec![true])
        .set("gemma3.rope.freq_base", 1e6f32)
        .set("gemma3.rope.freq_base_swa", 1e4f32)
        .set("gemma3.rope.scaling.type", "linear")
        .set("gemma3.rope.scaling.factor", 8.0f32)
        .set("tokenizer.chat_template", "{{ bos_token }}{{ messages[0].content }}");
    let pieces = ["a", "b", "c", "\u{2581}", "\u{2581}a", "ab", "abc", "bc"];
    set_vocabulary(&mut file, &pieces);
    let rows = OWN_TOKENS + pieces.len() as u64;
    let mut matrix = |file: &mut Writer, name: &str, rows: u64, kind: u32| {
        let mut bytes: Vec<u8> = (0..tensor_bytes(kind, rows as usize * 256)).map(|_| rng.random()).collect();
        // All bits may be random except the exponents of the scales, which must be finite f16 or f32 numbers.
        match kind {
            0 => bytes.chunks_exact_mut(4).for_each(|b| b[3] &= 0x3f),
            1 | 30 => bytes.chunks_exact_mut(2).for_each(|b| b[1] &= 0x3b),
            _ => {
                let &(_, _, block) = BLOCKS.iter().find(|(k, ..)| *k == kind).unwrap();
                let blocks = bytes.chunks_exact_mut(block);
                blocks.for_each(|b| scales_at(kind).iter().for_each(|at| b[at + 1] &= 0x3b));
            }
        }
        file.tensor(name, &[256, rows], kind, bytes);
    };
    matrix(&mut file, "token_embd.weight", rows, embedding);
    let matrices = [
        ("attn_q", 256),
        ("attn_k", 32),
        ("attn_v", 32),
        ("attn_output", 256),
        ("ffn_gate", 256),
        ("ffn_up", 256),
        ("ffn_down", 256),
    ];
    for ((name, rows), kind) in matrices.into_iter().zip(of_layer) {
        matrix(&mut file, &format!("blk.0.{name}.weight"), rows, kind);
    }
    for (name, len) in [
        ("output_norm", 256),
        ("blk.0.attn_norm", 256),
        ("blk.0.post_attention_norm", 256),
        ("blk.0.ffn_norm", 256),
        ("blk.0.post_ffw_norm", 256),
        ("blk.0.attn_q_norm", 32),
        ("blk.0.attn_k_norm", 32),
    ] {
        file.tensor(&format!("{name}.weight"), &[len], 0, le_bytes(&vec![1.0; len as usize]));
    }
    file
}

/// The number of Gemma's control tokens and byte tokens.
const OWN_TOKENS: u64 = 6 + 256;

/// Gemma's control tokens and byte tokens, then `pieces` with decreasing scores.
fn set_vocabulary(file: &mut Writer, pieces: &[&str]) {
    let mut tokens: Vec<String> =
        ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"].map(String::from).into();
    let mut types = vec![3, 3, 3, 2, 3, 3];
    let mut scores = vec![-1000.0; 6];
    for byte in 0..=255u8 {
        tokens.push(format!("<{byte:#04X}>"));
        types.push(6);
        scores.push(0.0);
    }
    for (i, piece) in pieces.iter().enumerate() {
        tokens.push((*piece).to_owned());
        types.push(1);
        scores.push(-(i as f32));
    }
    file.set("tokenizer.ggml.model", "llama")
        .set("tokenizer.ggml.tokens", tokens)
        .set("tokenizer.ggml.token_type", types)
        .set("tokenizer.ggml.scores", scores)
        .set("tokenizer.ggml.bos_token_id", 2u32)
        .set("tokenizer.ggml.eos_token_id", 1u32)
        .set("tokenizer.ggml.unknown_token_id", 3u32)
        .set("tokenizer.ggml.padding_token_id", 0u32);
}

// --- the reference files ------------------------------------------------------------------------------------

#[derive(Deserialize)]
struct TensorGolden {
    #[serde(rename = "type")]
    kind: String,
    ne: Vec<usize>,
    n_bytes: u64,
    sha256: String,
    f32_sha256: Option<String>,
}

/// Hugging Face's name of a tensor with llama.cpp's name.
fn hugging_face_name(name: &str) -> String {
    let part = |part: &str| match part {
        "attn_norm" => "input_layernorm",
        "post_attention_norm" => "post_attention_layernorm",
        "ffn_norm" => "pre_feedforward_layernorm",
        "post_ffw_norm" => "post_feedforward_layernorm",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        other => panic!("{other}"),
    };
    match name.split('.').collect::<Vec<_>>()[..] {
        ["token_embd", "weight"] => "model.embed_tokens.weight".into(),
        ["output_norm", "weight"] => "model.norm.weight".into(),
        ["blk", layer, name, "weight"] => format!("model.layers.{layer}.{}.weight", part(name)),
        _ => panic!("{name}"),
    }
}

#[test]
fn every_tensor_dequantizes_to_the_bits_of_the_reference() {
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    for (folder, file) in FILES {
        let goldens: BTreeMap<String, TensorGolden> =
            read_json(&data("gguf").join(folder).join(format!("{file}.tensors.json")));
        let checkpoint = Checkpoint::open(&reference(folder, file)).unwrap();
        assert!(checkpoint.norms_hold_one());
        assert_eq!(checkpoint.iter().len(), goldens.len(), "{file}");
        for (name, golden) in goldens {
            let tensor =
                checkpoint.get(&hugging_face_name(&name)).unwrap_or_else(|| panic!("{file}: {name}"));
            let (kind, bytes) = match tensor.encoding {
                Encoding::Plain { dtype, data } => (format!("{dtype:?}"), data),
                Encoding::Ggml(ggml) => (ggml.kind.name().to_owned(), ggml.data),
                other => panic!("{file}: {name}: {other:?}"),
            };
            assert_eq!(kind, golden.kind, "{file}: {name}");
            assert_eq!(tensor.shape.iter().rev().copied().collect::<Vec<_>>(), golden.ne, "{file}: {name}");
            assert_eq!(tensor.stored_bytes(), golden.n_bytes, "{file}: {name}");
            assert_eq!(sha256(bytes), golden.sha256, "{file}: {name}");

            let values = tensor.to_f32().unwrap();
            let expected = golden.f32_sha256.as_ref().unwrap_or(&golden.sha256);
            assert_eq!(&sha256(&le_bytes(&values)), expected, "{file}: {name} ({kind})");
            // The layout on the device has the same values.
            let scheme = tensor.scheme().unwrap();
            if scheme.grouping(tensor.cols()).is_some() {
                let mut row = QuantizedRow::new(scheme, tensor.cols());
                let mut out = vec![0.0; tensor.cols()];
                for (index, expected) in values.chunks(tensor.cols()).enumerate() {
                    tensor.quantized_row_into(index, &mut row).unwrap();
                    row.dequantize_into(scheme, &mut out);
                    assert_eq!(le_bytes(&out), le_bytes(expected), "{file}: {name}, row {index}");
                    let (least, most) = integers(scheme).expect("integers");
                    let range = least..=most;
                    assert!(row.q.iter().all(|q| range.contains(q)), "{file}: {name}, row {index}");
                }
            }
            if let Encoding::Ggml(ggml) = tensor.encoding {
                // Memory bandwidth limits decoding, so whole tiles may take at most 5% more bytes than the file.
                assert!(ggml.kind.growth() <= 1.05, "{kind}: {} times as many bytes", ggml.kind.growth());
            }
            *kinds.entry(kind).or_default() += 1;
        }
    }
    println!("{kinds:?}");
    let all = ["BF16", "F16", "F32", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0"];
    assert_eq!(kinds.keys().map(String::as_str).collect::<Vec<_>>(), all);
}

#[test]
fn the_config_from_metadata_matches_the_reference() {
    for (folder, file) in FILES {
        let files = reference(folder, file);
        assert_eq!(files.name(), file);
        let (config, generation) = arch::load(&files).unwrap();
        let full = |layers: &[usize], count: usize| {
            let kind = |i| match layers.contains(&i) {
                true => LayerType::FullAttention,
                false => LayerType::SlidingAttention,
            };
            (0..count).map(kind).collect::<Vec<_>>()
        };
        let every_sixth: Vec<usize> = (0..62).filter(|i| i % 6 == 5).collect();
        let base = gemma3::Config {
            vocab_size: 512,
            hidden_size: 256,
            intermediate_size: 256,
            num_hidden_layers: 7,
            num_attention_heads: 8,
            num_key_value_heads: 2,
            head_dim: 32,
            rms_norm_eps: 1e-6,
            max_position_embeddings: 4096,
            query_pre_attn_scalar: 32.0,
            sliding_window: 16,
            layer_types: full(&[5], 7),
            rope_theta: 1e6,
            rope_local_base_freq: 1e4,
            rope_scaling_factor: 8.0,
            eos_token_ids: vec![1, 106],
            bos_token_id: Some(2),
            vision: Ok(None),
            tie_word_embeddings: true,
        };
        let expected = match folder {
            "gguf-a" => base,
            "gguf-s" => gemma3::Config {
                hidden_size: 96,
                intermediate_size: 160,
                num_hidden_layers: 3,
                num_attention_heads: 3,
                num_key_value_heads: 1,
                head_dim: 64,
                query_pre_attn_scalar: 64.0,
                sliding_window: 8,
                layer_types: full(&[1], 3),
                rope_scaling_factor: 1.0,
                ..base
            },
            _ => gemma3::Config {
                hidden_size: 32,
                intermediate_size: 32,
                num_hidden_layers: 62,
                num_attention_heads: 2,
                num_key_value_heads: 1,
                query_pre_attn_scalar: 16.0,
                layer_types: full(&every_sixth, 62),
                ..base
            },
        };
        assert_eq!(config, expected.spec(), "{file}");
        let sampling = GenerationConfig {
            do_sample: Some(true),
            sampling: SamplingOptions { top_k: Some(64), top_p: Some(0.95), ..SamplingOptions::default() },
            ..GenerationConfig::default()
        };
        assert_eq!(generation, sampling, "{file}");
        let checkpoint = Checkpoint::open(&files).unwrap();
        let weights = Weights::collect(&checkpoint, &config).unwrap();
        assert_eq!(weights.tensors.iter().count(), checkpoint.iter().len(), "{file}");
    }
}

/// The blocks and values of every quantized type, by ggml's own dequantization in Python.
#[test]
fn blocks_of_every_type_have_the_values_that_ggml_computes() {
    let goldens = Goldens::read(&data("gguf/blocks.safetensors"));
    for kind in GgmlType::VARIANTS {
        let name = kind.name();
        let (blocks, expected) = (goldens.view::<u8>(name), goldens.view::<u32>(&format!("{name}.values")));
        let [rows, row_bytes]: [usize; 2] = goldens.shape(name).try_into().expect("rows of bytes");
        let cols = row_bytes / kind.block_bytes() * kind.block_values();
        assert_eq!((rows * row_bytes, rows * cols), (blocks.len(), expected.len()), "{name}");

        let mut file = Writer::new();
        file.tensor("t", &[cols as u64, rows as u64], *kind as u32, blocks);
        let checkpoint = open(file.bytes()).unwrap();
        let tensor = checkpoint.get("t").unwrap();
        let scheme = tensor.scheme().unwrap();
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert!(bits(&tensor.to_f32().unwrap()) == expected, "{name}");

        // The rows of a tile, packed for the device, are the same integers and values.
        let [mut tile, mut tile_scales] =
            [scheme.tile_bytes(cols), scheme.tile_scale_bytes(cols)].map(|bytes| vec![0; bytes]);
        let (least, most) = integers(scheme).expect("integers");
        let (mut row, mut out) = (QuantizedRow::new(scheme, cols), vec![0.0; cols]);
        let mut unpacked = row.clone();
        for (index, expected) in expected.chunks(cols).enumerate() {
            tensor.quantized_row_into(index, &mut row).unwrap();
            assert!(row.q.iter().all(|q| (least..=most).contains(q)), "{name}, row {index}");
            pack_row(scheme, &row, index, &mut tile, &mut tile_scales);
            unpack_row(scheme, index, &tile, &tile_scales, &mut unpacked);
            assert_eq!(unpacked, row, "{name}, row {index}");
            unpacked.dequantize_into(scheme, &mut out);
            assert!(bits(&out) == expected, "{name}, row {index}");
        }
    }
}

/// Types without a scheme of their size are read, and a line says how many more bytes they take.
#[test]
fn types_that_grow_on_the_device_are_named_with_what_is_faster() {
    let growing: Vec<_> =
        GgmlType::VARIANTS.iter().filter(|kind| kind.growth() > 1.05).map(|kind| kind.name()).collect();
    assert_eq!(growing, ["Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS"]);
    let line = |types, mode| {
        let files = small_of(4, types).files();
        let (config, _) = arch::load(&files).unwrap();
        let checkpoint = Checkpoint::open(&files).unwrap();
        Weights::collect(&checkpoint, &config).unwrap().growth(mode)
    };
    assert_eq!(line(SMALL_TYPES[0], QuantizeMode::None), None);
    let types = "1 of IQ4_NL 1.9 times, 1 of IQ4_XS 2.0 times, 1 of Q2_K 2.3 times, 1 of Q3_K 1.9 times";
    for (mode, expected) in [
        (QuantizeMode::None, Some(types)),
        (QuantizeMode::Emb8, types.strip_prefix("1 of IQ4_NL 1.9 times, ")),
        (QuantizeMode::Int4G32, Some("1 of IQ4_NL 1.9 times")),
        (QuantizeMode::Int4G128Emb8, None),
    ] {
        let line = line(SMALL_TYPES[1], mode);
        let found = line.as_ref().map(|line| line.split_once(" (").unwrap().1.split_once(';').unwrap().0);
        assert_eq!(found, expected, "{mode}: {line:?}");
        // A mode that rounds all but the embedding is not proposed again.
        let proposes =
            line.is_some_and(|line| line.ends_with("`--quantize int4-g32`, which rounds the weights again"));
        assert_eq!(proposes, matches!(mode, QuantizeMode::None | QuantizeMode::Emb8), "{mode}");
    }

    let folder = TempDir::new().unwrap();
    let file = folder.path().join("small.gguf");
    fs::write(&file, small_of(4, SMALL_TYPES[1]).bytes()).unwrap();
    let file = file.to_str().unwrap();
    for command in [&["inspect", file][..], &["plan", file, "--vram", "1G"]] {
        let text = printed(unicorn(command));
        assert!(text.contains(types) && text.contains("Q4_0 or Q4_K_M is faster"), "{text}");
        let json = printed_json(unicorn(&[command, &["--json"]].concat()));
        assert!(json["growth"].as_str().unwrap().contains(types), "{json}");
    }
}

// --- logits -------------------------------------------------------------------------------------------------

fn log_softmax(logits: &[f32]) -> Vec<f32> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
    logits.iter().map(|x| x - max - sum.ln() as f32).collect()
}

/// Checks logits and greedy tokens of one file. They must be close to the exact oracle, and within `llama_bound` of
/// llama.cpp, which rounds activations.
fn check_logits(folder: &str, file: &str, exact_bound: f32, llama_bound: f32) {
    let base = Goldens::read(&data("gguf").join(folder).join("base.safetensors"));
    let goldens = Goldens::read(&data("gguf").join(folder).join(format!("{file}.goldens.safetensors")));
    let mut model = load_files(&reference(folder, file), &LoadOptions::default()).unwrap();
    let vocab = model.config().vocab_size;
    for prompt in ["short", "mid", "long"] {
        let tokens = base.tokens(&format!("tokens.{prompt}"));
        let all = all_logits(&mut model, &tokens);
        let got = rows_at(&all, &base.tokens(&format!("positions.{prompt}")), vocab);
        let exact = max_difference(&got, &goldens.view::<f32>(&format!("exact.logits.{prompt}")));

        // Log probabilities determine logits only up to a constant, so the mean difference is subtracted.
        let got = log_softmax(&all[(tokens.len() - 1) * vocab..]);
        let theirs = goldens.view::<f32>(&format!("llama.logprobs.{prompt}"));
        let shift = got.iter().zip(&theirs).map(|(a, b)| a - b).sum::<f32>() / vocab as f32;
        let differences = || got.iter().zip(&theirs).map(|(a, b)| (a - b - shift).abs());
        let (llama, mean) = (differences().fold(0.0, f32::max), differences().sum::<f32>() / vocab as f32);
        let kl: f32 = got.iter().zip(&theirs).map(|(a, b)| b.exp() * (b - a)).sum();
        println!(
            "{file} {prompt}: max |difference| {exact:.2e}; from llama.cpp {llama:.2e}, mean {mean:.2e}, KL {kl:.2e}"
        );
        assert!(exact <= exact_bound, "{file} {prompt}: {exact}");
        let (mean_bound, kl_bound) = if folder == "gguf-62" { (0.5, 0.15) } else { (0.15, 0.04) };
        assert!(
            llama <= llama_bound && mean <= mean_bound && kl <= kl_bound,
            "{file} {prompt}: {llama} {mean} {kl}"
        );

        // The tokens must be equal up to the first step at which this noise could change the choice.
        for (oracle, noise) in [("exact", 5e-3), ("llama", 2.0 * llama_bound)] {
            let expected = goldens.tokens(&format!("{oracle}.greedy.{prompt}.tokens"));
            let margins = goldens.view::<f32>(&format!("{oracle}.greedy.{prompt}.margin"));
            let sure = margins.iter().position(|m| *m < noise).unwrap_or(expected.len());
            if sure > 0 {
                assert_eq!(
                    greedy(&mut model, &tokens, sure, 64, &[]),
                    expected[..sure],
                    "{file} {prompt} {oracle}"
                );
            }
        }
    }
}

#[test]
fn a_file_of_bf16_matches_both_oracles() {
    check_logits("gguf-s", "gguf-s-BF16", 1e-3, 0.1);
}

#[test]
fn every_type_in_one_forward_pass_matches_both_oracles() {
    check_logits("gguf-a", "gguf-a-zoo", 1e-3, 0.4);
}

#[test]
fn the_default_mix_of_k_quants_matches_both_oracles() {
    check_logits("gguf-a", "gguf-a-Q4_K_M", 1e-3, 0.7);
}

#[test]
fn the_shape_of_qat_files_matches_both_oracles() {
    check_logits("gguf-s", "gguf-s-Q4_0-embF16", 1e-3, 0.4);
}

#[test]
fn rows_that_are_not_a_multiple_of_256_match_both_oracles() {
    check_logits("gguf-s", "gguf-s-Q4_K_M", 1e-3, 0.7);
    check_logits("gguf-s", "gguf-s-Q4_1-pure", 1e-3, 0.4);
    check_logits("gguf-s", "gguf-s-Q8_0", 1e-3, 0.4);
}

#[test]
fn sixty_two_layers_scale_attention_as_the_27b_does() {
    check_logits("gguf-62", "gguf-62-Q8_0", 2e-3, 2.0);
}

#[test]
fn types_that_grow_on_the_device_give_the_logits_of_their_values() {
    let whole = small_of(5, SMALL_TYPES[1]);
    let checkpoint = open(whole.bytes()).unwrap();
    let mut plain = whole.clone();
    for (tensor, stored) in plain.tensors.iter_mut().zip(checkpoint.iter()) {
        (tensor.kind, tensor.bytes) = (0, le_bytes(&stored.to_f32().unwrap()));
    }
    let tokens: Vec<u32> = (0..20).map(|i| i * 13 % 200).collect();
    let logits =
        |file: &Writer| all_logits(&mut load_files(&file.files(), &LoadOptions::default()).unwrap(), &tokens);
    let expected = logits(&plain);
    let largest = expected.iter().fold(0f32, |most, logit| most.max(logit.abs()));
    let difference = max_difference(&logits(&whole), &expected);
    println!("max |difference| {difference:.2e}, max |logit| {largest:.2e}");
    assert!(largest.is_finite() && difference <= 1e-4 * largest, "{difference} of {largest}");
}

#[test]
fn quantizing_a_gguf_file_starts_from_its_dequantized_values() {
    // `emb8` stores only the embedding as int8 rows. QAT files have it in f16.
    let files = reference("gguf-s", "gguf-s-Q4_0-embF16");
    let base = Goldens::read(&data("gguf/gguf-s/base.safetensors"));
    let tokens = base.tokens("tokens.short");
    let mut kept = load_files(&files, &LoadOptions::default()).unwrap();
    let exact = all_logits(&mut kept, &tokens);
    let bytes = kept.weight_bytes();
    for (quantize, low, high) in [(QuantizeMode::Emb8, 1e-3, 0.5), (QuantizeMode::Int8Row, 1e-3, 1.0)] {
        let options = LoadOptions { quantize, ..LoadOptions::default() };
        let mut model = load_files(&files, &options).unwrap();
        let difference = max_difference(&all_logits(&mut model, &tokens), &exact);
        println!("{quantize}: max |difference| {difference:.2e}, {} of {bytes} bytes", model.weight_bytes());
        assert!((low..high).contains(&difference), "{quantize}: {difference}");
        if quantize == QuantizeMode::Emb8 {
            // The matrix has 512 rows of 96 columns: int8 saves one byte a value, and adds a scale of 2 bytes a row.
            assert_eq!(bytes - model.weight_bytes(), 512 * 96 - 512 * 2);
        }
    }
}

// --- tokenizers ---------------------------------------------------------------------------------------------

fn tokenizer(files: &ModelFiles) -> Result<Tokenizer, String> {
    let bytes = files.read("tokenizer.json").map_err(|e| e.to_string())?.ok_or("no tokenizer")?;
    Tokenizer::from_bytes(&bytes, &files.display("tokenizer.json")).map_err(|e| e.to_string())
}

/// The pieces into which a tokenizer divides a text.
fn pieces_of(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
    let ids = tokenizer.encode(text, false).unwrap();
    ids.into_iter().map(|id| tokenizer.token(id).unwrap()).collect()
}

#[derive(Deserialize)]
struct TokenizerCases {
    encode: Vec<EncodeCase>,
    decode: Vec<DecodeCase>,
}

#[derive(Deserialize)]
struct EncodeCase {
    text: String,
    ids_parse_special: Vec<u32>,
    ids_no_parse_special: Vec<u32>,
}

#[derive(Deserialize)]
struct DecodeCase {
    ids: Vec<u32>,
    bytes_hex_with_special: String,
    bytes_hex_without_special: String,
    hf_text: String,
}

fn check_tokenizer_cases(tokenizer: &Tokenizer) {
    let cases: TokenizerCases = read_json(&data("gguf/tokenizer_cases.json"));
    assert!(cases.encode.len() >= 71 && cases.decode.len() >= 13);
    for case in &cases.encode {
        assert_eq!(tokenizer.encode(&case.text, false).unwrap(), case.ids_parse_special, "{:?}", case.text);
        let with_bos = [&[2], &case.ids_parse_special[..]].concat();
        assert_eq!(tokenizer.encode(&case.text, true).unwrap(), with_bos, "{:?}", case.text);
        assert_eq!(
            tokenizer.encode_text(&case.text, false).unwrap(),
            case.ids_no_parse_special,
            "{:?}",
            case.text
        );
    }
    for case in &cases.decode {
        let bytes = |special: bool| -> Vec<u8> {
            let ids = case.ids.iter().filter(|id| special || !tokenizer.is_special(**id));
            ids.flat_map(|id| tokenizer.token_bytes(*id).unwrap()).collect()
        };
        assert_eq!(hex(&bytes(true)), case.bytes_hex_with_special, "{:?}", case.ids);
        assert_eq!(hex(&bytes(false)), case.bytes_hex_without_special, "{:?}", case.ids);
        // If the bytes are not valid UTF-8, transformers writes one U+FFFD for each byte of the whole run of byte
        // tokens.
        let decoded = tokenizer.decode(&case.ids, false);
        assert_eq!(decoded, String::from_utf8_lossy(&bytes(true)), "{:?}", case.ids);
        let cut = [&decoded, &case.hf_text].map(|text| text.contains(char::REPLACEMENT_CHARACTER));
        assert!(decoded == case.hf_text || cut == [true; 2], "{:?}: {decoded:?}", case.ids);
    }
}

#[test]
fn a_tokenizer_from_metadata_gives_the_ids_of_llama_cpp() {
    for (folder, file) in FILES {
        let files = reference(folder, file);
        let tokenizer = tokenizer(&files).unwrap();
        assert_eq!(tokenizer.vocab_size(), 512, "{file}");
        check_tokenizer_cases(&tokenizer);
        // The chat template is in the metadata too.
        let config: Json =
            serde_json::from_slice(&files.read("tokenizer_config.json").unwrap().unwrap()).unwrap();
        assert_eq!((&config["bos_token"], &config["eos_token"]), (&"<bos>".into(), &"<end_of_turn>".into()));
        assert!(config["chat_template"].as_str().unwrap().contains("<start_of_turn>"), "{file}");
        assert!(files.read("chat_template.jinja").unwrap().is_none());
    }
}

/// llama.cpp's algorithm by its definition: of all neighbours whose concatenation is a piece, merge the pair with the
/// best score (the leftmost one of ties), until no such pair is left.
fn join_by_scores(text: &str, scores: &HashMap<String, f32>) -> Vec<String> {
    let mut symbols: Vec<String> = text.chars().map(String::from).collect();
    loop {
        let mut best: Option<(f32, usize)> = None;
        for (at, pair) in symbols.windows(2).enumerate() {
            if let Some(score) = scores.get(&pair.concat())
                && best.is_none_or(|(other, _)| *score > other)
            {
                best = Some((*score, at));
            }
        }
        let Some((_, at)) = best else { return symbols };
        let right = symbols.remove(at + 1);
        symbols[at].push_str(&right);
    }
}

/// A tokenizer with these pieces and scores, and the scores by piece. `own` is the score of control and byte tokens.
fn scored(pieces: &[String], own: f32, scores: &[f32]) -> (Tokenizer, HashMap<String, f32>) {
    let mut file = Writer::new();
    set_vocabulary(&mut file, &pieces.iter().map(String::as_str).collect::<Vec<_>>());
    let own = vec![own; OWN_TOKENS as usize];
    file.set("tokenizer.ggml.scores", [&own[..], scores].concat());
    let by_text = pieces.iter().cloned().zip(scores.iter().copied()).collect();
    (tokenizer(&file.files()).unwrap(), by_text)
}

/// Random vocabularies with pieces that overlap in many ways, and texts with runs of one letter.
#[test]
fn merges_derived_from_scores_give_the_tokens_of_merging_by_score() {
    const ROUNDS: u64 = 150;
    let seed = 0x6006_0F00;
    println!("seed {seed:#x}");
    let mut joined = 0;
    for round in 0..ROUNDS {
        let mut rng = ChaCha8Rng::seed_from_u64(seed + round);
        let alphabet = &["a", "b", "\u{2581}", "\u{e9}"][..rng.random_range(1..=4)];
        let mut pieces: Vec<String> = alphabet.iter().map(|c| (*c).to_string()).collect();
        let mut known: HashSet<String> = pieces.iter().cloned().collect();
        // Half of the pieces are concatenations of two existing pieces, as in a trained vocabulary. The others are
        // random letters, and possibly no sequence of merges produces them.
        for _ in 0..rng.random_range(4..60) {
            let piece = match rng.random_bool(0.5) {
                true => {
                    [pieces.choose(&mut rng).unwrap().as_str(), pieces.choose(&mut rng).unwrap()].concat()
                }
                false => (0..rng.random_range(2..7)).map(|_| *alphabet.choose(&mut rng).unwrap()).collect(),
            };
            if piece.chars().count() <= 16 && known.insert(piece.clone()) {
                pieces.push(piece);
            }
        }
        // All scores differ, and their order is not the order of the pieces.
        let mut order: Vec<usize> = (0..pieces.len()).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, rng.random_range(0..=i));
        }
        let scores: Vec<f32> = order.iter().map(|rank| -(*rank as f32)).collect();
        let (tokenizer, by_text) = scored(&pieces, -1000.0, &scores);
        for _ in 0..40 {
            let text: String =
                (0..rng.random_range(1..40)).map(|_| *alphabet.choose(&mut rng).unwrap()).collect();
            let expected = join_by_scores(&text, &by_text);
            joined += text.chars().count() - expected.len();
            let got = pieces_of(&tokenizer, &text.replace('\u{2581}', " "));
            assert_eq!(got, expected, "round {round}: {text:?} with {by_text:?}");
        }
    }
    assert!(joined > 20_000, "{joined}");
}

/// Runs of added pieces with one score, as in Google's QAT files, are merged from the left.
#[test]
fn runs_of_pieces_with_one_score_are_joined_from_the_left() {
    let mut pieces: Vec<String> = ["a", "b", "ab", "\u{2581}a"].map(String::from).into();
    for c in ["\n", "\u{2581}"] {
        pieces.extend((1..=31).map(|n| c.repeat(n)));
    }
    let scores: Vec<f32> = pieces.iter().map(|p| if p.contains(['a', 'b']) { -5.0 } else { 0.0 }).collect();
    let (tokenizer, by_text) = scored(&pieces, 0.0, &scores);
    for n in 1..80 {
        for text in [
            "\n".repeat(n),
            " ".repeat(n),
            format!("a{}ab{}b", "\n".repeat(n), " ".repeat(n / 2)),
            format!("{}a\n{}a", " ".repeat(n), "\n ".repeat(n)),
        ] {
            let expected = join_by_scores(&text.replace(' ', "\u{2581}"), &by_text);
            let got = pieces_of(&tokenizer, &text);
            assert_eq!(got, expected, "{text:?}");
        }
    }
}

/// A vocabulary of the real size loads within bounded memory and gives the same ids as merging by score.
#[test]
fn a_vocabulary_of_the_real_size_loads_within_bounded_memory() {
    let seed = 0xB16_0CAB;
    println!("seed {seed:#x}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let letters: Vec<String> = ('a'..='z').chain(['\u{2581}']).map(String::from).collect();
    let mut pieces = letters.clone();
    let mut known: HashSet<String> = pieces.iter().cloned().collect();
    while pieces.len() < 262_144 - 262 {
        // The pieces are concatenations of existing pieces, as in a trained vocabulary: early pieces are short, and
        // many others contain them.
        let reach = rng.random_range(27..=pieces.len());
        let piece =
            [&pieces[rng.random_range(0..reach)][..], &pieces[rng.random_range(0..reach.min(2000))]].concat();
        if piece.len() <= 24 && known.insert(piece.clone()) {
            pieces.push(piece);
        }
    }
    let mut file = Writer::new();
    let texts: Vec<&str> = pieces.iter().map(String::as_str).collect();
    set_vocabulary(&mut file, &texts);
    let scores: HashMap<String, f32> =
        pieces.iter().enumerate().map(|(i, piece)| (piece.clone(), -(i as f32))).collect();
    let bytes = file.bytes();
    let len = bytes.len();
    let files = in_memory(bytes);
    let (json, peak) = support::peak_allocation(|| files.read("tokenizer.json").unwrap().unwrap());
    println!("{len} bytes of metadata, {} of tokenizer.json, {peak} allocated", json.len());
    assert!(peak < 40 * len, "{peak} bytes for a file of {len}");
    let tokenizer = Tokenizer::from_bytes(&json, "tokenizer.json").unwrap();
    assert_eq!(tokenizer.vocab_size(), 262_144);
    let text: String = (0..2000).map(|_| letters.choose(&mut rng).unwrap().as_str()).collect();
    let got = pieces_of(&tokenizer, &text.replace('\u{2581}', " "));
    assert_eq!(got, join_by_scores(&text, &scores));
    println!("{} pieces", got.len());
    assert!(got.len() < 1500);
}

/// The tokens of a tokenizer.json, by id.
fn tokens_of(json: &Json) -> Vec<String> {
    let vocab = json["model"]["vocab"].as_object().unwrap();
    let mut tokens = vec![String::new(); vocab.len()];
    vocab.iter().for_each(|(text, id)| tokens[id.as_u64().unwrap() as usize] = text.clone());
    tokens
}

/// The real vocabulary, as llama.cpp's converter writes it and as Google's own files have it, compared with the goldens
/// of the real tokenizer.json.
#[test]
fn the_real_vocabulary_gives_the_ids_of_the_real_tokenizer() {
    let Some(json) = real_tokenizer_json() else { return support::skip("real-tokenizer") };
    let json: Json = serde_json::from_slice(&json).unwrap();
    let mut tokens = tokens_of(&json);
    // Pieces are in the order in which they were trained. The score of a piece is its negative position.
    let mut scores: Vec<f32> = (0..tokens.len()).map(|id| -(id as f32)).collect();
    let mut types = vec![1; tokens.len()];
    tokens
        .iter()
        .zip(&mut types)
        .filter(|(token, _)| token.starts_with("<0x"))
        .for_each(|(_, kind)| *kind = 6);
    let (mut converted, mut qat) = (Writer::new(), Writer::new());
    for added in json["added_tokens"].as_array().unwrap() {
        // The last added token, the image token of multimodal models, is not in the vocabulary.
        let id = added["id"].as_u64().unwrap() as usize;
        if id < tokens.len() {
            let special = added["special"].as_bool().unwrap() || tokens[id].starts_with("<unused") || id == 4;
            types[id] = if special { 3 } else { 4 };
            scores[id] = 0.0;
        }
    }
    for file in [&mut converted, &mut qat] {
        file.set("tokenizer.ggml.model", Val::Text("llama".into()))
            .set("tokenizer.ggml.bos_token_id", Val::U32(2))
            .set("tokenizer.ggml.unknown_token_id", Val::U32(3));
    }
    // In Google's files, all pieces except four are normal.
    let normal = [vec![3, 3, 3, 2], vec![1; types.len() - 4]].concat();
    qat.set("tokenizer.ggml.tokens", Val::Texts(tokens.clone()))
        .set("tokenizer.ggml.token_type", Val::Ints(normal))
        .set("tokenizer.ggml.scores", Val::Floats(scores.clone()));
    // The converter writes spaces of added pieces as spaces, and gives all of these pieces one score.
    for (token, (kind, score)) in tokens.iter_mut().zip(types.iter().zip(&mut scores)) {
        if matches!(kind, 3 | 4) {
            *token = token.replace('\u{2581}', " ");
            *score = -1000.0;
        }
    }
    converted
        .set("tokenizer.ggml.tokens", Val::Texts(tokens))
        .set("tokenizer.ggml.token_type", Val::Ints(types))
        .set("tokenizer.ggml.scores", Val::Floats(scores));

    let (converted, qat) = (tokenizer(&converted.files()).unwrap(), tokenizer(&qat.files()).unwrap());
    let cases: Json = read_json(&data("tokenizer/encode_cases.json"));
    let (mut checked, mut checked_qat) = (0, 0);
    for case in cases["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let expected: Vec<u32> =
            case["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        // The image token is not in the vocabulary, and the converter has replaced the space marks of added pieces.
        if expected.contains(&262_144) || text.contains('\u{2581}') {
            continue;
        }
        assert_eq!(converted.encode(text, false).unwrap(), expected, "{text:?}");
        checked += 1;
        // Normal pieces are not matched before tokenization, so <h1>, <unused7> and [multimodal] are split.
        if !text.replace("_of_turn>", "").contains(['>', ']']) {
            assert_eq!(qat.encode(text, false).unwrap(), expected, "{text:?}");
            checked_qat += 1;
        }
    }
    assert!(checked > 40 && checked_qat > 30, "{checked} {checked_qat}");
}

/// The vocabulary and merges of a tokenizer.json, as the converter writes them if there is no tokenizer.model.
#[test]
fn a_gpt2_style_vocabulary_gives_the_ids_of_its_tokenizer_json() {
    let json: Json = read_json(&data("tokenizer-mini/tokenizer.json"));
    let tokens = tokens_of(&json);
    let mut types = vec![1; tokens.len()];
    for added in json["added_tokens"].as_array().unwrap() {
        let looks_special = added["content"].as_str().unwrap().starts_with('<');
        let control = added["special"].as_bool().unwrap() || looks_special;
        types[added["id"].as_u64().unwrap() as usize] = if control { 3 } else { 4 };
    }
    let merges = json["model"]["merges"].as_array().unwrap();
    let merges: Vec<String> =
        merges.iter().map(|m| format!("{} {}", m[0].as_str().unwrap(), m[1].as_str().unwrap())).collect();
    let mut file = Writer::new();
    file.set("tokenizer.ggml.model", Val::Text("gpt2".into()))
        .set("tokenizer.ggml.tokens", Val::Texts(tokens.clone()))
        .set("tokenizer.ggml.token_type", Val::Ints(types))
        .set("tokenizer.ggml.merges", Val::Texts(merges.clone()))
        .set("tokenizer.ggml.bos_token_id", Val::U32(2));
    check_tokenizer_cases(&tokenizer(&file.files()).unwrap());

    let mut bad = file.clone();
    bad.set("tokenizer.ggml.merges", Val::Texts([&merges[..], &["he xyz".to_owned()]].concat()));
    assert_eq!(
        tokenizer(&bad.files()).err().unwrap(),
        format!(
            "m (in memory)/m.gguf: key tokenizer.ggml.merges: element {} needs \"xyz\", which is not a token",
            merges.len()
        )
    );
    bad.set("tokenizer.ggml.merges", Val::Texts(vec!["he".into()]));
    assert!(
        tokenizer(&bad.files())
            .err()
            .unwrap()
            .ends_with("element 0 is not two pieces with one space between them")
    );
    let byte_level = tokens.iter().map(|t| t.replace('\u{2581}', "\u{120}").replace("<0x", "<1x")).collect();
    bad.set("tokenizer.ggml.tokens", Val::Texts(byte_level));
    assert!(
        tokenizer(&bad.files())
            .err()
            .unwrap()
            .contains("key tokenizer.ggml.pre: is missing; expected \"gpt-2\"")
    );
    bad.set("tokenizer.ggml.pre", Val::Text("chameleon".into()));
    assert_eq!(
        tokenizer(&bad.files()).err().unwrap(),
        "m (in memory)/m.gguf: key tokenizer.ggml.pre: is \"chameleon\", whose way to split texts is not known; \
         expected \"gpt-2\", \"llama-bpe\", \"qwen2\" or \"smollm\", or give the original model's tokenizer.json with \
         --tokenizer"
    );
}

/// llama.cpp splits the texts of Qwen models which DeepSeek-R1 was distilled to as those of other Qwen models.
#[test]
fn two_names_stand_for_the_way_to_split_texts_of_qwen() {
    let json = |pre: &str| {
        let mut file = Writer::new();
        file.set("tokenizer.ggml.model", Val::Text("gpt2".into()))
            .set("tokenizer.ggml.pre", Val::Text(pre.into()))
            .set("tokenizer.ggml.tokens", Val::Texts(["<|end|>", "a", "b", "ab"].map(String::from).into()))
            .set("tokenizer.ggml.token_type", Val::Ints(vec![3, 1, 1, 1]))
            .set("tokenizer.ggml.merges", Val::Texts(vec!["a b".into()]))
            .set("tokenizer.ggml.eos_token_id", Val::U32(0));
        file.files().read("tokenizer.json").unwrap().unwrap()
    };
    assert!(json("deepseek-r1-qwen") == json("qwen2"));
    assert!(json("deepseek-r1-qwen") != json("gpt-2"));
}

#[test]
fn a_mixture_of_experts_is_refused_by_its_key() {
    let mut file = Writer::new();
    file.set("general.architecture", Val::Text("llama".into())).set("llama.expert_count", Val::U32(8));
    let error = arch::load(&file.files()).unwrap_err().to_string();
    assert_eq!(
        error,
        "m (in memory)/m.gguf: key llama.expert_count: is 8; models of this architecture can be computed without \
         experts only"
    );
}

/// The tokenizers of the GGUF files equal those of the original checkpoints.
#[test]
fn byte_level_tokenizers_of_files_give_the_ids_of_their_originals() {
    for (file, original) in [
        ("families/tiny-llama/gguf/tiny-llama-Q4_0.gguf", "families/tiny-llama"),
        ("families/tiny-qwen3/gguf/tiny-qwen3-Q4_K_M.gguf", "families/qwen-tokenizer"),
    ] {
        let files = open_files(&data(file)).unwrap();
        let made = tokenizer(&files).unwrap();
        let path = data(original).join("tokenizer.json");
        let expected = Tokenizer::from_bytes(&std::fs::read(&path).unwrap(), "tokenizer.json").unwrap();
        assert_eq!(made.bos(), expected.bos(), "{file}");
        assert_eq!(made.end_of_turn(), expected.end_of_turn(), "{file}");
        let cases: Json = read_json(&data(original).join("encode_cases.json"));
        let cases = cases["cases"].as_array().unwrap();
        assert!(cases.len() >= 38, "{file}");
        for case in cases {
            let text = case["text"].as_str().unwrap();
            let ids = expected.encode(text, true).unwrap();
            assert_eq!(made.encode(text, true).unwrap(), ids, "{file}: {text:?}");
            assert_eq!(made.encode_text(text, false), expected.encode_text(text, false), "{file}: {text:?}");
            assert_eq!(made.decode(&ids, false), expected.decode(&ids, false), "{file}: {text:?}");
            assert_eq!(made.decode(&ids, true), expected.decode(&ids, true), "{file}: {text:?}");
        }
        // Random mixed text: a megabyte, or ten in `make test-real`. The crate's own ids are the expected ones.
        const SEED: u64 = 8;
        println!("seed {SEED}");
        let mut rng = ChaCha8Rng::seed_from_u64(SEED);
        let words = [
            "the ",
            "Vim",
            " don't",
            "I'LL",
            "\r\n",
            "\n\n  ",
            "12345",
            " 7",
            "½²",
            "日本語",
            "한국어",
            "Grüße",
            "é",
            "e\u{301}",
            "🦄",
            "\t",
            "  ",
            "x=1;",
            "<|im_end|>",
            "<|eot_id|>",
            "\u{200d}",
            "ⅷ",
            "العربية",
            "\u{3000}",
            "_",
            "/*",
            "\u{0}",
            "'s",
            "a",
        ];
        let crate_tokenizer = tokenizers::Tokenizer::from_file(&path).unwrap();
        let most = if wants_all("UNICORN_TEST_REAL") { 10_000_000 } else { 1_000_000 };
        let mut bytes = 0;
        while bytes < most {
            let count = rng.random_range(1..600);
            let text: String = (0..count).map(|_| words[rng.random_range(0..words.len())]).collect();
            bytes += text.len();
            let ids = crate_tokenizer.encode_fast(text.as_str(), false).unwrap().get_ids().to_vec();
            assert_eq!(made.encode(&text, false).unwrap(), ids, "{file}: {text:?}");
            assert_eq!(
                made.decode(&ids, false),
                crate_tokenizer.decode(&ids, false).unwrap(),
                "{file}: {text:?}"
            );
            let as_text = made.encode_text(&text, false).unwrap();
            assert_eq!(as_text, expected.encode_text(&text, false).unwrap(), "{file}: {text:?} as text");
            assert_eq!(made.decode(&ids, false), expected.decode(&ids, false), "{file}: {text:?}");
        }
    }
}

#[test]
fn tokenizer_settings_come_from_the_metadata() {
    let pieces = ["a", "b", "\u{2581}", "\u{2581}a", "ab", "  ", "\n\n", "\n"];
    let make = |changes: &[Change]| {
        let mut file = Writer::new();
        set_vocabulary(&mut file, &pieces);
        tokenizer(&file.changed(changes).files()).unwrap()
    };
    let plain = make(&[]);
    let id = |text: &str| plain.token_id(text).unwrap();
    let [a, b, space, space_a, ab] = ["a", "b", "\u{2581}", "\u{2581}a", "ab"].map(id);
    assert_eq!(plain.encode("ab a", true).unwrap(), [2, ab, space_a]);
    assert_eq!(plain.encode("ab", false).unwrap(), [ab]);
    let both = make(&[("tokenizer.ggml.add_eos_token", some(true))]);
    assert_eq!(both.encode("b", true).unwrap(), [2, b, 1]);
    let neither = make(&[("tokenizer.ggml.add_bos_token", some(false))]);
    assert_eq!(neither.encode("b", true).unwrap(), [b]);
    let prefix = make(&[("tokenizer.ggml.add_space_prefix", some(true))]);
    assert_eq!(prefix.encode("ab", false).unwrap(), [space_a, b]);
    // Decoding removes the space that encoding adds.
    assert_eq!(
        (prefix.decode(&[space_a, b], false), plain.decode(&[space_a, b], false)),
        ("ab".into(), " ab".into())
    );

    // User-defined pieces are matched first, the longest one before the others. The converter writes their spaces as
    // spaces.
    let types = [vec![3, 3, 3, 2, 3, 3], vec![6; 256], vec![1, 1, 1, 1, 1, 4, 4, 4]].concat();
    let user_defined = make(&[("tokenizer.ggml.token_type", some(types))]);
    let (spaces, newlines) = (id("  "), id("\n\n"));
    assert_eq!(user_defined.encode("a   a\n\nb", false).unwrap(), [a, spaces, space_a, newlines, b]);
    assert!(!user_defined.is_special(spaces) && plain.is_special(2) && plain.is_special(3));
    assert_eq!(plain.encode("b  b", false).unwrap(), [b, space, space, b]);

    // In Google's QAT files, the turn tokens are normal pieces.
    let types = [vec![3, 3, 3, 2, 1, 1], vec![1; 256], vec![1; 8]].concat();
    let mistyped = make(&[("tokenizer.ggml.token_type", some(types))]);
    assert_eq!(mistyped.encode("<start_of_turn>b<end_of_turn>", false).unwrap(), [4, b, 5]);
    assert!(mistyped.is_special(4) && mistyped.is_special(5));

    // Ids with an empty or padding token have no token.
    let mut tokens: Vec<String> = (0..262).map(|id| plain.token(id).unwrap()).collect();
    tokens.extend(["a", "", "b", "[PAD265]", "[PAD266]"].map(String::from));
    let padded = make(&[
        ("tokenizer.ggml.tokens", some(tokens)),
        ("tokenizer.ggml.token_type", some([vec![1; 265], vec![5; 2]].concat())),
        ("tokenizer.ggml.scores", some(vec![0.0; 267])),
    ]);
    assert_eq!((padded.vocab_size(), padded.contains(263)), (265, false));
    assert_eq!(padded.encode("ba", false).unwrap(), [264, 262]);
}

#[test]
fn an_unsupported_vocabulary_is_refused_with_its_key() {
    let long = (0..264).map(|id| if id == 0 { "x".repeat((4 << 20) + 1) } else { format!("t{id}") });
    let long: Vec<String> = long.collect();
    let no_tokens: Vec<String> = Vec::new();
    let keys = [
        ("model", some("bert"), "\"bert\" is not supported; expected \"llama\" or \"gpt2\""),
        ("tokens", None, "is missing; expected the vocabulary"),
        ("tokens", some(no_tokens), "has 0 elements; expected 1 to 1048576"),
        ("tokens", some(5u32), "is one value; expected an array"),
        ("tokens", some(long), "has more than 4194304 bytes of control and user-defined tokens"),
        ("scores", None, "is missing; expected a score per token"),
        ("scores", some(vec![0.0; 3]), "has 3 elements; expected one per token (264)"),
        ("scores", some(vec![f32::NAN; 264]), "element 0 is NaN; expected a number"),
        ("token_type", some(vec![1; 9]), "has 9 elements; expected one per token (264)"),
        ("token_type", some(vec![7; 264]), "element 0 is 7; expected 1 (normal) to 6 (byte)"),
    ];
    for (key, value, expected) in keys {
        let (mut file, key) = (Writer::new(), format!("tokenizer.ggml.{key}"));
        set_vocabulary(&mut file, &["a", "b"]);
        let error = tokenizer(&file.changed(&[(&key, value)]).files()).err().unwrap();
        assert_eq!(error, format!("m (in memory)/m.gguf: key {key}: {expected}"));
    }
    for (second, expected) in [
        ("a", "elements 262 and 263 are both \"a\""),
        (
            "a\u{e9}",
            "element 263 (\"a\u{e9}\") could be joined from the character \"\u{e9}\", which is not a token",
        ),
        (
            &"a".repeat(256),
            "element 263 has 256 bytes; expected at most 255 in a piece that is not a control token",
        ),
    ] {
        let mut file = Writer::new();
        set_vocabulary(&mut file, &["a", second]);
        let error = tokenizer(&file.files()).err().unwrap();
        assert_eq!(error, format!("m (in memory)/m.gguf: key tokenizer.ggml.tokens: {expected}"));
    }
    // Every substring is a piece, so the list of merges would take a hundred times the bytes of the file.
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let text: String = (0..200).map(|_| rng.random_range('a'..='z')).collect();
    let parts: BTreeSet<&str> =
        (0..200).flat_map(|from| (from + 1..=200).map(move |to| from..to)).map(|r| &text[r]).collect();
    let mut file = Writer::new();
    set_vocabulary(&mut file, &parts.into_iter().collect::<Vec<_>>());
    let (error, peak) = support::peak_allocation(|| tokenizer(&file.files()).err().unwrap());
    assert!(
        error.contains("tokenizer.ggml.tokens: has too many ways to join its pieces: more than "),
        "{error}"
    );
    assert!(peak < 20 * file.bytes().len(), "{peak}");
}

// --- metadata -----------------------------------------------------------------------------------------------

fn small_of(seed: u64, types: [u32; 8]) -> Writer {
    small_model(&mut ChaCha8Rng::seed_from_u64(seed), types)
}

fn small(seed: u64) -> Writer {
    small_of(seed, SMALL_TYPES[0])
}

fn config_of(changes: &[Change]) -> Result<gemma3::Config, String> {
    let files = small(1).changed(changes).files();
    arch::load(&files).map_err(|e| e.to_string())?;
    let json = files.read("config.json").unwrap().expect("a config");
    gemma3::Config::from_json(&json, "config.json").map_err(|e| e.to_string())
}

/// Metadata of other converters, with other keys and missing fields.
#[test]
fn metadata_of_other_converters_is_accepted() {
    use LayerType::{FullAttention, SlidingAttention};
    const PATTERN: &str = "gemma3.attention.sliding_window_pattern";
    let [kind, factor] = ["gemma3.rope.scaling.type", "gemma3.rope.scaling.factor"];
    let [base, base_swa] = ["gemma3.rope.freq_base", "gemma3.rope.freq_base_swa"];
    let accepted = |changes: &[Change]| config_of(changes).unwrap();

    let config = accepted(&[]);
    assert_eq!((config.head_dim, config.query_pre_attn_scalar, config.rope_scaling_factor), (32, 32.0, 8.0));
    // The end tokens are `<eos>`, which the file names, and `<end_of_turn>`.
    assert_eq!(config.eos_token_ids, [1, 5]);

    // Ollama's files have nested rope keys and omit the other keys.
    let absent = ["gemma3.attention.layer_norm_rms_epsilon", base, base_swa, kind, factor, PATTERN];
    let nested = [
        ("gemma3.rope.global.freq_base", some(5e5f32)),
        ("gemma3.rope.local.freq_base", some(2e4f32)),
        ("tokenizer.ggml.eos_token_ids", some(vec![1, 4])),
    ];
    let ollama = accepted(&[&absent.map(|key| (key, None))[..], &nested].concat());
    assert_eq!((ollama.rope_theta, ollama.rope_local_base_freq, ollama.rms_norm_eps), (5e5, 2e4, 1e-6));
    assert_eq!((ollama.rope_scaling_factor, &ollama.eos_token_ids[..]), (1.0, &[1, 4, 5][..]));
    assert_eq!(ollama.layer_types, [SlidingAttention]);
    let config = accepted(&[(base, None), (base_swa, None)]);
    assert_eq!((config.rope_theta, config.rope_local_base_freq), (1e6, 1e4));
    // A file that also has the vision tower, and a long context, is a model whose rope factor the file omits.
    let vision = |context: u32| {
        let changes = [("gemma3.vision.block_count", some(27u32)), ("gemma3.context_length", some(context))];
        accepted(&[&[(kind, None), (factor, None)][..], &changes].concat()).rope_scaling_factor
    };
    assert_eq!((vision(131_072), vision(32_768)), (8.0, 1.0));
    // Ollama's 1B file has a soft cap, which Gemma-3 does not have.
    let soft_cap = ("gemma3.final_logit_softcapping", some(30f32));
    let one_b = accepted(&[("gemma3.block_count", some(26u32)), (PATTERN, None), soft_cap]);
    assert_eq!(one_b.layer_types.iter().filter(|kind| **kind == FullAttention).count(), 4);
    // Google's files have no scaling type, or factor 1.
    for (of_kind, of_factor, expected) in
        [(None, 8f32, 8.0), (some("linear"), 1.0, 1.0), (some("none"), 8.0, 1.0), (None, 0.0, 1.0)]
    {
        let config = accepted(&[(factor, some(of_factor)), (kind, of_kind.clone())]);
        assert_eq!(config.rope_scaling_factor, expected, "{of_kind:?} {of_factor}");
    }
    for (pattern, expected) in [
        (some(1u32), FullAttention),
        (some(2u32), SlidingAttention),
        (some(vec![false]), FullAttention),
        (some(vec![1]), SlidingAttention),
    ] {
        assert_eq!(accepted(&[(PATTERN, pattern.clone())]).layer_types, [expected], "{pattern:?}");
    }
    // Without sliding layers, the window may be missing.
    let config = accepted(&[(PATTERN, some(1u32)), ("gemma3.attention.sliding_window", None)]);
    assert_eq!(config.spec().window(), None);
    // A list with one value for each layer is accepted if all values are equal.
    let config = accepted(&[("gemma3.feed_forward_length", some(vec![256]))]);
    assert_eq!(config.intermediate_size, 256);
    // Without a key length, a head has its share of the hidden size.
    assert_eq!(accepted(&[("gemma3.attention.key_length", None)]).head_dim, 32);

    // A vision tower in the same file is ignored.
    let mut file = small(1);
    file.tensor("v.blk.0.attn_q.weight", &[32], 0, vec![0; 128]);
    file.tensor("mm.input_projection.weight", &[32], 1, vec![0; 64]);
    let (config, _) = arch::load(&file.files()).unwrap();
    let checkpoint = Checkpoint::open(&file.files()).unwrap();
    assert_eq!(Weights::collect(&checkpoint, &config).unwrap().skipped_vision, 2);
}

/// A Gemma 4 of two layers, the second without a window, in the keys of llama.cpp's converter.
fn gemma4(changes: &[Change]) -> ModelFiles {
    let mut file = Writer::new();
    set_vocabulary(&mut file, &["a", "b"]);
    file.set("general.architecture", "gemma4")
        .set("gemma4.block_count", 2u32)
        .set("gemma4.context_length", 4096u32)
        .set("gemma4.embedding_length", 64u32)
        .set("gemma4.embedding_length_per_layer_input", 0u32)
        .set("gemma4.feed_forward_length", 96u32)
        .set("gemma4.attention.head_count", 4u32)
        .set("gemma4.attention.head_count_kv", vec![2, 1])
        .set("gemma4.attention.key_length", 32u32)
        .set("gemma4.attention.value_length", 32u32)
        .set("gemma4.attention.key_length_swa", 16u32)
        .set("gemma4.attention.value_length_swa", 16u32)
        .set("gemma4.attention.layer_norm_rms_epsilon", 1e-6f32)
        .set("gemma4.attention.shared_kv_layers", 0u32)
        .set("gemma4.attention.sliding_window", 8u32)
        .set("gemma4.attention.sliding_window_pattern", vec![true, false])
        .set("gemma4.final_logit_softcapping", 30f32)
        .set("gemma4.rope.dimension_count", 32u32)
        .set("gemma4.rope.dimension_count_swa", 16u32)
        .set("gemma4.rope.freq_base", 1e6f32)
        .set("gemma4.rope.freq_base_swa", 1e4f32)
        .set("tokenizer.ggml.suppress_tokens", vec![7, 9]);
    let turning = [[1f32; 4], [1e30; 4], [1e30; 4], [1e30; 4]].concat();
    file.tensor("rope_freqs.weight", &[16], 0, turning.iter().flat_map(|v| v.to_le_bytes()).collect());
    file.tensor("token_embd.weight", &[64, OWN_TOKENS + 2], 0, vec![0; 4 * 64 * (OWN_TOKENS as usize + 2)]);
    file.changed(changes).files()
}

#[test]
fn metadata_of_a_gemma_4_describes_both_kinds_of_layers() {
    let (spec, _) = arch::load(&gemma4(&[])).unwrap();
    let [sliding, full] = spec.layers[..] else { panic!("two layers") };
    assert_eq!((sliding.window, sliding.heads.num_key_value_heads, sliding.heads.head_dim), (Some(8), 2, 16));
    assert_eq!((full.window, full.heads.num_key_value_heads, full.heads.head_dim), (None, 1, 32));
    assert_eq!(
        [sliding, full].map(|layer| layer.has_values_of_keys),
        [false, true],
        "the file has no attn_v"
    );
    assert_eq!((&spec.suppress_tokens[..], spec.final_logit_softcap), (&[7, 9][..], Some(30.0)));
    let turning = spec.ropes[full.rope].frequencies(32).into_iter().filter(|frequency| *frequency > 1e-20);
    assert_eq!(turning.count(), 4);

    for (key, value, expected) in [
        ("gemma4.feed_forward_length", some(vec![64, 96]), "is 96 for layer 1; expected 64"),
        // Only layers that share keys and values may be twice as wide.
        ("gemma4.feed_forward_length", some(vec![64, 128]), "is 128 for layer 1; expected 64"),
        (
            "gemma4.attention.sliding_window_pattern",
            None,
            "is missing; expected a list with true for each sliding layer",
        ),
        ("gemma4.attention.head_count_kv", None, "is missing; expected a number"),
        ("gemma4.attention.head_count_kv", some(vec![2]), "has 1 elements; expected one per layer (2)"),
        ("gemma4.attention.head_count_kv", some(vec![2, -1]), "contains -1; expected whole numbers"),
        ("gemma4.attention.value_length_swa", some(32u32), "is 32; expected the length of the keys (16)"),
        ("tokenizer.ggml.suppress_tokens", some(vec![-3]), "holds -3; expected token ids"),
    ] {
        let error = arch::load(&gemma4(&[(key, value)])).expect_err(key).to_string();
        assert_eq!(error, format!("m (in memory)/m.gguf: key {key}: {expected}"));
    }
    let (spec, _) =
        arch::load(&gemma4(&[("gemma4.embedding_length_per_layer_input", some(256u32))])).unwrap();
    assert_eq!(spec.per_layer.map(|per_layer| per_layer.width), Some(256));
    let shared = ("gemma4.attention.shared_kv_layers", some(1u32));
    let error = arch::load(&gemma4(&[shared])).expect_err("no layer to share with").to_string();
    assert!(error.contains("expected a layer of the type full_attention before these"), "{error}");
    let pattern = ("gemma4.attention.sliding_window_pattern", some(vec![false, false]));
    let error = arch::load(&gemma4(&[pattern])).expect_err("two numbers").to_string();
    assert!(error.contains("head_count_kv: has 2 and 1 for layers of one type"), "{error}");
}

#[test]
fn metadata_of_an_unsupported_model_is_refused_with_its_key() {
    const PATTERN: &str = "gemma3.attention.sliding_window_pattern";
    let clip = "is \"clip\": this is a vision tower (mmproj); expected \"gemma3\" or \"gemma3n\" or \"gemma4\" or \"llama\" or \"qwen2\" or \"qwen3\" or \"qwen3moe\", the file of the language model";
    for (key, value, expected) in [
        (
            "general.architecture",
            some("gemma2"),
            "\"gemma2\" is not supported; expected \"gemma3\" or \"gemma3n\" or \"gemma4\" or \"llama\" or \"qwen2\" or \"qwen3\" or \"qwen3moe\"",
        ),
        ("general.architecture", some("clip"), clip),
        ("general.architecture", some(3u32), "is 3; expected a text"),
        (
            "general.architecture",
            None,
            "is missing; expected \"gemma3\" or \"gemma3n\" or \"gemma4\" or \"llama\" or \"qwen2\" or \"qwen3\" or \"qwen3moe\"",
        ),
        ("gemma3.block_count", None, "is missing; expected a number"),
        ("gemma3.block_count", some(1u64 << 40), "is 1099511627776; expected 1 to 1024"),
        ("gemma3.block_count", some(-1), "is -1; expected a whole number"),
        ("gemma3.embedding_length", some(256f32), "is 256; expected a whole number"),
        ("gemma3.attention.head_count", some(0u32), "is 0; expected at least 1"),
        (
            "gemma3.attention.head_count_kv",
            some(vec![1, 2]),
            "is a list; expected one number, or 1 equal ones",
        ),
        ("gemma3.attention.value_length", some(64u32), "is 64; expected the length of the keys (32)"),
        ("gemma3.rope.dimension_count", some(16u32), "is 16; expected the length of the keys (32)"),
        ("gemma3.attention.causal", some(false), "is false; expected a model that generates text"),
        ("gemma3.pooling_type", some(3u32), "is 3; expected a model that generates text"),
        ("gemma3.attention.sliding_window", None, "is missing; expected a number"),
        (PATTERN, some(0u32), "is 0; expected 1 to 1024, or a list"),
        (PATTERN, some(vec![true; 2]), "has 2 elements; expected one per layer (1)"),
        (PATTERN, some(vec![2]), "contains 2; expected true or false, true for a sliding layer"),
        ("gemma3.rope.scaling.type", some("yarn"), "is \"yarn\"; expected \"linear\" or \"none\""),
        ("gemma3.rope.scaling.factor", None, "is missing; expected a number"),
        ("gemma3.rope.freq_base", some(f32::NAN), "is NaN; expected a number"),
        ("gemma3.rope.freq_base", Some(Val::Raw(7, vec![2])), "is a flag with byte 2; expected 0 or 1"),
        ("tokenizer.ggml.eos_token_ids", some(vec![-3]), "holds -3; expected token ids"),
    ] {
        let error = config_of(&[(key, value)]).expect_err(key);
        assert_eq!(error, format!("m (in memory)/m.gguf: key {key}: {expected}"));
    }
    // A value that the reader of config.json refuses is refused in a GGUF file too.
    for (key, value, expected) in [
        (
            "gemma3.final_logit_softcapping",
            some(30f32),
            "final_logit_softcapping is 30.0; expected null: Gemma-3 has no soft capping",
        ),
        (
            "gemma3.attention.head_count_kv",
            some(3u32),
            "num_attention_heads is 8; expected a multiple of num_key_value_heads (3)",
        ),
        (
            "tokenizer.ggml.eos_token_id",
            some(4000u32),
            "eos_token_id is 4000; expected an id below vocab_size (270)",
        ),
    ] {
        let error = config_of(&[(key, value)]).expect_err(key);
        assert_eq!(error, format!("m (in memory)/config.json: {expected}"));
    }
    let mut file = small(1);
    file.tensors.remove(0);
    assert_eq!(
        arch::load(&file.files()).unwrap_err().to_string(),
        "m (in memory)/m.gguf: tensor token_embd.weight: is missing; expected the embedding of the tokens"
    );
}

// --- headers ------------------------------------------------------------------------------------------------

fn open(bytes: Vec<u8>) -> Result<Checkpoint, String> {
    Checkpoint::open(&in_memory(bytes)).map_err(|e| e.to_string())
}

/// Bytes of the header before the first key.
const PREAMBLE: usize = 24;

#[test]
fn an_invalid_header_is_refused_with_its_key_or_tensor() {
    let mut tiny = Writer::new();
    tiny.set("k", Val::U32(7)).tensor("t", &[4, 2], 0, le_bytes(&[1.0; 8]));
    assert_eq!(open(tiny.bytes()).unwrap().get("t").unwrap().shape, [2, 4]);
    let mut second = tiny.clone();
    second.version = 2;
    assert_eq!(open(second.bytes()).unwrap().iter().len(), 1);

    let corrupt = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = tiny.bytes();
        change(&mut bytes);
        open(bytes).err().unwrap()
    };
    let put = |at: usize, value: &[u8]| {
        let value = value.to_vec();
        corrupt(&|bytes| bytes[at..at + value.len()].copy_from_slice(&value))
    };
    let write = |change: &dyn Fn(&mut Writer)| {
        let mut file = tiny.clone();
        change(&mut file);
        open(file.bytes()).err().unwrap()
    };
    let set = |key: &str, value: Val| {
        write(&|f| {
            f.set(key, value.clone());
        })
    };
    let array = |parts: &[&[u8]]| set("k", Val::Raw(9, parts.concat()));
    let huge = u64::MAX.to_le_bytes();
    // The name of the first key begins after its length. The first tensor begins after the type and value of the key.
    let (key, tensor) = (PREAMBLE, PREAMBLE + 8 + 1 + 4 + 4);
    let after_name = tensor + 8 + 1;
    let cases: Vec<(String, &str)> = vec![
        (
            corrupt(&|b| b.truncate(3)),
            ": the magic takes 4 bytes, but 3 are left: the file is truncated or corrupt",
        ),
        (
            put(0, b"FUGG"),
            ": is not a GGUF file: it is big endian; convert it to little endian (gguf_convert_endian.py)",
        ),
        (put(0, b"tjgg"), ": is not a GGUF file: it has an older ggml format; convert the model again"),
        (put(0, b"PK\x03\x04"), ": is not a GGUF file: expected the bytes GGUF at its start"),
        (
            put(4, &1u32.to_le_bytes()),
            ": is GGUF version 1; expected 2 or 3 (llama.cpp's converters write 3)",
        ),
        (
            put(4, &3u32.to_be_bytes()),
            ": is big endian; expected little endian (gguf_convert_endian.py converts it)",
        ),
        (put(8, &huge), ": claims 18446744073709551615 tensors; expected at most 65536"),
        (put(16, &huge), ": claims 18446744073709551615 keys; expected at most 65536"),
        (
            put(key, &60_000u64.to_le_bytes()),
            ": key 0 of 1: its name takes 60000 bytes, but 96 are left: the file is truncated or corrupt",
        ),
        (put(key, &huge), ": key 0 of 1: its name has 18446744073709551615 bytes; expected 1 to 65535"),
        (put(key, &0u64.to_le_bytes()), ": key 0 of 1: its name has 0 bytes; expected 1 to 65535"),
        (put(key + 8, &[0xff]), ": key 0 of 1: its name is not valid UTF-8"),
        (put(key + 9, &13u32.to_le_bytes()), ": key k: has the unknown value type 13"),
        (
            put(key + 9, &8u32.to_le_bytes()),
            ": key k: its value takes 4294967303 bytes, but 83 are left: the file is truncated or corrupt",
        ),
        (array(&[&4u32.to_le_bytes(), &huge]), ": key k: claims 18446744073709551615 elements,"),
        (write(&|f| f.keys.push(f.keys[0].clone())), ": key k: occurs twice"),
        (array(&[&9u32.to_le_bytes(), &huge]), ": key k: is an array of arrays; expected plain elements"),
        (
            array(&[&8u32.to_le_bytes(), &2u64.to_le_bytes(), &0u64.to_le_bytes(), &huge]),
            ": key k: element 1: the text takes 18446744073709551615 bytes",
        ),
        (
            set("general.alignment", Val::U32(0)),
            ": key general.alignment: is 0; expected a power of two, at most 1048576",
        ),
        (
            set("general.alignment", Val::U32(48)),
            ": key general.alignment: is 48; expected a power of two, at most 1048576",
        ),
        (
            set("general.alignment", Val::Text("8".into())),
            ": key general.alignment: is \"8\"; expected a whole number",
        ),
        (put(tensor, &huge), ": tensor 0 of 1: its name has 18446744073709551615 bytes; expected 1 to 256"),
        (put(tensor + 8, &[0x80]), ": tensor 0 of 1: its name is not valid UTF-8"),
        (put(after_name, &5u32.to_le_bytes()), ": tensor t: has 5 dimensions; expected 1 to 4"),
        (put(after_name, &0u32.to_le_bytes()), ": tensor t: has 0 dimensions; expected 1 to 4"),
        (
            write(&|f| f.tensors[0].dims = vec![4, 0]),
            ": tensor t: has the dimensions [4, 0]; expected at least 1 each",
        ),
        (
            write(&|f| f.tensors[0].dims = vec![1 << 33, 1 << 33]),
            ": tensor t: has the dimensions [8589934592, 8589934592], larger than any file",
        ),
        (
            write(&|f| f.tensors[0].dims = vec![1 << 62]),
            ": tensor t: has the dimensions [4611686018427387904], larger than any file",
        ),
        (
            write(&|f| f.tensors[0].dims = vec![4, 3]),
            ": tensor t: its 48 bytes at offset 0 exceed the 32 bytes of tensor data: the file is truncated or corrupt",
        ),
        (
            write(&|f| f.tensors[0].kind = 2),
            ": tensor t: has rows of 4 values; Q4_0 stores them in blocks of 32",
        ),
        (
            write(&|f| f.tensors[0].kind = 22),
            ": tensor t: is IQ2_S, which is not supported; expected F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS (take another file of the model, such as Q4_K_M or Q4_0)",
        ),
        (write(&|f| f.tensors[0].kind = 4), ": tensor t: is of the unknown type 4, which is not supported;"),
        (
            write(&|f| f.tensors[0].offset = Some(u64::MAX - 31)),
            ": tensor t: its 32 bytes at offset 18446744073709551584 exceed the 32 bytes",
        ),
        (
            write(&|f| f.tensors[0].offset = Some(4)),
            ": tensor t: has the offset 4; expected a multiple of 32",
        ),
        (
            corrupt(&|b| {
                b.pop();
            }),
            ": tensor t: its 32 bytes at offset 0 exceed the 31 bytes of tensor data",
        ),
        (
            corrupt(&|b| b.truncate(100)),
            ": tensor t: its 32 bytes at offset 0 exceed the 4 bytes of tensor data",
        ),
        (write(&|f| f.tensors.push(f.tensors[0].clone())), ": tensor t: occurs twice"),
        (
            write(&|f| {
                f.tensor("u", &[8], 0, vec![0; 32]).tensors[1].offset = Some(0);
            }),
            ": tensor u: overlaps tensor t",
        ),
        (
            write(&|f| f.tensors[0].name = "model.norm.weight".into()),
            ": tensor model.norm.weight: has a Hugging Face name; expected a name of llama.cpp (blk.0.attn_q.weight)",
        ),
    ];
    for (error, expected) in cases {
        let rest = error.strip_prefix("m (in memory)/m.gguf").unwrap_or_else(|| panic!("{error}"));
        assert!(rest.starts_with(expected), "{rest:?}, expected {expected:?}");
        assert!(!error.contains('\n') && error.len() < 400, "{error}");
    }

    // Other alignments are respected.
    for alignment in [1u64, 8, 64, 4096] {
        let mut file = tiny.clone();
        file.alignment = alignment;
        file.set("general.alignment", Val::U32(alignment as u32)).tensor("u", &[2], 0, le_bytes(&[2.0, 3.0]));
        let checkpoint = open(file.bytes()).unwrap();
        assert_eq!(checkpoint.get("u").unwrap().to_f32().unwrap(), [2.0, 3.0], "{alignment}");
    }
}

#[test]
fn nan_values_are_refused_with_their_tensor_and_position() {
    let refused: usize = SMALL_TYPES.into_iter().map(|types| refused_nan_values(&small_of(2, types))).sum();
    assert_eq!(refused, BLOCKS.len());
}

/// Tries NaN in each quantized matrix, and returns the number of these matrices.
fn refused_nan_values(whole: &Writer) -> usize {
    let folder = TempDir::new().unwrap();
    let checkpoint = open(whole.bytes()).unwrap();
    let names: Vec<&str> = checkpoint.iter().map(|tensor| tensor.name).collect();
    let load = |file: &Writer| load_files(&file.files(), &LoadOptions::default()).map(drop);
    load(whole).unwrap();
    let mut refused = 0;
    for (index, name) in names.into_iter().enumerate() {
        let mut file = whole.clone();
        let tensor = &mut file.tensors[index];
        let Some(&(kind, values, block)) = BLOCKS.iter().find(|(k, ..)| *k == tensor.kind) else { continue };
        // The scale of the second block has all bits set, which is NaN in f16.
        let at = scales_at(kind)[0];
        tensor.bytes[block + at..block + at + 2].fill(0xff);
        let (row, col) = (values / 256, values % 256);
        let place = format!("row {row}: a scale of its columns from {col} on is NaN");

        // A load and the scheme `keep` copy the integers.
        let error = load(&file).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("m.gguf") && error.contains(&place), "{error}");
        let [path, native] = ["gguf", "native"].map(|end| folder.path().join(format!("{index}.{end}")));
        fs::write(&path, file.bytes()).unwrap();
        let [path, native] = [&path, &native].map(|path| path.to_str().unwrap());
        let quantize = ["quantize", path, native, "--scheme", "keep"];
        assert_error(unicorn(&quantize), 1, &[path, name, &place]);
        // The scheme `int4-g128` dequantizes the integers.
        let quantize = ["quantize", path, &format!("{native}-rounded"), "--scheme", "int4-g128"];
        assert_error(unicorn(&quantize), 1, &[path, name, &format!("row {row}, column {col} is NaN")]);
        refused += 1;
    }
    refused
}

#[test]
fn a_model_is_found_by_file_by_folder_and_by_its_first_part() {
    let folder = TempDir::new().unwrap();
    let at = |name: &str| folder.path().join(name);
    let problem = |path: &Path| {
        let error = open_files(path).err().unwrap().to_string();
        error
            .replace(&format!("{}/", folder.path().display()), "")
            .replace(&folder.path().display().to_string(), "DIR")
    };
    let whole = small(3);
    // Ollama's blobs have no file name extension.
    fs::write(at("sha256-0123"), whole.bytes()).unwrap();
    assert_eq!(
        Checkpoint::open(&open_files(&at("sha256-0123")).unwrap()).unwrap().iter().len(),
        whole.tensors.len()
    );
    fs::write(at("notes.txt"), "no model").unwrap();
    assert_eq!(
        problem(&at("notes.txt")),
        "notes.txt: is not a GGUF file; for other formats, give the folder of the model"
    );

    // The folder has a model and its vision tower.
    fs::write(at("mmproj-x.gguf"), b"GGUF").unwrap();
    fs::write(at("x-q4_0.gguf"), whole.bytes()).unwrap();
    let files = open_files(folder.path()).unwrap();
    assert_eq!((files.name(), files.location()), ("x-q4_0", at("x-q4_0.gguf").display().to_string()));
    fs::write(at("y.gguf"), whole.bytes()).unwrap();
    assert_eq!(problem(folder.path()), "DIR: holds 2 GGUF files; give one of them (x-q4_0.gguf)");
    fs::remove_file(at("x-q4_0.gguf")).unwrap();
    fs::remove_file(at("y.gguf")).unwrap();

    // The model has three parts. The first part has the metadata, and may have no tensors.
    let mut parts = [whole.clone(), Writer::new(), Writer::new()];
    parts[1].tensors = parts[0].tensors.split_off(0);
    parts[2].tensors = parts[1].tensors.split_off(5);
    for (index, part) in parts.iter_mut().enumerate() {
        part.set("split.no", Val::Raw(2, (index as u16).to_le_bytes().into()));
        part.set("split.count", Val::Raw(2, 3u16.to_le_bytes().into()));
        fs::write(at(&format!("z-{:05}-of-00003.gguf", index + 1)), part.bytes()).unwrap();
    }
    for path in [&at("z-00001-of-00003.gguf"), folder.path()] {
        let files = open_files(path).unwrap();
        assert_eq!(files.name(), "z");
        let (config, _) = arch::load(&files).unwrap();
        let checkpoint = Checkpoint::open(&files).unwrap();
        let weights = Weights::collect(&checkpoint, &config).unwrap();
        assert_eq!(
            (weights.tensors.iter().count(), checkpoint.fingerprint().len()),
            (whole.tensors.len(), 3)
        );
        let expected = open(whole.bytes()).unwrap();
        for tensor in checkpoint.iter() {
            assert_eq!(tensor.to_f32().unwrap(), expected.get(tensor.name).unwrap().to_f32().unwrap());
        }
    }
    assert_eq!(
        problem(&at("z-00002-of-00003.gguf")),
        "z-00002-of-00003.gguf: is part 2 of 3; give the first, z-00001-of-00003.gguf"
    );
    fs::rename(at("z-00003-of-00003.gguf"), at("w.gguf")).unwrap();
    assert_eq!(
        problem(&at("z-00001-of-00003.gguf")),
        "z-00001-of-00003.gguf: is one of 3 parts, of which z-00003-of-00003.gguf is missing"
    );
    let alone = Checkpoint::open(&open_files(&at("w.gguf")).unwrap()).err().unwrap().to_string();
    assert!(
        alone.ends_with("w.gguf: key split.no: is 2; expected 0: the file was renamed, or parts are missing"),
        "{alone}"
    );
}

// --- corrupted files ----------------------------------------------------------------------------------------

/// Makes a random change to a value, a key, a tensor or its bytes. The file can still be written.
fn corrupt(file: &mut Writer, rng: &mut ChaCha8Rng) {
    const NUMBERS: [u64; 14] =
        [0, 1, 2, 3, 7, 8, 31, 33, 255, 65_536, u32::MAX as u64, 1 << 33, i64::MAX as u64, u64::MAX];
    const TEXTS: [&str; 12] = [
        "", "gemma3", "gemma2", "llama", "gpt2", "linear", "yarn", "a\n\0b", "{{", "\u{2581}", "<bos>",
        "<0x0A>",
    ];
    let number = *NUMBERS.choose(rng).unwrap();
    let text = (*TEXTS.choose(rng).unwrap()).to_owned();
    let key = rng.random_range(0..file.keys.len());
    let tensor = rng.random_range(0..file.tensors.len());
    match rng.random_range(0..16) {
        // Another value of the same type.
        0..5 => match &mut file.keys[key].1 {
            Val::U32(n) => *n = number as u32,
            Val::U64(n) => *n = number,
            Val::I32(n) => *n = number as i32,
            Val::F32(n) => *n = f32::from_bits(number as u32 | rng.random::<u32>()),
            Val::Bool(flag) => *flag = !*flag,
            Val::Text(t) => *t = text,
            Val::Texts(texts) => match rng.random_range(0..4) {
                0 => texts.truncate(number as usize % (texts.len() + 1)),
                1 => texts.push(text),
                _ if texts.is_empty() => {}
                _ => {
                    let at = rng.random_range(0..texts.len());
                    let other = texts[rng.random_range(0..texts.len())].clone();
                    texts[at] = if rng.random() { other + &text } else { text };
                }
            },
            Val::Floats(items) if !items.is_empty() => {
                let at = rng.random_range(0..items.len());
                items[at] = f32::from_bits(rng.random());
            }
            Val::Ints(items) if !items.is_empty() => {
                let at = rng.random_range(0..items.len());
                items[at] = number as i32 % 9;
            }
            Val::Flags(items) => items.resize(number as usize % 100, rng.random()),
            Val::Floats(_) | Val::Ints(_) | Val::Raw(..) => {}
        },
        // A value of another type.
        5 => {
            file.keys[key].1 = match rng.random_range(0..9) {
                0 => Val::U32(number as u32),
                1 => Val::U64(number),
                2 => Val::I32(number as i32),
                3 => Val::F32(number as f32),
                4 => Val::Bool(rng.random()),
                5 => Val::Text(text),
                6 => Val::Texts(vec![text; number as usize % 5]),
                7 => Val::Ints(vec![number as i32; number as usize % 300]),
                _ => Val::Raw(rng.random_range(0..14), vec![rng.random(); rng.random_range(0..20)]),
            }
        }
        6 => drop(file.keys.remove(key)),
        7 => file.keys[key].0 = [text, file.keys[key].0.clone()].concat(),
        // Other bytes in a tensor, possibly with scales that are NaN or infinite.
        8..10 => {
            let bytes = &mut file.tensors[tensor].bytes;
            if !bytes.is_empty() {
                let at = rng.random_range(0..bytes.len());
                let end = (at + rng.random_range(1..300)).min(bytes.len());
                let fill = *[0, 0x7c, 0xff, rng.random()].choose(rng).unwrap();
                bytes[at..end].fill(fill);
            }
        }
        // Another shape or type, with as many bytes as it needs.
        10..12 => {
            let kinds: Vec<u32> = BLOCKS.iter().map(|b| b.0).chain(PLAIN.iter().map(|p| p.0)).collect();
            let tensor = &mut file.tensors[tensor];
            tensor.kind = *kinds.choose(rng).unwrap();
            let rows = rng.random_range(1..5u64);
            tensor.dims = match rng.random_range(0..4) {
                0 => vec![256],
                1 => vec![512, rows],
                2 => vec![256, rows, 1, 1],
                _ => vec![256, rows, 2],
            };
            tensor
                .bytes
                .resize(tensor_bytes(tensor.kind, tensor.dims.iter().product::<u64>() as usize), 0x3c);
        }
        // A shape or type that needs another number of bytes.
        12 => {
            let tensor = &mut file.tensors[tensor];
            match rng.random_range(0..5) {
                0 => tensor.dims = vec![number; rng.random_range(0..6)],
                1 => tensor.kind = number as u32 % 50,
                2 => tensor.offset = Some(number & !31),
                3 => tensor.bytes.truncate(number as usize % (tensor.bytes.len() + 1)),
                _ => tensor.dims[0] = number,
            }
        }
        13 => {
            let other = file.tensors[rng.random_range(0..file.tensors.len())].name.clone();
            file.tensors[tensor].name = if rng.random() { other } else { text };
        }
        14 => drop(file.tensors.remove(tensor)),
        _ => {
            file.alignment = 1 << rng.random_range(0..8);
            let said = if rng.random_bool(0.7) { file.alignment } else { number };
            file.set("general.alignment", Val::U32(said as u32));
        }
    }
}

/// Makes a random change to the bytes, mostly in the header.
fn corrupt_bytes(bytes: &mut Vec<u8>, rng: &mut ChaCha8Rng) {
    let head = bytes.len().min(12_000);
    let at = rng.random_range(0..head);
    match rng.random_range(0..6) {
        0 => bytes[at] ^= 1 << rng.random_range(0..8),
        1 => bytes[at] = rng.random(),
        2 => bytes.truncate(at),
        3 => drop(bytes.drain(at..(at + rng.random_range(1..40)).min(head))),
        4 => {
            let end = (at + 8).min(bytes.len());
            let value = (bytes.len() as u64).wrapping_mul(rng.random_range(0..3)).to_le_bytes();
            bytes[at..end].copy_from_slice(&value[..end - at]);
        }
        _ => {
            let copy = bytes[at..(at + 40).min(head)].to_vec();
            drop(bytes.splice(at..at, copy));
        }
    }
}

/// Corrupts the structure and the bytes of a small model and loads it completely. It must be refused with a one-line
/// error, or its rows must be dequantizable. Memory use is bounded by the size of the file.
#[test]
fn corrupted_files_are_refused_or_loaded_within_bounded_memory() {
    let rounds = support::rounds(12_000) as u64;
    // Most of the memory is taken by tables of the tokenizer crate.
    let seed: u64 = 0x6006_5EED;
    println!("seed {seed:#x}");
    let models = SMALL_TYPES.map(|types| {
        let mut whole = small_of(seed, types);
        // Most bytes of the weights have no effect on parsing, so these matrices are made small.
        for tensor in &mut whole.tensors {
            if tensor.dims.len() == 2 && tensor.name.starts_with("blk") {
                tensor.dims[1] = 2;
                tensor.bytes.truncate(tensor_bytes(tensor.kind, 512));
            }
        }
        let accepted = fuzz_bodies::gguf(whole.bytes());
        assert_eq!(accepted, Accepted { tensors: whole.tensors.len(), model: false, tokenizer: true });
        let complete = small_of(seed, types).bytes();
        assert_eq!(fuzz_bodies::gguf(complete), Accepted { model: true, ..accepted });
        whole
    });

    let (mut past_header, mut with_tokenizer, mut most) = (0, 0, 0);
    for round in 0..rounds {
        let mut rng = ChaCha8Rng::seed_from_u64(seed.wrapping_add(round));
        let whole = &models[round as usize % models.len()];
        let mut file = whole.clone();
        for _ in 0..rng.random_range(1..=3) {
            corrupt(&mut file, &mut rng);
            if file.tensors.is_empty() || file.keys.is_empty() {
                file = whole.clone();
            }
        }
        let mut bytes = file.bytes();
        if rng.random_bool(0.2) {
            corrupt_bytes(&mut bytes, &mut rng);
        }
        let len = bytes.len();
        let run = || std::panic::catch_unwind(|| fuzz_bodies::gguf(bytes));
        let (accepted, peak) = support::bounded_allocation(len, 2 << 20, format_args!("round {round}"), run);
        let Ok(accepted) = accepted else {
            panic!("round {round}: corrupted with seed {:#x}", seed.wrapping_add(round));
        };
        most = most.max(peak);
        past_header += u64::from(accepted.tensors > 0);
        with_tokenizer += u64::from(accepted.tokenizer);
    }
    println!(
        "{past_header} of {rounds} got past the header, {with_tokenizer} tokenizers, at most {most} bytes held"
    );
    assert!(past_header > rounds / 2 && past_header < rounds * 19 / 20, "{past_header}");
    assert!(with_tokenizer > rounds / 2, "{with_tokenizer}");
}

/// Runs the bodies of the other fuzz targets on randomly corrupted bytes, as `cargo fuzz` does.
#[test]
fn the_other_fuzz_targets_pass_on_random_corruptions() {
    const ROUNDS: u64 = 1000;
    let seed: u64 = 0xF022_5EED;
    println!("seed {seed:#x}");
    let (checkpoint, folder) = (small(seed).files(), TempDir::new().unwrap());
    let source = Checkpoint::open(&checkpoint).unwrap();
    let norm = source.get("model.norm.weight").unwrap();
    let view =
        safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![256], plain(&norm).unwrap().1);
    let plain = safetensors::serialize([("model.norm.weight", view.unwrap())], None).unwrap();

    let file = folder.path().join("m.gguf");
    fs::write(&file, small(seed).bytes()).unwrap();
    let native = folder.path().join("native");
    quantize(&file, &native);
    let mut manifest: Json = read_json(&native.join("unicorn.json"));
    manifest["config"] = serde_json::json!({});
    manifest["files"].as_object_mut().unwrap().retain(|name, _| name == "shared.safetensors");
    manifest["tensors"].as_object_mut().unwrap().retain(|_, t| t["file"] == "shared.safetensors");
    let manifest = manifest.to_string().into_bytes();
    let shared = fs::read(native.join("shared.safetensors")).unwrap();
    let native = fuzz_bodies::joined(&manifest, &shared);

    type Body = fn(Vec<u8>) -> usize;
    let bodies: [(&str, Body, &[u8]); 5] = [
        ("safetensors", |bytes| fuzz_bodies::safetensors(bytes).tensors, &plain),
        ("native", |bytes| fuzz_bodies::native(bytes).tensors, &native),
        ("legacy", |bytes| fuzz_bodies::legacy(bytes).tensors, &legacy_files::fuzz_input()),
        ("packed", |bytes| fuzz_bodies::packed(bytes).tensors, &packed_files::fuzz_input()),
        (
            "gguf_tokenizer",
            |bytes| fuzz_bodies::gguf_tokenizer(bytes).map_or(0, |t| t.vocab_size()),
            &small(seed).bytes(),
        ),
    ];
    for (name, body, whole) in bodies {
        assert!(body(whole.to_vec()) > 0, "{name}");
        let (mut accepted, mut most) = (0, 0);
        for round in 0..ROUNDS {
            let mut rng = ChaCha8Rng::seed_from_u64(seed.wrapping_add(round));
            let mut bytes = whole.to_vec();
            corrupt_bytes(&mut bytes, &mut rng);
            let len = bytes.len();
            let run = std::panic::AssertUnwindSafe(|| body(bytes));
            let (found, peak) = support::bounded_allocation(
                len,
                support::PARSER_BYTES,
                format_args!("{name}, round {round}"),
                || std::panic::catch_unwind(run),
            );
            let found = found.unwrap_or_else(|_| panic!("{name}, round {round}"));
            most = most.max(peak);
            accepted += u64::from(found > 0);
        }
        println!("{name}: {accepted} of {ROUNDS} accepted, at most {most} bytes held for {}", whole.len());
        assert!(accepted < ROUNDS, "{name}");
    }
}

// --- the command line ---------------------------------------------------------------------------------------

/// Runs `unicorn quantize` with the scheme `keep`.
fn quantize(source: &Path, destination: &Path) {
    let [source, destination] = [source, destination].map(|path| path.to_str().unwrap());
    printed(unicorn(&["quantize", source, destination, "--scheme", "keep"]));
}

#[test]
fn a_gguf_file_converts_to_a_native_checkpoint_with_the_same_bits() {
    let folder = TempDir::new().unwrap();
    let tokens = Goldens::read(&data("gguf/gguf-a/base.safetensors")).tokens("tokens.short");
    let logits = |files| all_logits(&mut load_files(files, &LoadOptions::default()).unwrap(), &tokens);
    let native = folder.path().join("native");
    quantize(&data("gguf/gguf-a/gguf-a-zoo.gguf"), &native);
    let native = open_files(&native).unwrap();
    assert!(Checkpoint::open(&native).unwrap().norms_hold_one());
    assert!(logits(&native) == logits(&reference("gguf-a", "gguf-a-zoo")));
    // The tokenizer is now a separate file.
    check_tokenizer_cases(&tokenizer(&native).unwrap());
}

#[test]
fn a_gguf_file_generates_and_is_inspected_on_the_command_line() {
    let file = data("gguf/gguf-s/gguf-s-Q4_0-embF16.gguf");
    let file = file.to_str().unwrap();
    let options = ["--prompt", "open the file", "--max-tokens", "4", "--allow-software-vulkan"];
    for mode in ["none", "emb8"] {
        let generate = [&["generate", "--model", file, "--quantize", mode], &options[..]].concat();
        printed(unicorn_on_software(&generate));
    }
    assert_eq!(printed_json(unicorn(&["inspect", file, "--json"]))["format"], "gguf");
}
