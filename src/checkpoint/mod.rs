//! Checkpoints on disk: which files a model consists of, and its tensors, mapped and checked.
//!
//! Reads safetensors in one file or in shards with an index, and GGUF. Every header is checked before a byte of a
//! tensor is lent out, so that a [`Tensor`] is always what it says: in bounds, and as long as its shape.
//! Nothing is converted or copied on opening; a tensor's bytes are paged in when they are walked.
//!
//! Refuses to know a model: names are strings here, and what they mean is for [`crate::model`]. GGUF's alone are
//! translated, into Hugging Face's, which everything else speaks.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Range;

use crate::tensor::{DType, Scheme};

mod direct;
mod files;
mod gguf;
mod legacy;
mod native;
mod packed;
mod safetensors;
mod view;

pub use files::{FileSlice, MAX_READ_BYTES, ModelFiles};
pub use gguf::{GgmlTensor, GgmlType};
pub use legacy::LegacyTensor;
pub use native::{FileWriter, Manifest, NativeTensor, NativeWriter, NewTensor, Synthetic, verify};
pub use packed::PackedMatrix;
pub use view::{Encoding, Tensor};

use files::FileBytes;
use safetensors::{Entries, Header, one_line, read_header};

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";
/// Each shard is a mapping, of which a process has 65,530 by default; Gemma-3 27B has 12.
const MAX_SHARDS: usize = 4096;

/// A file of a model is not what it should be. One line, for the person who gave the model.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("{file}: {problem}")]
    File { file: String, problem: String },
    #[error("{file}: tensor {tensor}: {problem}")]
    Tensor { file: String, tensor: String, problem: String },
}

impl CheckpointError {
    fn file(file: impl fmt::Display, problem: impl Into<String>) -> Self {
        Self::File { file: short(&file.to_string()), problem: problem.into() }
    }

    fn tensor(file: impl fmt::Display, tensor: &str, problem: impl Into<String>) -> Self {
        Self::Tensor { file: short(&file.to_string()), tensor: short(tensor), problem: problem.into() }
    }
}

/// The tensors of a checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    location: String,
    format: Format,
    norms_hold_one: bool,
    synthetic: Option<Synthetic>,
    files: Vec<CheckpointFile>,
    /// By file, then by position in it.
    tensors: Vec<Entry>,
    by_name: HashMap<String, usize>,
}

/// What kind of files a checkpoint consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    Safetensors,
    Gguf,
    Native,
    /// The original project's layer files.
    Legacy,
    Gptq,
    Awq,
    CompressedTensors,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Safetensors => "safetensors",
            Format::Gguf => "gguf",
            Format::Native => "native",
            Format::Legacy => "layer files of the original project",
            Format::Gptq => "safetensors, packed by GPTQ",
            Format::Awq => "safetensors, packed by AWQ",
            Format::CompressedTensors => "safetensors, packed by compressed-tensors",
        })
    }
}

/// A tensor and where its parts lie.
#[derive(Debug)]
struct Entry {
    name: String,
    shape: Vec<usize>,
    /// The file that messages name.
    file: usize,
    stored: Stored,
}

/// Where the bytes of an [`Encoding`] lie.
#[derive(Debug)]
enum Stored {
    Plain { dtype: DType, data: Span },
    Ggml { kind: GgmlType, data: Span },
    Native { scheme: Scheme, blocks: Span, scales: Option<Span> },
    Legacy { layout: legacy::Layout, q: Span, scales: Span },
    Packed { layout: packed::Layout, weights: Span, scales: Span, zeros: Option<Span> },
}

impl Stored {
    fn spans(&self) -> impl Iterator<Item = &Span> {
        match self {
            Stored::Plain { data, .. } | Stored::Ggml { data, .. } => [Some(data), None, None],
            Stored::Native { blocks, scales, .. } => [Some(blocks), scales.as_ref(), None],
            Stored::Legacy { q, scales, .. } => [Some(q), Some(scales), None],
            Stored::Packed { weights, scales, zeros, .. } => [Some(weights), Some(scales), zeros.as_ref()],
        }
        .into_iter()
        .flatten()
    }
}

/// Bytes of a file.
#[derive(Debug, Clone)]
struct Span {
    file: usize,
    range: Range<usize>,
}

#[derive(Debug)]
struct CheckpointFile {
    display: String,
    bytes: FileBytes,
}

impl Checkpoint {
    /// Maps the GGUF file that the model is, or the files of a native checkpoint; else `model.safetensors`, or the shards
    /// that `model.safetensors.index.json` lists; else the original project's layer files; and checks every header. The
    /// single file is preferred where both exist, as transformers does.
    pub fn open(files: &ModelFiles) -> Result<Self, CheckpointError> {
        let mut checkpoint = Self {
            location: files.location(),
            format: Format::Safetensors,
            norms_hold_one: false,
            synthetic: None,
            files: Vec::new(),
            tensors: Vec::new(),
            by_name: HashMap::new(),
        };
        if let Some(parts) = files.map_gguf()? {
            checkpoint.add_gguf(parts)?;
        } else if let Some(manifest) = Manifest::read(files)? {
            checkpoint.add_native(files, &manifest)?;
        } else if let Some(bytes) = files.map(SINGLE_FILE)? {
            checkpoint.add_file(files.display(SINGLE_FILE), bytes)?;
            checkpoint.join_packed(files)?;
        } else if let Some(index) = files.read(INDEX_FILE)? {
            checkpoint.add_shards(files, &index)?;
            checkpoint.join_packed(files)?;
        } else if !checkpoint.add_layer_files(files)? {
            let problem =
                format!("holds neither {SINGLE_FILE} nor {INDEX_FILE} nor {}", native::MANIFEST_FILE);
            return Err(CheckpointError::file(files.location(), problem));
        }
        Ok(checkpoint)
    }

    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Option<Tensor<'_>> {
        self.by_name.get(name).map(|&i| self.view(&self.tensors[i]))
    }

    /// All tensors, by file (in order of file name) and position in it: the order in which reading them
    /// is one pass over the disk.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Tensor<'_>> {
        self.tensors.iter().map(|entry| self.view(entry))
    }

    pub fn format(&self) -> Format {
        self.format
    }

    /// Where the checkpoint lies, for people.
    pub fn location(&self) -> &str {
        &self.location
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.iter().map(|tensor| tensor.stored_bytes()).sum()
    }

    /// The files the tensors lie in, as messages call them.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &str> {
        self.files.iter().map(|f| f.display.as_str())
    }

    /// Whether norm weights are stored as the factor `1 + w` (GGUF) and not as `w`.
    pub fn norms_hold_one(&self) -> bool {
        self.norms_hold_one
    }

    /// What tells these files from others and from later versions of them: names, lengths, times of change.
    pub fn fingerprint(&self) -> Vec<(String, u64, Option<std::time::SystemTime>)> {
        self.files.iter().map(|f| (f.display.clone(), f.bytes.len() as u64, f.bytes.modified())).collect()
    }

    /// How the weights were drawn, where they are random and no model.
    pub fn synthetic(&self) -> Option<&Synthetic> {
        self.synthetic.as_ref()
    }

    /// The values of a small tensor, read by themselves: a look at a mapping has the system read much around it.
    pub fn read_f32(&self, tensor: &Tensor) -> Result<Vec<f32>, CheckpointError> {
        let stored = self.by_name.get(tensor.name).map(|&index| &self.tensors[index].stored);
        let Some(Stored::Plain { dtype, data }) = stored else { return tensor.to_f32() };
        let mut bytes = vec![0; data.range.len()];
        let slice = self.files[data.file].bytes.slice(data.range.clone());
        slice.read_at(0, &mut bytes).map_err(|e| tensor.error(e))?;
        Tensor { encoding: Encoding::Plain { dtype: *dtype, data: &bytes }, ..*tensor }.to_f32()
    }

    /// Gives back the memory that holds a tensor's bytes: they are on the device now, or converted. Reading the tensor
    /// again reads the disk again.
    pub fn release(&self, tensor: &Tensor) {
        let Some(&index) = self.by_name.get(tensor.name) else { return };
        for span in self.tensors[index].stored.spans() {
            self.files[span.file].bytes.release(span.range.clone());
        }
    }

    /// The same for all of the files: the system keeps memory in pieces that can hold the ends of several tensors.
    pub fn release_all(&self) {
        for CheckpointFile { bytes, .. } in &self.files {
            bytes.release(0..bytes.len());
        }
    }

    /// Bytes of the files that are in memory now, whoever holds them there.
    pub fn resident_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes.resident_bytes()).sum()
    }

    fn view<'a>(&'a self, entry: &'a Entry) -> Tensor<'a> {
        let slice = |span: &Span| self.files[span.file].bytes.slice(span.range.clone());
        let encoding = match &entry.stored {
            Stored::Plain { dtype, data } => Encoding::Plain { dtype: *dtype, data: slice(data).bytes },
            Stored::Ggml { kind, data } => {
                Encoding::Ggml(GgmlTensor { kind: *kind, data: slice(data).bytes })
            }
            Stored::Native { scheme, blocks, scales } => Encoding::Native(NativeTensor {
                scheme: *scheme,
                blocks: slice(blocks),
                scales: scales.as_ref().map_or((&[][..]).into(), slice),
            }),
            Stored::Legacy { layout, q, scales } => {
                Encoding::Legacy(LegacyTensor::new(*layout, slice(q).bytes, slice(scales).bytes))
            }
            Stored::Packed { layout, weights, scales, zeros } => {
                let zeros = zeros.as_ref().map_or(&[][..], |zeros| slice(zeros).bytes);
                Encoding::Packed(PackedMatrix::new(*layout, slice(weights).bytes, slice(scales).bytes, zeros))
            }
        };
        Tensor { name: &entry.name, file: &self.files[entry.file].display, shape: &entry.shape, encoding }
    }

    fn add_shards(&mut self, files: &ModelFiles, index: &[u8]) -> Result<(), CheckpointError> {
        #[derive(serde::Deserialize)]
        struct Index {
            weight_map: Entries<String, false>,
        }
        let index_name = files.display(INDEX_FILE);
        let fail = |problem: String| CheckpointError::file(&index_name, problem);
        let Index { weight_map: Entries { entries: weight_map, .. } } = serde_json::from_slice(index)
            .map_err(|e| fail(format!("is no valid index of shards: {}", one_line(&e))))?;

        // In order of file name, whatever the order of the index.
        let mut shards: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (tensor, shard) in &weight_map {
            shards.entry(shard).or_default().push(tensor);
        }
        if shards.len() > MAX_SHARDS {
            return Err(fail(format!("lists {} files; expected at most {MAX_SHARDS}", shards.len())));
        }
        for (shard, tensors) in &shards {
            let about = |problem: String| CheckpointError::tensor(&index_name, tensors[0], problem);
            let Some(bytes) = files.map_listed(shard).map_err(about)? else {
                return Err(about(format!(
                    "the index places it, and {} more, in {}, which is missing",
                    tensors.len() - 1,
                    short(shard)
                )));
            };
            self.add_file(files.display(shard), bytes)?;
        }
        for (tensor, shard) in &weight_map {
            let place = self.by_name.get(tensor).map(|&i| self.files[self.tensors[i].file].display.as_str());
            if place != Some(&files.display(shard)) {
                let place = place.map_or("in none of the shards".into(), |place| format!("in {place}"));
                let problem = format!("the index places it in {}; it is {place}", short(shard));
                return Err(CheckpointError::tensor(&index_name, tensor, problem));
            }
        }
        Ok(())
    }

    fn add_native(&mut self, files: &ModelFiles, manifest: &Manifest) -> Result<(), CheckpointError> {
        self.format = Format::Native;
        self.norms_hold_one = manifest.norms_hold_one;
        self.synthetic = manifest.synthetic.clone();
        for (name, record) in manifest.weight_files() {
            let display = files.display(name);
            let fail = |problem: String| CheckpointError::file(&display, problem);
            let bytes = files.map_listed(name).map_err(fail)?;
            let bytes = bytes.ok_or_else(|| fail("is missing; the manifest lists it".into()))?;
            native::check_length(files, name, record, bytes.len())?;
            let infos = header(&display, &bytes)?.tensors;
            let file = self.files.len();
            for (name, shape, stored) in native::entries(manifest, name, &display, file, infos)? {
                self.add(Entry { name, shape, file, stored }, &display)?;
            }
            self.files.push(CheckpointFile { display, bytes });
        }
        match manifest.tensors.iter().find(|(name, _)| !self.by_name.contains_key(*name)) {
            None => Ok(()),
            Some((name, record)) => {
                let problem = format!("is missing; its manifest places it in {}", short(&record.file));
                Err(CheckpointError::tensor(files.location(), name, problem))
            }
        }
    }

    fn add_file(&mut self, display: String, bytes: FileBytes) -> Result<(), CheckpointError> {
        let file = self.files.len();
        for info in header(&display, &bytes)?.tensors {
            let data = Span { file, range: info.range };
            let stored = Stored::Plain { dtype: info.dtype, data };
            self.add(Entry { name: info.name, shape: info.shape, file, stored }, &display)?;
        }
        self.files.push(CheckpointFile { display, bytes });
        Ok(())
    }

    fn add_gguf(&mut self, parts: Vec<(String, FileBytes)>) -> Result<(), CheckpointError> {
        self.format = Format::Gguf;
        self.norms_hold_one = true;
        let count = parts.len();
        for (file, (display, bytes)) in parts.into_iter().enumerate() {
            for tensor in gguf::tensors(&bytes, &display, (file, count))? {
                let data = Span { file, range: tensor.range };
                let stored = match tensor.storage {
                    gguf::Storage::Plain(dtype) => Stored::Plain { dtype, data },
                    gguf::Storage::Ggml(kind) => Stored::Ggml { kind, data },
                };
                self.add(Entry { name: tensor.name, shape: tensor.shape, file, stored }, &display)?;
            }
            self.files.push(CheckpointFile { display, bytes });
        }
        Ok(())
    }

    /// Adds a tensor of the file that is added next.
    fn add(&mut self, entry: Entry, display: &str) -> Result<(), CheckpointError> {
        if let Some(&other) = self.by_name.get(&entry.name) {
            let other = self.files.get(self.tensors[other].file).map_or(display, |f| &f.display);
            let problem = format!("is in {other} too; expected it in one file");
            return Err(CheckpointError::tensor(display, &entry.name, problem));
        }
        self.by_name.insert(entry.name.clone(), self.tensors.len());
        self.tensors.push(entry);
        Ok(())
    }
}

/// The header of a safetensors file, which messages call `display`.
fn header(display: &str, bytes: &FileBytes) -> Result<Header, CheckpointError> {
    // What lies behind a header is another's to read, and perhaps past the page cache.
    bytes.read_ahead(false);
    let header = read_header(bytes);
    bytes.read_ahead(true);
    header.map_err(|e| match e.tensor {
        Some(tensor) => CheckpointError::tensor(display, &tensor, e.problem),
        None => CheckpointError::file(display, e.problem),
    })
}

/// Text from a file as a message may hold it: on one line, and of bounded length.
pub(crate) fn short(text: &str) -> String {
    const MAX_CHARS: usize = 200;
    let mut out = String::new();
    for c in text.chars().take(MAX_CHARS) {
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    if text.chars().nth(MAX_CHARS).is_some() {
        out.push('…');
    }
    out
}
