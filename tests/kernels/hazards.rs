//! Results must not depend on accidental ordering of GPU commands. A driver that runs commands one after the other
//! hides a missing barrier. Therefore these tests run the commands between two barriers in other orders, and all
//! results must have the same bits. Then each write that was derived from a shader is omitted in turn, as if the
//! derivation were wrong, and the same checks must detect it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use unicorn::gpu::{Buffer, Device, DevicePolicy, Need, Order, Recorder, Rehearsal, Shader};
use unicorn::kernels::{
    Activations, AltUp, Attention, AttentionBy, AttentionTile, ExpertMatrices, Experts, GridTables, Heads,
    HiddenAct, History, Kernels, KvCache, LAST_SAMPLED, LOGPROB_WORDS, LayerKind, LayerNorm, Operand,
    PairActivations, Peak, PixelScale, Quantized, RmsNorm, Router, Routing, Shares, StepArrays,
    StreamKernels, Tiles, VisionKernels, Wants, shaders,
};
use unicorn::model::load::LoadOptions;
use unicorn::model::{Runner, SamplingParams};
use unicorn::npu::kernels::{GatheredKeys, OffloadKernels};
use unicorn::tensor::{KvDtype, Precision, Scheme};

use crate::support::driver::{Driver, plain_sequence};
use crate::support::goldens::{Goldens, all_logits, drafted, load_on};
use crate::support::kernel_bench::{
    Adjusted, BODIES, Bench, EACH_KIND, Paged, STORED, adjusted, emulated_tiles, shape,
};
use crate::support::texts::{Texts, penalties, prompts_of_tiny_a};
use crate::support::{data, goldens, in_turn, policy, wants_all};

const ORDERS: [Order; 2] = [Order::Reversed, Order::Shuffled(1)];

/// A device that no other test uses at the same time, because the order of its recordings is changed. The next test
/// reuses its compiled pipelines.
fn device_with_order(order: Order) -> MutexGuard<'static, Arc<Device>> {
    /// Two devices, so at most two tests run at the same time.
    static DEVICES: LazyLock<[Mutex<Arc<Device>>; 2]> =
        LazyLock::new(|| [(); 2].map(|()| Mutex::new(Device::open(&policy()).unwrap())));
    let free = DEVICES.iter().find_map(|device| device.try_lock().ok());
    let device = free.unwrap_or_else(|| DEVICES[0].lock().unwrap_or_else(PoisonError::into_inner));
    device.rehearse(Rehearsal { order, ..Rehearsal::default() });
    device
}

/// Each model has keys and values of one type, or with `UNICORN_TEST_KERNELS=all` of every type.
#[test]
fn golden_logits_have_the_same_bits_in_any_order_between_barriers() {
    // Qwen 2 has biases, and no norms of queries, keys or results.
    // Gemma 3n has several residual streams, and per-layer embeddings.
    let models = [
        "gemma3/tiny-a",
        "gemma3/tiny-b",
        "gemma3/tiny-27b-ratio",
        "families/tiny-qwen2",
        "families/tiny-gemma3n",
    ];
    for (i, variant) in models.into_iter().enumerate() {
        let goldens = Goldens::open(&data(variant));
        let prompts = ["short", "mid", "long"].map(|prompt| goldens.tokens(&format!("tokens.{prompt}")));
        for &kv in in_turn(&KvDtype::ALL, i) {
            let options = LoadOptions { kv, ..LoadOptions::default() };
            let mut model = goldens::load(&data(variant), &options);
            let expected = prompts.each_ref().map(|tokens| all_logits(&mut model, tokens));
            for order in ORDERS {
                let device = device_with_order(order);
                for max_batch_tokens in [256, 7] {
                    let options = LoadOptions { max_batch_tokens, ..options };
                    let mut model = load_on(&device, &data(variant), &options);
                    for (tokens, expected) in prompts.iter().zip(&expected) {
                        let got = all_logits(&mut model, tokens);
                        assert!(got == *expected, "{variant}, {kv}, {order:?}, chunks of {max_batch_tokens}");
                    }
                }
            }
        }
    }
}

#[test]
fn answers_are_the_same_in_any_order_between_barriers() {
    let prompts = prompts_of_tiny_a();
    let options = LoadOptions { sequences: 16, max_context: Some(512), ..LoadOptions::default() };
    let drawn = (SamplingParams { temperature: 0.8, top_k: 40, ..penalties() }, 4711);
    let mut model = goldens::load(&data("gemma3/tiny-a"), &options);
    let [greedy, drawn] = [(SamplingParams::GREEDY, 0), drawn]
        .map(|params| Texts::new(&mut model, params, prompts.clone(), 40));
    // The orders take turns.
    for &order in in_turn(&ORDERS, 0) {
        let device = device_with_order(order);
        greedy.check_all(&mut load_on(&device, &data("gemma3/tiny-a"), &options));
    }
    for &order in in_turn(&ORDERS, 1) {
        // This run uses draft tokens of another model.
        drawn.check_all(&mut drafted(&device_with_order(order), &options));
    }
}

type Record = Box<dyn Fn(&Kernels, &mut Recorder<'_>)>;

/// Commands that are recorded one after the other, and all buffers that they write.
struct Chain {
    name: String,
    record: Record,
    written: Vec<Buffer>,
}

impl Chain {
    fn new(
        name: impl Into<String>,
        written: Vec<Buffer>,
        record: impl Fn(&Kernels, &mut Recorder<'_>) + 'static,
    ) -> Chain {
        Chain { name: name.into(), record: Box::new(record), written }
    }

    /// The chain with the name of chains that these bodies run.
    fn of(mut self, bodies: Tiles) -> Chain {
        if bodies == Tiles::Cpu {
            self.name.insert_str(0, ON_A_CPU);
        }
        self
    }

    /// The contents of one of the written buffers, copied out by the same recording. Only one buffer is copied, because
    /// a copy of another one could add a barrier before this one.
    fn run(&self, b: &mut Bench, which: usize) -> Vec<u8> {
        let from = &self.written[which];
        let host = b.readback(from.size());
        b.run(|k, r| {
            (self.record)(k, r);
            r.copy(from, &host, from.size());
        });
        let mut bytes = vec![0u8; host.size() as usize];
        host.read(0, &mut bytes);
        bytes
    }
}

/// Makes a chain on a bench. The seed of the bench is fixed, so each call makes the same chain.
type Maker = Box<dyn Fn(&mut Bench) -> Chain>;

/// The integer schemes of the chains of products: one in `make test`. A missing barrier concerns buffers, whatever is in
/// them.
fn integer_schemes() -> &'static [Scheme] {
    if wants_all("UNICORN_TEST_KERNELS") { &STORED } else { &EACH_KIND[2..3] }
}

/// Every chain: a kernel together with others that read its output.
fn makers() -> Vec<Maker> {
    let mut all: Vec<Maker> = Vec::new();
    for scheme in [&[Scheme::F32, Scheme::F16, Scheme::Bf16][..], integer_schemes()].concat() {
        for bodies in BODIES {
            all.push(Box::new(move |b| products(b, scheme, bodies).of(bodies)));
        }
    }
    for (i, &scheme) in integer_schemes().iter().enumerate() {
        let (counted, emulated) = (Tiles::COUNTED, emulated_tiles(i));
        for (tiles, gated) in [(counted, false), (counted, true), (Tiles::Cpu, false), (emulated, false)] {
            all.push(Box::new(move |b| fast_products(b, scheme, tiles, gated)));
        }
    }
    all.push(Box::new(sums));
    all.push(Box::new(softcap));
    for which in 0..STREAM_KERNELS {
        push_each_body(&mut all, move |b| streams(b, which));
    }
    for (tokens, kernels) in [(1, 1), (3, 2), (1, 3), (3, 3)] {
        push_each_body(&mut all, move |b| mixture(b, tokens, kernels));
    }
    // Penalties and log probabilities run with draws and without, because a barrier for one of them hides a missing
    // barrier of another.
    for name in [
        "draws with penalties",
        "draws with log probabilities",
        "draws only",
        "draws of the highest only",
        "draws' log probabilities only",
    ] {
        all.push(Box::new(move |b| draws(b, name)));
    }
    all.push(Box::new(history));
    all.push(Box::new(transfers));
    for (floats, blocks) in [(true, false), (false, true), (true, true)] {
        for which in 0..NORMS {
            push_each_body(&mut all, move |b| norms(b, Wants { floats, blocks }, which));
        }
    }
    for (floats, blocks) in [(true, false), (false, true), (true, true)] {
        for which in 0..3 {
            push_each_body(&mut all, move |b| tower(b, Wants { floats, blocks }, which));
        }
    }
    push_each_body(&mut all, grids);
    push_each_body(&mut all, quantizing);
    // The attention of single tokens, of tiles, or no attention follows the store, for the same reason.
    let tile = AttentionTile::emulated([16, 16, 16]).expect("the kernel can use it");
    for kv in KvDtype::ALL {
        for attending in [Some(&[(3, 1), (21, 1), (5, 1)][..]), Some(&[(3, 3), (21, 21)]), None] {
            push_each_body(&mut all, move |b| attention(b, kv, attending, LayerKind::default()));
            if attending.is_some() && kv != KvDtype::F32 {
                all.push(Box::new(move |b| {
                    b.attention = AttentionBy::Subgroups(tile);
                    attention(b, kv, attending, LayerKind::default())
                }));
            }
        }
        let layers = LayerKind { has_biases: true, has_qk_norms: false, ..LayerKind::default() };
        push_each_body(&mut all, move |b| attention(b, kv, Some(&[(3, 1), (21, 1), (5, 1)]), layers));
    }
    KvDtype::ALL.into_iter().for_each(|kv| push_each_body(&mut all, move |b| offload(b, kv)));
    all
}

/// Kernels that have a separate CPU body run with both bodies.
fn push_each_body(all: &mut Vec<Maker>, make: impl Fn(&mut Bench) -> Chain + Copy + 'static) {
    for bodies in BODIES {
        all.push(Box::new(move |b| {
            b.make_bodies(bodies);
            make(b).of(bodies)
        }));
    }
}

fn products(b: &mut Bench, scheme: Scheme, bodies: Tiles) -> Chain {
    let (rows, cols, tokens) = (70, 64, 9);
    b.make_tiles(scheme, Precision::F32, bodies, false);
    let values = b.random(rows * cols, 1.0);
    let matrix = match scheme.grouping(cols) {
        Some(_) => {
            let stored = b.stored(rows, cols, scheme);
            b.matrix_of(&stored.tensor(), scheme, u64::MAX)
        }
        None => b.matrix(&values, rows, cols, scheme, u64::MAX),
    };
    let embedding = b.embedding(matrix, 2.0);
    let ids: Vec<u32> = (0..tokens as u32).map(|t| t * 7).collect();
    let (ids, x, y) = (b.upload(&ids), b.empty(tokens, cols), b.empty(tokens, rows));
    let written = vec![x.buffer.clone(), y.buffer.clone()];
    Chain::new(format!("embedding and product, {scheme}"), written, move |k, r| {
        k.embed(r, &embedding, &ids, &ids, &x, tokens);
        k.matmul(r, &[(embedding.matrix(), &y)], &Operand::floats(&x), tokens);
    })
}

/// Three matrices in one call; or a pair with its GeGLU, and a product of the result.
fn fast_products(b: &mut Bench, scheme: Scheme, tiles: Tiles, gated: bool) -> Chain {
    // With subgroups, the tokens are more than one set of lanes computes together.
    let is_wide = matches!(tiles, Tiles::Gpu(gpu) if gpu.has_subgroups());
    let (cols, tokens) = (96, if is_wide { 40 } else { 9 });
    b.make_tiles(scheme, Precision::Fast, tiles, gated);
    let stored = b.stored(cols, cols, scheme);
    let matrix = b.matrix_of(&stored.tensor(), scheme, u64::MAX);
    let x = b.random(tokens * cols, 1.0);
    let (x, quantized, between) =
        (b.activations(&x, cols), b.quantized(tokens, cols), b.quantized(tokens, cols));
    let y = [(); 3].map(|()| b.empty(tokens, cols));
    let written = y[..if gated { 1 } else { 3 }].iter().map(|y| y.buffer.clone()).collect();
    let what = if gated { "gated" } else { "three" };
    Chain::new(
        format!("products in int8, {}, {what}, {scheme}, {tiles:?}", scheme.variant()),
        written,
        move |k, r| {
            k.quantize(r, &x, &quantized, tokens);
            let [operand, between] = [&quantized, &between].map(Operand::blocks);
            if gated {
                k.gated(r, [&matrix; 2], &operand, [&y[1], &y[2]], &between, tokens);
                k.matmul(r, &[(&matrix, &y[0])], &between, tokens);
            } else {
                k.matmul(r, &[(&matrix, &y[0]), (&matrix, &y[1]), (&matrix, &y[2])], &operand, tokens);
            }
        },
    )
}

/// The buffers of the blocks and of the scales of this many rows.
fn planes(quantized: &Quantized, padded: usize) -> [Buffer; 2] {
    let blocks = 2 * padded * quantized.width.div_ceil(32);
    let buffer = &quantized.buffer;
    [buffer.slice(0, 32 * blocks as u64), buffer.slice(32 * blocks as u64, 8 * blocks as u64)]
}

fn quantizing(b: &mut Bench) -> Chain {
    let (rows, width) = (3, 100);
    let x = b.random(rows * width, 1.0);
    let (x, y) = (b.activations(&x, width), b.quantized(rows, width));
    let written = planes(&y, 4).to_vec();
    Chain::new("quantizing", written, move |k, r| k.quantize(r, &x, &y, rows))
}

/// Kernels of [`norms`].
const NORMS: usize = 8;

/// One of the kernels that write f32, int8 or both, after a kernel that writes its input. No other barrier may hide
/// that its own is missing.
fn norms(b: &mut Bench, wants: Wants, which: usize) -> Chain {
    let (rows, dim) = (3, 100);
    if which >= 5 {
        let has_expert_norm = which == 7;
        b.make_layers(LayerKind { has_post_norms: false, has_expert_norm, ..LayerKind::default() });
    }
    let [x, base] = [(); 2].map(|()| b.random(rows * dim, 1.0));
    let weight = b.random(dim, 1.0);
    let (x, hidden) = (b.activations(&x, dim), b.activations(&base, dim));
    let norm = RmsNorm { weight: b.upload(&weight), eps: 1e-6 };
    let index = b.upload(&[2u32, 0]);
    let mut operand = || Operand::new(wants, &b.empty(rows, dim), &b.quantized(rows, dim));
    let (mut to, second) = (operand(), operand());
    if which == 4 && wants.floats {
        // The kernel works in place.
        to.floats = Some(hidden.clone());
    }
    let mut written = Vec::new();
    // The gather reads two rows.
    let padded = if which == 2 { 2 } else { 4 };
    let outputs = match which {
        3 | 6 => &[][..],
        7 => &[&to, &second],
        _ => &[&to],
    };
    for to in outputs {
        written.extend(to.floats.as_ref().map(|floats| floats.buffer.clone()));
        written.extend(to.blocks.iter().flat_map(|blocks| planes(blocks, padded)));
    }
    if matches!(which, 1 | 3 | 5 | 6 | 7) {
        written.push(hidden.buffer.clone());
    }
    Chain::new(format!("norms and activation, {which}, {wants:?}"), written, move |k, r| {
        k.rms_norm(r, &hidden, &norm, &Operand::floats(&x), rows);
        match which {
            0 => k.rms_norm(r, &x, &norm, &to, rows),
            1 => k.residual(r, &x, (Some(&norm), 1.0), (&hidden, &norm), &to, rows),
            2 => k.rms_norm_gather(r, &x, &index, &norm, &to, 2),
            3 => k.rms_norm_add(r, &x, (Some(&norm), 1.0), &hidden, rows),
            5 => k.residual(r, &x, (None, 1.0), (&hidden, &norm), &to, rows),
            6 => k.rms_norm_add(r, &x, (None, 1.0), &hidden, rows),
            7 => k.residual_twice(r, &x, None, &hidden, [(&norm, &to), (&norm, &second)], rows),
            _ => k.glu(r, &hidden, &x, &to, rows),
        }
    })
}

/// One of the kernels of a vision tower that write f32, int8 or both, after a kernel that writes its input.
fn tower(b: &mut Bench, wants: Wants, which: usize) -> Chain {
    let (rows, dim) = (3, 100);
    let own = VisionKernels::new(&b.device, b.bodies(), HiddenAct::GeluTanh).unwrap();
    let [x, base] = [(); 2].map(|()| b.random(rows * dim, 1.0));
    let [weight, bias] = [(); 2].map(|()| b.random(dim, 1.0));
    let (x, hidden) = (b.activations(&x, dim), b.activations(&base, dim));
    let first = RmsNorm { weight: b.upload(&weight), eps: 1e-6 };
    let norm = LayerNorm { weight: b.upload(&weight), bias: b.upload(&bias), eps: 1e-6 };
    let mut to = Operand::new(wants, &b.empty(rows, dim), &b.quantized(rows, dim));
    if which == 2 && wants.floats {
        // The kernel works in place.
        to.floats = Some(x.clone());
    }
    let mut written = Vec::new();
    written.extend(to.floats.as_ref().map(|floats| floats.buffer.clone()));
    written.extend(to.blocks.iter().flat_map(|blocks| planes(blocks, 4)));
    match which {
        0 => written.push(hidden.buffer.clone()),
        1 => written.push(x.buffer.clone()),
        _ => {}
    }
    let bias = b.upload(&bias);
    Chain::new(format!("tower, {which}, {wants:?}"), written, move |k, r| {
        k.rms_norm(r, &hidden, &first, &Operand::floats(&x), rows);
        match which {
            0 => own.add_and_norm(r, (&x, &bias), (&hidden, &norm), &to, rows),
            1 => own.norm(r, (&x, &bias), &norm, &to, rows),
            _ => own.activate(r, (&x, &bias), &to, rows),
        }
    })
}

/// Patches, to which the vectors of their columns and rows are added, and the means of squares of them.
fn grids(b: &mut Bench) -> Chain {
    let (grid, patch_size) = ([4, 2], 3);
    let (patches, width) = (grid[0] * grid[1], 3 * patch_size * patch_size);
    let own = VisionKernels::new(&b.device, b.bodies(), HiddenAct::GeluTanh).unwrap();
    let size = grid.map(|side| side * patch_size);
    let pixels: Vec<u8> = (0..3 * size[0] * size[1]).map(|i| (i * 37 % 256) as u8).collect();
    let pixels = b.upload(&pixels);
    let [of_columns, of_rows] = [(); 2].map(|()| b.random(4 * width, 1.0));
    let [of_columns, of_rows] = [of_columns, of_rows].map(|values| b.activations(&values, width));
    let tables = GridTables { of_columns, of_rows };
    let scale = PixelScale { factors: [0.01; 3], shifts: [-1.0; 3] };
    let [rows, positions, means] = [patches, patches, patches / 4].map(|rows| b.empty(rows, width));
    let written = [&rows, &positions, &means].map(|each| each.buffer.clone()).to_vec();
    Chain::new("grids", written, move |_, r| {
        own.patches(r, (&pixels, size), patch_size, &scale, &rows);
        own.add_grid(r, &tables, grid, &rows);
        own.average_pool(r, (&rows, grid), 2, None, &means);
        own.grid(r, &tables, grid, &positions);
    })
}

fn sums(b: &mut Bench) -> Chain {
    let (tokens, width) = (5, 70);
    let x = b.random(tokens * width, 1.0);
    let x = b.activations(&x, width);
    let moments = b.upload(&vec![1f32; width]);
    let pooled = b.empty(1, width);
    let (peak, ones) = (Peak::new(&b.device).unwrap(), b.poisoned(Peak::bytes(1) as usize));
    let written = vec![moments.clone(), pooled.buffer.clone(), ones.clone()];
    Chain::new("sums", written, move |k, r| {
        k.pool(r, &x, &pooled, true, tokens);
        k.pool(r, &x, &pooled, false, 2);
        // These commands run after the barrier of the kernel before.
        peak.record(r, &ones, 1, 16);
        k.moments(r, &x, &moments, tokens);
    })
}

fn softcap(b: &mut Bench) -> Chain {
    let (rows, width) = (3, 100);
    let x = b.random(rows * width, 1.0);
    let (x, logits) = (b.activations(&x, width), b.empty(rows, width));
    let norm = RmsNorm { weight: b.upload(&vec![1f32; width]), eps: 1e-6 };
    Chain::new("soft cap", vec![logits.buffer.clone()], move |k, r| {
        k.rms_norm(r, &x, &norm, &Operand::floats(&logits), rows);
        k.softcap(r, &logits, 0.5, rows);
    })
}

/// Kernels of [`streams`].
const STREAM_KERNELS: usize = 5;

/// One of the kernels of residual streams, after kernels that write its input.
fn streams(b: &mut Bench, which: usize) -> Chain {
    let (rows, dim) = (3, 100);
    let own = StreamKernels::new(&b.device, b.bodies()).unwrap();
    let inputs = [(); 4].map(|()| b.random(rows * dim, 1.0)).map(|x| b.activations(&x, dim));
    let all = [(); 4].map(|()| b.empty(rows, dim));
    let [predicted, first] = [(); 2].map(|()| b.empty(rows, dim));
    let norm = RmsNorm { weight: b.upload(&vec![1f32; dim]), eps: 1e-6 };
    let [router, prediction, correction, output_scale] =
        [4 * dim, 64, 16, dim].map(|count| b.random(count, 10.0)).map(|values| b.upload(&values));
    let altup = AltUp { router_norm: norm.clone(), router, prediction, correction, output_scale };
    let mut written: Vec<Buffer> = all.iter().map(|stream| stream.buffer.clone()).collect();
    match which {
        0 => written.push(predicted.buffer.clone()),
        1 => written.extend([predicted.buffer.clone(), first.buffer.clone()]),
        4 => written.truncate(1),
        _ => {}
    }
    Chain::new(format!("streams, {which}"), written, move |k, r| {
        // With one stream written before, no other barrier hides that one is missing.
        for (x, stream) in inputs.iter().zip(&all[..if which == 4 { 1 } else { 4 }]) {
            k.rms_norm(r, x, &norm, &Operand::floats(stream), rows);
        }
        match which {
            0 => own.predict(r, &altup, all.each_ref(), &predicted, rows),
            1 => {
                k.rms_norm(r, &inputs[1], &norm, &Operand::floats(&predicted), rows);
                own.correct(r, &altup, all.each_ref(), &predicted, &first, rows);
            }
            2 => own.spread(r, all.each_ref(), rows),
            3 => own.merge(r, all.each_ref(), rows),
            _ => own.cutoff(r, &all[0], 0.5, rows),
        }
    })
}

/// The router, the groups of pairs, and what the experts compute: the first one, two or all three. With one token, the
/// router writes the lists that `group_pairs` writes for more.
fn mixture(b: &mut Bench, tokens: usize, kernels: usize) -> Chain {
    let (count, hidden, width) = (5, 64, 32);
    let experts = Experts { count, per_token: 2, renormalizes: true };
    b.make_experts(experts, Scheme::F32, Precision::F32, b.bodies());
    let shapes = [(width, hidden), (width, hidden), (hidden, width)];
    let [gate, up, down] = shapes.map(|(rows, cols)| {
        let values = b.random(count * rows * cols, 1.0);
        b.matrix(&values, count * rows, cols, Scheme::F32, u64::MAX)
    });
    let (x, matrix) = (b.random(tokens * hidden, 1.0), b.random(count * hidden, 1.0));
    let norm = RmsNorm { weight: b.upload(&vec![1f32; hidden]), eps: 1e-6 };
    let router = Router { matrix: b.upload(&matrix), norm: norm.clone(), factor: 1.0, scales: None };
    let (x, stream) = (b.activations(&x, hidden), b.empty(tokens, hidden));
    let rows = experts.pair_rows(tokens);
    let [of_gate, of_up] = [(); 2].map(|()| b.empty(rows, width));
    let (out, y) = (b.empty(rows, hidden), b.empty(tokens, hidden));
    let pairs = experts.pairs(tokens);
    let arrays = b.poisoned(Routing::bytes(pairs).iter().sum::<u64>() as usize);
    let routing = Routing::new(&arrays, pairs);
    let words = |buffer: &Buffer, count: usize| buffer.slice(0, 4 * count as u64);
    let lists =
        [words(&routing.rows, pairs), words(&routing.positions, pairs), words(&routing.items, 4 * pairs)];
    let written = match kernels {
        1 => [routing.used.clone(), words(&routing.experts, pairs), words(&routing.weights, pairs)]
            .into_iter()
            .chain(lists)
            .collect(),
        2 => [routing.used.clone(), words(&routing.groups, 6)].into_iter().chain(lists).collect(),
        _ => vec![y.buffer.clone()],
    };
    Chain::new(format!("experts of {tokens} tokens, {kernels} kernels"), written, move |k, r| {
        k.rms_norm(r, &x, &norm, &Operand::floats(&stream), tokens);
        k.route(r, &stream, &router, &routing, tokens);
        if kernels == 1 {
            return;
        }
        let matrices = ExpertMatrices { gate: &gate, up: &up, down: &down };
        k.group_pairs(r, matrices, &routing, tokens);
        if kernels == 2 {
            return;
        }
        let (input, gated) = (Operand::floats(&stream), Operand::floats(&of_gate));
        let to = PairActivations { gate: &of_gate, up: &of_up, gated: &gated, out: &out };
        k.expert_products(r, matrices, &input, &to, &routing, tokens);
        k.combine(r, &out, &routing, None, &y, tokens);
    })
}

fn draws(b: &mut Bench, name: &'static str) -> Chain {
    let adjusts = name.ends_with("penalties");
    let (samples, reports) = (!name.contains("' log"), name.contains("log"));
    let is_greedy = name.contains("highest");
    let rows = 12;
    let Adjusted { mut drawing, .. } = adjusted(b, 258, rows);
    for request in &mut drawing.requests {
        request.logprobs = 3;
        request.temperature *= if is_greedy { 0.0 } else { 1.0 };
    }
    drawing.arrays.requests = b.upload(&drawing.requests);
    // The ids are initialized here, because no draw has written them.
    drawing.arrays.ids = b.upload(&vec![0u32; rows]);
    drawing.arrays.logprobs = b.upload(&vec![0u32; rows * LOGPROB_WORDS]);
    let between = b.poisoned(drawing.logits.adjusted.buffer.size() as usize);
    let written = vec![
        drawing.arrays.logprobs.clone(),
        drawing.slots.clone(),
        drawing.arrays.ids.clone(),
        between.clone(),
        drawing.logits.adjusted.buffer.clone(),
    ];
    Chain::new(name, written, move |k, r| {
        let (logits, arrays, requests) = (&drawing.logits, &drawing.arrays, &drawing.requests);
        if adjusts {
            k.adjust(r, logits, arrays, &drawing.history, requests);
            r.copy(&logits.adjusted.buffer, &between, between.size());
        }
        if samples {
            k.sample(r, logits, arrays, &drawing.slots, requests);
        }
        if adjusts {
            k.clear_adjusted(r, logits, arrays, &drawing.history, requests);
        }
        if reports {
            k.logprobs(r, logits, arrays, rows);
        }
    })
}

fn history(b: &mut Bench) -> Chain {
    let (slots, slot_len, tokens) = (3, 10, 4);
    let ids: Vec<u32> = vec![11, 12, LAST_SAMPLED | 1, 14];
    let step = StepArrays {
        ids: b.upload(&ids),
        positions: b.upload(&[3u32, 4, 0, 9]),
        sequence_of: b.upload(&[0u32, 0, 1, 2]),
        slot_mapping: b.poisoned(4),
        block_tables: b.poisoned(4),
        shares: b.shares(&Shares::default(), 1),
    };
    let (slots_of, sampled) = (b.upload(&[2u32, 1, 0]), b.upload(&[7u32, 55, 7]));
    let history = History { ids: b.poisoned(4 * slots * slot_len), slot_len };
    let written = vec![history.ids.clone()];
    Chain::new("history", written, move |k, r| {
        k.history(r, &step, &slots_of, &sampled, &history, tokens);
    })
}

fn transfers(b: &mut Bench) -> Chain {
    let [one, two, three] = [(); 3].map(|()| b.poisoned(256));
    let written = vec![one.clone(), two.clone(), three.clone()];
    Chain::new("copies and fills", written, move |_, r| {
        r.fill(&one, 7);
        r.copy(&one, &two, 256);
        r.copy(&two, &three, 128);
        r.fill(&one, 8);
    })
}

/// Queries, keys and values of a batch, and attention with an empty cache.
fn attention_inputs(b: &mut Bench, paged: &Paged, kv: KvDtype) -> ([Activations; 3], Attention) {
    let tokens = paged.tokens().len();
    let inputs = [4 * 32, 2 * 32, 2 * 32].map(|width| {
        let rows = b.random(tokens * width, 1.0);
        b.activations(&rows, width)
    });
    let zeros = vec![0u8; paged.empty_cache(kv).len()];
    let cache = KvCache { keys: b.upload(&zeros), values: b.upload(&zeros) };
    let norm = RmsNorm { weight: b.upload(&[1f32; 32]), eps: 1e-6 };
    let rope: Vec<f32> = (0..64 * 16).flat_map(|i| [(i as f32).cos(), (i as f32).sin()]).collect();
    let (rope, q_norm, k_norm) = (b.upload(&rope), norm.clone(), norm);
    (
        inputs,
        Attention {
            shape: paged.shape,
            qk_norms: Some([q_norm, k_norm]),
            norm_eps: 1e-6,
            biases: None,
            rope,
            q_scale: 0.2,
            shares_cache: false,
            cache,
        },
    )
}

/// `attending` has the length of each sequence and the number of its tokens in the step.
fn attention(b: &mut Bench, kv: KvDtype, attending: Option<&[(usize, usize)]>, layers: LayerKind) -> Chain {
    let shape = shape(4, 2, 32, 16, None);
    b.make_layers(layers);
    b.make_heads(&shape, kv);
    let paged = Paged::new(b, shape, attending.unwrap_or(&[(3, 3), (21, 21)]));
    let tokens = paged.tokens().len();
    let ([q, k, v], mut attention) = attention_inputs(b, &paged, kv);
    if !layers.has_qk_norms {
        attention.qk_norms = None;
    }
    attention.biases = layers.has_biases.then(|| [4, 2, 2].map(|heads| b.upload(&vec![0.5f32; heads * 32])));
    let (q_width, step) = (4 * 32, paged.arrays(b));
    // The result of attention is requested in f32, in int8 and in both.
    let wants = Wants { floats: kv != KvDtype::F16, blocks: kv != KvDtype::F32 };
    let y = Operand::new(wants, &b.empty(tokens, q_width), &b.quantized(tokens, q_width));
    let partials = b.partials(&shape, paged.room());
    let cache = &attention.cache;
    let mut written = vec![q.buffer.clone(), cache.keys.clone(), cache.values.clone()];
    let attends = attending.is_some();
    if attends {
        // All partials have the same type here, because a barrier for one type would also order the other.
        let is_single = step.shares.single.is_some();
        assert!(is_single != step.shares.tiles.is_some());
        let written_partials = if is_single { &partials.single } else { &partials.tiles };
        written.push(written_partials.buffer.clone());
        written.extend(y.floats.as_ref().map(|floats| floats.buffer.clone()));
        // Rows are padded to a power of two.
        written.extend(y.blocks.iter().flat_map(|blocks| planes(blocks, tokens.next_power_of_two())));
    }
    let what = match attending {
        None => "alone",
        Some(tokens) if tokens.iter().all(|(_, tokens)| *tokens == 1) => "and attention",
        Some(_) => "and attention of tiles",
    };
    let biases = if layers.has_biases { ", biases" } else { "" };
    Chain::new(format!("keys, values {what}, {kv}, {}{biases}", b.attention), written, move |kernels, r| {
        kernels.qkv_store(r, &attention, [&q, &k, &v], &step, tokens);
        if attends {
            kernels.attention(r, &attention, (&q, &partials), &step, &y, tokens);
        }
    })
}

/// Queries, keys and values for the NPU, and partial outputs of the NPU.
fn offload(b: &mut Bench, kv: KvDtype) -> Chain {
    let shape = shape(4, 2, 32, 16, None);
    b.make_heads(&shape, kv);
    // The tokens of the second sequence fill one tile and one token of the next.
    let paged = Paged::new(b, shape, &[(3, 1), (30, 17)]);
    let (tokens, rows) = (paged.tokens().len(), 1..18);
    let ([q, k, v], attention) = attention_inputs(b, &paged, kv);
    let step = paged.arrays(b);
    let partials = b.partials(&shape, paged.room());
    let heads = Heads { group: 2, head_dim: 32, kv };
    let kernels = OffloadKernels::new(&b.device, heads).unwrap();
    let (offloaded, row_stride, stride) = (2, 20, 32);
    let [queries, output] = [2, 4].map(|bytes| b.poisoned(bytes * 4 * row_stride * 32));
    let keys = [(); 2].map(|()| b.poisoned(2 * offloaded * stride * 32));
    let span = GatheredKeys { first: 0, count: 30, first_seen: 0, stride };
    let written = [&queries, &keys[0], &keys[1], &partials.single.buffer, &partials.tiles.buffer];
    let written = written.map(Clone::clone).to_vec();
    let of_rows = step.rows(&rows);
    let table = 4 * shape.max_blocks as u64;
    Chain::new(format!("offload, {kv}"), written, move |of_model, r| {
        r.fill(&output, 0x3f80_0000);
        of_model.qkv_store(r, &attention, [&q, &k, &v], &step, tokens);
        kernels.queries(r, &shape, (&q.rows(&rows), rows.len()), offloaded, (&queries, row_stride));
        let blocks = step.block_tables.slice(table, table);
        kernels.cache(r, &attention, (&blocks, &span), offloaded, [&keys[0], &keys[1]]);
        let merges = (&of_rows.shares.merges, rows.len());
        kernels.partials(r, &shape, (&output, row_stride), offloaded, merges, &partials);
    })
}

/// Runs every chain of kernels on a device that reorders commands.
struct Chains {
    device: Arc<Device>,
    makers: Vec<Maker>,
    /// The name of each chain, and the number of places that it writes.
    all: Vec<(String, usize)>,
}

impl Chains {
    fn on(device: &Arc<Device>) -> Chains {
        let mut chains = Chains { device: device.clone(), makers: makers(), all: Vec::new() };
        for which in 0..chains.makers.len() {
            let (_, chain) = chains.made(which);
            chains.all.push((chain.name, chain.written.len()));
        }
        chains
    }

    fn made(&self, which: usize) -> (Bench, Chain) {
        // Uploads are recorded too, but not reordered.
        let rehearsal = self.device.rehearsed();
        self.device.rehearse(Rehearsal::default());
        let mut b = Bench::on(&self.device, which as u64);
        let chain = self.makers[which](&mut b);
        self.device.rehearse(rehearsal);
        (b, chain)
    }

    /// Runs the chains whose name begins with `only`. Calls `each` with the name of the chain, the number of each
    /// written buffer and its bytes, until it returns false.
    fn run(&self, only: &str, each: &mut dyn FnMut(&str, usize, Vec<u8>) -> bool) {
        let wanted = self.all.iter().enumerate().filter(|(_, (name, _))| name.starts_with(only));
        for (which, (name, places)) in wanted {
            for place in 0..*places {
                let (mut b, chain) = self.made(which);
                if !each(name, place, chain.run(&mut b, place)) {
                    return;
                }
            }
        }
    }

    fn every_place(&self) -> Places {
        let mut all = Places::new();
        self.run("", &mut |name, place, bytes| {
            all.push((name.to_owned(), place, bytes));
            true
        });
        all
    }
}

type Places = Vec<(String, usize, Vec<u8>)>;

#[test]
fn kernels_compute_the_same_in_any_order_between_barriers() {
    let expected = Chains::on(&device_with_order(Order::AsRecorded)).every_place();
    assert!(expected.len() > 50, "{} places", expected.len());
    for order in ORDERS {
        let got = Chains::on(&device_with_order(order)).every_place();
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().zip(&expected) {
            assert!(got == expected, "{}, place {}, {order:?}", got.0, got.1);
        }
    }
}

/// Prefix of the names of chains that run the CPU bodies.
const ON_A_CPU: &str = "on a CPU: ";

/// The scheme's name in the name of a shader that begins with `kernel`.
fn variant_of<'a>(shader: &'a str, kernel: &str) -> Option<&'a str> {
    let variant = shader.strip_prefix(kernel)?;
    let ways = ["_on_cpu", "_in_tiles", "_in_emulated_tiles"];
    Some(ways.iter().find_map(|way| variant.strip_suffix(way)).unwrap_or(variant))
}

/// The prefix of the names of the chains that run a shader.
fn chains_of(shader: &str) -> String {
    if let Some(variant) = variant_of(shader, "fast_matmul_") {
        return format!("products in int8, {variant},");
    }
    let on_cpu = if shader.ends_with("_on_cpu") { ON_A_CPU } else { "" };
    let chains = match shader.split('_').next().expect("a name") {
        "embed" | "matmul" => "embedding and product",
        "quantize" => "quantizing",
        "rms" | "glu" => "norms",
        "moments" | "pool" | "peak" => "sums",
        "layer" | "activate" => "tower",
        "patches" | "grid" | "average" => "grids",
        "adjust" | "sample" | "logprobs" => "draws",
        "history" => "history",
        "softcap" => "soft cap",
        "altup" | "streams" | "cutoff" => "streams",
        "route" | "group" | "combine" => "experts",
        "copy" | "fill" => "copies",
        "qkv" | "attention" => "keys, values",
        "offload" => "offload",
        other => panic!("no chain runs {other}"),
    };
    format!("{on_cpu}{chains}")
}

/// Whether a shader reads weights of a scheme for which [`makers`] makes no chain.
fn reads_an_omitted_scheme(shader: &str) -> bool {
    let kernels = ["fast_matmul_", "matmul_", "embed_"];
    let variant = kernels.iter().find_map(|kernel| variant_of(shader, kernel));
    let is_in = |schemes: &[Scheme]| schemes.iter().any(|scheme| Some(&scheme.variant()[..]) == variant);
    is_in(&STORED) && !is_in(integer_schemes())
}

/// The least number of derived writes whose omission a forward pass detects. With one weight type and one cache type, it
/// has three norms, products, attention, activation, and the kernel that clears penalties. Queries, keys and values are
/// written together, so one barrier orders all of them.
const LEAST_BY_THE_MODEL: usize = 7;

/// If a derived write is omitted, the result of a chain of kernels must change. If a forward pass runs the kernel
/// between others in one recording, the result of the model must change too.
#[test]
fn each_missing_derived_write_is_detected() {
    let device = device_with_order(Order::Reversed);
    let mut writes: Vec<(&'static str, &'static str)> = vec![("copy", "to"), ("fill", "buffer")];
    // On this device, matrix products of subgroups are emulated by the same shader source.
    let can_run = |shader: &&&Shader| {
        !shader.needs.contains(&Need::CooperativeMatrix) && !reads_an_omitted_scheme(shader.name)
    };
    for shader in shaders::ALL.iter().filter(can_run) {
        let written = shader.pointers.iter().filter(|(_, access)| access.writes());
        writes.extend(written.map(|(pointer, _)| (shader.name, *pointer)));
    }
    let goldens = Goldens::open(&data("gemma3/tiny-a"));
    let tokens = goldens.tokens("tokens.mid");
    let answers = |device: &Arc<Device>| -> (Vec<f32>, Vec<u32>) {
        let options = LoadOptions { max_context: Some(256), ..LoadOptions::default() };
        let mut model = load_on(device, &data("gemma3/tiny-a"), &options);
        let logits = all_logits(&mut model, &tokens);
        let limits = model.limits().clone();
        let params = SamplingParams { temperature: 0.7, ..penalties() };
        let mut sequence = plain_sequence(0, tokens.clone(), params, 6);
        sequence.request.seed = 3;
        let run = Driver::new(&mut model, limits).run(vec![sequence]);
        (logits, run.answers[&0].clone())
    };
    let chains = Chains::on(&device);
    let expected = (chains.every_place(), answers(&device));
    // The model need not detect the omission for kernels that it does not run. Copies and fills have no kernel name.
    let profiled = Device::open(&DevicePolicy { profile: true, ..policy() }).unwrap();
    answers(&profiled);
    let kernels = profiled.take_profile().kernels;
    let is_used = |shader: &str| {
        ["copy", "fill"].contains(&shader)
            || kernels.keys().any(|kernel| kernel.split(' ').next() == Some(shader))
    };
    println!("{} derived writes; for each omitted write, the chain that detects it:", writes.len());
    let mut by_the_model = 0;
    for (shader, pointer) in writes {
        device.rehearse(Rehearsal {
            order: Order::Reversed,
            forgotten: Some((shader, pointer)),
            ..Rehearsal::default()
        });
        let (of, mut noticing) = (chains_of(shader), None);
        chains.run(&of, &mut |name, place, bytes| {
            let same = expected.0.iter().any(|(n, p, b)| (n.as_str(), *p) == (name, place) && *b == bytes);
            noticing = (!same).then(|| name.to_owned());
            same
        });
        let noticing = noticing
            .unwrap_or_else(|| panic!("{shader}.{pointer} was omitted, and no chain of {of} detected it"));
        // Errors are ignored here: numbers computed from garbage may be NaN, which ends a run.
        let model = || catch_unwind(AssertUnwindSafe(|| answers(&device)));
        // `make test` runs the model only until it detected enough.
        let runs = by_the_model < LEAST_BY_THE_MODEL || wants_all("UNICORN_TEST_KERNELS");
        let noticed = runs && is_used(shader) && model().map_or(true, |got| got != expected.1);
        by_the_model += usize::from(noticed);
        let model = if noticed { "; logits and answers of tiny-a" } else { "" };
        println!("  {shader}.{pointer}: {noticing}{model}");
        device.rehearse(Rehearsal { order: Order::Reversed, ..Rehearsal::default() });
    }
    assert!(by_the_model >= LEAST_BY_THE_MODEL, "the model detected only {by_the_model}");
}

#[test]
#[should_panic(expected = "overlaps the memory of another address")]
fn a_dispatch_with_two_addresses_of_the_same_memory_is_refused() {
    let mut b = Bench::new(1);
    let x = b.empty(2, 64);
    let norm = RmsNorm { weight: b.upload(&[1f32; 64]), eps: 1e-6 };
    b.run(|k, r| k.rms_norm(r, &x, &norm, &Operand::floats(&x), 2));
}

#[test]
fn a_recording_counts_dispatches_copies_barriers_and_bytes() {
    use unicorn::gpu::{Class, Counts};
    let device = device_with_order(Order::AsRecorded);
    let mut b = Bench::on(&device, 1);
    let (x, y) = (b.empty(2, 64), b.empty(2, 64));
    let norm = RmsNorm { weight: b.upload(&[1f32; 64]), eps: 1e-6 };
    let before = device.counts();
    b.run(|k, r| {
        k.rms_norm(r, &x, &norm, &Operand::floats(&y), 2);
        k.rms_norm(r, &y, &norm, &Operand::floats(&x), 1);
        r.copy(&x.buffer, &y.buffer, 8);
    });
    let mut declared = [0; Class::ALL.len()];
    // The weight counts as activations here.
    declared[Class::Activations as usize] = (512 + 512 + 256) + (256 + 256 + 256) + 16;
    let counts = Counts { dispatches: 2, copies: 1, barriers: 3, declared };
    assert_eq!(device.counts() - before, counts);
    assert_eq!((counts.weight_bytes(), counts.kv_bytes(), counts.activation_bytes()), (0, 0, 2064));
}
