//! What a policy answers.

use std::time::Duration;

use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::Sms;

use super::Pattern;

/// A policy with a memory, such as `adaptive`, may decide otherwise when it is asked again on the
/// same facts.
#[derive(Debug, Clone, PartialEq, Default)]
#[must_use = "a decision that is not carried out has changed nothing"]
pub struct Decision {
    /// In this order: shares that become smaller come first. The planner may leave a change out,
    /// and changes nothing else.
    pub changes: Vec<ShareChange>,
    /// In the models' order.
    pub admissions: Vec<AdmissionPolicy>,
    /// In the models' order.
    pub report: Vec<Verdict>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShareChange {
    /// An index.
    pub model: usize,
    pub from: Sms,
    pub to: Sms,
    /// The groups that the model should have, where its share is a partition and that matters.
    pub groups: Option<Groups>,
    /// A standing worker takes over at once.
    pub at_once: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdmissionPolicy {
    /// In rows.
    pub max_batch: u32,
    /// A request that cannot be answered in time is refused.
    pub refuse_late: bool,
}

impl AdmissionPolicy {
    pub const fn accept_all(max_batch: u32) -> Self {
        Self { max_batch, refuse_late: false }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    pub from: Sms,
    /// The share that the model should have; the same where it is right.
    pub to: Sms,
    /// `None` if there is no change to make, or it is made now.
    pub blocked_by: Option<Blocker>,
    pub why: VerdictReason,
}

impl Verdict {
    pub fn changes(&self) -> bool {
        self.from != self.to && self.blocked_by.is_none()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blocker {
    Handover,
    Held,
}

#[derive(Debug, Clone, PartialEq)]
pub enum VerdictReason {
    FixedShare,
    Met(MissRate),
    /// The model violates its objective, and late requests are refused before layouts are tried.
    Violating(MissRate),
    Layout(LayoutReport),
    /// Alone on the GPU, too, the model could not keep its objective.
    Infeasible {
        missed: MissRate,
        two_batches: Duration,
    },
    /// The model misses, but not because of the time that its batches take.
    NotBatchTime {
        missed: MissRate,
        /// The time of two of the model's longest batches.
        two_batches: Duration,
    },
}

/// The layout of a model's GPU, and how it came to be.
#[derive(Debug, Clone, PartialEq)]
pub struct LayoutReport {
    pub stage: LayoutStage,
    pub pattern: Pattern,
    /// The index of the model that violated its objective.
    pub beneficiary: usize,
    pub missed: MissRate,
    pub tried: Vec<LayoutResult>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayoutStage {
    Trying,
    /// It missed least.
    Chosen,
}

/// What was missed under a layout while it was tried.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayoutResult {
    pub pattern: Pattern,
    /// The part of all requests, 0 to 1.
    pub missed: f64,
    /// The part of the requests of the highest priority, 0 to 1.
    pub missed_first_priority: f64,
}

/// Over the last 10 s, or since the layout was put in force.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MissRate {
    /// Of the requests that ended, 0 to 1.
    pub actual: f64,
    /// The part that may miss, by the model's percentile.
    pub allowed: f64,
}
