//! What a family of models has of its own in a conversation.

/// A family's syntax of conversations.
#[derive(Debug)]
pub struct Family {
    /// A control token that only vocabularies of this family have.
    pub(super) mark: &'static str,
    /// The chat template for checkpoints that have none.
    pub(in crate::text) template: Option<BuiltIn>,
    /// Text of the token that begins a conversation, for checkpoints that do not name it.
    pub(in crate::text) bos: Option<&'static str>,
    pub(in crate::text) end_of_turn: &'static str,
    /// Control tokens that a file may list without `special`. They separate turns, so the text of an answer never has
    /// them.
    pub(super) between_turns: &'static [&'static str],
    /// How a model of the family writes down what it thinks before it answers, if its vocabulary has these tokens.
    pub(in crate::text) thought: Option<ThoughtSyntax>,
}

/// The tokens around a thought.
#[derive(Debug, Clone, Copy)]
pub(in crate::text) struct ThoughtSyntax {
    pub open: &'static str,
    /// The text that follows `open` and is not part of the thought.
    pub header: &'static str,
    pub close: &'static str,
}

/// A chat template in the binary.
#[derive(Debug, Clone, Copy)]
pub(in crate::text) struct BuiltIn {
    /// Its Jinja source, and what logs call it.
    pub source: &'static str,
    pub origin: &'static str,
}
