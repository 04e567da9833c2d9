//! The weights of a model's worker: whether they are on the GPU, and what follows from a decision about
//! sleep.
//!
//! ```text
//! Awake ─▶ Draining ─▶ Asleep ─▶ Waking ─▶ Awake
//! ```
//!
//! As on the emulated device, the release of weights takes no time, and the wake time depends on their
//! size.

use std::time::Duration;

use shadowslice_policy::residency::{AwakeLoad, ModelResidency, ResidencyAction, WeightsState, wanted_by};
use shadowslice_policy::scheduler::{Lane, LaneWeights, RefusalReason};
use shadowslice_shared::profile::ProcessMemory;
use shadowslice_shared::units::Timestamp;

use crate::scenario::SleepRule;
use crate::time::{NEVER, at_ns, ns, timestamp};
use crate::world::model::{WorldModel, id};
use crate::world::{SharedState, WorldTimer, timer};

/// The delay after its deadline at which a request is refused if its model still sleeps. It is the same
/// as in the supervisor.
const OVERDUE_DELAY: Duration = Duration::from_millis(1);

/// The weights of a model.
#[derive(Debug)]
pub(in crate::world) struct WorldWeights {
    phase: WeightsPhase,
    wake_time: Duration,
    /// The time of the last accepted request.
    used: Timestamp,
    /// The number of requests that waited for the last wake and have no answers yet.
    owed: usize,
    /// The deadline behind which the model waits for its wake, if it was interrupted for another model.
    behind: Option<Timestamp>,
    /// True if the last decision took into account that requests wait.
    is_announced: bool,
    pub(in crate::world) tally: SleepTally,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WeightsPhase {
    Awake {
        since: Timestamp,
    },
    /// The worker finishes its batches before it sleeps.
    Draining,
    Asleep,
    Waking,
}

/// The wakes of a model since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct SleepTally {
    pub(crate) wakes: u64,
    /// The sum of the times of all wakes, in ns.
    pub(crate) wake_ns: u64,
}

impl WorldWeights {
    /// Returns the weights of a worker that has just loaded its model.
    pub(in crate::world) fn new(memory: ProcessMemory) -> Self {
        Self {
            phase: WeightsPhase::Awake { since: timestamp(0) },
            wake_time: memory.wake_time(),
            used: timestamp(0),
            owed: 0,
            behind: None,
            is_announced: false,
            tally: SleepTally::default(),
        }
    }

    pub(super) fn are_on_gpu(&self) -> bool {
        self.phase != WeightsPhase::Asleep
    }

    pub(in crate::world) fn is_awake(&self) -> bool {
        matches!(self.phase, WeightsPhase::Awake { .. })
    }

    /// Returns true if batches wait on the lane for the weights.
    pub(in crate::world) fn is_waking(&self) -> bool {
        self.phase == WeightsPhase::Waking
    }

    pub(in crate::world) fn record_accepted(&mut self, now: u64) {
        self.used = timestamp(now);
    }

    /// Records answers. Returns true if they are the last that the model owed.
    pub(in crate::world) fn record_answered(&mut self, requests: usize) -> bool {
        let before = self.owed;
        self.owed = before.saturating_sub(requests);
        before > 0 && self.owed == 0
    }
}

impl WorldModel<'_> {
    /// Returns the state of the model's weights, for a decision.
    pub(super) fn residency(&mut self) -> ModelResidency {
        let deadline = self.scheduler.earliest_deadline();
        let wanted = deadline.map(|deadline| wanted_by(deadline, self.weights.behind));
        self.weights.is_announced = wanted.is_some();
        let WorldWeights { wake_time, used, .. } = self.weights;
        let must_stay = self.spec.sleep == SleepRule::Never || self.has_second_worker();
        let state = match self.weights.phase {
            WeightsPhase::Awake { since } if !must_stay => {
                WeightsState::Awake { since, used, load: self.awake_load() }
            }
            WeightsPhase::Awake { .. } | WeightsPhase::Waking => WeightsState::InUse { leaves: false },
            WeightsPhase::Draining => WeightsState::InUse { leaves: true },
            WeightsPhase::Asleep => WeightsState::Asleep { wanted },
        };
        let sleep_after = match self.spec.sleep {
            SleepRule::Never | SleepRule::OnPressure => None,
            SleepRule::After(after) => Some(after),
        };
        let bytes = self.spec.truth.memory.weights;
        ModelResidency { priority: self.spec.terms.priority, bytes, wake_time, state, sleep_after }
    }

    fn awake_load(&self) -> AwakeLoad {
        match self.weights.owed {
            _ if self.scheduler.queued() == 0 && self.is_lane_empty() => AwakeLoad::Idle,
            0 => AwakeLoad::Busy,
            _ => AwakeLoad::Owing,
        }
    }

    fn is_lane_empty(&self) -> bool {
        self.scheduler.serving_lane().is_none_or(Lane::is_empty)
    }

    /// Performs a decision about the model's weights.
    pub(super) fn act_on_weights(&mut self, action: ResidencyAction, now: u64, shared: &mut SharedState<'_>) {
        let serving = id(self.serving);
        let WorldWeights { wake_time, .. } = self.weights;
        match action {
            ResidencyAction::Wake => {
                self.weights.phase = WeightsPhase::Waking;
                self.weights.owed = self.scheduler.queued();
                let until = now.saturating_add(ns(wake_time));
                self.scheduler.set_weights(serving, LaneWeights::Loading(timestamp(until)));
                shared.timers.set(timer(self.index, WorldTimer::Wake), until);
            }
            ResidencyAction::SleepIdle
            | ResidencyAction::SleepForOthers
            | ResidencyAction::Interrupt { .. } => {
                self.weights.phase = WeightsPhase::Draining;
                self.weights.is_announced = false;
                self.weights.behind = match action {
                    ResidencyAction::Interrupt { behind } => Some(behind),
                    _ => None,
                };
                self.scheduler.set_weights(serving, LaneWeights::Released(wake_time));
            }
        }
        self.dispatch(now, shared);
    }

    /// Releases the weights if the worker should sleep and has finished its batches.
    pub(in crate::world) fn continue_sleep(&mut self, shared: &mut SharedState<'_>) {
        if self.weights.phase == WeightsPhase::Draining && self.is_lane_empty() {
            self.weights.phase = WeightsPhase::Asleep;
            shared.sleep.is_due = true;
        }
    }

    /// Handles the end of a wake.
    pub(in crate::world) fn awoke(&mut self, now: u64, shared: &mut SharedState<'_>) {
        shared.timers.set(timer(self.index, WorldTimer::Wake), NEVER);
        self.weights.phase = WeightsPhase::Awake { since: timestamp(now) };
        self.weights.tally.wakes += 1;
        self.weights.tally.wake_ns += ns(self.weights.wake_time);
        shared.sleep.is_due = true;
        let serving = id(self.serving);
        self.scheduler.set_weights(serving, LaneWeights::Loaded);
        self.execute(serving, now, shared);
        self.dispatch(now, shared);
    }

    /// Makes a decision due because requests wait for a model that sleeps. Returns the time at which the
    /// first of these requests is refused.
    pub(in crate::world) fn await_wake(&mut self, shared: &mut SharedState<'_>) -> u64 {
        shared.sleep.is_due |= !std::mem::replace(&mut self.weights.is_announced, true);
        let deadline = self.scheduler.earliest_deadline().filter(|_| self.scheduler.refuses_overdue());
        deadline.map_or(NEVER, |deadline| at_ns(deadline + OVERDUE_DELAY))
    }

    /// Makes a decision due if the model is idle and another model waits for memory.
    pub(in crate::world) fn announce_idle(&self, shared: &mut SharedState<'_>) {
        shared.sleep.is_due |= shared.sleep.is_short && self.scheduler.in_flight() == 0;
    }

    /// Refuses requests whose deadline has passed while the model sleeps.
    pub(in crate::world) fn refuse_overdue(&mut self, now: u64) {
        if self.scheduler.serving_lane().is_some_and(Lane::sleeps) {
            let overdue = self.scheduler.take_overdue(RefusalReason::Asleep, timestamp(now));
            self.refused(overdue.len(), timestamp(now));
        }
    }

    /// Returns true if a second worker of the model starts, stands by or finishes its batches. The model
    /// then stays awake, because both workers use the same weights.
    pub(super) fn has_second_worker(&self) -> bool {
        self.shadow.is_some() || [0, 1].iter().all(|&worker| self.scheduler.lane(id(worker)).is_some())
    }
}
