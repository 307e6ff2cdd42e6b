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
use crate::api::openai::options::{AnswerOptions, Form};
use crate::api::openai::other_fields::{self, OtherFields};
use crate::api::openai::prompts::{Prompt, Prompts};
use crate::api::openapi::BodyErrors;
use crate::api::server::Server;
use crate::api::wire;
use crate::api::wire::bounded::{AnswerCount, MaxTokensOrAll, TopLogprobs};
use crate::api::wire::union::Events;
use crate::engine::Request;
use crate::model::Logprobs;
use crate::session::{AnswerText, GenerateRequest, Reason, Service};
use crate::text::Detokenizer;

/// The most tokens of an answer if the request has no `max_tokens`, as OpenAI has it.
const MAX_TOKENS: usize = 16;
/// The most prompts of one request.
const MAX_PROMPTS: usize = 128;

type CompletionPrompts = Prompts<MAX_PROMPTS>;

/// What the reply needs to know of the request.
struct CompletionForm {
    prompts: Vec<(String, Prompt)>,
    /// The number of answers to each prompt.
    n: usize,
    options: Form,
    /// Whether each answer begins with its prompt.
    echo: bool,
    /// The prompts, as far as the reply has them.
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
    if form.options.stream {
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
        other: OtherFields<other_fields::Completion>,
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
    /// The most tokens of an answer; 16 if absent, and -1 for as many as the context holds. 0 is allowed only with
    /// `echo`.
    max_tokens: Option<MaxTokensOrAll>,
    /// Return log probabilities of the tokens, and of this many of the likeliest in the place of each. `top_logprobs` has
    /// the token itself as well.
    logprobs: Option<TopLogprobs>,
    /// Begin each answer with its prompt. `logprobs` then includes the prompt's tokens.
    echo: Option<bool>,
    /// Not supported.
    #[schema(max_length = 0)]
    suffix: Option<String>,
    /// Must equal `n`: all answers are returned.
    best_of: Option<AnswerCount>,
}

fn parse(body: &[u8]) -> Result<Parsed<CompletionForm>, ApiError> {
    let request = CompletionRequest::read(&wire::object(body)?)?;
    let CompletionRequest { completion, options, grammar, .. } = request;
    let echo = completion.echo.unwrap_or(false);
    let max_tokens = match (completion.max_tokens, options.n_predict()) {
        (Some(MaxTokensOrAll(most)), _) => usize::try_from(most).ok(),
        (None, Some(limit)) => limit.get(),
        (None, None) => Some(MAX_TOKENS),
    };
    let prompt_only = max_tokens == Some(0);
    if prompt_only && !echo {
        let most = MaxTokensOrAll::RANGE.into_inner().1;
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
    let at_least_one = max_tokens.map(|most| most.max(1));
    let parsed = options.parsed(wire::named(completion.model), at_least_one, grammar)?;
    let Parsed { model, request, stream, cache_salt, wire: options } = parsed;
    let form = CompletionForm {
        prompts: completion.prompt.in_field("prompt"),
        n: n as usize,
        options,
        echo,
        echoes: Vec::new(),
        prompt_only,
        logprobs,
    };
    let request = GenerateRequest { logprobs, ..request };
    Ok(Parsed { model, request, stream, cache_salt, wire: form })
}

fn prepare(
    service: &Service,
    request: &GenerateRequest,
    form: &mut CompletionForm,
) -> Result<Vec<(Request, AnswerText)>, ApiError> {
    let mut prepared = Vec::with_capacity(form.prompts.len());
    for (at, prompt) in &form.prompts {
        let (mut engine, answer) = service.prepare_with(request, |keep| prompt.ids(service, at, keep))?;
        let mut echo = Echo::default();
        if form.echo || form.options.return_token_ids {
            echo.ids.clone_from(&engine.prompt);
        }
        if form.echo {
            engine.prompt_logprobs = form.logprobs;
            let tokenizer = service.tokenizer();
            let is_whole = request.truncate.is_none();
            echo.text = match prompt {
                Prompt::Text(text) if is_whole => text.clone(),
                Prompt::Text(_) => tokenizer.decode(&engine.prompt, true),
                Prompt::Ids(_) => tokenizer.decode(&engine.prompt, false),
            };
            if form.logprobs.is_some() {
                let skips_special = matches!(prompt, Prompt::Text(_)) && !is_whole;
                let in_front = match prompt {
                    Prompt::Text(_) if is_whole => tokenizer.ids_in_front(),
                    _ => 0,
                };
                let mut offsets = Offsets::new(tokenizer.detokenizer(skips_special), 0);
                let end = echo.text.chars().count();
                let (added, ids) = engine.prompt.split_at(in_front.min(engine.prompt.len()));
                echo.offsets = vec![0; added.len()];
                echo.offsets.extend(ids.iter().map(|id| offsets.next(*id).min(end)));
            }
        }
        form.echoes.push(echo);
        prepared.push((engine, answer));
    }
    Ok(prepared)
}

/// The prompt of an answer: its text if the answer begins with it, and its ids if the reply has them.
#[derive(Default)]
struct Echo {
    text: String,
    ids: Vec<u32>,
    /// Where each id begins in the text, in characters, if the reply scores the prompt. The text lacks the ids that the
    /// tokenizer puts in front of it.
    offsets: Vec<usize>,
}

/// Follows tokens through their text.
struct Offsets {
    detokenizer: Detokenizer,
    /// The number of whole characters so far.
    chars: usize,
}

impl Offsets {
    fn new(detokenizer: Detokenizer, chars: usize) -> Self {
        Self { detokenizer, chars }
    }

    /// Where the next token begins, in characters. Tokens that are bytes of one character all begin where it does.
    fn next(&mut self, id: u32) -> usize {
        let begin = self.chars;
        self.chars += self.detokenizer.push(id).chars().count();
        begin
    }
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
    /// In a stream, present if `stream_options` asks for it, and null in every event but the last, except with
    /// `continuous_usage_stats`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Usage>, required = false)]
    usage: Option<Option<Usage>>,
    /// In a stream, present in the last event, and with `timings_per_token` in each that adds to an answer.
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
    /// Present if the request has `return_token_ids`; in a stream, in each answer's first event.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    prompt_token_ids: Option<Vec<u32>>,
    /// The ids of the tokens, if the request has `return_token_ids`. The id that ended the answer is the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    token_ids: Option<Vec<u32>>,
}

/// The tokens of a completion in OpenAI's lists, which have one length.
#[derive(Default, Serialize, ToSchema)]
struct CompletionLogprobs {
    tokens: Vec<String>,
    /// The log probability of each token; null for the first token of a prompt, which nothing precedes.
    token_logprobs: Vec<Option<f64>>,
    #[schema(value_type = Vec<Option<HashMap<String, f64>>>)]
    top_logprobs: Vec<Option<Map<String, Value>>>,
    /// Where each token begins in the text, in characters. A token that the text lacks, as the one that ended the
    /// answer, has the place where it would stand.
    text_offset: Vec<usize>,
}

impl CompletionLogprobs {
    fn push(&mut self, service: &Service, id: u32, offset: usize, logprobs: Option<&Logprobs>) {
        self.text_offset.push(offset);
        self.tokens.push(service.piece(id));
        self.token_logprobs.push(logprobs.map(|found| finite(found.drawn)));
        self.top_logprobs.push(logprobs.map(|found| {
            let mut top = Map::new();
            for (id, logprob) in &found.top {
                // Two tokens may have the same text: the likelier one is reported.
                top.entry(service.piece(*id)).or_insert_with(|| json!(finite(*logprob)));
            }
            // The token itself is among them, as OpenAI has it, also where it is none of the likeliest.
            top.entry(self.tokens.last().expect("just pushed")).or_insert_with(|| json!(finite(found.drawn)));
            top
        }));
    }

    fn prompt(&mut self, service: &Service, echo: &Echo, logprobs: &[Logprobs]) {
        for (i, (id, offset)) in echo.ids.iter().zip(&echo.offsets).enumerate() {
            self.push(service, *id, *offset, i.checked_sub(1).and_then(|before| logprobs.get(before)));
        }
    }
}

/// What pieces have added to one answer since its last choice.
struct PartialAnswer {
    text: String,
    scores: CompletionLogprobs,
    offsets: Offsets,
    /// The tokens' ids, if the request asks for them.
    ids: Vec<u32>,
    begun: bool,
    prompt_told: bool,
}

/// Builds the choices of a completion from the pieces of its answers.
struct CompletionBuilder<'a> {
    form: &'a CompletionForm,
    answers: Vec<PartialAnswer>,
}

impl<'a> CompletionBuilder<'a> {
    fn new(form: &'a CompletionForm, service: &Service) -> Self {
        let answer = |echo: &Echo| PartialAnswer {
            text: String::new(),
            scores: CompletionLogprobs::default(),
            offsets: Offsets::new(service.tokenizer().detokenizer(true), echo.text.chars().count()),
            ids: Vec::new(),
            begun: false,
            prompt_told: false,
        };
        let answers = form.echoes.iter().flat_map(|echo| std::iter::repeat_n(echo, form.n)).map(answer);
        Self { form, answers: answers.collect() }
    }

    /// Adds a piece to its answer.
    fn take(&mut self, service: &Service, piece: Piece) {
        let Piece { choice, text, id, logprobs, stop, prompt, .. } = piece;
        let echo = &self.form.echoes[choice / self.form.n];
        // A prompt's log probabilities come with its first answer, before any other piece, and count for all its
        // answers.
        for (sibling, logprobs) in prompt.iter().flat_map(|p| (0..self.form.n).map(move |i| (choice + i, p)))
        {
            self.answers[sibling].scores.prompt(service, echo, logprobs);
        }
        let answer = &mut self.answers[choice];
        if !std::mem::replace(&mut answer.begun, true) {
            answer.text.push_str(&echo.text);
        }
        if !self.form.prompt_only {
            answer.text.push_str(&text);
            answer.ids.extend(id.filter(|_| self.form.options.return_token_ids));
            // The token that ends an answer is scored as well, as OpenAI has it: lm-eval asks for one token beside its
            // prompt, and takes the last entry for that token's.
            for (id, logprobs) in logprobs.into_iter().chain(stop) {
                let offset = answer.offsets.next(id);
                answer.scores.push(service, id, offset, Some(&logprobs));
            }
        }
    }

    /// Whether nothing was added to the answer since its last choice.
    fn is_empty(&self, choice: usize) -> bool {
        let PartialAnswer { text, scores, ids, .. } = &self.answers[choice];
        text.is_empty() && ids.is_empty() && (self.form.logprobs.is_none() || scores.tokens.is_empty())
    }

    /// What was added to the answer since its last choice. `end` is why the answer ended, if it did.
    fn choice(&mut self, index: usize, end: Option<Reason>) -> CompletionChoice {
        let answer = &mut self.answers[index];
        let is_first = !std::mem::replace(&mut answer.prompt_told, true);
        let returns_ids = self.form.options.return_token_ids;
        let prompt = &self.form.echoes[index / self.form.n].ids;
        CompletionChoice {
            index,
            text: std::mem::take(&mut answer.text),
            logprobs: self.form.logprobs.map(|_| std::mem::take(&mut answer.scores)),
            finish_reason: end.map(FinishReason::from),
            prompt_token_ids: (returns_ids && is_first).then(|| prompt.clone()),
            token_ids: returns_ids.then(|| std::mem::take(&mut answer.ids)),
        }
    }
}

/// Why an answer ended. A prompt alone ends with `length`, since nothing was to follow it.
fn reason(form: &CompletionForm, reason: Reason) -> Reason {
    if form.prompt_only { Reason::Length } else { reason }
}

impl Completion {
    fn new(reply: &Reply, choices: Vec<CompletionChoice>) -> Self {
        let object = TextCompletion::TextCompletion;
        Self { head: reply.head(), object, choices, usage: None, timings: None }
    }
}

/// Logs the end of the reply, and returns its usage and timings.
fn finish(reply: &Reply, answers: &Answers, form: &CompletionForm, last: Reason) -> (Usage, TimingsReport) {
    let mut timings = answers.timings();
    if form.prompt_only {
        timings.predicted_n = 0;
    }
    reply.log(last, &timings);
    (Usage::new(&timings), TimingsReport::new(&timings))
}

async fn collect(reply: Reply, mut answers: Answers, form: CompletionForm) -> Result<Completion, ApiError> {
    let service = Arc::clone(&answers.service);
    let mut builder = CompletionBuilder::new(&form, &service);
    while let Some(piece) = answers.next().await {
        builder.take(&service, piece.map_err(ApiError::while_collecting)?);
    }
    let ends: Vec<Reason> = answers.ends().map(|end| reason(&form, end)).collect();
    let choices = ends.iter().enumerate().map(|(index, end)| builder.choice(index, Some(*end)));
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
    form: CompletionForm,
) -> impl Stream<Item = Result<String, ApiError>> {
    async_stream::try_stream! {
        let service = Arc::clone(&answers.service);
        let mut builder = CompletionBuilder::new(&form, &service);
        while let Some(piece) = answers.next().await {
            let piece = piece?;
            let (index, end) = (piece.choice, piece.end.map(|end| reason(&form, end)));
            let timings = piece.timings;
            builder.take(&service, piece);
            if !builder.is_empty(index) {
                let mut chunk = Completion::new(&reply, vec![builder.choice(index, None)]);
                (chunk.usage, chunk.timings) = form.options.progress(&timings);
                yield json_text(&chunk);
            }
            let Some(end) = end else { continue };
            let mut chunk = Completion::new(&reply, vec![builder.choice(index, Some(end))]);
            (chunk.usage, chunk.timings) = form.options.progress(&timings);
            if !answers.is_done() {
                yield json_text(&chunk);
                continue;
            }
            let (usage, timings) = finish(&reply, &answers, &form, end);
            if form.options.include_usage {
                yield json_text(&chunk);
                chunk = Completion::new(&reply, Vec::new());
                chunk.usage = Some(Some(usage));
            }
            chunk.timings = Some(timings);
            yield json_text(&chunk);
        }
    }
}
