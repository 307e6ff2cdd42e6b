//! What a step of a Gemma-3 dispatches, with its costs on paper: the twin of what `gemma3.rs` records, for a judge that has
//! a compiler and no GPU. `tests/target.rs` holds the two to each other.

use std::ops::Range;

use crate::kernels::cost::{self, Dispatch, Heads};
use crate::model::config::{Gemma3Config, LayerType};
use crate::model::memory::{DEFAULT_BLOCK_SIZE, Demand, Schemes};
use crate::model::step::filled_up;
use crate::tensor::KvDtype;

/// Dispatches of one kind in a step.
#[derive(Debug, Clone)]
pub struct Work {
    /// e.g. `q_proj`
    pub what: &'static str,
    /// How many there are of it.
    pub times: u64,
    /// How many of them wait for the one before.
    pub barriers: u64,
    pub dispatch: Dispatch,
}

/// A step in which each sequence contributes the tokens at these positions, and `draws` ids are drawn greedily. `most`:
/// tokens that a step has room for.
pub fn step(
    config: &Gemma3Config,
    schemes: &Schemes,
    kv: KvDtype,
    sequences: &[Range<usize>],
    draws: usize,
    most: usize,
) -> Vec<Work> {
    let c = config;
    let known: usize = sequences.iter().map(|positions| positions.len()).sum();
    let n = filled_up(known, most);
    let (hidden, ffn) = (c.hidden_size, c.intermediate_size);
    let (q, kv_width) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
    let heads = Heads {
        num_heads: c.num_attention_heads,
        num_kv_heads: c.num_key_value_heads,
        head_dim: c.head_dim,
        kv,
    };
    // Those that fill up a step are first tokens of nobody.
    let mut positions: Vec<usize> = sequences.iter().flat_map(Clone::clone).collect();
    positions.resize(n, 0);
    let layers = c.num_hidden_layers as u64;
    let mut all = Vec::new();
    let mut add = |what, times, barriers, dispatch| all.push(Work { what, times, barriers, dispatch });

    // Each command buffer begins with a barrier; that of the opening is the first layer's norm's too.
    add("embed", 1, 1, cost::embed(schemes.embedding, hidden, n));
    add("history", 1, 0, cost::history(known));

    add("input norm", layers, layers, cost::rms_norm(n, hidden));
    // Layers of one scheme are one kind.
    let mut kinds: Vec<([_; 7], u64)> = Vec::new();
    for layer in &schemes.layers {
        match kinds.iter_mut().find(|(schemes, _)| schemes == layer) {
            Some((_, times)) => *times += 1,
            None => kinds.push((*layer, 1)),
        }
    }
    // Behind a barrier: q, of the three that run beside each other; o; gate, of two; down.
    let projections = [
        ("q_proj", true, q, hidden),
        ("k_proj", false, kv_width, hidden),
        ("v_proj", false, kv_width, hidden),
        ("o_proj", true, hidden, q),
        ("gate_proj", true, ffn, hidden),
        ("up_proj", false, ffn, hidden),
        ("down_proj", true, hidden, ffn),
    ];
    for (schemes, times) in kinds {
        for ((what, waits, rows, cols), scheme) in projections.into_iter().zip(schemes) {
            let barriers = if waits { times } else { 0 };
            add(what, times, barriers, cost::matmul(scheme, rows, cols, n));
        }
    }
    add("qkv_store", layers, layers, cost::qkv_store(&heads, n));
    for (what, kind, window) in [
        ("attention, sliding", LayerType::SlidingAttention, Some(c.sliding_window)),
        ("attention, full", LayerType::FullAttention, None),
    ] {
        let times = c.layer_types.iter().filter(|each| **each == kind).count() as u64;
        // The tokens of a sequence share what they see of it.
        let read = |positions: &Range<usize>| {
            let seen = |position: usize| window.map_or(0, |window| (position + 1).saturating_sub(window));
            positions.end - seen(positions.start)
        };
        let read = sequences.iter().map(read).sum();
        if times > 0 {
            add(what, times, times, cost::attention(&heads, &positions, window, read));
        }
    }
    add("post-attention norm", layers, layers, cost::rms_norm_add(n, hidden));
    add("pre-feedforward norm", layers, layers, cost::rms_norm(n, hidden));
    add("geglu", layers, layers, cost::geglu(n, ffn));
    add("post-feedforward norm", layers, layers, cost::rms_norm_add(n, hidden));

    if draws > 0 {
        add("final norm", 1, 1, cost::rms_norm_gather(draws, hidden));
        add("lm_head", 1, 1, cost::matmul(schemes.embedding, c.vocab_size, hidden, draws));
        add("sample", 1, 1, cost::sample(draws, c.vocab_size));
    }
    all
}

/// The steps in which a prompt of so many tokens is read, and its answer's first id drawn.
pub fn prompt(
    config: &Gemma3Config,
    schemes: &Schemes,
    kv: KvDtype,
    tokens: usize,
    most: usize,
) -> Vec<Vec<Work>> {
    let starts = (0..tokens).step_by(most);
    starts
        .map(|start| {
            let end = (start + most).min(tokens);
            step(config, schemes, kv, std::slice::from_ref(&(start..end)), usize::from(end == tokens), most)
        })
        .collect()
}

/// Tokens of a step of this model, of which at most `wanted` are asked for.
pub fn batch_tokens(config: &Gemma3Config, schemes: &Schemes, kv: KvDtype, wanted: usize) -> usize {
    let demand = Demand {
        config,
        schemes: schemes.clone(),
        kv,
        block_size: DEFAULT_BLOCK_SIZE,
        max_batch_tokens: wanted,
        max_shard_bytes: u64::MAX,
        moments: false,
        draft: None,
    };
    demand.batch_tokens()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::shapes::Shape;
    use crate::tensor::Scheme;

    fn of_27b(sequences: &[Range<usize>]) -> Vec<Work> {
        let config = Shape::named("gemma-3-27b").unwrap().config();
        let int4 = Scheme::int4(128);
        let schemes = Schemes::uniform(&config, int4, int4, Scheme::Int8Row);
        step(&config, &schemes, KvDtype::F16, sequences, sequences.len(), 128)
    }

    #[test]
    fn a_layer_is_fourteen_dispatches_behind_eleven_barriers() {
        let work = of_27b(std::slice::from_ref(&(512..513)));
        let sum = |of: fn(&Work) -> u64| work.iter().map(of).sum::<u64>();
        assert_eq!(sum(|w| w.times), 62 * 14 + 5);
        assert_eq!(sum(|w| w.barriers), 62 * 11 + 4);
        let times = |what| work.iter().find(|w| w.what == what).unwrap().times;
        assert_eq!((times("attention, sliding"), times("attention, full")), (52, 10));
    }

    #[test]
    fn one_token_of_a_27b_reads_as_many_bytes_as_its_weights_have() {
        let work = of_27b(std::slice::from_ref(&(512..513)));
        let weights: u64 =
            work.iter().map(|w| w.times * w.dispatch.weight_bytes * w.dispatch.weight_passes).sum();
        // 25.6 G weights of 4.125 bits, 1.41 G of 8.
        assert_eq!(weights / 10_000_000, 1461, "{weights}");
        let kv: u64 = work.iter().map(|w| w.times * w.dispatch.kv_bytes).sum();
        assert_eq!(kv, 62 * (513 + 1) * 2 * 16 * 128 * 2);
    }

    #[test]
    fn a_window_bounds_what_sliding_layers_read() {
        let work = of_27b(&[5000..5001, 10..20]);
        let kv = |what| work.iter().find(|w| w.what == what).unwrap().dispatch.kv_bytes;
        let row = 2 * 16 * 128 * 2;
        assert_eq!(kv("attention, sliding"), (1024 + 20) * row);
        assert_eq!(kv("attention, full"), (5001 + 20) * row);
    }

    #[test]
    fn a_prompt_goes_in_steps_of_which_the_last_one_draws() {
        let config = Shape::named("gemma-3-27b").unwrap().config();
        let schemes = Schemes::uniform(&config, Scheme::Bf16, Scheme::Bf16, Scheme::Bf16);
        let most = batch_tokens(&config, &schemes, KvDtype::F16, 256);
        assert_eq!(most, 128);
        let steps = prompt(&config, &schemes, KvDtype::F16, 300, most);
        let draws: Vec<_> = steps.iter().map(|s| s.iter().any(|w| w.what == "sample")).collect();
        assert_eq!(draws, [false, false, true]);
    }
}
