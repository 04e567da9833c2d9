//! The states of a hand-over and the table of its transitions.

use shadowslice_shared::units::Moment;

use super::Action::{Complete, Drain, Finish, GiveUp, Kill, Park, Release, Requeue, Route, Stop, Warm};
use super::Fact::{
    Adopt, BootFailed, Cancel, Connected, Drained, Exited, IncumbentServes, Misbehaved, Reclaim, Warmed,
};
use super::Outcome::{Aborted, Kept, RolledBack};
use super::Side::{Incumbent, Shadow};
use super::{Action, Fact, Outcome, PhaseName, Reason, Side, Timeouts};

/// Where a hand-over stands. `until` is when the state ends by itself.
#[derive(Debug)]
pub(super) enum State {
    /// The shadow's process starts.
    Spawning { until: Moment, incumbent_alive: bool },
    /// The shadow loads and proves itself.
    Warming { until: Moment, incumbent_alive: bool },
    /// The shadow is routed; the incumbent finishes what it has.
    Draining { until: Moment },
    /// The shadow is routed; the incumbent is parked.
    Probation { until: Moment },
    /// This side was asked to exit.
    Stopping { side: Side, until: Moment, outcome: Outcome },
    /// This side was killed.
    Killing { side: Side, until: Moment, outcome: Outcome },
    /// The hand-over is over.
    Ended(Outcome),
}

/// What moves the machine.
#[derive(Debug)]
pub(super) enum Event {
    Told(Fact),
    /// The time of the state is up.
    TimeUp,
}

/// What an event does.
pub(super) enum Step {
    Stay,
    To(State, Vec<Action>),
}

impl State {
    /// The cut-over.
    pub(super) fn cut_over(now: Moment, timeouts: &Timeouts) -> (Self, Vec<Action>) {
        (Self::Draining { until: now + timeouts.drain }, vec![Route(Shadow), Drain(Incumbent)])
    }

    pub(super) fn until(&self) -> Option<Moment> {
        match *self {
            Self::Spawning { until, .. }
            | Self::Warming { until, .. }
            | Self::Draining { until }
            | Self::Probation { until }
            | Self::Stopping { until, .. }
            | Self::Killing { until, .. } => Some(until),
            Self::Ended(_) => None,
        }
    }

    pub(super) fn name(&self) -> PhaseName {
        match self {
            Self::Spawning { .. } => PhaseName::Spawning,
            Self::Warming { .. } => PhaseName::Warming,
            Self::Draining { .. } => PhaseName::Draining,
            Self::Probation { .. } => PhaseName::Probation,
            Self::Stopping { side: Incumbent, .. } | Self::Killing { side: Incumbent, .. } => {
                PhaseName::Retiring
            }
            Self::Stopping { side: Shadow, .. } | Self::Killing { side: Shadow, .. } => PhaseName::Aborting,
            Self::Ended(Kept) => PhaseName::Done,
            Self::Ended(Aborted(_) | RolledBack(_)) => PhaseName::Aborted,
        }
    }

    /// The table of transitions. An event that a state ignores is listed, too, so that a new fact
    /// or state does not compile before every cell has been thought of.
    pub(super) fn step(&self, event: Event, now: Moment, timeouts: &Timeouts) -> Step {
        use Event::{TimeUp, Told};
        use State::{Draining, Ended, Killing, Probation, Spawning, Stopping, Warming};
        use Step::{Stay, To};

        match (self, event) {
            // Before the cut-over: the incumbent is untouched, dead or alive.
            (&Spawning { incumbent_alive, .. }, Told(Connected)) => {
                To(Warming { until: now + timeouts.warm, incumbent_alive }, vec![Warm])
            }
            (Spawning { .. }, TimeUp) => abort(Reason::SpawnTimedOut, now, timeouts),
            (Spawning { .. }, Told(Warmed)) => Stay,
            (&Spawning { until, .. }, Told(Exited(Incumbent))) => {
                To(Spawning { until, incumbent_alive: false }, vec![])
            }
            (&Spawning { until, .. }, Told(IncumbentServes)) => {
                To(Spawning { until, incumbent_alive: true }, vec![])
            }
            (Warming { incumbent_alive: true, .. }, Told(Warmed)) => {
                let (draining, actions) = Self::cut_over(now, timeouts);
                To(draining, actions)
            }
            (Warming { incumbent_alive: false, .. }, Told(Warmed)) => {
                retire(vec![Route(Shadow), Complete], now, timeouts)
            }
            (Warming { .. }, TimeUp) => abort(Reason::WarmTimedOut, now, timeouts),
            (Warming { .. }, Told(Connected)) => Stay,
            (&Warming { until, .. }, Told(Exited(Incumbent))) => {
                To(Warming { until, incumbent_alive: false }, vec![])
            }
            (&Warming { until, .. }, Told(IncumbentServes)) => {
                To(Warming { until, incumbent_alive: true }, vec![])
            }
            (Spawning { .. } | Warming { .. }, Told(BootFailed(why))) => {
                abort(Reason::BootFailed(why), now, timeouts)
            }
            (Spawning { .. } | Warming { .. }, Told(Misbehaved)) => abort(Reason::Misbehaved, now, timeouts),
            (Spawning { .. } | Warming { .. }, Told(Cancel)) => abort(Reason::Cancelled, now, timeouts),
            (Spawning { .. } | Warming { .. }, Told(Exited(Shadow))) => end(vec![], Aborted(Reason::Died)),
            (Spawning { .. } | Warming { .. }, Told(Drained | Reclaim | Adopt)) => Stay,

            // Cut over: the shadow is routed, the incumbent can take the traffic back.
            (Draining { .. }, Told(Drained)) => {
                To(Probation { until: now + timeouts.dwell }, vec![Park(Incumbent), Complete])
            }
            (Draining { .. }, TimeUp) => retire(vec![Requeue(Incumbent), Complete], now, timeouts),
            (Draining { .. }, Told(Exited(Incumbent))) => end(vec![Requeue(Incumbent), Complete], Kept),
            (Draining { .. }, Told(Exited(Shadow))) => {
                end(vec![Route(Incumbent), Requeue(Shadow)], Aborted(Reason::Died))
            }
            (Draining { .. }, Told(Misbehaved)) => To(
                Killing { side: Shadow, until: now + timeouts.stop, outcome: Aborted(Reason::Misbehaved) },
                vec![Route(Incumbent), Requeue(Shadow), Kill(Shadow)],
            ),
            (
                Draining { .. },
                Told(Connected | Warmed | BootFailed(_) | IncumbentServes | Cancel | Reclaim | Adopt),
            ) => Stay,

            (Probation { .. }, TimeUp | Told(Cancel | Reclaim)) => retire(vec![], now, timeouts),
            (Probation { .. }, Told(Adopt)) => end(vec![Release(Incumbent)], Kept),
            (Probation { .. }, Told(Exited(Incumbent))) => end(vec![], Kept),
            (Probation { .. }, Told(Exited(Shadow))) => {
                end(vec![Route(Incumbent), Requeue(Shadow)], RolledBack(Reason::Died))
            }
            (Probation { .. }, Told(Misbehaved)) => To(
                Stopping {
                    side: Shadow,
                    until: now + timeouts.stop,
                    outcome: RolledBack(Reason::Misbehaved),
                },
                vec![Route(Incumbent), Requeue(Shadow), Stop(Shadow)],
            ),
            (Probation { .. }, Told(Connected | Warmed | BootFailed(_) | Drained | IncumbentServes)) => Stay,

            // Decided: one side is on its way out, and nothing turns back.
            (Stopping { side, outcome, .. } | Killing { side, outcome, .. }, Told(Exited(gone)))
                if gone == *side =>
            {
                end(vec![], outcome.clone())
            }
            (Stopping { side, outcome, .. }, TimeUp) => {
                let until = now + timeouts.stop;
                To(Killing { side: *side, until, outcome: outcome.clone() }, vec![Kill(*side)])
            }
            (Stopping { side: Incumbent, .. }, Told(Adopt)) => end(vec![Release(Incumbent)], Kept),
            (Killing { side, outcome, .. }, TimeUp) => end(vec![GiveUp(*side)], outcome.clone()),
            (
                Stopping { .. } | Killing { .. },
                Told(
                    Connected | Warmed | BootFailed(_) | Drained | Exited(_) | IncumbentServes | Misbehaved
                    | Cancel | Reclaim | Adopt,
                ),
            ) => Stay,

            (Ended(_), Told(_) | TimeUp) => Stay,
        }
    }
}

/// Gives the shadow up before it served.
fn abort(reason: Reason, now: Moment, timeouts: &Timeouts) -> Step {
    let state = State::Killing { side: Shadow, until: now + timeouts.stop, outcome: Aborted(reason) };
    Step::To(state, vec![Kill(Shadow)])
}

/// Sends the incumbent away, after `actions`.
fn retire(mut actions: Vec<Action>, now: Moment, timeouts: &Timeouts) -> Step {
    actions.push(Stop(Incumbent));
    Step::To(State::Stopping { side: Incumbent, until: now + timeouts.stop, outcome: Kept }, actions)
}

/// Ends the hand-over, after `actions`.
fn end(mut actions: Vec<Action>, outcome: Outcome) -> Step {
    actions.push(Finish(outcome.clone()));
    Step::To(State::Ended(outcome), actions)
}
