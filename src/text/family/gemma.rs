//! Gemma's conversations: the control tokens, and the template for checkpoints without one.

use super::syntax::Family;

pub(super) static GEMMA: Family = Family {
    template: include_str!("gemma.jinja"),
    template_origin: "built-in Gemma template",
    bos: "<bos>",
    end_of_turn: "<end_of_turn>",
    between_turns: &["<start_of_turn>", "<end_of_turn>"],
};
