//! A request on its way through a pipeline.

use std::sync::Arc;
use std::time::Duration;

use shadowslice_policy::scheduler::{self, QueuedRequest};
use shadowslice_shared::units::Timestamp;
use tokio::sync::oneshot;

use super::claim::Claim;
use super::memory::Reservation;
use super::request::Failure;
use super::streams::Given;
use crate::trace::Journal;

/// Per input: the shape without the batch axis. Requests that share it can share a batch.
pub(crate) type Shapes = Arc<[Vec<i64>]>;

pub(crate) type Waiting = QueuedRequest<Shapes, Pending>;

pub(crate) type InFlight = scheduler::BatchInFlight<Shapes, Pending>;

#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) memory: Arc<Reservation>,
    pub(crate) reply: oneshot::Sender<Result<Given, Failure>>,
    pub(crate) claim: Claim,
    /// When all of it was there.
    pub(crate) received: Timestamp,
    pub(crate) copy_in: Duration,
    /// Workers that died while they executed it.
    pub(crate) deaths: u8,
    pub(crate) journal: Option<Journal>,
    /// It asks for the next answer of this stream.
    pub(crate) stream: Option<u64>,
}

impl scheduler::Ticket for Pending {
    fn is_settled(&self) -> bool {
        self.claim.is_taken()
    }

    fn is_step(&self) -> bool {
        self.stream.is_some()
    }
}
