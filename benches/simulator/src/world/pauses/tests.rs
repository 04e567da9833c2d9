use std::time::Duration;

use proptest::prelude::{ProptestConfig, prop_assert, proptest};
use shadowslice_policy::sharing::{AdmissionPolicy, Decision, PolicyInput, ShareChange};
use shadowslice_shared::contention::{Occupant, SharedGpu};
use shadowslice_shared::pause::MAX_BATCH_PAUSE;
use shadowslice_shared::profile::Profile;
use shadowslice_shared::units::Sms;

use super::super::gpus::{GpuRules, WorldGpus};
use super::super::tests::SETTINGS;
use super::super::{GpuSharing, ModelOutcome, PauseTally, WorldSettings, run};
use crate::random::{Random, RandomPurpose};
use crate::scenario::fixtures::{model, on_one_gpu, profile};
use crate::scenario::{Scenario, ScenarioModel, SimulatedArrival};
use crate::time::ns;
use crate::timers::Timers;

use super::*;

const MS: u64 = 1_000_000;
const US: u64 = 1_000;

/// The seat of the worker whose batches wait. The seat 1 belongs to its neighbour.
const HOG: usize = 0;

const SHARINGS: [GpuSharing; 3] = [GpuSharing::Turns, GpuSharing::Proportional, GpuSharing::Slices];

/// Returns a GPU with 100 SMs and two seats, whose workers use all SMs.
fn two_seats(profiles: [&Profile; 2], sharing: GpuSharing) -> (WorldGpus<'_>, Timers) {
    let rules = GpuRules { sharing, interference: true };
    let mut gpus = WorldGpus::new(std::iter::once(SharedGpu::new(Sms(100))), rules);
    for (timer, profile) in profiles.into_iter().enumerate() {
        gpus.add_seat(0, profile, Occupant::anywhere(Sms(100)), timer);
    }
    (gpus, Timers::new(profiles.len()))
}

/// Fires the earliest timer. Returns its time, its seat, and the time of the batch if the batch ended.
fn fire(gpus: &mut WorldGpus<'_>, timers: &mut Timers) -> (u64, usize, Option<Duration>) {
    let (now, seat) = (timers.due(), timers.first());
    (now, seat, gpus.progress(seat, now, timers))
}

#[test]
fn a_paused_batch_waits_at_its_next_border_and_continues_when_it_is_released() {
    let profile = profile(8.0);
    let (mut gpus, mut timers) = two_seats([&profile, &profile], GpuSharing::Turns);
    gpus.start(HOG, 1, 1.0, 0, &mut timers);
    gpus.pause(HOG, 2_500 * US, &mut timers);
    assert_eq!(fire(&mut gpus, &mut timers), (3 * MS, HOG, None));
    gpus.pause(HOG, 4 * MS, &mut timers);
    gpus.release(HOG, 5 * MS, &mut timers);
    assert_eq!(fire(&mut gpus, &mut timers), (10 * MS, HOG, Some(Duration::from_millis(10))));
    assert_eq!(gpus.pauses(HOG), PauseTally { count: 1, sum_ns: 2 * MS, longest_ns: 2 * MS });
}

#[test]
fn a_pause_that_ends_before_the_border_changes_nothing() {
    let profile = profile(8.0);
    let (mut gpus, mut timers) = two_seats([&profile, &profile], GpuSharing::Turns);
    gpus.start(HOG, 1, 1.3, 0, &mut timers);
    let end = timers.due();
    gpus.pause(HOG, 2_500 * US, &mut timers);
    assert!(timers.due() < end);
    gpus.release(HOG, 2_600 * US, &mut timers);
    assert_eq!(fire(&mut gpus, &mut timers), (end, HOG, Some(Duration::from_nanos(end))));
    assert_eq!(gpus.pauses(HOG), PauseTally::default());
}

#[test]
fn a_pause_that_nobody_ends_expires() {
    let profile = profile(8.0);
    let (mut gpus, mut timers) = two_seats([&profile, &profile], GpuSharing::Turns);
    gpus.start(HOG, 1, 1.0, 0, &mut timers);
    gpus.pause(HOG, 500 * US, &mut timers);
    assert_eq!(fire(&mut gpus, &mut timers), (MS, HOG, None));
    assert_eq!(fire(&mut gpus, &mut timers), (MS + ns(MAX_BATCH_PAUSE), HOG, None));
    assert_eq!(fire(&mut gpus, &mut timers).0, 8 * MS + ns(MAX_BATCH_PAUSE), "the other pieces do not wait");
    assert_eq!(gpus.pauses(HOG).longest_ns, ns(MAX_BATCH_PAUSE));
}

#[test]
fn a_short_batch_ends_and_the_next_one_waits_before_its_first_piece() {
    let profile = profile(0.5);
    let (mut gpus, mut timers) = two_seats([&profile, &profile], GpuSharing::Turns);
    gpus.start(HOG, 1, 1.0, 0, &mut timers);
    gpus.pause(HOG, 100 * US, &mut timers);
    assert_eq!(fire(&mut gpus, &mut timers), (500 * US, HOG, Some(Duration::from_micros(500))));
    gpus.start(HOG, 1, 1.0, 500 * US, &mut timers);
    assert_eq!(fire(&mut gpus, &mut timers), (500 * US, HOG, None));
    gpus.release(HOG, 2 * MS, &mut timers);
    assert_eq!(fire(&mut gpus, &mut timers), (2_500 * US, HOG, Some(Duration::from_millis(2))));
}

#[test]
fn a_waiting_batch_slows_nobody_down_and_makes_no_progress() {
    // Each of the two needs 80 % of the memory bandwidth.
    let [long, short] = [8.0, 1.0].map(|ms| Profile { bandwidth: 0.8, ..profile(ms) });
    for sharing in SHARINGS {
        let (mut gpus, mut timers) = two_seats([&long, &short], sharing);
        gpus.start(HOG, 1, 1.0, 0, &mut timers);
        gpus.pause(HOG, 3_900 * US, &mut timers);
        assert_eq!(fire(&mut gpus, &mut timers), (4 * MS, HOG, None));
        for start in [4 * MS, 6 * MS] {
            gpus.start(1, 1, 1.0, start, &mut timers);
            assert_eq!(fire(&mut gpus, &mut timers), (start + MS, 1, Some(Duration::from_millis(1))));
            gpus.leave(1, start + MS, &mut timers);
        }
        gpus.release(HOG, 7 * MS, &mut timers);
        assert_eq!(fire(&mut gpus, &mut timers).0, 11 * MS, "four of eight pieces remain");
    }
}

#[test]
fn a_border_moves_when_the_speed_of_the_batch_changes() {
    let profile = profile(8.0);
    let (mut gpus, mut timers) = two_seats([&profile, &profile], GpuSharing::Slices);
    gpus.start(HOG, 1, 1.0, 0, &mut timers);
    gpus.pause(HOG, 1_200 * US, &mut timers);
    gpus.start(1, 1, 1.0, 1_500 * US, &mut timers);
    assert_eq!(fire(&mut gpus, &mut timers), (2_500 * US, HOG, None), "the second piece takes 1.5 ms");
    let alone = 1_500 * US + 8 * MS + 500 * US;
    gpus.release(HOG, alone - MS, &mut timers);
    let (end, seat, _) = fire(&mut gpus, &mut timers);
    assert_eq!((end, seat), (alone + MS, 1), "in slices again for its last millisecond");
}

/// Returns a model with long batches and requests at a rate that its worker cannot handle.
fn hog(priority: u32) -> ScenarioModel {
    let mut spec = model("hog", 8.0);
    spec.terms.slo = Duration::from_millis(100);
    (spec.terms.priority, spec.terms.initial) = (priority, Sms(100));
    ScenarioModel { max_queued: 4, ..spec }
}

/// Returns a model with short batches and little time for each request.
fn critical() -> ScenarioModel {
    let mut spec = model("critical", 1.0);
    spec.terms.slo = Duration::from_millis(5);
    (spec.terms.priority, spec.terms.initial) = (1, Sms(100));
    spec
}

/// Returns 20 s of random arrivals at these rates, in requests per second.
fn arrivals(rates: &[f64]) -> Vec<SimulatedArrival> {
    let mut all = Vec::new();
    for (model, rate) in rates.iter().enumerate() {
        let mut random = Random::new(7, RandomPurpose::Gaps, model);
        let gaps = std::iter::repeat_with(|| random.exponential() / rate);
        let times = gaps.scan(0.0, |at, gap| {
            *at += gap;
            Some(*at)
        });
        let times = times.take_while(|at| *at < 20.0);
        all.extend(times.map(|at| SimulatedArrival { at: timestamp((at * 1e9) as u64), model }));
    }
    all.sort();
    all
}

/// Decides that all batches pause for others.
fn pausing(input: &PolicyInput) -> Decision {
    let admission = AdmissionPolicy { pause: true, ..AdmissionPolicy::accept_all(u32::MAX) };
    Decision { admissions: vec![admission; input.models.len()], ..Decision::default() }
}

fn outcomes(scenario: &Scenario, rates: &[f64], settings: WorldSettings) -> Vec<ModelOutcome> {
    run(scenario, &settings, arrivals(rates), &mut pausing).models
}

fn p99_us(outcome: &ModelOutcome) -> u64 {
    outcome.tally.latency.value_at_quantile(0.99) / US
}

#[test]
fn pauses_protect_a_critical_model_and_leave_the_hog_most_of_its_throughput() {
    let alone = p99_us(&outcomes(&on_one_gpu(100, vec![hog(2), critical()]), &[0.0, 300.0], SETTINGS)[1]);
    for hog_priority in [2, 1] {
        let scenario = on_one_gpu(100, vec![hog(hog_priority), critical()]);
        let [without, with] = [false, true]
            .map(|pause| outcomes(&scenario, &[200.0, 300.0], WorldSettings { pause, ..SETTINGS }));
        let [without_us, with_us] = [&without, &with].map(|outcome| p99_us(&outcome[1]));
        assert!(without_us * 2 > 3 * with_us, "{without_us} us without pauses, {with_us} us with pauses");
        assert!(with_us * 3 < alone * 4, "{with_us} us with pauses, {alone} us alone");
        let [without, with] = [&without, &with].map(|outcome| &outcome[0]);
        assert!(with.tally.answered * 20 > without.tally.answered * 17, "85 % of the throughput");
        assert_eq!(with.tally.in_time, with.tally.answered);
        assert_eq!(without.pauses, PauseTally::default());
        assert!(with.pauses.count > 3_000, "{:?}", with.pauses);
    }
}

#[test]
fn without_urgent_batches_pauses_change_nothing() {
    let patient = |name, ms| model(name, ms);
    let scenario = on_one_gpu(100, vec![patient("a", 8.0), patient("b", 1.0)]);
    let latencies = |pause| {
        let noisy = WorldSettings { pause, noise: 0.1, interference: true, ..SETTINGS };
        outcomes(&scenario, &[60.0, 300.0], noisy)
            .iter()
            .map(|model| model.tally.latency_sum_ns)
            .sum::<u128>()
    };
    assert_eq!(latencies(true), latencies(false));
}

#[test]
fn a_lower_priority_pauses_nobody() {
    let mut urgent = critical();
    urgent.terms.priority = 2;
    let outcomes = outcomes(&on_one_gpu(100, vec![hog(1), urgent]), &[200.0, 300.0], SETTINGS);
    assert_eq!(outcomes[0].pauses, PauseTally::default());
}

#[test]
fn a_member_of_a_shared_process_is_never_paused() {
    let member = ScenarioModel { shared_process: Some(0), ..hog(2) };
    let outcomes = outcomes(&on_one_gpu(100, vec![member, critical()]), &[200.0, 300.0], SETTINGS);
    assert_eq!(outcomes[0].pauses, PauseTally::default());
}

#[test]
fn models_on_another_gpu_are_not_paused() {
    let mut scenario = on_one_gpu(100, vec![hog(2), critical()]);
    (scenario.gpus, scenario.memory) = (vec![Sms(100); 2], vec![None; 2]);
    scenario.models[1].terms.gpu = 1;
    assert_eq!(outcomes(&scenario, &[200.0, 300.0], SETTINGS)[0].pauses, PauseTally::default());
}

#[test]
fn a_new_worker_is_not_paused_by_a_pause_of_the_one_before_it() {
    let mut urgent = critical();
    urgent.terms.slo = Duration::from_micros(1_200);
    let mut scenario = on_one_gpu(100, vec![hog(2), urgent]);
    scenario.models[0].terms.initial = Sms(50);
    scenario.models[1].terms.initial = Sms(50);
    let settings = WorldSettings { dwell: Duration::ZERO, ..SETTINGS };
    let at = |us: u64, model| SimulatedArrival { at: timestamp(us * US), model };
    // The first change takes effect at 3.5 s, while the worker at the first seat executes the last piece
    // of its batch. The worker is then paused, and stops after this batch. The second change starts another
    // worker at this seat, which takes over at 7.5 s.
    let arrivals = [at(3_499_000, 0), at(3_506_500, 1), at(8_000_000, 0)];
    let mut tick = 0;
    let mut decide = |input: &PolicyInput| {
        tick += 1;
        let to = [(1, 60), (9, 50)].iter().find(|(at, _)| *at == tick).map(|(_, sms)| Sms(*sms));
        let change = |to| ShareChange { model: 0, from: Sms(50), to, groups: None, at_once: false };
        Decision { changes: to.map(change).into_iter().collect(), ..pausing(input) }
    };
    let outcome = run(&scenario, &settings, arrivals, &mut decide);
    assert_eq!(outcome.models[0].repartitions, [3_500 * MS, 7_500 * MS]);
    assert_eq!(outcome.models[0].pauses, PauseTally::default());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn no_wait_is_longer_than_a_pause_and_workers_wait_for_about_half_of_the_time_at_most(
        seed in 0..1_000_u64,
        rate in 100.0..2_000.0_f64,
        ms in 0.2..9.0_f64,
        hog_priority in 1..3_u32,
        sharing in proptest::sample::select(SHARINGS.to_vec()),
    ) {
        let mut urgent = ScenarioModel { max_queued: 20, ..critical() };
        (urgent.truth, urgent.terms.profile) = (profile(ms), Some(profile(ms)));
        let scenario = on_one_gpu(100, vec![hog(hog_priority), urgent]);
        let settings = WorldSettings { noise: 0.2, interference: true, sharing, seed, ..SETTINGS };
        let pauses = outcomes(&scenario, &[200.0, rate], settings)[0].pauses;
        prop_assert!(pauses.longest_ns <= ns(MAX_BATCH_PAUSE), "{pauses:?}");
        prop_assert!(pauses.sum_ns < 11_000 * MS, "{pauses:?}");
    }
}
