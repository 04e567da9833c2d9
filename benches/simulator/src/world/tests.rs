use proptest::prelude::{prop_assert, prop_assert_eq, proptest};
use shadowslice_policy::sharing::{AdmissionPolicy, Observation, ShareChange};
use shadowslice_shared::profile::ProcessMemory;
use shadowslice_shared::units::{Sms, Timestamp};

use super::*;
use crate::loads::NamedLoad;
use crate::scenario::fixtures::{model, on_one_gpu};
use crate::scenario::{ScenarioModel, SleepRule};

const MS: u64 = 1_000_000;

pub(super) const SETTINGS: WorldSettings = WorldSettings {
    interval: Duration::from_millis(500),
    dwell: Duration::from_secs(5),
    interference: false,
    sharing: GpuSharing::Turns,
    pause: true,
    noise: 0.0,
    seed: 1,
};

const AFTER_A_SECOND: SleepRule = SleepRule::After(Duration::from_secs(1));

fn at(ms: u64) -> SimulatedArrival {
    SimulatedArrival { at: timestamp(ms * MS), model: 0 }
}

pub(super) fn keep(_: &PolicyInput) -> Decision {
    Decision::default()
}

/// A policy that requests the given changes, and records its inputs. Each change has the number of
/// the tick at which it is requested, counted from 1.
struct Script {
    changes: Vec<(usize, ShareChange)>,
    seen: Vec<PolicyInput>,
}

impl Script {
    fn new(changes: Vec<(usize, ShareChange)>) -> Self {
        Self { changes, seen: Vec::new() }
    }

    fn run(&mut self, scenario: &Scenario, arrivals: Vec<SimulatedArrival>) -> WorldOutcome {
        run(scenario, &SETTINGS, arrivals, &mut |facts| {
            self.seen.push(facts.clone());
            let tick = self.seen.len();
            let due = self.changes.iter().filter(|(at, _)| *at == tick).map(|(_, change)| change.clone());
            Decision { changes: due.collect(), ..Decision::default() }
        })
    }

    /// Returns the policy's data about the only model at this tick.
    fn at(&self, tick: usize) -> &shadowslice_policy::sharing::ModelSnapshot {
        &self.seen[tick - 1].models[0]
    }
}

fn change(to: u32, at_once: bool) -> ShareChange {
    ShareChange { model: 0, from: Sms(50), to: Sms(to), groups: None, at_once }
}

#[test]
fn an_m_d_1_queue_waits_as_pollaczek_and_khinchine_say() {
    // In theory, the mean wait is rho / (2 (1 - rho)) service times. At a load rho of 0.5, that is
    // half a service time.
    let scenario = on_one_gpu(100, vec![model("a", 10.0)]);
    let arrivals = NamedLoad::Poisson.arrivals(&scenario, 3, 4_000.0, 0.25);
    let outcome = run(&scenario, &SETTINGS, arrivals, &mut keep);
    let tally = &outcome.models[0].tally;
    assert!(tally.answered > 190_000);
    let mean_ms = tally.mean_ns() as f64 / 1e6;
    assert!((mean_ms - 15.0).abs() < 0.3, "{mean_ms} ms instead of 15");
}

#[test]
fn batches_form_while_another_executes() {
    let mut spec = model("a", 10.0);
    spec.terms.max_batch = 8;
    let scenario = on_one_gpu(100, vec![spec]);
    let mut sizes = Vec::new();
    let mut decide = |facts: &PolicyInput| {
        sizes.extend(facts.models[0].observation.batches.iter().map(|e| (e.rows, e.count)));
        Decision::default()
    };
    // The first request executes alone. Eight other requests wait for its end. The remaining three
    // requests wait for the end of the batch of eight.
    let arrivals = (0..12).map(|n| SimulatedArrival { at: timestamp(n), model: 0 });
    let _outcome = run(&scenario, &SETTINGS, arrivals, &mut decide);
    assert_eq!(sizes, [(1, 1), (3, 1), (8, 1)]);
}

#[test]
fn an_incomplete_batch_waits_for_its_delay() {
    let mut spec = model("a", 10.0);
    spec.terms.max_batch = 8;
    spec.max_delay = Duration::from_millis(30);
    let outcome = run(&on_one_gpu(100, vec![spec]), &SETTINGS, [at(0), at(20)], &mut keep);
    let tally = &outcome.models[0].tally;
    assert_eq!((tally.answered, tally.mean_ns() / MS), (2, 40), "both at 50 ms, in one batch of 20 ms");
}

#[test]
fn a_hand_over_starts_a_shadow_and_takes_over_between_batches() {
    let scenario = on_one_gpu(100, vec![model("a", 100.0)]);
    let mut script = Script::new(vec![(1, change(40, false)), (2, change(10, false))]);
    // The batch that is in flight at 3.5 s ends on the old worker. Meanwhile, the shadow already
    // executes other batches.
    let arrivals = vec![at(3_420), at(3_430), at(3_440), at(3_450), at(12_000)];
    let outcome = script.run(&scenario, arrivals);
    assert_eq!(script.at(2).pending_share, Some(Sms(40)));
    assert_eq!((script.at(6).share, script.at(6).standby_share), (Sms(50), None));
    let after = script.at(8);
    assert_eq!((after.share, after.pending_share, after.standby_share), (Sms(40), None, Some(Sms(50))));
    assert_eq!(after.share_since, timestamp(3_500 * MS), "0.5 s and three seconds of start");
    assert_eq!(script.at(17).standby_share, Some(Sms(50)));
    assert_eq!(
        script.at(18).standby_share,
        None,
        "the old worker drained at 3.52 s and was a standby for 5 s"
    );
    let executed = |tick: usize| script.at(tick).observation.batches.iter().map(|e| e.count).sum::<u64>();
    assert_eq!((executed(7), executed(8)), (0, 3), "only batches at the new share");
    let tally = &outcome.models[0].tally;
    // The first request ends on the old worker at 3520 ms. The next requests end on the shadow at
    // 3625, 3750 and 3875 ms, and the last request takes 125 ms. Both workers execute for 20 ms,
    // which delays the old worker by 1.6 ms and each of the next three requests by 1.8 ms.
    assert_eq!(tally.latency_sum_ns / u128::from(MS), 100 + 195 + 310 + 425 + 125 + 7);
    assert_eq!(outcome.models[0].repartitions, [3_500 * MS], "the second change came during the first one");
}

#[test]
fn a_standby_worker_takes_over_immediately() {
    let scenario = on_one_gpu(100, vec![model("a", 100.0)]);
    let mut script =
        Script::new(vec![(1, change(26, false)), (10, change(50, true)), (11, change(30, true))]);
    let outcome = script.run(&scenario, vec![at(0), at(9_000)]);
    assert_eq!(script.at(10).share, Sms(26));
    let back = script.at(11);
    assert_eq!(
        (back.share, back.share_since, back.standby_share),
        (Sms(50), timestamp(5_000 * MS), Some(Sms(26)))
    );
    assert_eq!(script.at(12).pending_share, Some(Sms(30)), "no standby has 30 SMs, so a shadow starts");
    assert_eq!(script.at(12).standby_share, None, "the standby stopped to make room");
    assert_eq!(outcome.models[0].repartitions, [3_500 * MS, 5_000 * MS, 8_500 * MS]);
}

#[test]
fn a_hopeless_request_is_refused_if_the_policy_enables_admission_control() {
    let mut spec = model("a", 10.0);
    spec.terms.slo = Duration::from_millis(35);
    let in_time = |serve_late, refuse_late| {
        let scenario = on_one_gpu(100, vec![ScenarioModel { serve_late, ..spec.clone() }]);
        let admission = vec![AdmissionPolicy { refuse_late, ..AdmissionPolicy::accept_all(1) }];
        let arrivals = (0..100).map(|_| at(600)).collect::<Vec<_>>();
        let outcome = run(&scenario, &SETTINGS, arrivals, &mut |_| Decision {
            admissions: admission.clone(),
            ..Decision::default()
        });
        let tally = &outcome.models[0].tally;
        (tally.in_time, tally.answered, tally.refused)
    };
    assert_eq!(in_time(false, true), (3, 3, 97));
    assert_eq!(in_time(true, true).2, 0, "`on_late: serve` has precedence");
    assert_eq!(in_time(false, false).2, 0);
}

#[test]
fn a_share_has_at_least_one_step() {
    let scenario = on_one_gpu(100, vec![model("a", 1.0)]);
    let mut script = Script::new(vec![(1, change(0, false)), (9, change(9_999, false))]);
    let _outcome = script.run(&scenario, vec![at(8_100)]);
    assert_eq!(script.at(8).share, Sms(2));
    assert_eq!(script.at(16).share, Sms(100));
}

#[test]
fn noise_spreads_execution_times_around_the_profiles() {
    let scenario = on_one_gpu(100, vec![model("a", 10.0)]);
    let noisy = WorldSettings { noise: 0.1, ..SETTINGS };
    let arrivals = (0..2_000).map(|n| at(n * 100));
    let outcome = run(&scenario, &noisy, arrivals, &mut keep);
    let tally = &outcome.models[0].tally;
    assert!(tally.mean_ns().abs_diff(10 * MS) < MS / 10);
    let p99 = tally.latency.value_at_quantile(0.99);
    assert!(p99.abs_diff(12_330_000) < 300_000, "{p99}");
}

#[test]
fn inside_a_worker_a_share_changes_with_the_next_batch() {
    let spec = ScenarioModel { in_process: true, ..model("a", 100.0) };
    let scenario = on_one_gpu(100, vec![spec.clone(), ScenarioModel { in_process: true, ..model("b", 1.0) }]);
    // The GPU has 100 SMs: twelve groups of 8 SMs, and 4 left-over SMs. A share of 26 SMs needs
    // four groups of 8 SMs.
    let mut script = Script::new(vec![(1, change(26, false))]);
    let outcome = script.run(&scenario, vec![at(420), at(430)]);
    assert_eq!((script.at(1).share, script.at(1).standby_share), (Sms(56), None));
    let after = script.at(2);
    assert_eq!((after.share, after.share_since, after.pending_share), (Sms(32), timestamp(500 * MS), None));
    let latency = outcome.models[0].tally.latency_sum_ns / u128::from(MS);
    // The first batch ends at 520 ms at the old share. The second batch takes 100 ms times 50 / 32
    // at the new share.
    assert_eq!(latency, 100 + 90 + 156);
    assert_eq!(outcome.models[0].repartitions, [500 * MS]);
    assert!(outcome.models[1].repartitions.is_empty());
}

#[test]
fn models_that_fit_together_share_no_group() {
    let inside = |name, sms: u32| {
        let mut spec = ScenarioModel { in_process: true, ..model(name, 10.0) };
        spec.terms.initial = Sms(sms);
        spec
    };
    let busy =
        (0..100).flat_map(|n| [0, 1].map(|model| SimulatedArrival { at: timestamp(n * 20 * MS), model }));
    let worst = |sms| {
        let scenario = on_one_gpu(104, vec![inside("a", sms), inside("b", sms)]);
        let outcome = run(&scenario, &SETTINGS, busy.clone(), &mut keep);
        outcome.models.iter().map(|model| model.tally.mean_ns()).max().unwrap_or_default()
    };
    let slowdown: f64 = 1.0 + 0.2 * 48.0 / 104.0;
    let alone = 10.0 * 50.0 / 48.0;
    assert_eq!(
        worst(48),
        (alone * slowdown * 1e6).round() as u64,
        "the models take no turns, but share caches"
    );
    assert!(worst(96) > 14 * MS, "the models take turns");
}

#[test]
fn a_policy_gets_the_facts_of_whole_intervals() {
    let scenario = on_one_gpu(100, vec![model("a", 10.0)]);
    let mut script = Script::new(vec![]);
    let _outcome = script.run(&scenario, (0..200).map(|n| at(n * 10)).collect());
    let Observation { span, arrived, answered, attainment, busy, mean_latency, .. } =
        script.at(2).observation.clone();
    assert_eq!((span, arrived, answered, attainment), (Duration::from_millis(500), 50, 50, Some(1.0)));
    assert!((busy - 1.0).abs() < 1e-9);
    assert_eq!(mean_latency, Duration::from_millis(10));
    assert_eq!(script.seen[1].now, Timestamp::after_origin(Duration::from_secs(1)));
}

proptest! {
    #[test]
    fn every_request_has_one_outcome_and_runs_depend_only_on_the_seed(
        seed in 0..1_000_u64,
        load in 0..NamedLoad::ALL.len(),
        utilisation in 0.1..3.0_f64,
        moves in proptest::collection::vec((0..3_usize, 0..120_u32, proptest::bool::ANY), 0..30),
        refuse_late in proptest::bool::ANY,
        serve_late in proptest::bool::ANY,
        interference in proptest::bool::ANY,
        sharing in proptest::sample::select(vec![GpuSharing::Turns, GpuSharing::Proportional, GpuSharing::Slices]),
        in_process in proptest::bool::ANY,
        memory in proptest::option::of(0..400_u64),
        sleep in proptest::sample::select(vec![SleepRule::Never, SleepRule::OnPressure, AFTER_A_SECOND]),
    ) {
        let spec = |index: usize| {
            let mut spec = model(&format!("m{index}"), 4.0 + index as f64);
            spec.terms.slo = Duration::from_millis(40);
            spec.terms.max_batch = 1 << index;
            spec.truth.bandwidth = 0.5;
            spec.truth.memory = ProcessMemory { context: 1, weights: 100, activations: 1 };
            ScenarioModel { max_queued: 50, serve_late, in_process, sleep, ..spec }
        };
        let memory = vec![memory];
        let scenario = Scenario { memory, ..on_one_gpu(100, (0..3).map(spec).collect()) };
        let settings = WorldSettings { noise: 0.1, interference, sharing, seed, ..SETTINGS };
        let arrivals = || NamedLoad::ALL[load].1.arrivals(&scenario, seed, 10.0, utilisation);
        let once = || {
            let mut tick = 0;
            run(&scenario, &settings, arrivals(), &mut |_| {
                let due = moves.get(tick).map(|&(model, to, at_once)| ShareChange { model, from: Sms(0), to: Sms(to), groups: None, at_once });
                tick += 1;
                let admission = vec![AdmissionPolicy { refuse_late, ..AdmissionPolicy::accept_all(4) }; 3];
                Decision { changes: due.into_iter().collect(), admissions: admission, ..Decision::default() }
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
