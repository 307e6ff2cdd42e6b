//! Decodes token ids to text, one at a time.
//!
//! A decoder with the step `Strip`, as in Llama 2, removes a space from the start of a text. A detokenizer does so only
//! after [`Detokenizer::at_start`], because the space belongs to a text that continues another.
//!
//! Invariant: the texts of all pushes and of `finish`, joined, equal [`Tokenizer::decode`] of all ids, which equals
//! `String::from_utf8_lossy` of the tokens' bytes without the stripped spaces. Byte tokens may form incomplete or invalid characters. Each maximal
//! part of a character then becomes one U+FFFD, as Unicode recommends. A character is returned with its last byte, so
//! at most three bytes are held back.
//!
//! The `ByteFallback` of transformers differs: if a run of byte tokens is not valid UTF-8 as a whole, every byte of the
//! run becomes one U+FFFD, including complete characters. An answer that ends within a character would lose the
//! complete characters before it, and a stream would have to hold them back. llama.cpp joins bytes like this module.

use super::tokenizer::{Piece, Tokenizer};

/// Turns a stream of token ids into a stream of text.
#[derive(Clone)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// The first bytes of a character, from byte tokens.
    begun: Vec<u8>,
    /// The number of spaces that are still removed from the start of the text.
    stripped: usize,
    out: String,
}

impl Tokenizer {
    /// The text of `ids`, which are the start of a text. Ids that the tokenizer does not know add nothing. Bytes of an incomplete character add one
    /// U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut detokenizer = self.detokenizer(skip_special).at_start();
        let mut text = String::new();
        for &id in ids {
            text.push_str(detokenizer.push(id));
        }
        text.push_str(detokenizer.finish());
        text
    }

    /// A detokenizer, which decodes one id at a time of a text that continues another.
    pub fn detokenizer(&self, skip_special: bool) -> Detokenizer {
        Detokenizer::new(self.clone(), skip_special)
    }
}

impl Detokenizer {
    fn new(tokenizer: Tokenizer, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, begun: Vec::new(), stripped: 0, out: String::new() }
    }

    /// Decodes the start of a text.
    #[must_use]
    pub fn at_start(self) -> Self {
        let stripped = self.tokenizer.stripped();
        Self { stripped, ..self }
    }

    /// Takes the next token and returns the text that it completes: zero or more whole characters.
    ///
    /// Ids that the tokenizer does not know are ignored, and so are special tokens if `skip_special` is set. Neither
    /// ends a character.
    pub fn push(&mut self, id: u32) -> &str {
        self.out.clear();
        // A clone shares the table. `self` can change while the piece is in use.
        let tokenizer = self.tokenizer.clone();
        match tokenizer.piece(id) {
            // A token without text does not end a character either.
            None | Some(Piece::Text("")) => {}
            Some(_) if self.skip_special && self.tokenizer.is_special(id) => {}
            Some(Piece::Byte(byte)) => self.take_byte(byte),
            Some(Piece::Bytes(bytes)) => bytes.iter().for_each(|byte| self.take_byte(*byte)),
            Some(Piece::Text(text)) => {
                self.end_character();
                self.out.push_str(text);
            }
        }
        self.strip_start();
        &self.out
    }

    /// Ends the stream. Returns U+FFFD if the last character is incomplete, otherwise no text.
    pub fn finish(&mut self) -> &str {
        self.out.clear();
        self.end_character();
        &self.out
    }

    /// Removes spaces from the start of the text. Its first other character ends this.
    fn strip_start(&mut self) {
        while self.stripped > 0 && !self.out.is_empty() {
            match self.out.starts_with(' ') {
                true => {
                    self.out.remove(0);
                    self.stripped -= 1;
                }
                false => self.stripped = 0,
            }
        }
    }

    fn take_byte(&mut self, byte: u8) {
        self.begun.push(byte);
        // `begun` was the beginning of a character. The byte continues the character, completes it, or does not belong
        // to it.
        match std::str::from_utf8(&self.begun) {
            Ok(character) => {
                self.out.push_str(character);
                self.begun.clear();
            }
            Err(error) if error.error_len().is_none() => {}
            Err(_) if self.begun.len() == 1 => self.end_character(),
            Err(_) => {
                self.begun.pop();
                self.end_character();
                self.take_byte(byte);
            }
        }
    }

    /// Writes U+FFFD for a character that stays incomplete.
    fn end_character(&mut self) {
        if !self.begun.is_empty() {
            self.out.push(char::REPLACEMENT_CHARACTER);
            self.begun.clear();
        }
    }
}
