//! The cases of the kernels of experts: the router, the groups of pairs, products and sums.
//!
//! Most results are those of the dense cases. The matrices of an expert are one tile of the dense cases' matrix, in turn,
//! and the rows that are added up add up to the input of the dense cases' norms. The router's matrix is made for logits
//! that are known: eighths, so that its weights are powers of `exp(1/8)`.

use std::ops::Range;

use super::cases::{CaseBuffer, Make, Output, poison};
use super::inputs::{self, COLS, NORM_COLS, NORM_ROWS, PRODUCT_ROWS, WIDTH};
use super::stored::Set;
use super::tested_experts::{ROUTED, ROUTED_COLS, STEP, TestedExperts};
use crate::gpu::Buffer;
use crate::kernels::{
    Activations, ExpertMatrices, Experts, Matrix, Operand, PairActivations, Quantized, RmsNorm, Router,
    Routing, Wants,
};
use crate::tensor::{Scheme, TILE_ROWS};

/// How far a weight of the router may be off.
const WEIGHT_ERROR: f64 = 1e-4;

/// The arrays of the cases of experts.
struct Arrays {
    routed: Activations,
    router: Buffer,
    router_norm: Buffer,
    router_scales: Buffer,
    router_results: Buffer,
    chosen: Buffer,
    routing: Buffer,
    routing_of_one: Buffer,
    x: Activations,
    x_blocks: Quantized,
    pairs: Activations,
    pair_blocks: Quantized,
    gate: Activations,
    up: Activations,
    gated: Quantized,
    out: Activations,
    added: Activations,
    added_routing: Buffer,
    sum: Activations,
    normed_sum: Activations,
}

/// The rows of expert `expert` that values are stored for, each with its place among [`PRODUCT_ROWS`].
fn stored_rows(expert: usize) -> impl Iterator<Item = (usize, usize)> {
    let of_tile =
        move |(at, row): (usize, usize)| (row / TILE_ROWS == expert % 3).then_some((row % TILE_ROWS, at));
    PRODUCT_ROWS.into_iter().enumerate().filter_map(of_tile)
}

impl Make<'_> {
    /// All cases of experts. `parts` has a range for each of [`TestedExperts::part_bytes`].
    pub(super) fn experts(&mut self, tested: &TestedExperts, parts: &[Range<u64>]) {
        let mut parts =
            parts.iter().map(|range| self.space.buffer.slice(range.start, range.end - range.start));
        let mut buffer = || parts.next().expect("a part for each array");
        let arrays = Arrays {
            routed: Activations::new(buffer(), ROUTED_COLS),
            router: buffer(),
            router_norm: buffer(),
            router_scales: buffer(),
            router_results: buffer(),
            chosen: buffer(),
            routing: buffer(),
            routing_of_one: buffer(),
            x: Activations::new(buffer(), COLS),
            x_blocks: Quantized::new(buffer(), COLS),
            pairs: Activations::new(buffer(), COLS),
            pair_blocks: Quantized::new(buffer(), COLS),
            gate: Activations::new(buffer(), TILE_ROWS),
            up: Activations::new(buffer(), TILE_ROWS),
            gated: Quantized::new(buffer(), TILE_ROWS),
            out: Activations::new(buffer(), TILE_ROWS),
            added: Activations::new(buffer(), WIDTH),
            added_routing: buffer(),
            sum: Activations::new(buffer(), WIDTH),
            normed_sum: Activations::new(buffer(), WIDTH),
        };
        let matrices: Vec<[Buffer; 2]> = tested.schemes.iter().map(|_| [buffer(), buffer()]).collect();
        self.routes(tested, &arrays);
        self.sums(tested, &arrays);
        self.put_pairs(tested, &arrays);
        for (scheme, [blocks, scales]) in tested.schemes.iter().zip(matrices) {
            self.expert_products(tested, &arrays, *scheme, blocks, scales);
        }
    }

    /// The experts of two tokens, and of one, which also gets the lists of its pairs.
    fn routes(&mut self, tested: &TestedExperts, arrays: &Arrays) {
        let Experts { count, per_token, renormalizes } = tested.experts;
        // The norm's weights are divided out of the matrix.
        let weight = |col: usize| (1 + col % 2) as f32;
        let sign = |token: usize, col: usize| if token == 1 && col % 2 == 1 { -1.0 } else { 1.0 };
        self.space.put_rows_to(&arrays.routed, ROUTED, sign);
        let factor = 0.5;
        let of_column = 1.0 / f64::from(factor) / ROUTED_COLS as f64;
        let matrix: Vec<f32> = (0..count)
            .flat_map(|expert| {
                let logits = [0, 1].map(|token| tested.logit(token, expert) * of_column);
                (0..ROUTED_COLS).map(move |col| {
                    let sum: f64 = (0..ROUTED).map(|token| logits[token] * f64::from(sign(token, col))).sum();
                    sum as f32 / weight(col)
                })
            })
            .collect();
        let scale = |expert: usize| 1.0 + (expert % 3) as f32 / 2.0;
        self.space.put(&arrays.router, &matrix);
        self.space.put(&arrays.router_norm, &(0..ROUTED_COLS).map(weight).collect::<Vec<_>>());
        self.space.put(&arrays.router_scales, &(0..count).map(scale).collect::<Vec<_>>());
        let share = |rank: usize| (-STEP * rank as f64).exp();
        let all: f64 = (0..if renormalizes { per_token } else { count }).map(share).sum();
        for tokens in 1..=ROUTED {
            let pairs = tested.experts.pairs(tokens);
            let routing = Routing::new(&arrays.router_results, pairs);
            let of_pairs = || (0..tokens).flat_map(|token| (0..per_token).map(move |rank| (token, rank)));
            let experts = of_pairs().map(|(token, rank)| tested.routed(token, rank));
            let weights = of_pairs()
                .map(|(token, rank)| share(rank) / all * f64::from(scale(tested.routed(token, rank))));
            let mut outputs = vec![
                Output::integers("experts", &routing.experts, pairs, experts.clone()),
                Output::floats("weights", &routing.weights, pairs, weights, WEIGHT_ERROR),
            ];
            if tokens == 1 {
                let items = (0..).zip(experts).flat_map(|(rank, expert)| [expert, rank, 1, 0]);
                outputs.push(Output::integers("items", &routing.items, 4 * pairs, items));
                outputs.push(Output::integers("rows", &routing.rows, pairs, vec![0; pairs]));
                outputs.push(Output::integers("positions", &routing.positions, pairs, 0..pairs));
            }
            let (x, router) = (
                arrays.routed.clone(),
                Router {
                    matrix: arrays.router.clone(),
                    norm: RmsNorm { weight: arrays.router_norm.clone(), eps: inputs::EPS },
                    factor,
                    scales: Some(arrays.router_scales.clone()),
                },
            );
            let all = arrays.router_results.clone();
            self.add(format!("route of {tokens} tokens"), outputs, move |kernels, r| {
                poison(r, [&all]);
                kernels.route(r, &x, &router, &routing, tokens);
            });
        }
    }

    /// Sums of the results of experts, alone, and normed with another result.
    fn sums(&mut self, tested: &TestedExperts, arrays: &Arrays) {
        let k = tested.experts.per_token;
        let pairs = tested.experts.pairs(NORM_ROWS);
        // The weight of rank r is 1 / (r + 1), and its row is r + 1 parts of k. The last pair comes first.
        let (weight, part) =
            (|rank: usize| 1.0 / (rank + 1) as f32, |rank: usize| (rank + 1) as f32 / k as f32);
        self.space.put_rows_to(&arrays.added, pairs, |place, col| {
            let pair = pairs - 1 - place;
            inputs::normed(pair / k, col) * part(pair % k)
        });
        let routing = Routing::new(&arrays.added_routing, pairs);
        self.space.put(&routing.weights, &(0..pairs).map(|pair| weight(pair % k)).collect::<Vec<_>>());
        self.space.put(&routing.positions, &(0..pairs as u32).rev().collect::<Vec<_>>());
        // The other result is that of the next token.
        let next = |row: usize| (row + 1) % NORM_ROWS;
        let x = Activations::new(self.space.part(CaseBuffer::Normed), WIDTH);
        let places: Vec<_> = (0..NORM_ROWS).flat_map(|row| NORM_COLS.map(|col| (row, col))).collect();
        let plain: Vec<f64> = places.iter().map(|(row, col)| inputs::normed(*row, *col).into()).collect();
        let largest = plain.iter().fold(0f64, |most, value| most.max(value.abs()));
        let plain = Set { values: plain, bound: 1e-5 * largest, largest };
        let stored = self.stored.get("rms_norm");
        let at = |row: usize, i: usize| stored.values[row * NORM_COLS.len() + i];
        let normed = (0..NORM_ROWS).flat_map(|row| (0..NORM_COLS.len()).map(move |i| (row, i)));
        let values = normed.map(|(row, i)| at(row, i) + at(next(row), i)).collect();
        let normed = Set { values, bound: 2.0 * stored.bound, largest: 2.0 * stored.largest };
        let outputs = vec![
            self.rows("sum", &arrays.sum, NORM_ROWS, &plain, &places),
            self.rows("normed sum", &arrays.normed_sum, NORM_ROWS, &normed, &places),
        ];
        let norm = RmsNorm { weight: self.space.part(CaseBuffer::NormWeight), eps: inputs::EPS };
        let (from, sum, normed_sum) = (arrays.added.clone(), arrays.sum.clone(), arrays.normed_sum.clone());
        self.add("combine", outputs, move |kernels, r| {
            poison(r, [&sum.buffer]);
            for row in 0..NORM_ROWS {
                let [from, to] = [x.rows(&(next(row)..next(row) + 1)), normed_sum.rows(&(row..row + 1))];
                r.copy(&from.buffer, &to.buffer, to.buffer.size());
            }
            kernels.combine(r, &from, &routing, None, &sum, NORM_ROWS);
            kernels.combine(r, &from, &routing, Some([&norm, &norm]), &normed_sum, NORM_ROWS);
        });
    }

    /// The inputs of products: tokens with the activations of the dense cases or half of them, and pairs with these.
    fn put_pairs(&mut self, tested: &TestedExperts, arrays: &Arrays) {
        let TestedExperts { experts, tokens, .. } = tested;
        let of_token = |token: usize| if token.is_multiple_of(2) { 1.0 } else { 0.5 };
        let space = &mut self.space;
        space.put_rows_to(&arrays.x, *tokens, |token, col| inputs::activation(0, col) * of_token(token));
        space.put_rows_to(&arrays.pairs, experts.pair_rows(*tokens), |_, col| inputs::activation(0, col));
        let chosen: Vec<u32> = (0..experts.pairs(*tokens)).map(|pair| tested.chosen(pair) as u32).collect();
        space.put(&arrays.chosen, &chosen);
        let k = experts.per_token;
        let of_one = Routing::new(&arrays.routing_of_one, k);
        let items: Vec<u32> = (0..k as u32).flat_map(|rank| [chosen[rank as usize], rank, 1, 0]).collect();
        space.put(&of_one.items, &items);
        space.put(&of_one.rows, &vec![0u32; k]);
        space.put(&of_one.positions, &(0..k as u32).collect::<Vec<_>>());
    }

    /// The products with matrices of one scheme, for each of the kernels that compute them.
    fn expert_products(
        &mut self,
        tested: &TestedExperts,
        arrays: &Arrays,
        scheme: Scheme,
        blocks: Buffer,
        scales: Buffer,
    ) {
        let count = tested.experts.count;
        let name = inputs::stored_scheme(scheme);
        let [Some(products), Some(gated)] =
            ["matmul", self.gated_set()].map(|what| self.stored.find(&format!("{what} {name}")))
        else {
            self.untested.push(format!("products of experts in {scheme}"));
            return;
        };
        let packed = inputs::packed(scheme);
        for (to, tiles) in [&blocks, &scales].into_iter().zip(&packed) {
            // The matrix of the dense cases has three tiles.
            let bytes = tiles.len() / 3;
            let all: Vec<u8> =
                (0..count).flat_map(|expert| &tiles[expert % 3 * bytes..][..bytes]).copied().collect();
            self.space.put(to, &all);
        }
        let scales = (scales.size() > 0).then_some(scales);
        let matrix =
            || Matrix::of_one_shard(scheme, [count * TILE_ROWS, COLS], blocks.clone(), scales.clone());
        let wants = self.kernels.wants([&matrix()]);
        let forms = self.traits.gated_experts.iter().filter(|(of, _)| *of == scheme);
        let forms: Vec<Option<Wants>> = forms.map(|(_, form)| Some(*form)).chain([None]).collect();
        for (form, tokens) in forms.iter().flat_map(|form| {
            self.kernels.expert_tokens(tested.tokens).into_iter().map(move |tokens| (*form, tokens))
        }) {
            let pairs = tested.experts.pairs(tokens);
            let places = tested.places(tokens);
            let routing = match tokens {
                1 => Routing::new(&arrays.routing_of_one, pairs),
                _ => Routing { experts: arrays.chosen.clone(), ..Routing::new(&arrays.routing, pairs) },
            };
            let rows = tested.experts.pair_rows(tokens);
            let compared = || {
                let of_pair = |pair: usize| {
                    let place = places[pair];
                    stored_rows(tested.chosen(pair)).map(move |(row, at)| ((place, row), at))
                };
                tested.compared(tokens).flat_map(of_pair)
            };
            let at: Vec<(usize, usize)> = compared().map(|(at, _)| at).collect();
            let expected =
                |of: &Set| Set { values: compared().map(|(_, at)| of.values[at]).collect(), ..*of };
            // Both kinds of products group the pairs first, except that the lists of one token are there.
            let grouped = (tokens > 1).then(|| arrays.routing.clone());
            let positions = grouped
                .iter()
                .map(|_| Output::integers("positions", &routing.positions, pairs, places.iter().copied()));
            let mut outputs: Vec<Output> = positions.collect();
            let (own, to) = (matrix(), Operand::new(form.unwrap_or(wants), &arrays.gate, &arrays.gated));
            let (x, quantized, most) = match form {
                Some(_) => (arrays.x.clone(), arrays.x_blocks.clone(), tokens),
                None => (arrays.pairs.clone(), arrays.pair_blocks.clone(), rows),
            };
            match form {
                Some(_) => outputs.extend(self.operand("y", &to, rows, &expected(gated), &at)),
                None => outputs.push(self.rows("y", &arrays.out, pairs, &expected(products), &at)),
            }
            let input = Operand::new(wants, &x, &quantized);
            let (gate, up, out) = (arrays.gate.clone(), arrays.up.clone(), arrays.out.clone());
            let what = if form.is_some() { "gated experts" } else { "experts" };
            let kernel = format!("{what} {scheme} for {tokens} tokens");
            self.add(kernel, outputs, move |kernels, r| {
                if let Some(blocks) = &input.blocks {
                    kernels.quantize(r, &x, blocks, most);
                }
                poison(r, [&gate.buffer, &up.buffer, &out.buffer]);
                poison(r, to.blocks.iter().map(|blocks| &blocks.buffer));
                poison(r, &grouped);
                let matrices = ExpertMatrices { gate: &own, up: &own, down: &own };
                kernels.group_pairs(r, matrices, &routing, tokens);
                match form {
                    Some(_) => {
                        let to = PairActivations { gate: &gate, up: &up, gated: &to, out: &out };
                        kernels.gated_experts(r, [&own, &own], &input, &to, &routing, tokens);
                    }
                    None => kernels.experts_down(r, &own, (&input, &out), &routing, tokens),
                }
            });
        }
    }
}
