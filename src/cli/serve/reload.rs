//! SIGHUP: a running server reads its configuration, keys and certificate again.
//!
//! If one of them is wrong, nothing changes, and the log shows the error. The log also names changed options that take
//! effect only after a restart. A server with several models serves the new list of models: those whose entries did not
//! change stay as they are.
//!
//! The files may be on a mount that does not answer. So a separate thread reads them, and the server stops waiting for
//! it after a time limit. Each signal starts a new reading. The late result of an abandoned reading is discarded,
//! because the files of a later signal may be in effect already.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use tokio::signal::unix::Signal;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::super::configuration::Configured;
use super::super::error::Error;
use super::auth::{access_policy, check_keyless};
use super::courtesy::CourtesyWatch;
use super::models::{Catalogue, NewList, is_of_several};
use crate::api::{AccessPolicy, Server, Tls};
use crate::config::Config;

/// How long the reading of all files may take.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of abandoned readings that still run. Each occupies a thread.
const MAX_HUNG: usize = 8;

/// Options that take effect in a running server; `config/default.toml` marks them.
pub const LIVE: [&str; 12] = [
    "engine.courtesy",
    "log.level",
    "models.pulled",
    "models.serve",
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
type Reread = dyn Fn() -> Result<Configured, Error> + Send + Sync;

/// Callbacks of a reload.
pub struct Reload {
    pub reread: Arc<Reread>,
    /// Applies the log level of a configuration. Returns the log filter as text.
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
    pub catalogue: Arc<Catalogue>,
    pub courtesy: CourtesyWatch,
}

/// The contents of the files, which are not in effect yet.
struct NewFiles {
    configured: Configured,
    access: AccessPolicy,
    tls: Option<Tls>,
    /// The models of a server with several.
    models: Option<NewList>,
}

impl Running {
    /// Reads the configuration again at each signal.
    pub async fn reload_on(mut self, mut hangup: Signal) {
        let readings = Readings::default();
        while hangup.recv().await.is_some() {
            let (reread, has_tls) = (Arc::clone(&self.reload.reread), self.tls.is_some());
            let catalogue = self.server.library().is_shared().then(|| Arc::clone(&self.catalogue));
            let read = move |step: &Step| read(&*reread, has_tls, catalogue.as_deref(), step);
            let new_files = readings.read(READ_TIMEOUT, read).await;
            // A blocking thread, because the device process may be slow to accept its log filter.
            let reloaded = tokio::task::spawn_blocking(move || {
                match new_files.and_then(|new_files| self.apply(new_files)) {
                    Ok(()) => tracing::info!("read the configuration again"),
                    Err(error) => tracing::warn!("{error}: the configuration stays unchanged"),
                }
                self
            });
            match reloaded.await {
                Ok(running) => self = running,
                Err(error) => {
                    return tracing::error!("SIGHUP no longer reloads the configuration: {error}");
                }
            }
        }
    }

    fn apply(&mut self, new_files: NewFiles) -> Result<(), Error> {
        let NewFiles { configured: Configured { config, warnings, .. }, access, tls: renewed, models } =
            new_files;
        check_keyless(self.address, access.keys.is_empty(), &config.server)?;
        let has_new_list = models.is_some();
        if let Some(models) = models {
            self.catalogue.follow(self.server.library(), models)?;
        }
        if let (Some(tls), Some(renewed)) = (&self.tls, &renewed) {
            tls.renew(renewed);
        }
        self.server.set_access(access);
        self.server.library().set_queue(config.server.queue);
        self.courtesy.set(config.engine.courtesy);
        let filter = (self.reload.set_log)(&config);
        self.catalogue.set_log_filter(&filter);
        warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        let tls = |config: &Config| config.server.tls_cert.is_some();
        let switched = tls(&config) != tls(&self.config);
        let is_live = |option: &str| {
            let is_late = switched && option.starts_with("server.tls")
                || !has_new_list && option.starts_with("models.");
            LIVE.contains(&option) && !is_late
        };
        for option in self.config.differences(&config).into_iter().filter(|option| !is_live(option)) {
            tracing::warn!("{option} has changed; the change takes effect after a restart of unicorn");
        }
        self.config = config;
        Ok(())
    }
}

/// Reads all files. The certificate is read only if the server uses HTTPS (`has_tls`). A server with several models has a
/// `catalogue`.
fn read(
    reread: &Reread,
    has_tls: bool,
    catalogue: Option<&Catalogue>,
    step: &Step,
) -> Result<NewFiles, Error> {
    step.begin("the configuration");
    let configured = reread()?;
    let options = &configured.config.server;
    step.begin("the API keys");
    let access = access_policy(options)?;
    step.begin("the certificate and its key");
    let tls = match (&options.tls_cert, &options.tls_key) {
        (Some(cert), Some(key)) if has_tls => Some(Tls::read(cert.as_ref(), key.as_ref())?),
        _ => None,
    };
    let catalogue = catalogue.filter(|_| is_of_several(&configured.config));
    let models = catalogue.map(|catalogue| {
        step.begin("the models");
        catalogue.read(&configured.config)
    });
    Ok(NewFiles { configured, access, tls, models: models.transpose()? })
}

/// What a reading reads at the moment, for the error message about a reading that hangs.
#[derive(Default)]
struct Step(Mutex<&'static str>);

impl Step {
    fn begin(&self, what: &'static str) {
        *self.0.lock().expect("nothing panics under this lock") = what;
    }

    fn what(&self) -> &'static str {
        *self.0.lock().expect("nothing panics under this lock")
    }
}

/// Starts readings, each in its own thread. A thread of the runtime would delay the end of the server.
#[derive(Default)]
struct Readings(
    /// Each running reading holds a clone, so the reference count is the number of readings plus one.
    Arc<()>,
);

impl Readings {
    /// Runs `read` in a new thread, and waits `patience` for its result.
    async fn read<T: Send + 'static>(
        &self,
        patience: Duration,
        read: impl FnOnce(&Step) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let hung = Arc::strong_count(&self.0) - 1;
        if hung >= MAX_HUNG {
            return Err(Error::TooManyReloads(hung));
        }
        let (done, result) = oneshot::channel();
        let step = Arc::new(Step::default());
        let (held, of_reader) = (Arc::clone(&self.0), Arc::clone(&step));
        let reader = move || {
            let result = read(&of_reader);
            drop(held);
            drop(done.send(result));
        };
        thread::Builder::new().name("reload".into()).spawn(reader).map_err(Error::Runtime)?;
        match timeout(patience, result).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(Error::Panicked),
            Err(_) => Err(Error::ReloadTimeout { what: step.what(), seconds: patience.as_secs() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::config::DEFAULT_TOML;

    /// As on a mount that does not answer: the reading of one signal hangs, and those of later signals do not.
    #[tokio::test]
    async fn a_hanging_reading_is_reported_and_does_not_block_later_ones() {
        const BRIEF: Duration = Duration::from_millis(20);
        const LONG: Duration = Duration::from_secs(60);
        let readings = Readings::default();
        let (mut ends, mut releases) = (Vec::new(), Vec::new());
        for n in 0..MAX_HUNG {
            let (release, wait) = mpsc::channel::<()>();
            let (gone, ended) = mpsc::channel::<()>();
            let hangs = move |step: &Step| {
                step.begin("the API keys");
                let _ = wait.recv();
                drop(gone);
                Ok(())
            };
            let error = readings.read(BRIEF, hangs).await.unwrap_err().to_string();
            assert!(error.contains("the API keys"), "{error}");
            releases.push(release);
            ends.push(ended);
            if n + 1 < MAX_HUNG {
                assert_eq!(readings.read(LONG, move |_| Ok(n)).await.unwrap(), n);
            }
        }
        let refused = readings.read(LONG, |_| Ok(())).await.unwrap_err();
        assert!(matches!(refused, Error::TooManyReloads(MAX_HUNG)), "{refused}");
        drop(releases);
        for ended in ends {
            ended.recv().expect_err("the reading ends, and sends nothing");
        }
        while Arc::strong_count(&readings.0) > 1 {
            thread::yield_now();
        }
        readings.read(LONG, |_| Ok(())).await.expect("all readings have ended");
        let panics = readings.read(LONG, |_| -> Result<(), Error> { panic!("as the test wants") }).await;
        assert!(matches!(panics, Err(Error::Panicked)));
    }

    /// In the file, a comment precedes the option or the options that it describes.
    #[test]
    fn the_live_options_are_those_that_the_default_configuration_marks() {
        let (mut section, mut marked, mut after_option) = ("", false, false);
        let mut live = Vec::new();
        for line in DEFAULT_TOML.lines() {
            if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
                (section, marked) = (name, false);
            } else if line.starts_with('#') {
                marked = line.contains("[live]") || marked && !after_option;
                after_option = false;
            } else if let Some((option, _)) = line.split_once(" = ") {
                after_option = true;
                live.extend(marked.then(|| format!("{section}.{option}")));
            }
        }
        live.sort();
        assert_eq!(live, LIVE);
    }
}
