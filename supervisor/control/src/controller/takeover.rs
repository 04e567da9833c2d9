//! What a standing worker is for: a change of share within a batch, and a death without a wait for
//! a new worker. A standing worker that still starts is waited for: that is sooner than a new one.

use shadowslice_policy::handover::{Fact, Handover, PhaseName};
use shadowslice_shared::units::{Moment, Percent, Sms};

use super::events::Controller;
use super::outcome::Effect;
use super::primary::Primary;
use super::resize::ResizeRequest;
use super::swap::Swap;
use shadowslice_shared::ids::WorkerId;

impl Controller {
    /// The worker that stands ready with these SMs: the standing or the parked one.
    fn ready_with(&self, sms: Sms) -> Option<WorkerId> {
        let parked = self.swap.as_ref().and_then(Swap::parked);
        [self.standby.ready(), parked].into_iter().flatten().find(|worker| self.sms_of(*worker) == Some(sms))
    }

    /// The share of the worker to which traffic could move at once; of two, that of the larger one.
    pub(super) fn ready_share(&self) -> Option<Percent> {
        let parked = self.swap.as_ref().and_then(Swap::parked);
        let ready = [self.standby.ready(), parked].into_iter().flatten();
        ready.filter_map(|worker| self.workers.get(&worker)).map(|worker| worker.share).max()
    }

    /// Moves traffic to a worker that stands ready with the wanted SMs; else gives the order back.
    pub(super) fn switch_to_standing(&mut self, wanted: ResizeRequest) -> Result<(), ResizeRequest> {
        let Some(worker) = self.ready_with(self.sms(wanted.share)) else { return Err(wanted) };
        if !matches!(self.primary, Primary::Serving { .. }) {
            return Err(wanted);
        }
        if self.swap.is_some() {
            // Ends the rest of the last hand-over (probation or retiring); then the order is
            // carried out.
            self.next = Some(wanted);
            self.feed(Fact::Adopt);
        } else {
            // Outside of a hand-over no worker is parked, so `worker` is the standing one.
            self.take_standing();
            let (machine, actions) = Handover::begin_standing(self.now(), self.context.timeouts);
            self.begin_with(machine, Some(worker), wanted);
            self.perform_all(actions);
        }
        Ok(())
    }

    /// Hands over to a standing worker that still starts, if it has the wanted SMs; else gives the
    /// order back.
    pub(super) fn hand_over_to_starting(&mut self, wanted: ResizeRequest) -> Result<(), ResizeRequest> {
        let starts = self.standby.starting().and_then(|(worker, _)| self.sms_of(worker));
        if starts != Some(self.sms(wanted.share)) {
            return Err(wanted);
        }
        if self.swap.is_some() {
            // As above: the shadow needs none of the memory that the last hand-over still has.
            self.next = Some(wanted);
            self.feed(Fact::Adopt);
        } else if let Some((shadow, start)) = self.take_starting() {
            let serves = matches!(self.primary, Primary::Serving { .. });
            let machine = Handover::begin_started(start, serves, self.context.timeouts);
            self.begin_with(machine, Some(shadow), wanted);
        }
        Ok(())
    }

    /// Decides what becomes of the worker that a hand-over relieved, as the hand-over has ended.
    pub(super) fn released(&mut self, worker: WorkerId, was_parked: bool) {
        let sms = self.sms_of(worker);
        let wanted = match &self.next {
            Some(next) => {
                let wanted = self.sms(next.share);
                // If the standing worker has that share too, this one is not needed.
                let standing = self.standby.ready().and_then(|standing| self.sms_of(standing));
                sms == Some(wanted) && standing != Some(wanted)
            }
            None => sms.is_some_and(|sms| self.wants_standing(sms)),
        };
        self.adopt(worker, was_parked && wanted);
    }

    /// Whether the parked worker stays as the standing one at the end of its dwell time.
    pub(super) fn keeps_parked(&self) -> bool {
        let parked = self.swap.as_ref().and_then(Swap::parked).and_then(|worker| self.sms_of(worker));
        let standing = self.standby.ready().and_then(|worker| self.sms_of(worker));
        parked.is_some_and(|sms| self.wants_standing(sms) && standing != Some(sms))
            && self.room_to_stand(true).is_ok()
    }

    /// The lane of `worker` ended; its process will end too, which takes a while on a GPU. Another
    /// worker that can serve in its place does so without that wait. A worker that stood ready no
    /// longer counts as ready.
    pub(super) fn lane_gone(&mut self, worker: WorkerId) {
        if self.stopping.is_some() {
            return;
        }
        if self.serves(worker) {
            self.expect_end(worker);
            if self.has_relief(worker) {
                self.abandon(worker, "its socket ended");
            }
        } else if self.standby.ready() == Some(worker) {
            self.lose_standby();
        } else if self.swap.as_ref().and_then(Swap::parked) == Some(worker) {
            self.leaving.insert(worker, self.after(self.context.timeouts.stop));
            self.swap_exited(worker);
        }
    }

    /// `worker` hangs or sends nonsense. If it serves and the standing worker can replace it, that
    /// begins before `worker` is dead.
    pub(super) fn relieve(&mut self, worker: WorkerId, why: &str) {
        if self.serves(worker) && self.standby.can_relieve() {
            self.pipeline.condemn(worker);
            self.abandon(worker, why);
        }
    }

    /// The worker that serves is to end by itself, or was killed. Sets a deadline, so that no wait
    /// for its end is for ever.
    pub(super) fn expect_end(&mut self, worker: WorkerId) {
        if self.serves(worker) {
            self.leaving.insert(worker, self.after(self.context.timeouts.stop));
        }
    }

    pub(super) fn serves(&self, worker: WorkerId) -> bool {
        matches!(self.primary, Primary::Serving { worker: serving } if serving == worker)
    }

    /// Whether traffic could move if this worker died, to the standing worker or back to the
    /// incumbent.
    fn has_relief(&self, worker: WorkerId) -> bool {
        let way_back = self.swap.as_ref().is_some_and(|swap| {
            let phase = swap.machine.phase();
            swap.shadow == Some(worker) && matches!(phase, PhaseName::Draining | PhaseName::Probation)
        });
        way_back || self.standby.can_relieve()
    }

    /// Treats the worker that serves as dead. Its exit follows, or it is killed.
    pub(super) fn abandon(&mut self, worker: WorkerId, why: &str) {
        let deadline = self.after(self.context.timeouts.stop);
        self.leaving.insert(worker, deadline);
        self.swap_exited(worker);
        self.primary_exited(worker, why.to_owned());
    }

    /// The incumbent is dead: waits for a standing worker that still starts, at whatever share.
    /// False if none starts. If its start fails, another worker is started, at `back_off` at the
    /// earliest.
    pub(super) fn await_standby(&mut self, back_off: Moment, why: &str) -> bool {
        let Some((worker, _)) = self.standby.starting() else { return false };
        tracing::warn!(
            model = self.model.name,
            why,
            pid = self.pid(worker),
            "the worker died; the standing one serves when it is warm"
        );
        // It is no longer a spare: it gets normal CPU priority, and is not called in for its
        // memory.
        if let Some(process) = self.workers.get_mut(&worker) {
            process.serve();
        }
        self.note_standing(false);
        self.primary = Primary::AwaitingStandby { back_off, why: why.to_owned() };
        true
    }

    /// After each event: has the awaited standing worker serve once it is ready. It may have become
    /// the shadow of a hand-over, which then makes it serve.
    pub(super) fn tend_awaited(&mut self) {
        let Primary::AwaitingStandby { back_off, why } = &self.primary else { return };
        if self.stopping.is_some() {
            return;
        }
        let (back_off, why) = (*back_off, why.clone());
        let comes = self.standby.can_relieve() || self.swap.as_ref().is_some_and(Swap::starts);
        if !self.fail_over(&why) && !comes {
            self.restart_at(back_off);
        }
    }

    /// The incumbent is dead: the standing worker serves in its place, at whatever share. False if there is none.
    pub(super) fn fail_over(&mut self, why: &str) -> bool {
        let Some(worker) = self.take_standing() else { return false };
        let Some(share) = self.workers.get(&worker).map(|worker| worker.share) else { return false };
        let from = self.share;
        // Inside a worker the share is what it was.
        let share = if self.in_process().is_some() { from } else { share };
        self.share = share;
        tracing::warn!(
            model = self.model.name,
            why,
            %from,
            to = %share,
            pid = self.pid(worker),
            "the worker died; the standing one serves"
        );
        self.pipeline.begin_stall_with_outage();
        self.effect = Some(Effect::of_relief(worker, self.now()));
        self.serve_with(worker);
        self.swap_incumbent_is(Some(worker));
        self.swap_incumbent_serves();
        self.handovers.failovers += 1;
        let report = self.report_of("taken over", Some(why.to_owned()), (from, share));
        self.reported(report);
        self.replacing_failed("its worker died, and the standing one serves in its place");
        true
    }
}
