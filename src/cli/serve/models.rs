//! The models of a server: what it serves by its configuration, and how each is loaded.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::courtesy::CourtesyWatch;
use super::{card, report};
use crate::checkpoint::ModelFiles;
use crate::cli::doctor::Machine;
use crate::cli::energy::Meter;
use crate::cli::error::Error;
use crate::cli::load::Texts;
use crate::cli::plan::{self, LoadAgain};
use crate::cli::{load, models, names};
use crate::config::{self, Config, ServedModel};
use crate::device::{DeviceFactory, DeviceReport, MAX_BLOCK_BYTES, Observer};
use crate::engine::{DiskConfig, EnergyCounter, Engine, EngineConfig, Lease, ReadRule};
use crate::hub::{self, Cache, HubError, ModelName, Progress, Settings};
use crate::kv_disk::KvStore;
use crate::library::{
    Library, Listed, Loaded, Loader, Model, ModelNames, PullReport, PullStep, Store, StoreError, Turns,
};
use crate::model::load::LoadError;
use crate::model::{Limits, Runner as _, SamplingOptions, arch, memory};
use crate::text::TemplateKwargs;

/// How many models are pulled at the same time.
const MOST_PULLS: usize = 2;

/// Loads a model of the server.
pub struct ModelLoader {
    pub model: Arc<Model>,
    /// The entry of the configuration that it has, or would have.
    served: ServedModel,
    /// Where the files of a pulled model without an entry are.
    pulled: Option<(Cache, ModelName)>,
    /// [`Source::is_alone`], now.
    is_alone: Arc<AtomicBool>,
    config: Config,
    files: ModelFiles,
    machine: Machine,
    courtesy: CourtesyWatch,
    pub observer: Observer,
    loads: Loads,
    lease: Option<Arc<Lease>>,
    kv_store: Option<KvStore>,
}

/// The loads in progress, so that the end of the server cancels them.
#[derive(Clone, Default)]
pub struct Loads(Arc<Mutex<LoadFlags>>);

#[derive(Default)]
struct LoadFlags {
    is_cancelled: bool,
    in_progress: Vec<Arc<AtomicBool>>,
}

impl Loads {
    /// The flag that cancels a load that begins now.
    fn begin(&self) -> Arc<AtomicBool> {
        let mut flags = self.0.lock().expect("nothing panics under this lock");
        let flag = Arc::new(AtomicBool::new(flags.is_cancelled));
        flags.in_progress.push(Arc::clone(&flag));
        flag
    }

    fn end(&self, flag: &Arc<AtomicBool>) {
        let mut flags = self.0.lock().expect("nothing panics under this lock");
        flags.in_progress.retain(|other| !Arc::ptr_eq(other, flag));
    }

    /// Cancels the loads in progress, and all later ones.
    pub fn cancel(&self) {
        let mut flags = self.0.lock().expect("nothing panics under this lock");
        flags.is_cancelled = true;
        flags.in_progress.iter().for_each(|flag| flag.store(true, Ordering::Release));
    }
}

/// What all models of a server share.
pub struct Shared {
    /// The folder below which the machine's energy counters are.
    pub root: Option<PathBuf>,
    pub courtesy: CourtesyWatch,
    pub log_filter: Mutex<String>,
    pub loads: Loads,
    /// The device, if there are several models.
    pub lease: Option<Arc<Lease>>,
    /// Where conversations are kept.
    pub kv_store: Option<KvStore>,
}

/// One of several models that the configuration names, or that was pulled.
struct Source {
    served: ServedModel,
    /// With the path of a pulled model in place of its name.
    config: Config,
    pulled: Option<(Cache, ModelName)>,
    /// Whether no other file of the same repository was pulled, so that the repository's name means it.
    is_alone: bool,
}

impl Shared {
    /// The loader of one of several models.
    fn bounded(&self, source: Source) -> Result<Arc<ModelLoader>, Error> {
        let files = load::files(&source.config.model)?;
        // The load may be hours away, so mistakes are found here.
        template_kwargs(&source.served)?;
        let (longest, checked) = longest_context(&files, &source.config)?;
        // A model without an entry shares the context of all models. The load refuses it, and not the start.
        if source.pulled.is_none() && source.config.model.path.is_some() {
            checked.map_err(|error| {
                let id = load::model_id(&files, &source.config);
                Error::Argument(format!("models.serve, {id:?}: {error}"))
            })?;
        }
        let config = source.config.with_bounded_context(longest);
        Ok(self.loader(Source { config, ..source }, files))
    }

    fn loader(&self, source: Source, files: ModelFiles) -> Arc<ModelLoader> {
        let Source { served, config, pulled, is_alone } = source;
        let id = load::model_id(&files, &config);
        let any = config.server.any_model_name;
        let names = ModelNames { id, aliases: served.aliases.clone(), any };
        let mut model = Model::new(names).pinned(served.pin);
        let is_alone = Arc::new(AtomicBool::new(is_alone));
        if let Some((_, name)) = &pulled {
            let (name, is_alone) = (name.clone(), Arc::clone(&is_alone));
            model = model.meant_by(move |text| {
                names::read_name(text).is_ok_and(|mut asked| {
                    if is_alone.load(Ordering::Relaxed) && asked.file.is_none() {
                        asked.file.clone_from(&name.file);
                    }
                    hub::is_meant(&name, &asked)
                })
            });
        }
        let observer = Observer::new(self.log_filter.lock().expect("nothing panics under this lock").clone());
        let of_model = observer.clone();
        model.set_load(move || of_model.loading());
        Arc::new(ModelLoader {
            model: Arc::new(model),
            served,
            pulled,
            is_alone,
            config,
            files,
            machine: Machine::new(self.root.as_deref()),
            courtesy: self.courtesy.clone(),
            observer,
            loads: self.loads.clone(),
            lease: self.lease.clone(),
            kv_store: self.kv_store.clone(),
        })
    }
}

/// The list of a server's models, which changes when the configuration is read again, and when a model is pulled or
/// deleted.
pub struct Catalogue {
    shared: Shared,
    /// The options of the start, except for the list of models, which is the present one.
    config: Mutex<Config>,
    /// The present models, each with its number in the library.
    list: Mutex<Vec<(usize, Arc<ModelLoader>)>>,
    /// Held while the list is read again and replaced, so that no change is lost.
    refreshing: Mutex<()>,
    /// How often the list was replaced.
    changes: AtomicUsize,
    /// How many models are being pulled.
    pulls: AtomicUsize,
}

/// A list of models that is not served yet.
pub struct NewList {
    config: Config,
    loaders: Vec<Arc<ModelLoader>>,
    /// [`Catalogue::changes`] when it was read.
    changes: usize,
}

/// The library of a server with this configuration, and its list.
pub fn library(config: &Config, shared: Shared) -> Result<(Library, Arc<Catalogue>), Error> {
    let is_of_several = is_of_several(config);
    let loaders = match is_of_several {
        true => loaders(config, &shared, &[])?,
        false => {
            let files = load::files(&config.model)?;
            longest_context(&files, config)?.1?;
            let served =
                ServedModel { aliases: config.server.model_aliases.clone(), ..ServedModel::default() };
            let source = Source { served, config: config.clone(), pulled: None, is_alone: false };
            vec![shared.loader(source, files)]
        }
    };
    let of_library = loaders.iter().map(|loader| -> (Arc<Model>, Box<dyn Loader>) {
        (Arc::clone(&loader.model), Box::new(Arc::clone(loader)))
    });
    let any_name = config.server.any_model_name;
    let library = match is_of_several {
        true => Library::of_several(of_library, any_name, Turns::default()),
        false => Library::of_one(Arc::clone(&loaders[0].model), any_name),
    };
    let catalogue = Arc::new(Catalogue {
        shared,
        config: Mutex::new(config.clone()),
        list: Mutex::new(loaders.into_iter().enumerate().collect()),
        refreshing: Mutex::new(()),
        changes: AtomicUsize::new(0),
        pulls: AtomicUsize::new(0),
    });
    let library = library.with_kv_store(catalogue.shared.kv_store.clone());
    let library = match is_of_several {
        true => library.with_store(Arc::clone(&catalogue)),
        false => library,
    };
    Ok((library, catalogue))
}

/// The longest context that a model and its draft support, and whether the configured context is no longer.
fn longest_context(files: &ModelFiles, config: &Config) -> Result<(usize, Result<(), LoadError>), Error> {
    let model = arch::load(files)?.0;
    let draft = load::draft_files(config)?.map(|draft| arch::load(&draft)).transpose()?;
    let (longest, whose) = memory::longest_context(&model, draft.as_ref().map(|(draft, _)| draft));
    let checked = match config.engine.context {
        Some(wanted) if wanted > longest => Err(LoadError::ContextTooLong { wanted, longest, whose }),
        _ => Ok(()),
    };
    Ok((longest, checked))
}

/// The loaders of all models of a server with several. One of `known` stays for an entry that did not change. If `known` is
/// not empty, the small files of new models are read, so that only models which can be listed are added.
fn loaders(
    config: &Config,
    shared: &Shared,
    known: &[Arc<ModelLoader>],
) -> Result<Vec<Arc<ModelLoader>>, Error> {
    let mut loaders = Vec::new();
    for (served, config) in models::listed(config)? {
        let source = Source { served: served.clone(), config, pulled: None, is_alone: false };
        loaders.push(known_or_new(known, shared, source)?);
    }
    complete(config, shared, known, loaders)
}

/// Adds the pulled models to those of the configuration, or the demo model if there is no other.
fn complete(
    config: &Config,
    shared: &Shared,
    known: &[Arc<ModelLoader>],
    mut loaders: Vec<Arc<ModelLoader>>,
) -> Result<Vec<Arc<ModelLoader>>, Error> {
    if config.models.pulled {
        add_pulled(config, shared, known, &mut loaders);
    }
    if loaders.is_empty() {
        tracing::warn!("no model was pulled; `unicorn pull ORG/NAME` downloads one");
        let served = ServedModel::default();
        let config = config.of_model(&served).map_err(Error::Argument)?;
        let demo = Source { served, config, pulled: None, is_alone: false };
        loaders.push(known_or_new(known, shared, demo)?);
    }
    let mut names = BTreeSet::new();
    if let Some(name) =
        loaders.iter().flat_map(|loader| loader.model.names()).find(|name| !names.insert(*name))
    {
        return Err(Error::Argument(format!(
            "models.serve: two models have the name {name:?}; give one of them another `name`, or remove the alias"
        )));
    }
    Ok(loaders)
}

/// The known loader of a model, if its entry and its files did not change, or else a new one.
fn known_or_new(
    known: &[Arc<ModelLoader>],
    shared: &Shared,
    source: Source,
) -> Result<Arc<ModelLoader>, Error> {
    if let Some(loader) = find(known, &source) {
        loader.is_alone.store(source.is_alone, Ordering::Relaxed);
        return Ok(loader);
    }
    let loader = shared.bounded(source)?;
    if !known.is_empty() {
        loader.read_card()?;
    }
    Ok(loader)
}

/// The known loader of a model, if its entry and its files did not change.
fn find(known: &[Arc<ModelLoader>], source: &Source) -> Option<Arc<ModelLoader>> {
    // `preload` has an effect at the start only.
    let key = |served: &ServedModel| ServedModel { preload: false, ..served.clone() };
    let is_it = |loader: &&Arc<ModelLoader>| {
        let is_same_entry = key(&loader.served) == key(&source.served);
        is_same_entry && loader.config.model.path == source.config.model.path
    };
    known.iter().find(is_it).cloned()
}

/// Whether the configuration is of a server with several models.
pub fn is_of_several(config: &Config) -> bool {
    config.model.path.is_none() && (config.models.pulled || !config.models.serve.is_empty())
}

/// Adds the pulled models that are not listed. Those that cannot be read are left out.
fn add_pulled(
    config: &Config,
    shared: &Shared,
    known: &[Arc<ModelLoader>],
    loaders: &mut Vec<Arc<ModelLoader>>,
) {
    for cache in models::caches(config) {
        let list = cache.list().unwrap_or_else(|error| {
            tracing::warn!("the pulled models of {} are not served: {error}", cache.root().display());
            Vec::new()
        });
        let is_servable = |pulled: &&hub::Pulled| {
            // After an update, the files of the revision before may still be there.
            let is_replaced = pulled.name.is_commit()
                && list
                    .iter()
                    .any(|other| other.name.repo == pulled.name.repo && other.name.revision.is_none());
            !is_replaced && !matches!(pulled.format, hub::Format::Partial | hub::Format::Other)
        };
        let servable: Vec<_> = list.iter().filter(is_servable).collect();
        for pulled in &servable {
            let (name, path) = (pulled.name.to_string(), pulled.path.display().to_string());
            let is_listed = |loader: &Arc<ModelLoader>| {
                loader.config.model.path.as_ref() == Some(&path) || loader.model.is_called(&name)
            };
            if loaders.iter().any(is_listed) {
                continue;
            }
            let is_of_same = |other: &&&hub::Pulled| {
                other.name.repo == pulled.name.repo && other.name.revision == pulled.name.revision
            };
            let is_alone = servable.iter().filter(is_of_same).count() == 1;
            let served = ServedModel { path, name: Some(name.clone()), ..ServedModel::default() };
            let loader = config.of_model(&served).map_err(Error::Argument).and_then(|config| {
                let pulled = Some((cache.clone(), pulled.name.clone()));
                known_or_new(known, shared, Source { served, config, pulled, is_alone })
            });
            match loader {
                Ok(loader) => loaders.push(loader),
                Err(error) => tracing::warn!("the pulled model {name} is not served: {error}"),
            }
        }
    }
}

/// Opens the files of each configured model, and returns the models' names.
pub fn check(config: &Config) -> Result<String, Error> {
    let shared = Shared {
        root: None,
        courtesy: CourtesyWatch::new(config.engine.courtesy),
        log_filter: Mutex::default(),
        loads: Loads::default(),
        lease: None,
        kv_store: None,
    };
    let (library, _) = library(config, shared)?;
    let models = library.models();
    let names: Vec<&str> = models.iter().map(|(_, model)| model.id()).collect();
    Ok(names.join(", "))
}

impl Catalogue {
    fn list(&self) -> MutexGuard<'_, Vec<(usize, Arc<ModelLoader>)>> {
        self.list.lock().expect("nothing panics under this lock")
    }

    fn config(&self) -> Config {
        self.config.lock().expect("nothing panics under this lock").clone()
    }

    /// The present models in their order, each with its number in the library.
    pub fn models(&self) -> Vec<(usize, Arc<ModelLoader>)> {
        self.list().clone()
    }

    /// The loaders of the present models, in their order.
    pub fn loaders(&self) -> Vec<Arc<ModelLoader>> {
        self.list().iter().map(|(_, loader)| Arc::clone(loader)).collect()
    }

    /// The loader of the model with this number, if it is served.
    fn loader(&self, index: usize) -> Option<Arc<ModelLoader>> {
        self.list().iter().find(|(number, _)| *number == index).map(|(_, loader)| Arc::clone(loader))
    }

    /// Forwards the log filter to the device processes, also to those that are started later.
    pub fn set_log_filter(&self, filter: &str) {
        *self.shared.log_filter.lock().expect("nothing panics under this lock") = filter.to_owned();
        self.loaders().iter().for_each(|loader| loader.observer.set_log_filter(filter.to_owned()));
    }

    /// Reads the models of `config`, to be served in place of the present ones.
    pub fn read(&self, config: &Config) -> Result<NewList, Error> {
        let (changes, known) = (self.changes.load(Ordering::Acquire), self.loaders());
        let config = self.config().with_list_of(config);
        let loaders = loaders(&config, &self.shared, &known)?;
        Ok(NewList { config, loaders, changes })
    }

    /// Serves this list. It is read again if a model was pulled or deleted since.
    pub fn follow(&self, library: &Library, list: NewList) -> Result<(), Error> {
        let _refreshing = self.refreshing.lock().expect("nothing panics under this lock");
        let is_recent = list.changes == self.changes.load(Ordering::Acquire);
        let NewList { config, loaders, .. } = if is_recent { list } else { self.read(&list.config)? };
        self.serve(library, loaders);
        *self.config.lock().expect("nothing panics under this lock") = config;
        Ok(())
    }

    /// Serves the models that are pulled now. Those of the configuration stay as they are.
    fn refresh_pulled(&self, library: &Library) -> Result<(), Error> {
        let _refreshing = self.refreshing.lock().expect("nothing panics under this lock");
        let known = self.loaders();
        let listed =
            known.iter().filter(|loader| !loader.is_pulled() && !loader.is_demo()).cloned().collect();
        let loaders = complete(&self.config(), &self.shared, &known, listed)?;
        self.serve(library, loaders);
        Ok(())
    }

    fn serve(&self, library: &Library, loaders: Vec<Arc<ModelLoader>>) {
        let mut list = self.list();
        let number = |loader: &Arc<ModelLoader>| {
            list.iter().find(|(_, known)| Arc::ptr_eq(known, loader)).map(|(number, _)| *number)
        };
        let listed = loaders.iter().map(|loader| match number(loader) {
            Some(number) => Listed::Kept(number),
            None => {
                tracing::info!("serving {:?}", loader.model.id());
                Listed::New(Arc::clone(&loader.model), Box::new(Arc::clone(loader)))
            }
        });
        let numbers = library.replace(listed.collect());
        *list = numbers.into_iter().zip(loaders).collect();
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    /// A place for a pull.
    fn place(&self) -> Result<Place<'_>, StoreError> {
        let place = Place(&self.pulls);
        match self.pulls.fetch_add(1, Ordering::AcqRel) < MOST_PULLS {
            true => Ok(place),
            false => Err(StoreError::Busy(MOST_PULLS)),
        }
    }

    /// Where the files of a pulled model are, if they may be deleted.
    fn deletable(&self, index: usize) -> Result<(Cache, ModelName), StoreError> {
        let loader =
            self.loader(index).ok_or_else(|| StoreError::NotFound("the model is no longer served".into()))?;
        let Some((cache, name)) = &loader.pulled else {
            return Err(StoreError::Conflict(format!(
                "{:?} is in the configuration (models.serve), or part of the program: only pulled models can be deleted",
                loader.model.id()
            )));
        };
        match self.other_user(&loader, name) {
            Some(other) => Err(StoreError::Conflict(format!(
                "the files of {:?} are used by {:?} too: they cannot be deleted",
                loader.model.id(),
                other.model.id()
            ))),
            None => Ok((cache.clone(), name.clone())),
        }
    }

    /// The model, other than `loader`, that uses files which are deleted with `name`.
    fn other_user(&self, loader: &Arc<ModelLoader>, name: &ModelName) -> Option<Arc<ModelLoader>> {
        let path = Path::new(loader.config.model.path.as_ref()?);
        let is_repository = |folder: &&Path| {
            folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with("models--"))
        };
        // Without a revision and a file, the whole repository is deleted.
        let is_whole = name.revision.is_none() && name.file.is_none();
        let deleted = path.ancestors().find(is_repository).filter(|_| is_whole).unwrap_or(path);
        let uses = |other: &ModelLoader| {
            let config::Model { path, draft, .. } = &other.config.model;
            [path, draft].into_iter().flatten().any(|used| Path::new(used).starts_with(deleted))
        };
        let loaders = self.loaders();
        loaders.into_iter().find(|other| !Arc::ptr_eq(other, loader) && uses(other))
    }
}

impl From<HubError> for StoreError {
    fn from(error: HubError) -> Self {
        let text = error.to_string();
        match error {
            HubError::Name(_) | HubError::Choose { .. } => Self::Invalid(text),
            HubError::NoRepository { .. } | HubError::NoRevision { .. } | HubError::NoFile { .. } => {
                Self::NotFound(text)
            }
            HubError::Space { .. } | HubError::Busy { .. } | HubError::NothingToServe { .. } => {
                Self::Conflict(text)
            }
            HubError::File { .. } | HubError::Settings(_) => Self::Local(text),
            _ => Self::Hub(text),
        }
    }
}

/// One of the models that are being pulled, until it is dropped.
struct Place<'a>(&'a AtomicUsize);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Store for Arc<Catalogue> {
    fn is_on(&self) -> bool {
        self.config.lock().expect("nothing panics under this lock").models.pulled
    }

    fn pull(
        &self,
        library: &Library,
        name: &str,
        known: Option<usize>,
        report: &mut PullReport<'_>,
    ) -> Result<(), StoreError> {
        let _place = self.place()?;
        let known = known.and_then(|index| self.loader(index));
        if known.as_ref().is_some_and(|loader| loader.pulled.is_none()) {
            report(PullStep::List);
            return Ok(()); // it is in the configuration
        }
        let name = names::read_name(name).map_err(|error| StoreError::Invalid(error.to_string()))?;
        let failed = |error: Error| StoreError::Local(error.to_string());
        let settings = Settings::from_environment(|name| std::env::var_os(name));
        let settings = settings.map_err(|error| failed(error.into()))?;
        let cache = models::cache_to_pull_to(&self.config()).map_err(failed)?;
        if !report(PullStep::List) {
            return Err(HubError::Stopped { name }.into());
        }
        let mut file = None;
        let pulled = match hub::pull(&settings, &cache, &name, &mut |progress| match progress {
            Progress::Start { .. } => true,
            Progress::File { path, digest, size } => {
                file = Some((path.to_owned(), digest.to_owned(), size));
                true
            }
            Progress::Done { of_file, .. } => match &file {
                Some((path, digest, total)) => {
                    report(PullStep::File { path, digest, total: *total, completed: of_file })
                }
                None => true,
            },
        }) {
            Err(HubError::Unreachable { .. } | HubError::Offline { .. }) if known.is_some() => {
                report(PullStep::Unreachable);
                return Ok(());
            }
            pulled => pulled?,
        };
        report(PullStep::Add);
        self.refresh_pulled(library).map_err(failed)?;
        let path = pulled.display().to_string();
        if self.loaders().iter().any(|loader| loader.config.model.path.as_ref() == Some(&path)) {
            return Ok(());
        }
        // It is left out of the list. Reading it again says why.
        let config = self.config();
        let served = ServedModel { path, ..ServedModel::default() };
        let why = config.of_model(&served).map_err(Error::Argument).and_then(|config| {
            let pulled = Some((cache, name.clone()));
            let source = Source { served, config, pulled, is_alone: false };
            self.shared.bounded(source)?.read_card()
        });
        let why = why.err().map_or("the log says why".to_owned(), |error| error.to_string());
        Err(StoreError::Conflict(format!("{name} was pulled, but it cannot be served: {why}")))
    }

    fn check_delete(&self, index: usize) -> Result<(), StoreError> {
        self.deletable(index).map(drop)
    }

    fn delete(&self, library: &Library, index: usize) -> Result<(), StoreError> {
        let (cache, name) = self.deletable(index)?;
        if let Some(removal) = cache.removal(&name)? {
            removal.apply()?;
            tracing::info!("deleted {name} in {}", cache.root().display());
        }
        self.refresh_pulled(library).map_err(|error| StoreError::Local(error.to_string()))
    }
}

/// The sampling options of an entry.
fn sampling(served: &ServedModel) -> SamplingOptions {
    let &ServedModel { temperature, top_p, top_k, min_p, repetition_penalty, .. } = served;
    SamplingOptions { temperature, top_p, top_k, min_p, repetition_penalty, ..SamplingOptions::default() }
}

/// The variables of the chat template of an entry.
fn template_kwargs(served: &ServedModel) -> Result<TemplateKwargs, Error> {
    let at = |problem: String| Error::Argument(format!("models.serve: template_kwargs: {problem}"));
    let variables = serde_json::to_value(&served.template_kwargs).map_err(|error| at(error.to_string()))?;
    let variables = variables.as_object().cloned().unwrap_or_default();
    TemplateKwargs::new(variables).map_err(|name| at(format!("the server itself sets {name:?}")))
}

impl ModelLoader {
    /// Whether it is a pulled model without an entry in the configuration.
    pub fn is_pulled(&self) -> bool {
        self.pulled.is_some()
    }

    /// Whether it is the demo model, which has no entry either.
    fn is_demo(&self) -> bool {
        self.config.model.path.is_none()
    }

    /// Whether it is loaded at the start.
    pub fn is_preloaded(&self) -> bool {
        self.served.preload
    }

    /// Reads what lists of models say about the files.
    pub fn read_card(&self) -> Result<(), Error> {
        self.texts().map(drop)
    }

    /// Whether the files stay in the page cache after the load, so that the next one is fast. They do if there are several
    /// models, and memory for the files and as much on the device.
    fn stays_cached(&self) -> bool {
        let (Some(card), Some(free)) = (self.model.card(), self.machine.memory("MemAvailable")) else {
            return false;
        };
        // As much on the device as in the files, which is unknown before the load.
        let again = LoadAgain { file_bytes: card.bytes, host_bytes: card.bytes, memory_bytes: free };
        let is_cached = self.lease.is_some() && again.is_from_memory();
        if self.lease.is_some() {
            let from = if is_cached { "memory" } else { "the disk" };
            let [needed, free] = [again.needed_bytes(), free].map(|bytes| bytes as f64 / 1e9);
            let id = self.model.id();
            tracing::info!(
                "{id:?}: later loads read {from}; both copies need {needed:.1} GB of {free:.1} GB free"
            );
        }
        is_cached
    }

    /// Reads the small files. The first call also sets what lists of models say.
    fn texts(&self) -> Result<Texts, Error> {
        let (spec, generation) = arch::load(&self.files)?;
        let parser = self.config.model.tool_call_parser.as_deref();
        let mut texts = load::texts(&self.files, spec, &generation, parser)?;
        texts.set_defaults(sampling(&self.served));
        if self.model.card().is_none() {
            self.model.set_card(card::card(&self.files, &texts, &self.config)?);
        }
        Ok(texts)
    }

    /// Loads the model in a device process, and starts its engine.
    pub fn start(&self) -> Result<Loaded, Error> {
        let cancelled = self.loads.begin();
        let loaded = self.start_unless(&cancelled);
        self.loads.end(&cancelled);
        loaded
    }

    fn start_unless(&self, cancelled: &Arc<AtomicBool>) -> Result<Loaded, Error> {
        let Self { config, files, machine, courtesy, observer, .. } = self;
        let texts = self.texts()?;
        let is_cached = self.stays_cached();
        let files = &files.clone().cached(is_cached);
        let draft_files = load::draft_files(config)?.map(|draft| draft.cached(is_cached));
        if let Some(draft) = &draft_files {
            let (draft_config, _) = arch::load(draft)?;
            load::check_draft_tokenizer(files, &texts.tokenizer, draft, &draft_config)?;
        }
        let vocab_size = texts.tokenizer.vocab_size();
        let mut factory =
            DeviceFactory::new(config, files, draft_files.as_ref(), vocab_size, observer.clone())?;
        if let Some(lease) = self.lease.clone() {
            factory = factory.with_exclusive(Box::new(move |cancelled| {
                let turn = lease.take(|| cancelled.load(Ordering::Acquire))?;
                Some(Box::new(turn))
            }));
        }
        // Before the load, which takes long: other files may be at the same paths afterwards.
        let digest = |files: &ModelFiles| files.hold().ok()?.sampled_digest();
        let both = [Some(files), draft_files.as_ref()];
        let digests: Option<Vec<_>> =
            self.kv_store.as_ref().and_then(|_| both.into_iter().flatten().map(digest).collect());
        let (runner, device) = factory.load(cancelled)?;
        let meter = Meter::open(machine, &device.place);
        match &meter {
            Ok(meter) => {
                tracing::info!(
                    "energy   from {}, for the whole machine; divided among the answers",
                    meter.source()
                )
            }
            Err(why) => tracing::info!("energy   unknown: {why}"),
        }
        let meter = meter.ok();
        let queue = config.server.queue;
        let idle_unload = config.engine.idle_unload_s.map(|seconds| Duration::from_secs(seconds as u64));
        let engine_config = EngineConfig {
            idle_unload,
            energy: meter.clone().map(|meter| meter as Arc<dyn EnergyCounter>),
            lease: self.lease.clone(),
            disk: self.disk(digests.as_deref(), &texts, &device, runner.limits()),
            ..load::engine_config(runner.limits(), config, queue)
        };
        let report = report::collect(device, observer, courtesy, meter);
        let engine = Engine::start_recoverable(
            Box::new(runner),
            Box::new(factory),
            Arc::clone(cancelled),
            engine_config,
        );
        courtesy.start(engine.clone());
        let service = texts.service(engine, config).with_template_kwargs(template_kwargs(&self.served)?);
        Ok(Loaded { service, report })
    }
}

impl ModelLoader {
    /// How the engine keeps conversations. `None` = it does not. `files` are digests of the model's files and of its draft's.
    fn disk(
        &self,
        files: Option<&[[u8; 32]]>,
        texts: &Texts,
        device: &DeviceReport,
        limits: &Limits,
    ) -> Option<DiskConfig> {
        let store = self.kv_store.clone()?;
        let not_kept = |why: &str| {
            tracing::warn!("{:?} keeps no conversations on disk: {why}", self.model.id());
        };
        let Some(files) = files else {
            not_kept("its files cannot be read");
            return None;
        };
        if limits.block_bytes.iter().any(|bytes| *bytes > MAX_BLOCK_BYTES) {
            not_kept("a block of its cache is too large; kv.block_size = 16 makes smaller ones");
            return None;
        }
        // Everything that decides the bits of keys and values, but the tokens. What differs only in name is left out.
        let facts = format!(
            "{} {} {files:?} {} {} {} {} {} {:?} {:?} {:?} {:?}",
            env!("CARGO_PKG_VERSION"),
            env!("SHADER_HASH"),
            device.device,
            device.driver,
            device.weights,
            device.kv_dtype,
            limits.kv.block_size,
            limits.block_bytes,
            limits.kv.pools.iter().map(|pool| pool.window).collect::<Vec<_>>(),
            self.config.model.precision,
            self.config.npu,
        );
        let mut model = Sha256::new();
        model.update(store.secret());
        model.update(Sha256::digest(facts));
        model.update(Sha256::digest(texts.template.source()));
        Some(DiskConfig { store, model: model.finalize().into(), reads: ReadRule::default() })
    }
}

impl Loader for Arc<ModelLoader> {
    fn plan(&self, budget: u64) -> Result<u64, String> {
        plan::bytes_to_serve(&self.files, &self.config, budget).map_err(|error| error.to_string())
    }

    fn load(&self) -> Result<Loaded, String> {
        self.start().map_err(|error| error.to_string())
    }
}
