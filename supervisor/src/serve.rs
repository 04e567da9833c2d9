//! The wiring of `shadowslice serve`, the only place that knows all parts.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shadowslice_config as config;
use shadowslice_config::Config;
use shadowslice_control::controller::{Context, ControlThread};
use shadowslice_control::host::RunDir;
use shadowslice_control::models::{PersistedState, start_timeout};
use shadowslice_datapath::phase::Phase;
use shadowslice_operations::access_log::AccessLogWriter;
use shadowslice_operations::admin::{AdminContext, Upgrade};
use shadowslice_operations::log::{self, Log};
use shadowslice_operations::otlp::Exporter;
use shadowslice_shared::errors;
use shadowslice_shared::exit;
use shadowslice_succession::{self as succession, Predecessor, Succession};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::ground::Ground;
use crate::lifecycle::{Ending, Signals, run_until_ended, stop_workers};
use crate::listeners::Listeners;
use crate::running::{Running, run_models};
use crate::serving::Serving;
use crate::shown;
use crate::tasks::Tasks;
use crate::telemetry::Telemetry;

/// The time that the controllers may take to end, in addition to twice `timeouts.stop`.
const STOP_GRACE: Duration = Duration::from_secs(5);

pub(crate) const NO_THREADS: &str = "cannot start threads; raise the limit on processes";

/// Returns the exit code.
pub(crate) fn run(path: &Path) -> u8 {
    // No descriptor may be opened before this call.
    let predecessor = Predecessor::find();
    let log = Log::start();
    let code = run_logged(path, &log, predecessor);
    let read = log.end();
    // If there is an error, it is the last line.
    code.unwrap_or_else(|Failed { why, code }| if read { log::fail(&why, code) } else { code })
}

fn run_logged(
    path: &Path,
    log: &Log,
    predecessor: std::io::Result<Option<Predecessor>>,
) -> Result<u8, Failed> {
    let mut predecessor =
        predecessor.map_err(|error| unavailable("cannot take over from the previous supervisor", &error))?;
    let code = start(path, log, &mut predecessor);
    if let (Err(Failed { why, .. }), Some(predecessor)) = (&code, &predecessor) {
        predecessor.failed(why);
    }
    code
}

pub(crate) struct Failed {
    pub(crate) why: String,
    pub(crate) code: u8,
}

pub(crate) fn unavailable(what: &str, cause: &dyn Error) -> Failed {
    Failed { why: format!("{what}: {}", errors::chain(cause)), code: exit::UNAVAILABLE }
}

fn start(file: &Path, log: &Log, predecessor: &mut Option<Predecessor>) -> Result<u8, Failed> {
    let failed = |error| Failed { why: errors::chain(&error), code: exit::CONFIG };
    let config = &config::load_here(file).map_err(failed)?;
    for note in &config.notes {
        tracing::warn!(%note, "the configuration is valid, but you should correct one setting");
    }
    let itself =
        succession::program().map_err(|error| unavailable("cannot find the path of this program", &error))?;
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
    // The workers have exited, or the supervisor must exit immediately.
    let at_once = !matches!(code, Ok(0));
    gpus.iter().for_each(|gpu| gpu.stop(at_once));
    // All requests have been answered, or a second signal has arrived.
    runtime.shutdown_background();
    code
}

/// The files of this supervisor.
pub(crate) struct Place<'a> {
    pub(crate) program: &'a Path,
    /// The configuration file.
    pub(crate) file: &'a Path,
    pub(crate) run_dir: &'a RunDir,
}

/// The parts that tasks and the service share.
pub(crate) struct Shared {
    pub(crate) admin: Arc<AdminContext>,
    pub(crate) phase: watch::Sender<Phase>,
    /// Cancelled when the previous supervisor has exited. Without a previous supervisor, it is cancelled
    /// from the start.
    pub(crate) predecessor_gone: CancellationToken,
    pub(crate) reopen_access_log: Option<Arc<dyn Fn() + Send + Sync>>,
}

async fn serve(
    place: &Place<'_>,
    config: &Config,
    context: Context,
    log: &Log,
    predecessor: &mut Option<Predecessor>,
) -> Result<u8, Failed> {
    let mut signals = Signals::new()?;
    let first = if predecessor.is_some() { Phase::TakingOver } else { Phase::Starting };
    let phase = watch::Sender::new(first);
    let listeners =
        Listeners::bind(config, place.run_dir.path(), Arc::clone(&context.tenants), predecessor.as_mut())
            .await?;
    let mut telemetry = Telemetry::start(config, context.clock)?;
    let (tracer, state_file) = (telemetry.tracer.clone(), place.run_dir.state());
    let (mut running, mut control) =
        run_models((place.file, &state_file), config, &context, tracer, phase.subscribe()).await?;
    let metrics = telemetry.metrics(&listeners, log, context.clock);
    let (upgrades_tx, upgrades_rx) = mpsc::channel(1);
    let shared = Shared::new(place, config, context, &running, phase, upgrades_tx, &telemetry);
    let shown = shown::shown(&shared.admin, telemetry.tracer.clone(), metrics);
    let Listeners { ingress, background, model_control, sockets, unclaimed, .. } = listeners;
    let repository = running.repository(model_control, shared.phase.subscribe());
    let succession = Succession {
        program: place.program,
        config: place.file,
        run_dir: place.run_dir,
        sockets: sockets.clone(),
        memory: ingress.shared_memory(),
        admin: Arc::clone(&shared.admin),
        phase: shared.phase.clone(),
        within: start_timeout(&config.timeouts) + STOP_GRACE,
    };
    let tasks = Tasks::new();
    tasks.spawn_all(place, &shared, &mut running, background, shown)?;
    let serving = Serving { place, config, shared: &shared, running: &running, telemetry: &telemetry };
    let service = async {
        tokio::select! {
            served = serving.run(predecessor.take(), ingress, sockets, unclaimed, repository) => served,
            () = control.ended() => Err(control_ended()),
            () = shared.admin.registry.panicked() => Err(control_ended()),
            failed = tasks.failure() => Err(failed),
        }
    };
    let ending = Ending { lame_duck: config.lame_duck, succession, upgrades_rx };
    let outcome = run_until_ended(service, &mut signals, ending).await;
    // Otherwise, another supervisor has the state.
    let saves_state = !matches!(*shared.phase.borrow(), Phase::Leaving | Phase::TakingOver);
    tasks.cancel();
    if saves_state {
        // The task that saves the state may have waited with the last change.
        save_state(&running, &state_file);
    }
    let limit = config.timeouts.stop * 2 + STOP_GRACE;
    let exporter = telemetry.exporter.take();
    let code = stop(outcome, &mut control, &mut signals, limit, exporter).await;
    tasks.end().await;
    if let Some(access_log) = telemetry.access_log {
        access_log.end();
    }
    code
}

/// Saves the state for the next start, unless the next supervisor has it already.
fn save_state(running: &Running, file: &Path) {
    let state = PersistedState::of(&running.models.borrow(), &running.router);
    if let Err(error) = state.write(file) {
        tracing::warn!(
            %error,
            file = %file.display(),
            "cannot save the models' state; after a restart, the last changes of shares and releases are lost"
        );
    }
}

/// Stops the workers, and sends the last traces meanwhile. Returns the exit code.
async fn stop(
    outcome: Option<Result<(), Failed>>,
    control: &mut ControlThread,
    signals: &mut Signals,
    limit: Duration,
    exporter: Option<Exporter>,
) -> Result<u8, Failed> {
    let flushed = exporter.map(|exporter| tokio::spawn(exporter.finish()));
    let code = stop_workers(outcome, control, signals, limit).await;
    if let (Some(flushed), Ok(0)) = (flushed, &code) {
        tokio::select! {
            _ = flushed => {}
            _ = signals.next() => {}
        }
    }
    code
}

impl Shared {
    fn new(
        place: &Place<'_>,
        config: &Config,
        context: Context,
        running: &Running,
        phase: watch::Sender<Phase>,
        upgrades: mpsc::Sender<Upgrade>,
        telemetry: &Telemetry,
    ) -> Self {
        let predecessor_gone = CancellationToken::new();
        if *phase.borrow() == Phase::Starting {
            predecessor_gone.cancel();
        }
        let admin = Arc::new(AdminContext {
            since: Instant::now(),
            config: std::path::absolute(place.file).unwrap_or_else(|_| place.file.to_owned()),
            router: Arc::clone(&running.router),
            models: running.models.clone(),
            registry: running.registry.clone(),
            upgrades,
            phase: phase.subscribe(),
            gpus: context.gpus,
            readings: context.readings,
            clock: context.clock,
            tenants: context.tenants,
            controller: config.controller,
            history: Arc::default(),
            planned: running.planned.clone(),
        });
        let reopen = telemetry.access_log.as_ref().map(AccessLogWriter::reopen);
        Self {
            admin,
            phase,
            predecessor_gone,
            reopen_access_log: reopen.map(|reopen| Arc::new(reopen) as Arc<dyn Fn() + Send + Sync>),
        }
    }
}

fn control_ended() -> Failed {
    let why = "the controllers exited because of a bug; please report it with the log above";
    Failed { why: why.to_owned(), code: exit::SOFTWARE }
}
