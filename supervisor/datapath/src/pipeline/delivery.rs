//! The last part of a request's way: from its worker's answer to its client's socket.
//!
//! A request counts as answered when the last byte of its answer has been written. Its latency, which
//! the SLO bounds, ends then. If the client leaves earlier, the request counts as given up.
//!
//! "Written" means that the socket took the byte. These parts are not measured:
//!
//! * the kernel's buffers, the network and the client
//! * with TLS, up to 64 KiB that wait for encryption
//! * with gRPC, the trailers behind a message, and the wait of a message of less than 256 bytes in
//!   the connection's buffer
//! * if the previous supervisor relays a request, its own writing to the client

use std::sync::Arc;
use std::time::Duration;

use shadowslice_shared::units::Timestamp;

use super::Pipeline;
use super::durations::Spent;
use super::state::State;

/// The most ends that wait to be counted. The end that reaches it takes the pipeline's lock and counts
/// them all.
const TOGETHER: usize = 64;

/// An answer that its client does not have yet. If it is dropped, its request counts as given up.
///
/// The default is an answer that does not count, for example a later one of a stream.
#[derive(Debug, Default)]
pub struct Delivery(Option<Box<Underway>>);

#[derive(Debug)]
pub(crate) struct Underway {
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) arrived: Timestamp,
    pub(crate) answered: Timestamp,
    pub(crate) spent: Spent,
}

/// The end of a request that a worker has answered.
#[derive(Debug)]
pub(crate) struct Ended {
    at: Timestamp,
    how: How,
}

/// The way in which a request ended, with the time since its first byte.
#[derive(Debug)]
enum How {
    Written(Spent),
    /// The answer could not be written, for example for lack of memory.
    Failed(Duration),
    /// The answer could not be written, and the request is at fault.
    Invalid(Duration),
    /// The client left.
    Left(Duration),
}

impl Delivery {
    pub(crate) fn new(underway: Underway) -> Self {
        Self(Some(Box::new(underway)))
    }

    /// Counts the request as answered: the client's socket has the last byte.
    pub fn written(&mut self) {
        self.end(|underway, at| {
            let writing = at.since(underway.answered);
            How::Written(Spent { writing, latency: underway.spent.latency + writing, ..underway.spent })
        });
    }

    /// Counts the request as failed: the client gets an error instead of the answer.
    pub fn failed(&mut self) {
        self.end(|underway, at| How::Failed(at.since(underway.arrived)));
    }

    /// Counts the request as at fault itself: its client asked for the answer in a form that it does
    /// not have.
    pub fn invalid(&mut self) {
        self.end(|underway, at| How::Invalid(at.since(underway.arrived)));
    }

    fn end(&mut self, how: impl FnOnce(&Underway, Timestamp) -> How) {
        let Some(underway) = self.0.take() else { return };
        let at = underway.pipeline.now();
        underway.pipeline.ended(Ended { at, how: how(&underway, at) });
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        self.end(|underway, at| How::Left(at.since(underway.arrived)));
    }
}

impl Pipeline {
    /// Notes an end, which is counted with others or when somebody reads the counts. A connection
    /// does not wait for the pipeline's lock, under which batches are sent.
    fn ended(&self, ended: Ended) {
        let mut endings = self.endings.lock();
        endings.push(ended);
        let many = endings.len() >= TOGETHER;
        drop(endings);
        if many {
            drop(self.counted());
        }
    }

    /// Returns the state, in which all ends are counted.
    pub(super) fn counted(&self) -> parking_lot::MutexGuard<'_, State> {
        let mut state = self.state.lock();
        for Ended { at, how } in self.endings.lock().drain(..) {
            match how {
                How::Written(spent) => {
                    state.scheduler.record_answer(spent.latency);
                    state.scheduler.record_write_time(spent.writing);
                    state.stats.succeeded(&spent, at);
                }
                How::Failed(waited) => state.stats.failed(waited, at),
                How::Invalid(waited) => state.stats.invalid(waited),
                How::Left(waited) => state.left(waited, at),
            }
        }
        state
    }
}
