//! The wiring of `shadowslice serve`: the one place that knows all parts.

use std::cell::Cell;
use std::collections::HashMap;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::systemd;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot, watch};

use shadowslice_config as config;
use shadowslice_config::{Config, Limits};
use shadowslice_control::backend::GpuBackend;
use shadowslice_control::controller::{
    Context, ControlThread, GroupLedger, MemoryLedger, ModelState, Planned, Planner,
};
use shadowslice_control::host::{self, HostError, RunDir};
use shadowslice_control::models::{COMMANDS, ModelFactory, ModelSet, Registry, Reload, Served, Shown};
use shadowslice_control::nvml::Watch;
use shadowslice_control::process::{Users, end_those_left, may_raise_priority};
use shadowslice_datapath::clock::Clock;
use shadowslice_datapath::peer::{Guard, Refusals};
use shadowslice_datapath::pulse::Pulse;
use shadowslice_datapath::repository::{Asked, Repository};
use shadowslice_datapath::router::Router;
use shadowslice_datapath::trace::Tracer;
use shadowslice_ingress::{BindError, Ingress, MetricsListeners, Render, RequestMemory};
use shadowslice_operations::admin::{Admin, Reach};
use shadowslice_operations::log::Log;
use shadowslice_operations::machine::Machine;
use shadowslice_operations::metrics;
use shadowslice_operations::otlp::Exporter;
use shadowslice_shared::errors;
use shadowslice_shared::exit::{self, fail};

/// How long the controllers may take to end, beyond the stop timeout.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// A data-path thread takes from the queue that all threads share after so many tasks, even if its
/// own is not empty. Its own queue holds 256 tasks: with more active connections, those in the
/// shared queue would wait while the others get tens of answers each.
const SHARED_QUEUE_TURN: u32 = 2;

const NO_THREADS: &str = "the runtime cannot be started; raise the limit on processes";

/// Returns the exit code.
pub(crate) fn run(path: &Path) -> u8 {
    let log = Log::start();
    let code = run_logged(path, &log);
    let read = log.end();
    // The error, if there is one, is the last word.
    code.unwrap_or_else(|Failed { why, code }| if read { fail(&why, code) } else { code })
}

fn run_logged(path: &Path, log: &Log) -> Result<u8, Failed> {
    let config = match config::load_here(path) {
        Ok(config) => config,
        Err(error) => return Err(Failed { why: errors::chain(&error), code: exit::CONFIG }),
    };
    for note in &config.notes {
        tracing::warn!("{note}");
    }
    start(path, &config, log)
}

struct Failed {
    why: String,
    code: u8,
}

fn unavailable(what: &str, cause: &dyn Error) -> Failed {
    Failed { why: format!("{what}: {}", errors::chain(cause)), code: exit::UNAVAILABLE }
}

fn start(file: &Path, config: &Config, log: &Log) -> Result<u8, Failed> {
    let unfit = |error: HostError| unavailable("this host cannot serve", &error);
    let library = host::onnxruntime_library(config).map_err(unfit)?;
    let program = host::worker_program().map_err(unfit)?;
    let run_dir = RunDir::take(&config.run_dir).map_err(|error| unfit(error.into()))?;
    end_those_left(&run_dir.private().join("workers"));
    host::raise_file_limit();
    let users = config.workers.users.clone().map(|users| Arc::new(Users::new(users)));
    if users.is_some() && !nix::unistd::geteuid().is_root() {
        let why = "workers.users: only root's supervisor can run workers as other users".to_owned();
        return Err(Failed { why, code: exit::CONFIG });
    }
    let place = match &users {
        Some(_) => run_dir.passable().map_err(|error| unfit(error.into()))?,
        None => run_dir.private(),
    };
    let gpus = host::gpus(&config.gpus, &place, &program, users.is_some()).map_err(unfit)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(host::data_path_threads())
        .thread_name("data-path")
        .global_queue_interval(SHARED_QUEUE_TURN)
        .enable_all()
        .build()
        .map_err(|error| unavailable(NO_THREADS, &error))?;
    // Requests and answers pass through this process.
    if let Err(error) = nix::sys::prctl::set_dumpable(false) {
        tracing::warn!(%error, "other processes of this user can read the supervisor's memory");
    }
    let watch = Watch::start(&config.gpus);
    let context = Context {
        program,
        library,
        engines: place.join("tensorrt"),
        register: run_dir.private().join("workers"),
        users,
        variables: config.workers.environment.clone(),
        worker_memory: config.workers.memory,
        timeouts: config.timeouts,
        response_bytes: config.limits.response_bytes,
        clock: Clock::start(),
        data_path: runtime.handle().clone(),
        lower_shadows: may_raise_priority(),
        gpus: gpus.clone(),
        readings: watch.readings(),
        memory: gpus.iter().map(|_| Arc::new(MemoryLedger::new(config.controller.standby_memory))).collect(),
        groups: gpus.iter().map(|gpu| Arc::new(GroupLedger::new(groups_of(&**gpu)))).collect(),
        policy_acts: config.controller.acts().is_some(),
    };
    let code = runtime.block_on(serve(file, config, &run_dir, context, log));
    // The workers have ended by now, or the supervisor must end at once.
    let at_once = !matches!(code, Ok(0));
    gpus.iter().for_each(|gpu| gpu.stop(at_once));
    // Nothing is waited for: by now all was answered, or a second signal came.
    runtime.shutdown_background();
    code
}

/// Zero where the GPU does not divide.
fn groups_of(gpu: &dyn GpuBackend) -> usize {
    gpu.division().map_or(0, |division| division.count())
}

struct Running {
    registry: Registry,
    control: ControlThread,
    router: Arc<Router>,
    models: watch::Receiver<Arc<ModelSet>>,
    planned: Option<watch::Receiver<Planned>>,
    pulse: Pulse,
}

/// Returns once the models are made; their workers begin to start.
async fn run_models(
    file: &Path,
    config: &Config,
    context: &Context,
    tracer: Option<Arc<Tracer>>,
) -> Result<Running, Failed> {
    let (for_planner, shared) = watch::channel(Vec::new());
    let pulse = Pulse::new(context.clock);
    let (planner, planned) = Planner::new(&config.controller, context.clock, &context.gpus, shared).unzip();
    let started = ControlThread::start(planner, pulse.clone());
    let (control, hire) = started.map_err(|error| unavailable(NO_THREADS, &error))?;
    let (router, (models, seen)) = (Arc::new(Router::new(pulse.clone())), watch::channel(Arc::default()));
    let factory = ModelFactory { context: context.clone(), hire, next: 0 };
    let shown = Shown { router: Arc::clone(&router), models, for_planner, tracer };
    let registry = Registry::start(file, config, factory, shown).await;
    let registry = registry.map_err(|error| unavailable("a model cannot be made", &error))?;
    Ok(Running { registry, control, router, models: seen, planned, pulse })
}

fn control_ended() -> Failed {
    let why = "the controllers have ended by a fault of this program; please report the log above";
    Failed { why: why.to_owned(), code: exit::SOFTWARE }
}

fn repository(
    models: &watch::Receiver<Arc<ModelSet>>,
    router: &Arc<Router>,
    guard: Guard,
    wishes: mpsc::Sender<Asked>,
) -> Arc<Repository> {
    let (models, router) = (models.clone(), Arc::clone(router));
    let list = move || models.borrow().listed(|name| router.is_drained(name));
    Arc::new(Repository::new(list, guard, wishes))
}

async fn serve(
    file: &Path,
    config: &Config,
    run_dir: &RunDir,
    context: Context,
    log: &Log,
) -> Result<u8, Failed> {
    let mut signals = Signals::new()?;
    let hangup = hear(SignalKind::hangup())?;
    let connections = host::connections(config);
    let memory = Some(host::request_memory(&config.limits));
    let limits = Limits { connections, memory, ..config.limits.clone() };
    let refusals = Arc::new(Refusals::default());
    let model_control = Guard::of(&config.model_control, &refusals)
        .map_err(|error| unavailable("models cannot be opened to clients", &error))?;
    let taken = |error: BindError| unavailable("an address cannot be listened on", &error);
    let ingress = Ingress::bind(&config.listen.http, &config.listen.grpc, &limits, &refusals);
    let ingress = ingress.await.map_err(taken)?;
    let metrics_listeners = MetricsListeners::bind(&config.listen.metrics, &refusals).await.map_err(taken)?;
    let admin = Admin::bind(run_dir.path(), config.control.as_ref(), &refusals)
        .map_err(|error| unavailable("the control socket cannot be listened on", &error))?;
    let (tracer, exporter) = tracing(config, context.clock)?.unzip();
    let Running { registry, mut control, router, models, planned, pulse } =
        run_models(file, config, &context, tracer.clone()).await?;
    let (reloads, to_reload) = mpsc::channel(COMMANDS);
    let (wishes, wished) = mpsc::channel(COMMANDS);
    let repository = repository(&models, &router, model_control, wishes);
    let reach = Arc::new(Reach {
        router: Arc::clone(&router),
        models: models.clone(),
        reloads: reloads.clone(),
        gpus: context.gpus,
        readings: context.readings,
        controller: config.controller,
        planned,
    });
    let (stop, stopping) = watch::channel(false);
    let (end, ending) = watch::channel(false);
    let machine = Machine::new(context.clock);
    let (log_dropped, memory) = (log.dropped(), ingress.memory());
    let own = move || {
        let RequestMemory { reserved, limit } = memory();
        metrics::Own {
            log_dropped: log_dropped(),
            request_memory: (reserved, limit),
            peers_refused: refusals.count(),
            machine: machine.usage(),
        }
    };
    let rendering = rendering(Arc::clone(&reach), tracer.clone(), own);
    let metrics = tokio::spawn(metrics_listeners.run(rendering, ending));

    let begun = Cell::new(false);
    let served = async {
        if config.strict_start {
            let mut stopped = stopping.clone();
            let models = Arc::clone(&models.borrow());
            tokio::select! {
                ready = all_ready(&models.served) => ready?,
                // An error means that the sender of the stop is gone, which is an end, too.
                _ = stopped.wait_for(|stop| *stop) => return Ok(()),
            }
        }
        tracing::info!(models = config.models.len(), run_dir = %run_dir.path().display(), "serving");
        systemd::serving();
        begun.set(true);
        ingress.run(Arc::clone(&router), repository, tracer.clone(), stopping).await;
        Ok::<(), Failed>(())
    };
    let conversation = async {
        tokio::select! {
            served = served => served,
            () = admin.run(reach) => Ok(()),
            () = registry.run(to_reload, wished) => Ok(()),
            () = reload_on(hangup, reloads) => Ok(()),
            () = systemd::feed_watchdog(pulse) => Ok(()),
            () = control.ended() => Err(control_ended()),
        }
    };
    let way = Ending { router: &router, begun: &begun, lame_duck: config.lame_duck, stop };
    let outcome = until_stopped(conversation, &mut signals, way).await;
    let limit = config.timeouts.stop * 2 + STOP_GRACE;
    // Traces are sent while the workers end.
    let flushed = exporter.map(|exporter| tokio::spawn(exporter.finish()));
    let code = finish(outcome, &mut control, &mut signals, limit).await;
    if let (Some(flushed), Ok(0)) = (flushed, &code) {
        tokio::select! {
            _ = flushed => {}
            _ = signals.next() => {}
        }
    }
    // Metrics are served until everything else has ended.
    end.send_replace(true);
    if let Err(error) = metrics.await {
        tracing::error!(%error, "the metrics' listeners broke");
    }
    code
}

fn tracing(config: &Config, clock: Clock) -> Result<Option<(Arc<Tracer>, Exporter)>, Failed> {
    let Some(tracing) = &config.tracing else { return Ok(None) };
    let started = Exporter::start(tracing, clock);
    started.map(Some).map_err(|error| unavailable("requests cannot be traced", &error))
}

/// Asks for a reload at each SIGHUP, for ever.
async fn reload_on(mut hangup: Signal, reloads: mpsc::Sender<Reload>) {
    while hangup.recv().await.is_some() {
        // The log says how the reload went. A full queue is no loss: the last reload in it reads
        // the same file.
        reloads.try_send(Reload { reply: oneshot::channel().0 }).ok();
    }
    std::future::pending().await
}

fn rendering(
    reach: Arc<Reach>,
    tracer: Option<Arc<Tracer>>,
    own: impl Fn() -> metrics::Own + Send + Sync + 'static,
) -> Render {
    Arc::new(move || {
        let status = reach.status();
        let mut statuses: HashMap<_, _> =
            status.models.into_iter().map(|model| (model.name.clone(), model)).collect();
        let models = reach.models();
        let told = |model: &Served| {
            Some(metrics::ModelMetrics {
                status: statuses.remove(&model.model.name)?,
                totals: model.pipeline.totals(),
                changes: model.report.borrow().changes.clone(),
            })
        };
        let models: Vec<_> = models.served.iter().filter_map(told).collect();
        let policy = reach.planned.as_ref().map(|planned| {
            let Planned { report, took } = planned.borrow().clone();
            metrics::Policy { name: report.policy, took }
        });
        let traces = tracer.as_ref().map(|tracer| tracer.counts());
        metrics::render(&models, policy.as_ref(), traces, &status.gpus, own())
    })
}

/// What an orderly end takes.
struct Ending<'a> {
    router: &'a Router,
    /// Whether clients are served already.
    begun: &'a Cell<bool>,
    lame_duck: Duration,
    stop: watch::Sender<bool>,
}

/// `None` if a signal cuts the answering short.
async fn until_stopped(
    conversation: impl Future<Output = Result<(), Failed>>,
    signals: &mut Signals,
    Ending { router, begun, lame_duck, stop }: Ending<'_>,
) -> Option<Result<(), Failed>> {
    let mut conversation = std::pin::pin!(conversation);
    let told = tokio::select! {
        outcome = &mut conversation => return Some(outcome),
        told = signals.next() => told,
    };
    systemd::stopping();
    router.stop();
    // Who ends it at a terminal does not wait for load balancers.
    if told == Told::Terminate && begun.get() && !lame_duck.is_zero() {
        tracing::info!("unready, and serving for {lame_duck:?} more; a second signal ends that");
        tokio::select! {
            outcome = &mut conversation => return Some(outcome),
            () = tokio::time::sleep(lame_duck) => {}
            _ = signals.next() => {}
        }
    }
    tracing::info!("stopping: answering what was accepted; a further signal ends at once");
    stop.send_replace(true);
    tokio::select! {
        outcome = &mut conversation => Some(outcome),
        _ = signals.next() => None,
    }
}

async fn finish(
    outcome: Option<Result<(), Failed>>,
    control: &mut ControlThread,
    signals: &mut Signals,
    limit: Duration,
) -> Result<u8, Failed> {
    let Some(outcome) = outcome else { return Ok(cut(control)) };
    control.stop();
    tokio::select! {
        () = control.ended() => {}
        () = tokio::time::sleep(limit) => tracing::error!("workers outlived their kill and are left behind"),
        _ = signals.next() => return Ok(cut(control)),
    }
    outcome.map(|()| {
        tracing::info!("stopped");
        0
    })
}

/// An error names the first model that never will be ready.
async fn all_ready(models: &[Served]) -> Result<(), Failed> {
    for model in models {
        let mut report = model.report.clone();
        let settled = |state: &ModelState| matches!(state, ModelState::Ready | ModelState::Unready { .. });
        let seen = report.wait_for(|report| settled(&report.state)).await;
        if let Ok(seen) = seen
            && let ModelState::Unready { why, .. } = &seen.state
        {
            let name = &model.model.name;
            let why = format!("`start: strict` and not every model can be served: {name}: {why}");
            return Err(Failed { why, code: exit::CONFIG });
        }
    }
    Ok(())
}

fn hear(kind: SignalKind) -> Result<Signal, Failed> {
    signal(kind).map_err(|error| unavailable("signals cannot be heard", &error))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Terminate,
    Interrupt,
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> Result<Self, Failed> {
        Ok(Self { terminate: hear(SignalKind::terminate())?, interrupt: hear(SignalKind::interrupt())? })
    }

    async fn next(&mut self) -> Told {
        tokio::select! {
            _ = self.terminate.recv() => Told::Terminate,
            _ = self.interrupt.recv() => Told::Interrupt,
        }
    }
}

fn cut(control: &mut ControlThread) -> u8 {
    tracing::warn!("second signal: ending at once");
    control.cut();
    exit::FORCED
}
