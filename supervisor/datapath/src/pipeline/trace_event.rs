//! Records of traced requests' steps. Requests that are not traced have no journal.

use std::sync::Arc;

use shadowslice_shared::units::Timestamp;

use super::counts::RefusalReason;
use super::link::OutgoingBatch;
use super::pending::{InFlightBatch, QueuedRequest};
use crate::trace::{Journal, LostReason, RouteChange, RunEnd, RunLocation, WorkerRun};

fn journals(requests: &[QueuedRequest]) -> impl Iterator<Item = &Journal> {
    requests.iter().filter_map(|request| request.item.journal.as_ref())
}

pub(super) fn record_refusal(journal: Option<&Journal>, why: RefusalReason) {
    if let Some(journal) = journal {
        journal.record_refusal(why.name());
    }
}

pub(super) fn record_queued(requests: &[QueuedRequest], at: Timestamp) {
    journals(requests).for_each(|journal| journal.record_queued(at));
}

pub(super) fn record_sent(batch: &OutgoingBatch, location: &Arc<RunLocation>, at: Timestamp) {
    let &OutgoingBatch { id, ref requests, .. } = batch;
    let rows = requests.iter().map(|request| request.rows).sum();
    for journal in journals(requests) {
        let (requests, location) = (requests.len(), Arc::clone(location));
        journal.record_sent(WorkerRun { sent: at, batch: id, rows, requests, location, end: RunEnd::Open });
    }
}

pub(super) fn record_loss(requests: &[QueuedRequest], why: LostReason, at: Timestamp) {
    journals(requests).for_each(|journal| journal.record_end(RunEnd::Lost { at, why }));
}

/// Records `end`, the answer of a batch. `routed` is the last route change.
pub(super) fn record_answer(batch: &InFlightBatch, end: RunEnd, routed: Option<RouteChange>) {
    for request in &batch.requests {
        let Some(journal) = &request.item.journal else { continue };
        journal.record_end(end);
        if let Some(routed) = routed.filter(|routed| routed.at > request.arrived) {
            journal.set_route_change(routed);
        }
    }
}
