//! The frequencies of rotary position embeddings (RoPE), scaled as in transformers' `modeling_rope_utils.py`, and their
//! fields in `config.json`.

use std::f64::consts::PI;
use std::ops::RangeInclusive;

use serde_json::Value;

use super::config::{ConfigError, Level, MAX_POSITIONS, show};
use crate::checkpoint::short;

/// The values that are accepted for the base of the frequencies.
pub(super) const THETAS: RangeInclusive<f64> = 1.0..=1e12;
const FACTORS: RangeInclusive<f64> = 1.0..=1e4;
/// The converter of llama.cpp writes 1e30 for pairs that do not turn.
const DIVISORS: RangeInclusive<f64> = 1e-6..=1e31;
/// The type whose share of turning pairs is in [`PARTIAL`].
const PROPORTIONAL: &str = "proportional";
const PARTIAL: &str = "partial_rotary_factor";
const CONTEXTS: RangeInclusive<f64> = 1.0..=MAX_POSITIONS as f64;

/// A table of rotations: the angle of pair `i` at position `p` is `p` times frequency `i`.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeSpec {
    /// The layers that use it, in messages.
    pub name: &'static str,
    pub theta: f64,
    pub scaling: RopeScaling,
}

/// How the frequencies `theta^(-2i / head_dim)` are scaled, by the value of `rope_type`.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// `default`: they are not.
    Unscaled,
    /// `linear`: all are divided by `factor`.
    Linear { factor: f64 },
    /// `llama3`: those whose wavelength is longer than `original_context / low_freq_factor` are divided by `factor`,
    /// those that are shorter than `original_context / high_freq_factor` are not, with a smooth transition.
    Llama3 { factor: f64, low_freq_factor: f64, high_freq_factor: f64, original_context: f64 },
    /// `yarn`: those with fewer than `beta_slow` rotations in `original_context` positions are divided by `factor`, those
    /// with more than `beta_fast` are not, with a linear transition. Cosine and sine are multiplied by
    /// `attention_factor`.
    Yarn {
        factor: f64,
        beta_fast: f64,
        beta_slow: f64,
        original_context: f64,
        /// Whether the bounds of the transition are whole dimensions.
        truncate: bool,
        attention_factor: f64,
    },
    /// `proportional`: the first `share` of the pairs turn, with frequencies divided by `factor`; the others do not.
    Proportional { share: f64, factor: f64 },
    /// `divisors`, which only GGUF files have: frequency `i` is divided by number `i`.
    Divisors(Vec<f64>),
}

impl RopeScaling {
    /// The most positions of a model whose config says `max_position_embeddings`. Model cards tell users to add YaRN to a
    /// config whose number is that of the model without it.
    pub(super) fn positions(&self, max_position_embeddings: usize) -> usize {
        match self {
            RopeScaling::Yarn { factor, original_context, .. } => {
                let scaled = (factor * original_context).min(MAX_POSITIONS as f64) as usize;
                scaled.max(max_position_embeddings)
            }
            _ => max_position_embeddings,
        }
    }
}

impl RopeSpec {
    /// The frequency of each pair of the `head_dim` dimensions of a head.
    pub fn frequencies(&self, head_dim: usize) -> Vec<f64> {
        let pairs = 0..head_dim / 2;
        let unscaled = pairs.map(|i| self.theta.powf(-2.0 * i as f64 / head_dim as f64));
        let scaled = |(i, frequency): (usize, f64)| frequency * self.share(i, frequency, head_dim);
        unscaled.enumerate().map(scaled).collect()
    }

    /// The factor of frequency `i`.
    fn share(&self, i: usize, frequency: f64, head_dim: usize) -> f64 {
        // A transition from 1 / factor, at 0, to 1, at 1.
        let between = |factor: f64, smooth: f64| (1.0 - smooth) / factor + smooth;
        match &self.scaling {
            RopeScaling::Unscaled => 1.0,
            RopeScaling::Linear { factor } => 1.0 / factor,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let rotations = original_context * frequency / (2.0 * PI);
                let smooth = (rotations - low_freq_factor) / (high_freq_factor - low_freq_factor);
                between(*factor, smooth.clamp(0.0, 1.0))
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, truncate, .. } => {
                let dimension = |rotations: f64| {
                    let dim = head_dim as f64;
                    dim * (original_context / (rotations * 2.0 * PI)).ln() / (2.0 * self.theta.ln())
                };
                let (mut low, mut high) = (dimension(*beta_fast), dimension(*beta_slow));
                if *truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
                // transformers avoids a division by 0 in the same way.
                high = if low == high { high + 0.001 } else { high };
                between(*factor, 1.0 - ((i as f64 - low) / (high - low)).clamp(0.0, 1.0))
            }
            RopeScaling::Proportional { share, factor } => {
                let turning = (share * (head_dim / 2) as f64) as usize;
                if i < turning { 1.0 / factor } else { 0.0 }
            }
            RopeScaling::Divisors(divisors) => 1.0 / divisors[i],
        }
    }

    /// The factor of all cosines and sines.
    pub fn attention_factor(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor,
            _ => 1.0,
        }
    }

    /// (cos, sin) of each pair's angle at each position, `[positions][head_dim / 2][2]`, computed in f64.
    pub(super) fn table(&self, head_dim: usize, positions: usize) -> Vec<f32> {
        let (frequencies, factor) = (self.frequencies(head_dim), self.attention_factor());
        let mut table = Vec::with_capacity(positions * head_dim);
        for position in 0..positions {
            for frequency in &frequencies {
                let (sin, cos) = (position as f64 * frequency).sin_cos();
                table.extend([(cos * factor) as f32, (sin * factor) as f32]);
            }
        }
        table
    }
}

/// The type of a set of rope parameters. Before transformers 4.43, its key was `type`.
pub(super) fn rope_type<'a>(level: &Level<'a>) -> Result<Option<&'a str>, ConfigError> {
    let kind = match (level.text("rope_type")?, level.text("type")?) {
        (Some(a), Some(b)) if a != b => {
            let problem = format!("is {:?}, but type is {:?}; expected one type", short(a), short(b));
            return Err(level.error("rope_type", problem));
        }
        (a, b) => a.or(b),
    };
    if kind != Some(PROPORTIONAL) {
        check_share(level)?;
    }
    Ok(kind)
}

/// Refuses RoPE in a part of the dimensions.
fn check_share(level: &Level) -> Result<(), ConfigError> {
    match level.get(PARTIAL) {
        Some(part) if part.as_f64() != Some(1.0) => {
            Err(level.error(PARTIAL, format!("is {}; expected 1", show(part))))
        }
        _ => Ok(()),
    }
}

/// The base and the scaling of a model with one table, from `rope_theta` and `rope_scaling`, or from the
/// `rope_parameters` of transformers 5. If a config has both, they must agree.
pub(super) fn read(
    config: &Level<'_>,
    default_theta: f64,
    head_dim: usize,
    context: usize,
) -> Result<(f64, RopeScaling), ConfigError> {
    // Older configs have it in the same object as the base.
    check_share(config)?;
    let theta = config.number("rope_theta", default_theta, THETAS)?;
    let old = match config.object("rope_scaling")? {
        Some(level) => Some(scaling(&level, head_dim, context)?),
        None => None,
    };
    let Some(level) = config.object("rope_parameters")? else {
        return Ok((theta, old.unwrap_or(RopeScaling::Unscaled)));
    };
    let new = (level.number("rope_theta", theta, THETAS)?, scaling(&level, head_dim, context)?);
    let contradictions = [
        ("rope_theta", config.get("rope_theta").is_some() && theta != new.0),
        ("rope_scaling", old.is_some_and(|old| old != new.1)),
    ];
    match contradictions.iter().find(|(_, contradicts)| *contradicts) {
        Some((name, _)) => {
            Err(config.error(name, "contradicts rope_parameters; expected one of them, or both alike"))
        }
        None => Ok(new),
    }
}

/// The scaling of one set of rope parameters of a model with `context` positions.
pub(super) fn scaling(
    level: &Level<'_>,
    head_dim: usize,
    context: usize,
) -> Result<RopeScaling, ConfigError> {
    let required = |name: &str, range: RangeInclusive<f64>| match level.get(name) {
        Some(value) => level.number_of(name, value, range),
        None => Err(level.error(name, "is missing; expected a number")),
    };
    let optional = |name: &str, default: f64, range: RangeInclusive<f64>| match level.get(name) {
        Some(value) => level.number_of(name, value, range),
        None => Ok(default),
    };
    let original_context = || optional("original_max_position_embeddings", context as f64, CONTEXTS);
    match rope_type(level)? {
        None | Some("default") => Ok(RopeScaling::Unscaled),
        Some("linear") => Ok(RopeScaling::Linear { factor: required("factor", FACTORS)? }),
        Some("llama3") => {
            let low_freq_factor = required("low_freq_factor", 1e-3..=1e4)?;
            let high_freq_factor = required("high_freq_factor", 1e-3..=1e4)?;
            if high_freq_factor <= low_freq_factor {
                let problem = format!("is {high_freq_factor}; expected more than low_freq_factor");
                return Err(level.error("high_freq_factor", problem));
            }
            Ok(RopeScaling::Llama3 {
                factor: required("factor", FACTORS)?,
                low_freq_factor,
                high_freq_factor,
                original_context: required("original_max_position_embeddings", CONTEXTS)?,
            })
        }
        Some("yarn") => {
            for name in ["mscale", "mscale_all_dim"] {
                if let Some(value) = level.get(name) {
                    return Err(level.mismatch(name, value, "null: it is not computed"));
                }
            }
            let factor = required("factor", FACTORS)?;
            let beta_fast = optional("beta_fast", 32.0, 1e-3..=1e6)?;
            let beta_slow = optional("beta_slow", 1.0, 1e-3..=1e6)?;
            if beta_fast <= beta_slow {
                return Err(level.error("beta_fast", format!("is {beta_fast}; expected more than beta_slow")));
            }
            Ok(RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                original_context: original_context()?,
                truncate: level.flag("truncate")?.unwrap_or(true),
                attention_factor: optional("attention_factor", 0.1 * factor.ln() + 1.0, 1e-3..=1e3)?,
            })
        }
        Some(PROPORTIONAL) => Ok(RopeScaling::Proportional {
            share: optional(PARTIAL, 1.0, 0.0..=1.0)?,
            factor: optional("factor", 1.0, FACTORS)?,
        }),
        Some("divisors") => divisors(level, head_dim),
        Some(other) => {
            let problem = format!(
                "{:?} is not supported; expected \"default\", \"linear\", \"llama3\" or \"yarn\"",
                short(other)
            );
            Err(level.error("rope_type", problem))
        }
    }
}

fn divisors(level: &Level<'_>, head_dim: usize) -> Result<RopeScaling, ConfigError> {
    let expected = format!("expected {} numbers, one for each pair of dimensions", head_dim / 2);
    match level.get("divisors") {
        Some(Value::Array(list)) if list.len() == head_dim / 2 => {
            let number = |value| level.number_of("divisors", value, DIVISORS);
            Ok(RopeScaling::Divisors(list.iter().map(number).collect::<Result<_, _>>()?))
        }
        Some(Value::Array(list)) => {
            Err(level.error("divisors", format!("has {} elements; {expected}", list.len())))
        }
        Some(other) => Err(level.mismatch("divisors", other, &expected[9..])),
        None => Err(level.error("divisors", format!("is missing; {expected}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(theta: f64, scaling: RopeScaling) -> RopeSpec {
        RopeSpec { name: "all layers", theta, scaling }
    }

    #[test]
    fn rope_angles_are_exact_far_out() {
        let table = spec(1e6, RopeScaling::Linear { factor: 8.0 }).table(8, 131_072);
        for (position, i) in [(0, 0), (1, 3), (131_071, 0), (100_003, 1)] {
            let angle = position as f64 / 1e6f64.powf(2.0 * i as f64 / 8.0) / 8.0;
            let at = (position * 4 + i) * 2;
            assert!((f64::from(table[at]) - angle.cos()).abs() < 1e-7, "{position} {i}");
            assert!((f64::from(table[at + 1]) - angle.sin()).abs() < 1e-7, "{position} {i}");
        }
    }

    #[test]
    fn llama3_divides_long_waves_and_keeps_short_ones() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192.0,
        };
        let (scaled, plain) = (spec(5e5, scaling), spec(5e5, RopeScaling::Unscaled));
        for (scaled, plain) in scaled.frequencies(128).iter().zip(plain.frequencies(128)) {
            let (wavelength, share) = (2.0 * PI / plain, scaled / plain);
            match wavelength {
                short if short < 8192.0 / 4.0 => assert_eq!(share, 1.0),
                long if long > 8192.0 => assert_eq!(share, 1.0 / 8.0),
                _ => assert!((1.0 / 8.0..1.0).contains(&share), "{wavelength}: {share}"),
            }
        }
    }

    #[test]
    fn yarn_divides_slow_dimensions_and_scales_attention() {
        let scaling = RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_context: 32_768.0,
            truncate: true,
            attention_factor: 0.1 * 4f64.ln() + 1.0,
        };
        let (scaled, plain) = (spec(1e6, scaling), spec(1e6, RopeScaling::Unscaled));
        let shares: Vec<f64> =
            scaled.frequencies(128).iter().zip(plain.frequencies(128)).map(|(a, b)| a / b).collect();
        assert_eq!((shares[0], shares[63]), (1.0, 0.25));
        assert!(shares.is_sorted_by(|a, b| a >= b), "{shares:?}");
        assert!((f64::from(scaled.table(128, 1)[0]) - 1.138_629_436).abs() < 1e-6);
    }
}
