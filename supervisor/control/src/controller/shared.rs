//! The choice between a shared worker and a process for one worker.

use std::time::Duration;

use shadowslice_policy::workers::{Launch, WorkerPhase};
use shadowslice_shared::boot::WorkerPurpose;
use shadowslice_shared::contention::ClientPriority;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::members::SharedSetup;

use super::events::Controller;
use crate::backend::BackendKind;
use crate::process::{EndCause, SharedKey, SharedPlace};

/// The number of deaths of a shared worker after which a model that was executing each time gets a process
/// of its own. A request fails at the third death of a worker that executes it, so the third death can
/// only be that of a process in which no other model runs.
const MAX_SHARED_DEATHS: usize = 2;

/// The time after which a death of a shared worker no longer counts against a model. Without it, rare
/// failures would in the end give each model a process of its own.
const SHARED_DEATH_MEMORY: Duration = Duration::from_hours(1);

impl Controller {
    /// Returns the shared worker that a worker must join. Returns `None` if the worker needs a process of
    /// its own: if the configuration says so, if its share is a percentage of a process, or if the model
    /// may have ended the shared worker.
    pub(super) fn shared_place(
        &self,
        launch: &Launch,
        has_partition: bool,
        user: Option<u32>,
    ) -> Option<SharedPlace<'_>> {
        let name = self.model.shared_worker.as_ref()?;
        let is_whole = has_partition || self.gpu.facts().kind == BackendKind::None;
        if launch.purpose != WorkerPurpose::Serve
            || !is_whole
            || self.shared_deaths.len() >= MAX_SHARED_DEATHS
        {
            return None;
        }
        let library = &self.context.library;
        let setup = SharedSetup {
            library: (!library.as_os_str().is_empty()).then(|| library.clone()),
            engines: Some(self.context.engines.clone()),
            on_gpu: self.gpu.is_real(),
        };
        let key = SharedKey {
            name: name.clone(),
            gpu: self.model.gpu,
            priority: ClientPriority::of(self.model.priority),
        };
        // A standby must survive the end of the process in which its model serves.
        let not = launch.standby.then(|| self.serving_pid()).flatten();
        Some(SharedPlace { processes: &self.context.shared, key, gpu: &self.gpu, setup, user, not })
    }

    fn serving_pid(&self) -> Option<i32> {
        let serves = |worker: &WorkerId| self.workers.role_and_phase(*worker).1 == WorkerPhase::Serving;
        self.processes.iter().find(|(worker, _)| serves(worker)).map(|(_, process)| process.pid)
    }

    /// Records that a shared worker has ended. `idle` is true if this model's worker there could serve, and
    /// had no batch. A model that was loading may have ended the process too.
    pub(super) fn record_shared_end(&mut self, worker: WorkerId, cause: EndCause, idle: bool) {
        let is_suspect = match cause {
            EndCause::Itself => !idle,
            EndCause::KilledFor(blamed) => blamed == worker,
            EndCause::GpuLost => false,
        };
        if !is_suspect {
            return;
        }
        let now = self.now();
        self.shared_deaths.retain(|death| now.since(*death) < SHARED_DEATH_MEMORY);
        self.shared_deaths.push(now);
        if self.shared_deaths.len() == MAX_SHARED_DEATHS {
            tracing::warn!(
                model = self.model.name,
                "a shared worker exited twice while this model was loading or executing a batch, so the model gets a process of its own; to share again, unload and load the model"
            );
        }
    }
}
