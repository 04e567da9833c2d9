//! When a worker that failed is started again, and when its model refuses requests meanwhile.

use std::time::Duration;

/// Long enough that a worker that dies at once does not keep the host busy, short enough that a
/// client hardly notices a single death beside the start itself.
const MIN_BACKOFF: Duration = Duration::from_millis(10);

/// Short enough that a model is back soon after its cause is gone, long enough that starts in vain
/// cost its neighbours little.
const MAX_BACKOFF: Duration = Duration::from_secs(30);

/// In a row, with nothing served between them; then the model is unready until a worker is warm. By
/// then (1.3 s of back-off and seven starts) most accidents of a host are over.
const MAX_FAILURES: u32 = 8;

/// If so many requests in a row kill their workers, and none is answered between them, the cause is
/// the model and not the requests.
const MAX_POISONOUS: u32 = 8;

/// A worker that was ready for so long without work died neither of its start nor of its work.
pub const STABLE_AFTER: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retry {
    pub after: Duration,
    /// Workers that failed in a row, if they are so many that requests do not wait for the next.
    pub unready: Option<u32>,
}

/// Since one of the model's workers served.
#[derive(Debug, Clone, Default)]
pub struct Restarts {
    failures: u32,
    /// Requests in a row that were proved to kill their workers.
    poisonous: u32,
}

impl Restarts {
    pub fn new() -> Self {
        Self::default()
    }

    /// A worker died, or could not be started. The pause doubles with each.
    pub fn record_failure(&mut self) -> Retry {
        let doublings = self.failures.min(MAX_BACKOFF.as_millis().ilog2());
        self.failures = self.failures.saturating_add(1);
        Retry {
            after: (MIN_BACKOFF * (1 << doublings)).min(MAX_BACKOFF),
            unready: Some(self.failures).filter(|&failures| failures >= MAX_FAILURES),
        }
    }

    /// A worker that was `ready` for so long without work is about to be counted as dead. If that
    /// is long, what killed earlier workers is over: rare accidents must not add up because no
    /// client asks the model.
    pub fn record_idle_exit(&mut self, ready: Duration) {
        if ready >= STABLE_AFTER {
            self.failures = 0;
        }
    }

    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// A batch was answered: what killed earlier workers is over.
    pub fn record_answer(&mut self) {
        self.reset();
    }

    /// An operator tries the model again, or the model has another share.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    /// A request was proved to kill its workers. Their deaths count against the request and not
    /// against the model, unless there are too many such requests.
    pub fn record_poison(&mut self) {
        self.poisonous = self.poisonous.saturating_add(1);
        if self.poisonous < MAX_POISONOUS {
            self.failures = 0;
        }
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
    fn a_model_that_has_served_starts_afresh() {
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
        assert_ne!(killed_by_one(&mut restarts), first, "it is the model");
        restarts.record_answer();
        assert_eq!(killed_by_one(&mut restarts), first, "an answer between them says that it is not");
    }
}
