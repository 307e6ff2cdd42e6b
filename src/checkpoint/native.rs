//! Native checkpoints: weights packed in the device's layout, so that loading needs no conversion.
//!
//! The folder has a manifest `unicorn.json`, `layer-NNN.safetensors` for each decoder layer, `shared.safetensors` for
//! the rest of the language model, `vision.safetensors` for a vision tower, and the configs, tokenizer and template of
//! the source. `docs/formats.md` specifies it.
//!
//! The manifest is written last, so a folder with a manifest is complete. A conversion that was interrupted, or that
//! filled the disk, does not load. Refuses a manifest of another format or layout, files whose size is not the
//! manifest's, a config that differs from the one in the manifest, and tensors whose bytes do not match their scheme
//! and shape. [`verify`] compares checksums.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::error::{CheckpointError, one_line, short};
use super::files::{FileBytes, FileSlice, ModelFiles};
use super::layer_values::{self, LayerValues};
use super::safetensors::TensorInfo;
use super::table::{Span, Stored};
use crate::file;
use crate::tensor::{DType, LAYOUT_VERSION, QuantizedRow, Scheme, TILE_ROWS, unpack_plain_row, unpack_row};

pub(super) const MANIFEST_FILE: &str = "unicorn.json";
/// Progress of a conversion. Only in a folder without a manifest.
const PROGRESS_FILE: &str = "unicorn.partial.json";
/// Locked while a conversion runs.
const LOCK_FILE: &str = "unicorn.lock";
const FORMAT: &str = "unicorn-native";
/// Version of the folder's structure; [`LAYOUT_VERSION`] is the version of the tensors' bytes.
const FORMAT_VERSION: u32 = 1;
const BLOCKS: &str = ".blocks";
const SCALES: &str = ".scales";
/// The 435 matrices of a 27B take 0.1 MB.
const MAX_MANIFEST_BYTES: usize = 2 << 20;
const MAX_PROGRESS_BYTES: u64 = 64 << 20;
/// Bytes per read while hashing.
const HASH_BYTES: usize = 8 << 20;

/// A tensor in a device layout.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NativeTensor<'a> {
    pub scheme: Scheme,
    /// [`Scheme::block_bytes`] of the tensor's rows and columns.
    pub blocks: FileSlice<'a>,
    /// [`Scheme::scale_bytes`]; empty for floating-point weights.
    pub scales: FileSlice<'a>,
}

impl<'a> NativeTensor<'a> {
    pub(super) fn stored_bytes(&self) -> u64 {
        (self.blocks.bytes.len() + self.scales.bytes.len()) as u64
    }

    pub(super) fn quantized_row_into(&self, row: usize, out: &mut QuantizedRow) {
        let (blocks, scales) = self.tile(row / TILE_ROWS, out.q.len());
        unpack_row(self.scheme, row % TILE_ROWS, blocks, scales, out);
    }

    pub(super) fn rows_f32_into(&self, rows: Range<usize>, cols: usize, out: &mut [f32]) {
        let mut row = QuantizedRow::new(self.scheme, cols);
        for (index, out) in rows.zip(out.chunks_exact_mut(cols)) {
            match self.scheme.grouping(cols) {
                None => {
                    let (blocks, _) = self.tile(index / TILE_ROWS, cols);
                    unpack_plain_row(self.scheme, index % TILE_ROWS, blocks, out);
                }
                Some(_) => {
                    self.quantized_row_into(index, &mut row);
                    row.dequantize_into(self.scheme, out);
                }
            }
        }
    }

    fn tile(&self, tile: usize, cols: usize) -> (&'a [u8], &'a [u8]) {
        let (blocks, scales) = (self.scheme.tile_bytes(cols), self.scheme.tile_scale_bytes(cols));
        (&self.blocks.bytes[tile * blocks..][..blocks], &self.scales.bytes[tile * scales..][..scales])
    }
}

/// `unicorn.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Manifest {
    format: String,
    version: u32,
    layout: u32,
    /// The program that wrote the folder.
    pub writer: String,
    /// The source of the conversion, for messages.
    pub source: String,
    /// How random weights for measurements were generated; `None` for the weights of a model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub synthetic: Option<Synthetic>,
    #[serde(default)]
    pub norms_hold_one: bool,
    /// Digest of the conversion job. The same command uses it to recognize its result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    job: Option<String>,
    /// The `config.json` that the weights were written for.
    pub config: serde_json::Value,
    pub files: BTreeMap<String, FileRecord>,
    pub tensors: BTreeMap<String, TensorRecord>,
    /// Describes the expected outputs of the layers for a fixed prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    layer_values: Option<layer_values::Record>,
}

/// Shape and seed of random weights.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Synthetic {
    pub shape: String,
    pub seed: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    pub bytes: u64,
    /// In hexadecimal.
    pub sha256: String,
}

/// A packed tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorRecord {
    pub file: String,
    /// As [`Scheme`] displays it.
    pub scheme: String,
    pub shape: Vec<usize>,
}

impl FileRecord {
    fn of(bytes: &[u8]) -> FileRecord {
        FileRecord { bytes: bytes.len() as u64, sha256: hex(&Sha256::digest(bytes)) }
    }
}

impl Manifest {
    /// The manifest of a native checkpoint; `None` if the files are of another format.
    pub fn read(files: &ModelFiles) -> Result<Option<Manifest>, CheckpointError> {
        let fail = |problem: String| CheckpointError::file(files.display(MANIFEST_FILE), problem);
        let Some(bytes) = files.read(MANIFEST_FILE)? else {
            if files.read(PROGRESS_FILE)?.is_some() {
                return Err(CheckpointError::file(
                    files.location(),
                    "has an unfinished conversion; run the same `unicorn quantize` again to finish it",
                ));
            }
            return Ok(None);
        };
        if bytes.len() > MAX_MANIFEST_BYTES {
            return Err(fail(format!("has {} bytes; expected at most {MAX_MANIFEST_BYTES}", bytes.len())));
        }
        // The versions are checked first, because a newer manifest may have other fields.
        #[derive(Deserialize)]
        struct Versions {
            format: String,
            version: u32,
            layout: u32,
        }
        let invalid = |e: serde_json::Error| fail(format!("is not a valid manifest: {}", one_line(&e)));
        let versions: Versions = serde_json::from_slice(&bytes).map_err(invalid)?;
        if versions.format != FORMAT {
            return Err(fail(format!("has format {:?}; expected {FORMAT:?}", short(&versions.format))));
        }
        if (versions.version, versions.layout) != (FORMAT_VERSION, LAYOUT_VERSION) {
            let newer = versions.version > FORMAT_VERSION || versions.layout > LAYOUT_VERSION;
            return Err(fail(format!(
                "has version {}, layout {}; this program reads version {FORMAT_VERSION}, layout {LAYOUT_VERSION}: {}",
                versions.version,
                versions.layout,
                match newer {
                    true => "a newer program wrote it: update this one, or quantize the source again",
                    false => "an older program wrote it: quantize the source again",
                }
            )));
        }
        let manifest: Manifest = serde_json::from_slice(&bytes).map_err(invalid)?;
        let config = files.config()?.ok_or_else(|| {
            CheckpointError::file(files.location(), "has no config.json; the copy is incomplete")
        })?;
        if *config != manifest.config {
            return Err(CheckpointError::file(
                files.display("config.json"),
                "differs from the config of the weights, which is in unicorn.json",
            ));
        }
        Ok(Some(manifest))
    }

    /// The expected outputs of the layers; `None` if the checkpoint `files` has none that this version can read.
    pub fn layer_values(&self, files: &ModelFiles) -> Result<Option<LayerValues>, CheckpointError> {
        let Some(record) = &self.layer_values else { return Ok(None) };
        let fail = |problem: String| CheckpointError::file(files.display(layer_values::FILE), problem);
        let bytes = files.read(layer_values::FILE)?;
        let bytes = bytes.ok_or_else(|| fail("is missing, but the manifest lists it".into()))?;
        LayerValues::from_parts(record, &bytes).map_err(fail)
    }

    fn write(&self, folder: &Path) -> Result<(), CheckpointError> {
        let json = serde_json::to_vec_pretty(self).expect("a manifest is JSON");
        write_whole(folder, MANIFEST_FILE, &json)
    }

    /// The weight files, sorted by name.
    pub(super) fn weight_files(&self) -> impl Iterator<Item = (&str, &FileRecord)> {
        self.files.iter().filter(|(name, _)| name.ends_with(".safetensors")).map(|(n, r)| (n.as_str(), r))
    }
}

/// The tensors of a file of a native checkpoint as (name, shape, location), in the order of their bytes. Checks them
/// against the manifest.
pub(super) fn entries(
    manifest: &Manifest,
    file_name: &str,
    display: &str,
    file: usize,
    infos: Vec<TensorInfo>,
) -> Result<Vec<(String, Vec<usize>, Stored)>, CheckpointError> {
    let mut found = Vec::new();
    let mut infos = infos.into_iter().peekable();
    while let Some(info) = infos.next() {
        let Some(name) = info.name.strip_suffix(BLOCKS) else {
            if let Some(record) = manifest.tensors.get(&info.name) {
                let problem = format!("is stored unpacked, but the manifest says {}", short(&record.scheme));
                return Err(CheckpointError::tensor(display, &info.name, problem));
            }
            let data = Span { file, range: info.range };
            found.push((info.name, info.shape, Stored::Plain { dtype: info.dtype, data }));
            continue;
        };
        let fail = |problem: String| CheckpointError::tensor(display, name, problem);
        let record = manifest
            .tensors
            .get(name)
            .filter(|record| record.file == file_name)
            .ok_or_else(|| fail("is not in this file according to the manifest".into()))?;
        let scheme: Scheme = record.scheme.parse().map_err(fail)?;
        // All dimensions but the last are rows. The matrices of all experts are one tensor `[experts, out, in]`.
        let (rows, cols) = match &record.shape[..] {
            [first, others @ .., cols] => {
                (others.iter().fold(*first, |rows, count| rows.saturating_mul(*count)), *cols)
            }
            _ => return Err(fail(format!("has shape {:?}; expected a matrix", record.shape))),
        };
        // Limits that no real matrix reaches, so that the sizes cannot overflow.
        if rows == 0 || cols == 0 || rows > 1 << 24 || cols > 1 << 24 {
            return Err(fail(format!(
                "has shape {:?}; expected 1 to 16777216 rows and columns",
                record.shape
            )));
        }
        let (block_bytes, scale_bytes) = (scheme.block_bytes(rows, cols), scheme.scale_bytes(rows, cols));
        let check = |info: &TensorInfo, expected: u64| match (info.dtype, info.range.len() as u64) {
            (DType::U8, bytes) if bytes == expected => Ok(()),
            (dtype, bytes) => Err(fail(format!(
                "{} has {bytes} bytes of {dtype:?}; expected {expected} bytes of U8 for {scheme} {:?}",
                short(&info.name),
                record.shape
            ))),
        };
        check(&info, block_bytes)?;
        let scales = match scale_bytes {
            0 => None,
            _ => match infos.next_if(|next| next.name.strip_suffix(SCALES) == Some(name)) {
                Some(next) => {
                    check(&next, scale_bytes)?;
                    Some(Span { file, range: next.range })
                }
                None => return Err(fail("has no scales after its blocks".into())),
            },
        };
        let stored = Stored::Native { scheme, blocks: Span { file, range: info.range }, scales };
        found.push((name.to_string(), record.shape.clone(), stored));
    }
    Ok(found)
}

/// Compares every file of a native checkpoint with the checksum in its manifest. `each` is called with the number of
/// bytes that are done and the total.
pub fn verify(
    files: &ModelFiles,
    manifest: &Manifest,
    each: &mut dyn FnMut(u64, u64),
) -> Result<(), CheckpointError> {
    let total = manifest.files.values().fold(0u64, |sum, file| sum.saturating_add(file.bytes));
    let mut done = 0;
    for (name, record) in &manifest.files {
        let fail = |problem: String| CheckpointError::file(files.display(name), problem);
        let bytes = map_listed(files, name, record)?;
        let mut hash = Sha256::new();
        let mut buffer = vec![0; HASH_BYTES.min(bytes.len())];
        for start in (0..bytes.len()).step_by(HASH_BYTES) {
            let end = bytes.len().min(start + HASH_BYTES);
            let piece = &mut buffer[..end - start];
            bytes.slice(start..end).read_at(0, piece).map_err(fail)?;
            hash.update(piece);
            bytes.release(start..end);
            done += (end - start) as u64;
            each(done, total);
        }
        let sha256 = hex(&hash.finalize());
        if sha256 != record.sha256 {
            return Err(fail(format!(
                "has sha256 {sha256}, but the manifest says {}: the file is damaged; copy it again",
                short(&record.sha256)
            )));
        }
    }
    Ok(())
}

/// Maps a file that the manifest lists, and checks its length.
pub(super) fn map_listed(
    files: &ModelFiles,
    name: &str,
    record: &FileRecord,
) -> Result<FileBytes, CheckpointError> {
    let fail = |problem: String| CheckpointError::file(files.display(name), problem);
    let bytes = files.map_listed(name, fail)?;
    let bytes = bytes.ok_or_else(|| fail("is missing, but the manifest lists it".into()))?;
    let (found, expected) = (bytes.len(), record.bytes);
    if found as u64 != expected {
        return Err(fail(format!(
            "has {found} bytes, but the manifest says {expected}: the copy is incomplete"
        )));
    }
    Ok(bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// How a tensor is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// The values in a floating-point type.
    Plain(DType),
    /// A matrix in a device layout.
    Packed(Scheme),
}

/// A tensor that will be written.
#[derive(Debug, Clone)]
pub struct NewTensor {
    pub name: String,
    pub shape: Vec<usize>,
    pub form: Form,
}

impl NewTensor {
    /// Bytes of the tensor in the file.
    pub fn bytes(&self) -> u64 {
        self.parts().iter().map(|(.., bytes)| bytes).sum()
    }

    /// (Name, element type, shape, bytes) of each part of the tensor in the file.
    fn parts(&self) -> Vec<(String, DType, Vec<usize>, u64)> {
        match (self.form, &self.shape[..]) {
            (Form::Packed(scheme), &[.., cols]) if self.shape.len() > 1 => {
                let rows = self.shape[..self.shape.len() - 1].iter().product();
                let plane = |suffix, bytes: u64| {
                    (format!("{}{suffix}", self.name), DType::U8, vec![bytes as usize], bytes)
                };
                let mut parts = vec![plane(BLOCKS, scheme.block_bytes(rows, cols))];
                if scheme.scale_bytes(rows, cols) > 0 {
                    parts.push(plane(SCALES, scheme.scale_bytes(rows, cols)));
                }
                parts
            }
            (Form::Packed(_), shape) => panic!("{}: {shape:?} is not a matrix", self.name),
            (Form::Plain(dtype), shape) => {
                let bytes = (shape.iter().product::<usize>() * dtype.size()) as u64;
                vec![(self.name.clone(), dtype, shape.to_vec(), bytes)]
            }
        }
    }
}

/// Progress of a conversion.
#[derive(Debug, Serialize, Deserialize)]
struct Progress {
    /// Source and options of the conversion. Another job must not continue these files.
    job: serde_json::Value,
    files: BTreeMap<String, FileRecord>,
    tensors: BTreeMap<String, TensorRecord>,
    /// For each file, a note of the caller.
    notes: BTreeMap<String, serde_json::Value>,
}

/// Writes a native checkpoint, file by file. After an interruption, finished files are kept.
pub struct NativeWriter {
    folder: PathBuf,
    progress: Progress,
    /// The lock is held while the file is open.
    _lock: File,
}

impl NativeWriter {
    /// Whether the folder contains the finished result of the same `job`.
    pub fn is_result(folder: &Path, job: &serde_json::Value) -> bool {
        let manifest = ModelFiles::open(folder, &[]).and_then(|files| Manifest::read(&files));
        matches!(manifest, Ok(Some(Manifest { job: Some(of), .. })) if of == digest(&versioned(job)))
    }

    /// Starts a conversion in an empty folder, or continues an unfinished conversion of the same `job`.
    pub fn open(folder: &Path, job: &serde_json::Value) -> Result<NativeWriter, CheckpointError> {
        let job = versioned(job);
        let fail = |problem: String| CheckpointError::file(folder.display(), problem);
        let io = |e: std::io::Error| fail(format!("cannot be written: {e}"));
        fs::create_dir_all(folder).map_err(io)?;
        let lock = File::create(folder.join(LOCK_FILE)).map_err(io)?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| fail("another process is writing to it".into()))?;
        // The folder is examined after locking, because another process may have changed it until now.
        let refuse = |problem: &str| {
            // Do not leave the lock file in a folder with other files.
            let _ = fs::remove_file(folder.join(LOCK_FILE));
            fail(problem.into())
        };
        if folder.join(MANIFEST_FILE).exists() {
            return Err(refuse("already has a native checkpoint; remove it, or choose another folder"));
        }
        let has_progress = folder.join(PROGRESS_FILE).exists();
        // A run that was killed before it saved its progress leaves only these two files.
        let leftovers = [LOCK_FILE.to_string(), temporary(PROGRESS_FILE)];
        let mut names = fs::read_dir(folder).map_err(io)?.filter_map(Result::ok).map(|e| e.file_name());
        if !has_progress && names.any(|name| leftovers.iter().all(|leftover| name != **leftover)) {
            return Err(refuse("is not empty; give an empty folder for the model"));
        }
        let progress = match has_progress {
            false => Progress { job, files: [].into(), tensors: [].into(), notes: [].into() },
            true => {
                let bytes = file::read(&folder.join(PROGRESS_FILE), MAX_PROGRESS_BYTES).map_err(io)?;
                let progress: Progress = serde_json::from_slice(&bytes)
                    .map_err(|e| fail(format!("{PROGRESS_FILE} cannot be read: {}", one_line(&e))))?;
                if progress.job != job {
                    return Err(fail(
                        "has an unfinished conversion of another source, with other options or by another version of \
                         this program; finish that one, or remove the folder"
                            .into(),
                    ));
                }
                progress
            }
        };
        let writer = NativeWriter { folder: folder.to_path_buf(), progress, _lock: lock };
        writer.save_progress()?;
        Ok(writer)
    }

    /// The note of a finished file; `None` if the file is not finished, or was removed.
    pub fn finished(&self, name: &str) -> Option<&serde_json::Value> {
        let record = self.progress.files.get(name)?;
        let exists =
            fs::metadata(self.folder.join(name)).is_ok_and(|metadata| metadata.len() == record.bytes);
        self.progress.notes.get(name).filter(|_| exists)
    }

    /// Starts the file `name`, which will contain `tensors` in this order.
    pub fn create(&self, name: &str, tensors: Vec<NewTensor>) -> Result<FileWriter, CheckpointError> {
        let mut header = serde_json::Map::new();
        let mut end = 0;
        for (part, dtype, shape, bytes) in tensors.iter().flat_map(NewTensor::parts) {
            let dtype: &str = dtype.into();
            let entry =
                serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": [end, end + bytes]});
            header.insert(part, entry);
            end += bytes;
        }
        let mut header = serde_json::Value::Object(header).to_string();
        // The format requires that the data begin at a multiple of 8.
        header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
        let mut writer = FileWriter {
            name: name.to_string(),
            path: self.folder.join(name),
            file: BufWriter::with_capacity(1 << 20, create(&self.folder.join(temporary(name)))?),
            hash: Sha256::new(),
            written: 0,
            expected: end,
            tensors,
        };
        writer.put(&(header.len() as u64).to_le_bytes())?;
        writer.put(header.as_bytes())?;
        writer.expected += writer.written;
        Ok(writer)
    }

    /// Finishes a file of [`NativeWriter::create`]. When this returns, the file is on the disk. Panics if bytes are
    /// missing.
    pub fn finish_file(
        &mut self,
        writer: FileWriter,
        note: serde_json::Value,
    ) -> Result<(), CheckpointError> {
        let FileWriter { name, path, file, hash, written, expected, tensors } = writer;
        assert_eq!(written, expected, "bytes of {name}");
        let fail = |e: std::io::Error| write_error(&path, e);
        let file = file.into_inner().map_err(|e| fail(e.into_error()))?;
        file.sync_all().map_err(fail)?;
        // The written pages are dropped, because the next layers need the memory.
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
        fs::rename(self.folder.join(temporary(&name)), &path).map_err(fail)?;
        for tensor in tensors {
            if let Form::Packed(scheme) = tensor.form {
                let record =
                    TensorRecord { file: name.clone(), scheme: scheme.to_string(), shape: tensor.shape };
                self.progress.tensors.insert(tensor.name, record);
            }
        }
        let record = FileRecord { bytes: written, sha256: hex(&hash.finalize()) };
        self.progress.files.insert(name.clone(), record);
        self.progress.notes.insert(name, note);
        self.save_progress()
    }

    /// Writes a small file with these bytes.
    pub fn copy(&mut self, name: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        write_whole(&self.folder, name, bytes)?;
        self.progress.files.insert(name.to_string(), FileRecord::of(bytes));
        Ok(())
    }

    /// Writes the manifest, which makes the folder a checkpoint. Returns the bytes of all files.
    pub fn finish(
        self,
        source: String,
        synthetic: Option<Synthetic>,
        norms_hold_one: bool,
        config: serde_json::Value,
    ) -> Result<u64, CheckpointError> {
        let Progress { job, files, tensors, .. } = self.progress;
        let bytes = files.values().map(|f| f.bytes).sum();
        let manifest = Manifest {
            format: FORMAT.into(),
            version: FORMAT_VERSION,
            layout: LAYOUT_VERSION,
            writer: concat!("unicorn ", env!("CARGO_PKG_VERSION")).into(),
            source,
            synthetic,
            norms_hold_one,
            job: Some(digest(&job)),
            config,
            files,
            tensors,
            layer_values: None,
        };
        manifest.write(&self.folder)?;
        for name in [PROGRESS_FILE, LOCK_FILE] {
            // An error is ignored: with the manifest, these files do no harm.
            let _ = fs::remove_file(self.folder.join(name));
        }
        Ok(bytes)
    }

    /// Adds the expected outputs of the layers to a finished folder. If this is interrupted, the folder stays valid.
    pub fn add_layer_values(folder: &Path, values: &LayerValues) -> Result<(), CheckpointError> {
        let files = ModelFiles::open(folder, &[])?;
        let mut manifest = Manifest::read(&files)?
            .ok_or_else(|| CheckpointError::file(folder.display(), "has no finished native checkpoint"))?;
        let (record, bytes) = values.to_parts();
        write_whole(folder, layer_values::FILE, &bytes)?;
        manifest.files.insert(layer_values::FILE.into(), FileRecord::of(&bytes));
        manifest.layer_values = Some(record);
        manifest.write(folder)
    }

    fn save_progress(&self) -> Result<(), CheckpointError> {
        let json = serde_json::to_vec(&self.progress).expect("progress is JSON");
        write_whole(&self.folder, PROGRESS_FILE, &json)
    }
}

/// The job with the format's versions, so that a folder never gets files of different layouts.
fn versioned(job: &serde_json::Value) -> serde_json::Value {
    serde_json::json!({"version": FORMAT_VERSION, "layout": LAYOUT_VERSION, "job": job})
}

fn digest(job: &serde_json::Value) -> String {
    hex(&Sha256::digest(job.to_string()))
}

/// A file that is being written.
pub struct FileWriter {
    name: String,
    path: PathBuf,
    file: BufWriter<File>,
    hash: Sha256,
    written: u64,
    expected: u64,
    tensors: Vec<NewTensor>,
}

impl FileWriter {
    /// Writes the next bytes: for each tensor in order its blocks, then its scales.
    pub fn put(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.hash.update(bytes);
        self.written += bytes.len() as u64;
        self.file.write_all(bytes).map_err(|e| write_error(&self.path, e))
    }
}

fn temporary(name: &str) -> String {
    format!("{name}.part")
}

fn create(path: &Path) -> Result<File, CheckpointError> {
    File::create(path).map_err(|e| write_error(path, e))
}

/// Writes a file atomically.
fn write_whole(folder: &Path, name: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
    let (part, path) = (folder.join(temporary(name)), folder.join(name));
    let mut file = create(&part)?;
    let written =
        file.write_all(bytes).and_then(|()| file.sync_all()).and_then(|()| fs::rename(&part, &path));
    written.map_err(|e| {
        // The next run needs the disk space. An error is ignored, because the next run overwrites the partial file.
        let _ = fs::remove_file(&part);
        write_error(&path, e)
    })
}

fn write_error(path: &Path, error: std::io::Error) -> CheckpointError {
    let advice = match error.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
            "; free some space and run the same command again: it continues where it stopped"
        }
        _ => "",
    };
    CheckpointError::file(path.display(), format!("cannot be written: {error}{advice}"))
}
