//! What chance explains of a count.

/// Standard deviations that chance explains.
const DEVIATIONS: f64 = 3.0;

/// How many more than expected of independent events there may be by chance: in Poisson's distribution the variance is the mean. Less than
/// one that is expected counts as one.
pub(super) fn surplus(expected: f64) -> f64 {
    DEVIATIONS * expected.max(1.0).sqrt()
}
