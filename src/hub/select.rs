//! Selects the files of a repository that serving needs, from the list of file names.
//!
//! Weights are safetensors or GGUF; with a GGUF file comes the vision tower (`mmproj*`) in the same folder. Never
//! selected are formats that can run code when they are read (`.bin`, `.pth`, `.pt`), and formats of other programs.

use super::HubError;
use super::name::ModelName;
use crate::file;

/// The problem of a [`HubError::Choose`] if no file has the given name.
pub(super) const NO_SUCH_FILE: &str = "matches no file";
/// Most parts of a GGUF file. The largest models have a few dozen.
const MAX_PARTS: usize = 1000;

/// Path in the repository, and size in bytes if it is known.
pub(super) type Entry = (String, Option<u64>);

/// The files to pull.
pub(super) struct Selection {
    /// Indices of the files. Small files come before weights.
    pub files: Vec<usize>,
    /// The selected file that represents the model; `None` if the folder represents it.
    pub model: Option<usize>,
}

/// A GGUF file, in one part or several.
pub(super) struct Gguf {
    /// Path of the first part, which represents all parts.
    pub path: String,
    pub size: Option<u64>,
    /// Indices of the parts, in order.
    pub parts: Vec<usize>,
}

/// Selects the files that `name` means.
pub(super) fn select(name: &ModelName, files: &[Entry]) -> Result<Selection, HubError> {
    if let Some(wanted) = &name.file
        && !wanted.ends_with(".gguf")
        && let Some(i) = files.iter().position(|(path, _)| path == wanted)
    {
        return Ok(Selection { files: vec![i], model: Some(i) });
    }
    let weights: Vec<usize> = (0..files.len()).filter(|i| is_weights(&files[*i].0)).collect();
    let config = files.iter().any(|(path, _)| path == "config.json");
    if name.file.is_some() || weights.is_empty() || !config {
        let Gguf { path, parts, .. } = gguf(name, files)?;
        let model = parts.first().copied();
        // The tower comes first: without it, a whole model would count as pulled.
        let files = tower(&path, files).into_iter().chain(parts).collect();
        return Ok(Selection { files, model });
    }
    let mut chosen: Vec<usize> = (0..files.len()).filter(|i| belongs_to_weights(&files[*i].0)).collect();
    chosen.extend(weights);
    Ok(Selection { files: chosen, model: None })
}

/// The files to delete for a name with a file. A tower stays while the folder has another GGUF file.
pub(super) fn removed(name: &ModelName, files: &[Entry]) -> Result<Vec<usize>, HubError> {
    let mut chosen = select(name, files)?.files;
    let is_needed = |tower: usize| {
        let folder = folder_of(&files[tower].0);
        ggufs(files).iter().any(|gguf| folder_of(&gguf.path) == folder && !chosen.contains(&gguf.parts[0]))
    };
    let kept: Vec<usize> =
        chosen.iter().copied().filter(|i| file::is_tower(file_name(&files[*i].0)) && is_needed(*i)).collect();
    chosen.retain(|i| !kept.contains(i));
    Ok(chosen)
}

/// The vision tower of a GGUF file: it is in the same folder.
pub(super) fn tower(model: &str, files: &[Entry]) -> Option<usize> {
    let beside =
        files.iter().map(|(path, _)| path.as_str()).filter(|path| folder_of(path) == folder_of(model));
    let chosen = file::tower_of(file_name(model), beside.map(file_name))?;
    files.iter().position(|(path, _)| folder_of(path) == folder_of(model) && file_name(path) == chosen)
}

/// Whether `asked` means `file` of the hub: it has the same repository and revision, and the same file or its quantization
/// tag.
pub fn is_meant(file: &ModelName, asked: &ModelName) -> bool {
    let is_same_file = match (&file.file, &asked.file) {
        (Some(path), Some(wanted)) => path == wanted || ends_in_tag(path, wanted),
        (path, wanted) => path == wanted,
    };
    file.repo == asked.repo && file.revision() == asked.revision() && is_same_file
}

/// The single GGUF file that `name` means.
pub(super) fn gguf(name: &ModelName, files: &[Entry]) -> Result<Gguf, HubError> {
    let all = ggufs(files);
    let Some(wanted) = &name.file else {
        return match all.len() {
            0 => Err(HubError::NothingToServe { name: name.clone(), found: kinds(files) }),
            1 => Ok(all.into_iter().next().expect("one")),
            _ => Err(choose(name, "has several models", all)),
        };
    };
    if all.is_empty() {
        return Err(HubError::NoFile { repo: name.repo.clone(), file: wanted.clone() });
    }
    let is_exact = |gguf: &Gguf| gguf.parts.iter().any(|i| files[*i].0 == *wanted);
    let exact = all.iter().any(is_exact);
    let matches_name = |gguf: &Gguf| if exact { is_exact(gguf) } else { ends_in_tag(&gguf.path, wanted) };
    let (mut matching, others): (Vec<Gguf>, Vec<Gguf>) = all.into_iter().partition(matches_name);
    match matching.len() {
        0 => Err(choose(name, NO_SUCH_FILE, others)),
        1 => Ok(matching.remove(0)),
        _ => Err(choose(name, "matches several files", matching)),
    }
}

/// Every GGUF file that has all its parts.
pub(super) fn ggufs(files: &[Entry]) -> Vec<Gguf> {
    let mut all: Vec<Gguf> = Vec::new();
    for (i, (path, size)) in files.iter().enumerate() {
        if !is_gguf(path) {
            continue;
        }
        let Some((stem, total)) = part_of(stem(path)) else {
            all.push(Gguf { path: path.clone(), size: *size, parts: vec![i] });
            continue;
        };
        // Part numbers have five digits. Only the first part adds an entry, which includes the other parts.
        let number = |n: usize| format!("{stem}-{n:05}-of-{total:05}.gguf");
        if *path != number(1) || total > MAX_PARTS {
            continue;
        }
        let part = |n| files.iter().position(|(path, _)| *path == number(n));
        let Some(parts) = (1..=total).map(part).collect::<Option<Vec<usize>>>() else { continue };
        let size =
            parts.iter().map(|i| files[*i].1).try_fold(0u64, |sum, size| Some(sum.saturating_add(size?)));
        all.push(Gguf { path: path.clone(), size, parts });
    }
    all
}

fn choose(name: &ModelName, problem: &'static str, among: Vec<Gguf>) -> HubError {
    let files = among.into_iter().map(|gguf| (gguf.path, gguf.size)).collect();
    HubError::Choose { name: name.clone(), problem, files }
}

/// Whether a path ends in a quantization tag: `Q4_0` matches `model-27b-it-q4_0.gguf`.
fn ends_in_tag(path: &str, tag: &str) -> bool {
    let stem = stem(path);
    let stem = part_of(stem).map_or(stem, |(name, _)| name).to_ascii_lowercase();
    stem.strip_suffix(&tag.to_ascii_lowercase())
        .is_some_and(|before| before.is_empty() || before.ends_with(['-', '.', '_', '/']))
}

fn is_gguf(path: &str) -> bool {
    let name = file_name(path).to_ascii_lowercase();
    name.ends_with(".gguf") && !file::is_tower(&name) && !name.contains("imatrix")
}

/// A path without its extension.
fn stem(path: &str) -> &str {
    path.rsplit_once('.').map_or(path, |(stem, _)| stem)
}

/// Name and number of parts: `NAME-00002-of-00003` is (NAME, 3).
pub(super) fn part_of(stem: &str) -> Option<(&str, usize)> {
    let (rest, total) = stem.rsplit_once("-of-")?;
    let (name, part) = rest.rsplit_once('-')?;
    part.parse::<usize>().ok()?;
    Some((name, total.parse().ok()?))
}

/// Whether a path is weights. Only the top folder of the repository counts: subfolders hold the state of an optimizer,
/// or the weights in another format.
pub(super) fn is_weights(path: &str) -> bool {
    // Some repositories have a second copy of the weights in `consolidated*`. `adapter_*` is a LoRA adapter.
    let other = path.starts_with("consolidated") || path.starts_with("adapter_");
    path.ends_with(".safetensors") && !path.contains('/') && !other
}

/// Whether a path is a configuration, a tokenizer, a template, or the index of the weights.
fn belongs_to_weights(path: &str) -> bool {
    let readable = path.ends_with(".json") || path.ends_with(".jinja");
    !path.contains('/') && (readable || path.starts_with("tokenizer"))
}

/// The folder of a path in the repository, empty for the top.
fn folder_of(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// The kinds of files in a repository, for the error that none of them can be served.
fn kinds(files: &[Entry]) -> String {
    let mut kinds: Vec<&str> = files
        .iter()
        .filter_map(|(path, _)| file_name(path).rsplit_once('.').map(|(_, kind)| kind))
        .filter(|kind| kind.len() <= 16 && kind.chars().all(|c| c.is_ascii_alphanumeric()))
        .collect();
    kinds.sort_unstable();
    kinds.dedup();
    kinds.truncate(12);
    match kinds.is_empty() {
        true => "it has no files of a known kind".into(),
        false => format!("it has files of the kinds {}", kinds.join(", ")),
    }
}
