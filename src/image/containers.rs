//! Walks through the parts of a JPEG and of a WebP file before a decoder reads them.
//!
//! The decoders accept a JPEG that ends too early, and reserve memory for chunks of a WebP file that do not exist. The
//! walks refuse both, and count what a decoder's time and memory depend on.

use super::error::ImageError;
use super::format::Format;
use super::lossless::check_groups;

/// A JPEG up to its end, and an upper bound of the number of its scans.
pub(super) struct Jpeg<'a> {
    /// From the start to the marker of the end. Cameras put whole videos after it.
    pub bytes: &'a [u8],
    pub scans: usize,
}

/// Follows the markers of a JPEG (ITU-T T.81, annex B) to the marker of its end. The decoder takes missing data for
/// gray pixels; here they are [`ImageError::Truncated`].
pub(super) fn whole_jpeg(bytes: &[u8]) -> Result<Jpeg<'_>, ImageError> {
    const TRUNCATED: ImageError = ImageError::Truncated { format: Format::Jpeg };
    let mut at = 2;
    loop {
        // The data of a scan has 0xff only before a zero or a restart marker, so it is passed like other bytes.
        at += bytes[at..].iter().position(|byte| *byte == 0xff).ok_or(TRUNCATED)?;
        at += bytes[at..].iter().position(|byte| *byte != 0xff).ok_or(TRUNCATED)?;
        let marker = bytes[at];
        at += 1;
        match marker {
            // No marker, or one without a segment.
            0 | 1 | 0xd0..=0xd8 => {}
            0xd9 => break,
            _ => {
                let length = bytes.get(at..at + 2).ok_or(TRUNCATED)?;
                at += usize::from(u16::from_be_bytes([length[0], length[1]]));
                if at > bytes.len() {
                    return Err(TRUNCATED);
                }
            }
        }
    }
    let bytes = &bytes[..at];
    // All pairs of bytes that could begin a scan, because the decoder may look for markers where this walk does not.
    let scans = bytes.windows(2).filter(|pair| *pair == [0xff, 0xda]).count();
    Ok(Jpeg { bytes, scans })
}

/// Follows the chunks of a WebP file (RFC 9649) and returns the file without what comes after the last one. Each chunk
/// must end within the file, because the decoder reserves memory for a chunk before it reads it. `check` gets the sizes of
/// what is decoded, which are the first chunk of each kind and the first frame: the decoder decodes a lossy frame before it
/// compares this size with the picture's.
pub(super) fn whole_webp(
    bytes: &[u8],
    check: impl Fn(Size) -> Result<(), ImageError>,
) -> Result<&[u8], ImageError> {
    let (riff, _) = webp_chunk(bytes).ok_or(TRUNCATED_WEBP)?;
    let mut rest = riff.contents.get(4..).ok_or(TRUNCATED_WEBP)?;
    let damaged = |problem: &str| ImageError::Damaged { format: Format::WebP, problem: problem.into() };
    // Without a header for animations and transparency, chunks of transparency are ignored.
    let mut canvas = None;
    let (mut is_animated, mut is_first) = (false, true);
    let (mut seen, mut has_frame) = (Seen::default(), false);
    while !rest.is_empty() {
        let (chunk, after) = webp_chunk(rest).ok_or(TRUNCATED_WEBP)?;
        rest = after;
        match chunk.name {
            b"VP8X" if is_first => {
                is_animated = chunk.contents.first().ok_or(TRUNCATED_WEBP)? & ANIMATION != 0;
                canvas = Some(chunk.size_at(4)?);
            }
            b"VP8X" => return Err(damaged("its header is not at its beginning")),
            b"ANMF" if !is_animated => return Err(damaged("it has frames, and its header denies it")),
            b"ANMF" if has_frame => {}
            // A frame of an animation has chunks of its own.
            b"ANMF" => {
                has_frame = true;
                let (size, mut seen) = (chunk.size_at(6)?, Seen::default());
                let mut parts = chunk.contents.get(16..).ok_or(TRUNCATED_WEBP)?;
                while !parts.is_empty() {
                    let (part, after) = webp_chunk(parts).ok_or(TRUNCATED_WEBP)?;
                    parts = after;
                    if seen.is_new(part.name) {
                        part.check_frame(Some(size), &check)?;
                    }
                }
            }
            name if seen.is_new(name) => chunk.check_frame(canvas, &check)?,
            _ => {}
        }
        is_first = false;
    }
    Ok(&bytes[..riff.contents.len() + 8])
}

/// The bit of a WebP header that says that the file is an animation.
const ANIMATION: u8 = 0b10;

/// Which chunks with pixels came already: of each kind, the decoder reads the first one.
#[derive(Default)]
struct Seen([bool; 3]);

impl Seen {
    /// Whether it is the first chunk of a kind with pixels.
    fn is_new(&mut self, name: &[u8; 4]) -> bool {
        let kind = [b"VP8 ", b"VP8L", b"ALPH"].iter().position(|kind| *kind == name);
        kind.is_some_and(|kind| !std::mem::replace(&mut self.0[kind], true))
    }
}

/// Width and height in pixels.
type Size = (u32, u32);

const TRUNCATED_WEBP: ImageError = ImageError::Truncated { format: Format::WebP };

struct WebpChunk<'a> {
    name: &'a [u8; 4],
    contents: &'a [u8],
}

impl WebpChunk<'_> {
    /// Width and height at an offset, each less one in 24 bits.
    fn size_at(&self, at: usize) -> Result<Size, ImageError> {
        let side = |at: usize| {
            let side = self.contents.get(at..at + 3).ok_or(TRUNCATED_WEBP)?;
            Ok(u32::from_le_bytes([side[0], side[1], side[2], 0]) + 1)
        };
        Ok((side(at)?, side(at + 3)?))
    }

    /// Checks pixels; other chunks are fine. `of_alpha` is the size of a chunk of transparency, which does not have it. `None` =
    /// such a chunk is ignored.
    fn check_frame(
        &self,
        of_alpha: Option<Size>,
        check: impl Fn(Size) -> Result<(), ImageError>,
    ) -> Result<(), ImageError> {
        match (self.name, self.contents) {
            // RFC 6386, 9.1.
            (b"VP8 ", [_, _, _, _, _, _, w0, w1, h0, h1, ..]) => {
                let side = |low, high| u32::from(u16::from_le_bytes([low, high]) & 0x3fff);
                check((side(*w0, *w1), side(*h0, *h1)))
            }
            (b"VP8L", [_, s0, s1, s2, s3, data @ ..]) => {
                let sides = u32::from_le_bytes([*s0, *s1, *s2, *s3]);
                let size = ((sides & 0x3fff) + 1, (sides >> 14 & 0x3fff) + 1);
                check(size)?;
                check_groups(data, size)
            }
            // The lowest bits say that it is compressed as a lossless picture is.
            (b"ALPH", [info, data @ ..]) if info & 3 == 1 => {
                let Some(size) = of_alpha else { return Ok(()) };
                check(size)?;
                check_groups(data, size)
            }
            _ => Ok(()),
        }
    }
}

/// The first chunk and what follows it. `None` if it does not end within the bytes; the padding of the last one may be
/// absent.
fn webp_chunk(bytes: &[u8]) -> Option<(WebpChunk<'_>, &[u8])> {
    let (name, rest) = bytes.split_first_chunk::<4>()?;
    let (size, rest) = rest.split_first_chunk::<4>()?;
    let size = u32::from_le_bytes(*size) as usize;
    let contents = rest.get(..size)?;
    Some((WebpChunk { name, contents }, rest.get(size + size % 2..).unwrap_or(&[])))
}
