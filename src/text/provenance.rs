//! Finds out which control tokens in a prompt were written by the template, and which are text of a message.
//!
//! A template is a program, and its output does not show where each part came from. So the template renders the
//! conversation twice: once unchanged, which gives the prompt, and once with a mark on both sides of each character of
//! the messages. In the second text, a control token without a mark inside was written by the template. Its position in
//! the prompt follows from the number of marks before it. This works if the second text without marks equals the
//! prompt. It does not if the template searches a message (`'x' in message.content`) or changes more than the case of
//! its letters. In that case a second method puts marks only into the control tokens in messages, and the template must
//! write the same control tokens as with the first method. If both methods fail, the conversation is refused.

use std::collections::BTreeSet;

use jiff::Timestamp;
use serde_json::Value;

use super::added::{Kind, Placed};
use super::chat::Message;
use super::content::is_python_space;
use super::error::{MAX_TEXT_BYTES, TextError};
use super::kwargs::{Keys, changed};
use super::template::{ChatTemplate, TemplateInput};
use super::tokenizer::Tokenizer;

/// Longest text with marks. The worst case is a one-byte character and a space after it: they become 8 bytes, because
/// the character gets two marks of three bytes.
const MAX_MARKED_BYTES: usize = 4 * MAX_TEXT_BYTES + 8;

/// A conversation as rendered by the template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    pub text: String,
    /// The control tokens that the template wrote.
    pub(super) placed: Vec<Placed>,
}

impl Prompt {
    /// A prompt in whose text every name of a control token is one, also in the messages.
    pub fn with_all_control_tokens(text: String, tokenizer: &Tokenizer) -> Self {
        Self { placed: tokenizer.control_tokens(&text), text }
    }

    /// The token ids of the prompt. Only control tokens that the template wrote are control tokens in them.
    pub fn ids(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, TextError> {
        tokenizer.encode_around(&self.text, &self.placed, false)
    }
}

#[derive(Clone, Copy)]
enum Marks {
    AroundCharacters,
    InControlTokens,
}

impl ChatTemplate {
    /// The prompt of a conversation. The text of a message or of a variable never becomes a control token, with one
    /// exception: tokens that the text of an answer can show (`<think>`) are kept in the assistant's messages.
    pub fn prompt(&self, tokenizer: &Tokenizer, input: &TemplateInput<'_>) -> Result<Prompt, TextError> {
        // A template may write the time, which must be the same in all renderings.
        let now = Timestamp::now();
        let text = self.write(input, now, MAX_TEXT_BYTES)?;
        let unclear = || TextError::Unclear { origin: self.origin().to_owned() };
        let mark = unused_character(&text).ok_or_else(unclear)?;
        let mut own: Option<Vec<u32>> = None;
        // Templates compare the texts of a schema ("string"), so these never get marks around characters.
        let in_tokens = |text: &str| marked(text, tokenizer, false, Marks::InControlTokens, mark);
        let tools: Vec<Value> =
            input.tools.iter().map(|tool| changed(tool, Keys::Changed, &in_tokens)).collect();
        for marks in [Marks::AroundCharacters, Marks::InControlTokens] {
            let with_marks = |message: &Message| {
                let keep_shown = message.role == "assistant";
                let content = |text: &str| marked(text, tokenizer, keep_shown, marks, mark);
                let content = message.content.with_texts(content);
                message.with_texts(content, &|text| marked(text, tokenizer, false, marks, mark))
            };
            let messages: Vec<Message> = input.messages.iter().map(with_marks).collect();
            let kwargs = input.kwargs.with_texts(&|text| marked(text, tokenizer, false, marks, mark));
            let marked = TemplateInput { messages: &messages, tools: &tools, kwargs: &kwargs, ..*input };
            let marked = self.write(&marked, now, MAX_MARKED_BYTES).map_err(|_| unclear())?;
            let found = tokenizer.control_tokens(&marked);
            let ids: Vec<u32> = found.iter().map(|token| token.id).collect();
            if *own.get_or_insert_with(|| ids.clone()) == ids
                && let Some(placed) = without_marks(found, &marked, mark, &text)
            {
                return Ok(Prompt { text, placed });
            }
        }
        Err(unclear())
    }
}

/// A noncharacter or private-use character that is not in `text`.
fn unused_character(text: &str) -> Option<char> {
    let mut all = ('\u{fdd0}'..='\u{fdef}').chain('\u{e000}'..='\u{f8ff}');
    let used: BTreeSet<char> = text.chars().filter(|c| *c >= '\u{e000}').collect();
    all.find(|c| !used.contains(c))
}

/// `text` with marks. With `keep_shown`, tokens that answers can show ([`Kind::Shown`]) get no marks inside.
fn marked(text: &str, tokenizer: &Tokenizer, keep_shown: bool, marks: Marks, mark: char) -> String {
    let spelled = tokenizer.control_tokens(text);
    let (kept, broken): (Vec<_>, Vec<_>) =
        spelled.into_iter().partition(|token| keep_shown && token.kind == Kind::Shown);
    let mut out = String::with_capacity(text.len());
    let mut from = 0;
    match marks {
        Marks::AroundCharacters => {
            for token in kept {
                push_marked(&mut out, &text[from..token.range.start], mark);
                out.push_str(&text[token.range.clone()]);
                from = token.range.end;
            }
            push_marked(&mut out, &text[from..], mark);
        }
        Marks::InControlTokens => {
            for token in broken {
                let inside = token.name + text[token.name..].chars().next().map_or(0, char::len_utf8);
                out.extend([&text[from..inside], mark.encode_utf8(&mut [0; 4])]);
                from = inside;
            }
            out.push_str(&text[from..]);
        }
    }
    out
}

/// White space gets no marks, because templates trim it.
fn push_marked(out: &mut String, text: &str, mark: char) {
    for c in text.chars() {
        if is_python_space(c) {
            out.push(c);
            continue;
        }
        if !out.ends_with(mark) {
            out.push(mark);
        }
        out.extend([c, mark]);
    }
}

/// The tokens `found` in `marked`, with their positions in `text`; `None` if `marked` without marks is not `text`.
fn without_marks(found: Vec<Placed>, marked: &str, mark: char, text: &str) -> Option<Vec<Placed>> {
    let rest = marked.split(mark).try_fold(text, |rest, piece| rest.strip_prefix(piece))?;
    if !rest.is_empty() {
        return None;
    }
    let (mut at, mut marks) = (0, 0);
    let unmarked = |token: Placed| {
        marks += marked[at..token.range.start].matches(mark).count() * mark.len_utf8();
        at = token.range.start;
        let range = token.range.start - marks..token.range.end - marks;
        Placed { range, name: token.name - marks, ..token }
    };
    Some(found.into_iter().map(unmarked).collect())
}
