//! Functions that round figures for operators, for example in logs and error messages.

use std::time::Duration;

/// Rounds to three significant digits and at most three decimals. Keeps all digits before the decimal
/// point.
pub fn round(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let digits = 2.0 - value.abs().log10().floor();
    let unit = 10_f64.powf(digits.clamp(0.0, 3.0));
    (value * unit).round() / unit
}

/// Rounds a fraction from 0 to 1 down to three decimals, so that only exactly 1 yields 1.
pub fn fraction(part: f64) -> f64 {
    // Floating-point errors could lower an exact figure, so the function adds a small number first.
    (part * 1e3 + 1e-6).floor() / 1e3
}

/// Returns a duration in milliseconds, rounded with [`round`].
pub fn ms(time: Duration) -> f64 {
    round(time.as_secs_f64() * 1e3)
}

/// Returns a duration with its unit, such as "12.3 ms" or "15 s", rounded with [`round`].
pub fn duration(time: Duration) -> String {
    let ms = ms(time);
    if ms < 1e3 { format!("{ms} ms") } else { format!("{} s", round(time.as_secs_f64())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_three_digits_and_at_most_three_decimals() {
        let values = [0.0, 0.000_123, 0.012_345, 1.234_56, 12.345_678, 99.96, 123.456, 123_456.7];
        assert_eq!(values.map(round), [0.0, 0.0, 0.012, 1.23, 12.3, 100.0, 123.0, 123_457.0]);
        assert_eq!(round(-1.234_56), -1.23);
        assert_eq!([1.0, 0.999_9, 0.99, 0.123_45, 0.0].map(fraction), [1.0, 0.999, 0.99, 0.123, 0.0]);
        assert_eq!(ms(Duration::from_nanos(12_345_678)), 12.3);
        let spans = [12_345_678, 1_234_567_890, 15_000_000_000].map(Duration::from_nanos).map(duration);
        assert_eq!(spans, ["12.3 ms", "1.23 s", "15 s"]);
    }
}
