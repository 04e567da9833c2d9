//! The sleep of a model: its worker releases the weights on the GPU, and brings them back when requests
//! wait. This module performs what [`shadowslice_policy::residency`] decides.
//!
//! ```text
//! Awake ─▶ Draining ─▶ FallingAsleep ─▶ Asleep ─▶ Waking ─▶ Awake
//! ```
//!
//! The worker handles messages in order, so batches can follow the order to wake at once. If a worker cannot
//! release its weights, it exits instead ([`absence`]).

mod absence;
mod weights;

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shadowslice_policy::residency::WeightsState;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Timestamp;
use tokio::sync::{Notify, watch};

use super::Pipeline;
use super::state::PipelineState;
pub(crate) use absence::Absence;
pub(crate) use weights::Residency;

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
    /// The memory that the model releases while it sleeps, in bytes.
    pub bytes: u64,
    /// The reason why the worker exits for a sleep, or `None` if it only releases its weights.
    pub ends_worker: Option<String>,
    /// The pinned host memory in which the weights wait, in bytes.
    pub pinned: u64,
    pub counts: SleepCounts,
}

/// The sleep of a model, for decisions.
#[derive(Debug, Clone, PartialEq)]
pub struct SleepState {
    /// The memory that the model releases while it sleeps, in bytes.
    pub bytes: u64,
    /// True if the worker exits for a sleep.
    pub ends_worker: bool,
    /// True if a worker starts, which does not use its memory yet.
    pub starts_worker: bool,
    /// The expected time to wake.
    pub wake_time: Duration,
    pub weights: WeightsState,
    /// The pinned host memory in which the weights wait, in bytes.
    pub pinned: u64,
    /// The time of the next attempt after a failed wake.
    pub retry_at: Option<Timestamp>,
}

impl SleepCounts {
    pub(super) fn record_wake(&mut self, took: Duration) {
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

    /// Makes the model sleep although requests wait for it. It wakes only after models whose requests have
    /// the deadline `behind`.
    ///
    /// # Errors
    ///
    /// Returns the reason why the model does not sleep.
    pub fn interrupt(&self, behind: Timestamp) -> Result<(), String> {
        let now = self.now();
        self.change(|state| state.interrupt(behind, now))
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

    /// Records whether other models use the memory that this model needs to wake, and none of it is becoming
    /// free.
    pub fn record_shortage(&self, lacks_memory: bool) {
        let now = self.now();
        self.change(|state| state.record_shortage(lacks_memory, now));
    }

    /// Makes a model that sleeps without a worker wait for memory again, because a worker cannot start.
    pub fn await_memory(&self) {
        self.change(PipelineState::await_memory);
    }

    /// Returns true if the model sleeps without a worker, or wakes after such a sleep.
    pub fn is_without_worker(&self) -> bool {
        self.state.lock().absence.is_some()
    }

    /// Keeps the worker awake, because it cannot exit for a sleep now.
    pub fn stay_awake(&self, worker: WorkerId) {
        let now = self.now();
        self.change(|state| state.keep_awake(worker, now));
    }

    /// Sets the memory of the serving worker in bytes, which the model releases if the worker exits.
    pub fn set_process_bytes(&self, bytes: u64) {
        if let Some((link, _)) = self.state.lock().serving() {
            link.residency.process_bytes = bytes;
        }
    }

    /// Sets whether the weights of a model that sleeps may stay in pinned host memory.
    pub fn set_pins(&self, pins: bool) {
        self.state.lock().pins = pins;
    }

    /// Returns the state of the model's weights. Returns `None` if no worker serves, unless the model sleeps.
    pub fn sleep_state(&self) -> Option<SleepState> {
        let now = self.now();
        self.state.lock().sleep_state(now)
    }

    /// Returns the sleep of the model, or `None` if no worker serves, unless the model sleeps.
    pub fn sleep_report(&self) -> Option<SleepReport> {
        let now = self.now();
        self.state.lock().sleep_report(now)
    }
}
