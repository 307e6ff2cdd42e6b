//! `POST /v1/completions`: continues texts as they are, without a chat template. Prompts are a text, a list of texts,
//! or token ids. `echo` with `logprobs` scores the prompts, as evaluation harnesses ask for.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use futures::Stream;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::exchange::{
    self, Answers, Caller, Exchange, FinishReason, Head, Parsed, Piece, Reply, TimingsReport, Usage,
    json_text,
};
use crate::api::openai::grammar::GrammarFields;
use crate::api::openai::logprobs::finite;
use crate::api::openai::options::AnswerOptions;
use crate::api::openai::prompts::{Prompt, Prompts};
use crate::api::openapi::BodyErrors;
use crate::api::server::Server;
use crate::api::wire;
use crate::api::wire::bounded::{AnswerCount, MaxTokensOrNone, TopLogprobs};
use crate::api::wire::union::Events;
use crate::engine::Request;
use crate::model::Logprobs;
use crate::session::{AnswerText, GenerateRequest, Reason, Service};

/// The most tokens of an answer if the request has no `max_tokens`, as OpenAI has it.
const MAX_TOKENS: i64 = 16;
/// The most prompts of one request.
const MAX_PROMPTS: usize = 128;

type CompletionPrompts = Prompts<MAX_PROMPTS>;

/// What the reply needs to know of the request.
struct Form {
    prompts: Vec<(String, Prompt)>,
    /// The number of answers to each prompt.
    n: usize,
    stream: bool,
    include_usage: bool,
    /// Whether each answer begins with its prompt. `echoes` then has the beginnings, by prompt.
    echo: bool,
    echoes: Vec<Echo>,
    /// Whether `max_tokens` is 0: only the prompt is returned.
    prompt_only: bool,
    logprobs: Option<usize>,
}

type CompletionEvents = Events<Completion>;

/// Continues texts as they are.
#[utoipa::path(
    post,
    path = "/v1/completions",
    operation_id = "createCompletion",
    tag = "OpenAI",
    request_body = CompletionRequest,
    responses(
        (
            status = 200,
            description = "The answer, or with `stream` its events.",
            content((Completion = "application/json"), (inline(CompletionEvents) = "text/event-stream")),
        ),
        BodyErrors,
    ),
)]
pub(in crate::api) async fn completions(
    State(server): State<Arc<Server>>,
    caller: Caller,
    body: Body,
) -> Result<Response, ApiError> {
    let exchange = exchange::ask(&server, caller, body, "cmpl-", "prompt", parse, prepare);
    let Exchange { wire: form, reply, answers } = exchange.await?;
    if form.stream {
        Ok(exchange::stream_lines(&server, stream_chunks(reply, answers, form)))
    } else {
        collect(reply, answers, form).await.map(|body| Json(body).into_response())
    }
}

wire::composed! {
    /// The body of a completion.
    CompletionRequest {
        completion: CompletionFields,
        options: AnswerOptions,
        grammar: GrammarFields,
    }
}

/// The fields of a completion that are no options of the answer.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct CompletionFields {
    /// The id that `/v1/models` lists; if absent or empty, the served model.
    model: Option<String>,
    /// The text to continue, several texts, or token ids.
    #[schema(inline)]
    prompt: CompletionPrompts,
    /// The most tokens of an answer; 16 if absent. 0 is allowed only with `echo`.
    max_tokens: Option<MaxTokensOrNone>,
    /// Return log probabilities of the tokens, and of this many alternatives to each.
    logprobs: Option<TopLogprobs>,
    /// Begin each answer with its prompt. `logprobs` then includes the prompt's tokens.
    echo: Option<bool>,
    /// Not supported.
    #[schema(max_length = 0)]
    suffix: Option<String>,
    /// Must equal `n`: all answers are returned.
    best_of: Option<AnswerCount>,
}

fn parse(body: &[u8]) -> Result<Parsed<Form>, ApiError> {
    let CompletionRequest { completion, options, grammar } = CompletionRequest::read(&wire::object(body)?)?;
    let echo = completion.echo.unwrap_or(false);
    let max_tokens = completion.max_tokens.map_or(MAX_TOKENS, |n| n.0);
    if max_tokens == 0 && !echo {
        let most = MaxTokensOrNone::RANGE.into_inner().1;
        return Err(ApiError::invalid("max_tokens", format!("expected an integer from 1 to {most}, got 0")));
    }
    let logprobs = completion.logprobs.map(|n| n.0 as usize);
    if completion.suffix.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(ApiError::unsupported("suffix", "Gemma-3 was not trained to fill in between two texts"));
    }
    let n = options.n();
    if completion.best_of.is_some_and(|best_of| best_of.0 != n) {
        let problem = "all answers are returned: expected the same as n";
        return Err(ApiError::unsupported("best_of", problem));
    }
    // The engine draws at least one token.
    let parsed = options.parsed(wire::named(completion.model), Some(max_tokens.max(1) as usize), grammar)?;
    let Parsed { model, request, stream, cache_salt, wire: options } = parsed;
    let form = Form {
        prompts: completion.prompt.in_field("prompt"),
        n: n as usize,
        stream,
        include_usage: options.include_usage,
        echo,
        echoes: Vec::new(),
        prompt_only: max_tokens == 0,
        logprobs,
    };
    let request = GenerateRequest { logprobs, ..request };
    Ok(Parsed { model, request, stream, cache_salt, wire: form })
}

fn prepare(
    service: &Service,
    request: &GenerateRequest,
    form: &mut Form,
) -> Result<Vec<(Request, AnswerText)>, ApiError> {
    let mut prepared = Vec::with_capacity(form.prompts.len());
    for (at, prompt) in &form.prompts {
        let (mut engine, answer) = service.prepare_with(request, || prompt.ids(service, at))?;
        let mut echo = Echo::default();
        if form.echo {
            engine.prompt_logprobs = form.logprobs;
            echo.ids.clone_from(&engine.prompt);
            echo.text = match prompt {
                Prompt::Text(text) => text.clone(),
                Prompt::Ids(ids) => service.tokenizer().decode(ids, false),
            };
        }
        form.echoes.push(echo);
        prepared.push((engine, answer));
    }
    Ok(prepared)
}

/// The beginning of an answer that echoes its prompt.
#[derive(Default)]
struct Echo {
    text: String,
    ids: Vec<u32>,
}

/// A completion, or one event of its stream.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct Completion {
    #[serde(flatten)]
    head: Head,
    #[schema(inline)]
    object: TextCompletion,
    /// Empty in the event that brings `usage`.
    choices: Vec<CompletionChoice>,
    /// In a stream, present if `stream_options` asks for it, and null in every event but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Usage>, required = false)]
    usage: Option<Option<Usage>>,
    /// In a stream, present in the last event.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    timings: Option<TimingsReport>,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum TextCompletion {
    TextCompletion,
}

#[derive(Serialize, ToSchema)]
struct CompletionChoice {
    index: usize,
    text: String,
    #[schema(required)]
    logprobs: Option<CompletionLogprobs>,
    /// In a stream, null in all events but the last of each answer.
    #[schema(required)]
    finish_reason: Option<FinishReason>,
}

/// The tokens of a completion in OpenAI's lists, which have one length.
#[derive(Default, Serialize, ToSchema)]
struct CompletionLogprobs {
    tokens: Vec<String>,
    /// The log probability of each token; null for the first token of a prompt, which nothing precedes.
    token_logprobs: Vec<Option<f64>>,
    #[schema(value_type = Vec<Option<HashMap<String, f64>>>)]
    top_logprobs: Vec<Option<Map<String, Value>>>,
    /// Where each token begins in the text, in characters.
    text_offset: Vec<usize>,
}

/// The scored tokens of one answer.
#[derive(Default)]
struct Scores {
    new: CompletionLogprobs,
    /// The number of characters so far.
    offset: usize,
}

impl Scores {
    fn push(&mut self, service: &Service, id: u32, logprobs: Option<&Logprobs>) {
        let piece = service.piece(id);
        self.new.text_offset.push(self.offset);
        self.offset += piece.chars().count();
        self.new.tokens.push(piece);
        self.new.token_logprobs.push(logprobs.map(|found| finite(found.drawn)));
        self.new.top_logprobs.push(logprobs.map(|found| {
            let mut top = Map::new();
            for (id, logprob) in &found.top {
                // Two tokens may have the same text: the likelier one is reported.
                top.entry(service.piece(*id)).or_insert_with(|| json!(finite(*logprob)));
            }
            top
        }));
    }

    fn prompt(&mut self, service: &Service, ids: &[u32], logprobs: &[Logprobs]) {
        for (i, id) in ids.iter().enumerate() {
            self.push(service, *id, i.checked_sub(1).and_then(|before| logprobs.get(before)));
        }
    }
}

/// Builds the choices of a completion from the pieces of its answers.
struct CompletionBuilder<'a> {
    form: &'a Form,
    /// The scores of each answer; `begun` says which answers have begun.
    scores: Vec<Scores>,
    begun: Vec<bool>,
}

impl<'a> CompletionBuilder<'a> {
    fn new(form: &'a Form) -> Self {
        let answers = form.n * form.prompts.len();
        Self { form, scores: (0..answers).map(|_| Scores::default()).collect(), begun: vec![false; answers] }
    }

    /// Returns the text that a piece adds, and adds the piece's tokens to the scores.
    fn take(&mut self, service: &Service, piece: Piece) -> String {
        let Piece { choice, text, logprobs, stop, prompt, .. } = piece;
        let mut added = String::new();
        let echo = &self.form.echoes[choice / self.form.n];
        // A prompt's log probabilities come with its first answer, before any other piece, and count for all its
        // answers.
        for (sibling, logprobs) in prompt.iter().flat_map(|p| (0..self.form.n).map(move |i| (choice + i, p)))
        {
            self.scores[sibling].prompt(service, &echo.ids, logprobs);
        }
        if !std::mem::replace(&mut self.begun[choice], true) {
            added.push_str(&echo.text);
        }
        if !self.form.prompt_only {
            added.push_str(&text);
            // The token that ends an answer is scored as well, as OpenAI has it: lm-eval asks for one token beside its
            // prompt, and takes the last entry for that token's.
            for (id, logprobs) in logprobs.into_iter().chain(stop) {
                self.scores[choice].push(service, id, Some(&logprobs));
            }
        }
        added
    }

    /// The scores since the last call, if the request asks for log probabilities.
    fn scores(&mut self, choice: usize) -> Option<CompletionLogprobs> {
        self.form.logprobs.map(|_| std::mem::take(&mut self.scores[choice].new))
    }
}

/// Why an answer ended. A prompt alone ends with `length`, since nothing was to follow it.
fn reason(form: &Form, reason: Reason) -> Reason {
    if form.prompt_only { Reason::Length } else { reason }
}

impl Completion {
    fn new(reply: &Reply, choices: Vec<CompletionChoice>) -> Self {
        let object = TextCompletion::TextCompletion;
        Self { head: reply.head(), object, choices, usage: None, timings: None }
    }
}

/// Logs the end of the reply, and returns its usage and timings.
fn finish(reply: &Reply, answers: &Answers, form: &Form, last: Reason) -> (Usage, TimingsReport) {
    let mut timings = answers.timings();
    if form.prompt_only {
        timings.predicted_n = 0;
    }
    reply.log(last, &timings);
    (Usage::new(&timings), TimingsReport::new(&timings))
}

async fn collect(reply: Reply, mut answers: Answers, form: Form) -> Result<Completion, ApiError> {
    let service = Arc::clone(&answers.service);
    let mut builder = CompletionBuilder::new(&form);
    let mut texts = vec![String::new(); answers.count()];
    while let Some(piece) = answers.next().await {
        let piece = piece.map_err(ApiError::while_collecting)?;
        let choice = piece.choice;
        texts[choice].push_str(&builder.take(&service, piece));
    }
    let ends: Vec<Reason> = answers.ends().map(|end| reason(&form, end)).collect();
    let choices = texts.into_iter().zip(&ends).enumerate().map(|(index, (text, end))| CompletionChoice {
        index,
        text,
        logprobs: builder.scores(index),
        finish_reason: Some((*end).into()),
    });
    let mut body = Completion::new(&reply, choices.collect());
    let last = ends.last().copied().unwrap_or(Reason::Stop);
    let (usage, timings) = finish(&reply, &answers, &form, last);
    (body.usage, body.timings) = (Some(Some(usage)), Some(timings));
    Ok(body)
}

/// The events of a completion: the text of each answer as it comes, then its finish reason; at last usage, if the
/// request asks for it.
fn stream_chunks(
    reply: Reply,
    mut answers: Answers,
    form: Form,
) -> impl Stream<Item = Result<String, ApiError>> {
    async_stream::try_stream! {
        let service = Arc::clone(&answers.service);
        let mut builder = CompletionBuilder::new(&form);
        while let Some(piece) = answers.next().await {
            let piece = piece?;
            let (index, end) = (piece.choice, piece.end.map(|end| reason(&form, end)));
            let text = builder.take(&service, piece);
            let logprobs = builder.scores(index);
            let is_empty = text.is_empty() && logprobs.as_ref().is_none_or(|scores| scores.tokens.is_empty());
            if is_empty && end.is_none() {
                continue;
            }
            let finish_reason = end.map(FinishReason::from);
            let mut chunk =
                Completion::new(&reply, vec![CompletionChoice { index, text, logprobs, finish_reason }]);
            chunk.usage = form.include_usage.then_some(None);
            let Some(end) = end.filter(|_| answers.is_done()) else {
                yield json_text(&chunk);
                continue;
            };
            let (usage, timings) = finish(&reply, &answers, &form, end);
            if form.include_usage {
                yield json_text(&chunk);
                chunk = Completion::new(&reply, Vec::new());
                chunk.usage = Some(Some(usage));
            }
            chunk.timings = Some(timings);
            yield json_text(&chunk);
        }
    }
}
