//! Tests of the list of layouts in a trial, and of their order.

use shadowslice_shared::groups::GpuPart;

use super::*;

#[test]
fn the_gentlest_layout_is_tried_first_and_those_that_are_forecast_to_be_worse_are_not() {
    let row = |batch: u32| ExecutionRow { batch, ms: vec![f64::from(batch), f64::from(batch) / 4.0] };
    let execution = Execution::new(vec![Sms(33), GPU], vec![row(1), row(16)]).unwrap();
    let tenant = |model: usize, priority: u32| LayoutTenant { model, priority, work: 0.4 };
    let all = [tenant(0, 1), tenant(1, 2), tenant(2, 2)];
    let demand = |tenant: &LayoutTenant| Demand {
        tenant: *tenant,
        rows_per_s: 1500.0,
        slo: Duration::from_millis(20),
        max_batch: 16,
        execution: &execution,
    };
    let demands: Vec<Demand<'_>> = all.iter().map(demand).collect();
    let (layouts, shape) = (candidates(&all, &all, Some(all[0])), SharedGpu::new(GPU));
    let listed = |missed: f64| shortlist(layouts.clone(), Some(&demands), (&Layout::AT_REST, missed), &shape);
    let loss = |layout: &Layout| forecast(layout, &demands, &shape).loss();
    let all = listed(f64::INFINITY);
    assert_eq!(all[0].pattern, Pattern::LowerHalves);
    assert!(all[1..].is_sorted_by_key(loss) && loss(&all[1]) < loss(&all[all.len() - 1]));
    assert!(all.len() < layouts.len(), "two of each pattern at most");
    let present = &all[all.len() / 2];
    let few = shortlist(layouts.clone(), Some(&demands), (present, 0.0), &shape);
    assert!(few.len() < all.len() && few.len() > 1);
    assert!(
        few[1..].iter().all(|layout| loss(layout) < loss(present)),
        "the gentlest layout is always tried"
    );
    let unknown = shortlist(layouts.clone(), None, (&Layout::AT_REST, 1.0), &shape);
    let mut patterns: Vec<Pattern> = layouts.iter().map(|layout| layout.pattern).collect();
    patterns.dedup();
    assert_eq!(unknown.iter().map(|layout| layout.pattern).collect::<Vec<_>>(), patterns);
}

#[test]
fn parts_of_layouts_are_of_the_family_that_workers_prepare() {
    let family: Vec<GpuPart> = GpuPart::family().collect();
    for models in 2..8_usize {
        let tenant = |model: usize| LayoutTenant {
            model,
            priority: 1 + model as u32 % 3,
            work: 0.1 * (1 + model % 5) as f64,
        };
        let tenants: Vec<LayoutTenant> = (0..models).map(tenant).collect();
        for layout in candidates(&tenants, &tenants, tenants.first().copied()) {
            let parts = (0..models).map(|model| layout.part_of(model));
            assert!(parts.clone().all(|part| part == GpuPart::WHOLE || family.contains(&part)), "{layout:?}");
        }
    }
}

#[test]
fn many_short_kernels_are_kept_apart_from_few_long_ones() {
    let row = |batch: u32| ExecutionRow { batch, ms: vec![2.0 * f64::from(batch), f64::from(batch)] };
    let execution = |kernels: u32| {
        Execution::new(vec![Sms(66), GPU], vec![row(1), row(8)]).unwrap().with_kernels(kernels)
    };
    let (short, long) = (execution(400), execution(20));
    // A distribution by work assigns the second and the third model to the same half.
    let tenant = |model: usize, priority: u32, work: f64| LayoutTenant { model, priority, work };
    let all = [tenant(0, 1, 0.1), tenant(1, 2, 0.2), tenant(2, 2, 0.2), tenant(3, 2, 0.4)];
    let demand = |tenant: &LayoutTenant| {
        let (rows_per_s, slo_ms, execution) =
            if tenant.model == 1 { (300.0, 10, &short) } else { (80.0, 100, &long) };
        Demand { tenant: *tenant, rows_per_s, slo: Duration::from_millis(slo_ms), max_batch: 8, execution }
    };
    let demands: Vec<Demand<'_>> = all.iter().map(demand).collect();
    let layouts = candidates(&all, &all, Some(all[0]));
    let list = shortlist(layouts, Some(&demands), (&Layout::AT_REST, 1.0), &SharedGpu::new(GPU));
    let halves: Vec<&Layout> = list.iter().filter(|layout| layout.pattern == Pattern::LowerHalves).collect();
    let [by_work, best] = halves[..] else { panic!("{list:?}") };
    assert!(by_work.part_of(1) == by_work.part_of(2));
    assert!(best.part_of(1) != best.part_of(2) && best.part_of(2) == best.part_of(3), "{best:?}");
}
