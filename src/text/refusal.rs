//! Translates llguidance's errors into messages for the author of the grammar.

/// Longest text of a [`Refusal`], in characters.
const MAX_CHARS: usize = 160;

/// Parts of llguidance's messages, with the text that replaces the message. Other messages are shown unchanged, because
/// they name a position in the client's grammar.
const MEANINGS: [(&str, &str); 15] = [
    // llguidance catches its own panics and reports them with this prefix.
    ("panic:", "its value is outside the range that can be enforced"),
    ("Regex is empty", "no text matches its pattern, format and length together"),
    ("Unable to determine if regex is empty", "pattern, format and length are too complex together"),
    ("lookarounds not supported", "the only look-around supported is ^ at the start and $ at the end"),
    ("has too many digits", "the number has too many digits"),
    ("Failed to generate regex for", "the bound is outside the range that can be enforced"),
    ("schema too large", "the schema is too large; make it simpler"),
    ("too big (limit", "the grammar is too large; make it simpler"),
    ("fuel", "it takes too much work to compile; make it simpler"),
    ("lexer precomputation failed", "it takes too much work to compile; make it simpler"),
    ("stack level exceeded", "allOf and $ref combine too many schemas; make it simpler"),
    (
        "circular references with sibling",
        "a $ref that refers to itself cannot be combined with other keywords",
    ),
    ("items; max is", "its text can be read in too many ways; make it simpler"),
    ("TooComplex", "its text can be read in too many ways; make it simpler"),
    ("NoExtension", "no text can match it"),
];

/// The reason of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// No JSON can match the schema.
    Contradiction,
    /// The regular expression is invalid in every dialect.
    Syntax,
    Other,
}

#[derive(Debug, Clone)]
pub(super) struct Refusal {
    pub kind: Kind,
    /// One line.
    pub text: String,
}

impl Refusal {
    /// Parses an error message of llguidance.
    pub fn new(message: &str) -> Self {
        let line = message.lines().next().unwrap_or_default().trim();
        let contradiction = line.strip_prefix("Unsatisfiable schema: ");
        let line = contradiction.unwrap_or(line);
        let mut kind = if contradiction.is_some() { Kind::Contradiction } else { Kind::Other };
        let text = if line.contains("regex parse error") {
            // The error of the regex crate has several lines; the reason is in this one.
            let why = message.lines().find_map(|line| line.trim().strip_prefix("error: "));
            let why = why.unwrap_or("it is invalid");
            if ["unclosed group", "unopened group", "repetition operator missing"]
                .iter()
                .any(|s| why.starts_with(s))
            {
                kind = Kind::Syntax;
            }
            format!("a regular expression cannot be read: {why}")
        } else if line.starts_with("oneOf constraints") {
            "oneOf is supported only if types or constants distinguish its options; use anyOf".to_owned()
        } else {
            let meaning = MEANINGS.iter().find(|(part, _)| line.contains(part));
            meaning.map_or(line, |(_, meaning)| meaning).to_owned()
        };
        Self { kind, text: text.chars().take(MAX_CHARS).collect() }
    }
}
