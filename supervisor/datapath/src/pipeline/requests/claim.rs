//! Claims ensure that only one party settles a request: its worker, the queue or the waiting
//! client.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use shadowslice_policy::scheduler::Unanswered;
use tokio::sync::oneshot;

use super::request::RequestFailure;
use super::streams::WorkerAnswer;
use crate::pipeline::Pipeline;
use shadowslice_shared::units::Timestamp;

/// A claim on a request. The party that takes the claim first settles and counts the request, so
/// that no request is counted twice.
#[derive(Debug, Clone, Default)]
pub(crate) struct Claim(Arc<AtomicBool>);

impl Claim {
    /// Takes the claim. Returns false if another party has taken it.
    pub(crate) fn take(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn is_taken(&self) -> bool {
        self.0.load(Ordering::Acquire)
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
        self.pipeline.state.lock().give_up(Unanswered::TimedOut, now.since(self.arrived), now);
        RequestFailure::timed_out(timeout)
    }
}

impl Drop for AnswerWait<'_> {
    fn drop(&mut self) {
        if self.claim.take() {
            let now = self.pipeline.now();
            let waited = now.since(self.arrived);
            self.pipeline.state.lock().give_up(Unanswered::Cancelled(waited), waited, now);
        }
    }
}

pub(crate) fn stopping() -> Result<WorkerAnswer, RequestFailure> {
    Err(RequestFailure::Unavailable("the server is stopping".to_owned()))
}
