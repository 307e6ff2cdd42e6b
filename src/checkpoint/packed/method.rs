//! Reads from the config how a checkpoint is packed, and checks the parts of each matrix.
//!
//! The type and shape of a part are checked before its data is used. Every [`Layout`] matches its parts.

use std::fmt;

use serde_json::{Map, Value};

use super::matrix::{Form, GptqZeros, Kind, Layout, block_columns, word};
use crate::checkpoint::error::short;
use crate::checkpoint::format::Format;
use crate::tensor::DType;

/// Maximum number of `config_groups`. Known checkpoints have one.
const MAX_CONFIG_GROUPS: usize = 64;

/// The fields of a config.json that describe how the checkpoint is packed. compressed-tensors wrote the second until
/// 2024.
pub const PACKING_FIELDS: [&str; 2] = ["quantization_config", "compression_config"];

/// How a checkpoint is packed, according to its config.json.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Method {
    Gptq {
        zeros: GptqZeros,
        /// `None` = modules may differ (`dynamic`).
        numbers: Option<Numbers>,
        /// Whether columns were grouped by their activations (`desc_act`). Then `g_idx` is required.
        by_activation: bool,
    },
    Awq(Numbers),
    /// (Numbers, whether there are zero points) of each config group. Each matrix belongs to one of the groups.
    CompressedTensors(Vec<(Numbers, bool)>),
}

/// Bits and group size of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Numbers {
    bits: u32,
    /// Columns of a group. `None` = a whole row.
    group: Option<usize>,
}

impl Method {
    /// Reads the config.json of any model; `None` if it has none of [`PACKING_FIELDS`].
    pub(super) fn read(config: &Value) -> Result<Option<Method>, String> {
        let levels = [Some(config), config.get("text_config")].into_iter().flatten();
        let fields = levels.flat_map(|level| PACKING_FIELDS.map(|name| (name, level.get(name))));
        let mut fields =
            fields.filter_map(|(name, value)| Some((name, value.filter(|value| !value.is_null())?)));
        let Some((name, found)) = fields.next() else { return Ok(None) };
        let object = Fields::of(name.into(), found)?;
        let method = match object.text("quant_method")? {
            Some("gptq") => Self::read_gptq(&object),
            Some("awq") => Self::read_awq(&object),
            Some("compressed-tensors") => Self::read_compressed(&object),
            other => {
                let expected = "\"gptq\", \"awq\" or \"compressed-tensors\", or the original checkpoint in BF16, F16 or F32";
                Err(object.unlike("quant_method", quote(other), expected))
            }
        };
        method.map(Some)
    }

    /// Reads the `quantize_config.json` of older AutoGPTQ checkpoints, which has the fields of GPTQ's
    /// `quantization_config`, and often no method.
    pub(super) fn read_quantize_config(config: &Value) -> Result<Method, String> {
        let Value::Object(object) = config else {
            return Err(format!("is {}; expected an object", show(config)));
        };
        let object = Fields { path: String::new(), object };
        object.is_text("quant_method", "gptq", true)?;
        Self::read_gptq(&object)
    }

    fn read_gptq(object: &Fields) -> Result<Self, String> {
        let by_gptqmodel =
            object.object.get("meta").and_then(|meta| meta.get("quantizer")).is_some_and(|by| {
                let is_it = |by: &Value| by.as_str().is_some_and(|by| by.starts_with("gptqmodel"));
                is_it(by) || by.as_array().is_some_and(|list| list.iter().any(is_it))
            });
        let zeros = match object.text("checkpoint_format")? {
            Some("gptq_v2") => GptqZeros::Unchanged,
            None | Some("gptq") if by_gptqmodel => GptqZeros::WordMinusOnes,
            None | Some("gptq") => GptqZeros::EachMinusOne,
            other => return Err(object.unlike("checkpoint_format", quote(other), "\"gptq\" or \"gptq_v2\"")),
        };
        object.is_text("pack_dtype", "int32", true)?;
        let dynamic = object.object.get("dynamic").and_then(Value::as_object).is_some_and(|d| !d.is_empty());
        let numbers = object.numbers("bits", "group_size")?;
        let by_activation = object.get("desc_act") == Some(&Value::Bool(true));
        Ok(Self::Gptq { zeros, numbers: (!dynamic).then_some(numbers), by_activation })
    }

    fn read_awq(object: &Fields) -> Result<Self, String> {
        // Without a version, it is this one in transformers too.
        let version = object.text("version")?.or(object.text("checkpoint_format")?).unwrap_or("gemm");
        if !version.eq_ignore_ascii_case("gemm") {
            return Err(object.unlike("version", quote(Some(version)), "\"gemm\""));
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
        object.is_text("format", "pack-quantized", false)?;
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
            let path = format!("{}.config_groups.{}", object.path, short(name));
            let group = Fields::of(path, group)?;
            group.is_text("format", "pack-quantized", true)?;
            for name in ["input_activations", "output_activations"] {
                group.is_null(name, "activations are not quantized here")?;
            }
            let path = format!("{}.weights", group.path);
            let Some(weights @ Value::Object(_)) = group.get("weights") else {
                return Err(format!("{path} is missing; expected how the weights are quantized"));
            };
            let weights = Fields::of(path, weights)?;
            weights.is_text("type", "int", true)?;
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
        object.is_null("kv_cache_scheme", "the KV cache is not quantized here")?;
        Ok(Self::CompressedTensors(numbers))
    }

    pub(super) fn format(&self) -> Format {
        match self {
            Self::Gptq { .. } => Format::Gptq,
            Self::Awq(_) => Format::Awq,
            Self::CompressedTensors(_) => Format::CompressedTensors,
        }
    }

    /// The matrix that contains the tensor `name`, and the tensor's role in it; `None` if it is not a part of a matrix.
    pub(super) fn part_of<'n>(&self, name: &'n str) -> Option<(&'n str, PartKind)> {
        let kinds = match self {
            Self::Gptq { .. } => &PartKind::ALL[..4],
            Self::Awq(_) => &PartKind::ALL[..3],
            Self::CompressedTensors(_) => &PartKind::ALL,
        };
        kinds.iter().find_map(|kind| {
            let base = name.strip_suffix(self.suffix(*kind))?.strip_suffix('.')?;
            Some((base, *kind))
        })
    }

    /// The end of the tensor names of a kind of part.
    pub(super) fn suffix(&self, kind: PartKind) -> &'static str {
        let suffixes = match self {
            Self::CompressedTensors(_) => {
                ["weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"]
            }
            _ => ["qweight", "scales", "qzeros", "g_idx", "shape"],
        };
        suffixes[kind as usize]
    }

    /// Checks that the parts match each other, and returns the matrix's layout.
    pub(super) fn layout(&self, parts: &Parts) -> Result<Layout, PartError> {
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
            index.expect(&[DType::I32], &[layout.cols])?;
            let wrong = (0..layout.cols).find(|col| word(index.data, *col) as usize != col / layout.group);
            if let Some(col) = wrong {
                let problem = format!(
                    "puts column {col} into group {}: columns in activation order (desc_act, actorder) are not \
                     supported; expected groups of {} consecutive columns",
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
        let [words, rows] = weights.matrix()?;
        let [groups, _] = scales.matrix()?;
        let [_, zero_words] = stored_zeros.matrix()?;
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
        let cols = weights.size(words.checked_mul(per_word))?;
        if rows == 0 || !rows.is_multiple_of(per_word) {
            let problem = format!("has {rows} rows of weights; expected a multiple of {per_word}");
            return Err((PartKind::Weights, problem));
        }
        let group = match numbers {
            Some(numbers) => numbers.columns(cols),
            // Modules may differ, so the group size follows from the shape of the scales.
            None => cols.div_ceil(groups.max(1)),
        };
        let scale_type = scales.dtype;
        let layout =
            Layout { kind: Kind::Gptq(zeros), bits, rows, cols, group, scale_type, form: Form::ZeroPoint };
        let groups = layout.groups();
        weights.expect(&[DType::I32], &[words, rows])?;
        scales.expect(&SCALE_TYPES, &[groups, rows])?;
        stored_zeros.expect(&[DType::I32], &[groups, rows / per_word])?;
        Ok(layout)
    }

    fn awq_layout(parts: &Parts, numbers: Numbers) -> Result<Layout, PartError> {
        let weights = parts.required(PartKind::Weights)?;
        let scales = parts.required(PartKind::Scales)?;
        let zeros = parts.required(PartKind::Zeros)?;
        let [cols, words] = weights.matrix()?;
        weights.size(Some(cols))?;
        let rows = weights.size(words.checked_mul(8))?;
        let group = numbers.columns(cols);
        let scale_type = scales.dtype;
        let layout =
            Layout { kind: Kind::Awq, bits: 4, rows, cols, group, scale_type, form: Form::ZeroPoint };
        weights.expect(&[DType::I32], &[cols, words])?;
        scales.expect(&SCALE_TYPES, &[layout.groups(), rows])?;
        zeros.expect(&[DType::I32], &[layout.groups(), words])?;
        Ok(layout)
    }

    fn compressed_layout(parts: &Parts, numbers: &[(Numbers, bool)]) -> Result<Layout, PartError> {
        let weights = parts.required(PartKind::Weights)?;
        let scales = parts.required(PartKind::Scales)?;
        let shape = parts.required(PartKind::Shape)?;
        let [rows, words] = weights.matrix()?;
        let [_, groups] = scales.matrix()?;
        shape.expect(&[DType::I64, DType::I32], &[2])?;
        let dims = match shape.dtype {
            DType::I64 => {
                [0, 8].map(|at| i64::from_le_bytes(shape.data[at..at + 8].try_into().expect("8 bytes")))
            }
            _ => [0, 1].map(|i| i64::from(word(shape.data, i) as i32)),
        };
        let [stated_rows, cols] = dims.map(|dim| usize::try_from(dim).unwrap_or(0));
        let scale_type = scales.dtype;
        let with_zeros = parts.get(PartKind::Zeros).is_some();
        let of_group = |(numbers, asymmetric): &(Numbers, bool)| {
            let (bits, group) = (numbers.bits, numbers.columns(cols));
            let layout =
                Layout { kind: Kind::Compressed, bits, rows, cols, group, scale_type, form: Form::Symmetric };
            let same = stated_rows == rows && cols.div_ceil(layout.per_word()) == words;
            let fits = rows > 0 && cols > 0 && same && layout.groups() == groups;
            // Symmetric weights may have zero points. Other weights need them.
            fits.then_some((layout, *asymmetric && !with_zeros))
        };
        let Some((layout, lacks_zeros)) = numbers.iter().filter_map(of_group).min_by_key(|(_, lacks)| *lacks)
        else {
            let problem = format!(
                "is {dims:?}; the matrix's {rows} rows of {words} words and {groups} scales do not match it in any of \
                 quantization_config.config_groups"
            );
            return Err((PartKind::Shape, problem));
        };
        weights.expect(&[DType::I32], &[rows, words])?;
        scales.expect(&SCALE_TYPES, &[rows, groups])?;
        if lacks_zeros {
            return Err((
                PartKind::Zeros,
                "is missing, but the weights are not symmetric according to quantization_config".into(),
            ));
        }
        if let Some(zeros) = parts.get(PartKind::Zeros) {
            let shape = [rows.div_ceil(layout.per_word()), groups];
            zeros.expect(&[DType::I32], &shape)?;
        }
        Ok(layout)
    }
}

const SCALE_TYPES: [DType; 2] = [DType::F16, DType::BF16];

impl Numbers {
    /// Columns of a group in rows of `cols`, at least one.
    fn columns(self, cols: usize) -> usize {
        self.group.map_or(cols, |group| group.min(cols)).max(1)
    }
}

/// The role of a tensor in its matrix, in the order of [`Method::suffix`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PartKind {
    Weights,
    Scales,
    Zeros,
    GroupIndex,
    Shape,
}

impl PartKind {
    pub const ALL: [PartKind; 5] = [Self::Weights, Self::Scales, Self::Zeros, Self::GroupIndex, Self::Shape];
}

/// A part as stored in its file.
#[derive(Debug, Clone, Copy)]
pub(super) struct StoredPart<'a> {
    pub kind: PartKind,
    pub dtype: DType,
    pub shape: &'a [usize],
    pub data: &'a [u8],
}

impl StoredPart<'_> {
    fn expect(&self, dtypes: &[DType], shape: &[usize]) -> Result<(), PartError> {
        if dtypes.contains(&self.dtype) && self.shape == shape {
            return Ok(());
        }
        let names: Vec<_> = dtypes.iter().map(|dtype| format!("{dtype:?}")).collect();
        let expected = names.join(" or ");
        Err((self.kind, format!("is {:?} {:?}; expected {expected} {shape:?}", self.dtype, self.shape)))
    }

    /// Rows and columns of the part.
    fn matrix(&self) -> Result<[usize; 2], PartError> {
        let problem = || format!("has shape {:?}; expected two dimensions", self.shape);
        self.shape.try_into().map_err(|_| (self.kind, problem()))
    }

    /// A number of rows or columns that was computed from the part's shape.
    fn size(&self, size: Option<usize>) -> Result<usize, PartError> {
        match size {
            None => Err((self.kind, "is larger than any file".into())),
            Some(0) => Err((self.kind, "is empty".into())),
            Some(size) => Ok(size),
        }
    }
}

/// The parts of one matrix, by [`PartKind`].
#[derive(Debug, Default)]
pub(super) struct Parts<'a>(pub [Option<StoredPart<'a>>; 5]);

impl<'a> Parts<'a> {
    fn get(&self, kind: PartKind) -> Option<StoredPart<'a>> {
        self.0[kind as usize]
    }

    fn required(&self, kind: PartKind) -> Result<StoredPart<'a>, PartError> {
        self.get(kind).ok_or((kind, "is missing".into()))
    }
}

/// (The wrong part, the problem).
pub(super) type PartError = (PartKind, String);

/// An object of config.json, or all of quantize_config.json.
struct Fields<'a> {
    /// The path of the object, for messages; empty for the whole file.
    path: String,
    object: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    fn of(path: String, value: &'a Value) -> Result<Self, String> {
        match value {
            Value::Object(object) => Ok(Self { path, object }),
            other => Err(format!("{path} is {}; expected an object", show(other))),
        }
    }

    /// The value of a field; `None` if the field is missing or null.
    fn get(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    fn unlike(&self, name: &str, found: impl fmt::Display, expected: impl fmt::Display) -> String {
        let path = if self.path.is_empty() { String::new() } else { format!("{}.", self.path) };
        format!("{path}{name} is {found}; expected {expected}")
    }

    fn text(&self, name: &str) -> Result<Option<&'a str>, String> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.unlike(name, show(other), "a string")),
        }
    }

    /// Refuses a text other than `only`.
    fn is_text(&self, name: &str, only: &str, may_be_missing: bool) -> Result<(), String> {
        match self.text(name)? {
            None if may_be_missing => Ok(()),
            Some(text) if text == only => Ok(()),
            other => Err(self.unlike(name, quote(other), format!("{only:?}"))),
        }
    }

    fn is_null(&self, name: &str, why: &str) -> Result<(), String> {
        match self.get(name) {
            None => Ok(()),
            Some(value) => Err(self.unlike(name, show(value), format!("null, because {why}"))),
        }
    }

    /// Reads the bits (4 or 8) and the columns of a group (-1 or null = a whole row).
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

/// A value, for messages.
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
