//! Rules about the end of a run: the state after the faults have ended, the state without further
//! events, and the state after the model was stopped.

use std::time::Duration;

use shadowslice_policy::workers::{Workers, WorkersState};

use super::deaths::MOST;
use super::{RuleChecker, Violation, rule};
use crate::script::Afterwards;

impl RuleChecker {
    /// Returns the maximum time from the end of faults and orders until no change is in progress.
    pub(crate) fn bound_of_rest(&self) -> Duration {
        let timeouts = self.settings.timeouts;
        let once = timeouts.spawn + timeouts.warm + timeouts.drain + timeouts.dwell + 2 * timeouts.stop;
        Duration::from_secs(120) + 12 * (once + 8 * self.allowance)
    }

    /// Checks the state after [`Self::bound_of_rest`] has passed.
    pub(crate) fn rest(&mut self, workers: &Workers, afterwards: Afterwards) -> Result<(), Violation> {
        let state = workers.state();
        if afterwards == Afterwards::FallsSilent {
            self.note("silence");
            let rests = matches!(
                state,
                WorkersState::Ready | WorkersState::Asleep | WorkersState::Down { again: None, .. }
            );
            let given_up = workers.failures_in_a_row() >= MOST;
            rule(rests || given_up, "a model without news serves or is given up")?;
            return rule(rests == workers.due().is_none(), "a model that was given up restarts");
        }
        rule(workers.due().is_none(), "nothing is due once faults end")?;
        rule(workers.coming().is_none(), "every change ends")?;
        rule(self.answers.all_are_given(), "all requests are answered")?;
        if let WorkersState::Down { why, again } = state {
            self.note("down at the end");
            rule(!self.faultless, "without faults no model goes down")?;
            rule(again.is_none(), "a temporary fault ends")?;
            let final_faults = ["answered wrongly", "scripted", "handover: auto", "every batch size"];
            rule(final_faults.iter().any(|fault| why.contains(fault)), "a model is down for a reason")?;
            return rule(self.workers.is_empty(), "a model that is down has no workers");
        }
        rule(state == WorkersState::Ready, "a model serves once faults end")?;
        self.note("serves at the end");
        let standby = self.settings.standby;
        let inside = workers.partition().is_some();
        let stand = self.workers.values().filter(|seen| seen.standby_since.is_some() && !seen.leaves());
        let right = stand.filter(|seen| seen.fits(workers.share(), &self.settings, inside)).count();
        rule(right == usize::from(standby), "a wanted standby is ready at the share in force")?;
        rule(self.workers.len() == 1 + usize::from(standby), "no unneeded worker is left")
    }

    /// Checks the state after the model was stopped.
    pub(crate) fn ended(&mut self, workers: &Workers) -> Result<(), Violation> {
        rule(self.workers.is_empty() && workers.have_ended(), "all workers end when the model stops")?;
        rule(workers.due().is_none(), "nothing is due after the end")
    }
}
