//! Names of models as a person types them.

use crate::hub::{ModelName, NameError};
use crate::model::arch;

/// Reads the name of a model of the hub, or a short name.
pub fn read_name(text: &str) -> Result<ModelName, NameError> {
    ModelName::read(&long_name(text))
}

/// The model of the hub that a short name means. Other texts stay as they are.
fn long_name(text: &str) -> String {
    let text = text.trim();
    arch::short_names().find(|(short, _)| *short == text).map_or(text, |(_, long)| long).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::is_meant;

    #[test]
    fn short_names_and_names_of_other_programs_mean_models_of_the_hub() {
        let mut shorts = Vec::new();
        for (short, long) in arch::short_names() {
            assert_eq!(read_name(short).expect("known").to_string(), long);
            assert!(!shorts.contains(&short), "{short} means two models");
            shorts.push(short);
        }
        assert!(shorts.len() > 5, "{shorts:?}");
        for text in ["hf.co/org/x:Q4_0", "https://huggingface.co/org/x:Q4_0", " org/x:Q4_0 "] {
            assert_eq!(read_name(text).expect("a name").to_string(), "org/x:Q4_0");
        }
        assert_eq!(read_name("org/x:latest").expect("a name").to_string(), "org/x");
        for text in ["x3", "x3:28b", "hf.co/x", "example.com/library/x", ""] {
            read_name(text).expect_err(text);
        }
    }

    #[test]
    fn a_pulled_file_is_meant_by_its_name_or_its_tag() {
        let name = |text: &str| read_name(text).expect(text);
        let file = name("org/x:x-Q4_K_M.gguf");
        for (asked, expected) in [
            ("org/x:x-Q4_K_M.gguf", true),
            ("org/x:Q4_K_M", true),
            ("org/x:q4_k_m", true),
            ("org/x:Q8_0", false),
            ("org/x@v2:Q4_K_M", false),
            ("org/y:Q4_K_M", false),
            ("org/x", false),
        ] {
            assert_eq!(is_meant(&file, &name(asked)), expected, "{asked}");
        }
        assert!(is_meant(&name("org/x"), &name("org/x@main")));
    }
}
