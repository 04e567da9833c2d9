//! The sleep of a model: its worker releases the weights on the GPU, and brings them back when requests
//! wait. This module performs what [`shadowslice_policy::residency`] decides.
//!
//! ```text
//! Awake ─▶ Draining ─▶ FallingAsleep ─▶ Asleep ─▶ Waking ─▶ Awake
//! ```
//!
//! The worker handles messages in order, so batches can follow the order to wake at once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shadowslice_policy::residency::{AwakeLoad, WeightsState};
use shadowslice_policy::scheduler::LaneWeights;
use shadowslice_shared::batch::{Command, SleepReply};
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::profile::wake_time;
use shadowslice_shared::units::{Timestamp, ms};
use tokio::sync::{Notify, watch};

use super::Pipeline;
use super::state::PipelineState;
use super::workers::{LaneEvent, PipelineLane, WorkerLink};

/// The pause after a failed wake, before the next attempt.
const WAKE_BACKOFF: Duration = Duration::from_millis(100);

/// The number of consecutive failed wakes after which the worker is replaced.
const MAX_FAILED_WAKES: u32 = 3;

/// The signals between the pipelines and the task that decides which models sleep.
#[derive(Debug, Default)]
pub struct ResidencySignal {
    /// Notified when a decision is due.
    pub changed: Notify,
    /// True if a model waits for memory. Pipelines then also notify when they become idle.
    pub is_short: AtomicBool,
}

/// The reason why a model sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SleepCause {
    /// No request arrived for the configured time.
    Idle,
    /// Other models need the GPU memory.
    Pressure,
    /// An operator ordered it.
    Command,
}

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
    /// The memory that the worker releases while it sleeps in bytes, or the reason why it cannot sleep.
    bytes: Result<u64, String>,
    /// The expected time to wake.
    wake_time: Duration,
    failed_wakes: u32,
    /// True if the deciding task knows that requests wait.
    is_announced: bool,
    /// The number of requests that waited for the last wake and have no answers yet.
    owed: usize,
    /// The host memory that the worker has pinned, in bytes.
    pinned: u64,
}

/// The sleeps and wakes of a model since the start.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SleepCounts {
    pub sleeps: u64,
    pub wakes: u64,
    pub failed_wakes: u64,
    /// The sum of the times of all wakes.
    pub wake_time: Duration,
    pub last_sleep_time: Option<Duration>,
    pub last_wake_time: Option<Duration>,
}

/// The phase of a model's sleep, with the words of `status --json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SleepPhase {
    #[default]
    Awake,
    FallingAsleep,
    Asleep,
    Waking,
}

/// The sleep of a model, for the status.
#[derive(Debug, Clone, PartialEq)]
pub struct SleepReport {
    pub phase: SleepPhase,
    /// The time since the model fell asleep. `None` unless it sleeps.
    pub asleep_for: Option<Duration>,
    pub cause: Option<SleepCause>,
    /// The memory that the model releases while it sleeps in bytes, or the reason why it cannot sleep.
    pub bytes: Result<u64, String>,
    /// The pinned host memory in which the weights wait, in bytes.
    pub pinned: u64,
    pub counts: SleepCounts,
}

/// The sleep of a model, for decisions.
#[derive(Debug, Clone, PartialEq)]
pub struct SleepState {
    /// The memory that the model releases while it sleeps, in bytes.
    pub bytes: u64,
    /// The expected time to wake.
    pub wake_time: Duration,
    pub weights: WeightsState,
    /// The pinned host memory in which the weights wait, in bytes.
    pub pinned: u64,
    /// The time of the next attempt after a failed wake.
    pub retry_at: Option<Timestamp>,
}

impl Residency {
    /// Creates the state of a worker whose weights are loaded.
    pub(crate) fn new(bytes: Result<u64, String>, now: Timestamp) -> Self {
        let wake_time = wake_time(*bytes.as_ref().unwrap_or(&0));
        let weights = WorkerWeights::Awake { since: now };
        Self { weights, bytes, wake_time, failed_wakes: 0, is_announced: false, owed: 0, pinned: 0 }
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
        let phase = self.serving().map_or(SleepPhase::Awake, |(link, _)| link.residency.phase());
        self.sleep_tx.send_if_modified(|known| std::mem::replace(known, phase) != phase);
    }

    /// Returns the link and the lane of the worker that serves.
    fn serving(&mut self) -> Option<(&mut WorkerLink, &PipelineLane)> {
        let Self { scheduler, links, .. } = self;
        let lane = scheduler.serving_lane()?;
        Some((links.iter_mut().find(|link| link.worker == lane.worker)?, lane))
    }

    /// Tells the deciding task that requests wait for a model that sleeps, unless it knows.
    pub(crate) fn announce_waiting(&mut self) {
        if let Some((link, _)) = self.serving()
            && !std::mem::replace(&mut link.residency.is_announced, true)
        {
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
        let pin = self.pins;
        for link in &mut self.links {
            let WorkerWeights::Draining { cause } = link.residency.weights else { continue };
            if self.scheduler.lane(link.worker).is_some_and(PipelineLane::is_empty) {
                link.residency.weights = WorkerWeights::FallingAsleep { cause };
                link.command(Command::Sleep { pin });
            }
        }
    }

    fn sleep(&mut self, cause: SleepCause, only_idle: bool) -> Result<(), String> {
        if self.links.len() > 1 {
            return Err("the model has a second worker, which keeps the weights on the GPU; try again when it has exited".to_owned());
        }
        let queued = self.scheduler.queued();
        let Some((link, lane)) = self.serving() else {
            return Err("no worker of the model serves".to_owned());
        };
        link.residency.bytes.clone()?;
        if !matches!(link.residency.weights, WorkerWeights::Awake { .. }) {
            return Ok(());
        }
        if only_idle && (queued > 0 || !lane.is_empty()) {
            return Err("requests have arrived".to_owned());
        }
        let (worker, wake_time) = (link.worker, link.residency.wake_time);
        link.residency.weights = WorkerWeights::Draining { cause };
        link.residency.is_announced = false;
        self.scheduler.set_weights(worker, LaneWeights::Released(wake_time));
        self.continue_sleep();
        self.publish_sleep();
        Ok(())
    }

    fn wake(&mut self, now: Timestamp) {
        self.is_wake_ordered = false;
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
        if let Some(link) = self.link_mut(worker) {
            link.residency.owed = link.residency.owed.saturating_sub(requests);
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
                tracing::warn!(model = &*self.name, why, "the model cannot sleep; it stays awake");
                if let Some(link) = self.link_mut(worker) {
                    link.residency.weights = WorkerWeights::Awake { since: now };
                    link.residency.bytes = Err(why);
                }
                self.scheduler.set_weights(worker, LaneWeights::Loaded);
            }
        }
        self.residency.changed.notify_one();
        self.publish_sleep();
        self.dispatch(now);
        Ok(())
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

    fn sleep_state(&mut self, now: Timestamp) -> Option<SleepState> {
        let used = self.used;
        let queued = self.scheduler.earliest_deadline();
        let wanted = queued.or(self.is_wake_ordered.then_some(now));
        let is_replaced = self.links.len() > 1;
        let (link, lane) = self.serving()?;
        // The caller now knows whether requests wait.
        link.residency.is_announced = wanted.is_some();
        let &Residency { wake_time, pinned, .. } = &link.residency;
        let bytes = *link.residency.bytes.as_ref().ok()?;
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
        Some(SleepState { bytes, wake_time, weights, pinned, retry_at: retry })
    }
}

impl SleepCounts {
    fn record_wake(&mut self, took: Duration) {
        self.wakes += 1;
        self.wake_time += took;
        self.last_wake_time = Some(took);
    }
}

impl Pipeline {
    /// Makes the model sleep when its worker has finished its batches. If `only_idle` is true and requests
    /// have arrived, does nothing.
    ///
    /// # Errors
    ///
    /// Returns the reason why the model does not sleep.
    pub fn sleep(&self, cause: SleepCause, only_idle: bool) -> Result<(), String> {
        self.change(|state| state.sleep(cause, only_idle))
    }

    /// Wakes the model if it sleeps. Requests that wait for it are sent at once.
    pub fn wake(&self) {
        let now = self.now();
        self.change(|state| state.wake(now));
    }

    /// Orders the model to wake as if a request waited for it. The deciding task wakes it when there is
    /// memory.
    pub fn order_wake(&self) {
        let mut state = self.state.lock();
        state.is_wake_ordered = true;
        state.residency.changed.notify_one();
    }

    /// Returns a receiver of the phase of the model's sleep.
    pub fn sleep_phase(&self) -> watch::Receiver<SleepPhase> {
        self.state.lock().sleep_tx.subscribe()
    }

    /// Sets whether the weights of a model that sleeps may stay in pinned host memory.
    pub fn set_pins(&self, pins: bool) {
        self.state.lock().pins = pins;
    }

    /// Returns the state of the model's weights. Returns `None` if no worker serves, or if the worker
    /// cannot sleep.
    pub fn sleep_state(&self) -> Option<SleepState> {
        let now = self.now();
        self.state.lock().sleep_state(now)
    }

    /// Returns the sleep of the model, or `None` if no worker serves.
    pub fn sleep_report(&self) -> Option<SleepReport> {
        let now = self.now();
        let mut state = self.state.lock();
        let counts = state.stats.sleep.clone();
        let residency = &state.serving()?.0.residency;
        let asleep_for = match residency.weights {
            WorkerWeights::Asleep { since, .. } => Some(now.since(since)),
            _ => None,
        };
        let (phase, cause) = (residency.phase(), residency.cause());
        let (bytes, pinned) = (residency.bytes.clone(), residency.pinned);
        Some(SleepReport { phase, asleep_for, cause, bytes, pinned, counts })
    }
}
