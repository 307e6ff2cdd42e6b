//! The demo model's folder, and the goldens of its questions (`tests/data/demo/README.md`).

use std::sync::OnceLock;

use serde::Deserialize;

use super::json::read_json;
use super::{data, root};

/// The largest allowed error of a logit, as for the reference checkpoints.
pub const BOUND: f32 = 1e-3;

/// `<eos>` and `<end_of_turn>` of the demo model.
pub const STOP: [u32; 2] = [1, 6];

/// Identifies the shipped weights that the goldens belong to.
#[derive(Deserialize)]
pub struct About {
    pub model_sha256: String,
}

/// A question, with PyTorch's answer.
#[derive(Deserialize)]
pub struct Answer {
    pub id: String,
    pub category: String,
    pub quick: bool,
    pub prompt: Vec<u32>,
    pub answer: Vec<u32>,
    pub text: String,
    pub margin: f32,
    pub accepted: bool,
}

/// `goldens.json`.
#[derive(Deserialize)]
pub struct Answers {
    pub about: About,
    pub answers: Vec<Answer>,
}

/// The goldens, read once.
pub fn goldens() -> &'static Answers {
    static GOLDENS: OnceLock<Answers> = OnceLock::new();
    GOLDENS.get_or_init(|| read_json(&data("demo/goldens.json")))
}

/// Prompts of the quick questions, of at most `most` ids.
pub fn quick_prompts(most: usize) -> impl Iterator<Item = &'static [u32]> {
    goldens().answers.iter().filter(move |a| a.quick && a.prompt.len() <= most).map(|a| &a.prompt[..])
}

/// The prompts of a category's accepted questions whose answers have a clear margin, and those answers without stop
/// ids.
pub fn answered(category: &str) -> Vec<(&'static [u32], Vec<u32>)> {
    let of =
        goldens().answers.iter().filter(|a| a.category == category && a.accepted && a.margin > 2.0 * BOUND);
    of.map(|a| (&a.prompt[..], a.answer.iter().copied().filter(|id| !STOP.contains(id)).collect())).collect()
}

/// The folder of the shipped model.
pub fn folder() -> std::path::PathBuf {
    root().join("models/demo")
}
