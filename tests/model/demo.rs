//! The shipped demo model. The engine answers its questions as PyTorch does, and enough of the answers are right.
//!
//! `tests/data/demo/README.md` describes the goldens. Without `UNICORN_TEST_DEMO`, only the quick questions run. With
//! `UNICORN_TEST_DEMO=all`, which `make test-demo` sets, all questions run.

use std::collections::BTreeMap;

use serde::Deserialize;
use unicorn::kernels::{AttentionBy, AttentionTile};
use unicorn::model::load::LoadOptions;
use unicorn::model::model_runner::ModelRunner;
use unicorn::model::{Runner, SamplingParams};
use unicorn::tensor::{KvDtype, Precision};

use unicorn::text::{Message, Tokenizer};

use crate::support::checkpoints::sha256;
use crate::support::demo::{Answer, BOUND, STOP, folder, goldens};
use crate::support::driver::{Driver, greedy, plain_sequence};
use crate::support::goldens::{Goldens, all_logits, load, max_difference};
use crate::support::json::read_json;
use crate::support::program::{output, unicorn_on_software};
use crate::support::tokenizers::gemma_template;
use crate::support::{data, reference, wants_all};

#[derive(Deserialize)]
struct Question {
    id: String,
    messages: Vec<Turn>,
    accept: Rule,
}

/// When an answer counts as right.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Rule {
    /// The answer is this text.
    Equals(String),
    /// The answer is this JSON value. Whitespace does not matter.
    Json(serde_json::Value),
    /// The answer contains at least one of these texts.
    AnyOf(Vec<String>),
    /// The answer contains all of these texts.
    AllOf(Vec<String>),
}

impl Rule {
    fn accepts(&self, text: &str) -> bool {
        match self {
            Rule::Equals(wanted) => text == wanted,
            Rule::Json(wanted) => serde_json::from_str::<serde_json::Value>(text).is_ok_and(|v| v == *wanted),
            Rule::AnyOf(wanted) => wanted.iter().any(|w| text.contains(w)),
            Rule::AllOf(wanted) => wanted.iter().all(|w| text.contains(w)),
        }
    }
}

#[derive(Deserialize)]
struct Turn {
    role: String,
    content: String,
}

fn selected() -> impl Iterator<Item = &'static Answer> {
    let all = wants_all("UNICORN_TEST_DEMO");
    goldens().answers.iter().filter(move |a| all || a.quick)
}

fn questions() -> Vec<Question> {
    read_json(&folder().join("questions.json"))
}

fn model() -> ModelRunner {
    load(&folder(), &LoadOptions::default())
}

fn tokenizer() -> Tokenizer {
    Tokenizer::from_bytes(&std::fs::read(folder().join("tokenizer.json")).unwrap(), "tokenizer.json").unwrap()
}

#[test]
fn the_goldens_belong_to_the_shipped_weights() {
    let weights = std::fs::read(folder().join("model.safetensors")).unwrap();
    assert_eq!(sha256(&weights), goldens().about.model_sha256, "run `make -C tools/demo_model goldens`");
}

#[test]
fn questions_render_and_tokenize_to_the_goldens_prompts() {
    let questions = questions();
    assert!(questions.len() >= 300, "{} questions", questions.len());
    let tokenizer = tokenizer();
    let questions: BTreeMap<&str, &Question> = questions.iter().map(|q| (q.id.as_str(), q)).collect();
    for answer in &goldens().answers {
        let messages: Vec<Message> = questions[answer.id.as_str()]
            .messages
            .iter()
            .map(|m| Message::new(&m.role, &m.content))
            .collect();
        let template = gemma_template();
        let text = template.render(&template.arrange(&messages), true).unwrap();
        assert_eq!(tokenizer.encode(&text, false).unwrap(), answer.prompt, "{}: {text:?}", answer.id);
        assert_eq!(tokenizer.decode(&answer.answer, true), answer.text, "{}", answer.id);
    }
}

#[test]
fn logits_match_pytorch_at_every_length() {
    let file = Goldens::open(&data("demo"));
    let mut model = model();
    for name in ["short", "medium", "long", "thousand", "four_thousand"] {
        let tokens = file.tokens(&format!("{name}.tokens"));
        let expected = file.view::<f32>(&format!("{name}.logits"));
        let all = all_logits(&mut model, &tokens);
        let difference = max_difference(&all[all.len() - expected.len()..], &expected);
        println!("{name}: {} tokens, max |difference| {difference:.2e}", tokens.len());
        assert!(difference <= BOUND, "{name}: {difference}");
    }
}

/// Each id of every golden answer has the engine's highest logit after the ids before it, so greedy decoding yields
/// that answer. If the two best ids of PyTorch differ by less than the tolerance, either may be chosen.
#[test]
fn the_engine_answers_as_pytorch_does() {
    let mut model = model();
    let vocab = model.config().vocab_size;
    let (mut ids, mut close) = (0, 0);
    // Another test decodes one question of each category.
    for golden in selected().step_by(if wants_all("UNICORN_TEST_DEMO") { 1 } else { 2 }) {
        let tokens: Vec<u32> = golden.prompt.iter().chain(&golden.answer).copied().collect();
        let all = all_logits(&mut model, &tokens);
        for (i, &id) in golden.answer.iter().enumerate() {
            let logits = &all[(golden.prompt.len() + i - 1) * vocab..][..vocab];
            let best = (0..vocab).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
            ids += 1;
            if best != id as usize {
                let gap = logits[best] - logits[id as usize];
                assert!(
                    gap <= 2.0 * BOUND && golden.margin <= 2.0 * BOUND,
                    "{}: token {i} of {:?} is {best} by {gap}",
                    golden.id,
                    golden.text
                );
                close += 1;
            }
        }
    }
    println!("{ids} ids equal, {close} of them within the noise");
    assert!(ids > 500 && close * 100 <= ids, "{close} of {ids} within the noise");
}

/// The scheduler answers one question of each category. Sampled ids stay on the device for the next step.
#[test]
fn decoding_reproduces_the_answers() {
    let mut model = model();
    let mut seen = Vec::new();
    for golden in selected().filter(|a| a.margin > 2.0 * BOUND && a.prompt.len() < 400) {
        if seen.contains(&&golden.category) {
            continue;
        }
        seen.push(&golden.category);
        let ids = greedy(&mut model, &golden.prompt, golden.answer.len(), usize::MAX, &[]);
        assert_eq!(ids, golden.answer, "{}: {:?}", golden.id, golden.text);
    }
    assert!(seen.len() >= 10, "only {seen:?}");
}

/// The model's answers to all of these questions in one batch. Each has at most `more` ids more than the golden answer.
fn answers_in_a_batch(model: &mut ModelRunner, selected: &[&Answer], more: usize) -> Vec<Vec<u32>> {
    let sequence = |(i, golden): (usize, &&Answer)| {
        let most = golden.answer.len() + more;
        let params = SamplingParams { stop_token_ids: STOP.into(), ..SamplingParams::GREEDY };
        plain_sequence(i as u64, golden.prompt.clone(), params, most)
    };
    let limits = model.limits().clone();
    let run = Driver::new(model, limits).run(selected.iter().enumerate().map(sequence).collect());
    (0..selected.len() as u64).map(|i| run.answers[&i].clone()).collect()
}

/// Every fourth of these questions, or all with `UNICORN_TEST_DEMO=all`. Categories follow each other, so a quarter of
/// each remains.
fn in_part<'a>(all: impl Iterator<Item = &'a Answer>) -> Vec<&'a Answer> {
    all.step_by(if wants_all("UNICORN_TEST_DEMO") { 1 } else { 4 }).collect()
}

/// With keys and values in f16 or int8, most answers must equal those of PyTorch in f32. A few may differ.
#[test]
fn the_kv_cache_in_f16_or_int8_keeps_most_answers() {
    let wanted = in_part(goldens().answers.iter().filter(|a| a.quick && a.prompt.len() <= 600));
    for (kv, least) in [(KvDtype::F16, 99), (KvDtype::Int8, 90)] {
        let options = LoadOptions { kv, sequences: 16, max_context: Some(1024), ..LoadOptions::default() };
        let answers = answers_in_a_batch(&mut load(&folder(), &options), &wanted, 0);
        let same = |(ids, a): &(&Vec<u32>, &&Answer)| {
            let text: Vec<u32> = a.answer.iter().copied().filter(|id| !STOP.contains(id)).collect();
            **ids == text
        };
        let equal = answers.iter().zip(&wanted).filter(same).count();
        println!("{kv}: {equal} of {} answers are those of f32", wanted.len());
        assert!(equal * 100 >= least * wanted.len(), "{kv}: {equal} of {}", wanted.len());
    }
}

/// Attention in tiles of f16, which this device emulates. A prompt has the same bits in one step, in several, and token by
/// token, and its logits are near those of attention by lanes.
#[test]
fn attention_in_tiles_keeps_bits_and_is_near_attention_by_lanes() {
    let tile = AttentionTile::emulated([16, 16, 16]).expect("the kernel can use it");
    let mut quick = goldens().answers.iter().filter(|a| a.quick);
    let prompt = &quick.find(|a| (200..300).contains(&a.prompt.len())).expect("a prompt").prompt;
    for kv in [KvDtype::F16, KvDtype::Int8] {
        let model = |attention: AttentionBy, max_batch_tokens: usize| {
            let options = LoadOptions {
                kv,
                attention: Some(attention),
                precision: Precision::Fast,
                max_context: Some(512),
                max_batch_tokens,
                ..LoadOptions::default()
            };
            let model = load(&folder(), &options);
            assert_eq!(model.attention_by(), attention);
            model
        };
        let in_tiles = |max_batch_tokens| model(AttentionBy::Subgroups(tile), max_batch_tokens);
        let mut whole = in_tiles(512);
        whole.self_test().expect("attention in tiles is right");
        let logits = all_logits(&mut whole, prompt);
        for max_batch_tokens in [1, 70] {
            let parts = all_logits(&mut in_tiles(max_batch_tokens), prompt);
            let differ = logits.iter().zip(&parts).filter(|(one, other)| one.to_bits() != other.to_bits());
            assert_eq!(differ.count(), 0, "{kv}, steps of {max_batch_tokens} tokens");
        }
        let by_lanes = all_logits(&mut model(AttentionBy::Lanes, 512), prompt);
        let (kl, _) = reference::divergence(&by_lanes, &logits, whole.config().vocab_size);
        println!("{kv}: mean KL divergence of attention in tiles {kl:.1e} nats");
        assert!(kl < 1e-5, "{kv}: {kl}");
    }
}

/// Judges the golden answers by the rules of the questions. Another test shows that the engine gives these answers.
#[test]
fn enough_golden_answers_are_right_in_every_category() {
    let answers: BTreeMap<&str, &Answer> = goldens().answers.iter().map(|a| (a.id.as_str(), a)).collect();
    let mut categories: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for question in &questions() {
        let answer =
            answers.get(question.id.as_str()).unwrap_or_else(|| panic!("no golden of {}", question.id));
        // An answer that did not end with a stop token counts as wrong.
        let stopped = answer.answer.last().is_some_and(|id| STOP.contains(id));
        let right = stopped && question.accept.accepts(&answer.text);
        assert_eq!(right, answer.accepted, "{}: {:?}", answer.id, answer.text);
        let entry = categories.entry(&answer.category).or_default();
        entry.0 += usize::from(right);
        entry.1 += 1;
    }
    for (category, (right, all)) in &categories {
        println!("{category}: {right} of {all}");
    }
    for (category, (right, all)) in categories {
        // The recall questions go beyond the sliding window, so they depend on the paged KV cache.
        let percent = if category == "recall" { 95 } else { 90 };
        assert!(all >= 20, "{category}: only {all} questions");
        assert!(right * 100 >= percent * all, "{category}: {right} of {all}, wanted {percent} %");
    }
}

/// Quantizes to int4. Most answers must stay right, and the search for scales must reduce the KL divergence.
#[test]
fn int4_keeps_most_answers_right_and_the_search_reduces_the_kl_divergence() {
    let folder_of = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer();
    // The evaluation text is questions and answers of every category, as the model was trained on.
    let text_file = folder_of.path().join("text.txt");
    let mut text = String::new();
    for golden in in_part(goldens().answers.iter().filter(|a| a.quick && a.prompt.len() < 200)) {
        text += &tokenizer.decode(&[&golden.prompt[1..], &golden.answer].concat(), false);
    }
    std::fs::write(&text_file, &text).unwrap();
    let quantize = |name: &str, rounding: &str| {
        let destination = folder_of.path().join(name);
        let source = folder();
        let [source, to, text] = [&source, &destination, &text_file].map(|p| p.to_str().unwrap());
        let options = ["--scheme", "int4-g32", "--rounding", rounding, "--eval", text];
        let args = [&["quantize", source, to, "--allow-software-vulkan"], &options[..]].concat();
        let (code, report, error) = output(unicorn_on_software(&args));
        assert_eq!(code, 0, "{error}");
        println!("{rounding}: {report}");
        let (_, kl) = report.split_once("mean KL divergence ").unwrap();
        (destination, kl.split(' ').next().unwrap().parse::<f64>().unwrap())
    };
    let (_, nearest) = quantize("nearest", "nearest");
    let (found, searched) = quantize("found", "search");
    assert!(searched < nearest, "mean KL {searched} with the search, {nearest} without");

    // All questions run in one batch, which takes less time and changes no answer.
    let selected = in_part(selected());
    let longest = selected.iter().map(|golden| golden.prompt.len() + golden.answer.len() + 16).max();
    let rules: BTreeMap<String, Rule> = questions().into_iter().map(|q| (q.id, q.accept)).collect();
    let right_in = |precision: Precision| {
        let options =
            LoadOptions { sequences: 16, max_context: longest, precision, ..LoadOptions::default() };
        let answers = answers_in_a_batch(&mut load(&found, &options), &selected, 16);
        let is_right = |(ids, golden): &(&Vec<u32>, &&Answer)| {
            let stopped = ids.len() < golden.answer.len() + 16;
            stopped && rules[&golden.id].accepts(&tokenizer.decode(ids, true))
        };
        answers.iter().zip(&selected).filter(is_right).count()
    };
    let [after, in_int8] = [Precision::F32, Precision::Fast].map(right_in);
    let (before, all) = (selected.iter().filter(|golden| golden.accepted).count(), selected.len());
    println!(
        "{after} of {all} right in int4-g32, {in_int8} with activations in int8, {before} in bf16; \
         mean KL {searched} nats, {nearest} rounded to nearest"
    );
    assert!(in_int8 * 100 >= after * 99, "{in_int8} of {all} right with activations in int8, {after} in f32");
    assert!(after * 100 >= before * 95, "{after} of {all} right in int4-g32, {before} in bf16");
}
