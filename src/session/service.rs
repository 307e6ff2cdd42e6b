//! Turns a validated request into ids for the engine, with one loaded model's tokenizer, chat template and defaults.

use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use super::answer::AnswerText;
use super::error::SessionError;
use super::mask::{AnswerMask, Failure, TokenRules};
use super::request::{GenerateRequest, Truncation};
use crate::engine::{EngineHandle, Request};
use crate::model::{SamplingOptions, SamplingParams};
use crate::text::{
    CallReader, ChatTemplate, Constraint, Grammars, Message, PromptEnding, StopMatcher, TextError, Tokenizer,
    normalize,
};

/// The tokenizer, the template and the engine of one loaded model.
pub struct Service {
    engine: EngineHandle,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    grammars: Grammars,
    /// Sampling options for what a request leaves out.
    defaults: SamplingOptions,
    stop_token_ids: Vec<u32>,
    /// Whether control tokens that a client's text spells become control tokens.
    special_in_content: bool,
    /// The largest number of bytes of text that one token stands for.
    longest_token_bytes: usize,
}

impl Service {
    /// `stop_token_ids` end an answer (`<end_of_turn>`, `<eos>`). The text of messages never becomes a control token,
    /// unless [`Self::with_special_in_content`] says so.
    pub fn new(
        engine: EngineHandle,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        defaults: SamplingOptions,
        stop_token_ids: Vec<u32>,
    ) -> Self {
        // The text of an added token may be longer where it is written than what the token decodes to.
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
            special_in_content: false,
            longest_token_bytes,
        }
    }

    /// The service, which reads control tokens in the text of messages as transformers does if `special_in_content`.
    #[must_use]
    pub fn with_special_in_content(self, special_in_content: bool) -> Self {
        Self { special_in_content, ..self }
    }

    pub fn engine(&self) -> &EngineHandle {
        &self.engine
    }

    /// Builds what all grammars share, which the first request with a grammar would wait for otherwise. For a large
    /// vocabulary this takes a second of a processor.
    pub fn prepare_grammars(&self) {
        self.grammars.prepare();
    }

    /// How a request with these options draws its ids.
    pub fn sampling_params(&self, options: &SamplingOptions) -> SamplingParams {
        options.resolve(&self.defaults)
    }

    /// The number of grammars compiled since the start.
    pub fn grammars_compiled(&self) -> u64 {
        self.grammars.compiled()
    }

    /// Renders and tokenizes a request. The caller passes the result to [`EngineHandle::submit`], and pushes the events
    /// of each answer into its own copy of the [`AnswerText`]. A long conversation takes seconds of a processor.
    pub fn prepare(&self, request: &GenerateRequest) -> Result<(Request, AnswerText), SessionError> {
        self.prepare_with(request, |_| self.conversation(request))
    }

    /// The token ids of the request's conversation, with the descriptions of its tools.
    pub fn conversation(&self, request: &GenerateRequest) -> Result<Vec<u32>, SessionError> {
        self.prompt(&request.tools.describe_in(&request.messages), request.ending, self.kept(request))
    }

    /// The most ids of the request's prompt, of which the last are kept; none keeps all.
    fn kept(&self, request: &GenerateRequest) -> Option<usize> {
        request.truncate.map(|truncation| match truncation {
            Truncation::Last(most) => most,
            Truncation::ToContext => {
                let context = self.engine.limits().max_context;
                context.saturating_sub(request.max_tokens.unwrap_or(1)).max(1)
            }
        })
    }

    /// Prepares a request whose prompt `prompt` makes; it gets the most ids to keep, if there is a limit. Errors of all
    /// other fields are found before `prompt` is called.
    pub fn prepare_with<E: From<SessionError>>(
        &self,
        request: &GenerateRequest,
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
        let mut sampling = SamplingParams {
            logit_bias: request.logit_bias.clone(),
            logprobs: request.logprobs,
            stop_token_ids: self.stop_token_ids.iter().chain(&request.stop_token_ids).copied().collect(),
            // With `ignore_eos` no id that ends an answer is ever drawn: such an id has no text for the client.
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
        if constraint.is_some() || rules.is_some() {
            // Once a grammar is complete, only the ids that end the answer may follow. So the engine's minimum length
            // must not forbid these ids; the mask enforces the minimum instead.
            let least = std::mem::take(&mut sampling.min_tokens);
            let failure = Failure::default();
            answer = answer.with_failure(Arc::clone(&failure));
            let mask = AnswerMask::new(vocab_size, &self.stop_token_ids, least, failure);
            engine.mask = Some(Box::new(mask.with_grammar(constraint).with_rules(rules)));
        }
        engine.sampling = Arc::new(sampling);
        Ok((engine, answer))
    }

    /// The rules of each answer's ids, if a mask must hold the answer to any.
    fn rules(
        &self,
        request: &GenerateRequest,
        has_grammar: bool,
    ) -> Result<Option<TokenRules>, SessionError> {
        let GenerateRequest { allowed_token_ids: allowed, bad_words, stop_token_ids, .. } = request;
        self.check_ids("allowed_token_ids", allowed.as_deref().unwrap_or_default())?;
        // The engine keeps the ends and the stop ids of a request away alike, until its `min_tokens`.
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

    /// Refuses ids in the field `param` that the vocabulary does not have.
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

    /// The text of one token by itself. A part of a character is U+FFFD.
    pub fn piece(&self, id: u32) -> String {
        let bytes = self.tokenizer.token_bytes(id).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The token ids of a conversation, which ends as `ending` says; with `keep`, only the last so many.
    pub fn prompt(
        &self,
        messages: &[Message],
        ending: PromptEnding,
        keep: Option<usize>,
    ) -> Result<Vec<u32>, SessionError> {
        let turns = normalize(messages);
        if self.special_in_content {
            let text = self.template.text(&turns, ending).map_err(|error| self.refusal(error))?;
            return self.encode(&text, false, keep);
        }
        let prompt = self.template.prompt(&self.tokenizer, &turns, ending);
        let prompt = prompt.map_err(|error| self.refusal(error))?;
        self.ids(prompt.text.len(), keep, || prompt.ids(&self.tokenizer))
    }

    /// The token ids of a raw prompt, whose control tokens are control tokens; `special` adds the ids that begin a
    /// text, and with `keep` only the last so many ids are kept.
    pub fn encode(&self, text: &str, special: bool, keep: Option<usize>) -> Result<Vec<u32>, SessionError> {
        self.ids(text.len(), keep, || self.tokenizer.encode(text, special))
    }

    /// The token ids of a text without control tokens: what spells one is text. Otherwise as [`Self::encode`].
    pub fn encode_plain(
        &self,
        text: &str,
        special: bool,
        keep: Option<usize>,
    ) -> Result<Vec<u32>, SessionError> {
        self.ids(text.len(), keep, || self.tokenizer.encode_text(text, special))
    }

    /// The token ids of a text that is data, with the ids that begin a text.
    pub fn encode_text(&self, text: &str, keep: Option<usize>) -> Result<Vec<u32>, SessionError> {
        match self.special_in_content {
            true => self.encode(text, true, keep),
            false => self.encode_plain(text, true, keep),
        }
    }

    /// The ids that `encode` makes of a text of so many bytes. Without `keep`, a text that must be too long, whatever
    /// its tokens are, is refused before it is tokenized.
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

    /// Refuses text that is too long by its bytes, in the words of
    /// [`SubmitError::ContextExceeded`](crate::engine::SubmitError).
    fn overflow(&self, bytes: usize) -> SessionError {
        let (context, least) = (self.engine.limits().max_context, self.least_tokens(bytes));
        let size = match least >= context {
            true => format!("at least {least} tokens"),
            false => format!("more than the {} that are read", self.tokenizer.max_text_bytes()),
        };
        SessionError::Context(format!(
            "the prompt is too long: {bytes} bytes, {size}, and this model's maximum context length is {context} tokens"
        ))
    }
}

/// Keeps the last `keep` ids, or all if none.
pub fn truncate(ids: &mut Vec<u32>, keep: Option<usize>) {
    let surplus = keep.map_or(0, |keep| ids.len().saturating_sub(keep));
    ids.drain(..surplus);
}

/// A random number for ids and for seeds, from the standard library's hasher, whose keys come from the system's
/// randomness. Not for secrets.
pub fn random_u64() -> u64 {
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}
