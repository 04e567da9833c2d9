//! From the shares that are wanted to the changes that lead there.

use shadowslice_shared::units::Sms;

use super::{Change, Decision, Door, Facts, Live, Plan, Terms, Verdict, Waiting};

/// What a policy wants of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Target {
    /// The share that it should have.
    pub(super) sms: Sms,
    /// Its door.
    pub(super) door: Door,
}

/// The decision that leads to the targets without further thought: nobody's share changes while people
/// hold it or while it is already changing, and what makes room goes first.
pub(super) fn towards(targets: &[Target], terms: &[Terms], facts: &Facts) -> Decision {
    let mut changes = Vec::new();
    let mut report = Vec::new();
    for (model, ((target, terms), live)) in targets.iter().zip(terms).zip(&facts.models).enumerate() {
        let to = terms.within(target.sms);
        let verdict = verdict(to, live);
        if let Some((from, to)) = verdict.change() {
            let at_once = live.standing == Some(to);
            changes.push(Change { model, from, to, at_once, onset: facts.now });
        }
        report.push(verdict);
    }
    let doors = targets.iter().map(|target| target.door).collect();
    Decision { plan: plan(changes), doors, standby: vec![None; terms.len()], report }
}

fn verdict(to: Sms, live: &Live) -> Verdict {
    let from = live.share;
    match (live.held, live.coming) {
        _ if from == to && live.coming.is_none() => Verdict::Keep,
        (true, _) => Verdict::Wait { to, waiting: Waiting::Held },
        (_, Some(_)) => Verdict::Wait { to, waiting: Waiting::Handover },
        (_, None) if from < to => Verdict::Grow { from, to },
        (_, None) => Verdict::Shrink { from, to },
    }
}

/// A plan of these changes, those that make room first.
pub(super) fn plan(mut changes: Vec<Change>) -> Option<Plan> {
    if changes.is_empty() {
        return None;
    }
    changes.sort_by_key(|change| (change.to > change.from, change.model));
    Some(Plan { changes })
}
