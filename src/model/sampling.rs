//! Sampling: the options of a request, and the parameters that follow from them.
//!
//! A request, a command line and a generation_config.json each fill in [`SamplingOptions`], whose fields may be absent.
//! [`SamplingOptions::resolve`] is the only function that applies defaults. It returns complete [`SamplingParams`],
//! which travel to the device as one shared value that nothing changes.

use std::borrow::Cow;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// The lowest temperature that is not greedy: logits divided by a lower temperature would leave the range of f32.
const MIN_TEMPERATURE: f32 = 1e-5;

/// Sampling options of a request, or a model's defaults. The fields have the names, units and ranges of
/// [`SamplingParams`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SamplingOptions {
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
}

impl SamplingOptions {
    /// These options, with those of `defaults` that are not set.
    #[must_use]
    pub fn over(self, defaults: Self) -> Self {
        Self {
            temperature: self.temperature.or(defaults.temperature),
            top_k: self.top_k.or(defaults.top_k),
            top_p: self.top_p.or(defaults.top_p),
            min_p: self.min_p.or(defaults.min_p),
            repetition_penalty: self.repetition_penalty.or(defaults.repetition_penalty),
            presence_penalty: self.presence_penalty.or(defaults.presence_penalty),
            frequency_penalty: self.frequency_penalty.or(defaults.frequency_penalty),
        }
    }
}

/// How the ids of an answer are drawn. All answers of one request share one value, and differ by their seeds. The
/// device applies penalties, biases, mask, temperature, min_p, top_k and top_p, in this order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// Divisor of the logits. 0 is greedy: the id with the highest logit is drawn, and the lowest such id at a tie.
    pub temperature: f32,
    /// Number of the most likely ids that stay candidates; 0 is off.
    pub top_k: u32,
    /// Least sum of the probabilities of the ids that stay candidates; 1 is off.
    pub top_p: f32,
    /// Least probability of a candidate, relative to the most likely id's; 0 is off.
    pub min_p: f32,
    /// Factor for the logits of ids that occur in the prompt or in the answer: positive logits are divided by it, all
    /// others are multiplied by it. The value is above 0, and 1 is off.
    pub repetition_penalty: f32,
    /// Number that is subtracted from the logits of ids that occur in the answer; 0 is off.
    pub presence_penalty: f32,
    /// Number that is subtracted from the logit of an id once for each time that the id occurs in the answer; 0 is off.
    pub frequency_penalty: f32,
    /// Numbers that are added to the logits of ids, each id at most once. Negative infinity forbids an id.
    pub logit_bias: Vec<(u32, f32)>,
    /// How many of the most likely ids are reported with each drawn id. The log probabilities of all of these ids are
    /// reported as well.
    pub logprobs: Option<usize>,
    /// Ids that end the answer and are not part of it.
    pub stop_token_ids: Vec<u32>,
    /// How many ids to draw before a stop id is allowed.
    pub min_tokens: usize,
}

impl SamplingOptions {
    /// The parameters of a request with these options to a model with these defaults. An option that is absent in both
    /// is off. Sampling is greedy if neither has a temperature.
    pub fn resolve(&self, defaults: &SamplingOptions) -> SamplingParams {
        let off = SamplingParams::GREEDY;
        let pick = |asked: Option<f32>, default: Option<f32>, off| asked.or(default).unwrap_or(off);
        let temperature = pick(self.temperature, defaults.temperature, off.temperature);
        let top_p = pick(self.top_p, defaults.top_p, off.top_p);
        let top_k = self.top_k.or(defaults.top_k).unwrap_or(off.top_k);
        SamplingParams {
            temperature: if temperature < MIN_TEMPERATURE { 0.0 } else { temperature },
            // A top_p of 0 leaves the smallest set of candidates that is not empty: one id.
            top_k: if top_p == 0.0 { 1 } else { top_k },
            top_p,
            min_p: pick(self.min_p, defaults.min_p, off.min_p),
            repetition_penalty: pick(
                self.repetition_penalty,
                defaults.repetition_penalty,
                off.repetition_penalty,
            ),
            presence_penalty: pick(self.presence_penalty, defaults.presence_penalty, off.presence_penalty),
            frequency_penalty: pick(
                self.frequency_penalty,
                defaults.frequency_penalty,
                off.frequency_penalty,
            ),
            ..off
        }
    }
}

impl SamplingParams {
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logit_bias: Vec::new(),
        logprobs: None,
        stop_token_ids: Vec::new(),
        min_tokens: 0,
    };

    /// Whether a draw depends on the earlier ids directly, and not only through the logits.
    pub fn penalizes(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// The biases of the id after the first `generated` ids of an answer: `logit_bias`, and minus infinity for the stop
    /// ids while fewer than `min_tokens` ids are drawn.
    pub fn biases(&self, generated: usize) -> Cow<'_, [(u32, f32)]> {
        if generated >= self.min_tokens {
            return Cow::Borrowed(&self.logit_bias);
        }
        let others = self.logit_bias.iter().copied().filter(|(id, _)| !self.stop_token_ids.contains(id));
        let stops = self.stop_token_ids.iter().map(|id| (*id, f32::NEG_INFINITY));
        others.chain(stops).collect()
    }

    /// The parameters for a model that has only the ids `0..vocab_size`: biases and stop ids beyond that are dropped.
    pub fn within(self: Arc<Self>, vocab_size: usize) -> Arc<Self> {
        let has = |id: &u32| (*id as usize) < vocab_size;
        if self.stop_token_ids.iter().all(has) && self.logit_bias.iter().all(|(id, _)| has(id)) {
            return self;
        }
        let mut params = Arc::unwrap_or_clone(self);
        params.stop_token_ids.retain(has);
        params.logit_bias.retain(|(id, _)| has(id));
        Arc::new(params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_request_says_goes_before_the_models_defaults() {
        let defaults = SamplingOptions {
            temperature: Some(0.9),
            top_k: Some(64),
            repetition_penalty: Some(1.25),
            ..SamplingOptions::default()
        };
        let asked = SamplingOptions { top_k: Some(3), min_p: Some(0.125), ..SamplingOptions::default() };
        let expected = SamplingParams {
            temperature: 0.9,
            top_k: 3,
            min_p: 0.125,
            repetition_penalty: 1.25,
            ..SamplingParams::GREEDY
        };
        assert_eq!(asked.resolve(&defaults), expected);
        let nothing = SamplingOptions::default();
        assert_eq!(nothing.resolve(&nothing), SamplingParams::GREEDY);
    }

    #[test]
    fn what_cannot_be_divided_by_is_greedy_and_no_probability_is_the_likeliest_token() {
        let tiny = SamplingOptions { temperature: Some(9e-6), ..SamplingOptions::default() };
        assert_eq!(tiny.resolve(&SamplingOptions::default()).temperature, 0.0);
        let none = SamplingOptions { top_p: Some(0.0), top_k: Some(64), ..SamplingOptions::default() };
        let resolved = none.resolve(&SamplingOptions::default());
        assert_eq!((resolved.top_k, resolved.top_p), (1, 0.0));
    }

    #[test]
    fn stop_ids_are_forbidden_until_they_may_come_and_have_no_other_bias_then() {
        let logit_bias = vec![(7, 2.0), (8, -1.0)];
        let params = SamplingParams {
            logit_bias,
            stop_token_ids: vec![8, 9],
            min_tokens: 3,
            ..SamplingParams::GREEDY
        };
        let forbidden = f32::NEG_INFINITY;
        assert_eq!(params.biases(2), [(7, 2.0), (8, forbidden), (9, forbidden)].as_slice());
        assert_eq!(params.biases(3), [(7, 2.0), (8, -1.0)].as_slice());
        let fewer = Arc::new(params).within(8);
        assert_eq!((&fewer.logit_bias[..], &fewer.stop_token_ids[..]), (&[(7, 2.0)][..], &[][..]));
    }
}
