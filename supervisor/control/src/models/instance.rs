//! A model as it runs: made, given to the control thread, and ended when it is not needed any more.

use shadowslice_shared::rounding;
use std::sync::Arc;
use std::time::Duration;

use shadowslice_shared::slab::SlabError;
use shadowslice_shared::units::Percent;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::mended::{FoundFiles, WatchedFiles};
use crate::controller::{
    Cause, Context, ControllerTask, ModelParts, ModelReport, ModelState, Order, ResizeRefused, Served,
    WaitReason,
};
use crate::host::onnxruntime_library;
use crate::process::{ReferenceError, ReferenceFile};
use shadowslice_config::{Config, ModelConfig, OnLate, Timeouts};
use shadowslice_datapath::pipeline::{EVENT_QUEUE_SIZE, LiveSettings, Pipeline, PipelineSettings};
use shadowslice_datapath::router::{Route, RouteHolds};
use shadowslice_shared::errors;

/// How long a model that goes may take to answer what it accepted.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);

/// How long an order may wait for a place in its controller's queue.
const ORDER_WITHIN: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum MakeError {
    #[error("cannot create the shared memory for the model's requests")]
    Memory(#[source] SlabError),
    #[error("cannot store the model's reference answers")]
    Reference(#[source] ReferenceError),
    #[error("the supervisor is stopping")]
    Stopping,
}

#[derive(Debug)]
pub struct ModelFactory {
    pub context: Context,
    pub hire: mpsc::Sender<ControllerTask>,
    pub next: usize,
}

#[derive(Debug)]
pub(super) struct Instance {
    /// Without its successor, which the registry knows.
    pub(super) served: Served,
    pub(super) files: WatchedFiles,
    pub(super) route: Route,
    guests: RouteHolds,
    watching: AbortHandle,
    /// How long streams may go on when the model goes.
    drain: Duration,
}

impl ModelFactory {
    /// Makes a model; its controller begins to start its workers.
    pub(super) async fn make(
        &mut self,
        model: Arc<ModelConfig>,
        share: Percent,
        held: bool,
        found: FoundFiles,
    ) -> Result<Instance, MakeError> {
        let id = self.next;
        self.next += 1;
        let (facts, heard) = mpsc::channel(EVENT_QUEUE_SIZE);
        let settings = PipelineSettings {
            name: model.name.clone(),
            live: live(&model),
            max_requests: model.queue.max_requests,
            memory: model.queue.memory,
            profile: model.profile.clone(),
            content: Arc::clone(&found.loaded.content),
        };
        let pipeline = Pipeline::new(settings, self.context.clock, facts).map_err(MakeError::Memory)?;
        let pipeline = Arc::new(pipeline);
        let reference = ReferenceFile::create(&model.name).map_err(MakeError::Reference)?;
        let FoundFiles { stamps, loaded: files } = found;
        let parts = ModelParts {
            pipeline: Arc::clone(&pipeline),
            reference,
            files: Arc::clone(&files),
            facts: heard,
        };
        let (context, of) = (self.context.clone(), Arc::clone(&model));
        let (hired, report) = ControllerTask::new(context, of, share, held, parts);
        let orders = hired.orders.clone();
        self.hire.send(hired).await.map_err(|_| MakeError::Stopping)?;
        let (route, guests) = Route::to(Arc::clone(&pipeline));
        let watched = Arc::clone(&pipeline);
        let watching = tokio::spawn(async move { watched.watch().await }).abort_handle();
        let gpu = Arc::clone(&self.context.gpus[model.gpu]);
        let served = Served { id, model, gpu, pipeline, report, orders, successor: None, files };
        let drain = self.context.timeouts.drain;
        Ok(Instance { served, files: WatchedFiles::new(stamps), route, guests, watching, drain })
    }

    /// Finds ONNX Runtime's library, where a new configuration is the first that needs it.
    pub(super) fn learn_library(&mut self, config: &Config) -> Result<(), String> {
        if self.context.library.as_os_str().is_empty() {
            self.context.library = onnxruntime_library(config).map_err(|error| errors::chain(&error))?;
        }
        Ok(())
    }

    pub(super) fn patience(&self) -> Duration {
        patience(&self.context.timeouts)
    }
}

/// How long a model may take until it serves: twice the limit for one start, for the reference
/// worker and the first that serves. Deaths and waits for memory count.
pub fn patience(timeouts: &Timeouts) -> Duration {
    (timeouts.spawn + timeouts.warm) * 2 + timeouts.stop
}

fn live(model: &ModelConfig) -> LiveSettings {
    LiveSettings {
        slo: model.slo,
        max_delay: model.batch.max_delay,
        reject_late: model.queue.on_late == OnLate::Reject,
    }
}

impl Instance {
    /// Goes by another configuration, which differs only in what needs no new workers.
    pub(super) async fn configure(&mut self, model: Arc<ModelConfig>) -> Result<(), String> {
        let order = Order::Configure { model: Arc::clone(&model) };
        give(&self.served.orders, order).await?;
        self.served.pipeline.set_live_settings(live(&model));
        self.served.model = model;
        Ok(())
    }

    /// Has the model answer the requests that it has, and then end, in the background. No router
    /// has it any more. Requests that are left after `ANSWER_WITHIN` are refused with `why`; streams
    /// that are left after `drain` break off.
    pub(super) fn retire(self, why: &'static str) {
        let Self { served, route, mut guests, watching, drain, files: _ } = self;
        let Served { model, pipeline, orders, .. } = served;
        drop(route);
        let streams_until = Instant::now() + drain;
        tokio::spawn(async move {
            if tokio::time::timeout(ANSWER_WITHIN, guests.released()).await.is_err() {
                tracing::warn!(
                    model = model.name,
                    why,
                    waited_ms = rounding::ms(ANSWER_WITHIN),
                    "outgoing workers of the model did not answer all requests in time; refusing the remaining requests"
                );
                pipeline.shut(why);
            }
            if tokio::time::timeout_at(streams_until, guests.streams_ended()).await.is_err() {
                let model = &model.name;
                tracing::warn!(
                    model,
                    why,
                    waited_ms = rounding::ms(drain),
                    "response streams of outgoing workers did not end within timeouts.drain; cutting these streams"
                );
            }
            // An error means that the controller has ended already.
            orders.send(Order::Stop).await.ok();
            // The controller kills workers that do not end.
            orders.closed().await;
            watching.abort();
            tracing::info!(model = model.name, why, "the model's outgoing workers have exited");
        });
    }
}

pub(super) async fn give(orders: &mpsc::Sender<Order>, order: Order) -> Result<(), String> {
    let given = tokio::time::timeout(ORDER_WITHIN, orders.send(order)).await;
    match given {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) => Err("the model's controller has stopped; see the log".to_owned()),
        Err(_) => Err("too many orders are queued for the model; try again later".to_owned()),
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Aim {
    At(Percent),
    Within(Percent, Percent),
}

impl Aim {
    /// The nearest share that will do.
    pub(super) fn from(self, in_force: Percent) -> Percent {
        match self {
            Self::At(share) => share,
            Self::Within(min, max) => in_force.clamp(min, max),
        }
    }
}

/// Brings a share into force, once no other change is under way. Does not change whether it is
/// held.
pub(super) async fn resize(
    orders: mpsc::Sender<Order>,
    mut report: watch::Receiver<ModelReport>,
    aim: Aim,
) -> Result<(), String> {
    loop {
        // A policy may have changed the share meanwhile.
        let share = aim.from(report.borrow_and_update().share);
        let (reply, outcome) = oneshot::channel();
        give(&orders, Order::Resize { share, groups: None, cause: Cause::Hand, hold: false, reply }).await?;
        match outcome.await {
            Ok(Ok(report)) => return report.why.map_or(Ok(()), Err),
            Ok(Err(ResizeRefused::InForce { .. })) => return Ok(()),
            // Asked again when something has changed.
            Ok(Err(ResizeRefused::Busy(_))) => {}
            Ok(Err(ResizeRefused::NotServing { .. })) if is_coming(&report.borrow().state) => {}
            Ok(Err(refused)) => return Err(refused.to_string()),
            Err(_) => return Err(ResizeRefused::Stopping.to_string()),
        }
        if report.changed().await.is_err() {
            return Err(ResizeRefused::Stopping.to_string());
        }
    }
}

/// The same, for `patience` at most.
pub(super) async fn resized(
    orders: mpsc::Sender<Order>,
    report: watch::Receiver<ModelReport>,
    aim: Aim,
    patience: Duration,
) -> Result<(), String> {
    let resized = tokio::time::timeout(patience, resize(orders, report, aim)).await;
    resized.unwrap_or_else(|_| Err(format!("the share change timed out after {patience:?}")))
}

/// Gives the successor what an operator changed about the share while it booted. What a policy
/// changed, the policy will change again. A new successor's queue of orders has room.
pub(super) fn keep_share(was: &ModelReport, next: &Served, beside: Percent, policy_acts: bool) {
    let (held, share) = {
        let is = next.report.borrow();
        (is.held, is.share)
    };
    if was.held != held {
        let (reply, _nobody) = oneshot::channel();
        next.orders.try_send(Order::Hold { held: was.held, reply }).ok();
    }
    let by_hand = was.held || !policy_acts && was.share != beside;
    if by_hand && was.share != share {
        let (reply, _nobody) = oneshot::channel();
        let (share, hold) = (was.share, was.held);
        let order = Order::Resize { share, groups: None, cause: Cause::Hand, hold, reply };
        next.orders.try_send(order).ok();
    }
}

fn is_coming(state: &ModelState) -> bool {
    matches!(state, ModelState::Loading | ModelState::Restarting | ModelState::Waiting(_))
}

/// Waits until a model serves, for `patience` at most; else says why it does not.
pub async fn serving(mut report: watch::Receiver<ModelReport>, patience: Duration) -> Result<(), String> {
    let settled = |report: &ModelReport| {
        matches!(report.state, ModelState::Ready | ModelState::Unready { .. } | ModelState::Stopping)
    };
    let state = async { report.wait_for(settled).await.map(|seen| seen.state.clone()) };
    let Ok(state) = tokio::time::timeout(patience, state).await else {
        let waits = match &report.borrow().state {
            ModelState::Waiting(why) => format!(": {why}"),
            _ if report.borrow().waits.contains(&WaitReason::Turn) => {
                ": other workers start first".to_owned()
            }
            _ => String::new(),
        };
        return Err(format!(
            "the model was not ready within {patience:?} (timeouts.spawn, timeouts.warm){waits}"
        ));
    };
    // An error means that its controller has ended.
    match state.unwrap_or(ModelState::Stopping) {
        ModelState::Ready => Ok(()),
        ModelState::Unready { why, .. } => Err(why),
        _ => Err("the supervisor is stopping".to_owned()),
    }
}
