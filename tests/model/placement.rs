//! The placement policy for simulated machines, the list of buffers of a load, and refusals before any allocation.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use unicorn::config::FfnHeap;
use unicorn::gpu::memory_types::{MemoryTable, MemoryType};
use unicorn::gpu::placement::{
    Class, FfnReason, Heap, Limits, Machine, MemoryKind, Obstacle, Plan, Request, place,
};
use unicorn::gpu::residency::{self, Residency};
use unicorn::gpu::{Device, DeviceKind, ReadSpeed};
use unicorn::kernels::Heads;
use unicorn::model::arch::{self, open_files};
use unicorn::model::load::{LoadError, LoadOptions, Source};
use unicorn::model::memory::{ChosenKv, DEFAULT_BLOCK_SIZE, MemoryRequest, Schemes};
use unicorn::model::model_runner::ModelRunner;
use unicorn::model::spec::ModelSpec;
use unicorn::model::{Runner, self_test};
use unicorn::tensor::{KvDtype, Scheme};

use crate::support::checkpoints::tiny_model;
use crate::support::program::{assert_error, output, printed, printed_json, unicorn, unicorn_on_software};
use crate::support::{data, policy, root};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Limits without a reserve for other programs: all free memory may be used.
const ALL: Limits = Limits { vram: None, gtt: None, reserve: Some(0), ffn_heap: FfnHeap::Gtt };

fn heap(index: usize, size: u64, free: u64, device_local: bool, host_visible: bool) -> Heap {
    let name = format!("heap {index} ({})", if device_local { "device-local" } else { "host" });
    Heap { index, name, size, free, device_local, host_visible, read: None }
}

/// An integrated GPU as RADV reports it: two thirds of the carve-out and GTT together are device-local, one third is
/// host memory.
fn apu(bytes: u64) -> Machine {
    let (local, host) = (bytes / 3 * 2, bytes / 3);
    Machine {
        heaps: vec![heap(0, host, host, false, true), heap(1, local, local, true, true)],
        unified: true,
        max_allocation_bytes: 0xffff_fffc,
    }
}

fn read_at(gb_per_s: f64) -> Option<ReadSpeed> {
    Some(ReadSpeed { bytes_per_s: (gb_per_s * 1e9) as u64, measured_at: 0 })
}

/// [`apu`] with these speeds of VRAM and GTT in GB/s; a speed of 0 was not measured.
fn measured_apu(bytes: u64, vram: f64, gtt: f64) -> Machine {
    let mut machine = apu(bytes);
    for (heap, gb_per_s) in machine.heaps.iter_mut().zip([gtt, vram]) {
        heap.read = read_at(gb_per_s).filter(|_| gb_per_s > 0.0);
    }
    machine
}

/// A card with 8 GiB of VRAM, of which 256 MiB can be mapped, and 16 GiB of host memory.
fn discrete() -> Machine {
    Machine {
        heaps: vec![
            heap(0, 8 * GIB - 256 * MIB, 8 * GIB - 256 * MIB, true, false),
            heap(1, 16 * GIB, 16 * GIB, false, true),
            heap(2, 256 * MIB, 256 * MIB, true, true),
        ],
        unified: false,
        max_allocation_bytes: 0xffff_fffc,
    }
}

/// A device with one heap, as lavapipe reports it.
fn one_heap(bytes: u64) -> Machine {
    Machine { heaps: vec![heap(0, bytes, bytes, true, true)], unified: true, max_allocation_bytes: 2 * GIB }
}

fn request(class: Class, bytes: u64) -> Request {
    let kind = if class == Class::Staging { MemoryKind::Upload } else { MemoryKind::Device };
    Request { class, kind, bytes, name: format!("{} of {bytes}", class.name()) }
}

/// Bytes of a class in the device-local heaps, and in the other heaps.
fn split(plan: &Plan, class: Class) -> (u64, u64) {
    let local = |name: &str| plan.heaps.iter().any(|h| h.heap.name == name && h.heap.device_local);
    plan.placements().iter().filter(|p| p.class == class).fold((0, 0), |(vram, gtt), p| {
        if local(&p.heap) { (vram + p.bytes, gtt) } else { (vram, gtt + p.bytes) }
    })
}

/// The memory request of a shape with the schemes of `unicorn-lab synth --scheme int4-g128`.
fn model_request(config: &ModelSpec) -> MemoryRequest<'_> {
    MemoryRequest {
        config,
        schemes: Schemes::uniform(config, Scheme::int4(128), Scheme::int4(128), Scheme::Int8Row),
        kv: KvDtype::F16,
        block_size: DEFAULT_BLOCK_SIZE,
        max_batch_tokens: 256,
        max_shard_bytes: 0xffff_fffc / 2,
        moments: false,
        offload: None,
        draft: None,
        vision: None,
    }
}

/// The plan for a context and one sequence, with its invariants checked.
#[track_caller]
fn plan(config: &ModelSpec, machine: &Machine, limits: Limits, context: usize) -> Plan {
    let request = model_request(config);
    let plan = request.place(machine, &limits, context, request.pools(context, 1)).unwrap();
    check(machine, &limits, &plan);
    plan
}

/// A dispatch has at most 65535 workgroups in a direction, and a mixture's kernels have one for each pair.
#[test]
fn a_step_has_no_more_pairs_than_a_dispatch_has_workgroups() {
    let family = data("families/tiny-qwen3-moe");
    let read = std::fs::read(family.join("config.json")).expect("readable");
    for (per_token, tokens) in [(1, 8192), (7, 8192), (8, 8191)] {
        let mut config: Value = serde_json::from_slice(&read).expect("JSON");
        config["num_experts_per_tok"] = json!(per_token);
        config["max_position_embeddings"] = json!(32_768);
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), config.to_string()).expect("written");
        let files = open_files(&family).and_then(|files| files.with_config(file.path())).expect("a model");
        let spec = arch::load(&files).expect("a config").0;
        let schemes = Schemes::uniform(&spec, Scheme::Bf16, Scheme::Bf16, Scheme::Bf16);
        let request = MemoryRequest { max_batch_tokens: 8192, schemes, ..model_request(&spec) };
        assert_eq!(request.batch_tokens(), tokens, "{per_token} experts of a token");
        assert!(request.batch_tokens() * per_token <= 65_535);
    }
}

fn published(name: &str) -> ModelSpec {
    arch::shape(name).unwrap().spec()
}

/// The JSON that a plan prints, which must succeed.
#[track_caller]
fn plan_as_json(args: &[&str]) -> Value {
    printed_json(unicorn(&[&["plan", "--json"], args].concat()))
}

/// Checks the invariants of a plan, recomputed from its slots.
#[track_caller]
fn check(machine: &Machine, limits: &Limits, plan: &Plan) {
    let mut placed = vec![0; machine.heaps.len()];
    for chunk in &plan.chunks {
        assert!(chunk.bytes() <= machine.max_allocation_bytes, "a chunk of {}", chunk.bytes());
        placed[chunk.heap] += chunk.bytes();
        let heap = &machine.heaps[chunk.heap];
        assert!(chunk.kind == MemoryKind::Device || heap.host_visible, "{} is not mapped", heap.name);
        assert!(
            chunk.kind != MemoryKind::Device || machine.unified || heap.device_local,
            "{} is in host memory",
            chunk.class.name()
        );
    }
    for ((heap, usable), placed) in plan.heaps.iter().zip(machine.usable(limits)).zip(placed) {
        assert_eq!((heap.usable, heap.placed), (usable, placed), "{}", heap.heap.name);
        assert!(placed <= usable, "{}: {placed} of {usable}", heap.heap.name);
    }
    let mut ranges: Vec<(usize, u64, u64)> = Vec::new();
    for (request, slot) in plan.requests.iter().zip(&plan.slots) {
        let chunk = &plan.chunks[slot.chunk];
        assert_eq!((chunk.class, chunk.kind), (request.class, request.kind), "{}", request.name);
        assert!(
            slot.offset.is_multiple_of(256) && slot.offset + request.bytes <= chunk.bytes(),
            "{}",
            request.name
        );
        ranges.push((slot.chunk, slot.offset, slot.offset + request.bytes));
    }
    ranges.sort();
    for pair in ranges.windows(2) {
        assert!(pair[0].0 != pair[1].0 || pair[0].2 <= pair[1].1, "buffers overlap: {pair:?}");
    }
}

#[test]
fn on_an_integrated_gpu_ffn_weights_go_to_gtt_and_the_rest_to_vram() {
    let config = published("gemma-3-27b");
    let machine = Machine::on_paper(16 * GIB, 30 * GIB);
    let of = plan(&config, &machine, ALL, 8192);
    for class in [Class::Attention, Class::Embedding, Class::Norms, Class::Activations, Class::KvCache] {
        assert_eq!(split(&of, class).1, 0, "{}", class.name());
        assert!(split(&of, class).0 > 0, "{}", class.name());
    }
    for class in [Class::Ffn, Class::Staging] {
        assert_eq!(split(&of, class).0, 0, "{}", class.name());
        assert!(split(&of, class).1 > 0, "{}", class.name());
    }
    // The driver splits 48 GiB in the same way: two thirds and one third.
    let of = plan(&config, &apu(48 * GIB), Limits::default(), 8192);
    assert_eq!((split(&of, Class::Attention).1, split(&of, Class::Ffn).0), (0, 0));
}

#[test]
fn ffn_weights_go_to_vram_if_configured() {
    let config = published("gemma-3-27b");
    let limits = Limits { ffn_heap: FfnHeap::Vram, ..ALL };
    let roomy = plan(&config, &Machine::on_paper(24 * GIB, 24 * GIB), limits, 8192);
    assert!(split(&roomy, Class::Ffn).0 > 10 * GIB && split(&roomy, Class::Ffn).1 == 0);
    // FFN weights are placed last, so they get what the other classes leave, and the rest spills.
    let tight = plan(&config, &Machine::on_paper(8 * GIB, 24 * GIB), limits, 8192);
    assert!(split(&tight, Class::Ffn).0 > GIB && split(&tight, Class::Ffn).1 > GIB);
    assert_eq!((split(&tight, Class::Attention).1, split(&tight, Class::KvCache).1), (0, 0));

    // `unicorn plan` for 24 GiB of each, with FFN weights in one or the other.
    let ffn_heap = |option: &[&str]| {
        let machine = ["--vram", "24GiB", "--gtt", "24GiB", "--context", "1024"];
        let shape = ["--shape", "gemma-3-27b", "--scheme", "int4-g128"];
        let line = plan_as_json(&[&shape[..], &machine, option].concat());
        let rows = line["placements"].as_array().expect("a list").iter();
        rows.filter(|row| row["class"] == "FFN weights").map(|row| row["heap"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(ffn_heap(&[]), [json!("GTT")]);
    assert_eq!(ffn_heap(&["--ffn-heap", "vram"]), [json!("VRAM")]);
}

#[test]
fn ffn_weights_go_to_the_heap_that_was_read_clearly_faster() {
    use FfnHeap::{Auto, Gtt, Vram};
    let config = published("gemma-3-4b");
    for (wanted, [vram, gtt], is_vram_first, part) in [
        (
            Auto,
            [72.0, 61.0],
            true,
            "VRAM first: VRAM was read at 72.0 GB/s, clearly faster than GTT at 61.0 GB/s",
        ),
        (Auto, [63.1, 60.0], true, "clearly faster"),
        (Auto, [63.0, 60.0], false, "GTT first: VRAM was read at 63.0 GB/s, not clearly faster than GTT"),
        (Auto, [60.0, 72.0], false, "not clearly faster"),
        (Auto, [0.0, 0.0], false, "it was not measured"),
        (Auto, [72.0, 0.0], false, "it was not measured"),
        (Auto, [0.0, 61.0], false, "it was not measured"),
        (Gtt, [72.0, 61.0], false, "as memory.ffn_heap says"),
        (Vram, [61.0, 72.0], true, "as memory.ffn_heap says"),
    ] {
        let machine = measured_apu(48 * GIB, vram, gtt);
        let choice = machine.ffn_choice(wanted);
        assert_eq!(choice.is_vram_first, is_vram_first, "{wanted:?} {vram} {gtt}");
        assert!(choice.to_string().contains(part), "{choice}");
        let plan = plan(&config, &machine, Limits { ffn_heap: wanted, ..Limits::default() }, 1024);
        let (in_vram, in_gtt) = split(&plan, Class::Ffn);
        assert_eq!([in_vram > 0, in_gtt > 0], [is_vram_first, !is_vram_first], "{wanted:?} {vram} {gtt}");
    }
    // A device with one kind of memory for weights has no choice, whatever is configured.
    for machine in [one_heap(23 * GIB), discrete()] {
        for wanted in FfnHeap::ALL {
            let choice = machine.ffn_choice(wanted);
            assert_eq!((choice.is_vram_first, choice.reason), (true, FfnReason::OneKind), "{wanted:?}");
        }
    }
}

#[test]
fn the_slowest_heap_in_use_is_the_speed_of_a_plan() {
    let config = published("gemma-3-4b");
    let slowest = |[vram, gtt]: [f64; 2], ffn_heap| {
        let machine = measured_apu(48 * GIB, vram, gtt);
        plan(&config, &machine, Limits { ffn_heap, ..Limits::default() }, 1024).slowest_read()
    };
    assert_eq!(slowest([72.0, 61.0], FfnHeap::Gtt), Some(61_000_000_000));
    // The only buffers in GTT are staging.
    assert_eq!(slowest([72.0, 61.0], FfnHeap::Vram), Some(72_000_000_000));
    assert_eq!(slowest([72.0, 0.0], FfnHeap::Vram), Some(72_000_000_000));
    assert_eq!(slowest([72.0, 0.0], FfnHeap::Gtt), None);
}

#[test]
fn the_table_shows_what_spills_into_another_heap() {
    // GTT holds 4 GiB of the FFN weights, and VRAM the rest. A KV cache larger than VRAM is in both.
    let config = published("gemma-3-27b");
    let spilled = plan(&config, &Machine::on_paper(20 * GIB, 4 * GIB), ALL, 1024);
    let (vram, gtt) = split(&spilled, Class::Ffn);
    assert!(gtt > 3 * GIB && vram > 6 * GIB, "{gtt} in GTT, {vram} in VRAM");
    let rows = spilled.placements();
    assert_eq!(rows.iter().filter(|row| row.class == Class::Ffn).count(), 2, "{rows:?}");

    let machine = Machine::on_paper(8 * GIB, 38 * GIB);
    let request = model_request(&config);
    let plan = request.place(&machine, &ALL, 16_384, request.pools(16_384, 8)).unwrap();
    check(&machine, &ALL, &plan);
    let (vram, gtt) = split(&plan, Class::KvCache);
    assert!(vram > 3 * GIB && gtt > 8 * GIB, "{vram} in VRAM, {gtt} in GTT");
    assert_eq!(split(&plan, Class::Attention).1, 0, "attention is placed before the KV cache");
}

#[test]
fn on_a_discrete_gpu_weights_stay_out_of_host_memory() {
    let machine = discrete();
    let config = published("gemma-3-4b");
    let plan = plan(&config, &machine, Limits::default(), 8192);
    let host: Vec<_> = plan.placements().into_iter().filter(|p| p.heap.contains("host")).collect();
    assert!(host.iter().all(|p| p.class == Class::Staging) && !host.is_empty(), "{host:?}");

    // The model would fit into the 16 GiB of host memory, but not into the card.
    let config = published("gemma-3-27b");
    let request = model_request(&config);
    let refusal = request.place(&machine, &ALL, 16, request.pools(16, 1)).unwrap_err();
    assert_eq!((refusal.obstacle, refusal.request.class), (Obstacle::Full, Class::Ffn));
}

/// The classes of a model's buffers. A dense model of texts has no experts, no vision tower and, in most architectures, no
/// per-layer embedding.
const CLASSES: usize = Class::ALL.len() - 3;

#[test]
fn with_one_heap_everything_is_placed_there() {
    let plan = plan(&published("gemma-3-27b"), &one_heap(23 * GIB), Limits::default(), 512);
    assert_eq!(plan.placements().len(), CLASSES, "one row for each class");
}

#[test]
fn a_model_that_does_not_fit_is_refused_with_the_table_and_a_suggestion() {
    let config = published("gemma-3-27b");
    let request = model_request(&config);
    let machine = Machine::on_paper(16 * GIB, 4 * GIB);

    // If the context is too long, the error names the largest context that fits.
    let error = request.fit(&machine, &ALL, Some(100_000), 1, &[]).unwrap_err();
    let largest = error.largest_context;
    assert!(largest > 1000 && largest.is_multiple_of(16), "{largest}");
    request.fit(&machine, &ALL, Some(largest), 1, &[]).unwrap();
    request.fit(&machine, &ALL, Some(largest + 16), 1, &[]).unwrap_err();
    let message = error.to_string();
    let parts = [
        "100000 tokens",
        "VRAM",
        "GTT",
        "KV cache 8.3 GiB",
        "FFN weights 10.3 GiB",
        &format!("--context {largest}"),
    ];
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in {message}");
    }
    assert!(!message.contains('\n'), "{message}");
    let table = error.refusal.table();
    assert_eq!(table.len(), CLASSES + 2, "{table:#?}");

    // If no context fits, the error names the largest scheme that would fit.
    let bf16 = MemoryRequest {
        schemes: Schemes::uniform(&config, Scheme::Bf16, Scheme::Bf16, Scheme::Bf16),
        ..request.clone()
    };
    let others =
        [("a", Scheme::Int8Row), ("b", Scheme::int4(128)), ("c", Scheme::int4(32)), ("d", Scheme::F32)].map(
            |(name, s)| (format!("--quantize {name}"), Schemes::uniform(&config, s, s, Scheme::Int8Row)),
        );
    let error = bf16.fit(&machine, &ALL, None, 1, &others).unwrap_err();
    assert_eq!(error.largest_context, 0);
    let (option, context) = error.smaller.clone().expect("a scheme that fits");
    assert_eq!(option, "--quantize c");
    assert!(
        error.to_string().contains(&format!("--quantize c would fit, with a context of {context} tokens"))
    );
    let error = bf16.fit(&Machine::on_paper(GIB, 0), &ALL, None, 1, &others).unwrap_err();
    assert_eq!((error.largest_context, &error.smaller), (0, &None));
    assert!(error.to_string().contains("memory.vram"), "{error}");
}

#[test]
fn no_allocation_is_larger_than_the_device_allows() {
    let machine = Machine::on_paper(64 * GIB, 0);
    let limit = 4 * GIB - 64 * KIB; // 4 GiB - 4, in whole chunks
    place(&machine, &ALL, vec![request(Class::KvCache, limit)]).unwrap();
    let refusal = place(&machine, &ALL, vec![request(Class::KvCache, limit + 1)]).unwrap_err();
    assert_eq!(refusal.obstacle, Obstacle::TooLarge { limit });
    assert!(refusal.to_string().contains("one allocation"), "{refusal}");

    // The bf16 embedding of the 27B exceeds half of the limit, so it is split. The keys of a context are not split.
    let config = published("gemma-3-27b");
    let request = MemoryRequest {
        schemes: Schemes::uniform(&config, Scheme::int4(32), Scheme::int4(32), Scheme::Bf16),
        ..model_request(&config)
    };
    let requests = request.requests(16, request.pools(16, 1));
    let embedding: Vec<u64> =
        requests.iter().filter(|r| r.class == Class::Embedding).map(|r| r.bytes).collect();
    assert_eq!(embedding.len(), 3, "two shards and their address table: {embedding:?}");
    assert_eq!(embedding[..2].iter().sum::<u64>(), 262_208 * 5376 * 2);
    let machine = Machine { max_allocation_bytes: 128 * MIB, ..Machine::on_paper(1 << 50, 0) };
    let request = MemoryRequest { max_shard_bytes: 64 * MIB, ..request };
    // 16 heads of 128 in f16 take 4 KiB for the keys of a token. One block of 16 is for padding tokens.
    assert_eq!(request.largest_context(&machine, &ALL, 1), 128 * 1024 / 4 - 16);
    assert_eq!(request.largest_context(&machine, &ALL, 16), (128 * 1024 / 4 / 16 - 1) / 16 * 16);
}

#[test]
fn budget_limits_and_reserve_bound_the_used_memory() {
    let mut machine = apu(48 * GIB);
    let heaps = |machine: &Machine, limits: Limits| machine.usable(&limits);
    let [host, local] = [16 * GIB, 32 * GIB];
    assert_eq!(heaps(&machine, ALL), [host, local]);
    // The reserve is a tenth of the memory, divided in proportion to the sizes of the heaps.
    let tenth = 48 * GIB / 10;
    let expected = [host - tenth / 3, local - (tenth as u128 * 2 / 3) as u64];
    assert_eq!(heaps(&machine, Limits::default()), expected);
    assert_eq!(heaps(&machine, Limits { reserve: Some(3 * GIB), ..ALL }), [host - GIB, local - 2 * GIB]);
    // Limits above the free bytes have no effect. Lower limits do.
    let limits = Limits { vram: Some(16 * GIB), gtt: Some(99 * GIB), ..ALL };
    assert_eq!(heaps(&machine, limits), [host, 16 * GIB]);
    // Another program uses most of the GPU's own memory.
    machine.heaps[1].free = 2 * GIB;
    assert_eq!(heaps(&machine, limits), [host, 2 * GIB]);
    assert_eq!(heaps(&machine, Limits { reserve: Some(99 * GIB), ..ALL }), [0, 0]);
    // On a small GPU, the reserve is at least 512 MiB.
    assert_eq!(one_heap(2 * GIB).usable(&Limits::default()), [2 * GIB - 512 * MIB]);
    // On a discrete GPU, host memory has no reserve.
    assert_eq!(discrete().usable(&Limits::default())[1], 16 * GIB);
    // Several heaps of a kind share its limit. The larger heap gets its share first.
    let limits = Limits { vram: Some(8 * GIB - 128 * MIB), ..ALL };
    assert_eq!(discrete().usable(&limits), [8 * GIB - 256 * MIB, 16 * GIB, 128 * MIB]);
}

/// Random machines and requests. No heap is overfilled, all requests are placed or all are refused, and each request is
/// in the first heap of its class that had room at its turn.
#[test]
fn random_requests_are_placed_in_order_or_refused() {
    let seed = 0x91ace;
    println!("seed {seed:#x}");
    let (mut placed, mut refused) = (0, 0);
    for round in 0..2000 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed + round);
        let heaps = (0..rng.random_range(1..=4usize)).map(|i| {
            let size = rng.random_range(0..2 * GIB);
            let heap = heap(i, size, rng.random_range(0..=size), i == 0 || rng.random(), rng.random());
            Heap { read: read_at(rng.random_range(50.0..80.0)).filter(|_| rng.random()), ..heap }
        });
        let machine = Machine {
            heaps: heaps.collect(),
            unified: rng.random(),
            max_allocation_bytes: rng.random_range(64 * MIB..GIB),
        };
        let mut limit = |below: u64| rng.random_bool(0.3).then(|| rng.random_range(0..below));
        let (vram, gtt, reserve) = (limit(4 * GIB), limit(4 * GIB), limit(GIB));
        let ffn_heap = FfnHeap::ALL[rng.random_range(0..FfnHeap::ALL.len())];
        let limits = Limits { vram, gtt, reserve, ffn_heap };
        let requests: Vec<Request> = (0..rng.random_range(0..120))
            .map(|_| {
                let class = Class::ALL[rng.random_range(0..Class::ALL.len())];
                let most = if rng.random_bool(0.2) { 64 * MIB } else { 2 * MIB };
                Request { bytes: rng.random_range(1..most), ..request(class, 1) }
            })
            .collect();
        match place(&machine, &limits, requests.clone()) {
            Ok(plan) => {
                placed += 1;
                assert_eq!(plan.requests, requests);
                check(&machine, &limits, &plan);
                in_order(&machine, &limits, &plan, round);
            }
            Err(refusal) => {
                refused += 1;
                let asked: u64 = requests.iter().map(|r| r.bytes).sum();
                assert_eq!(refusal.asked_bytes(), asked, "round {round}");
                assert_eq!(refusal.heaps.len(), machine.heaps.len());
                if let Obstacle::TooLarge { limit } = refusal.obstacle {
                    assert!(refusal.request.bytes > limit && limit <= machine.max_allocation_bytes);
                }
            }
        }
    }
    assert!(placed > 300 && refused > 300, "{placed} placed, {refused} refused: one side was hardly tried");
}

/// Whether FFN weights are to be placed in VRAM first: if it was read more than 5 % faster than GTT, or as configured.
fn is_vram_first(machine: &Machine, ffn_heap: FfnHeap) -> bool {
    let speed = |device_local: bool| {
        let heaps = machine.heaps.iter().filter(|heap| heap.device_local == device_local);
        heaps.max_by_key(|heap| heap.size)?.read.map(|read| read.bytes_per_s as f64)
    };
    match (ffn_heap, speed(true), speed(false)) {
        (FfnHeap::Auto, Some(vram), Some(gtt)) => vram > 1.05 * gtt,
        _ => ffn_heap == FfnHeap::Vram,
    }
}

/// Checks that a request is in a later heap of its class only if the earlier heaps had no room for it.
#[track_caller]
fn in_order(machine: &Machine, limits: &Limits, plan: &Plan, round: u64) {
    let usable = machine.usable(limits);
    let mut order: Vec<usize> = (0..plan.requests.len()).collect();
    order.sort_by_key(|&i| (plan.requests[i].class, plan.requests[i].kind));
    let rank = |class: Class, heap: &Heap| match class {
        Class::Ffn | Class::Experts if is_vram_first(machine, limits.ffn_heap) => {
            u8::from(!heap.device_local)
        }
        Class::Ffn | Class::Experts | Class::PerLayerEmbedding | Class::Staging => {
            u8::from(heap.device_local)
        }
        _ => u8::from(!heap.device_local),
    };
    let mut used = vec![0u64; usable.len()];
    let mut filled = vec![0u64; plan.chunks.len()];
    for i in order {
        let (request, chunk) = (&plan.requests[i], plan.slots[i].chunk);
        let mine = plan.chunks[chunk].heap;
        for (h, heap) in machine.heaps.iter().enumerate() {
            let allowed = if request.kind == MemoryKind::Device {
                machine.unified || heap.device_local
            } else {
                heap.host_visible
            };
            let unified_or_staging = machine.unified || request.kind != MemoryKind::Device;
            let better = allowed
                && h != mine
                && unified_or_staging
                && rank(request.class, heap) < rank(request.class, &machine.heaps[mine]);
            // The request must not fit with a separate chunk. In a shared chunk it takes less.
            let room = usable[h] - used[h];
            assert!(
                !better || request.bytes.next_multiple_of(64 * KIB) > room,
                "round {round}: {} is in {}, and {} has {room} left",
                request.name,
                machine.heaps[mine].name,
                heap.name
            );
        }
        let before = filled[chunk].next_multiple_of(64 * KIB);
        filled[chunk] += request.bytes.next_multiple_of(256);
        used[mine] += filled[chunk].next_multiple_of(64 * KIB) - before;
    }
}

/// The memory of the 27B, computed by hand from the shapes.
#[test]
fn the_27b_takes_the_memory_that_is_computed_by_hand() {
    let config = published("gemma-3-27b");
    let request = model_request(&config);
    let bytes = |class| -> u64 {
        request
            .requests(8192, request.pools(8192, 1))
            .iter()
            .filter(|r| r.class == class)
            .map(|r| r.bytes)
            .sum()
    };
    // int4 in groups of 128: half a byte for each weight, and 2 bytes for each group.
    let int4 = |weights: u64| weights / 2 + weights / 128 * 2;
    let attention = 5376 * 4096 + 2 * 5376 * 2048 + 4096 * 5376;
    assert_eq!(bytes(Class::Attention), 62 * int4(attention));
    assert_eq!(bytes(Class::Ffn), 62 * int4(3 * 5376 * 21_504));
    assert_eq!(bytes(Class::Ffn), 11_087_290_368); // 10.3 GiB
    // int8 takes a byte for each weight, and 2 bytes for each row. The address table has one shard.
    assert_eq!(bytes(Class::Embedding), 262_208 * 5376 + 2 * 262_208 + 16);
    assert_eq!(bytes(Class::Norms), 4 * (62 * (4 * 5376 + 2 * 128) + 5376));
    // 10 full layers have keys and values of 16 heads of 128 in f16. The 52 other layers have a window, the tokens of
    // two steps, and the rest of two blocks. Each layer has one more block for padding tokens.
    assert_eq!(request.kv_bytes_per_token(), 10 * 2 * 16 * 128 * 2);
    assert_eq!(request.kv_bytes_per_token(), 80 * KIB);
    let blocks = (1024u64 + 2 * 256).div_ceil(16) + 1;
    assert_eq!(request.window_bytes(8192), 52 * 2 * blocks * 64 * KIB);
    assert_eq!(bytes(Class::KvCache), (10 * 2 * (8192 / 16 + 1) + 52 * 2 * (blocks + 1)) * 64 * KIB);
    // 110e9 multiply-adds in a step allow 266 tokens for each layer, and the requested step has 256. There are
    // attention partials: one for each of 64 sequences and 448 more, and one for each token and 256 more. There are 64
    // rows of logits, and 64 rows that draws change. There are two tables with 128 f32 for each position, 64 slots with
    // a sum of hidden states each, and the history of one more slot.
    assert_eq!(110_000_000_000 / (attention + 3 * 5376 * 21_504), 266);
    let tokens = 256;
    assert_eq!(request.batch_tokens() as u64, tokens);
    let row = 3 * 5376 + 2 * 4096 + 2 * 2048 + 2 * 21_504;
    let partials = (64 + 448 + tokens + 256) * 32 * (128 + 4);
    // Int8 inputs take two digits of 32 bytes, and 8 bytes more, for each 32 columns. 64 rows are padded to 128.
    let int8 = (tokens * (5376 + 4096 + 21_504) + 128 * 5376) / 32 * 2 * 40;
    // A row of draws takes 8 words, and 42 words of log probabilities, for each of 65 chunks of 4096 logits. It also
    // takes three lists of 4096 ids, eight tallies, and three histograms of 1024.
    let draws = (65 * (8 + 42) + 3 * 4096 + 8 + 3 * 1024u64).next_multiple_of(4);
    let floats = tokens * row + partials + 64 * (2 * 5376 + 2 * 262_208 + draws) + 2 * 8192 * 128 + 65 * 8192;
    let heads = Heads { group: 2, head_dim: 128, kv: request.kv };
    let self_test = self_test::buffer_bytes(&[heads], &[Scheme::Int8Row, Scheme::int4(128)], None);
    assert!((MIB / 2..2 * MIB).contains(&self_test), "{self_test}");
    let expected = 4 * floats + 256 + int8 + self_test;
    assert_eq!(bytes(Class::Activations), expected);

    // The cache gets the remaining memory, in whole blocks of 16. A token also takes 1 KiB of RoPE tables, 4 bytes for
    // each of 65 rows of history and of two arrays that feed it, and 4 bytes for each block and row of the four block
    // tables, which have 64 sequences and one. Rounding to chunks costs a few blocks.
    let fixed: u64 = request
        .requests(16, request.pools(16, 1))
        .iter()
        .filter(|r| r.class != Class::KvCache)
        .map(|r| r.bytes)
        .sum();
    for (gib, sequences) in [(22, 1), (30, 16)] {
        let machine = Machine::on_paper(16 * GIB, (gib - 16) * GIB);
        let unread = (10 + 52) * 2 * 64 * KIB;
        let left = gib * GIB - fixed - unread - sequences * request.window_bytes(8192);
        let counted = left / (sequences * 80 * KIB + KIB + 4 * 67 + 4 * 4 * 65 / 16);
        let largest = request.largest_context(&machine, &ALL, sequences as usize) as u64;
        assert!(largest <= counted && largest + 300 > counted, "{largest}, by hand {counted}");
    }
}

#[test]
fn a_load_allocates_the_planned_memory() {
    let device = Device::open(&policy()).unwrap();
    let files = open_files(&data("gemma3/tiny-a")).unwrap();
    let config = arch::load(&files).unwrap().0;
    let options = LoadOptions { max_context: Some(100), ..LoadOptions::default() };
    let request = MemoryRequest {
        config: &config,
        schemes: Schemes::uniform(&config, Scheme::Bf16, Scheme::Bf16, Scheme::Bf16),
        kv: options.kv,
        block_size: options.block_size,
        max_batch_tokens: options.max_batch_tokens,
        max_shard_bytes: device.info().max_allocation_bytes / 2,
        moments: false,
        offload: None,
        draft: None,
        vision: None,
    };
    let plan = request.place(&device.machine(), &options.memory, 100, request.pools(100, 1)).unwrap();
    let model = ModelRunner::load(&device, &Source::open(&files).unwrap(), &options, &mut |_| {}).unwrap();
    assert_eq!(model.placements(), plan.placements());
    assert_eq!(model.limits().max_context, 100);
    assert_eq!(model.limits().kv.pools[0].blocks, 7);
    if device.memory_use().is_none() {
        assert_eq!(model.residency(), Residency::Unknown);
    }
}

#[test]
fn a_model_that_does_not_fit_is_refused_before_any_allocation() {
    let device = Device::open(&policy()).unwrap();
    let files = open_files(&data("gemma3/tiny-a")).unwrap();
    let load = |vram, gtt, max_context| {
        let memory = Limits { vram: Some(vram), gtt: Some(gtt), ..ALL };
        let options = LoadOptions { memory, max_context, ..LoadOptions::default() };
        let mut heard = false;
        let result =
            ModelRunner::load(&device, &Source::open(&files).unwrap(), &options, &mut |_| heard = true);
        assert_eq!(heard, result.is_ok(), "nothing is read of a model that does not fit");
        result
    };
    let Err(LoadError::DoesNotFit(error)) = load(MIB, 0, None) else { panic!("1 MiB is enough") };
    assert_eq!(error.largest_context, 0);
    assert_eq!(device.allocations(), 0);
    let Err(LoadError::DoesNotFit(error)) = load(12 * MIB, 12 * MIB, Some(4096)) else {
        panic!("12 MiB are enough")
    };
    let largest = error.largest_context;
    assert!(largest > 0 && largest < 4096, "{largest}");
    assert_eq!(device.allocations(), 0);
    // The context that the error names fits.
    let model = load(12 * MIB, 12 * MIB, Some(largest)).unwrap();
    assert_eq!(model.limits().max_context, largest);
    drop(model);
    let model = load(12 * MIB, 12 * MIB, None).unwrap();
    assert_eq!(model.limits().max_context, largest);
}

/// The fdinfo of a process with one amdgpu file, before and after a load of 26 GiB.
#[test]
fn a_load_that_leaves_the_gpu_empty_is_an_error() {
    let process = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(process.path().join("fdinfo")).expect("a folder");
    let held = |vram_kib: u64, gtt_kib: u64| {
        let text = format!(
            "pos:\t0\nflags:\t02100002\ndrm-driver:\tamdgpu\ndrm-client-id:\t42\ndrm-pdev:\t0000:c5:00.0\n\
             drm-memory-vram:\t{vram_kib} KiB\ndrm-memory-gtt: \t{gtt_kib} KiB\ndrm-memory-cpu: \t0 KiB\n"
        );
        std::fs::write(process.path().join("fdinfo/7"), text).expect("written");
        residency::memory_use(process.path(), "0000:c5:00.0")
    };
    let placed = 26 * GIB;
    let (opened, empty) = (held(20 << 10, 4 << 10), held(120 << 10, 60 << 10));
    let denied = residency::compare(placed, opened, empty);
    assert!(matches!(denied, Residency::Denied { .. }), "{denied}");
    let error = LoadError::NotResident(denied).to_string();
    for part in
        ["26.0 GiB were placed", "156.0 MiB", "100.0 MiB in VRAM, 56.0 MiB in GTT", "hardware.strict = false"]
    {
        assert!(error.contains(part), "{part:?} is not in {error}");
    }
    assert!(!error.contains('\n'), "{error}");
    // The driver moved all of VRAM to GTT. Only the sum is checked.
    let moved = held(0, (26 << 20) + (64 << 10));
    assert!(matches!(residency::compare(placed, opened, moved), Residency::Confirmed { .. }));
}

const PLAN_27B: [&str; 9] =
    ["plan", "--shape", "gemma-3-27b", "--scheme", "int4-g128", "--vram", "16GiB", "--gtt", "30GiB"];

#[test]
fn the_plan_in_the_docs_is_the_printed_plan() {
    let (code, stdout, stderr) = output(unicorn(&PLAN_27B));
    assert_eq!((code, stderr.as_str()), (0, ""));
    let page = std::fs::read_to_string(root().join("docs/operations.md")).expect("docs/operations.md");
    let shown = format!("$ unicorn {}\n{stdout}```", PLAN_27B.join(" "));
    assert!(page.contains(&shown), "docs/operations.md shows something else than:\n{shown}");
}

#[test]
fn a_plan_as_json_equals_the_text_and_adds_up() {
    let plan = |args: &[&str]| -> (i32, Value, String) {
        let (code, stdout, stderr) =
            output(unicorn(&[&PLAN_27B[..], &["--json", "--kv", "f16", "--vision", "on"], args].concat()));
        (code, serde_json::from_str(&stdout).expect("one JSON object"), stderr)
    };
    let bytes = |value: &Value| value.as_u64().expect("a number");
    let (code, line, _) = plan(&[]);
    assert_eq!((code, &line["fits"], &line["error"]), (0, &json!(true), &Value::Null));
    assert_eq!(line["kv_bytes_per_token"], json!(80 * KIB));
    let window = bytes(&line["kv_bytes_per_window"]);
    let largest = &line["largest_contexts"];
    let bound = &Value::Null;
    assert_eq!((&largest[0]["context"], &largest[0]["largest_allocation_bytes"]), (&line["context"], bound));
    assert_eq!(bytes(&line["bytes_per_sequence"]), bytes(&line["context"]) * 80 * KIB + window);
    for heap in line["heaps"].as_array().expect("a list") {
        let rows = line["placements"].as_array().expect("a list").iter();
        let placed: u64 =
            rows.filter(|r| r["heap"] == heap["name"]).map(|r| bytes(&r["allocated_bytes"])).sum();
        assert_eq!(bytes(&heap["placed_bytes"]), placed);
        assert!(placed <= bytes(&heap["usable_bytes"]));
    }
    // With 16 sequences, the largest context that the plan names fits, and a longer one does not.
    let each = bytes(&largest[1]["context"]);
    let context = |context: u64| plan(&["--sequences", "16", "--context", &context.to_string()]);
    assert_eq!(context(each).0, 0);
    let (code, line, stderr) = context(each + 16);
    assert_eq!((code, &line["fits"], &line["placements"]), (1, &json!(false), &Value::Null));
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    let way_out = format!("--context {each} would fit");
    assert!(
        stderr.contains(&way_out) && line["error"].as_str().expect("text").contains(&way_out),
        "{stderr}"
    );
}

/// With as long a context as fits without the tower, a load leaves it out.
#[test]
fn a_plan_says_why_a_tower_is_left_out() {
    let plan = |args: &[&str]| -> Value {
        printed_json(unicorn(
            &[&PLAN_27B[..], &["--json", "--kv", "f16", "--sequences", "16"], args].concat(),
        ))
    };
    let has_tower = |plan: &Value| {
        let rows = plan["placements"].as_array().expect("a list");
        rows.iter().any(|row| row["class"] == "vision weights")
    };
    let fitting = plan(&[]);
    assert!(has_tower(&fitting) && fitting["vision_left_out"].is_null(), "{fitting}");
    let without = plan(&["--vision", "off"]);
    assert!(!has_tower(&without) && without["vision_left_out"].is_null(), "{without}");
    let longest = |plan: &Value| {
        let all = plan["largest_contexts"].as_array().expect("a list");
        all.iter().find(|one| one["sequences"] == 16).expect("16 sequences")["context"].to_string()
    };
    assert_ne!(longest(&fitting), longest(&without));
    let context = longest(&without);
    let left_out = plan(&["--context", &context]);
    assert!(!has_tower(&left_out) && left_out["vision_left_out"].is_string(), "{left_out}");
    let kv = ["--kv", "f16", "--sequences", "16", "--context", &context];
    let text = printed(unicorn(&[&PLAN_27B[..], &kv].concat()));
    let reason = left_out["vision_left_out"].as_str().expect("a reason");
    assert!(text.contains(&format!("\nvision tower     left out: {reason}\n")), "{text}");
}

#[test]
fn a_plan_names_limits_of_the_context_other_than_memory() {
    let plan = |args: &[&str]| {
        let shape = ["plan", "--shape", "gemma-3-27b", "--scheme", "int4-g128", "--vram", "900GiB"];
        let (code, stdout, stderr) = output(unicorn(&[&shape[..], &["--kv", "f16"], args].concat()));
        assert_eq!((code, stderr.as_str()), (0, ""));
        stdout
    };
    let json = |args: &[&str]| -> Value { serde_json::from_str(&plan(args)).expect("one JSON object") };
    // A context beyond the maximum of the model is reduced, and the plan says so.
    let text = plan(&["--context", "200000"]);
    let cut = "131072 tokens for 1 sequence: fits (200000 were requested; the model's maximum is 131072)";
    assert!(text.contains(cut), "{text}");
    let line = json(&["--json", "--context", "200000"]);
    assert_eq!((&line["context"], &line["cut_to_model_maximum"]), (&json!(131_072), &json!(true)));
    let line = json(&["--json", "--context", "131072"]);
    assert_eq!((&line["context"], &line["cut_to_model_maximum"]), (&json!(131_072), &json!(false)));
    // For sixteen sequences, the keys of one layer take 4 KiB a token in f16, in one allocation of less than 4 GiB. Most of
    // the memory stays unused.
    let text = plan(&[]);
    for row in [
        "largest context  131072 tokens for 1 sequence\n",
        "65520 tokens for each of 16 sequences (one allocation holds at most 4.0 GiB)\n",
    ] {
        assert!(text.contains(row), "{row:?} is not in {text}");
    }
    assert_eq!(line["largest_contexts"][0]["largest_allocation_bytes"], Value::Null);
    assert_eq!(line["largest_contexts"][1]["largest_allocation_bytes"], json!((4 * GIB) - 64 * KIB));
}

/// A full step of the 27B reads 14.6 GB of weights. A token takes 8 KiB in each of its 62 layers, of which 52 see a
/// window of 1024.
#[test]
fn auto_takes_int8_where_a_step_reads_a_tenth_as_many_keys_and_values_as_weights() {
    let spec = published("gemma-3-27b");
    let schemes = model_request(&spec).schemes;
    let auto = |context, sequences| ChosenKv::auto(&spec, &schemes, context, sequences);
    for (context, sequences, percent, dtype) in [
        (512, 5, "8.9 %", KvDtype::F16),
        (512, 6, "10.7 %", KvDtype::Int8),
        (100, 16, "5.6 %", KvDtype::F16),
        // Without windows, this context would be 14 %.
        (4096, 1, "5.3 %", KvDtype::F16),
        (131_072, 1, "76.5 %", KvDtype::Int8),
    ] {
        let chosen = auto(context, sequences);
        assert_eq!(chosen.dtype, dtype, "{context} tokens, {sequences} sequences: {chosen}");
        let why = chosen.why.expect("it was chosen");
        assert!(why.contains(percent), "{context} tokens, {sequences} sequences: {why}");
    }
    // With the default limits, every published model but one is beyond the bound, also in bf16: of that one, four layers
    // keep 32,768 positions, and a step reads 8 GB of weights.
    for shape in arch::shapes() {
        let spec = shape.spec();
        let schemes = Schemes::uniform(&spec, Scheme::Bf16, Scheme::Bf16, Scheme::Bf16);
        let chosen = ChosenKv::auto(&spec, &schemes, spec.max_position_embeddings, 16);
        let expected = if shape.name == "gemma-3n-e4b" { KvDtype::F16 } else { KvDtype::Int8 };
        assert_eq!(chosen.dtype, expected, "{}: {chosen}", shape.name);
    }
}

#[test]
fn a_plan_shows_the_type_of_keys_and_values_that_auto_takes() {
    let plan = |args: &[&str], variables: &[(&str, &str)]| -> Value {
        let mut command = unicorn(&[&PLAN_27B[..], &["--json"], args].concat());
        command.envs(variables.iter().copied());
        let (code, stdout, stderr) = output(command);
        assert_eq!(code, 0, "{stderr}");
        serde_json::from_str(&stdout).expect("one JSON object")
    };
    let type_of = |line: &Value| line["kv_dtype"].as_str().expect("a type").to_owned();
    let (auto, int8, f16) = (plan(&[], &[]), plan(&["--kv", "int8"], &[]), plan(&["--kv", "f16"], &[]));
    assert_eq!([&auto, &int8, &f16].map(type_of), ["int8", "int8", "f16"]);
    assert!(auto["kv_dtype_why"].as_str().expect("a reason").contains("76.5 %"), "{auto}");
    assert_eq!((&int8["kv_dtype_why"], &f16["kv_dtype_why"]), (&Value::Null, &Value::Null));
    let bytes = |line: &Value| line["kv_bytes_per_token"].as_u64().expect("a number");
    assert_eq!((bytes(&auto), bytes(&f16)), (10 * 2 * 16 * (128 + 4), 10 * 2 * 16 * 2 * 128));
    assert_eq!(auto["placed_bytes"], int8["placed_bytes"]);
    // The limits of a load decide, and so does its precision.
    let one = ("UNICORN_ENGINE_SEQUENCES", "1");
    assert_eq!(type_of(&plan(&["--context", "4096"], &[])), "int8");
    assert_eq!(type_of(&plan(&["--context", "4096"], &[one])), "f16");
    assert_eq!(type_of(&plan(&["--context", "4096", "--sequences", "6"], &[one])), "int8");
    assert_eq!(type_of(&plan(&[], &[("UNICORN_MODEL_PRECISION", "f32")])), "f16");
    let int8 = ("UNICORN_KV_DTYPE", "int8");
    assert_eq!(type_of(&plan(&["--context", "4096"], &[one, int8])), "int8");
    assert_eq!(type_of(&plan(&["--context", "4096", "--kv", "auto"], &[one, int8])), "f16");
}

#[test]
fn a_shape_is_planned_with_the_types_of_gguf_files() {
    let args = "--shape gemma-3-27b --vram 64GiB --scheme int4-g32-super --feed-forward int5-g32-super \
                --embedding int6-g16-supersym";
    let line = plan_as_json(&args.split(' ').collect::<Vec<_>>());
    // Each number is the bytes of 256 weights.
    let (attention, ffn, embedding) = (128 + 4 + 16, 128 + 32 + 4 + 16, 128 + 64 + 2 + 16);
    let layer = 5376u64 * (2 * 4096 + 2 * 2048) / 256 * attention + 3 * 5376 * 21_504 / 256 * ffn;
    // The norms are f32: four for each layer, two for its queries and keys, and the last one. The embedding has the
    // address of its one shard.
    let norms = 4 * (62 * (4 * 5376 + 2 * 128) + 5376) + 16;
    assert_eq!(line["weight_bytes"], json!(62 * layer + 262_208 * 5376u64 / 256 * embedding + norms));
}

#[test]
fn a_checkpoint_is_planned_with_its_own_schemes() {
    let folder = tiny_model();
    let model = folder.path().to_str().expect("UTF-8");
    let weights = |args: &[&str]| -> u64 {
        let line = plan_as_json(&[&[model, "--vram", "1GiB"], args].concat());
        line["weight_bytes"].as_u64().expect("a number")
    };
    let (own, int4) = (weights(&[]), weights(&["--quantize", "int4-g32"]));
    let projections = 8 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 256);
    assert_eq!(own - int4, projections * 2 - projections / 2 - projections / 32 * 2);

    assert_error(unicorn(&["plan", model]), 1, &["Vulkan", "--vram and --gtt"]);
    assert_error(unicorn(&["plan", "/proc/nonexistent", "--vram", "1GiB"]), 1, &["/proc/nonexistent"]);
    // A load refuses the same model as a plan does.
    for (command, code) in [(&["generate", "--prompt", "x"][..], 1), (&["serve", "--port", "0"], 78)] {
        let memory = ["--model", model, "--vram", "64KiB", "--gtt", "64KiB", "--allow-software-vulkan"];
        let refused = unicorn_on_software(&[command, &memory].concat());
        assert_error(refused, code, &["does not fit", "64.0 KiB of heap", "attention weights"]);
    }
}

/// A shape without a scheme is planned with the default scheme of `unicorn quantize`, and the plan says so.
#[test]
fn a_shape_without_a_scheme_is_planned_with_the_default_one() {
    let json = |args: &[&str]| plan_as_json(&[&["--shape", "gemma-3-27b"], args].concat());
    let assumed = json(&["--vram", "16G", "--gtt", "30g"]);
    let mut said = json(&["--scheme", "int4-g32", "--vram", "16GiB", "--gtt", "30GiB"]);
    assert_eq!((&said["assumption"], said["fits"].as_bool()), (&Value::Null, Some(true)), "{said}");
    said["assumption"] = "int4-g32 is assumed, since no --scheme was given".into();
    assert_eq!(assumed, said);
    let (_, text, _) = output(unicorn(&["plan", "--shape", "gemma-3-27b", "--vram", "16G", "--gtt", "30G"]));
    assert!(text.contains("embedding int8-row (int4-g32 is assumed, since no --scheme was given)"), "{text}");
    let doctor = ["doctor", "--shape", "gemma-3-270m", "--allow-software-vulkan"];
    let (_, report, stderr) = output(unicorn_on_software(&doctor));
    assert!(report.contains("int4-g32 is assumed"), "{report}{stderr}");
}

/// A memory table of `tests/data/memory_types`: the kind of device, the memory types that buffers may use as a bit
/// mask, heaps and types.
#[derive(serde::Deserialize)]
struct DriverTable {
    kind: String,
    buffers: u32,
    heaps: Vec<TableHeap>,
    types: Vec<(usize, u32)>,
}

#[derive(serde::Deserialize)]
struct TableHeap {
    mib: u64,
    device_local: bool,
}

impl DriverTable {
    fn read(name: &str) -> (DeviceKind, u32, MemoryTable) {
        let file = data(format!("memory_types/{name}.toml"));
        let text = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        assert!(text.contains("source") || text.contains("https://"), "{name}: does not name its source");
        let table: DriverTable = toml::from_str(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
        let kind = match table.kind.as_str() {
            "integrated" => DeviceKind::Integrated,
            "discrete" => DeviceKind::Discrete,
            "cpu" => DeviceKind::Cpu,
            other => panic!("{name}: kind {other:?}"),
        };
        let heaps = table.heaps.iter().map(|heap| (heap.mib * MIB, heap.device_local)).collect();
        let types = table.types.iter().map(|&(heap, flags)| MemoryType { heap, flags }).collect();
        (kind, table.buffers, MemoryTable { heaps, types })
    }
}

const KINDS: [MemoryKind; 3] = [MemoryKind::Device, MemoryKind::Upload, MemoryKind::Readback];

#[test]
fn memory_types_are_chosen_by_their_properties() {
    // For each heap: the types for device memory, uploads and readbacks, best first.
    type Expected = &'static [[&'static [u32]; 3]];
    let tables: [(&str, Expected); 8] = [
        // In GTT, memory that the host writes is write-combined, and memory that it reads is cached. In VRAM, mapped
        // types come before unmapped ones.
        ("radeon-780m-radv", &[[&[2, 5], &[2, 5], &[5, 2]], [&[3, 0], &[3], &[3]]]),
        ("radeon-780m-radv-unified", &[[&[2, 0], &[2], &[2]]]),
        ("radeon-rx-6800-radv", &[[&[0], &[], &[]], [&[], &[2, 5], &[5, 2]], [&[3], &[3], &[3]]]),
        ("radeon-rx-6800-radv-rebar", &[[&[], &[2, 5], &[5, 2]], [&[0, 3], &[3], &[3]]]),
        ("ryzen-7950x-amd-proprietary", &[[&[0], &[], &[]], [&[1, 3], &[1, 3], &[3, 1]], [&[2], &[2], &[2]]]),
        ("geforce-rtx-2080-nvidia", &[[&[1], &[], &[]], [&[], &[2, 3], &[3, 2]], [&[4], &[4], &[4]]]),
        ("geforce-nvidia-rebar", &[[&[1, 4], &[4], &[4]], [&[], &[2, 3], &[3, 2]]]),
        ("lavapipe", &[[&[0], &[0], &[0]]]),
    ];
    for (name, heaps) in tables {
        let (device, buffers, table) = DriverTable::read(name);
        assert_eq!(heaps.len(), table.heaps.len(), "{name}");
        for (heap, expected) in heaps.iter().enumerate() {
            for (kind, expected) in KINDS.into_iter().zip(expected) {
                let types = table.suitable(device, kind, Some(heap), buffers);
                println!("{name:28} heap {heap} {kind:9?} {types:?}");
                assert_eq!(&types, expected, "{name}: heap {heap}, {kind:?}");
            }
        }
    }
}

#[test]
fn the_order_of_memory_types_does_not_depend_on_the_driver() {
    let files = std::fs::read_dir(data("memory_types")).expect("a folder").map(|entry| entry.unwrap().path());
    let names = files.filter(|path| path.extension().is_some_and(|extension| extension == "toml"));
    for path in names {
        let name = path.file_stem().unwrap().to_str().unwrap();
        let (device, buffers, table) = DriverTable::read(name);
        let n = table.types.len() as u32;
        // The same table with the types in reverse order.
        let backwards = MemoryTable { types: table.types.iter().rev().copied().collect(), ..table.clone() };
        let mask = (0..n).filter(|i| buffers & (1 << i) != 0).map(|i| 1 << (n - 1 - i)).sum();
        for kind in KINDS {
            for heap in (0..table.heaps.len()).map(Some).chain([None]) {
                let of = |table: &MemoryTable, mask| -> Vec<MemoryType> {
                    let types = table.suitable(device, kind, heap, mask);
                    types.into_iter().map(|i| table.types[i as usize]).collect()
                };
                let (types, again) = (of(&table, buffers), of(&backwards, mask));
                assert_eq!(types, again, "{name}: {kind:?} in heap {heap:?}");
                // Types with unknown properties, and types that need flushes by the host, are never chosen.
                assert!(types.iter().all(|t| t.flags & !0xf == 0), "{name}: {types:x?}");
                let mapped = |t: &MemoryType| t.flags & 0x6 == 0x6;
                assert!(kind == MemoryKind::Device || types.iter().all(mapped), "{name}: {types:x?}");
            }
        }
    }
}

/// The heap that placement chooses, and the memory type in this heap.
#[test]
fn on_the_780m_ffn_weights_are_in_write_combined_gtt_memory() {
    let (device, buffers, table) = DriverTable::read("radeon-780m-radv");
    let place_read_at = |gb_per_s: [f64; 2], class, kind, ffn_heap| {
        let mut heaps = table.heap_infos();
        heaps.iter_mut().zip(gb_per_s).for_each(|(heap, gb_per_s)| heap.read = read_at(gb_per_s));
        let machine = Machine::of(&heaps, device, 0xffff_fffc);
        let request = Request { kind, ..request(class, 100 * MIB) };
        let plan = place(&machine, &Limits { ffn_heap, ..ALL }, vec![request]).expect("it fits");
        let heap = plan.heaps[plan.chunks[plan.slots[0].chunk].heap].heap.index;
        let chosen = table.suitable(device, kind, Some(heap), buffers)[0];
        (heap, table.types[chosen as usize].flags)
    };
    use MemoryKind::{Device, Readback, Shared, Upload};
    assert_eq!(place_read_at([60.0, 70.0], Class::Ffn, Device, FfnHeap::Auto), (1, 0x07));
    assert_eq!(place_read_at([70.0, 70.0], Class::Ffn, Device, FfnHeap::Auto), (0, 0x06));
    let place = |class, kind, ffn_heap| place_read_at([60.0, 70.0], class, kind, ffn_heap);
    assert_eq!(place(Class::Ffn, Device, FfnHeap::Gtt), (0, 0x06));
    assert_eq!(place(Class::Ffn, Device, FfnHeap::Vram), (1, 0x07));
    assert_eq!(place(Class::KvCache, Device, FfnHeap::Gtt), (1, 0x07));
    assert_eq!(place(Class::Staging, Upload, FfnHeap::Gtt), (0, 0x06));
    assert_eq!(place(Class::Staging, Readback, FfnHeap::Gtt), (0, 0x0e));
    assert_eq!(place(Class::Staging, Shared, FfnHeap::Gtt), (0, 0x06));
}

/// An export shares a complete allocation, so no other buffer may be in it.
#[test]
fn exported_memory_has_its_own_allocation() {
    let staging = |kind| Request { kind, ..request(Class::Staging, 3 * MIB) };
    let requests =
        [MemoryKind::Upload, MemoryKind::Shared, MemoryKind::Upload, MemoryKind::Shared].map(staging);
    let plan = place(&Machine::on_paper(GIB, GIB), &ALL, requests.to_vec()).expect("it fits");
    let [first, shared, second, other] = [0, 1, 2, 3].map(|i| plan.slots[i].chunk);
    assert_eq!((first, plan.chunks.len()), (second, 3), "{plan:?}");
    assert!(shared != other && shared != first && other != first, "{plan:?}");
    assert_eq!((plan.chunks[shared].used, plan.slots[3].offset), (3 * MIB, 0));
}
