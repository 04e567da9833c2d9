//! The sleep of models in `shadowslice status`.

use serde::{Deserialize, Serialize};
use shadowslice_datapath::pipeline::{SleepCause, SleepCounts, SleepPhase, SleepReport};
use shadowslice_shared::units::ms;

use super::{MIB, ModelStatus};
use crate::figures;

/// The sleep of a model. A model that sleeps has released its weights on the GPU, and wakes when a request
/// arrives.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SleepStatus {
    pub phase: SleepPhase,
    /// The time since the model fell asleep, in seconds. `None` unless it sleeps.
    pub asleep_s: Option<f64>,
    /// The reason why the model sleeps. `None` unless it sleeps.
    pub cause: Option<SleepCause>,
    /// The GPU memory that the model releases while it sleeps, in MiB.
    pub memory_mib: u64,
    /// The reason why the worker exits for a sleep. `None` if it only releases its weights.
    pub ends_worker: Option<String>,
    /// The pinned host memory in which the weights wait, in MiB.
    pub pinned_mib: u64,
    pub sleeps: u64,
    pub wakes: u64,
    pub failed_wakes: u64,
    /// The sum of the times of all wakes, in seconds.
    pub wake_s: f64,
    pub last_sleep_ms: Option<f64>,
    pub last_wake_ms: Option<f64>,
}

impl From<SleepReport> for SleepStatus {
    fn from(report: SleepReport) -> Self {
        let SleepReport { phase, asleep_for, cause, bytes, ends_worker, pinned, counts } = report;
        let SleepCounts { sleeps, wakes, failed_wakes, wake_time, last_sleep_time, last_wake_time } = counts;
        Self {
            phase,
            asleep_s: asleep_for.map(|span| span.as_secs_f64()),
            cause,
            memory_mib: bytes.div_ceil(MIB),
            ends_worker,
            pinned_mib: pinned.div_ceil(MIB),
            sleeps,
            wakes,
            failed_wakes,
            wake_s: wake_time.as_secs_f64(),
            last_sleep_ms: last_sleep_time.map(ms),
            last_wake_ms: last_wake_time.map(ms),
        }
    }
}

impl ModelStatus {
    /// Returns true if the model sleeps.
    pub fn sleeps(&self) -> bool {
        self.sleep.as_ref().is_some_and(|sleep| sleep.phase == SleepPhase::Asleep)
    }
}

/// Describes the sleep of a model. Returns `None` if the model is awake and has never slept.
pub(crate) fn sleep_note(model: &ModelStatus) -> Option<String> {
    let sleep = model.sleep.as_ref().filter(|sleep| sleep.sleeps > 0)?;
    let why = match sleep.cause {
        Some(SleepCause::Idle) => "it had no requests",
        Some(SleepCause::Pressure) => "other models need its GPU memory",
        Some(SleepCause::Command) => "an operator ordered it",
        None => "",
    };
    let state = match sleep.asleep_s {
        Some(span) => {
            let how = if sleep.ends_worker.is_some() { " without a worker" } else { "" };
            format!("sleeps{how} for {}, because {why}", figures::span(span))
        }
        None => "is awake".to_owned(),
    };
    let last = sleep.last_wake_ms.map(|took| format!(", the last in {} ms", figures::ms(took)));
    let (sleeps, wakes) = (figures::count(sleep.sleeps), figures::count(sleep.wakes));
    Some(format!("{} {state}; {sleeps} sleeps, {wakes} wakes{}", model.name, last.unwrap_or_default()))
}

/// The largest number of models whose sleep `status` describes in a line of its own.
const MAX_NOTES: usize = 5;

/// Describes the models that sleep.
pub(super) fn sleep_notes(models: &[ModelStatus]) -> Vec<String> {
    let asleep: Vec<_> = models.iter().filter(|model| model.sleeps()).collect();
    let mut notes: Vec<String> =
        asleep.iter().take(MAX_NOTES).filter_map(|model| sleep_note(model)).collect();
    if let Some(more @ 1..) = asleep.len().checked_sub(MAX_NOTES) {
        notes.push(format!("{more} more models sleep"));
    }
    notes
}
