//! Turns a validated request into a request to the engine, with the tokenizer, chat template and defaults of a model.

use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use super::answer::AnswerText;
use super::error::SessionError;
use super::mask::{AnswerMask, Failure, ThoughtGuard, TokenRules};
use super::request::{GenerateRequest, Truncation};
use crate::engine::{EngineHandle, Request};
use crate::model::{SamplingOptions, SamplingParams};
use crate::text::{
    CallReader, ChatTemplate, Constraint, Grammars, Message, PromptEnding, StopMatcher, TemplateKwargs,
    TextError, ThoughtTokens, Tokenizer,
};

/// The variable with which chat templates turn thoughts on and off.
const THINKING_VARIABLE: &str = "enable_thinking";

/// The tokenizer, the template and the engine of one loaded model.
pub struct Service {
    engine: EngineHandle,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    grammars: Grammars,
    /// Default values of the sampling options.
    defaults: SamplingOptions,
    stop_token_ids: Vec<u32>,
    /// Ids that are never drawn.
    suppress_tokens: Vec<u32>,
    /// Whether the names of control tokens in the text of messages become control tokens.
    special_in_content: bool,
    /// The largest number of text bytes in one token.
    longest_token_bytes: usize,
}

impl Service {
    /// `stop_token_ids` end an answer (`<end_of_turn>`, `<eos>`). The text of messages never becomes a control token,
    /// unless [`Self::with_special_in_content`] enables it.
    pub fn new(
        engine: EngineHandle,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        defaults: SamplingOptions,
        stop_token_ids: Vec<u32>,
    ) -> Self {
        // The name of an added token may be longer in a text than what the token decodes to.
        let bytes = |id| {
            let written = tokenizer.token(id).map_or(0, |t| t.len());
            written.max(tokenizer.token_bytes(id).map_or(0, |t| t.len()))
        };
        let longest = (0..tokenizer.vocab_size() as u32).map(bytes).max();
        let longest_token_bytes = longest.unwrap_or(1).max(1);
        let grammars = Grammars::new(tokenizer.clone(), engine.limits().vocab_size, &stop_token_ids);
        Self {
            engine,
            tokenizer,
            template,
            grammars,
            defaults,
            stop_token_ids,
            suppress_tokens: Vec::new(),
            special_in_content: false,
            longest_token_bytes,
        }
    }

    /// Sets whether the names of control tokens in the text of messages become control tokens, as in transformers.
    #[must_use]
    pub fn with_special_in_content(self, special_in_content: bool) -> Self {
        Self { special_in_content, ..self }
    }

    /// Sets the ids that are never drawn.
    #[must_use]
    pub fn with_suppressed(self, suppress_tokens: Vec<u32>) -> Self {
        Self { suppress_tokens, ..self }
    }

    pub fn engine(&self) -> &EngineHandle {
        &self.engine
    }

    /// Builds the tables that all grammars share, so that the first request with a grammar does not wait for them. For
    /// a large vocabulary this takes a second of CPU time.
    pub fn prepare_grammars(&self) {
        self.grammars.prepare();
    }

    /// The sampling parameters of a request with these options. Absent options get their defaults.
    pub fn sampling_params(&self, options: &SamplingOptions) -> SamplingParams {
        options.resolve(&self.defaults)
    }

    /// The number of grammars compiled since the start.
    pub fn grammars_compiled(&self) -> u64 {
        self.grammars.compiled()
    }

    /// Renders and tokenizes a request. The caller passes the result to [`EngineHandle::submit`], and pushes the events
    /// of each answer into a separate copy of the [`AnswerText`]. A long conversation takes seconds of CPU time.
    pub fn prepare(&self, request: &GenerateRequest) -> Result<(Request, AnswerText), SessionError> {
        let thoughts = self.tokenizer.thought_tokens();
        let (engine, answer) = self.prepare_answer(request, thoughts, |_| self.conversation(request))?;
        Ok((engine, if request.ending == PromptEnding::Answer { answer.at_start() } else { answer }))
    }

    /// The token ids of the request's conversation, with the descriptions of its tools.
    pub fn conversation(&self, request: &GenerateRequest) -> Result<Vec<u32>, SessionError> {
        let messages = request.tools.describe_in(&request.messages);
        let variables = &request.template_kwargs;
        match request.thinking.enabled {
            None => self.prompt(&messages, request.ending, variables, self.kept(request)),
            Some(enabled) => {
                // A variable that the client itself sets takes precedence.
                let variables = variables.or(THINKING_VARIABLE, enabled);
                self.prompt(&messages, request.ending, &variables, self.kept(request))
            }
        }
    }

    /// How many of the prompt's last ids to keep. `None` = all.
    fn kept(&self, request: &GenerateRequest) -> Option<usize> {
        request.truncate.map(|truncation| match truncation {
            Truncation::Last(most) => most,
            Truncation::ToContext => {
                let context = self.engine.limits().max_context;
                context.saturating_sub(request.max_tokens.unwrap_or(1)).max(1)
            }
        })
    }

    /// Like [`Self::prepare`], but `prompt` makes the ids of the prompt. Its argument is how many of the last
    /// ids to keep, if there is a limit. All other fields are checked before `prompt` is called.
    pub fn prepare_with<E: From<SessionError>>(
        &self,
        request: &GenerateRequest,
        prompt: impl FnOnce(Option<usize>) -> Result<Vec<u32>, E>,
    ) -> Result<(Request, AnswerText), E> {
        self.prepare_answer(request, None, prompt)
    }

    /// [`Self::prepare_with`] for an answer that may have thoughts between these tokens.
    fn prepare_answer<E: From<SessionError>>(
        &self,
        request: &GenerateRequest,
        thoughts: Option<ThoughtTokens>,
        prompt: impl FnOnce(Option<usize>) -> Result<Vec<u32>, E>,
    ) -> Result<(Request, AnswerText), E> {
        let stops = StopMatcher::new(&request.stop).map_err(|e| match e {
            TextError::Stop(problem) => SessionError::invalid("stop", problem),
            other => SessionError::text(other),
        })?;
        let vocab_size = self.engine.limits().vocab_size;
        if let Some((id, _)) = request.logit_bias.iter().find(|(id, _)| *id as usize >= vocab_size) {
            let problem = format!("expected a token id below {vocab_size}");
            return Err(SessionError::invalid(format!("logit_bias.{id}"), problem).into());
        }
        self.check_ids("stop_token_ids", &request.stop_token_ids)?;
        let constraint = self.constraint(request)?;
        let rules = self.rules(request, constraint.is_some())?;
        let biases = request.logit_bias.iter().filter(|(id, _)| !self.suppress_tokens.contains(id));
        let suppressed = self.suppress_tokens.iter().map(|id| (*id, f32::NEG_INFINITY));
        let mut sampling = SamplingParams {
            logit_bias: biases.copied().chain(suppressed).collect(),
            logprobs: request.logprobs,
            stop_token_ids: self.stop_token_ids.iter().chain(&request.stop_token_ids).copied().collect(),
            // With `ignore_eos`, no id that ends an answer is ever drawn, because such an id has no text for the
            // client.
            min_tokens: if request.ignore_eos { usize::MAX } else { request.min_tokens.unwrap_or(0) },
            ..self.sampling_params(&request.sampling)
        };
        let more = request.n.unwrap_or(1).saturating_sub(1) as u64;
        let seed = request.seed.unwrap_or_else(random_u64);
        let mut engine = Request {
            seed,
            max_tokens: request.max_tokens,
            more_seeds: (1..=more).map(|i| seed.wrapping_add(i)).collect(),
            ..Request::new(prompt(self.kept(request))?)
        };
        let mut answer = AnswerText::new(self.tokenizer.detokenizer(true), stops);
        let names: Vec<String> = request.tools.callable().map(|(_, tool)| tool.name.clone()).collect();
        if !names.is_empty() {
            answer = answer.with_calls(CallReader::new(names));
        }
        let thoughts = thoughts.map(|tokens| (tokens, tokens.start_after(&engine.prompt)));
        if let Some((tokens, start)) = thoughts {
            answer = answer.with_thoughts(tokens, start);
        }
        let budget = request.thinking.budget;
        let guard = thoughts.map(|(tokens, start)| ThoughtGuard::new(tokens, start, budget));
        let is_limited = budget.is_some() && guard.as_ref().is_some_and(ThoughtGuard::may_think);
        if constraint.is_some() || rules.is_some() || is_limited {
            // When a grammar is complete, only the ids that end the answer may follow. So the engine must not forbid
            // these ids because of the minimum length. The mask enforces that length instead.
            let least = std::mem::take(&mut sampling.min_tokens);
            let failure = Failure::default();
            answer = answer.with_failure(Arc::clone(&failure));
            let mask = AnswerMask::new(vocab_size, &self.stop_token_ids, least, constraint, rules, failure);
            let mask = match guard {
                Some(guard) => mask.after_thoughts(guard),
                None => mask,
            };
            engine.mask = Some(Box::new(mask));
        }
        engine.sampling = Arc::new(sampling);
        Ok((engine, answer))
    }

    /// The rules for the ids of each answer, if a mask must enforce any.
    fn rules(
        &self,
        request: &GenerateRequest,
        has_grammar: bool,
    ) -> Result<Option<TokenRules>, SessionError> {
        let GenerateRequest { allowed_token_ids: allowed, bad_words, stop_token_ids, .. } = request;
        self.check_ids("allowed_token_ids", allowed.as_deref().unwrap_or_default())?;
        // The engine has one `min_tokens` for the model's stop ids and those of the request. If the two need different
        // limits, a mask enforces the limit of the latter.
        let differ = request.ignore_eos || has_grammar;
        let differing_stops = differ && !stop_token_ids.is_empty();
        if allowed.is_none() && bad_words.is_empty() && !differing_stops {
            return Ok(None);
        }
        let tokenizer = self.tokenizer.clone();
        let vocab_size = self.engine.limits().vocab_size;
        let (stops, least) = (stop_token_ids.clone(), request.min_tokens.unwrap_or(0));
        Ok(Some(TokenRules::new(tokenizer, vocab_size, allowed.as_deref(), bad_words, stops, least)))
    }

    /// Returns an error if the field `param` has an id outside the vocabulary.
    pub fn check_ids(&self, param: &str, ids: &[u32]) -> Result<(), SessionError> {
        let vocab_size = self.engine.limits().vocab_size;
        match ids.iter().position(|id| *id as usize >= vocab_size) {
            None => Ok(()),
            Some(at) => {
                let problem = format!("expected a token id below {vocab_size}, got {}", ids[at]);
                Err(SessionError::invalid(format!("{param}[{at}]"), problem))
            }
        }
    }

    /// The compiled grammar of each answer, if the request has one.
    fn constraint(&self, request: &GenerateRequest) -> Result<Option<Constraint>, SessionError> {
        let Some((grammar, from_the_start)) = request.tools.grammar(request.grammar.as_ref())? else {
            return Ok(None);
        };
        let compiled = self.grammars.compile(&grammar.source).map_err(|error| match error {
            TextError::Grammar(problem) => SessionError::invalid(&grammar.param, problem),
            TextError::Schema { part, problem } => match request.tools.tool_of_part(part) {
                Some(tool) => SessionError::invalid(&tool.param, format!("tool {:?}: {problem}", tool.name)),
                None => SessionError::invalid(&grammar.param, problem),
            },
            other => SessionError::text(other),
        })?;
        Ok(Some(if from_the_start { compiled.start() } else { compiled.start_if_opened() }))
    }

    /// The text of a single token. An incomplete character becomes U+FFFD.
    pub fn piece(&self, id: u32) -> String {
        let bytes = self.tokenizer.token_bytes(id).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The token ids of a conversation with the ending `ending`; only the last `keep` ids, if that is set.
    pub fn prompt(
        &self,
        messages: &[Message],
        ending: PromptEnding,
        kwargs: &TemplateKwargs,
        keep: Option<usize>,
    ) -> Result<Vec<u32>, SessionError> {
        let turns = self.template.arrange(messages);
        if self.special_in_content {
            let text = self.template.text(&turns, ending, kwargs).map_err(|error| self.refusal(error))?;
            return self.encode(&text, false, keep);
        }
        let prompt = self.template.prompt(&self.tokenizer, &turns, ending, kwargs);
        let prompt = prompt.map_err(|error| self.refusal(error))?;
        self.ids(prompt.text.len(), keep, || prompt.ids(&self.tokenizer))
    }

    /// The token ids of a raw prompt. Names of control tokens become control tokens. `special` adds the ids that begin
    /// a text. Only the last `keep` ids are kept, if that is set.
    pub fn encode(&self, text: &str, special: bool, keep: Option<usize>) -> Result<Vec<u32>, SessionError> {
        self.ids(text.len(), keep, || self.tokenizer.encode(text, special))
    }

    /// Like [`Self::encode`], but the names of control tokens are ordinary text.
    pub fn encode_plain(
        &self,
        text: &str,
        special: bool,
        keep: Option<usize>,
    ) -> Result<Vec<u32>, SessionError> {
        self.ids(text.len(), keep, || self.tokenizer.encode_text(text, special))
    }

    /// The token ids of a text that is data, including the ids that begin a text. Names of control tokens are treated
    /// as in the text of messages.
    pub fn encode_text(&self, text: &str, keep: Option<usize>) -> Result<Vec<u32>, SessionError> {
        match self.special_in_content {
            true => self.encode(text, true, keep),
            false => self.encode_plain(text, true, keep),
        }
    }

    /// The ids that `encode` makes of a text with this number of bytes. Without `keep`, a text that is too long for any
    /// tokenization is refused before it is tokenized.
    fn ids(
        &self,
        bytes: usize,
        keep: Option<usize>,
        encode: impl FnOnce() -> Result<Vec<u32>, TextError>,
    ) -> Result<Vec<u32>, SessionError> {
        let limits = self.engine.limits();
        if keep.is_none() && self.least_tokens(bytes) >= limits.max_context {
            return Err(self.overflow(bytes));
        }
        let mut ids = encode().map_err(|error| self.refusal(error))?;
        self.tokenizer.check_ids(&ids, limits.vocab_size).map_err(|error| self.refusal(error))?;
        truncate(&mut ids, keep);
        Ok(ids)
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    fn refusal(&self, error: TextError) -> SessionError {
        match error {
            TextError::TooLong { bytes, .. } => self.overflow(bytes),
            error => SessionError::text(error),
        }
    }

    fn least_tokens(&self, bytes: usize) -> usize {
        bytes / self.longest_token_bytes
    }

    /// The error of a text whose number of bytes shows that it is too long. It has the words of
    /// [`SubmitError::ContextExceeded`](crate::engine::SubmitError).
    fn overflow(&self, bytes: usize) -> SessionError {
        let (context, least) = (self.engine.limits().max_context, self.least_tokens(bytes));
        let size = match least >= context {
            true => format!("at least {least} tokens"),
            false => format!("more than the maximum of {}", self.tokenizer.max_text_bytes()),
        };
        SessionError::Context(format!(
            "the prompt is too long: {bytes} bytes, {size}, and this model's maximum context length is {context} tokens"
        ))
    }
}

/// Keeps the last `keep` ids. `None` = all.
pub fn truncate(ids: &mut Vec<u32>, keep: Option<usize>) {
    let surplus = keep.map_or(0, |keep| ids.len().saturating_sub(keep));
    ids.drain(..surplus);
}

/// A random number for ids and seeds, not for secrets. It comes from the standard library's hasher, whose keys are
/// random.
pub fn random_u64() -> u64 {
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}
