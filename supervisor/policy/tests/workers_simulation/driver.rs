//! The driver of the simulation, which applies the actions of the state machine.

use shadowslice_policy::workers::{Action, Launch, LifecycleEvent};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::ids::WorkerId;

use crate::fate::Fate;
use crate::process::{Process, ProcessStep};
use crate::script::{ExternalEvent, MS};
use crate::world::{World, WorldEvent};

impl World {
    /// Applies an action, and queues the events that it immediately causes.
    pub(crate) fn carry_out(&mut self, action: Action) {
        match action {
            Action::Start(launch) => self.start(launch),
            Action::Load(worker) => {
                let warm = self.process(worker).fate.warm;
                self.schedule(warm, WorldEvent::Process(worker, ProcessStep::Warm));
            }
            Action::Route(worker) => {
                self.routed = Some(worker);
                self.process(worker).drains += 1;
                if self.random.percent(60) {
                    let after = self.random.within(200 * MS);
                    self.schedule(after, WorldEvent::Process(worker, ProcessStep::Answers));
                }
            }
            Action::Drain(worker) => {
                let process = self.process(worker);
                process.drains += 1;
                let (drain, drains) = (process.fate.drain, process.drains);
                self.schedule(drain, WorldEvent::Process(worker, ProcessStep::Drained(drains)));
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
                    self.schedule(after, WorldEvent::Process(worker, ProcessStep::Prepared(groups, false)));
                }
            }
            Action::AskGroups { count, cannot } => {
                let silent = self.is_silent();
                let groups = self.ledger.as_mut().map(|ledger| ledger.ask(count, cannot, &mut self.random));
                self.at_once.extend(groups.filter(|_| !silent).map(LifecycleEvent::Groups));
            }
            Action::Move { worker, slice, .. } => {
                let fails = slice.groups != Groups::WHOLE && self.is_troubled();
                if fails && self.random.percent(self.script.odds.no_answer) {
                    let after = self.random.within(500 * MS);
                    self.schedule(
                        after,
                        WorldEvent::Process(worker, ProcessStep::Prepared(slice.groups, true)),
                    );
                }
            }
            Action::Keep(_) => {
                let none = !self.calm && self.random.percent(self.script.odds.no_room);
                self.at_once.extend(none.then(|| LifecycleEvent::StandbyRevoked("scripted".to_owned())));
            }
            Action::Attach { worker, .. } => self.process(worker).attached = true,
            Action::Shut(_) | Action::Requeue(_) | Action::Condemn(_) | Action::StayAwake(_) => {}
            Action::Hurry(_) | Action::Forget(..) | Action::StandbyExists(_) | Action::NeedsShadows => {}
            Action::MeasureStall { .. } | Action::AwaitEffect(..) | Action::Report(_) => {}
        }
    }

    fn start(&mut self, launch: Launch) {
        let (worker, troubled) = (launch.worker, self.is_troubled());
        let serves = launch.purpose == shadowslice_shared::boot::WorkerPurpose::Serve;
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
        if launch.standby && self.random.percent(15) {
            let warm = self.script.settings.timeouts.warm;
            for soon in [spawn, spawn + warm / 2, spawn + warm] {
                let soon = self.random.within(soon);
                self.schedule(soon, WorldEvent::External(ExternalEvent::Resize));
            }
        }
        match failure {
            Some(failure) if !self.is_silent() => {
                self.at_once.push_back(LifecycleEvent::NotStarted { worker, failure });
            }
            _ => self.schedule(spawn, WorldEvent::Process(worker, ProcessStep::Hello)),
        }
    }

    /// Schedules the end of a worker after an order or a kill, if `obeys` is true.
    fn ends_soon(&mut self, worker: WorkerId, obeys: bool) {
        let process = self.process(worker);
        let exit = process.fate.exit;
        if !process.alive && !process.exit_told {
            // The exit event may have been lost, because a run with `Afterwards::FallsSilent` drops
            // most events at its end. The event is therefore repeated.
            let fact = LifecycleEvent::Exited { worker, status: "exit status: 1".to_owned(), idle: false };
            self.schedule(exit, WorldEvent::News(worker, fact));
        } else if obeys {
            self.schedule(exit, WorldEvent::Process(worker, ProcessStep::Ends));
        }
    }
}
