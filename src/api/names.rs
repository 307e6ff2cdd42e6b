//! The names of models in Ollama's lists, which always have a tag.

/// The tag of a name without a tag.
const LATEST: &str = ":latest";

/// The name without the tag that Ollama's clients add.
pub(in crate::api) fn untagged(name: &str) -> &str {
    name.strip_suffix(LATEST).unwrap_or(name)
}

/// The name as Ollama's lists have it.
pub(in crate::api) fn tagged(name: &str) -> String {
    let last = name.rsplit('/').next().unwrap_or(name);
    if last.contains(':') { name.to_owned() } else { format!("{name}{LATEST}") }
}
