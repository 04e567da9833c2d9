//! The time that a model's answers take from the worker to the client's socket.

use std::time::Duration;

/// The divisor of the exponential mean: a new answer has a weight of 1/16. The mean reflects the last
/// few dozen answers.
const WEIGHT: u32 = 16;

/// The divisor of the SLO that gives the maximum write time of one answer in the mean. Without a
/// maximum, a client that reads slowly would cause refusals of other clients' requests.
const SLO_DIVISOR: u32 = 4;

/// An exponential mean of write times. It is zero before the first answer.
#[derive(Debug, Default)]
pub(super) struct WriteTime(Duration);

impl WriteTime {
    pub(super) fn observe(&mut self, took: Duration, slo: Duration) {
        self.0 = (self.0 * (WEIGHT - 1) + took.min(slo / SLO_DIVISOR)) / WEIGHT;
    }

    pub(super) fn mean(&self) -> Duration {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLO: Duration = Duration::from_millis(40);

    fn mean_after(takes: impl IntoIterator<Item = u64>) -> Duration {
        let mut writing = WriteTime::default();
        takes.into_iter().for_each(|ms| writing.observe(Duration::from_millis(ms), SLO));
        writing.mean()
    }

    #[test]
    fn the_mean_follows_what_answers_take() {
        assert_eq!(mean_after([]), Duration::ZERO);
        assert_eq!(mean_after([8]), Duration::from_micros(500));
        let rising = mean_after([8; 200]);
        assert!(rising > Duration::from_micros(7_990) && rising <= Duration::from_millis(8), "{rising:?}");
        let falling = mean_after([[8; 200], [2; 200]].concat());
        assert!(falling.abs_diff(Duration::from_millis(2)) < Duration::from_micros(10), "{falling:?}");
    }

    #[test]
    fn a_client_that_reads_slowly_takes_a_quarter_of_the_slo_from_others_at_most() {
        assert!(mean_after([60_000]) < SLO / 60);
        assert!(mean_after([60_000; 500]) <= SLO / 4);
    }
}
