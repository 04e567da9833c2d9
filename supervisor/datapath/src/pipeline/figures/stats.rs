//! The counts and totals of one model that its recorder of requests does not contain.

use std::time::Duration;

use shadowslice_policy::scheduler::TrafficCounts;

use super::counts::{CountedRefusal, RefusalCounts, RequestCounts};
use super::totals::Totals;
use crate::pipeline::sleep::SleepCounts;

#[derive(Debug, Default)]
pub(crate) struct Stats {
    pub(crate) accepted: u64,
    pub(crate) invalid: u64,
    pub(crate) retried: u64,
    pub(crate) refused: RefusalCounts,
    pub(crate) totals: Totals,
    pub(crate) sleep: SleepCounts,
}

impl Stats {
    pub(crate) fn add_refusal(&mut self, why: CountedRefusal) {
        self.refused.add(why);
        if why == CountedRefusal::TooLarge {
            self.invalid += 1;
        }
    }

    /// Counts an accepted request that is invalid. The SLO does not apply to such a request.
    pub(crate) fn count_invalid(&mut self, waited: Duration) {
        self.invalid += 1;
        self.totals.fail.add(waited);
    }

    /// Returns the counts since the start, where `traffic` are the recorder's counts.
    pub(crate) fn counts(&self, traffic: TrafficCounts) -> RequestCounts {
        let &Self { accepted, invalid, retried, refused, .. } = self;
        RequestCounts {
            accepted,
            succeeded: traffic.answered,
            within_slo: traffic.in_time,
            failed: traffic.failed,
            rejected: traffic.refused,
            invalid,
            refused,
            retried,
            cancelled: traffic.cancelled,
            cancelled_late: traffic.cancelled_late,
        }
    }
}
