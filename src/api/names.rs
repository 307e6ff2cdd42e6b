//! The names of models in Ollama's bodies, and in its lists, where they always have a tag.

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

/// The name in the field `model` of a body, or in its older field `name`. Clients in Go send both, and one of them is empty.
pub(in crate::api) fn named_by(model: Option<String>, name: Option<String>) -> Option<String> {
    [model, name].into_iter().flatten().find(|name| !name.is_empty())
}
