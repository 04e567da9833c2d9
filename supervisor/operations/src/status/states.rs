//! Formats the reason for a model's state, and its times.

use std::time::{Duration, Instant};

use shadowslice_control::controller::{ModelReport, ModelState, NextStart, WaitReason};

/// Returns the reason for a state.
pub(super) fn reason(state: &ModelState) -> Option<String> {
    match state {
        ModelState::Waiting(why) | ModelState::Unready { why, .. } => Some(why.clone()),
        ModelState::Loading | ModelState::Ready | ModelState::Restarting | ModelState::Stopping => None,
    }
}

/// Returns the progress of a model that is loading, and the reason why its last worker exited.
pub(super) fn progress(report: &ModelReport, now: Instant) -> Option<String> {
    if !matches!(report.state, ModelState::Loading | ModelState::Restarting) {
        return None;
    }
    let warming = report.warming.map(|warming| {
        let took = now.saturating_duration_since(warming.since).as_secs_f64();
        let limit = warming.limit.as_secs_f64();
        format!("warming up batch size {}, {took:.0} of at most {limit:.0} s", warming.rows)
    });
    let waits = report.waits.contains(&WaitReason::Turn);
    let turn = waits.then(|| "waits for its turn: other workers start first".to_owned());
    let died = report.last_death.as_ref().map(|why| format!("its last worker exited: {why}"));
    let known: Vec<String> = [turn, warming, died].into_iter().flatten().collect();
    (!known.is_empty()).then(|| known.join("; "))
}

/// Returns the time until the supervisor tries to start an unready model again.
pub(super) fn next_try(state: &ModelState, now: Instant) -> Option<Duration> {
    match state {
        ModelState::Unready { next: NextStart::UnderWay, .. } => Some(Duration::ZERO),
        ModelState::Unready { next: NextStart::At(at), .. } => Some(at.saturating_duration_since(now)),
        _ => None,
    }
}
