//! The states of a model, in words and times.

use std::time::{Duration, Instant};

use shadowslice_control::controller::{ModelReport, ModelState, NextStart, WaitReason};

/// A state's name, and why it is so.
pub(super) fn told(state: &ModelState) -> (&'static str, Option<String>) {
    match state {
        ModelState::Loading => ("loading", None),
        ModelState::Ready => ("ready", None),
        ModelState::Restarting => ("restarting", None),
        ModelState::Waiting(why) => ("restarting", Some(why.clone())),
        ModelState::Unready { why, .. } => ("unready", Some(why.clone())),
        ModelState::Stopping => ("stopping", None),
    }
}

/// Returns how far a model is that loads, and what its last worker died of.
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
    let died = report.last_death.as_ref().map(|why| format!("its last worker ended: {why}"));
    let known: Vec<String> = [turn, warming, died].into_iter().flatten().collect();
    (!known.is_empty()).then(|| known.join("; "))
}

pub(super) fn next_try(state: &ModelState, now: Instant) -> Option<Duration> {
    match state {
        ModelState::Unready { next: NextStart::UnderWay, .. } => Some(Duration::ZERO),
        ModelState::Unready { next: NextStart::At(at), .. } => Some(at.saturating_duration_since(now)),
        _ => None,
    }
}
