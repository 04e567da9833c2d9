//! The policy's decisions, for `shadowslice plan`.

use std::sync::Arc;
use std::time::Duration;

use shadowslice_config::ModelConfig;
use shadowslice_datapath::pipeline::TrafficWindow;
use shadowslice_policy::sharing::{AdmissionPolicy, LayoutReport, ModelSnapshot, Verdict, VerdictReason};
use shadowslice_shared::units::{Percent, Sms};

use super::super::{ModelReport, ReportedVerdict};

/// The policy's decision about one model.
#[derive(Debug, Clone)]
pub struct ModelDecision {
    pub model: Arc<ModelConfig>,
    /// The report of the model's controller at the decision.
    pub report: ModelReport,
    pub snapshot: ModelSnapshot,
    pub verdict: Explained,
    pub admission: AdmissionPolicy,
    /// The share that the verdict wants.
    pub wanted: Percent,
    pub wanted_sms: Sms,
    /// The reason why a wanted change is not ordered.
    pub not_ordered: Option<NotOrdered>,
    /// The verdict of the policy's last order. `None` before its first order.
    pub last_order: Option<Explained>,
    /// The traffic of the last ten seconds.
    pub recent: TrafficWindow,
}

/// A verdict, with the name of the model for which a layout is tried or was chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct Explained {
    pub verdict: Verdict,
    pub beneficiary: Option<String>,
}

/// The reason why the planner does not order a change that the policy wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotOrdered {
    /// `controller.act` is false.
    NotActing,
    NotReady,
    /// The share is the nearest one that the model's bounds and the GPU allow.
    Nearest(Percent),
    /// The last order failed for this reason.
    Backoff {
        why: String,
        left: Duration,
    },
    /// The last order has no reply yet.
    Pending,
    /// The controller's queue of orders is full.
    Full,
}

impl Explained {
    /// Adds the name of the beneficiary, from the names of all models.
    pub(super) fn of(verdict: &Verdict, names: &[String]) -> Self {
        let mut explained = Self { verdict: verdict.clone(), beneficiary: None };
        explained.beneficiary = explained.layout().and_then(|layout| names.get(layout.beneficiary).cloned());
        explained
    }

    /// Returns the layout that is being tried or was chosen.
    pub(super) fn layout(&self) -> Option<&LayoutReport> {
        match &self.verdict.why {
            VerdictReason::Layout(layout) => Some(layout),
            _ => None,
        }
    }

    pub fn kind(&self) -> ReportedVerdict {
        match &self.verdict {
            Verdict { blocked_by: Some(_), .. } => ReportedVerdict::Wait,
            Verdict { from, to, .. } if from < to => ReportedVerdict::Grow,
            Verdict { from, to, .. } if from > to => ReportedVerdict::Shrink,
            Verdict { .. } => ReportedVerdict::Keep,
        }
    }
}
