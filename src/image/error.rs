//! Errors of pictures. Each is one line that says what to do, and begins as the rest of a sentence about a part of a
//! request.

use super::format::Format;

/// What a client may send, for messages.
pub(super) const EXPECTED: &str = "expected a PNG, JPEG, WebP, GIF or BMP file";

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    #[error(
        "is an address ({scheme}:), and this server loads nothing from addresses; send the image itself, as \
         \"data:image/png;base64,...\""
    )]
    Address { scheme: String },
    #[error(
        "is a URI with the scheme {scheme:?}; expected the image itself, as \"data:image/png;base64,...\" or as base64 \
         without a prefix"
    )]
    Scheme { scheme: String },
    #[error("is a data: URI without a comma before its data; expected \"data:image/png;base64,...\"")]
    NoComma,
    #[error(
        "is not valid base64: {problem}; expected the image as base64, with or without \"data:image/png;base64,\""
    )]
    Base64 { problem: String },
    #[error("is an image of more than {} MB; send a smaller file", max_bytes / 1_000_000)]
    TooManyBytes { max_bytes: usize },
    #[error("holds no data; {EXPECTED}")]
    Empty,
    /// `found` says what the file looks like.
    #[error("is not a supported image: {found}; {EXPECTED}")]
    Unsupported { found: &'static str },
    #[error("is a {format} image without pixels ({width} x {height}); expected at least 1 x 1")]
    NoPixels { format: Format, width: u32, height: u32 },
    #[error(
        "is a {format} image of {width} x {height} pixels; expected at most {max_side} on each side and \
         {} million in all. Send it at a smaller size",
        max_pixels / 1_000_000
    )]
    TooManyPixels { format: Format, width: u32, height: u32, max_side: u32, max_pixels: u64 },
    #[error("is a {format} image that ends too early; expected the whole file")]
    Truncated { format: Format },
    /// A JPEG's scans, each of which is a pass over all pixels.
    #[error(
        "is a JPEG image of {width} x {height} pixels in {scans} scans, which is too much work; save it again as an \
         ordinary JPEG"
    )]
    TooManyScans { width: u32, height: u32, scans: usize },
    #[error(
        "is a {format} image that cannot be decoded: {problem}; open it in an image editor and save it again"
    )]
    Damaged { format: Format, problem: String },
    #[error("is a {format} image at which the decoder failed; open it in an image editor and save it again")]
    DecoderFailed { format: Format },
}
