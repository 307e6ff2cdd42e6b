//! The self-test of a device: its stored results equal those of the CPU twins, a correct device passes, and damaged
//! results are detected.

use std::collections::BTreeMap;
use std::time::Duration;

use tempfile::TempDir;
use unicorn::checkpoint::Checkpoint;
use unicorn::kernels::{AttentionBy, AttentionTile};
use unicorn::model::arch::{self, open_files};
use unicorn::model::load::LoadOptions;
use unicorn::model::model_runner::{ModelRunner, NotCompared};
use unicorn::model::self_test::inputs::{self, COLS, KV_HEADS, NORM_ROWS, ROWS, VOCAB, WIDTH};
use unicorn::model::self_test::{Set, Stored};
use unicorn::model::weights::Weights;
use unicorn::model::{RunnerError, twin};
use unicorn::tensor::{Bits, KvDtype, Precision, QuantizeMode, Scales, Scheme};

use crate::support::driver::greedy;
use crate::support::goldens::{Goldens, all_logits, load, load_files, max_difference};
use crate::support::kernel_bench::STORED;
use crate::support::program::{output, printed, unicorn};
use crate::support::{data, reference, root};

/// The f32 rounding error of a sum of some hundreds of terms, relative to the sum of magnitudes.
const ROUNDING: f64 = 2e-5;

/// Schemes whose products are stored: every format, with the usual group widths and with whole rows.
fn schemes() -> Vec<Scheme> {
    let mut all = vec![Scheme::F32, Scheme::F16, Scheme::Bf16];
    all.extend(STORED);
    for bits in [Bits::Four, Bits::Eight] {
        for scales in [Scales::Symmetric, Scales::ZeroPoint, Scales::Affine] {
            all.extend([16, 32, 64, 128, COLS as u32].map(|group| Scheme::Int { bits, group, scales }));
        }
    }
    all.retain(|scheme| scheme.to_string().parse() == Ok(*scheme));
    all.sort_by_key(Scheme::to_string);
    all.dedup();
    all
}

/// Rounds a number to few digits, so that the file stays small. The bound includes the rounding error.
fn short(value: f64) -> f64 {
    format!("{value:.7e}").parse().expect("a number")
}

fn set(values: impl IntoIterator<Item = f64>, bound: f64, largest: f64) -> Set {
    let values: Vec<f64> = values.into_iter().map(short).collect();
    let rounded = values.iter().fold(0f64, |most, v| most.max(v.abs())) * 1e-7;
    let up = |value: f64| -> f64 { format!("{:.1e}", value * 1.1).parse().expect("a number") };
    Set { values, bound: if bound > 0.0 { up(bound + rounded) } else { 0.0 }, largest: up(largest) }
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0f64, |most, v| most.max(v.abs()))
}

fn products(all: &mut BTreeMap<String, Set>) {
    let x: Vec<f32> = (0..COLS).map(|col| inputs::activation(0, col)).collect();
    let cols = (1..COLS).step_by(36).map(|col| f64::from(x[col]));
    all.insert("quantize".into(), set(cols, 1e-4, 0.0));
    for scheme in schemes() {
        let weights: Vec<f32> = (0..ROWS).flat_map(|row| inputs::weights(scheme, row)).collect();
        let y = reference::matmul(&x, &weights, 1, ROWS, COLS);
        let magnitude = reference::matmul_magnitude(&x, &weights, 1, ROWS, COLS);
        let bound = ROUNDING * largest(&magnitude);
        let stored = |values: &[f64]| inputs::PRODUCT_ROWS.map(|row| values[row]);
        all.insert(format!("matmul {scheme}"), set(stored(&y), bound, largest(&y)));
        // Far from 0, gelu(y) y and silu(y) y have the slope of y².
        let off = 2.5 * largest(&y) * bound;
        for (name, glu) in
            [("gated", reference::geglu as fn(f64, f64) -> f64), ("gated by silu", reference::swiglu)]
        {
            let gated: Vec<f64> = y.iter().map(|y| glu(*y, *y)).collect();
            all.insert(format!("{name} {scheme}"), set(stored(&gated), off, largest(&gated)));
        }
        let weight = |id: usize, col: usize| f64::from(weights[id * COLS + col] * inputs::EMBEDDING_SCALE);
        let embedded =
            inputs::EMBEDDED_IDS.into_iter().flat_map(|id| inputs::EMBEDDED_COLS.map(|col| weight(id, col)));
        all.insert(format!("embed {scheme}"), set(embedded, 1e-6, 1.0));
    }
}

fn norms(all: &mut BTreeMap<String, Set>) {
    let rows = |value: fn(usize, usize) -> f32| -> Vec<Vec<f64>> {
        (0..NORM_ROWS).map(|row| (0..WIDTH).map(|col| value(row, col).into()).collect()).collect()
    };
    let (x, before) = (rows(inputs::normed), rows(inputs::hidden));
    let norm = |x: &[Vec<f64>], next: bool| -> Vec<Vec<f64>> {
        let weights = inputs::norm_weights(next);
        x.iter().map(|row| reference::rms_norm(row, &weights, inputs::EPS.into())).collect()
    };
    let normed = norm(&x, false);
    let add = |a: &[Vec<f64>], b: &[Vec<f64>]| -> Vec<Vec<f64>> {
        a.iter().zip(b).map(|(a, b)| a.iter().zip(b).map(|(a, b)| a + b).collect()).collect()
    };
    let (hidden, plain) = (add(&before, &normed), add(&before, &x));
    let glu = |glu: fn(f64, f64) -> f64| -> Vec<Vec<f64>> {
        let rows = x.iter().zip(&before);
        rows.map(|(x, up)| x.iter().zip(up).map(|(x, up)| glu(*x, *up)).collect()).collect()
    };
    let cap = f64::from(inputs::SOFTCAP);
    let softcapped = x
        .iter()
        .map(|row| row.iter().map(|x| cap * (x / cap).tanh()).collect::<Vec<_>>())
        .collect::<Vec<_>>();
    for (name, result) in [
        ("rms_norm", normed),
        ("residual y", norm(&hidden, true)),
        ("residual hidden", hidden),
        ("plain residual y", norm(&plain, true)),
        ("plain residual hidden", plain),
        ("glu by gelu", glu(reference::geglu)),
        ("glu by silu", glu(reference::swiglu)),
        ("softcap", softcapped),
    ] {
        let values = result.iter().flat_map(|row| inputs::NORM_COLS.map(|col| row[col]));
        let most = largest(&result.concat());
        all.insert(name.into(), set(values, ROUNDING * most, most));
    }
    streams(all);
    let sum = |rows: &[Vec<f64>], col: usize| rows.iter().map(|row| row[col]).sum::<f64>();
    let sums = inputs::NORM_COLS.map(|col| sum(&x, col) + sum(&before, col));
    all.insert("pool".into(), set(sums, 1e-5, largest(&sums)));
}

/// What the kernels of several residual streams compute.
fn streams(all: &mut BTreeMap<String, Set>) {
    let row_of = |i: usize, row: usize| -> Vec<f64> {
        (0..WIDTH).map(|col| inputs::stream(i, row, col).into()).collect()
    };
    let (norm, scale) = (inputs::norm_weights(false), inputs::norm_weights(true));
    let (router, coefficients) = (inputs::router(), inputs::coefficients(64));
    let eps = inputs::EPS.into();
    let altup = reference::AltUp { norm: &norm, router: &router, coefficients: &coefficients, eps };
    let mut results: BTreeMap<String, Vec<Vec<f64>>> = BTreeMap::new();
    for row in 0..NORM_ROWS {
        let x: [Vec<f64>; 4] = std::array::from_fn(|i| row_of(i, row));
        let predicted = altup.predict(&x);
        let corrected = altup.correct(&x, &x[1]);
        let scaled = corrected[0].iter().zip(&scale).map(|(x, scale)| x * f64::from(*scale)).collect();
        let mut add = |name: String, values: Vec<f64>| results.entry(name).or_default().push(values);
        add("altup_correct scaled".into(), scaled);
        predicted.into_iter().enumerate().for_each(|(i, values)| add(format!("altup_predict {i}"), values));
        corrected.into_iter().enumerate().for_each(|(i, values)| add(format!("altup_correct {i}"), values));
        let matched = [1, 2, 3].map(|i| reference::with_size_of(&x[0], &x[i]));
        let mean = |at: usize| (x[0][at] + matched.iter().map(|stream| stream[at]).sum::<f64>()) / 4.0;
        add("streams_merge 0".into(), (0..WIDTH).map(mean).collect());
        matched.into_iter().zip(1..).for_each(|(values, i)| add(format!("streams_spread {i}"), values));
        add("cutoff".into(), reference::cutoff(&x[0], inputs::DEVIATIONS.into()));
    }
    for (name, rows) in results {
        let values = rows.iter().flat_map(|row| inputs::NORM_COLS.map(|col| row[col]));
        let most = largest(&rows.concat());
        all.insert(name, set(values, ROUNDING * most, most));
    }
}

/// Four values that represent a head of any dimension.
fn of_classes(row: &[f64]) -> [f64; 4] {
    let half = row.len() / 2;
    [0, 1, half, half + 1].map(|d| row[d])
}

fn head<T>(dim: usize, value: impl Fn(usize) -> T) -> Vec<T> {
    (0..dim).map(|d| value(inputs::class(d, dim))).collect()
}

/// What heads of dimension `dim` store, and the results of their attention.
fn heads(dim: usize) -> BTreeMap<String, Set> {
    let mut all = BTreeMap::new();
    for (has_norms, has_biases) in [(true, false), (false, false), (false, true), (true, true)] {
        let bias = |what: u32, of: usize, class: usize| match has_biases {
            true => inputs::bias(what, of, class),
            false => 0.0,
        };
        let [mut queries, mut keys, mut values, mut normed] = [const { Vec::new() }; 4];
        for (token, (position, _)) in inputs::STORED.into_iter().enumerate() {
            let angles: Vec<f64> = (0..dim / 2).map(|i| inputs::angle(position, i % 2)).collect();
            let turned = |raw: &dyn Fn(usize) -> f32, is_key: bool| {
                let norm = head(dim, |class| inputs::head_norm(is_key, class));
                let mut row: Vec<f64> = head(dim, |class| raw(class).into());
                if has_norms {
                    row = reference::rms_norm(&row, &norm, inputs::EPS.into());
                }
                of_classes(&reference::rope(&row, &angles))
            };
            for of in 0..4 {
                let query = turned(&|class| inputs::raw_query(token, of, class) + bias(0, of, class), false);
                queries.extend(query.map(|q| q * f64::from(inputs::Q_SCALE)));
            }
            for of in 0..KV_HEADS {
                keys.extend(turned(&|class| inputs::raw_key(token, of, class) + bias(1, of, class), true));
                let value = |class| f64::from(inputs::value(token, of, class) + bias(2, of, class));
                values.extend([0, 1, 2, 3].map(value));
                let ones = vec![1.0; dim];
                normed.extend(of_classes(&reference::rms_norm(&head(dim, value), &ones, inputs::EPS.into())));
            }
        }
        for (name, stored, bound) in
            [("q", queries, 1e-6), ("k", keys, 1e-5), ("v", values, 1e-6), ("normed v", normed, 1e-5)]
        {
            let most = largest(&stored);
            let kind = inputs::stored_kind(has_norms, has_biases);
            all.insert(format!("qkv_store{kind} {name}"), set(stored, bound, most));
        }
    }
    for (what, window) in [("all", usize::MAX), ("window", inputs::WINDOW)] {
        let mut attended = Vec::new();
        for position in inputs::POSITIONS {
            for (of, kv_head) in (0..4).flat_map(|of| (0..KV_HEADS).map(move |kv_head| (of, kv_head))) {
                let query = head(dim, |class| inputs::query(position, of, class) * (4.0 / dim as f32));
                let seen = (position + 1).saturating_sub(window)..position + 1;
                let rows = |value: fn(usize, usize, usize) -> f32| -> Vec<Vec<f32>> {
                    seen.clone().map(|at| head(dim, |class| value(at, kv_head, class))).collect()
                };
                let (keys, values) = (rows(inputs::key), rows(inputs::value));
                let [keys, values] =
                    [&keys, &values].map(|rows| rows.iter().map(Vec::as_slice).collect::<Vec<_>>());
                attended.extend(of_classes(&reference::attention(&query, &keys, &values)));
            }
        }
        let most = largest(&attended);
        all.insert(format!("attention {what}"), set(attended, ROUNDING, most));
    }
    all
}

fn draws(all: &mut BTreeMap<String, Set>) {
    all.insert("history".into(), set([100.0, 101.0, 102.0, 55.0], 0.0, 0.0));
    let row = |row: usize| -> Vec<f32> { (0..VOCAB).map(|id| inputs::logit(row, id)).collect() };
    let none = reference::Penalties { repetition: 1.0, presence: 0.0, frequency: 0.0 };
    let mut biased = reference::adjusted(&row(0), &[], &[], &none, &inputs::BIASES, None);
    let best = biased.iter().copied().fold(f32::MIN, f32::max);
    let greedy = biased.iter().position(|l| *l == best).expect("a largest logit");
    assert!(greedy == 4099, "the bias determines the greedy id");
    biased[greedy] = f32::MIN;
    assert!(biased.iter().all(|l| *l < best - 1.0), "the greedy id must win by a clear margin");

    let mask: Vec<bool> = (0..VOCAB).map(inputs::allowed).collect();
    let masked = reference::adjusted(&row(1), &[], &[], &none, &[], Some(&mask));
    let left = reference::left(&masked, inputs::TEMPERATURE, inputs::TOP_K as usize, inputs::TOP_P, f32::MIN);
    assert!((5..=40).contains(&left.len()), "{} ids are left", left.len());
    let temperature = inputs::TEMPERATURE.into();
    let (filtered, ahead) = reference::draw(&masked, &left, temperature, inputs::SEED, 1);
    assert!(ahead > 0.05, "the filtered id is ahead by {ahead}");

    let penalties = reference::Penalties {
        repetition: inputs::REPETITION,
        presence: inputs::PRESENCE,
        frequency: inputs::FREQUENCY,
    };
    let (prompt, answer) = inputs::HISTORY.split_at(1);
    let penalized = reference::adjusted(&row(2), prompt, answer, &penalties, &[], None);
    let ids: Vec<usize> = (0..VOCAB).collect();
    let (drawn, ahead) = reference::draw(&penalized, &ids, temperature, inputs::SEED, 2);
    assert!(ahead > 0.05, "the drawn id is ahead by {ahead}");
    all.insert("sample".into(), set([greedy as f64, filtered as f64, drawn as f64], 0.0, 0.0));

    let logits = row(0);
    let logprobs = reference::log_softmax(&logits);
    let mut order = ids;
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    let top = order.into_iter().take(inputs::LOGPROBS).flat_map(|id| [id as f64, logprobs[id]]);
    let mut stored = set(std::iter::once(logprobs[greedy]).chain(top), 1e-5, 0.0);
    // The bound is for the log probabilities. The ids are exact.
    stored.bound = 1e-4;
    all.insert("logprobs".into(), stored);
}

/// The stored results must equal the results of the CPU twins. `UNICORN_TEST_RECORD=1` writes them again.
#[test]
fn stored_results_are_the_results_of_the_cpu_twins() {
    let mut all = heads(64);
    for dim in [32, 100, 256] {
        for (name, set) in heads(dim) {
            for (a, b) in set.values.iter().zip(&all[&name].values) {
                assert!((a - b).abs() < set.bound / 10.0, "{name}: heads of {dim} have {a}, those of 64 {b}");
            }
        }
    }
    products(&mut all);
    norms(&mut all);
    draws(&mut all);
    let text: Vec<String> = all
        .iter()
        .map(|(name, set)| format!("{:?}:{}", name, serde_json::to_string(set).expect("numbers")))
        .collect();
    let text = format!("{{\n{}\n}}\n", text.join(",\n"));
    let file = root().join("src/model/self_test/stored.json");
    if std::env::var_os("UNICORN_TEST_RECORD").is_some() {
        return std::fs::write(&file, text).expect("written");
    }
    // The last digit of a sine may differ between machines.
    let stored = &Stored::included().0;
    assert!(stored.keys().eq(all.keys()), "the stored sets have other names");
    for (name, now) in all {
        let then = &stored[&name];
        assert_eq!((then.bound, then.largest, then.values.len()), (now.bound, now.largest, now.values.len()));
        for (a, b) in then.values.iter().zip(&now.values) {
            assert!((a - b).abs() <= now.bound / 20.0, "{name}: {a} is stored, and the twins say {b}");
        }
    }
}

/// Calls `each` for several ways to store weights and keys, in both precisions.
fn each_way(mut each: impl FnMut(&mut ModelRunner, &str)) {
    let modes = [QuantizeMode::None, QuantizeMode::Int8Row, QuantizeMode::Int4G128Emb8];
    for (folder, modes) in [("gemma3/tiny-a", &modes[..]), ("gemma3/tiny-b", &modes[2..])] {
        for (quantize, precision) in modes.iter().flat_map(|mode| Precision::ALL.map(|p| (*mode, p))) {
            let kv = KvDtype::ALL[(quantize as usize + precision as usize) % 3];
            let options = LoadOptions { quantize, precision, kv, ..LoadOptions::default() };
            each(&mut load(&data(folder), &options), &format!("{folder} {quantize} {precision} {kv}"));
        }
    }
}

#[test]
fn a_correct_device_passes_with_every_model() {
    each_way(|model, what| {
        let tested = model.self_test().unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(tested.kernels >= 15 && tested.untested.is_empty(), "{what}: {tested:?}");
    });
}

#[test]
fn every_damaged_result_is_detected() {
    for precision in Precision::ALL {
        let options = LoadOptions { quantize: QuantizeMode::Int4G32, precision, ..LoadOptions::default() };
        let missed =
            load(&data("gemma3/tiny-a"), &options).missed_damage().expect("a device that computes right");
        assert!(missed.is_empty(), "{precision}: {missed:#?}");
    }
}

#[test]
fn the_twin_of_the_forward_pass_matches_the_oracle() {
    for folder in ["gemma3/tiny-a", "gemma3/tiny-b", "gemma3/tiny-27b-ratio"] {
        let (goldens, files) = (Goldens::open(&data(folder)), open_files(&data(folder)).expect("a model"));
        let (config, _) = arch::load(&files).expect("a config");
        let checkpoint = Checkpoint::open(&files).expect("a checkpoint");
        let weights = Weights::collect(&checkpoint, &config).expect("weights");
        let mut beyond_window = false;
        for prompt in ["short", "mid", "long"] {
            let tokens = goldens.tokens(&format!("tokens.{prompt}"));
            beyond_window |= tokens.len() > config.window().unwrap();
            let expected = goldens.view::<f32>(&format!("logits.{prompt}"));
            let expected = &expected[expected.len() - config.vocab_size..];
            let vocab = config.vocab_size;
            let values =
                twin::values_of(&checkpoint, &weights, &config, tokens, vocab, &mut |_| {}).expect("values");
            let off = max_difference(&values.logits.values, expected);
            assert!(off <= 1e-3, "{folder} {prompt}: {off}");
            assert_eq!(values.residual.len(), config.layers.len() + 1);
        }
        assert!(beyond_window, "{folder}: no prompt is longer than the window");
    }
}

/// Converts a folder of the repository into a native checkpoint.
fn native(folder: &str, scheme: &str) -> TempDir {
    let to = tempfile::tempdir().expect("a folder");
    let (source, path) = (root().join(folder), to.path().join("native"));
    let path = path.to_str().expect("UTF-8");
    let args = ["quantize", source.to_str().expect("UTF-8"), path, "--scheme", scheme];
    printed(unicorn(&args));
    to
}

fn load_native(folder: &TempDir, precision: Precision, kv: KvDtype) -> ModelRunner {
    load(&folder.path().join("native"), &LoadOptions { precision, kv, ..LoadOptions::default() })
}

#[test]
fn stored_layer_values_match_in_every_precision_and_cache_type() {
    let every: Vec<_> = Precision::ALL.into_iter().flat_map(|p| KvDtype::ALL.map(|kv| (p, kv))).collect();
    let default = [(Precision::Fast, KvDtype::F16)];
    for (folder, scheme, ways) in [
        ("tests/data/gemma3/tiny-a", "int4-g32", &every[..]),
        ("tests/data/gemma3/tiny-b", "int8-row", &every[4..]),
        ("tests/data/gemma3/tiny-a", "keep", &default[..]),
        ("models/demo", "int4-g32", &default[..]),
    ] {
        let native = native(folder, scheme);
        for (precision, kv) in ways {
            let mut model = load_native(&native, *precision, *kv);
            let layers = model.config().layers.len();
            let tested = model.self_test();
            let tested = tested.unwrap_or_else(|error| panic!("{folder} {scheme} {precision} {kv}: {error}"));
            assert_eq!(tested.layers, Ok(layers), "{folder} {scheme} {precision} {kv}");
        }
    }
    // Tiles of f16 round more than lanes do.
    let tile = AttentionTile::emulated([16, 16, 16]).expect("the kernel can use it");
    let attention = Some(AttentionBy::Subgroups(tile));
    let options =
        LoadOptions { precision: Precision::Fast, kv: KvDtype::F16, attention, ..LoadOptions::default() };
    let native = native("models/demo", "int4-g32");
    let mut model = load(&native.path().join("native"), &options);
    let layers = model.config().layers.len();
    assert_eq!(model.self_test().expect("attention in tiles is right").layers, Ok(layers));
    let of_plain = load(&data("gemma3/tiny-a"), &LoadOptions::default()).self_test().expect("right");
    assert_eq!(of_plain.layers, Err(NotCompared::NotStored));
}

/// The prompt runs in one step, in several steps, and in steps whose layers are split. Answers after the test must
/// equal answers without it.
#[test]
fn the_layer_test_does_not_change_later_answers() {
    let native = native("tests/data/gemma3/tiny-a", "int4-g32");
    let tokens: Vec<u32> = (0..40).map(|i| i * 5 % 200).collect();
    let mut answers = Vec::new();
    for (max_batch_tokens, max_submit_ns, tests) in
        [(256, 1_000_000_000, false), (256, 1, true), (7, 1_000_000_000, true)]
    {
        let (precision, max_submit) = (Precision::Fast, Duration::from_nanos(max_submit_ns));
        let options = LoadOptions { max_batch_tokens, max_submit, precision, ..LoadOptions::default() };
        let mut model = load(&native.path().join("native"), &options);
        for _ in 0..if tests { 2 } else { 0 } {
            model.self_test().expect("right");
        }
        answers.push((greedy(&mut model, &tokens, 12, 64, &[]), all_logits(&mut model, &tokens)));
    }
    assert!(answers.iter().all(|answer| *answer == answers[0]));
}

/// Inverts the bits `mask` of one byte of the file `name`.
fn flip(folder: &TempDir, name: &str, at: usize, mask: u8) {
    let path = folder.path().join("native").join(name);
    let mut bytes = std::fs::read(&path).expect("a file");
    bytes[at] ^= mask;
    std::fs::write(&path, bytes).expect("written");
}

fn refused(folder: &TempDir) -> String {
    match load_native(folder, Precision::Fast, KvDtype::F16).self_test() {
        Err(RunnerError::Wrong(why)) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn changed_values_and_weights_are_refused_with_their_layer() {
    let hidden = load(&data("gemma3/tiny-a"), &LoadOptions::default()).config().hidden_size;
    // The exponent of a value after the second layer.
    let altered = native("tests/data/gemma3/tiny-a", "int4-g32");
    flip(&altered, "layer-values.bin", 4 * (2 * hidden + 3) + 3, 0x40);
    let why = refused(&altered);
    assert!(why.starts_with("layer 1 is off by"), "{why}");

    // One byte of a scale, or a page of weights.
    for (part, bytes, mask) in [
        ("mlp.down_proj.weight.scales", 1..2, 0x40),
        ("self_attn.o_proj.weight.scales", 1..2, 0x40),
        ("mlp.up_proj.weight.blocks", 0..4096, 0x88),
    ] {
        let altered = native("tests/data/gemma3/tiny-a", "int4-g32");
        let name = "layer-002.safetensors";
        let file = std::fs::read(altered.path().join("native").join(name)).expect("a file");
        let header = u64::from_le_bytes(file[..8].try_into().expect("8 bytes")) as usize;
        let fields: serde_json::Value = serde_json::from_slice(&file[8..8 + header]).expect("a header");
        let offsets = &fields[format!("model.layers.2.{part}")]["data_offsets"];
        let [start, end] = [0, 1].map(|i| 8 + header + offsets[i].as_u64().expect("an offset") as usize);
        bytes.for_each(|at| flip(&altered, name, (start + at).min(end - 1), mask));
        let why = refused(&altered);
        assert!(why.starts_with("layer 2 is off by") && why.contains("inspect --verify"), "{part}: {why}");
    }
}

#[test]
fn a_repeated_conversion_adds_missing_layer_values() {
    let to = native("tests/data/gemma3/tiny-a", "int4-g32");
    let folder = to.path().join("native");
    let manifest = || std::fs::read_to_string(folder.join("unicorn.json")).expect("a manifest");
    let whole = manifest();
    let mut lacking: serde_json::Value = serde_json::from_str(&whole).expect("JSON");
    let values = lacking.as_object_mut().expect("fields").remove("layer_values").expect("layer values");
    assert!(values["tokens"].as_array().expect("ids").len() > 8);
    lacking["files"].as_object_mut().expect("files").remove("layer-values.bin").expect("listed");
    std::fs::write(folder.join("unicorn.json"), lacking.to_string()).expect("written");
    std::fs::remove_file(folder.join("layer-values.bin")).expect("there");
    let tested = load_native(&to, Precision::Fast, KvDtype::F16).self_test().expect("right");
    assert_eq!(tested.layers, Err(NotCompared::NotStored));

    let source = data("gemma3/tiny-a");
    let [source, destination] = [&source, &folder].map(|path| path.to_str().expect("UTF-8"));
    let args = ["quantize", source, destination, "--scheme", "int4-g32"];
    let stdout = printed(unicorn(&args));
    assert!(stdout.contains("already converted by this command"), "{stdout}");
    let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).expect("JSON");
    assert_eq!(json(&manifest()), json(&whole));
    assert_eq!(output(unicorn(&args)).0, 1, "a complete folder must be refused");
    // A newer version is ignored. A file with a wrong length is refused.
    let version = |n: u32| format!("\"layer_values\": {{\n    \"version\": {n}");
    let newer = whole.replacen(&version(1), &version(9), 1);
    assert_ne!(newer, whole);
    std::fs::write(folder.join("unicorn.json"), newer).expect("written");
    let tested = load_native(&to, Precision::Fast, KvDtype::F16).self_test().expect("right");
    assert_eq!(tested.layers, Err(NotCompared::NotStored));
    std::fs::write(folder.join("unicorn.json"), whole).expect("written");
    std::fs::write(folder.join("layer-values.bin"), [0; 12]).expect("written");
    let files = open_files(&folder).expect("a folder");
    let error = load_files(&files, &LoadOptions::default()).err().expect("refused");
    assert!(error.to_string().contains("layer-values.bin: has 12 bytes"), "{error}");
}
