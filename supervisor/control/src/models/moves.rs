//! Models move to the next supervisor one by one, and back if that does not come to serve.

use std::path::Path;
use std::sync::Arc;

use shadowslice_shared::errors;
use shadowslice_shared::units::Percent;
use tokio::sync::{oneshot, watch};

use super::instance::{Instance, serving};
use super::registry::{Registry, State, Waits};
use shadowslice_datapath::relay::Relay;
use shadowslice_datapath::router::Route;

#[derive(Debug)]
pub enum Move {
    /// `done` hears when all is done that was asked before.
    Nothing { done: oneshot::Sender<()> },
    /// The supervisor at this socket serves the model. `ended` hears when no worker is left here.
    Away { model: String, socket: Arc<Path>, ended: oneshot::Sender<()> },
    /// The models are to have workers here again; nobody serves them meanwhile if it is an `outage`.
    /// `serve` hears when they serve, or cannot.
    Back { models: Vec<String>, outage: bool, serve: oneshot::Sender<()> },
    /// What has moved is not to come back.
    Stay,
    /// The supervisor before this one has workers of its own again.
    Drop { model: String },
}

/// A model that another supervisor serves.
#[derive(Debug)]
pub(super) struct Moved {
    pub(super) route: Route,
    share: Percent,
    held: bool,
    /// Empty once it is not to come back.
    home: Option<watch::Sender<Option<Route>>>,
}

pub(super) const MOVED: &str = "the next supervisor serves the model";

impl Registry {
    pub(super) async fn carry(&mut self, order: Move) {
        match order {
            // The receiver may be gone, here and below.
            Move::Nothing { done } => {
                done.send(()).ok();
            }
            Move::Away { model, socket, ended } => self.move_away(&model, socket, ended),
            Move::Back { models, outage, serve } => {
                self.move_back(models, outage).await;
                serve.send(()).ok();
            }
            Move::Stay => self.moved().for_each(|moved| moved.home = None),
            Move::Drop { model } => {
                self.unload(&model, "the previous supervisor serves the model again");
                self.publish();
            }
        }
    }

    /// Requests go there from now on; those that the model has are answered by its workers here.
    fn move_away(&mut self, name: &str, socket: Arc<Path>, ended: oneshot::Sender<()>) {
        let Some(state) = self.state(name) else { return };
        let State::Loaded { now, .. } = state else { return };
        let (home, back) = watch::channel(None);
        let (share, held) = {
            let report = now.served.report.borrow();
            (report.share, report.held)
        };
        let route = now.route.by(Relay::new(name.to_owned(), socket, back));
        let moved = State::Moved(Moved { route, share, held, home: Some(home) });
        if let State::Loaded { now, next, .. } = std::mem::replace(state, moved) {
            if let Some(next) = next {
                next.instance.retire(MOVED);
            }
            let orders = now.served.orders.clone();
            now.retire(MOVED);
            tokio::spawn(async move {
                orders.closed().await;
                ended.send(()).ok();
            });
        }
        self.publish();
    }

    /// All of them start at once. In an outage requests wait for them, as after a worker's death.
    async fn move_back(&mut self, names: Vec<String>, outage: bool) {
        let (mut made, mut waits, patience) = (Vec::new(), Waits::new(), self.factory.patience());
        for name in names {
            let Some(model) = self.model(&name) else { continue };
            let Some(State::Moved(Moved { share, held, route, .. })) = self.state(&name) else { continue };
            let (share, held, route) = (*share, *held, route.clone());
            match self.make(model, share, held).await {
                Ok(instance) => {
                    let (row, report) = (made.len(), instance.served.report.clone());
                    waits.spawn(async move { (row, serving(report, patience).await) });
                    // The description is the one that its workers gave before.
                    let waits_here =
                        outage && instance.served.pipeline.open_with_metadata_of(route.pipeline()).is_ok();
                    let back = (name, Box::new(instance));
                    if waits_here {
                        self.is_back(back);
                        made.push(None);
                    } else {
                        made.push(Some(back));
                    }
                }
                Err(error) => {
                    let why = errors::chain(&error);
                    tracing::error!(
                        model = name,
                        why,
                        "the upgrade failed, and the model cannot be taken back from the next supervisor; load the model again through the API, or restart the supervisor"
                    );
                    self.set_state(&name, State::Unloaded { why, last: None });
                }
            }
        }
        while let Some(ended) = waits.join_next().await {
            // Where it does not serve, its own state says why.
            if let Some(back) = ended.ok().and_then(|(row, _)| made[row].take()) {
                self.is_back(back);
            }
        }
        self.publish();
    }

    fn is_back(&mut self, (name, instance): (String, Box<Instance>)) {
        let route = instance.route.clone();
        let before = self.set_state(&name, State::Loaded { now: instance, next: None, before: None });
        self.publish();
        if let Some(State::Moved(Moved { home: Some(home), .. })) = before {
            home.send_replace(Some(route));
        }
    }
}
