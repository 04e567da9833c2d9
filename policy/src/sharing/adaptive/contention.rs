//! What is left of a cap beside neighbours that execute now and then.
//!
//! A cap is no reservation: while those who execute may use more than the GPU has, each has its
//! proportion of it. Whether a neighbour executes is taken as a coin that falls as often as it is busy.

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
        let deviation = (variance - spread(tenant)).max(0.0).sqrt();
        tenant.cap * gpu / expected_maximum(gpu, mean, deviation)
    };
    tenants.iter().map(beside).collect()
}

/// The mean of a normal variable where it is above `floor`, and of `floor` where it is not.
fn expected_maximum(floor: f64, mean: f64, deviation: f64) -> f64 {
    if deviation < 1e-9 {
        return mean.max(floor);
    }
    let distance = (mean - floor) / deviation;
    let density = (-0.5 * distance * distance).exp() / (2.0 * std::f64::consts::PI).sqrt();
    // The logistic function is within 0.01 of the normal distribution.
    let above = 1.0 / (1.0 + (-1.702 * distance).exp());
    (floor + (mean - floor) * above + deviation * density).max(floor)
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
    fn neighbours_that_idle_cost_less() {
        let beside = |busy| effective(&tenants(&[(132.0, 1.0), (132.0, busy)]), 132.0)[0];
        assert!(beside(0.1) > beside(0.5) && beside(0.5) > beside(1.0));
    }
}
