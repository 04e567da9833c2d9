//! Methods of the scheduler that add and remove lanes and move traffic between them.

use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Timestamp;

use super::Scheduler;
use super::lane::{AbandonedRequests, Duty, Lane, LaneWeights, Slice};
use super::messages::Ticket;
use crate::pauses::RunningBatch;

/// The batch that a worker executes. While nothing of it changes, its [`RunningBatch`] need not be
/// reported again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExecutingBatch {
    /// The id of the batch.
    pub id: u64,
    /// The number of batches that were sent to the worker and have no answer yet.
    pub in_flight: usize,
    /// True if the model's batches pause for batches of other models.
    pub pauses: bool,
}

impl<K: Ord + Clone, T: Ticket> Scheduler<K, T> {
    /// Adds a lane. The lane gets no batches before [`route`](Self::route).
    pub fn attach(&mut self, mut lane: Lane<K, T>) {
        lane.streams.limits = self.streams;
        self.lanes.push(lane);
    }

    /// Removes a lane. Before this call, the driver must [take back](Self::take_back) its requests.
    pub fn detach(&mut self, worker: WorkerId) {
        self.lanes.retain(|lane| lane.worker != worker);
    }

    /// Sends all further batches to this worker, or to no worker if `worker` is `None`. The lane that
    /// served until now finishes its batches.
    pub fn route(&mut self, worker: Option<WorkerId>) {
        for lane in &mut self.lanes {
            if Some(lane.worker) == worker {
                if lane.duty != Duty::Serving {
                    self.traffic.forget_batches();
                    lane.answered = false;
                }
                lane.duty = Duty::Serving;
            } else if lane.duty == Duty::Serving {
                lane.duty = Duty::Idle;
            }
        }
    }

    /// Runs all later batches of `worker` on other SMs.
    pub fn move_to(&mut self, worker: WorkerId, slice: &Slice) {
        let Some(lane) = self.lane_mut(worker) else { return };
        lane.move_to(slice);
        if lane.duty == Duty::Serving {
            self.traffic.forget_batches();
        }
    }

    /// Records the state of a worker's weights.
    pub fn set_weights(&mut self, worker: WorkerId, weights: LaneWeights) {
        if let Some(lane) = self.lane_mut(worker) {
            lane.weights = weights;
        }
    }

    /// Stops sending batches to `worker`. Returns true if its lane is already empty. Otherwise
    /// [`Scheduler::recycle`] or [`Scheduler::close_stream`] reports later that the lane is empty.
    pub fn drain(&mut self, worker: WorkerId) -> bool {
        let Some(lane) = self.lane_mut(worker) else { return false };
        lane.duty = if lane.is_empty() { Duty::Idle } else { Duty::Draining };
        lane.is_empty()
    }

    /// Stops sending batches to `worker`. Returns true if the worker was serving.
    pub fn stop_sending(&mut self, worker: WorkerId) -> bool {
        let before = self.lane_mut(worker).map(|lane| std::mem::replace(&mut lane.duty, Duty::Idle));
        before == Some(Duty::Serving)
    }

    /// Takes back all requests of a worker's batches. The batches stay on the lane, but their answers
    /// are ignored.
    pub fn take_back(&mut self, worker: WorkerId) -> AbandonedRequests<K, T> {
        let none = AbandonedRequests { executing: Vec::new(), behind: Vec::new() };
        self.lane_mut(worker).map_or(none, Lane::abandon)
    }

    /// Returns the lane of a worker.
    pub fn lane(&self, worker: WorkerId) -> Option<&Lane<K, T>> {
        self.lanes.iter().find(|lane| lane.worker == worker)
    }

    /// Returns the lane that gets all new batches.
    pub fn serving_lane(&self) -> Option<&Lane<K, T>> {
        self.serving().map(|lane| &self.lanes[lane])
    }

    /// Returns true if the model's batches pause for batches of other models.
    pub fn pauses(&self) -> bool {
        self.admission.pauses()
    }

    /// Returns the batch that a worker executes.
    pub fn executing(&self, worker: WorkerId) -> Option<ExecutingBatch> {
        let lane = self.lane(worker)?;
        let front = lane.in_flight.front().filter(|front| front.executing_since.is_some())?;
        Some(ExecutingBatch { id: front.id, in_flight: lane.in_flight.len(), pauses: self.pauses() })
    }

    /// Returns the terms and times of the batch that a worker executes. The slack of a serving worker is at most that of a request
    /// which would arrive now, because a pause delays the queue too.
    pub fn running_batch(&self, worker: WorkerId, now: Timestamp) -> Option<RunningBatch> {
        let lane = self.lane(worker)?;
        let mut batch = lane.running_batch(now)?;
        if lane.duty == Duty::Serving {
            let end = self.admission.predict_end(self.queues.rows() + 1, lane, now);
            batch.slack = batch.slack.min((now + self.slo).since(end));
        }
        Some(batch)
    }

    pub(super) fn lane_mut(&mut self, worker: WorkerId) -> Option<&mut Lane<K, T>> {
        self.lanes.iter_mut().find(|lane| lane.worker == worker)
    }
}
