//! Errors of the tokenizer, the chat template, grammars and stop strings.

/// Longest text, in bytes, that can be rendered from a conversation or tokenized in one call.
///
/// The worst text takes about a second and 150 bytes of memory per byte of text to encode, so this limit bounds the
/// cost of one request. The limit is four times the longest context (131,072 tokens of about four bytes).
pub const MAX_TEXT_BYTES: usize = 2 << 20;

/// An error of a tokenizer, a template, a grammar, or a text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// The tokenizer file cannot be used. `problem` names the field and the expected value.
    #[error("{file}: {problem}")]
    Tokenizer { file: String, problem: String },

    /// A regular token has no row in the model's embedding.
    #[error(
        "{file}: the tokenizer does not fit the model: its ids go up to {largest} (token {token:?}), but the \
         model's vocabulary has {rows} rows; use the tokenizer.json that came with the weights"
    )]
    DoesNotFit { file: String, token: String, largest: u32, rows: usize },

    /// The text contains a token of the tokenizer that the model does not have (usually an image token).
    #[error(
        "the text contains the token {token:?} (id {id}), which is outside this model's vocabulary of {rows} \
         rows; remove it from the text"
    )]
    OutsideModel { token: String, id: u32, rows: usize },

    /// The text is longer than [`MAX_TEXT_BYTES`].
    #[error("the text is too long: {bytes} bytes, at most {limit} are accepted")]
    TooLong { bytes: usize, limit: usize },

    /// The tokenizers library returned an error for the text.
    #[error("{file}: this text cannot be tokenized: {problem}")]
    Encode { file: String, problem: String },

    /// The chat template cannot be read, compiled or run. `problem` names the template's line if it is known.
    #[error("{origin}: {problem}")]
    Template { origin: String, problem: String },

    /// The chat template refused the conversation by `raise_exception` with this message.
    #[error("the chat template refused the conversation: {0}")]
    Raised(String),

    /// The control tokens that the template writes cannot be distinguished from the ones in the messages' text.
    #[error(
        "{origin}: this chat template reads the text of messages, so its own control tokens cannot be distinguished \
         from those in a message; leave control tokens out of the messages, or set \
         tokenizer.special_in_content = true to have them read as control tokens"
    )]
    Unclear { origin: String },

    /// Plain text would become a control token.
    #[error(
        "{file}: the text contains {token:?}, which this tokenizer can encode only as the control token; \
         leave it out of the text, or set tokenizer.special_in_content = true to have it read as a control token"
    )]
    ControlToken { file: String, token: String },

    /// The template did not write one token for each image, or a message has the name of such a token.
    #[error(
        "the prompt has the token {name:?} {written} times, and its images need it {expected} times: leave the names of \
         control tokens out of the messages, and put images only where the model's chat template writes them, as in \
         messages of the user"
    )]
    Images { name: &'static str, written: usize, expected: usize },

    /// The checkpoint has no chat template.
    #[error(
        "this model has no chat template, so it cannot answer conversations: give one with --chat-template FILE \
         (model.chat_template), or use /v1/completions, which needs none"
    )]
    NoTemplate,

    /// The conversation has no message.
    #[error("messages is empty: a conversation needs at least one message")]
    NoMessages,

    /// A grammar cannot be compiled, or an answer can no longer follow it. The text names the invalid part.
    #[error("{0}")]
    Grammar(String),

    /// One of several schemas of a grammar cannot be compiled; `part` is its index.
    #[error("{problem}")]
    Schema { part: usize, problem: String },

    /// A thread cannot be started, usually because memory is short.
    #[error(
        "cannot start a thread for {doing}: {error}; this process has too little memory or too many threads \
         (`ulimit -v`, `ulimit -u`, MemoryMax=, TasksMax=)"
    )]
    NoThread { doing: &'static str, error: String },

    /// The grammars of other requests are compiled, and do not end in time.
    #[error("the grammars of other requests take too long to compile")]
    OthersCompile,

    /// The stop strings cannot be used.
    #[error("stop: {0}")]
    Stop(String),
}
