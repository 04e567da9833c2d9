//! Doors while shares change.

use super::*;
use crate::sharing::Seen;

#[test]
fn batches_suit_the_least_that_a_model_may_have_before_the_next_decision() {
    let largest = |share: u32, coming: Option<u32>| {
        let terms = models(&[1]);
        let mut facts = facts(&[50], &[Sms(share)]);
        facts.models[0].coming = coming.map(Sms);
        facts.models[0].seen.executed.clear();
        let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
        let decided = policy.decide(&facts).doors;
        assert_eq!(policy.doors_meanwhile(&facts), decided);
        decided[0].max_batch
    };
    assert!(largest(14, None) < largest(66, None));
    assert_eq!(largest(66, Some(14)), largest(14, None), "it may come at any moment");
    assert_eq!(largest(14, Some(66)), largest(14, None), "it has not come yet");
}

#[test]
fn they_suit_it_between_two_decisions_too() {
    let terms = models(&[1, 1]);
    let mut facts = facts(&[2_000, 50], &[Sms(10), Sms(66)]);
    facts.models[0].standing = Some(GPU);
    facts.models[1].coming = Some(Sms(14));
    facts.models.iter_mut().for_each(|live| live.seen.executed.clear());
    let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
    let decided = policy.decide(&facts).doors[1].max_batch;
    let relief = policy.pressure(0, facts.now, &facts).unwrap();
    assert!(relief.doors[1].max_batch <= decided, "{relief:?}");
    assert!(relief.doors[0].max_batch > decided, "and what comes at once has come");
}

#[test]
fn a_flood_is_kept_out_and_its_peers_are_not() {
    let admits = |priorities: &[u32], arrived: &[u64]| {
        let facts = facts(arrived, &vec![GPU; arrived.len()]);
        let doors = Policy::new(Kind::Adaptive, &[GPU], &models(priorities)).decide(&facts).doors;
        doors.iter().map(|door| door.admit).collect::<Vec<_>>()
    };
    let flooded = admits(&[1, 2, 2, 3], &[20, 20_000, 20, 20]);
    assert!(flooded[1] < 0.1, "{flooded:?}");
    assert_eq!([flooded[0], flooded[2], flooded[3]], [1.0; 3]);
    let crowded = admits(&[1, 2, 2, 3], &[300, 600, 600, 20]);
    assert!(crowded[1] < 1.0 && crowded[1] == crowded[2], "all alike where nobody is one: {crowded:?}");
    assert!(crowded[1] > 0.3 && crowded[3] == 0.0, "{crowded:?}");
}

/// Who of three priorities are let in while these miss their SLOs.
fn admitted(terms: &[Terms], arrived: &[u64; 3], miss_theirs: &[usize]) -> Vec<f64> {
    let mut facts = facts(arrived, &[GPU; 3]);
    miss_theirs.iter().for_each(|&model| miss(&mut facts.models[model]));
    let doors = Policy::new(Kind::Adaptive, &[GPU], terms).decide(&facts).doors;
    doors.iter().map(|door| door.admit).collect()
}

#[test]
fn a_forecast_keeps_nobody_out_for_who_keeps_his_slo() {
    let admitted = |arrived, miss_theirs: &[usize]| admitted(&models(&[1, 2, 3]), arrived, miss_theirs);
    let crowded = [300, 300, 200];
    assert_eq!(admitted(&crowded, &[]), [1.0; 3]);
    assert_eq!(admitted(&crowded, &[2]), [1.0; 3], "nobody is lower");
    for higher in [0, 1] {
        let parts = admitted(&crowded, &[higher]);
        assert!(parts[..2] == [1.0; 2] && parts[2] < 0.9, "{parts:?}");
    }
    let two = [300, 350, 20];
    assert!(admitted(&two, &[0])[1] < 0.9 && admitted(&two, &[0, 1])[1] < 0.9);
    assert_eq!(admitted(&two, &[1])[1], 1.0, "it misses its own, and nobody above");
    assert!(admitted(&[900, 900, 300], &[])[2] < 0.2, "there is no room at best");
}

#[test]
fn what_there_is_room_for_at_best_goes_by_the_cheapest_batches() {
    // A row takes 94 ms·SM with 40 SMs, and 136 with all, which so many of the second need.
    let mut terms = models(&[1, 2, 3]);
    terms.iter_mut().for_each(|terms| terms.profile = Some(profile(8.0, 70.0, 132)));
    let arrived = [320, 500, 0];
    assert_eq!(admitted(&terms, &arrived, &[])[1], 1.0);
    assert!(admitted(&terms, &arrived, &[0])[1] < 0.9);
}

#[test]
fn nor_for_who_could_not_keep_it_alone() {
    let mut terms = models(&[1, 2]);
    terms[0].slo = MS;
    let mut facts = facts(&[300, 600], &[GPU; 2]);
    miss(&mut facts.models[0]);
    let decision = Policy::new(Kind::Adaptive, &[GPU], &terms).decide(&facts);
    assert_eq!((decision.report[0], decision.doors[1].admit), (Verdict::Hopeless, 1.0));
}

/// The part of the second priority's requests that is let in at the third look between two decisions if so many of the first one come in a
/// tenth of a second.
/// The first has missed its SLO before or not.
fn second(misses: bool, looks: impl Fn(&mut Policy, &mut Facts) -> Vec<Door>) -> impl FnMut(u64) -> f64 {
    let mut facts = facts(&[50, 500], &[GPU; 2]);
    let mut policy = Policy::new(Kind::Adaptive, &[GPU], &models(&[1, 2]));
    pass(&mut policy, &mut facts, &[50, 500], 20);
    if misses {
        (facts.now, facts.models[0].seen.in_time) = (facts.now + 500 * MS, 0);
        let _doors_are_asked_for_below = policy.decide(&facts);
    }
    move |first| {
        for (live, arrived) in facts.models.iter_mut().zip([first, 100]) {
            live.seen = Seen { span: 100 * MS, arrived, ..Seen::default() };
        }
        let mut before = 1.0;
        for _ in 0..2 {
            facts.now = facts.now + 100 * MS;
            before = policy.doors_meanwhile(&facts)[1].admit;
        }
        facts.now = facts.now + 100 * MS;
        let doors = looks(&mut policy, &mut facts);
        assert!(doors[0].admit == 1.0 && doors[1].admit <= before, "{doors:?}, {before} before");
        assert!(first < 100 || before > 0.9, "two looks are not enough");
        doors[1].admit
    }
}

#[test]
fn a_load_that_comes_at_once_is_made_room_for_before_the_next_decision() {
    let [mut keeps, mut misses] =
        [false, true].map(|misses| second(misses, |policy, facts| policy.doors_meanwhile(facts)));
    assert!(keeps(12) == 1.0 && misses(12) > 0.9, "as many as ever");
    let (keeps, misses) = (keeps(150), misses(150));
    assert!((0.5..0.7).contains(&keeps) && misses < 0.5, "{keeps} {misses}");
}

#[test]
fn that_more_comes_than_a_share_is_for_is_still_news_then() {
    let mut facts = facts(&[50], &[Sms(60)]);
    let mut policy = Policy::new(Kind::Adaptive, &[GPU], &models(&[1]));
    let decided = policy.decide(&facts).doors;
    facts.models[0].seen = Seen { span: 100 * MS, arrived: 150, ..Seen::default() };
    assert_eq!(policy.doors_meanwhile(&facts)[0].watch, decided[0].watch);
}

#[test]
fn so_it_is_when_its_model_has_more_at_once() {
    let pressed = |policy: &mut Policy, facts: &mut Facts| {
        (facts.models[0].share, facts.models[0].standing) = (Sms(60), Some(GPU));
        policy.clone().pressure(0, facts.now, facts).unwrap().doors
    };
    let mut second = second(false, pressed);
    let (as_ever, at_once) = (second(12), second(150));
    assert!(as_ever > 0.9 && at_once < 0.7, "{as_ever} {at_once}");
}

#[test]
fn baselines_have_doors_between_decisions_only_with_ours() {
    let (terms, facts) = (models(&[1]), facts(&[50], &[GPU]));
    let mut policy = Policy::new(Kind::Half, &[GPU], &terms);
    let _not_carried_out = policy.decide(&facts);
    assert_eq!(policy.doors_meanwhile(&facts), []);
    let mut policy = policy.with_our_doors();
    assert_eq!(policy.decide(&facts).doors, policy.doors_meanwhile(&facts));
}
