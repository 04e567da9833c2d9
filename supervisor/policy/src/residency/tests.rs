use super::*;

const GIB: i128 = 1 << 30;

fn at(ms: u64) -> Timestamp {
    Timestamp::after_origin(Duration::from_millis(ms))
}

fn model(priority: u32, state: WeightsState) -> ModelResidency {
    ModelResidency {
        priority,
        bytes: 1 << 30,
        wake_time: Duration::from_millis(10),
        state,
        sleep_after: Some(Duration::from_secs(60)),
    }
}

/// Returns a model that woke at 0 and got its last request at `used` ms.
fn awake(priority: u32, used: u64, is_busy: bool) -> ModelResidency {
    let load = if is_busy { AwakeLoad::Busy } else { AwakeLoad::Idle };
    model(priority, WeightsState::Awake { since: at(0), used: at(used), load })
}

fn asleep(priority: u32, deadline: Option<u64>) -> ModelResidency {
    model(priority, WeightsState::Asleep { wanted: deadline.map(at) })
}

#[test]
fn idle_models_sleep_after_their_time_and_no_other_does() {
    let unlimited = ModelResidency { sleep_after: None, ..awake(1, 0, false) };
    let models = [awake(1, 0, false), awake(1, 30_000, false), awake(1, 0, true), unlimited];
    let decision = decide(GIB, &models, at(60_000));
    assert_eq!(decision.actions, [(0, ResidencyAction::SleepIdle)]);
    assert_eq!((decision.next, decision.is_short), (Some(at(90_000)), false));
}

#[test]
fn a_model_that_just_woke_without_a_request_stays_awake_for_its_time() {
    let woken = model(1, WeightsState::Awake { since: at(50_000), used: at(0), load: AwakeLoad::Idle });
    assert_eq!(decide(GIB, &[woken], at(70_000)).actions, []);
}

#[test]
fn the_lowest_priority_sleeps_first_and_then_the_least_recently_used() {
    let models = [awake(1, 1, false), awake(2, 9, false), awake(2, 3, false), asleep(1, Some(50))];
    let decision = decide(0, &models, at(10));
    assert_eq!(decision.actions, [(2, ResidencyAction::SleepForOthers)]);
    assert!(decision.is_short);
    let two = [models.as_slice(), &[asleep(1, Some(40))]].concat();
    let slept: Vec<_> = decide(0, &two, at(10)).actions.into_iter().map(|(index, _)| index).collect();
    assert_eq!(slept, [2, 1]);
}

#[test]
fn memory_that_is_becoming_free_is_waited_for() {
    let leaving = model(2, WeightsState::InUse { leaves: true });
    let models = [awake(1, 1, false), leaving, asleep(1, Some(50))];
    let decision = decide(0, &models, at(10));
    assert_eq!((decision.actions, decision.is_short), (vec![], true));
}

#[test]
fn the_highest_priority_wakes_first_and_then_the_earliest_deadline() {
    let models = [asleep(2, Some(1)), asleep(1, Some(30)), asleep(1, Some(20)), asleep(1, None)];
    let wake = |free| decide(free, &models, at(0)).actions;
    assert_eq!(wake(GIB), [(2, ResidencyAction::Wake)]);
    let order: Vec<_> = wake(3 * GIB).into_iter().map(|(index, _)| index).collect();
    assert_eq!(order, [2, 1, 0]);
}

#[test]
fn a_busy_model_yields_only_to_its_priority_or_above_and_after_it_has_served() {
    let yields = |busy: u32, waiting: u32, now| {
        let decision = decide(0, &[awake(busy, 1, true), asleep(waiting, Some(50))], at(now));
        (!decision.actions.is_empty(), decision.next)
    };
    assert_eq!(yields(1, 1, 39), (false, Some(at(40))));
    assert_eq!(yields(1, 1, 40), (true, None));
    assert_eq!(yields(2, 1, 40), (true, None));
    assert_eq!(yields(1, 2, 1_000), (false, None));
    let owing = WeightsState::Awake { since: at(0), used: at(1), load: AwakeLoad::Owing };
    assert_eq!(decide(0, &[model(2, owing), asleep(1, Some(50))], at(1_000)).actions, []);
    let idle_first = [awake(3, 1, true), awake(1, 9, false), asleep(1, Some(50))];
    assert_eq!(decide(0, &idle_first, at(40)).actions, [(1, ResidencyAction::SleepForOthers)]);
}

#[test]
fn an_interrupted_model_wakes_after_the_model_that_it_yields_to() {
    let decision = decide(0, &[awake(1, 1, true), asleep(1, Some(50))], at(40));
    assert_eq!(decision.actions, [(0, ResidencyAction::Interrupt { behind: at(50) })]);
    let interrupted = asleep(1, None);
    let wanted = Some(wanted_by(at(3), Some(at(50))));
    let interrupted = ModelResidency { state: WeightsState::Asleep { wanted }, ..interrupted };
    let order = |other| decide(GIB, &[interrupted.clone(), asleep(1, Some(other))], at(41)).actions;
    assert_eq!(order(50), [(1, ResidencyAction::Wake)]);
    assert_eq!(order(51), [(0, ResidencyAction::Wake)], "later requests come after it");
    assert_eq!(wanted_by(at(3), None), at(3));
}

#[test]
fn small_models_do_not_delay_a_large_one_and_an_impossible_one_delays_nobody() {
    let large = |gib: u64| ModelResidency { bytes: gib << 30, ..asleep(1, Some(10)) };
    let models = [awake(1, 1, true), large(2), asleep(1, Some(20))];
    assert_eq!(decide(GIB, &models, at(10)).actions, [], "the small model waits");
    let models = [awake(1, 1, true), large(3), asleep(1, Some(20))];
    assert_eq!(decide(GIB, &models, at(10)).actions, [(2, ResidencyAction::Wake)]);
}

#[test]
fn models_sleep_when_the_budget_becomes_too_small() {
    let models = [awake(1, 1, false), awake(1, 0, false), awake(1, 2, true)];
    let decision = decide(-GIB - 1, &models, at(10));
    let slept: Vec<_> = decision.actions.into_iter().map(|(index, _)| index).collect();
    assert_eq!((slept, decision.is_short), (vec![1, 0], false));
    assert!(decide(-3 * GIB, &models, at(10)).is_short, "the busy one stays");
}

/// Simulates five saturated models, and two of them fit at a time. Each must get its turn, and copies must
/// not take more than a fifth of the time.
#[test]
fn saturated_models_take_turns_and_copies_take_little_time() {
    const SLEEP_MS: u64 = 1;
    let mut states: Vec<_> = (0..5).map(|_| asleep(1, Some(0))).collect();
    let mut behind = [None; 5];
    let (mut turns, mut copying, mut free) = ([0; 5], 0, 2 * GIB);
    let mut pending: Vec<(u64, usize, bool)> = Vec::new();
    for now in 0..5_000 {
        for (_, index, wakes) in pending.extract_if(.., |(due, ..)| *due <= now) {
            states[index].state = match wakes {
                true => WeightsState::Awake { since: at(now), used: at(now), load: AwakeLoad::Busy },
                false => {
                    free += GIB;
                    // The queue of an interrupted model is full of old requests.
                    WeightsState::Asleep { wanted: Some(wanted_by(at(0), behind[index])) }
                }
            };
        }
        for (index, action) in decide(free, &states, at(now)).actions {
            let wakes = action == ResidencyAction::Wake;
            if let ResidencyAction::Interrupt { behind: deadline } = action {
                behind[index] = Some(deadline);
            }
            states[index].state = WeightsState::InUse { leaves: !wakes };
            pending.push((now + if wakes { 10 } else { SLEEP_MS }, index, wakes));
            if wakes {
                (turns[index], copying, free) = (turns[index] + 1, copying + 10, free - GIB);
            }
        }
        assert!(free >= 0, "the budget is exceeded");
    }
    assert!(turns.iter().all(|&turns| turns >= 30), "{turns:?}");
    assert!(copying * 5 <= 2 * 5_000, "{copying} ms of copies, on two places");
}
