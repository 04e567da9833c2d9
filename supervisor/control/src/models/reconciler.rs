//! The reconciler of one model. It observes the model, and performs the steps that
//! [`plan`](shadowslice_policy::reconcile::plan) returns, until the model is as desired.
//!
//! ```text
//! commands ─▶ goal ─────┐
//! reports of the ───────┼─▶ plan ─▶ step ─▶ instances, routes
//! controllers           │                        │
//!                       └──── observe ◀──────────┘─▶ row of the registry (router, status, planner)
//! ```

use std::sync::Arc;

use shadowslice_datapath::relay::Relay;
use shadowslice_datapath::router::Route;
use shadowslice_policy::reconcile::{
    Current, Goal, InstanceView, Observed, ShareProgress, SpecDifference, Step, plan,
};
use shadowslice_policy::workers::Cause;
use shadowslice_shared::errors;
use shadowslice_shared::units::Percent;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use super::MOVED;
use super::desired::{DesiredModel, DesiredPresence, FirstShare, PendingOutcome, SharedGoal};
use super::instance::{Instance, send_order};
use super::registry::Registry;
use super::row::{Row, ServedBy};
use super::share_request::ShareRequest;
use crate::controller::{Order, Served};

#[derive(Debug)]
pub(super) struct Reconciler {
    id: u64,
    name: String,
    registry: Registry,
    goal: SharedGoal,
    current: Holder,
    successor: Option<Successor>,
    /// The generation to which `share` and `fault` belong.
    generation: u64,
    observed_at: Instant,
    share: ShareRequest,
    fault: Option<String>,
    /// The controllers of retired instances. Their channels close when the workers have exited.
    exiting: Vec<mpsc::Sender<Order>>,
}

/// The part that gets the model's requests.
#[derive(Debug)]
enum Holder {
    /// Requests are refused, for this reason. The `last` controller may still answer accepted
    /// requests.
    Nothing {
        why: String,
        last: Option<mpsc::Sender<Order>>,
    },
    /// Another supervisor serves.
    Relay(RelayedModel),
    Instance(Box<Instance>),
}

#[derive(Debug)]
struct RelayedModel {
    route: Route,
    presence: DesiredPresence,
    /// The share that the workers here had.
    share: FirstShare,
    /// The sender for the route to workers of this supervisor, if the model may come back.
    return_tx: Option<watch::Sender<Option<Route>>>,
    /// True if the other supervisor has died.
    is_lost: bool,
}

/// The instance that starts, to replace the current one.
#[derive(Debug)]
struct Successor {
    instance: Box<Instance>,
    /// The share of the current instance when this one was created.
    started_beside: Percent,
}

impl Reconciler {
    pub(super) fn new(registry: Registry, id: u64, name: String, goal: SharedGoal, why: &str) -> Self {
        Self {
            id,
            name,
            registry,
            goal,
            current: Holder::Nothing { why: why.to_owned(), last: None },
            successor: None,
            generation: 0,
            observed_at: Instant::now(),
            share: ShareRequest::Idle,
            fault: None,
            exiting: Vec::new(),
        }
    }

    /// Returns the ticket for the first desired state.
    pub(super) fn ticket(&self) -> PendingOutcome {
        PendingOutcome::first(&self.goal)
    }

    /// Creates the first instance immediately.
    ///
    /// # Errors
    ///
    /// Returns the reason why the instance cannot be created.
    pub(super) async fn start_now(&mut self) -> Result<(), String> {
        let goal = self.goal.borrow().clone();
        self.perform(Step::Start, &goal).await;
        self.fault.take().map_or(Ok(()), Err)
    }

    /// Brings about each desired state, until the model is removed.
    pub(super) async fn run(mut self) {
        let mut goal_rx = self.goal.subscribe();
        loop {
            let goal = goal_rx.borrow_and_update().clone();
            self.enter(&goal);
            let step = plan(goal.desired().presence(), &self.observe(&goal));
            match step {
                Some(step) => self.perform(step, &goal).await,
                None if goal.is_settled() && is_removed(goal.desired()) => return,
                None => self.wait(&mut goal_rx).await,
            }
        }
    }

    /// Forgets the progress of an earlier generation.
    fn enter(&mut self, goal: &Goal<DesiredModel>) {
        if self.generation != goal.generation() {
            (self.generation, self.share, self.fault) = (goal.generation(), ShareRequest::Idle, None);
        }
        if let Holder::Relay(relayed) = &mut self.current {
            match goal.desired().presence {
                DesiredPresence::Relayed { returns: false, .. } => relayed.return_tx = None,
                DesiredPresence::Served { relay_is_lost, .. } => relayed.is_lost |= relay_is_lost,
                _ => {}
            }
        }
        self.exiting.retain(|orders| !orders.is_closed());
    }

    fn observe(&mut self, goal: &Goal<DesiredModel>) -> Observed {
        let desired = goal.desired();
        let now = Instant::now();
        self.observed_at = now;
        let view = |instance: &mut Instance| InstanceView {
            difference: instance.spec.difference(&desired.spec),
            health: instance.health(now),
        };
        let current = match &mut self.current {
            Holder::Nothing { .. } => Current::Nothing,
            Holder::Relay(relayed) => Current::Relay { is_lost: relayed.is_lost },
            Holder::Instance(instance) => Current::Instance(view(instance)),
        };
        let share = self.current.instance().map_or(ShareProgress::Reached, |instance| {
            self.share.progress(&instance.served.report.borrow(), desired)
        });
        Observed {
            current,
            successor: self.successor.as_mut().map(|successor| view(&mut successor.instance)),
            share,
            exiting: !self.exiting.is_empty(),
            settled: goal.is_settled(),
            fault: self.fault.clone(),
        }
    }

    async fn perform(&mut self, step: Step, goal: &Goal<DesiredModel>) {
        let desired = goal.desired();
        let performed = match step {
            Step::Start => self.start(desired).await,
            Step::Configure => match self.current.instance_mut() {
                Some(instance) => instance.configure(&desired.spec).await,
                None => Ok(()),
            },
            Step::ConfigureSuccessor => match &mut self.successor {
                Some(successor) => successor.instance.configure(&desired.spec).await,
                None => Ok(()),
            },
            Step::Resize => self.resize(desired).await,
            Step::Promote => self.promote(desired).await,
            Step::Discard => {
                self.discard("the model's new workers are no longer needed, or did not become ready");
                Ok(())
            }
            Step::Retire => {
                self.retire_for(desired);
                Ok(())
            }
            Step::Relay => {
                self.relay_to(desired);
                Ok(())
            }
            Step::Confirm => return self.confirm(goal),
            Step::Refuse(why) => return self.refuse(goal, why),
        };
        self.fault = performed.err();
        self.publish();
    }

    async fn start(&mut self, desired: &DesiredModel) -> Result<(), String> {
        let first = match (&self.current, &desired.presence) {
            (Holder::Instance(instance), _) => instance.successors_share(desired),
            (Holder::Relay(relayed), _) => relayed.share,
            (Holder::Nothing { .. }, DesiredPresence::Served { first, .. }) => *first,
            (Holder::Nothing { .. }, _) => return Ok(()),
        };
        let made = self.registry.make(desired.spec.clone(), first).await;
        match (made, &self.current) {
            (Ok(instance), Holder::Nothing { .. }) => self.current = Holder::Instance(Box::new(instance)),
            (Ok(instance), current) => {
                let started_beside = current.instance().map_or(first.share, Instance::coming_share);
                self.successor = Some(Successor { instance: Box::new(instance), started_beside });
            }
            (Err(error), current) => {
                let why = errors::chain(&error);
                if let Holder::Nothing { last, .. } = current {
                    self.current = Holder::Nothing { why: why.clone(), last: last.clone() };
                }
                return Err(why);
            }
        }
        Ok(())
    }

    async fn resize(&mut self, desired: &DesiredModel) -> Result<(), String> {
        let Some(instance) = self.current.instance() else { return Ok(()) };
        let share = desired.share_instead_of(instance.coming_share());
        let (reply, outcome) = oneshot::channel();
        let order = Order::Resize { share, groups: None, cause: Cause::Hand, hold: false, reply };
        send_order(&instance.served.orders, order).await?;
        self.share = ShareRequest::Requested(outcome);
        Ok(())
    }

    async fn promote(&mut self, desired: &DesiredModel) -> Result<(), String> {
        let Some(Successor { instance, started_beside }) = self.successor.take() else { return Ok(()) };
        match &self.current {
            Holder::Instance(current) => {
                tracing::info!(model = self.name, "the model's new workers take over");
                let (share, held) = (current.coming_share(), current.served.report.borrow().held);
                instance.hold(held).await;
                // If a policy changed the share, the policy will change it again.
                let by_operator = held || !self.registry.policy_acts() && share != started_beside;
                if by_operator && desired.share.is_none() {
                    self.goal.send_modify(|goal| goal.amend(|desired| desired.share = Some(share)));
                }
            }
            Holder::Relay(relayed) if relayed.is_lost => {
                // Requests wait for the workers here, as after the death of a worker. The clients know
                // the description that the former workers gave.
                if let Err(why) = instance.served.pipeline.open_with_metadata_of(relayed.route.pipeline()) {
                    tracing::warn!(model = self.name, why, "requests are refused until the model is ready");
                }
            }
            Holder::Relay(_) | Holder::Nothing { .. } => {}
        }
        let route = instance.route.clone();
        let before = std::mem::replace(&mut self.current, Holder::Instance(instance));
        self.publish();
        match before {
            Holder::Instance(before) => self.retire(*before, "the model's workers have been replaced"),
            Holder::Relay(RelayedModel { return_tx: Some(return_tx), .. }) => {
                return_tx.send_replace(Some(route));
            }
            Holder::Relay(_) | Holder::Nothing { .. } => {}
        }
        Ok(())
    }

    fn discard(&mut self, why: &'static str) {
        if let Some(successor) = self.successor.take() {
            self.retire(*successor.instance, why);
        }
    }

    fn retire_for(&mut self, desired: &DesiredModel) {
        let why = match desired.presence {
            DesiredPresence::Unloaded { why, .. } => why,
            _ => MOVED,
        };
        let last = self.current.instance().map(|instance| instance.served.orders.clone());
        let nothing = Holder::Nothing { why: why.to_owned(), last };
        if let Holder::Instance(instance) = std::mem::replace(&mut self.current, nothing) {
            self.retire(*instance, why);
        }
    }

    /// Sends further requests to the other supervisor. The workers here answer the requests that they
    /// have.
    fn relay_to(&mut self, desired: &DesiredModel) {
        let DesiredPresence::Relayed { socket, returns } = &desired.presence else { return };
        let Holder::Instance(instance) = &self.current else { return };
        let (return_tx, return_rx) = watch::channel(None);
        let relay = Relay::new(self.name.clone(), Arc::clone(socket), return_rx);
        let route = instance.route.by(relay);
        let share = {
            let report = instance.served.report.borrow();
            FirstShare { share: report.share, held: report.held }
        };
        let return_tx = Some(return_tx).filter(|_| *returns);
        let presence = desired.presence.clone();
        let relayed = RelayedModel { route, presence, share, return_tx, is_lost: false };
        if let Holder::Instance(instance) = std::mem::replace(&mut self.current, Holder::Relay(relayed)) {
            self.retire(*instance, MOVED);
        }
    }

    fn retire(&mut self, instance: Instance, why: &'static str) {
        self.exiting.push(instance.served.orders.clone());
        instance.retire(why);
    }

    fn confirm(&mut self, goal: &Goal<DesiredModel>) {
        if let Holder::Instance(instance) = &mut self.current {
            instance.confirm();
        }
        self.goal.send_modify(|now| now.confirm(goal.generation()));
    }

    /// Gives a desired state up. The model returns to the state in which its instance was confirmed.
    fn refuse(&mut self, goal: &Goal<DesiredModel>, why: String) {
        let mut fallback = goal.desired().clone();
        match &self.current {
            Holder::Instance(instance) => {
                if self.successor.is_some() {
                    log_unchanged(&self.name, &why);
                }
                (fallback.spec, fallback.share) = (instance.confirmed.clone(), None);
            }
            Holder::Relay(relayed) => fallback.presence = relayed.presence.clone(),
            Holder::Nothing { .. } => {}
        }
        let returns = fallback.spec.difference(&goal.desired().spec) != SpecDifference::None
            || fallback.presence() != goal.desired().presence();
        if returns {
            self.fault = None;
        }
        self.goal.send_modify(|now| now.refuse(goal.generation(), why, fallback));
        self.publish();
    }

    /// Waits until the desired state or an observed one may have changed.
    async fn wait(&mut self, goal_rx: &mut watch::Receiver<Goal<DesiredModel>>) {
        let Self { current, successor, share, exiting, fault, observed_at, .. } = self;
        let current = current.instance_mut();
        let next = successor.as_mut().map(|next| &mut *next.instance);
        let deadlines = [current.as_deref(), next.as_deref()].into_iter().flatten();
        let deadline = deadlines.filter_map(|instance| instance.deadline_after(*observed_at)).min();
        tokio::select! {
            // The reconciler holds a sender itself, so this never fails.
            _ = goal_rx.changed() => {}
            () = report_changed(current) => share.retry(),
            () = report_changed(next) => {}
            outcome = share.outcome() => match outcome {
                Ok(progress) => *share = progress,
                Err(why) => (*share, *fault) = (ShareRequest::Idle, Some(why)),
            },
            () = until(deadline) => {}
            () = closed(exiting.first()) => {}
        }
    }

    fn publish(&self) {
        let served_by = match &self.current {
            Holder::Nothing { why, last } => ServedBy::Nobody { why: why.clone(), last: last.clone() },
            Holder::Relay(relayed) => ServedBy::NextSupervisor { route: relayed.route.clone() },
            Holder::Instance(instance) => {
                let successor = self.successor.as_ref().map(|next| next.instance.served.report.clone());
                let served = Served { successor, ..instance.served.clone() };
                ServedBy::Workers { served, route: instance.route.clone() }
            }
        };
        let successor = self.successor.as_ref().map(|next| &*next.instance);
        let newest = successor.or(self.current.instance());
        let newest_files = newest.map(|instance| Arc::clone(&instance.served.files));
        self.registry.observe(self.id, Row { served_by, newest_files });
    }
}

impl Holder {
    fn instance(&self) -> Option<&Instance> {
        match self {
            Self::Instance(instance) => Some(instance),
            Self::Nothing { .. } | Self::Relay(_) => None,
        }
    }

    fn instance_mut(&mut self) -> Option<&mut Instance> {
        match self {
            Self::Instance(instance) => Some(instance),
            Self::Nothing { .. } | Self::Relay(_) => None,
        }
    }
}

fn is_removed(desired: &DesiredModel) -> bool {
    matches!(desired.presence, DesiredPresence::Unloaded { is_removed: true, .. })
}

/// Waits until the instance's report has changed. Without an instance, or if its controller has ended,
/// waits forever.
async fn report_changed(instance: Option<&mut Instance>) {
    let is_changed = match instance {
        Some(instance) => instance.report_rx.changed().await.is_ok(),
        None => false,
    };
    if !is_changed {
        std::future::pending().await
    }
}

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

async fn closed(orders: Option<&mpsc::Sender<Order>>) {
    match orders {
        Some(orders) => orders.closed().await,
        None => std::future::pending().await,
    }
}

fn log_unchanged(model: &str, why: &str) {
    tracing::error!(
        model,
        why,
        "the model is unchanged, because its new workers are not ready; the old workers keep serving; correct the cause, and repeat the reload or load"
    );
}
