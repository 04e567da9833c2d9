//! Records the steps of traced requests. Requests that are not traced have no journal.

use std::sync::Arc;

use shadowslice_shared::units::Timestamp;

use super::figures::CountedRefusal;
use super::requests::{InFlightBatch, WaitingRequest};
use super::workers::PipelineBatch;
use crate::trace::{Journal, LostReason, RouteChange, RunEnd, RunLocation, WorkerRun};

fn journals(requests: &[WaitingRequest]) -> impl Iterator<Item = &Journal> {
    requests.iter().filter_map(|request| request.item.journal.as_ref())
}

pub(super) fn record_refusal(journal: Option<&Journal>, why: CountedRefusal) {
    if let Some(journal) = journal {
        journal.record_refusal(why.name());
    }
}

pub(super) fn record_queued(requests: &[WaitingRequest], at: Timestamp) {
    journals(requests).for_each(|journal| journal.record_queued(at));
}

pub(super) fn record_sent(batch: &PipelineBatch, location: &Arc<RunLocation>, at: Timestamp) {
    let &PipelineBatch { id, ref requests, .. } = batch;
    let rows = requests.iter().map(|request| request.rows).sum();
    for journal in journals(requests) {
        let (requests, location) = (requests.len(), Arc::clone(location));
        journal.record_sent(WorkerRun { sent: at, batch: id, rows, requests, location, end: RunEnd::Open });
    }
}

pub(super) fn record_loss(requests: &[WaitingRequest], why: LostReason, at: Timestamp) {
    journals(requests).for_each(|journal| journal.record_end(RunEnd::Lost { at, why }));
}

/// Records `end`, the end of a batch's run, for each request. `routed` is the most recent route
/// change.
pub(super) fn record_answer(batch: &InFlightBatch, end: RunEnd, routed: Option<RouteChange>) {
    for request in &batch.requests {
        let Some(journal) = &request.item.journal else { continue };
        journal.record_end(end);
        if let Some(routed) = routed.filter(|routed| routed.at > request.arrived) {
            journal.set_route_change(routed);
        }
    }
}
