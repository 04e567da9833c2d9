//! The start of a worker and of its lane on the data path.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use shadowslice_policy::scheduler::Slice;
use shadowslice_policy::workers::{Launch, LifecycleEvent, StartFailure};
use shadowslice_shared::boot::{Assignment, PartitionSpec, WarmUp, WorkerPurpose};
use shadowslice_shared::units::Percent;

use super::events::Controller;
use super::reports::WaitReason;
use super::slab_sizes::SlabSizes;
use super::standbys::Beneficiary;
use super::{engine, loaded};
use crate::backend::{Grant, GrantError, GrantRequest};
use crate::process::{self, FilesToLoad, NoUser, Rank, SpawnError, Start, StartPermit, Worker};
use shadowslice_config::{EngineConfig, ModelConfig};
use shadowslice_datapath::pipeline::{LaneReader, LaneWorker};
use shadowslice_shared::errors;
use shadowslice_shared::ids::WorkerId;

#[derive(Debug, thiserror::Error)]
pub(super) enum LaunchError {
    #[error("other workers start first")]
    Turn,
    #[error("cannot start a worker on the GPU")]
    Grant(#[source] GrantError),
    #[error("cannot assign a user to the model's workers")]
    User(#[source] NoUser),
    #[error("cannot spawn a worker")]
    Spawn(#[source] SpawnError),
}

impl LaunchError {
    /// Returns true if the reason is temporary and not a fault of the model.
    fn is_temporary(&self) -> bool {
        self.wait_reason().is_some()
    }

    fn wait_reason(&self) -> Option<WaitReason> {
        let refused = match self {
            Self::Turn => return Some(WaitReason::Turn),
            Self::Grant(refused) | Self::Spawn(SpawnError::Grant(refused)) => refused,
            Self::User(_) | Self::Spawn(_) => return None,
        };
        match refused {
            GrantError::NoMemory { .. } => Some(WaitReason::Memory),
            GrantError::Recovering(_) => Some(WaitReason::Mps),
            GrantError::NoClient { .. } => Some(WaitReason::Client),
            GrantError::NoSeat => None,
        }
    }
}

impl Controller {
    /// Starts a worker. If it cannot be started, returns an event with the reason.
    pub(super) fn start(&mut self, launch: Launch) -> Option<LifecycleEvent> {
        let worker = launch.worker;
        if launch.standby
            && let Err(no_room) = self.room_to_stand(false)
        {
            let beneficiary = Beneficiary::Standby { priority: self.model.priority };
            self.account.make_room(no_room.excess(), beneficiary);
            self.waits.standby = Some(WaitReason::Memory);
            let failure = StartFailure::NoRoomForStandby(no_room.to_string());
            return Some(LifecycleEvent::NotStarted { worker, failure });
        }
        let error = self.launch(launch).err();
        let wait = if launch.standby { &mut self.waits.standby } else { &mut self.waits.primary };
        *wait = error.as_ref().and_then(LaunchError::wait_reason);
        let error = error?;
        let why = errors::chain(&error);
        tracing::debug!(model = self.model.name, why, "cannot start a worker");
        let failure = match error.is_temporary() {
            // This does not count as a failure, so the backoff does not grow.
            true if launch.standby && matches!(error, LaunchError::Turn) => {
                StartFailure::NoRoomForStandby(why)
            }
            true => {
                let memory_comes = !launch.standby && self.make_room(&error);
                StartFailure::Passing { why, memory_expected: memory_comes }
            }
            false => StartFailure::Failed(why),
        };
        Some(LifecycleEvent::NotStarted { worker, failure })
    }

    /// Returns the permit to start the worker, or `None` while other workers start first.
    fn permit(&self, launch: &Launch) -> Option<StartPermit> {
        let start = match launch.low_priority {
            true if launch.standby => Start::Standby,
            true => Start::Shadow,
            false if self.pipeline.metadata().is_some() => Start::Restart,
            false => Start::First,
        };
        let (priority, is_reference) = (self.model.priority, launch.purpose.is_reference());
        self.place.ask(Rank { start, priority, is_reference }, self.now())
    }

    fn launch(&mut self, launch: Launch) -> Result<(), LaunchError> {
        let permit = self.permit(&launch).ok_or(LaunchError::Turn)?;
        let Launch { worker, purpose, share, low_priority, standby: _ } = launch;
        let ModelConfig { priority, memory_limit, .. } = *self.model;
        let partition = self.partition_for(purpose);
        // To create a partition or to compute reference answers on the GPU, a worker needs the whole GPU.
        let whole = partition.is_some() || purpose == WorkerPurpose::DeviceReference;
        let granted = if whole { Percent::WHOLE } else { share };
        let user = self.user()?;
        let shared = self.shared_place(&launch, partition.is_some(), user.as_ref().map(|(user, _)| *user));
        let (room, joins) = (self.room(), shared.is_some());
        let wanted = GrantRequest { share: granted, priority, memory_limit, room, joins };
        let grant = Grant::of(&self.gpu, wanted, purpose).map_err(LaunchError::Grant)?;
        let sizes = self.slab_sizes(partition.is_some());
        let assignment = Assignment {
            model: self.model.name.clone(),
            purpose,
            engine: engine::spec(&self.model, &self.context.library, &self.context.engines, share),
            device: grant.device(),
            profile: self.model.profile.clone(),
            request_bytes: self.pipeline.request_bytes(),
            pinned_request_bytes: sizes.pinned_requests,
            response_slot_bytes: sizes.response_slot,
            partition,
        };
        // Before the model has served, its workers may load any content of its files.
        let files = self.pipeline.metadata().map(|_| FilesToLoad {
            files: Arc::clone(&self.files),
            copies: self.context.engines.join(&self.model.name),
        });
        let launch = process::LaunchSpec {
            id: worker,
            settings: &self.context.workers,
            assignment,
            grant: Arc::new(grant),
            share,
            requests: self.pipeline.requests(),
            reference: &self.reference,
            weights: &self.weights,
            cpus: &self.model.cpus,
            files,
            user,
            shared,
            low_priority: low_priority && self.context.lower_shadows,
            permit: Some(permit),
            events: self.worker_events_tx.clone(),
        };
        let model = Arc::clone(&self.model);
        let limit = self.largest_batch();
        let useful = self.useful_batches(purpose);
        let plan = move |found: &_| {
            loaded::warm_up(&model, limit.as_ref(), found).map(|plan| WarmUp { useful, ..plan })
        };
        let process = Worker::spawn(launch, plan).map_err(LaunchError::Spawn)?;
        let (pid, shared) = (process.pid, process.is_member);
        tracing::info!(model = self.model.name, pid, %share, ?purpose, shared, "worker started");
        self.processes.insert(worker, process);
        Ok(())
    }

    fn slab_sizes(&self, may_be_shared: bool) -> SlabSizes {
        let whole = SlabSizes {
            response_slot: self.context.response_bytes,
            pinned_requests: self.pipeline.request_bytes(),
        };
        let described =
            self.described.as_ref().filter(|_| may_be_shared && self.model.shared_worker.is_some());
        described.map_or(whole, |metadata| whole.fitting(metadata))
    }

    /// Returns the longest useful time of a batch. Returns `None` if a limit is known already, or if the
    /// worker runs on a CPU, whose times do not apply to the GPU.
    pub(super) fn useful_batches(&self, purpose: WorkerPurpose) -> Option<Duration> {
        let elsewhere = purpose == WorkerPurpose::Reference && self.gpu.is_real();
        let is_first = self.batch_limit.is_none() && self.pipeline.metadata().is_none();
        loaded::useful_for(&self.model).filter(|_| is_first && !elsewhere)
    }

    /// Returns the id of the user for the model's workers, and the folder that this user owns, if it can be
    /// created. The folder contains optimised models and engines. All models of a shared worker have the
    /// same user.
    fn user(&mut self) -> Result<Option<(u32, PathBuf)>, LaunchError> {
        let Some(users) = &self.context.users else { return Ok(None) };
        if self.user.is_none() {
            let name = self.model.shared_worker.as_deref();
            let name = name.map_or_else(|| self.model.name.clone(), |name| format!("worker {name}"));
            self.user = Some(users.of(&name).map_err(LaunchError::User)?);
        }
        let Some(user) = &self.user else { return Ok(None) };
        let folder = self.context.engines.join(&self.model.name);
        if let Err(error) = user.give(&folder) {
            tracing::warn!(
                model = self.model.name,
                folder = %folder.display(),
                %error,
                "cannot create the folder of the model's workers, so they store no optimised models; free disk space, or give the supervisor CAP_CHOWN and CAP_FOWNER"
            );
        }
        Ok(Some((user.id, folder)))
    }

    fn partition_for(&self, purpose: WorkerPurpose) -> Option<PartitionSpec> {
        let tenancy = self.tenancy.as_ref().filter(|_| purpose == WorkerPurpose::Serve)?;
        let (division, _) = self.workers.partition()?;
        Some(PartitionSpec { division: division.clone(), groups: tenancy.groups() })
    }

    pub(super) fn attach(&mut self, worker: WorkerId, share: Percent, slice: Slice, sizes: Vec<u32>) {
        let Some(metadata) = self.pipeline.metadata() else { return };
        let facts = self.gpu.facts();
        let Some(process) = self.processes.get_mut(&worker) else { return };
        let (Some(lane), sleep) = (process.lane(), process.sleep.clone()) else { return };
        let arrival = LaneWorker {
            worker,
            share,
            slice,
            sizes,
            pads: self.gpu.is_real() && matches!(self.model.engine, EngineConfig::OnnxRuntime { .. }),
            device: facts.uuid.as_deref().unwrap_or(&facts.device).into(),
            occupancy: Arc::clone(&facts.occupancy),
            sm_time: Arc::clone(&facts.sm_time),
            pauses: Arc::clone(&self.context.pauses[self.model.gpu]),
            pieces: process.pieces.clone(),
            sleep,
        };
        let reader = LaneReader::attach(Arc::clone(&self.pipeline), metadata, arrival, lane);
        self.context.workers.data_path.spawn(reader.run());
    }
}
