//! The sleep of a model without a worker, for models whose worker cannot release its weights. The worker
//! exits, and the request that wakes the model waits until another worker has started.
//!
//! ```text
//! Awake ─▶ Draining ─▶ FallingAsleep ─▶ the worker exits: Absence ─▶ another worker serves: Awake
//! ```

use std::time::Duration;

use shadowslice_policy::residency::WeightsState;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Timestamp, ms};

use super::{SleepCause, SleepCounts, SleepPhase, SleepReport, SleepState};
use crate::pipeline::state::PipelineState;
use crate::pipeline::workers::{LaneEvent, PipelineLane};

/// The expected time of a worker's start, until one has been measured.
pub(super) const START_TIME: Duration = Duration::from_secs(5);

/// A sleep without a worker.
#[derive(Debug)]
pub(crate) struct Absence {
    cause: SleepCause,
    since: Timestamp,
    /// The memory that the worker had, in bytes.
    bytes: u64,
    /// The reason why the worker could not release its weights.
    why: String,
    /// The expected time of the next worker's start.
    wake_time: Duration,
    /// The deadline behind which the model waits for its wake, if it was interrupted for another model.
    pub(super) behind: Option<Timestamp>,
    /// The time of the order to wake, if there was one.
    woken: Option<Timestamp>,
    /// True if the GPU has too little memory for a wake, although requests wait.
    lacks_memory: bool,
    /// True if the deciding task knows that requests wait.
    pub(super) is_announced: bool,
}

impl Absence {
    pub(super) fn phase(&self) -> SleepPhase {
        if self.woken.is_some() { SleepPhase::Waking } else { SleepPhase::Asleep }
    }

    /// Returns the state for the deciding task. `wanted` is the earliest deadline of the requests that wait.
    pub(super) fn state(&mut self, wanted: Option<Timestamp>) -> SleepState {
        self.is_announced = wanted.is_some();
        let weights = match self.woken {
            Some(_) => WeightsState::InUse { leaves: false },
            None => WeightsState::Asleep { wanted },
        };
        let &mut Self { bytes, wake_time, .. } = self;
        let (ends_worker, starts_worker) = (true, self.woken.is_some());
        SleepState { bytes, ends_worker, starts_worker, wake_time, weights, pinned: 0, retry_at: None }
    }

    pub(super) fn report(&self, counts: SleepCounts, now: Timestamp) -> SleepReport {
        let sleeps = self.woken.is_none();
        SleepReport {
            phase: self.phase(),
            asleep_for: sleeps.then(|| now.since(self.since)),
            cause: sleeps.then_some(self.cause),
            bytes: self.bytes,
            ends_worker: Some(self.why.clone()),
            pinned: 0,
            counts,
        }
    }
}

impl PipelineState {
    /// Records the exit of a worker. The model sleeps if this was the reason for the exit.
    pub(crate) fn record_exit(&mut self, worker: WorkerId, now: Timestamp) {
        // If another worker serves, this exit does not leave the model without one.
        let [link] = &self.links[..] else { return };
        if link.worker != worker || self.scheduler.serving_lane().is_none_or(|lane| lane.worker != worker) {
            return;
        }
        let residency = &link.residency;
        let (Some(cause), Err(why)) = (residency.exits_for(), residency.bytes.clone()) else { return };
        let (bytes, behind) = (residency.process_bytes, residency.behind);
        let wake_time = self.start_time.unwrap_or(START_TIME);
        self.absence = Some(Absence {
            cause,
            since: now,
            bytes,
            why,
            wake_time,
            behind,
            woken: None,
            lacks_memory: false,
            is_announced: false,
        });
        self.stats.sleep.sleeps += 1;
        self.stats.sleep.last_sleep_time = None;
        tracing::debug!(model = &*self.name, ?cause, "the model sleeps without a worker");
        self.residency.changed.notify_one();
    }

    /// Returns true if requests are refused after their deadlines, because the model sleeps and has no memory
    /// to wake. If a worker exits or starts, requests wait for the start.
    pub(crate) fn refuses_asleep(&self) -> bool {
        if let Some(absence) = &self.absence {
            return absence.lacks_memory;
        }
        self.scheduler.serving_lane().is_some_and(PipelineLane::sleeps)
            && !self.links.iter().any(|link| link.residency.is_leaving())
    }

    /// Records whether the model can wake for the requests that wait.
    pub(super) fn record_shortage(&mut self, lacks_memory: bool, now: Timestamp) {
        let Some(absence) = self.absence.as_mut().filter(|absence| absence.woken.is_none()) else { return };
        // A dispatch can cause the next decision, so only the first record sets the alarm.
        if !std::mem::replace(&mut absence.lacks_memory, lacks_memory) && lacks_memory {
            self.dispatch(now);
        }
    }

    /// Records that the GPU has too little memory for the worker that should start. The deciding task orders
    /// the start again when there is.
    pub(super) fn await_memory(&mut self) {
        if let Some(absence) = self.absence.as_mut().filter(|absence| absence.woken.is_some()) {
            (absence.woken, absence.is_announced) = (None, false);
            self.residency.changed.notify_one();
            self.publish_sleep();
        }
    }

    /// Orders the start of a worker for a model that sleeps without one.
    pub(super) fn recall(&mut self, now: Timestamp) {
        let Some(absence) = self.absence.as_mut().filter(|absence| absence.woken.is_none()) else { return };
        (absence.woken, absence.lacks_memory) = (Some(now), false);
        self.report(LaneEvent::Recalled);
        self.publish_sleep();
    }

    /// Records that a worker serves. It is the model's turn until the worker has answered the requests that
    /// wait.
    pub(crate) fn end_absence(&mut self, now: Timestamp) {
        let Some(Absence { woken, bytes, wake_time, .. }) = self.absence.take() else { return };
        let took = woken.map_or(wake_time, |woken| now.since(woken));
        self.start_time = Some(took);
        self.stats.sleep.record_wake(took);
        let owed = self.scheduler.queued();
        if let Some((link, _)) = self.serving() {
            link.residency.begin_turn(took, owed, bytes, now);
        }
        tracing::debug!(model = &*self.name, took_ms = ms(took), "the model is awake");
        self.residency.changed.notify_one();
    }

    /// Forgets a sleep without a worker, because the model refuses requests.
    pub(crate) fn drop_absence(&mut self) {
        self.is_wake_ordered = false;
        if self.absence.take().is_some() {
            self.residency.changed.notify_one();
            self.publish_sleep();
        }
    }
}
