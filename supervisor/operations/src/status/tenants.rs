//! The status of tenants.

use serde::{Deserialize, Serialize};
use shadowslice_datapath::pipeline::SmUse;
use shadowslice_datapath::tenants::{TenantCounts, TenantReport, Tenants};

use super::table::{TableColumn, left, right};
use crate::figures;

/// The requests of a tenant and what it used since the supervisor started.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TenantStatus {
    pub name: String,
    /// The part of the SM time under load, relative to the other tenants.
    pub weight: f64,
    pub in_flight: u32,
    pub requests: TenantCounts,
    pub sm_use: SmUse,
}

/// Returns the status of each tenant, or nothing if there is only the default tenant without limits.
pub(crate) fn of_tenants(tenants: &Tenants) -> Vec<TenantStatus> {
    if tenants.is_trivial() {
        return Vec::new();
    }
    let status = |TenantReport { name, weight, in_flight, counts, sm_use }: TenantReport<'_>| TenantStatus {
        name: name.to_owned(),
        weight,
        in_flight,
        requests: counts,
        sm_use,
    };
    tenants.report().map(status).collect()
}

pub(super) const COLUMNS: [TableColumn<TenantStatus>; 6] = [
    left(0, "TENANT", |tenant| tenant.name.clone()),
    right(0, "WEIGHT", |tenant| tenant.weight.to_string()),
    right(0, "IN FLIGHT", |tenant| tenant.in_flight.to_string()),
    right(0, "ANSWERED", |tenant| figures::count(tenant.requests.answered)),
    right(0, "OVER LIMIT", |tenant| {
        figures::count(tenant.requests.over_rate + tenant.requests.over_in_flight)
    }),
    right(0, "SM·S", |tenant| format!("{:.1}", tenant.sm_use.sm_seconds)),
];
