//! The loads of a simulation: named loads, and loads from files.

mod file;
mod rate_curve;
mod rates;
mod stream;

use std::fmt;
use std::str::FromStr;

pub use file::{BadLine, BadLineReason, MAX_ARRIVALS, MAX_SECONDS, line, read};
pub use rates::cheapest;
pub use stream::ArrivalStream;

use rate_curve::RateCurve;
use stream::{GapDistribution, ModelArrivals};

use crate::random::{Random, RandomPurpose};
use crate::scenario::Scenario;

/// A random load with a name. The rates are chosen so that all models of a GPU use the same mean
/// fraction of the GPU if each request has its minimum cost within the SLO. Only
/// [`NamedLoad::Zipf`] divides the GPU unequally among the models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NamedLoad {
    /// Poisson arrivals with constant rates.
    Poisson,
    /// Bursts of arrivals. The mean rates are constant, and the coefficient of variation of the
    /// gaps between arrivals is 2.
    Gamma,
    /// Rates that switch at random between a low and a high state. The low rate is 0.6 times the
    /// mean and lasts 6 s on average. The high rate is 2.2 times the mean and lasts 2 s on average.
    Mmpp,
    /// Rates that follow a sine wave with an amplitude of 0.8 times the mean and two periods per
    /// run. Each model has a different phase.
    Diurnal,
    /// Constant rates, except that the rate of one model triples in the second third of the run.
    /// The seed selects the model.
    Step,
    /// Constant rates, except that the rate of one model is five times as high for a tenth of the
    /// run. The seed selects the model.
    Flash,
    /// Constant rates, except that the rates of two models alternate in opposite phase between 1.75
    /// and 0.25 times their means. A run has six phases. The seed selects the two models.
    Anti,
    /// Constant rates, except that the rates of all models are three times as high for a fifth of
    /// the run.
    Surge,
    /// Constant rates that are proportional to 1 / rank of the model. The seed determines the
    /// ranks.
    Zipf,
}

impl NamedLoad {
    /// All named loads with their names.
    pub const ALL: [(&'static str, Self); 9] = [
        ("poisson", Self::Poisson),
        ("gamma", Self::Gamma),
        ("mmpp", Self::Mmpp),
        ("diurnal", Self::Diurnal),
        ("step", Self::Step),
        ("flash", Self::Flash),
        ("anti", Self::Anti),
        ("surge", Self::Surge),
        ("zipf", Self::Zipf),
    ];

    /// Returns the arrivals as an iterator that draws them one by one.
    pub fn arrivals(self, scenario: &Scenario, seed: u64, seconds: f64, utilisation: f64) -> ArrivalStream {
        let count = scenario.models.len();
        let chosen = Random::new(seed, RandomPurpose::Choice, 0).order(count);
        let rates = rates::rates(scenario, utilisation, &self.weights(&chosen));
        let gaps = if self == Self::Gamma {
            GapDistribution::Gamma { shape: 0.25 }
        } else {
            GapDistribution::Exponential
        };
        let stream = |(model, rate): (usize, f64)| {
            let rates_over_time = self.rate_curve(model, &chosen, seed, seconds);
            ModelArrivals::new(
                Random::new(seed, RandomPurpose::Gaps, model),
                gaps,
                rates_over_time,
                rate,
                seconds,
            )
        };
        ArrivalStream::new(rates.into_iter().enumerate().map(stream).collect())
    }

    /// Returns the weight of each model in the load of its GPU.
    fn weights(self, chosen: &[usize]) -> Vec<f64> {
        let mut weights = vec![1.0; chosen.len()];
        if self == Self::Zipf {
            for (rank, &model) in chosen.iter().enumerate() {
                weights[model] = 1.0 / (rank + 1) as f64;
            }
        }
        weights
    }

    /// Returns the curve of a model's rate over the run.
    fn rate_curve(self, model: usize, chosen: &[usize], seed: u64, seconds: f64) -> RateCurve {
        let steps = |steps: &[(f64, f64)]| RateCurve::steps(steps, seconds);
        let random = || Random::new(seed, RandomPurpose::RateCurve, model);
        let turn = chosen.iter().position(|&other| other == model).unwrap_or(chosen.len());
        let six = |factors: [f64; 2]| {
            let turns = (1..=6_u8).map(|end| (f64::from(end) / 6.0, factors[usize::from(end % 2)]));
            steps(&turns.collect::<Vec<_>>())
        };
        match (self, turn) {
            (Self::Mmpp, _) => RateCurve::switching(random()),
            (Self::Diurnal, _) => RateCurve::wave(random().fraction(), seconds),
            (Self::Step, 0) => steps(&[(1.0 / 3.0, 1.0), (2.0 / 3.0, 3.0), (1.0, 1.0)]),
            (Self::Flash, 0) => steps(&[(0.4, 1.0), (0.5, 5.0), (1.0, 1.0)]),
            (Self::Anti, 0) => six([0.25, 1.75]),
            (Self::Anti, 1) => six([1.75, 0.25]),
            (Self::Surge, _) => steps(&[(0.4, 1.0), (0.6, 3.0), (1.0, 1.0)]),
            _ => steps(&[(1.0, 1.0)]),
        }
    }
}

/// The error for a name that no load has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown load {0:?}; give poisson, gamma, mmpp, diurnal, step, flash, anti, surge, zipf, or a file that ends in .csv"
)]
pub struct NoSuchLoad(String);

impl FromStr for NamedLoad {
    type Err = NoSuchLoad;

    fn from_str(text: &str) -> Result<Self, NoSuchLoad> {
        let found = Self::ALL.iter().find(|(name, _)| *name == text);
        found.map(|(_, named)| *named).ok_or_else(|| NoSuchLoad(text.to_owned()))
    }
}

impl fmt::Display for NamedLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = Self::ALL.iter().find(|(_, named)| named == self);
        f.write_str(found.map_or("", |(name, _)| name))
    }
}

#[cfg(test)]
mod tests;
