//! Tracks the delivery of an answer from the worker to the client's socket.
//!
//! A request counts as answered when the last byte of its answer has been written. Its latency ends
//! at the same moment. If the client disconnects earlier, the request counts as cancelled.
//!
//! "Written" means that the socket accepted the byte. The latency does not include:
//!
//! * the kernel's buffers, the network and the client
//! * with TLS, up to 64 KiB of data that waits for encryption
//! * with gRPC, the trailers after a message, and the time for which a message of less than 256 bytes
//!   waits in the connection's buffer
//! * if the previous supervisor relays a request, the time in which that supervisor writes to the
//!   client

use std::sync::Arc;
use std::time::Duration;

use shadowslice_policy::scheduler::Unanswered;
use shadowslice_shared::units::Timestamp;

use crate::pipeline::Pipeline;
use crate::pipeline::figures::RequestTimes;
use crate::pipeline::state::PipelineState;

/// The number of uncounted ends at which the next recorder of an end takes the pipeline's lock and
/// counts all of them.
const ENDINGS_LIMIT: usize = 64;

/// An answer that has not been fully delivered. If it is dropped, its request counts as cancelled.
///
/// The default is an answer that does not count, for example a later answer of a stream.
#[derive(Debug, Default)]
pub struct Delivery(Option<Box<UnwrittenAnswer>>);

#[derive(Debug)]
pub(crate) struct UnwrittenAnswer {
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) arrived: Timestamp,
    pub(crate) answered: Timestamp,
    pub(crate) spent: RequestTimes,
}

/// The end of a request after a worker has answered it.
#[derive(Debug)]
pub(crate) struct RequestEnd {
    at: Timestamp,
    how: EndKind,
}

/// The way in which a request ended, and the time from its first byte to its end.
#[derive(Debug)]
enum EndKind {
    Written(RequestTimes),
    /// The answer could not be written because the request is invalid.
    Invalid(Duration),
    /// The client disconnected, or the answer could not be written, for example because there was
    /// not enough memory.
    Unanswered(Unanswered, Duration),
}

impl Delivery {
    pub(crate) fn new(underway: UnwrittenAnswer) -> Self {
        Self(Some(Box::new(underway)))
    }

    /// Counts the request as answered, because the client's socket has accepted the last byte.
    pub fn mark_written(&mut self) {
        self.end(|underway, at| {
            let writing = at.since(underway.answered);
            EndKind::Written(RequestTimes {
                writing,
                latency: underway.spent.latency + writing,
                ..underway.spent
            })
        });
    }

    /// Counts the request as failed, because the client receives an error instead of the answer.
    pub fn mark_failed(&mut self) {
        self.end(|underway, at| EndKind::Unanswered(Unanswered::Failed, at.since(underway.arrived)));
    }

    /// Counts the request as invalid, because the answer does not exist in the form that the client
    /// requested.
    pub fn mark_invalid(&mut self) {
        self.end(|underway, at| EndKind::Invalid(at.since(underway.arrived)));
    }

    fn end(&mut self, how: impl FnOnce(&UnwrittenAnswer, Timestamp) -> EndKind) {
        let Some(underway) = self.0.take() else { return };
        let at = underway.pipeline.now();
        underway.pipeline.ended(RequestEnd { at, how: how(&underway, at) });
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        self.end(|underway, at| {
            let waited = at.since(underway.arrived);
            EndKind::Unanswered(Unanswered::Cancelled(waited), waited)
        });
    }
}

impl Pipeline {
    /// Records the end of a request. The end is counted later, because a connection must not wait
    /// for the pipeline's lock. This lock is held while batches are sent.
    fn ended(&self, ended: RequestEnd) {
        let mut endings = self.endings.lock();
        endings.push(ended);
        let many = endings.len() >= ENDINGS_LIMIT;
        drop(endings);
        if many {
            drop(self.counted_state());
        }
    }

    /// Locks the state and counts all recorded ends.
    pub(crate) fn counted_state(&self) -> parking_lot::MutexGuard<'_, PipelineState> {
        let mut state = self.state.lock();
        for RequestEnd { at, how } in self.endings.lock().drain(..) {
            match how {
                EndKind::Written(spent) => {
                    state.scheduler.record_answer(spent.latency, at);
                    state.scheduler.record_write_time(spent.writing);
                    state.stats.totals.add_answer(&spent);
                }
                EndKind::Invalid(waited) => state.stats.count_invalid(waited),
                EndKind::Unanswered(how, waited) => state.record_unanswered(how, waited, at),
            }
        }
        state
    }
}
