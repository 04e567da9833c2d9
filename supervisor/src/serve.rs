//! The wiring of `shadowslice serve`: the one place that knows all parts.

use std::cell::Cell;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::ending::{Ending, Signals, finish, hear, until_ended};
use crate::ground::Ground;
use crate::persist;
use crate::running::{Running, all_ready, repository, run_models};
use crate::shown;
use crate::systemd;
use crate::upgrade::{self, Conversation, Go, Predecessor, Succession};

use tokio::signal::unix::{Signal, SignalKind};
use tokio::sync::{mpsc, watch};

use shadowslice_config as config;
use shadowslice_config::{Config, LimitsConfig, ListenConfig};
use shadowslice_control::controller::Context;
use shadowslice_control::host::{self, RunDir};
use shadowslice_control::models::{MAX_COMMANDS, PersistedState, Registry, start_timeout};
use shadowslice_datapath::clock::Clock;
use shadowslice_datapath::peer::{Guard, Refusals};
use shadowslice_datapath::relay::RelayServer;
use shadowslice_datapath::router::Router;
use shadowslice_datapath::sockets::PassableSocket;
use shadowslice_datapath::trace::Tracer;
use shadowslice_ingress::{BindError, Course, Ingress, IngressMemory, MetricsListeners, SharedMemory};
use shadowslice_operations::access_log::AccessLogWriter;
use shadowslice_operations::admin::{Admin, AdminContext};
use shadowslice_operations::history::History;
use shadowslice_operations::log::{self, Log};
use shadowslice_operations::machine::MachineMonitor;
use shadowslice_operations::metrics;
use shadowslice_operations::otlp::Exporter;
use shadowslice_operations::own_process::OwnProcess;
use shadowslice_shared::errors;
use shadowslice_shared::exit;

/// How long the controllers may take to end, beyond the stop timeout.
const STOP_GRACE: Duration = Duration::from_secs(5);

pub(crate) const NO_THREADS: &str = "cannot start threads; raise the limit on processes";

/// Returns the exit code.
pub(crate) fn run(path: &Path) -> u8 {
    // First of all, as no descriptor may be opened before.
    let predecessor = Predecessor::find();
    let log = Log::start();
    let code = run_logged(path, &log, predecessor);
    let read = log.end();
    // The error, if there is one, is the last word.
    code.unwrap_or_else(|Failed { why, code }| if read { log::fail(&why, code) } else { code })
}

fn run_logged(
    path: &Path,
    log: &Log,
    predecessor: std::io::Result<Option<Predecessor>>,
) -> Result<u8, Failed> {
    let mut predecessor =
        predecessor.map_err(|error| unavailable("cannot take over from the previous supervisor", &error))?;
    let code = run_after(path, log, &mut predecessor);
    if let (Err(Failed { why, .. }), Some(predecessor)) = (&code, &predecessor) {
        predecessor.failed(why);
    }
    code
}

fn run_after(path: &Path, log: &Log, predecessor: &mut Option<Predecessor>) -> Result<u8, Failed> {
    let config = match config::load_here(path) {
        Ok(config) => config,
        Err(error) => return Err(Failed { why: errors::chain(&error), code: exit::CONFIG }),
    };
    for note in &config.notes {
        tracing::warn!(%note, "the configuration is valid, but you should correct one setting");
    }
    start(path, &config, log, predecessor)
}

pub(crate) struct Failed {
    pub(crate) why: String,
    pub(crate) code: u8,
}

pub(crate) fn unavailable(what: &str, cause: &dyn Error) -> Failed {
    Failed { why: format!("{what}: {}", errors::chain(cause)), code: exit::UNAVAILABLE }
}

fn start(
    file: &Path,
    config: &Config,
    log: &Log,
    predecessor: &mut Option<Predecessor>,
) -> Result<u8, Failed> {
    let itself =
        upgrade::program().map_err(|error| unavailable("cannot find the path of this program", &error))?;
    let lock = match predecessor {
        Some(before) if before.run_dir != config.run_dir => {
            let there = before.run_dir.display();
            let why = format!(
                "an upgrade cannot change run_dir; set it back to {there}, or restart the supervisor"
            );
            return Err(Failed { why, code: exit::CONFIG });
        }
        Some(before) => before.lock.take(),
        None => None,
    };
    let estates = predecessor.as_ref().map(|before| &before.mps[..]);
    let Ground { run_dir, gpus, runtime, context, watch: _watch } = Ground::prepare(config, lock, estates)?;
    let place = Place { program: &itself, file, run_dir: &run_dir };
    let code = runtime.block_on(serve(&place, config, context, log, predecessor));
    // The workers have ended by now, or the supervisor must end at once.
    let at_once = !matches!(code, Ok(0));
    gpus.iter().for_each(|gpu| gpu.stop(at_once));
    // Nothing is waited for: by now all was answered, or a second signal came.
    runtime.shutdown_background();
    code
}

/// Where this supervisor and what it needs lie.
struct Place<'a> {
    program: &'a Path,
    /// The configuration.
    file: &'a Path,
    run_dir: &'a RunDir,
}

fn control_ended() -> Failed {
    let why = "the controllers exited because of a bug; please report it with the log above";
    Failed { why: why.to_owned(), code: exit::SOFTWARE }
}

async fn serve(
    place: &Place<'_>,
    config: &Config,
    context: Context,
    log: &Log,
    predecessor: &mut Option<Predecessor>,
) -> Result<u8, Failed> {
    let &Place { program, file, run_dir } = place;
    let mut signals = Signals::new()?;
    let hangup = hear(SignalKind::hangup())?;
    let connections = host::connections(config);
    let memory = Some(host::request_memory(&config.limits));
    let limits = LimitsConfig { connections, memory, ..config.limits.clone() };
    let refusals = Arc::new(Refusals::default());
    let model_control = Guard::of(&config.model_control, &refusals)
        .map_err(|error| unavailable("cannot give the users and groups in model_control access", &error))?;
    let taken = |error: BindError| unavailable("cannot listen for requests", &error);
    let mut inherited =
        predecessor.as_mut().map(|before| std::mem::take(&mut before.sockets)).unwrap_or_default();
    let ListenConfig { http, grpc, metrics } = &config.listen;
    let ingress = Ingress::bind(http, grpc, &limits, &mut inherited, &refusals).await.map_err(taken)?;
    let metrics = MetricsListeners::bind(metrics, &mut inherited, &refusals).await.map_err(taken)?;
    let admin = Admin::bind(run_dir.path(), config.control.as_ref(), &mut inherited, &refusals)
        .map_err(|error| unavailable("cannot listen on the control socket", &error))?;
    let relays =
        predecessor.as_mut().and_then(|before| before.relay.take()).map(RelayServer::listen).transpose();
    let relays = relays
        .map_err(|error| unavailable("cannot listen for requests from the previous supervisor", &error))?;
    let (tracer, exporter) = tracing(config, context.clock)?.unzip();
    let access_log = config.access_log.as_deref().map(AccessLogWriter::start).transpose();
    let access_log = access_log.map_err(|error| unavailable("cannot start the access log", &error))?;
    let (rising, risen) = watch::channel(predecessor.is_some());
    let (to_read, state_file) = ((file, &*run_dir.state()), run_dir.state());
    let Running { registry, mut control, router, models, planned, pulse, state } =
        run_models(to_read, config, &context, tracer.clone(), risen.clone()).await?;
    let (upgrade, upgrades) = mpsc::channel(1);
    let (client_commands, client_commands_rx) = mpsc::channel(MAX_COMMANDS);
    let repository = repository(&models, &router, model_control, (client_commands, risen.clone()));
    let reach = Arc::new(AdminContext {
        since: Instant::now(),
        config: std::path::absolute(file).unwrap_or_else(|_| file.to_owned()),
        router: Arc::clone(&router),
        models: models.clone(),
        registry: registry.clone(),
        upgrades: upgrade,
        upgrading: risen.clone(),
        gpus: context.gpus.clone(),
        readings: context.readings,
        controller: config.controller,
        planned,
    });
    let gpus = context.gpus;
    let sockets = [ingress.passable(), metrics.passable(), vec![admin.passable()]].concat();
    let history = Arc::new(History::new());
    let succession = Succession {
        program,
        config: file,
        run_dir,
        sockets: sockets.clone(),
        memory: ingress.shared_memory(),
        models: models.clone(),
        router: &router,
        history: &history,
        registry: registry.clone(),
        rising: rising.clone(),
        gpus: &gpus,
        within: start_timeout(&config.timeouts) + STOP_GRACE,
    };
    // Goes with the supervisor before this one, if there is one.
    let (before_lives, before) = watch::channel(());
    let before_lives = predecessor.is_some().then_some(before_lives);
    let (course, steered) = watch::channel(Course::Serve);
    let (open, opened) = watch::channel(predecessor.is_none());
    let (machine, process) = (MachineMonitor::new(context.clock), OwnProcess::new());
    let (log_dropped, memory) = (log.dropped(), ingress.memory());
    let host_counts = ingress.counts();
    let certificates = ingress.certificates(&metrics);
    let access_log_dropped = access_log.as_ref().map(AccessLogWriter::dropped);
    let own = move || {
        let IngressMemory { reserved, limit } = memory();
        metrics::SupervisorMetrics {
            log_dropped: log_dropped(),
            access_log_dropped: access_log_dropped.as_ref().map(|dropped| dropped()),
            request_memory: metrics::MemoryReservation { reserved, limit },
            host: host_counts(),
            last_reload: None,
            peers_refused: refusals.count(),
            certificates: shown::certificates(&certificates),
            machine: machine.usage(),
            process: process.usage(),
        }
    };
    let shown = shown::shown(&reach, tracer.clone(), own, &history);
    let (metrics_course, metrics_steered) = watch::channel(Course::Serve);
    let (opening, seen, writing) = (opened.clone(), Arc::clone(&reach), Arc::clone(&history));
    let metrics = tokio::spawn(async move {
        tokio::select! {
            () = once(opening) => {}
            // The end may come before that.
            () = ended(metrics_steered.clone()) => return,
        }
        tokio::select! {
            () = metrics.run(shown, metrics_steered) => {}
            () = writing.write(seen) => {}
        }
    });

    let reopen = access_log.as_ref().map(AccessLogWriter::reopen);
    let begun = Cell::new(false);
    let served = async {
        let ready = async {
            match predecessor.take() {
                Some(before) => {
                    let before = before.converse(before_lives, registry.clone()).map_err(|error| {
                        unavailable("cannot communicate with the previous supervisor", &error)
                    })?;
                    succeed(before, &state, &router, &ingress.shared_memory()).await;
                    gpus.iter().for_each(|gpu| gpu.keep());
                    if let Err(error) = history.take(&run_dir.history()) {
                        tracing::warn!(
                            %error,
                            "cannot read the previous supervisor's history; the page's charts start empty"
                        );
                    }
                    Ok(())
                }
                None if config.strict_start => {
                    let models = Arc::clone(&models.borrow());
                    all_ready(&models.served).await
                }
                None => Ok(()),
            }
        };
        tokio::select! {
            ready = ready => ready?,
            () = ended(steered.clone()) => return Ok(()),
        }
        sockets.iter().for_each(PassableSocket::retain);
        inherited.remove_unclaimed();
        rising.send_replace(false);
        open.send_replace(true);
        tracing::info!(models = config.models.len(), run_dir = %run_dir.path().display(), "serving");
        systemd::serving();
        begun.set(true);
        let told = (tracer.clone(), access_log.as_ref().map(AccessLogWriter::log));
        ingress.run(Arc::clone(&router), repository, told, steered.clone()).await;
        if *steered.borrow() == Course::Leave {
            // Its clients' requests go on through this supervisor to the next.
            gone(before.clone()).await;
        }
        Ok::<(), Failed>(())
    };
    // What only the supervisor that serves does.
    let while_it_serves = async {
        once(opened).await;
        tokio::select! {
            () = admin.run(reach) => {}
            () = persist::keep(state_file, models.clone(), Arc::clone(&router), risen.clone()) => {}
            () = left(course.subscribe()) => {}
        }
        std::future::pending().await
    };
    let relayed = async {
        if let Some(relays) = relays {
            tokio::select! {
                () = relays.run(Arc::clone(&router)) => {}
                () = gone(before.clone()) => {}
            }
        }
        std::future::pending().await
    };
    let conversation = async {
        tokio::select! {
            served = served => served,
            () = while_it_serves => Ok(()),
            () = relayed => Ok(()),
            () = registry.watch() => Ok(()),
            () = registry.serve_clients(client_commands_rx) => Ok(()),
            () = reload_on(hangup, registry.clone(), (risen.clone(), reopen)) => Ok(()),
            () = systemd::feed_watchdog(pulse) => Ok(()),
            () = control.ended() => Err(control_ended()),
        }
    };
    let courses = [&course, &metrics_course];
    let way =
        Ending { router: &router, begun: &begun, lame_duck: config.lame_duck, courses, succession, upgrades };
    let outcome = until_ended(conversation, &mut signals, way).await;
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
    // Metrics are served until everything else has ended, unless the next supervisor serves them.
    metrics_course.send_replace(Course::Stop);
    if let Err(error) = metrics.await {
        tracing::error!(
            %error,
            "metrics were not served since the task for them panicked, which is a bug in shadowslice; the stop continues; please report it with the log"
        );
    }
    if let Some(log) = access_log {
        log.end();
    }
    code
}

/// Waits until clients are to be served.
async fn once(mut opened: watch::Receiver<bool>) {
    // An error means that this will never be.
    if opened.wait_for(|opened| *opened).await.is_err() {
        std::future::pending().await
    }
}

/// Waits until the supervisor before this one has ended.
async fn gone(mut before: watch::Receiver<()>) {
    // Nothing is ever sent: this is the end of the sender.
    while before.changed().await.is_ok() {}
}

/// Waits until this supervisor is no longer to serve.
async fn ended(mut course: watch::Receiver<Course>) {
    // An error means that the sender is gone, which is an end, too.
    let _ = course.wait_for(|course| *course != Course::Serve).await;
}

/// Waits until another supervisor serves.
async fn left(mut course: watch::Receiver<Course>) {
    if course.wait_for(|course| *course == Course::Leave).await.is_err() {
        std::future::pending().await
    }
}

/// Serves from the moment at which the supervisor before this one leaves that to it.
async fn succeed(mut before: Conversation, state: &PersistedState, router: &Router, memory: &SharedMemory) {
    let Some(Go { drained, drained_models, regions }) = before.take_over(state).await else {
        return;
    };
    router.drain(None, drained);
    for name in &drained_models {
        router.drain(Some(name), true);
    }
    memory.take_over(regions);
}

fn tracing(config: &Config, clock: Clock) -> Result<Option<(Arc<Tracer>, Exporter)>, Failed> {
    let Some(tracing) = &config.tracing else { return Ok(None) };
    let started = Exporter::start(tracing, clock);
    started.map(Some).map_err(|error| unavailable("cannot start tracing", &error))
}

/// Has the access log open its file again and asks for a reload at each SIGHUP, for ever.
async fn reload_on(
    mut hangup: Signal,
    registry: Registry,
    (rising, reopen): (watch::Receiver<bool>, Option<impl Fn()>),
) {
    while hangup.recv().await.is_some() {
        if let Some(reopen) = &reopen {
            reopen();
        }
        if *rising.borrow() {
            tracing::warn!(
                "skipping the reload, because an upgrade is in progress; if the configuration has changed since the upgrade began, run `shadowslice reload` when the upgrade has ended"
            );
            continue;
        }
        let registry = registry.clone();
        // The log contains the outcome.
        tokio::spawn(async move { registry.reload().await.ok() });
    }
    std::future::pending().await
}
