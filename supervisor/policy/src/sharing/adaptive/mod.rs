//! The adaptive policy. It uses plain MPS until a model violates its SLO. In that case, the policy
//! looks for the layout of the GPU with the fewest misses.
//!
//! ```text
//! observations ─▶ windows ─▶ does a model violate its SLO? ─ no, for a while ─▶ try the initial shares again
//!                                   │ yes
//!                                   ▼
//!        refuse late requests ─ still violated ─▶ try the layouts, measure each, keep the best one
//! ```
//!
//! A model **violates** its SLO if more of its requests miss the SLO than its percentile allows, and
//! chance does not explain the difference. A [`layout`] defines which part of the GPU each model is
//! allowed to use. A [`trial`] puts several layouts in force, one after the other, and compares their
//! misses ([`score`]). After a trial or a return to the initial shares, the policy pauses. Each pause
//! is longer than the previous one until the load changes, so that shares rarely change under a steady
//! load.

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

use super::changes::ShareTarget;
use super::layout::{Layout, LayoutShare, LayoutTenant, Pattern, candidates};
use super::plan::{LayoutReport, LayoutResult, LayoutStage};
use super::{AdmissionPolicy, MissRate, ModelSnapshot, ModelSpec, PolicyInput, VerdictReason};
use crate::pauses::PauseTerms;
use forecast::{Demand, KEEPS_UP, forecast};
use gpu::{ChosenLayout, GpuObservation, GpuStage, GpuState, MUCH_WORSE, WindowUpdate};
use score::{Misses, Score};
use trial::{LayoutTrial, SwitchSpeed, TrialObservation};
use window::{LONG, ObservationWindow, SHORT};

/// The minimum time of two batches, as a fraction of the model's SLO, at which batch time can be the
/// cause of misses. If two batches take less time, the misses have another cause, unless the worker
/// cannot keep up with the load.
const MIN_EXECUTION_PART: f64 = 0.4;

/// The maximum number of layouts in a trial, in addition to the current layout. The layouts with the
/// best forecasts are tried. With more layouts, the load would often change before the trial ends.
const MAX_TRIED: usize = 4;

/// The maximum number of layouts in a trial if every share changes by a shadow, which takes seconds. If
/// only some shares change by a shadow, the trial first tries layouts that move only the other models.
/// It then tries one layout that moves all models.
const MAX_TRIED_BY_SHADOW: usize = 2;

/// The state of the adaptive policy.
#[derive(Debug, Clone)]
pub(super) struct Adaptive {
    windows: Vec<ObservationWindow>,
    gpus: Vec<GpuState>,
    shapes: Vec<SharedGpu>,
}

impl Adaptive {
    pub(super) fn new(shapes: &[SharedGpu], specs: &[ModelSpec]) -> Self {
        Self {
            windows: vec![ObservationWindow::default(); specs.len()],
            gpus: vec![GpuState::default(); shapes.len()],
            shapes: shapes.to_vec(),
        }
    }

    /// Returns the number of SMs that each model should have now, in the order of the models.
    pub(super) fn shares(&self, specs: &[ModelSpec]) -> Vec<Sms> {
        (0..specs.len()).map(|model| self.placement(model, specs, true).sms).collect()
    }

    /// Copies the state of an earlier policy for one GPU. `place` returns the index of each model in
    /// the earlier policy.
    pub(super) fn remember(
        &mut self,
        earlier: &Self,
        gpu: usize,
        specs: &[ModelSpec],
        place: impl Fn(usize) -> Option<usize>,
    ) {
        let here: Vec<usize> = on_gpu(gpu, specs).collect();
        for &model in &here {
            if let Some(known) = place(model).and_then(|place| earlier.windows.get(place)) {
                self.windows[model] = known.clone();
            }
        }
        let now = |then: usize| here.iter().copied().find(|&model| place(model) == Some(then));
        self.gpus[gpu] = earlier.gpus[gpu].renumbered(now);
    }

    pub(super) fn decide(&mut self, specs: &[ModelSpec], input: &PolicyInput) -> Vec<ShareTarget> {
        for (model, snapshot) in input.models.iter().enumerate() {
            self.windows[model].add(&snapshot.observation, input.now);
        }
        for gpu in 0..self.gpus.len() {
            self.update(gpu, specs, input);
        }
        (0..specs.len()).map(|model| self.target(model, specs, input)).collect()
    }

    fn update(&mut self, gpu: usize, specs: &[ModelSpec], input: &PolicyInput) {
        let violating = self.most_important(gpu, specs, input);
        if self.gpus[gpu].admit(violating.is_some(), input.now) {
            self.forget(gpu, specs);
        }
        let observation = self.observe_gpu(gpu, violating, specs, input);
        let shape = &self.shapes[gpu];
        let present = self.gpus[gpu].layout().cloned().unwrap_or(Layout::AT_REST);
        let list = || {
            let all = tenants(&self.windows, gpu, shape, specs, input);
            let beneficiary = violating.and_then(|model| all.iter().find(|tenant| tenant.model == model));
            let at_once = |tenant: &&LayoutTenant| !changes_by_shadow(&input.models[tenant.model]);
            let quick: Vec<LayoutTenant> = all.iter().filter(at_once).copied().collect();
            let demands = demands(&self.windows, &all, specs, input);
            let layouts = candidates(&quick, &all, beneficiary.copied());
            let mut list =
                shortlist(layouts, demands.as_deref(), (&present, observation.recent.loss()), shape);
            let rests_with_less = |model: usize| {
                let spec = &specs[model];
                LayoutShare::at_rest(spec, shape).sms < spec.max_share()
            };
            if on_gpu(gpu, specs).any(rests_with_less) {
                list.insert(0, Layout::EVERYTHING);
            }
            if violating.is_some_and(|urgent| others_pause_for(urgent, specs, input)) {
                list.insert(0, Layout::PAUSES);
            }
            list.truncate(MAX_TRIED);
            // A switch by a shadow takes seconds. The trial includes such switches only if many
            // requests miss.
            if quick.len() < all.len() && observation.recent.loss() > MUCH_WORSE {
                let slow = candidates(&all, &all, beneficiary.copied()).into_iter();
                list.extend(slow.take(if quick.is_empty() { MAX_TRIED_BY_SHADOW } else { 1 }));
            }
            list
        };
        if self.gpus[gpu].update(&observation, list) == WindowUpdate::Clear {
            self.forget(gpu, specs);
        }
    }

    /// Returns the most important model that violates its SLO and whose misses a layout may reduce.
    /// This is the model with the highest priority, and among equal priorities the model with the
    /// highest miss rate.
    fn most_important(&self, gpu: usize, specs: &[ModelSpec], input: &PolicyInput) -> Option<usize> {
        let missed = |model: usize| self.windows[model].missed();
        let violating = on_gpu(gpu, specs)
            .filter(|&model| self.is_violating(model, specs) && self.may_be_helped(model, specs, input));
        violating.max_by(|&one, &other| {
            let priority = specs[other].priority.cmp(&specs[one].priority);
            priority.then(missed(one).total_cmp(&missed(other)))
        })
    }

    fn observe_gpu(
        &self,
        gpu: usize,
        violating: Option<usize>,
        specs: &[ModelSpec],
        input: &PolicyInput,
    ) -> GpuObservation {
        let here = || on_gpu(gpu, specs);
        let mut priorities: Vec<u32> = here().map(|model| specs[model].priority).collect();
        priorities.sort_unstable();
        priorities.dedup();
        let level = |model: usize| priorities.binary_search(&specs[model].priority).unwrap_or(0);
        let blank = Score::new(priorities.len());
        let (mut misses, mut recent, mut last) = (blank.clone(), blank.clone(), blank);
        for model in here().filter(|&model| !is_hopeless(&specs[model], &input.models[model])) {
            let observation = &input.models[model].observation;
            let ended =
                Misses { ended: observation.answered + observation.refused, missed: observation.missed() };
            misses.add(level(model), ended);
            recent.add(level(model), self.windows[model].misses(LONG));
            last.add(level(model), self.windows[model].misses(SHORT));
        }
        let keeps = |model: usize| {
            is_hopeless(&specs[model], &input.models[model])
                || self.windows[model].keeps(specs[model].allowed_miss_rate())
        };
        let rates = |over| here().map(|model| (model, self.windows[model].rate(over))).collect();
        let is_known = here().all(|model| self.windows[model].is_full());
        let slow = here().any(|model| changes_by_shadow(&input.models[model]));
        let speed = if slow { SwitchSpeed::Slow } else { SwitchSpeed::AtOnce };
        let in_force = here().all(|model| self.is_in_force(model, specs, input));
        let longest_slo = here().map(|model| specs[model].slo).max().unwrap_or_default();
        let all_keep = here().all(keeps);
        let trial = TrialObservation { now: input.now, in_force, misses, all_keep, longest_slo };
        let usual_rates = is_known.then(|| rates(LONG));
        GpuObservation { trial, violating, recent, last, rates: rates(SHORT), usual_rates, speed }
    }

    fn target(&self, model: usize, specs: &[ModelSpec], input: &PolicyInput) -> ShareTarget {
        let gpu = specs[model].gpu;
        let max_batch = specs[model].max_batch.max(1);
        let refuse_late = self.gpus[gpu].refuses(input.now);
        let pause = self.gpus[gpu].layout().is_some_and(Layout::pauses);
        let admission = AdmissionPolicy { max_batch, refuse_late, pause };
        let inside = input.models[model].groups.is_some();
        let LayoutShare { sms, groups } = self.placement(model, specs, inside);
        ShareTarget { sms, groups, admission, why: self.why(model, specs, input) }
    }

    /// Returns the share that a model should have now. `inside` is true if the share is a partition
    /// inside the worker.
    fn placement(&self, model: usize, specs: &[ModelSpec], inside: bool) -> LayoutShare {
        let gpu = specs[model].gpu;
        let (spec, shape) = (&specs[model], &self.shapes[gpu]);
        match self.gpus[gpu].layout() {
            Some(layout) => layout.placement(model, spec, shape, inside),
            None => LayoutShare::at_rest(spec, shape),
        }
    }

    fn is_in_force(&self, model: usize, specs: &[ModelSpec], input: &PolicyInput) -> bool {
        let snapshot = &input.models[model];
        let LayoutShare { sms, groups } = self.placement(model, specs, snapshot.groups.is_some());
        let there = snapshot.pending_share.is_none() && snapshot.share == sms;
        let placed =
            groups.is_none_or(|groups| snapshot.groups == Some(groups) || groups_differ(&groups, snapshot));
        snapshot.held || there && placed
    }

    fn why(&self, model: usize, specs: &[ModelSpec], input: &PolicyInput) -> VerdictReason {
        let missed =
            MissRate { actual: self.windows[model].missed(), allowed: specs[model].allowed_miss_rate() };
        let report = |pattern: Pattern, trial: &LayoutTrial, stage: LayoutStage| {
            let tried = |(pattern, score): (Pattern, Score)| LayoutResult {
                pattern,
                missed: score.total().part(),
                missed_first_priority: score.first().part(),
            };
            let tried = trial.tried().into_iter().map(tried).collect();
            VerdictReason::Layout(LayoutReport {
                stage,
                pattern,
                beneficiary: trial.beneficiary,
                missed,
                tried,
            })
        };
        match &self.gpus[specs[model].gpu].stage {
            GpuStage::Trying { trial, .. } => report(trial.layout().pattern, trial, LayoutStage::Trying),
            GpuStage::Chosen(ChosenLayout { layout, trial, .. }) => {
                report(layout.pattern, trial, LayoutStage::Chosen)
            }
            GpuStage::AtRest => self.why_at_rest(model, missed, specs, input),
        }
    }

    fn why_at_rest(
        &self,
        model: usize,
        missed: MissRate,
        specs: &[ModelSpec],
        input: &PolicyInput,
    ) -> VerdictReason {
        let snapshot = &input.models[model];
        match two_batches_alone(snapshot) {
            Some(two_batches) if is_hopeless(&specs[model], snapshot) => {
                VerdictReason::Infeasible { missed, two_batches }
            }
            _ if !self.is_violating(model, specs) => VerdictReason::Met(missed),
            _ if !self.may_be_helped(model, specs, input) => {
                let two_batches = self.windows[model].two_batches();
                VerdictReason::NotBatchTime { missed, two_batches }
            }
            _ => VerdictReason::Violating(missed),
        }
    }

    /// Returns true if a layout may reduce the model's misses. This requires that long batches cause
    /// the misses, or that the worker cannot keep up with the load. The model must also be able to meet
    /// its SLO alone on the GPU.
    fn may_be_helped(&self, model: usize, specs: &[ModelSpec], input: &PolicyInput) -> bool {
        let (recent, snapshot) = (&self.windows[model], &input.models[model]);
        let is_behind = snapshot.observation.queued > 0 && recent.busy() > KEEPS_UP;
        let takes_long = recent.two_batches() >= specs[model].slo.mul_f64(MIN_EXECUTION_PART);
        (is_behind || takes_long) && !is_hopeless(&specs[model], snapshot)
    }

    fn is_violating(&self, model: usize, specs: &[ModelSpec]) -> bool {
        self.windows[model].is_violating(specs[model].allowed_miss_rate())
    }

    /// Clears the windows of the GPU's models, because the old observations do not apply to the new
    /// conditions.
    fn forget(&mut self, gpu: usize, specs: &[ModelSpec]) {
        on_gpu(gpu, specs).for_each(|model| self.windows[model].clear());
    }
}

fn on_gpu(gpu: usize, specs: &[ModelSpec]) -> impl Iterator<Item = usize> {
    (0..specs.len()).filter(move |&model| specs[model].gpu == gpu)
}

/// Returns true if batches of another model on the same GPU can pause for batches of `urgent`.
fn others_pause_for(urgent: usize, specs: &[ModelSpec], input: &PolicyInput) -> bool {
    let terms = |model: usize| PauseTerms {
        priority: specs[model].priority,
        slo: specs[model].slo,
        can_be_paused: input.models[model].can_pause,
    };
    let mut others = on_gpu(specs[urgent].gpu, specs).filter(|&model| model != urgent);
    others.any(|model| terms(model).allow_pause_for(&terms(urgent)))
}

/// Returns the models of a GPU whose shares are not held.
fn tenants(
    windows: &[ObservationWindow],
    gpu: usize,
    shape: &SharedGpu,
    specs: &[ModelSpec],
    input: &PolicyInput,
) -> Vec<LayoutTenant> {
    let sms = f64::from(shape.sms.0.max(1));
    let movable = on_gpu(gpu, specs).filter(|&model| !input.models[model].held);
    let tenant = |model: usize| LayoutTenant {
        model,
        priority: specs[model].priority,
        work: windows[model].busy() * f64::from(input.models[model].share.0) / sms,
    };
    movable.map(tenant).collect()
}

/// Returns the load of each model. Returns `None` if the execution times of any model are unknown.
fn demands<'f>(
    windows: &[ObservationWindow],
    tenants: &[LayoutTenant],
    specs: &[ModelSpec],
    input: &'f PolicyInput,
) -> Option<Vec<Demand<'f>>> {
    let demand = |tenant: &LayoutTenant| {
        let (snapshot, spec) = (&input.models[tenant.model], &specs[tenant.model]);
        let rows = snapshot.observation.rows as f64 / snapshot.observation.arrived.max(1) as f64;
        Some(Demand {
            tenant: *tenant,
            rows_per_s: windows[tenant.model].rate(SHORT).per_s * rows.max(1.0),
            slo: spec.slo,
            max_batch: spec.max_batch.max(1),
            execution: snapshot.execution.as_ref()?,
        })
    };
    tenants.iter().map(demand).collect()
}

/// Returns the layouts in the order in which the trial uses them. The list contains the first layout of
/// each pattern. If there is a forecast, it also contains the layout of each pattern with the lowest
/// forecast loss.
///
/// The pattern that restricts models least comes first, provided that it leaves the whole GPU to the
/// models with the highest priority. The other layouts follow in ascending order of their forecast
/// loss. The list omits layouts whose forecast loss exceeds both the forecast loss and the measured
/// loss (`missed`) of the `present` layout.
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

fn changes_by_shadow(snapshot: &ModelSnapshot) -> bool {
    snapshot.groups.is_none() && !snapshot.held
}

/// Returns true if the model runs on a partition with another number of groups than `wanted`.
fn groups_differ(wanted: &Groups, snapshot: &ModelSnapshot) -> bool {
    snapshot.groups.is_some_and(|groups| groups.count() != wanted.count())
}

/// Returns the time of two of the shortest batches, alone on the whole GPU. Two batches count, because
/// a request may have to wait for one batch before its own batch runs. Workers measure the time during
/// their warm-up, while other workers may execute. If the shortest observed batch took less time, the
/// function uses that time instead.
fn two_batches_alone(snapshot: &ModelSnapshot) -> Option<Duration> {
    let proven = snapshot.execution.as_ref()?.time(1, f64::INFINITY);
    let shortest = snapshot.observation.batches.iter().map(|size| size.mean).min();
    Some(2 * shortest.map_or(proven, |shortest| shortest.min(proven)))
}

/// Returns true if the model could not meet its SLO even if it ran alone on the GPU.
fn is_hopeless(spec: &ModelSpec, snapshot: &ModelSnapshot) -> bool {
    two_batches_alone(snapshot).is_some_and(|two_batches| two_batches > spec.slo)
}
