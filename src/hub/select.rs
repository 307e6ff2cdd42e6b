//! Which files of a repository are needed to serve it. Goes by names alone, and pure: no network, no disk.
//!
//! Weights are safetensors or GGUF. Formats that run code when they are read (`.bin`, `.pth`, `.pt`) and other programs'
//! formats are never chosen; neither are the projectors of vision models (`mmproj*`), which llama.cpp keeps apart.

use super::HubError;
use super::name::ModelName;

/// What [`HubError::Choose`] says where no file has the name that was given.
pub(super) const NO_SUCH_FILE: &str = "is no file of that name";
/// A file in more parts is no model; the largest there are have a few dozen.
const MAX_PARTS: usize = 1000;

/// (path in the repository, bytes where known).
pub(super) type Entry = (String, Option<u64>);

/// What to get.
pub(super) struct Selection {
    /// Indices of the files, small ones before weights.
    pub files: Vec<usize>,
    /// The one of them that stands for the model; none where the folder does.
    pub model: Option<usize>,
}

/// A GGUF file, in one part or several.
pub(super) struct Gguf {
    /// Of the first part, which stands for all.
    pub path: String,
    pub size: Option<u64>,
    /// Indices of the parts, in order.
    pub parts: Vec<usize>,
}

/// What of `files` `name` asks for.
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
        let Gguf { parts, .. } = gguf(name, files)?;
        return Ok(Selection { model: parts.first().copied(), files: parts });
    }
    let mut chosen: Vec<usize> = (0..files.len()).filter(|i| belongs_to_weights(&files[*i].0)).collect();
    chosen.extend(weights);
    Ok(Selection { files: chosen, model: None })
}

/// The one GGUF file that `name` means.
pub(super) fn gguf(name: &ModelName, files: &[Entry]) -> Result<Gguf, HubError> {
    let all = ggufs(files);
    let Some(wanted) = &name.file else {
        return match all.len() {
            0 => Err(HubError::NothingToServe { name: name.clone(), found: kinds(files) }),
            1 => Ok(all.into_iter().next().expect("one")),
            _ => Err(choose(name, "is several models", all)),
        };
    };
    if all.is_empty() {
        return Err(HubError::NoFile { repo: name.repo.clone(), file: wanted.clone() });
    }
    let is_exact = |gguf: &Gguf| gguf.parts.iter().any(|i| files[*i].0 == *wanted);
    let exact = all.iter().any(is_exact);
    let means = |gguf: &Gguf| if exact { is_exact(gguf) } else { ends_in_tag(&gguf.path, wanted) };
    let (mut meant, others): (Vec<Gguf>, Vec<Gguf>) = all.into_iter().partition(means);
    match meant.len() {
        0 => Err(choose(name, NO_SUCH_FILE, others)),
        1 => Ok(meant.remove(0)),
        _ => Err(choose(name, "could be several files", meant)),
    }
}

/// Every GGUF file of which all parts are there.
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
        // Numbered as many digits wide as here; the first part finds the others.
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

/// `Q4_0` matches `gemma-3-27b-it-q4_0.gguf`.
fn ends_in_tag(path: &str, tag: &str) -> bool {
    let stem = stem(path);
    let stem = part_of(stem).map_or(stem, |(name, _)| name).to_ascii_lowercase();
    stem.strip_suffix(&tag.to_ascii_lowercase())
        .is_some_and(|before| before.is_empty() || before.ends_with(['-', '.', '_', '/']))
}

fn is_gguf(path: &str) -> bool {
    let name = file_name(path).to_ascii_lowercase();
    name.ends_with(".gguf") && !name.starts_with("mmproj") && !name.contains("imatrix")
}

/// Without the ending.
fn stem(path: &str) -> &str {
    path.rsplit_once('.').map_or(path, |(stem, _)| stem)
}

/// `NAME-00002-of-00003` is (NAME, 3).
pub(super) fn part_of(stem: &str) -> Option<(&str, usize)> {
    let (rest, total) = stem.rsplit_once("-of-")?;
    let (name, part) = rest.rsplit_once('-')?;
    part.parse::<usize>().ok()?;
    Some((name, total.parse().ok()?))
}

/// Weights in the repository's own folder; those below it are other things' (an optimizer's, an original format's).
pub(super) fn is_weights(path: &str) -> bool {
    // Mistral's second copy of the same weights, and what is added to other weights.
    let other = path.starts_with("consolidated") || path.starts_with("adapter_");
    path.ends_with(".safetensors") && !path.contains('/') && !other
}

/// Configurations, tokenizer, templates, the index of the weights.
fn belongs_to_weights(path: &str) -> bool {
    let readable = path.ends_with(".json") || path.ends_with(".jinja");
    !path.contains('/') && (readable || path.starts_with("tokenizer"))
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// What there is instead.
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
        false => format!("its files are of the kinds {}", kinds.join(", ")),
    }
}
