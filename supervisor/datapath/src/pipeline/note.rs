//! Notes of requests that are traced. Of a request that is not traced there is nothing to note.

use std::sync::Arc;
use std::time::Duration;

use shadowslice_shared::units::Timestamp;

use super::counts::Refusal;
use super::link::Sending;
use super::pending::{InFlight, Waiting};
use crate::trace::{Journal, LostReason, RouteChange, RunEnd, RunLocation, WorkerRun};

fn journals(requests: &[Waiting]) -> impl Iterator<Item = &Journal> {
    requests.iter().filter_map(|request| request.item.journal.as_ref())
}

pub(super) fn refused(journal: Option<&Journal>, why: Refusal) {
    if let Some(journal) = journal {
        journal.refused(why.name());
    }
}

pub(super) fn queued(requests: &[Waiting], at: Timestamp) {
    journals(requests).for_each(|journal| journal.queued(at));
}

pub(super) fn sent(batch: &Sending, place: &Arc<RunLocation>, at: Timestamp) {
    let &Sending { id, ref requests, .. } = batch;
    let rows = requests.iter().map(|request| request.rows).sum();
    for journal in journals(requests) {
        let (requests, place) = (requests.len(), Arc::clone(place));
        journal.sent(WorkerRun { sent: at, batch: id, rows, requests, place, ending: RunEnd::Open });
    }
}

pub(super) fn lost(requests: &[Waiting], why: LostReason, at: Timestamp) {
    journals(requests).for_each(|journal| journal.ended(RunEnd::Lost { at, why }));
}

/// `routed` is the last change of the worker that serves.
pub(super) fn answered(
    batch: &InFlight,
    (received, execution, copied): (Timestamp, Duration, Timestamp),
    routed: Option<RouteChange>,
) {
    for request in &batch.requests {
        let Some(journal) = &request.item.journal else { continue };
        journal.ended(RunEnd::Answered { received, execution, copied });
        if let Some(routed) = routed.filter(|routed| routed.at > request.arrived) {
            journal.handed_over(routed);
        }
    }
}
