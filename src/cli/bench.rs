//! `unicorn bench`: load time, prefill and decode speed, and memory, with the device, driver and commit they are of.
//!
//! Goes through the engine, one request at a time, as a chat does. The prompt is made of ids, not text: which they
//! are makes no difference to the time.

use std::time::{Duration, Instant};

use serde_json::json;

use super::args;
use super::devices::bytes;
use super::error::Error;
use super::generate::print;
use super::load::{self, EndEngine, Watch};
use super::progress::Bar;
use crate::config::Config;
use crate::engine::{EngineHandle, Event, Request, Timings};

pub fn bench(config: &Config, args: &args::Bench) -> Result<(), Error> {
    let files = load::files(&config.model)?;
    let watch = if args.profile { Watch::Kernels } else { Watch::Nothing };
    let since = Instant::now();
    let model = load::model(&files, config, watch)?;
    let load_time = since.elapsed();
    let (device, placement) = (model.device.clone(), model.placement());
    let quantize = config.model.quantize.name();
    let name = config.model.name.clone().unwrap_or_else(|| files.name().to_owned());

    let profiler = model.profiler();
    let engine = load::engine(model.runner, config, 1);
    let _end = EndEngine(engine.clone());
    let mut runs = Vec::new();
    let per_run = u64::from(args.generate_tokens);
    let bar = Bar::tokens("measuring", (u64::from(args.runs) + 1) * per_run);
    for i in 0..=u64::from(args.runs) {
        if i == 1 {
            profiler.take(); // what the warm-up did
        }
        runs.push(run(&engine, args, i as u32, &mut |n| bar.set(i * per_run + n as u64))?);
    }
    drop(bar);
    let kernels = profiler.take();
    runs.remove(0); // the first one warms up
    let prompt_n = args.prompt_tokens as usize;
    let prefill = median(runs.iter().map(|t| rate(prompt_n, t.prefill)));
    // The first token comes with the prompt.
    let decode = median(runs.iter().map(|t| rate(t.predicted_n - 1, t.decode)));
    let (rss, peak) = resident_bytes();
    let commit = commit();
    let load_s = load_time.as_secs_f64();

    if args.json {
        let placement: Vec<_> =
            placement.iter().map(|(what, bytes)| json!({"what": what, "bytes": bytes})).collect();
        let line = json!({
            "model": name,
            "quantize": quantize,
            "device": device.name,
            "driver": device.driver,
            "commit": commit,
            "load_s": load_s,
            "prompt_tokens": prompt_n,
            "prefill_tokens_per_s": prefill,
            "generate_tokens": args.generate_tokens,
            "decode_tokens_per_s": decode,
            "runs": args.runs,
            "rss_bytes": rss,
            "peak_rss_bytes": peak,
            "placement": placement,
            "kernels": kernels
                .iter()
                .map(|(name, n, time)| json!({"kernel": name, "dispatches": n, "gpu_s": time.as_secs_f64()}))
                .collect::<Vec<_>>(),
        });
        return print(&format!("{line}\n"));
    }
    let or_unknown = |n: Option<u64>| n.map_or("unknown".into(), bytes);
    let mut text = format!(
        "{name}, weights {quantize}\n{}, {}, commit {commit}\n\
         load     {load_s:.2} s\n\
         prefill  {prefill:.1} tokens/s ({prompt_n} tokens, median of {runs})\n\
         decode   {decode:.1} tokens/s ({generate} tokens, median of {runs})\n\
         memory   {} resident, at most {}\n",
        device.name,
        device.driver,
        or_unknown(rss),
        or_unknown(peak),
        runs = args.runs,
        generate = args.generate_tokens,
    );
    for (what, n) in placement {
        text.push_str(&format!("         {} {what}\n", bytes(n)));
    }
    if !kernels.is_empty() {
        let runs = args.runs;
        text.push_str(&format!("kernels, GPU time of {runs} runs (prefill and decode):\n"));
    }
    for (name, n, time) in kernels {
        text.push_str(&format!("         {:9.1} ms {n:7} x {name}\n", time.as_secs_f64() * 1e3));
    }
    print(&text)
}

/// Where the time of one request went, whose prompt is none of another run's, or the prefix cache had it; `progress` hears
/// of each token.
fn run(
    engine: &EngineHandle,
    args: &args::Bench,
    run: u32,
    progress: &mut dyn FnMut(usize),
) -> Result<Timings, Error> {
    let vocab = engine.limits().vocab_size as u32;
    let prompt = (0..args.prompt_tokens).map(|i| i.wrapping_mul(7919).wrapping_add(run) % vocab).collect();
    let request = Request { max_tokens: Some(args.generate_tokens as usize), ..Request::new(prompt) };
    let mut stream = engine.submit(request)?;
    loop {
        match stream.blocking_next() {
            Some(Event::Token { timings, .. }) => progress(timings.predicted_n),
            Some(Event::Finished { timings, .. }) => return Ok(timings),
            Some(Event::Failed(error)) => return Err(error.into()),
            None => unreachable!("a stream ends with Finished or Failed"),
        }
    }
}

fn rate(n: usize, time: Duration) -> f64 {
    n as f64 / time.as_secs_f64().max(f64::MIN_POSITIVE)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Of the source tree this binary was built in, if that is still there; `+` where it has changes.
fn commit() -> String {
    let describe =
        ["-C", env!("CARGO_MANIFEST_DIR"), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"];
    let output = std::process::Command::new("git").args(describe).output();
    let described = output.ok().filter(|o| o.status.success()).and_then(|o| String::from_utf8(o.stdout).ok());
    described.map_or("unknown".into(), |text| text.trim().to_owned())
}

/// Resident now and at most, of this process.
pub fn resident_bytes() -> (Option<u64>, Option<u64>) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| -> Option<u64> {
        let line = status.lines().find_map(|l| l.strip_prefix(name))?;
        line.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
    };
    (field("VmRSS"), field("VmHWM"))
}
