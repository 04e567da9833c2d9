//! The standby: a second worker, warm and proven, to which traffic can move at once if the first
//! one dies or if the share changes to the standby's.
//!
//! The standby is not a part of a hand-over. A parked incumbent may become the standby, and a new
//! standby starts only while no change is under way. A hand-over to the share of a standby that is
//! still starting takes that worker as its shadow.

use std::time::Duration;

use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Percent, Timestamp};

use super::Workers;
use super::messages::{Action, HandoverMode, StartFailure};
use super::slot::{ExitReason, Role, StartPurpose};
use crate::restart::STABLE_AFTER;

/// The delay before the next standby after a failure, at first and at most. The delay doubles with
/// each failure.
const MIN_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// The pause before missing memory is requested again.
const MEMORY_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// The pause before the next standby after one was revoked.
const REVOKED_COOLDOWN: Duration = Duration::from_secs(10);

/// The least time for which a standby keeps its share before it is replaced, however short the
/// dwell time is.
const MIN_DWELL: Duration = Duration::from_secs(1);

/// The state of the standby besides its slot.
#[derive(Debug)]
pub(super) struct StandbyState {
    /// The earliest start of the next standby.
    not_before: Timestamp,
    backoff: Duration,
    /// The reason why a wanted standby is missing.
    pub(super) obstacle: Option<String>,
}

impl StandbyState {
    pub(super) fn new() -> Self {
        Self { not_before: Timestamp::default(), backoff: MIN_BACKOFF, obstacle: None }
    }
}

impl Workers {
    pub(super) fn ready(&self) -> Option<WorkerId> {
        self.find(|role| matches!(role, Role::Standby { .. }))
    }

    pub(super) fn starting_standby(&self) -> Option<WorkerId> {
        self.find(|role| role.starts_as(StartPurpose::Standby))
    }

    /// Returns the share of the standby, if one is wanted. A model with `handover: restart` never
    /// has two workers.
    pub(super) fn standby_wanted(&self) -> Option<Percent> {
        let wanted = self.settings.standby && self.settings.handover != HandoverMode::Restart;
        wanted.then_some(self.share)
    }

    pub(super) fn wants_standby(&self, worker: WorkerId) -> bool {
        self.standby_wanted().is_some_and(|share| self.fits(worker, share))
    }

    fn dwell(&self) -> Duration {
        self.settings.timeouts.dwell.max(MIN_DWELL)
    }

    /// Returns true if a standby may start: beside a worker that serves, and while no change of
    /// worker is under way.
    fn may_start(&self) -> bool {
        let changes = self.change.as_ref().is_some_and(|change| !change.is_inside());
        self.serving().is_some() && self.reference.is_none() && !changes && self.next.is_none()
    }

    /// Returns true if a standby that is starting is unwanted; its warm-up would only slow the
    /// neighbours. An awaited standby stays. If a standby is wanted, any share is accepted for now.
    fn is_unwanted_start(&self, worker: WorkerId) -> bool {
        let next = self.next.is_some_and(|next| self.fits(worker, next.share));
        let awaited = next || self.serving().is_none();
        !awaited && self.standby_wanted().is_none()
    }

    /// Returns the next time at which the standby needs attention without an event.
    pub(super) fn standby_due(&self) -> Option<Timestamp> {
        let Some(worker) = self.find(Role::is_standby) else {
            return self.standby_wanted().filter(|_| self.may_start()).map(|_| self.standby.not_before);
        };
        match self.role(worker)? {
            Role::Standby { since } => {
                let unwanted = !self.wants_standby(worker) && !self.is_handing_over();
                unwanted.then_some(*since + self.dwell())
            }
            _ => None,
        }
    }

    pub(super) fn update_standby(&mut self) {
        if let Some(worker) = self.starting_standby()
            && let Some(&Role::Starting { until, .. }) = self.role(worker)
            && self.is_unwanted_start(worker)
        {
            // The worker notices the stop only after loading. A kill before that could break other
            // workers on the GPU.
            let reason = ExitReason::Standby { cooldown: self.dwell(), failed: false };
            self.dismiss(worker, reason.clone());
            let until = until.max(self.stop_by());
            return self.becomes(worker, Role::Exiting { reason, killed: false, until });
        }
        if self.standby_due().is_none_or(|due| due > self.now) {
            return;
        }
        if self.ready().is_some() {
            return self.dismiss_standby(Duration::ZERO);
        }
        self.standby.obstacle = None;
        self.start(StartPurpose::Standby, self.share, self.now + self.settings.timeouts.spawn);
        self.act(Action::StandbyExists(true));
    }

    pub(super) fn standby_not_started(&mut self, failure: StartFailure) {
        self.act(Action::StandbyExists(false));
        let (pause, why) = match failure {
            StartFailure::NoRoomForStandby(why) => (MEMORY_RETRY_INTERVAL, why),
            StartFailure::Passing { why, .. } | StartFailure::Failed(why) => (self.next_backoff(), why),
        };
        self.standby.not_before = self.now + pause;
        self.standby.obstacle = Some(why);
    }

    pub(super) fn becomes_standby(&mut self, worker: WorkerId) {
        self.becomes(worker, Role::Standby { since: self.now });
        self.standby.obstacle = None;
        // An awaited worker did not count as a standby. It becomes one, or serves in this step.
        self.act(Action::StandbyExists(true));
    }

    pub(super) fn keep(&mut self, worker: WorkerId) {
        if let Some(other) = self.find(Role::is_standby) {
            self.dismiss(other, ExitReason::Unneeded);
        }
        self.becomes(worker, Role::Standby { since: self.now });
        self.standby.obstacle = None;
        self.act(Action::Keep(worker));
    }

    pub(super) fn take_standby(&mut self) -> Option<WorkerId> {
        let worker = self.ready()?;
        self.standby.backoff = MIN_BACKOFF;
        self.standby.not_before = self.now;
        self.act(Action::StandbyExists(false));
        Some(worker)
    }

    pub(super) fn take_starting(&mut self, worker: WorkerId) {
        if let Some(slot) = self.slots.get_mut(&worker)
            && let Role::Starting { purpose, .. } = &mut slot.role
        {
            *purpose = StartPurpose::Shadow;
        }
        self.standby.not_before = self.now;
        self.act(Action::StandbyExists(false));
    }

    pub(super) fn revoke_standby(&mut self, why: String) {
        if self.ready().or(self.starting_standby()).is_some() {
            self.standby.obstacle = Some(why);
            self.dismiss_standby(REVOKED_COOLDOWN);
        }
    }

    /// Lets the standby exit. The next one starts `cooldown` after its exit.
    pub(super) fn dismiss_standby(&mut self, cooldown: Duration) {
        if let Some(worker) = self.ready().or(self.starting_standby()) {
            self.dismiss(worker, ExitReason::Standby { cooldown, failed: false });
        }
    }

    pub(super) fn fail_standby(&mut self, worker: WorkerId, why: &str) {
        let Some(role) = self.role(worker).cloned() else { return };
        let cooldown = self.standby_cooldown(&role);
        self.kill(worker, ExitReason::Standby { cooldown, failed: true }, why);
    }

    pub(super) fn standby_cooldown(&mut self, role: &Role) -> Duration {
        if let Role::Standby { since } = role
            && self.now.since(*since) >= STABLE_AFTER
        {
            self.standby.backoff = MIN_BACKOFF;
        }
        self.next_backoff()
    }

    pub(super) fn next_backoff(&mut self) -> Duration {
        let backoff = self.standby.backoff;
        self.standby.backoff = (backoff * 2).min(MAX_BACKOFF);
        backoff
    }

    pub(super) fn standby_exited(&mut self, cooldown: Duration, failed: bool) {
        self.act(Action::StandbyExists(false));
        self.standby.not_before = self.now + cooldown;
        if failed {
            let ended = || "the last standby exited; another one starts soon".to_owned();
            self.standby.obstacle.get_or_insert_with(ended);
        }
    }
}
