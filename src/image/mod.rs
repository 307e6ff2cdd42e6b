//! The files of pictures: from the text of a request to pixels of the size that a model sees.
//!
//! [`file_of`] takes the bytes of a file from what a client sent, [`size_of`] reads how large its picture is, [`decode`]
//! makes pixels of it, and [`Rgb::resize`] gives these the size of a model's input. This module refuses to load anything: an address is an error. It knows no
//! model and no request.
//!
//! Invariants: sizes are checked before memory for pixels is reserved. No input makes this module panic. What it
//! returns is what a person sees in a viewer: upright, and on white where the picture is transparent.

mod containers;
mod decode;
mod error;
mod format;
mod lossless;
mod pixels;
mod resize;
mod source;

pub use decode::{Limits, decode, size_of};
pub use error::ImageError;
pub use format::Format;
pub use pixels::Rgb;
pub use resize::Filter;
pub use source::file_of;
