//! `unicorn-lab model`: times a model's steps on a device, without requests: prompts of several lengths, and decodes
//! of several sequences at several depths of their contexts.
//!
//! The report also gives the minimum of bytes that a step reads: every weight once, and the keys and values that its
//! tokens see once. A case that does not fit, or would take too long, is listed as left out.

use std::time::Duration;

use serde_json::{Value, json};

use super::args;
use super::comparison::Comparison;
use crate::checkpoint::ModelFiles;
use crate::cli::bench::statistics::{column, median};
use crate::cli::error::Error;
use crate::cli::load::{self, Watch};
use crate::cli::progress::Bar;
use crate::cli::terminal::{bytes, print};
use crate::cli::version::commit;
use crate::config::Config;
use crate::engine::{Trial, TrialStep};
use crate::model::load::LoadError;
use crate::model::model_runner::ModelRunner;
use crate::model::{Counts, Runner};

/// The measurement of one case.
struct Measured {
    case: String,
    tokens: usize,
    steps: usize,
    /// Seconds of each run, all steps together; the median counts.
    runs: Vec<f64>,
    /// Minimum of bytes read by all steps together.
    bytes: u64,
    /// Recorded commands of one step, on average.
    recorded: Counts,
}

impl Measured {
    fn seconds(&self) -> f64 {
        median(self.runs.iter().copied()).max(f64::MIN_POSITIVE)
    }

    fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / self.seconds()
    }

    fn gb_per_s(&self) -> f64 {
        self.bytes as f64 / self.seconds() / 1e9
    }

    fn json(&self) -> Value {
        json!({
            "case": self.case,
            "tokens": self.tokens,
            "steps": self.steps,
            "runs": self.runs.len(),
            "seconds": self.seconds(),
            "tokens_per_s": self.tokens_per_s(),
            "least_bytes_per_step": self.bytes / self.steps as u64,
            "gb_per_s": self.gb_per_s(),
            "per_step": {
                "dispatches": self.recorded.dispatches,
                "copies": self.recorded.copies,
                "barriers": self.recorded.barriers,
                "declared_weight_bytes": self.recorded.weight_bytes(),
                "declared_kv_bytes": self.recorded.kv_bytes(),
                "declared_activation_bytes": self.recorded.activation_bytes(),
            },
        })
    }
}

pub fn model(config: &Config, args: &args::Model) -> Result<(), Error> {
    let cases = cases(args);
    let files = load::files(&config.model)?;
    let name = load::model_id(&files, config);
    let mut loaded = load(&files, config, args)?;
    let (device, runner) = (loaded.runner.device().info().clone(), &mut loaded.runner);

    let (limit, over) = (Duration::from_secs(args.limit_s.into()), args.budget.start());
    let (mut measured, mut left_out) = (Vec::<Measured>::new(), Vec::new());
    let bar = Bar::of("cases", "measuring", cases.len() as u64);
    for (i, (case, trial)) in cases.into_iter().enumerate() {
        bar.set(i as u64);
        bar.say(format!("measuring {case}"));
        let obstacle = trial.obstacle(runner.limits()).or_else(&over);
        let obstacle = obstacle.or_else(|| too_long(trial, &measured, limit));
        match obstacle {
            Some(why) => left_out.push((case, why)),
            None => measured.push(measure(case, trial, runner, args.runs, limit)?),
        }
    }
    drop(bar);

    let (weights, kv) = (runner.schemes().to_string(), runner.kv_dtype().name());
    let mut report = json!({
        "benchmark": "model",
        "model": name,
        "weights": weights,
        "kv": kv,
        "device": device.name,
        "driver": device.driver,
        "commit": commit(),
        "weight_bytes": runner.weight_bytes(),
        "context": runner.limits().max_context,
        "step_tokens": runner.limits().max_batch_tokens,
        "cases": measured.iter().map(Measured::json).collect::<Vec<_>>(),
        "left_out": left_out.iter().map(|(case, why)| json!({"case": case, "why": why})).collect::<Vec<_>>(),
    });
    let compared = Comparison::add_to(&mut report, args.compare.as_deref())?;
    if args.json {
        return print(&format!("{report}\n"));
    }
    let weights = format!("{weights} ({})", bytes(runner.weight_bytes()));
    let heading = format!(
        "{name}, weights {weights}, keys and values {kv}\n{}, {}, commit {}\n",
        device.name,
        device.driver,
        report["commit"].as_str().unwrap_or("unknown"),
    );
    print(&(heading + &table(&measured, &left_out, compared.as_ref())))
}

/// Loads the model with a context that has room for the cases.
fn load(files: &ModelFiles, config: &Config, args: &args::Model) -> Result<load::Model, Error> {
    let mut config = config.clone();
    let widest = args.batch.iter().copied().max().unwrap_or(1) as usize;
    config.engine.sequences = config.engine.sequences.max(widest);
    let deepest = args.depth.iter().map(|depth| depth + args.steps + 1).chain(args.prefill.iter().copied());
    let wanted = config.engine.context;
    config.engine.context = wanted.or(deepest.max().map(|tokens| tokens as usize));
    match load::model(files, &config, Watch::Nothing) {
        // If no context was requested, load the longest one that fits; cases that need more are left out.
        Err(Error::Load(LoadError::DoesNotFit(_) | LoadError::ContextTooLong { .. })) if wanted.is_none() => {
            config.engine.context = None;
            load::model(files, &config, Watch::Nothing)
        }
        loaded => loaded,
    }
}

/// The measured cases as a table, and the cases left out.
fn table(measured: &[Measured], left_out: &[(String, String)], compared: Option<&Comparison>) -> String {
    let mut text = String::from(
        "                       tokens/s    ms a step  least read a step     GB/s  dispatches  barriers",
    );
    text += &compared.map_or("\n".to_owned(), |c| format!("  times as fast as {}\n", c.with));
    for m in measured {
        let step_ms = m.seconds() * 1e3 / m.steps as f64;
        let read = bytes(m.bytes / m.steps as u64);
        text += &format!(
            "{:20} {:10.1} {step_ms:12.2} {read:>18} {:8.1} {:11} {:9}",
            m.case,
            m.tokens_per_s(),
            m.gb_per_s(),
            m.recorded.dispatches,
            m.recorded.barriers
        );
        match compared {
            Some(compared) => text += &format!(" {}\n", column(compared.speedup(&m.case), 8, 3)),
            None => text.push('\n'),
        }
    }
    for (case, why) in left_out {
        text += &format!("{case:20} left out: {why}\n");
    }
    text
}

/// The requested cases, each with its name: prompts, the short ones first, and decodes, depth by depth.
fn cases(args: &args::Model) -> Vec<(String, Trial)> {
    let mut prefill = args.prefill.clone();
    prefill.sort_unstable();
    prefill.dedup();
    let prefill = prefill
        .iter()
        .map(|tokens| (format!("prefill {tokens}"), Trial::Prefill { tokens: *tokens as usize }));
    let steps = args.steps as usize;
    let decode = args.depth.iter().flat_map(|depth| {
        args.batch.iter().map(move |batch| {
            let (sequences, depth) = (*batch as usize, *depth as usize);
            (format!("decode {sequences} at {depth}"), Trial::Decode { sequences, depth, steps })
        })
    });
    prefill.chain(decode).collect()
}

/// The reason why a case would take longer than `limit`, if it would. The estimate scales the last measured case of its
/// kind by tokens; a decode of more sequences takes at most that long.
fn too_long(trial: Trial, measured: &[Measured], limit: Duration) -> Option<String> {
    let (kind, tokens) = match trial {
        Trial::Prefill { tokens } => ("prefill", tokens),
        Trial::Decode { sequences, steps, .. } => ("decode", sequences * steps),
    };
    let like = measured.iter().rev().find(|m| m.case.starts_with(kind))?;
    let seconds = like.seconds() * tokens as f64 / like.tokens as f64;
    (seconds > limit.as_secs_f64()).then(|| {
        format!("it would take {seconds:.0} s, by {:?}; --limit-s is {}", like.case, limit.as_secs())
    })
}

/// Runs a case `runs` times, or as often as the limit allows, but at least once. A short warm-up comes first, during
/// which the driver compiles pipelines.
fn measure(
    case: String,
    trial: Trial,
    runner: &mut ModelRunner,
    runs: u32,
    limit: Duration,
) -> Result<Measured, Error> {
    let step = runner.limits().max_batch_tokens;
    let short = match trial {
        Trial::Prefill { tokens } => Trial::Prefill { tokens: tokens.min(step) },
        Trial::Decode { sequences, depth, .. } => Trial::Decode { sequences, depth, steps: 1 },
    };
    short.run(runner)?;
    let (mut times, mut spent) = (Vec::new(), Duration::ZERO);
    let mut recorded = Counts::default();
    while times.is_empty() || times.len() < runs as usize && spent + spent / times.len() as u32 <= limit {
        let before = runner.device().counts();
        let time = trial.run(runner)?;
        spent += time;
        times.push(time.as_secs_f64());
        recorded = (runner.device().counts() - before) / trial.submitted(runner.limits()) as u64;
    }
    let steps = trial.steps(runner.limits());
    let tokens = steps.iter().flat_map(|step| &step.shares).map(|(_, tokens)| tokens).sum();
    let bytes = steps.iter().map(|TrialStep { shares, draws }| runner.least_bytes(shares, *draws)).sum();
    Ok(Measured { case, tokens, steps: steps.len(), runs: times, bytes, recorded })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(case: &str, tokens: usize, seconds: f64) -> Measured {
        let recorded = Counts { dispatches: 5, ..Counts::default() };
        let (case, runs) = (case.into(), vec![seconds, 9.0, 0.0]);
        Measured { case, tokens, steps: 2, runs, bytes: 4_000_000_000, recorded }
    }

    #[test]
    fn the_median_run_counts() {
        let m = measured("prefill 100", 100, 2.0);
        assert_eq!((m.tokens_per_s(), m.gb_per_s()), (50.0, 2.0));
        assert_eq!(m.json()["least_bytes_per_step"], json!(2_000_000_000u64));
        assert_eq!(m.json()["per_step"]["dispatches"], json!(5));
    }

    #[test]
    fn what_would_take_too_long_is_known_before() {
        let before = [measured("prefill 100", 100, 2.0), measured("decode 1 at 0", 8, 0.8)];
        let limit = Duration::from_secs(10);
        let prefill = |tokens| too_long(Trial::Prefill { tokens }, &before, limit);
        assert_eq!(prefill(500), None);
        let why = prefill(501).expect("too long");
        assert!(why.contains("10 s, by \"prefill 100\"; --limit-s is 10"), "{why}");
        let decode = |sequences| Trial::Decode { sequences, depth: 0, steps: 8 };
        assert_eq!(too_long(decode(12), &before, limit), None);
        assert!(too_long(decode(13), &before, limit).is_some());
        assert_eq!(too_long(decode(13), &before[..1], limit), None, "nothing like it was measured");
    }
}
