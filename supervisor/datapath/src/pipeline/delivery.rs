//! The last part of a request's way: from its worker's answer to its client's socket.
//!
//! A request counts as answered when its answer's last byte has been written, with the latency of
//! that moment: this is what its SLO is about. A client that leaves before has given its request up.
//!
//! "Written" means that the socket took the byte. What the kernel still holds then, the network and
//! the client itself are not measured. Over TLS, the encryption may hold up to 64 KiB more; over gRPC,
//! a message of less than 256 bytes counts when it enters the connection's buffer, and the trailers
//! behind a message do not count. A request that the supervisor before this one relays counts when
//! that supervisor has its answer.

use std::sync::Arc;
use std::time::Duration;

use shadowslice_shared::units::Moment;

use super::Pipeline;
use super::durations::Spent;
use super::state::State;

/// Ends that wait for the pipeline's lock at most: one in so many takes it.
const TOGETHER: usize = 64;

/// An answer that its client does not have yet. When dropped, it counts as given up by its client.
///
/// The default stands for an answer that does not count, for example a later one of a stream.
#[derive(Debug, Default)]
pub struct Delivery(Option<Box<Underway>>);

#[derive(Debug)]
pub(crate) struct Underway {
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) arrived: Moment,
    pub(crate) answered: Moment,
    pub(crate) spent: Spent,
}

/// A request that a worker has answered, at its end.
#[derive(Debug)]
pub(crate) struct Ended {
    at: Moment,
    how: How,
}

/// With the time since the request's first byte, in `Spent` too.
#[derive(Debug)]
enum How {
    Written(Spent),
    /// The answer could not be written, for example for lack of memory.
    Failed(Duration),
    /// The same, by the request's own fault.
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

    fn end(&mut self, how: impl FnOnce(&Underway, Moment) -> How) {
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
    /// Ends are counted some at a time, and whenever somebody looks at the counts: connections do
    /// not wait for batches that are being sent.
    fn ended(&self, ended: Ended) {
        let mut endings = self.endings.lock();
        endings.push(ended);
        let many = endings.len() >= TOGETHER;
        drop(endings);
        if many {
            drop(self.counted());
        }
    }

    /// The state with all that has ended counted.
    pub(super) fn counted(&self) -> parking_lot::MutexGuard<'_, State> {
        let mut state = self.state.lock();
        for Ended { at, how } in self.endings.lock().drain(..) {
            match how {
                How::Written(spent) => {
                    state.scheduler.answered(spent.latency);
                    state.scheduler.wrote(spent.writing);
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
