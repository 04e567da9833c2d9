//! Deaths and starts in vain: counted, followed by a pause that doubles, in which a model is at last
//! unready.

use std::time::Duration;

use shadowslice_policy::workers::{Action, Fact, Launch, Report, StartFailure, State};
use shadowslice_shared::units::Timestamp;

use super::{Broken, Rules, Step, Told, rule};

const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
pub(super) const MOST: u32 = 8;

/// A worker that served for so long without work died neither of its start nor of its work.
const STOOD: Duration = Duration::from_secs(10);

#[derive(Default)]
pub(super) struct Deaths {
    all: u64,
    in_a_row: u32,
    /// No worker is started in the place of a dead one before.
    not_before: Timestamp,
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
        let by_hand = self.down && !matches!(step.told, Told::Timer { .. });
        let again = launch.spare || by_hand || self.restarts || step.workers.failures_in_a_row() == 0;
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
        let in_a_row = step.workers.failures_in_a_row();
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
        let in_vain = matches!(
            step.told,
            Told::Fact(Fact::NotStarted {
                failure: StartFailure::Failed(_) | StartFailure::NoRoomToStand(_),
                ..
            })
        );
        rule(if in_vain { died == 0 } else { died >= 1 }, "deaths count in a row and in all")?;
        let idled = self.deaths.idled;
        rule(
            in_a_row == if idled { 1 } else { before + 1 },
            "deaths count in a row unless a worker stood long without work",
        )?;
        let pause = (FIRST_PAUSE * 2_u32.saturating_pow(in_a_row - 1)).min(LONGEST_PAUSE);
        self.deaths.not_before = step.now + pause;
        let down = matches!(step.workers.state(), State::Down { why, .. } if why.contains("in a row"));
        if in_a_row >= MOST {
            self.note("a model is given up");
            rule(down, "a model whose workers die in a row is given up")?;
            let again = step.workers.due().is_some_and(|due| due <= self.deaths.not_before);
            return rule(again, "a model that was given up is tried again");
        }
        rule(!down, "a model is not given up before")?;
        let backs_off = step.workers.state() == State::Restarting;
        let due = step.workers.due().is_some_and(|due| due <= self.deaths.not_before);
        rule(!backs_off || due, "the next worker is started after the pause")
    }
}
