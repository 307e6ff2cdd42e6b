//! How models write calls of tools: the control tokens, and what is between them.

/// How a model writes calls of tools in an answer.
#[derive(Debug, PartialEq)]
pub struct CallSyntax {
    /// The name in options and reports. Most names are vLLM's.
    pub name: &'static str,
    /// `None` = a call has no control tokens. An answer that is JSON from its start is a call.
    pub(in crate::text) marks: Option<CallMarks>,
    pub(in crate::text) body: CallBody,
    /// Whether the chat template describes the tools, and writes the calls and results of earlier turns. Otherwise these
    /// are ordinary text in the messages.
    pub in_template: bool,
    /// Whether one answer may make several calls.
    pub is_parallel: bool,
}

/// The control tokens around calls.
#[derive(Debug, PartialEq)]
pub(in crate::text) struct CallMarks {
    pub open: &'static str,
    /// `None` = a call ends with the next one, or with the answer.
    pub close: Option<&'static str>,
    /// A token that ends an answer with calls, in addition to the model's own.
    pub end: Option<&'static str>,
    /// Further control tokens of the syntax. An answer's text never has them.
    pub others: &'static [&'static str],
}

/// What is between the control tokens of a call.
#[derive(Debug, PartialEq)]
pub(in crate::text) enum CallBody {
    /// `{"name": NAME, ARGUMENTS: {...}}` between two texts, or a list of such objects.
    Json { before: &'static str, arguments: &'static str, after: &'static str, is_list: bool },
    /// `NAME`, a control token, and the JSON of the arguments. Between the name and this token, some models write another
    /// control token, `id`, and an id of the call.
    Named { mark: &'static str, id: &'static str },
    /// `call:NAME{key:value,...}`, with keys without quotes, and a control token as the quotes of texts.
    Bare { quote: &'static str },
    /// `<function=NAME>`, and `<parameter=KEY>` with a line or more for each argument.
    Tagged,
}

/// For models without a syntax of their own. The session describes the tools in the prompt.
pub(super) static PLAIN_JSON: CallSyntax = CallSyntax {
    name: "json",
    marks: None,
    body: CallBody::Json { before: "", arguments: "parameters", after: "", is_list: true },
    in_template: false,
    is_parallel: true,
};

const TOOL_CALL: CallMarks = CallMarks {
    open: "<tool_call>",
    close: Some("</tool_call>"),
    end: None,
    others: &["<tool_response>", "</tool_response>"],
};

/// Qwen's, and that of Nous's Hermes models.
static HERMES: CallSyntax = CallSyntax {
    name: "hermes",
    marks: Some(TOOL_CALL),
    body: CallBody::Json { before: "\n", arguments: "arguments", after: "\n", is_list: false },
    in_template: true,
    is_parallel: true,
};

/// Qwen3-Coder's and Qwen 3.5's.
static QWEN3_CODER: CallSyntax = CallSyntax {
    name: "qwen3_coder",
    marks: Some(TOOL_CALL),
    body: CallBody::Tagged,
    in_template: true,
    is_parallel: true,
};

static GEMMA4: CallSyntax = CallSyntax {
    name: "gemma4",
    marks: Some(CallMarks {
        open: "<|tool_call>",
        close: Some("<tool_call|>"),
        end: Some("<|tool_response>"),
        others: &["<|tool>", "<tool|>", "<tool_response|>", "<|\"|>"],
    }),
    body: CallBody::Bare { quote: "<|\"|>" },
    in_template: true,
    is_parallel: true,
};

/// Mistral's until 2025.
static MISTRAL: CallSyntax = CallSyntax {
    name: "mistral",
    marks: Some(CallMarks {
        open: "[TOOL_CALLS]",
        close: None,
        end: None,
        others: &["[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
    }),
    body: CallBody::Json { before: "", arguments: "arguments", after: "", is_list: true },
    in_template: true,
    is_parallel: true,
};

/// Mistral's since 2025.
static MISTRAL_ARGS: CallSyntax = CallSyntax {
    name: "mistral_args",
    marks: Some(CallMarks {
        open: "[TOOL_CALLS]",
        close: None,
        end: None,
        others: &["[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
    }),
    body: CallBody::Named { mark: "[ARGS]", id: "[CALL_ID]" },
    in_template: true,
    is_parallel: true,
};

/// Llama 3's. The calls have no control tokens, and the template accepts one call in each turn.
static LLAMA3_JSON: CallSyntax = CallSyntax {
    name: "llama3_json",
    marks: None,
    body: CallBody::Json { before: "", arguments: "parameters", after: "", is_list: false },
    in_template: true,
    is_parallel: false,
};

/// All syntaxes. Of those that a template writes, the first one is taken.
pub(super) static CALL_SYNTAXES: [&CallSyntax; 7] =
    [&GEMMA4, &QWEN3_CODER, &HERMES, &MISTRAL_ARGS, &MISTRAL, &LLAMA3_JSON, &PLAIN_JSON];

impl CallSyntax {
    /// The syntax with this name.
    pub fn named(name: &str) -> Option<&'static CallSyntax> {
        CALL_SYNTAXES.into_iter().find(|syntax| syntax.name == name)
    }

    /// The names of all syntaxes.
    pub fn names() -> impl Iterator<Item = &'static str> {
        CALL_SYNTAXES.into_iter().map(|syntax| syntax.name)
    }

    /// The texts with which a call of the tool `name` may begin.
    pub(in crate::text) fn beginnings(&self, name: &str) -> Vec<String> {
        let open = self.marks.as_ref().map_or("", |marks| marks.open);
        vec![match self.body {
            CallBody::Json { before, arguments, is_list, .. } => {
                let list = if is_list { "[" } else { "" };
                format!("{open}{before}{list}{{\"name\": \"{name}\", \"{arguments}\":")
            }
            CallBody::Named { mark, id } => {
                return vec![format!("{open}{name}{mark}"), format!("{open}{name}{id}")];
            }
            CallBody::Bare { .. } => format!("{open}call:{name}{{"),
            CallBody::Tagged => format!("{open}<function={name}>"),
        }]
    }
}
