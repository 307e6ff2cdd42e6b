//! The functions that the fuzz targets and the mutation tests run on input bytes.
//!
//! Each function checks what must be true for any input: no panic, and an error of one line if the input is refused. If
//! a file is accepted, rows of all its tensors are read. If a grammar is accepted, a few ids are generated with it.

use std::sync::LazyLock;

use unicorn::checkpoint::{Checkpoint, ModelFiles};
use unicorn::image::{self, Filter, ImageError, Limits, Rgb};
use unicorn::kv_disk::{self, Address};
use unicorn::model::arch;
use unicorn::model::weights::Weights;
use unicorn::npu::container::Container;
use unicorn::npu::contract::{Bucket, Layout, Shape};
use unicorn::npu::transaction;
use unicorn::tensor::QuantizedRow;
use unicorn::text::{ChatFiles, ChatTemplate, GrammarSource, Grammars, Tokenizer};

/// How far a file was accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accepted {
    /// Number of tensors; 0 if a header was refused.
    pub tensors: usize,
    /// Whether the config and all of its weights were accepted too.
    pub model: bool,
    pub tokenizer: bool,
}

/// A GGUF file.
pub fn gguf(bytes: Vec<u8>) -> Accepted {
    checkpoint(&ModelFiles::in_memory("m", [("m.gguf".into(), bytes)], arch::gguf_archs()))
}

/// A `model.safetensors`.
pub fn safetensors(bytes: Vec<u8>) -> Accepted {
    checkpoint(&ModelFiles::in_memory("m", [("model.safetensors".into(), bytes)], arch::gguf_archs()))
}

/// A native manifest for the config `{}`, and the file of its shared tensors, as in [`joined`].
pub fn native(bytes: Vec<u8>) -> Accepted {
    let [manifest, shared] = split(&bytes);
    named([("unicorn.json", manifest), ("shared.safetensors", shared), ("config.json", b"{}")])
}

/// Two files of the original project, the shared tensors and a layer, as in [`joined`].
pub fn legacy(bytes: Vec<u8>) -> Accepted {
    let [shared, layer] = split(&bytes);
    named([("m_shared.safetensors", shared), ("m_layer_1.safetensors", layer)])
}

/// The config and the weights of a GPTQ, AWQ or compressed-tensors checkpoint, as in [`joined`].
pub fn packed(bytes: Vec<u8>) -> Accepted {
    let [config, weights] = split(&bytes);
    named([("config.json", config), ("model.safetensors", weights)])
}

fn named<const N: usize>(files: [(&str, &[u8]); N]) -> Accepted {
    checkpoint(&ModelFiles::in_memory(
        "m",
        files.map(|(name, bytes)| (name.into(), bytes.to_vec())),
        arch::gguf_archs(),
    ))
}

/// Two files as one input: the length of the first file as little-endian u32, then both files.
pub fn joined(first: &[u8], second: &[u8]) -> Vec<u8> {
    [&(first.len() as u32).to_le_bytes(), first, second].concat()
}

fn split(bytes: &[u8]) -> [&[u8]; 2] {
    let (length, rest) = bytes.split_first_chunk::<4>().unwrap_or((&[0; 4], &[]));
    rest.split_at(rest.len().min(u32::from_le_bytes(*length) as usize)).into()
}

/// The tokenizer and template of a GGUF file. Encodes and decodes some texts.
pub fn gguf_tokenizer(bytes: Vec<u8>) -> Option<Tokenizer> {
    tokenizer(&ModelFiles::in_memory("m", [("m.gguf".into(), bytes)], arch::gguf_archs()))
}

/// A grammar in llama.cpp's GBNF. Generates an answer of allowed ids, which the length of the grammar selects. Returns
/// whether the grammar was accepted.
pub fn gbnf(bytes: Vec<u8>) -> bool {
    static GRAMMARS: LazyLock<Grammars> = LazyLock::new(|| {
        let json = include_bytes!("../tests/data/tokenizer-mini/tokenizer.json");
        Grammars::new(Tokenizer::from_bytes(json, "tokenizer.json").expect("a valid tokenizer"), 512, &[1])
    });
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let grammar = match GRAMMARS.compile(&GrammarSource::Gbnf(text)) {
        Ok(grammar) => grammar,
        Err(error) => {
            one_line(&error);
            return false;
        }
    };
    let mut constraint = grammar.start();
    for step in 0..20 {
        // An answer may exceed the limits of time and size.
        let Ok(mask) = constraint.mask(true) else { break };
        let allowed: Vec<u32> = (0..512).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
        let id = allowed[(bytes.len() + 7 * step) % allowed.len()];
        if id == 1 {
            break;
        }
        if let Err(error) = constraint.push(id) {
            one_line(&error);
            break;
        }
    }
    true
}

/// Memory for the pixels that [`image`] accepts, in bytes, and for the decoders' tables. A lossy WebP file may claim to
/// have a part of 16 MiB, which is reserved before it is read.
pub const IMAGE_BYTES: usize = 16 * 200_000 + (17 << 20);

/// The file of a picture. Reads its size, decodes it within small limits, and makes it smaller.
pub fn image(bytes: Vec<u8>) -> Result<Rgb, ImageError> {
    let limits = Limits { max_bytes: 1 << 20, max_side: 2000, max_pixels: 200_000 };
    let size = image::size_of(&bytes, &limits);
    let decoded = image::decode(&bytes, &limits);
    match &decoded {
        Ok(picture) => {
            let (width, height) = (picture.width(), picture.height());
            assert_eq!(size, Ok([width, height]), "{picture:?}");
            assert!(width.max(height) <= limits.max_side, "{picture:?}");
            assert!(u64::from(width) * u64::from(height) <= limits.max_pixels, "{picture:?}");
            let small = picture.resize(1 + width % 7, 1 + height % 7, Filter::Bicubic);
            assert_eq!(small.pixels().len() as u32, (1 + width % 7) * (1 + height % 7) * 3);
        }
        Err(error) => one_line(error),
    }
    decoded
}

/// What a client sends as an image. Returns whether it holds a file.
pub fn image_source(bytes: Vec<u8>) -> bool {
    const MAX_BYTES: usize = 1000;
    match image::file_of(&String::from_utf8_lossy(&bytes), MAX_BYTES) {
        Ok(file) => {
            assert!(!file.is_empty() && file.len() <= MAX_BYTES && file.len() <= bytes.len());
            true
        }
        Err(error) => {
            one_line(&error);
            false
        }
    }
}

/// The address and the bytes of the payload of the entry that [`kv_entry`] expects.
pub const KV_ENTRY: ([u8; 32], usize) = ([7; 32], 3000);

/// A file of a folder of conversations. Returns its payload, if it is the entry that was asked for.
pub fn kv_entry(bytes: Vec<u8>) -> Option<Vec<u8>> {
    let (address, length) = KV_ENTRY;
    match kv_disk::decode(&bytes[..], &Address::new(address), length) {
        Ok(payload) => {
            assert_eq!(payload.len(), length);
            assert!(bytes.ends_with(&payload), "the payload is the end of the file");
            Some(payload)
        }
        Err(error) => {
            one_line(&error);
            None
        }
    }
}

/// The container of an NPU kernel. Returns whether it was accepted.
pub fn npu_container(bytes: Vec<u8>) -> bool {
    match Container::parse(&bytes) {
        Ok(Container { columns, start_columns, .. }) => {
            let fits = |start: &u16| u32::from(*start) + columns <= 5;
            assert!(columns >= 1 && !start_columns.is_empty() && start_columns.iter().all(fits));
            true
        }
        Err(error) => {
            assert!(error.at <= bytes.len().max(456), "{error}");
            one_line(&error);
            false
        }
    }
}

/// The instructions of an NPU kernel with two columns. Returns whether they were accepted.
pub fn npu_transaction(bytes: Vec<u8>) -> bool {
    let shape = Shape::new(64, 2, None).expect("a shape of the contract");
    let bucket = Bucket::new(256, 512, 2).expect("a bucket of the contract");
    let checked = transaction::words(&bytes).and_then(|words| {
        assert_eq!(words.len() * 4, bytes.len());
        transaction::check(&words, 2, &Layout::of(shape, bucket))
    });
    if let Err(error) = &checked {
        assert!(error.at <= bytes.len() / 4, "{error}");
        one_line(error);
    }
    checked.is_ok()
}

/// Reads everything that a loader reads from a model's files.
pub fn checkpoint(files: &ModelFiles) -> Accepted {
    let opened = Checkpoint::open(files);
    if let Err(error) = &opened {
        one_line(error);
    }
    let config = arch::load(files);
    if let Err(error) = &config {
        one_line(error);
    }
    let mut accepted = Accepted { tensors: 0, model: false, tokenizer: tokenizer(files).is_some() };
    let Ok(checkpoint) = opened else { return accepted };
    accepted.tensors = checkpoint.iter().len();
    for tensor in checkpoint.iter() {
        let (rows, cols) = (tensor.rows(), tensor.cols());
        assert_eq!(tensor.num_elements(), rows * cols, "{}", tensor.name);
        let Ok(scheme) = tensor.scheme() else { continue };
        let mut values = vec![0.0; cols];
        // The first row, one in the middle, and the last row.
        for row in [0, rows / 2, rows.saturating_sub(1)] {
            if row >= rows || cols == 0 {
                continue;
            }
            match tensor.rows_f32_into(row..row + 1, &mut values) {
                Ok(()) => assert!(values.iter().all(|value| value.is_finite()), "{} row {row}", tensor.name),
                Err(error) => one_line(&error),
            }
            if scheme.grouping(cols).is_some() {
                let mut quantized = QuantizedRow::new(scheme, cols);
                if let Err(error) = tensor.quantized_row_into(row, &mut quantized) {
                    one_line(&error);
                }
            }
        }
    }
    if let Ok((config, _)) = config {
        match Weights::collect(&checkpoint, &config) {
            Ok(weights) => {
                assert!(weights.tensors.iter().count() > 0);
                accepted.model = true;
            }
            Err(error) => one_line(&error),
        }
    }
    accepted
}

fn tokenizer(files: &ModelFiles) -> Option<Tokenizer> {
    let bytes = match files.read("tokenizer.json") {
        Ok(bytes) => bytes?,
        Err(error) => {
            one_line(&error);
            return None;
        }
    };
    match Tokenizer::from_bytes(&bytes, "tokenizer.json") {
        Ok(tokenizer) => {
            for text in ["", "a", "<bos>ab c\n\n  \u{2581}abc<end_of_turn>", "\u{1f984}\0\u{e9}"] {
                if let Ok(ids) = tokenizer.encode(text, true) {
                    assert!(ids.iter().all(|id| tokenizer.contains(*id)), "{text:?}: {ids:?}");
                    assert!(ids.len() <= 16 * text.len() + 64, "{text:?} becomes {} ids", ids.len());
                    tokenizer.decode(&ids, true);
                }
            }
            match files.read("tokenizer_config.json") {
                Ok(Some(bytes)) => {
                    let chat = ChatFiles { tokenizer_config: Some(&bytes), chat_template_jinja: None };
                    if let Err(error) = ChatTemplate::from_checkpoint(chat, &tokenizer) {
                        assert!(!error.to_string().is_empty());
                    }
                }
                Ok(None) => {}
                Err(error) => one_line(&error),
            }
            Some(tokenizer)
        }
        Err(error) => {
            one_line(&error);
            None
        }
    }
}

/// Checks that an error is one line of bounded length.
fn one_line(error: &dyn std::fmt::Display) {
    let text = error.to_string();
    assert!(!text.is_empty() && !text.contains('\n') && text.len() < 2000, "{text:?}");
}
