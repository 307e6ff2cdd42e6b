//! The tuner chooses kernel variants for a device and the shapes of a model, and stores the choice. The choice must not
//! change the bits of answers.

use std::time::Duration;

use serde_json::{Value, json};
use unicorn::gpu::QueueKind;
use unicorn::kernels::{ActivationsFrom, GpuTiles, ProductKind, SubgroupTile, Tiles, WIDTH_CLASSES, Way};
use unicorn::model::arch::open_files;
use unicorn::model::load::{LoadOptions, Source};
use unicorn::model::memory::Schemes;
use unicorn::model::rig::Rig;
use unicorn::model::tensors::TensorSpec;
use unicorn::model::tune::{Trial, Tuned, measured, read_cached, tuned, write_cached};
use unicorn::tensor::{KvDtype, Precision, QuantizeMode, Scheme};

use crate::support::goldens::{Goldens, all_logits};
use crate::support::{data, device, device_is_software, goldens, policy, skip};

const SHARED: Way = Way::Lanes { columns: 32, activations: ActivationsFrom::SharedMemory };

fn lanes(columns: u32) -> Way {
    Way::Lanes { columns, activations: ActivationsFrom::ScalarRegisters }
}

/// Small matrices, and no bound on the time.
fn trial(kinds: &[ProductKind]) -> Trial {
    let matrices = kinds.iter().map(|kind| (*kind, Scheme::int4(32), [96, 64]));
    let subgroups = SubgroupTile::of(device().info());
    Trial { matrices: matrices.collect(), subgroups, budget: Duration::MAX }
}

/// A tile whose fields need not fit each other.
fn tile(fields: Value) -> SubgroupTile {
    serde_json::from_value(fields).expect("a tile")
}

#[test]
fn the_tuned_choice_is_one_that_the_device_supports() {
    let tuned = measured(&device(), &policy(), GpuTiles::COUNTED, &trial(&ProductKind::ALL));
    let tuned = tuned.expect("it measures").expect("lavapipe has a clock");
    println!("{}", tuned.tiles);
    assert!(tuned.tiles.fit(device().info()));
    assert!(device().info().queues.contains(&tuned.queue));
}

#[test]
fn the_largest_matrix_of_each_kind_is_measured() {
    let files = open_files(&data("gemma3/tiny-a")).unwrap();
    let source = Source::open(&files).unwrap();
    let shapes = |mode| {
        let schemes = Schemes::of(&source.weights().unwrap(), mode).unwrap();
        Trial::of(device().info(), &source.config, &schemes).matrices
    };
    let tensors = &source.config.tensors;
    let projections = &tensors.layers[0].projections;
    let shape = |of: &TensorSpec| [of.rows(), of.cols()];
    let int4 = Scheme::int4(128);
    let largest = [&projections.q_proj, &projections.o_proj]
        .into_iter()
        .chain(&projections.k_proj)
        .chain(&projections.down_proj)
        .max_by_key(|spec| spec.elements())
        .unwrap();
    let expected = [
        (ProductKind::Plain, int4, shape(largest)),
        (ProductKind::Gated, int4, shape(projections.gate_proj.as_ref().unwrap())),
        (ProductKind::Head, Scheme::Int8Row, shape(&tensors.embed_tokens)),
    ];
    assert_eq!(shapes(QuantizeMode::Int4G128Emb8), expected);
    assert_eq!(shapes(QuantizeMode::Emb8), expected[2..]);
    assert_eq!(shapes(QuantizeMode::None), []);
}

#[test]
fn a_cpu_device_has_nothing_to_tune() {
    if !device_is_software() {
        return skip("software-device");
    }
    let (of, tiles) = tuned(device(), &policy(), &trial(&ProductKind::ALL)).expect("nothing is measured");
    assert_eq!(tiles, Tiles::Cpu);
    assert_eq!(of.queue_kind(), device().queue_kind());
}

#[test]
fn nothing_is_chosen_when_no_time_is_left() {
    let counted = GpuTiles::COUNTED.with(ProductKind::Gated, 1, SHARED).with(ProductKind::Plain, 4, lanes(8));
    let trial = Trial { budget: Duration::ZERO, ..trial(&ProductKind::ALL) };
    let tuned = measured(&device(), &policy(), counted, &trial).expect("it measures nothing");
    assert_eq!(tuned, Some(Tuned { queue: device().queue_kind(), tiles: counted }));
}

#[test]
fn a_tile_that_is_refused_or_wrong_is_not_chosen() {
    let refused = tile(json!({"m": 16, "n": 16, "k": 8, "subgroups": [2, 2], "is_emulated": false}));
    // A workgroup has 8 subgroups. As there are not 16 along the rows, half of the rows are not computed.
    let wrong = tile(json!({"m": 8, "n": 8, "k": 8, "subgroups": [16, 1], "is_emulated": true}));
    let mut rig = Rig::new(&device()).unwrap();
    let products = rig.products(ProductKind::Gated, Scheme::int4(32), [96, 64]).unwrap();
    let [lanes, subgroups] = [GpuTiles::COUNTED, GpuTiles::multiplied_by(wrong)].map(|tiles| {
        let kernels = rig.kernels_of(&products, Tiles::Gpu(tiles)).unwrap();
        rig.time_product(&products, &kernels, 64, 1).unwrap().expect("lavapipe has a clock").1
    });
    assert_ne!(lanes, subgroups);
    for tile in [refused, wrong] {
        let trial = Trial { subgroups: Some(tile), ..trial(&[ProductKind::Gated]) };
        let counted = GpuTiles::multiplied_by(tile);
        let tuned = measured(&device(), &policy(), counted, &trial).expect("it measures");
        let tuned = tuned.expect("lavapipe has a clock");
        let mut chosen = (0..WIDTH_CLASSES.len()).map(|class| tuned.tiles.way(ProductKind::Gated, class));
        assert!(chosen.all(|way| way != Way::Subgroups(tile)), "{}", tuned.tiles);
    }
}

#[test]
fn a_measured_choice_is_stored_for_its_shapes_and_an_invalid_one_is_ignored() {
    let (device, of) = (device(), trial(&ProductKind::ALL));
    let queue = device.queue_kind();
    let mixed = GpuTiles::COUNTED.with(ProductKind::Gated, 1, SHARED).with(ProductKind::Plain, 4, lanes(8));
    for tiles in [GpuTiles::COUNTED, GpuTiles::all(SHARED), mixed] {
        let tuned = Tuned { queue, tiles };
        write_cached(&device, &of, &tuned);
        assert_eq!(read_cached(&device, &of), Some(tuned));
    }
    let tuned = Tuned { queue, tiles: GpuTiles::COUNTED };
    let mut others = [of.clone(), of.clone()];
    others[0].matrices[1].2[0] += 32;
    others[1].matrices[2].1 = Scheme::Int8Row;
    // An earlier run may have stored the same.
    for (other, columns) in others.iter().zip([8, 16]) {
        write_cached(&device, other, &Tuned { tiles: GpuTiles::all(lanes(columns)), ..tuned });
    }
    assert_eq!(read_cached(&device, &of), Some(Tuned { tiles: mixed, ..tuned }));
    for (other, columns) in others.iter().zip([8, 16]) {
        let stored = read_cached(&device, other).expect("it was stored");
        assert_eq!(stored.tiles, GpuTiles::all(lanes(columns)));
    }

    let emulated = SubgroupTile::emulated([16, 16, 16]).unwrap();
    let others = [
        Tuned { queue, tiles: GpuTiles::COUNTED.with(ProductKind::Head, 2, lanes(7)) },
        Tuned { queue, tiles: GpuTiles::COUNTED.with(ProductKind::Plain, 4, Way::Subgroups(emulated)) },
    ];
    let other_queues = [QueueKind::Compute, QueueKind::Graphics].into_iter();
    let other_queues = other_queues.filter(|kind| !device.info().queues.contains(kind));
    let other_queues = other_queues.map(|queue| Tuned { queue, ..tuned });
    for tuned in others.into_iter().chain(other_queues) {
        write_cached(&device, &of, &tuned);
        assert_eq!(read_cached(&device, &of), None, "{tuned:?}");
    }
}

/// Steps of at most 40 tokens have other classes of widths than steps of at most 70.
#[test]
fn a_model_computes_the_same_bits_with_every_tuned_choice() {
    let folder = data("gemma3/tiny-a");
    let tokens = Goldens::open(&folder).tokens("tokens.long");
    let tokens = &tokens[..tokens.len().min(70)];
    let logits = |tiles: Tiles, max_batch_tokens| {
        let options = LoadOptions {
            quantize: QuantizeMode::Int4G128Emb8,
            kv: KvDtype::F16,
            precision: Precision::Fast,
            tiles: Some(tiles),
            max_batch_tokens,
            ..LoadOptions::default()
        };
        let mut model = goldens::load(&folder, &options);
        assert_eq!(model.tiles(), tiles);
        // All kernels of emulated tiles in one submit would take a CPU too long.
        if !matches!(tiles, Tiles::Gpu(gpu) if gpu.has_subgroups()) {
            model.self_test().expect("each kernel of these tiles is right");
        }
        let bits = all_logits(&mut model, tokens);
        bits.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    let by_cpu = logits(Tiles::Cpu, 256);
    let subgroups = Way::Subgroups(SubgroupTile::emulated([8, 8, 8]).unwrap());
    // Gated products by lanes where plain ones are by subgroups, and the other way round.
    let mut mixed = GpuTiles::COUNTED.with(ProductKind::Head, 2, lanes(8));
    let ways = [
        [SHARED, lanes(4)],
        [lanes(2), SHARED],
        [lanes(16), lanes(8)],
        [SHARED, subgroups],
        [subgroups, lanes(16)],
    ];
    for (class, [plain, gated]) in ways.into_iter().enumerate() {
        mixed = mixed.with(ProductKind::Plain, class, plain).with(ProductKind::Gated, class, gated);
    }
    for (tiles, max_batch_tokens) in [
        (GpuTiles::COUNTED, 256),
        (
            GpuTiles::all(SHARED).with(ProductKind::Plain, 4, lanes(8)).with(ProductKind::Head, 2, lanes(16)),
            256,
        ),
        (mixed, 256),
        (mixed, 40),
    ] {
        let same = logits(Tiles::Gpu(tiles), max_batch_tokens) == by_cpu;
        assert!(same, "steps of up to {max_batch_tokens} tokens, {tiles}");
    }
}
