//! Expected outputs of a native checkpoint's layers for a fixed prompt, with tolerances for the device.
//!
//! `unicorn quantize` computes them on the CPU and writes them to `layer-values.bin`. A record in the manifest
//! describes that file. They are optional: a folder without them is a complete checkpoint. Refuses a file whose length
//! does not match the record, and records with impossible sizes.

use serde::{Deserialize, Serialize};

pub(super) const FILE: &str = "layer-values.bin";
const VERSION: u32 = 1;
/// Limits that no record of this program reaches.
const MOST_TOKENS: usize = 256;
const MOST_ROWS: usize = 4096;
const MOST_WIDTH: usize = 1 << 17;

/// The deviation of one list of numbers from another.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Deviation {
    /// Root of the sum of the squared differences, divided by the root of the sum of the expected squares.
    pub relative: f64,
    /// The largest difference, divided by the root of the mean of the expected squares.
    pub largest: f64,
}

impl Deviation {
    /// The deviation of `got` from `expected`. A NaN in `got` makes it infinite.
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

    /// Whether `other` is at most this deviation, which is a tolerance.
    pub fn allows(&self, other: &Deviation) -> bool {
        other.relative <= self.relative && other.largest <= self.largest
    }
}

/// Expected output of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Expected {
    pub values: Vec<f32>,
    pub tolerance: Deviation,
}

/// Expected outputs of a model at the last token of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerValues {
    pub tokens: Vec<u32>,
    /// The residual stream after the embedding, and after each layer.
    pub residual: Vec<Expected>,
    /// Logits of evenly spaced ids, which begin at id 0 ([`LayerValues::logit_ids`]).
    pub logits: Expected,
}

/// The record in the manifest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Record {
    version: u32,
    #[serde(default)]
    tokens: Vec<u32>,
    /// Length of a residual stream.
    #[serde(default)]
    width: usize,
    /// Number of logits.
    #[serde(default)]
    logits: usize,
    /// One for each residual stream, and one for the logits.
    #[serde(default)]
    tolerances: Vec<Deviation>,
}

impl LayerValues {
    /// The token ids of `count` stored logits.
    pub fn logit_ids(count: usize, vocab_size: usize) -> impl Iterator<Item = usize> {
        (0..count).map(move |i| i * vocab_size / count)
    }

    /// Parses the values of a file; `None` if they have another version. The error is the problem of the file.
    pub(super) fn from_parts(record: &Record, bytes: &[u8]) -> Result<Option<LayerValues>, String> {
        let Record { version, tokens, width, logits, tolerances } = record;
        if *version != VERSION {
            tracing::warn!(
                "{FILE} has version {version}, but this program reads version {VERSION}: the layers are not compared"
            );
            return Ok(None);
        }
        let is_sane = (1..=MOST_TOKENS).contains(&tokens.len())
            && (1..=MOST_WIDTH).contains(width)
            && (1..=MOST_WIDTH).contains(logits)
            && (2..=MOST_ROWS).contains(&tolerances.len());
        if !is_sane {
            return Err(format!(
                "the manifest says {} tokens, and {} rows of {width} and {logits} numbers, which no model has: \
                 quantize the source again",
                tokens.len(),
                tolerances.len()
            ));
        }
        let rows = tolerances.len() - 1;
        let expected = 4 * (rows * width + logits);
        if bytes.len() != expected {
            return Err(format!(
                "has {} bytes, but the manifest says {expected}: the copy is incomplete",
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
    fn a_deviation_is_relative_and_infinite_for_nan() {
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
