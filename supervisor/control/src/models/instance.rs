//! An instance of a model: its queue, its controller and its workers.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use shadowslice_config::{Config, ModelConfig, OnLate, Timeouts};
use shadowslice_datapath::pipeline::{EVENT_QUEUE_SIZE, LiveSettings, Pipeline, PipelineSettings};
use shadowslice_datapath::router::{Route, RouteHolds};
use shadowslice_policy::reconcile::Health;
use shadowslice_shared::slab::SlabError;
use shadowslice_shared::units::Percent;
use shadowslice_shared::{errors, rounding};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::desired::{DesiredModel, FirstShare, InstanceSpec};
use crate::controller::{
    Context, ControllerTask, ModelParts, ModelReport, ModelState, Order, Served, VersionRole, WaitReason,
};
use crate::host::onnxruntime_library;
use crate::process::{LoadedFiles, ReferenceFile, ReferenceFileError};

/// The time for which a retired instance may answer the requests that it has accepted.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// The time for which an order may wait for a place in its controller's queue.
const ORDER_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub(super) enum MakeError {
    #[error("cannot create the shared memory for the model's requests")]
    Memory(#[source] SlabError),
    #[error("cannot store the model's reference answers")]
    Reference(#[source] ReferenceFileError),
    #[error("the supervisor is stopping")]
    Stopping,
}

/// Creates instances.
#[derive(Debug)]
pub struct ModelFactory {
    pub context: Context,
    hire: mpsc::Sender<ControllerTask>,
    /// The library of ONNX Runtime, if a reload was the first to need it.
    library: OnceLock<PathBuf>,
    made: AtomicUsize,
}

/// An instance of a model. Dropping it does not end its workers. See [`Instance::retire`].
#[derive(Debug)]
pub(super) struct Instance {
    /// The parts that the rest of the supervisor uses, without the successor.
    pub(super) served: Served,
    pub(super) spec: InstanceSpec,
    /// The specification that was last confirmed, to which a refused change returns.
    pub(super) confirmed: InstanceSpec,
    pub(super) route: Route,
    /// The report, for a reader that marks it as seen.
    pub(super) report_rx: watch::Receiver<ModelReport>,
    start: Start,
    holds: RouteHolds,
    watching: AbortHandle,
    /// The time for which streams may continue when the instance is retired.
    drain: Duration,
}

/// The first start of an instance.
#[derive(Debug, Clone, Copy)]
enum Start {
    /// A worker must serve within `limit`, until `deadline`.
    Pending { deadline: Instant, limit: Duration },
    /// A worker has served.
    Done,
}

impl ModelFactory {
    pub fn new(context: Context, hire: mpsc::Sender<ControllerTask>) -> Self {
        Self { context, hire, library: OnceLock::new(), made: AtomicUsize::new(0) }
    }

    /// Creates an instance. Its controller starts the workers.
    pub(super) async fn make(
        &self,
        spec: InstanceSpec,
        FirstShare { share, held }: FirstShare,
        files: Arc<LoadedFiles>,
    ) -> Result<Instance, MakeError> {
        let model = Arc::clone(&spec.model);
        let (facts, heard) = mpsc::channel(EVENT_QUEUE_SIZE);
        let settings = PipelineSettings {
            tenant_weights: self.context.tenants.weights(),
            step_timeout: model.engine.step_timeout().unwrap_or_default(),
            name: model.name.clone(),
            version: model.version.number,
            live: live(&model),
            max_requests: model.queue.max_requests,
            memory: model.queue.memory,
            cache: model.cache,
            profile: model.profile.clone(),
            content: Arc::clone(&files.content),
            residency: Arc::clone(&self.context.residency.signal),
        };
        let pipeline = Pipeline::new(settings, self.context.clock, facts).map_err(MakeError::Memory)?;
        pipeline.set_openai(model.openai.clone());
        let pipeline = Arc::new(pipeline);
        let reference = ReferenceFile::create(&model.name).map_err(MakeError::Reference)?;
        let parts = ModelParts {
            pipeline: Arc::clone(&pipeline),
            reference,
            files: Arc::clone(&files),
            facts: heard,
        };
        let (task, report) = ControllerTask::new(self.context(), Arc::clone(&model), share, held, parts);
        let orders = task.orders.clone();
        self.hire.send(task).await.map_err(|_| MakeError::Stopping)?;
        let (route, holds) = Route::to(Arc::clone(&pipeline));
        let watched = Arc::clone(&pipeline);
        let watching = tokio::spawn(async move { watched.watch().await }).abort_handle();
        let id = self.made.fetch_add(1, Ordering::Relaxed);
        let gpu = Arc::clone(&self.context.gpus[model.gpu]);
        let report_rx = report.clone();
        let served = Served {
            id,
            model,
            gpu,
            pipeline,
            report,
            orders,
            successor: None,
            files,
            role: VersionRole::default(),
        };
        let limit = start_timeout(&self.context.timeouts);
        Ok(Instance {
            served,
            confirmed: spec.clone(),
            spec,
            route,
            report_rx,
            start: Start::Pending { deadline: Instant::now() + limit, limit },
            holds,
            watching,
            drain: self.context.timeouts.drain,
        })
    }

    fn context(&self) -> Context {
        let library = self.library.get().unwrap_or(&self.context.library).clone();
        Context { library, ..self.context.clone() }
    }

    /// Finds the library of ONNX Runtime if a new configuration is the first that needs it.
    pub(super) fn find_library(&self, config: &Config) -> Result<(), String> {
        if self.context.library.as_os_str().is_empty() && self.library.get().is_none() {
            let library = onnxruntime_library(config).map_err(|error| errors::chain(&error))?;
            if !library.as_os_str().is_empty() {
                // If another reload has found the library meanwhile, it is the same one.
                self.library.set(library).ok();
            }
        }
        Ok(())
    }
}

/// Returns the time within which a model must serve: twice the limit for one start, as the reference
/// worker starts first. Deaths and waits for memory count.
pub fn start_timeout(timeouts: &Timeouts) -> Duration {
    (timeouts.spawn + timeouts.warm) * 2 + timeouts.stop
}

fn live(model: &ModelConfig) -> LiveSettings {
    LiveSettings {
        slo: model.slo,
        max_delay: model.batch.max_delay,
        reject_late: model.queue.on_late == OnLate::Reject,
        priority: model.priority,
    }
}

impl Instance {
    /// Gives the instance another specification, which needs no new workers.
    pub(super) async fn configure(&mut self, spec: &InstanceSpec) -> Result<(), String> {
        let model = Arc::clone(&spec.model);
        send_order(&self.served.orders, Order::Configure { model: Arc::clone(&model) }).await?;
        self.served.pipeline.set_live_settings(live(&model));
        self.served.pipeline.set_openai(model.openai.clone());
        self.served.model = model;
        self.spec = spec.clone();
        Ok(())
    }

    pub(super) fn confirm(&mut self) {
        self.confirmed = self.spec.clone();
    }

    /// Returns the progress of the first start, and marks the report as seen.
    pub(super) fn health(&mut self, now: Instant) -> Health {
        let report = self.report_rx.borrow_and_update();
        match (&report.state, self.start) {
            (ModelState::Unready { why, .. }, _) => Health::Failed(why.clone()),
            (ModelState::Ready, _) => {
                self.start = Start::Done;
                Health::Serving
            }
            (_, Start::Done) => Health::Serving,
            (_, Start::Pending { deadline, limit }) if now >= deadline => {
                Health::Failed(start_timed_out(&report, limit))
            }
            (_, Start::Pending { .. }) => Health::Starting,
        }
    }

    /// Returns the time at which the start times out, if it has not timed out at `now`.
    pub(super) fn deadline_after(&self, now: Instant) -> Option<Instant> {
        match self.start {
            Start::Pending { deadline, .. } => Some(deadline).filter(|deadline| *deadline > now),
            Start::Done => None,
        }
    }

    /// Returns the share that is in force when the change in progress has ended.
    pub(super) fn coming_share(&self) -> Percent {
        let report = self.served.report.borrow();
        report.coming.unwrap_or(report.share)
    }

    /// Returns the share with which a successor starts.
    pub(super) fn successors_share(&self, desired: &DesiredModel) -> FirstShare {
        let held = self.served.report.borrow().held;
        FirstShare { share: desired.share_instead_of(self.coming_share()), held }
    }

    /// Holds the share, or releases it.
    pub(super) async fn hold(&self, held: bool) {
        if self.served.report.borrow().held != held {
            let (reply, _) = oneshot::channel();
            // If the controller has ended, no worker needs the hold.
            send_order(&self.served.orders, Order::Hold { held, reply }).await.ok();
        }
    }

    /// Ends the instance in the background, after it has answered its requests. The router no longer
    /// has a route to it. Requests that are left after [`ANSWER_TIMEOUT`] are refused with `why`, and
    /// streams that are left after `timeouts.drain` are cut.
    pub(super) fn retire(self, why: &'static str) {
        let Self { served, route, mut holds, watching, drain, .. } = self;
        let Served { model, pipeline, orders, .. } = served;
        drop(route);
        // The task that decides about sleep no longer knows this instance.
        if pipeline.load().1 > 0 {
            pipeline.wake();
        }
        let streams_until = Instant::now() + drain;
        tokio::spawn(async move {
            if tokio::time::timeout(ANSWER_TIMEOUT, holds.released()).await.is_err() {
                tracing::warn!(
                    model = model.name,
                    why,
                    waited_ms = rounding::ms(ANSWER_TIMEOUT),
                    "outgoing workers of the model did not answer all requests in time; refusing the remaining requests"
                );
                pipeline.shut(why);
            }
            if tokio::time::timeout_at(streams_until, holds.streams_ended()).await.is_err() {
                let model = &model.name;
                tracing::warn!(
                    model,
                    why,
                    waited_ms = rounding::ms(drain),
                    "response streams of outgoing workers did not end within timeouts.drain; cutting these streams"
                );
            }
            // An error means that the controller has ended.
            orders.send(Order::Stop).await.ok();
            // The controller kills workers that do not exit.
            orders.closed().await;
            watching.abort();
            tracing::info!(model = model.name, why, "the model's outgoing workers have exited");
        });
    }
}

pub(super) async fn send_order(orders: &mpsc::Sender<Order>, order: Order) -> Result<(), String> {
    let sent = tokio::time::timeout(ORDER_TIMEOUT, orders.send(order)).await;
    match sent {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) => Err("the model's controller has stopped; see the log".to_owned()),
        Err(_) => Err("too many orders are queued for the model; try again later".to_owned()),
    }
}

fn start_timed_out(report: &ModelReport, limit: Duration) -> String {
    let waits = match &report.state {
        ModelState::Waiting(why) => format!(": {why}"),
        _ if report.waits.contains(&WaitReason::Turn) => ": other workers start first".to_owned(),
        _ => String::new(),
    };
    format!("the model was not ready within {limit:?} (timeouts.spawn, timeouts.warm){waits}")
}
