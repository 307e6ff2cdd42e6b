//! Bounds on the steps of a tokenizer.json: how much longer they can make a text, and how many ids they can add.
//!
//! Each step writes text for the next one. A file with a hundred bytes of `Replace` steps can turn one letter into
//! gigabytes. So the growth factor of the whole chain is computed from the file before any text is processed. A chain
//! whose factor exceeds [`MAX_GROWTH`] is refused. Unknown kinds of steps are refused, because their growth is unknown.
//! Patterns must be matchable in linear time.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// Largest growth factor of a chain of steps, in bytes of output per byte of input. The largest in use is 3: a space
/// becomes `▁`. Files of older converters, which also add `▁` before each piece, have 12. `NFKC` alone has 11.
pub(super) const MAX_GROWTH: f64 = 16.0;
/// Most steps of a chain, because each step takes time for every text. Files in use have one.
const MAX_STEPS: usize = 32;
/// Most ids that a post-processor may add to a text. Files in use add one.
const MAX_ADDED_IDS: usize = 64;
/// Largest number of spaces that a decoder may strip. The files in use strip one.
const MAX_STRIPPED: u64 = 16;

/// JSON in which no object has a duplicate field. Parsers differ in which of two equal fields they use, so this module
/// and the tokenizers crate might read different values.
#[derive(Default)]
pub(super) struct Step(pub Value);

impl<'de> Deserialize<'de> for Step {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;

        macro_rules! scalars {
            ($($visit:ident: $type:ty),*) => {
                $(fn $visit<E>(self, value: $type) -> Result<Step, E> { Ok(Step(value.into())) })*
            };
        }

        impl<'de> Visitor<'de> for Read {
            type Value = Step;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("JSON")
            }

            scalars! {
                visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_f64: f64, visit_str: &str
            }

            fn visit_unit<E>(self) -> Result<Step, E> {
                Ok(Step(Value::Null))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Step, A::Error> {
                let mut list = Vec::new();
                while let Some(Step(item)) = items.next_element()? {
                    list.push(item);
                }
                Ok(Step(list.into()))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Step, A::Error> {
                let mut map = Map::new();
                while let Some((name, Step(value))) = fields.next_entry::<String, Step>()? {
                    if map.contains_key(&name) {
                        return Err(de::Error::custom(format_args!("duplicate field `{name}`")));
                    }
                    map.insert(name, value);
                }
                Ok(Step(map.into()))
            }
        }

        deserializer.deserialize_any(Read)
    }
}

/// A chain of steps. Each step reads the output of the step before it.
struct Chain {
    growth: f64,
    steps: usize,
}

impl Chain {
    fn new() -> Self {
        Self { growth: 1.0, steps: 0 }
    }

    /// Adds the step at the path `at` of the file. It writes at most `factor` bytes per byte of its input.
    fn add(&mut self, at: &str, kind: &str, factor: f64) -> Result<(), String> {
        self.steps += 1;
        self.growth *= factor.max(1.0);
        if self.steps > MAX_STEPS {
            return Err(format!(
                "{at} ({kind}) is step {} of a chain; expected at most {MAX_STEPS}",
                self.steps
            ));
        }
        if self.growth > MAX_GROWTH {
            return Err(format!(
                "{at} ({kind}), with the steps before it, makes a text up to {:.1} times as long; \
                 expected at most {MAX_GROWTH} times",
                self.growth
            ));
        }
        Ok(())
    }

    /// Adds a normalizer.
    fn normalizer(&mut self, at: &str, step: &Value) -> Result<(), String> {
        let kind = kind(at, step)?;
        let factor = match kind {
            "Sequence" => return self.sequence(at, step, "normalizers", Self::normalizer),
            "Replace" => text(at, step, "content")?.len() as f64 / shortest_match(at, step)? as f64,
            // Added tokens cut a text into pieces of at least one byte, and each piece is normalized separately.
            "Prepend" => 1.0 + text(at, step, "prepend")?.len() as f64,
            // The largest factors in UTF-8, from the Unicode Consortium's FAQ on normalization.
            "NFC" | "NFD" => 3.0,
            "NFKC" | "NFKD" => 11.0,
            // U+0130 and U+023A have two bytes, and three in lower case.
            "Lowercase" => 1.5,
            "ByteLevel" => 2.0,
            "Strip" | "StripAccents" | "Nmt" => 1.0,
            _ => return Err(unknown(at, kind)),
        };
        self.add(at, kind, factor)
    }

    /// Adds a pre-tokenizer. Most kinds only split the text.
    fn pre_tokenizer(&mut self, at: &str, step: &Value) -> Result<(), String> {
        let kind = kind(at, step)?;
        let factor = match kind {
            "Sequence" => return self.sequence(at, step, "pretokenizers", Self::pre_tokenizer),
            "ByteLevel" if step["add_prefix_space"] == false => 2.0,
            "ByteLevel" => 4.0,
            // The replacement is written for each space and before each piece.
            "Metaspace" => 2.0 * text(at, step, "replacement")?.len() as f64,
            "Split" => {
                shortest_match(at, step)?;
                1.0
            }
            "FixedLength" if step["length"] == 0 => {
                return Err(format!("{at}.length is 0; expected at least 1"));
            }
            "BertPreTokenizer" | "Delimiter" | "Digits" | "FixedLength" | "Punctuation"
            | "UnicodeScripts" | "Whitespace" | "WhitespaceSplit" => 1.0,
            _ => return Err(unknown(at, kind)),
        };
        self.add(at, kind, factor)
    }

    fn sequence(
        &mut self,
        at: &str,
        step: &Value,
        name: &str,
        add: fn(&mut Self, &str, &Value) -> Result<(), String>,
    ) -> Result<(), String> {
        let steps = list(at, step, name)?;
        steps.iter().enumerate().try_for_each(|(i, step)| add(self, &format!("{at}.{name}[{i}]"), step))
    }
}

/// Most bytes that a normalizer and a pre-tokenizer together write per byte of input.
pub(super) fn growth(normalizer: &Step, pre_tokenizer: &Step) -> Result<f64, String> {
    let mut chain = Chain::new();
    if !normalizer.0.is_null() {
        chain.normalizer("normalizer", &normalizer.0)?;
    }
    if !pre_tokenizer.0.is_null() {
        chain.pre_tokenizer("pre_tokenizer", &pre_tokenizer.0)?;
    }
    Ok(chain.growth)
}

/// Checks that the output of a post-processor has the ids of the text exactly once and unchanged, and few other ids.
/// The crate panics if a template uses a second text, or if one template follows another.
pub(super) fn check_post_processor(post_processor: &Step) -> Result<(), String> {
    let Step(step) = post_processor;
    if step.is_null() {
        return Ok(());
    }
    let steps = match step["type"].as_str() {
        Some("Sequence") => list("post_processor", step, "processors")?,
        _ => std::slice::from_ref(step),
    };
    let mut adding = 0;
    for step in steps {
        let kind = kind("post_processor", step)?;
        match kind {
            "ByteLevel" => {}
            "TemplateProcessing" => check_template(step)?,
            "BertProcessing" | "RobertaProcessing" => {}
            _ => return Err(unknown("post_processor", kind)),
        }
        adding += usize::from(kind != "ByteLevel");
        // The crate distinguishes the kinds by their fields.
        let own: &[&str] = match kind {
            "TemplateProcessing" => &["single", "pair"],
            "ByteLevel" => &[],
            _ => &["sep", "cls"],
        };
        let mut kind_fields = ["single", "pair", "processors", "sep", "cls"].into_iter();
        if let Some(name) = kind_fields.find(|name| step.get(name).is_some() && !own.contains(name)) {
            return Err(format!(
                "post_processor ({kind}) has the field {name}, which belongs to another kind"
            ));
        }
    }
    if adding > 1 || steps.len() > MAX_STEPS {
        return Err(format!("post_processor has {adding} steps that add ids; expected at most 1"));
    }
    Ok(())
}

fn check_template(step: &Value) -> Result<(), String> {
    let (mut texts, mut added) = (0, 0);
    for piece in list("post_processor", step, "single")? {
        let special = &piece["SpecialToken"]["id"];
        match (piece["Sequence"]["id"].as_str(), special.as_str()) {
            (Some("A"), None) => texts += 1,
            (None, Some(name)) => {
                let ids = step["special_tokens"][name]["ids"].as_array();
                let ids = ids.ok_or_else(|| format!("post_processor.special_tokens lacks {name:?}"))?;
                added += ids.len();
            }
            _ => return Err("post_processor.single: expected special tokens and the sequence A".to_owned()),
        }
    }
    if texts != 1 {
        return Err(format!("post_processor.single has the text {texts} times; expected exactly once"));
    }
    if added > MAX_ADDED_IDS {
        return Err(format!("post_processor.single adds {added} ids; expected at most {MAX_ADDED_IDS}"));
    }
    Ok(())
}

/// How a token becomes text.
pub(super) enum Decoder {
    /// Each of these (pattern, content) is replaced in order. A token `<0xNN>` is a byte. `stripped` is the largest number
    /// of spaces that are removed from the start of a text.
    Replacing { replacements: Vec<(String, String)>, stripped: usize },
    /// Each character stands for a byte, as in GPT-2.
    ByteLevel,
}

/// The decoder, of the form `[Replace..., ByteFallback, Fuse]`, with or without a `Strip` of spaces at the start, or
/// `ByteLevel`. Steps that together make a token more than
/// [`MAX_GROWTH`] times as long are refused.
pub(super) fn decoder(decoder: &Step) -> Result<Decoder, String> {
    const EXPECTED: &str = "expected ByteLevel, or a Sequence of Replace (with a String pattern), ByteFallback, Fuse, and at most a Strip";
    let Step(decoder) = decoder;
    if decoder["type"] == "ByteLevel" {
        return Ok(Decoder::ByteLevel);
    }
    let steps = match (decoder["type"].as_str(), decoder["decoders"].as_array()) {
        (Some("Sequence"), Some(steps)) => steps,
        (Some(kind), _) => return Err(format!("decoder is a {kind}; {EXPECTED}")),
        (None, _) => return Err(format!("decoder is missing; {EXPECTED}")),
    };
    let kind = |step: &Value| step["type"].as_str().unwrap_or("(no type)").to_owned();
    let (steps, stripped) = match steps.as_slice() {
        [steps @ .., strip] if kind(strip) == "Strip" => (steps, stripped_spaces(strip)?),
        steps => (steps, 0),
    };
    let [replaces @ .., fallback, fuse] = steps else {
        return Err(format!("decoder has {} steps; {EXPECTED}", steps.len()));
    };
    if kind(fallback) != "ByteFallback" || kind(fuse) != "Fuse" {
        return Err(format!("decoder ends with {}, {}; {EXPECTED}", kind(fallback), kind(fuse)));
    }
    let mut chain = Chain::new();
    let mut replacements = Vec::new();
    for (i, step) in replaces.iter().enumerate() {
        let pattern = step["pattern"]["String"].as_str().filter(|pattern| !pattern.is_empty());
        match (kind(step).as_str(), pattern, step["content"].as_str()) {
            ("Replace", Some(pattern), Some(content)) => {
                let factor = content.len() as f64 / pattern.len() as f64;
                chain.add(&format!("decoder.decoders[{i}]"), "Replace", factor)?;
                replacements.push((pattern.to_owned(), content.to_owned()));
            }
            (kind, ..) => {
                return Err(format!(
                    "decoder step {kind} cannot be applied to one token at a time; {EXPECTED}"
                ));
            }
        }
    }
    Ok(Decoder::Replacing { replacements, stripped })
}

/// The largest number of spaces that the `Strip` of a decoder removes from the start of a text. Its end cannot be stripped
/// while the text is decoded token by token.
fn stripped_spaces(strip: &Value) -> Result<usize, String> {
    match (strip["content"].as_str(), strip["start"].as_u64(), strip["stop"].as_u64()) {
        (Some(" "), Some(start @ ..=MAX_STRIPPED), Some(0)) => Ok(start as usize),
        _ => Err(format!(
            "decoder step Strip is {strip}; expected the content \" \", a start of 0 to {MAX_STRIPPED} and the stop 0"
        )),
    }
}

/// Length in bytes of the shortest text that a step's pattern matches, at least 1. If a pattern matches the empty text,
/// the crate computes wrong offsets and panics in a later step.
fn shortest_match(at: &str, step: &Value) -> Result<usize, String> {
    let pattern = &step["pattern"];
    let least = match (pattern["String"].as_str(), pattern["Regex"].as_str()) {
        (Some(text), None) => text.len(),
        (None, Some(regex)) => {
            let problem = |problem: &str| Err(format!("{at}.pattern.Regex {problem}"));
            // The crate's regex engine reads `a++` as a possessive repetition, and backtracks. The brace of a class of
            // characters, as in `\p{L}+`, ends no repetition.
            let classes = ["L", "N"].map(|class| format!(r"\p{{{class}}}"));
            let plain =
                classes.iter().fold(regex.to_owned(), |regex, class| regex.replace(class.as_str(), "c"));
            if ["++", "*+", "?+", "}+"].iter().any(|possessive| plain.contains(possessive)) {
                return problem("has a possessive repetition, which is not supported");
            }
            // The published splitters of byte-level vocabularies end with this look-ahead, which the engine decides by one
            // character. It has no effect on the shortest match.
            let regex = regex.replace(r"|\s+(?!\S)|", "|");
            match regex_syntax::parse(&regex) {
                Ok(parsed) => parsed.properties().minimum_len().unwrap_or(0),
                Err(_) => {
                    return problem("is not a regular expression without look-around and backreferences");
                }
            }
        }
        _ => return Err(format!("{at}.pattern: expected either String or Regex, with a text")),
    };
    match least {
        0 => {
            Err(format!("{at}.pattern matches the empty text; expected a pattern of at least one character"))
        }
        least => Ok(least),
    }
}

fn kind<'a>(at: &str, step: &'a Value) -> Result<&'a str, String> {
    step["type"].as_str().ok_or_else(|| format!("{at} has no type"))
}

fn text<'a>(at: &str, step: &'a Value, name: &str) -> Result<&'a str, String> {
    step[name].as_str().ok_or_else(|| format!("{at}.{name}: expected a text"))
}

fn list<'a>(at: &str, step: &'a Value, name: &str) -> Result<&'a [Value], String> {
    step[name].as_array().map(Vec::as_slice).ok_or_else(|| format!("{at}.{name}: expected a list"))
}

fn unknown(at: &str, kind: &str) -> String {
    format!("{at} is a {kind:?}, a kind of step that this server does not support")
}
