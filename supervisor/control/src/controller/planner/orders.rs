//! The planner's orders to one controller. At most one order is pending, and a backoff follows a failure.

use shadowslice_shared::rounding;
use std::time::Duration;

use shadowslice_policy::backoff::Backoff;
use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::{Percent, Timestamp};
use tokio::sync::{mpsc, oneshot};

use super::super::reports::ModelReport;
use super::super::{HandoverReport, ResizeRefused};
use super::{Cause, Order};

/// The time without orders after the first failure.
const INITIAL_BACKOFF: Duration = Duration::from_secs(1);
/// The longest time without orders after a failure. A failure is forgotten after the same time.
const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// The reply to an order.
type OrderReply = Result<HandoverReport, ResizeRefused>;

/// The orders to one controller.
#[derive(Debug, Default)]
pub(super) struct Orders {
    /// The share of the pending order, and the receiver for its reply.
    pending: Option<(Percent, oneshot::Receiver<OrderReply>)>,
    failed: Option<FailedOrder>,
    /// The reason for the last order.
    reason: Option<String>,
    /// The groups in the last order.
    groups: Option<Groups>,
    /// True if the model has answered wrongly with another share.
    wrong: bool,
    /// The number of the policy's changes that were rolled back.
    rolled_back: u64,
}

/// A failed order.
#[derive(Debug)]
struct FailedOrder {
    /// The time of the next attempt.
    until: Timestamp,
    backoff: Backoff,
    why: String,
}

impl Orders {
    /// Returns the share of the pending order.
    pub(super) fn pending_share(&self) -> Option<Percent> {
        self.pending.as_ref().map(|(share, _)| *share)
    }

    /// Returns true if the share must not change, because answers were wrong with another share.
    pub(super) fn answers_were_wrong(&self) -> bool {
        self.wrong
    }

    pub(super) fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }

    /// Returns true if the last order contained these groups. The model may not be able to have them.
    pub(super) fn last_had(&self, groups: Option<Groups>) -> bool {
        self.groups == groups
    }

    /// Evaluates the reply to the pending order, and the model's report.
    pub(super) fn update(&mut self, model: &str, report: &ModelReport, now: Timestamp) {
        // Only the policy's own changes count, and not the failure of an operator's order.
        let rolled_back = report.changes.by_policy.rolled_back;
        let has_rolled_back = rolled_back > self.rolled_back;
        self.rolled_back = rolled_back;
        let reply = self.pending.as_mut().map(|(_, reply_rx)| reply_rx.try_recv());
        if !matches!(reply, Some(Err(oneshot::error::TryRecvError::Empty))) {
            self.pending = None;
        }
        self.wrong |= matches!(reply, Some(Ok(Err(ResizeRefused::Wrong { .. }))));
        let why = match reply {
            Some(Ok(Ok(report))) => report.why,
            // The share is already in force, or an operator holds it now.
            Some(Ok(Err(ResizeRefused::InForce { .. } | ResizeRefused::Held(_)))) => None,
            Some(Ok(Err(refused))) => Some(refused.to_string()),
            // The order is still pending, or the controller has ended.
            Some(Err(_)) | None => None,
        };
        let why = why.or(has_rolled_back.then(|| "the new worker failed during its probation".to_owned()));
        if let Some(why) = why {
            self.fail(model, why, now);
        }
    }

    fn fail(&mut self, model: &str, why: String, now: Timestamp) {
        let recent = self.failed.as_ref().filter(|failed| now.since(failed.until) < MAX_BACKOFF);
        let mut backoff = recent.map_or(Backoff::new(INITIAL_BACKOFF, MAX_BACKOFF), |failed| failed.backoff);
        let pause = backoff.record_failure();
        tracing::warn!(
            model,
            why,
            pause_ms = rounding::ms(pause),
            "the policy's change of the model's share failed; the policy can change the share again after the pause"
        );
        self.failed = Some(FailedOrder { until: now + pause, backoff, why });
    }

    /// Sends an order.
    ///
    /// # Errors
    ///
    /// Returns the reason why no order can be sent now.
    pub(super) fn send(
        &mut self,
        orders_tx: &mpsc::Sender<Order>,
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
        if self.pending.is_some() {
            return Err("a share change is in progress".to_owned());
        }
        let (reply, reply_rx) = oneshot::channel();
        let order = Order::Resize { share, groups, cause: Cause::Policy, hold: false, reply };
        orders_tx
            .try_send(order)
            .map_err(|_| "too many orders are queued for the model; the policy tries again".to_owned())?;
        self.pending = Some((share, reply_rx));
        self.groups = groups;
        self.reason = Some(reason.to_owned());
        Ok(())
    }
}
