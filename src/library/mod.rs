//! The models of a server, and which of them are loaded.
//!
//! A server with one model loads it at its start, and the model has the memory of the device to itself
//! ([`Library::of_one`]). A server with several models loads a model for the first request that names it
//! ([`Library::of_several`]): [`admission`] decides when there is room, and which idle models are unloaded for it.
//!
//! Each model has its own engine, and its own device process. A model that is unloaded keeps its engine, which loads it
//! again. If an engine ends because of an error, the next request starts another one.
//!
//! The list of models may change while the server runs ([`Library::replace`]). A model has a number, which no other model
//! gets. A model that leaves the list answers the requests that use it, and is then unloaded.
//!
//! This module must never know a wire format, and never answer a request.

mod admission;
mod model;
mod report;
mod store;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

pub use self::admission::Turns;
use self::admission::{Decision, Slot, SlotState};
pub use self::model::{InUse, Model, ModelNames, Stage};
pub use self::report::{CourtesyReport, EnergyReport, LiveReport, ModelCard, ModelReport};
pub use self::store::{PullReport, PullStep, Store, StoreError};
use crate::engine::{ClientId, EngineHandle, EngineState, KeepAlive};
use crate::kv_disk::KvStore;
use crate::session::Service;

/// How often a waiting request looks again, because time alone may make room.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Loads one model of a library of several.
pub trait Loader: Send + Sync {
    /// The bytes of device memory that a load takes if `budget` bytes may be used. An error says why it does not fit.
    fn plan(&self, budget: u64) -> Result<u64, String>;

    /// Loads the model in a new device process, and starts its engine. Blocks.
    fn load(&self) -> Result<Loaded, String>;
}

/// A model that was loaded for the first time.
pub struct Loaded {
    pub service: Service,
    pub report: ModelReport,
}

/// Why a model of a library cannot answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// The model is not loaded. [`Library::admit`] loads it.
    #[error("the model is not loaded")]
    Unloaded(usize),
    /// `holders` says which models hold the memory.
    #[error(
        "there is no memory for {model:?}: it takes {needed} MiB of {budget} MiB, and {holders}; models in use and pinned \
         models are not unloaded; try again later"
    )]
    NoRoom { model: String, needed: u64, budget: u64, holders: String },
    #[error("{model:?} cannot be loaded: {problem}")]
    Failed { model: String, problem: String },
    #[error("{0:?} is no longer served")]
    Gone(String),
    #[error(
        "the server is busy: {waiting} requests wait for models, and {model:?} is not loaded; try again in a few seconds"
    )]
    QueueFull { model: String, waiting: usize },
    #[error("the server is shutting down")]
    ShuttingDown,
}

/// All models that a server serves. The first one answers requests that name no model.
pub struct Library {
    models: Arc<SharedModels>,
    /// [`Library::has_any_name`]
    any_name: bool,
    /// The length of the engines' queues; 0 = as they were started.
    queue: Arc<AtomicUsize>,
    /// `None` = there is one model, which has the device to itself.
    swap: Option<Arc<Swap>>,
    store: Option<Box<dyn Store>>,
    kv_store: Option<KvStore>,
}

/// The models, which a library and its swaps share.
struct SharedModels(RwLock<Models>);

impl SharedModels {
    fn read(&self) -> RwLockReadGuard<'_, Models> {
        self.0.read().expect("nothing panics under this lock")
    }

    fn write(&self) -> RwLockWriteGuard<'_, Models> {
        self.0.write().expect("nothing panics under this lock")
    }

    /// The model with this number. Panics if there is none.
    fn model(&self, index: usize) -> Arc<Model> {
        Arc::clone(&self.read().all[index].model)
    }
}

struct Models {
    /// Every model by its number, those that were removed too.
    all: Vec<Entry>,
    /// The numbers of the models that are served, in their order. Never empty.
    listed: Vec<usize>,
}

struct Entry {
    model: Arc<Model>,
    /// `None` in a library of one.
    loader: Option<Arc<dyn Loader>>,
}

/// A model of a new list of models.
pub enum Listed {
    /// The model with this number stays.
    Kept(usize),
    New(Arc<Model>, Box<dyn Loader>),
}

/// What the requests of a library of several models share.
struct Swap {
    turns: Turns,
    /// [`Library::queue`]
    queue: Arc<AtomicUsize>,
    /// [`Library::models`]. Locked after `state`, if both are.
    models: Arc<SharedModels>,
    state: Mutex<State>,
    /// Woken when [`Swap::state`] changes.
    changed: Notify,
    /// How many bytes of the device may be used. Known once the first model is loaded.
    budget: OnceLock<u64>,
}

#[derive(Default)]
struct State {
    slots: Vec<Slot>,
    /// Whether a model is being loaded or unloaded. One at a time.
    is_swapping: bool,
    is_closed: bool,
    /// The number of waiting requests of each client.
    clients: HashMap<ClientId, usize>,
}

impl State {
    /// The model is loaded, or why it is not. Models that did not leave, after a panic or an error, are still loaded.
    fn end_swap(&mut self, index: usize, loaded: Result<(), String>) {
        for slot in self.slots.iter_mut().filter(|slot| slot.state == SlotState::Leaving) {
            slot.state = SlotState::Resident;
        }
        match loaded {
            Ok(()) => self.slots[index].loaded(),
            Err(problem) => self.slots[index].fail(problem),
        }
        self.is_swapping = false;
    }
}

impl From<ModelNames> for Library {
    fn from(names: ModelNames) -> Self {
        let any_name = names.any;
        Self::of_one(Arc::new(Model::new(names)), any_name)
    }
}

impl From<&str> for Library {
    fn from(id: &str) -> Self {
        ModelNames::from(id).into()
    }
}

impl Library {
    /// A library of one model. The caller loads it, and calls [`Model::set_ready`].
    pub fn of_one(model: Arc<Model>, any_name: bool) -> Self {
        let models = Models { all: vec![Entry { model, loader: None }], listed: vec![0] };
        Self {
            models: Arc::new(SharedModels(RwLock::new(models))),
            any_name,
            queue: Arc::default(),
            swap: None,
            store: None,
            kv_store: None,
        }
    }

    /// A library of several models, none of which is loaded. Panics if there is none.
    pub fn of_several(
        models: impl IntoIterator<Item = (Arc<Model>, Box<dyn Loader>)>,
        any_name: bool,
        turns: Turns,
    ) -> Self {
        let all = models.into_iter().map(|(model, loader)| Entry { model, loader: Some(loader.into()) });
        let all: Vec<_> = all.collect();
        assert!(!all.is_empty(), "a library has a model");
        let slots = all.iter().map(|entry| Slot::new(entry.model.is_pinned())).collect();
        let listed = (0..all.len()).collect();
        let models = Arc::new(SharedModels(RwLock::new(Models { all, listed })));
        let queue = Arc::<AtomicUsize>::default();
        Self {
            models: Arc::clone(&models),
            any_name,
            queue: Arc::clone(&queue),
            swap: Some(Arc::new(Swap {
                turns,
                queue,
                models,
                state: Mutex::new(State { slots, ..State::default() }),
                changed: Notify::new(),
                budget: OnceLock::new(),
            })),
            store: None,
            kv_store: None,
        }
    }

    /// The library downloads and deletes models with `store`.
    #[must_use]
    pub fn with_store(self, store: impl Store + 'static) -> Self {
        Self { store: Some(Box::new(store)), ..self }
    }

    /// Sets where the models' conversations are kept.
    #[must_use]
    pub fn with_kv_store(self, kv_store: Option<KvStore>) -> Self {
        Self { kv_store, ..self }
    }

    /// Where the models' conversations are kept. `None` = only in device memory.
    pub fn kv_store(&self) -> Option<&KvStore> {
        self.kv_store.as_ref()
    }

    /// What downloads and deletes models. `None` = nothing does, or not now.
    pub fn store(&self) -> Option<&dyn Store> {
        self.store.as_deref().filter(|store| store.is_on())
    }

    /// Serves these models from now on, in this order. A model that is not in the list answers the requests that use it,
    /// and is then unloaded. Returns the numbers of the listed models. Does nothing in a library of one.
    ///
    /// # Panics
    /// If the list is empty.
    pub fn replace(&self, list: Vec<Listed>) -> Vec<usize> {
        assert!(!list.is_empty(), "a library has a model");
        let Some(swap) = &self.swap else { return vec![0] };
        let mut state = swap.lock();
        let mut models = self.models.write();
        let mut listed = Vec::with_capacity(list.len());
        for model in list {
            listed.push(match model {
                Listed::Kept(index) => index,
                Listed::New(model, loader) => {
                    state.slots.push(Slot::new(model.is_pinned()));
                    models.all.push(Entry { model, loader: Some(loader.into()) });
                    models.all.len() - 1
                }
            });
        }
        for (index, slot) in state.slots.iter_mut().enumerate() {
            slot.is_removed = !listed.contains(&index);
            slot.is_pinned &= !slot.is_removed;
        }
        models.listed.clone_from(&listed);
        drop(models);
        swap.unload_removed(&mut state);
        drop(state);
        swap.changed.notify_waiters();
        listed
    }

    /// The models that are served, each with its number.
    pub fn models(&self) -> Vec<(usize, Arc<Model>)> {
        let models = self.models.read();
        models.listed.iter().map(|&index| (index, Arc::clone(&models.all[index].model))).collect()
    }

    /// The model with this number. Panics if there is none.
    pub fn model(&self, index: usize) -> Arc<Model> {
        self.models.model(index)
    }

    /// The model that answers requests without a name, and its number.
    pub fn first(&self) -> (usize, Arc<Model>) {
        let models = self.models.read();
        let index = models.listed[0];
        (index, Arc::clone(&models.all[index].model))
    }

    /// Whether models share the device's memory.
    pub fn is_shared(&self) -> bool {
        self.swap.is_some()
    }

    /// The engines of the models that were loaded, whether they are loaded now or not.
    pub fn engines(&self) -> Vec<EngineHandle> {
        let models = self.models.read();
        models.all.iter().filter_map(|entry| Some(entry.model.service()?.engine().clone())).collect()
    }

    /// The number of the model with this id or alias, or that this name means. `None` = no model has it.
    pub fn find(&self, name: &str) -> Option<usize> {
        let models = self.models.read();
        let find = |is_it: &dyn Fn(&Model) -> bool| {
            models.listed.iter().copied().find(|&index| is_it(&models.all[index].model))
        };
        find(&|model| model.is_called(name)).or_else(|| find(&|model| model.is_meant_by(name)))
    }

    /// Whether a request may use any name. It is answered by the first model, unless the name is another model's.
    pub fn has_any_name(&self) -> bool {
        self.any_name
    }

    /// The loaded model, which stays loaded until the value is dropped. [`LibraryError::Unloaded`] = [`Self::admit`]
    /// must load it first. `None` = the only model is loaded for the first time now.
    pub fn in_use(&self, index: usize) -> Option<Result<InUse, LibraryError>> {
        let Some(swap) = &self.swap else { return self.model(index).known().map(Ok) };
        Some(swap.ready(index).ok_or(LibraryError::Unloaded(index)))
    }

    /// Waits for `client` until the model is loaded, which may unload idle models. The model stays loaded until the value is
    /// dropped. Panics in a library of one.
    pub async fn admit(&self, index: usize, client: ClientId) -> Result<InUse, LibraryError> {
        let swap = self.swap.as_ref().expect("a library of several models");
        Swap::admit(swap, index, client).await
    }

    /// The number of requests that wait for the model in the library. Those in its engine's queue do not count.
    pub fn waiting(&self, index: usize) -> usize {
        self.swap.as_ref().map_or(0, |swap| swap.lock().slots[index].waiting.len())
    }

    /// Sets the length of the engines' queues, also of those that are started later.
    pub fn set_queue(&self, queue: usize) {
        self.queue.store(queue, Ordering::Relaxed);
        self.fit_queue();
    }

    /// Sets the queues of the engines that exist to the length of the last [`Self::set_queue`].
    pub fn fit_queue(&self) {
        self.engines().iter().for_each(|engine| fit(engine, &self.queue));
    }

    /// What the model does. Queries the model's engine.
    pub fn stage(&self, index: usize) -> Stage {
        match &self.swap {
            None => self.model(index).stage(),
            Some(swap) => {
                let mut state = swap.lock();
                swap.sync(&mut state);
                match state.slots[index].state {
                    SlotState::Absent | SlotState::Leaving => Stage::Unloaded,
                    SlotState::Loading => Stage::Loading,
                    SlotState::Resident => self.model(index).stage(),
                }
            }
        }
    }

    /// The bytes of device memory that each model holds, by the models' numbers; `None` in a library of one.
    pub fn held(&self) -> Option<Vec<u64>> {
        let swap = self.swap.as_ref()?;
        let mut state = swap.lock();
        swap.sync(&mut state);
        // A model is loaded after the others have left.
        let waits = state.slots.iter().any(|slot| slot.state == SlotState::Leaving);
        let held = |slot: &Slot| if waits && slot.state == SlotState::Loading { 0 } else { slot.held() };
        Some(state.slots.iter().map(held).collect())
    }

    /// Whether a model is being loaded or unloaded for a request. Always false in a library of one.
    pub fn is_swapping(&self) -> bool {
        self.swap.as_ref().is_some_and(|swap| swap.lock().is_swapping)
    }

    /// Whether requests are taken. A request may wait until its model is loaded again.
    pub fn takes_requests(&self) -> bool {
        match &self.swap {
            Some(swap) => !swap.lock().is_closed,
            None => self.first().1.engine().is_some_and(|engine| engine.health().is_ok()),
        }
    }

    /// Refuses requests that would need a load from now on.
    pub fn close(&self) {
        if let Some(swap) = &self.swap {
            swap.lock().is_closed = true;
            swap.changed.notify_waiters();
        }
    }

    /// Refuses requests from now on, and drains the engines.
    pub fn drain(&self) {
        self.close();
        self.engines().iter().for_each(EngineHandle::drain);
    }
}

impl Swap {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics under this lock")
    }

    fn loader(&self, index: usize) -> Arc<dyn Loader> {
        let models = self.models.read();
        Arc::clone(models.all[index].loader.as_ref().expect("a model of several has a loader"))
    }

    /// Takes over what the engines did by themselves: an idle engine unloads its model, and an engine may end.
    fn sync(&self, state: &mut State) {
        let models = self.models.read();
        for (slot, Entry { model, .. }) in state.slots.iter_mut().zip(&models.all) {
            let Some(service) = model.service().filter(|_| slot.users == 0) else { continue };
            let engine = service.engine();
            let ends = slot.is_stuck || engine.state() == EngineState::Lost;
            if slot.state == SlotState::Resident && ends {
                // The memory is free once the runner is dropped.
                if engine.join(Duration::ZERO) {
                    model.forget();
                    (slot.state, slot.is_stuck) = (SlotState::Absent, false);
                }
                continue;
            }
            match (slot.state, engine.state()) {
                (SlotState::Resident, EngineState::Unloaded) => slot.state = SlotState::Absent,
                // The engine had begun to load for a request when the request's client left.
                (SlotState::Absent, EngineState::Ready | EngineState::Loading | EngineState::Recovering) => {
                    slot.loaded()
                }
                _ => {}
            }
        }
    }

    /// The model, if it is loaded and no other request waits for its memory.
    fn ready(self: &Arc<Self>, index: usize) -> Option<InUse> {
        let mut state = self.lock();
        if state.is_closed {
            return None;
        }
        self.sync(&mut state);
        self.take(&mut state, index, Instant::now())
    }

    /// The model for a request that came at `since`.
    fn take(self: &Arc<Self>, state: &mut State, index: usize, since: Instant) -> Option<InUse> {
        let slots = &state.slots;
        if slots[index].state != SlotState::Resident
            || admission::yields(slots, index, since, self.budget(), self.turns, Instant::now())
        {
            return None;
        }
        let model = self.models.model(index);
        // An engine that has ended is replaced once its last request is gone.
        let service = model.service().filter(|service| service.engine().health().is_ok())?;
        state.slots[index].users += 1;
        let of_guard = Arc::clone(self);
        Some(InUse::shared(&model, service, move || of_guard.release(index)))
    }

    fn release(self: &Arc<Self>, index: usize) {
        let mut state = self.lock();
        let slot = &mut state.slots[index];
        slot.users -= 1;
        slot.last_used = Instant::now();
        self.unload_removed(&mut state);
        drop(state);
        self.changed.notify_waiters();
    }

    fn budget(&self) -> u64 {
        self.budget.get().copied().unwrap_or(u64::MAX)
    }

    async fn admit(this: &Arc<Self>, index: usize, client: ClientId) -> Result<InUse, LibraryError> {
        let waiting = Waiting::begin(this, index, client)?;
        loop {
            // Created before the state is read, so that no change is missed.
            let changed = this.changed.notified();
            if let Some(in_use) = this.look(&waiting).await? {
                return Ok(in_use);
            }
            let _ = tokio::time::timeout(LOOK_AGAIN, changed).await;
        }
    }

    /// Takes the model if it is loaded, or begins to load it if there is room.
    async fn look(self: &Arc<Self>, waiting: &Waiting<'_>) -> Result<Option<InUse>, LibraryError> {
        let index = waiting.index;
        self.plan(index).await?;
        let mut state = self.lock();
        if state.is_closed {
            return Err(LibraryError::ShuttingDown);
        }
        self.sync(&mut state);
        if let Some(in_use) = self.take(&mut state, index, waiting.since) {
            return Ok(Some(in_use));
        }
        let slot = &state.slots[index];
        if slot.is_removed {
            return Err(LibraryError::Gone(self.models.model(index).id().to_owned()));
        }
        if slot.is_stuck {
            return Err(self.failed(index, "it was unloaded, and its engine does not end".to_owned()));
        }
        let now = Instant::now();
        if let Some(failure) = &slot.failure
            && (failure.number > waiting.failures || now - failure.at < self.turns.retry)
        {
            return Err(self.failed(index, failure.problem.clone()));
        }
        let is_late = now - waiting.since > self.turns.longest && slot.state != SlotState::Loading;
        if is_late || !admission::may_fit(&state.slots, index, self.budget()) {
            return Err(self.no_room(&state, index));
        }
        if !state.is_swapping
            && let Decision::Swap(leaving) =
                admission::decide(&state.slots, index, self.budget(), self.turns, now)
        {
            self.begin_swap(&mut state, index, leaving);
        }
        Ok(None)
    }

    fn failed(&self, index: usize, problem: String) -> LibraryError {
        LibraryError::Failed { model: self.models.model(index).id().to_owned(), problem }
    }

    /// Finds the bytes of a model that was never loaded, from its files. They do not matter for the first load of all.
    async fn plan(self: &Arc<Self>, index: usize) -> Result<(), LibraryError> {
        let Some(budget) = self.budget.get().copied() else { return Ok(()) };
        if self.lock().slots[index].bytes.is_some() {
            return Ok(());
        }
        let loader = self.loader(index);
        let planned = tokio::task::spawn_blocking(move || loader.plan(budget)).await;
        let planned = planned.unwrap_or_else(|error| Err(format!("internal error: {error}")));
        let bytes = planned.map_err(|problem| self.failed(index, problem))?;
        // A load may have measured them in the meantime.
        self.lock().slots[index].bytes.get_or_insert(bytes);
        Ok(())
    }

    fn no_room(&self, state: &State, index: usize) -> LibraryError {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        let models = self.models.read();
        let holders = state.slots.iter().zip(&models.all).filter(|(slot, _)| slot.held() > 0);
        let holders = holders.map(|(slot, Entry { model, .. })| {
            let why = match (slot.is_pinned, slot.users) {
                (true, _) => ", pinned".to_owned(),
                _ if slot.is_stuck => ", and its engine does not end".to_owned(),
                (false, 0) => String::new(),
                (false, 1) => ", used by 1 request".to_owned(),
                (false, n) => format!(", used by {n} requests"),
            };
            format!("{:?} holds {} MiB{why}", model.id(), mib(slot.held()))
        });
        LibraryError::NoRoom {
            model: models.all[index].model.id().to_owned(),
            needed: mib(state.slots[index].bytes.unwrap_or(0)),
            budget: mib(self.budget()),
            holders: holders.collect::<Vec<_>>().join("; "),
        }
    }

    /// Unloads `leaving`, and then loads the model, in a thread: a client that leaves does not stop it.
    fn begin_swap(self: &Arc<Self>, state: &mut State, index: usize, leaving: Vec<usize>) {
        state.is_swapping = true;
        for &i in &leaving {
            state.slots[i].state = SlotState::Leaving;
        }
        state.slots[index].state = SlotState::Loading;
        let this = Arc::clone(self);
        let swap = move || {
            let panicked = |_| Err("internal error while loading (see the log)".to_owned());
            let swapped = std::panic::AssertUnwindSafe(|| this.swap(index, &leaving));
            let loaded = std::panic::catch_unwind(swapped).unwrap_or_else(panicked);
            if let Err(problem) = &loaded {
                tracing::error!("{:?} cannot be loaded: {problem}", this.models.model(index).id());
            }
            let mut state = this.lock();
            state.end_swap(index, loaded);
            this.unload_removed(&mut state);
            drop(state);
            this.changed.notify_waiters();
        };
        if let Err(error) = std::thread::Builder::new().name("load".into()).spawn(swap) {
            let problem = format!("cannot start a thread: {error}");
            tracing::warn!("{problem}");
            state.end_swap(index, Err(problem));
        }
    }

    /// Unloads the models that were removed and that no request uses, one after another, if there are any. Their engines
    /// end then.
    fn unload_removed(self: &Arc<Self>, state: &mut State) {
        let models = self.models.read();
        let is_over = |(slot, entry): (&Slot, &Entry)| {
            let is_idle = matches!(slot.state, SlotState::Resident | SlotState::Absent) && slot.users == 0;
            slot.is_removed && is_idle && !slot.is_stuck && entry.model.service().is_some()
        };
        let index = state.slots.iter().zip(&models.all).position(is_over);
        drop(models);
        let Some(index) = index.filter(|_| !state.is_swapping) else { return };
        let before = std::mem::replace(&mut state.slots[index].state, SlotState::Leaving);
        state.is_swapping = true;
        let this = Arc::clone(self);
        let leave = move || {
            let model = this.models.model(index);
            tracing::info!("unloading {:?}, which is no longer served", model.id());
            let end = std::panic::AssertUnwindSafe(|| {
                let Some(service) = model.service() else { return true };
                unload(service.engine(), this.turns.unload);
                // The engine is not used again, and its files may be deleted.
                service.engine().abort();
                service.engine().join(this.turns.unload)
            });
            // A panic is in the log.
            let has_ended = std::panic::catch_unwind(end).unwrap_or(true);
            let mut state = this.lock();
            if has_ended {
                model.forget();
                state.slots[index].state = SlotState::Absent;
            } else {
                tracing::error!("the engine of {:?} did not end: its memory is still in use", model.id());
                (state.slots[index].state, state.slots[index].is_stuck) = (SlotState::Resident, true);
            }
            state.is_swapping = false;
            this.unload_removed(&mut state);
            drop(state);
            this.changed.notify_waiters();
        };
        if let Err(error) = std::thread::Builder::new().name("unload".into()).spawn(leave) {
            // The next request that ends tries again.
            tracing::warn!("cannot start a thread: {error}");
            state.is_swapping = false;
            state.slots[index].state = before;
        }
    }

    /// Unloads `leaving`, and then loads the model.
    fn swap(&self, index: usize, leaving: &[usize]) -> Result<(), String> {
        let model = self.models.model(index);
        for &i in leaving {
            let other = self.models.model(i);
            tracing::info!("unloading {:?} for {:?}", other.id(), model.id());
            if let Some(service) = other.service() {
                let is_free = unload(service.engine(), self.turns.unload);
                if service.engine().join(Duration::ZERO) {
                    other.forget();
                } else if !is_free {
                    self.lock().slots[i].is_stuck = true;
                    return Err(format!(
                        "{:?} was unloaded for it, and the engine of that model does not end, so the memory is still in use; \
                         restart the server if this lasts",
                        other.id()
                    ));
                }
            }
            self.lock().slots[i].state = SlotState::Absent;
        }
        let began = Instant::now();
        match model.service().filter(|service| service.engine().health().is_ok()) {
            Some(service) => {
                let gone = || {
                    service.engine().ended().map_or("the engine has ended".into(), |error| error.to_string())
                };
                let loaded = service.engine().load(KeepAlive::Configured);
                loaded.map_err(|error| error.to_string())?.blocking_recv().ok_or_else(gone)?;
            }
            None => {
                tracing::info!("loading {:?}", model.id());
                let Loaded { service, report } = self.loader(index).load()?;
                // The first model to be loaded found all memory that models may use.
                self.budget.get_or_init(|| report.device.usable_bytes);
                self.lock().slots[index].bytes = Some(report.bytes());
                fit(service.engine(), &self.queue);
                model.set_report(report);
                model.set_ready(service);
            }
        }
        self.lock().slots[index].load_time = began.elapsed();
        tracing::info!("{:?} is loaded after {:.1} s", model.id(), began.elapsed().as_secs_f64());
        Ok(())
    }
}

/// Unloads the model of an engine that has no request, and waits until its memory is free. Returns false if it is not, although
/// the engine was told to end.
fn unload(engine: &EngineHandle, timeout: Duration) -> bool {
    const CHECK_EVERY: Duration = Duration::from_millis(5);
    let since = Instant::now();
    let _ = engine.unload(); // an engine that has ended is waited for below
    while !engine.join(CHECK_EVERY) {
        if engine.state() == EngineState::Unloaded {
            return true;
        }
        if since.elapsed() > timeout {
            tracing::error!("a model was not unloaded within {} s: its engine ends", timeout.as_secs_f64());
            engine.abort();
            return engine.join(timeout);
        }
    }
    true
}

fn fit(engine: &EngineHandle, queue: &AtomicUsize) {
    let queue = queue.load(Ordering::Relaxed);
    if queue > 0 {
        engine.set_queue(queue);
    }
}

/// A request that waits for a model. Dropping it ends the wait.
struct Waiting<'a> {
    swap: &'a Swap,
    index: usize,
    client: ClientId,
    since: Instant,
    /// The number of loads of the model that had failed when the wait began.
    failures: u64,
}

impl<'a> Waiting<'a> {
    fn begin(swap: &'a Swap, index: usize, client: ClientId) -> Result<Self, LibraryError> {
        let mut state = swap.lock();
        let waiting: usize = state.clients.values().sum();
        let of_client = state.clients.get(&client).copied().unwrap_or(0);
        if waiting >= swap.turns.queue || of_client >= swap.turns.queue_of_one {
            return Err(LibraryError::QueueFull { model: swap.models.model(index).id().to_owned(), waiting });
        }
        *state.clients.entry(client).or_default() += 1;
        let (slot, since) = (&mut state.slots[index], Instant::now());
        slot.waiting.push(since);
        let failures = slot.failure.as_ref().map_or(0, |failure| failure.number);
        Ok(Self { swap, index, client, since, failures })
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.swap.lock();
        let waiting = &mut state.slots[self.index].waiting;
        if let Some(at) = waiting.iter().position(|since| *since == self.since) {
            waiting.remove(at);
        }
        if let Some(n) = state.clients.get_mut(&self.client) {
            *n -= 1;
            if *n == 0 {
                state.clients.remove(&self.client);
            }
        }
        drop(state);
        self.swap.changed.notify_waiters();
    }
}
