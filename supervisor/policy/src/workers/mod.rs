//! The workers of one model: which there are, which one has the traffic, and what follows from all
//! that happens to them.
//!
//! ```text
//!              ┌─ reference ─▶ leaves
//!              │
//!   starting ──┼─ serve ───▶ Serving ◀──── the shadow fails ───┐
//!              │               │  ▲                            │
//!              │   cut-over:   │  └────────┐                   │
//!              ├─ shadow ──────┼▶ Serving  │ a death,          │
//!              │               └▶ Draining ┼──────▶ Parked ────┤
//!              │                           │ or a change       │
//!              └─ stand ──────▶ Standing ──┘                   └─▶ leaves
//! ```
//!
//! Every worker has one [`Slot`], whose role says what it is for and until when. Nothing else says
//! so: a hand-over is in the phase that the roles of its two workers show. Beside the slots stand
//! what serves or why nothing does ([`Primary`]), the one change of share that is under way, and the
//! request behind it.
//!
//! The machine is pure. Its driver tells it [`Fact`]s and the time, and carries out the
//! [`Action`]s, in the order given, before it tells the next fact; what an action brings about at
//! once is told before all else. What the driver owes the machine besides: an exit is told once for
//! each worker, after all else that this worker said. Other facts may come late, twice or not at
//! all: a fact that a worker's role has no use for changes nothing, and every role but those of
//! workers that serve or stand ready ends by itself.

mod change;
mod faults;
mod handover;
mod messages;
mod partition;
mod primary;
mod resize;
mod slot;
mod standing;
mod view;

use std::collections::BTreeMap;

use shadowslice_shared::boot::WorkerPurpose;
use shadowslice_shared::groups::{Division, Groups};
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::profile::Execution;
use shadowslice_shared::units::{Percent, Sms, Timestamp};

use crate::restart::Restarts;
use change::Change;
use partition::Partition;
use primary::Primary;
use slot::{Aim, Leaver, Phase, Role, Slot};
use standing::Standing;

pub use change::{ChangeReport, Failover, Means, Reason, ResizeRefused};
pub use messages::{
    Action, Cause, Fact, HandoverMode, Launch, Report, ResizeRequest, Settings, StartFailure, Timeouts,
};
pub use view::{HandoverPhase, State};

#[derive(Debug)]
pub struct Workers {
    settings: Settings,
    now: Timestamp,
    slots: BTreeMap<WorkerId, Slot>,
    /// The last one's name.
    started: u64,
    primary: Primary,
    /// The share in force; a restart gets it, too.
    share: Percent,
    /// An error says why the share is no partition inside the worker.
    partition: Result<Partition, String>,
    change: Option<Change>,
    /// Came while the last hand-over was in its probation, or its incumbent left.
    next: Option<ResizeRequest>,
    standing: Standing,
    restarts: Restarts,
    /// `None` once the reference answers are written.
    reference: Option<WorkerPurpose>,
    /// How often workers with so many SMs answered wrongly.
    wrong_at: BTreeMap<Sms, u32>,
    /// How long batches take on each number of SMs, as the last worker measured it.
    execution: Option<Execution>,
    held: bool,
    stopping: bool,
    /// Of workers that served or were to serve; `restarted` counts the starts in their place.
    deaths: u64,
    last_death: Option<String>,
    restarted: u64,
    actions: Vec<Action>,
}

impl Workers {
    /// `division`: how the GPU divides, or why the share may not be a partition inside the worker.
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
            standing: Standing::new(),
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

    /// With a fault in its configuration, the model stays down.
    pub fn begin(&mut self, fault: Option<String>, now: Timestamp) -> Vec<Action> {
        self.now = now;
        match fault {
            Some(why) => self.down(why),
            None => self.boot(),
        }
        std::mem::take(&mut self.actions)
    }

    pub fn on(&mut self, fact: Fact, now: Timestamp) -> Vec<Action> {
        self.now = now;
        match fact {
            Fact::NotStarted { worker, .. } | Fact::Exited { worker, .. } if self.stopping => {
                self.slots.remove(&worker);
            }
            Fact::Resize { request, .. } if self.stopping => self.refuse(request, ResizeRefused::Stopping),
            _ if self.stopping => {}
            fact => {
                self.hear(fact);
                self.settle();
            }
        }
        std::mem::take(&mut self.actions)
    }

    /// When something is to be done that no fact brings about.
    pub fn due(&self) -> Option<Timestamp> {
        let workers = self.slots.values().filter_map(|slot| slot.role.until());
        if self.stopping {
            return workers.min();
        }
        let others = [self.primary.due(), self.retry_due(), self.partition_due(), self.standing_due()];
        workers.chain(others.into_iter().flatten()).min()
    }

    /// Before [`Workers::due`] a timer is an old one and changes nothing.
    pub fn on_time(&mut self, now: Timestamp) -> Vec<Action> {
        self.now = now;
        let late = |slot: &Slot| slot.role.until().is_some_and(|until| until <= now);
        let late: Vec<_> =
            self.slots.iter().filter_map(|(worker, slot)| late(slot).then_some(*worker)).collect();
        for worker in late {
            self.time_is_up(worker);
        }
        if !self.stopping {
            self.primary_on_time();
            self.retry_on_time();
            self.partition_on_time();
            self.settle();
        }
        std::mem::take(&mut self.actions)
    }

    /// As the workers were told to.
    pub fn have_ended(&self) -> bool {
        self.stopping && self.slots.is_empty()
    }

    /// For an operator; true if that is news.
    pub fn hold(&mut self, held: bool) -> bool {
        std::mem::replace(&mut self.held, held) != held
    }

    fn hear(&mut self, fact: Fact) {
        match fact {
            Fact::Resize { request, hold } => self.resize(request, hold),
            Fact::Configured(settings) => {
                self.settings = settings;
                // Of the share that is to come, if a change inside the worker is under way.
                self.ask_groups(self.share_inside());
            }
            Fact::Stop => self.stop(),
            Fact::NotStarted { worker, failure } => self.not_started(worker, failure),
            Fact::Connected(worker) => self.connected(worker),
            Fact::ReferenceWritten { worker, result } => self.reference_written(worker, result),
            Fact::Warmed { worker, warmed, asked } => self.warmed(worker, &warmed, asked),
            Fact::Refused { worker, refusal } => self.refused(worker, &refusal),
            Fact::Misbehaved { worker, why } => self.misbehaved(worker, &why),
            Fact::LaneEnded { worker, idle } => self.lane_ended(worker, idle),
            Fact::Exited { worker, status, idle } => self.exited(worker, status, idle),
            Fact::Drained(worker) => self.drained(worker),
            Fact::FirstAnswer(_) => self.restarts.served(),
            Fact::PoisonConfirmed => self.restarts.poisonous(),
            Fact::Prepared { worker, prepared } => self.prepared(worker, prepared),
            Fact::Groups(groups) => self.groups_are(groups),
            Fact::WaitIsOver => self.wait_is_over(),
            Fact::MustNotStand(why) => self.must_not_stand(why),
        }
    }

    /// What does not follow from one fact alone: the request behind a change that has ended, the
    /// service of a standing worker that is awaited, a worker at the share in force, another one
    /// that stands there, and batches on the groups that the model has.
    fn settle(&mut self) {
        if self.stopping {
            return;
        }
        self.resize_next();
        self.tend_awaited();
        self.tend_share();
        self.tend_standing();
        self.tend_partition();
    }

    fn start(&mut self, aim: Aim, share: Percent, until: Timestamp) -> WorkerId {
        self.started += 1;
        let worker = WorkerId(self.started);
        let purpose = match aim {
            Aim::Reference => self.reference.unwrap_or(WorkerPurpose::Reference),
            Aim::Serve | Aim::Shadow | Aim::Stand => WorkerPurpose::Serve,
        };
        let inside = self.partition.as_ref().ok().filter(|_| purpose == WorkerPurpose::Serve);
        let partition = inside.map(|partition| partition.target());
        let role = Role::Starting { aim, phase: Phase::Spawning, until };
        self.slots.insert(worker, Slot { share, partition, role });
        let (spare, stands) = (matches!(aim, Aim::Shadow | Aim::Stand), aim == Aim::Stand);
        self.act(Action::Start(Launch { worker, purpose, share, spare, stands }));
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

    fn dismiss(&mut self, worker: WorkerId, leaver: Leaver) {
        self.ends(worker, leaver);
        self.act(Action::Stop(worker));
    }

    /// The worker ends by itself, or has been told to; it is killed if it does not.
    fn ends(&mut self, worker: WorkerId, leaver: Leaver) {
        let until = self.stop_by();
        self.becomes(worker, Role::Leaving { leaver, killed: false, until });
    }

    fn kill(&mut self, worker: WorkerId, leaver: Leaver, why: &str) {
        let until = self.stop_by();
        self.becomes(worker, Role::Leaving { leaver, killed: true, until });
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
            self.dismiss(worker, Leaver::Unneeded);
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
