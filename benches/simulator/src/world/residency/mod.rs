//! The sleep of models: the decisions about the models of each GPU. The decisions come from
//! [`shadowslice_policy::residency`], as in the supervisor.
//!
//! ```text
//! models (waiting requests, sleeps, wakes) ─▶ decide_residency ─▶ decide ─▶ models
//!                memory of the workers ───────────────┘
//! ```

mod memory;
#[cfg(test)]
mod tests;
mod weights;

use std::time::Duration;

use shadowslice_policy::residency::{ModelResidency, ResidencyDecision, decide};

pub(crate) use weights::SleepTally;
pub(super) use weights::WorldWeights;

use super::World;
use super::model::WorldModel;
use crate::scenario::{Scenario, SleepRule};
use crate::time::{at_ns, ns, timestamp};

/// The longest time between two decisions, as in the supervisor.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The flags that models set if a decision about sleep is due.
#[derive(Debug, Default)]
pub(super) struct SleepFlags {
    /// True if a decision is due.
    pub(super) is_due: bool,
    /// True if a model waits for memory. A decision is then due whenever a model becomes idle.
    pub(super) is_short: bool,
}

/// Returns the indices of the GPUs with models that may sleep.
pub(super) fn gpus_with_sleep(scenario: &Scenario) -> Vec<usize> {
    let sleeps = |gpu: &usize| {
        let mut models = scenario.models.iter();
        models.any(|model| model.terms.gpu == *gpu && model.sleep != SleepRule::Never)
    };
    (0..scenario.gpus.len()).filter(sleeps).collect()
}

impl World<'_> {
    /// Decides which models sleep and wake, if a decision is due. Repeats this until nothing changes.
    pub(super) fn decide_residency(&mut self) {
        if !self.shared.sleep.is_due {
            return;
        }
        let mut next = None;
        while std::mem::take(&mut self.shared.sleep.is_due) {
            let gpus = self.sleep_gpus.clone();
            let decisions: Vec<ResidencyDecision> =
                gpus.into_iter().map(|gpu| self.decide_residency_on(gpu)).collect();
            self.shared.sleep.is_short = decisions.iter().any(|decision| decision.is_short);
            next = decisions.iter().filter_map(|decision| decision.next).min();
        }
        let check = self.now.saturating_add(ns(CHECK_INTERVAL));
        let due = next.map_or(check, |next| at_ns(next).min(check));
        self.shared.timers.set(self.residency_timer(), due);
    }

    fn decide_residency_on(&mut self, gpu: usize) -> ResidencyDecision {
        let Self { scenario, models, shared, now, .. } = self;
        let mut here: Vec<&mut WorldModel<'_>> =
            models.iter_mut().filter(|model| model.spec.terms.gpu == gpu).collect();
        let free = memory::free(scenario.memory[gpu], here.iter().map(|model| &**model));
        let states: Vec<ModelResidency> = here.iter_mut().map(|model| model.residency()).collect();
        let decision = decide(free, &states, timestamp(*now));
        for &(index, action) in &decision.actions {
            here[index].act_on_weights(action, *now, shared);
        }
        decision
    }
}
