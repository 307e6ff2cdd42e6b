//! Opens a checkpoint of any format, and gives access to its tensors.

use std::collections::BTreeMap;

use super::error::{CheckpointError, one_line, short};
use super::experts;
use super::files::{FileBytes, MAX_SHARDS, ModelFiles};
use super::format::Format;
use super::gguf::{self, Element};
use super::legacy;
use super::native::{self, Manifest, Synthetic};
use super::packed;
use super::safetensors::{Entries, header};
use super::stream_projections;
use super::table::{CheckpointFile, Entry, Span, Stored, Table};
use super::view::{Encoding, Tensor};

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";

/// The tensors of a checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    location: String,
    format: Format,
    norms_hold_one: bool,
    synthetic: Option<Synthetic>,
    table: Table,
}

impl Checkpoint {
    /// Maps the files of a model and checks every header. Takes the first of these that exists: the GGUF file, the
    /// files of a native checkpoint, `model.safetensors`, the shards of `model.safetensors.index.json`, the layer files
    /// of the original project. Like transformers, it prefers `model.safetensors` to shards.
    pub fn open(files: &ModelFiles) -> Result<Self, CheckpointError> {
        let mut checkpoint = Self {
            location: files.location(),
            format: Format::Safetensors,
            norms_hold_one: false,
            synthetic: None,
            table: Table::default(),
        };
        if let Some(parts) = files.map_gguf()? {
            checkpoint.add_gguf(parts, files)?;
        } else if let Some(manifest) = Manifest::read(files)? {
            checkpoint.add_native(files, &manifest)?;
        } else if let Some(bytes) = files.map(SINGLE_FILE)? {
            checkpoint.add_file(files.display(SINGLE_FILE), bytes)?;
            checkpoint.join_packed(files)?;
        } else if let Some(index) = files.read(INDEX_FILE)? {
            checkpoint.add_shards(files, &index)?;
            checkpoint.join_packed(files)?;
        } else if legacy::add_layer_files(&mut checkpoint.table, files)? {
            checkpoint.format = Format::Legacy;
        } else {
            let problem =
                format!("holds neither {SINGLE_FILE} nor {INDEX_FILE} nor {}", native::MANIFEST_FILE);
            return Err(CheckpointError::file(files.location(), problem));
        }
        experts::join(&mut checkpoint.table)?;
        stream_projections::split(&mut checkpoint.table)?;
        Ok(checkpoint)
    }

    /// All tensors, sorted by file name and then by position in the file. In this order, reading all of them is one
    /// sequential pass over each file.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Tensor<'_>> {
        self.table.tensors.iter().map(|entry| Tensor::of(&self.table, entry))
    }

    pub fn format(&self) -> Format {
        self.format
    }

    /// The checkpoint's folder or file, for messages.
    pub fn location(&self) -> &str {
        &self.location
    }

    /// Bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.iter().map(|tensor| tensor.stored_bytes()).sum()
    }

    /// Whether norm weights are stored as the factor `1 + w` (GGUF) and not as `w`.
    pub fn norms_hold_one(&self) -> bool {
        self.norms_hold_one
    }

    /// Whether the tensors of towers are stored as GGUF files have them: it differs in norms and in the order of patches and
    /// positions. A native checkpoint that is made of a GGUF file keeps it.
    pub fn has_gguf_layout(&self) -> bool {
        // No other source has such norms.
        self.norms_hold_one
    }

    /// (Name, length, modification time) of each file. They distinguish the files from other files and later versions.
    pub fn fingerprint(&self) -> Vec<(String, u64, Option<std::time::SystemTime>)> {
        self.table
            .files
            .iter()
            .map(|f| (f.display.clone(), f.bytes.len() as u64, f.bytes.modified()))
            .collect()
    }

    /// How random weights were generated; `None` for the weights of a model.
    pub fn synthetic(&self) -> Option<&Synthetic> {
        self.synthetic.as_ref()
    }

    /// The values of a small tensor, read without the mapping: on an access to a mapping, the kernel reads far more
    /// than the tensor.
    pub fn read_f32(&self, tensor: &Tensor) -> Result<Vec<f32>, CheckpointError> {
        let stored = self.table.by_name.get(tensor.name).map(|&index| &self.table.tensors[index].stored);
        let Some(Stored::Plain { dtype, data }) = stored else { return tensor.to_f32() };
        let mut bytes = vec![0; data.range.len()];
        let slice = self.table.files[data.file].bytes.slice(data.range.clone());
        slice.read_at(0, &mut bytes).map_err(|e| tensor.error(e))?;
        Tensor { encoding: Encoding::Plain { dtype: *dtype, data: &bytes }, ..*tensor }.to_f32()
    }

    /// Releases the memory of a tensor's bytes, for tensors that were copied to the device or converted. A later access
    /// reads the disk again.
    pub fn release(&self, tensor: &Tensor) {
        let Some(&index) = self.table.by_name.get(tensor.name) else { return };
        for span in self.table.tensors[index].stored.spans() {
            self.table.files[span.file].bytes.release(span.range.clone());
        }
    }

    /// Releases the memory of all files. [`Checkpoint::release`] can miss pages that contain parts of several tensors.
    pub fn release_all(&self) {
        for CheckpointFile { bytes, .. } in &self.table.files {
            bytes.release(0..bytes.len());
        }
    }

    /// Bytes of the files that are in the page cache now.
    pub fn resident_bytes(&self) -> u64 {
        self.table.files.iter().map(|file| file.bytes.resident_bytes()).sum()
    }

    /// Joins the parts of packed matrices.
    fn join_packed(&mut self, files: &ModelFiles) -> Result<(), CheckpointError> {
        if let Some(format) = packed::join(&mut self.table, files)? {
            self.format = format;
        }
        Ok(())
    }

    fn add_shards(&mut self, files: &ModelFiles, index: &[u8]) -> Result<(), CheckpointError> {
        #[derive(serde::Deserialize)]
        struct Index {
            weight_map: Entries<String, false>,
        }
        let index_name = files.display(INDEX_FILE);
        let fail = |problem: String| CheckpointError::file(&index_name, problem);
        let Index { weight_map: Entries { entries: weight_map, .. } } = serde_json::from_slice(index)
            .map_err(|e| fail(format!("is not a valid index of shards: {}", one_line(&e))))?;

        // Sorted by file name.
        let mut shards: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (tensor, shard) in &weight_map {
            shards.entry(shard).or_default().push(tensor);
        }
        if shards.len() > MAX_SHARDS {
            return Err(fail(format!("lists {} files; expected at most {MAX_SHARDS}", shards.len())));
        }
        for (shard, tensors) in &shards {
            let about = |problem: String| CheckpointError::tensor(&index_name, tensors[0], problem);
            let Some(bytes) = files.map_listed(shard, about)? else {
                return Err(about(format!(
                    "the index places it, and {} more, in {}, which is missing",
                    tensors.len() - 1,
                    short(shard)
                )));
            };
            self.add_file(files.display(shard), bytes)?;
        }
        for (tensor, shard) in &weight_map {
            let place = self
                .table
                .by_name
                .get(tensor)
                .map(|&i| self.table.files[self.table.tensors[i].file].display.as_str());
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
            let bytes = native::map_listed(files, name, record)?;
            let infos = header(&display, &bytes)?.tensors;
            let file = self.table.files.len();
            for (name, shape, stored) in native::entries(manifest, name, &display, file, infos)? {
                self.table.add(Entry { name, shape, file, stored, interleaved: None }, &display)?;
            }
            self.table.files.push(CheckpointFile { display, bytes });
        }
        match manifest.tensors.iter().find(|(name, _)| !self.table.by_name.contains_key(*name)) {
            None => Ok(()),
            Some((name, record)) => {
                let problem = format!("is missing, but the manifest places it in {}", short(&record.file));
                Err(CheckpointError::tensor(files.location(), name, problem))
            }
        }
    }

    fn add_file(&mut self, display: String, bytes: FileBytes) -> Result<(), CheckpointError> {
        let file = self.table.files.len();
        for info in header(&display, &bytes)?.tensors {
            let data = Span { file, range: info.range };
            let stored = Stored::Plain { dtype: info.dtype, data };
            let entry = Entry { name: info.name, shape: info.shape, file, stored, interleaved: None };
            self.table.add(entry, &display)?;
        }
        self.table.files.push(CheckpointFile { display, bytes });
        Ok(())
    }

    fn add_gguf(
        &mut self,
        parts: Vec<(String, FileBytes)>,
        files: &ModelFiles,
    ) -> Result<(), CheckpointError> {
        let layout = parts.first().and_then(|(_, bytes)| gguf::Layout::of(bytes, files.archs()));
        self.format = Format::Gguf;
        self.norms_hold_one = true;
        let count = parts.len();
        for (file, (display, bytes)) in parts.into_iter().enumerate() {
            let tensors = gguf::tensors(&bytes, &display, (file, count), layout.as_ref())?;
            for tensor in tensors {
                self.add_gguf_tensor(tensor, &display)?;
            }
            self.table.files.push(CheckpointFile { display, bytes });
        }
        self.add_tower(files)
    }

    /// Adds the tensors of the vision tower beside a GGUF file. A file that cannot be used is left out:
    /// [`ModelFiles::tower_problem`] says why.
    fn add_tower(&mut self, files: &ModelFiles) -> Result<(), CheckpointError> {
        let Some(Ok((display, bytes))) = files.map_tower() else { return Ok(()) };
        let model = &self.table.files[0].bytes;
        let Ok(tower) = gguf::tower(&bytes, &display, model, files.archs()) else { return Ok(()) };
        // Some files of models have a tower, too.
        if tower.tensors.iter().any(|tensor| self.table.by_name.contains_key(&tensor.name)) {
            return Ok(());
        }
        for tensor in tower.tensors {
            self.add_gguf_tensor(tensor, &display)?;
        }
        self.table.files.push(CheckpointFile { display, bytes });
        Ok(())
    }

    /// Adds a tensor of the GGUF file that will be pushed next.
    fn add_gguf_tensor(
        &mut self,
        gguf::NamedTensor { name, info, interleaved }: gguf::NamedTensor<'_>,
        display: &str,
    ) -> Result<(), CheckpointError> {
        let file = self.table.files.len();
        let data = Span { file, range: info.range };
        let stored = match info.element {
            Element::Plain(dtype) => Stored::Plain { dtype, data },
            Element::Blocks(kind) => Stored::Ggml { kind, data },
        };
        self.table.add(Entry { name, shape: info.shape, file, stored, interleaved }, display)
    }
}
