//! The planner: asks the policy once an interval, and orders what it says.
//!
//! ```text
//! standings, what pipelines saw ─▶ Facts ─▶ Policy::decide ─▶ admissions ─▶ pipelines
//!                                                         └─▶ changes ─▶ orders of the controllers
//! ```
//!
//! The planner decides nothing and never waits: the next facts tell of refused or failed orders.

mod facts;
mod orders;
mod recent;
mod report;
#[cfg(test)]
mod tests;

use shadowslice_shared::rounding;
use std::sync::Arc;
use std::time::Duration;

use shadowslice_policy::sharing::{
    AdmissionPolicy, Choice, ModelSnapshot, ModelSpec, Policy, PolicyInput, ShareChange,
};
use shadowslice_shared::contention::SharedGpu;
use shadowslice_shared::groups::Division;
use shadowslice_shared::units::{Percent, Sms, Timestamp};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use super::reports::ModelState;
use super::{Cause, ChangeCause, Order, Served};
use crate::backend::GpuBackend;
use orders::Orders;
use recent::Recent;
use shadowslice_config::{ControllerConfig as Settings, ModelConfig};
use shadowslice_datapath::clock::Clock;
use shadowslice_datapath::phase::PhaseReceiver;
use shadowslice_datapath::pipeline::Total;

pub use recent::RecentReport;
pub use report::{DoorReport, ModelPlan, PlanReport, SeenReport};

#[derive(Debug, Clone, PartialEq, Default)]
pub struct Planned {
    pub report: PlanReport,
    /// How long each took since the start.
    pub took: Total,
}

#[derive(Debug)]
pub struct Planner {
    choice: Choice,
    act: bool,
    interval: Duration,
    clock: Clock,
    gpus: Vec<SharedGpu>,
    /// The models that the policy knows, by their numbers, and what it was told of them.
    ids: Vec<usize>,
    terms: Vec<ModelSpec>,
    policy: Policy,
    models: Vec<(Served, Kept)>,
    sharers: watch::Receiver<Vec<Served>>,
    /// The phase of the supervisor. While models move between two supervisors, their shares stay.
    phase_rx: PhaseReceiver,
    planned: watch::Sender<Planned>,
}

/// What the planner keeps of a model.
#[derive(Debug, Default)]
struct Kept {
    orders: Orders,
    recent: Recent,
}

impl Served {
    /// What the policy is told of the model; its largest batch is known only once it is loaded.
    fn terms(&self) -> ModelSpec {
        let terms = self.model.spec(|share| self.sms(share));
        match self.pipeline.metadata() {
            Some(metadata) => ModelSpec { max_batch: metadata.max_batch.max(1), ..terms },
            None => terms,
        }
    }

    /// The smallest share that comes to these SMs; `at` if that share does.
    fn share(&self, sms: Sms, at: Percent) -> Percent {
        if self.sms(at) == sms { at } else { self.model.smallest_share_for(sms, |share| self.sms(share)) }
    }

    /// The SMs that a share comes to, by the means by which it is changed.
    fn sms(&self, share: Percent) -> Sms {
        self.report.borrow().sms_of(&*self.gpu, share)
    }
}

/// The shares that the models' first workers start with: those of the policy, where its decisions
/// are carried out, else the configured ones.
pub fn first_shares(
    settings: &Settings,
    gpus: &[Arc<dyn GpuBackend>],
    models: &[ModelConfig],
) -> Vec<Percent> {
    let configured = |model: &ModelConfig| model.share.initial;
    let Some(choice) = settings.acting_policy() else {
        return models.iter().map(configured).collect();
    };
    let sms_of = |model: &ModelConfig| {
        let gpu = Arc::clone(&gpus[model.gpu]);
        move |share: Percent| gpu.sms(share)
    };
    let terms: Vec<ModelSpec> = models.iter().map(|model| model.spec(sms_of(model))).collect();
    let wanted = Policy::new(choice, &shapes(gpus), &terms).initial();
    let share = |(model, (terms, sms)): (&ModelConfig, (&ModelSpec, Sms))| {
        if terms.initial_given || sms == terms.initial {
            model.share.initial
        } else {
            model.smallest_share_for(sms, sms_of(model))
        }
    };
    models.iter().zip(terms.iter().zip(wanted)).map(share).collect()
}

/// The SMs that a worker can have of each GPU, and the groups of them.
fn shapes(gpus: &[Arc<dyn GpuBackend>]) -> Vec<SharedGpu> {
    let shape = |gpu: &Arc<dyn GpuBackend>| SharedGpu {
        sms: gpu.sms(Percent::WHOLE),
        division: gpu.division().ok().map(|division| Division::clone(division)),
    };
    gpus.iter().map(shape).collect()
}

impl Planner {
    /// `None` where no policy decides.
    pub fn new(
        settings: &Settings,
        clock: Clock,
        gpus: &[Arc<dyn GpuBackend>],
        sharers: watch::Receiver<Vec<Served>>,
        phase_rx: PhaseReceiver,
    ) -> Option<(Self, watch::Receiver<Planned>)> {
        let choice = settings.deciding_policy()?;
        let gpus = shapes(gpus);
        let policy = Policy::new(choice, &gpus, &[]);
        let report = PlanReport::nothing_yet(settings);
        let (planned, seen) = watch::channel(Planned { report, took: Total::default() });
        let Settings { act, interval, .. } = *settings;
        let (ids, terms, models) = (Vec::new(), Vec::new(), Vec::new());
        let mut planner = Self {
            choice,
            act,
            interval,
            clock,
            gpus,
            ids,
            terms,
            policy,
            models,
            sharers,
            phase_rx,
            planned,
        };
        planner.meet();
        Some((planner, seen))
    }

    /// Takes over the models that there are now.
    fn meet(&mut self) {
        let sharers = self.sharers.borrow_and_update().clone();
        let mut known = std::mem::take(&mut self.models);
        let kept = |sharer: &Served| {
            let place = known.iter().position(|(other, _)| other.id == sharer.id);
            place.map(|place| known.swap_remove(place).1).unwrap_or_default()
        };
        let kept: Vec<_> = sharers.iter().map(kept).collect();
        self.models = sharers.into_iter().zip(kept).collect();
        self.learn_terms();
    }

    pub async fn run(mut self) {
        // Before the first interval ends, a policy has nothing to go by.
        let mut tick = interval_at(Instant::now() + self.interval, self.interval);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                Ok(()) = self.sharers.changed() => self.meet(),
                _ = tick.tick() => {
                    if !self.phase_rx.borrow().is_upgrading() {
                        self.decide();
                    }
                }
            }
        }
    }

    fn decide(&mut self) {
        if self.models.is_empty() {
            // What was decided last was about models that have gone.
            self.planned.send_modify(|planned| planned.report.models.clear());
            return;
        }
        self.learn_terms();
        let now = self.clock.now();
        let facts = self.facts(now);
        let began = self.clock.now();
        let decision = self.policy.decide(&facts);
        let took = self.clock.now().since(began);
        if self.act {
            self.set_admissions(&decision.admissions);
        }
        let names: Vec<String> = self.terms.iter().map(|terms| terms.name.clone()).collect();
        let mut obstacles = vec![None; self.models.len()];
        for change in &decision.changes {
            let rows = facts.models.get(change.model).zip(decision.report.get(change.model));
            let Some((live, verdict)) = rows else { continue };
            let verdict = report::words(verdict, &names);
            obstacles[change.model] = self.order(change, live, &verdict, now).err();
        }
        let sharers = self.models.iter().map(|(sharer, _)| sharer);
        let mut models = report::models(sharers, &facts, &decision, &names, obstacles);
        for (model, (sharer, kept)) in models.iter_mut().zip(&self.models) {
            model.last_order_why = kept.orders.reason().map(str::to_owned);
            model.recent = kept.recent.report(&sharer.pipeline.rates());
        }
        self.planned.send_modify(|planned| {
            planned.took.add(took);
            planned.report.decisions += 1;
            planned.report.models = models;
        });
    }

    fn set_admissions(&self, admissions: &[AdmissionPolicy]) {
        for ((sharer, _), door) in self.models.iter().zip(admissions) {
            sharer.pipeline.set_admission(*door);
        }
    }

    fn facts(&mut self, now: Timestamp) -> PolicyInput {
        let live = |(sharer, kept): &mut (Served, Kept)| {
            kept.orders.hear(&sharer.model.name, &sharer.report.borrow(), now);
            let seen = sharer.pipeline.observe();
            kept.recent.add(&seen);
            facts::live(sharer, &kept.orders, seen)
        };
        let models = self.models.iter_mut().map(live).collect();
        PolicyInput { now, gpus: self.gpus.iter().map(|gpu| gpu.sms).collect(), models }
    }

    fn order(
        &mut self,
        change: &ShareChange,
        live: &ModelSnapshot,
        verdict: &str,
        now: Timestamp,
    ) -> Result<(), String> {
        let Some((sharer, kept)) = self.models.get_mut(change.model) else { return Ok(()) };
        if !self.act {
            return Err("controller.act is false".to_owned());
        }
        let (serves, from) = {
            let report = sharer.report.borrow();
            (report.state == ModelState::Ready, report.share)
        };
        if !serves {
            return Err("the model is not ready".to_owned());
        }
        let to = sharer.share(change.to, from);
        let moves = change.groups.is_some() && change.groups != live.groups;
        if sharer.sms(to) == sharer.sms(from) && moves && kept.orders.named(change.groups) {
            return Ok(());
        }
        if sharer.sms(to) == sharer.sms(from) && !moves {
            return Err(format!("{from} is the nearest share that share.min, share.max and the GPU allow"));
        }
        kept.orders.send(&sharer.orders, to, change.groups, verdict, now)?;
        let figures = SeenReport::of(&live.observation);
        tracing::info!(
            model = sharer.model.name,
            from_percent = from.get(),
            to_percent = to.get(),
            from_sms = live.share.0,
            to_sms = sharer.sms(to).0,
            cause = ChangeCause::Policy.to_string(),
            verdict,
            arrival_rate = rounding::round(figures.arrival_rate),
            p99_ms = rounding::round(figures.p99_ms),
            attainment = rounding::fraction(figures.attainment),
            busy = rounding::round(figures.busy),
            "the policy changes the model's share"
        );
        Ok(())
    }

    /// Configurations change, and whether a model can be batched is known once it is loaded. The
    /// policy keeps what it learnt of models that stay.
    fn learn_terms(&mut self) {
        let (ids, terms): (Vec<usize>, Vec<ModelSpec>) =
            self.models.iter().map(|(sharer, _)| (sharer.id, sharer.terms())).unzip();
        if ids == self.ids && terms == self.terms {
            return;
        }
        let places: Vec<Option<usize>> =
            ids.iter().map(|id| self.ids.iter().position(|other| other == id)).collect();
        self.policy = Policy::new(self.choice, &self.gpus, &terms).remembering(&self.policy, &places);
        (self.ids, self.terms) = (ids, terms);
    }
}
