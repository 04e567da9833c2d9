//! Traces of requests: which are traced, under whose trace, and what happened to them.
//!
//! ```text
//! headers ─ Tracer::begin ─▶ Span ─ Journal ─▶ ingress, pipeline: what happens to the request
//!                             └─ dropped ─▶ Traced ─▶ a bounded queue, for whoever sends traces on
//! ```
//!
//! Nothing here waits. Of a request that is not traced nothing is noted, and no clock is read for it.

mod journal;
mod parent;
mod span;
mod tracer;

pub use journal::{Ending, Handover, InBatch, Journal, Journey, Lost, Ran, RanAt, Try};
pub use parent::Parent;
pub use span::{Outcome, Protocol, Span, Traced};
pub use tracer::{Counted, Counts, Sampling, Tracer};
