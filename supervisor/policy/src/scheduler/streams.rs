//! Methods of the scheduler about open streams.

use shadowslice_shared::ids::WorkerId;

use super::Scheduler;
use super::messages::Ticket;
use super::queue::QueuedRequest;

impl<K: Ord + Clone, T: Ticket> Scheduler<K, T> {
    /// Records that a stream opened: its first answer has arrived, and more answers follow.
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
}
