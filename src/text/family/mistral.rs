//! The conversations of Mistral.

use super::syntax::{Family, ThoughtSyntax};

pub(super) static MISTRAL: Family = Family {
    mark: "[INST]",
    template: None,
    bos: Some("<s>"),
    end_of_turn: "</s>",
    between_turns: &["[INST]", "[/INST]"],
    // Ministral's system text has an example of a thought.
    thought: Some(ThoughtSyntax {
        open: "[THINK]",
        header: "",
        close: "[/THINK]",
        again_after: Some("[/INST]"),
    }),
    image: None,
};
