//! The metrics of tenants.

use super::table::{by, one};
use super::text::{Metric, MetricSample, counter, gauge};
use crate::status::TenantStatus;

pub(super) const METRICS: &[Metric<TenantStatus>] = &[
    counter("shadowslice_tenant_requests_total", "Requests of the tenant, by outcome.", outcomes),
    gauge("shadowslice_tenant_requests_in_flight", "Requests of the tenant in flight.", |tenant| {
        one(f64::from(tenant.in_flight))
    }),
    counter(
        "shadowslice_tenant_sm_seconds_total",
        "SM time of the tenant's rows in batches, in SM-seconds.",
        |tenant| one(tenant.sm_use.sm_seconds),
    ),
    counter(
        "shadowslice_tenant_energy_joules_total",
        "Energy of the GPUs in proportion to the tenant's SM time.",
        |tenant| one(tenant.sm_use.energy_j),
    ),
];

fn outcomes(tenant: &TenantStatus) -> Vec<MetricSample> {
    let requests = &tenant.requests;
    let outcomes = [
        ("answered", requests.answered),
        ("unanswered", requests.unanswered),
        ("over_rate", requests.over_rate),
        ("over_in_flight", requests.over_in_flight),
    ];
    by("outcome", &outcomes)
}
