//! Native checkpoints. The files that `unicorn quantize` and `unicorn-lab synth` write hold exactly the given weights. An
//! interrupted conversion can be continued, and does not load until it is complete. Damaged files are refused by name.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use half::f16;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use unicorn::checkpoint::{Checkpoint, Manifest, verify};
use unicorn::model::arch::{self, open_files};
use unicorn::model::load::{LoadOptions, Progress, Source};
use unicorn::model::model_runner::ModelRunner;
use unicorn::model::tensors::Inputs;
use unicorn::model::weights::Weights;
use unicorn::quantize::{quantize_row, quantize_row_searching};
use unicorn::tensor::{
    Precision, QuantizeMode, QuantizedRow, Scheme, pack_plain_row, pack_row, unpack_plain_row, unpack_row,
};
use unicorn::text::{ChatFiles, ChatTemplate, Message, Tokenizer};

use crate::support::checkpoints::{ByName as _, integers, mutate, opened, tiny_model};
use crate::support::damaged::DamagedReadings;
use crate::support::goldens::{Goldens, all_logits, load, max_difference};
use crate::support::json::{read_json, replace_somewhere};
use crate::support::program::{
    assert_error, in_shell, lab, output, printed, printed_json, unicorn, unicorn_on_software,
};
use crate::support::reference::{dequantize_row, rms_norm};
use crate::support::{bounded_allocation, data, device, root, rounds};

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// `unicorn quantize SOURCE DESTINATION ...`, which must succeed.
#[track_caller]
fn quantize(source: &Path, destination: &Path, args: &[&str]) -> String {
    printed(unicorn(&[&["quantize", text(source), text(destination)], args].concat()))
}

fn logits(folder: &Path, options: &LoadOptions, tokens: &[u32]) -> Vec<f32> {
    all_logits(&mut load(folder, options), tokens)
}

/// Makes a folder with these files.
fn write_all(folder: &Path, files: &BTreeMap<String, Vec<u8>>) {
    fs::create_dir(folder).unwrap();
    files.iter().for_each(|(name, bytes)| fs::write(folder.join(name), bytes).unwrap());
}

/// Changes a JSON file.
fn change_json(path: &Path, change: impl Fn(&mut Value)) {
    let mut json: Value = read_json(path);
    change(&mut json);
    fs::write(path, json.to_string()).unwrap();
}

/// Every file of a folder by name.
fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    files.map(|f| (f.file_name().into_string().unwrap(), fs::read(f.path()).unwrap())).collect()
}

#[test]
fn a_conversion_without_loss_yields_bit_identical_logits() {
    let folder = tempfile::tempdir().unwrap();
    // All have three classes of matrices, and the last one has a vision tower.
    for (i, (variant, parts)) in [("tiny-a", 3), ("tiny-b", 3), ("tiny-27b-ratio", 4)].into_iter().enumerate()
    {
        let source = data("gemma3").join(variant);
        let tokens = Goldens::open(&source).tokens("tokens.short");
        let kept = folder.path().join(format!("kept-{i}"));
        let report = quantize(&source, &kept, &["--scheme", "keep"]);
        assert_eq!(report.matches("without loss").count(), parts, "{report}");
        let expected = logits(&source, &LoadOptions::default(), &tokens);
        assert_eq!(logits(&kept, &LoadOptions::default(), &tokens), expected, "{variant}");
        let golden = Goldens::open(&source).view::<f32>("logits.short");
        assert!(max_difference(&expected, &golden) <= 1e-3);

        // A native checkpoint can be the source of a conversion.
        let again = folder.path().join(format!("again-{i}"));
        quantize(&kept, &again, &["--scheme", "keep"]);
        let (mut first, mut second) = (contents(&kept), contents(&again));
        let source_of = |files: &mut BTreeMap<String, Vec<u8>>| {
            let mut manifest: Value = serde_json::from_slice(&files.remove("unicorn.json").unwrap()).unwrap();
            for field in ["source", "job"] {
                manifest.as_object_mut().unwrap().remove(field).unwrap();
            }
            manifest
        };
        assert_eq!(source_of(&mut first), source_of(&mut second));
        assert_eq!(first, second, "{variant}");
    }
}

/// After a load the weights are on the device. The page cache must not hold the files as well.
#[test]
fn a_load_leaves_no_file_data_in_the_page_cache() {
    // CARGO_TARGET_TMPDIR is on disk if the sources are. A file system in memory cannot drop its pages.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let is_disk = rustix::fs::statfs(folder.path()).unwrap().f_type != libc::TMPFS_MAGIC;
    let [plain, native] = ["plain", "native"].map(|name| folder.path().join(name));
    write_all(&plain, &contents(&root().join("models/demo")));
    quantize(&plain, &native, &["--scheme", "keep"]);
    for folder in [plain, native] {
        let in_memory = contents(&folder); // reads all files into the page cache
        for name in in_memory.keys() {
            fs::File::open(folder.join(name)).unwrap().sync_all().unwrap();
        }
        let loaded = load(&folder, &LoadOptions::default()).loaded();
        println!("{}: {loaded:?}", folder.display());
        assert!(loaded.bytes > 5 << 20, "{loaded:?}");
        assert_eq!(loaded.resident_bytes < loaded.bytes / 10, is_disk, "{loaded:?}");
    }
}

#[test]
fn rounding_to_nearest_yields_the_logits_of_quantizing_at_load() {
    let folder = tempfile::tempdir().unwrap();
    let source = data("gemma3/tiny-a");
    let goldens = Goldens::open(&source);
    let tokens = goldens.tokens("tokens.short");
    let cases = [
        (QuantizeMode::Int4G32, ["--scheme", "int4-g32", "--embedding", "keep"], "int4_g32"),
        (QuantizeMode::Int4G128, ["--scheme", "int4-g128", "--embedding", "keep"], "int4_g128"),
        (QuantizeMode::Int8Row, ["--scheme", "int8-row", "--embedding", "bf16"], "int8_row"),
        (QuantizeMode::Int4G128Emb8, ["--scheme", "int4-g128", "--embedding", "int8-row"], "int4_g128_emb8"),
    ];
    for (quantize_mode, args, golden) in cases {
        let native = folder.path().join(golden);
        quantize(&source, &native, &[&args[..], &["--rounding", "nearest"]].concat());
        let options = LoadOptions { quantize: quantize_mode, ..LoadOptions::default() };
        let got = logits(&native, &LoadOptions::default(), &tokens);
        assert_eq!(got, logits(&source, &options, &tokens), "{quantize_mode}");
        let expected = goldens.view::<f32>(&format!("q.{golden}.logits.short"));
        assert!(max_difference(&got, &expected) <= 1e-3, "{quantize_mode}");
    }
}

#[test]
fn rows_are_packed_and_unpacked_without_loss() {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    println!("seed 3");
    let names = "int4-g32 int4-g32-zero int4-g32-affine int4-g32-affine16 int4-g32-super int8-g16 int8-g16-zero \
                 int8-g16-affine int8-g16-super int8-row int8-g32 int8-g32-zero int8-g32-affine int8-g32-super \
                 int5-g32 int5-g16 int5-g32-affine16 int5-g32-super int5-g16-super int6-g16-supersym \
                 int6-g32-supersym";
    for scheme in names.split(' ').map(|name| name.parse::<Scheme>().expect(name)) {
        assert_eq!(scheme.to_string().parse::<Scheme>(), Ok(scheme));
        for cols in [1, 16, 31, 256, 300, 700] {
            let (mut blocks, mut scales) =
                (vec![0xee; scheme.tile_bytes(cols)], vec![0xee; scheme.tile_scale_bytes(cols)]);
            let rows: Vec<QuantizedRow> = (0..32)
                .map(|_| {
                    let mut row = QuantizedRow::new(scheme, cols);
                    row.scales.iter_mut().for_each(|b| *b = rng.random());
                    row.q.iter_mut().for_each(|q| {
                        let (least, most) = integers(scheme).expect("integers");
                        *q = rng.random_range(least..=most);
                    });
                    row
                })
                .collect();
            for (lane, row) in rows.iter().enumerate() {
                pack_row(scheme, row, lane, &mut blocks, &mut scales);
            }
            for (lane, row) in rows.iter().enumerate() {
                let mut got = QuantizedRow::new(scheme, cols);
                unpack_row(scheme, lane, &blocks, &scales, &mut got);
                assert_eq!(got, *row, "{scheme} {cols} lane {lane}");
            }
        }
    }
    for scheme in [Scheme::F32, Scheme::F16, Scheme::Bf16] {
        let row: Vec<f32> =
            (0..77).map(|_| half::bf16::from_f32(f32::from(rng.random::<i8>()) / 8.0).to_f32()).collect();
        let (mut blocks, mut got) = (vec![0xee; scheme.tile_bytes(77)], vec![0.0; 77]);
        pack_plain_row(scheme, &row, 5, &mut blocks);
        unpack_plain_row(scheme, 5, &blocks, &mut got);
        assert_eq!(got, row, "{scheme}");
    }
    let invalid = ["int4-g31", "int4-g0", "int8-g8", "int4-g48-super", "int4-g032", "int4-g32-x", ""];
    // No kernel reads these schemes.
    let unknown = ["int3-g32", "int6-g32", "int5-g32-zero", "int8-g16-supersym", "int4-g32-supersym"];
    for name in invalid.iter().chain(&unknown) {
        assert!(name.parse::<Scheme>().is_err(), "{name}");
    }
}

#[test]
fn scales_that_are_not_finite_are_reported_with_their_column() {
    let (nan, infinite) = (&f16::NAN.to_le_bytes()[..], &f16::INFINITY.to_le_bytes()[..]);
    let cases: [(&str, usize, &[u8], usize); 9] = [
        ("int8-row", 0, nan, 0),
        ("int4-g32", 2, infinite, 32),
        ("int8-g16", 4, nan, 32),
        ("int4-g32-zero", 4 + 2, infinite, 32),
        ("int8-g32-affine", 8, &f32::NAN.to_le_bytes(), 32),
        ("int4-g32-affine", 8 + 4, &f32::INFINITY.to_le_bytes(), 32),
        // The scale is finite, but twice the scale is not.
        ("int8-g32-affine", 0, &3e38f32.to_le_bytes(), 0),
        ("int4-g32-super", (4 + 2 * 8) + 2, nan, 256),
        ("int8-g16-super", 4 + 2 * 16, infinite, 256),
    ];
    for (scheme, at, bytes, column) in cases {
        let scheme: Scheme = scheme.parse().unwrap();
        let mut row = QuantizedRow::new(scheme, 500);
        row.q.fill(2);
        for record in row.scales.chunks_exact_mut(2) {
            // Each f16 is finite, and so is an f32 of two of them.
            record.copy_from_slice(&[0x12, 0x3b]);
        }
        assert_eq!(row.not_finite(scheme), None, "{scheme}");
        row.scales[at..at + bytes.len()].copy_from_slice(bytes);
        assert_eq!(row.not_finite(scheme), Some(column), "{scheme}");
    }
}

#[test]
fn the_search_is_never_worse_than_round_to_nearest() {
    println!("seed 4");
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    let (mut better, mut groups) = (0, 0);
    for round in 0..300 {
        let cols = rng.random_range(1..200);
        let group = *[32, 128].get(round % 2).unwrap();
        let size = 10f32.powi(rng.random_range(-6..4));
        let row: Vec<f32> = (0..cols)
            .map(|_| {
                let heavy = rng.random_range(-1.0f32..1.0).powi(3);
                if rng.random_range(0..20) == 0 { 0.0 } else { heavy * size }
            })
            .collect();
        let importance: Vec<f32> = (0..cols).map(|_| rng.random_range(0.0f32..2.0).powi(4)).collect();
        for h in [None, Some(&importance[..])] {
            let run = |search: bool| {
                let (mut q, mut s) = (vec![0i8; cols], vec![f16::ZERO; cols.div_ceil(group)]);
                match search {
                    false => quantize_row(&row, group, 7, &mut q, &mut s).unwrap(),
                    true => quantize_row_searching(&row, h, group, 7, &mut q, &mut s).unwrap(),
                }
                assert!(q.iter().all(|q| (-8..=7).contains(q)) && s.iter().all(|s| s.is_finite()));
                let mut values = vec![0.0; cols];
                dequantize_row(&q, &s, group, &mut values);
                let error = |i: usize| {
                    f64::from(h.map_or(1.0, |h| h[i])) * (f64::from(row[i]) - f64::from(values[i])).powi(2)
                };
                let all: Vec<f64> = (0..cols).map(error).collect();
                all.chunks(group).map(|g| g.iter().sum::<f64>()).collect::<Vec<_>>()
            };
            for (found, nearest) in run(true).into_iter().zip(run(false)) {
                assert!(found <= nearest, "round {round}: {found} after {nearest}");
                groups += 1;
                better += usize::from(found < nearest * 0.99);
            }
        }
    }
    assert!(better * 2 > groups, "better in {better} of {groups} groups");
    let (mut q, mut s) = (vec![0i8; 3], vec![f16::ZERO]);
    assert!(quantize_row_searching(&[1.0, f32::NAN, 0.0], None, 32, 7, &mut q, &mut s).is_err());
    assert!(quantize_row_searching(&[1e9, 0.0, 0.0], None, 32, 7, &mut q, &mut s).is_err());
    quantize_row_searching(&[0.0; 3], None, 32, 7, &mut q, &mut s).unwrap();
    assert_eq!((q, s), (vec![0; 3], vec![f16::ZERO]));
}

/// `unicorn` in a shell that limits each file to `kib` KiB. With `ignore`, a write beyond that fails. Without it, the
/// signal SIGXFSZ kills the program.
fn limited(kib: u32, ignore: bool, args: &[&str]) -> Command {
    let trap = if ignore { "trap '' XFSZ; " } else { "" };
    in_shell(&format!("{trap}ulimit -f {};", kib * 2), &unicorn(args))
}

#[test]
fn an_interrupted_conversion_does_not_load_and_continues_where_it_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let source = data("gemma3/tiny-a");
    let (whole, resumed) = (folder.path().join("whole"), folder.path().join("resumed"));
    quantize(&source, &whole, &["--scheme", "keep"]);
    let shared = fs::metadata(whole.join("shared.safetensors")).unwrap().len();
    let layer = fs::metadata(whole.join("layer-000.safetensors")).unwrap().len();
    assert!(shared + 4096 < layer, "the limit below is between {shared} and {layer}");

    // The signal kills the program in the middle of the first layer.
    let args = ["quantize", text(&source), text(&resumed), "--scheme", "keep"];
    let limit = (shared / 1024 + 2) as u32;
    let status = limited(limit, false, &args).output().unwrap().status;
    assert_eq!(status.code(), None, "killed by the signal");
    assert_error(
        unicorn(&["inspect", text(&resumed)]),
        1,
        &[text(&resumed), "unfinished conversion", "quantize"],
    );
    let before = fs::metadata(resumed.join("shared.safetensors")).unwrap();

    // A failed write is an error of one line, and finished files stay.
    let failed = limited(limit, true, &args).output().unwrap();
    let line = String::from_utf8(failed.stderr).unwrap();
    assert_eq!(failed.status.code(), Some(1), "{line}");
    assert!(
        line.starts_with("error: ") && line.contains("layer-000.safetensors: cannot be written"),
        "{line}"
    );

    // A conversion with other options must not continue the interrupted conversion.
    let other = ["quantize", text(&source), text(&resumed), "--scheme", "int8-row"];
    assert_error(unicorn(&other), 1, &["unfinished conversion", "other options"]);
    // A version that lays out its files differently must not continue it either.
    let notes = resumed.join("unicorn.partial.json");
    let written = fs::read(&notes).unwrap();
    for field in ["version", "layout"] {
        let mut older: Value = serde_json::from_slice(&written).unwrap();
        assert_eq!(older["job"][field], 1);
        older["job"][field] = json!(0);
        fs::write(&notes, older.to_string()).unwrap();
        assert_error(unicorn(&args), 1, &["unfinished conversion", "another version"]);
    }
    fs::write(&notes, written).unwrap();
    let lock = fs::File::open(resumed.join("unicorn.lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    assert_error(unicorn(&args), 1, &["another process"]);
    drop(lock);

    // A finished file that is missing is converted again.
    let lost = folder.path().join("lost");
    let mut finished = contents(&resumed);
    finished.remove("shared.safetensors").unwrap();
    write_all(&lost, &finished);
    quantize(&source, &lost, &["--scheme", "keep"]);
    assert_eq!(contents(&whole), contents(&lost));

    let report = quantize(&source, &resumed, &["--scheme", "keep"]);
    assert!(report.contains("without loss"), "{report}");
    let after = fs::metadata(resumed.join("shared.safetensors")).unwrap();
    assert_eq!((before.ino(), before.mtime_nsec()), (after.ino(), after.mtime_nsec()), "written once");
    assert_eq!(contents(&whole), contents(&resumed));

    assert_error(unicorn(&args), 1, &["already"]);
    // The process that holds the lock may be at its end, so only the holder of the lock looks at the files.
    let lock = fs::File::create(resumed.join("unicorn.lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    assert_error(unicorn(&args), 1, &["another process"]);
    drop(lock);
    let full = folder.path().join("full");
    fs::create_dir(&full).unwrap();
    fs::write(full.join("letter.txt"), "mine").unwrap();
    assert_error(unicorn(&["quantize", text(&source), text(&full)]), 1, &["not empty"]);
    assert_eq!(contents(&full).keys().collect::<Vec<_>>(), ["letter.txt"]);
}

#[test]
fn a_conversion_without_a_progress_file_starts_again() {
    let folder = tempfile::tempdir().unwrap();
    let source = data("gemma3/tiny-a");
    for ignore in [true, false] {
        let name = if ignore { "failed" } else { "killed" };
        let destination = folder.path().join(name);
        let args = ["quantize", text(&source), text(&destination), "--scheme", "int4-g32"];
        let output = limited(0, ignore, &args).output().unwrap();
        assert_eq!(output.status.code(), ignore.then_some(1), "{name}: {output:?}");
        let part = destination.join("unicorn.partial.json.part");
        assert_eq!(part.exists(), !ignore, "{name}: a file that cannot be written does not stay");
        quantize(&source, &destination, &["--scheme", "int4-g32"]);
        assert!(!part.exists());
    }
}

#[test]
fn a_file_that_is_truncated_during_a_load_is_reported_with_its_byte_range() {
    let folder = tempfile::tempdir().unwrap();
    let native = folder.path().join("native");
    quantize(&data("gemma3/tiny-a"), &native, &["--scheme", "int4-g32"]);
    let path = native.join("shared.safetensors");
    let bytes = fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let header: Value = serde_json::from_slice(&bytes[8..][..length as usize]).unwrap();
    let scales = header["model.embed_tokens.weight.scales"]["data_offsets"][0].as_u64().unwrap() + 8 + length;

    // At this point the small tensors of the file have been read, and the matrix has not.
    let files = open_files(&native).unwrap();
    let mut progress = |progress| {
        if matches!(progress, Progress::Weights { .. }) {
            fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(scales + 10).unwrap();
        }
    };
    let loaded =
        ModelRunner::load(&device(), &Source::open(&files).unwrap(), &LoadOptions::default(), &mut progress);
    let error = loaded.err().unwrap().to_string();
    for part in [text(&path), "tensor model.embed_tokens.weight", &format!("bytes {scales} to ")] {
        assert!(error.contains(part), "{part:?} is not in {error:?}");
    }
}

#[test]
fn damaged_native_checkpoints_are_refused_by_name() {
    type Damage = Box<dyn Fn(&Path)>;
    const Q: &str = "model.layers.2.self_attn.q_proj.weight";
    let folder = tempfile::tempdir().unwrap();
    let sound = folder.path().join("sound");
    quantize(&data("gemma3/tiny-a"), &sound, &["--scheme", "int4-g32"]);
    let mut count = 0;
    let mut damaged = |change: &dyn Fn(&Path)| -> PathBuf {
        count += 1;
        let copy = folder.path().join(format!("damaged-{count}"));
        write_all(&copy, &contents(&sound));
        change(&copy);
        copy
    };
    let manifest = |change: fn(&mut Value)| -> Damage {
        Box::new(move |folder: &Path| change_json(&folder.join("unicorn.json"), change))
    };
    let cases: Vec<(Damage, &[&str])> = vec![
        (
            Box::new(|f: &Path| {
                let path = f.join("layer-003.safetensors");
                let file = fs::OpenOptions::new().write(true).open(path).unwrap();
                file.set_len(1000).unwrap();
            }),
            &["layer-003.safetensors", "has 1000 bytes", "incomplete"],
        ),
        (
            Box::new(|f: &Path| fs::remove_file(f.join("layer-003.safetensors")).unwrap()),
            &["layer-003.safetensors", "missing"],
        ),
        (
            Box::new(|f: &Path| {
                let path = f.join("config.json");
                let text = fs::read_to_string(&path).unwrap();
                let changed = text.replacen("\"rms_norm_eps\": 1e-6", "\"rms_norm_eps\": 1e-5", 1);
                assert_ne!(changed, text);
                fs::write(path, changed).unwrap();
            }),
            &["config.json", "differs from the config"],
        ),
        (manifest(|m| m["version"] = json!(2)), &["unicorn.json", "version 2", "newer", "update"]),
        (manifest(|m| m["layout"] = json!(9)), &["unicorn.json", "layout 9", "newer", "update"]),
        (manifest(|m| m["layout"] = json!(0)), &["unicorn.json", "layout 0", "older", "again"]),
        (
            manifest(|m| m["source"] = json!("x".repeat(2 << 20))),
            &["unicorn.json", "bytes; expected at most 2097152"],
        ),
        (manifest(|m| m["format"] = json!("gguf")), &["unicorn.json", "gguf"]),
        (
            Box::new(|f: &Path| fs::write(f.join("unicorn.json"), "{").unwrap()),
            &["unicorn.json", "not a valid"],
        ),
        (manifest(|m| m["tensors"][Q]["scheme"] = json!("int8-row")), &[Q, "int8-row", "expected"]),
        (manifest(|m| m["tensors"][Q]["scheme"] = json!("int4-g33")), &[Q, "int4-g33"]),
        (manifest(|m| m["tensors"][Q]["shape"] = json!([64, 32])), &[Q, "[64, 32]"]),
        (manifest(|m| m["tensors"][Q]["shape"] = json!([u64::MAX / 2, u64::MAX / 2])), &[Q, "expected 1 to"]),
        (manifest(|m| m["tensors"][Q]["file"] = json!("layer-001.safetensors")), &[Q, "manifest"]),
        (
            manifest(|m| {
                let record = m["tensors"][Q].clone();
                m["tensors"]["model.layers.9.x.weight"] = record;
            }),
            &["model.layers.9.x.weight", "missing"],
        ),
        (
            manifest(|m| {
                let record = m["files"]["layer-000.safetensors"].clone();
                m["files"]["../layer-000.safetensors"] = record;
            }),
            &["../layer-000.safetensors", "same folder"],
        ),
    ];
    for (change, parts) in cases {
        let copy = damaged(&*change);
        assert_error(unicorn(&["inspect", text(&copy)]), 1, parts);
    }

    // One bit is changed. Only the checksum can show it.
    let flipped = damaged(&|f: &Path| {
        let path = f.join("layer-005.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        let last = bytes.len() - 100;
        bytes[last] ^= 4;
        fs::write(path, bytes).unwrap();
    });
    assert_eq!(output(unicorn(&["inspect", text(&flipped)])).0, 0);
    let parts = ["layer-005.safetensors", "sha256", "damaged"];
    assert_error(unicorn(&["inspect", text(&flipped), "--verify"]), 1, &parts);
    let shown = printed_json(unicorn(&["inspect", text(&sound), "--verify", "--json"]));
    assert_eq!((shown["format"].as_str(), shown["verified"].as_bool()), (Some("native"), Some(true)));
    let source = data("gemma3/tiny-a");
    assert_error(unicorn(&["inspect", text(&source), "--verify"]), 1, &["no checksums"]);
    // Text from the file is escaped, so that it does not control the terminal.
    let escaped = damaged(&manifest(|m| m["source"] = json!("\u{1b}[2Jx\u{202e}y")));
    let (code, stdout, stderr) = output(unicorn(&["inspect", text(&escaped)]));
    assert!(code == 0 && stdout.contains(r"\u{1b}[2Jx\u{202e}y"), "{stderr}{stdout}");
}

/// Damages manifests, headers and data at random. Each result is refused, or read completely within bounds.
#[test]
fn damaged_native_checkpoints_are_refused_or_read() {
    const SEED: u64 = 11;
    let rounds = rounds(4000);
    println!("seed {SEED}");
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let folder = tempfile::tempdir().unwrap();
    let sound = folder.path().join("sound");
    quantize(&data("gemma3/tiny-a"), &sound, &["--scheme", "int4-g32"]);
    let originals = contents(&sound);
    let numbers =
        ["0", "1", "-1", "31", "32", "33", "4294967295", "18446744073709551615", "1e99", "null", "[]"];
    let whole: usize = originals.values().map(Vec::len).sum();
    let mut readings = DamagedReadings::default();
    for round in 0..rounds {
        // The manifest gets a random byte or number. `mutate` damages the other files so that most can still be read.
        let name = ["unicorn.json", "layer-001.safetensors", "layer-005.safetensors", "shared.safetensors"]
            [rng.random_range(0..4)];
        let mut bytes = originals[name].clone();
        if name != "unicorn.json" {
            bytes = mutate(&bytes, &mut rng);
            // The manifest gets the new length, because a file of another length is refused before it is read.
            let mut manifest: Value = serde_json::from_slice(&originals["unicorn.json"]).unwrap();
            manifest["files"][name]["bytes"] = json!(bytes.len());
            fs::write(sound.join("unicorn.json"), manifest.to_string()).unwrap();
        } else {
            for _ in 0..rng.random_range(1..3) {
                let at = rng.random_range(0..bytes.len());
                match rng.random_range(0..5) {
                    0 => bytes[at] = rng.random(),
                    1 => drop(bytes.remove(at)),
                    2 => bytes.truncate(at.max(1)),
                    // Replaces a number by another, so that the JSON parser accepts the file.
                    _ => {
                        let digit = |b: &u8| b.is_ascii_digit();
                        let Some(start) = bytes[at..].iter().position(digit).map(|p| p + at) else {
                            continue;
                        };
                        let end =
                            bytes[start..].iter().position(|b| !digit(b)).map_or(bytes.len(), |p| p + start);
                        let number = numbers[rng.random_range(0..numbers.len())];
                        bytes.splice(start..end, number.bytes());
                    }
                }
            }
        }
        fs::write(sound.join(name), &bytes).unwrap();
        let held = whole - originals[name].len() + bytes.len();
        readings.add(held, format_args!("round {round}"), || read_to_the_end(&sound));
        for name in [name, "unicorn.json"] {
            fs::write(sound.join(name), &originals[name]).unwrap();
        }
    }
    let DamagedReadings { refused, read, most_bytes } = readings;
    println!("{refused} refused, {read} read, at most {most_bytes} bytes held for {whole}");
    assert!(refused > rounds / 5 && read > rounds / 2, "{refused} refused, {read} read");
}

fn read_to_the_end(folder: &Path) -> Result<(), String> {
    let files = open_files(folder).map_err(|e| e.to_string())?;
    let (config, _) = arch::load(&files).map_err(|e| e.to_string())?;
    let checkpoint = Checkpoint::open(&files).map_err(|e| e.to_string())?;
    if let Some(manifest) = Manifest::read(&files).map_err(|e| e.to_string())? {
        // Verification may fail, but it must end.
        let _ = verify(&files, &manifest, &mut |_, _| {});
    }
    let weights = Weights::collect(&checkpoint, &config).map_err(|e| e.to_string())?;
    for tensor in weights.tensors.iter() {
        for row in [0, tensor.rows() - 1] {
            tensor.rows_f32(row..row + 1).map_err(|e| e.to_string())?;
        }
    }
    Ok(())
}

/// Damages the small files of a native checkpoint, and uses the files that are accepted as a server does.
#[test]
fn damaged_small_files_of_native_checkpoints_are_refused_or_used() {
    const SEED: u64 = 12;
    const ROUNDS: usize = 300;
    println!("seed {SEED}");
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let (source, folder) = (tiny_model(), tempfile::tempdir().unwrap());
    let sound = folder.path().join("sound");
    quantize(source.path(), &sound, &["--scheme", "int4-g32"]);
    let originals = contents(&sound);
    use_small_files(&sound).expect("a sound folder");
    let step = |kind: &str, content: &str| json!({"type": kind, "pattern": {"String": "e"}, "content": content, "prepend": content, "replacement": "▁"});
    let nested = |list: &str, step: &Value| json!({"type": "Sequence", list: vec![step; 40]});
    let junk = r#"[null, true, 0, 1, -1, 512, 2.5, 1e300, 18446744073709551615, "", "A", "\u202e\ufdfa\n",
        "{% for m in messages %}{{ m['content'] * 9 }}{% endfor %}",
        "{{ bos_token }}{% for m in messages %}{{ m }}{% endfor %}", [], {}, [[0, 1], "a b", {"a": 1}],
        {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}},
        {"SpecialToken": {"id": "<none>", "type_id": 0}}]"#;
    let mut junk: Vec<Value> = serde_json::from_str(junk).unwrap();
    junk.insert(12, json!("x".repeat(5000)));
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true});
    let steps = [
        ("normalizer", json!(null)),
        ("normalizer", step("Replace", "éé")),
        ("normalizer", step("Replace", &"e".repeat(40))),
        ("normalizer", step("Lowercase", "")),
        ("normalizer", step("Prepend", "▁")),
        ("normalizer", step("NFKC", "")),
        ("normalizer", step("Precompiled", "")),
        ("normalizer", nested("normalizers", &step("Replace", "ee"))),
        ("pre_tokenizer", json!(null)),
        ("pre_tokenizer", step("WhitespaceSplit", "")),
        ("pre_tokenizer", step("Metaspace", "")),
        ("pre_tokenizer", nested("pretokenizers", &step("Metaspace", ""))),
        ("post_processor", json!(null)),
        ("post_processor", nested("processors", &byte_level)),
    ];
    let names =
        ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "unicorn.json"];
    let names = [&names[..], &["layer-values.bin"]].concat();
    let whole: usize = originals.values().map(Vec::len).sum();
    let (mut read, mut refused) = (BTreeMap::new(), BTreeMap::new());
    for round in 0..ROUNDS {
        let name = names[rng.random_range(0..names.len())];
        let mut bytes = originals[name].clone();
        if name == "layer-values.bin" || rng.random_ratio(1, 8) {
            let at = rng.random_range(0..bytes.len());
            match rng.random_range(0..3) {
                0 => bytes.truncate(at),
                1 => bytes.insert(at, rng.random()),
                _ => bytes[at] ^= 1 << rng.random_range(0..8),
            }
        } else {
            let mut file: Value = serde_json::from_slice(&bytes).unwrap();
            // Most of a tokenizer.json is vocabulary, but the test is about the steps, so half of the changes replace a
            // step.
            if name == "tokenizer.json" && rng.random() {
                let (place, step) = &steps[rng.random_range(0..steps.len())];
                file[place] = step.clone();
            } else {
                replace_somewhere(&mut file, &junk[rng.random_range(0..junk.len())], &mut rng);
            }
            if name == "config.json" {
                let mut manifest: Value = serde_json::from_slice(&originals["unicorn.json"]).unwrap();
                manifest["config"] = file.clone();
                fs::write(sound.join("unicorn.json"), manifest.to_string()).unwrap();
            }
            bytes = file.to_string().into_bytes();
        }
        fs::write(sound.join(name), &bytes).unwrap();
        // The encoded text takes memory in addition to the files.
        let what = format!("round {round}, {name}");
        let (outcome, _) =
            bounded_allocation(whole, 32 << 20, format_args!("{what}"), || use_small_files(&sound));
        if let Err(error) = &outcome {
            assert!(!error.is_empty() && !error.contains('\n') && error.len() < 2000, "{what}: {error:?}");
        }
        *if outcome.is_ok() { &mut read } else { &mut refused }.entry(name).or_insert(0) += 1;
        for name in [name, "unicorn.json"] {
            fs::write(sound.join(name), &originals[name]).unwrap();
        }
    }
    println!("{read:?} read, {refused:?} refused");
    for name in &names[..5] {
        assert!(
            read.contains_key(name) && refused.contains_key(name),
            "{name}: {read:?} read, {refused:?} refused"
        );
    }
}

/// Reads the files that a server reads before the weights. Encodes a conversation and decodes its ids.
fn use_small_files(folder: &Path) -> Result<(), String> {
    let line = |error: &dyn std::fmt::Display| error.to_string();
    let files = open_files(folder).map_err(|e| line(&e))?;
    let (config, generation) = arch::load(&files).map_err(|e| line(&e))?;
    generation.sampling_defaults();
    let manifest = Manifest::read(&files).map_err(|e| line(&e))?.ok_or("no manifest")?;
    manifest.layer_values(&files).map_err(|e| line(&e))?;
    let [tokenizer_json, tokenizer_config, jinja] =
        ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"].map(|name| files.read(name));
    let json = tokenizer_json.map_err(|e| line(&e))?.ok_or("no tokenizer")?;
    let tokenizer = Tokenizer::from_bytes(&json, "tokenizer.json").map_err(|e| line(&e))?;
    tokenizer.fits(config.vocab_size).map_err(|e| line(&e))?;
    let (tokenizer_config, jinja) = (tokenizer_config.map_err(|e| line(&e))?, jinja.map_err(|e| line(&e))?);
    let chat_files =
        ChatFiles { tokenizer_config: tokenizer_config.as_deref(), chat_template_jinja: jinja.as_deref() };
    let template = ChatTemplate::from_checkpoint(chat_files, &tokenizer);
    let messages: Vec<Message> = serde_json::from_value(json!([
        {"role": "user", "content": "Hello there, the vim\u{fdfa} 🦄 help é ½ ".repeat(20)},
        {"role": "assistant", "content": "e"},
        {"role": "user", "content": " eee\n\n"},
    ]))
    .unwrap();
    let text = template.and_then(|template| template.render(&messages, true)).map_err(|e| line(&e))?;
    for special in [false, true] {
        let ids = tokenizer.encode(&text, special).map_err(|e| line(&e))?;
        assert!(ids.len() <= 16 * text.len() + 64, "{} ids of {} bytes", ids.len(), text.len());
        tokenizer.check_ids(&ids, config.vocab_size).map_err(|e| line(&e))?;
        tokenizer.decode(&ids, true);
    }
    Ok(())
}

/// One damage shows only on the device. The others show before a server opens a device.
#[test]
fn a_damaged_native_checkpoint_does_not_serve() {
    let (source, folder) = (tiny_model(), tempfile::tempdir().unwrap());
    let sound = folder.path().join("sound");
    quantize(source.path(), &sound, &["--scheme", "int4-g32"]);
    let step = json!({"type": "Replace", "pattern": {"String": "h"}, "content": "hhhhhhhhhh"});
    let grown = json!({"type": "Sequence", "normalizers": vec![step; 9]});
    let grow = |folder: &Path| {
        change_json(&folder.join("tokenizer.json"), |json| json["normalizer"] = grown.clone());
    };
    let single = json!([{"Sequence": {"id": "B", "type_id": 0}}]);
    let post = |folder: &Path| {
        change_json(&folder.join("tokenizer.json"), |json| json["post_processor"]["single"] = single.clone());
    };
    let flip = |folder: &Path| {
        let path = folder.join("layer-005.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        bytes[data..].iter_mut().step_by(7).for_each(|byte| *byte ^= 0x11);
        fs::write(path, bytes).unwrap();
    };
    type Damage<'a> = &'a dyn Fn(&Path);
    let cases: [(Damage, bool, &[&str]); 3] = [
        (&grow, false, &["tokenizer.json: normalizer.normalizers[1] (Replace)", "100.0 times"]),
        (&post, false, &["tokenizer.json: post_processor.single: expected"]),
        (&flip, true, &["layer 5 is off by", "unicorn inspect --verify"]),
    ];
    for (i, (damage, on_device, parts)) in cases.into_iter().enumerate() {
        let copy = folder.path().join(format!("damaged-{i}"));
        write_all(&copy, &contents(&sound));
        damage(&copy);
        let args = ["serve", "--port", "0", "--allow-software-vulkan", "--model", text(&copy)];
        let command = if on_device { unicorn_on_software(&args) } else { unicorn(&args) };
        let (code, _, stderr) = output(command);
        assert!(code != 0 && parts.iter().all(|part| stderr.contains(part)), "{code}: {parts:?}: {stderr}");
        assert!(!stderr.contains("panic"), "{stderr}");
        assert_error(unicorn(&["inspect", "--verify", text(&copy)]), 1, &["the manifest says"]);
    }
}

#[test]
fn synthetic_checkpoints_have_their_shape_and_name_their_random_weights() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    let args = ["--shape", "gemma-3-270m", "--scheme", "int4-g128", "--embedding", "int4-g128"];
    for folder in [&a, &b] {
        let stdout = printed(lab(&[&["synth", text(folder), "--seed", "0"], &args[..]].concat()));
        assert!(stdout.contains("random weights in the shape of gemma-3-270m"), "{stdout}");
    }
    let (first, second) = (contents(&a), contents(&b));
    assert_eq!(first["layer-000.safetensors"], second["layer-000.safetensors"]);
    assert_ne!(first["layer-000.safetensors"], first["layer-001.safetensors"]);
    assert!(first.keys().eq(second.keys()) && first["unicorn.json"] == second["unicorn.json"]);

    let checkpoint = opened(&a);
    let row = checkpoint.get("model.layers.3.mlp.up_proj.weight").unwrap().rows_f32(77..78).unwrap();
    let square = row.iter().map(|w| w * w).sum::<f32>();
    assert!((0.8..1.25).contains(&square), "a row of unit length: {square}");
    let stdout = printed(unicorn(&["inspect", text(&a)]));
    assert!(stdout.contains("random weights"), "{stdout}");
    let options = ["--prompt", "hello", "--max-tokens", "2", "--context", "64", "--allow-software-vulkan"];
    let generate = [&["generate", "--model", text(&a)], &options[..]].concat();
    let (code, stdout, stderr) = output(unicorn_on_software(&generate));
    assert_eq!(code, 0, "{stderr}");
    assert!(stderr.contains("random weights") && !stdout.is_empty(), "{stdout} {stderr}");
}

/// Norms of this family multiply with what is stored, so it must not be 0.
#[test]
fn random_weights_of_another_family_give_finite_and_different_logits() {
    let folder = tempfile::tempdir().unwrap();
    let made = folder.path().join("made");
    printed(lab(&["synth", text(&made), "--shape", "smollm2-135m", "--scheme", "int4-g128"]));
    let options = LoadOptions { max_context: Some(64), precision: Precision::Fast, ..LoadOptions::default() };
    let mut model = load(&made, &options);
    let logits = all_logits(&mut model, &[1, 17, 400, 3000]);
    let mean = logits.iter().map(|x| f64::from(*x)).sum::<f64>() / logits.len() as f64;
    let variance = logits.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / logits.len() as f64;
    assert!((0.1..10.0).contains(&variance.sqrt()), "the deviation of logits is {}", variance.sqrt());
}

#[test]
fn observed_moments_equal_those_of_the_matrix_inputs() {
    let source = data("gemma3/tiny-b");
    let goldens = Goldens::open(&source);
    let options = LoadOptions { moments: true, max_batch_tokens: 20, ..LoadOptions::default() };
    let mut model = load(&source, &options);
    let tokens = goldens.tokens("tokens.mid");
    model.observe(&tokens, &mut |_| {}).unwrap();
    let moments = model.take_moments().unwrap();
    let config = model.config().clone();
    assert_eq!(moments.len(), config.layers.len());
    let heads = config.heads().q_width();
    let (hidden, ffn) = (config.hidden_size, config.intermediate_size);
    let widths =
        Inputs { qkv: hidden, output: heads, gate_up: Some(hidden), down: Some(ffn), ..Inputs::default() };
    for layer in &moments {
        assert_eq!(layer.as_ref().map(Vec::len), widths);
        assert!(layer.iter().flatten().all(|sum| sum.is_finite() && *sum >= 0.0));
        assert!(layer.iter().all(|sums| sums.iter().any(|sum| *sum > 0.0)));
    }

    // The inputs of the first layer's q, k and v can be computed from the embedding alone.
    let checkpoint = opened(&source);
    let weights = Weights::collect(&checkpoint, &config).unwrap();
    let factors: Vec<f32> =
        weights.tensors.layers[0].norms.input_layernorm.to_f32().unwrap().iter().map(|w| 1.0 + w).collect();
    let mut expected = vec![0f64; config.hidden_size];
    for id in &tokens {
        let row = weights.tensors.embed_tokens.rows_f32(*id as usize..*id as usize + 1).unwrap();
        let scale = (config.hidden_size as f64).sqrt();
        let row: Vec<f64> = row.iter().map(|w| f64::from(*w) * scale).collect();
        let normed = rms_norm(&row, &factors, f64::from(config.norm_eps));
        expected.iter_mut().zip(normed).for_each(|(sum, x)| *sum += x * x);
    }
    for (got, expected) in moments[0].qkv.iter().zip(&expected) {
        assert!(
            (f64::from(*got) - expected).abs() <= 1e-4 * expected.max(1e-3),
            "{got} instead of {expected}"
        );
    }

    // Observing the inputs does not change the logits.
    let plain = logits(&source, &LoadOptions { max_batch_tokens: 20, ..LoadOptions::default() }, &tokens);
    assert_eq!(all_logits(&mut model, &tokens), plain);
}

/// The number after `word` in a report.
fn number(report: &str, word: &str) -> f64 {
    let rest = report.split_once(word).unwrap_or_else(|| panic!("{word} is not in {report}")).1.trim_start();
    rest.split([' ', ',', '\n']).next().unwrap().parse().unwrap_or_else(|_| panic!("{word} in {report}"))
}

#[test]
fn quantizing_reports_the_loss_on_a_text() {
    let folder = tempfile::tempdir().unwrap();
    let source = root().join("models/demo");
    let text_file = folder.path().join("text.txt");
    let turns = [
        ("What is the capital of France?", "The capital of France is Paris."),
        ("what is 3 plus 4", "3 plus 4 is 7."),
        ("hello", "Hello! How can I help you?"),
    ];
    let turn = |(question, answer): &(&str, &str)| {
        format!("<start_of_turn>user\n{question}<end_of_turn>\n<start_of_turn>model\n{answer}<end_of_turn>\n")
    };
    fs::write(&text_file, turns.iter().map(turn).collect::<String>()).unwrap();
    let run = |name: &str, args: &[&str]| {
        let destination = folder.path().join(name);
        let eval = ["--eval", text(&text_file), "--allow-software-vulkan", "--context", "256"];
        let all = [&["quantize", text(&source), text(&destination)], args, &eval[..]].concat();
        printed(unicorn_on_software(&all))
    };
    let kept = run("kept", &["--scheme", "keep"]);
    assert_eq!(number(&kept, "mean KL divergence"), 0.0, "{kept}");
    assert_eq!(number(&kept, "perplexity"), number(&kept, "->"), "{kept}");
    let nearest = run("nearest", &["--rounding", "nearest"]);
    let found = run("found", &[]);
    let weighed = run("weighed", &["--calibrate", text(&text_file)]);
    for report in [&nearest, &found, &weighed] {
        let kl = number(report, "mean KL divergence");
        assert!(kl > 1e-5 && kl < 1.0, "{report}");
    }
    assert!(number(&found, "int4-g32   relative error") < number(&nearest, "int4-g32   relative error"));
    // With calibration other columns count more, so other integers are written.
    let layer = |name: &str| fs::read(folder.path().join(name).join("layer-002.safetensors")).unwrap();
    assert_ne!(layer("found"), layer("weighed"));
    assert_ne!(layer("found"), layer("nearest"));

    // Errors of the evaluation's options are found before anything is converted.
    let unmade = folder.path().join("none");
    for (args, parts) in [
        (["--eval", text(&text_file), "--device", "no such device"], ["no such device"]),
        (["--eval", "no-such-file", "--device", "0"], ["no-such-file"]),
    ] {
        let all = [&["quantize", text(&source), text(&unmade)], &args[..]].concat();
        assert_error(unicorn_on_software(&all), 1, &parts);
        assert!(!unmade.exists());
    }
}

/// The result and the source differ in the longest context that fits. The evaluation uses one context for both.
#[test]
fn an_evaluation_chooses_its_context_and_can_be_repeated_alone() {
    let folder = tempfile::tempdir().unwrap();
    let text_file = folder.path().join("text.txt");
    fs::write(&text_file, "The capital of France is Paris.\n".repeat(4)).unwrap();
    let (source, destination) = (root().join("models/demo"), folder.path().join("result"));
    let command = |vram: &str, scheme: &str| {
        let eval = ["--eval", text(&text_file), "--allow-software-vulkan", "--verbose"];
        let mut command = unicorn_on_software(
            &[&["quantize", text(&source), text(&destination), "--scheme", scheme], &eval[..]].concat(),
        );
        for (name, bytes) in [("VRAM", vram), ("GTT", "0"), ("RESERVE", "0")] {
            command.env(format!("UNICORN_MEMORY_{name}"), bytes);
        }
        command
    };
    // The memory suffices for the conversion, but not for the evaluation after it.
    let (code, _, stderr) = output(command("8MiB", "int4-g32"));
    assert!(code == 1 && stderr.contains("does not fit"), "{stderr}");
    let before = contents(&destination);
    assert!(before.contains_key("unicorn.json"), "{stderr}");

    let (code, stdout, stderr) = output(command("32MiB", "int4-g32"));
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("already converted by this command"), "{stdout}");
    assert!(number(&stdout, "mean KL divergence") > 1e-5, "{stdout}");
    assert_eq!(stderr.matches("context  2049 tokens").count(), 2, "{stderr}");
    assert_eq!(contents(&destination), before);
    // The evaluation is not repeated on files that were made with other options.
    assert_error(command("32MiB", "int8-row"), 1, &["already"]);
}
