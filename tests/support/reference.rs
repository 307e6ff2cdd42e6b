//! CPU references of the shaders, in f64 unless the order of operations matters. The product has no CPU path.

use half::f16;

/// `x[t, :] . w[r, :]` for all t, r.
pub fn matmul(x: &[f32], w: &[f32], tokens: usize, rows: usize, cols: usize) -> Vec<f64> {
    let mut y = Vec::with_capacity(tokens * rows);
    for x in x.chunks_exact(cols).take(tokens) {
        for w in w.chunks_exact(cols).take(rows) {
            y.push(x.iter().zip(w).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum());
        }
    }
    y
}

/// `sum |x w|` of the same products. Rounding errors are relative to it.
pub fn matmul_magnitude(x: &[f32], w: &[f32], tokens: usize, rows: usize, cols: usize) -> Vec<f64> {
    let abs = |v: &[f32]| v.iter().map(|x| x.abs()).collect::<Vec<_>>();
    matmul(&abs(x), &abs(w), tokens, rows, cols)
}

/// The number of columns that share a scale in int8 activations.
pub const BLOCK_COLS: usize = 32;

/// The number of blocks in a segment of a row with `blocks` blocks. The products are summed in each segment first, and
/// then over the segments (`shaders/common/fast.glsl`).
pub fn segment_blocks(blocks: usize) -> usize {
    blocks.div_ceil(8).max(4)
}

/// A row of activations in int8. For each of two digits, it has the integers, padded with zeros to whole blocks, and
/// the scale of each block. The first scale is negative if the block has a second digit. If not, the second scale is 0.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizedActivations {
    pub q: [Vec<i8>; 2],
    pub scales: [Vec<f32>; 2],
}

/// A block in int8, padded with zeros, and its scale. A block whose largest value is below 2^-90 counts as 0.
fn quantized_block(block: &[f32]) -> ([i8; BLOCK_COLS], f32) {
    let largest = block.iter().fold(0f32, |a, b| a.max(b.abs()));
    let is_zero = largest < 2f32.powi(-90);
    let inverse = if is_zero { 0.0 } else { 127.0 / largest };
    let mut q = [0; BLOCK_COLS];
    for (q, v) in q.iter_mut().zip(block) {
        *q = (v * inverse).round_ties_even().clamp(-127.0, 127.0) as i8;
    }
    (q, if is_zero { 0.0 } else { largest * (1.0 / 127.0) })
}

impl QuantizedActivations {
    pub fn of(row: &[f32], fma: fn(f32, f32, f32) -> f32) -> QuantizedActivations {
        let mut all = QuantizedActivations { q: Default::default(), scales: Default::default() };
        for block in row.chunks(BLOCK_COLS) {
            let (q, scale) = quantized_block(block);
            let magnitudes: i32 = q.iter().map(|q| i32::from(*q).abs()).sum();
            // With an outlier in the block, the integers of the other values are small, and a second digit is needed.
            let has_second = scale > 0.0 && magnitudes < 14 * 32;
            let rest: Vec<f32> = block.iter().zip(q).map(|(v, q)| fma(-f32::from(q), scale, *v)).collect();
            let second = if has_second { quantized_block(&rest) } else { ([0; BLOCK_COLS], 0.0) };
            let first = (q, if has_second { -scale } else { scale });
            for (digit, (q, scale)) in [first, second].into_iter().enumerate() {
                all.q[digit].extend(q);
                all.scales[digit].push(scale);
            }
        }
        all
    }
}

/// The product of a row of activations and a row of weights as `fast` defines it, to the bit. `scales` has (s, m) of
/// each group of `group` columns, so that w = s q + m. `row_scale` multiplies the result. `fma` is that of the device,
/// which may round twice.
pub fn fast_product(
    x: &QuantizedActivations,
    q: &[i8],
    (group, scales, shifted): (usize, &[(f32, f32)], bool),
    row_scale: Option<f32>,
    fma: fn(f32, f32, f32) -> f32,
) -> f32 {
    let blocks = x.scales[0].len();
    // If the group size is not a multiple of the block size, half blocks are used.
    let unit =
        if row_scale.is_some() || group.is_multiple_of(BLOCK_COLS) { BLOCK_COLS } else { BLOCK_COLS / 2 };
    let segment = |first: usize| {
        let mut acc = 0f32;
        let all = (first..(first + segment_blocks(blocks)).min(blocks)).flat_map(|b| [(b, 0), (b, 1)]);
        for (block, digit) in all {
            if digit == 1 && x.scales[0][block] >= 0.0 {
                continue;
            }
            let x_scale = x.scales[digit][block].abs();
            for at in (block * BLOCK_COLS..(block + 1) * BLOCK_COLS).step_by(unit) {
                let columns = at..(at + unit).min(q.len());
                if row_scale.is_none() && columns.is_empty() {
                    // A half block without weights adds +0, which changes nothing.
                    continue;
                }
                let ints = |v: &[i8]| v.iter().map(|v| i32::from(*v)).collect::<Vec<_>>();
                let (a, w) = (ints(&x.q[digit][at..at + columns.len()]), ints(&q[columns]));
                let d: i32 = a.iter().zip(&w).map(|(a, w)| a * w).sum();
                if row_scale.is_some() {
                    acc = fma(d as f32, x_scale, acc);
                    continue;
                }
                let (s, m) = scales[at / group];
                acc = fma(d as f32, s * x_scale, acc);
                if shifted {
                    acc = fma(a.iter().sum::<i32>() as f32, m * x_scale, acc);
                }
            }
        }
        acc
    };
    let sum = (0..blocks).step_by(segment_blocks(blocks)).map(segment).reduce(|a, b| a + b);
    sum.unwrap_or(0.0) * row_scale.unwrap_or(1.0)
}

/// RMSNorm of one row. Gemma's `weight` is one plus the stored value.
pub fn rms_norm(x: &[f64], weight: &[f32], eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (mean + eps).sqrt();
    x.iter().zip(weight).map(|(v, w)| v * factor * f64::from(*w)).collect()
}

/// How AltUp updates a row of four streams. `router` is `[4, width]`.
pub struct AltUp<'a> {
    pub norm: &'a [f32],
    pub router: &'a [f32],
    pub coefficients: &'a [f32],
    pub eps: f64,
}

impl AltUp<'_> {
    /// The numbers that weigh the coefficients, of a row of the first stream.
    fn numbers(&self, x: &[f64]) -> Vec<f64> {
        let normed = rms_norm(x, self.norm, self.eps);
        let dot = |weights: &[f32]| normed.iter().zip(weights).map(|(x, w)| x * f64::from(*w)).sum::<f64>();
        self.router.chunks_exact(x.len()).map(|weights| (dot(weights) / x.len() as f64).tanh()).collect()
    }

    /// The product of a row of coefficients with the numbers.
    fn factor(&self, row: usize, numbers: &[f64]) -> f64 {
        self.coefficients[4 * row..][..4].iter().zip(numbers).map(|(c, n)| f64::from(*c) * n).sum()
    }

    /// The prediction of all streams.
    pub fn predict(&self, streams: &[Vec<f64>; 4]) -> [Vec<f64>; 4] {
        let numbers = self.numbers(&streams[0]);
        std::array::from_fn(|i| {
            let factors = [0, 1, 2, 3].map(|j| self.factor(4 * i + j, &numbers));
            let sum = |at: usize| (0..4).map(|j| factors[j] * streams[j][at]).sum::<f64>();
            (0..streams[i].len()).map(|at| streams[i][at] + sum(at)).collect()
        })
    }

    /// The correction of all streams, where `predicted` is the prediction of the first one.
    pub fn correct(&self, streams: &[Vec<f64>; 4], predicted: &[f64]) -> [Vec<f64>; 4] {
        let numbers = self.numbers(&streams[0]);
        std::array::from_fn(|i| {
            let factor = 1.0 + self.factor(i, &numbers);
            let before = if i == 0 { predicted } else { &streams[i] };
            let change = |at: usize| streams[0][at] - predicted[at];
            (0..before.len()).map(|at| before[at] + change(at) * factor).collect()
        })
    }
}

/// A row with the root mean square of another one.
pub fn with_size_of(target: &[f64], x: &[f64]) -> Vec<f64> {
    let mean_square = |row: &[f64]| row.iter().map(|v| v * v).sum::<f64>() / row.len() as f64;
    let factor = (mean_square(target) / mean_square(x).max(1e-5)).sqrt();
    x.iter().map(|v| v * factor).collect()
}

/// What exceeds the mean of a row by so many standard deviations.
pub fn cutoff(x: &[f64], deviations: f64) -> Vec<f64> {
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / x.len() as f64;
    x.iter().map(|v| (v - mean - deviations * variance.sqrt()).max(0.0)).collect()
}

/// LayerNorm: the mean becomes 0 and the deviation 1, before the weights and what is added.
pub fn layer_norm(x: &[f64], weight: &[f32], shift: &[f32], eps: f64) -> Vec<f64> {
    let n = x.len() as f64;
    let mean = x.iter().sum::<f64>() / n;
    let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
    let factor = 1.0 / (variance + eps).sqrt();
    let affine = |(v, (w, s)): (&f64, (&f32, &f32))| (v - mean) * factor * f64::from(*w) + f64::from(*s);
    x.iter().zip(weight.iter().zip(shift)).map(affine).collect()
}

/// RoPE of one head: rotates its halves by `angle[i] = position * frequency[i]`.
pub fn rope(x: &[f64], angles: &[f64]) -> Vec<f64> {
    let half = x.len() / 2;
    let mut y = vec![0.0; x.len()];
    for i in 0..half {
        let (sin, cos) = angles[i].sin_cos();
        y[i] = x[i] * cos - x[i + half] * sin;
        y[i + half] = x[i + half] * cos + x[i] * sin;
    }
    y
}

/// Attention of one query head: the softmax-weighted sum of `values`. `keys` and `values` are those that the token
/// sees.
pub fn attention(query: &[f32], keys: &[&[f32]], values: &[&[f32]]) -> Vec<f64> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let scores: Vec<f64> = keys.iter().map(|k| dot(query, k)).collect();
    let max = scores.iter().cloned().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    (0..query.len())
        .map(|d| weights.iter().zip(values).map(|(w, v)| w * f64::from(v[d])).sum::<f64>() / sum)
        .collect()
}

/// A row of the KV cache in int8: its scale, and integers from -127 to 127. Ties are rounded to even.
pub fn kv_int8(row: &[f32]) -> (f32, Vec<i8>) {
    let largest = row.iter().fold(0f32, |a, b| a.max(b.abs()));
    let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    (largest / 127.0, row.iter().map(|v| (v * inverse).round_ties_even() as i8).collect())
}

pub fn swiglu(gate: f64, up: f64) -> f64 {
    gate / (1.0 + (-gate).exp()) * up
}

pub fn geglu(gate: f64, up: f64) -> f64 {
    let u = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate.powi(3));
    0.5 * gate * (1.0 + u.tanh()) * up
}

/// Philox4x32-10 (Salmon et al., 2011).
pub fn philox(mut key: [u32; 2], mut counter: [u32; 4]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(counter[0]) * 0xD251_1F53;
        let b = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

/// Penalties of a draw. The values 1, 0 and 0 change nothing.
pub struct Penalties {
    pub repetition: f32,
    pub presence: f32,
    pub frequency: f32,
}

/// Logits after penalties, biases and a mask (true = allowed), as in vLLM. The repetition penalty (Keskar et al., CTRL,
/// 2019) is for ids in the prompt or the answer. Presence and frequency penalties (OpenAI) are for ids in the answer.
/// Forbidden ids get -infinity.
pub fn adjusted(
    logits: &[f32],
    prompt: &[u32],
    answer: &[u32],
    penalties: &Penalties,
    bias: &[(u32, f32)],
    mask: Option<&[bool]>,
) -> Vec<f32> {
    let mut y = logits.to_vec();
    for (id, y) in (0u32..).zip(&mut y) {
        let count = answer.iter().filter(|&&a| a == id).count();
        if count > 0 || prompt.contains(&id) {
            *y = if *y > 0.0 { *y / penalties.repetition } else { *y * penalties.repetition };
        }
        *y -= penalties.frequency * count as f32;
        if count > 0 {
            *y -= penalties.presence;
        }
    }
    for (id, bias) in bias {
        y[*id as usize] += bias;
    }
    for (y, allowed) in y.iter_mut().zip(mask.unwrap_or(&[])) {
        if !allowed {
            *y = f32::NEG_INFINITY;
        }
    }
    y
}

/// Log probabilities of a row of logits.
pub fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().cloned().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|l| (f64::from(*l) - f64::from(max)).exp()).sum();
    logits.iter().map(|l| f64::from(*l) - f64::from(max) - sum.ln()).collect()
}

/// The difference of the distributions of `got` and `expected`, over all rows: the mean KL divergence in nats, and the
/// share of rows with the same best id.
pub fn divergence(expected: &[f32], got: &[f32], vocab: usize) -> (f64, f64) {
    let (mut kl, mut top) = (0.0, 0);
    let best = |row: &[f32]| (0..vocab).rev().max_by(|a, b| row[*a].total_cmp(&row[*b]));
    for (e, g) in expected.chunks(vocab).zip(got.chunks(vocab)) {
        let (p, q) = (log_softmax(e), log_softmax(g));
        kl += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
        top += usize::from(best(e) == best(g));
    }
    let rows = (expected.len() / vocab) as f64;
    (kl / rows, top as f64 / rows)
}

/// The ids that temperature, min_p, top_k and top_p leave, with their probabilities. It sorts, as in textbooks and
/// unlike the shader. Ties at a threshold are kept.
pub fn filtered(logits: &[f32], temperature: f64, top_k: usize, top_p: f64, min_p: f64) -> Vec<(usize, f64)> {
    let max = logits.iter().cloned().fold(f32::NEG_INFINITY, f32::max);
    let mass = |l: f32| ((f64::from(l) - f64::from(max)) / temperature).exp();
    let mut left: Vec<(usize, f32)> = logits.iter().cloned().enumerate().collect();
    left.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if min_p > 0.0 {
        left.retain(|(_, l)| mass(*l) >= min_p);
    }
    if top_k > 0 && top_k < left.len() {
        let least = left[top_k - 1].1;
        left.retain(|(_, l)| *l >= least);
    }
    if top_p < 1.0 {
        let wanted = top_p * left.iter().map(|(_, l)| mass(*l)).sum::<f64>();
        let mut sum = 0.0;
        let last = left.iter().position(|(_, l)| {
            sum += mass(*l);
            sum >= wanted
        });
        let least = left[last.unwrap_or(left.len() - 1)].1;
        left.retain(|(_, l)| *l >= least);
    }
    let total: f64 = left.iter().map(|(_, l)| mass(*l)).sum();
    left.into_iter().map(|(id, l)| (id, mass(l) / total)).collect()
}

/// 1 / x, rounded to nearest with halves up, by long division (`shaders/common/mass.glsl`).
pub fn reciprocal(x: f32) -> f32 {
    let divisor = u64::from(x.to_bits() & 0x7f_ffff | 0x80_0000);
    let quotient = (1u64 << 48) / divisor;
    (quotient / 2 + quotient % 2) as f32 * f32::from_bits((230 - (x.to_bits() >> 23)) << 23)
}

/// The probability mass of 2^-t in units of 2^-40, in the shader's integers. It is 0 for t from 40 on.
pub fn mass(t: f32) -> u64 {
    if t >= 40.0 {
        return 0;
    }
    let whole = t as u32;
    let x = u64::from((((t - whole as f32) * 2f32.powi(31)) as u32) * 2);
    let coefficients = [5_479_739, 41_148_157, 238_334_300, 1_031_756_616, 2_977_044_038u64];
    let y = coefficients.into_iter().fold(469_656, |y, c| c - ((y * x) >> 32));
    let power = ((1 << 31) - ((y * x) >> 32) / 2).min((1 << 31) - 1);
    power << 9 >> whole
}

/// For each logit of a row, the number of powers of two below the largest one, in f32 as in the sampler.
pub fn powers_below(logits: &[f32], temperature: f32) -> Vec<f32> {
    let max = logits.iter().cloned().fold(f32::MIN, f32::max);
    let temperature = temperature.clamp(1e-6, 1e28);
    let z = |l: f32| (l * 0.5 - max * 0.5).max(-100.0 * temperature) * (reciprocal(temperature) * 2.0);
    logits.iter().map(|l| z(*l) * -std::f32::consts::LOG2_E).collect()
}

/// The ids that remain with the sampler's integer masses, in ascending order. Logits below `least`, which is the
/// threshold of min_p, are removed. Ids without mass are removed as well, because no noise can lift them above the
/// largest.
pub fn left(logits: &[f32], temperature: f32, top_k: usize, top_p: f32, least: f32) -> Vec<usize> {
    let powers = powers_below(logits, temperature);
    let may_come = |id: &usize| logits[*id] > f32::MIN && powers[*id] < 40.0 && logits[*id] >= least;
    let mut left: Vec<usize> = (0..logits.len()).filter(may_come).collect();
    left.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    let keep = |left: &mut Vec<usize>, last: usize| {
        let least = logits[left[last]];
        left.retain(|id| logits[*id] >= least);
    };
    if (1..left.len().min(logits.len())).contains(&top_k) {
        keep(&mut left, top_k - 1);
    }
    if top_p < 1.0 {
        let total: u64 = left.iter().map(|id| mass(powers[*id])).sum();
        let part = (top_p.max(0.0) * 2f32.powi(24)) as u128;
        let wanted = ((u128::from(total) * part) >> 24) as u64;
        let mut sum = 0;
        let last = left.iter().position(|id| {
            sum += mass(powers[*id]);
            sum >= wanted
        });
        keep(&mut left, last.expect("the sum reaches the wanted part"));
    }
    left.sort_unstable();
    left
}

/// The number of ids in each bin of the sampler, and their mass. All logits must be finite and allowed.
pub fn bins(logits: &[f32], temperature: f32, bins: usize) -> Vec<(u32, u64)> {
    let powers = powers_below(logits, temperature);
    let most = powers.iter().cloned().fold(0.0, f32::max).min(40.0);
    let scale = f32::from_bits((273 - (most.to_bits() >> 23).max(20)) << 23);
    let ratio = u64::from(u32::MAX / ((most * scale) as u32 + 1));
    let mut all = vec![(0, 0); bins];
    for t in powers.into_iter().filter(|t| *t < 40.0) {
        let bin = &mut all[(((t * scale) as u64 * bins as u64 * ratio) >> 32) as usize];
        *bin = (bin.0 + 1, bin.1 + mass(t));
    }
    all
}

/// The shader's draw from `candidates`: the largest logit / temperature plus Gumbel noise. Returns the id and its
/// margin.
pub fn draw(
    logits: &[f32],
    candidates: &[usize],
    temperature: f64,
    seed: u64,
    position: u32,
) -> (usize, f64) {
    let mut scored: Vec<(f64, usize)> = candidates
        .iter()
        .map(|&id| {
            let random = philox([seed as u32, (seed >> 32) as u32], [position, id as u32 / 4, 0, 0])[id % 4];
            let v = (f64::from(random) + 0.5) / 4294967296.0;
            (f64::from(logits[id]) / temperature - (-(-v).ln_1p()).ln(), id)
        })
        .collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    (scored[0].1, scored.get(1).map_or(f64::INFINITY, |second| scored[0].0 - second.0))
}

/// Computes the values of a quantized row.
pub fn dequantize_row(q: &[i8], scales: &[f16], group: usize, out: &mut [f32]) {
    assert_eq!((out.len(), scales.len()), (q.len(), q.len().div_ceil(group)), "a row and its scales");
    for ((q, out), scale) in q.chunks(group).zip(out.chunks_mut(group)).zip(scales) {
        let s = scale.to_f32();
        for (q, out) in q.iter().zip(out) {
            *out = *q as f32 * s;
        }
    }
}
