//! Layout of a weight matrix in device memory: "lane = row" tiles, and the formulas of its scales.
//!
//! The packing of checkpoints, the native files with packed bytes, and the placement of weights in memory use it.
//! `shaders/common/weights.glsl` reads the layout, and `docs/formats.md` specifies it. A matrix `[rows, cols]` has two
//! planes:
//!
//! ```text
//! blocks  [ceil(rows/32)][ceil(cols/B)][32 rows] of 16 bytes: B consecutive weights of one row
//! scales  [ceil(rows/32)][records of a row][32 rows] of scale records
//! ```
//!
//! A block of five- or six-bit weights has 32 columns. It begins with the low four bits of all 32 rows, in the layout
//! of int4. The high bits of each row follow, in 4 or 8 bytes.
//!
//! Padding rows and columns are weights of value zero.

use std::ops::Range;

use half::f16;
use strum::VariantArray;

use super::dtype::DType;

/// Version of the layouts in this file. Native checkpoints record it.
pub const LAYOUT_VERSION: u32 = 1;
/// Rows of a tile, one per lane.
pub const TILE_ROWS: usize = 32;
/// Bytes of one block: consecutive weights of one row, or the low four bits of five- or six-bit weights.
const BLOCK_BYTES: usize = 16;
/// Columns whose low four bits fill a block.
const NIBBLES: usize = 2 * BLOCK_BYTES;
/// Columns that share the outer scales of [`Scales::Super`] and [`Scales::SuperSymmetric`].
const SUPER_COLS: usize = 256;

/// Number of bits of an integer weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, VariantArray)]
pub enum Bits {
    Four = 4,
    Five = 5,
    Six = 6,
    Eight = 8,
}

impl Bits {
    pub const fn count(self) -> usize {
        self as usize
    }

    /// Bytes for the bits above the low four, per row and block.
    const fn high_bytes(self) -> usize {
        match self {
            Bits::Four | Bits::Eight => 0,
            Bits::Five | Bits::Six => (self.count() - 4) * NIBBLES / 8,
        }
    }
}

/// How a weight matrix is stored on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scheme {
    F32,
    F16,
    Bf16,
    /// int8, one f16 scale per output row.
    Int8Row,
    /// Integers in groups of `group` consecutive inputs of a row. `group` is a multiple of 16 (of 32 for four bits). No
    /// group spans two rows.
    Int {
        bits: Bits,
        group: u32,
        scales: Scales,
    },
}

/// The formula that turns the integers `q` of a group into weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, VariantArray)]
pub enum Scales {
    /// `w = s * q`, s f16.
    Symmetric,
    /// `w = s * (q - z)`, s and z f16.
    ZeroPoint,
    /// `w = s * q + m`, s and m f32.
    Affine,
    /// `w = s * q + m`, s and m f16.
    HalfAffine,
    /// `w = (d * c) * q - (e * n)`: d and e f16 for 256 columns, c (i8) and n (u8) for the group: K-quants and IQ4_XS.
    Super,
    /// `w = (d * c) * q`: d f16 for 256 columns, c (i8) for the group: Q3_K and Q6_K.
    SuperSymmetric,
}

impl Scales {
    /// The suffix in the names of schemes and of their kernels.
    const fn name(self) -> Option<&'static str> {
        match self {
            Scales::Symmetric => None,
            Scales::ZeroPoint => Some("zero"),
            Scales::Affine => Some("affine"),
            Scales::HalfAffine => Some("affine16"),
            Scales::Super => Some("super"),
            Scales::SuperSymmetric => Some("supersym"),
        }
    }

    /// Bytes of the scales of one group, without the scales that 256 columns share.
    const fn group_bytes(self) -> usize {
        match self {
            Scales::SuperSymmetric => 1,
            Scales::Symmetric | Scales::Super => 2,
            Scales::ZeroPoint | Scales::HalfAffine => 4,
            Scales::Affine => 8,
        }
    }

    /// Bytes of the scales that 256 columns share; `None` if columns share none.
    const fn outer_bytes(self) -> Option<usize> {
        match self {
            Scales::Super => Some(4),
            Scales::SuperSymmetric => Some(2),
            _ => None,
        }
    }

    /// Whether the formula has no offset. Then integers of four, five and six bits are signed.
    pub const fn is_symmetric(self) -> bool {
        matches!(self, Scales::Symmetric | Scales::SuperSymmetric)
    }

    /// (Bytes, columns) of one scale record. A record is for one group, or for 256 columns with their groups.
    const fn record(self, group: usize) -> (usize, usize) {
        match self.outer_bytes() {
            Some(outer) => (outer + SUPER_COLS / group * self.group_bytes(), SUPER_COLS),
            None => (self.group_bytes(), group),
        }
    }
}

impl Scheme {
    /// int4 with one f16 scale per group.
    pub const fn int4(group: u32) -> Scheme {
        Scheme::Int { bits: Bits::Four, group, scales: Scales::Symmetric }
    }

    /// Columns that share a scale, and the formula; `None` for floating-point weights.
    pub const fn grouping(self, cols: usize) -> Option<(usize, Scales)> {
        match self {
            Scheme::F32 | Scheme::F16 | Scheme::Bf16 => None,
            Scheme::Int8Row => Some((cols, Scales::Symmetric)),
            Scheme::Int { group, scales, .. } => Some((group as usize, scales)),
        }
    }

    /// The scheme of a floating-point element type; `None` for integers, which are not weights without scales.
    pub const fn of(dtype: DType) -> Option<Scheme> {
        match dtype {
            DType::F32 => Some(Scheme::F32),
            DType::F16 => Some(Scheme::F16),
            DType::BF16 => Some(Scheme::Bf16),
            DType::I8 | DType::U8 | DType::I32 | DType::I64 => None,
        }
    }

    /// The element type of a floating-point scheme; `None` for integers.
    pub const fn dtype(self) -> Option<DType> {
        match self {
            Scheme::F32 => Some(DType::F32),
            Scheme::F16 => Some(DType::F16),
            Scheme::Bf16 => Some(DType::BF16),
            Scheme::Int8Row | Scheme::Int { .. } => None,
        }
    }

    /// The number that is added to an integer before it is stored.
    const fn bias(self) -> i8 {
        match self {
            Scheme::Int { bits: Bits::Eight, .. } => 0,
            Scheme::Int { bits, scales, .. } if scales.is_symmetric() => 1 << (bits.count() - 1),
            _ => 0,
        }
    }

    /// Whether kernels exist for the scheme. Five and six bits have only the scales that GGUF uses.
    const fn is_known(self) -> bool {
        let Scheme::Int { bits, scales, .. } = self else { return true };
        match bits {
            Bits::Four => !matches!(scales, Scales::SuperSymmetric),
            Bits::Five => matches!(scales, Scales::Symmetric | Scales::HalfAffine | Scales::Super),
            Bits::Six => matches!(scales, Scales::SuperSymmetric),
            Bits::Eight => !matches!(scales, Scales::HalfAffine | Scales::SuperSymmetric),
        }
    }

    /// The name of the kernel variant for weights of this scheme. The group size is not in the name, because kernels
    /// get it as a number.
    pub fn variant(self) -> String {
        match self {
            Scheme::Int { bits, scales, .. } => {
                let scales = scales.name().map(|name| format!("_{name}"));
                format!("int{}{}", bits.count(), scales.unwrap_or_default())
            }
            _ => self.to_string().replace('-', "_"),
        }
    }

    /// Whether both schemes have the same [`variant`](Self::variant).
    pub fn shares_variant(self, other: Scheme) -> bool {
        match (self, other) {
            (Scheme::Int { bits, scales, .. }, Scheme::Int { bits: bits2, scales: scales2, .. }) => {
                (bits, scales) == (bits2, scales2)
            }
            _ => self == other,
        }
    }

    /// Weights of one row in a block, which kernels process in one step. Group sizes are multiples of it.
    pub const fn block_weights(self) -> usize {
        match self {
            Scheme::F32 => 4,
            Scheme::F16 | Scheme::Bf16 => 8,
            Scheme::Int { bits: Bits::Four, .. } => 32,
            Scheme::Int8Row | Scheme::Int { .. } => 16,
        }
    }

    /// Blocks of one row.
    pub const fn blocks_per_row(self, cols: usize) -> usize {
        cols.div_ceil(self.block_weights())
    }

    /// Blocks that share one scale; 1 for schemes without groups.
    pub const fn blocks_per_scale(self) -> usize {
        match self {
            Scheme::Int { group, .. } => group as usize / self.block_weights(),
            _ => 1,
        }
    }

    /// Bytes of the blocks of one tile of 32 rows.
    pub const fn tile_bytes(self, cols: usize) -> usize {
        let row = match self {
            Scheme::Int { bits, .. } if !matches!(bits, Bits::Eight) => {
                cols.div_ceil(NIBBLES) * (BLOCK_BYTES + bits.high_bytes())
            }
            _ => self.blocks_per_row(cols) * BLOCK_BYTES,
        };
        row * TILE_ROWS
    }

    /// Bytes of the scales of one row of `cols` columns.
    pub const fn row_scale_bytes(self, cols: usize) -> usize {
        match self.grouping(cols) {
            None => 0,
            Some((group, scales)) => {
                let (bytes, columns) = scales.record(group);
                cols.div_ceil(columns) * bytes
            }
        }
    }

    /// Bytes of the scales of one tile.
    pub const fn tile_scale_bytes(self, cols: usize) -> usize {
        self.row_scale_bytes(cols) * TILE_ROWS
    }

    /// Bytes of all blocks of a matrix `[rows, cols]`.
    pub const fn block_bytes(self, rows: usize, cols: usize) -> u64 {
        (rows.div_ceil(TILE_ROWS) * self.tile_bytes(cols)) as u64
    }

    /// Bytes of all scales of a matrix `[rows, cols]`; 0 for floating-point weights.
    pub const fn scale_bytes(self, rows: usize, cols: usize) -> u64 {
        (rows.div_ceil(TILE_ROWS) * self.tile_scale_bytes(cols)) as u64
    }

    /// Bytes of a matrix `[rows, cols]`.
    pub const fn bytes(self, rows: usize, cols: usize) -> u64 {
        self.block_bytes(rows, cols) + self.scale_bytes(rows, cols)
    }

    /// The items of a row's scales in order, as runs of (bytes per item, number of items). In a tile every item occurs
    /// 32 times, once per lane.
    fn scale_items(self, cols: usize) -> Vec<(usize, usize)> {
        match self.grouping(cols) {
            None => Vec::new(),
            Some((group, scales)) => match scales.outer_bytes() {
                Some(outer) => {
                    let record = [(outer, 1), (scales.group_bytes(), SUPER_COLS / group)];
                    record.repeat(cols.div_ceil(SUPER_COLS))
                }
                None => vec![(scales.group_bytes(), cols.div_ceil(group))],
            },
        }
    }
}

impl std::fmt::Display for Scheme {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Scheme::F32 => f.write_str("f32"),
            Scheme::F16 => f.write_str("f16"),
            Scheme::Bf16 => f.write_str("bf16"),
            Scheme::Int8Row => f.write_str("int8-row"),
            Scheme::Int { bits, group, scales } => {
                write!(f, "int{}-g{group}", bits.count())?;
                scales.name().map_or(Ok(()), |name| write!(f, "-{name}"))
            }
        }
    }
}

impl std::str::FromStr for Scheme {
    type Err = String;

    /// The inverse of `Display`. Refuses group sizes that the layout cannot hold.
    fn from_str(name: &str) -> Result<Scheme, String> {
        let unknown = || {
            format!(
                "unknown scheme {name:?}; expected f32, f16, bf16, int8-row, int8-gN or int4-gN, as listed in \
                 docs/formats.md"
            )
        };
        let (bits, rest) = match name {
            "f32" => return Ok(Scheme::F32),
            "f16" => return Ok(Scheme::F16),
            "bf16" => return Ok(Scheme::Bf16),
            "int8-row" => return Ok(Scheme::Int8Row),
            _ => name.strip_prefix("int").and_then(|rest| rest.split_once("-g")).ok_or_else(unknown)?,
        };
        let (group, suffix) = rest.split_once('-').map_or((rest, None), |(group, name)| (group, Some(name)));
        let scales = Scales::VARIANTS.iter().find(|scales| scales.name() == suffix).ok_or_else(unknown)?;
        let bits = Bits::VARIANTS.iter().find(|b| b.count().to_string() == bits).ok_or_else(unknown)?;
        let group: u32 = group.parse().map_err(|_| unknown())?;
        let scheme = Scheme::Int { bits: *bits, group, scales: *scales };
        let step = scheme.block_weights() as u32;
        let divides = scales.outer_bytes().is_none() || (SUPER_COLS as u32).is_multiple_of(group.max(1));
        if group == 0 || !group.is_multiple_of(step) || !divides {
            return Err(format!("scheme {name:?}: its groups must be a multiple of {step} columns"));
        }
        // Each scheme has exactly one spelling.
        if !scheme.is_known() || scheme.to_string() != name { Err(unknown()) } else { Ok(scheme) }
    }
}

/// One row of a quantized matrix, before it is packed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QuantizedRow {
    /// One integer per column, within the range of the scheme's integers.
    pub q: Vec<i8>,
    /// [`Scheme::row_scale_bytes`] bytes, little endian, with the letters of [`Scales`]. Each group has s, or s and z,
    /// or s and m. In K-quants, each 256 columns have d and e, then c and n of each group; or d, then c of each group.
    pub scales: Vec<u8>,
}

impl QuantizedRow {
    /// A row of zeros, sized for `scheme` and `cols`.
    pub fn new(scheme: Scheme, cols: usize) -> QuantizedRow {
        QuantizedRow { q: vec![0; cols], scales: vec![0; scheme.row_scale_bytes(cols)] }
    }

    /// The first column of the scale record that makes some weight NaN or infinite; `None` if all weights are finite.
    /// Panics if `scheme` does not quantize, or the row does not have its sizes.
    pub fn not_finite(&self, scheme: Scheme) -> Option<usize> {
        let cols = self.q.len();
        let (group, scales) = scheme.grouping(cols).expect("a scheme that quantizes");
        assert_eq!(self.scales.len(), scheme.row_scale_bytes(cols), "scales of a row");
        let (bytes, columns) = scales.record(group);
        // A finite f16 times an integer is always finite in f32.
        let f16_is_finite = |two: &[u8]| two[1] & 0x7c != 0x7c;
        let f32_at = |four: &[u8]| f32::from_le_bytes(four.try_into().expect("4 bytes"));
        let is_finite = |record: &[u8], q: &[i8]| match scales {
            Scales::Symmetric | Scales::SuperSymmetric => f16_is_finite(&record[..2]),
            Scales::ZeroPoint | Scales::HalfAffine | Scales::Super => {
                f16_is_finite(&record[..2]) && f16_is_finite(&record[2..4])
            }
            Scales::Affine => {
                let (s, m) = (f32_at(&record[..4]), f32_at(&record[4..]));
                // The least q is -128. The integers are looked at only where that bound would not be finite.
                (128.0 * s.abs() + m.abs()).is_finite()
                    || q.iter().all(|q| (s * f32::from(*q) + m).is_finite())
            }
        };
        let mut records = self.scales.chunks_exact(bytes).zip(self.q.chunks(columns));
        records.position(|(record, q)| !is_finite(record, q)).map(|index| index * columns)
    }

    /// Computes the weights of the row. Each one is rounded to f32 at most once. Panics if `scheme` does not quantize,
    /// or the row does not have its sizes.
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
            // w = s * (q - z) + m, where z or m is 0.
            let (s, z, m) = match scales {
                Scales::Symmetric => (f16_at(2 * g), 0.0, 0.0),
                Scales::ZeroPoint => (f16_at(4 * g), f16_at(4 * g + 2), 0.0),
                Scales::Affine => (f32_at(8 * g), 0.0, f32_at(8 * g + 4)),
                Scales::HalfAffine => (f16_at(4 * g), 0.0, f16_at(4 * g + 2)),
                Scales::Super | Scales::SuperSymmetric => {
                    let groups = SUPER_COLS / group;
                    let record = g / groups * scales.record(group).0;
                    let outer = scales.outer_bytes().expect("columns share a scale");
                    let own = record + outer + g % groups * scales.group_bytes();
                    let s = f16_at(record) * f32::from(self.scales[own] as i8);
                    match scales {
                        Scales::SuperSymmetric => (s, 0.0, 0.0),
                        _ => (s, 0.0, -(f16_at(record + 2) * f32::from(self.scales[own + 1]))),
                    }
                }
            };
            for (q, out) in q.iter().zip(out) {
                // Without m, because adding +0.0 would turn -0.0 into 0.0.
                *out = match scales.is_symmetric() {
                    true => s * f32::from(*q),
                    false => s * (f32::from(*q) - z) + m,
                };
            }
        }
    }
}

/// Packs one row into lane `lane` of a tile. `blocks` and `scales` are the tile's bytes, [`Scheme::tile_bytes`] and
/// [`Scheme::tile_scale_bytes`] long. Padding columns of the tile do not change; the shaders multiply them by zero.
pub fn pack_row(scheme: Scheme, row: &QuantizedRow, lane: usize, blocks: &mut [u8], scales: &mut [u8]) {
    check_sizes(scheme, row, lane, blocks, scales);
    match scheme {
        Scheme::Int { bits, .. } if bits != Bits::Eight => {
            for (b, q) in row.q.chunks(NIBBLES).enumerate() {
                let (low, high) = nibbles_at(bits, b, lane);
                for (i, q) in q.iter().enumerate() {
                    let stored = (q + scheme.bias()) as u8;
                    put_bits(&mut blocks[low + i % BLOCK_BYTES], i / BLOCK_BYTES * 4, 4, stored);
                    if let Some((byte, shift, count)) = high_bits_at(bits, i) {
                        put_bits(&mut blocks[high + byte], shift, count, stored >> 4);
                    }
                }
            }
        }
        _ => {
            for (b, q) in row.q.chunks(BLOCK_BYTES).enumerate() {
                let block = &mut blocks[(b * TILE_ROWS + lane) * BLOCK_BYTES..][..q.len()];
                block.iter_mut().zip(q).for_each(|(byte, q)| *byte = *q as u8);
            }
        }
    }
    each_scale_item(scheme, row.q.len(), lane, |in_row, in_tile| {
        scales[in_tile].copy_from_slice(&row.scales[in_row]);
    });
}

/// The inverse of [`pack_row`].
pub fn unpack_row(scheme: Scheme, lane: usize, blocks: &[u8], scales: &[u8], row: &mut QuantizedRow) {
    check_sizes(scheme, row, lane, blocks, scales);
    match scheme {
        Scheme::Int { bits, .. } if bits != Bits::Eight => {
            for (b, q) in row.q.chunks_mut(NIBBLES).enumerate() {
                let (low, high) = nibbles_at(bits, b, lane);
                for (i, q) in q.iter_mut().enumerate() {
                    let mut stored = blocks[low + i % BLOCK_BYTES] >> (i / BLOCK_BYTES * 4) & 0x0f;
                    if let Some((byte, shift, count)) = high_bits_at(bits, i) {
                        stored |= (blocks[high + byte] >> shift & ((1 << count) - 1)) << 4;
                    }
                    *q = stored as i8 - scheme.bias();
                }
            }
        }
        _ => {
            for (b, q) in row.q.chunks_mut(BLOCK_BYTES).enumerate() {
                let block = &blocks[(b * TILE_ROWS + lane) * BLOCK_BYTES..][..q.len()];
                q.iter_mut().zip(block).for_each(|(q, byte)| *q = *byte as i8);
            }
        }
    }
    each_scale_item(scheme, row.q.len(), lane, |in_row, in_tile| {
        row.scales[in_row].copy_from_slice(&scales[in_tile]);
    });
}

fn check_sizes(scheme: Scheme, row: &QuantizedRow, lane: usize, blocks: &[u8], scales: &[u8]) {
    let cols = row.q.len();
    assert!(lane < TILE_ROWS && blocks.len() == scheme.tile_bytes(cols));
    let expected = (scheme.tile_scale_bytes(cols), scheme.row_scale_bytes(cols));
    assert_eq!((scales.len(), row.scales.len()), expected, "scales of a tile and of a row");
}

/// Packs one row of floating-point weights into lane `lane` of a tile. Panics if the scheme is not a floating-point
/// one.
pub fn pack_plain_row(scheme: Scheme, row: &[f32], lane: usize, blocks: &mut [u8]) {
    assert!(lane < TILE_ROWS && blocks.len() == scheme.tile_bytes(row.len()));
    let dtype = scheme.dtype().unwrap_or_else(|| panic!("{scheme} packs quantized rows"));
    for (b, row) in row.chunks(scheme.block_weights()).enumerate() {
        let block = &mut blocks[(b * TILE_ROWS + lane) * BLOCK_BYTES..][..row.len() * dtype.size()];
        dtype.write(row, block);
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
                Scheme::Int8Row | Scheme::Int { .. } => panic!("{scheme} packs quantized rows"),
            };
        }
    }
}

/// Offsets in a tile of the low bits and of the high bits of block `b` of row `lane`.
const fn nibbles_at(bits: Bits, b: usize, lane: usize) -> (usize, usize) {
    let first = b * (BLOCK_BYTES + bits.high_bytes()) * TILE_ROWS;
    (first + lane * BLOCK_BYTES, first + TILE_ROWS * BLOCK_BYTES + lane * bits.high_bytes())
}

/// The location of the high bits of column `i` of a block: (byte, shift in the byte, number of bits). `None` if there
/// are only nibbles. Four columns that are multiplied together have their bits at the same shift in four consecutive
/// bytes.
const fn high_bits_at(bits: Bits, i: usize) -> Option<(usize, usize, usize)> {
    let (four, byte) = (i / 4, i % 4);
    match bits {
        Bits::Five => Some((byte, four, 1)),
        Bits::Six => Some((four / 4 * 4 + byte, four % 4 * 2, 2)),
        Bits::Four | Bits::Eight => None,
    }
}

/// Writes the low `count` bits of `value` into `byte`, shifted left by `shift`.
fn put_bits(byte: &mut u8, shift: usize, count: usize, value: u8) {
    let mask = ((1 << count) - 1) << shift;
    *byte = *byte & !mask | value << shift & mask;
}

/// Fills tiles with weights of value zero. Rows have `cols` columns.
pub(crate) fn clear_tiles(scheme: Scheme, cols: usize, tiles: &mut [u8]) {
    assert!(tiles.len().is_multiple_of(scheme.tile_bytes(cols)));
    let bias = scheme.bias() as u8;
    let high_bytes = match scheme {
        Scheme::Int { bits, .. } => bits.high_bytes(),
        _ => 0,
    };
    // A byte of low bits holds two nibbles. A byte of high bits holds eight single bits (five-bit weights) or four
    // pairs (six-bit weights).
    let low = (bias & 0x0f) * 0x11;
    let high = (bias >> 4) * if high_bytes == NIBBLES / 8 { 0xff } else { 0x55 };
    for block in tiles.chunks_exact_mut(TILE_ROWS * (BLOCK_BYTES + high_bytes)) {
        let (lows, highs) = block.split_at_mut(TILE_ROWS * BLOCK_BYTES);
        lows.fill(low);
        highs.fill(high);
    }
}

/// Calls `each` for every item of a row's scales, with its byte range in the row and in the tile.
fn each_scale_item(
    scheme: Scheme,
    cols: usize,
    lane: usize,
    mut each: impl FnMut(Range<usize>, Range<usize>),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cleared_tile_holds_zeros() {
        for name in
            ["int8-g32", "int4-g32", "int4-g32-zero", "int5-g32", "int5-g32-super", "int6-g16-supersym"]
        {
            let (scheme, cols) = (name.parse::<Scheme>().expect(name), 300);
            let (mut blocks, scales) =
                (vec![0x5a; scheme.tile_bytes(cols)], vec![0; scheme.tile_scale_bytes(cols)]);
            clear_tiles(scheme, cols, &mut blocks);
            for lane in 0..TILE_ROWS {
                let mut row = QuantizedRow { q: vec![1; cols], ..QuantizedRow::new(scheme, cols) };
                unpack_row(scheme, lane, &blocks, &scales, &mut row);
                assert_eq!(row.q, [0; 300], "{name}, row {lane}");
            }
        }
    }
    #[test]
    fn schemes_share_a_variant_if_its_name_is_equal() {
        let names = "f32 f16 bf16 int8-row int8-g16 int8-g32 int8-g32-super int4-g32 int4-g128 int4-g32-zero \
                     int4-g32-affine int5-g32 int5-g32-super int6-g16-supersym";
        let all: Vec<Scheme> = names.split(' ').map(|name| name.parse().expect(name)).collect();
        for a in &all {
            for b in &all {
                assert_eq!(a.shares_variant(*b), a.variant() == b.variant(), "{a} and {b}");
            }
        }
    }
}
