//! What settles a request: its worker, the queue, or the client that waits for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::oneshot;

use super::Pipeline;
use super::request::RequestFailure;
use super::streams::WorkerAnswer;
use shadowslice_shared::units::Timestamp;

/// Taken by what settles a request first, which alone counts it: so it is counted once.
#[derive(Debug, Clone, Default)]
pub(crate) struct Claim(Arc<AtomicBool>);

impl Claim {
    /// Whether it was free; it is taken now.
    pub(crate) fn take(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn is_taken(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Dropped without an answer, it gives the request up: that is not run if it still waits, and if it
/// runs its answer is ignored.
#[derive(Debug)]
pub(crate) struct AnswerWait<'p> {
    pub(crate) pipeline: &'p Pipeline,
    pub(crate) claim: Claim,
    pub(crate) arrived: Timestamp,
}

impl AnswerWait<'_> {
    /// The answer, or word that `timeout` was over first.
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
                // It has been settled in the meantime, and word of that is on its way.
                Err(_) => {}
            }
        }
        reply_rx.await.unwrap_or_else(|_| stopping())
    }

    fn timed_out(&self, timeout: Duration) -> RequestFailure {
        let now = self.pipeline.now();
        self.pipeline.state.lock().timed_out(now.since(self.arrived), now);
        RequestFailure::timed_out(timeout)
    }
}

impl Drop for AnswerWait<'_> {
    fn drop(&mut self) {
        if self.claim.take() {
            let now = self.pipeline.now();
            self.pipeline.state.lock().cancelled(now.since(self.arrived), now);
        }
    }
}

pub(crate) fn stopping() -> Result<WorkerAnswer, RequestFailure> {
    Err(RequestFailure::Unavailable("the server is stopping".to_owned()))
}
