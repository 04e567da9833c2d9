//! Histograms of request latencies since the start.

use std::time::Duration;

/// The upper bounds of the buckets, in µs. The bounds are the same for every model, so that
/// histograms of several models can be added. There are only a few bounds, because each bucket is a
/// line in the metrics.
const BOUNDS_US: [u64; 18] = [
    100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000,
    2_000_000, 5_000_000, 10_000_000, 20_000_000, 60_000_000,
];

/// A histogram of latencies, and the sum of all latencies. The counts never decrease.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LatencyHistogram {
    within: [u64; BOUNDS_US.len()],
    beyond: u64,
    sum: Duration,
}

impl LatencyHistogram {
    pub fn record(&mut self, latency: Duration) {
        self.sum += latency;
        let bucket = BOUNDS_US.partition_point(|bound| Duration::from_micros(*bound) < latency);
        *self.within.get_mut(bucket).unwrap_or(&mut self.beyond) += 1;
    }

    /// Returns, for each bound, the number of latencies up to this bound.
    pub fn cumulative(&self) -> impl Iterator<Item = (Duration, u64)> {
        let bounds = BOUNDS_US.iter().map(|bound| Duration::from_micros(*bound));
        let counts = self.within.iter().scan(0, |total, count| {
            *total += count;
            Some(*total)
        });
        bounds.zip(counts)
    }

    pub fn count(&self) -> u64 {
        self.within.iter().sum::<u64>() + self.beyond
    }

    pub fn sum(&self) -> Duration {
        self.sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_belongs_to_its_bucket_and_what_is_beyond_all_still_counts() {
        let mut histogram = LatencyHistogram::default();
        for us in [0, 500, 501, 20_000, 60_000_000, 60_000_001, 90_000_000] {
            histogram.record(Duration::from_micros(us));
        }
        let cumulative: Vec<u64> = histogram.cumulative().map(|(_, count)| count).collect();
        assert_eq!(cumulative[..4], [1, 1, 2, 3]);
        let at = |bound| BOUNDS_US.iter().position(|us| *us == bound).unwrap();
        assert_eq!((cumulative[at(10_000)], cumulative[at(20_000)], cumulative[at(60_000_000)]), (3, 4, 5));
        assert_eq!(histogram.count(), 7);
        assert_eq!(histogram.sum(), Duration::from_micros(210_021_002));
        assert!(BOUNDS_US.is_sorted_by(|a, b| a < b));
    }
}
