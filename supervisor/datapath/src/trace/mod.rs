//! Traces requests: selects the requests to trace, sets the trace ids, and records the steps of
//! each request.
//!
//! ```text
//! headers ─ Tracer::begin ─▶ RequestSpan ─ Journal ─▶ ingress, pipeline: steps of the request
//!                                 └─ dropped ─▶ TracedRequest ─▶ a bounded queue for the exporter
//! ```
//!
//! No function in this module blocks. If a request is not traced, nothing is recorded and the clock
//! is not read.

mod journal;
mod parent;
mod span;
mod tracer;

pub use journal::{
    Journal, LostReason, RequestAttempt, RequestTrace, RouteChange, RunEnd, RunLocation, WorkerRun,
};
pub use parent::TraceParent;
pub use span::{RequestSpan, SpanProtocol, SpanStatus, TracedRequest};
pub use tracer::{SpanCounts, Tracer};
