//! The conversations of a family of models, as data: control tokens, and a chat template for checkpoints without one.

mod gemma;

/// A family's syntax of conversations.
#[derive(Debug)]
pub struct Family {
    /// The Jinja source of the chat template for checkpoints that have none, and what logs call it.
    pub(super) template: &'static str,
    pub(super) template_origin: &'static str,
    /// Texts of the tokens that a checkpoint does not name.
    pub(super) bos: &'static str,
    pub end_of_turn: &'static str,
    /// Control tokens that a file may list without `special`. They separate turns, so the text of an answer never has
    /// them.
    pub(super) between_turns: &'static [&'static str],
    /// The text that stands for an image in a prompt.
    pub(super) image: &'static str,
}

/// The family of all models that can be loaded.
pub static FAMILY: &Family = &gemma::GEMMA;
