//! The occupancy of a GPU by all models that share it. A batch may take longer if other batches
//! execute at the same time. In that case, more time passes before the batch counts as hung.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use shadowslice_shared::units::{Percent, Timestamp};

/// The sum of the shares of all models that are executing a batch on a GPU.
///
/// The pace is 1 if the shares add up to at most the whole GPU. If they add up to n times the GPU
/// (rounded up), the pace is 1/n. The progress is the pace summed over time. It is the time that
/// the same work would have taken on a GPU that is not oversubscribed.
#[derive(Debug)]
pub struct Occupancy {
    /// True if each batch is confined to its model's share.
    divides: bool,
    state: Mutex<OccupancyState>,
}

#[derive(Debug, Default)]
struct OccupancyState {
    /// The sum of the shares of the models that are executing, in percent.
    percent: u32,
    progress: Duration,
    /// The time of the last update of `progress`.
    at: Timestamp,
}

/// A guard that counts a model's share as occupied until the guard is dropped.
#[derive(Debug)]
pub struct OccupancyGuard {
    on: Arc<Occupancy>,
    percent: u32,
}

impl OccupancyState {
    fn crowding(&self) -> u32 {
        self.percent.div_ceil(100).max(1)
    }

    fn advance(&mut self, now: Timestamp) {
        self.progress += now.since(self.at) / self.crowding();
        self.at = self.at.max(now);
    }
}

impl Occupancy {
    /// Creates the occupancy of an idle GPU.
    pub fn new(divides: bool) -> Arc<Self> {
        Arc::new(Self { divides, state: Mutex::default() })
    }

    /// Counts a model's share as occupied until the returned guard is dropped.
    pub fn occupy(self: &Arc<Self>, share: Percent) -> OccupancyGuard {
        let percent = if self.divides { share.get() } else { Percent::WHOLE.get() };
        self.state.lock().percent += percent;
        OccupancyGuard { on: Arc::clone(self), percent }
    }

    /// Advances the progress to `now`. Returns the progress at `since`, assuming that the load on
    /// the GPU has been constant since then.
    pub(crate) fn progress_at(&self, since: Timestamp, now: Timestamp) -> Duration {
        let mut state = self.state.lock();
        state.advance(now);
        state.progress.saturating_sub(now.since(since) / state.crowding())
    }

    /// Returns the time until the progress since `from` reaches `span`, if the load on the GPU does
    /// not change. Returns zero if the progress has already reached `span`.
    pub(crate) fn time_left(&self, from: Duration, span: Duration, now: Timestamp) -> Duration {
        let mut state = self.state.lock();
        state.advance(now);
        let done = state.progress.saturating_sub(from);
        span.saturating_sub(done).saturating_mul(state.crowding())
    }
}

impl Drop for OccupancyGuard {
    fn drop(&mut self) {
        self.on.state.lock().percent -= self.percent;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn at(seconds: u32) -> Timestamp {
        Timestamp::after_origin(SECOND * seconds)
    }

    #[test]
    fn only_what_executes_slows_a_batch_down_and_only_while_it_does() {
        let gpu = Occupancy::new(true);
        let _own = gpu.occupy(Percent::WHOLE);
        let from = gpu.progress_at(at(10), at(10));
        assert_eq!(gpu.time_left(from, 10 * SECOND, at(12)), 8 * SECOND);
        let others: Vec<_> = (0..3).map(|_| gpu.occupy(Percent::WHOLE)).collect();
        assert_eq!(gpu.time_left(from, 10 * SECOND, at(12)), 32 * SECOND);
        assert_eq!(gpu.time_left(from, 10 * SECOND, at(16)), 28 * SECOND);
        drop(others);
        assert_eq!(gpu.time_left(from, 10 * SECOND, at(16)), 7 * SECOND);
        assert_eq!(gpu.time_left(from, 10 * SECOND, at(30)), Duration::ZERO);
    }

    #[test]
    fn shares_that_fit_beside_each_other_do_not_crowd_a_gpu_that_divides() {
        let half = Percent::new(50).unwrap();
        for (divides, left) in [(true, 4), (false, 8)] {
            let gpu = Occupancy::new(divides);
            let _both = [gpu.occupy(half), gpu.occupy(half)];
            let from = gpu.progress_at(at(1), at(1));
            assert_eq!(gpu.time_left(from, 4 * SECOND, at(1)), left * SECOND, "{divides}");
        }
    }

    #[test]
    fn a_batch_that_began_before_it_was_noticed_has_made_its_progress() {
        let gpu = Occupancy::new(true);
        let _both = [gpu.occupy(Percent::WHOLE), gpu.occupy(Percent::WHOLE)];
        let from = gpu.progress_at(at(6), at(10));
        assert_eq!(gpu.time_left(from, 5 * SECOND, at(10)), 6 * SECOND);
    }
}
