//! Maps names to models. Ingress uses the router to find the pipeline of a request and to learn
//! whether the host is ready.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;

use parking_lot::RwLock;
use shadowslice_config::ReadyConfig;
use tokio::sync::{mpsc, watch};

use crate::heartbeat::Heartbeat;
use crate::pipeline::{Answers, Pipeline, RequestArrival, RequestFailure, RequestInput, RequestOptions};
use crate::readiness::{HostState, Readiness};
use crate::relay::Relay;
use crate::versions::{Canary, Mirror};

/// The models that requests can reach now. [`Router::set`] replaces all models in one step.
#[derive(Debug)]
pub struct Router {
    hosted: RwLock<Hosted>,
    changed_tx: watch::Sender<()>,
    heartbeat: Heartbeat,
}

#[derive(Debug, Default)]
struct Hosted {
    models: HashMap<String, HostedModel>,
    readiness: Readiness,
}

/// The versions of a model that requests can reach.
#[derive(Debug, Default)]
pub struct HostedModel {
    /// The version that answers requests that name no version. `None` if it cannot be reached.
    pub released: Option<Route>,
    /// The other versions.
    pub others: Vec<Route>,
    /// The new version that answers a part of the requests that name no version.
    pub canary: Option<Canary>,
}

impl HostedModel {
    fn routes(&self) -> impl Iterator<Item = &Route> {
        self.released.iter().chain(&self.others)
    }
}

impl From<Route> for HostedModel {
    fn from(released: Route) -> Self {
        Self { released: Some(released), others: Vec::new(), canary: None }
    }
}

/// A route to one version of a model. A request holds its route until it is answered. A model that is removed
/// from the router continues to serve until no request holds a route to it.
#[derive(Debug, Clone)]
pub struct Route {
    pipeline: Arc<Pipeline>,
    /// The relay to the supervisor that has the model's workers. `None` if this supervisor has
    /// them.
    relay: Option<Arc<Relay>>,
    /// A sender that sends nothing. [`RouteHolds`] is notified when all clones of the sender are
    /// dropped.
    _hold_tx: RouteHold,
    streams_tx: RouteHold,
    /// The mirror that copies requests to a new version.
    mirror: Option<Arc<Mirror>>,
}

/// A handle that keeps a model in use. Each request or stream has a clone for as long as it uses
/// the model.
pub(crate) type RouteHold = mpsc::Sender<Infallible>;

/// The receivers that are notified when no request and no stream uses a model any more.
#[derive(Debug)]
pub struct RouteHolds {
    requests_rx: mpsc::Receiver<Infallible>,
    streams_rx: mpsc::Receiver<Infallible>,
}

impl Route {
    /// Creates a route to the workers of this supervisor.
    pub fn to(pipeline: Arc<Pipeline>) -> (Self, RouteHolds) {
        let ((hold_tx, requests_rx), (streams_tx, streams_rx)) = (mpsc::channel(1), mpsc::channel(1));
        (
            Self { pipeline, relay: None, _hold_tx: hold_tx, streams_tx, mirror: None },
            RouteHolds { requests_rx, streams_rx },
        )
    }

    /// Returns a route to the same model through another supervisor. Requests on the new route do
    /// not hold this route.
    pub fn by(&self, relay: Relay) -> Self {
        Self { relay: Some(Arc::new(relay)), ..Self::to(Arc::clone(&self.pipeline)).0 }
    }

    /// Returns the model's pipeline in this supervisor, for its description and its statistics. Send
    /// requests to the route instead, because they may have to reach another supervisor.
    pub fn pipeline(&self) -> &Pipeline {
        &self.pipeline
    }

    /// Returns the same route with a mirror that copies requests to a new version.
    #[must_use]
    pub fn with_mirror(&self, mirror: Arc<Mirror>) -> Self {
        Self { mirror: Some(mirror), ..self.clone() }
    }

    pub(crate) fn is_loading(&self) -> bool {
        self.pipeline.is_loading()
    }

    pub(crate) fn request_bytes(&self) -> u64 {
        self.pipeline.request_bytes()
    }

    /// Returns whether the model gives many answers to a request.
    pub fn streams(&self) -> bool {
        self.pipeline.streams()
    }

    /// Returns `Ok` if the model accepts requests. Otherwise returns the reason why it does not.
    pub fn ready(&self) -> Result<(), String> {
        if self.relay.is_some() { Ok(()) } else { self.pipeline.ready() }
    }

    /// Runs a request. See [`Pipeline::infer`]. A stream continues after the route is dropped.
    pub async fn infer(
        &self,
        inputs: Vec<RequestInput>,
        options: RequestOptions,
        arrival: RequestArrival,
    ) -> Result<Answers, RequestFailure> {
        let options = options.within(arrival.timeout);
        let copy = self.mirror.as_ref().filter(|_| !self.streams()).and_then(|mirror| mirror.select(&inputs));
        let answers = match &self.relay {
            None => self.pipeline.infer(inputs, options, arrival).await?,
            Some(relay) => relay.infer(inputs, options, arrival, self.pipeline.streams()).await?,
        };
        if let (Some(copy), Some(original)) = (copy, answers.first()) {
            copy.send(original);
        }
        Ok(answers.with_hold(self.streams_tx.clone()))
    }
}

impl RouteHolds {
    /// Waits until the route and all its clones have been dropped.
    pub async fn released(&mut self) {
        // No value is ever sent, so `recv` returns when the last sender is dropped.
        self.requests_rx.recv().await;
    }

    /// Waits until all streams have ended.
    pub async fn streams_ended(&mut self) {
        self.streams_rx.recv().await;
    }
}

impl Router {
    pub fn new(heartbeat: Heartbeat) -> Self {
        Self { hosted: RwLock::default(), changed_tx: watch::Sender::default(), heartbeat }
    }

    /// Replaces the models. If a drained model is removed and later added again, it is no longer
    /// drained.
    pub fn set(&self, models: HashMap<String, HostedModel>) {
        let before = {
            let Hosted { models: now, readiness } = &mut *self.hosted.write();
            readiness.is_started(now);
            readiness.retain(|name| models.contains_key(name));
            std::mem::replace(now, models)
        };
        // Dropping routes may take long, so the lock is released first.
        drop(before);
        self.changed_tx.send_replace(());
    }

    /// Returns the released version of a model.
    pub fn model(&self, name: &str) -> Option<Route> {
        self.hosted.read().models.get(name)?.released.clone()
    }

    /// Returns the version that answers a request that names no version. `header` returns the value of a
    /// header of the request.
    pub fn select<'h>(&self, name: &str, header: impl FnOnce(&str) -> Option<&'h [u8]>) -> Option<Route> {
        let hosted = self.hosted.read();
        let model = hosted.models.get(name)?;
        // A new version that cannot serve gets no requests, even before it is rolled back.
        let canary = model.canary.as_ref().filter(|canary| canary.route.ready().is_ok());
        let canary = canary.filter(|canary| canary.split.selects(header));
        canary.map(|canary| &canary.route).or(model.released.as_ref()).cloned()
    }

    /// Returns a version of a model.
    pub fn version(&self, name: &str, number: u32) -> Option<Route> {
        let hosted = self.hosted.read();
        hosted.models.get(name)?.routes().find(|route| route.pipeline.version() == number).cloned()
    }

    /// Returns the numbers of a model's versions in ascending order.
    pub fn versions(&self, name: &str) -> Vec<u32> {
        let hosted = self.hosted.read();
        let routes = hosted.models.get(name).into_iter().flat_map(HostedModel::routes);
        let mut numbers: Vec<u32> = routes.map(|route| route.pipeline.version()).collect();
        numbers.sort_unstable();
        numbers
    }

    /// Returns the route to the instance with this name, which serves one version.
    pub(crate) fn instance(&self, name: &str) -> Option<Route> {
        let hosted = self.hosted.read();
        hosted
            .models
            .values()
            .flat_map(HostedModel::routes)
            .find(|route| route.pipeline.name() == name)
            .cloned()
    }

    /// Returns the released versions of all models, sorted by the models' names.
    pub fn models(&self) -> Vec<(String, Route)> {
        self.sorted(|model| model.released.iter().cloned().collect())
    }

    /// Returns all versions of all models, sorted by the models' names and the versions' numbers.
    pub fn all_versions(&self) -> Vec<(String, Route)> {
        self.sorted(|model| model.routes().cloned().collect())
    }

    fn sorted(&self, routes: impl Fn(&HostedModel) -> Vec<Route>) -> Vec<(String, Route)> {
        let hosted = self.hosted.read();
        let named = |(name, model): (&String, &HostedModel)| {
            routes(model).into_iter().map(|route| (name.clone(), route)).collect::<Vec<_>>()
        };
        let mut all: Vec<_> = hosted.models.iter().flat_map(named).collect();
        all.sort_by(|one, other| {
            let key = |(name, route): &(String, Route)| (name.clone(), route.pipeline.version());
            key(one).cmp(&key(other))
        });
        all
    }

    /// Returns a receiver that is notified when the models or the host's readiness may have
    /// changed.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changed_tx.subscribe()
    }

    /// Sets the rule that decides which models must be ready for the host to be ready.
    pub fn set_ready_rule(&self, rule: ReadyConfig) {
        self.change(|hosted| hosted.readiness.rule = rule);
    }

    /// Sets or clears the drained state of the host, or of one of its models. A drained model
    /// continues to serve, but reports that it is not ready. Returns whether the state has changed.
    pub fn drain(&self, model: Option<&str>, drained: bool) -> bool {
        self.change(|Hosted { models, readiness }| {
            model.is_none_or(|name| models.contains_key(name)) && readiness.set_drained(model, drained)
        })
    }

    /// Marks the host as stopping. The host then never becomes ready again.
    pub fn stop(&self) {
        self.change(|hosted| hosted.readiness.host = HostState::Stopping);
    }

    fn change<T>(&self, change: impl FnOnce(&mut Hosted) -> T) -> T {
        let result = change(&mut self.hosted.write());
        self.changed_tx.send_replace(());
        result
    }

    pub fn host(&self) -> HostState {
        self.hosted.read().readiness.host
    }

    /// Returns whether the model or the host is drained. A drained model serves requests, but
    /// should not receive new ones.
    pub fn is_drained(&self, model: &str) -> bool {
        self.hosted.read().readiness.is_drained(model)
    }

    /// Returns whether this model itself is drained, regardless of the host's state.
    pub fn is_model_drained(&self, model: &str) -> bool {
        self.hosted.read().readiness.is_model_drained(model)
    }

    /// Returns whether the host is ready. The models must fulfil the rule, and the control thread
    /// must be alive, because it replaces workers that die.
    pub fn ready(&self) -> bool {
        let Hosted { models, readiness } = &*self.hosted.read();
        self.heartbeat.is_alive() && readiness.is_ready(models)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::clock::Clock;
    use crate::pipeline::{LiveSettings, PipelineSettings, SloTarget};

    fn pipeline() -> Arc<Pipeline> {
        let settings = PipelineSettings {
            tenant_weights: vec![1.0],
            step_timeout: Duration::from_secs(10),
            name: "m".to_owned(),
            version: 1,
            live: LiveSettings {
                slo: SloTarget { latency: Duration::from_secs(1), next: None, percentile: 99.0 },
                max_delay: Duration::ZERO,
                reject_late: false,
                priority: 1,
            },
            max_requests: 1,
            memory: 4096,
            cache: None,
            profile: None,
            content: Arc::default(),
            residency: Arc::default(),
        };
        Arc::new(Pipeline::new(settings, Clock::start(), mpsc::channel(1).0).unwrap())
    }

    async fn are_released(holds: &mut RouteHolds) -> bool {
        tokio::select! {
            biased;
            () = holds.released() => true,
            () = std::future::ready(()) => false,
        }
    }

    /// Returns a router with these models. All models are loading.
    fn router<const N: usize>(names: [&str; N]) -> (Router, [Arc<Pipeline>; N]) {
        let router = Router::new(Heartbeat::new(Clock::start()));
        let pipelines = names.map(|_| pipeline());
        set(&router, &names.into_iter().zip(&pipelines).collect::<Vec<_>>());
        (router, pipelines)
    }

    fn set(router: &Router, models: &[(&str, &Arc<Pipeline>)]) {
        let route = |(name, pipeline): &(&str, &Arc<Pipeline>)| {
            ((*name).to_owned(), Route::to(Arc::clone(pipeline)).0.into())
        };
        router.set(models.iter().map(route).collect());
    }

    #[test]
    fn the_host_waits_for_a_start_and_stays_ready_through_later_failures() {
        let (router, [a, b]) = router(["a", "b"]);
        assert!(!router.ready());
        a.open();
        assert!(!router.ready(), "the other one still loads");
        b.shut("it is broken");
        assert!(router.ready(), "the start is over");
        set(&router, &[("a", &a), ("b", &b), ("added", &pipeline())]);
        assert!(router.ready(), "a model that is added later is not waited for");
        a.shut("it breaks");
        assert!(!router.ready(), "nothing serves");
        b.open();
        assert!(router.ready());
    }

    #[test]
    fn a_start_is_over_even_if_nobody_read_the_readiness() {
        let (router, [a]) = router(["a"]);
        a.open();
        set(&router, &[("a", &a), ("added", &pipeline())]);
        assert!(router.ready());
    }

    #[test]
    fn a_rule_may_require_all_models_or_named_models() {
        let (router, [a, b]) = router(["a", "b"]);
        router.set_ready_rule(ReadyConfig::Each(vec!["b".to_owned()]));
        a.open();
        assert!(!router.ready());
        b.open();
        a.shut("it is broken");
        assert!(router.ready());
        router.set_ready_rule(ReadyConfig::All);
        assert!(!router.ready());
        a.open();
        assert!(router.ready());
        set(&router, &[("a", &a)]);
        assert!(router.ready(), "an unloaded model is none of all");
        router.set_ready_rule(ReadyConfig::Each(vec!["b".to_owned()]));
        assert!(!router.ready(), "and is named all the same");
    }

    #[test]
    fn drained_models_do_not_count_until_they_are_undrained_or_unloaded() {
        let (router, [a, b]) = router(["a", "b"]);
        [&a, &b].into_iter().for_each(|model| model.open());
        assert!(router.drain(Some("a"), true) && !router.drain(Some("a"), true));
        assert!(router.is_drained("a") && !router.is_drained("b") && router.ready());
        assert!(!router.drain(Some("c"), true), "no model has this name");
        router.drain(Some("b"), true);
        assert!(!router.ready());
        assert!(router.drain(Some("b"), false) && router.ready());
        set(&router, &[("b", &b)]);
        set(&router, &[("a", &a), ("b", &b)]);
        assert!(!router.is_drained("a"));
    }

    #[test]
    fn a_drained_host_is_ready_again_and_one_that_stops_is_not() {
        let (router, [a]) = router(["a"]);
        a.open();
        let mut changes = router.changes();
        assert!(router.drain(None, true) && !router.drain(None, true));
        assert!(!router.ready() && router.is_drained("a"), "{:?}", router.host());
        assert!(changes.has_changed().unwrap(), "watchers are notified");
        changes.mark_unchanged();
        assert!(router.drain(None, false) && router.ready() && !router.is_drained("a"));
        router.stop();
        assert!(changes.has_changed().unwrap() && !router.ready());
        assert!(!router.drain(None, false) && !router.ready());
    }

    #[tokio::test]
    async fn a_route_is_released_when_its_last_request_ends() {
        let router = Router::new(Heartbeat::new(Clock::start()));
        let (route, mut holds) = Route::to(pipeline());
        router.set(HashMap::from([("m".to_owned(), route.into())]));
        let route = router.model("m").unwrap();
        router.set(HashMap::new());
        assert!(router.model("m").is_none());
        assert!(!are_released(&mut holds).await, "a request is under way");
        drop(route);
        assert!(are_released(&mut holds).await);
    }
}
