//! The weights of a model's workers: the orders to release them and to bring them back, and the workers'
//! replies.

use std::sync::atomic::Ordering;
use std::time::Duration;

use shadowslice_policy::residency::{AwakeLoad, WeightsState, wanted_by};
use shadowslice_policy::scheduler::LaneWeights;
use shadowslice_shared::batch::{Command, SleepReply};
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::profile::wake_time;
use shadowslice_shared::units::{Timestamp, ms};

use super::absence::{Absence, START_TIME};
use super::{SleepCause, SleepPhase, SleepReport, SleepState};
use crate::pipeline::state::PipelineState;
use crate::pipeline::workers::{LaneEvent, PipelineLane, WorkerLink};

/// The pause after a failed wake, before the next attempt.
const WAKE_BACKOFF: Duration = Duration::from_millis(100);

/// The number of consecutive failed wakes after which the worker is replaced.
const MAX_FAILED_WAKES: u32 = 3;

/// The state of a worker's weights on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WorkerWeights {
    Awake {
        since: Timestamp,
    },
    /// The worker finishes its batches before it sleeps.
    Draining {
        cause: SleepCause,
    },
    FallingAsleep {
        cause: SleepCause,
    },
    Asleep {
        cause: SleepCause,
        since: Timestamp,
        retry_at: Timestamp,
    },
    Waking,
}

/// The weights of one worker.
#[derive(Debug)]
pub(crate) struct Residency {
    weights: WorkerWeights,
    /// The memory that the worker releases while it sleeps in bytes, or the reason why it must exit.
    pub(super) bytes: Result<u64, String>,
    /// The memory of the whole worker, in bytes.
    pub(super) process_bytes: u64,
    /// The expected time to wake.
    wake_time: Duration,
    /// The deadline behind which the model waits for its wake, if it was interrupted for another model.
    pub(super) behind: Option<Timestamp>,
    failed_wakes: u32,
    /// True if the deciding task knows that requests wait.
    is_announced: bool,
    /// The number of requests that waited for the last wake and have no answers yet.
    owed: usize,
    /// The host memory that the worker has pinned, in bytes.
    pinned: u64,
}

impl Residency {
    /// Creates the state of a worker whose weights are loaded.
    pub(crate) fn new(bytes: Result<u64, String>, now: Timestamp) -> Self {
        let wake_time = bytes.as_ref().map_or(START_TIME, |bytes| wake_time(*bytes));
        let weights = WorkerWeights::Awake { since: now };
        let process_bytes = 0;
        Self {
            weights,
            bytes,
            process_bytes,
            wake_time,
            behind: None,
            failed_wakes: 0,
            is_announced: false,
            owed: 0,
            pinned: 0,
        }
    }

    /// Returns the memory that the model releases while it sleeps, in bytes.
    pub(super) fn released(&self) -> u64 {
        self.bytes.as_ref().map_or(self.process_bytes, |bytes| *bytes)
    }

    /// Returns why the worker falls asleep, if it does so by its exit.
    pub(super) fn exits_for(&self) -> Option<SleepCause> {
        match self.weights {
            WorkerWeights::FallingAsleep { cause } if self.bytes.is_err() => Some(cause),
            _ => None,
        }
    }

    /// Returns true if the worker is about to exit for a sleep.
    pub(super) fn is_leaving(&self) -> bool {
        let sleeps =
            matches!(self.weights, WorkerWeights::Draining { .. } | WorkerWeights::FallingAsleep { .. });
        sleeps && self.bytes.is_err()
    }

    /// Records that the worker has started for a wake, while this number of requests waited. `bytes` is the
    /// memory of the worker before it.
    pub(super) fn begin_turn(&mut self, wake_time: Duration, owed: usize, bytes: u64, now: Timestamp) {
        self.weights = WorkerWeights::Awake { since: now };
        (self.wake_time, self.owed, self.process_bytes) = (wake_time, owed, bytes);
    }

    fn phase(&self) -> SleepPhase {
        match self.weights {
            WorkerWeights::Awake { .. } => SleepPhase::Awake,
            WorkerWeights::Draining { .. } | WorkerWeights::FallingAsleep { .. } => SleepPhase::FallingAsleep,
            WorkerWeights::Asleep { .. } => SleepPhase::Asleep,
            WorkerWeights::Waking => SleepPhase::Waking,
        }
    }

    fn cause(&self) -> Option<SleepCause> {
        match self.weights {
            WorkerWeights::Awake { .. } | WorkerWeights::Waking => None,
            WorkerWeights::Draining { cause }
            | WorkerWeights::FallingAsleep { cause }
            | WorkerWeights::Asleep { cause, .. } => Some(cause),
        }
    }
}

impl PipelineState {
    /// Reports the phase of the serving worker, if it has changed.
    pub(crate) fn publish_sleep(&mut self) {
        let absent = self.absence.as_ref().map(Absence::phase);
        let phase = absent.or(self.serving().map(|(link, _)| link.residency.phase())).unwrap_or_default();
        self.sleep_tx.send_if_modified(|known| std::mem::replace(known, phase) != phase);
    }

    /// Returns the link and the lane of the worker that serves.
    pub(super) fn serving(&mut self) -> Option<(&mut WorkerLink, &PipelineLane)> {
        let Self { scheduler, links, .. } = self;
        let lane = scheduler.serving_lane()?;
        Some((links.iter_mut().find(|link| link.worker == lane.worker)?, lane))
    }

    /// Tells the deciding task that requests wait for a model that sleeps, unless it knows.
    pub(crate) fn announce_waiting(&mut self) {
        let is_announced = match &mut self.absence {
            Some(absence) => Some(&mut absence.is_announced),
            None => self.serving().map(|(link, _)| &mut link.residency.is_announced),
        };
        if is_announced.is_some_and(|is_announced| !std::mem::replace(is_announced, true)) {
            self.residency.changed.notify_one();
        }
    }

    /// Tells the deciding task that the model is idle, if another model waits for memory.
    pub(crate) fn announce_idle(&self) {
        if self.residency.is_short.load(Ordering::Relaxed) && self.scheduler.in_flight() == 0 {
            self.residency.changed.notify_one();
        }
    }

    /// Orders workers to sleep that have finished their batches.
    pub(crate) fn continue_sleep(&mut self) {
        let (pin, mut dismissed) = (self.pins, Vec::new());
        for link in &mut self.links {
            let WorkerWeights::Draining { cause } = link.residency.weights else { continue };
            if self.scheduler.lane(link.worker).is_some_and(PipelineLane::is_empty) {
                link.residency.weights = WorkerWeights::FallingAsleep { cause };
                match link.residency.bytes {
                    Ok(_) => link.command(Command::Sleep { pin }),
                    Err(_) => dismissed.push(link.worker),
                }
            }
        }
        dismissed.into_iter().for_each(|worker| self.report(LaneEvent::Dismissed(worker)));
    }

    /// Makes the model sleep although requests wait for it. It wakes only after models whose requests have
    /// this deadline.
    pub(super) fn interrupt(&mut self, behind: Timestamp, now: Timestamp) -> Result<(), String> {
        self.sleep(SleepCause::Pressure, false)?;
        // The other model wakes at once. It must not stay ahead of later requests for long.
        let behind = behind.min(now + self.scheduler.slo());
        if let Some((link, _)) = self.serving() {
            link.residency.behind = Some(behind);
        }
        Ok(())
    }

    pub(super) fn sleep(&mut self, cause: SleepCause, only_idle: bool) -> Result<(), String> {
        if self.links.len() > 1 {
            return Err("the model has a second worker, which keeps the weights on the GPU; try again when it has exited".to_owned());
        }
        let (queued, is_absent) = (self.scheduler.queued(), self.absence.is_some());
        let Some((link, lane)) = self.serving() else {
            let missing = "no worker of the model serves".to_owned();
            return if is_absent { Ok(()) } else { Err(missing) };
        };
        if !matches!(link.residency.weights, WorkerWeights::Awake { .. }) {
            return Ok(());
        }
        if only_idle && (queued > 0 || !lane.is_empty()) {
            return Err("requests have arrived".to_owned());
        }
        // Requests wait for the start of another worker, however long it takes.
        let wake_time = link.residency.bytes.as_ref().map_or(Duration::ZERO, |_| link.residency.wake_time);
        let worker = link.worker;
        link.residency.weights = WorkerWeights::Draining { cause };
        link.residency.is_announced = false;
        link.residency.behind = None;
        self.scheduler.set_weights(worker, LaneWeights::Released(wake_time));
        self.continue_sleep();
        self.publish_sleep();
        Ok(())
    }

    pub(super) fn wake(&mut self, now: Timestamp) {
        self.is_wake_ordered = false;
        if self.absence.is_some() {
            return self.recall(now);
        }
        let owed = self.scheduler.queued();
        let Some((link, _)) = self.serving() else { return };
        if !matches!(link.residency.weights, WorkerWeights::Asleep { .. }) {
            return;
        }
        let (worker, until) = (link.worker, now + link.residency.wake_time);
        link.residency.weights = WorkerWeights::Waking;
        link.residency.owed = owed;
        link.command(Command::Wake);
        self.scheduler.set_weights(worker, LaneWeights::Loading(until));
        self.publish_sleep();
        self.dispatch(now);
    }

    /// Returns whether the worker may be without its weights, because it has not confirmed a wake.
    pub(crate) fn may_sleep(&mut self, worker: WorkerId) -> bool {
        let link = self.link_mut(worker);
        link.is_none_or(|link| !matches!(link.residency.weights, WorkerWeights::Awake { .. }))
    }

    /// Records that a worker has answered this number of requests.
    pub(crate) fn record_answered(&mut self, worker: WorkerId, requests: usize) {
        let Some(link) = self.link_mut(worker) else { return };
        let before = link.residency.owed;
        link.residency.owed = before.saturating_sub(requests);
        let may_yield = before > 0 && link.residency.owed == 0;
        if may_yield && self.residency.is_short.load(Ordering::Relaxed) {
            self.residency.changed.notify_one();
        }
    }

    /// Handles a worker's reply to the order to sleep.
    pub(crate) fn handle_asleep(
        &mut self,
        worker: WorkerId,
        slept: Result<SleepReply, String>,
        now: Timestamp,
    ) -> Result<(), String> {
        let Some(link) = self.link_mut(worker) else { return Ok(()) };
        let WorkerWeights::FallingAsleep { cause } = link.residency.weights else {
            return Err("the worker reports a sleep that was not ordered".to_owned());
        };
        match slept {
            Ok(SleepReply { took_us, pinned, unpinned, .. }) => {
                link.residency.weights = WorkerWeights::Asleep { cause, since: now, retry_at: now };
                link.residency.pinned = pinned;
                self.stats.sleep.sleeps += 1;
                self.stats.sleep.last_sleep_time = Some(Duration::from_micros(took_us));
                self.report(LaneEvent::Asleep(worker));
                self.log_asleep(cause, unpinned);
            }
            Err(why) => {
                tracing::warn!(
                    model = &*self.name,
                    why,
                    "the worker cannot release its weights; for the model's next sleep, the worker exits"
                );
                if let Some(link) = self.link_mut(worker) {
                    link.residency.bytes = Err(why);
                }
                self.keep_awake(worker, now);
            }
        }
        self.residency.changed.notify_one();
        self.publish_sleep();
        self.dispatch(now);
        Ok(())
    }

    /// Ends a sleep that has not begun.
    pub(super) fn keep_awake(&mut self, worker: WorkerId, now: Timestamp) {
        let Some(link) = self.link_mut(worker) else { return };
        link.residency.weights = WorkerWeights::Awake { since: now };
        self.scheduler.set_weights(worker, LaneWeights::Loaded);
        self.publish_sleep();
        self.dispatch(now);
    }

    fn log_asleep(&self, cause: SleepCause, unpinned: Option<String>) {
        tracing::debug!(model = &*self.name, ?cause, "the model sleeps");
        if let Some(why) = unpinned {
            tracing::warn!(
                model = &*self.name,
                why,
                "the driver cannot pin the model's weights in host memory, so the model wakes more slowly"
            );
        }
    }

    /// Handles a worker's reply to the order to wake.
    pub(crate) fn handle_awake(
        &mut self,
        worker: WorkerId,
        woken: Result<u64, String>,
        now: Timestamp,
    ) -> Result<(), String> {
        let Some(link) = self.link_mut(worker) else { return Ok(()) };
        if link.residency.weights != WorkerWeights::Waking {
            return Err("the worker reports a wake that was not ordered".to_owned());
        }
        match woken {
            Ok(took_us) => {
                let took = Duration::from_micros(took_us);
                link.residency.weights = WorkerWeights::Awake { since: now };
                (link.residency.wake_time, link.residency.failed_wakes) = (took, 0);
                self.stats.sleep.record_wake(took);
                self.scheduler.set_weights(worker, LaneWeights::Loaded);
                self.report(LaneEvent::Awake(worker));
                tracing::debug!(model = &*self.name, took_ms = ms(took), "the model is awake");
            }
            Err(why) => self.handle_failed_wake(worker, why, now),
        }
        self.residency.changed.notify_one();
        self.publish_sleep();
        self.dispatch(now);
        Ok(())
    }

    fn handle_failed_wake(&mut self, worker: WorkerId, why: String, now: Timestamp) {
        self.stats.sleep.failed_wakes += 1;
        tracing::warn!(
            model = &*self.name,
            why,
            "cannot bring the model's weights back to the GPU; trying again, while requests wait"
        );
        let Some(link) = self.link_mut(worker) else { return };
        let (cause, retry_at) = (SleepCause::Pressure, now + WAKE_BACKOFF);
        link.residency.weights = WorkerWeights::Asleep { cause, since: now, retry_at };
        link.residency.is_announced = false;
        link.residency.failed_wakes += 1;
        let wake_time = link.residency.wake_time;
        if link.residency.failed_wakes >= MAX_FAILED_WAKES {
            self.report(LaneEvent::Broken(worker, format!("the model cannot wake: {why}")));
        }
        self.scheduler.set_weights(worker, LaneWeights::Released(wake_time));
    }

    pub(super) fn sleep_state(&mut self, now: Timestamp) -> Option<SleepState> {
        let used = self.used;
        let queued = self.scheduler.earliest_deadline();
        let behind = self.absence.as_ref().map(|absence| absence.behind);
        let behind = behind.or(self.serving().map(|(link, _)| link.residency.behind)).flatten();
        let wanted = queued.map(|deadline| wanted_by(deadline, behind));
        let wanted = wanted.or(self.is_wake_ordered.then_some(now));
        if let Some(absence) = &mut self.absence {
            return Some(absence.state(wanted));
        }
        let is_replaced = self.links.len() > 1;
        let (link, lane) = self.serving()?;
        // The caller now knows whether requests wait.
        link.residency.is_announced = wanted.is_some();
        let &Residency { wake_time, pinned, .. } = &link.residency;
        let (bytes, ends_worker) = (link.residency.released(), link.residency.bytes.is_err());
        let mut retry = None;
        let weights = match link.residency.weights {
            WorkerWeights::Awake { .. } if is_replaced => WeightsState::InUse { leaves: false },
            WorkerWeights::Awake { since } => {
                let load = match link.residency.owed {
                    _ if queued.is_none() && lane.is_empty() => AwakeLoad::Idle,
                    0 => AwakeLoad::Busy,
                    _ => AwakeLoad::Owing,
                };
                WeightsState::Awake { since, used, load }
            }
            WorkerWeights::Draining { .. } | WorkerWeights::FallingAsleep { .. } => {
                WeightsState::InUse { leaves: true }
            }
            WorkerWeights::Waking => WeightsState::InUse { leaves: false },
            WorkerWeights::Asleep { retry_at, .. } => {
                retry = wanted.map(|_| retry_at).filter(|retry_at| *retry_at > now);
                WeightsState::Asleep { wanted: wanted.filter(|_| retry.is_none()) }
            }
        };
        let starts_worker = false;
        Some(SleepState { bytes, ends_worker, starts_worker, wake_time, weights, pinned, retry_at: retry })
    }

    pub(super) fn sleep_report(&mut self, now: Timestamp) -> Option<SleepReport> {
        let counts = self.stats.sleep.clone();
        if let Some(absence) = &self.absence {
            return Some(absence.report(counts, now));
        }
        let residency = &self.serving()?.0.residency;
        let asleep_for = match residency.weights {
            WorkerWeights::Asleep { since, .. } => Some(now.since(since)),
            _ => None,
        };
        let (phase, cause) = (residency.phase(), residency.cause());
        let (bytes, pinned, ends_worker) =
            (residency.released(), residency.pinned, residency.bytes.clone().err());
        Some(SleepReport { phase, asleep_for, cause, bytes, ends_worker, pinned, counts })
    }
}
