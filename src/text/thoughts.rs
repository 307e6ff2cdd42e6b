//! Separates the thoughts of an answer from its text, by token ids.
//!
//! Some models think before they answer. Their vocabularies have a token that begins a thought and one that ends it, so
//! a text that only spells the names of these tokens never begins or ends a thought. White space at the end of a
//! thought and empty lines after it are part of the syntax.

use super::detokenizer::Detokenizer;
use super::family::THINK;
use super::tokenizer::Tokenizer;

/// The tokens around a thought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThoughtTokens {
    pub open: u32,
    pub close: u32,
    /// The text that follows `open` and is not part of the thought.
    header: &'static str,
    end_of_turn: Option<u32>,
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
        let family = self.family();
        let syntax = family.and_then(|family| family.thought).unwrap_or(THINK);
        Some(ThoughtTokens {
            open: self.token_id(syntax.open)?,
            close: self.token_id(syntax.close)?,
            header: syntax.header,
            end_of_turn: self.end_of_turn(),
        })
    }
}

impl ThoughtTokens {
    /// Where the answer to a prompt begins.
    pub fn start_after(&self, prompt: &[u32]) -> ThoughtStart {
        let turn = prompt.rsplit(|id| Some(*id) == self.end_of_turn).next().unwrap_or_default();
        match turn.iter().rfind(|id| [self.open, self.close].contains(id)) {
            Some(id) if *id == self.open => ThoughtStart::Inside,
            Some(_) => ThoughtStart::After,
            None => ThoughtStart::Before,
        }
    }
}

/// What a token adds to an answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Spoken {
    pub thought: String,
    pub text: String,
    /// Whether the token belongs to a thought. The tokens around it do.
    pub is_thought: bool,
}

/// Decodes an answer, and separates its thoughts from its text.
#[derive(Clone)]
pub struct AnswerReader {
    detokenizer: Detokenizer,
    thoughts: Option<Thoughts>,
}

#[derive(Clone)]
struct Thoughts {
    tokens: ThoughtTokens,
    is_inside: bool,
    /// Whether the header may still come.
    at_header: bool,
    /// Whether the text has not begun after a thought.
    at_text: bool,
    /// The end of the thought, held back because it may be the header or the white space at its end.
    held: String,
}

impl AnswerReader {
    /// A reader of answers that are text only.
    pub fn new(detokenizer: Detokenizer) -> Self {
        Self { detokenizer, thoughts: None }
    }

    /// The answer may have thoughts, and begins there.
    #[must_use]
    pub fn with_thoughts(self, tokens: ThoughtTokens, start: ThoughtStart) -> Self {
        let is_inside = start == ThoughtStart::Inside;
        let thoughts =
            Thoughts { tokens, is_inside, at_header: is_inside, at_text: false, held: String::new() };
        Self { thoughts: Some(thoughts), ..self }
    }

    /// The answer is a text of its own. Otherwise it continues the prompt's text.
    #[must_use]
    pub fn at_start(self) -> Self {
        Self { detokenizer: self.detokenizer.at_start(), ..self }
    }

    /// Takes the next token.
    pub fn push(&mut self, id: u32) -> Spoken {
        let Some(thoughts) = &mut self.thoughts else {
            return Spoken { text: self.detokenizer.push(id).to_owned(), ..Spoken::default() };
        };
        match id {
            _ if id == thoughts.tokens.open && !thoughts.is_inside => {
                let text = thoughts.text(self.detokenizer.finish());
                (thoughts.is_inside, thoughts.at_header) = (true, true);
                Spoken { text, is_thought: true, ..Spoken::default() }
            }
            _ if id == thoughts.tokens.close && thoughts.is_inside => {
                let thought = thoughts.last_of_thought(self.detokenizer.finish());
                (thoughts.is_inside, thoughts.at_text) = (false, true);
                Spoken { thought, is_thought: true, ..Spoken::default() }
            }
            // A mark in the wrong place is syntax too.
            _ if [thoughts.tokens.open, thoughts.tokens.close].contains(&id) => {
                Spoken { is_thought: thoughts.is_inside, ..Spoken::default() }
            }
            _ if thoughts.is_inside => {
                let thought = thoughts.thought(self.detokenizer.push(id));
                Spoken { thought, is_thought: true, ..Spoken::default() }
            }
            _ => Spoken { text: thoughts.text(self.detokenizer.push(id)), ..Spoken::default() },
        }
    }

    /// Ends the answer.
    pub fn finish(&mut self) -> Spoken {
        let rest = self.detokenizer.finish();
        match &mut self.thoughts {
            Some(thoughts) if thoughts.is_inside => {
                Spoken { thought: thoughts.last_of_thought(rest), is_thought: true, ..Spoken::default() }
            }
            Some(thoughts) => Spoken { text: thoughts.text(rest), ..Spoken::default() },
            None => Spoken { text: rest.to_owned(), ..Spoken::default() },
        }
    }
}

impl Thoughts {
    /// More of a thought, without what is held back.
    fn thought(&mut self, more: &str) -> String {
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
    fn last_of_thought(&mut self, more: &str) -> String {
        let thought = self.thought(more);
        self.held.clear();
        thought
    }

    /// More of the text. Empty lines before it are removed.
    fn text(&mut self, more: &str) -> String {
        let text = if self.at_text { more.trim_start_matches('\n') } else { more };
        self.at_text &= text.is_empty();
        text.to_owned()
    }
}
