//! The driver of a rollout. It observes both versions, and performs the steps that
//! [`next`](shadowslice_policy::rollout::next) returns.

use std::cmp::Ordering::{Equal, Less};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use shadowslice_config::{ModelConfig, RolloutConfig};
use shadowslice_datapath::pipeline::{SleepCause, SleepPhase};
use shadowslice_datapath::versions::{Mirror, MirrorCounts, MirrorRules};
use shadowslice_policy::rollout::{CandidateHealth, RolloutStage, RolloutStep, RolloutView, next};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior};

use super::figures::{VersionFigures, incompatibility, with_comparisons};
use super::{CommandedRollout, QueuedRolloutCommand, RolloutCommand, RolloutHandle};
use crate::controller::{ModelState, Served};
use crate::models::registry::{Entry, ModelTable, Registry};
use crate::models::versions::ActiveRollout;

/// The time between two observations of both versions.
const OBSERVATION_INTERVAL: Duration = Duration::from_millis(50);

/// The maximum number of copies at the same time. Each can hold the memory of a request.
const MAX_COPIES: usize = 4;

/// The maximum number of copies at the same time while times are compared.
const MAX_TIMED_COPIES: usize = 1;

/// The configurations of both versions.
#[derive(Debug)]
pub(super) struct RolloutPair {
    pub(super) candidate: Arc<ModelConfig>,
    pub(super) former: Arc<ModelConfig>,
}

#[derive(Debug)]
pub(super) struct RolloutDriver {
    pub(super) registry: Registry,
    /// The name that clients use.
    pub(super) model: String,
    pub(super) pair: RolloutPair,
    pub(super) handle: RolloutHandle,
    commands_rx: mpsc::Receiver<QueuedRolloutCommand>,
    stage: StageProgress,
    /// The released version's figures at the start of the rollout.
    former_before: VersionFigures,
    promotion: Option<Promotion>,
    /// The generation of the new version's desired state that the stage needs.
    pub(super) awaited: u64,
    /// True if the former version has slept since the cut-over.
    has_slept: bool,
    /// True if the former version must sleep before the new one can start. Requests wait meanwhile.
    pub(super) sleeps_first: bool,
    /// True if the new version can get copies of requests.
    pub(super) copies: bool,
    /// True if requests wait for the new version although it has not started.
    pub(super) has_waiting: bool,
}

/// The progress of a stage.
#[derive(Debug, Default)]
struct StageProgress {
    /// The time at which the stage's share was in force. `None` before.
    since: Option<Instant>,
    candidate: VersionFigures,
    former: VersionFigures,
    mirror: MirrorCounts,
}

#[derive(Debug)]
struct Promotion {
    at: Instant,
    reply_tx: oneshot::Sender<Result<CommandedRollout, String>>,
}

/// Both versions, as far as workers serve them.
pub(super) struct ServedPair {
    pub(super) candidate: Option<Served>,
    pub(super) former: Option<Served>,
}

impl RolloutDriver {
    pub(super) fn new(
        registry: Registry,
        model: String,
        pair: RolloutPair,
        handle: RolloutHandle,
        commands_rx: mpsc::Receiver<QueuedRolloutCommand>,
    ) -> Self {
        Self {
            registry,
            model,
            pair,
            handle,
            commands_rx,
            stage: StageProgress::default(),
            former_before: VersionFigures::default(),
            promotion: None,
            awaited: 0,
            has_slept: false,
            sleeps_first: false,
            copies: true,
            has_waiting: false,
        }
    }

    pub(super) fn config(&self) -> &RolloutConfig {
        &self.handle.config
    }

    /// Drives the rollout until one of the two versions is unloaded.
    pub(super) async fn run(mut self) {
        let mut interval = tokio::time::interval(OBSERVATION_INTERVAL);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = interval.tick() => {}
                Some(command) = self.commands_rx.recv() => {
                    if self.execute(command) {
                        return;
                    }
                }
            }
            if self.advance() {
                return;
            }
        }
    }

    /// Executes a command. Returns true if the rollout has ended.
    fn execute(&mut self, QueuedRolloutCommand { command, reply_tx }: QueuedRolloutCommand) -> bool {
        let at = Instant::now();
        match (command, self.handle.stage) {
            (RolloutCommand::Promote, RolloutStage::Released) => {
                self.finish();
                let version = self.handle.candidate;
                let done = CommandedRollout { version, stage: RolloutStage::Released, took: at.elapsed() };
                reply_tx.send(Ok(done)).ok();
                true
            }
            (RolloutCommand::Promote, _) => {
                self.promotion = Some(Promotion { at, reply_tx });
                false
            }
            (RolloutCommand::RollBack, stage) => {
                self.roll_back("by a command");
                let version = self.handle.former;
                reply_tx.send(Ok(CommandedRollout { version, stage, took: at.elapsed() })).ok();
                true
            }
        }
    }

    /// Observes both versions, and performs the next step. Returns true if the rollout has ended.
    fn advance(&mut self) -> bool {
        if self.has_moved() {
            return false;
        }
        let pair = self.served();
        if pair.candidate.is_none() && !self.exists() {
            self.end(Some("the model was removed".to_owned()));
            return true;
        }
        if self.handle.kept_until.is_some_and(|until| SystemTime::now() >= until) {
            self.finish();
            return true;
        }
        if self.sleeps_first {
            self.make_room(&pair);
        }
        self.let_former_sleep(&pair);
        self.prepare(&pair);
        let view = self.view(&pair);
        match next(&self.config().rules, self.handle.stage, &view) {
            RolloutStep::Stay => false,
            RolloutStep::Enter(stage) => {
                self.enter(stage, &pair);
                let is_complete = stage == RolloutStage::Released && self.config().keep.is_zero();
                if is_complete {
                    self.finish();
                }
                is_complete
            }
            RolloutStep::RollBack(why) => {
                self.roll_back(&why);
                true
            }
        }
    }

    /// Makes requests wait for the new version, so that the former one can sleep.
    fn make_room(&mut self, pair: &ServedPair) {
        let ServedPair { candidate: Some(candidate), former: Some(former) } = pair else { return };
        (self.sleeps_first, self.has_waiting) = (false, true);
        if let Err(why) = candidate.pipeline.open_with_metadata_of(&former.pipeline) {
            tracing::warn!(model = self.model, why, "requests are refused until the new version is ready");
        }
        let mut table = self.registry.table();
        table.versions.entry(self.model.clone()).or_default().released = Some(self.handle.candidate);
        self.registry.publish(&table);
    }

    /// Makes the former version sleep if the new one needs its memory. A request that arrived before the
    /// cut-over may wake it again.
    fn let_former_sleep(&mut self, pair: &ServedPair) {
        let is_released = self.handle.stage == RolloutStage::Released && self.config().replace;
        if self.has_slept {
            return;
        }
        let Some(former) = pair.former.as_ref().filter(|_| is_released || self.has_waiting) else { return };
        let phase = former.pipeline.sleep_report().map(|sleep| sleep.phase);
        self.has_slept = is_released && phase == Some(SleepPhase::Asleep);
        if phase == Some(SleepPhase::Awake)
            && let Err(why) = former.pipeline.sleep(SleepCause::Command, false)
        {
            let model = &former.model.name;
            tracing::debug!(model, why, "the former version of the model cannot sleep yet");
        }
    }

    pub(super) fn served(&self) -> ServedPair {
        self.served_in(&self.registry.table())
    }

    pub(super) fn served_in(&self, table: &ModelTable) -> ServedPair {
        let served = |model: &ModelConfig| table.instance(&model.name)?.row.served().cloned();
        ServedPair { candidate: served(&self.pair.candidate), former: served(&self.pair.former) }
    }

    /// Returns true if the next supervisor serves one of the versions, and decides about it.
    fn has_moved(&self) -> bool {
        let table = self.registry.table();
        let moved =
            |model: &ModelConfig| table.instance(&model.name).is_some_and(|entry| entry.row.has_moved());
        moved(&self.pair.candidate) || moved(&self.pair.former)
    }

    /// Returns whether the configuration still contains both versions.
    fn exists(&self) -> bool {
        let table = self.registry.table();
        [&self.pair.candidate, &self.pair.former].iter().all(|model| table.instance(&model.name).is_some())
    }

    /// Returns the state of the new version's start, or of the change of its share.
    fn health(&self, candidate: Option<&Served>) -> CandidateHealth {
        let table = self.registry.table();
        let Some(entry) = table.instance(&self.pair.candidate.name) else {
            return CandidateHealth::Failed("it was removed".to_owned());
        };
        let settled = entry.goal.borrow().settled().clone();
        match (settled.generation.cmp(&self.awaited), settled.outcome, candidate) {
            (Less, _, _) => CandidateHealth::Starting,
            // A later command that was refused has left the new version as it was.
            (Equal, Err(why), _) => CandidateHealth::Failed(why),
            (_, _, None) => CandidateHealth::Failed("it was unloaded".to_owned()),
            (_, _, Some(served)) => match &served.report.borrow().state {
                ModelState::Unready { why, .. } => CandidateHealth::Failed(why.clone()),
                _ => CandidateHealth::Serving,
            },
        }
    }

    /// Begins to count when the stage's share is in force, and to copy requests.
    fn prepare(&mut self, pair: &ServedPair) {
        let ServedPair { candidate: Some(candidate), former: Some(_) } = pair else { return };
        if self.health(Some(candidate)) != CandidateHealth::Serving {
            return;
        }
        if self.stage.since.is_none() {
            self.stage = self.progress(pair, Some(Instant::now()));
            if self.handle.stage == RolloutStage::Starting {
                self.former_before = self.stage.former.clone();
            }
        }
        self.copy_requests();
    }

    /// Returns the progress of a stage that begins with the present figures.
    fn progress(&self, pair: &ServedPair, since: Option<Instant>) -> StageProgress {
        StageProgress {
            since,
            candidate: figures(pair.candidate.as_ref()),
            former: figures(pair.former.as_ref()),
            mirror: self.handle.mirror(),
        }
    }

    /// Sets the mirror of the stage, or moves it to other workers of the new version.
    fn copy_requests(&self) {
        let mut table = self.registry.table();
        let Some(mirror) = self.mirror(&table) else { return };
        let Some(rollout) = active(&mut table, &self.model) else { return };
        if rollout.mirror.as_ref().is_some_and(|current| current.is_like(&mirror)) {
            return;
        }
        rollout.mirror = Some(Arc::new(mirror));
        self.registry.publish(&table);
    }

    /// Returns the mirror of the stage, or `None` if the stage has none or its share is not in force yet.
    pub(super) fn mirror(&self, table: &ModelTable) -> Option<Mirror> {
        let max_copies = match self.handle.stage {
            RolloutStage::Mirror | RolloutStage::Canary { .. } => MAX_COPIES,
            RolloutStage::Timing => MAX_TIMED_COPIES,
            RolloutStage::Starting | RolloutStage::Released => return None,
        };
        let fraction = self.config().rules.mirror;
        let is_in_force = |entry: &&Entry| entry.goal.borrow().settled().generation >= self.awaited;
        let entry = table.instance(&self.pair.candidate.name).filter(is_in_force)?;
        let route = entry.row.route().filter(|route| fraction > 0.0 && !route.streams())?.clone();
        let rules = MirrorRules { fraction, max_copies, compare: self.config().compare };
        Some(Mirror::new(route, rules, Arc::clone(&self.handle.ledger)))
    }

    fn view(&self, ServedPair { candidate, former }: &ServedPair) -> RolloutView {
        let health = match self.health(candidate.as_ref()) {
            CandidateHealth::Serving if self.stage.since.is_none() => CandidateHealth::Starting,
            health => health,
        };
        let (now, former_now) = (figures(candidate.as_ref()), figures(former.as_ref()));
        let is_in_force = self.stage.since.is_some();
        let described = |served: &Option<Served>| served.as_ref()?.pipeline.metadata();
        let descriptions = described(former).zip(described(candidate));
        let mirror = self.handle.mirror();
        let is_streaming = candidate.as_ref().is_some_and(|served| served.pipeline.streams());
        RolloutView {
            elapsed: self.stage.since.map_or(Duration::ZERO, |since| since.elapsed()),
            health,
            incompatibility: descriptions
                .and_then(|(former, candidate)| incompatibility(&former, &candidate)),
            can_mirror: !is_streaming,
            candidate: with_comparisons(
                now.since(&self.stage.candidate).late_only_if(is_in_force),
                &mirror,
                &self.stage.mirror,
            ),
            released: former_now.since(&self.stage.former),
            target: self.pair.candidate.slo.percentile / 100.0,
            slowdown: now
                .slowdown(&self.stage.candidate, &former_now, &self.former_before)
                .filter(|_| is_in_force),
            is_promoted: self.promotion.is_some(),
        }
    }

    /// Enters a stage.
    fn enter(&mut self, stage: RolloutStage, pair: &ServedPair) {
        tracing::info!(
            model = self.model,
            version = self.handle.candidate,
            from = stage_name(self.handle.stage),
            to = stage_name(stage),
            "the rollout enters its next stage"
        );
        (self.handle.stage, self.handle.stage_since) = (stage, SystemTime::now());
        self.has_waiting = false;
        self.stage = self.progress(pair, None);
        if stage == RolloutStage::Released {
            self.handle.kept_until = Some(SystemTime::now() + self.config().keep);
        }
        self.publish_stage(pair);
        if let Some(Promotion { at, reply_tx }) = self.promotion.take() {
            let version = self.handle.candidate;
            reply_tx.send(Ok(CommandedRollout { version, stage, took: at.elapsed() })).ok();
        }
    }
}

fn figures(served: Option<&Served>) -> VersionFigures {
    served.map(VersionFigures::of).unwrap_or_default()
}

fn active<'t>(table: &'t mut ModelTable, model: &str) -> Option<&'t mut ActiveRollout> {
    table.versions.get_mut(model)?.rollout.as_mut()
}

/// Returns the name of a stage in logs and in the status.
pub fn stage_name(stage: RolloutStage) -> &'static str {
    match stage {
        RolloutStage::Starting => "starting",
        RolloutStage::Mirror => "mirror",
        RolloutStage::Timing => "timing",
        RolloutStage::Canary { .. } => "canary",
        RolloutStage::Released => "released",
    }
}
