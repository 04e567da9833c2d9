use std::time::Duration;

use crate::spread::Spread;

use super::agreement::{Agreement, Pair};
use super::arrivals;
use super::cases::CASES;
use super::outcomes::{OutcomeCounts, RunOutcome};
use super::page;
use super::real::ReplayResult;

fn part(in_time: u64, p99_ms: f64, repartitions: u64) -> OutcomeCounts {
    OutcomeCounts { slo_ms: 50.0, offered: 100, in_time, refused: 0, p99_ms, repartitions }
}

fn figures(of: OutcomeCounts) -> RunOutcome {
    RunOutcome::of([("model".to_owned(), of)].into(), of.p99_ms)
}

fn round(of: OutcomeCounts, others_percent: f64) -> ReplayResult {
    ReplayResult { figures: figures(of), others_percent, sent_late_ms: 0.1, load_average: 1.0 }
}

#[test]
fn arrivals_survive_the_file_and_the_delay() {
    let text = "0.000000001,a\n12.500000000,b\n";
    let read = arrivals::read(text).unwrap();
    assert_eq!(arrivals::text(&read), text);
    let later = arrivals::later(&read, Duration::from_secs(3));
    assert_eq!(arrivals::text(&later), "3.000000001,a\n15.500000000,b\n");
    arrivals::read("soon,a").unwrap_err();
    arrivals::read("-1,a").unwrap_err();
}

#[test]
fn disturbed_rounds_count_only_if_there_are_no_others() {
    let simulated = [figures(part(100, 40.0, 0))];
    let median = |rounds: &[ReplayResult]| Agreement::of(CASES[0], &simulated, rounds).all.p99_ms.real.median;
    let (quiet, loud) = (round(part(99, 42.0, 0), 2.0), round(part(50, 90.0, 0), 60.0));
    assert_eq!(median(&[loud.clone(), quiet.clone(), loud.clone()]), 42.0);
    assert_eq!(median(&[loud.clone(), loud]), 90.0);
}

#[test]
fn targets_are_met_at_their_bounds_and_missed_beyond() {
    let simulated = [figures(part(100, 100.0, 4))];
    let met = |of: OutcomeCounts| Agreement::of(CASES[0], &simulated, &[round(of, 0.0)]).all.met();
    assert_eq!(met(part(95, 115.0, 5)), [true, true, true]);
    assert_eq!(met(part(94, 116.0, 6)), [false, false, false]);
    assert_eq!(met(part(100, 84.0, 2)), [true, false, false]);
}

#[test]
fn zero_agrees_with_zero_only() {
    let only = |value: f64| Spread::of([value].into_iter());
    let pair = |simulated, real| Pair { simulated: only(simulated), real: only(real) };
    assert!(pair(0.0, 0.0).is_within_fraction(0.05));
    assert!(!pair(0.0, 3.0).is_within_fraction(0.05));
    assert!(!pair(3.0, 0.0).is_within_fraction(0.05));
}

#[test]
fn the_simulated_figure_is_the_median_over_the_phases() {
    let simulated = [part(90, 1.0, 0), part(100, 3.0, 1), part(80, 2.0, 5)].map(figures);
    let all = Agreement::of(CASES[0], &simulated, &[round(part(90, 2.0, 1), 0.0)]).all;
    assert_eq!((all.in_time.simulated.median, all.p99_ms.simulated.max), (90.0, 3.0));
    assert_eq!(all.met(), [true; 3]);
}

#[test]
fn the_page_names_the_case_that_misses_a_target() {
    let simulated = [figures(part(100, 100.0, 0))];
    let agreement = |case, of| Agreement::of(case, &simulated, &[round(of, 0.0)]);
    let text =
        page::tables(&[agreement(CASES[0], part(100, 100.0, 0)), agreement(CASES[1], part(100, 130.0, 0))]);
    assert!(text.contains(&format!("| p99 | 1 of 2 | {} |", CASES[1])), "{text}");
    assert!(text.contains("| goodput | 2 of 2 |  |"), "{text}");
    assert_eq!(text.matches("**missed**").count(), 1);
}
