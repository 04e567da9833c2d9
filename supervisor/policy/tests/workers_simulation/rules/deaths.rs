//! Deaths: counted, followed by a pause that doubles, and at last by no further start.

use std::time::Duration;

use shadowslice_policy::workers::{Action, Fact, Launch, Report, State};
use shadowslice_shared::units::Moment;

use super::{Broken, Rules, Step, Told, rule};

const FIRST_PAUSE: Duration = Duration::from_millis(10);
const MOST: u32 = 8;

/// A worker that served for so long without work died neither of its start nor of its work.
const STOOD: Duration = Duration::from_secs(10);

#[derive(Default)]
pub(super) struct Deaths {
    all: u64,
    in_a_row: u32,
    /// No worker is started in the place of a dead one before.
    not_before: Moment,
    /// The worker that had the traffic is known to be gone in this step, and was not before.
    lost: bool,
    /// The worker that dies had served for so long without work that earlier deaths do not count.
    idled: bool,
}

impl Rules {
    pub(super) fn deaths_before(&mut self, step: &Step<'_>) {
        let usable = |seen: &&super::seen::Seen| seen.attached && seen.told_to_end.is_none();
        self.deaths.lost = match step.told {
            Told::Fact(Fact::Exited { worker, .. }) if self.routed == Some(*worker) && self.was_ready => {
                let way_back = self.workers.values().any(|seen| seen.drains.is_some() && !seen.leaves());
                self.workers.get(worker).as_ref().is_some_and(usable) && !way_back
            }
            _ => false,
        };
        self.deaths.idled = match step.told {
            Told::Fact(Fact::Exited { worker, idle, .. }) if self.routed == Some(*worker) => {
                self.workers.get(worker).is_some_and(|seen| {
                    let (idle, end) = seen
                        .lane_idle
                        .map_or((*idle, step.now), |idle| (idle, seen.lane_ended.unwrap_or(step.now)));
                    idle && seen.killed.is_none_or(|_| seen.misbehaved) && end.since(seen.routed) >= STOOD
                })
            }
            _ => false,
        };
    }

    pub(super) fn starts_in_time(&mut self, launch: &Launch, step: &Step<'_>) -> Result<(), Broken> {
        let again = launch.spare || self.down || self.restarts || step.workers.deaths_in_a_row() == 0;
        rule(
            again || step.now >= self.deaths.not_before,
            "the pause after a death doubles with each in a row",
        )
    }

    pub(super) fn deaths_count(&mut self, step: &Step<'_>) -> Result<(), Broken> {
        let (all, _) = step.workers.deaths_and_restarts();
        let died = all - self.deaths.all;
        self.deaths.all = all;
        rule(!self.deaths.lost || self.stopping || died == 1, "the death of the worker that serves counts")?;
        let rolled_back = step.actions.iter().find_map(|action| match action {
            Action::Report(Report::NotKept { rolled_back, .. }) => Some(*rolled_back),
            _ => None,
        });
        let timer = matches!(step.told, Told::Timer { .. });
        let right = rolled_back.is_none_or(|rolled_back| (died >= 1) == rolled_back);
        rule(right || timer, "a shadow that had served and failed has died")?;
        let in_a_row = step.workers.deaths_in_a_row();
        let before = std::mem::replace(&mut self.deaths.in_a_row, in_a_row);
        if let Told::Fact(Fact::FirstAnswer(_)) = step.told
            && !self.stopping
        {
            rule(in_a_row == 0, "an answer ends a row of deaths")?;
        }
        if self.deaths.idled && self.deaths.lost && died == 1 {
            rule(in_a_row <= 1, "accidents of a model without work do not add up")?;
        }
        if in_a_row <= before {
            return Ok(());
        }
        rule(died >= 1, "what counts in a row counts in all")?;
        let idled = self.deaths.idled;
        rule(
            in_a_row == if idled { 1 } else { before + 1 },
            "deaths count in a row unless a worker stood long without work",
        )?;
        if in_a_row >= MOST {
            self.note("a model is given up");
            let down = matches!(step.workers.state(), State::Down(why) if why.contains("in a row"));
            return rule(down, "a model whose workers die in a row is given up");
        }
        let down = matches!(step.workers.state(), State::Down(why) if why.contains("in a row"));
        rule(!down, "a model is not given up before")?;
        self.deaths.not_before = step.now + FIRST_PAUSE * 2_u32.pow(in_a_row - 1);
        let backs_off = step.workers.state() == State::Restarting;
        let due = step.workers.due().is_some_and(|due| due <= self.deaths.not_before);
        rule(!backs_off || due, "the next worker is started after the pause")
    }
}
