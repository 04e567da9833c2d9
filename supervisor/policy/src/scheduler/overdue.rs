//! Methods of the scheduler about requests whose deadline passes while they wait.

use std::time::Duration;

use shadowslice_shared::units::Timestamp;

use super::Scheduler;
use super::messages::{NextAction, RefusalReason, RefusedRequest, SchedulerWait, Ticket};

/// The time after its deadline at which a request that waits for room is refused.
const OVERDUE_DELAY: Duration = Duration::from_micros(100);

impl<K: Ord + Clone, T: Ticket> Scheduler<K, T> {
    /// Returns the earliest deadline of the queued requests, or `None` if the queue is empty.
    pub fn earliest_deadline(&self) -> Option<Timestamp> {
        self.queues.earliest_deadline()
    }

    /// Returns whether requests may be refused when their deadline has passed.
    pub fn refuses_overdue(&self) -> bool {
        self.overload.is_some()
    }

    /// Waits until a stream ends and makes room for another one. Refuses the requests whose deadline has
    /// passed in the meantime.
    pub(super) fn wait_for_room(&mut self, now: Timestamp) -> NextAction<K, T> {
        // Requests that an outage delayed are forgiven, as with admission control.
        let refuses = self.refuses_overdue() && !self.admission.forgives(now);
        let Some(deadline) = self.earliest_deadline().filter(|_| refuses) else {
            return NextAction::Wait(SchedulerWait::Idle);
        };
        if deadline >= now {
            return NextAction::Wait(SchedulerWait::Until(deadline + OVERDUE_DELAY));
        }
        NextAction::Act(self.take_overdue(RefusalReason::Overdue, now), None)
    }

    /// Removes and returns the queued requests whose deadline has passed, to refuse them for this reason.
    /// Does nothing if the configuration does not refuse late requests.
    pub fn take_overdue(&mut self, why: RefusalReason, now: Timestamp) -> Vec<RefusedRequest<K, T>> {
        if !self.refuses_overdue() {
            return Vec::new();
        }
        let overdue = self.queues.take_if(|request| request.deadline < now);
        let refused = overdue.into_iter().filter(|request| !request.item.is_settled());
        refused.map(|request| RefusedRequest { request, why }).collect()
    }
}
