//! The standing worker: a second one, warm and proven, to which traffic can move at once, where the
//! first one dies or the share is to be its own.
//!
//! It is no part of a hand-over: a parked incumbent may become the standing worker, and a new one
//! starts only while no change is under way. But a hand-over to the share of a standing worker that
//! still starts takes that worker as its shadow.

use std::time::Duration;

use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Percent, Timestamp};

use super::Workers;
use super::messages::{Action, HandoverMode, StartFailure};
use super::slot::{Aim, Leaver, Role};
use crate::restart::STOOD;

/// After a standing worker failed, at first and at most; the pause doubles with each failure.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Before missing memory is asked for again, and before a standing worker is started again after it
/// had to go.
const ROOM_PAUSE: Duration = Duration::from_secs(1);
const REST: Duration = Duration::from_secs(10);

/// How long a share is kept ready at least before another share's, however short the dwell time.
const LEAST_DWELL: Duration = Duration::from_secs(1);

/// Beside the slot of the standing worker that there is.
#[derive(Debug)]
pub(super) struct Standing {
    /// No standing worker is started before.
    not_before: Timestamp,
    pause: Duration,
    /// Why there is no standing worker though one is wanted.
    pub(super) obstacle: Option<String>,
}

impl Standing {
    pub(super) fn new() -> Self {
        Self { not_before: Timestamp::default(), pause: FIRST_PAUSE, obstacle: None }
    }
}

impl Workers {
    pub(super) fn ready(&self) -> Option<WorkerId> {
        self.find(|role| matches!(role, Role::Standing { .. }))
    }

    pub(super) fn starting_to_stand(&self) -> Option<WorkerId> {
        self.find(|role| role.starts_as(Aim::Stand))
    }

    /// A model that restarts never has two workers.
    pub(super) fn standing_wanted(&self) -> Option<Percent> {
        let wanted = self.settings.standby && self.settings.handover != HandoverMode::Restart;
        wanted.then_some(self.share)
    }

    pub(super) fn wants_standing(&self, worker: WorkerId) -> bool {
        self.standing_wanted().is_some_and(|share| self.fits(worker, share))
    }

    fn dwell(&self) -> Duration {
        self.settings.timeouts.dwell.max(LEAST_DWELL)
    }

    /// Only beside a worker that serves, and while no change of worker is under way.
    fn may_start(&self) -> bool {
        let changes = self.change.as_ref().is_some_and(|change| !change.is_inside());
        self.serving().is_some() && self.reference.is_none() && !changes && self.next.is_none()
    }

    /// A standing worker that starts is given up, as its warming up costs the neighbours. One that
    /// is waited for stays, and where one is wanted, any share does for now.
    fn starts_in_vain(&self, worker: WorkerId) -> bool {
        let next = self.next.is_some_and(|next| self.fits(worker, next.share));
        let awaited = next || self.serving().is_none();
        !awaited && self.standing_wanted().is_none()
    }

    /// When the standing worker needs attention without a fact.
    pub(super) fn standing_due(&self) -> Option<Timestamp> {
        let Some(worker) = self.find(Role::is_standing) else {
            return self.standing_wanted().filter(|_| self.may_start()).map(|_| self.standing.not_before);
        };
        match self.role(worker)? {
            Role::Standing { since } => {
                let unwanted = !self.wants_standing(worker) && !self.is_handing_over();
                unwanted.then_some(*since + self.dwell())
            }
            _ => None,
        }
    }

    pub(super) fn tend_standing(&mut self) {
        if let Some(worker) = self.starting_to_stand()
            && let Some(&Role::Starting { until, .. }) = self.role(worker)
            && self.starts_in_vain(worker)
        {
            // It notices the stop only after loading, and to kill it earlier could break other
            // workers on the GPU.
            let leaver = Leaver::Standing { rest: self.dwell(), failed: false };
            self.dismiss(worker, leaver.clone());
            let until = until.max(self.stop_by());
            return self.becomes(worker, Role::Leaving { leaver, killed: false, until });
        }
        if self.standing_due().is_none_or(|due| due > self.now) {
            return;
        }
        if self.ready().is_some() {
            return self.dismiss_standing(Duration::ZERO);
        }
        self.standing.obstacle = None;
        self.start(Aim::Stand, self.share, self.now + self.settings.timeouts.spawn);
        self.act(Action::Stands(true));
    }

    pub(super) fn none_stands(&mut self, failure: StartFailure) {
        self.act(Action::Stands(false));
        let (pause, why) = match failure {
            StartFailure::NoRoomToStand(why) => (ROOM_PAUSE, why),
            StartFailure::Passing { why, .. } | StartFailure::Failed(why) => (self.next_pause(), why),
        };
        self.standing.not_before = self.now + pause;
        self.standing.obstacle = Some(why);
    }

    pub(super) fn stands_ready(&mut self, worker: WorkerId) {
        self.becomes(worker, Role::Standing { since: self.now });
        self.standing.obstacle = None;
        // It counted as no spare if it was awaited; it is one, or serves in this very step.
        self.act(Action::Stands(true));
    }

    pub(super) fn keep(&mut self, worker: WorkerId) {
        if let Some(other) = self.find(Role::is_standing) {
            self.dismiss(other, Leaver::Unneeded);
        }
        self.becomes(worker, Role::Standing { since: self.now });
        self.standing.obstacle = None;
        self.act(Action::Keep(worker));
    }

    pub(super) fn take_standing(&mut self) -> Option<WorkerId> {
        let worker = self.ready()?;
        self.standing.pause = FIRST_PAUSE;
        self.standing.not_before = self.now;
        self.act(Action::Stands(false));
        Some(worker)
    }

    pub(super) fn take_starting(&mut self, worker: WorkerId) {
        if let Some(slot) = self.slots.get_mut(&worker)
            && let Role::Starting { aim, .. } = &mut slot.role
        {
            *aim = Aim::Shadow;
        }
        self.standing.not_before = self.now;
        self.act(Action::Stands(false));
    }

    pub(super) fn must_not_stand(&mut self, why: String) {
        if self.ready().or(self.starting_to_stand()).is_some() {
            self.standing.obstacle = Some(why);
            self.dismiss_standing(REST);
        }
    }

    /// The next standing worker starts `rest` after the exit of this one.
    pub(super) fn dismiss_standing(&mut self, rest: Duration) {
        if let Some(worker) = self.ready().or(self.starting_to_stand()) {
            self.dismiss(worker, Leaver::Standing { rest, failed: false });
        }
    }

    pub(super) fn fail_standing(&mut self, worker: WorkerId, why: &str) {
        let Some(role) = self.role(worker).cloned() else { return };
        let rest = self.standing_failed(&role);
        self.kill(worker, Leaver::Standing { rest, failed: true }, why);
    }

    pub(super) fn standing_failed(&mut self, role: &Role) -> Duration {
        if let Role::Standing { since } = role
            && self.now.since(*since) >= STOOD
        {
            self.standing.pause = FIRST_PAUSE;
        }
        self.next_pause()
    }

    pub(super) fn next_pause(&mut self) -> Duration {
        let pause = self.standing.pause;
        self.standing.pause = (pause * 2).min(LONGEST_PAUSE);
        pause
    }

    pub(super) fn standing_gone(&mut self, rest: Duration, failed: bool) {
        self.act(Action::Stands(false));
        self.standing.not_before = self.now + rest;
        if failed {
            let ended = || "the last one ended; another one comes in a moment".to_owned();
            self.standing.obstacle.get_or_insert_with(ended);
        }
    }
}
