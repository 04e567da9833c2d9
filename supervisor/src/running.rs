//! The models as they run, with what runs them.

use std::path::Path;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use crate::serve::{Failed, NO_THREADS, unavailable};
use crate::upgrade::Turnstile;
use shadowslice_config::Config;
use shadowslice_control::controller::{Context, ControlThread, ModelState, Planned, Planner};
use shadowslice_control::models::{COMMANDS, Known, ModelFactory, ModelSet, Registry, Served, Shown};
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
    /// Lets the models' workers start, one model after the other.
    pub(crate) turns: Turnstile,
}

/// Returns once the models are made; their workers begin to start, or wait for their turn if there is
/// a predecessor, from which models are moving.
pub(crate) async fn run_models(
    (file, known_at): (&Path, &Path),
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
    let (turns, hire) = Turnstile::before(hire, config.models.len() + COMMANDS);
    if !succeeds {
        turns.open();
    }
    let (router, (models, seen)) = (Arc::new(Router::new(pulse.clone())), watch::channel(Arc::default()));
    let factory = ModelFactory { context: context.clone(), hire, next: 0 };
    let shown = Shown { router: Arc::clone(&router), models, for_planner, tracer };
    let known = Known::read(known_at);
    let registry = Registry::start(file, config, factory, shown, (&known, !succeeds)).await;
    let registry = registry.map_err(|error| unavailable("cannot set up a model", &error))?;
    Ok(Running { registry, control, router, models: seen, planned, pulse, turns })
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
