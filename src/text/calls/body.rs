//! Reads calls between control tokens.
//!
//! The caller gives the text of an answer piece by piece, and the control tokens as they come. A control token that a
//! text only spells is text.

use std::sync::Arc;

use serde_json::Value;

use super::bare::BareBody;
use super::format::{CallFormat, CallTokens};
use super::json::{CallReader, Nesting};
use super::pieces::{AnswerPiece, CallPiece, KnownTool, Pieces};
use super::tagged::TaggedBody;
use crate::text::family::{CallBody, CallSyntax};

/// Reads the calls of an answer.
#[derive(Debug, Clone)]
pub(in crate::text) struct CallsReader {
    pub tokens: CallTokens,
    syntax: &'static CallSyntax,
    tools: Arc<[KnownTool]>,
    open: Option<Body>,
    pieces: Pieces,
    /// Whether the last call is complete.
    is_complete: bool,
}

/// The inside of a call.
#[derive(Debug, Clone)]
enum Body {
    Json {
        reader: CallReader,
        before: usize,
    },
    Named(NamedBody),
    Bare(BareBody),
    Tagged(TaggedBody),
    /// It is not a call of a known tool. All of it is text.
    Text,
}

impl CallsReader {
    /// A reader for calls of tools with these names and parameters. `None` = the format has no control tokens.
    pub fn new<'a>(
        format: &CallFormat,
        tools: impl IntoIterator<Item = (&'a str, &'a Value)>,
    ) -> Option<Self> {
        Some(Self {
            tokens: format.tokens.clone()?,
            syntax: format.syntax,
            tools: tools.into_iter().map(|(name, parameters)| KnownTool::new(name, parameters)).collect(),
            open: None,
            pieces: Pieces::default(),
            is_complete: false,
        })
    }

    pub fn has_tools(&self) -> bool {
        !self.tools.is_empty()
    }

    /// Whether a call is open.
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Whether the answer has calls, and the last one is complete.
    pub fn called(&self) -> bool {
        self.pieces.calls() > 0 && self.is_complete
    }

    /// Whether a call has begun.
    pub fn has_calls(&self) -> bool {
        self.pieces.calls() > 0
    }

    /// Begins a call, after [`CallTokens::open`].
    pub fn open(&mut self) {
        self.is_complete = false;
        self.open = Some(match self.syntax.body {
            CallBody::Json { arguments, .. } => {
                let names = self.tools.iter().map(|tool| tool.name.clone()).collect();
                Body::Json { reader: CallReader::with(names, arguments), before: self.pieces.calls() }
            }
            CallBody::Named { .. } => Body::Named(NamedBody::default()),
            CallBody::Bare { .. } => Body::Bare(BareBody::default()),
            CallBody::Tagged => Body::Tagged(TaggedBody::default()),
        });
    }

    /// Takes text within a call.
    pub fn push(&mut self, text: &str) {
        let (tools, pieces) = (&self.tools, &mut self.pieces);
        let rest = match self.open.as_mut().expect("a call is open") {
            Body::Json { reader, before } => {
                let read = reader.push(text);
                add(read, *before, pieces);
                None
            }
            Body::Named(body) => body.push(text, pieces),
            Body::Bare(body) => body.push(text, tools, pieces),
            Body::Tagged(body) => body.push(text, tools, pieces),
            Body::Text => Some(text.to_owned()),
        };
        self.give_up(rest);
    }

    /// Takes the control token within a call.
    pub fn mark(&mut self) {
        let rest = match self.open.as_mut().expect("a call is open") {
            Body::Named(body) => body.mark(&self.tools, &mut self.pieces),
            Body::Bare(body) => {
                body.quote(&mut self.pieces);
                None
            }
            Body::Json { .. } | Body::Tagged(_) | Body::Text => None,
        };
        self.give_up(rest);
    }

    /// Takes the control token after which an id of the call follows.
    pub fn call_id(&mut self) {
        if let Some(Body::Named(body)) = &mut self.open {
            body.is_in_id = !body.is_named;
        }
    }

    /// The call turned out to be text, of which `rest` was held back.
    fn give_up(&mut self, rest: Option<String>) {
        if let Some(rest) = rest {
            self.pieces.text(&rest);
            self.open = Some(Body::Text);
        }
    }

    /// Ends the call: with its control token, or, `cut`, because the answer ends. Then what is not yet known to be a call
    /// is dropped: it is the beginning of one.
    pub fn close(&mut self, cut: bool) {
        let Some(mut open) = self.open.take() else { return };
        let pieces = &mut self.pieces;
        if let Some(text) = open.unnamed() {
            pieces.text(if cut { "" } else { &text });
            return;
        }
        self.is_complete = match open {
            Body::Json { reader, .. } => reader.called(),
            Body::Named(body) => body.is_complete,
            Body::Bare(body) => body.close(cut, pieces),
            Body::Tagged(body) => body.close(cut, pieces),
            Body::Text => false,
        };
    }

    /// What was read since the last call.
    pub fn take(&mut self) -> Vec<AnswerPiece> {
        self.pieces.take()
    }
}

impl Body {
    /// What has arrived of a call whose tool is not known yet. `None` = the tool is known, or it is all text.
    fn unnamed(&mut self) -> Option<String> {
        match self {
            Self::Json { reader, .. } => match reader.finish()? {
                AnswerPiece::Text(text) => Some(text),
                AnswerPiece::Call(_) => None,
            },
            Self::Named(body) => (!body.is_named).then(|| std::mem::take(&mut body.name)),
            Self::Bare(body) => body.unnamed(),
            Self::Tagged(body) => body.unnamed(),
            Self::Text => None,
        }
    }
}

/// Adds the pieces of a reader whose calls begin after `before` others.
fn add(read: Vec<AnswerPiece>, before: usize, pieces: &mut Pieces) {
    for piece in read {
        match piece {
            AnswerPiece::Text(text) => pieces.text(&text),
            AnswerPiece::Call(CallPiece::Name { name, index }) => {
                debug_assert_eq!(before + index, pieces.calls());
                pieces.call(&name);
            }
            AnswerPiece::Call(CallPiece::Parameters { json, .. }) => pieces.json(&json),
        }
    }
}

/// A name, a control token, and JSON. There may be an id after the name.
#[derive(Debug, Clone, Default)]
struct NamedBody {
    name: String,
    is_in_id: bool,
    is_named: bool,
    nesting: Nesting,
    is_complete: bool,
}

impl NamedBody {
    fn push(&mut self, text: &str, pieces: &mut Pieces) -> Option<String> {
        if !self.is_named {
            self.name.push_str(if self.is_in_id { "" } else { text });
            return None;
        }
        let mut end = 0;
        for (at, c) in text.char_indices() {
            if self.is_complete {
                break;
            }
            end = at + c.len_utf8();
            self.is_complete = self.nesting.closes(c);
        }
        pieces.json(&text[..end]);
        None
    }

    fn mark(&mut self, tools: &[KnownTool], pieces: &mut Pieces) -> Option<String> {
        if self.is_named {
            return None;
        }
        let name = self.name.trim();
        if !tools.iter().any(|tool| tool.name == name) {
            return Some(std::mem::take(&mut self.name));
        }
        self.is_named = true;
        pieces.call(name);
        None
    }
}
