//! Traces of requests: which requests are traced, under which trace, and the steps of each.
//!
//! ```text
//! headers ─ Tracer::begin ─▶ Span ─ Journal ─▶ ingress, pipeline: what happens to the request
//!                             └─ dropped ─▶ Traced ─▶ a bounded queue, for the exporter
//! ```
//!
//! Nothing here waits. A request that is not traced costs no notes and no reading of the clock.

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
