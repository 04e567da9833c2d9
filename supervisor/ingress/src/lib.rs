//! The Open Inference Protocol over HTTP and gRPC, on Unix sockets and TCP.
//!
//! Requests are checked here, so that a pipeline sees only requests that its model takes.
//! Deviations from the protocol as Triton speaks it: there is one version of every model, "1";
//! classification, sequences and the extensions in `unsupported` are not served, and a request
//! that needs them is refused; a gRPC message over the limit is answered OUT_OF_RANGE, before it
//! is read.
//!
//! [`MetricsListeners`] have room and an end of their own: they answer while clients wait, and
//! until the last client is served.
//!
//! Memory is bounded by `limits.memory`: a request's bytes are reserved before they are read, and
//! its answer's until they have been written. An inference that has been read takes one of the
//! `limits.in_flight`. Of both, no connection can take all.

mod admission;
mod api;
mod tensors;
mod transport;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, watch};

use shadowslice_config::{LimitsConfig, Listener};
use shadowslice_datapath::access::AccessLog;
use shadowslice_datapath::host_counters::HostCounts;
use shadowslice_datapath::peer::{Guard, Refusals};
use shadowslice_datapath::repository::Repository;
use shadowslice_datapath::router::Router;
use shadowslice_datapath::sockets::{Inherited, PassableSocket};
use shadowslice_datapath::trace::Tracer;

pub use admission::stop::Course;
pub use api::metrics::{Events, File, MetricsListeners, Shown};
pub use transport::expiry::{CertificateExpiry, expiry_warnings};
pub use transport::listen::{BindError, Certificates};

use admission::budgets::{Pool, Pools};
use admission::stop;
use api::{grpc, health, http};
use proto::system_shared_memory_status_response::RegionStatus;
use tensors::shared_memory::Regions;
use transport::{accept, listen};

/// In bytes, for health checks over gRPC, beside `limits.memory`.
const HEALTH_BYTES: u64 = 32 << 20;

/// How long connections may take to end once serving is to end.
const DRAIN: Duration = Duration::from_secs(30);

#[allow(
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    reason = "generated from the protocol's definition"
)]
mod proto {
    tonic::include_proto!("inference");

    pub(super) mod health {
        tonic::include_proto!("grpc.health.v1");
    }

    pub(super) mod reflection {
        tonic::include_proto!("grpc.reflection.v1");
    }

    pub(super) mod reflection_v1alpha {
        tonic::include_proto!("grpc.reflection.v1alpha");
    }
}

#[derive(Debug)]
pub struct Ingress {
    http: Vec<listen::Bound>,
    grpc: Vec<listen::Bound>,
    limits: LimitsConfig,
    pools: Arc<Pools>,
    regions: Arc<Regions>,
}

/// Clients' shared memory, as one supervisor passes it to the next.
#[derive(Debug, Clone)]
pub struct SharedMemory(Arc<Regions>);

/// Name, key, offset and size in bytes.
pub type Region = (String, String, u64, u64);

impl SharedMemory {
    pub fn regions(&self) -> Vec<Region> {
        let told = self.0.told().into_iter();
        told.map(|region| (region.name, region.key, region.offset, region.byte_size)).collect()
    }

    /// A region whose file is gone is left out.
    pub fn take_over(&self, regions: Vec<Region>) {
        let region = |(name, key, offset, byte_size)| RegionStatus { name, key, offset, byte_size };
        self.0.take_over(regions.into_iter().map(region).collect());
    }
}

/// In bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestMemory {
    pub reserved: u64,
    pub limit: u64,
}

impl Ingress {
    /// Takes all the addresses, or none: sockets made before a failure are removed again. Must be
    /// called on a Tokio runtime. Connections wait in their backlogs until [`Ingress::run`].
    pub async fn bind(
        http: &[Listener],
        grpc: &[Listener],
        limits: &LimitsConfig,
        inherited: &mut Inherited,
        refusals: &Arc<Refusals>,
    ) -> Result<Self, BindError> {
        let regions = Arc::new(Regions::new(Guard::of(&limits.shared_memory, refusals)?));
        let http = listen::bind_all(http::SPOKEN, http, inherited, refusals).await?;
        let grpc = listen::bind_all(grpc::SPOKEN, grpc, inherited, refusals).await?;
        let bytes = limits.memory.unwrap_or(u64::MAX);
        let pools = Arc::new(Pools::new(limits.in_flight as u64, bytes, HEALTH_BYTES));
        Ok(Self { http, grpc, limits: limits.clone(), pools, regions })
    }

    /// Tells at any time what requests and answers have.
    pub fn memory(&self) -> impl Fn() -> RequestMemory + Send + Sync + use<> {
        let pools = Arc::clone(&self.pools);
        move || RequestMemory { reserved: pools.taken(Pool::Memory), limit: pools.size(Pool::Memory) }
    }

    /// Tells at any time what was answered and refused since the start.
    pub fn counts(&self) -> impl Fn() -> HostCounts + Send + Sync + use<> {
        let pools = Arc::clone(&self.pools);
        move || pools.tally().counts()
    }

    /// Returns the certificates of its listeners, and of those for metrics.
    pub fn certificates(&self, metrics: &MetricsListeners) -> Certificates {
        Certificates::of(self.http.iter().chain(&self.grpc).chain(metrics.bound()))
    }

    pub fn shared_memory(&self) -> SharedMemory {
        SharedMemory(Arc::clone(&self.regions))
    }

    /// What another supervisor may listen on next.
    pub fn passable(&self) -> Vec<PassableSocket> {
        self.http.iter().chain(&self.grpc).map(listen::Bound::passable).collect()
    }

    /// Serves for as long as `stop` says so (and its sender is there). Then no connection is accepted,
    /// the Unix sockets are removed unless they were passed on, idle connections are closed, and
    /// requests under way are answered; returns when the last connection has ended, at most 30 s
    /// later.
    pub async fn run(
        self,
        router: Arc<Router>,
        repository: Arc<Repository>,
        (tracer, access): (Option<Arc<Tracer>>, Option<Arc<AccessLog>>),
        stop: watch::Receiver<Course>,
    ) {
        let front = Arc::new(Frontend {
            router,
            regions: self.regions,
            watchers: Arc::new(Semaphore::new(health::WATCHERS)),
            repository,
            tracer,
            access,
            request_bytes: usize::try_from(self.limits.request_bytes).unwrap_or(usize::MAX),
        });
        let http = self.http.into_iter().map(|bound| (accept::Service::Http(front.clone()), bound));
        let grpc = self.grpc.into_iter().map(|bound| (accept::Service::Grpc(front.clone()), bound));
        let stop = stop::Stop::new(stop, DRAIN, self.limits.keep_alive);
        accept::run(http.chain(grpc), self.limits.connections, self.pools, stop).await;
    }
}

#[derive(Debug)]
struct Frontend {
    router: Arc<Router>,
    repository: Arc<Repository>,
    tracer: Option<Arc<Tracer>>,
    /// `None` if answers are not logged.
    access: Option<Arc<AccessLog>>,
    watchers: Arc<Semaphore>,
    regions: Arc<Regions>,
    request_bytes: usize,
}

#[cfg(test)]
mod tests;
