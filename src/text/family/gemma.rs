//! Gemma's conversations: the control tokens, and the template for checkpoints without one.

use super::syntax::{BuiltIn, Family, ImageSyntax};

pub(super) static GEMMA: Family = Family {
    mark: "<start_of_turn>",
    template: Some(BuiltIn { source: include_str!("gemma.jinja"), origin: "built-in Gemma template" }),
    bos: Some("<bos>"),
    end_of_turn: "<end_of_turn>",
    between_turns: &["<start_of_turn>", "<end_of_turn>"],
    thought: None,
    image: Some(ImageSyntax {
        written: "<start_of_image>",
        begin: "<start_of_image>",
        soft: "<image_soft_token>",
        end: "<end_of_image>",
        around: "\n\n",
    }),
};
