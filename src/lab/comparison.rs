//! Compares a measurement with an earlier one of the same benchmark.
//!
//! A report is one JSON object: `benchmark`, the fields that describe the measurement, and `cases`. Each case has a
//! name and the `seconds` of its work. Cases are compared by name. A report of another benchmark is refused; other
//! differences are logged as warnings.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::cli::bench::statistics::ratio;
use crate::cli::error::Error;
use crate::file;

/// Maximum size of a report in bytes.
const MAX_BYTES: u64 = 64 << 20;
/// Fields that must be equal for a comparison. If one of them differs, a ratio does not show the effect of the code.
const SAME: [&str; 6] = ["device", "driver", "model", "weights", "kv", "profile"];

/// An earlier report compared with a new one.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// Commit of the earlier report.
    pub with: String,
    /// Differences in the description, one line each.
    pub differences: Vec<String>,
    /// Speedup of each case, in the order of the new report.
    pub speedups: Vec<(String, f64)>,
}

impl Comparison {
    /// Compares `report` with an earlier one in `file`, if there is a file. Logs the differences, and adds the comparison to
    /// `report`.
    pub fn add_to(report: &mut Value, file: Option<&Path>) -> Result<Option<Self>, Error> {
        let Some(file) = file else { return Ok(None) };
        let compared = Self::read(file, report)?;
        compared.warn();
        report["compared"] = compared.json();
        Ok(Some(compared))
    }

    fn read(file: &Path, report: &Value) -> Result<Self, Error> {
        let problem = |problem: String| Error::Argument(format!("--compare {}: {problem}", file.display()));
        let text = file::read_input(file, MAX_BYTES).map_err(|e| problem(e.to_string()))?;
        let before = serde_json::from_str(&text)
            .map_err(|e| problem(format!("{e}; expected a report that --json printed")))?;
        Self::of(&before, report).map_err(problem)
    }

    fn of(before: &Value, now: &Value) -> Result<Self, String> {
        let benchmark = |report: &Value| report["benchmark"].as_str().unwrap_or("something else").to_owned();
        if benchmark(before) != benchmark(now) {
            let (theirs, ours) = (benchmark(before), benchmark(now));
            return Err(format!("it is a report of `{theirs}`, and this is one of `{ours}`"));
        }
        let differs = |field: &&str| before[*field] != now[*field];
        let differences = SAME.into_iter().filter(differs);
        let differences = differences
            .map(|field| format!("{field} was {}, and is {}", shown(&before[field]), shown(&now[field])))
            .collect();
        let seconds = |report: &Value, case: &str| -> Option<f64> {
            let cases = report["cases"].as_array()?;
            cases.iter().find(|c| c["case"] == case)?["seconds"].as_f64()
        };
        let cases = now["cases"].as_array().into_iter().flatten().filter_map(|c| c["case"].as_str());
        let speedups: Vec<(String, f64)> = cases
            .filter_map(|case| Some((case.to_owned(), ratio(seconds(before, case)?, seconds(now, case)?)?)))
            .collect();
        if speedups.is_empty() {
            return Err("it has no case that this run has".into());
        }
        Ok(Self { with: shown(&before["commit"]), differences, speedups })
    }

    pub fn speedup(&self, case: &str) -> Option<f64> {
        self.speedups.iter().find(|(name, _)| name == case).map(|(_, speedup)| *speedup)
    }

    fn json(&self) -> Value {
        let speedups: Map<String, Value> =
            self.speedups.iter().map(|(case, speedup)| (case.clone(), json!(speedup))).collect();
        json!({"commit": self.with, "differences": self.differences, "speedups": speedups})
    }

    /// Logs the differences to standard error, whatever the format of the report.
    fn warn(&self) {
        for difference in &self.differences {
            tracing::warn!("NOT THE SAME as in the report compared with: {difference}");
        }
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => "not said".into(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(device: &str, cases: &[(&str, f64)]) -> Value {
        let cases: Vec<_> = cases.iter().map(|(case, s)| json!({"case": case, "seconds": s})).collect();
        json!({"benchmark": "model", "device": device, "commit": "abc", "cases": cases})
    }

    #[test]
    fn cases_are_compared_by_name() {
        let (before, now) = (report("x", &[("a", 2.0), ("b", 1.0)]), report("x", &[("c", 9.0), ("a", 1.0)]));
        let comparison = Comparison::of(&before, &now).expect("comparable");
        assert_eq!(comparison.speedups, [("a".to_owned(), 2.0)]);
        assert_eq!((comparison.speedup("c"), comparison.differences.len()), (None, 0));
        assert_eq!(comparison.json(), json!({"commit": "abc", "differences": [], "speedups": {"a": 2.0}}));
    }

    #[test]
    fn what_is_not_the_same_is_said() {
        let comparison = Comparison::of(&report("x", &[("a", 2.0)]), &report("y", &[("a", 4.0)])).unwrap();
        assert_eq!(comparison.differences, ["device was x, and is y"]);
        assert_eq!(comparison.speedup("a"), Some(0.5));
    }

    #[test]
    fn another_benchmark_is_refused_and_so_is_one_without_a_case_in_common() {
        let (mut other, now) = (report("x", &[("a", 2.0)]), report("x", &[("a", 1.0)]));
        other["benchmark"] = json!("kernels");
        let refusal = Comparison::of(&other, &now).unwrap_err();
        assert!(refusal.contains("`kernels`") && refusal.contains("`model`"), "{refusal}");
        assert!(Comparison::of(&json!({"x": 1}), &now).unwrap_err().contains("something else"));
        assert!(Comparison::of(&report("x", &[("b", 2.0)]), &now).unwrap_err().contains("no case"));
    }
}
