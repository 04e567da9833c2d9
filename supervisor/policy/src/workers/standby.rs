//! The warm standby: a second worker that has passed the proof. Traffic can move to the standby
//! immediately if the first worker dies, or if the model's share changes to the standby's share.
//!
//! Standbys are independent of hand-overs. A parked incumbent may become the standby. A new standby
//! starts only if no change is in progress. If a hand-over is to the share of a standby that is still
//! starting, this standby becomes the shadow.

use std::time::Duration;

use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Percent, Timestamp};

use super::Workers;
use super::messages::{Action, StartFailure};
use super::slot::{ExitReason, Role, StartPurpose};
use crate::backoff::Backoff;
use crate::restart::STABLE_AFTER;

/// The minimum and the maximum delay between the failure of a standby and the start of the next
/// standby.
const MIN_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// The time between two attempts to start a standby, while the GPU has no memory for the standby.
const MEMORY_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// The minimum time between the exit of a revoked standby and the start of the next standby.
const REVOKED_COOLDOWN: Duration = Duration::from_secs(10);

/// The minimum time for which an unsuitable standby is kept before another one replaces it. It applies
/// if `timeouts.dwell` is shorter.
const MIN_DWELL: Duration = Duration::from_secs(1);

/// The part of the standby's state that its slot does not contain.
#[derive(Debug)]
pub(super) struct StandbyState {
    /// The time before which the next standby must not start.
    not_before: Timestamp,
    backoff: Backoff,
    /// The reason why the model has no standby although it should have one.
    pub(super) obstacle: Option<String>,
}

impl StandbyState {
    pub(super) fn new() -> Self {
        Self {
            not_before: Timestamp::default(),
            backoff: Backoff::new(MIN_BACKOFF, MAX_BACKOFF),
            obstacle: None,
        }
    }

    /// Records a failure of the standby. Returns the delay before the next start.
    pub(super) fn record_failure(&mut self) -> Duration {
        self.backoff.record_failure()
    }

    /// Returns the delay after the failure of a standby with this role.
    pub(super) fn cooldown_after(&mut self, role: &Role, now: Timestamp) -> Duration {
        if let Role::Standby { since } = role
            && now.since(*since) >= STABLE_AFTER
        {
            self.backoff.reset();
        }
        self.record_failure()
    }

    /// Lets the next standby start immediately, because the last one became another worker.
    pub(super) fn starts_again(&mut self, now: Timestamp) {
        self.not_before = now;
    }
}

impl Workers {
    /// Returns the share that the standby should have. Returns `None` if the model should have no
    /// standby.
    pub(super) fn standby_wanted(&self) -> Option<Percent> {
        self.settings.standby.then_some(self.share)
    }

    pub(super) fn wants_standby(&self, worker: WorkerId) -> bool {
        self.standby_wanted().is_some_and(|share| self.fits(worker, share))
    }

    fn dwell(&self) -> Duration {
        self.settings.timeouts.dwell.max(MIN_DWELL)
    }

    /// Returns true if a standby may start. A worker must be serving, and no change may be in progress
    /// except one inside the worker.
    fn may_start(&self) -> bool {
        let changes = self.change.as_ref().is_some_and(|change| !change.is_inside());
        self.processes.serving().is_some()
            && self.processes.reference.is_none()
            && !changes
            && self.next.is_none()
    }

    /// Returns true if a starting standby is no longer needed. The warm-up of such a standby would only
    /// slow down other models. An awaited standby is still needed. If the model should have a standby,
    /// a standby with any share may complete its start.
    fn is_unwanted_start(&self, worker: WorkerId) -> bool {
        let next = self.next.is_some_and(|next| self.fits(worker, next.share));
        let awaited = next || self.processes.serving().is_none();
        !awaited && self.standby_wanted().is_none()
    }

    /// Returns the next time at which the standby may have to start or exit.
    pub(super) fn standby_due(&self) -> Option<Timestamp> {
        let Some(worker) = self.processes.find(Role::is_standby) else {
            return self
                .standby_wanted()
                .filter(|_| self.may_start())
                .map(|_| self.processes.standby.not_before);
        };
        match self.processes.role(worker)? {
            Role::Standby { since } => {
                let unwanted = !self.wants_standby(worker) && !self.is_handing_over();
                unwanted.then_some(*since + self.dwell())
            }
            _ => None,
        }
    }

    pub(super) fn update_standby(&mut self) {
        if let Some(worker) = self.processes.starting_standby()
            && let Some(&Role::Starting { until, .. }) = self.processes.role(worker)
            && self.is_unwanted_start(worker)
        {
            // The worker notices the order only after it has loaded the model. A kill during the
            // loading could break other workers on the GPU.
            let reason = ExitReason::Standby { cooldown: self.dwell(), failed: false };
            self.dismiss(worker, reason.clone());
            let until = until.max(self.stop_by());
            return self.processes.becomes(worker, Role::Exiting { reason, killed: false, until });
        }
        if self.standby_due().is_none_or(|due| due > self.now) {
            return;
        }
        if self.processes.ready().is_some() {
            return self.dismiss_standby(Duration::ZERO);
        }
        self.processes.standby.obstacle = None;
        self.start(StartPurpose::Standby, self.share, self.now + self.settings.timeouts.spawn);
        self.act(Action::StandbyExists(true));
    }

    pub(super) fn standby_not_started(&mut self, failure: StartFailure) {
        self.act(Action::StandbyExists(false));
        let (pause, why) = match failure {
            StartFailure::NoRoomForStandby(why) => (MEMORY_RETRY_INTERVAL, why),
            StartFailure::Passing { why, .. } | StartFailure::Failed(why) => {
                (self.processes.standby.record_failure(), why)
            }
        };
        self.processes.standby.not_before = self.now + pause;
        self.processes.standby.obstacle = Some(why);
    }

    pub(super) fn becomes_standby(&mut self, worker: WorkerId) {
        self.processes.becomes(worker, Role::Standby { since: self.now });
        self.processes.standby.obstacle = None;
        // While the model waited for this worker, the worker did not count as a standby. It now becomes
        // a standby, or starts to serve in the same step.
        self.act(Action::StandbyExists(true));
    }

    pub(super) fn keep(&mut self, worker: WorkerId) {
        if let Some(other) = self.processes.find(Role::is_standby) {
            self.dismiss(other, ExitReason::Unneeded);
        }
        self.processes.becomes(worker, Role::Standby { since: self.now });
        self.processes.standby.obstacle = None;
        self.act(Action::Keep(worker));
    }

    pub(super) fn take_standby(&mut self) -> Option<WorkerId> {
        let worker = self.processes.ready()?;
        self.processes.standby.backoff.reset();
        self.processes.standby.starts_again(self.now);
        self.act(Action::StandbyExists(false));
        Some(worker)
    }

    pub(super) fn take_starting(&mut self, worker: WorkerId) {
        self.processes.take_starting(worker, self.now);
        self.act(Action::StandbyExists(false));
    }

    pub(super) fn revoke_standby(&mut self, why: String) {
        if self.processes.ready().or(self.processes.starting_standby()).is_some() {
            self.processes.standby.obstacle = Some(why);
            self.dismiss_standby(REVOKED_COOLDOWN);
        }
    }

    /// Orders the standby to exit. The next standby starts `cooldown` after the exit.
    pub(super) fn dismiss_standby(&mut self, cooldown: Duration) {
        if let Some(worker) = self.processes.ready().or(self.processes.starting_standby()) {
            self.dismiss(worker, ExitReason::Standby { cooldown, failed: false });
        }
    }

    pub(super) fn fail_standby(&mut self, worker: WorkerId, why: &str) {
        let Some(role) = self.processes.role(worker).cloned() else { return };
        let cooldown = self.processes.standby.cooldown_after(&role, self.now);
        self.kill(worker, ExitReason::Standby { cooldown, failed: true }, why);
    }

    pub(super) fn standby_exited(&mut self, cooldown: Duration, failed: bool) {
        self.act(Action::StandbyExists(false));
        self.processes.standby.not_before = self.now + cooldown;
        if failed {
            let ended = || "the last standby exited; another one starts soon".to_owned();
            self.processes.standby.obstacle.get_or_insert_with(ended);
        }
    }
}
