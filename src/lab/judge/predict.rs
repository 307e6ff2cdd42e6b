//! Predicts the time of a step on a GPU that is not present, from the compiled kernels and the dispatches that
//! [`super::work`] records. No figure is measured.
//!
//! A dispatch takes as long as its busiest unit: memory for its bytes, or the vector units, the scalar units or the
//! shared memory for its instructions. Dispatches come one after the other. The prediction leaves out latency that too
//! few waves cannot hide, and the bandwidth of the caches.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_json::{Value, json};

use super::work::{PaperModel, StepDispatches, Types, tower_request};
use super::{Judge, Pipeline, Wanted, each_once, pipeline_name};
use crate::cli::error::Error;
use crate::lab::assembly::Counts;
use crate::lab::cost::{self, Body, Dispatch, Drawn, KEYS, Keys};
use crate::model::memory::DEFAULT_BLOCK_SIZE;
use crate::model::spec::Shape;
use crate::tensor::{KvDtype, Precision, QuantizeMode, Scheme};

/// Numbers of sequences that decode together.
const BATCHES: [usize; 5] = [1, 8, 16, 32, 64];
/// Numbers of tokens of the prompts. The longer one shows what attention to a growing cache costs.
const PROMPTS: [usize; 2] = [512, 8192];

/// The first word of the predictions of encoding an image. Their tokens are those of the image.
const IMAGE: &str = "image";

/// Assumed overhead of each dispatch, and of each barrier, which drains and refills the GPU. Neither was measured with
/// these kernels.
pub const DISPATCH_US: f64 = 2.0;
pub const BARRIER_US: f64 = 5.0;

/// The properties of a GPU that predictions use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Chip {
    /// The GPU's name for `--device` and RADV.
    pub name: &'static str,
    pub product: &'static str,
    pub compute_units: u64,
    pub clock_ghz: f64,
    /// The memory bandwidth that programs achieve.
    pub gb_per_s: f64,
    /// Size of the second-level cache. Weights that fit into it are read from memory once in a dispatch.
    pub cache_bytes: u64,
    /// The name of the GPU, or of its nearest relative, in Mesa's shim for RADV 26.
    pub shim: Option<&'static str>,
    pub source: &'static str,
}

pub const CHIPS: [Chip; 3] = [
    Chip {
        name: "phoenix",
        product: "Radeon 780M",
        compute_units: 12,
        clock_ghz: 2.7,
        gb_per_s: 73.0,
        cache_bytes: 2 << 20,
        shim: Some("phoenix"),
        source: "AMD: 12 CUs, 2.7 GHz; clpeak on DDR5-5600, 89.6 GB/s on paper: 73 GB/s",
    },
    Chip {
        name: "gfx1150",
        product: "Radeon 890M",
        compute_units: 16,
        clock_ghz: 2.9,
        gb_per_s: 98.0,
        cache_bytes: 2 << 20,
        shim: Some("strix1"),
        source: "AMD: 16 CUs, 2.9 GHz; LPDDR5X-7500, 120 GB/s on paper, taken at the 780M's share of it: 98 GB/s",
    },
    Chip {
        name: "gfx1151",
        product: "Radeon 8060S",
        compute_units: 40,
        clock_ghz: 2.9,
        gb_per_s: 215.0,
        cache_bytes: 2 << 20,
        shim: None,
        source: "AMD: 40 CUs, 2.9 GHz; public reports on LPDDR5X-8000, 256 GB/s on paper: 215 GB/s; its 32 MB of memory-side \
                 cache are not counted",
    },
];

impl Chip {
    pub fn named(name: &str) -> Result<Chip, String> {
        CHIPS.into_iter().find(|chip| chip.name == name).ok_or_else(|| {
            let names: Vec<_> = CHIPS.iter().map(|chip| chip.name).collect();
            format!(
                "there is no compiler for a GPU called {name:?} here; expected one of {}",
                names.join(", ")
            )
        })
    }

    /// The number of SIMDs: two for each compute unit.
    pub fn simds(&self) -> u64 {
        2 * self.compute_units
    }

    pub fn json(&self) -> Value {
        json!({
            "name": self.name,
            "product": self.product,
            "compute_units": self.compute_units,
            "simds": self.simds(),
            "clock_ghz": self.clock_ghz,
            "gb_per_s": self.gb_per_s,
            "cache_bytes": self.cache_bytes,
            "source": self.source,
        })
    }
}

/// The properties of a compiled pipeline that predictions use.
#[derive(Debug, Clone, Copy)]
pub struct Compiled<'a> {
    pub subgroup_size: u32,
    /// Number of waves that a SIMD holds at the same time.
    pub waves_per_simd: u64,
    pub total: &'a Counts,
    /// The pipeline's steady loop; `None` if it has no loop.
    pub body: Option<&'a Body>,
}

impl Compiled<'_> {
    /// A count of one wave, with `trips` trips of the steady loop.
    fn of(&self, trips: f64, count: fn(&Counts) -> u64) -> f64 {
        match self.body {
            Some(body) => count(&body.once) as f64 + trips / body.unrolled as f64 * count(&body.trip) as f64,
            None => count(self.total) as f64,
        }
    }

    /// Cycles for which one wave occupies each unit of its SIMD, with `trips` trips of the steady loop.
    fn wave_cycles(&self, trips: f64) -> Units<f64> {
        let of = |count| self.of(trips, count);
        let halves = f64::from(self.subgroup_size) / 32.0;
        Units {
            valu: halves * of(|counts| counts.cycles),
            salu: of(|counts| counts.salu + counts.branches),
            // The two SIMDs of a compute unit take turns at its shared memory.
            lds: 2.0 * halves * of(|counts| counts.lds_cycles),
        }
    }
}

/// A figure for each unit of a SIMD that can limit a dispatch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Units<T> {
    pub valu: T,
    pub salu: T,
    pub lds: T,
}

impl Units<f64> {
    fn map(self, f: impl Fn(f64) -> f64) -> Self {
        Self { valu: f(self.valu), salu: f(self.salu), lds: f(self.lds) }
    }
}

/// Bytes of a line of memory in the caches.
const LINE_BYTES: f64 = 128.0;

/// How the loads of keys meet the lines of memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct KeyLines {
    /// Bytes of the keys.
    pub bytes: u64,
    /// Lines that the rounds of loads touch, for each line that has keys. More than 1: a round uses a part of each line
    /// that it touches, and a later round needs the line again.
    pub lines: f64,
    /// Bytes that are read from memory again, because their line left the second-level cache between two rounds.
    pub repeated_bytes: u64,
}

impl KeyLines {
    /// `workgroups` workgroups run at the same time. If the rows of their keys are larger than the cache, the excess is
    /// the share of the lines that a later round no longer finds there.
    fn new(chip: &Chip, keys: Keys, rounds: u64, workgroups: u64) -> KeyLines {
        let Keys { bytes, row_bytes, unit_bytes } = keys;
        if bytes == 0 {
            return KeyLines { lines: 1.0, ..KeyLines::default() };
        }
        // The lanes of a block's tokens read neighbouring units. A round may read only a part of each.
        let of_round = (row_bytes as f64 / rounds.max(1) as f64).min(unit_bytes as f64);
        let neighbours = DEFAULT_BLOCK_SIZE as f64 * unit_bytes as f64;
        let lines = (LINE_BYTES / neighbours).max(1.0) * unit_bytes as f64 / of_round;
        let set = (workgroups * KEYS as u64 * row_bytes) as f64;
        let lost = (1.0 - chip.cache_bytes as f64 / set).max(0.0);
        KeyLines { bytes, lines, repeated_bytes: (bytes as f64 * (lines - 1.0) * lost) as u64 }
    }
}

/// Dispatches of one kind and of the same cost, with predicted times.
#[derive(Debug, Clone)]
pub struct Line {
    pub what: &'static str,
    pub pipeline: String,
    pub times: u64,
    pub workgroups: u64,
    pub waves: u64,
    pub trips: f64,
    pub wave_cycles: Units<f64>,
    /// Bytes of one dispatch: weights, as often as they are read from memory; keys and values; activations.
    pub weight_bytes: u64,
    pub weight_reads: u64,
    pub kv_bytes: u64,
    pub keys: KeyLines,
    pub activation_bytes: u64,
    /// What the waves of a workgroup processor load into its scalar cache in one trip, if they share nothing, and the
    /// most that the dispatch reads from the second-level cache.
    pub scalar_set_bytes: u64,
    pub l2_bytes: u64,
    /// Milliseconds of one dispatch, by memory and by each unit.
    pub memory_ms: f64,
    pub unit_ms: Units<f64>,
}

impl Line {
    fn new(chip: &Chip, work: &StepDispatches, compiled: Compiled<'_>) -> Line {
        let Dispatch {
            shader,
            workgroups,
            trips,
            weight_bytes,
            weight_passes,
            kv_bytes,
            keys,
            activation_bytes,
            ..
        } = work.dispatch;
        let waves =
            workgroups * u64::from(shader.workgroup.iter().product::<u32>().div_ceil(compiled.subgroup_size));
        let weight_reads = if weight_bytes > chip.cache_bytes { weight_passes } else { 1 };
        let wave_cycles = compiled.wave_cycles(trips);
        let resident = compiled.waves_per_simd.min(waves.div_ceil(chip.simds()));
        let resident_workgroups = (resident * chip.simds() * workgroups / waves.max(1)).min(workgroups);
        let keys =
            KeyLines::new(chip, keys, compiled.body.map_or(0, |body| body.key_rounds), resident_workgroups);
        let scalar_bytes = compiled.of(trips, |counts| counts.scalar_bytes);
        let read_bytes = weight_bytes * weight_passes + kv_bytes + activation_bytes;
        let mut line = Line {
            what: work.what,
            pipeline: pipeline_name(shader.name, &work.dispatch.constants),
            times: work.times,
            workgroups,
            waves,
            trips,
            wave_cycles,
            weight_bytes,
            weight_reads,
            kv_bytes: kv_bytes + keys.repeated_bytes,
            keys,
            activation_bytes,
            // Four SIMDs share a scalar cache.
            scalar_set_bytes: 4 * resident * compiled.body.map_or(0, |body| body.trip.scalar_bytes),
            l2_bytes: (waves as f64 * scalar_bytes) as u64
                + read_bytes
                + (keys.bytes as f64 * (keys.lines - 1.0)) as u64,
            memory_ms: 0.0,
            unit_ms: wave_cycles
                .map(|cycles| waves.div_ceil(chip.simds()) as f64 * cycles / (chip.clock_ghz * 1e6)),
        };
        line.memory_ms = line.bytes() as f64 / (chip.gb_per_s * 1e6);
        line
    }

    /// Bytes of one dispatch.
    pub fn bytes(&self) -> u64 {
        self.weight_bytes * self.weight_reads + self.kv_bytes + self.activation_bytes
    }

    /// Milliseconds of all dispatches.
    pub fn ms(&self) -> f64 {
        self.times as f64 * self.limits().map(|(_, ms)| ms).into_iter().fold(0.0, f64::max)
    }

    /// The name of the unit that takes the longest.
    pub fn bound(&self) -> &'static str {
        self.limits().into_iter().max_by(|(_, a), (_, b)| a.total_cmp(b)).expect("four units").0
    }

    /// Milliseconds of one dispatch by unit. Of equal ones, the last one is the bound.
    pub fn limits(&self) -> [(&'static str, f64); 4] {
        let Units { valu, salu, lds } = self.unit_ms;
        [("lds", lds), ("SALU", salu), ("VALU", valu), ("memory", self.memory_ms)]
    }

    fn json(&self) -> Value {
        json!({
            "what": self.what,
            "pipeline": self.pipeline,
            "times": self.times,
            "workgroups": self.workgroups,
            "waves": self.waves,
            "trips": self.trips,
            "wave_cycles": self.wave_cycles,
            "weight_bytes": self.weight_bytes,
            "weight_reads": self.weight_reads,
            "kv_bytes": self.kv_bytes,
            "keys": self.keys,
            "activation_bytes": self.activation_bytes,
            "scalar_set_bytes": self.scalar_set_bytes,
            "l2_bytes": self.l2_bytes,
            "bytes_ms": self.memory_ms,
            "unit_ms": self.unit_ms,
            "bound": self.bound(),
            "ms": self.ms(),
        })
    }
}

/// One or more consecutive steps, and the tokens that they yield.
#[derive(Debug, Clone)]
pub struct Prediction {
    pub shape: &'static str,
    /// The name of the prediction, e.g. `batch 8`.
    pub what: String,
    pub tokens: u64,
    /// The dispatches of all steps. Dispatches of several steps that are alike share a line.
    pub lines: Vec<Line>,
    /// Milliseconds of each step.
    pub step_ms: Vec<f64>,
    pub dispatches: u64,
    pub barriers: u64,
}

/// Overhead of so many dispatches and barriers.
fn overhead_ms(dispatches: u64, barriers: u64) -> f64 {
    (dispatches as f64 * DISPATCH_US + barriers as f64 * BARRIER_US) / 1e3
}

impl Prediction {
    /// Whether it is about encoding an image, and not about steps of the language model.
    pub fn is_of_image(&self) -> bool {
        self.what.starts_with(IMAGE)
    }

    /// Predicts the steps; `find` looks up a dispatch's compiled pipeline.
    pub fn new<'a>(
        chip: &Chip,
        shape: &'static str,
        what: String,
        tokens: u64,
        steps: &[Vec<StepDispatches>],
        find: &dyn Fn(&Dispatch) -> Compiled<'a>,
    ) -> Prediction {
        // The steps of a prompt differ in their attention, and are alike in the rest.
        let mut different: Vec<&StepDispatches> = Vec::new();
        let (mut lines, mut step_ms) = (Vec::<Line>::new(), Vec::with_capacity(steps.len()));
        let (mut dispatches, mut barriers) = (0, 0);
        for step in steps {
            let sum = |of: fn(&StepDispatches) -> u64| step.iter().map(of).sum::<u64>();
            let (of_step, before) = (sum(|work| work.times), sum(|work| work.barriers));
            dispatches += of_step;
            barriers += before;
            let mut ms = overhead_ms(of_step, before);
            for work in step {
                let line = Line::new(chip, work, find(&work.dispatch));
                ms += line.ms();
                let is_alike =
                    |other: &&StepDispatches| other.what == work.what && other.dispatch.costs(&work.dispatch);
                match different.iter().position(is_alike) {
                    Some(at) => lines[at].times += work.times,
                    None => {
                        different.push(work);
                        lines.push(line);
                    }
                }
            }
            step_ms.push(ms);
        }
        Prediction { shape, what, tokens, lines, step_ms, dispatches, barriers }
    }

    pub fn bytes(&self) -> u64 {
        self.lines.iter().map(|line| line.times * line.bytes()).sum()
    }

    pub fn kv_bytes(&self) -> u64 {
        self.lines.iter().map(|line| line.times * line.kv_bytes).sum()
    }

    pub fn weight_bytes(&self) -> u64 {
        self.lines.iter().map(|line| line.times * line.weight_bytes * line.weight_reads).sum()
    }

    /// Overhead of all dispatches and barriers.
    pub fn overhead_ms(&self) -> f64 {
        overhead_ms(self.dispatches, self.barriers)
    }

    pub fn ms(&self) -> f64 {
        self.lines.iter().map(Line::ms).sum::<f64>() + self.overhead_ms()
    }

    pub fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / self.ms() * 1e3
    }

    pub fn json(&self) -> Value {
        json!({
            "shape": self.shape,
            "what": self.what,
            "tokens": self.tokens,
            "predicted_tokens_per_s": self.tokens_per_s(),
            "predicted_ms": self.ms(),
            "step_ms": self.step_ms,
            "bytes": self.bytes(),
            "weight_bytes": self.weight_bytes(),
            "kv_bytes": self.kv_bytes(),
            "dispatches": self.dispatches,
            "barriers": self.barriers,
            "overhead_ms": self.overhead_ms(),
            "lines": self.lines.iter().map(Line::json).collect::<Vec<_>>(),
        })
    }
}

/// The steps to predict.
#[derive(Debug, Clone)]
pub struct Question {
    pub shapes: Vec<Shape>,
    pub mode: QuantizeMode,
    pub kv: KvDtype,
    pub precision: Precision,
    /// The number of tokens that each sequence has in the cache when the predicted token is decoded.
    pub depth: usize,
    /// The tokens of a prompt in one step, as configured.
    pub chunk: usize,
}

/// Recorded steps, and the tokens that they yield.
pub struct RecordedSteps {
    shape: &'static str,
    what: String,
    tokens: u64,
    steps: Vec<Vec<StepDispatches>>,
}

/// The pipelines that recorded steps dispatch, each once.
pub fn pipelines(recorded: &[RecordedSteps]) -> Vec<Wanted> {
    let works = recorded.iter().flat_map(|steps| steps.steps.iter().flatten());
    each_once(works.map(|work| (work.dispatch.shader, work.dispatch.constants.clone())))
}

impl RecordedSteps {
    /// The prediction with one compiler's pipelines.
    pub fn predict(&self, chip: &Chip, judge: &Judge) -> Prediction {
        let find = |dispatch: &Dispatch| {
            let Dispatch { shader, constants, .. } = dispatch;
            let is_it = |p: &&super::Pipeline| p.shader.name == shader.name && p.constants == *constants;
            let Some(found) = judge.pipelines.iter().find(is_it) else {
                panic!("{} {constants:?} is dispatched, and not among all pipelines", shader.name)
            };
            Compiled {
                subgroup_size: found.subgroup_size,
                waves_per_simd: found.waves_per_simd(),
                total: &found.program.total,
                body: found.body.as_ref(),
            }
        };
        Prediction::new(chip, self.shape, self.what.clone(), self.tokens, &self.steps, &find)
    }
}

impl Question {
    /// The steps to predict for each shape: each batch, the batch of one with top_p, each prompt, and an image, if the
    /// model has a vision tower.
    pub fn record(&self) -> Result<Vec<RecordedSteps>, Error> {
        let mut all = Vec::new();
        for shape in &self.shapes {
            let config = shape.spec();
            let types = Types {
                projections: self.mode.projections().unwrap_or(Scheme::Bf16),
                embedding: self.mode.embedding().unwrap_or(Scheme::Bf16),
                kv: self.kv,
                precision: self.precision,
            };
            let depth = self.depth.min(config.max_position_embeddings - 1);
            let context = PROMPTS.into_iter().fold((depth + 1).max(self.chunk), usize::max);
            let mut model = PaperModel::load(config, types, self.chunk, context)?;
            let mut add = |what: String, tokens: usize, steps| {
                all.push(RecordedSteps { shape: shape.name, what, tokens: tokens as u64, steps });
            };
            let mut decode = |batch: usize, drawn| -> Result<_, Error> {
                Ok(vec![model.step(&vec![depth..depth + 1; batch], Some(drawn))?])
            };
            for batch in BATCHES {
                add(format!("batch {batch}"), batch, decode(batch, Drawn::Greedy)?);
            }
            // The batch of one is predicted once more, sampled with the models' recommended top_p.
            add("1 with top_p".into(), 1, decode(1, Drawn::Filtered)?);
            for tokens in PROMPTS {
                add(format!("prefill {tokens}"), tokens, model.prompt(tokens)?);
            }
            if shape.tower().is_some() {
                // A step of a model with a tower has room for an image, so the steps of text are those of a load without.
                let mut model = PaperModel::load(shape.spec_with_tower(), types, self.chunk, context)?;
                for tokens in model.image_tokens() {
                    add(format!("{IMAGE} {tokens}"), tokens, vec![model.image(tokens)?]);
                }
            }
        }
        Ok(all)
    }

    /// The assumptions of the predictions, one sentence each.
    pub fn assumptions(&self, chip: &Chip) -> Vec<String> {
        let mut all = vec![
            format!("{}: {}", chip.product, chip.source),
            format!(
                "weights {}, keys and values {}; batches decode with {} tokens each in the cache, a prompt is read in steps of \
                 at most {} tokens, each of which attends to all tokens before it",
                self.mode, self.kv, self.depth, self.chunk
            ),
            format!(
                "weights come from memory again for each tile of tokens that the grid walks over (weights x reads), unless a \
                 matrix fits in {} MiB of cache; activations count once, and again for each round of workgroups where \
                 those of a product do not stay there",
                chip.cache_bytes >> 20
            ),
            format!(
                "a vector instruction takes a SIMD one cycle for 32 lanes, integer products 4, 64-bit shifts 2, a matrix product \
                 32; a scalar instruction or branch takes it one cycle for the whole wave; shared memory moves 128 bytes a \
                 cycle for two SIMDs, without conflicts of banks; {} SIMDs at {} GHz share the waves evenly",
                chip.simds(),
                chip.clock_ghz
            ),
            format!(
                "each dispatch costs {DISPATCH_US} us and each barrier {BARRIER_US} us in addition to its work: assumed, not measured"
            ),
            format!(
                "each lane of attention reads a key of its own in rounds; lines of {LINE_BYTES} bytes that do not fit in {} MiB \
                 of cache between two rounds are read from memory again",
                chip.cache_bytes >> 20
            ),
            "greedy draws; latency and the bandwidth of caches are left out".into(),
        ];
        if let Some(tower) = self.shapes.iter().find_map(Shape::tower) {
            let scheme = tower_request(&tower, self.precision).scheme;
            all.push(format!(
                "an image is encoded by the vision tower alone, with {scheme} matrices; the prompt that contains its tokens \
                 is predicted as a text"
            ));
        }
        all
    }
}

impl Pipeline {
    /// The fewest and the most trips of the steady loop in the predictions of these shapes.
    pub fn trips(&self, shapes: &[Shape], predictions: &[Prediction]) -> Option<(f64, f64)> {
        let columns = shapes.iter().map(Shape::spec).flat_map(|s| {
            let attended = s.layers.iter().map(|layer| layer.heads.q_width());
            attended.chain([s.hidden_size, s.intermediate_size]).collect::<BTreeSet<_>>()
        });
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

    pub fn json(&self, shapes: &[Shape], predictions: &[Prediction]) -> Value {
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
            "waves_per_simd": self.waves_per_simd(),
            "wave32_per_simd": self.wave32_per_simd(),
            "loops": self.program.loops.len(),
            "total": self.program.total,
            "steady": self.body.map(|body| {
                let (least, most) = self.trips(shapes, predictions).unzip();
                json!({
                    "trip": body.trip,
                    "trips_unrolled": body.unrolled,
                    "trips_least": least,
                    "trips_most": most,
                    "weights_per_trip": body.weights * body.unrolled,
                    "valu_per_weight": body.valu_per_weight(),
                    "once": body.once,
                })
            }),
            "statistics": self.statistics.iter().cloned().collect::<BTreeMap<_, _>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Wants;
    use crate::model::arch;
    use crate::tensor::Scheme;

    /// gate_proj of the 27B in int4-g128 on a 780M, computed by hand.
    fn gate(tokens: usize, loop_cycles: u64) -> Line {
        let dispatch = cost::matmul(Precision::F32, Scheme::int4(128), &[21_504], 5376, tokens);
        let trip = Counts { cycles: loop_cycles, ..Counts::default() };
        let once = Counts { cycles: 50, ..Counts::default() };
        let body = Body { trip, unrolled: 1, weights: 32, once, key_rounds: 0 };
        let compiled =
            Compiled { subgroup_size: 64, waves_per_simd: 16, total: &Counts::default(), body: Some(&body) };
        Line::new(
            &CHIPS[0],
            &StepDispatches { what: "gate_proj", times: 62, barriers: 62, dispatch },
            compiled,
        )
    }

    #[test]
    fn a_dispatch_takes_the_longer_of_its_bytes_and_its_instructions() {
        let one = gate(1, 300);
        // The dispatch reads 59.6 MB of weights and 0.1 MB of activations.
        assert_eq!(one.bytes(), 21_504 * 5376 * 33 / 64 + 4 * (21_504 + 5376));
        assert!((one.memory_ms - 0.8181).abs() < 1e-3, "{}", one.memory_ms);
        // There are 672 workgroups of two waves, 56 on each of 24 SIMDs. Each wave has 42 trips of 300 cycles, twice
        // for 64 lanes.
        assert_eq!((one.waves, one.wave_cycles.valu), (1344, (50 + 42 * 300) as f64 * 2.0));
        assert!((one.unit_ms.valu - 56.0 * 25_300.0 / 2.7e6).abs() < 1e-9, "{}", one.unit_ms.valu);
        assert_eq!((one.ms(), one.bound()), (62.0 * one.memory_ms, "memory"));
        let heavy = gate(1, 3000);
        assert_eq!((heavy.ms(), heavy.bound()), (62.0 * heavy.unit_ms.valu, "VALU"));
    }

    /// A wave of 64 lanes has twice the work of one of 32 for the vector units and shared memory, and the same for the
    /// scalar unit. Two SIMDs share the shared memory.
    #[test]
    fn the_busiest_unit_bounds_a_dispatch() {
        let total = Counts { cycles: 100, salu: 300, branches: 20, lds_cycles: 10, ..Counts::default() };
        let wave = |subgroup_size| {
            Compiled { subgroup_size, waves_per_simd: 16, total: &total, body: None }.wave_cycles(1.0)
        };
        assert_eq!(wave(32), Units { valu: 100.0, salu: 320.0, lds: 20.0 });
        assert_eq!(wave(64), Units { valu: 200.0, salu: 320.0, lds: 40.0 });
        let dispatch = cost::history(64);
        let line = |total: &Counts| {
            let work = StepDispatches { what: "history", times: 1, barriers: 0, dispatch: dispatch.clone() };
            Line::new(&CHIPS[0], &work, Compiled { subgroup_size: 32, waves_per_simd: 16, total, body: None })
                .bound()
        };
        assert_eq!(line(&total), "SALU");
        assert_eq!(line(&Counts { lds_cycles: 200, ..total }), "lds");
        assert_eq!(line(&Counts::default()), "memory");
    }

    /// Sixteen units of 16 bytes are two lines. A round that reads 4 bytes of each unit touches each line four times.
    #[test]
    fn keys_are_read_again_where_their_lines_leave_the_cache_between_two_rounds() {
        let keys = Keys { bytes: 1 << 20, row_bytes: 256, unit_bytes: 16 };
        let of = |rounds, workgroups| KeyLines::new(&CHIPS[0], keys, rounds, workgroups);
        assert_eq!(
            (of(64, 48).lines, of(64, 48).repeated_bytes),
            (4.0, 0),
            "48 tiles of 16 KiB fit in 2 MiB"
        );
        assert_eq!(
            (of(64, 192).lines, of(64, 192).repeated_bytes),
            (4.0, 1 << 20),
            "a third of 3 MiB does not"
        );
        assert_eq!((of(8, 192).lines, of(8, 192).repeated_bytes), (1.0, 0), "a round uses whole lines");
        let narrow = KeyLines::new(&CHIPS[0], Keys { unit_bytes: 4, ..keys }, 8, 48);
        assert_eq!(narrow.lines, 2.0, "sixteen units of 4 bytes are half a line");
        assert_eq!(KeyLines::new(&CHIPS[0], Keys::default(), 0, 1).lines, 1.0);
    }

    #[test]
    fn weights_are_read_again_for_each_tile_of_tokens_unless_the_cache_holds_them() {
        assert_eq!((gate(32, 300).weight_reads, gate(64, 300).weight_reads), (1, 2));
        let small = cost::matmul(Precision::F32, Scheme::int4(128), &[1024], 640, 512);
        assert_eq!(small.weight_passes, 2);
        let compiled =
            Compiled { subgroup_size: 64, waves_per_simd: 16, total: &Counts::default(), body: None };
        let line = Line::new(
            &CHIPS[0],
            &StepDispatches { what: "k_proj", times: 1, barriers: 0, dispatch: small },
            compiled,
        );
        assert_eq!(line.weight_reads, 1);
    }

    #[test]
    fn a_step_is_the_sum_of_its_dispatches_and_their_overhead() {
        let dispatch = cost::rms_norm(1, 5376, Wants { floats: true, blocks: false });
        let work = vec![StepDispatches { what: "norm", times: 62, barriers: 31, dispatch }];
        let total = Counts { cycles: 2700, ..Counts::default() };
        let find =
            |_: &Dispatch| Compiled { subgroup_size: 64, waves_per_simd: 16, total: &total, body: None };
        let step =
            Prediction::new(&CHIPS[0], "gemma-3-27b", "batch 1".into(), 1, &[work.clone(), work], &find);
        assert_eq!((step.dispatches, step.barriers), (124, 62));
        // Both steps have the same dispatches, which share a line.
        assert_eq!((step.lines.len(), step.lines[0].times), (1, 124));
        assert_eq!(step.step_ms.len(), 2);
        assert!((step.step_ms.iter().sum::<f64>() - step.ms()).abs() < 1e-9, "{:?}", step.step_ms);
        assert_eq!(step.overhead_ms(), 0.124 * DISPATCH_US + 0.062 * BARRIER_US);
        // There are four waves, each on its own SIMD, of 5400 cycles at 2.7 GHz.
        assert!((step.ms() - step.overhead_ms() - 124.0 * 0.002).abs() < 1e-9, "{}", step.ms());
        assert!((step.tokens_per_s() - 1e3 / step.ms()).abs() < 1e-9);
    }

    /// Every step of a prompt is recorded. Its attention grows from step to step, and its products do not.
    #[test]
    fn the_last_step_of_a_long_prompt_takes_longer_by_its_attention() {
        let question = Question {
            shapes: vec![arch::shape("gemma-3-270m").unwrap()],
            mode: QuantizeMode::Int4G128Emb8,
            kv: KvDtype::Int8,
            precision: Precision::Fast,
            depth: 512,
            chunk: 256,
        };
        let recorded = question.record().unwrap();
        let named = |what: &str| recorded.iter().find(|steps| steps.what == what).unwrap();
        let prompt = named("prefill 8192");
        assert_eq!((prompt.tokens, prompt.steps.len(), named("prefill 512").steps.len()), (8192, 32, 2));
        let total = Counts { cycles: 1000, ..Counts::default() };
        let trip = Counts { cycles: 100, ..Counts::default() };
        let body = Body { trip, unrolled: 1, weights: 0, once: total, key_rounds: 1 };
        let find = |_: &Dispatch| Compiled {
            subgroup_size: 64,
            waves_per_simd: 16,
            total: &total,
            body: Some(&body),
        };
        let predicted =
            Prediction::new(&CHIPS[0], prompt.shape, prompt.what.clone(), 8192, &prompt.steps, &find);
        let lines = |what: &str| predicted.lines.iter().filter(|line| line.what == what).collect::<Vec<_>>();
        // 3 of 18 layers see all keys. The others see 512, so their attention stays the same from the third step on.
        let (full, sliding) = (lines("attention of tiles, full"), lines("attention of tiles, sliding"));
        assert_eq!((full.len(), full.iter().map(|line| line.times).sum::<u64>()), (32, 32 * 3));
        assert!(full.windows(2).all(|pair| pair[0].kv_bytes < pair[1].kv_bytes));
        assert_eq!((sliding.len(), sliding.iter().map(|line| line.times).sum::<u64>()), (3, 32 * 15));
        assert_eq!(lines("down_proj").iter().map(|line| line.times).collect::<Vec<_>>(), [32 * 18]);
        let (first, last) = (predicted.step_ms[0], predicted.step_ms[30]);
        let grown = full[30].ms() - full[0].ms();
        assert!(last > first + 0.9 * grown && grown > 0.0, "{first} {last} {grown}");
    }

    #[test]
    fn a_chip_goes_by_the_name_of_its_compiler() {
        assert_eq!(Chip::named("phoenix").unwrap().simds(), 24);
        let error = Chip::named("llvmpipe").unwrap_err();
        assert!(error.contains("\"llvmpipe\"") && error.contains("phoenix, gfx1150, gfx1151"), "{error}");
    }
}
