use shadowslice_policy::sharing::{AdmissionPolicy, Decision, PolicyInput, ShareChange};
use shadowslice_shared::profile::ProcessMemory;
use shadowslice_shared::units::Sms;

use super::super::tests::{SETTINGS, keep};
use super::super::{ModelOutcome, run};
use super::*;
use crate::scenario::fixtures::{model, on_one_gpu};
use crate::scenario::{ScenarioModel, SimulatedArrival};

const MS: u64 = 1_000_000;

/// The weights of a model that needs 20.3 ms to wake, in bytes.
const WEIGHTS: u64 = 940_000_000;

const WAKE_US: u64 = 20_300;

/// Returns a model that answers a request in 10 ms.
fn sleeper(name: &str, sleep: SleepRule) -> ScenarioModel {
    let mut spec = ScenarioModel { sleep, serve_late: false, in_process: true, ..model(name, 10.0) };
    spec.terms.initial = Sms(100);
    spec.truth.memory = ProcessMemory { context: 7, weights: WEIGHTS, activations: 3 };
    spec
}

/// Returns a scenario in which the weights of `count` models fit into the GPU's memory.
fn with_room_for(count: u64, models: Vec<ScenarioModel>) -> Scenario {
    let memory = vec![Some(count * WEIGHTS + 10 * models.len() as u64)];
    Scenario { memory, ..on_one_gpu(100, models) }
}

fn at(ms: u64, model: usize) -> SimulatedArrival {
    SimulatedArrival { at: timestamp(ms * MS), model }
}

/// Runs a scenario, and calls `check` every 0.1 ms of the virtual time.
fn watch(
    scenario: &Scenario,
    arrivals: &[SimulatedArrival],
    mut check: impl FnMut(&World<'_>),
) -> Vec<ModelOutcome> {
    let mut world = World::new(scenario, &SETTINGS);
    check(&world);
    for &arrival in arrivals {
        while world.now + MS / 10 < at_ns(arrival.at) {
            world.advance(world.now + MS / 10, &mut keep);
            check(&world);
        }
        world.arrive(arrival, &mut keep);
        check(&world);
    }
    world.finish().models
}

/// Returns the number of models with weights on the GPU.
fn loaded(world: &World<'_>) -> usize {
    world.models.iter().filter(|model| model.weights.is_awake() || model.weights.is_waking()).count()
}

fn mean_us(outcome: &ModelOutcome) -> u64 {
    outcome.tally.mean_ns() / 1_000
}

#[test]
fn the_first_request_after_a_sleep_waits_for_the_wake() {
    let scenario = on_one_gpu(100, vec![sleeper("a", SleepRule::After(Duration::from_secs(1)))]);
    let once = |arrivals: &[u64]| {
        let arrivals = arrivals.iter().map(|&ms| at(ms, 0));
        let outcome = run(&scenario, &SETTINGS, arrivals, &mut keep).models.remove(0);
        let SleepTally { wakes, wake_ns } = outcome.sleep;
        assert_eq!(wake_ns, wakes * WAKE_US * 1_000);
        (wakes, outcome.tally.latency_sum_ns / 1_000)
    };
    assert_eq!(once(&[0, 900, 1_800]), (0, 30_000), "no second without requests");
    let wake = u128::from(WAKE_US);
    assert_eq!(once(&[0, 2_500]), (1, 20_000 + wake));
    assert_eq!(once(&[0, 2_500, 2_600]), (1, 30_000 + wake), "the model is still awake");
    // The second request waits for the wake and for the first one.
    assert_eq!(once(&[2_500, 2_510]), (1, 10_000 + wake + 20_000 + wake - 10_000));
    assert_eq!(once(&[0, 2_500, 5_000]), (2, 30_000 + 2 * wake));
}

#[test]
fn models_take_turns_in_a_budget_below_their_working_set() {
    let models = ["a", "b", "c"].map(|name| sleeper(name, SleepRule::OnPressure));
    let scenario = with_room_for(2, models.to_vec());
    // Each model gets a request every 40 ms, so that most of the time requests wait for all models.
    let arrivals: Vec<_> = (0..250).flat_map(|n| (0..3).map(move |model| at(n * 40, model))).collect();
    let mut most = 0;
    let outcomes = watch(&scenario, &arrivals, |world| most = most.max(loaded(world)));
    assert_eq!(most, 2, "two models fill the budget, and never exceed it");
    for outcome in &outcomes {
        let tally = &outcome.tally;
        assert!(outcome.sleep.wakes > 50, "{:?}", outcome.sleep);
        assert!(tally.answered > 200 && tally.refused == 0, "{tally:?}");
        assert!(mean_us(outcome) > 10_000 + WAKE_US / 2);
    }
}

#[test]
fn a_model_that_never_sleeps_keeps_its_weights_and_its_latency() {
    let rules = [SleepRule::Never, SleepRule::OnPressure, SleepRule::OnPressure];
    let models = rules.map(|rule| sleeper("a", rule));
    let scenario = with_room_for(2, models.to_vec());
    let requests = (0..200).map(|n| at(n * 50, n as usize % 3));
    let arrivals: Vec<_> = requests.chain([at(20_000, 0)]).collect();
    let outcomes = watch(&scenario, &arrivals, |world| assert!(world.models[0].weights.is_awake()));
    let wakes: Vec<u64> = outcomes.iter().map(|outcome| outcome.sleep.wakes).collect();
    assert!(wakes[0] == 0 && wakes[1] > 20 && wakes[2] > 20, "{wakes:?}");
    assert_eq!(mean_us(&outcomes[0]), 10_000);
}

#[test]
fn requests_are_refused_if_their_model_does_not_wake_before_their_deadline() {
    let mut models = ["busy", "hasty"].map(|name| sleeper(name, SleepRule::OnPressure));
    models[0].terms.slo = Duration::from_secs(3);
    models[1].terms.slo = Duration::from_millis(50);
    // 200 requests wait for the first model, which wakes at 100 ms. It answers them before it sleeps.
    let arrivals: Vec<_> = (0..200).map(|_| at(100, 0)).chain([at(110, 1)]).collect();
    let outcome = |serve_late| {
        let mut models = models.clone();
        models[1].serve_late = serve_late;
        let scenario = with_room_for(1, models.to_vec());
        let outcome = run(&scenario, &SETTINGS, arrivals.clone(), &mut keep).models.remove(1);
        (outcome.tally.answered, outcome.tally.in_time, outcome.tally.refused, outcome.sleep.wakes)
    };
    assert_eq!(outcome(false), (0, 0, 1, 0));
    assert_eq!(outcome(true), (1, 0, 0, 1), "`on_late: serve` keeps the request");
}

#[test]
fn a_busy_model_yields_when_it_has_answered_what_waited_for_its_wake() {
    let waits_us = |waiting: u64| {
        let mut models = ["a", "b"].map(|name| sleeper(name, SleepRule::OnPressure));
        models[0].terms.slo = Duration::from_secs(5);
        models[1].terms.slo = Duration::from_secs(3);
        let scenario = with_room_for(1, models.to_vec());
        // The first model wakes at 105 ms, when the second one has answered its first request. From 135 ms,
        // the first model always has requests.
        let waiting = [at(95, 1)].into_iter().chain((0..waiting).map(|_| at(100, 0)));
        let steady = (0..100).map(|n| at(135 + 9 * n, 0));
        let mut arrivals: Vec<_> = waiting.chain([at(150, 1)]).chain(steady).collect();
        arrivals.sort_unstable();
        let outcome = run(&scenario, &SETTINGS, arrivals, &mut keep).models.remove(1);
        assert_eq!((outcome.tally.answered, outcome.sleep.wakes), (2, 1));
        u64::try_from(outcome.tally.latency_sum_ns / 1_000).unwrap() - 10_000
    };
    let since_us = 105_000 + WAKE_US;
    // A model is awake for at least four times its wake time. It then finishes the batch that executes.
    let served_us = since_us + 4 * WAKE_US - 150_000;
    let own_us = WAKE_US + 10_000;
    assert!((served_us + own_us..=served_us + 10_000 + own_us).contains(&waits_us(2)), "{}", waits_us(2));
    // At 150 ms, the first model still owes answers, so the next decision may come a second later.
    let answered_us = since_us + 50 * 10_000 - 150_000;
    assert!((answered_us + own_us..answered_us + 1_100_000).contains(&waits_us(50)), "{}", waits_us(50));
}

#[test]
fn admission_control_refuses_requests_whose_deadline_is_earlier_than_the_wake() {
    let mut spec = sleeper("a", SleepRule::After(Duration::from_secs(1)));
    spec.terms.slo = Duration::from_millis(25);
    let scenario = on_one_gpu(100, vec![spec]);
    let admission = vec![AdmissionPolicy { refuse_late: true, ..AdmissionPolicy::accept_all(1) }];
    let mut decide = |_: &_| Decision { admissions: admission.clone(), ..Decision::default() };
    // An idle lane always tries one request, because the prediction may be wrong.
    let arrivals = [at(2_500, 0), at(2_501, 0), at(2_502, 0), at(2_600, 0)];
    let outcome = run(&scenario, &SETTINGS, arrivals, &mut decide).models.remove(0);
    let tally = &outcome.tally;
    assert_eq!((tally.answered, tally.in_time, tally.refused), (2, 1, 2));
}

#[test]
fn models_in_a_shared_process_share_a_context() {
    let wakes = |shared_process| {
        let models = ["a", "b", "c"].map(|name| {
            let mut spec = ScenarioModel { shared_process, ..sleeper(name, SleepRule::OnPressure) };
            spec.truth.memory.context = WEIGHTS / 2;
            spec
        });
        // Three models fit with one context, and two models with three contexts.
        let memory = vec![Some(7 * WEIGHTS / 2 + 9)];
        let scenario = Scenario { memory, ..on_one_gpu(100, models.to_vec()) };
        let arrivals = (0..30).map(|n| at(100 + n * 100, n as usize % 3));
        let outcome = run(&scenario, &SETTINGS, arrivals, &mut keep);
        outcome.models.iter().map(|model| model.sleep.wakes).sum::<u64>()
    };
    assert_eq!(wakes(Some(0)), 0);
    assert_eq!(wakes(None), 30, "the model whose turn it is always sleeps");
}

#[test]
fn a_model_does_not_sleep_during_a_hand_over() {
    let mut spec = sleeper("a", SleepRule::After(Duration::from_secs(1)));
    spec.in_process = false;
    let scenario = on_one_gpu(100, vec![spec]);
    let mut tick = 0;
    let mut decide = |_: &PolicyInput| {
        tick += 1;
        // The shadow serves from 4 s, and the old worker is a standby until 9 s. The second change comes
        // while the model sleeps.
        let is_due = tick == 2 || tick == 25;
        let to = Sms(if tick == 2 { 50 } else { 20 });
        let change = ShareChange { model: 0, from: Sms(100), to, groups: None, at_once: false };
        Decision { changes: is_due.then_some(change).into_iter().collect(), ..Decision::default() }
    };
    let arrivals = [at(500, 0), at(8_500, 0), at(17_000, 0)];
    let outcome = run(&scenario, &SETTINGS, arrivals, &mut decide).models.remove(0);
    assert_eq!((outcome.repartitions.len(), outcome.share), (1, 50));
    assert_eq!(outcome.sleep.wakes, 1, "only the last request finds the model asleep");
}
