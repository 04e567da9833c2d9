use crate::closed_loop::RoundResult;
use crate::spread::Spread;

use super::case::{CaseWork, ServerCase, Side};
use super::comparisons::{COMPARISONS, ComparisonTarget};
use super::results::{CaseResult, ChangeResult, Figure, PythonClientResult};
use super::{CaseRounds, page};

fn spread(value: f64) -> Spread {
    Spread::of([value].into_iter())
}

#[test]
fn targets_are_met_at_their_bounds_and_missed_beyond() {
    let met = |target: ComparisonTarget, ratio| target.met(spread(1.0), Some(ratio));
    assert_eq!(met(ComparisonTarget::AtMost(0.5), 0.5), Some(true));
    assert_eq!(met(ComparisonTarget::AtMost(0.5), 0.51), Some(false));
    assert_eq!(met(ComparisonTarget::Below(1.0), 1.0), Some(false));
    assert_eq!(met(ComparisonTarget::AtLeast(2.5), 2.5), Some(true));
    assert_eq!(met(ComparisonTarget::AtLeast(2.5), 2.49), Some(false));
    assert_eq!(met(ComparisonTarget::Nothing, 0.0), None);
    assert_eq!(ComparisonTarget::AtMost(0.5).met(spread(1.0), None), None, "without a ratio");
}

#[test]
fn one_failed_request_in_one_round_misses_the_target() {
    let failed = |counts: &[f64]| ComparisonTarget::NoneFails.met(Spread::of(counts.iter().copied()), None);
    assert_eq!(failed(&[0.0, 0.0, 0.0]), Some(true));
    assert_eq!(failed(&[0.0, 0.0, 1.0]), Some(false));
}

#[test]
fn figures_are_found_only_in_rounds_that_have_them() {
    let python = CaseResult::Python(PythonClientResult { requests: 1, p50_us: 7.0, p99_us: 9.0 });
    let change = CaseResult::Change(ChangeResult { failed: 3, longest_ms: 5.0, ..ChangeResult::default() });
    assert_eq!(Figure::P50Us.of(&python), Some(7.0));
    assert_eq!(Figure::P50Us.of(&change), None);
    assert_eq!(Figure::Failed.of(&change), Some(3.0));
    assert_eq!(Figure::LongestMs.of(&change), Some(5.0));
    assert_eq!(Figure::PerSecond.of(&python), None);
}

/// Returns the result of a round with this kind of work, in which every figure is `value`.
fn round(what: CaseWork, value: f64, others_percent: f64) -> CaseResult {
    match what {
        CaseWork::Load { .. } => CaseResult::Load(RoundResult {
            requests: 1,
            requests_per_second: value,
            p50_us: value,
            p99_us: value,
            supervisor_cpu_us: value / 2.0,
            worker_cpu_us: value / 2.0,
            client_cpu_us: 0.0,
            others_percent,
        }),
        CaseWork::Python => {
            CaseResult::Python(PythonClientResult { requests: 1, p50_us: value, p99_us: value })
        }
        CaseWork::Change(_) => {
            CaseResult::Change(ChangeResult { longest_ms: value, serves: true, ..ChangeResult::default() })
        }
    }
}

fn trials(ours: f64, triton: f64) -> Vec<CaseRounds> {
    let cases = COMPARISONS.iter().flat_map(|row| [row.ours, row.triton]);
    let trial = |case: ServerCase| {
        let value = if case.side == Side::Ours { ours } else { triton };
        CaseRounds { case, rounds: vec![round(case.what, 99.0 * value, 50.0), round(case.what, value, 0.0)] }
    };
    cases.map(trial).collect()
}

#[test]
fn every_row_has_its_figures_of_quiet_rounds_and_the_verdict_follows() {
    let compared = |ours, triton| {
        let trials = trials(ours, triton);
        COMPARISONS.iter().map(|row| row.compare(&trials).unwrap()).collect::<Vec<_>>()
    };
    let slower = compared(2.0, 1.0);
    assert_eq!(slower[0].ratio, Some(2.0));
    assert_eq!(slower[0].met, Some(false));
    let table = page::summary(&slower);
    assert!(table.contains("| 2.00 | at most 0.50 x | **missed** |"), "{table}");
    assert_eq!(table.lines().count(), COMPARISONS.len() + 2);
    assert_eq!(compared(1.0, 2.0)[0].met, Some(true));
}

#[test]
fn a_quiet_round_is_never_compared_with_a_disturbed_one() {
    let mut trials = trials(1.0, 1.0);
    for trial in &mut trials {
        let other = if trial.case.side == Side::Ours { 50.0 } else { 0.0 };
        trial.rounds = vec![round(trial.case.what, 1.0, other), round(trial.case.what, 3.0, 50.0 - other)];
    }
    let compared = COMPARISONS[0].compare(&trials).unwrap();
    assert_eq!((compared.ours.median, compared.triton.median), (2.0, 2.0), "no round is quiet on both sides");
}

#[test]
fn a_row_without_rounds_is_a_failure() {
    assert!(COMPARISONS[0].compare(&[]).is_err());
}
