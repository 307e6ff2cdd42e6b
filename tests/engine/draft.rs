//! A model and its draft model on the device. Every answer equals the model's answer without the draft, whatever the
//! draft tokens are, and takes fewer passes where draft tokens are accepted. Models that do not fit together are
//! refused with the numbers.

use std::path::Path;

use serde_json::{Value, json};
use unicorn::engine::DraftTotals;
use unicorn::gpu::placement::{Class, Limits as MemoryLimits, Machine, MemoryKind};
use unicorn::kernels::Heads;
use unicorn::model::arch::{self, open_files};
use unicorn::model::draft::{self, Draft, Drafted};
use unicorn::model::load::check_draft;
use unicorn::model::load::{LoadError, LoadOptions, Source};
use unicorn::model::memory::{DraftMemoryRequest, MemoryRequest, Schemes};
use unicorn::model::model_runner::ModelRunner;
use unicorn::model::{Limits, Runner, SamplingParams, self_test};
use unicorn::tensor::{KvDtype, QuantizeMode, Scheme};

use crate::support::checkpoints::tiny_model;
use crate::support::driver::{Driver, plain_sequence};
use crate::support::program::{assert_error, output, unicorn, unicorn_on_software};
use crate::support::texts::{Texts, penalties};
use crate::support::{data, demo, device, goldens, in_turn};

const SEED: u64 = 4711;

fn sampled() -> SamplingParams {
    SamplingParams { temperature: 0.8, ..SamplingParams::GREEDY }
}

fn load(model: &Path, draft: &Path, options: &LoadOptions) -> Result<Drafted, LoadError> {
    let (model, draft) = load_both(model, draft, options)?;
    Ok(Drafted::new(model, draft))
}

fn load_both(model: &Path, draft: &Path, options: &LoadOptions) -> Result<(ModelRunner, Draft), LoadError> {
    let [files, draft_files] = [model, draft].map(|folder| open_files(folder).unwrap());
    draft::load(
        &device(),
        &Source::open(&files).unwrap(),
        &Source::open(&draft_files).unwrap(),
        options,
        &mut |_| {},
    )
}

/// Prompts of questions. Three of them are some blocks long.
fn prompts(n: usize) -> Vec<Vec<u32>> {
    let long = demo::quick_prompts(70).filter(|prompt| prompt.len() > 40).take(3);
    long.chain(demo::quick_prompts(40).step_by(7)).map(<[u32]>::to_vec).take(n).collect()
}

/// Runs the prompts one after the other, up to a stop id. Returns the answers, the number of passes without the
/// prompts' own, and the counts of draft tokens.
fn one_by_one(
    model: &mut dyn Runner,
    (params, seed): (&SamplingParams, u64),
    prompts: &[Vec<u32>],
) -> (Vec<Vec<u32>>, usize, DraftTotals) {
    let limits = model.limits().clone();
    let (mut answers, mut passes) = (Vec::new(), 0);
    let mut driver = Driver::new(model, limits.clone());
    for (i, prompt) in prompts.iter().enumerate() {
        let params = SamplingParams {
            stop_token_ids: demo::STOP.into(),
            // With penalties there are also biases, to check that the draft model applies both.
            logit_bias: if params.penalizes() { vec![(300, 2.0)] } else { vec![] },
            ..params.clone()
        };
        let mut sequence = plain_sequence(i as u64, prompt.clone(), params, 40);
        sequence.request.seed = seed;
        let mut run = driver.run(vec![sequence]);
        passes += run.steps + 1 - (prompt.len() - run.cached[&(i as u64)]).div_ceil(limits.max_batch_tokens);
        answers.push(run.answers.remove(&(i as u64)).unwrap());
    }
    (answers, passes, driver.drafts())
}

/// The model accepts all of its own draft tokens: greedy or sampled, with penalties and biases or without.
#[test]
fn a_model_that_is_its_own_draft_takes_less_than_half_the_passes() {
    let options = LoadOptions { max_context: Some(512), ..LoadOptions::default() };
    let mut plain = goldens::load(&demo::folder(), &options);
    let mut drafted = load(&demo::folder(), &demo::folder(), &options).unwrap();
    let prompts = prompts(12);
    assert_eq!(prompts.len(), 12);
    for (params, seed) in
        [(SamplingParams::GREEDY, 0), (SamplingParams { temperature: 0.8, ..penalties() }, 5)]
    {
        let (expected, ..) = one_by_one(&mut plain, (&params, seed), &prompts);
        let (answers, passes, drafts) = one_by_one(&mut drafted, (&params, seed), &prompts);
        assert_eq!(answers, expected);
        let tokens: usize = answers.iter().map(|answer| answer.len() + 1).sum();
        println!("{tokens} tokens in {passes} passes, {drafts:?}");
        assert!(tokens > 2 * passes, "{tokens} tokens in {passes} passes");
        assert!(drafts.model.accepted > 100, "{drafts:?}");
        assert_eq!(drafts.model.accepted, drafts.model.proposed, "all draft tokens must be accepted");
    }
}

/// Answers alone, in batches, from the prefix cache, in chunks, preempted and forked, with a draft model of the same
/// weights, which are not quantized. Greedy and random draws take turns in `make test`.
#[test]
fn answers_with_and_without_a_draft_are_equal() {
    let options = LoadOptions {
        quantize: QuantizeMode::Int4G32,
        kv: KvDtype::F16,
        sequences: 16,
        max_context: Some(512),
        ..LoadOptions::default()
    };
    let mut plain = goldens::load(&demo::folder(), &options);
    let mut drafted = load(&demo::folder(), &demo::folder(), &options).unwrap();
    for (params, seed) in in_turn(&[(SamplingParams::GREEDY, 0), (sampled(), SEED)], 0) {
        let texts = Texts::new(&mut plain, (params.clone(), *seed), prompts(5), 24);
        texts.check_all(&mut drafted);
        let (_, passes, drafts) = one_by_one(&mut drafted, (params, *seed), &texts.prompts);
        println!("temperature {}: {passes} passes, {drafts:?}", params.temperature);
        assert!(drafts.model.accepted > 10, "{drafts:?}");
    }
    // At this temperature the two models often differ.
    let hot = (&SamplingParams { temperature: 2.0, ..SamplingParams::GREEDY }, 12);
    let (expected, ..) = one_by_one(&mut plain, hot, &prompts(12));
    let (answers, passes, drafts) = one_by_one(&mut drafted, hot, &prompts(12));
    println!("temperature 2: {passes} passes, {drafts:?}");
    assert_eq!(answers, expected);
    let (proposed, accepted) = (drafts.model.proposed, drafts.model.accepted);
    assert!(accepted > 10 && accepted + 10 < proposed, "{drafts:?}");
}

/// The draft model has another shape, a sliding window of 8 instead of 16, and no embedding for a third of the model's
/// ids.
#[test]
fn a_draft_with_fewer_ids_and_a_smaller_window_changes_no_answer() {
    let folder = data("gemma3/tiny-a");
    let goldens = goldens::Goldens::open(&folder);
    let options = LoadOptions { sequences: 16, max_context: Some(512), ..LoadOptions::default() };
    let mut plain = goldens::load(&folder, &options);
    let mut drafted = load(&folder, &data("gemma3/tiny-b"), &options).unwrap();
    // A block has the keys and values of both models.
    let of_block = |limits: &Limits| limits.block_bytes.clone();
    assert!(of_block(drafted.limits()).iter().zip(of_block(plain.limits())).all(|(both, one)| *both > one));
    let same_blocks = Limits { block_bytes: of_block(plain.limits()), ..drafted.limits().clone() };
    assert_eq!((&same_blocks, drafted.has_draft()), (plain.limits(), true));
    let [short, mid, long] = ["short", "mid", "long"].map(|p| goldens.tokens(&format!("tokens.{p}")));
    let long = long[..long.len().min(150)].to_vec();
    let prompts = vec![mid.clone(), short, long.clone(), long[11..].to_vec(), mid[..9].to_vec()];
    let ways = [(SamplingParams::GREEDY, 0), (SamplingParams { temperature: 1.5, ..sampled() }, SEED)];
    for params in in_turn(&ways, 1) {
        let texts = Texts::new(&mut plain, params.clone(), prompts.clone(), 40);
        texts.check_all(&mut drafted);
    }
    let (answers, _, drafts) = one_by_one(&mut drafted, (&sampled(), SEED), &prompts);
    let foreign = answers.iter().flatten().filter(|id| **id >= 320).count();
    assert!(foreign > 10 && drafts.model.proposed > 10, "{foreign} ids beyond 320, {drafts:?}");
}

#[test]
fn a_draft_that_does_not_fit_its_model_is_refused_with_the_numbers() {
    let config = |name| arch::shape(name).unwrap().spec();
    for (model, draft) in [("gemma-3-27b", "gemma-3-1b"), ("gemma-3-1b", "gemma-3-270m")] {
        assert_eq!(check_draft(&config(model), &config(draft)), Ok(()));
    }
    let problem = check_draft(&config("gemma-3-1b"), &config("gemma-3-4b")).unwrap_err();
    assert!(problem.contains("1024") && problem.contains("512"), "{problem}");

    // A draft model may be without a sliding window. A model without a window has no such blocks for a draft model with
    // one.
    let mut full: Value = serde_json::from_str(&arch::shape("gemma-3-1b").unwrap().config_json()).unwrap();
    full["layer_types"] = json!(vec!["full_attention"; 26]);
    let full = arch::read(&full, "full").unwrap();
    assert_eq!(check_draft(&config("gemma-3-4b"), &full), Ok(()));
    let problem = check_draft(&full, &config("gemma-3-270m")).unwrap_err();
    assert!(problem.contains("512"), "{problem}");

    let Err(LoadError::Option(message)) =
        load(&data("gemma3/tiny-b"), &data("gemma3/tiny-a"), &LoadOptions::default())
    else {
        panic!("a draft model with a larger window must be refused")
    };
    for part in ["tiny-a", "config.json", "sliding_window is 16", "8"] {
        assert!(message.contains(part), "{part:?} is not in {message}");
    }
}

/// Gemma 3 27B with the 1B as draft model, computed from the sizes of each alone, without a device.
#[test]
fn a_model_and_its_draft_are_planned_together() {
    let [model, small] = ["gemma-3-27b", "gemma-3-1b"].map(|name| arch::shape(name).unwrap().spec());
    let schemes = |c| Schemes::uniform(c, Scheme::int4(128), Scheme::int4(128), Scheme::Int8Row);
    let alone = |config| MemoryRequest {
        config,
        schemes: schemes(config),
        kv: KvDtype::F16,
        block_size: 16,
        max_batch_tokens: 128,
        max_shard_bytes: 0xffff_fffc / 2,
        moments: false,
        offload: None,
        draft: None,
        vision: None,
    };
    let draft = DraftMemoryRequest { config: &small, schemes: schemes(&small) };
    let both = MemoryRequest { draft: Some(draft), ..alone(&model) };
    assert_eq!((both.longest_context(), both.batch_tokens()), (32_768, 128));
    let pools = both.pools(4096, 2);
    assert_eq!(pools, alone(&model).pools(4096, 2), "the number of blocks must not change");
    let sum = |request: &MemoryRequest<'_>, class| -> u64 {
        let requests = request.requests(4096, pools.clone()).into_iter();
        requests.filter(|request| request.class == class).map(|request| request.bytes).sum()
    };
    for class in [Class::Attention, Class::Ffn, Class::Embedding, Class::Norms, Class::KvCache] {
        let each = sum(&alone(&model), class) + sum(&alone(&small), class);
        assert_eq!(sum(&both, class), each, "{}", class.name());
    }
    // The draft model adds its two RoPE tables, which have 128 pairs for each position, and its buffers of the
    // self-test. The two models use all other activations in turn.
    let tables = 2 * 4096 * 256 * 4;
    let heads = Heads { group: 4, head_dim: 256, kv: KvDtype::F16 };
    let own = tables + self_test::buffer_bytes(&[heads], &[Scheme::Int8Row, Scheme::int4(128)], None);
    assert_eq!(sum(&both, Class::Activations), sum(&alone(&model), Class::Activations) + own);
    let [of_both, of_model, of_draft] = [&both, &alone(&model), &alone(&small)]
        .map(|request| (request.weight_bytes(), request.kv_bytes_per_token()));
    assert_eq!(of_both, (of_model.0 + of_draft.0, of_model.1 + of_draft.1));
    let staged =
        both.requests(4096, pools.clone()).into_iter().filter(|r| r.kind == MemoryKind::Readback).count();
    assert_eq!(
        staged,
        1 + 2 * 3,
        "one for logits, and for each model two for sampled ids and one for the self-test"
    );

    // The error names the context that fits without the draft model.
    let machine = Machine::on_paper(14 << 30, 1 << 29);
    let all = MemoryLimits { reserve: Some(0), ..MemoryLimits::default() };
    let fits = alone(&model).largest_context(&machine, &all, 1);
    assert!(fits > 0, "{fits}");
    let error = both.fit(&machine, &all, Some(4096), 1, &[]).unwrap_err().to_string();
    let says = format!("without --draft, a context of {fits} tokens would");
    assert!(error.contains("the model and its draft model do not fit") && error.contains(&says), "{error}");
}

#[test]
fn a_load_with_a_draft_takes_the_planned_memory() {
    let folders = [data("gemma3/tiny-a"), data("gemma3/tiny-b")];
    let options = LoadOptions { max_context: Some(100), ..LoadOptions::default() };
    let configs = folders.each_ref().map(|f| arch::load(&open_files(f).unwrap()).unwrap().0);
    let bf16 = |c| Schemes::uniform(c, Scheme::Bf16, Scheme::Bf16, Scheme::Bf16);
    let request = MemoryRequest {
        config: &configs[0],
        schemes: bf16(&configs[0]),
        kv: options.kv,
        block_size: options.block_size,
        max_batch_tokens: options.max_batch_tokens,
        max_shard_bytes: device().info().max_allocation_bytes / 2,
        moments: false,
        offload: None,
        draft: Some(DraftMemoryRequest { config: &configs[1], schemes: bf16(&configs[1]) }),
        vision: None,
    };
    let plan = request.place(&device().machine(), &options.memory, 100, request.pools(100, 1)).unwrap();
    let (model, _draft) = load_both(&folders[0], &folders[1], &options).unwrap();
    assert_eq!(model.placements(), plan.placements());
    assert_eq!(model.weight_bytes(), goldens::load(&folders[0], &options).weight_bytes());
}

#[test]
fn generate_plan_and_bench_accept_a_draft() {
    let demo = demo::folder();
    let demo = demo.to_str().unwrap();
    let ask = [
        "generate",
        "--prompt",
        "What is the capital of France?",
        "--allow-software-vulkan",
        "--context",
        "512",
    ];
    let answer = |args: &[&str]| {
        let (code, stdout, stderr) = output(unicorn_on_software(&[&ask, args].concat()));
        assert_eq!(code, 0, "{stderr}");
        (stdout, stderr)
    };
    let (alone, _) = answer(&[]);
    let (drafted, log) = answer(&["--draft", demo, "-v"]);
    assert_eq!(drafted, alone);
    assert!(log.contains(&format!("draft    {demo}: 6 layers")), "{log}");

    // These models cannot be draft models, which is found before a device is opened.
    let tiny = tiny_model();
    let tiny = tiny.path().to_str().unwrap();
    let generate = |args: &[&str]| unicorn(&[&["generate", "--prompt", "x"], args].concat());
    assert_error(generate(&["--draft", "/proc/nonexistent"]), 1, &["/proc/nonexistent"]);
    let parts = [tiny, "tokenizer.json: id", "a draft model must have the model's tokenizer"];
    assert_error(generate(&["--draft", tiny]), 1, &parts);
    let mut environment = generate(&[]);
    environment.env("UNICORN_MODEL_DRAFT", tiny);
    assert_error(environment, 1, &parts);

    let plan = |args: &[&str]| -> Value {
        let (code, stdout, stderr) =
            output(unicorn(&[&["plan", demo, "--vram", "1GiB", "--json"], args].concat()));
        assert_eq!(code, 0, "{stderr}");
        serde_json::from_str(&stdout).unwrap()
    };
    let (one, two) = (plan(&[]), plan(&["--draft", demo]));
    let weights = |line: &Value| line["weight_bytes"].as_u64().unwrap();
    assert_eq!(weights(&two), 2 * weights(&one));
    assert_eq!((&one["draft"], &two["draft"]["model"]), (&Value::Null, &json!(demo)));

    let bench = ["bench", "engine", "--allow-software-vulkan", "--json", "--context", "256", "--runs", "1"];
    let sizes = ["--prompt-tokens", "20", "--generate-tokens", "20", "--draft", demo];
    let (code, stdout, stderr) = output(unicorn_on_software(&[&bench[..], &sizes].concat()));
    assert_eq!(code, 0, "{stderr}");
    let line: Value = serde_json::from_str(&stdout).unwrap();
    let guesses = &line["guesses"]["draft_model"];
    assert!(guesses["accepted"].as_u64() > Some(0) && guesses["proposed"].as_u64() > Some(0), "{line}");
}

/// Loading a draft model does not change the model's own logits.
#[test]
fn loading_a_draft_does_not_change_the_models_logits() {
    let folder = data("gemma3/tiny-a");
    let tokens = goldens::Goldens::open(&folder).tokens("tokens.mid");
    let files = open_files(&folder).unwrap();
    let options = LoadOptions::default();
    let (mut with_draft, _draft) = draft::load(
        &device(),
        &Source::open(&files).unwrap(),
        &Source::open(&files).unwrap(),
        &options,
        &mut |_| {},
    )
    .unwrap();
    let mut alone =
        ModelRunner::load(&device(), &Source::open(&files).unwrap(), &options, &mut |_| {}).unwrap();
    assert!(goldens::all_logits(&mut with_draft, &tokens) == goldens::all_logits(&mut alone, &tokens));
}
