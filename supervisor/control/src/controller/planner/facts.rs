//! What the policy is told of a model.

use shadowslice_policy::sharing::{Live, Seen};

use super::super::Served;
use super::super::reports::{ModelReport, ModelState};
use super::orders::Orders;

pub(super) fn live(sharer: &Served, orders: &Orders, seen: Seen) -> Live {
    let report = sharer.report.borrow();
    let sms = |share| report.sms_of(&*sharer.gpu, share);
    Live {
        // Not the SMs of its groups: with the left-over group among them these differ from the
        // share's, and no order would change that.
        share: sms(report.share),
        since: report.since,
        coming: report.coming.or(orders.coming()).map(sms),
        ready: report.ready.map(sms),
        groups: report.partition.as_ref().map(|(_, groups)| *groups),
        execution: report.execution.clone(),
        held: report.held || orders.are_vain(),
        seen: of_one_that_serves(&report, seen),
    }
}

/// Requests to a model that does not serve are refused, and say nothing about the model's need.
/// They count while a worker is being replaced, which is over soon, and the requests wait.
fn of_one_that_serves(report: &ModelReport, seen: Seen) -> Seen {
    match report.state {
        ModelState::Ready | ModelState::Restarting | ModelState::Waiting(_) => seen,
        ModelState::Loading | ModelState::Unready { .. } | ModelState::Stopping => {
            Seen { span: seen.span, ..Seen::default() }
        }
    }
}
