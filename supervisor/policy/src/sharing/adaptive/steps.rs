//! What can be done for a model that misses, from the least on.

use shadowslice_shared::units::Sms;

use super::super::{Facts, Seen, Terms};

/// Largest first, in percent of the GPU.
const LADDER: [u32; 6] = [75, 50, 36, 25, 18, 12];

/// Where more than this part of a model's requests miss, neighbours go down two rungs at once.
const URGENT: f64 = 0.3;

/// Neighbours of one priority that execute for less than this part of the time are left alone, and
/// so is a peer that causes less than this part of a model's waiting.
const MATTERS: f64 = 0.1;

/// A peer has slack if the 99th percentile of its latency is below this part of its SLO,
const SLACK: f64 = 0.6;

/// and it would still execute for less than this part of the time at the lower share.
const BUSY: f64 = 0.85;

/// What was changed at once.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Step {
    /// The model for which it was changed.
    pub(super) sake: usize,
    /// The part of that model's requests that missed before.
    pub(super) missed: f64,
    pub(super) changes: Vec<Moved>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Moved {
    pub(super) model: usize,
    pub(super) from: Sms,
    pub(super) to: Sms,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ShareState {
    pub(super) share: Sms,
    /// For the sake of another model.
    pub(super) makes_room: bool,
    /// More of the model's requests miss than may.
    pub(super) short: bool,
}

/// The share so many rungs below this one; the lowest, if there are fewer.
fn below(share: Sms, rungs: usize, terms: &Terms, gpu: Sms) -> Sms {
    let rung = |percent: u32| terms.within(Sms(gpu.0 * percent / 100));
    let lower = LADDER.into_iter().map(rung).filter(|&sms| sms < share);
    lower.take(rungs).last().unwrap_or(share)
}

/// `missed` is a part of the model's requests. `None` if no step is left that `may` allows.
pub(super) fn next_step(
    sake: usize,
    missed: f64,
    states: &[ShareState],
    terms: &[Terms],
    facts: &Facts,
    may: impl Fn(&Vec<Moved>) -> bool,
) -> Option<Step> {
    let changes = parts_for_all(sake, states, terms, facts)
        .filter(&may)
        .or_else(|| its_own(sake, states, terms, facts))
        .or_else(|| lower_priorities(sake, missed, states, terms, facts).filter(&may))
        .or_else(|| peer(sake, missed, states, terms, facts).filter(&may))?;
    Some(Step { sake, missed, changes })
}

/// Each of n models has 2/n of the GPU at most.
fn parts_for_all(sake: usize, states: &[ShareState], terms: &[Terms], facts: &Facts) -> Option<Vec<Moved>> {
    let gpu = facts.gpus[terms[sake].gpu];
    let here: Vec<usize> = (0..terms.len()).filter(|&model| terms[model].gpu == terms[sake].gpu).collect();
    if here.iter().any(|&model| states[model].share < terms[model].within(gpu)) {
        return None;
    }
    let half = Sms(gpu.0 * 2 / here.len() as u32);
    let lowered = |model: usize| {
        let (from, to) = (states[model].share, terms[model].within(half));
        (to < from && !facts.models[model].held).then_some(Moved { model, from, to })
    };
    let changes: Vec<Moved> = here.into_iter().filter_map(lowered).collect();
    (!changes.is_empty()).then_some(changes)
}

/// A model that has less than it may, and not for the sake of another one: it was started with
/// less, or has its part since [`parts_for_all`].
fn its_own(sake: usize, states: &[ShareState], terms: &[Terms], facts: &Facts) -> Option<Vec<Moved>> {
    let ShareState { share: from, makes_room, .. } = states[sake];
    let to = terms[sake].within(facts.gpus[terms[sake].gpu]);
    let may = !makes_room && from < to && !facts.models[sake].held;
    may.then(|| vec![Moved { model: sake, from, to }])
}

/// All models of one priority go down: the lowest one that is a good part of what the GPU does.
fn lower_priorities(
    sake: usize,
    missed: f64,
    states: &[ShareState],
    terms: &[Terms],
    facts: &Facts,
) -> Option<Vec<Moved>> {
    let lower: Vec<usize> =
        neighbours(sake, terms).filter(|&other| terms[other].priority > terms[sake].priority).collect();
    let mut priorities: Vec<u32> = lower.iter().map(|&other| terms[other].priority).collect();
    priorities.sort_unstable_by(|one, other| other.cmp(one));
    priorities.dedup();
    priorities.into_iter().find_map(|priority| {
        let of_it = lower.iter().copied().filter(|&other| terms[other].priority == priority);
        let busy: f64 = of_it.clone().map(|other| facts.models[other].seen.busy).sum();
        let changes: Vec<Moved> =
            of_it.filter_map(|other| lowered(other, missed, states, terms, facts)).collect();
        (busy >= MATTERS && !changes.is_empty()).then_some(changes)
    })
}

/// Of the peers that have slack, the one that keeps the model waiting most goes down.
fn peer(
    sake: usize,
    missed: f64,
    states: &[ShareState],
    terms: &[Terms],
    facts: &Facts,
) -> Option<Vec<Moved>> {
    let gpu = facts.gpus[terms[sake].gpu];
    let weight = |other: usize| waiting(&facts.models[other].seen, states[other].share, gpu);
    let total: f64 = neighbours(sake, terms).map(weight).sum();
    let peers = neighbours(sake, terms).filter(|&other| {
        terms[other].priority == terms[sake].priority
            && weight(other) >= MATTERS * total
            && !states[other].short
    });
    let able = peers.filter_map(|other| {
        let change = lowered(other, missed, states, terms, facts)?;
        has_slack(&change, &facts.models[other].seen, &terms[other]).then_some((change, weight(other)))
    });
    let (change, _) = able.max_by(|(_, one), (_, other)| one.total_cmp(other))?;
    Some(vec![change])
}

fn neighbours(sake: usize, terms: &[Terms]) -> impl Iterator<Item = usize> {
    (0..terms.len()).filter(move |&other| other != sake && terms[other].gpu == terms[sake].gpu)
}

fn lowered(
    model: usize,
    missed: f64,
    states: &[ShareState],
    terms: &[Terms],
    facts: &Facts,
) -> Option<Moved> {
    let from = states[model].share;
    let rungs = if missed > URGENT { 2 } else { 1 };
    let to = below(from, rungs, &terms[model], facts.gpus[terms[model].gpu]);
    (to != from && !facts.models[model].held).then_some(Moved { model, from, to })
}

/// How long a model keeps others waiting: batches take turns on the SMs that both use.
fn waiting(seen: &Seen, sms: Sms, gpu: Sms) -> f64 {
    let (count, time) = seen.executed.iter().fold((0, 0.0), |(count, time), executed| {
        (count + executed.count, time + executed.mean.as_secs_f64() * executed.count as f64)
    });
    let mean = time / count.max(1) as f64;
    mean * seen.busy * f64::from(sms.0) / f64::from(gpu.0.max(1))
}

/// It is assumed that the peer's batches take longer in proportion, which is the worst case.
fn has_slack(Moved { from, to, .. }: &Moved, seen: &Seen, terms: &Terms) -> bool {
    let longer = f64::from(from.0) / f64::from(to.0.max(1));
    seen.p99_latency < terms.slo.mul_f64(SLACK) && seen.busy * longer < BUSY
}
