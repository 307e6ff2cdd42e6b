//! Holds the code to its layout: floors, no circles of files, places of `unsafe` and `ash`, required comments,
//! forbidden words, links that lead somewhere.
//!
//! Each rule is a function from a text to its complaints, and has a sample that it must refuse: a rule that
//! cannot fail checks nothing. The rules do not repeat what the compiler or clippy refuses.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::support::root;

/// The floors of lib.rs, from the lowest: a module may name those below it.
const FLOORS: [&[&str]; 11] = [
    &["tensor", "config", "file", "image", "kv_disk"],
    &["gpu", "checkpoint", "text", "hub"],
    &["kernels", "quantize"],
    &["model", "device"],
    &["npu", "engine"],
    &["session"],
    &["library"],
    &["api"],
    &["cli"],
    &["lab"],
    &["bin", "main"],
];

/// Neighbours on one floor that may be named: (who, whom). Weights are quantized while they are packed for the
/// device. The device process executes steps of a model.
const NEIGHBOURS: [(&str, &str); 3] = [("config", "tensor"), ("kernels", "quantize"), ("device", "model")];

/// Modules below a module that it must not name.
const HIDDEN: [(&str, &[&str]); 7] = [
    ("main", &["lab", "gpu", "kernels"]),
    ("lab", &["api"]),
    ("cli", &["gpu", "api", "kernels"]),
    ("api", &["gpu", "kernels", "checkpoint", "hub", "npu"]),
    ("library", &["gpu", "kernels", "checkpoint", "hub", "npu"]),
    ("session", &["gpu", "kernels", "checkpoint", "hub", "device", "npu"]),
    ("engine", &["gpu", "kernels", "checkpoint", "text", "quantize", "hub", "device"]),
];

/// Modules of the model that the engine must not name.
const HIDDEN_FROM_ENGINE: [&str; 4] =
    ["model::offload", "model::model_runner", "model::load", "model::weights"];

/// Files and folders in which a hidden module may be named.
const SHOWN: [(&str, &[&str]); 3] = [
    ("gpu", &["src/cli/load.rs", "src/cli/devices.rs", "src/cli/error.rs"]),
    ("api", &["src/cli/serve/", "src/cli/error.rs"]),
    ("kernels", &["src/cli/load.rs"]),
];

/// Words of other crates and of the language that a module must not contain.
const FOREIGN: [(&str, &[&str]); 11] = [
    ("tensor", &["std::fs", "std::net", "File", "tokio"]),
    ("config", &["std::fs", "std::net", "File", "tokio"]),
    ("image", &["std::fs", "std::net", "File", "tokio", "ureq"]),
    ("model", &["Instant", "SystemTime", "tokio", "axum", "tokenizers", "minijinja"]),
    ("library", &["axum", "hyper", "tower"]),
    ("session", &["axum", "hyper", "tower", "utoipa"]),
    ("engine", &["async", "await", "tokio", "axum", "tokenizers", "minijinja", "llguidance", "safetensors"]),
    ("kernels", &["tokio", "axum", "tokenizers"]),
    ("gpu", &["tokio", "axum", "tokenizers", "safetensors"]),
    ("npu", &["tokio", "axum", "tokenizers", "safetensors"]),
    ("hub", &["tokio", "axum", "tokenizers", "safetensors"]),
];

/// The most bytes of the demo model. 12 MB keep a clone small, and the binary that embeds the model smaller than most.
const DEMO_MODEL_BYTES: u64 = 12_000_000;

/// The names of architectures, in lower case.
const ARCHITECTURES: [&str; 3] = ["gemma", "mistral", "qwen"];

/// Where the product may name an architecture: its folders, the registry, and the splitting of texts, which files name
/// after models.
const ARCHITECTURE_PLACES: [&str; 11] = [
    "src/model/gemma3/",
    "src/model/gemma3n/",
    "src/model/gemma4/",
    "src/model/llama/",
    "src/model/qwen2/",
    "src/model/qwen3/",
    "src/model/qwen3_moe/",
    "src/text/family/",
    "src/checkpoint/gguf/byte_level.rs",
    "src/model/arch.rs",
    "src/model/mod.rs",
];

/// The most characters of the name of a test.
const TEST_NAME_CHARACTERS: usize = 80;

// --- reading Rust without a parser ----------------------------------------------------------------------

/// A source text in two layers of the same lines: code with comments and literals blanked, and comments.
struct Layers {
    code: String,
    comments: String,
}

/// Splits Rust into code and comments. Strings and characters are blanked in both, so that a word in a message is
/// no violation. Lines are kept: the nth line of one layer is the nth line of the other.
fn layers(source: &str) -> Layers {
    let text: Vec<char> = source.chars().collect();
    let (mut code, mut comments) = (String::new(), String::new());
    let mut i = 0;
    // Copies `n` characters to one layer, blanks to the other; newlines go to both.
    let mut take = |i: &mut usize, n: usize, to_code: bool, to_comments: bool| {
        for &c in &text[*i..(*i + n).min(text.len())] {
            let keep = |yes: bool| if c == '\n' || yes { c } else { ' ' };
            code.push(keep(to_code));
            comments.push(keep(to_comments));
        }
        *i = (*i + n).min(text.len());
    };
    let starts = |i: usize, s: &str| s.chars().enumerate().all(|(k, c)| text.get(i + k) == Some(&c));
    let is_word = |c: Option<&char>| c.is_some_and(|c| c.is_alphanumeric() || *c == '_');
    while i < text.len() {
        if starts(i, "//") {
            let n = text[i..].iter().position(|&c| c == '\n').unwrap_or(text.len() - i);
            take(&mut i, n, false, true);
        } else if starts(i, "/*") {
            let (mut depth, mut n) = (0, 0);
            while i + n < text.len() {
                if starts(i + n, "/*") {
                    depth += 1;
                    n += 2;
                } else if starts(i + n, "*/") {
                    depth -= 1;
                    n += 2;
                    if depth == 0 {
                        break;
                    }
                } else {
                    n += 1;
                }
            }
            take(&mut i, n, false, true);
        } else if text[i] == 'r'
            && !is_word(i.checked_sub(1).and_then(|p| text.get(p)).filter(|c| **c != 'b'))
            && matches!(text.get(i + 1), Some('"' | '#'))
            && text[i + 1..].iter().find(|c| **c != '#') == Some(&'"')
        {
            let hashes = text[i + 1..].iter().take_while(|c| **c == '#').count();
            let close: String = std::iter::once('"').chain(std::iter::repeat_n('#', hashes)).collect();
            let mut n = hashes + 2;
            while i + n < text.len() && !starts(i + n, &close) {
                n += 1;
            }
            take(&mut i, n + close.len(), false, false);
        } else if text[i] == '"' {
            let mut n = 1;
            while i + n < text.len() && text[i + n] != '"' {
                n += if text[i + n] == '\\' { 2 } else { 1 };
            }
            take(&mut i, n + 1, false, false);
        } else if text[i] == '\'' && (text.get(i + 1) == Some(&'\\') || text.get(i + 2) == Some(&'\'')) {
            // A character, not a lifetime. '\'' and '\u{1F984}' end at the first quote after the escape.
            let escaped = usize::from(text[i + 1] == '\\');
            let n = text[i + 2 + escaped..].iter().position(|&c| c == '\'').unwrap_or(0) + 3 + escaped;
            take(&mut i, n, false, false);
        } else {
            take(&mut i, 1, true, false);
        }
    }
    Layers { code, comments }
}

/// Offsets at which `word` stands in `code` as a whole word (`std::fs` counts as one).
fn find_word(code: &str, word: &str) -> Vec<usize> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(word)
        .map(|(at, _)| at)
        .filter(|&at| {
            !code[..at].chars().next_back().is_some_and(is_word)
                && !code[at + word.len()..].chars().next().is_some_and(is_word)
        })
        .collect()
}

fn line_of(text: &str, at: usize) -> usize {
    text[..at].matches('\n').count() + 1
}

fn find_prefix(code: &str, prefix: &str) -> Vec<usize> {
    let before = |at: usize| code[..at].chars().next_back();
    code.match_indices(prefix)
        .map(|(at, _)| at)
        .filter(|&at| !before(at).is_some_and(|c| c.is_alphanumeric() || c == '_'))
        .collect()
}

/// Expands the use tree (or plain path) at the start of `rest`; returns what follows it.
fn expand<'a>(rest: &'a str, before: &str, found: &mut Vec<String>) -> &'a str {
    let join = |name: &str| if before.is_empty() { name.to_string() } else { format!("{before}::{name}") };
    if let Some(mut rest) = rest.strip_prefix('{') {
        loop {
            rest = rest.trim_start_matches([' ', '\n', ',', '\t']);
            if let Some(after) = rest.strip_prefix('}') {
                return after;
            }
            let after = expand(rest, before, found);
            // In `a as b`, the new name does not matter, and neither does anything that is no path.
            rest = after.trim_start_matches(|c: char| c != ',' && c != '}');
            if rest.is_empty() {
                return rest;
            }
        }
    }
    let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
    let (name, after) = rest.split_at(end);
    if let Some(next) = after.strip_prefix("::").map(str::trim_start)
        && next.starts_with(|c: char| c.is_alphabetic() || c == '_' || c == '{')
    {
        return expand(next, &join(name), found);
    }
    if !name.is_empty() {
        found.push(join(name));
    } else if rest.starts_with('*') && !before.is_empty() {
        found.push(before.to_string());
    }
    after
}

fn first(path: &str) -> &str {
    path.split("::").next().unwrap_or(path)
}

fn floor(module: &str) -> Option<usize> {
    FLOORS.iter().position(|modules| modules.contains(&module))
}

/// The module that `src/api/chat.rs` belongs to: `api`. The NPU's commands are on the floor of the other commands.
fn module(file: &str) -> &str {
    let name = file.trim_start_matches("src/");
    if name.starts_with("npu/cli/") {
        return "cli";
    }
    name.split('/').next().unwrap_or(name).trim_end_matches(".rs")
}

// --- circles of files -----------------------------------------------------------------------------------

/// The modules of src by their paths, and the paths that each `mod.rs` hands on under names of its own.
struct Modules<'a> {
    /// `gpu::memory` -> `src/gpu/memory.rs`; the root is the empty path.
    files: BTreeMap<String, &'a str>,
    /// The path that a file re-exports under a name: (file, name) -> path.
    exports: BTreeMap<(&'a str, String), String>,
}

impl Modules<'_> {
    /// The file that a path leads to: the deepest module in it, through the re-exports of each `mod.rs` on the way. A
    /// name that a module file does not re-export is taken for an item of that file.
    fn resolve(&self, path: &str) -> Option<&str> {
        let (mut path, mut hops) = (path.to_string(), 0);
        loop {
            let names: Vec<&str> = path.split("::").collect();
            let prefixes = (0..=names.len()).rev().map(|n| (n, names[..n].join("::")));
            let (depth, file) =
                prefixes.filter_map(|(n, prefix)| Some((n, *self.files.get(&prefix)?))).next()?;
            let export = names.get(depth).and_then(|name| self.exports.get(&(file, (*name).to_string())));
            match export {
                // Re-exports that lead back to themselves end somewhere all the same.
                Some(target) if hops < 8 => (path, hops) = (target.clone(), hops + 1),
                _ => return Some(file),
            }
        }
    }
}

/// The path of the module that a file of src or tests is: `src/gpu/mod.rs` is `gpu`, `src/lib.rs` the empty one.
fn module_path(file: &str) -> Vec<&str> {
    let path = file.trim_start_matches("src/").trim_start_matches("tests/").trim_end_matches(".rs");
    path.split('/').filter(|name| !matches!(*name, "mod" | "lib" | "main")).collect()
}

/// The code of a file without everything that makes no import: comments, literals, tests, `pub(in ..)`. Offsets stay.
fn imports_alone(source: &str) -> String {
    const TEST: &str = "#[cfg(test)]";
    let mut code = layers(source).code;
    while let Some(at) = code.find(TEST) {
        let end = item_end(&code, at);
        blank(&mut code, at..end);
    }
    while let Some(at) = code.find("pub(in ") {
        let end = code[at..].find(')').map_or(code.len(), |n| at + n + 1);
        blank(&mut code, at..end);
    }
    code
}

fn blank(code: &mut String, range: std::ops::Range<usize>) {
    let blanks: String = code[range.clone()].chars().map(|c| if c == '\n' { c } else { ' ' }).collect();
    code.replace_range(range, &blanks);
}

/// The end of the item that begins at `at`: after its `;`, or after the brace that closes its first one.
fn item_end(code: &str, at: usize) -> usize {
    let mut depth = 0;
    for (n, c) in code[at..].char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ';' => {}
            _ => continue,
        }
        if depth == 0 {
            return at + n + 1;
        }
    }
    code.len()
}

/// Every path from the crate's root that the code of a file names, with its offset: `crate::a::{b, c::d}` gives `a::b`
/// and `a::c::d`. Such a path begins with `crate`, `unicorn`, `self` or `super`, or with one of the file's `children`.
fn module_paths(file: &str, code: &str, children: &[&str]) -> Vec<(usize, String)> {
    let own = module_path(file);
    let mut starts: Vec<(usize, String)> = Vec::new();
    for (prefix, base) in [("crate::", 0), ("unicorn::", 0), ("self::", own.len())] {
        starts.extend(find_prefix(code, prefix).into_iter().map(|at| (at, own[..base].join("::"))));
    }
    for at in find_prefix(code, "super::") {
        let chain = code[at..].split("::").take_while(|name| *name == "super").count();
        starts.push((at, own[..own.len().saturating_sub(chain)].join("::")));
    }
    for child in children {
        starts.extend(find_prefix(code, &format!("{child}::")).into_iter().map(|at| (at, own.join("::"))));
    }
    // A name after `::` is the middle of a path.
    starts.retain(|(at, _)| !code[..*at].ends_with("::"));
    let mut paths = Vec::new();
    for (at, base) in starts {
        let mut rest = &code[at..];
        while let Some(prefix) =
            ["crate::", "unicorn::", "self::", "super::"].iter().find(|prefix| rest.starts_with(**prefix))
        {
            rest = &rest[prefix.len()..];
        }
        let mut found = Vec::new();
        expand(rest, &base, &mut found);
        paths.extend(found.into_iter().map(|path| (at, path)));
    }
    paths
}

/// Files of src that import each other in a circle, each circle with the lines that make it. `sources` are all files of
/// src with their texts.
fn circles(sources: &[(String, String)]) -> Vec<String> {
    let codes: Vec<(&str, String)> =
        sources.iter().map(|(file, source)| (file.as_str(), imports_alone(source))).collect();
    let paths = codes.iter().filter(|(file, _)| *file != "src/main.rs");
    let files = paths.map(|(file, _)| (module_path(file).join("::"), *file)).collect();
    let mut modules = Modules { files, exports: BTreeMap::new() };

    // The paths that a file names, with their offsets.
    let mut named: BTreeMap<&str, Vec<(usize, String)>> = BTreeMap::new();
    for (file, code) in &codes {
        let own = module_path(file).join("::");
        let children: Vec<&str> = modules
            .files
            .keys()
            .filter(|path| path.rsplit_once("::").map_or("", |(parent, _)| parent) == own && **path != own)
            .map(|path| path.rsplit("::").next().unwrap_or(path))
            .collect();
        let mut paths = module_paths(file, code, &children);
        if file.ends_with("/mod.rs") {
            let is_export = |at: usize| {
                let statement = code[..at].rsplit([';', '}']).next().unwrap_or("");
                ["pub", "use"].iter().all(|word| !find_word(statement, word).is_empty())
            };
            let (exports, rest) = paths.into_iter().partition::<Vec<_>, _>(|(at, _)| is_export(*at));
            paths = rest;
            for (_, path) in exports {
                let name = path.rsplit("::").next().unwrap_or(&path).to_string();
                modules.exports.insert((*file, name), path);
            }
        }
        named.insert(*file, paths);
    }

    // The imports of a file: (line, path, imported file).
    let mut imports: BTreeMap<&str, Vec<(usize, &str, &str)>> = BTreeMap::new();
    for (file, code) in &codes {
        let targets = named[file].iter().filter_map(|(at, path)| Some((*at, path, modules.resolve(path)?)));
        let others = targets.filter(|(.., target)| target != file);
        imports.insert(*file, others.map(|(at, path, to)| (line_of(code, at), path.as_str(), to)).collect());
    }
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        imports.keys().map(|file| (*file, reached_from(file, &imports))).collect();
    let mut complaints = Vec::new();
    for (file, reaches) in &reached {
        let circle: Vec<&str> =
            reaches.iter().copied().filter(|other| reached[other].contains(file)).collect();
        // Each circle once, at its first file.
        if circle.first() != Some(file) {
            continue;
        }
        let mut lines = vec![format!("{} files import each other in a circle:", circle.len())];
        for file in &circle {
            for (line, path, to) in imports[file].iter().filter(|(.., to)| circle.contains(to)) {
                lines.push(format!("  {file}:{line}: names `{path}` of {to}"));
            }
        }
        complaints.push(lines.join("\n"));
    }
    complaints
}

/// All files that a file imports, directly and through other files. The file itself is among them if an import leads
/// back to it.
fn reached_from<'a>(
    file: &str,
    imports: &BTreeMap<&'a str, Vec<(usize, &'a str, &'a str)>>,
) -> BTreeSet<&'a str> {
    let (mut reached, mut next) = (BTreeSet::new(), vec![file]);
    while let Some(file) = next.pop() {
        for (.., to) in &imports[file] {
            if reached.insert(*to) {
                next.push(*to);
            }
        }
    }
    reached
}

// --- rules for one source file --------------------------------------------------------------------------

/// The same complaint for each offset of a text.
fn complaints_at(
    file: &str,
    text: &str,
    offsets: impl IntoIterator<Item = usize>,
    complaint: &str,
) -> Vec<String> {
    offsets.into_iter().map(|at| format!("{file}:{}: {complaint}", line_of(text, at))).collect()
}

fn floors(file: &str, source: &str) -> Vec<String> {
    let code = layers(source).code;
    let me = module(file);
    if me == "lib" {
        return Vec::new();
    }
    let Some(mine) = floor(me) else {
        return vec![format!(
            "{file}: module `{me}` stands on no floor; give it one in lib.rs and tests/house/tidy.rs"
        )];
    };
    let mut complaints = Vec::new();
    for (at, path) in module_paths(file, &code, &[]) {
        let is_command = path == "npu::cli" || path.starts_with("npu::cli::");
        let other = if is_command { "cli" } else { first(&path) };
        let Some(theirs) = floor(other) else { continue };
        let line = line_of(&code, at);
        if other != me && theirs >= mine && !NEIGHBOURS.contains(&(me, other)) {
            complaints.push(format!(
                "{file}:{line}: `{me}` (floor {mine}) names `{path}` (floor {theirs}): import downward only"
            ));
        }
        let hidden = HIDDEN.iter().filter(|(who, _)| *who == me).flat_map(|(_, modules)| *modules);
        let of_engine = HIDDEN_FROM_ENGINE.iter().filter(|_| me == "engine");
        let is_shown = |module: &str| {
            let places = SHOWN.iter().filter(|(of, _)| *of == module).flat_map(|(_, places)| *places);
            places.into_iter().any(|place| file == *place || place.ends_with('/') && file.starts_with(place))
        };
        for what in hidden.chain(of_engine) {
            if (path == *what || path.starts_with(&format!("{what}::"))) && !is_shown(what) {
                complaints.push(format!("{file}:{line}: `{me}` must not name `{path}`"));
            }
        }
    }
    for (who, words) in FOREIGN {
        for word in words.iter().filter(|_| who == me) {
            let hits = find_word(&code, word).into_iter().filter(|&at| !channel(me, &code[at..]));
            complaints.extend(complaints_at(file, &code, hits, &format!("`{me}` must not contain `{word}`")));
        }
    }
    complaints
}

/// The engine's token events end in async code, so their bounded channel is tokio's; a channel brings no runtime.
fn channel(module: &str, code: &str) -> bool {
    module == "engine" && code.starts_with("tokio::sync::mpsc")
}

fn vulkan_stays_in_gpu(file: &str, source: &str) -> Vec<String> {
    if module(file) == "gpu" {
        return Vec::new();
    }
    let code = layers(source).code;
    let hits = ["ash", "glslang", "rspirv"].into_iter().flat_map(|word| find_word(&code, word));
    let hits = hits.filter(|&at| {
        code[at..].trim_start_matches(char::is_alphanumeric).trim_start().starts_with("::")
            || code[..at].ends_with("use ")
    });
    complaints_at(file, &code, hits, "Vulkan crates are named in src/gpu only")
}

fn anyhow_stays_in_the_binary(file: &str, source: &str) -> Vec<String> {
    let code = layers(source).code;
    let hits = find_word(&code, "anyhow").into_iter().filter(|_| !matches!(module(file), "main" | "cli"));
    complaints_at(file, &code, hits, "anyhow is for the binary (main, cli); a module has its own error type")
}

fn unsafe_has_its_place(file: &str, source: &str) -> Vec<String> {
    let code = layers(source).code;
    let allowed = !file.starts_with("src/") || matches!(module(file), "gpu" | "npu" | "checkpoint");
    let hits = find_word(&code, "unsafe").into_iter().filter(|_| !allowed);
    complaints_at(file, &code, hits, "unsafe belongs in gpu/, npu/ and the mmap of checkpoint/")
}

/// A `SAFETY:` comment on the line of the `unsafe`, or in the comment above the statement it stands in; for an
/// `unsafe fn`, `# Safety` in its documentation. A callback that only the driver calls (`unsafe extern`) has neither:
/// the blocks in its body do.
fn unsafe_says_why(file: &str, source: &str) -> Vec<String> {
    let Layers { code, comments } = layers(source);
    let (code_lines, comment_lines): (Vec<_>, Vec<_>) = (code.lines().collect(), comments.lines().collect());
    let says =
        |line: usize| comment_lines[line].contains("SAFETY:") || comment_lines[line].contains("# Safety");
    let mut complaints = Vec::new();
    for at in find_word(&code, "unsafe").into_iter().filter(|&at| !code[at..].starts_with("unsafe extern")) {
        let here = line_of(&code, at) - 1;
        let mut found = says(here)
            || comment_lines
                .get(here + 1)
                .is_some_and(|_| code_lines[here + 1].trim().is_empty() && says(here + 1));
        // Up through the statement, then through the comment above it.
        let mut above = here;
        let mut in_comment = false;
        while !found && above > 0 {
            above -= 1;
            let blank = code_lines[above].trim().is_empty();
            let comment = !comment_lines[above].trim().is_empty();
            if blank && !comment || in_comment && !blank {
                break;
            }
            in_comment |= blank && comment;
            found = says(above);
            let ends = code_lines[above].trim_end();
            if !blank
                && !found
                && (ends.ends_with(';') || ends.ends_with('}'))
                && !ends.trim_start().starts_with("#[")
            {
                break;
            }
        }
        if !found {
            complaints.push(format!(
                "{file}:{}: unsafe without a SAFETY: comment that says why it holds",
                here + 1
            ));
        }
    }
    complaints
}

fn header_says_what_it_is(file: &str, source: &str) -> Vec<String> {
    let ok = source.starts_with("//! ") && source.lines().next().is_some_and(|line| line.len() > 15);
    if ok { Vec::new() } else { vec![format!("{file}: starts without `//!` saying what the file is for")] }
}

fn nothing_unfinished(file: &str, source: &str) -> Vec<String> {
    let Layers { code, comments } = layers(source);
    let mut complaints = Vec::new();
    for word in ["todo", "unimplemented", "dbg"] {
        let hits = find_word(&code, word).into_iter().filter(|at| code[at + word.len()..].starts_with('!'));
        complaints.extend(complaints_at(file, &code, hits, &format!("`{word}!` is unfinished work")));
    }
    let ignored = code.match_indices("#[ignore").map(|(at, _)| at);
    complaints.extend(complaints_at(file, &code, ignored, "a test is skipped by support::skip alone"));
    for word in [concat!("FIX", "ME"), concat!("TO", "DO"), concat!("XX", "X")] {
        let hits = find_word(&comments, word);
        complaints.extend(complaints_at(file, &comments, hits, &format!("{word} is unfinished work")));
    }
    complaints
}

/// Files outside of an architecture's folders that name it. The registry is the only other place, and unit tests may use
/// published sizes.
fn architectures_stay_in_their_folders(file: &str, source: &str) -> Vec<String> {
    if ARCHITECTURE_PLACES.iter().any(|place| file.starts_with(place)) {
        return Vec::new();
    }
    let product = source.split("#[cfg(test)]").next().unwrap_or(source);
    let lines = product.lines().enumerate().filter(|(_, line)| {
        let line = line.to_lowercase();
        ARCHITECTURES.iter().any(|name| line.contains(name))
    });
    lines.map(|(n, _)| format!("{file}:{}: names an architecture outside of its folder", n + 1)).collect()
}

/// Functions whose names are longer than a report of tests can show on one line. A test's name says subject, condition
/// and result.
fn test_names_are_short(file: &str, source: &str) -> Vec<String> {
    let code = layers(source).code;
    let names = code.match_indices("fn ").filter_map(|(at, keyword)| {
        let name = code[at + keyword.len()..].split(|c: char| !c.is_alphanumeric() && c != '_').next()?;
        let length = name.chars().count();
        (length > TEST_NAME_CHARACTERS)
            .then(|| format!("{file}:{}: {length} characters in the name {name}", line_of(&code, at)))
    });
    names.collect()
}

fn names_say_something(file: &str, _: &str) -> Vec<String> {
    let vague = ["utils", "util", "common", "helpers", "misc"];
    let name = Path::new(file).with_extension("");
    let hit =
        name.components().any(|part| matches!(part, Component::Normal(p) if vague.iter().any(|v| p == *v)));
    if hit && file.starts_with("src/") {
        vec![format!("{file}: name a module after what it does")]
    } else {
        Vec::new()
    }
}

// --- rules for other files ------------------------------------------------------------------------------

/// The project speaks of itself: no path of one machine, no host of a package registry.
fn speaks_of_itself(file: &str, text: &str) -> Vec<String> {
    let strange = [
        concat!("/wo", "rk/"),
        concat!("/ho", "me/"),
        concat!("/ro", "ot/"),
        concat!("/Us", "ers/"),
        concat!("registry.", "npmjs"),
        concat!("pypi", ".org"),
        concat!("python", "hosted.org"),
        concat!("static.", "crates.io"),
        concat!("index.", "crates.io"),
        concat!("pkg", ".dev"),
    ];
    let mut complaints = Vec::new();
    for (n, line) in text.lines().enumerate() {
        for word in strange.iter().filter(|word| line.contains(**word)) {
            complaints.push(format!("{file}:{}: `{word}` belongs to one machine or one registry", n + 1));
        }
    }
    complaints
}

/// A shader says which tensors it reads and writes and what one invocation computes, before anything else.
fn shader_has_a_header(file: &str, text: &str) -> Vec<String> {
    let mut lines =
        text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("#version"));
    let head = lines.next().unwrap_or("");
    let ok = (head.starts_with("//") || head.starts_with("/*")) && head.len() > 15;
    if ok {
        Vec::new()
    } else {
        vec![format!("{file}: starts without a comment saying what the shader computes")]
    }
}

/// Relative links of a Markdown text whose file, or whose heading in that file, is not there.
fn dead_links(file: &str, text: &str, read: impl Fn(&Path) -> Option<String>) -> Vec<String> {
    let folder = Path::new(file).parent().unwrap_or(Path::new(""));
    let mut complaints = Vec::new();
    let mut fenced = false;
    for (n, line) in text.lines().enumerate() {
        fenced ^= line.trim_start().starts_with("```");
        for link in line.split("](").skip(1).filter(|_| !fenced) {
            let target = link.split([')', ' ']).next().unwrap_or("");
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (path, heading) = target.split_once('#').unwrap_or((target, ""));
            let path = if path.is_empty() { PathBuf::from(file) } else { normal(&folder.join(path)) };
            match read(&path) {
                None => complaints.push(format!("{file}:{}: link to {target}, which is not there", n + 1)),
                Some(other) if !heading.is_empty() && !headings(&other).contains(heading) => {
                    complaints
                        .push(format!("{file}:{}: link to {target}, a heading that is not there", n + 1));
                }
                Some(_) => {}
            }
        }
    }
    complaints
}

/// `docs/../a.md` -> `a.md`.
fn normal(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(out.pop()),
            Component::CurDir => {}
            part => out.push(part),
        }
    }
    out
}

/// Anchors of a text's headings, formed as GitHub forms them.
fn headings(text: &str) -> BTreeSet<String> {
    let titles =
        text.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    let slug = |title: &str| -> String {
        let kept = title
            .to_lowercase()
            .chars()
            .filter(|c| c.is_alphanumeric() || " -_".contains(*c))
            .collect::<String>();
        kept.replace(' ', "-")
    };
    titles.map(slug).collect()
}

// --- the tree -------------------------------------------------------------------------------------------

/// Files below `folder` whose name ends in one of `endings`, relative to the root and sorted. Build outputs, caches
/// and git's own files are not the project's.
fn files(folder: &str, endings: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(root()).unwrap().to_str().expect("file names are UTF-8").to_string();
            let last = path.file_name().unwrap().to_str().unwrap();
            if path.is_dir() {
                if !matches!(last, "target" | ".git" | ".venv" | ".cache" | "__pycache__") {
                    folders.push(path);
                }
            } else if endings.iter().any(|ending| last.ends_with(ending)) {
                found.push(name);
            }
        }
    }
    found.sort();
    found
}

fn read(file: &str) -> String {
    fs::read_to_string(root().join(file)).unwrap_or_else(|e| panic!("{file}: {e}"))
}

/// A clock that can be set tells dates; how long something took it does not tell.
fn dates_are_told_and_not_counted(file: &str, source: &str) -> Vec<String> {
    let code = layers(source).code;
    let counts = |rest: &str| {
        let next = rest.trim_start();
        ['.', '-', '+', '<', '>'].iter().any(|sign| next.starts_with(*sign)) && !next.starts_with("->")
    };
    let mut counted = Vec::new();
    for (call, told) in [("unix_time_s()", ""), ("SystemTime::now()", ".duration_since(UNIX_EPOCH)")] {
        counted.extend(code.match_indices(call).map(|(at, _)| at).filter(|&at| {
            let rest = &code[at + call.len()..];
            let is_told = if told.is_empty() { !counts(rest) } else { rest.trim_start().starts_with(told) };
            // The time of a file's last use.
            let is_mark = code[..at].ends_with("set_modified(");
            !(is_told || is_mark) || code[..at].trim_end().ends_with('-')
        }));
    }
    complaints_at(file, &code, counted, "a duration of a clock that can be set: take an Instant")
}

/// The walks of docs/architecture.md: three, of numbered steps that each begin with `FILE:FUNCTION`, a function that is
/// there; `source` gives the file's text.
fn walks(document: &str, source: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let section = document.split_once("\n## Three walks\n").map_or("", |(_, rest)| rest);
    let section = section.split_once("\n## ").map_or(section, |(section, _)| section);
    let (mut complaints, mut lengths) = (Vec::new(), Vec::new());
    for line in section.lines() {
        let Some((number, step)) = line.split_once(". `") else { continue };
        let (place, _) = step.split_once('`').unwrap_or((step, ""));
        match (number.parse::<usize>(), lengths.last_mut()) {
            (Ok(1), _) => lengths.push(1),
            (Ok(n), Some(length)) if n == *length + 1 => *length = n,
            _ => complaints.push(format!("step {number} of a walk does not follow the step before")),
        }
        let (file, function) = place.split_once(':').unwrap_or((place, ""));
        let is_there = source(file).is_some_and(|source| {
            let code = layers(&source).code;
            find_word(&code, function).iter().any(|&at| code[..at].trim_end().ends_with("fn"))
        });
        if !is_there {
            complaints.push(format!("a walk steps through {place}, which is no function"));
        }
    }
    if lengths.len() != 3 {
        complaints.push(format!("there are {} walks, not three", lengths.len()));
    }
    complaints
}

/// Names of other test files that a file of the tests uses. `neighbours` are test files as `folder::file`. What two
/// test files share is a fixture. It is in tests/support, where a reader looks for it.
fn fixtures_stand_in_support(file: &str, source: &str, neighbours: &BTreeSet<String>) -> Vec<String> {
    let code = layers(source).code;
    let own = module_path(file).join("::");
    let is_foreign = |path: &str| {
        let path = format!("{path}::");
        neighbours.iter().any(|one| *one != own && path.starts_with(&format!("{one}::")))
    };
    let of_tests = module_paths(file, &code, &[])
        .into_iter()
        .filter(|(at, path)| !code[*at..].starts_with("unicorn::") && is_foreign(path));
    let complaint = |(at, path): (usize, String)| {
        let line = line_of(&code, at);
        format!("{file}:{line}: names `{path}` of another test file; move it to tests/support")
    };
    of_tests.map(complaint).collect()
}

/// Applies a rule to the files, of which there must be at least one, and reports all complaints together.
#[track_caller]
fn check(files: &[String], rule: impl Fn(&str, &str) -> Vec<String>) {
    assert!(!files.is_empty(), "nothing to check");
    let complaints: Vec<_> = files.iter().flat_map(|file| rule(file, &read(file))).collect();
    assert_no_complaints(&complaints);
}

#[track_caller]
fn assert_no_complaints(complaints: &[String]) {
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

/// Checks that a rule complains about each of the samples `bad` (file, text, part of the complaint), and about none of
/// the samples `fine`.
#[track_caller]
fn try_samples(rule: impl Fn(&str, &str) -> Vec<String>, bad: &[(&str, &str, &str)], fine: &[(&str, &str)]) {
    for (file, text, part) in bad {
        refused(rule(file, text), part);
    }
    for (file, text) in fine {
        assert_eq!(rule(file, text), [""; 0], "{file}: {text}");
    }
}

#[track_caller]
fn refused(complaints: Vec<String>, part: &str) {
    assert!(
        complaints.iter().any(|c| c.contains(part)),
        "expected a complaint with {part:?}, got {complaints:?}"
    );
}

fn rust_files() -> Vec<String> {
    let mut all = files("src", &[".rs"]);
    all.extend(files("tests", &[".rs"]));
    all.extend(files("benches", &[".rs"]));
    all
}

#[test]
fn modules_import_downward_only() {
    let bad = [
        ("src/gpu/a.rs", "use crate::model::Batch;", "import downward"),
        ("src/text/a.rs", "use crate::{tensor, gpu::Device};", "import downward"),
        ("src/text/mod.rs", "fn f() { super::api::serve() }", "import downward"),
        ("src/kernels/a.rs", "fn f() -> super::super::engine::X {}", "import downward"),
        ("src/api/a.rs", "use crate::{engine, gpu::{self, Device}};", "must not name `gpu::"),
        ("src/cli/chat.rs", "use crate::kernels::X;", "must not name"),
        (
            "src/engine/mod.rs",
            "use crate::model::{B, model_runner::M};",
            "must not name `model::model_runner",
        ),
        ("src/engine/mod.rs", "async fn f() {}", "must not contain `async`"),
        ("src/engine/mod.rs", "tokio::spawn(f());", "must not contain `tokio`"),
        ("src/model/a.rs", "let t = std::time::Instant::now();", "must not contain `Instant`"),
        ("src/config.rs", "std::fs::read_to_string(p)", "must not contain `std::fs`"),
        ("src/strange/mod.rs", "", "no floor"),
    ];
    let fine = [
        ("src/cli/load.rs", "use crate::gpu::Device;"),
        (
            "src/engine/mod.rs",
            "// async, crate::text and tokio are for others\nuse crate::model::{Batch, Runner};",
        ),
        ("src/engine/mod.rs", "use tokio::sync::mpsc;"),
        ("src/engine/mod.rs", "const S: &str = \"tokio\"; use super::model::Batch;"),
        ("src/api/chat.rs", "use super::super::text::Tokenizer; use super::errors::E;"),
    ];
    try_samples(floors, &bad, &fine);
    check(&files("src", &[".rs"]), floors);
}

#[test]
fn no_files_import_each_other_in_a_circle() {
    let complain = |sources: &[(&str, &str)]| {
        let owned = |(file, text): &(&str, &str)| ((*file).to_string(), (*text).to_string());
        circles(&sources.iter().map(owned).collect::<Vec<_>>())
    };
    // Two files; four; over a folder's file; over a re-export, in a tree of several lines; by a path in the code.
    let two = [("src/a.rs", "use crate::b::X;"), ("src/b.rs", "\nfn f() -> super::a::Y {}")];
    refused(complain(&two), "2 files import each other in a circle:\n  src/a.rs:1: names `b::X` of src/b.rs");
    refused(complain(&two), "src/b.rs:2: names `a::Y` of src/a.rs");
    let four = [
        ("src/a.rs", "use unicorn::b;"),
        ("src/b.rs", "use crate::{c::{self, d::Z}, x};"),
        ("src/c.rs", "use crate::a::Y as W;"),
        ("src/c/d.rs", "use crate::a::Y;"),
    ];
    refused(complain(&four), "4 files");
    refused(
        complain(&[("src/r/mod.rs", "mod p;\nuse p::X;\nstruct S;"), ("src/r/p.rs", "use super::S;")]),
        "src/r/mod.rs:2: names `r::p::X` of src/r/p.rs\n  src/r/p.rs:1: names `r::S` of src/r/mod.rs",
    );
    let room = "mod p;\nmod q;\npub use p::X;\npub(crate) use q::{\n    Y,\n    Z as W,\n};\n";
    let exported = [
        ("src/r/mod.rs", room),
        ("src/r/p.rs", "use super::{\n    Y,\n};\nstruct X;"),
        ("src/r/q.rs", "struct Y;\nfn f() { crate::r::X::new() }"),
    ];
    refused(complain(&exported), "src/r/q.rs:2: names `r::X::new` of src/r/p.rs");
    for all in ["use super::f;", "use super::*;", "use crate::r::{\n    *\n};"] {
        refused(complain(&[("src/r/mod.rs", "fn f() { p::g() }"), ("src/r/p.rs", all)]), "2 files");
    }

    // No import: a re-export alone, tests, comments, strings, where an item may be seen.
    for fine in [
        [("src/r/mod.rs", "pub use p::X;"), ("src/r/p.rs", "use super::X;")],
        [
            ("src/a.rs", "use crate::b::X;"),
            ("src/b.rs", "#[cfg(test)]\npub(in crate::b) mod tests { use crate::a::Y; }"),
        ],
        [
            ("src/a.rs", "use crate::b::X;"),
            ("src/b.rs", "/// [`crate::a::Y`]\nconst A: &str = \"crate::a::Y\";"),
        ],
        [("src/r/mod.rs", "mod p; use p::X;"), ("src/r/p.rs", "pub(in crate::r) fn f() {}")],
        [("src/a.rs", "use crate::b::X;"), ("src/b.rs", "use std::a::Y; fn f() { self::g() }")],
    ] {
        assert_eq!(complain(&fine), [""; 0]);
    }

    let all = files("src", &[".rs"]).into_iter().map(|file| (file.clone(), read(&file)));
    assert_no_complaints(&circles(&all.collect::<Vec<_>>()));
}

#[test]
fn test_files_share_nothing_but_support() {
    let neighbours = BTreeSet::from(["model::demo", "model::golden", "model::tune"].map(String::from));
    let demo = "tests/model/demo.rs";
    let (move_it, app) = ("move it to tests/support", "tests/support/app.rs");
    let bad = [
        (demo, "use crate::model::golden::load;", move_it),
        (demo, "use crate::{support, model::tune};", move_it),
        (demo, "use super::golden;", move_it),
        (demo, "fn f() { crate::model::golden::load() }", move_it),
        (app, "use crate::model::tune::f;", "another test file"),
        (app, "use super::super::model::golden;", "another test file"),
    ];
    let fine = [
        (demo, "use crate::support::goldens::load;"),
        (demo, "mod tests { use crate::model::demo::f; }"),
        (demo, "use super::goldens::load;"),
        (demo, "use unicorn::model::golden::Hub;"),
        (demo, "// crate::model::golden"),
    ];
    try_samples(|file, text| fixtures_stand_in_support(file, text, &neighbours), &bad, &fine);
    let all = files("tests", &[".rs"]);
    let neighbours: BTreeSet<String> = all
        .iter()
        .filter_map(|file| Some(file.strip_prefix("tests/")?.strip_suffix(".rs")?.replace('/', "::")))
        .filter(|module| !module.starts_with("support::") && !module.ends_with("::mod"))
        .collect();
    assert!(neighbours.contains("house::tidy"), "{neighbours:?}");
    check(&all, |file, source| fixtures_stand_in_support(file, source, &neighbours));
}

#[test]
fn vulkan_crates_are_named_in_gpu_only() {
    let bad = [
        ("src/model/a.rs", "use ash::vk;", "src/gpu only"),
        ("src/kernels/a.rs", "fn f(d: ash::vk::Buffer) {}", "src/gpu only"),
    ];
    let fine = [("src/model/a.rs", "// ash::vk\nfn hash() {} fn f() { hash::x() }")];
    try_samples(vulkan_stays_in_gpu, &bad, &fine);
    check(&files("src", &[".rs"]), vulkan_stays_in_gpu);
}

#[test]
fn anyhow_is_for_the_binary() {
    refused(anyhow_stays_in_the_binary("src/text/a.rs", "fn f() -> anyhow::Result<()> {}"), "own error type");
    check(&files("src", &[".rs"]), anyhow_stays_in_the_binary);
}

#[test]
fn unsafe_stands_where_it_may_and_says_why() {
    refused(unsafe_has_its_place("src/model/a.rs", "unsafe { f() }"), "unsafe belongs");
    let bare = [
        "fn f() {\n    unsafe { g() }\n}",
        "// SAFETY: far away.\nlet a = 1;\nlet b = unsafe { g() };",
        "// SAFETY: of something else.\n\nunsafe impl Send for X {}",
        "/// A function.\npub unsafe fn f() {}",
        "let s = \"SAFETY: in a string\"; unsafe { g() }",
    ];
    let fine = [
        "// SAFETY: the handle is live,\n// as `self` holds it.\nlet b = unsafe { g() };",
        "// SAFETY: live.\nlet b = object\n    .call(|x| unsafe { g(x) });",
        "unsafe { g() } // SAFETY: live.",
        "/// A function.\n/// # Safety\n/// The pointer is live.\n#[inline]\npub unsafe fn f() {}",
        "// unsafe is only a word here",
    ];
    let file = "src/gpu/a.rs";
    let bare = bare.map(|text| (file, text, "without a SAFETY"));
    try_samples(unsafe_says_why, &bare, &fine.map(|text| (file, text)));
    check(&files("src", &[".rs"]), unsafe_has_its_place);
    check(&rust_files(), unsafe_says_why);
}

#[test]
fn every_file_says_what_it_is_for() {
    let bad = [("src/a.rs", "use std::fs;\n", "starts without"), ("src/a.rs", "//! A.\n", "starts without")];
    try_samples(header_says_what_it_is, &bad, &[]);
    check(&rust_files(), header_says_what_it_is);
}

#[test]
fn nothing_is_left_unfinished() {
    let bad = [
        ("a.rs", "fn f() { todo!() }", "unfinished"),
        ("a.rs", "fn f() { unimplemented!(\"later\") }", "unfinished"),
        ("a.rs", "dbg!(x);", "unfinished"),
        ("a.rs", concat!("// FIX", "ME: later"), "unfinished"),
        ("a.rs", concat!("/* TO", "DO */"), "unfinished"),
        ("a.rs", "#[ignore = \"slow\"]\n#[test]\nfn f() {}", "support::skip"),
    ];
    try_samples(nothing_unfinished, &bad, &[("a.rs", "let s = \"todo!()\"; let todo = 1;")]);
    check(&rust_files(), nothing_unfinished);
}

#[test]
fn durations_are_of_a_clock_that_nobody_sets() {
    let counted = [
        "uptime: unix_time_s().saturating_sub(created),",
        "if unix_time_s() > at {}",
        "let age = until - unix_time_s();",
        "let age = SystemTime::now().duration_since(begun);",
    ];
    let told = "created: unix_time_s(), x(unix_time_s()); SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, f); \
         file.set_modified(SystemTime::now())";
    let counted = counted.map(|code| ("a.rs", code, "take an Instant"));
    try_samples(dates_are_told_and_not_counted, &counted, &[("a.rs", told)]);
    check(&files("src", &[".rs"]), dates_are_told_and_not_counted);
}

#[test]
fn test_names_have_at_most_80_characters() {
    let long = format!("#[test]\nfn {}() {{}}", "x".repeat(TEST_NAME_CHARACTERS + 1));
    let fine = format!("#[tokio::test]\nasync fn {}() {{}}", "x".repeat(TEST_NAME_CHARACTERS));
    try_samples(test_names_are_short, &[("a.rs", &long, "a.rs:2: 81 characters")], &[("a.rs", &fine)]);
    check(&rust_files(), test_names_are_short);
}

#[test]
fn an_architecture_is_named_only_in_its_folders() {
    let bad = [("src/model/a.rs", "// as Gemma-3 does", "outside of its folder")];
    let fine = [
        ("src/model/a.rs", "// as the model does"),
        ("src/model/a.rs", "fn f() {}\n#[cfg(test)]\nmod tests { const A: &str = \"gemma\"; }"),
        ("src/model/gemma3/a.rs", "// Gemma"),
    ];
    try_samples(architectures_stay_in_their_folders, &bad, &fine);
    check(&files("src", &[".rs"]), architectures_stay_in_their_folders);
}

#[test]
fn modules_are_named_after_what_they_do() {
    let bad = [("src/utils.rs", "", "name a module"), ("src/gpu/common/mod.rs", "", "name a module")];
    try_samples(names_say_something, &bad, &[]);
    check(&files("src", &[".rs"]), names_say_something);
}

#[test]
fn the_project_speaks_of_itself() {
    let bad = [
        ("a.md", concat!("see /ho", "me/someone/x"), "one machine"),
        ("a.sh", concat!("curl https://registry.", "npmjs.org/x"), "one registry"),
    ];
    try_samples(speaks_of_itself, &bad, &[("a.md", "network/ and ~/models are fine")]);
    let mut all = files(
        "",
        &[".rs", ".md", ".toml", ".py", ".sh", ".comp", ".glsl", ".txt", ".json", "Makefile", "run"],
    );
    // Vocabularies and corpora hold whatever text they were made from.
    all.retain(|file| !file.starts_with("tests/data/") && !file.starts_with("models/"));
    check(&all, speaks_of_itself);
}

#[test]
fn dependencies_come_from_the_public_index() {
    let foreign = |text: &str| {
        let public = "source = \"registry+https://github.com/rust-lang/crates.io-index\"";
        text.lines()
            .filter(|line| line.starts_with("source = ") && *line != public)
            .map(String::from)
            .collect::<Vec<_>>()
    };
    refused(foreign("source = \"git+https://example.org/x\""), "example.org");
    assert_eq!(foreign(&read("Cargo.lock")), [""; 0]);
}

#[test]
fn every_shader_says_what_it_computes() {
    let bad = [("shaders/a.comp", "#version 460\nlayout(local_size_x = 64) in;\n", "starts without")];
    let fine = [("a.comp", "#version 460\n// y[rows] = W[rows, k] * x[k].\n")];
    try_samples(shader_has_a_header, &bad, &fine);
    check(&files("shaders", &[".comp", ".glsl"]), shader_has_a_header);
}

#[test]
fn the_walks_of_the_architecture_step_through_functions_that_exist() {
    let walk = |steps: &str| format!("x\n## Three walks\n\n{}\n## Next\n1. `b.rs:g`\n", steps.repeat(3));
    let source = |file: &str| (file == "a.rs").then(|| "pub async fn f<T>() {} // fn g".to_owned());
    assert_eq!(walks(&walk("1. `a.rs:f` does.\n2. `a.rs:f` does.\n"), source), [""; 0]);
    refused(walks(&walk("1. `a.rs:g` does.\n"), source), "a.rs:g, which is no function");
    refused(walks(&walk("1. `b.rs:f` does.\n"), source), "b.rs:f, which is no function");
    refused(
        walks(&walk("1. `a.rs:f` does.\n3. `a.rs:f` does.\n"), source),
        "step 3 of a walk does not follow",
    );
    refused(walks("## Nothing", source), "there are 0 walks");

    assert_no_complaints(&walks(&read("docs/architecture.md"), |file| {
        fs::read_to_string(root().join(file)).ok()
    }));
}

#[test]
fn links_lead_somewhere() {
    let files_there =
        |path: &Path| (path == Path::new("docs/b.md")).then(|| "# The one, heading\n".to_string());
    let bad = [("docs/a.md", "see [b](c.md)", "not there"), ("docs/a.md", "see [b](b.md#other)", "heading")];
    let fine = [
        ("README.md", "[b](docs/b.md#the-one-heading) [c](https://x.example)"),
        ("docs/a.md", "[b](../docs/b.md)\n```\n[x](nowhere)\n```"),
    ];
    try_samples(|file, text| dead_links(file, text, files_there), &bad, &fine);
    let there = |path: &Path| {
        let path = root().join(path);
        if path.is_dir() {
            Some(String::new())
        } else {
            fs::read(path).ok().map(|b| String::from_utf8_lossy(&b).into())
        }
    };
    check(&files("", &[".md"]), |file, text| dead_links(file, text, there));
}

#[test]
fn the_demo_model_stays_small() {
    let all = files("models/demo", &[""]);
    let bytes: u64 = all.iter().map(|file| fs::metadata(root().join(file)).unwrap().len()).sum();
    assert!(bytes <= DEMO_MODEL_BYTES, "models/demo holds {bytes} bytes, {DEMO_MODEL_BYTES} are allowed");
    for part in ["config.json", "model.safetensors", "tokenizer.json"] {
        assert!(all.iter().any(|file| file.ends_with(part)), "models/demo has no {part}");
    }
}

#[test]
fn the_reader_of_rust_tells_code_from_comments_and_literals() {
    let source = "let a = 'x'; // one\nlet b: &'a str = r#\"two \"quoted\" // no\"#; /* three /* nested */ */ let c = b'\\''; d";
    let Layers { code, comments } = layers(source);
    assert!(code.contains("let a =") && code.contains("&'a str") && code.trim_end().ends_with('d'), "{code}");
    assert!(
        ["one", "two", "three", "nested", "no", "x"].iter().all(|word| find_word(&code, word).is_empty()),
        "{code}"
    );
    assert!(
        comments.contains("one") && comments.contains("three") && !comments.contains("two"),
        "{comments}"
    );
    assert_eq!(code.lines().count(), source.lines().count());
    let paths = |code: &str| -> Vec<String> {
        module_paths("src/api/a.rs", code, &[]).into_iter().map(|(_, path)| path).collect()
    };
    assert_eq!(paths("use crate::{a::{self, b as c}, d::*, e};"), ["a::self", "a::b", "d", "e"]);
    assert_eq!(paths("crate::a::b(crate::c::D::new())"), ["a::b", "c::D::new"]);
}
