//! Decoded pictures equal those that Pillow decodes. Only JPEG decoders may differ by a few levels.

use image::{ExtendedColorType, ImageEncoder as _};
use rand::{Rng as _, RngCore as _, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sha2::{Digest as _, Sha256};

use unicorn::image::{Format, Limits, Rgb, decode, size_of};

use crate::support::images::{decoded_pictures, picture_file};

/// The largest difference of a value, and the mean one.
fn difference(a: &Rgb, b: &Rgb) -> (u8, f64) {
    assert_eq!((a.width(), a.height()), (b.width(), b.height()));
    let differences = a.pixels().iter().zip(b.pixels()).map(|(a, b)| a.abs_diff(*b));
    let sum: u64 = differences.clone().map(u64::from).sum();
    (differences.max().unwrap(), sum as f64 / a.pixels().len() as f64)
}

#[test]
fn every_picture_decodes_to_its_golden() {
    let mut formats = Vec::new();
    for (name, golden) in decoded_pictures() {
        let file = picture_file(name);
        let decoded = decode(&file, &Limits::default()).unwrap_or_else(|e| panic!("{name}: {e}"));
        let (largest, mean) = difference(&decoded, golden);
        // The golden is turned as EXIF says.
        assert_eq!(size_of(&file, &Limits::default()), Ok([golden.width(), golden.height()]), "{name}");
        let format = Format::of(&file).unwrap();
        println!("{name}: {format}, at most {largest} levels, mean {mean:.4}");
        match format {
            Format::Jpeg => assert!(largest <= 4 && mean <= 0.2, "{name}: {largest}, mean {mean}"),
            _ => assert_eq!(largest, 0, "{name}"),
        }
        formats.push(format);
    }
    let count = |format| formats.iter().filter(|one| **one == format).count();
    let counts = [Format::Png, Format::Jpeg, Format::WebP, Format::Gif, Format::Bmp].map(count);
    assert_eq!(counts, [15, 12, 5, 2, 1]);
}

#[test]
fn a_jpeg_with_the_name_of_a_png_is_decoded_as_a_jpeg() {
    let decoded = decode(&picture_file("bad/jpeg_named.png"), &Limits::default()).unwrap();
    assert!(difference(&decoded, &decoded_pictures()["photo420.jpg"]).0 <= 4);
}

/// Where a picture of this type is read from a PNG, against exact arithmetic: the high byte of 16 bits, and white where
/// the picture is transparent.
#[test]
fn every_color_type_becomes_8_bit_rgb_on_white() {
    const SIDE: u32 = 37;
    let seed = 0x1a6e;
    println!("seed {seed:#x}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    // Type, its channels, and the bytes of one.
    let types = [
        (ExtendedColorType::L8, 1, 1),
        (ExtendedColorType::La8, 2, 1),
        (ExtendedColorType::Rgb8, 3, 1),
        (ExtendedColorType::Rgba8, 4, 1),
        (ExtendedColorType::L16, 1, 2),
        (ExtendedColorType::La16, 2, 2),
        (ExtendedColorType::Rgb16, 3, 2),
        (ExtendedColorType::Rgba16, 4, 2),
    ];
    for (kind, channels, depth) in types {
        let mut samples = vec![0; SIDE as usize * SIDE as usize * channels * depth];
        rng.fill_bytes(&mut samples);
        // Fully transparent and opaque pixels are rare in random bytes.
        for pixel in samples.chunks_exact_mut(channels * depth) {
            if rng.random_bool(0.3) {
                pixel[(channels - 1) * depth..].fill(if rng.random() { 255 } else { 0 });
            }
        }
        let mut png = Vec::new();
        let encoder = image::codecs::png::PngEncoder::new(&mut png);
        encoder.write_image(&samples, SIDE, SIDE, kind).unwrap();

        let high_byte = |sample: &[u8]| match depth {
            1 => sample[0],
            _ => (u16::from_ne_bytes([sample[0], sample[1]]) >> 8) as u8,
        };
        let mut expected = Vec::new();
        for pixel in samples.chunks_exact(channels * depth) {
            let values: Vec<u8> = pixel.chunks_exact(depth).map(high_byte).collect();
            let (colors, alpha) = match values[..] {
                [l] => ([l; 3], 255),
                [l, a] => ([l; 3], a),
                [r, g, b] => ([r, g, b], 255),
                [r, g, b, a] => ([r, g, b], a),
                _ => unreachable!(),
            };
            let alpha = f64::from(alpha) / 255.0;
            expected.extend(
                colors.map(|c| (f64::from(c) * alpha + 255.0 * (1.0 - alpha) + 0.5 + 1e-9).floor() as u8),
            );
        }
        let decoded = decode(&png, &Limits::default()).unwrap();
        assert_eq!(difference(&decoded, &Rgb::new(SIDE, SIDE, expected)).0, 0, "{kind:?}");
    }
}

#[test]
fn the_hash_of_a_picture_covers_its_size_and_every_pixel() {
    let pixels: Vec<u8> = (0..18).collect();
    let tall = Rgb::new(2, 3, pixels.clone());
    let bytes = [&2u32.to_le_bytes(), &3u32.to_le_bytes(), &pixels[..]].concat();
    assert_eq!(tall.sha256()[..], Sha256::digest(bytes)[..]);
    assert_eq!(tall.sha256(), tall.clone().sha256());
    assert_ne!(tall.sha256(), Rgb::new(3, 2, pixels.clone()).sha256());
    for at in 0..pixels.len() {
        let mut other = pixels.clone();
        other[at] ^= 1;
        assert_ne!(tall.sha256(), Rgb::new(2, 3, other).sha256(), "{at}");
    }
}
