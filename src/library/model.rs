//! One model of a server: its names, what its files say about it, and its service once it is loaded.

use std::ops::Deref;
use std::sync::{Arc, OnceLock, RwLock};

use super::report::{ModelCard, ModelReport};
use crate::engine::{EngineHandle, EngineState};
use crate::session::Service;

/// The names by which requests may call a model.
#[derive(Debug, Clone, Default)]
pub struct ModelNames {
    /// The model's id, which is in every answer, also if the request has another name.
    pub id: String,
    /// Additional names of the model, which are also in lists of models.
    pub aliases: Vec<String>,
    /// Whether requests may use any other name as well.
    pub any: bool,
}

/// Whether a name that no list has means a model.
type IsMeant = Box<dyn Fn(&str) -> bool + Send + Sync>;

impl From<&str> for ModelNames {
    fn from(id: &str) -> Self {
        Self { id: id.to_owned(), ..Self::default() }
    }
}

/// What a model does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    Loaded,
    /// It is loaded for the first time, or again after the device was lost, or for a request.
    Loading,
    /// The next request loads it.
    Unloaded,
}

/// A model that a server serves, whether it is loaded or not.
pub struct Model {
    id: String,
    aliases: Vec<String>,
    is_meant: Option<IsMeant>,
    is_pinned: bool,
    service: RwLock<Option<Arc<Service>>>,
    report: RwLock<Option<Arc<ModelReport>>>,
    card: OnceLock<ModelCard>,
    /// What a load in progress does, in words.
    loading: OnceLock<Box<dyn Fn() -> Option<String> + Send + Sync>>,
}

impl Model {
    pub fn new(ModelNames { id, mut aliases, .. }: ModelNames) -> Self {
        aliases.retain(|alias| *alias != id);
        Self {
            id,
            aliases,
            is_meant: None,
            is_pinned: false,
            service: RwLock::default(),
            report: RwLock::default(),
            card: OnceLock::new(),
            loading: OnceLock::new(),
        }
    }

    /// The model has further names, which no list has.
    #[must_use]
    pub fn meant_by(self, is_meant: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        Self { is_meant: Some(Box::new(is_meant)), ..self }
    }

    /// The model is never unloaded for another one.
    #[must_use]
    pub fn pinned(self, is_pinned: bool) -> Self {
        Self { is_pinned, ..self }
    }

    pub(super) fn is_pinned(&self) -> bool {
        self.is_pinned
    }

    pub fn id(&self) -> &str {
        &self.id
    }

    /// The names in lists of models: the id, and the aliases.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.id).chain(&self.aliases).map(String::as_str)
    }

    pub fn is_called(&self, name: &str) -> bool {
        self.names().any(|own| own == name)
    }

    /// Whether a name that no list has means the model.
    pub(super) fn is_meant_by(&self, name: &str) -> bool {
        self.is_meant.as_ref().is_some_and(|is_meant| is_meant(name))
    }

    /// Sets the source of what `/health` and `/status` report about a load. Panics at a second call.
    pub fn set_load(&self, doing: impl Fn() -> Option<String> + Send + Sync + 'static) {
        assert!(self.loading.set(Box::new(doing)).is_ok(), "set_load is called once");
    }

    /// What a load in progress does, in words.
    pub fn loading(&self) -> Option<String> {
        self.loading.get().and_then(|doing| doing())
    }

    /// Sets what lists of models say about the files of the model. Only the first call has an effect.
    pub fn set_card(&self, card: ModelCard) {
        let _ = self.card.set(card);
    }

    /// What is known of the model's files; `None` until they are read.
    pub fn card(&self) -> Option<&ModelCard> {
        self.card.get()
    }

    /// Whether requests may have images: as the model was loaded, or before that as its files say.
    pub fn takes_images(&self) -> bool {
        let of_files = || self.card().is_some_and(|card| card.takes_images);
        self.service().map_or_else(of_files, |service| service.takes_images())
    }

    /// Lets requests use the loaded model, and returns its service.
    pub fn set_ready(&self, service: Service) -> Arc<Service> {
        let service = Arc::new(service);
        *self.service.write().expect("nothing panics under this lock") = Some(Arc::clone(&service));
        service
    }

    /// The service, once the model was loaded for the first time. The model may be unloaded again.
    pub fn service(&self) -> Option<Arc<Service>> {
        self.service.read().expect("nothing panics under this lock").clone()
    }

    /// The service, whether the model is loaded or not, and without keeping it loaded.
    pub fn known(self: &Arc<Self>) -> Option<InUse> {
        self.service().map(|service| InUse { model: Arc::clone(self), service, release: None })
    }

    /// Gives `/status` and `/metrics` the report of the loaded model.
    pub fn set_report(&self, report: ModelReport) {
        *self.report.write().expect("nothing panics under this lock") = Some(Arc::new(report));
    }

    pub fn report(&self) -> Option<Arc<ModelReport>> {
        self.report.read().expect("nothing panics under this lock").clone()
    }

    /// Forgets the service, whose engine has ended. The next load starts another engine.
    pub(super) fn forget(&self) {
        *self.service.write().expect("nothing panics under this lock") = None;
        *self.report.write().expect("nothing panics under this lock") = None;
    }

    /// The name of the syntax in which the model calls tools.
    pub fn call_syntax(&self) -> Option<&'static str> {
        self.service().map(|service| service.call_format().syntax.name)
    }

    pub fn engine(&self) -> Option<EngineHandle> {
        self.service().map(|service| service.engine().clone())
    }

    pub(super) fn stage(&self) -> Stage {
        match self.engine().map(|engine| engine.state()) {
            None | Some(EngineState::Loading | EngineState::Recovering) => Stage::Loading,
            Some(EngineState::Unloaded) => Stage::Unloaded,
            Some(EngineState::Ready | EngineState::Lost) => Stage::Loaded,
        }
    }
}

/// A loaded model in use by a request. In a library of several models, it is not unloaded for another model until this is
/// dropped.
pub struct InUse {
    model: Arc<Model>,
    service: Arc<Service>,
    /// Called when this is dropped.
    release: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl InUse {
    pub(super) fn shared(
        model: &Arc<Model>,
        service: Arc<Service>,
        release: impl FnOnce() + Send + Sync + 'static,
    ) -> Self {
        Self { model: Arc::clone(model), service, release: Some(Box::new(release)) }
    }

    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }
}

impl Deref for InUse {
    type Target = Service;

    fn deref(&self) -> &Service {
        &self.service
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        if let Some(release) = self.release.take() {
            release();
        }
    }
}
