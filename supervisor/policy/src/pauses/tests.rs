use super::*;

const MS: Duration = Duration::from_millis(1);
const CRITICAL: MemberId = MemberId(1);
const HOG: MemberId = MemberId(2);

fn at(ms: u32) -> Timestamp {
    Timestamp::after_origin(MS * (1_000 + ms))
}

fn terms(priority: u32, slo_ms: u32) -> PauseTerms {
    PauseTerms { priority, slo: MS * slo_ms, can_be_paused: true }
}

/// Returns a batch of `ms` that starts at `start` and must end at `deadline`, both in ms.
fn batch(id: u64, start: u32, ms: u32, deadline: u32) -> Option<RunningBatch> {
    let groups = Groups::WHOLE;
    let (free_at, deadline) = (at(start + ms), at(deadline));
    Some(RunningBatch { id, groups, time: MS * ms, free_at, deadline, slack: deadline.since(free_at) })
}

/// Returns a board on which the hog starts a batch of 8 ms at time 0, which has a deadline at 100 ms.
fn with_hog(terms: PauseTerms) -> PauseBoard {
    let mut board = PauseBoard::default();
    assert_eq!(board.set_running(HOG, terms, batch(1, 0, 8, 100), at(0)), []);
    board
}

fn paused(number: u32) -> PauseChange {
    PauseChange::Pause { worker: HOG, number }
}

fn released(ms: u32) -> PauseChange {
    PauseChange::Release { worker: HOG, beneficiary: CRITICAL, paused: MS * ms }
}

#[test]
fn a_batch_that_would_be_late_pauses_a_lower_priority_until_it_ends() {
    let mut board = with_hog(terms(2, 100));
    let critical = terms(1, 5);
    assert_eq!(board.set_running(CRITICAL, critical, batch(1, 1, 1, 6), at(1)), [paused(1)]);
    assert_eq!(board.set_running(CRITICAL, critical, batch(1, 1, 1, 6), at(2)), [], "the pause continues");
    assert_eq!(board.set_running(CRITICAL, critical, None, at(2)), [released(1)]);
    assert_eq!(board.set_running(CRITICAL, critical, None, at(3)), []);
}

#[test]
fn the_next_batch_of_the_same_worker_continues_the_pause_without_a_gap() {
    let mut board = with_hog(terms(2, 100));
    let critical = terms(1, 5);
    assert_eq!(board.set_running(CRITICAL, critical, batch(1, 1, 1, 6), at(1)), [paused(1)]);
    let next = board.set_running(CRITICAL, critical, batch(2, 2, 1, 7), at(2));
    assert_eq!(next, [released(1), paused(2)], "the caller writes only the last value of each word");
}

#[test]
fn nobody_waits_for_a_batch_that_has_time() {
    let mut board = with_hog(terms(2, 100));
    assert_eq!(board.set_running(CRITICAL, terms(1, 20), batch(1, 1, 1, 21), at(1)), []);
}

#[test]
fn nobody_waits_for_a_batch_that_is_longer_than_any_pause() {
    let mut board = with_hog(terms(2, 100));
    assert_eq!(board.set_running(CRITICAL, terms(1, 5), batch(1, 1, 11, 6), at(1)), []);
}

#[test]
fn a_hog_that_starts_behind_an_urgent_batch_waits_before_its_first_piece() {
    let mut board = PauseBoard::default();
    assert_eq!(board.set_running(CRITICAL, terms(1, 5), batch(1, 0, 1, 5), at(0)), []);
    assert_eq!(board.set_running(HOG, terms(2, 100), batch(1, 0, 8, 100), at(0)), [paused(1)]);
}

#[test]
fn a_lower_priority_pauses_nobody_and_equals_only_the_patient() {
    let urgent = batch(1, 1, 1, 6);
    let pauses = |hog, critical| with_hog(hog).set_running(CRITICAL, critical, urgent, at(1)) == [paused(1)];
    assert!(!pauses(terms(1, 100), terms(2, 5)));
    assert!(pauses(terms(2, 100), terms(2, 5)));
    assert!(pauses(terms(2, 20), terms(2, 5)));
    assert!(!pauses(terms(2, 19), terms(2, 5)), "models with similar SLOs do not pause each other");
    assert!(pauses(terms(2, 5), terms(1, 5)), "a higher priority counts more than any SLO");
}

#[test]
fn a_batch_that_would_itself_be_late_does_not_wait() {
    for priority in [1, 2] {
        let mut board = PauseBoard::default();
        assert_eq!(board.set_running(HOG, terms(priority, 100), batch(1, 0, 8, 9), at(0)), []);
        assert_eq!(board.set_running(CRITICAL, terms(1, 5), batch(1, 0, 2, 5), at(0)), []);
        assert_eq!(board.set_running(CRITICAL, terms(1, 5), batch(2, 0, 1, 5), at(0)), [paused(1)]);
    }
}

#[test]
fn pauses_use_up_the_time_that_the_paused_batch_has() {
    let mut board = PauseBoard::default();
    assert_eq!(board.set_running(HOG, terms(2, 100), batch(1, 0, 8, 11), at(0)), []);
    assert_eq!(board.set_running(CRITICAL, terms(1, 5), batch(1, 0, 2, 5), at(0)), [paused(1)]);
    assert_eq!(board.set_running(CRITICAL, terms(1, 5), batch(2, 2, 2, 7), at(2)), [released(2)]);
    assert_eq!(board.set_running(CRITICAL, terms(1, 5), batch(3, 4, 1, 9), at(4)), [paused(2)]);
}

#[test]
fn a_worker_that_cannot_be_paused_never_waits() {
    let mut board = with_hog(PauseTerms { can_be_paused: false, ..terms(2, 100) });
    assert_eq!(board.set_running(CRITICAL, terms(1, 5), batch(1, 1, 1, 6), at(1)), []);
}

#[test]
fn batches_on_separate_sms_do_not_wait() {
    let mut board = PauseBoard::default();
    let on = |batch: Option<RunningBatch>, groups| batch.map(|batch| RunningBatch { groups, ..batch });
    let (left, right) = (Groups::first(4), Groups::first(8).without(Groups::first(4)));
    assert_eq!(board.set_running(HOG, terms(2, 100), on(batch(1, 0, 8, 100), left), at(0)), []);
    assert_eq!(board.set_running(CRITICAL, terms(1, 5), on(batch(1, 0, 1, 5), right), at(0)), []);
    assert_eq!(board.set_running(CRITICAL, terms(1, 5), on(batch(2, 0, 1, 5), left), at(0)), [paused(1)]);
}

#[test]
fn a_pause_ends_when_its_worker_or_its_beneficiary_ends() {
    let mut board = with_hog(terms(2, 100));
    assert_eq!(board.set_running(CRITICAL, terms(1, 5), batch(1, 1, 1, 6), at(1)), [paused(1)]);
    assert_eq!(board.remove(CRITICAL), [released(0)]);
    assert_eq!(board.set_running(CRITICAL, terms(1, 5), batch(1, 5, 1, 6), at(5)), [paused(2)]);
    assert_eq!(board.remove(HOG), []);
}

#[test]
fn a_pause_ends_even_if_the_urgent_batch_hangs() {
    let mut board = with_hog(terms(2, 100));
    assert_eq!(board.set_running(CRITICAL, terms(1, 5), batch(1, 1, 1, 6), at(1)), [paused(1)]);
    let later = at(1) + MAX_BATCH_PAUSE;
    let changes = board.set_running(HOG, terms(2, 100), batch(2, 1, 8, 100), later);
    assert_eq!(changes.first(), Some(&released(10)), "{changes:?}");
}

/// Simulates a critical worker that always executes, and returns the fraction of the time for which the hog
/// was paused.
fn paused_fraction(batch_ms: u32) -> f64 {
    let mut board = with_hog(terms(2, 100));
    let (mut total, mut now) = (Duration::ZERO, 0);
    for id in 1..2_000 {
        let critical = batch(id, now, batch_ms, now + 1);
        for change in board.set_running(CRITICAL, terms(1, 5), critical, at(now)) {
            if let PauseChange::Release { paused, .. } = change {
                total += paused;
            }
        }
        now += batch_ms;
        board.set_running(HOG, terms(2, 100), batch(id, now, 8, 100 + now), at(now));
    }
    total.as_secs_f64() / (MS * now).as_secs_f64()
}

#[test]
fn a_worker_is_paused_for_at_most_about_half_of_the_time() {
    for ms in [1, 2, 5, 9] {
        let fraction = paused_fraction(ms);
        assert!((0.4..0.55).contains(&fraction), "batches of {ms} ms: {fraction}");
    }
}
