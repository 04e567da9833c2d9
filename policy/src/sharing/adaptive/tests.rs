//! The whole policy, as an executor meets it.

mod doors;
mod learning;
mod peers;
mod standing;
mod waits;

use proptest::prelude::*;
use shadowslice_shared::units::{Moment, Sms};

use super::super::fixtures::{live, profile, terms};
use super::super::{Executed, Kind, Policy};
use super::*;
use crate::pressure::{Pressure, Sign};

const GPU: Sms = Sms(132);
const MS: Duration = Duration::from_millis(1);

/// What came in half a second, answered in batches of four that took `ms` each.
fn came(live: &mut Live, arrived: u64, ms: u64) {
    let seen = &mut live.seen;
    (seen.span, seen.arrived, seen.answered, seen.in_time) = (500 * MS, arrived, arrived, arrived);
    seen.executed = vec![Executed { rows: 4, count: arrived / 4, mean: MS * ms as u32 }];
    seen.busy = (arrived / 4 * ms) as f64 / 500.0;
}

/// A tenth of the answers were late.
fn miss(live: &mut Live) {
    live.seen.in_time = live.seen.answered * 9 / 10;
}

/// Models of these priorities, of 2 ms and 70 ms·SM a row, with an SLO of 50 ms.
fn models(priorities: &[u32]) -> Vec<Terms> {
    let model = |&priority: &u32| Terms { priority, profile: Some(profile(2.0, 70.0, 66)), ..terms("a", 50) };
    priorities.iter().map(model).collect()
}

/// Half a second in which this many requests came for each model.
fn facts(arrived: &[u64], shares: &[Sms]) -> Facts {
    let model = |(&arrived, &share): (&u64, &Sms)| {
        let mut live = live(share);
        came(&mut live, arrived, 9);
        live
    };
    Facts {
        now: Moment::after_origin(Duration::from_secs(60)),
        gpus: vec![GPU],
        models: arrived.iter().zip(shares).map(model).collect(),
    }
}

fn carry_out(decision: &Decision, facts: &mut Facts) {
    for change in decision.plan.iter().flat_map(|plan| &plan.changes) {
        let live = &mut facts.models[change.model];
        (live.share, live.since) = (change.to, facts.now);
    }
}

/// The change that pressure on the first model brings.
fn pressure(policy: &mut Policy, facts: &Facts) -> Option<Change> {
    policy.pressure(0, facts.now, facts).map(|relief| relief.change)
}

/// Decides so many times, half a second apart, while this many requests come for each model.
fn pass(policy: &mut Policy, facts: &mut Facts, arrived: &[u64], times: u32) -> Vec<Change> {
    let mut changes = Vec::new();
    for _ in 0..times {
        for (live, &arrived) in facts.models.iter_mut().zip(arrived) {
            came(live, arrived, 9);
        }
        facts.now = facts.now + 500 * MS;
        let decision = policy.decide(facts);
        changes.extend(decision.plan.iter().flat_map(|plan| plan.changes.clone()));
        carry_out(&decision, facts);
    }
    changes
}

#[test]
fn a_share_follows_its_demand_once_and_stays() {
    let terms = models(&[1, 1, 2]);
    let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
    let mut facts = facts(&[50; 3], &policy.initial());
    assert_eq!(pass(&mut policy, &mut facts, &[50; 3], 8), [], "nothing is known yet");
    let changes = pass(&mut policy, &mut facts, &[50; 3], 8);
    assert_eq!(changes.len(), 3);
    assert!(changes.iter().all(|change| change.to < change.from), "{changes:?}");
    assert_eq!(pass(&mut policy, &mut facts, &[52, 47, 50], 100), [], "settled");
    let grown = pass(&mut policy, &mut facts, &[50, 500, 50], 2);
    assert_eq!(grown.iter().map(|change| change.model).collect::<Vec<_>>(), [1]);
    assert!(grown[0].to > grown[0].from);
    assert!(pass(&mut policy, &mut facts, &[50, 500, 50], 9).is_empty(), "not twice in a dwell time");
}

#[test]
fn nothing_moves_a_model_that_is_held_or_moving_or_was_just_moved() {
    let terms = models(&[1, 1, 1, 1]);
    let mut facts = facts(&[500; 4], &[Sms(10); 4]);
    facts.models[0].held = true;
    facts.models[1].coming = Some(Sms(16));
    facts.models[2].since = Moment::after_origin(Duration::from_secs(58));
    facts.models[3].coming = Some(GPU);
    let decision = Policy::new(Kind::Adaptive, &[GPU], &terms).decide(&facts);
    assert_eq!(decision.plan, None);
    let until = Moment::after_origin(Duration::from_secs(63));
    let expected = [Waiting::Held, Waiting::Handover, Waiting::Dwell { until }];
    for (verdict, expected) in decision.report.iter().zip(expected) {
        assert!(matches!(*verdict, Verdict::Wait { to, waiting } if waiting == expected && to > Sms(16)));
    }
    assert_eq!(decision.report[3], Verdict::Keep, "what comes is right");
}

#[test]
fn a_share_that_was_too_little_is_not_come_back_to() {
    let terms = models(&[1]);
    let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
    let mut facts = facts(&[50], &policy.initial());
    let mut shrunk = Vec::new();
    for _ in 0..10 {
        shrunk.extend(pass(&mut policy, &mut facts, &[50], 30).iter().map(|change| change.to));
        facts.models[0].standing = Some(GPU);
        let Some(change) = pressure(&mut policy, &facts) else { break };
        (facts.models[0].share, facts.models[0].standing) = (change.to, None);
    }
    assert_eq!(shrunk.len(), 1, "{shrunk:?}");
    assert!(!pass(&mut policy, &mut facts, &[5], 240).is_empty(), "less demand needs less");
    // A burst shows how large it was only after slack ran out.
    facts.models[0].standing = Some(GPU);
    assert!(pressure(&mut policy, &facts).is_some());
    (facts.models[0].share, facts.models[0].standing) = (GPU, None);
    assert_eq!(pass(&mut policy, &mut facts, &[50], 20), []);
    assert_eq!(pass(&mut policy, &mut facts, &[5], 240), [], "for longer than the first time");
    assert!(!pass(&mut policy, &mut facts, &[5], 480).is_empty(), "the burst is over");
}

#[test]
fn more_than_a_share_is_for_is_watched_for_where_a_larger_one_helps() {
    let terms = models(&[1, 1]);
    let facts = facts(&[50, 50], &[Sms(40), GPU]);
    let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
    let doors = policy.decide(&facts).doors;
    let alarms = doors.iter().map(|door| {
        let mut pressure = Pressure::default();
        let mut note = |now: Moment| pressure.note(None, now, door.watch, now);
        (0..1_000).find_map(|ms| note(facts.now + MS * ms)).map(|alarm| alarm.sign)
    });
    assert_eq!(alarms.collect::<Vec<_>>(), [Some(Sign::TooManyCome), None]);
}

/// The shares of a model in half a minute, one after the other, that sees this at each.
fn shares_of_who(sees: impl Fn(&mut Live)) -> Vec<Sms> {
    let mut policy = Policy::new(Kind::Adaptive, &[GPU], &models(&[1]));
    let (mut facts, mut shares) = (facts(&[0], &policy.initial()), Vec::new());
    for _ in 0..60 {
        sees(&mut facts.models[0]);
        facts.now = facts.now + 500 * MS;
        let decision = policy.decide(&facts);
        carry_out(&decision, &mut facts);
        shares.push(facts.models[0].share);
    }
    shares.dedup();
    shares
}

#[test]
fn a_share_comes_back_without_which_clients_wait_longer_or_the_slo_is_missed() {
    // Four clients, one request each: an answer takes 4 ms with all SMs, and half as long again with fewer.
    let slowed_down = shares_of_who(|live| {
        let ms = if live.share == GPU { 4 } else { 6 };
        came(live, 4 * 500 / ms, ms);
        live.seen.mean_latency = MS * ms as u32;
    });
    let late = shares_of_who(|live| {
        came(live, 100, 9);
        live.seen.in_time = if live.share == GPU { 99 } else { 90 };
    });
    for shares in [slowed_down, late] {
        assert!(
            matches!(shares[..], [first, less, last] if first == GPU && less < GPU && last == GPU),
            "{shares:?}"
        );
    }
}

#[test]
fn fewer_requests_of_more_rows_are_as_large_a_demand() {
    let terms = vec![Terms { slo: 500 * MS, ..models(&[1]).remove(0) }];
    let moves = |rows: u64| {
        let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
        let mut facts = facts(&[50], &policy.initial());
        let shrunk = pass(&mut policy, &mut facts, &[50], 30);
        facts.models[0].standing = Some(GPU);
        let change = pressure(&mut policy, &facts).unwrap();
        (facts.models[0].share, facts.models[0].standing) = (change.to, None);
        // For longer than a level is kept whatever comes.
        let after = (0..400).any(|_| {
            came(&mut facts.models[0], 10, 9);
            facts.models[0].seen.rows = 10 * rows;
            facts.now = facts.now + 500 * MS;
            policy.decide(&facts).plan.is_some_and(|plan| !plan.changes.is_empty())
        });
        (shrunk.len(), after)
    };
    assert_eq!([1, 5].map(moves), [(1, true), (1, false)]);
}

#[test]
fn where_nobody_stands_ready_pressure_starts_a_shadow_once_in_a_dwell_time() {
    let terms = models(&[1]);
    let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
    let mut facts = facts(&[50], &[Sms(10)]);
    let change = Change { model: 0, from: Sms(10), to: GPU, at_once: false, onset: facts.now };
    assert_eq!(pressure(&mut policy, &facts), Some(change));
    facts.models[0].since = Moment::after_origin(Duration::from_secs(57));
    assert_eq!(pressure(&mut policy, &facts), None, "too soon");
    (facts.models[0].since, facts.models[0].coming) = (Moment::default(), Some(Sms(40)));
    assert_eq!(pressure(&mut policy, &facts), None, "one is under way");
    (facts.models[0].coming, facts.models[0].share) = (None, Sms(128));
    assert_eq!(pressure(&mut policy, &facts), None, "all that there is");
}

#[test]
fn no_share_shrinks_in_overload() {
    let terms = models(&[1, 1]);
    let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
    let mut facts = facts(&[5, 900], &policy.initial());
    assert_eq!(pass(&mut policy, &mut facts, &[5, 900], 30), []);
    assert!(!pass(&mut policy, &mut facts, &[5, 50], 30).is_empty(), "it is over");
}

#[test]
fn lower_priorities_make_room_for_who_goes_on_missing_his_slo_and_he_keeps_his_share() {
    for overloaded in [false, true] {
        let terms = models(&[1, 3]);
        let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
        let mut facts = facts(&[100, 200], &policy.initial());
        let mut shares = Vec::new();
        for _ in 0..60 {
            came(&mut facts.models[0], 100, 9);
            came(&mut facts.models[1], if overloaded { 2_000 } else { 200 }, 9);
            // Kernels take turns: less for the one is what helps the other.
            let crowded = facts.models[1].share > Sms(68);
            facts.models[0].seen.in_time = if crowded { 90 } else { 100 };
            facts.now = facts.now + 500 * MS;
            let decision = policy.decide(&facts);
            carry_out(&decision, &mut facts);
            shares.push(facts.shares());
        }
        assert_eq!(shares[..7], vec![vec![GPU; 2]; 7][..], "{overloaded}");
        let at_most = if overloaded { Sms(68)..=Sms(68) } else { Sms(34)..=Sms(68) };
        assert!(
            shares[20..].iter().all(|shares| shares[0] == GPU && at_most.contains(&shares[1])),
            "{shares:?}"
        );
    }
}

#[test]
fn nobody_makes_room_for_who_is_asked_for_more_than_the_gpu_could_answer() {
    // Of few SMs' use: what it asks for is little, and still too much for it.
    let mut terms = models(&[1, 3]);
    terms[0].profile = Some(profile(2.0, 70.0, 20));
    let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
    let mut facts = facts(&[400, 2_000], &policy.initial());
    for _ in 0..60 {
        came(&mut facts.models[0], 400, 9);
        came(&mut facts.models[1], 2_000, 9);
        facts.models[0].seen.in_time = 300;
        facts.now = facts.now + 500 * MS;
        let decision = policy.decide(&facts);
        carry_out(&decision, &mut facts);
    }
    assert_eq!(facts.shares(), [GPU; 2]);
}

#[test]
fn doors_suit_the_share_that_pressure_brings_at_once() {
    let terms = models(&[1, 1]);
    let doors = |standing: Option<Sms>, share: Sms| {
        let mut facts = facts(&[50, 50], &[share, Sms(66)]);
        facts.models[0].standing = standing;
        // What executed would say another thing beside each share.
        facts.models.iter_mut().for_each(|live| live.seen.executed.clear());
        let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
        let decided = policy.decide(&facts).doors;
        (decided, policy.pressure(0, facts.now, &facts).map(|relief| relief.doors))
    };
    let (small, relieved) = doors(Some(Sms(126)), Sms(10));
    let (large, _) = doors(None, Sms(126));
    assert_ne!(small, large);
    assert_eq!(relieved, Some(large));
    let (small, warming) = doors(None, Sms(10));
    assert_eq!(warming, Some(small), "until the shadow is warm the share is what it was");
}

#[test]
fn where_slos_are_missed_for_no_want_of_sms_caps_come_to_fit() {
    let terms = models(&[1, 1, 1]);
    let fit = |arrived: [u64; 3]| {
        let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
        let mut facts = facts(&arrived, &policy.initial());
        let mut fit = false;
        for _ in 0..30 {
            let caps: u32 = facts.models.iter().map(|live| live.share.0).sum();
            fit |= caps <= GPU.0;
            for (live, arrived) in facts.models.iter_mut().zip(arrived) {
                came(live, arrived, 9);
                live.seen.in_time = if caps > GPU.0 { arrived * 3 / 5 } else { arrived };
            }
            facts.now = facts.now + 500 * MS;
            let decision = policy.decide(&facts);
            carry_out(&decision, &mut facts);
        }
        fit
    };
    assert!(fit([50; 3]));
    assert!(!fit([500, 0, 0]), "no share of the GPU carries a thousand requests a second");
}

#[test]
fn a_crowded_gpu_keeps_the_lowest_priority_out_first() {
    let shares = [Sms(132), Sms(106), Sms(86)];
    let admitted = |knee: u32, arrived: &[u64]| {
        let mut terms = models(&[1, 2, 3]);
        terms[0].profile = Some(profile(2.0, 70.0, knee));
        let mut facts = facts(arrived, &shares);
        facts.models[..2].iter_mut().for_each(miss);
        let decision = Policy::new(Kind::Adaptive, &[GPU], &terms).decide(&facts);
        (decision.doors.iter().map(|door| door.admit).collect::<Vec<_>>(), decision.report)
    };
    assert_eq!(admitted(66, &[100, 100, 100]).0, [1.0, 1.0, 1.0]);
    let (parts, report) = admitted(66, &[300, 300, 300]);
    assert_eq!(parts[..2], [1.0, 1.0]);
    assert!(parts[2] > 0.05 && parts[2] < 0.9, "{parts:?}");
    assert_eq!(report[2], Verdict::Crowded { percent: (parts[2] * 100.0) as u32 });
    let [half, whole] = [66, 132].map(|knee| admitted(knee, &[100_000, 300, 300]).0);
    assert_eq!([half[0], whole[0]], [1.0; 2], "the first priority is let in whole");
    assert!(half[1] == 1.0 && half[2] < 0.1, "as many as there may be take half of the GPU: {half:?}");
    assert!(whole[1] < 0.5 && whole[2] == 0.0, "{whole:?}");
    let second = admitted(66, &[100, 100_000, 100]).0[1];
    assert!(second < 0.1, "it has room for what it executes, and not for what it asks: {second}");
}

#[test]
fn in_overload_workers_start_for_the_highest_priorities_first() {
    let terms = models(&[3, 3, 2, 1]);
    let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
    let mut facts = facts(&[900; 4], &[Sms(20); 4]);
    let mut grown = Vec::new();
    for _ in 0..4 {
        let changes = pass(&mut policy, &mut facts, &[900; 4], 1);
        grown.extend(changes.iter().map(|change| change.model));
    }
    assert_eq!(grown, [3, 2, 0, 1], "one at a time");
}

#[test]
fn room_that_helps_is_kept_though_the_first_priority_would_do_with_less_itself() {
    let terms = models(&[1, 3]);
    for flood in [300, 3_000] {
        let mut policy = Policy::new(Kind::Adaptive, &[GPU], &terms);
        let mut facts = facts(&[100, flood], &[GPU; 2]);
        let mut suffered = 0;
        for _ in 0..2_400 {
            for (live, arrived) in facts.models.iter_mut().zip([100, flood]) {
                came(live, arrived, 9);
            }
            // Beside all of the other's SMs a tenth are late.
            facts.models[1].seen.busy = 1.0;
            if facts.models[1].share > Sms(100) {
                miss(&mut facts.models[0]);
                suffered += 1;
            }
            facts.now = facts.now + 500 * MS;
            let decision = policy.decide(&facts);
            carry_out(&decision, &mut facts);
        }
        assert!(suffered < 100, "{suffered} of 2,400 intervals beside {flood}");
    }
}

#[test]
fn an_slo_that_the_whole_gpu_cannot_keep_is_said() {
    let mut terms = models(&[1, 1]);
    terms[0].slo = MS;
    let decision = Policy::new(Kind::Adaptive, &[GPU], &terms).decide(&facts(&[50, 50], &[GPU, GPU]));
    assert_eq!(decision.report, [Verdict::Hopeless, Verdict::Keep]);
    assert_eq!(decision.doors[0].max_batch, 1);
}

proptest! {
    #[test]
    fn whatever_comes_every_decision_is_sane_and_a_fixpoint(
        models in prop::collection::vec(
            (1..4_u32, 0..2_000_u64, 0..2_000_u32, (0.0..101.0_f64, 0..40_u32, 0.0..1.0_f64), any::<bool>()), 1..12
        ),
        span in 0..1_000_u64,
    ) {
        let terms: Vec<Terms> = models.iter().map(|&(priority, _, slo, (percentile, batch, _), known)| Terms {
            priority,
            slo: MS * slo,
            percentile,
            max_batch: batch,
            profile: known.then(|| profile(0.5, 200.0, 40)),
            ..terms("a", 1)
        }).collect();
        let arrived: Vec<u64> = models.iter().map(|model| model.1).collect();
        let mut facts = facts(&arrived, &vec![Sms(12); terms.len()]);
        for (live, &(_, _, _, (_, _, kept), _)) in facts.models.iter_mut().zip(&models) {
            live.seen.span = MS * span as u32;
            live.seen.in_time = (live.seen.answered as f64 * kept) as u64;
        }
        for kind in Kind::ALL {
            let mut policy = Policy::new(kind, &[GPU], &terms).with_our_doors();
            let mut facts = facts.clone();
            let decision = policy.decide(&facts);
            for change in decision.plan.iter().flat_map(|plan| &plan.changes) {
                prop_assert!(change.to >= terms[change.model].min && change.to <= terms[change.model].max);
            }
            for (door, terms) in decision.doors.iter().zip(&terms) {
                prop_assert!(door.max_batch >= 1 && door.max_batch <= terms.max_batch.max(1));
                prop_assert!(door.max_delay <= terms.slo);
                prop_assert!((0.0..=1.0).contains(&door.admit));
            }
            if kind == Kind::Adaptive {
                carry_out(&decision, &mut facts);
                // In overload one change comes after the other.
                let mut again = policy.decide(&facts);
                for _ in 0..terms.len() {
                    carry_out(&again, &mut facts);
                    again = policy.decide(&facts);
                }
                prop_assert_eq!(&again.plan, &None);
                let third = policy.decide(&facts);
                prop_assert_eq!(&third.doors, &again.doors);
                prop_assert_eq!(&third.report, &again.report);
            }
        }
    }

    #[test]
    fn a_lower_priority_never_takes_anything_from_a_higher(
        high in 0..1_000_u64, low in 0..10_000_u64, other in 0..10_000_u64
    ) {
        let terms = models(&[1, 2, 3]);
        let shares = [Sms(132), Sms(106), Sms(86)];
        let admitted = |lowest: u64| {
            let mut facts = facts(&[high, low, lowest], &shares);
            facts.models.iter_mut().for_each(|live| live.seen.executed.clear());
            let decision = Policy::new(Kind::Adaptive, &[GPU], &terms).decide(&facts);
            [decision.doors[0].admit, decision.doors[1].admit]
        };
        prop_assert_eq!(admitted(0), admitted(other));
    }
}

#[test]
fn a_hundred_models_on_ten_gpus_are_decided() {
    let mut terms = models(&(0..100).map(|model| 1 + model % 3).collect::<Vec<_>>());
    terms.iter_mut().enumerate().for_each(|(model, terms)| terms.gpu = model / 10);
    let gpus = [GPU; 10];
    let mut policy = Policy::new(Kind::Adaptive, &gpus, &terms);
    let mut facts = facts(&[40; 100], &policy.initial());
    facts.gpus = gpus.to_vec();
    for round in 0..100_u64 {
        came(&mut facts.models[round as usize], 40 + round, 9);
        facts.now = facts.now + 500 * MS;
        let decision = policy.decide(&facts);
        assert_eq!(decision.doors.len(), 100);
        assert!(decision.doors.iter().all(|door| door.max_batch > 0 && door.admit >= 0.0));
    }
}
