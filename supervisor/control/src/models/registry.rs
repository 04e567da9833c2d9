//! The registry: the desired and the observed state of every model.
//!
//! Commands change the desired states here, in one short step each, and then wait for the outcome
//! without holding anything. The models' reconcilers write the observed states. Each change is
//! published to the router, to `status` and to the planner.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use shadowslice_config::{Config, ModelConfig, ReadyConfig, SampleRate};
use shadowslice_datapath::router::Router;
use shadowslice_datapath::trace::Tracer;
use shadowslice_policy::reconcile::{Goal, Presence};
use shadowslice_shared::units::Percent;
use tokio::sync::{Mutex as AsyncMutex, Notify, Semaphore, SemaphorePermit, watch};
use tokio::time::Instant;

use super::client_overrides::ClientOverrides;
use super::desired::{DesiredModel, DesiredPresence, FirstShare, InstanceSpec, PendingOutcome, SharedGoal};
use super::file_reader::FileReader;
use super::instance::{Instance, MakeError, ModelFactory};
use super::load::UNLOADED;
use super::persisted_state::PersistedState;
use super::reconciler::Reconciler;
use super::rollout::{ModelRollout, RolloutHandle};
use super::row::{Row, ServedBy};
use super::versions::{self, Release, VersionTable, with_releases, written_path};
use super::{LastReload, ModelSet};
use crate::controller::{Served, first_shares};

/// The maximum number of commands in progress.
pub const MAX_COMMANDS: usize = 16;

pub(super) const BUSY: &str = "too many commands are in progress; try again later";

/// The reason why the supervisor cannot start.
#[derive(Debug, thiserror::Error)]
#[error("model '{model}': {why}")]
pub struct StartError {
    model: String,
    why: String,
}

/// The receivers of the observed states.
#[derive(Debug)]
pub struct Views {
    pub router: Arc<Router>,
    pub models: watch::Sender<Arc<ModelSet>>,
    pub for_planner: watch::Sender<Vec<Served>>,
    pub tracer: Option<Arc<Tracer>>,
}

/// The desired and the observed state of every model. Clones share the same state.
#[derive(Debug, Clone)]
pub struct Registry(pub(super) Arc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) file: PathBuf,
    pub(super) files: AsyncMutex<FileReader>,
    pub(super) factory: ModelFactory,
    views: Views,
    table: Mutex<ModelTable>,
    /// The turn to read the configuration or a model's files and to change desired states accordingly.
    pub(super) reading: AsyncMutex<()>,
    commands: Semaphore,
    /// Notified if a task of a model has panicked.
    panicked: Notify,
}

#[derive(Debug)]
pub(super) struct ModelTable {
    /// The configuration in force. Its models are as the file describes them.
    pub(super) config: Config,
    entries: Vec<Entry>,
    pub(super) versions: VersionTable,
    last_id: u64,
    pub(super) last_reload: LastReload,
    /// The time before which no model moves to another GPU by itself.
    pub(super) next_placement: Instant,
}

/// A model of the configuration.
#[derive(Debug)]
pub(super) struct Entry {
    id: u64,
    /// The name of the instance.
    pub(super) name: String,
    /// The name that clients use.
    pub(super) served_name: String,
    /// The number of the version.
    pub(super) number: u32,
    pub(super) goal: SharedGoal,
    pub(super) row: Row,
    /// The changes by clients, which the file does not contain.
    pub(super) overrides: ClientOverrides,
}

impl Registry {
    /// Creates the models with the shares of the persisted `state`. With `starts`, all of them start,
    /// even those that a client unloaded. Otherwise they start one by one, see [`Registry::begin`].
    pub async fn start(
        file: &Path,
        config: &Config,
        factory: ModelFactory,
        views: Views,
        (state, starts): (&PersistedState, bool),
    ) -> Result<Self, StartError> {
        let config = &with_releases(config.clone(), &state.releases);
        let table = ModelTable {
            config: config.clone(),
            entries: Vec::new(),
            versions: state.versions(config),
            last_id: 0,
            last_reload: LastReload::now(true),
            next_placement: Instant::now(),
        };
        let registry = Self(Arc::new(Inner {
            file: file.to_owned(),
            files: AsyncMutex::default(),
            factory,
            views,
            table: Mutex::new(table),
            reading: AsyncMutex::default(),
            commands: Semaphore::new(MAX_COMMANDS),
            panicked: Notify::new(),
        }));
        let config = registry.placed(&registry.table(), config.clone(), |name| state.gpu(name));
        registry.table().config = config.clone();
        registry.set_ready_rule(&mut registry.table(), config.ready.clone());
        let shares = first_shares(&config.controller, &registry.0.factory.context.gpus, &config.models);
        for (written, share) in config.models.iter().zip(shares) {
            let overrides = state.overrides(&written.name).filter(|_| !starts);
            let (model, overrides) = overrides.map_or_else(
                || (written.clone(), ClientOverrides::default()),
                |overrides| overrides.applied(&config, written),
            );
            let first = state.share(&model, share);
            let presence = match (starts, state.is_unloaded(&model.name)) {
                (true, _) => DesiredPresence::Served { first, relay_is_lost: false },
                (false, true) => DesiredPresence::Unloaded { why: UNLOADED, is_removed: false },
                (false, false) => DesiredPresence::NotStarted { first },
            };
            let spec = InstanceSpec { model: Arc::new(model), load: 0 };
            let desired = DesiredModel { spec, presence, share: None };
            let mut reconciler = registry.add(&mut registry.table(), desired, overrides);
            if starts {
                reconciler
                    .start_now()
                    .await
                    .map_err(|why| StartError { model: written.name.clone(), why })?;
            }
            registry.spawn(reconciler.run());
        }
        Ok(registry)
    }

    pub(super) fn table(&self) -> parking_lot::MutexGuard<'_, ModelTable> {
        self.0.table.lock()
    }

    /// Returns the permit for a command, which the command holds until its outcome is known.
    pub(super) fn begin_command(&self) -> Result<SemaphorePermit<'_>, String> {
        self.0.commands.try_acquire().map_err(|_| BUSY.to_owned())
    }

    /// Waits until no command is in progress. While the permit exists, no other command begins.
    ///
    /// # Errors
    ///
    /// Returns the reason if a command is still in progress after `limit`.
    pub async fn pause_commands(&self, limit: Duration) -> Result<SemaphorePermit<'_>, String> {
        let all = u32::try_from(MAX_COMMANDS).expect("the number of commands is small");
        match tokio::time::timeout(limit, self.0.commands.acquire_many(all)).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(format!("a load, reload or move was still in progress after {limit:?}; try again")),
        }
    }

    /// Returns true if no command can begin now.
    pub(super) fn is_paused(&self) -> bool {
        self.0.commands.available_permits() == 0
    }

    /// Returns true if a sharing policy changes shares.
    pub(super) fn policy_acts(&self) -> bool {
        self.0.factory.context.policy_acts
    }

    /// Runs a reconciler or a rollout in a task of its own.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let (registry, task) = (self.clone(), tokio::spawn(task));
        tokio::spawn(async move {
            if let Err(error) = task.await
                && error.is_panic()
            {
                tracing::error!(
                    %error,
                    "a task of a model panicked, which is a bug in shadowslice; stopping the supervisor; please report it with the log"
                );
                registry.0.panicked.notify_one();
            }
        });
    }

    /// Waits until a task of a model has panicked, which is a bug.
    pub async fn panicked(&self) {
        self.0.panicked.notified().await;
    }

    /// Adds a model, and returns its reconciler, which the caller must run.
    pub(super) fn add(
        &self,
        table: &mut ModelTable,
        desired: DesiredModel,
        overrides: ClientOverrides,
    ) -> Reconciler {
        table.last_id += 1;
        let (id, name) = (table.last_id, desired.spec.model.name.clone());
        let why = match desired.presence {
            DesiredPresence::Unloaded { why, .. } => why,
            _ => "the model has not been started",
        };
        let goal: SharedGoal = Arc::new(watch::Sender::new(Goal::new(desired)));
        let row = Row { served_by: ServedBy::Nobody { why: why.to_owned(), last: None }, newest_files: None };
        let model = Arc::clone(&goal.borrow().desired().spec.model);
        let (served_name, number) = (model.served_name().to_owned(), model.version.number);
        let (entry, goal) = (Arc::clone(&goal), goal);
        let entry = Entry { id, name: name.clone(), served_name, number, goal: entry, row, overrides };
        table.entries.push(entry);
        self.publish(table);
        Reconciler::new(self.clone(), id, name, goal, why)
    }

    /// Removes a model. The router has no route to it any more, and its workers exit when they have
    /// answered all accepted requests.
    pub(super) fn remove(&self, table: &mut ModelTable, name: &str) {
        let Some(at) = table.entries.iter().position(|entry| entry.name == name) else { return };
        let entry = table.entries.remove(at);
        PendingOutcome::change(&entry.goal, |desired, _| {
            desired.presence = DesiredPresence::Unloaded { why: "the model was removed", is_removed: true };
        });
        self.publish(table);
    }

    /// Records the observed state of a model.
    pub(super) fn observe(&self, id: u64, row: Row) {
        let mut table = self.table();
        // A removed model has no entry.
        if let Some(entry) = table.entries.iter_mut().find(|entry| entry.id == id) {
            entry.row = row;
            self.publish(&table);
        }
    }

    pub(super) async fn make(&self, spec: InstanceSpec, first: FirstShare) -> Result<Instance, MakeError> {
        let found = self.find_files(&spec.model).await;
        self.0.factory.make(spec, first, found).await
    }

    pub(super) fn publish(&self, table: &ModelTable) {
        let mut models = ModelSet { last_reload: Some(table.last_reload), ..ModelSet::default() };
        let roles = versions::roles(&table.versions, &table.entries);
        for (entry, &role) in table.entries.iter().zip(&roles) {
            if !entry.overrides.is_empty() {
                models.overrides.insert(entry.name.clone(), entry.overrides.clone());
            }
            models.served.extend(entry.row.served().map(|served| Served { role, ..served.clone() }));
            models.unloaded.extend(entry.row.unloaded(&entry.model(), role));
        }
        for (model, versions) in &table.versions {
            models.releases.extend(versions.release.clone().map(|release| (model.clone(), release)));
            let active = versions.rollout.as_ref().map(|rollout| rollout.handle.clone());
            models.rollouts.push(ModelRollout { model: model.clone(), active, last: versions.last.clone() });
        }
        self.0.views.router.set(versions::hosted(&table.versions, &table.entries, &roles));
        self.0.views.for_planner.send_replace(models.served.clone());
        self.0.views.models.send_replace(Arc::new(models));
    }

    pub(super) fn set_sample(&self, table: &mut ModelTable, sample: SampleRate) {
        if let Some(tracing) = &mut table.config.tracing {
            tracing.sample = sample;
        }
        if let Some(tracer) = &self.0.views.tracer {
            tracer.set_sample(sample);
        }
    }

    /// Sets the models that make the host ready.
    pub(super) fn set_ready_rule(&self, table: &mut ModelTable, rule: ReadyConfig) {
        table.config.ready = rule.clone();
        self.0.views.router.set_ready_rule(rule);
    }

    /// Ends the drain of a model, because a client has loaded it.
    pub(super) fn undrain(&self, name: &str) {
        self.0.views.router.drain(Some(name), false);
    }

    /// Returns the share with which the workers of a new model start.
    pub(super) fn first_share(&self, table: &ModelTable, model: &ModelConfig) -> FirstShare {
        let others = table.entries.iter().filter(|entry| entry.name != model.name);
        let mut models: Vec<ModelConfig> = others.map(|entry| (*entry.model()).clone()).collect();
        models.push(model.clone());
        let shares = first_shares(&table.config.controller, &self.0.factory.context.gpus, &models);
        let share: Percent = shares.last().copied().unwrap_or(model.share.initial);
        FirstShare { share, held: false }
    }
}

impl ModelTable {
    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Returns the instance with this name.
    pub(super) fn instance(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.name == name)
    }

    pub(super) fn instance_mut(&mut self, name: &str) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.name == name)
    }

    /// Returns the released version of a model.
    pub(super) fn released(&self, model: &str) -> Option<&Entry> {
        let number = versions::released(&self.versions, &self.entries, model)?;
        self.entries.iter().find(|entry| entry.served_name == model && entry.number == number)
    }

    /// Returns the rollout of a model that is in progress.
    pub(super) fn rollout(&self, model: &str) -> Option<&RolloutHandle> {
        self.versions.get(model)?.rollout.as_ref().map(|rollout| &rollout.handle)
    }

    /// Returns the highest number that a version of the model has had.
    pub(super) fn newest(&self, model: &str) -> u32 {
        let entries = self.entries.iter().filter(|entry| entry.served_name == model);
        let versions = self.versions.get(model);
        let release = versions.and_then(|versions| versions.release.as_ref()).map(|release| release.newest);
        let last = versions.and_then(|versions| versions.last.as_ref()).map(|last| last.candidate);
        entries.map(|entry| entry.number).chain(release).chain(last).max().unwrap_or(0)
    }

    /// Records that the file names another version of a model than the released one.
    pub(super) fn require(&mut self, model: &str, written: PathBuf) {
        let newest = self.newest(model);
        let Some(entry) = self.released(model) else { return };
        let (number, path) = (entry.number, entry.model().engine.path().map(Path::to_owned));
        let versions = self.versions.entry(model.to_owned()).or_default();
        versions.released = Some(number);
        versions.release = path.map(|path| Release { number, path, written, newest });
    }

    /// Records the paths of models in the file. A release whose path the file names now, or that no longer
    /// runs, is not an exception any more.
    pub(super) fn adopt(&mut self, written: &BTreeMap<String, PathBuf>) {
        for (model, versions) in &mut self.versions {
            let runs = |release: &Release| {
                let is_it = |entry: &Entry| entry.served_name == *model && entry.number == release.number;
                self.entries.iter().any(is_it)
            };
            versions.release = versions.release.take().filter(runs);
            if let (Some(release), Some(path)) = (&mut versions.release, written.get(model))
                && release.path == *path
            {
                release.written = path.clone();
            }
        }
    }

    /// Returns the path of a model in the configuration file.
    pub(super) fn written_path(&self, model: &str) -> Option<PathBuf> {
        let release = self.versions.get(model).and_then(|versions| versions.release.as_ref());
        let written = || self.config.models.iter().find(|written| written.served_name() == model);
        release.map(|release| release.written.clone()).or_else(|| written().map(written_path))
    }

    /// Returns the configuration in force, with the models as they should be.
    pub(super) fn desired_config(&self) -> Config {
        let models = self.entries.iter().map(|entry| (*entry.model()).clone()).collect();
        Config { models, ..self.config.clone() }
    }

    /// Returns the model as the file describes it, without changes by clients.
    pub(super) fn written(&self, name: &str) -> Option<ModelConfig> {
        if let Some(model) = self.config.models.iter().find(|model| model.name == name) {
            return Some(model.clone());
        }
        // A command has released this version.
        let entry = self.instance(name)?;
        let written = self.config.models.iter().find(|model| model.served_name() == entry.served_name)?;
        let ModelConfig { name, version, engine, .. } = (*entry.model()).clone();
        Some(ModelConfig { name, version, engine, ..written.clone() })
    }

    /// Records the models of the file. The models get its order.
    pub(super) fn set_written(&mut self, config: &Config) {
        let models = &config.models;
        (self.config.models, self.config.document) = (models.clone(), config.document.clone());
        self.entries.iter_mut().for_each(|entry| entry.overrides = ClientOverrides::default());
        let places: BTreeMap<_, _> = models.iter().enumerate().map(|(at, model)| (&model.name, at)).collect();
        self.entries.sort_by_key(|entry| places.get(&entry.name).copied().unwrap_or(usize::MAX));
    }
}

impl Entry {
    /// Returns the desired configuration of the model.
    pub(super) fn model(&self) -> Arc<ModelConfig> {
        Arc::clone(&self.goal.borrow().desired().spec.model)
    }

    pub(super) fn is_to_be_served(&self) -> bool {
        self.goal.borrow().desired().presence() == Presence::Served
    }

    /// Returns true if the model should serve, but has no workers or is unready, and no command has
    /// started other workers. The cause may lie outside the configuration.
    pub(super) fn is_failing(&self) -> bool {
        let has_none = matches!(self.row.served_by, ServedBy::Nobody { .. });
        let is_settled = self.goal.borrow().is_settled();
        is_settled && self.is_to_be_served() && (has_none || self.row.is_unready())
    }
}
