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
use serde::{Serialize, Serializer};
use serde_json::json;

use super::statistics::{column, median};
use crate::cli::args;
use crate::cli::doctor::Machine;
use crate::cli::energy::Meter;
use crate::cli::error::Error;
use crate::cli::load::{self, EndEngine, Watch};
use crate::cli::progress::Bar;
use crate::cli::terminal::{bytes, print};
use crate::cli::version::commit;
use crate::config::{Config, Courtesy};
use crate::device::{KernelTime, Place, kernel_times, resident_bytes};
use crate::engine::{DraftTotals, Drafts, EnergyCounter, EngineHandle, Event, Request, Stats, Timings};

/// The measurements of one `unicorn bench engine`, with the names of its JSON.
#[derive(Serialize)]
struct Measured {
    model: String,
    /// The schemes of its weights.
    weights: String,
    device: String,
    driver: String,
    commit: String,
    load_s: f64,
    prompt_tokens: u32,
    prefill_tokens_per_s: f64,
    generate_tokens: u32,
    decode_tokens_per_s: f64,
    runs: u32,
    #[serde(flatten)]
    host: HostTime,
    #[serde(flatten)]
    energy: Energy,
    /// Draft tokens, if there is a draft model.
    #[serde(serialize_with = "drafts_json")]
    guesses: Option<DraftTotals>,
    streams: Vec<Together>,
    courtesy: Vec<Courteous>,
    /// Resident memory: now, and at its peak.
    rss_bytes: Option<u64>,
    peak_rss_bytes: Option<u64>,
    placement: Vec<Placed>,
    kernels: Vec<Kernel>,
}

/// The device memory of one kind of data in one heap.
#[derive(Serialize)]
struct Placed {
    what: String,
    bytes: u64,
}

#[derive(Serialize)]
struct Kernel {
    kernel: String,
    dispatches: u64,
    gpu_s: f64,
}

pub fn engine(config: &Config, args: &args::BenchEngine) -> Result<(), Error> {
    let (measured, _end) = measure(config, args)?;
    print(&match args.json {
        true => format!("{}\n", serde_json::to_string(&measured).expect("numbers and texts")),
        false => measured.text(),
    })
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
    let gpu = Arc::clone(model.runner.device());
    let placement =
        load::placement(&model.runner).into_iter().map(|(what, bytes)| Placed { what, bytes }).collect();
    let weights = model.runner.schemes().to_string();

    let meter = Meter::open(&Machine::new(args.root.as_deref()), &Place::of(gpu.info()));
    let energy = meter.clone().ok().map(|meter| meter as Arc<dyn EnergyCounter>);
    let engine = load::engine(model.runner, model.draft, config, widest, energy);
    let end = EndEngine(engine.clone());
    let mut runs = Vec::new();
    let per_run = u64::from(args.generate_tokens);
    let turns = args.runs + 1;
    let bar = Bar::of("tokens", "measuring", u64::from(turns) * work_of_run(args));
    let mut before = Stats::default();
    for i in 0..=u64::from(args.runs) {
        if i == 1 {
            kernel_times(&gpu); // drop the times of the warm-up
            before = engine.stats();
        }
        let progress = &mut |n| show_run(&bar, args, i as u32, turns, n);
        runs.push(run(&engine, args, i as u32, progress)?);
    }
    drop(bar);
    let after = engine.stats();
    let host = HostTime::between(&before, &after);
    let guesses = config.model.draft.is_some().then(|| drafts_between(&before.drafts, &after.drafts));
    let gpu_s =
        |KernelTime { kernel, dispatches, time }| Kernel { kernel, dispatches, gpu_s: time.as_secs_f64() };
    let kernels = kernel_times(&gpu).into_iter().map(gpu_s).collect();
    runs.remove(0); // the first one warms up
    let mut prompts = args.runs + 1; // prompts used until now
    let mut together = Vec::new();
    for n in &args.streams {
        let each =
            Bar::of("tokens", format!("reading {n} prompts"), u64::from(args.runs) * u64::from(*n) * per_run);
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
        windows.sort_by(|a, b| a.decode_tokens_per_s.total_cmp(&b.decode_tokens_per_s));
        together.push(windows.swap_remove(windows.len() / 2));
    }
    let courtesy = with_courtesy(&engine, args, prompts, &|| gpu.busy())?;
    let prefill = runs.iter().map(|t| rate(args.prompt_tokens as usize, t.prefill));
    let (rss_bytes, peak_rss_bytes) = resident_bytes();
    let measured = Measured {
        model: load::model_id(&files, config),
        weights,
        device: gpu.info().name.clone(),
        driver: gpu.info().driver.clone(),
        commit: commit(),
        load_s: load_time.as_secs_f64(),
        prompt_tokens: args.prompt_tokens,
        prefill_tokens_per_s: median(prefill),
        generate_tokens: args.generate_tokens,
        decode_tokens_per_s: median(runs.iter().map(decode_rate)),
        runs: args.runs,
        host,
        energy: Energy::of(&runs, &meter, args.prompt_tokens),
        guesses,
        streams: together,
        courtesy,
        rss_bytes,
        peak_rss_bytes,
        placement,
        kernels,
    };
    Ok((measured, end))
}

impl Measured {
    fn text(&self) -> String {
        let or_unknown = |n: Option<u64>| n.map_or("unknown".into(), bytes);
        let runs = self.runs;
        let mut text = format!(
            "{}, weights {}\n{}, {}, commit {}\n\
             load     {:.2} s\n\
             prefill  {:.1} tokens/s ({} tokens, median of {runs})\n\
             decode   {:.1} tokens/s ({} tokens, median of {runs})\n\
             host     {:.1} us a step\n\
             memory   {} resident, at most {}\n",
            self.model,
            self.weights,
            self.device,
            self.driver,
            self.commit,
            self.load_s,
            self.prefill_tokens_per_s,
            self.prompt_tokens,
            self.decode_tokens_per_s,
            self.generate_tokens,
            self.host.host_us_per_step,
            or_unknown(self.rss_bytes),
            or_unknown(self.peak_rss_bytes),
        );
        text += &self.energy.text();
        if let Some(DraftTotals { lookup, model }) = &self.guesses {
            text += &format!(
                "guesses  {} of {} by the draft model came true, {} of {} by prompt lookup\n",
                model.accepted, model.proposed, lookup.accepted, lookup.proposed
            );
        }
        for Placed { what, bytes: n } in &self.placement {
            text += &format!("         {} {what}\n", bytes(*n));
        }
        if !self.streams.is_empty() {
            text += &format!(
                "streams  decode tokens/s  of one  us of host a step  and sequence  preempted  J a token (median of {runs})\n"
            );
        }
        for t in &self.streams {
            text += &format!(
                "{:7} {:16.1} {:7.2} {:18.1} {:13.1} {:10} {}\n",
                t.streams,
                t.decode_tokens_per_s,
                t.decode_tokens_per_s / self.decode_tokens_per_s,
                t.host.host_us_per_step,
                t.host.host_us_per_sequence_step,
                t.preemptions,
                column(t.joules_per_token, 10, 4),
            );
        }
        if !self.courtesy.is_empty() {
            text += &format!(
                "courtesy  device busy  prefill tokens/s  decode tokens/s (medians of {runs}, by turns)\n"
            );
        }
        for c in &self.courtesy {
            let busy = c.busy.map_or("unknown".into(), |busy| format!("{busy:.3}"));
            text += &format!(
                "{:8} {busy:>12} {:17.1} {:16.1}\n",
                c.courtesy.share(),
                c.prefill_tokens_per_s,
                c.decode_tokens_per_s
            );
        }
        if !self.kernels.is_empty() {
            text += &format!("kernels, GPU time of {runs} runs (prefill and decode):\n");
        }
        for Kernel { kernel, dispatches, gpu_s } in &self.kernels {
            text += &format!("         {:9.1} ms {dispatches:7} x {kernel}\n", gpu_s * 1e3);
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

/// The machine's energy, in joules per token: medians of the runs, or why it is not known.
#[derive(Default, Serialize)]
struct Energy {
    energy_source: Option<&'static str>,
    prefill_joules_per_token: Option<f64>,
    decode_joules_per_token: Option<f64>,
    no_energy_because: Option<String>,
}

impl Energy {
    fn of(runs: &[Timings], meter: &Result<Arc<Meter>, String>, prompt_tokens: u32) -> Self {
        let unknown = |why: String| Self { no_energy_because: Some(why), ..Self::default() };
        let source = match meter {
            Ok(meter) => meter.source(),
            Err(why) => return unknown(why.clone()),
        };
        let known: Option<Vec<_>> = runs.iter().map(|run| Some((run.energy?, run.predicted_n))).collect();
        let Some(known) = known else {
            return unknown(format!("{source} was not readable all the time"));
        };
        let prefill = known.iter().map(|(energy, _)| energy.prompt / f64::from(prompt_tokens));
        let decode = known.iter().map(|(energy, n)| energy.predicted / (n - 1) as f64);
        Self {
            energy_source: Some(source),
            prefill_joules_per_token: Some(median(prefill)),
            decode_joules_per_token: Some(median(decode)),
            no_energy_because: None,
        }
    }

    fn text(&self) -> String {
        if let Some(why) = &self.no_energy_because {
            return format!("energy   not known: {why}\n");
        }
        format!(
            "energy   {} J a token of prefill, {} J a token of decode \
             (by {}: of the whole machine, idle draw and other programs too)\n",
            column(self.prefill_joules_per_token, 0, 4),
            column(self.decode_joules_per_token, 0, 4),
            self.energy_source.unwrap_or_default(),
        )
    }
}

/// Time of the engine's thread without the waiting for the device, for a step and for each sequence in a step.
#[derive(Serialize)]
struct HostTime {
    host_us_per_step: f64,
    host_us_per_sequence_step: f64,
}

impl HostTime {
    fn between(before: &Stats, after: &Stats) -> Self {
        let us = (after.host_ns - before.host_ns) as f64 / 1e3;
        let each = |n: u64| us / n.max(1) as f64;
        Self {
            host_us_per_step: each(after.steps - before.steps),
            host_us_per_sequence_step: each(after.step_shares - before.step_shares),
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

fn drafts_json<S: Serializer>(totals: &Option<DraftTotals>, serializer: S) -> Result<S::Ok, S::Error> {
    let each = |drafts: &Drafts| json!({"proposed": drafts.proposed, "accepted": drafts.accepted});
    let both = |DraftTotals { model, lookup }: &DraftTotals| json!({"draft_model": each(model), "prompt_lookup": each(lookup)});
    totals.as_ref().map(both).serialize(serializer)
}

/// Measurements of several streams while all of them decode.
#[derive(Serialize)]
struct Together {
    streams: u32,
    /// Of all streams together.
    decode_tokens_per_s: f64,
    steps: u64,
    preemptions: u64,
    #[serde(flatten)]
    host: HostTime,
    /// The machine's energy; `None` if it is not known.
    joules_per_token: Option<f64>,
}

/// Measurements of one stream with a bound on the share of the device's time.
#[derive(Serialize)]
struct Courteous {
    courtesy: Courtesy,
    /// Share of the time, of prefill and decode together, in which the device computed by its own clock.
    busy: Option<f64>,
    prefill_tokens_per_s: f64,
    decode_tokens_per_s: f64,
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
    let bar = Bar::of("tokens", "measuring courtesy", u64::from(turns) * work_of_run(args));
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
        prefill_tokens_per_s: median(runs.iter().map(|(_, t)| rate(args.prompt_tokens as usize, t.prefill))),
        decode_tokens_per_s: median(runs.iter().map(|(_, t)| decode_rate(t))),
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
        decode_tokens_per_s: rate(tokens as usize, time),
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
