//! The kernels of mixtures of experts against their CPU twins: the router, the groups of pairs, products and sums.

use rand::Rng;
use rand::seq::SliceRandom;
use unicorn::gpu::Buffer;
use unicorn::kernels::Quantized;
use unicorn::kernels::{
    Activations, ExpertMatrices, Experts, Matrix, Operand, PairActivations, RmsNorm, Router, Routing, RowsOf,
    Tiles, pair_blocks_bytes,
};
use unicorn::tensor::{Precision, Scheme};

use crate::support::kernel_bench::{
    BODIES, Bench, Fma, Stored, emulated_tiles, fma_of, schemes_of_large_kernels,
};
use crate::support::{in_turn, reference};

const EPS: f32 = 1e-6;

fn experts(count: usize, per_token: usize) -> Experts {
    Experts { count, per_token, renormalizes: true }
}

fn routing(b: &mut Bench, experts: &Experts, tokens: usize) -> Routing {
    let pairs = experts.pairs(tokens);
    let buffer = b.poisoned(Routing::bytes(pairs).iter().sum::<u64>() as usize);
    Routing::new(&buffer, pairs)
}

fn used(b: &mut Bench, routing: &Routing) -> u32 {
    b.download(&routing.used, 1)[0]
}

/// Logits as the shader adds them up: eight sums, each of every eighth group of four columns.
fn logits(x: &[f32], matrix: &[f32], factor: f32, fma: Fma) -> Vec<f32> {
    let of_expert = |row: &[f32]| {
        let mut sums = [0f32; 8];
        for (i, (w, v)) in row.chunks_exact(4).zip(x.chunks_exact(4)).enumerate() {
            // Columns are normed 1024 at a time, which is a multiple of 32.
            let sum = &mut sums[i % 8];
            *sum = w.iter().zip(v).fold(*sum, |sum, (w, v)| fma(*w, *v, sum));
        }
        let [a, b, c, d, e, f, g, h] = sums;
        (((a + b) + (c + d)) + ((e + f) + (g + h))) * factor
    };
    matrix.chunks_exact(x.len()).map(of_expert).collect()
}

/// The experts with the largest logits. Equal ones are in the order of their numbers.
fn chosen(logits: &[f32], per_token: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let value = |expert: u32| logits[expert as usize];
    order.sort_by(|a, b| value(*b).partial_cmp(&value(*a)).unwrap().then(a.cmp(b)));
    order.truncate(per_token);
    order
}

#[test]
fn routes_are_those_of_the_twin_to_the_bit() {
    for (bodies, (count, per_token, renormalizes)) in BODIES.into_iter().flat_map(|bodies| {
        [(8, 2, true), (128, 8, true), (37, 5, false), (256, 1, true)].map(|of| (bodies, of))
    }) {
        let experts = Experts { count, per_token, renormalizes };
        let mut b = Bench::with_bodies(&crate::support::device(), 5, bodies);
        b.make_experts(experts, Scheme::F32, Precision::F32, bodies);
        let fma = fma_of(&mut b);
        for (tokens, dim) in [(1, 96), (5, 1028), (3, 2816)] {
            // With these numbers and no epsilon, the norm is 1 exactly.
            let x: Vec<f32> = (0..tokens * dim).map(|_| if b.rng.random() { 1.0 } else { -1.0 }).collect();
            let weight: Vec<f32> = b.random(dim, 1.0);
            let mut matrix = b.random(count * dim, 0.1);
            // Experts with equal logits.
            let copied: Vec<f32> = matrix[..dim].to_vec();
            matrix[(count - 1) * dim..].copy_from_slice(&copied);
            matrix[count / 2 * dim..][..dim].copy_from_slice(&copied);
            let scales = b.random(count, 2.0);
            let router = Router {
                matrix: b.upload(&matrix),
                norm: RmsNorm { weight: b.upload(&weight), eps: 0.0 },
                factor: 0.375,
                scales: (count != 37).then(|| b.upload(&scales)),
            };
            let (input, routing) = (b.activations(&x, dim), routing(&mut b, &experts, tokens));
            b.run(|k, r| {
                r.fill(&routing.used, 7);
                k.route(r, &input, &router, &routing, tokens);
            });
            // The experts of more tokens are counted when they are grouped.
            assert_eq!(used(&mut b, &routing), if tokens == 1 { 7 + per_token as u32 } else { 7 });
            let pairs = experts.pairs(tokens);
            let ids: Vec<u32> = b.download(&routing.experts, pairs);
            let weights: Vec<f32> = b.download(&routing.weights, pairs);
            for (token, x) in x.chunks_exact(dim).enumerate() {
                let normed: Vec<f32> = x.iter().zip(&weight).map(|(x, w)| x * w).collect();
                let logits = logits(&normed, &matrix, 0.375, fma);
                let expected = chosen(&logits, per_token);
                let of_token = token * per_token..(token + 1) * per_token;
                assert_eq!(ids[of_token.clone()], expected, "{count} experts, token {token}");
                let share =
                    |expert: u32| f64::from(logits[expert as usize] - logits[expected[0] as usize]).exp();
                let all: f64 = match renormalizes {
                    true => expected.iter().map(|expert| share(*expert)).sum(),
                    false => (0..count as u32).map(share).sum(),
                };
                for (expert, got) in expected.iter().zip(&weights[of_token]) {
                    let scale = if count == 37 { 1.0 } else { f64::from(scales[*expert as usize]) };
                    let off = f64::from(*got) - share(*expert) / all * scale;
                    assert!(off.abs() <= 1e-5, "{count} experts, token {token}: {off}");
                }
            }
        }
    }
}

/// A NaN may reach the router from a damaged step. No product may then read beyond the experts.
#[test]
fn a_token_of_nans_has_different_experts() {
    let experts = experts(128, 8);
    for bodies in BODIES {
        let mut b = Bench::with_bodies(&crate::support::device(), 6, bodies);
        b.make_experts(experts, Scheme::F32, Precision::F32, bodies);
        let (tokens, dim) = (2, 64);
        let mut x = b.random(tokens * dim, 1.0);
        x[3] = f32::NAN;
        let (matrix, weight) = (b.random(128 * dim, 1.0), vec![1f32; dim]);
        let norm = RmsNorm { weight: b.upload(&weight), eps: EPS };
        let router = Router { matrix: b.upload(&matrix), norm, factor: 1.0, scales: None };
        let (input, routing) = (b.activations(&x, dim), routing(&mut b, &experts, tokens));
        b.run(|k, r| k.route(r, &input, &router, &routing, tokens));
        let mut ids: Vec<u32> = b.download(&routing.experts, 8);
        ids.sort_unstable();
        ids.dedup();
        assert!(ids.len() == 8 && ids.iter().all(|id| *id < 128), "{ids:?}");
    }
}

/// The experts of pairs: random, all tokens at the same experts, and each token at others.
fn choices(b: &mut Bench, experts: &Experts, tokens: usize) -> Vec<Vec<u32>> {
    let Experts { count, per_token, .. } = *experts;
    let random = (0..tokens).flat_map(|_| {
        let mut all: Vec<u32> = (0..count as u32).collect();
        all.shuffle(&mut b.rng);
        all.truncate(per_token);
        all
    });
    let random = random.collect();
    let same = (0..tokens).flat_map(|_| (0..per_token).rev().map(|rank| rank as u32 + 1)).collect();
    let others = (0..tokens * per_token).map(|pair| (pair % count) as u32).collect();
    vec![random, same, others]
}

#[test]
fn pairs_are_grouped_by_expert_whatever_the_routing_is() {
    for (bodies, (count, per_token, tokens)) in BODIES
        .into_iter()
        .flat_map(|bodies| [(8, 2, 3), (128, 8, 17), (128, 8, 300), (256, 3, 64)].map(|of| (bodies, of)))
    {
        let experts = experts(count, per_token);
        let mut b = Bench::with_bodies(&crate::support::device(), 7, bodies);
        b.make_experts(experts, Scheme::F32, Precision::F32, bodies);
        let (width, hidden, pairs) = (32, 64, experts.pairs(tokens));
        let [gate, up] = [(); 2].map(|()| {
            b.matrix(&vec![0.0; count * width * hidden], count * width, hidden, Scheme::F32, u64::MAX)
        });
        let down = b.matrix(&vec![0.0; count * width * hidden], count * hidden, width, Scheme::F32, u64::MAX);
        let matrices = ExpertMatrices { gate: &gate, up: &up, down: &down };
        for chosen in choices(&mut b, &experts, tokens) {
            let routing = Routing { experts: b.upload(&chosen), ..routing(&mut b, &experts, tokens) };
            b.run(|k, r| {
                r.fill(&routing.used, 0);
                k.group_pairs(r, matrices, &routing, tokens);
            });
            let mut order: Vec<usize> = (0..pairs).collect();
            order.sort_by_key(|pair| chosen[*pair]);
            let rows: Vec<u32> = b.download(&routing.rows, pairs);
            let positions: Vec<u32> = b.download(&routing.positions, pairs);
            let expected: Vec<u32> = order.iter().map(|pair| (pair / per_token) as u32).collect();
            assert_eq!(rows, expected);
            let mut distinct = chosen.clone();
            distinct.sort_unstable();
            distinct.dedup();
            assert_eq!(used(&mut b, &routing), distinct.len() as u32);
            for (place, pair) in order.iter().enumerate() {
                assert_eq!(positions[*pair] as usize, place);
            }
            let groups: Vec<u32> = b.download(&routing.groups, 6);
            let count_of_items = groups[0] as usize;
            assert_eq!(groups, [groups[0], 1, 1, groups[0], 2, 1], "one tile of rows, and two");
            assert!(count_of_items <= pairs, "{count_of_items} items");
            let items: Vec<[u32; 4]> = b.download(&routing.items, count_of_items);
            let mut next = 0;
            for [expert, first, places, _] in items {
                assert_eq!(first, next, "items follow each other");
                assert!(places > 0);
                let of_item = &order[first as usize..(first + places) as usize];
                assert!(of_item.iter().all(|pair| chosen[*pair] == expert), "expert {expert}");
                next = first + places;
            }
            assert_eq!(next as usize, pairs);
        }
    }
}

/// One expert of a matrix of all experts.
fn of_expert(all: &Stored, expert: usize, rows: usize) -> Stored {
    let Stored { shape: [all_rows, cols], scheme, blocks, scales, values } = all;
    let part = |bytes: &[u8]| {
        let of_each = bytes.len() / (all_rows / rows);
        bytes[expert * of_each..(expert + 1) * of_each].to_vec()
    };
    Stored {
        shape: [rows, *cols],
        scheme: *scheme,
        blocks: part(blocks),
        scales: part(scales),
        values: values[expert * rows * cols..(expert + 1) * rows * cols].to_vec(),
    }
}

struct OfPairs {
    gate: Activations,
    up: Activations,
    gated: Operand,
    out: Activations,
}

fn of_pairs(
    b: &mut Bench,
    experts: &Experts,
    tokens: usize,
    [width, hidden]: [usize; 2],
    is_fast: bool,
) -> OfPairs {
    let rows = experts.pair_rows(tokens);
    let (gate, up, out) = (b.empty(rows, width), b.empty(rows, width), b.empty(rows, hidden));
    let gated = match is_fast {
        true => {
            let bytes = pair_blocks_bytes(experts, tokens, width) as usize;
            Operand::blocks(&Quantized::new(b.poisoned(bytes), width))
        }
        false => Operand::floats(&gate),
    };
    OfPairs { gate, up, gated, out }
}

/// What experts compute has the bits of the same products of a dense network, whatever else the step computes. The ways
/// take turns ([`in_turn`]).
#[test]
fn experts_compute_the_bits_of_dense_networks() {
    let (width, hidden) = (64, 96);
    for (index, &scheme) in schemes_of_large_kernels().iter().enumerate() {
        let ways = [
            (Tiles::COUNTED, Precision::Fast),
            (Tiles::Cpu, Precision::Fast),
            (BODIES[index % 2], Precision::F32),
            (emulated_tiles(index), Precision::Fast),
        ];
        for &(tiles, precision) in in_turn(&ways, index) {
            let experts = experts(6, 3);
            let mut b = Bench::with_bodies(&crate::support::device(), 8, tiles);
            b.make_experts(experts, scheme, precision, tiles);
            let stored = [(width, hidden), (width, hidden), (hidden, width)]
                .map(|(rows, cols)| (rows, b.stored(6 * rows, cols, scheme)));
            let [gate, up, down] =
                stored.each_ref().map(|(_, stored)| b.matrix_of(&stored.tensor(), scheme, u64::MAX));
            let single: Vec<[Matrix; 3]> = (0..6)
                .map(|expert| {
                    stored.each_ref().map(|(rows, stored)| {
                        b.matrix_of(&of_expert(stored, expert, *rows).tensor(), scheme, u64::MAX)
                    })
                })
                .collect();
            let is_fast = precision == Precision::Fast;
            // Subgroups multiply more than 32 pairs of an expert, in tiles of 64 and of 128.
            let by_subgroups = matches!(tiles, Tiles::Gpu(gpu) if gpu.has_subgroups());
            for tokens in if by_subgroups { [2, 70, 140] } else { [1, 2, 40] } {
                let x = b.random(tokens * hidden, 1.0);
                let (floats, blocks) = (b.activations(&x, hidden), b.quantized(tokens, hidden));
                b.run(|k, r| k.quantize(r, &floats, &blocks, tokens));
                let input = if is_fast { Operand::blocks(&blocks) } else { Operand::floats(&floats) };
                // Each expert's results for all tokens.
                let dense: Vec<Vec<f32>> = single
                    .iter()
                    .map(|[gate, up, down]| {
                        let [a, c] = [(); 2].map(|()| b.empty(tokens, width));
                        let (quantized, out) = (b.quantized(tokens, width), b.empty(tokens, hidden));
                        let to = if is_fast { Operand::blocks(&quantized) } else { Operand::floats(&a) };
                        b.run(|k, r| {
                            k.gated(r, [gate, up], &input, [&a, &c], &to, tokens);
                            k.matmul(r, &[(down, &out)], &to, tokens);
                        });
                        b.rows(&out, tokens)
                    })
                    .collect();
                for chosen in choices(&mut b, &experts, tokens) {
                    let routing = routing(&mut b, &experts, tokens);
                    let routing = Routing { experts: b.upload(&chosen), ..routing };
                    let matrices = ExpertMatrices { gate: &gate, up: &up, down: &down };
                    if tokens == 1 {
                        // The router makes the lists of one token.
                        let items: Vec<[u32; 4]> =
                            (0..).zip(&chosen).map(|(rank, expert)| [*expert, rank, 1, 0]).collect();
                        upload_to(&mut b, &routing.items, &items);
                        upload_to(&mut b, &routing.rows, &[0u32; 3]);
                        upload_to(&mut b, &routing.positions, &[0u32, 1, 2]);
                    }
                    let OfPairs { gate, up, gated, out } =
                        of_pairs(&mut b, &experts, tokens, [width, hidden], is_fast);
                    let to = PairActivations { gate: &gate, up: &up, gated: &gated, out: &out };
                    b.run(|k, r| {
                        k.group_pairs(r, matrices, &routing, tokens);
                        k.expert_products(r, matrices, &input, &to, &routing, tokens);
                    });
                    let pairs = experts.pairs(tokens);
                    let (got, positions) =
                        (b.rows(&out, pairs), b.download::<u32>(&routing.positions, pairs));
                    for (pair, expert) in chosen.iter().enumerate() {
                        let (at, token) = (positions[pair] as usize * hidden, pair / 3 * hidden);
                        assert_eq!(
                            got[at..at + hidden],
                            dense[*expert as usize][token..token + hidden],
                            "{scheme} {tiles:?} {precision:?}, pair {pair} of {tokens} tokens"
                        );
                    }
                }
            }
        }
    }
}

fn upload_to<T: bytemuck::NoUninit>(b: &mut Bench, to: &Buffer, data: &[T]) {
    let from = b.upload(data);
    let bytes = size_of_val(data) as u64;
    b.run(|_, r| r.copy(&from, to, bytes));
}

#[test]
fn results_of_experts_are_added_in_the_order_of_their_ranks() {
    let experts = experts(16, 4);
    for bodies in BODIES {
        let mut b = Bench::with_bodies(&crate::support::device(), 9, bodies);
        b.make_experts(experts, Scheme::F32, Precision::F32, bodies);
        let fma = fma_of(&mut b);
        for (tokens, dim) in [(1, 96), (3, 1100), (7, 2816)] {
            let pairs = experts.pairs(tokens);
            let (x, weights, before) =
                (b.random(pairs * dim, 1.0), b.random(pairs, 1.0), b.random(tokens * dim, 1.0));
            let mut positions: Vec<u32> = (0..pairs as u32).collect();
            positions.shuffle(&mut b.rng);
            let [own, of_sum] = [(); 2].map(|()| b.random(dim, 1.0));
            let norms = [&own, &of_sum].map(|weight| RmsNorm { weight: b.upload(weight), eps: EPS });
            let routing = routing(&mut b, &experts, tokens);
            let routing = Routing { weights: b.upload(&weights), positions: b.upload(&positions), ..routing };
            let from = b.activations(&x, dim);
            let (plain, normed) = (b.empty(tokens, dim), b.activations(&before, dim));
            b.run(|k, r| {
                k.combine(r, &from, &routing, None, &plain, tokens);
                k.combine(r, &from, &routing, Some(norms.each_ref()), &normed, tokens);
            });
            let (plain, normed) = (b.rows(&plain, tokens), b.rows(&normed, tokens));
            for token in 0..tokens {
                let sum: Vec<f32> = (0..dim)
                    .map(|col| {
                        let value = |rank: usize| x[positions[token * 4 + rank] as usize * dim + col];
                        let first = weights[token * 4] * value(0);
                        (1..4).fold(first, |sum, rank| fma(weights[token * 4 + rank], value(rank), sum))
                    })
                    .collect();
                assert_eq!(plain[token * dim..(token + 1) * dim], sum, "token {token}");
                let wide = |row: &[f32]| -> Vec<f64> { row.iter().map(|x| f64::from(*x)).collect() };
                let dense =
                    reference::rms_norm(&wide(&before[token * dim..(token + 1) * dim]), &own, EPS.into());
                let sparse = reference::rms_norm(&wide(&sum), &of_sum, EPS.into());
                for (col, (a, c)) in dense.iter().zip(&sparse).enumerate() {
                    let off = f64::from(normed[token * dim + col]) - (a + c);
                    assert!(off.abs() <= 1e-5, "token {token}, column {col}: {off}");
                }
            }
        }
    }
}

#[test]
fn moments_of_experts_sum_the_squares_of_their_rows() {
    let experts = experts(8, 3);
    for bodies in BODIES {
        let mut b = Bench::with_bodies(&crate::support::device(), 8, bodies);
        b.make_experts(experts, Scheme::F32, Precision::F32, bodies);
        for (tokens, width) in [(1, 4), (5, 64), (17, 132)] {
            let pairs = experts.pairs(tokens);
            for ids in choices(&mut b, &experts, tokens) {
                let mut positions: Vec<u32> = (0..pairs as u32).collect();
                positions.shuffle(&mut b.rng);
                let routing = Routing {
                    experts: b.upload(&ids),
                    positions: b.upload(&positions),
                    ..routing(&mut b, &experts, tokens)
                };
                for rows in [RowsOf::Tokens, RowsOf::Pairs] {
                    let (count, row): (usize, &dyn Fn(usize) -> usize) = match rows {
                        RowsOf::Tokens => (tokens, &|pair| pair / experts.per_token),
                        RowsOf::Pairs => (pairs, &|pair| positions[pair] as usize),
                    };
                    let (x, before) = (b.random(count * width, 3.0), b.random(experts.count * width, 1.0));
                    let (input, sums) = (b.activations(&x, width), b.upload(&before));
                    b.run(|k, r| k.expert_moments(r, &input, rows, &routing, &sums, tokens));
                    let got: Vec<f32> = b.download(&sums, experts.count * width);
                    for (i, (got, before)) in got.iter().zip(&before).enumerate() {
                        let (expert, column) = (i / width, i % width);
                        let of_expert = (0..pairs).filter(|pair| ids[*pair] as usize == expert);
                        let squares: f64 =
                            of_expert.map(|pair| f64::from(x[row(pair) * width + column]).powi(2)).sum();
                        let (before, got) = (f64::from(*before), f64::from(*got));
                        let off = (got - before - squares).abs();
                        assert!(
                            off <= 2e-6 * (before.abs() + squares),
                            "{rows:?} of {tokens} tokens, expert {expert}, column {column}: off by {off}"
                        );
                    }
                }
            }
        }
    }
}
