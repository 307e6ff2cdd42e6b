//! The fields that constrain an answer to a grammar: OpenAI's `response_format`, vLLM's `structured_outputs` with the older
//! `guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`, and llama.cpp's `grammar` and `json_schema`. A
//! request may use only one of them.

use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::wire::bounded::List;
use crate::api::wire::union::{BesideText, Refused, TextOr, words};
use crate::api::wire::{JsonObject, field, required};
use crate::session::ResponseGrammar;
use crate::text::{GrammarSource, MAX_CHOICES};

words! {
    /// What kind of answer a `response_format` or a response's `text.format` asks for.
    FormatType { Text = "text", JsonObject = "json_object", JsonSchema = "json_schema" };
}

/// A JSON schema, or its text.
type SchemaOrText = TextOr<SchemaObject>;

/// Texts to choose from. Compiling the grammar refuses an empty list.
type Choices = List<String, 0, MAX_CHOICES>;

/// A JSON schema.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(transparent)]
struct SchemaObject(JsonObject);

impl BesideText for SchemaObject {
    const NAME: &str = "a JSON schema";
    const IS_LIST: bool = false;
}

/// The grammar of the answer, in at most one of these fields.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct GrammarFields {
    response_format: Option<ResponseFormat>,
    structured_outputs: Option<StructuredOutputs>,
    /// A JSON schema, or its text. The `guided_` fields are older names of fields of `structured_outputs`.
    #[schema(inline)]
    guided_json: Option<SchemaOrText>,
    guided_regex: Option<String>,
    #[schema(inline)]
    guided_choice: Option<Choices>,
    /// A grammar in the Lark syntax, as llguidance reads it.
    guided_grammar: Option<String>,
    /// A grammar in llama.cpp's syntax, GBNF. An empty text is none.
    grammar: Option<String>,
    /// llama.cpp's field: a JSON schema. What cannot be enforced of it is left to the model.
    json_schema: Option<JsonObject>,
}

/// What the answer must be.
#[derive(Debug, Deserialize, ToSchema)]
struct ResponseFormat {
    r#type: FormatType,
    /// For `json_object`: a schema, as llama.cpp places it.
    schema: Option<JsonObject>,
    /// For `json_schema`: the schema with its name.
    json_schema: Option<NamedSchema>,
}

/// A JSON schema with its name.
#[derive(Debug, Deserialize, ToSchema)]
struct NamedSchema {
    #[allow(dead_code, reason = "its type is checked, and it changes nothing")]
    name: Option<String>,
    /// Enforce every keyword of the schema; a keyword that cannot be enforced is an error.
    strict: Option<bool>,
    schema: JsonObject,
}

/// vLLM's field for the grammar of the answer. One of these fields may be used, and not together with `response_format`.
#[derive(Debug, Deserialize, ToSchema)]
struct StructuredOutputs {
    /// A JSON schema, or its text.
    #[schema(inline)]
    json: Option<SchemaOrText>,
    regex: Option<String>,
    #[schema(inline)]
    choice: Option<Choices>,
    /// A grammar in the Lark syntax, as llguidance reads it.
    grammar: Option<String>,
    /// If true, the answer is any JSON object.
    json_object: Option<bool>,
    /// Not supported.
    structural_tag: Option<Refused>,
    /// Not supported.
    whitespace_pattern: Option<Refused>,
    /// Not supported.
    disable_any_whitespace: Option<Refused>,
    /// Not supported.
    disable_additional_properties: Option<Refused>,
}

impl GrammarFields {
    /// The grammar of the answer; none if it may be any text.
    pub fn grammar(self) -> Result<Option<ResponseGrammar>, ApiError> {
        let mut found = Vec::new();
        if let Some(format) = self.response_format {
            found.extend(format.source()?.map(|source| ("response_format".to_owned(), source)));
        }
        let guided = Sources {
            json: self.guided_json,
            regex: self.guided_regex,
            choice: self.guided_choice,
            grammar: self.guided_grammar,
        };
        guided.find(|kind| format!("guided_{kind}"), &mut found)?;
        let gbnf = self.grammar.filter(|grammar| !grammar.is_empty());
        found.extend(gbnf.map(|grammar| ("grammar".to_owned(), GrammarSource::Gbnf(grammar))));
        found.extend(self.json_schema.map(|schema| {
            let source = GrammarSource::JsonSchema { schema: schema.into(), strict: false };
            ("json_schema".to_owned(), source)
        }));
        if let Some(outputs) = self.structured_outputs {
            outputs.find(&mut found)?;
        }
        if let [(first, _), (second, _), ..] = found.as_slice() {
            return Err(ApiError::invalid(second, format!("cannot be used together with {first}")));
        }
        Ok(found.pop().map(|(param, source)| ResponseGrammar { source, param }))
    }
}

impl ResponseFormat {
    fn source(self) -> Result<Option<GrammarSource>, ApiError> {
        Ok(match self.r#type {
            FormatType::Text => None,
            FormatType::JsonObject => Some(match self.schema {
                None => GrammarSource::json_object(),
                Some(schema) => GrammarSource::JsonSchema { schema: schema.into(), strict: false },
            }),
            FormatType::JsonSchema => {
                let format = required(self.json_schema, "response_format", "json_schema")?;
                let strict = format.strict.unwrap_or(false);
                Some(GrammarSource::JsonSchema { schema: format.schema.into(), strict })
            }
        })
    }
}

impl StructuredOutputs {
    fn find(self, found: &mut Vec<(String, GrammarSource)>) -> Result<(), ApiError> {
        const AT: &str = "structured_outputs";
        for (name, value) in [
            ("structural_tag", self.structural_tag),
            ("whitespace_pattern", self.whitespace_pattern),
            ("disable_any_whitespace", self.disable_any_whitespace),
            ("disable_additional_properties", self.disable_additional_properties),
        ] {
            if Refused::is_asked(value) {
                let problem = "this server does not have it; leave it out";
                return Err(ApiError::unsupported(field(AT, name), problem));
            }
        }
        let Self { json, regex, choice, grammar, json_object, .. } = self;
        Sources { json, regex, choice, grammar }.find(|kind| field(AT, kind), found)?;
        if json_object == Some(true) {
            found.push((field(AT, "json_object"), GrammarSource::json_object()));
        }
        Ok(())
    }
}

/// vLLM's kinds of grammars, from `structured_outputs` or from the `guided_` fields.
struct Sources {
    json: Option<SchemaOrText>,
    regex: Option<String>,
    choice: Option<Choices>,
    grammar: Option<String>,
}

impl Sources {
    /// Adds each grammar that is present, with the path of its field.
    fn find(
        self,
        param: impl Fn(&str) -> String,
        found: &mut Vec<(String, GrammarSource)>,
    ) -> Result<(), ApiError> {
        if let Some(json) = self.json {
            let schema = schema(&param("json"), json)?;
            found.push((param("json"), GrammarSource::JsonSchema { schema, strict: true }));
        }
        found.extend(self.regex.map(|regex| (param("regex"), GrammarSource::Regex(regex))));
        found.extend(self.choice.map(|choices| (param("choice"), GrammarSource::Choice(choices.0))));
        found.extend(self.grammar.map(|grammar| (param("grammar"), GrammarSource::Lark(grammar))));
        Ok(())
    }
}

/// The schema, given as an object or as the text of one.
fn schema(param: &str, json: SchemaOrText) -> Result<Value, ApiError> {
    let text = match json {
        TextOr::Other(SchemaObject(object)) => return Ok(object.into()),
        TextOr::Text(text) => text,
    };
    let parsed = serde_json::from_str(&text)
        .map_err(|error| ApiError::invalid(param, format!("the text is not valid JSON: {error}")))?;
    match parsed {
        object @ Value::Object(_) => Ok(object),
        _ => Err(ApiError::invalid(param, "expected a JSON schema, got the text of another value")),
    }
}
