//! Added tokens: texts that become one token each, everywhere in a text, before the rest of the text is tokenized.
//!
//! Some added tokens are control tokens: they are the syntax of a conversation (`<start_of_turn>`), not text. The
//! `tokenizers` crate recognizes either all control tokens in a text or none. Here the caller chooses which ones become
//! control tokens. In all other respects the search equals the crate's.

use std::collections::HashMap;
use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::normalizer::Range as Slice;
use tokenizers::{AddedToken, NormalizedString, Normalizer, Split, Token};

use super::family;

/// Control tokens that models of other families write in their answers. The text of an answer shows them.
const IN_ANSWERS: [&str; 4] = ["<think>", "</think>", "<tool_call>", "</tool_call>"];

/// The role of an added token in a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Text: a run of newlines, an HTML tag.
    Text,
    /// A control token that the text of an answer can show.
    Shown,
    /// A control token that the text of an answer never shows.
    Hidden,
}

impl Kind {
    fn of(token: &AddedToken) -> Self {
        // Control tokens have longer names, and a mark cannot be put inside a single character (`provenance.rs`).
        if token.content.chars().nth(1).is_none() {
            return Self::Text;
        }
        match token.content.as_str() {
            name if token.special || family::is_syntax(name) => Self::Hidden,
            name if IN_ANSWERS.contains(&name) => Self::Shown,
            _ => Self::Text,
        }
    }
}

/// A control token and its position in a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Placed {
    /// The bytes that become the token: its name, and the white space around it that the token includes.
    pub range: Range<usize>,
    /// The byte at which the name begins.
    pub name: usize,
    pub id: u32,
    pub kind: Kind,
}

/// The added tokens of one tokenizer.
pub(super) struct AddedTokens {
    /// All control tokens, and all tokens that are searched for before normalization. Of two matches that begin at the
    /// same place, the longer one wins.
    all: Search,
    /// Tokens that are text, and that are searched for before normalization.
    text: Search,
    /// Tokens that are text, and that are searched for after normalization.
    normalized: Search,
    control: HashMap<u32, Kind>,
}

impl AddedTokens {
    pub fn new(encoder: &tokenizers::Tokenizer) -> Self {
        let mut tokens: Vec<_> = encoder.get_added_tokens_decoder().into_iter().collect();
        tokens.sort_by_key(|(id, _)| *id);
        let is_text = |token: &AddedToken| Kind::of(token) == Kind::Text;
        let search = |wanted: &dyn Fn(&AddedToken) -> bool, pattern: &dyn Fn(&AddedToken) -> String| {
            let wanted = tokens.iter().filter(|(_, token)| wanted(token));
            Search::new(wanted.map(|(id, token)| (*id, token.clone(), pattern(token))))
        };
        let literal = |token: &AddedToken| token.content.clone();
        let normal = |token: &AddedToken| {
            let mut content = NormalizedString::from(token.content.as_str());
            // Cannot fail: the crate normalized the same text when it read the file.
            let _ = encoder.get_normalizer().map(|normalizer| normalizer.normalize(&mut content));
            content.get().to_owned()
        };
        Self {
            all: search(&|token| !token.normalized || !is_text(token), &literal),
            text: search(&|token| !token.normalized && is_text(token), &literal),
            normalized: search(&|token| token.normalized && is_text(token), &normal),
            control: tokens
                .iter()
                .map(|(id, token)| (*id, Kind::of(token)))
                .filter(|(_, kind)| *kind != Kind::Text)
                .collect(),
        }
    }

    pub fn is_control(&self, id: u32) -> bool {
        self.control.contains_key(&id)
    }

    /// The control tokens whose names are in `text`, in order.
    pub fn control(&self, text: &str) -> Vec<Placed> {
        let found = self.all.find(text).into_iter();
        let placed = |found: Found| {
            let kind = *self.control.get(&found.id)?;
            Some(Placed { range: found.range, name: found.name, id: found.id, kind })
        };
        found.filter_map(placed).collect()
    }

    /// Splits a text at the tokens of `placed`.
    pub fn cut_at(&self, text: NormalizedString, placed: &[Placed]) -> Vec<Split> {
        cut(text, placed.iter().map(|token| (token.range.clone(), token.id)))
    }

    /// Splits a text at the added tokens that are text. Called once before normalization, and once after it.
    pub fn cut(&self, text: NormalizedString, is_normalized: bool) -> Vec<Split> {
        let search = if is_normalized { &self.normalized } else { &self.text };
        let found = search.find(text.get());
        cut(text, found.into_iter().map(|found| (found.range, found.id)))
    }
}

fn cut(text: NormalizedString, tokens: impl Iterator<Item = (Range<usize>, u32)>) -> Vec<Split> {
    let slice = |range: Range<usize>| text.slice(Slice::Normalized(range)).expect("a part of the text");
    let mut splits = Vec::new();
    let mut from = 0;
    for (range, id) in tokens {
        if from < range.start {
            splits.push(Split::from(slice(from..range.start)));
        }
        from = range.end;
        let part = slice(range);
        let token = Token::new(id, part.get().to_owned(), (0, part.len()));
        splits.push(Split::from((part, Some(vec![token]))));
    }
    if from < text.len() {
        splits.push(Split::from(slice(from..text.len())));
    }
    splits
}

/// Finds tokens in a text: the leftmost one first, and the longest one if several begin at the same place.
struct Search {
    automaton: AhoCorasick,
    tokens: Vec<(u32, AddedToken)>,
}

struct Found {
    range: Range<usize>,
    name: usize,
    id: u32,
}

impl Search {
    fn new(tokens: impl Iterator<Item = (u32, AddedToken, String)>) -> Self {
        let (tokens, patterns): (Vec<_>, Vec<_>) =
            tokens.map(|(id, token, pattern)| ((id, token), pattern)).unzip();
        let automaton = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(patterns);
        Self { automaton: automaton.expect("the crate has built one of these patterns"), tokens }
    }

    fn find(&self, text: &str) -> Vec<Found> {
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        let mut found: Vec<Found> = Vec::new();
        for name in self.automaton.find_iter(text) {
            let (id, token) = &self.tokens[name.pattern()];
            let (before, after) = (&text[..name.start()], &text[name.end()..]);
            let in_word = before.ends_with(is_word) || after.starts_with(is_word);
            if token.single_word && in_word {
                continue;
            }
            let mut range = name.range();
            if token.lstrip {
                // The previous token may already include this white space.
                range.start = before.trim_end().len().max(found.last().map_or(0, |found| found.range.end));
            }
            if token.rstrip {
                range.end += after.len() - after.trim_start().len();
            }
            found.push(Found { range, name: name.start(), id: *id });
        }
        found
    }
}
