//! What is left of a cap beside neighbours that execute now and then.
//!
//! A cap is no reservation: while those who execute may use more than the GPU has, each has its
//! proportion of it. Whether a neighbour executes is taken as a coin that falls as often as it is busy.
//!
//! A batch that is short beside its neighbours' turns meets the same ones all the time, and its mean time goes by the mean of
//! what they ask for; one that outlasts many turns goes by the mean of what they leave, which is more. Batches are about as long
//! as each other, so they are taken to have what lies half-way. Either end would make profiles that are right seem wrong by some percent.

/// A neighbour, or the model itself.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Tenant {
    /// Its cap in SMs.
    pub(super) cap: f64,
    /// The part of the time in which it executes.
    pub(super) busy: f64,
}

/// The SMs that each of a GPU's tenants has on average while it executes.
pub(super) fn effective(tenants: &[Tenant], gpu: f64) -> Vec<f64> {
    let mean: f64 = tenants.iter().map(|tenant| tenant.cap * tenant.busy).sum();
    let spread = |tenant: &Tenant| tenant.cap * tenant.cap * tenant.busy * (1.0 - tenant.busy);
    let variance: f64 = tenants.iter().map(spread).sum();
    let beside = |tenant: &Tenant| {
        let mean = mean + tenant.cap * (1.0 - tenant.busy);
        let asked = asked(gpu, mean, (variance - spread(tenant)).max(0.0).sqrt());
        tenant.cap * gpu / asked.mean * (1.0 + 0.5 * asked.variance / asked.mean.powi(2))
    };
    tenants.iter().map(beside).collect()
}

/// SMs that are asked for, and of the GPU at least all.
#[derive(Debug, Clone, Copy)]
struct Asked {
    mean: f64,
    variance: f64,
}

/// The moments of a normal variable where it is above `floor`, and of `floor` where it is not. To second order, the mean of the
/// inverse is `(1 + variance / mean²) / mean`.
fn asked(floor: f64, mean: f64, deviation: f64) -> Asked {
    if deviation < 1e-9 {
        return Asked { mean: mean.max(floor), variance: 0.0 };
    }
    let distance = (mean - floor) / deviation;
    let density = (-0.5 * distance * distance).exp() / (2.0 * std::f64::consts::PI).sqrt();
    // The logistic function is within 0.01 of the normal distribution.
    let above = 1.0 / (1.0 + (-1.702 * distance).exp());
    let square = (mean * mean + deviation * deviation) * above
        + deviation * (mean + floor) * density
        + floor * floor * (1.0 - above);
    let mean = (floor + (mean - floor) * above + deviation * density).max(floor);
    Asked { mean, variance: (square - mean * mean).clamp(0.0, deviation * deviation) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenants(of: &[(f64, f64)]) -> Vec<Tenant> {
        of.iter().map(|&(cap, busy)| Tenant { cap, busy }).collect()
    }

    #[test]
    fn caps_that_fit_are_had_in_full() {
        assert_eq!(effective(&tenants(&[(60.0, 1.0), (72.0, 1.0)]), 132.0), [60.0, 72.0]);
        assert_eq!(effective(&tenants(&[(132.0, 1.0), (132.0, 0.0)]), 132.0), [132.0, 66.0]);
    }

    #[test]
    fn caps_that_do_not_fit_are_had_in_proportion() {
        let got = effective(&tenants(&[(132.0, 1.0), (66.0, 1.0)]), 132.0);
        assert!((got[0] - 88.0).abs() < 1e-9 && (got[1] - 44.0).abs() < 1e-9);
    }

    #[test]
    fn what_is_had_lies_between_both_means() {
        let (caps, busy) = ([132.0, 100.0, 60.0, 132.0, 40.0], [0.4, 0.6, 0.3, 0.2, 0.9]);
        let tenants: Vec<Tenant> =
            std::iter::zip(caps, busy).map(|(cap, busy)| Tenant { cap, busy }).collect();
        // What the first one has and what is asked for, over all ways in which the coins of the others fall.
        let (mut had, mut asked) = (0.0, 0.0);
        for coins in 0..16_u32 {
            let others = (1..5).map(|one| (coins >> (one - 1) & 1 == 1, caps[one], busy[one]));
            let sum: f64 = 132.0 + others.clone().map(|(on, cap, _)| if on { cap } else { 0.0 }).sum::<f64>();
            let odds: f64 = others.map(|(on, _, busy)| if on { busy } else { 1.0 - busy }).product();
            had += odds * 132.0 * 132.0 / sum.max(132.0);
            asked += odds * sum.max(132.0);
        }
        let least = 132.0 * 132.0 / asked;
        assert!(had > 1.05 * least, "{had} {least}");
        let got = effective(&tenants, 132.0)[0];
        assert!((got / (0.5 * (had + least)) - 1.0).abs() < 0.02, "{got} of {least} to {had}");
    }

    #[test]
    fn neighbours_that_idle_cost_less() {
        let beside = |busy| effective(&tenants(&[(132.0, 1.0), (132.0, busy)]), 132.0)[0];
        assert!(beside(0.1) > beside(0.5) && beside(0.5) > beside(1.0));
    }
}
