//! The values of a native checkpoint's layers on a fixed prompt: what each layer is to compute, and how far a device
//! may be off.
//!
//! `unicorn quantize` computes them on the CPU and writes them to `layer-values.bin`; the manifest says how to read
//! that file. They are optional: a folder without them is a whole checkpoint. Refuses a file of another length than its
//! record asks for, and lists that no prompt has.

use serde::{Deserialize, Serialize};

pub(super) const FILE: &str = "layer-values.bin";
const VERSION: u32 = 1;
/// Bounds that no record of this program reaches.
const MOST_TOKENS: usize = 256;
const MOST_ROWS: usize = 4096;
const MOST_WIDTH: usize = 1 << 17;

/// How far two lists of numbers are apart.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Deviation {
    /// Root of the sum of squared differences, relative to that of the squares.
    pub relative: f64,
    /// The largest difference, relative to the root of the mean square.
    pub largest: f64,
}

impl Deviation {
    /// How far `got` is from `expected`. A NaN makes it infinite.
    pub fn of(got: &[f32], expected: &[f32]) -> Deviation {
        assert_eq!(got.len(), expected.len(), "lists of one length");
        let (mut squares, mut differences, mut largest) = (0f64, 0f64, 0f64);
        for (got, expected) in got.iter().zip(expected) {
            let (got, expected) = (f64::from(*got), f64::from(*expected));
            let difference = (got - expected).abs();
            let difference = if difference.is_nan() { f64::INFINITY } else { difference };
            squares += expected * expected;
            differences += difference * difference;
            largest = largest.max(difference);
        }
        let mean = (squares / expected.len() as f64).sqrt().max(f64::MIN_POSITIVE);
        Deviation { relative: (differences / squares.max(f64::MIN_POSITIVE)).sqrt(), largest: largest / mean }
    }

    /// Whether a deviation is at most this one.
    pub fn allows(&self, other: &Deviation) -> bool {
        other.relative <= self.relative && other.largest <= self.largest
    }
}

/// What one layer is to compute.
#[derive(Debug, Clone, PartialEq)]
pub struct Expected {
    pub values: Vec<f32>,
    pub tolerance: Deviation,
}

/// What a model is to compute behind the last token of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerValues {
    pub tokens: Vec<u32>,
    /// The residual stream behind the embedding, and behind each layer.
    pub residual: Vec<Expected>,
    /// Logits of some ids, at equal distances from id 0 on ([`LayerValues::logit_ids`]).
    pub logits: Expected,
}

/// The record in a manifest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Record {
    version: u32,
    #[serde(default)]
    tokens: Vec<u32>,
    /// Numbers of a residual stream, and of logits.
    #[serde(default)]
    width: usize,
    #[serde(default)]
    logits: usize,
    /// One for each residual stream, and one for the logits.
    #[serde(default)]
    tolerances: Vec<Deviation>,
}

impl LayerValues {
    /// The ids of `count` stored logits of a vocabulary.
    pub fn logit_ids(count: usize, vocab_size: usize) -> impl Iterator<Item = usize> {
        (0..count).map(move |i| i * vocab_size / count)
    }

    /// The values that `record` and the file's bytes stand for; `None` if they are of a newer version. The error says
    /// what is wrong with the file.
    pub(super) fn from_parts(record: &Record, bytes: &[u8]) -> Result<Option<LayerValues>, String> {
        let Record { version, tokens, width, logits, tolerances } = record;
        if *version != VERSION {
            tracing::warn!(
                "{FILE} is of version {version}; this program reads version {VERSION}: layers are not compared"
            );
            return Ok(None);
        }
        let is_sane = (1..=MOST_TOKENS).contains(&tokens.len())
            && (1..=MOST_WIDTH).contains(width)
            && (1..=MOST_WIDTH).contains(logits)
            && (2..=MOST_ROWS).contains(&tolerances.len());
        if !is_sane {
            return Err(format!(
                "has {} tokens, and {} rows of {width} and {logits} numbers by its manifest, which no model has: quantize the \
                 source again",
                tokens.len(),
                tolerances.len()
            ));
        }
        let rows = tolerances.len() - 1;
        let expected = 4 * (rows * width + logits);
        if bytes.len() != expected {
            return Err(format!(
                "has {} bytes; its manifest asks for {expected}: the copy is incomplete",
                bytes.len()
            ));
        }
        let all: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four)).collect();
        let (residual, of_logits) = all.split_at(rows * width);
        let expected = |(values, tolerance): (&[f32], &Deviation)| Expected {
            values: values.to_vec(),
            tolerance: *tolerance,
        };
        Ok(Some(LayerValues {
            tokens: tokens.clone(),
            residual: residual.chunks_exact(*width).zip(tolerances).map(expected).collect(),
            logits: expected((of_logits, &tolerances[rows])),
        }))
    }

    pub(super) fn to_parts(&self) -> (Record, Vec<u8>) {
        let all = || self.residual.iter().chain([&self.logits]);
        let record = Record {
            version: VERSION,
            tokens: self.tokens.clone(),
            width: self.residual[0].values.len(),
            logits: self.logits.values.len(),
            tolerances: all().map(|row| row.tolerance).collect(),
        };
        (record, all().flat_map(|row| &row.values).flat_map(|value| value.to_le_bytes()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deviation_is_relative_and_sees_what_is_no_number() {
        let same = Deviation::of(&[3.0, -4.0], &[3.0, -4.0]);
        assert_eq!(same, Deviation { relative: 0.0, largest: 0.0 });
        let off = Deviation::of(&[3.0, -3.0], &[3.0, -4.0]);
        assert!((off.relative - 0.2).abs() < 1e-12 && (off.largest - 1.0 / 12.5f64.sqrt()).abs() < 1e-12);
        assert!(off.allows(&same) && !same.allows(&off));
        for bad in [f32::NAN, f32::INFINITY] {
            assert!(
                !Deviation { relative: 1e9, largest: 1e9 }.allows(&Deviation::of(&[bad, 1.0], &[1.0, 1.0]))
            );
        }
    }
}
