//! Latencies by size, to within 1 %.

/// Buckets per doubling, as a power of two.
const PRECISION_BITS: u32 = 6;

/// Latencies are told apart from 1 µs on, up to 2^36 µs, which is 19 hours.
const UNIT_NS: u64 = 1_000;
const BUCKETS: usize = (36 - PRECISION_BITS as usize + 1) << PRECISION_BITS;

/// A log-linear histogram.
#[derive(Debug, Clone)]
pub(crate) struct Histogram {
    counts: Vec<u64>,
    total: u64,
}

impl Histogram {
    pub(crate) fn new() -> Self {
        Self { counts: vec![0; BUCKETS], total: 0 }
    }

    pub(crate) fn record(&mut self, ns: u64) {
        self.counts[bucket(ns).min(BUCKETS - 1)] += 1;
        self.total += 1;
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.total += other.total;
    }

    /// What this part of the latencies does not exceed, 0.99 for p99; zero without any.
    pub(crate) fn quantile(&self, part: f64) -> u64 {
        let rank = ((self.total as f64 * part).ceil() as u64).clamp(1, self.total.max(1));
        let mut seen = 0;
        let found = self.counts.iter().position(|count| {
            seen += count;
            seen >= rank
        });
        found.map_or(0, middle)
    }
}

/// Buckets are one unit wide at first, and twice as wide with every doubling from there.
fn bucket(ns: u64) -> usize {
    let units = ns / UNIT_NS;
    let width_bits = units.checked_ilog2().map_or(0, |log| log.saturating_sub(PRECISION_BITS));
    ((width_bits as usize) << PRECISION_BITS) + (units >> width_bits) as usize
}

fn middle(bucket: usize) -> u64 {
    let width_bits = (bucket >> PRECISION_BITS).saturating_sub(1);
    let from = (bucket - (width_bits << PRECISION_BITS)) << width_bits;
    (from as u64 * 2 + (1 << width_bits)) * UNIT_NS / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_latency_is_known_to_within_a_percent() {
        for ns in [0, 999, 63_000, 64_000, 127_500, 128_000, 1_000_000, 123_456_789, 3_600_000_000_000] {
            let mut histogram = Histogram::new();
            histogram.record(ns);
            let known = histogram.quantile(0.99);
            assert!(known.abs_diff(ns) <= (ns / 100).max(UNIT_NS / 2), "{ns} became {known}");
        }
        let mut histogram = Histogram::new();
        histogram.record(u64::MAX);
        assert!(histogram.quantile(0.5) > 1 << 45);
    }

    #[test]
    fn quantiles_count_from_the_smallest() {
        let mut histogram = Histogram::new();
        assert_eq!(histogram.quantile(0.99), 0);
        (1..=100).for_each(|us| histogram.record(us * 1_000));
        let mut both = Histogram::new();
        both.add(&histogram);
        assert_eq!([0.0, 0.01, 0.5, 0.99, 1.0].map(|part| both.quantile(part) / 1_000), [1, 1, 50, 99, 100]);
    }
}
