//! Records the steps of a model on a device that executes nothing, and adds the cost of each recorded dispatch. It
//! needs no GPU and no checkpoint: the weights have the shape of a published model, but no contents.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::checkpoint::{Encoding, NativeTensor, Tensor};
use crate::cli::load;
use crate::gpu::{Device, Note};
use crate::kernels::shaders::{
    ActivatePush, AltupPush, AttentionMergePush, AttentionPush, AveragePoolPush, CombinePush, CutoffPush,
    EmbedPush, FastMatmulPush, GluPush, GridPush, GroupPairsPush, HistoryPush, LayerNormPush, MatmulPush,
    PatchesPush, QkvStorePush, QuantizePush, RmsNormPush, RoutePush, SamplePush, SoftcapPush, StreamsPush,
};
use crate::kernels::{AttentionBy, AttentionTile, Experts, Item, LayerKind, Tiles, Wants};
use crate::lab::cost::{self, Dispatch, Drawn, Heads};
use crate::model::load::{LoadError, LoadOptions, Source};
use crate::model::memory::MAX_SEQUENCES;
use crate::model::model_runner::ModelRunner;
use crate::model::spec::ModelSpec;
use crate::model::tensors::{Role, TensorSpec};
use crate::model::vision::{TowerRequest, VisionSpec, VisionTensor};
use crate::model::weights::Weights;
use crate::model::{
    Batch, BatchSequence, BlockList, Draw, ImageBudget, ImageSizes, Input, Runner, RunnerError, Sampling,
    SamplingParams,
};
use crate::tensor::{DType, KvDtype, Precision, Scheme, VisionMode};

/// Constants of a product with int8 by lanes. The last one is GROUPED.
const LANE_CONSTANTS: usize = 6;

/// The scheme of the matrices that no mode of quantization changes.
const KEPT: Scheme = Scheme::Bf16;

/// Dispatches of one kind in a step.
#[derive(Debug, Clone)]
pub struct StepDispatches {
    /// The name of the dispatches, e.g. `o_proj`.
    pub what: &'static str,
    /// Number of dispatches.
    pub times: u64,
    /// The number of barriers before them.
    pub barriers: u64,
    pub dispatch: Dispatch,
}

/// The types of a model's values.
#[derive(Debug, Clone, Copy)]
pub struct Types {
    /// Scheme of the layers' matrices.
    pub projections: Scheme,
    pub embedding: Scheme,
    pub kv: KvDtype,
    pub precision: Precision,
}

/// What the load of a published tower depends on. The matrices of all published towers are bf16.
pub fn tower_request(spec: &VisionSpec, precision: Precision) -> TowerRequest<'_> {
    let scheme = TowerRequest::scheme_of(precision, true);
    TowerRequest { spec, scheme, precision, budget: ImageBudget::default() }
}

/// What the costs of dispatches depend on, besides what is recorded.
#[derive(Debug, Clone, Copy)]
struct Costs {
    types: Types,
    layers: LayerKind,
}

/// A model of a published shape, whose steps are recorded.
pub struct PaperModel {
    runner: ModelRunner,
    costs: Costs,
    /// The costs of the vision tower, if the model has one.
    costs_of_tower: Option<Costs>,
}

impl PaperModel {
    /// Loads a model, with its vision tower if its config has one, for contexts of `context` tokens. `chunk` is the
    /// largest number of tokens of a step, unless an image has more.
    pub fn load(
        config: ModelSpec,
        types: Types,
        chunk: usize,
        context: usize,
    ) -> Result<PaperModel, LoadError> {
        let specs = config.tensors.clone();
        let scheme = |spec: &TensorSpec| match spec.role {
            Role::Embedding | Role::Head | Role::PerLayerEmbedding => Some(types.embedding),
            Role::Projection(_) => Some(types.projections),
            Role::KeptMatrix => Some(KEPT),
            Role::Norm | Role::Bias | Role::Router | Role::Coefficients | Role::Factors => None,
        };
        let sizes = |spec: &TensorSpec| match scheme(spec) {
            Some(scheme) => (
                scheme.block_bytes(spec.rows(), spec.cols()) as usize,
                scheme.scale_bytes(spec.rows(), spec.cols()) as usize,
            ),
            None => (4 * spec.elements() as usize, 0),
        };
        let tower = config.vision.clone().map_err(LoadError::Option)?;
        let of_tower = tower.as_ref().map_or_else(Vec::new, VisionSpec::tensors);
        let bytes = |tensor: &VisionTensor| 2 * tensor.shape.iter().product::<usize>();
        // All tensors share the same bytes. The contents of matrices are never read, so they need no memory.
        let largest = specs.iter().map(|spec| sizes(spec).0).chain(of_tower.iter().map(bytes)).max();
        let zeros = vec![0u8; largest.expect("some tensors")];
        let tensors = specs.as_ref().map(|spec| {
            let (blocks, scales) = sizes(spec);
            let encoding = match scheme(spec) {
                Some(scheme) => Encoding::Native(NativeTensor {
                    scheme,
                    blocks: zeros[..blocks].into(),
                    scales: zeros[..scales].into(),
                }),
                None => Encoding::Plain { dtype: DType::F32, data: &zeros[..blocks] },
            };
            Tensor { name: &spec.name, file: "memory", shape: &spec.shape, encoding, interleaved: None }
        });
        let weights = Weights::of_text(tensors).with_tower(of_tower.iter().map(|tensor| Tensor {
            name: &tensor.name,
            file: "memory",
            shape: &tensor.shape,
            encoding: Encoding::Plain { dtype: DType::BF16, data: &zeros[..bytes(tensor)] },
            interleaved: None,
        }));
        let options = LoadOptions {
            max_context: Some(context.min(config.max_position_embeddings)),
            sequences: MAX_SEQUENCES,
            kv: types.kv,
            precision: types.precision,
            tiles: Some(Tiles::COUNTED),
            attention: Some(AttentionBy::Subgroups(AttentionTile::RDNA3)),
            max_batch_tokens: chunk,
            // A step is one submit.
            max_submit: Duration::MAX,
            vision: VisionMode::Auto,
            ..LoadOptions::default()
        };
        let costs = Costs { types, layers: config.layer_kind() };
        let costs_of_tower = tower.as_ref().map(|spec| {
            let request = tower_request(spec, types.precision);
            let (projections, kv) = (request.scheme, request.kv());
            Costs { types: Types { projections, kv, ..types }, layers: request.layer_kind() }
        });
        // The demo model's files are a source without other tensors.
        let files = load::demo_files();
        let source = Source { config, ..Source::open(&files)? };
        let device = Device::open_null()?;
        let (runner, _) = ModelRunner::load_weights(&device, &source, &weights, None, &options, &mut |_| {})?;
        Ok(PaperModel { runner, costs, costs_of_tower })
    }

    /// The dispatches of a step in which each sequence contributes the tokens at these positions. Each sequence draws
    /// an id, unless `drawn` is `None`.
    pub fn step(
        &mut self,
        sequences: &[Range<usize>],
        drawn: Option<Drawn>,
    ) -> Result<Vec<StepDispatches>, RunnerError> {
        let params = Arc::new(match drawn {
            Some(Drawn::Filtered) => {
                SamplingParams { temperature: 1.0, top_k: 64, top_p: 0.95, ..SamplingParams::GREEDY }
            }
            _ => SamplingParams::GREEDY,
        });
        let limits = self.runner.limits().clone();
        let entry = |(slot, positions): (usize, &Range<usize>)| {
            // The contents of a block have no effect, so all entries refer to the same block.
            let ids = vec![0; positions.end.div_ceil(limits.kv.block_size)];
            BatchSequence {
                slot: slot as u32,
                start: positions.start,
                input: Input::Ids(vec![0; positions.len()]),
                blocks: vec![BlockList { first: 0, ids }; limits.kv.pools.len()],
                images: Vec::new(),
                history: None,
            }
        };
        let draw = |(sequence, positions): (usize, &Range<usize>)| Draw {
            sequence,
            token: positions.len() - 1,
            slot: sequence as u32,
            params: Arc::clone(&params),
            seed: 0,
            prompt_len: positions.end,
            masked: false,
            logprobs: None,
        };
        let batch =
            Batch { sequences: sequences.iter().enumerate().map(entry).collect(), ..Batch::default() };
        let draws = sequences.iter().enumerate().map(draw).filter(|_| drawn.is_some());
        self.runner.device().take_notes();
        let ticket =
            self.runner.submit(&batch, &Sampling { draws: draws.collect(), ..Sampling::default() })?;
        self.runner.wait(ticket)?;
        Ok(self.costs.of_all(&self.runner.device().take_notes()))
    }

    /// The numbers of tokens for which images are predicted: the usual one, and the largest one. None without a tower.
    pub fn image_tokens(&self) -> BTreeSet<usize> {
        let images = self.runner.limits().images;
        images.into_iter().flat_map(|images| [images.usual_tokens, images.tokens]).collect()
    }

    /// The dispatches that encode an image of `tokens` tokens. It is one row of tokens if it may be, so that it has exactly so
    /// many. Panics if the model has no tower.
    pub fn image(&mut self, tokens: usize) -> Result<Vec<StepDispatches>, RunnerError> {
        let (Some(costs), Some(images)) = (self.costs_of_tower, self.runner.limits().images) else {
            panic!("an image for a model without a tower")
        };
        let size = match images.sizes {
            ImageSizes::Fixed { side } => [side; 2],
            ImageSizes::ByTokens { unit, .. } => [tokens * unit, unit],
        };
        assert_eq!(images.tokens_of(size), Some(tokens), "an image of {size:?} pixels");
        self.runner.device().take_notes();
        self.runner.encode_image(0, size, &vec![0; images.pixel_bytes(tokens)])?;
        Ok(costs.of_all(&self.runner.device().take_notes()))
    }

    /// The steps that compute a prompt of `tokens` tokens and draw the answer's first id.
    pub fn prompt(&mut self, tokens: usize) -> Result<Vec<Vec<StepDispatches>>, RunnerError> {
        let most = self.runner.limits().max_batch_tokens;
        let starts = (0..tokens).step_by(most);
        starts
            .map(|start| {
                let end = (start + most).min(tokens);
                let drawn = (end == tokens).then_some(Drawn::Greedy);
                self.step(std::slice::from_ref(&(start..end)), drawn)
            })
            .collect()
    }
}

impl Costs {
    /// The dispatches, of which those with the same name and the same cost are counted together.
    fn of_all(&self, notes: &[Note]) -> Vec<StepDispatches> {
        let mut all: Vec<StepDispatches> = Vec::new();
        for note in notes {
            let (what, dispatch) = self.of(note);
            match all.iter_mut().find(|other| other.what == what && other.dispatch.costs(&dispatch)) {
                Some(same) => {
                    same.times += 1;
                    same.barriers += note.barriers;
                }
                None => all.push(StepDispatches { what, times: 1, barriers: note.barriers, dispatch }),
            }
        }
        all
    }

    /// Numbers of query heads and KV heads, and the dimension of a head.
    fn heads(&self, [num_heads, num_kv_heads, head_dim]: [u32; 3]) -> Heads {
        let [num_heads, num_kv_heads, head_dim] = [num_heads, num_kv_heads, head_dim].map(|n| n as usize);
        Heads { num_heads, num_kv_heads, head_dim, kv: self.types.kv }
    }

    fn experts(&self) -> Experts {
        self.layers.experts.expect("kernels of experts in a mixture")
    }

    /// The name and the cost of a recorded dispatch. Panics if the cost belongs to another pipeline or grid.
    fn of(&self, note: &Note) -> (&'static str, Dispatch) {
        let Types { projections, embedding, precision, .. } = self.types;
        let [x, y, _] = note.groups.map(|n| n as usize);
        let name = note.shader.name;
        let wants = Wants {
            floats: !name.ends_with("_int8"),
            blocks: name.ends_with("_int8") || name.ends_with("_both"),
        };
        let scheme = match note.label {
            "lm_head" => embedding,
            "laurel" | "stream projection" => KEPT,
            label if label.starts_with("per-layer") => KEPT,
            _ => projections,
        };
        let (what, dispatch) = match note.shader.kernel {
            "embed" => (note.label, cost::embed(embedding, note.push::<EmbedPush>().cols as usize, x)),
            "history" => ("history", cost::history(note.push::<HistoryPush>().tokens as usize)),
            "rms_norm" => {
                let width = note.push::<RmsNormPush>().dim as usize;
                let dispatch = match name {
                    "rms_norm_add" => cost::rms_norm_add(x, width, self.layers),
                    name if name.starts_with("rms_norm_gather") => cost::rms_norm_gather(x, width, wants),
                    name if name.starts_with("rms_norm_residual") => {
                        cost::residual(x, width, wants, self.layers, note.constants[1] == 1)
                    }
                    _ => cost::rms_norm(x, width, wants),
                };
                (note.label, dispatch)
            }
            "route" => {
                let dim = note.push::<RoutePush>().dim as usize;
                ("router", cost::route(self.experts(), x, dim))
            }
            "group_pairs" => {
                let GroupPairsPush { pairs, per_token, .. } = note.push();
                ("groups of pairs", cost::group_pairs(self.experts(), (pairs / per_token) as usize))
            }
            "combine" => {
                let dim = note.push::<CombinePush>().dim as usize;
                ("experts' sum", cost::combine(self.experts(), x, dim, note.constants == [1]))
            }
            "matmul" if note.constants[1] > 0 => {
                let MatmulPush { rows, cols, tokens: pairs, .. } = note.push();
                let (experts, kind) = (self.experts(), (None, note.constants[1]));
                let (shape, tokens) = ([rows as usize, cols as usize], pairs as usize / experts.per_token);
                (note.label, cost::experts(precision, scheme, &experts, shape, tokens, kind))
            }
            "fast_matmul" if note.constants.len() == LANE_CONSTANTS && note.constants[5] > 0 => {
                let FastMatmulPush { rows0, cols, tokens: pairs, .. } = note.push();
                let gated = (note.constants[1] == 1).then_some(self.layers.activation);
                let (experts, kind) = (self.experts(), (gated, note.constants[5]));
                let (shape, tokens) = ([rows0 as usize, cols as usize], pairs as usize / experts.per_token);
                (note.label, cost::experts(precision, scheme, &experts, shape, tokens, kind))
            }
            "matmul" => {
                let MatmulPush { rows, cols, tokens, .. } = note.push();
                let what = match note.label {
                    "qkv" => "q, k or v",
                    // Both have the same input, so there is no barrier before the second one.
                    "gate, up" if note.barriers > 0 => "gate_proj",
                    "gate, up" => "up_proj",
                    label => label,
                };
                let [cols, tokens] = [cols, tokens].map(|n| n as usize);
                (what, cost::matmul(precision, scheme, &[rows as usize], cols, tokens))
            }
            "fast_matmul" => {
                let FastMatmulPush { rows0, rows1, rows2, cols, tokens, .. } = note.push();
                let [cols, tokens] = [cols, tokens].map(|n| n as usize);
                let rows: Vec<usize> =
                    [rows0, rows1, rows2].into_iter().filter(|n| *n > 0).map(|n| n as usize).collect();
                let gated = note.constants[1] == 1;
                let what = if note.label == "qkv" && rows.len() < 3 { "q, k or v" } else { note.label };
                (
                    what,
                    match gated {
                        true => cost::gated(scheme, rows[0], cols, tokens, self.layers.activation),
                        false => cost::matmul(precision, scheme, &rows, cols, tokens),
                    },
                )
            }
            "qkv_store" => {
                let QkvStorePush { num_heads, num_kv_heads, head_dim, .. } = note.push();
                let heads = self.heads([num_heads, num_kv_heads, head_dim]);
                ("qkv_store", cost::qkv_store(&heads, x, self.layers))
            }
            "attention" => {
                let AttentionPush { window, num_kv_heads, .. } = note.push();
                let [group, head_dim, ..] = note.constants[..] else {
                    unreachable!("attention has constants")
                };
                let heads = self.heads([num_kv_heads * group, num_kv_heads, head_dim]);
                let items = note.array::<Item>("items", x);
                let is_of_tiles = match note.constants[..] {
                    [_, _, _] => name.starts_with("attention_tile"),
                    // The tiles of large heads have as many rows as the items of single tokens.
                    [_, _, _, ..] => items.iter().any(|item| item.tokens > 1),
                    _ => unreachable!("attention has constants"),
                };
                let what = match (is_of_tiles, note.label) {
                    (false, "sliding") => "attention, sliding",
                    (false, _) => "attention, full",
                    (true, "sliding") => "attention of tiles, sliding",
                    (true, _) => "attention of tiles, full",
                };
                let window = (window > 0).then_some(window as usize);
                (what, cost::attention(&heads, window, (note.shader, &note.constants), &items))
            }
            "attention_merge" => {
                let merges = note.array::<[u32; 2]>("merges", y);
                let partials = merges.iter().map(|[_, count]| *count as usize).sum();
                let what = match note.label {
                    "sliding" => "attention merged, sliding",
                    _ => "attention merged, full",
                };
                let AttentionMergePush { num_heads, fours, .. } = note.push();
                // The number of KV heads has no effect on a merge.
                let heads = self.heads([num_heads, num_heads, 4 * fours]);
                (what, cost::attention_merge(&heads, y, partials, wants))
            }
            "glu" => {
                let width = note.push::<GluPush>().width as usize;
                (
                    if note.label == "gate, up" { "glu" } else { note.label },
                    cost::glu(y, width, wants, self.layers.activation),
                )
            }
            "softcap" => {
                let width = note.push::<SoftcapPush>().width as usize;
                ("soft cap", cost::softcap(y, width))
            }
            "altup" => {
                let width = note.push::<AltupPush>().dim as usize;
                (note.label, cost::altup(x, width, name == "altup_correct"))
            }
            "streams" => {
                let width = note.push::<StreamsPush>().dim as usize;
                (note.label, cost::streams(x, width, name == "streams_merge"))
            }
            "cutoff" => (note.label, cost::cutoff(x, note.push::<CutoffPush>().width as usize)),
            "patches" => ("patches", cost::patches(y, note.push::<PatchesPush>().patch_size as usize)),
            "quantize" => ("quantize", cost::quantize(y, note.push::<QuantizePush>().width as usize)),
            "layer_norm" => {
                let width = note.push::<LayerNormPush>().dim as usize;
                ("add and norm", cost::layer_norm(x, width, wants, note.constants == [1]))
            }
            "activate" => {
                let width = note.push::<ActivatePush>().width as usize;
                ("activation", cost::activate(y, width, wants, self.layers.activation))
            }
            "average_pool" => {
                let AveragePoolPush { pool, width, .. } = note.push();
                let [pool, width] = [pool, width].map(|n| n as usize);
                ("pool", cost::average_pool(y, pool, width, note.constants == [1]))
            }
            "grid" => {
                let width = note.push::<GridPush>().width as usize;
                ("columns and rows", cost::grid(y, width, note.constants == [1]))
            }
            "sample" => {
                let vocab = note.push::<SamplePush>().vocab as usize;
                let rows = if ["sample_greedy", "sample_choice"].contains(&name) { x } else { y };
                let [greedy, filtered] = [Drawn::Greedy, Drawn::Filtered];
                let mut all =
                    cost::sample(rows, vocab, greedy).into_iter().chain(cost::sample(rows, vocab, filtered));
                (note.label, all.find(|dispatch| dispatch.shader.name == name).expect("a kernel of a draw"))
            }
            other => panic!("{name}: there is no cost of {other}"),
        };
        // The device computes the workgroups of experts.
        let is_of_experts = ["experts' gate, up", "experts' down"].contains(&note.label);
        let recorded: u64 = note.groups.iter().map(|n| u64::from(*n)).product();
        assert_eq!((dispatch.shader.name, &dispatch.constants), (name, &note.constants), "{what}");
        // The last round of a product's grid may have workgroups without work.
        let is_product = note.shader.kernel.ends_with("matmul");
        assert!(
            is_of_experts || recorded == dispatch.workgroups || is_product && recorded > dispatch.workgroups,
            "{what}: {note:?}"
        );
        if is_product && !is_of_experts {
            let weights =
                note.ranges.iter().filter(|range| range.class.is_weights()).map(|range| range.bytes);
            assert_eq!(weights.sum::<u64>(), dispatch.weight_bytes, "{what}: bytes of weights");
            assert_eq!(u64::from(note.groups[2]), dispatch.weight_passes, "{what}: reads of the weights");
        }
        (what, dispatch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::arch;
    use crate::model::tensors::Layer;

    fn of_27b() -> PaperModel {
        of_shape("gemma-3-27b")
    }

    fn of_shape(name: &str) -> PaperModel {
        let config = arch::shape(name).unwrap().spec();
        let types = Types {
            projections: Scheme::int4(128),
            embedding: Scheme::Int8Row,
            kv: KvDtype::F16,
            precision: Precision::Fast,
        };
        PaperModel::load(config, types, 128, 8192).unwrap()
    }

    #[test]
    fn a_layer_is_nine_dispatches_and_nine_barriers() {
        let work = of_27b().step(std::slice::from_ref(&(512..513)), Some(Drawn::Greedy)).unwrap();
        let sum = |of: fn(&StepDispatches) -> u64| work.iter().map(of).sum::<u64>();
        assert_eq!(sum(|w| w.times), 62 * 9 + 7);
        assert_eq!(sum(|w| w.barriers), 62 * 9 + 6);
        let times = |what| work.iter().find(|w| w.what == what).unwrap().times;
        assert_eq!((times("attention, sliding"), times("attention, full")), (52, 10));
    }

    #[test]
    fn one_token_of_a_27b_reads_as_many_bytes_as_its_weights_have() {
        let work = of_27b().step(std::slice::from_ref(&(512..513)), Some(Drawn::Greedy)).unwrap();
        let weights: u64 =
            work.iter().map(|w| w.times * w.dispatch.weight_bytes * w.dispatch.weight_passes).sum();
        // There are 25.6 G weights of 4.125 bits, and 1.41 G weights of 8 bits.
        assert_eq!(weights / 10_000_000, 1461, "{weights}");
        let kv: u64 = work.iter().map(|w| w.times * w.dispatch.kv_bytes).sum();
        assert_eq!(kv, 62 * (513 + 1) * 2 * 16 * 128 * 2);
    }

    /// Of 128 experts of 704 or 768, a token uses eight; sixteen tokens are expected to use 82.4 of them.
    #[test]
    fn experts_that_no_token_uses_are_not_read() {
        let bytes = |work: &[StepDispatches], what: &str| -> u64 {
            work.iter().filter(|w| w.what == what).map(|w| w.times * w.dispatch.weight_bytes).sum()
        };
        for (name, layers, hidden, width, dispatches) in
            [("gemma-4-26b-a4b", 30, 2816, 704, 13), ("qwen3-30b-a3b", 48, 2048, 768, 11)]
        {
            let mut model = of_shape(name);
            let one = model.step(std::slice::from_ref(&(512..513)), Some(Drawn::Greedy)).unwrap();
            let all: u64 = one.iter().map(|w| w.times).sum();
            assert_eq!(all / layers, dispatches, "{name}: {all} dispatches");
            let of_one = Scheme::int4(128).bytes(width, hidden);
            assert_eq!(bytes(&one, "experts' gate, up"), layers * 2 * 8 * of_one, "{name}");
            let sixteen = model.step(&vec![512..513; 16], Some(Drawn::Greedy)).unwrap();
            let share = bytes(&sixteen, "experts' gate, up") as f64 / bytes(&one, "experts' gate, up") as f64;
            assert!((share - 82.4 / 8.0).abs() < 0.01, "{name}: {share}");
            assert_eq!(
                sixteen.iter().filter(|w| w.what == "groups of pairs").map(|w| w.times).sum::<u64>(),
                layers
            );
        }
    }

    #[test]
    fn a_window_bounds_what_sliding_layers_read() {
        let work = of_27b().step(&[5000..5001, 10..20], Some(Drawn::Greedy)).unwrap();
        let kv = |what| work.iter().find(|w| w.what == what).unwrap().dispatch.kv_bytes;
        let row = 2 * 16 * 128 * 2;
        assert_eq!((kv("attention, sliding"), kv("attention of tiles, sliding")), (1024 * row, 20 * row));
        assert_eq!((kv("attention, full"), kv("attention of tiles, full")), (5001 * row, 20 * row));
    }

    /// An E4B reads 3.9 G weights in its layers at 4.125 bits, the head at 8, and matrices of per-layer embeddings in bf16.
    /// Of the table with 2.8 G weights, it reads a row.
    #[test]
    fn one_token_of_an_e4b_reads_a_row_of_its_per_layer_embeddings() {
        let mut model = of_shape("gemma-4-e4b");
        let work = model.step(std::slice::from_ref(&(512..513)), Some(Drawn::Greedy)).unwrap();
        let bytes = |what: &str| -> u64 {
            let all = work.iter().filter(|w| w.what == what);
            all.map(|w| w.times * w.dispatch.weight_bytes * w.dispatch.weight_passes).sum()
        };
        let all: u64 =
            work.iter().map(|w| w.times * w.dispatch.weight_bytes * w.dispatch.weight_passes).sum();
        let spec = arch::shape("gemma-4-e4b").unwrap().spec();
        let elements = |of: fn(&Layer<TensorSpec>) -> Vec<&TensorSpec>| -> u64 {
            spec.tensors.layers.iter().flat_map(of).map(TensorSpec::elements).sum()
        };
        let quantized = elements(|layer| layer.projections.iter().collect()) * 33 / 64;
        let kept = 2 * elements(|layer| layer.kept.iter().collect()) + 2 * 42 * 256 * 2560;
        let head = 262_144 * (2560 + 4);
        assert_eq!(bytes("per-layer gate") + bytes("per-layer projection"), 2 * 2 * 42 * 256 * 2560);
        assert_eq!(bytes("per-layer model projection"), 2 * 42 * 256 * 2560);
        let expected = (quantized + kept + head) as f64;
        assert!((all as f64 / expected - 1.0).abs() < 0.01, "{all} bytes, {expected} expected");
        // A step of a prompt that draws no id leaves out the last layers, as far as whole segments of four.
        let steps = model.prompt(200).unwrap();
        let gates = steps
            .iter()
            .map(|step| step.iter().filter(|w| w.what == "per-layer gate").map(|w| w.times).sum::<u64>());
        assert_eq!(Vec::from_iter(gates), [24, 42]);
        // The layers without keys of their own project queries alone.
        let stores = work.iter().filter(|w| w.what == "qkv_store").map(|w| w.times).sum::<u64>();
        assert_eq!(stores, 42);
    }

    /// The model with its tower.
    fn with_tower(name: &str, precision: Precision) -> PaperModel {
        let config = arch::shape(name).unwrap().spec_with_tower();
        let types = Types { projections: Scheme::Bf16, embedding: Scheme::Bf16, kv: KvDtype::F16, precision };
        PaperModel::load(config, types, 128, 8192).unwrap()
    }

    #[test]
    fn an_image_of_gemma_3_is_one_of_4096_patches() {
        for (precision, matrix, kv) in
            [(Precision::Fast, Scheme::Int8Row, KvDtype::F16), (Precision::F32, Scheme::Bf16, KvDtype::F32)]
        {
            let mut model = with_tower("gemma-3-4b", precision);
            assert_eq!(Vec::from_iter(model.image_tokens()), [256]);
            let work = model.image(256).unwrap();
            let of = |what: &str| -> Vec<_> { work.iter().filter(|w| w.what == what).collect() };
            let times = |what| of(what).iter().map(|w| w.times).sum::<u64>();
            // Attention and the product after it come in four parts, and the network in two.
            assert_eq!(["add and norm", "fc2", "out_proj"].map(times), [27 * 3 + 1, 27 * 2, 27 * 4]);
            // A tile walks over all 4096 patches, 64 at a time, and a head of 72 has 80 dimensions in tiles.
            let [attention] = of("attention of tiles, full")[..] else { panic!("parts that are alike") };
            assert_eq!((attention.times, attention.dispatch.trips), (27 * 4, 64.0));
            let head_dim = if precision == Precision::Fast { 80 } else { 72 };
            assert_eq!(attention.dispatch.kv_bytes, (2 * 4096 * 16 * kv.row_bytes(head_dim)) as u64);
            let bytes = |what| of(what).iter().map(|w| w.times * w.dispatch.weight_bytes).sum::<u64>();
            let of_one = |rows, cols| matrix.bytes(rows, cols);
            assert_eq!(bytes("fc1"), 2 * 27 * of_one(4304, 1152), "{precision}");
            assert_eq!(bytes("patch_embedding"), of_one(1152, 588), "{precision}");
        }
    }

    #[test]
    fn images_of_gemma_4_have_the_usual_and_the_largest_number_of_tokens() {
        let mut linear = with_tower("gemma-4-12b", Precision::Fast);
        assert_eq!(Vec::from_iter(linear.image_tokens()), [280, 1120]);
        let work = linear.image(280).unwrap();
        let times: Vec<(&str, u64)> = work.iter().map(|w| (w.what, w.times)).collect();
        let of_patches = [("patches", 1), ("add and norm", 1), ("patch_embedding", 1)];
        // Two norms of as many numbers, and the norm before the projection.
        let of_embeddings = [("add and norm", 2), ("columns and rows", 1), ("norm", 1), ("projection", 1)];
        assert_eq!(times, [&of_patches[..], &of_embeddings].concat());

        let mut transformer = with_tower("gemma-4-31b", Precision::Fast);
        for (tokens, of_attention, of_network) in [(280, 4, 2), (1120, 25, 5)] {
            let work = transformer.image(tokens).unwrap();
            let of = |what: &str| work.iter().filter(|w| w.what == what).map(|w| w.times).sum::<u64>();
            let times = ["qkv", "out_proj", "gate, up", "down_proj"].map(of);
            assert_eq!(times, [1, of_attention, of_network, of_network].map(|n| 27 * n), "{tokens} tokens");
        }
    }

    #[test]
    fn a_prompt_takes_steps_of_which_only_the_last_one_draws() {
        let steps = of_27b().prompt(300).unwrap();
        let draws: Vec<_> = steps.iter().map(|s| s.iter().any(|w| w.what == "sample")).collect();
        assert_eq!(draws, [false, false, true]);
    }
}
