//! The wiring of `shadowslice serve`: the one place that knows all parts.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use shadowslice_shared::units::Percent;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot, watch};

use crate::admin::{Admin, Administered, Reach};
use crate::clock::Clock;
use crate::config::{self, Config, Model, OnLate, Start};
use crate::control::{
    Context, Controller, EVENTS, Inbox, MemoryLedger, ModelState, ORDERS, Order, Parts, Planned, Planner,
    Sharer, first_shares,
};
use crate::errors;
use crate::exit::{self, fail};
use crate::host::{self, HostError, RunDir};
use crate::ingress::{Ingress, MetricsListeners, Render};
use crate::machine::Machine;
use crate::metrics;
use crate::nvml::Watch;
use crate::partition::{Gpus, Partition};
use crate::pipeline::{Bell, FACTS, PRESSURES, Pipeline, Settings, Slo};
use crate::process::{ReferenceFile, may_raise_priority};
use crate::router::Router;

/// Beyond the stop timeout, how long the controllers' end is waited for.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// Runs a supervisor; returns the exit code.
pub fn run(path: &Path) -> u8 {
    host::init_logging();
    let config = match config::load_here(path) {
        Ok(config) => config,
        Err(error) => return fail(&errors::chain(&error), exit::CONFIG),
    };
    for note in &config.notes {
        tracing::warn!("{note}");
    }
    match start(&config) {
        Ok(code) => code,
        Err(error) => fail(&errors::chain(&*error), error.code()),
    }
}

/// Why a supervisor cannot run; boxed, as its variants are wide.
type Failed = Box<ServeError>;

/// Why a supervisor cannot run.
#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error("this host cannot serve")]
    Host(#[from] HostError),
    #[error("an address cannot be listened on")]
    Listen(#[from] crate::ingress::BindError),
    #[error("the control socket cannot be listened on")]
    Control(#[from] crate::admin::BindError),
    #[error("shared memory cannot be had")]
    Memory(#[from] shadowslice_shared::slab::SlabError),
    #[error("reference answers cannot be kept")]
    Reference(#[from] crate::process::ReferenceError),
    #[error("the runtime cannot be started; raise the limit on processes")]
    Runtime(#[source] std::io::Error),
    #[error("signals cannot be heard")]
    Signals(#[source] std::io::Error),
    #[error("the controllers have ended by a fault of this program; please report the log above")]
    ControlEnded,
    #[error("`start: strict` and not every model can be served: {0}")]
    Strict(String),
}

impl ServeError {
    fn code(&self) -> u8 {
        match self {
            Self::Strict(_) => exit::CONFIG,
            Self::ControlEnded => exit::SOFTWARE,
            _ => exit::UNAVAILABLE,
        }
    }
}

fn failed<E>(error: E) -> Failed
where
    ServeError: From<E>,
{
    Box::new(ServeError::from(error))
}

fn start(config: &Config) -> Result<u8, Failed> {
    let library = host::onnxruntime_library(config).map_err(failed)?;
    let program = host::worker_program().map_err(failed)?;
    let run_dir = RunDir::take(&config.run_dir).map_err(failed)?;
    host::raise_file_limit();
    let gpus = host::gpus(&config.gpus, &run_dir.private(), &program).map_err(failed)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(host::data_path_threads())
        .thread_name("data-path")
        .enable_all()
        .build()
        .map_err(|error| Box::new(ServeError::Runtime(error)))?;
    let watch = Watch::start(&config.gpus);
    let context = Context {
        program,
        library,
        engines: run_dir.private().join("tensorrt"),
        timeouts: config.timeouts,
        response_bytes: config.limits.response_bytes,
        clock: Clock::start(),
        data_path: runtime.handle().clone(),
        lower_shadows: may_raise_priority(),
        readings: watch.readings(),
        memory: ledgers(config),
        policy_acts: config.controller.acts().is_some(),
        worker_ids: Arc::new(AtomicU64::new(1)),
    };
    let code = runtime.block_on(serve(config, &run_dir, context, &gpus));
    // By now the workers have gone, or everything is to end at once.
    let at_once = !matches!(code, Ok(0));
    gpus.iter().for_each(|gpu| gpu.stop(at_once));
    // Nothing that still runs is waited for: by now all was answered, or a second signal came.
    runtime.shutdown_background();
    code
}

/// What the models need of each GPU's memory.
fn ledgers(config: &Config) -> Vec<Arc<MemoryLedger>> {
    let of = |gpu| config.models.iter().filter(move |model| model.gpu == gpu);
    let ledger = |gpu| Arc::new(MemoryLedger::new(of(gpu), config.controller.standby_memory));
    (0..config.gpus.len()).map(ledger).collect()
}

/// A model's parts, before its controller runs.
struct Wired {
    administered: Administered,
    controller: Controller,
    inbox: Inbox,
}

fn wire(
    model: &Model,
    share: Percent,
    context: &Context,
    gpus: &[Arc<dyn Partition>],
    bell: Option<Bell>,
) -> Result<Wired, Failed> {
    let (facts, heard) = mpsc::channel(FACTS);
    let (orders, ordered) = mpsc::channel(ORDERS);
    let (events, happened) = mpsc::channel(EVENTS);
    let gpu = Arc::clone(&gpus[model.gpu]);
    let settings = Settings {
        name: model.name.clone(),
        slo: Slo { latency: model.slo.latency, percentile: model.slo.percentile },
        max_requests: model.queue.max_requests,
        memory: model.queue.memory,
        max_delay: model.batch.max_delay,
        reject_late: model.queue.on_late == OnLate::Reject,
        profile: model.profile.clone(),
        bell,
    };
    let pipeline = Arc::new(Pipeline::new(settings, context.clock, facts).map_err(failed)?);
    let model = Arc::new(model.clone());
    let (controller, standing) = Controller::new(Parts {
        context: context.clone(),
        model: Arc::clone(&model),
        share,
        gpu,
        pipeline: Arc::clone(&pipeline),
        reference: ReferenceFile::create(&model.name).map_err(failed)?,
        events,
    });
    let calls = context.memory[model.gpu].calls();
    let inbox = Inbox { orders: ordered, facts: heard, events: happened, calls };
    Ok(Wired { administered: Administered { model, pipeline, standing, orders }, controller, inbox })
}

/// A model, as the planner reaches it.
fn sharer(model: &Administered, gpus: &Gpus) -> Sharer {
    Sharer {
        model: Arc::clone(&model.model),
        gpu: Arc::clone(&gpus[model.model.gpu]),
        pipeline: Arc::clone(&model.pipeline),
        standing: model.standing.clone(),
        orders: model.orders.clone(),
    }
}

async fn serve(config: &Config, run_dir: &RunDir, context: Context, gpus: &Gpus) -> Result<u8, Failed> {
    let mut signals = Signals::new()?;
    let ingress =
        Ingress::bind(&config.listen.http, &config.listen.grpc, &config.limits).await.map_err(failed)?;
    let metrics_listeners = MetricsListeners::bind(&config.listen.metrics).await.map_err(failed)?;
    let admin = Admin::bind(run_dir.path()).map_err(failed)?;
    let mut administered = Vec::new();
    let mut controllers = Vec::new();
    let shares = first_shares(&config.controller, gpus, &config.models);
    let (bells, pressed) = mpsc::channel(PRESSURES);
    for (index, (model, share)) in config.models.iter().zip(shares).enumerate() {
        let bell = config.controller.acts().map(|_| Bell { model: index, to: bells.clone() });
        let wired = wire(model, share, &context, gpus, bell)?;
        administered.push(wired.administered);
        controllers.push((wired.controller, wired.inbox));
    }
    let models = Arc::new(administered);
    for model in models.iter() {
        let pipeline = Arc::clone(&model.pipeline);
        tokio::spawn(async move { pipeline.watch().await });
    }
    let sharers = models.iter().map(|model| sharer(model, gpus)).collect();
    let (planner, planned) = Planner::new(&config.controller, context.clock, gpus, sharers, pressed).unzip();
    let reach = Arc::new(Reach {
        models: Arc::clone(&models),
        gpus: gpus.clone(),
        readings: context.readings,
        controller: config.controller,
        planned,
    });
    let mut control = ControlThread::start(controllers, planner)?;
    let pipelines = models.iter().map(|model| (model.model.name.clone(), Arc::clone(&model.pipeline)));
    let router = Arc::new(Router::new(pipelines.collect::<HashMap<_, _>>()));
    let (stop, stopping) = watch::channel(false);
    let (end, ending) = watch::channel(false);
    let metrics = tokio::spawn(
        metrics_listeners.run(rendering(Arc::clone(&reach), Machine::new(context.clock)), ending),
    );

    let served = async {
        if config.start == Start::Strict {
            let mut stopped = stopping.clone();
            tokio::select! {
                ready = all_ready(&models) => ready?,
                // An error means that nobody is left to say stop, which is the end, too.
                _ = stopped.wait_for(|stop| *stop) => return Ok(()),
            }
        }
        tracing::info!(models = models.len(), run_dir = %run_dir.path().display(), "serving");
        ingress.run(router, stopping).await;
        Ok::<(), Failed>(())
    };
    let conversation = async {
        tokio::select! {
            served = served => served,
            () = admin.run(reach) => Ok(()),
            () = control.ended() => Err(Box::new(ServeError::ControlEnded)),
        }
    };
    let outcome = until_stopped(conversation, &mut signals, &stop).await;
    let limit = config.timeouts.stop * 2 + STOP_GRACE;
    let code = finish(outcome, &models, &mut control, &mut signals, limit).await;
    // Metrics are told until all the rest has ended.
    end.send_replace(true);
    if let Err(error) = metrics.await {
        tracing::error!(%error, "the metrics' listeners broke");
    }
    code
}

/// Writes the metrics of models, policy, GPUs and machine.
fn rendering(reach: Arc<Reach>, machine: Machine) -> Render {
    Arc::new(move || {
        let status = reach.status();
        let models = status.models.into_iter().zip(reach.models.iter());
        let told = |(status, model): (_, &Administered)| metrics::Model {
            status,
            totals: model.pipeline.totals(),
            changes: model.standing.borrow().changes.clone(),
        };
        let policy = reach.planned.as_ref().map(|planned| {
            let Planned { report, took } = planned.borrow().clone();
            metrics::Policy { name: report.policy, took }
        });
        let models: Vec<_> = models.map(told).collect();
        metrics::render(&models, policy.as_ref(), &status.gpus, machine.usage())
    })
}

/// Serves until a signal, and then until all is answered; `None` if a second signal cuts that short.
async fn until_stopped(
    conversation: impl Future<Output = Result<(), Failed>>,
    signals: &mut Signals,
    stop: &watch::Sender<bool>,
) -> Option<Result<(), Failed>> {
    let mut conversation = std::pin::pin!(conversation);
    tokio::select! {
        outcome = &mut conversation => return Some(outcome),
        () = signals.next() => tracing::info!("stopping: answering what was accepted; a second signal ends at once"),
    }
    stop.send_replace(true);
    tokio::select! {
        outcome = &mut conversation => Some(outcome),
        () = signals.next() => None,
    }
}

/// Ends the workers, and says how all went.
async fn finish(
    outcome: Option<Result<(), Failed>>,
    models: &[Administered],
    control: &mut ControlThread,
    signals: &mut Signals,
    limit: Duration,
) -> Result<u8, Failed> {
    let Some(outcome) = outcome else { return Ok(control.cut()) };
    for model in models {
        // A full queue of orders is emptied by the controller; a closed one means that it has ended.
        model.orders.send(Order::Stop).await.ok();
    }
    tokio::select! {
        () = control.ended() => {}
        () = tokio::time::sleep(limit) => tracing::error!("workers outlived their kill and are left behind"),
        () = signals.next() => return Ok(control.cut()),
    }
    outcome.map(|()| {
        tracing::info!("stopped");
        0
    })
}

/// Waits until every model is ready; an error names the first that never will be.
async fn all_ready(models: &[Administered]) -> Result<(), Failed> {
    for model in models {
        let mut standing = model.standing.clone();
        let settled = |state: &ModelState| matches!(state, ModelState::Ready | ModelState::Unready(_));
        let seen = standing.wait_for(|standing| settled(&standing.state)).await;
        if let Ok(seen) = seen
            && let ModelState::Unready(why) = &seen.state
        {
            return Err(Box::new(ServeError::Strict(format!("{}: {why}", model.model.name))));
        }
    }
    Ok(())
}

/// SIGTERM and SIGINT.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> Result<Self, Failed> {
        let hear = |kind| signal(kind).map_err(|error| Box::new(ServeError::Signals(error)));
        Ok(Self { terminate: hear(SignalKind::terminate())?, interrupt: hear(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// The thread on which the controllers run, and the planner.
struct ControlThread {
    cut: Option<oneshot::Sender<()>>,
    ended: oneshot::Receiver<()>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl ControlThread {
    fn start(controllers: Vec<(Controller, Inbox)>, planner: Option<Planner>) -> Result<Self, Failed> {
        let failed = |error| Box::new(ServeError::Runtime(error));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (cut, cut_short) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        let work = move || {
            runtime.block_on(async {
                let mut tasks = tokio::task::JoinSet::new();
                for (controller, inbox) in controllers {
                    tasks.spawn(controller.run(inbox));
                }
                let planning = async {
                    match planner {
                        Some(planner) => planner.run().await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    _ = tasks.join_all() => {}
                    _ = cut_short => {}
                    () = planning => {}
                }
            });
            // Processes that are still there are killed as the runtime drops them.
            drop(runtime);
            // Nobody waits for the end if it was cut short.
            end.send(()).ok();
        };
        let thread = std::thread::Builder::new().name("control".to_owned()).spawn(work).map_err(failed)?;
        Ok(Self { cut: Some(cut), ended, thread: Some(thread) })
    }

    async fn ended(&mut self) {
        // An error means that the thread is gone, which is an end, too.
        if !self.ended.is_terminated() {
            (&mut self.ended).await.ok();
        }
    }

    /// Kills all workers and ends at once.
    fn cut(&mut self) -> u8 {
        tracing::warn!("second signal: ending at once");
        if let Some(cut) = self.cut.take() {
            // The thread may have ended already.
            cut.send(()).ok();
        }
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
        exit::FORCED
    }
}
