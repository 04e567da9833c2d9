//! The controller's side of a pipeline: its settings, and reports of its state.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use shadowslice_policy::scheduler::{AbandonedRequests, Slice};
use shadowslice_policy::sharing::{AdmissionPolicy, Observation};
use shadowslice_shared::batch::{Command, MAX_MESSAGE_BYTES, MAX_REQUESTS};
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Percent, Timestamp};

use super::counts::Counts;
use super::facts::LaneFact;
use super::gate::Gate;
use super::hangs::StalledBatch;
use super::load::Load;
use super::note;
use super::rates::Rates;
use super::request::Metadata;
use super::stall::Stall;
use super::stats::{Latencies, Look};
use super::totals::Totals;
use super::{LiveSettings, Pipeline};
use crate::trace::{Handover, Lost};

#[derive(Debug, Clone)]
pub struct PipelineReport {
    pub at: Timestamp,
    /// It takes requests.
    pub open: bool,
    pub counts: Counts,
    pub batches: u64,
    /// Of all answered requests together, until their batch was sent.
    pub queue_wait: Duration,
    pub latencies: Latencies,
    pub rates: Rates,
    /// Accepted, and not answered yet: queued, in flight.
    pub pending: (usize, usize),
    pub stalled: Option<StalledBatch>,
    /// How long batches execute at the share in force, by rows; empty while nothing serves.
    pub execution: Vec<(u32, Duration)>,
}

impl Pipeline {
    pub fn requests(&self) -> BorrowedFd<'_> {
        self.memory.slab.as_fd()
    }

    pub fn request_bytes(&self) -> u64 {
        self.memory.slab.bytes()
    }

    /// The first description stands; a worker that finds another model is faulty.
    pub fn describe(&self, found: Metadata) -> Result<Arc<Metadata>, String> {
        let known = self.metadata.get_or_init(|| Arc::new(found.clone()));
        if **known != found {
            return Err(
                "the model's file has other inputs or outputs than before; restart to serve it".to_owned()
            );
        }
        let per_request = 16 + 24 * found.inputs.len();
        let mut state = self.state.lock();
        let max_requests = (MAX_MESSAGE_BYTES / 2 / per_request).clamp(1, MAX_REQUESTS);
        state.scheduler.set_model_limits(found.max_batch, max_requests, found.streams);
        Ok(Arc::clone(known))
    }

    /// Takes requests at once, which wait for the first worker: the model has served before, as this
    /// other pipeline knows it.
    pub fn open_as(&self, before: &Self) -> Result<(), String> {
        if let Some(known) = before.metadata() {
            self.describe((*known).clone())?;
        }
        self.state.lock().scheduler.record_disturbance();
        self.open();
        Ok(())
    }

    /// Waiting requests follow the new rules when they are sent, as far as these apply then.
    pub fn set_live_settings(&self, rules: LiveSettings) {
        let now = self.clock.now();
        // Requests that have ended are judged by the rules of that time.
        drop(self.counted());
        self.change(|state| {
            state.stats.slo = rules.slo;
            state.scheduler.set_rules(rules.scheduled());
            state.dispatch(now);
        });
    }

    pub fn open(&self) {
        let mut state = self.state.lock();
        state.gate = Gate::Open;
        self.readiness.send_replace(());
    }

    /// Refuses new requests from now on, and the requests that wait.
    pub fn shut(&self, why: &str) {
        let now = self.clock.now();
        self.change(|state| {
            state.gate = Gate::Shut(why.to_owned());
            let waiting = state.scheduler.drain_queue();
            state.refuse(waiting, why, now);
            state.dispatch(now);
            self.readiness.send_replace(());
        });
    }

    /// The old lane finishes the batches that it has.
    pub fn route(&self, worker: Option<WorkerId>) {
        let now = self.clock.now();
        self.change(|state| {
            let from = state.scheduler.serving_lane().map(|lane| lane.worker);
            if let Some(WorkerId(to)) = worker.filter(|_| worker != from) {
                state.routed = Some(Handover { at: now, from: from.map(|from| from.0), to });
            }
            state.scheduler.route(worker);
            state.dispatch(now);
        });
    }

    /// Has a partition made ready, of which [`LaneFact::Prepared`] reports the result, or lets go
    /// of one that no further batch names.
    pub fn command(&self, worker: WorkerId, command: Command) {
        if let Some(link) = self.state.lock().link_mut(worker) {
            link.command(command);
        }
    }

    /// Has `worker`'s next batch run on this part of the GPU, which it has ready.
    pub fn move_to(&self, worker: WorkerId, share: Percent, slice: &Slice) {
        let mut state = self.state.lock();
        if let Some(link) = state.link_mut(worker) {
            link.move_to(share, slice);
        }
        state.scheduler.move_to(worker, slice);
    }

    /// Reports [`LaneFact::Drained`] as soon as `worker` has nothing in flight.
    pub fn drain(&self, worker: WorkerId) {
        let mut state = self.state.lock();
        if state.scheduler.drain(worker) {
            state.report(LaneFact::Drained(worker));
        }
    }

    /// Serves the requests of `worker` elsewhere, without blame.
    pub fn requeue(&self, worker: WorkerId) {
        let now = self.clock.now();
        self.change(|state| {
            let AbandonedRequests { mut executing, behind } = state.take_back(worker);
            executing.extend(behind);
            note::lost(&executing, Lost::TakenBack, now);
            state.put_back(executing, now);
            state.dispatch(now);
        });
    }

    /// It is as good as dead: its requests are served elsewhere, and the executing batch is blamed.
    pub fn condemn(&self, worker: WorkerId) {
        let now = self.clock.now();
        self.change(|state| state.condemn(worker, now));
    }

    /// Whether `worker` has nothing to do, or had not when it went.
    pub fn is_idle(&self, worker: WorkerId) -> bool {
        self.state.lock().is_idle(worker)
    }

    pub fn begin_stall(&self) {
        self.state.lock().stall.begin(self.clock.now());
    }

    /// Begins to measure the stall that a worker's death causes, from the moment of the death.
    pub fn begin_stall_with_outage(&self) {
        self.state.lock().stall.begin_with_outage();
    }

    pub fn stall(&self) -> Stall {
        self.state.lock().stall.read(self.clock.now())
    }

    pub fn set_admission(&self, admission: AdmissionPolicy) {
        let now = self.clock.now();
        self.change(|state| {
            state.scheduler.set_admission(admission);
            state.dispatch(now);
        });
    }

    pub fn refuses_late(&self) -> bool {
        self.state.lock().scheduler.refuses_late()
    }

    /// Since the last call, or since the start.
    pub fn observe(&self) -> Observation {
        let now = self.clock.now();
        self.counted().scheduler.observe(now)
    }

    pub fn report(&self) -> PipelineReport {
        let now = self.clock.now();
        let mut state = self.counted();
        let serving = state.scheduler.serving_lane();
        let execution = serving.map_or_else(Vec::new, |lane| lane.predictor.observed().collect());
        PipelineReport {
            at: now,
            open: state.gate == Gate::Open,
            counts: state.stats.counts,
            batches: state.stats.totals.batch_execution.count,
            queue_wait: state.stats.totals.queue_wait.time,
            latencies: state.stats.latencies(now),
            rates: state.stats.rates.rates(now),
            pending: (state.scheduler.queued(), state.scheduler.in_flight()),
            stalled: state.stalled(now),
            execution,
        }
    }

    pub fn rates(&self) -> Rates {
        let now = self.clock.now();
        self.counted().stats.rates.rates(now)
    }

    /// For one observer: what one look has seen, no other sees. `None` if no request was answered
    /// since the last one.
    pub fn look(&self) -> Option<Look> {
        self.counted().stats.look()
    }

    /// And how many requests wait.
    pub fn load(&self) -> (Load, usize) {
        let now = self.clock.now();
        let mut state = self.counted();
        (state.stats.load.load(now), state.scheduler.queued())
    }

    pub fn totals(&self) -> Totals {
        self.counted().stats.totals.clone()
    }
}
