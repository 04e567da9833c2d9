//! The states of a model, in words and times.

use std::time::{Duration, Instant};

use shadowslice_control::controller::{ModelState, NextStart};

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

pub(super) fn next_try(state: &ModelState, now: Instant) -> Option<Duration> {
    match state {
        ModelState::Unready { next: NextStart::UnderWay, .. } => Some(Duration::ZERO),
        ModelState::Unready { next: NextStart::At(at), .. } => Some(at.saturating_duration_since(now)),
        _ => None,
    }
}
