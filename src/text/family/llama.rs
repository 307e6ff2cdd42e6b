//! The conversations of Llama 3.

use super::syntax::Family;

pub(super) static LLAMA: Family = Family {
    mark: "<|start_header_id|>",
    template: None,
    bos: Some("<|begin_of_text|>"),
    end_of_turn: "<|eot_id|>",
    between_turns: &["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    thought: None,
    image: None,
};
