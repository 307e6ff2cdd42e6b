//! The pixels of one picture, with the size that they have.

use sha2::{Digest, Sha256};

/// A picture of `width` x `height` pixels, of 3 bytes each: red, green and blue. The rows go from top to bottom,
/// without gaps.
#[derive(Clone, PartialEq, Eq)]
pub struct Rgb {
    width: u32,
    height: u32,
    pixels: Vec<u8>,
}

impl Rgb {
    /// A picture of these bytes, `[height, width, 3]`. Panics if they are too few or too many, or if there are none.
    pub fn new(width: u32, height: u32, pixels: Vec<u8>) -> Self {
        let bytes = width as usize * height as usize * 3;
        assert!(bytes > 0 && pixels.len() == bytes, "{} bytes for {width} x {height} pixels", pixels.len());
        Self { width, height, pixels }
    }

    /// In pixels, at least 1.
    pub fn width(&self) -> u32 {
        self.width
    }

    /// In pixels, at least 1.
    pub fn height(&self) -> u32 {
        self.height
    }

    /// `[height, width, 3]`
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    pub fn into_pixels(self) -> Vec<u8> {
        self.pixels
    }

    /// The SHA-256 of the size and of all pixels. Pictures that a model must tell apart have different ones, so it may
    /// stand for a picture in the key of a cache.
    pub fn sha256(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update(self.width.to_le_bytes());
        hash.update(self.height.to_le_bytes());
        hash.update(&self.pixels);
        hash.finalize().into()
    }
}

/// The size alone: a failed assertion does not print millions of pixels.
impl std::fmt::Debug for Rgb {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "Rgb({} x {})", self.width, self.height)
    }
}
