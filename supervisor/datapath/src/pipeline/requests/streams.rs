//! Streams: sequences of answers to one request, for models that generate their output step by
//! step.
//!
//! A batch opens a stream in the worker. A step computes the next answer of streams, and is scheduled
//! like a batch. Streams take turns, or all streams of a worker advance together. The worker computes
//! no answer for which the client has no room, so a client that reads slowly delays no other client. A
//! change of share takes effect with the next step. A hand-over ends the streams of the previous
//! worker.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use shadowslice_policy::scheduler::{QueuedRequest, SUSPECT_LEVEL};
use shadowslice_policy::tenants::TenantId;
use shadowslice_shared::batch::Command;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Timestamp;
use tokio::sync::Notify;

use super::claim::Claim;
use super::memory::Reservation;
use super::pending::{PendingRequest, ReplyTarget, WaitingRequest};
use super::request::{RequestFailure, RequestOutput};
use crate::pipeline::Pipeline;
use crate::pipeline::state::PipelineState;
use crate::pipeline::workers::LaneEvent;

/// The number of answers that the worker computes before the client takes them, if streams advance
/// together. With 2, a client that takes an answer within the time of a step delays no step.
const ANSWERS_AHEAD: usize = 2;

/// The worker of a stream, and the stream's id: the id of the batch that opened it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StreamKey {
    pub(crate) worker: WorkerId,
    pub(crate) id: u64,
}

/// The answer of one stream to a step.
pub(crate) type StreamOutcome = Result<Vec<RequestOutput>, RequestFailure>;

/// A stream that is open in a worker.
#[derive(Debug)]
pub(crate) struct StreamState {
    pub(crate) key: StreamKey,
    pub(crate) tenant: TenantId,
    /// The level of the steps in the scheduler.
    pub(crate) level: u64,
    /// True if the steps advance no other stream, because the inputs may kill workers.
    pub(crate) alone: bool,
    /// The inputs of the request.
    pub(crate) inputs: Arc<Reservation>,
    /// The claim on the stream's steps. The client's end of the stream takes it.
    pub(crate) claim: Claim,
    /// The number of answers that the worker computes before the client takes them.
    ahead: usize,
    buffer: Mutex<AnswerBuffer>,
    answered: Notify,
}

/// The answers that the client has not taken yet.
#[derive(Debug, Default)]
struct AnswerBuffer {
    answers: VecDeque<StreamOutcome>,
    /// True if a step for the next answer is queued or executing.
    is_requested: bool,
    /// True if no answers follow those in the buffer.
    has_ended: bool,
}

/// The next answer of a stream for its client.
#[derive(Debug)]
enum NextAnswer {
    Ready(StreamOutcome),
    End,
    Pending,
}

impl StreamState {
    /// Creates the state of a stream that `request` has opened. `together` is true if streams advance
    /// together.
    pub(crate) fn of(key: StreamKey, request: &WaitingRequest, together: bool, alone: bool) -> Self {
        Self {
            key,
            tenant: request.tenant,
            // Only the first answer of a retried request is a suspect.
            level: request.level.max(SUSPECT_LEVEL + 1),
            alone,
            inputs: Arc::clone(&request.item.memory),
            claim: Claim::default(),
            ahead: if together { ANSWERS_AHEAD } else { 0 },
            buffer: Mutex::default(),
            answered: Notify::new(),
        }
    }

    /// Adds the answer to a step. `more` is true if the stream has further answers.
    pub(crate) fn add(&self, answer: StreamOutcome, more: bool) {
        let mut buffer = self.buffer.lock();
        buffer.is_requested = false;
        buffer.has_ended = !more;
        if !matches!(&answer, Ok(outputs) if outputs.is_empty()) {
            buffer.answers.push_back(answer);
        }
        drop(buffer);
        self.answered.notify_one();
    }

    /// Takes the next answer out of the buffer.
    fn take(&self) -> NextAnswer {
        let mut buffer = self.buffer.lock();
        match buffer.answers.pop_front() {
            Some(answer) => NextAnswer::Ready(answer),
            None if buffer.has_ended => NextAnswer::End,
            None => NextAnswer::Pending,
        }
    }

    /// Returns true if the next step should be queued now, and records that it is. `waits` is true if
    /// the client waits for the answer.
    fn request_step(&self, waits: bool) -> bool {
        let mut buffer = self.buffer.lock();
        let has_room = buffer.answers.len() < self.ahead.max(usize::from(waits));
        let is_due = has_room && !buffer.is_requested && !buffer.has_ended;
        buffer.is_requested |= is_due;
        is_due
    }

    /// Returns the request for the next answer.
    fn step(self: &Arc<Self>, next_slo: Duration, now: Timestamp) -> WaitingRequest {
        let item = PendingRequest {
            memory: Arc::clone(&self.inputs),
            reply: ReplyTarget::Stream(Arc::clone(self)),
            claim: self.claim.clone(),
            received: now,
            copy_in: Duration::ZERO,
            deaths: 0,
            journal: None,
            stream: Some(self.key.id),
        };
        QueuedRequest {
            shape: Vec::new().into(),
            rows: 1,
            arrived: now,
            deadline: now + next_slo,
            expires: None,
            level: self.level,
            tenant: self.tenant,
            alone: self.alone,
            item,
        }
    }
}

impl PipelineState {
    /// Queues the next step of a stream if its buffer has room for the answer. Returns true if it did.
    pub(crate) fn continue_stream(&mut self, stream: &Arc<StreamState>, waits: bool, now: Timestamp) -> bool {
        if !stream.request_step(waits) {
            return false;
        }
        let step = stream.step(self.scheduler.gap_slo(), now);
        if self.scheduler.queue_step(stream.key.worker, step).is_err() {
            self.stats.totals.streams_failed += 1;
            stream.add(Err(broken_off()), false);
            return false;
        }
        true
    }

    /// Closes a stream in its worker.
    pub(crate) fn close_stream(&mut self, StreamKey { worker, id }: StreamKey) {
        if let Some(link) = self.link_mut(worker) {
            link.command(Command::Close(id));
        }
        if self.scheduler.close_stream(worker) {
            self.report(LaneEvent::Drained(worker));
        }
    }

    fn take_answer(&mut self, stream: &Arc<StreamState>, now: Timestamp) -> NextAnswer {
        let next = stream.take();
        if self.continue_stream(stream, matches!(next, NextAnswer::Pending), now) {
            self.dispatch(now);
        }
        next
    }
}

/// The client's end of a stream. Dropping this value closes the stream in the worker.
#[derive(Debug)]
pub(crate) struct OpenStream {
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) stream: Arc<StreamState>,
}

impl OpenStream {
    /// Returns the next answer, or `None` after the last one.
    pub(crate) async fn next(&self) -> Option<StreamOutcome> {
        loop {
            let now = self.pipeline.now();
            match self.pipeline.change(|state| state.take_answer(&self.stream, now)) {
                NextAnswer::Ready(answer) => return Some(answer),
                NextAnswer::End => return None,
                NextAnswer::Pending => self.stream.answered.notified().await,
            }
        }
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        let now = self.pipeline.now();
        self.stream.claim.take();
        self.pipeline.change(|state| {
            state.close_stream(self.stream.key);
            // The worker can now open another stream, so a waiting request may start.
            state.dispatch(now);
        });
    }
}

/// Returns the failure of a stream whose worker died in a step.
pub(crate) fn died_in_step() -> RequestFailure {
    let why = "the worker died while computing this stream's next answer; the server refuses inputs that cause this again";
    RequestFailure::Unavailable(why.to_owned())
}

/// Returns the failure of a stream whose worker cannot continue. No other worker can continue the
/// stream either.
pub(crate) fn broken_off() -> RequestFailure {
    RequestFailure::Unavailable("the worker of this stream has exited; send the request again".to_owned())
}
