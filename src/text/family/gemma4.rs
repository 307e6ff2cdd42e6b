//! The conversations of Gemma 4.

use super::syntax::{Family, ImageSyntax, ThoughtSyntax};

pub(super) static GEMMA4: Family = Family {
    mark: "<|turn>",
    template: None,
    bos: Some("<bos>"),
    end_of_turn: "<turn|>",
    between_turns: &["<|turn>", "<turn|>"],
    thought: Some(ThoughtSyntax {
        open: "<|channel>",
        header: "thought\n",
        close: "<channel|>",
        again_after: Some("<tool_response|>"),
    }),
    image: Some(ImageSyntax {
        written: "<|image|>",
        begin: "<|image>",
        soft: "<|image|>",
        end: "<image|>",
        around: "",
    }),
};
