//! `unicorn config`: checks and shows the configuration.

use std::net::ToSocketAddrs as _;

use super::args::ConfigCommand;
use super::configuration::Configured;
use super::error::Error;
use super::serve;
use super::terminal::print;
use crate::kv_disk::check_folder;

/// `unicorn config check` and `unicorn config show`.
pub fn config(configured: &Configured, command: &ConfigCommand) -> Result<(), Error> {
    match command {
        ConfigCommand::Check(_) => check(configured),
        ConfigCommand::Show(_) => print(&configured.config.describe(&configured.layers)),
    }
}

/// Does the checks of `serve` before it loads the model, except those that fail while another server runs on the
/// address or in the folder of conversations.
fn check(configured: &Configured) -> Result<(), Error> {
    let config = &configured.config;
    let (host, port) = (config.server.host.as_str(), config.server.port);
    let unusable = |error| Error::Listen { host: host.to_owned(), port, error };
    let addresses: Vec<_> = (host, port).to_socket_addrs().map_err(unusable)?.collect();
    let keys = serve::check(&config.server, &addresses)?;
    config.kv_disk.path.as_ref().map_or(Ok(()), |path| check_folder(path.as_ref()))?;
    let models = serve::check_models(config)?;
    let key_count = match keys {
        0 => "no API key is required".to_owned(),
        keys => format!("API keys: {keys}"),
    };
    print(&format!(
        "the configuration is good\n   files   {}\n   listens {host}, port {port}; {key_count}\n   model   {}\n",
        configured.sources(),
        models,
    ))
}
