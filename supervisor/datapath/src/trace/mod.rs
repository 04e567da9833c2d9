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

pub use journal::{Ending, Handover, Journal, Journey, Lost, Ran, RanAt, Try};
pub use parent::Parent;
pub use span::{Outcome, Protocol, Span, Traced};
pub use tracer::{Counts, Tracer};
