//! From the bytes of a file to its pixels, within bounds of bytes, sides, pixels, memory and work.
//!
//! The crate `image` decodes. This file decides what it may decode, and makes 8-bit RGB of what it returns: turned as
//! EXIF says, on white where the picture is transparent. It reads the first frame of an animation only. It applies no
//! color profile and no gamma, as the tools do that models are trained with.

use std::error::Error as _;
use std::io::{Cursor, ErrorKind};
use std::panic::{AssertUnwindSafe, catch_unwind};

use image::codecs::{
    bmp::BmpDecoder, gif::GifDecoder, jpeg::JpegDecoder, png::PngDecoder, webp::WebPDecoder,
};
use image::metadata::Orientation;
use image::{ColorType, DynamicImage, ImageDecoder, ImageError as CrateError, RgbImage};

use super::containers::{whole_jpeg, whole_webp};
use super::error::ImageError;
use super::format::{Format, looks_like};
use super::pixels::Rgb;

/// What a file may have.
///
/// A picture within the standard limits takes at most 12 bytes of memory a pixel while it is decoded, and afterwards 3. In
/// addition, a lossless WebP takes at most half a gigabyte of tables, and a frame of a GIF 4 bytes for each pixel of the limit,
/// whatever the size of the picture is.
/// Measured at 64 million pixels on one core of a server: JPEG 0.2 to 0.8 s, GIF 1.6 s, PNG of 16 bits and lossless
/// WebP 2 s, animated WebP with alpha 4 to 5 s and 768 MB, which is the slowest and largest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The most bytes of a file.
    pub max_bytes: usize,
    /// The most pixels of a row or column.
    pub max_side: u32,
    /// The most pixels of a picture.
    pub max_pixels: u64,
}

/// 20 MB a file, as other servers accept; 16384 pixels a side; 64 million pixels, more than cameras of phones take.
impl Default for Limits {
    fn default() -> Self {
        Self { max_bytes: 20_000_000, max_side: 16_384, max_pixels: 64_000_000 }
    }
}

/// Pixels times scans of the largest accepted JPEG. A progressive JPEG has about ten scans. Each is a pass over all
/// pixels, and may have as few as 60 bytes.
const MAX_SCANNED_PIXELS: u64 = 1_000_000_000;

/// Memory for the chunks of a PNG that are not pixels. A compressed color profile is not read beyond it.
const PNG_CHUNK_BYTES: u64 = 4 << 20;

/// The longest problem that a message quotes from a decoder, in characters.
const MAX_PROBLEM_CHARS: usize = 200;

/// Decodes a file to 8-bit RGB. Its first bytes say which format it has.
///
/// Colors of 16 bits lose their lower 8. A transparent picture is put on white. The picture is turned as its EXIF data
/// says. The work is bounded by `limits` alone, so the caller need not watch it, but it does not belong on a thread
/// that serves connections.
///
/// Errors: all variants of [`ImageError`] but those of [`file_of`](super::file_of).
pub fn decode(bytes: &[u8], limits: &Limits) -> Result<Rgb, ImageError> {
    opened(bytes, limits, decode_pixels)
}

/// The width and height that [`decode`] gives the picture of a file. They are read without its pixels, in some
/// milliseconds and with a copy of the file at most.
///
/// Errors: those of [`decode`] that do not depend on the pixels.
pub fn size_of(bytes: &[u8], limits: &Limits) -> Result<[u32; 2], ImageError> {
    opened(bytes, limits, |_, mut decoder, _| {
        let (width, height) = decoder.dimensions();
        Ok(if turns_sideways(orientation(&mut decoder)) { [height, width] } else { [width, height] })
    })
}

/// Calls `read` with the decoder of a file, whose size is within the limits.
fn opened<T>(
    bytes: &[u8],
    limits: &Limits,
    read: impl FnOnce(Format, Box<dyn ImageDecoder + '_>, &Limits) -> Result<T, ImageError>,
) -> Result<T, ImageError> {
    if bytes.is_empty() {
        return Err(ImageError::Empty);
    }
    let unsupported = || ImageError::Unsupported { found: looks_like(bytes) };
    let format = Format::of(bytes).ok_or_else(unsupported)?;
    if bytes.len() > limits.max_bytes {
        return Err(ImageError::TooManyBytes { max_bytes: limits.max_bytes });
    }
    // The decoders are other people's code and read hostile input. A panic in them is this file's error. Nothing that
    // they could leave half done outlives the call.
    let read = || {
        let decoder = decoder(format, bytes, limits)?;
        check_size(format, decoder.dimensions(), limits)?;
        read(format, decoder, limits)
    };
    catch_unwind(AssertUnwindSafe(read)).unwrap_or(Err(ImageError::DecoderFailed { format }))
}

/// The decoder of a file, which has read its header.
fn decoder<'a>(
    format: Format,
    bytes: &'a [u8],
    limits: &Limits,
) -> Result<Box<dyn ImageDecoder + 'a>, ImageError> {
    let fail = |error| refusal(format, error);
    Ok(match format {
        Format::Png => {
            let mut of_chunks = image::Limits::no_limits();
            of_chunks.max_alloc = Some(bytes.len() as u64 + PNG_CHUNK_BYTES);
            Box::new(PngDecoder::with_limits(Cursor::new(bytes), of_chunks).map_err(fail)?)
        }
        Format::Jpeg => {
            let jpeg = whole_jpeg(bytes)?;
            let decoder = JpegDecoder::new(Cursor::new(jpeg.bytes)).map_err(fail)?;
            let (width, height) = decoder.dimensions();
            if u64::from(width) * u64::from(height) * jpeg.scans as u64 > MAX_SCANNED_PIXELS {
                check_size(format, (width, height), limits)?;
                return Err(ImageError::TooManyScans { width, height, scans: jpeg.scans });
            }
            Box::new(decoder)
        }
        Format::WebP => {
            let webp = whole_webp(bytes, |size| check_size(format, size, limits))?;
            Box::new(WebPDecoder::new(Cursor::new(webp)).map_err(fail)?)
        }
        Format::Gif => Box::new(GifDecoder::new(Cursor::new(bytes)).map_err(fail)?),
        Format::Bmp => Box::new(BmpDecoder::new(Cursor::new(bytes)).map_err(fail)?),
    })
}

fn check_size(format: Format, (width, height): (u32, u32), limits: &Limits) -> Result<(), ImageError> {
    let Limits { max_side, max_pixels, .. } = *limits;
    if width == 0 || height == 0 {
        return Err(ImageError::NoPixels { format, width, height });
    }
    if width.max(height) > max_side || u64::from(width) * u64::from(height) > max_pixels {
        return Err(ImageError::TooManyPixels { format, width, height, max_side, max_pixels });
    }
    Ok(())
}

/// How the picture is turned for a viewer. Viewers show a picture whose EXIF data is damaged.
fn orientation(decoder: &mut impl ImageDecoder) -> Orientation {
    decoder.orientation().unwrap_or(Orientation::NoTransforms)
}

/// Whether rows become columns.
fn turns_sideways(orientation: Orientation) -> bool {
    use Orientation::{Rotate90, Rotate90FlipH, Rotate270, Rotate270FlipH};
    matches!(orientation, Rotate90 | Rotate270 | Rotate90FlipH | Rotate270FlipH)
}

fn decode_pixels(
    format: Format,
    mut decoder: Box<dyn ImageDecoder + '_>,
    limits: &Limits,
) -> Result<Rgb, ImageError> {
    let fail = |error| refusal(format, error);
    // A frame of a GIF may be larger than the picture.
    let mut of_frame = image::Limits::no_limits();
    of_frame.max_alloc = Some(4 * limits.max_pixels);
    decoder.set_limits(of_frame).map_err(fail)?;
    let (width, height) = decoder.dimensions();
    let orientation = orientation(&mut decoder);
    let color = decoder.color_type();
    let mut pixels = vec![0; decoder.total_bytes() as usize];
    decoder.read_image(&mut pixels).map_err(fail)?;
    let pixels = to_rgb(pixels, color).ok_or_else(|| ImageError::Damaged {
        format,
        problem: format!("its pixels have the unexpected type {color:?}"),
    })?;
    let picture = RgbImage::from_raw(width, height, pixels);
    let mut picture = DynamicImage::ImageRgb8(picture.ok_or(ImageError::DecoderFailed { format })?);
    picture.apply_orientation(orientation);
    Ok(Rgb::new(picture.width(), picture.height(), picture.into_rgb8().into_raw()))
}

/// Pixels of another type as RGB of 8 bits. `None` for types that no supported format has.
fn to_rgb(pixels: Vec<u8>, color: ColorType) -> Option<Vec<u8>> {
    // The crate returns 16 bits in the machine's order.
    let high = |low: u8, high: u8| (u16::from_ne_bytes([low, high]) >> 8) as u8;
    Some(match color {
        ColorType::Rgb8 => pixels,
        ColorType::L8 => convert(pixels, |[l]| [l; 3]),
        ColorType::La8 => convert(pixels, |[l, a]| [on_white(l, a); 3]),
        ColorType::Rgba8 => convert(pixels, |[r, g, b, a]| [r, g, b].map(|c| on_white(c, a))),
        ColorType::L16 => convert(pixels, |[l0, l1]| [high(l0, l1); 3]),
        ColorType::La16 => convert(pixels, |[l0, l1, a0, a1]| [on_white(high(l0, l1), high(a0, a1)); 3]),
        ColorType::Rgb16 => {
            convert(pixels, |[r0, r1, g0, g1, b0, b1]| [high(r0, r1), high(g0, g1), high(b0, b1)])
        }
        ColorType::Rgba16 => convert(pixels, |[r0, r1, g0, g1, b0, b1, a0, a1]| {
            [high(r0, r1), high(g0, g1), high(b0, b1)].map(|c| on_white(c, high(a0, a1)))
        }),
        _ => return None,
    })
}

/// Converts pixels of N bytes to RGB. Large pixels are converted where they are, so that a picture of 16 bits needs no
/// second buffer.
fn convert<const N: usize>(mut pixels: Vec<u8>, rgb: impl Fn([u8; N]) -> [u8; 3]) -> Vec<u8> {
    let count = pixels.len() / N;
    if N < 3 {
        return pixels.as_chunks::<N>().0.iter().flat_map(|pixel| rgb(*pixel)).collect();
    }
    for at in 0..count {
        let mut pixel = [0; N];
        pixel.copy_from_slice(&pixels[at * N..][..N]);
        pixels[at * 3..][..3].copy_from_slice(&rgb(pixel));
    }
    pixels.truncate(count * 3);
    pixels.shrink_to_fit();
    pixels
}

/// A color with this alpha in front of white: (color * alpha + 255 * (255 - alpha)) / 255, rounded. The division by 255
/// is Pillow's, two shifts that are exact for these numbers.
fn on_white(color: u8, alpha: u8) -> u8 {
    let (color, alpha) = (u32::from(color), u32::from(alpha));
    let sum = color * alpha + 255 * (255 - alpha) + 128;
    ((sum + (sum >> 8)) >> 8) as u8
}

/// The error for what a decoder reports.
fn refusal(format: Format, error: CrateError) -> ImageError {
    if let CrateError::IoError(error) = &error
        && error.kind() == ErrorKind::UnexpectedEof
    {
        return ImageError::Truncated { format };
    }
    // A refusal repeats the format before its reason.
    let reason = match &error {
        CrateError::Decoding(error) => error.source().map(ToString::to_string),
        _ => None,
    };
    let problem: String =
        reason.unwrap_or_else(|| error.to_string()).chars().take(MAX_PROBLEM_CHARS).collect();
    let problem = problem.replace(|c: char| c.is_control(), " ").trim_matches(['.', ' ', '"']).to_owned();
    ImageError::Damaged { format, problem }
}
