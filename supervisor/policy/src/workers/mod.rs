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
//! Every worker has one `Slot`. The role in the slot defines the worker's purpose and its time limit.
//! The purpose and the time limit are stored nowhere else. For example, the phase of a hand-over is
//! derived from the roles of its two workers. In addition to the slots, the state contains the
//! `Primary`, which is the serving worker or the reason why no worker serves. Finally, the state
//! contains the change of share in progress (at most one), and the request that waits for the end of
//! this change.
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

use crate::restart::Restarts;
use change::OngoingChange;
use partition::Partition;
use primary::Primary;
use slot::{ExitReason, Phase, Role, Slot, StartPurpose};
use standby::StandbyState;

pub use change::{ChangeMechanism, ChangeReport, Failover, HandoverFailure, ResizeRefused};
pub use messages::{
    Action, Cause, HandoverMode, Launch, LifecycleEvent, LifecycleReport, ResizeRequest, Settings,
    StartFailure, Timeouts,
};
pub use view::{HandoverPhase, WorkersState};

/// The state of one model's workers. See the [module](self).
#[derive(Debug)]
pub struct Workers {
    settings: Settings,
    now: Timestamp,
    slots: BTreeMap<WorkerId, Slot>,
    /// The number of the last worker that was started.
    started: u64,
    primary: Primary,
    /// The share in force, which a restarted worker also gets.
    share: Percent,
    /// The partition inside the worker, or the reason why the share is not a partition.
    partition: Result<Partition, String>,
    change: Option<OngoingChange>,
    /// The request that waits for the end of the current hand-over. The request arrived while the
    /// incumbent was parked or exiting.
    next: Option<ResizeRequest>,
    standby: StandbyState,
    restarts: Restarts,
    /// The purpose of the next reference worker. This is `None` after the reference answers have been
    /// written.
    reference: Option<WorkerPurpose>,
    /// The number of workers with wrong answers, by their number of SMs.
    wrong_at: BTreeMap<Sms, u32>,
    /// The times of batches by number of SMs, as measured by the last worker.
    execution: Option<Execution>,
    held: bool,
    stopping: bool,
    /// The number of deaths of workers that served or were starting to serve. `restarted` counts the
    /// starts that replaced these workers.
    deaths: u64,
    last_death: Option<String>,
    restarted: u64,
    actions: Vec<Action>,
}

impl Workers {
    /// Creates the state of a model without workers. `division` is the division of the GPU into groups,
    /// or the reason why the share cannot be a partition inside the worker.
    pub fn new(settings: Settings, share: Percent, held: bool, division: Result<Division, String>) -> Self {
        let reference = Some(settings.reference);
        Self {
            partition: division.map(|division| Partition::new(division, share)),
            settings,
            now: Timestamp::default(),
            slots: BTreeMap::new(),
            started: 0,
            primary: Primary::Down { why: "not started".to_owned(), again: None },
            share,
            change: None,
            next: None,
            standby: StandbyState::new(),
            restarts: Restarts::new(),
            reference,
            wrong_at: BTreeMap::new(),
            execution: None,
            held,
            stopping: false,
            deaths: 0,
            last_death: None,
            restarted: 0,
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
                self.slots.remove(&worker);
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
        let workers = self.slots.values().filter_map(|slot| slot.role.until());
        if self.stopping {
            return workers.min();
        }
        let others = [self.primary.due(), self.retry_due(), self.partition_due(), self.standby_due()];
        workers.chain(others.into_iter().flatten()).min()
    }

    /// Handles a timer and returns the resulting actions. A timer that fires before [`Workers::due`] is
    /// outdated and changes nothing.
    pub fn on_timer(&mut self, now: Timestamp) -> Vec<Action> {
        self.now = now;
        let late = |slot: &Slot| slot.role.until().is_some_and(|until| until <= now);
        let late: Vec<_> =
            self.slots.iter().filter_map(|(worker, slot)| late(slot).then_some(*worker)).collect();
        for worker in late {
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
        self.stopping && self.slots.is_empty()
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
            LifecycleEvent::NotStarted { worker, failure } => self.not_started(worker, failure),
            LifecycleEvent::Connected(worker) => self.connected(worker),
            LifecycleEvent::ReferenceWritten { worker, result } => self.reference_written(worker, result),
            LifecycleEvent::Warmed { worker, warmed, asked } => self.warmed(worker, &warmed, asked),
            LifecycleEvent::Refused { worker, refusal } => self.refused(worker, &refusal),
            LifecycleEvent::Misbehaved { worker, why } => self.misbehaved(worker, &why),
            LifecycleEvent::LaneEnded { worker, idle } => self.lane_ended(worker, idle),
            LifecycleEvent::Exited { worker, status, idle } => self.exited(worker, status, idle),
            LifecycleEvent::Drained(worker) => self.drained(worker),
            LifecycleEvent::FirstAnswer(_) => self.restarts.record_answer(),
            LifecycleEvent::PoisonConfirmed => self.restarts.record_poison(),
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
        self.started += 1;
        let worker = WorkerId(self.started);
        let boot_purpose = match purpose {
            StartPurpose::Reference => self.reference.unwrap_or(WorkerPurpose::Reference),
            StartPurpose::Serve | StartPurpose::Shadow | StartPurpose::Standby => WorkerPurpose::Serve,
        };
        let inside = self.partition.as_ref().ok().filter(|_| boot_purpose == WorkerPurpose::Serve);
        let partition = inside.map(|partition| partition.target());
        let role = Role::Starting { purpose, phase: Phase::Spawning, until };
        self.slots.insert(worker, Slot { share, partition, role });
        let standby = purpose == StartPurpose::Standby;
        let low_priority = standby || purpose == StartPurpose::Shadow;
        self.act(Action::Start(Launch { worker, purpose: boot_purpose, share, low_priority, standby }));
        worker
    }

    fn connected(&mut self, worker: WorkerId) {
        let until = self.now + self.settings.timeouts.warm;
        if let Some(Slot {
            role: Role::Starting { phase: phase @ Phase::Spawning, until: due, .. }, ..
        }) = self.slots.get_mut(&worker)
        {
            (*phase, *due) = (Phase::Warming, until);
            self.act(Action::Load(worker));
        }
    }

    fn becomes(&mut self, worker: WorkerId, role: Role) {
        if let Some(slot) = self.slots.get_mut(&worker) {
            slot.role = role;
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
        self.becomes(worker, Role::Exiting { reason, killed: false, until });
    }

    fn kill(&mut self, worker: WorkerId, reason: ExitReason, why: &str) {
        let until = self.stop_by();
        self.becomes(worker, Role::Exiting { reason, killed: true, until });
        self.act(Action::Kill(worker, why.to_owned()));
    }

    fn stop_by(&self) -> Timestamp {
        self.now + self.settings.timeouts.stop
    }

    fn stop(&mut self) {
        self.act(Action::Shut("the server is stopping".to_owned()));
        self.refuse_all(&ResizeRefused::Stopping);
        let workers: Vec<_> = self.slots.keys().copied().collect();
        for worker in workers {
            self.dismiss(worker, ExitReason::Unneeded);
        }
        self.stopping = true;
    }

    fn act(&mut self, action: Action) {
        self.actions.push(action);
    }

    fn role(&self, worker: WorkerId) -> Option<&Role> {
        self.slots.get(&worker).map(|slot| &slot.role)
    }

    fn find(&self, is: impl Fn(&Role) -> bool) -> Option<WorkerId> {
        self.slots.iter().find(|(_, slot)| is(&slot.role)).map(|(worker, _)| *worker)
    }

    fn serving(&self) -> Option<WorkerId> {
        self.find(|role| matches!(role, Role::Serving { .. }))
    }

    fn sms(&self, share: Percent) -> Sms {
        self.partition
            .as_ref()
            .map_or_else(|_| self.settings.sms_of(share), |partition| partition.sms_of(share))
    }

    fn fits(&self, worker: WorkerId, share: Percent) -> bool {
        let Some(slot) = self.slots.get(&worker) else { return false };
        match (slot.partition, &self.partition) {
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
