//! The recorded steps of one traced request. Each part of the supervisor that handles the request
//! adds its steps.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use shadowslice_shared::units::{Percent, Sms, Timestamp};

/// The largest number of attempts that are recorded for a request. Further attempts are only
/// counted.
const MAX_ATTEMPTS: usize = 16;

/// The trace of a request while it is recorded. All clones write to the same trace. They hold the
/// trace's lock only briefly and never block.
#[derive(Debug, Clone, Default)]
pub struct Journal(Arc<Mutex<RequestTrace>>);

/// The recorded steps of a request.
#[derive(Debug, Clone, Default)]
pub struct RequestTrace {
    pub model: Option<String>,
    /// The number of the model's version.
    pub version: u32,
    /// The request id that the client set.
    pub id: Option<String>,
    /// The size of the request along the batch axis.
    pub rows: Option<u32>,
    pub copy_in: Duration,
    /// The attempts. Each attempt is a wait in the queue and the run that followed.
    pub attempts: Vec<RequestAttempt>,
    /// The number of times that the request was put back into the queue.
    pub retries: u32,
    /// The reason for a refusal, as the metrics name it.
    pub refusal: Option<&'static str>,
    /// The error that the client receives instead of an answer.
    pub why: Option<String>,
    /// The most recent route change, if it happened while the request was in flight.
    pub route_change: Option<RouteChange>,
}

/// A wait of a request in the queue, and the run that followed.
#[derive(Debug, Clone)]
pub struct RequestAttempt {
    pub queued: Timestamp,
    /// The run on a worker. `None` if the request still waits or never ran.
    pub run: Option<WorkerRun>,
}

/// A run of a request on a worker.
#[derive(Debug, Clone)]
pub struct WorkerRun {
    pub sent: Timestamp,
    /// The number of the batch, which is unique within the model.
    pub batch: u64,
    /// The number of rows in all requests of the batch.
    pub rows: u32,
    pub requests: usize,
    pub location: Arc<RunLocation>,
    pub end: RunEnd,
}

/// The worker of a run, and the part of the GPU that it used.
#[derive(Debug, PartialEq, Eq)]
pub struct RunLocation {
    /// The worker's id. It is unique while the supervisor runs.
    pub worker: u64,
    pub share: Percent,
    pub sms: Sms,
    /// The UUID of the GPU, or the GPU's name in the configuration.
    pub device: Arc<str>,
}

/// The way in which a run of a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunEnd {
    Open,
    Answered {
        received: Timestamp,
        /// The execution time that the worker reports, limited to the duration of the run.
        execution: Duration,
        /// The time at which the supervisor had copied the outputs.
        copied: Timestamp,
    },
    Lost {
        /// The time at which the supervisor noticed the loss.
        at: Timestamp,
        why: LostReason,
    },
}

/// The reason why a run ended without an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LostReason {
    /// The worker died, or it hung and was stopped.
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
    /// The worker that served before, or `None` if that worker died.
    pub from: Option<u64>,
    pub to: u64,
}

impl Journal {
    /// Records the model and the number of the version that serves the request.
    pub fn set_model(&self, model: &str, version: u32) {
        let mut trace = self.0.lock();
        (trace.model, trace.version) = (Some(model.to_owned()), version);
    }

    /// Records the id that the client gave the request. Ignores an empty id.
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

    /// Records that the request waits in the queue, either for the first time or again.
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

    /// Records the error that the client receives.
    pub fn record_failure(&self, why: String) {
        self.0.lock().why = Some(why);
    }

    /// Returns the trace recorded so far. The attempts move to the returned trace. All other data
    /// stay in the journal for the access log.
    pub fn take(&self) -> RequestTrace {
        let mut trace = self.0.lock();
        RequestTrace { attempts: std::mem::take(&mut trace.attempts), ..trace.clone() }
    }
}

impl RequestTrace {
    /// Returns the number of spans in the exported trace, including the request's own span.
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
