//! The config of the image processor, which says what a tower was trained to get.
//!
//! Images are made as by the processors of the published models. This module refuses by name what would make others. A field
//! that is missing or null is as in the published models.

use serde_json::Value;

use super::spec::{Encoder, MAX_SIDE, VisionSpec};
use crate::model::ImageSizes;
use crate::model::config::{ConfigError, Level};

/// Pillow's numbers of the filters that images are resized with.
const BILINEAR: usize = 2;
const BICUBIC: usize = 3;

impl VisionSpec {
    /// Refuses a config of an image processor, at `level`, that makes other images than this tower gets.
    pub(in crate::model) fn check_processor(&self, level: &Level) -> Result<(), ConfigError> {
        for (name, wanted) in [("do_resize", true), ("do_rescale", true), ("do_pan_and_scan", false)] {
            level.check_flag(name, wanted)?;
        }
        self.check_levels(level)?;
        match self.sizes {
            ImageSizes::Fixed { side } => {
                check_number(level, "resample", BILINEAR)?;
                let tokens = self.fixed_tokens().expect("images of one size");
                check_number(level, "image_seq_length", tokens)?;
                let Some(size) = level.object("size")? else { return Ok(()) };
                ["height", "width"].into_iter().try_for_each(|name| check_number(&size, name, side))
            }
            ImageSizes::ByTokens { unit, .. } => {
                check_number(level, "resample", BICUBIC)?;
                let names = ["patch_size", "pooling_kernel_size"];
                // Squares of patches are tokens. The sides of both are known if both fields are there.
                if names.iter().any(|name| level.get(name).is_none()) {
                    return Ok(());
                }
                let [patch, pool] = names.map(|name| level.size(name, 0, 1..=MAX_SIDE));
                let (patch, pool) = (patch?, pool?);
                if patch * pool != unit {
                    let problem =
                        format!("is {patch}, times pooling_kernel_size ({pool}); expected {unit} pixels");
                    return Err(level.error(names[0], problem));
                }
                Ok(())
            }
        }
    }

    /// Refuses other levels of pixels.
    fn check_levels(&self, level: &Level) -> Result<(), ConfigError> {
        // The other towers scale levels from 0 to 1 themselves.
        let (mean, std) = match self.encoder {
            Encoder::LayerNorms(_) => (0.5, 0.5),
            Encoder::RmsNorms { .. } | Encoder::Linear { .. } => (0.0, 1.0),
        };
        let checked = |name: &str, value: &Value, wanted: f64| match value.as_f64() {
            Some(found) if (found - wanted).abs() < 1e-6 => Ok(()),
            _ => Err(level.mismatch(name, value, wanted)),
        };
        if let Some(factor) = level.get("rescale_factor") {
            checked("rescale_factor", factor, 1.0 / 255.0)?;
        }
        if level.flag("do_normalize")? == Some(false) && (mean, std) == (0.0, 1.0) {
            return Ok(());
        }
        level.check_flag("do_normalize", true)?;
        for (name, wanted) in [("image_mean", mean), ("image_std", std)] {
            match level.get(name) {
                None => {}
                Some(Value::Array(each)) => {
                    each.iter().try_for_each(|value| checked(name, value, wanted))?;
                }
                Some(one) => checked(name, one, wanted)?,
            }
        }
        Ok(())
    }
}

/// Refuses another whole number than `wanted`.
fn check_number(level: &Level, name: &str, wanted: usize) -> Result<(), ConfigError> {
    match level.optional_size(name, wanted, 0..=u64::MAX)? {
        found if found == wanted => Ok(()),
        found => Err(level.error(name, format!("is {found}; expected {wanted}"))),
    }
}
