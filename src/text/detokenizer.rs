//! Token ids to text, one at a time.
//!
//! Invariant: what all pushes and `finish` give out, joined, equals [`Tokenizer::decode`] of all ids. Hence
//! a run of byte tokens is held until it ends or is broken: `decode` turns a run that is not UTF-8 as a whole
//! into one U+FFFD per byte, so its first character is not known to be one before its last byte came.
//! Each token costs O(its length); nothing is decoded twice.

use super::tokenizer::{Piece, Tokenizer};

/// Turns a stream of token ids into a stream of text.
#[derive(Clone)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// The current run of byte tokens, as long as it may be UTF-8; empty once it is broken.
    run: Vec<u8>,
    /// Length of the part of `run` that is complete characters.
    complete: usize,
    /// The current run can no longer be UTF-8, and was given out as U+FFFD so far.
    broken: bool,
    out: String,
}

impl Tokenizer {
    /// The text of `ids`. Unknown ids give nothing; a run of byte tokens that is not UTF-8 gives one U+FFFD
    /// per byte.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut detokenizer = self.detokenizer(skip_special);
        let mut text = String::new();
        for &id in ids {
            text.push_str(detokenizer.push(id));
        }
        text.push_str(detokenizer.finish());
        text
    }

    /// Decodes one id at a time.
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
    /// Ids that the tokenizer does not know, and special tokens if they are skipped, are as if they were not
    /// there: they do not even end a run of byte tokens.
    pub fn push(&mut self, id: u32) -> &str {
        self.out.clear();
        match self.tokenizer.piece(id) {
            None => {}
            Some(_) if self.skip_special && self.tokenizer.is_special(id) => {}
            Some(Piece::Byte(_)) if self.broken => self.out.push(char::REPLACEMENT_CHARACTER),
            Some(Piece::Byte(byte)) => self.extend_run(byte),
            Some(Piece::Text(_)) => {
                self.end_run();
                // Looked up again, since `end_run` needs all of self.
                if let Some(Piece::Text(text)) = self.tokenizer.piece(id) {
                    self.out.push_str(text);
                }
            }
        }
        &self.out
    }

    /// Ends the stream and returns the text still held: a run of byte tokens, as `decode` would show it.
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
