//! The resize gives the same bytes as Pillow's.

use serde::Deserialize;

use unicorn::image::{Filter, Rgb};

use crate::support::checkpoints::sha256;
use crate::support::images::{decoded_pictures, path};
use crate::support::json::read_json;
use crate::support::peak_allocation;

#[derive(Deserialize)]
struct Goldens {
    resized: Vec<Resized>,
}

/// A resize of a decoded picture, or of one that the formula gives.
#[derive(Deserialize)]
struct Resized {
    picture: Option<String>,
    formula: Option<[u32; 2]>,
    source_sha256: Option<String>,
    to: [u32; 2],
    filter: String,
    sha256: String,
}

/// pixel(x, y, c) = (x (7 + 2c) + y (13 - 3c) + floor(xy / 32) + 31c) mod 256
fn formula([width, height]: [u32; 2]) -> Rgb {
    let pixel =
        |x, y| [0, 1, 2].map(|c| (x * (7 + 2 * c) + y * (13 - 3 * c) + ((x * y) >> 5) + 31 * c) as u8);
    let pixels = (0..height).flat_map(|y| (0..width).flat_map(move |x| pixel(x, y)));
    Rgb::new(width, height, pixels.collect())
}

#[test]
fn every_resize_equals_pillows_to_the_bit() {
    let goldens: Goldens = read_json(&path("resized.json"));
    let (mut of_pictures, mut of_formula) = (0, 0);
    for row in &goldens.resized {
        let source = match (&row.picture, row.formula) {
            (Some(name), None) => {
                of_pictures += 1;
                decoded_pictures()[name].clone()
            }
            (None, Some(size)) => {
                of_formula += 1;
                let source = formula(size);
                assert_eq!(Some(sha256(source.pixels())), row.source_sha256, "{size:?}");
                source
            }
            _ => panic!("a row without its source"),
        };
        let filter = match row.filter.as_str() {
            "bilinear" => Filter::Bilinear,
            "bicubic" => Filter::Bicubic,
            other => panic!("{other}"),
        };
        let [width, height] = row.to;
        let resized = source.resize(width, height, filter);
        let what = format_args!("{:?} {:?} to {width} x {height}, {filter:?}", row.picture, row.formula);
        assert_eq!([resized.width(), resized.height()], row.to, "{what}");
        assert_eq!(sha256(resized.pixels()), row.sha256, "{what}");
    }
    assert_eq!((of_pictures, of_formula), (35 * 8 * 2, 12 * 2));
}

#[test]
fn a_resize_to_the_same_size_changes_nothing() {
    for (name, picture) in decoded_pictures() {
        for filter in [Filter::Bilinear, Filter::Bicubic] {
            assert!(picture.resize(picture.width(), picture.height(), filter) == *picture, "{name}");
        }
    }
}

/// The rows at the new width are not held all at once: here they would be 40 MB.
#[test]
fn a_resize_holds_few_rows_in_addition_to_its_result() {
    let picture = formula([16, 16_384]);
    let (resized, peak) = peak_allocation(|| picture.resize(800, 64, Filter::Bilinear));
    let result = resized.pixels().len();
    // A row of the result is made of 2 * 16384 / 64 rows of 2400 bytes.
    assert!(peak >= result && peak < result + 515 * 2400 + (256 << 10), "{peak}");
}
