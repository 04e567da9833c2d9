//! Sends traces of requests to a collector, by OTLP over gRPC, from its own thread.
//!
//! Requests never wait for this thread. While the collector is unreachable, spans are dropped and
//! counted, and the log reports that once a minute.

mod attributes;
mod exporter;
mod outage;
mod spans;

pub use exporter::{Exporter, ExporterError};
