//! The controller of one model: hears what happens, and performs what follows from it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use shadowslice_policy::restart::Restarts;
use shadowslice_shared::boot::Purpose;
use shadowslice_shared::units::{Moment, Percent, Sms};
use tokio::sync::{mpsc, watch};

use super::changes::Changes;
use super::groups::GroupLedger;
use super::in_process::{InProcess, Mechanism};
use super::memory::{MemoryLedger, Place};
use super::outcome::{Effect, Settling};
use super::primary::Primary;
use super::reports::{Handovers, ModelReport, ModelState};
use super::resize::{Replacing, ResizeRequest};
use super::standby::Standby;
use super::swap::Swap;
use super::{Order, ResizeRefused};
use crate::backend::GpuBackend;
use crate::nvml::Readings;
use crate::process::{ReferenceFile, Worker, WorkerEvent, WorkerSaid};
use shadowslice_config::{Model, Timeouts};
use shadowslice_datapath::clock::Clock;
use shadowslice_datapath::pipeline::{LaneFact, Pipeline};
use shadowslice_shared::ids::WorkerId;

/// What all controllers share.
#[derive(Debug, Clone)]
pub struct Context {
    /// The worker's binary.
    pub program: PathBuf,
    /// ONNX Runtime's library, if any model needs it.
    pub library: PathBuf,
    /// Where engines that were built for this GPU are kept.
    pub engines: PathBuf,
    /// Bounds on each step.
    pub timeouts: Timeouts,
    /// Bytes of one answer at most.
    pub response_bytes: u64,
    /// The clock.
    pub clock: Clock,
    /// The reactor of the data path.
    pub data_path: tokio::runtime::Handle,
    /// Whether priorities that are lowered can be raised again.
    pub lower_shadows: bool,
    /// What NVML says of the GPUs.
    pub readings: Arc<Readings>,
    /// What the models need of the GPUs' memory, by the index of the GPU.
    pub memory: Vec<Arc<MemoryLedger>>,
    /// Which model has which groups of SMs, by the index of the GPU.
    pub groups: Vec<Arc<GroupLedger>>,
    /// Whether a policy changes shares, so that one that is set by hand must be held.
    pub policy_acts: bool,
    /// Where the next worker's name comes from.
    pub worker_ids: Arc<AtomicU64>,
}

/// What a controller receives from.
#[derive(Debug)]
pub struct Inbox {
    /// Orders.
    pub orders: mpsc::Receiver<Order>,
    /// What happens on the lanes of the pipeline.
    pub facts: mpsc::Receiver<LaneFact>,
    /// What happens to the workers.
    pub events: mpsc::Receiver<WorkerEvent>,
    /// When standing workers of the GPU are called in.
    pub calls: watch::Receiver<()>,
    /// When some model on the GPU is to have other groups of SMs.
    pub moves: watch::Receiver<()>,
}

/// What a controller has heard.
enum Heard {
    Order(Order),
    Lane(LaneFact),
    Worker(WorkerEvent),
    CalledIn,
    GroupsMoved,
    Due,
}

/// The controller of one model.
#[derive(Debug)]
pub struct Controller {
    pub(super) context: Context,
    pub(super) model: Arc<Model>,
    pub(super) gpu: Arc<dyn GpuBackend>,
    pub(super) pipeline: Arc<Pipeline>,
    pub(super) reference: ReferenceFile,
    /// All processes that live.
    pub(super) workers: BTreeMap<WorkerId, Worker>,
    /// Workers that were told to end outside of a hand-over, with their deadlines.
    pub(super) leaving: BTreeMap<WorkerId, Moment>,
    /// The share in force, and the one that a restart gets.
    pub(super) share: Percent,
    /// How it is changed.
    pub(super) mechanism: Mechanism,
    /// Why it cannot be changed as the configuration demands, if so; the model does not serve then.
    pub(super) no_mechanism: Option<String>,
    pub(super) primary: Primary,
    /// Since when the worker that serves does so.
    pub(super) serves_since: Moment,
    /// The worker that writes the reference answers: on the host's processor, or else on the
    /// device.
    pub(super) reference_by: Purpose,
    /// Whether the reference answers have been written.
    pub(super) reference_written: bool,
    /// How often workers with so many SMs answered wrongly.
    pub(super) wrong_at: BTreeMap<Sms, u32>,
    pub(super) swap: Option<Swap>,
    pub(super) standby: Standby,
    /// The wait for the first answer at the new share, which tells the last change's effect.
    pub(super) effect: Option<Effect>,
    pub(super) settling: Option<Settling>,
    /// The share asked for while the last hand-over was in its probation.
    pub(super) next: Option<ResizeRequest>,
    /// The share that a worker without a shadow is being restarted for.
    pub(super) replacing: Option<Replacing>,
    pub(super) restarts: Restarts,
    /// The memory of its GPU.
    pub(super) ledger: Arc<MemoryLedger>,
    /// Its own place there.
    pub(super) place: Place,
    /// Deaths since the start.
    pub(super) all_deaths: u64,
    /// Workers started in the place of dead ones since the start.
    pub(super) all_restarts: u64,
    /// What the last worker that died said, or died of.
    pub(super) last_words: String,
    pub(super) handovers: Handovers,
    pub(super) changes: Changes,
    /// Whether an operator holds the share.
    pub(super) held: bool,
    /// Set when the controller is to end: when workers that are left then are killed.
    pub(super) stopping: Option<Moment>,
    pub(super) events: mpsc::Sender<WorkerEvent>,
    pub(super) standing: watch::Sender<ModelReport>,
}

/// What a controller is made from.
#[derive(Debug)]
pub struct Parts {
    /// What all controllers share.
    pub context: Context,
    /// The model.
    pub model: Arc<Model>,
    /// The share that its first worker gets.
    pub share: Percent,
    /// Whether an operator holds that share.
    pub held: bool,
    /// Its GPU.
    pub gpu: Arc<dyn GpuBackend>,
    /// Its pipeline.
    pub pipeline: Arc<Pipeline>,
    /// An empty file for its reference answers.
    pub reference: ReferenceFile,
    /// Where its workers report to.
    pub events: mpsc::Sender<WorkerEvent>,
}

impl Controller {
    /// A controller that has started nothing yet, and how it stands.
    pub fn new(parts: Parts) -> (Self, watch::Receiver<ModelReport>) {
        let share = parts.share;
        let groups = &parts.context.groups[parts.model.gpu];
        let (mechanism, no_mechanism) = match Mechanism::of(&parts.model, &*parts.gpu, groups, share) {
            Ok(mechanism) => (mechanism, None),
            Err(why) => (Mechanism::Process { why: why.clone() }, Some(why)),
        };
        let sms = match &mechanism {
            Mechanism::InProcess(inside) => inside.sms_of(share).0,
            Mechanism::Process { .. } => parts.gpu.sms(share).0,
        };
        let (standing, seen) = watch::channel(ModelReport {
            state: ModelState::Loading,
            share,
            sms,
            since: Moment::default(),
            partition: None,
            mechanism: "shadow",
            no_partition: None,
            coming: None,
            ready: None,
            memory_need: None,
            no_standby: None,
            held: parts.held,
            workers: Vec::new(),
            worker_deaths: 0,
            worker_restarts: 0,
            handovers: Handovers::default(),
            changes: Changes::default(),
        });
        let ledger = Arc::clone(&parts.context.memory[parts.model.gpu]);
        let has_shadows = mechanism.makes_shadows(parts.model.handover);
        let place = ledger.enter(&parts.model, has_shadows);
        let controller = Self {
            context: parts.context,
            model: parts.model,
            gpu: parts.gpu,
            pipeline: parts.pipeline,
            reference: parts.reference,
            workers: BTreeMap::new(),
            leaving: BTreeMap::new(),
            share,
            mechanism,
            no_mechanism,
            primary: Primary::Down { why: "not started".to_owned() },
            serves_since: Moment::default(),
            reference_by: Purpose::Reference,
            reference_written: false,
            wrong_at: BTreeMap::new(),
            swap: None,
            standby: Standby::new(),
            effect: None,
            settling: None,
            next: None,
            replacing: None,
            restarts: Restarts::new(),
            ledger,
            place,
            all_deaths: 0,
            all_restarts: 0,
            last_words: String::new(),
            handovers: Handovers::default(),
            changes: Changes::default(),
            held: parts.held,
            stopping: None,
            events: parts.events,
            standing,
        };
        (controller, seen)
    }

    /// Starts the model's workers and keeps them until it is told to stop.
    pub async fn run(mut self, mut inbox: Inbox) {
        self.begin();
        self.publish();
        while !(self.stopping.is_some() && self.workers.is_empty()) {
            let heard = self.listen(&mut inbox).await;
            self.on(heard);
            self.tend_standby();
            self.tend_awaited();
            self.tend_partition();
            self.publish();
        }
        self.leave_ledger();
    }

    /// The next thing that happens. Every receiver is cancel-safe.
    async fn listen(&self, inbox: &mut Inbox) -> Heard {
        let due = self.due().map(|due| self.context.clock.instant(due));
        let alarm = async {
            match due {
                Some(due) => tokio::time::sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            // Facts first: what a lane tells happened before its worker's end.
            Some(fact) = inbox.facts.recv() => Heard::Lane(fact),
            Some(event) = inbox.events.recv() => Heard::Worker(event),
            Some(order) = inbox.orders.recv() => Heard::Order(order),
            Ok(()) = inbox.calls.changed() => Heard::CalledIn,
            Ok(()) = inbox.moves.changed() => Heard::GroupsMoved,
            () = alarm => Heard::Due,
        }
    }

    fn on(&mut self, heard: Heard) {
        match heard {
            Heard::Order(Order::Stop) => self.stop(),
            Heard::Order(Order::Resize { share, cause, hold, onset, reply }) => {
                let decided = self.now();
                self.resize(ResizeRequest { share, cause, onset, decided, reply: Some(reply) }, hold);
            }
            Heard::Order(Order::Configure { model }) => {
                self.model = model;
                self.ledger.tell(&self.model, self.makes_shadows());
                self.share_is(self.share);
            }
            Heard::Order(Order::Hold { held, reply }) => {
                let news = std::mem::replace(&mut self.held, held) != held;
                // The receiver may be gone.
                reply.send(news).ok();
            }
            Heard::Lane(fact) => self.on_lane(fact),
            Heard::Worker(WorkerEvent { worker, said }) => self.on_worker(worker, said),
            Heard::CalledIn => self.on_call(),
            // `tend_partition`, which runs after each event, does what follows.
            Heard::GroupsMoved => {}
            Heard::Due => self.on_time(),
        }
    }

    fn due(&self) -> Option<Moment> {
        let swap = self.swap.as_ref().and_then(Swap::due);
        if self.stopping.is_some() {
            return self.stopping;
        }
        let leavers = self.leaving.values().copied().min();
        let settling = self.settling.as_ref().map(Settling::due);
        let moving = self.in_process().and_then(InProcess::due);
        let all = [self.primary.due(), swap, self.standby_due(), settling, leavers, moving];
        all.into_iter().flatten().min()
    }

    fn on_time(&mut self) {
        let now = self.now();
        if self.stopping.is_some_and(|due| due <= now) {
            tracing::warn!(model = self.model.name, "workers ignored the stop and are killed");
            self.workers.values().for_each(Worker::kill);
            self.stopping = Some(now + self.context.timeouts.stop);
            return;
        }
        self.leavers_on_time(now);
        self.primary_on_time(now);
        self.swap_on_time(now);
        self.partition_on_time(now);
        self.settling_on_time(now);
    }

    fn on_lane(&mut self, fact: LaneFact) {
        match fact {
            LaneFact::Drained(worker) => {
                self.leaver_drained(worker);
                self.swap_drained(worker);
            }
            LaneFact::PoisonConfirmed => self.restarts.poisonous(),
            LaneFact::FirstAnswer(worker, at) => {
                self.restarts.served();
                self.note_effect(worker, at);
            }
            LaneFact::Prepared(worker, prepared) => self.prepared(worker, prepared),
            LaneFact::Gone(worker) => self.lane_gone(worker),
            LaneFact::Hung(worker) => self.misbehaved(worker, "it hangs: a batch executes for far too long"),
            LaneFact::Broken(worker, why) => self.misbehaved(worker, &why),
        }
    }

    /// Kills a worker that hangs or sends nonsense, and treats it as dead at once.
    pub(super) fn misbehaved(&mut self, worker: WorkerId, why: &str) {
        tracing::error!(
            model = self.model.name,
            pid = self.pid(worker),
            why,
            "a worker misbehaves and is killed"
        );
        self.swap_misbehaved(worker);
        self.standby_fails(worker);
        if self.primary.worker() == Some(worker) {
            self.last_words = why.to_owned();
        }
        if let Some(worker) = self.workers.get(&worker) {
            worker.kill();
        }
        if self.stopping.is_none() {
            self.expect_end(worker);
            self.relieve(worker, why);
        }
    }

    fn on_worker(&mut self, worker: WorkerId, said: WorkerSaid) {
        tracing::debug!(model = self.model.name, pid = self.pid(worker), ?said, "worker");
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.note(&said);
        }
        let in_swap = self.swap.as_ref().is_some_and(|swap| swap.shadow == Some(worker));
        match said {
            WorkerSaid::Exited(status) => self.exited(worker, &status),
            // While stopping, only exits matter.
            _ if self.stopping.is_some() => {}
            WorkerSaid::Lost(why) => {
                tracing::debug!(model = self.model.name, why, "a boot channel broke; the exit follows");
            }
            WorkerSaid::Loaded(found) => self.loaded(worker, &found),
            said if in_swap => self.shadow_said(worker, said),
            said if self.standby.is(worker) => self.standby_said(worker, said),
            said => self.primary_said(worker, said),
        }
    }

    fn exited(&mut self, worker: WorkerId, status: &std::io::Result<std::process::ExitStatus>) {
        let Some(gone) = self.workers.remove(&worker) else { return };
        self.leaving.remove(&worker);
        let status = describe_exit(status);
        tracing::info!(model = self.model.name, pid = gone.pid, status, "worker ended");
        if self.stopping.is_some() {
            return;
        }
        self.standby_exited(worker);
        self.swap_exited(worker);
        self.primary_exited(worker, status);
    }

    fn stop(&mut self) {
        let now = self.now();
        self.pipeline.shut("the server is stopping");
        self.refuse_all(&ResizeRefused::Stopping);
        self.workers.values_mut().for_each(Worker::stop);
        self.stopping = Some(now + self.context.timeouts.stop);
    }

    pub(super) fn now(&self) -> Moment {
        self.context.clock.now()
    }

    pub(super) fn after(&self, span: Duration) -> Moment {
        self.now() + span
    }

    pub(super) fn sms(&self, share: Percent) -> Sms {
        self.in_process().map_or_else(|| self.gpu.sms(share), |inside| inside.sms_of(share))
    }

    pub(super) fn pid(&self, worker: WorkerId) -> Option<i32> {
        self.workers.get(&worker).map(|worker| worker.pid)
    }
}

fn describe_exit(status: &std::io::Result<std::process::ExitStatus>) -> String {
    match status {
        Ok(status) => status.to_string(),
        Err(error) => format!("unknown: {error}"),
    }
}
