//! SIGHUP: a running server reads its configuration, keys and certificate again.
//!
//! An error in any of them changes nothing, and the log names it. The log also names changed options that do not take
//! effect in a running server, because ignoring a change silently would be worse.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::signal::unix::Signal;

use super::super::configuration::Configured;
use super::super::error::Error;
use super::auth::{access_policy, check_keyless};
use super::courtesy::CourtesyWatch;
use super::device::Observer;
use crate::api::{Server, Tls};
use crate::config::Config;

/// Options that take effect in a running server; `config/default.toml` marks them.
pub const LIVE: [&str; 10] = [
    "engine.courtesy",
    "log.level",
    "server.allow_keyless",
    "server.allowed_hosts",
    "server.api_key_file",
    "server.cors_origins",
    "server.queue",
    "server.requests_per_client",
    "server.tls_cert",
    "server.tls_key",
];

/// Reads the configuration again.
type Reread = dyn Fn() -> Result<Configured, Error> + Send;

/// Callbacks that read the configuration again, and apply its log level, whose filter the latter returns.
pub struct Reload {
    pub reread: Box<Reread>,
    pub set_log: Box<dyn Fn(&Config) -> String + Send>,
}

/// A running server and its present configuration.
pub struct Running {
    pub config: Config,
    pub server: Arc<Server>,
    pub tls: Option<Tls>,
    /// The address that the server listens on.
    pub address: SocketAddr,
    pub reload: Reload,
    /// The device process has a log of its own.
    pub observer: Observer,
    pub courtesy: CourtesyWatch,
}

impl Running {
    /// Reads the configuration again at each signal.
    pub async fn reload_on(mut self, mut hangup: Signal) {
        while hangup.recv().await.is_some() {
            // On a blocking thread, not one that answers: reading files may be slow.
            let reloaded = tokio::task::spawn_blocking(move || {
                match self.reload() {
                    Ok(()) => tracing::info!("read the configuration again"),
                    Err(error) => tracing::warn!("{error}: the configuration stays what it was"),
                }
                self
            });
            match reloaded.await {
                Ok(running) => self = running,
                Err(error) => {
                    return tracing::error!("the configuration is not read again any more: {error}");
                }
            }
        }
    }

    fn reload(&mut self) -> Result<(), Error> {
        let Configured { config, warnings, .. } = (self.reload.reread)()?;
        let access = access_policy(&config.server)?;
        check_keyless(self.address, access.keys.is_empty(), &config.server)?;
        // The certificate comes last of the steps that may fail, since reloading it takes effect at once.
        if let (Some(tls), Some(cert), Some(key)) =
            (&self.tls, &config.server.tls_cert, &config.server.tls_key)
        {
            tls.reload(cert.as_ref(), key.as_ref())?;
        }
        self.server.set_access(access);
        self.server.set_queue(config.server.queue);
        self.courtesy.set(config.engine.courtesy);
        self.observer.set_log_filter((self.reload.set_log)(&config));
        warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        let tls = |config: &Config| config.server.tls_cert.is_some();
        let switched = tls(&config) != tls(&self.config);
        let is_live =
            |option: &str| LIVE.contains(&option) && !(switched && option.starts_with("server.tls"));
        for option in self.config.differences(&config).into_iter().filter(|option| !is_live(option)) {
            tracing::warn!("{option} has changed, and takes effect when unicorn is started again");
        }
        self.config = config;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DEFAULT_TOML;

    /// In the file a comment stands before the options that it describes, one or several.
    #[test]
    fn the_options_that_the_defaults_mark_are_those_that_take_effect() {
        let (mut section, mut marked, mut behind) = ("", false, false);
        let mut live = Vec::new();
        for line in DEFAULT_TOML.lines() {
            if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
                (section, marked) = (name, false);
            } else if line.starts_with('#') {
                marked = line.contains("[live]") || marked && !behind;
                behind = false;
            } else if let Some((option, _)) = line.split_once(" = ") {
                behind = true;
                live.extend(marked.then(|| format!("{section}.{option}")));
            }
        }
        live.sort();
        assert_eq!(live, LIVE);
    }
}
