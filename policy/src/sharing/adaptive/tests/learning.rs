//! What is learnt and for how long, through the whole policy.

use super::super::super::Seen;
use super::super::super::fixtures::in_one_burst;
use super::*;

#[test]
fn a_model_without_a_profile_is_learnt_without_any_hand_over() {
    let mut terms = models(&[1]);
    terms[0].profile = None;
    let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
    let mut facts = facts(&[0], &[GPU]);
    assert_eq!(policy.decide(&facts).doors[0].max_batch, 16, "as configured");
    for _ in 0..4 {
        came(&mut facts.models[0], 100, 30);
        facts.now = facts.now + 500 * MS;
        let decision = policy.decide(&facts);
        assert_eq!(decision.plan, None);
        // Batches of four take 30 ms: not many more fit into 50.
        assert!((3..7).contains(&decision.doors[0].max_batch), "{:?}", decision.doors);
    }
}

#[test]
fn an_order_that_is_not_carried_out_is_no_new_finding() {
    let terms = models(&[1, 1]);
    let level_is_kept_s = |notices: usize| {
        let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
        let mut facts = facts(&[200; 2], &policy.initial());
        pass(&mut policy, &mut facts, &[200; 2], 40);
        assert!(facts.models[0].share < GPU);
        for _ in 0..notices {
            let to = pressure(&mut policy, &facts).map(|change| change.to);
            assert_eq!(to, Some(GPU));
        }
        facts.models[0].share = GPU;
        let shrinks = (1..10_000).find(|_| !pass(&mut policy, &mut facts, &[20, 200], 1).is_empty());
        shrinks.map(|intervals| intervals / 2)
    };
    assert_eq!(level_is_kept_s(8), level_is_kept_s(1));
    assert!(level_is_kept_s(1).is_some_and(|seconds| (110..200).contains(&seconds)));
}

/// A model that had the whole GPU for some minutes, since its requests came in bursts, and then so many intervals of as many that
/// do not; and the first one in which it has less.
fn shrinks_after_bursts(bursts: u32, mut then: impl FnMut(&mut Facts)) -> Option<u32> {
    let mut policy = Policy::new(Kind::Adaptive, &[GPU], &models(&[1]));
    let mut facts = facts(&[50], &policy.initial());
    let mut see = |facts: &mut Facts, bursty: bool| {
        came(&mut facts.models[0], 50, 9);
        if bursty {
            facts.models[0] = in_one_burst(facts.models[0].clone());
        }
        facts.now = facts.now + 500 * MS;
        let decision = policy.decide(facts);
        carry_out(&decision, facts);
        facts.models[0].share < GPU
    };
    assert!(!(0..bursts).any(|_| see(&mut facts, true)));
    facts.models[0].seen = Seen::default();
    (0..1_000).find(|_| {
        then(&mut facts);
        see(&mut facts, false)
    })
}

#[test]
fn who_has_come_to_rest_does_not_shrink_because_of_what_is_forgotten() {
    assert!(shrinks_after_bursts(0, |_| ()).is_some_and(|intervals| intervals < 20));
    assert_eq!(shrinks_after_bursts(400, |_| ()), None);
}

#[test]
fn who_is_held_is_not_at_rest() {
    let mut intervals = 0;
    let shrinks = shrinks_after_bursts(400, |facts| {
        intervals += 1;
        facts.models[0].held = intervals < 600;
    });
    assert!(shrinks.is_some_and(|at| (590..640).contains(&at)), "{shrinks:?}");
}

#[test]
fn what_is_only_recommended_is_recommended_for_as_long_as_it_is_right() {
    let mut policy = Policy::new(Kind::Adaptive, &[GPU], &models(&[1]));
    let mut facts = facts(&[50], &policy.initial());
    for _ in 0..400 {
        came(&mut facts.models[0], 50, 9);
        facts.now = facts.now + 500 * MS;
        let _ = policy.decide(&facts);
    }
    assert!(matches!(policy.decide(&facts).report[0], Verdict::Shrink { .. }));
}

#[test]
fn who_has_come_to_rest_grows_if_more_comes() {
    let mut policy = Policy::new(Kind::Adaptive, &[GPU], &models(&[1]));
    let mut facts = facts(&[20], &policy.initial());
    pass(&mut policy, &mut facts, &[20], 200);
    let less = facts.models[0].share;
    assert!(less < GPU);
    pass(&mut policy, &mut facts, &[300], 20);
    assert!(facts.models[0].share > less);
    assert!(!pass(&mut policy, &mut facts, &[20], 100).is_empty(), "and shrinks after it");
}

/// Whether the first of these models, with that share, is at rest after a minute in which so many requests came in each half of a second, and
/// nothing was executed of models without a profile.
fn rests(terms: &[Terms], share: Sms, arrived: &[u64]) -> bool {
    let mut adaptive = Adaptive::new(&[GPU], terms);
    let mut facts = facts(arrived, &vec![share; terms.len()]);
    for _ in 0..120 {
        for ((live, &arrived), terms) in facts.models.iter_mut().zip(arrived).zip(terms) {
            came(live, arrived, 9);
            if terms.profile.is_none() {
                live.seen.executed.clear();
            }
        }
        facts.now = facts.now + 500 * MS;
        let decision = adaptive.decide(terms, &facts);
        assert!(!decision.plan.is_some_and(|plan| plan.changes.iter().any(|change| change.model == 0)));
    }
    adaptive.models[0].is_at_rest()
}

#[test]
fn who_has_about_the_right_share_comes_to_rest_and_who_does_not_know_it_does_not() {
    let known = models(&[1]);
    assert!(rests(&known, Sms(56), &[20]), "52 are as good");
    let unknown = vec![Terms { profile: None, ..known[0].clone() }];
    assert!(!rests(&unknown, GPU, &[20]));
}

#[test]
fn who_keeps_his_share_in_overload_comes_to_rest() {
    assert!(rests(&models(&[1, 1]), GPU, &[20, 5_000]));
}
