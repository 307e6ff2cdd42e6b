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
    /// How a model of the family writes down what it thinks before it answers. `None` = as most models do.
    pub(in crate::text) thought: Option<ThoughtSyntax>,
    /// How a prompt of the family has images, if its models may take any.
    pub(in crate::text) image: Option<ImageSyntax>,
}

/// The tokens of an image in a prompt.
#[derive(Debug, Clone, Copy)]
pub(in crate::text) struct ImageSyntax {
    /// The token that a template writes for an image: `begin` or `soft`.
    pub written: &'static str,
    pub begin: &'static str,
    /// The token in the places of the image's embeddings.
    pub soft: &'static str,
    pub end: &'static str,
    /// The text before `begin` and after `end`, which the template does not write.
    pub around: &'static str,
}

/// The tokens around a thought.
#[derive(Debug, Clone, Copy)]
pub(in crate::text) struct ThoughtSyntax {
    pub open: &'static str,
    /// The text that follows `open` and is not part of the thought.
    pub header: &'static str,
    pub close: &'static str,
    /// A control token within a turn after which the model may think again.
    pub again_after: Option<&'static str>,
}

/// How most models that think write down their thoughts: Qwen, and models of other families that learned it later.
pub(in crate::text) const THINK: ThoughtSyntax =
    ThoughtSyntax { open: "<think>", header: "\n", close: "</think>", again_after: None };

/// A chat template in the binary.
#[derive(Debug, Clone, Copy)]
pub(in crate::text) struct BuiltIn {
    /// Its Jinja source, and what logs call it.
    pub source: &'static str,
    pub origin: &'static str,
}
