//! The decisions of a sharing policy.

use std::time::Duration;

use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::Sms;

use super::Pattern;

/// A policy's decision. A policy with a memory, such as `adaptive`, may decide differently on the
/// same input.
#[derive(Debug, Clone, PartialEq, Default)]
#[must_use = "a decision that is not carried out has changed nothing"]
pub struct Decision {
    /// The changes in their order: shares that shrink come first. The caller may skip a change, and
    /// makes no others.
    pub changes: Vec<ShareChange>,
    /// The admission of each model, in the models' order.
    pub admissions: Vec<AdmissionPolicy>,
    /// The verdict on each model, in the models' order.
    pub report: Vec<Verdict>,
}

/// A change of a model's share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShareChange {
    /// The index of the model.
    pub model: usize,
    /// The share now.
    pub from: Sms,
    /// The new share.
    pub to: Sms,
    /// The groups that the model should have, if its share is a partition and the policy chooses
    /// them.
    pub groups: Option<Groups>,
    /// True if a worker with the new share can take over at once.
    pub at_once: bool,
}

/// The batch size of a model and whether it refuses late requests.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdmissionPolicy {
    /// The largest batch, in rows.
    pub max_batch: u32,
    /// True if requests are refused that cannot be answered in time.
    pub refuse_late: bool,
}

impl AdmissionPolicy {
    /// Returns an admission that refuses no late request.
    pub const fn accept_all(max_batch: u32) -> Self {
        Self { max_batch, refuse_late: false }
    }
}

/// The decision about one model, with its reason.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// The share now.
    pub from: Sms,
    /// The share that the model should have; the same as `from` if no change is wanted.
    pub to: Sms,
    /// The obstacle to a wanted change. `None` if no change is wanted, or it happens now.
    pub blocked_by: Option<Blocker>,
    /// The reason.
    pub why: VerdictReason,
}

impl Verdict {
    /// Returns true if the share changes now.
    pub fn changes(&self) -> bool {
        self.from != self.to && self.blocked_by.is_none()
    }
}

/// The obstacle to a change of share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blocker {
    /// A change is under way.
    Handover,
    /// The share is held.
    Held,
}

/// The reason for a verdict.
#[derive(Debug, Clone, PartialEq)]
pub enum VerdictReason {
    /// The policy divides the GPU this way, and gives no further reason.
    PolicyShare,
    /// The model meets its objective.
    Met(MissRate),
    /// The model violates its objective. Late requests are refused before layouts are tried.
    Violating(MissRate),
    /// A layout is tried or was chosen.
    Layout(LayoutReport),
    /// The model could not meet its objective even alone on the GPU.
    Infeasible {
        /// The requests that missed.
        missed: MissRate,
        /// The time of two batches of one row alone on the whole GPU.
        two_batches: Duration,
    },
    /// The model misses its objective for another reason than the time of its batches.
    NotBatchTime {
        /// The requests that missed.
        missed: MissRate,
        /// The time of two of the model's longest batches.
        two_batches: Duration,
    },
}

/// The layout of a model's GPU, and how it was chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct LayoutReport {
    /// The stage of the choice.
    pub stage: LayoutStage,
    /// The pattern of the layout.
    pub pattern: Pattern,
    /// The index of the model that violated its objective.
    pub beneficiary: usize,
    /// The requests of this model that missed.
    pub missed: MissRate,
    /// The results of the layouts that were tried.
    pub tried: Vec<LayoutResult>,
}

/// The stage of the choice of a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayoutStage {
    /// Layouts are being tried.
    Trying,
    /// This layout missed the fewest requests.
    Chosen,
}

/// The misses under a layout while it was tried.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayoutResult {
    /// The pattern of the layout.
    pub pattern: Pattern,
    /// The part of all requests that missed, 0 to 1.
    pub missed: f64,
    /// The part of the requests of the highest priority that missed, 0 to 1.
    pub missed_first_priority: f64,
}

/// The requests of a model that missed its SLO, over the last 10 s or since the present layout is
/// in force.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MissRate {
    /// The part of the requests that missed, 0 to 1.
    pub actual: f64,
    /// The part of the requests that may miss, by the model's percentile.
    pub allowed: f64,
}
