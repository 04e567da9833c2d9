//! Traces of requests: the choice of traced requests, their trace ids, and the steps of each.
//!
//! ```text
//! headers ─ Tracer::begin ─▶ RequestSpan ─ Journal ─▶ ingress, pipeline: steps of the request
//!                             └─ dropped ─▶ TracedRequest ─▶ a bounded queue for the exporter
//! ```
//!
//! Nothing here blocks. A request that is not traced is not recorded, and needs no clock reading.

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
