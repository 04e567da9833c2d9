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
            Other::Gone | Other::Parked => None,
        }
    }

    /// The share of the worker that stands ready.
    pub(super) fn standing(&self) -> Option<Sms> {
        (self.other == Other::Parked).then(|| self.lanes[1 - self.serving].sms)
    }

    /// When a worker is warm that starts now.
    fn warm_at(&self, now: u64) -> u64 {
        let start = self.served.truth.start;
        now + ns(start.process) + ns(start.load) + ns(start.warm)
    }

    /// Begins a hand-over, unless one is under way. Like the supervisor it retires a parked worker first, if that is not the one to take
    /// over.
    pub(super) fn change(&mut self, change: &Change, gpu: Sms, now: u64, stage: &mut Stage<'_>) {
        let to = Sms(change.to.0.clamp(Sms::STEP.min(gpu.0), gpu.0));
        if self.coming().is_some() || to == self.share() {
            return;
        }
        stage.timers.set(timer(self.index, Timer::Dwell), NEVER);
        if self.standing() == Some(to) {
            self.cut_over(now, stage);
            return;
        }
        self.other = Other::Warming(to);
        stage.timers.set(timer(self.index, Timer::Warm), self.warm_at(now));
    }

    /// The shadow is warm.
    pub(super) fn warmed(&mut self, now: u64, stage: &mut Stage<'_>) {
        stage.timers.set(timer(self.index, Timer::Warm), NEVER);
        let Other::Warming(sms) = self.other else { return };
        let lane = &mut self.lanes[1 - self.serving];
        lane.sms = sms;
        stage.gpus.grant(lane.seat, Occupant::anywhere(sms));
        self.cut_over(now, stage);
    }

    /// From the next batch on the other lane serves.
    fn cut_over(&mut self, now: u64, stage: &mut Stage<'_>) {
        self.serving = 1 - self.serving;
        self.share_changed(now);
        self.other = Other::Draining;
        if self.lanes[1 - self.serving].is_empty() {
            self.drained(now, stage);
        }
        self.dispatch(now, stage);
    }

    /// Another share is in force.
    pub(super) fn share_changed(&mut self, now: u64) {
        self.since = now;
        self.repartitions.push(now);
        self.observer.share_changed();
        self.predictor = Predictor::new(self.served.terms.profile.as_ref(), self.share());
    }

    /// The relieved lane has nothing left.
    pub(super) fn drained(&mut self, now: u64, stage: &mut Stage<'_>) {
        self.other = Other::Parked;
        stage.timers.set(timer(self.index, Timer::Dwell), at_ns(moment(now) + stage.dwell));
    }

    /// The parked worker has stood for long enough.
    pub(super) fn retire(&mut self, stage: &mut Stage<'_>) {
        stage.timers.set(timer(self.index, Timer::Dwell), NEVER);
        if self.other == Other::Parked {
            self.other = Other::Gone;
        }
    }
}
