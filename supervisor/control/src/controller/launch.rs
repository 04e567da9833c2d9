//! Starting a worker, and what it finds.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use shadowslice_shared::boot::{Assignment, Loaded, Purpose, Warmed};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::Percent;

use super::events::Controller;
use super::in_process::times_of;
use super::{engine, loaded};
use crate::backend::{Grant, GrantError, GrantRequest};
use crate::process::{Launch, SpawnError, Worker};
use shadowslice_config::{Engine, Model};
use shadowslice_datapath::pipeline::{Arrival, LaneReader, Slice};
use shadowslice_shared::ids::WorkerId;

/// Why a worker could not be launched.
#[derive(Debug, thiserror::Error)]
pub(super) enum LaunchError {
    #[error("the GPU takes no worker")]
    Grant(#[source] GrantError),
    #[error("a worker cannot be spawned")]
    Spawn(#[source] SpawnError),
}

impl LaunchError {
    /// Whether the reason passes by itself before long, and is not a fault of the model.
    pub(super) fn is_passing(&self) -> bool {
        matches!(self, Self::Grant(GrantError::Recovering(_) | GrantError::NoMemory { .. }))
    }
}

impl Controller {
    /// Starts a worker with `share`.
    pub(super) fn launch(
        &mut self,
        purpose: Purpose,
        share: Percent,
        low_priority: bool,
    ) -> Result<WorkerId, LaunchError> {
        let Model { priority, memory_limit, .. } = *self.model;
        let partition = self.in_process().filter(|_| purpose == Purpose::Serve);
        let partition = partition.map(|inside| inside.assignment());
        // A worker needs the whole GPU to make a partition in it, or to compute a reference on it.
        let whole = partition.is_some() || purpose == Purpose::DeviceReference;
        let granted = if whole { Percent::WHOLE } else { share };
        let wanted = GrantRequest { share: granted, priority, memory_limit, room: self.room() };
        let grant = Grant::of(&self.gpu, wanted, purpose).map_err(LaunchError::Grant)?;
        let id = WorkerId(self.context.worker_ids.fetch_add(1, Ordering::Relaxed));
        let assignment = Assignment {
            model: self.model.name.clone(),
            purpose,
            engine: engine::spec(&self.model, &self.context.library, &self.context.engines, share),
            device: grant.device(),
            profile: self.model.profile.clone(),
            request_bytes: self.pipeline.request_bytes(),
            response_slot_bytes: self.context.response_bytes,
            partition,
        };
        let launch = Launch {
            id,
            program: &self.context.program,
            assignment,
            grant,
            share,
            requests: self.pipeline.requests(),
            reference: &self.reference,
            cpus: &self.model.cpus,
            low_priority: low_priority && self.context.lower_shadows,
            data_path: &self.context.data_path,
            events: self.events.clone(),
        };
        let model = Arc::clone(&self.model);
        let plan = move |found: &_| loaded::warm_up(&model, found);
        let worker = Worker::spawn(launch, plan).map_err(LaunchError::Spawn)?;
        tracing::info!(model = self.model.name, pid = worker.pid, %share, ?purpose, "worker started");
        self.workers.insert(id, worker);
        Ok(id)
    }

    /// Puts a warm worker's lane on the pipeline, with how long its batches took to warm up.
    pub(super) fn attach(&mut self, worker: WorkerId, warmed: &Warmed) {
        let Some(metadata) = self.pipeline.metadata() else { return };
        self.note_warm();
        let standing = self.gpu.standing();
        let Some(process) = self.workers.get_mut(&worker) else { return };
        let (share, sms) = (process.share, process.sms);
        let ready = warmed.partitions.as_ref().map(|proven| proven.ready);
        let asked = std::mem::replace(&mut process.groups, ready);
        if let Some((asked, proven)) = asked.zip(warmed.partitions.as_ref()) {
            self.note_proofs(asked, proven);
        }
        let slice = match ready {
            Some(groups) => self.first_slice(groups, &warmed.times, share),
            None => Slice { groups: Groups::WHOLE, sms, times: times_of(&warmed.times) },
        };
        let Some(lane) = self.workers.get_mut(&worker).and_then(Worker::lane) else { return };
        let arrival = Arrival {
            worker,
            share,
            slice,
            sizes: warmed.times.iter().map(|time| time.rows).collect(),
            pads: standing.uuid.is_some() && matches!(self.model.engine, Engine::OnnxRuntime { .. }),
            device: standing.uuid.unwrap_or(standing.device).into(),
            crowding: self.gpu.crowding(),
        };
        let reader = LaneReader::attach(Arc::clone(&self.pipeline), metadata, arrival, lane);
        self.context.data_path.spawn(reader.run());
    }

    /// The model is known. A worker that finds another model than its predecessors is refused.
    pub(super) fn loaded(&mut self, worker: WorkerId, found: &Loaded) {
        let described = loaded::describe(&self.model, found).map_err(|refusal| refusal.to_string());
        if let Err(why) = described.and_then(|metadata| self.pipeline.describe(metadata)) {
            self.misbehaved(worker, &why);
        }
    }
}
