//! The Open Inference Protocol over HTTP and gRPC, on Unix sockets and TCP.
//!
//! [`Ingress::bind`] takes the addresses, [`Ingress::run`] serves on them until it is told to stop.
//! Requests are checked here, so that a pipeline sees only what its model takes. Deviations from the
//! protocol as Triton speaks it: there is one version of every model, "1"; shared memory regions,
//! classification, sequences and compressed bodies are not served, and say so where they would matter;
//! a gRPC message over the limit is answered OUT_OF_RANGE, before it is read.
//!
//! Memory is bounded: an HTTP connection holds one request of at most `limits.request_bytes`, and a gRPC
//! request is read only once it is one of the `limits.in_flight`.

mod accept;
mod answer;
mod authority;
mod body;
mod codec;
mod contents;
mod describe;
mod grpc;
mod http;
mod json;
mod listen;
mod model;
mod refusal;
mod routes;
mod stop;
mod tensors;
mod values;

use std::sync::Arc;

use tokio::sync::{Semaphore, SemaphorePermit, watch};

use crate::config::{Limits, Listener};
use crate::pipeline::Failure;
use crate::router::Router;

pub use listen::BindError;

/// The protocol's messages.
#[allow(
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    reason = "generated from the protocol's definition"
)]
mod proto {
    tonic::include_proto!("inference");
}

/// All addresses, bound.
#[derive(Debug)]
pub struct Ingress {
    bound: Vec<(accept::Protocol, listen::Bound)>,
    limits: Limits,
}

impl Ingress {
    /// Takes all the addresses, or none: sockets made before a failure are removed again.
    /// Connections wait in their backlogs until [`Ingress::run`]. Must be called on a Tokio runtime.
    pub async fn bind(http: &[Listener], grpc: &[Listener], limits: &Limits) -> Result<Self, BindError> {
        let http = http.iter().map(|listener| (accept::Protocol::Http, listener));
        let grpc = grpc.iter().map(|listener| (accept::Protocol::Grpc, listener));
        let mut bound = Vec::new();
        for (protocol, listener) in http.chain(grpc) {
            bound.push((protocol, listen::bind(listener).await?));
        }
        Ok(Self { bound, limits: *limits })
    }

    /// Serves until `stop` holds true (or its sender is gone). Then no connection is accepted, the Unix
    /// sockets are removed, idle connections are closed, and requests under way are answered; returns
    /// when the last connection has ended, at most 30 s later.
    pub async fn run(self, router: Arc<Router>, stop: watch::Receiver<bool>) {
        let front = Arc::new(Frontend {
            router,
            in_flight: Semaphore::new(self.limits.in_flight.min(Semaphore::MAX_PERMITS)),
            request_bytes: usize::try_from(self.limits.request_bytes).unwrap_or(usize::MAX),
        });
        accept::run(self.bound, &front, self.limits.connections, stop::Stop::new(stop)).await;
    }
}

/// What all connections share.
#[derive(Debug)]
struct Frontend {
    router: Arc<Router>,
    in_flight: Semaphore,
    request_bytes: usize,
}

impl Frontend {
    /// A place among the requests in flight, held until it is dropped.
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
