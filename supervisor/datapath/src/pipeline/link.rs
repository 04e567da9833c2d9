//! The link to one worker: its socket, the commands that wait to be sent on it, and where the
//! worker runs.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, send};
use shadowslice_policy::latency::{BLIND_HANG_LIMIT, Predictor};
use shadowslice_policy::scheduler::{self, Slice};
use shadowslice_shared::batch::{
    self, Batch, BatchRequest, Command, Extent, IN_FLIGHT, MAX_MESSAGE_BYTES, OptionalTensor, StreamStep,
};
use shadowslice_shared::groups::READY_PARTITIONS;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::profile::Profile;
use shadowslice_shared::units::{Percent, Timestamp};

use super::memory::Reservation;
use super::occupancy::{Occupancy, Occupied};
use super::pending::{InFlight, Pending, Shapes, Waiting};
use super::request::{LEFT_OUT, Metadata};
use super::shapes::ShapeTimes;
use crate::clock::monotonic_ns;
use crate::pipeline::BatchSocket;
use crate::trace::RanAt;
use shadowslice_shared::errors;

pub(crate) type Lane = scheduler::Lane<Shapes, Pending>;

pub(crate) type Sending = scheduler::OutgoingBatch<Shapes, Pending>;

#[derive(Debug)]
pub struct Arrival {
    pub worker: WorkerId,
    pub share: Percent,
    /// The part of the GPU that it begins with.
    pub slice: Slice,
    /// The GPU, as traces name it.
    pub device: Arc<str>,
    /// The batch sizes that were warmed up.
    pub sizes: Vec<u32>,
    /// Whether it pads batches to the next size that was warmed up.
    pub pads: bool,
    /// What executes on its GPU.
    pub occupancy: Arc<Occupancy>,
}

/// Commands that may wait for room in a worker's socket: those of partitions, and ends of streams.
const OUTBOX: usize = 4 * READY_PARTITIONS + 1024;

/// The batch that a worker executes.
#[derive(Debug)]
struct Running {
    since: Timestamp,
    /// The GPU's progress then.
    from: Duration,
    occupied: Occupied,
}

#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) worker: WorkerId,
    /// For traces: the worker, and where it runs.
    pub(crate) place: Arc<RanAt>,
    occupancy: Arc<Occupancy>,
    running: Option<Running>,
    /// How long its batches take by shape, where requests differ in it.
    pub(crate) shapes: Option<ShapeTimes>,
    pub(crate) second_look: Option<Timestamp>,
    /// How many inputs every request has; optional ones stand behind them.
    inputs: usize,
    /// Memory that the worker may still read, of requests that were taken away from it, by their
    /// batch.
    held: BTreeMap<u64, Vec<Arc<Reservation>>>,
    socket: Arc<BatchSocket>,
    message: Vec<u8>,
    /// Commands that could not be sent yet; they go before any further batch.
    outbox: VecDeque<Command>,
}

impl Link {
    pub(crate) fn new(
        arrival: Arrival,
        metadata: &Metadata,
        profile: Option<&Profile>,
        socket: Arc<BatchSocket>,
    ) -> (Self, Lane) {
        let Arrival { worker, share, slice, device, sizes, pads, occupancy } = arrival;
        let blank = Predictor::new(profile, slice.sms).padded_to(if pads { sizes } else { Vec::new() });
        let slots = u8::try_from(IN_FLIGHT).expect("two slots");
        let lane = Lane::new(worker, &slice, blank, slots);
        let link = Self {
            worker,
            place: Arc::new(RanAt { worker: worker.0, share, sms: slice.sms, device }),
            occupancy,
            running: None,
            shapes: ShapeTimes::of(metadata, slice.sms),
            second_look: None,
            inputs: metadata.inputs.len(),
            held: BTreeMap::new(),
            socket,
            message: vec![0; MAX_MESSAGE_BYTES],
            outbox: VecDeque::new(),
        };
        (link, lane)
    }

    pub(crate) fn move_to(&mut self, share: Percent, slice: &Slice) {
        let RanAt { worker, device, .. } = &*self.place;
        let (worker, device) = (*worker, Arc::clone(device));
        self.place = Arc::new(RanAt { worker, share, sms: slice.sms, device });
    }

    /// Keeps the memory of requests that are taken away until the worker has finished with them.
    pub(crate) fn hold<'b>(&mut self, in_flight: impl Iterator<Item = &'b InFlight>) {
        for batch in in_flight {
            let memory = batch.requests.iter().map(|request| Arc::clone(&request.item.memory));
            self.held.entry(batch.id).or_default().extend(memory);
        }
    }

    pub(crate) fn release(&mut self, batch: u64) {
        self.held.remove(&batch);
    }

    /// If the outbox is full, the command is dropped: the worker is gone, or will be found to hang.
    pub(crate) fn command(&mut self, command: Command) {
        if self.outbox.len() < OUTBOX {
            self.outbox.push_back(command);
        }
        self.flush();
    }

    /// Sends the commands that wait, as far as the worker takes them; whether it took all.
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

    /// Tells the GPU whether the worker executes a batch of `lane`.
    pub(crate) fn note_running(&mut self, lane: &Lane, now: Timestamp) {
        let since = lane.in_flight().next().and_then(|front| front.executing_since);
        if self.running.as_ref().map(|running| running.since) == since {
            return;
        }
        let before = self.running.take();
        self.running = since.map(|since| {
            let from = self.occupancy.progress_at(since, now);
            let occupied = before.map(|running| running.occupied);
            let occupied = occupied.unwrap_or_else(|| self.occupancy.occupy(self.place.share));
            Running { since, from, occupied }
        });
    }

    /// Returns how long the worker, which executes the first batch of `lane`, may take until it
    /// counts as hung; zero once it does. It may take longer while others execute on its GPU, and
    /// longer for requests that seemed to hang before.
    pub(crate) fn hangs_in(&self, lane: &Lane, now: Timestamp) -> Option<Duration> {
        let (front, running) = lane.in_flight().next().zip(self.running.as_ref())?;
        if front.step {
            // Generators pause as they like.
            return Some((running.since + BLIND_HANG_LIMIT).since(now));
        }
        let deaths = front.requests.iter().map(|request| request.item.deaths).max().unwrap_or(0);
        let shape = front.requests.first().map(|request| &request.shape);
        let own = self.shapes.as_ref().zip(shape).map(|(times, shape)| times.hang_limit(shape, front.rows));
        let limit = lane.predictor.hang_limit(front.rows).max(own.unwrap_or_default());
        Some(self.occupancy.left(running.from, limit.saturating_mul(1 << deaths.min(8)), now))
    }

    /// False if the worker takes nothing now: if it is gone, its reader will find out. An error if
    /// no message can hold this batch.
    pub(crate) fn send(&mut self, sending: &Sending) -> Result<bool, String> {
        if !self.flush() {
            return Ok(false);
        }
        let &Sending { id, slot, groups, ref requests, .. } = sending;
        let (first, sent_ns) = (requests.first(), monotonic_ns());
        let command = match first.and_then(|first| first.item.stream) {
            Some(stream) => Command::Next(StreamStep { id, slot, sent_ns, groups, stream }),
            None => {
                let inputs = self.inputs;
                let of_request = |request: &Waiting| BatchRequest {
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
                let why = "a batch does not fit into a message; use a smaller batch.max, or raise net.core.wmem_default";
                Err(why.to_owned())
            }
            Err(_) => Ok(false),
        }
    }
}

/// Returns the optional inputs that a request gives behind the model's other `inputs`.
fn optional(request: &Waiting, inputs: usize) -> Vec<OptionalTensor> {
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
