//! The inputs of the self-test's cases: numbers made by counting, the same on every machine.
//!
//! The stored results hold for every model, so nothing here depends on a model. Heads of any dimension have four values
//! ([`class`]), each repeated over a quarter of the head, so that norms, rotations, scores and sums of values equal the
//! results of a head of dimension four. Query heads repeat every four. Activations of products, keys and values are
//! integer multiples of a step, and the largest is 127 steps. So int8 and f16 hold them exactly, and one result serves
//! every precision and every type of the cache.

use half::{bf16, f16};

use crate::tensor::{Bits, QuantizedRow, Scales, Scheme, TILE_ROWS, clear_tiles, pack_plain_row, pack_row};

/// Rows and columns of the matrices: three tiles of rows and nine blocks of columns, the last tile with a tail.
pub const ROWS: usize = 72;
pub const COLS: usize = 288;
/// The most tokens of a product.
pub const TOKENS: usize = 128;
/// Rows of a product whose results are stored, and the ids and columns of the embedding whose results are stored.
pub const PRODUCT_ROWS: [usize; 4] = [0, 31, 32, 71];
pub const EMBEDDED_IDS: [usize; 4] = [0, 71, 40, 33];
pub const EMBEDDED_COLS: [usize; 2] = [17, 287];
pub const EMBEDDING_SCALE: f32 = 3.0;

/// Rows and width of the inputs of norms, gated products and sums of states. One workgroup needs several passes for this width.
pub const NORM_ROWS: usize = 3;
pub const WIDTH: usize = 1100;
pub const NORM_COLS: [usize; 6] = [0, 5, 511, 1023, 1024, 1099];
/// A soft cap, about as large as the numbers.
pub const SOFTCAP: f32 = 0.75;
/// The standard deviations of a cutoff: it leaves about a third of the numbers.
pub const DEVIATIONS: f32 = 0.5;
pub const EPS: f32 = 1e-6;

/// Keys of the attended sequence, of which the last [`NEW_TOKENS`] are queries, and the window of the windowed case.
/// The keys are in two splits.
pub const KEYS: usize = 80;
pub const NEW_TOKENS: usize = 5;
pub const WINDOW: usize = 40;
pub const KV_HEADS: usize = 2;
pub const BLOCK_SIZE: usize = 16;
/// Positions of the sequence whose results are stored.
pub const POSITIONS: [usize; 2] = [75, 79];
/// Position and slot of the cache of each token that is stored.
pub const STORED: [(usize, usize); 3] = [(2, 5), (1, 0), (3, 11)];
pub const Q_SCALE: f32 = 0.0625;

/// Logits of a row, in two chunks; and rows.
pub const VOCAB: usize = 4100;
pub const DRAWS: usize = 3;

/// A number from -127 to 127, by the place `i` in the list `list`.
pub fn number(list: u32, i: usize) -> i32 {
    let mut x = (i as u32).wrapping_mul(0x9e37_79b9) ^ list.wrapping_mul(0x85eb_ca6b);
    for factor in [0x7feb_352d, 0x846c_a68b] {
        x = (x ^ (x >> 16)).wrapping_mul(factor);
    }
    ((x >> 8) % 255) as i32 - 127
}

fn fraction(list: u32, i: usize) -> f32 {
    number(list, i) as f32 / 128.0
}

/// Which of the four values dimension `d` of a head of `head_dim` has. RoPE rotates 0 with 2, and 1 with 3.
pub fn class(d: usize, head_dim: usize) -> usize {
    2 * usize::from(d >= head_dim / 2) + d % 2
}

/// The activation that a product takes. The second block of columns has an outlier, for which int8 needs a second
/// digit. Tokens that are the first or last of a tile have the same activations, others half of them.
pub fn activation(token: usize, col: usize) -> f32 {
    let of_block = match (col / 32, col % 32) {
        (1, 5) => 1016.0 / 128.0,
        (1, _) => (number(1, col) % 8) as f32 / 128.0,
        (_, 0) => 127.0 / 128.0,
        _ => fraction(1, col),
    };
    if token == 0 || (token + 1).is_power_of_two() { of_block } else { of_block / 2.0 }
}

/// The scheme whose results equal the results of `scheme`: a group that is wider than the matrices is as wide as they
/// are.
pub fn stored_scheme(scheme: Scheme) -> Scheme {
    match scheme {
        Scheme::Int { bits, group, scales } => Scheme::Int { bits, group: group.min(COLS as u32), scales },
        plain => plain,
    }
}

/// A row of integers of the matrix in `scheme`, which has integers.
pub fn quantized_row(scheme: Scheme, row: usize) -> QuantizedRow {
    let (group, scales) = scheme.grouping(COLS).expect("a scheme of integers");
    let (least, all) = match scheme {
        Scheme::Int { bits, scales, .. } if bits != Bits::Eight => {
            let all = 1 << bits.count();
            (if scales.is_symmetric() { -all / 2 } else { 0 }, all)
        }
        _ => (-128, 256),
    };
    let mut made = QuantizedRow::new(scheme, COLS);
    for (col, q) in made.q.iter_mut().enumerate() {
        *q = (least + number(2, row * COLS + col).rem_euclid(all)) as i8;
    }
    let eighths = |unit: f32, n: usize| unit * (1.0 + (n % 8) as f32 / 8.0);
    let half = |value: f32| f16::from_f32(value).to_le_bytes();
    let mut bytes = Vec::new();
    let records = match scales {
        Scales::Super | Scales::SuperSymmetric => COLS.div_ceil(256),
        _ => COLS.div_ceil(group),
    };
    for g in 0..records {
        let (s, m) = (eighths(1.0 / 128.0, 3 * row + 5 * g), ((row + 2 * g) % 9) as f32 / 16.0 - 0.25);
        bytes.extend(match scales {
            Scales::Symmetric => half(s).to_vec(),
            Scales::ZeroPoint => [half(s), half((7 + (row + g) % 3) as f32)].concat(),
            Scales::HalfAffine => [half(s), half(m)].concat(),
            Scales::Affine => [s.to_le_bytes(), m.to_le_bytes()].concat(),
            Scales::Super | Scales::SuperSymmetric => {
                let groups = 0..256 / group;
                let c = |i: usize| (number(3, (row * 2 + g) * 16 + i) / 4) as i8 as u8;
                let n = |i: usize| (row + 2 * g + i) as u8 % 32;
                match scales {
                    Scales::Super => [half(s / 16.0), half(s / 8.0)]
                        .concat()
                        .into_iter()
                        .chain(groups.flat_map(|i| [c(i), n(i)]))
                        .collect(),
                    _ => half(s / 16.0).into_iter().chain(groups.map(c)).collect(),
                }
            }
        });
    }
    assert_eq!(bytes.len(), made.scales.len(), "scales of {scheme}");
    made.scales = bytes;
    made
}

/// A row of the matrix in `scheme`.
pub fn weights(scheme: Scheme, row: usize) -> Vec<f32> {
    let mut out = vec![0.0; COLS];
    match scheme.grouping(COLS) {
        Some(_) => quantized_row(scheme, row).dequantize_into(scheme, &mut out),
        // Seven bits, which bf16 can hold.
        None => out.iter_mut().enumerate().for_each(|(col, w)| *w = fraction(2, row * COLS + col)),
    }
    debug_assert!(scheme != Scheme::Bf16 || out.iter().all(|w| bf16::from_f32(*w).to_f32() == *w));
    out
}

/// The matrix in `scheme` as the device has it: blocks, and scales.
pub fn packed(scheme: Scheme) -> [Vec<u8>; 2] {
    let (tile_bytes, scale_bytes) = (scheme.tile_bytes(COLS), scheme.tile_scale_bytes(COLS));
    let mut blocks = vec![0; scheme.block_bytes(ROWS, COLS) as usize];
    let mut scales = vec![0; scheme.scale_bytes(ROWS, COLS) as usize];
    for (tile, blocks) in blocks.chunks_exact_mut(tile_bytes).enumerate() {
        clear_tiles(scheme, COLS, blocks);
        let scales = &mut scales[tile * scale_bytes..][..scale_bytes];
        for lane in 0..TILE_ROWS.min(ROWS - tile * TILE_ROWS) {
            let row = tile * TILE_ROWS + lane;
            match scheme.grouping(COLS) {
                Some(_) => pack_row(scheme, &quantized_row(scheme, row), lane, blocks, scales),
                None => pack_plain_row(scheme, &weights(scheme, row), lane, blocks),
            }
        }
    }
    [blocks, scales]
}

/// The input of a norm, the residual stream that its result is added to, and the weights of the two norms.
pub fn normed(row: usize, col: usize) -> f32 {
    fraction(4, row * WIDTH + col) * (1 + row) as f32
}

pub fn hidden(row: usize, col: usize) -> f32 {
    2.0 * fraction(5, row * WIDTH + col)
}

/// Four residual streams, of which the first two are the inputs of norms.
pub fn stream(i: usize, row: usize, col: usize) -> f32 {
    match i {
        0 => normed(row, col),
        1 => hidden(row, col),
        _ => fraction(20 + i as u32, row * WIDTH + col),
    }
}

/// The router of the streams. The sum over a row is divided by its width, so only large weights have an effect.
pub fn router() -> Vec<f32> {
    (0..4 * WIDTH).map(|i| 128.0 * fraction(24, i)).collect()
}

/// The coefficients of predictions or of corrections.
pub fn coefficients(count: usize) -> Vec<f32> {
    (0..count).map(|i| fraction(25, i)).collect()
}

pub fn norm_weights(next: bool) -> Vec<f32> {
    (0..WIDTH).map(|col| 1.0 + fraction(6 + u32::from(next), col) / 2.0).collect()
}

/// A query of a position, a key and a value. `of` is the head modulo 4, or the KV head. Over a head of dimension d,
/// queries are divided by d / 4.
pub fn query(position: usize, of: usize, class: usize) -> f32 {
    2.0 * fraction(8, (position * 4 + of) * 4 + class)
}

pub fn key(position: usize, of: usize, class: usize) -> f32 {
    largest_first(9, (position * KV_HEADS + of) * 4, class)
}

pub fn value(position: usize, of: usize, class: usize) -> f32 {
    largest_first(10, (position * KV_HEADS + of) * 4, class)
}

/// The first value of a head is the largest that int8 has, of either sign.
fn largest_first(list: u32, first: usize, class: usize) -> f32 {
    match class {
        0 if number(list, first) < 0 => -127.0 / 128.0,
        0 => 127.0 / 128.0,
        class => fraction(list, first + class),
    }
}

/// Query, key and value of a token that is stored, before its norm.
pub fn raw_query(token: usize, of: usize, class: usize) -> f32 {
    3.0 * fraction(11, (token * 4 + of) * 4 + class)
}

pub fn raw_key(token: usize, of: usize, class: usize) -> f32 {
    5.0 * fraction(12, (token * KV_HEADS + of) * 4 + class)
}

/// The norm's weight of queries or of keys, and the angle of RoPE.
pub fn head_norm(keys: bool, class: usize) -> f32 {
    1.0 + fraction(13 + u32::from(keys), class) / 2.0
}

/// What the names of stored sets say of a layer's queries and keys.
pub fn stored_kind(has_qk_norms: bool, has_biases: bool) -> &'static str {
    match (has_qk_norms, has_biases) {
        (true, false) => "",
        (false, false) => " plain",
        (false, true) => " biased",
        (true, true) => " biased and normed",
    }
}

/// The bias of queries (0), keys (1) or values (2).
pub fn bias(what: u32, of: usize, class: usize) -> f32 {
    2.0 * fraction(17 + what, of * 4 + class)
}

pub fn angle(position: usize, pair: usize) -> f64 {
    position as f64 * (0.7 - 0.4 * pair as f64)
}

pub fn logit(row: usize, id: usize) -> f32 {
    let at = row * VOCAB + id;
    (number(15, at) * 128 + number(16, at)) as f32 / 2048.0
}

/// Ids of a draw's history: the first is in the prompt, the others are in the answer.
pub const HISTORY: [u32; 4] = [9, 4097, 2, 2];
/// Biases of the greedy row. With its bias, id 4099 has the largest logit of the row.
pub const BIASES: [(u32, f32); 2] = [(4099, 30.0), (7, 4.0)];
pub const REPETITION: f32 = 1.3;
pub const PRESENCE: f32 = 0.5;
pub const FREQUENCY: f32 = 0.25;
/// The filtered row: temperature, top_k, top_p and seed. The last row has the temperature and the seed alone.
pub const TEMPERATURE: f32 = 0.9;
pub const TOP_K: u32 = 40;
pub const TOP_P: f32 = 0.9;
pub const SEED: u64 = 0x5eed_0001_0000_0007;
/// Log probabilities reported with the greedy id.
pub const LOGPROBS: usize = 3;

/// Whether the mask of the filtered row allows an id.
pub fn allowed(id: usize) -> bool {
    id % 3 != 1
}
