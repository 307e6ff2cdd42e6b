//! Turns a validated request into a request to the engine, with the tokenizer, chat template and defaults of a model.

use std::hash::{BuildHasher, Hasher};
use std::ops::Range;
use std::sync::Arc;

use super::answer::AnswerText;
use super::conversation::as_text;
use super::error::SessionError;
use super::grammar::ResponseGrammar;
use super::images::{HeldImages, ImageBudgets, UndecodedImages};
use super::mask::{AnswerMask, CallGuard, Failure, ThoughtGuard, TokenRules};
use super::request::{GenerateRequest, Truncation};
use super::tools::ToolChoice;
use crate::engine::{EngineHandle, Request, SubmitError};
use crate::model::{ImageLimits, SamplingOptions, SamplingParams};
use crate::text::{
    CallFormat, CallReader, ChatTemplate, Constraint, Grammar, Grammars, ImageTokens, Prompt, PromptEnding,
    StopMatcher, TemplateInput, TemplateKwargs, TextError, Tokenizer,
};

/// The variable with which chat templates turn thoughts on and off.
const THINKING_VARIABLE: &str = "enable_thinking";

/// The tokenizer, the template and the engine of one loaded model.
pub struct Service {
    engine: EngineHandle,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    /// How the model calls tools.
    calls: CallFormat,
    grammars: Grammars,
    /// Default values of the sampling options.
    defaults: SamplingOptions,
    /// Variables of the chat template that requests may set otherwise.
    template_kwargs: TemplateKwargs,
    stop_token_ids: Vec<u32>,
    /// Ids that are never drawn.
    suppress_tokens: Vec<u32>,
    /// The tokens of images in prompts, which are never drawn either. `None` = the vocabulary lacks them.
    image_tokens: Option<ImageTokens>,
    /// Whether the names of control tokens in the text of messages become control tokens.
    special_in_content: bool,
    /// The largest number of text bytes in one token.
    longest_token_bytes: usize,
}

/// The ids of a prompt, and its images.
struct PromptIds {
    ids: Vec<u32>,
    /// The positions of each image's tokens, and the image's index in the request.
    images: Vec<(Range<usize>, usize)>,
}

/// How many of the last messages may be found to be the one that a template refuses. Each takes a rendering.
const MOST_TRIED_MESSAGES: usize = 32;

/// A prompt and the text of its answers, before the prompt's images are decoded.
pub struct Prepared {
    pub engine: Request,
    pub answer: AnswerText,
    images: Option<UndecodedImages>,
}

impl Prepared {
    pub fn has_images(&self) -> bool {
        self.images.is_some()
    }

    /// The request for the engine, with its images. Each large image takes seconds of CPU time and up to 1.5 GB of memory, so
    /// call this where blocking is allowed, and a few times at once at most.
    pub fn decoded(self) -> Result<(Request, AnswerText), SessionError> {
        let Self { engine, answer, images } = self;
        let images = images.map_or(Ok(Vec::new()), |images| images.decoded())?;
        Ok((Request { images, ..engine }, answer))
    }

    fn at_start(self) -> Self {
        Self { answer: self.answer.at_start(), ..self }
    }
}

impl Service {
    /// `stop_token_ids` end an answer (`<end_of_turn>`, `<eos>`). The text of messages never becomes a control token,
    /// unless [`Self::with_special_in_content`] enables it.
    pub fn new(
        engine: EngineHandle,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        calls: CallFormat,
        defaults: SamplingOptions,
        mut stop_token_ids: Vec<u32>,
    ) -> Self {
        // The name of an added token may be longer in a text than what the token decodes to.
        let bytes = |id| {
            let written = tokenizer.token(id).map_or(0, |t| t.len());
            written.max(tokenizer.token_bytes(id).map_or(0, |t| t.len()))
        };
        let longest = (0..tokenizer.vocab_size() as u32).map(bytes).max();
        let longest_token_bytes = longest.unwrap_or(1).max(1);
        let end_of_calls = calls.tokens.as_ref().and_then(|tokens| tokens.end);
        stop_token_ids.extend(end_of_calls.filter(|end| !stop_token_ids.contains(end)));
        let vocab_size = engine.limits().vocab_size;
        let grammars = Grammars::new(tokenizer.clone(), vocab_size, &stop_token_ids).with_calls(&calls);
        let image_tokens = tokenizer.image_tokens();
        Self {
            engine,
            tokenizer,
            template,
            calls,
            grammars,
            defaults,
            template_kwargs: TemplateKwargs::default(),
            stop_token_ids,
            suppress_tokens: Vec::new(),
            image_tokens,
            special_in_content: false,
            longest_token_bytes,
        }
    }

    /// How the model calls tools.
    pub fn call_format(&self) -> &CallFormat {
        &self.calls
    }

    /// Sets whether the names of control tokens in the text of messages become control tokens, as in transformers.
    #[must_use]
    pub fn with_special_in_content(self, special_in_content: bool) -> Self {
        Self { special_in_content, ..self }
    }

    /// Sets variables of the chat template for requests that do not set them.
    #[must_use]
    pub fn with_template_kwargs(self, template_kwargs: TemplateKwargs) -> Self {
        Self { template_kwargs, ..self }
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

    /// Whether requests may have images.
    pub fn takes_images(&self) -> bool {
        self.image_limits().is_ok()
    }

    /// Renders and tokenizes a request. The caller passes the request of [`Prepared::decoded`] to [`EngineHandle::submit`],
    /// and pushes the events of each answer into a separate copy of the [`AnswerText`]. A long conversation takes seconds of
    /// CPU time, so call this where blocking is allowed.
    pub fn prepare(&self, request: &GenerateRequest) -> Result<Prepared, SessionError> {
        let prepared = self.prepare_answer(request, true, |_| self.prompt(request))?;
        Ok(if request.ending == PromptEnding::Answer { prepared.at_start() } else { prepared })
    }

    /// Like [`Self::prepare`], after the ids of an earlier prompt and its answer.
    pub fn prepare_after(
        &self,
        earlier: &[u32],
        request: &GenerateRequest,
    ) -> Result<Prepared, SessionError> {
        self.check_ids("context", earlier)?;
        let prepared = self.prepare_answer(request, true, |_| {
            let PromptIds { ids, images } = self.prompt(request)?;
            // Only the first prompt has the id that begins a text.
            let begun = usize::from(!earlier.is_empty() && ids.first().copied() == self.tokenizer.bos());
            let moved = |(at, image): (Range<usize>, usize)| {
                (at.start + earlier.len() - begun..at.end + earlier.len() - begun, image)
            };
            Ok::<_, SessionError>(PromptIds {
                ids: [earlier, &ids[begun..]].concat(),
                images: images.into_iter().map(moved).collect(),
            })
        })?;
        Ok(prepared.at_start())
    }

    /// The token ids of the request's conversation, with the descriptions of its tools. Images are counted, but not decoded: of
    /// their files, only the headers are read, and these only if the number of tokens depends on them.
    pub fn conversation(&self, request: &GenerateRequest) -> Result<Vec<u32>, SessionError> {
        self.prompt(request).map(|prompt| prompt.ids)
    }

    /// The ids of the request's conversation, and where its images are.
    fn prompt(&self, request: &GenerateRequest) -> Result<PromptIds, SessionError> {
        let GenerateRequest { messages, tools, ending, template_kwargs: kwargs, .. } = request;
        // A variable that the client itself sets takes precedence.
        let with_thinking = request.thinking.enabled.map(|enabled| kwargs.or(THINKING_VARIABLE, enabled));
        let kwargs = with_thinking.as_ref().unwrap_or(kwargs);
        let with_defaults = (!self.template_kwargs.is_empty()).then(|| kwargs.over(&self.template_kwargs));
        let kwargs = with_defaults.as_ref().unwrap_or(kwargs);
        let images: Vec<usize> = messages.iter().flat_map(|message| message.content.images()).collect();
        let budgets = match (self.image_limits(), images.first()) {
            (Ok((limits, tokens)), _) => Some((ImageBudgets::new(limits, request.image_tokens)?, tokens)),
            (Err(_), None) => None,
            (Err(problem), Some(first)) => {
                let param = request.images[*first].kind_param.clone();
                return Err(SessionError::Unsupported { param, problem: problem.to_owned() });
            }
        };
        let budgets = budgets.filter(|_| !images.is_empty());
        let (messages, tools) = match self.calls.syntax.in_template {
            true => (self.template.arrange(messages), tools.for_template()),
            false => (self.template.arrange(&tools.describe_in(&as_text(messages))), Vec::new()),
        };
        let input = TemplateInput { messages: &messages, tools: &tools, kwargs, ending: *ending };
        let keep = self.kept(request);
        let refusal = |error| match error {
            TextError::Raised(words) => SessionError::Text(self.refused_message(&words, &input)),
            error => self.refusal(error),
        };
        if let (true, None) = (self.special_in_content, budgets) {
            let text = self.template.text(&input).map_err(refusal)?;
            return Ok(PromptIds { ids: self.encode(&text, false, keep)?, images: Vec::new() });
        }
        let prompt = match self.special_in_content {
            true => {
                let text = self.template.text(&input).map_err(refusal)?;
                Prompt::with_all_control_tokens(text, &self.tokenizer)
            }
            false => self.template.prompt(&self.tokenizer, &input).map_err(refusal)?,
        };
        match budgets {
            None => {
                let ids = self.ids(prompt.text.len(), keep, || prompt.ids(&self.tokenizer))?;
                Ok(PromptIds { ids, images: Vec::new() })
            }
            Some((budgets, tokens)) => self.ids_with_images(request, &prompt, images, &budgets, &tokens),
        }
    }

    /// How the model takes images, and their tokens. An error is the reason why it takes none.
    fn image_limits(&self) -> Result<(ImageLimits, ImageTokens), &'static str> {
        let limits =
            self.engine.limits().images.ok_or(
                "this model reads text only: leave the images out, or ask a model that takes images",
            )?;
        let tokens = self.image_tokens.ok_or(
            "this model's tokenizer has no tokens for images, so it reads text only: use the tokenizer of the \
             checkpoint that takes images, or leave the images out",
        )?;
        Ok((limits, tokens))
    }

    /// The ids of a prompt with these images, which are given by their indices in the request.
    fn ids_with_images(
        &self,
        request: &GenerateRequest,
        prompt: &Prompt,
        images: Vec<usize>,
        budgets: &ImageBudgets,
        tokens: &ImageTokens,
    ) -> Result<PromptIds, SessionError> {
        let (context, vocab_size) = (self.engine.limits().max_context, self.engine.limits().vocab_size);
        let keep = self.kept(request);
        let check = |of_images: usize| match keep.is_none() && of_images >= context {
            true => Err(context_exceeded(of_images, context)),
            false => Ok(()),
        };
        // The first check bounds the number of files whose headers are read.
        check(budgets.least_tokens(images.len()))?;
        let counts = budgets.tokens(images.iter().map(|image| &request.images[*image]))?;
        check(counts.iter().sum())?;
        let mut positions = Vec::new();
        // The ids are cut below.
        let all = keep.map(|_| usize::MAX);
        let mut ids = self.ids(prompt.text.len(), all, || {
            let (mut ids, found) = prompt.ids_with_images(&self.tokenizer, tokens, &counts)?;
            // A model may have no row for the token. The engine ignores the ids there.
            for id in found.iter().flat_map(|at| at.clone()) {
                ids[id] = if ids[id] as usize >= vocab_size { 0 } else { ids[id] };
            }
            positions = found;
            Ok(ids)
        })?;
        let mut images: Vec<_> = positions.into_iter().zip(images).collect();
        let cut = without_part_of_an_image(ids.len(), keep, images.iter().map(|(at, _)| at));
        ids.drain(..cut);
        images.retain(|(at, _)| at.start >= cut);
        for (at, _) in &mut images {
            *at = at.start - cut..at.end - cut;
        }
        Ok(PromptIds { ids, images })
    }

    /// The images of a prompt, and the room for their pixels, if there are any. A prompt that is too long is refused first.
    fn undecoded(
        &self,
        request: &GenerateRequest,
        prompt: &PromptIds,
    ) -> Result<Option<(UndecodedImages, HeldImages)>, SessionError> {
        let (Some(limits), false) = (self.engine.limits().images, prompt.images.is_empty()) else {
            return Ok(None);
        };
        let (tokens, context) = (prompt.ids.len(), self.engine.limits().max_context);
        if tokens >= context {
            return Err(context_exceeded(tokens, context));
        }
        let bytes = prompt.images.iter().map(|(at, _)| limits.pixel_bytes(at.len())).sum();
        let held = HeldImages::take(bytes)?;
        let images = prompt.images.iter().map(|(at, image)| (at.clone(), request.images[*image].clone()));
        let budgets = ImageBudgets::new(limits, request.image_tokens)?;
        Ok(Some((UndecodedImages { budgets, images: images.collect() }, held)))
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
    ) -> Result<Prepared, E> {
        let no_images = |ids| PromptIds { ids, images: Vec::new() };
        self.prepare_answer(request, false, |keep| prompt(keep).map(no_images))
    }

    /// [`Self::prepare_with`], for an answer in a conversation or for a text. Only the former has thoughts and calls.
    fn prepare_answer<E: From<SessionError>>(
        &self,
        request: &GenerateRequest,
        is_conversation: bool,
        prompt: impl FnOnce(Option<usize>) -> Result<PromptIds, E>,
    ) -> Result<Prepared, E> {
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
        let calls = self.call_guard(request)?;
        let rules = self.rules(request, constraint.is_some() || calls.is_some())?;
        // A model that may call no tool does not begin a call.
        let open = self.calls.tokens.as_ref().map(|tokens| tokens.open);
        let unwanted = open.filter(|_| is_conversation && calls.is_none());
        let of_images = self.image_limits().ok().map(|(_, tokens)| tokens.ids());
        let of_images = of_images.into_iter().flatten().filter(|id| (*id as usize) < vocab_size);
        let suppressed: Vec<u32> =
            self.suppress_tokens.iter().copied().chain(of_images).chain(unwanted).collect();
        let biases = request.logit_bias.iter().filter(|(id, _)| !suppressed.contains(id));
        let suppressed = suppressed.iter().map(|id| (*id, f32::NEG_INFINITY));
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
        let prompt = prompt(self.kept(request))?;
        let (images, held) = self.undecoded(request, &prompt)?.unzip();
        let mut engine = Request {
            seed,
            max_tokens: request.max_tokens,
            more_seeds: (1..=more).map(|i| seed.wrapping_add(i)).collect(),
            ..Request::new(prompt.ids)
        };
        let mut answer = AnswerText::new(self.tokenizer.detokenizer(true), stops).with_images(held);
        let tools = || request.tools.callable().map(|(_, tool)| tool);
        if self.calls.tokens.is_some() && is_conversation {
            let tools = tools().map(|tool| (tool.name.as_str(), &tool.parameters));
            answer = answer.with_marked_calls(&self.calls, tools);
        } else if tools().next().is_some() {
            answer = answer.with_calls(CallReader::new(tools().map(|tool| tool.name.clone()).collect()));
        }
        let thoughts = self.tokenizer.thought_tokens().filter(|_| is_conversation);
        let thoughts = thoughts.map(|tokens| (tokens, tokens.start_after(&engine.prompt)));
        if let Some((tokens, start)) = thoughts {
            answer = answer.with_thoughts(tokens, start);
        }
        let budget = request.thinking.budget;
        let guard = thoughts.map(|(tokens, start)| ThoughtGuard::new(tokens, start, budget));
        let is_limited = budget.is_some() && guard.as_ref().is_some_and(ThoughtGuard::may_think);
        if constraint.is_some() || calls.is_some() || rules.is_some() || is_limited {
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
            engine.mask = Some(Box::new(mask.with_calls(calls)));
        }
        engine.sampling = Arc::new(sampling);
        Ok(Prepared { engine, answer, images })
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

    /// The compiled grammar of the text of each answer, if the request has one. It includes calls without control tokens.
    fn constraint(&self, request: &GenerateRequest) -> Result<Option<Constraint>, SessionError> {
        let response = request.grammar.as_ref();
        let is_parallel = self.calls.syntax.is_parallel;
        let grammar = match &self.calls.tokens {
            // The answer has no text if a call is required.
            Some(_) if request.tools.choice == ToolChoice::Required => None,
            Some(_) => response.map(|response| (response.clone(), true)),
            None => request.tools.grammar(response, is_parallel)?,
        };
        let Some((grammar, from_the_start)) = grammar else { return Ok(None) };
        let compiled = self.compiled(request, &grammar)?;
        Ok(Some(if from_the_start { compiled.start() } else { compiled.start_if_opened() }))
    }

    /// The rules for calls between control tokens, if the answer may have any.
    fn call_guard(&self, request: &GenerateRequest) -> Result<Option<CallGuard>, SessionError> {
        let Some(tokens) = &self.calls.tokens else { return Ok(None) };
        let Some(grammar) = request.tools.call_grammar(&self.calls) else { return Ok(None) };
        let compiled = self.compiled(request, &grammar)?;
        let is_parallel = request.tools.parallel && self.calls.syntax.is_parallel;
        let is_required = request.tools.choice == ToolChoice::Required;
        Ok(Some(CallGuard::new(tokens, compiled, is_required, is_parallel, self.grammars.blanks())))
    }

    fn compiled(
        &self,
        request: &GenerateRequest,
        grammar: &ResponseGrammar,
    ) -> Result<Grammar, SessionError> {
        self.grammars.compile(&grammar.source).map_err(|error| match error {
            TextError::Grammar(problem) => SessionError::invalid(&grammar.param, problem),
            TextError::Schema { part, problem } => match request.tools.tool_of_part(part) {
                Some(tool) => SessionError::invalid(&tool.param, format!("tool {:?}: {problem}", tool.name)),
                None => SessionError::invalid(&grammar.param, problem),
            },
            other => SessionError::text(other),
        })
    }

    /// The text of a single token. An incomplete character becomes U+FFFD.
    pub fn piece(&self, id: u32) -> String {
        let bytes = self.tokenizer.token_bytes(id).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
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

    /// The words with which a template refuses a conversation, and the message that it refuses: the last one without which
    /// the conversation before it is not refused in these words.
    fn refused_message(&self, words: &str, input: &TemplateInput) -> String {
        let refuses = |count: usize| {
            let part = TemplateInput { messages: &input.messages[..count], ..*input };
            matches!(self.template.text(&part), Err(TextError::Raised(other)) if other == words)
        };
        let count = input.messages.len();
        let earlier = (0..count).rev().take(MOST_TRIED_MESSAGES).find(|earlier| !refuses(*earlier));
        match earlier {
            Some(earlier) => {
                let (number, role) = (earlier + 1, &input.messages[earlier].role);
                format!(
                    "the chat template refused message {number} of the prompt's {count}, of the role {role}: {words}"
                )
            }
            None => TextError::Raised(words.to_owned()).to_string(),
        }
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
        let problem = format!(
            "the prompt is too long: {bytes} bytes, {size}, and this model's maximum context length is {context} tokens"
        );
        SessionError::Context { problem, tokens: None }
    }
}

/// The error of a prompt that is as long as the context, in the words of the engine.
fn context_exceeded(prompt: usize, context: usize) -> SessionError {
    let error = SubmitError::ContextExceeded { prompt, max_tokens: None, context };
    SessionError::Context { problem: error.to_string(), tokens: Some((prompt, context)) }
}

/// The number of ids to leave out of `count`, so that at most the last `keep` are left. An image is kept as a whole or not at
/// all: if the cut would be between its first and its last token, all of it is left out. `images` are the positions of the
/// images' tokens. One more token before them begins the image, and one after them ends it.
fn without_part_of_an_image<'a>(
    count: usize,
    keep: Option<usize>,
    mut images: impl Iterator<Item = &'a Range<usize>>,
) -> usize {
    let cut = keep.map_or(0, |keep| count.saturating_sub(keep));
    images.find(|at| (at.start..=at.end).contains(&cut)).map_or(cut, |at| at.end + 1)
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
