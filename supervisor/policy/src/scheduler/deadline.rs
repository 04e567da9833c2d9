//! The selection of requests for the next batch if not all of them can be answered in time.
//!
//! A batch with more requests takes longer. Such a batch may end too late for its oldest request, and
//! all requests behind the batch wait longer.
//!
//! * If all requests are in time in one batch, the batch contains all of them.
//! * Otherwise the batch contains as many of the oldest requests as possible, provided that the
//!   remaining requests are still in time in the next batch.
//! * If at least one request will be late in any case, the filter chooses the batch with the most rows
//!   per second. One late request is only one miss, but a slow batch also makes the next requests late.

use std::time::Duration;

use shadowslice_shared::units::Timestamp;

use super::batcher::BatchLimits;
use super::queue::QueuedRequest;
use crate::latency::Predictor;

/// The number of full batches for which the filter considers waiting requests.
const BATCHES: u32 = 2;

/// A filter that selects the requests of a batch by their deadlines.
#[derive(Debug, Clone, Copy)]
pub struct DeadlineFilter<'p> {
    /// The time at which the lane is expected to finish its batches. It is not in the past.
    pub free_at: Timestamp,
    /// True if the lane has no batch. An idle lane always gets a request, even a late one. This delays
    /// no other request, and corrects a prediction that makes every request late.
    pub idle: bool,
    /// The end of the grace period after an outage. Requests that arrived earlier are answered even if
    /// they are late.
    pub forgiven_before: Timestamp,
    /// The mean time from the end of a batch until its clients have received the answers.
    pub write_time: Duration,
    /// The predictor of execution times on the lane.
    pub predictor: &'p Predictor,
}

/// The deadline and the size of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DueRequest {
    /// The time by which the request's batch must end, or `None` if the request never counts as late.
    by: Option<Timestamp>,
    rows: u32,
}

/// A selection from the waiting requests, which stay in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Selection {
    /// The number of requests at the front that are refused.
    pub(crate) late: usize,
    /// The number of requests behind the refused ones that form the batch.
    pub(crate) count: usize,
}

impl DeadlineFilter<'_> {
    /// Returns the waiting requests to consider. They are allowed to share a batch.
    pub(crate) fn due_requests<'e, K: 'e, T: 'e>(
        &self,
        waiting: impl Iterator<Item = &'e QueuedRequest<K, T>>,
        limits: &BatchLimits,
    ) -> Vec<DueRequest> {
        let mut rows = 0_u32;
        let near = waiting.take(limits.max_requests.saturating_mul(BATCHES as usize)).take_while(|entry| {
            let fits = rows == 0 || rows < limits.max_rows.saturating_mul(BATCHES);
            rows = rows.saturating_add(entry.rows);
            fits
        });
        near.map(|entry| self.due_request(entry)).collect()
    }

    pub(crate) fn due_request<K, T>(&self, entry: &QueuedRequest<K, T>) -> DueRequest {
        let by = (entry.arrived >= self.forgiven_before).then_some(entry.deadline - self.write_time);
        DueRequest { by, rows: entry.rows }
    }

    /// Selects the requests for the next batch. The waiting requests should be ordered by deadline. If
    /// requests that were put back break this order, the selection is valid, but may not be the best.
    pub(crate) fn select(&self, waiting: &[DueRequest], limits: &BatchLimits) -> Selection {
        let queue = &WaitingRows::new(waiting, limits);
        let alone = |due: &DueRequest| self.in_time(due, self.predictor.predict(due.rows));
        let Some(first) = waiting.iter().position(alone) else {
            let tried = usize::from(self.idle && !waiting.is_empty());
            return Selection { late: waiting.len() - tried, count: tried };
        };
        let all = queue.max_requests(first);
        let count = if self.meets_deadline(queue, first, all) {
            Some(all)
        } else {
            (1..all).rev().find(|&count| {
                self.meets_deadline(queue, first, count)
                    && self.next_batch_meets_deadline(queue, first, count)
            })
        };
        count.map_or_else(
            || self.with_highest_throughput(queue, first),
            |count| Selection { late: first, count },
        )
    }

    /// Returns true if the first request of a batch is in time. The function returns true for a batch
    /// of one request, because `select` has already checked this request.
    fn meets_deadline(&self, queue: &WaitingRows<'_>, first: usize, count: usize) -> bool {
        count == 1 || self.in_time(&queue.waiting[first], self.predictor.cautious(queue.rows(first, count)))
    }

    /// Returns true if the first request of the next batch is in time. The next batch consists of the
    /// remaining requests.
    fn next_batch_meets_deadline(&self, queue: &WaitingRows<'_>, first: usize, count: usize) -> bool {
        let next = first + count;
        let time = |first, count| self.predictor.cautious(queue.rows(first, count)).unwrap_or_default();
        let both = time(first, count).saturating_add(time(next, queue.max_requests(next)));
        self.in_time(&queue.waiting[next], Some(both))
    }

    /// Returns the selection whose batch has the most rows per second.
    fn with_highest_throughput(&self, queue: &WaitingRows<'_>, first: usize) -> Selection {
        let mut best = Selection { late: first, count: 1 };
        let mut throughput = self.throughput(queue, best);
        for late in first..queue.waiting.len() {
            let mut selection = Selection { late, count: best.count.min(queue.max_requests(late)) };
            while selection.count < queue.max_requests(late)
                && self.meets_deadline(queue, late, selection.count + 1)
            {
                selection.count += 1;
            }
            if selection.count > best.count && self.throughput(queue, selection) > throughput {
                (best, throughput) = (selection, self.throughput(queue, selection));
            }
        }
        best
    }

    /// Returns the throughput of a batch, in rows per second.
    fn throughput(&self, queue: &WaitingRows<'_>, selection: Selection) -> f64 {
        let rows = queue.rows(selection.late, selection.count);
        let time = self.predictor.predict(rows).unwrap_or_default();
        f64::from(rows) / time.as_secs_f64().max(1e-9)
    }

    fn in_time(&self, due: &DueRequest, takes: Option<Duration>) -> bool {
        due.by.is_none_or(|by| self.free_at + takes.unwrap_or_default() <= by)
    }
}

/// The waiting requests and the cumulative sums of their rows.
#[derive(Debug)]
struct WaitingRows<'w> {
    waiting: &'w [DueRequest],
    limits: &'w BatchLimits,
    /// The total rows of the first 0, 1, 2, … requests in `waiting`.
    sums: Vec<u64>,
}

impl<'w> WaitingRows<'w> {
    fn new(waiting: &'w [DueRequest], limits: &'w BatchLimits) -> Self {
        let mut sums = Vec::with_capacity(waiting.len() + 1);
        sums.push(0);
        sums.extend(waiting.iter().scan(0, |rows: &mut u64, due| {
            *rows += u64::from(due.rows);
            Some(*rows)
        }));
        Self { waiting, limits, sums }
    }

    /// Returns the number of requests from index `first` that fit into one batch, at least one.
    fn max_requests(&self, first: usize) -> usize {
        let full = self.sums[first] + u64::from(self.limits.max_rows);
        let fit = self.sums[first + 1..].partition_point(|&sum| sum <= full);
        fit.min(self.limits.max_requests).max(1)
    }

    fn rows(&self, first: usize, count: usize) -> u32 {
        u32::try_from(self.sums[first + count] - self.sums[first]).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{Strategy, any, prop_assert, proptest};
    use shadowslice_shared::profile::{
        Execution, ExecutionRow, ProcessMemory, Profile, ProfileSource, StartTimes,
    };
    use shadowslice_shared::units::Sms;

    use super::*;
    use crate::tenants::TenantId;

    const STARTS: Timestamp = ms(100);
    const LIMITS: BatchLimits = BatchLimits { max_rows: 4, max_requests: 9, max_delay: Duration::ZERO };

    const fn ms(ms: u64) -> Timestamp {
        Timestamp::after_origin(Duration::from_millis(ms))
    }

    /// Returns a predictor for batches that take 10 ms plus 1 ms per row.
    fn predictor() -> Predictor {
        let row = |batch: u32| ExecutionRow { batch, ms: vec![10.0 + f64::from(batch)] };
        let profile = Profile {
            source: ProfileSource::Illustrative,
            memory: ProcessMemory::default(),
            start: StartTimes::default(),
            bandwidth: 0.0,
            shapes: Default::default(),
            execution: Execution::new(vec![Sms(10)], vec![row(1), row(64)]).unwrap(),
        };
        Predictor::new(Some(&profile), Sms(10))
    }

    fn select_from(waiting: &[DueRequest], idle: bool, predictor: &Predictor) -> (usize, usize) {
        let deadline_filter = DeadlineFilter {
            free_at: STARTS,
            idle,
            forgiven_before: ms(0),
            write_time: Duration::ZERO,
            predictor,
        };
        let Selection { late, count } = deadline_filter.select(waiting, &LIMITS);
        (late, count)
    }

    /// Returns the number of late requests and the number of requests in the batch. All requests have
    /// one row.
    fn select(deadlines: &[u64]) -> (usize, usize) {
        let waiting: Vec<DueRequest> =
            deadlines.iter().map(|&by| DueRequest { by: Some(ms(by)), rows: 1 }).collect();
        select_from(&waiting, false, &predictor())
    }

    #[test]
    fn all_go_who_are_in_time_together() {
        assert_eq!(select(&[]), (0, 0));
        assert_eq!(select(&[113, 113, 113]), (0, 3));
        assert_eq!(select(&[114, 120, 130, 140, 150]), (0, 4), "four rows fill a batch");
    }

    #[test]
    fn those_behind_are_waited_for_if_that_makes_nobody_late() {
        assert_eq!(select(&[112, 112, 125]), (0, 2));
        assert_eq!(select(&[111, 125, 125]), (0, 1), "both batches end within 23 ms");
    }

    #[test]
    fn where_somebody_is_late_anyway_those_go_who_are_answered_fastest() {
        assert_eq!(select(&[111, 113, 113]), (1, 2));
        assert_eq!(select(&[112, 113, 113]), (0, 2), "both choices answer two");
        assert_eq!(select(&[111, 114, 114, 114, 114]), (1, 4), "one is late so that four are not");
        assert_eq!(select(&[111, 111, 111]), (0, 1), "all have the same deadline");
    }

    #[test]
    fn who_is_late_even_alone_keeps_nobody_waiting() {
        assert_eq!(select(&[50, 60, 113, 113]), (2, 2));
        assert_eq!(select(&[50, 60, 110]), (3, 0), "nothing helps");
    }

    #[test]
    fn an_idle_lane_tries_the_last_one() {
        let late = |count| vec![DueRequest { by: Some(ms(50)), rows: 1 }; count];
        assert_eq!(select_from(&late(3), true, &predictor()), (2, 1));
        assert_eq!(select_from(&late(0), true, &predictor()), (0, 0));
    }

    #[test]
    fn large_requests_count_by_their_rows() {
        let waiting = |of: &[(u64, u32)]| -> Vec<DueRequest> {
            of.iter().map(|&(by, rows)| DueRequest { by: Some(ms(by)), rows }).collect()
        };
        let select = |of: &[(u64, u32)]| select_from(&waiting(of), false, &predictor());
        assert_eq!(select(&[(114, 3), (140, 1), (140, 1)]), (0, 2), "five do not fit");
        assert_eq!(select(&[(116, 6), (140, 1)]), (0, 1), "a request larger than a batch runs alone");
        assert_eq!(select(&[(113, 4), (113, 2), (113, 1)]), (1, 2), "alone it would be late, too");
    }

    #[test]
    fn requests_that_an_outage_delayed_are_never_late() {
        let entry = |arrived| QueuedRequest {
            shape: (),
            rows: 1,
            arrived: ms(arrived),
            deadline: ms(50),
            expires: None,
            level: 0,
            tenant: TenantId::DEFAULT,
            alone: false,
            item: (),
        };
        let predictor = predictor();
        let deadline_filter = DeadlineFilter {
            free_at: STARTS,
            idle: false,
            forgiven_before: ms(5),
            write_time: Duration::from_millis(2),
            predictor: &predictor,
        };
        let waiting = [entry(4), entry(5)];
        let due_requests = deadline_filter.due_requests(waiting.iter(), &LIMITS);
        assert_eq!(
            due_requests.iter().map(|due| due.by).collect::<Vec<_>>(),
            [None, Some(ms(48))],
            "2 ms to write"
        );
        assert_eq!(deadline_filter.select(&due_requests, &LIMITS), Selection { late: 0, count: 2 });
    }

    #[test]
    fn at_most_two_batches_of_requests_are_examined() {
        let entry = QueuedRequest {
            shape: (),
            rows: 1,
            arrived: ms(0),
            deadline: ms(50),
            expires: None,
            level: 0,
            tenant: TenantId::DEFAULT,
            alone: false,
            item: (),
        };
        let predictor = predictor();
        let deadline_filter = DeadlineFilter {
            free_at: STARTS,
            idle: false,
            forgiven_before: ms(0),
            write_time: Duration::ZERO,
            predictor: &predictor,
        };
        assert_eq!(deadline_filter.due_requests(vec![entry; 100].iter(), &LIMITS).len(), 8);
    }

    #[test]
    fn who_was_surprised_of_late_takes_fewer_along() {
        let mut surprised = predictor();
        for took in [10, 13].repeat(20) {
            surprised.observe(1, Duration::from_millis(took));
        }
        let together = surprised.predict(2).unwrap();
        assert!(surprised.cautious(2).unwrap() > together);
        let by = STARTS + together + Duration::from_micros(500);
        let two =
            [DueRequest { by: Some(by), rows: 1 }, DueRequest { by: Some(STARTS + 4 * together), rows: 1 }];
        assert_eq!(select_from(&two, false, &surprised), (0, 1));
    }

    fn waiting() -> impl Strategy<Value = Vec<DueRequest>> {
        let due = (any::<bool>(), 90..180_u64, 1..6_u32);
        let due = due.prop_map(|(ever, by, rows)| DueRequest { by: ever.then(|| ms(by)), rows });
        proptest::collection::vec(due, 0..12)
    }

    proptest! {
        #[test]
        fn whatever_waits_nobody_goes_who_is_late_and_somebody_leaves(
            mut waiting in waiting(), idle in any::<bool>(), sorted in any::<bool>()
        ) {
            if sorted {
                waiting.sort_by_key(|due| due.by);
            }
            let predictor = predictor();
            let (late, count) = select_from(&waiting, idle, &predictor);
            prop_assert!(late + count <= waiting.len() && (late + count > 0 || waiting.is_empty()));
            prop_assert!(count > 0 || !idle || waiting.is_empty());
            let batch = &waiting[late..late + count];
            let rows: u32 = batch.iter().map(|due| due.rows).sum();
            prop_assert!(count <= 1 || rows <= LIMITS.max_rows);
            let ends = STARTS + predictor.predict(rows).unwrap_or_default();
            let first_in_time = batch.first().is_none_or(|due| due.by.is_none_or(|by| ends <= by));
            prop_assert!(first_in_time || idle && count == 1 && late + count == waiting.len());
        }
    }
}
