//! `unicorn-lab kernels`: times each hot kernel on a device at the shapes of published models. The limits of the
//! device are measured in the same run: the bandwidth of a copy, and the rate of multiply-adds.

use serde_json::{Value, json};

use super::args;
use super::comparison::Comparison;
use super::kernel_cases::{Case, Choice};
use crate::cli::args::Target;
use crate::cli::bench::statistics::column;
use crate::cli::error::Error;
use crate::cli::load;
use crate::cli::progress::Bar;
use crate::cli::terminal::print;
use crate::cli::version::commit;
use crate::config::Config;
use crate::model::rig::{Rig, Span};
use crate::tensor::Scheme;

/// Size of the measured copy, if the device has room for eight times as much.
const COPY_BYTES: u64 = 256 << 20;
/// The operations of the peak rate. No kernel uses a matrix unit in f32.
const PEAK: &str = "plain multiply-adds in f32";

struct Measured {
    case: Case,
    span: Span,
    copy_bytes_per_s: f64,
    peak_ops_per_s: f64,
}

impl Measured {
    fn gb_per_s(&self) -> f64 {
        self.case.bytes() as f64 / self.span.seconds / 1e9
    }

    fn gops_per_s(&self) -> Option<f64> {
        self.case.ops().map(|ops| ops as f64 / self.span.seconds / 1e9)
    }

    fn share_of_copy(&self) -> f64 {
        self.gb_per_s() * 1e9 / self.copy_bytes_per_s
    }

    fn share_of_peak(&self) -> Option<f64> {
        self.gops_per_s().map(|rate| rate * 1e9 / self.peak_ops_per_s)
    }

    fn json(&self) -> Value {
        json!({
            "case": self.case.name,
            "seconds": self.span.seconds,
            "repeats": self.span.repeats,
            "bytes": self.case.bytes(),
            "gb_per_s": self.gb_per_s(),
            "share_of_copy": self.share_of_copy(),
            "ops": self.case.ops(),
            "gops_per_s": self.gops_per_s(),
            "share_of_peak": self.share_of_peak(),
        })
    }
}

pub fn kernels(config: &Config, args: &args::Kernels) -> Result<(), Error> {
    // What auto takes depends on a server's limits, which a kernel alone does not have.
    let kv = config.kv.dtype.fixed().unwrap_or_default();
    let scheme = |target: &Target| target.0.unwrap_or(Scheme::Bf16);
    let choices = args.shape.iter().map(|shape| Choice {
        name: shape.name.to_owned(),
        spec: shape.spec(),
        schemes: args.scheme.iter().map(scheme).collect(),
        embedding: scheme(&args.embedding),
        kv,
        precision: config.model.precision,
        tokens: args.tokens.iter().map(|n| *n as usize).collect(),
        depths: args.depth.iter().map(|n| *n as usize).collect(),
    });
    let only = args.only.as_deref().unwrap_or("");
    let mut cases: Vec<Case> = choices.flat_map(|choice| choice.cases()).collect();
    cases.retain(|case| case.name.contains(only));
    if cases.is_empty() {
        return Err(Error::Argument(format!("--only {only:?}: no case has that in its name; -v lists them")));
    }

    let device = load::device(config)?;
    let info = device.info().clone();
    let mut rig = Rig::new(&device)?;
    let runs = args.runs as usize;
    let room = device.machine().heaps.iter().map(|heap| heap.free).max().unwrap_or(0) / 8;
    let copied = COPY_BYTES.min(room).min(info.max_allocation_bytes) & !0xff;
    let no_clock = || Error::Argument(format!("{}: its compute queue has no clock", info.name));
    let copy = rig.copy_bytes_per_s(copied, runs)?.ok_or_else(no_clock)?;
    let peak = rig.ops_per_s(runs)?.ok_or_else(no_clock)?;

    let (mut measured, mut left_out) = (Vec::<Measured>::new(), Vec::new());
    let bar = Bar::of("cases", "measuring", cases.len() as u64);
    let over = args.budget.start();
    for (i, case) in cases.into_iter().enumerate() {
        bar.set(i as u64);
        if let Some(why) = over() {
            left_out.push((case.name, why));
            continue;
        }
        bar.say(format!("measuring {}", case.name));
        tracing::info!("{}", case.name);
        let span = rig.prepare(&case).and_then(|prepared| rig.time(runs, &mut |r, i| prepared.record(r, i)));
        match span {
            Ok(span) => measured.push(Measured {
                case,
                span: span.ok_or_else(no_clock)?,
                copy_bytes_per_s: copy,
                peak_ops_per_s: peak,
            }),
            Err(error) if error.is_out_of_memory() => left_out.push((case.name, error.to_string())),
            Err(error) => return Err(error.into()),
        }
    }
    drop(bar);

    let mut report = json!({
        "benchmark": "kernels",
        "device": info.name,
        "driver": info.driver,
        "commit": commit(),
        "kv": kv.name(),
        "copy": {"bytes": copied, "gb_per_s": copy / 1e9},
        "peak": {"of": PEAK, "gops_per_s": peak / 1e9},
        "cases": measured.iter().map(Measured::json).collect::<Vec<_>>(),
        "left_out": left_out.iter().map(|(case, why)| json!({"case": case, "why": why})).collect::<Vec<_>>(),
    });
    let compared = Comparison::add_to(&mut report, args.compare.as_deref())?;
    if args.json {
        return print(&format!("{report}\n"));
    }
    let heading = format!(
        "{}, {}, commit {}\ncopies {:.1} GB/s, read and written both counted; does {:.1} G operations/s at most, {PEAK}\n",
        info.name,
        info.driver,
        report["commit"].as_str().unwrap_or("unknown"),
        copy / 1e9,
        peak / 1e9,
    );
    print(&(heading + &table(&measured, &left_out, compared.as_ref())))
}

/// The measured cases as a table, and the cases left out.
fn table(measured: &[Measured], left_out: &[(String, String)], compared: Option<&Comparison>) -> String {
    let name_width = measured.iter().map(|m| m.case.name.len()).max().unwrap_or(0).max(4);
    let mut text = format!("{:name_width$}         us     GB/s of copy    Gops/s of peak", "");
    text += &compared.map_or("\n".to_owned(), |c| format!("  times as fast as {}\n", c.with));
    for m in measured {
        let percent = |share: Option<f64>| column(share.map(|share| share * 100.0), 6, 1);
        let rate = column(m.gops_per_s(), 9, 1);
        let (us, gb) = (m.span.seconds * 1e6, m.gb_per_s());
        text +=
            &format!("{:name_width$} {us:10.1} {gb:8.1} {}%", m.case.name, percent(Some(m.share_of_copy())));
        text += &format!(
            " {rate} {}{}",
            percent(m.share_of_peak()),
            if m.case.ops().is_some() { "%" } else { " " }
        );
        match compared {
            Some(compared) => text += &format!(" {}\n", column(compared.speedup(&m.case.name), 8, 3)),
            None => text.push('\n'),
        }
    }
    for (case, why) in left_out {
        text += &format!("{case:name_width$} left out: {why}\n");
    }
    text
}
