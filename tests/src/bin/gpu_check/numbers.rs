//! Quantiles, means and rounding of small samples.

use serde_json::{Value, json};

/// Returns a quantile of the sample by the nearest-rank method, or `None` for an empty sample.
pub(crate) fn quantile(values: &[f64], quantile: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (quantile * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied()
}

pub(crate) fn median(values: &[f64]) -> Option<f64> {
    quantile(values, 0.5)
}

/// Returns the mean of a sample and its standard error, or `None` for fewer than two values.
pub(crate) fn mean(values: &[f64]) -> Option<(f64, f64)> {
    let count = values.len() as f64;
    if count < 2.0 {
        return None;
    }
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    Some((mean, (squares / (count - 1.0) / count).sqrt()))
}

/// Returns the p50, p99, maximum and size of a sample, or null for an empty sample.
pub(crate) fn summary(values: &[f64]) -> Value {
    let at = |q| quantile(values, q).map(rounded);
    match at(1.0) {
        None => Value::Null,
        Some(max) => json!({ "p50": at(0.5), "p99": at(0.99), "max": max, "count": values.len() }),
    }
}

/// Rounds to four significant digits, which is more precise than any measurement of the check.
pub(crate) fn rounded(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let scale = 10_f64.powi(3 - value.abs().log10().floor() as i32);
    (value * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_small_samples() {
        let values = [4.0, 1.0, 3.0, 2.0];
        assert_eq!(quantile(&values, 0.5), Some(2.0));
        assert_eq!(quantile(&values, 0.99), Some(4.0));
        assert_eq!(quantile(&values, 0.0), Some(1.0));
        assert_eq!(median(&[]), None);
        assert_eq!(summary(&[]), Value::Null);
        assert_eq!((mean(&[1.0, 3.0]), mean(&[1.0])), (Some((2.0, 1.0)), None));
        assert_eq!(rounded(1234.56), 1235.0);
        assert_eq!(rounded(0.001_234_56), 0.001_235);
        assert_eq!(rounded(-0.0), 0.0);
    }
}
