//! Converts the tokenizer of a GGUF file to a `tokenizer.json` of the `tokenizers` crate.
//!
//! Files have one of two kinds of tokenizers. `llama` is SentencePiece's BPE as llama.cpp computes it, with
//! scores instead of merges: of all neighbouring pieces whose concatenation is a piece, the pair with the highest score
//! is joined first, and of equal scores the leftmost pair. The converter writes `gpt2` if there is no
//! `tokenizer.model`: the pieces and merges of `tokenizer.json`. Their characters are those of texts, or stand for bytes as
//! in GPT-2 ([`super::byte_level`]). An architecture may have another name for
//! a tokenizer with the pieces and merges of texts.
//!
//! # Merges from scores
//!
//! For every piece, each split into two pieces is a merge. A higher score of the piece gives the merge a lower rank.
//! In the crate every pair has a different rank, but llama.cpp joins the leftmost of several pairs with equal scores.
//! So merges with equal scores need an order that gives the same result.
//!
//! Two splits of the same piece compete only if they overlap: `[x][y][z]` with `xy = yz = p`. Then `p` has the period
//! |x|, and the split after |x| must have the lower rank. (If each of the two splits could be the left one, `p` is a
//! power of a shorter word. A run of that word is joined from the left, and only its end has a shorter piece, so the
//! two splits do not compete.)
//!
//! Splits of different pieces have equal scores if the converter gave all added pieces the same score. This matters for
//! runs of spaces and newlines. Joining from the left gives the same result as this order: the longest piece first, and
//! of its splits the rightmost first.
//!
//! Refuses vocabularies that merges cannot express: duplicate pieces, and pieces that could be joined from a character
//! that is not a piece.

use std::collections::HashMap;

use serde::Serialize;
use serde::ser::Serializer;
use serde_json::{Value as Json, json};

use super::arch::GgufTokens;
use super::byte_level::{self, Splitting};
use super::header::{HeaderError, Metadata, Value};
use crate::checkpoint::error::short;

const MODEL: &str = "tokenizer.ggml.model";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";

/// The largest vocabularies in use have 262,145 pieces.
const MAX_PIECES: usize = 1 << 20;
/// Bytes of all pieces; vocabularies in use have up to 2 MB.
const MAX_TEXT_BYTES: usize = 32 << 20;
/// Bytes of control and user-defined pieces, which one automaton searches for; 0.1 MB in files in use.
const MAX_CUT_OUT_BYTES: usize = 4 << 20;
/// Longest piece that is joined from others, in bytes; 93 in files in use. Limits the work on its splits.
const MAX_JOINED_BYTES: usize = 255;
/// Merges may take this many times the bytes of the pieces, plus [`MORE_MERGE_BYTES`]. Merges of files in use take four times
/// the bytes. In a malicious vocabulary, a piece could be joined in far more ways than it has letters.
const MERGE_BYTES: usize = 16;
const MORE_MERGE_BYTES: usize = 1 << 16;

/// SentencePiece's replacement for a space.
const SPACE: char = '\u{2581}';

/// The kind of a piece, by `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Joined from other pieces. Byte pieces and unused pieces count as joined too.
    Joined,
    /// Found in the text before other pieces are joined.
    UserDefined,
    /// Found in the text before other pieces are joined, and not shown in answers.
    Control,
}

/// A piece of the vocabulary.
struct Piece<'a> {
    /// The index in the file.
    id: u32,
    text: &'a str,
    kind: Kind,
}

/// Generates `tokenizer.json`; `None` if the file has no tokenizer.
pub(super) fn tokenizer_json(
    tokens: &GgufTokens,
    metadata: &Metadata,
) -> Result<Option<Vec<u8>>, HeaderError> {
    let model = match metadata.text(MODEL)? {
        Some(model @ ("llama" | "gpt2")) => model,
        Some(model) if tokens.own_model == Some(model) => model,
        Some(other) => {
            let own = tokens.own_model.map(|own| format!(" or {own:?}")).unwrap_or_default();
            let problem = format!("{:?} is not supported; expected \"llama\" or \"gpt2\"{own}", short(other));
            return Err(HeaderError::key(MODEL, problem));
        }
        None => return Ok(None),
    };
    let pieces = read_pieces(tokens, metadata)?;
    let by_text = by_text(&pieces)?;
    let is_byte_level = model == "gpt2"
        && !by_text.contains_key("<0x00>")
        && !by_text.keys().any(|text| text.starts_with(SPACE));
    let splitting = is_byte_level.then(|| Splitting::of(metadata)).transpose()?;
    let merges = match model {
        "llama" => merges_from_scores(&pieces, &by_text, &read_scores(metadata)?)?,
        _ => read_merges(metadata, &by_text)?,
    };

    let id = |name: &str| metadata.whole(&format!("tokenizer.ggml.{name}"));
    let text_of = |id: u64| pieces.iter().find(|p| u64::from(p.id) == id).map(|p| p.text);
    let unknown = match id("unknown_token_id")? {
        _ if is_byte_level => None,
        Some(id) => text_of(id),
        None => by_text.contains_key("<unk>").then_some("<unk>"),
    };
    let flag = |name: &str, default| {
        metadata.flag(&format!("tokenizer.ggml.{name}")).map(|flag| flag.unwrap_or(default))
    };
    // By default, <bos> is put before a text.
    let bos = id("bos_token_id")?.or(tokens.bos).and_then(text_of);
    let bos = if flag("add_bos_token", splitting.is_none_or(Splitting::adds_bos))? { bos } else { None };
    let eos = text_of(id("eos_token_id")?.unwrap_or(tokens.eos));
    let eos = if flag("add_eos_token", false)? { eos } else { None };
    let spaces = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
    let prefixed = flag("add_space_prefix", tokens.add_space_prefix)?;
    let normalizer = match (splitting, prefixed) {
        (Some(splitting), _) => splitting.normalizer(),
        (None, false) => spaces,
        (None, true) => {
            json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, spaces]})
        }
    };
    let decoder = match splitting {
        Some(_) => byte_level::step(true),
        None => {
            let mut steps = vec![
                json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
                json!({"type": "ByteFallback"}),
                json!({"type": "Fuse"}),
            ];
            // Decoding removes the space that encoding adds.
            if prefixed {
                steps.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
            }
            json!({"type": "Sequence", "decoders": steps})
        }
    };

    let byte_pieces = (0..=255u8).filter(|byte| by_text.contains_key(format!("<{byte:#04X}>").as_str()));
    let file = TokenizerJson {
        rest: json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": pieces.iter().filter_map(added_token).collect::<Vec<_>>(),
            "normalizer": normalizer,
            "pre_tokenizer": splitting.map_or(Json::Null, Splitting::pre_tokenizer),
            "post_processor": post_processor(bos, eos, &by_text),
            "decoder": decoder,
        }),
        model: Bpe {
            rest: json!({
                "type": "BPE",
                "dropout": null,
                "unk_token": unknown,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": true,
                "byte_fallback": byte_pieces.count() == 256,
                "ignore_merges": splitting.is_some_and(Splitting::ignores_merges),
            }),
            vocab: Vocab(&pieces),
            merges,
        },
    };
    // Serializing texts and numbers cannot fail.
    Ok(Some(serde_json::to_vec(&file).expect("a tokenizer is JSON")))
}

/// The pieces of the vocabulary, without ids that have no text.
fn read_pieces<'a>(tokens: &GgufTokens, metadata: &Metadata<'a>) -> Result<Vec<Piece<'a>>, HeaderError> {
    let Some(texts) = metadata.elements(TOKENS)? else {
        return Err(HeaderError::key(TOKENS, "is missing; expected the vocabulary"));
    };
    let count = texts.len();
    if count == 0 || count > MAX_PIECES {
        return Err(HeaderError::key(TOKENS, format!("has {count} elements; expected 1 to {MAX_PIECES}")));
    }
    let mut types = metadata.elements(TYPES)?;
    if let Some(found) = types.as_ref().map(|types| types.len()).filter(|found| *found != count) {
        return Err(HeaderError::key(
            TYPES,
            format!("has {found} elements; expected one per token ({count})"),
        ));
    }

    let mut pieces = Vec::with_capacity(count);
    let (mut bytes, mut cut_out_bytes) = (0, 0);
    for (id, text) in texts.enumerate() {
        let text = match text? {
            Value::Text(text) => text,
            other => return Err(HeaderError::key(TOKENS, format!("contains {other}; expected texts"))),
        };
        let kind = match types.as_mut().and_then(|types| types.next()).transpose()? {
            None | Some(Value::Whole(1 | 5 | 6)) => Kind::Joined,
            Some(Value::Whole(2 | 3)) => Kind::Control,
            Some(Value::Whole(4)) => Kind::UserDefined,
            Some(other) => {
                let problem = format!("element {id} is {other}; expected 1 (normal) to 6 (byte)");
                return Err(HeaderError::key(TYPES, problem));
            }
        };
        // The converter writes these for ids that the tokenizer does not have.
        if text.is_empty() || text == format!("[PAD{id}]") {
            continue;
        }
        bytes += text.len();
        if bytes > MAX_TEXT_BYTES {
            return Err(HeaderError::key(TOKENS, format!("has more than {MAX_TEXT_BYTES} bytes of text")));
        }
        let kind = if tokens.control.contains(&text) { Kind::Control } else { kind };
        if kind != Kind::Joined {
            cut_out_bytes += text.len();
            if cut_out_bytes > MAX_CUT_OUT_BYTES {
                let problem =
                    format!("has more than {MAX_CUT_OUT_BYTES} bytes of control and user-defined tokens");
                return Err(HeaderError::key(TOKENS, problem));
            }
        }
        pieces.push(Piece { id: id as u32, text, kind });
    }
    Ok(pieces)
}

/// The index of each piece by its text.
fn by_text<'a>(pieces: &[Piece<'a>]) -> Result<HashMap<&'a str, u32>, HeaderError> {
    let mut by_text = HashMap::with_capacity(pieces.len());
    for (index, piece) in pieces.iter().enumerate() {
        if let Some(other) = by_text.insert(piece.text, index as u32) {
            let (a, b) = (pieces[other as usize].id, piece.id);
            let problem = format!("elements {a} and {b} are both {:?}", short(piece.text));
            return Err(HeaderError::key(TOKENS, problem));
        }
    }
    Ok(by_text)
}

/// One score per id.
fn read_scores(metadata: &Metadata) -> Result<Vec<f32>, HeaderError> {
    let Some(scores) = metadata.elements(SCORES)? else {
        return Err(HeaderError::key(SCORES, "is missing; expected a score per token"));
    };
    let tokens = metadata.elements(TOKENS)?.map_or(0, |tokens| tokens.len());
    if scores.len() != tokens {
        let problem = format!("has {} elements; expected one per token ({tokens})", scores.len());
        return Err(HeaderError::key(SCORES, problem));
    }
    scores
        .enumerate()
        .map(|(index, score)| match score? {
            Value::Number(n) if !n.is_nan() => Ok(n as f32),
            other => Err(HeaderError::key(SCORES, format!("element {index} is {other}; expected a number"))),
        })
        .collect()
}

/// A piece split into two pieces, which is a merge.
struct Split {
    score: f32,
    /// Index of the piece.
    piece: u32,
    /// Bytes of the left part.
    at: u8,
    /// Whether the merge has a lower rank than the mirrored split, which is as far from the end as this one is from the
    /// start.
    first: bool,
}

fn merges_from_scores<'a>(
    pieces: &[Piece<'a>],
    by_text: &HashMap<&'a str, u32>,
    scores: &[f32],
) -> Result<Vec<(&'a str, &'a str)>, HeaderError> {
    let budget = MERGE_BYTES * pieces.iter().map(|p| p.text.len()).sum::<usize>() + MORE_MERGE_BYTES;
    let mut spent = 0;
    let mut splits = Vec::new();
    for (index, piece) in pieces.iter().enumerate() {
        let text = piece.text;
        // Control and user-defined pieces are found first and never joined, unless they contain the replacement for a
        // space: spaces are replaced after these pieces are found. Then no text contains a space.
        if (piece.kind != Kind::Joined && !text.contains(SPACE)) || text.contains(' ') {
            continue;
        }
        if text.len() > MAX_JOINED_BYTES {
            let problem = format!(
                "element {} has {} bytes; expected at most {MAX_JOINED_BYTES} in a piece that is not a control token",
                piece.id,
                text.len()
            );
            return Err(HeaderError::key(TOKENS, problem));
        }
        for (at, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(at);
            let known = |part: &str| by_text.contains_key(part);
            let single = |part: &str| part.chars().nth(1).is_none();
            match (known(left), known(right)) {
                (true, true) => {}
                // llama.cpp joins single characters even if they are not pieces. Merges cannot express that.
                (l, r) if (l || single(left)) && (r || single(right)) => {
                    let lone = if l { right } else { left };
                    let problem = format!(
                        "element {} ({:?}) could be joined from the character {:?}, which is not a token",
                        piece.id,
                        short(text),
                        short(lone)
                    );
                    return Err(HeaderError::key(TOKENS, problem));
                }
                _ => continue,
            }
            // Bytes of the merge in tokenizer.json, including quotes.
            spent += text.len() + 8;
            if spent > budget {
                let problem =
                    format!("has too many ways to join its pieces: more than {budget} bytes of merges");
                return Err(HeaderError::key(TOKENS, problem));
            }
            // Whether the text has the period `at`.
            let period = |at: usize| text.as_bytes()[at..] == text.as_bytes()[..text.len() - at];
            let first = match (period(at), period(text.len() - at)) {
                (true, false) => true,
                (false, true) => false,
                _ => at * 2 >= text.len(),
            };
            let score = scores[piece.id as usize];
            splits.push(Split { score, piece: index as u32, at: at as u8, first });
        }
    }
    let text = |split: &Split| pieces[split.piece as usize].text;
    splits.sort_by(|a, b| {
        let by_score = b.score.partial_cmp(&a.score).expect("no score is NaN");
        let longest = || text(b).len().cmp(&text(a).len());
        let within_piece = || b.first.cmp(&a.first).then(b.at.cmp(&a.at));
        by_score.then_with(longest).then(a.piece.cmp(&b.piece)).then_with(within_piece)
    });
    Ok(splits.iter().map(|split| text(split).split_at(split.at.into())).collect())
}

/// The merges of a `gpt2` tokenizer. In the file, each one is two pieces with a space between them.
fn read_merges<'a>(
    metadata: &Metadata<'a>,
    by_text: &HashMap<&'a str, u32>,
) -> Result<Vec<(&'a str, &'a str)>, HeaderError> {
    let Some(lines) = metadata.elements(MERGES)? else {
        return Err(HeaderError::key(MERGES, "is missing; expected the merges of a gpt2 tokenizer"));
    };
    let mut merges = Vec::new();
    for (index, line) in lines.enumerate() {
        let fail = |problem: String| HeaderError::key(MERGES, format!("element {index} {problem}"));
        let pair = match line? {
            Value::Text(line) => {
                line.split_once(' ').filter(|(a, b)| !a.is_empty() && !b.is_empty() && !b.contains(' '))
            }
            other => return Err(fail(format!("is {other}; expected two pieces"))),
        };
        let Some((left, right)) = pair else {
            return Err(fail("is not two pieces with one space between them".into()));
        };
        let joined = format!("{left}{right}");
        let missing = [left, right, &joined].into_iter().find(|text| !by_text.contains_key(text));
        match missing {
            None => merges.push((left, right)),
            // The converter writes ▁ of added pieces as a space. Added pieces are found first and never joined.
            Some(text) if by_text.contains_key(text.replace(SPACE, " ").as_str()) => {}
            Some(text) => return Err(fail(format!("needs {:?}, which is not a token", short(text)))),
        }
    }
    Ok(merges)
}

/// The post-processor that puts the begin and end tokens around a text.
fn post_processor(bos: Option<&str>, eos: Option<&str>, by_text: &HashMap<&str, u32>) -> Json {
    let special = |text: &str, of: u32| json!({"SpecialToken": {"id": text, "type_id": of}});
    let sequence = |name: &str, of: u32| {
        let mut parts: Vec<Json> = bos.map(|text| special(text, of)).into_iter().collect();
        parts.push(json!({"Sequence": {"id": name, "type_id": of}}));
        parts.extend(eos.map(|text| special(text, of)));
        parts
    };
    let tokens: serde_json::Map<String, Json> = [bos, eos]
        .into_iter()
        .flatten()
        .map(|text| (text.to_owned(), json!({"id": text, "ids": [by_text[text]], "tokens": [text]})))
        .collect();
    let pair = [sequence("A", 0), sequence("B", 1)].concat();
    json!({
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": pair,
        "special_tokens": tokens,
    })
}

/// The entry of a piece that is found before other pieces are joined; `None` for other pieces.
fn added_token(piece: &Piece) -> Option<Json> {
    (piece.kind != Kind::Joined).then(|| {
        json!({
            "id": piece.id,
            "content": piece.text,
            "single_word": false,
            "lstrip": false,
            "rstrip": false,
            "normalized": false,
            "special": piece.kind == Kind::Control,
        })
    })
}

#[derive(Serialize)]
struct TokenizerJson<'a> {
    #[serde(flatten)]
    rest: Json,
    model: Bpe<'a>,
}

/// The vocabulary and the merges are serialized where they are, because a large model has hundreds of thousands.
#[derive(Serialize)]
struct Bpe<'a> {
    #[serde(flatten)]
    rest: Json,
    vocab: Vocab<'a>,
    merges: Vec<(&'a str, &'a str)>,
}

struct Vocab<'a>(&'a [Piece<'a>]);

impl Serialize for Vocab<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|piece| (piece.text, piece.id)))
    }
}
