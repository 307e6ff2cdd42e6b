//! The conversations of families of models, as data: control tokens, and a chat template for checkpoints without one. A
//! checkpoint's family is known by its vocabulary.

mod calls;
mod chatml;
mod gemma;
mod gemma4;
mod llama;
mod mistral;
mod syntax;

pub(super) use calls::CallBody;
pub use calls::CallSyntax;
pub use syntax::Family;
pub(super) use syntax::{ImageSyntax, THINK, ThoughtSyntax};

static FAMILIES: [&Family; 5] =
    [&gemma::GEMMA, &gemma4::GEMMA4, &llama::LLAMA, &chatml::CHATML, &mistral::MISTRAL];

/// The family of a vocabulary, of which `contains` says whether it has a token.
pub(super) fn of(contains: impl Fn(&str) -> bool) -> Option<&'static Family> {
    FAMILIES.into_iter().find(|family| contains(family.mark))
}

/// The syntaxes of calls, and the one for models without their own.
pub(super) fn call_syntaxes() -> impl Iterator<Item = &'static CallSyntax> {
    calls::CALL_SYNTAXES.into_iter()
}

pub(super) fn plain_json() -> &'static CallSyntax {
    &calls::PLAIN_JSON
}

/// Whether this token separates turns or belongs to images in some family. It is a control token, also in a file that does
/// not say so.
pub(super) fn is_syntax(token: &str) -> bool {
    let of_images = |image: ImageSyntax| [image.begin, image.soft, image.end].contains(&token);
    FAMILIES.iter().any(|family| family.between_turns.contains(&token) || family.image.is_some_and(of_images))
}
