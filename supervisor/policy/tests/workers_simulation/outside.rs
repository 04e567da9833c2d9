//! Events from outside the state machine, such as orders and faults. They end before the last part of a
//! run.

use shadowslice_policy::workers::{
    Cause, HandoverMode, LifecycleEvent, ResizeRequest, Settings, WorkersState,
};
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Percent;

use crate::process::{Process, ProcessStep};
use crate::random::Random;
use crate::rules::Violation;
use crate::script::{ExternalEvent, MS, Pick, share_within};
use crate::world::{World, WorldEvent};

impl World {
    /// Applies an external event.
    pub(crate) fn happens(&mut self, happening: ExternalEvent) -> Result<(), Violation> {
        match happening {
            ExternalEvent::Resize => self.resize(None),
            ExternalEvent::Configure => {
                let settings = configured(&self.script.settings, &mut self.random);
                self.script.settings = settings.clone();
                if self.random.percent(30) {
                    let soon = self.random.within(200 * MS);
                    self.schedule(soon, WorldEvent::External(ExternalEvent::Resize));
                }
                self.tell(LifecycleEvent::Configured(settings))
            }
            ExternalEvent::Hold(held) => {
                let news = self.workers.hold(held);
                self.rules.hold(held, news)
            }
            ExternalEvent::StandbyRevoked => self.tell(LifecycleEvent::StandbyRevoked("scripted".to_owned())),
            ExternalEvent::GroupsMove => match self.ledger.as_mut() {
                Some(ledger) => {
                    let groups = ledger.move_away(&mut self.random);
                    self.tell(LifecycleEvent::Groups(groups))
                }
                None => Ok(()),
            },
            ExternalEvent::StrayTimer => self.timer(),
            ExternalEvent::Poison => self.tell(LifecycleEvent::PoisonConfirmed),
            ExternalEvent::Death(pick) => {
                if let Some(worker) = self.victim(pick) {
                    self.die(worker);
                }
                Ok(())
            }
            ExternalEvent::Misbehaviour(pick) => {
                if let Some(worker) = self.victim(pick) {
                    if self.random.percent(5) {
                        let shortly = self.random.within(50 * MS);
                        self.schedule(shortly, WorldEvent::External(ExternalEvent::Stop));
                    }
                    self.misbehave(worker);
                }
                Ok(())
            }
            ExternalEvent::Sleep => match self.routed {
                Some(worker) => self.tell(LifecycleEvent::Sleep(worker)),
                None => Ok(()),
            },
            ExternalEvent::Wake => self.tell(LifecycleEvent::Wake),
            ExternalEvent::Stop => {
                self.stopped = true;
                self.tell(LifecycleEvent::Stop)
            }
        }
    }

    fn victim(&mut self, pick: Pick) -> Option<WorkerId> {
        let routed = self.routed;
        let alive = self.processes.iter().filter(|(_, process)| process.alive).map(|(worker, _)| *worker);
        let among: Vec<_> = match pick {
            Pick::Routed => alive.filter(|worker| routed == Some(*worker)).collect(),
            Pick::Other => alive.filter(|worker| routed != Some(*worker)).collect(),
        };
        (!among.is_empty()).then(|| self.random.pick(&among))
    }

    /// Requests the given share, or a random share if `share` is `None`.
    fn resize(&mut self, share: Option<Percent>) -> Result<(), Violation> {
        self.number += 1;
        let any = Percent::new(1 + u32::try_from(self.random.below(100)).expect("it is below 100"));
        let cause =
            if share.is_some() { Cause::Hand } else { self.random.pick(&[Cause::Hand, Cause::Policy]) };
        let now = self.workers.share();
        let alive = self.processes.values().filter(|process| process.alive && process.launch.share != now);
        let alive: Vec<Percent> = alive.map(|process| process.launch.share).collect();
        let share = match share {
            Some(share) => share,
            // The request is for the share of an existing worker, for example of a standby that is
            // still starting.
            None if self.random.percent(60) && !alive.is_empty() => self.random.pick(&alive),
            None if self.random.percent(90) => {
                share_within(&self.script.settings, self.script.few_shares, &mut self.random)
            }
            None => any.expect("1 to 100"),
        };
        let request = ResizeRequest { number: Some(self.number), share, cause, decided: self.now };
        let hold = cause == Cause::Hand && self.random.percent(15);
        self.tell(LifecycleEvent::Resize { request, hold })
    }

    /// Ends the part of the run in which faults and orders occur.
    pub(crate) fn calms_down(&mut self) -> Result<(), Violation> {
        let killed = |process: &Process| process.alive && process.killed && process.fate.immortal;
        let immortal: Vec<_> =
            self.processes.iter().filter(|(_, process)| killed(process)).map(|(worker, _)| *worker).collect();
        for worker in immortal {
            self.schedule(MS, WorldEvent::Process(worker, ProcessStep::Ends));
        }
        if self.stopped {
            return Ok(());
        }
        if self.is_silent() {
            // The settings no longer have a standby, because all starts of standbys would fail.
            self.script.settings.standby = false;
            return self.tell(LifecycleEvent::Configured(self.script.settings.clone()));
        }
        self.tell(LifecycleEvent::Wake)?;
        let down = matches!(self.workers.state(), WorkersState::Down { .. });
        if down && self.random.percent(60) { self.resize(Some(self.workers.share())) } else { Ok(()) }
    }
}

/// Returns changed settings that do not require other workers.
fn configured(settings: &Settings, random: &mut Random) -> Settings {
    let mut other = settings.clone();
    match random.below(3) {
        0 => other.standby = !other.standby,
        1 => {
            other.min = Percent::new(random.pick(&[1, 10, 30])).expect("1 to 100");
            other.max = Percent::new(random.pick(&[50, 100])).expect("1 to 100");
        }
        _ if other.handover.may_be_in_process() => {
            other.handover = random.pick(&[HandoverMode::Auto, HandoverMode::InProcess]);
        }
        _ => {
            other.handover = random.pick(&[HandoverMode::Shadow, HandoverMode::Never]);
        }
    }
    other
}
