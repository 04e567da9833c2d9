//! The snapshot of a model, from which the policy decides.

use shadowslice_policy::sharing::{ModelSnapshot, Observation};

use super::super::Served;
use super::super::reports::{ModelReport, ModelState};
use super::orders::Orders;

pub(super) fn snapshot(served: &Served, orders: &Orders, seen: Observation) -> ModelSnapshot {
    let report = served.report.borrow();
    let sms = |share| report.sms_of(&*served.gpu, share);
    ModelSnapshot {
        // These are the SMs of the share and not of the groups. They differ if the last group, which may
        // have another size, is one of the groups, and no order would change that.
        share: sms(report.share),
        share_since: report.since,
        pending_share: report.coming.or(orders.pending_share()).map(sms),
        standby_share: report.ready.map(sms),
        groups: report.partition.as_ref().map(|(_, groups)| *groups),
        execution: report.execution.clone(),
        held: report.held || orders.answers_were_wrong(),
        can_pause: served.pipeline.can_pause(),
        observation: observation(&report, seen),
    }
}

/// Returns the observation without requests if the model does not serve. Such a model refuses requests,
/// which do not show the model's need. While a worker is being replaced, requests wait and count.
fn observation(report: &ModelReport, seen: Observation) -> Observation {
    match report.state {
        ModelState::Ready | ModelState::Restarting | ModelState::Waiting(_) => seen,
        ModelState::Loading | ModelState::Unready { .. } | ModelState::Stopping => {
            Observation { span: seen.span, ..Observation::default() }
        }
    }
}
