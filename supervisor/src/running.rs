//! The models, and the parts that run them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use crate::serve::{Failed, NO_THREADS, unavailable};
use shadowslice_config::Config;
use shadowslice_control::controller::{Context, ControlThread, ModelState, Planned, Planner};
use shadowslice_control::host;
use shadowslice_control::models::{
    MAX_COMMANDS, ModelFactory, ModelSet, PersistedState, Registry, Served, Views,
};
use shadowslice_control::residency::ResidencyTask;
use shadowslice_datapath::heartbeat::Heartbeat;
use shadowslice_datapath::peer::Guard;
use shadowslice_datapath::phase::{Phase, PhaseReceiver};
use shadowslice_datapath::repository::{QueuedCommand, Repository};
use shadowslice_datapath::router::Router;
use shadowslice_datapath::trace::Tracer;
use shadowslice_shared::exit;

pub(crate) struct Running {
    pub(crate) registry: Registry,
    pub(crate) router: Arc<Router>,
    pub(crate) models: watch::Receiver<Arc<ModelSet>>,
    pub(crate) planned: Option<watch::Receiver<Planned>>,
    pub(crate) pulse: Heartbeat,
    /// The commands of clients, until a task executes them.
    pub(crate) client_commands_rx: Option<mpsc::Receiver<QueuedCommand>>,
    /// The state that the previous supervisor left.
    pub(crate) state: PersistedState,
    /// The task that decides which models sleep, until it is spawned.
    pub(crate) residency: Option<ResidencyTask>,
    /// The folder of optimised models.
    pub(crate) model_cache: PathBuf,
}

/// Creates the models. Their workers begin to start. If there is a predecessor, they start when it hands
/// the models over, one after the other.
pub(crate) async fn run_models(
    (file, state_file): (&Path, &Path),
    config: &Config,
    context: &Context,
    tracer: Option<Arc<Tracer>>,
    phase_rx: PhaseReceiver,
) -> Result<(Running, ControlThread), Failed> {
    let takes_over = *phase_rx.borrow() == Phase::TakingOver;
    let (for_planner, shared) = watch::channel(Vec::new());
    let pulse = Heartbeat::new(context.clock);
    let planner = Planner::new(&config.controller, context.clock, &context.gpus, shared, phase_rx);
    let (planner, planned) = planner.unzip();
    let started = ControlThread::start(planner, pulse.clone(), Arc::clone(&context.shared));
    let (control, hire) = started.map_err(|error| unavailable(NO_THREADS, &error))?;
    let (router, (models, seen)) = (Arc::new(Router::new(pulse.clone())), watch::channel(Arc::default()));
    let factory = ModelFactory::new(context.clone(), hire);
    let views = Views { router: Arc::clone(&router), models, for_planner, tracer };
    let state = PersistedState::read(state_file);
    let registry = Registry::start(file, config, factory, views, (&state, !takes_over)).await;
    let registry = registry.map_err(|error| unavailable("cannot set up the models", &error))?;
    let residency = ResidencyTask::new(
        Arc::clone(&context.residency),
        seen.clone(),
        (&config.gpus, context.gpus.clone()),
        Arc::clone(&context.readings),
        context.clock,
        host::pinned_memory(&config.workers),
    );
    let running = Running {
        registry,
        router,
        models: seen,
        planned,
        pulse,
        client_commands_rx: None,
        state,
        residency: Some(residency),
        model_cache: context.engines.clone(),
    };
    Ok((running, control))
}

impl Running {
    /// Creates the repository for clients. The commands that `guard` permits wait for a task that executes
    /// them.
    pub(crate) fn repository(&mut self, guard: Guard, phase_rx: PhaseReceiver) -> Arc<Repository> {
        let (commands_tx, commands_rx) = mpsc::channel(MAX_COMMANDS);
        self.client_commands_rx = Some(commands_rx);
        let (models, router) = (self.models.clone(), Arc::clone(&self.router));
        let list = move || models.borrow().listed(|name| router.is_drained(name));
        Arc::new(Repository::new(list, guard, commands_tx, phase_rx))
    }
}

/// Waits until all models are ready. An error names the first model that is unready.
pub(crate) async fn all_ready(models: &[Served]) -> Result<(), Failed> {
    for model in models {
        settled(model).await.map_err(|why| {
            let name = &model.model.name;
            let why = format!("cannot serve every model, which `start: strict` requires: {name}: {why}");
            Failed { why, code: exit::CONFIG }
        })?;
    }
    Ok(())
}

/// Waits until the model is ready or unready. In the second case, returns the reason.
pub(crate) async fn settled(model: &Served) -> Result<(), String> {
    let mut report = model.report.clone();
    let settled = |state: &ModelState| matches!(state, ModelState::Ready | ModelState::Unready { .. });
    match report.wait_for(|report| settled(&report.state)).await.map(|report| report.state.clone()) {
        Ok(ModelState::Unready { why, .. }) => Err(why),
        // If the controller has ended, so does the supervisor.
        _ => Ok(()),
    }
}
