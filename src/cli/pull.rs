//! `unicorn pull`: downloads a model from the Hugging Face hub.
//!
//! The output is the model's path. Progress is shown only on a terminal.

use super::error::Error;
use super::models;
use super::progress::Bar;
use super::terminal::print;
use crate::config::Config;
use crate::hub::{self, ModelName, Progress, Settings};

pub fn pull(config: &Config, name: &ModelName) -> Result<(), Error> {
    let settings = Settings::from_environment(|name| std::env::var_os(name))?;
    let cache = models::cache_to_pull_to(config)?;
    let bar = Bar::bytes(name.to_string());
    let pulled = hub::pull(&settings, &cache, name, &mut |progress| match progress {
        Progress::Start { total, here } => {
            bar.set_total(total);
            bar.skip(here);
        }
        Progress::File { path } => bar.say(path),
        Progress::Done { bytes } => bar.set(bytes),
    });
    drop(bar);
    match pulled {
        Ok(path) => print(&format!("{}\n", path.display())),
        Err(error) => {
            models::show_choice(&error);
            Err(error.into())
        }
    }
}
