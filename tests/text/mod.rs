//! Text without a model: tokenizers, templates, grammars and schemas.

mod gbnf;
mod grammar;
mod images;
mod jinja;
mod schemas;
mod tokens;
