//! Sends the traces of requests to a collector over gRPC (OTLP). A separate thread sends them.
//!
//! Requests never wait for this thread. While the collector is unreachable, spans are dropped and
//! counted, and a log message reports the number once a minute.

mod attributes;
mod exporter;
mod outage;
mod spans;

pub use exporter::{Exporter, ExporterError};
