//! ChatML, the conversations of Qwen, SmolLM and others.

use super::syntax::Family;

pub(super) static CHATML: Family = Family {
    mark: "<|im_start|>",
    template: None,
    bos: None,
    end_of_turn: "<|im_end|>",
    between_turns: &["<|im_start|>", "<|im_end|>"],
    thought: None,
    image: None,
};
