//! Sends traces of requests to a collector, by OTLP over gRPC, from a thread of its own.
//!
//! Requests never wait for it. While the collector is away, spans are dropped and counted, and the
//! log says so once in a while.

mod attributes;
mod exporter;
mod outage;
mod spans;

pub use exporter::{Exporter, ExporterError};
