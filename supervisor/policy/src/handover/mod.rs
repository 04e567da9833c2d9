//! The hand-over of a model from its worker, the *incumbent*, to a *shadow* at another share.
//!
//! ```text
//!   Spawning ──▶ Warming ──▶ Draining ──▶ Probation ──▶ Retiring ──▶ Done
//!      │            │           │            │
//!      └────────────┴───────────┴────────────┴────────▶ Aborting ──▶ Aborted
//! ```
//!
//! If the shadow stands ready already, the hand-over begins with the cut-over. If the shadow is
//! starting already, the hand-over begins in Spawning or Warming, with what is left of that phase.
//!
//! The cut-over is the step into Draining. Two ways lead past Probation into Retiring, because
//! there is nothing to fall back on: an incumbent that is dead when the shadow is warm, and an
//! incumbent that takes too long to drain. A side that is gone already needs no Retiring or
//! Aborting, and neither does a parked incumbent that the driver adopts.
//!
//! The machine is pure: its driver feeds it [`Fact`]s and the time, and carries out the
//! [`Action`]s, in the order given, before it feeds the next fact. Traffic moves when the driver
//! performs [`Action::Route`], between two batches. Until then the incumbent is untouched;
//! until Retiring it can take the traffic back.
//!
//! What the driver owes the machine:
//! * An exit is reported once per process, after all else that this process said.
//! * When a side is to be stopped or killed and has no process (any more), its exit is reported at once.
//! * Deaths that the machine leaves alone are the controller's business, as without a hand-over: it
//!   restarts the incumbent at its old share while the shadow starts up (and says
//!   [`Fact::IncumbentServes`]), and the side that is routed once there is nothing to fall back on.
//!   A side that is to be stopped, and one that was given up, is not restarted.
//! * Facts may come late, twice or not at all: a fact that the phase has no use for changes
//!   nothing, and every phase but the last ends by itself.

mod machine;
#[cfg(test)]
mod tests;

use std::fmt;
use std::time::Duration;

use shadowslice_shared::units::Moment;

use machine::{Event, State, Step};

/// One of the two workers. Each keeps its name for the whole run, whichever serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The worker that served when the hand-over began, or its replacement at the same share.
    Incumbent,
    /// The worker at the new share.
    Shadow,
}

/// What has happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fact {
    /// The shadow said hello and speaks the same protocol.
    Connected,
    /// The shadow is loaded and warm, and has proved its answers and its SMs.
    Warmed,
    /// The shadow cannot start, load or warm up, and says why; or it failed the proof.
    BootFailed(String),
    /// The incumbent has nothing in flight any more.
    Drained,
    /// This side's process is gone.
    Exited(Side),
    /// The incumbent died before the cut-over, and its replacement serves.
    IncumbentServes,
    /// The shadow hung, broke the protocol, answered wrong, or lacks what it promised.
    Misbehaved,
    /// A client or operator asks to end the hand-over. Before the cut-over that aborts it; in
    /// probation it ends the dwell time; in between, going on is the shorter way.
    Cancel,
    /// A newer hand-over, or memory, wants the parked incumbent gone.
    Reclaim,
    /// The driver takes charge of the parked or retiring incumbent, to have it stand ready or to
    /// begin another hand-over at once. This hand-over is over.
    Adopt,
}

/// What the driver does next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Spawn the shadow at the new share.
    Spawn,
    /// Have the shadow load, warm up and prove itself.
    Warm,
    /// Send all batches to this side from now on. This side may be the parked or draining
    /// incumbent, even a dead one: then requests wait until it is restarted.
    Route(Side),
    /// Report when this side has nothing in flight.
    Drain(Side),
    /// Put back into the queue what this side has in flight, and ignore answers to it. The batch that
    /// was executing is blamed if the side died or misbehaved, not if it was merely slow to drain.
    Requeue(Side),
    /// Keep this side idle and ready.
    Park(Side),
    /// Have this side finish its batch and exit.
    Stop(Side),
    /// Kill this side.
    Kill(Side),
    /// This side is the driver's from now on, to keep or to stop.
    Release(Side),
    /// This side outlived its kill: say so, and have its exit waited for.
    GiveUp(Side),
    /// Count the hand-over as done, and answer the client that asked for it.
    Complete,
    /// Report the end; the machine does nothing more.
    Finish(Outcome),
}

/// How a hand-over ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The shadow serves.
    Kept,
    /// The hand-over counted as done, but the incumbent took the traffic back.
    RolledBack(Reason),
    /// The incumbent serves, or will when it is restarted.
    Aborted(Reason),
}

/// Why the shadow does not serve.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// See [`Fact::BootFailed`].
    #[error("the new worker did not become ready: {0}")]
    BootFailed(String),
    /// The shadow did not say hello.
    #[error("the new worker did not report in time after it was started")]
    SpawnTimedOut,
    /// It did not become warm.
    #[error("the new worker did not load and warm up in time")]
    WarmTimedOut,
    /// See [`Fact::Exited`].
    #[error("the new worker died")]
    Died,
    /// See [`Fact::Misbehaved`].
    #[error("the new worker hung, broke the protocol, or was not what it promised to be")]
    Misbehaved,
    /// See [`Fact::Cancel`].
    #[error("it was cancelled")]
    Cancelled,
}

/// How long each phase may last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// From the spawn to the shadow's hello.
    pub spawn: Duration,
    /// Loading, warming up and proving.
    pub warm: Duration,
    /// Until the incumbent's last answer.
    pub drain: Duration,
    /// How long the incumbent stays parked. A time to wait rather than a limit.
    pub dwell: Duration,
    /// From asking to exit to killing, and from killing to giving up.
    pub stop: Duration,
}

/// Where a hand-over stands, for display.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PhaseName {
    /// The shadow's process starts.
    Spawning,
    /// The shadow loads and proves itself.
    Warming,
    /// The shadow serves; the incumbent finishes what it has.
    Draining,
    /// The shadow serves; the incumbent is parked.
    Probation,
    /// The shadow serves; the incumbent is being stopped.
    Retiring,
    /// The incumbent serves; the shadow is being stopped.
    Aborting,
    /// The shadow serves, alone.
    Done,
    /// The incumbent serves, alone.
    Aborted,
}

impl fmt::Display for PhaseName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Spawning => "spawning",
            Self::Warming => "warming",
            Self::Draining => "draining",
            Self::Probation => "probation",
            Self::Retiring => "retiring",
            Self::Aborting => "aborting",
            Self::Done => "done",
            Self::Aborted => "aborted",
        })
    }
}

/// How far a starting worker has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Its process starts.
    Spawning {
        /// When it must have said hello.
        until: Moment,
    },
    /// It loads, warms up and proves itself, as it was told to do.
    Warming {
        /// When it must be warm.
        until: Moment,
    },
}

impl Start {
    /// When this step must be over.
    pub fn until(self) -> Moment {
        match self {
            Self::Spawning { until } | Self::Warming { until } => until,
        }
    }
}

/// One hand-over.
#[derive(Debug)]
pub struct Handover {
    state: State,
    timeouts: Timeouts,
}

impl Handover {
    /// Begins a hand-over. `incumbent_alive` is false while the incumbent is being restarted.
    pub fn begin(now: Moment, incumbent_alive: bool, timeouts: Timeouts) -> (Self, Vec<Action>) {
        let state = State::Spawning { until: now + timeouts.spawn, incumbent_alive };
        (Self { state, timeouts }, vec![Action::Spawn])
    }

    /// Begins a hand-over to a worker that was started already. Nothing is to be done before the
    /// start has got further.
    pub fn begin_started(start: Start, incumbent_alive: bool, timeouts: Timeouts) -> Self {
        let state = match start {
            Start::Spawning { until } => State::Spawning { until, incumbent_alive },
            Start::Warming { until } => State::Warming { until, incumbent_alive },
        };
        Self { state, timeouts }
    }

    /// Begins a hand-over to a worker that stands ready: warm, proven, and with nothing in flight. The
    /// incumbent serves.
    pub fn begin_standing(now: Moment, timeouts: Timeouts) -> (Self, Vec<Action>) {
        let (state, actions) = State::cut_over(now, &timeouts);
        (Self { state, timeouts }, actions)
    }

    /// Something happened.
    pub fn on(&mut self, fact: Fact, now: Moment) -> Vec<Action> {
        self.apply(Event::Told(fact), now)
    }

    /// When the phase ends by itself; nothing once the hand-over is over.
    pub fn due(&self) -> Option<Moment> {
        self.state.until()
    }

    /// A timer fired. Before [`Handover::due`] it is an old timer and changes nothing.
    pub fn on_time(&mut self, now: Moment) -> Vec<Action> {
        match self.due() {
            Some(due) if due <= now => self.apply(Event::TimeUp, now),
            _ => Vec::new(),
        }
    }

    /// Where it stands.
    pub fn phase(&self) -> PhaseName {
        self.state.name()
    }

    fn apply(&mut self, event: Event, now: Moment) -> Vec<Action> {
        match self.state.step(event, now, &self.timeouts) {
            Step::Stay => Vec::new(),
            Step::To(state, actions) => {
                self.state = state;
                actions
            }
        }
    }
}
