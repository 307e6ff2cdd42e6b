//! What clients send as an image: `data:` URIs in every spelling, and base64 without a prefix. Addresses are refused.

use rand::{RngCore as _, SeedableRng};
use rand_chacha::ChaCha8Rng;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD};

use unicorn::image::{ImageError, file_of};

use crate::support::images::picture_file;
use crate::support::peak_allocation;

const MAX_BYTES: usize = 100_000;

#[test]
fn data_uris_and_bare_base64_in_every_spelling_give_the_file() {
    let file = picture_file("gray.png");
    let plain = STANDARD.encode(&file);
    assert!(plain.contains('+') && plain.contains('/'), "a spelling is not tried");
    let in_lines: Vec<&str> =
        (0..plain.len()).step_by(76).map(|at| &plain[at..plain.len().min(at + 76)]).collect();
    let bodies = [
        plain.clone(),
        STANDARD_NO_PAD.encode(&file),
        URL_SAFE.encode(&file),
        URL_SAFE_NO_PAD.encode(&file),
        in_lines.join("\n"),
        in_lines.join("\r\n") + "\r\n",
        format!(" {plain}\t"),
    ];
    let prefixes = [
        "",
        "data:image/png;base64,",
        "data:image/jpeg;base64,",
        "DATA:IMAGE/PNG;BASE64,",
        "data:;base64,",
        "data:image/png,",
        "data:,",
        "data:image/png;charset=utf-8;name=a%20b.png;base64,",
        "data:text/plain;base64, ",
        " \n data:image/png; base64,",
    ];
    for body in &bodies {
        for prefix in prefixes {
            let text = format!("{prefix}{body}");
            let found = file_of(&text, MAX_BYTES).unwrap_or_else(|e| panic!("{prefix}: {e}"));
            assert!(found == file, "{prefix}");
        }
    }
    let percents = plain.replace('+', "%2B").replace('/', "%2f").replace('=', "%3D");
    assert!(file_of(&format!("data:image/png;base64,{percents}"), MAX_BYTES).unwrap() == file);
}

#[test]
fn files_of_every_length_are_read_with_and_without_padding() {
    let seed = 0xba5e;
    println!("seed {seed:#x}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    for length in 1..100 {
        let mut file = vec![0; length];
        rng.fill_bytes(&mut file);
        for base64 in [&STANDARD, &STANDARD_NO_PAD, &URL_SAFE, &URL_SAFE_NO_PAD] {
            assert_eq!(file_of(&base64.encode(&file), length).as_ref(), Ok(&file));
        }
    }
}

#[test]
fn addresses_are_refused_with_a_hint_at_data_uris() {
    for address in [
        "http://example.org/a.png",
        "https://example.org/a.png?data:image/png;base64,AAAA",
        "HTTPS://EXAMPLE.ORG/A.PNG",
        " https:a",
        "file:///etc/passwd",
        "ftp://example.org/a.png",
    ] {
        let error = file_of(address, MAX_BYTES).unwrap_err();
        let message = error.to_string();
        assert!(matches!(error, ImageError::Address { .. }), "{address}: {message}");
        assert!(message.contains("loads nothing from addresses"), "{message}");
        assert!(message.contains("\"data:image/png;base64,...\""), "{message}");
        assert!(!message.contains("example") && !message.contains("passwd"), "{message}");
    }
}

#[test]
fn texts_that_are_no_image_are_refused_by_what_is_wrong() {
    let long = format!("{}:x", "s".repeat(500));
    let cases = [
        ("", "holds no data"),
        ("data:image/png;base64,", "holds no data"),
        ("====", "holds no data"),
        ("data:image/png;base64", "without a comma"),
        ("blob:https://example.org/1", "scheme \"blob\""),
        (&long, "scheme \"ssssssssssssssssssss\""),
        ("C:\\a.png", "scheme \"c\""),
        ("data:image/png;base64,iVBO*w0", "its character 5 is '*'"),
        ("a.png", "its character 2 is '.'"),
        ("iVBOR\u{e9}", "its character 6 is not of the alphabet"),
        ("iVBOR", "ends within a group, after 5 characters"),
        ("iVB=ORw0", "its character 4 is '='"),
        // Without a prefix, a percent sign encodes nothing.
        ("iVBO%2B", "its character 5 is '%'"),
        ("data:,iVBO%zz", "its character 5 is '%'"),
        ("/api/v1/files/1/content?x", "its character 24 is '?'"),
    ];
    for (text, part) in cases {
        let message = file_of(text, MAX_BYTES).unwrap_err().to_string();
        assert!(message.contains(part), "{text}: {message}");
        assert!(!message.contains('\n') && !message.ends_with('.') && message.len() < 300, "{message}");
    }
}

#[test]
fn a_file_above_the_limit_is_refused_before_it_is_decoded() {
    let text = STANDARD.encode(vec![1; 1_000_000]);
    let (result, peak) = peak_allocation(|| file_of(&text, 999_000));
    assert_eq!(result, Err(ImageError::TooManyBytes { max_bytes: 999_000 }));
    assert!(peak < 1000, "{peak}");
    // One byte too many, and none.
    assert_eq!(file_of(&text, 999_999), Err(ImageError::TooManyBytes { max_bytes: 999_999 }));
    assert_eq!(file_of(&text, 1_000_000).map(|file| file.len()), Ok(1_000_000));
}
