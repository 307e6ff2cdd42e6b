//! The content of a message: a text, and images at places in it.
//!
//! This module does not know what an image shows. An image is the number that the caller gave to it.
//!
//! Templates get a content without images as a text, and one with images as the list of parts that transformers'
//! templates read: `{"type": "text", "text": ...}` and `{"type": "image"}`. Neighboring texts are one part, because
//! templates may trim each part.

use std::ops::Range;

use serde::{Deserialize, Serialize, Serializer};
use serde_json::json;

const PARAGRAPH: &str = "\n\n";

/// A text with images in it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(from = "String")]
pub struct Content {
    /// All texts, without what is between them.
    text: String,
    /// The byte of the text before which an image is, and the caller's number of the image. In ascending order of bytes.
    images: Vec<(usize, usize)>,
}

/// A part of a content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part<'a> {
    /// A text, which is not empty.
    Text(&'a str),
    /// The caller's number of an image.
    Image(usize),
}

impl Content {
    /// All texts, as if there were no images.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The numbers of the images, in order.
    pub fn images(&self) -> impl Iterator<Item = usize> {
        self.images.iter().map(|(_, image)| *image)
    }

    /// Whether there is neither a text nor an image.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.images.is_empty()
    }

    /// The parts in order, of which no two texts are neighbors.
    pub fn parts(&self) -> Vec<Part<'_>> {
        let mut parts = Vec::with_capacity(2 * self.images.len() + 1);
        let text =
            |range: Range<usize>| Some(Part::Text(&self.text[range.clone()])).filter(|_| !range.is_empty());
        let mut from = 0;
        for (at, image) in &self.images {
            parts.extend(text(from..*at));
            parts.push(Part::Image(*image));
            from = *at;
        }
        parts.extend(text(from..self.text.len()));
        parts
    }

    pub fn push_text(&mut self, text: &str) {
        self.text.push_str(text);
    }

    /// Adds an image, with the caller's number of it.
    pub fn push_image(&mut self, image: usize) {
        self.images.push((self.text.len(), image));
    }

    /// Adds the parts of another content.
    pub fn push(&mut self, other: &Content) {
        let before = self.text.len();
        self.images.extend(other.images.iter().map(|(at, image)| (before + at, *image)));
        self.text.push_str(&other.text);
    }

    /// Adds the parts of another content as a paragraph: two texts that meet are separated by an empty line.
    pub fn push_paragraph(&mut self, other: &Content) {
        let ends_with_text = self.images.last().map_or(0, |(at, _)| *at) < self.text.len();
        let begins_with_text = other.images.first().map_or(other.text.len(), |(at, _)| *at) > 0;
        if ends_with_text && begins_with_text {
            self.text.push_str(PARAGRAPH);
        }
        self.push(other);
    }

    /// The content without white space at its beginning and end. An image there is no white space.
    #[must_use]
    pub(super) fn trimmed(&self) -> Self {
        let first = self.images.first().map_or(self.text.len(), |(at, _)| *at);
        let last = self.images.last().map_or(0, |(at, _)| *at);
        let end = last.max(self.text.trim_end_matches(is_python_space).len());
        let begin = first.min(self.text.len() - self.text.trim_start_matches(is_python_space).len()).min(end);
        let images = self.images.iter().map(|(at, image)| (at - begin, *image)).collect();
        Self { text: self.text[begin..end].to_owned(), images }
    }

    /// The content with the result of `change` for each of its texts.
    pub(super) fn with_texts(&self, change: impl Fn(&str) -> String) -> Self {
        let mut changed = Self::default();
        for part in self.parts() {
            match part {
                Part::Text(text) => changed.push_text(&change(text)),
                Part::Image(image) => changed.push_image(image),
            }
        }
        changed
    }

    /// The parts before the text at the end, and this text, which may be empty.
    pub(super) fn split_last_text(&self) -> (Self, &str) {
        let end = self.images.last().map_or(0, |(at, _)| *at);
        (Self { text: self.text[..end].to_owned(), images: self.images.clone() }, &self.text[end..])
    }

    /// An estimate of the memory that the content takes in a template.
    pub(super) fn bytes(&self) -> usize {
        const PART_BYTES: usize = 256;
        self.text.len() + 2 * PART_BYTES * self.images.len()
    }
}

impl From<String> for Content {
    fn from(text: String) -> Self {
        Self { text, images: Vec::new() }
    }
}

impl From<&String> for Content {
    fn from(text: &String) -> Self {
        text.clone().into()
    }
}

impl From<&str> for Content {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

impl Serialize for Content {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.images.is_empty() {
            return serializer.serialize_str(&self.text);
        }
        serializer.collect_seq(self.parts().into_iter().map(|part| match part {
            Part::Text(text) => json!({"type": "text", "text": text}),
            Part::Image(_) => json!({"type": "image"}),
        }))
    }
}

/// Python's `str.strip()`. It removes Unicode's whitespace and the four separators U+001C..U+001F.
pub(super) fn python_trim(text: &str) -> &str {
    text.trim_matches(is_python_space)
}

pub(super) fn is_python_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}
