//! The transitions of a rollout: what requests, shares and versions are after a stage begins or the rollout
//! ends.

use std::sync::Arc;
use std::time::SystemTime;

use shadowslice_config::{ModelConfig, QueueConfig, VersionPolicy};
use shadowslice_datapath::peer::{AuditOutcome, Peer, audit};
use shadowslice_datapath::pipeline::SleepPhase;
use shadowslice_datapath::versions::CanarySplit;
use shadowslice_policy::rollout::RolloutStage;

use super::RolloutOutcome;
use super::driver::{RolloutDriver, ServedPair, stage_name};
use crate::models::desired::PendingOutcome;
use crate::models::registry::{Entry, ModelTable};
use crate::models::versions::{ActiveRollout, ModelVersions, Release, written_path};

impl RolloutDriver {
    /// Makes the requests and the share of the stage come into force, in one step.
    pub(super) fn publish_stage(&mut self, pair: &ServedPair) {
        let registry = self.registry.clone();
        let mut table = registry.table();
        let own_share = !matches!(self.handle.stage, RolloutStage::Starting | RolloutStage::Mirror);
        if own_share && let Some(awaited) = self.give_own_share(&table, pair) {
            self.awaited = awaited;
        }
        let release = self.release(&table, &self.pair.candidate);
        let mirror = self.mirror(&table).map(Arc::new);
        let versions = table.versions.entry(self.model.clone()).or_default();
        if self.handle.stage == RolloutStage::Released {
            versions.released = Some(self.handle.candidate);
            versions.release = release;
            self.audit(AuditOutcome::Done);
        }
        let canary = match self.handle.stage {
            RolloutStage::Canary { step } => self.config().rules.canary.get(step).copied(),
            _ => None,
        };
        let canary = canary.map(|part| Arc::new(CanarySplit::new(part, self.config().sticky.clone())));
        versions.rollout = Some(ActiveRollout { handle: self.handle.clone(), mirror, canary });
        registry.publish(&table);
    }

    /// Gives the new version the share and the rules of the former one. Returns the generation of its desired
    /// state, or `None` if it has them already.
    fn give_own_share(&self, table: &ModelTable, pair: &ServedPair) -> Option<u64> {
        let entry = table.instance(&self.pair.candidate.name)?;
        let own = table.instance(&self.pair.former.name).map_or(Arc::clone(&self.pair.former), Entry::model);
        let now = entry.model();
        if now.share == own.share && now.queue.on_late == own.queue.on_late {
            return None;
        }
        let share = pair.former.as_ref().map(|former| former.report.borrow().share);
        let queue = QueueConfig { on_late: own.queue.on_late, ..now.queue };
        let model = Arc::new(ModelConfig { share: own.share, queue, ..(*now).clone() });
        let change = PendingOutcome::change(&entry.goal, |desired, _| {
            (desired.spec.model, desired.share) = (model, share);
        });
        Some(change.generation())
    }

    /// Returns the release of a version, which the configuration file does not name.
    fn release(&self, table: &ModelTable, version: &ModelConfig) -> Option<Release> {
        let path = version.engine.path()?.to_owned();
        let written = table.written_path(&self.model).unwrap_or_else(|| written_path(&self.pair.former));
        Some(Release { number: version.version.number, path, written, newest: table.newest(&self.model) })
    }

    /// Records that the former version is released although its folder has the new one, so that a restart
    /// does not release the new version.
    pub(super) fn remember_former(&self, table: &mut ModelTable) {
        if self.pair.former.version.folder.is_some() {
            let release = self.release(table, &self.pair.former);
            table.versions.entry(self.model.clone()).or_default().release = release;
        }
    }

    /// Sends all requests to the former version again, and ends the new one.
    pub(super) fn roll_back(&self, why: &str) {
        let pair = self.served();
        if let Some(former) = &pair.former
            && former.pipeline.sleep_report().is_some_and(|sleep| sleep.phase != SleepPhase::Awake)
        {
            former.pipeline.order_wake();
        }
        {
            let mut table = self.registry.table();
            let release = self.release(&table, &self.pair.former);
            let versions = table.versions.entry(self.model.clone()).or_default();
            versions.released = Some(self.handle.former);
            if self.handle.stage == RolloutStage::Released {
                versions.release = release;
            }
        }
        tracing::warn!(
            model = self.model,
            version = self.handle.candidate,
            stage = stage_name(self.handle.stage),
            why,
            "the new version of the model was rolled back; the former version answers all requests"
        );
        self.audit(AuditOutcome::Failed(why));
        self.end(Some(why.to_owned()));
        if let Some(candidate) = pair.candidate.as_ref().filter(|_| self.has_waiting) {
            candidate.pipeline.shut("the new version of the model did not start");
        }
    }

    /// Records how the rollout ended, as an action of the supervisor.
    fn audit(&self, outcome: AuditOutcome<'_>) {
        let on = format!("{}:{}", self.model, self.handle.candidate);
        audit(&Peer::own(), "rollout", &on, outcome);
    }

    /// Ends the former version.
    pub(super) fn finish(&self) {
        tracing::info!(
            model = self.model,
            version = self.handle.candidate,
            "the rollout is complete; unloading the former version"
        );
        self.end(None);
    }

    /// Ends the rollout and the version that lost.
    pub(super) fn end(&self, why: Option<String>) {
        let mut table = self.registry.table();
        let is_rolled_back = why.is_some();
        let lost = if is_rolled_back { &self.pair.candidate } else { &self.pair.former };
        let outcome = RolloutOutcome {
            candidate: self.handle.candidate,
            former: self.handle.former,
            at: SystemTime::now(),
            why,
            mirror: self.handle.mirror(),
        };
        let versions = table.versions.entry(self.model.clone()).or_default();
        *versions = ModelVersions {
            released: versions.released,
            release: versions.release.clone(),
            rollout: None,
            last: Some(outcome),
        };
        // The routes to the version that lost must be gone before its instance waits for them.
        self.registry.publish(&table);
        let is_kept = table.instance(&lost.name).is_some_and(|entry| is_always_served(&entry.model()));
        if !is_kept {
            self.registry.remove(&mut table, &lost.name);
        } else if is_rolled_back {
            let pair = self.served_in(&table);
            self.give_own_share(&table, &pair);
        }
    }
}

/// Returns whether the version is served even if it is not released.
fn is_always_served(model: &ModelConfig) -> bool {
    match model.version.folder.as_ref().map(|folder| &folder.policy) {
        Some(VersionPolicy::All) => true,
        Some(VersionPolicy::Listed(numbers)) => numbers.contains(&model.version.number),
        Some(VersionPolicy::Latest) | None => false,
    }
}
