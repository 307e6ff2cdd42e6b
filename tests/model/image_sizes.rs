//! The sizes that images get in a model: those of transformers for Gemma 4.

use unicorn::model::{ImageBudget, ImageLimits, ImageSizes};

use crate::support::data;

/// Three for a width, a height, and the number of tokens: the most, or the real one.
type Row = [usize; 3];

#[test]
fn images_get_the_sizes_of_transformers() {
    let bytes = std::fs::read(data("gemma4-vision/sizes.json")).expect("goldens");
    let rows: Vec<[Row; 2]> = serde_json::from_slice(&bytes).expect("rows");
    let sizes = ImageSizes::ByTokens { unit: 48, longest: usize::MAX };
    let limits = ImageLimits { sizes, tokens: 1120, usual_tokens: 280, slots: 1 };
    for [[width, height, budget], [new_width, new_height, tokens]] in &rows {
        let size = limits.fit([*width, *height], *budget);
        assert_eq!(size, [*new_width, *new_height], "{width} x {height} within {budget}");
        assert_eq!(limits.tokens_of(size), Some(*tokens), "{width} x {height} within {budget}");
    }
    for budget in ImageBudget::ALL {
        assert!(rows.iter().any(|[[.., of_row], _]| *of_row == budget), "no row with {budget} tokens");
    }
}

/// A picture of any size gets one that the model takes, with as many tokens as it may have at most.
#[test]
fn every_image_fits() {
    for unit in [1, 2, 48] {
        for most in [1, 2, 6, 70, 1120] {
            let sizes = ImageSizes::ByTokens { unit, longest: usize::MAX };
            let limits = ImageLimits { sizes, tokens: most, usual_tokens: most, slots: 1 };
            for width in (1..70).chain([97, 1000, 16_384]) {
                for height in (1..70).chain([101, 4000, 16_384]) {
                    let size = limits.fit([width, height], 1120);
                    assert!(limits.tokens_of(size).is_some(), "{width} x {height} as {size:?} within {most}");
                }
            }
        }
    }
}
