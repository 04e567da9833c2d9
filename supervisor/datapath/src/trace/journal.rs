//! The steps of one traced request. Each part of the supervisor that handles the request records
//! them.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use shadowslice_shared::units::{Percent, Sms, Timestamp};

/// The most attempts that are recorded of one request; further attempts are only counted.
const MAX_ATTEMPTS: usize = 16;

/// A request's trace while it is recorded. Its clones write to the same trace; they hold its lock
/// only for moments and never block.
#[derive(Debug, Clone, Default)]
pub struct Journal(Arc<Mutex<RequestTrace>>);

/// The recorded steps of a request.
#[derive(Debug, Clone, Default)]
pub struct RequestTrace {
    pub model: Option<String>,
    /// The id that the client gave the request.
    pub id: Option<String>,
    /// The length of the request's batch axis.
    pub rows: Option<u32>,
    pub copy_in: Duration,
    /// The request's waits in the queue, each with its result.
    pub attempts: Vec<RequestAttempt>,
    /// The number of times that the request was put back into the queue.
    pub retries: u32,
    /// The reason for a refusal, as the metrics name it.
    pub refusal: Option<&'static str>,
    /// The error that the client reads instead of an answer.
    pub why: Option<String>,
    /// The last route change, if it happened while the request was in flight.
    pub route_change: Option<RouteChange>,
}

/// One wait of a request in the queue, and the run that followed.
#[derive(Debug, Clone)]
pub struct RequestAttempt {
    pub queued: Timestamp,
    /// The run on a worker. `None` while the request waits, and if it never ran.
    pub run: Option<WorkerRun>,
}

/// A run of a request on a worker.
#[derive(Debug, Clone)]
pub struct WorkerRun {
    pub sent: Timestamp,
    /// The batch's number, over all batches of the model.
    pub batch: u64,
    /// The rows of all requests of the batch.
    pub rows: u32,
    pub requests: usize,
    pub location: Arc<RunLocation>,
    pub end: RunEnd,
}

/// The worker of a run, and the part of the GPU that it used.
#[derive(Debug, PartialEq, Eq)]
pub struct RunLocation {
    /// The worker's id, unique while the supervisor runs.
    pub worker: u64,
    pub share: Percent,
    pub sms: Sms,
    /// The GPU: its UUID, or its name in the configuration.
    pub device: Arc<str>,
}

/// The end of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunEnd {
    Open,
    Answered {
        received: Timestamp,
        /// The execution time that the worker reports, at most the length of the run.
        execution: Duration,
        /// The time at which the outputs had been copied.
        copied: Timestamp,
    },
    Lost {
        /// The time at which the supervisor knew of the loss.
        at: Timestamp,
        why: LostReason,
    },
}

/// The reason why a run ended without an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LostReason {
    /// The worker died, or hung and was condemned.
    Died,
    /// A hand-over took the request back.
    TakenBack,
    /// The engine failed on the batch.
    Failed,
    /// The worker's answer was invalid.
    Nonsense,
}

/// A change of the worker that gets a model's requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteChange {
    pub at: Timestamp,
    /// The worker that served before; `None` after a death.
    pub from: Option<u64>,
    pub to: u64,
}

impl Journal {
    /// Records the model's name.
    pub fn set_model(&self, model: &str) {
        self.0.lock().model = Some(model.to_owned());
    }

    /// Records the client's id of the request, unless it is empty.
    pub fn set_id(&self, id: &str) {
        if !id.is_empty() {
            self.0.lock().id = Some(id.to_owned());
        }
    }

    pub fn record_copy_in(&self, rows: u32, copy_in: Duration) {
        let mut trace = self.0.lock();
        trace.rows = Some(rows);
        trace.copy_in = copy_in;
    }

    /// Records that the request waits in the queue, for the first time or again.
    pub fn record_queued(&self, at: Timestamp) {
        let mut trace = self.0.lock();
        if !trace.attempts.is_empty() {
            trace.retries += 1;
        }
        if trace.attempts.len() < MAX_ATTEMPTS {
            trace.attempts.push(RequestAttempt { queued: at, run: None });
        }
    }

    pub fn record_sent(&self, run: WorkerRun) {
        if let Some(waits) = self.0.lock().attempts.last_mut().filter(|last| last.run.is_none()) {
            waits.run = Some(run);
        }
    }

    pub fn record_end(&self, end: RunEnd) {
        let mut trace = self.0.lock();
        let run = trace.attempts.last_mut().and_then(|last| last.run.as_mut());
        if let Some(run) = run.filter(|run| run.end == RunEnd::Open) {
            run.end = end;
        }
    }

    pub fn set_route_change(&self, route_change: RouteChange) {
        self.0.lock().route_change = Some(route_change);
    }

    pub fn record_refusal(&self, reason: &'static str) {
        self.0.lock().refusal = Some(reason);
    }

    /// Records the error that the client reads.
    pub fn record_failure(&self, why: String) {
        self.0.lock().why = Some(why);
    }

    /// Returns the trace up to now. All but the attempts are kept for the access log.
    pub fn take(&self) -> RequestTrace {
        let mut trace = self.0.lock();
        RequestTrace { attempts: std::mem::take(&mut trace.attempts), ..trace.clone() }
    }
}

impl RequestTrace {
    /// Returns the number of spans that the trace is exported as, with the request's own span.
    pub fn spans(&self) -> u64 {
        let of = |one: &RequestAttempt| match &one.run {
            None => 1,
            Some(WorkerRun { end: RunEnd::Answered { .. }, .. }) => 3,
            Some(_) => 2,
        };
        1 + self.attempts.iter().map(of).sum::<u64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Timestamp {
        Timestamp::after_origin(Duration::from_millis(ms))
    }

    fn run(sent: Timestamp, batch: u64) -> WorkerRun {
        let location =
            RunLocation { worker: 1, share: Percent::WHOLE, sms: Sms(10), device: "emulated".into() };
        WorkerRun { sent, batch, rows: 1, requests: 1, location: Arc::new(location), end: RunEnd::Open }
    }

    #[test]
    fn a_request_that_is_tried_again_waits_again() {
        let journal = Journal::default();
        journal.record_queued(at(1));
        journal.record_sent(run(at(2), 7));
        let died = RunEnd::Lost { at: at(3), why: LostReason::Died };
        journal.record_end(died);
        journal.record_end(RunEnd::Lost { at: at(4), why: LostReason::Failed });
        journal.record_queued(at(3));
        let trace = journal.take();
        assert_eq!((trace.retries, trace.spans()), (1, 4));
        let [first, second] = &trace.attempts[..] else { panic!("{trace:?}") };
        assert_eq!(
            first.run.as_ref().map(|run| (run.batch, run.end)),
            Some((7, died)),
            "the first end is kept"
        );
        assert!(second.queued == at(3) && second.run.is_none());
        assert!(journal.take().attempts.is_empty());
    }

    #[test]
    fn attempts_are_bounded_and_the_last_recorded_one_is_kept() {
        let journal = Journal::default();
        for round in 0..100 {
            journal.record_queued(at(round));
            journal.record_sent(run(at(round), round));
            journal.record_end(RunEnd::Lost { at: at(round), why: LostReason::TakenBack });
        }
        let trace = journal.take();
        assert_eq!((trace.attempts.len(), trace.retries), (MAX_ATTEMPTS, 99));
        let last = trace.attempts.last().and_then(|last| last.run.as_ref());
        assert_eq!(last.map(|run| run.batch), Some(MAX_ATTEMPTS as u64 - 1));
    }
}
