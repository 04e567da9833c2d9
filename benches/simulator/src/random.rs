//! Random numbers that depend only on the seed, and are the same on every platform.

use rand::RngExt;
use rand::seq::SliceRandom;
use rand_distr::{Distribution, Exp1, Gamma, StandardNormal};
use rand_pcg::Pcg64;

/// The purpose of random numbers. Each purpose has a separate sequence, so draws for one purpose do
/// not affect another purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RandomPurpose {
    Gaps,
    RateCurve,
    Choice,
    Truth,
    Belief,
    Noise,
}

/// A random number generator that produces the same sequence in every version of this program:
/// O'Neill's PCG.
#[derive(Debug, Clone)]
pub(crate) struct Random(Pcg64);

impl Random {
    /// Returns the generator for a seed, a purpose and an index, such as the index of a model.
    pub(crate) fn new(seed: u64, purpose: RandomPurpose, index: usize) -> Self {
        Self(Pcg64::new(u128::from(seed), (index as u128) << 8 | purpose as u128))
    }

    /// Returns a uniformly distributed number from 0 to 1, excluding 1.
    pub(crate) fn fraction(&mut self) -> f64 {
        self.0.random()
    }

    /// Returns a random permutation of the indices below `count`.
    pub(crate) fn order(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        order.shuffle(&mut self.0);
        order
    }

    /// Returns an exponentially distributed number with mean 1.
    pub(crate) fn exponential(&mut self) -> f64 {
        Exp1.sample(&mut self.0)
    }

    /// Returns a normally distributed number with mean 0 and standard deviation 1.
    pub(crate) fn normal(&mut self) -> f64 {
        StandardNormal.sample(&mut self.0)
    }

    /// Returns a gamma-distributed number with mean 1 and this shape, which must be positive.
    pub(crate) fn gamma(&mut self, shape: f64) -> f64 {
        Gamma::new(shape, 1.0 / shape).map_or(1.0, |gamma| gamma.sample(&mut self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the mean and the variance of many draws.
    fn moments(mut draw: impl FnMut(&mut Random) -> f64) -> (f64, f64) {
        const DRAWS: usize = 200_000;
        let mut random = Random::new(7, RandomPurpose::Gaps, 0);
        let drawn: Vec<f64> = (0..DRAWS).map(|_| draw(&mut random)).collect();
        let mean = drawn.iter().sum::<f64>() / DRAWS as f64;
        (mean, drawn.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / DRAWS as f64)
    }

    fn near((mean, variance): (f64, f64), expected: (f64, f64)) -> bool {
        (mean - expected.0).abs() < 0.02 && (variance - expected.1).abs() < 0.05 * expected.1.max(1.0)
    }

    #[test]
    fn the_distributions_have_their_moments() {
        assert!(near(moments(Random::fraction), (0.5, 1.0 / 12.0)));
        assert!(near(moments(Random::exponential), (1.0, 1.0)));
        assert!(near(moments(Random::normal), (0.0, 1.0)));
        assert!(near(moments(|random| random.gamma(0.25)), (1.0, 4.0)));
    }

    #[test]
    fn purposes_models_and_seeds_have_their_own_sequences() {
        let first = |seed, purpose, index| Random::new(seed, purpose, index).fraction().to_bits();
        let base = first(1, RandomPurpose::Gaps, 0);
        assert_eq!(base, first(1, RandomPurpose::Gaps, 0));
        assert_ne!(base, first(2, RandomPurpose::Gaps, 0));
        assert_ne!(base, first(1, RandomPurpose::Noise, 0));
        assert_ne!(base, first(1, RandomPurpose::Gaps, 1));
    }

    #[test]
    fn an_order_holds_every_index_once() {
        let mut order = Random::new(3, RandomPurpose::Choice, 0).order(10);
        assert_ne!(order, (0..10).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..10).collect::<Vec<_>>());
    }
}
