//! Hostile and broken files: each is refused with a message of its own, or decoded within bounded memory.

use std::fs;

use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng};
use rand_chacha::ChaCha8Rng;

use unicorn::image::{Format, ImageError, Limits, decode, size_of};

use crate::support::images::{decoded_pictures, path, picture_file};
use crate::support::{self, PARSER_BYTES, bounded_allocation, fuzz_bodies, peak_allocation};

/// The error at this file. Little memory may be held until it is known.
#[track_caller]
fn refusal(file: &[u8], what: &str) -> ImageError {
    let read = || decode(file, &Limits::default());
    let (result, _) = bounded_allocation(file.len(), PARSER_BYTES, what, read);
    let error = result.expect_err(what);
    // What is wrong with a file's header, the header tells alone.
    let (size, _) = bounded_allocation(file.len(), PARSER_BYTES, what, || size_of(file, &Limits::default()));
    assert!(
        size.as_ref().is_ok_and(|size| !size.contains(&0)) || size == Err(error.clone()),
        "{what}: {size:?}"
    );
    error
}

#[test]
fn each_broken_file_is_refused_with_its_own_message() {
    let format = "expected a PNG, JPEG, WebP, GIF or BMP file";
    let cases: [(&str, &[&str]); 10] = [
        ("bad_crc.png", &["is a PNG image that cannot be decoded", "critical chunk", "save it again"]),
        ("bomb_100Mpx.png", &["is a PNG image of 10000 x 10000 pixels", "64 million", "a smaller size"]),
        ("bomb_400Mpx.png", &["is a PNG image of 20000 x 20000 pixels", "16384 on each side"]),
        ("empty.png", &["holds no data", format]),
        ("html.jpg", &["it looks like a web page", format]),
        ("svg.png", &["it looks like an SVG drawing", format]),
        ("text.png", &["it looks like text", format]),
        ("truncated.jpg", &["is a JPEG image that ends too early", "expected the whole file"]),
        ("truncated.png", &["is a PNG image that ends too early"]),
        ("zero_width.png", &["is a PNG image that cannot be decoded"]),
    ];
    let named: Vec<&str> =
        cases.iter().map(|(name, _)| *name).chain(["jpeg_named.png", "profile_bomb.png"]).collect();
    for entry in fs::read_dir(path("bad")).unwrap() {
        let name = entry.unwrap().file_name();
        assert!(named.contains(&name.to_str().unwrap()), "{name:?} is not in the table");
    }
    for (name, parts) in cases {
        let message = refusal(&picture_file(&format!("bad/{name}")), name).to_string();
        println!("{name} {message}");
        for part in parts {
            assert!(message.contains(part), "{name}: {message}");
        }
        assert!(
            !message.contains('\n') && !message.ends_with('.') && message.len() < 400,
            "{name}: {message}"
        );
    }
}

#[test]
fn files_of_other_formats_are_named_in_their_refusal() {
    let cases: [(&[u8], &str); 5] = [
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC or AVIF"),
        (b"II*\0\x08\0\0\0", "TIFF"),
        (b"%PDF-1.7\n", "PDF"),
        (b"<?xml version=\"1.0\"?>\n<svg xmlns=", "SVG"),
        (&[0, 1, 2, 3, 200, 201], "first bytes are of no known image"),
    ];
    for (file, part) in cases {
        let error = decode(file, &Limits::default()).unwrap_err();
        assert!(matches!(&error, ImageError::Unsupported { found } if found.contains(part)), "{error}");
    }
}

#[test]
fn a_wrong_checksum_in_a_png_is_refused() {
    let whole = picture_file("rgb.png");
    // In the header, and in the middle of the pixels.
    for at in [29, whole.len() / 2] {
        let error = refusal(&patched("rgb.png", &[(at, &[whole[at] ^ 1])]), "a changed PNG");
        assert!(matches!(&error, ImageError::Damaged { problem, .. } if problem.contains("CRC")), "{error}");
    }
}

/// The pixels of the first frame end within the second half of a file with one frame.
#[test]
fn files_that_end_in_the_middle_are_refused() {
    for (name, golden) in decoded_pictures() {
        let file = picture_file(name);
        let frames = if name.starts_with("animated") { 4 } else { 1 };
        for share in [0.1, 0.3, 0.5, 0.7] {
            let length = (file.len() as f64 * share) as usize / frames;
            let result = decode(&file[..length], &Limits::default());
            assert!(result.is_err(), "{name} ({golden:?}) is accepted with {length} of {} bytes", file.len());
        }
    }
}

/// Changes bytes of a file.
fn patched(name: &str, patches: &[(usize, &[u8])]) -> Vec<u8> {
    let mut file = picture_file(name);
    for (at, bytes) in patches {
        file[*at..*at + bytes.len()].copy_from_slice(bytes);
    }
    file
}

/// Where the sides are in the header of a frame: after its marker, length and precision.
fn jpeg_sides(file: &[u8]) -> usize {
    file.windows(2).position(|pair| matches!(pair, [0xff, 0xc0 | 0xc2])).unwrap() + 5
}

#[test]
fn sides_in_the_headers_of_each_format_are_bounded_before_memory_is_reserved() {
    let jpeg = jpeg_sides(&picture_file("photo420.jpg"));
    // Format, file, and the size that its header now states.
    let cases = [
        (Format::Jpeg, patched("photo420.jpg", &[(jpeg, &[0xff; 4])]), (65535, 65535)),
        (Format::Gif, patched("transparent.gif", &[(6, &[0xff; 4])]), (65535, 65535)),
        (Format::Bmp, patched("bitmap.bmp", &[(18, &[0xff, 0xff, 0, 0, 0xff, 0xff, 0, 0])]), (65535, 65535)),
        (Format::WebP, patched("lossy.webp", &[(26, &[0xff; 4])]), (16383, 16383)),
        // Width and height in 24 bits, less one.
        (Format::WebP, patched("animated.webp", &[(24, &[0xff, 0x4f, 0, 0xff, 0x4f, 0])]), (20480, 20480)),
    ];
    for (expected, file, size) in cases {
        match refusal(&file, &expected.to_string()) {
            ImageError::TooManyPixels { format, width, height, .. } => {
                assert_eq!((format, (width, height)), (expected, size));
            }
            other => panic!("{expected}: {other}"),
        }
    }
}

/// The decoder would decode the frame first, and then compare the sizes.
#[test]
fn a_webp_frame_larger_than_its_picture_is_refused_before_it_is_decoded() {
    let lossy = picture_file("lossy.webp");
    let mut frame = lossy[12..].to_vec();
    frame[14..18].fill(0xff);
    let mut file = b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\x0f\0\0\x0f\0\0".to_vec();
    file.extend(frame);
    let length = file.len() as u32 - 8;
    file[4..8].copy_from_slice(&length.to_le_bytes());
    let error = refusal(&file, "a frame of 16383 x 16383");
    assert!(matches!(error, ImageError::TooManyPixels { width: 16383, .. }), "{error}");
}

/// A WebP file of one picture of 16 x 16 pixels, as these chunks. Each is a name and contents.
fn webp(chunks: &[(&[u8; 4], &[u8])]) -> Vec<u8> {
    let mut file = b"RIFF\0\0\0\0WEBP".to_vec();
    for (name, contents) in chunks {
        file.extend(*name);
        file.extend((contents.len() as u32).to_le_bytes());
        file.extend(*contents);
        file.resize(file.len().next_multiple_of(2), 0);
    }
    let length = file.len() as u32 - 8;
    file[4..8].copy_from_slice(&length.to_le_bytes());
    file
}

/// The beginning of lossless pixels with this many groups of prefix codes, each of which a decoder makes tables for. With
/// `is_swapped`, the code of red has a second, smaller symbol.
fn groups(count: u32, is_swapped: bool) -> Vec<u8> {
    let mut bits: Vec<bool> = Vec::new();
    let mut push = |value: u32, count: u32| bits.extend((0..count).map(|bit| value >> bit & 1 == 1));
    // No transform, no cache of colors; groups by blocks of 4 pixels, in a picture without a cache.
    [(0, 1), (0, 1), (1, 1), (0, 3), (0, 1)].into_iter().for_each(|(value, count)| push(value, count));
    // Codes with the only symbols green, red, blue, alpha, and a distance.
    for (i, symbol) in [(count - 1) & 255, (count - 1) >> 8, 0, 0, 0].into_iter().enumerate() {
        let has_two = is_swapped && i == 1;
        push(if has_two { 0b111 } else { 0b101 }, 3);
        push(symbol, 8);
        if has_two {
            push(0, 8);
        }
    }
    bits.resize(bits.len() + 100, false);
    bits.chunks(8).map(|byte| byte.iter().rev().fold(0, |byte, bit| byte << 1 | u8::from(*bit))).collect()
}

/// With 65,536 groups the decoder would hold more than a gigabyte, for 16 x 16 pixels.
#[test]
fn a_webp_with_many_groups_of_codes_is_refused_before_it_is_decoded() {
    // Width and height less one, in 14 bits each.
    let header = [&[0x2f][..], &(15u32 << 14 | 15).to_le_bytes()].concat();
    let canvas = [16, 0, 0, 0, 15, 0, 0, 15, 0, 0];
    let animated = [18, 0, 0, 0, 15, 0, 0, 15, 0, 0];
    let files = |count| {
        let lossless = [header.clone(), groups(count, false)].concat();
        let swapped = [header.clone(), groups(count, true)].concat();
        let alpha = [vec![1], groups(count, false)].concat();
        let frame =
            [&[0, 0, 0, 0, 0, 0, 15, 0, 0, 15, 0, 0, 0, 0, 0, 0][..], &webp(&[(b"ALPH", &alpha)])[12..]];
        [
            webp(&[(b"VP8L", &lossless)]),
            webp(&[(b"VP8L", &swapped)]),
            webp(&[(b"VP8X", &canvas), (b"ALPH", &alpha)]),
            webp(&[(b"VP8X", &animated), (b"ANMF", &frame.concat())]),
        ]
    };
    let problem = |file: &[u8]| match refusal(file, "groups of codes") {
        ImageError::Damaged { format: Format::WebP, problem } => problem,
        other => panic!("{other}"),
    };
    for count in [4097, 65_536] {
        for file in files(count) {
            let expected = format!("it has {count} groups of prefix codes, above 4096");
            assert_eq!(problem(&file), expected);
        }
    }
    // The decoder refuses the codes after these groups, or the chunks that are absent.
    for file in files(40) {
        assert!(!problem(&file).contains("groups"));
    }
    // The decoder would read these groups for the size of the first header, or for that of the picture.
    let alpha = [vec![1], groups(65_536, false)].concat();
    let small = [16, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let frame = [&[0; 16][..], &webp(&[(b"ALPH", &alpha)])[12..]].concat();
    for (file, part) in [
        (webp(&[(b"VP8X", &canvas), (b"VP8X", &small), (b"ALPH", &alpha)]), "its header is not at"),
        (webp(&[(b"VP8X", &canvas), (b"ANMF", &frame)]), "it has frames"),
    ] {
        assert!(problem(&file).starts_with(part), "{}", problem(&file));
    }
}

/// A chunk of EXIF data that says to have 4 GB.
#[test]
fn a_webp_chunk_longer_than_its_file_is_refused_before_it_is_read() {
    let mut file = picture_file("alpha.webp");
    file.extend(b"EXIF\xf0\xff\xff\xff");
    let length = file.len() as u32 - 8;
    file[4..8].copy_from_slice(&length.to_le_bytes());
    // The flag of EXIF data.
    file[20] |= 8;
    let error = refusal(&file, "EXIF of 4 GB");
    assert_eq!(error, ImageError::Truncated { format: Format::WebP });
}

#[test]
fn a_gif_frame_larger_than_the_largest_picture_is_refused() {
    let file = picture_file("transparent.gif");
    // After the header and the colors, a frame begins with a comma and its offsets, which are 0 here.
    let frame = file.windows(5).position(|bytes| bytes == [b',', 0, 0, 0, 0]).unwrap();
    let file = patched("transparent.gif", &[(frame + 5, &[0xff; 4])]);
    let error = refusal(&file, "a frame of 65535 x 65535");
    assert!(matches!(error, ImageError::Damaged { format: Format::Gif, .. }), "{error}");
}

/// Each scan of a progressive JPEG is a pass over all pixels, and may be as short as a few bytes.
#[test]
fn a_jpeg_with_many_scans_is_refused_by_its_number_of_pixels() {
    let whole = picture_file("progressive444.jpg");
    let last_scan = whole.windows(2).rposition(|pair| pair == [0xff, 0xda]).unwrap();
    let (end, scan) = (whole.len() - 2, whole[last_scan..whole.len() - 2].to_vec());
    let mut file = whole[..end].to_vec();
    (0..1000).for_each(|_| file.extend(&scan));
    file.extend(&whole[end..]);
    let sides = jpeg_sides(&file);
    file[sides..sides + 4].copy_from_slice(&[0x04, 0, 0x04, 0]);
    match refusal(&file, "1000 scans") {
        ImageError::TooManyScans { width: 1024, height: 1024, scans } => assert!(scans > 1000, "{scans}"),
        other => panic!("{other}"),
    }
}

/// What cameras put after the end of a JPEG is not read.
#[test]
fn data_after_the_end_of_a_jpeg_does_not_matter() {
    let mut file = picture_file("photo420.jpg");
    let alone = decode(&file, &Limits::default()).unwrap();
    for _ in 0..100_000 {
        file.extend([0xff, 0xda, 0]);
    }
    assert!(decode(&file, &Limits::default()).unwrap() == alone);
}

/// The picture is fine, but its color profile has 64 MiB.
#[test]
fn a_color_profile_is_not_decompressed_beyond_a_bound() {
    let file = picture_file("bad/profile_bomb.png");
    let (result, peak) = peak_allocation(|| decode(&file, &Limits::default()));
    assert_eq!(result.unwrap().pixels(), [10, 20, 30].repeat(64));
    assert!(peak < 8 << 20, "{peak}");
}

#[test]
fn pictures_at_each_limit_are_accepted_and_above_it_refused() {
    let file = picture_file("rgb.png");
    let exact = Limits { max_bytes: file.len(), max_side: 200, max_pixels: 200 * 150 };
    assert_eq!(decode(&file, &exact).unwrap().width(), 200);
    assert_eq!(size_of(&file, &exact), Ok([200, 150]));
    let refused = |limits: Limits| {
        let error = decode(&file, &limits).unwrap_err();
        assert_eq!(size_of(&file, &limits), Err(error.clone()));
        error
    };
    let bytes = refused(Limits { max_bytes: file.len() - 1, ..exact });
    assert_eq!(bytes, ImageError::TooManyBytes { max_bytes: file.len() - 1 });
    for limits in [Limits { max_side: 199, ..exact }, Limits { max_pixels: 200 * 150 - 1, ..exact }] {
        let error = refused(limits);
        assert!(matches!(error, ImageError::TooManyPixels { width: 200, height: 150, .. }), "{error}");
    }
}

/// One random change: other bytes, an end, or a part of another file.
fn damage(file: &mut Vec<u8>, other: &[u8], rng: &mut ChaCha8Rng) {
    // Headers are short and say most.
    let at =
        if rng.random() { rng.random_range(0..file.len()) } else { rng.random_range(0..file.len().min(64)) };
    match rng.random_range(0..4) {
        0 => file[at] ^= 1 << rng.random_range(0..8),
        1 => file[at] = [0, 1, 0x7f, 0x80, 0xfe, 0xff].choose(rng).copied().unwrap(),
        2 => file.truncate(at.max(1)),
        _ => {
            let from = rng.random_range(0..other.len());
            let length = rng.random_range(1..=other.len() - from).min(4096);
            let end = (at + rng.random_range(0..=length)).min(file.len());
            file.splice(at..end, other[from..from + length].iter().copied());
        }
    }
}

#[test]
fn mutated_files_are_refused_or_decoded_within_bounded_memory() {
    let rounds = support::rounds(800) as u64;
    let seed: u64 = 0x1a6e_5eed;
    println!("seed {seed:#x}");
    let files: Vec<Vec<u8>> = decoded_pictures().keys().map(|name| picture_file(name)).collect();
    let (mut decoded, mut refused, mut failed, mut most) = (0, 0, 0, 0);
    for round in 0..rounds {
        let mut rng = ChaCha8Rng::seed_from_u64(seed.wrapping_add(round));
        // Each file in turn.
        let mut file = files[round as usize % files.len()].clone();
        for _ in 0..rng.random_range(1..=3) {
            let other = files.choose(&mut rng).unwrap();
            damage(&mut file, other, &mut rng);
        }
        let run = || fuzz_bodies::image(file.clone());
        let (result, peak) =
            bounded_allocation(file.len(), fuzz_bodies::IMAGE_BYTES, format_args!("round {round}"), run);
        most = most.max(peak);
        match result {
            Ok(_) => decoded += 1,
            Err(ImageError::DecoderFailed { format }) => {
                println!("round {round}: the {format} decoder panicked");
                failed += 1;
            }
            Err(_) => refused += 1,
        }
    }
    println!("{decoded} decoded, {refused} refused, {failed} panics caught, at most {most} bytes held");
    assert!(decoded > rounds / 20 && refused > rounds / 4 && failed < rounds / 20);
}

/// A PNG with alpha and 16 bits has the largest samples. They are converted where they are.
#[test]
fn a_picture_needs_at_most_the_memory_of_its_samples_and_a_few_rows() {
    const SIDE: u32 = 1000;
    let samples = vec![7; SIDE as usize * SIDE as usize * 8];
    let mut png = Vec::new();
    let encoder = image::codecs::png::PngEncoder::new(&mut png);
    image::ImageEncoder::write_image(encoder, &samples, SIDE, SIDE, image::ExtendedColorType::Rgba16)
        .unwrap();
    drop(samples);
    let (picture, peak) = peak_allocation(|| decode(&png, &Limits::default()).unwrap());
    assert_eq!(picture.pixels().len(), 3 * SIDE as usize * SIDE as usize);
    let samples = 8 * SIDE as usize * SIDE as usize;
    assert!(peak >= samples && peak < samples + samples / 8, "{peak}");
}
