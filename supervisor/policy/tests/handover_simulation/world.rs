//! Two workers, a driver and a controller around the machine, on a virtual clock.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use shadowslice_policy::handover::{Action, Fact, Handover, Outcome, Side, Start};
use shadowslice_shared::units::Moment;

use crate::random::Random;
use crate::rules::{Broken, Cause, Rules};
use crate::script::{Beginning, Happening, Script, StartUp};

/// How a run went.
pub(crate) struct Ending {
    pub(crate) outcome: Outcome,
    pub(crate) given_up: bool,
    pub(crate) released: bool,
}

/// A run that broke a rule.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) at: Moment,
    pub(crate) rule: Broken,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "after {:?}, this does not hold: {}", self.at.since_origin(), self.rule)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    Starting,
    Serving,
    Gone,
}

/// A side's latest process.
#[derive(Debug)]
struct Process {
    life: Life,
    generation: u32,
    /// Its exit was told.
    exit_told: bool,
}

enum Event {
    /// News reaches the machine.
    Told(Fact),
    /// A process says something, if it still lives.
    Says(Side, u32, Fact),
    /// A process ends, if it still lives.
    Ends(Side, u32),
    /// The controller's replacement is up, if it still lives.
    Up(Side, u32),
    Happens(Happening),
    Timer,
}

struct World {
    script: Script,
    random: Random,
    handover: Handover,
    rules: Rules,
    processes: [Process; 2],
    now: Moment,
    /// What is to come, by time; the number makes keys unique and keeps the order of equals.
    events: BTreeMap<(Moment, u64), Event>,
    scheduled: u64,
    timer_set_for: Option<Moment>,
    verbose: bool,
}

/// Runs one seed to its end.
pub(crate) fn simulate(seed: u64, verbose: bool) -> Result<Ending, Failure> {
    let mut random = Random::new(seed);
    let script = Script::draw(seed, &mut random);
    if verbose {
        println!("{script:#?}");
    }
    let start = Moment::after_origin(script.shadow.behind());
    let (handover, actions) = begin(&script, start);
    let rules = Rules::new(script.timeouts, script.incumbent_alive, script.shadow);
    let shadow = match script.shadow {
        Beginning::Nothing => Life::Gone,
        Beginning::Spawning { .. } | Beginning::Warming { .. } => Life::Starting,
        Beginning::Standing => Life::Serving,
    };
    let incumbent = if script.incumbent_alive { Life::Serving } else { Life::Gone };
    let process = |life| Process { life, generation: 0, exit_told: life == Life::Gone };
    let mut world = World {
        random,
        handover,
        rules,
        processes: [process(incumbent), process(shadow)],
        now: start,
        events: BTreeMap::new(),
        scheduled: 0,
        timer_set_for: None,
        verbose,
        script,
    };
    world.run(actions).map_err(|rule| Failure { at: world.now, rule })
}

fn begin(script: &Script, now: Moment) -> (Handover, Vec<Action>) {
    let (timeouts, alive) = (script.timeouts, script.incumbent_alive);
    let started = |start| (Handover::begin_started(start, alive, timeouts), Vec::new());
    let from_origin = |span| Moment::default() + span;
    match script.shadow {
        Beginning::Nothing => Handover::begin(now, alive, timeouts),
        Beginning::Spawning { .. } => started(Start::Spawning { until: from_origin(timeouts.spawn) }),
        Beginning::Warming { .. } => started(Start::Warming { until: from_origin(timeouts.warm) }),
        Beginning::Standing => Handover::begin_standing(now, timeouts),
    }
}

fn scripted_failure() -> Fact {
    Fact::BootFailed("scripted".to_owned())
}

impl World {
    fn run(&mut self, first: Vec<Action>) -> Result<Ending, Broken> {
        for (when, happening) in std::mem::take(&mut self.script.happenings) {
            self.schedule(when, Event::Happens(happening));
        }
        if !self.script.incumbent_alive {
            self.restart(Side::Incumbent);
        }
        match self.script.shadow {
            Beginning::Spawning { behind } => self.says_hello(self.script.spawn - behind),
            Beginning::Warming { behind } => self.becomes_warm(self.script.warm - behind),
            Beginning::Nothing | Beginning::Standing => {}
        }
        self.perform(&Cause::Begin, first)?;
        let bound = Moment::default() + self.script.bound();
        let mut ended = None;
        while let Some(((at, _), event)) = self.events.pop_first() {
            self.now = at;
            self.handle(event)?;
            if self.script.faultless {
                self.somebody_serves()?;
            }
            if self.rules.outcome().is_some() {
                ended.get_or_insert(at);
            } else if at > bound {
                break;
            }
        }
        let outcome = self.rules.end(self.script.faultless, ended.unwrap_or(self.now), bound)?;
        Ok(Ending {
            outcome: outcome.clone(),
            given_up: self.rules.given_up(),
            released: self.rules.released(),
        })
    }

    /// Without faults there is at every moment a side that is routed, alive and ready.
    fn somebody_serves(&self) -> Result<(), Broken> {
        let routed = self.rules.routed();
        let serves = self.process(routed).life == Life::Serving && self.rules.lets_serve(routed);
        if serves { Ok(()) } else { Err("without faults somebody serves throughout".to_owned()) }
    }

    fn handle(&mut self, event: Event) -> Result<(), Broken> {
        match event {
            Event::Told(fact) => self.tell(fact)?,
            Event::Says(side, generation, fact) if self.lives(side, generation) => self.say(side, fact),
            Event::Ends(side, generation) if self.lives(side, generation) => self.die(side),
            Event::Up(side, generation) if self.lives(side, generation) => {
                self.process_mut(side).life = Life::Serving;
                // The controller routes to the worker from now on, and says so at once.
                if side == Side::Incumbent {
                    self.tell(Fact::IncumbentServes)?;
                }
            }
            Event::Says(..) | Event::Ends(..) | Event::Up(..) => {}
            Event::Happens(Happening::Death(side)) if self.process(side).life != Life::Gone => self.die(side),
            Event::Happens(Happening::Misbehaviour) if self.process(Side::Shadow).life == Life::Gone => {}
            Event::Happens(Happening::StrayTimer) | Event::Timer => self.timer()?,
            Event::Happens(happening) => {
                if let Some(fact) = happening.fact() {
                    self.tell(fact)?;
                }
            }
        }
        Ok(())
    }

    fn tell(&mut self, fact: Fact) -> Result<(), Broken> {
        if let Fact::Exited(side) = fact {
            self.process_mut(side).exit_told = true;
        }
        let actions = self.handover.on(fact.clone(), self.now);
        self.log(&format!("{fact:?}"), &actions);
        self.perform(&Cause::Told(&fact), actions)?;
        if let Fact::Exited(side) = fact
            && self.rules.leaves_restart_to_controller(side)
        {
            self.restart(side);
        }
        Ok(())
    }

    fn timer(&mut self) -> Result<(), Broken> {
        let (due, phase) = (self.handover.due(), self.handover.phase());
        let actions = self.handover.on_time(self.now);
        self.log("timer", &actions);
        self.perform(&Cause::Timer { due, phase }, actions)
    }

    fn perform(&mut self, cause: &Cause<'_>, actions: Vec<Action>) -> Result<(), Broken> {
        self.rules.step(cause, &actions, &self.handover, self.now)?;
        for action in actions {
            match action {
                Action::Spawn => self.spawn(),
                Action::Warm => self.becomes_warm(self.script.warm),
                Action::Drain(side) => self.schedule_says(side, self.script.drain, Fact::Drained),
                Action::Stop(side) => self.send_away(side, self.script.deaf[side as usize]),
                Action::Kill(side) => self.send_away(side, self.script.immortal[side as usize]),
                Action::Route(_) | Action::Requeue(_) | Action::Park(_) | Action::GiveUp(_) => {}
                Action::Release(_) | Action::Complete | Action::Finish(_) => {}
            }
        }
        // Timers are set and never cancelled.
        if let Some(due) = self.handover.due()
            && self.timer_set_for != Some(due)
        {
            self.timer_set_for = Some(due);
            self.schedule(due.since(self.now) + self.script.timer_lateness, Event::Timer);
        }
        Ok(())
    }

    fn spawn(&mut self) {
        if self.script.start_up == StartUp::CannotSpawn {
            self.process_mut(Side::Shadow).exit_told = true;
            self.schedule(self.script.spawn, Event::Told(scripted_failure()));
        } else {
            self.start(Side::Shadow);
            self.says_hello(self.script.spawn);
        }
    }

    fn says_hello(&mut self, after: Duration) {
        let fact = match self.script.start_up {
            StartUp::FailsBeforeHello => scripted_failure(),
            _ => Fact::Connected,
        };
        self.schedule_says(Side::Shadow, after, fact);
    }

    fn becomes_warm(&mut self, after: Duration) {
        let fact = match self.script.start_up {
            StartUp::FailsBeforeWarm => scripted_failure(),
            _ => Fact::Warmed,
        };
        self.schedule_says(Side::Shadow, after, fact);
    }

    /// A process says something; it may be lost, and it may arrive again later.
    fn say(&mut self, side: Side, fact: Fact) {
        if fact == Fact::Warmed {
            self.process_mut(side).life = Life::Serving;
        }
        if self.random.percent(self.script.repeated) {
            let later = self.script.latency[side as usize] + self.random.within(Duration::from_millis(300));
            self.schedule(later, Event::Told(fact.clone()));
        }
        if !self.random.percent(self.script.lost) {
            self.schedule(self.script.latency[side as usize], Event::Told(fact));
        }
    }

    /// Asks or kills; `in_vain` if the side does not care. A side that is gone already is reported
    /// gone again.
    fn send_away(&mut self, side: Side, in_vain: bool) {
        let (generation, gone, told) = {
            let process = self.process(side);
            (process.generation, process.life == Life::Gone, process.exit_told)
        };
        if gone && told {
            self.schedule(Duration::ZERO, Event::Told(Fact::Exited(side)));
        } else if !gone && !in_vain {
            self.schedule(self.script.exit[side as usize], Event::Ends(side, generation));
        }
    }

    fn die(&mut self, side: Side) {
        self.process_mut(side).life = Life::Gone;
        self.schedule(self.script.latency[side as usize], Event::Told(Fact::Exited(side)));
    }

    fn start(&mut self, side: Side) {
        let generation = self.process(side).generation + 1;
        *self.process_mut(side) = Process { life: Life::Starting, generation, exit_told: false };
    }

    /// What the controller does about deaths that the machine leaves to it.
    fn restart(&mut self, side: Side) {
        self.start(side);
        let generation = self.process(side).generation;
        self.schedule(self.script.restart, Event::Up(side, generation));
    }

    fn lives(&self, side: Side, generation: u32) -> bool {
        let process = self.process(side);
        process.life != Life::Gone && process.generation == generation
    }

    fn process(&self, side: Side) -> &Process {
        &self.processes[side as usize]
    }

    fn process_mut(&mut self, side: Side) -> &mut Process {
        &mut self.processes[side as usize]
    }

    fn schedule_says(&mut self, side: Side, after: Duration, fact: Fact) {
        let generation = self.process(side).generation;
        self.schedule(after, Event::Says(side, generation, fact));
    }

    fn schedule(&mut self, after: Duration, event: Event) {
        self.events.insert((self.now + after, self.scheduled), event);
        self.scheduled += 1;
    }

    fn log(&self, what: &str, actions: &[Action]) {
        if self.verbose {
            let at = self.now.since_origin();
            println!("{at:>12.3?}  {:<10} {what:<18} {actions:?}", self.handover.phase().to_string());
        }
    }
}
