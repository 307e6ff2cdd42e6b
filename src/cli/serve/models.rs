//! The models of a server: what it serves by its configuration, and how each is loaded.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::courtesy::CourtesyWatch;
use super::{card, report};
use crate::checkpoint::ModelFiles;
use crate::cli::doctor::Machine;
use crate::cli::energy::Meter;
use crate::cli::error::Error;
use crate::cli::load::Texts;
use crate::cli::{load, models, plan};
use crate::config::{Config, ServedModel};
use crate::device::{DeviceFactory, Observer};
use crate::engine::{EnergyCounter, Engine, EngineConfig, Lease};
use crate::library::{Library, Loaded, Loader, Model, ModelNames, Turns};
use crate::model::{Runner as _, arch};

/// Loads a model of the server.
pub struct ModelLoader {
    pub model: Arc<Model>,
    config: Config,
    files: ModelFiles,
    machine: Machine,
    courtesy: CourtesyWatch,
    pub observer: Observer,
    loads: Loads,
    lease: Option<Arc<Lease>>,
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
pub struct Shared<'a> {
    pub root: Option<&'a Path>,
    pub courtesy: CourtesyWatch,
    pub log_filter: String,
    pub loads: Loads,
    /// The device, if there are several models.
    pub lease: Option<Arc<Lease>>,
}

impl Shared<'_> {
    /// The loader of one of several models.
    fn bounded(
        &self,
        config: Config,
        aliases: Vec<String>,
        is_pinned: bool,
    ) -> Result<Arc<ModelLoader>, Error> {
        let files = load::files(&config.model)?;
        // The load may be hours away, so mistakes are found here.
        let mut longest = arch::load(&files)?.0.max_position_embeddings;
        if let Some(draft) = load::draft_files(&config)? {
            longest = longest.min(arch::load(&draft)?.0.max_position_embeddings);
        }
        Ok(self.loader(config.with_bounded_context(longest), files, aliases, is_pinned))
    }

    fn loader(
        &self,
        config: Config,
        files: ModelFiles,
        aliases: Vec<String>,
        is_pinned: bool,
    ) -> Arc<ModelLoader> {
        let id = load::model_id(&files, &config);
        let any = config.server.any_model_name;
        let model = Arc::new(Model::new(ModelNames { id, aliases, any }).pinned(is_pinned));
        let observer = Observer::new(self.log_filter.clone());
        let of_model = observer.clone();
        model.set_load(move || of_model.loading());
        Arc::new(ModelLoader {
            model,
            config,
            files,
            machine: Machine::new(self.root),
            courtesy: self.courtesy.clone(),
            observer,
            loads: self.loads.clone(),
            lease: self.lease.clone(),
        })
    }
}

/// The library of a server with this configuration, and the loaders of its models in their order.
pub fn library(config: &Config, shared: &Shared<'_>) -> Result<(Library, Vec<Arc<ModelLoader>>), Error> {
    if !is_of_several(config) {
        let files = load::files(&config.model)?;
        let loader = shared.loader(config.clone(), files, config.server.model_aliases.clone(), false);
        return Ok((Library::of_one(Arc::clone(&loader.model), config.server.any_model_name), vec![loader]));
    }
    let listed = several(config)?.into_iter();
    let listed = listed.map(|(config, served)| shared.bounded(config, served.aliases.clone(), served.pin));
    let mut loaders = listed.collect::<Result<Vec<_>, _>>()?;
    if config.models.pulled {
        add_pulled(config, shared, &mut loaders);
    }
    if loaders.is_empty() {
        return Err(Error::Argument(
            "models.pulled is set, but no model was pulled: `unicorn pull ORG/NAME` downloads one".into(),
        ));
    }
    let mut names = BTreeSet::new();
    if let Some(name) =
        loaders.iter().flat_map(|loader| loader.model.names()).find(|name| !names.insert(*name))
    {
        return Err(Error::Argument(format!(
            "models.serve: two models have the name {name:?}; give one of them another `name`, or remove the alias"
        )));
    }
    let models = loaders.iter().map(|loader| {
        let of_library: Box<dyn Loader> = Box::new(Arc::clone(loader));
        (Arc::clone(&loader.model), of_library)
    });
    Ok((Library::of_several(models, config.server.any_model_name, Turns::default()), loaders))
}

/// Whether the configuration is of a server with several models.
pub fn is_of_several(config: &Config) -> bool {
    config.model.path.is_none() && (config.models.pulled || !config.models.serve.is_empty())
}

/// Adds the pulled models that are not listed. Those that cannot be read are left out.
fn add_pulled(config: &Config, shared: &Shared<'_>, loaders: &mut Vec<Arc<ModelLoader>>) {
    for cache in models::caches(config) {
        let list = cache.list().unwrap_or_else(|error| {
            tracing::warn!("the pulled models of {} are not served: {error}", cache.root().display());
            Vec::new()
        });
        for pulled in list {
            let (name, path) = (pulled.name.to_string(), pulled.path.display().to_string());
            let is_listed = |loader: &Arc<ModelLoader>| {
                loader.config.model.path.as_ref() == Some(&path) || loader.model.is_called(&name)
            };
            if loaders.iter().any(is_listed) {
                continue;
            }
            let served = ServedModel { path, name: Some(name.clone()), ..ServedModel::default() };
            let config = config.of_model(&served).map_err(Error::Argument);
            match config.and_then(|config| shared.bounded(config, Vec::new(), false)) {
                Ok(loader) => loaders.push(loader),
                Err(error) => tracing::warn!("the pulled model {name} is not served: {error}"),
            }
        }
    }
}

/// The configuration of each of several models, with the path of a pulled model in place of its name.
fn several(config: &Config) -> Result<Vec<(Config, &ServedModel)>, Error> {
    let each = config.models.serve.iter().enumerate().map(|(i, served)| {
        let at = |problem| Error::Argument(format!("models.serve, number {}: {problem}", i + 1));
        let mut config = config.of_model(served).map_err(at)?;
        models::locate_served(&mut config)?;
        Ok((config, served))
    });
    each.collect()
}

/// Opens the files of each configured model, and returns the models' names.
pub fn check(config: &Config) -> Result<String, Error> {
    let shared = Shared {
        root: None,
        courtesy: CourtesyWatch::new(config.engine.courtesy),
        log_filter: String::new(),
        loads: Loads::default(),
        lease: None,
    };
    let (_, loaders) = library(config, &shared)?;
    let names: Vec<&str> = loaders.iter().map(|loader| loader.model.id()).collect();
    Ok(names.join(", "))
}

impl ModelLoader {
    /// Reads what lists of models say about the files.
    pub fn read_card(&self) -> Result<(), Error> {
        self.texts().map(drop)
    }

    /// Reads the small files. The first call also sets what lists of models say.
    fn texts(&self) -> Result<Texts, Error> {
        let (spec, generation) = arch::load(&self.files)?;
        let parser = self.config.model.tool_call_parser.as_deref();
        let texts = load::texts(&self.files, spec, &generation, parser)?;
        if self.model.card().is_none() {
            self.model.set_card(card::card(&self.files, &texts)?);
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
        let draft_files = load::draft_files(config)?;
        if let Some(draft) = &draft_files {
            let (draft_config, _) = arch::load(draft)?;
            load::check_draft_tokenizer(files, &texts.tokenizer, draft, &draft_config)?;
        }
        let vocab_size = texts.tokenizer.vocab_size();
        let mut factory =
            DeviceFactory::new(config, files, draft_files.as_ref(), vocab_size, observer.clone())?;
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
            ..load::engine_config(runner.limits(), device.sliding_block_bytes, config, queue)
        };
        let report = report::collect(device, observer, courtesy, meter);
        let engine = Engine::start_recoverable(
            Box::new(runner),
            Box::new(factory),
            Arc::clone(cancelled),
            engine_config,
        );
        courtesy.start(engine.clone());
        Ok(Loaded { service: texts.service(engine, config), report })
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
