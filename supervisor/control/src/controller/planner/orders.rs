//! The planner's orders to one controller: one at a time, with a pause after a failure.

use shadowslice_shared::rounding;
use std::time::Duration;

use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::{Percent, Timestamp};
use tokio::sync::{mpsc, oneshot};

use super::super::reports::ModelReport;
use super::super::{HandoverReport, ResizeRefused};
use super::{Cause, Order};

/// How long a model is left alone after its first failure, and at most. It doubles with each.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

type Outcome = Result<HandoverReport, ResizeRefused>;

#[derive(Debug, Default)]
pub(super) struct Orders {
    under_way: Option<(Percent, oneshot::Receiver<Outcome>)>,
    failed: Option<Failed>,
    /// What the last order was given for.
    reason: Option<String>,
    /// The groups that it named.
    groups: Option<Groups>,
    /// Whether another share is known to make its answers wrong.
    wrong: bool,
    rolled_back: u64,
}

#[derive(Debug)]
struct Failed {
    until: Timestamp,
    pause: Duration,
    why: String,
}

impl Orders {
    pub(super) fn coming(&self) -> Option<Percent> {
        self.under_way.as_ref().map(|(share, _)| *share)
    }

    /// Whether the model's share is to be left alone, as answers were wrong with another one.
    pub(super) fn are_vain(&self) -> bool {
        self.wrong
    }

    pub(super) fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }

    /// Whether the last order named these groups: whether the model can have them is not known.
    pub(super) fn named(&self, groups: Option<Groups>) -> bool {
        self.groups == groups
    }

    pub(super) fn hear(&mut self, model: &str, report: &ModelReport, now: Timestamp) {
        // Only the policy's own changes count: a failure of an operator's order is not the
        // policy's.
        let rolled_back = report.changes.by_policy.rolled_back;
        let taken_back = rolled_back > self.rolled_back;
        self.rolled_back = rolled_back;
        let said = self.under_way.as_mut().map(|(_, outcome)| outcome.try_recv());
        if !matches!(said, Some(Err(oneshot::error::TryRecvError::Empty))) {
            self.under_way = None;
        }
        self.wrong |= matches!(said, Some(Ok(Err(ResizeRefused::Wrong { .. }))));
        let why = match said {
            Some(Ok(Ok(report))) => report.why,
            // The share is in force already, or an operator holds it now.
            Some(Ok(Err(ResizeRefused::InForce { .. } | ResizeRefused::Held(_)))) => None,
            Some(Ok(Err(refused))) => Some(refused.to_string()),
            // Under way still, or the controller ended.
            Some(Err(_)) | None => None,
        };
        let why = why.or(taken_back.then(|| "the new worker failed during its probation".to_owned()));
        if let Some(why) = why {
            self.fail(model, why, now);
        }
    }

    fn fail(&mut self, model: &str, why: String, now: Timestamp) {
        let recent = self.failed.as_ref().filter(|failed| now.since(failed.until) < LONGEST_PAUSE);
        let pause = recent.map_or(FIRST_PAUSE, |failed| (failed.pause * 2).min(LONGEST_PAUSE));
        tracing::warn!(
            model,
            why,
            pause_ms = rounding::ms(pause),
            "the policy's change of the model's share failed; the policy can change the share again after the pause"
        );
        self.failed = Some(Failed { until: now + pause, pause, why });
    }

    pub(super) fn send(
        &mut self,
        to: &mpsc::Sender<Order>,
        share: Percent,
        groups: Option<Groups>,
        reason: &str,
        now: Timestamp,
    ) -> Result<(), String> {
        if let Some(failed) = self.failed.as_ref().filter(|failed| failed.until > now) {
            let seconds = failed.until.since(now).as_secs_f64();
            return Err(format!(
                "the last share change failed ({}); next attempt in {seconds:.0} s",
                failed.why
            ));
        }
        if self.under_way.is_some() {
            return Err("a share change is in progress".to_owned());
        }
        let (reply, outcome) = oneshot::channel();
        let order = Order::Resize { share, groups, cause: Cause::Policy, hold: false, reply };
        to.try_send(order)
            .map_err(|_| "too many orders are queued for the model; the policy tries again".to_owned())?;
        self.under_way = Some((share, outcome));
        self.groups = groups;
        self.reason = Some(reason.to_owned());
        Ok(())
    }
}
