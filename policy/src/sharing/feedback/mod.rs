//! Feedback: nothing until a model misses its SLO, then the least that helps, and that is taken back.
//!
//! ```text
//! seen ─▶ windows ─▶ who is short? ─ nobody ─▶ after a while: take the last step back, and see
//!                        │ a model
//!                        ▼
//!              a step: its neighbours get fewer SMs ─▶ did it help? ─ no ─▶ take it back, and leave it be for a while
//! ```
//!
//! A model is **short** when more of its requests miss than its percentile allows, by more than chance. A **step** lowers the caps
//! of those of one priority: first of the lowest whose batches are a good part of what keeps the short model waiting, then of peers
//! that have slack. What a step is worth is measured: where no fewer miss after it, it is taken back and not tried again for a
//! while. The steps of a GPU are a stack; what was done last is undone first, once nobody was short for some time, which
//! triples each time that it turns out to be too early.
//!
//! Caps of this policy overlap each other, so that what they leave free is free for those without one.

mod levers;
#[cfg(test)]
mod tests;
mod window;

use std::time::Duration;

use shadowslice_shared::units::{Moment, Sms};

use super::carry_out::{Target, towards};
use super::{Decision, Door, Facts, Seen, Terms};
use levers::{Step, next_step};
use window::{SPAN, Window};

/// What is seen of a step before it is judged: this long, and so many requests of the model that it is for, or [`SPAN`].
const SETTLES: Duration = Duration::from_millis(300);
const ENOUGH: u64 = 30;

/// A step helped if this part of what was missed before it is missed no more.
const HELPS: f64 = 0.2;

/// A step that is not in force by then is taken back.
const IN_FORCE_WITHIN: Duration = Duration::from_secs(30);

/// For how long nobody was short before a step is taken back: at first, how much longer after each time that it was too early, and
/// at most.
const PATIENCE: Duration = Duration::from_secs(5);
const LESS_PATIENT: u32 = 3;
const LONGEST: Duration = Duration::from_secs(600);

/// For how long a model turns late requests away after the last one.
const REFUSES: Duration = Duration::from_secs(2);

/// The policy's memory.
#[derive(Debug, Clone)]
pub(super) struct Feedback {
    models: Vec<Model>,
    gpus: Vec<Gpu>,
}

/// What is remembered of a model.
#[derive(Debug, Clone)]
pub(super) struct Model {
    recent: Window,
    /// The SMs that it should have.
    cap: Sms,
    /// Until when it turns late requests away.
    refuses_until: Moment,
    /// Since when steps for its sake are left be, and for how long.
    helpless: Option<(Moment, Duration)>,
}

/// What is remembered of a GPU.
#[derive(Debug, Clone)]
struct Gpu {
    /// What was done, the last at the end.
    steps: Vec<Step>,
    trial: Trial,
    calm_since: Moment,
    patience: Duration,
}

/// What is being found out about the last step.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Trial {
    /// Nothing.
    None,
    /// It is not in force yet.
    Coming { since: Moment, before: Before },
    /// Whether it helps.
    InForce { since: Moment, before: Before },
    /// It was taken back: whether that was too early.
    TakenBack { since: Moment },
}

/// How it was before the first of the steps that are on trial.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Before {
    /// The number of steps.
    steps: usize,
    /// The part of the model's requests that missed.
    missed: f64,
}

impl Feedback {
    pub(super) fn new(gpus: &[Sms], terms: &[Terms]) -> Self {
        let model = |terms: &Terms| Model {
            recent: Window::default(),
            cap: terms.within(gpus[terms.gpu]),
            refuses_until: Moment::default(),
            helpless: None,
        };
        let gpu =
            Gpu { steps: Vec::new(), trial: Trial::None, calm_since: Moment::default(), patience: PATIENCE };
        Self { models: terms.iter().map(model).collect(), gpus: vec![gpu; gpus.len()] }
    }

    /// The shares that models should have.
    pub(super) fn caps(&self) -> Vec<Sms> {
        self.models.iter().map(|model| model.cap).collect()
    }

    pub(super) fn decide(&mut self, terms: &[Terms], facts: &Facts) -> Decision {
        for (model, live) in self.models.iter_mut().zip(&facts.models) {
            model.recent.add(&live.seen, facts.now);
        }
        for gpu in 0..self.gpus.len() {
            self.tend(gpu, terms, facts);
        }
        for ((model, terms), live) in self.models.iter_mut().zip(terms).zip(&facts.models) {
            if model.recent.is_short(terms.may_miss()) && is_behind(&live.seen) || live.seen.refused > 0 {
                model.refuses_until = facts.now + REFUSES;
            }
        }
        let targets: Vec<Target> = (0..terms.len()).map(|model| self.target(model, terms, facts)).collect();
        towards(&targets, terms, facts)
    }

    fn target(&self, model: usize, terms: &[Terms], facts: &Facts) -> Target {
        let Model { cap, refuses_until, .. } = &self.models[model];
        let door = Door::open(terms[model].max_batch.max(1));
        Target { sms: *cap, door: Door { refuse_late: *refuses_until > facts.now, ..door } }
    }

    /// Judges the last step of a GPU, makes another one, or takes one back.
    fn tend(&mut self, gpu: usize, terms: &[Terms], facts: &Facts) {
        let now = facts.now;
        let shortest = self.shortest(gpu, terms, facts);
        let last = self.gpus[gpu].steps.last().map(|step| step.sake);
        let is_short = |model: usize| self.models[model].recent.is_short(terms[model].may_miss());
        if shortest.is_some() || last.is_some_and(is_short) {
            self.gpus[gpu].calm_since = now;
        }
        match self.gpus[gpu].trial {
            Trial::Coming { since, before } => {
                if self.is_in_force(gpu, facts) {
                    self.forget(gpu, terms);
                    self.gpus[gpu].trial = Trial::InForce { since: now, before };
                } else if now.since(since) > IN_FORCE_WITHIN {
                    self.take_back(gpu, before.steps, terms, now);
                }
            }
            Trial::InForce { since, before } => self.judge(gpu, since, before, terms, facts),
            Trial::TakenBack { since } => match shortest {
                Some((model, _)) if now.since(since) < 2 * SPAN => {
                    self.gpus[gpu].patience = (self.gpus[gpu].patience * LESS_PATIENT).min(LONGEST);
                    self.act(gpu, model, None, terms, facts);
                }
                _ if now.since(since) >= 2 * SPAN => self.gpus[gpu].trial = Trial::None,
                _ => {}
            },
            Trial::None => match shortest {
                Some((model, _)) => {
                    self.act(gpu, model, None, terms, facts);
                }
                None if now.since(self.gpus[gpu].calm_since) >= self.gpus[gpu].patience => {
                    self.relax(gpu, terms, now);
                }
                None => {}
            },
        }
    }

    /// The model of a GPU that is short and may be helped, of the highest priority and the one that misses most.
    fn shortest(&self, gpu: usize, terms: &[Terms], facts: &Facts) -> Option<(usize, f64)> {
        let on_it = (0..terms.len()).filter(|&model| terms[model].gpu == gpu);
        let short = on_it.filter(|&model| {
            let Model { recent, helpless, .. } = &self.models[model];
            let is_left = helpless.is_some_and(|(since, span)| facts.now.since(since) < span);
            recent.is_short(terms[model].may_miss())
                && !is_left
                && levers::may_help(&facts.models[model].seen, &terms[model])
        });
        let missed = short.map(|model| (model, self.models[model].recent.missed()));
        missed.max_by(|(one, a), (other, b)| {
            let priority = terms[*other].priority.cmp(&terms[*one].priority);
            priority.then(a.total_cmp(b))
        })
    }

    /// Makes a step for the sake of a model, if there is one to make, on trial with those since `before`. Whether there was one.
    fn act(
        &mut self,
        gpu: usize,
        model: usize,
        before: Option<Before>,
        terms: &[Terms],
        facts: &Facts,
    ) -> bool {
        let missed = self.models[model].recent.missed();
        let short: Vec<bool> = self
            .models
            .iter()
            .zip(terms)
            .map(|(model, terms)| model.recent.is_short(terms.may_miss()))
            .collect();
        let Some(step) = next_step(model, missed, &self.caps(), &short, terms, facts) else {
            self.give_up(model, facts.now);
            self.gpus[gpu].trial = Trial::None;
            return false;
        };
        for change in &step.changes {
            self.models[change.model].cap = change.to;
        }
        let before = before.unwrap_or(Before { steps: self.gpus[gpu].steps.len(), missed });
        self.gpus[gpu].steps.push(step);
        self.gpus[gpu].trial = Trial::Coming { since: facts.now, before };
        true
    }

    fn is_in_force(&self, gpu: usize, facts: &Facts) -> bool {
        let Some(step) = self.gpus[gpu].steps.last() else { return true };
        step.changes.iter().all(|change| {
            let live = &facts.models[change.model];
            live.held || live.coming.is_none() && live.share != change.from && live.since <= facts.now
        })
    }

    /// Whether the last step helps the model that it is for, once enough is seen of it: else another one is made, and where there is
    /// none and few are helped by all, all are taken back.
    fn judge(&mut self, gpu: usize, since: Moment, before: Before, terms: &[Terms], facts: &Facts) {
        let Some(step) = self.gpus[gpu].steps.last() else { return };
        let (model, age) = (step.sake, facts.now.since(since));
        let recent = &self.models[model].recent;
        if age < SETTLES || recent.ended() < ENOUGH && age < SPAN {
            return;
        }
        let missed = recent.missed();
        let harmed = step.changes.iter().any(|change| {
            let as_high = terms[change.model].priority <= terms[model].priority;
            as_high && self.models[change.model].recent.missed() >= before.missed
        });
        if harmed {
            let steps = self.gpus[gpu].steps.len() - 1;
            self.give_up(model, facts.now);
            self.take_back(gpu, steps, terms, facts.now);
            self.gpus[gpu].trial = Trial::None;
        } else if !recent.is_short(terms[model].may_miss()) {
            self.models[model].helpless = None;
            self.gpus[gpu].trial = Trial::None;
        } else if !self.act(gpu, model, Some(before), terms, facts) && missed > before.missed * (1.0 - HELPS)
        {
            self.take_back(gpu, before.steps, terms, facts.now);
            self.gpus[gpu].trial = Trial::None;
        }
    }

    /// Leaves a model be for a while, and each time for longer.
    fn give_up(&mut self, model: usize, now: Moment) {
        let span = self.models[model].helpless.map_or(PATIENCE, |(_, span)| span * LESS_PATIENT);
        self.models[model].helpless = Some((now, span.min(LONGEST)));
    }

    /// Nobody was short for long: takes the last step back, and sees.
    fn relax(&mut self, gpu: usize, terms: &[Terms], now: Moment) {
        match self.gpus[gpu].steps.len().checked_sub(1) {
            Some(steps) => self.take_back(gpu, steps, terms, now),
            None => self.gpus[gpu].patience = PATIENCE,
        }
        self.gpus[gpu].calm_since = now;
    }

    /// Takes all steps but so many back.
    fn take_back(&mut self, gpu: usize, steps: usize, terms: &[Terms], now: Moment) {
        let back = self.gpus[gpu].steps.split_off(steps);
        for change in back.iter().rev().flat_map(|step| &step.changes) {
            self.models[change.model].cap = change.from;
        }
        self.forget(gpu, terms);
        self.gpus[gpu].trial = Trial::TakenBack { since: now };
    }

    /// What was seen under other caps says nothing of these.
    fn forget(&mut self, gpu: usize, terms: &[Terms]) {
        let on_it = self.models.iter_mut().zip(terms).filter(|(_, terms)| terms.gpu == gpu);
        on_it.for_each(|(model, _)| model.recent.clear());
    }
}

/// Whether its worker does not keep up with what comes, so that requests wait.
fn is_behind(seen: &Seen) -> bool {
    seen.queued > 0 && seen.busy > 0.9
}
