//! A lane: the way from a pipeline to one worker, and what is on it.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, send};
use shadowslice_policy::batcher;
use shadowslice_policy::latency::Predictor;
use shadowslice_policy::queue::Entry;
use shadowslice_shared::batch::{self, Batch, BatchRequest, Command, IN_FLIGHT, MAX_MESSAGE_BYTES};
use shadowslice_shared::boot::WarmTime;
use shadowslice_shared::groups::{Groups, READY_PARTITIONS};
use shadowslice_shared::profile::Profile;
use shadowslice_shared::units::{Moment, Percent, Sms};
use tokio::sync::oneshot;

use super::claim::Claim;
use super::memory::Reservation;
use super::note;
use super::request::{Failure, Metadata, Output};
use super::shapes::ShapeTimes;
use crate::clock::monotonic_ns;
use crate::errors;
use crate::process::BatchSocket;
use crate::trace::{Journal, Place};

/// A batch that executes for more times its prediction than this is no sign of load.
const STALLED_FACTOR: u32 = 5;

/// Nor is one stalled below this.
const MIN_STALLED: Duration = Duration::from_millis(100);

/// Names a worker for the life of the supervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u64);

/// Per input: the shape without the batch axis. Requests that share it can share a batch.
pub(crate) type Shapes = Arc<[Vec<i64>]>;

/// A request on its way.
pub(crate) type Waiting = Entry<Shapes, Ticket>;

/// What is known of a request besides its place in the queue.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) memory: Arc<Reservation>,
    pub(crate) reply: oneshot::Sender<Result<Vec<Output>, Failure>>,
    /// Taken once it is settled.
    pub(crate) claim: Claim,
    /// Its priority; lower ones go first.
    pub(crate) level: u64,
    /// When all of it was there.
    pub(crate) received: Moment,
    /// How long its inputs took to copy.
    pub(crate) copy_in: Duration,
    /// Workers that died while they executed it.
    pub(crate) deaths: u8,
    /// Where what happens to it is noted, if it is traced.
    pub(crate) journal: Option<Journal>,
}

/// What a lane is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Duty {
    /// Nothing is sent to it, but could be at once.
    Standing,
    /// Batches go to it.
    Serving,
    /// It finishes what it has; then a fact is due.
    Draining,
}

/// A batch that a worker has.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) id: u64,
    pub(crate) slot: u8,
    pub(crate) rows: u32,
    /// The partition on which it runs.
    pub(crate) groups: Groups,
    pub(crate) sent: Moment,
    /// Whether nothing was before it when it was sent, or when it came to the front.
    pub(crate) executing_since: Option<Moment>,
    /// Empty once the requests were taken away to be served elsewhere.
    pub(crate) requests: Vec<Waiting>,
    /// What the worker may still read of requests that were taken away.
    held: Vec<Arc<Reservation>>,
}

impl InFlight {
    fn abandon(&mut self) -> Vec<Waiting> {
        self.held.extend(self.requests.iter().map(|request| Arc::clone(&request.item.memory)));
        std::mem::take(&mut self.requests)
    }
}

/// A warm worker that comes to a pipeline.
#[derive(Debug)]
pub struct Arrival {
    /// Its name.
    pub worker: WorkerId,
    /// The part of the GPU that it begins with.
    pub slice: Slice,
    /// The GPU, as traces name it.
    pub device: Arc<str>,
    /// The batch sizes that were warmed up.
    pub sizes: Vec<u32>,
    /// Whether it pads batches to the next size that was warmed up.
    pub pads: bool,
    /// How crowded its GPU is.
    pub crowding: Crowding,
}

/// The part of a GPU on which a worker's batches run.
#[derive(Debug, Clone, PartialEq)]
pub struct Slice {
    /// Its groups of SMs, which the worker has ready; the whole for all that its process has.
    pub groups: Groups,
    /// The share that it is.
    pub share: Percent,
    /// Its SMs.
    pub sms: Sms,
    /// How long batches executed there when they were tried; nothing where that is not known.
    pub times: Vec<WarmTime>,
}

/// Commands that may wait for room in a worker's socket.
const OUTBOX: usize = 4 * READY_PARTITIONS;

/// The percentages of a GPU that its workers were granted, added up; above 100 it may slow all of them.
pub type Crowding = Arc<AtomicU32>;

/// A worker's lane.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) worker: WorkerId,
    /// The same, with where it runs, for those who trace requests.
    place: Arc<Place>,
    /// Where its next batch runs.
    pub(crate) groups: Groups,
    /// What its batches should take there: every share has times of its own.
    pub(crate) predictor: Predictor,
    /// The same of partitions that it was on before, by their SMs.
    learnt: BTreeMap<Sms, Predictor>,
    /// Before anything was seen.
    blank: Predictor,
    crowding: Crowding,
    /// The same by shape, where requests differ in it.
    pub(crate) shapes: Option<ShapeTimes>,
    pub(crate) duty: Duty,
    pub(crate) in_flight: VecDeque<InFlight>,
    /// When its worker, which seems to hang, is looked at again.
    pub(crate) second_look: Option<Moment>,
    /// Whether it has answered a batch since it was routed to.
    pub(crate) proven: bool,
    socket: Arc<BatchSocket>,
    free_slots: Vec<u8>,
    message: Vec<u8>,
    /// What could not be sent yet, before any further batch.
    outbox: VecDeque<Command>,
}

/// Why a batch could not be sent.
#[derive(Debug)]
pub(crate) enum SendFailure {
    /// The worker takes nothing now. If it is gone, its reader will find out.
    Blocked(Vec<Waiting>),
    /// No message can hold this batch.
    TooLarge(Vec<Waiting>, String),
}

impl Lane {
    pub(crate) fn new(
        arrival: Arrival,
        metadata: &Metadata,
        profile: Option<&Profile>,
        socket: Arc<BatchSocket>,
    ) -> Self {
        let sizes = if arrival.pads { arrival.sizes } else { Vec::new() };
        let Arrival { worker, slice, device, .. } = arrival;
        let Slice { groups, share, sms, times } = slice;
        let blank = Predictor::new(profile, sms).padded_to(sizes);
        Self {
            worker,
            place: Arc::new(Place { worker: worker.0, share, sms, device }),
            groups,
            predictor: expecting(&blank, sms, &times),
            learnt: BTreeMap::new(),
            blank,
            crowding: arrival.crowding,
            shapes: ShapeTimes::of(metadata, sms),
            duty: Duty::Standing,
            in_flight: VecDeque::with_capacity(IN_FLIGHT),
            second_look: None,
            proven: false,
            socket,
            free_slots: (0..IN_FLIGHT).rev().map(|slot| u8::try_from(slot).expect("two slots")).collect(),
            message: vec![0; MAX_MESSAGE_BYTES],
            outbox: VecDeque::new(),
        }
    }

    /// Its next batch runs on this part of the GPU.
    pub(crate) fn move_to(&mut self, slice: Slice) {
        let Slice { groups, share, sms, times } = slice;
        let known = self.learnt.remove(&sms);
        let predictor = known.unwrap_or_else(|| expecting(&self.blank, sms, &times));
        let before = std::mem::replace(&mut self.predictor, predictor);
        self.learnt.insert(self.place.sms, before);
        let Place { worker, device, .. } = &*self.place;
        self.place = Arc::new(Place { worker: *worker, share, sms, device: Arc::clone(device) });
        (self.groups, self.proven) = (groups, false);
    }

    /// Has a command wait its turn, and sends what can be sent. What nobody can take is not sent: its worker is gone, or
    /// will be found to hang.
    pub(crate) fn command(&mut self, command: Command) {
        if self.outbox.len() < OUTBOX {
            self.outbox.push_back(command);
        }
        self.flush();
    }

    /// Sends the commands that wait, as far as the worker takes them; whether it took all.
    pub(crate) fn flush(&mut self) -> bool {
        while let Some(command) = self.outbox.front() {
            let bytes =
                batch::encode(command, &mut self.message).expect("a set of groups fits into a message");
            if send_bytes(&self.socket, bytes).is_err() {
                return false;
            }
            self.outbox.pop_front();
        }
        true
    }

    /// Whether it can take a batch.
    pub(crate) fn has_room(&self) -> bool {
        !self.free_slots.is_empty()
    }

    /// Whether nothing is on it, answers that are still being copied included.
    pub(crate) fn is_empty(&self) -> bool {
        self.free_slots.len() == IN_FLIGHT
    }

    /// Whether its worker has nothing to execute; answers may still be being copied.
    pub(crate) fn executes_nothing(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// How long a batch of so many rows should take, as far as is known.
    pub(crate) fn time(&self, rows: u32) -> Duration {
        self.predictor.predict(rows).unwrap_or(Duration::ZERO)
    }

    /// Takes out of a batch what had better be sent after the rest of it.
    pub(crate) fn part(&self, batch: &mut Vec<Waiting>) -> Vec<Waiting> {
        let rows = batch.iter().map(|request| request.rows).sum();
        let mut left = batcher::first_part(rows, &self.predictor);
        if left == rows {
            return Vec::new();
        }
        let first = batch.iter().take_while(|request| {
            let fits = request.rows <= left;
            left = left.saturating_sub(request.rows);
            fits
        });
        let first = first.count();
        if first == 0 { Vec::new() } else { batch.split_off(first) }
    }

    /// When it should be through with what it has; not in the past.
    pub(crate) fn free_at(&self, now: Moment) -> Moment {
        let mut batches = self.in_flight.iter();
        let Some(front) = batches.next() else { return now };
        let ends = front.executing_since.unwrap_or(now) + self.time(front.rows);
        batches.fold(ends.max(now), |free, batch| free + self.time(batch.rows))
    }

    /// Whether its worker executes for so long that something is wrong with it, though it does not count
    /// as hung yet.
    pub(crate) fn is_stalled(&self, now: Moment) -> bool {
        let Some(front) = self.in_flight.front() else { return false };
        let limit = self.time(front.rows).saturating_mul(STALLED_FACTOR).max(MIN_STALLED);
        // Without a beginning it was reported as hung.
        front.executing_since.is_none_or(|since| now.since(since) > limit)
    }

    /// When the batch that executes now would count as hung: later on a crowded GPU, and later for
    /// requests that seemed to hang before.
    pub(crate) fn hangs_at(&self) -> Option<Moment> {
        let front = self.in_flight.front()?;
        let crowded = self.crowding.load(Ordering::Relaxed).div_ceil(100).max(1);
        let deaths = front.requests.iter().map(|request| request.item.deaths).max().unwrap_or(0);
        let patience = crowded.saturating_mul(1 << deaths.min(8));
        let shape = front.requests.first().map(|request| &request.shape);
        let own = self.shapes.as_ref().zip(shape).map(|(times, shape)| times.hang_limit(shape, front.rows));
        let limit = self.predictor.hang_limit(front.rows).max(own.unwrap_or_default());
        Some(front.executing_since? + limit.saturating_mul(patience))
    }

    /// Sends a batch. There is room, and there are requests, all of one shape.
    pub(crate) fn send(&mut self, id: u64, requests: Vec<Waiting>, now: Moment) -> Result<(), SendFailure> {
        if !self.flush() {
            return Err(SendFailure::Blocked(requests));
        }
        let slot = *self.free_slots.last().expect("the caller has seen that there is room");
        let groups = self.groups;
        let batch = Batch {
            id,
            slot,
            sent_ns: monotonic_ns(),
            groups,
            shapes: requests.first().map(|first| first.shape.to_vec()).unwrap_or_default(),
            requests: requests.iter().map(wire_request).collect(),
        };
        let bytes = match batch::encode(&Command::Run(batch), &mut self.message) {
            Ok(bytes) => bytes,
            Err(error) => return Err(SendFailure::TooLarge(requests, errors::chain(&error))),
        };
        match send_bytes(&self.socket, bytes) {
            Ok(()) => {}
            Err(Errno::EMSGSIZE) => {
                let why = "a batch does not fit into a message; use a smaller batch.max, or raise net.core.wmem_default";
                return Err(SendFailure::TooLarge(requests, why.to_owned()));
            }
            Err(_) => return Err(SendFailure::Blocked(requests)),
        }
        self.free_slots.pop();
        let rows = requests.iter().map(|request| request.rows).sum();
        note::sent(&requests, (id, rows), &self.place, now);
        let executing_since = self.in_flight.is_empty().then_some(now);
        let held = Vec::new();
        let sent = now;
        self.in_flight.push_back(InFlight { id, slot, rows, groups, sent, executing_since, requests, held });
        Ok(())
    }

    /// Takes the batch of that id off the lane; its slot stays taken until [`Lane::recycle`].
    pub(crate) fn take(&mut self, id: u64, now: Moment) -> Option<InFlight> {
        let index = self.in_flight.iter().position(|batch| batch.id == id)?;
        let batch = self.in_flight.remove(index)?;
        if let Some(front) = self.in_flight.front_mut() {
            front.executing_since.get_or_insert(now);
        }
        Some(batch)
    }

    /// The answer in `slot` has been copied.
    pub(crate) fn recycle(&mut self, slot: u8) {
        self.free_slots.push(slot);
    }

    /// Takes the requests away, those of the batch that executes apart from those behind it. The batches
    /// stay, with the memory that they lie in, and their answers will be ignored.
    pub(crate) fn abandon(&mut self) -> (Vec<Waiting>, Vec<Waiting>) {
        let mut batches = self.in_flight.iter_mut().map(InFlight::abandon);
        let executing = batches.next().unwrap_or_default();
        (executing, batches.flatten().collect())
    }
}

/// What a model's batches should take on so many SMs, where it was tried.
fn expecting(blank: &Predictor, sms: Sms, times: &[WarmTime]) -> Predictor {
    let mut predictor = blank.on(sms);
    for time in times {
        predictor.expect(time.rows, time.took);
    }
    predictor
}

/// Sends a message without waiting.
fn send_bytes(socket: &BatchSocket, bytes: &[u8]) -> Result<(), Errno> {
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    loop {
        match send(socket.as_raw_fd(), bytes, flags) {
            Err(Errno::EINTR) => {}
            sent => return sent.map(drop),
        }
    }
}

fn wire_request(request: &Waiting) -> BatchRequest {
    BatchRequest { rows: request.rows, inputs: request.item.memory.tensors().to_vec() }
}
