//! Sends traces of requests to a collector, by OTLP over gRPC, from a thread of its own.
//!
//! Nobody waits for it. While the collector is away, spans are dropped and counted, and the log says so once in a
//! while.

mod attributes;
mod exporter;
mod outage;
mod spans;

/// The protocol's messages.
#[allow(
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    reason = "generated from the protocol's definition"
)]
mod proto {
    tonic::include_proto!("opentelemetry.proto.collector.trace.v1");
}

pub use exporter::{Exporter, ExporterError};
