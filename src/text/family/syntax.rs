//! What a family of models has of its own in a conversation.

/// A family's syntax of conversations.
#[derive(Debug)]
pub struct Family {
    /// The Jinja source of the chat template for checkpoints that have none, and what logs call it.
    pub(in crate::text) template: &'static str,
    pub(in crate::text) template_origin: &'static str,
    /// Texts of the tokens that a checkpoint does not name.
    pub(in crate::text) bos: &'static str,
    pub end_of_turn: &'static str,
    /// Control tokens that a file may list without `special`. They separate turns, so the text of an answer never has
    /// them.
    pub(in crate::text) between_turns: &'static [&'static str],
}
