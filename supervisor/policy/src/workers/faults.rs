//! What follows when a worker takes too long, hangs, sends nonsense or dies.

use shadowslice_shared::ids::WorkerId;

use super::Workers;
use super::change::{Outcome, Reason};
use super::messages::Action;
use super::slot::{Aim, Drained, Leaver, Phase, Role};

impl Workers {
    pub(super) fn time_is_up(&mut self, worker: WorkerId) {
        let Some(role) = self.role(worker).cloned() else { return };
        match role {
            Role::Starting { aim, phase, .. } => self.starts_too_long(worker, aim, phase),
            Role::Draining { then: Drained::Park, .. } => self.drains_too_long(worker),
            Role::Draining { then: Drained::Restart, .. } => {
                self.act(Action::Requeue(worker));
                self.dismiss(worker, Leaver::Replaced);
            }
            Role::Parked { .. } => self.retire(worker),
            Role::Leaving { leaver, killed, .. } => self.leaves_too_long(worker, leaver, killed),
            Role::Serving { .. } | Role::Standing { .. } => {}
        }
    }

    fn starts_too_long(&mut self, worker: WorkerId, aim: Aim, phase: Phase) {
        const TOO_LONG: &str = "it took too long to boot (timeouts.spawn, timeouts.warm)";
        match (aim, phase) {
            (Aim::Reference | Aim::Serve, _) => {
                let why = Some(TOO_LONG.to_owned());
                self.kill(worker, Leaver::Primary { why, since: None }, TOO_LONG);
            }
            (Aim::Shadow, Phase::Spawning) => self.give_up_shadow(worker, Reason::SpawnTimedOut, TOO_LONG),
            (Aim::Shadow, Phase::Warming) => self.give_up_shadow(worker, Reason::WarmTimedOut, TOO_LONG),
            (Aim::Stand, _) => self.fail_standing(worker, TOO_LONG),
        }
    }

    /// A worker that was to end did not: it is killed, and after that nothing waits for it any more
    /// but the start of workers for which its memory is missing.
    fn leaves_too_long(&mut self, worker: WorkerId, leaver: Leaver, killed: bool) {
        let why = if killed {
            "it outlives its kill, probably stuck in the kernel"
        } else {
            "it did not end in time (timeouts.stop)"
        };
        match leaver {
            // What it has is served elsewhere as soon as another worker is there.
            Leaver::Primary { why: cause, .. } => {
                self.kill(worker, Leaver::Unneeded, why);
                self.act(Action::Condemn(worker));
                self.died(cause.unwrap_or_else(|| why.to_owned()));
            }
            Leaver::Handover(outcome) if killed => {
                self.kill(worker, Leaver::Unneeded, why);
                self.act(Action::Requeue(worker));
                self.finish(outcome);
            }
            leaver => self.kill(worker, leaver, why),
        }
    }

    pub(super) fn exited(&mut self, worker: WorkerId, status: String, idle: bool) {
        let Some(slot) = self.slots.remove(&worker) else { return };
        match slot.role {
            Role::Starting { aim: Aim::Reference | Aim::Serve, .. } => self.died(status),
            Role::Starting { aim: Aim::Shadow, .. } => self.finish(Outcome::Aborted(Reason::Died)),
            Role::Starting { aim: Aim::Stand, .. } | Role::Standing { .. } => {
                let rest = self.standing_failed(&slot.role);
                self.standing_gone(rest, true);
            }
            Role::Serving { since } => self.lost(since, idle, status),
            Role::Draining { then: Drained::Park, .. } => {
                self.act(Action::Requeue(worker));
                self.complete();
                self.finish(Outcome::Kept);
            }
            Role::Draining { then: Drained::Restart, .. } => self.replace(),
            Role::Parked { .. } => self.finish(Outcome::Kept),
            Role::Leaving { leaver, .. } => self.left(leaver, status, idle),
        }
    }

    pub(super) fn left(&mut self, leaver: Leaver, status: String, idle: bool) {
        match leaver {
            Leaver::Primary { why, since } => {
                if let Some(since) = since {
                    self.note_idle(since, idle);
                }
                self.died(why.unwrap_or(status));
            }
            Leaver::Replaced => self.replace(),
            Leaver::Handover(outcome) => self.finish(outcome),
            Leaver::Standing { rest, failed } => self.standing_gone(rest, failed),
            Leaver::Unneeded => {}
        }
    }

    /// Another worker that can serve in its place does so without a wait for the exit. A worker
    /// that stood ready no longer counts as ready.
    pub(super) fn lane_ended(&mut self, worker: WorkerId, idle: bool) {
        match self.role(worker).cloned() {
            Some(Role::Serving { since }) => {
                if self.has_relief() {
                    self.ends(worker, Leaver::Unneeded);
                    self.lost(since, idle, "its socket ended".to_owned());
                } else {
                    self.note_idle(since, idle);
                    self.ends(worker, Leaver::Primary { why: None, since: None });
                }
            }
            Some(Role::Draining { then, .. }) => {
                self.act(Action::Requeue(worker));
                let leaver = self.cannot_drain(then);
                self.ends(worker, leaver);
            }
            Some(Role::Parked { .. }) => {
                self.ends(worker, Leaver::Unneeded);
                self.finish(Outcome::Kept);
            }
            Some(role @ Role::Standing { .. }) => {
                let rest = self.standing_failed(&role);
                self.dismiss(worker, Leaver::Standing { rest, failed: true });
            }
            _ => {}
        }
    }

    /// A worker that should have drained is as good as dead: what follows at its exit.
    fn cannot_drain(&mut self, then: Drained) -> Leaver {
        match then {
            Drained::Park => {
                self.complete();
                Leaver::Handover(Outcome::Kept)
            }
            Drained::Restart => Leaver::Replaced,
        }
    }

    /// The worker is killed; if another worker can serve in its place, that begins before it is
    /// dead.
    pub(super) fn misbehaved(&mut self, worker: WorkerId, why: &str) {
        let primary = |since| Leaver::Primary { why: Some(why.to_owned()), since };
        match self.role(worker).cloned() {
            Some(Role::Starting { aim: Aim::Shadow, .. }) => {
                self.give_up_shadow(worker, Reason::Misbehaved, why);
            }
            Some(Role::Starting { aim: Aim::Stand, .. } | Role::Standing { .. }) => {
                self.fail_standing(worker, why);
            }
            Some(Role::Starting { aim: Aim::Reference | Aim::Serve, .. }) => {
                self.kill(worker, primary(None), why);
            }
            Some(Role::Serving { .. }) if self.way_back().is_some() => {
                self.act(Action::Condemn(worker));
                let outcome = self.take_back(Reason::Misbehaved);
                self.kill(worker, Leaver::Handover(outcome), why);
            }
            Some(Role::Serving { .. }) if self.has_relief() => {
                self.act(Action::Condemn(worker));
                self.kill(worker, Leaver::Unneeded, why);
                self.died(why.to_owned());
            }
            Some(Role::Serving { since }) => self.kill(worker, primary(Some(since)), why),
            // It must not get the traffic back.
            Some(Role::Draining { then, .. }) => {
                self.act(Action::Condemn(worker));
                let leaver = self.cannot_drain(then);
                self.kill(worker, leaver, why);
            }
            Some(Role::Parked { .. }) => self.kill(worker, Leaver::Handover(Outcome::Kept), why),
            Some(Role::Leaving { leaver, .. }) => self.kill(worker, leaver, why),
            None => {}
        }
    }
}
