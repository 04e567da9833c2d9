mod shortlist;

use std::time::Duration;

use shadowslice_shared::profile::{Execution, ExecutionRow};
use shadowslice_shared::units::Timestamp;

use super::super::changes::plan_changes;
use super::super::fixtures::{snapshot, spec};
use super::super::{BatchStats, Observation, Verdict};
use super::*;

const GPU: Sms = Sms(132);
const INTERVAL: Duration = Duration::from_millis(100);

/// A simulation of models with these priorities on one or two GPUs.
struct World {
    policy: Adaptive,
    specs: Vec<ModelSpec>,
    now: Timestamp,
    shares: Vec<Sms>,
    groups: Vec<Option<Groups>>,
    changes: Vec<(usize, Sms)>,
    held: bool,
    execution: Option<Execution>,
    /// The models whose batches can pause.
    can_pause: Vec<usize>,
    /// True if decided changes never take effect.
    stuck: bool,
    report: Vec<Verdict>,
}

impl World {
    fn new(priorities: &[u32]) -> Self {
        let model = |&priority: &u32| ModelSpec { priority, ..spec("model", 10) };
        Self::of(priorities.iter().map(model).collect())
    }

    fn of(specs: Vec<ModelSpec>) -> Self {
        let policy = Adaptive::new(&[SharedGpu::new(GPU), SharedGpu::new(GPU)], &specs);
        let shares = policy.shares(&specs);
        let groups = vec![Some(Groups::WHOLE); specs.len()];
        Self {
            policy,
            specs,
            now: Timestamp::default(),
            shares,
            groups,
            changes: Vec::new(),
            held: false,
            execution: None,
            can_pause: Vec::new(),
            stuck: false,
            report: Vec::new(),
        }
    }

    /// Makes every change of a share start a shadow.
    fn by_shadows(mut self) -> Self {
        self.groups.fill(None);
        self
    }

    /// Advances the time by this number of tenths of a second, with these observations of all models.
    /// Returns the last admission limits.
    fn pass(
        &mut self,
        tenths: usize,
        observation: impl Fn(&[Sms]) -> Vec<Observation>,
    ) -> Vec<AdmissionPolicy> {
        let mut admissions = Vec::new();
        for _ in 0..tenths {
            self.now = self.now + INTERVAL;
            let models =
                observation(&self.shares).into_iter().enumerate().map(|(model, observation)| ModelSnapshot {
                    observation,
                    held: self.held,
                    can_pause: self.can_pause.contains(&model),
                    execution: self.execution.clone(),
                    groups: self.groups[model],
                    ..snapshot(self.shares[model])
                });
            let input = PolicyInput { now: self.now, gpus: vec![GPU; 2], models: models.collect() };
            let decision = plan_changes(&self.policy.decide(&self.specs, &input), &self.specs, &input);
            for change in decision.changes.iter().filter(|_| !self.stuck) {
                self.shares[change.model] = change.to;
                self.groups[change.model] =
                    self.groups[change.model].map(|_| change.groups.unwrap_or(Groups::WHOLE));
                self.changes.push((change.model, change.to));
            }
            (admissions, self.report) = (decision.admissions, decision.report);
        }
        admissions
    }

    fn stage(&self, model: usize) -> Option<(LayoutStage, Pattern)> {
        match &self.report[model].why {
            VerdictReason::Layout(layout) => Some((layout.stage, layout.pattern)),
            _ => None,
        }
    }
}

/// Returns an observation of a tenth of a second with 100 requests and `missed` misses. Batches have 4
/// rows and take half of the SLO.
fn observation(missed: u64) -> Observation {
    Observation {
        span: INTERVAL,
        arrived: 100,
        answered: 100,
        in_time_at_client: 100 - missed,
        busy: 0.5,
        batches: vec![BatchStats { rows: 4, count: 10, mean: Duration::from_millis(5) }],
        ..Observation::default()
    }
}

fn is_half(share: Sms) -> bool {
    (Sms(50)..=Sms(72)).contains(&share)
}

/// Returns observations in which the first of two models has misses until the share of the second model
/// is at most half of the GPU.
fn helped_by_half(shares: &[Sms]) -> Vec<Observation> {
    vec![observation(if shares[1] > Sms(72) { 20 } else { 0 }), observation(0)]
}

/// Returns observations in which the first of two models has misses until it has a part of the GPU that
/// the second model does not use.
fn helped_apart(shares: &[Sms]) -> Vec<Observation> {
    vec![observation(if shares[0] < GPU { 0 } else { 20 }), observation(0)]
}

fn beyond_help(_: &[Sms]) -> Vec<Observation> {
    vec![observation(40), observation(0)]
}

#[test]
fn while_no_model_violates_its_objective_nothing_happens() {
    let mut world = World::new(&[1, 2]);
    let admissions = world.pass(300, |_| vec![observation(1), observation(1)]);
    assert!(world.changes.is_empty() && admissions.iter().all(|admission| !admission.refuse_late));
    assert_eq!(world.shares, [GPU; 2]);
}

#[test]
fn late_requests_are_refused_before_layouts_are_tried_and_until_two_seconds_after() {
    let mut world = World::new(&[1, 2]);
    let admissions = world.pass(1, beyond_help);
    assert!(admissions.iter().all(|admission| admission.refuse_late) && world.changes.is_empty());
    let fine = |_: &[Sms]| vec![observation(0), observation(0)];
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
        world.pass(1, |shares| {
            vec![observation(0), observation(if confined(shares) { 10 } else { 40 }), observation(40)]
        });
    }
    assert_eq!(world.shares[0], GPU, "{:?}", world.report[0].why);
}

#[test]
fn peers_of_one_priority_divide_the_gpu_if_that_saves_requests() {
    let mut world = World::new(&[1, 1, 1, 1]);
    let apart = |shares: &[Sms]| shares.iter().all(|&share| share < Sms(100));
    world.pass(60, |shares| vec![observation(if apart(shares) { 10 } else { 40 }); 4]);
    assert!(apart(&world.shares), "{:?} {:?}", world.shares, world.report[0].why);
    let own = world.groups[0].unwrap();
    assert!(world.groups.iter().any(|groups| groups.unwrap().common(own) == Groups::NONE));
}

#[test]
fn where_no_layout_saves_requests_the_shares_are_as_before_and_are_left_alone() {
    let mut world = World::new(&[1, 2]);
    world.pass(3, beyond_help);
    assert!(matches!(world.report[0].why, VerdictReason::Violating(_)));
    world.pass(60, beyond_help);
    assert_eq!(world.stage(0), Some((LayoutStage::Chosen, Pattern::AtRest)));
    assert_eq!(world.shares, [GPU; 2]);
    let tried = world.changes.len();
    assert!(tried > 4);
    world.pass(5000, beyond_help);
    assert_eq!(world.changes.len(), tried, "the load is the same as during the trial");
}

#[test]
fn another_load_causes_another_trial() {
    let mut world = World::new(&[1, 2]);
    world.pass(100, beyond_help);
    let before = world.changes.len();
    let worse = |factor: u64| {
        move |_: &[Sms]| {
            let mut models = vec![observation(80), observation(20)];
            models.iter_mut().for_each(|observation| observation.arrived *= factor);
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
    let heavier = |missed: u64| Observation { arrived: 300, ..observation(missed) };
    world.pass(7, |_| vec![heavier(80), heavier(20)]);
    assert!(matches!(world.stage(0), Some((LayoutStage::Trying, _))), "{:?}", world.report[0].why);
    world.pass(20, |_| vec![heavier(80), heavier(20)]);
    assert!(world.changes.len() > before);
}

#[test]
fn a_load_beyond_a_layout_that_sufficed_is_watched_before_layouts_are_listed() {
    let mut world = World::new(&[1, 2, 2]);
    let halves_help = |shares: &[Sms]| {
        vec![observation(0), observation(if shares[1] > Sms(72) { 20 } else { 0 }), observation(0)]
    };
    world.pass(50, halves_help);
    let sufficed = Some((LayoutStage::Chosen, Pattern::LowerHalves));
    assert_eq!((world.stage(1), world.policy.gpus[0].refuses(world.now)), (sufficed, false));
    let heavier = |missed: u64| Observation { arrived: 300, ..observation(missed) };
    world.pass(60, |_| vec![heavier(0), heavier(60), heavier(40)]);
    let VerdictReason::Layout(layout) = &world.report[1].why else { panic!("{:?}", world.report[1].why) };
    assert!(layout.tried.len() > 2, "more than the shares at rest: {layout:?}");
}

#[test]
fn what_is_needed_no_more_is_taken_back_for_good() {
    let mut world = World::new(&[1, 2]);
    world.pass(20, helped_by_half);
    let calm = |_: &[Sms]| vec![observation(0), observation(0)];
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
    world.pass(1000, |_| vec![observation(0), observation(0)]);
    assert_eq!(world.shares, [GPU; 2]);
    let calm = world.changes.len();
    world.pass(10, helped_apart);
    assert_eq!((first, world.changes.len()), (2, calm + 2), "{:?}", world.changes);
    assert!(world.shares[0] < GPU);
}

#[test]
fn misses_that_more_sms_cannot_prevent_change_nothing() {
    let mut world = World::new(&[1, 2]);
    let brief = |missed| {
        let batches = vec![BatchStats { rows: 4, count: 25, mean: Duration::from_millis(1) }];
        Observation { batches, queued: 7, ..observation(missed) }
    };
    let admissions = world.pass(600, |_| vec![brief(50), observation(0)]);
    assert!(world.changes.is_empty() && admissions.iter().all(|admission| !admission.refuse_late));
    let why = &world.report[0].why;
    assert!(matches!(why, VerdictReason::NotBatchTime { two_batches, .. } if two_batches.as_millis() == 2));
}

#[test]
fn a_model_that_cannot_keep_its_objective_alone_causes_nothing_and_says_so() {
    let mut world = World::new(&[1, 2]);
    let row = ExecutionRow { batch: 1, ms: vec![6.0] };
    world.execution = Some(Execution::new(vec![GPU], vec![row]).unwrap());
    let slow = |missed| Observation { batches: Vec::new(), ..observation(missed) };
    let admissions = world.pass(100, |_| vec![slow(40), slow(0)]);
    assert!(world.changes.is_empty() && !admissions[0].refuse_late);
    let why = &world.report[0].why;
    assert!(matches!(why, VerdictReason::Infeasible { two_batches, .. } if two_batches.as_millis() == 12));
}

#[test]
fn a_worker_that_does_not_keep_up_may_be_helped_however_short_its_batches() {
    let mut world = World::new(&[1, 2]);
    let behind = |missed| {
        let batches = vec![BatchStats { rows: 4, count: 95, mean: Duration::from_millis(1) }];
        Observation { batches, queued: 7, ..observation(missed) }
    };
    world.pass(10, |shares| vec![behind(if shares[1] > Sms(72) { 50 } else { 0 }), observation(0)]);
    assert!(is_half(world.shares[1]));
}

#[test]
fn a_model_that_starts_with_less_has_the_gpu_before_others_have_less() {
    let mut specs = World::new(&[1, 2]).specs;
    (specs[0].initial, specs[0].initial_given) = (Sms(40), true);
    let mut world = World::of(specs);
    assert_eq!(world.shares, [Sms(40), GPU]);
    world.pass(20, |shares| vec![observation(if shares[0] < GPU { 20 } else { 0 }), observation(0)]);
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
    let mut specs = World::new(&[1, 2]).specs;
    specs[1].shares.retain(|&share| share >= Sms(100));
    let mut world = World::of(specs);
    world.pass(100, beyond_help);
    let moved = world.changes.iter().filter(|(model, _)| *model == 1);
    assert!(moved.clone().all(|&(_, to)| to >= Sms(100)), "{:?}", world.changes);
}

#[test]
fn by_shadows_few_layouts_are_tried_and_one_that_never_comes_is_given_up() {
    let mut world = World::new(&[1, 2, 2, 3]).by_shadows();
    world.pass(100, |_| vec![observation(40); 4]);
    let VerdictReason::Layout(layout) = &world.report[0].why else { panic!("{:?}", world.report[0].why) };
    assert!(layout.tried.len() <= 1 + MAX_TRIED_BY_SHADOW, "{:?}", layout.tried);
    let mut world = World::new(&[1, 2]).by_shadows();
    world.stuck = true;
    world.pass(700, beyond_help);
    assert_eq!(world.stage(0), Some((LayoutStage::Chosen, Pattern::AtRest)));
}

#[test]
fn models_that_move_at_once_are_moved_before_one_that_takes_a_shadow() {
    let mut world = World::new(&[1, 2, 2]);
    world.groups[2] = None;
    world.pass(60, |_| vec![observation(40); 3]);
    let first = |model: usize| world.changes.iter().position(|(of, _)| *of == model).unwrap();
    assert!(first(1) < first(2), "{:?}", world.changes);
    let by_shadow = world.changes.iter().filter(|(of, _)| *of == 2).count();
    assert!(by_shadow <= 2, "there and back: {:?}", world.changes);
}

#[test]
fn a_second_trial_compares_what_it_measured_itself() {
    let mut world = World::new(&[1, 2]);
    world.pass(20, helped_by_half);
    // From this point on, every layout has many misses.
    world.pass(50, |_| vec![observation(0); 2]);
    world.pass(60, |shares| vec![observation(if is_half(shares[1]) { 30 } else { 50 }), observation(0)]);
    let VerdictReason::Layout(layout) = &world.report[0].why else { panic!("{:?}", world.report[0].why) };
    let half = layout.tried.iter().find(|tried| tried.pattern == Pattern::LowerHalf).unwrap();
    assert!((half.missed_first_priority - 0.3).abs() < 0.01, "{layout:?}");
    assert_eq!(layout.pattern, Pattern::LowerHalf);
}

#[test]
fn models_keep_their_parts_when_they_have_other_indices() {
    let mut world = World::new(&[1, 2]);
    world.pass(20, helped_by_half);
    let specs: Vec<ModelSpec> = world.specs.iter().rev().cloned().collect();
    let mut policy = Adaptive::new(&[SharedGpu::new(GPU)], &specs);
    policy.remember(&world.policy, 0, &specs, |model| Some(1 - model));
    let shares = policy.shares(&specs);
    assert!(is_half(shares[0]) && shares[1] == GPU, "{shares:?}");
}

#[test]
fn a_gpu_knows_nothing_of_another() {
    let mut specs = World::new(&[1, 2, 2]).specs;
    specs[2].gpu = 1;
    let mut world = World::of(specs);
    let admissions = world.pass(50, |_| vec![observation(40), observation(0), observation(0)]);
    assert!(world.changes.iter().all(|(model, _)| *model < 2) && !world.changes.is_empty());
    assert!(admissions[1].refuse_late && !admissions[2].refuse_late);
}

#[test]
fn one_long_batch_in_ten_is_an_accident() {
    let two_batches = |batches: &[(u32, u64, u64)]| {
        let mut window = ObservationWindow::default();
        for (tenth, &(rows, count, ms)) in (1..).zip(batches) {
            let batches = vec![BatchStats { rows, count, mean: Duration::from_millis(ms) }];
            window.add(
                &Observation { span: INTERVAL, batches, ..Observation::default() },
                Timestamp::after_origin(tenth * INTERVAL),
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
fn by_shadows_nothing_is_tried_for_a_few_misses() {
    let changes = |missed: u64| {
        let mut world = World::new(&[1, 2]).by_shadows();
        let admissions = world.pass(300, |_| vec![observation(missed), observation(0)]);
        assert!(admissions[0].refuse_late, "late requests are refused");
        world.changes.len()
    };
    assert_eq!(changes(4), 0);
    assert!(changes(20) > 0);
}

#[test]
fn pauses_are_tried_first_if_others_can_pause_for_the_violating_model_and_stay_if_they_help() {
    for (priorities, can_pause, tries) in [
        ([1, 2], vec![1], true),
        ([1, 2], vec![0], false),
        ([1, 1], vec![1], false),
        ([2, 1], vec![1], false),
    ] {
        let mut world = World::new(&priorities);
        world.can_pause = can_pause;
        let mut admissions = Vec::new();
        for _ in 0..30 {
            admissions = world.pass(1, |_| vec![observation(20), observation(0)]);
            if world.stage(0).is_some() {
                break;
            }
        }
        let is_tried = world.stage(0) == Some((LayoutStage::Trying, Pattern::Pauses));
        assert_eq!(is_tried, tries, "{priorities:?}: {:?}", world.stage(0));
        assert_eq!(admissions.iter().all(|admission| admission.pause), tries);
        assert!(!tries || world.changes.is_empty(), "all models keep the whole GPU");
        if tries {
            let admissions = world.pass(20, |_| vec![observation(0), observation(0)]);
            assert_eq!(world.stage(0), Some((LayoutStage::Chosen, Pattern::Pauses)));
            assert!(admissions.iter().all(|admission| admission.pause));
        }
    }
}
