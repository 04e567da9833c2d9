//! A forecast of the misses under a layout, computed with the contention model. The forecast only
//! decides which layouts a trial uses, and in which order. The measurements of the trial decide which
//! layout stays.
//!
//! The forecast assumes a steady state. A model runs batches of `b` rows, which take the time `T` under
//! contention. Each other model executes for the fraction `ρ` of the time. The model keeps up with `λ`
//! rows per second if `λ · T ≤ b`. The model meets its SLO if two batches take no longer than the SLO:
//! the batch that a request waits for, and the request's own batch. `T` and `ρ` of all models depend on
//! each other, so the forecast computes them iteratively.

use std::time::Duration;

use shadowslice_shared::contention::{ClientPriority, Occupant, SharedGpu};
use shadowslice_shared::profile::Execution;
use shadowslice_shared::units::Sms;

use super::super::layout::{Layout, LayoutTenant};
use super::score::weighted;

/// The number of iterations. More iterations change the result by less than 1 %.
const ROUNDS: usize = 5;

/// The maximum fraction of the time for which a model can execute and still keep up with its requests.
/// It is below 1, because requests arrive at random.
pub(super) const KEEPS_UP: f64 = 0.85;

/// The load on one model.
#[derive(Debug, Clone, Copy)]
pub(super) struct Demand<'e> {
    pub(super) tenant: LayoutTenant,
    pub(super) rows_per_s: f64,
    pub(super) slo: Duration,
    pub(super) max_batch: u32,
    pub(super) execution: &'e Execution,
}

/// The forecast for one model.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Steady {
    /// The number of rows in a batch.
    rows: u32,
    /// The fraction of the time for which the model executes.
    busy: f64,
    /// The number of rows per second that the model answers in time.
    kept_per_s: f64,
    /// The time of two batches, as a fraction of the SLO.
    stress: f64,
}

/// The forecast for a layout.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Forecast {
    /// The fraction of the requests of each priority that would miss, with the highest priority first.
    pub(super) missed: Vec<f64>,
    /// The mean of the models' `stress`, weighted by their request rates.
    pub(super) stress: f64,
}

impl Forecast {
    /// Returns the [weighted] sum of the miss rates. Adds 1 % of the mean stress, which decides between
    /// layouts with equal miss rates.
    pub(super) fn loss(&self) -> f64 {
        weighted(self.missed.iter().copied()) + self.stress / 100.0
    }
}

/// Returns the forecast for a layout.
pub(super) fn forecast(layout: &Layout, demands: &[Demand<'_>], gpu: &SharedGpu) -> Forecast {
    let own: Vec<Occupant> = demands.iter().map(|demand| occupant(layout, demand, gpu)).collect();
    let mut states: Vec<Steady> =
        demands.iter().map(|_| Steady { rows: 1, busy: 0.5, kept_per_s: 0.0, stress: 0.0 }).collect();
    for _ in 0..ROUNDS {
        let others: Vec<Occupant> =
            (0..demands.len()).map(|at| meeting(own[at], &demands[at], &states[at])).collect();
        for at in 0..demands.len() {
            let beside = others.iter().enumerate().filter(|(other, _)| *other != at).map(|(_, other)| *other);
            states[at] = steady(&demands[at], own[at], beside, gpu);
        }
    }
    let mut priorities: Vec<u32> = demands.iter().map(|demand| demand.tenant.priority).collect();
    priorities.sort_unstable();
    priorities.dedup();
    let part_missed = |priority: &u32| {
        let here = demands.iter().zip(&states).filter(|(demand, _)| demand.tenant.priority == *priority);
        let (offered, kept) = here.fold((0.0, 0.0), |(offered, kept), (demand, state)| {
            (offered + demand.rows_per_s, kept + state.kept_per_s)
        });
        if offered > 0.0 { 1.0 - kept / offered } else { 0.0 }
    };
    let offered: f64 = demands.iter().map(|demand| demand.rows_per_s).sum();
    let stress: f64 =
        demands.iter().zip(&states).map(|(demand, state)| demand.rows_per_s * state.stress).sum();
    Forecast { missed: priorities.iter().map(part_missed).collect(), stress: stress / offered.max(1.0) }
}

fn occupant(layout: &Layout, demand: &Demand<'_>, gpu: &SharedGpu) -> Occupant {
    let part = layout.part_of(demand.tenant.model);
    let own = match &gpu.division {
        Some(division) => gpu.occupant(division.groups_in(part)),
        None => {
            let sms = (f64::from(gpu.sms.0) * part.fraction()).round();
            Occupant::anywhere(Sms(sms as u32))
        }
    };
    own.with_priority(ClientPriority::of(demand.tenant.priority))
}

/// Returns the occupant that represents a model's mean effect on the other models. The model executes
/// for its fraction `busy` of the time.
fn meeting(own: Occupant, demand: &Demand<'_>, state: &Steady) -> Occupant {
    own.executing(demand.execution, state.rows).busy(state.busy)
}

fn steady(
    demand: &Demand<'_>,
    own: Occupant,
    beside: impl Iterator<Item = Occupant> + Clone,
    gpu: &SharedGpu,
) -> Steady {
    let time = |rows: u32| gpu.time(demand.execution, rows, own, beside.clone()).as_secs_f64().max(1e-6);
    let slo = demand.slo.as_secs_f64();
    let sizes = (0..).map(|power| 1_u32 << power).take_while(|&rows| rows < demand.max_batch);
    let mut largest = Steady { rows: 1, busy: 1.0, kept_per_s: 0.0, stress: 2.0 * time(1) / slo };
    for rows in sizes.chain([demand.max_batch]) {
        let took = time(rows);
        let stress = 2.0 * took / slo;
        if stress > 1.0 {
            break;
        }
        let carries = f64::from(rows) / took * KEEPS_UP;
        let kept_per_s = demand.rows_per_s.min(carries);
        largest =
            Steady { rows, busy: (demand.rows_per_s / carries).min(1.0) * KEEPS_UP, kept_per_s, stress };
        if carries >= demand.rows_per_s {
            break;
        }
    }
    largest
}

#[cfg(test)]
mod tests {
    use shadowslice_shared::profile::ExecutionRow;

    use super::super::super::layout::candidates;
    use super::*;

    const GPU: Sms = Sms(128);

    /// Returns execution times for which a row takes `ms` on all SMs, and twice as long on half of
    /// them. The time is proportional to the number of rows.
    fn execution(ms: f64, kernels: u32) -> Execution {
        let row = |batch: u32| ExecutionRow {
            batch,
            ms: [4.0, 2.0, 1.0].map(|times| times * ms * f64::from(batch)).to_vec(),
        };
        Execution::new(vec![Sms(32), Sms(64), GPU], vec![row(1), row(16)]).unwrap().with_kernels(kernels)
    }

    fn demand(
        model: usize,
        priority: u32,
        slo_ms: u64,
        rows_per_s: f64,
        execution: &Execution,
    ) -> Demand<'_> {
        let slo = Duration::from_millis(slo_ms);
        let tenant = LayoutTenant { model, priority, work: 0.5 };
        Demand { tenant, rows_per_s, slo, max_batch: 16, execution }
    }

    #[test]
    fn a_model_alone_keeps_what_it_carries() {
        let execution = execution(1.0, 100);
        let gpu = SharedGpu::new(GPU);
        let missed = |rate| forecast(&Layout::AT_REST, &[demand(0, 1, 40, rate, &execution)], &gpu).missed[0];
        assert_eq!(missed(400.0), 0.0);
        assert!((missed(1700.0) - 0.5).abs() < 0.01, "the model carries 850 rows per second");
    }

    #[test]
    fn many_short_kernels_are_better_off_apart_from_few_long_ones() {
        let (short, long) = (execution(0.5, 400), execution(2.0, 40));
        let demands = [demand(0, 1, 8, 300.0, &short), demand(1, 1, 200, 300.0, &long)];
        let gpu = SharedGpu::new(GPU);
        let at_rest = forecast(&Layout::AT_REST, &demands, &gpu);
        let tenants: Vec<LayoutTenant> = demands.iter().map(|demand| demand.tenant).collect();
        let best = candidates(&tenants, &tenants, Some(tenants[0]))
            .into_iter()
            .map(|layout| forecast(&layout, &demands, &gpu))
            .min_by(|one, other| one.loss().total_cmp(&other.loss()))
            .unwrap();
        assert!(at_rest.missed[0] > 0.4, "{at_rest:?}");
        assert!(best.missed[0] < 0.1, "{best:?}");
    }

    #[test]
    fn the_first_priority_hardly_waits_for_others_and_they_have_what_it_leaves() {
        let (short, long) = (execution(0.5, 400), execution(2.0, 40));
        let missed = |first: f64, second: f64| {
            let demands = [demand(0, 1, 8, first, &short), demand(1, 2, 200, second, &long)];
            forecast(&Layout::AT_REST, &demands, &SharedGpu::new(GPU)).missed
        };
        let [first, second] = missed(300.0, 300.0)[..] else { panic!("two priorities") };
        assert!(first < 0.05 && second < 0.05, "{first} {second}");
        assert!(missed(1000.0, 300.0)[1] > 0.1, "the first one takes half of the time");
    }
}
