//! The images of a request, from what a client sent to what the engine takes.
//!
//! A file is decoded only after the prompt is known to fit into the context, so the context bounds the number of images. The
//! pixels of all requests that wait or run are bounded, too, and so is the number of pictures that are decoded at the same
//! time. The callers are on threads that may block.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use super::error::SessionError;
use crate::engine::PromptImage;
use crate::image::{Filter, ImageError, Limits, decode, file_of};
use crate::model::{ImageLimits, ImageSizes};

/// The most pictures that are decoded at the same time: one takes up to 1.5 GB for a few seconds.
const DECODED_AT_ONCE: usize = 2;

/// The longest wait for a turn. The thread that waits is one of those that prepare all requests.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// The most pixels of all files of a request together, which take a decoder some seconds. An image that is sent again in the
/// same request counts once.
const REQUEST_PIXELS: u64 = 4 << 26;

/// The most bytes of pixels of all requests that wait or run in this process. A single request may have more.
const HELD_BYTES: usize = 1 << 30;

/// An image of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// The field that has the file, for errors.
    pub param: String,
    /// The field that asks for an image, for models that take none.
    pub kind_param: String,
    /// The file, as a `data:` URI or as base64.
    pub file: Arc<str>,
}

impl Image {
    /// The image at positions of a prompt. Blocks while other pictures are decoded. `pixels` are left for the request's files.
    fn for_prompt(
        &self,
        limits: &ImageLimits,
        positions: Range<usize>,
        pixels: &mut u64,
    ) -> Result<PromptImage, SessionError> {
        let problem = |error: ImageError| SessionError::invalid(&self.param, error.to_string());
        let file_limits = Limits::default();
        let file = file_of(&self.file, file_limits.max_bytes).map_err(problem)?;
        let picture = {
            let _turn = DecoderTurn::take()?;
            let picture = decode(&file, &file_limits).map_err(problem)?;
            let size = u64::from(picture.width()) * u64::from(picture.height());
            *pixels = pixels.checked_sub(size).ok_or_else(|| {
                let problem = format!(
                    "with this image, those of the request have more than {} million pixels: make them smaller",
                    REQUEST_PIXELS / 1_000_000
                );
                SessionError::invalid(&self.param, problem)
            })?;
            let size = [picture.width() as usize, picture.height() as usize];
            let [width, height] = limits.fit(size, limits.usual_tokens);
            let filter = match limits.sizes {
                ImageSizes::Fixed { .. } => Filter::Bilinear,
                ImageSizes::ByTokens { .. } => Filter::Bicubic,
            };
            picture.resize(width as u32, height as u32, filter)
        };
        let (size, hash) = ([picture.width() as usize, picture.height() as usize], picture.sha256());
        Ok(PromptImage { positions, hash, size, pixels: picture.into_pixels().into() })
    }
}

/// The images of a prompt at their positions. A file that occurs several times is decoded once.
pub(super) fn decoded<'a>(
    images: impl Iterator<Item = (Range<usize>, &'a Image)>,
    limits: &ImageLimits,
) -> Result<Vec<PromptImage>, SessionError> {
    let mut pixels = REQUEST_PIXELS;
    let mut known: HashMap<&str, PromptImage> = HashMap::new();
    let mut all = Vec::new();
    for (positions, image) in images {
        let one = match known.get(&*image.file) {
            Some(known) => PromptImage { positions, ..known.clone() },
            None => image.for_prompt(limits, positions, &mut pixels)?,
        };
        known.entry(&image.file).or_insert_with(|| one.clone());
        all.push(one);
    }
    Ok(all)
}

/// The bytes of pixels of all requests that wait or run.
static HELD: Mutex<usize> = Mutex::new(0);

/// Room for the pixels of one request, until it is dropped.
#[derive(Debug)]
pub(super) struct HeldImages {
    bytes: usize,
}

impl HeldImages {
    /// Room for this many bytes. An error if other requests have too many; they will end.
    pub fn take(bytes: usize) -> Result<Self, SessionError> {
        let mut held = HELD.lock().expect("nothing panics under this lock");
        if *held > 0 && bytes > HELD_BYTES.saturating_sub(*held) {
            let problem = format!(
                "the images of other requests take {} MB, and these would take {} MB more; at most {} MB are held",
                *held >> 20,
                bytes >> 20,
                HELD_BYTES >> 20
            );
            return Err(SessionError::Shortage(problem));
        }
        *held += bytes;
        Ok(Self { bytes })
    }
}

impl Drop for HeldImages {
    fn drop(&mut self) {
        *HELD.lock().expect("nothing panics under this lock") -= self.bytes;
    }
}

/// The number of pictures that are being decoded in this process.
static DECODED: Mutex<usize> = Mutex::new(0);
static DONE: Condvar = Condvar::new();

/// One of [`DECODED_AT_ONCE`].
struct DecoderTurn;

impl DecoderTurn {
    /// Waits for a turn, but not for long.
    fn take() -> Result<Self, SessionError> {
        let count = DECODED.lock().expect("nothing panics under this lock");
        let is_full = |count: &mut usize| *count >= DECODED_AT_ONCE;
        let waited = DONE.wait_timeout_while(count, MAX_WAIT, is_full);
        let (mut count, waited) = waited.expect("nothing panics under this lock");
        if waited.timed_out() {
            let problem = "the server decodes the images of other requests: try again later".to_owned();
            return Err(SessionError::Shortage(problem));
        }
        *count += 1;
        Ok(Self)
    }
}

impl Drop for DecoderTurn {
    fn drop(&mut self) {
        *DECODED.lock().expect("nothing panics under this lock") -= 1;
        DONE.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pixels_of_all_requests_together_are_bounded() {
        // No other unit test takes room.
        let alone = HeldImages::take(3 * HELD_BYTES).expect("a single request may have more");
        let error = HeldImages::take(1).expect_err("too many");
        assert!(
            matches!(&error, SessionError::Shortage(problem) if problem.contains("take 3072 MB")),
            "{error}"
        );
        drop(alone);
        let half = HeldImages::take(HELD_BYTES / 2).expect("room");
        let other = HeldImages::take(HELD_BYTES / 2).expect("room");
        assert!(HeldImages::take(1).is_err());
        drop(half);
        assert!(HeldImages::take(HELD_BYTES / 2).is_ok());
        drop(other);
    }
}
