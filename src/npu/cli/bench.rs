//! `unicorn bench npu`: compares the NPU with the GPU of this machine. It computes the same prompt alternately with the
//! GPU alone and with each number of KV heads on the NPU, and measures time and the machine's energy.
//!
//! A run counts only if the NPU took part. The output has the fraction of the prompt in which it did: a token counts
//! once in each layer. If the NPU failed, the command ends with its error code.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::cli::args;
use crate::cli::bench::statistics::median;
use crate::cli::doctor::Machine;
use crate::cli::energy::Meter;
use crate::cli::error::Error;
use crate::cli::load::{self, Watch};
use crate::cli::progress::Bar;
use crate::cli::terminal::print;
use crate::cli::version::commit;
use crate::config::{Config, NpuMode};
use crate::device::{NpuReport, Place};
use crate::engine::{EnergyCounter, Trial};
use crate::model::Runner;
use crate::model::model_runner::ModelRunner;

/// The runs with one number of KV heads on the NPU; 0 = only the GPU.
struct ShareRuns {
    kv_heads: usize,
    runs: Vec<Run>,
}

struct Run {
    took: Duration,
    /// Joules of the machine; `None` if they cannot be read.
    joules: Option<f64>,
    /// How long the GPU computed, measured by its own clock.
    gpu: Option<Duration>,
    /// The fraction of the tokens of all layers for which the NPU took part.
    covered: f64,
}

impl ShareRuns {
    fn seconds(&self) -> f64 {
        median(self.runs.iter().map(|run| run.took.as_secs_f64()))
    }

    fn joules(&self) -> Option<f64> {
        let known: Option<Vec<f64>> = self.runs.iter().map(|run| run.joules).collect();
        known.map(|joules| median(joules.into_iter()))
    }

    fn covered(&self) -> f64 {
        median(self.runs.iter().map(|run| run.covered))
    }

    fn gpu_seconds(&self) -> Option<f64> {
        let known: Option<Vec<f64>> = self.runs.iter().map(|run| Some(run.gpu?.as_secs_f64())).collect();
        known.map(|seconds| median(seconds.into_iter()))
    }
}

pub fn bench(config: &Config, args: &args::BenchNpu) -> Result<(), Error> {
    let mut config = config.clone();
    // Without the NPU, this would measure only the GPU.
    config.npu.mode = NpuMode::Require;
    config.engine.context = config.engine.context.or(Some(args.prompt_tokens as usize + 1));
    let files = load::files(&config.model)?;
    let name = load::model_id(&files, &config);
    let load::Model { mut runner, npu, .. } = load::model(&files, &config, Watch::Nothing)?;
    let device = runner.device().info().clone();
    let npu = npu.expect("a model that requires the NPU has it");
    let trial = Trial::Prefill { tokens: args.prompt_tokens as usize };
    if let Some(obstacle) = trial.obstacle(runner.limits()) {
        return Err(Error::Argument(format!("--prompt-tokens {}: {obstacle}", args.prompt_tokens)));
    }
    let meter = Meter::open(&Machine::new(args.root.as_deref()), &Place::of(&device));
    let counts = std::iter::once(0).chain(npu.choices.iter().copied());
    let mut shares: Vec<ShareRuns> =
        counts.map(|kv_heads| ShareRuns { kv_heads, runs: Vec::new() }).collect();
    let rounds = 1 + args.runs as usize;
    let bar = Bar::of("cases", "measuring", (rounds * shares.len()) as u64);
    for round in 0..rounds {
        let places = shares.len();
        for (i, share) in shares.iter_mut().enumerate() {
            bar.set((round * places + i) as u64);
            let run = measure(&mut runner, args.prompt_tokens, share.kv_heads, meter.as_deref().ok())?;
            // The first round is a warm-up.
            if round > 0 {
                share.runs.push(run);
            }
        }
    }
    drop(bar);
    let report = Report { name, device: device.name, driver: device.driver, npu, shares, args, meter };
    print(&if args.json { format!("{}\n", report.json()) } else { report.text() })
}

fn measure(
    runner: &mut ModelRunner,
    prompt_tokens: u32,
    kv_heads: usize,
    meter: Option<&Meter>,
) -> Result<Run, Error> {
    let trial = Trial::Prefill { tokens: prompt_tokens as usize };
    runner.set_offload_heads(kv_heads);
    let completed = |runner: &ModelRunner| runner.offload_counts().map_or(0, |counts| counts.tokens);
    let (before, busy) = (completed(runner), runner.device().busy());
    let (energy, since) = (meter.and_then(EnergyCounter::read), Instant::now());
    trial.run(runner)?;
    let took = since.elapsed();
    let used = energy.zip(meter.and_then(EnergyCounter::read)).filter(|(from, to)| from.gaps == to.gaps);
    let tokens = completed(runner) - before;
    if kv_heads > 0 && tokens == 0 {
        return Err(Error::Argument(format!(
            "the NPU computed nothing of this prompt with {kv_heads} KV heads: no kernel is for its chunks, see \
             engine.prefill_chunk and npu.keys"
        )));
    }
    Ok(Run {
        took,
        joules: used.map(|(from, to)| (to.joules - from.joules).max(0.0)),
        gpu: runner.device().busy().zip(busy).map(|(after, before)| after.saturating_sub(before)),
        covered: tokens as f64 / (prompt_tokens as usize * runner.config().layers.len()) as f64,
    })
}

struct Report<'a> {
    name: String,
    device: String,
    driver: String,
    npu: NpuReport,
    shares: Vec<ShareRuns>,
    args: &'a args::BenchNpu,
    meter: Result<std::sync::Arc<Meter>, String>,
}

impl Report<'_> {
    fn json(&self) -> Value {
        let tokens = f64::from(self.args.prompt_tokens);
        let shares = self.shares.iter().map(|share| {
            json!({
                "kv_heads": share.kv_heads,
                "tokens_per_s": tokens / share.seconds(),
                "joules_per_token": share.joules().map(|joules| joules / tokens),
                "gpu_seconds": share.gpu_seconds(),
                "npu_part_of_tokens": share.covered(),
                "seconds": share.runs.iter().map(|run| run.took.as_secs_f64()).collect::<Vec<_>>(),
            })
        });
        json!({
            "benchmark": "npu",
            "model": self.name,
            "device": self.device,
            "driver": self.driver,
            "npu": self.npu.device,
            "xrt": self.npu.xrt,
            "is_double": self.npu.is_double,
            "commit": commit(),
            "prompt_tokens": self.args.prompt_tokens,
            "runs": self.args.runs,
            "chosen_kv_heads": self.npu.kv_heads,
            "energy_source": self.meter.as_ref().ok().map(|meter| meter.source()),
            "no_energy_because": self.meter.as_ref().err(),
            "shares": shares.collect::<Vec<_>>(),
        })
    }

    fn text(&self) -> String {
        let tokens = f64::from(self.args.prompt_tokens);
        let NpuReport { device, xrt, is_double, kv_heads, .. } = &self.npu;
        let or_unknown = |text: &Option<String>| text.clone().unwrap_or_else(|| "unknown".into());
        let double = if *is_double { ", the tests' double: no NPU computed this" } else { "" };
        let mut text = format!(
            "{}\nGPU      {}, {}, commit {}\nNPU      {}, XRT {}{double}\nprompt   {} tokens, medians of {} runs by turns\n",
            self.name,
            self.device,
            self.driver,
            commit(),
            or_unknown(device),
            or_unknown(xrt),
            self.args.prompt_tokens,
            self.args.runs,
        );
        if let Err(why) = &self.meter {
            text.push_str(&format!("energy   not known: {why}\n"));
        }
        text.push_str(
            "KV heads on the NPU   of the prompt   tokens/s   of the GPU alone   GPU computes   J a token\n",
        );
        let alone = self.shares[0].seconds();
        for share in &self.shares {
            let joules = share.joules().map_or("-".into(), |joules| format!("{:.4}", joules / tokens));
            let gpu = share.gpu_seconds().map_or("-".into(), |seconds| format!("{seconds:.2} s"));
            text.push_str(&format!(
                "{:19} {:13.0} % {:10.1} {:18.3} {gpu:>14} {joules:>11}\n",
                share.kv_heads,
                100.0 * share.covered(),
                tokens / share.seconds(),
                alone / share.seconds(),
            ));
        }
        text.push_str(&format!("a start with this configuration gives the NPU {kv_heads} KV heads\n"));
        text
    }
}
