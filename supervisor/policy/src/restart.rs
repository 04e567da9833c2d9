//! The delay before the supervisor replaces a failed worker, and the number of failures after which the
//! model refuses requests in the meantime.

use std::time::Duration;

use crate::backoff::Backoff;

/// The delay after the first failure. It prevents a worker that dies immediately from keeping the host
/// busy. The delay hardly affects clients, because the start of a worker takes much longer.
const MIN_BACKOFF: Duration = Duration::from_millis(10);

/// The maximum delay. It is short enough for a model to recover soon after the cause of the failures is
/// gone. It is long enough that the failed starts hardly slow down other models.
const MAX_BACKOFF: Duration = Duration::from_secs(30);

/// The number of consecutive failures, without an answer between them, after which the model is unready
/// until a worker is warm. By then, the model has had seven restarts and 1.3 s of back-off. Most
/// temporary faults of a host are over after this time.
const MAX_FAILURES: u32 = 8;

/// The number of consecutive requests that are proved to kill their workers, without an answer between
/// them. From this number on, the deaths count as faults of the model instead of the requests.
const MAX_POISONOUS: u32 = 8;

/// The time after which an idle worker counts as stable. If the worker dies later, neither its start
/// nor its work was the cause.
pub const STABLE_AFTER: Duration = Duration::from_secs(10);

/// The decision about the next start after a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retry {
    /// The delay before the next worker starts.
    pub after: Duration,
    /// The number of consecutive failures if the model is unready. If requests still wait for the next
    /// worker, this is `None`.
    pub unready: Option<u32>,
}

/// The failures of a model's workers since the last answer to a batch.
#[derive(Debug, Clone)]
pub struct Restarts {
    failures: u32,
    backoff: Backoff,
    /// The number of consecutive requests that are proved to kill their workers.
    poisonous: u32,
}

impl Default for Restarts {
    fn default() -> Self {
        Self::new()
    }
}

impl Restarts {
    /// Creates the state of a model without failures.
    pub fn new() -> Self {
        Self { failures: 0, backoff: Backoff::new(MIN_BACKOFF, MAX_BACKOFF), poisonous: 0 }
    }

    /// Records that a worker died or failed to start. Returns the delay before the next start. The
    /// delay doubles with each failure.
    pub fn record_failure(&mut self) -> Retry {
        self.failures = self.failures.saturating_add(1);
        Retry {
            after: self.backoff.record_failure(),
            unready: Some(self.failures).filter(|&failures| failures >= MAX_FAILURES),
        }
    }

    /// Records the exit of a worker that had been idle for `ready`. Call this before
    /// [`Restarts::record_failure`]. If `ready` is at least [`STABLE_AFTER`], earlier failures no
    /// longer count. Otherwise rare faults would add up in a model that gets no requests.
    pub fn record_idle_exit(&mut self, ready: Duration) {
        if ready >= STABLE_AFTER {
            self.forget_failures();
        }
    }

    /// Returns the number of consecutive failures.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// Records that a worker answered a batch, which means that the cause of earlier failures is gone.
    pub fn record_answer(&mut self) {
        self.reset();
    }

    /// Forgets all failures, because an operator restarts the model or its share changes.
    pub fn reset(&mut self) {
        *self = Self::new();
    }

    /// Records that a request is proved to kill its workers. The deaths of these workers then count
    /// against the request instead of the model, unless there are too many requests of this kind.
    pub fn record_poison(&mut self) {
        self.poisonous = self.poisonous.saturating_add(1);
        if self.poisonous < MAX_POISONOUS {
            self.forget_failures();
        }
    }

    fn forget_failures(&mut self) {
        self.failures = 0;
        self.backoff.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fail(restarts: &mut Restarts, times: u32) -> Vec<u128> {
        (0..times).map(|_| restarts.record_failure().after.as_millis()).collect()
    }

    #[test]
    fn the_pause_doubles_up_to_30_s_and_the_eighth_failure_in_a_row_makes_the_model_unready() {
        let mut restarts = Restarts::new();
        for ms in [10, 20, 40, 80, 160, 320, 640] {
            assert_eq!(restarts.record_failure(), Retry { after: Duration::from_millis(ms), unready: None });
        }
        for (failures, ms) in (8..).zip([1280, 2560, 5120, 10_240, 20_480, 30_000, 30_000]) {
            let retry = Retry { after: Duration::from_millis(ms), unready: Some(failures) };
            assert_eq!(restarts.record_failure(), retry);
        }
        assert_eq!(fail(&mut restarts, 100).last(), Some(&30_000));
    }

    #[test]
    fn accidents_far_apart_do_not_add_up() {
        let mut restarts = Restarts::new();
        for _ in 0..MAX_FAILURES {
            restarts.record_idle_exit(STABLE_AFTER);
            assert_eq!(fail(&mut restarts, 1), [10]);
        }
        restarts.record_idle_exit(STABLE_AFTER - Duration::from_millis(1));
        assert_eq!(fail(&mut restarts, 1), [20]);
    }

    #[test]
    fn an_answer_resets_the_back_off() {
        let mut restarts = Restarts::new();
        fail(&mut restarts, 20);
        restarts.record_answer();
        assert_eq!(restarts.record_failure(), Retry { after: MIN_BACKOFF, unready: None });
    }

    #[test]
    fn requests_that_kill_workers_are_to_blame_until_there_are_too_many_of_them() {
        let mut restarts = Restarts::new();
        let killed_by_one = |restarts: &mut Restarts| {
            let pauses = fail(restarts, 3);
            restarts.record_poison();
            pauses
        };
        let first = killed_by_one(&mut restarts);
        for _ in 2..=MAX_POISONOUS {
            assert_eq!(killed_by_one(&mut restarts), first);
        }
        assert_ne!(killed_by_one(&mut restarts), first, "the model is the cause");
        restarts.record_answer();
        assert_eq!(killed_by_one(&mut restarts), first, "an answer between them clears the model");
    }
}
