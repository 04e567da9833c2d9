//! The models as they run, with what runs them.

use std::path::Path;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use crate::serve::{Failed, NO_THREADS, unavailable};
use shadowslice_config::Config;
use shadowslice_control::controller::{Context, ControlThread, ModelState, Planned, Planner};
use shadowslice_control::models::{ModelFactory, ModelSet, PersistedState, Registry, Served, Views};
use shadowslice_datapath::heartbeat::Heartbeat;
use shadowslice_datapath::peer::Guard;
use shadowslice_datapath::repository::{QueuedCommand, Repository};
use shadowslice_datapath::router::Router;
use shadowslice_datapath::trace::Tracer;
use shadowslice_shared::exit;

pub(crate) struct Running {
    pub(crate) registry: Registry,
    pub(crate) control: ControlThread,
    pub(crate) router: Arc<Router>,
    pub(crate) models: watch::Receiver<Arc<ModelSet>>,
    pub(crate) planned: Option<watch::Receiver<Planned>>,
    pub(crate) pulse: Heartbeat,
    /// The state that the previous supervisor left.
    pub(crate) state: PersistedState,
}

/// Creates the models. Their workers begin to start. If there is a predecessor, they start when it hands
/// the models over, one after the other.
pub(crate) async fn run_models(
    (file, state_file): (&Path, &Path),
    config: &Config,
    context: &Context,
    tracer: Option<Arc<Tracer>>,
    moving: watch::Receiver<bool>,
) -> Result<Running, Failed> {
    let succeeds = *moving.borrow();
    let (for_planner, shared) = watch::channel(Vec::new());
    let pulse = Heartbeat::new(context.clock);
    let planner = Planner::new(&config.controller, context.clock, &context.gpus, shared, moving);
    let (planner, planned) = planner.unzip();
    let started = ControlThread::start(planner, pulse.clone());
    let (control, hire) = started.map_err(|error| unavailable(NO_THREADS, &error))?;
    let (router, (models, seen)) = (Arc::new(Router::new(pulse.clone())), watch::channel(Arc::default()));
    let factory = ModelFactory::new(context.clone(), hire);
    let views = Views { router: Arc::clone(&router), models, for_planner, tracer };
    let state = PersistedState::read(state_file);
    let registry = Registry::start(file, config, factory, views, (&state, !succeeds)).await;
    let registry = registry.map_err(|error| unavailable("cannot set up the models", &error))?;
    Ok(Running { registry, control, router, models: seen, planned, pulse, state })
}

pub(crate) fn repository(
    models: &watch::Receiver<Arc<ModelSet>>,
    router: &Arc<Router>,
    guard: Guard,
    (wishes, rising): (mpsc::Sender<QueuedCommand>, watch::Receiver<bool>),
) -> Arc<Repository> {
    let (models, router) = (models.clone(), Arc::clone(router));
    let list = move || models.borrow().listed(|name| router.is_drained(name));
    Arc::new(Repository::new(list, guard, wishes, rising))
}

/// An error names the first model that never will be ready.
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

/// Returns when the model serves; an error says why it does not.
pub(crate) async fn settled(model: &Served) -> Result<(), String> {
    let mut report = model.report.clone();
    let settled = |state: &ModelState| matches!(state, ModelState::Ready | ModelState::Unready { .. });
    match report.wait_for(|report| settled(&report.state)).await.map(|report| report.state.clone()) {
        Ok(ModelState::Unready { why, .. }) => Err(why),
        // Without a controller the supervisor ends.
        _ => Ok(()),
    }
}
