//! The standing worker: a second one, warm and proven, to which traffic can move at once.
//!
//! ```text
//!   None ──▶ Starting ──▶ Ready ──▶ a flip or a fail-over makes it the one that serves
//!    ▲           │          │
//!    │           ├──────────┴──▶ Leaving, when another share is wanted, or none: while it starts at once
//!    └───────────┴──▶ Failing, when its start comes to nothing
//! ```
//!
//! It is no part of a hand-over: a parked incumbent may become the standing worker, and a new one
//! is started only while no hand-over is under way. But a hand-over to the share of a standing
//! worker that still starts takes that worker as its shadow.

use std::time::Duration;

use shadowslice_policy::handover::Start;
use shadowslice_policy::restart::STOOD;
use shadowslice_shared::boot::Purpose;
use shadowslice_shared::units::{Moment, Percent, Sms};

use super::events::Controller;
use super::primary::Primary;
use crate::process::WorkerSaid;
use shadowslice_config::{HandoverMode, Standby as Mode};
use shadowslice_shared::errors;
use shadowslice_shared::ids::WorkerId;

/// The pause after a standing worker failed, at first and at most. It doubles with each failure.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// The pause before missing memory is asked for again, and the pause before a standing worker is
/// started again after it was called in.
const ROOM_PAUSE: Duration = Duration::from_secs(1);
const REST: Duration = Duration::from_secs(10);

/// How long a share is kept ready at least before another share's, however short the dwell time.
const LEAST_DWELL: Duration = Duration::from_secs(1);

/// The standing worker of a model.
#[derive(Debug)]
pub(super) struct Standby {
    state: State,
    pause: Duration,
    /// Why there is none though one is wanted.
    obstacle: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// There is no standing worker, and none is started before `until`.
    None { until: Moment },
    /// It boots.
    Starting { worker: WorkerId, start: Start },
    /// Its start failed. It ends by itself, or is killed at `deadline`.
    Failing { worker: WorkerId, deadline: Moment },
    /// It stands ready.
    Ready { worker: WorkerId, since: Moment },
    /// It was told to end; the next one is started `rest` after its exit.
    Leaving { worker: WorkerId, rest: Duration },
}

impl Standby {
    pub(super) fn new() -> Self {
        let state = State::None { until: Moment::default() };
        Self { state, pause: FIRST_PAUSE, obstacle: None }
    }

    pub(super) fn worker(&self) -> Option<WorkerId> {
        match self.state {
            State::None { .. } => None,
            State::Starting { worker, .. }
            | State::Failing { worker, .. }
            | State::Ready { worker, .. }
            | State::Leaving { worker, .. } => Some(worker),
        }
    }

    /// Whether this worker is it.
    pub(super) fn is(&self, worker: WorkerId) -> bool {
        self.worker() == Some(worker)
    }

    /// The one that stands ready.
    pub(super) fn ready(&self) -> Option<WorkerId> {
        match self.state {
            State::Ready { worker, .. } => Some(worker),
            _ => None,
        }
    }

    /// The one that starts, and how far it has come.
    pub(super) fn starting(&self) -> Option<(WorkerId, Start)> {
        match self.state {
            State::Starting { worker, start } => Some((worker, start)),
            _ => None,
        }
    }

    /// Whether one can take over, at once or when it is warm.
    pub(super) fn can_relieve(&self) -> bool {
        matches!(self.state, State::Starting { .. } | State::Ready { .. })
    }

    /// Role and phase, for reports.
    pub(super) fn standing(&self) -> (&'static str, &'static str) {
        let phase = match self.state {
            State::Starting { start: Start::Spawning { .. }, .. } => "starting",
            State::Starting { start: Start::Warming { .. }, .. } => "warming",
            State::Ready { .. } => "standing",
            State::Failing { .. } | State::Leaving { .. } | State::None { .. } => "stopping",
        };
        ("standby", phase)
    }

    /// It failed: the next one comes after a while.
    fn failed(&mut self, now: Moment) {
        let pause = self.fails(now);
        self.state = State::None { until: now + pause };
    }

    /// It fails now: returns the pause before the next one.
    fn fails(&mut self, now: Moment) -> Duration {
        if let State::Ready { since, .. } = self.state
            && now.since(since) >= STOOD
        {
            self.pause = FIRST_PAUSE;
        }
        let pause = self.pause;
        self.pause = (pause * 2).min(LONGEST_PAUSE);
        pause
    }
}

impl Controller {
    /// The share at which a worker should stand ready, if one should.
    fn standby_wanted(&self) -> Option<Percent> {
        // A model that restarts never has two workers.
        let wanted = self.model.standby == Mode::Always && self.model.handover != HandoverMode::Restart;
        wanted.then_some(self.share)
    }

    pub(super) fn wants_standing(&self, sms: Sms) -> bool {
        self.standby_wanted().is_some_and(|share| self.sms(share) == sms)
    }

    /// Why no worker stands ready though one should.
    pub(super) fn standby_obstacle(&self) -> Option<String> {
        self.standby_wanted().and_then(|_| self.standby.obstacle.clone())
    }

    /// Whether the standing worker that starts is to be given up, since warming up costs the
    /// neighbours. A worker that is waited for stays.
    fn starts_in_vain(&self, worker: WorkerId) -> bool {
        // A spare's share may be any until the next one comes.
        let Some(sms) = self.sms_of(worker) else { return false };
        let next = self.next.as_ref().is_some_and(|next| self.sms(next.share) == sms);
        let awaited = next || !matches!(self.primary, Primary::Serving { .. });
        !awaited && self.standby_wanted().is_none()
    }

    /// When the standing worker needs attention without another event.
    pub(super) fn standby_due(&self) -> Option<Moment> {
        let wanted = self.standby_wanted();
        match self.standby.state {
            State::None { until } => wanted.and(Some(until)).filter(|_| self.may_start_standby()),
            // Long past: at once.
            State::Starting { worker, .. } if self.starts_in_vain(worker) => Some(Moment::default()),
            State::Starting { start, .. } => Some(start.until()),
            State::Failing { deadline, .. } => Some(deadline),
            State::Ready { worker, since } => {
                let right = self.sms_of(worker).is_some_and(|sms| self.wants_standing(sms));
                (!right && self.swap.is_none()).then_some(since + self.standby_dwell())
            }
            State::Leaving { .. } => None,
        }
    }

    fn standby_dwell(&self) -> Duration {
        self.context.timeouts.dwell.max(LEAST_DWELL)
    }

    /// Only beside a worker that serves, and while no change of worker is under way.
    fn may_start_standby(&self) -> bool {
        let serves = matches!(self.primary, Primary::Serving { .. });
        serves
            && self.reference_written
            && self.swap.is_none()
            && self.next.is_none()
            && self.replacing.is_none()
    }

    /// After each event: starts a standing worker, or lets one of an unwanted share go.
    pub(super) fn tend_standby(&mut self) {
        let now = self.now();
        if self.stopping.is_some() || self.standby_due().is_none_or(|due| due > now) {
            return;
        }
        match (self.standby.state, self.standby_wanted()) {
            (State::None { .. }, Some(share)) => self.start_standby(share),
            (State::Starting { worker, start, .. }, _) if self.starts_in_vain(worker) => {
                let pid = self.pid(worker);
                tracing::info!(
                    model = self.model.name,
                    pid,
                    "a standing worker that starts is wanted no more"
                );
                // The worker notices the stop only after loading, and killing it earlier could
                // break other workers on the GPU.
                let deadline = start.until().max(self.after(self.context.timeouts.stop));
                self.standby.state = State::Leaving { worker, rest: self.standby_dwell() };
                self.let_go_by(worker, deadline);
            }
            (State::Starting { worker, .. }, _) => {
                let why = "it took too long to boot (timeouts.spawn, timeouts.warm)";
                tracing::error!(
                    model = self.model.name,
                    pid = self.pid(worker),
                    why,
                    "a standing worker is killed"
                );
                self.kill_standby(worker);
            }
            (State::Failing { worker, .. }, _) => self.kill_standby(worker),
            (State::Ready { .. }, _) => self.dismiss_standby(),
            (State::None { .. } | State::Leaving { .. }, _) => {}
        }
    }

    fn start_standby(&mut self, share: Percent) {
        let start = Start::Spawning { until: self.after(self.context.timeouts.spawn) };
        if let Err(no_room) = self.room_to_stand(false) {
            let until = self.after(ROOM_PAUSE);
            self.standby.state = State::None { until };
            self.outrank(&no_room);
            return self.no_standby(no_room.to_string());
        }
        match self.launch(Purpose::Serve, share, true) {
            Ok(worker) => {
                self.standby.state = State::Starting { worker, start };
                self.standby.obstacle = None;
                self.note_standing(true);
            }
            Err(error) => {
                let now = self.now();
                self.standby.failed(now);
                self.no_standby(errors::chain(&error));
            }
        }
    }

    fn no_standby(&mut self, why: String) {
        if self.standby.obstacle.as_ref() != Some(&why) {
            tracing::warn!(model = self.model.name, why, "no standing worker for now");
        }
        self.standby.obstacle = Some(why);
    }

    pub(super) fn standby_said(&mut self, worker: WorkerId, said: WorkerSaid) {
        if self.standby.starting().is_none() {
            return;
        }
        match said {
            WorkerSaid::Connected => {
                let start = Start::Warming { until: self.after(self.context.timeouts.warm) };
                self.standby.state = State::Starting { worker, start };
                if let Some(process) = self.workers.get_mut(&worker) {
                    process.warm();
                }
            }
            WorkerSaid::Warmed(warmed) => {
                self.attach(worker, &warmed);
                tracing::info!(
                    model = self.model.name,
                    pid = self.pid(worker),
                    "the standing worker is ready"
                );
                self.standby.state = State::Ready { worker, since: self.now() };
                self.standby.obstacle = None;
                // It stopped counting as a spare if the incumbent died meanwhile; here it is a
                // spare again.
                self.note_standing(true);
            }
            WorkerSaid::Refused(refusal) => {
                let why = refusal.to_string();
                tracing::error!(model = self.model.name, why, "a standing worker refused");
                self.standby.obstacle = Some(why);
                self.standby_fails(worker);
            }
            // Its exit follows.
            WorkerSaid::Lost(_) | WorkerSaid::Loaded(_) | WorkerSaid::Exited(_) => {}
        }
    }

    pub(super) fn standby_exited(&mut self, worker: WorkerId) {
        if !self.standby.is(worker) {
            return;
        }
        let now = self.now();
        self.note_standing(false);
        match self.standby.state {
            State::Leaving { rest, .. } => self.standby.state = State::None { until: now + rest },
            State::None { .. } | State::Starting { .. } | State::Failing { .. } | State::Ready { .. } => {
                self.standby.failed(now);
                self.standby_ended();
            }
        }
    }

    /// Has the standing worker go. Nothing is routed to it.
    pub(super) fn dismiss_standby(&mut self) {
        self.dismiss_for(Duration::ZERO);
    }

    /// Has the standing worker go for a while: others need its memory.
    pub(super) fn rest_standby(&mut self) {
        self.no_standby("others need its memory (a hand-over, a worker that is to serve, or a higher priority); asked for again in a moment".to_owned());
        self.dismiss_for(REST);
    }

    /// Treats the standing worker as dead: this counts as a failure, as its exit would.
    pub(super) fn lose_standby(&mut self) {
        let pause = self.standby.fails(self.now());
        self.dismiss_for(pause);
        self.standby_ended();
    }

    fn standby_ended(&mut self) {
        tracing::warn!(model = self.model.name, "the standing worker ended; another one comes");
        let ended = || "the last one ended; another one comes in a moment".to_owned();
        self.standby.obstacle.get_or_insert_with(ended);
    }

    fn dismiss_for(&mut self, rest: Duration) {
        match self.standby.state {
            State::Starting { worker, .. } | State::Failing { worker, .. } | State::Ready { worker, .. } => {
                self.standby.state = State::Leaving { worker, rest };
                self.let_go(worker);
            }
            State::None { .. } | State::Leaving { .. } => {}
        }
    }

    /// Marks the start of this worker as failed, if it is the standing one; its exit follows.
    pub(super) fn standby_fails(&mut self, worker: WorkerId) {
        let deadline = self.after(self.context.timeouts.stop);
        match self.standby.state {
            State::Starting { worker: starting, .. } | State::Failing { worker: starting, .. }
                if starting == worker =>
            {
                self.standby.state = State::Failing { worker, deadline };
            }
            _ => {}
        }
    }

    fn kill_standby(&mut self, worker: WorkerId) {
        self.standby_fails(worker);
        if let Some(process) = self.workers.get(&worker) {
            process.kill();
        }
    }

    /// Takes over a worker that is warm and has nothing in flight: as the standing one if its share is wanted
    /// as such; else it goes.
    pub(super) fn adopt(&mut self, worker: WorkerId, wanted: bool) {
        if wanted {
            self.dismiss_standby();
            self.standby.state = State::Ready { worker, since: self.now() };
            self.standby.obstacle = None;
            // Removes a call for the memory of the standing worker before this one.
            self.note_standing(false);
            self.note_standing(true);
        } else {
            self.let_go(worker);
        }
    }

    /// Takes the standing worker that is ready, for traffic: it is the standing one no more.
    pub(super) fn take_standing(&mut self) -> Option<WorkerId> {
        let worker = self.standby.ready()?;
        self.standby.pause = FIRST_PAUSE;
        self.standby.state = State::None { until: self.now() };
        self.note_standing(false);
        Some(worker)
    }

    /// Takes the standing worker that starts, as a shadow: it is the standing one no more.
    pub(super) fn take_starting(&mut self) -> Option<(WorkerId, Start)> {
        let taken = self.standby.starting()?;
        self.standby.state = State::None { until: self.now() };
        self.note_standing(false);
        Some(taken)
    }

    pub(super) fn sms_of(&self, worker: WorkerId) -> Option<Sms> {
        self.workers.get(&worker).map(|worker| worker.sms)
    }
}
