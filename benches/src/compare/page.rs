//! The page with the comparison of two builds.

use crate::closed_loop::RoundResult;
use crate::compare::{CompareOptions, ComparedSetting};
use crate::report::{Report, table};
use crate::spread::Spread;

pub(super) fn report(rows: &[ComparedSetting], options: &CompareOptions) -> Report {
    let CompareOptions { before, after, seconds, rounds, .. } = options;
    let about = format!(
        "Echo requests through two builds, `{}` (before) and `{}` (after), in {rounds} pairs of rounds of {seconds} s.
`make compare` and `make bench` write this page; do not edit it.",
        before.name, after.name
    );
    Report {
        title: "The data path, before and after",
        about,
        processes: "supervisors, workers and client",
        method: METHOD.to_owned(),
        results: tables(rows, options),
    }
}

const METHOD: &str = "\
Each connection sends a request over TCP, waits for its answer, checks every byte, and sends the next.
The builds take turns, and the build that begins alternates from pair to pair. A ratio is the value
after divided by the value before: the median over the pairs, with the smallest and the largest in
brackets. A pair is *quiet* if other programs used at most 10 % of the machine in both rounds. If at
least a third of the pairs are quiet, only those count.

* **CPU**: the supervisor's user and system time per request. Below 1, the second build uses less.
* **requests/s**: Above 1, the second build is faster.
* **p50**: the median latency. Below 1, the second build is faster.";

fn tables(rows: &[ComparedSetting], options: &CompareOptions) -> String {
    let cells = |row: &ComparedSetting| {
        let pairs = counted(&row.pairs);
        let ratio = |figure: fn(&RoundResult) -> f64| {
            let ratios = pairs.iter().map(|[before, after]| figure(after) / figure(before));
            let Spread { median, min, max } = Spread::of(ratios);
            format!("{median:.3} ({min:.2} .. {max:.2})")
        };
        let medians = |figure: fn(&RoundResult) -> f64, decimals: usize| {
            let median = |build: usize| Spread::of(pairs.iter().map(|pair| figure(&pair[build]))).median;
            format!("{:.decimals$}, {:.decimals$}", median(0), median(1))
        };
        vec![
            row.setting.load(),
            ratio(|round| round.supervisor_cpu_us),
            medians(|round| round.supervisor_cpu_us, 1),
            ratio(|round| round.requests_per_second),
            medians(|round| round.requests_per_second, 0),
            ratio(|round| round.p50_us),
            medians(|round| round.p50_us, 0),
            format!("{} of {}", row.pairs.iter().filter(|pair| is_quiet(pair)).count(), row.pairs.len()),
        ]
    };
    let heads = ["setting", "CPU", "us", "requests/s", "before, after", "p50", "us", "quiet"];
    let (before, after) = (&options.before.name, &options.after.name);
    format!("{after} over {before}:\n\n{}", table(&heads, rows.iter().map(cells)))
}

fn is_quiet(pair: &[RoundResult; 2]) -> bool {
    pair.iter().all(RoundResult::is_quiet)
}

/// Returns only the pairs in which both rounds were quiet, if they are at least a third of all
/// pairs. Otherwise, returns all pairs.
fn counted(pairs: &[[RoundResult; 2]]) -> Vec<[RoundResult; 2]> {
    let quiet: Vec<[RoundResult; 2]> = pairs.iter().filter(|pair| is_quiet(pair)).copied().collect();
    if quiet.len() * 3 < pairs.len() { pairs.to_vec() } else { quiet }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_counts_only_if_both_rounds_were_quiet() {
        let round = |others_percent| RoundResult {
            requests: 1,
            requests_per_second: 1.0,
            p50_us: 1.0,
            p99_us: 1.0,
            supervisor_cpu_us: 1.0,
            worker_cpu_us: 1.0,
            client_cpu_us: 1.0,
            others_percent,
        };
        let pairs = [[round(1.0), round(50.0)], [round(2.0), round(3.0)]];
        assert_eq!(counted(&pairs).len(), 1);
        let mostly_disturbed = [[pairs[0]; 3].as_slice(), &pairs[1..]].concat();
        assert_eq!(counted(&mostly_disturbed).len(), 4);
    }
}
