//! The state machine of one model's workers. It assigns a role to each worker, decides which worker
//! gets the traffic, and handles all events.
//!
//! ```text
//!              ┌─ reference ─▶ exits
//!              │
//!   starting ──┼─ serve ───▶ Serving ◀──── the shadow fails ───┐
//!              │               │  ▲                            │
//!              │   cut-over:   │  └────────┐                   │
//!              ├─ shadow ──────┼▶ Serving  │ a death,          │
//!              │               └▶ Draining ┼──────▶ Parked ────┤
//!              │                           │ or a change       │
//!              └─ standby ───▶ Standby ────┘                   └─▶ exits
//! ```
//!
//! The state has two parts:
//!
//! * `Processes` has one `Slot` for each worker. The role in the slot defines the worker's purpose and
//!   its time limit, which are stored nowhere else. For example, the phase of a hand-over is derived
//!   from the roles of its two workers. The `Primary` is the serving worker, or the reason why no worker
//!   serves.
//! * The `Relocator` decides on which groups of SMs the batches of a worker run.
//!
//! `Workers` combines the parts with the change of share in progress (at most one), and with the request
//! that waits for the end of this change.
//!
//! The state machine has no side effects. Its driver reports [`LifecycleEvent`]s with the time. The
//! driver applies the returned [`Action`]s in order before it reports the next event. If an action
//! immediately causes an event, the driver reports that event before all others. The driver reports the
//! exit of each worker once, after all other events of that worker. Other events may be late, repeated
//! or missing. An event that does not fit the worker's role changes nothing. Every role has a time
//! limit, except the roles of serving workers and standbys.

mod change;
mod faults;
mod handover;
mod messages;
mod partition;
mod primary;
mod processes;
mod relocator;
mod resize;
mod slot;
mod standby;
mod view;

use std::collections::BTreeMap;

use shadowslice_shared::boot::WorkerPurpose;
use shadowslice_shared::groups::{Division, Groups};
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::profile::Execution;
use shadowslice_shared::units::{Percent, Sms, Timestamp};

use change::OngoingChange;
use processes::Processes;
use relocator::Relocator;
use slot::{ExitReason, Role, Slot, StartPhase, StartPurpose};

pub use change::{ChangeMechanism, ChangeReport, Failover, HandoverFailure, ResizeRefused};
pub use messages::{
    Action, Cause, HandoverMode, Launch, LifecycleEvent, LifecycleReport, ResizeRequest, Settings,
    StartFailure, Timeouts,
};
pub use view::{HandoverPhase, WorkerPhase, WorkerRole, WorkersState};

/// The state of one model's workers. See the [module](self).
#[derive(Debug)]
pub struct Workers {
    settings: Settings,
    now: Timestamp,
    /// The share in force, which a restarted worker also gets.
    share: Percent,
    processes: Processes,
    /// The partitions inside the worker, or the reason why the share is not a partition.
    relocator: Result<Relocator, String>,
    change: Option<OngoingChange>,
    /// The request that waits for the end of the current hand-over. The request arrived while the
    /// incumbent was parked or exiting.
    next: Option<ResizeRequest>,
    /// The number of workers with wrong answers, by their number of SMs.
    wrong_at: BTreeMap<Sms, u32>,
    /// The times of batches by number of SMs, as measured by the last worker.
    execution: Option<Execution>,
    held: bool,
    stopping: bool,
    actions: Vec<Action>,
}

impl Workers {
    /// Creates the state of a model without workers. `division` is the division of the GPU into groups,
    /// or the reason why the share cannot be a partition inside the worker.
    pub fn new(settings: Settings, share: Percent, held: bool, division: Result<Division, String>) -> Self {
        Self {
            processes: Processes::new(settings.reference),
            relocator: division.map(|division| Relocator::new(division, share)),
            settings,
            now: Timestamp::default(),
            share,
            change: None,
            next: None,
            wrong_at: BTreeMap::new(),
            execution: None,
            held,
            stopping: false,
            actions: Vec::new(),
        }
    }

    /// Starts the first worker. If the model's configuration has a `fault`, the model stays down.
    pub fn begin(&mut self, fault: Option<String>, now: Timestamp) -> Vec<Action> {
        self.now = now;
        match fault {
            Some(why) => self.down(why),
            None => self.boot(),
        }
        std::mem::take(&mut self.actions)
    }

    /// Handles an event and returns the resulting actions.
    pub fn on(&mut self, fact: LifecycleEvent, now: Timestamp) -> Vec<Action> {
        self.now = now;
        match fact {
            LifecycleEvent::NotStarted { worker, .. } | LifecycleEvent::Exited { worker, .. }
                if self.stopping =>
            {
                self.processes.remove(worker);
            }
            LifecycleEvent::Resize { request, .. } if self.stopping => {
                self.refuse(request, ResizeRefused::Stopping)
            }
            _ if self.stopping => {}
            fact => {
                self.apply(fact);
                self.settle();
            }
        }
        std::mem::take(&mut self.actions)
    }

    /// Returns the next time at which the driver must call [`Workers::on_timer`].
    pub fn due(&self) -> Option<Timestamp> {
        let workers = self.processes.due();
        if self.stopping {
            return workers;
        }
        let primary = self.processes.primary.due();
        let all = [workers, primary, self.retry_due(), self.partition_due(), self.standby_due()];
        all.into_iter().flatten().min()
    }

    /// Handles a timer and returns the resulting actions. A timer that fires before [`Workers::due`] is
    /// outdated and changes nothing.
    pub fn on_timer(&mut self, now: Timestamp) -> Vec<Action> {
        self.now = now;
        for worker in self.processes.late(now) {
            self.on_timeout(worker);
        }
        if !self.stopping {
            self.primary_on_time();
            self.retry_on_time();
            self.partition_on_time();
            self.settle();
        }
        std::mem::take(&mut self.actions)
    }

    /// Returns true if the model was stopped and all its workers have exited.
    pub fn have_ended(&self) -> bool {
        self.stopping && self.processes.is_empty()
    }

    /// Holds the share for an operator, or releases it. Returns true if this changes the state.
    pub fn hold(&mut self, held: bool) -> bool {
        std::mem::replace(&mut self.held, held) != held
    }

    fn apply(&mut self, fact: LifecycleEvent) {
        match fact {
            LifecycleEvent::Resize { request, hold } => self.resize(request, hold),
            LifecycleEvent::Configured(settings) => {
                self.settings = settings;
                // During a change inside the worker, the groups follow the new share.
                self.ask_groups(self.share_inside());
            }
            LifecycleEvent::Stop => self.stop(),
            LifecycleEvent::Sleep(worker) => self.sleep(worker),
            LifecycleEvent::Wake => self.wake(),
            LifecycleEvent::NotStarted { worker, failure } => self.not_started(worker, failure),
            LifecycleEvent::Connected(worker) => self.connected(worker),
            LifecycleEvent::ReferenceWritten { worker, result } => self.reference_written(worker, result),
            LifecycleEvent::Warmed { worker, warmed, asked } => self.warmed(worker, &warmed, asked),
            LifecycleEvent::Refused { worker, refusal } => self.refused(worker, &refusal),
            LifecycleEvent::Misbehaved { worker, why } => self.misbehaved(worker, &why),
            LifecycleEvent::LaneEnded { worker, idle } => self.lane_ended(worker, idle),
            LifecycleEvent::Exited { worker, status, idle } => self.exited(worker, status, idle),
            LifecycleEvent::Drained(worker) => self.drained(worker),
            LifecycleEvent::FirstAnswer(_) => self.processes.restarts.record_answer(),
            LifecycleEvent::PoisonConfirmed => self.processes.restarts.record_poison(),
            LifecycleEvent::Prepared { worker, prepared } => self.prepared(worker, prepared),
            LifecycleEvent::Groups(groups) => self.groups_are(groups),
            LifecycleEvent::WaitEnded => self.wait_ended(),
            LifecycleEvent::StandbyRevoked(why) => self.revoke_standby(why),
        }
    }

    /// Makes the changes that depend on the whole state instead of a single event. The changes concern
    /// the next waiting request, the traffic of an awaited standby, the share of the serving worker,
    /// the standby, and the groups on which batches run.
    fn settle(&mut self) {
        if self.stopping {
            return;
        }
        self.resize_next();
        self.update_awaited();
        self.restore_share();
        self.update_standby();
        self.update_partition();
    }

    fn start(&mut self, purpose: StartPurpose, share: Percent, until: Timestamp) -> WorkerId {
        let boot_purpose = match purpose {
            StartPurpose::Reference => self.processes.reference.unwrap_or(WorkerPurpose::Reference),
            StartPurpose::Serve | StartPurpose::Shadow | StartPurpose::Standby => WorkerPurpose::Serve,
        };
        let inside = self.relocator.as_ref().ok().filter(|_| boot_purpose == WorkerPurpose::Serve);
        let partition = inside.map(Relocator::target);
        let role = Role::Starting { purpose, phase: StartPhase::Spawning, until };
        let worker = self.processes.add(Slot { share, partition, role });
        let standby = purpose == StartPurpose::Standby;
        let low_priority = standby || purpose == StartPurpose::Shadow;
        self.act(Action::Start(Launch { worker, purpose: boot_purpose, share, low_priority, standby }));
        worker
    }

    fn connected(&mut self, worker: WorkerId) {
        if self.processes.connected(worker, self.now + self.settings.timeouts.warm) {
            self.act(Action::Load(worker));
        }
    }

    fn dismiss(&mut self, worker: WorkerId, reason: ExitReason) {
        self.ends(worker, reason);
        self.act(Action::Stop(worker));
    }

    /// Marks the worker as exiting, with or without an order to exit. If the worker does not exit in
    /// time, it is killed.
    fn ends(&mut self, worker: WorkerId, reason: ExitReason) {
        let until = self.stop_by();
        self.processes.becomes(worker, Role::Exiting { reason, killed: false, until });
    }

    fn kill(&mut self, worker: WorkerId, reason: ExitReason, why: &str) {
        let until = self.stop_by();
        self.processes.becomes(worker, Role::Exiting { reason, killed: true, until });
        self.act(Action::Kill(worker, why.to_owned()));
    }

    fn stop_by(&self) -> Timestamp {
        self.now + self.settings.timeouts.stop
    }

    fn stop(&mut self) {
        self.act(Action::Shut("the server is stopping".to_owned()));
        self.refuse_all(&ResizeRefused::Stopping);
        for worker in self.processes.all() {
            self.dismiss(worker, ExitReason::Unneeded);
        }
        self.stopping = true;
    }

    fn act(&mut self, action: Action) {
        self.actions.push(action);
    }

    fn sms(&self, share: Percent) -> Sms {
        self.relocator
            .as_ref()
            .map_or_else(|_| self.settings.sms_of(share), |relocator| relocator.sms_of(share))
    }

    fn fits(&self, worker: WorkerId, share: Percent) -> bool {
        let Some(slot) = self.processes.slot(worker) else { return false };
        match (slot.partition, &self.relocator) {
            (Some(_), Ok(_)) => true,
            (Some(groups), Err(_)) => {
                let whole = self.settings.sms_of(Percent::WHOLE);
                groups == Groups::WHOLE && whole == self.settings.sms_of(share)
            }
            (None, _) => self.settings.sms_of(slot.share) == self.sms(share),
        }
    }

    fn set_share(&mut self, share: Percent) {
        self.share = share;
        self.ask_groups(share);
    }
}
