//! The link to one worker: the worker's socket, the commands that wait for the socket, and the
//! worker's share of the GPU.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, send};
use shadowslice_policy::latency::Predictor;
use shadowslice_policy::scheduler::{self, Slice};
use shadowslice_policy::sm_time::BatchSms;
use shadowslice_shared::batch::{
    self, Batch, BatchRequest, Command, Extent, IN_FLIGHT, MAX_MESSAGE_BYTES, OptionalTensor, StreamStep,
};
use shadowslice_shared::groups::READY_PARTITIONS;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::pause::PauseWord;
use shadowslice_shared::profile::Profile;
use shadowslice_shared::units::{Percent, Timestamp};

use super::BatchSocket;
use super::occupancy::{Occupancy, OccupancyGuard};
use super::pauses::{GpuPauses, PauseMember};
use super::shapes::ShapeTimes;
use super::sm_time::{ExecutingSms, GpuSmTime, SmAccount, SmTimeMember, TenantPart};
use crate::clock::monotonic_ns;
use crate::pipeline::requests::{
    InFlightBatch, LEFT_OUT, Metadata, PendingRequest, Reservation, Shapes, WaitingRequest,
};
use crate::pipeline::sleep::Residency;
use crate::trace::RunLocation;
use shadowslice_shared::errors;

pub(crate) type PipelineScheduler = scheduler::Scheduler<Shapes, PendingRequest>;

pub(crate) type PipelineLane = scheduler::Lane<Shapes, PendingRequest>;

pub(crate) type PipelineBatch = scheduler::OutgoingBatch<Shapes, PendingRequest>;

/// A warm worker to attach to the pipeline.
#[derive(Debug)]
pub struct LaneWorker {
    pub worker: WorkerId,
    pub share: Percent,
    /// The part of the GPU that the worker uses at the start.
    pub slice: Slice,
    /// The GPU's name in traces.
    pub device: Arc<str>,
    /// The batch sizes for which the worker was warmed up.
    pub sizes: Vec<u32>,
    /// True if the worker pads a batch to the next warmed-up batch size.
    pub pads: bool,
    /// The occupancy of the worker's GPU.
    pub occupancy: Arc<Occupancy>,
    /// The SM time of the worker's GPU.
    pub sm_time: Arc<GpuSmTime>,
    /// The pauses of the worker's GPU.
    pub pauses: Arc<GpuPauses>,
    /// The number of pieces of the worker's largest batch, or the reason why its batches never wait.
    pub pieces: Result<u32, String>,
    /// The GPU memory that the worker releases while the model sleeps in bytes, or the reason why the
    /// worker must exit for a sleep.
    pub sleep: Result<u64, String>,
}

/// The largest number of commands that can wait until the worker's socket accepts them. These are
/// commands about partitions, sleep and ends of streams.
const MAX_OUTBOX: usize = 4 * READY_PARTITIONS + 1024;

/// The time that a worker has to report the end of a step that it has interrupted. A busy host may delay
/// it.
const STEP_GRACE: Duration = Duration::from_secs(5);

/// The batch that a worker executes.
#[derive(Debug)]
struct OccupyingBatch {
    since: Timestamp,
    /// The progress of the GPU's [`Occupancy`] at the time `since`.
    from: Duration,
    occupied: OccupancyGuard,
}

/// The link to one worker.
#[derive(Debug)]
pub(crate) struct WorkerLink {
    pub(crate) worker: WorkerId,
    /// The worker and the part of the GPU that it uses, for traces.
    pub(crate) location: Arc<RunLocation>,
    occupancy: Arc<Occupancy>,
    running: Option<OccupyingBatch>,
    /// The execution times of the worker's batches by shape. `None` if all requests of the model
    /// have the same shape.
    pub(crate) shapes: Option<ShapeTimes>,
    pub(crate) recheck_at: Option<Timestamp>,
    /// The number of required inputs. In a request, optional inputs follow the required inputs.
    inputs: usize,
    /// The memory of requests that were taken back, by batch id. The worker may still read this
    /// memory.
    held: BTreeMap<u64, Vec<Arc<Reservation>>>,
    socket: Arc<BatchSocket>,
    message: Vec<u8>,
    /// The commands that could not be sent yet. They are sent before the next batch.
    outbox: VecDeque<Command>,
    pub(crate) residency: Residency,
    pub(crate) pauses: PauseMember,
    pub(crate) sm_time: SmTimeMember,
    /// The time after which a step of streams counts as hung, or `None` if the model has no streams.
    step_limit: Option<Duration>,
}

/// The part of a link that comes from its model's pipeline.
#[derive(Debug)]
pub(crate) struct LinkModel {
    pub(crate) name: Arc<str>,
    pub(crate) sm_time: Arc<SmAccount>,
    /// The pause word of the worker.
    pub(crate) pause_word: Arc<PauseWord>,
    /// The configured limit on the time of a step of streams.
    pub(crate) step_timeout: Duration,
}

impl WorkerLink {
    pub(crate) fn new(
        lane_worker: LaneWorker,
        metadata: &Metadata,
        profile: Option<&Profile>,
        socket: Arc<BatchSocket>,
        model: LinkModel,
        now: Timestamp,
    ) -> (Self, PipelineLane) {
        let LaneWorker {
            worker,
            share,
            slice,
            device,
            sizes,
            pads,
            occupancy,
            sm_time,
            pauses,
            pieces,
            sleep,
        } = lane_worker;
        let blank = Predictor::new(profile, slice.sms).padded_to(if pads { sizes } else { Vec::new() });
        let slots = u8::try_from(IN_FLIGHT).expect("two slots");
        let lane = PipelineLane::new(worker, &slice, blank, slots);
        let link = Self {
            worker,
            location: Arc::new(RunLocation { worker: worker.0, share, sms: slice.sms, device }),
            occupancy,
            running: None,
            shapes: ShapeTimes::of(metadata, slice.sms),
            recheck_at: None,
            inputs: metadata.inputs.len(),
            held: BTreeMap::new(),
            socket,
            message: vec![0; MAX_MESSAGE_BYTES],
            outbox: VecDeque::new(),
            residency: Residency::new(sleep, now),
            pauses: PauseMember::join(pauses, model.name, model.pause_word, pieces),
            sm_time: SmTimeMember::join(sm_time, model.sm_time),
            step_limit: metadata.streams.map(|_| step_limit(model.step_timeout)),
        };
        (link, lane)
    }

    pub(crate) fn move_to(&mut self, share: Percent, slice: &Slice) {
        let RunLocation { worker, device, .. } = &*self.location;
        let (worker, device) = (*worker, Arc::clone(device));
        self.location = Arc::new(RunLocation { worker, share, sms: slice.sms, device });
    }

    /// Keeps the memory of requests that are taken back reserved until the worker has completed
    /// these requests.
    pub(crate) fn hold<'b>(&mut self, in_flight: impl Iterator<Item = &'b InFlightBatch>) {
        for batch in in_flight {
            let memory = batch.requests.iter().map(|request| Arc::clone(&request.item.memory));
            self.held.entry(batch.id).or_default().extend(memory);
        }
    }

    pub(crate) fn release(&mut self, batch: u64) {
        self.held.remove(&batch);
    }

    /// Sends a command, or queues it. If the outbox is full, drops the command. In that case the
    /// worker has ended, or will soon be reported as hung.
    pub(crate) fn command(&mut self, command: Command) {
        if self.outbox.len() < MAX_OUTBOX {
            self.outbox.push_back(command);
        }
        self.flush();
    }

    /// Sends queued commands until the worker's socket accepts no more. Returns whether all
    /// commands were sent.
    pub(crate) fn flush(&mut self) -> bool {
        while let Some(command) = self.outbox.front() {
            let bytes = batch::encode(command, &mut self.message).expect("a number or a set of groups fits");
            if send_bytes(&self.socket, bytes).is_err() {
                return false;
            }
            self.outbox.pop_front();
        }
        true
    }

    /// Updates the GPU's occupancy and its SM time according to the batch of `lane` that the worker
    /// executes.
    pub(crate) fn update_occupancy(&mut self, lane: &PipelineLane, now: Timestamp) {
        let front = lane.in_flight().next();
        let since = front.and_then(|front| front.executing_since);
        let share = f64::from(self.location.sms.0);
        let executing = front.filter(|front| front.executing_since.is_some()).map(|front| ExecutingSms {
            batch: BatchSms { groups: front.groups, share },
            tenants: if self.sm_time.has_tenants() { tenant_parts(front) } else { Vec::new() },
        });
        self.sm_time.set_executing(executing, now);
        if self.running.as_ref().map(|running| running.since) == since {
            return;
        }
        let before = self.running.take();
        self.running = since.map(|since| {
            let from = self.occupancy.progress_at(since, now);
            let occupied = before.map(|running| running.occupied);
            let occupied = occupied.unwrap_or_else(|| self.occupancy.occupy(self.location.share));
            OccupyingBatch { since, from, occupied }
        });
    }

    /// Returns the remaining time until the worker is considered hung. Returns zero if the worker
    /// is already hung, and `None` if it executes no batch.
    ///
    /// The time limit of the first batch of `lane` grows while other batches execute on the same
    /// GPU. It also grows if workers died while they executed a request of the batch.
    pub(crate) fn time_until_hung(&self, lane: &PipelineLane, now: Timestamp) -> Option<Duration> {
        let (front, running) = lane.in_flight().next().zip(self.running.as_ref())?;
        if let Some(limit) = self.step_limit {
            // A generator may pause between two answers, so the time of a step cannot be predicted.
            return Some((running.since + limit).since(now));
        }
        let deaths = front.requests.iter().map(|request| request.item.deaths).max().unwrap_or(0);
        let shape = front.requests.first().map(|request| &request.shape);
        let own = self.shapes.as_ref().zip(shape).map(|(times, shape)| times.hang_limit(shape, front.rows));
        let limit = lane.predictor.hang_limit(front.rows).max(own.unwrap_or_default());
        Some(self.occupancy.time_left(running.from, limit.saturating_mul(1 << deaths.min(8)), now))
    }

    /// Sends a batch. Returns false if the socket currently accepts no data. If the worker has
    /// ended, the lane's reader reports this. An error means that the batch is too large for a
    /// message.
    pub(crate) fn send(&mut self, sending: &PipelineBatch) -> Result<bool, String> {
        if !self.flush() {
            return Ok(false);
        }
        let &PipelineBatch { id, slot, groups, ref requests, .. } = sending;
        let (first, sent_ns) = (requests.first(), monotonic_ns());
        let command = match first.and_then(|first| first.item.stream) {
            Some(_) => {
                let streams = requests.iter().filter_map(|request| request.item.stream).collect();
                Command::Next(StreamStep { id, slot, sent_ns, groups, streams })
            }
            None => {
                let inputs = self.inputs;
                let of_request = |request: &WaitingRequest| BatchRequest {
                    rows: request.rows,
                    inputs: request.item.memory.tensors.iter().take(inputs).copied().collect(),
                };
                let shapes = first.map(|first| first.shape.iter().take(inputs).cloned().collect());
                let optional = first.map(|first| optional(first, inputs)).unwrap_or_default();
                let (shapes, requests) =
                    (shapes.unwrap_or_default(), requests.iter().map(of_request).collect());
                Command::Run(Batch { id, slot, sent_ns, groups, shapes, requests, optional })
            }
        };
        let bytes = batch::encode(&command, &mut self.message).map_err(|error| errors::chain(&error))?;
        match send_bytes(&self.socket, bytes) {
            Ok(()) => Ok(true),
            Err(Errno::EMSGSIZE) => {
                let why =
                    "a batch does not fit into a message; lower batch.max, or raise net.core.wmem_default";
                Err(why.to_owned())
            }
            Err(_) => Ok(false),
        }
    }
}

/// Returns the time after which a step counts as hung. The worker interrupts a step after `timeout`, and
/// then finds the stream that is the cause, which may take as long again.
pub(crate) fn step_limit(timeout: Duration) -> Duration {
    timeout.saturating_mul(2) + STEP_GRACE
}

/// Returns the parts of the tenants in a batch.
fn tenant_parts(batch: &InFlightBatch) -> Vec<TenantPart> {
    let mut parts: Vec<TenantPart> = Vec::new();
    for WaitingRequest { tenant, rows, .. } in &batch.requests {
        let fraction = f64::from(*rows) / f64::from(batch.rows.max(1));
        match parts.iter_mut().find(|part| part.tenant == *tenant) {
            Some(part) => part.fraction += fraction,
            None => parts.push(TenantPart { tenant: *tenant, fraction }),
        }
    }
    parts
}

/// Returns the optional inputs of a request: the tensors after the first `inputs` tensors, which
/// are the required inputs.
fn optional(request: &WaitingRequest, inputs: usize) -> Vec<OptionalTensor> {
    let tensors = request.shape.iter().zip(&request.item.memory.tensors).skip(inputs);
    let given = (0..).zip(tensors).filter(|(_, (shape, _))| *shape != LEFT_OUT);
    let tensor = |(input, (shape, part)): (u32, (&Vec<i64>, &Extent))| OptionalTensor {
        input,
        shape: shape.clone(),
        part: *part,
    };
    given.map(tensor).collect()
}

fn send_bytes(socket: &BatchSocket, bytes: &[u8]) -> Result<(), Errno> {
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    loop {
        match send(socket.as_raw_fd(), bytes, flags) {
            Err(Errno::EINTR) => {}
            sent => return sent.map(drop),
        }
    }
}
