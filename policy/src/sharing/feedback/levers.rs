//! Which neighbours get fewer SMs, for the sake of a model that is short.

use std::time::Duration;

use shadowslice_shared::units::Sms;

use super::super::{Facts, Seen, Terms};

/// Caps, in percent of the GPU.
const LADDER: [u32; 6] = [75, 50, 36, 25, 18, 12];

/// Who misses more than this part of its requests is helped by two rungs at once.
const URGENT: f64 = 0.3;

/// A class of neighbours that is a smaller part of what keeps a model waiting is left alone.
const MATTERS: f64 = 0.1;

/// A peer has slack if the 99th percentile of its latency is below this part of its SLO,
const SLACK: f64 = 0.6;

/// and its worker would still be busy for less than this part of the time.
const BUSY: f64 = 0.85;

/// A model whose batches, two after another, take less than this part of its SLO misses for another reason, unless it is behind.
const EXECUTES: f64 = 0.4;

/// Caps that were lowered together.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Step {
    /// The model for whose sake.
    pub(super) sake: usize,
    pub(super) changes: Vec<Lowered>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Lowered {
    pub(super) model: usize,
    pub(super) from: Sms,
    pub(super) to: Sms,
}

/// Whether a model misses because of what its batches take, so that SMs may help.
pub(super) fn may_help(seen: &Seen, terms: &Terms) -> bool {
    let longest = seen.executed.iter().map(|executed| executed.mean).max().unwrap_or(Duration::ZERO);
    2 * longest >= terms.slo.mul_f64(EXECUTES) || super::is_behind(seen)
}

/// The next step for a model of whose requests such a part missed; `None` if there is none left.
pub(super) fn next_step(
    sake: usize,
    missed: f64,
    caps: &[Sms],
    short: &[bool],
    terms: &[Terms],
    facts: &Facts,
) -> Option<Step> {
    let gpu = facts.gpus[terms[sake].gpu];
    let neighbours = (0..terms.len()).filter(|&other| other != sake && terms[other].gpu == terms[sake].gpu);
    let weighed: Vec<(usize, f64)> =
        neighbours.map(|other| (other, weight(&facts.models[other].seen, caps[other], gpu))).collect();
    let total: f64 = weighed.iter().map(|(_, weight)| weight).sum();
    let rungs = if missed > URGENT { 2 } else { 1 };
    let lowered = |other: usize| {
        let to = terms[other].within(below(caps[other], rungs, gpu));
        let can = to < caps[other] && !facts.models[other].held;
        can.then_some(Lowered { model: other, from: caps[other], to })
    };
    let mut classes: Vec<u32> = weighed.iter().map(|&(other, _)| terms[other].priority).collect();
    classes.sort_unstable_by(|one, other| other.cmp(one));
    classes.dedup();
    for class in classes.into_iter().filter(|&class| class > terms[sake].priority) {
        let of_it = weighed.iter().map(|(other, _)| *other).filter(|&other| terms[other].priority == class);
        let busy: f64 = of_it.clone().map(|other| facts.models[other].seen.busy).sum();
        let changes: Vec<Lowered> = of_it.filter_map(lowered).collect();
        if busy >= MATTERS && !changes.is_empty() {
            return Some(Step { sake, changes });
        }
    }
    let peers = weighed.iter().filter(|(other, weight)| {
        terms[*other].priority == terms[sake].priority && *weight >= MATTERS * total && !short[*other]
    });
    let able = peers.filter_map(|&(other, weight)| Some((lowered(other)?, weight)));
    let able =
        able.filter(|(change, _)| has_slack(change, &facts.models[change.model].seen, &terms[change.model]));
    let (change, _) = able.max_by(|(_, one), (_, other)| one.total_cmp(other))?;
    Some(Step { sake, changes: vec![change] })
}

/// How long a model keeps others waiting: the length of its batches, as often as it executes, where it meets them.
fn weight(seen: &Seen, cap: Sms, gpu: Sms) -> f64 {
    let (count, time) = seen.executed.iter().fold((0, 0.0), |(count, time), executed| {
        (count + executed.count, time + executed.mean.as_secs_f64() * executed.count as f64)
    });
    let mean = time / count.max(1) as f64;
    mean * seen.busy * f64::from(cap.0) / f64::from(gpu.0.max(1))
}

/// The cap so many rungs below this one; the same where there is none.
fn below(cap: Sms, rungs: usize, gpu: Sms) -> Sms {
    let rung = |percent: u32| Sms(gpu.0 * percent / 100);
    let mut lower = LADDER.iter().map(|&percent| rung(percent)).filter(|&sms| sms < cap);
    let first = lower.next().unwrap_or(cap);
    lower.take(rungs - 1).last().unwrap_or(first)
}

/// Whether a peer can do with so much less. That a batch takes longer in proportion is the worst case.
fn has_slack(change: &Lowered, seen: &Seen, terms: &Terms) -> bool {
    let longer = f64::from(change.from.0) / f64::from(change.to.0.max(1));
    seen.p99_latency < terms.slo.mul_f64(SLACK) && seen.busy * longer < BUSY
}
