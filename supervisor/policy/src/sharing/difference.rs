//! From the shares that are wanted to the changes that lead there.

use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::Sms;

use super::{AdmissionPolicy, Change, Decision, Facts, Live, Terms, Verdict, Waiting, Why};

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Target {
    pub(super) sms: Sms,
    /// Which ones, where the share is a partition and that matters.
    pub(super) groups: Option<Groups>,
    pub(super) admission: AdmissionPolicy,
    pub(super) why: Why,
}

impl Target {
    pub(super) fn divided(sms: Sms, max_batch: u32) -> Self {
        Self { sms, groups: None, admission: AdmissionPolicy::accept_all(max_batch), why: Why::Divided }
    }
}

/// No share changes while it is held or is already changing, and changes that make room go first.
pub(super) fn towards(targets: &[Target], terms: &[Terms], facts: &Facts) -> Decision {
    let mut changes = Vec::new();
    let mut report = Vec::new();
    for (model, ((target, terms), live)) in targets.iter().zip(terms).zip(&facts.models).enumerate() {
        let verdict = verdict(terms.within(target.sms), target.why.clone(), live);
        let elsewhere = target.groups.is_some() && target.groups != live.groups && live.groups.is_some();
        if verdict.changes() || elsewhere && verdict.waiting.is_none() {
            let Verdict { from, to, .. } = verdict;
            changes.push(Change { model, from, to, groups: target.groups, at_once: live.ready == Some(to) });
        }
        report.push(verdict);
    }
    changes.sort_by_key(|change| (change.to > change.from, change.model));
    Decision { changes, admissions: targets.iter().map(|target| target.admission).collect(), report }
}

fn verdict(to: Sms, why: Why, live: &Live) -> Verdict {
    let from = live.share;
    let waiting = match (live.held, live.coming) {
        _ if from == to && live.coming.is_none() => None,
        (true, _) => Some(Waiting::Held),
        (_, Some(_)) => Some(Waiting::Handover),
        (_, None) => None,
    };
    Verdict { from, to, waiting, why }
}
