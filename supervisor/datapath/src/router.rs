//! The models by name: where ingress finds the pipeline of a request, and whether the host wants more.

use std::collections::HashMap;
use std::convert::Infallible;
use std::ops::Deref;
use std::sync::Arc;

use parking_lot::RwLock;
use shadowslice_config::ReadyConfig;
use tokio::sync::{mpsc, watch};

use crate::pipeline::{Answers, Coming, Delivery, Failure, Input, Output, Pipeline, RequestOptions};
use crate::pulse::Pulse;
use crate::readiness::{Host, Readiness};
use crate::relay::Relay;

/// The models that requests can reach now. Models come and go: [`Router::set`] changes all at once.
#[derive(Debug)]
pub struct Router {
    hosted: RwLock<Hosted>,
    changed: watch::Sender<()>,
    pulse: Pulse,
}

#[derive(Debug, Default)]
struct Hosted {
    models: HashMap<String, Route>,
    readiness: Readiness,
}

/// The way to one model, held by a request from before it is checked until it is answered. A model
/// off the router goes on serving while a request has a hold on it.
#[derive(Debug, Clone)]
pub struct Route {
    pipeline: Arc<Pipeline>,
    /// If another supervisor has the model's workers.
    relay: Option<Arc<Relay>>,
    /// Held, not used: its end tells.
    _guest: Guest,
    streams: Guest,
}

/// Held as long as something is on its way to a model.
pub(crate) type Guest = mpsc::Sender<Infallible>;

/// Says when nothing is on its way to a model any more.
#[derive(Debug)]
pub struct Guests {
    requests: mpsc::Receiver<Infallible>,
    streams: mpsc::Receiver<Infallible>,
}

impl Route {
    pub fn to(pipeline: Arc<Pipeline>) -> (Self, Guests) {
        let ((guest, requests), (streams, open)) = (mpsc::channel(1), mpsc::channel(1));
        (Self { pipeline, relay: None, _guest: guest, streams }, Guests { requests, streams: open })
    }

    /// The way to the same model by another supervisor. Who takes it is no guest here.
    pub fn by(&self, relay: Relay) -> Self {
        Self { relay: Some(Arc::new(relay)), ..Self::to(Arc::clone(&self.pipeline)).0 }
    }

    /// Whether it takes requests; else why not.
    pub fn ready(&self) -> Result<(), String> {
        if self.relay.is_some() { Ok(()) } else { self.pipeline.ready() }
    }

    /// As [`Pipeline::infer`].
    pub async fn infer(
        &self,
        inputs: Vec<Input>,
        terms: RequestOptions,
        coming: Coming,
    ) -> Result<(Vec<Output>, Delivery), Failure> {
        match &self.relay {
            None => self.pipeline.infer(inputs, terms, coming).await,
            Some(relay) => relay.infer(inputs, terms, coming).await,
        }
    }

    /// As [`Pipeline::stream`]. A stream goes on without the route.
    pub async fn stream(
        &self,
        inputs: Vec<Input>,
        terms: RequestOptions,
        coming: Coming,
    ) -> Result<Answers, Failure> {
        let answers = match &self.relay {
            None => self.pipeline.stream(inputs, terms, coming).await,
            Some(relay) => relay.stream(inputs, terms, coming, self.pipeline.streams()).await,
        };
        Ok(answers?.held(self.streams.clone()))
    }
}

impl Guests {
    /// Waits until the route and every copy of it have gone.
    pub async fn gone(&mut self) {
        // Nothing is ever sent: this is the end of the last sender.
        self.requests.recv().await;
    }

    /// Waits until the streams have ended, too.
    pub async fn streams_ended(&mut self) {
        self.streams.recv().await;
    }
}

impl Deref for Route {
    type Target = Pipeline;

    fn deref(&self) -> &Pipeline {
        &self.pipeline
    }
}

impl Router {
    pub fn new(pulse: Pulse) -> Self {
        Self { hosted: RwLock::default(), changed: watch::Sender::default(), pulse }
    }

    /// A model that comes back later is not drained any more.
    pub fn set(&self, models: HashMap<String, Route>) {
        let before = {
            let Hosted { models: now, readiness } = &mut *self.hosted.write();
            readiness.look(now);
            readiness.keep(|name| models.contains_key(name));
            std::mem::replace(now, models)
        };
        // Not under the lock.
        drop(before);
        self.changed.send_replace(());
    }

    pub fn model(&self, name: &str) -> Option<Route> {
        self.hosted.read().models.get(name).cloned()
    }

    /// Sorted by name.
    pub fn models(&self) -> Vec<(String, Route)> {
        let hosted = self.hosted.read();
        let mut models: Vec<_> =
            hosted.models.iter().map(|(name, route)| (name.clone(), route.clone())).collect();
        models.sort_unstable_by(|one, other| one.0.cmp(&other.0));
        models
    }

    /// Changes whenever there are other models, or the host's readiness goes by something else.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Which models make the host ready, from now on.
    pub fn go_by(&self, rule: ReadyConfig) {
        self.tell(|hosted| hosted.readiness.rule = rule);
    }

    /// Has the host, or one of its models, say that it is ready no more, or say again what is so.
    /// Both serve on. Returns whether that is news.
    pub fn drain(&self, model: Option<&str>, drained: bool) -> bool {
        self.tell(|Hosted { models, readiness }| {
            model.is_none_or(|name| models.contains_key(name)) && readiness.drain(model, drained)
        })
    }

    /// The host is to stop, and is never ready again.
    pub fn stop(&self) {
        self.tell(|hosted| hosted.readiness.host = Host::Stopping);
    }

    fn tell<T>(&self, change: impl FnOnce(&mut Hosted) -> T) -> T {
        let changed = change(&mut self.hosted.write());
        self.changed.send_replace(());
        changed
    }

    pub fn host(&self) -> Host {
        self.hosted.read().readiness.host
    }

    /// Whether the model is to get no more requests, though it serves.
    pub fn is_drained(&self, model: &str) -> bool {
        self.hosted.read().readiness.is_drained(model)
    }

    /// Whether that was said of this model, and not of the host.
    pub fn drains(&self, model: &str) -> bool {
        self.hosted.read().readiness.drains(model)
    }

    /// The host serves what its rule says, and the control thread would replace a worker that dies.
    pub fn ready(&self) -> bool {
        let Hosted { models, readiness } = &*self.hosted.read();
        self.pulse.moves() && readiness.of(models)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::clock::Clock;
    use crate::pipeline::{LiveSettings, Settings, SloTarget};

    fn pipeline() -> Arc<Pipeline> {
        let settings = Settings {
            name: "m".to_owned(),
            live: LiveSettings {
                slo: SloTarget { latency: Duration::from_secs(1), percentile: 99.0 },
                max_delay: Duration::ZERO,
                reject_late: false,
            },
            max_requests: 1,
            memory: 4096,
            profile: None,
            content: Arc::default(),
        };
        Arc::new(Pipeline::new(settings, Clock::start(), mpsc::channel(1).0).unwrap())
    }

    async fn have_gone(guests: &mut Guests) -> bool {
        tokio::select! {
            biased;
            () = guests.gone() => true,
            () = std::future::ready(()) => false,
        }
    }

    /// A router of these models, all loading.
    fn router<const N: usize>(names: [&str; N]) -> (Router, [Arc<Pipeline>; N]) {
        let router = Router::new(Pulse::new(Clock::start()));
        let pipelines = names.map(|_| pipeline());
        set(&router, &names.into_iter().zip(&pipelines).collect::<Vec<_>>());
        (router, pipelines)
    }

    fn set(router: &Router, models: &[(&str, &Arc<Pipeline>)]) {
        let route = |(name, pipeline): &(&str, &Arc<Pipeline>)| {
            ((*name).to_owned(), Route::to(Arc::clone(pipeline)).0)
        };
        router.set(models.iter().map(route).collect());
    }

    #[test]
    fn a_start_is_waited_for_and_later_troubles_take_no_host_out() {
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
    fn a_start_that_nobody_asked_about_was_one() {
        let (router, [a]) = router(["a"]);
        a.open();
        set(&router, &[("a", &a), ("added", &pipeline())]);
        assert!(router.ready());
    }

    #[test]
    fn all_or_named_models_may_be_what_makes_a_host_ready() {
        let (router, [a, b]) = router(["a", "b"]);
        router.go_by(ReadyConfig::Each(vec!["b".to_owned()]));
        a.open();
        assert!(!router.ready());
        b.open();
        a.shut("it is broken");
        assert!(router.ready());
        router.go_by(ReadyConfig::All);
        assert!(!router.ready());
        a.open();
        assert!(router.ready());
        set(&router, &[("a", &a)]);
        assert!(router.ready(), "an unloaded model is none of all");
        router.go_by(ReadyConfig::Each(vec!["b".to_owned()]));
        assert!(!router.ready(), "and is named all the same");
    }

    #[test]
    fn drained_models_do_not_count_until_they_are_undrained_or_unloaded() {
        let (router, [a, b]) = router(["a", "b"]);
        [&a, &b].into_iter().for_each(|model| model.open());
        assert!(router.drain(Some("a"), true) && !router.drain(Some("a"), true));
        assert!(router.is_drained("a") && !router.is_drained("b") && router.ready());
        assert!(!router.drain(Some("c"), true), "there is none");
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
        assert!(changes.has_changed().unwrap(), "watchers look again");
        changes.mark_unchanged();
        assert!(router.drain(None, false) && router.ready() && !router.is_drained("a"));
        router.stop();
        assert!(changes.has_changed().unwrap() && !router.ready());
        assert!(!router.drain(None, false) && !router.ready());
    }

    #[tokio::test]
    async fn a_model_has_gone_when_its_last_request_has() {
        let router = Router::new(Pulse::new(Clock::start()));
        let (route, mut guests) = Route::to(pipeline());
        router.set(HashMap::from([("m".to_owned(), route)]));
        let guest = router.model("m").unwrap();
        router.set(HashMap::new());
        assert!(router.model("m").is_none());
        assert!(!have_gone(&mut guests).await, "a request is under way");
        drop(guest);
        assert!(have_gone(&mut guests).await);
    }
}
