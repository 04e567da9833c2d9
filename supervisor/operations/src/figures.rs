//! Formats numbers for operators. The numbers are rounded, so that they fit into a column of a
//! table.

/// Formats a time with its unit, either with two digits or as a whole number.
pub fn span(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.0} us", s * 1e6),
        s if s < 1.0 => format!("{} ms", whole(ms(s * 1e3))),
        s if s < 9.95 => format!("{} s", whole(format!("{s:.1}"))),
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7_200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.0} h", s / 3_600.0),
        s => format!("{:.0} d", s / 86_400.0),
    }
}

fn whole(figure: String) -> String {
    figure.strip_suffix(".0").map(str::to_owned).unwrap_or(figure)
}

/// Formats milliseconds without the unit. Times below one day have at most five characters.
pub fn ms(ms: f64) -> String {
    match ms {
        ms if ms < 9.95 => format!("{ms:.1}"),
        ms if ms < 99_999.5 => format!("{ms:.0}"),
        ms => format!("{}s", count((ms / 1e3) as u64)),
    }
}

/// Formats a count in at most five characters.
pub fn count(count: u64) -> String {
    match count {
        0..100_000 => count.to_string(),
        100_000..1_000_000 => format!("{}k", count / 1_000),
        1_000_000..10_000_000 => format!("{}.{}M", count / 1_000_000, count / 100_000 % 10),
        10_000_000..1_000_000_000 => format!("{}M", count / 1_000_000),
        _ => format!("{}G", count / 1_000_000_000),
    }
}

/// Formats a rate in events per second, without the unit.
pub fn rate(per_second: f64) -> String {
    if per_second > 0.0 && per_second < 9.95 {
        format!("{per_second:.1}")
    } else {
        count(per_second.round() as u64)
    }
}

/// Formats a fraction as a percentage. A fraction below 1 never becomes 100 %.
pub fn percent(part: f64) -> String {
    let digits = match part {
        part if part >= 1.0 || part <= 0.0 => 0,
        part if part >= 0.99 => 2,
        _ => 1,
    };
    let unit = 10_f64.powi(digits);
    // Rounding errors could lower an exact figure, so a small number is added first.
    let cut = (part * 100.0 * unit + 1e-6).floor() / unit;
    format!("{cut:.*}%", usize::try_from(digits).unwrap_or(0))
}

pub fn mib(mib: u64) -> String {
    if mib < 1 << 10 { format!("{mib} MiB") } else { format!("{:.1} GiB", mib as f64 / 1024.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rounded_and_have_their_unit() {
        let spans = [0.0, 0.000_35, 0.0059, 0.42, 1.0, 1.23, 45.4, 300.0, 10_000.0, 900_000.0];
        let expected = ["0 us", "350 us", "5.9 ms", "420 ms", "1 s", "1.2 s", "45 s", "5 min", "3 h", "10 d"];
        assert_eq!(spans.map(span), expected);
    }

    #[test]
    fn columns_of_figures_are_at_most_five_wide() {
        assert_eq!(
            [0.0, 4.26, 9.97, 95.2, 12_345.6, 250_000.0].map(ms),
            ["0.0", "4.3", "10", "95", "12346", "250s"]
        );
        let counts = [0, 99_999, 123_456, 1_260_000, 45_000_000, 7_000_000_000];
        assert_eq!(counts.map(count), ["0", "99999", "123k", "1.2M", "45M", "7G"]);
        assert_eq!([0.0, 0.5, 9.99, 100.4, 1.5e6].map(rate), ["0", "0.5", "10", "100", "1.5M"]);
        for power in 0..11 {
            let figure = 10_u64.pow(power) * 9;
            assert!(count(figure).len() <= 5 && rate(figure as f64).len() <= 5, "{figure}");
        }
    }

    #[test]
    fn only_the_whole_is_100_percent() {
        let parts = [1.0, 0.999_99, 0.99, 0.983, 0.1, 0.0931, 0.0];
        assert_eq!(parts.map(percent), ["100%", "99.99%", "99.00%", "98.3%", "10.0%", "9.3%", "0%"]);
        assert_eq!([438, 1229].map(mib), ["438 MiB", "1.2 GiB"]);
    }
}
