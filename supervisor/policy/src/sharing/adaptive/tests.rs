use std::time::Duration;

use shadowslice_shared::groups::GpuPart;
use shadowslice_shared::profile::{Execution, ExecutionRow};
use shadowslice_shared::units::Timestamp;

use super::super::difference::towards;
use super::super::fixtures::{live, terms};
use super::super::{Executed, Seen, Verdict};
use super::*;

const GPU: Sms = Sms(132);
const LOOK: Duration = Duration::from_millis(100);

/// Models of these priorities on one GPU, or on two.
struct World {
    policy: Adaptive,
    terms: Vec<Terms>,
    now: Timestamp,
    shares: Vec<Sms>,
    groups: Vec<Option<Groups>>,
    changes: Vec<(usize, Sms)>,
    held: bool,
    execution: Option<Execution>,
    /// Changes that were ordered never come.
    stuck: bool,
    report: Vec<Verdict>,
}

impl World {
    fn new(priorities: &[u32]) -> Self {
        let model = |&priority: &u32| Terms { priority, ..terms("model", 10) };
        Self::of(priorities.iter().map(model).collect())
    }

    fn of(terms: Vec<Terms>) -> Self {
        let policy = Adaptive::new(&[SharedGpu::new(GPU), SharedGpu::new(GPU)], &terms);
        let shares = policy.shares(&terms);
        let groups = vec![Some(Groups::WHOLE); terms.len()];
        Self {
            policy,
            terms,
            now: Timestamp::default(),
            shares,
            groups,
            changes: Vec::new(),
            held: false,
            execution: None,
            stuck: false,
            report: Vec::new(),
        }
    }

    /// Shares change by shadows from now on.
    fn by_shadows(mut self) -> Self {
        self.groups.fill(None);
        self
    }

    /// All models see this for so many tenths of a second. Returns the last doors.
    fn pass(&mut self, tenths: usize, seen: impl Fn(&[Sms]) -> Vec<Seen>) -> Vec<Door> {
        let mut doors = Vec::new();
        for _ in 0..tenths {
            self.now = self.now + LOOK;
            let models = seen(&self.shares).into_iter().enumerate().map(|(model, seen)| Live {
                seen,
                held: self.held,
                execution: self.execution.clone(),
                groups: self.groups[model],
                ..live(self.shares[model])
            });
            let facts = Facts { now: self.now, gpus: vec![GPU; 2], models: models.collect() };
            let decision = towards(&self.policy.decide(&self.terms, &facts), &self.terms, &facts);
            for change in decision.changes.iter().filter(|_| !self.stuck) {
                self.shares[change.model] = change.to;
                self.groups[change.model] =
                    self.groups[change.model].map(|_| change.groups.unwrap_or(Groups::WHOLE));
                self.changes.push((change.model, change.to));
            }
            (doors, self.report) = (decision.doors, decision.report);
        }
        doors
    }

    fn stage(&self, model: usize) -> Option<(LayoutStage, Pattern)> {
        match &self.report[model].why {
            Why::Layout(layout) => Some((layout.stage, layout.pattern)),
            _ => None,
        }
    }
}

/// A tenth of a second: a hundred requests, of which so many missed, in batches of 4 that take half
/// of the objective.
fn seen(missed: u64) -> Seen {
    Seen {
        span: LOOK,
        arrived: 100,
        answered: 100,
        in_good_time: 100 - missed,
        busy: 0.5,
        executed: vec![Executed { rows: 4, count: 10, mean: Duration::from_millis(5) }],
        ..Seen::default()
    }
}

fn is_half(share: Sms) -> bool {
    (Sms(50)..=Sms(72)).contains(&share)
}

/// The first of two models misses until the second has half of the GPU.
fn helped_by_half(shares: &[Sms]) -> Vec<Seen> {
    vec![seen(if shares[1] > Sms(72) { 20 } else { 0 }), seen(0)]
}

/// The first of two models misses until it has a part of the GPU to itself.
fn helped_apart(shares: &[Sms]) -> Vec<Seen> {
    vec![seen(if shares[0] < GPU { 0 } else { 20 }), seen(0)]
}

fn beyond_help(_: &[Sms]) -> Vec<Seen> {
    vec![seen(40), seen(0)]
}

#[test]
fn while_no_model_violates_its_objective_nothing_happens() {
    let mut world = World::new(&[1, 2]);
    let doors = world.pass(300, |_| vec![seen(1), seen(1)]);
    assert!(world.changes.is_empty() && doors.iter().all(|door| !door.refuse_late));
    assert_eq!(world.shares, [GPU; 2]);
}

#[test]
fn late_requests_are_refused_before_layouts_are_tried_and_until_two_seconds_after() {
    let mut world = World::new(&[1, 2]);
    let doors = world.pass(1, beyond_help);
    assert!(doors.iter().all(|door| door.refuse_late) && world.changes.is_empty());
    let fine = |_: &[Sms]| vec![seen(0), seen(0)];
    assert!(world.pass(19, fine)[0].refuse_late);
    assert!(!world.pass(3, fine)[0].refuse_late && world.changes.is_empty());
}

#[test]
fn the_gentlest_layout_that_suffices_stays_and_comes_within_a_second() {
    let mut world = World::new(&[1, 2]);
    world.pass(10, helped_by_half);
    assert_eq!(world.stage(0), Some((LayoutStage::Chosen, Pattern::LowerHalf)), "{:?}", world.changes);
    assert!(world.shares[0] == GPU && is_half(world.shares[1]));
    world.pass(600, helped_by_half);
    assert!(is_half(world.shares[1]));
}

#[test]
fn the_first_priority_is_never_confined_for_a_lower_one() {
    let mut world = World::new(&[1, 2, 2]);
    let confined = |shares: &[Sms]| shares[0] < GPU;
    for _ in 0..200 {
        world.pass(1, |shares| vec![seen(0), seen(if confined(shares) { 10 } else { 40 }), seen(40)]);
    }
    assert_eq!(world.shares[0], GPU, "{:?}", world.report[0].why);
}

#[test]
fn peers_of_one_priority_divide_the_gpu_if_that_saves_requests() {
    let mut world = World::new(&[1, 1, 1, 1]);
    let apart = |shares: &[Sms]| shares.iter().all(|&share| share < Sms(100));
    world.pass(60, |shares| vec![seen(if apart(shares) { 10 } else { 40 }); 4]);
    assert!(apart(&world.shares), "{:?} {:?}", world.shares, world.report[0].why);
    let own = world.groups[0].unwrap();
    assert!(world.groups.iter().any(|groups| groups.unwrap().common(own) == Groups::NONE));
}

#[test]
fn where_no_layout_saves_requests_the_shares_are_as_before_and_are_left_alone() {
    let mut world = World::new(&[1, 2]);
    world.pass(3, beyond_help);
    assert!(matches!(world.report[0].why, Why::Violating(_)));
    world.pass(60, beyond_help);
    assert_eq!(world.stage(0), Some((LayoutStage::Chosen, Pattern::AtRest)));
    assert_eq!(world.shares, [GPU; 2]);
    let tried = world.changes.len();
    assert!(tried > 4);
    world.pass(5000, beyond_help);
    assert_eq!(world.changes.len(), tried, "it is as bad as it was when it was tried");
}

#[test]
fn another_load_is_tried_anew() {
    let mut world = World::new(&[1, 2]);
    world.pass(100, beyond_help);
    let before = world.changes.len();
    let worse = |factor: u64| {
        move |_: &[Sms]| {
            let mut models = vec![seen(80), seen(20)];
            models.iter_mut().for_each(|seen| seen.arrived *= factor);
            models
        }
    };
    world.pass(300, worse(3));
    assert!(world.changes.len() > before);
}

#[test]
fn another_load_is_noticed_within_a_second_and_before_the_pause_is_over() {
    let mut world = World::new(&[1, 2]);
    world.pass(100, beyond_help);
    let before = world.changes.len();
    let heavier = |missed: u64| Seen { arrived: 300, ..seen(missed) };
    world.pass(7, |_| vec![heavier(80), heavier(20)]);
    assert!(matches!(world.stage(0), Some((LayoutStage::Trying, _))), "{:?}", world.report[0].why);
    world.pass(20, |_| vec![heavier(80), heavier(20)]);
    assert!(world.changes.len() > before);
}

#[test]
fn a_load_beyond_a_layout_that_sufficed_is_watched_before_layouts_are_listed() {
    let mut world = World::new(&[1, 2, 2]);
    let halves_help = |shares: &[Sms]| vec![seen(0), seen(if shares[1] > Sms(72) { 20 } else { 0 }), seen(0)];
    world.pass(50, halves_help);
    let sufficed = Some((LayoutStage::Chosen, Pattern::LowerHalves));
    assert_eq!((world.stage(1), world.policy.gpus[0].refuses(world.now)), (sufficed, false));
    let heavier = |missed: u64| Seen { arrived: 300, ..seen(missed) };
    world.pass(60, |_| vec![heavier(0), heavier(60), heavier(40)]);
    let Why::Layout(layout) = &world.report[1].why else { panic!("{:?}", world.report[1].why) };
    assert!(layout.tried.len() > 2, "more than the shares at rest: {layout:?}");
}

#[test]
fn what_is_needed_no_more_is_taken_back_for_good() {
    let mut world = World::new(&[1, 2]);
    world.pass(20, helped_by_half);
    let calm = |_: &[Sms]| vec![seen(0), seen(0)];
    world.pass(70, calm);
    assert!(is_half(world.shares[1]), "not before ten seconds");
    world.pass(400, calm);
    assert_eq!((world.shares[1], world.changes.len()), (GPU, 2));
}

#[test]
fn what_is_needed_still_is_taken_back_once_and_then_every_ten_minutes() {
    let mut world = World::new(&[1, 2]);
    world.pass(600, helped_by_half);
    assert_eq!(world.changes.len(), 3, "half, whole, and half again: {:?}", world.changes);
    world.pass(18_000, helped_by_half);
    assert!(world.changes.len() <= 3 + 2 * 4, "in half an hour more: {:?}", world.changes);
    assert!(is_half(world.shares[1]));
}

#[test]
fn a_layout_that_suffices_no_more_is_followed_by_the_next() {
    let mut world = World::new(&[1, 2]);
    world.pass(20, helped_by_half);
    world.pass(120, helped_apart);
    assert!(world.shares[0] < GPU, "{:?} {:?}", world.shares, world.report[0].why);
}

#[test]
fn the_best_layout_for_a_load_is_remembered() {
    let mut world = World::new(&[1, 2]);
    world.pass(40, helped_apart);
    let first = world.changes.len();
    world.pass(1000, |_| vec![seen(0), seen(0)]);
    assert_eq!(world.shares, [GPU; 2]);
    let calm = world.changes.len();
    world.pass(10, helped_apart);
    assert_eq!((first, world.changes.len()), (2, calm + 2), "{:?}", world.changes);
    assert!(world.shares[0] < GPU);
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
    let why = &world.report[0].why;
    assert!(matches!(why, Why::NotItsBatches { two_batches, .. } if two_batches.as_millis() == 2));
}

#[test]
fn a_model_that_cannot_keep_its_objective_alone_causes_nothing_and_says_so() {
    let mut world = World::new(&[1, 2]);
    let row = ExecutionRow { batch: 1, ms: vec![6.0] };
    world.execution = Some(Execution::new(vec![GPU], vec![row]).unwrap());
    let slow = |missed| Seen { executed: Vec::new(), ..seen(missed) };
    let doors = world.pass(100, |_| vec![slow(40), slow(0)]);
    assert!(world.changes.is_empty() && !doors[0].refuse_late);
    let why = &world.report[0].why;
    assert!(matches!(why, Why::CannotBeKept { two_batches, .. } if two_batches.as_millis() == 12));
}

#[test]
fn a_worker_that_does_not_keep_up_may_be_helped_however_short_its_batches() {
    let mut world = World::new(&[1, 2]);
    let behind = |missed| {
        let executed = vec![Executed { rows: 4, count: 95, mean: Duration::from_millis(1) }];
        Seen { executed, queued: 7, ..seen(missed) }
    };
    world.pass(10, |shares| vec![behind(if shares[1] > Sms(72) { 50 } else { 0 }), seen(0)]);
    assert!(is_half(world.shares[1]));
}

#[test]
fn a_model_that_starts_with_less_has_the_gpu_before_others_have_less() {
    let mut terms = World::new(&[1, 2]).terms;
    (terms[0].initial, terms[0].initial_given) = (Sms(40), true);
    let mut world = World::of(terms);
    assert_eq!(world.shares, [Sms(40), GPU]);
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
fn bounds_of_a_share_bound_every_layout() {
    let mut terms = World::new(&[1, 2]).terms;
    terms[1].shares.retain(|&share| share >= Sms(100));
    let mut world = World::of(terms);
    world.pass(100, beyond_help);
    let moved = world.changes.iter().filter(|(model, _)| *model == 1);
    assert!(moved.clone().all(|&(_, to)| to >= Sms(100)), "{:?}", world.changes);
}

#[test]
fn by_shadows_few_layouts_are_tried_and_one_that_never_comes_is_given_up() {
    let mut world = World::new(&[1, 2, 2, 3]).by_shadows();
    world.pass(100, |_| vec![seen(40); 4]);
    let Why::Layout(layout) = &world.report[0].why else { panic!("{:?}", world.report[0].why) };
    assert!(layout.tried.len() <= 1 + BY_SHADOWS, "{:?}", layout.tried);
    let mut world = World::new(&[1, 2]).by_shadows();
    world.stuck = true;
    world.pass(700, beyond_help);
    assert_eq!(world.stage(0), Some((LayoutStage::Chosen, Pattern::AtRest)));
}

#[test]
fn models_that_move_at_once_are_moved_before_one_that_takes_a_shadow() {
    let mut world = World::new(&[1, 2, 2]);
    world.groups[2] = None;
    world.pass(60, |_| vec![seen(40); 3]);
    let first = |model: usize| world.changes.iter().position(|(of, _)| *of == model).unwrap();
    assert!(first(1) < first(2), "{:?}", world.changes);
    let by_shadow = world.changes.iter().filter(|(of, _)| *of == 2).count();
    assert!(by_shadow <= 2, "there and back: {:?}", world.changes);
}

#[test]
fn a_second_trial_compares_what_it_measured_itself() {
    let mut world = World::new(&[1, 2]);
    world.pass(20, helped_by_half);
    // From now on the half does not help any more, and nothing else does either.
    world.pass(50, |_| vec![seen(0); 2]);
    world.pass(60, |shares| vec![seen(if is_half(shares[1]) { 30 } else { 50 }), seen(0)]);
    let Why::Layout(layout) = &world.report[0].why else { panic!("{:?}", world.report[0].why) };
    let half = layout.tried.iter().find(|tried| tried.pattern == Pattern::LowerHalf).unwrap();
    assert!((half.of_first_priority - 0.3).abs() < 0.01, "{layout:?}");
    assert_eq!(layout.pattern, Pattern::LowerHalf);
}

#[test]
fn the_gentlest_layout_is_tried_first_and_those_that_are_forecast_to_be_worse_are_not() {
    let row = |batch: u32| ExecutionRow { batch, ms: vec![f64::from(batch), f64::from(batch) / 4.0] };
    let execution = Execution::new(vec![Sms(33), GPU], vec![row(1), row(16)]).unwrap();
    let tenant = |model: usize, priority: u32| Tenant { model, priority, work: 0.4 };
    let all = [tenant(0, 1), tenant(1, 2), tenant(2, 2)];
    let demand = |tenant: &Tenant| Demand {
        tenant: *tenant,
        rows_per_s: 1500.0,
        slo: Duration::from_millis(20),
        max_batch: 16,
        execution: &execution,
    };
    let demands: Vec<Demand<'_>> = all.iter().map(demand).collect();
    let (layouts, shape) = (candidates(&all, &all, Some(all[0])), SharedGpu::new(GPU));
    let listed = |missed: f64| shortlist(layouts.clone(), Some(&demands), (&Layout::AT_REST, missed), &shape);
    let loss = |layout: &Layout| forecast(layout, &demands, &shape).loss();
    let all = listed(f64::INFINITY);
    assert_eq!(all[0].pattern, Pattern::LowerHalves);
    assert!(all[1..].is_sorted_by_key(loss) && loss(&all[1]) < loss(&all[all.len() - 1]));
    assert!(all.len() < layouts.len(), "two of each pattern at most");
    let present = &all[all.len() / 2];
    let few = shortlist(layouts.clone(), Some(&demands), (present, 0.0), &shape);
    assert!(few.len() < all.len() && few.len() > 1);
    assert!(few[1..].iter().all(|layout| loss(layout) < loss(present)), "the gentlest is tried in any case");
    let unknown = shortlist(layouts.clone(), None, (&Layout::AT_REST, 1.0), &shape);
    let mut patterns: Vec<Pattern> = layouts.iter().map(|layout| layout.pattern).collect();
    patterns.dedup();
    assert_eq!(unknown.iter().map(|layout| layout.pattern).collect::<Vec<_>>(), patterns);
}

#[test]
fn models_keep_their_parts_when_they_have_other_indices() {
    let mut world = World::new(&[1, 2]);
    world.pass(20, helped_by_half);
    let terms: Vec<Terms> = world.terms.iter().rev().cloned().collect();
    let mut policy = Adaptive::new(&[SharedGpu::new(GPU)], &terms);
    policy.remember(&world.policy, 0, &terms, |model| Some(1 - model));
    let shares = policy.shares(&terms);
    assert!(is_half(shares[0]) && shares[1] == GPU, "{shares:?}");
}

#[test]
fn a_gpu_knows_nothing_of_another() {
    let mut terms = World::new(&[1, 2, 2]).terms;
    terms[2].gpu = 1;
    let mut world = World::of(terms);
    let doors = world.pass(50, |_| vec![seen(40), seen(0), seen(0)]);
    assert!(world.changes.iter().all(|(model, _)| *model < 2) && !world.changes.is_empty());
    assert!(doors[1].refuse_late && !doors[2].refuse_late);
}

#[test]
fn one_long_batch_in_ten_is_an_accident() {
    let two_batches = |batches: &[(u32, u64, u64)]| {
        let mut window = Window::default();
        for (tenth, &(rows, count, ms)) in (1..).zip(batches) {
            let executed = vec![Executed { rows, count, mean: Duration::from_millis(ms) }];
            window.add(
                &Seen { span: LOOK, executed, ..Seen::default() },
                Timestamp::after_origin(tenth * LOOK),
            );
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
fn parts_of_layouts_are_of_the_family_that_workers_prepare() {
    let family: Vec<GpuPart> = GpuPart::family().collect();
    for models in 2..8_usize {
        let tenant = |model: usize| Tenant {
            model,
            priority: 1 + model as u32 % 3,
            work: 0.1 * (1 + model % 5) as f64,
        };
        let tenants: Vec<Tenant> = (0..models).map(tenant).collect();
        for layout in candidates(&tenants, &tenants, tenants.first().copied()) {
            let parts = (0..models).map(|model| layout.part_of(model));
            assert!(parts.clone().all(|part| part == GpuPart::WHOLE || family.contains(&part)), "{layout:?}");
        }
    }
}

#[test]
fn many_short_kernels_are_kept_apart_from_few_long_ones() {
    let row = |batch: u32| ExecutionRow { batch, ms: vec![2.0 * f64::from(batch), f64::from(batch)] };
    let execution = |kernels: u32| {
        Execution::new(vec![Sms(66), GPU], vec![row(1), row(8)]).unwrap().with_kernels(kernels)
    };
    let (short, long) = (execution(400), execution(20));
    // By work the second and third would be in one half.
    let tenant = |model: usize, priority: u32, work: f64| Tenant { model, priority, work };
    let all = [tenant(0, 1, 0.1), tenant(1, 2, 0.2), tenant(2, 2, 0.2), tenant(3, 2, 0.4)];
    let demand = |tenant: &Tenant| {
        let (rows_per_s, slo_ms, execution) =
            if tenant.model == 1 { (300.0, 10, &short) } else { (80.0, 100, &long) };
        Demand { tenant: *tenant, rows_per_s, slo: Duration::from_millis(slo_ms), max_batch: 8, execution }
    };
    let demands: Vec<Demand<'_>> = all.iter().map(demand).collect();
    let layouts = candidates(&all, &all, Some(all[0]));
    let list = shortlist(layouts, Some(&demands), (&Layout::AT_REST, 1.0), &SharedGpu::new(GPU));
    let halves: Vec<&Layout> = list.iter().filter(|layout| layout.pattern == Pattern::LowerHalves).collect();
    let [by_work, best] = halves[..] else { panic!("{list:?}") };
    assert!(by_work.part_of(1) == by_work.part_of(2));
    assert!(best.part_of(1) != best.part_of(2) && best.part_of(2) == best.part_of(3), "{best:?}");
}

#[test]
fn by_shadows_nothing_is_tried_for_a_few_misses() {
    let changes = |missed: u64| {
        let mut world = World::new(&[1, 2]).by_shadows();
        let doors = world.pass(300, |_| vec![seen(missed), seen(0)]);
        assert!(doors[0].refuse_late, "they are violations all the same");
        world.changes.len()
    };
    assert_eq!(changes(4), 0);
    assert!(changes(20) > 0);
}
