//! Benchmarks of the host time per token. They need no GPU: a step of the scheduler, the round trip to the device
//! process, blocks of the KV cache, grammar masks, the tokenizer in both directions, and a chunk of a stream.
//!
//! Prompts and answers come from the question set of the demo model. Its vocabulary has 2048 ids, and Gemma-3's has
//! 262,144, so masks take longer with a real model. `cargo bench --bench host NAME` runs the benchmarks whose names
//! contain NAME.

use std::path::Path;
use std::process::Command;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use divan::counter::{BytesCount, ItemsCount};
use divan::{Bencher, black_box};
use serde::Deserialize;
use serde_json::{Value, json};
use unicorn::config::Courtesy;
use unicorn::device::{Channel, Connection, DeviceProcess};
use unicorn::engine::{
    BlockManager, BlockTable, CacheSalt, Pace, Priority, Request, Scheduler, SchedulerConfig, Sequence,
};
use unicorn::model::{Batch, KvLimits, KvPool, Limits, Runner, RunnerError, Sampled, Sampling, Ticket};
use unicorn::text::{
    AnswerReader, CallFormat, CallTokens, CallTool, Constraint, GrammarSource, Grammars, SchemaPart,
    Tokenizer,
};

/// The environment variable that marks the child process of `device_process_step`.
const CHILD: &str = "UNICORN_BENCH_CHILD";

fn main() {
    if std::env::var_os(CHILD).is_none() {
        return divan::main();
    }
    let channel = Channel::from_stdin().expect("the parent's channel");
    unicorn::device::serve(channel, &mut Immediate(limits(2048))).expect("until the parent ends");
}

/// A runner whose steps take no time.
struct Immediate(Limits);

impl Runner for Immediate {
    fn limits(&self) -> &Limits {
        &self.0
    }

    fn submit(&mut self, _: &Batch, sampling: &Sampling) -> Result<Ticket, RunnerError> {
        Ok(Ticket(sampling.draws.len() as u64))
    }

    fn masks(&mut self, _: &Ticket, _: &[Arc<[u32]>]) -> Result<(), RunnerError> {
        Ok(())
    }

    fn set_courtesy(&mut self, _: Courtesy) -> Result<(), RunnerError> {
        Ok(())
    }

    fn wait(&mut self, Ticket(draws): Ticket) -> Result<Sampled, RunnerError> {
        let ids = (0..draws as u32).map(|i| Some(300 + i)).collect();
        Ok(Sampled { ids, logprobs: vec![None; draws as usize], ..Sampled::default() })
    }

    fn probe(&mut self) -> Result<(), RunnerError> {
        Ok(())
    }
}

#[derive(Deserialize)]
struct Example {
    prompt: Vec<u32>,
    answer: Vec<u32>,
    text: String,
}

static EXAMPLES: LazyLock<Vec<Example>> = LazyLock::new(|| {
    #[derive(Deserialize)]
    struct Goldens {
        answers: Vec<Example>,
    }
    let goldens: Goldens = serde_json::from_slice(&read("tests/data/demo/goldens.json")).expect("goldens");
    goldens.answers
});

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    Tokenizer::from_bytes(&read("models/demo/tokenizer.json"), "tokenizer.json").expect("a tokenizer")
});

fn read(path: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The limits of `unicorn serve` with 48 GiB for a 27B: blocks of full layers for 16 conversations of 8192 tokens, and
/// blocks for their windows.
fn limits(vocab_size: usize) -> Limits {
    let pools = vec![KvPool { window: None, blocks: 8192 }, KvPool { window: Some(1024), blocks: 8192 }];
    let kv = KvLimits { block_size: 16, pools };
    Limits {
        max_batch_tokens: 256,
        max_sequences: 64,
        max_draws: 64,
        max_in_flight: 2,
        kv,
        max_context: 8192,
        vocab_size,
        hidden_size: 640,
        step_bytes: Vec::new(),
        block_bytes: Vec::new(),
        images: None,
    }
}

/// Schedules and commits one step. No sampled id ends an answer.
fn step(scheduler: &mut Scheduler, pace: &Pace) -> usize {
    let step = scheduler.schedule(pace).expect("there are sequences");
    let draws = step.sampling.draws.len();
    let ids = (0..draws as u32).map(|i| Some(300 + i)).collect();
    scheduler.commit(&step, &Sampled { ids, logprobs: vec![None; draws], ..Sampled::default() }).len()
}

/// Steps in which each of `sequences` answers gets one token.
#[divan::bench(args = [1, 16, 64])]
fn scheduler_decode_step(bencher: Bencher, sequences: usize) {
    const STEPS: usize = 32;
    let pace = Pace::new();
    bencher
        .counter(ItemsCount::new(STEPS))
        .with_inputs(|| {
            let config =
                SchedulerConfig { speculation_tokens: 0, checks: false, ..SchedulerConfig::default() };
            decoding(sequences, config, &pace)
        })
        .bench_local_refs(|scheduler| {
            for _ in 0..STEPS {
                assert_eq!(step(scheduler, &pace), sequences);
            }
        });
}

/// A scheduler with `sequences` answers, all of them in the decode phase.
fn decoding(sequences: usize, config: SchedulerConfig, pace: &Pace) -> Scheduler {
    let mut scheduler = Scheduler::new(limits(TOKENIZER.vocab_size()), config);
    for (id, example) in (0..sequences as u64).zip(EXAMPLES.iter().cycle()) {
        scheduler.add(Sequence::new(id, Request::new(example.prompt.clone()), 1000));
    }
    for _ in 0..10_000 {
        if scheduler.num_waiting() == 0 && step(&mut scheduler, pace) == sequences {
            return scheduler;
        }
        if scheduler.num_waiting() > 0 {
            step(&mut scheduler, pace);
        }
    }
    panic!("{sequences} prompts are not computed after 10,000 steps");
}

/// The cost of the device process per step: a submit and a wait, with a process whose steps take no time.
#[divan::bench(args = [1, 16, 64])]
fn device_process_step(bencher: Bencher, sequences: usize) {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.env(CHILD, "");
    let child = Connection::spawn(command, "GPU", &Arc::default()).expect("a process");
    let mut runner = DeviceProcess::new(child, Duration::from_secs(60)).expect("it is ready");
    let pace = Pace::new();
    let mut scheduler = decoding(sequences, SchedulerConfig::default(), &pace);
    let step = scheduler.schedule(&pace).expect("there are sequences");
    bencher.bench_local(|| {
        let ticket = step.submit(&mut runner).expect("submitted");
        let sampled = runner.wait(ticket).expect("computed");
        assert_eq!(sampled.ids.len(), sequences);
    });
}

fn blocks() -> BlockManager {
    BlockManager::new(&limits(TOKENIZER.vocab_size()).kv, usize::MAX)
}

/// The `n` longest prompts.
fn long_prompts(n: usize) -> Vec<&'static [u32]> {
    let mut prompts: Vec<&[u32]> = EXAMPLES.iter().map(|example| &example.prompt[..]).collect();
    prompts.sort_by_key(|prompt| std::cmp::Reverse(prompt.len()));
    prompts.truncate(n);
    prompts
}

fn compute(blocks: &mut BlockManager, prompt: &[u32]) -> BlockTable {
    let (mut table, _) = blocks.admit(prompt, &[], Priority::Interactive, &CacheSalt::default());
    blocks.grow(&mut table, prompt.len()).expect("there is room");
    blocks.commit(&mut table, prompt, &[]);
    table
}

/// Allocates blocks for a new prompt, and releases them.
#[divan::bench]
fn block_manager_allocate_and_free(bencher: Bencher) {
    let prompt = long_prompts(1)[0];
    bencher.counter(ItemsCount::new(prompt.len())).with_inputs(blocks).bench_local_refs(|blocks| {
        let table = compute(blocks, black_box(prompt));
        blocks.release(table);
    });
}

/// Admits a prompt of which the prefix cache, with 32 prompts, has all blocks but the last one.
#[divan::bench]
fn block_manager_prefix_match(bencher: Bencher) {
    let mut blocks = blocks();
    let prompts = long_prompts(32);
    for prompt in &prompts {
        let table = compute(&mut blocks, prompt);
        blocks.release(table);
    }
    bencher.counter(ItemsCount::new(prompts[0].len())).bench_local(|| {
        let (table, found) =
            blocks.admit(black_box(prompts[0]), &[], Priority::Interactive, &CacheSalt::default());
        assert!(found + 32 > prompts[0].len(), "{found} of {} tokens found", prompts[0].len());
        blocks.release(table);
    });
}

/// A tool call that matches the schema of [`constraint`].
const CALL: &str =
    "{\"table\": \"the small room\", \"guests\": 12, \"days\": [\"Monday\", \"Friday\"], \"quiet\": true}";

/// The schema of [`CALL`].
fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "table": {"type": "string"},
            "guests": {"type": "integer", "minimum": 1, "maximum": 40},
            "days": {"type": "array", "items": {"type": "string"}, "maxItems": 7},
            "quiet": {"type": "boolean"},
        },
        "required": ["table", "guests", "days", "quiet"],
        "additionalProperties": false,
    })
}

fn constraint() -> Constraint {
    let schema = schema();
    let grammars = Grammars::new(TOKENIZER.clone(), TOKENIZER.vocab_size(), &[1, 6]);
    grammars.compile(&GrammarSource::JsonSchema { schema, strict: true }).expect("a schema").start()
}

/// Computes the masks of an answer with a JSON schema, token by token.
#[divan::bench]
fn grammar_masks_of_an_answer(bencher: Bencher) {
    let ids = TOKENIZER.encode(CALL, false).expect("text");
    bencher.counter(ItemsCount::new(ids.len())).with_inputs(constraint).bench_local_refs(|constraint| {
        for id in &ids {
            black_box(constraint.mask(true)).expect("some token is allowed");
            constraint.push(*id).expect("the answer is valid");
        }
    });
}

/// A tokenizer with the control tokens of calls, the syntax, and a call of `book` in it without its outer tokens.
struct Calling {
    tokenizer: Tokenizer,
    format: CallFormat,
    tokens: CallTokens,
    call: Vec<u32>,
    parameters: Value,
}

impl Calling {
    fn new(syntax: &str) -> Self {
        let folder = if syntax == "gemma4" { "gemma4-tokenizer" } else { "qwen-tokenizer" };
        let json = read(&format!("tests/data/families/{folder}/tokenizer.json"));
        let tokenizer = Tokenizer::from_bytes(&json, "tokenizer.json").expect("a tokenizer");
        let format = CallFormat::named(syntax, &tokenizer).expect("the tokens of the syntax");
        let text = match syntax {
            "hermes" => format!("\n{{\"name\": \"book\", \"arguments\": {CALL}}}\n"),
            "qwen3_coder" => {
                "\n<function=book>\n<parameter=table>\nthe small room\n</parameter>\n<parameter=guests>\n12\n\
                              </parameter>\n<parameter=days>\n[\"Monday\", \"Friday\"]\n</parameter>\n\
                              <parameter=quiet>\ntrue\n</parameter>\n</function>\n"
                    .to_owned()
            }
            _ => "call:book{days:[~Monday~,~Friday~],guests:12,quiet:true,table:~the small room~}".to_owned(),
        };
        // Quotes are control tokens in one of the syntaxes.
        let quote = tokenizer.token_id("<|\"|>");
        let mut call = Vec::new();
        for (i, part) in text.split('~').enumerate() {
            call.extend(quote.filter(|_| i > 0));
            call.extend(tokenizer.encode_text(part, false).expect("text"));
        }
        let tokens = format.tokens.clone().expect("tokens");
        Self { tokenizer, format, tokens, call, parameters: schema() }
    }
}

const SYNTAXES: [&str; 3] = ["hermes", "qwen3_coder", "gemma4"];

/// Reads an answer with a call in a model's own syntax, token by token.
#[divan::bench(args = SYNTAXES)]
fn answer_reader_push(bencher: Bencher, syntax: &str) {
    let Calling { tokenizer, format, tokens, call, parameters } = Calling::new(syntax);
    let answer = [&[tokens.open][..], &call, &[tokens.close.expect("a token")]].concat();
    let reader =
        || AnswerReader::new(tokenizer.detokenizer(true)).with_calls(&format, [("book", &parameters)]);
    bencher.counter(ItemsCount::new(answer.len())).with_inputs(reader).bench_local_refs(|reader| {
        answer.iter().for_each(|id| drop(black_box(reader.push(*id))));
        assert!(reader.called(), "the call is complete");
    });
}

/// Computes the masks of a call in a model's own syntax, token by token.
#[divan::bench(args = SYNTAXES)]
fn grammar_masks_of_a_call(bencher: Bencher, syntax: &str) {
    let Calling { tokenizer, format, call, parameters, .. } = Calling::new(syntax);
    let end = tokenizer.end_of_turn().expect("an end");
    let grammars = Grammars::new(tokenizer.clone(), tokenizer.vocab_size(), &[end]).with_calls(&format);
    let tool = CallTool { name: "book".into(), parameters: SchemaPart { schema: parameters, strict: true } };
    let source = GrammarSource::Call { format, tools: vec![tool], most: 1 };
    let grammar = grammars.compile(&source).expect("a schema");
    bencher.counter(ItemsCount::new(call.len())).with_inputs(|| grammar.start()).bench_local_refs(
        |constraint| {
            for id in &call {
                black_box(constraint.mask(true)).expect("some token is allowed");
                constraint.push(*id).expect("the call is valid");
            }
        },
    );
}

/// Tokenizes the text of the longest prompt.
#[divan::bench]
fn tokenizer_encode(bencher: Bencher) {
    let text = TOKENIZER.decode(long_prompts(1)[0], true);
    bencher
        .counter(BytesCount::of_str(&text))
        .bench_local(|| TOKENIZER.encode(black_box(&text), true).expect("text"));
}

/// Detokenizes all answers of the question set, one token at a time.
#[divan::bench]
fn detokenizer_push(bencher: Bencher) {
    let tokens: usize = EXAMPLES.iter().map(|example| example.answer.len()).sum();
    bencher.counter(ItemsCount::new(tokens)).bench_local(|| {
        for example in EXAMPLES.iter() {
            let mut detokenizer = TOKENIZER.detokenizer(true);
            for id in &example.answer {
                black_box(detokenizer.push(*id));
            }
            black_box(detokenizer.finish());
        }
    });
}

/// Serializes stream chunks with the text of one token each as JSON.
#[divan::bench]
fn stream_chunk_json(bencher: Bencher) {
    let words: Vec<&str> = EXAMPLES.iter().flat_map(|example| example.text.split_inclusive(' ')).collect();
    let chunk = unicorn::api::text_chunks("demo");
    bencher.counter(ItemsCount::new(words.len())).bench_local(|| {
        for word in &words {
            black_box(chunk(black_box(word)));
        }
    });
}
