//! How a weight matrix lies in device memory: "lane = row" tiles, and the ways its integers are scaled.
//!
//! The same description serves the packing of checkpoints, the native files that hold packed bytes, and the sizes
//! that placement counts with; `shaders/common/weights.glsl` reads it, `docs/formats.md` specifies it. A matrix
//! `[rows, cols]` is two planes:
//!
//! ```text
//! blocks  [ceil(rows/32)][ceil(cols/B)][32 rows] of 16 bytes: B consecutive weights of one row
//! scales  [ceil(rows/32)][records of a row][32 rows] of what scales them
//! ```
//!
//! Rows and columns beyond the matrix are weights of value zero.

use half::f16;

use super::DType;

/// Version of the layouts in this file; native checkpoints name the one they were written in.
pub const LAYOUT_VERSION: u32 = 1;
/// Rows of a tile: one lane each.
pub const TILE_ROWS: usize = 32;
/// Bytes of one block: consecutive weights of one row.
pub const BLOCK_BYTES: usize = 16;
/// Columns that share the outer scales of [`Scales::Super`].
const SUPER_COLS: usize = 256;

/// How a weight matrix is stored on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scheme {
    F32,
    F16,
    Bf16,
    /// int8, one f16 scale per output row.
    Int8Row,
    /// int8 in groups of `group` consecutive inputs of a row, a multiple of 16; groups never straddle rows.
    Int8 {
        group: u32,
        scales: Scales,
    },
    /// int4 in groups of `group` consecutive inputs of a row, a multiple of 32; groups never straddle rows.
    Int4 {
        group: u32,
        scales: Scales,
    },
}

/// What turns the integers `q` of a group into weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scales {
    /// `w = s * q`, s f16. int4: q in -8..=7.
    Symmetric,
    /// `w = s * (q - z)`, s and z f16. int4, as in the rest: q in 0..=15.
    ZeroPoint,
    /// `w = s * q + m`, s and m f32.
    Affine,
    /// `w = (d * c) * q - (e * n)`: d and e f16 for 256 columns, c (i8) and n (u8) for the group: K-quants.
    Super,
}

impl Scales {
    /// Bytes that scale one group, without what 256 columns share.
    const fn group_bytes(self) -> usize {
        match self {
            Scales::Symmetric | Scales::Super => 2,
            Scales::ZeroPoint => 4,
            Scales::Affine => 8,
        }
    }
}

impl Scheme {
    /// int4 with one f16 scale per group.
    pub const fn int4(group: u32) -> Scheme {
        Scheme::Int4 { group, scales: Scales::Symmetric }
    }

    /// int8 with one f16 scale per group.
    pub const fn int8(group: u32) -> Scheme {
        Scheme::Int8 { group, scales: Scales::Symmetric }
    }

    /// Columns that share a scale, and how they are scaled; `None` for floating-point weights.
    pub const fn grouping(self, cols: usize) -> Option<(usize, Scales)> {
        match self {
            Scheme::F32 | Scheme::F16 | Scheme::Bf16 => None,
            Scheme::Int8Row => Some((cols, Scales::Symmetric)),
            Scheme::Int8 { group, scales } | Scheme::Int4 { group, scales } => Some((group as usize, scales)),
        }
    }

    /// The scheme that keeps a plain element type; `None` for integers, which are no weights.
    pub const fn of(dtype: DType) -> Option<Scheme> {
        match dtype {
            DType::F32 => Some(Scheme::F32),
            DType::F16 => Some(Scheme::F16),
            DType::BF16 => Some(Scheme::Bf16),
            DType::I8 | DType::U8 | DType::I32 | DType::I64 => None,
        }
    }

    /// Weights in one block.
    pub const fn block_weights(self) -> usize {
        match self {
            Scheme::F32 => 4,
            Scheme::F16 | Scheme::Bf16 => 8,
            Scheme::Int8Row | Scheme::Int8 { .. } => 16,
            Scheme::Int4 { .. } => 32,
        }
    }

    /// Blocks of one row.
    pub const fn blocks_per_row(self, cols: usize) -> usize {
        cols.div_ceil(self.block_weights())
    }

    /// Blocks that share one scale; 1 where that is no property of the scheme.
    pub const fn blocks_per_scale(self) -> usize {
        match self {
            Scheme::Int8 { group, .. } | Scheme::Int4 { group, .. } => group as usize / self.block_weights(),
            _ => 1,
        }
    }

    /// Bytes of one tile of 32 rows, without scales.
    pub const fn tile_bytes(self, cols: usize) -> usize {
        self.blocks_per_row(cols) * BLOCK_BYTES * TILE_ROWS
    }

    /// Bytes that scale one row of `cols` columns.
    pub const fn row_scale_bytes(self, cols: usize) -> usize {
        match self.grouping(cols) {
            None => 0,
            Some((group, Scales::Super)) => {
                cols.div_ceil(SUPER_COLS) * (4 + SUPER_COLS / group * Scales::Super.group_bytes())
            }
            Some((group, scales)) => cols.div_ceil(group) * scales.group_bytes(),
        }
    }

    /// Bytes that scale one tile.
    pub const fn tile_scale_bytes(self, cols: usize) -> usize {
        self.row_scale_bytes(cols) * TILE_ROWS
    }

    /// Bytes of the plane of blocks of a matrix `[rows, cols]`.
    pub const fn block_bytes(self, rows: usize, cols: usize) -> u64 {
        (rows.div_ceil(TILE_ROWS) * self.tile_bytes(cols)) as u64
    }

    /// Bytes of the plane of scales of a matrix `[rows, cols]`; 0 for floating-point weights.
    pub const fn scale_bytes(self, rows: usize, cols: usize) -> u64 {
        (rows.div_ceil(TILE_ROWS) * self.tile_scale_bytes(cols)) as u64
    }

    /// Sizes of the items that scale a row, in order: (bytes of an item, how many follow each other), repeated.
    /// In a tile, an item stands 32 times in a row, once for each lane.
    fn scale_items(self, cols: usize) -> Vec<(usize, usize)> {
        match self.grouping(cols) {
            None => Vec::new(),
            Some((group, Scales::Super)) => {
                let record = [(4, 1), (Scales::Super.group_bytes(), SUPER_COLS / group)];
                record.repeat(cols.div_ceil(SUPER_COLS))
            }
            Some((group, scales)) => vec![(scales.group_bytes(), cols.div_ceil(group))],
        }
    }
}

impl std::fmt::Display for Scheme {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (bits, group, scales) = match self {
            Scheme::F32 => return f.write_str("f32"),
            Scheme::F16 => return f.write_str("f16"),
            Scheme::Bf16 => return f.write_str("bf16"),
            Scheme::Int8Row => return f.write_str("int8-row"),
            Scheme::Int8 { group, scales } => (8, group, scales),
            Scheme::Int4 { group, scales } => (4, group, scales),
        };
        let suffix = match scales {
            Scales::Symmetric => "",
            Scales::ZeroPoint => "-zero",
            Scales::Affine => "-affine",
            Scales::Super => "-super",
        };
        write!(f, "int{bits}-g{group}{suffix}")
    }
}

impl std::str::FromStr for Scheme {
    type Err = String;

    /// The inverse of `Display`. Refuses groups that the layout cannot hold.
    fn from_str(name: &str) -> Result<Scheme, String> {
        let unknown =
            || format!("unknown scheme {name:?}; expected f32, f16, bf16, int8-row, int8-gN or int4-gN");
        let (bits, rest) = match name {
            "f32" => return Ok(Scheme::F32),
            "f16" => return Ok(Scheme::F16),
            "bf16" => return Ok(Scheme::Bf16),
            "int8-row" => return Ok(Scheme::Int8Row),
            _ => name.strip_prefix("int").and_then(|rest| rest.split_once("-g")).ok_or_else(unknown)?,
        };
        let (group, scales) = match rest.split_once('-') {
            None => (rest, Scales::Symmetric),
            Some((group, "zero")) => (group, Scales::ZeroPoint),
            Some((group, "affine")) => (group, Scales::Affine),
            Some((group, "super")) => (group, Scales::Super),
            Some(_) => return Err(unknown()),
        };
        let group: u32 = group.parse().map_err(|_| unknown())?;
        let scheme = match bits {
            "8" => Scheme::Int8 { group, scales },
            "4" => Scheme::Int4 { group, scales },
            _ => return Err(unknown()),
        };
        let unit = scheme.block_weights() as u32;
        let divides = scales != Scales::Super || (SUPER_COLS as u32).is_multiple_of(group.max(1));
        if group == 0 || !group.is_multiple_of(unit) || !divides {
            return Err(format!("scheme {name:?}: its groups must be a multiple of {unit} columns"));
        }
        // One spelling for each scheme.
        if scheme.to_string() != name { Err(unknown()) } else { Ok(scheme) }
    }
}

/// One row of a quantized matrix, before it is packed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QuantizedRow {
    /// One integer per column: int8 as it is; int4 in -8..=7 where scales are symmetric, else in 0..=15.
    pub q: Vec<i8>,
    /// [`Scheme::row_scale_bytes`], little endian: for each group s; s, z; or s, m; K-quants for each 256 columns d, e, then
    /// c, n of each group.
    pub scales: Vec<u8>,
}

impl QuantizedRow {
    /// A row of zeros of the size that `scheme` gives rows of `cols`.
    pub fn new(scheme: Scheme, cols: usize) -> QuantizedRow {
        QuantizedRow { q: vec![0; cols], scales: vec![0; scheme.row_scale_bytes(cols)] }
    }

    /// The first column of what shares the scales that make some weight NaN or infinite; none if all are finite. Panics
    /// unless `scheme` quantizes and the row has its sizes.
    pub fn not_finite(&self, scheme: Scheme) -> Option<usize> {
        let cols = self.q.len();
        let (group, scales) = scheme.grouping(cols).expect("a scheme that quantizes");
        assert_eq!(self.scales.len(), scheme.row_scale_bytes(cols), "scales of a row");
        let (bytes, columns) = match scales {
            Scales::Super => (4 + SUPER_COLS / group * Scales::Super.group_bytes(), SUPER_COLS),
            _ => (scales.group_bytes(), group),
        };
        // What f16 holds is far too small for its products with integers to leave f32.
        let f16_is = |two: &[u8]| two[1] & 0x7c != 0x7c;
        let f32_at = |four: &[u8]| f32::from_le_bytes(four.try_into().expect("4 bytes"));
        let is_finite = |record: &[u8], q: &[i8]| match scales {
            Scales::Symmetric => f16_is(&record[..2]),
            Scales::ZeroPoint | Scales::Super => f16_is(&record[..2]) && f16_is(&record[2..4]),
            Scales::Affine => {
                let (s, m) = (f32_at(&record[..4]), f32_at(&record[4..]));
                // No q is beyond -128: each is looked at only where that would be too much.
                (128.0 * s.abs() + m.abs()).is_finite()
                    || q.iter().all(|q| (s * f32::from(*q) + m).is_finite())
            }
        };
        let mut records = self.scales.chunks_exact(bytes).zip(self.q.chunks(columns));
        records.position(|(record, q)| !is_finite(record, q)).map(|index| index * columns)
    }

    /// The values that the row stands for, each rounded to f32 once where that is needed at all. Panics unless `scheme`
    /// quantizes and the row has its sizes.
    pub fn dequantize_into(&self, scheme: Scheme, out: &mut [f32]) {
        let cols = self.q.len();
        let (group, scales) = scheme.grouping(cols).expect("a scheme that quantizes");
        assert_eq!(
            (out.len(), self.scales.len()),
            (cols, scheme.row_scale_bytes(cols)),
            "a row and its scales"
        );
        let f16_at = |at: usize| f16::from_le_bytes([self.scales[at], self.scales[at + 1]]).to_f32();
        let f32_at = |at: usize| f32::from_le_bytes(self.scales[at..at + 4].try_into().expect("4 bytes"));
        for (g, (q, out)) in self.q.chunks(group).zip(out.chunks_mut(group)).enumerate() {
            // w = s * (q - z) + m, with z or m zero.
            let (s, z, m) = match scales {
                Scales::Symmetric => (f16_at(2 * g), 0.0, 0.0),
                Scales::ZeroPoint => (f16_at(4 * g), f16_at(4 * g + 2), 0.0),
                Scales::Affine => (f32_at(8 * g), 0.0, f32_at(8 * g + 4)),
                Scales::Super => {
                    let groups = SUPER_COLS / group;
                    let record = g / groups * (4 + 2 * groups);
                    let own = record + 4 + 2 * (g % groups);
                    let (c, n) = (f32::from(self.scales[own] as i8), f32::from(self.scales[own + 1]));
                    (f16_at(record) * c, 0.0, -(f16_at(record + 2) * n))
                }
            };
            for (q, out) in q.iter().zip(out) {
                // Symmetric rows keep the sign of zero: adding +0.0 would turn -0.0 into 0.0.
                *out = match scales {
                    Scales::Symmetric => s * f32::from(*q),
                    _ => s * (f32::from(*q) - z) + m,
                };
            }
        }
    }
}

/// Packs one row into lane `lane` of a tile. `blocks` and `scales`: the tile's bytes, [`Scheme::tile_bytes`] and
/// [`Scheme::tile_scale_bytes`]. Columns beyond the row keep what the tile holds, which the shaders multiply by zero.
pub fn pack_row(scheme: Scheme, row: &QuantizedRow, lane: usize, blocks: &mut [u8], scales: &mut [u8]) {
    let cols = row.q.len();
    assert!(lane < TILE_ROWS && blocks.len() == scheme.tile_bytes(cols));
    assert!(
        scales.len() == scheme.tile_scale_bytes(cols) && row.scales.len() == scheme.row_scale_bytes(cols)
    );
    let per_block = scheme.block_weights();
    let bias = nibble_bias(scheme);
    for (b, q) in row.q.chunks(per_block).enumerate() {
        let block = &mut blocks[(b * TILE_ROWS + lane) * BLOCK_BYTES..][..BLOCK_BYTES];
        if per_block == BLOCK_BYTES {
            for (byte, q) in block.iter_mut().zip(q) {
                *byte = *q as u8;
            }
        } else {
            for (i, q) in q.iter().enumerate() {
                let nibble = (q + bias) as u8 & 0x0f;
                let byte = &mut block[i % 16];
                *byte = if i < 16 { *byte & 0xf0 | nibble } else { *byte & 0x0f | nibble << 4 };
            }
        }
    }
    each_scale_item(scheme, cols, lane, |in_row, in_tile| {
        scales[in_tile].copy_from_slice(&row.scales[in_row]);
    });
}

/// The inverse of [`pack_row`].
pub fn unpack_row(scheme: Scheme, lane: usize, blocks: &[u8], scales: &[u8], row: &mut QuantizedRow) {
    let cols = row.q.len();
    assert!(lane < TILE_ROWS && blocks.len() == scheme.tile_bytes(cols));
    assert!(
        scales.len() == scheme.tile_scale_bytes(cols) && row.scales.len() == scheme.row_scale_bytes(cols)
    );
    let per_block = scheme.block_weights();
    let bias = nibble_bias(scheme);
    for (b, q) in row.q.chunks_mut(per_block).enumerate() {
        let block = &blocks[(b * TILE_ROWS + lane) * BLOCK_BYTES..][..BLOCK_BYTES];
        for (i, q) in q.iter_mut().enumerate() {
            *q = match per_block {
                BLOCK_BYTES => block[i] as i8,
                _ if i < 16 => (block[i] & 0x0f) as i8 - bias,
                _ => (block[i - 16] >> 4) as i8 - bias,
            };
        }
    }
    each_scale_item(scheme, cols, lane, |in_row, in_tile| {
        row.scales[in_row].copy_from_slice(&scales[in_tile]);
    });
}

/// Packs one row of floating-point weights into lane `lane` of a tile; panics if the scheme is another.
pub fn pack_plain_row(scheme: Scheme, row: &[f32], lane: usize, blocks: &mut [u8]) {
    assert!(lane < TILE_ROWS && blocks.len() == scheme.tile_bytes(row.len()));
    for (b, row) in row.chunks(scheme.block_weights()).enumerate() {
        let block = &mut blocks[(b * TILE_ROWS + lane) * BLOCK_BYTES..][..BLOCK_BYTES];
        match scheme {
            Scheme::F32 => row.iter().zip(block.chunks_exact_mut(4)).for_each(|(w, to)| {
                to.copy_from_slice(&w.to_le_bytes());
            }),
            Scheme::F16 => row.iter().zip(block.chunks_exact_mut(2)).for_each(|(w, to)| {
                to.copy_from_slice(&f16::from_f32(*w).to_le_bytes());
            }),
            Scheme::Bf16 => row.iter().zip(block.chunks_exact_mut(2)).for_each(|(w, to)| {
                to.copy_from_slice(&half::bf16::from_f32(*w).to_le_bytes());
            }),
            Scheme::Int8Row | Scheme::Int8 { .. } | Scheme::Int4 { .. } => {
                panic!("{scheme} packs quantized rows")
            }
        }
    }
}

/// The inverse of [`pack_plain_row`].
pub fn unpack_plain_row(scheme: Scheme, lane: usize, blocks: &[u8], row: &mut [f32]) {
    assert!(lane < TILE_ROWS && blocks.len() == scheme.tile_bytes(row.len()));
    for (b, row) in row.chunks_mut(scheme.block_weights()).enumerate() {
        let block = &blocks[(b * TILE_ROWS + lane) * BLOCK_BYTES..][..BLOCK_BYTES];
        for (i, w) in row.iter_mut().enumerate() {
            *w = match scheme {
                Scheme::F32 => f32::from_le_bytes(block[4 * i..4 * i + 4].try_into().expect("4 bytes")),
                Scheme::F16 => f16::from_le_bytes([block[2 * i], block[2 * i + 1]]).to_f32(),
                Scheme::Bf16 => half::bf16::from_le_bytes([block[2 * i], block[2 * i + 1]]).to_f32(),
                Scheme::Int8Row | Scheme::Int8 { .. } | Scheme::Int4 { .. } => {
                    panic!("{scheme} packs quantized rows")
                }
            };
        }
    }
}

/// What a nibble holds beyond the integer it stands for.
const fn nibble_bias(scheme: Scheme) -> i8 {
    match scheme {
        Scheme::Int4 { scales: Scales::Symmetric, .. } => 8,
        _ => 0,
    }
}

/// The byte of an empty tile: weights of value zero in every scheme.
pub(crate) const fn empty_block_byte(scheme: Scheme) -> u8 {
    match nibble_bias(scheme) {
        0 => 0,
        bias => (bias | bias << 4) as u8,
    }
}

/// Pairs the bytes of each item that scales a row with those of its lane in the tile.
fn each_scale_item(
    scheme: Scheme,
    cols: usize,
    lane: usize,
    mut each: impl FnMut(std::ops::Range<usize>, std::ops::Range<usize>),
) {
    let (mut in_row, mut in_tile) = (0, 0);
    for (bytes, count) in scheme.scale_items(cols) {
        for _ in 0..count {
            let at = in_tile + lane * bytes;
            each(in_row..in_row + bytes, at..at + bytes);
            in_row += bytes;
            in_tile += bytes * TILE_ROWS;
        }
    }
}
