//! Token ids to text, one at a time.
//!
//! Invariant: the texts of all pushes and of `finish`, joined, equal [`Tokenizer::decode`] of all ids, which is what
//! `String::from_utf8_lossy` makes of the tokens' bytes. Byte tokens may cut a character, or be none. Each maximal part
//! of a character then becomes one U+FFFD, as Unicode recommends. A character comes with its last byte, so at most
//! three bytes are held back.
//!
//! The `ByteFallback` of transformers differs: it turns a run of byte tokens that is not UTF-8 as a whole into one
//! U+FFFD per byte, the complete characters of the run included. An answer that ends within a character would lose
//! those before it, and a stream would have to hold them back. llama.cpp joins bytes as this module does.

use super::tokenizer::{Piece, Tokenizer};

/// Turns a stream of token ids into a stream of text.
#[derive(Clone)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// The first bytes of a character, from byte tokens.
    begun: Vec<u8>,
    out: String,
}

impl Tokenizer {
    /// The text of `ids`. Ids that the tokenizer does not know add nothing. Bytes of an incomplete character add one
    /// U+FFFD.
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
        Self { tokenizer, skip_special, begun: Vec::new(), out: String::new() }
    }

    /// Takes the next token and returns the text it completes: whole characters, perhaps none.
    ///
    /// Ids that the tokenizer does not know are ignored, and so are special tokens if `skip_special` is set. Neither
    /// ends a character.
    pub fn push(&mut self, id: u32) -> &str {
        self.out.clear();
        match self.tokenizer.piece(id) {
            // A token without text does not end a character either.
            None | Some(Piece::Text("")) => {}
            Some(_) if self.skip_special && self.tokenizer.is_special(id) => {}
            Some(Piece::Byte(byte)) => self.take_byte(byte),
            Some(Piece::Text(_)) => {
                self.end_character();
                // A second lookup, because `end_character` borrows all of `self`.
                if let Some(Piece::Text(text)) = self.tokenizer.piece(id) {
                    self.out.push_str(text);
                }
            }
        }
        &self.out
    }

    /// Ends the stream and returns the text held back: U+FFFD, if the last character is incomplete.
    pub fn finish(&mut self) -> &str {
        self.out.clear();
        self.end_character();
        &self.out
    }

    fn take_byte(&mut self, byte: u8) {
        self.begun.push(byte);
        // `begun` was the beginning of a character. The byte goes on with it, ends it, or stands after a cut.
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

    /// Ends a character that is incomplete.
    fn end_character(&mut self) {
        if !self.begun.is_empty() {
            self.out.push(char::REPLACEMENT_CHARACTER);
            self.begun.clear();
        }
    }
}
