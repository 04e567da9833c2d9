//! Who waits for company, beside whom.

use super::*;
use crate::batcher::Waits;

/// It executed all the time, in the largest batches.
fn fill(live: &mut Live) {
    live.seen.executed = vec![Executed { rows: 16, count: 40, mean: 12 * MS }];
    live.seen.busy = 1.0;
}

#[test]
fn batches_wait_for_company_only_beside_who_lacks_what_that_saves() {
    let waits = |short: &[usize]| {
        let mut facts = facts(&[100, 200, 200], &[GPU; 3]);
        short.iter().for_each(|&model| miss(&mut facts.models[model]));
        let doors = Policy::new(Kind::Adaptive, &[GPU], &models(&[1; 3])).decide(&facts).doors;
        [0, 1, 2].map(|model: usize| doors[model].max_delay > 8 * MS)
    };
    assert_eq!(waits(&[]), [false; 3]);
    assert_eq!(waits(&[0]), [false, true, true], "not for himself");
    assert_eq!(waits(&[0, 2]), [true; 3]);
}

#[test]
fn nobody_waits_for_a_model_that_cannot_be_helped() {
    let waits = |slo: Duration| {
        let mut facts = facts(&[100, 200], &[GPU; 2]);
        miss(&mut facts.models[0]);
        let mut terms = models(&[1; 2]);
        terms[0].slo = slo;
        let doors = Policy::new(Kind::Adaptive, &[GPU], &terms).decide(&facts).doors;
        doors[1].max_delay > 8 * MS
    };
    assert!(waits(20 * MS) && !waits(MS), "a request takes 3 ms with the whole GPU");
}

#[test]
fn a_higher_priority_waits_for_who_misses_his_slo_and_not_for_who_fills_his_batches() {
    let waits = |priorities: [u32; 3], lack: fn(&mut Live)| {
        let mut facts = facts(&[100, 200, 200], &[GPU; 3]);
        lack(&mut facts.models[1]);
        let doors = Policy::new(Kind::Adaptive, &[GPU], &models(&priorities)).decide(&facts).doors;
        [0, 1, 2].map(|model: usize| doors[model].max_delay > 8 * MS)
    };
    assert_eq!(waits([1, 2, 3], miss), [true, false, true]);
    assert_eq!(waits([1, 2, 3], fill), [false, false, true], "the first priority does not");
    assert_eq!(waits([1; 3], fill), [true, false, true], "theirs is no higher");
}

#[test]
fn batches_wait_beside_who_is_short_but_not_for_company_that_does_not_come() {
    let terms = models(&[1, 1, 1]);
    let waits = |in_vain: Duration| {
        let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
        let mut facts = facts(&[150; 3], &policy.initial());
        facts.models[0].seen.waits = Waits { batches: 40, total: 600 * MS, in_vain, ..Waits::default() };
        facts.models[1..].iter_mut().for_each(miss);
        policy.decide(&facts).doors.iter().map(|door| !door.max_delay.is_zero()).collect::<Vec<_>>()
    };
    assert_eq!(waits(120 * MS), [true; 3]);
    assert_eq!(waits(590 * MS), [false, true, true]);
}

#[test]
fn batches_do_not_wait_whose_clients_ask_less_for_it() {
    let terms = models(&[1, 1, 1]);
    let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
    let mut facts = facts(&[150; 3], &policy.initial());
    facts.models[0].seen.most_under_way = 6;
    facts.models[1..].iter_mut().for_each(miss);
    let mut waiting = Vec::new();
    for _ in 0..30 {
        facts.now = facts.now + 500 * MS;
        let delays: Vec<Duration> = policy.decide(&facts).doors.iter().map(|door| door.max_delay).collect();
        assert!(!delays[1].is_zero());
        let live = &mut facts.models[0];
        let (arrived, ms, idle) = if delays[0].is_zero() { (200, 15, 0) } else { (150, 20, 100) };
        came(live, arrived, ms);
        live.seen.mean_latency = MS * ms as u32;
        live.seen.waits.idle = MS * idle;
        waiting.push(!delays[0].is_zero());
    }
    let waited = waiting.iter().filter(|waited| **waited).count();
    assert!((8..=12).contains(&waited) && !waiting[29], "{waiting:?}");
}
