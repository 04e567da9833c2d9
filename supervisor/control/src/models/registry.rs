//! The registry: the desired and the observed state of every model.
//!
//! Commands change the desired states here, in one short step each, and then wait for the outcome
//! without holding anything. The models' reconcilers write the observed states. Each change is
//! published to the router, to `status` and to the planner.

use std::collections::{BTreeMap, HashMap};
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
use super::row::{Row, ServedBy};
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
    /// Notified if a reconciler has panicked.
    panicked: Notify,
}

#[derive(Debug)]
pub(super) struct ModelTable {
    /// The configuration in force. Its models are as the file describes them.
    pub(super) config: Config,
    entries: Vec<Entry>,
    last_id: u64,
    pub(super) last_reload: LastReload,
    /// The time before which no model moves to another GPU by itself.
    pub(super) next_placement: Instant,
}

/// A model of the configuration.
#[derive(Debug)]
pub(super) struct Entry {
    id: u64,
    pub(super) name: String,
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
        let table = ModelTable {
            config: config.clone(),
            entries: Vec::new(),
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
            registry.spawn(reconciler);
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

    /// Runs a reconciler in a task of its own.
    pub(super) fn spawn(&self, reconciler: Reconciler) {
        let (registry, task) = (self.clone(), tokio::spawn(reconciler.run()));
        tokio::spawn(async move {
            if let Err(error) = task.await
                && error.is_panic()
            {
                tracing::error!(
                    %error,
                    "a model's reconciler panicked, which is a bug in shadowslice; stopping the supervisor; please report it with the log"
                );
                registry.0.panicked.notify_one();
            }
        });
    }

    /// Waits until a reconciler has panicked, which is a bug.
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
        table.entries.push(Entry { id, name: name.clone(), goal: Arc::clone(&goal), row, overrides });
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
        let (mut models, mut routes) = (ModelSet::default(), HashMap::new());
        models.last_reload = Some(table.last_reload);
        for entry in &table.entries {
            if !entry.overrides.is_empty() {
                models.overrides.insert(entry.name.clone(), entry.overrides.clone());
            }
            models.served.extend(entry.row.served().cloned());
            models.unloaded.extend(entry.row.unloaded(&entry.model()));
            routes.extend(entry.row.route().map(|route| (entry.name.clone(), route.clone())));
        }
        self.0.views.router.set(routes);
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

    pub(super) fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.name == name)
    }

    pub(super) fn entry_mut(&mut self, name: &str) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.name == name)
    }

    /// Returns the configuration in force, with the models as they should be.
    pub(super) fn desired_config(&self) -> Config {
        let models = self.entries.iter().map(|entry| (*entry.model()).clone()).collect();
        Config { models, ..self.config.clone() }
    }

    /// Returns the model as the file describes it, without changes by clients.
    pub(super) fn written(&self, name: &str) -> Option<&ModelConfig> {
        self.config.models.iter().find(|model| model.name == name)
    }

    /// Records the models of the file. The models get its order.
    pub(super) fn set_written(&mut self, models: &[ModelConfig]) {
        self.config.models = models.to_vec();
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
