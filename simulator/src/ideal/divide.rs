//! How the SMs are divided: by what each share would answer if it stayed for a while.

use std::collections::BTreeMap;

use super::batching::Style;
use super::lane::Lane;

/// The attainments that are told apart when a class is divided fairly.
const FAIRNESS_STEPS: u64 = 1024;

/// A share, in steps; a model is to be answered as many requests as with that. Zero guarantees nothing.
pub(super) type Guarantee = usize;

/// What each share would answer of the requests up to some moment, found out when asked for.
struct Curve<'l, 'm> {
    lane: &'l Lane<'m>,
    /// Up to this request.
    end: usize,
    /// In batches that do not wait, and in the better ones.
    eager: Vec<Option<u64>>,
    answers: Vec<Option<u64>>,
    /// The least share that answers as many as the largest, without waiting if that is possible: a
    /// share that needs to wait leaves no room for arrivals beyond the horizon.
    need: usize,
    /// The least share that keeps the guarantee.
    floor: usize,
}

impl<'l, 'm> Curve<'l, 'm> {
    fn new(lane: &'l Lane<'m>, until: u64, guarantee: Guarantee) -> Self {
        let model = lane.model;
        let end = lane.arrived_before(until);
        let unknown = vec![None; model.max + 1];
        let (eager, answers) = (unknown.clone(), unknown);
        let mut curve = Self { lane, end, eager, answers, need: model.max, floor: 0 };
        let most = curve.answers(model.max);
        curve.need = if curve.eager(model.max) >= most {
            least(0, model.max, |share| curve.eager(share) >= most)
        } else {
            curve.least_for(most)
        };
        if guarantee > 0 {
            let guaranteed = curve.answers(guarantee);
            curve.floor = curve.least_for(guaranteed);
        }
        curve
    }

    fn eager(&mut self, share: usize) -> u64 {
        let (lane, end) = (self.lane, self.end);
        *self.eager[share].get_or_insert_with(|| lane.answers(share, Style::Eager, end))
    }

    fn answers(&mut self, share: usize) -> u64 {
        if let Some(answers) = self.answers[share] {
            return answers;
        }
        let eager = self.eager(share);
        let answers = self.lane.outlook_beside(share, self.end, eager).answers;
        self.answers[share] = Some(answers);
        answers
    }

    /// The least share that answers so many requests, or the largest that is of use.
    fn least_for(&mut self, count: u64) -> usize {
        least(0, self.need, |share| self.answers(share) >= count)
    }

    /// The least share that brings the model's attainment there since the beginning, and keeps the
    /// guarantee.
    fn least_for_attainment(&mut self, attainment: u64) -> usize {
        let wanted = (self.end as u64 * attainment).div_ceil(FAIRNESS_STEPS);
        self.least_for(wanted.saturating_sub(self.lane.answered)).max(self.floor)
    }
}

/// The least share from `low` on that is enough, or `high`.
fn least(mut low: usize, mut high: usize, mut enough: impl FnMut(usize) -> bool) -> usize {
    while low < high {
        let middle = low.midpoint(high);
        if enough(middle) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    high
}

/// Divides `steps` among the lanes of a GPU for the requests that arrive before `until`. `shares` are
/// those in force, and stay if nothing is better.
pub(super) fn divide(
    lanes: &[Lane],
    steps: usize,
    until: u64,
    guarantees: &[Guarantee],
    shares: &mut [usize],
) {
    if lanes.iter().zip(shares.iter()).all(|(lane, &share)| will_do(lane, share, until)) {
        return;
    }
    let mut classes: BTreeMap<u32, Vec<(usize, Curve)>> = BTreeMap::new();
    for (index, (lane, &guarantee)) in lanes.iter().zip(guarantees).enumerate() {
        let curve = Curve::new(lane, until, guarantee);
        classes.entry(lane.model.priority).or_default().push((index, curve));
    }
    let mut free = steps;
    for class in classes.into_values() {
        let (members, mut curves): (Vec<usize>, Vec<Curve>) = class.into_iter().unzip();
        let divided = divide_class(&mut curves, free);
        free -= divided.iter().sum::<usize>();
        members.into_iter().zip(divided).for_each(|(member, share)| shares[member] = share);
    }
    spread(free, lanes, shares);
}

/// Whether no share would answer more than this one, for the reason given at [`Curve::need`] without
/// waiting.
fn will_do(lane: &Lane, share: usize, until: u64) -> bool {
    let end = lane.arrived_before(until);
    let answers = lane.answers(share, Style::Eager, end);
    answers == (end - lane.settled()) as u64 || answers >= lane.outlook(lane.model.max, end).answers
}

/// The shares of one priority class: attainments as equal and as high as can be, then as many answers
/// as can be, and no more SMs than that takes.
fn divide_class(class: &mut [Curve], room: usize) -> Vec<usize> {
    let needs: Vec<usize> = class.iter().map(|curve| curve.need).collect();
    if needs.iter().sum::<usize>() <= room {
        return needs;
    }
    // Higher classes may have taken what was guaranteed.
    if class.iter().map(|curve| curve.floor).sum::<usize>() > room {
        class.iter_mut().for_each(|curve| curve.floor = 0);
    }
    let mut floors: Vec<usize> = class.iter().map(|curve| curve.floor).collect();
    let (mut low, mut high) = (0, FAIRNESS_STEPS);
    while low < high {
        let middle = (low + high).div_ceil(2);
        let wanted: Vec<usize> = class.iter_mut().map(|curve| curve.least_for_attainment(middle)).collect();
        if wanted.iter().sum::<usize>() <= room {
            floors = wanted;
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    most_answers(class, floors, room)
}

/// The shares that answer the most from these floors on: dynamic programming over the models.
fn most_answers(class: &mut [Curve], floors: Vec<usize>, room: usize) -> Vec<usize> {
    let extra = room - floors.iter().sum::<usize>();
    let mut best = vec![0; extra + 1];
    let mut choices = Vec::with_capacity(class.len());
    for (curve, &floor) in class.iter_mut().zip(&floors) {
        let useful = floor..=curve.need.max(floor);
        let gains: Vec<u64> = useful.take(extra + 1).map(|share| curve.answers(share)).collect();
        let before = best.clone();
        let choose = |left: usize| {
            let value = |more: usize| before[left - more] + gains[more];
            let choice =
                (1..gains.len().min(left + 1)).fold(0, |a, b| if value(b) > value(a) { b } else { a });
            (choice, value(choice))
        };
        let choice: Vec<usize>;
        (choice, best) = (0..=extra).map(choose).unzip();
        choices.push(choice);
    }
    let mut left = extra;
    let mut shares = floors;
    for (share, choice) in shares.iter_mut().zip(&choices).rev() {
        *share += choice[left];
        left -= choice[left];
    }
    shares
}

/// Gives what nobody needs to all, in proportion, so that they finish earlier.
fn spread(free: usize, lanes: &[Lane], shares: &mut [usize]) {
    let given = shares.iter().sum::<usize>().max(1);
    let mut left = free;
    for (lane, share) in lanes.iter().zip(shares.iter_mut()) {
        let more = (free * *share / given).min(lane.model.max - *share);
        *share += more;
        left -= more;
    }
    for (lane, share) in lanes.iter().zip(shares.iter_mut()) {
        let more = left.min(lane.model.max - *share);
        *share += more;
        left -= more;
    }
}
