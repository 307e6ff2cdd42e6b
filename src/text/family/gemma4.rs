//! The conversations of Gemma 4.

use super::syntax::Family;

pub(super) static GEMMA4: Family = Family {
    mark: "<|turn>",
    template: None,
    bos: Some("<bos>"),
    end_of_turn: "<turn|>",
    between_turns: &["<|turn>", "<turn|>"],
};
