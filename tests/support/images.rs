//! The pictures of `tests/data/images`, with the pixels that Pillow makes of them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::LazyLock;

use image::{ExtendedColorType, ImageEncoder as _};
use unicorn::image::Rgb;

use super::data;

/// A file of the folder, or of the broken ones in its folder `bad`.
pub fn path(name: &str) -> PathBuf {
    data("images").join(name)
}

pub fn picture_file(name: &str) -> Vec<u8> {
    std::fs::read(path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// The PNG of a picture of this size.
pub fn png(width: u32, height: u32) -> Vec<u8> {
    let samples: Vec<u8> = (0..width * height * 3).map(|i| (i * 7 % 251) as u8).collect();
    let mut png = Vec::new();
    let encoder = image::codecs::png::PngEncoder::new(&mut png);
    encoder.write_image(&samples, width, height, ExtendedColorType::Rgb8).expect("a PNG");
    png
}

/// The goldens by the names of the files.
pub fn decoded_pictures() -> &'static BTreeMap<String, Rgb> {
    static GOLDENS: LazyLock<BTreeMap<String, Rgb>> = LazyLock::new(|| {
        let bytes = picture_file("decoded.safetensors");
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let golden = |(name, tensor): (String, safetensors::tensor::TensorView)| {
            let [height, width, 3] = *tensor.shape() else { panic!("{name}: {:?}", tensor.shape()) };
            (name, Rgb::new(width as u32, height as u32, tensor.data().to_vec()))
        };
        file.tensors().into_iter().map(golden).collect()
    });
    &GOLDENS
}
