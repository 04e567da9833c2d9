use std::time::Duration;

use super::super::difference::towards;
use super::super::fixtures::{live, terms};
use super::super::{Executed, Live, Seen, Verdict};
use super::*;

const GPU: Sms = Sms(132);
const STEP: Duration = Duration::from_millis(100);

/// Models of these priorities on one GPU, or on two.
struct World {
    policy: Adaptive,
    terms: Vec<Terms>,
    now: Moment,
    shares: Vec<Sms>,
    since: Vec<Moment>,
    changes: Vec<(usize, Sms)>,
    held: bool,
    /// A change is in force after so many tenths of a second.
    starting: u32,
    coming: Vec<(u32, usize, Sms)>,
    report: Vec<Verdict>,
}

impl World {
    fn new(priorities: &[u32]) -> Self {
        let model = |&priority: &u32| Terms { priority, ..terms("model", 10) };
        Self::of(priorities.iter().map(model).collect())
    }

    fn of(terms: Vec<Terms>) -> Self {
        let policy = Adaptive::new(&[GPU; 2], &terms);
        let (shares, changes, report) = (policy.shares(), Vec::new(), Vec::new());
        let (now, coming) = (Moment::default(), Vec::new());
        let since = vec![now; shares.len()];
        Self { policy, terms, now, shares, since, changes, held: false, starting: 0, coming, report }
    }

    /// Changes that were asked for long enough ago are in force.
    fn arrive(&mut self) {
        for (left, model, to) in std::mem::take(&mut self.coming) {
            if left > 0 {
                self.coming.push((left - 1, model, to));
                continue;
            }
            (self.shares[model], self.since[model]) = (to, self.now);
            self.changes.push((model, to));
        }
    }

    fn why(&self, model: usize) -> Why {
        self.report[model].why
    }

    /// So many times a tenth of a second passes in which all models see this. Returns the last doors.
    fn pass(&mut self, times: usize, seen: impl Fn(&[Sms]) -> Vec<Seen>) -> Vec<Door> {
        let mut doors = Vec::new();
        for _ in 0..times {
            self.now = self.now + STEP;
            self.arrive();
            let coming = |model| self.coming.iter().find(|(_, of, _)| *of == model).map(|(.., to)| *to);
            let models = self.shares.iter().zip(seen(&self.shares)).enumerate();
            let live = |(model, (&share, seen))| Live {
                seen,
                held: self.held,
                coming: coming(model),
                since: self.since[model],
                ..live(share)
            };
            let models = models.map(live).collect();
            let facts = Facts { now: self.now, gpus: vec![GPU; 2], models };
            let decision = towards(&self.policy.decide(&self.terms, &facts), &self.terms, &facts);
            for change in &decision.changes {
                self.coming.push((self.starting, change.model, change.to));
            }
            (doors, self.report) = (decision.doors, decision.report);
        }
        doors
    }
}

/// A tenth of a second: a hundred requests, of which so many missed, in batches of 4 that take half
/// of the SLO.
fn seen(missed: u64) -> Seen {
    let executed = vec![Executed { rows: 4, count: 25, mean: Duration::from_millis(3) }];
    let (answered, in_good_time) = (100, 100 - missed);
    let p99_latency = Duration::from_millis(4);
    Seen {
        span: STEP,
        arrived: 100,
        answered,
        in_good_time,
        busy: 0.4,
        p99_latency,
        executed,
        ..Seen::default()
    }
}

/// The first is short of SMs as long as the second has more than half of them.
fn helped_by_half(shares: &[Sms]) -> Vec<Seen> {
    vec![seen(if shares[1] > Sms(66) { 20 } else { 0 }), seen(0)]
}

/// The first model misses, whatever is done.
fn beyond_help(_: &[Sms]) -> Vec<Seen> {
    vec![seen(20), seen(0)]
}

#[test]
fn nothing_is_done_while_no_model_misses_more_than_it_may() {
    let mut world = World::new(&[1, 2]);
    let doors = world.pass(1000, |_| vec![seen(0), seen(1)]);
    assert!(world.changes.is_empty(), "one in a hundred may miss");
    assert_eq!(doors, [Door::open(world.terms[0].max_batch); 2]);
}

#[test]
fn a_few_misses_more_than_may_be_are_chance() {
    let mut world = World::new(&[1, 2]);
    world.pass(10, |_| vec![seen(2), seen(0)]);
    world.pass(200, |_| vec![seen(0), seen(0)]);
    assert!(world.changes.is_empty(), "twenty in a thousand, where ten may");
    world.pass(20, |_| vec![seen(3), seen(0)]);
    assert!(!world.changes.is_empty());
}

#[test]
fn a_step_that_comes_late_is_not_taken_back_for_the_calm_before_it() {
    let mut world = World::new(&[1, 2]);
    world.starting = 250;
    world.pass(7, |_| vec![seen(20), seen(0)]);
    world.pass(250, |_| vec![seen(0), seen(0)]);
    assert_eq!(world.shares[1], Sms(100));
    world.starting = 0;
    world.pass(90, |_| vec![seen(0), seen(0)]);
    assert_eq!(world.policy.shares()[1], Sms(100), "calm is what it is with the step");
}

#[test]
fn a_step_that_does_not_come_is_taken_back() {
    let mut world = World::new(&[1, 2]);
    world.starting = u32::MAX;
    world.pass(20, beyond_help);
    assert_eq!(world.policy.shares()[1], Sms(100));
    world.pass(310, |_| vec![seen(0), seen(0)]);
    assert_eq!(world.policy.shares()[1], GPU);
}

#[test]
fn a_closed_loop_that_slows_down_with_its_share_is_no_other_load() {
    let mut world = World::new(&[1, 2]);
    let closed = |shares: &[Sms], missed: u64| {
        let mut models = vec![seen(if shares[1] > Sms(66) { missed } else { 0 }), seen(0)];
        models[1].arrived = 20 + 80 * u64::from(shares[1].0) / u64::from(GPU.0);
        models
    };
    world.pass(200, |shares| closed(shares, 0));
    world.pass(6000, |shares| closed(shares, 20));
    assert_eq!(world.changes[2..], [(1, Sms(100)), (1, Sms(66))], "tried once in ten minutes");
}

#[test]
fn the_least_that_helps_is_done_within_two_seconds() {
    let mut world = World::new(&[1, 2]);
    world.pass(20, helped_by_half);
    assert_eq!(world.shares, [GPU, Sms(66)]);
    assert_eq!(world.changes, [(1, Sms(100)), (1, Sms(66))]);
}

#[test]
fn late_requests_are_refused_before_anything_else_and_until_two_seconds_after() {
    let mut world = World::new(&[1, 2]);
    let doors = world.pass(1, beyond_help);
    assert!(doors.iter().all(|door| door.refuse_late) && world.changes.is_empty(), "of all, as they meet");
    let fine = |_: &[Sms]| vec![seen(0), seen(0)];
    assert!(world.pass(19, fine)[0].refuse_late);
    assert!(!world.pass(2, fine)[0].refuse_late);
}

/// The seconds in which a first step was made, in so many seconds of this load.
fn tries(world: &mut World, seconds: u32, seen: impl Fn(&[Sms]) -> Vec<Seen>) -> Vec<u32> {
    let mut tries = Vec::new();
    for tenth in 0..10 * seconds {
        let before = world.changes.len();
        world.pass(1, &seen);
        tries.extend(world.changes[before..].contains(&(1, Sms(100))).then_some(tenth / 10));
    }
    tries
}

#[test]
fn what_does_not_help_is_taken_back_and_tried_once_more_and_then_left_be() {
    let mut world = World::new(&[1, 2]);
    let tries = tries(&mut world, 1000, beyond_help);
    let pauses: Vec<u32> = tries.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(matches!(pauses[..], [10..20, 600..620]), "{pauses:?}");
    assert_eq!(world.shares, [GPU, GPU]);
    assert!(matches!(world.why(0), Why::Helpless { .. }), "{:?}", world.why(0));
}

#[test]
fn what_did_not_help_is_tried_again_when_the_load_is_another_one() {
    let mut world = World::new(&[1, 2]);
    assert_eq!(tries(&mut world, 300, beyond_help).len(), 2);
    let more = |times: u64| {
        move |shares: &[Sms]| {
            let mut models = beyond_help(shares);
            models[1].arrived = times * models[1].arrived / 10;
            models
        }
    };
    assert_eq!(tries(&mut world, 100, more(12)), [], "a fifth more is the same load");
    assert!(!tries(&mut world, 100, more(20)).is_empty());
}

#[test]
fn what_is_needed_no_more_is_taken_back_for_good() {
    let mut world = World::new(&[1, 2]);
    world.pass(20, helped_by_half);
    let calm = |_: &[Sms]| vec![seen(0), seen(0)];
    world.pass(75, calm);
    assert_eq!(world.shares[1], Sms(66), "not before ten seconds");
    world.pass(400, calm);
    assert_eq!((world.shares[1], world.changes.len()), (GPU, 4));
}

#[test]
fn what_is_needed_still_is_taken_back_once_and_then_every_ten_minutes() {
    let mut world = World::new(&[1, 2]);
    world.pass(600, helped_by_half);
    assert_eq!(world.changes[2..], [(1, Sms(100)), (1, Sms(66))], "it is tried");
    world.pass(18_000, helped_by_half);
    assert_eq!(world.changes.len(), 4 + 2 * 3, "in half an hour more");
    assert_eq!(world.shares[1], Sms(66));
}

#[test]
fn the_lowest_priority_makes_room_first_and_says_for_which_model() {
    let mut world = World::new(&[1, 2, 3]);
    let helped = |shares: &[Sms]| vec![seen(if shares[2] > Sms(47) { 40 } else { 0 }), seen(0), seen(0)];
    world.pass(20, helped);
    let halves = [(0, Sms(88)), (1, Sms(88)), (2, Sms(88))];
    assert_eq!(world.changes[..3], halves, "each two thirds at most");
    assert_eq!(world.shares, [GPU, Sms(88), Sms(24)], "then two rungs at once, twice, as many miss");
    assert!(
        matches!(world.why(2), Why::MakesRoom { sake: 0, before, now } if before == 0.4 && now.part == 0.0),
        "{:?}",
        world.why(2)
    );
    assert!(matches!(world.why(0), Why::Met(_)));
}

#[test]
fn a_peer_makes_room_only_with_slack_and_a_higher_priority_never() {
    let with = |priorities: &[u32], p99_ms: u64, busy: f64| with_missing(priorities, p99_ms, busy, 0);
    assert_eq!(with(&[1, 1], 4, 0.4), Sms(66));
    assert_eq!(with(&[1, 1], 7, 0.4), GPU, "its latency is near its SLO");
    assert_eq!(with(&[1, 1], 4, 0.8), GPU, "it would not keep up");
    assert_eq!(with(&[2, 1], 4, 0.4), GPU);
    assert_eq!(with_missing(&[1, 1], 4, 0.4, 10), GPU, "it is short itself");
}

/// The share of a neighbour after two seconds in which so many of its requests miss.
fn with_missing(priorities: &[u32], p99_ms: u64, busy: f64, missed: u64) -> Sms {
    let mut world = World::new(priorities);
    world.pass(20, |shares| {
        let p99_latency = Duration::from_millis(p99_ms);
        vec![helped_by_half(shares).swap_remove(0), Seen { p99_latency, busy, ..seen(missed) }]
    });
    world.shares[1]
}

#[test]
fn a_peer_that_is_harmed_gets_back_what_it_had() {
    let mut world = World::new(&[1, 1]);
    world.pass(30, |shares| vec![seen(20), seen(if shares[1] < GPU { 30 } else { 0 })]);
    assert_eq!(world.shares[1], GPU);
}

#[test]
fn a_step_that_did_harm_is_not_made_for_another_model_either() {
    let mut world = World::new(&[1, 1, 2]);
    let lost = |shares: &[Sms]| if shares[2] < GPU { 80 } else { 0 };
    world.pass(60, |shares| vec![seen(20), seen(0), seen(lost(shares))]);
    assert_eq!(world.shares, [GPU; 3]);
    let made = world.changes.len();
    world.pass(60, |shares| vec![seen(0), seen(20), seen(lost(shares))]);
    assert_eq!(world.changes[made..], [(2, Sms(100)), (2, GPU)], "a smaller one, which harms too");
}

#[test]
fn two_requests_of_a_lower_priority_may_miss_for_each_that_is_saved_and_no_more() {
    let with = |lost: u64| {
        let mut world = World::new(&[1, 2]);
        world.pass(20, |shares| match shares[1] < GPU {
            true => vec![seen(5), seen(lost)],
            false => vec![seen(20), seen(0)],
        });
        world.shares[1]
    };
    assert!(with(25) < GPU);
    assert_eq!(with(70), GPU);
}

#[test]
fn misses_that_sms_cannot_mend_move_nothing() {
    let mut world = World::new(&[1, 2]);
    let short = |missed| {
        let executed = vec![Executed { rows: 4, count: 25, mean: Duration::from_millis(1) }];
        Seen { executed, queued: 7, ..seen(missed) }
    };
    let doors = world.pass(600, |_| vec![short(50), seen(0)]);
    assert!(world.changes.is_empty() && doors.iter().all(|door| !door.refuse_late));
    assert!(matches!(world.why(0), Why::NotItsBatches { two_batches, .. } if two_batches.as_millis() == 2));
}

#[test]
fn one_long_batch_in_ten_is_an_accident() {
    let two_batches = |batches: &[(u32, u64, u64)]| {
        let mut window = Window::default();
        for (tenth, &(rows, count, ms)) in (1..).zip(batches) {
            let executed = vec![Executed { rows, count, mean: Duration::from_millis(ms) }];
            window.add(&Seen { span: STEP, executed, ..Seen::default() }, Moment::after_origin(tenth * STEP));
        }
        window.two_batches().as_millis()
    };
    assert_eq!(two_batches(&[]), 0);
    assert_eq!(two_batches(&[(1, 9, 2), (3, 1, 50)]), 4);
    assert_eq!(two_batches(&[(1, 8, 2), (3, 1, 50)]), 100);
    assert_eq!(two_batches(&[(1, 18, 2), (3, 1, 50), (8, 1, 6)]), 4);
    assert_eq!(two_batches(&[(1, 18, 2), (3, 1, 50), (8, 2, 6)]), 12);
}

#[test]
fn a_worker_that_waits_for_the_host_is_not_behind() {
    let mut world = World::new(&[1, 2]);
    let executed = vec![Executed { rows: 4, count: 25, mean: Duration::from_millis(1) }];
    let waits = Seen { executed, queued: 7, busy: 1.0, ..seen(20) };
    let doors = world.pass(100, |_| vec![waits.clone(), seen(0)]);
    assert!(world.changes.is_empty() && doors.iter().all(|door| !door.refuse_late));
}

#[test]
fn a_worker_that_does_not_keep_up_may_be_helped_however_short_its_batches() {
    let mut world = World::new(&[1, 2]);
    let behind = |missed| {
        let executed = vec![Executed { rows: 4, count: 95, mean: Duration::from_millis(1) }];
        Seen { executed, queued: 7, ..seen(missed) }
    };
    world.pass(20, |shares| vec![behind(if shares[1] > Sms(66) { 50 } else { 0 }), seen(0)]);
    assert_eq!(world.shares[1], Sms(66));
}

#[test]
fn a_model_that_starts_with_less_has_the_gpu_before_others_make_room() {
    let mut terms = World::new(&[1, 2]).terms;
    (terms[0].initial, terms[0].initial_given) = (Sms(40), true);
    let mut world = World::of(terms);
    world.pass(20, |shares| vec![seen(if shares[0] < GPU { 20 } else { 0 }), seen(0)]);
    assert_eq!(world.changes, [(0, GPU)]);
}

#[test]
fn shares_that_are_held_are_left_alone() {
    let mut world = World::new(&[1, 2]);
    world.held = true;
    world.pass(50, beyond_help);
    assert!(world.changes.is_empty());
}

#[test]
fn what_was_known_goes_on_with_models_in_another_order() {
    let mut world = World::new(&[1, 2]);
    world.pass(20, helped_by_half);
    let terms: Vec<Terms> = world.terms.iter().rev().cloned().collect();
    let mut policy = Adaptive::new(&[GPU], &terms);
    policy.remember(&world.policy, 0, &terms, |model| Some(1 - model));
    assert_eq!(policy.shares(), [Sms(66), GPU]);
    (world.policy, world.terms) = (policy, terms);
    world.shares.reverse();
    world.pass(400, |_| vec![seen(0), seen(0)]);
    assert_eq!(world.shares, [GPU, GPU], "and is taken back as before");
}

#[test]
fn what_did_harm_is_known_of_models_in_another_order() {
    let mut world = World::new(&[1, 2]);
    let lost = |shares: &[Sms], low: usize| if shares[low] < GPU { 80 } else { 0 };
    world.pass(60, |shares| vec![seen(20), seen(lost(shares, 1))]);
    assert_eq!(world.changes, [(1, Sms(100)), (1, GPU)]);
    let terms: Vec<Terms> = world.terms.iter().rev().cloned().collect();
    let mut policy = Adaptive::new(&[GPU], &terms);
    policy.remember(&world.policy, 0, &terms, |model| Some(1 - model));
    (world.policy, world.terms) = (policy, terms);
    world.shares.reverse();
    world.pass(200, |shares| vec![seen(lost(shares, 0)), seen(20)]);
    assert_eq!(world.changes.len(), 2);
}

#[test]
fn a_gpu_knows_nothing_of_another() {
    let mut terms = World::new(&[1, 2, 2]).terms;
    terms[2].gpu = 1;
    let mut world = World::of(terms);
    let doors = world.pass(50, |_| vec![seen(40), seen(0), seen(0)]);
    assert!(world.changes.iter().all(|(model, _)| *model == 1) && !world.changes.is_empty());
    assert!(doors[1].refuse_late && !doors[2].refuse_late);
}
