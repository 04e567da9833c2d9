//! The pipeline of one model, from its requests to its workers.
//!
//! ```text
//! ingress ─ infer ─▶ request slab ─▶ scheduler ─▶ link ─▶ worker
//!    ▲                                                │
//!    └───────── outputs, copied from its slab ◀─ reader ┘
//! ```
//!
//! `requests` contains a request and its answer, `workers` the lanes to the workers, and `figures` what
//! is counted. [`shadowslice_policy::scheduler`] decides which requests wait, which are refused, and which run
//! together. This module moves the bytes. The controller attaches workers, selects the worker that
//! gets new batches, and receives events about all workers. The data path never waits for the
//! controller.

mod alarm;
mod cache;
mod controls;
mod figures;
mod gate;
mod refusals;
mod requests;
mod sleep;
mod state;
mod tenants;
#[cfg(test)]
mod tests;
mod trace_event;
mod workers;

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use shadowslice_config::OpenAiConfig;
use shadowslice_policy::scheduler::{self, QueuedRequest, RefusalReason, Scheduler};
use shadowslice_policy::tenants::{TenantId, TenantTurns};
use shadowslice_shared::profile::Profile;
use shadowslice_shared::slab::SlabError;
use shadowslice_shared::units::Timestamp;
use tokio::sync::{Notify, mpsc, oneshot, watch};

pub use controls::{PipelineReport, StreamReport};
pub use figures::{
    BatchStageTotals, CountedRefusal, Durations, LatencyHistogram, ModelLoad, Rates, RefusalCounts,
    RequestCounts, Stall, Total, Totals,
};
pub use requests::{
    Answers, Delivery, Metadata, ModelContent, Pieces, RequestArrival, RequestFailure, RequestInput,
    RequestOptions, RequestOutput,
};
pub use shadowslice_config::SloTarget;
pub use shadowslice_policy::scheduler::{Latencies, RecentLatencies, Slice, TrafficWindow};
pub use sleep::{ResidencySignal, SleepCause, SleepCounts, SleepPhase, SleepReport, SleepState};
pub use workers::{
    BatchSocket, EVENT_QUEUE_SIZE, GpuPauses, GpuSmTime, LaneEvent, LaneReader, LaneWorker, ModelPair,
    Occupancy, OccupancyGuard, PauseTotal, SmAccount, SmUse, StalledBatch,
};

use crate::clock::Clock;
use crate::trace::Journal;
pub use alarm::Alarm;
pub use cache::CacheCounts;
use cache::ResponseCache;
use figures::{StallMeter, Stats};
use gate::Gate;
use requests::{
    AnswerWait, Claim, PendingRequest, ReplyTarget, RequestEnd, RequestMemory, Reservation, WorkerAnswer,
};
pub use shadowslice_policy::sm_time::{BatchSms, divide};
use state::PipelineState;
use workers::Quarantine;

/// The settings with which a pipeline is created.
#[derive(Debug)]
pub struct PipelineSettings {
    /// The name of the instance.
    pub name: String,
    /// The number of the model's version.
    pub version: u32,
    pub live: LiveSettings,
    /// The largest number of requests that can wait.
    pub max_requests: usize,
    /// The size of the request slab, in bytes.
    pub memory: u64,
    pub profile: Option<Profile>,
    /// The maximum size of the cache of answers in bytes, or `None` for no cache.
    pub cache: Option<u64>,
    /// The identity of the model's files: their digest, and the time when they were loaded.
    pub content: Arc<ModelContent>,
    /// The signals to the task that decides which models sleep.
    pub residency: Arc<ResidencySignal>,
    /// The weights of the tenants in the order of their ids.
    pub tenant_weights: Vec<f64>,
    /// The time after which the model's workers interrupt a step of streams.
    pub step_timeout: Duration,
}

/// The settings of a pipeline that can change while the pipeline serves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LiveSettings {
    /// The model's SLO. The SLO's latency is the deadline of every request, unless the request has
    /// a shorter timeout.
    pub slo: SloTarget,
    pub max_delay: Duration,
    /// True if late requests are refused when the model is overloaded.
    pub reject_late: bool,
    /// The model's priority; 1 is the highest. Batches of a lower priority can wait for those of a higher one.
    pub priority: u32,
}

impl LiveSettings {
    fn scheduler_rules(&self) -> scheduler::SchedulingRules {
        let &Self { slo, max_delay, reject_late, .. } = self;
        scheduler::SchedulingRules { slo: slo.latency, next_slo: slo.next, max_delay, reject_late }
    }
}

/// The queue, the lanes and the statistics of one model. A lane is the path to one worker.
#[derive(Debug)]
pub struct Pipeline {
    name: Arc<str>,
    version: u32,
    profile: Option<Profile>,
    clock: Clock,
    memory: Arc<RequestMemory>,
    sm_time: Arc<SmAccount>,
    cache: Option<ResponseCache>,
    /// The tensors for OpenAI's endpoints.
    openai: RwLock<Option<Arc<OpenAiConfig>>>,
    metadata: OnceLock<Arc<Metadata>>,
    content: Arc<ModelContent>,
    step_timeout: Duration,
    state: Mutex<PipelineState>,
    /// The ends of requests that are not yet counted in `state`.
    endings: Mutex<Vec<RequestEnd>>,
    alarm_moved: Notify,
    readiness_tx: watch::Sender<()>,
}

impl Pipeline {
    /// Creates a pipeline. It accepts no requests until a worker is ready.
    pub fn new(
        settings: PipelineSettings,
        clock: Clock,
        events_tx: mpsc::Sender<LaneEvent>,
    ) -> Result<Self, SlabError> {
        let memory = Arc::new(RequestMemory::create(&settings.name, settings.memory)?);
        let name: Arc<str> = settings.name.into();
        let mut scheduler =
            Scheduler::new(settings.live.scheduler_rules(), settings.max_requests, clock.now());
        scheduler.set_turns(TenantTurns::new(&settings.tenant_weights));
        let state = PipelineState {
            name: Arc::clone(&name),
            gate: Gate::Loading,
            scheduler,
            links: Vec::new(),
            stall: StallMeter::default(),
            stats: Stats::default(),
            percentile: settings.live.slo.percentile,
            priority: settings.live.priority,
            events_tx,
            alarm: None,
            armed: None,
            routed: None,
            idle_ended: VecDeque::new(),
            quarantine: Quarantine::default(),
            residency: settings.residency,
            pins: true,
            used: clock.now(),
            is_wake_ordered: false,
            sleep_tx: watch::Sender::default(),
            absence: None,
            start_time: None,
        };
        Ok(Self {
            name,
            version: settings.version,
            profile: settings.profile,
            clock,
            memory,
            sm_time: Arc::default(),
            cache: settings.cache.map(ResponseCache::new),
            openai: RwLock::default(),
            metadata: OnceLock::new(),
            content: settings.content,
            step_timeout: settings.step_timeout,
            state: Mutex::new(state),
            endings: Mutex::default(),
            alarm_moved: Notify::new(),
            readiness_tx: watch::Sender::default(),
        })
    }

    /// Returns the name of the instance.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of the model's version.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Returns the model's description, or `None` if no worker has loaded the model yet.
    pub fn metadata(&self) -> Option<Arc<Metadata>> {
        self.metadata.get().cloned()
    }

    /// Returns the model's description, which is needed to check a request. If no worker has loaded
    /// the model yet, counts a refused request.
    pub fn metadata_or_refuse(&self, journal: Option<&Journal>) -> Result<Arc<Metadata>, RequestFailure> {
        self.metadata().ok_or_else(|| {
            let now = self.clock.now();
            let mut state = self.state.lock();
            let failure = state.not_ready();
            trace_event::record_refusal(journal, CountedRefusal::NotReady);
            state.count_refusal(CountedRefusal::NotReady, 1, now);
            failure
        })
    }

    /// Returns the tensors for OpenAI's endpoints, or `None` if the model serves none of them.
    pub fn openai(&self) -> Option<Arc<OpenAiConfig>> {
        self.openai.read().clone()
    }

    /// Replaces the tensors for OpenAI's endpoints.
    pub fn set_openai(&self, mapping: Option<Arc<OpenAiConfig>>) {
        *self.openai.write() = mapping;
    }

    pub fn content(&self) -> &ModelContent {
        &self.content
    }

    /// Counts a request that was refused before its inputs were read.
    pub fn count_refused_arrival(&self, why: CountedRefusal, journal: Option<&Journal>) {
        trace_event::record_refusal(journal, why);
        self.state.lock().count_refusal(why, 1, self.clock.now());
    }

    /// Counts a malformed request. The model never receives such a request. As in Triton, no other
    /// statistic counts it.
    pub fn count_malformed(&self) {
        self.state.lock().stats.invalid += 1;
    }

    /// Returns `Ok` if the model accepts requests. Otherwise returns the reason why it does not.
    pub fn ready(&self) -> Result<(), String> {
        self.state.lock().gate.open().map_err(str::to_owned)
    }

    /// Returns whether the host's readiness waits for this model. It waits until the model is
    /// ready, its start has failed permanently, or one of its workers was killed. After a kill,
    /// clients still receive the error that the model is being loaded.
    pub fn is_loading(&self) -> bool {
        self.state.lock().gate == Gate::Loading
    }

    /// Records that a worker was killed, for example because it did not start in time. If the model
    /// is still loading, the host's readiness no longer waits for this model.
    pub fn worker_killed(&self) {
        let mut state = self.state.lock();
        if state.gate == Gate::Loading {
            state.gate = Gate::LoadingAgain;
            self.readiness_tx.send_replace(());
        }
    }

    /// Returns a receiver that is notified whenever the model's readiness may have changed.
    pub fn readiness(&self) -> watch::Receiver<()> {
        self.readiness_tx.subscribe()
    }

    async fn submit(
        &self,
        inputs: Vec<RequestInput>,
        options: RequestOptions,
        RequestArrival { began, waited, tenant, journal, .. }: RequestArrival,
    ) -> Result<WorkerAnswer, RequestFailure> {
        let (received, elapsed) = (self.clock.now(), began.elapsed());
        let arrived = received - elapsed;
        let metadata = self.metadata_or_refuse(journal.as_ref())?;
        let rows = metadata.rows(&inputs);
        let memory = self.store(&inputs, rows, tenant, journal.as_ref(), received)?;
        let stored = self.clock.now();
        if let Some(journal) = &journal {
            journal.record_copy_in(rows, stored.since(received));
        }
        let (reply_tx, reply_rx) = oneshot::channel();
        let claim = Claim::default();
        let mut entry = QueuedRequest {
            shape: metadata.shapes(&inputs),
            rows,
            arrived,
            deadline: arrived,
            expires: options.timeout.map(|timeout| arrived + timeout),
            level: options.level(),
            tenant,
            // Optional inputs apply to the whole batch, and other requests may have different
            // values for them.
            alone: inputs.len() > metadata.inputs.len(),
            item: PendingRequest {
                memory: Arc::new(memory),
                reply: ReplyTarget::Client(reply_tx),
                claim: claim.clone(),
                received,
                copy_in: stored.since(received),
                deaths: 0,
                journal,
                stream: None,
            },
        };
        drop(inputs);
        self.change(|state| {
            // The SLO may have changed since the request arrived, so the deadline is computed here.
            let slo = state.scheduler.slo();
            entry.deadline = arrived + options.timeout.map_or(slo, |timeout| timeout.min(slo));
            state.stats.totals.receiving.add(elapsed.saturating_sub(waited));
            state.accept(entry, stored)
        })?;
        AnswerWait { pipeline: self, claim, arrived }.answer(reply_rx, options.timeout).await
    }

    fn store(
        &self,
        inputs: &[RequestInput],
        rows: u32,
        tenant: TenantId,
        journal: Option<&Journal>,
        now: Timestamp,
    ) -> Result<Reservation, RequestFailure> {
        let needed: u64 = inputs.iter().map(|input| requests::taken(input.data.len() as u64)).sum();
        let limit = self.memory.slab.bytes();
        let refuse = |why| {
            trace_event::record_refusal(journal, why);
            self.state.lock().count_refusal(why, rows, now);
        };
        if needed > limit {
            let why = format!(
                "the request has {needed} bytes, but the queue of model '{}' holds {limit} (queue.memory)",
                self.name
            );
            refuse(CountedRefusal::TooLarge);
            return Err(RequestFailure::Invalid(why));
        }
        let Some(memory) = self.reserve(inputs, tenant, now) else {
            refuse(CountedRefusal::MemoryFull);
            return Err(refusals::memory_full(&self.name));
        };
        for (index, input) in inputs.iter().enumerate() {
            memory.fill(index, &input.data).map_err(|error| RequestFailure::Internal(error.to_string()))?;
        }
        Ok(memory)
    }

    /// Reserves memory for these inputs. If the memory is full, first removes settled requests from
    /// the queue. If it is still full, removes a request of a tenant that has more requests for its weight.
    fn reserve(&self, inputs: &[RequestInput], tenant: TenantId, now: Timestamp) -> Option<Reservation> {
        let lengths = || inputs.iter().map(|input| input.data.len() as u64);
        let reserve = || self.memory.reserve(lengths());
        let reserved = reserve().or_else(|| {
            self.state.lock().scheduler.forget_settled();
            reserve()
        });
        reserved.or_else(|| {
            // The memory must be in one piece, so only a request of at least this size makes room.
            let needed: u64 = lengths().map(requests::taken).sum();
            let mut state = self.state.lock();
            let enough = |item: &PendingRequest| item.memory.bytes() >= needed;
            let displaced = state.scheduler.displace(tenant, RefusalReason::MemoryFull, enough)?;
            state.reject(displaced, now);
            drop(state);
            reserve()
        })
    }

    /// Changes the state, and sets the alarm to an earlier time if necessary. Never sets the alarm
    /// to a later time, because an early alarm costs less than a new alarm for each request.
    fn change<T>(&self, change: impl FnOnce(&mut PipelineState) -> T) -> T {
        let mut state = self.state.lock();
        let result = change(&mut state);
        let earlier = state.alarm.is_some_and(|alarm| state.armed.is_none_or(|armed| alarm < armed));
        if earlier {
            state.armed = state.alarm;
        }
        drop(state);
        if earlier {
            self.alarm_moved.notify_one();
        }
        result
    }

    /// Sends batches when they are due, refuses requests that have become too late, and reports
    /// workers that hang. Never returns.
    pub async fn watch(&self) {
        let alarm = Alarm::new(self.clock);
        loop {
            let due = {
                let mut state = self.state.lock();
                state.armed = state.alarm;
                state.armed
            };
            let moved = self.alarm_moved.notified();
            let Some(due) = due else {
                moved.await;
                continue;
            };
            tokio::select! {
                () = moved => continue,
                () = alarm.wait(due) => {}
            }
            let now = self.clock.now();
            let mut state = self.state.lock();
            state.report_hangs(now);
            state.refuse_overdue(now);
            state.dispatch(now);
        }
    }

    fn now(&self) -> Timestamp {
        self.clock.now()
    }
}
