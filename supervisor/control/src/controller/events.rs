//! The controller of one model. It passes events to the state machine of the model's workers, and
//! performs the actions that the state machine returns.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use shadowslice_policy::workers::{
    Action, HandoverMode, LifecycleEvent, ResizeRequest, Settings, WorkerPhase, Workers, WorkersState,
};
use shadowslice_shared::groups::Division;
use shadowslice_shared::units::{Percent, Timestamp};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{Interval, MissedTickBehavior};

use super::context::Context;
use super::groups::Tenancy;
use super::loaded::BatchLimit;
use super::memory::{MemoryAccount, MemoryOwner};
use super::outcome::Records;
use super::reports::{ModelReport, WaitReason, Waits};
use super::{ControllerTask, MAX_QUEUED_EVENTS, MAX_QUEUED_ORDERS, Order, engine};
use crate::backend::GpuBackend;
use crate::process::{KeptWeights, LoadedFiles, ReferenceFile, StartPlace, User, Worker, WorkerEvent};
use shadowslice_config::ModelConfig;
use shadowslice_datapath::pipeline::{LaneEvent, Metadata, Pipeline};
use shadowslice_shared::ids::WorkerId;

/// The interval between checks for suspended processes.
const SUSPENSION_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The receivers for everything that a controller handles.
#[derive(Debug)]
pub(super) struct Inbox {
    orders_rx: mpsc::Receiver<Order>,
    lane_events_rx: mpsc::Receiver<LaneEvent>,
    worker_events_rx: mpsc::Receiver<WorkerEvent>,
    /// The receiver that reports whenever standbys of the GPU must yield.
    yields_rx: watch::Receiver<()>,
    /// The receiver that reports whenever the groups of a model on the GPU change.
    moves_rx: watch::Receiver<()>,
    /// The notification that the model may start the worker that waits for its turn.
    turn: Arc<Notify>,
}

/// The controller of one model.
#[derive(Debug)]
pub struct Controller {
    pub(super) context: Context,
    pub(super) model: Arc<ModelConfig>,
    pub(super) gpu: Arc<dyn GpuBackend>,
    pub(super) pipeline: Arc<Pipeline>,
    pub(super) reference: ReferenceFile,
    pub(super) files: Arc<LoadedFiles>,
    pub(super) weights: KeptWeights,
    /// The user of the model's workers. `None` before the first worker, and if workers share a user.
    pub(super) user: Option<Arc<User>>,
    /// The state machine that decides.
    pub(super) workers: Workers,
    pub(super) processes: BTreeMap<WorkerId, Worker>,
    /// The description of the model that its first worker loaded.
    pub(super) described: Option<Metadata>,
    /// The deaths of a shared worker that this model may have caused.
    pub(super) shared_deaths: Vec<Timestamp>,
    /// The model's groups of SMs. `None` if shares are not partitions inside the worker.
    pub(super) tenancy: Option<Tenancy>,
    /// The limit of batches. `None` unless batches of the default size are too large.
    pub(super) batch_limit: Option<BatchLimit>,
    /// The reason why the model cannot be served with its configuration.
    fault: Option<String>,
    pub(super) waits: Waits,
    pub(super) place: StartPlace,
    pub(super) account: MemoryAccount,
    pub(super) records: Records,
    pub(super) worker_events_tx: mpsc::Sender<WorkerEvent>,
    pub(super) report_tx: watch::Sender<ModelReport>,
}

/// The parts of a model that its controller uses.
#[derive(Debug)]
pub struct ModelParts {
    pub pipeline: Arc<Pipeline>,
    /// The file for the reference answers. It is empty at first.
    pub reference: ReferenceFile,
    pub files: Arc<LoadedFiles>,
    pub facts: mpsc::Receiver<LaneEvent>,
}

impl ControllerTask {
    /// Creates the controller. The first worker gets `share`. If `held` is true, an operator holds it.
    pub fn new(
        context: Context,
        model: Arc<ModelConfig>,
        share: Percent,
        held: bool,
        parts: ModelParts,
    ) -> (Self, watch::Receiver<ModelReport>) {
        let ModelParts { pipeline, reference, files, facts } = parts;
        let (orders, orders_rx) = mpsc::channel(MAX_QUEUED_ORDERS);
        let (worker_events_tx, worker_events_rx) = mpsc::channel(MAX_QUEUED_EVENTS);
        let gpu = Arc::clone(&context.gpus[model.gpu]);
        let division = division_for(&model, &*gpu);
        let required = model.handover == HandoverMode::InProcess;
        let fault = model.broken.clone().or(division.clone().err().filter(|_| required));
        let groups = &context.groups[model.gpu];
        let tenancy = division.as_ref().ok();
        let tenancy = tenancy.map(|division| Tenancy::of(groups, division.groups_of(share), model.priority));
        let workers = Workers::new(settings(&model, &context, &*gpu), share, held, division);
        let account = MemoryAccount::open(
            &context.memory[model.gpu],
            MemoryOwner::new(&model, workers.needs_shadows()),
        );
        let (report_tx, report_rx) = watch::channel(ModelReport::of(&workers));
        let place = context.starts.enter();
        let inbox = Inbox {
            orders_rx,
            lane_events_rx: facts,
            worker_events_rx,
            yields_rx: account.yields(),
            moves_rx: groups.moves(),
            turn: place.turn(),
        };
        let controller = Controller {
            context,
            model,
            gpu,
            pipeline,
            reference,
            files,
            weights: KeptWeights::default(),
            user: None,
            workers,
            processes: BTreeMap::new(),
            described: None,
            shared_deaths: Vec::new(),
            tenancy,
            batch_limit: None,
            fault,
            waits: Waits::default(),
            place,
            account,
            records: Records::default(),
            worker_events_tx,
            report_tx,
        };
        (Self { controller, inbox, orders }, report_rx)
    }
}

impl Controller {
    pub(super) async fn run(mut self, mut inbox: Inbox) {
        let first = self.workers.begin(self.fault.take(), self.now());
        self.perform_all(first);
        self.update_groups();
        self.publish();
        let mut check = tokio::time::interval(SUSPENSION_CHECK_INTERVAL);
        check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !self.workers.have_ended() {
            self.handle_next(&mut inbox, &mut check).await;
            self.publish();
            if self.workers.coming().is_none() {
                self.records.changes_ended();
            }
        }
        self.account.stands(false, self.now());
    }

    /// Waits for the next event, and handles it. Every receiver is cancel-safe.
    async fn handle_next(&mut self, inbox: &mut Inbox, check: &mut Interval) {
        let due = self.workers.due().map(|due| self.context.clock.instant(due));
        let alarm = async {
            match due {
                Some(due) => tokio::time::sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            // A lane's events come first, because they happened before the exit of its worker.
            Some(event) = inbox.lane_events_rx.recv() => self.handle_lane_event(event),
            Some(WorkerEvent { worker, said: event }) = inbox.worker_events_rx.recv() => {
                self.handle_worker_event(worker, event);
            }
            Some(order) = inbox.orders_rx.recv() => self.handle_order(order),
            Ok(()) = inbox.yields_rx.changed() => self.yield_memory(),
            Ok(()) = inbox.moves_rx.changed() => self.update_groups(),
            () = inbox.turn.notified() => self.handle_turn(),
            _ = check.tick() => self.report_suspended_workers(),
            () = alarm => {
                let actions = self.workers.on_timer(self.now());
                self.perform_all(actions);
            }
        }
    }

    /// Reports warm workers whose process is suspended. Such a worker cannot take the traffic over, or
    /// would not answer the next batch. For a worker that is starting, time limits are enough.
    fn report_suspended_workers(&mut self) {
        let mut suspended = Vec::new();
        for process in self.processes.values_mut() {
            let warm = matches!(
                self.workers.role_and_phase(process.id).1,
                WorkerPhase::Serving | WorkerPhase::Standing
            );
            if process.has_stood_still() && warm {
                suspended.push(process.id);
            }
        }
        for worker in suspended {
            self.handle(LifecycleEvent::Misbehaved {
                worker,
                why: "a signal suspended the worker's process".to_owned(),
            });
        }
    }

    fn handle_turn(&mut self) {
        if self.waits.primary == Some(WaitReason::Turn) {
            self.handle(LifecycleEvent::WaitEnded);
        }
    }

    fn yield_memory(&mut self) {
        if self.account.must_yield() {
            self.waits.standby = Some(WaitReason::Memory);
            self.handle(LifecycleEvent::StandbyRevoked(
                "a hand-over, a starting worker or a model of higher priority needs the standby's memory; \
                 the supervisor tries again shortly"
                    .to_owned(),
            ));
        }
    }

    fn handle_order(&mut self, order: Order) {
        match order {
            Order::Stop => self.handle(LifecycleEvent::Stop),
            Order::Resize { share, groups, cause, hold, reply } => {
                if let Some(tenancy) = &self.tenancy {
                    tenancy.prefer(groups);
                }
                let number = Some(self.records.register_order(reply));
                let request = ResizeRequest { number, share, cause, decided: self.now() };
                self.handle(LifecycleEvent::Resize { request, hold });
            }
            Order::Configure { model } => {
                self.model = model;
                self.handle(LifecycleEvent::Configured(settings(&self.model, &self.context, &*self.gpu)));
                self.account.update(MemoryOwner::new(&self.model, self.workers.needs_shadows()));
            }
            Order::Hold { held, reply } => {
                // If the receiver is gone, nothing waits for the reply.
                reply.send(self.workers.hold(held)).ok();
            }
            Order::AwaitChange { done } => self.records.await_change(done),
        }
    }

    fn handle_lane_event(&mut self, event: LaneEvent) {
        let event = match event {
            LaneEvent::Drained(worker) => LifecycleEvent::Drained(worker),
            LaneEvent::PoisonConfirmed => LifecycleEvent::PoisonConfirmed,
            LaneEvent::FirstAnswer(worker, at) => {
                self.records.record_effect(worker, at);
                LifecycleEvent::FirstAnswer(worker)
            }
            LaneEvent::Prepared(worker, prepared) => LifecycleEvent::Prepared { worker, prepared },
            LaneEvent::Asleep(_) => {
                // Open descriptors would keep the memory allocated.
                self.weights = KeptWeights::default();
                // From now on, the worker's memory does not show what another worker needs.
                return self.account.serves(None);
            }
            LaneEvent::Awake(worker) => return self.keep_weights(worker),
            LaneEvent::Dismissed(worker) => {
                self.handle(LifecycleEvent::Sleep(worker));
                if self.workers.state() == WorkersState::Asleep {
                    self.weights = KeptWeights::default();
                    self.account.serves(None);
                }
                return;
            }
            LaneEvent::Recalled => LifecycleEvent::Wake,
            LaneEvent::Gone(worker) => {
                LifecycleEvent::LaneEnded { worker, idle: self.pipeline.is_idle(worker) }
            }
            LaneEvent::Hung(worker) => LifecycleEvent::Misbehaved {
                worker,
                why: "the worker hangs: a batch runs for far too long".to_owned(),
            },
            LaneEvent::Broken(worker, why) => LifecycleEvent::Misbehaved { worker, why },
        };
        self.handle(event);
    }

    fn update_groups(&mut self) {
        if let Some(tenancy) = &self.tenancy {
            self.handle(LifecycleEvent::Groups(tenancy.groups()));
        }
    }

    /// Passes an event to the state machine, and performs the actions that follow.
    pub(super) fn handle(&mut self, event: LifecycleEvent) {
        let actions = self.workers.on(event, self.now());
        self.perform_all(actions);
    }

    /// Performs actions in order. Afterwards, passes the events that they caused to the state machine.
    fn perform_all(&mut self, mut actions: Vec<Action>) {
        let mut events = VecDeque::new();
        loop {
            events.extend(actions.into_iter().filter_map(|action| self.perform(action)));
            let Some(event) = events.pop_front() else { return };
            actions = self.workers.on(event, self.now());
        }
    }

    pub(super) fn now(&self) -> Timestamp {
        self.context.clock.now()
    }

    pub(super) fn pid(&self, worker: WorkerId) -> Option<i32> {
        self.processes.get(&worker).map(|process| process.pid)
    }
}

/// Returns the division of the GPU, or the reason why the share cannot be a partition. The model may
/// turn out later not to support partitions.
fn division_for(model: &ModelConfig, gpu: &dyn GpuBackend) -> Result<Division, String> {
    let by_configuration = |mode: &str| Err(format!("the configuration sets `handover: {mode}`"));
    match model.handover {
        HandoverMode::Auto | HandoverMode::InProcess => match gpu.division() {
            Ok(_) if model.engine.has_tensorrt() => {
                Err("TensorRT engines are built for one share".to_owned())
            }
            Ok(division) => Ok((**division).clone()),
            Err(why) => Err(why.to_owned()),
        },
        HandoverMode::Shadow => by_configuration("shadow"),
        HandoverMode::Never => by_configuration("never"),
    }
}

fn settings(model: &ModelConfig, context: &Context, gpu: &dyn GpuBackend) -> Settings {
    Settings {
        model: model.name.clone(),
        min: model.share.min,
        max: model.share.max,
        handover: model.handover,
        standby: model.standby,
        timeouts: context.timeouts,
        policy_acts: context.policy_acts,
        on_gpu: gpu.is_real(),
        reference: engine::reference(model, gpu),
        sms: Percent::all().map(|share| gpu.sms(share)).collect(),
    }
}
