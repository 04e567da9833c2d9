//! What became of a change of share: in force or not, how soon, and whether it helped the model.

use std::time::Duration;

use shadowslice_policy::handover::{Outcome, Reason};
use shadowslice_shared::units::{Moment, Percent};

use super::changes::Cause;
use super::events::Controller;
use super::reports::{HandoverReport, ms, us};
use super::resize::{Reply, ResizeRequest};
use shadowslice_shared::ids::WorkerId;

/// The wait for the first batch at a new share.
#[derive(Debug)]
pub(super) struct Effect {
    worker: WorkerId,
    /// The cause of the change; `None` after a death.
    cause: Option<Cause>,
    decided: Moment,
    took: Option<Duration>,
    /// Whether the last report is about it.
    reported: bool,
}

/// How often, and for how long after a change, to look whether a model keeps its SLO again.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const LOOK_FOR: Duration = Duration::from_secs(60);

/// The wait until the objective is kept again after the last change.
#[derive(Debug)]
pub(super) struct Settling {
    cause: Cause,
    look: Moment,
    until: Moment,
}

impl Settling {
    pub(super) fn due(&self) -> Moment {
        self.look
    }
}

impl Effect {
    /// Not there yet.
    pub(super) fn awaited(worker: WorkerId, wanted: &ResizeRequest) -> Self {
        let (cause, decided) = (Some(wanted.cause), wanted.decided);
        Self { worker, cause, decided, took: None, reported: false }
    }

    /// After a death.
    pub(super) fn of_relief(worker: WorkerId, now: Moment) -> Self {
        Self { worker, cause: None, decided: now, took: None, reported: false }
    }
}

impl Controller {
    pub(super) fn complete(&mut self) {
        let Some(swap) = &mut self.swap else { return };
        let ResizeRequest { share: to, cause, .. } = swap.wanted;
        let (onset, reply) = (swap.wanted.onset, swap.wanted.reply.take());
        self.handovers.flips += u64::from(swap.at_once);
        let report = self.report("completed", None);
        self.share_is(to);
        self.changes.completed(cause, &report);
        self.handovers.completed += 1;
        tracing::info!(model = self.model.name, share = %to, stall_us = report.stall_us, "hand-over completed");
        self.reported(report.clone());
        self.begin_settling(cause, onset);
        answer(reply, report);
    }

    /// A worker at a new share serves, and this is how that went.
    pub(super) fn reported(&mut self, report: HandoverReport) {
        if let Some(effect) = &mut self.effect {
            effect.reported = true;
        }
        self.settling = None;
        self.handovers.last = Some(report);
    }

    pub(super) fn finish(&mut self, outcome: Outcome) {
        let cause = self.swap.as_ref().map(|swap| swap.wanted.cause);
        let outcomes = cause.map(|cause| self.changes.of(cause));
        match outcome {
            Outcome::Kept => {}
            Outcome::RolledBack(reason) => {
                self.handovers.rolled_back += 1;
                // The shadow that failed had served, so its end counts as a death.
                self.all_deaths += 1;
                if let Some(outcomes) = outcomes {
                    outcomes.rolled_back += 1;
                }
                self.not_kept("rolled back", &reason);
            }
            Outcome::Aborted(reason) => {
                self.handovers.aborted += 1;
                if let Some(outcomes) = outcomes {
                    outcomes.aborted += 1;
                }
                self.not_kept("aborted", &reason);
                self.share_is(self.share);
            }
        }
        self.swap = None;
    }

    fn not_kept(&mut self, outcome: &str, reason: &Reason) {
        let report = self.report(outcome, Some(reason.to_string()));
        tracing::warn!(model = self.model.name, outcome, cause = report.cause, %reason, "hand-over failed");
        self.settling = None;
        self.handovers.last = Some(report.clone());
        let reply = self.swap.as_mut().and_then(|swap| swap.wanted.reply.take());
        answer(reply, report);
    }

    fn report(&self, outcome: &str, why: Option<String>) -> HandoverReport {
        let Some(swap) = &self.swap else { return self.report_of(outcome, why, (self.share, self.share)) };
        // A model with partitions also gets another process, for a fault or a new version.
        let mechanism = if self.in_process().is_some() { "shadow" } else { self.mechanism_name().0 };
        HandoverReport {
            mechanism: mechanism.to_owned(),
            cause: swap.wanted.cause.name().to_owned(),
            at_once: swap.at_once,
            ..self.report_of(outcome, why, (swap.from, swap.wanted.share))
        }
    }

    /// How a change to a share went that is in force.
    pub(super) fn report_of_change(&self, wanted: &ResizeRequest, from: Percent) -> HandoverReport {
        HandoverReport {
            cause: wanted.cause.name().to_owned(),
            effect_ms: None,
            ..self.report_of("completed", None, (from, wanted.share))
        }
    }

    /// How a change went, with the stall measured since it began. The cause is a death unless the
    /// caller sets another.
    pub(super) fn report_of(
        &self,
        outcome: &str,
        why: Option<String>,
        (from, to): (Percent, Percent),
    ) -> HandoverReport {
        let stall = self.pipeline.stall();
        HandoverReport {
            outcome: outcome.to_owned(),
            mechanism: self.mechanism_name().0.to_owned(),
            cause: "death".to_owned(),
            at_once: true,
            why,
            from_percent: from.get(),
            to_percent: to.get(),
            from_sms: self.sms(from).0,
            to_sms: self.sms(to).0,
            settle_ms: None,
            effect_ms: self.effect.as_ref().and_then(|effect| effect.took).map(ms),
            stall_us: us(stall.longest),
            stall_total_us: us(stall.total),
        }
    }

    /// The first batch at the new share is done.
    pub(super) fn note_effect(&mut self, worker: WorkerId, at: Moment) {
        let Some(effect) =
            self.effect.as_mut().filter(|effect| effect.worker == worker && effect.took.is_none())
        else {
            return;
        };
        let took = at.since(effect.decided);
        effect.took = Some(took);
        if let Some(cause) = effect.cause {
            self.changes.of(cause).effect.record(took);
        }
        if let Some(last) = self.handovers.last.as_mut().filter(|_| effect.reported) {
            last.effect_ms = Some(ms(took));
        }
    }

    /// A share came into force. If a change of the load was the reason, watches whether it is
    /// enough.
    pub(super) fn begin_settling(&mut self, cause: Cause, onset: Option<Moment>) {
        let Some(onset) = onset else { return };
        self.pipeline.begin_settling(onset);
        self.settling = Some(Settling { cause, look: self.after(LOOK_EVERY), until: self.after(LOOK_FOR) });
    }

    pub(super) fn settling_on_time(&mut self, now: Moment) {
        let Some(settling) = self.settling.as_mut().filter(|settling| settling.look <= now) else { return };
        settling.look = now + LOOK_EVERY;
        let (cause, over) = (settling.cause, now >= settling.until);
        let took = self.pipeline.settled();
        if let Some(took) = took {
            self.changes.of(cause).settle.record(took);
            if let Some(last) = &mut self.handovers.last {
                last.settle_ms = Some(ms(took));
            }
        }
        if took.is_some() || over {
            self.settling = None;
        }
    }
}

/// Answers an order, if its receiver is still there.
fn answer(reply: Option<Reply>, report: HandoverReport) {
    if let Some(reply) = reply {
        reply.send(Ok(report)).ok();
    }
}
