//! Claims ensure that only one party settles a request: its worker, the queue or the waiting
//! client.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use shadowslice_policy::scheduler::Unanswered;
use tokio::sync::oneshot;

use super::answers::WorkerAnswer;
use super::request::RequestFailure;
use super::streams::StreamKey;
use crate::pipeline::Pipeline;
use shadowslice_shared::units::Timestamp;

/// A claim on a request. The party that takes the claim first settles and counts the request, so
/// that no request is counted twice.
#[derive(Debug, Clone, Default)]
pub(crate) struct Claim(Arc<ClaimState>);

#[derive(Debug, Default)]
struct ClaimState {
    is_taken: AtomicBool,
    /// The stream that the request has opened, until its first answer. If the client leaves, the stream
    /// is closed.
    opened: Mutex<Option<StreamKey>>,
}

impl Claim {
    /// Takes the claim. Returns false if another party has taken it.
    pub(crate) fn take(&self) -> bool {
        !self.0.is_taken.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn is_taken(&self) -> bool {
        self.0.is_taken.load(Ordering::Acquire)
    }

    /// Sets the stream that the request has opened. Call this with the pipeline's state locked.
    pub(crate) fn set_opened(&self, stream: Option<StreamKey>) {
        *self.0.opened.lock() = stream;
    }

    pub(crate) fn opened(&self) -> Option<StreamKey> {
        *self.0.opened.lock()
    }
}

/// A client's wait for an answer. Dropping this value before the answer arrives cancels the
/// request. If the request still waits, it does not run. If it already runs, its answer is ignored.
#[derive(Debug)]
pub(crate) struct AnswerWait<'p> {
    pub(crate) pipeline: &'p Pipeline,
    pub(crate) claim: Claim,
    pub(crate) arrived: Timestamp,
}

impl AnswerWait<'_> {
    /// Waits for the answer. Fails if `timeout` expires first.
    pub(crate) async fn answer(
        &self,
        mut reply_rx: oneshot::Receiver<Result<WorkerAnswer, RequestFailure>>,
        timeout: Option<Duration>,
    ) -> Result<WorkerAnswer, RequestFailure> {
        if let Some(timeout) = timeout {
            let left = timeout.saturating_sub(self.pipeline.now().since(self.arrived));
            match tokio::time::timeout(left, &mut reply_rx).await {
                Ok(answered) => return answered.unwrap_or_else(|_| stopping()),
                Err(_) if self.claim.take() => return Err(self.timed_out(timeout)),
                // Another party has settled the request, and the reply will arrive soon.
                Err(_) => {}
            }
        }
        reply_rx.await.unwrap_or_else(|_| stopping())
    }

    fn timed_out(&self, timeout: Duration) -> RequestFailure {
        let now = self.pipeline.now();
        self.give_up(Unanswered::TimedOut, now);
        RequestFailure::timed_out(timeout)
    }
}

impl AnswerWait<'_> {
    /// Records that the client no longer waits, and closes the stream that the request has opened.
    fn give_up(&self, how: Unanswered, now: Timestamp) {
        let waited = now.since(self.arrived);
        self.pipeline.change(|state| {
            state.give_up(how, waited, now);
            if let Some(stream) = self.claim.opened() {
                state.close_stream(stream);
                state.dispatch(now);
            }
        });
    }
}

impl Drop for AnswerWait<'_> {
    fn drop(&mut self) {
        if self.claim.take() {
            let now = self.pipeline.now();
            self.give_up(Unanswered::Cancelled(now.since(self.arrived)), now);
        }
    }
}

pub(crate) fn stopping() -> Result<WorkerAnswer, RequestFailure> {
    Err(RequestFailure::Unavailable("the server is stopping".to_owned()))
}
