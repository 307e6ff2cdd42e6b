//! What the self-test's cases of experts depend on: the sizes of their buffers, and the experts that they choose.

use super::inputs::{COLS, NORM_ROWS, WIDTH};
use crate::kernels::{Activations, Experts, Quantized, Routing};
use crate::tensor::{Scheme, TILE_ROWS};

/// Columns of the router's matrix, and tokens that it routes.
pub const ROUTED_COLS: usize = 64;
pub const ROUTED: usize = 2;
/// The difference of two logits that follow each other.
pub const STEP: f64 = 0.125;

/// What the cases of experts depend on.
#[derive(Debug, Clone)]
pub struct TestedExperts {
    pub experts: Experts,
    /// The most tokens that the layers take at a time.
    pub tokens: usize,
    /// Every scheme of the experts' matrices, once.
    pub schemes: Vec<Scheme>,
}

impl TestedExperts {
    /// Bytes of the arrays of the cases, in the order of `experts::Arrays`.
    fn array_bytes(&self) -> [u64; 20] {
        let TestedExperts { experts, tokens, .. } = self;
        let (count, pairs, rows) = (experts.count, experts.pairs(*tokens), experts.pair_rows(*tokens));
        let routing = |tokens: usize| Routing::bytes(experts.pairs(tokens)).iter().sum();
        let (floats, blocks) = (Activations::bytes, Quantized::bytes);
        [
            floats(ROUTED, ROUTED_COLS),
            4 * (count * ROUTED_COLS) as u64,
            4 * ROUTED_COLS as u64,
            4 * count as u64,
            routing(ROUTED),
            4 * pairs as u64,
            routing(*tokens),
            routing(1),
            floats(*tokens, COLS),
            blocks(*tokens, COLS),
            floats(rows, COLS),
            blocks(rows, COLS),
            floats(rows, TILE_ROWS),
            floats(rows, TILE_ROWS),
            blocks(rows, TILE_ROWS),
            floats(rows, TILE_ROWS),
            floats(experts.pairs(NORM_ROWS), WIDTH),
            routing(NORM_ROWS),
            floats(NORM_ROWS, WIDTH),
            floats(NORM_ROWS, WIDTH),
        ]
    }

    /// Bytes of each part of the cases' buffer: of the arrays, and of the blocks and scales of the matrix in each scheme.
    pub fn part_bytes(&self) -> Vec<u64> {
        let rows = self.experts.count * TILE_ROWS;
        let matrices = self
            .schemes
            .iter()
            .flat_map(|scheme| [scheme.block_bytes(rows, COLS), scheme.scale_bytes(rows, COLS)]);
        self.array_bytes().into_iter().chain(matrices).collect()
    }

    /// Bytes of the results of the largest case.
    pub fn result_bytes(&self) -> u64 {
        let rows = self.experts.pair_rows(self.tokens);
        Quantized::bytes(rows, TILE_ROWS) + 2 * Activations::bytes(rows, TILE_ROWS)
    }

    /// The expert that the router should choose at a rank.
    pub fn routed(&self, token: usize, rank: usize) -> usize {
        let count = self.experts.count;
        (count - 1 + 3 * token + count - rank) % count
    }

    /// The logit of the router's expert `expert`.
    pub fn logit(&self, token: usize, expert: usize) -> f64 {
        // Expert and rank have the same sum for all ranks, so that the rank of an expert is what the expert of a rank is.
        -STEP * self.routed(token, expert) as f64
    }

    /// The expert of a pair of the products' cases.
    pub fn chosen(&self, pair: usize) -> usize {
        pair % self.experts.count
    }

    /// The place of each pair of `tokens` tokens after they are grouped by expert.
    pub fn places(&self, tokens: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.experts.pairs(tokens)).collect();
        order.sort_by_key(|pair| self.chosen(*pair));
        let mut places = vec![0; order.len()];
        order.into_iter().enumerate().for_each(|(place, pair)| places[pair] = place);
        places
    }

    /// The pairs of `tokens` tokens whose results are compared: those of the first token and of the last one with the same
    /// activations.
    pub fn compared(&self, tokens: usize) -> impl Iterator<Item = usize> + use<> {
        let k = self.experts.per_token;
        let last = (tokens - 1) / 2 * 2;
        (0..k).chain(last * k..(last + 1) * k)
    }
}
