//! The decision of a sharing policy.

use std::time::Duration;

use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::Sms;

use super::Pattern;

/// The decision of a sharing policy. A policy with state, such as `adaptive`, may decide differently
/// for the same input.
#[derive(Debug, Clone, PartialEq, Default)]
#[must_use = "a decision that is not carried out has changed nothing"]
pub struct Decision {
    /// The changes in the order in which they should be applied. Shares that shrink come first. The
    /// caller is allowed to skip a change, but must make no other changes.
    pub changes: Vec<ShareChange>,
    /// The admission limits of each model, in the order of the models.
    pub admissions: Vec<AdmissionPolicy>,
    /// The verdict on each model, in the order of the models.
    pub report: Vec<Verdict>,
}

/// A change of a model's share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShareChange {
    /// The index of the model.
    pub model: usize,
    /// The current share, in SMs.
    pub from: Sms,
    /// The new share, in SMs.
    pub to: Sms,
    /// The new groups of the model, if its share is a partition and the policy chooses them.
    pub groups: Option<Groups>,
    /// True if a worker with the new share is ready to take over immediately.
    pub at_once: bool,
}

/// The admission limits of a model, and whether its batches pause for others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdmissionPolicy {
    /// The maximum batch size, in rows.
    pub max_batch: u32,
    /// True if the model refuses requests that cannot be answered in time.
    pub refuse_late: bool,
    /// True if batches [pause](crate::pauses) for batches of other models.
    pub pause: bool,
}

impl AdmissionPolicy {
    /// Returns limits under which no late request is refused and no batch pauses.
    pub const fn accept_all(max_batch: u32) -> Self {
        Self { max_batch, refuse_late: false, pause: false }
    }
}

/// The decision about one model's share, with its reason.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// The current share, in SMs.
    pub from: Sms,
    /// The target share in SMs. It equals `from` if the share should not change.
    pub to: Sms,
    /// The reason why the share cannot change now. This is `None` if the share should not change, or if
    /// it changes now.
    pub blocked_by: Option<Blocker>,
    /// The reason for the decision.
    pub why: VerdictReason,
}

impl Verdict {
    /// Returns true if the share changes now.
    pub fn changes(&self) -> bool {
        self.from != self.to && self.blocked_by.is_none()
    }
}

/// The reason why a share cannot change now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blocker {
    /// Another change is in progress.
    Handover,
    /// The share is held.
    Held,
}

/// The reason for a verdict.
#[derive(Debug, Clone, PartialEq)]
pub enum VerdictReason {
    /// The policy always divides the GPU in this way, and gives no further reason.
    PolicyShare,
    /// The model meets its SLO.
    Met(MissRate),
    /// The model violates its SLO. Late requests are refused first. If that is not enough, the policy
    /// tries layouts.
    Violating(MissRate),
    /// A layout is being tried, or was chosen.
    Layout(LayoutReport),
    /// The model could not meet its SLO even if it ran alone on the GPU.
    Infeasible {
        /// The model's miss rate.
        missed: MissRate,
        /// The time of two batches of one row, alone on the whole GPU.
        two_batches: Duration,
    },
    /// The model violates its SLO, but the execution time of its batches is not the cause.
    NotBatchTime {
        /// The model's miss rate.
        missed: MissRate,
        /// The time of two of the model's longest batches in the last second.
        two_batches: Duration,
    },
}

/// The layout of a model's GPU, and how the policy chose it.
#[derive(Debug, Clone, PartialEq)]
pub struct LayoutReport {
    /// The stage of the trial.
    pub stage: LayoutStage,
    /// The pattern of the layout.
    pub pattern: Pattern,
    /// The index of the model whose SLO violation started the trial.
    pub beneficiary: usize,
    /// The miss rate of the model that the report is about.
    pub missed: MissRate,
    /// The results of the layouts that were tried.
    pub tried: Vec<LayoutResult>,
}

/// The stage of a trial of layouts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayoutStage {
    /// Layouts are being tried.
    Trying,
    /// The layout was chosen, because it had the fewest misses.
    Chosen,
}

/// The misses under a layout during its trial.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayoutResult {
    /// The pattern of the layout.
    pub pattern: Pattern,
    /// The fraction of all requests that missed, 0 to 1.
    pub missed: f64,
    /// The fraction of the requests with the highest priority that missed, 0 to 1.
    pub missed_first_priority: f64,
}

/// The miss rate of a model over the last 10 s, or since the current layout came into force.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MissRate {
    /// The fraction of the requests that missed, 0 to 1.
    pub actual: f64,
    /// The fraction of the requests that are allowed to miss, according to the model's percentile.
    pub allowed: f64,
}
