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
    let crowded = admits(&[1, 2, 2, 3], &[300, 400, 400, 20]);
    assert!(crowded[1] < 1.0 && crowded[1] == crowded[2], "all alike where nobody is one: {crowded:?}");
    assert!(crowded[1] > 0.3 && crowded[3] == 0.0, "{crowded:?}");
}

#[test]
fn a_load_that_comes_at_once_is_made_room_for_before_the_next_decision() {
    let terms = models(&[1, 2]);
    let mut facts = facts(&[50, 500], &[GPU; 2]);
    let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
    pass(&mut policy, &mut facts, &[50, 500], 20);
    let decided = policy.decide(&facts).doors;
    let mut meanwhile = |first: u64| {
        for (live, arrived) in facts.models.iter_mut().zip([first, 100]) {
            live.seen = Seen { span: 100 * MS, arrived, ..Seen::default() };
        }
        policy.doors_meanwhile(&facts)
    };
    assert_eq!(meanwhile(12), decided, "as many as ever");
    let crowded = meanwhile(150);
    assert!(decided[1].admit > 0.9 && crowded[1].admit < 0.5, "{decided:?} {crowded:?}");
    assert_eq!(crowded[0].admit, 1.0);
    assert_eq!(crowded[0].watch, decided[0].watch, "that more comes than its share is for is still news");
}

#[test]
fn so_it_is_when_its_model_has_more_at_once() {
    let terms = models(&[1, 2]);
    let mut facts = facts(&[50, 500], &[GPU; 2]);
    let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
    pass(&mut policy, &mut facts, &[50, 500], 20);
    (facts.models[0].share, facts.models[0].standing) = (Sms(60), Some(GPU));
    let mut second = |first: u64| {
        facts.models[0].seen = Seen { span: 100 * MS, arrived: first, ..Seen::default() };
        policy.clone().pressure(0, facts.now, &facts).unwrap().doors[1].admit
    };
    assert!(second(12) > 0.9 && second(150) < 0.5);
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
