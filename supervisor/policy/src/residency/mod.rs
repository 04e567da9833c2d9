//! Decides which models of a GPU sleep and which wake. A model that sleeps has released its weights on
//! the GPU. The GPU's memory is a budget for the weights of the models that are awake.
//!
//! ```text
//! models, free memory ─▶ decide ─▶ Sleep, Wake
//! ```
//!
//! Memory becomes free only when a worker has reported that its model sleeps. Until then, a model that
//! needs this memory waits, and a later call wakes it.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::time::Duration;

use shadowslice_shared::units::Timestamp;

/// The multiple of its wake time for which a model with waiting requests stays awake before it yields to
/// another model. At least this multiple of the time that is spent on copies is thus used for batches.
const MIN_AWAKE_WAKES: u32 = 4;

/// A model on the GPU, as far as it decides about sleep. All memory is in bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelResidency {
    /// The priority. 1 is the highest.
    pub priority: u32,
    /// The memory that the model releases while it sleeps.
    pub bytes: u64,
    /// The time that the model needs to wake.
    pub wake_time: Duration,
    /// The state of the model's weights.
    pub state: WeightsState,
    /// The time without requests after which the model sleeps, or `None` if it sleeps only when memory
    /// runs short.
    pub sleep_after: Option<Duration>,
}

/// The state of a model's weights.
#[derive(Debug, Clone, PartialEq)]
pub enum WeightsState {
    /// The weights are on the GPU.
    Awake {
        /// The time since which they are.
        since: Timestamp,
        /// The time of the last request.
        used: Timestamp,
        /// The requests of the model.
        load: AwakeLoad,
    },
    /// The model must stay awake, or is waking or falling asleep, so its memory is in use.
    InUse {
        /// True if the memory will become free without a further decision.
        leaves: bool,
    },
    /// The weights are not on the GPU.
    Asleep {
        /// The earliest deadline of the requests that wait for the model, but not before the time of
        /// [`ResidencyAction::Interrupt`]. `None` if no requests wait.
        wanted: Option<Timestamp>,
    },
}

/// The requests of a model that is awake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AwakeLoad {
    /// No request waits or executes.
    Idle,
    /// Requests wait or execute. All that waited for the last wake have their answers.
    Busy,
    /// Requests that waited for the last wake have no answers yet.
    Owing,
}

/// A decision about one model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResidencyAction {
    /// The model sleeps because no request has arrived for some time.
    SleepIdle,
    /// The model, which is idle, sleeps because others need its memory.
    SleepForOthers,
    /// The model sleeps although requests wait for it, because others have waited for longer.
    Interrupt {
        /// The deadline behind which the model must wait for its own wake. Otherwise, it could wake before
        /// the model that it yields to.
        behind: Timestamp,
    },
    /// The model wakes.
    Wake,
}

/// The decisions about the models of a GPU.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ResidencyDecision {
    /// The actions, each with the index of its model.
    pub actions: Vec<(usize, ResidencyAction)>,
    /// True if a model waits for memory. The next decision is then due when a model becomes idle.
    pub is_short: bool,
    /// The time of the next decision, unless a model changes earlier.
    pub next: Option<Timestamp>,
}

/// Decides which models sleep and wake. `free` is the part of the budget that no model uses. It is
/// negative if the models use more than the budget.
pub fn decide(free: i128, models: &[ModelResidency], now: Timestamp) -> ResidencyDecision {
    let mut decision = Decider { models, now, free, leaving: 0, decision: ResidencyDecision::default() };
    decision.leaving =
        models.iter().filter(|model| model.leaves()).map(|model| i128::from(model.bytes)).sum();
    decision.sleep_idle();
    decision.shrink();
    decision.wake();
    decision.decision
}

/// Returns the deadline of the wake for requests of this deadline. `behind` is that of
/// [`ResidencyAction::Interrupt`], if the model was interrupted.
pub fn wanted_by(deadline: Timestamp, behind: Option<Timestamp>) -> Timestamp {
    let after = behind.map(|behind| behind + Duration::from_nanos(1));
    after.map_or(deadline, |after| deadline.max(after))
}

impl ModelResidency {
    fn leaves(&self) -> bool {
        self.state == WeightsState::InUse { leaves: true }
    }
}

/// The state of a decision in progress.
struct Decider<'m> {
    models: &'m [ModelResidency],
    now: Timestamp,
    free: i128,
    /// The memory that becomes free when all models that fall asleep have done so.
    leaving: i128,
    decision: ResidencyDecision,
}

impl Decider<'_> {
    /// Puts models to sleep that had no request for their configured time.
    fn sleep_idle(&mut self) {
        for (index, model) in self.models.iter().enumerate() {
            let (WeightsState::Awake { since, used, load: AwakeLoad::Idle }, Some(after)) =
                (&model.state, model.sleep_after)
            else {
                continue;
            };
            let due = (*since).max(*used) + after;
            if due <= self.now {
                self.sleep(index, ResidencyAction::SleepIdle);
            } else {
                self.check_at(due);
            }
        }
    }

    /// Puts models to sleep until the others fit into the budget.
    fn shrink(&mut self) {
        if self.free + self.leaving < 0 {
            let victims = self.victims(|_| false);
            self.sleep_until(0, &victims, self.now);
            self.decision.is_short |= self.free + self.leaving < 0;
        }
    }

    /// Wakes models for which requests wait, by priority and deadline. If a model does not fit, puts
    /// others to sleep first.
    fn wake(&mut self) {
        let wanted = |(index, model): (usize, &ModelResidency)| match model.state {
            WeightsState::Asleep { wanted: Some(deadline) } => Some((model.priority, deadline, index)),
            _ => None,
        };
        let mut waiting: Vec<_> = self.models.iter().enumerate().filter_map(wanted).collect();
        waiting.sort_unstable();
        let asleep = |model: &&ModelResidency| matches!(model.state, WeightsState::Asleep { .. });
        let in_use = self.models.iter().filter(|model| !asleep(model));
        let most = self.free + in_use.map(|model| i128::from(model.bytes)).sum::<i128>();
        for (priority, deadline, index) in waiting {
            let bytes = i128::from(self.models[index].bytes);
            if bytes > most {
                // The model would not fit even if all others slept, so no other model waits for it.
                continue;
            }
            if bytes <= self.free {
                self.free -= bytes;
                self.decision.actions.push((index, ResidencyAction::Wake));
                continue;
            }
            if bytes > self.free + self.leaving {
                let victims = self.victims(|model| model.priority >= priority);
                self.sleep_until(bytes, &victims, deadline);
            }
            // Models that come later wait too. Otherwise, small models could delay a large one for ever.
            self.free -= bytes;
            self.decision.is_short = true;
            if self.free + self.leaving < 0 {
                return;
            }
        }
    }

    /// Returns the models that can sleep, in the order in which they should. Idle models come first. A
    /// busy model that `may_interrupt` selects can also sleep, once it has been awake for long enough and
    /// has answered the requests that waited for its wake.
    fn victims(&mut self, may_interrupt: impl Fn(&ModelResidency) -> bool) -> Vec<usize> {
        let mut victims = Vec::new();
        for (index, model) in self.models.iter().enumerate() {
            let WeightsState::Awake { since, used, load } = model.state else { continue };
            if self.decision.actions.iter().any(|(chosen, _)| *chosen == index) {
                continue;
            }
            let served = since + model.wake_time.saturating_mul(MIN_AWAKE_WAKES);
            match load {
                AwakeLoad::Idle => {}
                AwakeLoad::Busy if may_interrupt(model) && served <= self.now => {}
                AwakeLoad::Busy if may_interrupt(model) => {
                    self.check_at(served);
                    continue;
                }
                AwakeLoad::Busy | AwakeLoad::Owing => continue,
            }
            victims.push((load != AwakeLoad::Idle, Reverse(model.priority), used, index));
        }
        victims.sort_unstable();
        victims.into_iter().map(|(.., index)| index).collect()
    }

    /// Puts the first of these models to sleep, until `bytes` will be free for a model with requests of this
    /// deadline.
    fn sleep_until(&mut self, bytes: i128, victims: &[usize], deadline: Timestamp) {
        for &victim in victims {
            if self.free + self.leaving >= bytes {
                return;
            }
            let action = match self.models[victim].state {
                WeightsState::Awake { load: AwakeLoad::Idle, .. } => ResidencyAction::SleepForOthers,
                _ => ResidencyAction::Interrupt { behind: deadline },
            };
            self.sleep(victim, action);
        }
    }

    fn sleep(&mut self, index: usize, action: ResidencyAction) {
        self.leaving += i128::from(self.models[index].bytes);
        self.decision.actions.push((index, action));
    }

    fn check_at(&mut self, time: Timestamp) {
        self.decision.next = Some(self.decision.next.map_or(time, |next| next.min(time)));
    }
}
