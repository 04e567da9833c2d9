//! The state of a model, for `status`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use shadowslice_shared::boot::DeviceMemory;
use shadowslice_shared::groups::{Division, Groups};
use shadowslice_shared::profile::Execution;
use shadowslice_shared::units::{Percent, Sms, Timestamp};

use super::changes::Changes;
use super::loaded::BatchLimit;
use super::reported::{ChangeCause, ChangeOutcome, Mechanism, ReportedPhase, ReportedRole};
use crate::backend::GpuBackend;
use crate::process::BootMs;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelState {
    Loading,
    Ready,
    /// Its worker died; the next one comes, and requests wait.
    Restarting,
    /// The GPU takes no worker for now, and this is why; requests wait.
    Waiting(String),
    /// Requests are refused.
    Unready {
        why: String,
        next: NextStart,
    },
    Stopping,
}

/// When a worker of an unready model is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextStart {
    UnderWay,
    At(Instant),
    /// Once the model's files or its configuration differ.
    OnChange,
}

#[derive(Debug, Clone, PartialEq)]
pub struct ModelReport {
    pub state: ModelState,
    /// Since when it is in that state, for whatever reason.
    pub state_since: Instant,
    /// The share in force.
    pub share: Percent,
    pub sms: u32,
    /// Where the share is a partition: how the GPU divides, and the groups on which batches run.
    pub partition: Option<(Arc<Division>, Groups)>,
    /// How long batches take on each number of SMs, as workers measured it before they served.
    pub execution: Option<Execution>,
    pub mechanism: Mechanism,
    /// Why the share is not changed inside the worker, where it is not.
    pub no_partition: Option<String>,
    /// Since when; the origin for the share that it was started with.
    pub since: Timestamp,
    /// The share that is to come, by a hand-over that is under way or waits.
    pub coming: Option<Percent>,
    /// The share of a worker that stands ready, the standing or the parked one; the larger of two.
    pub ready: Option<Percent>,
    /// How far the worker is that is to serve, while it warms up.
    pub warming: Option<Warming>,
    /// The largest batch, and why larger ones are not used, where the default is too large.
    pub batch_limit: Option<BatchLimit>,
    /// Why no worker stands ready though one should.
    pub no_standby: Option<String>,
    /// What workers wait for that cannot be started for now, each of them once.
    pub waits: Vec<WaitReason>,
    /// What a worker of it takes of its GPU's memory, in bytes, as far as that is known.
    pub memory_need: Option<u64>,
    pub held: bool,
    pub workers: Vec<WorkerReport>,
    /// Deaths since the start of the worker that served or was to serve.
    pub worker_deaths: u64,
    /// What the last of them died of.
    pub last_death: Option<String>,
    /// Times that a worker was started in the place of such a worker, after a pause.
    pub worker_restarts: u64,
    pub handovers: Handovers,
    pub changes: Changes,
}

/// What a worker waits for that cannot be started for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitReason {
    /// GPU memory.
    Memory,
    /// The MPS server, which takes no clients.
    Mps,
    /// Other workers, which start first.
    Turn,
}

/// What the last workers that were not started wait for.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Waits {
    /// The worker that is to serve.
    pub(super) primary: Option<WaitReason>,
    /// The standing worker.
    pub(super) standby: Option<WaitReason>,
}

impl Waits {
    /// Returns the waits that go on: a worker may have been given up since.
    pub(super) fn going_on(self, state: &ModelState, has_no_standby: bool) -> Vec<WaitReason> {
        let primary = self.primary.filter(|reason| match reason {
            WaitReason::Turn => matches!(
                state,
                ModelState::Loading
                    | ModelState::Restarting
                    | ModelState::Unready { next: NextStart::UnderWay, .. }
            ),
            WaitReason::Memory | WaitReason::Mps => matches!(state, ModelState::Waiting(_)),
        });
        let standby = self.standby.filter(|_| has_no_standby);
        [primary, standby].into_iter().flatten().collect()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Warming {
    /// The rows of the batches that it tries.
    pub rows: u32,
    /// When it began to warm up.
    pub since: Instant,
    /// The time after which it is given up.
    pub limit: Duration,
}

impl ModelReport {
    /// Returns the time that the serving worker took to start, in ms.
    pub(crate) fn start_ms(&self) -> Option<u64> {
        let serving = self.workers.iter().find(|worker| worker.phase == ReportedPhase::Serving)?;
        let BootMs { spawn, libraries, context, session, warmup, proof } = serving.boot_ms;
        // Rounded to whole milliseconds.
        Some((spawn + libraries + context + session + warmup + proof) as u64)
    }

    /// The SMs that a share of its GPU comes to, by the means by which its share is changed.
    pub(super) fn sms_of(&self, gpu: &dyn GpuBackend, share: Percent) -> Sms {
        self.partition.as_ref().map_or_else(|| gpu.sms(share), |(division, _)| division.sms_of(share))
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerReport {
    pub role: ReportedRole,
    pub pid: i32,
    pub share_percent: u32,
    pub sms: u32,
    pub phase: ReportedPhase,
    /// Deaths of this model's workers in a row, before this one.
    pub restarts: u32,
    pub boot_ms: BootMs,
    /// How far its answers lay from the reference at most, relative to an output's largest value.
    pub answer_error: Option<f64>,
    /// What it has of its device's memory, once it is warm.
    pub memory: Option<WorkerMemory>,
}

/// A worker's memory by kind, in MiB. The rest are contexts, kernels and recordings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerMemory {
    /// Weights, which all workers of the model share.
    pub weights_mib: u64,
    /// Those of them that this worker brought to the GPU; the driver counts them as its own.
    pub brought_mib: u64,
    /// What is computed on the way from inputs to outputs, for the largest batch.
    pub scratch_mib: u64,
}

impl From<DeviceMemory> for WorkerMemory {
    fn from(DeviceMemory { weights, brought, scratch }: DeviceMemory) -> Self {
        let mib = |bytes: u64| bytes >> 20;
        Self { weights_mib: mib(weights), brought_mib: mib(brought), scratch_mib: mib(scratch) }
    }
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Handovers {
    pub completed: u64,
    pub aborted: u64,
    /// Completed ones that were taken back in their probation.
    pub rolled_back: u64,
    /// Completed ones inside the worker.
    #[serde(default)]
    pub in_process: u64,
    /// Completed ones to a worker that stood ready.
    pub flips: u64,
    /// Times that the standing worker took over from one that died.
    pub failovers: u64,
    /// The last hand-over that ended, or the last fail-over.
    pub last: Option<HandoverReport>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HandoverReport {
    pub outcome: ChangeOutcome,
    #[serde(default)]
    pub mechanism: Mechanism,
    pub cause: ChangeCause,
    /// Whether a worker stood ready for it.
    pub at_once: bool,
    /// Why, if it was not completed; of a death, what the worker died of.
    pub why: Option<String>,
    pub from_percent: u32,
    /// The share asked for.
    pub to_percent: u32,
    pub from_sms: u32,
    pub to_sms: u32,
    /// From the decision to the first batch completed at the new share, in ms; none until a request
    /// has come.
    pub effect_ms: Option<f64>,
    /// The longest time in which a batch was ready and a slot free, and no lane took it, in µs.
    pub stall_us: f64,
    /// All such time together, in µs.
    pub stall_total_us: f64,
}

pub(super) fn us(span: Duration) -> f64 {
    span.as_secs_f64() * 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_with_its_state() {
        let waits = Waits { primary: Some(WaitReason::Mps), standby: Some(WaitReason::Memory) };
        let waiting = ModelState::Waiting("MPS is restarted".to_owned());
        assert_eq!(waits.going_on(&waiting, false), [WaitReason::Mps]);
        assert_eq!(waits.going_on(&waiting, true), [WaitReason::Mps, WaitReason::Memory]);
        assert_eq!(waits.going_on(&ModelState::Ready, true), [WaitReason::Memory]);
        assert_eq!(waits.going_on(&ModelState::Ready, false), []);
        let turn = Waits { primary: Some(WaitReason::Turn), standby: None };
        assert_eq!(turn.going_on(&ModelState::Loading, false), [WaitReason::Turn]);
        assert_eq!(turn.going_on(&ModelState::Ready, false), []);
    }
}
