//! The simulated model: commands, workers, another supervisor, and a driver that performs the steps.

use std::collections::BTreeSet;

use shadowslice_policy::reconcile::{
    Current, Goal, Health, InstanceView, Observed, Presence, ShareProgress, SpecDifference, Step, plan,
};

use super::random::Random;

/// The number of events of a run. Afterwards no command comes and no step fails.
const EVENTS: u32 = 60;

/// The maximum number of steps without an event in between. More steps are an endless loop.
const MAX_STEPS: u32 = 12;

/// The number of events within which everything comes to rest after the last command.
const CALM: u32 = 200;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Spec {
    presence: Presence,
    /// A setting that needs new workers.
    engine: u64,
    /// A setting that changes in place.
    slo: u64,
    /// The share that the workers must have, if a command requires one.
    share: Option<u64>,
}

#[derive(Debug, Clone)]
struct Instance {
    id: u32,
    spec: Spec,
    /// The specification to which a refused change returns.
    confirmed: Spec,
    health: Health,
    hangs: bool,
    share: u64,
}

#[derive(Debug, Clone)]
enum Serving {
    Nothing,
    Relay { is_lost: bool },
    Instance(Instance),
}

struct World {
    random: Random,
    shows: bool,
    calm: bool,
    goal: Goal<Spec>,
    serving: Serving,
    successor: Option<Instance>,
    share: ShareProgress,
    exiting: u32,
    fault: Option<String>,
    next_id: u32,
    /// The instance that served when the unanswered commands began.
    served_before: Option<u32>,
    seen: BTreeSet<&'static str>,
}

/// Runs one seed. Returns the situations that occurred, or the rule that was broken.
pub(crate) fn simulate(seed: u64, shows: bool) -> Result<BTreeSet<&'static str>, String> {
    let first = Spec { presence: Presence::Served, engine: 0, slo: 0, share: None };
    let mut world = World {
        random: Random::new(seed),
        shows,
        calm: false,
        goal: Goal::new(first),
        serving: Serving::Nothing,
        successor: None,
        share: ShareProgress::Reached,
        exiting: 0,
        fault: None,
        next_id: 0,
        served_before: None,
        seen: BTreeSet::new(),
    };
    for _ in 0..EVENTS {
        world.settle()?;
        if world.random.percent(35) { world.command() } else { world.event() }
    }
    world.calm = true;
    for _ in 0..CALM {
        world.settle()?;
        world.event();
    }
    world.is_at_rest()?;
    Ok(world.seen)
}

fn rule(holds: bool, rule: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(rule.to_owned()) }
}

impl World {
    /// Performs steps until there is none.
    fn settle(&mut self) -> Result<(), String> {
        for _ in 0..MAX_STEPS {
            let observed = self.observe();
            let desired = *self.goal.desired();
            let Some(step) = plan(desired.presence, &observed) else { return self.may_wait(&observed) };
            if self.shows {
                println!("{step:?} for {desired:?} at {observed:?}");
            }
            self.perform(step, desired)?;
        }
        Err("the steps come to an end without an event".to_owned())
    }

    fn observe(&self) -> Observed {
        let desired = self.goal.desired();
        let view = |instance: &Instance| {
            let difference = match (instance.spec.engine == desired.engine, instance.spec.slo == desired.slo)
            {
                (false, _) => SpecDifference::NewWorkers,
                (true, false) => SpecDifference::InPlace,
                (true, true) => SpecDifference::None,
            };
            InstanceView { difference, health: instance.health.clone() }
        };
        let (current, share) = match &self.serving {
            Serving::Nothing => (Current::Nothing, ShareProgress::Reached),
            Serving::Relay { is_lost } => (Current::Relay { is_lost: *is_lost }, ShareProgress::Reached),
            Serving::Instance(instance) => {
                let is_reached = desired.share.is_none_or(|share| share == instance.share);
                let share = match self.share {
                    ShareProgress::Changing => ShareProgress::Changing,
                    _ if is_reached => ShareProgress::Reached,
                    _ => ShareProgress::Differs,
                };
                (Current::Instance(view(instance)), share)
            }
        };
        Observed {
            current,
            successor: self.successor.as_ref().map(view),
            share,
            exiting: self.exiting > 0,
            settled: self.goal.is_settled(),
            fault: self.fault.clone(),
        }
    }

    /// Checks what must hold whenever the driver waits.
    fn may_wait(&self, observed: &Observed) -> Result<(), String> {
        let desired = self.goal.desired();
        if desired.presence != Presence::Served {
            rule(self.successor.is_none(), "a model that leaves has no successor")?;
            rule(!matches!(self.serving, Serving::Instance(_)), "a model that leaves has no instance")?;
        }
        if let Some(successor) = &self.successor {
            rule(successor.spec.engine == desired.engine, "a successor with another specification ends")?;
        }
        let waits_for_nothing = observed.settled
            || self.exiting > 0
            || self.successor.as_ref().is_some_and(|successor| successor.health == Health::Starting)
            || matches!(&self.serving, Serving::Instance(instance)
                if instance.health == Health::Starting || self.share == ShareProgress::Changing);
        rule(waits_for_nothing, "commands are answered unless an event is expected")
    }

    fn perform(&mut self, step: Step, desired: Spec) -> Result<(), String> {
        let generation = self.goal.generation();
        let is_answer = matches!(step, Step::Confirm | Step::Refuse(_));
        rule(is_answer || self.fault.is_none(), "a step that failed waits for another desired state")?;
        match step {
            Step::Start => self.start(desired),
            Step::Configure | Step::ConfigureSuccessor => self.configure(step, desired),
            Step::Resize => {
                rule(!self.goal.is_settled(), "a share changes only for an unanswered command")?;
                self.share = ShareProgress::Changing;
                Ok(())
            }
            Step::Promote => self.promote(),
            Step::Discard => {
                let successor = self.successor.take().ok_or("only a successor is discarded")?;
                if successor.hangs {
                    self.seen.insert("a hanging successor is given up for a later command");
                }
                self.exiting += 1;
                Ok(())
            }
            Step::Retire => self.leave(Presence::Unloaded, Serving::Nothing, "unloaded"),
            Step::Relay => self.leave(Presence::Relayed, Serving::Relay { is_lost: false }, "a model moves"),
            Step::Confirm => {
                rule(self.is_as_desired(), "a confirmed state is the desired one")?;
                rule(
                    desired.presence != Presence::Relayed || self.exiting == 0,
                    "a model has moved when its workers have exited",
                )?;
                if let Serving::Instance(instance) = &mut self.serving {
                    instance.confirmed = desired;
                }
                self.goal.confirm(generation);
                self.answered("confirmed")
            }
            Step::Refuse(why) => self.refuse(generation, why),
        }
    }

    fn configure(&mut self, step: Step, desired: Spec) -> Result<(), String> {
        let fails = self.fails(10);
        let target = match (&mut self.serving, &mut self.successor) {
            (Serving::Instance(instance), _) if step == Step::Configure => instance,
            (_, Some(successor)) if step == Step::ConfigureSuccessor => successor,
            _ => return Err("only an instance is configured".to_owned()),
        };
        rule(target.spec.engine == desired.engine, "a change in place needs no new workers")?;
        if fails {
            self.fault = Some("no reply".to_owned());
            self.seen.insert("settings cannot be changed");
        } else {
            target.spec.slo = desired.slo;
            self.seen.insert("a change in place");
        }
        Ok(())
    }

    fn leave(&mut self, to: Presence, serving: Serving, situation: &'static str) -> Result<(), String> {
        let is_wanted = self.goal.desired().presence == to;
        rule(is_wanted, "a model stops serving only if it is to leave")?;
        if let Serving::Instance(_) = self.serving {
            self.exiting += 1;
        }
        self.share = ShareProgress::Reached;
        self.serving = serving;
        self.seen.insert(situation);
        Ok(())
    }

    fn start(&mut self, desired: Spec) -> Result<(), String> {
        rule(self.successor.is_none(), "a model has one successor at most")?;
        rule(desired.presence == Presence::Served, "only a model that is to serve starts")?;
        if self.fails(15) {
            self.fault = Some("no memory".to_owned());
            self.seen.insert("a start fails");
            return Ok(());
        }
        self.next_id += 1;
        let hangs = self.fails(15);
        let share = match &self.serving {
            Serving::Instance(instance) => desired.share.unwrap_or(instance.share),
            _ => 0,
        };
        let health = Health::Starting;
        let made = Instance { id: self.next_id, spec: desired, confirmed: desired, health, hangs, share };
        match &self.serving {
            Serving::Nothing => self.serving = Serving::Instance(made),
            Serving::Instance(instance) => {
                if matches!(instance.health, Health::Failed(_)) {
                    self.seen.insert("a failed instance is replaced");
                }
                self.successor = Some(made);
            }
            Serving::Relay { .. } => self.successor = Some(made),
        }
        Ok(())
    }

    fn promote(&mut self) -> Result<(), String> {
        let successor = self.successor.take().ok_or("only a successor is promoted")?;
        let situation = match (&self.serving, &successor.health) {
            (Serving::Nothing, _) => {
                return Err("an instance for which nothing waits is the current one".to_owned());
            }
            (Serving::Relay { is_lost: true }, _) => "a model moves back as its supervisor has died",
            (Serving::Relay { .. }, Health::Serving) => "a model moves back",
            (Serving::Relay { .. }, Health::Failed(_)) => "a successor fails after a move back",
            (Serving::Instance(_), Health::Serving) => "a successor takes over",
            (_, _) => return Err("a successor takes over when it serves".to_owned()),
        };
        self.seen.insert(situation);
        if let Serving::Instance(_) = self.serving {
            self.exiting += 1;
        }
        self.share = ShareProgress::Reached;
        self.serving = Serving::Instance(successor);
        Ok(())
    }

    fn refuse(&mut self, generation: u64, why: String) -> Result<(), String> {
        rule(!self.goal.is_settled(), "a command is answered once")?;
        let desired = *self.goal.desired();
        let fallback = match &self.serving {
            Serving::Instance(instance) => instance.confirmed,
            Serving::Relay { .. } => Spec { presence: Presence::Relayed, ..desired },
            Serving::Nothing => desired,
        };
        if let Serving::Instance(instance) = &self.serving {
            if fallback.engine == instance.spec.engine && fallback.slo != instance.spec.slo {
                self.seen.insert("a change in place is taken back");
            }
            if self.served_before == Some(instance.id) && self.successor.is_some() {
                self.seen.insert("a failed successor is given up");
            }
        }
        if fallback != desired {
            self.fault = None;
        }
        self.share = ShareProgress::Reached;
        self.goal.refuse(generation, why, fallback);
        self.answered("refused")
    }

    fn answered(&mut self, situation: &'static str) -> Result<(), String> {
        self.seen.insert(situation);
        rule(self.goal.is_settled(), "an answer is for the last command")?;
        self.served_before = self.current_id();
        Ok(())
    }

    fn current_id(&self) -> Option<u32> {
        match &self.serving {
            Serving::Instance(instance) => Some(instance.id),
            _ => None,
        }
    }

    fn is_as_desired(&self) -> bool {
        let desired = self.goal.desired();
        match (desired.presence, &self.serving) {
            (Presence::Served, Serving::Instance(instance)) => {
                let is_same = (instance.spec.engine, instance.spec.slo) == (desired.engine, desired.slo);
                is_same && desired.share.is_none_or(|share| share == instance.share)
            }
            (Presence::Unloaded, Serving::Nothing) => true,
            (Presence::Relayed, Serving::Relay { .. } | Serving::Nothing) => true,
            _ => false,
        }
    }

    fn fails(&mut self, percent: u64) -> bool {
        !self.calm && self.random.percent(percent)
    }

    fn command(&mut self) {
        let was_settled = self.goal.is_settled();
        if !was_settled {
            self.seen.insert("a command replaces an unanswered one");
        }
        let (kind, value) = (self.random.below(10), self.random.below(3));
        let had_successor = self.successor.is_some();
        self.fault = None;
        let is_relayed = matches!(self.serving, Serving::Relay { .. });
        let current = match &self.serving {
            Serving::Instance(instance) => Some(instance.spec),
            _ => None,
        };
        self.goal.change(|spec| {
            if was_settled {
                spec.share = None;
            }
            match kind {
                0..3 => (spec.engine, spec.presence) = (value, Presence::Served),
                3..5 => (spec.slo, spec.presence) = (value, Presence::Served),
                5 => spec.share = Some(value),
                6 => spec.presence = Presence::Unloaded,
                7 => spec.presence = Presence::Relayed,
                8 => spec.presence = Presence::Served,
                // The same files again.
                _ => spec.engine += 10,
            }
        });
        if had_successor && current.is_some_and(|current| current.engine == self.goal.desired().engine) {
            self.seen.insert("a removed change ends its successor");
        }
        if is_relayed && self.random.percent(30) {
            self.serving = Serving::Relay { is_lost: true };
        }
    }

    /// Lets one thing happen outside the supervisor.
    fn event(&mut self) {
        let (chance, fails) = (self.random.below(4), self.fails(25));
        match chance {
            0 if self.exiting > 0 => self.exiting -= 1,
            1 if self.share == ShareProgress::Changing => self.share_event(fails),
            2 => self.start_event(fails),
            _ => self.worker_event(),
        }
    }

    fn share_event(&mut self, fails: bool) {
        let busy = self.fails(30);
        let desired = self.goal.desired().share;
        self.share = ShareProgress::Reached;
        match &mut self.serving {
            Serving::Instance(_) if fails => self.fault = Some("no worker at this share".to_owned()),
            // Another change was in progress. The share still differs.
            Serving::Instance(_) if busy => {}
            Serving::Instance(instance) => {
                instance.share = desired.unwrap_or(instance.share);
                self.seen.insert("a share changes");
            }
            _ => {}
        }
    }

    fn start_event(&mut self, fails: bool) {
        let calm = self.calm;
        let current = match &mut self.serving {
            Serving::Instance(instance) => Some(instance),
            _ => None,
        };
        for instance in current.into_iter().chain(&mut self.successor) {
            if instance.health == Health::Starting && (calm || !instance.hangs) {
                // In the end, even a start that hangs exceeds its time limit.
                let failed = fails || calm && instance.hangs;
                instance.health =
                    if failed { Health::Failed("wrong answers".to_owned()) } else { Health::Serving };
            }
        }
    }

    fn worker_event(&mut self) {
        let fails = self.fails(10);
        let Serving::Instance(instance) = &mut self.serving else { return };
        match instance.health {
            Health::Serving if fails => {
                instance.health = Health::Failed("died".to_owned());
                self.seen.insert("a worker dies");
            }
            Health::Failed(_) if !fails => instance.health = Health::Serving,
            _ => {}
        }
    }

    fn is_at_rest(&self) -> Result<(), String> {
        rule(self.goal.is_settled(), "every command is answered in the end")?;
        rule(self.successor.is_none(), "no successor is left over")?;
        rule(self.exiting == 0, "retired workers exit")?;
        rule(self.fault.is_some() || self.is_as_desired_or_refused(), "the model is as desired in the end")
    }

    /// Returns true if the model is as desired, except for the share, which may differ after a refused
    /// command.
    fn is_as_desired_or_refused(&self) -> bool {
        let desired = self.goal.desired();
        match &self.serving {
            Serving::Instance(instance) if desired.presence == Presence::Served => {
                (instance.spec.engine, instance.spec.slo) == (desired.engine, desired.slo)
            }
            _ => self.is_as_desired(),
        }
    }
}
