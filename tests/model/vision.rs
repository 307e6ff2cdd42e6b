//! Models with images: the tower and the logits equal those of transformers, for Gemma 3 in checkpoints of different
//! generations, and for Gemma 4 with a tower and without one.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use unicorn::checkpoint::{Checkpoint, Encoding};
use unicorn::image::{Filter, Limits, Rgb, decode};
use unicorn::model::arch::{self, open_files};
use unicorn::model::load::{LoadOptions, Source};
use unicorn::model::model_runner::ModelRunner;
use unicorn::model::vision::TowerRequest;
use unicorn::model::weights::Weights;
use unicorn::model::{ImageBudget, ImageSizes, ImageSpan, Runner};
use unicorn::tensor::{KvDtype, Precision, QuantizeMode, Scheme, VisionMode};

use crate::support::checkpoints::copy_of;
use crate::support::data;
use crate::support::goldens::{Goldens, load, load_files, max_difference, rows_at};
use crate::support::program::{assert_error, output, printed, printed_json, unicorn};

const ALL: [&str; 5] = [
    "gemma3-vision/vis-a",
    "gemma3-vision/vis-b",
    "gemma4-vision/vis4-a",
    "gemma4-vision/vis4-b",
    "gemma4-vision/vis4-c",
];
/// Images of different sizes, one of which is one row of tokens: with a budget of 70, and with larger ones.
const OF_SMALL_SIZES: &[&str] = &["exact", "wide", "tall", "strip", "fitting"];
const OF_ALL_SIZES: &[&str] = &["exact", "wide", "wide.280", "tall", "tall.140", "strip", "fitting"];

/// A model of `tests/data/gemma3-vision` or `tests/data/gemma4-vision` with its goldens.
struct Case {
    folder: PathBuf,
    goldens: Goldens,
    images: Goldens,
    /// The facts about the images and prompts.
    facts: Value,
}

impl Case {
    fn open(name: &str) -> Case {
        let folder = data(name);
        let facts = std::fs::read(folder.join("goldens.json")).unwrap();
        let facts: Value = serde_json::from_slice(&facts).unwrap();
        // The models of Gemma 4 have the same images.
        let own = folder.join("images.safetensors");
        let images = if own.exists() { own } else { folder.join("../images.safetensors") };
        Case { goldens: Goldens::open(&folder), images: Goldens::read(&images), facts, folder }
    }

    fn load(&self, options: &LoadOptions) -> ModelRunner {
        load(&self.folder, &LoadOptions { vision: VisionMode::On, ..*options })
    }

    /// Computes the embeddings of an image into a slot.
    fn encode_image(&self, model: &mut ModelRunner, slot: u32, image: &str) {
        let name = format!("u8.{image}");
        if self.images.has(&name) {
            let [height, width] = self.images.shape(&name)[..2] else { panic!("{name}: a shape") };
            model.encode_image(slot, [width, height], &self.images.view::<u8>(&name)).unwrap();
        } else {
            let resized = self.resized(image);
            let size = [resized.width() as usize, resized.height() as usize];
            model.encode_image(slot, size, resized.pixels()).unwrap();
        }
    }

    /// An image that the goldens have as a picture in `tests/data/images` and a size.
    fn resized(&self, image: &str) -> Rgb {
        let of = &self.facts["images"][image];
        let picture = std::fs::read(data("images").join(of["picture"].as_str().unwrap())).unwrap();
        let [width, height] = [0, 1].map(|i| of["to"][i].as_u64().unwrap() as u32);
        let resized = decode(&picture, &Limits::default()).unwrap().resize(width, height, Filter::Bicubic);
        let sha256: String =
            Sha256::digest(resized.pixels()).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(of["sha256"], sha256, "{image}: the pixels that Pillow makes");
        resized
    }

    /// The embeddings of an image in a slot.
    fn found(&self, model: &mut ModelRunner, slot: u32, image: &str) -> Vec<f32> {
        // A slot has room for the longest image.
        let mut found = model.image_embeddings(slot).unwrap();
        found.truncate(self.embeddings(image).len());
        found
    }

    /// The embeddings of an image that transformers computes.
    fn embeddings(&self, image: &str) -> Vec<f32> {
        self.goldens.view(&format!("image_features.{image}"))
    }

    /// The names of the prompts.
    fn prompts(&self) -> Vec<&str> {
        self.facts["prompts"].as_object().unwrap().keys().map(String::as_str).collect()
    }

    /// The names of a prompt's images.
    fn images_of(&self, prompt: &str) -> Vec<&str> {
        let names = self.facts["prompts"][prompt]["images"].as_array().unwrap();
        names.iter().map(|name| name.as_str().unwrap()).collect()
    }

    /// The tokens of a prompt, and its images in the slots from 0 on, which are encoded.
    fn encode(&self, model: &mut ModelRunner, prompt: &str) -> (Vec<u32>, Vec<ImageSpan>) {
        let spans = self.facts["prompts"][prompt]["image_spans"].as_array().unwrap();
        let mut images = Vec::new();
        for ((slot, name), span) in (0..).zip(self.images_of(prompt)).zip(spans) {
            self.encode_image(model, slot, name);
            let [start, tokens] = [0, 1].map(|i| span[i].as_u64().unwrap() as usize);
            images.push(ImageSpan { start, tokens, slot, row: 0 });
        }
        (self.goldens.tokens(&format!("tokens.{prompt}")), images)
    }

    /// The largest difference of the logits of a prompt from those of transformers.
    fn off_logits(&self, model: &mut ModelRunner, prompt: &str) -> f32 {
        let mut found = self.logits(model, prompt);
        let at = format!("positions.{prompt}");
        if self.goldens.has(&at) {
            found = rows_at(&found, &self.goldens.tokens(&at), model.limits().vocab_size);
        }
        max_difference(&found, &self.goldens.view::<f32>(&format!("logits.{prompt}")))
    }

    /// The logits of all positions of a prompt.
    fn logits(&self, model: &mut ModelRunner, prompt: &str) -> Vec<f32> {
        let (tokens, images) = self.encode(model, prompt);
        let mut all = Vec::new();
        model.logits_with_images(&tokens, &images, &mut |_, rows| all.extend_from_slice(rows)).unwrap();
        all
    }
}

#[test]
fn the_tower_computes_the_embeddings_of_transformers() {
    for (name, images) in [
        ("gemma3-vision/vis-a", &["photo420", "rgb", "exif6", "gray", "one", "wide", "checker"][..]),
        ("gemma3-vision/vis-b", &["photo420", "rgb", "lossy", "animated_gif", "tall", "one", "up"]),
        ("gemma4-vision/vis4-a", OF_ALL_SIZES),
        ("gemma4-vision/vis4-b", OF_SMALL_SIZES),
        ("gemma4-vision/vis4-c", OF_ALL_SIZES),
    ] {
        let case = Case::open(name);
        let mut model = case.load(&LoadOptions::default());
        let slots = model.limits().images.expect("images").slots as u32;
        for (i, image) in (0..).zip(images) {
            // Another image is in the slot until then, but for the first ones.
            let slot = i % slots.min(3);
            case.encode_image(&mut model, slot, image);
            let off = max_difference(&case.found(&mut model, slot, image), &case.embeddings(image));
            println!("{name} {image}: {off:.1e}");
            assert!(off < 1e-4, "{name} {image}: {off}");
        }
    }
}

#[test]
fn logits_with_none_one_and_several_images_equal_those_of_transformers() {
    for name in ALL {
        let case = Case::open(name);
        let mut model = case.load(&LoadOptions::default());
        for prompt in case.prompts() {
            let off = case.off_logits(&mut model, prompt);
            println!("{name} {prompt}: {off:.1e}");
            assert!(off < 1e-3, "{name} {prompt}: {off}");
        }
    }
}

/// The window of these models is longer than an image. With a shorter one, a token of an image sees the tokens after it to the
/// image's end, and no token before its window.
#[test]
fn a_window_shorter_than_an_image_hides_the_tokens_before_it() {
    for (name, window, shorter) in [("vis-a", 24, 7), ("vis-b", 12, 4)] {
        let case = Case::open(&format!("gemma3-vision/{name}"));
        let folder = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(&case.folder).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
        let config = folder.path().join("config.json");
        let text = std::fs::read_to_string(&config).unwrap();
        let long = format!("\"sliding_window\": {window}");
        assert!(text.contains(&long));
        std::fs::write(&config, text.replace(&long, &format!("\"sliding_window\": {shorter}"))).unwrap();
        let case = Case { folder: Path::new(folder.path()).to_owned(), ..case };
        let mut model = case.load(&LoadOptions::default());
        let mut compared = 0;
        for prompt in case.prompts() {
            let at = format!("short_window.positions.{prompt}");
            if !case.goldens.has(&at) {
                continue;
            }
            let all = case.logits(&mut model, prompt);
            let found = rows_at(&all, &case.goldens.tokens(&at), model.limits().vocab_size);
            let expected: Vec<f32> = case.goldens.view(&format!("short_window.and.logits.{prompt}"));
            let off = max_difference(&found, &expected);
            println!("{name} {prompt}: {off:.1e}");
            assert!(off < 1e-3, "{name} {prompt}: {off}");
            compared += 1;
        }
        assert!(compared > 0, "{name}");
    }
}

/// With int8 activations and int8 matrices of the tower, images cost little more than what f16 costs transformers.
#[test]
fn a_fast_tower_is_near_the_exact_one() {
    for name in ALL {
        let case = Case::open(name);
        let of_one_size = name.starts_with("gemma3");
        let images = if of_one_size { &["photo420", "rgb", "one"][..] } else { OF_SMALL_SIZES };
        let options = LoadOptions { precision: Precision::Fast, kv: KvDtype::F16, ..LoadOptions::default() };
        let mut model = case.load(&options);
        for image in images {
            case.encode_image(&mut model, 1, image);
            let (found, expected) = (case.found(&mut model, 1, image), case.embeddings(image));
            let square =
                |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x * x)).sum::<f64>();
            let error = square(&mut found.iter().zip(&expected).map(|(a, b)| a - b));
            let off = (error / square(&mut expected.iter().copied())).sqrt();
            println!("{name} {image}: {off:.1e} of the length");
            assert!(off < 0.03, "{name} {image}: {off}");
        }
    }
}

/// Without its tower, a model has no slots; other checkpoints have none in any case.
#[test]
fn a_tower_is_loaded_if_it_is_wanted_and_there() {
    let case = Case::open("gemma3-vision/vis-a");
    let limits = |vision| {
        let options = LoadOptions { vision, ..LoadOptions::default() };
        load(&case.folder, &options).limits().images
    };
    assert_eq!(limits(VisionMode::Off), None);
    for mode in [VisionMode::Auto, VisionMode::On] {
        let images = limits(mode).expect("images");
        assert_eq!((images.sizes, images.tokens), (ImageSizes::Fixed { side: 112 }, 16));
    }
    let text = data("gemma3/tiny-a");
    let auto = LoadOptions { vision: VisionMode::Auto, ..LoadOptions::default() };
    assert_eq!(load(&text, &auto).limits().images, None);
}

/// Images are made as by the published processors, so a checkpoint that says something else is loaded without its tower.
#[test]
fn a_config_of_a_processor_that_makes_other_images_is_refused_by_its_field() {
    let problem = |set: &str, file: &str, change: &dyn Fn(&mut Value)| {
        let copy = copy_of(&data(set));
        let path = copy.path().join(file);
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut config);
        std::fs::write(&path, config.to_string()).unwrap();
        let (spec, _) = arch::load(&open_files(copy.path()).unwrap()).unwrap();
        spec.vision.err().map(|problem| problem.replace(&format!("{}/", copy.path().display()), ""))
    };
    const PREPROCESSOR: &str = "preprocessor_config.json";
    const PROCESSOR: &str = "processor_config.json";
    for (field, value, expected) in [
        ("image_mean", json!([0.485, 0.456, 0.406]), Some("image_mean is 0.485; expected 0.5")),
        ("image_std", json!([0.5, 0.5, 0.25]), Some("image_std is 0.25; expected 0.5")),
        ("image_std", json!(0.5), None),
        (
            "rescale_factor",
            json!(0.00390625),
            Some("rescale_factor is 0.00390625; expected 0.00392156862745098"),
        ),
        (
            "do_normalize",
            json!(false),
            Some("do_normalize is false; only checkpoints with true can be computed"),
        ),
        ("do_resize", json!(false), Some("do_resize is false; only checkpoints with true can be computed")),
        (
            "do_pan_and_scan",
            json!(true),
            Some("do_pan_and_scan is true; only checkpoints with false can be computed"),
        ),
        ("resample", json!(3), Some("resample is 3; expected 2")),
        ("image_seq_length", json!(256), Some("image_seq_length is 256; expected 16")),
        ("size", json!({"height": 112, "width": 224}), Some("size.width is 224; expected 112")),
        ("size", json!(null), None),
        ("do_convert_rgb", json!(true), None),
    ] {
        let found = problem("gemma3-vision/vis-a", PREPROCESSOR, &|config| config[field] = value.clone());
        assert_eq!(found, expected.map(|expected| format!("{PREPROCESSOR}: {expected}")), "{field}");
    }
    // transformers 5 writes the file of all processors.
    let nested = |config: &mut Value| config["image_processor"] = json!({"resample": 3});
    let found = problem("gemma3-vision/vis-a", PROCESSOR, &nested);
    assert_eq!(found.unwrap(), format!("{PROCESSOR}: image_processor.resample is 3; expected 2"));
    for (set, field, value, expected) in [
        ("vis4-a", "resample", json!(2), Some("resample is 2; expected 3")),
        ("vis4-a", "image_mean", json!([0.5, 0.5, 0.5]), None),
        ("vis4-a", "do_normalize", json!(true), None),
        (
            "vis4-c",
            "pooling_kernel_size",
            json!(2),
            Some("patch_size is 16, times pooling_kernel_size (2); expected 48 pixels"),
        ),
        ("vis4-c", "patch_size", json!(null), None),
    ] {
        let set = format!("gemma4-vision/{set}");
        let change = |config: &mut Value| config["image_processor"][field] = value.clone();
        let expected = expected.map(|expected| format!("{PROCESSOR}: image_processor.{expected}"));
        assert_eq!(problem(&set, PROCESSOR, &change), expected, "{set}: {field}");
    }
    let normalized = |config: &mut Value| {
        config["image_processor"]["do_normalize"] = json!(true);
        config["image_processor"]["image_mean"] = json!([0.5, 0.5, 0.5]);
    };
    let found = problem("gemma4-vision/vis4-a", PROCESSOR, &normalized).unwrap();
    assert_eq!(found, format!("{PROCESSOR}: image_processor.image_mean is 0.5; expected 0"));
}

/// Each layer of a step is cut into parts, of which a part of an image needs keys and values of later ones.
#[test]
fn a_step_with_images_keeps_its_bits_however_it_is_cut() {
    for (precision, kv) in [(Precision::F32, KvDtype::F32), (Precision::Fast, KvDtype::Int8)] {
        let case = Case::open("gemma3-vision/vis-a");
        let whole = LoadOptions { precision, kv, ..LoadOptions::default() };
        let cut = LoadOptions { max_submit: Duration::from_nanos(1), ..whole };
        let [mut whole, mut cut] = [whole, cut].map(|options| case.load(&options));
        for prompt in ["two", "after", "adjacent"] {
            let bits = |model: &mut ModelRunner| -> Vec<u32> {
                case.logits(model, prompt).into_iter().map(f32::to_bits).collect()
            };
            assert!(bits(&mut whole) == bits(&mut cut), "{prompt}, {precision}");
        }
    }
}

/// An image in a slot stays there while others are encoded, and in any slot it is the same.
#[test]
fn embeddings_are_the_same_in_every_slot_and_after_others() {
    let case = Case::open("gemma3-vision/vis-b");
    let mut model =
        case.load(&LoadOptions { precision: Precision::Fast, kv: KvDtype::F16, ..LoadOptions::default() });
    let slots = model.limits().images.expect("images").slots as u32;
    let names = ["rgb", "photo420", "wide"];
    let bits = |model: &mut ModelRunner, slot| -> Vec<u32> {
        model.image_embeddings(slot).unwrap().into_iter().map(f32::to_bits).collect()
    };
    let mut first: Vec<Option<Vec<u32>>> = vec![None; names.len()];
    for slot in (0..slots).chain([1, 0]) {
        let which = slot as usize % names.len();
        case.encode_image(&mut model, slot, names[which]);
        let found = bits(&mut model, slot);
        assert_eq!(*first[which].get_or_insert_with(|| found.clone()), found, "slot {slot}");
    }
    for slot in 0..slots {
        assert_eq!(
            first[slot as usize % names.len()],
            Some(bits(&mut model, slot)),
            "slot {slot} at the end"
        );
    }
    assert_ne!(first[0], first[1]);
}

/// What the real tower takes on a GPU.
#[test]
fn the_tower_of_a_27b_takes_less_than_a_gigabyte() {
    let config = serde_json::json!({
        "model_type": "gemma3", "mm_tokens_per_image": 256,
        "text_config": {"model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 6},
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": false
        }
    });
    let spec = arch::read(&config, "config.json").unwrap();
    let tower = spec.vision.as_ref().unwrap().as_ref().unwrap();
    let elements: usize = tower.tensors().iter().map(|tensor| tensor.shape.iter().product::<usize>()).sum();
    assert_eq!(elements, 416_866_032 + 1152 + 1152 * 5376, "the tower's parameters and the projector's");
    let budget = ImageBudget::default();
    let request = TowerRequest { spec: tower, scheme: Scheme::Int8Row, precision: Precision::Fast, budget };
    let all: u64 = request.requests(336).iter().map(|request| request.bytes).sum();
    let weights = request.weight_bytes();
    println!("{weights} bytes of weights, {all} bytes in all");
    assert!((430_000_000..480_000_000).contains(&weights) && all < 1_000_000_000);
    let limits = request.limits(336).expect("room for an image");
    assert_eq!((limits.sizes, limits.tokens, limits.slots), (ImageSizes::Fixed { side: 896 }, 256, 8));
}

// --- towers in GGUF files of their own ----------------------------------------------------------------------

const MODEL_FILE: &str = "vis-a-text-BF16.gguf";
const TOWER_FILE: &str = "vis-a-mmproj-F16.gguf";
const OF_GEMMA_3: &[&str] = &["photo420", "rgb", "one", "checker"];

/// vis-a as two GGUF files, with its goldens.
fn gguf_case() -> Case {
    Case { folder: data("gemma3-vision/gguf"), ..Case::open("gemma3-vision/vis-a") }
}

fn tower_bytes() -> Vec<u8> {
    std::fs::read(data("gemma3-vision/gguf").join(TOWER_FILE)).unwrap()
}

/// A set of `tests/data/gemma4-vision` as two GGUF files, with its goldens.
fn gemma_4_gguf_case(set: &str) -> Case {
    let name = format!("gemma4-vision/{set}");
    Case { folder: data(format!("{name}/gguf")), ..Case::open(&name) }
}

/// A folder with a GGUF file of a model and these files.
fn beside(model: &Path, files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(model, folder.path().join(model.file_name().unwrap())).unwrap();
    for (name, bytes) in files {
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

/// The only place of `part` in `bytes`.
fn only(bytes: &[u8], part: &[u8]) -> usize {
    let mut places = (0..bytes.len() - part.len()).filter(|at| bytes[*at..].starts_with(part));
    let place = places.next().unwrap_or_else(|| panic!("no {}", String::from_utf8_lossy(part)));
    assert_eq!(places.next(), None, "{}", String::from_utf8_lossy(part));
    place
}

/// `bytes` with `to` in the place of `from`, which occurs once.
fn replaced(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let at = only(bytes, from);
    [&bytes[..at], to, &bytes[at + from.len()..]].concat()
}

/// A text as it is stored in GGUF.
fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// The largest difference of the embeddings of these images from those of transformers.
fn off_embeddings(case: &Case, model: &mut ModelRunner, images: &[&str]) -> f32 {
    let off = images.iter().map(|image| {
        case.encode_image(model, 0, image);
        max_difference(&case.found(model, 0, image), &case.embeddings(image))
    });
    off.fold(0.0, f32::max)
}

#[test]
fn a_gguf_file_with_its_tower_computes_what_transformers_does() {
    for (case, images) in [
        (gguf_case(), OF_GEMMA_3),
        (gemma_4_gguf_case("vis4-a"), OF_ALL_SIZES),
        (gemma_4_gguf_case("vis4-c"), OF_ALL_SIZES),
    ] {
        let name = case.folder.display();
        let mut model = case.load(&LoadOptions::default());
        let off = off_embeddings(&case, &mut model, images);
        println!("{name}, embeddings: {off:.1e}");
        assert!(off < 1e-3, "{name}: {off}");
        for prompt in ["one", "two"] {
            let off = case.off_logits(&mut model, prompt);
            println!("{name}, {prompt}: {off:.1e}");
            assert!(off < 1e-3, "{name}, {prompt}: {off}");
        }
    }
}

/// The layout of the tensors is that of the files, whatever the config says.
#[test]
fn a_tower_in_gguf_is_read_with_the_config_of_safetensors() {
    for set in ["vis4-a", "vis4-c"] {
        let case = gemma_4_gguf_case(set);
        let files =
            open_files(&case.folder).unwrap().with_config(&case.folder.join("../config.json")).unwrap();
        let options = LoadOptions { vision: VisionMode::On, ..LoadOptions::default() };
        let mut model = load_files(&files, &options).unwrap();
        let off = off_embeddings(&case, &mut model, OF_SMALL_SIZES);
        assert!(off < 1e-3, "{set}: {off}");
    }
}

/// The file with the embedder of images has one of sound, too.
#[test]
fn tensors_of_sound_beside_those_of_images_are_skipped_and_counted() {
    let files = open_files(&gemma_4_gguf_case("vis4-c").folder).unwrap();
    let checkpoint = Checkpoint::open(&files).unwrap();
    let (spec, _) = arch::load(&files).unwrap();
    let wanted = spec.vision.as_ref().unwrap().as_ref().unwrap().tensors();
    assert!(checkpoint.iter().any(|tensor| tensor.name == "embed_audio.input_projection.weight"));
    let weights = Weights::collect(&checkpoint, &spec).unwrap();
    assert_eq!(weights.skipped_vision, wanted.len() + 1);
}

/// The open files are enough, as for a process that gets them from another one.
#[test]
fn a_held_tower_is_read_after_its_file_is_gone() {
    let case = gguf_case();
    let folder = beside(&case.folder.join(MODEL_FILE), &[(TOWER_FILE, &tower_bytes())]);
    let files = open_files(folder.path()).unwrap().hold().unwrap();
    drop(folder);
    let mut model =
        load_files(&files, &LoadOptions { vision: VisionMode::On, ..LoadOptions::default() }).unwrap();
    assert!(off_embeddings(&case, &mut model, OF_GEMMA_3) < 1e-3);
}

#[test]
fn towers_of_old_converters_and_of_other_types_are_read() {
    let case = gguf_case();
    let original = tower_bytes();
    let model_off = |bytes: &[u8]| {
        let folder = beside(&case.folder.join(MODEL_FILE), &[("mmproj.gguf", bytes)]);
        off_embeddings(
            &case,
            &mut Case { folder: folder.path().to_owned(), ..gguf_case() }.load(&LoadOptions::default()),
            OF_GEMMA_3,
        )
    };

    // Old files have the names of the network's matrices swapped, and another key of the projector.
    let mut old = replaced(&original, &text("clip.projector_type"), &text("clip.vision.projector_type"));
    for (layer, what) in (0..3).flat_map(|layer| [(layer, "weight"), (layer, "bias")]) {
        let name = |part: &str| text(&format!("v.blk.{layer}.{part}.{what}"));
        for (from, to) in [("ffn_up", "swapped"), ("ffn_down", "ffn_up"), ("swapped", "ffn_down")] {
            old = replaced(&old, &name(from), &name(to));
        }
    }
    // The new key is seven bytes longer, so another one becomes shorter: tensors keep their places.
    let old = replaced(&old, &text("general.size_label"), &text("size_labels"));
    assert_eq!(old.len(), original.len());
    assert!(model_off(&old) < 1e-3);

    let off = model_off(&with_rounded_projection(&original));
    println!("Q8_0: {off:.1e}");
    assert!((1e-3..0.2).contains(&off), "{off}");
}

/// The places in [`TOWER_FILE`] of the type of its projection, and of the values.
fn projection_places(bytes: &[u8]) -> (usize, usize) {
    let name = text("mm.input_projection.weight");
    let info = only(bytes, &name) + name.len();
    let offset = u64::from_le_bytes(bytes[info + 24..info + 32].try_into().unwrap()) as usize;
    (info + 20, header_end(bytes).next_multiple_of(32) + offset)
}

/// The tower with the projection as Q8_0.
fn with_rounded_projection(original: &[u8]) -> Vec<u8> {
    let mut rounded = original.to_vec();
    let (kind, data) = projection_places(original);
    rounded[kind..kind + 4].copy_from_slice(&8u32.to_le_bytes());
    let values = original[data..data + 2 * 48 * 96].as_chunks::<2>().0;
    let values: Vec<f32> = values.iter().map(|bytes| half::f16::from_le_bytes(*bytes).to_f32()).collect();
    for (index, block) in values.chunks(32).enumerate() {
        let scale = half::f16::from_f32(block.iter().fold(0.0f32, |most, x| most.max(x.abs())) / 127.0);
        let at = data + 34 * index;
        rounded[at..at + 2].copy_from_slice(&scale.to_le_bytes());
        for (to, x) in rounded[at + 2..at + 34].iter_mut().zip(block) {
            *to = (x / scale.to_f32()).round() as i8 as u8;
        }
    }
    rounded
}

/// The end of the last tensor's entry in the header of [`TOWER_FILE`], before the padding.
fn header_end(bytes: &[u8]) -> usize {
    let last = text("v.post_ln.weight");
    // The number of dimensions, one of them, the type and the offset.
    only(bytes, &last) + last.len() + 4 + 8 + 4 + 8
}

/// A tower that cannot be used does not keep the model from answering texts, unless the user asks for the tower.
#[test]
fn an_unusable_tower_is_refused_by_name_and_texts_are_not() {
    let model = data("gemma3-vision/gguf").join(MODEL_FILE);
    let other = data("gguf/gguf-62/gguf-62-Q8_0.gguf");
    let original = tower_bytes();
    let key = |key: &str| [text(key), 4u32.to_le_bytes().to_vec()].concat();
    let kind = |kind: &str| [&text("clip.projector_type")[..], &8u32.to_le_bytes(), &text(kind)].concat();
    let number = |name: &str, number: u32| [key(name), number.to_le_bytes().to_vec()].concat();
    let heads = "clip.vision.attention.head_count";
    let (width, pool) = ("clip.vision.projection_dim", "clip.vision.projector.scale_factor");
    for (model, bytes, problem) in [
        (
            &model,
            replaced(&original, &kind("gemma3"), &kind("llava9")),
            "key clip.projector_type: is \"llava9\"; for models of the architecture \"gemma3\", expected",
        ),
        (&model, original[..original.len() - 1000].to_vec(), "the file is truncated or corrupt"),
        (&model, original[..1000].to_vec(), "the file is truncated or corrupt"),
        (&model, Vec::new(), "the magic takes 4 bytes"),
        (
            &model,
            std::fs::read(&model).unwrap(),
            "key general.architecture: is \"gemma3\"; expected \"clip\"",
        ),
        (
            &other,
            original.clone(),
            "key clip.vision.projection_dim: is 96; expected 32, the gemma3.embedding_length of the model",
        ),
        (
            &other,
            replaced(&original, &number(width, 96), &number(width, 32)),
            "mm_input_projection_weight has shape [48, 96]; config.json asks for [48, 32] (hidden_size",
        ),
        (
            &model,
            replaced(&original, &number(pool, 2), &number(pool, 3)),
            "key clip.vision.projector.scale_factor: is 3; expected a divisor of the 8 patches",
        ),
        (
            &model,
            replaced(&original, &number(heads, 3), &number(heads, 5)),
            "vision_config.hidden_size is 48 for num_attention_heads 5",
        ),
        (
            &model,
            replaced(&original, &text("v.post_ln.bias"), &text("v.post_lx.bias")),
            "tensor v.post_lx.bias: is no part of a vision tower",
        ),
        (&model, replaced(&original, &text("clip.vision.image_mean"), &text("clip.vision.image_mode")), ""),
    ] {
        check_unusable(model, &bytes, problem);
    }
}

/// The same for what only the towers of Gemma 4 have.
#[test]
fn unusable_towers_of_gemma_4_are_refused_by_name() {
    let [(axial, of_axial), (linear, of_linear)] = ["vis4-a", "vis4-c"].map(|set| {
        let folder = gemma_4_gguf_case(set).folder;
        let tower = std::fs::read(folder.join(format!("{set}-mmproj-F16.gguf"))).unwrap();
        (folder.join(format!("{set}-text-BF16.gguf")), tower)
    });
    let (gemma_3, other) = (
        data("gemma3-vision/gguf").join(MODEL_FILE),
        data("families/tiny-gemma4-31b/gguf/tiny-31b-Q4_0.gguf"),
    );
    let number = |name: &str, number: u32| {
        [&text(&format!("clip.vision.{name}"))[..], &4u32.to_le_bytes(), &number.to_le_bytes()].concat()
    };
    let changed =
        |from: u32, to: u32, name: &str| replaced(&of_axial, &number(name, from), &number(name, to));
    let renamed = |tower: &[u8], from: &str, to: &str| replaced(tower, &text(from), &text(to));
    // A name that is one byte longer in the place of another, and a shorter key: tensors keep their places.
    let clipped = renamed(&of_axial, "v.blk.0.attn_out.weight", "v.blk.0.attn_q.input_max");
    let clipped = renamed(&clipped, "general.size_label", "general.size_labe");
    let levels = |values: [f32; 3]| {
        let head = [&text("clip.vision.image_mean")[..], &9u32.to_le_bytes(), &6u32.to_le_bytes()].concat();
        [head, 3u64.to_le_bytes().to_vec(), values.map(f32::to_le_bytes).concat()].concat()
    };
    for (model, bytes, problem) in [
        (
            &axial,
            renamed(&of_axial, "gemma4v", "gemma9v"),
            "key clip.vision.projector_type: is \"gemma9v\"; for models of the architecture \"gemma4\", expected \"gemma4v\" \
             or \"gemma4uv\"",
        ),
        (
            &gemma_3,
            of_axial.clone(),
            "key clip.vision.projector_type: is \"gemma4v\"; for models of the architecture \"gemma3\", expected \"gemma3\"",
        ),
        (
            &axial,
            tower_bytes(),
            "key clip.projector_type: is \"gemma3\"; for models of the architecture \"gemma4\"",
        ),
        (
            &other,
            of_axial.clone(),
            "key clip.vision.projection_dim: is 64; expected 128, the gemma4.embedding_length of the model",
        ),
        (
            &other,
            changed(64, 128, "projection_dim"),
            "tensor embed_vision.embedding_projection.weight has shape [64, 144]; config.json asks for [128, 144]",
        ),
        (
            &axial,
            clipped,
            "tensor v.blk.0.attn_q.input_max: is a bound of a clipped linear map (use_clipped_linears)",
        ),
        (
            &axial,
            replaced(&of_axial, &levels([0.0; 3]), &levels([0.0, 0.5, 0.0])),
            "key clip.vision.image_mean: contains 0.5; expected 0",
        ),
        (
            &axial,
            changed(2, 3, "block_count"),
            "tensor vision_tower.encoder.layers.2.input_layernorm.weight is missing; config.json asks for it with shape [144]",
        ),
        (
            &axial,
            changed(16, 12, "patch_size"),
            "tensor vision_tower.patch_embedder.input_proj.weight has shape [144, 3, 16, 16]; config.json asks for \
             [144, 3, 12, 12] (hidden_size, 3, patch_size, patch_size)",
        ),
        (
            &axial,
            renamed(&of_axial, "v.position_embd.weight", "v.position_embx.weight"),
            "tensor v.position_embd.weight: is missing; expected [2, positions, width]",
        ),
        (
            &axial,
            renamed(&of_axial, "v.std_bias", "v.std_bits"),
            "tensor v.std_bits: is no part of a vision tower with the projector \"gemma4v\"",
        ),
        (
            &linear,
            renamed(&of_linear, "v.patch_norm.3.bias", "v.patch_norm.4.bias"),
            "tensor v.patch_norm.4.bias: is no part of a vision tower with the projector \"gemma4uv\"",
        ),
        // Twice the width, so the norms and embeddings have another one.
        (
            &linear,
            replaced(&of_linear, &number("embedding_length", 24), &number("embedding_length", 48)),
            "tensor vision_embedder.patch_dense.weight has shape [24, 6912]; config.json asks for [48, 6912]",
        ),
    ] {
        check_unusable(model, &bytes, problem);
    }
}

/// Loads a model with this tower in the same folder. The tower is refused for this reason, or is loaded if the reason is
/// empty.
fn check_unusable(model: &Path, tower: &[u8], problem: &str) {
    let folder = beside(model, &[("mmproj-x.gguf", tower)]);
    let files = open_files(folder.path()).unwrap();
    let load = |vision| load_files(&files, &LoadOptions { vision, ..LoadOptions::default() });
    if problem.is_empty() {
        // What is not there has its usual value.
        assert!(load(VisionMode::On).unwrap().limits().images.is_some());
        return;
    }
    let error = load(VisionMode::On).err().unwrap_or_else(|| panic!("{problem}")).to_string();
    assert!(error.contains("mmproj-x.gguf: ") && error.contains(problem), "{error}\n{problem}");
    for mode in [VisionMode::Auto, VisionMode::Off] {
        assert_eq!(load(mode).unwrap().limits().images, None, "{problem}");
    }
}

#[test]
fn a_tower_that_is_a_link_out_of_the_folder_is_not_read() {
    let model = data("gemma3-vision/gguf").join(MODEL_FILE);
    let elsewhere = beside(&model, &[("t.gguf", &tower_bytes())]);
    let folder = beside(&model, &[]);
    let tower = folder.path().join("mmproj-x.gguf");
    std::os::unix::fs::symlink(elsewhere.path().join("t.gguf"), &tower).unwrap();
    assert_eq!(open_files(folder.path()).unwrap().tower(), None);
    // As in the cache of the hub, where all files are links to the same folder.
    let here = folder.path().join(MODEL_FILE);
    std::fs::remove_file(&here).unwrap();
    std::os::unix::fs::symlink(elsewhere.path().join(MODEL_FILE), &here).unwrap();
    assert_eq!(open_files(folder.path()).unwrap().tower(), Some(&*tower));
}

// --- towers in native checkpoints ---------------------------------------------------------------------------

/// The arguments of `unicorn quantize` with the results of [`QuantizeMode::Int4G32`].
fn quantize<'a>(source: &'a Path, destination: &'a Path) -> Vec<&'a str> {
    let [source, destination] = [source, destination].map(|path| path.to_str().expect("UTF-8"));
    let schemes = ["--scheme", "int4-g32", "--embedding", "keep", "--rounding", "nearest"];
    [&["quantize", source, destination][..], &schemes].concat()
}

/// Every file of a folder apart from the manifest, which names the source.
fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let files = entries.map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap()));
    let mut files: Vec<_> = files.filter(|(name, _)| name != "unicorn.json").collect();
    files.sort();
    files
}

/// Asserts that a native checkpoint has the tower of its source, value for value and in the same types. Returns the number of
/// its tensors.
fn assert_same_tower(source: &Path, native: &Path) -> usize {
    let files = [source, native].map(|folder| open_files(folder).unwrap());
    let [source, native] = files.each_ref().map(|files| Source::open(files).unwrap());
    let [weights, of_native] = [&source, &native].map(|source| source.weights().unwrap());
    let (spec, tensors) = source.tower(&weights).unwrap().expect("a tower");
    let (native_spec, native_tensors) = native.tower(&of_native).unwrap().expect("a tower");
    assert_eq!(spec, native_spec);
    for ((wanted, tensor), written) in spec.tensors().iter().zip(&tensors).zip(&native_tensors) {
        assert_eq!(written.name, format!("model.{}", wanted.name));
        assert!(written.file.ends_with("/vision.safetensors"), "{}", written.file);
        assert_eq!(written.shape, tensor.shape, "{}", wanted.name);
        assert_eq!(written.scheme().unwrap(), tensor.scheme().unwrap(), "{}", wanted.name);
        match tensor.encoding {
            Encoding::Plain { .. } => assert!(written.encoding == tensor.encoding, "{}", wanted.name),
            _ => assert!(written.to_f32().unwrap() == tensor.to_f32().unwrap(), "{}", wanted.name),
        }
    }
    tensors.len()
}

/// A source that is quantized once is the model that a load with `--quantize` makes of it, with its tower: from safetensors of
/// every family and generation, and from GGUF, also with a quantized tower.
#[test]
fn a_native_checkpoint_has_the_bits_of_its_source_and_its_tower() {
    let rounded = with_rounded_projection(&tower_bytes());
    let rounded = beside(&data("gemma3-vision/gguf").join(MODEL_FILE), &[("mmproj.gguf", &rounded)]);
    let rounded = Case { folder: rounded.path().to_owned(), ..gguf_case() };
    let fast = LoadOptions { precision: Precision::Fast, kv: KvDtype::F16, ..LoadOptions::default() };
    let gguf = [gguf_case(), gemma_4_gguf_case("vis4-a"), gemma_4_gguf_case("vis4-c")];
    let plain = ALL.map(Case::open).into_iter().chain(gguf).map(|case| (case, false));
    for (case, is_quantized) in plain.chain([(rounded, true)]) {
        let folder = tempfile::tempdir().unwrap();
        let native = folder.path().join("native");
        let report = printed(unicorn(&quantize(&case.folder, &native)));
        assert!(report.contains("  vision tower  keep       without loss, "), "{report}");
        let tensors = assert_same_tower(&case.folder, &native);
        for options in [LoadOptions::default(), fast] {
            let options = LoadOptions { vision: VisionMode::On, ..options };
            let bits = |folder: &Path, quantize| -> Vec<u32> {
                let mut model = load(folder, &LoadOptions { quantize, ..options });
                let mut all = case.logits(&mut model, "two");
                for (slot, image) in (0..).zip(case.images_of("two")) {
                    all.extend(case.found(&mut model, slot, image));
                }
                all.into_iter().map(f32::to_bits).collect()
            };
            let expected = bits(&case.folder, QuantizeMode::Int4G32);
            assert!(bits(&native, QuantizeMode::None) == expected, "{}", case.folder.display());
        }

        let shown = [&case.folder, &native]
            .map(|folder| printed_json(unicorn(&["inspect", folder.to_str().unwrap(), "--json"])));
        let [tower, of_native] = shown.each_ref().map(|shown| &shown["vision_tower"]);
        assert_eq!((&tower["tensors"], &of_native["tensors"]), (&tensors.into(), &tensors.into()));
        // A quantized matrix is stored in tiles of 32 rows and blocks of columns.
        assert_eq!(tower["bytes"] == of_native["bytes"], !is_quantized, "{tower} {of_native}");
        let text = printed(unicorn(&["inspect", native.to_str().unwrap(), "--verify"]));
        assert!(text.contains("  vision tower") && text.contains("all correct"), "{text}");

        // A native checkpoint can be the source.
        let again = folder.path().join("again");
        let [from, to] = [&native, &again].map(|path| path.to_str().unwrap());
        printed(unicorn(&["quantize", from, to, "--scheme", "keep"]));
        assert!(contents(&native) == contents(&again), "{}", case.folder.display());
    }
}

#[test]
fn a_conversion_leaves_out_a_tower_that_cannot_be_used() {
    let model = data("gemma3-vision/gguf").join(MODEL_FILE);
    let original = tower_bytes();
    let folder = tempfile::tempdir().unwrap();
    let native = folder.path().join("native");
    let truncated = beside(&model, &[("mmproj-x.gguf", &original[..original.len() - 1000])]);
    let (code, report, log) = output(unicorn(&quantize(truncated.path(), &native)));
    assert!(code == 0 && !report.contains("tower"), "{report}{log}");
    assert!(log.contains("the vision tower is left out") && log.contains("mmproj-x.gguf: "), "{log}");
    assert!(!native.join("vision.safetensors").exists());
    let auto = LoadOptions { vision: VisionMode::Auto, ..LoadOptions::default() };
    assert_eq!(load(&native, &auto).limits().images, None);
    let shown = printed(unicorn(&["inspect", truncated.path().to_str().unwrap()]));
    assert!(shown.contains("  vision tower not used: ") && shown.contains("truncated"), "{shown}");

    // A value that is not a number is no reason to leave the tower out: the file is damaged.
    let mut damaged = original.clone();
    let (_, data) = projection_places(&original);
    damaged[data..data + 2].copy_from_slice(&half::f16::NAN.to_le_bytes());
    let damaged = beside(&model, &[("mmproj-x.gguf", &damaged)]);
    let refused = folder.path().join("refused");
    let parts = ["mmproj-x.gguf", "mm_input_projection_weight", "NaN"];
    assert_error(unicorn(&quantize(damaged.path(), &refused)), 1, &parts);
}
