//! The controller of one model: hears what happens, tells it to the machine that decides, and has
//! performed what follows.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use shadowslice_policy::workers::{
    Action, HandoverMode, LifecycleEvent, ResizeRequest, Settings, WorkerPhase, WorkerRole, Workers,
};
use shadowslice_shared::boot::{BootRefusal, LoadedModel, WorkerPurpose};
use shadowslice_shared::groups::Division;
use shadowslice_shared::units::{Percent, Timestamp};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{Interval, MissedTickBehavior};

use super::context::Context;
use super::groups::Tenancy;
use super::loaded::{self, BatchLimit};
use super::memory::{MemoryAccount, MemoryOwner};
use super::outcome::Records;
use super::reported::ReportedRole;
use super::reports::{ModelReport, WaitReason, Waits};
use super::{ControllerTask, EVENTS, ORDERS, Order, engine};
use crate::backend::{GpuBackend, shown};
use crate::process::{
    KeptWeights, LoadedFiles, ReferenceFile, StartPlace, User, Worker, WorkerEvent, WorkerSaid,
};
use shadowslice_config::ModelConfig;
use shadowslice_datapath::pipeline::{LaneEvent, Pipeline};
use shadowslice_shared::errors;
use shadowslice_shared::ids::WorkerId;

/// How often workers' processes are looked at.
const LOOK: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Inbox {
    orders: mpsc::Receiver<Order>,
    facts: mpsc::Receiver<LaneEvent>,
    events: mpsc::Receiver<WorkerEvent>,
    /// Reports whenever standbys of the GPU must yield.
    yields: watch::Receiver<()>,
    /// When some model on the GPU is to have other groups of SMs.
    moves: watch::Receiver<()>,
    /// When the model may start the worker that has waited in line.
    turn: Arc<Notify>,
}

#[derive(Debug)]
pub struct Controller {
    pub(super) context: Context,
    pub(super) model: Arc<ModelConfig>,
    pub(super) gpu: Arc<dyn GpuBackend>,
    pub(super) pipeline: Arc<Pipeline>,
    pub(super) reference: ReferenceFile,
    pub(super) files: Arc<LoadedFiles>,
    pub(super) weights: KeptWeights,
    /// From the first worker on, where models have users of their own.
    pub(super) user: Option<Arc<User>>,
    /// What decides.
    pub(super) workers: Workers,
    pub(super) processes: BTreeMap<WorkerId, Worker>,
    /// Where shares are partitions inside the worker: the model's groups of SMs.
    pub(super) tenancy: Option<Tenancy>,
    /// Where the model cannot have batches of the default size.
    pub(super) batch_limit: Option<BatchLimit>,
    /// Why the model cannot be served as its configuration demands, if so.
    fault: Option<String>,
    pub(super) waits: Waits,
    pub(super) place: StartPlace,
    pub(super) account: MemoryAccount,
    pub(super) records: Records,
    pub(super) events: mpsc::Sender<WorkerEvent>,
    pub(super) report: watch::Sender<ModelReport>,
}

/// Parts of a model that its controller works with.
#[derive(Debug)]
pub struct ModelParts {
    pub pipeline: Arc<Pipeline>,
    /// Is empty.
    pub reference: ReferenceFile,
    pub files: Arc<LoadedFiles>,
    pub facts: mpsc::Receiver<LaneEvent>,
}

impl ControllerTask {
    /// Makes the controller; the first worker gets `share`, which an operator may hold.
    pub fn new(
        context: Context,
        model: Arc<ModelConfig>,
        share: Percent,
        held: bool,
        parts: ModelParts,
    ) -> (Self, watch::Receiver<ModelReport>) {
        let ModelParts { pipeline, reference, files, facts } = parts;
        let (orders, ordered) = mpsc::channel(ORDERS);
        let (events, happened) = mpsc::channel(EVENTS);
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
        let (report, seen) = watch::channel(ModelReport::of(&workers));
        let (yields, moves) = (account.yields(), groups.moves());
        let place = context.starts.enter();
        let inbox = Inbox { orders: ordered, facts, events: happened, yields, moves, turn: place.turn() };
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
            tenancy,
            batch_limit: None,
            fault,
            waits: Waits::default(),
            place,
            account,
            records: Records::default(),
            events,
            report,
        };
        (Self { controller, inbox, orders }, seen)
    }
}

impl Controller {
    pub(super) async fn run(mut self, mut inbox: Inbox) {
        let first = self.workers.begin(self.fault.take(), self.now());
        self.perform_all(first);
        self.tell_groups();
        self.publish();
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !self.workers.have_ended() {
            self.hear(&mut inbox, &mut look).await;
            self.publish();
            if self.workers.coming().is_none() {
                self.records.changes_ended();
            }
        }
        self.account.stands(false, self.now());
    }

    /// Every receiver is cancel-safe.
    async fn hear(&mut self, inbox: &mut Inbox, look: &mut Interval) {
        let due = self.workers.due().map(|due| self.context.clock.instant(due));
        let alarm = async {
            match due {
                Some(due) => tokio::time::sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            // Facts first: what a lane tells happened before its worker's end.
            Some(fact) = inbox.facts.recv() => self.lane_told(fact),
            Some(WorkerEvent { worker, said }) = inbox.events.recv() => self.worker_said(worker, said),
            Some(order) = inbox.orders.recv() => self.ordered(order),
            Ok(()) = inbox.yields.changed() => self.yield_memory(),
            Ok(()) = inbox.moves.changed() => self.tell_groups(),
            () = inbox.turn.notified() => self.turn_comes(),
            _ = look.tick() => self.end_the_stopped(),
            () = alarm => {
                let actions = self.workers.on_timer(self.now());
                self.perform_all(actions);
            }
        }
    }

    /// A worker that was stopped is no spare, and would keep the next batch. One that starts has
    /// time limits.
    fn end_the_stopped(&mut self) {
        let mut stopped = Vec::new();
        for process in self.processes.values_mut() {
            let warm = matches!(
                self.workers.role_and_phase(process.id).1,
                WorkerPhase::Serving | WorkerPhase::Standing
            );
            if process.has_stood_still() && warm {
                stopped.push(process.id);
            }
        }
        for worker in stopped {
            self.tell(LifecycleEvent::Misbehaved {
                worker,
                why: "a signal suspended the worker's process".to_owned(),
            });
        }
    }

    fn turn_comes(&mut self) {
        if self.waits.primary == Some(WaitReason::Turn) {
            self.tell(LifecycleEvent::WaitEnded);
        }
    }

    fn yield_memory(&mut self) {
        if self.account.must_yield() {
            self.waits.standby = Some(WaitReason::Memory);
            self.tell(LifecycleEvent::StandbyRevoked(
                "a hand-over, a starting worker or a model of higher priority needs the standby's memory; \
                 the supervisor tries again shortly"
                    .to_owned(),
            ));
        }
    }

    fn ordered(&mut self, order: Order) {
        match order {
            Order::Stop => self.tell(LifecycleEvent::Stop),
            Order::Resize { share, groups, cause, hold, reply } => {
                if let Some(tenancy) = &self.tenancy {
                    tenancy.prefer(groups);
                }
                let number = Some(self.records.expect(reply));
                let request = ResizeRequest { number, share, cause, decided: self.now() };
                self.tell(LifecycleEvent::Resize { request, hold });
            }
            Order::Configure { model } => {
                self.model = model;
                self.tell(LifecycleEvent::Configured(settings(&self.model, &self.context, &*self.gpu)));
                self.account.update(MemoryOwner::new(&self.model, self.workers.needs_shadows()));
            }
            Order::Hold { held, reply } => {
                // The receiver may be gone.
                reply.send(self.workers.hold(held)).ok();
            }
            Order::AwaitChange { done } => self.records.await_change(done),
        }
    }

    fn lane_told(&mut self, fact: LaneEvent) {
        let fact = match fact {
            LaneEvent::Drained(worker) => LifecycleEvent::Drained(worker),
            LaneEvent::PoisonConfirmed => LifecycleEvent::PoisonConfirmed,
            LaneEvent::FirstAnswer(worker, at) => {
                self.records.note_effect(worker, at);
                LifecycleEvent::FirstAnswer(worker)
            }
            LaneEvent::Prepared(worker, prepared) => LifecycleEvent::Prepared { worker, prepared },
            LaneEvent::Gone(worker) => {
                LifecycleEvent::LaneEnded { worker, idle: self.pipeline.is_idle(worker) }
            }
            LaneEvent::Hung(worker) => LifecycleEvent::Misbehaved {
                worker,
                why: "the worker hangs: a batch runs for far too long".to_owned(),
            },
            LaneEvent::Broken(worker, why) => LifecycleEvent::Misbehaved { worker, why },
        };
        self.tell(fact);
    }

    fn worker_said(&mut self, worker: WorkerId, said: WorkerSaid) {
        let (model, pid) = (&self.model.name, self.pid(worker));
        tracing::debug!(model, pid, ?said, "worker event");
        let Some(process) = self.processes.get_mut(&worker) else { return };
        process.note(&said);
        let (asked, purpose) = (process.groups, process.purpose);
        match said {
            WorkerSaid::Connected => self.tell(LifecycleEvent::Connected(worker)),
            WorkerSaid::Loaded(found) => {
                if self.pipeline.metadata().is_some()
                    && let Err(why) = self.describe(&found)
                {
                    self.tell(LifecycleEvent::Misbehaved { worker, why });
                }
            }
            WorkerSaid::Warming { rows } => {
                tracing::debug!(model, pid, rows, "worker warming up");
            }
            WorkerSaid::Warmed(warmed) if purpose.is_reference() => {
                let useful = self.useful_batches(purpose);
                self.limit_batches(BatchLimit::of_use(useful, self.model.slo.latency, &warmed.times));
                let result = self.reference.seal().map_err(|error| errors::chain(&error));
                self.tell(LifecycleEvent::ReferenceWritten { worker, result });
            }
            WorkerSaid::Warmed(warmed) => {
                if let Some(Err(error)) = process.weights.as_ref().map(|socket| self.weights.take(socket)) {
                    tracing::warn!(model, pid, %error, "cannot keep the model's weights on the GPU for later workers; each may load a copy and take more GPU memory");
                }
                if let Some(why) = &warmed.unshared {
                    tracing::warn!(
                        model,
                        pid,
                        why,
                        "a worker cannot share the model's weights with other workers; the worker loaded a copy, which takes more GPU memory"
                    );
                }
                let found = process.loaded.take();
                self.account.warmed(self.now());
                if let Some(Err(why)) = found.map(|found| self.describe(&found)) {
                    return self.tell(LifecycleEvent::Misbehaved { worker, why });
                }
                self.tell(LifecycleEvent::Warmed { worker, warmed, asked });
                if self.workers.role_and_phase(worker) == (WorkerRole::Standby, WorkerPhase::Standing) {
                    tracing::info!(model = self.model.name, pid, "warm standby ready");
                }
            }
            WorkerSaid::Refused(refusal) => {
                if matches!(refusal, BootRefusal::Proof { .. }) {
                    // They may be damaged: the next worker loads them from the file.
                    self.weights = KeptWeights::default();
                }
                let refusal = self.with_smaller_batches(refusal);
                let (model, why) = (&self.model.name, refusal.to_string());
                let on_gpu = self.gpu.status().uuid.is_some();
                let (role, _) = self.workers.role_and_phase(worker);
                let needs_partition = self.model.handover == HandoverMode::InProcess;
                match refusal {
                    BootRefusal::OtherForm(_) => {
                        tracing::info!(
                            model,
                            pid,
                            why,
                            "a worker cannot serve the model as loaded; starting a worker that loads the model in another way"
                        )
                    }
                    BootRefusal::NoOperator(_) if purpose == WorkerPurpose::Reference && on_gpu => {
                        tracing::info!(
                            model,
                            pid,
                            why,
                            "the CPU cannot compute the model's reference answers; starting a worker that computes them on the GPU"
                        )
                    }
                    BootRefusal::NoPartitions(_)
                        if matches!(role, WorkerRole::Reference | WorkerRole::Incumbent)
                            && !needs_partition =>
                    {
                        tracing::info!(
                            model,
                            pid,
                            why,
                            "the model cannot run on a partition of the GPU's SMs; its next worker runs without a partition"
                        )
                    }
                    _ => tracing::warn!(
                        model,
                        pid,
                        role = ReportedRole::from(role).to_string(),
                        why,
                        "stopping a worker that cannot serve the model; if no other worker serves, requests wait or are refused until one starts; correct the cause"
                    ),
                }
                self.tell(LifecycleEvent::Refused { worker, refusal });
            }
            WorkerSaid::Lost(why) => {
                tracing::debug!(model, why, "the connection to a starting worker broke; its exit follows");
            }
            WorkerSaid::Exited(status) => {
                let mut status = shown(&status);
                tracing::info!(model, pid, status, "worker exited");
                let warming = self.processes.remove(&worker).and_then(|process| process.warming);
                if let Some((rows, _)) = warming {
                    status = self.ended_warming(rows, status);
                }
                let idle = self.pipeline.is_idle(worker);
                self.tell(LifecycleEvent::Exited { worker, status, idle });
            }
        }
    }

    /// A worker that finds another model than its predecessors is refused.
    fn describe(&self, found: &LoadedModel) -> Result<(), String> {
        let described = loaded::describe(&self.model, self.largest_batch().as_ref(), found);
        let described = described.map_err(|refusal| refusal.to_string());
        described.and_then(|metadata| self.pipeline.describe(metadata)).map(|_| ())
    }

    /// Returns the limit of the default batch. Once the model has served, clients know its batches, in
    /// an outage also those of its workers at another supervisor.
    pub(super) fn largest_batch(&self) -> Option<BatchLimit> {
        let known = || {
            let max = self.pipeline.metadata()?.max_batch;
            Some(BatchLimit { max, why: "clients already know this batch size".to_owned() })
        };
        self.batch_limit.clone().or_else(known)
    }

    /// Where the size of batches is left to the model, the next worker has smaller ones.
    fn with_smaller_batches(&mut self, refusal: BootRefusal) -> BootRefusal {
        let batch = &self.model.batch;
        let limit = match &refusal {
            BootRefusal::WarmUp { size, why } if *size > 1 && batch.max.is_some() => {
                let why = format!("{why}; lower batch.max, or correct `warmup`");
                return BootRefusal::WarmUp { size: *size, why };
            }
            BootRefusal::WarmUp { size, why } => BatchLimit::below(batch, *size, why),
            BootRefusal::RowsDepend(why) if batch.max.is_none() => {
                Some(BatchLimit { max: 0, why: why.clone() })
            }
            BootRefusal::RowsDepend(why) => {
                let max = batch.max.unwrap_or_default();
                return BootRefusal::Model(format!("batch.max is {max}, but {why}; set `batch: {{max: 0}}`"));
            }
            _ => None,
        };
        let why = refusal.to_string();
        if self.limit_batches(limit) { BootRefusal::OtherForm(why) } else { refusal }
    }

    /// Returns the reason why a worker ended that was trying batches of `rows` rows.
    fn ended_warming(&mut self, rows: u32, status: String) -> String {
        let limit = BatchLimit::below(&self.model.batch, rows, &format!("the worker exited ({status})"));
        if self.limit_batches(limit) || rows <= 1 {
            return format!("{status}, during the warm-up at batch size {rows}");
        }
        format!(
            "{status}, during the warm-up at batch size {rows}, perhaps because memory ran out; \
             lower batch.max"
        )
    }

    /// Once the model has served, clients know its batches. Returns whether there is another limit.
    fn limit_batches(&mut self, limit: Option<BatchLimit>) -> bool {
        let Some(limit) = limit.filter(|_| self.pipeline.metadata().is_none()) else { return false };
        let BatchLimit { max, why } = &limit;
        tracing::warn!(
            model = self.model.name,
            max_batch = max,
            why,
            "the default maximum batch size is too large for the model; lowering the size to max_batch; set `batch.max` to choose another size"
        );
        self.batch_limit = Some(limit);
        true
    }

    fn tell_groups(&mut self) {
        if let Some(tenancy) = &self.tenancy {
            self.tell(LifecycleEvent::Groups(tenancy.groups()));
        }
    }

    fn tell(&mut self, fact: LifecycleEvent) {
        let actions = self.workers.on(fact, self.now());
        self.perform_all(actions);
    }

    /// Performs actions in order; facts that arise on the way are told afterwards.
    fn perform_all(&mut self, mut actions: Vec<Action>) {
        let mut facts = VecDeque::new();
        loop {
            facts.extend(actions.into_iter().filter_map(|action| self.perform(action)));
            let Some(fact) = facts.pop_front() else { return };
            actions = self.workers.on(fact, self.now());
        }
    }

    pub(super) fn now(&self) -> Timestamp {
        self.context.clock.now()
    }

    pub(super) fn pid(&self, worker: WorkerId) -> Option<i32> {
        self.processes.get(&worker).map(|process| process.pid)
    }
}

/// How the GPU divides, as far as known before the load; else why the share may be no partition.
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
        on_gpu: gpu.status().uuid.is_some(),
        reference: engine::reference(model, gpu),
        sms: Percent::all().map(|share| gpu.sms(share)).collect(),
    }
}
