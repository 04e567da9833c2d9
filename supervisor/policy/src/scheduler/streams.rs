//! The open streams of a lane, and the scheduler's methods about them. A stream is a request that gets
//! several answers, one after the other.

use std::collections::VecDeque;
use std::time::Duration;

use shadowslice_shared::batch::StreamLimits;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Timestamp;

use super::Scheduler;
use super::messages::Ticket;
use super::queue::QueuedRequest;
use super::traffic::TrafficRecorder;

/// The weight of a new observation in the mean time to open a stream.
const START_WEIGHT: f64 = 0.125;

/// The part of the time between a step and the SLO of the next answer that starts may use. The other
/// part is for the variation of both times.
const START_PART: f64 = 0.5;

/// The streams of one lane.
#[derive(Debug)]
pub(super) struct LaneStreams<K, T> {
    /// The limits, or `None` if the model gives one answer per request.
    pub(super) limits: Option<StreamLimits>,
    /// The number of open streams, including streams whose client is still reading the last answer.
    pub(super) open: u32,
    /// The requests for the next answers of streams.
    pub(super) steps: VecDeque<QueuedRequest<K, T>>,
    /// True if the worker can no longer answer.
    pub(super) cut: bool,
    /// The mean time to open a stream, if streams advance together.
    start_time: Option<Duration>,
    /// The predicted time of the starts since the last step.
    started: Duration,
    /// The slot of the last step, until its answers have been copied and its streams can continue.
    step_slot: Option<u8>,
}

impl<K, T> Default for LaneStreams<K, T> {
    fn default() -> Self {
        let (start_time, started) = (None, Duration::ZERO);
        let (limits, step_slot) = (None, None);
        Self { limits, open: 0, steps: VecDeque::new(), cut: false, start_time, started, step_slot }
    }
}

impl<K, T> LaneStreams<K, T> {
    /// Returns true if one step can advance several streams.
    pub(super) fn advance_together(&self) -> bool {
        self.limits.is_some_and(|limits| limits.per_step > 1)
    }

    pub(super) fn start_time(&self) -> Duration {
        self.start_time.unwrap_or(Duration::ZERO)
    }

    /// Updates the mean time to open a stream.
    pub(super) fn observe_start(&mut self, took: Duration) {
        let mean = self.start_time.unwrap_or(took).as_secs_f64();
        self.start_time = Some(Duration::from_secs_f64(mean + START_WEIGHT * (took.as_secs_f64() - mean)));
    }

    /// Returns true if streams advance together and a step is under way. The next step waits for it, so
    /// that it contains all streams again.
    pub(super) fn is_stepping(&self) -> bool {
        self.advance_together() && self.step_slot.is_some()
    }

    /// Records that a slot is free again.
    pub(super) fn record_recycled(&mut self, slot: u8) {
        self.step_slot.take_if(|stepped| *stepped == slot);
    }

    /// Records that a batch was sent.
    pub(super) fn record_sent(&mut self, slot: u8, is_step: bool) {
        if is_step {
            self.step_slot = Some(slot);
        }
        self.started = if is_step { Duration::ZERO } else { self.started.saturating_add(self.start_time()) };
    }

    /// Returns true if another start may precede the next step. Without an SLO for the next answer,
    /// starts may take as long as the step.
    pub(super) fn has_time_to_start(&self, step_time: Duration, next_slo: Option<Duration>) -> bool {
        let time = next_slo.map_or(step_time, |slo| slo.saturating_sub(step_time).mul_f64(START_PART));
        self.start_time.is_some() && self.started.saturating_add(self.start_time()) <= time
    }

    /// Removes and returns the requests that the next step answers.
    pub(super) fn take_steps(&mut self) -> Vec<QueuedRequest<K, T>>
    where
        T: Ticket,
    {
        self.steps.retain(|step| !step.item.is_settled());
        let most = self.limits.map_or(1, |limits| limits.per_step as usize);
        let together = self.steps.iter().take(most).take_while(|step| !step.alone).count();
        let count = together.max(1).min(self.steps.len());
        self.steps.drain(..count).collect()
    }
}

impl<K: Ord + Clone, T: Ticket> Scheduler<K, T> {
    /// Records that a stream opened.
    pub fn open_stream(&mut self, worker: WorkerId) {
        if let Some(lane) = self.lane_mut(worker) {
            lane.streams.open += 1;
        }
    }

    /// Queues the request for the next answer of a stream. Returns the request if the stream's worker
    /// can no longer answer.
    pub fn queue_step(
        &mut self,
        worker: WorkerId,
        step: QueuedRequest<K, T>,
    ) -> Result<(), QueuedRequest<K, T>> {
        match self.lane_mut(worker).filter(|lane| !lane.streams.cut) {
            Some(lane) => {
                lane.streams.steps.push_back(step);
                Ok(())
            }
            None => Err(step),
        }
    }

    /// Records that a stream ended. Returns true if a draining lane is now empty.
    pub fn close_stream(&mut self, worker: WorkerId) -> bool {
        let Some(lane) = self.lane_mut(worker) else { return false };
        lane.streams.open = lane.streams.open.saturating_sub(1);
        lane.ends_draining()
    }

    /// Returns the time within which the next answer of a stream is due.
    pub fn gap_slo(&self) -> Duration {
        self.next_slo.unwrap_or(self.slo)
    }

    /// Returns the number of open streams of all workers.
    pub fn open_streams(&self) -> u32 {
        self.lanes.iter().map(|lane| lane.streams.open).sum()
    }

    /// Records the time from the request for the next answer of a stream until the answer.
    pub fn record_gap(&mut self, gap: Duration, now: Timestamp) {
        self.gaps.record_arrival(1);
        self.gaps.record_answer(gap, self.gap_slo(), now);
    }

    /// Returns the recorder of the times between the answers of streams.
    pub fn gaps(&mut self) -> &mut TrafficRecorder {
        &mut self.gaps
    }
}
