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
use crate::pipeline::workers::LaneEvent;

/// The expected time of a worker's start, until one has been measured.
const START_TIME: Duration = Duration::from_secs(5);

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
        let Some(link) = self.link_mut(worker) else { return };
        let residency = &link.residency;
        let (Some(cause), Err(why)) = (residency.exits_for(), residency.bytes.clone()) else { return };
        let (bytes, behind) = (residency.process_bytes, residency.behind);
        let wake_time = self.start_time.unwrap_or(START_TIME);
        let (since, woken, is_announced) = (now, None, false);
        self.absence = Some(Absence { cause, since, bytes, why, wake_time, behind, woken, is_announced });
        self.stats.sleep.sleeps += 1;
        tracing::debug!(model = &*self.name, ?cause, "the model sleeps without a worker");
        self.residency.changed.notify_one();
    }

    /// Returns true if a worker exits for a sleep. Requests then wait for the start of the next worker, even
    /// past their deadlines.
    pub(crate) fn is_worker_leaving(&self) -> bool {
        self.links.iter().any(|link| link.residency.exits_for().is_some())
    }

    /// Orders the start of a worker for a model that sleeps without one.
    pub(super) fn recall(&mut self, now: Timestamp) {
        let Some(absence) = self.absence.as_mut().filter(|absence| absence.woken.is_none()) else { return };
        absence.woken = Some(now);
        self.report(LaneEvent::Recalled);
        self.publish_sleep();
    }

    /// Records that a worker serves, or that the model refuses requests.
    pub(crate) fn end_absence(&mut self, now: Timestamp) {
        let Some(Absence { woken, .. }) = self.absence.take() else { return };
        if let Some(woken) = woken {
            let took = now.since(woken);
            self.start_time = Some(took);
            self.stats.sleep.record_wake(took);
            tracing::debug!(model = &*self.name, took_ms = ms(took), "the model is awake");
        }
        self.residency.changed.notify_one();
    }
}
