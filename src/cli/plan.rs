//! `unicorn plan`: shows how a model would be placed in memory, and the longest context that fits, with the same
//! calculation as a load. It allocates no device memory, and needs no device if `--vram` and `--gtt` describe one.

use std::path::Path;

use serde_json::json;

use super::args::{self, Class, Target};
use super::doctor::Machine;
use super::error::Error;
use super::load::{self, Room};
use super::terminal::{bytes, print};
use crate::checkpoint::ModelFiles;
use crate::config::Config;
use crate::model::arch;
use crate::model::load::{LoadError, check_draft};
use crate::model::memory::{
    ChosenKv, DoesNotFit, DraftMemoryRequest, Fit, MAX_SEQUENCES, MemoryRequest, Schemes, quantize_modes,
};
use crate::model::spec::{ModelSpec, Shape};
use crate::model::vision::TowerRequest;
use crate::npu;
use crate::tensor::{KvDtype, QuantizeMode, Scheme, VisionMode};

/// The model to plan for.
struct Subject {
    model: Part,
    draft: Option<Part>,
    /// A note that the default scheme was assumed.
    assumption: Option<String>,
    /// Alternative schemes for the model's weights, each with the option that selects it.
    others: Vec<(String, Schemes)>,
}

/// A model or its draft model.
struct Part {
    name: String,
    config: ModelSpec,
    schemes: Schemes,
    /// The scheme of the matrices of its vision tower, if it is loaded with it.
    tower: Option<Scheme>,
    /// Bytes of the files with weights; 0 if there are none.
    file_bytes: u64,
    /// What is to be said about matrices that are larger than in the files.
    growth: Option<String>,
}

impl Part {
    /// The memory of the tower, if the model is loaded with it.
    fn tower(&self, config: &Config) -> Option<TowerRequest<'_>> {
        let spec = self.config.vision.as_ref().ok()?.as_ref()?;
        let precision = config.model.precision;
        let budget = load::image_budget(&config.model);
        self.tower.map(|scheme| TowerRequest { spec, scheme, precision, budget })
    }
}

/// The request as a load makes it: without a tower that is optional and costs too much, and then with the reason.
fn as_loaded<'a>(
    request: MemoryRequest<'a>,
    config: &Config,
    fit: impl Fn(&MemoryRequest<'a>) -> Result<Fit, DoesNotFit>,
) -> (MemoryRequest<'a>, Option<String>) {
    match config.model.vision {
        VisionMode::Auto => request.with_tower_that_fits(config.engine.context, fit),
        VisionMode::On | VisionMode::Off => (request, None),
    }
}

/// Memory that the system, the server and other programs need while a model is loaded.
const OTHERS_BYTES: u64 = 2 << 30;

/// Where a load reads a model's files that was loaded before.
pub struct LoadAgain {
    pub file_bytes: u64,
    /// Bytes of the loaded model in the machine's memory, which is not the GPU's own.
    pub host_bytes: u64,
    pub memory_bytes: u64,
}

impl LoadAgain {
    /// Whether the files stay in the page cache while the model is loaded.
    pub fn is_from_memory(&self) -> bool {
        self.needed_bytes() <= self.memory_bytes
    }

    /// Memory for both copies, and for other programs.
    pub fn needed_bytes(&self) -> u64 {
        self.host_bytes.saturating_add(OTHERS_BYTES).saturating_add(self.file_bytes)
    }

    fn describe(&self) -> String {
        let Self { file_bytes, host_bytes, memory_bytes } = self;
        let (from, fit) = match self.is_from_memory() {
            true => ("memory", "stay cached"),
            false => ("the disk", "do not fit"),
        };
        format!(
            "from {from}: {} of files {fit} next to {} of the model and {} for other programs, in {}",
            bytes(*file_bytes),
            bytes(*host_bytes),
            bytes(OTHERS_BYTES),
            bytes(*memory_bytes)
        )
    }
}

/// A number of sequences for which a plan shows the longest context, in addition to one and the requested number.
const SEVERAL: usize = 16;

/// A plan to print.
struct Report<'a> {
    subject: &'a Subject,
    request: MemoryRequest<'a>,
    /// Why a load leaves out the vision tower.
    without_vision: Option<String>,
    kv: ChosenKv,
    sequences: usize,
    /// The requested context.
    wanted: Option<usize>,
    outcome: Result<Fit, DoesNotFit>,
    /// Number of sequences, the longest context of each, and the largest allocation if only that limits the context.
    largest: Vec<(usize, usize, Option<u64>)>,
    room: &'a Room,
    /// Whether the plan is for a machine that --vram and --gtt describe.
    is_described: bool,
}

pub fn plan(config: &Config, args: &args::Plan) -> Result<(), Error> {
    let subject = subject(config, &args.planned)?;
    let args::MemoryOptions { vram, gtt, .. } = args.memory;
    let described = (vram.is_some() || gtt.is_some()).then(|| (vram.unwrap_or(0), gtt.unwrap_or(0)));
    let room = load::room(config, described)?;
    let Room { machine, limits, .. } = &room;
    let (sequences, wanted) = (args.sequences as usize, config.engine.context);
    let (request, kv) = request(&subject, config, &room, sequences);
    let fit = |request: &MemoryRequest<'_>| request.fit(machine, limits, wanted, sequences, &subject.others);
    let (request, without_vision) = as_loaded(request, config, fit);
    let outcome = fit(&request);

    let mut counts = vec![1, SEVERAL, sequences];
    counts.sort_unstable();
    counts.dedup();
    let largest = counts.into_iter().map(|n| {
        let context = request.largest_context(machine, limits, n);
        (n, context, request.allocation_limit(machine, limits, context, n))
    });
    let largest = largest.collect();
    let is_described = described.is_some();
    let report = Report {
        subject: &subject,
        request,
        without_vision,
        kv,
        sequences,
        wanted,
        outcome,
        largest,
        room: &room,
        is_described,
    };
    print(&if args.json { report.json() } else { report.text() })?;
    report.outcome.map(drop).map_err(|error| Box::new(error).into())
}

/// Whether a model fits into `room`, for one sequence of the configured context.
pub fn fit(config: &Config, planned: &args::Planned, room: &Room) -> Result<Result<Fit, DoesNotFit>, Error> {
    let subject = subject(config, planned)?;
    let (request, _) = request(&subject, config, room, 1);
    let context = config.engine.context;
    let fit =
        |request: &MemoryRequest<'_>| request.fit(&room.machine, &room.limits, context, 1, &subject.others);
    Ok(fit(&as_loaded(request, config, fit).0))
}

/// The device memory of one of several models, whose contexts are whole, if `budget` bytes may be used.
pub fn bytes_to_serve(files: &ModelFiles, config: &Config, budget: u64) -> Result<u64, Error> {
    let model = part(files, config)?;
    let draft = config.model.draft.as_ref().map(|path| draft(path, &model.config)).transpose()?;
    let subject = Subject { model, draft, assumption: None, others: Vec::new() };
    let room = load::room_within(budget, config);
    let (request, _) = request(&subject, config, &room, 1);
    let (context, sequences) = (config.engine.context, config.engine.sequences);
    let fit = |request: &MemoryRequest<'_>| request.fit(&room.machine, &room.limits, context, sequences, &[]);
    let fit = fit(&as_loaded(request, config, fit).0);
    Ok(fit.map_err(|error| LoadError::from(Box::new(error)))?.plan.bytes())
}

fn subject(config: &Config, args: &args::Planned) -> Result<Subject, Error> {
    let mut subject = match (&args.model, args.shape) {
        (Some(model), _) => checkpoint(model, config)?,
        (None, Some(shape)) => published(shape, args, config),
        (None, None) => {
            return Err(Error::Argument("plan: give a checkpoint, or --shape".into()));
        }
    };
    if let Some(path) = &args.draft {
        subject.draft = Some(draft(path, &subject.model.config)?);
        // A model with a draft model takes no images.
        subject.model.tower = None;
    }
    Ok(subject)
}

/// The memory to request, and its type of keys and values. A load has `engine.sequences` conversations, and a plan may
/// ask for more.
fn request<'a>(
    subject: &'a Subject,
    config: &Config,
    room: &Room,
    sequences: usize,
) -> (MemoryRequest<'a>, ChosenKv) {
    let mut request = MemoryRequest {
        config: &subject.model.config,
        schemes: subject.model.schemes.clone(),
        kv: KvDtype::default(),
        block_size: config.kv.block_size,
        max_batch_tokens: config.engine.prefill_chunk,
        max_shard_bytes: room.machine.max_allocation_bytes / 2,
        moments: false,
        offload: npu::cli::planned(config, &subject.model.config),
        draft: subject
            .draft
            .as_ref()
            .map(|d| DraftMemoryRequest { config: &d.config, schemes: d.schemes.clone() }),
        vision: subject.model.tower(config),
    };
    let sequences = sequences.clamp(config.engine.sequences, MAX_SEQUENCES);
    let longest = request.longest_context();
    let kv = load::kv(config, request.config, &request.schemes, longest, sequences, room.is_software);
    request.kv = kv.dtype;
    (request, kv)
}

fn checkpoint(model: &str, config: &Config) -> Result<Subject, Error> {
    let files = load::files_at(Path::new(model), &config.model)?;
    let source = load::Source::open(&files)?;
    let others = quantize_modes(&source.weights()?)?;
    Ok(Subject { model: part(&files, config)?, draft: None, assumption: None, others })
}

/// A model's weights, in the schemes of a load.
fn part(files: &ModelFiles, config: &Config) -> Result<Part, Error> {
    let source = load::Source::open(files)?;
    let (schemes, growth) = {
        let (weights, mode) = (source.weights()?, config.model.quantize);
        (Schemes::of(&weights, mode)?, weights.growth(mode))
    };
    let file_bytes = source.checkpoint.total_bytes();
    let (vision, precision) = (config.model.vision, config.model.precision);
    let tower = source.tower_scheme(vision, precision, config.model.draft.is_some())?;
    Ok(Part { name: files.location(), config: source.config, schemes, tower, file_bytes, growth })
}

/// A draft model's weights keep the schemes of its files.
fn draft(path: &str, model: &ModelSpec) -> Result<Part, Error> {
    let files = arch::open_files(Path::new(path))?;
    let source = load::Source::open(&files)?;
    check_draft(model, &source.config)
        .map_err(|problem| Error::Argument(format!("{}: {problem}", files.display("config.json"))))?;
    let schemes = Schemes::of(&source.weights()?, QuantizeMode::None)?;
    let file_bytes = source.checkpoint.total_bytes();
    Ok(Part { name: files.location(), config: source.config, schemes, tower: None, file_bytes, growth: None })
}

fn published(shape: Shape, args: &args::Planned, config: &Config) -> Subject {
    let spec = shape.spec_with_tower();
    let of = |schemes: args::Schemes| {
        let [attention, ffn, embedding] =
            [Class::Attention, Class::FeedForward, Class::Embedding].map(|class| {
                let Target(scheme) = schemes.of(class);
                scheme.unwrap_or(Scheme::Bf16)
            });
        Schemes::uniform(&spec, attention, ffn, embedding)
    };
    let scheme = args.scheme.unwrap_or(Target::DEFAULT);
    let schemes = of(args::Schemes {
        scheme,
        attention: args.attention,
        feed_forward: args.feed_forward,
        embedding: args.embedding,
    });
    let others = [Scheme::Int8Row, Scheme::int4(32), Scheme::int4(128)].map(|scheme| {
        let target = args::Schemes {
            scheme: Target(Some(scheme)),
            attention: None,
            feed_forward: None,
            embedding: None,
        };
        (format!("--scheme {scheme}"), of(target))
    });
    // The matrices of all published towers are bf16.
    let scheme_of_tower = TowerRequest::scheme_of(config.model.precision, true);
    let has_tower = matches!(spec.vision, Ok(Some(_))) && config.model.vision != VisionMode::Off;
    let tower = has_tower.then_some(scheme_of_tower);
    let model = Part { name: shape.name.into(), config: spec, schemes, tower, file_bytes: 0, growth: None };
    Subject { model, draft: None, assumption: args.assumption(), others: others.into() }
}

fn contexts(sequences: usize, context: usize) -> String {
    match sequences {
        1 => format!("{context} tokens for 1 sequence"),
        n => format!("{context} tokens for each of {n} sequences"),
    }
}

impl Report<'_> {
    fn text(&self) -> String {
        let Self { subject: Subject { model, draft, assumption, .. }, request, outcome, wanted, .. } = self;
        let assumption = assumption.as_ref().map(|text| format!(" ({text})")).unwrap_or_default();
        let mut text = format!("{}: {}{assumption}\n", model.name, model.schemes);
        if let Some(draft) = draft {
            text += &format!("draft {}: {}\n", draft.name, draft.schemes);
        }
        let context = outcome.as_ref().map_or_else(|error| error.context, |fit| fit.context);
        let verdict = match (outcome, wanted) {
            (Ok(_), Some(_)) => "fits",
            (Ok(_), None) => "the longest that fits",
            (Err(_), _) => "DOES NOT FIT",
        };
        let cut = match request.beyond_model(*wanted) {
            Some((wanted, longest, whose)) => {
                format!(" ({wanted} were requested; {whose}'s maximum is {longest})")
            }
            None => String::new(),
        };
        text += &format!("{}: {verdict}{cut}\n\n", contexts(self.sequences, context));
        if let Some(growth) = &model.growth {
            text += &format!("{growth}\n\n");
        }

        text += &self.memory_table();
        if let Some(why) = &self.without_vision {
            text += &format!("\nvision tower     left out: {why}\n");
        }
        let ffn_choice = self.room.ffn_choice();
        if ffn_choice.has_alternative() {
            text += &format!("\nFFN weights      {ffn_choice}");
        }
        let (per_token, window) = (request.kv_bytes_per_token(), request.window_bytes(context));
        text += &format!(
            "\nKV cache         {} per token and {} per window, {} for a sequence of {context} tokens\n",
            bytes(per_token),
            bytes(window),
            bytes(per_token * context as u64 + window)
        );
        text += &format!("keys and values  {}\n", self.kv);
        for (i, (sequences, context, limit)) in self.largest.iter().enumerate() {
            let name = if i == 0 { "largest context" } else { "" };
            let why =
                limit.map(|n| format!(" (one allocation holds at most {})", bytes(n))).unwrap_or_default();
            text += &format!("{name:<16} {}{why}\n", contexts(*sequences, *context));
        }
        if let Some(again) = self.load_again() {
            text += &format!("load again       {}\n", again.describe());
        }
        text
    }

    /// What a load after the first one reads. `None` = the plan has no files, does not fit, or is for another machine.
    fn load_again(&self) -> Option<LoadAgain> {
        let Subject { model, draft, .. } = self.subject;
        let file_bytes = model.file_bytes + draft.as_ref().map_or(0, |draft| draft.file_bytes);
        let fit = self.outcome.as_ref().ok().filter(|_| !self.is_described && file_bytes > 0)?;
        let heaps = fit.plan.heaps.iter();
        let of_host = heaps.filter(|heap| self.room.is_software || !heap.heap.device_local);
        let host_bytes = of_host.map(|heap| heap.placed).sum();
        let memory_bytes = Machine::new(None).memory("MemTotal")?;
        Some(LoadAgain { file_bytes, host_bytes, memory_bytes })
    }

    /// The bytes of each class in each heap, or the requested bytes of each class if they do not fit.
    fn memory_table(&self) -> String {
        let heaps = self.outcome.as_ref().map_or_else(|error| &error.refusal.heaps, |fit| &fit.plan.heaps);
        let mut text = String::new();
        let widths: Vec<usize> = heaps.iter().map(|heap| heap.heap.name.len().max(9) + 2).collect();
        let mut row = |name: &str, cells: Vec<String>, total: String| {
            text += &format!("{name:<18}");
            for (cell, width) in cells.iter().zip(&widths) {
                text += &format!("{cell:>width$}");
            }
            text += &format!("{total:>11}\n");
        };
        let shown = |n: u64| if n == 0 { "-".to_owned() } else { bytes(n) };
        row("", heaps.iter().map(|heap| heap.heap.name.clone()).collect(), "total".into());
        match &self.outcome {
            Ok(fit) => {
                let rows = fit.plan.placements();
                let mut classes: Vec<&str> = rows.iter().map(|row| row.class.name()).collect();
                classes.dedup();
                for class in classes {
                    let here = |heap: &str| -> u64 {
                        let here = rows.iter().filter(|row| row.class.name() == class && row.heap == heap);
                        here.map(|row| row.allocated).sum()
                    };
                    let cells: Vec<u64> = heaps.iter().map(|heap| here(&heap.heap.name)).collect();
                    row(class, cells.iter().map(|n| shown(*n)).collect(), bytes(cells.iter().sum()));
                }
                row("placed", heaps.iter().map(|heap| shown(heap.placed)).collect(), bytes(fit.plan.bytes()));
            }
            Err(error) => {
                let unplaced = || vec![String::new(); heaps.len()];
                for (class, n) in &error.refusal.asked {
                    row(class.name(), unplaced(), bytes(*n));
                }
                row("requested", unplaced(), bytes(error.refusal.asked_bytes()));
            }
        }
        let usable: Vec<u64> = heaps.iter().map(|heap| heap.usable).collect();
        row("usable", usable.iter().map(|n| shown(*n)).collect(), bytes(usable.iter().sum()));
        text
    }

    fn json(&self) -> String {
        let Self { subject, request, kv, sequences, wanted, outcome, largest, room, .. } = self;
        let ffn_choice = room.ffn_choice();
        let (context, heaps) = match outcome {
            Ok(fit) => (fit.context, &fit.plan.heaps),
            Err(error) => (error.context, &error.refusal.heaps),
        };
        let (per_token, window) = (request.kv_bytes_per_token(), request.window_bytes(context));
        let asked = request.requests(context, request.pools(context, *sequences));
        let heaps: Vec<_> = heaps
            .iter()
            .map(|heap| {
                json!({
                    "name": heap.heap.name,
                    "device_local": heap.heap.device_local,
                    "size_bytes": heap.heap.size,
                    "free_bytes": heap.heap.free,
                    "read_bytes_per_s": heap.heap.read.map(|read| read.bytes_per_s),
                    "usable_bytes": heap.usable,
                    "placed_bytes": outcome.is_ok().then_some(heap.placed),
                })
            })
            .collect();
        let placements = outcome.as_ref().ok().map(|fit| {
            let rows = fit.plan.placements();
            rows.iter()
                .map(|row| {
                    json!({
                        "class": row.class.name(),
                        "heap": row.heap,
                        "buffers": row.buffers,
                        "bytes": row.bytes,
                        "allocated_bytes": row.allocated,
                    })
                })
                .collect::<Vec<_>>()
        });
        let refusal = outcome.as_ref().err();
        let line = json!({
            "model": subject.model.name,
            "schemes": subject.model.schemes.to_string(),
            "assumption": subject.assumption,
            "growth": subject.model.growth,
            "draft": subject.draft.as_ref().map(|d| json!({"model": d.name, "schemes": d.schemes.to_string()})),
            "fits": outcome.is_ok(),
            "error": refusal.map(ToString::to_string),
            "sequences": sequences,
            "requested_context": wanted,
            "vision_left_out": self.without_vision,
            "cut_to_model_maximum": request.beyond_model(*wanted).is_some(),
            "context": context,
            "largest_contexts": largest
                .iter()
                .map(|(sequences, context, limit)| {
                    json!({"sequences": sequences, "context": context, "largest_allocation_bytes": limit})
                })
                .collect::<Vec<_>>(),
            "smaller": refusal.and_then(|error| error.smaller.as_ref()).map(|(option, context)| {
                json!({"option": option, "context": context})
            }),
            "kv_dtype": kv.dtype.name(),
            "kv_dtype_why": kv.why,
            "kv_bytes_per_token": per_token,
            "kv_bytes_per_window": window,
            "bytes_per_sequence": per_token * context as u64 + window,
            "weight_bytes": request.weight_bytes(),
            "asked_bytes": asked.iter().map(|request| request.bytes).sum::<u64>(),
            "placed_bytes": outcome.as_ref().ok().map(|fit| fit.plan.bytes()),
            "heaps": heaps,
            "ffn_heap": {"first": ffn_choice.heap().name(), "why": ffn_choice.to_string()},
            "placements": placements,
            "load_again_from_memory": self.load_again().map(|again| again.is_from_memory()),
        });
        format!("{line}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_stay_cached_if_both_copies_fit() {
        let gib = |n: u64| n << 30;
        // A 27B on 96 GB, of which the firmware gives 16 GiB to the GPU; on 32 GB; and in VRAM of its own.
        for (files, host, memory, from) in [
            (17, 23, 78, "from memory"),
            (17, 23, 30, "from the disk"),
            (17, 0, 20, "from memory"),
            (17, 0, 18, "from the disk"),
        ] {
            let again =
                LoadAgain { file_bytes: gib(files), host_bytes: gib(host), memory_bytes: gib(memory) };
            assert!(again.describe().starts_with(from), "{}", again.describe());
        }
    }
}
