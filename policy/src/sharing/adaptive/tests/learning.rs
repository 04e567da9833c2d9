//! What is learnt and for how long, through the whole policy.

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
