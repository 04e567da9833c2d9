use super::Action::{
    Complete, Drain, Finish, GiveUp, Kill, Park, Release, Requeue, Route, Spawn, Stop, Warm,
};
use super::Fact::{
    Adopt, BootFailed, Cancel, Connected, Drained, Exited, IncumbentServes, Misbehaved, Reclaim, Warmed,
};
use super::Outcome::{Aborted, Kept, RolledBack};
use super::Side::{Incumbent, Shadow};
use super::*;

const TIMEOUTS: Timeouts = Timeouts {
    spawn: Duration::from_secs(1),
    warm: Duration::from_secs(10),
    drain: Duration::from_secs(2),
    dwell: Duration::from_secs(5),
    stop: Duration::from_secs(3),
};

fn at(seconds: u64) -> Moment {
    Moment::after_origin(Duration::from_secs(seconds))
}

/// A hand-over that has seen these facts, all at moment 0.
fn after(facts: &[Fact]) -> Handover {
    let (mut handover, actions) = Handover::begin(at(0), true, TIMEOUTS);
    assert_eq!(actions, [Spawn]);
    for fact in facts {
        handover.on(fact.clone(), at(0));
    }
    handover
}

const DRAINING: [Fact; 2] = [Connected, Warmed];
const PROBATION: [Fact; 3] = [Connected, Warmed, Drained];

#[test]
fn without_faults_traffic_moves_once_and_the_incumbent_goes() {
    let mut handover = after(&[]);
    assert_eq!(handover.on(Connected, at(1)), [Warm]);
    assert_eq!(handover.on(Warmed, at(2)), [Route(Shadow), Drain(Incumbent)]);
    assert_eq!(handover.on(Drained, at(3)), [Park(Incumbent), Complete]);
    assert_eq!((handover.phase(), handover.due()), (PhaseName::Probation, Some(at(8))));
    assert_eq!(handover.on_time(at(8)), [Stop(Incumbent)]);
    assert_eq!(handover.on(Exited(Incumbent), at(9)), [Finish(Kept)]);
    assert_eq!((handover.phase(), handover.due()), (PhaseName::Done, None));
}

#[test]
fn a_shadow_that_fails_before_the_cut_over_is_killed_and_awaited() {
    let failed = BootFailed("no such file".into());
    let reason = Reason::BootFailed("no such file".into());
    for (fact, reason) in [(failed, reason), (Misbehaved, Reason::Misbehaved), (Cancel, Reason::Cancelled)] {
        for facts in [&[][..], &[Connected]] {
            let mut handover = after(facts);
            assert_eq!(handover.on(fact.clone(), at(0)), [Kill(Shadow)]);
            assert_eq!(handover.phase(), PhaseName::Aborting);
            assert_eq!(handover.on(Exited(Shadow), at(0)), [Finish(Aborted(reason.clone()))]);
            assert_eq!(handover.phase(), PhaseName::Aborted);
        }
    }
}

#[test]
fn a_shadow_that_takes_too_long_is_killed() {
    let mut spawning = after(&[]);
    assert_eq!(spawning.on_time(at(1)), [Kill(Shadow)]);
    assert_eq!(spawning.on(Exited(Shadow), at(1)), [Finish(Aborted(Reason::SpawnTimedOut))]);
    let mut warming = after(&[Connected]);
    assert_eq!(warming.on_time(at(10)), [Kill(Shadow)]);
    assert_eq!(warming.on_time(at(13)), [GiveUp(Shadow), Finish(Aborted(Reason::WarmTimedOut))]);
}

#[test]
fn a_shadow_that_dies_before_the_cut_over_ends_it() {
    for facts in [&[][..], &[Connected]] {
        assert_eq!(after(facts).on(Exited(Shadow), at(0)), [Finish(Aborted(Reason::Died))]);
    }
}

#[test]
fn a_dead_incumbent_is_not_drained_but_its_replacement_is() {
    for facts in [[Exited(Incumbent), Connected], [Connected, Exited(Incumbent)]] {
        let mut dead = after(&facts);
        assert_eq!(dead.on(Warmed, at(1)), [Route(Shadow), Complete, Stop(Incumbent)]);
        assert_eq!(dead.phase(), PhaseName::Retiring);
        let mut replaced = after(&facts);
        assert_eq!(replaced.on(IncumbentServes, at(1)), []);
        assert_eq!(replaced.on(Warmed, at(1)), [Route(Shadow), Drain(Incumbent)]);
    }
    let (mut begun_dead, _) = Handover::begin(at(0), false, TIMEOUTS);
    begun_dead.on(Connected, at(0));
    assert_eq!(begun_dead.on(Warmed, at(0)), [Route(Shadow), Complete, Stop(Incumbent)]);
}

#[test]
fn draining_ends_in_every_way_without_losing_a_request() {
    let aborted = |reason| Finish(Aborted(reason));
    assert_eq!(after(&DRAINING).on_time(at(2)), [Requeue(Incumbent), Complete, Stop(Incumbent)]);
    assert_eq!(after(&DRAINING).on(Exited(Incumbent), at(0)), [Requeue(Incumbent), Complete, Finish(Kept)]);
    assert_eq!(
        after(&DRAINING).on(Exited(Shadow), at(0)),
        [Route(Incumbent), Requeue(Shadow), aborted(Reason::Died)]
    );
    let mut broken = after(&DRAINING);
    assert_eq!(broken.on(Misbehaved, at(0)), [Route(Incumbent), Requeue(Shadow), Kill(Shadow)]);
    assert_eq!(broken.on(Exited(Shadow), at(0)), [aborted(Reason::Misbehaved)]);
}

#[test]
fn in_probation_the_incumbent_takes_the_traffic_back_at_once() {
    let rolled_back = |reason| Finish(RolledBack(reason));
    assert_eq!(
        after(&PROBATION).on(Exited(Shadow), at(0)),
        [Route(Incumbent), Requeue(Shadow), rolled_back(Reason::Died)]
    );
    let mut broken = after(&PROBATION);
    assert_eq!(broken.on(Misbehaved, at(0)), [Route(Incumbent), Requeue(Shadow), Stop(Shadow)]);
    assert_eq!(broken.on_time(at(3)), [Kill(Shadow)]);
    assert_eq!(broken.on(Exited(Shadow), at(3)), [rolled_back(Reason::Misbehaved)]);
}

#[test]
fn probation_ends_early_when_the_incumbent_is_wanted_gone_or_is_gone() {
    for fact in [Cancel, Reclaim] {
        assert_eq!(after(&PROBATION).on(fact, at(1)), [Stop(Incumbent)]);
    }
    assert_eq!(after(&PROBATION).on(Exited(Incumbent), at(1)), [Finish(Kept)]);
}

#[test]
fn a_hand_over_to_a_standing_worker_begins_with_the_cut_over_and_can_be_taken_back() {
    let begin = || {
        let (handover, actions) = Handover::begin_standing(at(0), TIMEOUTS);
        assert_eq!(actions, [Route(Shadow), Drain(Incumbent)]);
        assert_eq!((handover.phase(), handover.due()), (PhaseName::Draining, Some(at(2))));
        handover
    };
    let mut kept = begin();
    assert_eq!(kept.on(Drained, at(1)), [Park(Incumbent), Complete]);
    assert_eq!((kept.phase(), kept.due()), (PhaseName::Probation, Some(at(6))));
    let back = [Route(Incumbent), Requeue(Shadow), Finish(Aborted(Reason::Died))];
    assert_eq!(begin().on(Exited(Shadow), at(1)), back);
}

#[test]
fn a_hand_over_to_a_worker_that_starts_already_has_what_is_left_of_its_time() {
    let begin = |start, alive| Handover::begin_started(start, alive, TIMEOUTS);
    let mut spawning = begin(Start::Spawning { until: at(3) }, true);
    assert_eq!((spawning.phase(), spawning.due()), (PhaseName::Spawning, Some(at(3))));
    assert_eq!(spawning.on(Connected, at(2)), [Warm]);
    assert_eq!((spawning.phase(), spawning.due()), (PhaseName::Warming, Some(at(12))));
    let warming = |alive| begin(Start::Warming { until: at(4) }, alive);
    assert_eq!(warming(true).on(Warmed, at(3)), [Route(Shadow), Drain(Incumbent)]);
    assert_eq!(warming(false).on(Warmed, at(3)), [Route(Shadow), Complete, Stop(Incumbent)]);
    let mut late = warming(true);
    assert_eq!((late.phase(), late.on_time(at(4))), (PhaseName::Warming, vec![Kill(Shadow)]));
    assert_eq!(late.on(Exited(Shadow), at(4)), [Finish(Aborted(Reason::WarmTimedOut))]);
}

#[test]
fn a_parked_or_retiring_incumbent_may_be_adopted_and_one_that_drains_or_is_killed_may_not() {
    let adopted = [Release(Incumbent), Finish(Kept)];
    let mut parked = after(&PROBATION);
    assert_eq!(parked.on(Adopt, at(1)), adopted);
    assert_eq!((parked.phase(), parked.due()), (PhaseName::Done, None));
    let mut retiring = after(&PROBATION);
    retiring.on(Reclaim, at(1));
    assert_eq!(retiring.on(Adopt, at(1)), adopted);
    for facts in [&[][..], &[Connected], &DRAINING] {
        assert_eq!(after(facts).on(Adopt, at(0)), []);
    }
    let mut killed = after(&PROBATION);
    killed.on_time(at(5));
    assert_eq!(killed.on_time(at(8)), [Kill(Incumbent)]);
    assert_eq!(killed.on(Adopt, at(8)), []);
}

#[test]
fn an_incumbent_that_does_not_go_is_killed_and_then_given_up() {
    let mut handover = after(&PROBATION);
    assert_eq!(handover.on_time(at(5)), [Stop(Incumbent)]);
    assert_eq!(handover.on(Exited(Shadow), at(5)), [], "no way back");
    assert_eq!(handover.on_time(at(8)), [Kill(Incumbent)]);
    assert_eq!(handover.on_time(at(11)), [GiveUp(Incumbent), Finish(Kept)]);
    assert_eq!(handover.on(Exited(Incumbent), at(12)), []);
}

#[test]
fn old_timers_and_late_facts_change_nothing() {
    let mut handover = after(&DRAINING);
    assert_eq!(handover.on_time(at(1)), [], "the spawn timer");
    for fact in [Connected, Warmed, BootFailed(String::new()), IncumbentServes, Cancel, Reclaim, Adopt] {
        assert_eq!(handover.on(fact, at(1)), []);
    }
    assert_eq!((handover.phase(), handover.due()), (PhaseName::Draining, Some(at(2))));
    let mut over = after(&[Exited(Shadow)]);
    for fact in [Connected, Warmed, Drained, Exited(Shadow), Exited(Incumbent), Misbehaved, Cancel, Adopt] {
        assert_eq!(over.on(fact, at(1)), []);
    }
    assert_eq!(over.on_time(at(100)), []);
}
