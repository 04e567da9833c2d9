//! The invariants, in one place. Checked at every step from what went into the machine, what came out
//! of it, and the phase and the next timer that it shows.

use shadowslice_policy::handover::{Action, Fact, Handover, Outcome, PhaseName, Side, Timeouts};
use shadowslice_shared::units::Moment;

use crate::script::Beginning;

/// What was broken.
pub(crate) type Broken = String;

/// What made the machine move.
pub(crate) enum Cause<'a> {
    Begin,
    Told(&'a Fact),
    /// A timer, and what [`Handover::due`] and [`Handover::phase`] said before it.
    Timer {
        due: Option<Moment>,
        phase: PhaseName,
    },
}

/// One side, as the rules see it.
#[derive(Default)]
struct Seen {
    /// Has requests in flight, as far as can be known; the routed side has, if it lives.
    in_flight: bool,
    /// The exit of the latest process was told.
    gone: bool,
    draining: bool,
    parked: bool,
    asked: Option<Moment>,
    killed: Option<Moment>,
    given_up: bool,
    /// The side belongs to the driver.
    released: bool,
}

pub(crate) struct Rules {
    timeouts: Timeouts,
    sides: [Seen; 2],
    routed: Side,
    connected: bool,
    warmed: bool,
    misbehaved: bool,
    completed: bool,
    finished: Option<Outcome>,
    phase: PhaseName,
    /// When the phase began, or its second half, after a kill.
    since: Moment,
}

/// Breaks the rule of that name unless `holds`.
fn rule(holds: bool, name: &str) -> Result<(), Broken> {
    if holds { Ok(()) } else { Err(name.to_owned()) }
}

fn other(side: Side) -> Side {
    match side {
        Side::Incumbent => Side::Shadow,
        Side::Shadow => Side::Incumbent,
    }
}

impl Rules {
    /// The present phase of a shadow that starts already began at the origin.
    pub(crate) fn new(timeouts: Timeouts, incumbent_alive: bool, shadow: Beginning) -> Self {
        let (warms, standing) = (matches!(shadow, Beginning::Warming { .. }), shadow == Beginning::Standing);
        let incumbent = Seen { in_flight: incumbent_alive, gone: !incumbent_alive, ..Seen::default() };
        Self {
            timeouts,
            sides: [incumbent, Seen::default()],
            routed: Side::Incumbent,
            connected: warms || standing,
            warmed: standing,
            misbehaved: false,
            completed: false,
            finished: None,
            phase: if warms { PhaseName::Warming } else { PhaseName::Spawning },
            since: Moment::default(),
        }
    }

    pub(crate) fn routed(&self) -> Side {
        self.routed
    }

    pub(crate) fn outcome(&self) -> Option<&Outcome> {
        self.finished.as_ref()
    }

    /// Whether this side may be restarted by the controller.
    pub(crate) fn leaves_restart_to_controller(&self, side: Side) -> bool {
        self.routed == side && self.finished.is_none()
    }

    /// Whether this side takes batches, provided that its process does.
    pub(crate) fn lets_serve(&self, side: Side) -> bool {
        let seen = &self.sides[side as usize];
        self.routed == side && !seen.draining && !seen.parked && seen.asked.is_none() && seen.killed.is_none()
    }

    pub(crate) fn given_up(&self) -> bool {
        self.sides.iter().any(|seen| seen.given_up)
    }

    pub(crate) fn released(&self) -> bool {
        self.sides.iter().any(|seen| seen.released)
    }

    /// Checks one step of the machine.
    pub(crate) fn step(
        &mut self,
        cause: &Cause<'_>,
        actions: &[Action],
        handover: &Handover,
        now: Moment,
    ) -> Result<(), Broken> {
        self.no_timer_acts_early(cause, actions, handover, now)?;
        if let Cause::Told(fact) = cause {
            self.learn(fact);
        }
        for action in actions {
            rule(self.finished.is_none(), "nothing is done after the end")?;
            self.action(action, now)?;
        }
        if let Cause::Told(fact) = cause {
            self.nothing_is_put_off(fact, handover.phase())?;
            self.controller_requeues(fact);
        }
        self.phases_are_what_they_say(handover, now)
    }

    fn learn(&mut self, fact: &Fact) {
        match fact {
            Fact::Connected => self.connected = true,
            Fact::Warmed => self.warmed = true,
            Fact::Misbehaved => self.misbehaved = true,
            Fact::Drained if self.sides[0].draining => self.sides[0].in_flight = false,
            Fact::Exited(side) => self.sides[*side as usize].gone = true,
            Fact::IncumbentServes => {
                self.sides[0].gone = false;
                self.sides[0].in_flight = self.routed == Side::Incumbent;
            }
            Fact::Drained | Fact::BootFailed(_) | Fact::Cancel | Fact::Reclaim | Fact::Adopt => {}
        }
    }

    /// The death of the routed side, where the machine leaves it so, is the controller's business.
    fn controller_requeues(&mut self, fact: &Fact) {
        if *fact == Fact::Exited(self.routed) {
            self.sides[self.routed as usize].in_flight = false;
        }
    }

    fn action(&mut self, action: &Action, now: Moment) -> Result<(), Broken> {
        match action {
            Action::Spawn => {}
            Action::Warm => rule(self.connected, "a shadow warms up only after it said hello")?,
            Action::Route(side) => self.route(*side)?,
            Action::Complete => {
                rule(!self.completed, "a hand-over completes at most once")?;
                rule(self.warmed, "a hand-over completes only after the shadow was warm")?;
                rule(self.routed == Side::Shadow, "a hand-over completes only when the shadow is routed")?;
                self.completed = true;
            }
            Action::Requeue(side) => self.sides[*side as usize].in_flight = false,
            Action::Drain(side) | Action::Park(side) => {
                rule(self.routed != *side, "who is routed is neither drained nor parked")?;
                let seen = &mut self.sides[*side as usize];
                rule(!seen.gone, "nobody is drained or parked who is gone")?;
                seen.draining = matches!(action, Action::Drain(_));
                seen.parked = !seen.draining;
                rule(seen.draining || !seen.in_flight, "nobody is parked with requests in flight")?;
            }
            Action::Release(side) => self.release(*side)?,
            Action::Stop(side) | Action::Kill(side) | Action::GiveUp(side) => {
                rule(self.routed != *side, "who is routed is never stopped, killed or given up")?;
                rule(!self.sides[*side as usize].in_flight, "nobody is sent away with requests in flight")?;
                self.send_away(action, *side, now)?;
            }
            Action::Finish(outcome) => self.finish(outcome)?,
        }
        Ok(())
    }

    fn release(&mut self, side: Side) -> Result<(), Broken> {
        rule(self.completed, "nobody is released before the hand-over has completed")?;
        rule(self.routed != side, "who is routed is never released")?;
        let seen = &mut self.sides[side as usize];
        rule(!seen.in_flight, "nobody is released with requests in flight")?;
        rule(seen.asked.is_some() || !seen.gone, "nobody is released who is gone")?;
        seen.released = true;
        Ok(())
    }

    fn route(&mut self, to: Side) -> Result<(), Broken> {
        rule(self.routed != to, "traffic moves from one side to the other, never to both")?;
        rule(to == Side::Incumbent || self.warmed, "the shadow is routed only when it is warm")?;
        let seen = &mut self.sides[to as usize];
        rule(seen.asked.is_none() && seen.killed.is_none(), "nobody is routed who was sent away")?;
        (seen.draining, seen.parked) = (false, false);
        seen.in_flight = true;
        self.routed = to;
        Ok(())
    }

    /// First asked, then killed, then given up, with the stop timeout between.
    fn send_away(&mut self, how: &Action, side: Side, now: Moment) -> Result<(), Broken> {
        let patience = self.timeouts.stop;
        let waited = |since: Option<Moment>| since.is_some_and(|since| now >= since + patience);
        let unasked = side == Side::Shadow && (!self.completed || self.misbehaved);
        let seen = &mut self.sides[side as usize];
        match how {
            Action::Stop(_) => seen.asked = Some(now),
            Action::Kill(_) => {
                let allowed = waited(seen.asked) || (unasked && seen.asked.is_none());
                rule(allowed, "who served well is asked to exit, and in vain, before it is killed")?;
                seen.killed = Some(now);
            }
            _ => {
                rule(waited(seen.killed), "nobody is given up before it was killed in vain")?;
                seen.given_up = true;
            }
        }
        self.since = now;
        Ok(())
    }

    fn finish(&mut self, outcome: &Outcome) -> Result<(), Broken> {
        let (routed, completed) = match outcome {
            Outcome::Kept => (Side::Shadow, true),
            Outcome::RolledBack(_) => (Side::Incumbent, true),
            Outcome::Aborted(_) => (Side::Incumbent, false),
        };
        rule(self.routed == routed, "kept: the shadow is routed; aborted or rolled back: the incumbent")?;
        rule(self.completed == completed, "what was kept or rolled back completed, what aborted did not")?;
        let idle = &self.sides[other(routed) as usize];
        let settled = idle.gone || idle.given_up || idle.released;
        rule(settled, "whoever is not routed is gone at the end, was given up, or is the driver's")?;
        rule(!idle.in_flight, "no request is left with a side that is not routed")?;
        self.finished = Some(outcome.clone());
        Ok(())
    }

    fn no_timer_acts_early(
        &self,
        cause: &Cause<'_>,
        actions: &[Action],
        handover: &Handover,
        now: Moment,
    ) -> Result<(), Broken> {
        let Cause::Timer { due, phase } = cause else {
            return Ok(());
        };
        let same = actions.is_empty() && handover.due() == *due && handover.phase() == *phase;
        match due {
            Some(due) if *due <= now => rule(!same, "a timer that is due acts"),
            _ => rule(same, "a timer that is not due changes nothing"),
        }
    }

    /// An event that ends a phase ends it within the step. After the cut-over and before the point
    /// of no return, a shadow that is gone or broken also gives the traffic back, if the incumbent
    /// is still there.
    fn nothing_is_put_off(&self, fact: &Fact, phase: PhaseName) -> Result<(), Broken> {
        let before_cut_over = matches!(phase, PhaseName::Spawning | PhaseName::Warming);
        match fact {
            Fact::Exited(Side::Shadow) | Fact::Misbehaved | Fact::BootFailed(_) => {
                let going_on = matches!(phase, PhaseName::Draining | PhaseName::Probation);
                rule(!before_cut_over && !going_on, "a failing shadow is left at once")?;
                let incumbent = &self.sides[0];
                let can_serve = !incumbent.gone && incumbent.asked.is_none() && incumbent.killed.is_none();
                let left = self.routed == Side::Incumbent;
                rule(left || !can_serve || self.finished.is_some(), "a failing shadow gives the traffic back")
            }
            Fact::Cancel => rule(
                !before_cut_over && phase != PhaseName::Probation,
                "what is cancelled ends at once, except while it drains",
            ),
            Fact::Reclaim => {
                rule(phase != PhaseName::Probation, "a parked incumbent that is wanted gone goes")
            }
            Fact::Adopt => {
                let going = phase == PhaseName::Retiring && self.sides[0].killed.is_none();
                rule(
                    phase != PhaseName::Probation && !going,
                    "an incumbent that is adopted is released at once",
                )
            }
            Fact::Connected | Fact::Warmed | Fact::Drained | Fact::Exited(_) | Fact::IncumbentServes => {
                Ok(())
            }
        }
    }

    /// The phase shown, and the time at which it ends, follow from what has been done.
    fn phases_are_what_they_say(&mut self, handover: &Handover, now: Moment) -> Result<(), Broken> {
        if handover.phase() != self.phase {
            (self.phase, self.since) = (handover.phase(), now);
        }
        let Timeouts { spawn, warm, drain, dwell, stop } = self.timeouts;
        let [incumbent, shadow] = &self.sides;
        let shadow_routed = self.routed == Side::Shadow;
        let (lasts, consistent) = match self.phase {
            PhaseName::Spawning => (Some(spawn), !shadow_routed),
            PhaseName::Warming => (Some(warm), !shadow_routed && self.connected),
            PhaseName::Draining => (Some(drain), shadow_routed && incumbent.draining && !incumbent.gone),
            PhaseName::Probation => {
                (Some(dwell), shadow_routed && incumbent.parked && !incumbent.gone && self.completed)
            }
            PhaseName::Retiring => (Some(stop), shadow_routed && incumbent.asked.is_some() && self.completed),
            PhaseName::Aborting => {
                (Some(stop), !shadow_routed && (shadow.asked.is_some() || shadow.killed.is_some()))
            }
            PhaseName::Done => (None, self.finished == Some(Outcome::Kept)),
            PhaseName::Aborted => (None, !matches!(self.finished, None | Some(Outcome::Kept))),
        };
        rule(consistent, "the phase fits what has been done")?;
        let due = lasts.map(|span| self.since + span);
        rule(handover.due() == due, "every phase lasts as long as its timeout says")
    }

    /// Checks the end of a run.
    pub(crate) fn end(&self, faultless: bool, took: Moment, bound: Moment) -> Result<&Outcome, Broken> {
        let Some(outcome) = &self.finished else {
            return Err("every run ends".to_owned());
        };
        rule(took <= bound, "every run ends in time")?;
        let kept = *outcome == Outcome::Kept;
        let nobody_killed = self.sides.iter().all(|seen| seen.killed.is_none());
        rule(
            !faultless || (kept && nobody_killed),
            "without faults the hand-over is kept, and nobody killed",
        )?;
        Ok(outcome)
    }
}
