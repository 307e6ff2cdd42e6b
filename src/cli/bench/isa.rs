//! `unicorn bench isa`: the compilers of a GPU that is not here judge the kernels, and what they make of them predicts how
//! fast it would be.
//!
//! RADV chooses its GPU by the environment, and a process loads its drivers once: so this runs itself again for each
//! compiler, with the environment that shows it, and reads what that prints. The machine's own RADV compiles for a null
//! device; RADV 26 over a shim, where `make setup-devices` has put it and this runs in the repository's folder. Nothing is
//! executed: every figure of speed is a prediction ([`super::predict`]).

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::predict::{BARRIER_US, Chip, Compiled, DISPATCH_US, Prediction, pipeline_name};
use super::report::commit;
use crate::cli::args;
use crate::cli::error::Error;
use crate::cli::generate::print;
use crate::config::Config;
use crate::gpu::compiler::Compiler;
use crate::gpu::isa::{Counts, Program, real_waves};
use crate::gpu::{DeviceInfo, Shader};
use crate::kernels::all_pipelines;
use crate::kernels::cost::{self, Body, Dispatch};
use crate::model::memory::Schemes;
use crate::model::shapes::{SHAPES, Shape};
use crate::model::work;
use crate::tensor::{KvDtype, QuantizeMode, Scheme};

/// Sequences that decode together.
const BATCHES: [usize; 5] = [1, 8, 16, 32, 64];
/// Tokens of the prompt.
const PROMPT: usize = 512;
/// Compiling everything takes seconds; a driver that hangs is not waited for.
const COMPILE_SECONDS: u64 = 300;

const ICD_FOLDERS: [&str; 3] =
    ["/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/etc/vulkan/icd.d"];
const ICD_NAMES: [&str; 3] = ["radeon_icd.json", "radeon_icd.x86_64.json", "radeon_icd.aarch64.json"];
/// Where `make setup-devices` puts Mesa 26, and what runs a command in it.
const MESA26: &str = ".cache/devices/mesa26";
const WITH_MESA26: &str = "tools/with_mesa26.sh";

/// What the process prints that compiles.
#[derive(Serialize, Deserialize)]
struct Output {
    device: String,
    driver: String,
    pipelines: Vec<Text>,
}

/// One pipeline as the driver tells of it.
#[derive(Serialize, Deserialize)]
struct Text {
    shader: String,
    constants: Vec<u32>,
    subgroup_size: u32,
    statistics: Vec<(String, u64)>,
    assembly: String,
}

/// A compiler, and what it made of everything.
struct Judge {
    /// e.g. `RADV's null device`
    compiler: &'static str,
    device: String,
    driver: String,
    pipelines: Vec<Pipeline>,
}

struct Pipeline {
    shader: &'static Shader,
    constants: Vec<u32>,
    subgroup_size: u32,
    statistics: Vec<(String, u64)>,
    program: Program,
    body: Option<Body>,
    assembly: String,
}

pub fn isa(config: &Config, args: &args::BenchIsa) -> Result<(), Error> {
    let name = config.hardware.device.as_deref().unwrap_or("phoenix");
    if args.compile {
        return compile(name);
    }
    let chip = Chip::named(name).map_err(Error::Argument)?;
    let (judges, left_out) = judges(&chip)?;
    if let Some(folder) = &args.assembly {
        write_assembly(folder, &judges)?;
    }
    let mode = match config.model.quantize {
        QuantizeMode::None => QuantizeMode::Int4G128Emb8,
        mode => mode,
    };
    let shapes = args.shape.map_or(SHAPES.to_vec(), |shape| vec![shape]);
    let asked = Asked {
        shapes,
        mode,
        kv: config.kv.dtype,
        depth: args.depth as usize,
        chunk: config.engine.prefill_chunk,
    };
    let predictions: Vec<_> = judges.iter().map(|judge| asked.predict(&chip, judge)).collect();
    print(&match args.json {
        true => as_json(&chip, &asked, &judges, &left_out, &predictions),
        false => as_text(&chip, &asked, &judges, &left_out, &predictions),
    })
}

/// Every pipeline of every size, once.
fn pipelines() -> Vec<(&'static Shader, Vec<u32>)> {
    let mut all: Vec<(&'static Shader, Vec<u32>)> = Vec::new();
    for shape in SHAPES {
        let group = shape.num_attention_heads / shape.num_key_value_heads;
        for (shader, constants) in all_pipelines(group as u32, shape.head_dim as u32) {
            if !all.iter().any(|(s, c)| s.name == shader.name && *c == constants) {
                all.push((shader, constants));
            }
        }
    }
    all.sort_by(|(a, x), (b, y)| (a.name, x).cmp(&(b.name, y)));
    all
}

/// Compiles on the device that the environment shows, whose name holds `part`.
fn compile(part: &str) -> Result<(), Error> {
    let compiler = Compiler::open(part)?;
    let mut texts = Vec::new();
    for (shader, constants) in pipelines() {
        let compiled = compiler.compile(shader, &constants)?;
        texts.push(Text {
            shader: shader.name.to_owned(),
            constants,
            subgroup_size: compiled.subgroup_size,
            statistics: compiled.statistics,
            assembly: compiled.assembly,
        });
    }
    let DeviceInfo { name: device_name, driver, .. } = &compiler.info;
    let output = Output { device: device_name.clone(), driver: driver.clone(), pipelines: texts };
    print(&serde_json::to_string(&output).expect("texts and numbers"))
}

/// What each compiler that is here made of everything; and why one that is not is not.
fn judges(chip: &Chip) -> Result<(Vec<Judge>, Option<String>), Error> {
    let paths = || ICD_FOLDERS.iter().flat_map(|folder| ICD_NAMES.map(|name| Path::new(folder).join(name)));
    let null_device = "RADV's null device";
    let icd = paths().find(|path| path.exists()).ok_or_else(|| Error::Compiler {
        compiler: null_device,
        problem: "the AMD driver's radeon_icd*.json is in none of the loader's folders; install mesa-vulkan-drivers (`make setup`)".into(),
    })?;
    let itself = std::env::current_exe().map_err(|e| Error::Compiler {
        compiler: null_device,
        problem: format!("this program is not found: {e}"),
    })?;
    let mut command = Command::new(&itself);
    command
        .env("VK_DRIVER_FILES", &icd)
        .env("VK_ICD_FILENAMES", &icd)
        .env("RADV_FORCE_FAMILY", chip.name)
        .args(["--device", &chip.name.to_uppercase()]);
    let mut judges = vec![judge(null_device, command)?];

    let shim = "RADV 26 over a shim";
    let left_out = match chip.shim {
        None => Some(format!("{shim}: it knows no {}", chip.name)),
        Some(id) => match without_mesa26() {
            Some(reason) => Some(format!("{shim}: {reason}")),
            None => {
                let mut command = Command::new(WITH_MESA26);
                command.env("MESA26_DEVICE", id).arg(&itself).args(["--device", &id.to_uppercase()]);
                judges.push(judge(shim, command)?);
                None
            }
        },
    };
    Ok((judges, left_out))
}

/// Why nothing runs in Mesa 26 here; none if it does.
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

/// Runs this program once more as the process that compiles; `command` is all but what tells it so.
fn judge(compiler: &'static str, mut command: Command) -> Result<Judge, Error> {
    let failed = |problem: String| Error::Compiler { compiler, problem };
    command
        .args(["bench", "isa", "--compile"])
        // What is on the disk was compiled without its statistics.
        .env("MESA_SHADER_CACHE_DISABLE", "true")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|e| failed(format!("cannot be started: {e}")))?;
    let (mut out, mut err) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
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
        let said = said.join().unwrap_or_default();
        let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no reason given");
        return Err(failed(format!("{status}: {last}")));
    }
    let text = text.map_err(|e| failed(format!("its output cannot be read: {e}")))?;
    let output: Output = serde_json::from_slice(&text)
        .map_err(|e| failed(format!("its output is not what is expected: {e}")))?;
    let all = pipelines();
    let analysed = output.pipelines.into_iter().zip(all).map(|(text, (shader, constants))| {
        if text.shader != shader.name || text.constants != constants {
            return Err(failed(format!("compiled {}, where {} was expected", text.shader, shader.name)));
        }
        let program = Program::parse(&text.assembly).map_err(|e| failed(format!("{}: {e}", shader.name)))?;
        let body = cost::body(shader, &constants, &program, text.subgroup_size);
        let Text { subgroup_size, statistics, assembly, .. } = text;
        Ok(Pipeline { shader, constants, subgroup_size, statistics, program, body, assembly })
    });
    let pipelines = analysed.collect::<Result<_, _>>()?;
    Ok(Judge { compiler, device: output.device, driver: output.driver, pipelines })
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

impl Pipeline {
    fn name(&self) -> String {
        pipeline_name(self.shader.name, &self.constants)
    }

    /// 0 where the driver does not say.
    fn statistic(&self, name: &str) -> u64 {
        self.statistics.iter().find(|(n, _)| n == name).map_or(0, |(_, value)| *value)
    }

    /// As the driver counts them: in waves of 32 lanes.
    fn wave32_per_simd(&self) -> u64 {
        self.statistic("Subgroups per SIMD")
    }

    fn spills(&self) -> u64 {
        self.statistic("Spilled VGPRs") + self.statistic("Spilled SGPRs")
    }

    /// Trips of the steady loop, fewest and most, in all that was predicted of the sizes.
    fn trips(&self, shapes: &[Shape], predictions: &[Prediction]) -> Option<(f64, f64)> {
        let columns = shapes
            .iter()
            .flat_map(|s| [s.hidden_size, s.num_attention_heads * s.head_dim, s.intermediate_size]);
        let products = columns.filter_map(|cols| Some(cost::product_trips(self.shader, cols)? as f64));
        let name = self.name();
        let others = predictions
            .iter()
            .flat_map(|p| &p.lines)
            .filter(|line| line.pipeline == name)
            .map(|line| line.trips);
        let all: Vec<f64> = products.chain(others).collect();
        let (least, most) = (all.iter().copied().reduce(f64::min)?, all.iter().copied().reduce(f64::max)?);
        self.body.is_some().then_some((least, most))
    }

    fn json(&self, shapes: &[Shape], predictions: &[Prediction]) -> Value {
        json!({
            "name": self.name(),
            "shader": self.shader.name,
            "constants": self.constants,
            "wave_size": self.subgroup_size,
            "vgprs": self.statistic("VGPRs"),
            "sgprs": self.statistic("SGPRs"),
            "spilled_vgprs": self.statistic("Spilled VGPRs"),
            "spilled_sgprs": self.statistic("Spilled SGPRs"),
            "scratch_bytes": self.statistic("Scratch size"),
            "lds_bytes": self.statistic("LDS size"),
            "code_bytes": self.statistic("Code size"),
            "waves_per_simd": real_waves(self.wave32_per_simd(), self.subgroup_size),
            "wave32_per_simd": self.wave32_per_simd(),
            "loops": self.program.loops.len(),
            "total": counts_json(&self.program.total),
            "steady": self.body.map(|body| {
                let (least, most) = self.trips(shapes, predictions).unzip();
                json!({
                    "trip": counts_json(&body.trip),
                    "trips_unrolled": body.unrolled,
                    "trips_least": least,
                    "trips_most": most,
                    "weights_per_trip": body.weights * body.unrolled,
                    "valu_per_weight": body.valu_per_weight(),
                    "once": counts_json(&body.once),
                })
            }),
            "statistics": self.statistics.iter().cloned().collect::<std::collections::BTreeMap<_, _>>(),
        })
    }
}

fn counts_json(c: &Counts) -> Value {
    json!({
        "instructions": c.instructions,
        "valu": c.valu,
        "dual": c.dual,
        "dot4": c.dot4,
        "wmma": c.wmma,
        "valu_cycles": c.cycles,
        "macs": c.macs,
        "vector_loads": c.vector_loads,
        "wide_loads": c.wide_loads,
        "vector_stores": c.vector_stores,
        "scalar_loads": c.scalar_loads,
        "lds": c.lds,
        "waits": c.waits,
    })
}

/// What is predicted.
struct Asked {
    shapes: Vec<Shape>,
    mode: QuantizeMode,
    kv: KvDtype,
    depth: usize,
    /// Tokens of a prompt in one step, as configured.
    chunk: usize,
}

impl Asked {
    fn predict(&self, chip: &Chip, judge: &Judge) -> Vec<Prediction> {
        let find = |dispatch: &Dispatch| {
            let Dispatch { shader, constants, .. } = dispatch;
            let is_it = |p: &&Pipeline| p.shader.name == shader.name && p.constants == *constants;
            let Some(found) = judge.pipelines.iter().find(is_it) else {
                panic!("{} {constants:?} is dispatched, and not among all pipelines", shader.name)
            };
            Compiled {
                subgroup_size: found.subgroup_size,
                total: &found.program.total,
                body: found.body.as_ref(),
            }
        };
        let mut all = Vec::new();
        for shape in &self.shapes {
            let config = shape.config();
            let projections = self.mode.projections().unwrap_or(Scheme::Bf16);
            let embedding = self.mode.embedding().unwrap_or(Scheme::Bf16);
            let schemes = Schemes::uniform(&config, projections, projections, embedding);
            let most = work::batch_tokens(&config, &schemes, self.kv, self.chunk);
            let depth = self.depth.min(config.max_position_embeddings - 1);
            for batch in BATCHES {
                let sequences = vec![depth..depth + 1; batch];
                let step = work::step(&config, &schemes, self.kv, &sequences, batch, most);
                let what = format!("batch {batch}");
                all.push(Prediction::new(chip, shape.name, what, batch as u64, &[step], &find));
            }
            let steps = work::prompt(&config, &schemes, self.kv, PROMPT, most);
            let what = format!("prefill {PROMPT}");
            all.push(Prediction::new(chip, shape.name, what, PROMPT as u64, &steps, &find));
        }
        all
    }

    /// What the figures rest on, in a sentence each.
    fn assumptions(&self, chip: &Chip) -> Vec<String> {
        vec![
            format!("{}: {}", chip.product, chip.source),
            format!(
                "weights {}, keys and values {}; batches decode with {} tokens each in the cache, a prompt is read in steps of \
                 at most {} tokens",
                self.mode, self.kv, self.depth, self.chunk
            ),
            format!(
                "weights come from memory again for each tile of tokens that the grid walks over (weights x reads), unless a \
                 matrix fits in {} MiB of cache; activations count once",
                chip.cache_bytes >> 20
            ),
            format!(
                "a vector instruction takes a SIMD one cycle for 32 lanes, integer products 4, 64-bit shifts 2, a matrix product \
                 32; {} SIMDs at {} GHz share the waves evenly",
                chip.simds(),
                chip.clock_ghz
            ),
            format!(
                "each dispatch costs {DISPATCH_US} us and each barrier {BARRIER_US} us beside its work: assumed, not measured"
            ),
            "greedy draws; latency, cache bandwidth, scalar and shared-memory units are left out".into(),
        ]
    }
}

fn as_json(
    chip: &Chip,
    asked: &Asked,
    judges: &[Judge],
    left_out: &Option<String>,
    predictions: &[Vec<Prediction>],
) -> String {
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

fn as_text(
    chip: &Chip,
    asked: &Asked,
    judges: &[Judge],
    left_out: &Option<String>,
    predictions: &[Vec<Prediction>],
) -> String {
    let mut text = format!("{} ({}), commit {}. Nothing was executed.\n", chip.product, chip.name, commit());
    for (judge, predictions) in judges.iter().zip(predictions) {
        let _ = write!(text, "\n{}: {}, {}\n\n", judge.compiler, judge.device, judge.driver);
        text += &pipeline_table(judge, asked, predictions);
    }
    if let Some(reason) = left_out {
        let _ = write!(text, "\n{reason}\n");
    }
    for (judge, predictions) in judges.iter().zip(predictions) {
        let _ = write!(text, "\npredicted tokens/s, by {} ({})\n\n", judge.compiler, judge.driver);
        text += &speed_table(predictions);
    }
    text += "\nThe predictions rest on this:\n";
    for assumption in asked.assumptions(chip) {
        let _ = writeln!(text, "  {assumption}");
    }
    let _ = write!(
        text,
        "\nAs arithmetic, by {}. bytes = weights x reads + kv + act; memory = bytes / {} GB/s; cycles = those of one wave, in \
         all its trips;\nALU = waves / {} SIMDs, rounded up, x cycles / {} GHz; ms = times x the larger of memory and ALU.\n",
        judges[0].compiler,
        chip.gb_per_s,
        chip.simds(),
        chip.clock_ghz,
    );
    for prediction in &predictions[0] {
        text += &arithmetic(prediction);
    }
    text
}

fn pipeline_table(judge: &Judge, asked: &Asked, predictions: &[Prediction]) -> String {
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{:<24} {:>5} {:>5} {:>5} {:>7} {:>6} {:>6} | {:>11} {:>3} {:>5} {:>4} {:>4} {:>4} {:>4} {:>4} {:>4} {:>4} {:>4} {:>7}",
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
        "load",
        "wide",
        "sld",
        "lds",
        "wait",
        "VALU/w"
    );
    for pipeline in &judge.pipelines {
        let waves = real_waves(pipeline.wave32_per_simd(), pipeline.subgroup_size);
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
        let Some(Body { trip, unrolled, .. }) = &pipeline.body else {
            text += "  no loop\n";
            continue;
        };
        let trips = match pipeline.trips(&asked.shapes, predictions) {
            None => "-".into(),
            Some((least, most)) if least == most => format!("{least:.0}"),
            Some((least, most)) => format!("{least:.0}..{most:.0}"),
        };
        let per_weight = pipeline.body.and_then(|body| body.valu_per_weight());
        let _ = writeln!(
            text,
            " {trips:>11} {unrolled:>3} {:>5} {:>4} {:>4} {:>4} {:>4} {:>4} {:>4} {:>4} {:>4} {:>7}",
            trip.valu,
            trip.dual,
            trip.dot4,
            trip.wmma,
            trip.vector_loads,
            trip.wide_loads,
            trip.scalar_loads,
            trip.lds,
            trip.waits,
            per_weight.map_or("-".into(), |n| format!("{n:.2}")),
        );
    }
    text + "waves: on one SIMD at once, x lanes of each. Behind the bar, one trip of the steady loop: trips = how often, x = \
            trips of the source in one,\nVALU = with both halves of a dual issue, load = vector loads, wide = 16 bytes a lane, sld \
            = scalar loads, lds = shared memory,\nVALU/w = VALU for each weight of a lane.\n"
}

fn speed_table(predictions: &[Prediction]) -> String {
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
    let mut text = format!(
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
    );
    let _ = writeln!(
        text,
        "  {:<22} {:>5} {:<20} {:>7} {:>7} {:>9} {:>11} {:>5} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "",
        "times",
        "pipeline",
        "waves",
        "trips",
        "cycles",
        "weights MB",
        "reads",
        "kv MB",
        "act MB",
        "memory ms",
        "ALU ms",
        "ms"
    );
    for line in &p.lines {
        let mb = |bytes: u64| bytes as f64 / 1e6;
        let _ = writeln!(
            text,
            "  {:<22} {:>5} {:<20} {:>7} {:>7.1} {:>9.0} {:>11.3} {:>5} {:>9.3} {:>9.3} {:>9.4} {:>9.4} {:>9.3}",
            line.what,
            line.times,
            line.pipeline,
            line.waves,
            line.trips,
            line.wave_cycles,
            mb(line.weight_bytes),
            line.weight_reads,
            mb(line.kv_bytes),
            mb(line.activation_bytes),
            line.memory_ms,
            line.alu_ms,
            line.ms(),
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
