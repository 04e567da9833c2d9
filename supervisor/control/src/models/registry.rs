//! The registry: it alone changes which models there are, one command after the other.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use shadowslice_shared::units::Percent;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

use super::by_clients::ByClients;
use super::files::Files;
use super::instance::{Aim, Instance, MakeError, ModelFactory, keep_share, resized, serving};
use super::known::Known;
use super::load::UNLOADED;
use super::mended::{LOOK, ReadyWatch, WatchedFiles};
use super::moves::{MOVED, Move, Moved};
use super::plan::{self, Change};
use super::{Absence, ChangeKind, Command, LastReload, ModelChange, ModelSet, ReloadReport, Unloaded};
use crate::controller::{ModelState, Order, Served, first_shares};
use shadowslice_config::{Config, ModelConfig, ReadyConfig, SampleRate};
use shadowslice_datapath::repository::QueuedCommand;
use shadowslice_datapath::router::Router;
use shadowslice_datapath::trace::Tracer;
use shadowslice_shared::errors;

#[derive(Debug)]
pub struct Shown {
    pub router: Arc<Router>,
    pub models: watch::Sender<Arc<ModelSet>>,
    pub for_planner: watch::Sender<Vec<Served>>,
    pub tracer: Option<Arc<Tracer>>,
}

#[derive(Debug)]
pub struct Registry {
    pub(super) file: PathBuf,
    pub(super) files: Files,
    /// The configuration in force, but for the models, which are as the file has them.
    config: Config,
    entries: Vec<Entry>,
    pub(super) factory: ModelFactory,
    shown: Shown,
    /// When it is next asked whether models should be on other GPUs.
    pub(super) next_look: Instant,
    pub(super) ready_watch: ReadyWatch,
    last_reload: LastReload,
}

#[derive(Debug)]
struct Entry {
    model: Arc<ModelConfig>,
    state: State,
    /// What differs from the configuration's file.
    by_clients: ByClients,
}

#[derive(Debug)]
pub(super) enum State {
    Loaded {
        now: Box<Instance>,
        /// The workers that are being started to take its place.
        next: Option<Successor>,
        /// The configuration to go back to if the new share does not come into force.
        before: Option<Arc<ModelConfig>>,
    },
    /// It does not run, for this reason; its `last` controller may still answer accepted requests.
    Unloaded {
        why: String,
        last: Option<mpsc::Sender<Order>>,
    },
    Moved(Moved),
}

#[derive(Debug)]
pub(super) struct Successor {
    pub(super) instance: Box<Instance>,
    /// The old workers' share, in force or coming, when the successor was made.
    beside: Percent,
}

/// Changes that are not complete yet, each with its row in the report.
pub(super) type Waits = JoinSet<(usize, Result<(), String>)>;

impl Registry {
    /// With the shares that are known. With `anew` all models start, also those that a client unloaded.
    pub async fn start(
        file: &Path,
        config: &Config,
        factory: ModelFactory,
        shown: Shown,
        (known, anew): (&Known, bool),
    ) -> Result<Self, MakeError> {
        let (file, entries) = (file.to_owned(), Vec::new());
        let mut registry = Self {
            file,
            files: Files::default(),
            config: config.clone(),
            entries,
            factory,
            shown,
            next_look: Instant::now(),
            ready_watch: ReadyWatch::default(),
            last_reload: LastReload::now(true),
        };
        let config = &registry.placed(config.clone(), |name| known.gpu(name));
        registry.config = config.clone();
        let shares = first_shares(&config.controller, &registry.factory.context.gpus, &config.models);
        for (written, share) in config.models.iter().zip(shares) {
            let by_clients = known.by_clients(&written.name).filter(|_| !anew);
            let (model, by_clients) = by_clients.map_or_else(
                || (written.clone(), ByClients::default()),
                |by_clients| by_clients.applied(config, written),
            );
            let model = Arc::new(model);
            let state = if !anew && known.is_unloaded(&model.name) {
                State::Unloaded { why: UNLOADED.to_owned(), last: None }
            } else {
                let (share, held) = known.share(&model, share);
                let now = Box::new(registry.make(Arc::clone(&model), share, held).await?);
                State::Loaded { now, next: None, before: None }
            };
            registry.entries.push(Entry { model, state, by_clients });
        }
        registry.ready_by(config.ready.clone());
        registry.publish();
        Ok(registry)
    }

    /// Carries out commands, clients' wishes and moves to another supervisor, one after the other, for
    /// ever.
    pub async fn run(
        mut self,
        mut commands: mpsc::Receiver<Command>,
        mut wishes: mpsc::Receiver<QueuedCommand>,
        mut moves: mpsc::Receiver<Move>,
    ) {
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            // The receivers may be gone. Models move when all is done that was asked before.
            tokio::select! {
                biased;
                Some(command) = commands.recv() => self.obey(command).await,
                Some(QueuedCommand { command: wish, by, reply_tx: reply }) = wishes.recv() => {
                    let outcome = self.grant(wish, &by).await;
                    reply.send(outcome).ok();
                }
                Some(order) = moves.recv() => self.carry(order).await,
                _ = look.tick() => {
                    self.load_the_mended().await;
                    self.note_changed_files();
                    self.move_for_slack().await;
                }
            }
        }
    }

    async fn obey(&mut self, command: Command) {
        // The receivers may be gone.
        match command {
            Command::Reload { reply } => {
                let outcome = self.reload().await;
                self.last_reload = LastReload::now(outcome.as_ref().is_ok_and(ReloadReport::is_in_force));
                self.publish();
                reply.send(outcome).ok();
            }
            Command::Place { model, gpu, reply } => {
                let outcome = self.place_by_hand(&model, gpu).await;
                reply.send(outcome).ok();
            }
        }
    }

    /// The configuration in force.
    pub(super) fn config(&self) -> Config {
        let models = self.entries.iter().map(|entry| (*entry.model).clone()).collect();
        Config { models, ..self.config.clone() }
    }

    pub(super) fn sample(&mut self, sample: SampleRate) {
        if let Some(tracing) = &mut self.config.tracing {
            tracing.sample = sample;
        }
        if let Some(tracer) = &self.shown.tracer {
            tracer.set_sample(sample);
        }
    }

    /// Which models make the host ready from now on.
    pub(super) fn ready_by(&mut self, rule: ReadyConfig) {
        self.config.ready = rule.clone();
        self.shown.router.set_ready_rule(rule);
    }

    /// A client wants the model to serve, whatever an operator wanted before.
    pub(super) fn undrain(&self, name: &str) {
        self.shown.router.drain(Some(name), false);
    }

    pub(super) fn model(&self, name: &str) -> Option<Arc<ModelConfig>> {
        self.entries.iter().find(|entry| entry.model.name == name).map(|entry| Arc::clone(&entry.model))
    }

    /// The model as it runs, if it does.
    pub(super) fn served(&self, name: &str) -> Option<&Served> {
        let entry = self.entries.iter().find(|entry| entry.model.name == name)?;
        match &entry.state {
            State::Loaded { now, .. } => Some(&now.served),
            State::Unloaded { .. } | State::Moved(_) => None,
        }
    }

    pub(super) fn is_loaded(&self, name: &str) -> bool {
        let entry = self.entries.iter().find(|entry| entry.model.name == name);
        entry.is_some_and(|entry| matches!(entry.state, State::Loaded { .. }))
    }

    /// Returns those of the [loaded](Self::loaded) models that are unready.
    pub(super) fn unready(&self) -> Vec<Arc<ModelConfig>> {
        let is_unready = |served: &Served| matches!(served.report.borrow().state, ModelState::Unready { .. });
        self.loaded().into_iter().filter(|model| self.served(&model.name).is_some_and(is_unready)).collect()
    }

    /// Returns the models that are loaded and for which no successor is being made.
    pub(super) fn loaded(&self) -> Vec<Arc<ModelConfig>> {
        let loaded =
            self.entries.iter().filter(|entry| matches!(&entry.state, State::Loaded { next: None, .. }));
        loaded.map(|entry| Arc::clone(&entry.model)).collect()
    }

    pub(super) fn watched_files(&mut self, name: &str) -> Option<&mut WatchedFiles> {
        match &mut self.entry(name)?.state {
            State::Loaded { now, .. } => Some(&mut now.files),
            State::Unloaded { .. } | State::Moved(_) => None,
        }
    }

    pub(super) async fn make(
        &mut self,
        model: Arc<ModelConfig>,
        share: Percent,
        held: bool,
    ) -> Result<Instance, MakeError> {
        let found = self.find_files(&model).await;
        self.factory.make(model, share, held, found).await
    }

    pub(super) fn state(&mut self, name: &str) -> Option<&mut State> {
        self.entry(name).map(|entry| &mut entry.state)
    }

    /// Returns the state before.
    pub(super) fn set_state(&mut self, name: &str, state: State) -> Option<State> {
        self.state(name).map(|before| std::mem::replace(before, state))
    }

    pub(super) fn moved(&mut self) -> impl Iterator<Item = &mut Moved> {
        self.entries.iter_mut().filter_map(|entry| match &mut entry.state {
            State::Moved(moved) => Some(moved),
            State::Loaded { .. } | State::Unloaded { .. } => None,
        })
    }

    fn entry(&mut self, name: &str) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.model.name == name)
    }

    pub(super) fn publish(&self) {
        let (mut models, mut routes) = (ModelSet::default(), HashMap::new());
        models.last_reload = Some(self.last_reload);
        for Entry { model, state, by_clients } in &self.entries {
            if !by_clients.is_empty() {
                models.by_clients.insert(model.name.clone(), by_clients.clone());
            }
            match state {
                State::Loaded { now, next, .. } => {
                    let successor = next.as_ref().map(|next| next.instance.served.report.clone());
                    models.served.push(Served { successor, ..now.served.clone() });
                    routes.insert(model.name.clone(), now.route.clone());
                }
                State::Unloaded { why, last } => {
                    let (model, why, last) = (Arc::clone(model), why.clone(), last.clone());
                    models.unloaded.push(Unloaded { model, why, absence: Absence::Unloaded { last } });
                }
                State::Moved(moved) => {
                    routes.insert(model.name.clone(), moved.route.clone());
                    let (model, why) = (Arc::clone(model), MOVED.to_owned());
                    models.unloaded.push(Unloaded { model, why, absence: Absence::Moved });
                }
            }
        }
        self.shown.router.set(routes);
        self.shown.for_planner.send_replace(models.served.clone());
        self.shown.models.send_replace(Arc::new(models));
    }

    /// The model as the configuration's file has it, whatever clients have changed since.
    pub(super) fn written(&self, name: &str) -> Option<&ModelConfig> {
        self.config.models.iter().find(|model| model.name == name)
    }

    /// From now on this is what the file says; its order is the models'.
    pub(super) fn as_written(&mut self, models: &[ModelConfig]) {
        self.config.models = models.to_vec();
        self.entries.iter_mut().for_each(|entry| entry.by_clients = ByClients::default());
        let places: HashMap<_, _> = models.iter().enumerate().map(|(at, model)| (&model.name, at)).collect();
        self.entries.sort_by_key(|entry| places.get(&entry.model.name).copied().unwrap_or(usize::MAX));
    }

    /// Removes a model: no new request reaches it once the change is published.
    pub(super) fn remove(&mut self, name: &str) {
        let Some(place) = self.entries.iter().position(|entry| entry.model.name == name) else { return };
        self.unload(name, "the model was removed");
        self.entries.remove(place);
    }

    /// Has a model end that stays in the configuration.
    pub(super) fn unload(&mut self, name: &str, why: &'static str) {
        let Some(entry) = self.entry(name) else { return };
        let State::Loaded { now, next, .. } = &mut entry.state else { return };
        let state = State::Unloaded { why: why.to_owned(), last: Some(now.served.orders.clone()) };
        if let Some(next) = next.take() {
            next.instance.retire(why);
        }
        if let State::Loaded { now, .. } = std::mem::replace(&mut entry.state, state) {
            // The router's copy of the way to it goes with the next publication.
            now.retire(why);
        }
    }

    /// Starts a model that does not run; row `row` of the report waits for it.
    pub(super) async fn load(
        &mut self,
        model: ModelConfig,
        row: usize,
        waits: &mut Waits,
    ) -> Result<(), String> {
        let (model, patience) = (Arc::new(model), self.factory.patience());
        let made = self.make(Arc::clone(&model), self.first_share(&model), false).await;
        let (state, outcome) = match made {
            Ok(now) => {
                let report = now.served.report.clone();
                waits.spawn(async move { (row, serving(report, patience).await) });
                (State::Loaded { now: Box::new(now), next: None, before: None }, Ok(()))
            }
            Err(error) => {
                let why = errors::chain(&error);
                (State::Unloaded { why: why.clone(), last: None }, Err(why))
            }
        };
        match self.entry(&model.name) {
            Some(entry) => (entry.model, entry.state) = (model, state),
            None => self.entries.push(Entry { model, state, by_clients: ByClients::default() }),
        }
        outcome
    }

    fn first_share(&self, model: &ModelConfig) -> Percent {
        let others = self.entries.iter().filter(|entry| entry.model.name != model.name);
        let mut models: Vec<ModelConfig> = others.map(|entry| (*entry.model).clone()).collect();
        models.push(model.clone());
        let shares = first_shares(&self.config.controller, &self.factory.context.gpus, &models);
        shares.last().copied().unwrap_or(model.share.initial)
    }

    /// Has a model go by another configuration: in place where the change allows that and the model
    /// is not unready, else by new workers. Row `row` of the report waits until it is in force.
    pub(super) async fn change(
        &mut self,
        change: &Change,
        row: usize,
        waits: &mut Waits,
    ) -> (ChangeKind, Result<(), String>) {
        let acts = self.config.controller.acting_policy().is_some();
        let new = Arc::new(change.model.clone());
        let Some(place) = self.entries.iter().position(|entry| entry.model.name == new.name) else {
            return (ChangeKind::Changed, Err("the configuration does not contain this model".to_owned()));
        };
        let Entry { model, state, .. } = &mut self.entries[place];
        let State::Loaded { now, before, .. } = state else {
            *model = new;
            return (ChangeKind::Changed, Ok(()));
        };
        let report = now.served.report.borrow().clone();
        // A share that a hand-over will bring counts as in force.
        let soon = report.coming.unwrap_or(report.share);
        let aim = match acts {
            // Within the bounds, the policy or a holding operator chooses the share.
            true => Aim::Within(new.share.min, new.share.max),
            false => Aim::At(plan::share(soon, &model.share, &new.share)),
        };
        let wanted = aim.from(soon);
        // The new bounds also apply to the share in force, which stays if the change fails.
        let fits = report.share.clamp(new.share.min, new.share.max) == report.share;
        if !change.anew.is_empty() || matches!(report.state, ModelState::Unready { .. }) {
            let from = Was { share: wanted, held: report.held, beside: soon };
            return (ChangeKind::Replaced, self.replace(place, new, from, row, waits).await);
        }
        if let Err(why) = now.configure(Arc::clone(&new)).await {
            return (ChangeKind::Changed, Err(why));
        }
        let old = std::mem::replace(model, new);
        if wanted != soon || !fits {
            *before = Some(old);
            let (orders, report, patience) =
                (now.served.orders.clone(), now.served.report.clone(), self.factory.patience());
            waits.spawn(async move { (row, resized(orders, report, aim, patience).await) });
        }
        (ChangeKind::Changed, Ok(()))
    }

    async fn replace(
        &mut self,
        place: usize,
        model: Arc<ModelConfig>,
        Was { share, held, beside }: Was,
        row: usize,
        waits: &mut Waits,
    ) -> Result<(), String> {
        let made = self.make(model, share, held).await.map_err(|error| errors::chain(&error))?;
        let (report, patience) = (made.served.report.clone(), self.factory.patience());
        if let State::Loaded { next, .. } = &mut self.entries[place].state {
            *next = Some(Successor { instance: Box::new(made), beside });
        }
        waits.spawn(async move { (row, serving(report, patience).await) });
        Ok(())
    }

    /// A successor's start has ended: it takes the model's place if it serves; else it ends.
    pub(super) fn settle(&mut self, name: &str, outcome: &Result<(), String>) {
        let acts = self.config.controller.acting_policy().is_some();
        let Some(entry) = self.entry(name) else { return };
        let State::Loaded { now, next, .. } = &mut entry.state else { return };
        let Some(Successor { instance: next, beside }) = next.take() else { return };
        match outcome {
            Ok(()) => {
                tracing::info!(model = name, "the model's new workers take over");
                keep_share(&now.served.report.borrow(), &next.served, beside, acts);
                entry.model = Arc::clone(&next.served.model);
                std::mem::replace(now, next).retire("the model's workers have been replaced");
            }
            Err(why) => {
                super::reload::log_unchanged(name, why);
                next.retire("the model's new workers did not become ready");
            }
        }
        self.publish();
    }

    /// Waits until every change is complete; new workers take over as soon as they are ready.
    pub(super) async fn settle_all(&mut self, rows: &mut [ModelChange], mut waits: Waits) {
        while let Some(ended) = waits.join_next().await {
            let Ok((row, outcome)) = ended else { continue };
            let row = &mut rows[row];
            match row.change {
                ChangeKind::Replaced => self.settle(&row.name, &outcome),
                ChangeKind::Changed => self.settle_in_place(&row.name, &outcome).await,
                ChangeKind::Added | ChangeKind::Removed => {}
            }
            row.why = outcome.err();
        }
    }

    /// Ends a change in place: if its share is not in force, the model returns to its earlier
    /// configuration, so that another reload tries again.
    async fn settle_in_place(&mut self, name: &str, outcome: &Result<(), String>) {
        let Some(Entry { model, state: State::Loaded { now, before, .. }, .. }) = self.entry(name) else {
            return;
        };
        let Some(before) = before.take().filter(|_| outcome.is_err()) else { return };
        match now.configure(Arc::clone(&before)).await {
            Ok(()) => *model = before,
            Err(why) => super::reload::log_half_changed(name, &why),
        }
        self.publish();
    }

    /// A client's changes are in force.
    pub(super) fn changed_by_client(&mut self, name: &str, json: &str) {
        if let Some(entry) = self.entry(name) {
            entry.by_clients.add(json);
        }
    }

    /// Has a model that is not loaded go by that configuration once it is loaded.
    pub(super) fn go_by(&mut self, name: &str, model: &Arc<ModelConfig>) {
        if let Some(entry) = self.entry(name) {
            entry.model = Arc::clone(model);
        }
    }
}

struct Was {
    share: Percent,
    held: bool,
    /// The share of the workers that it replaces.
    beside: Percent,
}
