//! The interface of a dispatch of attention on the NPU: shapes, buckets, the 16 words of parameters, the layout of each
//! buffer, and which keys the kernel reads.
//!
//! One dispatch computes attention of consecutive prompt tokens of one sequence, in one layer, for 1 to 4 KV heads.
//! Each of the NPU's columns computes one KV head with its query heads. A KV head and its query heads are a *group*. A
//! *row* is a prompt token.
//!
//! Kernels are compiled ahead of time, for a [`Shape`] and a [`Bucket`]. A [`Job`] is one dispatch: how much of the
//! bucket is real, and at which positions. Key j is visible to row i if it is no later (`key0 + j <= row0 + i`), is
//! within the window (`key0 + j + window > row0 + i`), and is real (`j < keys`).
//!
//! Nothing here allocates or opens a device. Data from another process causes no panic: [`Job::from_words`] checks all
//! of it.

use std::ops::RangeInclusive;

/// Word 0 of the parameters.
pub const MAGIC: u32 = 0x4158_4e55;

/// Word 1 of the parameters.
pub const VERSION: u32 = 1;

/// Number of words of the parameters, bo4.
pub const PARAM_WORDS: usize = 16;

/// Maximum number of groups of a dispatch: one for each column of the NPU.
pub const MAX_GROUPS: u32 = 4;

/// Rows that a bucket may have.
pub const BUCKET_ROWS: [u32; 2] = [256, 512];

/// Maximum number of keys of a bucket; a power of two.
pub const BUCKET_KEYS: RangeInclusive<u32> = 512..=131_072;

/// The largest window. The sum of a job's positions and its window is below 2^31, because the kernel uses signed
/// integers.
const MAX_WINDOW: u32 = 1 << 16;
const MAX_POSITION: u32 = 1 << 30;

/// The number of cores of a column.
const CORES: u32 = 4;

/// Why no kernel computes this, as a text for users.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ContractError {
    #[error("the NPU's kernel has head_dim 64, 128 or 256, and this model has {0}")]
    HeadDim(u32),
    #[error("the NPU's kernel has 2 or 4 query heads for each KV head, and this model has {0}")]
    HeadsPerGroup(u32),
    #[error("a window of {0} keys is not a multiple of {1} keys, the NPU's tile, from {1} to 65536")]
    Window(u32, u32),
    #[error("a dispatch to the NPU has 1 to 4 KV heads, not {0}")]
    Groups(u32),
    #[error("a bucket of the NPU has 256 or 512 rows, not {0}")]
    BucketRows(u32),
    #[error("a bucket of the NPU has a power of two of keys from 512 to 131072, not {0}")]
    BucketKeys(u32),
    #[error("a dispatch to the NPU has 1 to {limit} rows, not {rows}")]
    Rows { rows: u32, limit: u32 },
    #[error("a dispatch to the NPU has 1 to {limit} keys, not {keys}")]
    Keys { keys: u32, limit: u32 },
    #[error("position {0} is beyond what the NPU's kernel counts, 2^30")]
    Position(u32),
    #[error(
        "the NPU's keys begin at position {key0}, which is not a multiple of {tile} up to the row's {row0}"
    )]
    FirstKey { key0: u32, row0: u32, tile: u32 },
    #[error("the NPU's keys end at position {keys_end}, and row {last_row} needs its own")]
    LastKey { keys_end: u32, last_row: u32 },
    #[error("{offset} keys lie before the first row, and this kernel walks over {least} to {most}")]
    Offset { offset: u32, least: u32, most: u32 },
    #[error("the bucket's {keys} keys are too few for {rows} rows: this kernel walks over {walked}")]
    BucketTooSmall { rows: u32, keys: u32, walked: u32 },
    #[error("the job's window of {0} keys is not the one that its kernel walks over")]
    OtherWindow(u32),
    #[error(
        "the job was made for another kernel, with head_dim {head_dim} and {heads_per_group} heads in a group"
    )]
    OtherShape { head_dim: u32, heads_per_group: u32 },
    #[error("the NPU's parameters are {0} words, not {PARAM_WORDS}")]
    WordCount(usize),
    #[error("word {index} of the NPU's parameters is {word:#x}, not {expected:#x}")]
    Word { index: usize, word: u32, expected: u32 },
}

/// The shape that a kernel is compiled for. `window` decides which keys the kernel walks over: all of the bucket, or a
/// window before each row. It does not decide the mask; the job's parameters do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    head_dim: u32,
    heads_per_group: u32,
    window: Option<u32>,
}

impl Shape {
    pub fn new(head_dim: u32, heads_per_group: u32, window: Option<u32>) -> Result<Shape, ContractError> {
        let shape = Shape { head_dim, heads_per_group, window };
        if !matches!(head_dim, 64 | 128 | 256) {
            return Err(ContractError::HeadDim(head_dim));
        }
        if !matches!(heads_per_group, 2 | 4) {
            return Err(ContractError::HeadsPerGroup(heads_per_group));
        }
        match window {
            Some(window) => checked_window(window, shape.tile()).map(|()| shape),
            None => Ok(shape),
        }
    }

    pub fn head_dim(&self) -> u32 {
        self.head_dim
    }

    /// Query heads for each KV head.
    pub fn heads_per_group(&self) -> u32 {
        self.heads_per_group
    }

    /// The window that the kernel walks over; `None` = it walks over all keys.
    pub fn window(&self) -> Option<u32> {
        self.window
    }

    /// Rows of a block of queries, and keys of a tile. They are limited by the 64 KB of a core.
    pub fn tile(&self) -> u32 {
        if self.head_dim <= 128 { 32 } else { 16 }
    }

    /// Rows that a column computes at a time. Its cores share the query heads, and each core has one block of rows.
    pub fn pass_rows(&self) -> u32 {
        self.tile() * self.blocks_per_pass()
    }

    /// Number of passes over the rows of a bucket.
    pub fn passes(&self, bucket: Bucket) -> u32 {
        bucket.rows / self.pass_rows()
    }

    /// The tiles of keys that pass `pass` reads, in ascending order, counted from key 0 of the job. All cores of a
    /// column read the same tiles, and each skips those that its rows do not see.
    pub fn walk(&self, bucket: Bucket, pass: u32) -> Walk {
        let blocks = self.blocks_per_pass();
        match self.window {
            // The keys up to the pass's last row, with as many keys before the job's first row as fit.
            None => Walk { first: 0, tiles: (bucket.keys - bucket.rows) / self.tile() + (pass + 1) * blocks },
            // The window before the pass's first row, its rows, and one tile, because the first key may be anywhere in
            // its tile.
            Some(window) => Walk { first: pass * blocks, tiles: window / self.tile() + blocks + 1 },
        }
    }

    /// The allowed numbers of keys before the first row.
    pub fn offsets(&self, bucket: Bucket) -> RangeInclusive<u32> {
        match self.window {
            None => 0..=bucket.keys.saturating_sub(bucket.rows),
            Some(window) => window - 1..=window + self.tile() - 2,
        }
    }

    /// Whether this kernel can be compiled for the bucket: no pass reads beyond the bucket's keys.
    pub fn fits(&self, bucket: Bucket) -> Result<(), ContractError> {
        let walked = match self.window {
            None => bucket.rows,
            Some(window) => bucket.rows + window + self.tile(),
        };
        if walked <= bucket.keys {
            Ok(())
        } else {
            Err(ContractError::BucketTooSmall { rows: bucket.rows, keys: bucket.keys, walked })
        }
    }

    fn blocks_per_pass(&self) -> u32 {
        CORES / self.heads_per_group
    }
}

fn checked_window(window: u32, tile: u32) -> Result<(), ContractError> {
    let fine = (tile..=MAX_WINDOW).contains(&window) && window.is_multiple_of(tile);
    if fine { Ok(()) } else { Err(ContractError::Window(window, tile)) }
}

/// The tiles of keys of a pass: the first one, and their number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Walk {
    pub first: u32,
    pub tiles: u32,
}

/// The sizes that a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Bucket {
    rows: u32,
    keys: u32,
    groups: u32,
}

impl Bucket {
    pub fn new(rows: u32, keys: u32, groups: u32) -> Result<Bucket, ContractError> {
        if !BUCKET_ROWS.contains(&rows) {
            return Err(ContractError::BucketRows(rows));
        }
        if !BUCKET_KEYS.contains(&keys) || !keys.is_power_of_two() {
            return Err(ContractError::BucketKeys(keys));
        }
        if !(1..=MAX_GROUPS).contains(&groups) {
            return Err(ContractError::Groups(groups));
        }
        Ok(Bucket { rows, keys, groups })
    }

    /// The smallest bucket for a job of this number of rows, keys and groups, with `offset` keys before its first row.
    pub fn of_job(
        shape: Shape,
        rows: u32,
        keys: u32,
        offset: u32,
        groups: u32,
    ) -> Result<Bucket, ContractError> {
        let limit = BUCKET_ROWS[1];
        let bucket_rows = BUCKET_ROWS.into_iter().find(|most| (1..=*most).contains(&rows));
        let bucket_rows = bucket_rows.ok_or(ContractError::Rows { rows, limit })?;
        let walked = match shape.window {
            None => offset.saturating_add(bucket_rows),
            Some(window) => bucket_rows + window + shape.tile(),
        };
        let least = walked.max(keys).max(*BUCKET_KEYS.start());
        if least > *BUCKET_KEYS.end() {
            return Err(ContractError::Keys { keys: least, limit: *BUCKET_KEYS.end() });
        }
        Bucket::new(bucket_rows, least.next_power_of_two(), groups)
    }

    pub fn rows(&self) -> u32 {
        self.rows
    }

    pub fn keys(&self) -> u32 {
        self.keys
    }

    /// Number of KV heads, one for each column.
    pub fn groups(&self) -> u32 {
        self.groups
    }
}

/// One dispatch. Its fields are those of the parameters, and they are consistent. [`Job::runs_on`] says whether they
/// fit a kernel's walk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Job {
    head_dim: u32,
    heads_per_group: u32,
    bucket: Bucket,
    rows: u32,
    keys: u32,
    row0: u32,
    key0: u32,
    window: Option<u32>,
}

impl Job {
    /// A job with all its numbers. [`Job::plan`] computes the numbers that a caller does not know.
    pub fn new(
        shape: Shape,
        bucket: Bucket,
        rows: RowRange,
        keys: RowRange,
        window: Option<u32>,
    ) -> Result<Job, ContractError> {
        let Shape { head_dim, heads_per_group, .. } = shape;
        let (row0, key0) = (rows.first, keys.first);
        let job =
            Job { head_dim, heads_per_group, bucket, rows: rows.len, keys: keys.len, row0, key0, window };
        job.check().and_then(|()| job.runs_on(shape)).map(|()| job)
    }

    /// The kernel, bucket and parameters for the rows of a chunk in a layer with this window, or without a window.
    ///
    /// A windowed layer runs on the windowed kernel only if a whole window is before the chunk's first row. Earlier
    /// chunks run on the kernel that walks over all keys, with the window in their mask.
    pub fn plan(
        head_dim: u32,
        heads_per_group: u32,
        window: Option<u32>,
        groups: u32,
        rows: RowRange,
    ) -> Result<(Shape, Job), ContractError> {
        let windowed = Shape::new(head_dim, heads_per_group, window)?;
        if rows.first >= MAX_POSITION {
            return Err(ContractError::Position(rows.first));
        }
        let before = window.and_then(|window| rows.first.checked_sub(window - 1));
        let (shape, key0) = match before {
            Some(before) => (windowed, before - before % windowed.tile()),
            None => (Shape { window: None, ..windowed }, 0),
        };
        let offset = rows.first - key0;
        let keys = RowRange { first: key0, len: offset.saturating_add(rows.len) };
        let bucket = Bucket::of_job(shape, rows.len, keys.len, offset, groups)?;
        Job::new(shape, bucket, rows, keys, window).map(|job| (shape, job))
    }

    /// Reads the parameters. Every word is checked, because another process may have written them.
    pub fn from_words(words: &[u32]) -> Result<Job, ContractError> {
        let words: &[u32; PARAM_WORDS] =
            words.try_into().map_err(|_| ContractError::WordCount(words.len()))?;
        let [
            magic,
            version,
            head_dim,
            heads_per_group,
            groups,
            bucket_rows,
            bucket_keys,
            rows,
            keys,
            row0,
            key0,
            window,
            rest @ ..,
        ] = *words;
        let fixed = [(0, magic, MAGIC), (1, version, VERSION)];
        let zeros = rest.into_iter().enumerate().map(|(i, word)| (PARAM_WORDS - rest.len() + i, word, 0));
        for (index, word, expected) in fixed.into_iter().chain(zeros) {
            if word != expected {
                return Err(ContractError::Word { index, word, expected });
            }
        }
        Shape::new(head_dim, heads_per_group, None)?;
        let bucket = Bucket::new(bucket_rows, bucket_keys, groups)?;
        let window = (window != 0).then_some(window);
        let job = Job { head_dim, heads_per_group, bucket, rows, keys, row0, key0, window };
        job.check().map(|()| job)
    }

    /// The parameters, in the kernel's format.
    pub fn to_words(&self) -> [u32; PARAM_WORDS] {
        let Bucket { rows, keys, groups } = self.bucket;
        let window = self.window.unwrap_or(0);
        let job = [self.rows, self.keys, self.row0, self.key0, window];
        let head = [MAGIC, VERSION, self.head_dim, self.heads_per_group, groups, rows, keys];
        let mut words = [0; PARAM_WORDS];
        words[..7].copy_from_slice(&head);
        words[7..12].copy_from_slice(&job);
        words
    }

    /// Whether a kernel of this shape, for this job's bucket, walks over every key that a row sees.
    pub fn runs_on(&self, shape: Shape) -> Result<(), ContractError> {
        let Shape { head_dim, heads_per_group, window } = shape;
        if (head_dim, heads_per_group) != (self.head_dim, self.heads_per_group) {
            return Err(ContractError::OtherShape {
                head_dim: self.head_dim,
                heads_per_group: self.heads_per_group,
            });
        }
        if window.is_some() && window != self.window {
            return Err(ContractError::OtherWindow(self.window.unwrap_or(0)));
        }
        shape.fits(self.bucket)?;
        let (offset, offsets) = (self.row0 - self.key0, shape.offsets(self.bucket));
        let (least, most) = (*offsets.start(), *offsets.end());
        if offsets.contains(&offset) { Ok(()) } else { Err(ContractError::Offset { offset, least, most }) }
    }

    /// Whether row `row` sees key `key`, both counted from the job's first one.
    pub fn sees(&self, row: u32, key: u32) -> bool {
        let (row, position) = (u64::from(self.row0) + u64::from(row), u64::from(self.key0) + u64::from(key));
        let in_window = self.window.is_none_or(|window| position + u64::from(window) > row);
        key < self.keys && position <= row && in_window
    }

    pub fn head_dim(&self) -> u32 {
        self.head_dim
    }

    pub fn heads_per_group(&self) -> u32 {
        self.heads_per_group
    }

    pub fn bucket(&self) -> Bucket {
        self.bucket
    }

    /// All query heads, each as its group and its index there.
    pub fn heads(&self) -> impl Iterator<Item = (u32, u32)> + use<> {
        let heads = self.heads_per_group;
        (0..self.bucket.groups).flat_map(move |group| (0..heads).map(move |head| (group, head)))
    }

    /// Number of real rows; the other rows of the bucket are not read.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Number of real keys; no row sees the other keys of the bucket.
    pub fn keys(&self) -> u32 {
        self.keys
    }

    /// The position of row 0.
    pub fn row0(&self) -> u32 {
        self.row0
    }

    /// The position of key 0.
    pub fn key0(&self) -> u32 {
        self.key0
    }

    /// The window of the mask.
    pub fn window(&self) -> Option<u32> {
        self.window
    }

    /// Rows of a block, and keys of a tile.
    pub fn tile(&self) -> u32 {
        Shape { head_dim: self.head_dim, heads_per_group: self.heads_per_group, window: None }.tile()
    }

    /// The layout of the job's buffers.
    pub fn layout(&self) -> Layout {
        Layout { head_dim: self.head_dim, heads_per_group: self.heads_per_group, bucket: self.bucket }
    }

    fn check(&self) -> Result<(), ContractError> {
        let Job { bucket, rows, keys, row0, key0, window, .. } = *self;
        if !(1..=bucket.rows).contains(&rows) {
            return Err(ContractError::Rows { rows, limit: bucket.rows });
        }
        if !(1..=bucket.keys).contains(&keys) {
            return Err(ContractError::Keys { keys, limit: bucket.keys });
        }
        if row0 >= MAX_POSITION {
            return Err(ContractError::Position(row0));
        }
        let tile = self.tile();
        if key0 > row0 || !key0.is_multiple_of(tile) {
            return Err(ContractError::FirstKey { key0, row0, tile });
        }
        if let Some(window) = window {
            checked_window(window, tile)?;
        }
        let (keys_end, last_row) = (key0 + keys, row0 + rows - 1);
        if keys_end <= last_row { Err(ContractError::LastKey { keys_end, last_row }) } else { Ok(()) }
    }
}

/// Consecutive positions: the first one, and their number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowRange {
    pub first: u32,
    pub len: u32,
}

/// The positions of a tensor's rows in the buffers. Sizes and offsets are in bytes. Every buffer is little endian and
/// without gaps: `[group][head][row][head_dim]` of bf16 (bo0, Q) and of f32 (bo3, O), `[group][key][head_dim]` of bf16
/// (bo1, K; bo2, V), and 16 u32 (bo4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    head_dim: u32,
    heads_per_group: u32,
    bucket: Bucket,
}

const BF16_BYTES: u64 = 2;
const F32_BYTES: u64 = 4;

impl Layout {
    pub fn of(shape: Shape, bucket: Bucket) -> Layout {
        Layout { head_dim: shape.head_dim, heads_per_group: shape.heads_per_group, bucket }
    }

    /// The bytes of bo0 to bo4.
    pub fn bytes(&self) -> [u64; 5] {
        let rows = self.rows_before(self.bucket.groups, 0, 0);
        let keys = self.keys_before(self.bucket.groups, 0);
        let width = u64::from(self.head_dim);
        let kv = keys * width * BF16_BYTES;
        [rows * width * BF16_BYTES, kv, kv, rows * width * F32_BYTES, PARAM_WORDS as u64 * F32_BYTES]
    }

    /// The offset of a row of Q.
    pub fn query(&self, group: u32, head: u32, row: u32) -> u64 {
        self.rows_before(group, head, row) * u64::from(self.head_dim) * BF16_BYTES
    }

    /// The offset of a key in K, and of its value in V.
    pub fn key(&self, group: u32, key: u32) -> u64 {
        self.keys_before(group, key) * u64::from(self.head_dim) * BF16_BYTES
    }

    /// The offset of a row of O.
    pub fn output(&self, group: u32, head: u32, row: u32) -> u64 {
        self.rows_before(group, head, row) * u64::from(self.head_dim) * F32_BYTES
    }

    fn rows_before(&self, group: u32, head: u32, row: u32) -> u64 {
        let heads = u64::from(group) * u64::from(self.heads_per_group) + u64::from(head);
        heads * u64::from(self.bucket.rows) + u64::from(row)
    }

    fn keys_before(&self, group: u32, key: u32) -> u64 {
        u64::from(group) * u64::from(self.bucket.keys) + u64::from(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sizes of Gemma-3, and of the demo model: name, head_dim, heads in a group, KV heads, window (their
    /// `config.json`).
    const GEMMA_3: [(&str, u32, u32, u32, u32); 6] = [
        ("270M", 256, 4, 1, 512),
        ("1B", 256, 4, 1, 512),
        ("4B", 256, 2, 4, 1024),
        ("12B", 256, 2, 8, 1024),
        ("27B", 128, 2, 16, 1024),
        ("demo", 64, 2, 2, 64),
    ];

    fn rows(first: u32, len: u32) -> RowRange {
        RowRange { first, len }
    }

    #[test]
    fn every_gemma_3_has_a_job_for_every_chunk() {
        for (name, head_dim, heads, kv_heads, window) in GEMMA_3 {
            for window in [None, Some(window)] {
                for first in [0, 1, 15, 255, 256, 510, 511, 512, 1022, 1023, 1024, 1040, 8191, 100_000] {
                    for len in [1, 17, 255, 256, 257, 511, 512] {
                        let groups = kv_heads.min(MAX_GROUPS);
                        let (shape, job) =
                            Job::plan(head_dim, heads, window, groups, rows(first, len)).unwrap();
                        check_walk(shape, job, &format!("{name}, {len} rows from {first}, {window:?}"));
                        assert_eq!(Job::from_words(&job.to_words()), Ok(job));
                    }
                }
            }
        }
    }

    /// Each pass reads tiles of the bucket. They include every key that its rows see, and the number of those keys
    /// follows from the window.
    #[track_caller]
    fn check_walk(shape: Shape, job: Job, what: &str) {
        let (tile, pass_rows) = (shape.tile(), shape.pass_rows());
        for pass in 0..shape.passes(job.bucket()) {
            let Walk { first, tiles } = shape.walk(job.bucket(), pass);
            let read = first * tile..(first + tiles) * tile;
            assert!(read.end <= job.bucket().keys(), "{what}: pass {pass} reads {read:?}");
            for row in (pass * pass_rows..(pass + 1) * pass_rows).filter(|row| *row < job.rows()) {
                // The keys that a row sees are consecutive.
                let position = job.row0() + row;
                let oldest = job.window().map_or(0, |window| (position + 1).saturating_sub(window));
                let (oldest, newest) = (oldest - job.key0(), position - job.key0());
                assert!(job.sees(row, oldest) && job.sees(row, newest), "{what}: row {row}");
                assert!(oldest == 0 || !job.sees(row, oldest - 1), "{what}: row {row}");
                assert!(!job.sees(row, newest + 1), "{what}: row {row}");
                assert!(read.contains(&oldest) && read.contains(&newest), "{what}: row {row} of {read:?}");
            }
        }
    }

    #[test]
    fn a_windowed_kernel_walks_over_little_more_than_its_window() {
        for (_, head_dim, heads, _, window) in GEMMA_3 {
            let shape = Shape::new(head_dim, heads, Some(window)).unwrap();
            let bucket = Bucket::new(512, 131_072, 1).unwrap();
            let walked = shape.walk(bucket, shape.passes(bucket) - 1).tiles * shape.tile();
            assert_eq!(walked, window + shape.pass_rows() + shape.tile());
        }
    }

    /// `npu/kernels/schedule.py`, from which the kernels are made, computes the walks too.
    #[test]
    fn the_walks_are_those_of_the_kernels() {
        #[derive(serde::Deserialize)]
        struct Golden {
            head_dim: u32,
            heads_per_group: u32,
            window: Option<u32>,
            rows: u32,
            keys: u32,
            tile: u32,
            passes: Vec<[u32; 2]>,
        }
        let goldens: Vec<Golden> =
            serde_json::from_str(include_str!("../../tests/data/npu/walks.json")).unwrap();
        assert_eq!(goldens.len(), 20);
        for golden in goldens {
            let shape = Shape::new(golden.head_dim, golden.heads_per_group, golden.window).unwrap();
            let bucket = Bucket::new(golden.rows, golden.keys, 1).unwrap();
            let walks = (0..shape.passes(bucket)).map(|pass| shape.walk(bucket, pass));
            let walks: Vec<[u32; 2]> = walks.map(|walk| [walk.first, walk.tiles]).collect();
            assert_eq!((shape.tile(), walks), (golden.tile, golden.passes), "{shape:?}, {bucket:?}");
        }
    }

    #[test]
    fn the_smallest_bucket_is_taken() {
        let plan = |window, first, len| Job::plan(256, 2, window, 4, rows(first, len)).unwrap();
        let bucket = |window, first, len| plan(window, first, len).1.bucket();
        assert_eq!(bucket(None, 0, 256), Bucket::new(256, 512, 4).unwrap());
        assert_eq!(bucket(None, 0, 257), Bucket::new(512, 512, 4).unwrap());
        // 300 rows need a bucket of 512, which has no room for 100 keys before them.
        assert_eq!(bucket(None, 100, 300), Bucket::new(512, 1024, 4).unwrap());
        assert_eq!(bucket(None, 130_560, 512), Bucket::new(512, 131_072, 4).unwrap());
        // A whole window is before row 1023, and not before row 1022.
        assert_eq!(plan(Some(1024), 1022, 512).0.window(), None);
        assert_eq!(plan(Some(1024), 1023, 512).0.window(), Some(1024));
        assert_eq!(bucket(Some(1024), 100_000, 512), Bucket::new(512, 2048, 4).unwrap());
        let beyond = Job::plan(256, 2, None, 4, rows(130_561, 512)).unwrap_err();
        assert_eq!(beyond.to_string(), "a dispatch to the NPU has 1 to 131072 keys, not 131073");
    }

    #[test]
    fn the_words_are_those_of_the_contract() {
        let (_, job) = Job::plan(128, 2, Some(1024), 3, rows(5000, 300)).unwrap();
        // 5000 - 1023 is in the tile of 3968.
        let expected = [0x4158_4e55, 1, 128, 2, 3, 512, 2048, 300, 1332, 5000, 3968, 1024, 0, 0, 0, 0];
        assert_eq!(job.to_words(), expected);
        assert_eq!(job.to_words()[0].to_le_bytes(), *b"UNXA");
    }

    #[test]
    fn layouts_have_the_bytes_and_offsets_of_the_contract() {
        let shape = Shape::new(256, 2, None).unwrap();
        let layout = Layout::of(shape, Bucket::new(512, 131_072, 4).unwrap());
        let kv = 4 * 131_072 * 256 * 2;
        assert_eq!(layout.bytes(), [4 * 2 * 512 * 256 * 2, kv, kv, 4 * 2 * 512 * 256 * 4, 64]);
        assert_eq!(layout.query(1, 1, 3), ((2 + 1) * 512 + 3) * 256 * 2);
        assert_eq!(layout.output(3, 0, 511), (6 * 512 + 511) * 256 * 4);
        assert_eq!(layout.key(2, 5), (2 * 131_072 + 5) * 256 * 2);
        assert_eq!(layout.query(4, 0, 0), layout.bytes()[0]);
        assert_eq!(layout.key(4, 0), layout.bytes()[1]);
    }

    #[test]
    fn words_of_another_process_are_checked() {
        let (_, job) = Job::plan(256, 2, Some(1024), 4, rows(2000, 100)).unwrap();
        let good = job.to_words();
        let with = |index: usize, word: u32| {
            let mut words = good;
            words[index] = word;
            Job::from_words(&words)
        };
        use ContractError::*;
        assert_eq!(with(0, 7), Err(Word { index: 0, word: 7, expected: MAGIC }));
        assert_eq!(with(1, 2), Err(Word { index: 1, word: 2, expected: 1 }));
        assert_eq!(with(2, 192), Err(HeadDim(192)));
        assert_eq!(with(3, 3), Err(HeadsPerGroup(3)));
        assert_eq!(with(4, 5), Err(Groups(5)));
        assert_eq!(with(5, 128), Err(BucketRows(128)));
        assert_eq!(with(6, 3000), Err(BucketKeys(3000)));
        assert_eq!(with(7, 0), Err(Rows { rows: 0, limit: 256 }));
        assert_eq!(with(8, 2049), Err(Keys { keys: 2049, limit: 2048 }));
        assert_eq!(with(9, u32::MAX), Err(Position(u32::MAX)));
        assert_eq!(with(10, 2016), Err(FirstKey { key0: 2016, row0: 2000, tile: 16 }));
        assert_eq!(with(11, 8), Err(Window(8, 16)));
        assert_eq!(with(15, 1), Err(Word { index: 15, word: 1, expected: 0 }));
        assert_eq!(with(8, 1), Err(LastKey { keys_end: job.key0() + 1, last_row: 2099 }));
        assert_eq!(Job::from_words(&good[..15]), Err(WordCount(15)));
        // No word makes it panic, whatever the other words are.
        let extremes = [0, 1, 16, 255, 1 << 30, (1 << 31) - 1, 1 << 31, u32::MAX];
        for a in 0..PARAM_WORDS {
            for b in 0..PARAM_WORDS {
                for (x, y) in extremes.iter().flat_map(|x| extremes.map(|y| (*x, y))) {
                    let mut words = good;
                    (words[a], words[b]) = (x, y);
                    if let Ok(job) = Job::from_words(&words) {
                        assert_eq!(job.to_words(), words);
                    }
                }
            }
        }
    }

    #[test]
    fn a_kernel_refuses_a_job_that_it_does_not_walk_over() {
        let shape = |window| Shape::new(256, 2, window).unwrap();
        let (windowed, job) = Job::plan(256, 2, Some(1024), 4, rows(2000, 100)).unwrap();
        assert_eq!(job.runs_on(windowed), Ok(()));
        assert_eq!(job.runs_on(shape(Some(512))), Err(ContractError::OtherWindow(1024)));
        assert!(matches!(
            job.runs_on(Shape::new(128, 2, None).unwrap()),
            Err(ContractError::OtherShape { .. })
        ));
        let bucket = Bucket::new(256, 2048, 4).unwrap();
        // Too few keys before the first row for a windowed kernel, and too many for a kernel that walks over all keys.
        let early = Job::new(shape(Some(1024)), bucket, rows(1000, 9), rows(0, 1009), Some(1024));
        assert_eq!(early, Err(ContractError::Offset { offset: 1000, least: 1023, most: 1038 }));
        let late = Job::new(shape(None), bucket, rows(1793, 9), rows(0, 1802), None);
        assert_eq!(late, Err(ContractError::Offset { offset: 1793, least: 0, most: 1792 }));
        let small = Bucket::new(512, 1024, 4).unwrap();
        assert_eq!(
            shape(Some(1024)).fits(small),
            Err(ContractError::BucketTooSmall { rows: 512, keys: 1024, walked: 1552 })
        );
    }

    #[test]
    fn shapes_of_other_models_are_refused() {
        let error = Shape::new(32, 2, None).unwrap_err();
        assert_eq!(error.to_string(), "the NPU's kernel has head_dim 64, 128 or 256, and this model has 32");
        assert_eq!(Shape::new(64, 3, None), Err(ContractError::HeadsPerGroup(3)));
        assert_eq!(Shape::new(64, 2, Some(16)), Err(ContractError::Window(16, 32)));
        assert_eq!(Shape::new(128, 8, None), Err(ContractError::HeadsPerGroup(8)));
        assert_eq!(Shape::new(256, 2, Some(1000)), Err(ContractError::Window(1000, 16)));
        assert_eq!(Shape::new(256, 2, Some(0)), Err(ContractError::Window(0, 16)));
        assert!(Job::plan(256, 2, Some(0), 1, rows(5, 5)).is_err());
        assert!(Job::plan(256, 2, Some(1024), 1, rows(u32::MAX, u32::MAX)).is_err());
        assert!(Job::plan(256, 2, None, 1, rows(0, u32::MAX)).is_err());
    }
}
