//! The tuner chooses kernel variants for a device and stores the choice. The choice must not change the bits of
//! answers.

use unicorn::gpu::QueueKind;
use unicorn::kernels::{ActivationsFrom, GpuTiles, SubgroupTile, Tiles};
use unicorn::model::load::LoadOptions;
use unicorn::model::tune::{Trial, Tuned, measured, read_cached, tuned, write_cached};
use unicorn::tensor::{KvDtype, Precision, QuantizeMode, Scheme};

use crate::support::goldens::{Goldens, all_logits};
use crate::support::{data, device, goldens, policy};

const SHARED: GpuTiles = GpuTiles { activations: [ActivationsFrom::SharedMemory; 6], ..GpuTiles::COUNTED };

#[test]
fn the_tuned_choice_is_one_that_the_device_supports() {
    let trial = Trial { scheme: Scheme::int4(32), shape: [64, 96], many_tokens: [9, 17, 33, 40] };
    let tuned = measured(&device(), &policy(), GpuTiles::COUNTED, &trial).expect("it measures");
    let tuned = tuned.expect("lavapipe has a clock");
    println!("{tuned:?}");
    assert!(GpuTiles::widths().contains(&tuned.tiles.lane_tokens));
    assert!(device().info().queues.contains(&tuned.queue));
    assert!(tuned.tiles.subgroups.is_none_or(|tile| SubgroupTile::of(device().info()) == Some(tile)));
}

#[test]
fn a_cpu_device_has_nothing_to_tune() {
    let (of, tiles) = tuned(device(), &policy()).expect("nothing is measured");
    assert_eq!(tiles, Tiles::Cpu);
    assert_eq!(of.queue_kind(), device().queue_kind());
}

#[test]
fn a_measured_choice_is_stored_and_an_invalid_one_is_ignored() {
    let device = device();
    let queue = device.queue_kind();
    for tiles in [GpuTiles::COUNTED, SHARED, GpuTiles { lane_tokens: 8, ..SHARED }] {
        let tuned = Tuned { queue, tiles };
        write_cached(&device, &tuned);
        assert_eq!(read_cached(&device), Some(tuned));
    }
    let emulated = SubgroupTile::emulated([16, 16, 16]);
    let others = [
        Tuned { queue, tiles: GpuTiles { lane_tokens: 7, ..GpuTiles::COUNTED } },
        Tuned { queue, tiles: GpuTiles { subgroups: emulated, ..GpuTiles::COUNTED } },
    ];
    let other_queues = [QueueKind::Compute, QueueKind::Graphics].into_iter();
    let other_queues = other_queues.filter(|kind| !device.info().queues.contains(kind));
    for tuned in others.into_iter().chain(other_queues.map(|queue| Tuned { queue, tiles: SHARED })) {
        write_cached(&device, &tuned);
        assert_eq!(read_cached(&device), None, "{tuned:?}");
    }
    device.write_cached("tuning", b"{}");
    assert_eq!(read_cached(&device), None);
}

#[test]
fn a_model_computes_the_same_bits_with_every_tuned_choice() {
    let folder = data("gemma3/tiny-a");
    let tokens = Goldens::open(&folder).tokens("tokens.long");
    let tokens = &tokens[..tokens.len().min(70)];
    let logits = |tiles: Tiles| {
        let options = LoadOptions {
            quantize: QuantizeMode::Int4G32,
            kv: KvDtype::F16,
            precision: Precision::Fast,
            tiles: Some(tiles),
            ..LoadOptions::default()
        };
        let bits = all_logits(&mut goldens::load(&folder, &options), tokens);
        bits.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    let by_cpu = logits(Tiles::Cpu);
    let subgroups = SubgroupTile::emulated([16, 16, 16]);
    for tiles in [
        GpuTiles::COUNTED,
        GpuTiles { lane_tokens: 8, ..SHARED },
        GpuTiles { lane_tokens: 16, subgroups, ..GpuTiles::COUNTED },
    ] {
        assert!(logits(Tiles::Gpu(tiles)) == by_cpu, "{tiles:?}");
    }
}
