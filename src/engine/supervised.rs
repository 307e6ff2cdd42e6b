//! The runner, and the factory that starts another one after a loss or an unload.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use crate::config::Courtesy;
use crate::model::{Limits, Runner, RunnerError, RunnerFactory};

/// Two losses within this time that are no sequence's fault are one too many: the device does not recover.
const LOSSES_WITHIN: Duration = Duration::from_secs(60);

pub(super) struct SupervisedRunner {
    /// None while the model is unloaded, and while it is loaded again.
    runner: Option<Box<dyn Runner>>,
    factory: Option<Box<dyn RunnerFactory>>,
    idle_unload: Option<Duration>,
    limits: Limits,
    has_draft: bool,
    /// What the present runner was told.
    courtesy: Courtesy,
    /// When the device was last lost by no sequence's fault.
    lost: Option<Instant>,
}

impl SupervisedRunner {
    pub(super) fn new(
        runner: Box<dyn Runner>,
        factory: Option<Box<dyn RunnerFactory>>,
        idle_unload: Option<Duration>,
    ) -> Self {
        let (limits, has_draft) = (runner.limits(), runner.has_draft());
        Self {
            runner: Some(runner),
            factory,
            idle_unload,
            limits,
            has_draft,
            courtesy: Courtesy::NONE,
            lost: None,
        }
    }

    pub(super) fn limits(&self) -> Limits {
        self.limits
    }

    pub(super) fn has_draft(&self) -> bool {
        self.has_draft
    }

    /// The runner, which is loaded.
    pub(super) fn loaded(&mut self) -> &mut dyn Runner {
        &mut **self.runner.as_mut().expect("the model is loaded")
    }

    /// Tells the runner, which is loaded, what share of the device's time it may take. Returns whether that is another one
    /// than before.
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

    /// How long the engine waits for requests before it unloads the model; none waits for ever.
    pub(super) fn idle_unload(&self) -> Option<Duration> {
        self.idle_unload.filter(|_| self.runner.is_some() && self.factory.is_some())
    }

    /// Drops the runner, which gives back all that the device has of the model.
    pub(super) fn unload(&mut self) {
        self.runner = None;
    }

    /// Whether another runner may be started after a loss. `explained` is whether sequences are at fault.
    pub(super) fn may_recover(&mut self, explained: bool) -> bool {
        let now = Instant::now();
        let too_soon = self.lost.is_some_and(|before| now - before < LOSSES_WITHIN);
        if !explained {
            self.lost = Some(now);
        }
        self.factory.is_some() && (explained || !too_soon)
    }

    /// Starts another runner in place of the last one.
    pub(super) fn start(&mut self, cancelled: &Arc<AtomicBool>) -> Result<(), RunnerError> {
        // Two runners would need twice the memory.
        self.runner = None;
        let factory =
            self.factory.as_mut().expect("a runner is unloaded only where a factory starts another");
        let runner = factory.start(cancelled)?;
        let (limits, expected) = (runner.limits(), self.limits);
        if limits != expected || runner.has_draft() != self.has_draft {
            return Err(RunnerError::Lost(format!(
                "the model came back with {limits:?} instead of {expected:?}"
            )));
        }
        self.runner = Some(runner);
        self.courtesy = Courtesy::NONE;
        Ok(())
    }
}
