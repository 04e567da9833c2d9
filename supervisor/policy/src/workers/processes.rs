//! The processes of a model's workers: the slot of each worker, the primary, the standby's state, and the
//! failures so far.

use std::collections::BTreeMap;
use std::time::Duration;

use shadowslice_shared::boot::WorkerPurpose;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Timestamp;

use super::change::HandoverOutcome;
use super::primary::Primary;
use super::slot::{ExitReason, Role, Slot, StartPhase, StartPurpose};
use super::standby::StandbyState;
use crate::restart::Restarts;

/// The state of a model's processes.
#[derive(Debug)]
pub(super) struct Processes {
    slots: BTreeMap<WorkerId, Slot>,
    /// The number of the last worker that was started.
    started: u64,
    pub(super) primary: Primary,
    pub(super) standby: StandbyState,
    pub(super) restarts: Restarts,
    /// The purpose of the next reference worker. This is `None` after the reference answers have been
    /// written.
    pub(super) reference: Option<WorkerPurpose>,
    /// The number of deaths of workers that served or were starting to serve.
    pub(super) deaths: u64,
    pub(super) last_death: Option<String>,
    /// The number of starts that replaced dead workers.
    pub(super) restarted: u64,
}

impl Processes {
    pub(super) fn new(reference: WorkerPurpose) -> Self {
        Self {
            slots: BTreeMap::new(),
            started: 0,
            primary: Primary::Down { why: "not started".to_owned(), again: None },
            standby: StandbyState::new(),
            restarts: Restarts::new(),
            reference: Some(reference),
            deaths: 0,
            last_death: None,
            restarted: 0,
        }
    }

    /// Adds a worker that starts. Returns its id.
    pub(super) fn add(&mut self, slot: Slot) -> WorkerId {
        self.started += 1;
        let worker = WorkerId(self.started);
        self.slots.insert(worker, slot);
        worker
    }

    pub(super) fn remove(&mut self, worker: WorkerId) -> Option<Slot> {
        self.slots.remove(&worker)
    }

    pub(super) fn slot(&self, worker: WorkerId) -> Option<&Slot> {
        self.slots.get(&worker)
    }

    pub(super) fn slot_mut(&mut self, worker: WorkerId) -> Option<&mut Slot> {
        self.slots.get_mut(&worker)
    }

    pub(super) fn all(&self) -> Vec<WorkerId> {
        self.slots.keys().copied().collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    pub(super) fn role(&self, worker: WorkerId) -> Option<&Role> {
        self.slot(worker).map(|slot| &slot.role)
    }

    pub(super) fn becomes(&mut self, worker: WorkerId, role: Role) {
        if let Some(slot) = self.slots.get_mut(&worker) {
            slot.role = role;
        }
    }

    /// Records that a worker has connected, and that it must be warm before `until`. Returns true if the
    /// worker was not connected before.
    pub(super) fn connected(&mut self, worker: WorkerId, until: Timestamp) -> bool {
        match self.slots.get_mut(&worker).map(|slot| &mut slot.role) {
            Some(Role::Starting { phase: phase @ StartPhase::Spawning, until: due, .. }) => {
                (*phase, *due) = (StartPhase::Warming, until);
                true
            }
            _ => false,
        }
    }

    pub(super) fn find(&self, is: impl Fn(&Role) -> bool) -> Option<WorkerId> {
        self.slots.iter().find(|(_, slot)| is(&slot.role)).map(|(worker, _)| *worker)
    }

    /// Returns the first result of `of` for a worker's role.
    pub(super) fn find_map<T>(&self, of: impl Fn(&Role) -> Option<T>) -> Option<T> {
        self.slots.values().find_map(|slot| of(&slot.role))
    }

    /// Returns the next time at which a worker exceeds the time limit of its role.
    pub(super) fn due(&self) -> Option<Timestamp> {
        self.slots.values().filter_map(|slot| slot.role.until()).min()
    }

    /// Returns the workers that have exceeded the time limit of their role.
    pub(super) fn late(&self, now: Timestamp) -> Vec<WorkerId> {
        let late = |slot: &Slot| slot.role.until().is_some_and(|until| until <= now);
        self.slots.iter().filter_map(|(worker, slot)| late(slot).then_some(*worker)).collect()
    }

    pub(super) fn serving(&self) -> Option<WorkerId> {
        self.find(|role| matches!(role, Role::Serving { .. }))
    }

    /// Returns the standby, if it is warm.
    pub(super) fn ready(&self) -> Option<WorkerId> {
        self.find(|role| matches!(role, Role::Standby { .. }))
    }

    pub(super) fn starting_standby(&self) -> Option<WorkerId> {
        self.find(|role| role.starts_as(StartPurpose::Standby))
    }

    pub(super) fn parked(&self) -> Option<WorkerId> {
        self.find(|role| matches!(role, Role::Parked { .. }))
    }

    /// Returns the incumbent, if it can take the traffic back.
    pub(super) fn fallback(&self) -> Option<WorkerId> {
        self.find(|role| matches!(role, Role::Parked { .. } | Role::Draining { .. }))
    }

    /// Returns true if traffic could move to another worker, either immediately or when that worker is
    /// warm.
    pub(super) fn has_replacement(&self) -> bool {
        self.fallback().is_some() || self.ready().is_some() || self.starting_standby().is_some()
    }

    /// Returns true if the new share was in force, and the failed shadow has not exited yet.
    pub(super) fn is_rolling_back(&self) -> bool {
        let leaves = |role: &Role| {
            matches!(role, Role::Exiting { reason: ExitReason::Handover(HandoverOutcome::RolledBack(_)), .. })
        };
        self.find(leaves).is_some()
    }

    /// Lets a starting standby become the shadow of a hand-over.
    pub(super) fn take_starting(&mut self, worker: WorkerId, now: Timestamp) {
        if let Some(Role::Starting { purpose, .. }) = self.slots.get_mut(&worker).map(|slot| &mut slot.role) {
            *purpose = StartPurpose::Shadow;
        }
        self.standby.starts_again(now);
    }

    /// Ends a hand-over's wait for the exit of its incumbent, unless the incumbent was killed. Returns
    /// true if there was one.
    pub(super) fn release_incumbent(&mut self) -> bool {
        let retiring = self.slots.values_mut().find_map(|slot| match &mut slot.role {
            Role::Exiting {
                reason: reason @ ExitReason::Handover(HandoverOutcome::Completed),
                killed: false,
                ..
            } => Some(reason),
            _ => None,
        });
        let found = retiring.is_some();
        if let Some(reason) = retiring {
            *reason = ExitReason::Unneeded;
        }
        found
    }

    /// Records the exit of an idle worker, so that rare faults of a model without requests do not add
    /// up.
    pub(super) fn note_idle(&mut self, ready: Duration, idle: bool) {
        if idle {
            self.restarts.record_idle_exit(ready);
        }
    }

    /// Records that a worker died that served or was starting to serve.
    pub(super) fn record_death(&mut self, why: &str) {
        self.deaths += 1;
        self.last_death = Some(why.to_owned());
    }

    /// Starts a worker at `until` to replace a dead one.
    pub(super) fn restart_at(&mut self, until: Timestamp) {
        self.restarted += 1;
        self.primary = Primary::BackingOff { until };
    }
}
