//! Divides the attention of a step into work items: each workgroup of `shaders/attention.comp` computes an item, and
//! `shaders/attention_merge.comp` merges the partial results ("partials").
//!
//! The keys of a sequence are cut into splits (split-KV) at positions that depend only on the layer
//! ([`Splits`]), and every token is computed split by split. So the result of a token has the same bits for every
//! division of the work: one workgroup per split or one for all splits; the token alone or in a tile with its
//! neighbours. The division uses as many workgroups as the device needs, if there is room for their partials.
//!
//! This module uses no device: it only computes, and its callers pass the room for partials.

use std::ops::Range;

use super::arrays::{AttentionShape, ShareArrays, StepArrays};
use crate::gpu::{Buffer, INDIRECT_BYTES};

/// The first 16 splits have one unit of keys ([`Splits::unit`]), the next 28 have 4 units, and all later splits have 16
/// units (`shaders/common/softmax.glsl`). Short splits give a short context enough workgroups. Longer splits limit the
/// partials of a long context: at most 164 for 131,072 keys. With these two numbers, a split of 4 units starts at a
/// multiple of 4 units, and a split of 16 units at a multiple of 16.
const SPLITS_OF_1: usize = 16;
const SPLITS_OF_4: usize = 28;
/// Number of units before the first split of 16 units.
const UNITS_IN_SHORT_SPLITS: usize = SPLITS_OF_1 + 4 * SPLITS_OF_4;

/// The most rows of a tile (a row is one query head of one token): four teams of [`TEAM_ROWS`]
/// (`shaders/common/attention_by_lanes.glsl`), or rows of `shaders/common/attention_in_tiles.glsl`.
pub(super) const TILE_ROWS: usize = 4 * TEAM_ROWS;
/// Number of rows that a team of 64 lanes computes.
pub(super) const TEAM_ROWS: usize = 8;
/// If a step has this many workgroups of tiles, no tile is split further: eight for each of the 12 compute units of a
/// Radeon 780M. If it has fewer, its tiles are split like single tokens. The number is calculated; it was not measured
/// on a GPU.
const TILE_WORKGROUPS_WANTED: usize = 96;
/// Flag of a token's first slot in [`Shares::merges`]: the token's partials are in the array of tiles.
const IN_TILES: u32 = 1 << 31;

/// The positions at which a layer cuts the keys of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Splits {
    /// Number of keys in each of the first splits. It is a multiple of 64, the number of keys that the kernel reads at
    /// a time.
    pub unit: usize,
    /// Whether later splits are longer, so that a long context has few splits. False for a layer with a sliding window.
    pub grows: bool,
}

impl Splits {
    /// The splits of a layer. Each split has one workgroup per KV head, so with many KV heads the splits can be longer.
    pub fn of(num_kv_heads: usize, window: Option<usize>) -> Splits {
        Splits { unit: (16 * num_kv_heads).next_power_of_two().clamp(64, 256), grows: window.is_none() }
    }

    /// The first key of a split.
    pub fn start(&self, split: usize) -> usize {
        let past_first = split.saturating_sub(SPLITS_OF_1);
        let units = match past_first {
            _ if !self.grows || past_first == 0 => split,
            1..=SPLITS_OF_4 => SPLITS_OF_1 + 4 * past_first,
            _ => UNITS_IN_SHORT_SPLITS + 16 * (past_first - SPLITS_OF_4),
        };
        units * self.unit
    }

    /// The split that a key belongs to.
    pub fn of_key(&self, key: usize) -> usize {
        let units = key / self.unit;
        match units {
            _ if !self.grows => units,
            0..SPLITS_OF_1 => units,
            SPLITS_OF_1..UNITS_IN_SHORT_SPLITS => SPLITS_OF_1 + (units - SPLITS_OF_1) / 4,
            _ => SPLITS_OF_1 + SPLITS_OF_4 + (units - UNITS_IN_SHORT_SPLITS) / 16,
        }
    }
}

impl AttentionShape {
    pub fn splits(&self) -> Splits {
        Splits::of(self.num_kv_heads, self.window)
    }

    /// The first key that a token at `position` sees.
    pub fn first_key(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// The most tokens in a tile.
    pub fn tile_tokens(&self) -> usize {
        tile_rows(self.head_dim) / (self.num_heads / self.num_kv_heads)
    }

    /// Number of f32 elements of a token's partial. Each head has `head_dim` values, the largest score, the sum of the
    /// weights, and two elements of padding.
    pub fn partial_width(&self) -> usize {
        partial_width(self.num_heads, self.head_dim)
    }
}

/// Number of rows of a tile. On RDNA 3, subgroups that multiply tiles of more rows of large heads need more registers than
/// there are.
pub(super) const fn tile_rows(head_dim: usize) -> usize {
    if head_dim > 256 { TILE_ROWS / 2 } else { TILE_ROWS }
}

/// [`AttentionShape::partial_width`] as a constant function.
pub const fn partial_width(num_heads: usize, head_dim: usize) -> usize {
    num_heads * (head_dim + 4)
}

/// The work of one workgroup per KV head: neighbouring tokens of a sequence over neighbouring splits. The workgroup
/// writes one partial for each token.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Item {
    /// Row of the first token in the queries.
    pub token: u32,
    /// Number of tokens.
    pub tokens: u32,
    /// Position of the first token in its sequence.
    pub position: u32,
    /// Row of the sequence in the block tables.
    pub sequence: u32,
    pub first_split: u32,
    pub splits: u32,
    /// Slot of the first token's partial.
    pub slot: u32,
    /// Distance from a token's slot to the next token's slot.
    pub stride: u32,
    /// The last position that all tokens see. Without an image, it is 0, and each token sees up to its own position.
    pub sees_to: u32,
}

/// Neighbouring tokens of one sequence in a step: of text, or of one image.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    /// Row of the first token in the step.
    pub row: usize,
    /// Position of the first token in the sequence.
    pub start: usize,
    pub tokens: usize,
    /// Row of the sequence in the block tables.
    pub sequence: usize,
    /// The last position that all tokens see, of an image. `None`: each token sees up to its own position.
    pub sees_to: Option<usize>,
}

impl Run {
    /// The last position that any of the tokens sees.
    fn last_seen(&self) -> usize {
        self.sees_to.unwrap_or(0).max(self.start + self.tokens - 1)
    }
}

/// Numbers of slots for the partials of single tokens and of tiles. Each token of a step needs at least one slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    pub single: usize,
    pub tiles: usize,
}

/// A part of a step: some of its rows, and their items as ranges of all items.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartItems {
    pub rows: Range<usize>,
    pub single: Range<usize>,
    pub tiles: Range<usize>,
}

/// The attention of a step, divided into items.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Shares {
    pub single: Vec<Item>,
    pub tiles: Vec<Item>,
    /// For each token of the step, its first slot (with the flag `IN_TILES` for tiles) and the number of its partials;
    /// zeros for padding tokens.
    pub merges: Vec<[u32; 2]>,
    /// The parts of the step.
    pub parts: Vec<PartItems>,
}

/// Neighbouring tokens that are computed together: a single token, or the tokens of a tile.
struct Span {
    run: Run,
    first_split: usize,
    splits: usize,
    /// Whether each split has its own workgroup. If not, one workgroup computes all splits.
    is_split: bool,
}

impl Span {
    /// The number of slots that the span needs in addition to one per token, if each split has its own workgroup.
    fn extra_slots(&self) -> usize {
        self.run.tokens * (self.splits - 1)
    }
}

impl Shares {
    /// [`Shares::in_parts`] for a step of `tokens` tokens, with parts of `rows_per_part` rows.
    pub fn new(
        shape: &AttentionShape,
        runs: &[Run],
        tokens: usize,
        rows_per_part: usize,
        room: Room,
    ) -> Shares {
        let starts = (0..tokens).step_by(rows_per_part);
        let parts = starts.map(|first| first..(first + rows_per_part).min(tokens)).collect::<Vec<_>>();
        Shares::in_parts(shape, runs, &parts, room)
    }

    /// Divides a step whose rows are these consecutive parts. Rows that are in no run are padding. No item belongs to
    /// two parts. Panics if there is no room for one partial per token.
    pub fn in_parts(shape: &AttentionShape, runs: &[Run], parts: &[Range<usize>], room: Room) -> Shares {
        let tokens = parts.last().map_or(0, |part| part.end);
        let mut shares = Shares { merges: vec![[0; 2]; tokens], ..Shares::default() };
        let (mut single, mut tiles) = (Vec::new(), Vec::new());
        for run in runs {
            let end = run.row + run.tokens;
            let mut row = run.row;
            while row < end {
                let part_end =
                    parts.iter().find(|part| part.contains(&row)).expect("every row is in a part").end;
                let count = (end.min(part_end) - row).min(shape.tile_tokens());
                let run = Run { row, start: run.start + row - run.row, tokens: count, ..*run };
                let splits = shape.splits();
                let first_split = splits.of_key(shape.first_key(run.start));
                let last_split = splits.of_key(run.last_seen());
                let span = Span { run, first_split, splits: last_split - first_split + 1, is_split: false };
                let is_single = count == 1 && single.len() < room.single;
                if is_single {
                    single.push(span)
                } else {
                    tiles.push(span)
                }
                row += count;
            }
        }
        let needed = tiles.iter().map(|span| span.run.tokens).sum::<usize>();
        assert!(needed <= room.tiles, "{needed} partials of tiles, but room for {}", room.tiles);
        split_longest(&mut single, room.single, usize::MAX);
        split_longest(&mut tiles, room.tiles, TILE_WORKGROUPS_WANTED.div_ceil(shape.num_kv_heads));

        let mut slots = [0; 2];
        for rows in parts {
            let (single_first, tiles_first) = (shares.single.len(), shares.tiles.len());
            let is_in = |span: &&Span| rows.contains(&span.run.row);
            for span in single.iter().filter(is_in) {
                emit(span, &mut slots[0], 0, &mut shares.single, &mut shares.merges);
            }
            for span in tiles.iter().filter(is_in) {
                emit(span, &mut slots[1], IN_TILES, &mut shares.tiles, &mut shares.merges);
            }
            let (single, tiles) = (single_first..shares.single.len(), tiles_first..shares.tiles.len());
            shares.parts.push(PartItems { rows: rows.clone(), single, tiles });
        }
        shares
    }

    /// Workgroup counts of the indirect dispatches for single tokens and for tiles: first for the whole step, then for
    /// each part.
    pub fn groups(&self, num_kv_heads: usize) -> Vec<[[u32; 3]; 2]> {
        let groups =
            |single: usize, tiles: usize| [single, tiles].map(|n| [n as u32, num_kv_heads as u32, 1]);
        let all = groups(self.single.len(), self.tiles.len());
        let each = self.parts.iter().map(|part| groups(part.single.len(), part.tiles.len()));
        std::iter::once(all).chain(each).collect()
    }
}

/// Gives each split of the longest spans its own workgroup, until `slots` are used up or there are `wanted` items.
/// Longer spans come first, because they take the most time.
fn split_longest(spans: &mut [Span], slots: usize, wanted: usize) {
    spans.sort_by_key(|span| std::cmp::Reverse(span.splits));
    let mut spare = slots - spans.iter().map(|span| span.run.tokens).sum::<usize>();
    let mut items = spans.len();
    for span in spans.iter_mut().filter(|span| span.splits > 1) {
        if items < wanted && span.extra_slots() <= spare {
            span.is_split = true;
            spare -= span.extra_slots();
            items += span.splits - 1;
        }
    }
    // Spans that are not split start first, because their workgroups take the most time.
    spans.sort_by_key(|span| span.is_split);
}

fn emit(span: &Span, next: &mut usize, flag: u32, items: &mut Vec<Item>, merges: &mut [[u32; 2]]) {
    let Span { run, first_split, splits, is_split } = span;
    let (count, each) = if *is_split { (*splits, 1) } else { (1, *splits) };
    let slot = *next;
    *next += run.tokens * count;
    for n in 0..count {
        items.push(Item {
            token: run.row as u32,
            tokens: run.tokens as u32,
            position: run.start as u32,
            sequence: run.sequence as u32,
            first_split: (first_split + n) as u32,
            splits: each as u32,
            slot: (slot + n) as u32,
            stride: count as u32,
            sees_to: run.sees_to.unwrap_or(0) as u32,
        });
    }
    for (i, merge) in merges[run.row..run.row + run.tokens].iter_mut().enumerate() {
        *merge = [(slot + i * count) as u32 | flag, count as u32];
    }
}

/// The range `some` of the items in a buffer.
pub(super) fn items_of(items: &Buffer, some: &Range<usize>) -> Buffer {
    let bytes = |n: usize| (n * size_of::<Item>()) as u64;
    items.slice(bytes(some.start), bytes(some.len()))
}

impl StepArrays {
    /// The arrays of the part `part`, which is number `index` of the step's parts.
    pub fn part(&self, part: &PartItems, index: usize) -> StepArrays {
        // A buffer range cannot be empty. For a part without items, the range has one item, which no workgroup reads.
        let some = |items: &Option<Buffer>, some: &Range<usize>| {
            items.as_ref().map(|items| items_of(items, if some.is_empty() { &(0..1) } else { some }))
        };
        let groups_bytes = 2 * INDIRECT_BYTES;
        let StepArrays { shares, .. } = self;
        let (single, tiles) = (some(&shares.single, &part.single), some(&shares.tiles, &part.tiles));
        let groups = shares.groups.slice((1 + index as u64) * groups_bytes, groups_bytes);
        let of_rows = self.rows(&part.rows);
        StepArrays { shares: ShareArrays { single, tiles, groups, ..of_rows.shares }, ..of_rows }
    }

    /// The arrays of some rows. The items and the workgroup counts are still the ones of the whole step.
    pub fn rows(&self, rows: &Range<usize>) -> StepArrays {
        let some = |array: &Buffer| array.slice(4 * rows.start as u64, 4 * rows.len() as u64);
        let merges = self.shares.merges.slice(8 * rows.start as u64, 8 * rows.len() as u64);
        StepArrays {
            ids: some(&self.ids),
            positions: some(&self.positions),
            sequence_of: some(&self.sequence_of),
            slot_mapping: some(&self.slot_mapping),
            block_tables: self.block_tables.clone(),
            shares: ShareArrays { merges, ..self.shares.clone() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(num_heads: usize, num_kv_heads: usize, window: Option<usize>) -> AttentionShape {
        AttentionShape { num_heads, num_kv_heads, head_dim: 128, block_size: 16, max_blocks: 8192, window }
    }

    #[test]
    fn splits_are_contiguous_and_a_long_context_has_few() {
        for (heads, window, of_128k) in
            [(16, None, 68), (8, None, 100), (1, None, 164), (16, Some(1024), 512)]
        {
            let splits = Splits::of(heads, window);
            let mut split = 0;
            for key in 0..131_072 {
                split += usize::from(key == splits.start(split + 1));
                assert_eq!(splits.of_key(key), split, "{splits:?}, key {key}");
            }
            assert_eq!((splits.start(0), split + 1), (0, of_128k), "{splits:?}");
            assert!((0..600).all(|split| splits.start(split).is_multiple_of(64)), "{splits:?}");
        }
    }

    /// The key ranges of each token's partials. Panics if a partial is not in the slot where the merge reads it, or if
    /// two partials have the same slot.
    fn covered(shares: &Shares, shape: &AttentionShape, room: Room) -> Vec<Vec<Range<usize>>> {
        let mut slots = [vec![None; room.single], vec![None; room.tiles]];
        for (items, slots) in [&shares.single, &shares.tiles].into_iter().zip(&mut slots) {
            for item in items {
                for i in 0..item.tokens {
                    let slot = &mut slots[(item.slot + i * item.stride) as usize];
                    assert!(slot.is_none(), "two partials in one slot");
                    *slot = Some((item.token + i, item.first_split, item.first_split + item.splits));
                }
            }
        }
        let start = |split: u32| shape.splits().start(split as usize);
        let of_token = |(token, merge): (u32, &[u32; 2])| {
            let tiles = merge[0] & IN_TILES != 0;
            let first = (merge[0] & !IN_TILES) as usize;
            let all = &slots[usize::from(tiles)][first..first + merge[1] as usize];
            let range = |slot: &Option<(u32, u32, u32)>| {
                let (of, from, to) = slot.expect("an item writes the slot");
                assert_eq!(of, token, "another token's partial");
                start(from)..start(to)
            };
            all.iter().map(range).collect()
        };
        (0..).zip(&shares.merges).map(of_token).collect()
    }

    #[test]
    fn every_key_is_covered_once_for_every_room_and_part_size() {
        let shapes =
            [shape(32, 16, None), shape(32, 16, Some(1024)), shape(4, 1, Some(512)), shape(16, 1, None)];
        let starts = [0, 100_000, 511, 5000, 1023];
        for shape in shapes {
            // The step has sequences of one token and of several tokens, followed by padding tokens.
            let (mut runs, mut row) = (Vec::new(), 0);
            for (sequence, (start, tokens)) in starts.into_iter().zip([1, 1, 40, 17, 3]).enumerate() {
                runs.push(Run { row, start, tokens, sequence, sees_to: None });
                row += tokens;
            }
            for (single, tiles) in [(512, 1000), (2, 62), (0, 62), (5, 80)] {
                for rows_per_part in [1, 8, 24, 64] {
                    let room = Room { single, tiles };
                    let shares = Shares::new(&shape, &runs, 64, rows_per_part, room);
                    let covered = covered(&shares, &shape, room);
                    for run in &runs {
                        for (i, ranges) in covered[run.row..run.row + run.tokens].iter().enumerate() {
                            let position = run.start + i;
                            let (mut at, first) = (ranges[0].start, shape.first_key(position));
                            assert!(at <= first);
                            for range in ranges {
                                assert_eq!(range.start, at, "in order");
                                at = range.end;
                            }
                            assert!(at > position);
                        }
                    }
                    assert!(covered[row..].iter().all(Vec::is_empty), "padding tokens have no keys");
                    let groups = shares.groups(shape.num_kv_heads);
                    assert_eq!(groups.len(), 1 + 64usize.div_ceil(rows_per_part));
                    for (part, groups) in shares.parts.iter().zip(&groups[1..]) {
                        let items = [&shares.single[part.single.clone()], &shares.tiles[part.tiles.clone()]];
                        assert_eq!(items.map(|items| items.len() as u32), groups.map(|groups| groups[0]));
                        for item in items.into_iter().flatten() {
                            let (first, end) = (item.token as usize, (item.token + item.tokens) as usize);
                            assert!(
                                part.rows.contains(&first) && end <= part.rows.end,
                                "items end with their part"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn one_token_of_a_27b_has_enough_workgroups_from_1024_keys_on() {
        let room = Room { single: 512, tiles: 512 };
        let workgroups = |start: usize, window: Option<usize>| {
            let shape = shape(32, 16, window);
            let run = Run { row: 0, start, tokens: 1, sequence: 0, sees_to: None };
            Shares::new(&shape, &[run], 1, 1, room).single.len() * 16
        };
        assert_eq!([1023, 8191, 131_071].map(|start| workgroups(start, None)), [64, 320, 1088]);
        assert_eq!([1023, 100_000].map(|start| workgroups(start, Some(1024))), [64, 80]);
    }
}
