//! A trained model, SmolLM2-135M-Instruct, made by other people's tools: GGUF Q4_1 of the architecture Llama.
//!
//! `tests/data/smollm2` has what transformers computes in float32 with the dequantized weights: for each prompt, the 20
//! largest logits and the sum of exponents at every position, greedy tokens, and the negative log likelihood (NLL) of each
//! token of a text. Without `UNICORN_TEST_REAL`, only short inputs run. With `UNICORN_TEST_REAL=all`, which `make test-real`
//! sets, all of them.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use unicorn::kernels::{AttentionBy, AttentionTile};
use unicorn::model::arch::open_files;
use unicorn::model::load::LoadOptions;
use unicorn::model::model_runner::ModelRunner;
use unicorn::model::{Runner, SamplingParams};
use unicorn::tensor::{KvDtype, Precision};
use unicorn::text::{
    ChatFiles, ChatTemplate, Message, PromptEnding, TemplateInput, TemplateKwargs, Tokenizer,
};

use crate::support::driver::{Driver, greedy, plain_sequence};
use crate::support::goldens::{Goldens, all_logits, load, load_on};
use crate::support::kernel_bench::device_with;
use crate::support::program::{printed, unicorn};
use crate::support::tokenizers::{ByteLevelCase, DecodeCase, cases, smollm2};
use crate::support::{data, device, reference, skip, wants_all};

/// Logits reach 42. The weakest mistake, an epsilon of 1e-6, moves a logit by 0.03.
const BOUND: f32 = 2e-3;

/// Whether everything runs.
fn all() -> bool {
    wants_all("UNICORN_TEST_REAL")
}

fn goldens() -> Goldens {
    Goldens::open(&data("smollm2"))
}

fn fast(kv: KvDtype) -> LoadOptions {
    LoadOptions { precision: Precision::Fast, kv, max_context: Some(2048), ..LoadOptions::default() }
}

/// The model with the context of the tests.
fn model(path: &Path, options: &LoadOptions) -> ModelRunner {
    load(path, &LoadOptions { max_context: options.max_context.or(Some(2048)), ..*options })
}

fn log_sum_exp(row: &[f32]) -> f64 {
    let most = row.iter().copied().fold(f32::MIN, f32::max);
    f64::from(most) + row.iter().map(|x| f64::from(x - most).exp()).sum::<f64>().ln()
}

/// The mean NLL of `tokens` but the first, in nats.
fn mean_nll(model: &mut ModelRunner, tokens: &[u32]) -> f64 {
    let vocab = model.config().vocab_size;
    let logits = all_logits(model, tokens);
    let rows = logits.chunks_exact(vocab).zip(&tokens[1..]);
    let nll = rows.map(|(row, target)| log_sum_exp(row) - f64::from(row[*target as usize]));
    nll.sum::<f64>() / (tokens.len() - 1) as f64
}

#[test]
fn logits_and_greedy_answers_match_the_oracle() {
    let Some(path) = smollm2() else { return skip("smollm2") };
    let goldens = goldens();
    let mut model = model(&path, &LoadOptions::default());
    let vocab = model.config().vocab_size;
    let (prompts, steps) = match all() {
        true => (
            &["capital", "story", "code", "mixed", "chat_capital", "chat_system", "chat_turns", "long"][..],
            48,
        ),
        false => (&["capital", "chat_capital"][..], 12),
    };
    for prompt in prompts {
        let tokens = goldens.tokens(&format!("tokens.{prompt}"));
        let logits = all_logits(&mut model, &tokens);
        let ids = goldens.tokens(&format!("top20.{prompt}.ids"));
        let expected = goldens.view::<f32>(&format!("top20.{prompt}.logits"));
        let sums = goldens.view::<f32>(&format!("logsumexp.{prompt}"));
        let mut most = 0f32;
        for (position, row) in logits.chunks_exact(vocab).enumerate() {
            for top in position * 20..(position + 1) * 20 {
                most = most.max((row[ids[top] as usize] - expected[top]).abs());
            }
            let off = (log_sum_exp(row) - f64::from(sums[position])).abs();
            assert!(off <= f64::from(BOUND), "{prompt} {position}: the sum of exponents is off by {off}");
        }
        println!("{prompt}: {} positions, max |difference| {most:.2e}", tokens.len());
        assert!(most <= BOUND, "{prompt}: {most}");
        let expected = goldens.tokens(&format!("greedy.{prompt}.tokens"));
        assert_eq!(greedy(&mut model, &tokens, steps, 256, &[]), expected[..steps], "{prompt}");
    }
}

#[test]
fn the_likelihood_of_a_text_is_that_of_the_oracle_in_both_precisions() {
    let Some(path) = smollm2() else { return skip("smollm2") };
    let goldens = goldens();
    let count = if all() { usize::MAX } else { 257 };
    let tokens = goldens.tokens("tokens.nll");
    let tokens = &tokens[..count.min(tokens.len())];
    let values = goldens.view::<f32>("nll.values");
    let values = &values[..tokens.len() - 1];
    let expected = values.iter().map(|v| f64::from(*v)).sum::<f64>() / values.len() as f64;
    let runs = [
        ("f32", LoadOptions::default(), 1e-4),
        ("fast, int8", fast(KvDtype::Int8), 0.01),
        // The same with less rounding.
        ("fast", fast(KvDtype::F16), 0.01),
    ];
    for (name, options, bound) in runs.into_iter().take(if all() { 3 } else { 2 }) {
        let nll = mean_nll(&mut model(&path, &options), tokens);
        println!("{name}: mean NLL of {} tokens {nll:.6}, {expected:.6} expected", tokens.len());
        assert!((nll - expected).abs() <= bound, "{name}: {nll}, {expected} expected");
    }
}

/// Sixteen prompts at the same time, each also alone; and one of them in chunks and with guesses.
#[test]
fn sixteen_streams_get_the_bits_of_each_alone() {
    let Some(path) = smollm2() else { return skip("smollm2") };
    let text = goldens().tokens("tokens.nll");
    let mut model = model(&path, &fast(KvDtype::Int8));
    let limits = model.limits().clone();
    let steps = if all() { 32 } else { 4 };
    let sequences = || {
        let prompt = |id: usize| text[id * 37..][..6 + id].to_vec();
        (0..16).map(move |id| plain_sequence(id, prompt(id as usize), SamplingParams::GREEDY, steps))
    };
    let together = Driver::new(&mut model, limits.clone()).run(sequences().collect()).answers;
    for sequence in sequences() {
        let id = sequence.id;
        let alone = Driver::new(&mut model, limits.clone()).run(vec![sequence]).answers;
        assert_eq!(alone[&id], together[&id], "stream {id}");
    }
    let prompt = &text[37 * 15..][..21];
    assert_eq!(greedy(&mut model, prompt, steps, 5, &[]), together[&15], "in chunks of five tokens");
}

#[derive(Deserialize)]
struct ChatCase {
    note: String,
    messages: Vec<Message>,
    add_generation_prompt: bool,
    rendered: String,
}

#[test]
fn the_files_tokenizer_and_template_match_the_goldens() {
    let Some(path) = smollm2() else { return skip("smollm2") };
    let files = open_files(&path).unwrap();
    let json = files.read("tokenizer.json").unwrap().unwrap();
    let tokenizer = Tokenizer::from_bytes(&json, "tokenizer.json").unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.end_of_turn()), (None, Some(2)));
    for case in cases::<ByteLevelCase>("smollm2/encode_cases.json", 12) {
        let text = &case.text;
        assert_eq!(tokenizer.encode(text, true).unwrap(), case.ids, "{text:?}");
        assert_eq!(Some(tokenizer.encode_text(text, true).unwrap()), case.ids_no_special, "{text:?} as text");
        assert_eq!(tokenizer.decode(&case.ids, false), case.decoded, "{text:?}");
        assert_eq!(tokenizer.decode(&case.ids, true), case.decoded_skip_special, "{text:?}");
    }
    for case in cases::<DecodeCase>("smollm2/decode_cases.json", 12) {
        assert_eq!(tokenizer.decode(&case.ids, false), case.decoded, "{:?}", case.ids);
        assert_eq!(tokenizer.decode(&case.ids, true), case.decoded_skip_special, "{:?}", case.ids);
    }
    let config = files.read("tokenizer_config.json").unwrap();
    let chat_files = ChatFiles { tokenizer_config: config.as_deref(), chat_template_jinja: None };
    let template = ChatTemplate::from_checkpoint(chat_files, &tokenizer).unwrap();
    for case in cases::<ChatCase>("smollm2/chat_cases.json", 12) {
        let ending = match case.add_generation_prompt {
            true => PromptEnding::Answer,
            false => PromptEnding::Closed,
        };
        if case.messages.is_empty() {
            continue;
        }
        let known = |message: &Message| ["system", "user", "assistant"].contains(&message.role.as_str());
        if case.messages.iter().all(known) {
            assert_eq!(template.arrange(&case.messages), case.messages, "{}", case.note);
        }
        let text =
            template.text(&TemplateInput::new(&case.messages, ending, &TemplateKwargs::default())).unwrap();
        assert_eq!(text, case.rendered, "{}", case.note);
    }
}

/// Matrix units and int8 keys and values against lanes and f16, deep in a context; and `unicorn quantize`. The figures are
/// in `docs/measurements.md`.
#[test]
fn approximations_stay_near_the_model_deep_in_a_context() {
    let Some(path) = smollm2() else { return skip("smollm2") };
    if !all() {
        return;
    }
    let text = goldens().tokens("tokens.nll");
    // Without cooperative matrices, tiles are emulated, which would take hours for more than 512 tokens.
    let (device, tile) = device_with(AttentionTile::of)
        .unwrap_or_else(|| (device(), AttentionTile::emulated([16, 16, 16]).expect("the kernel can use it")));
    let deepest_in_tiles = if device.info().caps.cooperative_matrices.is_empty() { 512 } else { 7000 };
    for depth in [512, 2048, 7000] {
        let tokens: Vec<u32> = text.iter().copied().cycle().take(depth).collect();
        let logits = |kv: KvDtype, attention: AttentionBy| {
            let options = LoadOptions { max_context: Some(8192), attention: Some(attention), ..fast(kv) };
            let mut model = load_on(&device, &path, &options);
            let vocab = model.config().vocab_size;
            let mut last = Vec::new();
            model
                .logits(&tokens, &mut |first, rows| {
                    // The rows of the last 64 positions: all of them would take 1.4 GB.
                    let skipped = (depth - 64).saturating_sub(first).min(rows.len() / vocab);
                    last.extend_from_slice(&rows[skipped * vocab..]);
                })
                .unwrap();
            assert_eq!(last.len(), 64 * vocab);
            last
        };
        let exact = logits(KvDtype::F16, AttentionBy::Lanes);
        for (name, kv, attention, bound) in [
            ("attention in tiles", KvDtype::F16, AttentionBy::Subgroups(tile), 1e-3),
            ("int8 keys and values", KvDtype::Int8, AttentionBy::Lanes, 0.02),
        ] {
            if attention != AttentionBy::Lanes && depth > deepest_in_tiles {
                continue;
            }
            let (kl, _) = reference::divergence(&exact, &logits(kv, attention), 49_152);
            println!("{attention}, {name} after {depth} tokens: mean KL divergence {kl:.2e} nats");
            assert!(kl < bound, "{name} after {depth} tokens: {kl}");
        }
    }
    let to = tempfile::tempdir().unwrap();
    let native: PathBuf = to.path().join("native");
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    printed(unicorn(&["quantize", &text(&path), &text(&native), "--scheme", "int4-g32"]));
    let tokens = goldens().tokens("tokens.nll");
    let [before, after] =
        [&path, &native].map(|path| mean_nll(&mut model(path, &LoadOptions::default()), &tokens));
    println!("int4-g32: mean NLL {before:.4} -> {after:.4}");
    assert!(after - before < 0.35, "{before} -> {after}");
}
