//! The functions of a pipeline that its controller calls: changes of settings and routes, and
//! reports of the pipeline's state.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use shadowslice_policy::scheduler::{AbandonedRequests, Latencies, RecentLatencies, Slice, TrafficWindow};
use shadowslice_policy::sharing::{AdmissionPolicy, Observation};
use shadowslice_shared::batch::{Command, MAX_MESSAGE_BYTES, MAX_REQUESTS, StreamLimits};
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Percent, Timestamp};

use super::cache::ResponseCache;
use super::figures::{ModelLoad, Rates, RequestCounts, Stall, Totals};
use super::gate::Gate;
use super::requests::Metadata;
use super::trace_event;
use super::workers::{LaneEvent, PauseTotal, SmUse, StalledBatch};
use super::{LiveSettings, Pipeline};
use crate::trace::{LostReason, RouteChange};

/// The state of a pipeline, for the status and for the placement of models.
#[derive(Debug, Clone)]
pub struct PipelineReport {
    pub at: Timestamp,
    /// True if the model accepts requests.
    pub open: bool,
    pub counts: RequestCounts,
    pub batches: u64,
    /// The sum of the queue waits of all answered requests. A queue wait ends when the request's
    /// batch is sent.
    pub queue_wait: Duration,
    pub latencies: Latencies,
    pub rates: Rates,
    /// The number of requests that wait in the queue.
    pub queued: usize,
    /// The number of requests that execute or wait in a worker's slot.
    pub in_flight: usize,
    pub stalled: Option<StalledBatch>,
    /// The execution time of batches at the current share, for each number of rows. The list is
    /// empty if no worker serves.
    pub execution: Vec<(u32, Duration)>,
    /// The number of pieces of the model's largest batch, or the reason why its batches never wait for
    /// others. `None` if no worker serves.
    pub pieces: Option<Result<u32, String>>,
    /// The pauses of the model's batches since the start, by the models for which they waited.
    pub pauses: Vec<(Arc<str>, PauseTotal)>,
    /// The use of the GPU since the model's start.
    pub sm_use: SmUse,
    /// The streams, or `None` if the model gives one answer per request.
    pub streams: Option<StreamReport>,
}

/// The streams of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StreamReport {
    /// The number of open streams of all workers.
    pub open: u32,
    pub limits: StreamLimits,
    /// The times between the answers of streams in the last minute or two, and how many were within the
    /// SLO.
    pub gaps: Latencies,
    /// The number of answers per second in the last 10 s, without the first answer of each stream.
    pub answers_per_s: f64,
}

impl Pipeline {
    pub fn requests(&self) -> BorrowedFd<'_> {
        self.memory.slab.as_fd()
    }

    pub fn request_bytes(&self) -> u64 {
        self.memory.slab.bytes()
    }

    /// Sets the model's description. Fails if an earlier worker has reported another description.
    pub fn describe(&self, found: Metadata) -> Result<Arc<Metadata>, String> {
        let known = self.metadata.get_or_init(|| Arc::new(found.clone()));
        if **known != found {
            return Err(
                "the model's inputs or outputs have changed; restart the supervisor to serve the new file"
                    .to_owned(),
            );
        }
        let per_request = 16 + 24 * found.inputs.len();
        let mut state = self.state.lock();
        let max_requests = (MAX_MESSAGE_BYTES / 2 / per_request).clamp(1, MAX_REQUESTS);
        state.scheduler.set_model_limits(found.max_batch, max_requests, found.streams);
        Ok(Arc::clone(known))
    }

    /// Opens the model immediately, with the model's description from the pipeline `before`, which may serve
    /// another version.
    /// Requests wait for the first worker.
    pub fn open_with_metadata_of(&self, before: &Self) -> Result<(), String> {
        if let Some(known) = before.metadata() {
            self.describe(Metadata { version: self.version.to_string(), ..(*known).clone() })?;
        }
        self.state.lock().scheduler.record_disturbance();
        self.open();
        Ok(())
    }

    /// Changes the settings. For requests that already wait, the new settings apply when the batch
    /// is sent.
    pub fn set_live_settings(&self, rules: LiveSettings) {
        let now = self.clock.now();
        // Requests that have already ended are counted according to the previous settings.
        drop(self.counted_state());
        self.change(|state| {
            state.percentile = rules.slo.percentile;
            state.priority = rules.priority;
            state.scheduler.set_rules(rules.scheduler_rules());
            state.dispatch(now);
        });
    }

    pub fn open(&self) {
        let mut state = self.state.lock();
        state.gate = Gate::Open;
        self.readiness_tx.send_replace(());
    }

    /// Refuses all waiting requests, and all new requests from now on.
    pub fn shut(&self, why: &str) {
        let now = self.clock.now();
        self.change(|state| {
            state.gate = Gate::Shut(why.to_owned());
            state.drop_absence();
            let waiting = state.scheduler.drain_queue();
            state.refuse(waiting, why, now);
            state.dispatch(now);
            self.readiness_tx.send_replace(());
        });
    }

    /// Routes new batches to `worker`. The previous lane completes its batches.
    pub fn route(&self, worker: WorkerId) {
        let now = self.clock.now();
        self.change(|state| {
            let from = state.scheduler.serving_lane().map(|lane| lane.worker);
            if from != Some(worker) {
                state.routed = Some(RouteChange { at: now, from: from.map(|from| from.0), to: worker.0 });
            }
            state.scheduler.route(Some(worker));
            state.end_absence(now);
            state.publish_sleep();
            state.dispatch(now);
        });
    }

    /// Sends a command to a worker. The command either prepares a partition, which
    /// [`LaneEvent::Prepared`] confirms, or discards a partition that no later batch uses.
    pub fn command(&self, worker: WorkerId, command: Command) {
        if let Some(link) = self.state.lock().link_mut(worker) {
            link.command(command);
        }
    }

    /// Runs the next batch of `worker` on this part of the GPU. The worker must have prepared this
    /// part.
    pub fn move_to(&self, worker: WorkerId, share: Percent, slice: &Slice) {
        let mut state = self.state.lock();
        if let Some(link) = state.link_mut(worker) {
            link.move_to(share, slice);
        }
        state.scheduler.move_to(worker, slice);
    }

    /// Reports [`LaneEvent::Drained`] as soon as `worker` has no request in flight.
    pub fn drain(&self, worker: WorkerId) {
        let mut state = self.state.lock();
        if state.scheduler.drain(worker) {
            state.report(LaneEvent::Drained(worker));
        }
    }

    /// Takes the requests of `worker` back, so that another worker serves them. Unlike
    /// [`Self::condemn`], does not count the requests as possible causes of a death.
    pub fn requeue(&self, worker: WorkerId) {
        let now = self.clock.now();
        self.change(|state| {
            let AbandonedRequests { mut executing, behind } = state.take_back(worker);
            executing.extend(behind);
            trace_event::record_loss(&executing, LostReason::TakenBack, now);
            state.put_back(executing, now);
            state.dispatch(now);
        });
    }

    /// Treats `worker` as dead. Another worker serves its requests. Each request in the executing
    /// batch counts as a possible cause of the death.
    pub fn condemn(&self, worker: WorkerId) {
        let now = self.clock.now();
        self.change(|state| state.condemn(worker, now));
    }

    /// Returns whether `worker` is idle. If the worker has ended, returns whether it was idle at
    /// its end.
    pub fn is_idle(&self, worker: WorkerId) -> bool {
        self.state.lock().is_idle(worker)
    }

    pub fn begin_stall(&self) {
        self.state.lock().stall.begin(self.clock.now());
    }

    /// Starts to measure the stall that a worker's death causes. The stall begins at the time of
    /// the death.
    pub fn begin_stall_at_outage(&self) {
        self.state.lock().stall.begin_at_outage();
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

    /// Returns true if the batches of the worker that serves can pause between two pieces.
    pub fn can_pause(&self) -> bool {
        let state = self.state.lock();
        let worker = state.scheduler.serving_lane().map(|lane| lane.worker);
        state.links.iter().any(|link| Some(link.worker) == worker && link.pauses.can_pause())
    }

    /// Returns the observations since the previous call, or since the start.
    pub fn observe(&self) -> Observation {
        let now = self.clock.now();
        self.counted_state().scheduler.observe(now)
    }

    pub fn report(&self) -> PipelineReport {
        let now = self.clock.now();
        let mut state = self.counted_state();
        let traffic = state.scheduler.traffic().total();
        let serving = state.scheduler.serving_lane();
        let execution = serving.map_or_else(Vec::new, |lane| lane.predictor.observed().collect());
        let percentile = state.percentile;
        let worker = serving.map(|lane| lane.worker);
        let link = state.links.iter().find(|link| Some(link.worker) == worker);
        let (pieces, pauses) =
            link.map(|link| (link.pauses.pieces.clone(), link.pauses.totals(&self.name))).unzip();
        PipelineReport {
            at: now,
            open: state.gate == Gate::Open,
            counts: state.stats.counts(traffic),
            batches: state.stats.totals.batch_execution.count,
            queue_wait: state.stats.totals.queue_wait.time,
            latencies: state.scheduler.traffic().latencies(percentile, now),
            rates: state.scheduler.traffic().recent(now).into(),
            queued: state.scheduler.queued(),
            in_flight: state.scheduler.in_flight(),
            stalled: state.stalled_batch(now),
            execution,
            pieces,
            pauses: pauses.unwrap_or_default(),
            sm_use: self.sm_time.total(),
            streams: self.metadata().and_then(|model| model.streams).map(|limits| {
                let recent = state.scheduler.gaps().recent(now);
                StreamReport {
                    open: state.scheduler.open_streams(),
                    limits,
                    gaps: state.scheduler.gaps().latencies(percentile, now),
                    answers_per_s: recent.rate(recent.counts.answered),
                }
            }),
        }
    }

    /// Returns the figures of the last ten seconds and of the current second.
    pub fn recent_traffic(&self) -> TrafficWindow {
        let now = self.clock.now();
        self.counted_state().scheduler.traffic().recent(now)
    }

    /// Returns the rates of the [recent traffic](Self::recent_traffic).
    pub fn rates(&self) -> Rates {
        self.recent_traffic().into()
    }

    /// Returns the latencies of the requests that were answered since the previous call, or `None`
    /// if there were none. Only one observer may call this function, because each latency is
    /// returned only once.
    pub fn take_recent_latencies(&self) -> Option<RecentLatencies> {
        self.counted_state().scheduler.traffic().take_latencies()
    }

    /// Returns the model's load and the number of waiting requests.
    pub fn load(&self) -> (ModelLoad, usize) {
        let now = self.clock.now();
        let mut state = self.counted_state();
        (ModelLoad::of(state.scheduler.traffic().last_second(now)), state.scheduler.queued())
    }

    pub fn totals(&self) -> Totals {
        let cache = self.cache.as_ref().map(ResponseCache::counts);
        Totals { cache, ..self.counted_state().stats.totals.clone() }
    }
}
