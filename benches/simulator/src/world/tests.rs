use proptest::prelude::{prop_assert, prop_assert_eq, proptest};
use shadowslice_policy::sharing::{AdmissionPolicy, Observation, ShareChange};
use shadowslice_shared::units::{Sms, Timestamp};

use super::*;
use crate::loads::Named;
use crate::scenario::Served;
use crate::scenario::fixtures::{model, on_one_gpu};

const MS: u64 = 1_000_000;

const SETTINGS: Settings = Settings {
    interval: Duration::from_millis(500),
    dwell: Duration::from_secs(5),
    interference: false,
    sharing: Sharing::Turns,
    noise: 0.0,
    seed: 1,
};

fn at(ms: u64) -> Arrival {
    Arrival { at: moment(ms * MS), model: 0 }
}

fn keep(_: &PolicyInput) -> Decision {
    Decision::default()
}

/// Asks for one change after another, each at its tick (counted from 1), and keeps what was seen.
struct Script {
    changes: Vec<(usize, ShareChange)>,
    seen: Vec<PolicyInput>,
}

impl Script {
    fn new(changes: Vec<(usize, ShareChange)>) -> Self {
        Self { changes, seen: Vec::new() }
    }

    fn run(&mut self, scenario: &Scenario, arrivals: Vec<Arrival>) -> Outcome {
        run(scenario, &SETTINGS, arrivals, &mut |facts| {
            self.seen.push(facts.clone());
            let tick = self.seen.len();
            let due = self.changes.iter().filter(|(at, _)| *at == tick).map(|(_, change)| change.clone());
            Decision { changes: due.collect(), ..Decision::default() }
        })
    }

    /// What was seen of the only model at that tick.
    fn at(&self, tick: usize) -> &shadowslice_policy::sharing::ModelSnapshot {
        &self.seen[tick - 1].models[0]
    }
}

fn change(to: u32, at_once: bool) -> ShareChange {
    ShareChange { model: 0, from: Sms(50), to: Sms(to), groups: None, at_once }
}

#[test]
fn an_m_d_1_queue_waits_as_pollaczek_and_khinchine_say() {
    // Half loaded, request by request: a mean wait of rho / (2 (1 - rho)) = a half of the service
    // time.
    let scenario = on_one_gpu(100, vec![model("a", 10.0)]);
    let arrivals = Named::Poisson.arrivals(&scenario, 3, 4_000.0, 0.25);
    let outcome = run(&scenario, &SETTINGS, arrivals, &mut keep);
    let tally = &outcome.models[0].tally;
    assert!(tally.answered > 190_000);
    let mean_ms = tally.mean_ns() as f64 / 1e6;
    assert!((mean_ms - 15.0).abs() < 0.3, "{mean_ms} ms instead of 15");
}

#[test]
fn batches_form_while_another_executes() {
    let mut served = model("a", 10.0);
    served.terms.max_batch = 8;
    let scenario = on_one_gpu(100, vec![served]);
    let mut sizes = Vec::new();
    let mut ask = |facts: &PolicyInput| {
        sizes.extend(facts.models[0].observation.batches.iter().map(|e| (e.rows, e.count)));
        Decision::default()
    };
    // One request executes; eight others wait for its end, and three for the end of those eight.
    let arrivals = (0..12).map(|n| Arrival { at: moment(n), model: 0 });
    let _outcome = run(&scenario, &SETTINGS, arrivals, &mut ask);
    assert_eq!(sizes, [(1, 1), (3, 1), (8, 1)]);
}

#[test]
fn an_incomplete_batch_waits_for_its_delay() {
    let mut served = model("a", 10.0);
    served.terms.max_batch = 8;
    served.max_delay = Duration::from_millis(30);
    let outcome = run(&on_one_gpu(100, vec![served]), &SETTINGS, [at(0), at(20)], &mut keep);
    let tally = &outcome.models[0].tally;
    assert_eq!((tally.answered, tally.mean_ns() / MS), (2, 40), "both at 50 ms, in one batch of 20 ms");
}

#[test]
fn a_hand_over_starts_a_shadow_and_takes_over_between_batches() {
    let scenario = on_one_gpu(100, vec![model("a", 100.0)]);
    let mut script = Script::new(vec![(1, change(40, false)), (2, change(10, false))]);
    // The batch in flight at 3.5 s ends on the incumbent, while the shadow executes its own.
    let arrivals = vec![at(3_420), at(3_430), at(3_440), at(3_450), at(12_000)];
    let outcome = script.run(&scenario, arrivals);
    assert_eq!(script.at(2).pending_share, Some(Sms(40)));
    assert_eq!((script.at(6).share, script.at(6).standby_share), (Sms(50), None));
    let after = script.at(8);
    assert_eq!((after.share, after.pending_share, after.standby_share), (Sms(40), None, Some(Sms(50))));
    assert_eq!(after.share_since, moment(3_500 * MS), "0.5 s and three seconds of start");
    assert_eq!(script.at(17).standby_share, Some(Sms(50)));
    assert_eq!(script.at(18).standby_share, None, "it drained at 3.52 s and stood for 5 s");
    let executed = |tick: usize| script.at(tick).observation.batches.iter().map(|e| e.count).sum::<u64>();
    assert_eq!((executed(7), executed(8)), (0, 3), "only those at the new share");
    let tally = &outcome.models[0].tally;
    // The first ends at 3520 ms on the incumbent; the next end at 3625, 3750 and 3875 ms on the
    // shadow; the last one takes 125 ms. For 20 ms both execute beside each other, which costs the
    // incumbent 1.6 ms, and each of the next three 1.8.
    assert_eq!(tally.latency_sum_ns / u128::from(MS), 100 + 195 + 310 + 425 + 125 + 7);
    assert_eq!(
        outcome.models[0].repartitions,
        [3_500 * MS],
        "the second change came while the first was under way"
    );
}

#[test]
fn a_standing_worker_takes_over_at_once() {
    let scenario = on_one_gpu(100, vec![model("a", 100.0)]);
    let mut script =
        Script::new(vec![(1, change(26, false)), (10, change(50, true)), (11, change(30, true))]);
    let outcome = script.run(&scenario, vec![at(0), at(9_000)]);
    assert_eq!(script.at(10).share, Sms(26));
    let back = script.at(11);
    assert_eq!(
        (back.share, back.share_since, back.standby_share),
        (Sms(50), moment(5_000 * MS), Some(Sms(26)))
    );
    assert_eq!(script.at(12).pending_share, Some(Sms(30)), "none stands at 30 SMs, so a shadow must start");
    assert_eq!(script.at(12).standby_share, None, "the parked one made room for it");
    assert_eq!(outcome.models[0].repartitions, [3_500 * MS, 5_000 * MS, 8_500 * MS]);
}

#[test]
fn a_hopeless_request_is_refused_at_the_door_if_the_policy_says_so() {
    let mut served = model("a", 10.0);
    served.terms.slo = Duration::from_millis(35);
    let in_time = |serve_late, refuse_late| {
        let scenario = on_one_gpu(100, vec![Served { serve_late, ..served.clone() }]);
        let admissions = vec![AdmissionPolicy { refuse_late, ..AdmissionPolicy::accept_all(1) }];
        let arrivals = (0..100).map(|_| at(600)).collect::<Vec<_>>();
        let outcome = run(&scenario, &SETTINGS, arrivals, &mut |_| Decision {
            admissions: admissions.clone(),
            ..Decision::default()
        });
        let tally = &outcome.models[0].tally;
        (tally.in_time, tally.answered, tally.refused)
    };
    assert_eq!(in_time(false, true), (3, 3, 97));
    assert_eq!(in_time(true, true).2, 0, "asked to serve late ones all the same");
    assert_eq!(in_time(false, false).2, 0);
}

#[test]
fn no_share_is_ever_nothing() {
    let scenario = on_one_gpu(100, vec![model("a", 1.0)]);
    let mut script = Script::new(vec![(1, change(0, false)), (9, change(9_999, false))]);
    let _outcome = script.run(&scenario, vec![at(8_100)]);
    assert_eq!(script.at(8).share, Sms(2));
    assert_eq!(script.at(16).share, Sms(100));
}

#[test]
fn noise_spreads_execution_times_around_the_profiles() {
    let scenario = on_one_gpu(100, vec![model("a", 10.0)]);
    let noisy = Settings { noise: 0.1, ..SETTINGS };
    let arrivals = (0..2_000).map(|n| at(n * 100));
    let outcome = run(&scenario, &noisy, arrivals, &mut keep);
    let tally = &outcome.models[0].tally;
    assert!(tally.mean_ns().abs_diff(10 * MS) < MS / 10);
    let p99 = tally.latency.value_at_quantile(0.99);
    assert!(p99.abs_diff(12_330_000) < 300_000, "{p99}");
}

#[test]
fn inside_a_worker_a_share_changes_with_the_next_batch() {
    let served = Served { in_process: true, ..model("a", 100.0) };
    let scenario = on_one_gpu(100, vec![served.clone(), Served { in_process: true, ..model("b", 1.0) }]);
    // Of 100 SMs, 4 are left over; 26 SMs need four groups of 8.
    let mut script = Script::new(vec![(1, change(26, false))]);
    let outcome = script.run(&scenario, vec![at(420), at(430)]);
    assert_eq!((script.at(1).share, script.at(1).standby_share), (Sms(56), None));
    let after = script.at(2);
    assert_eq!((after.share, after.share_since, after.pending_share), (Sms(32), moment(500 * MS), None));
    let latency = outcome.models[0].tally.latency_sum_ns / u128::from(MS);
    // Up to 520 ms as before, then 100 ms times 50 / 32.
    assert_eq!(latency, 100 + 90 + 156);
    assert_eq!(outcome.models[0].repartitions, [500 * MS]);
    assert!(outcome.models[1].repartitions.is_empty());
}

#[test]
fn models_that_fit_beside_each_other_share_no_group() {
    let inside = |name, sms: u32| {
        let mut served = Served { in_process: true, ..model(name, 10.0) };
        served.terms.initial = Sms(sms);
        served
    };
    let busy = (0..100).flat_map(|n| [0, 1].map(|model| Arrival { at: moment(n * 20 * MS), model }));
    let worst = |sms| {
        let scenario = on_one_gpu(104, vec![inside("a", sms), inside("b", sms)]);
        let outcome = run(&scenario, &SETTINGS, busy.clone(), &mut keep);
        outcome.models.iter().map(|model| model.tally.mean_ns()).max().unwrap_or_default()
    };
    let beside: f64 = 1.0 + 0.2 * 48.0 / 104.0;
    let alone = 10.0 * 50.0 / 48.0;
    assert_eq!(worst(48), (alone * beside * 1e6).round() as u64, "no turns, but caches are shared");
    assert!(worst(96) > 14 * MS, "they take turns");
}

#[test]
fn a_policy_sees_every_interval_whole() {
    let scenario = on_one_gpu(100, vec![model("a", 10.0)]);
    let mut script = Script::new(vec![]);
    let _outcome = script.run(&scenario, (0..200).map(|n| at(n * 10)).collect());
    let Observation { span, arrived, answered, in_time, busy, mean_latency, .. } =
        script.at(2).observation.clone();
    assert_eq!((span, arrived, answered, in_time), (Duration::from_millis(500), 50, 50, 50));
    assert!((busy - 1.0).abs() < 1e-9);
    assert_eq!(mean_latency, Duration::from_millis(10));
    assert_eq!(script.seen[1].now, Timestamp::after_origin(Duration::from_secs(1)));
}

proptest! {
    #[test]
    fn whatever_comes_nothing_is_lost_and_a_seed_says_it_all(
        seed in 0..1_000_u64,
        load in 0..Named::ALL.len(),
        utilisation in 0.1..3.0_f64,
        moves in proptest::collection::vec((0..3_usize, 0..120_u32, proptest::bool::ANY), 0..30),
        refuse_late in proptest::bool::ANY,
        serve_late in proptest::bool::ANY,
        interference in proptest::bool::ANY,
        sharing in proptest::sample::select(vec![Sharing::Turns, Sharing::Proportional, Sharing::Slices]),
        in_process in proptest::bool::ANY,
    ) {
        let served = |index: usize| {
            let mut served = model(&format!("m{index}"), 4.0 + index as f64);
            served.terms.slo = Duration::from_millis(40);
            served.terms.max_batch = 1 << index;
            served.truth.bandwidth = 0.5;
            Served { max_queued: 50, serve_late, in_process, ..served }
        };
        let scenario = on_one_gpu(100, (0..3).map(served).collect());
        let settings = Settings { noise: 0.1, interference, sharing, seed, ..SETTINGS };
        let arrivals = || Named::ALL[load].1.arrivals(&scenario, seed, 10.0, utilisation);
        let once = || {
            let mut tick = 0;
            run(&scenario, &settings, arrivals(), &mut |_| {
                let due = moves.get(tick).map(|&(model, to, at_once)| ShareChange { model, from: Sms(0), to: Sms(to), groups: None, at_once });
                tick += 1;
                let admissions = vec![AdmissionPolicy { refuse_late, ..AdmissionPolicy::accept_all(4) }; 3];
                Decision { changes: due.into_iter().collect(), admissions, ..Decision::default() }
            })
        };
        let outcome = once();
        let offered = arrivals().count() as u64;
        let sum = |part: fn(&ModelOutcome) -> u64| outcome.models.iter().map(part).sum::<u64>();
        prop_assert_eq!(sum(|m| m.tally.arrived), offered);
        prop_assert_eq!(sum(|m| m.tally.answered + m.tally.refused + m.pending), offered);
        for (model, again) in outcome.models.iter().zip(&once().models) {
            prop_assert!(model.tally.in_time <= model.tally.answered && model.share >= 2);
            prop_assert_eq!(model.tally.latency_sum_ns, again.tally.latency_sum_ns);
            prop_assert_eq!(model.tally.in_time, again.tally.in_time);
        }
    }
}
