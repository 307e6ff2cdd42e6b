//! Token ids to text, one at a time.
//!
//! Invariant: the texts of all pushes and of `finish`, joined, equal [`Tokenizer::decode`] of all ids. `decode` turns a
//! run of byte tokens that is not UTF-8 as a whole into one U+FFFD per byte. So the first character of a run is not
//! known before its last byte, and the run is held back until it ends or is found to be broken. Each token costs O(its
//! length); nothing is decoded twice.

use super::tokenizer::{Piece, Tokenizer};

/// Turns a stream of token ids into a stream of text.
#[derive(Clone)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// The current run of byte tokens as long as it may be UTF-8; empty once the run is broken.
    run: Vec<u8>,
    /// Length of the part of `run` that is complete characters.
    complete: usize,
    /// Whether the current run can no longer be UTF-8. Its bytes were then given out as U+FFFD.
    broken: bool,
    out: String,
}

impl Tokenizer {
    /// The text of `ids`. Ids that the tokenizer does not know add nothing. A run of byte tokens that is not UTF-8 adds
    /// one U+FFFD per byte.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut detokenizer = self.detokenizer(skip_special);
        let mut text = String::new();
        for &id in ids {
            text.push_str(detokenizer.push(id));
        }
        text.push_str(detokenizer.finish());
        text
    }

    /// A detokenizer, which decodes one id at a time.
    pub fn detokenizer(&self, skip_special: bool) -> Detokenizer {
        Detokenizer::new(self.clone(), skip_special)
    }
}

impl Detokenizer {
    fn new(tokenizer: Tokenizer, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, run: Vec::new(), complete: 0, broken: false, out: String::new() }
    }

    /// Takes the next token and returns the text it completes: whole characters, perhaps none.
    ///
    /// Ids that the tokenizer does not know are ignored, and so are special tokens if `skip_special` is set. Neither
    /// ends a run of byte tokens.
    pub fn push(&mut self, id: u32) -> &str {
        self.out.clear();
        match self.tokenizer.piece(id) {
            None => {}
            Some(_) if self.skip_special && self.tokenizer.is_special(id) => {}
            Some(Piece::Byte(_)) if self.broken => self.out.push(char::REPLACEMENT_CHARACTER),
            Some(Piece::Byte(byte)) => self.extend_run(byte),
            Some(Piece::Text(_)) => {
                self.end_run();
                // A second lookup, because `end_run` borrows all of `self`.
                if let Some(Piece::Text(text)) = self.tokenizer.piece(id) {
                    self.out.push_str(text);
                }
            }
        }
        &self.out
    }

    /// Ends the stream and returns the text held back: the last run of byte tokens, as `decode` would show it.
    pub fn finish(&mut self) -> &str {
        self.out.clear();
        self.end_run();
        &self.out
    }

    fn extend_run(&mut self, byte: u8) {
        self.run.push(byte);
        match std::str::from_utf8(&self.run[self.complete..]) {
            Ok(_) => self.complete = self.run.len(),
            Err(error) if error.error_len().is_none() => self.complete += error.valid_up_to(),
            Err(_) => {
                self.broken = true;
                self.give_out_run();
            }
        }
    }

    fn end_run(&mut self) {
        self.give_out_run();
        self.broken = false;
    }

    fn give_out_run(&mut self) {
        match std::str::from_utf8(&self.run) {
            Ok(text) => self.out.push_str(text),
            Err(_) => self.out.extend(std::iter::repeat_n(char::REPLACEMENT_CHARACTER, self.run.len())),
        }
        self.run.clear();
        self.complete = 0;
    }
}
