//! The smallest share at which a model keeps its SLO.
//!
//! A lane runs one batch at a time, and what comes meanwhile is the next batch. With execution times
//! `fixed + each * rows`, Poisson-like arrivals and `load = rate * each`, batches follow
//! `next ~ Poisson(rate * (fixed + each * this))`: their mean is `rate * fixed / (1 - load)`, their
//! variance the mean by `1 - load^2`. A request waits for what is left of the batch before it and executes
//! with its own, both of them large together; so the quantile of the latency is about twice the time
//! of a batch at the quantile of its size, less where the lane often idles.

use super::super::Terms;
use super::super::door::largest;
use super::curve::{Curve, Line};

/// A batch's execution may take this part of the SLO: the rest is its wait for the one before.
pub(super) const BATCH_PART: f64 = 1.0 / 1.75;

/// The highest load that is planned for.
const MAX_LOAD: f64 = 0.97;

/// The part of requests that may be late is taken to be between these.
const LATE_PARTS: std::ops::RangeInclusive<f64> = 0.001..=0.5;

/// Arrivals to be carried.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Arrivals {
    /// Requests a second.
    pub(super) rate: f64,
    /// Variance by mean.
    pub(super) dispersion: f64,
}

/// The largest batch for the door at a share.
pub(super) fn max_batch(terms: &Terms, curve: &Curve, sms: f64) -> u32 {
    if !curve.known() {
        return terms.max_batch.max(1);
    }
    let limit = terms.slo.as_secs_f64() * BATCH_PART;
    largest(terms.max_batch, |rows| curve.time(f64::from(rows), sms) <= limit)
}

/// The line that fits the batches a model may have at a share.
pub(super) fn line(terms: &Terms, curve: &Curve, sms: f64) -> Line {
    curve.line(f64::from(max_batch(terms, curve, sms).max(2).min(terms.max_batch)), sms)
}

/// Whether a model keeps its SLO on so many SMs.
pub(super) fn keeps(terms: &Terms, curve: &Curve, sms: f64, arrivals: Arrivals) -> bool {
    let line = line(terms, curve, sms);
    latency(line, terms.percentile, arrivals).is_some_and(|seconds| seconds <= terms.slo.as_secs_f64())
}

/// The quantile of the latency in seconds; `None` when more comes than can be answered.
fn latency(line: Line, percentile: f64, arrivals: Arrivals) -> Option<f64> {
    let load = arrivals.rate * line.each;
    if load >= MAX_LOAD {
        return None;
    }
    let late = (1.0 - percentile / 100.0).clamp(*LATE_PARTS.start(), *LATE_PARTS.end());
    let mean = arrivals.rate * line.fixed / (1.0 - load);
    let deviation = (arrivals.dispersion * mean.max(load) / (1.0 - load * load)).sqrt();
    let rows = (mean + normal_quantile(late) * deviation).max(1.0);
    let busy = (arrivals.rate * line.at(1.0)).min(1.0);
    let waits = if busy > late { 1.0 - late / busy } else { 0.0 };
    Some(line.at(rows) * (1.0 + waits))
}

/// The smallest share of at most `most` at which the model keeps its SLO; `None` if there is none.
pub(super) fn smallest(terms: &Terms, curve: &Curve, most: u32, arrivals: Arrivals) -> Option<u32> {
    let keeps = |sms: u32| keeps(terms, curve, f64::from(sms), arrivals);
    if !keeps(most) {
        return None;
    }
    let (mut below, mut enough) = (0, most.div_ceil(2));
    while enough - below > 1 {
        let middle = (below + enough) / 2;
        if keeps(2 * middle) { enough = middle } else { below = middle }
    }
    Some((2 * enough).min(most))
}

/// The part of the time in which a batch executes.
pub(super) fn busy(terms: &Terms, curve: &Curve, sms: f64, rate: f64) -> f64 {
    (rate * line(terms, curve, sms).at(1.0)).min(1.0)
}

/// What a standard normal variable exceeds with this probability, at most 0.5 (Abramowitz and Stegun
/// 26.2.22, error below 0.003).
fn normal_quantile(probability: f64) -> f64 {
    let t = (-2.0 * probability.ln()).sqrt();
    t - (2.30753 + 0.27061 * t) / (1.0 + 0.99229 * t + 0.04481 * t * t)
}

#[cfg(test)]
mod tests {
    use super::super::super::fixtures::{profile, terms};
    use super::*;

    fn poisson(rate: f64) -> Arrivals {
        Arrivals { rate, dispersion: 1.0 }
    }

    fn need(rate: f64, percentile: f64) -> Option<u32> {
        let terms = Terms { percentile, ..terms("a", 50) };
        smallest(&terms, &Curve::new(Some(&profile(2.0, 70.0, 66).execution)), 132, poisson(rate))
    }

    #[test]
    fn more_arrivals_need_more_and_nothing_needs_little() {
        let needs: Vec<_> = [0.0, 10.0, 100.0, 300.0, 600.0].map(|rate| need(rate, 99.0)).to_vec();
        assert!(needs.is_sorted(), "{needs:?}");
        assert_eq!(needs[0], Some(2), "one request alone takes 37 ms there");
        assert_eq!(need(1e9, 99.0), None);
    }

    #[test]
    fn stricter_percentiles_need_more() {
        let needs = [0.1, 50.0, 99.0, 99.99, 100.0].map(|percentile| need(300.0, percentile));
        assert!(needs.is_sorted() && needs.iter().all(Option::is_some), "{needs:?}");
    }

    #[test]
    fn bursts_need_more() {
        let terms = terms("a", 50);
        let curve = Curve::new(Some(&profile(2.0, 70.0, 66).execution));
        let bursty = Arrivals { rate: 300.0, dispersion: 4.0 };
        assert!(smallest(&terms, &curve, 132, bursty) > smallest(&terms, &curve, 132, poisson(300.0)));
    }

    #[test]
    fn quantiles_of_the_normal_distribution() {
        for (probability, expected) in [(0.5, 0.0), (0.1, 1.2816), (0.01, 2.3263), (0.001, 3.0902)] {
            assert!((normal_quantile(probability) - expected).abs() < 0.004, "{probability}");
        }
    }
}
