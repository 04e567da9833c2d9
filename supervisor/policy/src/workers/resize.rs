//! Requests for a new share. The state machine refuses them, or applies them by the fastest possible
//! mechanism.

use shadowslice_shared::units::Percent;

use super::Workers;
use super::change::{ChangeMechanism, ChangeReport, OngoingChange, ResizeRefused};
use super::messages::{Action, Cause, HandoverMode, LifecycleReport, ResizeRequest};
use super::primary::Primary;
use super::view::HandoverPhase;

impl Workers {
    pub(super) fn resize(&mut self, request: ResizeRequest, hold: bool) {
        let refusal = self.refusal(&request);
        let as_asked = matches!(refusal, None | Some(ResizeRefused::InForce { .. }));
        // A share that an operator sets is held until the operator releases it. If no worker serves, a
        // request for the share in force starts the model again and does not hold the share.
        let again = self.processes.serving().is_none() && self.sms(request.share) == self.sms(self.share);
        self.held |= as_asked && hold && !again && self.settings.policy_acts;
        match refusal {
            Some(refused) => self.refuse(request, refused),
            None => self.change_share(request),
        }
    }

    /// Applies the request that arrived while another change was in progress.
    pub(super) fn resize_next(&mut self) {
        if self.change.is_some() {
            return;
        }
        let Some(request) = self.next.take() else { return };
        match self.refusal(&request) {
            Some(refused) => self.refuse(request, refused),
            None => self.change_share(request),
        }
    }

    /// Returns true if no further request can wait for the end of the current change.
    fn is_busy(&self) -> bool {
        let settled =
            matches!(self.handover_phase(), None | Some(HandoverPhase::Probation | HandoverPhase::Retiring));
        let otherwise =
            matches!(self.change, Some(OngoingChange::Revive { .. } | OngoingChange::Inside { .. }));
        !settled || otherwise || self.next.is_some()
    }

    fn refusal(&self, request: &ResizeRequest) -> Option<ResizeRefused> {
        let share = request.share;
        let model = || self.settings.model.clone();
        if self.held && request.cause != Cause::Hand {
            return Some(ResizeRefused::Held(model()));
        }
        let (min, max) = (self.settings.min, self.settings.max);
        if !(min..=max).contains(&share) {
            return Some(ResizeRefused::OutOfBounds { model: model(), share, min, max });
        }
        let down = matches!(self.processes.primary, Primary::Down { .. });
        let (wanted, now) = (self.sms(share), self.sms(self.share));
        // `handover: never` forbids another share, but not a new start with the current share.
        if self.settings.handover == HandoverMode::Never && !(down && wanted == now) {
            return Some(ResizeRefused::Never(model()));
        }
        if self.is_busy() {
            return Some(ResizeRefused::Busy(model()));
        }
        if self.processes.reference.is_some() {
            let why = match &self.processes.primary {
                Primary::Down { why, .. } => why.clone(),
                _ => "the model is loading".to_owned(),
            };
            return Some(ResizeRefused::NotServing { model: model(), why });
        }
        // A change by hand wakes the model. The policy has no reason to wake it.
        if matches!(self.processes.primary, Primary::Asleep) && request.cause != Cause::Hand {
            let why = "the model sleeps; wake it first".to_owned();
            return Some(ResizeRefused::NotServing { model: model(), why });
        }
        if self.is_wrong_at(share) {
            return Some(ResizeRefused::Wrong { model: model(), share });
        }
        let serves = self.processes.serving().is_some();
        (wanted == now && !down).then_some(ResizeRefused::InForce { share, sms: wanted.0, serves })
    }

    /// Changes the share by the first possible mechanism in this order:
    ///
    /// 1. a change inside the worker
    /// 2. a hand-over to a worker that is ready
    /// 3. a hand-over to a standby that is still starting
    /// 4. a hand-over after the current one has ended
    /// 5. a start of the model, if it is down or sleeps without a worker
    /// 6. a hand-over to a new shadow
    fn change_share(&mut self, request: ResizeRequest) {
        let down = matches!(self.processes.primary, Primary::Down { .. } | Primary::Asleep);
        if self.relocator.is_ok() && !down && self.change.is_none() {
            return self.repartition(request);
        }
        let fits = |worker: &_| self.fits(*worker, request.share);
        let ready = self.processes.ready().filter(fits).or(self.processes.parked().filter(fits));
        let ready = ready.filter(|_| self.processes.serving().is_some());
        let starting = self.processes.starting_standby().filter(fits);
        match (self.change.is_some(), ready, starting) {
            (true, None, None) => {
                self.next = Some(request);
                self.reclaim();
            }
            (true, _, _) => {
                self.next = Some(request);
                self.cut_short(&request);
            }
            (false, Some(ready), _) => {
                self.begin_handover(request, Some(ready));
                self.take_standby();
                self.cut_over(ready);
            }
            (false, None, Some(starting)) => {
                self.take_starting(starting);
                self.begin_handover(request, Some(starting));
            }
            (false, None, None) if down => self.revive(request),
            (false, None, None) => self.begin_handover(request, None),
        }
    }

    /// Starts a model without a worker again. Requests wait until the next worker is warm.
    fn revive(&mut self, request: ResizeRequest) {
        self.processes.restarts.reset();
        let from = self.share;
        self.set_share(request.share);
        self.act(Action::MeasureStall { outage: false });
        self.change = Some(OngoingChange::Revive { request, from });
        self.boot();
    }

    pub(super) fn revived(&mut self) {
        if let Some(&OngoingChange::Revive { request, from }) = self.change.as_ref() {
            self.change = None;
            self.report_completed(request, from, ChangeMechanism::Revive);
        }
    }

    pub(super) fn report_completed(
        &mut self,
        request: ResizeRequest,
        from: Percent,
        mechanism: ChangeMechanism,
    ) {
        let sms = (self.sms(from), self.sms(request.share));
        self.act(Action::Report(LifecycleReport::Completed(ChangeReport { request, from, mechanism, sms })));
    }

    pub(super) fn refuse(&mut self, request: ResizeRequest, refused: ResizeRefused) {
        self.act(Action::Report(LifecycleReport::Refused(request, refused)));
    }

    pub(super) fn refuse_all(&mut self, refused: &ResizeRefused) {
        if let Some(next) = self.next.take() {
            self.refuse(next, refused.clone());
        }
        let answered =
            matches!(self.handover_phase(), Some(HandoverPhase::Probation | HandoverPhase::Retiring))
                || self.processes.is_rolling_back();
        if let Some(change) = self.change.take().filter(|_| !answered) {
            self.act(Action::Report(LifecycleReport::Aborted(*change.request(), refused.clone())));
        }
    }
}
