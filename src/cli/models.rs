//! `unicorn models`: lists and removes pulled models, and finds the files of a model by its name.
//!
//! It looks in `models.dir` and in the cache that tools of the Hugging Face hub share. The network is not used.

use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::path::Path;

use serde_json::json;

#[cfg(feature = "npu")]
use super::args::Npu;
use super::args::{Benchmark, Command, ConfigCommand, Eval, EvalLogits, EvalPerplexity};
use super::error::Error;
use super::terminal::{bytes, print};
use super::{log, names};
use crate::config::{Config, ServedModel};
use crate::hub::{Cache, HubError, ModelName, standard_cache};
use crate::model::arch;
use crate::text::visible;

/// The cache that `unicorn pull` writes to.
pub fn cache_to_pull_to(config: &Config) -> Result<Cache, Error> {
    caches(config).into_iter().next().ok_or_else(|| {
        Error::Argument(
            "no folder for models, because HOME is not set; set one with --models-dir or HF_HUB_CACHE".into(),
        )
    })
}

/// Prints the files to choose from. Call this before the error is printed.
pub fn show_choice(error: &HubError) {
    if let HubError::Choose { name, files, .. } = error {
        for (file, size) in files {
            let size = size.map_or("unknown size".into(), bytes);
            log::say(format_args!("{size:>12}  {}", name.with_file(file)));
        }
    }
}

/// The caches in which pulled models are looked for.
pub fn caches(config: &Config) -> Vec<Cache> {
    let own = config.models.dir.as_ref().map(Cache::system);
    let standard = standard_cache(|name| std::env::var_os(name)).map(Cache::of_user);
    let mut all: Vec<Cache> = own.into_iter().chain(standard).collect();
    all.dedup_by(|b, a| a.root() == b.root());
    all
}

/// Replaces the names of the command's model and draft with the paths of the pulled models. Paths do not change.
pub fn locate(config: &mut Config, command: &mut Command) -> Result<(), Error> {
    // The model and the draft that the arguments name.
    let (model, draft) = match command {
        Command::Plan(args) => (args.planned.model.as_mut(), args.planned.draft.as_mut()),
        Command::Inspect(args) => (Some(&mut args.model), None),
        // These commands and the benchmark of the NPU use no draft.
        Command::Eval(
            Eval::Logits(EvalLogits { evaluated, .. }) | Eval::Perplexity(EvalPerplexity { evaluated, .. }),
        ) => {
            config.model.draft = None;
            (Some(&mut evaluated.model), None)
        }
        Command::Quantize(args) => {
            config.model.draft = None;
            (Some(&mut args.source), None)
        }
        #[cfg(feature = "npu")]
        Command::Npu(Npu::BuildKernels(args)) => (args.model.as_mut(), None),
        // This benchmark uses the model of a running server.
        Command::Bench(args) if matches!(args.what, Some(Benchmark::Serve(_))) => return Ok(()),
        Command::Bench(args) if matches!(args.what, Some(Benchmark::Npu(_))) => {
            config.model.draft = None;
            return locate_configured(config);
        }
        Command::Serve(_)
        | Command::Generate(_)
        | Command::Chat(_)
        | Command::Bench(_)
        | Command::Config(ConfigCommand::Check(_)) => {
            return locate_served(config);
        }
        // Doctor itself reports a model that was not pulled.
        _ => return Ok(()),
    };
    let caches = caches(config);
    draft.into_iter().chain(model).try_for_each(|text| find(&caches, text).map(drop))
}

/// The models that the configuration lists, each with its options, in which paths replace the names of pulled models.
pub fn listed(config: &Config) -> Result<Vec<(&ServedModel, Config)>, Error> {
    let each = config.models.serve.iter().enumerate().map(|(i, served)| {
        let at = |problem| Error::Argument(format!("models.serve, number {}: {problem}", i + 1));
        let mut config = config.of_model(served).map_err(at)?;
        locate_served(&mut config)?;
        Ok((served, config))
    });
    each.collect()
}

/// Replaces the names of one of several models and of its draft with the paths of the pulled models.
pub fn locate_served(config: &mut Config) -> Result<(), Error> {
    let caches = caches(config);
    config.model.draft.as_mut().map(|text| find(&caches, text)).transpose()?;
    locate_configured(config)
}

/// Replaces the name of the configured model with the path of the pulled model.
pub fn locate_configured(config: &mut Config) -> Result<(), Error> {
    let Some(mut text) = config.model.path.take() else { return Ok(()) };
    // The folder of a snapshot is named after a commit, so the model gets the name of the repository.
    let name = find(&caches(config), &mut text)?.map(|name| name.repo.name().to_owned());
    config.model.name = config.model.name.take().or(name);
    config.model.path = Some(text);
    Ok(())
}

/// The error for a text that is neither a path nor `ORG/NAME`. Other programs have such names (`llama3`).
fn not_a_model(caches: &[Cache], text: &str) -> Error {
    const SHOWN: usize = 8;
    // A cache that cannot be read is skipped: the error about the name is more useful.
    let pulled: Vec<String> =
        caches.iter().filter_map(|cache| cache.list().ok()).flatten().map(|m| m.name.to_string()).collect();
    let more = if pulled.len() > SHOWN { " and more (`unicorn models list`)" } else { "" };
    let shorts: Vec<&str> = arch::short_names().map(|(short, _)| short).collect();
    let here = match pulled.is_empty() {
        true => "no model was pulled".to_owned(),
        false => format!("pulled models are {}{more}", pulled[..pulled.len().min(SHOWN)].join(", ")),
    };
    Error::Argument(format!(
        "{text}: there is no such file or folder, and a model of the hub has a name like ORG/NAME; {here}; \
         `unicorn pull ORG/NAME` downloads one, for example {}; short names are {}",
        arch::hub_example(),
        shorts.join(", ")
    ))
}

/// Replaces `text`, the name of a pulled model, with the model's path in the first of `caches` that has it. Returns
/// `None` and changes nothing if `text` is a path.
pub fn find(caches: &[Cache], text: &mut String) -> Result<Option<ModelName>, Error> {
    if Path::new(&text).exists() {
        return Ok(None);
    }
    let Ok(name) = names::read_name(text) else {
        let is_path = text.contains('/') || text.ends_with(".gguf");
        return if is_path { Ok(None) } else { Err(not_a_model(caches, text)) };
    };
    let mut partial = None;
    for cache in caches {
        match cache.find(&name) {
            Ok(Some(path)) => {
                *text = path.into_os_string().into_string().map_err(|path| {
                    Error::Argument(format!("{}: the path of a model must be UTF-8", path.display()))
                })?;
                return Ok(Some(name));
            }
            Ok(None) => {}
            // Another cache may have the complete model.
            Err(error @ HubError::Partial { .. }) => partial = partial.or(Some(error)),
            Err(error) => {
                show_choice(&error);
                return Err(error.into());
            }
        }
    }
    let roots = caches.iter().map(|c| c.root().to_path_buf()).collect();
    Err(partial.unwrap_or(HubError::NotPulled { name, roots }).into())
}

pub fn list(config: &Config, json: bool) -> Result<(), Error> {
    let mut all = Vec::new();
    for cache in caches(config) {
        all.extend(cache.list()?);
    }
    if json {
        let rows: Vec<_> = all
            .iter()
            .map(|m| {
                let name = m.name.to_string();
                json!({"name": name, "format": m.format.to_string(), "bytes": m.bytes, "path": m.path.display().to_string()})
            })
            .collect();
        return print(&format!("{}\n", serde_json::Value::from(rows)));
    }
    if all.is_empty() {
        return print("no models were pulled; download one with `unicorn pull ORG/NAME`\n");
    }
    let names: Vec<String> = all.iter().map(|m| m.name.to_string()).collect();
    let width = names.iter().map(String::len).max().unwrap_or(0);
    let row = |(name, m): (&String, &crate::hub::Pulled)| {
        let size = bytes(m.bytes);
        format!("{name:<width$}  {:<11}  {size:>10}  {}\n", m.format, m.path.display())
    };
    print(&visible(&names.iter().zip(&all).map(row).collect::<String>()))
}

pub fn remove(config: &Config, name: &ModelName, yes: bool) -> Result<(), Error> {
    let caches = caches(config);
    for cache in &caches {
        let Some(removal) = cache.removal(name)? else { continue };
        let what = format!("{name}, {} in {}", bytes(removal.bytes), cache.root().display());
        if !yes && !confirm(&format!("remove {what}"))? {
            return Err(Error::Argument(format!("{name} was not removed")));
        }
        removal.apply()?;
        log::say(format_args!("removed {what}"));
        return Ok(());
    }
    Err(Error::Argument(format!(
        "{name}: no such model was pulled; `unicorn models list` shows the pulled models"
    )))
}

/// Asks whether to do something, such as `remove X`.
pub fn confirm(what: &str) -> Result<bool, Error> {
    let input = std::io::stdin();
    if !input.is_terminal() {
        return Err(Error::Argument(format!("{what}? This needs a confirmation; add --yes")));
    }
    let mut question = std::io::stderr();
    write!(question, "{what}? [y/N] ").and_then(|()| question.flush()).map_err(Error::Output)?;
    let mut answer = String::new();
    input.lock().read_line(&mut answer).map_err(|error| Error::Terminal(error.into()))?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
