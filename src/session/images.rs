//! The images of a request, from what a client sent to what the engine takes.
//!
//! A file is decoded only after the prompt is known to fit into the context, so the context bounds the number of images. The
//! callers are on threads that may block.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};

use super::error::SessionError;
use crate::engine::PromptImage;
use crate::image::{Filter, ImageError, Limits, decode, file_of};
use crate::model::ImageLimits;

/// The most pictures that are decoded at the same time: one takes up to 1.5 GB for a few seconds.
const DECODED_AT_ONCE: usize = 2;

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
    /// The image at positions of a prompt. Blocks while other pictures are decoded.
    pub(super) fn for_prompt(
        &self,
        limits: &ImageLimits,
        positions: Range<usize>,
    ) -> Result<PromptImage, SessionError> {
        let problem = |error: ImageError| SessionError::invalid(&self.param, error.to_string());
        let file_limits = Limits::default();
        let file = file_of(&self.file, file_limits.max_bytes).map_err(problem)?;
        let picture = {
            let _turn = DecoderTurn::take();
            let side = u32::try_from(limits.side).expect("a model's image has few pixels");
            decode(&file, &file_limits).map_err(problem)?.resize(side, side, Filter::Bilinear)
        };
        let hash = picture.sha256();
        Ok(PromptImage { positions, hash, pixels: picture.into_pixels().into() })
    }
}

/// The number of pictures that are being decoded in this process.
static DECODED: Mutex<usize> = Mutex::new(0);
static DONE: Condvar = Condvar::new();

/// One of [`DECODED_AT_ONCE`].
struct DecoderTurn;

impl DecoderTurn {
    /// Waits for a turn. Each ends, because a decoder's work is bounded.
    fn take() -> Self {
        let count = DECODED.lock().expect("nothing panics under this lock");
        let is_full = |count: &mut usize| *count >= DECODED_AT_ONCE;
        *DONE.wait_while(count, is_full).expect("nothing panics under this lock") += 1;
        Self
    }
}

impl Drop for DecoderTurn {
    fn drop(&mut self) {
        *DECODED.lock().expect("nothing panics under this lock") -= 1;
        DONE.notify_one();
    }
}
