//! The tokens around the thoughts of an answer, and what of a thought is syntax.
//!
//! Some models think before they answer. Their vocabularies have a token that begins a thought and one that ends it, so
//! a text that only spells the names of these tokens never begins or ends a thought. White space at the end of a
//! thought and empty lines after it are part of the syntax.

use super::family::{THINK, ThoughtSyntax};
use super::tokenizer::Tokenizer;

/// The tokens around a thought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThoughtTokens {
    pub open: u32,
    pub close: u32,
    /// The text that follows `open` and is not part of the thought.
    header: &'static str,
    /// The tokens that end what came before. After them, a thought may begin again.
    ends: [Option<u32>; 2],
}

/// Where an answer begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThoughtStart {
    /// Within a thought, which the prompt opens.
    Inside,
    /// Before the text. The model may open a thought.
    Before,
    /// In the text: the prompt has a thought already, which is empty if thinking is off.
    After,
}

impl Tokenizer {
    /// The tokens around thoughts. `None` = the vocabulary has none, so its models do not think.
    pub fn thought_tokens(&self) -> Option<ThoughtTokens> {
        let tokens = |syntax: ThoughtSyntax| {
            Some(ThoughtTokens {
                open: self.token_id(syntax.open)?,
                close: self.token_id(syntax.close)?,
                header: syntax.header,
                ends: [self.end_of_turn(), syntax.again_after.and_then(|token| self.token_id(token))],
            })
        };
        let of_family = self.family().and_then(|family| family.thought).and_then(tokens);
        // A model may have learned the tokens of others.
        of_family.or_else(|| tokens(THINK))
    }
}

impl ThoughtTokens {
    /// Where the answer to a prompt begins.
    pub fn start_after(&self, prompt: &[u32]) -> ThoughtStart {
        let turn = prompt.rsplit(|id| self.ends.contains(&Some(*id))).next().unwrap_or_default();
        match turn.iter().rfind(|id| [self.open, self.close].contains(id)) {
            Some(id) if *id == self.open => ThoughtStart::Inside,
            Some(_) => ThoughtStart::After,
            None => ThoughtStart::Before,
        }
    }
}

/// Where an answer is, among its thoughts and its text.
#[derive(Clone)]
pub(super) struct Thoughts {
    pub tokens: ThoughtTokens,
    pub is_inside: bool,
    /// Whether the header may still come.
    at_header: bool,
    /// Whether the text has not begun after a thought.
    at_text: bool,
    /// The end of the thought, held back because it may be the header or the white space at its end.
    held: String,
}

impl Thoughts {
    pub fn new(tokens: ThoughtTokens, start: ThoughtStart) -> Self {
        let is_inside = start == ThoughtStart::Inside;
        Self { tokens, is_inside, at_header: is_inside, at_text: false, held: String::new() }
    }

    /// Begins a thought.
    pub fn open(&mut self) {
        (self.is_inside, self.at_header) = (true, true);
    }

    /// Ends a thought, of which `more` is the end.
    pub fn close(&mut self, more: &str) -> String {
        (self.is_inside, self.at_text) = (false, true);
        self.last_of_thought(more)
    }

    /// More of a thought, without what is held back.
    pub fn thought(&mut self, more: &str) -> String {
        self.held.push_str(more);
        if self.at_header {
            if self.held.len() < self.tokens.header.len() && self.tokens.header.starts_with(&self.held) {
                return String::new();
            }
            self.at_header = false;
            if let Some(rest) = self.held.strip_prefix(self.tokens.header) {
                self.held = rest.to_owned();
            }
        }
        let white = self.held.split_off(self.held.trim_end().len());
        std::mem::replace(&mut self.held, white)
    }

    /// The rest of a thought that ends.
    pub fn last_of_thought(&mut self, more: &str) -> String {
        let thought = self.thought(more);
        self.held.clear();
        thought
    }

    /// More of the text. Empty lines before it are removed.
    pub fn text(&mut self, more: &str) -> String {
        let text = if self.at_text { more.trim_start_matches('\n') } else { more };
        self.at_text &= text.is_empty();
        text.to_owned()
    }
}
