//! Compiles the kernels for the target GPU, a Radeon 780M that need not be present, with the compilers of RADV in the
//! installed Mesa and in Mesa 26. `unicorn-lab isa` runs them.
//!
//! The tests pin properties of the compiled kernels. A change that makes a kernel worse for this GPU fails on a machine
//! without it.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;

use crate::support::program::{assert_error, lab, lab_on_software, printed_json};
use crate::support::{root, skip, wants_all};

const ICDS: [&str; 2] =
    ["/usr/share/vulkan/icd.d/radeon_icd.json", "/usr/share/vulkan/icd.d/radeon_icd.x86_64.json"];

/// Matrix products in f32, by kernel variant: vector ALU instructions per weight for 1, 2, 4, 8, 16 and 32 tokens. Each
/// number is the larger one of both compilers.
const VALU_PER_WEIGHT: [(&str, [f64; 6]); 17] = [
    ("matmul_bf16", [2.88, 4.00, 6.25, 10.75, 19.75, 37.75]),
    ("matmul_f16", [1.88, 3.00, 5.25, 9.75, 18.75, 36.75]),
    ("matmul_f32", [2.75, 4.00, 6.50, 11.50, 21.50, 41.50]),
    ("matmul_int4", [3.97, 5.00, 7.06, 11.19, 19.44, 35.94]),
    ("matmul_int4_affine", [3.84, 5.88, 9.94, 18.06, 34.31, 66.81]),
    ("matmul_int4_affine16", [3.84, 5.88, 9.94, 18.06, 34.31, 66.81]),
    ("matmul_int4_super", [4.62, 6.66, 10.72, 18.84, 35.09, 67.62]),
    ("matmul_int4_zero", [3.88, 5.91, 9.97, 18.09, 34.34, 66.84]),
    ("matmul_int5", [5.12, 6.38, 8.56, 12.81, 21.31, 38.31]),
    ("matmul_int5_affine16", [4.88, 7.06, 11.25, 19.50, 36.00, 69.06]),
    ("matmul_int5_super", [6.50, 8.69, 12.88, 21.12, 37.69, 70.69]),
    ("matmul_int6_supersym", [6.44, 7.56, 9.81, 14.06, 22.62, 39.62]),
    ("matmul_int8", [4.19, 5.25, 7.38, 11.62, 20.12, 37.12]),
    ("matmul_int8_affine", [4.94, 7.00, 11.12, 19.38, 35.88, 68.88]),
    ("matmul_int8_row", [3.44, 4.50, 6.62, 10.88, 19.38, 36.38]),
    ("matmul_int8_super", [6.50, 8.56, 12.69, 20.94, 37.50, 70.50]),
    ("matmul_int8_zero", [5.00, 7.06, 11.19, 19.44, 35.94, 68.94]),
];
/// Matrix products in int8, for one matrix or for gate and up, by the number of weight blocks that share a
/// scale, for 1, 2, 4, 8, 16 and 32 tokens. The goals for int4 in groups of 128 are at most 1.1, 3.8, 6.8 and 13 for 1,
/// 8, 16 and 32 tokens.
const FAST_VALU_PER_WEIGHT: [(&str, u64, &[u64], [f64; 6]); 38] = [
    ("fast_matmul_int4", 0, &[1, 4], [1.06, 1.41, 2.09, 3.47, 6.22, 11.72]),
    ("fast_matmul_int4", 1, &[1, 4], [1.05, 1.39, 2.08, 3.45, 6.20, 11.70]),
    ("fast_matmul_int4_affine", 0, &[1, 4], [1.12, 1.56, 2.44, 4.19, 7.69, 14.69]),
    ("fast_matmul_int4_affine", 1, &[1, 4], [1.11, 1.53, 2.38, 4.06, 7.44, 14.19]),
    ("fast_matmul_int4_affine16", 0, &[1], [1.09, 1.53, 2.41, 4.16, 7.66, 14.66]),
    ("fast_matmul_int4_affine16", 1, &[1], [1.08, 1.50, 2.34, 4.03, 7.41, 14.16]),
    ("fast_matmul_int4_super", 0, &[1, 4], [1.56, 2.00, 2.88, 4.62, 8.12, 15.12]),
    ("fast_matmul_int4_super", 1, &[1, 4], [1.48, 1.91, 2.75, 4.44, 7.81, 14.56]),
    ("fast_matmul_int4_zero", 0, &[1, 4], [1.12, 1.56, 2.44, 4.19, 7.69, 14.69]),
    ("fast_matmul_int4_zero", 1, &[1, 4], [1.11, 1.53, 2.38, 4.06, 7.44, 14.19]),
    ("fast_matmul_int5", 0, &[2], [1.66, 2.00, 2.69, 4.06, 6.81, 12.31]),
    ("fast_matmul_int5", 1, &[2], [1.64, 1.98, 2.67, 4.05, 6.80, 12.30]),
    ("fast_matmul_int5_affine16", 0, &[2], [1.69, 2.12, 3.00, 4.75, 8.25, 15.25]),
    ("fast_matmul_int5_affine16", 1, &[2], [1.67, 2.09, 2.94, 4.62, 8.00, 14.75]),
    ("fast_matmul_int5_super", 0, &[1], [2.94, 3.56, 4.81, 7.31, 12.31, 22.31]),
    ("fast_matmul_int5_super", 0, &[2], [2.16, 2.59, 3.47, 5.22, 8.72, 15.72]),
    ("fast_matmul_int5_super", 1, &[1], [2.84, 3.44, 4.62, 7.00, 11.78, 21.25]),
    ("fast_matmul_int5_super", 1, &[2], [2.08, 2.50, 3.34, 5.03, 8.41, 15.16]),
    ("fast_matmul_int6_supersym", 0, &[1], [2.66, 3.09, 3.97, 5.72, 9.22, 16.22]),
    ("fast_matmul_int6_supersym", 1, &[1], [2.56, 3.00, 3.88, 5.62, 9.12, 16.12]),
    ("fast_matmul_int8", 0, &[1], [1.56, 2.00, 2.88, 4.62, 8.12, 15.12]),
    ("fast_matmul_int8", 0, &[2], [1.31, 1.66, 2.34, 3.72, 6.47, 11.97]),
    ("fast_matmul_int8", 1, &[1], [1.55, 1.98, 2.86, 4.61, 8.11, 15.11]),
    ("fast_matmul_int8", 1, &[2], [1.30, 1.64, 2.33, 3.70, 6.45, 11.95]),
    ("fast_matmul_int8_affine", 0, &[1], [1.62, 2.25, 3.50, 6.00, 11.00, 21.00]),
    ("fast_matmul_int8_affine", 0, &[2], [1.25, 1.69, 2.56, 4.31, 7.81, 14.81]),
    ("fast_matmul_int8_affine", 1, &[1], [1.59, 2.19, 3.38, 5.75, 10.50, 20.00]),
    ("fast_matmul_int8_affine", 1, &[2], [1.23, 1.66, 2.50, 4.19, 7.56, 14.31]),
    ("fast_matmul_int8_row", 0, &[1], [1.12, 1.44, 2.06, 3.31, 5.81, 10.81]),
    ("fast_matmul_int8_row", 1, &[1], [1.12, 1.44, 2.06, 3.31, 5.81, 10.81]),
    ("fast_matmul_int8_super", 0, &[1], [2.59, 3.22, 4.47, 6.97, 11.97, 22.00]),
    ("fast_matmul_int8_super", 0, &[2], [1.81, 2.25, 3.12, 4.88, 8.38, 15.38]),
    ("fast_matmul_int8_super", 1, &[1], [2.55, 3.15, 4.33, 6.70, 11.45, 20.97]),
    ("fast_matmul_int8_super", 1, &[2], [1.73, 2.16, 3.00, 4.69, 8.06, 14.81]),
    ("fast_matmul_int8_zero", 0, &[1], [1.59, 2.22, 3.47, 5.97, 11.00, 21.00]),
    ("fast_matmul_int8_zero", 0, &[2], [1.25, 1.69, 2.56, 4.31, 7.81, 14.81]),
    ("fast_matmul_int8_zero", 1, &[1], [1.56, 2.16, 3.34, 5.72, 10.48, 19.97]),
    ("fast_matmul_int8_zero", 1, &[2], [1.23, 1.66, 2.50, 4.19, 7.56, 14.31]),
];
/// Products in int8 as above: instructions of the scalar unit, branches included, and scalar loads, of one trip for 1,
/// 2, 4, 8, 16 and 32 tokens. Where they are more than the vector instructions, the scalar unit bounds the product. With
/// 32 tokens, half of the instructions that Mesa 26 needs for int4 move registers; Mesa 25 needs 141 in all.
const SCALAR: [(&str, u64, u64, [[u64; 6]; 2]); 3] = [
    ("fast_matmul_int4", 0, 4, [[42, 44, 48, 82, 128, 258], [2, 2, 3, 5, 10, 20]]),
    ("fast_matmul_int4", 1, 4, [[46, 48, 52, 70, 102, 152], [2, 2, 3, 5, 10, 20]]),
    // The scales are loaded one by one, because these weights need no sums.
    ("fast_matmul_int8_row", 0, 1, [[49, 50, 52, 61, 72, 134], [2, 3, 6, 12, 24, 48]]),
];
/// The sizes whose kernels are compiled: those of the headline's family. One is a mixture of experts, and
/// the last one has several residual streams.
const SHAPES: &str = "gemma-3-270m,gemma-3-1b,gemma-3-4b,gemma-3-12b,gemma-3-27b,gemma-4-12b,gemma-4-31b,\
                      gemma-4-26b-a4b,gemma-4-e2b,gemma-4-e4b,gemma-3n-e4b";
/// Tolerance for additional instructions of another compiler release.
const MARGIN: f64 = 1.02;

/// Whether a kernel other than a matrix product writes int8.
fn quantizes(shader: &str) -> bool {
    let kernels = ["rms_norm", "layer_norm", "glu", "activate", "attention_merge"];
    let yields = kernels.iter().any(|kernel| shader.starts_with(kernel));
    shader == "quantize" || yields && (shader.ends_with("_int8") || shader.ends_with("_both"))
}

/// The minimum number of waves of 32 lanes (a wave of 64 counts as two), and the maximum number of vector registers of
/// a pipeline.
fn bounds(name: &str) -> (u64, u64) {
    let (shader, constants) = name.split_once(' ').unwrap_or((name, ""));
    // The last constant of a product says whether it is one of experts, which have the same bounds.
    let constants = match constants.rsplit_once('x') {
        Some((others, _)) if shader.contains("matmul") => others,
        _ => constants,
    };
    let is_shifted = ["_affine", "_affine16", "_super", "_zero"].iter().any(|s| shader.ends_with(s));
    match (shader.split('_').next().expect("a name"), constants) {
        ("matmul", tile) if ["matmul_bf16", "matmul_f16", "matmul_f32"].contains(&shader) => match tile {
            "16" => (16, 48),
            "32" => (12, 80),
            _ => (16, 32),
        },
        ("matmul", "1" | "2" | "4" | "8") => (16, 64),
        ("matmul", "16") => (12, 80),
        // Weights with a shift also need the sums of their activations.
        ("matmul", _) if is_shifted => (8, 128),
        ("matmul", _) => (10, 96),
        // A subgroup has sums of half of the dimensions of sixteen rows.
        ("attention", _) if shader.contains("_in_tiles_") => (4, 256),
        // A team of a tile has eight query heads, whose values take 64 registers.
        ("attention", tile) if tile.ends_with("x8") => (8, 128),
        // A team of single tokens has four query heads.
        ("attention", "4x256x4" | "4x512x4") => (10, 96),
        // The values of sixteen query heads take 128 registers, and the products with their keys as many.
        ("attention", "16x512x16") => (4, 256),
        // Keys and values in f32 are four times as wide as in int8.
        ("attention", tile) if shader == "attention_f32" && !tile.is_empty() => (12, 80),
        // The values to quantize stay in registers, twice if they have a second digit.
        _ if quantizes(shader) => (16, 64),
        ("attention", tile) if !tile.is_empty() => (16, 64),
        // Each lane has sixteen logits in registers and reads them repeatedly.
        ("logprobs", _) if shader == "logprobs_parts" => (16, 64),
        // Each lane has four logits with their masses, and four bins of 64 bits.
        ("sample", _) if !["sample_maxima", "sample_greedy"].contains(&shader) => (16, 64),
        // A lane has four columns of four streams, and of the four results.
        ("altup", _) => (16, 64),
        // Mesa 26 loads a column of many experts before it uses the first one.
        ("route", _) => (16, 64),
        // The kernel keeps thirty-two chains in registers on purpose. No model step runs it.
        ("peak", _) => (16, 64),
        // Each lane has two sets of 64 f32 sums: for the current segment and for the segments before it.
        ("fast", _) if shader.ends_with("_in_tiles") => (4, 256),
        ("fast", constants) => match constants.split('x').collect::<Vec<_>>()[..] {
            // The loop has a second copy of its body for second digits.
            [_, _, _, "1", _] => (4, 256),
            // The sums of activations are floats in vector registers here. No load of a column waits for that of
            // another one, so Mesa 26 computes several columns at a time.
            ["16", "0", ..] if is_shifted => (12, 80),
            ["32", "0", ..] if is_shifted => (8, 128),
            ["32", "0", ..] => (12, 80),
            // Five bits are unpacked for two groups of a block, each with a scale and a shift.
            ["8", "0", "1", ..] if shader == "fast_matmul_int5_super" => (12, 80),
            [_, "0", ..] => (16, 64),
            // A block has two groups, each with a scale and a shift, for two matrices.
            ["1" | "2", "1", "1", _, _]
                if shader == "fast_matmul_int5_super"
                    || shader.starts_with("fast_matmul_int8_") && !shader.ends_with("_row") =>
            {
                (8, 128)
            }
            ["1" | "2", "1", ..] if is_shifted || shader.ends_with("_supersym") => (12, 80),
            ["1" | "2", "1", ..] => (15, 64),
            _ => (8, 128),
        },
        _ => (16, 32),
    }
}

fn isa(device: &str, args: &[&str]) -> Command {
    let mut command = lab_on_software(&["isa", "--device", device, "--json"]);
    // `unicorn-lab` finds Mesa 26 relative to this folder.
    command.args(args).current_dir(root());
    command
}

/// The reports of the compilers for a Radeon 780M. They run once. `None` = there is no AMD driver.
fn reports_for_780m() -> Option<&'static Value> {
    static REPORT: OnceLock<Option<Value>> = OnceLock::new();
    let ask = || {
        let has_driver = ICDS.iter().any(|icd| Path::new(icd).exists());
        has_driver.then(|| printed_json(isa("phoenix", &["--shape", SHAPES])))
    };
    REPORT.get_or_init(ask).as_ref()
}

/// The report of one compiler, or the reason why it did not run.
fn compiler(name: &'static str) -> Result<&'static Value, &'static str> {
    let report = reports_for_780m().ok_or("radv")?;
    let found = report["compilers"].as_array().expect("a list").iter().find(|c| c["compiler"] == name);
    found.ok_or_else(|| {
        assert!(
            report["left_out"].as_str().is_some_and(|why| why.starts_with(name)),
            "{}",
            report["left_out"]
        );
        "mesa26"
    })
}

const COMPILERS: [&str; 2] = ["RADV's null device", "RADV 26 over a shim"];

fn number(value: &Value, field: &str) -> u64 {
    value[field].as_u64().unwrap_or_else(|| panic!("{field} of {}", value["name"]))
}

/// Checks every pipeline of all model sizes in the report of one compiler against the pinned numbers.
#[track_caller]
fn check_pipelines(compiler: &Value) {
    let pipelines = compiler["pipelines"].as_array().expect("a list");
    println!("{}, {}", compiler["device"], compiler["driver"]);
    let (mut products, mut of_experts, mut tiles, mut scalar) = (0, 0, 0, 0);
    for pipeline in pipelines {
        let name = pipeline["name"].as_str().expect("a name");
        let number = |field: &str| number(pipeline, field);
        let (waves, vgprs) = (number("wave32_per_simd"), number("vgprs"));
        println!("{name}: {waves} waves of 32 lanes, {vgprs} VGPRs, waves of {}", number("wave_size"));
        assert_eq!(number("spilled_vgprs") + number("spilled_sgprs"), 0, "{name}: spills");
        assert_eq!(number("scratch_bytes"), 0, "{name}: scratch memory");
        let (least, most) = bounds(name);
        assert!(waves >= least, "{name}: {waves} waves are too few to hide memory, {least} are expected");
        assert!(vgprs <= most, "{name}: {vgprs} vector registers, at most {most} leave these waves");
        // An int8 row may begin at any address.
        if name.starts_with("attention_") && name.contains(' ') && !name.contains("int8") {
            let wide = pipeline["steady"]["trip"]["wide_loads"].as_u64();
            assert!(wide >= Some(16), "{name}: keys and values are not read 16 bytes at a time");
        }
        let Some((variant, _)) = name.split_once(' ').filter(|(v, _)| v.contains("matmul")) else {
            continue;
        };
        if is_of_experts(pipeline) {
            of_experts += 1;
            check_experts(pipeline);
            continue;
        }
        // The tuner may choose these kernels, and measures their time itself.
        if constants(pipeline).len() == 5 && constants(pipeline)[3] == 1 {
            check_rounding(pipeline);
            continue;
        }
        if variant.ends_with("_in_tiles") {
            tiles += 1;
            check_tiles(pipeline);
            continue;
        }
        products += 1;
        // The layout of weights lets a lane read 16 bytes in one load. `src/tensor/layout.rs` is frozen because of
        // this. Activations and their scales are loaded by the scalar unit, because all lanes use the same activation.
        let steady = &pipeline["steady"];
        assert!(
            steady["trip"]["wide_loads"].as_u64() > Some(0),
            "{name}: weights are not read 16 bytes at a time"
        );
        assert!(
            steady["trip"]["scalar_loads"].as_u64() > Some(0),
            "{name}: activations are read by each lane"
        );
        let pins = match constants(pipeline)[..] {
            [_, gated, blocks, 0, _] => {
                check_loads(pipeline);
                check_rounding(pipeline);
                let is_it = |pins: &&(&str, u64, &[u64], [f64; 6])| {
                    (pins.0, pins.1) == (variant, gated) && pins.2.contains(&blocks)
                };
                FAST_VALU_PER_WEIGHT.iter().find(is_it).map(|pins| pins.3)
            }
            _ => VALU_PER_WEIGHT.iter().find(|pins| pins.0 == variant).map(|pins| pins.1),
        };
        let columns = COLUMNS.iter().position(|columns| *columns == constants(pipeline)[0]).expect("a width");
        scalar += usize::from(check_scalar(pipeline, variant, columns));
        let pinned = pins.unwrap_or_else(|| panic!("{name}: no such variant"))[columns];
        let valu = steady["valu_per_weight"].as_f64().expect("a product takes weights");
        assert!(
            valu <= pinned * MARGIN,
            "{name}: {valu:.2} vector instructions for each weight, expected {pinned}"
        );
    }
    assert_eq!(check_attention(pipelines), 6);
    assert_eq!(scalar, SCALAR.len() * COLUMNS.len());
    let fast = FAST_VALU_PER_WEIGHT.iter().map(|pins| pins.2.len()).sum::<usize>();
    assert_eq!(products, (VALU_PER_WEIGHT.len() + fast) * COLUMNS.len());
    // Tiles multiply one matrix, for 64 and for 128 tokens.
    let single = FAST_VALU_PER_WEIGHT.iter().filter(|pins| pins.1 == 0).map(|pins| pins.2.len());
    let single = single.sum::<usize>();
    assert_eq!(tiles, single * 2);
    // Products of experts take the rows of x in order or from a list. Gated products take a list.
    let by_lanes = (2 * VALU_PER_WEIGHT.len() + single + fast) * COLUMNS.len();
    assert_eq!(of_experts, by_lanes + 2 * tiles);
}

fn is_of_experts(pipeline: &Value) -> bool {
    pipeline["constants"].as_array().expect("a list").last() != Some(&Value::from(0))
}

/// A product of experts reads each weight once for all of its columns, as a plain product does.
fn check_experts(pipeline: &Value) {
    let (name, shader) = (&pipeline["name"], pipeline["shader"].as_str().expect("a name"));
    let columns = pipeline["constants"][0].as_u64().expect("a number");
    let steady = &pipeline["steady"];
    let trip = &steady["trip"];
    if shader.ends_with("_in_tiles") {
        assert_eq!(number(trip, "wmma"), 128 * columns * 32 / 16u64.pow(3) / 8, "{name}: matrix products");
        return;
    }
    assert!(number(trip, "wide_loads") > 0, "{name}: weights are not read 16 bytes at a time");
    if shader.starts_with("fast_") {
        let gated = pipeline["constants"][1].as_u64().expect("a number");
        let blocks = number(steady, "trips_unrolled") * (1 + gated);
        assert_eq!(number(trip, "dot4"), 8 * columns * blocks, "{name}: dot products");
        let loads = if shader.contains("_int8") { 2 } else { 1 };
        assert!(number(trip, "wide_loads") >= loads * blocks, "{name}: loads of 16 bytes");
    }
}

/// Attention of prompts in tiles computes at least three times as many products in a cycle as by lanes with keys and
/// values in f16, and 2.9 times as many with int8, which must become f16 first. Returns the number of compared kernels.
fn check_attention(pipelines: &[Value]) -> usize {
    let rate = |pipeline: &Value| {
        let trip = &pipeline["steady"]["trip"];
        number(trip, "macs") as f64 / number(trip, "cycles") as f64
    };
    let named = |name: String| pipelines.iter().find(|pipeline| pipeline["name"] == *name).map(rate);
    let mut compared = 0;
    for (kv, least) in [("f16", 3.5), ("int8", 2.9)] {
        for heads in ["2x128", "2x256", "4x256"] {
            let by_lanes = named(format!("attention_tile_{kv} {heads}x8"));
            let in_tiles = named(format!("attention_in_tiles_{kv} {heads}x32x16x16x16x2x2"));
            let Some((by_lanes, in_tiles)) = by_lanes.zip(in_tiles) else { continue };
            println!(
                "attention, {kv}, {heads}: {in_tiles:.2} products a lane and cycle, {by_lanes:.2} by lanes"
            );
            assert!(in_tiles >= least * by_lanes, "{kv}, {heads}: {in_tiles} in tiles, {by_lanes} by lanes");
            compared += 1;
        }
    }
    compared
}

const COLUMNS: [u64; 6] = [1, 2, 4, 8, 16, 32];

/// The constants of a product, without the last one, which is 0 unless it is a product of experts.
fn constants(pipeline: &Value) -> Vec<u64> {
    let mut all: Vec<u64> =
        pipeline["constants"].as_array().expect("a list").iter().flat_map(Value::as_u64).collect();
    assert_eq!(all.pop(), Some(0), "{}: a product of experts", pipeline["name"]);
    all
}

/// One iteration of an int8 product has eight dot products for each column of a block, and loads each 16 bytes of
/// weights once.
fn check_loads(pipeline: &Value) {
    let [columns, gated, ..] = constants(pipeline)[..] else { panic!("columns, gated, ...") };
    let (name, steady) = (&pipeline["name"], &pipeline["steady"]);
    let (trip, unrolled) = (&steady["trip"], number(steady, "trips_unrolled"));
    let blocks = unrolled * (1 + gated);
    assert_eq!(number(trip, "dot4"), 8 * columns * blocks, "{name}: dot products");
    // Five-bit and six-bit weights need two loads: one for the low four bits, one for the high bits.
    let loads = if pipeline["shader"].as_str().expect("a name").contains("_int8") { 2 } else { 1 };
    assert_eq!(number(trip, "wide_loads"), loads * blocks, "{name}: loads of 16 bytes");
    // A load has the activations of two columns.
    assert!(2 * number(trip, "scalar_loads") >= columns * unrolled, "{name}: activations");
}

/// Whether the scalar instructions of a product are pinned. They are at most the pinned ones.
fn check_scalar(pipeline: &Value, variant: &str, columns: usize) -> bool {
    let [_, gated, blocks, 0, _] = constants(pipeline)[..] else { return false };
    let mut pinned = SCALAR.iter().filter(|pins| (pins.0, pins.1, pins.2) == (variant, gated, blocks));
    let Some((.., [salu, loads])) = pinned.next() else { return false };
    let (name, trip) = (&pipeline["name"], &pipeline["steady"]["trip"]);
    let counted = number(trip, "salu") + number(trip, "branches");
    let most = salu[columns] as f64 * MARGIN;
    assert!(counted as f64 <= most, "{name}: {counted} scalar instructions, expected {}", salu[columns]);
    let counted = number(trip, "scalar_loads");
    assert!(counted <= loads[columns], "{name}: {counted} scalar loads, expected {}", loads[columns]);
    true
}

/// The rounding instructions of one iteration must be those that `shaders/common/fast.glsl` lists, once for each
/// column. So the compiler fused and split no operation.
fn check_rounding(pipeline: &Value) {
    let [columns, gated, scale_blocks, _, _] = constants(pipeline)[..] else {
        panic!("columns, gated, blocks of a scale, shared activations, activation")
    };
    let (name, shader) = (&pipeline["name"], pipeline["shader"].as_str().expect("a name"));
    let (trip, unrolled) = (&pipeline["steady"]["trip"], number(&pipeline["steady"], "trips_unrolled"));
    let is_any = |suffixes: &[&str]| suffixes.iter().any(|suffix| shader.ends_with(suffix));
    let in_halves = !shader.contains("_int4") && !is_any(&["_row"]) && scale_blocks % 2 == 1;
    let groups = unrolled * (1 + gated) * (1 + u64::from(in_halves));
    let terms = 1 + u64::from(is_any(&["_zero", "_affine", "_affine16", "_super"]));
    // Instructions that compute a scale and a shift from the stored numbers.
    let made = match shader.rsplit('_').next() {
        Some("super") => 2,
        Some("zero" | "supersym") => 1,
        _ => 0,
    };
    let fmas = columns * groups * terms;
    // The scale of a whole row is applied after the loop.
    let products = if is_any(&["_row"]) { 0 } else { fmas + made * groups };
    let counted = ["f32_fma", "f32_mul", "f32_add"].map(|field| number(trip, field));
    assert_eq!(counted, [fmas, products, 0], "{name}: multiply-adds, products, sums of f32");
}

/// One iteration of a tiled product has 32 columns of 128 rows by 64 or 128 tokens, which eight waves share. Its rounding
/// instructions must be those that `shaders/common/fast.glsl` lists, and matrix instructions must take a minimum share
/// of the time.
fn check_tiles(pipeline: &Value) {
    let [columns, halves, ..] = constants(pipeline)[..] else { panic!("columns, halves, ...") };
    let (name, shader) = (&pipeline["name"], pipeline["shader"].as_str().expect("a name"));
    let trip = &pipeline["steady"]["trip"];
    assert_eq!(number(trip, "wmma"), 128 * columns * 32 / 16u64.pow(3) / 8, "{name}: matrix products");
    let is_shifted = ["_zero_", "_affine_", "_affine16_", "_super_"].iter().any(|s| shader.contains(s));
    let fmas = 128 * columns / 256 * halves * (1 + u64::from(is_shifted));
    let products = if shader.contains("_row_") { 0 } else { fmas };
    assert_eq!((number(trip, "f32_fma"), number(trip, "f32_add")), (fmas, 0), "{name}: multiply-adds, sums");
    // Instructions that compute a scale, a shift and magnitudes from the stored numbers.
    let made = number(trip, "f32_mul").checked_sub(products);
    assert!(made.is_some_and(|made| made <= 6), "{name}: {made:?} products more than {products}");
    let share = 32.0 * number(trip, "wmma") as f64 / number(trip, "cycles") as f64;
    println!("{name}: {:.0} % of the rate of matrix products", 100.0 * share);
    // build.rs makes shared memory visible at barriers, so that not every access waits for the one before it.
    let [waits, accesses] = ["waits", "lds"].map(|field| number(trip, field));
    assert!(8 * waits < 7 * accesses, "{name}: {waits} waits for {accesses} accesses of shared memory");
    let least = match (columns, halves, is_shifted) {
        (128, 1, false) => 0.70,
        (128, 1, true) => 0.62,
        (128, _, false) => 0.55,
        // Five bits are unpacked for two groups of a block, each with a scale and a shift.
        (128, _, true) if shader.contains("_int5_") => 0.44,
        (128, _, true) => 0.45,
        (_, 1, false) => 0.63,
        (_, 1, true) => 0.56,
        (_, _, false) => 0.49,
        (_, _, true) => 0.42,
    };
    assert!(share >= least, "{name}: matrix products take {share:.2} of the time, expected at least {least}");
}

#[test]
fn every_pipeline_fits_the_registers_of_a_radeon_780m() {
    compiler(COMPILERS[0]).map_or_else(skip, check_pipelines);
}

#[test]
fn every_pipeline_fits_the_registers_with_the_compiler_of_mesa_26() {
    compiler(COMPILERS[1]).map_or_else(skip, check_pipelines);
}

/// The statistics of the driver for a pipeline agree with the counts from its assembly.
#[test]
fn instructions_are_counted_as_the_driver_counts_them() {
    if reports_for_780m().is_none() {
        return skip("radv");
    }
    for compiler in COMPILERS.into_iter().filter_map(|name| compiler(name).ok()) {
        for pipeline in compiler["pipelines"].as_array().expect("a list") {
            let (total, theirs) = (&pipeline["total"], &pipeline["statistics"]);
            let ours = |field: &str| total[field].as_u64().expect("a count");
            let name = &pipeline["name"];
            // The driver counts a dual issue as one instruction.
            assert_eq!(Some(ours("valu") - ours("dual")), theirs["VALU"].as_u64(), "{name}: VALU");
            assert_eq!(Some(ours("dual")), theirs["VOPD"].as_u64(), "{name}: VOPD");
            let vector = ours("vector_loads") + ours("vector_stores");
            assert_eq!(Some(vector), theirs["VMEM"].as_u64(), "{name}: VMEM");
            assert_eq!(Some(ours("scalar_loads")), theirs["SMEM"].as_u64(), "{name}: SMEM");
            assert_eq!(Some(ours("salu")), theirs["SALU"].as_u64(), "{name}: SALU");
            assert_eq!(Some(ours("branches")), theirs["Branches"].as_u64(), "{name}: branches");
            // The driver does not count the padding of instruction cache lines.
            assert!(Some(ours("instructions")) >= theirs["Instructions"].as_u64(), "{name}: instructions");
        }
    }
}

/// If the LLVM of the installed Mesa does not know a GPU, the compiler's own listing is read instead.
#[test]
fn gpus_related_to_the_780m_are_analyzed_too() {
    if reports_for_780m().is_none() {
        return skip("radv");
    }
    // `make test` analyzes the kernels of a prediction for one of them.
    let (devices, of): (&[&str], &[&str]) = match wants_all("UNICORN_TEST_KERNELS") {
        true => (&["gfx1151", "gfx1150"], &[]),
        false => (&["gfx1151"], &["--used"]),
    };
    for device in devices {
        let report = printed_json(isa(device, &[&["--shape", "gemma-3-270m"], of].concat()));
        for compiler in report["compilers"].as_array().expect("a list") {
            for pipeline in compiler["pipelines"].as_array().expect("a list") {
                let (name, total) = (&pipeline["name"], &pipeline["total"]);
                let valu =
                    total["valu"].as_u64().expect("a count") - total["dual"].as_u64().expect("a count");
                assert_eq!(Some(valu), pipeline["statistics"]["VALU"].as_u64(), "{device}, {name}");
                let is_product = pipeline["shader"].as_str().expect("a name").contains("matmul");
                assert_eq!(pipeline["steady"]["valu_per_weight"].is_f64(), is_product, "{device}, {name}");
            }
        }
    }
}

fn lines_of(prediction: &Value) -> &Vec<Value> {
    prediction["lines"].as_array().expect("a list")
}

fn pipeline_of(line: &Value) -> &str {
    line["pipeline"].as_str().expect("a name")
}

/// Types and depth change the bytes per token, and the precision changes the kernels.
#[test]
fn isa_follows_its_options() {
    let Some(plain) = reports_for_780m() else { return skip("radv") };
    let folder = tempfile::tempdir().expect("a folder");
    let assembly = folder.path().to_str().expect("UTF-8");
    let types = ["--quantize", "int8-row", "--kv", "int8", "--precision", "f32", "--depth", "4096"];
    let other = printed_json(isa(
        "phoenix",
        &[&types[..], &["--shape", "gemma-3-4b", "--used", "--assembly", assembly]].concat(),
    ));
    let one = |report: &Value, what: &str| {
        let predictions = report["compilers"][0]["predictions"].as_array().expect("a list");
        let is_it = |p: &&Value| p["shape"] == "gemma-3-4b" && p["what"] == what;
        predictions.iter().find(is_it).expect("predicted").clone()
    };
    let sum = |report: &Value, field: &str| -> f64 {
        lines_of(&one(report, "batch 1")).iter().map(|line| line[field].as_f64().expect("a figure")).sum()
    };
    let shapes = other["compilers"][0]["predictions"].as_array().expect("a list");
    assert!(shapes.iter().all(|p| p["shape"] == "gemma-3-4b"), "only the requested size");
    assert!(sum(&other, "weight_bytes") > 1.5 * sum(plain, "weight_bytes"), "int8 instead of int4");
    // 8 times as many keys in five of 34 layers, and twice as many in the others, at half the size.
    assert!(sum(&other, "kv_bytes") > sum(plain, "kv_bytes"), "4096 tokens instead of 512");
    assert_eq!(
        (&other["kv"], &other["depth"], &other["quantize"]),
        (&"int8".into(), &4096.into(), &"int8-row".into())
    );
    let kernels = |report: &Value, what: &str| -> Vec<String> {
        lines_of(&one(report, what)).iter().map(|line| pipeline_of(line).to_owned()).collect()
    };
    assert_ne!(kernels(&other, "batch 1"), kernels(plain, "batch 1"), "f32 products use other kernels");
    let of_tower = |report: &Value, product: &str| {
        let is_it = |name: &&String| name.contains("matmul") && !name.starts_with(product);
        assert_eq!(kernels(report, "image 256").iter().find(is_it), None, "the matrices of a tower");
    };
    of_tower(plain, "fast_matmul_int8_row");
    of_tower(&other, "matmul_bf16");
    // Only what the predictions use was compiled, and written.
    let used: BTreeSet<&str> = shapes.iter().flat_map(lines_of).map(pipeline_of).collect();
    for compiler in other["compilers"].as_array().expect("a list") {
        let compiled = compiler["pipelines"].as_array().expect("a list");
        let compiled: BTreeSet<&str> = compiled.iter().map(|p| p["name"].as_str().expect("a name")).collect();
        assert_eq!(compiled, used, "{}", compiler["compiler"]);
    }
    let drivers: Vec<_> = std::fs::read_dir(folder.path()).expect("a folder").flatten().collect();
    for driver in &drivers {
        assert_eq!(std::fs::read_dir(driver.path()).expect("a folder").count(), used.len(), "{driver:?}");
    }
    assert_eq!(
        drivers.len(),
        other["compilers"].as_array().expect("a list").len(),
        "a folder for each compiler"
    );
}

#[test]
fn predictions_exist_for_every_size_and_batch_and_add_up() {
    let Some(report) = reports_for_780m() else { return skip("radv") };
    let predictions = report["compilers"][0]["predictions"].as_array().expect("a list");
    let images = predictions.iter().filter(|p| is_of_image(p)).count();
    assert_eq!(images, 3 + 3 * 2, "three sizes have images of one size, and three of several");
    assert_eq!(
        predictions.len() - images,
        11 * 8,
        "eleven sizes; five batches, one with top_p, and two prompts"
    );
    let chip = &report["chip"];
    for prediction in predictions {
        let f = |value: &Value| value.as_f64().expect("a figure");
        let lines = lines_of(prediction);
        let mut ms = f(&prediction["overhead_ms"]);
        for line in lines {
            let bytes = f(&line["weight_bytes"]) * f(&line["weight_reads"])
                + f(&line["kv_bytes"])
                + f(&line["activation_bytes"]);
            let memory = bytes / f(&chip["gb_per_s"]) / 1e6;
            let rounds = (f(&line["waves"]) / f(&chip["simds"])).ceil();
            let unit = |name: &str| rounds * f(&line["wave_cycles"][name]) / f(&chip["clock_ghz"]) / 1e6;
            let longest = ["valu", "salu", "lds"].map(unit).into_iter().fold(memory, f64::max);
            ms += f(&line["times"]) * longest;
        }
        let what = (&prediction["shape"], &prediction["what"]);
        let tokens_per_s = f(&prediction["predicted_tokens_per_s"]);
        let by_hand = f(&prediction["tokens"]) / ms * 1e3;
        assert!((by_hand / tokens_per_s - 1.0).abs() < 1e-9, "{what:?}: {tokens_per_s}, by hand {by_hand}");
        let steps: Vec<f64> = prediction["step_ms"].as_array().expect("a list").iter().map(f).collect();
        // Layers of the largest size take fewer tokens at a time, so that a step is not too long.
        let chunk = if prediction["shape"] == "gemma-4-31b" { 192 } else { 256usize };
        let expected =
            if prediction["what"] == "prefill 8192" { 8192usize.div_ceil(chunk) } else { steps.len() };
        assert_eq!(steps.len(), expected, "{what:?}: a step for each chunk");
        assert!((steps.iter().sum::<f64>() / ms - 1.0).abs() < 1e-9, "{what:?}: {steps:?}");
    }
    let tokens_per_s = |shape: &str, what: &str| {
        let one = predictions.iter().find(|p| p["shape"] == shape && p["what"] == what).expect("predicted");
        one["predicted_tokens_per_s"].as_f64().expect("a figure")
    };
    // One stream of the 27B reads 14.6 GB of weights at 73 GB/s, so the prediction must be slower than this limit.
    let one = tokens_per_s("gemma-3-27b", "batch 1");
    assert!((4.0..73.0 / 14.6).contains(&one), "{one}");
    // The mixture reads 2.15 GB for a token at least, and is faster with every further sequence.
    let mixture = ["batch 1", "batch 8", "batch 16", "batch 32", "batch 64"]
        .map(|what| tokens_per_s("gemma-4-26b-a4b", what));
    assert!((26.0..73.0 / 2.15).contains(&mixture[0]) && mixture.is_sorted(), "{mixture:?}");
}

/// Whether a prediction is about an image, and not about text.
fn is_of_image(prediction: &Value) -> bool {
    prediction["what"].as_str().expect("a name").starts_with("image")
}

/// The times to encode an image are between those of its multiply-adds alone, of which the vector units compute at most
/// 8.3 T a second, and those of `docs/operations.md`. The tower of Gemma-3 has 2.72 T (1.68 T of products and 1.04 T of
/// attention); that of Gemma 4 has 1.8 T at 280 tokens and 12 T at 1120, and its linear map (12B) 41 M for each token.
#[test]
fn images_take_a_780m_no_longer_than_the_docs_say() {
    if reports_for_780m().is_none() {
        return skip("radv");
    }
    for compiler in COMPILERS.into_iter().filter_map(|name| compiler(name).ok()) {
        let predictions = compiler["predictions"].as_array().expect("a list");
        for image in predictions.iter().filter(|p| is_of_image(p)) {
            let (shape, tokens) = (image["shape"].as_str().expect("a name"), &image["tokens"]);
            let ms = image["predicted_ms"].as_f64().expect("a figure");
            println!("{}: {shape} encodes an image of {tokens} tokens in {ms:.1} ms", compiler["driver"]);
            let wanted = match (shape, tokens.as_u64().expect("a number")) {
                ("gemma-4-12b", 280) => 1.4..=8.0,
                ("gemma-4-12b", 1120) => 5.5..=25.0,
                ("gemma-4-26b-a4b" | "gemma-4-31b", 280) => 220.0..=1000.0,
                ("gemma-4-26b-a4b" | "gemma-4-31b", 1120) => 1450.0..=4000.0,
                (_, 256) => 330.0..=1000.0,
                (_, other) => panic!("{shape}: an image of {other} tokens"),
            };
            assert!(wanted.contains(&ms), "{shape}, {tokens} tokens: {ms} ms");
        }
    }
}

/// The sizes for machines with little memory answer at a speed that suits a conversation: tokens/s alone, and of a prompt of
/// 512 tokens.
#[test]
fn small_sizes_answer_a_780m_as_fast_as_wanted() {
    if reports_for_780m().is_none() {
        return skip("radv");
    }
    for compiler in COMPILERS.into_iter().filter_map(|name| compiler(name).ok()) {
        let predictions = compiler["predictions"].as_array().expect("a list");
        let of = |shape: &str, what: &str| {
            let is_it = |p: &&Value| p["shape"] == shape && p["what"] == what;
            let found = predictions.iter().find(is_it).unwrap_or_else(|| panic!("{shape}, {what}"));
            found["predicted_tokens_per_s"].as_f64().expect("a figure")
        };
        for (shape, alone, prompt) in
            [("gemma-4-e4b", 20.0, 1200.0), ("gemma-4-e2b", 38.0, 2200.0), ("gemma-3n-e4b", 20.0, 1000.0)]
        {
            let found = (of(shape, "batch 1"), of(shape, "prefill 512"));
            println!("{}: {shape} {found:.1?} tokens/s", compiler["driver"]);
            assert!(found.0 >= alone && found.1 >= prompt, "{shape}: {found:?} tokens/s");
        }
    }
}

#[test]
fn an_unsupported_gpu_is_refused_with_the_supported_ones() {
    let parts = ["\"navi10\"", "phoenix, gfx1150, gfx1151"];
    assert_error(lab(&["isa", "--device", "navi10"]), 1, &parts);
}
