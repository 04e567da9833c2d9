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
//! Memory is bounded: an HTTP connection holds one request of at most `limits.request_bytes`, and
//! as much again if the request came compressed; a gRPC request is read only once it is among the
//! `limits.in_flight`.

mod accept;
mod answer;
mod authority;
mod body;
mod codec;
mod compression;
mod contents;
mod describe;
mod envelope;
mod grpc;
mod health;
mod http;
mod json;
mod listen;
mod memory_routes;
mod metrics;
mod model;
mod repository;
mod request_error;
mod routes;
mod shared_memory;
mod slow_reader;
mod statistics;
mod stop;
mod tensors;
mod traced;
mod unsupported;
mod values;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit, watch};

use shadowslice_config::{Limits, Listener};
use shadowslice_datapath::pipeline::Failure;
use shadowslice_datapath::repository::Repository;
use shadowslice_datapath::router::Router;
use shadowslice_datapath::trace::Tracer;

pub use listen::BindError;
pub use metrics::{MetricsListeners, Render};

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
}

#[derive(Debug)]
pub struct Ingress {
    http: Vec<listen::Bound>,
    grpc: Vec<listen::Bound>,
    limits: Limits,
}

impl Ingress {
    /// Takes all the addresses, or none: sockets made before a failure are removed again. Must be
    /// called on a Tokio runtime. Connections wait in their backlogs until [`Ingress::run`].
    pub async fn bind(http: &[Listener], grpc: &[Listener], limits: &Limits) -> Result<Self, BindError> {
        let http = listen::bind_all("HTTP", http).await?;
        Ok(Self { http, grpc: listen::bind_all("gRPC", grpc).await?, limits: *limits })
    }

    /// Serves until `stop` holds true (or its sender is gone). Then no connection is accepted, the
    /// Unix sockets are removed, idle connections are closed, and requests under way are answered;
    /// returns when the last connection has ended, at most 30 s later.
    pub async fn run(
        self,
        router: Arc<Router>,
        repository: Arc<Repository>,
        tracer: Option<Arc<Tracer>>,
        stop: watch::Receiver<bool>,
    ) {
        let front = Arc::new(Frontend {
            router,
            regions: shared_memory::Regions::new(self.limits.shared_memory),
            watchers: Arc::new(Semaphore::new(health::WATCHERS)),
            repository,
            tracer,
            in_flight: Semaphore::new(self.limits.in_flight.min(Semaphore::MAX_PERMITS)),
            request_bytes: usize::try_from(self.limits.request_bytes).unwrap_or(usize::MAX),
        });
        let http = self.http.into_iter().map(|bound| (accept::Service::Http(front.clone()), bound));
        let grpc = self.grpc.into_iter().map(|bound| (accept::Service::Grpc(front.clone()), bound));
        accept::run(http.chain(grpc), self.limits.connections, stop::Stop::new(stop, DRAIN)).await;
    }
}

#[derive(Debug)]
struct Frontend {
    router: Arc<Router>,
    repository: Arc<Repository>,
    tracer: Option<Arc<Tracer>>,
    in_flight: Semaphore,
    watchers: Arc<Semaphore>,
    regions: shared_memory::Regions,
    request_bytes: usize,
}

impl Frontend {
    fn admit(&self) -> Result<SemaphorePermit<'_>, Failure> {
        self.in_flight.try_acquire().map_err(|_| {
            Failure::Unavailable(
                "too many requests in flight; try again, or raise limits.in_flight".to_owned(),
            )
        })
    }
}

#[cfg(test)]
mod tests;
