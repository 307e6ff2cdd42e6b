//! `unicorn bench engine`: load time, prefill and decode speed, memory, and the time of the engine's own thread in a
//! step. The report names the device, the driver and the commit, and gives the machine's energy if it can be read.
//!
//! The requests go through the engine: first one at a time, as in a chat, then with `--streams` many at the same time.
//! Prompts consist of ids, not of text, because the time does not depend on the ids.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::executor::block_on;
use futures::stream::select_all;
use serde_json::{Value, json};

use super::report::commit;
use super::statistics::median;
use crate::cli::args;
use crate::cli::doctor::Machine;
use crate::cli::energy::Meter;
use crate::cli::error::Error;
use crate::cli::load::{self, EndEngine, Watch};
use crate::cli::progress::Bar;
use crate::cli::terminal::{bytes, print};
use crate::config::{Config, Courtesy};
use crate::device::{Place, resident_bytes};
use crate::engine::{DraftTotals, Drafts, EnergyCounter, EngineHandle, Event, Request, Stats, Timings};

/// The measurements of one `unicorn bench engine`.
struct Measured {
    name: String,
    /// The schemes of its weights.
    weights: String,
    device: String,
    driver: String,
    commit: String,
    load_s: f64,
    prompt_n: usize,
    /// Prefill and decode speed, in tokens per second.
    prefill: f64,
    decode: f64,
    host: HostTime,
    energy: Result<Energy, String>,
    /// Draft tokens, if there is a draft model.
    drafts: Option<DraftTotals>,
    together: Vec<Together>,
    courteous: Vec<Courteous>,
    /// Resident memory in bytes: now, and at its peak.
    memory: (Option<u64>, Option<u64>),
    placement: Vec<(String, u64)>,
    /// (kernel, dispatches, GPU time).
    kernels: Vec<(String, u64, Duration)>,
}

pub fn engine(config: &Config, args: &args::BenchEngine) -> Result<(), Error> {
    let (measured, _end) = measure(config, args)?;
    print(&if args.json { measured.json(args) } else { measured.text(args) })
}

fn measure(config: &Config, args: &args::BenchEngine) -> Result<(Measured, EndEngine), Error> {
    // Every requested stream gets its place in the KV cache, if there is enough memory.
    let widest = args.streams.iter().copied().max().unwrap_or(1) as usize;
    let mut config = config.clone();
    config.engine.sequences = config.engine.sequences.max(widest);
    // The benchmark measures the pass over the weights. Made-up prompts do not repeat themselves as real texts do, so
    // drafting from repetitions would give meaningless results. A draft model is measured with its cost and its gain.
    if config.model.draft.is_none() {
        config.engine.speculation_tokens = 0;
    }
    let config = &config;
    let files = load::files(&config.model)?;
    let watch = if args.profile { Watch::Kernels } else { Watch::Nothing };
    let since = Instant::now();
    let model = load::model(&files, config, watch)?;
    let load_time = since.elapsed();
    let (device, placement) = (model.device.clone(), model.placement());
    let weights = model.runner.schemes().to_string();
    let name = config.model.name.clone().unwrap_or_else(|| files.name().to_owned());

    let profiler = model.profiler();
    let meter = Meter::open(&Machine::new(args.root.as_deref()), &Place::of(&model.device));
    let energy = meter.clone().ok().map(|meter| meter as Arc<dyn EnergyCounter>);
    let engine = load::engine(model.runner, model.draft, config, widest, energy);
    let end = EndEngine(engine.clone());
    let mut runs = Vec::new();
    let per_run = u64::from(args.generate_tokens);
    let turns = args.runs + 1;
    let bar = Bar::tokens("measuring", u64::from(turns) * work_of_run(args));
    let mut before = Stats::default();
    for i in 0..=u64::from(args.runs) {
        if i == 1 {
            profiler.take(); // drop the times of the warm-up
            before = engine.stats();
        }
        let progress = &mut |n| show_run(&bar, args, i as u32, turns, n);
        runs.push(run(&engine, args, i as u32, progress)?);
    }
    drop(bar);
    let after = engine.stats();
    let host = HostTime::between(&before, &after);
    let drafts = config.model.draft.is_some().then(|| drafts_between(&before.drafts, &after.drafts));
    let kernels = profiler.take();
    runs.remove(0); // the first one warms up
    let mut prompts = args.runs + 1; // prompts used until now
    let mut together = Vec::new();
    for n in &args.streams {
        let each =
            Bar::tokens(format!("reading {n} prompts"), u64::from(args.runs) * u64::from(*n) * per_run);
        let mut windows = Vec::new();
        for i in 0..u64::from(args.runs) {
            let done = i * u64::from(*n) * per_run;
            each.say(format!("reading {n} prompts, run {} of {}", i + 1, args.runs));
            let progress = &mut |tokens| {
                each.say(format!("decoding {n} streams, run {} of {}", i + 1, args.runs));
                each.set(done + tokens);
            };
            windows.push(decode_together(&engine, meter.as_deref().ok(), args, prompts, *n, progress)?);
            prompts += n;
        }
        windows.sort_by(|a, b| a.tokens_per_s.total_cmp(&b.tokens_per_s));
        together.push(windows.swap_remove(windows.len() / 2));
    }
    let courteous = with_courtesy(&engine, args, prompts, &|| profiler.0.busy())?;
    let prompt_n = args.prompt_tokens as usize;
    let prefill = median(runs.iter().map(|t| rate(prompt_n, t.prefill)));
    let decode = median(runs.iter().map(decode_rate));
    let energy = meter.and_then(|meter| {
        let energy = Energy::of(&runs, meter.source(), args.prompt_tokens);
        energy.ok_or_else(|| format!("{} was not readable all the time", meter.source()))
    });
    let measured = Measured {
        name,
        weights,
        device: device.name,
        driver: device.driver,
        commit: commit(),
        load_s: load_time.as_secs_f64(),
        prompt_n,
        prefill,
        decode,
        host,
        energy,
        drafts,
        together,
        courteous,
        memory: resident_bytes(),
        placement,
        kernels,
    };
    Ok((measured, end))
}

impl Measured {
    fn json(&self, args: &args::BenchEngine) -> String {
        let Self { name, weights, device, driver, commit, load_s, prompt_n, prefill, decode, host, .. } =
            self;
        let (rss, peak) = self.memory;
        let placement: Vec<_> =
            self.placement.iter().map(|(what, bytes)| json!({"what": what, "bytes": bytes})).collect();
        let line = json!({
            "model": name,
            "weights": weights,
            "device": device,
            "driver": driver,
            "commit": commit,
            "load_s": load_s,
            "prompt_tokens": prompt_n,
            "prefill_tokens_per_s": prefill,
            "generate_tokens": args.generate_tokens,
            "decode_tokens_per_s": decode,
            "runs": args.runs,
            "host_us_per_step": host.per_step,
            "host_us_per_sequence_step": host.per_share,
            "energy_source": self.energy.as_ref().ok().map(|energy| energy.source),
            "prefill_joules_per_token": self.energy.as_ref().ok().map(|energy| energy.prefill),
            "decode_joules_per_token": self.energy.as_ref().ok().map(|energy| energy.decode),
            "no_energy_because": self.energy.as_ref().err(),
            "guesses": self.drafts.as_ref().map(drafts_json),
            "streams": self.together.iter().map(Together::json).collect::<Vec<_>>(),
            "courtesy": self.courteous.iter().map(Courteous::json).collect::<Vec<_>>(),
            "rss_bytes": rss,
            "peak_rss_bytes": peak,
            "placement": placement,
            "kernels": self.kernels
                .iter()
                .map(|(name, n, time)| json!({"kernel": name, "dispatches": n, "gpu_s": time.as_secs_f64()}))
                .collect::<Vec<_>>(),
        });
        format!("{line}\n")
    }

    fn text(&self, args: &args::BenchEngine) -> String {
        let Self { name, weights, device, driver, commit, load_s, prompt_n, prefill, decode, .. } = self;
        let (rss, peak) = self.memory;
        let or_unknown = |n: Option<u64>| n.map_or("unknown".into(), bytes);
        let mut text = format!(
            "{name}, weights {weights}\n{device}, {driver}, commit {commit}\n\
             load     {load_s:.2} s\n\
             prefill  {prefill:.1} tokens/s ({prompt_n} tokens, median of {runs})\n\
             decode   {decode:.1} tokens/s ({generate} tokens, median of {runs})\n\
             host     {:.1} us a step\n\
             memory   {} resident, at most {}\n",
            self.host.per_step,
            or_unknown(rss),
            or_unknown(peak),
            runs = args.runs,
            generate = args.generate_tokens,
        );
        text.push_str(&match &self.energy {
            Ok(Energy { source, prefill, decode }) => format!(
                "energy   {prefill:.4} J a token of prefill, {decode:.4} J a token of decode \
                 (by {source}: of the whole machine, idle draw and other programs too)\n"
            ),
            Err(why) => format!("energy   not known: {why}\n"),
        });
        if let Some(DraftTotals { lookup, model }) = &self.drafts {
            text.push_str(&format!(
                "guesses  {} of {} by the draft model came true, {} of {} by prompt lookup\n",
                model.accepted, model.proposed, lookup.accepted, lookup.proposed
            ));
        }
        for (what, n) in &self.placement {
            text.push_str(&format!("         {} {what}\n", bytes(*n)));
        }
        if !self.together.is_empty() {
            let runs = args.runs;
            text.push_str(&format!(
                "streams  decode tokens/s  of one  us of host a step  and sequence  preempted  J a token (median of {runs})\n"
            ));
        }
        for t in &self.together {
            text.push_str(&format!(
                "{:7} {:16.1} {:7.2} {:18.1} {:13.1} {:10} {:>10}\n",
                t.streams,
                t.tokens_per_s,
                t.tokens_per_s / decode,
                t.host.per_step,
                t.host.per_share,
                t.preemptions,
                t.joules_per_token.map_or("-".into(), |joules| format!("{joules:.4}")),
            ));
        }
        if !self.courteous.is_empty() {
            let runs = args.runs;
            text.push_str(&format!(
                "courtesy  device busy  prefill tokens/s  decode tokens/s (medians of {runs}, by turns)\n"
            ));
        }
        for c in &self.courteous {
            let busy = c.busy.map_or("unknown".into(), |busy| format!("{busy:.3}"));
            text.push_str(&format!(
                "{:8} {busy:>12} {:17.1} {:16.1}\n",
                c.courtesy.share(),
                c.prefill,
                c.decode
            ));
        }
        if !self.kernels.is_empty() {
            let runs = args.runs;
            text.push_str(&format!("kernels, GPU time of {runs} runs (prefill and decode):\n"));
        }
        for (name, n, time) in &self.kernels {
            text.push_str(&format!("         {:9.1} ms {n:7} x {name}\n", time.as_secs_f64() * 1e3));
        }
        text
    }
}

/// Tokens of a run: those of its prompt, and those that are decoded.
fn work_of_run(args: &args::BenchEngine) -> u64 {
    u64::from(args.prompt_tokens) + u64::from(args.generate_tokens)
}

/// Shows the progress of a run, which is one of `turns`; `turn` begins with 0. The prompt counts as read when the first
/// token is decoded.
fn show_run(bar: &Bar, args: &args::BenchEngine, turn: u32, turns: u32, decoded: usize) {
    let (prompt, run) = (args.prompt_tokens, turn + 1);
    let (what, done) = match decoded {
        0 => (format!("reading a prompt of {prompt} tokens"), 0),
        n => ("decoding".to_owned(), u64::from(prompt) + n as u64),
    };
    bar.say(format!("{what}, run {run} of {turns}"));
    bar.set(u64::from(turn) * work_of_run(args) + done);
}

/// Runs one request and returns its timings; `progress` is called with the number of decoded tokens, 0 first.
fn run(
    engine: &EngineHandle,
    args: &args::BenchEngine,
    run: u32,
    progress: &mut dyn FnMut(usize),
) -> Result<Timings, Error> {
    let request = Request {
        max_tokens: Some(args.generate_tokens as usize),
        ..Request::new(prompt(engine, args, run))
    };
    progress(0);
    let mut stream = engine.submit(request)?;
    loop {
        match stream.blocking_next() {
            Some(Event::Token { timings, .. }) => progress(timings.predicted_n),
            Some(Event::Finished { timings, .. }) => return Ok(timings),
            Some(Event::Failed(error)) => return Err(error.into()),
            Some(Event::Prompt { .. } | Event::Pooled { .. }) => {} // not requested
            None => unreachable!("a stream ends with Finished or Failed"),
        }
    }
}

/// A prompt that no other run uses, so that the prefix cache does not have it.
fn prompt(engine: &EngineHandle, args: &args::BenchEngine, run: u32) -> Vec<u32> {
    let vocab = engine.limits().vocab_size as u32;
    (0..args.prompt_tokens).map(|i| i.wrapping_mul(7919).wrapping_add(run) % vocab).collect()
}

/// The machine's energy, in joules per token: medians of the runs.
struct Energy {
    source: &'static str,
    prefill: f64,
    decode: f64,
}

impl Energy {
    /// `None` if the energy of a run is not known.
    fn of(runs: &[Timings], source: &'static str, prompt_tokens: u32) -> Option<Self> {
        let known: Option<Vec<_>> = runs.iter().map(|run| Some((run.energy?, run.predicted_n))).collect();
        let known = known?;
        Some(Self {
            source,
            prefill: median(known.iter().map(|(energy, _)| energy.prompt / f64::from(prompt_tokens))),
            decode: median(known.iter().map(|(energy, n)| energy.predicted / (n - 1) as f64)),
        })
    }
}

/// Time of the engine's thread without the waiting for the device, in microseconds.
struct HostTime {
    per_step: f64,
    /// Time for each sequence in a step.
    per_share: f64,
}

impl HostTime {
    fn between(before: &Stats, after: &Stats) -> Self {
        let us = (after.host_ns - before.host_ns) as f64 / 1e3;
        let each = |n: u64| us / n.max(1) as f64;
        Self {
            per_step: each(after.steps - before.steps),
            per_share: each(after.step_shares - before.step_shares),
        }
    }
}

/// Draft tokens between two measurements, and how many of them were accepted.
fn drafts_between(before: &DraftTotals, after: &DraftTotals) -> DraftTotals {
    let since = |before: Drafts, after: Drafts| Drafts {
        proposed: after.proposed - before.proposed,
        accepted: after.accepted - before.accepted,
    };
    DraftTotals { lookup: since(before.lookup, after.lookup), model: since(before.model, after.model) }
}

fn drafts_json(totals: &DraftTotals) -> Value {
    let each = |drafts: &Drafts| json!({"proposed": drafts.proposed, "accepted": drafts.accepted});
    json!({"draft_model": each(&totals.model), "prompt_lookup": each(&totals.lookup)})
}

/// Measurements of several streams while all of them decode.
struct Together {
    streams: u32,
    /// Tokens per second of all streams together.
    tokens_per_s: f64,
    steps: u64,
    preemptions: u64,
    host: HostTime,
    /// The machine's energy; `None` if it is not known.
    joules_per_token: Option<f64>,
}

impl Together {
    fn json(&self) -> Value {
        json!({
            "streams": self.streams,
            "decode_tokens_per_s": self.tokens_per_s,
            "steps": self.steps,
            "preemptions": self.preemptions,
            "host_us_per_step": self.host.per_step,
            "host_us_per_sequence_step": self.host.per_share,
            "joules_per_token": self.joules_per_token,
        })
    }
}

/// Measurements of one stream with a bound on the share of the device's time.
struct Courteous {
    courtesy: Courtesy,
    /// Share of the time, of prefill and decode together, in which the device computed by its own clock.
    busy: Option<f64>,
    prefill: f64,
    decode: f64,
}

impl Courteous {
    fn json(&self) -> Value {
        json!({
            "courtesy": self.courtesy.share(),
            "busy": self.busy,
            "prefill_tokens_per_s": self.prefill,
            "decode_tokens_per_s": self.decode,
        })
    }
}

/// Runs one stream with each of the shares in turn. `busy` returns how long the device has computed until now.
fn with_courtesy(
    engine: &EngineHandle,
    args: &args::BenchEngine,
    first_prompt: u32,
    busy: &dyn Fn() -> Option<Duration>,
) -> Result<Vec<Courteous>, Error> {
    let shares = args.courtesy.len() as u32;
    let mut runs: Vec<Vec<(Option<f64>, Timings)>> = vec![Vec::new(); args.courtesy.len()];
    let turns = args.runs * shares;
    let bar = Bar::tokens("measuring courtesy", u64::from(turns) * work_of_run(args));
    for turn in 0..args.runs {
        for (i, courtesy) in (0..).zip(&args.courtesy) {
            engine.set_courtesy(*courtesy);
            let (since, before) = (Instant::now(), busy());
            let place = turn * shares + i;
            let progress = &mut |n| show_run(&bar, args, place, turns, n);
            let timings = run(engine, args, first_prompt + place, progress)?;
            let computed = before.and_then(|before| Some(busy()? - before));
            let share = computed.map(|computed| computed.as_secs_f64() / since.elapsed().as_secs_f64());
            runs[i as usize].push((share, timings));
        }
    }
    engine.set_courtesy(Courtesy::NONE);
    let measured = args.courtesy.iter().zip(runs).map(|(courtesy, runs)| Courteous {
        courtesy: *courtesy,
        busy: runs
            .iter()
            .all(|(busy, _)| busy.is_some())
            .then(|| median(runs.iter().filter_map(|(busy, _)| *busy))),
        prefill: median(runs.iter().map(|(_, t)| rate(args.prompt_tokens as usize, t.prefill))),
        decode: median(runs.iter().map(|(_, t)| decode_rate(t))),
    });
    Ok(measured.collect())
}

/// Decodes with `n` streams, and measures from the first token of the last stream on. Earlier streams keep decoding
/// until then, as long as the context allows. `progress` is called with the number of measured tokens.
fn decode_together(
    engine: &EngineHandle,
    meter: Option<&Meter>,
    args: &args::BenchEngine,
    first_prompt: u32,
    n: u32,
    progress: &mut dyn FnMut(u64),
) -> Result<Together, Error> {
    let streams = (0..n).map(|i| {
        let stream = engine.submit(Request::new(prompt(engine, args, first_prompt + i)))?;
        Ok(stream.map(move |event| (i as usize, event)))
    });
    let mut events = select_all(streams.collect::<Result<Vec<_>, Error>>()?);
    let mut begun = vec![false; n as usize];
    let (mut waiting, mut tokens, wanted) = (n, 0, u64::from(n) * u64::from(args.generate_tokens));
    let (mut since, mut before, mut energy) = (Instant::now(), Stats::default(), None);
    loop {
        let (i, event) = block_on(events.next()).expect("no stream ends before it is dropped");
        match event {
            Event::Token { .. } if waiting > 0 => {
                waiting -= u32::from(!std::mem::replace(&mut begun[i], true));
                (since, before, energy) = (Instant::now(), engine.stats(), meter.and_then(Meter::read));
            }
            Event::Token { .. } => {
                tokens += 1;
                progress(tokens);
                if tokens == wanted {
                    break;
                }
            }
            Event::Prompt { .. } | Event::Pooled { .. } => {} // not requested
            Event::Finished { .. } => {
                let problem = "a stream came to the end of the context before all had decoded enough";
                let advice = "give a larger --context, fewer streams, or fewer tokens";
                return Err(Error::Argument(format!("--streams {n}: {problem}; {advice}")));
            }
            Event::Failed(error) => return Err(error.into()),
        }
    }
    let (time, after) = (since.elapsed(), engine.stats());
    let used = energy.zip(meter.and_then(Meter::read)).filter(|(from, to)| from.gaps == to.gaps);
    Ok(Together {
        streams: n,
        tokens_per_s: rate(tokens as usize, time),
        steps: after.steps - before.steps,
        preemptions: after.preemptions - before.preemptions,
        host: HostTime::between(&before, &after),
        joules_per_token: used.map(|(from, to)| (to.joules - from.joules).max(0.0) / tokens as f64),
    })
}

/// The rate of the tokens after those that the prefill's last step yielded.
fn decode_rate(timings: &Timings) -> f64 {
    rate(timings.predicted_n - timings.first_n, timings.decode)
}

fn rate(n: usize, time: Duration) -> f64 {
    n as f64 / time.as_secs_f64().max(f64::MIN_POSITIVE)
}
