//! Orders to change a share: refused, done by a hand-over, or done by a restart.

use shadowslice_shared::boot::Purpose;
use shadowslice_shared::units::{Moment, Percent};
use tokio::sync::oneshot;

use super::ResizeRefused;
use super::changes::Cause;
use super::events::Controller;
use super::in_process::InProcess;
use super::primary::Primary;
use super::reports::{HandoverReport, ms};
use super::swap::Swap;
use shadowslice_config::HandoverMode;
use shadowslice_policy::handover::{Fact, PhaseName};
use shadowslice_shared::ids::WorkerId;

/// Where an order's answer goes.
pub(super) type Reply = oneshot::Sender<Result<HandoverReport, ResizeRefused>>;

/// A share that was asked for.
#[derive(Debug)]
pub(super) struct ResizeRequest {
    pub(super) share: Percent,
    pub(super) cause: Cause,
    /// When the load changed, if the order answers a change of the load.
    pub(super) onset: Option<Moment>,
    pub(super) decided: Moment,
    /// `None` once answered.
    pub(super) reply: Option<Reply>,
}

impl ResizeRequest {
    /// Another worker is to serve at the share that the model has.
    pub(super) fn again(share: Percent, now: Moment) -> Self {
        Self { share, cause: Cause::Worker, onset: None, decided: now, reply: None }
    }
}

/// A change of share without a shadow: the old worker leaves before the new one boots.
#[derive(Debug)]
pub(super) struct Replacing {
    from: Percent,
    wanted: ResizeRequest,
    /// Whether a worker served until then, at the old share.
    served: bool,
}

impl Controller {
    pub(super) fn resize(&mut self, wanted: ResizeRequest, hold: bool) {
        let refusal = self.refusal(&wanted);
        let as_asked = matches!(refusal, None | Some(ResizeRefused::InForce { .. }));
        // A share that an operator set is held until its release.
        self.held |= as_asked && hold && self.context.policy_acts;
        match refusal {
            Some(refused) => self.refuse(wanted, refused),
            None => self.change_share(wanted),
        }
    }

    /// The share that is to come, if a change is under way or waits.
    pub(super) fn coming(&self) -> Option<Percent> {
        let replacing = self.replacing.as_ref().map(|replacing| replacing.wanted.share);
        let next = self.next.as_ref().map(|wanted| wanted.share);
        let next = next.or(self.in_process().and_then(InProcess::coming));
        next.or(replacing).or(self.swap.as_ref().and_then(Swap::coming))
    }

    /// Why this share cannot be had now, if it cannot.
    fn refusal(&self, wanted: &ResizeRequest) -> Option<ResizeRefused> {
        let share = wanted.share;
        if self.stopping.is_some() {
            return Some(ResizeRefused::Stopping);
        }
        let model = || self.model.name.clone();
        if self.held && wanted.cause != Cause::Hand {
            return Some(ResizeRefused::Held(model()));
        }
        let bounds = &self.model.share;
        if !(bounds.min..=bounds.max).contains(&share) {
            let (min, max) = (bounds.min, bounds.max);
            return Some(ResizeRefused::OutOfBounds { model: model(), share, min, max });
        }
        let down = matches!(self.primary, Primary::Down { .. });
        // `handover: never` forbids only another share; a revival at the old share is none.
        let revival = down && self.sms(share) == self.sms(self.share);
        if self.model.handover == HandoverMode::Never && !revival {
            return Some(ResizeRefused::Never(model()));
        }
        let phase = self.swap.as_ref().map(|swap| swap.machine.phase());
        let settled = matches!(phase, None | Some(PhaseName::Probation | PhaseName::Retiring));
        let inside = self.in_process().is_some_and(|inside| inside.coming().is_some());
        if !settled || inside || self.next.is_some() || self.replacing.is_some() {
            return Some(ResizeRefused::Busy(model()));
        }
        if !self.reference_written {
            let why = match &self.primary {
                Primary::Down { why } => why.clone(),
                _ => "it is being loaded".to_owned(),
            };
            return Some(ResizeRefused::NotServing { model: model(), why });
        }
        let serves = matches!(self.primary, Primary::Serving { .. });
        if self.model.handover == HandoverMode::Restart && !serves && !down {
            let why = "its worker is being restarted; ask again when it serves".to_owned();
            return Some(ResizeRefused::NotServing { model: model(), why });
        }
        if self.is_wrong_at(share) {
            return Some(ResizeRefused::Wrong { model: model(), share });
        }
        if self.sms(share) == self.sms(self.share) && !down {
            return Some(ResizeRefused::InForce { share, sms: self.sms(share).0 });
        }
        None
    }

    fn change_share(&mut self, wanted: ResizeRequest) {
        let Err(wanted) = self.repartition(wanted) else { return };
        let Err(wanted) = self.switch_to_standing(wanted) else { return };
        let Err(wanted) = self.hand_over_to_starting(wanted) else { return };
        if self.swap.is_some() {
            self.next = Some(wanted);
            self.feed(Fact::Reclaim);
            return;
        }
        match (&self.primary, self.model.handover) {
            (Primary::Serving { worker }, HandoverMode::Restart) => self.replace(*worker, wanted),
            (Primary::Down { .. }, _) => self.revive(wanted),
            _ => self.begin_swap(wanted),
        }
    }

    /// After a hand-over has ended: carries out the order that came meanwhile.
    pub(super) fn resize_next(&mut self) {
        let Some(wanted) = self.next.take() else { return };
        match self.refusal(&wanted) {
            Some(refused) => self.refuse(wanted, refused),
            None => self.change_share(wanted),
        }
    }

    /// Answers all orders that wait for a share.
    pub(super) fn refuse_all(&mut self, refused: &ResizeRefused) {
        let replacing = self.replacing.take().map(|replacing| replacing.wanted);
        for wanted in [self.next.take(), replacing].into_iter().flatten() {
            self.refuse(wanted, refused.clone());
        }
        self.repartition_failed(refused);
        // Dropping the hand-over closes the channel of its order, which is an answer, too.
        self.swap = None;
    }

    /// `handover: restart`: the worker finishes what it has and leaves; requests wait meanwhile.
    fn replace(&mut self, worker: WorkerId, wanted: ResizeRequest) {
        let (from, to) = (self.share, wanted.share);
        self.pipeline.begin_stall();
        self.replacing = Some(Replacing { from, wanted, served: true });
        let deadline = self.after(self.context.timeouts.drain);
        self.primary = Primary::Leaving { worker, deadline, told: false, to };
        self.pipeline.route(None);
        self.pipeline.drain(worker);
    }

    pub(super) fn leaver_drained(&mut self, drained: WorkerId) {
        if matches!(self.primary, Primary::Leaving { worker, told: false, .. } if worker == drained) {
            self.tell_leaver();
        }
    }

    /// Tells the worker that makes room to end, and when it will be killed if it does not.
    pub(super) fn tell_leaver(&mut self) {
        let by = self.after(self.context.timeouts.stop);
        let Primary::Leaving { worker, deadline, told, .. } = &mut self.primary else { return };
        (*deadline, *told) = (by, true);
        if let Some(process) = self.workers.get_mut(worker) {
            process.stop();
        }
    }

    /// A model that had given up is tried again, at the share asked for.
    fn revive(&mut self, wanted: ResizeRequest) {
        self.restarts.reset();
        let from = self.share;
        self.share_is(wanted.share);
        self.pipeline.begin_stall();
        self.replacing = Some(Replacing { from, wanted, served: false });
        self.boot(Purpose::Serve);
    }

    /// The worker at the new share serves.
    pub(super) fn replaced(&mut self) {
        let Some(Replacing { from, mut wanted, .. }) = self.replacing.take() else { return };
        let effect = self.now().since(wanted.decided);
        let report = HandoverReport {
            at_once: false,
            effect_ms: Some(ms(effect)),
            ..self.report_of_change(&wanted, from)
        };
        self.handovers.completed += 1;
        self.changes.completed(wanted.cause, &report);
        self.changes.of(wanted.cause).effect.record(effect);
        self.reported(report.clone());
        self.begin_settling(wanted.cause, wanted.onset);
        if let Some(reply) = wanted.reply.take() {
            reply.send(Ok(report)).ok();
        }
    }

    /// No worker at the new share started: the model returns to the share at which one served.
    /// False if none had served.
    pub(super) fn go_back(&mut self, why: &str) -> bool {
        let Some(Replacing { from, wanted, .. }) = self.replacing.take_if(|replacing| replacing.served)
        else {
            return false;
        };
        tracing::error!(model = self.model.name, share = %wanted.share, back = %from, why, "no worker at this share");
        self.aborted(wanted, ResizeRefused::NoWorker { model: self.model.name.clone(), why: why.to_owned() });
        self.share_is(from);
        self.restarts.reset();
        self.boot(Purpose::Serve);
        true
    }

    /// No worker at the new share will serve.
    pub(super) fn replacing_failed(&mut self, why: &str) {
        if let Some(Replacing { wanted, .. }) = self.replacing.take() {
            let why = why.to_owned();
            self.aborted(wanted, ResizeRefused::NotServing { model: self.model.name.clone(), why });
        }
    }

    pub(super) fn aborted(&mut self, wanted: ResizeRequest, refused: ResizeRefused) {
        self.handovers.aborted += 1;
        self.changes.of(wanted.cause).aborted += 1;
        answer(wanted, refused);
    }

    fn refuse(&mut self, wanted: ResizeRequest, refused: ResizeRefused) {
        if !matches!(refused, ResizeRefused::InForce { .. }) {
            self.changes.of(wanted.cause).refused += 1;
        }
        answer(wanted, refused);
    }
}

fn answer(wanted: ResizeRequest, refused: ResizeRefused) {
    if let Some(reply) = wanted.reply {
        // The receiver may be gone.
        reply.send(Err(refused)).ok();
    }
}
