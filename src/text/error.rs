//! Errors of the tokenizer, the chat template, grammars and stop strings.

/// Longest text, in bytes, that is rendered from a conversation or tokenized in one call.
///
/// The worst text takes about a second and 150 bytes of memory per byte of text to encode, so this limit bounds the
/// cost of one request. The limit is four times the longest Gemma-3 context (131,072 tokens of about four bytes).
pub const MAX_TEXT_BYTES: usize = 2 << 20;

/// What went wrong with a tokenizer, a template, or a text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// The tokenizer file cannot be used; `problem` names the field and what was expected.
    #[error("{file}: {problem}")]
    Tokenizer { file: String, problem: String },

    /// A regular token has no row in the model's embedding.
    #[error(
        "{file}: the tokenizer does not fit the model: it holds ids up to {largest} (token {token:?}), the \
         model's vocabulary has {rows} rows; take the tokenizer.json that came with the weights"
    )]
    DoesNotFit { file: String, token: String, largest: u32, rows: usize },

    /// The text holds a token that the tokenizer knows and this model does not (an image token, mostly).
    #[error(
        "the text holds the token {token:?} (id {id}), which is outside this model's vocabulary of {rows} \
         rows; remove it from the text"
    )]
    OutsideModel { token: String, id: u32, rows: usize },

    /// The text is longer than [`MAX_TEXT_BYTES`].
    #[error("the text is too long: {bytes} bytes, at most {limit} are accepted")]
    TooLong { bytes: usize, limit: usize },

    /// The tokenizer's own pipeline refused the text.
    #[error("{file}: this text cannot be tokenized: {problem}")]
    Encode { file: String, problem: String },

    /// The chat template cannot be read, compiled or run; `problem` names the template's line where it is known.
    #[error("{origin}: {problem}")]
    Template { origin: String, problem: String },

    /// The chat template itself refused the conversation (`raise_exception`), in its own words.
    #[error("the chat template refused the conversation: {0}")]
    Raised(String),

    /// The template's own control tokens cannot be told from those that messages spell.
    #[error(
        "{origin}: this chat template reads the text of messages, so its own control tokens cannot be told from those \
         that a message spells; leave control tokens out of the messages, or set tokenizer.special_in_content = true \
         to have them read as control tokens"
    )]
    Unclear { origin: String },

    /// Plain text would become a control token.
    #[error(
        "{file}: the text holds {token:?}, and this tokenizer has no other way to write it than the control token; \
         leave it out of the text, or set tokenizer.special_in_content = true to have it read as a control token"
    )]
    ControlToken { file: String, token: String },

    /// The conversation has no message.
    #[error("messages is empty: a conversation needs at least one message")]
    NoMessages,

    /// A grammar cannot be compiled, or an answer can no longer follow it; the text names the part at fault.
    #[error("{0}")]
    Grammar(String),

    /// One of several schemas of a grammar cannot be compiled; `part` is its index.
    #[error("{problem}")]
    Schema { part: usize, problem: String },
    /// The system gives this process no thread, for want of memory mostly.
    #[error(
        "the system starts no thread for {doing}: {error}; this process has too little memory or too many threads (`ulimit -v`, \
         `ulimit -u`, MemoryMax=, TasksMax=)"
    )]
    NoThread { doing: &'static str, error: String },

    /// The stop strings cannot be used.
    #[error("stop: {0}")]
    Stop(String),
}
