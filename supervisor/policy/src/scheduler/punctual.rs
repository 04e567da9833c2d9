//! Which requests go into the next batch, where not all can be answered in time.
//!
//! The more requests go, the longer their batch takes: it may end too late for the oldest of them,
//! and the requests that stay behind wait for all of it. So all go if all are in time. Else as many
//! of the oldest go as leave the others in time for the batch after this one. Where a request is
//! late in any case, the batch with the most rows a second goes: a request lost now is lost once,
//! but a slow batch makes the next ones late, too.

use std::time::Duration;

use shadowslice_shared::units::Timestamp;

use super::batcher::Limits;
use super::queue::Entry;
use crate::latency::Predictor;

/// Full batches that are looked at together.
const BATCHES: u32 = 2;

#[derive(Debug, Clone, Copy)]
pub struct Punctual<'p> {
    /// When the lane should be through with what it has; not in the past.
    pub starts: Timestamp,
    /// The lane has nothing. Then a request goes in any case: to try it delays no other, and
    /// predictions that refuse every request would never be corrected.
    pub idle: bool,
    /// Requests that arrived before this are answered however late.
    pub forgiven: Timestamp,
    /// The mean time from the end of a batch until its clients have their answers.
    pub writing: Duration,
    pub predictor: &'p Predictor,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Due {
    /// The time by which its batch must have ended; `None` if it is never too late.
    by: Option<Timestamp>,
    rows: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pick {
    /// So many requests are refused, from the first,
    pub(crate) late: usize,
    /// and so many after them go.
    pub(crate) go: usize,
}

impl Punctual<'_> {
    /// Those of the waiting requests that are to be looked at; all may share a batch.
    pub(crate) fn dues<'e, K: 'e, T: 'e>(
        &self,
        waiting: impl Iterator<Item = &'e Entry<K, T>>,
        limits: &Limits,
    ) -> Vec<Due> {
        let mut rows = 0_u32;
        let near = waiting.take(limits.max_requests.saturating_mul(BATCHES as usize)).take_while(|entry| {
            let fits = rows == 0 || rows < limits.max_rows.saturating_mul(BATCHES);
            rows = rows.saturating_add(entry.rows);
            fits
        });
        near.map(|entry| self.due(entry)).collect()
    }

    pub(crate) fn due<K, T>(&self, entry: &Entry<K, T>) -> Due {
        let by = (entry.arrived >= self.forgiven).then_some(entry.deadline - self.writing);
        Due { by, rows: entry.rows }
    }

    /// The requests should be by deadline; those that were put back may not be, and then the choice
    /// is only less good.
    pub(crate) fn pick(&self, waiting: &[Due], limits: &Limits) -> Pick {
        let queue = &Line::new(waiting, limits);
        let alone = |due: &Due| self.in_time(due, self.predictor.predict(due.rows));
        let Some(first) = waiting.iter().position(alone) else {
            let tried = usize::from(self.idle && !waiting.is_empty());
            return Pick { late: waiting.len() - tried, go: tried };
        };
        let all = queue.most(first);
        let go = if self.makes_it(queue, first, all) {
            Some(all)
        } else {
            (1..all)
                .rev()
                .find(|&go| self.makes_it(queue, first, go) && self.others_make_it(queue, first, go))
        };
        go.map_or_else(|| self.fastest(queue, first), |go| Pick { late: first, go })
    }

    /// A single request was found to be in time.
    fn makes_it(&self, queue: &Line<'_>, first: usize, go: usize) -> bool {
        go == 1 || self.in_time(&queue.waiting[first], self.predictor.cautious(queue.rows(first, go)))
    }

    /// Whether the next batch, of those left behind, is in time after this one.
    fn others_make_it(&self, queue: &Line<'_>, first: usize, go: usize) -> bool {
        let next = first + go;
        let time = |first, go| self.predictor.cautious(queue.rows(first, go)).unwrap_or_default();
        let both = time(first, go).saturating_add(time(next, queue.most(next)));
        self.in_time(&queue.waiting[next], Some(both))
    }

    /// The most rows a second.
    fn fastest(&self, queue: &Line<'_>, first: usize) -> Pick {
        let mut best = Pick { late: first, go: 1 };
        let mut pace = self.pace(queue, best);
        for late in first..queue.waiting.len() {
            let mut pick = Pick { late, go: best.go.min(queue.most(late)) };
            while pick.go < queue.most(late) && self.makes_it(queue, late, pick.go + 1) {
                pick.go += 1;
            }
            if pick.go > best.go && self.pace(queue, pick) > pace {
                (best, pace) = (pick, self.pace(queue, pick));
            }
        }
        best
    }

    /// Rows a second.
    fn pace(&self, queue: &Line<'_>, pick: Pick) -> f64 {
        let rows = queue.rows(pick.late, pick.go);
        let time = self.predictor.predict(rows).unwrap_or_default();
        f64::from(rows) / time.as_secs_f64().max(1e-9)
    }

    fn in_time(&self, due: &Due, takes: Option<Duration>) -> bool {
        due.by.is_none_or(|by| self.starts + takes.unwrap_or_default() <= by)
    }
}

#[derive(Debug)]
struct Line<'w> {
    waiting: &'w [Due],
    limits: &'w Limits,
    /// The rows of the first none, one, two and so on of `waiting`.
    sums: Vec<u64>,
}

impl<'w> Line<'w> {
    fn new(waiting: &'w [Due], limits: &'w Limits) -> Self {
        let mut sums = Vec::with_capacity(waiting.len() + 1);
        sums.push(0);
        sums.extend(waiting.iter().scan(0, |rows: &mut u64, due| {
            *rows += u64::from(due.rows);
            Some(*rows)
        }));
        Self { waiting, limits, sums }
    }

    /// Requests that one batch holds from there on; at least one.
    fn most(&self, first: usize) -> usize {
        let full = self.sums[first] + u64::from(self.limits.max_rows);
        let fit = self.sums[first + 1..].partition_point(|&sum| sum <= full);
        fit.min(self.limits.max_requests).max(1)
    }

    fn rows(&self, first: usize, go: usize) -> u32 {
        u32::try_from(self.sums[first + go] - self.sums[first]).unwrap_or(u32::MAX)
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

    const STARTS: Timestamp = ms(100);
    const LIMITS: Limits = Limits { max_rows: 4, max_requests: 9, max_delay: Duration::ZERO };

    const fn ms(ms: u64) -> Timestamp {
        Timestamp::after_origin(Duration::from_millis(ms))
    }

    /// 10 ms, and 1 ms more for each row.
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

    fn pick_of(waiting: &[Due], idle: bool, predictor: &Predictor) -> (usize, usize) {
        let punctual = Punctual { starts: STARTS, idle, forgiven: ms(0), writing: Duration::ZERO, predictor };
        let Pick { late, go } = punctual.pick(waiting, &LIMITS);
        (late, go)
    }

    /// How many are late and how many go, of requests of one row with these deadlines.
    fn pick(deadlines: &[u64]) -> (usize, usize) {
        let waiting: Vec<Due> = deadlines.iter().map(|&by| Due { by: Some(ms(by)), rows: 1 }).collect();
        pick_of(&waiting, false, &predictor())
    }

    #[test]
    fn all_go_who_are_in_time_together() {
        assert_eq!(pick(&[]), (0, 0));
        assert_eq!(pick(&[113, 113, 113]), (0, 3));
        assert_eq!(pick(&[114, 120, 130, 140, 150]), (0, 4), "a batch holds no more");
    }

    #[test]
    fn those_behind_are_waited_for_if_that_makes_nobody_late() {
        assert_eq!(pick(&[112, 112, 125]), (0, 2));
        assert_eq!(pick(&[111, 125, 125]), (0, 1), "23 ms later they are through, too");
    }

    #[test]
    fn where_somebody_is_late_anyway_those_go_who_are_answered_fastest() {
        assert_eq!(pick(&[111, 113, 113]), (1, 2));
        assert_eq!(pick(&[112, 113, 113]), (0, 2), "two of them in either way");
        assert_eq!(pick(&[111, 114, 114, 114, 114]), (1, 4), "one is given up for four");
        assert_eq!(pick(&[111, 111, 111]), (0, 1), "they are all the same");
    }

    #[test]
    fn who_is_late_even_alone_keeps_nobody_waiting() {
        assert_eq!(pick(&[50, 60, 113, 113]), (2, 2));
        assert_eq!(pick(&[50, 60, 110]), (3, 0), "nothing helps");
    }

    #[test]
    fn an_idle_lane_tries_the_last_one() {
        let late = |count| vec![Due { by: Some(ms(50)), rows: 1 }; count];
        assert_eq!(pick_of(&late(3), true, &predictor()), (2, 1));
        assert_eq!(pick_of(&late(0), true, &predictor()), (0, 0));
    }

    #[test]
    fn large_requests_count_by_their_rows() {
        let waiting = |of: &[(u64, u32)]| -> Vec<Due> {
            of.iter().map(|&(by, rows)| Due { by: Some(ms(by)), rows }).collect()
        };
        let pick = |of: &[(u64, u32)]| pick_of(&waiting(of), false, &predictor());
        assert_eq!(pick(&[(114, 3), (140, 1), (140, 1)]), (0, 2), "five do not fit");
        assert_eq!(pick(&[(116, 6), (140, 1)]), (0, 1), "one that is larger than a batch goes by itself");
        assert_eq!(pick(&[(113, 4), (113, 2), (113, 1)]), (1, 2), "alone it would be late, too");
    }

    #[test]
    fn whom_an_outage_delayed_is_never_late() {
        let entry = |arrived| Entry {
            shape: (),
            rows: 1,
            arrived: ms(arrived),
            deadline: ms(50),
            level: 0,
            alone: false,
            item: (),
        };
        let predictor = predictor();
        let punctual = Punctual {
            starts: STARTS,
            idle: false,
            forgiven: ms(5),
            writing: Duration::from_millis(2),
            predictor: &predictor,
        };
        let waiting = [entry(4), entry(5)];
        let dues = punctual.dues(waiting.iter(), &LIMITS);
        assert_eq!(dues.iter().map(|due| due.by).collect::<Vec<_>>(), [None, Some(ms(48))], "2 ms to write");
        assert_eq!(punctual.pick(&dues, &LIMITS), Pick { late: 0, go: 2 });
    }

    #[test]
    fn no_more_is_looked_at_than_two_batches() {
        let entry =
            Entry { shape: (), rows: 1, arrived: ms(0), deadline: ms(50), level: 0, alone: false, item: () };
        let predictor = predictor();
        let punctual = Punctual {
            starts: STARTS,
            idle: false,
            forgiven: ms(0),
            writing: Duration::ZERO,
            predictor: &predictor,
        };
        assert_eq!(punctual.dues(vec![entry; 100].iter(), &LIMITS).len(), 8);
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
        let two = [Due { by: Some(by), rows: 1 }, Due { by: Some(STARTS + 4 * together), rows: 1 }];
        assert_eq!(pick_of(&two, false, &surprised), (0, 1));
    }

    fn waiting() -> impl Strategy<Value = Vec<Due>> {
        let due = (any::<bool>(), 90..180_u64, 1..6_u32);
        let due = due.prop_map(|(ever, by, rows)| Due { by: ever.then(|| ms(by)), rows });
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
            let (late, go) = pick_of(&waiting, idle, &predictor);
            prop_assert!(late + go <= waiting.len() && (late + go > 0 || waiting.is_empty()));
            prop_assert!(go > 0 || !idle || waiting.is_empty());
            let batch = &waiting[late..late + go];
            let rows: u32 = batch.iter().map(|due| due.rows).sum();
            prop_assert!(go <= 1 || rows <= LIMITS.max_rows);
            let ends = STARTS + predictor.predict(rows).unwrap_or_default();
            let first_in_time = batch.first().is_none_or(|due| due.by.is_none_or(|by| ends <= by));
            prop_assert!(first_in_time || idle && go == 1 && late + go == waiting.len());
        }
    }
}
