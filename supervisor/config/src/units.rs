//! Parses and writes durations, sizes and percentages in the form that operators use.

use std::time::Duration;

use shadowslice_shared::units::Percent;

use super::types::SampleRate;

/// The longest duration.
pub(super) const MAX_DURATION: Duration = Duration::from_hours(24);

/// The units of durations in ns, in descending order.
const DURATIONS: [(&str, u64); 6] = [
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
];

/// The units of sizes in bytes, in descending order. The last unit is for sizes without a unit.
const SIZES: [(&str, u64); 5] = [("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10), ("", 1)];

/// Parses a duration such as `20ms`.
///
/// # Errors
///
/// A message for the operator if the text is not a duration, or if the duration is longer than 24
/// h.
pub fn duration(text: &str) -> Result<Duration, String> {
    let bad = || {
        format!("invalid duration `{text}`; use a number and a unit, for example 500us, 20ms, 1.5s, 2m or 1h")
    };
    let (number, unit) = split(text).ok_or_else(bad)?;
    if unit.is_empty() {
        return Err(format!("duration `{text}` has no unit; use for example {text}ms or {text}s"));
    }
    let (_, nanoseconds) = DURATIONS.iter().find(|(name, _)| *name == unit).ok_or_else(bad)?;
    let exact = scaled(number, *nanoseconds).ok_or_else(bad)?;
    let duration = u64::try_from(exact).map_or(Duration::MAX, Duration::from_nanos);
    if duration > MAX_DURATION {
        return Err(format!("duration `{text}` is too long; use at most 24h"));
    }
    Ok(duration)
}

/// Returns a duration in the form that [`duration`] parses.
pub(super) fn show_duration(duration: Duration) -> String {
    let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    if nanoseconds == 0 {
        return "0ms".to_owned();
    }
    show(nanoseconds, &DURATIONS)
}

pub(super) fn size(text: &str) -> Result<u64, String> {
    let bad = || format!("invalid size `{text}`; use bytes, for example 64Ki, 256Mi or 1.5Gi (1 Ki is 1024)");
    let (number, unit) = split(text).ok_or_else(bad)?;
    let (_, bytes) = SIZES.iter().find(|(name, _)| *name == unit).ok_or_else(bad)?;
    let exact = scaled(number, *bytes).ok_or_else(bad)?;
    u64::try_from(exact).map_err(|_| bad())
}

/// Returns a size in the form that [`size`] parses.
pub(super) fn show_size(bytes: u64) -> String {
    if bytes == 0 {
        return "0".to_owned();
    }
    show(bytes, &SIZES)
}

pub(super) fn percent(text: &str) -> Result<Percent, String> {
    let share = text.strip_suffix('%').and_then(|number| {
        let is_number = number.bytes().all(|byte| byte.is_ascii_digit());
        Percent::new(number.parse().ok().filter(|_| is_number)?).ok()
    });
    share.ok_or_else(|| {
        format!("invalid share `{text}`; use a whole percentage from 1% to 100%, for example 30%")
    })
}

/// The number of millionths in one percent.
const PARTS: u32 = SampleRate::ALL / 100;

pub(super) fn sample(text: &str) -> Result<SampleRate, String> {
    millionths(text).ok_or_else(|| invalid_percentage("sampling rate", text))
}

/// Parses a percentage such as `2.5%`, and returns it as a fraction from 0 to 1.
pub(super) fn fraction(text: &str) -> Result<f64, String> {
    let parts = millionths(text).ok_or_else(|| invalid_percentage("part", text))?.parts();
    Ok(f64::from(parts) / f64::from(SampleRate::ALL))
}

fn millionths(text: &str) -> Option<SampleRate> {
    let number =
        text.strip_suffix('%').filter(|number| split(number).is_some_and(|(_, rest)| rest.is_empty()));
    SampleRate::new(u32::try_from(scaled(number?, u64::from(PARTS))?).ok()?)
}

fn invalid_percentage(what: &str, text: &str) -> String {
    format!(
        "invalid {what} `{text}`; use a percentage from 0% to 100% with at most four decimals, for example \
         1% or 0.05%"
    )
}

fn show(value: u64, units: &[(&str, u64)]) -> String {
    let (unit, scale) = units
        .iter()
        .find(|(_, scale)| value.is_multiple_of(*scale))
        .expect("the last unit is 1, which divides all");
    format!("{}{unit}", value / scale)
}

fn split(text: &str) -> Option<(&str, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    (end > 0).then(|| text.split_at(end))
}

/// Returns the product of the number and `scale`. Returns `None` if the product is not whole or the
/// number has more than 18 digits.
fn scaled(number: &str, scale: u64) -> Option<u128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if whole.is_empty() || fraction.is_empty() || number.len() > 19 {
        return None;
    }
    let tenths = 10_u128.pow(u32::try_from(fraction.len()).ok()?);
    let digits = whole.parse::<u128>().ok()? * tenths + fraction.parse::<u128>().ok()?;
    let product = digits * u128::from(scale);
    product.is_multiple_of(tenths).then_some(product / tenths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_and_written() {
        let cases = [
            ("20ms", 20_000_000),
            ("1500us", 1_500_000),
            ("2m", 120_000_000_000),
            ("0ms", 0),
            ("24h", 86_400_000_000_000),
        ];
        for (text, nanoseconds) in cases {
            assert_eq!(duration(text), Ok(Duration::from_nanos(nanoseconds)), "{text}");
            assert_eq!(duration(&show_duration(Duration::from_nanos(nanoseconds))), duration(text));
        }
        assert_eq!(duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(show_duration(Duration::from_millis(1500)), "1500ms");
    }

    #[test]
    fn invalid_durations_are_refused() {
        assert!(duration("20").unwrap_err().starts_with("duration `20` has no unit"));
        for text in
            ["", "ms", "-1ms", "20 ms", "1e3ms", "20sec", "1.2.3s", ".5s", "5.s", "0.1ns", "1m30s", "٣ms"]
        {
            assert!(duration(text).unwrap_err().contains("invalid duration"), "{text}");
        }
        for text in ["25h", "9999999999999999h"] {
            assert!(duration(text).unwrap_err().contains("is too long"), "{text}");
        }
    }

    #[test]
    fn sizes_are_read_and_written() {
        for (text, bytes) in
            [("64Mi", 64 << 20), ("1.5Gi", 3 << 29), ("100", 100), ("0", 0), ("1Ti", 1 << 40)]
        {
            assert_eq!(size(text), Ok(bytes), "{text}");
            assert_eq!(size(&show_size(bytes)), Ok(bytes));
        }
        for text in [
            "",
            "Mi",
            "64MB",
            "64M",
            "-1",
            "0.3Ki",
            "1.5",
            "64 Mi",
            "99999999999999999999",
            "999999999999999999Ti",
        ] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sampling_rates_are_read() {
        for (text, parts) in [
            ("0%", 0),
            ("1%", 10_000),
            ("100%", 1_000_000),
            ("0.05%", 500),
            ("0.0001%", 1),
            ("12.5%", 125_000),
        ] {
            assert_eq!(sample(text).map(SampleRate::parts), Ok(parts), "{text}");
            assert_eq!(fraction(text), Ok(f64::from(parts) / 1e6), "{text}");
        }
        for text in
            ["", "%", "1", "0.01", "101%", "100.0001%", "0.00001%", "-1%", "+1%", "1 %", "1e1%", ".5%", "5.%"]
        {
            assert!(sample(text).is_err() && fraction(text).is_err(), "{text}");
        }
    }

    #[test]
    fn shares_are_whole_percentages() {
        assert_eq!(percent("30%"), Ok(Percent::new(30).unwrap()));
        for text in ["30", "0%", "101%", "30.5%", "%", "+3%", "30 %", "0.3", ""] {
            assert!(percent(text).is_err(), "{text}");
        }
    }
}
