//! `POST /v1/completions`: continues texts as they are, without a chat template. Prompts are a text, a list of texts,
//! or token ids. `echo` with `logprobs` scores the prompts, which evaluation harnesses use.

use std::sync::Arc;

use axum::response::Response;
use futures::{Stream, StreamExt};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::exchange::{
    self, Failed, FinishReason, Format, Head, Parsed, Reply, TimingsReport, Usage, json_text,
};
use crate::api::openai::grammar::GrammarFields;
use crate::api::openai::logprobs::finite;
use crate::api::openai::options::{AnswerOptions, Form};
use crate::api::openai::other_fields::{self, OtherFields};
use crate::api::openai::prompts::{Prompt, Prompts};
use crate::api::openapi::{BodyErrors, post_route};
use crate::api::server::Server;
use crate::api::wire;
use crate::api::wire::bounded::{AnswerCount, MaxTokensOrAll, TopLogprobs};
use crate::api::wire::reply::replies;
use crate::api::wire::union::{Events, words};
use crate::engine::{ClientId, Timings};
use crate::model::Logprobs;
use crate::session::{Delta, GenerateRequest, Reason, Service};
use crate::text::Detokenizer;

/// The maximum number of tokens of an answer if the request has no `max_tokens`. OpenAI's default is the same.
const MAX_TOKENS: usize = 16;
/// The maximum number of prompts of one request.
const MAX_PROMPTS: usize = 128;

type CompletionPrompts = Prompts<MAX_PROMPTS>;

/// What the reply needs of the request.
struct CompletionForm {
    prompts: Vec<(String, Prompt)>,
    /// The number of answers to each prompt.
    n: usize,
    options: Form,
    /// Whether each answer begins with its prompt.
    echo: bool,
    /// Whether `max_tokens` is 0: only the prompt is returned.
    prompt_only: bool,
    logprobs: Option<usize>,
}

type CompletionEvents = Events<Completion>;

post_route! {
    /// Continues texts as they are.
    "/v1/completions", "createCompletion", "OpenAI",
    CompletionRequest => Completion | CompletionEvents, BodyErrors,
    completions by TextFormat
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

/// The fields of a completion that are not options of the answer.
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
    /// Return log probabilities of the tokens, and of this many of the likeliest in the place of each. `top_logprobs`
    /// has the token itself as well.
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
        return Err(ApiError::unsupported(
            "suffix",
            "the model was not trained to fill in between two texts",
        ));
    }
    let n = options.n();
    if completion.best_of.is_some_and(|best_of| best_of.0 != n) {
        let problem = "all answers are returned: expected the same as n";
        return Err(ApiError::unsupported("best_of", problem));
    }
    // The engine draws at least one token.
    let at_least_one = max_tokens.map(|most| most.max(1));
    let parsed = options.parsed(wire::named(completion.model), at_least_one, grammar)?;
    let Parsed { model, request, stream, cache_salt, form: options } = parsed;
    let prompts = completion.prompt.in_field("prompt");
    let form = CompletionForm { prompts, n: n as usize, options, echo, prompt_only, logprobs };
    Ok(Parsed { model, request: GenerateRequest { logprobs, ..request }, stream, cache_salt, form })
}

/// The prompt of an answer: its text if the answer begins with it, and its ids if they are returned.
#[derive(Default)]
struct Echo {
    text: String,
    ids: Vec<u32>,
    /// Where each id begins in the text, in characters, if the reply scores the prompt. The text lacks the ids that the
    /// tokenizer puts in front of it.
    offsets: Vec<usize>,
}

impl Echo {
    /// The echo of `ids`, which were made of `prompt`. `is_whole` is whether the ids are all of the prompt.
    fn new(form: &CompletionForm, service: &Service, prompt: &Prompt, ids: &[u32], is_whole: bool) -> Self {
        let mut echo = Self::default();
        if form.echo || form.options.return_token_ids {
            echo.ids = ids.to_vec();
        }
        if form.echo {
            let tokenizer = service.tokenizer();
            echo.text = match prompt {
                Prompt::Text(text) if is_whole => text.clone(),
                Prompt::Text(_) => tokenizer.decode(ids, true),
                Prompt::Ids(_) => tokenizer.decode(ids, false),
            };
            if form.logprobs.is_some() {
                let skips_special = matches!(prompt, Prompt::Text(_)) && !is_whole;
                let in_front = match prompt {
                    Prompt::Text(_) if is_whole => tokenizer.ids_in_front(),
                    _ => 0,
                };
                let mut offsets = Offsets::new(tokenizer.detokenizer(skips_special).at_start(), 0);
                let end = echo.text.chars().count();
                let (added, ids) = ids.split_at(in_front.min(ids.len()));
                echo.offsets = vec![0; added.len()];
                echo.offsets.extend(ids.iter().map(|id| offsets.next(*id).min(end)));
            }
        }
        echo
    }
}

/// Follows tokens through their text.
struct Offsets {
    detokenizer: Detokenizer,
    /// The number of whole characters until now.
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

words! {
    TextCompletion { TextCompletion = "text_completion" };
}

replies! {
    /// A completion, or one event of its stream.
    pub(in crate::api) struct Completion {
        #[serde(flatten)]
        head: Head,
        #[schema(inline)]
        object: TextCompletion,
        /// Empty in the event that brings `usage`.
        choices: Vec<CompletionChoice>,
        /// In a stream, present if `stream_options` asks for it, and null in every event but the last, except with
        /// `continuous_usage_stats`.
        usage | null: Usage,
        /// In a stream, present in the last event, and with `timings_per_token` in each that adds to an answer.
        timings?: TimingsReport,
    }

    struct CompletionChoice {
        index: usize,
        text: String,
        logprobs: Option<CompletionLogprobs>,
        /// In a stream, null in all events but the last of each answer.
        finish_reason: Option<FinishReason>,
        /// Present if the request has `return_token_ids`; in a stream, in each answer's first event.
        prompt_token_ids?: Vec<u32>,
        /// The ids of the tokens, if the request has `return_token_ids`. The id that ended the answer is the last.
        token_ids?: Vec<u32>,
    }

    /// The tokens of a completion in OpenAI's lists, which have one length.
    #[derive(Default)]
    struct CompletionLogprobs {
        tokens: Vec<String>,
        /// The log probability of each token; null for the first token of a prompt, which nothing precedes.
        token_logprobs: Vec<Option<f64>>,
        #[schema(value_type = Vec<Option<HashMap<String, f64>>>)]
        top_logprobs: Vec<Option<Map<String, Value>>>,
        /// Where each token begins in the text, in characters. A token that is not in the text, such as the one that
        /// ended the answer, has the place where it would be.
        text_offset: Vec<usize>,
    }
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
            // As in OpenAI's API, the token itself is always included, also if it is not one of the likeliest.
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

/// What deltas have added to one answer since its last choice.
struct PartialAnswer {
    text: String,
    scores: CompletionLogprobs,
    offsets: Offsets,
    /// The tokens' ids, if the request asks for them.
    ids: Vec<u32>,
    begun: bool,
    /// Whether the ids of the prompt were sent.
    prompt_sent: bool,
}

/// Writes the reply to a completion. A stream has the text of each answer, then its finish reason, and at last the usage,
/// if the request asks for it.
struct TextFormat {
    form: CompletionForm,
    /// One for each prompt.
    echoes: Vec<Echo>,
    answers: Vec<PartialAnswer>,
}

impl TextFormat {
    /// Adds a delta to its answer.
    fn take(&mut self, service: &Service, delta: Delta) {
        let Delta { choice, text, ids, logprobs, stop, prompt, .. } = delta;
        let n = self.form.n;
        let echo = &self.echoes[choice / n];
        // A prompt's log probabilities come with its first answer, before any other delta, and apply to all its answers.
        for (sibling, logprobs) in prompt.iter().flat_map(|p| (0..n).map(move |i| (choice + i, p))) {
            self.answers[sibling].scores.prompt(service, echo, logprobs);
        }
        let answer = &mut self.answers[choice];
        if !std::mem::replace(&mut answer.begun, true) {
            answer.text.push_str(&echo.text);
        }
        answer.text.push_str(&text);
        if self.form.options.return_token_ids {
            answer.ids.extend(ids);
        }
        // The token that ends an answer is scored as well, as OpenAI does: lm-eval requests one token in addition to its
        // prompt, and takes the last entry for that token's.
        for (id, logprobs) in logprobs.into_iter().chain(stop) {
            let offset = answer.offsets.next(id);
            answer.scores.push(service, id, offset, Some(&logprobs));
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
        let is_first = !std::mem::replace(&mut answer.prompt_sent, true);
        let returns_ids = self.form.options.return_token_ids;
        let prompt = &self.echoes[index / self.form.n].ids;
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

impl Completion {
    fn new(reply: &Reply, choices: Vec<CompletionChoice>) -> Self {
        let object = TextCompletion::TextCompletion;
        Self { head: reply.head.clone(), object, choices, usage: None, timings: None }
    }
}

impl Format for TextFormat {
    const ID_PREFIX: &'static str = "cmpl-";
    const PROMPT: &'static str = "prompt";
    const HAS_COMMENTS: bool = true;
    type Form = CompletionForm;
    type Whole = Completion;
    type Event = String;

    fn parse(_: &Arc<Server>, _: ClientId, body: &[u8]) -> Result<Parsed<CompletionForm>, ApiError> {
        parse(body)
    }

    fn prepare(
        form: CompletionForm,
        service: &Service,
        request: &GenerateRequest,
    ) -> Result<(exchange::Prompts, Self), ApiError> {
        let is_whole = request.truncate.is_none();
        let (mut prepared, mut echoes, mut answers) = (Vec::new(), Vec::new(), Vec::new());
        for (at, prompt) in &form.prompts {
            let mut one = service.prepare_with(request, |keep| prompt.ids(service, at, keep))?;
            if form.echo {
                one.engine.prompt_logprobs = form.logprobs;
            }
            let echo = Echo::new(&form, service, prompt, &one.engine.prompt, is_whole);
            let chars = echo.text.chars().count();
            answers.extend((0..form.n).map(|_| PartialAnswer {
                text: String::new(),
                scores: CompletionLogprobs::default(),
                offsets: Offsets::new(service.tokenizer().detokenizer(true), chars),
                ids: Vec::new(),
                begun: false,
                prompt_sent: false,
            }));
            echoes.push(echo);
            prepared.push(one);
        }
        Ok((prepared, Self { form, echoes, answers }))
    }

    fn is_prompt_only(&self) -> bool {
        self.form.prompt_only
    }

    fn whole(
        mut self,
        reply: &Reply,
        answers: Vec<Delta>,
        timings: &Timings,
    ) -> Result<Completion, ApiError> {
        let ends: Vec<_> = answers.iter().map(|answer| answer.end).collect();
        for answer in answers {
            self.take(&reply.service, answer);
        }
        let choices = ends.into_iter().enumerate().map(|(index, end)| self.choice(index, end));
        let mut body = Completion::new(reply, choices.collect());
        body.usage = Some(Some(Usage::new(timings)));
        body.timings = Some(TimingsReport::new(timings));
        Ok(body)
    }

    fn add(&mut self, reply: &Reply, delta: Delta, all: Option<&Timings>) -> Result<Vec<String>, ApiError> {
        let Delta { choice: index, end, timings, .. } = delta;
        let options = self.form.options;
        let chunk = |choice| {
            let mut chunk = Completion::new(reply, vec![choice]);
            (chunk.usage, chunk.timings) = options.progress(&timings);
            chunk
        };
        let mut lines = Vec::new();
        self.take(&reply.service, delta);
        if !self.is_empty(index) {
            lines.push(json_text(&chunk(self.choice(index, None))));
        }
        if end.is_some() {
            let mut last = chunk(self.choice(index, end));
            if let Some(timings) = all {
                if options.include_usage {
                    lines.push(json_text(&last));
                    last = Completion::new(reply, Vec::new());
                    last.usage = Some(Some(Usage::new(timings)));
                }
                last.timings = Some(TimingsReport::new(timings));
            }
            lines.push(json_text(&last));
        }
        Ok(lines)
    }

    fn end(&mut self, _: &Reply) -> Vec<String> {
        exchange::done()
    }

    fn on_error(_: &Self::Form, _: Head) -> Failed<Self> {
        Box::new(exchange::failed_lines)
    }

    fn send(
        server: &Server,
        comments: impl Stream<Item = String> + Send + 'static,
        lines: impl Stream<Item = String> + Send + 'static,
    ) -> Response {
        exchange::server_sent(server, comments, lines.map(exchange::line))
    }
}
