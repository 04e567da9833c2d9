//! Models of one priority beside each other.

use super::*;
use crate::sharing::Verdict;

/// Half-seconds in which so many requests come for each model, and that part of the first one's is in time: the shares, and what is said, after each.
fn misses(
    policy: &mut Policy,
    facts: &mut Facts,
    arrived: [u64; 2],
    in_time: f64,
    intervals: u32,
) -> Vec<(Vec<Sms>, Vec<Verdict>)> {
    let interval = |_| {
        for (live, arrived) in facts.models.iter_mut().zip(arrived) {
            came(live, arrived, 9);
        }
        facts.models[0].seen.in_time = (arrived[0] as f64 * in_time) as u64;
        facts.now = facts.now + 500 * MS;
        let decision = policy.decide(facts);
        carry_out(&decision, facts);
        (facts.shares(), decision.report)
    };
    (0..intervals).map(interval).collect()
}

#[test]
fn who_needs_less_leaves_sms_to_a_peer_that_misses_until_more_comes() {
    let terms = models(&[1, 1]);
    let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
    let mut facts = facts(&[0, 0], &[GPU, GPU]);
    let seen = misses(&mut policy, &mut facts, [450, 20], 0.9, 7);
    // A demand is steady after three seconds; a second of misses is enough then.
    assert!(seen[..6].iter().all(|(shares, _)| shares[..] == [GPU, GPU]), "{seen:?}");
    let (shares, report) = &seen[6];
    assert_eq!(shares[..], [GPU, Sms(54)]);
    assert_eq!(report[1], Verdict::Yield { from: GPU, to: Sms(54) });
    let mut again = Policy::new(Kind::Adaptive, &[GPU], &terms).remembering(&policy, &[Some(0), Some(1)]);
    misses(&mut again, &mut facts.clone(), [450, 20], 0.9, 1);
    assert_eq!(again.initial(), [GPU, Sms(54)], "another configuration goes on with it");
    let seen = misses(&mut policy, &mut facts, [450, 200], 0.9, 12);
    let shares = &seen.last().unwrap().0;
    assert!(shares[1] == shares[0] && shares[1] > Sms(54), "as much as it needs: {shares:?}");
}

#[test]
fn a_peer_makes_room_on_an_overloaded_gpu_where_others_stay() {
    let share = |priority: u32| {
        let mut policy = Policy::new(Kind::Adaptive, &[GPU], &models(&[1, priority]));
        let mut facts = facts(&[0, 0], &[GPU, GPU]);
        misses(&mut policy, &mut facts, [1_500, 20], 0.9, 20).last().unwrap().0[1]
    };
    assert_eq!([1, 2].map(share), [Sms(54), GPU]);
}

#[test]
fn where_caps_fit_together_nobody_has_less_for_a_peer() {
    let mut policy = Policy::new(Kind::Adaptive, &[GPU], &models(&[1, 1]));
    let mut facts = facts(&[0, 0], &[GPU, GPU]);
    let seen = misses(&mut policy, &mut facts, [300, 20], 0.7, 9);
    assert_eq!((&seen[8].0[..], seen[8].1[1]), (&[Sms(66); 2][..], Verdict::Keep));
}
