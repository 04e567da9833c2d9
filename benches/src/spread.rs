//! The summary of a figure over several rounds.

use serde::Serialize;

use crate::closed_loop::RoundResult;

/// The median and the range of a figure over several rounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// Returns the spread of one or more values.
    pub(crate) fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let (low, high) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
        Self { median: (low + high) / 2.0, min: values[0], max: values[values.len() - 1] }
    }
}

/// Returns only the quiet rounds. If no round was quiet, returns all rounds.
pub(crate) fn counted(rounds: &[RoundResult]) -> Vec<RoundResult> {
    let quiet: Vec<RoundResult> = rounds.iter().filter(|round| round.is_quiet()).copied().collect();
    if quiet.is_empty() { rounds.to_vec() } else { quiet }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disturbed_rounds_count_only_if_there_are_no_others() {
        let round = |others_percent, p50_us| RoundResult {
            requests: 1,
            requests_per_second: 1.0,
            p50_us,
            p99_us: 9.0,
            supervisor_cpu_us: 1.0,
            worker_cpu_us: 1.0,
            client_cpu_us: 1.0,
            others_percent,
        };
        let p50s =
            |rounds: &[RoundResult]| counted(rounds).iter().map(|round| round.p50_us).collect::<Vec<_>>();
        assert_eq!(p50s(&[round(50.0, 1.0), round(2.0, 2.0), round(9.0, 3.0)]), [2.0, 3.0]);
        assert_eq!(p50s(&[round(50.0, 1.0), round(20.0, 2.0)]), [1.0, 2.0]);
    }

    #[test]
    fn a_spread_is_the_median_and_the_range() {
        let spread = |values: &[f64]| {
            let Spread { median, min, max } = Spread::of(values.iter().copied());
            (median, min, max)
        };
        assert_eq!(spread(&[3.0]), (3.0, 3.0, 3.0));
        assert_eq!(spread(&[9.0, 1.0, 2.0]), (2.0, 1.0, 9.0));
        assert_eq!(spread(&[4.0, 1.0, 2.0, 9.0]), (3.0, 1.0, 9.0));
    }
}
