//! The steps of one traced request, noted by each part of the supervisor that handles it.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use shadowslice_shared::units::{Percent, Sms, Timestamp};

/// The most waits in the queue that are noted of one request; further waits are only counted.
const MAX_ATTEMPTS: usize = 16;

/// A journey that is being written. Its holders write to the same journey; they hold its lock for
/// moments only and never wait meanwhile.
#[derive(Debug, Clone, Default)]
pub struct Journal(Arc<Mutex<RequestTrace>>);

#[derive(Debug, Clone, Default)]
pub struct RequestTrace {
    pub model: Option<String>,
    /// The id that the client gave the request.
    pub id: Option<String>,
    /// Along the batch axis.
    pub rows: Option<u32>,
    pub copy_in: Duration,
    /// Its waits in the queue, with the result of each.
    pub attempts: Vec<RequestAttempt>,
    /// How often it was put back into the queue.
    pub retries: u32,
    /// Why it was turned away, in a word.
    pub refusal: Option<&'static str>,
    /// Why it has no answer, as its client reads it.
    pub why: Option<String>,
    /// The last change of the worker that serves, if a change fell into the request's time.
    pub route_change: Option<RouteChange>,
}

#[derive(Debug, Clone)]
pub struct RequestAttempt {
    pub queued: Timestamp,
    /// The stay with a worker; `None` while the request waits, and for good if it never ran.
    pub run: Option<WorkerRun>,
}

#[derive(Debug, Clone)]
pub struct WorkerRun {
    pub sent: Timestamp,
    /// The batch's number, of all batches of the model.
    pub batch: u64,
    /// Rows of all requests of the batch.
    pub rows: u32,
    pub requests: usize,
    pub location: Arc<RunLocation>,
    pub end: RunEnd,
}

#[derive(Debug, PartialEq, Eq)]
pub struct RunLocation {
    /// Names it for the life of the supervisor.
    pub worker: u64,
    pub share: Percent,
    pub sms: Sms,
    /// The GPU: its UUID, or as the configuration names it.
    pub device: Arc<str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunEnd {
    Open,
    Answered {
        received: Timestamp,
        /// The execution as the worker reports it, no longer than the stay.
        execution: Duration,
        /// When the outputs had been copied.
        copied: Timestamp,
    },
    Lost {
        /// When that was known.
        at: Timestamp,
        why: LostReason,
    },
}

/// Why a stay with a worker ended without an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LostReason {
    /// The worker died, or hung and was given up.
    Died,
    /// A hand-over took it back in time.
    TakenBack,
    Failed,
    Nonsense,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteChange {
    pub at: Timestamp,
    /// The worker that served until then; `None` after a death.
    pub from: Option<u64>,
    pub to: u64,
}

impl Journal {
    pub fn found(&self, model: &str) {
        self.0.lock().model = Some(model.to_owned());
    }

    pub fn identified(&self, id: &str) {
        if !id.is_empty() {
            self.0.lock().id = Some(id.to_owned());
        }
    }

    pub fn stored(&self, rows: u32, copy_in: Duration) {
        let mut trace = self.0.lock();
        trace.rows = Some(rows);
        trace.copy_in = copy_in;
    }

    /// It waits in the queue, the first time or again.
    pub fn queued(&self, at: Timestamp) {
        let mut trace = self.0.lock();
        if !trace.attempts.is_empty() {
            trace.retries += 1;
        }
        if trace.attempts.len() < MAX_ATTEMPTS {
            trace.attempts.push(RequestAttempt { queued: at, run: None });
        }
    }

    pub fn sent(&self, run: WorkerRun) {
        if let Some(waits) = self.0.lock().attempts.last_mut().filter(|last| last.run.is_none()) {
            waits.run = Some(run);
        }
    }

    pub fn ended(&self, end: RunEnd) {
        let mut trace = self.0.lock();
        let run = trace.attempts.last_mut().and_then(|last| last.run.as_mut());
        if let Some(run) = run.filter(|run| run.end == RunEnd::Open) {
            run.end = end;
        }
    }

    pub fn route_changed(&self, route_change: RouteChange) {
        self.0.lock().route_change = Some(route_change);
    }

    pub fn refused(&self, reason: &'static str) {
        self.0.lock().refusal = Some(reason);
    }

    pub fn failed(&self, why: String) {
        self.0.lock().why = Some(why);
    }

    /// Returns the notes up to now. All but the tries stay, for a line of the access log.
    pub fn take(&self) -> RequestTrace {
        let mut trace = self.0.lock();
        RequestTrace { attempts: std::mem::take(&mut trace.attempts), ..trace.clone() }
    }
}

impl RequestTrace {
    /// The spans that it is told as, the request's own included.
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
        journal.queued(at(1));
        journal.sent(run(at(2), 7));
        let died = RunEnd::Lost { at: at(3), why: LostReason::Died };
        journal.ended(died);
        journal.ended(RunEnd::Lost { at: at(4), why: LostReason::Failed });
        journal.queued(at(3));
        let trace = journal.take();
        assert_eq!((trace.retries, trace.spans()), (1, 4));
        let [first, second] = &trace.attempts[..] else { panic!("{trace:?}") };
        assert_eq!(first.run.as_ref().map(|run| (run.batch, run.end)), Some((7, died)), "the first word");
        assert!(second.queued == at(3) && second.run.is_none());
        assert!(journal.take().attempts.is_empty());
    }

    #[test]
    fn tries_are_bounded_and_the_last_one_told_stays_as_it_was() {
        let journal = Journal::default();
        for round in 0..100 {
            journal.queued(at(round));
            journal.sent(run(at(round), round));
            journal.ended(RunEnd::Lost { at: at(round), why: LostReason::TakenBack });
        }
        let trace = journal.take();
        assert_eq!((trace.attempts.len(), trace.retries), (MAX_ATTEMPTS, 99));
        let last = trace.attempts.last().and_then(|last| last.run.as_ref());
        assert_eq!(last.map(|run| run.batch), Some(MAX_ATTEMPTS as u64 - 1));
    }
}
