//! The outcomes of changes of a share. They are counted and timed, and reported to the clients that
//! requested the changes.

use shadowslice_shared::rounding;
use std::collections::BTreeMap;
use std::time::Duration;

use shadowslice_policy::workers::{
    Cause, ChangeMechanism, ChangeReport, Failover, LifecycleReport, ResizeRefused, ResizeRequest,
};
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Percent, Sms, Timestamp, ms};
use tokio::sync::oneshot;

use super::changes::Changes;
use super::events::Controller;
use super::reported::{ChangeCause, ChangeOutcome, Mechanism};
use super::reports::{HandoverReport, Handovers, us};

/// The sender for the reply to an order for a new share.
pub(super) type ReplySender = oneshot::Sender<Result<HandoverReport, ResizeRefused>>;

/// The records of a model's changes of share.
#[derive(Debug, Default)]
pub(super) struct Records {
    pub(super) handovers: Handovers,
    pub(super) changes: Changes,
    effect: Option<Effect>,
    /// The senders for replies to unfinished orders, by the numbers of the orders.
    reply_txs: BTreeMap<u64, ReplySender>,
    /// The number of the last order.
    last_order: u64,
    /// The senders for clients that wait until no change is in progress.
    change_ended_txs: Vec<oneshot::Sender<()>>,
}

/// The wait for the first batch at a new share.
#[derive(Debug)]
struct Effect {
    worker: WorkerId,
    /// The cause of the change; `None` after a death.
    cause: Option<Cause>,
    decided: Timestamp,
    /// The time until the first batch. `None` before that batch.
    took: Option<Duration>,
    /// True if the last report describes this change.
    reported: bool,
}

impl Records {
    /// Registers an order that needs a reply. Returns the number of the order.
    pub(super) fn register_order(&mut self, reply_tx: ReplySender) -> u64 {
        self.last_order += 1;
        self.reply_txs.insert(self.last_order, reply_tx);
        self.last_order
    }

    pub(super) fn await_change(&mut self, done_tx: oneshot::Sender<()>) {
        self.change_ended_txs.push(done_tx);
    }

    pub(super) fn changes_ended(&mut self) {
        for done_tx in self.change_ended_txs.drain(..) {
            // If the receiver has given up, nothing waits for the message.
            done_tx.send(()).ok();
        }
    }

    fn reply(&mut self, request: &ResizeRequest, reply: Result<HandoverReport, ResizeRefused>) {
        if let Some(reply_tx) = request.number.and_then(|number| self.reply_txs.remove(&number)) {
            // If the receiver is gone, nothing waits for the reply.
            reply_tx.send(reply).ok();
        }
    }

    /// Starts to wait for the first batch of this worker, which shows that a change is in effect.
    pub(super) fn await_effect(&mut self, worker: WorkerId, request: Option<ResizeRequest>, now: Timestamp) {
        let decided = request.map_or(now, |request| request.decided);
        let cause = request.map(|request| request.cause);
        self.effect = Some(Effect { worker, cause, decided, took: None, reported: false });
    }

    /// Records the time of a worker's first batch.
    pub(super) fn record_effect(&mut self, worker: WorkerId, at: Timestamp) {
        let awaited = |effect: &&mut Effect| effect.worker == worker && effect.took.is_none();
        let Some(effect) = self.effect.as_mut().filter(awaited) else { return };
        let took = at.since(effect.decided);
        effect.took = Some(took);
        if let Some(cause) = effect.cause {
            self.changes.by_cause(cause).effect.add(took);
        }
        if let Some(last) = self.handovers.last.as_mut().filter(|_| effect.reported) {
            last.effect_ms = Some(ms(took));
        }
    }

    fn record_report(&mut self, report: HandoverReport) {
        if let Some(effect) = &mut self.effect {
            effect.reported = true;
        }
        self.handovers.last = Some(report);
    }
}

impl Controller {
    /// Records and logs a report of the state machine, and replies to the order that it concerns.
    pub(super) fn report(&mut self, report: LifecycleReport) {
        match report {
            LifecycleReport::Begun(request, shadow) => tracing::info!(
                model = self.model.name,
                from = %self.workers.share(),
                to = %request.share,
                pid = shadow.and_then(|shadow| self.pid(shadow)),
                "hand-over started"
            ),
            LifecycleReport::Completed(change) => self.completed(change),
            LifecycleReport::HandoverFailed { change, rolled_back, reason } => {
                let outcomes = self.records.changes.by_cause(change.request.cause);
                let (outcome, counts) = match rolled_back {
                    true => (
                        ChangeOutcome::RolledBack,
                        [&mut outcomes.rolled_back, &mut self.records.handovers.rolled_back],
                    ),
                    false => {
                        (ChangeOutcome::Aborted, [&mut outcomes.aborted, &mut self.records.handovers.aborted])
                    }
                };
                counts.into_iter().for_each(|count| *count += 1);
                tracing::warn!(
                    model = self.model.name,
                    outcome = outcome.to_string(),
                    cause = ChangeCause::from(change.request.cause).to_string(),
                    from = %change.from,
                    to = %change.request.share,
                    why = reason.to_string(),
                    "hand-over failed; the model keeps its previous share"
                );
                let report =
                    HandoverReport { outcome, why: Some(reason.to_string()), ..self.change_report(&change) };
                self.records.handovers.last = Some(report.clone());
                self.records.reply(&change.request, Ok(report));
            }
            LifecycleReport::Aborted(request, refused) => {
                tracing::warn!(
                    model = self.model.name,
                    to = %request.share,
                    why = refused.to_string(),
                    "the model's share did not change"
                );
                self.records.handovers.aborted += 1;
                self.records.changes.by_cause(request.cause).aborted += 1;
                self.records.reply(&request, Err(refused));
            }
            LifecycleReport::Refused(request, refused) => {
                if !matches!(refused, ResizeRefused::InForce { .. }) {
                    self.records.changes.by_cause(request.cause).refused += 1;
                }
                self.records.reply(&request, Err(refused));
            }
            LifecycleReport::FailedOver(failover) => self.failed_over(failover),
        }
    }

    fn completed(&mut self, change: ChangeReport) {
        let ChangeReport { request, mechanism, .. } = change;
        let mut report = self.change_report(&change);
        let handovers = &mut self.records.handovers;
        handovers.completed += 1;
        match mechanism {
            ChangeMechanism::InProcess => handovers.in_process += 1,
            ChangeMechanism::Shadow { at_once } => handovers.flips += u64::from(at_once),
            ChangeMechanism::Revive => {
                let effect = self.now().since(request.decided);
                report.effect_ms = Some(ms(effect));
                self.records.changes.by_cause(request.cause).effect.add(effect);
            }
        }
        tracing::info!(
            model = self.model.name,
            share = %request.share,
            mechanism = report.mechanism.to_string(),
            stall_ms = rounding::round(report.stall_us / 1e3),
            "share changed"
        );
        let changes = &mut self.records.changes;
        changes.by_cause(request.cause).completed += 1;
        changes.stall.add(Duration::from_secs_f64(report.stall_us / 1e6));
        self.records.record_report(report.clone());
        self.records.reply(&request, Ok(report));
    }

    fn failed_over(&mut self, Failover { worker, why, shares: (from, to), sms }: Failover) {
        let pid = self.pid(worker);
        tracing::warn!(
            model = self.model.name,
            why,
            from_share = %from,
            to_share = %to,
            standby_pid = pid,
            "the model's worker failed; its warm standby takes over"
        );
        self.records.handovers.failovers += 1;
        let report =
            HandoverReport { why: Some(why), ..self.report_of(ChangeOutcome::TakenOver, (from, to), sms) };
        self.records.record_report(report);
    }

    fn change_report(&self, ChangeReport { request, from, mechanism, sms }: &ChangeReport) -> HandoverReport {
        let (mechanism, at_once) = match *mechanism {
            ChangeMechanism::InProcess => (Mechanism::InProcess, true),
            ChangeMechanism::Shadow { at_once } => (Mechanism::Shadow, at_once),
            ChangeMechanism::Revive => (Mechanism::Restart, false),
        };
        let effect = match (mechanism, &self.records.effect) {
            (Mechanism::Shadow, Some(effect)) => effect.took.map(ms),
            _ => None,
        };
        HandoverReport {
            mechanism,
            cause: request.cause.into(),
            at_once,
            effect_ms: effect,
            ..self.report_of(ChangeOutcome::Completed, (*from, request.share), *sms)
        }
    }

    /// Creates a report with the stall since the change began. The cause is a death, unless the caller
    /// sets another cause.
    fn report_of(
        &self,
        outcome: ChangeOutcome,
        (from, to): (Percent, Percent),
        sms: (Sms, Sms),
    ) -> HandoverReport {
        let stall = self.pipeline.stall();
        HandoverReport {
            outcome,
            mechanism: Mechanism::of(&self.workers),
            cause: ChangeCause::Death,
            at_once: true,
            why: None,
            from_percent: from.get(),
            to_percent: to.get(),
            from_sms: sms.0.0,
            to_sms: sms.1.0,
            effect_ms: None,
            stall_us: us(stall.longest),
            stall_total_us: us(stall.total),
        }
    }
}
