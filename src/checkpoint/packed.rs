//! Weight matrices packed by others: GPTQ, AWQ and compressed-tensors (`pack-quantized`), read without loss.
//!
//! Such a checkpoint holds each projection in parts, which become one tensor `NAME.weight` `[out, in]` here. Its value
//! is `s * (q - z)`, with scale and zero point per group of consecutive inputs of a row (one output):
//!
//! | | GPTQ | AWQ | compressed-tensors |
//! |---|---|---|---|
//! | q | `.qweight` `[in / n, out]`, along `in` | `.qweight` `[in, out / 8]`, along `out`, interleaved | `.weight_packed` `[out, in / n]`, along `in` |
//! | s | `.scales` `[groups, out]` | `.scales` `[groups, out]` | `.weight_scale` `[out, groups]` |
//! | z | `.qzeros` `[groups, out / n]` | `.qzeros` `[groups, out / 8]`, interleaved | `.weight_zero_point` `[out / n, groups]`; without it half the range |
//! | | `.g_idx` `[in]`: group of each input | | `.weight_shape` `[2]`: out, in |
//!
//! q and z are unsigned, `n` of them to a 32-bit word, lowest bits first. GPTQ's first version (`checkpoint_format`
//! "gptq") stores z - 1. Where z is 0 that borrows from its neighbours: GPTQModel subtracts one from all zero points of
//! a word at once, and adding it back is exact; AutoGPTQ's files lose what was there, and are refused at that place.
//!
//! Refuses by name: other methods and formats, bits other than 4 and 8, groups that are no multiple of the device's
//! block, activation order (`g_idx` other than the trivial one), quantized activations, and every disagreement between
//! the parts' shapes, or between them and `quantization_config`.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Range;

use half::{bf16, f16};
use rayon::prelude::*;
use serde_json::{Map, Value};

use super::{Checkpoint, CheckpointError, Entry, Format, ModelFiles, Span, Stored, short};
use crate::tensor::{DType, QuantizedRow, Scales, Scheme};

const CONFIG_FILE: &str = "config.json";
/// A config has a few KB.
const MAX_CONFIG_BYTES: usize = 1 << 20;
/// Of `config_groups`; each real checkpoint has one.
const MAX_CONFIG_GROUPS: usize = 64;
/// Where AWQ puts output 0..8 of a word, in units of 4 bits.
const AWQ_NIBBLE: [u32; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// A matrix `[out, in]` whose integers, scales and zero points lie in tensors of their own.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PackedMatrix<'a> {
    layout: Layout,
    weights: &'a [u8],
    scales: &'a [u8],
    /// Empty where a compressed-tensors matrix is symmetric.
    zeros: &'a [u8],
}

/// How the parts hold the matrix; sizes are checked against the parts' shapes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Layout {
    kind: Kind,
    /// 4 or 8
    bits: u32,
    rows: usize,
    cols: usize,
    /// Columns per scale, at most `cols`.
    group: usize,
    scale_type: ScaleType,
    form: Form,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Gptq(GptqZeros),
    Awq,
    Compressed,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum ScaleType {
    F16,
    Bf16,
}

/// The device's scales that hold this matrix's without loss.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    /// Every zero point is half the range.
    Symmetric,
    ZeroPoint,
    /// f16 does not hold some bf16 scale.
    Affine,
}

impl Layout {
    fn per_word(self) -> usize {
        32 / self.bits as usize
    }

    fn groups(self) -> usize {
        self.cols.div_ceil(self.group)
    }

    /// Half the range of the integers: what the zero point of a symmetric matrix is.
    fn half(self) -> u32 {
        1 << (self.bits - 1)
    }
}

impl<'a> PackedMatrix<'a> {
    /// The parts as `layout` describes them.
    pub(super) fn new(layout: Layout, weights: &'a [u8], scales: &'a [u8], zeros: &'a [u8]) -> Self {
        Self { layout, weights, scales, zeros }
    }

    /// What the device needs to hold the scales and zero points, of which it reads all.
    fn find_form(&self) -> Form {
        let Self { layout, scales, zeros, .. } = *self;
        let f16_holds = |b: &[u8]| {
            let scale = bf16::from_le_bytes([b[0], b[1]]).to_f32();
            f16::from_f32(scale).to_f32() == scale
        };
        let exact = match layout.scale_type {
            ScaleType::F16 => true,
            ScaleType::Bf16 => scales.par_chunks(1 << 16).all(|chunk| chunk.chunks_exact(2).all(f16_holds)),
        };
        // Four or eight zero points at once: every bit pattern of a word stands for one.
        let one_each = u32::MAX / ((1 << layout.bits) - 1);
        let symmetric_word = match layout.kind {
            Kind::Gptq(GptqZeros::WordLess | GptqZeros::EachLess) => one_each * (layout.half() - 1),
            _ => one_each * layout.half(),
        };
        let symmetric = match layout.kind {
            // Its last word may be filled up with anything.
            Kind::Compressed => zeros.is_empty(),
            _ => zeros.chunks_exact(4).all(|word| word == symmetric_word.to_le_bytes()),
        };
        match (exact, symmetric) {
            (false, _) => Form::Affine,
            (true, true) => Form::Symmetric,
            (true, false) => Form::ZeroPoint,
        }
    }

    pub(super) fn stored_bytes(&self) -> u64 {
        (self.weights.len() + self.scales.len() + self.zeros.len()) as u64
    }

    pub(super) fn scheme(&self) -> Scheme {
        let Layout { bits, cols, group, form, .. } = self.layout;
        let scales = match form {
            Form::Symmetric => Scales::Symmetric,
            Form::ZeroPoint => Scales::ZeroPoint,
            Form::Affine => Scales::Affine,
        };
        let block = block_columns(bits);
        // A group that is a whole row may end inside a block.
        let whole = group == cols;
        let group = if whole { cols.next_multiple_of(block) } else { group } as u32;
        match bits {
            4 => Scheme::Int4 { group, scales },
            _ if whole && form == Form::Symmetric => Scheme::Int8Row,
            _ => Scheme::Int8 { group, scales },
        }
    }

    /// A row in the layout of [`PackedMatrix::scheme`]. The error says what is wrong where.
    pub(super) fn quantized_row_into(&self, row: usize, out: &mut QuantizedRow) -> Result<(), String> {
        let Layout { bits, form, .. } = self.layout;
        // What the device's integers are less than the stored ones.
        let bias = if bits == 8 || form == Form::Symmetric { self.layout.half() } else { 0 };
        self.each_integer(row, |col, q| out.q[col] = (q as i32 - bias as i32) as i8);
        let mut records = out.scales.chunks_exact_mut(match form {
            Form::Symmetric => 2,
            Form::ZeroPoint => 4,
            Form::Affine => 8,
        });
        for group in 0..self.layout.groups() {
            let record = records.next().expect("a record for each group");
            let scale = self.scale(row, group)?;
            let zero = self.zero(row, group)? as f32 - bias as f32;
            match form {
                Form::Symmetric => record.copy_from_slice(&f16::from_f32(scale).to_le_bytes()),
                Form::ZeroPoint => {
                    record[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
                    record[2..].copy_from_slice(&f16::from_f32(zero).to_le_bytes());
                }
                Form::Affine => {
                    record[..4].copy_from_slice(&scale.to_le_bytes());
                    // A bf16 times 8 bits: exact.
                    record[4..].copy_from_slice(&(-(scale * zero)).to_le_bytes());
                }
            }
        }
        Ok(())
    }

    /// The values of some rows. No product is rounded: an f16 times 9 bits fits an f32.
    pub(super) fn rows_f32_into(&self, rows: Range<usize>, out: &mut [f32]) -> Result<(), String> {
        let Layout { cols, group, .. } = self.layout;
        for (row, out) in rows.zip(out.chunks_exact_mut(cols)) {
            self.each_integer(row, |col, q| out[col] = q as f32);
            for (group, out) in out.chunks_mut(group).enumerate() {
                let (scale, zero) = (self.scale(row, group)?, self.zero(row, group)? as f32);
                out.iter_mut().for_each(|x| *x = scale * (*x - zero));
            }
        }
        Ok(())
    }

    /// Calls with each column and its stored integer.
    fn each_integer(&self, row: usize, mut each: impl FnMut(usize, u32)) {
        let Layout { kind, bits, rows, cols, .. } = self.layout;
        let (per_word, mask) = (self.layout.per_word(), (1 << bits) - 1);
        match kind {
            Kind::Awq => {
                let shift = 4 * AWQ_NIBBLE[row % 8];
                for col in 0..cols {
                    each(col, word(self.weights, col * (rows / 8) + row / 8) >> shift & 0xf);
                }
            }
            Kind::Gptq(_) | Kind::Compressed => {
                for first in (0..cols).step_by(per_word) {
                    let index = match kind {
                        Kind::Compressed => row * cols.div_ceil(per_word) + first / per_word,
                        _ => first / per_word * rows + row,
                    };
                    let mut word = word(self.weights, index);
                    for col in first..cols.min(first + per_word) {
                        each(col, word & mask);
                        word >>= bits;
                    }
                }
            }
        }
    }

    fn scale(&self, row: usize, group: usize) -> Result<f32, String> {
        let index = match self.layout.kind {
            Kind::Compressed => row * self.layout.groups() + group,
            _ => group * self.layout.rows + row,
        };
        let bytes = [self.scales[2 * index], self.scales[2 * index + 1]];
        let scale = match self.layout.scale_type {
            ScaleType::F16 => f16::from_le_bytes(bytes).to_f32(),
            ScaleType::Bf16 => bf16::from_le_bytes(bytes).to_f32(),
        };
        if scale.is_finite() {
            Ok(scale)
        } else {
            Err(format!("row {row}, group {group}: its scale is NaN or infinite; expected a finite number"))
        }
    }

    fn zero(&self, row: usize, group: usize) -> Result<u32, String> {
        let Layout { kind, bits, rows, .. } = self.layout;
        let (per_word, mask) = (self.layout.per_word(), (1 << bits) - 1);
        let shifted = |word: u32, place: usize| word >> (bits as usize * place) & mask;
        let by_output = |place: usize| word(self.zeros, group * (rows / per_word) + place / per_word);
        Ok(match kind {
            Kind::Compressed if self.zeros.is_empty() => self.layout.half(),
            Kind::Compressed => {
                let word = word(self.zeros, row / per_word * self.layout.groups() + group);
                shifted(word, row % per_word)
            }
            Kind::Awq => shifted(by_output(row), AWQ_NIBBLE[row % 8] as usize),
            Kind::Gptq(GptqZeros::AsStored) => shifted(by_output(row), row % per_word),
            Kind::Gptq(GptqZeros::WordLess) => {
                shifted(by_output(row).wrapping_add(u32::MAX / mask), row % per_word)
            }
            Kind::Gptq(GptqZeros::EachLess) => match shifted(by_output(row), row % per_word) {
                stored if stored == mask => {
                    return Err(format!(
                        "row {row}, group {group}: its zero point is stored as {stored}, which is how AutoGPTQ wrote 0, \
                         overwriting those beside it; quantize the original anew (\"gptq_v2\" has room for 0)"
                    ));
                }
                stored => stored + 1,
            },
        })
    }
}

/// Little endian word `index`.
fn word(bytes: &[u8], index: usize) -> u32 {
    u32::from_le_bytes(bytes[4 * index..4 * index + 4].try_into().expect("4 bytes"))
}

/// Columns that a group of the device's layouts is a multiple of.
const fn block_columns(bits: u32) -> usize {
    128 / bits as usize
}

// ---- Parts of a matrix ------------------------------------------------------------------------------------

/// What a tensor is to the matrix it is a part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PartKind {
    Weights,
    Scales,
    Zeros,
    GroupIndex,
    Shape,
}

impl PartKind {
    const ALL: [PartKind; 5] = [Self::Weights, Self::Scales, Self::Zeros, Self::GroupIndex, Self::Shape];
}

/// A tensor as its file has it.
#[derive(Debug, Clone, Copy)]
struct Part<'a> {
    dtype: DType,
    shape: &'a [usize],
    data: &'a [u8],
}

impl Part<'_> {
    fn expect(&self, dtypes: &[DType], shape: &[usize]) -> Result<(), String> {
        if dtypes.contains(&self.dtype) && self.shape == shape {
            return Ok(());
        }
        let names: Vec<_> = dtypes.iter().map(|dtype| format!("{dtype:?}")).collect();
        let expected = names.join(" or ");
        Err(format!("is {:?} {:?}; expected {expected} {shape:?}", self.dtype, self.shape))
    }

    /// Rows and columns of the part itself.
    fn matrix(&self) -> Result<[usize; 2], String> {
        self.shape.try_into().map_err(|_| format!("has shape {:?}; expected two dimensions", self.shape))
    }
}

/// The parts of one matrix, by [`PartKind`].
#[derive(Debug, Default)]
struct Parts<'a>([Option<Part<'a>>; 5]);

impl<'a> Parts<'a> {
    fn get(&self, kind: PartKind) -> Option<Part<'a>> {
        self.0[kind as usize]
    }

    fn required(&self, kind: PartKind) -> Result<Part<'a>, PartError> {
        self.get(kind).ok_or((kind, "is missing".into()))
    }
}

/// Which part is wrong, and how.
type PartError = (PartKind, String);

trait About<T> {
    fn about(self, kind: PartKind) -> Result<T, PartError>;
}

impl<T> About<T> for Result<T, String> {
    fn about(self, kind: PartKind) -> Result<T, PartError> {
        self.map_err(|problem| (kind, problem))
    }
}

impl Checkpoint {
    /// Makes one tensor of the parts of each packed matrix, by the method that config.json names. Reads their scales and
    /// zero points.
    pub(super) fn join_packed(&mut self, files: &ModelFiles) -> Result<(), CheckpointError> {
        let method = match files.read(CONFIG_FILE)? {
            None => None,
            Some(config) => Method::read(&config)
                .map_err(|problem| CheckpointError::file(files.display(CONFIG_FILE), problem))?,
        };
        let Some(method) = &method else { return self.refuse_packed() };
        self.format = method.format();
        // By name, so that messages are the same from one run to the next.
        let mut matrices: BTreeMap<String, [Option<usize>; 5]> = BTreeMap::new();
        for (index, entry) in self.tensors.iter().enumerate() {
            if let Some((base, kind)) = method.part_of(&entry.name) {
                matrices.entry(base.to_owned()).or_default()[kind as usize] = Some(index);
            }
        }
        let mut joined = HashMap::new();
        for (base, indices) in &matrices {
            joined.insert(indices[PartKind::Weights as usize], self.join_parts(method, base, indices)?);
        }
        // Each matrix takes the place of its integers.
        let entries = std::mem::take(&mut self.tensors).into_iter().enumerate();
        let keep = |(index, entry): (usize, Entry)| match method.part_of(&entry.name) {
            Some(_) => joined.remove(&Some(index)),
            None => Some(entry),
        };
        self.tensors = entries.filter_map(keep).collect();
        self.by_name.clear();
        for (index, entry) in self.tensors.iter().enumerate() {
            if self.by_name.insert(entry.name.clone(), index).is_some() {
                let problem = "is there whole, and packed in parts; expected one of them";
                return Err(CheckpointError::tensor(&self.files[entry.file].display, &entry.name, problem));
            }
        }
        Ok(())
    }

    fn join_parts(
        &self,
        method: &Method,
        base: &str,
        indices: &[Option<usize>; 5],
    ) -> Result<Entry, CheckpointError> {
        let first = indices.iter().flatten().next().expect("a matrix has a part");
        let entry = |kind: PartKind| indices[kind as usize].map(|index| &self.tensors[index]);
        let span = |kind| match entry(kind).map(|entry| &entry.stored) {
            Some(Stored::Plain { data, .. }) => Some(data.clone()),
            _ => None,
        };
        let mut parts = Parts::default();
        for kind in PartKind::ALL {
            if let Some(Entry { shape, stored: Stored::Plain { dtype, data }, .. }) = entry(kind) {
                let data = &self.files[data.file].bytes[data.range.clone()];
                parts.0[kind as usize] = Some(Part { dtype: *dtype, shape, data });
            }
        }
        let layout = method.layout(&parts).map_err(|(kind, problem)| {
            let file = entry(kind).unwrap_or(&self.tensors[*first]).file;
            let name = format!("{base}.{}", method.suffix(kind));
            CheckpointError::tensor(&self.files[file].display, &name, problem)
        })?;
        let [weights, scales, zeros] = [PartKind::Weights, PartKind::Scales, PartKind::Zeros].map(span);
        let (weights, scales) = (weights.expect("checked above"), scales.expect("checked above"));
        let bytes = |span: &Span| &self.files[span.file].bytes[span.range.clone()];
        let (integers, zero_bytes) = (bytes(&weights), zeros.as_ref().map_or(&[][..], bytes));
        let form = PackedMatrix::new(layout, integers, bytes(&scales), zero_bytes).find_form();
        Ok(Entry {
            name: format!("{base}.weight"),
            shape: vec![layout.rows, layout.cols],
            file: weights.file,
            stored: Stored::Packed { layout: Layout { form, ..layout }, weights, scales, zeros },
        })
    }

    /// Refuses parts of packed matrices where no config says how they are packed.
    fn refuse_packed(&self) -> Result<(), CheckpointError> {
        let packed =
            |entry: &&Entry| entry.name.ends_with(".qweight") || entry.name.ends_with(".weight_packed");
        match self.tensors.iter().find(packed) {
            None => Ok(()),
            Some(entry) => {
                let problem = "is a packed matrix, but config.json has no quantization_config that says how";
                Err(CheckpointError::tensor(&self.files[entry.file].display, &entry.name, problem))
            }
        }
    }
}

// ---- The method of a checkpoint -----------------------------------------------------------------------------

/// How a checkpoint is packed, by the `quantization_config` of its config.json.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Method {
    Gptq {
        zeros: GptqZeros,
        /// None where modules may differ (`dynamic`).
        numbers: Option<Numbers>,
        /// Whether columns were put into groups by their activations (`desc_act`), which `g_idx` then has to show.
        by_activation: bool,
    },
    Awq(Numbers),
    /// One of these each matrix is in; whether with zero points.
    CompressedTensors(Vec<(Numbers, bool)>),
}

/// What a method says of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Numbers {
    bits: u32,
    /// Columns; none is a whole row.
    group: Option<usize>,
}

/// What GPTQ's stored zero points mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GptqZeros {
    /// "gptq_v2"
    AsStored,
    /// "gptq" by GPTQModel: one was subtracted from every zero point of a word, as one number.
    WordLess,
    /// "gptq" by others: each one less.
    EachLess,
}

impl Method {
    /// From a config.json, which may be of any model; none where it has no `quantization_config`.
    fn read(config: &[u8]) -> Result<Option<Method>, String> {
        if config.len() > MAX_CONFIG_BYTES {
            return Err(format!("has {} bytes; expected at most {MAX_CONFIG_BYTES}", config.len()));
        }
        let config: Value = serde_json::from_slice(config)
            .map_err(|e| format!("is no valid JSON: {}", short(&e.to_string())))?;
        let found = config
            .get("quantization_config")
            .or_else(|| config.get("text_config")?.get("quantization_config"));
        let object = match found {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::Object(object)) => Fields { prefix: "quantization_config", object },
            Some(other) => return Err(format!("quantization_config is {}; expected an object", show(other))),
        };
        let method = match object.text("quant_method")? {
            Some("gptq") => Self::read_gptq(&object),
            Some("awq") => Self::read_awq(&object),
            Some("compressed-tensors") => Self::read_compressed(&object),
            other => Err(format!(
                "quantization_config.quant_method is {}; expected \"gptq\", \"awq\" or \"compressed-tensors\", or the \
                 original checkpoint in BF16, F16 or F32",
                quote(other)
            )),
        };
        method.map(Some)
    }

    fn read_gptq(object: &Fields) -> Result<Self, String> {
        let by_gptqmodel =
            object.object.get("meta").and_then(|meta| meta.get("quantizer")).is_some_and(|by| {
                let ours = |by: &Value| by.as_str().is_some_and(|by| by.starts_with("gptqmodel"));
                ours(by) || by.as_array().is_some_and(|list| list.iter().any(ours))
            });
        let zeros = match object.text("checkpoint_format")? {
            Some("gptq_v2") => GptqZeros::AsStored,
            None | Some("gptq") if by_gptqmodel => GptqZeros::WordLess,
            None | Some("gptq") => GptqZeros::EachLess,
            other => return Err(object.unlike("checkpoint_format", quote(other), "\"gptq\" or \"gptq_v2\"")),
        };
        if let Some(words) = object.text("pack_dtype")?
            && words != "int32"
        {
            return Err(object.unlike("pack_dtype", quote(Some(words)), "\"int32\""));
        }
        let dynamic = object.object.get("dynamic").and_then(Value::as_object).is_some_and(|d| !d.is_empty());
        let numbers = object.numbers("bits", "group_size")?;
        let by_activation = object.get("desc_act") == Some(&Value::Bool(true));
        Ok(Self::Gptq { zeros, numbers: (!dynamic).then_some(numbers), by_activation })
    }

    fn read_awq(object: &Fields) -> Result<Self, String> {
        let version = object.text("version")?.or(object.text("checkpoint_format")?);
        if !version.is_some_and(|v| v.eq_ignore_ascii_case("gemm")) {
            return Err(object.unlike("version", quote(version), "\"gemm\""));
        }
        let numbers = object.numbers("bits", "group_size")?;
        if numbers.bits != 4 {
            return Err(object.unlike("bits", numbers.bits.to_string(), "4"));
        }
        match object.object.get("zero_point") {
            None | Some(Value::Bool(true)) => Ok(Self::Awq(numbers)),
            Some(other) => Err(object.unlike("zero_point", show(other), "true")),
        }
    }

    fn read_compressed(object: &Fields) -> Result<Self, String> {
        let packed = |format: Option<&str>| format == Some("pack-quantized");
        let format = object.text("format")?;
        if !packed(format) {
            return Err(object.unlike("format", quote(format), "\"pack-quantized\""));
        }
        let groups = match object.object.get("config_groups") {
            Some(Value::Object(groups)) if (1..=MAX_CONFIG_GROUPS).contains(&groups.len()) => groups,
            other => {
                let found = other.map_or("missing".into(), show);
                return Err(object.unlike(
                    "config_groups",
                    found,
                    format!("1 to {MAX_CONFIG_GROUPS} groups"),
                ));
            }
        };
        let read = |(name, group): (&String, &Value)| {
            let path = format!("{}.config_groups.{}", object.prefix, short(name));
            let Value::Object(group) = group else {
                return Err(format!("{path} is {}; expected an object", show(group)));
            };
            let group = Fields { prefix: &path, object: group };
            let format = group.text("format")?;
            if format.is_some() && !packed(format) {
                return Err(group.unlike("format", quote(format), "\"pack-quantized\""));
            }
            for name in ["input_activations", "output_activations"] {
                if let Some(value) = group.get(name) {
                    return Err(group.unlike(name, show(value), "null: activations are not quantized here"));
                }
            }
            let path = format!("{path}.weights");
            let Some(Value::Object(weights)) = group.get("weights") else {
                return Err(format!("{path} is missing; expected how the weights are quantized"));
            };
            let weights = Fields { prefix: &path, object: weights };
            let kind = weights.text("type")?;
            if !matches!(kind, None | Some("int")) {
                return Err(weights.unlike("type", quote(kind), "\"int\""));
            }
            let numbers = weights.numbers("num_bits", "group_size")?;
            let numbers = match weights.text("strategy")? {
                Some("group") => numbers,
                Some("channel") => Numbers { group: None, ..numbers },
                other => return Err(weights.unlike("strategy", quote(other), "\"group\" or \"channel\"")),
            };
            match weights.get("symmetric") {
                None | Some(Value::Bool(true)) => Ok((numbers, false)),
                Some(Value::Bool(false)) => Ok((numbers, true)),
                Some(other) => Err(weights.unlike("symmetric", show(other), "true or false")),
            }
        };
        let numbers = groups.iter().map(read).collect::<Result<_, _>>()?;
        if let Some(scheme) = object.get("kv_cache_scheme") {
            return Err(object.unlike(
                "kv_cache_scheme",
                show(scheme),
                "null: the KV cache is not quantized here",
            ));
        }
        Ok(Self::CompressedTensors(numbers))
    }

    fn format(&self) -> Format {
        match self {
            Self::Gptq { .. } => Format::Gptq,
            Self::Awq(_) => Format::Awq,
            Self::CompressedTensors(_) => Format::CompressedTensors,
        }
    }

    /// The matrix that a tensor is a part of, and which part.
    fn part_of<'n>(&self, name: &'n str) -> Option<(&'n str, PartKind)> {
        let kinds: &[PartKind] = match self {
            Self::Gptq { .. } => {
                &[PartKind::Weights, PartKind::Zeros, PartKind::Scales, PartKind::GroupIndex]
            }
            Self::Awq(_) => &[PartKind::Weights, PartKind::Zeros, PartKind::Scales],
            Self::CompressedTensors(_) => &PartKind::ALL,
        };
        kinds.iter().find_map(|kind| {
            let base = name.strip_suffix(self.suffix(*kind))?.strip_suffix('.')?;
            Some((base, *kind))
        })
    }

    /// What ends the names of a kind of parts.
    fn suffix(&self, kind: PartKind) -> &'static str {
        match (self, kind) {
            (Self::CompressedTensors(_), PartKind::Weights) => "weight_packed",
            (Self::CompressedTensors(_), PartKind::Scales) => "weight_scale",
            (Self::CompressedTensors(_), PartKind::Zeros) => "weight_zero_point",
            (Self::CompressedTensors(_), PartKind::GroupIndex) => "weight_g_idx",
            (Self::CompressedTensors(_), PartKind::Shape) => "weight_shape",
            (_, PartKind::Weights) => "qweight",
            (_, PartKind::Scales) => "scales",
            (_, PartKind::Zeros) => "qzeros",
            (_, PartKind::GroupIndex) => "g_idx",
            (_, PartKind::Shape) => "shape",
        }
    }

    /// Checks that the parts of a matrix are one, and reads how it lies in them. The error names the part it is about.
    fn layout(&self, parts: &Parts) -> Result<Layout, PartError> {
        let layout = match self {
            Self::Gptq { zeros, numbers, .. } => Self::gptq_layout(parts, *zeros, *numbers)?,
            Self::Awq(numbers) => Self::awq_layout(parts, *numbers)?,
            Self::CompressedTensors(numbers) => Self::compressed_layout(parts, numbers)?,
        };
        let block = block_columns(layout.bits);
        if layout.group < layout.cols && !layout.group.is_multiple_of(block) {
            let problem =
                format!("scales groups of {} columns; expected a multiple of {block}", layout.group);
            return Err((PartKind::Scales, problem));
        }
        let ordered = matches!(self, Self::Gptq { by_activation: true, .. }) && layout.group < layout.cols;
        if ordered {
            parts.required(PartKind::GroupIndex)?;
        }
        if let Some(index) = parts.get(PartKind::GroupIndex) {
            index.expect(&[DType::I32], &[layout.cols]).about(PartKind::GroupIndex)?;
            let wrong = (0..layout.cols).find(|col| word(index.data, *col) as usize != col / layout.group);
            if let Some(col) = wrong {
                let problem = format!(
                    "puts column {col} into group {}: columns in activation order (desc_act, actorder) are not \
                     supported; expected groups of {} columns in a row",
                    word(index.data, col) as i32,
                    layout.group
                );
                return Err((PartKind::GroupIndex, problem));
            }
        }
        Ok(layout)
    }

    fn gptq_layout(parts: &Parts, zeros: GptqZeros, numbers: Option<Numbers>) -> Result<Layout, PartError> {
        let weights = parts.required(PartKind::Weights)?;
        let scales = parts.required(PartKind::Scales)?;
        let stored_zeros = parts.required(PartKind::Zeros)?;
        let [words, rows] = weights.matrix().about(PartKind::Weights)?;
        let [groups, _] = scales.matrix().about(PartKind::Scales)?;
        let [_, zero_words] = stored_zeros.matrix().about(PartKind::Zeros)?;
        let bits = match numbers {
            Some(Numbers { bits, .. }) => bits,
            None => match [4, 8].into_iter().find(|bits| zero_words.checked_mul(32 / bits) == Some(rows)) {
                Some(bits) => bits as u32,
                None => {
                    let problem =
                        format!("has {zero_words} words for {rows} rows; expected 4 or 8 bits each");
                    return Err((PartKind::Zeros, problem));
                }
            },
        };
        let per_word = 32 / bits as usize;
        let cols = size(words.checked_mul(per_word)).about(PartKind::Weights)?;
        if rows == 0 || !rows.is_multiple_of(per_word) {
            let problem = format!("has {rows} rows of weights; expected a multiple of {per_word}");
            return Err((PartKind::Weights, problem));
        }
        let group = match numbers {
            Some(numbers) => numbers.columns(cols),
            // Modules differ: only the scales say it.
            None => cols.div_ceil(groups.max(1)),
        };
        let scale_type = ScaleType::of(&scales);
        let layout =
            Layout { kind: Kind::Gptq(zeros), bits, rows, cols, group, scale_type, form: Form::ZeroPoint };
        let groups = layout.groups();
        weights.expect(&[DType::I32], &[words, rows]).about(PartKind::Weights)?;
        scales.expect(&SCALE_TYPES, &[groups, rows]).about(PartKind::Scales)?;
        stored_zeros.expect(&[DType::I32], &[groups, rows / per_word]).about(PartKind::Zeros)?;
        Ok(layout)
    }

    fn awq_layout(parts: &Parts, numbers: Numbers) -> Result<Layout, PartError> {
        let weights = parts.required(PartKind::Weights)?;
        let scales = parts.required(PartKind::Scales)?;
        let zeros = parts.required(PartKind::Zeros)?;
        let [cols, words] = weights.matrix().about(PartKind::Weights)?;
        size(Some(cols)).about(PartKind::Weights)?;
        let rows = size(words.checked_mul(8)).about(PartKind::Weights)?;
        let group = numbers.columns(cols);
        let scale_type = ScaleType::of(&scales);
        let layout =
            Layout { kind: Kind::Awq, bits: 4, rows, cols, group, scale_type, form: Form::ZeroPoint };
        weights.expect(&[DType::I32], &[cols, words]).about(PartKind::Weights)?;
        scales.expect(&SCALE_TYPES, &[layout.groups(), rows]).about(PartKind::Scales)?;
        zeros.expect(&[DType::I32], &[layout.groups(), words]).about(PartKind::Zeros)?;
        Ok(layout)
    }

    fn compressed_layout(parts: &Parts, numbers: &[(Numbers, bool)]) -> Result<Layout, PartError> {
        let weights = parts.required(PartKind::Weights)?;
        let scales = parts.required(PartKind::Scales)?;
        let shape = parts.required(PartKind::Shape)?;
        let [rows, words] = weights.matrix().about(PartKind::Weights)?;
        let [_, groups] = scales.matrix().about(PartKind::Scales)?;
        shape.expect(&[DType::I64, DType::I32], &[2]).about(PartKind::Shape)?;
        let dims = match shape.dtype {
            DType::I64 => {
                [0, 8].map(|at| i64::from_le_bytes(shape.data[at..at + 8].try_into().expect("8 bytes")))
            }
            _ => [0, 1].map(|i| i64::from(word(shape.data, i) as i32)),
        };
        let [stated_rows, cols] = dims.map(|dim| usize::try_from(dim).unwrap_or(0));
        let scale_type = ScaleType::of(&scales);
        let with_zeros = parts.get(PartKind::Zeros).is_some();
        let of_group = |(numbers, asymmetric): &(Numbers, bool)| {
            let (bits, group) = (numbers.bits, numbers.columns(cols));
            let layout =
                Layout { kind: Kind::Compressed, bits, rows, cols, group, scale_type, form: Form::Symmetric };
            let same = stated_rows == rows && cols.div_ceil(layout.per_word()) == words;
            let fits = rows > 0 && cols > 0 && same && layout.groups() == groups;
            // Writers of symmetric weights may add zero points; of others they may not leave them out.
            fits.then_some((layout, *asymmetric && !with_zeros))
        };
        let Some((layout, lacks_zeros)) = numbers.iter().filter_map(of_group).min_by_key(|(_, lacks)| *lacks)
        else {
            let problem = format!(
                "is {dims:?}; the matrix's {rows} rows of {words} words and {groups} scales are no such shape in any of \
                 quantization_config.config_groups"
            );
            return Err((PartKind::Shape, problem));
        };
        weights.expect(&[DType::I32], &[rows, words]).about(PartKind::Weights)?;
        scales.expect(&SCALE_TYPES, &[rows, groups]).about(PartKind::Scales)?;
        if lacks_zeros {
            return Err((
                PartKind::Zeros,
                "is missing; the weights are not symmetric by quantization_config".into(),
            ));
        }
        if let Some(zeros) = parts.get(PartKind::Zeros) {
            let shape = [rows.div_ceil(layout.per_word()), groups];
            zeros.expect(&[DType::I32], &shape).about(PartKind::Zeros)?;
        }
        Ok(layout)
    }
}

const SCALE_TYPES: [DType; 2] = [DType::F16, DType::BF16];

impl ScaleType {
    /// Of scales whose type is checked to be one of [`SCALE_TYPES`] before it is used.
    fn of(scales: &Part) -> Self {
        if scales.dtype == DType::BF16 { Self::Bf16 } else { Self::F16 }
    }
}

impl Numbers {
    /// Columns of a group in rows of `cols`, at least one.
    fn columns(self, cols: usize) -> usize {
        self.group.map_or(cols, |group| group.min(cols)).max(1)
    }
}

fn size(size: Option<usize>) -> Result<usize, String> {
    match size {
        None => Err("is larger than any file".into()),
        Some(0) => Err("is empty".into()),
        Some(size) => Ok(size),
    }
}

// ---- Fields of the config -------------------------------------------------------------------------------------

/// An object of config.json, and where it stands.
struct Fields<'a> {
    prefix: &'a str,
    object: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// A field that is there and not null.
    fn get(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    fn unlike(&self, name: &str, found: impl fmt::Display, expected: impl fmt::Display) -> String {
        format!("{}.{name} is {found}; expected {expected}", self.prefix)
    }

    fn text(&self, name: &str) -> Result<Option<&'a str>, String> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.unlike(name, show(other), "a string")),
        }
    }

    /// Bits, 4 or 8, and the columns of a group; -1 or null is a whole row.
    fn numbers(&self, bits: &str, group: &str) -> Result<Numbers, String> {
        let found = self.get(bits).map_or("missing".into(), show);
        let bits = match self.get(bits).and_then(Value::as_u64) {
            Some(bits @ (4 | 8)) => bits as u32,
            _ => return Err(self.unlike(bits, found, "4 or 8")),
        };
        let columns = match self.get(group) {
            None => None,
            Some(value) => match value.as_i64() {
                Some(-1) => None,
                Some(columns) if columns > 0 => Some(columns as usize),
                _ => {
                    return Err(self.unlike(
                        group,
                        show(value),
                        "a number of columns, or -1 for the whole row",
                    ));
                }
            },
        };
        Ok(Numbers { bits, group: columns })
    }
}

/// A value as a message may quote it.
fn show(value: &Value) -> String {
    match value {
        Value::Object(_) => "an object".into(),
        Value::Array(_) => "a list".into(),
        other => short(&other.to_string()),
    }
}

fn quote(text: Option<&str>) -> String {
    text.map_or("missing".into(), |text| format!("{:?}", short(text)))
}
