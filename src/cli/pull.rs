//! Downloads a model from the Hugging Face hub into a folder of this machine, for `unicorn pull` and `unicorn run`.
//!
//! Progress is shown only on a terminal.

use std::path::PathBuf;

use super::error::Error;
use super::models;
use super::progress::Bar;
use crate::config::Config;
use crate::hub::{self, ModelName, Progress, Settings};

/// Pulls a model, and returns its path.
pub fn pull(config: &Config, name: &ModelName) -> Result<PathBuf, Error> {
    let settings = Settings::from_environment(|name| std::env::var_os(name))?;
    let cache = models::cache_to_pull_to(config)?;
    let bar = Bar::bytes(name.to_string());
    let pulled = hub::pull(&settings, &cache, name, &mut |progress| {
        match progress {
            Progress::Start { total, here } => {
                bar.set_total(total);
                bar.skip(here);
            }
            Progress::File { path, .. } => bar.say(path),
            Progress::Done { bytes, .. } => bar.set(bytes),
        }
        true
    });
    drop(bar);
    pulled.map_err(|error| {
        models::show_choice(&error);
        error.into()
    })
}
