//! The hot kernels at the shapes of the published models: one list of cases for measurements and tests.
//!
//! A case reports the minimum of bytes that it moves (each input and output once) and its operations; a multiply-add
//! counts as two. All keys and values are the same number.

use rand::Rng;
use rand::seq::index::sample;

use super::cost;
use crate::gpu::{Arena, Buffer, Class, GpuError, MemoryKind, Recorder, Uploader};
use crate::kernels::{
    Activations, Attention, AttentionShape, DrawArrays, Embedding, ExpertMatrices, Experts, Heads, Item,
    Kernels, KvCache, LOGPROB_WORDS, Logits, Matrices, Matrix, Operand, PairActivations, Partials, Peak,
    Quantized, RmsNorm, Router, Routing, Run, SampleRequest, ShareArrays, Shares, StepArrays, UploadError,
    Wants, draw_words,
};
use crate::model::memory::{MAX_SEQUENCES, partials};
use crate::model::rig::{Make, ROTATED_BYTES, Rig, SPAN, copies, gpu_error};
use crate::model::spec::{AttentionHeads, FeedForward, Mixture, ModelSpec};
use crate::tensor::{KvDtype, Precision, Scheme};

const BLOCK_SIZE: usize = 16;

/// One kernel at one shape. `tokens` is the number of rows of activations.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum KernelWork {
    Matmul {
        scheme: Scheme,
        rows: usize,
        cols: usize,
        tokens: usize,
    },
    Embed {
        scheme: Scheme,
        rows: usize,
        cols: usize,
        tokens: usize,
    },
    /// Attention of `tokens` tokens of each of `sequences` sequences, after `depth` other tokens.
    Attention {
        sequences: usize,
        tokens: usize,
        depth: usize,
        window: Option<usize>,
    },
    QkvStore {
        tokens: usize,
    },
    RmsNorm {
        width: usize,
        tokens: usize,
    },
    Residual {
        width: usize,
        tokens: usize,
    },
    /// The gate and the up product, and their gated product.
    Gated {
        scheme: Scheme,
        rows: usize,
        cols: usize,
        tokens: usize,
    },
    Glu {
        width: usize,
        tokens: usize,
    },
    /// The router of a mixture of experts.
    Route {
        tokens: usize,
    },
    /// The experts of a layer: the lists of pairs, the products, and the sums. Every expert is equally likely.
    Experts {
        scheme: Scheme,
        tokens: usize,
    },
    /// Draws from rows of logits.
    Sample {
        vocab: usize,
        rows: usize,
        top_k: u32,
        top_p: f32,
    },
}

/// Selects cases by model, scheme, tokens and depth.
#[derive(Debug, Clone)]
pub struct Choice {
    /// The model's name.
    pub name: String,
    pub spec: ModelSpec,
    /// Schemes of the layers' matrices.
    pub schemes: Vec<Scheme>,
    pub embedding: Scheme,
    pub kv: KvDtype,
    pub precision: Precision,
    /// Rows of activations, i.e. tokens of a step.
    pub tokens: Vec<usize>,
    /// Number of tokens before the tokens whose attention is computed.
    pub depths: Vec<usize>,
}

#[derive(Debug, Clone)]
pub struct Case {
    /// The case's name, unique among all cases.
    pub name: String,
    pub spec: ModelSpec,
    pub kv: KvDtype,
    pub precision: Precision,
    pub work: KernelWork,
}

impl Choice {
    /// The cases: a layer's matrices by name, and the output head; attention at the first token and deep in a context;
    /// all other kernels.
    pub fn cases(&self) -> Vec<Case> {
        let s = &self.spec;
        let [heads, kv_heads] = [s.heads().q_width(), s.heads().kv_width()];
        let has_dense = s.layers.iter().any(|layer| layer.feed_forward != FeedForward::Experts);
        let of_attention = [
            ("q_proj", heads, s.hidden_size),
            ("k_proj", kv_heads, s.hidden_size),
            ("o_proj", s.hidden_size, heads),
        ];
        let of_network = [
            ("gate_proj", s.intermediate_size, s.hidden_size),
            ("down_proj", s.hidden_size, s.intermediate_size),
        ];
        let of_network = of_network.into_iter().filter(|_| has_dense);
        let matrices: Vec<_> = of_attention.into_iter().chain(of_network).collect();
        let mut works: Vec<(String, KernelWork)> = Vec::new();
        for &tokens in &self.tokens {
            for &scheme in &self.schemes {
                for &(name, rows, cols) in &matrices {
                    let work = KernelWork::Matmul { scheme, rows, cols, tokens };
                    works.push((format!("matmul {name} {scheme} x {tokens}"), work));
                }
                if s.mixture.is_some() {
                    let work = KernelWork::Experts { scheme, tokens };
                    works.push((format!("experts {scheme} x {tokens}"), work));
                }
                if has_dense && self.precision.quantizes(scheme) {
                    let (rows, cols) = (s.intermediate_size, s.hidden_size);
                    let work = KernelWork::Gated { scheme, rows, cols, tokens };
                    works.push((format!("gated {scheme} x {tokens}"), work));
                }
            }
            let (scheme, rows, cols) = (self.embedding, s.vocab_size, s.hidden_size);
            let name = |what: &str| format!("{what} {scheme} x {tokens}");
            works.push((name("embed"), KernelWork::Embed { scheme, rows, cols, tokens }));
            // More than `MAX_SEQUENCES` tokens are a prompt. One id is drawn, after its last row.
            if tokens <= MAX_SEQUENCES {
                works.push((name("matmul head"), KernelWork::Matmul { scheme, rows, cols, tokens }));
                let decode =
                    |depth, window| KernelWork::Attention { sequences: tokens, tokens: 1, depth, window };
                for &depth in &self.depths {
                    works.push((format!("attention of {tokens} at {depth}"), decode(depth, None)));
                }
                if let Some(window) = s.window() {
                    let windowed = decode(2 * window, Some(window));
                    works.push((format!("attention of {tokens} in a window"), windowed));
                }
                let draw = |top_k, top_p| KernelWork::Sample { vocab: rows, rows: tokens, top_k, top_p };
                works.push((format!("sample greedy x {tokens}"), draw(0, 1.0)));
                works.push((format!("sample top_k top_p x {tokens}"), draw(64, 0.95)));
            }
            if tokens > 1 {
                let prompt = KernelWork::Attention { sequences: 1, tokens, depth: 0, window: None };
                works.push((format!("attention of a prompt of {tokens}"), prompt));
            }
            let width = s.hidden_size;
            works.push((format!("qkv_store x {tokens}"), KernelWork::QkvStore { tokens }));
            works.push((format!("rms_norm x {tokens}"), KernelWork::RmsNorm { width, tokens }));
            works.push((format!("residual x {tokens}"), KernelWork::Residual { width, tokens }));
            if has_dense {
                let work = KernelWork::Glu { width: s.intermediate_size, tokens };
                works.push((format!("glu x {tokens}"), work));
            }
            if s.mixture.is_some() {
                works.push((format!("route x {tokens}"), KernelWork::Route { tokens }));
            }
        }
        let case = |(name, work)| Case {
            name: format!("{} {name}, {}", self.name, self.precision),
            spec: s.clone(),
            kv: self.kv,
            precision: self.precision,
            work,
        };
        works.into_iter().map(case).collect()
    }
}

impl Case {
    /// Least bytes read and written: each input and each output once.
    pub fn bytes(&self) -> u64 {
        let heads = self.layer_heads();
        let (heads, layers) = (cost::Heads::of(&heads, self.kv), self.spec.layer_kind());
        let dispatch = match self.work {
            KernelWork::Matmul { scheme, rows, cols, tokens } => {
                cost::matmul(self.precision, scheme, &[rows], cols, tokens)
            }
            KernelWork::Gated { scheme, rows, cols, tokens } => {
                cost::gated(scheme, rows, cols, tokens, layers.activation)
            }
            KernelWork::Embed { scheme, cols, tokens, .. } => cost::embed(scheme, cols, tokens),
            KernelWork::Attention { sequences, tokens, depth, window } => {
                let all = sequences * tokens;
                let kv = sequences as u64 * heads.kv_bytes(&(depth..depth + tokens), window);
                // Partials between the dispatches are neither input nor output.
                return kv + (2 * 4 * all * self.layer_heads().q_width()) as u64;
            }
            KernelWork::QkvStore { tokens } => cost::qkv_store(&heads, tokens, layers),
            KernelWork::RmsNorm { width, tokens } => cost::rms_norm(tokens, width, self.wants()),
            KernelWork::Residual { width, tokens } => {
                cost::residual(tokens, width, self.wants(), layers, false)
            }
            KernelWork::Glu { width, tokens } => cost::glu(tokens, width, self.wants(), layers.activation),
            KernelWork::Route { tokens } => {
                cost::route(self.mixture().experts, tokens, self.spec.hidden_size)
            }
            KernelWork::Experts { scheme, tokens } => {
                let Mixture { experts, intermediate_size: width, .. } = self.mixture();
                let hidden = self.spec.hidden_size;
                let bytes = |rows, cols| scheme.bytes(rows, cols);
                let of_one = 2 * bytes(width, hidden) + bytes(hidden, width);
                // Results between the dispatches are neither input nor output.
                let weights = (experts.expected(tokens) * of_one as f64) as u64;
                return weights + (2 * 4 * tokens * hidden) as u64;
            }
            KernelWork::Sample { vocab, rows, top_k, .. } => {
                let drawn = if top_k > 0 { cost::Drawn::Filtered } else { cost::Drawn::Greedy };
                return cost::sample(rows, vocab, drawn).iter().map(|each| each.activation_bytes).sum();
            }
        };
        dispatch.weight_bytes + dispatch.kv_bytes + dispatch.activation_bytes
    }

    /// Operations of products, where a multiply-add counts as two. `None` for kernels that are limited by memory.
    pub fn ops(&self) -> Option<u64> {
        match self.work {
            KernelWork::Matmul { rows, cols, tokens, .. } => Some(2 * (rows * cols * tokens) as u64),
            KernelWork::Gated { rows, cols, tokens, .. } => Some(4 * (rows * cols * tokens) as u64),
            KernelWork::Experts { tokens, .. } => {
                let Mixture { experts, intermediate_size: width, .. } = self.mixture();
                Some(6 * (experts.pairs(tokens) * width * self.spec.hidden_size) as u64)
            }
            KernelWork::Attention { sequences, tokens, depth, window } => {
                let keys = |position: usize| (position + 1).min(window.unwrap_or(usize::MAX));
                let seen: usize = (depth..depth + tokens).map(keys).sum();
                Some(4 * (sequences * seen * self.layer_heads().q_width()) as u64)
            }
            _ => None,
        }
    }

    fn mixture(&self) -> Mixture {
        self.spec.mixture.expect("a case of a mixture")
    }

    /// The type of the case's result. With `Precision::Fast`, the next product is an integer product, so it is int8.
    fn wants(&self) -> Wants {
        let fast = self.precision == Precision::Fast;
        Wants { floats: !fast, blocks: fast }
    }

    /// The heads of the layers that the case is about: those with the window of its attention, or the first layer.
    fn layer_heads(&self) -> AttentionHeads {
        match self.work {
            KernelWork::Attention { window, .. } => self.spec.heads_in(window),
            _ => self.spec.heads(),
        }
    }

    fn heads(&self) -> Heads {
        let heads = self.layer_heads();
        Heads { group: heads.group(), head_dim: heads.head_dim, kv: self.kv }
    }
}

/// A function that records a dispatch for the n-th time.
type Record = Box<dyn Fn(&mut Recorder<'_>, usize)>;

/// A case whose buffers are on the device.
pub struct Prepared {
    record: Record,
    /// The buffer that the case writes, f32 or u32.
    pub output: Buffer,
}

impl Prepared {
    /// Records the case once, with copy `i` of rotated buffers.
    pub fn record(&self, recorder: &mut Recorder<'_>, i: usize) {
        (self.record)(recorder, i);
    }
}

impl Rig {
    /// Copy bandwidth of the device in bytes per second, with at most `bytes` per copy. Bytes read and bytes written
    /// both count. `None` if the device has no clock.
    pub fn copy_bytes_per_s(&mut self, bytes: u64, runs: usize) -> Result<Option<f64>, GpuError> {
        let mut arena = Arena::new(&self.device);
        let mut alloc = || arena.alloc(MemoryKind::Device, Class::Activations, bytes, "copied");
        let (from, to) = (alloc()?, alloc()?);
        self.run(|recorder| recorder.fill(&from, 0x1234_5678))?;
        let span = self.time(runs, &mut |recorder, _| recorder.copy(&from, &to, bytes))?;
        Ok(span.map(|span| 2.0 * bytes as f64 / span.seconds))
    }

    /// Rate of f32 multiply-adds in operations per second; each counts as two operations. `None` if the device has no
    /// clock.
    pub fn ops_per_s(&mut self, runs: usize) -> Result<Option<f64>, GpuError> {
        const WORKGROUPS: u32 = 1024;
        const ROUNDS: [u32; 2] = [32, 1024];
        let peak = Peak::new(&self.device)?;
        let mut arena = Arena::new(&self.device);
        let result = arena.alloc(MemoryKind::Device, Class::Activations, Peak::bytes(WORKGROUPS), "peak")?;
        let mut best = 0f64;
        // On a fast device, short chains would measure the start of workgroups. On a slow device, long chains would
        // take seconds.
        for rounds in ROUNDS {
            let span =
                self.time(runs, &mut |recorder, _| peak.record(recorder, &result, WORKGROUPS, rounds))?;
            let Some(span) = span else { return Ok(None) };
            let rate = Peak::ops(WORKGROUPS, rounds) as f64 / span.seconds;
            best = best.max(rate);
            if span.seconds > SPAN.as_secs_f64() / 4.0 {
                break;
            }
        }
        Ok(Some(best))
    }

    /// Compiles a case's pipelines, and fills its buffers on the device.
    pub fn prepare(&mut self, case: &Case) -> Result<Prepared, GpuError> {
        let kernels = self.kernels(case)?;
        let mut make = self.make();
        let layer_heads = case.layer_heads();
        let [heads, kv_heads] = [layer_heads.q_width(), layer_heads.kv_width()];
        let (record, output): (Record, Buffer) = match case.work {
            KernelWork::Matmul { scheme, rows, cols, tokens } => {
                let matrices = make.matrices(scheme, rows, cols, case.bytes())?;
                let wants = kernels.wants(&matrices);
                let (x, y) = (make.operand(&kernels, wants, tokens, cols)?, make.activations(tokens, rows)?);
                let output = y.buffer.clone();
                let record = move |r: &mut Recorder<'_>, i: usize| {
                    kernels.matmul(r, &[(&matrices[i % matrices.len()], &y)], &x, tokens);
                };
                (Box::new(record), output)
            }
            KernelWork::Gated { scheme, rows, cols, tokens } => {
                let pairs = make.matrices(scheme, rows, cols, case.bytes())?;
                let pairs = [pairs, make.matrices(scheme, rows, cols, case.bytes())?];
                let x = make.operand(&kernels, case.wants(), tokens, cols)?;
                let products = [make.activations(tokens, rows)?, make.activations(tokens, rows)?];
                let (y, output) = make.result(case.wants(), tokens, rows)?;
                let record = move |r: &mut Recorder<'_>, i: usize| {
                    let each = pairs.each_ref().map(|matrices| &matrices[i % matrices.len()]);
                    kernels.gated(r, each, &x, products.each_ref(), &y, tokens);
                };
                (Box::new(record), output)
            }
            KernelWork::Embed { scheme, rows, cols, tokens } => {
                let matrix = make.matrices(scheme, rows, cols, ROTATED_BYTES)?.remove(0);
                let ids: Vec<u32> = (0..tokens).map(|_| make.rng.random_range(0..rows as u32)).collect();
                let (ids, sampled) = (make.words(&ids)?, make.words(&[0u32])?);
                let embedding = make.embedding(matrix)?;
                let out = make.activations(tokens, cols)?;
                let output = out.buffer.clone();
                let record = move |r: &mut Recorder<'_>, _| {
                    kernels.embed(r, &embedding, &ids, &sampled, &out, tokens);
                };
                (Box::new(record), output)
            }
            KernelWork::Attention { sequences, tokens, depth, window } => {
                let layers = make.attention(case, sequences, depth + tokens, window, case.bytes())?;
                let shape = layers[0].shape;
                let step = make.step(&shape, sequences, tokens, depth)?;
                let all = sequences * tokens;
                let room = partials(all);
                let mut slots = |slots| make.activations(slots, shape.partial_width());
                let between = Partials { single: slots(room.single)?, tiles: slots(room.tiles)? };
                let q = make.activations(all, heads)?;
                let (y, output) = make.result(case.wants(), all, heads)?;
                let record = move |r: &mut Recorder<'_>, i: usize| {
                    kernels.attention(r, &layers[i % layers.len()], (&q, &between), &step, &y, all);
                };
                (Box::new(record), output)
            }
            KernelWork::QkvStore { tokens } => {
                let layer = make.attention(case, tokens, 1, None, ROTATED_BYTES)?.remove(0);
                let step = make.step(&layer.shape, tokens, 1, 0)?;
                let q = make.activations(tokens, heads)?;
                let [k, v] = [make.activations(tokens, kv_heads)?, make.activations(tokens, kv_heads)?];
                let output = q.buffer.clone();
                let record = move |r: &mut Recorder<'_>, _| {
                    kernels.qkv_store(r, &layer, [&q, &k, &v], &step, tokens);
                };
                (Box::new(record), output)
            }
            KernelWork::RmsNorm { width, tokens } | KernelWork::Residual { width, tokens } => {
                let (x, hidden) = (make.activations(tokens, width)?, make.activations(tokens, width)?);
                let (y, output) = make.result(case.wants(), tokens, width)?;
                let norm = make.norm(width)?;
                let post_norm = case.spec.layer_kind().has_post_norms.then(|| norm.clone());
                let adds = matches!(case.work, KernelWork::Residual { .. });
                let record = move |r: &mut Recorder<'_>, _| match adds {
                    true => kernels.residual(r, &x, (post_norm.as_ref(), 1.0), (&hidden, &norm), &y, tokens),
                    false => kernels.rms_norm(r, &x, &norm, &y, tokens),
                };
                (Box::new(record), output)
            }
            KernelWork::Glu { width, tokens } => {
                let (gate, up) = (make.activations(tokens, width)?, make.activations(tokens, width)?);
                let (mut y, mut output) = make.result(case.wants(), tokens, width)?;
                if y.floats.is_some() {
                    output = gate.buffer.clone();
                    y = Operand::floats(&gate);
                }
                let record = move |r: &mut Recorder<'_>, _| kernels.glu(r, &gate, &up, &y, tokens);
                (Box::new(record), output)
            }
            KernelWork::Route { tokens } => {
                let (experts, hidden) = (case.mixture().experts, case.spec.hidden_size);
                let x = make.activations(tokens, hidden)?;
                let (matrix, norm) = (make.activations(experts.count, hidden)?.buffer, make.norm(hidden)?);
                let router = Router { matrix, norm, factor: 1.0, scales: None };
                let routing = make.routing(&experts, tokens)?;
                let output = routing.weights.clone();
                let record = move |r: &mut Recorder<'_>, _| kernels.route(r, &x, &router, &routing, tokens);
                (Box::new(record), output)
            }
            KernelWork::Experts { scheme, tokens } => {
                let Mixture { experts, intermediate_size: width, .. } = case.mixture();
                let (hidden, rows) = (case.spec.hidden_size, experts.pair_rows(tokens));
                // One copy: with few tokens, most of it is not read again soon.
                let mut matrix = |rows, cols| make.whole(scheme, experts.count * rows, cols);
                let [gate, up, down] =
                    [matrix(width, hidden)?, matrix(width, hidden)?, matrix(hidden, width)?];
                let x = make.operand(&kernels, kernels.wants([&gate]), tokens, hidden)?;
                let [gates, ups] = [make.activations(rows, width)?, make.activations(rows, width)?];
                let blocks = Quantized::new(make.filled(Quantized::bytes(rows, width), 0)?, width);
                let gated = Operand::new(kernels.wants([&down]), &gates, &blocks);
                let (out, y) = (make.activations(rows, hidden)?, make.activations(tokens, hidden)?);
                let routing = make.routing(&experts, tokens)?;
                let output = y.buffer.clone();
                let record = move |r: &mut Recorder<'_>, _| {
                    let matrices = ExpertMatrices { gate: &gate, up: &up, down: &down };
                    let to = PairActivations { gate: &gates, up: &ups, gated: &gated, out: &out };
                    kernels.group_pairs(r, matrices, &routing, tokens);
                    kernels.expert_products(r, matrices, &x, &to, &routing, tokens);
                    kernels.combine(r, &out, &routing, None, &y, tokens);
                };
                (Box::new(record), output)
            }
            KernelWork::Sample { vocab, rows, top_k, top_p } => {
                let (logits, draws, requests) = make.draws(vocab, rows, top_k, top_p)?;
                let sampled = make.words(&vec![0u32; rows])?;
                let output = draws.ids.clone();
                let record =
                    move |r: &mut Recorder<'_>, _| kernels.sample(r, &logits, &draws, &sampled, &requests);
                (Box::new(record), output)
            }
        };
        Ok(Prepared { record, output })
    }

    fn kernels(&self, case: &Case) -> Result<Kernels, GpuError> {
        let scheme = match case.work {
            KernelWork::Matmul { scheme, .. }
            | KernelWork::Embed { scheme, .. }
            | KernelWork::Gated { scheme, .. }
            | KernelWork::Experts { scheme, .. } => scheme,
            _ => Scheme::F32,
        };
        let gated = matches!(case.work, KernelWork::Gated { .. }).then_some(scheme).into_iter().collect();
        let experts = matches!(case.work, KernelWork::Experts { .. }).then_some(scheme).into_iter().collect();
        let layers = case.spec.layer_kind();
        let (embeddings, head) = (vec![scheme], Some(scheme));
        let matrices = Matrices { layers, gated, embeddings, head, experts, ..Matrices::default() };
        Kernels::new(&self.device, &matrices, &[case.heads()], case.precision)
    }
}

impl Make<'_> {
    /// An operand for a kernel's result, and the buffer that it is written to.
    fn result(&mut self, wants: Wants, rows: usize, width: usize) -> Result<(Operand, Buffer), GpuError> {
        let floats = self.activations(rows, width)?;
        let blocks = Quantized::new(self.filled(Quantized::bytes(rows, width), 0)?, width);
        let written = if wants.blocks { &blocks.buffer } else { &floats.buffer }.clone();
        Ok((Operand::new(wants, &floats, &blocks), written))
    }

    fn norm(&mut self, width: usize) -> Result<RmsNorm, GpuError> {
        Ok(RmsNorm { weight: self.filled(4 * width as u64, 1f32.to_bits())?, eps: 1e-6 })
    }

    /// Random experts of tokens, with equal weights, and the lists of one token.
    fn routing(&mut self, experts: &Experts, tokens: usize) -> Result<Routing, GpuError> {
        let &Experts { count, per_token, .. } = experts;
        let pairs = experts.pairs(tokens);
        let mut chosen: Vec<u32> = Vec::new();
        for _ in 0..tokens {
            chosen.extend(sample(&mut self.rng, count, per_token).iter().map(|expert| expert as u32));
        }
        let items: Vec<u32> = (0..).zip(&chosen).flat_map(|(place, expert)| [*expert, place, 1, 0]).collect();
        let places: Vec<u32> = (0..pairs as u32).collect();
        let all = self.filled(Routing::bytes(pairs).iter().sum(), 0)?;
        Ok(Routing {
            experts: self.words(&chosen)?,
            weights: self.words(&vec![1.0 / per_token as f32; pairs])?,
            positions: self.words(&places)?,
            items: self.words(&items)?,
            ..Routing::new(&all, pairs)
        })
    }

    fn embedding(&mut self, matrix: Matrix) -> Result<Embedding, GpuError> {
        let mut uploader = Uploader::<UploadError>::new(&self.rig.device)?;
        let embedding = Embedding::new(&mut self.arena, &mut uploader, matrix, 1.0).map_err(gpu_error)?;
        uploader.finish().map_err(gpu_error)?;
        Ok(embedding)
    }

    /// Copies of attention layers for rotation. Their caches hold `sequences` sequences of `len` positions each.
    fn attention(
        &mut self,
        case: &Case,
        sequences: usize,
        len: usize,
        window: Option<usize>,
        bytes: u64,
    ) -> Result<Vec<Attention>, GpuError> {
        let (s, heads) = (&case.spec, case.layer_heads());
        let blocks = sequences * len.div_ceil(BLOCK_SIZE);
        let block_bytes = case.kv.block_bytes(BLOCK_SIZE * heads.num_key_value_heads, heads.head_dim);
        let cache_bytes = (blocks * block_bytes) as u64;
        let shape = AttentionShape {
            num_heads: heads.num_attention_heads,
            num_kv_heads: heads.num_key_value_heads,
            head_dim: heads.head_dim,
            block_size: BLOCK_SIZE,
            max_blocks: len.div_ceil(BLOCK_SIZE),
            window,
        };
        let rope =
            self.filled((4 * len.next_multiple_of(BLOCK_SIZE) * heads.head_dim) as u64, 0.5f32.to_bits())?;
        let layers = s.layer_kind();
        let norm = self.norm(heads.head_dim)?;
        let qk_norms = layers.has_qk_norms.then(|| [norm.clone(), norm]);
        let biases = match layers.has_biases {
            true => {
                let bias = self.filled(4 * heads.q_width() as u64, 0.5f32.to_bits())?;
                Some([bias.clone(), bias.clone(), bias])
            }
            false => None,
        };
        // Two small f16 numbers. Read as int8 or as f32, the word is small as well.
        let word = 0x2e01_2e01;
        let mut layer = || {
            let cache =
                KvCache { keys: self.filled(cache_bytes, word)?, values: self.filled(cache_bytes, word)? };
            let (qk_norms, biases, rope) = (qk_norms.clone(), biases.clone(), rope.clone());
            let q_scale = s.score_scale as f32;
            Ok(Attention {
                shape,
                qk_norms,
                norm_eps: 1e-6,
                biases,
                rope,
                q_scale,
                shares_cache: false,
                cache,
            })
        };
        (0..copies(bytes)).map(|_| layer()).collect()
    }

    /// A step of `tokens` tokens of each of `sequences` sequences, after `depth` other tokens. Each sequence has its
    /// own blocks, in order.
    fn step(
        &mut self,
        shape: &AttentionShape,
        sequences: usize,
        tokens: usize,
        depth: usize,
    ) -> Result<StepArrays, GpuError> {
        let max_blocks = (depth + tokens).div_ceil(BLOCK_SIZE);
        let of_each = |f: &dyn Fn(usize, usize) -> usize| -> Vec<u32> {
            let all = (0..sequences).flat_map(|s| (depth..depth + tokens).map(move |p| (s, p)));
            all.map(|(s, p)| f(s, p) as u32).collect()
        };
        let tables: Vec<u32> = (0..(sequences * max_blocks) as u32).collect();
        let all = sequences * tokens;
        let run = |s: usize| Run { row: s * tokens, start: depth, tokens, sequence: s, sees_to: None };
        let runs: Vec<Run> = (0..sequences).map(run).collect();
        let shares = Shares::new(shape, &runs, all, all, partials(all));
        let mut items = |items: &[Item]| (!items.is_empty()).then(|| self.words(items)).transpose();
        let (single, tiles) = (items(&shares.single)?, items(&shares.tiles)?);
        let groups = self.words(&shares.groups(shape.num_kv_heads))?;
        let merges = self.words(&shares.merges)?;
        Ok(StepArrays {
            shares: ShareArrays { single, tiles, groups, merges },
            ids: self.words(&of_each(&|s, _| s))?,
            positions: self.words(&of_each(&|_, p| p))?,
            sequence_of: self.words(&of_each(&|s, _| s))?,
            slot_mapping: self.words(&of_each(&|s, p| s * max_blocks * BLOCK_SIZE + p))?,
            block_tables: self.words(&tables)?,
        })
    }

    fn draws(
        &mut self,
        vocab: usize,
        rows: usize,
        top_k: u32,
        top_p: f32,
    ) -> Result<(Logits, DrawArrays, Vec<SampleRequest>), GpuError> {
        let requests: Vec<SampleRequest> = (0..rows)
            .map(|row| SampleRequest {
                temperature: if top_k > 0 { 1.0 } else { 0.0 },
                top_k,
                top_p,
                repetition_penalty: 1.0,
                position: row as u32,
                slot: row as u32,
                ..SampleRequest::default()
            })
            .collect();
        let raw = self.activations(rows, vocab)?;
        let adjusted = Activations::new(self.filled(Activations::bytes(rows, vocab), 0)?, vocab);
        let draws = DrawArrays {
            requests: self.words(&requests)?,
            bias: self.filled(8, 0)?,
            masks: self.filled(4, 0)?,
            ids: self.filled(4 * rows as u64, 0)?,
            logprobs: self.filled((4 * LOGPROB_WORDS * rows) as u64, 0)?,
        };
        let scratch =
            Activations::new(self.filled(Activations::bytes(rows, draw_words(vocab)), 0)?, draw_words(vocab));
        Ok((Logits { raw, adjusted, scratch, vocab }, draws, requests))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(work: KernelWork) -> Case {
        let spec = crate::model::arch::shape("gemma-3-27b").expect("a shape").spec();
        Case { name: "x".into(), spec, kv: KvDtype::F16, precision: Precision::F32, work }
    }

    #[test]
    fn bytes_and_operations_are_those_of_the_arithmetic() {
        // gate_proj of the 27B in int4-g128 has half a byte for each weight, and 2 bytes for each 128 of them.
        let gate =
            case(KernelWork::Matmul { scheme: Scheme::int4(128), rows: 21_504, cols: 5376, tokens: 1 });
        let weights = 21_504 * 5376;
        assert_eq!(gate.bytes(), weights / 2 + weights / 64 + 4 * (21_504 + 5376));
        assert_eq!(gate.ops(), Some(2 * weights));
        // The case moves the activation in int8 with a scale and sums for each 32 columns, both matrices, and the
        // result in int8.
        let gate = Case { precision: Precision::Fast, ..gate };
        assert_eq!(gate.bytes(), weights / 2 + weights / 64 + 4 * 21_504 + 5376 / 32 * 40);
        let work = KernelWork::Gated { scheme: Scheme::int4(128), rows: 21_504, cols: 5376, tokens: 1 };
        let gated = Case { work, ..gate };
        assert_eq!(gated.bytes(), 2 * (weights / 2 + weights / 64) + (21_504 + 5376) / 32 * 40);
        assert_eq!(gated.ops(), Some(4 * weights));
        // The case moves 16 KV heads of 128 in f16, keys and values, for 2049 positions, and 32 heads of queries and of
        // results.
        let deep = case(KernelWork::Attention { sequences: 3, tokens: 1, depth: 2048, window: None });
        assert_eq!(deep.bytes(), 3 * (2049 * 16 * 128 * 2 * 2 + 2 * 4 * 32 * 128));
        assert_eq!(deep.ops(), Some(3 * 2049 * 32 * 128 * 4));
        let windowed =
            case(KernelWork::Attention { sequences: 1, tokens: 1, depth: 2048, window: Some(1024) });
        assert_eq!(windowed.bytes(), 1024 * 16 * 128 * 2 * 2 + 2 * 4 * 32 * 128);
        assert_eq!(windowed.ops(), Some(1024 * 32 * 128 * 4));
        let prompt = case(KernelWork::Attention { sequences: 1, tokens: 4, depth: 0, window: None });
        assert_eq!(prompt.ops(), Some((1 + 2 + 3 + 4) * 32 * 128 * 4));
    }

    #[test]
    fn every_case_has_a_name_of_its_own() {
        let choice = |name| Choice {
            name: str::to_owned(name),
            spec: crate::model::arch::shape(name).expect("a shape").spec(),
            schemes: vec![Scheme::int4(32), Scheme::Int8Row],
            embedding: Scheme::Int8Row,
            kv: KvDtype::F16,
            precision: Precision::Fast,
            tokens: vec![1, 8, 128],
            depths: vec![2048, 8192],
        };
        let cases: Vec<Case> = ["gemma-3-4b", "gemma-3-27b", "gemma-4-26b-a4b", "qwen3-30b-a3b"]
            .into_iter()
            .flat_map(|name| choice(name).cases())
            .collect();
        let mut names: Vec<&str> = cases.iter().map(|case| case.name.as_str()).collect();
        names.sort_unstable();
        let all = names.len();
        names.dedup();
        assert_eq!(names.len(), all);
        assert!(cases.iter().all(|case| case.bytes() > 0));
    }
}
