//! The bytes of an image file, from the text that a client sent.
//!
//! Clients send `data:` URIs in many spellings, and base64 without a prefix. No address is loaded: a server that
//! fetches what a request names can be made to ask hosts that only it reaches.

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

use super::error::ImageError;

/// Some encoders leave bits in the last character. Padding and the second alphabet are gone when this decodes.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_allow_trailing_bits(true)
        .with_decode_padding_mode(DecodePaddingMode::RequireNone),
);

/// The longest name of a scheme in a message, in characters.
const MAX_SCHEME_CHARS: usize = 20;

/// The file in a `data:` URI or in base64 without a prefix, of at most `max_bytes` bytes.
///
/// The media type and all parameters of the URI are ignored, and base64 is taken for granted, because clients forget to
/// say `;base64`. Both alphabets of RFC 4648 are read, with or without padding and with white space in any place; in a
/// URI also with percent-encoded characters. The length is checked before memory is reserved.
///
/// Errors: [`ImageError::Address`], [`Scheme`](ImageError::Scheme), [`NoComma`](ImageError::NoComma),
/// [`Base64`](ImageError::Base64), [`TooManyBytes`](ImageError::TooManyBytes), [`Empty`](ImageError::Empty).
pub fn file_of(text: &str, max_bytes: usize) -> Result<Vec<u8>, ImageError> {
    let text = text.trim_start();
    let (data, is_uri) = match scheme(text) {
        None => (text, false),
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("data") => {
            (rest.split_once(',').ok_or(ImageError::NoComma)?.1, true)
        }
        Some((scheme, _)) => {
            let scheme = scheme.to_ascii_lowercase();
            return Err(match scheme.as_str() {
                "http" | "https" | "file" | "ftp" => ImageError::Address { scheme },
                _ => ImageError::Scheme { scheme: scheme.chars().take(MAX_SCHEME_CHARS).collect() },
            });
        }
    };
    let characters = || Characters { bytes: data.as_bytes(), has_percents: is_uri };
    let count = characters().filter(|byte| *byte != b'=').count();
    if count * 3 / 4 > max_bytes {
        return Err(ImageError::TooManyBytes { max_bytes });
    }
    let mut base64 = Vec::with_capacity(count);
    base64.extend(characters());
    while base64.last() == Some(&b'=') {
        base64.pop();
    }
    if base64.is_empty() {
        return Err(ImageError::Empty);
    }
    BASE64.decode(&base64).map_err(|_| ImageError::Base64 { problem: problem_of(&base64) })
}

/// The scheme of a URI (RFC 3986, 3.1), and what follows its colon. Base64 has no colon.
fn scheme(text: &str) -> Option<(&str, &str)> {
    let end = text.find(|c: char| !(c.is_ascii_alphanumeric() || "+-.".contains(c)))?;
    let rest = text[end..].strip_prefix(':')?;
    text.starts_with(|c: char| c.is_ascii_alphabetic()).then_some((&text[..end], rest))
}

/// The characters of a base64 text without white space, in the standard alphabet.
struct Characters<'a> {
    bytes: &'a [u8],
    has_percents: bool,
}

impl Iterator for Characters<'_> {
    type Item = u8;

    fn next(&mut self) -> Option<u8> {
        loop {
            let byte = match *self.bytes {
                [b'%', high, low, ..] if self.has_percents && is_hex(high) && is_hex(low) => {
                    self.bytes = &self.bytes[3..];
                    hex(high) << 4 | hex(low)
                }
                [first, ..] => {
                    self.bytes = &self.bytes[1..];
                    first
                }
                [] => return None,
            };
            match byte {
                b'-' => return Some(b'+'),
                b'_' => return Some(b'/'),
                _ if byte.is_ascii_whitespace() => {}
                _ => return Some(byte),
            }
        }
    }
}

fn is_hex(digit: u8) -> bool {
    digit.is_ascii_hexdigit()
}

/// The value of a hexadecimal digit.
fn hex(digit: u8) -> u8 {
    char::from(digit).to_digit(16).unwrap_or(0) as u8
}

/// What is wrong with text that the decoder refused.
fn problem_of(base64: &[u8]) -> String {
    let is_valid = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/');
    match base64.iter().position(|byte| !is_valid(byte)) {
        Some(at) if base64[at].is_ascii_graphic() => {
            format!("its character {} is {:?}", at + 1, char::from(base64[at]))
        }
        Some(at) => format!("its character {} is not of the alphabet", at + 1),
        None => format!("it ends within a group, after {} characters", base64.len()),
    }
}
