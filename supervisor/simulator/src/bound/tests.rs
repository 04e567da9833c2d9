use proptest::prelude::*;
use shadowslice_shared::units::Moment;

use super::*;
use crate::testing::{arrivals, flat, model, scenario};

fn of<'s>(scenario: &'s Scenario, load: &[(u64, usize)]) -> Bound<'s> {
    Bound::new(scenario, &arrivals(load), Duration::from_secs(1))
}

#[test]
fn a_gpu_does_no_more_than_its_sms() {
    // One request takes 2 SMs for 10 ms; two models on 2 SMs, three requests at once within 20 ms.
    let two = || scenario(2, vec![model(flat(&[10.0]), 1, 20), model(flat(&[10.0]), 1, 20)]);
    let alike = two();
    let bound = of(&alike, &[(0, 0), (0, 1), (0, 1)]);
    assert_eq!(bound.in_time(), 2);
    assert_eq!(bound.goodput_rps(), 2.0);
    assert_eq!(bound.models(), [1.0, 2.0]);
    assert_eq!(of(&two(), &[(0, 0), (0, 1), (10, 1)]).in_time(), 3, "the last may be answered at 30 ms");
}

#[test]
fn the_cheapest_requests_count_first() {
    // 40 ms for everything: four requests of 10 ms, or one of 30 ms and one of 10 ms.
    let scenario = scenario(2, vec![model(flat(&[30.0]), 1, 40), model(flat(&[10.0]), 1, 40)]);
    assert_eq!(of(&scenario, &[(0, 0), (0, 1), (0, 1), (0, 1), (0, 1)]).in_time(), 4);
    assert_eq!(of(&scenario, &[(0, 0), (0, 1), (0, 1)]).in_time(), 2, "whole requests");
}

#[test]
fn two_lanes_run_one_batch_each_at_a_time() {
    // Plenty of SMs, but no batches.
    let scenario = scenario(100, vec![model(flat(&[10.0]), 1, 20)]);
    assert_eq!(of(&scenario, &[(0, 0); 5]).in_time(), 4);
}

#[test]
fn a_batch_is_shared() {
    let scenario = scenario(2, vec![model(flat(&[10.0, 12.0]), 2, 12)]);
    assert_eq!(of(&scenario, &[(0, 0); 5]).in_time(), 2);
}

#[test]
fn classes_alone_and_in_order() {
    let mut scenario = scenario(2, vec![model(flat(&[30.0]), 1, 40), model(flat(&[10.0]), 1, 40)]);
    scenario.models[1].terms.priority = 2;
    let bound = of(&scenario, &[(0, 0), (0, 1), (0, 1), (0, 1), (0, 1)]);
    assert_eq!(bound.classes()[0], Class { priority: 1, goodput_rps: 1.0, after_rps: 1.0 });
    assert_eq!(bound.classes()[1], Class { priority: 2, goodput_rps: 4.0, after_rps: 1.0 });
    assert_eq!(bound.in_time(), 4, "for the whole priorities do not count");
}

#[test]
fn gpus_do_not_help_each_other() {
    let mut scenario = scenario(2, vec![model(flat(&[10.0]), 1, 10), model(flat(&[10.0]), 1, 10)]);
    assert_eq!(of(&scenario, &[(0, 0), (0, 1)]).in_time(), 1);
    scenario.gpus.push(Sms(2));
    scenario.models[1].terms.gpu = 1;
    assert_eq!(of(&scenario, &[(0, 0), (0, 1)]).in_time(), 2);
}

#[test]
fn nothing_comes_of_nothing() {
    let one = |slo| scenario(2, vec![model(flat(&[10.0]), 1, slo)]);
    assert_eq!(of(&one(20), &[]).in_time(), 0);
    assert_eq!(of(&one(9), &[(0, 0)]).in_time(), 0, "an SLO below the shortest execution");
    assert_eq!(of(&one(0), &[(0, 0)]).in_time(), 0);
    assert_eq!(of(&one(20), &[(0, 7)]).in_time(), 0, "a model that is not there");
    assert_eq!(Bound::new(&one(20), &arrivals(&[(0, 0)]), Duration::ZERO).goodput_rps(), 0.0);
    let mut nowhere = one(20);
    nowhere.models[0].terms.gpu = 3;
    assert_eq!(of(&nowhere, &[(0, 0)]).in_time(), 0);
}

/// The most work in time by the max-flow-min-cut theorem, over all sets of intervals between these
/// whole moments: for each set of moments kept, work that fits nowhere else must fit into it.
fn most_work(jobs: &[(u64, u64, u64)], capacity: u64) -> u64 {
    (0u32..1 << 8)
        .map(|cut| {
            let inside = |moment: u64| cut >> moment & 1 == 1;
            let uncut = jobs.iter().filter(|(from, to, _)| (*from..*to).any(|moment| !inside(moment)));
            u64::from(cut.count_ones()) * capacity + uncut.map(|job| job.2).sum::<u64>()
        })
        .min()
        .unwrap()
}

proptest! {
    #[test]
    fn earliest_deadline_first_does_the_most_work(
        mut jobs in prop::collection::vec((0u64..6, 1u64..3, 1u64..5), 0..8), capacity in 1u64..4
    ) {
        jobs.sort();
        let mut sweep = Sweep::new(capacity as f64);
        for &(at, slo, work) in &jobs {
            let at = Moment::after_origin(Duration::from_secs(at));
            sweep.arrive(Job::new(at, Duration::from_secs(slo), work as f64 * 1e9));
        }
        let windows: Vec<(u64, u64, u64)> = jobs.iter().map(|&(at, slo, work)| (at, at + slo, work)).collect();
        let offered: u64 = jobs.iter().map(|job| job.2).sum();
        let done = offered as f64 - sweep.lost() / 1e9;
        prop_assert!((done - most_work(&windows, capacity) as f64).abs() < 1e-6);
    }
}
