//! The comparison of two versions' execution times.

use std::time::Duration;

/// The execution of batches with the same number of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchTime {
    /// The number of rows.
    pub rows: u32,
    /// The number of batches. It is above 0.
    pub count: u64,
    /// The sum of their execution times.
    pub time: Duration,
}

impl BatchTime {
    fn mean(&self) -> f64 {
        self.time.as_secs_f64() / self.count as f64
    }
}

/// Returns the time of the new version's batches relative to that of the same batches of the released
/// version. Both lists have ascending numbers of rows. Returns `None` if one of them is empty.
pub fn slowdown(candidate: &[BatchTime], released: &[BatchTime]) -> Option<f64> {
    let took: f64 = candidate.iter().map(|batch| batch.time.as_secs_f64()).sum();
    let expected = |batch: &BatchTime| Some(expected(batch.rows, released)? * batch.count as f64);
    let expected: f64 = candidate.iter().map(expected).sum::<Option<f64>>()?;
    (expected > 0.0).then(|| took / expected)
}

/// Returns the time of a batch of the released version in seconds. It is linear between two sizes that were
/// measured. Below the smallest size it is that of the smallest one, and above the largest size it grows in
/// proportion.
fn expected(rows: u32, released: &[BatchTime]) -> Option<f64> {
    let above = released.iter().find(|batch| batch.rows >= rows);
    let below = released.iter().rev().find(|batch| batch.rows <= rows);
    match (below, above) {
        (Some(below), Some(above)) if below.rows < above.rows => {
            let part = f64::from(rows - below.rows) / f64::from(above.rows - below.rows);
            Some(below.mean() + part * (above.mean() - below.mean()))
        }
        (_, Some(above)) => Some(above.mean()),
        (Some(below), None) => Some(below.mean() * f64::from(rows) / f64::from(below.rows)),
        (None, None) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(rows: u32, count: u64, ms: u64) -> BatchTime {
        BatchTime { rows, count, time: Duration::from_millis(ms * count) }
    }

    #[test]
    fn times_are_compared_for_the_same_numbers_of_rows() {
        let released = [batch(1, 50, 2), batch(4, 50, 5), batch(8, 10, 8)];
        let ratio = |candidate: &[BatchTime]| slowdown(candidate, &released).unwrap();
        assert!((ratio(&released) - 1.0).abs() < 1e-9);
        assert!((ratio(&[batch(1, 20, 6)]) - 3.0).abs() < 1e-9);
        assert!((ratio(&[batch(2, 20, 3)]) - 1.0).abs() < 1e-9, "linear between 1 and 4");
        assert!((ratio(&[batch(16, 1, 16)]) - 1.0).abs() < 1e-9, "in proportion above 8");
        assert!((ratio(&[batch(1, 10, 2), batch(8, 10, 24)]) - 2.6).abs() < 1e-9, "weighted by time");
        assert_eq!(slowdown(&released, &[]), None);
        assert_eq!(slowdown(&[], &released), None);
    }
}
