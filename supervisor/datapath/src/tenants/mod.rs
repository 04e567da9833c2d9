//! The tenants of this supervisor: what each may ask for, what it asked for, and what it used.
//!
//! The scheduler divides the SM time of the GPUs among tenants ([`shadowslice_policy::tenants`]). This module
//! applies the limits on each tenant's requests, before a request's tensors are parsed.

mod membership;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use governor::clock::{Clock as _, DefaultClock};
use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};
pub use membership::TenantMembership;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use shadowslice_config::{DEFAULT_TENANT, RequestRate, TenantConfig, TenantsConfig};
use shadowslice_policy::tenants::MAX_TENANTS;
pub use shadowslice_policy::tenants::TenantId;

use crate::pipeline::{SmAccount, SmUse};

/// The time after which a client should repeat a request that exceeded `in_flight`. It is the shortest time
/// that the header `Retry-After` can express.
const IN_FLIGHT_RETRY: Duration = Duration::from_secs(1);

/// A request that exceeds a limit of its tenant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TenantRefusal {
    #[error("tenant '{tenant}' exceeds its rate of {requests} requests in {} s; try again after {} ms", .per.as_secs(), .retry_after.as_millis())]
    Rate { tenant: String, requests: u32, per: Duration, retry_after: Duration },
    #[error(
        "tenant '{tenant}' has {limit} requests in flight, its maximum; wait for answers before you send more"
    )]
    InFlight { tenant: String, limit: u32 },
}

impl TenantRefusal {
    /// Returns the time after which the client should send the request again.
    pub fn retry_after(&self) -> Duration {
        match self {
            Self::Rate { retry_after, .. } => *retry_after,
            Self::InFlight { .. } => IN_FLIGHT_RETRY,
        }
    }
}

/// All tenants. The first one is the default tenant.
#[derive(Debug)]
pub struct Tenants(Vec<Tenant>);

#[derive(Debug)]
struct Tenant {
    name: String,
    weight: f64,
    rate: Option<LimitedRate>,
    max_in_flight: Option<u32>,
    in_flight: AtomicU32,
    counts: AtomicTenantCounts,
    /// The use of each GPU.
    sm_time: Mutex<Vec<Arc<SmAccount>>>,
}

#[derive(Debug)]
struct LimitedRate {
    configured: RequestRate,
    limiter: DefaultDirectRateLimiter,
}

#[derive(Debug, Default)]
struct AtomicTenantCounts {
    answered: AtomicU64,
    unanswered: AtomicU64,
    over_rate: AtomicU64,
    over_in_flight: AtomicU64,
}

/// The requests of a tenant since the supervisor started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TenantCounts {
    /// The number of requests that were answered.
    pub answered: u64,
    /// The number of requests within the tenant's limits that were not answered.
    pub unanswered: u64,
    /// The number of requests that were refused because of `rate`.
    pub over_rate: u64,
    /// The number of requests that were refused because of `in_flight`.
    pub over_in_flight: u64,
}

/// The requests of a tenant and what it used.
#[derive(Debug, Clone, PartialEq)]
pub struct TenantReport<'t> {
    pub name: &'t str,
    pub weight: f64,
    pub in_flight: u32,
    pub counts: TenantCounts,
    pub sm_use: SmUse,
}

impl Tenants {
    /// Creates the tenants of a configuration. Without configured tenants, there is only the default tenant.
    pub fn new(config: &TenantsConfig) -> Arc<Self> {
        let is_default = |tenant: &&TenantConfig| tenant.name == DEFAULT_TENANT;
        let default = config.list.iter().find(is_default).map_or_else(Tenant::unlimited, Tenant::new);
        let others = config.list.iter().filter(|tenant| !is_default(tenant)).map(Tenant::new);
        Arc::new(Self(std::iter::once(default).chain(others).take(MAX_TENANTS).collect()))
    }

    /// Returns true if all requests belong to the default tenant, and it has no limits.
    pub fn is_trivial(&self) -> bool {
        matches!(&self.0[..], [only] if only.rate.is_none() && only.max_in_flight.is_none())
    }

    /// Returns the tenant with this name.
    pub fn find(&self, name: &str) -> Option<TenantId> {
        let index = self.0.iter().position(|tenant| tenant.name == name)?;
        u8::try_from(index).ok().map(TenantId)
    }

    /// Returns the weights in the order of the ids.
    pub fn weights(&self) -> Vec<f64> {
        self.0.iter().map(|tenant| tenant.weight).collect()
    }

    /// Creates the accounts of a GPU, one for each tenant.
    pub(crate) fn open_accounts(&self) -> Vec<Arc<SmAccount>> {
        let open = |tenant: &Tenant| {
            let account = Arc::<SmAccount>::default();
            tenant.sm_time.lock().push(Arc::clone(&account));
            account
        };
        self.0.iter().map(open).collect()
    }

    /// Returns a place for a request of this tenant, which counts how the request ends.
    ///
    /// # Errors
    ///
    /// Returns an error if the request exceeds a limit of the tenant.
    pub fn admit(self: &Arc<Self>, id: TenantId) -> Result<TenantPlace, TenantRefusal> {
        if let Some(tenant) = self.0.get(id.index()) {
            tenant.admit()?;
        }
        Ok(TenantPlace { tenants: Arc::clone(self), id, is_answered: AtomicBool::new(false) })
    }

    /// Returns what each tenant asked for and used, in the order of the ids.
    pub fn report(&self) -> impl Iterator<Item = TenantReport<'_>> {
        self.0.iter().map(|tenant| TenantReport {
            name: &tenant.name,
            weight: tenant.weight,
            in_flight: tenant.in_flight.load(Relaxed),
            counts: tenant.counts.read(),
            sm_use: tenant.sm_time.lock().iter().map(|account| account.total()).sum(),
        })
    }
}

impl Tenant {
    fn unlimited() -> Self {
        let (name, counts, sm_time) = (DEFAULT_TENANT.to_owned(), Default::default(), Default::default());
        let in_flight = AtomicU32::new(0);
        Self { name, weight: 1.0, rate: None, max_in_flight: None, in_flight, counts, sm_time }
    }

    fn new(config: &TenantConfig) -> Self {
        let TenantConfig { name, weight, rate, in_flight, members: _ } = config;
        let limiter = |configured: RequestRate| {
            // The quota has one request per interval, and a burst of all requests of the period.
            let interval = configured.per / configured.requests.get();
            let quota = Quota::with_period(interval)?.allow_burst(configured.requests);
            Some(LimitedRate { configured, limiter: RateLimiter::direct(quota) })
        };
        Self {
            name: name.clone(),
            weight: *weight,
            rate: rate.and_then(limiter),
            max_in_flight: *in_flight,
            ..Self::unlimited()
        }
    }

    fn admit(&self) -> Result<(), TenantRefusal> {
        let taken = self.in_flight.fetch_add(1, Relaxed);
        let admitted = self.check_in_flight(taken).and_then(|()| self.check_rate());
        if admitted.is_err() {
            self.in_flight.fetch_sub(1, Relaxed);
        }
        admitted
    }

    fn check_in_flight(&self, taken: u32) -> Result<(), TenantRefusal> {
        let Some(limit) = self.max_in_flight.filter(|&limit| taken >= limit) else { return Ok(()) };
        self.counts.over_in_flight.fetch_add(1, Relaxed);
        Err(TenantRefusal::InFlight { tenant: self.name.clone(), limit })
    }

    fn check_rate(&self) -> Result<(), TenantRefusal> {
        let Some(LimitedRate { configured, limiter }) = &self.rate else { return Ok(()) };
        limiter.check().map_err(|early| {
            self.counts.over_rate.fetch_add(1, Relaxed);
            let &RequestRate { requests, per } = configured;
            let retry_after = early.wait_time_from(DefaultClock::default().now());
            TenantRefusal::Rate { tenant: self.name.clone(), requests: requests.get(), per, retry_after }
        })
    }
}

impl AtomicTenantCounts {
    fn read(&self) -> TenantCounts {
        TenantCounts {
            answered: self.answered.load(Relaxed),
            unanswered: self.unanswered.load(Relaxed),
            over_rate: self.over_rate.load(Relaxed),
            over_in_flight: self.over_in_flight.load(Relaxed),
        }
    }
}

/// The place of a request among those of its tenant. It is free again when this value is dropped.
#[derive(Debug)]
pub struct TenantPlace {
    tenants: Arc<Tenants>,
    id: TenantId,
    is_answered: AtomicBool,
}

impl TenantPlace {
    /// Records that the model answered the request.
    pub fn mark_answered(&self) {
        self.is_answered.store(true, Relaxed);
    }
}

impl Drop for TenantPlace {
    fn drop(&mut self) {
        let Some(tenant) = self.tenants.0.get(self.id.index()) else { return };
        tenant.in_flight.fetch_sub(1, Relaxed);
        let AtomicTenantCounts { answered, unanswered, .. } = &tenant.counts;
        let ended = if self.is_answered.load(Relaxed) { answered } else { unanswered };
        ended.fetch_add(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    fn config(name: &str, rate: Option<u32>, in_flight: Option<u32>) -> TenantConfig {
        let rate = rate.and_then(NonZeroU32::new);
        let rate = rate.map(|requests| RequestRate { requests, per: Duration::from_hours(1) });
        TenantConfig { name: name.to_owned(), weight: 2.0, rate, in_flight, members: None }
    }

    #[test]
    fn a_tenant_has_at_most_its_rate_and_its_requests_in_flight() {
        let list = vec![config("a", Some(3), None), config("b", None, Some(2))];
        let tenants = Tenants::new(&TenantsConfig { list, header: None });
        assert_eq!(tenants.weights(), [1.0, 2.0, 2.0]);
        let [a, b] = ["a", "b"].map(|name| tenants.find(name).unwrap());
        (0..3).for_each(|_| tenants.admit(a).unwrap().mark_answered());
        let refusal = tenants.admit(a).unwrap_err();
        assert!((1_000..=1_200).contains(&refusal.retry_after().as_secs()), "{refusal:?}");
        let places: Vec<_> = (0..2).map(|_| tenants.admit(b).unwrap()).collect();
        assert_eq!(tenants.admit(b).unwrap_err(), TenantRefusal::InFlight { tenant: "b".into(), limit: 2 });
        drop(places);
        tenants.admit(b).unwrap();
        (0..100).for_each(|_| drop(tenants.admit(TenantId::DEFAULT).unwrap()));
        let reports: Vec<_> = tenants.report().map(|report| (report.in_flight, report.counts)).collect();
        let expected = [
            TenantCounts { unanswered: 100, ..TenantCounts::default() },
            TenantCounts { answered: 3, over_rate: 1, ..TenantCounts::default() },
            TenantCounts { unanswered: 3, over_in_flight: 1, ..TenantCounts::default() },
        ];
        assert_eq!(reports, expected.map(|counts| (0, counts)));
    }

    #[test]
    fn the_default_tenant_can_have_limits() {
        assert!(Tenants::new(&TenantsConfig::default()).is_trivial());
        let list = vec![config("a", None, None), config("default", None, Some(1))];
        let tenants = Tenants::new(&TenantsConfig { list, header: None });
        assert_eq!((tenants.find("default"), tenants.weights().len()), (Some(TenantId::DEFAULT), 2));
        let _place = tenants.admit(TenantId::DEFAULT).unwrap();
        assert!(!tenants.is_trivial() && tenants.admit(TenantId::DEFAULT).is_err());
    }
}
