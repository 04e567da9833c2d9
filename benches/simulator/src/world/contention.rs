//! Proportional sharing of a GPU: the contention between workers in a world in which their shares
//! divide the GPU. Real GPUs work differently (see [`shadowslice_shared::contention`]), but
//! policies are also evaluated in this world.

use std::time::Duration;

use shadowslice_shared::contention::{Occupant, SharedGpu};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::profile::Execution;

/// Returns the execution time of a batch while the other workers in `others` also execute. Each
/// group is divided equally among the workers that may use it. If shares are numbers of SMs without
/// groups, the whole GPU is divided in proportion to the shares.
pub(super) fn time(
    gpu: &SharedGpu,
    execution: &Execution,
    rows: u32,
    own: Occupant,
    others: impl Iterator<Item = Occupant> + Clone,
) -> Duration {
    let all = f64::from(gpu.sms.0.max(1));
    let sms = |one: Occupant| f64::from(one.sms.0);
    let division = gpu.division.as_ref().filter(|_| own.groups != Groups::NONE);
    let Some(division) = division else {
        let sum = others.fold(sms(own), |sum, other| sum + sms(other));
        return execution.time(rows, sms(own) * (all / sum.max(1.0)).min(1.0));
    };
    let load = |group: usize| {
        let on = |other: Occupant| match other.groups {
            Groups::NONE => sms(other) / all,
            groups => f64::from(u8::from(groups.contains(group))),
        };
        1.0 + others.clone().map(on).sum::<f64>()
    };
    let parts = division.sizes().iter().enumerate().filter(|(group, _)| own.groups.contains(*group));
    execution.time(rows, parts.map(|(group, size)| f64::from(size.0) / load(group)).sum())
}

#[cfg(test)]
mod tests {
    use shadowslice_shared::profile::ExecutionRow;
    use shadowslice_shared::units::Sms;

    use super::*;

    /// Returns the number of SMs that a worker gets. A batch takes 1 s on one SM, so its speed, in
    /// batches per second, equals the number of SMs.
    fn left(own: Occupant, others: &[Occupant]) -> f64 {
        let execution =
            Execution::new(vec![Sms(1000)], vec![ExecutionRow { batch: 1, ms: vec![1.0] }]).unwrap();
        1.0 / time(&SharedGpu::new(Sms(80)), &execution, 1, own, others.iter().copied()).as_secs_f64()
    }

    #[test]
    fn shares_that_do_not_fit_are_divided() {
        let anywhere = |sms| Occupant::anywhere(Sms(sms));
        let on = |groups: std::ops::Range<usize>| SharedGpu::new(Sms(80)).occupant(groups.collect());
        let about = |one: f64, other: f64| (one - other).abs() < 0.01;
        assert!(about(left(anywhere(60), &[anywhere(20)]), 60.0));
        assert!(about(left(anywhere(60), &[anywhere(60)]), 40.0));
        assert!(about(left(on(0..5), &[on(5..10)]), 40.0));
        assert!(about(left(on(0..5), &[on(4..10)]), 36.0));
        assert!(about(left(on(0..4), &[anywhere(40)]), 32.0 / 1.5));
    }
}
