//! The Open Inference Protocol over HTTP and gRPC, on Unix sockets and TCP.
//!
//! The code has four floors. `api` knows the protocol, and uses `tensors` and `transport`. Both use
//! `admission`. No floor uses a floor above it, except that the generated messages in `proto` name
//! the codec of `tensors`.
//!
//! A pipeline receives only requests that have been checked against its model. There are some
//! deviations from the protocol as Triton speaks it. Each model has one version, "1".
//! Classification, sequences and the extensions in `unsupported` are not supported, and a request
//! that needs them is refused. A gRPC message over the limit is answered with OUT_OF_RANGE before
//! it is read.
//!
//! [`MetricsListeners`] have limits and an end of their own. They answer while clients wait, and
//! until the last client is served.
//!
//! `limits.memory` bounds the memory. A request takes a permit for its bytes before they are read,
//! and for its answer until the answer is written. An inference that has been read takes one of the
//! places of `limits.in_flight`. No connection can take all of either.

mod admission;
mod api;
#[allow(
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    clippy::pedantic,
    reason = "generated from the protocol's definition"
)]
mod proto;
mod tensors;
mod transport;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

use shadowslice_config::{LimitsConfig, Listener};
use shadowslice_datapath::access::AccessLog;
use shadowslice_datapath::host_counters::HostCounts;
use shadowslice_datapath::peer::{Guard, Refusals};
use shadowslice_datapath::phase::PhaseReceiver;
use shadowslice_datapath::repository::Repository;
use shadowslice_datapath::router::Router;
use shadowslice_datapath::sockets::{Inherited, PassableSocket};
use shadowslice_datapath::tenants::TenantMembership;
use shadowslice_datapath::trace::Tracer;

pub use admission::BindError;
pub use api::{Events, File, MetricsListeners, Shown};
pub use tensors::{Region, SharedMemory};
pub use transport::{CertificateExpiry, Certificates, expiry_warnings};

use admission::{Budget, Budgets, Stop};
use api::{ApiService, Frontend, MAX_WATCHERS};
use transport::{BoundListener, Protocol, bind_all};

/// The memory for health checks over gRPC besides `limits.memory`, in bytes.
const HEALTH_BYTES: u64 = 32 << 20;

/// The time that connections have to end after the end of serving.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub struct Ingress {
    http: Vec<BoundListener>,
    grpc: Vec<BoundListener>,
    limits: LimitsConfig,
    budgets: Arc<Budgets>,
    regions: Arc<SharedMemory>,
    membership: TenantMembership,
}

/// The memory of requests and answers, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IngressMemory {
    pub reserved: u64,
    pub limit: u64,
}

impl Ingress {
    /// Binds all addresses, or none of them: after a failure, removes the sockets that were
    /// created. Must be called on a Tokio runtime. Connections wait in their backlogs until
    /// [`Ingress::run`].
    pub async fn bind(
        http: &[Listener],
        grpc: &[Listener],
        limits: &LimitsConfig,
        membership: TenantMembership,
        inherited: &mut Inherited,
        refusals: &Arc<Refusals>,
    ) -> Result<Self, BindError> {
        let regions = Arc::new(SharedMemory::new(Guard::of(&limits.shared_memory, refusals)?));
        let http = bind_all(Protocol::HTTP, http, inherited, refusals).await?;
        let grpc = bind_all(Protocol::GRPC, grpc, inherited, refusals).await?;
        let bytes = limits.memory.unwrap_or(u64::MAX);
        let budgets = Arc::new(Budgets::new(limits.in_flight as u64, bytes, HEALTH_BYTES));
        Ok(Self { http, grpc, limits: limits.clone(), budgets, regions, membership })
    }

    /// Returns a function that returns the current memory of requests and answers.
    pub fn memory(&self) -> impl Fn() -> IngressMemory + Send + Sync + use<> {
        let budgets = Arc::clone(&self.budgets);
        move || IngressMemory { reserved: budgets.used(Budget::Memory), limit: budgets.size(Budget::Memory) }
    }

    /// Returns a function that returns the numbers of answers and refusals since the start.
    pub fn counts(&self) -> impl Fn() -> HostCounts + Send + Sync + use<> {
        let budgets = Arc::clone(&self.budgets);
        move || budgets.counters().counts()
    }

    /// Returns the certificates of these listeners, and of those for metrics.
    pub fn certificates(&self, metrics: &MetricsListeners) -> Certificates {
        Certificates::of(self.http.iter().chain(&self.grpc).chain(metrics.bound()))
    }

    pub fn shared_memory(&self) -> Arc<SharedMemory> {
        Arc::clone(&self.regions)
    }

    /// Returns the sockets that the next supervisor may use.
    pub fn passable(&self) -> Vec<PassableSocket> {
        self.http.iter().chain(&self.grpc).map(BoundListener::passable).collect()
    }

    /// Serves until `stop` ends serving, or its sender is dropped. Then accepts no connections,
    /// removes the Unix sockets unless the next supervisor uses them, closes idle connections, and
    /// answers the requests in flight. Returns when the last connection has ended, at most 30 s
    /// later.
    pub async fn run(
        self,
        router: Arc<Router>,
        repository: Arc<Repository>,
        (tracer, access): (Option<Arc<Tracer>>, Option<Arc<AccessLog>>),
        stop: PhaseReceiver,
    ) {
        let front = Arc::new(Frontend {
            router,
            repository,
            tracer,
            access,
            watchers: Arc::new(Semaphore::new(MAX_WATCHERS)),
            regions: self.regions,
            membership: self.membership,
            request_bytes: usize::try_from(self.limits.request_bytes).unwrap_or(usize::MAX),
        });
        let http = self.http.into_iter().map(|bound| (ApiService::Http(front.clone()), bound));
        let grpc = self.grpc.into_iter().map(|bound| (ApiService::Grpc(front.clone()), bound));
        let stop = Stop::new(stop, DRAIN_TIMEOUT, self.limits.keep_alive);
        transport::run(http.chain(grpc), self.limits.connections, self.budgets, stop).await;
    }
}

#[cfg(test)]
mod tests;
