//! The images of a request, from what a client sent to what the engine takes.
//!
//! Some models look at an image more or less closely, and the request or the server says how many tokens it may have
//! ([`ImageBudgets`]). Its real number follows from its size, which is read from the header of its file. So a prompt is counted
//! without pixels.
//!
//! A file is decoded only after the prompt is known to fit into the context, so the context bounds the number of images. The
//! pixels of all requests that wait or run are bounded, too. The caller decodes ([`super::Prepared::decoded`]), and bounds
//! the number of pictures that are decoded at the same time.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::error::SessionError;
use crate::engine::PromptImage;
use crate::image::{Filter, ImageError, Limits, decode, file_of, size_of};
use crate::model::{ImageBudget, ImageLimits, ImageSizes};

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
    pub detail: Detail,
}

/// How closely a model looks at an image, if it lets a request choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Detail {
    Low,
    /// As the server's options say.
    #[default]
    Usual,
    High,
}

/// The most tokens of each image of a request, which the request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AskedImageTokens {
    /// The field that asks for them, for errors.
    pub param: &'static str,
    pub tokens: usize,
}

/// How a model takes the images of one request.
#[derive(Debug, Clone, Copy)]
pub(super) struct ImageBudgets {
    limits: ImageLimits,
    /// The most tokens of an image of any [`Detail`].
    asked: Option<usize>,
}

impl ImageBudgets {
    /// An error if the request asks for a number of tokens that the model or the server does not have.
    pub fn new(limits: ImageLimits, asked: Option<AskedImageTokens>) -> Result<Self, SessionError> {
        if let Some(AskedImageTokens { param, tokens }) = asked {
            let most = limits.tokens;
            let problem = match limits.sizes {
                ImageSizes::Fixed { .. } if tokens == most => None,
                ImageSizes::Fixed { .. } => {
                    Some(format!("every image of this model has {most} tokens: expected {most}, got {tokens}"))
                }
                ImageSizes::ByTokens { .. } if !ImageBudget::ALL.contains(&tokens) => {
                    Some(format!("expected one of {:?}, got {tokens}", ImageBudget::ALL))
                }
                ImageSizes::ByTokens { .. } => (tokens > most).then(|| {
                    format!("expected at most {most}, which the server's option --max-image-tokens says, got {tokens}")
                }),
            };
            if let Some(problem) = problem {
                return Err(SessionError::invalid(param, problem));
            }
        }
        Ok(Self { limits, asked: asked.map(|asked| asked.tokens) })
    }

    /// The fewest tokens that so many images have.
    pub fn least_tokens(&self, images: usize) -> usize {
        match self.limits.sizes {
            ImageSizes::Fixed { .. } => images.saturating_mul(self.limits.tokens),
            ImageSizes::ByTokens { .. } => images,
        }
    }

    /// The tokens of each image. A model whose images all have the same number of tokens needs no file. Otherwise, the header of
    /// each file is read, once if several images have the file.
    pub fn tokens<'a>(&self, images: impl Iterator<Item = &'a Image>) -> Result<Vec<usize>, SessionError> {
        if let ImageSizes::Fixed { .. } = self.limits.sizes {
            return Ok(images.map(|_| self.limits.tokens).collect());
        }
        let mut sizes: HashMap<&str, [u32; 2]> = HashMap::new();
        let mut count = |image: &'a Image| {
            let size = match sizes.get(&*image.file) {
                Some(size) => *size,
                None => *sizes.entry(&image.file).or_insert(image.read(size_of)?),
            };
            Ok(self.tokens_of(self.fit(size, image.detail)))
        };
        images.map(&mut count).collect()
    }

    /// The most tokens of an image of this detail.
    fn most_tokens(&self, detail: Detail) -> usize {
        match (self.limits.sizes, self.asked, detail) {
            (ImageSizes::Fixed { .. }, ..) => self.limits.tokens,
            (_, Some(asked), _) => asked,
            (_, None, Detail::Low) => self.limits.tokens.min(ImageBudget::ALL[0]),
            (_, None, Detail::Usual) => self.limits.usual_tokens,
            (_, None, Detail::High) => self.limits.tokens,
        }
    }

    /// The width and height in the model of a picture of this size.
    fn fit(&self, size: [u32; 2], detail: Detail) -> [usize; 2] {
        self.limits.fit(size.map(|side| side as usize), self.most_tokens(detail))
    }

    fn tokens_of(&self, fitted: [usize; 2]) -> usize {
        self.limits.tokens_of(fitted).expect("a picture that was made to fit")
    }

    /// The images of a prompt at their positions. A file that occurs several times is decoded once for each number of tokens that
    /// it may have.
    fn decoded(&self, images: &[(Range<usize>, Image)]) -> Result<Vec<PromptImage>, SessionError> {
        let mut pixels = REQUEST_PIXELS;
        let mut known: HashMap<(&str, usize), PromptImage> = HashMap::new();
        let mut all = Vec::new();
        for (positions, image) in images {
            let key = (&*image.file, self.most_tokens(image.detail));
            let positions = positions.clone();
            let one = match known.get(&key) {
                Some(known) => PromptImage { positions, ..known.clone() },
                None => self.for_prompt(image, positions, &mut pixels)?,
            };
            known.entry(key).or_insert_with(|| one.clone());
            all.push(one);
        }
        Ok(all)
    }

    /// The image at positions of a prompt. `pixels` are left for the request's files.
    fn for_prompt(
        &self,
        image: &Image,
        positions: Range<usize>,
        pixels: &mut u64,
    ) -> Result<PromptImage, SessionError> {
        let picture = {
            let picture = image.read(decode)?;
            let size = u64::from(picture.width()) * u64::from(picture.height());
            *pixels = pixels.checked_sub(size).ok_or_else(|| {
                let problem = format!(
                    "with this image, those of the request have more than {} million pixels: make them smaller",
                    REQUEST_PIXELS / 1_000_000
                );
                SessionError::invalid(&image.param, problem)
            })?;
            let [width, height] = self.fit([picture.width(), picture.height()], image.detail);
            if self.tokens_of([width, height]) != positions.len() {
                let problem =
                    "is an image with another size in its header than its pixels have; save it again";
                return Err(SessionError::invalid(&image.param, problem));
            }
            let filter = match self.limits.sizes {
                ImageSizes::Fixed { .. } => Filter::Bilinear,
                ImageSizes::ByTokens { .. } => Filter::Bicubic,
            };
            picture.resize(width as u32, height as u32, filter)
        };
        let (size, hash) = ([picture.width() as usize, picture.height() as usize], picture.sha256());
        Ok(PromptImage { positions, hash, size, pixels: picture.into_pixels().into() })
    }
}

impl Image {
    /// What `read` finds in the file.
    fn read<T>(&self, read: impl FnOnce(&[u8], &Limits) -> Result<T, ImageError>) -> Result<T, SessionError> {
        let limits = Limits::default();
        let file = file_of(&self.file, limits.max_bytes);
        let found = file.and_then(|file| read(&file, &limits));
        found.map_err(|error| SessionError::invalid(&self.param, error.to_string()))
    }
}

/// The images of a prompt at their positions, whose files are not decoded yet.
pub(super) struct UndecodedImages {
    pub budgets: ImageBudgets,
    pub images: Vec<(Range<usize>, Image)>,
}

impl UndecodedImages {
    pub fn decoded(&self) -> Result<Vec<PromptImage>, SessionError> {
        self.budgets.decoded(&self.images)
    }
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
