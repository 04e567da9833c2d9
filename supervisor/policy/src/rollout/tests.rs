use super::*;

fn rules() -> RolloutRules {
    RolloutRules {
        mirror: 0.05,
        canary: vec![0.01, 0.5],
        step: Some(Duration::from_secs(60)),
        bounds: RolloutBounds { errors: 0.01, differences: 0.01, slowdown: 2.5 },
    }
}

fn view() -> RolloutView {
    RolloutView {
        elapsed: Duration::from_secs(60),
        health: CandidateHealth::Serving,
        incompatibility: None,
        can_mirror: true,
        candidate: StageCounts { requests: 200, compared: 200, ..StageCounts::default() },
        released: StageCounts { requests: 4000, ..StageCounts::default() },
        target: 0.99,
        slowdown: Some(1.0),
        is_promoted: false,
    }
}

const STAGES: [RolloutStage; 5] = [
    RolloutStage::Starting,
    RolloutStage::Mirror,
    RolloutStage::Timing,
    RolloutStage::Canary { step: 0 },
    RolloutStage::Canary { step: 1 },
];

/// Returns the stages of a rollout in which nothing goes wrong.
fn path(rules: &RolloutRules, view: &RolloutView) -> Vec<RolloutStage> {
    let mut stages = vec![RolloutStage::Starting];
    while let RolloutStep::Enter(stage) = next(rules, stages[stages.len() - 1], view) {
        stages.push(stage);
    }
    stages
}

fn is_rolled_back(stage: RolloutStage, view: &RolloutView) -> bool {
    matches!(next(&rules(), stage, view), RolloutStep::RollBack(_))
}

#[test]
fn a_good_version_passes_all_stages_and_stays() {
    let all = [&STAGES[..], &[RolloutStage::Released]].concat();
    assert_eq!(path(&rules(), &view()), all);
    let straight = RolloutRules { mirror: 0.0, canary: Vec::new(), ..rules() };
    assert_eq!(path(&straight, &view()), [RolloutStage::Starting, RolloutStage::Released]);
    let streams = RolloutView { can_mirror: false, ..view() };
    assert_eq!(path(&rules(), &streams)[1], RolloutStage::Canary { step: 0 }, "streams are not copied");
}

#[test]
fn a_step_needs_its_time_and_enough_requests_unless_an_operator_ends_it() {
    let stage = RolloutStage::Canary { step: 0 };
    let early = RolloutView { elapsed: Duration::from_secs(59), ..view() };
    let idle = RolloutView {
        candidate: StageCounts { requests: MIN_REQUESTS - 1, ..StageCounts::default() },
        ..view()
    };
    for view in [early, idle] {
        assert_eq!(next(&rules(), stage, &view), RolloutStep::Stay);
        let promoted = RolloutView { is_promoted: true, ..view };
        assert_eq!(next(&rules(), stage, &promoted), RolloutStep::Enter(RolloutStage::Canary { step: 1 }));
    }
    let manual = RolloutRules { step: None, ..rules() };
    assert_eq!(next(&manual, stage, &view()), RolloutStep::Stay);
    let starting = RolloutView { health: CandidateHealth::Starting, is_promoted: true, ..view() };
    assert_eq!(next(&rules(), stage, &starting), RolloutStep::Stay, "no worker could answer");
}

#[test]
fn each_fault_is_found_in_every_stage_in_which_it_can_occur() {
    let counts = view().candidate;
    let faults = [
        RolloutView { health: CandidateHealth::Failed("it is broken".to_owned()), ..view() },
        RolloutView { incompatibility: Some("another shape".to_owned()), ..view() },
        RolloutView { candidate: StageCounts { errors: 3, ..counts }, ..view() },
        RolloutView { candidate: StageCounts { differences: 3, ..counts }, ..view() },
        RolloutView { candidate: StageCounts { deaths: 3, ..counts }, ..view() },
    ];
    for view in &faults {
        assert!(STAGES.into_iter().all(|stage| is_rolled_back(stage, view)), "{view:?}");
        assert!(is_rolled_back(RolloutStage::Released, view), "{view:?}");
    }
    let late = RolloutView { candidate: StageCounts { late: 20, ..counts }, ..view() };
    let slow = RolloutView { slowdown: Some(3.0), ..view() };
    for view in [&late, &slow] {
        assert!(STAGES[2..].iter().all(|stage| is_rolled_back(*stage, view)), "{view:?}");
        assert!(!is_rolled_back(RolloutStage::Mirror, view), "its share is small there");
    }
}

#[test]
fn a_bound_applies_to_a_hundred_requests_at_least() {
    let with = |requests, errors| RolloutView {
        candidate: StageCounts { requests, errors, ..StageCounts::default() },
        ..view()
    };
    assert!(!is_rolled_back(RolloutStage::Mirror, &with(10, 1)));
    assert!(is_rolled_back(RolloutStage::Mirror, &with(10, 2)));
    assert!(!is_rolled_back(RolloutStage::Mirror, &with(1000, 10)));
    assert!(is_rolled_back(RolloutStage::Mirror, &with(1000, 11)));
}

#[test]
fn a_single_slow_batch_proves_nothing() {
    let counts = StageCounts { requests: MIN_REQUESTS - 1, ..StageCounts::default() };
    let slow = RolloutView { candidate: counts, slowdown: Some(9.0), ..view() };
    assert!(STAGES.into_iter().all(|stage| !is_rolled_back(stage, &slow)));
}

#[test]
fn an_overload_that_concerns_both_versions_is_not_blamed_on_the_new_one() {
    let stage = RolloutStage::Canary { step: 0 };
    let late = StageCounts { late: 20, ..view().candidate };
    let released = StageCounts { requests: 4000, late: 400, ..StageCounts::default() };
    assert!(is_rolled_back(stage, &RolloutView { candidate: late, ..view() }));
    assert!(!is_rolled_back(stage, &RolloutView { candidate: late, released, ..view() }));
    let few = StageCounts { requests: 20, late: 2, ..StageCounts::default() };
    assert!(!is_rolled_back(stage, &RolloutView { candidate: few, ..view() }), "chance");
}
