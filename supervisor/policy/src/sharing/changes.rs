//! The changes that turn the current shares into the target shares.

use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::Sms;

use super::{
    AdmissionPolicy, Blocker, Decision, ModelSnapshot, ModelSpec, PolicyInput, ShareChange, Verdict,
    VerdictReason,
};

/// The share and the admission limits that a policy decides for a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ShareTarget {
    /// The share, in SMs.
    pub sms: Sms,
    /// The groups of the partition, if the share is a partition and the policy chooses its groups.
    pub groups: Option<Groups>,
    /// The admission limits.
    pub admission: AdmissionPolicy,
    /// The reason for the decision.
    pub why: VerdictReason,
}

impl ShareTarget {
    /// Returns a target that chooses no groups and refuses no late requests.
    pub fn plain(sms: Sms, max_batch: u32) -> Self {
        Self {
            sms,
            groups: None,
            admission: AdmissionPolicy::accept_all(max_batch),
            why: VerdictReason::PolicyShare,
        }
    }
}

/// Returns the decision for these targets. A share that is held or already changing does not change.
/// Changes that free SMs come first.
pub fn plan_changes(targets: &[ShareTarget], specs: &[ModelSpec], input: &PolicyInput) -> Decision {
    let mut changes = Vec::new();
    let mut report = Vec::new();
    for (model, ((target, spec), snapshot)) in targets.iter().zip(specs).zip(&input.models).enumerate() {
        let verdict = verdict(spec.share_for(target.sms), target.why.clone(), snapshot);
        let elsewhere =
            target.groups.is_some() && target.groups != snapshot.groups && snapshot.groups.is_some();
        if verdict.changes() || elsewhere && verdict.blocked_by.is_none() {
            let Verdict { from, to, .. } = verdict;
            changes.push(ShareChange {
                model,
                from,
                to,
                groups: target.groups,
                at_once: snapshot.standby_share == Some(to),
            });
        }
        report.push(verdict);
    }
    changes.sort_by_key(|change| (change.to > change.from, change.model));
    Decision { changes, admissions: targets.iter().map(|target| target.admission).collect(), report }
}

fn verdict(to: Sms, why: VerdictReason, snapshot: &ModelSnapshot) -> Verdict {
    let from = snapshot.share;
    let blocked_by = match (snapshot.held, snapshot.pending_share) {
        _ if from == to && snapshot.pending_share.is_none() => None,
        (true, _) => Some(Blocker::Held),
        (_, Some(_)) => Some(Blocker::Handover),
        (_, None) => None,
    };
    Verdict { from, to, blocked_by, why }
}
