use proptest::prelude::{prop_assert, prop_assert_eq, proptest};
use shadowslice_policy::pressure::{SHORT, Watch};
use shadowslice_policy::sharing::{Change, Door, Live, Plan, Seen};
use shadowslice_shared::units::{Moment, Sms};

use super::*;
use crate::loads::Named;
use crate::scenario::Served;
use crate::scenario::fixtures::{model, on_one_gpu};

const MS: u64 = 1_000_000;

const SETTINGS: Settings = Settings {
    interval: Duration::from_millis(500),
    dwell: Duration::from_secs(5),
    interference: false,
    proportional: false,
    together: false,
    noise: 0.0,
    seed: 1,
};

/// A run in which nothing is decided between two intervals.
fn run(
    scenario: &Scenario,
    settings: &Settings,
    arrivals: impl IntoIterator<Item = Arrival>,
    decide: &mut Decide<'_>,
) -> Outcome {
    super::run(scenario, settings, arrivals, &mut |ask, facts| match ask {
        Ask::Meanwhile => Decision::default(),
        ask => decide(ask, facts),
    })
}

fn at(ms: u64) -> Arrival {
    Arrival { at: moment(ms * MS), model: 0 }
}

fn keep(_: Ask, _: &Facts) -> Decision {
    Decision::default()
}

/// Asks for one change after another, each at its tick (counted from 1), and keeps what it saw.
struct Script {
    changes: Vec<(usize, Change)>,
    seen: Vec<Facts>,
}

impl Script {
    fn new(changes: Vec<(usize, Change)>) -> Self {
        Self { changes, seen: Vec::new() }
    }

    fn run(&mut self, scenario: &Scenario, arrivals: Vec<Arrival>) -> Outcome {
        run(scenario, &SETTINGS, arrivals, &mut |ask, facts| {
            if ask == Ask::Start {
                return Decision::default();
            }
            self.seen.push(facts.clone());
            let tick = self.seen.len();
            let due = self.changes.iter().filter(|(at, _)| *at == tick).map(|(_, change)| change.clone());
            let plan = Plan { changes: due.collect() };
            Decision { plan: Some(plan), ..Decision::default() }
        })
    }

    /// What was seen of the only model at that tick.
    fn at(&self, tick: usize) -> &shadowslice_policy::sharing::Live {
        &self.seen[tick - 1].models[0]
    }
}

fn change(to: u32, at_once: bool) -> Change {
    Change { model: 0, from: Sms(50), to: Sms(to), at_once, onset: Moment::default() }
}

#[test]
fn long_batches_in_hand_overs_do_not_exceed_the_bound() {
    let mut one = model("a", 2_000.0);
    one.terms.slo = Duration::from_secs(60);
    let scenario = on_one_gpu(100, vec![one]);
    let shares = [60, 80].into_iter().cycle();
    let changes = shares.take(10).enumerate().map(|(n, to)| (14 * n + 2, change(to, false)));
    let arrivals: Vec<Arrival> = (0..100).map(at).collect();
    let outcome = Script::new(changes.collect()).run(&scenario, arrivals.clone());
    let (answered, repartitions) = (outcome.models[0].tally.in_time, outcome.models[0].repartitions.len());
    let bound = crate::bound::Bound::new(&scenario, &arrivals, Duration::from_secs(60)).in_time();
    assert!(repartitions > 5 && answered > 30, "{repartitions} {answered}");
    assert!(answered <= bound, "{answered} of {bound} at most");
}

#[test]
fn an_m_d_1_queue_waits_as_pollaczek_and_khinchine_say() {
    // Half loaded, one by one: a mean wait of rho / (2 (1 - rho)) = a half of the service time.
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
    let mut ask = |_: Ask, facts: &Facts| {
        sizes.extend(facts.models[0].seen.executed.iter().map(|e| (e.rows, e.count)));
        Decision::default()
    };
    // One executes, the others wait: eight of them for its end.
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
    let mut script = Script::new(vec![(1, change(25, false)), (2, change(10, false))]);
    // The batch in flight at 3.5 s ends on the incumbent, beside those of the shadow.
    let arrivals = vec![at(3_420), at(3_430), at(3_440), at(3_450), at(12_000)];
    let outcome = script.run(&scenario, arrivals);
    assert_eq!(script.at(2).coming, Some(Sms(25)));
    assert_eq!((script.at(6).share, script.at(6).standing), (Sms(50), None));
    let after = script.at(8);
    assert_eq!((after.share, after.coming, after.standing), (Sms(25), None, Some(Sms(50))));
    assert_eq!(after.since, moment(3_500 * MS), "0.5 s and three seconds of start");
    assert_eq!(script.at(17).standing, Some(Sms(50)));
    assert_eq!(script.at(18).standing, None, "it drained at 3.52 s and stood for 5 s");
    let executed = |tick: usize| script.at(tick).seen.executed.iter().map(|e| e.count).sum::<u64>();
    assert_eq!((executed(7), executed(8)), (0, 2), "only those at the new share");
    let tally = &outcome.models[0].tally;
    // 3520 there; 3700, 3900 and 4100 here; and the last one in 200 ms.
    assert_eq!(tally.latency_sum_ns / u128::from(MS), 100 + 270 + 460 + 650 + 200);
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
        Script::new(vec![(1, change(25, false)), (10, change(50, true)), (11, change(30, true))]);
    let outcome = script.run(&scenario, vec![at(0), at(9_000)]);
    assert_eq!(script.at(10).share, Sms(25));
    let back = script.at(11);
    assert_eq!((back.share, back.since, back.standing), (Sms(50), moment(5_000 * MS), Some(Sms(25))));
    assert_eq!(script.at(12).coming, Some(Sms(30)), "none stands at 30 SMs, so a shadow must start");
    assert_eq!(script.at(12).standing, None, "the parked one made room for it");
    assert_eq!(outcome.models[0].repartitions, [3_500 * MS, 5_000 * MS, 8_500 * MS]);
}

/// What is seen at each tick while the policy wants a worker at these shares to stand ready, from those ticks on.
fn with_standby(
    standby: bool,
    wishes: &[(usize, Option<u32>)],
    changes: &[(usize, u32)],
    ms: u64,
) -> Vec<Live> {
    let scenario = on_one_gpu(100, vec![Served { standby, ..model("a", 10.0) }]);
    let mut seen: Vec<Live> = Vec::new();
    let _outcome = run(&scenario, &SETTINGS, [at(ms)], &mut |ask, facts| {
        if ask == Ask::Start {
            return Decision::default();
        }
        seen.push(facts.models[0].clone());
        let tick = seen.len();
        let wish = wishes.iter().rev().find(|(from, _)| *from <= tick).and_then(|(_, wish)| wish.map(Sms));
        let due = changes.iter().find(|(at, _)| *at == tick).map(|&(_, to)| change(to, true));
        let plan = due.map(|change| Plan { changes: vec![change] });
        Decision { standby: vec![wish], plan, ..Decision::default() }
    });
    seen
}

#[test]
fn a_worker_is_kept_ready_where_the_policy_wants_one() {
    let seen = with_standby(true, &[(1, Some(80))], &[(20, 80)], 30_000);
    assert_eq!((seen[5].standing, seen[6].standing), (None, Some(Sms(80))), "it starts in 3 s");
    assert_eq!(seen[18].standing, Some(Sms(80)), "for longer than a dwell time");
    assert_eq!((seen[20].share, seen[20].standing), (Sms(80), Some(Sms(50))), "what it relieved is parked");
    assert_eq!(seen[40].standing, None, "and not kept: nobody wants it at the share in force");
    assert!(with_standby(false, &[(1, Some(80))], &[], 9_000).iter().all(|live| live.standing.is_none()));
}

#[test]
fn a_standing_worker_that_is_not_wanted_any_more_makes_room_for_another() {
    let seen = with_standby(true, &[(1, Some(80)), (10, Some(30)), (40, None)], &[], 30_000);
    assert_eq!((seen[9].standing, seen[18].standing), (Some(Sms(80)), Some(Sms(80))), "a dwell time");
    assert_eq!((seen[21].standing, seen[30].standing), (None, Some(Sms(30))));
    assert_eq!(seen[55].standing, None);
    let changed = with_standby(true, &[(1, Some(80)), (4, Some(30))], &[], 9_000);
    assert_eq!((changed[8].standing, changed[12].standing), (None, Some(Sms(30))), "while it starts");
}

#[test]
fn a_worker_that_starts_to_stand_ready_serves_when_it_is_needed_before() {
    let seen = with_standby(true, &[(1, Some(80))], &[(4, 80)], 9_000);
    assert_eq!((seen[4].coming, seen[5].share, seen[6].share), (Some(Sms(80)), Sms(50), Sms(80)));
    assert_eq!(seen[6].since, moment(3_500 * MS), "three seconds from its own start, not from the order");
}

#[test]
fn a_hopeless_request_is_refused_at_the_door_if_the_policy_says_so() {
    let mut served = model("a", 10.0);
    served.terms.slo = Duration::from_millis(35);
    let in_time = |serve_late, refuse_late| {
        let scenario = on_one_gpu(100, vec![Served { serve_late, ..served.clone() }]);
        let doors = vec![Door { refuse_late, ..Door::open(1) }];
        let arrivals = (0..100).map(|_| at(600)).collect::<Vec<_>>();
        let outcome = run(&scenario, &SETTINGS, arrivals, &mut |_, _| Decision {
            doors: doors.clone(),
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
fn who_is_let_in_is_asked_before_the_first_request_comes() {
    let mut served = model("a", 10.0);
    served.terms.slo = Duration::from_millis(35);
    let scenario = on_one_gpu(100, vec![Served { serve_late: false, ..served }]);
    let mut asked = Vec::new();
    let outcome = run(&scenario, &SETTINGS, (0..100).map(|_| at(1)), &mut |ask, facts| {
        asked.push((ask, facts.now));
        let doors = vec![Door { refuse_late: ask == Ask::Start, ..Door::open(1) }];
        Decision { doors, ..Decision::default() }
    });
    assert_eq!(asked, [(Ask::Start, Moment::default())]);
    let tally = &outcome.models[0].tally;
    assert_eq!((tally.in_time, tally.refused), (3, 97));
}

#[test]
fn doors_are_asked_for_between_two_intervals_and_see_what_came_since() {
    let scenario = on_one_gpu(100, vec![model("a", 10.0)]);
    let asked = |settings: &Settings, wanted: Ask| {
        let mut seen = Vec::new();
        super::run(&scenario, settings, [at(50), at(250), at(720)], &mut |ask, facts| {
            if ask == wanted {
                seen.push((facts.now, facts.models[0].seen.arrived));
            }
            Decision::default()
        });
        seen
    };
    let meanwhile: Vec<_> = asked(&SETTINGS, Ask::Meanwhile);
    let at_ms = |ms: u64| meanwhile.iter().find(|(now, _)| *now == moment(ms * MS)).map(|seen| seen.1);
    assert_eq!([100, 200, 300, 400, 600, 700].map(at_ms), [1, 1, 2, 2, 0, 0].map(Some));
    assert_eq!(asked(&SETTINGS, Ask::Interval)[0], (moment(500 * MS), 2), "as if nobody had looked");
    let uneven = asked(&Settings { interval: Duration::from_millis(250), ..SETTINGS }, Ask::Meanwhile);
    let times = uneven.iter().map(|seen| seen.0).take(4).collect::<Vec<_>>();
    assert_eq!(times, [100, 200, 350, 450].map(|ms| moment(ms * MS)), "none right after a decision");
    let often = Settings { interval: DOORS_EVERY, ..SETTINGS };
    assert_eq!(asked(&often, Ask::Meanwhile), [], "it is decided as often");
}

#[test]
fn who_runs_out_of_slack_beside_a_larger_standing_worker_is_heard_at_once() {
    let mut served = model("a", 100.0);
    served.terms.slo = Duration::from_millis(350);
    let scenario = on_one_gpu(100, vec![served]);
    let mut heard = Vec::new();
    let mut decide = |ask, facts: &Facts| {
        let change = match ask {
            Ask::Start | Ask::Interval | Ask::Meanwhile => change(25, false),
            Ask::Pressure(0) => change(50, true),
            Ask::Pressure(other) => panic!("there is no model {other}"),
        };
        if matches!(ask, Ask::Pressure(_)) {
            heard.push(facts.now);
        }
        // The first interval alone shrinks it.
        let due = matches!(ask, Ask::Pressure(_)) || facts.now == moment(500 * MS);
        Decision { plan: due.then(|| Plan { changes: vec![change] }), ..Decision::default() }
    };
    // At 25 SMs a request takes 200 ms, so the second one is late, and all after it.
    let last = 4_000 + u64::from(SHORT);
    let outcome = run(&scenario, &SETTINGS, (4_000..=last).map(at), &mut decide);
    assert_eq!(heard, [moment(last * MS)], "the last of so many that are late");
    assert_eq!(outcome.models[0].repartitions.len(), 2);
    assert_eq!(outcome.models[0].tally.in_time, 4, "three more went to the larger worker");
}

/// When a model is heard that has gone from 50 SMs to 25 in its first interval, may have 50 again, and refuses who comes too late; with another
/// change at 4.5 s, if any.
fn heard(served: Served, arrivals: Vec<Arrival>, then: Option<Change>) -> Vec<Moment> {
    let mut heard = Vec::new();
    let mut decide = |ask, facts: &Facts| {
        if matches!(ask, Ask::Pressure(_)) {
            heard.push(facts.now);
            return Decision::default();
        }
        let shrinks = (facts.now == moment(500 * MS)).then(|| change(25, false));
        let changes: Vec<Change> =
            shrinks.into_iter().chain(then.clone().filter(|_| facts.now == moment(4_500 * MS))).collect();
        let plan = Some(Plan { changes });
        let doors = vec![Door { refuse_late: true, ..Door::open(1) }];
        Decision { plan, doors, standby: vec![Some(Sms(50))], ..Decision::default() }
    };
    let scenario = on_one_gpu(100, vec![Served { serve_late: false, ..served }]);
    let _outcome = run(&scenario, &SETTINGS, arrivals, &mut decide);
    heard
}

#[test]
fn who_turns_out_to_be_too_late_is_a_sign_too() {
    // Taken to execute for 2 ms at 25 SMs, so that all seem in time as they come. Two do execute, for 200 ms each.
    let mut served = model("a", 100.0);
    served.terms.slo = Duration::from_millis(380);
    served.terms.profile = model("a", 1.0).terms.profile;
    let come = |together: u64| (4_000..4_000 + together).chain([4_450]).map(at).collect();
    let short = u64::from(SHORT);
    assert_eq!(heard(served.clone(), come(short + 3), None), [moment(4_450 * MS)]);
    assert_eq!(heard(served, come(short + 2), None), [], "one fewer is not enough");
}

#[test]
fn signs_say_nothing_of_another_share() {
    let mut served = model("a", 100.0);
    served.terms.slo = Duration::from_millis(350);
    // One is tried, all others seem late. While a shadow starts one comes, and four more once it serves.
    let first = 4_000..4_000 + u64::from(SHORT);
    let come: Vec<Arrival> = first.chain([5_000]).chain(8_000..8_004).map(at).collect();
    assert_eq!(heard(served.clone(), come.clone(), None).len(), 1, "one more is enough");
    assert_eq!(heard(served, come, Some(change(30, false))), []);
}

#[test]
fn who_has_more_than_his_share_is_for_is_heard_before_anybody_is_late() {
    let scenario = on_one_gpu(100, vec![model("a", 1.0)]);
    let watch = Watch::new(10.0, 100.0, 1.0);
    let mut heard = Vec::new();
    let mut decide = |ask, facts: &Facts| {
        let interval = ask == Ask::Interval;
        if matches!(ask, Ask::Pressure(_)) {
            heard.push(facts.now);
        }
        let plan =
            (interval && facts.now == moment(500 * MS)).then(|| Plan { changes: vec![change(25, false)] });
        let doors = if interval { vec![Door { watch, ..Door::open(1) }] } else { Vec::new() };
        Decision { plan, doors, standby: vec![Some(Sms(50))], ..Decision::default() }
    };
    // Ten a second are no reason, and five hundred are, after nine or so: ln 10 each.
    let calm = (40..80).map(|n| at(n * 100));
    let outcome = run(&scenario, &SETTINGS, calm.chain((0..15).map(|n| at(8_000 + 2 * n))), &mut decide);
    assert_eq!(heard.len(), 1, "{heard:?}");
    assert!((moment(8_010 * MS)..moment(8_020 * MS)).contains(&heard[0]), "{heard:?}");
    assert_eq!(outcome.models[0].tally.in_time, 55);
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
    let p99 = tally.latency.quantile(0.99);
    assert!(p99.abs_diff(12_330_000) < 300_000, "{p99}");
}

#[test]
fn inside_a_worker_a_share_changes_with_the_next_batch() {
    let served = Served { in_process: true, ..model("a", 100.0) };
    let scenario = on_one_gpu(100, vec![served.clone(), Served { in_process: true, ..model("b", 1.0) }]);
    // Of 100 SMs 4 are left over; 25 come to four groups of 8.
    let mut script = Script::new(vec![(1, change(25, false))]);
    let outcome = script.run(&scenario, vec![at(420), at(430)]);
    assert_eq!((script.at(1).share, script.at(1).standing), (Sms(56), None));
    let after = script.at(2);
    assert_eq!((after.share, after.since, after.coming), (Sms(32), moment(500 * MS), None));
    let latency = outcome.models[0].tally.latency_sum_ns / u128::from(MS);
    // Up to 520 ms as before, then for 100 ms times 50 / 32.
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
    assert_eq!(worst(48), 10_416_667, "each as if alone: 10 ms times 50 / 48");
    assert!(worst(96) > 14 * MS, "they take turns");
}

#[test]
fn a_policy_sees_every_interval_whole() {
    let scenario = on_one_gpu(100, vec![model("a", 10.0)]);
    let mut script = Script::new(vec![]);
    let _outcome = script.run(&scenario, (0..200).map(|n| at(n * 10)).collect());
    let Seen { span, arrived, answered, in_time, busy, mean_latency, .. } = script.at(2).seen.clone();
    assert_eq!((span, arrived, answered, in_time), (Duration::from_millis(500), 50, 50, 50));
    assert!((busy - 1.0).abs() < 1e-9);
    assert_eq!(mean_latency, Duration::from_millis(10));
    assert_eq!(script.seen[1].now, Moment::after_origin(Duration::from_secs(1)));
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
        proportional in proptest::bool::ANY,
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
        let settings = Settings { noise: 0.1, interference, proportional, seed, ..SETTINGS };
        let arrivals = || Named::ALL[load].1.arrivals(&scenario, seed, 10.0, utilisation);
        let once = || {
            let mut tick = 0;
            run(&scenario, &settings, arrivals(), &mut |_, _| {
                let due = moves.get(tick).map(|&(model, to, at_once)| Change { model, from: Sms(0), to: Sms(to), at_once, onset: Moment::default() });
                tick += 1;
                let doors = vec![Door { refuse_late, ..Door::open(4) }; 3];
                Decision { plan: Some(Plan { changes: due.into_iter().collect() }), doors, ..Decision::default() }
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
