//! The planner. It calls the policy once in each interval, and sends the policy's changes as orders.
//!
//! ```text
//! reports, observations ─▶ PolicyInput ─▶ Policy::decide ─┬─▶ admissions ─▶ pipelines
//!                                                         └─▶ changes ─▶ orders to the controllers
//! ```
//!
//! The planner makes no decisions and never waits. The next input contains refused and failed orders.

mod decision;
mod facts;
mod orders;
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
use shadowslice_shared::units::{Percent, Sms, Timestamp, ms};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use super::reports::ModelState;
use super::{Cause, ChangeCause, Order, Served};
use crate::backend::GpuBackend;
use orders::Orders;
use shadowslice_config::{ControllerConfig as Settings, ModelConfig};
use shadowslice_datapath::clock::Clock;
use shadowslice_datapath::phase::PhaseReceiver;
use shadowslice_datapath::pipeline::Total;

pub use decision::{Explained, ModelDecision, NotOrdered};

/// The last decisions of the policy.
#[derive(Debug, Clone)]
pub struct Planned {
    pub policy: Choice,
    /// All models in the order of the configuration. It is empty before the first decision.
    pub models: Vec<ModelDecision>,
    /// The number of decisions since the start, and the time that they took.
    pub took: Total,
}

/// The planner of all models.
#[derive(Debug)]
pub struct Planner {
    choice: Choice,
    act: bool,
    interval: Duration,
    clock: Clock,
    gpus: Vec<SharedGpu>,
    /// The numbers and the specs of the models that the policy knows.
    known: Vec<(usize, ModelSpec)>,
    policy: Policy,
    models: Vec<PlannedModel>,
    served_rx: watch::Receiver<Vec<Served>>,
    /// The phase of the supervisor. While models move between two supervisors, their shares stay.
    phase_rx: PhaseReceiver,
    planned_tx: watch::Sender<Planned>,
}

/// A model with the planner's records of it.
#[derive(Debug)]
struct PlannedModel {
    served: Served,
    orders: Orders,
}

impl Served {
    /// Returns the spec of the model for the policy. The largest batch is known only after the load.
    fn spec(&self) -> ModelSpec {
        let spec = self.model.spec(|share| self.sms(share));
        match self.pipeline.metadata() {
            Some(metadata) => {
                let per_step = metadata.streams.map_or(0, |streams| streams.per_step);
                ModelSpec { max_batch: metadata.max_batch.max(per_step).max(1), ..spec }
            }
            None => spec,
        }
    }

    /// Returns the smallest share with these SMs. If the share `current` has them, returns `current`.
    fn share(&self, sms: Sms, current: Percent) -> Percent {
        if self.sms(current) == sms {
            current
        } else {
            self.model.smallest_share_for(sms, |share| self.sms(share))
        }
    }

    /// Returns the number of SMs of a share. The number depends on the mechanism that changes the share.
    fn sms(&self, share: Percent) -> Sms {
        self.report.borrow().sms_of(&*self.gpu, share)
    }
}

/// Returns the shares of the models' first workers. If decisions are applied, these are the policy's
/// shares, otherwise the configured ones.
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
    let specs: Vec<ModelSpec> = models.iter().map(|model| model.spec(sms_of(model))).collect();
    let wanted = Policy::new(choice, &shared_gpus(gpus), &specs).initial();
    let share = |(model, (spec, sms)): (&ModelConfig, (&ModelSpec, Sms))| {
        if spec.initial_given || sms == spec.initial {
            model.share.initial
        } else {
            model.smallest_share_for(sms, sms_of(model))
        }
    };
    models.iter().zip(specs.iter().zip(wanted)).map(share).collect()
}

/// Returns the number of SMs that a worker can have on each GPU, and the GPU's groups.
fn shared_gpus(gpus: &[Arc<dyn GpuBackend>]) -> Vec<SharedGpu> {
    let shared = |gpu: &Arc<dyn GpuBackend>| SharedGpu {
        sms: gpu.sms(Percent::WHOLE),
        division: gpu.division().ok().map(|division| Division::clone(division)),
    };
    gpus.iter().map(shared).collect()
}

impl Planner {
    /// Creates the planner. Returns `None` if no policy decides.
    pub fn new(
        settings: &Settings,
        clock: Clock,
        gpus: &[Arc<dyn GpuBackend>],
        served_rx: watch::Receiver<Vec<Served>>,
        phase_rx: PhaseReceiver,
    ) -> Option<(Self, watch::Receiver<Planned>)> {
        let choice = settings.deciding_policy()?;
        let gpus = shared_gpus(gpus);
        let policy = Policy::new(choice, &gpus, &[]);
        let (planned_tx, planned_rx) =
            watch::channel(Planned { policy: choice, models: Vec::new(), took: Total::default() });
        let Settings { act, interval, .. } = *settings;
        let (known, models) = (Vec::new(), Vec::new());
        let mut planner = Self {
            choice,
            act,
            interval,
            clock,
            gpus,
            known,
            policy,
            models,
            served_rx,
            phase_rx,
            planned_tx,
        };
        planner.update_models();
        Some((planner, planned_rx))
    }

    /// Adopts the current models, and keeps the records of those that it knows.
    fn update_models(&mut self) {
        let served = self.served_rx.borrow_and_update().clone();
        let mut known = std::mem::take(&mut self.models);
        let model = |served: Served| match known.iter().position(|model| model.served.id == served.id) {
            Some(place) => PlannedModel { served, ..known.swap_remove(place) },
            None => PlannedModel { served, orders: Orders::default() },
        };
        self.models = served.into_iter().map(model).collect();
        self.update_specs();
    }

    pub async fn run(mut self) {
        // The planner has no observations until the first interval ends.
        let mut tick = interval_at(Instant::now() + self.interval, self.interval);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                Ok(()) = self.served_rx.changed() => self.update_models(),
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
            // The last decision was about models that have been removed.
            self.planned_tx.send_modify(|planned| planned.models.clear());
            return;
        }
        self.update_specs();
        let now = self.clock.now();
        let input = self.input(now);
        let began = self.clock.now();
        let decision = self.policy.decide(&input);
        let took = self.clock.now().since(began);
        if self.act {
            self.set_admissions(&decision.admissions);
        }
        let names: Vec<String> = self.known.iter().map(|(_, spec)| spec.name.clone()).collect();
        let verdicts: Vec<Explained> =
            decision.report.iter().map(|verdict| Explained::of(verdict, &names)).collect();
        let mut obstacles = vec![None; self.models.len()];
        for change in &decision.changes {
            let rows = input.models.get(change.model).zip(verdicts.get(change.model));
            let Some((snapshot, verdict)) = rows else { continue };
            obstacles[change.model] = self.order(change, snapshot, verdict, now).err();
        }
        let decided = input.models.into_iter().zip(verdicts).zip(decision.admissions).zip(obstacles);
        let models = self.models.iter().zip(decided);
        let models = models.map(|(model, (((snapshot, verdict), admission), not_ordered))| {
            let (served, report) = (&model.served, model.served.report.borrow().clone());
            let wanted = served.share(verdict.verdict.to, report.share);
            ModelDecision {
                model: Arc::clone(&served.model),
                wanted,
                wanted_sms: served.sms(wanted),
                report,
                snapshot,
                verdict,
                admission,
                not_ordered,
                last_order: model.orders.reason().cloned(),
                recent: served.pipeline.recent_traffic(),
            }
        });
        let models = models.collect();
        self.planned_tx.send_modify(|planned| {
            planned.took.add(took);
            planned.models = models;
        });
    }

    fn set_admissions(&self, admissions: &[AdmissionPolicy]) {
        for (model, admission) in self.models.iter().zip(admissions) {
            model.served.pipeline.set_admission(*admission);
        }
    }

    fn input(&mut self, now: Timestamp) -> PolicyInput {
        let snapshot = |PlannedModel { served, orders }: &mut PlannedModel| {
            orders.update(&served.model.name, &served.report.borrow(), now);
            facts::snapshot(served, orders, served.pipeline.observe())
        };
        let models = self.models.iter_mut().map(snapshot).collect();
        PolicyInput { now, gpus: self.gpus.iter().map(|gpu| gpu.sms).collect(), models }
    }

    /// Orders a change of share.
    ///
    /// # Errors
    ///
    /// Returns the reason why the change is not ordered.
    fn order(
        &mut self,
        change: &ShareChange,
        snapshot: &ModelSnapshot,
        verdict: &Explained,
        now: Timestamp,
    ) -> Result<(), NotOrdered> {
        let Some(PlannedModel { served, orders, .. }) = self.models.get_mut(change.model) else {
            return Ok(());
        };
        if !self.act {
            return Err(NotOrdered::NotActing);
        }
        let (serves, from) = {
            let report = served.report.borrow();
            (report.state == ModelState::Ready, report.share)
        };
        if !serves {
            return Err(NotOrdered::NotReady);
        }
        let to = served.share(change.to, from);
        let moves = change.groups.is_some() && change.groups != snapshot.groups;
        if served.sms(to) == served.sms(from) && moves && orders.last_had(change.groups) {
            return Ok(());
        }
        if served.sms(to) == served.sms(from) && !moves {
            return Err(NotOrdered::Nearest(from));
        }
        orders.send(&served.orders, to, change.groups, verdict, now)?;
        let seen = &snapshot.observation;
        tracing::info!(
            model = served.model.name,
            from_percent = from.get(),
            to_percent = to.get(),
            from_sms = snapshot.share.0,
            to_sms = served.sms(to).0,
            cause = ChangeCause::Policy.to_string(),
            verdict = verdict.kind().to_string(),
            layout = verdict.layout().map(|layout| layout.pattern.to_string()),
            layout_for = verdict.beneficiary,
            arrival_rate = rounding::round(seen.arrival_rate()),
            p99_ms = rounding::round(ms(seen.p99_latency)),
            attainment = rounding::fraction(seen.attainment.unwrap_or(1.0)),
            busy = rounding::round(seen.busy),
            "the policy changes the model's share"
        );
        Ok(())
    }

    /// Passes new specs to the policy. Specs change with the configuration, and with the load of a model.
    /// The policy keeps its knowledge of models that stay.
    fn update_specs(&mut self) {
        let models = self.models.iter().map(|model| (model.served.id, model.served.spec()));
        let before = std::mem::replace(&mut self.known, models.collect());
        if self.known == before {
            return;
        }
        let place = |(id, _): &(usize, ModelSpec)| before.iter().position(|(other, _)| other == id);
        let places: Vec<Option<usize>> = self.known.iter().map(place).collect();
        let specs: Vec<ModelSpec> = self.known.iter().map(|(_, spec)| spec.clone()).collect();
        self.policy = Policy::new(self.choice, &self.gpus, &specs).remembering(&self.policy, &places);
    }
}
