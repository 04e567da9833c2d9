//! What serves, or why nothing does: first workers, deaths, and what takes a dead worker's place.

use std::time::Duration;

use shadowslice_shared::boot::{BootRefusal, WarmUpReport, WorkerPurpose};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Percent, Timestamp};

use super::Workers;
use super::change::{Change, Failover, Outcome, Reason, ResizeRefused, WRONG_AT_A_SHARE};
use super::messages::{Action, Report, StartFailure};
use super::slot::{Aim, Drained, Leaver, Role};

/// Before a model asks again for a place on a GPU that took no worker.
const GPU_PAUSE: Duration = Duration::from_millis(200);

/// So many wrong answers at one share are no accident.
const WRONG_TWICE: u32 = 2;

#[derive(Debug)]
pub(super) enum Primary {
    /// Its role says whether the worker serves already, or still.
    Worker(WorkerId),
    BackingOff {
        until: Timestamp,
    },
    /// The standing worker still starts, and will serve. If that start fails, the next worker is
    /// started, at `back_off` at the earliest.
    AwaitingStanding {
        back_off: Timestamp,
        why: String,
    },
    /// The GPU takes no worker, and is asked again.
    Waiting {
        until: Timestamp,
        why: String,
    },
    /// Requests are refused. Without a time no worker is started until the configuration or the
    /// model's files change, or an operator or a client acts.
    Down {
        why: String,
        again: Option<Timestamp>,
    },
}

impl Primary {
    pub(super) fn due(&self) -> Option<Timestamp> {
        match self {
            Self::BackingOff { until } | Self::Waiting { until, .. } => Some(*until),
            Self::Down { again, .. } => *again,
            Self::Worker(_) | Self::AwaitingStanding { .. } => None,
        }
    }

    pub(super) fn worker(&self) -> Option<WorkerId> {
        if let Self::Worker(worker) = self { Some(*worker) } else { None }
    }
}

impl Workers {
    /// A worker that serves, or first the one that writes the reference answers.
    pub(super) fn boot(&mut self) {
        let aim = if self.reference.is_some() { Aim::Reference } else { Aim::Serve };
        let worker = self.start(aim, self.share, self.now + self.settings.timeouts.spawn);
        self.primary = Primary::Worker(worker);
    }

    pub(super) fn primary_on_time(&mut self) {
        if self.primary.due().is_some_and(|due| due <= self.now) {
            self.boot();
        }
    }

    pub(super) fn wait_is_over(&mut self) {
        if matches!(self.primary, Primary::Waiting { .. }) {
            self.boot();
        }
    }

    pub(super) fn not_started(&mut self, worker: WorkerId, failure: StartFailure) {
        let Some(slot) = self.slots.remove(&worker) else { return };
        let (aim, until) = match slot.role {
            Role::Starting { aim, until, .. } => (aim, until),
            // It was told to end before this was heard.
            Role::Leaving { leaver, .. } => return self.left(leaver, failure.why(), false),
            _ => return,
        };
        match aim {
            Aim::Reference | Aim::Serve => match failure {
                StartFailure::Passing { why, .. } => {
                    self.primary = Primary::Waiting { until: self.now + GPU_PAUSE, why };
                }
                // No death of a worker.
                StartFailure::Failed(why) | StartFailure::NoRoomToStand(why) => self.retry(why),
            },
            Aim::Shadow => self.no_shadow(failure, until),
            Aim::Stand => self.none_stands(failure),
        }
    }

    pub(super) fn reference_written(&mut self, worker: WorkerId, result: Result<(), String>) {
        if !self.role(worker).is_some_and(|role| role.starts_as(Aim::Reference)) {
            return;
        }
        match result {
            Ok(()) => {
                self.reference = None;
                self.dismiss(worker, Leaver::Unneeded);
                self.boot();
            }
            // The model is not to blame.
            Err(why) => self.dismiss(worker, Leaver::Primary { why: Some(why), since: None }),
        }
    }

    pub(super) fn warmed(&mut self, worker: WorkerId, warmed: &WarmUpReport, asked: Option<Groups>) {
        let Some(Role::Starting { aim, .. }) = self.role(worker).cloned() else { return };
        self.attach(worker, warmed, asked);
        match aim {
            Aim::Reference => {}
            Aim::Serve => {
                self.serve_with(worker);
                self.restarted();
            }
            Aim::Shadow => self.cut_over(worker),
            Aim::Stand => self.stands_ready(worker),
        }
    }

    pub(super) fn serve_with(&mut self, worker: WorkerId) {
        self.becomes(worker, Role::Serving { since: self.now });
        self.primary = Primary::Worker(worker);
        self.serves_on(worker);
        self.act(Action::Route(worker));
    }

    /// A fault that a reference worker finds in the model is final. Later a refusal may be
    /// temporary (memory was short, say), so it counts as a death.
    pub(super) fn refused(&mut self, worker: WorkerId, refusal: &BootRefusal) {
        let Some(Role::Starting { aim, .. }) = self.role(worker).cloned() else { return };
        let why = refusal.to_string();
        match aim {
            Aim::Reference | Aim::Serve => self.primary_refused(worker, refusal, why),
            Aim::Shadow => {
                let share = self.slots.get(&worker).map(|slot| slot.share);
                if let (BootRefusal::Proof { .. }, Some(share)) = (refusal, share) {
                    self.answers_wrongly(share);
                }
                self.give_up_shadow(worker, Reason::BootFailed(why.clone()), &why);
            }
            Aim::Stand => {
                let rest = self.next_pause();
                self.ends(worker, Leaver::Standing { rest, failed: true });
                self.standing.obstacle = Some(why);
            }
        }
    }

    fn primary_refused(&mut self, worker: WorkerId, refusal: &BootRefusal, why: String) {
        match refusal {
            // No death: another worker is started at once.
            BootRefusal::NoPartitions(_) => {
                self.ends(worker, Leaver::Unneeded);
                self.leave_partitions(&why);
                if !matches!(self.primary, Primary::Down { .. }) {
                    self.boot();
                }
            }
            BootRefusal::NoOperator(_)
                if self.reference == Some(WorkerPurpose::Reference) && self.settings.on_gpu =>
            {
                self.ends(worker, Leaver::Unneeded);
                self.reference = Some(WorkerPurpose::DeviceReference);
                self.boot();
            }
            BootRefusal::Proof { .. } if self.answers_wrongly(self.share) => {
                self.down(format!("{why}. {WRONG_AT_A_SHARE}"));
            }
            BootRefusal::Library(_) | BootRefusal::Setup(_) | BootRefusal::OtherForm(_) => {
                self.ends(worker, Leaver::Primary { why: Some(why), since: None })
            }
            _ if self.reference.is_none() => {
                self.ends(worker, Leaver::Primary { why: Some(why), since: None })
            }
            _ => self.down(why),
        }
    }

    /// True from the `WRONG_TWICE`th wrong answer on. With the whole GPU the share is not the
    /// cause, so nothing is counted.
    fn answers_wrongly(&mut self, share: Percent) -> bool {
        if share == Percent::WHOLE || self.partition.is_ok() {
            return false;
        }
        let times = self.wrong_at.entry(self.settings.sms_of(share)).or_default();
        *times += 1;
        *times >= WRONG_TWICE
    }

    pub(super) fn is_wrong_at(&self, share: Percent) -> bool {
        self.wrong_at.get(&self.sms(share)).is_some_and(|&times| times >= WRONG_TWICE)
    }

    /// Rare accidents must not add up because no client asks the model.
    pub(super) fn note_idle(&mut self, since: Timestamp, idle: bool) {
        if idle {
            self.restarts.idled(self.now.since(since));
        }
    }

    /// The worker that served is dead, or as good as dead.
    pub(super) fn lost(&mut self, since: Timestamp, idle: bool, why: String) {
        if self.way_back().is_some() {
            let outcome = self.take_back(Reason::Died);
            return self.finish(outcome);
        }
        self.note_idle(since, idle);
        self.died(why);
    }

    /// Whether traffic could move if the worker that serves died, at once or when another one is
    /// warm.
    pub(super) fn has_relief(&self) -> bool {
        self.way_back().is_some() || self.ready().is_some() || self.starting_to_stand().is_some()
    }

    pub(super) fn died(&mut self, why: String) {
        self.deaths += 1;
        self.last_death = Some(why.clone());
        self.retry(why);
    }

    /// The standing worker serves, or another one after a pause; if too many have failed, requests
    /// are refused until then.
    fn retry(&mut self, why: String) {
        let retry = self.restarts.failed();
        let again = self.now + retry.after;
        if let Some(failures) = retry.unready {
            let why = format!(
                "{failures} workers in a row did not start, or died before they served anything, \
                 the last with: {why}"
            );
            self.restarted += 1;
            return self.down_until(Some(again), why);
        }
        if !self.fail_over(&why) && !self.await_standing(again, &why) && !self.go_back(&why) {
            self.restart_at(again);
        }
    }

    fn restart_at(&mut self, until: Timestamp) {
        self.restarted += 1;
        self.primary = Primary::BackingOff { until };
    }

    /// At whatever share. False if none stands ready.
    fn fail_over(&mut self, why: &str) -> bool {
        let Some(worker) = self.take_standing() else { return false };
        let from = self.share;
        // Inside a worker the share is what it was.
        if let (Some(slot), Err(_)) = (self.slots.get(&worker), &self.partition) {
            self.share = slot.share;
        }
        self.act(Action::MeasureStall { outage: true });
        self.act(Action::AwaitEffect(worker, None));
        self.serve_with(worker);
        let sms = (self.sms(from), self.sms(self.share));
        let shares = (from, self.share);
        self.act(Action::Report(Report::FailedOver(Failover { worker, why: why.to_owned(), shares, sms })));
        self.restart_failed("its worker died, and the standing one serves in its place");
        true
    }

    /// At whatever share: that is sooner than a new worker. False if none starts.
    fn await_standing(&mut self, back_off: Timestamp, why: &str) -> bool {
        let Some(worker) = self.starting_to_stand() else { return false };
        // It is no spare any more, and is not called in for its memory.
        self.act(Action::Hurry(worker));
        self.act(Action::Stands(false));
        self.primary = Primary::AwaitingStanding { back_off, why: why.to_owned() };
        true
    }

    /// The awaited standing worker may have become the shadow of a hand-over, which then makes it
    /// serve.
    pub(super) fn tend_awaited(&mut self) {
        let Primary::AwaitingStanding { back_off, why } = &self.primary else { return };
        let (back_off, why) = (*back_off, why.clone());
        let comes = self.starting_to_stand().or(self.find(|role| role.starts_as(Aim::Shadow)));
        if !self.fail_over(&why) && comes.is_none() {
            self.restart_at(back_off);
        }
    }

    pub(super) fn down(&mut self, why: String) {
        self.down_until(None, why);
    }

    fn down_until(&mut self, again: Option<Timestamp>, why: String) {
        if let Some(worker) = self.primary.worker()
            && let Some(role) = self.role(worker)
        {
            match role {
                Role::Leaving { killed, until, .. } => {
                    let (killed, until) = (*killed, *until);
                    self.becomes(worker, Role::Leaving { leaver: Leaver::Unneeded, killed, until });
                }
                _ => self.dismiss(worker, Leaver::Unneeded),
            }
        }
        self.dismiss_standing(Duration::ZERO);
        self.act(Action::Shut(why.clone()));
        self.primary = Primary::Down { why: why.clone(), again };
        self.restart_failed(&why);
        let refused = ResizeRefused::NotServing { model: self.settings.model.clone(), why };
        self.repartition_failed(&refused);
    }

    /// `handover: restart`: the worker finishes what it has and leaves; requests wait meanwhile.
    pub(super) fn begin_restart(&mut self, worker: WorkerId) {
        let until = self.now + self.settings.timeouts.drain;
        self.becomes(worker, Role::Draining { then: Drained::Restart, until });
        self.act(Action::Unroute);
        self.act(Action::Drain(worker));
    }

    pub(super) fn drained(&mut self, worker: WorkerId) {
        let Some(&Role::Draining { then, .. }) = self.role(worker) else { return };
        match then {
            Drained::Park => {
                let until = self.now + self.settings.timeouts.dwell;
                self.becomes(worker, Role::Parked { until });
                self.complete();
            }
            Drained::Restart => self.dismiss(worker, Leaver::Replaced),
        }
    }

    /// The next worker gets the share that was asked for.
    pub(super) fn replace(&mut self) {
        if let Some(change) = &self.change {
            self.share = change.request().share;
        }
        self.boot();
    }

    /// No worker at the new share started: the model returns to the share at which one served.
    /// False if none had served.
    fn go_back(&mut self, why: &str) -> bool {
        let Some(&Change::Restart { request, from, served: true }) = self.change.as_ref() else {
            return false;
        };
        self.change = None;
        let (model, why) = (self.settings.model.clone(), why.to_owned());
        self.act(Action::Report(Report::Aborted(request, ResizeRefused::NoWorker { model, why })));
        self.set_share(from);
        self.restarts.reset();
        self.boot();
        true
    }

    fn restart_failed(&mut self, why: &str) {
        if let Some(&Change::Restart { request, .. }) = self.change.as_ref() {
            self.change = None;
            let (model, why) = (self.settings.model.clone(), why.to_owned());
            self.act(Action::Report(Report::Aborted(request, ResizeRefused::NotServing { model, why })));
        }
    }

    /// The shadow served and failed: the incumbent has the traffic again.
    pub(super) fn take_back(&mut self, reason: Reason) -> Outcome {
        let Some(incumbent) = self.way_back() else { return Outcome::Aborted(reason) };
        let had_completed = matches!(self.role(incumbent), Some(Role::Parked { .. }));
        if let Some(&Change::Handover { from, .. }) = self.change.as_ref() {
            self.set_share(from);
        }
        self.serve_with(incumbent);
        if had_completed { Outcome::RolledBack(reason) } else { Outcome::Aborted(reason) }
    }
}
