//! A checkpoint's tokenizer.json: text to ids and back.
//!
//! The `tokenizers` crate encodes. Decoding uses a table with the text of each id, so that ids can be decoded one at a
//! time. This is exact only for these pipelines: BPE, and a decoder of `Replace`, `ByteFallback`, `Fuse` and a `Strip` of
//! the start, or `ByteLevel`. Other pipelines are refused at load.
//!
//! A file's `truncation` and `padding` are ignored, as in transformers, so a prompt is never truncated silently. These
//! are refused: settings that lose characters or use random numbers, and steps that can make a text many times longer
//! ([`super::steps`]).

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use serde::Deserialize;
use tokenizers::{Encoding, Model, Normalizer, OffsetType, PreTokenizedString, PreTokenizer};

use super::added::{AddedTokens, Placed};
use super::error::{MAX_TEXT_BYTES, TextError};
use super::family::{self, Family};
use super::panics::panic_message;
use super::steps::{Decoder, Step, check_post_processor, decoder, growth};

/// Largest vocabulary accepted, which bounds the decoding table. The largest in use is a quarter of it.
const MAX_VOCAB: usize = 1 << 20;
/// Longest token accepted, both as written in the file and decoded. The longest in use has 93 bytes. This bounds the text
/// of a list of ids.
const MAX_TOKEN_BYTES: usize = 256;
/// Largest text after normalization and pre-tokenization. A normalizer may turn a space into three bytes; then
/// [`MAX_TEXT_BYTES`] is the lower limit.
const MAX_NORMALIZED_BYTES: usize = 8 << 20;
/// Longest error about a file, in characters. Errors may quote names from the file.
const MAX_PROBLEM_CHARS: usize = 400;

/// A tokenizer. Cloning shares it.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

struct Inner {
    file: String,
    encoder: tokenizers::Tokenizer,
    /// Created when a prompt first needs it.
    added: OnceLock<AddedTokens>,
    /// The token for a character that is not in the vocabulary.
    unknown: Option<u32>,
    /// Indexed by id. An id without a token is `Absent`.
    entries: Vec<Entry>,
    /// The decoded bytes of all tokens. `Decoded::Text` and `Decoded::Bytes` are ranges of it.
    text: Vec<u8>,
    /// The largest number of spaces that decoding removes from the start of a text.
    stripped: usize,
    /// Largest id that is not a special added token.
    largest_regular: u32,
    /// The ids that the post-processor adds before the ids of a text.
    in_front: Vec<u32>,
    /// Longest text that can be encoded.
    max_text_bytes: usize,
}

struct Entry {
    decoded: Decoded,
    special: bool,
}

enum Decoded {
    Absent,
    Byte(u8),
    /// UTF-8.
    Text(Range<u32>),
    Bytes(Range<u32>),
}

/// The decoded form of one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Piece<'a> {
    /// One byte of a character that is not in the vocabulary.
    Byte(u8),
    Text(&'a str),
    /// Bytes that are not whole characters.
    Bytes(&'a [u8]),
}

impl Tokenizer {
    /// Parses a tokenizer.json. Errors use `file_name`.
    pub fn from_bytes(tokenizer_json: &[u8], file_name: &str) -> Result<Self, TextError> {
        let fail = |problem: String| TextError::Tokenizer {
            file: file_name.to_owned(),
            problem: one_line(&problem),
        };

        let header: Header = serde_json::from_slice(tokenizer_json)
            .map_err(|e| fail(format!("not a tokenizer.json of the tokenizers library: {e}")))?;
        header.model.check().map_err(&fail)?;
        let decoder = decoder(&header.decoder).map_err(&fail)?;
        let growth = growth(&header.normalizer, &header.pre_tokenizer).map_err(&fail)?;
        check_post_processor(&header.post_processor).map_err(&fail)?;

        let read = || tokenizers::Tokenizer::from_bytes(tokenizer_json).map_err(|e| e.to_string());
        let mut encoder = without_panics(read).map_err(|problem| fail(parse_problem(problem)))?;
        encoder.with_truncation(None).map_err(|e| fail(e.to_string()))?;
        encoder.with_padding(None);
        header.check_against(&encoder, &decoder).map_err(&fail)?;

        let (entries, text) = decoding_table(&encoder, &decoder).map_err(&fail)?;
        let regular = |entry: &Entry| !entry.special && !matches!(entry.decoded, Decoded::Absent);
        let largest_regular = entries
            .iter()
            .rposition(regular)
            .ok_or_else(|| fail("the vocabulary has only special tokens".to_owned()))?
            as u32;
        let unknown = header.model.unk_token.and_then(|token| encoder.token_to_id(&token));
        let inner = Inner {
            file: file_name.to_owned(),
            encoder,
            added: OnceLock::new(),
            unknown,
            entries,
            text,
            stripped: if let Decoder::Replacing { stripped, .. } = decoder { stripped } else { 0 },
            largest_regular,
            in_front: Vec::new(),
            max_text_bytes: MAX_TEXT_BYTES.min((MAX_NORMALIZED_BYTES as f64 / growth) as usize),
        };
        let probe = |special: bool| inner.encode("a", special);
        let (own, all) = (probe(false)?, probe(true)?);
        let count = (0..all.len()).find(|at| all[*at..].starts_with(&own)).unwrap_or(0);
        Ok(Self { inner: Arc::new(Inner { in_front: all[..count].to_vec(), ..inner }) })
    }

    /// The ids of a raw prompt. Control tokens in the text (`<start_of_turn>`) become their own ids.
    ///
    /// With `add_special_tokens` the file's post-processor adds its tokens (such as `<bos>` at the start). That is
    /// right for plain text, and wrong for the output of a chat template, which already includes `<bos>`. A text longer
    /// than [`Self::max_text_bytes`] is [`TextError::TooLong`].
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        self.check_length(text)?;
        self.inner.encode(text, add_special_tokens)
    }

    /// The ids of a text without control tokens: if the text contains the name of one, that name is tokenized like any
    /// other text. With `add_special_tokens` the file's post-processor adds its tokens.
    pub fn encode_text(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        self.encode_around(text, &[], add_special_tokens)
    }

    /// The control tokens whose names are in `text`, in order.
    pub(super) fn control_tokens(&self, text: &str) -> Vec<Placed> {
        self.added().control(text)
    }

    /// The ids of `text`, in which only the tokens of `placed` are control tokens.
    pub(super) fn encode_around(
        &self,
        text: &str,
        placed: &[Placed],
        add_special_tokens: bool,
    ) -> Result<Vec<u32>, TextError> {
        self.check_length(text)?;
        let (inner, added) = (&self.inner, self.added());
        let encoding = inner.run(|| inner.tokenize_around(text, added, placed))?;
        // The merges of a vocabulary may build a control token from letters. Such a token is refused here. The unknown
        // token is allowed, because it replaces characters that are not in the vocabulary.
        let is_control = |id: &u32| added.is_control(*id) && Some(*id) != inner.unknown;
        let mut expected = placed.iter().map(|token| token.id).filter(is_control);
        for id in encoding.get_ids().iter().filter(|id| is_control(id)) {
            if expected.next() != Some(*id) {
                let token = self.token(*id).unwrap_or_default();
                return Err(TextError::ControlToken { file: inner.file.clone(), token });
            }
        }
        let processed = inner.run(|| inner.encoder.post_process(encoding, None, add_special_tokens))?;
        Ok(processed.get_ids().to_vec())
    }

    fn check_length(&self, text: &str) -> Result<(), TextError> {
        let (bytes, limit) = (text.len(), self.max_text_bytes());
        if bytes > limit { Err(TextError::TooLong { bytes, limit }) } else { Ok(()) }
    }

    fn added(&self) -> &AddedTokens {
        self.inner.added.get_or_init(|| AddedTokens::new(&self.inner.encoder))
    }

    /// Longest text that can be encoded: [`MAX_TEXT_BYTES`], or less if the file's steps make a text much longer.
    pub fn max_text_bytes(&self) -> usize {
        self.inner.max_text_bytes
    }

    /// Number of ids that [`Self::encode`] with `add_special_tokens` adds before the ids of the text.
    pub fn ids_in_front(&self) -> usize {
        self.inner.in_front.len()
    }

    /// The first id of every text that [`Self::encode`] encodes with `add_special_tokens`, such as `<bos>`. `None` if
    /// texts begin with their own first token.
    pub fn bos(&self) -> Option<u32> {
        self.inner.in_front.first().copied()
    }

    /// Largest id + 1. Some smaller ids may have no token ([`Self::contains`]).
    pub fn vocab_size(&self) -> usize {
        self.inner.entries.len()
    }

    /// Whether `id` is a token.
    pub fn contains(&self, id: u32) -> bool {
        self.piece(id).is_some()
    }

    /// The id of the token with exactly this text, as written in the file (`"<end_of_turn>"`, `"▁the"`).
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.encoder.token_to_id(token)
    }

    /// The family of conversations that the vocabulary was made for, if it is known.
    pub(super) fn family(&self) -> Option<&'static Family> {
        family::of(|token| self.token_id(token).is_some())
    }

    /// The id with which a model of the vocabulary's family ends its turns.
    pub fn end_of_turn(&self) -> Option<u32> {
        self.family().and_then(|family| self.token_id(family.end_of_turn))
    }

    /// The token's text as written in the file.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.encoder.id_to_token(id)
    }

    /// The bytes that `id` adds to decoded text. A byte token adds one byte of a character.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        self.piece(id).map(|piece| match piece {
            Piece::Byte(byte) => vec![byte],
            Piece::Text(text) => text.as_bytes().to_vec(),
            Piece::Bytes(bytes) => bytes.to_vec(),
        })
    }

    /// Whether `id` is a control token (`<bos>`, `<end_of_turn>`). `skip_special` omits these.
    pub fn is_special(&self, id: u32) -> bool {
        self.inner.entries.get(id as usize).is_some_and(|entry| entry.special)
    }

    /// Whether the id is a control token: syntax of a conversation, even if the tokenizer's file does not call it special.
    pub fn is_control(&self, id: u32) -> bool {
        self.is_special(id) || self.added().is_control(id)
    }

    /// Whether a model with `rows` embedding rows can use this tokenizer.
    ///
    /// Every regular token needs a row. The id of a special token may be `rows` or more: one published model has 262144 rows and
    /// the tokenizer of the multimodal models, whose image token is 262144. [`Self::check_ids`] refuses texts with that
    /// token. Rows without a token are padding; the multimodal models have 262208 rows.
    pub fn fits(&self, rows: usize) -> Result<(), TextError> {
        let largest = self.inner.largest_regular;
        if (largest as usize) < rows {
            return Ok(());
        }
        let token = self.token(largest).unwrap_or_default();
        Err(TextError::DoesNotFit { file: self.inner.file.clone(), token, largest, rows })
    }

    /// The first id that is another token in `other`, with both tokens. Only the ids of the smaller vocabulary are
    /// compared.
    pub fn first_difference(&self, other: &Tokenizer) -> Option<(u32, [Option<String>; 2])> {
        let ids = 0..self.vocab_size().min(other.vocab_size()) as u32;
        let mut each = ids.map(|id| (id, [self.token(id), other.token(id)]));
        each.find(|(_, [here, there])| here != there)
    }

    /// Refuses ids without a row in a model with `rows` embedding rows; the error names the first such id.
    pub fn check_ids(&self, ids: &[u32], rows: usize) -> Result<(), TextError> {
        match ids.iter().find(|&&id| id as usize >= rows) {
            None => Ok(()),
            Some(&id) => Err(TextError::OutsideModel { token: self.token(id).unwrap_or_default(), id, rows }),
        }
    }

    /// The largest number of spaces that decoding removes from the start of a text.
    pub(super) fn stripped(&self) -> usize {
        self.inner.stripped
    }

    pub(super) fn piece(&self, id: u32) -> Option<Piece<'_>> {
        let bytes = |range: &Range<u32>| &self.inner.text[range.start as usize..range.end as usize];
        match &self.inner.entries.get(id as usize)?.decoded {
            Decoded::Absent => None,
            Decoded::Byte(byte) => Some(Piece::Byte(*byte)),
            Decoded::Text(range) => {
                Some(Piece::Text(std::str::from_utf8(bytes(range)).expect("checked when the table was made")))
            }
            Decoded::Bytes(range) => Some(Piece::Bytes(bytes(range))),
        }
    }
}

impl Inner {
    fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        let encoding = self.run(|| self.encoder.encode_fast(text, add_special_tokens))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The same steps as in the crate's `encode`, except that the caller chooses the control tokens.
    fn tokenize_around(
        &self,
        text: &str,
        added: &AddedTokens,
        placed: &[Placed],
    ) -> tokenizers::Result<Encoding> {
        let mut pieces = PreTokenizedString::from(text);
        pieces.split(|_, piece| Ok(added.cut_at(piece, placed)))?;
        pieces.split(|_, piece| Ok(added.cut(piece, false)))?;
        pieces.split(|_, mut piece| {
            if let Some(normalizer) = self.encoder.get_normalizer() {
                normalizer.normalize(&mut piece)?;
            }
            Ok(added.cut(piece, true))
        })?;
        if let Some(pre_tokenizer) = self.encoder.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        pieces.tokenize(|piece| self.encoder.get_model().tokenize(piece.get()))?;
        pieces.into_encoding(None, 0, OffsetType::None)
    }

    fn run<T>(&self, step: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, TextError> {
        let run = || step().map_err(|error| error.to_string());
        without_panics(run)
            .map_err(|problem| TextError::Encode { file: self.file.clone(), problem: one_line(&problem) })
    }
}

/// Runs code of the tokenizers crate, and turns its panics into errors. Some of its steps panic on unusual texts.
fn without_panics<T>(run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        Err(format!("internal error of the tokenizers library: {}", panic_message(&*panic)))
    })
}

/// The fields of a tokenizer.json that are checked before it is used. The crate reads the vocabulary.
#[derive(Deserialize)]
struct Header {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    normalizer: Step,
    #[serde(default)]
    pre_tokenizer: Step,
    #[serde(default)]
    post_processor: Step,
    #[serde(default)]
    decoder: Step,
    model: ModelHeader,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
}

#[derive(Deserialize)]
struct ModelHeader {
    #[serde(rename = "type")]
    kind: Option<String>,
    dropout: Option<f64>,
    unk_token: Option<String>,
    byte_fallback: Option<bool>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
}

impl ModelHeader {
    fn check(&self) -> Result<(), String> {
        match self.kind.as_deref() {
            Some("BPE") => {}
            Some(other) => return Err(format!("model.type is {other:?}; expected \"BPE\"")),
            None => return Err("model.type is missing; expected \"BPE\"".to_owned()),
        }
        if self.dropout.is_some_and(|rate| rate != 0.0) {
            return Err("model.dropout is set, which makes encoding random; set it to null".to_owned());
        }
        for (field, value) in [
            ("continuing_subword_prefix", &self.continuing_subword_prefix),
            ("end_of_word_suffix", &self.end_of_word_suffix),
        ] {
            if value.as_deref().is_some_and(|value| !value.is_empty()) {
                return Err(format!("model.{field} is set; expected null"));
            }
        }
        Ok(())
    }
}

impl Header {
    fn check_against(&self, encoder: &tokenizers::Tokenizer, decoder: &Decoder) -> Result<(), String> {
        // The crate numbers added tokens by their position in the list and ignores the ids in the file.
        for AddedToken { id, content } in &self.added_tokens {
            match encoder.token_to_id(content) {
                Some(actual) if actual == *id => {}
                Some(actual) => {
                    return Err(format!(
                        "added token {content:?} has the id {id}, but its position in the list gives it {actual}"
                    ));
                }
                None => return Err(format!("added token {id} is empty")),
            }
        }
        let unknown = self.model.unk_token.as_deref();
        if let Some(token) = unknown
            && !in_model(encoder, token)
        {
            return Err(format!("model.unk_token is {token:?}, which is not in the vocabulary"));
        }
        // A vocabulary of bytes has every character, except those with a byte that it lacks. The crate drops these bytes.
        if let Decoder::ByteLevel = decoder {
            return match writes_bytes(&self.normalizer.0) || writes_bytes(&self.pre_tokenizer.0) {
                true => Ok(()),
                false => Err("decoder is ByteLevel, but no normalizer or pre_tokenizer is".to_owned()),
            };
        }
        // Without `unk_token` and `byte_fallback`, the crate drops characters that are not in the vocabulary.
        let byte_fallback = self.model.byte_fallback == Some(true);
        let missing = (0..=255u8).find(|byte| !in_model(encoder, &format!("<{byte:#04X}>")));
        if unknown.is_none() && !(byte_fallback && missing.is_none()) {
            return Err(match missing {
                Some(byte) if byte_fallback => {
                    format!(
                        "model.byte_fallback needs 256 byte tokens, but <{byte:#04X}> is not in the vocabulary"
                    )
                }
                _ => "model has neither byte_fallback nor unk_token, so it would lose characters".to_owned(),
            });
        }
        Ok(())
    }
}

/// Whether a step, or a step of its sequence, writes a character for each byte.
fn writes_bytes(step: &serde_json::Value) -> bool {
    let steps = ["normalizers", "pretokenizers"].into_iter().find_map(|name| step[name].as_array());
    step["type"] == "ByteLevel" || steps.is_some_and(|steps| steps.iter().any(writes_bytes))
}

/// The byte that a character stands for in a byte-level vocabulary: printable characters of Latin-1 stand for themselves,
/// and the other bytes, in order, are the characters from U+0100 on.
fn byte_of(c: char) -> Option<u8> {
    let is_own = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match u32::from(c) {
        code @ 0..=0xff => Some(code as u8).filter(|byte| is_own(*byte)),
        code => (0..=255u8).filter(|byte| !is_own(*byte)).nth(code as usize - 0x100),
    }
}

/// Whether `token` is in the vocabulary of the model, without the added tokens.
fn in_model(encoder: &tokenizers::Tokenizer, token: &str) -> bool {
    tokenizers::Model::token_to_id(encoder.get_model(), token).is_some()
}

/// The decoding table: for each id, the result of the crate's decoder steps on that token alone.
fn decoding_table(
    encoder: &tokenizers::Tokenizer,
    decoder: &Decoder,
) -> Result<(Vec<Entry>, Vec<u8>), String> {
    let largest = encoder.get_vocab(true).into_values().max().ok_or("the vocabulary is empty")? as usize;
    if largest >= MAX_VOCAB {
        return Err(format!("a token has id {largest}; expected ids below {MAX_VOCAB}"));
    }
    let expected = format!("expected at most {MAX_TOKEN_BYTES} in a token");
    let mut entries = Vec::with_capacity(largest + 1);
    let mut text = Vec::new();
    let mut push = |bytes: &[u8]| -> Result<Range<u32>, String> {
        let start = text.len();
        text.extend_from_slice(bytes);
        let end = u32::try_from(text.len()).map_err(|_| "the vocabulary's text exceeds 4 GiB")?;
        Ok(start as u32..end)
    };
    for id in 0..=largest as u32 {
        let Some(token) = encoder.id_to_token(id) else {
            entries.push(Entry { decoded: Decoded::Absent, special: false });
            continue;
        };
        // A character that stands for a byte has up to two bytes.
        let written_bytes = if matches!(decoder, Decoder::ByteLevel) { token.len() / 2 } else { token.len() };
        if written_bytes > MAX_TOKEN_BYTES {
            return Err(format!("token {id} has {} bytes; {expected}", token.len()));
        }
        let special = encoder.get_added_vocabulary().is_special_token(&token);
        let decoded = match decoder {
            Decoder::ByteLevel => {
                // The crate leaves a token as it is if one of its characters stands for no byte.
                let bytes = token.chars().map(byte_of).collect::<Option<Vec<u8>>>();
                let bytes = bytes.unwrap_or_else(|| token.into_bytes());
                let range = push(&bytes)?;
                if std::str::from_utf8(&bytes).is_ok() { Decoded::Text(range) } else { Decoded::Bytes(range) }
            }
            Decoder::Replacing { replacements, .. } => {
                let replaced = replacements
                    .iter()
                    .fold(token, |token, (pattern, content)| token.replace(pattern.as_str(), content));
                if replaced.len() > MAX_TOKEN_BYTES {
                    return Err(format!(
                        "token {id} has {} bytes after decoding; {expected}",
                        replaced.len()
                    ));
                }
                match byte_token(&replaced) {
                    Some(byte) => Decoded::Byte(byte),
                    None => Decoded::Text(push(replaced.as_bytes())?),
                }
            }
        };
        entries.push(Entry { decoded, special });
    }
    Ok((entries, text))
}

/// The byte of a token `<0xNN>`, by the same test as the crate's.
fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// The error text for a file that the tokenizers library cannot parse. For an unknown form, the library's own message
/// only names its Rust types, so it is replaced.
fn parse_problem(problem: String) -> String {
    if !problem.contains("untagged enum") {
        return problem;
    }
    "a part of it has a form that this server cannot read; use the tokenizer.json that came with the weights"
        .to_owned()
}

/// A message on one line of bounded length.
fn one_line(message: &str) -> String {
    let line = message.split_whitespace().collect::<Vec<_>>().join(" ");
    line.chars().take(MAX_PROBLEM_CHARS).collect()
}
