//! Gemma 3 with images: the tower and the logits equal those of transformers, for checkpoints of different generations.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use unicorn::model::arch;
use unicorn::model::load::LoadOptions;
use unicorn::model::model_runner::ModelRunner;
use unicorn::model::vision::TowerRequest;
use unicorn::model::{ImageSpan, Runner};
use unicorn::tensor::{KvDtype, Precision, Scheme, VisionMode};

use crate::support::data;
use crate::support::goldens::{Goldens, load, max_difference, rows_at};

/// A model of `tests/data/gemma3-vision` with its goldens.
struct Case {
    folder: PathBuf,
    goldens: Goldens,
    images: Goldens,
    prompts: Value,
}

impl Case {
    fn open(name: &str) -> Case {
        let folder = data(format!("gemma3-vision/{name}"));
        let prompts = std::fs::read(folder.join("goldens.json")).unwrap();
        Case {
            goldens: Goldens::open(&folder),
            images: Goldens::read(&folder.join("images.safetensors")),
            prompts: serde_json::from_slice::<Value>(&prompts).unwrap()["prompts"].take(),
            folder,
        }
    }

    fn load(&self, options: &LoadOptions) -> ModelRunner {
        load(&self.folder, &LoadOptions { vision: VisionMode::On, ..*options })
    }

    fn pixels(&self, image: &str) -> Vec<u8> {
        self.images.view(&format!("u8.{image}"))
    }

    /// The names of the prompts.
    fn prompts(&self) -> Vec<&str> {
        self.prompts.as_object().unwrap().keys().map(String::as_str).collect()
    }

    /// The tokens of a prompt, and its images in the slots from 0 on, which are encoded.
    fn encode(&self, model: &mut ModelRunner, prompt: &str) -> (Vec<u32>, Vec<ImageSpan>) {
        let of = &self.prompts[prompt];
        let spans = of["image_spans"].as_array().unwrap();
        let mut images = Vec::new();
        for ((slot, name), span) in (0..).zip(of["images"].as_array().unwrap()).zip(spans) {
            model.encode_image(slot, &self.pixels(name.as_str().unwrap())).unwrap();
            let [start, tokens] = [0, 1].map(|i| span[i].as_u64().unwrap() as usize);
            images.push(ImageSpan { start, tokens, slot, row: 0 });
        }
        (self.goldens.tokens(&format!("tokens.{prompt}")), images)
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
        ("vis-a", &["photo420", "rgb", "exif6", "gray", "one", "wide", "checker"][..]),
        ("vis-b", &["photo420", "rgb", "lossy", "animated_gif", "tall", "one", "up"]),
    ] {
        let case = Case::open(name);
        let mut model = case.load(&LoadOptions::default());
        let slots = model.limits().images.expect("images").slots as u32;
        for (i, image) in (0..).zip(images) {
            // Another image is in the slot until then, but for the first ones.
            let slot = i % slots.min(3);
            model.encode_image(slot, &case.pixels(image)).unwrap();
            let found = model.image_embeddings(slot).unwrap();
            let expected: Vec<f32> = case.goldens.view(&format!("image_features.{image}"));
            let off = max_difference(&found, &expected);
            println!("{name} {image}: {off:.1e}");
            assert!(off < 1e-4, "{name} {image}: {off}");
        }
    }
}

#[test]
fn logits_with_none_one_and_several_images_equal_those_of_transformers() {
    for name in ["vis-a", "vis-b"] {
        let case = Case::open(name);
        let mut model = case.load(&LoadOptions::default());
        for prompt in case.prompts() {
            let mut found = case.logits(&mut model, prompt);
            let at = format!("positions.{prompt}");
            if case.goldens.has(&at) {
                found = rows_at(&found, &case.goldens.tokens(&at), model.limits().vocab_size);
            }
            let expected: Vec<f32> = case.goldens.view(&format!("logits.{prompt}"));
            let off = max_difference(&found, &expected);
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
        let case = Case::open(name);
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
    for name in ["vis-a", "vis-b"] {
        let case = Case::open(name);
        let options = LoadOptions { precision: Precision::Fast, kv: KvDtype::F16, ..LoadOptions::default() };
        let mut model = case.load(&options);
        for image in ["photo420", "rgb", "one"] {
            model.encode_image(1, &case.pixels(image)).unwrap();
            let found = model.image_embeddings(1).unwrap();
            let expected: Vec<f32> = case.goldens.view(&format!("image_features.{image}"));
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
    let case = Case::open("vis-a");
    let limits = |vision| {
        let options = LoadOptions { vision, ..LoadOptions::default() };
        load(&case.folder, &options).limits().images
    };
    assert_eq!(limits(VisionMode::Off), None);
    for mode in [VisionMode::Auto, VisionMode::On] {
        let images = limits(mode).expect("images");
        assert_eq!((images.side, images.tokens, images.pixel_bytes()), (112, 16, 112 * 112 * 3));
    }
    let text = data("gemma3/tiny-a");
    let auto = LoadOptions { vision: VisionMode::Auto, ..LoadOptions::default() };
    assert_eq!(load(&text, &auto).limits().images, None);
}

/// Each layer of a step is cut into parts, of which a part of an image needs keys and values of later ones.
#[test]
fn a_step_with_images_keeps_its_bits_however_it_is_cut() {
    for (precision, kv) in [(Precision::F32, KvDtype::F32), (Precision::Fast, KvDtype::Int8)] {
        let case = Case::open("vis-a");
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
    let case = Case::open("vis-b");
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
        model.encode_image(slot, &case.pixels(names[which])).unwrap();
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
    let request = TowerRequest { spec: tower, scheme: Scheme::Int8Row, precision: Precision::Fast };
    let all: u64 = request.requests(336).iter().map(|request| request.bytes).sum();
    let weights = request.weight_bytes();
    println!("{weights} bytes of weights, {all} bytes in all");
    assert!((430_000_000..480_000_000).contains(&weights) && all < 1_000_000_000);
    let limits = request.limits(336);
    assert_eq!((limits.side, limits.tokens, limits.slots), (896, 256, 8));
}
