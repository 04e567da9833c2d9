//! The adaptive policy: nothing until a model misses its SLO, then the least that helps, which is
//! later undone.
//!
//! ```text
//! seen ─▶ windows ─▶ short? ─ none ─▶ after a while: take the last step back, and see
//!                      │ a model
//!                      ▼
//!   refuse what cannot be in time ─▶ a step: its neighbours get fewer SMs ─▶ did it help? ─ no ─▶ take it back
//! ```
//!
//! A model is **short** when more of its requests miss than its percentile allows, by more than
//! chance. The first **step** on a GPU of three models or more gives each of them a part; every
//! other one gives the short model all that it may have, or lowers the shares of the lowest
//! priority that is a good part of what the GPU does, or that of a peer with slack. A step that
//! saves few requests, or costs other models too many, is taken back. The steps of a GPU are a
//! stack: the last one is undone first, once no model was short for some time. The pauses before a
//! step is tried or taken back again become long after the first, until the load has changed: under
//! a steady load hardly anything moves.

mod gpu;
mod load;
mod steps;
#[cfg(test)]
mod tests;
mod window;

use std::time::Duration;

use shadowslice_shared::units::{Moment, Sms};

use super::difference::Target;
use super::{Door, Facts, Missed, Terms, Why};
use gpu::GpuHistory;
use load::Load;
use steps::{ShareState, Step};
use window::Window;

/// If two batches of a model, one after the other, take less than this part of its SLO, it misses
/// for another reason than the time of its batches, unless its worker does not keep up.
const EXECUTES: f64 = 0.4;

/// A worker that executes for more than this part of the time while requests wait does not keep up.
const KEEPS_UP: f64 = 0.9;

#[derive(Debug, Clone)]
pub(super) struct Adaptive {
    models: Vec<ModelHistory>,
    gpus: Vec<GpuHistory>,
}

#[derive(Debug, Clone)]
struct ModelHistory {
    recent: Window,
    load: Load,
    /// The SMs that the model should have.
    share: Sms,
    /// Since when steps for the model's sake did not help, and how long it gets no further ones.
    helpless: Option<(Moment, Duration)>,
}

impl ModelHistory {
    fn is_helpless(&self, now: Moment) -> bool {
        self.helpless.is_some_and(|(since, span)| now.since(since) < span)
    }
}

impl Adaptive {
    pub(super) fn new(gpus: &[Sms], terms: &[Terms]) -> Self {
        let model = |terms: &Terms| {
            let sms = if terms.initial_given { terms.initial } else { gpus[terms.gpu] };
            ModelHistory {
                recent: Window::default(),
                load: Load::default(),
                share: terms.within(sms),
                helpless: None,
            }
        };
        Self { models: terms.iter().map(model).collect(), gpus: vec![GpuHistory::default(); gpus.len()] }
    }

    pub(super) fn shares(&self) -> Vec<Sms> {
        self.models.iter().map(|model| model.share).collect()
    }

    /// `place` says where each model was in the earlier policy.
    pub(super) fn remember(
        &mut self,
        earlier: &Self,
        gpu: usize,
        terms: &[Terms],
        place: impl Fn(usize) -> Option<usize>,
    ) {
        let here: Vec<usize> = (0..terms.len()).filter(|&model| terms[model].gpu == gpu).collect();
        for &model in &here {
            if let Some(known) = place(model).and_then(|place| earlier.models.get(place)) {
                self.models[model] = known.clone();
            }
        }
        let now = |then: usize| here.iter().copied().find(|&model| place(model) == Some(then));
        self.gpus[gpu] = earlier.gpus[gpu].renumbered(now);
    }

    pub(super) fn decide(&mut self, terms: &[Terms], facts: &Facts) -> Vec<Target> {
        for (model, live) in facts.models.iter().enumerate() {
            self.models[model].recent.add(&live.seen, facts.now);
            if self.models[model].load.add(live.seen.arrived, live.seen.span) {
                self.try_again(terms[model].gpu, terms);
            }
            if live.coming.is_some() || facts.now.since(live.since) < live.seen.span {
                self.learn_loads(terms[model].gpu, terms);
            }
        }
        for gpu in 0..self.gpus.len() {
            self.refuse(gpu, terms, facts);
            self.tend(gpu, terms, facts);
        }
        (0..terms.len()).map(|model| self.target(model, terms, facts)).collect()
    }

    fn target(&self, model: usize, terms: &[Terms], facts: &Facts) -> Target {
        let max_batch = terms[model].max_batch.max(1);
        let door = Door { max_batch, refuse_late: self.gpus[terms[model].gpu].refuses(facts.now) };
        Target { sms: self.models[model].share, door, why: self.why(model, terms, facts) }
    }

    fn why(&self, model: usize, terms: &[Terms], facts: &Facts) -> Why {
        let steps = &self.gpus[terms[model].gpu].steps;
        let moves =
            |step: &&Step| step.sake != model && step.changes.iter().any(|moved| moved.model == model);
        if let Some(step) = steps.iter().rev().find(moves) {
            let now = self.missed(step.sake, terms);
            return Why::MakesRoom { sake: step.sake, before: step.missed, now };
        }
        let missed = self.missed(model, terms);
        let ModelHistory { recent, helpless, .. } = &self.models[model];
        match helpless {
            _ if !recent.is_short(terms[model].may_miss()) => Why::Met(missed),
            Some((since, span)) if self.models[model].is_helpless(facts.now) => {
                Why::Helpless { missed, until: *since + *span }
            }
            _ if !self.may_be_helped(model, terms, facts) => {
                Why::NotItsBatches { missed, two_batches: recent.two_batches() }
            }
            _ => Why::Short { missed, steps: steps.iter().filter(|step| step.sake == model).count() },
        }
    }

    fn missed(&self, model: usize, terms: &[Terms]) -> Missed {
        Missed { part: self.models[model].recent.missed(), may: terms[model].may_miss() }
    }

    /// A model misses because of the time of its batches, or because its worker does not keep up.
    fn may_be_helped(&self, model: usize, terms: &[Terms], facts: &Facts) -> bool {
        let recent = &self.models[model].recent;
        let is_behind = facts.models[model].seen.queued > 0 && recent.busy() > KEEPS_UP;
        is_behind || recent.two_batches() >= terms[model].slo.mul_f64(EXECUTES)
    }

    fn is_short(&self, model: usize, terms: &[Terms]) -> bool {
        self.models[model].recent.is_short(terms[model].may_miss())
    }

    fn states(&self, terms: &[Terms]) -> Vec<ShareState> {
        let state = |model: usize| ShareState {
            share: self.models[model].share,
            makes_room: self.gpus[terms[model].gpu].makes_room(model),
            short: self.is_short(model, terms),
        };
        (0..terms.len()).map(state).collect()
    }
}
