//! The best of several foresights.

use std::collections::BTreeMap;

use super::divide::{Guarantee, divide};
use super::lane::{Lane, Model};
use super::{SLOT, nanos};

/// How a run of the clairvoyant plans.
#[derive(Debug, Clone, Copy)]
struct Foresight {
    /// How far ahead arrivals count, in slots. A backlog is looked through to its end all the same;
    /// to look much farther binds the shares to one plan for too long.
    slots: u64,
    /// Whether lanes may wait for company.
    patient: bool,
}

/// When no model misses more than one in so many, nothing better is looked for.
const GOOD_ENOUGH: u64 = 1000;

/// The requests of each model that are answered in time on a GPU of so many steps.
pub(super) fn best(models: &[&Model], steps: usize) -> Vec<u64> {
    let near = Foresight { slots: 2, patient: true };
    let nothing = vec![0; models.len()];
    let eager = foresee(models, steps, Foresight { patient: false, ..near }, &nothing);
    if eager.iter().zip(models).all(|(&answered, model)| good_enough(model, answered)) {
        return eager;
    }
    let (shares, fixed) = static_partition(models, steps);
    let fair = foresee(models, steps, near, &nothing);
    let far = foresee(models, steps, Foresight { slots: 5, ..near }, &nothing);
    // To guarantee what the static shares bring lets attainments differ for a while, where to
    // equalise them at once wastes SMs.
    let guaranteed = foresee(models, steps, near, &shares);
    let better = |a: Vec<u64>, b: Vec<u64>| if is_better(models, &b, &a) { b } else { a };
    [fixed, fair, far, guaranteed].into_iter().fold(eager, better)
}

fn good_enough(model: &Model, answered: u64) -> bool {
    model.answerable() - answered <= model.answerable() / GOOD_ENOUGH
}

/// The best shares that never change, and what they answer.
fn static_partition(models: &[&Model], steps: usize) -> (Vec<usize>, Vec<u64>) {
    let lanes: Vec<Lane> = models.iter().map(|model| Lane::new(model, true)).collect();
    let mut shares = vec![0; lanes.len()];
    divide(&lanes, steps, u64::MAX, &vec![0; lanes.len()], &mut shares);
    let answers = |(lane, &share): (&Lane, &usize)| lane.outlook(share, lane.model.arrivals.len()).answers;
    let answered = lanes.iter().zip(&shares).map(answers).collect();
    (shares, answered)
}

/// What is answered if the SMs are divided anew at every slot.
fn foresee(models: &[&Model], steps: usize, foresight: Foresight, guarantees: &[Guarantee]) -> Vec<u64> {
    let slot = nanos(SLOT);
    let mut lanes: Vec<Lane> = models.iter().map(|model| Lane::new(model, foresight.patient)).collect();
    let mut shares = vec![0; lanes.len()];
    let mut now = 0;
    while let Some(work) = lanes.iter().filter_map(Lane::next_work).min() {
        now = now.max(work - work % slot);
        let until = now + foresight.slots * slot;
        lanes.iter_mut().for_each(|lane| lane.wait(now));
        divide(&lanes, steps, until, guarantees, &mut shares);
        now += slot;
        for (lane, &share) in lanes.iter_mut().zip(&shares) {
            let style = lane.outlook(share, lane.arrived_before(until)).style;
            lane.advance(share, style, now, lane.model.arrivals.len());
            lane.give_up_hopeless();
        }
    }
    lanes.iter().map(|lane| lane.answered).collect()
}

/// Attainments that differ by no more are equal, since finer differences must outweigh neither what
/// lower classes get nor the goodput.
const TOLERANCE: f64 = 0.01;

/// Whether `these` answers meet the objective better than `those`.
fn is_better(models: &[&Model], these: &[u64], those: &[u64]) -> bool {
    let decisive = |(a, b): &(f64, f64)| (a - b).abs() > TOLERANCE;
    let pairs = attainments(models, these).into_iter().zip(attainments(models, those));
    match pairs.into_iter().find(decisive) {
        Some((a, b)) => a > b,
        None => these.iter().sum::<u64>() > those.iter().sum(),
    }
}

/// For each class, the highest first, the least attainment and that of all together.
fn attainments(models: &[&Model], answered: &[u64]) -> Vec<f64> {
    let mut classes: BTreeMap<u32, (f64, u64, u64)> = BTreeMap::new();
    for (model, &answered) in models.iter().zip(answered) {
        let (least, answers, offers) = classes.entry(model.priority).or_insert((1.0, 0, 0));
        *least = attainment(answered, model.answerable()).min(*least);
        *answers += answered;
        *offers += model.answerable();
    }
    classes.into_values().flat_map(|(least, answers, offers)| [least, attainment(answers, offers)]).collect()
}

fn attainment(answered: u64, offered: u64) -> f64 {
    if offered == 0 { 1.0 } else { answered as f64 / offered as f64 }
}
