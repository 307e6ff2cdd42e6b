//! `unicorn-lab isa`: compiles the kernels for a GPU that need not be present, and predicts the GPU's speed from the
//! result.
//!
//! RADV chooses its GPU by the environment, and a process loads its drivers once. So this command starts itself again
//! for each compiler, in the environment that selects the compiler, and reads the output. The machine's own RADV
//! compiles for a null device. RADV 26 compiles over a shim, if `make setup-devices` has installed it and the current
//! folder is the repository's. Nothing is executed: every figure of speed is a prediction ([`super::judge`]).

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{Read, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use serde_json::json;

use super::args;
use super::judge::predict::{self, BARRIER_US, Chip, DISPATCH_US, Line, Prediction, Question};
use super::judge::{self, Compilation, Judge, JudgeError, Named, Wanted};
use crate::cli::error::Error;
use crate::cli::terminal::print;
use crate::cli::version::commit;
use crate::config::Config;
use crate::model::arch;
use crate::model::spec::Shape;
use crate::tensor::QuantizeMode;

/// Time limit for compiling all kernels. It takes seconds, unless a driver hangs.
const COMPILE_SECONDS: u64 = 300;

const ICD_FOLDERS: [&str; 3] =
    ["/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/etc/vulkan/icd.d"];
const ICD_NAMES: [&str; 3] = ["radeon_icd.json", "radeon_icd.x86_64.json", "radeon_icd.aarch64.json"];
/// The most steps of a prediction whose dispatches are printed one by one. Of more steps, the sums are printed.
const LISTED_STEPS: usize = 2;
/// The place where `make setup-devices` installs Mesa 26, and the script that runs a command with it.
const MESA26: &str = ".cache/devices/mesa26";
const WITH_MESA26: &str = "tools/with_mesa26.sh";

pub fn isa(config: &Config, args: &args::Isa) -> Result<(), Error> {
    if args.compile {
        return compile(&args.device);
    }
    let shapes: Vec<Shape> =
        if args.shape.is_empty() { arch::shapes().collect() } else { args.shape.clone() };
    let chip = Chip::named(&args.device).map_err(Error::Argument)?;
    let mode = match config.model.quantize {
        QuantizeMode::None => QuantizeMode::Int4G128Emb8,
        mode => mode,
    };
    let asked = Question {
        shapes,
        mode,
        // What auto takes depends on a server's limits, which a prediction does not have.
        kv: config.kv.dtype.fixed().unwrap_or_default(),
        precision: config.model.precision,
        depth: args.depth as usize,
        chunk: config.engine.prefill_chunk,
    };
    let recorded = asked.record()?;
    let wanted = if args.used { predict::pipelines(&recorded) } else { judge::pipelines(&asked.shapes) };
    let (judges, left_out) = judges(&chip, &wanted)?;
    if let Some(folder) = &args.assembly {
        write_assembly(folder, &judges)?;
    }
    let of_judge = |judge| recorded.iter().map(|steps| steps.predict(&chip, judge)).collect();
    let predictions: Vec<Vec<_>> = judges.iter().map(of_judge).collect();
    let report = Report { chip, asked, judges, left_out, predictions };
    print(&if args.json { report.json() } else { report.text() })
}

/// Compiles the pipelines that standard input lists, for the process that started this one.
fn compile(device: &str) -> Result<(), Error> {
    let failed = |problem: String| Error::Argument(format!("--compile: {problem}"));
    let wanted: Vec<Named> =
        serde_json::from_reader(std::io::stdin().lock()).map_err(|error| failed(error.to_string()))?;
    let compilation = judge::compile(device, &wanted).map_err(|error| match error {
        JudgeError::Gpu(error) => error.into(),
        other => failed(other.to_string()),
    })?;
    print(&serde_json::to_string(&compilation).expect("texts and numbers"))
}

struct Report {
    chip: Chip,
    asked: Question,
    judges: Vec<Judge>,
    /// Why a compiler is not among the judges.
    left_out: Option<String>,
    /// The predictions of each judge.
    predictions: Vec<Vec<Prediction>>,
}

/// The results of every available compiler, and the reason why Mesa 26 is not available.
fn judges(chip: &Chip, wanted: &[Wanted]) -> Result<(Vec<Judge>, Option<String>), Error> {
    let paths = || ICD_FOLDERS.iter().flat_map(|folder| ICD_NAMES.map(|name| Path::new(folder).join(name)));
    let null_device = "RADV's null device";
    let failed = |problem: String| Error::Tool { tool: null_device.into(), problem };
    let icd = paths().find(|path| path.exists()).ok_or_else(|| {
        failed("the AMD driver's radeon_icd*.json is in none of the loader's folders; install mesa-vulkan-drivers (`make setup`)".into())
    })?;
    let itself = std::env::current_exe().map_err(|e| failed(format!("this program is not found: {e}")))?;
    let command = || {
        let mut command = Command::new(&itself);
        command.env("VK_DRIVER_FILES", &icd).env("VK_ICD_FILENAMES", &icd);
        command.env("RADV_FORCE_FAMILY", chip.name);
        command
    };
    let mut judges = vec![run(null_device, command, chip.name, wanted)?];

    let shim = "RADV 26 over a shim";
    let left_out = match chip.shim {
        None => Some(format!("{shim}: it knows no {}", chip.name)),
        Some(id) => match without_mesa26() {
            Some(reason) => Some(format!("{shim}: {reason}")),
            None => {
                let command = || {
                    let mut command = Command::new(WITH_MESA26);
                    command.env("MESA26_DEVICE", id).arg(&itself);
                    command
                };
                judges.push(run(shim, command, id, wanted)?);
                None
            }
        },
    };
    Ok((judges, left_out))
}

/// The reason why Mesa 26 cannot be used here; `None` if it can.
fn without_mesa26() -> Option<String> {
    if !Path::new(MESA26).is_dir() || !Path::new(WITH_MESA26).exists() {
        return Some(format!("{MESA26} is not in this folder (`make setup-devices`)"));
    }
    match Command::new(WITH_MESA26).arg("true").output() {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Some(format!("{WITH_MESA26} cannot be started: {error}")),
    }
}

/// Starts this program again to compile on a device, once for each part of the pipelines. `command` makes a command
/// without the arguments for that.
fn run(
    compiler: &'static str,
    command: impl Fn() -> Command,
    device: &str,
    wanted: &[Wanted],
) -> Result<Judge, Error> {
    let mut parts = judge::requests(wanted).map(|part| compile_part(compiler, command(), device, &part));
    let mut all = parts.next().expect("every model uses some pipelines")?;
    for next in parts {
        all.add(next?);
    }
    Judge::read(compiler, all, wanted)
        .map_err(|error| Error::Tool { tool: compiler.into(), problem: error.to_string() })
}

fn compile_part(
    compiler: &'static str,
    mut command: Command,
    device: &str,
    part: &[Named],
) -> Result<Compilation, Error> {
    let failed = |problem: String| Error::Tool { tool: compiler.into(), problem };
    command
        .args(["isa", "--device", &device.to_uppercase(), "--compile"])
        // Cached shaders were compiled without statistics.
        .env("MESA_SHADER_CACHE_DISABLE", "true")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|e| failed(format!("cannot be started: {e}")))?;
    let (mut out, mut err) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
    // It reads all of this before it writes, unless it has failed, which its status tells.
    let list = serde_json::to_vec(part).expect("texts and numbers");
    let _ = child.stdin.take().expect("piped").write_all(&list);
    let said = std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = err.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    });
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = sender.send(out.read_to_end(&mut text).map(|_| text));
    });
    let text = receiver.recv_timeout(Duration::from_secs(COMPILE_SECONDS));
    if text.is_err() {
        let _ = child.kill();
    }
    let status = child.wait().map_err(|e| failed(format!("cannot be waited for: {e}")))?;
    let text = text.map_err(|_| failed(format!("not done within {COMPILE_SECONDS} s")))?;
    if !status.success() {
        // Its last line may point to the ones before it.
        let said = said.join().unwrap_or_default();
        let said = if said.trim().is_empty() { "no reason given" } else { said.trim() };
        return Err(failed(format!("{status}: {said}")));
    }
    let text = text.map_err(|e| failed(format!("its output cannot be read: {e}")))?;
    serde_json::from_slice(&text).map_err(|e| failed(format!("its output is not what is expected: {e}")))
}

fn write_assembly(folder: &Path, judges: &[Judge]) -> Result<(), Error> {
    for judge in judges {
        let version: String =
            judge.driver.chars().map(|c| if c.is_alphanumeric() || c == '.' { c } else { '-' }).collect();
        let folder = folder.join(version);
        let failed = |error| Error::File { path: folder.clone(), error };
        std::fs::create_dir_all(&folder).map_err(failed)?;
        for pipeline in &judge.pipelines {
            let file = folder.join(format!("{}.s", pipeline.name().replace(' ', "-")));
            std::fs::write(&file, &pipeline.assembly).map_err(|error| Error::File { path: file, error })?;
        }
    }
    Ok(())
}

impl Report {
    fn json(&self) -> String {
        let Self { chip, asked, judges, left_out, predictions } = self;
        let compilers = judges.iter().zip(predictions).map(|(judge, predictions)| {
        json!({
            "compiler": judge.compiler,
            "device": judge.device,
            "driver": judge.driver,
            "pipelines": judge.pipelines.iter().map(|p| p.json(&asked.shapes, predictions)).collect::<Vec<_>>(),
            "predictions": predictions.iter().map(Prediction::json).collect::<Vec<_>>(),
        })
    });
        let line = json!({
            "chip": chip.json(),
            "commit": commit(),
            "quantize": asked.mode.name(),
            "kv": asked.kv.name(),
            "depth": asked.depth,
            "dispatch_us": DISPATCH_US,
            "barrier_us": BARRIER_US,
            "assumptions": asked.assumptions(chip),
            "left_out": left_out,
            "compilers": compilers.collect::<Vec<_>>(),
        });
        format!("{line}\n")
    }

    fn text(&self) -> String {
        let Self { chip, asked, judges, left_out, predictions } = self;
        let mut text =
            format!("{} ({}), commit {}. Nothing was executed.\n", chip.product, chip.name, commit());
        for (judge, predictions) in judges.iter().zip(predictions) {
            let _ = write!(text, "\n{}: {}, {}\n\n", judge.compiler, judge.device, judge.driver);
            text += &pipeline_table(judge, asked, predictions);
        }
        if let Some(reason) = left_out {
            let _ = write!(text, "\n{reason}\n");
        }
        for (judge, predictions) in judges.iter().zip(predictions) {
            let _ = write!(text, "\npredicted tokens/s, by {} ({})\n\n", judge.compiler, judge.driver);
            let (images, texts): (Vec<_>, Vec<_>) = predictions.iter().partition(|p| p.is_of_image());
            text += &speed_table(&texts);
            for image in images {
                let Prediction { shape, tokens, .. } = image;
                let _ =
                    writeln!(text, "{shape:<16} encodes an image of {tokens} tokens in {:.1} ms", image.ms());
            }
        }
        text += "\nThe predictions rest on this:\n";
        for assumption in asked.assumptions(chip) {
            let _ = writeln!(text, "  {assumption}");
        }
        let _ = write!(
            text,
            "\nAs arithmetic, by {}. bytes = weights x reads + kv + act; memory = bytes / {} GB/s; cyc = cycles of one wave, in \
         all its trips;\nVALU, SALU and LDS ms = waves / {} SIMDs, rounded up, x the unit's cycles / {} GHz; \
         ms = times x the largest of memory, VALU, SALU and LDS, by = that unit.\nlines = lines of memory that loads of keys \
         touch, for each line that has keys; kv MB counts those that are read again;\nK$ KB = what the waves of a workgroup \
         processor load into its scalar cache of 16 KB in a trip, if they share nothing;\nL2 GB/s = at most, if the scalar \
         cache keeps nothing.\n",
            judges[0].compiler,
            chip.gb_per_s,
            chip.simds(),
            chip.clock_ghz,
        );
        for prediction in &predictions[0] {
            text += &arithmetic(prediction);
            text += &match prediction.step_ms.len() {
                ..=LISTED_STEPS => dispatches(prediction),
                _ => sums(prediction),
            };
        }
        text
    }
}

fn pipeline_table(judge: &Judge, asked: &Question, predictions: &[Prediction]) -> String {
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{:<24} {:>5} {:>5} {:>5} {:>7} {:>6} {:>6} | {:>11} {:>3} {:>5} {:>4} {:>4} {:>4} {:>5} {:>4} {:>4} {:>4} {:>4} {:>4} {:>7}",
        "pipeline",
        "VGPRs",
        "SGPRs",
        "spill",
        "scratch",
        "LDS",
        "waves",
        "trips",
        "x",
        "VALU",
        "dual",
        "dot4",
        "wmma",
        "SALU",
        "load",
        "wide",
        "sld",
        "lds",
        "wait",
        "VALU/w"
    );
    for pipeline in &judge.pipelines {
        let waves = pipeline.waves_per_simd();
        let _ = write!(
            text,
            "{:<24} {:>5} {:>5} {:>5} {:>7} {:>6} {:>6} |",
            pipeline.name(),
            pipeline.statistic("VGPRs"),
            pipeline.statistic("SGPRs"),
            pipeline.spills(),
            pipeline.statistic("Scratch size"),
            pipeline.statistic("LDS size"),
            format!("{waves}x{}", pipeline.subgroup_size),
        );
        let Some(body) = &pipeline.body else {
            text += "  no loop\n";
            continue;
        };
        let trips = match pipeline.trips(&asked.shapes, predictions) {
            None => "-".into(),
            Some((least, most)) if least == most => format!("{least:.0}"),
            Some((least, most)) => format!("{least:.0}..{most:.0}"),
        };
        let (trip, unrolled, per_weight) = (&body.trip, body.unrolled, body.valu_per_weight());
        let _ = writeln!(
            text,
            " {trips:>11} {unrolled:>3} {:>5} {:>4} {:>4} {:>4} {:>5} {:>4} {:>4} {:>4} {:>4} {:>4} {:>7}",
            trip.valu,
            trip.dual,
            trip.dot4,
            trip.wmma,
            trip.salu + trip.branches,
            trip.vector_loads,
            trip.wide_loads,
            trip.scalar_loads,
            trip.lds,
            trip.waits,
            per_weight.map_or("-".into(), |n| format!("{n:.2}")),
        );
    }
    text + "waves: on one SIMD at once, x lanes of each. After the bar, one trip of the steady loop: trips = how often, x = \
            trips of the source in one,\nVALU = with both halves of a dual issue, SALU = scalar instructions and branches, load = \
            vector loads, wide = 16 bytes a lane,\nsld = scalar loads, lds = shared memory, VALU/w = VALU for each weight of a lane.\n"
}

fn speed_table(predictions: &[&Prediction]) -> String {
    let columns: Vec<&str> = {
        let mut seen = BTreeSet::new();
        predictions.iter().map(|p| p.what.as_str()).filter(|what| seen.insert(*what)).collect()
    };
    let mut text = format!("{:<14}", "");
    for what in &columns {
        let _ = write!(text, "{what:>14}");
    }
    text += "\n";
    for of_shape in predictions.chunks(columns.len()) {
        let _ = write!(text, "{:<14}", of_shape[0].shape);
        for prediction in of_shape {
            let _ = write!(text, "{:>14.1}", prediction.tokens_per_s());
        }
        text += "\n";
    }
    text
}

fn arithmetic(p: &Prediction) -> String {
    format!(
        "\n{}, {}: {} tokens in {:.2} ms, predicted {:.1} tokens/s; {:.3} GB, of which {:.3} of weights and {:.3} of keys and \
         values\n",
        p.shape,
        p.what,
        p.tokens,
        p.ms(),
        p.tokens_per_s(),
        p.bytes() as f64 / 1e9,
        p.weight_bytes() as f64 / 1e9,
        p.kv_bytes() as f64 / 1e9,
    )
}

/// What the dispatches of a prediction with many steps take together, the longest first.
fn sums(p: &Prediction) -> String {
    /// All dispatches of one name and pipeline: their number, and milliseconds by unit and in all.
    struct Sum<'a> {
        line: &'a Line,
        times: u64,
        units: [(&'static str, f64); 4],
        ms: f64,
    }
    let mut sums: Vec<Sum<'_>> = Vec::new();
    for line in &p.lines {
        let units = line.limits().map(|(unit, ms)| (unit, line.times as f64 * ms));
        match sums.iter_mut().find(|sum| (sum.line.what, &sum.line.pipeline) == (line.what, &line.pipeline)) {
            None => sums.push(Sum { line, times: line.times, units, ms: line.ms() }),
            Some(sum) => {
                sum.times += line.times;
                sum.ms += line.ms();
                sum.units.iter_mut().zip(units).for_each(|((_, sum), (_, ms))| *sum += ms);
            }
        }
    }
    sums.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    let steps = p.step_ms.len();
    let mut text = format!(
        "  {steps} steps: the first {:.1} ms, the middle one {:.1} ms, the last {:.1} ms; {} dispatches and {} barriers: {:.1} ms\n",
        p.step_ms[0],
        p.step_ms[steps / 2],
        p.step_ms[steps - 1],
        p.dispatches,
        p.barriers,
        p.overhead_ms()
    );
    let _ = write!(text, "  {:<27} {:>5} {:<24}", "all steps together", "times", "pipeline");
    let units =
        sums.first().map_or(Vec::new(), |sum| sum.units.iter().rev().map(|(unit, _)| *unit).collect());
    units.iter().for_each(|unit| text += &format!(" {:>9}", format!("{unit} ms")));
    let _ = writeln!(text, " {:>9} {:>6}", "ms", "share");
    // Kernels below a thousandth are left to the rest.
    let (sums, rest): (Vec<_>, Vec<_>) = sums.into_iter().partition(|sum| sum.ms >= p.ms() / 1e3);
    for Sum { line, times, units, ms } in sums {
        let _ = write!(text, "  {:<27} {times:>5} {:<24}", line.what, line.pipeline);
        units.iter().rev().for_each(|(_, ms)| text += &format!(" {ms:>9.1}"));
        let _ = writeln!(text, " {ms:>9.1} {:>4.1} %", 100.0 * ms / p.ms());
    }
    let _ = writeln!(text, "  the rest: {:.1} ms", rest.iter().map(|sum| sum.ms).sum::<f64>());
    text
}

/// The dispatches of a prediction with few steps.
fn dispatches(p: &Prediction) -> String {
    let mut text = String::new();
    let _ = writeln!(
        text,
        "  {:<22} {:>5} {:<20} {:>7} {:>7} {:>9} {:>9} {:>11} {:>5} {:>9} {:>5} {:>9} {:>6} {:>8} {:>9} {:>9} {:>9} {:>9} {:>9} by",
        "",
        "times",
        "pipeline",
        "waves",
        "trips",
        "VALU cyc",
        "SALU cyc",
        "weights MB",
        "reads",
        "kv MB",
        "lines",
        "act MB",
        "K$ KB",
        "L2 GB/s",
        "memory ms",
        "VALU ms",
        "SALU ms",
        "LDS ms",
        "ms"
    );
    for line in &p.lines {
        let mb = |bytes: u64| bytes as f64 / 1e6;
        let _ = writeln!(
            text,
            "  {:<22} {:>5} {:<20} {:>7} {:>7.1} {:>9.0} {:>9.0} {:>11.3} {:>5} {:>9.3} {:>5.1} {:>9.3} {:>6} {:>8.0} {:>9.4} {:>9.4} \
             {:>9.4} {:>9.4} {:>9.3} {}",
            line.what,
            line.times,
            line.pipeline,
            line.waves,
            line.trips,
            line.wave_cycles.valu,
            line.wave_cycles.salu,
            mb(line.weight_bytes),
            line.weight_reads,
            mb(line.kv_bytes),
            line.keys.lines,
            mb(line.activation_bytes),
            line.scalar_set_bytes / 1000,
            line.times as f64 * line.l2_bytes as f64 / (line.ms() * 1e6).max(f64::MIN_POSITIVE),
            line.memory_ms,
            line.unit_ms.valu,
            line.unit_ms.salu,
            line.unit_ms.lds,
            line.ms(),
            line.bound(),
        );
    }
    let _ = writeln!(
        text,
        "  {} dispatches x {DISPATCH_US} us + {} barriers x {BARRIER_US} us = {:.3} ms",
        p.dispatches,
        p.barriers,
        p.overhead_ms()
    );
    text
}
