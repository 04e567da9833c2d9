//! One model's way from its requests to its workers.
//!
//! ```text
//! ingress ─ infer ─▶ request slab ─▶ scheduler ─▶ link ─▶ worker
//!    ▲                                                │
//!    └───────── outputs, copied from its slab ◀─ reader ┘
//! ```
//!
//! [`shadowslice_policy::scheduler`] decides which requests wait, are refused, or run together;
//! this module moves the bytes. The controller attaches workers, routes to one of them and receives
//! facts from them; the data path never waits for it.

mod alarm;
mod answer;
mod claim;
mod controls;
mod counts;
mod delivery;
mod durations;
mod facts;
mod gate;
mod hangs;
mod histogram;
mod link;
mod load;
mod memory;
mod note;
mod occupancy;
mod pending;
mod pieces;
mod quarantine;
mod rates;
mod reader;
mod request;
mod shapes;
mod socket;
mod stall;
mod state;
mod stats;
mod streams;
#[cfg(test)]
mod tests;
mod totals;

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use shadowslice_policy::scheduler::{self, QueuedRequest, Scheduler};
use shadowslice_shared::profile::Profile;
use shadowslice_shared::slab::SlabError;
use shadowslice_shared::units::Timestamp;
use tokio::sync::{Notify, mpsc, oneshot, watch};

pub use controls::PipelineReport;
pub use counts::{Counts, Refusal, Refused};
pub use delivery::Delivery;
pub use durations::Durations;
pub use facts::{FACTS, LaneFact};
pub use hangs::StalledBatch;
pub use histogram::LatencyHistogram;
pub use link::Arrival;
pub use load::Load;
pub use occupancy::{Occupancy, Occupied};
pub use pieces::Pieces;
pub use rates::Rates;
pub use reader::LaneReader;
pub use request::{Coming, Failure, Input, Metadata, ModelContent, Output, RequestOptions};
pub use shadowslice_config::SloTarget;
pub use shadowslice_policy::scheduler::Slice;
pub use socket::BatchSocket;
pub use stall::Stall;
pub use stats::{Latencies, Look};
pub use streams::Answers;
pub use totals::{Steps, Total, Totals};

use crate::clock::Clock;
use crate::trace::Journal;
use alarm::Alarm;
use claim::{Claim, Wait};
use delivery::Ended;
use gate::Gate;
use memory::{RequestMemory, Reservation};
use pending::Pending;
use quarantine::Quarantine;
use stall::StallMeter;
use state::State;
use stats::Stats;
use streams::Given;

#[derive(Debug)]
pub struct Settings {
    pub name: String,
    pub live: LiveSettings,
    /// Requests that may wait.
    pub max_requests: usize,
    /// Bytes of the request slab.
    pub memory: u64,
    pub profile: Option<Profile>,
    pub content: Arc<ModelContent>,
}

/// The settings of a pipeline that can change while it serves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LiveSettings {
    /// The model's SLO; its latency is every request's deadline.
    pub slo: SloTarget,
    pub max_delay: Duration,
    /// Whether late requests are refused under overload.
    pub reject_late: bool,
}

impl LiveSettings {
    fn scheduled(&self) -> scheduler::SchedulingRules {
        let &Self { slo, max_delay, reject_late } = self;
        scheduler::SchedulingRules { slo: slo.latency, max_delay, reject_late }
    }
}

#[derive(Debug)]
pub struct Pipeline {
    name: Arc<str>,
    profile: Option<Profile>,
    clock: Clock,
    memory: Arc<RequestMemory>,
    metadata: OnceLock<Arc<Metadata>>,
    content: Arc<ModelContent>,
    state: Mutex<State>,
    /// Requests whose deliveries have ended and that the state doesn't count yet.
    endings: Mutex<Vec<Ended>>,
    alarm_moved: Notify,
    readiness: watch::Sender<()>,
}

impl Pipeline {
    /// A pipeline that takes no requests until a worker serves.
    pub fn new(settings: Settings, clock: Clock, facts: mpsc::Sender<LaneFact>) -> Result<Self, SlabError> {
        let memory = Arc::new(RequestMemory::create(&settings.name, settings.memory)?);
        let name: Arc<str> = settings.name.into();
        let state = State {
            name: Arc::clone(&name),
            gate: Gate::Loading,
            scheduler: Scheduler::new(settings.live.scheduled(), settings.max_requests, clock.now()),
            links: Vec::new(),
            stall: StallMeter::default(),
            stats: Stats::new(settings.live.slo, clock.now()),
            facts,
            alarm: None,
            armed: None,
            routed: None,
            went_idle: VecDeque::new(),
            quarantine: Quarantine::default(),
        };
        Ok(Self {
            name,
            profile: settings.profile,
            clock,
            memory,
            metadata: OnceLock::new(),
            content: settings.content,
            state: Mutex::new(state),
            endings: Mutex::default(),
            alarm_moved: Notify::new(),
            readiness: watch::Sender::default(),
        })
    }

    /// The model's description, once a worker has loaded the model.
    pub fn metadata(&self) -> Option<Arc<Metadata>> {
        self.metadata.get().cloned()
    }

    /// The same, for a request that is to be checked against it. A refusal counts.
    pub fn described(&self, journal: Option<&Journal>) -> Result<Arc<Metadata>, Failure> {
        self.metadata().ok_or_else(|| {
            let now = self.clock.now();
            let mut state = self.state.lock();
            let failure = state.not_ready();
            note::refused(journal, Refusal::NotReady);
            state.turn_away(Refusal::NotReady, 1, now);
            failure
        })
    }

    pub fn content(&self) -> &ModelContent {
        &self.content
    }

    /// Counts a request that a limit of the host refuses.
    pub fn refused_by_host(&self, journal: Option<&Journal>) {
        note::refused(journal, Refusal::HostFull);
        self.state.lock().turn_away(Refusal::HostFull, 1, self.clock.now());
    }

    /// Counts a request that is at fault itself, so that the model never sees it. As with Triton it is
    /// in none of the statistics.
    pub fn malformed(&self) {
        self.state.lock().stats.counts.invalid += 1;
    }

    /// Whether it takes requests; else why not.
    pub fn ready(&self) -> Result<(), String> {
        self.state.lock().gate.open().map_err(str::to_owned)
    }

    /// It has neither been ready yet nor been given up, and none of its workers had to be killed.
    pub fn is_loading(&self) -> bool {
        self.state.lock().gate == Gate::Loading
    }

    /// A worker was killed. A host does not wait for a model whose workers take too long to start.
    pub fn killed(&self) {
        let mut state = self.state.lock();
        if state.gate == Gate::Loading {
            state.gate = Gate::LoadingAgain;
            self.readiness.send_replace(());
        }
    }

    /// Changes whenever it may be ready, or ready no more.
    pub fn readiness(&self) -> watch::Receiver<()> {
        self.readiness.subscribe()
    }

    /// `inputs` are checked against the model's metadata and stand in its order, and behind them all
    /// optional ones if any of these is given; the outputs come in its order too.
    ///
    /// Dropping the future gives the request up: it is not run if it still waits. The end of its
    /// timeout does the same. The request is due at its SLO or its timeout, whichever is sooner. It
    /// counts when its answer's delivery has ended.
    pub async fn infer(
        &self,
        inputs: Vec<Input>,
        terms: RequestOptions,
        coming: Coming,
    ) -> Result<(Vec<Output>, Delivery), Failure> {
        let Given { outputs, delivery, .. } = self.ask(inputs, terms, coming).await?;
        Ok((outputs, delivery))
    }

    async fn ask(
        &self,
        inputs: Vec<Input>,
        terms: RequestOptions,
        Coming { began, waited, journal }: Coming,
    ) -> Result<Given, Failure> {
        let (received, elapsed) = (self.clock.now(), began.elapsed());
        let arrived = received - elapsed;
        let metadata = self.described(journal.as_ref())?;
        let rows = metadata.rows(&inputs);
        let memory = self.store(&inputs, rows, journal.as_ref(), received)?;
        let stored = self.clock.now();
        if let Some(journal) = &journal {
            journal.stored(rows, stored.since(received));
        }
        let (reply, answer) = oneshot::channel();
        let claim = Claim::default();
        let mut entry = QueuedRequest {
            shape: metadata.shapes(&inputs),
            rows,
            arrived,
            deadline: arrived,
            level: terms.level(),
            // Other requests have other values, or the default.
            alone: inputs.len() > metadata.inputs.len(),
            item: Pending {
                memory: Arc::new(memory),
                reply,
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
            // The objective may change.
            let slo = state.scheduler.slo();
            entry.deadline = arrived + terms.timeout.map_or(slo, |timeout| timeout.min(slo));
            state.stats.totals.coming.add(elapsed.saturating_sub(waited));
            state.accept(entry, stored)
        })?;
        Wait { pipeline: self, claim, arrived }.answer(answer, terms.timeout).await
    }

    fn store(
        &self,
        inputs: &[Input],
        rows: u32,
        journal: Option<&Journal>,
        now: Timestamp,
    ) -> Result<Reservation, Failure> {
        let needed: u64 = inputs.iter().map(|input| memory::taken(input.data.len() as u64)).sum();
        let limit = self.memory.slab.bytes();
        let refuse = |why| {
            note::refused(journal, why);
            self.state.lock().turn_away(why, rows, now);
        };
        if needed > limit {
            let why = format!(
                "the request has {needed} bytes and model '{}' holds {limit} (queue.memory)",
                self.name
            );
            refuse(Refusal::TooLarge);
            return Err(Failure::Invalid(why));
        }
        let Some(memory) = self.reserve(inputs) else {
            let why =
                format!("the queue of model '{}' is full: its {limit} bytes of memory are taken", self.name);
            refuse(Refusal::MemoryFull);
            return Err(Failure::Unavailable(why));
        };
        for (index, input) in inputs.iter().enumerate() {
            memory.fill(index, &input.data).map_err(|error| Failure::Internal(error.to_string()))?;
        }
        Ok(memory)
    }

    /// Room for these inputs, if need be in the place of requests that are settled.
    fn reserve(&self, inputs: &[Input]) -> Option<Reservation> {
        let lengths = || inputs.iter().map(|input| input.data.len() as u64);
        self.memory.reserve(lengths()).or_else(|| {
            self.state.lock().scheduler.forget_settled();
            self.memory.reserve(lengths())
        })
    }

    /// Changes the state, and moves the alarm if it must ring earlier now. An alarm that could ring
    /// later stays and rings in vain, which costs less than setting it with each request.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
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

    /// Sends batches whose delay is over or whose turn has come, and reports workers that hang.
    /// Never returns.
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
