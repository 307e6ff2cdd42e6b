//! Which format a file has, or what else it looks like.
//!
//! The bytes decide, never a label: clients send JPEGs as `image/png`.

use std::fmt;

/// A format that [`decode`](super::decode()) reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Png,
    Jpeg,
    WebP,
    Gif,
    Bmp,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Png => "PNG",
            Self::Jpeg => "JPEG",
            Self::WebP => "WebP",
            Self::Gif => "GIF",
            Self::Bmp => "BMP",
        })
    }
}

impl Format {
    /// The format by the first bytes.
    pub fn of(bytes: &[u8]) -> Option<Self> {
        match bytes {
            [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => Some(Self::Png),
            [0xff, 0xd8, 0xff, ..] => Some(Self::Jpeg),
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some(Self::WebP),
            [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Some(Self::Gif),
            [b'B', b'M', ..] => Some(Self::Bmp),
            _ => None,
        }
    }
}

/// What a file that is no supported image looks like, for the person who sent it.
pub(super) fn looks_like(bytes: &[u8]) -> &'static str {
    let text = std::str::from_utf8(&bytes[..bytes.len().min(256)]);
    // A cut in the middle of a character is no sign of other data.
    let text = text.or_else(|e| std::str::from_utf8(&bytes[..e.valid_up_to()])).unwrap_or("");
    let begins = text.trim_start().to_ascii_lowercase();
    let is_text = text.len() + 4 > bytes.len().min(256) && !text.contains('\0');
    match bytes {
        [_, _, _, _, b'f', b't', b'y', b'p', ..] => "it looks like a HEIC or AVIF image, or like a video",
        [b'I', b'I', 42, 0, ..] | [b'M', b'M', 0, 42, ..] => "it looks like a TIFF image",
        [b'%', b'P', b'D', b'F', ..] => "it looks like a PDF document",
        _ if begins.contains("<svg") => "it looks like an SVG drawing",
        _ if begins.starts_with("<!doctype html") || begins.starts_with("<html") => {
            "it looks like a web page"
        }
        _ if is_text => "it looks like text",
        _ => "its first bytes are of no known image",
    }
}
