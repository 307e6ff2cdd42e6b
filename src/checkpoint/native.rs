//! Native checkpoints: weights packed in the device's layout, so that a load only reads.
//!
//! A folder with a manifest `unicorn.json`, `layer-NNN.safetensors` for each decoder layer, `shared.safetensors` for
//! the rest, and the source's configs, tokenizer and template. `docs/formats.md` specifies it.
//!
//! The manifest is written last, so a folder that has one is whole: a conversion that was interrupted, or met a full
//! disk, does not load. Refuses a manifest of another format or layout, files of another size than it says, a config
//! that is not the one the weights were written for, and tensors whose bytes do not fit scheme and shape. [`verify`]
//! compares checksums.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::error::{CheckpointError, one_line, short};
use super::files::{FileSlice, ModelFiles};
use super::layer_values::{self, LayerValues};
use super::safetensors::TensorInfo;
use super::table::{Span, Stored};
use crate::file;
use crate::tensor::{DType, LAYOUT_VERSION, QuantizedRow, Scheme, TILE_ROWS, unpack_plain_row, unpack_row};

pub(super) const MANIFEST_FILE: &str = "unicorn.json";
/// Progress of a conversion; only in a folder without a manifest.
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
/// Bytes hashed at once.
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
    /// The source of the conversion, for people.
    pub source: String,
    /// How random weights for measurements were drawn; `None` for a model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub synthetic: Option<Synthetic>,
    #[serde(default)]
    pub norms_hold_one: bool,
    /// Digest of the job, by which the same command recognizes its result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    job: Option<String>,
    /// The `config.json` that the weights were written for.
    pub config: serde_json::Value,
    pub files: BTreeMap<String, FileRecord>,
    pub tensors: BTreeMap<String, TensorRecord>,
    /// What the layers compute on a fixed prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    layer_values: Option<layer_values::Record>,
}

/// Where random weights come from.
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

impl Manifest {
    /// The manifest of a native checkpoint; `None` if the files are of another format.
    pub fn read(files: &ModelFiles) -> Result<Option<Manifest>, CheckpointError> {
        let fail = |problem: String| CheckpointError::file(files.display(MANIFEST_FILE), problem);
        let Some(bytes) = files.read(MANIFEST_FILE)? else {
            if files.read(PROGRESS_FILE)?.is_some() {
                return Err(CheckpointError::file(
                    files.location(),
                    "holds a conversion that did not end; run the same `unicorn quantize` again to finish it",
                ));
            }
            return Ok(None);
        };
        if bytes.len() > MAX_MANIFEST_BYTES {
            return Err(fail(format!("has {} bytes; expected at most {MAX_MANIFEST_BYTES}", bytes.len())));
        }
        // The versions are checked first: a newer manifest may have other fields.
        #[derive(Deserialize)]
        struct Versions {
            format: String,
            version: u32,
            layout: u32,
        }
        let invalid = |e: serde_json::Error| fail(format!("is no valid manifest: {}", one_line(&e)));
        let versions: Versions = serde_json::from_slice(&bytes).map_err(invalid)?;
        if versions.format != FORMAT {
            return Err(fail(format!("is of format {:?}; expected {FORMAT:?}", short(&versions.format))));
        }
        if (versions.version, versions.layout) != (FORMAT_VERSION, LAYOUT_VERSION) {
            let newer = versions.version > FORMAT_VERSION || versions.layout > LAYOUT_VERSION;
            return Err(fail(format!(
                "is of version {}, layout {}; this program reads version {FORMAT_VERSION}, layout {LAYOUT_VERSION}: {}",
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
            CheckpointError::file(files.location(), "holds no config.json; the copy is incomplete")
        })?;
        if *config != manifest.config {
            return Err(CheckpointError::file(
                files.display("config.json"),
                "is not the config that the weights were written for (unicorn.json has it)",
            ));
        }
        Ok(Some(manifest))
    }

    /// What the layers are to compute, if the checkpoint `files` has it.
    pub fn layer_values(&self, files: &ModelFiles) -> Result<Option<LayerValues>, CheckpointError> {
        let Some(record) = &self.layer_values else { return Ok(None) };
        let fail = |problem: String| CheckpointError::file(files.display(layer_values::FILE), problem);
        let bytes = files.read(layer_values::FILE)?;
        let bytes = bytes.ok_or_else(|| fail("is missing; the manifest lists it".into()))?;
        LayerValues::from_parts(record, &bytes).map_err(fail)
    }

    /// The weight files, in the order of their names.
    pub(super) fn weight_files(&self) -> impl Iterator<Item = (&str, &FileRecord)> {
        self.files.iter().filter(|(name, _)| name.ends_with(".safetensors")).map(|(n, r)| (n.as_str(), r))
    }
}

/// The tensors of a file of a native checkpoint by its manifest: (name, shape, place), in order of position.
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
                let problem = format!("is stored plain; its manifest says {}", short(&record.scheme));
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
            .ok_or_else(|| fail("is not in the manifest for this file".into()))?;
        let scheme: Scheme = record.scheme.parse().map_err(fail)?;
        let &[rows, cols] = &record.shape[..] else {
            return Err(fail(format!("has shape {:?}; expected a matrix", record.shape)));
        };
        // Bounds that no real matrix reaches, so that sizes cannot overflow.
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
                "{} holds {bytes} bytes of {dtype:?}; {scheme} {:?} takes {expected} of U8",
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
                None => return Err(fail("has no scales behind its blocks".into())),
            },
        };
        let stored = Stored::Native { scheme, blocks: Span { file, range: info.range }, scales };
        found.push((name.to_string(), record.shape.clone(), stored));
    }
    Ok(found)
}

/// Compares every file of a native checkpoint with the checksum in its manifest. `each` is called with the bytes read
/// so far and in all.
pub fn verify(
    files: &ModelFiles,
    manifest: &Manifest,
    each: &mut dyn FnMut(u64, u64),
) -> Result<(), CheckpointError> {
    let total = manifest.files.values().fold(0u64, |sum, file| sum.saturating_add(file.bytes));
    let mut done = 0;
    for (name, record) in &manifest.files {
        let fail = |problem: String| CheckpointError::file(files.display(name), problem);
        let bytes = files.map_listed(name, fail)?;
        let bytes = bytes.ok_or_else(|| fail("is missing; the manifest lists it".into()))?;
        check_length(files, name, record, bytes.len())?;
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
                "has sha256 {sha256}; its manifest says {}: the file is damaged, get it again",
                short(&record.sha256)
            )));
        }
    }
    Ok(())
}

pub(super) fn check_length(
    files: &ModelFiles,
    name: &str,
    record: &FileRecord,
    bytes: usize,
) -> Result<(), CheckpointError> {
    if bytes as u64 == record.bytes {
        return Ok(());
    }
    let problem = format!("has {bytes} bytes; its manifest says {}: the copy is incomplete", record.bytes);
    Err(CheckpointError::file(files.display(name), problem))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// A tensor about to be written.
#[derive(Debug, Clone)]
pub struct NewTensor {
    pub name: String,
    pub shape: Vec<usize>,
    /// `None`: plain f32.
    pub scheme: Option<Scheme>,
}

impl NewTensor {
    /// Name, element type, shape and bytes of each part that stands for the tensor in a file.
    fn parts(&self) -> Vec<(String, &'static str, Vec<usize>, u64)> {
        match (self.scheme, &self.shape[..]) {
            (Some(scheme), &[rows, cols]) => {
                let plane = |suffix, bytes: u64| {
                    (format!("{}{suffix}", self.name), "U8", vec![bytes as usize], bytes)
                };
                let mut parts = vec![plane(BLOCKS, scheme.block_bytes(rows, cols))];
                if scheme.scale_bytes(rows, cols) > 0 {
                    parts.push(plane(SCALES, scheme.scale_bytes(rows, cols)));
                }
                parts
            }
            (Some(_), shape) => panic!("{}: {shape:?} is no matrix", self.name),
            (None, shape) => {
                let bytes = 4 * shape.iter().product::<usize>() as u64;
                vec![(self.name.clone(), "F32", shape.to_vec(), bytes)]
            }
        }
    }
}

/// Progress of a conversion.
#[derive(Debug, Serialize, Deserialize)]
struct Progress {
    /// Source and options of the conversion: another job must not continue these files.
    job: serde_json::Value,
    files: BTreeMap<String, FileRecord>,
    tensors: BTreeMap<String, TensorRecord>,
    /// A note of the caller for each file.
    notes: BTreeMap<String, serde_json::Value>,
}

/// Writes a native checkpoint, file by file. Finished files survive an interruption.
pub struct NativeWriter {
    folder: PathBuf,
    progress: Progress,
    /// Locked as long as it is open.
    _lock: File,
}

impl NativeWriter {
    /// Whether the folder holds the finished result of the same `job`.
    pub fn is_result(folder: &Path, job: &serde_json::Value) -> bool {
        let manifest = ModelFiles::open(folder).and_then(|files| Manifest::read(&files));
        matches!(manifest, Ok(Some(Manifest { job: Some(of), .. })) if of == digest(&versioned(job)))
    }

    /// Begins a folder, or continues one that the same `job` began.
    pub fn open(folder: &Path, job: &serde_json::Value) -> Result<NativeWriter, CheckpointError> {
        let job = versioned(job);
        let fail = |problem: String| CheckpointError::file(folder.display(), problem);
        let io = |e: std::io::Error| fail(format!("cannot be written: {e}"));
        fs::create_dir_all(folder).map_err(io)?;
        let lock = File::create(folder.join(LOCK_FILE)).map_err(io)?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| fail("is being written by another process".into()))?;
        // The folder is examined only under the lock: another process may just have ended.
        let refuse = |problem: &str| {
            // The lock file must not stay in a folder that belongs to something else.
            let _ = fs::remove_file(folder.join(LOCK_FILE));
            fail(problem.into())
        };
        if folder.join(MANIFEST_FILE).exists() {
            return Err(refuse("holds a native checkpoint already; remove it, or choose another folder"));
        }
        let has_progress = folder.join(PROGRESS_FILE).exists();
        // A run that was killed before it saved its progress leaves these two files.
        let own = [LOCK_FILE.to_string(), temporary(PROGRESS_FILE)];
        let mut names = fs::read_dir(folder).map_err(io)?.filter_map(Result::ok).map(|e| e.file_name());
        if !has_progress && names.any(|name| own.iter().all(|own| name != **own)) {
            return Err(refuse("is not empty; give a folder of its own to the model"));
        }
        let progress = match has_progress {
            false => Progress { job, files: [].into(), tensors: [].into(), notes: [].into() },
            true => {
                let bytes = file::read(&folder.join(PROGRESS_FILE), MAX_PROGRESS_BYTES).map_err(io)?;
                let progress: Progress = serde_json::from_slice(&bytes)
                    .map_err(|e| fail(format!("{PROGRESS_FILE} cannot be read: {}", one_line(&e))))?;
                if progress.job != job {
                    return Err(fail(
                        "holds an unfinished conversion of another source, with other options or by another version of \
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

    /// The note of a finished file; `None` if the file is not finished, or is gone.
    pub fn finished(&self, name: &str) -> Option<&serde_json::Value> {
        let record = self.progress.files.get(name)?;
        let there = fs::metadata(self.folder.join(name)).is_ok_and(|metadata| metadata.len() == record.bytes);
        self.progress.notes.get(name).filter(|_| there)
    }

    /// Begins the file `name`, which will hold `tensors` in that order.
    pub fn create(&self, name: &str, tensors: Vec<NewTensor>) -> Result<FileWriter, CheckpointError> {
        let mut header = serde_json::Map::new();
        let mut end = 0;
        for (part, dtype, shape, bytes) in tensors.iter().flat_map(NewTensor::parts) {
            let entry =
                serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": [end, end + bytes]});
            header.insert(part, entry);
            end += bytes;
        }
        let mut header = serde_json::Value::Object(header).to_string();
        // The data begins at a multiple of 8, as the format asks.
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

    /// Ends a file begun by [`NativeWriter::create`]: it is on the disk when this returns. Panics if bytes are missing.
    pub fn finish_file(
        &mut self,
        writer: FileWriter,
        note: serde_json::Value,
    ) -> Result<(), CheckpointError> {
        let FileWriter { name, path, file, hash, written, expected, tensors } = writer;
        assert_eq!(written, expected, "bytes of {name}");
        let fail = |e: std::io::Error| written_error(&path, e);
        let file = file.into_inner().map_err(|e| fail(e.into_error()))?;
        file.sync_all().map_err(fail)?;
        // The written pages are dropped: the next layers need the memory.
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
        fs::rename(self.folder.join(temporary(&name)), &path).map_err(fail)?;
        for tensor in tensors {
            if let Some(scheme) = tensor.scheme {
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

    /// Writes a small file as it is.
    pub fn copy(&mut self, name: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        write_whole(&self.folder, name, bytes)?;
        let record = FileRecord { bytes: bytes.len() as u64, sha256: hex(&Sha256::digest(bytes)) };
        self.progress.files.insert(name.to_string(), record);
        Ok(())
    }

    /// Writes the manifest: from now on the folder is a checkpoint. Returns the bytes of all files.
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
        let json = serde_json::to_vec_pretty(&manifest).expect("a manifest is JSON");
        write_whole(&self.folder, MANIFEST_FILE, &json)?;
        for name in [PROGRESS_FILE, LOCK_FILE] {
            // The manifest makes the folder valid; leftover files do no harm.
            let _ = fs::remove_file(self.folder.join(name));
        }
        Ok(bytes)
    }

    /// Adds what the layers compute to a finished folder. A folder without it stays valid if this is interrupted.
    pub fn add_layer_values(folder: &Path, values: &LayerValues) -> Result<(), CheckpointError> {
        let files = ModelFiles::open(folder)?;
        let mut manifest = Manifest::read(&files)?.ok_or_else(|| {
            CheckpointError::file(folder.display(), "holds no native checkpoint; expected a finished one")
        })?;
        let (record, bytes) = values.to_parts();
        write_whole(folder, layer_values::FILE, &bytes)?;
        let file = FileRecord { bytes: bytes.len() as u64, sha256: hex(&Sha256::digest(&bytes)) };
        manifest.files.insert(layer_values::FILE.into(), file);
        manifest.layer_values = Some(record);
        let json = serde_json::to_vec_pretty(&manifest).expect("a manifest is JSON");
        write_whole(folder, MANIFEST_FILE, &json)
    }

    fn save_progress(&self) -> Result<(), CheckpointError> {
        let json = serde_json::to_vec(&self.progress).expect("progress is JSON");
        write_whole(&self.folder, PROGRESS_FILE, &json)
    }
}

/// The job with this program's versions: files of different layouts do not go into one folder.
fn versioned(job: &serde_json::Value) -> serde_json::Value {
    serde_json::json!({"version": FORMAT_VERSION, "layout": LAYOUT_VERSION, "job": job})
}

fn digest(job: &serde_json::Value) -> String {
    hex(&Sha256::digest(job.to_string()))
}

/// A file under way.
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
    /// The next bytes of the tensors, in order: blocks, then scales of each.
    pub fn put(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.hash.update(bytes);
        self.written += bytes.len() as u64;
        self.file.write_all(bytes).map_err(|e| written_error(&self.path, e))
    }
}

fn temporary(name: &str) -> String {
    format!("{name}.part")
}

fn create(path: &Path) -> Result<File, CheckpointError> {
    File::create(path).map_err(|e| written_error(path, e))
}

/// Writes the whole file, or leaves no file.
fn write_whole(folder: &Path, name: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
    let (part, path) = (folder.join(temporary(name)), folder.join(name));
    let mut file = create(&part)?;
    let written =
        file.write_all(bytes).and_then(|()| file.sync_all()).and_then(|()| fs::rename(&part, &path));
    written.map_err(|e| {
        // The next run needs the disk space. A part that cannot be removed does not stop that run.
        let _ = fs::remove_file(&part);
        written_error(&path, e)
    })
}

fn written_error(path: &Path, error: std::io::Error) -> CheckpointError {
    let advice = match error.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
            "; make room and run the same command again, which goes on where it stopped"
        }
        _ => "",
    };
    CheckpointError::file(path.display(), format!("cannot be written: {error}{advice}"))
}
