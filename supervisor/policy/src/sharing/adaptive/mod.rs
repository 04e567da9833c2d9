//! The adaptive policy: plain MPS until a model violates its objective, then the layout of the GPU
//! that misses least.
//!
//! ```text
//! what was seen ─▶ windows ─▶ a model violates its objective? ─ no, for a while ─▶ as at rest, on trial
//!                                   │ yes
//!                                   ▼
//!        refuse what cannot be in time ─ not enough ─▶ try the layouts, measure each, keep the best
//! ```
//!
//! A model **violates** its objective when more of its requests miss than its percentile allows, by
//! more than chance. A [`layout`] says which part of the GPU each model may use. A [`trial`] puts
//! layouts in force one after the other and compares what was missed ([`score`]). The pauses before
//! another trial or another return to rest become long after the first, until the load has changed,
//! so that hardly anything moves under a steady load.

mod forecast;
mod gpu;
mod score;
#[cfg(test)]
mod tests;
mod trial;
mod window;

use std::time::Duration;

use shadowslice_shared::contention::SharedGpu;
use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::Sms;

use super::difference::Target;
use super::layout::{Layout, Pattern, Placement, Tenant, candidates};
use super::plan::{LayoutReport, LayoutStage, Tried};
use super::{Door, Facts, Live, Missed, Terms, Why};
use forecast::{Demand, KEEPS_UP, forecast};
use gpu::{GpuLook, GpuState, MUCH_WORSE, Outcome, Settled, Stage};
use score::{Misses, Score};
use trial::{Look, Pace, Trial};
use window::{LONG, SPAN, Window};

/// If two batches of a model, one after the other, take less than this part of its objective, it
/// misses for another reason than the time of its batches, unless its worker does not keep up.
const EXECUTES: f64 = 0.4;

/// The layouts that are tried beside the present one, the best of the forecast: more would take
/// longer than a load often lasts.
const TRIED: usize = 4;

/// The layouts that are tried where every share changes by a shadow, which takes seconds. Where some
/// do, the others are moved first, and then one such layout is tried.
const BY_SHADOWS: usize = 2;

#[derive(Debug, Clone)]
pub(super) struct Adaptive {
    windows: Vec<Window>,
    gpus: Vec<GpuState>,
    shapes: Vec<SharedGpu>,
}

impl Adaptive {
    pub(super) fn new(shapes: &[SharedGpu], terms: &[Terms]) -> Self {
        Self {
            windows: vec![Window::default(); terms.len()],
            gpus: vec![GpuState::default(); shapes.len()],
            shapes: shapes.to_vec(),
        }
    }

    /// Returns the SMs that each model should have now, in the models' order.
    pub(super) fn shares(&self, terms: &[Terms]) -> Vec<Sms> {
        (0..terms.len()).map(|model| self.placement(model, terms, true).sms).collect()
    }

    /// `place` says where each model was in the earlier policy.
    pub(super) fn remember(
        &mut self,
        earlier: &Self,
        gpu: usize,
        terms: &[Terms],
        place: impl Fn(usize) -> Option<usize>,
    ) {
        let here: Vec<usize> = on_gpu(gpu, terms).collect();
        for &model in &here {
            if let Some(known) = place(model).and_then(|place| earlier.windows.get(place)) {
                self.windows[model] = known.clone();
            }
        }
        let now = |then: usize| here.iter().copied().find(|&model| place(model) == Some(then));
        self.gpus[gpu] = earlier.gpus[gpu].renumbered(now);
    }

    pub(super) fn decide(&mut self, terms: &[Terms], facts: &Facts) -> Vec<Target> {
        for (model, live) in facts.models.iter().enumerate() {
            self.windows[model].add(&live.seen, facts.now);
        }
        for gpu in 0..self.gpus.len() {
            self.tend(gpu, terms, facts);
        }
        (0..terms.len()).map(|model| self.target(model, terms, facts)).collect()
    }

    fn tend(&mut self, gpu: usize, terms: &[Terms], facts: &Facts) {
        let violating = self.most_important(gpu, terms, facts);
        if self.gpus[gpu].admit(violating.is_some(), facts.now) {
            self.forget(gpu, terms);
        }
        let seen = self.look(gpu, violating, terms, facts);
        let shape = &self.shapes[gpu];
        let present = self.gpus[gpu].layout().cloned().unwrap_or(Layout::AT_REST);
        let list = || {
            let all = tenants(&self.windows, gpu, shape, terms, facts);
            let beneficiary = violating.and_then(|model| all.iter().find(|tenant| tenant.model == model));
            let at_once = |tenant: &&Tenant| !changes_by_shadow(&facts.models[tenant.model]);
            let quick: Vec<Tenant> = all.iter().filter(at_once).copied().collect();
            let demands = demands(&self.windows, &all, terms, facts);
            let layouts = candidates(&quick, &all, beneficiary.copied());
            let mut list = shortlist(layouts, demands.as_deref(), (&present, seen.recent.loss()), shape);
            let rests_with_less = |model: usize| {
                let terms = &terms[model];
                Placement::at_rest(terms, shape).sms < terms.most()
            };
            if on_gpu(gpu, terms).any(rests_with_less) {
                list.insert(0, Layout::EVERYTHING);
            }
            list.truncate(TRIED);
            // A switch by a shadow takes seconds, which cost more than a few misses.
            if quick.len() < all.len() && seen.recent.loss() > MUCH_WORSE {
                let slow = candidates(&all, &all, beneficiary.copied()).into_iter();
                list.extend(slow.take(if quick.is_empty() { BY_SHADOWS } else { 1 }));
            }
            list
        };
        if self.gpus[gpu].tend(&seen, list) == Outcome::Forget {
            self.forget(gpu, terms);
        }
    }

    /// Returns the model that violates its objective and may be helped: the highest priority first,
    /// then the most misses.
    fn most_important(&self, gpu: usize, terms: &[Terms], facts: &Facts) -> Option<usize> {
        let missed = |model: usize| self.windows[model].missed();
        let violating = on_gpu(gpu, terms)
            .filter(|&model| self.is_violating(model, terms) && self.may_be_helped(model, terms, facts));
        violating.max_by(|&one, &other| {
            let priority = terms[other].priority.cmp(&terms[one].priority);
            priority.then(missed(one).total_cmp(&missed(other)))
        })
    }

    fn look(&self, gpu: usize, violating: Option<usize>, terms: &[Terms], facts: &Facts) -> GpuLook {
        let here = || on_gpu(gpu, terms);
        let mut priorities: Vec<u32> = here().map(|model| terms[model].priority).collect();
        priorities.sort_unstable();
        priorities.dedup();
        let level = |model: usize| priorities.binary_search(&terms[model].priority).unwrap_or(0);
        let blank = Score::new(priorities.len());
        let (mut misses, mut recent, mut last) = (blank.clone(), blank.clone(), blank);
        for model in here().filter(|&model| !is_hopeless(&terms[model], &facts.models[model])) {
            let seen = &facts.models[model].seen;
            let ended = Misses { ended: seen.answered + seen.refused, missed: seen.missed() };
            misses.add(level(model), ended);
            recent.add(level(model), self.windows[model].misses(LONG));
            last.add(level(model), self.windows[model].misses(SPAN));
        }
        let keeps = |model: usize| {
            is_hopeless(&terms[model], &facts.models[model])
                || self.windows[model].keeps(terms[model].may_miss())
        };
        let load = |over| here().map(|model| (model, self.windows[model].rate(over))).collect();
        let is_known = here().all(|model| self.windows[model].is_full());
        let slow = here().any(|model| changes_by_shadow(&facts.models[model]));
        let pace = if slow { Pace::Slow } else { Pace::AtOnce };
        let in_force = here().all(|model| self.is_in_force(model, terms, facts));
        let longest_slo = here().map(|model| terms[model].slo).max().unwrap_or_default();
        let all_keep = here().all(keeps);
        let look = Look { now: facts.now, in_force, misses, all_keep, longest_slo };
        let usual = is_known.then(|| load(LONG));
        GpuLook { look, violating, recent, last, load: load(SPAN), usual, pace }
    }

    fn target(&self, model: usize, terms: &[Terms], facts: &Facts) -> Target {
        let gpu = terms[model].gpu;
        let max_batch = terms[model].max_batch.max(1);
        let door = Door { max_batch, refuse_late: self.gpus[gpu].refuses(facts.now) };
        let inside = facts.models[model].groups.is_some();
        let Placement { sms, groups } = self.placement(model, terms, inside);
        Target { sms, groups, door, why: self.why(model, terms, facts) }
    }

    /// `inside`: the share is a partition inside the worker.
    fn placement(&self, model: usize, terms: &[Terms], inside: bool) -> Placement {
        let gpu = terms[model].gpu;
        let (terms, shape) = (&terms[model], &self.shapes[gpu]);
        match self.gpus[gpu].layout() {
            Some(layout) => layout.placement(model, terms, shape, inside),
            None => Placement::at_rest(terms, shape),
        }
    }

    fn is_in_force(&self, model: usize, terms: &[Terms], facts: &Facts) -> bool {
        let live = &facts.models[model];
        let Placement { sms, groups } = self.placement(model, terms, live.groups.is_some());
        let there = live.coming.is_none() && live.share == sms;
        let placed = groups.is_none_or(|groups| live.groups == Some(groups) || groups_differ(&groups, live));
        live.held || there && placed
    }

    fn why(&self, model: usize, terms: &[Terms], facts: &Facts) -> Why {
        let missed = Missed { part: self.windows[model].missed(), may: terms[model].may_miss() };
        let report = |pattern: Pattern, trial: &Trial, stage: LayoutStage| {
            let tried = |(pattern, score): (Pattern, Score)| Tried {
                pattern,
                missed: score.total().part(),
                of_first_priority: score.first().part(),
            };
            let tried = trial.tried().into_iter().map(tried).collect();
            Why::Layout(LayoutReport { stage, pattern, beneficiary: trial.beneficiary, missed, tried })
        };
        match &self.gpus[terms[model].gpu].stage {
            Stage::Trying { trial, .. } => report(trial.layout().pattern, trial, LayoutStage::Trying),
            Stage::Settled(Settled { layout, trial, .. }) => {
                report(layout.pattern, trial, LayoutStage::Chosen)
            }
            Stage::AtRest => self.why_at_rest(model, missed, terms, facts),
        }
    }

    fn why_at_rest(&self, model: usize, missed: Missed, terms: &[Terms], facts: &Facts) -> Why {
        let live = &facts.models[model];
        match two_batches_alone(live) {
            Some(two_batches) if is_hopeless(&terms[model], live) => {
                Why::CannotBeKept { missed, two_batches }
            }
            _ if !self.is_violating(model, terms) => Why::Met(missed),
            _ if !self.may_be_helped(model, terms, facts) => {
                let two_batches = self.windows[model].two_batches();
                Why::NotItsBatches { missed, two_batches }
            }
            _ => Why::Violating(missed),
        }
    }

    /// A model misses because of the time of its batches, or because its worker does not keep up;
    /// and it could keep its objective alone on the GPU.
    fn may_be_helped(&self, model: usize, terms: &[Terms], facts: &Facts) -> bool {
        let (recent, live) = (&self.windows[model], &facts.models[model]);
        let is_behind = live.seen.queued > 0 && recent.busy() > KEEPS_UP;
        let takes_long = recent.two_batches() >= terms[model].slo.mul_f64(EXECUTES);
        (is_behind || takes_long) && !is_hopeless(&terms[model], live)
    }

    fn is_violating(&self, model: usize, terms: &[Terms]) -> bool {
        self.windows[model].is_violating(terms[model].may_miss())
    }

    /// What was seen under other conditions says nothing of these.
    fn forget(&mut self, gpu: usize, terms: &[Terms]) {
        on_gpu(gpu, terms).for_each(|model| self.windows[model].clear());
    }
}

fn on_gpu(gpu: usize, terms: &[Terms]) -> impl Iterator<Item = usize> {
    (0..terms.len()).filter(move |&model| terms[model].gpu == gpu)
}

/// Returns the models of a GPU whose shares may change.
fn tenants(windows: &[Window], gpu: usize, shape: &SharedGpu, terms: &[Terms], facts: &Facts) -> Vec<Tenant> {
    let sms = f64::from(shape.sms.0.max(1));
    let movable = on_gpu(gpu, terms).filter(|&model| !facts.models[model].held);
    let tenant = |model: usize| Tenant {
        model,
        priority: terms[model].priority,
        work: windows[model].busy() * f64::from(facts.models[model].share.0) / sms,
    };
    movable.map(tenant).collect()
}

/// Returns what each model asks of the GPU; `None` if it is not known of all how long their batches
/// take.
fn demands<'f>(
    windows: &[Window],
    tenants: &[Tenant],
    terms: &[Terms],
    facts: &'f Facts,
) -> Option<Vec<Demand<'f>>> {
    let demand = |tenant: &Tenant| {
        let (live, terms) = (&facts.models[tenant.model], &terms[tenant.model]);
        let rows = live.seen.rows as f64 / live.seen.arrived.max(1) as f64;
        Some(Demand {
            tenant: *tenant,
            rows_per_s: windows[tenant.model].rate(SPAN).per_s * rows.max(1.0),
            slo: terms.slo,
            max_batch: terms.max_batch.max(1),
            execution: live.execution.as_ref()?,
        })
    };
    tenants.iter().map(demand).collect()
}

/// Returns the layouts in the order of the trial: the first one of each pattern and, with a forecast,
/// the one with the lowest forecast loss.
///
/// If the gentlest pattern leaves the first priority the whole GPU, it comes first. The others follow
/// by forecast loss. A layout is left out if its forecast loss is above both the forecast and the
/// `missed` loss of the `present` layout.
fn shortlist(
    all: Vec<Layout>,
    demands: Option<&[Demand<'_>]>,
    (present, missed): (&Layout, f64),
    shape: &SharedGpu,
) -> Vec<Layout> {
    let mut firsts: Vec<Layout> = Vec::new();
    for layout in &all {
        if firsts.iter().all(|first| first.pattern != layout.pattern) {
            firsts.push(layout.clone());
        }
    }
    let Some(demands) = demands else { return firsts };
    let loss = |layout: &Layout| forecast(layout, demands, shape).loss();
    let gentle = firsts.first().is_some_and(|layout| !layout.confines_first());
    let mut list: Vec<Layout> = firsts.iter().take(usize::from(gentle)).cloned().collect();
    let bound = missed.max(loss(present));
    let mut ranked: Vec<(f64, Layout)> = all.into_iter().map(|layout| (loss(&layout), layout)).collect();
    ranked.retain(|(loss, layout)| *loss < bound && !list.contains(layout));
    ranked.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    let mut patterns = Vec::new();
    list.extend(ranked.into_iter().map(|(_, layout)| layout).filter(|layout| {
        let is_best = !patterns.contains(&layout.pattern);
        patterns.push(layout.pattern);
        is_best || firsts.contains(layout)
    }));
    list
}

fn changes_by_shadow(live: &Live) -> bool {
    live.groups.is_none() && !live.held
}

/// Bounds of the model's share keep it from having as many groups.
fn groups_differ(wanted: &Groups, live: &Live) -> bool {
    live.groups.is_some_and(|groups| groups.count() != wanted.count())
}

/// The time of two of the shortest batches alone on the whole GPU: a request may wait for one and is
/// in the next. Workers measure it beside neighbours that start, too, so what is seen counts where
/// that is less.
fn two_batches_alone(live: &Live) -> Option<Duration> {
    let proven = live.execution.as_ref()?.time(1, f64::INFINITY);
    let seen = live.seen.executed.iter().map(|executed| executed.mean).min();
    Some(2 * seen.map_or(proven, |seen| seen.min(proven)))
}

fn is_hopeless(terms: &Terms, live: &Live) -> bool {
    two_batches_alone(live).is_some_and(|two_batches| two_batches > terms.slo)
}
