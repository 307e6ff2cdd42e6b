//! Statistics of measured values. Percentiles use the nearest rank, so that each figure is a measured value.

use std::time::Duration;

use serde_json::{Value, json};

/// The median, or the upper one of two in the middle. Panics without values.
pub fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Times in milliseconds, sorted.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Times(Vec<f64>);

impl FromIterator<Duration> for Times {
    fn from_iter<I: IntoIterator<Item = Duration>>(times: I) -> Self {
        let mut ms: Vec<f64> = times.into_iter().map(|time| time.as_secs_f64() * 1e3).collect();
        ms.sort_by(f64::total_cmp);
        Self(ms)
    }
}

impl Times {
    /// The smallest value that `percent` of all do not exceed; `None` without values. `percent` is above 0 and at most
    /// 100.
    pub fn percentile(&self, percent: f64) -> Option<f64> {
        let rank = (percent / 100.0 * self.0.len() as f64).ceil() as usize;
        self.0.get(rank.max(1) - 1).copied()
    }

    pub fn max(&self) -> Option<f64> {
        self.0.last().copied()
    }

    pub fn json(&self) -> Value {
        json!({"p50": self.percentile(50.0), "p99": self.percentile(99.0), "max": self.max()})
    }
}

/// `a / b`, or `None` if `b` is 0.
pub fn ratio(a: f64, b: f64) -> Option<f64> {
    (b > 0.0).then(|| a / b)
}

/// A figure in a column of a table, or a dash.
pub fn column(figure: Option<f64>, width: usize, digits: usize) -> String {
    match figure {
        Some(figure) => format!("{figure:width$.digits$}"),
        None => format!("{:>width$}", "-"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(ms: &[u64]) -> Times {
        ms.iter().map(|ms| Duration::from_millis(*ms)).collect()
    }

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let hundred: Vec<u64> = (1..=100).rev().collect();
        let hundred = times(&hundred);
        for (percent, expected) in
            [(0.5, 1.0), (1.0, 1.0), (50.0, 50.0), (98.5, 99.0), (99.0, 99.0), (100.0, 100.0)]
        {
            assert_eq!(hundred.percentile(percent), Some(expected), "{percent}");
        }
        let few = times(&[30, 10, 20]);
        assert_eq!(
            (few.percentile(50.0), few.percentile(99.0), few.max()),
            (Some(20.0), Some(30.0), Some(30.0))
        );
        assert_eq!(times(&[10, 20]).percentile(50.0), Some(10.0));
        assert_eq!(times(&[7]).percentile(1.0), Some(7.0));
        assert_eq!((times(&[]).percentile(50.0), times(&[]).max()), (None, None));
        assert_eq!(few.json(), json!({"p50": 20.0, "p99": 30.0, "max": 30.0}));
        assert_eq!(times(&[]).json(), json!({"p50": null, "p99": null, "max": null}));
    }

    #[test]
    fn the_median_and_ratios() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), 2.0);
        assert_eq!(median([4.0, 1.0].into_iter()), 4.0);
        assert_eq!((ratio(6.0, 4.0), ratio(1.0, 0.0)), (Some(1.5), None));
    }

    #[test]
    fn columns_keep_their_width() {
        assert_eq!(column(Some(1.26), 6, 1), "   1.3");
        assert_eq!(column(None, 6, 1), "     -");
    }
}
