//! The runner, and the factory that starts another runner after a loss or an unload.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use super::request::KeepAlive;
use crate::config::Courtesy;
use crate::model::{Limits, Runner, RunnerError, RunnerFactory};

/// The device does not recover if it is lost twice within this time and no sequence explains the losses.
const LOSS_WINDOW: Duration = Duration::from_secs(60);

pub(super) struct SupervisedRunner {
    /// `None` while the model is unloaded or is being loaded.
    runner: Option<Box<dyn Runner>>,
    factory: Option<Box<dyn RunnerFactory>>,
    /// How long the engine must be idle before it unloads the model, after a request without `keep_alive`. `None` = never.
    idle_unload: Option<Duration>,
    /// The `keep_alive` of the last request or command.
    keep_alive: KeepAlive,
    limits: Limits,
    has_draft: bool,
    /// The courtesy that was last set on the current runner.
    courtesy: Courtesy,
    /// When the device was last lost and no sequence explained the loss.
    last_unexplained_loss: Option<Instant>,
}

impl SupervisedRunner {
    pub(super) fn new(
        runner: Box<dyn Runner>,
        factory: Option<Box<dyn RunnerFactory>>,
        idle_unload: Option<Duration>,
    ) -> Self {
        let (limits, has_draft) = (runner.limits().clone(), runner.has_draft());
        Self {
            runner: Some(runner),
            factory,
            idle_unload,
            keep_alive: KeepAlive::Configured,
            limits,
            has_draft,
            courtesy: Courtesy::NONE,
            last_unexplained_loss: None,
        }
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(super) fn has_draft(&self) -> bool {
        self.has_draft
    }

    /// The runner. Panics if the model is not loaded.
    pub(super) fn loaded(&mut self) -> &mut dyn Runner {
        &mut **self.runner.as_mut().expect("the model is loaded")
    }

    /// Sets the share of the device's time that the runner may take. Returns whether the share changed. Panics if the
    /// model is not loaded.
    pub(super) fn set_courtesy(&mut self, courtesy: Courtesy) -> Result<bool, RunnerError> {
        if self.courtesy == courtesy {
            return Ok(false);
        }
        self.loaded().set_courtesy(courtesy)?;
        self.courtesy = courtesy;
        Ok(true)
    }

    pub(super) fn is_loaded(&self) -> bool {
        self.runner.is_some()
    }

    /// How long the engine must be idle before it unloads the model. `None` = never.
    pub(super) fn idle_unload(&self) -> Option<Duration> {
        let wanted = match self.keep_alive {
            KeepAlive::Configured => self.idle_unload,
            KeepAlive::For(time) => Some(time),
            KeepAlive::Forever => None,
        };
        wanted.filter(|_| self.runner.is_some() && self.factory.is_some())
    }

    /// Changes what [`Self::idle_unload`] returns, until the next request.
    pub(super) fn set_keep_alive(&mut self, keep_alive: KeepAlive) {
        self.keep_alive = keep_alive;
    }

    /// Drops the runner, which frees the model's memory on the device.
    pub(super) fn unload(&mut self) {
        self.runner = None;
    }

    /// The last loss has an explanation after all.
    pub(super) fn explain_last_loss(&mut self) {
        self.last_unexplained_loss = None;
    }

    /// Whether another runner may be started after a loss. `explained`: whether sequences caused the loss.
    pub(super) fn may_recover(&mut self, explained: bool) -> bool {
        let now = Instant::now();
        let too_soon = self.last_unexplained_loss.is_some_and(|before| now - before < LOSS_WINDOW);
        if !explained {
            self.last_unexplained_loss = Some(now);
        }
        self.factory.is_some() && (explained || !too_soon)
    }

    /// Replaces the runner with a new one.
    pub(super) fn start(&mut self, cancelled: &Arc<AtomicBool>) -> Result<(), RunnerError> {
        // The old runner is dropped first, because two runners would need twice the memory.
        self.runner = None;
        let factory = self.factory.as_mut().expect("runners are replaced only if there is a factory");
        let runner = factory.start(cancelled)?;
        let (limits, expected) = (runner.limits(), &self.limits);
        if limits != expected || runner.has_draft() != self.has_draft {
            return Err(RunnerError::Lost(format!(
                "the reloaded model is not the same: expected {expected:?}, got {limits:?}"
            )));
        }
        self.runner = Some(runner);
        self.courtesy = Courtesy::NONE;
        Ok(())
    }
}
