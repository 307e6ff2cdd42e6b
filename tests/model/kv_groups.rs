//! The groups of a model's layers, and the pools of their KV blocks.

use unicorn::model::KvPool;
use unicorn::model::arch;
use unicorn::model::spec::{AttentionHeads, FeedForward, KvGroup, LayerSpec, ModelSpec};

const SMALL: AttentionHeads =
    AttentionHeads { num_attention_heads: 8, num_key_value_heads: 4, head_dim: 256 };
const LARGE: AttentionHeads =
    AttentionHeads { num_attention_heads: 8, num_key_value_heads: 2, head_dim: 512 };

/// A model whose layers have these windows and heads.
fn model(layers: &[(Option<usize>, AttentionHeads)]) -> ModelSpec {
    let layers = layers
        .iter()
        .map(|&(window, heads)| LayerSpec {
            window,
            rope: 0,
            heads,
            has_values_of_keys: false,
            kv_source: None,
            intermediate_size: 6912,
            gate_cutoff: None,
            feed_forward: FeedForward::Dense,
        })
        .collect();
    ModelSpec { layers, ..arch::shape("gemma-3-1b").unwrap().spec() }
}

/// The windows of a model's pools, and the pool of each layer.
fn pools(model: &ModelSpec) -> (Vec<Option<usize>>, Vec<usize>) {
    let pools = model.kv_pools();
    let of_layers = model.pools_of_layers(&pools).expect("a model's own pools");
    (pools.iter().map(|pool| pool.window).collect(), of_layers)
}

#[test]
fn layers_with_the_same_window_and_heads_share_a_pool() {
    let (full, sliding) = ((None, SMALL), (Some(512), SMALL));
    let all_full = model(&[full; 3]);
    assert_eq!(all_full.kv_groups(), [KvGroup { window: None, heads: SMALL }]);
    assert_eq!(pools(&all_full), (vec![None], vec![0; 3]));

    let gemma = arch::shape("gemma-3-1b").unwrap().spec();
    let (windows, of_layers) = pools(&gemma);
    assert_eq!(windows, [None, Some(512)]);
    let expected: Vec<usize> = gemma.layers.iter().map(|layer| usize::from(layer.window.is_some())).collect();
    assert!(of_layers == expected && expected.contains(&0) && expected.contains(&1));

    // Heads of two sizes, with the same window and with different ones.
    let large = (None, LARGE);
    assert_eq!(pools(&model(&[sliding, large, sliding])), (vec![None, Some(512)], vec![1, 0, 1]));
    let all = model(&[sliding, full, large, (Some(512), LARGE), sliding]);
    assert_eq!(pools(&all), (vec![None, None, Some(512), Some(512)], vec![2, 0, 1, 3, 2]));

    // There is a pool without a window even if all layers have one.
    assert_eq!(pools(&model(&[sliding; 2])), (vec![None, Some(512)], vec![1, 1]));
}

#[test]
fn a_draft_model_gets_pools_of_its_model_that_reach_as_far() {
    let full = |heads| (None, heads);
    let sliding = |window| (Some(window), SMALL);
    let of = |model: &ModelSpec| -> Vec<KvPool> { model.kv_pools() };
    let large = model(&[sliding(1024), full(LARGE)]);
    assert_eq!(model(&[sliding(512), full(SMALL)]).pools_of_layers(&of(&large)), Some(vec![1, 0]));
    assert_eq!(model(&[full(SMALL); 2]).pools_of_layers(&of(&large)), Some(vec![0; 2]));
    let too_far = model(&[sliding(2048), full(SMALL)]);
    assert_eq!(too_far.pools_of_layers(&of(&large)), None, "the window is larger than the model's");
    let other_heads = model(&[full(SMALL), full(LARGE)]);
    assert_eq!(other_heads.pools_of_layers(&of(&large)), None, "the model has one pool without a window");
}
