//! The tokens of images in a prompt.
//!
//! A template writes one token for an image. The model was trained with more: the token that begins an image, one token in
//! each place of the image's embeddings, and the token that ends it, with an empty line before and after in some families.
//! These are put into the text before it is tokenized, because their newlines join those of the text beside them in one
//! token.
//!
//! Only a token that the template wrote is an image's. The name of such a token in the text of a message is text.

use std::ops::Range;

use super::added::{Kind, Placed};
use super::error::TextError;
use super::family::ImageSyntax;
use super::provenance::Prompt;
use super::tokenizer::Tokenizer;

/// The tokens of images in one vocabulary.
#[derive(Debug, Clone, Copy)]
pub struct ImageTokens {
    syntax: ImageSyntax,
    /// `begin` or `soft`.
    written: u32,
    begin: u32,
    soft: u32,
    end: u32,
}

impl ImageTokens {
    /// The ids, which no answer may have: a model that draws one would speak of an image that is not there.
    pub fn ids(&self) -> [u32; 3] {
        [self.begin, self.soft, self.end]
    }
}

impl Tokenizer {
    /// The tokens of images. `None` = the vocabulary lacks them, so no prompt can have an image.
    pub fn image_tokens(&self) -> Option<ImageTokens> {
        let syntax = self.family()?.image?;
        let id = |token: &str| self.token_id(token);
        let (written, begin) = (id(syntax.written)?, id(syntax.begin)?);
        Some(ImageTokens { syntax, written, begin, soft: id(syntax.soft)?, end: id(syntax.end)? })
    }
}

impl Prompt {
    /// The ids of a prompt with images of so many `tokens` each, and the positions of these tokens, image by image. One token
    /// before the positions begins the image, and one after them ends it.
    ///
    /// An error if the template did not write so many images.
    pub fn ids_with_images(
        &self,
        tokenizer: &Tokenizer,
        image: &ImageTokens,
        tokens: &[usize],
    ) -> Result<(Vec<u32>, Vec<Range<usize>>), TextError> {
        // The template writes one of them, and never the other.
        for (id, name) in [(image.begin, image.syntax.begin), (image.soft, image.syntax.soft)] {
            let expected = if id == image.written { tokens.len() } else { 0 };
            let written = self.placed.iter().filter(|token| token.id == id).count();
            if written != expected {
                return Err(TextError::Images { name, written, expected });
            }
        }
        // Nothing in the text depends on the number of an image's tokens, so one stands for all of its tokens.
        let whole = self.with_whole_images(image);
        let short = tokenizer.encode_around(&whole.text, &whole.placed, false)?;
        let mut ids = Vec::with_capacity(short.len() + tokens.iter().sum::<usize>());
        let (mut positions, mut left) = (Vec::with_capacity(tokens.len()), tokens.iter());
        for id in short {
            if id == image.soft {
                let count = *left.next().expect("one token for each image");
                positions.push(ids.len()..ids.len() + count);
                ids.extend(std::iter::repeat_n(id, count));
            } else {
                ids.push(id);
            }
        }
        Ok((ids, positions))
    }

    /// The prompt with all tokens of each image, of which one is for its embeddings.
    fn with_whole_images(&self, image: &ImageTokens) -> Prompt {
        let ImageSyntax { written, begin, soft, end, around } = image.syntax;
        let mut whole = Prompt { text: String::new(), placed: Vec::with_capacity(3 * self.placed.len()) };
        let mut from = 0;
        for token in &self.placed {
            if token.id != image.written {
                let moved = whole.text.len() - from;
                let range = token.range.start + moved..token.range.end + moved;
                whole.placed.push(Placed { range, name: token.name + moved, ..token.clone() });
                continue;
            }
            whole.text.push_str(&self.text[from..token.name]);
            whole.text.push_str(around);
            for (name, id) in [(begin, image.begin), (soft, image.soft), (end, image.end)] {
                let at = whole.text.len();
                whole.text.push_str(name);
                whole.placed.push(Placed { range: at..whole.text.len(), name: at, id, kind: Kind::Hidden });
            }
            whole.text.push_str(around);
            from = token.name + written.len();
        }
        whole.text.push_str(&self.text[from..]);
        whole
    }
}
