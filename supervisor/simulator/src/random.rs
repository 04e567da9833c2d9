//! Random numbers that are the same everywhere for the same seed.

use std::f64::consts::TAU;

/// What random numbers are drawn for. Each purpose has a sequence of its own, so that drawing more for
/// one changes nothing about another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Gaps between arrivals.
    Gaps,
    /// How a rate changes with time.
    Course,
    /// Which models a load singles out.
    Choice,
    /// How the truth differs from the profiles.
    Truth,
    /// How what is told differs from the profiles.
    Belief,
    /// Execution times from batch to batch.
    Noise,
}

/// Steele, Lea and Flood's `SplitMix64`.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    /// The sequence of a seed for one purpose of one model.
    pub(crate) fn new(seed: u64, purpose: Purpose, index: usize) -> Self {
        let mut seeded = Self(seed);
        let mut purposed = Self(seeded.number() ^ purpose as u64);
        Self(purposed.number() ^ index as u64)
    }

    fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform from 0 to 1, without 1.
    pub(crate) fn fraction(&mut self) -> f64 {
        (self.number() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Uniform from 0 to `count`, without it; 0 where there is nothing to choose from.
    pub(crate) fn below(&mut self, count: usize) -> usize {
        (self.fraction() * count as f64) as usize
    }

    /// A random order of `count` indices.
    pub(crate) fn order(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for last in (1..count).rev() {
            order.swap(last, self.below(last + 1));
        }
        order
    }

    /// Exponential with mean 1.
    pub(crate) fn exponential(&mut self) -> f64 {
        -(1.0 - self.fraction()).ln()
    }

    /// Normal with mean 0 and deviation 1 (Box and Muller).
    pub(crate) fn normal(&mut self) -> f64 {
        let radius = (2.0 * self.exponential()).sqrt();
        radius * (TAU * self.fraction()).cos()
    }

    /// Gamma of this shape, above 0 and below 1, with mean 1 (Marsaglia and Tsang, with their boost).
    pub(crate) fn gamma(&mut self, shape: f64) -> f64 {
        let d = shape + 1.0 - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        let raised = loop {
            let x = self.normal();
            let v = (1.0 + c * x).powi(3);
            if v > 0.0 && (1.0 - self.fraction()).ln() < 0.5 * x * x + d - d * v + d * v.ln() {
                break d * v;
            }
        };
        raised * (1.0 - self.fraction()).powf(1.0 / shape) / shape
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mean and variance of many draws.
    fn moments(mut draw: impl FnMut(&mut Random) -> f64) -> (f64, f64) {
        const DRAWS: usize = 200_000;
        let mut random = Random::new(7, Purpose::Gaps, 0);
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
    fn purposes_models_and_seeds_have_sequences_of_their_own() {
        let first = |seed, purpose, index| Random::new(seed, purpose, index).number();
        let base = first(1, Purpose::Gaps, 0);
        assert_eq!(base, first(1, Purpose::Gaps, 0));
        assert_ne!(base, first(2, Purpose::Gaps, 0));
        assert_ne!(base, first(1, Purpose::Noise, 0));
        assert_ne!(base, first(1, Purpose::Gaps, 1));
    }

    #[test]
    fn an_order_holds_every_index_once() {
        let mut order = Random::new(3, Purpose::Choice, 0).order(10);
        assert_ne!(order, (0..10).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..10).collect::<Vec<_>>());
        assert_eq!(Random::new(3, Purpose::Choice, 0).below(0), 0);
    }
}
