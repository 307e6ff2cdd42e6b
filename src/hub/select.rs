//! Which files of a repository are needed to serve it. Goes by names alone, and pure: no network, no disk.
//!
//! Weights are safetensors or GGUF. Formats that run code when they are read (`.bin`, `.pth`, `.pt`) and other programs'
//! formats are never chosen; neither are the projectors of vision models (`mmproj*`), which llama.cpp keeps apart.

use super::HubError;
use super::name::ModelName;

/// (path in the repository, bytes where known).
pub(super) type Entry = (String, Option<u64>);

/// Indices into `files` of what `name` asks for, small files before weights.
pub(super) fn select(name: &ModelName, files: &[Entry]) -> Result<Vec<usize>, HubError> {
    if let Some(wanted) = &name.file {
        if let Some(i) = files.iter().position(|(path, _)| path == wanted) {
            return if is_part(wanted) { Err(HubError::Split { file: wanted.clone() }) } else { Ok(vec![i]) };
        }
        return gguf(name, files).map(|i| vec![i]);
    }
    let weights: Vec<usize> = (0..files.len()).filter(|i| is_weights(&files[*i].0)).collect();
    let config = files.iter().any(|(path, _)| path == "config.json");
    if weights.is_empty() || !config {
        return gguf(name, files).map(|i| vec![i]);
    }
    let mut chosen: Vec<usize> = (0..files.len()).filter(|i| belongs_to_weights(&files[*i].0)).collect();
    chosen.extend(weights);
    Ok(chosen)
}

/// The one GGUF file that `name` means.
pub(super) fn gguf(name: &ModelName, files: &[Entry]) -> Result<usize, HubError> {
    let (parts, all): (Vec<usize>, Vec<usize>) =
        (0..files.len()).filter(|i| is_gguf(&files[*i].0)).partition(|i| is_part(&files[*i].0));
    if let (Some(part), true) = (parts.first(), all.is_empty()) {
        return Err(HubError::Split { file: files[*part].0.clone() });
    }
    let (matching, problem) = match &name.file {
        Some(wanted) => {
            let matching: Vec<usize> =
                all.iter().copied().filter(|i| ends_in_tag(&files[*i].0, wanted)).collect();
            let problem =
                if matching.is_empty() { "is no file of that name" } else { "could be several files" };
            (matching, problem)
        }
        None => (all.clone(), "is several models"),
    };
    let offered = if matching.is_empty() { all } else { matching.clone() };
    match (matching[..].first(), &name.file) {
        (Some(i), _) if matching.len() == 1 => Ok(*i),
        (None, Some(file)) if offered.is_empty() => {
            Err(HubError::NoFile { repo: name.repo.clone(), file: file.clone() })
        }
        (None, None) => Err(HubError::NothingToServe { name: name.clone(), found: kinds(files) }),
        _ => {
            let files = offered.iter().map(|i| files[*i].clone()).collect();
            Err(HubError::Choose { name: name.clone(), problem, files })
        }
    }
}

/// `Q4_0` matches `gemma-3-27b-it-q4_0.gguf`.
fn ends_in_tag(path: &str, tag: &str) -> bool {
    let stem = path.to_ascii_lowercase();
    let Some(stem) = stem.strip_suffix(".gguf") else { return false };
    stem.strip_suffix(&tag.to_ascii_lowercase())
        .is_some_and(|before| before.is_empty() || before.ends_with(['-', '.', '_', '/']))
}

fn is_gguf(path: &str) -> bool {
    let name = file_name(path).to_ascii_lowercase();
    name.ends_with(".gguf") && !name.starts_with("mmproj") && !name.contains("imatrix")
}

/// `-00001-of-00003.gguf`.
fn is_part(path: &str) -> bool {
    path.strip_suffix(".gguf").is_some_and(|stem| part_of(stem).is_some())
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
