//! Workers that stand ready, or will.

use super::*;

#[test]
fn all_that_a_model_may_need_stands_ready() {
    let terms = models(&[1, 1]);
    let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
    let mut facts = facts(&[50; 2], &policy.initial());
    assert_eq!(policy.decide(&facts).standby, [None, None]);
    pass(&mut policy, &mut facts, &[50; 2], 20);
    assert_eq!(policy.decide(&facts).standby, [Some(GPU), Some(GPU)]);
}

#[test]
fn a_standing_worker_of_about_the_right_share_takes_over_at_once() {
    let terms = models(&[1]);
    let mut facts = facts(&[2_000], &[Sms(10)]);
    facts.models[0].standing = Some(Sms(126));
    let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
    let change = Change { model: 0, from: Sms(10), to: Sms(126), at_once: true, onset: facts.now };
    assert_eq!(pressure(&mut policy, &facts), Some(change.clone()));
    let began = Moment::after_origin(facts.now.since_origin() - 500 * MS);
    assert_eq!(policy.decide(&facts).plan.unwrap().changes, [Change { onset: began, ..change }]);
    facts.models[0].held = true;
    assert_eq!(pressure(&mut policy, &facts), None);
    assert_eq!(policy.pressure(7, facts.now, &facts), None, "no such model");
}

#[test]
fn who_makes_room_does_not_get_more_because_it_stands_ready() {
    let standing = Live { standing: Some(GPU), ..live(Sms(34)) };
    let facts = facts(&[100], &[Sms(34)]);
    let to = |level: u32| moved(Sms(80), Sms(level), &standing, facts.now);
    assert_eq!(to(132), Verdict::Grow { from: Sms(34), to: GPU });
    assert_eq!(to(86), Verdict::Grow { from: Sms(34), to: Sms(80) });
}

#[test]
fn a_worker_that_starts_with_more_than_is_needed_is_waited_for_and_not_replaced() {
    let facts = facts(&[100], &[Sms(34)]);
    let to = |starting: u32, level: u32| {
        moved(Sms(40), Sms(level), &Live { starting: Some(Sms(starting)), ..live(Sms(34)) }, facts.now)
    };
    let grow = |to: u32| Verdict::Grow { from: Sms(34), to: Sms(to) };
    assert_eq!([to(86, 86), to(38, 86)], [grow(86), grow(38)]);
    assert_eq!([to(132, 86), to(16, 86)], [grow(40), grow(40)], "more than it may have, and too little");
    let both = Live { standing: Some(Sms(66)), starting: Some(GPU), ..live(Sms(34)) };
    assert_eq!(moved(Sms(40), GPU, &both, facts.now), grow(66), "who stands ready is there already");
}

#[test]
fn the_way_back_stands_ready_until_it_is_known_whether_room_helps() {
    let kept = |room_helps: bool, held: bool| {
        let terms = models(&[1, 3]);
        let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
        let mut facts = facts(&[100, 200], &policy.initial());
        let mut intervals = 0;
        for _ in 0..40 {
            came(&mut facts.models[0], 100, 9);
            came(&mut facts.models[1], 200, 9);
            let made_room = facts.models[1].share < GPU;
            facts.models[0].seen.in_time = if room_helps && made_room { 100 } else { 90 };
            facts.now = facts.now + 500 * MS;
            facts.models[1].standing = made_room.then_some(GPU);
            facts.models[1].held = made_room && held;
            let decision = policy.decide(&facts);
            intervals += u32::from(decision.standby[1] == Some(GPU));
            carry_out(&decision, &mut facts);
        }
        (intervals, policy.decide(&facts).standby[1])
    };
    let (intervals, standby) = kept(true, false);
    assert!(intervals >= 7, "eight intervals tell: {intervals}");
    assert_ne!(standby, Some(GPU), "it helps, so nobody goes back");
    assert_eq!(kept(false, false).1, Some(GPU), "it does not, so that is all that it may have again");
    assert_eq!(kept(true, true).0, 0, "nobody moves who is held");
}

#[test]
fn who_has_made_room_shrinks_no_further_until_it_is_known_whether_that_helps() {
    let terms = models(&[1, 3, 3]);
    let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
    let mut facts = facts(&[100, 60, 100], &policy.initial());
    let mut after = |policy: &mut Policy, intervals: u32, slow: bool| {
        let mut decision = Decision::default();
        for _ in 0..intervals {
            for (live, arrived) in facts.models.iter_mut().zip([100, 60, 100]) {
                came(live, arrived, 9);
            }
            facts.models[0].seen.in_time = if facts.models[1].share < GPU { 100 } else { 90 };
            facts.models[2].coming = slow.then_some(Sms(66));
            facts.now = facts.now + 500 * MS;
            decision = policy.decide(&facts);
            carry_out(&decision, &mut facts);
        }
        (facts.models[1].share, decision.report[1])
    };
    let (share, verdict) = after(&mut policy, 20, true);
    assert_eq!(share, Sms(66));
    assert!(matches!(verdict, Verdict::Wait { waiting: Waiting::Trial, .. }), "{verdict:?}");
    assert!(after(&mut policy, 16, false).0 < Sms(66));
}
