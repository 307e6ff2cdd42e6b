//! The cases of the self-test: what each case records, and which of its results are compared with which stored values.
//!
//! All cases are in one buffer. Its size depends only on heads and schemes, so that a plan can count it.

use std::ops::Range;

use super::inputs::{self, COLS, DRAWS, KV_HEADS, NEW_TOKENS, NORM_ROWS, ROWS, TOKENS, VOCAB, WIDTH};
use super::stored::{Set, Stored};
use super::tested_experts::TestedExperts;
use crate::gpu::{Buffer, Recorder};
use crate::kernels::{
    Activations, AltUp, Attention, AttentionBy, AttentionShape, Bias, DrawArrays, Embedding, Heads,
    HiddenAct, History, Item, Kernels, KvCache, LAST_SAMPLED, LOGPROB_WORDS, LayerKind, Logits, Matrix,
    Operand, Partials, ProductKind, Quantized, RmsNorm, Room, Run, SampleRequest, ShareArrays, Shares,
    StepArrays, Wants, draw_words, mask_words, partial_width,
};
use crate::tensor::{KvDtype, Scheme};

/// The word that fills every result before a case writes it: a NaN.
pub const POISON: u32 = 0x7fc0_5e1f;
/// Alignment of what shaders read.
const ALIGNMENT: u64 = 256;
/// Slots of partials: of one token, and of a tile.
const ROOM: Room = Room { single: 8, tiles: 32 };
/// Queries of the attention cases: the last tokens of a sequence in a tile, and the last token alone.
const QUERIES: usize = NEW_TOKENS + 1;
const KV_BLOCKS: usize = inputs::KEYS / inputs::BLOCK_SIZE;

/// What the kernels of a model were made for, as far as the cases depend on it.
#[derive(Debug, Clone)]
pub struct Traits {
    pub layers: LayerKind,
    /// The heads of all layers, each once.
    pub heads: Vec<Heads>,
    /// Every scheme of a matrix, once; the embedding's first.
    pub schemes: Vec<Scheme>,
    /// The common schemes of gate and up matrices, each with the form of its results.
    pub gated: Vec<(Scheme, Wants)>,
    /// The forms of the outputs of norms, of attention, of gated products, and of the final norm; each form
    /// once.
    pub normed: Vec<Wants>,
    pub attended: Vec<Wants>,
    pub activated: Vec<Wants>,
    pub last: Wants,
    /// Whether the logits have a soft cap.
    pub has_softcap: bool,
    /// The experts of a mixture, and what `gated` is for their matrices.
    pub experts: Option<TestedExperts>,
    pub gated_experts: Vec<(Scheme, Wants)>,
}

/// The factor of a sum, which halves the stored one exactly.
const HALF: f32 = 0.5;
/// How far attention with factors in f16 may be from the stored result, relative to the largest one.
const F16_ERROR: f64 = 1e-3;

/// Makes [`CaseBuffer`], the places in the buffer of all cases, and `sizes`, the bytes of each. The block has what the
/// sizes are computed with.
macro_rules! case_buffers {
    (|$heads:ident| { $($common:tt)* } $($part:ident: $bytes:expr,)+) => {
        /// A place in the buffer of all cases.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum CaseBuffer { $($part,)+ }

        /// Bytes of each part.
        fn sizes($heads: &Heads) -> Vec<(CaseBuffer, u64)> {
            $($common)*
            vec![$((CaseBuffer::$part, $bytes),)+]
        }
    };
}

case_buffers! {
    |heads| {
        let (floats, blocks) = (Activations::bytes, Quantized::bytes);
        let kv_width = KV_HEADS * heads.head_dim;
        let width = heads.group * kv_width;
        let partial = partial_width(KV_HEADS * heads.group, heads.head_dim);
        let kv_block = heads.kv.block_bytes(inputs::BLOCK_SIZE * KV_HEADS, heads.head_dim);
        let kv = |count: usize| (count * kv_block) as u64;
        let stored = inputs::STORED.len();
        let norm = floats(NORM_ROWS, WIDTH);
    }
    X: floats(TOKENS, COLS),
    XBlocks: blocks(TOKENS, COLS),
    Y: floats(TOKENS, ROWS),
    SecondY: floats(TOKENS, ROWS),
    YBlocks: blocks(TOKENS, ROWS),
    Table: Embedding::table_bytes(1),
    EmbedIds: 4 * inputs::EMBEDDED_IDS.len() as u64,
    EmbedSampled: 8,
    Embedded: floats(inputs::EMBEDDED_IDS.len(), COLS),
    Normed: norm,
    Hidden: norm,
    Work: norm,
    Norm: norm,
    SecondNorm: norm,
    NormBlocks: blocks(NORM_ROWS, WIDTH),
    SecondNormBlocks: blocks(NORM_ROWS, WIDTH),
    NormWeight: 4 * WIDTH as u64,
    NextWeight: 4 * WIDTH as u64,
    NormRows: 8,
    Pooled: floats(1, WIDTH),
    Streams: 3 * norm,
    StreamWork: 3 * norm,
    Predicted: norm,
    StreamRouter: 4 * 4 * WIDTH as u64,
    Coefficients: 4 * 64,
    Queries: floats(QUERIES, width),
    Keys: kv(KV_BLOCKS),
    Values: kv(KV_BLOCKS),
    BlockTable: 4 * KV_BLOCKS as u64,
    // Both attention cases have items of single tokens and of tiles, numbers of workgroups, and merges.
    Items: 2 * 4 * ITEM_BYTES,
    PartialsSingle: floats(ROOM.single, partial),
    PartialsTiles: floats(ROOM.tiles, partial),
    Attended: floats(QUERIES, width),
    AttendedBlocks: blocks(QUERIES, width),
    RawQueries: floats(stored, width),
    RawKeys: floats(stored, kv_width),
    RawValues: floats(stored, kv_width),
    StoredQueries: floats(stored, width),
    StoredKeys: kv(1),
    StoredValues: kv(1),
    QueryNorm: 4 * heads.head_dim as u64,
    KeyNorm: 4 * heads.head_dim as u64,
    QueryBias: 4 * width as u64,
    KeyBias: 4 * kv_width as u64,
    ValueBias: 4 * kv_width as u64,
    Rope: 4 * 4 * heads.head_dim as u64,
    Positions: 4 * stored as u64,
    Slots: 4 * stored as u64,
    HistoryStep: 4 * ALIGNMENT,
    History: 4 * 3 * 8,
    Raw: floats(DRAWS, VOCAB),
    Adjusted: floats(DRAWS, VOCAB),
    DrawScratch: floats(DRAWS, draw_words(VOCAB)),
    Requests: (DRAWS * size_of::<SampleRequest>()) as u64,
    Biases: size_of_val(&inputs::BIASES) as u64,
    Masks: 4 * mask_words(VOCAB) as u64,
    Ids: 4 * DRAWS as u64,
    Logprobs: (4 * DRAWS * LOGPROB_WORDS) as u64,
    DrawHistory: 4 * inputs::HISTORY.len() as u64,
    DrawSlots: 4 * DRAWS as u64,
}

/// Bytes for a list of items, and for each other list that shares out attention.
const ITEM_BYTES: u64 = ROOM.tiles as u64 * size_of::<Item>() as u64;

/// Bytes of the buffer of all cases of a model with these heads, schemes and experts. The cases of each heads have all
/// parts.
pub fn buffer_bytes(heads: &[Heads], schemes: &[Scheme], experts: Option<&TestedExperts>) -> u64 {
    let parts = heads.iter().flat_map(sizes).map(|(_, bytes)| bytes);
    let matrices = schemes.iter().flat_map(|scheme| matrix_bytes(*scheme));
    let of_experts = experts.into_iter().flat_map(TestedExperts::part_bytes);
    parts.chain(matrices).chain(of_experts).map(|bytes| bytes.next_multiple_of(ALIGNMENT)).sum()
}

fn matrix_bytes(scheme: Scheme) -> [u64; 2] {
    [scheme.block_bytes(ROWS, COLS), scheme.scale_bytes(ROWS, COLS)]
}

/// Bytes of the results of one submit: those of the largest case, and no less than a few cases have.
pub fn result_bytes(heads: &[Heads], experts: Option<&TestedExperts>) -> u64 {
    let widths = heads.iter().map(|heads| heads.group * KV_HEADS * heads.head_dim);
    let width = widths.max().expect("the heads of a layer at least");
    let attended = Activations::bytes(QUERIES, width) + Quantized::bytes(QUERIES, width) + (32 << 10);
    attended.max(128 << 10).max(experts.map_or(0, TestedExperts::result_bytes))
}

/// How the bytes of a result are read.
#[derive(Debug, Clone)]
enum Form {
    F32,
    U32,
    F16,
    /// Integers of one byte, followed by their f32 scale.
    Int8,
    /// What [`Quantized::values`] reads.
    Blocks {
        rows: usize,
        width: usize,
    },
}

impl Form {
    fn values(&self, bytes: &[u8]) -> Vec<f64> {
        let words = bytes.as_chunks::<4>().0;
        match self {
            Form::F32 => words.iter().map(|word| f32::from_le_bytes(*word).into()).collect(),
            Form::U32 => words.iter().map(|word| u32::from_le_bytes(*word).into()).collect(),
            Form::F16 => {
                bytes.as_chunks::<2>().0.iter().map(|two| half::f16::from_le_bytes(*two).into()).collect()
            }
            Form::Int8 => {
                let (q, scale) = bytes.split_at(bytes.len() - 4);
                let scale = f64::from(f32::from_le_bytes(scale.try_into().expect("four bytes")));
                q.iter().map(|q| f64::from(*q as i8) * scale).collect()
            }
            Form::Blocks { rows, width } => {
                Quantized::values(bytes, *rows, *width).into_iter().map(f64::from).collect()
            }
        }
    }

    /// The position of a word without which an element of a result of `len` bytes cannot be right.
    fn word_of(&self, index: usize, len: usize) -> usize {
        match self {
            Form::F32 | Form::U32 => 4 * index,
            Form::F16 => 2 * index / 4 * 4,
            Form::Int8 => len - 4,
            Form::Blocks { rows, width } => Quantized::scale_at(*rows, *width, index / width, index % width),
        }
    }
}

/// An element of a result, what it should be, and by how much it may differ.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Element {
    pub index: usize,
    pub value: f64,
    pub bound: f64,
}

/// A result of a case: buffers that are copied to the host one after the other.
pub(super) struct Output {
    name: &'static str,
    from: Vec<Buffer>,
    form: Form,
    elements: Vec<Element>,
}

impl Output {
    /// All of the first `count` numbers of a buffer.
    fn of(name: &'static str, from: &Buffer, form: Form, count: usize, elements: Vec<Element>) -> Output {
        assert_eq!(elements.len(), count, "{name}");
        Output { name, from: vec![from.slice(0, 4 * count as u64)], form, elements }
    }

    /// Integers of four bytes, which must be exact.
    pub(super) fn integers(
        name: &'static str,
        from: &Buffer,
        count: usize,
        values: impl IntoIterator<Item = usize>,
    ) -> Output {
        let element = |(index, value)| Element { index, value: value as f64, bound: 0.0 };
        Output::of(name, from, Form::U32, count, values.into_iter().enumerate().map(element).collect())
    }

    pub(super) fn floats(
        name: &'static str,
        from: &Buffer,
        count: usize,
        values: impl IntoIterator<Item = f64>,
        bound: f64,
    ) -> Output {
        let element = |(index, value)| Element { index, value, bound };
        Output::of(name, from, Form::F32, count, values.into_iter().enumerate().map(element).collect())
    }
}

/// The first wrong element of a case.
#[derive(Debug, Clone, PartialEq)]
pub struct Mismatch {
    pub output: &'static str,
    pub element: Element,
    pub got: f64,
}

/// Records the dispatches of a case.
type Record = dyn Fn(&Kernels, &mut Recorder<'_>) + Send;

/// One kernel with its inputs, or a few kernels that only make sense together.
pub struct Case {
    /// The shader, the scheme of its weights, and the tokens of its body.
    pub kernel: String,
    record: Box<Record>,
    outputs: Vec<Output>,
}

pub(super) fn poison<'b>(r: &mut Recorder<'_>, buffers: impl IntoIterator<Item = &'b Buffer>) {
    buffers.into_iter().for_each(|buffer| r.fill(buffer, POISON));
}

/// The buffers of an operand.
fn buffers(of: &Operand) -> impl Iterator<Item = &Buffer> {
    let floats = of.floats.iter().map(|floats| &floats.buffer);
    floats.chain(of.blocks.iter().map(|blocks| &blocks.buffer))
}

/// The arrays of a step, of which a case replaces those that its kernel reads.
fn unused_step(unused: &Buffer) -> StepArrays {
    let [ids, positions, sequence_of, slot_mapping] = [(); 4].map(|()| unused.clone());
    let [block_tables, groups, merges] = [(); 3].map(|()| unused.clone());
    let shares = ShareArrays { single: None, tiles: None, groups, merges };
    StepArrays { ids, positions, sequence_of, slot_mapping, block_tables, shares }
}

impl Case {
    /// Bytes that the case copies to the host.
    pub fn bytes(&self) -> u64 {
        self.outputs.iter().flat_map(|output| &output.from).map(Buffer::size).sum()
    }

    /// Records the case, and the copies of its results to `results`.
    pub fn record(&self, kernels: &Kernels, recorder: &mut Recorder<'_>, results: &Buffer) {
        (self.record)(kernels, recorder);
        let mut at = 0;
        for from in self.outputs.iter().flat_map(|output| &output.from) {
            recorder.copy(from, &results.slice(at, from.size()), from.size());
            at += from.size();
        }
    }

    /// Compares the bytes that [`Case::record`] copied.
    pub fn compare(&self, mut bytes: &[u8]) -> Result<(), Mismatch> {
        for output in &self.outputs {
            let len: u64 = output.from.iter().map(Buffer::size).sum();
            let (own, rest) = bytes.split_at(len as usize);
            bytes = rest;
            let values = output.form.values(own);
            for &element in &output.elements {
                let got = values[element.index];
                // This is false for a NaN.
                let is_right = (got - element.value).abs() <= element.bound;
                if !is_right {
                    return Err(Mismatch { output: output.name, element, got });
                }
            }
        }
        Ok(())
    }

    /// Ways to damage a right result of the case that [`Case::compare`] does not detect. Each word that an element
    /// depends on is changed in three ways: it becomes the poison, all of its bits are inverted, or its highest bit
    /// except the sign is inverted.
    pub fn misses(&self, right: &[u8]) -> Vec<String> {
        let mut missed = Vec::new();
        let mut start = 0;
        for output in &self.outputs {
            let len: u64 = output.from.iter().map(Buffer::size).sum();
            for element in &output.elements {
                // If the value is close to 0, a wrong scale has no visible effect.
                let scaled = matches!(output.form, Form::Int8 | Form::Blocks { .. });
                let is_small = element.value.abs() <= 4.0 * element.bound;
                let at = output.form.word_of(element.index, len as usize);
                for &damage in if scaled && is_small { &[POISON][..] } else { &[POISON, !0, 1 << 30] } {
                    let mut bytes = right.to_vec();
                    let word = &mut bytes[start + at..start + at + 4];
                    let old = u32::from_le_bytes(word.try_into().expect("four bytes"));
                    let new = if damage == POISON { damage } else { old ^ damage };
                    word.copy_from_slice(&new.to_le_bytes());
                    if new != old && self.compare(&bytes).is_ok() {
                        missed.push(format!("{}[{}] ^ {damage:x}", output.name, element.index));
                    }
                }
            }
            start += len as usize;
        }
        missed
    }
}

/// The buffer of all cases, and what the host writes into it.
pub(super) struct Space {
    pub(super) buffer: Buffer,
    parts: Vec<(CaseBuffer, Range<u64>)>,
    image: Vec<u8>,
}

impl Space {
    pub(super) fn part(&self, part: CaseBuffer) -> Buffer {
        let (_, range) = self.parts.iter().find(|(of, _)| *of == part).expect("every part has a size");
        self.buffer.slice(range.start, range.end - range.start)
    }

    fn floats(&self, part: CaseBuffer, width: usize) -> Activations {
        Activations::new(self.part(part), width)
    }

    fn blocks(&self, part: CaseBuffer, width: usize) -> Quantized {
        Quantized::new(self.part(part), width)
    }

    pub(super) fn put<T: bytemuck::NoUninit>(&mut self, to: &Buffer, data: &[T]) {
        let bytes = bytemuck::cast_slice(data);
        assert!(bytes.len() as u64 <= to.size(), "{} bytes do not fit", bytes.len());
        let at = (to.address() - self.buffer.address()) as usize;
        self.image[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn put_rows(&mut self, part: CaseBuffer, width: usize, rows: usize, value: impl Fn(usize, usize) -> f32) {
        self.put_rows_to(&self.floats(part, width), rows, value);
    }

    pub(super) fn put_rows_to(&mut self, to: &Activations, rows: usize, value: impl Fn(usize, usize) -> f32) {
        let mut all = vec![0f32; rows * to.stride];
        for (row, of_row) in all.chunks_exact_mut(to.stride).enumerate() {
            of_row[..to.width].iter_mut().enumerate().for_each(|(col, to)| *to = value(row, col));
        }
        self.put(&to.buffer, &all);
    }
}

/// All cases of a model, and what the host writes to their buffer before they run.
pub struct Cases {
    pub cases: Vec<Case>,
    pub image: Vec<u8>,
    /// Products that no values are stored for.
    pub untested: Vec<String>,
}

impl Cases {
    /// Cases in `buffer` of [`buffer_bytes`].
    pub fn new(buffer: &Buffer, kernels: &Kernels, traits: &Traits, stored: &Stored) -> Cases {
        let mut at = 0;
        let mut take = |bytes: u64| {
            let start = at;
            at += bytes.next_multiple_of(ALIGNMENT);
            start..start + bytes
        };
        let mut parts_of = |heads: &Heads| -> Vec<(CaseBuffer, Range<u64>)> {
            sizes(heads).into_iter().map(|(part, bytes)| (part, take(bytes))).collect()
        };
        let parts: Vec<_> = traits.heads.iter().map(&mut parts_of).collect();
        let matrices: Vec<[Range<u64>; 2]> =
            traits.schemes.iter().map(|scheme| matrix_bytes(*scheme).map(&mut take)).collect();
        let of_experts = traits.experts.iter().flat_map(TestedExperts::part_bytes);
        let of_experts: Vec<Range<u64>> = of_experts.map(&mut take).collect();
        assert_eq!(at, buffer.size(), "the buffer of all cases");
        let space = Space { buffer: buffer.clone(), parts: Vec::new(), image: vec![0; at as usize] };
        let (heads, cases, untested) = (traits.heads[0], Vec::new(), Vec::new());
        let mut make = Make { space, kernels, traits, heads, stored, cases, untested };
        for (i, (parts, heads)) in parts.into_iter().zip(&traits.heads).enumerate() {
            (make.space.parts, make.heads) = (parts, *heads);
            if i == 0 {
                make.products(&matrices);
                make.norms();
                if traits.layers.has_streams {
                    make.streams();
                }
                make.history();
                make.draws();
                if let Some(experts) = &traits.experts {
                    make.experts(experts, &of_experts);
                }
            }
            make.store();
            make.attention();
        }
        Cases { cases: make.cases, image: make.space.image, untested: make.untested }
    }
}

pub(super) struct Make<'a> {
    pub(super) space: Space,
    pub(super) kernels: &'a Kernels,
    pub(super) traits: &'a Traits,
    /// The heads of the cases that are made at the moment.
    heads: Heads,
    pub(super) stored: &'a Stored,
    cases: Vec<Case>,
    pub(super) untested: Vec<String>,
}

impl Make<'_> {
    pub(super) fn add(
        &mut self,
        kernel: impl Into<String>,
        outputs: Vec<Output>,
        record: impl Fn(&Kernels, &mut Recorder<'_>) + Send + 'static,
    ) {
        self.cases.push(Case { kernel: kernel.into(), record: Box::new(record), outputs });
    }

    /// The expected result in an operand, with elements `(row, col)` in the order of a set of stored values.
    pub(super) fn operand(
        &self,
        name: &'static str,
        to: &Operand,
        rows: usize,
        set: &Set,
        places: &[(usize, usize)],
    ) -> Vec<Output> {
        let mut outputs = Vec::new();
        if let Some(floats) = &to.floats {
            outputs.push(self.rows(name, floats, rows, set, places));
        }
        if let Some(blocks) = &to.blocks {
            // Rounding to int8 takes half of a step of the largest value.
            let bound = set.bound + set.largest / 127.0 * 0.51;
            let width = blocks.width;
            let elements = elements(set, places.iter().map(|(row, col)| row * width + col), bound);
            let from = vec![blocks.buffer.slice(0, Quantized::bytes(rows, width))];
            outputs.push(Output { name, from, form: Form::Blocks { rows, width }, elements });
        }
        outputs
    }

    pub(super) fn rows(
        &self,
        name: &'static str,
        floats: &Activations,
        rows: usize,
        set: &Set,
        places: &[(usize, usize)],
    ) -> Output {
        let from = vec![floats.rows(&(0..rows)).buffer];
        let stride = floats.stride;
        let elements = elements(set, places.iter().map(|(row, col)| row * stride + col), set.bound);
        Output { name, from, form: Form::F32, elements }
    }

    /// The name of the stored gated products.
    pub(super) fn gated_set(&self) -> &'static str {
        match self.traits.layers.activation {
            HiddenAct::GeluTanh => "gated",
            HiddenAct::Silu => "gated by silu",
        }
    }

    /// Lookups and products in every scheme.
    fn products(&mut self, matrices: &[[Range<u64>; 2]]) {
        let space = &mut self.space;
        space.put_rows(CaseBuffer::X, COLS, TOKENS, inputs::activation);
        let [first, second, third, sampled] = inputs::EMBEDDED_IDS.map(|id| id as u32);
        space.put(&space.part(CaseBuffer::EmbedIds), &[first, second, third, LAST_SAMPLED | 1]);
        space.put(&space.part(CaseBuffer::EmbedSampled), &[7, sampled]);
        let [x, y, second] = [(CaseBuffer::X, COLS), (CaseBuffer::Y, ROWS), (CaseBuffer::SecondY, ROWS)]
            .map(|(part, width)| space.floats(part, width));
        let (x_blocks, y_blocks) =
            (space.blocks(CaseBuffer::XBlocks, COLS), space.blocks(CaseBuffer::YBlocks, ROWS));

        let set = self.stored.get("quantize");
        let places: Vec<_> = (1..COLS).step_by(36).map(|col| (0, col)).collect();
        let to = Operand::blocks(&x_blocks);
        let outputs = self.operand("x", &to, 2, set, &places);
        let (from, blocks) = (x.clone(), x_blocks.clone());
        self.add("quantize", outputs, move |kernels, r| {
            poison(r, [&blocks.buffer]);
            kernels.quantize(r, &from, &blocks, 2);
        });

        for (index, (scheme, ranges)) in self.traits.schemes.clone().into_iter().zip(matrices).enumerate() {
            let [blocks, scales] = ranges.each_ref().map(|range| {
                (range.end > range.start)
                    .then(|| self.space.buffer.slice(range.start, range.end - range.start))
            });
            let blocks = blocks.expect("a matrix has blocks");
            let packed = inputs::packed(scheme);
            for (to, bytes) in [Some(&blocks), scales.as_ref()].into_iter().zip(&packed) {
                if let Some(to) = to {
                    self.space.put(to, bytes);
                }
            }
            let matrix = || Matrix::of_one_shard(scheme, [ROWS, COLS], blocks.clone(), scales.clone());
            let name = inputs::stored_scheme(scheme);
            let set = |what: &str| self.stored.find(&format!("{what} {name}"));
            let [Some(products), Some(gated), Some(embedded)] =
                ["matmul", self.gated_set(), "embed"].map(set)
            else {
                self.untested.push(format!("products in {scheme}"));
                continue;
            };
            let (products, gated, embedded) = (products.clone(), gated.clone(), embedded.clone());
            if index == 0 {
                self.embed(scheme, matrix(), &embedded);
            }
            let wants = self.kernels.wants([&matrix()]);
            let input = Operand::new(wants, &x, &x_blocks);
            let shader = if wants.blocks { "fast_matmul" } else { "matmul" };
            let kernels = [ProductKind::Plain, ProductKind::Head].into_iter().flat_map(|kind| {
                self.kernels.product_tokens(kind, scheme).into_iter().map(move |tokens| (kind, tokens))
            });
            for (kind, tokens) in kernels.collect::<Vec<_>>() {
                let is_head = kind == ProductKind::Head;
                let of = if is_head { " head" } else { "" };
                let kernel = format!("{shader}{of} {scheme} for {tokens} tokens");
                let places = |row: usize| inputs::PRODUCT_ROWS.map(|col| (row, col));
                let outputs = vec![
                    self.rows("y", &y, tokens, &products, &places(0)),
                    self.rows("y, last token", &y, tokens, &products, &places(tokens - 1)),
                    self.rows("second y", &second, tokens, &products, &places(tokens - 1)),
                ];
                let (matrix, x, input, to) =
                    (matrix(), x.clone(), input.clone(), [y.clone(), second.clone()]);
                self.add(kernel, outputs, move |kernels, r| {
                    if let Some(blocks) = &input.blocks {
                        kernels.quantize(r, &x, blocks, tokens);
                    }
                    poison(r, to.iter().map(|y| &y.buffer));
                    match is_head {
                        true => to.iter().for_each(|y| kernels.head(r, &matrix, y, &input, tokens)),
                        false => kernels.matmul(r, &to.each_ref().map(|y| (&matrix, y)), &input, tokens),
                    }
                });
            }
            let forms = self.traits.gated.iter().filter(|(of, _)| *of == scheme);
            let tokens = || self.kernels.product_tokens(ProductKind::Gated, scheme);
            for (form, tokens) in forms.flat_map(|(_, form)| tokens().into_iter().map(|n| (*form, n))) {
                let to = Operand::new(form, &y, &y_blocks);
                let places: Vec<_> = [0, tokens - 1]
                    .into_iter()
                    .flat_map(|token| inputs::PRODUCT_ROWS.map(|col| (token, col)))
                    .collect();
                let outputs = self.operand("y", &to, tokens, &gated.repeated(2), &places);
                let kernel = format!("{shader} gated {scheme} for {tokens} tokens");
                let (matrix, x, input) = (matrix(), x.clone(), input.clone());
                let products = [y.clone(), second.clone()];
                self.add(kernel, outputs, move |kernels, r| {
                    if let Some(blocks) = &input.blocks {
                        kernels.quantize(r, &x, blocks, tokens);
                    }
                    poison(r, products.iter().map(|y| &y.buffer));
                    poison(r, to.blocks.iter().map(|blocks| &blocks.buffer));
                    kernels.gated(r, [&matrix, &matrix], &input, products.each_ref(), &to, tokens);
                });
            }
        }
    }

    fn embed(&mut self, scheme: Scheme, matrix: Matrix, set: &Set) {
        let table = self.space.part(CaseBuffer::Table);
        let (embedding, addresses) = Embedding::of_one_shard(matrix, table.clone(), inputs::EMBEDDING_SCALE);
        self.space.put(&table, &addresses);
        let [ids, sampled] =
            [CaseBuffer::EmbedIds, CaseBuffer::EmbedSampled].map(|part| self.space.part(part));
        let (to, tokens) = (self.space.floats(CaseBuffer::Embedded, COLS), inputs::EMBEDDED_IDS.len());
        let places: Vec<_> =
            (0..tokens).flat_map(|row| inputs::EMBEDDED_COLS.map(|col| (row, col))).collect();
        let outputs = vec![self.rows("embedded", &to, tokens, set, &places)];
        self.add(format!("embed {scheme}"), outputs, move |kernels, r| {
            poison(r, [&to.buffer]);
            kernels.embed(r, &embedding, &ids, &sampled, &to, tokens);
        });
    }

    /// Norms in every form, what their results are added to, gated products, and sums of states.
    fn norms(&mut self) {
        let space = &mut self.space;
        space.put_rows(CaseBuffer::Normed, WIDTH, NORM_ROWS, inputs::normed);
        space.put_rows(CaseBuffer::Hidden, WIDTH, NORM_ROWS, inputs::hidden);
        space.put(&space.part(CaseBuffer::NormRows), &[2u32, 0]);
        for (part, next) in [(CaseBuffer::NormWeight, false), (CaseBuffer::NextWeight, true)] {
            space.put(&space.part(part), &inputs::norm_weights(next));
        }
        let [x, hidden, work, y, second_y] = [
            CaseBuffer::Normed,
            CaseBuffer::Hidden,
            CaseBuffer::Work,
            CaseBuffer::Norm,
            CaseBuffer::SecondNorm,
        ]
        .map(|part| space.floats(part, WIDTH));
        let [blocks, second_blocks] =
            [CaseBuffer::NormBlocks, CaseBuffer::SecondNormBlocks].map(|part| space.blocks(part, WIDTH));
        let [norm, next] = [CaseBuffer::NormWeight, CaseBuffer::NextWeight]
            .map(|part| RmsNorm { weight: space.part(part), eps: inputs::EPS });
        let (index, pooled) = (space.part(CaseBuffer::NormRows), space.floats(CaseBuffer::Pooled, WIDTH));
        let places = |rows: &[usize]| -> Vec<(usize, usize)> {
            rows.iter().flat_map(|row| inputs::NORM_COLS.map(|col| (*row, col))).collect()
        };
        let all = places(&[0, 1, 2]);
        let form_name = |form: Wants| match (form.floats, form.blocks) {
            (true, true) => "_both",
            (false, true) => "_int8",
            _ => "",
        };
        let bytes = work.buffer.size();
        let stored = self.stored;
        let LayerKind { activation, has_post_norms, has_expert_norm, .. } = self.traits.layers;
        let post_norm = has_post_norms.then(|| norm.clone());
        let [residual_y, residual_hidden] = match has_post_norms {
            true => ["residual y", "residual hidden"],
            false => ["plain residual y", "plain residual hidden"],
        };
        for form in self.traits.normed.clone() {
            let to = Operand::new(form, &y, &blocks);
            let outputs = self.operand("y", &to, NORM_ROWS, stored.get("rms_norm"), &all);
            let (from, by, into) = (x.clone(), norm.clone(), to.clone());
            self.add(format!("rms_norm{}", form_name(form)), outputs, move |kernels, r| {
                poison(r, buffers(&into));
                kernels.rms_norm(r, &from, &by, &into, NORM_ROWS);
            });

            let mut outputs = self.operand("y", &to, NORM_ROWS, stored.get(residual_y), &all);
            outputs.push(self.rows("hidden", &work, NORM_ROWS, stored.get(residual_hidden), &all));
            let (from, by, then, into) = (x.clone(), post_norm.clone(), next.clone(), to.clone());
            let (before, stream) = (hidden.clone(), work.clone());
            self.add(format!("rms_norm_residual{}", form_name(form)), outputs, move |kernels, r| {
                poison(r, buffers(&into));
                r.copy(&before.buffer, &stream.buffer, bytes);
                kernels.residual(r, &from, (by.as_ref(), 1.0), (&stream, &then), &into, NORM_ROWS);
            });
            if !has_expert_norm {
                continue;
            }
            let second = Operand::new(form, &second_y, &second_blocks);
            let mut outputs = self.operand("y", &to, NORM_ROWS, stored.get(residual_y), &all);
            outputs.extend(self.operand("second y", &second, NORM_ROWS, stored.get(residual_y), &all));
            outputs.push(self.rows("hidden", &work, NORM_ROWS, stored.get(residual_hidden), &all));
            let (from, by, then) = (x.clone(), post_norm.clone(), next.clone());
            let (before, stream) = (hidden.clone(), work.clone());
            self.add(format!("rms_norm_residual{}, twice", form_name(form)), outputs, move |kernels, r| {
                poison(r, buffers(&to).chain(buffers(&second)));
                r.copy(&before.buffer, &stream.buffer, bytes);
                let results = [(&then, &to), (&then, &second)];
                kernels.residual_twice(r, &from, by.as_ref(), &stream, results, NORM_ROWS);
            });
        }

        let set = stored.get(residual_hidden).scaled(HALF.into());
        let outputs = vec![self.rows("hidden", &work, NORM_ROWS, &set, &all)];
        let (from, by, before, stream) = (x.clone(), post_norm, hidden.clone(), work.clone());
        self.add("rms_norm_add", outputs, move |kernels, r| {
            r.copy(&before.buffer, &stream.buffer, bytes);
            kernels.rms_norm_add(r, &from, (by.as_ref(), HALF), &stream, NORM_ROWS);
        });

        if self.traits.has_softcap {
            let outputs = vec![self.rows("logits", &work, NORM_ROWS, stored.get("softcap"), &all)];
            let (from, to) = (x.clone(), work.clone());
            self.add("softcap", outputs, move |kernels, r| {
                r.copy(&from.buffer, &to.buffer, bytes);
                kernels.softcap(r, &to, inputs::SOFTCAP, NORM_ROWS);
            });
        }

        let to = Operand::new(self.traits.last, &y, &blocks);
        // Row 2 comes first, followed by row 0.
        let set = stored.get("rms_norm").reordered(&[places(&[2]), places(&[0])].concat(), &all);
        let outputs = self.operand("y", &to, 2, &set, &places(&[0, 1]));
        let (from, by, into) = (x.clone(), norm.clone(), to);
        self.add(format!("rms_norm_gather{}", form_name(self.traits.last)), outputs, move |kernels, r| {
            poison(r, buffers(&into));
            kernels.rms_norm_gather(r, &from, &index, &by, &into, 2);
        });

        for form in self.traits.activated.clone() {
            // A result in f32 is written over the gate's product.
            let to = Operand::new(form, &work, &blocks);
            let name = match activation {
                HiddenAct::GeluTanh => "glu by gelu",
                HiddenAct::Silu => "glu by silu",
            };
            let outputs = self.operand("y", &to, NORM_ROWS, stored.get(name), &all);
            let (gate, up, stream) = (x.clone(), hidden.clone(), work.clone());
            self.add(format!("glu{}", form_name(form)), outputs, move |kernels, r| {
                poison(r, to.blocks.iter().map(|blocks| &blocks.buffer));
                r.copy(&gate.buffer, &stream.buffer, bytes);
                kernels.glu(r, &stream, &up, &to, NORM_ROWS);
            });
        }

        let outputs = vec![self.rows("sums", &pooled, 1, stored.get("pool"), &places(&[0]))];
        self.add("pool", outputs, move |kernels, r| {
            poison(r, [&pooled.buffer]);
            kernels.pool(r, &x, &pooled, true, NORM_ROWS);
            kernels.pool(r, &hidden, &pooled, false, NORM_ROWS);
        });
    }

    /// The kernels of several residual streams.
    fn streams(&mut self) {
        let space = &mut self.space;
        space.put(&space.part(CaseBuffer::StreamRouter), &inputs::router());
        space.put(&space.part(CaseBuffer::Coefficients), &inputs::coefficients(64));
        let bytes = Activations::bytes(NORM_ROWS, WIDTH);
        let others = |part: CaseBuffer| {
            [0, 1, 2].map(|i| Activations::new(space.part(part).slice(i * bytes, bytes), WIDTH))
        };
        let (inputs_of_others, work_of_others) =
            (others(CaseBuffer::Streams), others(CaseBuffer::StreamWork));
        for (i, stream) in (1..).zip(&inputs_of_others) {
            let at = |n: usize| inputs::stream(i, n / WIDTH, n % WIDTH);
            let values: Vec<f32> = (0..NORM_ROWS * WIDTH).map(at).collect();
            self.space.put(&stream.buffer, &values);
        }
        let space = &self.space;
        let [first, before, work, scaled, predicted] = [
            CaseBuffer::Normed,
            CaseBuffer::Hidden,
            CaseBuffer::Work,
            CaseBuffer::Norm,
            CaseBuffer::Predicted,
        ]
        .map(|part| space.floats(part, WIDTH));
        let coefficients = space.part(CaseBuffer::Coefficients);
        let altup = AltUp {
            router_norm: RmsNorm { weight: space.part(CaseBuffer::NormWeight), eps: inputs::EPS },
            router: space.part(CaseBuffer::StreamRouter),
            prediction: coefficients.clone(),
            correction: coefficients,
            output_scale: space.part(CaseBuffer::NextWeight),
        };
        let places: Vec<_> = (0..NORM_ROWS).flat_map(|row| inputs::NORM_COLS.map(|col| (row, col))).collect();
        let [second, third, fourth] = &work_of_others;
        let streams = [&work, second, third, fourth];
        let names = ["first stream", "second stream", "third stream", "fourth stream"];
        for kernel in ["altup_predict", "altup_correct", "streams_spread", "streams_merge"] {
            // The mean replaces the first stream, and the sizes of the others follow it.
            let written = match kernel {
                "streams_merge" => 0..1,
                "streams_spread" => 1..4,
                _ => 0..4,
            };
            let mut outputs: Vec<Output> = written
                .map(|i| {
                    let set = self.stored.get(&format!("{kernel} {i}"));
                    self.rows(names[i], streams[i], NORM_ROWS, set, &places)
                })
                .collect();
            match kernel {
                "altup_predict" => {
                    let set = self.stored.get("altup_predict 0");
                    outputs.push(self.rows("predicted", &predicted, NORM_ROWS, set, &places));
                }
                "altup_correct" => {
                    let set = self.stored.get("altup_correct scaled");
                    outputs.push(self.rows("scaled", &scaled, NORM_ROWS, set, &places));
                }
                _ => {}
            }
            let from = [&first].into_iter().chain(&inputs_of_others).cloned().collect::<Vec<_>>();
            let to = streams.map(Activations::clone);
            let (altup, before, scaled, predicted) =
                (altup.clone(), before.clone(), scaled.clone(), predicted.clone());
            self.add(kernel, outputs, move |kernels, r| {
                from.iter().zip(&to).for_each(|(from, to)| r.copy(&from.buffer, &to.buffer, bytes));
                poison(r, [&scaled.buffer, &predicted.buffer]);
                let own = kernels.streams();
                match kernel {
                    "altup_predict" => own.predict(r, &altup, to.each_ref(), &predicted, NORM_ROWS),
                    "altup_correct" => own.correct(r, &altup, to.each_ref(), &before, &scaled, NORM_ROWS),
                    "streams_spread" => own.spread(r, to.each_ref(), NORM_ROWS),
                    _ => own.merge(r, to.each_ref(), NORM_ROWS),
                }
            });
        }
        let outputs = vec![self.rows("gate", &work, NORM_ROWS, self.stored.get("cutoff"), &places)];
        self.add("cutoff", outputs, move |kernels, r| {
            r.copy(&first.buffer, &work.buffer, bytes);
            kernels.streams().cutoff(r, &work, inputs::DEVIATIONS, NORM_ROWS);
        });
    }

    fn shape(&self, window: Option<usize>) -> AttentionShape {
        let Heads { group, head_dim, .. } = self.heads;
        AttentionShape {
            num_heads: KV_HEADS * group,
            num_kv_heads: KV_HEADS,
            head_dim,
            block_size: inputs::BLOCK_SIZE,
            max_blocks: KV_BLOCKS,
            window,
        }
    }

    /// The places and the values of all query heads in some rows: each dimension of each head has the stored value at
    /// `stored_at(index in rows, head, class)`.
    fn of_query_heads(
        &self,
        set: &Set,
        rows: &[usize],
        stored_at: impl Fn(usize, usize, usize) -> usize,
    ) -> (Vec<(usize, usize)>, Set) {
        let Heads { group, head_dim, .. } = self.heads;
        let cols = 0..KV_HEADS * group * head_dim;
        let all = || (0..rows.len()).flat_map(|row| cols.clone().map(move |col| (row, col)));
        let at = |(row, col)| stored_at(row, col / head_dim, inputs::class(col % head_dim, head_dim));
        let values = all().map(|place| set.values[at(place)]).collect();
        (all().map(|(row, col)| (rows[row], col)).collect(), Set { values, ..*set })
    }

    /// The parts of a key or a value in a block of the cache, in order; for int8, followed by the scale
    /// (`shaders/common/kv.glsl`).
    fn cache_row(&self, part: CaseBuffer, block: usize, head: usize, token: usize) -> (Vec<Buffer>, Form) {
        let Heads { head_dim, kv, .. } = self.heads;
        let (cache, block_size) = (self.space.part(part), inputs::BLOCK_SIZE);
        let (rows, row) = (KV_HEADS * block_size, head * block_size + token);
        let start = block * kv.block_bytes(rows, head_dim);
        let slice = |at: usize, bytes: usize| cache.slice((start + at) as u64, bytes as u64);
        let form = match kv {
            KvDtype::F32 => Form::F32,
            KvDtype::F16 => Form::F16,
            KvDtype::Int8 => Form::Int8,
        };
        let element = kv.element_bytes();
        let mut parts = Vec::new();
        if matches!(part, CaseBuffer::Keys | CaseBuffer::StoredKeys) {
            let unit = kv.key_unit(head_dim);
            let first = head * block_size * head_dim + token * unit;
            let units = (0..head_dim / unit).map(|n| first + n * block_size * unit);
            parts.extend(units.map(|at| slice(at * element, unit * element)));
        } else {
            parts.push(slice(row * head_dim * element, head_dim * element));
        }
        if kv == KvDtype::Int8 {
            parts.push(slice(rows * head_dim + 4 * row, 4));
        }
        (parts, form)
    }

    /// Puts a row of whole 128ths into a block of the cache.
    fn put_cache_row(&mut self, part: CaseBuffer, block: usize, head: usize, token: usize, row: &[f32]) {
        let (to, _) = self.cache_row(part, block, head, token);
        let bytes: Vec<u8> = match self.heads.kv {
            KvDtype::F32 => row.iter().flat_map(|v| v.to_le_bytes()).collect(),
            KvDtype::F16 => row.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect(),
            KvDtype::Int8 => {
                let scale = (1f32 / 128.0).to_le_bytes();
                row.iter().map(|v| (v * 128.0) as i8 as u8).chain(scale).collect()
            }
        };
        let mut at = 0;
        for part in &to {
            let end = at + part.size() as usize;
            self.space.put(part, &bytes[at..end]);
            at = end;
        }
    }

    /// Biases, QK-norm, RoPE and the store of keys and values.
    fn store(&mut self) {
        let Heads { group, head_dim, kv } = self.heads;
        let (kv_width, tokens) = (KV_HEADS * head_dim, inputs::STORED.len());
        let width = group * kv_width;
        let class = |col: usize| inputs::class(col % head_dim, head_dim);
        let space = &mut self.space;
        space.put_rows(CaseBuffer::RawQueries, width, tokens, |t, col| {
            inputs::raw_query(t, col / head_dim % 4, class(col))
        });
        space.put_rows(CaseBuffer::RawKeys, kv_width, tokens, |t, col| {
            inputs::raw_key(t, col / head_dim, class(col))
        });
        space.put_rows(CaseBuffer::RawValues, kv_width, tokens, |t, col| {
            inputs::value(t, col / head_dim, class(col))
        });
        for (part, keys) in [(CaseBuffer::QueryNorm, false), (CaseBuffer::KeyNorm, true)] {
            let weights: Vec<f32> = (0..head_dim).map(|d| inputs::head_norm(keys, class(d))).collect();
            space.put(&space.part(part), &weights);
        }
        for (what, part, width) in [
            (0, CaseBuffer::QueryBias, width),
            (1, CaseBuffer::KeyBias, kv_width),
            (2, CaseBuffer::ValueBias, kv_width),
        ] {
            let biases: Vec<f32> =
                (0..width).map(|col| inputs::bias(what, col / head_dim % 4, class(col))).collect();
            space.put(&space.part(part), &biases);
        }
        let angles = (0..4).flat_map(|p| (0..head_dim / 2).map(move |i| inputs::angle(p, i % 2)));
        let rope: Vec<f32> = angles.flat_map(|angle| [angle.cos() as f32, angle.sin() as f32]).collect();
        space.put(&space.part(CaseBuffer::Rope), &rope);
        space.put(&space.part(CaseBuffer::Positions), &inputs::STORED.map(|(position, _)| position as u32));
        space.put(&space.part(CaseBuffer::Slots), &inputs::STORED.map(|(_, slot)| slot as u32));

        let [raw, q] =
            [CaseBuffer::RawQueries, CaseBuffer::StoredQueries].map(|part| space.floats(part, width));
        let [k, v] = [CaseBuffer::RawKeys, CaseBuffer::RawValues].map(|part| space.floats(part, kv_width));
        let LayerKind { has_qk_norms, has_biases, has_value_norm, .. } = self.traits.layers;
        let qk_norms = has_qk_norms.then(|| {
            [CaseBuffer::QueryNorm, CaseBuffer::KeyNorm]
                .map(|part| RmsNorm { weight: space.part(part), eps: inputs::EPS })
        });
        let biases = has_biases.then(|| {
            [CaseBuffer::QueryBias, CaseBuffer::KeyBias, CaseBuffer::ValueBias].map(|part| space.part(part))
        });
        let kind = inputs::stored_kind(has_qk_norms, has_biases);
        let cache = KvCache {
            keys: space.part(CaseBuffer::StoredKeys),
            values: space.part(CaseBuffer::StoredValues),
        };
        let (rope, positions) = (space.part(CaseBuffer::Rope), space.part(CaseBuffer::Positions));
        let slot_mapping = space.part(CaseBuffer::Slots);
        let step = StepArrays { slot_mapping, ..unused_step(&positions) };
        let rows: Vec<usize> = (0..tokens).collect();
        let at = |token: usize, head: usize, class: usize| (token * 4 + head % 4) * 4 + class;
        let (places, set) = self.of_query_heads(self.stored.get(&format!("qkv_store{kind} q")), &rows, at);
        let mut outputs = vec![self.rows("queries", &q, tokens, &set, &places)];
        for (name, set, cache) in
            [("keys", "k", CaseBuffer::StoredKeys), ("values", "v", CaseBuffer::StoredValues)]
        {
            let set = self.stored.get(&match set {
                "v" if has_value_norm => format!("qkv_store{kind} normed v"),
                set => format!("qkv_store{kind} {set}"),
            });
            // What the cache's type cannot express is half of its last bit.
            let lost = match kv {
                KvDtype::F32 => 0.0,
                KvDtype::F16 => set.largest / 2048.0,
                KvDtype::Int8 => set.largest / 127.0 * 0.51,
            };
            for (token, head) in (0..tokens).flat_map(|token| (0..KV_HEADS).map(move |head| (token, head))) {
                let (from, form) = self.cache_row(cache, 0, head, inputs::STORED[token].1);
                let value = |d: usize| set.values[(token * KV_HEADS + head) * 4 + inputs::class(d, head_dim)];
                let element = |index| Element { index, value: value(index), bound: set.bound + lost };
                outputs.push(Output { name, from, form, elements: (0..head_dim).map(element).collect() });
            }
        }
        let attention = Attention {
            shape: self.shape(None),
            qk_norms,
            norm_eps: inputs::EPS,
            biases,
            rope,
            q_scale: inputs::Q_SCALE,
            shares_cache: false,
            cache,
        };
        self.add(format!("qkv_store_{kv}"), outputs, move |kernels, r| {
            let KvCache { keys, values } = &attention.cache;
            poison(r, [keys, values]);
            r.copy(&raw.buffer, &q.buffer, q.buffer.size());
            kernels.qkv_store(r, &attention, [&q, &k, &v], &step, tokens);
        });
    }

    /// Attention of tokens in a tile and of a single token, over all keys and over a window, and the merge of splits.
    fn attention(&mut self) {
        let Heads { group, head_dim, kv } = self.heads;
        let width = KV_HEADS * group * head_dim;
        let first = inputs::KEYS - NEW_TOKENS;
        // The single token is the last one of the sequence.
        let position = |row: usize| (first + row).min(inputs::KEYS - 1);
        let part_of_score = 4.0 / head_dim as f32;
        self.space.put_rows(CaseBuffer::Queries, width, QUERIES, |row, col| {
            let class = inputs::class(col % head_dim, head_dim);
            inputs::query(position(row), col / head_dim % 4, class) * part_of_score
        });
        // Blocks lie in the opposite order.
        let table: Vec<u32> = (0..KV_BLOCKS as u32).rev().collect();
        self.space.put(&self.space.part(CaseBuffer::BlockTable), &table);
        let [keys, values] = [CaseBuffer::Keys, CaseBuffer::Values].map(|part| self.space.part(part));
        for (at, head) in (0..inputs::KEYS).flat_map(|at| (0..KV_HEADS).map(move |head| (at, head))) {
            let (block, token) = (at / inputs::BLOCK_SIZE, at % inputs::BLOCK_SIZE);
            let block = table[block] as usize;
            let row = |value: fn(usize, usize, usize) -> f32| -> Vec<f32> {
                (0..head_dim).map(|d| value(at, head, inputs::class(d, head_dim))).collect()
            };
            self.put_cache_row(CaseBuffer::Keys, block, head, token, &row(inputs::key));
            self.put_cache_row(CaseBuffer::Values, block, head, token, &row(inputs::value));
        }
        let space = &self.space;
        let (q, floats) =
            (space.floats(CaseBuffer::Queries, width), space.floats(CaseBuffer::Attended, width));
        let blocks = space.blocks(CaseBuffer::AttendedBlocks, width);
        let partial = partial_width(KV_HEADS * group, head_dim);
        let partials = Partials {
            single: space.floats(CaseBuffer::PartialsSingle, partial),
            tiles: space.floats(CaseBuffer::PartialsTiles, partial),
        };
        let (lists, block_tables) = (space.part(CaseBuffer::Items), space.part(CaseBuffer::BlockTable));
        let runs = [
            Run { row: 0, start: first, tokens: NEW_TOKENS, sequence: 0, sees_to: None },
            Run { row: NEW_TOKENS, start: inputs::KEYS - 1, tokens: 1, sequence: 0, sees_to: None },
        ];
        for (index, (what, window)) in (0..).zip([("all", None), ("window", Some(inputs::WINDOW))]) {
            let shape = self.shape(window);
            let shares = Shares::new(&shape, &runs, QUERIES, QUERIES, ROOM);
            let mut lists = (0..4).map(|list| lists.slice((4 * index + list) * ITEM_BYTES, ITEM_BYTES));
            let mut list = || lists.next().expect("four lists");
            let [single, tiles, groups, merges] = [list(), list(), list(), list()];
            self.space.put(&single, &shares.single);
            self.space.put(&tiles, &shares.tiles);
            self.space.put(&groups, &shares.groups(KV_HEADS));
            self.space.put(&merges, &shares.merges);
            let unused = unused_step(&groups);
            let shares = ShareArrays { single: Some(single), tiles: Some(tiles), groups, merges };
            let step = StepArrays { block_tables: block_tables.clone(), shares, ..unused };
            let stored_at = |row: usize| inputs::POSITIONS.iter().position(|p| *p == position(row));
            let rows: Vec<usize> = (0..QUERIES).filter(|row| stored_at(*row).is_some()).collect();
            let at = |row: usize, head: usize, class: usize| {
                let position = stored_at(rows[row]).expect("a stored position");
                ((position * 4 + head % 4) * KV_HEADS + head / group) * 4 + class
            };
            let stored = self.stored.get(&format!("attention {what}"));
            let (places, mut set) = self.of_query_heads(stored, &rows, at);
            if self.kernels.attention_by() != AttentionBy::Lanes {
                set.bound = set.bound.max(F16_ERROR * set.largest);
            }
            for form in self.traits.attended.clone() {
                let to = Operand::new(form, &floats, &blocks);
                let outputs = self.operand("attended", &to, QUERIES, &set, &places);
                let cache = KvCache { keys: keys.clone(), values: values.clone() };
                let attention = Attention {
                    shape,
                    qk_norms: None,
                    norm_eps: inputs::EPS,
                    biases: None,
                    rope: keys.clone(),
                    q_scale: 1.0,
                    shares_cache: false,
                    cache,
                };
                let (q, partials, step) = (q.clone(), partials.clone(), step.clone());
                let kernel = format!("attention_{kv} with attention_merge, {what}");
                self.add(kernel, outputs, move |kernels, r| {
                    poison(r, [&partials.single.buffer, &partials.tiles.buffer]);
                    poison(r, buffers(&to));
                    kernels.attention(r, &attention, (&q, &partials), &step, &to, QUERIES);
                });
            }
        }
    }

    /// The ids of a step in the histories of two sequences.
    fn history(&mut self) {
        const SLOT_LEN: usize = 8;
        let step = self.space.part(CaseBuffer::HistoryStep);
        let quarter = |n: u64| step.slice(n * ALIGNMENT, ALIGNMENT);
        let [ids, positions, sequence_of, slots] = [0, 1, 2, 3].map(quarter);
        self.space.put(&ids, &[100u32, 101, 102, LAST_SAMPLED | 1]);
        self.space.put(&positions, &[3u32, 4, 5, 7]);
        self.space.put(&sequence_of, &[0u32, 0, 0, 1]);
        // The ids last sampled are stored after the slots of the sequences.
        self.space.put(&slots, &[2u32, 0, 7, 55]);
        let sampled = slots.slice(8, 8);
        let to = self.space.part(CaseBuffer::History);
        let step = StepArrays { ids, sequence_of, ..unused_step(&positions) };
        let history = History { ids: to.clone(), slot_len: SLOT_LEN };
        let set = self.stored.get("history");
        let places = [(2, 3), (2, 4), (2, 5), (0, 7)].map(|(slot, at)| slot * SLOT_LEN + at);
        let elements = elements(set, places, set.bound);
        let outputs = vec![Output { name: "ids", from: vec![to.clone()], form: Form::U32, elements }];
        self.add("history", outputs, move |kernels, r| {
            poison(r, [&to]);
            kernels.history(r, &step, &slots, &sampled, &history, 4);
        });
    }

    /// Draws, with biases, penalties, a mask and filters, and log probabilities.
    fn draws(&mut self) {
        let seed = [inputs::SEED as u32, (inputs::SEED >> 32) as u32];
        let base = SampleRequest {
            top_p: 1.0,
            repetition_penalty: 1.0,
            seed_low: seed[0],
            seed_high: seed[1],
            ..SampleRequest::default()
        };
        let greedy = SampleRequest {
            biases: inputs::BIASES.len() as u32,
            logprobs: 1 + inputs::LOGPROBS as u32,
            ..base
        };
        let filtered = SampleRequest {
            temperature: inputs::TEMPERATURE,
            top_k: inputs::TOP_K,
            top_p: inputs::TOP_P,
            position: 1,
            slot: 1,
            mask: 1,
            ..base
        };
        let penalized = SampleRequest {
            temperature: inputs::TEMPERATURE,
            position: 2,
            slot: 2,
            repetition_penalty: inputs::REPETITION,
            presence_penalty: inputs::PRESENCE,
            frequency_penalty: inputs::FREQUENCY,
            history_len: inputs::HISTORY.len() as u32,
            prompt_len: 1,
            ..base
        };
        let requests = vec![greedy, filtered, penalized];
        let space = &mut self.space;
        space.put_rows(CaseBuffer::Raw, VOCAB, DRAWS, inputs::logit);
        space.put(&space.part(CaseBuffer::Requests), &requests);
        space.put(&space.part(CaseBuffer::Biases), &inputs::BIASES.map(|(id, bias)| Bias { id, bias }));
        space.put(&space.part(CaseBuffer::DrawHistory), &inputs::HISTORY);
        let mut masks = vec![0u32; mask_words(VOCAB)];
        (0..VOCAB).filter(|id| inputs::allowed(*id)).for_each(|id| masks[id / 32] |= 1 << (id % 32));
        space.put(&space.part(CaseBuffer::Masks), &masks);

        let words = draw_words(VOCAB);
        let logits = Logits {
            raw: space.floats(CaseBuffer::Raw, VOCAB),
            adjusted: space.floats(CaseBuffer::Adjusted, VOCAB),
            scratch: space.floats(CaseBuffer::DrawScratch, words),
            vocab: VOCAB,
        };
        let arrays = DrawArrays {
            requests: space.part(CaseBuffer::Requests),
            bias: space.part(CaseBuffer::Biases),
            masks: space.part(CaseBuffer::Masks),
            ids: space.part(CaseBuffer::Ids),
            logprobs: space.part(CaseBuffer::Logprobs),
        };
        let history = History { ids: space.part(CaseBuffer::DrawHistory), slot_len: inputs::HISTORY.len() };
        let slots = space.part(CaseBuffer::DrawSlots);
        let ids = self.stored.get("sample");
        let drawn = || elements(ids, 0..DRAWS, ids.bound);
        let changed = inputs::BIASES.map(|(id, _)| u64::from(id));
        let cleared = changed.map(|id| logits.adjusted.buffer.slice(4 * id, 4)).to_vec();
        let zero = |index: usize| Element { index, value: 0.0, bound: 0.0 };
        let logprobs = self.stored.get("logprobs");
        // The drawn id's, and an id and its log probability for each alternative.
        let count = 1 + 2 * inputs::LOGPROBS;
        let is_id = |index: &usize| index % 2 == 1;
        let all = elements(logprobs, 0..count, logprobs.bound);
        let (of_ids, of_logprobs): (Vec<Element>, Vec<Element>) =
            all.into_iter().partition(|element| is_id(&element.index));
        let reported = || vec![arrays.logprobs.slice(0, 4 * count as u64)];
        let outputs = vec![
            Output { name: "ids", from: vec![arrays.ids.clone()], form: Form::U32, elements: drawn() },
            Output { name: "sampled", from: vec![slots.clone()], form: Form::U32, elements: drawn() },
            Output {
                name: "cleared",
                from: cleared,
                form: Form::U32,
                elements: (0..changed.len()).map(zero).collect(),
            },
            Output { name: "alternatives", from: reported(), form: Form::U32, elements: of_ids },
            Output { name: "log probabilities", from: reported(), form: Form::F32, elements: of_logprobs },
        ];
        self.add("adjust, sample and logprobs", outputs, move |kernels, r| {
            poison(r, [&arrays.ids, &arrays.logprobs, &slots, &logits.scratch.buffer]);
            r.fill(&logits.adjusted.buffer, 0);
            kernels.adjust(r, &logits, &arrays, &history, &requests);
            kernels.sample(r, &logits, &arrays, &slots, &requests);
            kernels.clear_adjusted(r, &logits, &arrays, &history, &requests);
            kernels.logprobs(r, &logits, &arrays, DRAWS);
        });
    }
}

fn elements(set: &Set, places: impl IntoIterator<Item = usize>, bound: f64) -> Vec<Element> {
    let elements = places.into_iter().zip(&set.values);
    let elements: Vec<Element> = elements.map(|(index, &value)| Element { index, value, bound }).collect();
    assert_eq!(elements.len(), set.values.len(), "stored values");
    elements
}
