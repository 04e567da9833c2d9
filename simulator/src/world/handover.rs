//! A model's hand-overs: the other lane's life beside the one that serves.

use shadowslice_policy::latency::Predictor;
use shadowslice_policy::sharing::Change;
use shadowslice_shared::contention::Occupant;
use shadowslice_shared::units::Sms;

use super::model::Model;
use super::{Stage, Timer, timer};
use crate::time::{NEVER, at_ns, moment, ns};

/// What the lane is for that does not serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Other {
    /// There is none.
    Gone,
    /// A shadow at this share starts, loads and warms up. It takes nothing from others.
    Warming(Sms),
    /// So does one that is to stand ready at this share.
    Preparing(Sms),
    /// It was relieved, and finishes what it has.
    Draining,
    /// It was relieved, and stands ready to take over again.
    Parked,
}

impl Model<'_> {
    /// The share in force.
    pub(super) fn share(&self) -> Sms {
        self.lanes[self.serving].sms
    }

    /// The share that a hand-over under way brings, or has just brought.
    pub(super) fn coming(&self) -> Option<Sms> {
        match self.other {
            Other::Warming(sms) => Some(sms),
            Other::Draining => Some(self.share()),
            Other::Gone | Other::Preparing(_) | Other::Parked => None,
        }
    }

    /// The share of the worker that stands ready.
    pub(super) fn standing(&self) -> Option<Sms> {
        (self.other == Other::Parked).then(|| self.lanes[1 - self.serving].sms)
    }

    /// The share of the worker that starts, and will stand ready.
    pub(super) fn starting(&self) -> Option<Sms> {
        match self.other {
            Other::Preparing(sms) => Some(sms),
            Other::Gone | Other::Warming(_) | Other::Draining | Other::Parked => None,
        }
    }

    /// Whether more SMs may be had: inside the worker, from one that stands ready, or because the policy wants one to.
    pub(super) fn may_have_more(&self) -> bool {
        if self.inside.is_some() {
            return self.share() < self.served.terms.max;
        }
        let larger = [self.standing(), self.wanted].into_iter().flatten().any(|sms| sms > self.share());
        larger && self.coming().is_none()
    }

    /// The policy wants a worker to stand ready at this share, or none. One that was relieved there stays; another share's goes
    /// first, after its dwell time.
    pub(super) fn keep_ready(&mut self, wanted: Option<Sms>, now: u64, stage: &mut Stage<'_>) {
        self.wanted = wanted;
        let stands = self.served.standby && self.inside.is_none();
        self.standby = wanted.filter(|&sms| stands && sms != self.share());
        let due = timer(self.index, Timer::Dwell);
        match (self.other, self.standby) {
            (Other::Parked, wanted) if wanted == self.standing() => stage.timers.set(due, NEVER),
            (Other::Parked, _) if stage.timers.is_off(due) => {
                stage.timers.set(due, at_ns(moment(now) + stage.dwell));
            }
            (Other::Preparing(sms), wanted) if wanted != Some(sms) => {
                stage.timers.set(timer(self.index, Timer::Warm), NEVER);
                self.other = Other::Gone;
                self.prepare(now, stage);
            }
            (Other::Gone, _) => self.prepare(now, stage),
            (Other::Parked | Other::Preparing(_) | Other::Warming(_) | Other::Draining, _) => {}
        }
    }

    /// Starts the worker that is to stand ready.
    fn prepare(&mut self, now: u64, stage: &mut Stage<'_>) {
        if let Some(sms) = self.standby {
            self.other = Other::Preparing(sms);
            stage.timers.set(timer(self.index, Timer::Warm), self.warm_at(now));
        }
    }

    /// When a worker is warm that starts now.
    fn warm_at(&self, now: u64) -> u64 {
        let start = self.served.truth.start;
        now + ns(start.process) + ns(start.load) + ns(start.warm)
    }

    /// Begins a hand-over, `pressed` if between two intervals, unless one is under way. Like the supervisor it retires a parked worker first,
    /// if that is not the one to take over.
    pub(super) fn change(
        &mut self,
        change: &Change,
        gpu: Sms,
        pressed: bool,
        now: u64,
        stage: &mut Stage<'_>,
    ) {
        let to = Sms(change.to.0.clamp(Sms::STEP.min(gpu.0), gpu.0));
        if self.coming().is_some() || to == self.share() {
            return;
        }
        self.pressed = pressed;
        stage.timers.set(timer(self.index, Timer::Dwell), NEVER);
        if self.standing() == Some(to) {
            self.cut_over(now, stage);
            return;
        }
        let started = self.other == Other::Preparing(to);
        self.other = Other::Warming(to);
        if !started {
            stage.timers.set(timer(self.index, Timer::Warm), self.warm_at(now));
        }
    }

    /// The shadow is warm.
    pub(super) fn warmed(&mut self, now: u64, stage: &mut Stage<'_>) {
        stage.timers.set(timer(self.index, Timer::Warm), NEVER);
        let (Other::Warming(sms) | Other::Preparing(sms)) = self.other else { return };
        let lane = &mut self.lanes[1 - self.serving];
        lane.sms = sms;
        stage.gpus.grant(lane.seat, Occupant::anywhere(sms));
        match self.other {
            Other::Warming(_) => self.cut_over(now, stage),
            _ => self.other = Other::Parked,
        }
    }

    /// From the next batch on the other lane serves.
    fn cut_over(&mut self, now: u64, stage: &mut Stage<'_>) {
        self.serving = 1 - self.serving;
        let pressed = std::mem::take(&mut self.pressed);
        self.share_changed(pressed, now);
        self.other = Other::Draining;
        if self.lanes[1 - self.serving].is_empty() {
            self.drained(now, stage);
        }
        self.dispatch(now, stage);
    }

    /// Another share is in force.
    pub(super) fn share_changed(&mut self, pressed: bool, now: u64) {
        self.since = now;
        self.repartitions.push(now);
        if pressed {
            self.under_pressure.push(now);
        }
        self.observer.share_changed();
        self.predictor = Predictor::new(self.served.terms.profile.as_ref(), self.share());
    }

    /// The relieved lane has nothing left.
    pub(super) fn drained(&mut self, now: u64, stage: &mut Stage<'_>) {
        self.other = Other::Parked;
        let stays = self.standby.is_some() && self.standby == self.standing();
        let until = if stays { NEVER } else { at_ns(moment(now) + stage.dwell) };
        stage.timers.set(timer(self.index, Timer::Dwell), until);
    }

    /// The parked worker has stood for long enough.
    pub(super) fn retire(&mut self, now: u64, stage: &mut Stage<'_>) {
        stage.timers.set(timer(self.index, Timer::Dwell), NEVER);
        if self.other == Other::Parked {
            self.other = Other::Gone;
            self.prepare(now, stage);
        }
    }
}
