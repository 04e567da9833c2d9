//! Rules about deaths and failed starts. Each death or failed start is counted, and doubles the delay
//! before the next start. After too many of them, the model becomes unready.

use std::time::Duration;

use shadowslice_policy::workers::{
    Action, Launch, LifecycleEvent, LifecycleReport, StartFailure, WorkersState,
};
use shadowslice_shared::units::Timestamp;

use super::{RuleChecker, Step, Stimulus, Violation, rule};

const MIN_BACKOFF: Duration = Duration::from_millis(10);
const MAX_BACKOFF: Duration = Duration::from_secs(30);
pub(super) const MOST: u32 = 8;

/// The time after which an idle worker counts as stable.
const STABLE_AFTER: Duration = Duration::from_secs(10);

#[derive(Default)]
pub(super) struct Deaths {
    all: u64,
    in_a_row: u32,
    /// The time before which a replacement must not start.
    not_before: Timestamp,
    /// True if this step reports the exit of the worker that had the traffic.
    lost: bool,
    /// True if the dying worker was idle for so long that earlier deaths no longer count.
    idled: bool,
}

impl RuleChecker {
    pub(super) fn deaths_before(&mut self, step: &Step<'_>) {
        let usable = |seen: &&super::record::WorkerRecord| seen.attached && seen.told_to_end.is_none();
        self.deaths.lost = match step.stimulus {
            Stimulus::LifecycleEvent(LifecycleEvent::Exited { worker, .. })
                if self.routed == Some(*worker) && self.was_ready =>
            {
                let fallback = self.workers.values().any(|seen| seen.drains.is_some() && !seen.leaves());
                self.workers.get(worker).as_ref().is_some_and(usable) && !fallback
            }
            _ => false,
        };
        self.deaths.idled = match step.stimulus {
            Stimulus::LifecycleEvent(LifecycleEvent::Exited { worker, idle, .. })
                if self.routed == Some(*worker) =>
            {
                self.workers.get(worker).is_some_and(|seen| {
                    let (idle, end) = seen
                        .lane_idle
                        .map_or((*idle, step.now), |idle| (idle, seen.lane_ended.unwrap_or(step.now)));
                    idle && seen.killed.is_none_or(|_| seen.misbehaved)
                        && end.since(seen.routed) >= STABLE_AFTER
                })
            }
            _ => false,
        };
    }

    pub(super) fn starts_in_time(&mut self, launch: &Launch, step: &Step<'_>) -> Result<(), Violation> {
        let by_hand = self.down && !matches!(step.stimulus, Stimulus::Timer { .. });
        let wakes = self.was_asleep && !matches!(step.stimulus, Stimulus::Timer { .. });
        let again = launch.low_priority || by_hand || wakes || step.workers.failures_in_a_row() == 0;
        rule(again || step.now >= self.deaths.not_before, "the delay doubles with each death in a row")
    }

    pub(super) fn deaths_count(&mut self, step: &Step<'_>) -> Result<(), Violation> {
        let (all, _) = step.workers.deaths_and_restarts();
        let died = all - self.deaths.all;
        self.deaths.all = all;
        rule(!self.deaths.lost || self.stopping || died == 1, "the death of the worker that serves counts")?;
        let rolled_back = step.actions.iter().find_map(|action| match action {
            Action::Report(LifecycleReport::HandoverFailed { rolled_back, .. }) => Some(*rolled_back),
            _ => None,
        });
        let timer = matches!(step.stimulus, Stimulus::Timer { .. });
        let right = rolled_back.is_none_or(|rolled_back| (died >= 1) == rolled_back);
        rule(right || timer, "a shadow that had served and failed has died")?;
        let in_a_row = step.workers.failures_in_a_row();
        let before = std::mem::replace(&mut self.deaths.in_a_row, in_a_row);
        if let Stimulus::LifecycleEvent(LifecycleEvent::FirstAnswer(_)) = step.stimulus
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
            step.stimulus,
            Stimulus::LifecycleEvent(LifecycleEvent::NotStarted {
                failure: StartFailure::Failed(_) | StartFailure::NoRoomForStandby(_),
                ..
            })
        );
        rule(if in_vain { died == 0 } else { died >= 1 }, "deaths count in a row and in all")?;
        let idled = self.deaths.idled;
        rule(
            in_a_row == if idled { 1 } else { before + 1 },
            "deaths count in a row unless a worker was idle for long",
        )?;
        let pause = (MIN_BACKOFF * 2_u32.saturating_pow(in_a_row - 1)).min(MAX_BACKOFF);
        self.deaths.not_before = step.now + pause;
        let down = matches!(step.workers.state(), WorkersState::Down { why, .. } if why.contains("in a row"));
        if in_a_row >= MOST {
            self.note("a model is given up");
            rule(down, "a model whose workers die in a row is given up")?;
            let again = step.workers.due().is_some_and(|due| due <= self.deaths.not_before);
            return rule(again, "a model that was given up restarts");
        }
        rule(!down, "a model is not given up earlier")?;
        let backs_off = step.workers.state() == WorkersState::Restarting;
        let due = step.workers.due().is_some_and(|due| due <= self.deaths.not_before);
        rule(!backs_off || due, "the next worker starts after the delay")
    }
}
