//! Counts a model's requests by the way in which they ended. The metrics and the status show these
//! counts.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use shadowslice_policy::scheduler::Unanswered;

/// The reason why a request was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CountedRefusal {
    NotReady,
    QueueFull,
    MemoryFull,
    /// The request is larger than the model's request memory.
    TooLarge,
    /// The request cannot be answered in time, or its deadline has passed.
    Late,
    /// The request has inputs that are known to kill workers.
    Quarantined,
    /// The requests of all models reached the limit `limits.in_flight`.
    HostFull,
    /// The request exceeds a limit of its tenant.
    TenantLimit,
}

impl CountedRefusal {
    const NAMES: [&'static str; 8] = [
        "not_ready",
        "queue_full",
        "memory_full",
        "too_large",
        "late",
        "quarantined",
        "host_full",
        "tenant_limit",
    ];

    pub(crate) fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// Returns how the request ended. Returns `None` for an invalid request.
    pub(crate) fn unanswered(self) -> Option<Unanswered> {
        match self {
            Self::TooLarge => None,
            Self::QueueFull | Self::MemoryFull | Self::Late => Some(Unanswered::Overloaded),
            Self::NotReady | Self::Quarantined | Self::HostFull | Self::TenantLimit => {
                Some(Unanswered::Refused)
            }
        }
    }
}

/// The number of requests since the start, by the way in which they ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RequestCounts {
    /// The number of requests that were accepted into the queue.
    pub accepted: u64,
    pub succeeded: u64,
    /// The number of answers [in time](shadowslice_policy::scheduler::is_in_time).
    pub within_slo: u64,
    /// The number of accepted requests that were answered with an error.
    pub failed: u64,
    /// The number of requests that were refused, either on arrival or in the queue.
    pub rejected: u64,
    /// The number of invalid requests, for example malformed requests, requests whose input the
    /// engine rejected, and requests that are larger than the model's request memory.
    #[serde(default)]
    pub invalid: u64,
    /// The number of refused requests for each reason.
    pub refused: RefusalCounts,
    /// The number of times that requests were put back into the queue. Requests are put back when
    /// their worker dies, when a hand-over times out, and when their batch fails and each of them
    /// must run alone.
    pub retried: u64,
    /// The number of requests that clients cancelled before they were answered.
    pub cancelled: u64,
    /// The number of these requests that were cancelled after the SLO had passed.
    #[serde(default)]
    pub cancelled_late: u64,
}

/// The number of refused requests for each [`CountedRefusal`]. It is serialized as a map from the
/// reasons' names to the numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(from = "BTreeMap<String, u64>", into = "BTreeMap<String, u64>")]
pub struct RefusalCounts([u64; CountedRefusal::NAMES.len()]);

impl RefusalCounts {
    pub(super) fn add(&mut self, why: CountedRefusal) {
        self.0[why as usize] += 1;
    }

    fn since(&self, earlier: &Self) -> Option<Self> {
        let mut grown = [0; CountedRefusal::NAMES.len()];
        for (grown, (now, before)) in grown.iter_mut().zip(self.0.iter().zip(earlier.0)) {
            *grown = now.checked_sub(before)?;
        }
        Some(Self(grown))
    }

    /// Returns the name and the count of each reason, including zero counts.
    pub fn by_reason(&self) -> impl Iterator<Item = (&'static str, u64)> {
        CountedRefusal::NAMES.into_iter().zip(self.0)
    }
}

impl RequestCounts {
    /// Returns the difference between these counts and `earlier`. Returns `None` if the counts were
    /// reset in between, for example because the model was replaced.
    pub fn since(&self, earlier: &Self) -> Option<Self> {
        Some(Self {
            accepted: self.accepted.checked_sub(earlier.accepted)?,
            succeeded: self.succeeded.checked_sub(earlier.succeeded)?,
            within_slo: self.within_slo.checked_sub(earlier.within_slo)?,
            failed: self.failed.checked_sub(earlier.failed)?,
            rejected: self.rejected.checked_sub(earlier.rejected)?,
            invalid: self.invalid.checked_sub(earlier.invalid)?,
            refused: self.refused.since(&earlier.refused)?,
            retried: self.retried.checked_sub(earlier.retried)?,
            cancelled: self.cancelled.checked_sub(earlier.cancelled)?,
            cancelled_late: self.cancelled_late.checked_sub(earlier.cancelled_late)?,
        })
    }
}

impl From<BTreeMap<String, u64>> for RefusalCounts {
    fn from(counts: BTreeMap<String, u64>) -> Self {
        Self(CountedRefusal::NAMES.map(|name| counts.get(name).copied().unwrap_or(0)))
    }
}

impl From<RefusalCounts> for BTreeMap<String, u64> {
    fn from(refused: RefusalCounts) -> Self {
        refused.by_reason().map(|(name, count)| (name.to_owned(), count)).collect()
    }
}

#[cfg(test)]
mod tests {
    use shadowslice_policy::scheduler::TrafficCounts;

    use super::super::stats::Stats;
    use super::*;

    #[test]
    fn counts_since_a_time_are_the_difference_unless_they_were_reset() {
        let mut before = RequestCounts { accepted: 3, succeeded: 2, ..RequestCounts::default() };
        before.refused.add(CountedRefusal::Late);
        let mut now = RequestCounts { accepted: 7, within_slo: 1, rejected: 2, ..before };
        now.refused.add(CountedRefusal::Late);
        now.refused.add(CountedRefusal::QueueFull);
        let since = now.since(&before).unwrap();
        assert_eq!((since.accepted, since.succeeded, since.within_slo, since.rejected), (4, 0, 1, 2));
        let reasons: Vec<_> = since.refused.by_reason().filter(|(_, count)| *count > 0).collect();
        assert_eq!(reasons, [("queue_full", 1), ("late", 1)]);
        assert_eq!(before.since(&now), None);
        assert_eq!(
            RequestCounts { refused: RefusalCounts::default(), ..now }.since(&before),
            None,
            "of any of them"
        );
    }

    #[test]
    fn each_reason_is_serialized_by_its_name_and_read_back() {
        let mut stats = Stats { accepted: 3, ..Stats::default() };
        for (times, why) in
            [(1, CountedRefusal::NotReady), (2, CountedRefusal::TooLarge), (3, CountedRefusal::Late)]
        {
            (0..times).for_each(|_| stats.add_refusal(why));
        }
        let counts = stats.counts(TrafficCounts { refused: 4, ..TrafficCounts::default() });
        let json = serde_json::to_value(counts).unwrap();
        let refused = serde_json::json!({
            "not_ready": 1, "queue_full": 0, "memory_full": 0, "too_large": 2, "late": 3, "quarantined": 0, "host_full": 0,
            "tenant_limit": 0
        });
        assert_eq!(
            (&json["accepted"], &json["rejected"], &json["invalid"], &json["refused"]),
            (&3.into(), &4.into(), &2.into(), &refused)
        );
        assert_eq!(serde_json::from_value::<RequestCounts>(json).unwrap(), counts);
    }
}
