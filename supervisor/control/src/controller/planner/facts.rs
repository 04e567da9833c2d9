//! What the policy is told of a model.

use shadowslice_policy::sharing::{ModelSnapshot, Observation};

use super::super::Served;
use super::super::reports::{ModelReport, ModelState};
use super::orders::Orders;

pub(super) fn live(sharer: &Served, orders: &Orders, seen: Observation) -> ModelSnapshot {
    let report = sharer.report.borrow();
    let sms = |share| report.sms_of(&*sharer.gpu, share);
    ModelSnapshot {
        // Not the SMs of its groups: with the left-over group among them these differ from the
        // share's, and no order would change that.
        share: sms(report.share),
        share_since: report.since,
        pending_share: report.coming.or(orders.coming()).map(sms),
        standby_share: report.ready.map(sms),
        groups: report.partition.as_ref().map(|(_, groups)| *groups),
        execution: report.execution.clone(),
        held: report.held || orders.are_vain(),
        observation: of_one_that_serves(&report, seen),
    }
}

/// Requests to a model that does not serve are refused, and say nothing about the model's need.
/// They count while a worker is being replaced, which is over soon, and the requests wait.
fn of_one_that_serves(report: &ModelReport, seen: Observation) -> Observation {
    match report.state {
        ModelState::Ready | ModelState::Restarting | ModelState::Waiting(_) => seen,
        ModelState::Loading | ModelState::Unready { .. } | ModelState::Stopping => {
            Observation { span: seen.span, ..Observation::default() }
        }
    }
}
