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
use crate::nvml::Usage;
use crate::process::BootMs;

/// The state of a model, with its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelState {
    Loading,
    Ready,
    /// The worker died. The next one is starting, and requests wait.
    Restarting,
    /// The GPU accepts no worker at present, for this reason. Requests wait.
    Waiting(String),
    /// Requests are refused.
    Unready {
        why: String,
        next: NextStart,
    },
    Stopping,
}

/// The next start of a worker of an unready model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextStart {
    UnderWay,
    At(Instant),
    /// A worker starts when the model's files or its configuration change.
    OnChange,
}

/// The state of a model and of its workers.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelReport {
    pub state: ModelState,
    /// The time at which the model entered this state. A new reason does not change it.
    pub state_since: Instant,
    /// The share in force.
    pub share: Percent,
    pub sms: u32,
    /// The division of the GPU and the groups on which batches run, if the share is a partition.
    pub partition: Option<(Arc<Division>, Groups)>,
    /// The times of batches by number of SMs. Workers measured them before they served.
    pub execution: Option<Execution>,
    pub mechanism: Mechanism,
    /// The reason why the share cannot change inside the worker.
    pub no_partition: Option<String>,
    /// The time at which this share came into force. It is zero for the share at the start.
    pub since: Timestamp,
    /// The requested share of a change that is in progress or waits.
    pub coming: Option<Percent>,
    /// The share of the standby or the parked worker. If the model has both, the larger share.
    pub ready: Option<Percent>,
    /// The progress of a worker that is warming up.
    pub warming: Option<Warming>,
    /// The largest batch and the reason, if the default batch is too large.
    pub batch_limit: Option<BatchLimit>,
    /// The reason why a standby is missing although the configuration requires one.
    pub no_standby: Option<String>,
    /// The resource that each worker waits for that cannot start yet.
    pub waits: Vec<WaitReason>,
    /// The GPU memory that a worker of the model needs, in bytes, if it is known.
    pub memory_need: Option<u64>,
    /// True if the policy must not change the share.
    pub held: bool,
    pub workers: Vec<WorkerReport>,
    /// The number of deaths since the start of workers that served or were starting to serve.
    pub worker_deaths: u64,
    /// The cause of the last death.
    pub last_death: Option<String>,
    /// The number of workers that were started to replace such a worker, after a backoff.
    pub worker_restarts: u64,
    pub handovers: Handovers,
    pub changes: Changes,
}

/// The resource that a worker waits for before it can start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitReason {
    /// GPU memory.
    Memory,
    /// The MPS server, which accepts no clients at present.
    Mps,
    /// A place among the clients of the MPS server.
    Client,
    /// Other workers, which start first.
    Turn,
}

/// The resources that the last workers wait for that could not start.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Waits {
    /// The resource for the worker that will serve.
    pub(super) primary: Option<WaitReason>,
    /// The resource for the standby.
    pub(super) standby: Option<WaitReason>,
}

impl Waits {
    /// Returns the waits that continue in this state of the model.
    pub(super) fn current(self, state: &ModelState, has_no_standby: bool) -> Vec<WaitReason> {
        let primary = self.primary.filter(|reason| match reason {
            WaitReason::Turn => matches!(
                state,
                ModelState::Loading
                    | ModelState::Restarting
                    | ModelState::Unready { next: NextStart::UnderWay, .. }
            ),
            WaitReason::Memory | WaitReason::Mps | WaitReason::Client => {
                matches!(state, ModelState::Waiting(_))
            }
        });
        let standby = self.standby.filter(|_| has_no_standby);
        [primary, standby].into_iter().flatten().collect()
    }
}

/// The warm-up of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Warming {
    /// The number of rows of the batch that the worker tries.
    pub rows: u32,
    /// The time at which the warm-up began.
    pub since: Instant,
    /// The limit on the time of the warm-up.
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

    /// Returns the number of SMs of a share of the model's GPU. The number depends on the mechanism by
    /// which the share changes.
    pub(super) fn sms_of(&self, gpu: &dyn GpuBackend, share: Percent) -> Sms {
        self.partition.as_ref().map_or_else(|| gpu.sms(share), |(division, _)| division.sms_of(share))
    }
}

/// The state of a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerReport {
    pub role: ReportedRole,
    pub pid: i32,
    /// The name of the shared worker. `None` if the process runs only this worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<String>,
    pub share_percent: u32,
    pub sms: u32,
    pub phase: ReportedPhase,
    /// The number of consecutive deaths of the model's workers before this worker.
    pub restarts: u32,
    pub boot_ms: BootMs,
    /// The largest difference between the worker's answers and the reference answers, relative to the
    /// largest value of an output.
    pub answer_error: Option<f64>,
    /// The memory of the worker on its device. `None` until the worker is warm.
    pub memory: Option<WorkerMemory>,
}

impl WorkerReport {
    /// Returns the GPU memory in bytes that the worker itself takes: the memory of its process or, in a
    /// shared worker, its weights and its intermediate results. `None` if it is unknown.
    pub fn gpu_bytes(&self, usage: &Usage) -> Option<u64> {
        let of_model = |memory: WorkerMemory| (memory.brought_mib + memory.scratch_mib) << 20;
        match self.shared {
            Some(_) => self.memory.map(of_model),
            None => usage.bytes_of(self.pid),
        }
    }
}

/// A worker's memory by kind, in MiB, without contexts, kernels and CUDA graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerMemory {
    /// The weights, which all workers of the model share.
    pub weights_mib: u64,
    /// The part of the weights that this worker loaded onto the GPU. The driver counts this part as the
    /// worker's memory.
    pub brought_mib: u64,
    /// The memory for intermediate results of the largest batch.
    pub scratch_mib: u64,
}

impl From<DeviceMemory> for WorkerMemory {
    fn from(DeviceMemory { weights, brought, scratch }: DeviceMemory) -> Self {
        let mib = |bytes: u64| bytes >> 20;
        Self { weights_mib: mib(weights), brought_mib: mib(brought), scratch_mib: mib(scratch) }
    }
}

/// The changes of a model's share, and the failovers, since the start.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Handovers {
    pub completed: u64,
    pub aborted: u64,
    /// The completed changes that were rolled back in their probation.
    pub rolled_back: u64,
    /// The completed changes inside the worker.
    #[serde(default)]
    pub in_process: u64,
    /// The completed changes to a worker that was already warm.
    pub flips: u64,
    /// The number of times that a standby replaced a worker that died.
    pub failovers: u64,
    /// The last change that ended, or the last failover.
    pub last: Option<HandoverReport>,
}

/// A change of share that ended, or a failover.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HandoverReport {
    pub outcome: ChangeOutcome,
    #[serde(default)]
    pub mechanism: Mechanism,
    pub cause: ChangeCause,
    /// True if the change did not have to wait until a worker was warm.
    pub at_once: bool,
    /// The reason why the change was not completed, or the cause of the worker's death.
    pub why: Option<String>,
    pub from_percent: u32,
    /// The requested share.
    pub to_percent: u32,
    pub from_sms: u32,
    pub to_sms: u32,
    /// The time from the decision to the first batch at the new share, in ms. `None` before that batch.
    pub effect_ms: Option<f64>,
    /// The longest time in which a batch was ready and a slot was free, but no lane took the batch, in
    /// µs.
    pub stall_us: f64,
    /// The sum of these times, in µs.
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
        assert_eq!(waits.current(&waiting, false), [WaitReason::Mps]);
        assert_eq!(waits.current(&waiting, true), [WaitReason::Mps, WaitReason::Memory]);
        assert_eq!(waits.current(&ModelState::Ready, true), [WaitReason::Memory]);
        assert_eq!(waits.current(&ModelState::Ready, false), []);
        let turn = Waits { primary: Some(WaitReason::Turn), standby: None };
        assert_eq!(turn.current(&ModelState::Loading, false), [WaitReason::Turn]);
        assert_eq!(turn.current(&ModelState::Ready, false), []);
    }
}
