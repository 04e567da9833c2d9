//! The refusals of requests, and what clients read about them.

use shadowslice_policy::scheduler;
use shadowslice_shared::units::Timestamp;

use super::figures::CountedRefusal;
use super::requests::{RequestFailure, WaitingRequest};
use super::state::{PipelineState, SchedulerRefusal, reply};
use super::trace_event;

impl PipelineState {
    fn queue_full(&self) -> RequestFailure {
        let (name, waiting) = (&self.name, self.scheduler.queued());
        RequestFailure::Unavailable(format!(
            "the queue of model '{name}' is full: {waiting} requests are waiting"
        ))
    }

    pub(crate) fn not_ready(&self) -> RequestFailure {
        let why = self.gate.open().err().unwrap_or("the model's inputs and outputs are not known yet");
        RequestFailure::Unavailable(format!("model '{}' is not ready: {why}", self.name))
    }

    /// Returns how a request that the scheduler refuses is counted, and its failure.
    pub(crate) fn refusal(
        &self,
        SchedulerRefusal { request, why }: &SchedulerRefusal,
        now: Timestamp,
    ) -> (CountedRefusal, RequestFailure) {
        match why {
            scheduler::RefusalReason::QueueFull => (CountedRefusal::QueueFull, self.queue_full()),
            scheduler::RefusalReason::MemoryFull => (CountedRefusal::MemoryFull, memory_full(&self.name)),
            why => (CountedRefusal::Late, self.too_late(request, *why, now)),
        }
    }

    /// Returns the failure of a request that is refused because it is or would be too late.
    fn too_late(
        &self,
        request: &WaitingRequest,
        why: scheduler::RefusalReason,
        now: Timestamp,
    ) -> RequestFailure {
        let (model, waited) = (&self.name, now.since(request.arrived).as_millis());
        if let (scheduler::RefusalReason::Expires, Some(expires)) = (why, request.expires) {
            return RequestFailure::will_time_out(expires.since(request.arrived));
        }
        RequestFailure::Unavailable(match why {
            scheduler::RefusalReason::Overdue => {
                format!("the server is overloaded: the request waited {waited} ms, past its deadline")
            }
            scheduler::RefusalReason::Asleep => format!(
                "model '{model}' sleeps, and other models use the GPU memory that it needs: the request waited \
                 {waited} ms, past its deadline"
            ),
            _ => {
                let due = request.deadline.since(request.arrived).as_secs_f64() * 1e3;
                format!(
                    "model '{model}' could not answer the request within {due} ms, its SLO or timeout, under the \
                     current load"
                )
            }
        })
    }

    /// Refuses an accepted request that has become too late, or that another tenant's request displaces.
    pub(crate) fn reject(&mut self, refused: SchedulerRefusal, now: Timestamp) {
        let (why, failure) = self.refusal(&refused, now);
        let SchedulerRefusal { request, .. } = refused;
        trace_event::record_refusal(request.item.journal.as_ref(), why);
        if request.item.claim.take() {
            self.record_refusal(why, now.since(request.arrived), now);
        }
        reply(request, Err(failure));
    }
}

/// Returns the failure of a request for which the model has no memory.
pub(crate) fn memory_full(model: &str) -> RequestFailure {
    RequestFailure::Unavailable(format!(
        "the queue of model '{model}' is full: its memory for requests (queue.memory) is in use"
    ))
}
