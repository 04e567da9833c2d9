//! The change of the current instance's share that a desired state requires.

use shadowslice_policy::reconcile::ShareProgress;
use tokio::sync::oneshot;

use super::desired::DesiredModel;
use crate::controller::{HandoverReport, ModelReport, ResizeRefused};

#[derive(Debug)]
pub(super) enum ShareRequest {
    /// No change has been requested.
    Idle,
    /// The controller has the request.
    Requested(oneshot::Receiver<Result<HandoverReport, ResizeRefused>>),
    /// Another change is in progress, or the model's worker starts. The request is repeated when the
    /// model's report changes.
    Busy,
    /// The share is in force.
    Reached,
}

impl ShareRequest {
    pub(super) fn progress(&self, report: &ModelReport, desired: &DesiredModel) -> ShareProgress {
        match self {
            Self::Idle => {
                // A share that a change in progress will bring into force counts as in force. The share
                // that is in force until then must still be within the bounds, as the change may fail.
                let coming = report.coming.unwrap_or(report.share);
                let bounds = desired.spec.model.share;
                let fits = (bounds.min..=bounds.max).contains(&report.share);
                if fits && desired.share_instead_of(coming) == coming {
                    ShareProgress::Reached
                } else {
                    ShareProgress::Differs
                }
            }
            Self::Requested(_) | Self::Busy => ShareProgress::Changing,
            Self::Reached => ShareProgress::Reached,
        }
    }

    pub(super) fn retry(&mut self) {
        if matches!(self, Self::Busy) {
            *self = Self::Idle;
        }
    }

    /// Waits for the controller's answer. Without a request, waits forever.
    ///
    /// # Errors
    ///
    /// Returns the reason why the share is not in force.
    pub(super) async fn outcome(&mut self) -> Result<Self, String> {
        let Self::Requested(outcome) = self else { return std::future::pending().await };
        match outcome.await {
            Ok(Ok(report)) => report.why.map_or(Ok(Self::Reached), Err),
            Ok(Err(ResizeRefused::InForce { .. })) => Ok(Self::Reached),
            Ok(Err(ResizeRefused::Busy(_) | ResizeRefused::NotServing { .. })) => Ok(Self::Busy),
            Ok(Err(refused)) => Err(refused.to_string()),
            Err(_) => Err(ResizeRefused::Stopping.to_string()),
        }
    }
}
