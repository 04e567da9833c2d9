//! One GPU: which steps were made there, and what is being found out about the last step.

use std::collections::BTreeSet;
use std::time::Duration;

use shadowslice_shared::units::Moment;

use super::super::{Facts, Terms};
use super::load::Load;
use super::steps::{Moved, Step, next_step};
use super::window::SPAN;
use super::{Adaptive, ModelHistory};

/// A step is judged after this time, and after so many requests of its model, or [`SPAN`].
const SETTLES: Duration = Duration::from_millis(300);
const ENOUGH: u64 = 30;

/// Of the former misses, this part must be gone.
const HELPS: f64 = 0.2;

/// A request is worth so many of the next lower priority.
const WORTH: f64 = 2.0;

/// A step does harm if the worth of what misses rises by this part and by so many standard
/// deviations.
const HARMS: f64 = 0.01;
const DEVIATIONS: f64 = 2.0;

/// Else a step is taken back.
const IN_FORCE_WITHIN: Duration = Duration::from_secs(30);

/// Requests that cannot be in time are refused for so long after a model was short.
const REFUSES: Duration = Duration::from_secs(2);

/// How long no model must be short before a step is taken back, and how long a model gets no steps
/// after steps did not help: at first, and each time after that. The longer time also keeps a
/// harmful step from being made again.
const PATIENCE: Duration = Duration::from_secs(10);
const LONG_PATIENCE: Duration = Duration::from_secs(600);

/// A step was taken back too early if a model is short within this time.
const TOO_EARLY: Duration = Duration::from_secs(60);

#[derive(Debug, Clone)]
pub(super) struct GpuHistory {
    pub(super) steps: Vec<Step>,
    trial: Trial,
    /// Changes that did harm, and when that was found.
    harmful: Vec<(Moment, Vec<Moved>)>,
    refuses_until: Moment,
    calm_since: Moment,
    patience: Duration,
}

#[derive(Debug, Clone, PartialEq)]
enum Trial {
    None,
    Coming {
        since: Moment,
        before: Before,
    },
    /// The step is in force: does it help?
    InForce {
        since: Moment,
        before: Before,
    },
    /// The step was taken back: was that too early?
    TakenBack {
        since: Moment,
        step: Step,
    },
}

/// How it was before the first of the steps that are on trial.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Before {
    steps: usize,
    /// The part of the model's requests that missed.
    missed: f64,
    loss: Loss,
}

/// What is missed in a second: each request counts by its worth, which is 1 at the GPU's lowest
/// priority.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Loss {
    per_s: f64,
    variance: f64,
}

impl Loss {
    fn is_more_than(self, before: Self) -> bool {
        let chance = DEVIATIONS * (self.variance + before.variance).sqrt();
        self.per_s > before.per_s * (1.0 + HARMS) + chance
    }
}

impl Default for GpuHistory {
    fn default() -> Self {
        Self {
            steps: Vec::new(),
            trial: Trial::None,
            harmful: Vec::new(),
            refuses_until: Moment::default(),
            calm_since: Moment::default(),
            patience: PATIENCE,
        }
    }
}

impl GpuHistory {
    pub(super) fn refuses(&self, now: Moment) -> bool {
        now < self.refuses_until
    }

    /// The models have other numbers now.
    pub(super) fn renumbered(&self, now: impl Fn(usize) -> Option<usize>) -> Self {
        let mut gpu = self.clone();
        for step in &mut gpu.steps {
            step.sake = now(step.sake).unwrap_or(step.sake);
        }
        let steps = gpu.steps.iter_mut().map(|step| &mut step.changes);
        let harmful = gpu.harmful.iter_mut().map(|(_, changes)| changes);
        for moved in steps.chain(harmful).flatten() {
            moved.model = now(moved.model).unwrap_or(moved.model);
        }
        gpu
    }

    /// Whether a model has less for the sake of another model.
    pub(super) fn makes_room(&self, model: usize) -> bool {
        let moves = |step: &Step| step.sake != model && step.changes.iter().any(|moved| moved.model == model);
        self.steps.iter().any(moves)
    }

    fn is_in_force(&self, facts: &Facts) -> bool {
        let Some(step) = self.steps.last() else { return true };
        step.changes.iter().all(|moved| {
            let live = &facts.models[moved.model];
            live.held || live.coming.is_none() && live.share != moved.from
        })
    }
}

impl Adaptive {
    /// While a model of a GPU is short, and a while longer, all its models refuse requests that
    /// cannot be in time: the time spent on those is taken from other requests. No step is made
    /// before it is seen whether that helps.
    pub(super) fn refuse(&mut self, gpu: usize, terms: &[Terms], facts: &Facts) {
        let is_short = |model: usize| self.is_short(model, terms) && self.may_be_helped(model, terms, facts);
        if (0..terms.len()).any(|model| terms[model].gpu == gpu && is_short(model)) {
            if !self.gpus[gpu].refuses(facts.now) {
                self.forget(gpu, terms);
            }
            self.gpus[gpu].refuses_until = facts.now + REFUSES;
        }
    }

    pub(super) fn tend(&mut self, gpu: usize, terms: &[Terms], facts: &Facts) {
        let now = facts.now;
        let shortest = self.shortest(gpu, terms, facts);
        let last = self.gpus[gpu].steps.last().map(|step| step.sake);
        if shortest.is_some() || last.is_some_and(|sake| self.is_short(sake, terms)) {
            self.gpus[gpu].calm_since = now;
        }
        match self.gpus[gpu].trial.clone() {
            Trial::Coming { since, before } => {
                if self.gpus[gpu].is_in_force(facts) {
                    self.forget(gpu, terms);
                    self.gpus[gpu].calm_since = now;
                    self.gpus[gpu].trial = Trial::InForce { since: now, before };
                } else if now.since(since) > IN_FORCE_WITHIN {
                    self.take_back(gpu, before.steps, terms);
                    self.gpus[gpu].trial = Trial::None;
                }
            }
            Trial::InForce { since, before } => self.judge(gpu, since, before, terms, facts),
            Trial::TakenBack { step, .. } if shortest.is_some() => {
                self.gpus[gpu].patience = LONG_PATIENCE;
                self.gpus[gpu].trial = Trial::None;
                self.make(gpu, step);
                self.forget(gpu, terms);
            }
            Trial::TakenBack { since, .. } => {
                if now.since(since) >= TOO_EARLY {
                    self.gpus[gpu].trial = Trial::None;
                }
                self.relax(gpu, terms, now);
            }
            Trial::None => match shortest {
                Some(model) => {
                    self.act(gpu, model, None, terms, facts);
                }
                None => self.relax(gpu, terms, now),
            },
        }
    }

    /// The model that is short and may be helped: the highest priority first, then the most misses.
    fn shortest(&self, gpu: usize, terms: &[Terms], facts: &Facts) -> Option<usize> {
        let short = (0..terms.len()).filter(|&model| {
            terms[model].gpu == gpu
                && self.is_short(model, terms)
                && !self.models[model].is_helpless(facts.now)
                && self.may_be_helped(model, terms, facts)
        });
        let missed = |model: usize| self.models[model].recent.missed();
        short.max_by(|&one, &other| {
            let priority = terms[other].priority.cmp(&terms[one].priority);
            priority.then(missed(one).total_cmp(&missed(other)))
        })
    }

    /// Makes a step for the sake of a model, on trial with those since `before`. Returns whether
    /// there was a step to make.
    fn act(
        &mut self,
        gpu: usize,
        model: usize,
        before: Option<Before>,
        terms: &[Terms],
        facts: &Facts,
    ) -> bool {
        let missed = self.models[model].recent.missed();
        self.gpus[gpu].harmful.retain(|(since, _)| facts.now.since(*since) < LONG_PATIENCE);
        let may = |changes: &Vec<Moved>| self.gpus[gpu].harmful.iter().all(|(_, harmful)| harmful != changes);
        let Some(step) = next_step(model, missed, &self.states(terms), terms, facts, may) else {
            self.give_up(model, facts.now);
            self.gpus[gpu].trial = Trial::None;
            return false;
        };
        let loss = self.loss(gpu, terms);
        let (steps, missed) =
            before.map_or((self.gpus[gpu].steps.len(), missed), |before| (before.steps, before.missed));
        let before = Before { steps, missed, loss };
        self.make(gpu, step);
        self.gpus[gpu].trial = Trial::Coming { since: facts.now, before };
        true
    }

    fn make(&mut self, gpu: usize, step: Step) {
        for moved in &step.changes {
            self.models[moved.model].share = moved.to;
        }
        self.gpus[gpu].steps.push(step);
    }

    fn loss(&self, gpu: usize, terms: &[Terms]) -> Loss {
        let on_it = || self.models.iter().zip(terms).filter(|(_, of)| of.gpu == gpu);
        let priorities: BTreeSet<u32> = on_it().map(|(_, of)| of.priority).collect();
        let worth = |of: &Terms| WORTH.powi(priorities.range(of.priority + 1..).count() as i32);
        on_it().fold(Loss { per_s: 0.0, variance: 0.0 }, |Loss { per_s, variance }, (model, of)| {
            let ((missed, chance), worth) = (model.recent.missed_per_s(), worth(of));
            Loss { per_s: per_s + worth * missed, variance: variance + worth * worth * chance }
        })
    }

    /// Once enough was seen. If the step does not help, another one is made; if none is left and
    /// all together helped little, all are taken back.
    fn judge(&mut self, gpu: usize, since: Moment, before: Before, terms: &[Terms], facts: &Facts) {
        let Some(step) = self.gpus[gpu].steps.last() else { return };
        let (model, age) = (step.sake, facts.now.since(since));
        let recent = &self.models[model].recent;
        if age < SETTLES || recent.ended() < ENOUGH && age < SPAN {
            return;
        }
        let missed = recent.missed();
        if self.loss(gpu, terms).is_more_than(before.loss) {
            let steps = self.gpus[gpu].steps.len() - 1;
            let harmful = self.gpus[gpu].steps[steps].changes.clone();
            self.gpus[gpu].harmful.push((facts.now, harmful));
            self.give_up(model, facts.now);
            self.take_back(gpu, steps, terms);
            self.gpus[gpu].trial = Trial::None;
        } else if !self.is_short(model, terms) {
            self.models[model].helpless = None;
            self.gpus[gpu].trial = Trial::None;
        } else if !self.act(gpu, model, Some(before), terms, facts) && missed > before.missed * (1.0 - HELPS)
        {
            self.take_back(gpu, before.steps, terms);
            self.gpus[gpu].trial = Trial::None;
        }
    }

    /// Makes no steps for a model for a while, longer from the second time on.
    fn give_up(&mut self, model: usize, now: Moment) {
        let span = self.models[model].helpless.map_or(PATIENCE, |_| LONG_PATIENCE);
        self.models[model].helpless = Some((now, span));
    }

    /// The load has changed: what was found out under the former load does not hold.
    pub(super) fn try_again(&mut self, gpu: usize, terms: &[Terms]) {
        self.gpus[gpu].patience = PATIENCE;
        self.gpus[gpu].harmful.clear();
        self.on_gpu(gpu, terms).for_each(|model| model.helpless = None);
        self.learn_loads(gpu, terms);
    }

    /// The requests from now on are the load that later loads are compared with: after a change of
    /// shares, clients that wait for each answer send requests at another pace.
    pub(super) fn learn_loads(&mut self, gpu: usize, terms: &[Terms]) {
        self.on_gpu(gpu, terms).for_each(|model| model.load = Load::default());
    }

    fn on_gpu<'m>(
        &'m mut self,
        gpu: usize,
        terms: &'m [Terms],
    ) -> impl Iterator<Item = &'m mut ModelHistory> {
        let models = self.models.iter_mut().zip(terms);
        models.filter(move |(_, terms)| terms.gpu == gpu).map(|(model, _)| model)
    }

    /// Takes the last step back if no model was short for long, and then watches.
    fn relax(&mut self, gpu: usize, terms: &[Terms], now: Moment) {
        if now.since(self.gpus[gpu].calm_since) < self.gpus[gpu].patience {
            return;
        }
        match self.gpus[gpu].steps.last().cloned() {
            Some(step) => {
                self.take_back(gpu, self.gpus[gpu].steps.len() - 1, terms);
                self.gpus[gpu].trial = Trial::TakenBack { since: now, step };
            }
            None => self.gpus[gpu].patience = PATIENCE,
        }
        self.gpus[gpu].calm_since = now;
    }

    /// All but the first so many.
    fn take_back(&mut self, gpu: usize, steps: usize, terms: &[Terms]) {
        let back = self.gpus[gpu].steps.split_off(steps);
        for moved in back.iter().rev().flat_map(|step| &step.changes) {
            self.models[moved.model].share = moved.from;
        }
        self.forget(gpu, terms);
    }

    /// What was seen under other shares says nothing of these shares.
    fn forget(&mut self, gpu: usize, terms: &[Terms]) {
        self.on_gpu(gpu, terms).for_each(|model| model.recent.clear());
    }
}
