//! Lists the dispatches of a Gemma-3 step with their costs, as `forward.rs` records them, for predictions without a
//! GPU. `tests/target_compile.rs` compares the two.

use std::ops::Range;

use crate::kernels::{Wants, share_pipeline};
use crate::lab::cost::{self, Dispatch, Drawn, Heads};
use crate::model::config::{LayerType, ModelConfig};
use crate::model::memory::{DEFAULT_BLOCK_SIZE, MemoryRequest, Schemes, partials};
use crate::model::step::padded_tokens;
use crate::model::tensors::Projections;
use crate::tensor::{KvDtype, Precision, Scheme};

/// Dispatches of one kind in a step.
#[derive(Debug, Clone)]
pub struct StepDispatches {
    /// The name of the dispatches, e.g. `q_proj`.
    pub what: &'static str,
    /// Number of dispatches.
    pub times: u64,
    /// The number of dispatches that have a barrier before them.
    pub barriers: u64,
    pub dispatch: Dispatch,
}

/// The dispatches of a step in which each sequence contributes the tokens at these positions, and `draws` ids are
/// `drawn`. `most` is the largest number of tokens of a step.
pub fn step(
    config: &ModelConfig,
    schemes: &Schemes,
    kv: KvDtype,
    precision: Precision,
    sequences: &[Range<usize>],
    (draws, drawn): (usize, Drawn),
    most: usize,
) -> Vec<StepDispatches> {
    let c = config;
    let known: usize = sequences.iter().map(|positions| positions.len()).sum();
    let n = padded_tokens(known, most);
    let (hidden, ffn) = (c.hidden_size, c.intermediate_size);
    let (q, kv_width) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
    let heads = Heads {
        num_heads: c.num_attention_heads,
        num_kv_heads: c.num_key_value_heads,
        head_dim: c.head_dim,
        kv,
    };
    let layers = c.num_hidden_layers as u64;
    let mut all = Vec::new();
    let mut add =
        |what, times, barriers, dispatch| all.push(StepDispatches { what, times, barriers, dispatch });

    // Each command buffer begins with a barrier; the opening's barrier serves the first layer's norm too.
    add("embed", 1, 1, cost::embed(schemes.embedding, hidden, n));
    add("history", 1, 0, cost::history(known));

    // Layers with equal schemes are listed as one kind.
    let mut kinds: Vec<(Projections<Scheme>, u64)> = Vec::new();
    for layer in &schemes.layers {
        match kinds.iter_mut().find(|(schemes, _)| schemes == layer) {
            Some((_, times)) => *times += 1,
            None => kinds.push((*layer, 1)),
        }
    }
    let wants = |schemes: &[Scheme]| {
        let is_one = |quantizes: bool| schemes.iter().any(|s| precision.quantizes(*s) == quantizes);
        Wants { floats: is_one(false), blocks: is_one(true) }
    };
    // The first layer's norm adds no sublayer's output, because no sublayer comes before it.
    let first = schemes.layers[0];
    let first_wants = wants(&[first.q_proj, first.k_proj, first.v_proj]);
    add("input norm", 1, 1, cost::rms_norm(n, hidden, first_wants));
    for (kind, times) in kinds {
        let residuals = times - u64::from(kind == first);
        let Projections { q_proj, k_proj, v_proj, o_proj, gate_proj: gate, up_proj: up, down_proj: down } =
            kind;
        let input = wants(&[q_proj, k_proj, v_proj]);
        if residuals > 0 {
            add("input norm", residuals, residuals, cost::residual(n, hidden, input));
        }
        // One dispatch computes neighbouring matrices that share a pipeline.
        let each = [(q_proj, q), (k_proj, kv_width), (v_proj, kv_width)];
        let alike = |a: &(Scheme, usize), b: &(Scheme, usize)| {
            precision.quantizes(a.0) && precision.quantizes(b.0) && share_pipeline(a.0, b.0)
        };
        let mut barriers = times;
        for together in each.chunk_by(alike) {
            let rows: Vec<usize> = together.iter().map(|(_, rows)| *rows).collect();
            let what = if together.len() == 3 { "qkv" } else { "q, k or v" };
            add(what, times, barriers, cost::matmul(precision, together[0].0, &rows, hidden, n));
            barriers = 0;
        }
        add("o_proj", times, times, cost::matmul(precision, o_proj, &[hidden], q, n));
        let to = wants(&[gate, up]);
        add("feed-forward norm", times, times, cost::residual(n, hidden, to));
        let gated = wants(&[down]);
        if alike(&(gate, ffn), &(up, ffn)) && gated.blocks && !gated.floats {
            add("gate, up", times, times, cost::gated(gate, ffn, hidden, n));
        } else {
            add("gate_proj", times, times, cost::matmul(precision, gate, &[ffn], hidden, n));
            add("up_proj", times, 0, cost::matmul(precision, up, &[ffn], hidden, n));
            add("geglu", times, times, cost::geglu(n, ffn, gated));
        }
        add("down_proj", times, times, cost::matmul(precision, down, &[hidden], ffn, n));
    }
    add("last add", 1, 1, cost::rms_norm_add(n, hidden));
    add("qkv_store", layers, layers, cost::qkv_store(&heads, n));
    let sliding = ["attention, sliding", "attention of tiles, sliding", "attention merged, sliding"];
    let full = ["attention, full", "attention of tiles, full", "attention merged, full"];
    for (names, kind, window) in [
        (sliding, LayerType::SlidingAttention, Some(c.sliding_window)),
        (full, LayerType::FullAttention, None),
    ] {
        let times = c.layer_types.iter().filter(|each| **each == kind).count() as u64;
        if times == 0 {
            continue;
        }
        let room = partials(most);
        // All layers count with the form that the first layer's attention result has.
        let attended = wants(&[first.o_proj]);
        let [single, tiles, merge] = cost::attention(&heads, sequences, window, n, room, attended);
        add(names[0], times, times, single);
        // Tiles run beside single tokens, with no barrier between them.
        if n > 1 {
            add(names[1], times, 0, tiles);
        }
        add(names[2], times, times, merge);
    }
    if draws > 0 {
        add("final norm", 1, 1, cost::rms_norm_gather(draws, hidden, wants(&[schemes.embedding])));
        add("lm_head", 1, 1, cost::matmul(precision, schemes.embedding, &[c.vocab_size], hidden, draws));
        for dispatch in cost::sample(draws, c.vocab_size, drawn) {
            add("sample", 1, 1, dispatch);
        }
    }
    all
}

/// The steps that compute a prompt of `tokens` tokens and draw the answer's first id.
pub fn prompt(
    config: &ModelConfig,
    schemes: &Schemes,
    kv: KvDtype,
    precision: Precision,
    tokens: usize,
    most: usize,
) -> Vec<Vec<StepDispatches>> {
    let starts = (0..tokens).step_by(most);
    starts
        .map(|start| {
            let end = (start + most).min(tokens);
            let positions = start..end;
            let draws = usize::from(end == tokens);
            step(
                config,
                schemes,
                kv,
                precision,
                std::slice::from_ref(&positions),
                (draws, Drawn::Greedy),
                most,
            )
        })
        .collect()
}

/// The number of tokens of a step of this model, at most `wanted`.
pub fn batch_tokens(config: &ModelConfig, schemes: &Schemes, kv: KvDtype, wanted: usize) -> usize {
    let request = MemoryRequest {
        config,
        schemes: schemes.clone(),
        kv,
        block_size: DEFAULT_BLOCK_SIZE,
        max_batch_tokens: wanted,
        max_shard_bytes: u64::MAX,
        moments: false,
        offload: None,
        draft: None,
    };
    request.batch_tokens()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::shapes::Shape;

    fn of_27b(sequences: &[Range<usize>]) -> Vec<StepDispatches> {
        let config = Shape::named("gemma-3-27b").unwrap().config();
        let int4 = Scheme::int4(128);
        let schemes = Schemes::uniform(&config, int4, int4, Scheme::Int8Row);
        step(
            &config,
            &schemes,
            KvDtype::F16,
            Precision::Fast,
            sequences,
            (sequences.len(), Drawn::Greedy),
            128,
        )
    }

    #[test]
    fn a_layer_is_nine_dispatches_behind_nine_barriers() {
        let work = of_27b(std::slice::from_ref(&(512..513)));
        let sum = |of: fn(&StepDispatches) -> u64| work.iter().map(of).sum::<u64>();
        assert_eq!(sum(|w| w.times), 62 * 9 + 7);
        assert_eq!(sum(|w| w.barriers), 62 * 9 + 6);
        let times = |what| work.iter().find(|w| w.what == what).unwrap().times;
        assert_eq!((times("attention, sliding"), times("attention, full")), (52, 10));
    }

    #[test]
    fn one_token_of_a_27b_reads_as_many_bytes_as_its_weights_have() {
        let work = of_27b(std::slice::from_ref(&(512..513)));
        let weights: u64 =
            work.iter().map(|w| w.times * w.dispatch.weight_bytes * w.dispatch.weight_passes).sum();
        // There are 25.6 G weights of 4.125 bits, and 1.41 G weights of 8 bits.
        assert_eq!(weights / 10_000_000, 1461, "{weights}");
        let kv: u64 = work.iter().map(|w| w.times * w.dispatch.kv_bytes).sum();
        assert_eq!(kv, 62 * (513 + 1) * 2 * 16 * 128 * 2);
    }

    #[test]
    fn a_window_bounds_what_sliding_layers_read() {
        let work = of_27b(&[5000..5001, 10..20]);
        let kv = |what| work.iter().find(|w| w.what == what).unwrap().dispatch.kv_bytes;
        let row = 2 * 16 * 128 * 2;
        assert_eq!((kv("attention, sliding"), kv("attention of tiles, sliding")), (1024 * row, 20 * row));
        assert_eq!((kv("attention, full"), kv("attention of tiles, full")), (5001 * row, 20 * row));
    }

    #[test]
    fn a_prompt_goes_in_steps_of_which_the_last_one_draws() {
        let config = Shape::named("gemma-3-27b").unwrap().config();
        let schemes = Schemes::uniform(&config, Scheme::Bf16, Scheme::Bf16, Scheme::Bf16);
        let most = batch_tokens(&config, &schemes, KvDtype::F16, 256);
        assert_eq!(most, 256);
        let steps = prompt(&config, &schemes, KvDtype::F16, Precision::Fast, 300, most);
        let draws: Vec<_> = steps.iter().map(|s| s.iter().any(|w| w.what == "sample")).collect();
        assert_eq!(draws, [false, true]);
    }
}
