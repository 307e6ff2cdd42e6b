//! The steps of a byte-level tokenizer, by `tokenizer.ggml.pre`: how a text is split before its bytes are joined. They are
//! those of the original tokenizer.json of the models that llama.cpp gives these names.

use serde_json::{Value as Json, json};

use super::header::{HeaderError, Metadata};
use crate::checkpoint::error::short;

const PRE: &str = "tokenizer.ggml.pre";

/// How a text is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Splitting {
    Gpt2,
    Llama3,
    Qwen2,
    SmolLm,
}

/// The step that writes a character for each byte of a text, or reads them. With `use_regex`, it also splits the text as
/// GPT-2 does.
pub(super) fn step(use_regex: bool) -> Json {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
}

impl Splitting {
    /// The splitting of a file. Refuses a name that is not known: another splitting gives other ids.
    pub fn of(metadata: &Metadata) -> Result<Splitting, HeaderError> {
        const EXPECTED: &str = "expected \"gpt-2\", \"llama-bpe\", \"qwen2\" or \"smollm\"";
        match metadata.text(PRE)? {
            Some("gpt-2" | "gpt2") => Ok(Splitting::Gpt2),
            Some("llama-bpe" | "llama3" | "llama-v3") => Ok(Splitting::Llama3),
            // The second is that of the Qwen models which DeepSeek-R1 was distilled to.
            Some("qwen2" | "deepseek-r1-qwen") => Ok(Splitting::Qwen2),
            Some("smollm") => Ok(Splitting::SmolLm),
            Some(other) => {
                let problem = format!(
                    "is {:?}, whose way to split texts is not known; {EXPECTED}, or give the original model's \
                     tokenizer.json with --tokenizer",
                    short(other)
                );
                Err(HeaderError::key(PRE, problem))
            }
            None => {
                let problem = format!(
                    "is missing; {EXPECTED}, or give the original model's tokenizer.json with --tokenizer"
                );
                Err(HeaderError::key(PRE, problem))
            }
        }
    }

    pub fn normalizer(self) -> Json {
        match self {
            Splitting::Qwen2 => json!({"type": "NFC"}),
            Splitting::Gpt2 | Splitting::Llama3 | Splitting::SmolLm => Json::Null,
        }
    }

    pub fn pre_tokenizer(self) -> Json {
        const BEFORE_DIGITS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|";
        const AFTER_DIGITS: &str = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        let sequence =
            |first: Json, use_regex| json!({"type": "Sequence", "pretokenizers": [first, step(use_regex)]});
        let split = |digits: &str| {
            let regex = format!("{BEFORE_DIGITS}{digits}{AFTER_DIGITS}");
            sequence(
                json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false}),
                false,
            )
        };
        match self {
            Splitting::Gpt2 => step(true),
            Splitting::Llama3 => split(r"\p{N}{1,3}"),
            Splitting::Qwen2 => split(r"\p{N}"),
            Splitting::SmolLm => sequence(json!({"type": "Digits", "individual_digits": true}), true),
        }
    }

    /// Whether a piece of the text that is a token is not joined from other tokens.
    pub fn ignores_merges(self) -> bool {
        self == Splitting::Llama3
    }

    /// Whether a file that does not say so puts `<bos>` in front of texts.
    pub fn adds_bos(self) -> bool {
        self == Splitting::Llama3
    }
}
