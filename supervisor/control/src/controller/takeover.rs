//! What a standing worker is for: a change of share that is in force within a batch, and a death that nobody
//! waits for. One that still starts is waited for, which is sooner than starting another.

use shadowslice_policy::handover::{Fact, Handover, PhaseName};
use shadowslice_shared::units::{Moment, Percent, Sms};

use super::events::Controller;
use super::outcome::Effect;
use super::primary::Primary;
use super::resize::ResizeRequest;
use super::swap::Swap;
use shadowslice_shared::ids::WorkerId;

impl Controller {
    /// The worker that stands ready with these SMs, be it one that a hand-over relieved.
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

    /// Moves traffic to a worker that stands ready with the wanted SMs; gives the order back if there is none.
    pub(super) fn switch_to_standing(&mut self, wanted: ResizeRequest) -> Result<(), ResizeRequest> {
        let Some(worker) = self.ready_with(self.sms(wanted.share)) else { return Err(wanted) };
        if !matches!(self.primary, Primary::Serving { .. }) {
            return Err(wanted);
        }
        if self.swap.is_some() {
            // What is left of the last hand-over is no reason to wait. It ends, and the order's turn comes.
            self.next = Some(wanted);
            self.feed(Fact::Adopt);
        } else {
            // Nobody is parked outside of a hand-over, so it is the standing one.
            self.take_standing();
            let (machine, actions) = Handover::begin_standing(self.now(), self.context.timeouts);
            self.begin_with(machine, Some(worker), wanted);
            self.perform_all(actions);
        }
        Ok(())
    }

    /// Hands over to the standing worker while it still starts, if it does so with the wanted SMs; gives the order back
    /// if it does not.
    pub(super) fn hand_over_to_starting(&mut self, wanted: ResizeRequest) -> Result<(), ResizeRequest> {
        let starts = self.standby.starting().and_then(|(worker, _)| self.sms_of(worker));
        if starts != Some(self.sms(wanted.share)) {
            return Err(wanted);
        }
        if self.swap.is_some() {
            // As for a flip: no memory is needed that the last hand-over has.
            self.next = Some(wanted);
            self.feed(Fact::Adopt);
        } else if let Some((shadow, start)) = self.take_starting() {
            let serves = matches!(self.primary, Primary::Serving { .. });
            let machine = Handover::begin_started(start, serves, self.context.timeouts);
            self.begin_with(machine, Some(shadow), wanted);
        }
        Ok(())
    }

    /// A hand-over has ended, and leaves the worker that it relieved to us.
    pub(super) fn released(&mut self, worker: WorkerId, was_parked: bool) {
        let sms = self.sms_of(worker);
        let wanted = match &self.next {
            Some(next) => {
                let wanted = self.sms(next.share);
                // The standing worker may have that share, too, and has it without this one.
                let standing = self.standby.ready().and_then(|standing| self.sms_of(standing));
                sms == Some(wanted) && standing != Some(wanted)
            }
            None => sms.is_some_and(|sms| self.wants_standing(sms)),
        };
        self.adopt(worker, was_parked && wanted);
    }

    /// Whether the parked worker, whose time is over, stays as the standing one.
    pub(super) fn keeps_parked(&self) -> bool {
        let parked = self.swap.as_ref().and_then(Swap::parked).and_then(|worker| self.sms_of(worker));
        let standing = self.standby.ready().and_then(|worker| self.sms_of(worker));
        parked.is_some_and(|sms| self.wants_standing(sms) && standing != Some(sms))
            && self.room_to_stand(true).is_ok()
    }

    /// The lane of `worker` ended, and its process will, which takes a while on a GPU. If it is the one that serves, and
    /// somebody can serve in its place, that need not wait so long; if it stands ready, it does no more.
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

    /// A worker that hangs or talks nonsense. Where somebody can serve in its place, that begins before the
    /// worker is dead.
    pub(super) fn relieve(&mut self, worker: WorkerId, why: &str) {
        if self.serves(worker) && self.standby.can_relieve() {
            self.pipeline.condemn(worker);
            self.abandon(worker, why);
        }
    }

    /// The worker that serves is to end by itself, or was killed. If it stays, nobody waits for it for ever.
    pub(super) fn expect_end(&mut self, worker: WorkerId) {
        if self.serves(worker) {
            self.leaving.insert(worker, self.after(self.context.timeouts.stop));
        }
    }

    pub(super) fn serves(&self, worker: WorkerId) -> bool {
        matches!(self.primary, Primary::Serving { worker: serving } if serving == worker)
    }

    /// Whether nobody would have to be started if this worker died: traffic moves to the standing one, or back.
    fn has_relief(&self, worker: WorkerId) -> bool {
        let way_back = self.swap.as_ref().is_some_and(|swap| {
            let phase = swap.machine.phase();
            swap.shadow == Some(worker) && matches!(phase, PhaseName::Draining | PhaseName::Probation)
        });
        way_back || self.standby.can_relieve()
    }

    /// The worker that serves is as good as dead, and treated so. Its exit follows, or it is killed.
    pub(super) fn abandon(&mut self, worker: WorkerId, why: &str) {
        let deadline = self.after(self.context.timeouts.stop);
        self.leaving.insert(worker, deadline);
        self.swap_exited(worker);
        self.primary_exited(worker, why.to_owned());
    }

    /// The incumbent is dead, and the standing worker, if it starts, is waited for, at whatever share. False if it does
    /// not. If nothing comes of it, another one is started, at `back_off` at the earliest.
    pub(super) fn await_standby(&mut self, back_off: Moment, why: &str) -> bool {
        let Some((worker, _)) = self.standby.starting() else { return false };
        tracing::warn!(
            model = self.model.name,
            why,
            pid = self.pid(worker),
            "the worker died; the standing one serves when it is warm"
        );
        // From here on it is no spare: it starts like one that is to serve, and nobody calls it in.
        if let Some(process) = self.workers.get_mut(&worker) {
            process.serve();
        }
        self.note_standing(false);
        self.primary = Primary::AwaitingStandby { back_off, why: why.to_owned() };
        true
    }

    /// After anything that happened: the standing worker that a dead incumbent's model waits for serves when it is
    /// ready. It may have become the shadow of a hand-over, which serves as well.
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
