//! The models by name: where ingress finds the pipeline of a request.

use std::collections::HashMap;
use std::convert::Infallible;
use std::ops::Deref;
use std::sync::Arc;

use parking_lot::RwLock;
use tokio::sync::{mpsc, watch};

use crate::pipeline::Pipeline;
use crate::pulse::Pulse;

/// The models that requests can reach now. Models come and go: [`Router::set`] changes all at once.
#[derive(Debug)]
pub struct Router {
    models: RwLock<HashMap<String, Route>>,
    changed: watch::Sender<()>,
    pulse: Pulse,
}

/// The way to one model, held by a request from before it is checked until it is answered. A model
/// off the router goes on serving while a request has a hold on it.
#[derive(Debug, Clone)]
pub struct Route {
    pipeline: Arc<Pipeline>,
    /// Held, not used: its end tells.
    _guests: mpsc::Sender<Infallible>,
}

/// Says when no request is on its way to a model any more.
#[derive(Debug)]
pub struct Guests(mpsc::Receiver<Infallible>);

impl Route {
    pub fn to(pipeline: Arc<Pipeline>) -> (Self, Guests) {
        let (guests, gone) = mpsc::channel(1);
        (Self { pipeline, _guests: guests }, Guests(gone))
    }
}

impl Guests {
    /// Waits until the route, every copy of it and every guest have gone.
    pub async fn gone(&mut self) {
        // Nothing is ever sent: this is the end of the last sender.
        self.0.recv().await;
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
        Self { models: RwLock::default(), changed: watch::Sender::default(), pulse }
    }

    pub fn set(&self, models: HashMap<String, Route>) {
        let before = std::mem::replace(&mut *self.models.write(), models);
        // Not under the lock.
        drop(before);
        self.changed.send_replace(());
    }

    pub fn model(&self, name: &str) -> Option<Route> {
        self.models.read().get(name).cloned()
    }

    /// Sorted by name.
    pub fn models(&self) -> Vec<(String, Route)> {
        let models = self.models.read();
        let mut models: Vec<_> = models.iter().map(|(name, route)| (name.clone(), route.clone())).collect();
        models.sort_unstable_by(|one, other| one.0.cmp(&other.0));
        models
    }

    /// Changes whenever there are other models.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Whether the control thread moves.
    pub fn moves(&self) -> bool {
        self.pulse.moves()
    }

    /// All models serve, and the control thread would replace a worker that dies.
    pub fn ready(&self) -> bool {
        self.moves() && self.models.read().values().all(|model| model.pipeline.ready().is_ok())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::clock::Clock;
    use crate::pipeline::{LiveSettings, Settings, Slo};

    fn pipeline() -> Arc<Pipeline> {
        let settings = Settings {
            name: "m".to_owned(),
            live: LiveSettings {
                slo: Slo { latency: Duration::from_secs(1), percentile: 99.0 },
                max_delay: Duration::ZERO,
                reject_late: false,
            },
            max_requests: 1,
            memory: 4096,
            profile: None,
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
