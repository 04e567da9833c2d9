//! Means of paired figures, and how far they can be trusted.

/// Two-sided 95 % quantiles of Student's distribution, for 1, 2, ... degrees of freedom.
const QUANTILES: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];

/// What is nothing but rounding.
const ROUNDING: f64 = 1e-9;

/// A mean, and half the width of its 95 % confidence interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Estimate {
    pub(crate) mean: f64,
    pub(crate) half: f64,
}

impl Estimate {
    /// Of at least two values.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let values: Vec<f64> = values.into_iter().collect();
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let freedom = values.len().saturating_sub(1);
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / freedom as f64;
        // The last one is a little too wide for more than that, which is the safe side.
        let quantile = QUANTILES[freedom.clamp(1, QUANTILES.len()) - 1];
        Self { mean, half: quantile * (variance / count).sqrt() }
    }

    /// Whether the whole interval is further from zero than this, on one side.
    pub(crate) fn exceeds(self, least: f64) -> bool {
        self.mean.abs() > self.half + least + ROUNDING
    }
}

/// Whether something that must not be negative is so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verdict {
    /// The whole interval is below zero.
    NotMet,
    /// The mean is, the interval's upper end is not.
    NotMetPerhaps,
    /// The mean is not, the interval's lower end is.
    MetPerhaps,
    /// Nothing of the interval is below zero.
    Met,
}

impl Verdict {
    /// Of what is left to the limit.
    pub(crate) fn of(margin: Estimate) -> Self {
        let Estimate { mean, half } = margin;
        match mean {
            _ if mean - half >= -ROUNDING => Self::Met,
            _ if mean >= -ROUNDING => Self::MetPerhaps,
            _ if mean + half >= -ROUNDING => Self::NotMetPerhaps,
            _ => Self::NotMet,
        }
    }

    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::NotMet => "not met",
            Self::NotMetPerhaps => "not met?",
            Self::MetPerhaps => "met?",
            Self::Met => "met",
        }
    }
}
