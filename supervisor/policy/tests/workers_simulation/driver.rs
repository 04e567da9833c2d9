//! What the driver does, and what comes from outside.

use shadowslice_policy::workers::{
    Action, Cause, Fact, HandoverMode, Launch, ResizeRequest, Settings, State,
};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Percent;

use crate::fate::Fate;
use crate::process::{Next, Process};
use crate::random::Random;
use crate::rules::Broken;
use crate::script::{Happening, MS, Pick, share_within};
use crate::world::{Event, World};

impl World {
    /// Carries out an action. What it brings about at once is queued.
    pub(crate) fn carry_out(&mut self, action: Action) {
        match action {
            Action::Start(launch) => self.start(launch),
            Action::Load(worker) => {
                let warm = self.process(worker).fate.warm;
                self.schedule(warm, Event::Process(worker, Next::Warm));
            }
            Action::Route(worker) => {
                self.routed = Some(worker);
                self.process(worker).drains += 1;
                if self.random.percent(60) {
                    let after = self.random.within(200 * MS);
                    self.schedule(after, Event::Process(worker, Next::Answers));
                }
            }
            Action::Unroute => self.routed = None,
            Action::Drain(worker) => {
                let process = self.process(worker);
                process.drains += 1;
                let (drain, drains) = (process.fate.drain, process.drains);
                self.schedule(drain, Event::Process(worker, Next::Drained(drains)));
            }
            Action::Stop(worker) => {
                let heard = !self.is_silent() && !self.process(worker).fate.deaf;
                self.ends_soon(worker, heard);
            }
            Action::Kill(worker, _) => {
                let dies = !self.process(worker).fate.immortal || self.calm;
                self.process(worker).killed = true;
                self.ends_soon(worker, dies);
            }
            Action::Prepare(worker, groups) => {
                let silent = self.is_troubled() && self.random.percent(self.script.odds.no_answer);
                if !silent {
                    let after = self.random.within(500 * MS);
                    self.schedule(after, Event::Process(worker, Next::Prepared(groups, false)));
                }
            }
            Action::AskGroups { count, cannot } => {
                let silent = self.is_silent();
                let groups = self.ledger.as_mut().map(|ledger| ledger.ask(count, cannot, &mut self.random));
                self.at_once.extend(groups.filter(|_| !silent).map(Fact::Groups));
            }
            Action::Move { worker, slice, .. } => {
                let fails = slice.groups != Groups::WHOLE && self.is_troubled();
                if fails && self.random.percent(self.script.odds.no_answer) {
                    let after = self.random.within(500 * MS);
                    self.schedule(after, Event::Process(worker, Next::Prepared(slice.groups, true)));
                }
            }
            Action::Keep(_) => {
                let none = !self.calm && self.random.percent(self.script.odds.no_room);
                self.at_once.extend(none.then(|| Fact::MustNotStand("scripted".to_owned())));
            }
            Action::Attach { worker, .. } => self.process(worker).attached = true,
            Action::Shut(_) | Action::Requeue(_) | Action::Condemn(_) => {}
            Action::Hurry(_) | Action::Forget(..) | Action::Stands(_) | Action::NeedsShadows => {}
            Action::MeasureStall { .. } | Action::AwaitEffect(..) | Action::Report(_) => {}
        }
    }

    fn start(&mut self, launch: Launch) {
        let (worker, troubled) = (launch.worker, self.is_troubled());
        let serves = launch.purpose == shadowslice_shared::boot::Purpose::Serve;
        let partitioned = serves && self.workers.partition().is_some();
        let asked = self.ledger.as_ref().filter(|_| partitioned).map(|ledger| ledger.now());
        let fate = Fate::draw(&self.script, &launch, partitioned, troubled, &mut self.random);
        let failure = fate.not_started.clone();
        let (alive, spawn) = (failure.is_none(), fate.spawn);
        let process = Process {
            launch,
            fate,
            asked,
            alive,
            mute: false,
            attached: false,
            killed: false,
            exit_told: !alive,
            drains: 0,
        };
        self.processes.insert(worker, process);
        if launch.stands && self.random.percent(15) {
            let warm = self.script.settings.timeouts.warm;
            for soon in [spawn, spawn + warm / 2, spawn + warm] {
                let soon = self.random.within(soon);
                self.schedule(soon, Event::Happens(Happening::Resize));
            }
        }
        match failure {
            Some(failure) if !self.is_silent() => {
                self.at_once.push_back(Fact::NotStarted { worker, failure });
            }
            _ => self.schedule(spawn, Event::Process(worker, Next::Hello)),
        }
    }

    /// A worker is told to end, or killed; `obeys` if it does.
    fn ends_soon(&mut self, worker: WorkerId, obeys: bool) {
        let process = self.process(worker);
        let exit = process.fate.exit;
        if !process.alive && !process.exit_told {
            // The exit is told again if it was not heard, as in a silent world.
            let fact = Fact::Exited { worker, status: "exit status: 1".to_owned(), idle: false };
            self.schedule(exit, Event::Told(worker, fact));
        } else if obeys {
            self.schedule(exit, Event::Process(worker, Next::Ends));
        }
    }

    /// Something comes from outside.
    pub(crate) fn happens(&mut self, happening: Happening) -> Result<(), Broken> {
        match happening {
            Happening::Resize => self.resize(None),
            Happening::Configure => {
                let settings = configured(&self.script.settings, &mut self.random);
                self.script.settings = settings.clone();
                self.tell(Fact::Configured(settings))
            }
            Happening::Hold(held) => {
                let news = self.workers.hold(held);
                self.rules.hold(held, news)
            }
            Happening::MustNotStand => self.tell(Fact::MustNotStand("scripted".to_owned())),
            Happening::GroupsMove => match self.ledger.as_mut() {
                Some(ledger) => {
                    let groups = ledger.move_away(&mut self.random);
                    self.tell(Fact::Groups(groups))
                }
                None => Ok(()),
            },
            Happening::StrayTimer => self.timer(),
            Happening::Poison => self.tell(Fact::PoisonConfirmed),
            Happening::Death(pick) => {
                if let Some(worker) = self.victim(pick) {
                    self.die(worker);
                }
                Ok(())
            }
            Happening::Misbehaviour(pick) => {
                if let Some(worker) = self.victim(pick) {
                    if self.random.percent(5) {
                        let shortly = self.random.within(50 * MS);
                        self.schedule(shortly, Event::Happens(Happening::Stop));
                    }
                    self.misbehave(worker);
                }
                Ok(())
            }
            Happening::Stop => {
                self.stopped = true;
                self.tell(Fact::Stop)
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

    /// Asks for a share, this one if it is given.
    fn resize(&mut self, share: Option<Percent>) -> Result<(), Broken> {
        self.number += 1;
        let any = Percent::new(1 + u32::try_from(self.random.below(100)).expect("it is below 100"));
        let cause =
            if share.is_some() { Cause::Hand } else { self.random.pick(&[Cause::Hand, Cause::Policy]) };
        let now = self.workers.share();
        let alive = self.processes.values().filter(|process| process.alive && process.launch.share != now);
        let alive: Vec<Percent> = alive.map(|process| process.launch.share).collect();
        let share = match share {
            Some(share) => share,
            // That of a worker that is there, which may stand ready or start.
            None if self.random.percent(60) && !alive.is_empty() => self.random.pick(&alive),
            None if self.random.percent(90) => {
                share_within(&self.script.settings, self.script.few_shares, &mut self.random)
            }
            None => any.expect("1 to 100"),
        };
        let request =
            ResizeRequest { number: Some(self.number), share, cause, onset: None, decided: self.now };
        let hold = cause == Cause::Hand && self.random.percent(15);
        self.tell(Fact::Resize { request, hold })
    }

    /// The time of faults and orders is over.
    pub(crate) fn calms_down(&mut self) -> Result<(), Broken> {
        let killed = |process: &Process| process.alive && process.killed && process.fate.immortal;
        let immortal: Vec<_> =
            self.processes.iter().filter(|(_, process)| killed(process)).map(|(worker, _)| *worker).collect();
        for worker in immortal {
            self.schedule(MS, Event::Process(worker, Next::Ends));
        }
        if self.stopped {
            return Ok(());
        }
        if self.is_silent() {
            // Starts of standing workers would fail for ever.
            self.script.settings.standby = false;
            return self.tell(Fact::Configured(self.script.settings.clone()));
        }
        let down = matches!(self.workers.state(), State::Down(_));
        if down && self.random.percent(60) { self.resize(Some(self.workers.share())) } else { Ok(()) }
    }
}

/// Another configuration, for which the same workers will do.
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
            other.handover = random.pick(&[HandoverMode::Shadow, HandoverMode::Restart, HandoverMode::Never]);
        }
    }
    other
}
