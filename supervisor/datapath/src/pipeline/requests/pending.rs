//! A request inside a pipeline.

use std::sync::Arc;
use std::time::Duration;

use shadowslice_policy::scheduler::{self, QueuedRequest};
use shadowslice_shared::units::Timestamp;
use tokio::sync::oneshot;

use super::answers::WorkerAnswer;
use super::claim::Claim;
use super::memory::Reservation;
use super::request::RequestFailure;
use super::streams::StreamState;
use crate::trace::Journal;

/// The shapes of all inputs without the batch axis. Requests with equal shapes can share a batch.
pub(crate) type Shapes = Arc<[Vec<i64>]>;

pub(crate) type WaitingRequest = QueuedRequest<Shapes, PendingRequest>;

pub(crate) type InFlightBatch = scheduler::BatchInFlight<Shapes, PendingRequest>;

#[derive(Debug)]
pub(crate) struct PendingRequest {
    pub(crate) memory: Arc<Reservation>,
    pub(crate) reply: ReplyTarget,
    pub(crate) claim: Claim,
    /// The time at which the last byte of the request was received.
    pub(crate) received: Timestamp,
    pub(crate) copy_in: Duration,
    /// The number of workers that died while they executed the request.
    pub(crate) deaths: u8,
    pub(crate) journal: Option<Journal>,
    /// The id of a stream if this request is a step: a request for the stream's next answer.
    pub(crate) stream: Option<u64>,
}

/// The receiver of a request's answer.
#[derive(Debug)]
pub(crate) enum ReplyTarget {
    /// The client that waits for the first or only answer.
    Client(oneshot::Sender<Result<WorkerAnswer, RequestFailure>>),
    /// A stream whose first answer its client has.
    Stream(Arc<StreamState>),
}

impl PendingRequest {
    /// Returns true if the client has an answer of this stream. Only its worker can continue it.
    pub(crate) fn continues_stream(&self) -> bool {
        matches!(self.reply, ReplyTarget::Stream(_))
    }
}

impl scheduler::Ticket for PendingRequest {
    fn is_settled(&self) -> bool {
        self.claim.is_taken()
    }

    fn is_step(&self) -> bool {
        self.stream.is_some()
    }
}
