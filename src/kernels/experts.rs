//! Mixtures of experts: the router, the pairs of a token and one of its experts, and the products of experts.
//!
//! The device decides which experts a step uses, and the host never learns it before the step ends. So the products of
//! experts take their workgroup counts from a buffer, and read the matrices of the experts that some token chose, each
//! once for all of its tokens.

use super::Kernels;
use super::arrays::{Activations, Experts, RmsNorm, words};
use super::expert_kernels::ExpertKernels;
use super::operand::{Grouped, Operand, Quantized};
use super::shaders;
use super::weights::Matrix;
use crate::gpu::{Buffer, INDIRECT_BYTES, Recorder};

/// The router of a layer (`shaders/route.comp`).
pub struct Router {
    /// f32 `[experts, hidden_size]`.
    pub matrix: Buffer,
    /// The norm of the router's input.
    pub norm: RmsNorm,
    /// Factor of the logits.
    pub factor: f32,
    /// Factors of the weights, f32 for each expert, if there are any.
    pub scales: Option<Buffer>,
}

/// The pairs of a step's tokens and their experts. The sizes are those of `pairs` pairs.
#[derive(Clone)]
pub struct Routing {
    /// A counter, u32: the number of different experts that were chosen, added up over calls.
    pub used: Buffer,
    /// The expert of each pair: u32; and its weight: f32.
    pub experts: Buffer,
    pub weights: Buffer,
    /// The tokens of the pairs, grouped by expert, and the place of each pair among them: u32.
    pub rows: Buffer,
    pub positions: Buffer,
    /// What workgroups compute: `[u32; 4]`, at most one for each pair.
    pub items: Buffer,
    /// The workgroup counts of the products of gate and up, and of down.
    pub groups: Buffer,
}

impl Routing {
    /// Bytes of each array, in the order of the fields, for `pairs` pairs. The counter comes first, so that its place does
    /// not depend on the number of pairs.
    pub fn bytes(pairs: usize) -> [u64; 7] {
        let words = 4 * pairs as u64;
        [4, words, words, words, words, 4 * words, 2 * INDIRECT_BYTES]
            .map(|bytes| bytes.next_multiple_of(256))
    }

    /// The arrays in a buffer that has the bytes of all of them.
    pub fn new(buffer: &Buffer, pairs: usize) -> Routing {
        let mut offset = 0;
        let [used, experts, weights, rows, positions, items, groups] = Routing::bytes(pairs).map(|bytes| {
            offset += bytes;
            buffer.slice(offset - bytes, bytes)
        });
        Routing { used: used.slice(0, 4), experts, weights, rows, positions, items, groups }
    }
}

/// The matrices of all experts of a layer: gate and up, and down.
#[derive(Clone, Copy)]
pub struct ExpertMatrices<'a> {
    pub gate: &'a Matrix,
    pub up: &'a Matrix,
    pub down: &'a Matrix,
}

/// What the rows of activations belong to: tokens, or pairs of a token and one of its experts in the order of the routing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowsOf {
    Tokens,
    Pairs,
}

/// The activations of pairs.
pub struct PairActivations<'a> {
    /// The products of gate and up, if they are not computed by one kernel; then gate becomes the gated product.
    pub gate: &'a Activations,
    pub up: &'a Activations,
    /// The gated product, as the down matrix takes it.
    pub gated: &'a Operand,
    /// The results.
    pub out: &'a Activations,
}

impl Kernels {
    fn expert_kernels(&self) -> &ExpertKernels {
        self.experts.as_ref().expect("experts: kernels of dense layers")
    }

    /// Chooses the experts of `tokens` rows of the residual stream `x`, with their weights. With one token, this also
    /// makes the lists of [`Kernels::group_pairs`].
    pub fn route(
        &self,
        recorder: &mut Recorder<'_>,
        x: &Activations,
        router: &Router,
        routing: &Routing,
        tokens: usize,
    ) {
        let ExpertKernels { experts, route, .. } = self.expert_kernels();
        let pairs = experts.pairs(tokens);
        let dim = x.width;
        assert!(dim.is_multiple_of(4), "route: rows of {dim} numbers");
        let arguments = shaders::Route {
            x: &x.used(tokens, dim, "route: x"),
            weight: &words(&router.norm.weight, dim, "route: norm"),
            router: &words(&router.matrix, experts.count * dim, "route: matrix"),
            scale_or_none: router.scales.as_ref(),
            experts: &words(&routing.experts, pairs, "route: experts"),
            weights: &words(&routing.weights, pairs, "route: weights"),
            rows: &words(&routing.rows, pairs, "route: rows"),
            positions: &words(&routing.positions, pairs, "route: positions"),
            items: &words(&routing.items, 4 * pairs, "route: items"),
            used: &routing.used,
            dim: dim as u32,
            eps: router.norm.eps,
            factor: router.factor,
        };
        recorder.dispatch(route, &arguments, [tokens as u32, 1, 1]);
    }

    /// Groups the pairs of `tokens` tokens by expert, for [`Kernels::expert_products`] with the same matrices.
    pub fn group_pairs(
        &self,
        recorder: &mut Recorder<'_>,
        matrices: ExpertMatrices<'_>,
        routing: &Routing,
        tokens: usize,
    ) {
        let ExpertKernels { experts, group_pairs, .. } = self.expert_kernels();
        if tokens == 1 {
            return;
        }
        let pairs = experts.pairs(tokens);
        let tile = self.products.expert_tile(experts, tokens);
        let [gate, down] = self.expert_parts(matrices, tokens);
        let arguments = shaders::GroupPairs {
            experts: &words(&routing.experts, pairs, "group_pairs: experts"),
            rows: &words(&routing.rows, pairs, "group_pairs: rows"),
            positions: &words(&routing.positions, pairs, "group_pairs: positions"),
            items: &words(&routing.items, 4 * pairs, "group_pairs: items"),
            groups: &routing.groups,
            used: &routing.used,
            pairs: pairs as u32,
            per_token: experts.per_token as u32,
            columns: tile.columns,
            parts0: gate,
            parts1: down,
        };
        recorder.dispatch(group_pairs, &arguments, [1, 1, 1]);
    }

    /// The workgroups of an item in the products of gate and up, and in those of down.
    fn expert_parts(&self, ExpertMatrices { gate, down, .. }: ExpertMatrices<'_>, tokens: usize) -> [u32; 2] {
        let experts = &self.expert_kernels().experts;
        [gate, down]
            .map(|matrix| self.products.expert_tile(experts, tokens).parts(matrix.rows / experts.count))
    }

    /// Computes what the experts of `tokens` tokens compute: `out[p] = down(activation(gate x[t]) * (up x[t]))` for each
    /// pair `p` of a token `t` and an expert, in the order of the routing. `x` must have the forms that
    /// [`Kernels::wants`] returns.
    pub fn expert_products(
        &self,
        recorder: &mut Recorder<'_>,
        matrices: ExpertMatrices<'_>,
        x: &Operand,
        to: &PairActivations<'_>,
        routing: &Routing,
        tokens: usize,
    ) {
        recorder.label("experts' gate, up");
        self.gated_experts(recorder, [matrices.gate, matrices.up], x, to, routing, tokens);
        recorder.label("experts' down");
        self.experts_down(recorder, matrices.down, (to.gated, to.out), routing, tokens);
    }

    /// The first part of [`Kernels::expert_products`]: the gated products of the pairs, in the order of the routing.
    pub fn gated_experts(
        &self,
        recorder: &mut Recorder<'_>,
        gate_and_up: [&Matrix; 2],
        x: &Operand,
        to: &PairActivations<'_>,
        routing: &Routing,
        tokens: usize,
    ) {
        let grouped = self.grouped(routing, 0, tokens);
        if self.products.gated_experts(recorder, gate_and_up, x, to.gated, &grouped) {
            return;
        }
        let products = [to.gate, to.up];
        for (matrix, y) in gate_and_up.into_iter().zip(products) {
            self.products.experts(recorder, matrix, x, y, &grouped);
        }
        let experts = grouped.experts;
        self.glu_rows(recorder, products, to.gated, experts.pairs(tokens), experts.pair_rows(tokens));
    }

    /// The second part of [`Kernels::expert_products`]: the products of `down` with the pairs' rows of `gated`.
    pub fn experts_down(
        &self,
        recorder: &mut Recorder<'_>,
        down: &Matrix,
        (gated, out): (&Operand, &Activations),
        routing: &Routing,
        tokens: usize,
    ) {
        self.products.experts(recorder, down, gated, out, &self.grouped(routing, 1, tokens));
    }

    /// The pairs of `tokens` tokens, for the products of gate and up (`part` 0), which take the tokens' rows, or for those
    /// of down (1), which take the pairs' rows.
    fn grouped<'a>(&'a self, routing: &'a Routing, part: u64, tokens: usize) -> Grouped<'a> {
        Grouped {
            experts: &self.expert_kernels().experts,
            items: &routing.items,
            list: (part == 0).then_some(&routing.rows),
            // One token has an item for each of its experts.
            groups: (tokens > 1).then(|| routing.groups.slice(part * INDIRECT_BYTES, INDIRECT_BYTES)),
            tokens,
        }
    }

    /// The fewest tokens, up to `most`, for which each kernel of the products of experts is used, in ascending order.
    pub fn expert_tokens(&self, most: usize) -> Vec<usize> {
        let experts = &self.expert_kernels().experts;
        let mut tokens: Vec<usize> = (1..=most).collect();
        tokens.dedup_by_key(|tokens| self.products.expert_tile(experts, *tokens).columns);
        tokens
    }

    /// Adds up what the experts of each of `tokens` tokens computed, in the order of their ranks. Without `norms`, `y`
    /// becomes the sum. With `norms`, it becomes its own norm with the first one plus the norm of the sum with the second
    /// one.
    pub fn combine(
        &self,
        recorder: &mut Recorder<'_>,
        x: &Activations,
        routing: &Routing,
        norms: Option<[&RmsNorm; 2]>,
        y: &Activations,
        tokens: usize,
    ) {
        let ExpertKernels { experts, combine, .. } = self.expert_kernels();
        let (pairs, dim) = (experts.pairs(tokens), y.width);
        assert!(dim.is_multiple_of(4), "combine: rows of {dim} numbers");
        let weight = |i: usize| norms.map(|norms| words(&norms[i].weight, dim, "combine: norm"));
        let [own, of_sum] = [weight(0), weight(1)];
        let arguments = shaders::Combine {
            x: &x.used(pairs, dim, "combine: x"),
            weights: &words(&routing.weights, pairs, "combine: weights"),
            positions: &words(&routing.positions, pairs, "combine: positions"),
            weight_or_none: own.as_ref(),
            sum_weight_or_none: of_sum.as_ref(),
            y: &y.used(tokens, dim, "combine: y"),
            dim: dim as u32,
            per_token: experts.per_token as u32,
            eps: norms.map_or(0.0, |norms| norms[0].eps),
            sum_eps: norms.map_or(0.0, |norms| norms[1].eps),
        };
        recorder.dispatch(&combine[usize::from(norms.is_some())], &arguments, [tokens as u32, 1, 1]);
    }

    /// Adds the squares of the rows of `x` that each expert multiplies to `sums`, f32 `[experts, x.width]`.
    pub fn expert_moments(
        &self,
        recorder: &mut Recorder<'_>,
        x: &Activations,
        rows: RowsOf,
        routing: &Routing,
        sums: &Buffer,
        tokens: usize,
    ) {
        let experts = &self.expert_kernels().experts;
        let pairs = experts.pairs(tokens);
        let (count, positions) = match rows {
            RowsOf::Tokens => (tokens, None),
            RowsOf::Pairs => (pairs, Some(words(&routing.positions, pairs, "expert_moments: positions"))),
        };
        let arguments = shaders::Moments {
            x: &x.used(count, x.width, "expert_moments: x"),
            sums: &words(sums, experts.count * x.width, "expert_moments: sums"),
            experts_or_none: Some(&words(&routing.experts, pairs, "expert_moments: experts")),
            positions_or_none: positions.as_ref(),
            count: pairs as u32,
            width: x.width as u32,
            x_stride: x.stride as u32,
            per_token: experts.per_token as u32,
        };
        let groups = [(x.width as u32).div_ceil(64), experts.count as u32, 1];
        recorder.dispatch(&self.moments, &arguments, groups);
    }
}

/// Bytes of an operand of pairs.
pub fn pair_blocks_bytes(experts: &Experts, tokens: usize, width: usize) -> u64 {
    Quantized::bytes(experts.pair_rows(tokens), width)
}
