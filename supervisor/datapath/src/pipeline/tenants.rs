//! The tenants of a model's requests, as the GPU's board of tenants sees them.

use shadowslice_policy::tenants::BoardMember;
use shadowslice_shared::units::Timestamp;

use super::state::PipelineState;

impl PipelineState {
    /// Has the scheduler use the present turns of the tenants.
    pub(crate) fn update_turns(&mut self, now: Timestamp) {
        let Some(serving) = self.scheduler.serving_lane().map(|lane| lane.worker) else { return };
        if !self.links.iter().any(|link| link.worker == serving && link.sm_time.has_tenants()) {
            return;
        }
        self.report_tenants();
        let link = self.links.iter().find(|link| link.worker == serving);
        if let Some(turns) = link.and_then(|link| link.sm_time.turns(now)) {
            self.scheduler.set_turns(turns);
        }
    }

    /// Reports the tenants with requests to the GPU's board. The queue counts for the worker that serves.
    pub(crate) fn report_tenants(&self) {
        let serving = self.scheduler.serving_lane().map(|lane| lane.worker);
        for link in self.links.iter().filter(|link| link.sm_time.has_tenants()) {
            let Some(lane) = self.scheduler.lane(link.worker) else { continue };
            let serves = serving == Some(link.worker);
            let queued = if serves { self.scheduler.queued_tenants() } else { Default::default() };
            link.sm_time.set_board(BoardMember {
                priority: self.priority,
                groups: lane.groups(),
                sms: f64::from(link.location.sms.0),
                executes: !lane.is_idle(),
                queued,
                active: queued.union(lane.tenants()),
            });
        }
    }
}
