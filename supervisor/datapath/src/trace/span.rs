//! A request that is traced, from its beginning to its end.

use shadowslice_shared::units::Timestamp;

use super::journal::{Journal, RequestTrace};
use super::parent::TraceParent;
use super::tracer::Tracer;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SpanProtocol {
    /// Over HTTP, to that path.
    Http(String),
    Grpc,
}

/// How a request ended, as its protocol says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpanStatus {
    /// Its client went away before that was known.
    Cancelled,
    Http(u16),
    /// A gRPC status; 0 is fine.
    Grpc(i32),
}

/// A request that is traced. Dropped, it is told; until then it counts as given up by its client.
#[derive(Debug)]
pub struct RequestSpan<'t> {
    pub(super) tracer: &'t Tracer,
    pub(super) journal: Journal,
    /// As it is told, but for the end and the steps.
    pub(super) traced: TracedRequest,
}

#[derive(Debug, Clone)]
pub struct TracedRequest {
    pub trace_id: u128,
    pub span_id: u64,
    pub parent: Option<TraceParent>,
    /// The state that travels with the trace; may be empty.
    pub state: String,
    pub protocol: SpanProtocol,
    pub began: Timestamp,
    /// When it was answered, or given up.
    pub ended: Timestamp,
    pub outcome: SpanStatus,
    pub trace: RequestTrace,
}

impl RequestSpan<'_> {
    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    /// Has the span tell what is noted in this journal.
    #[must_use]
    pub fn of(mut self, journal: Journal) -> Self {
        self.journal = journal;
        self
    }

    pub fn end(mut self, outcome: SpanStatus) {
        self.traced.outcome = outcome;
    }
}

impl Drop for RequestSpan<'_> {
    fn drop(&mut self) {
        let (ended, trace) = (self.tracer.now(), self.journal.take());
        self.tracer.tell(TracedRequest { ended, trace, ..self.traced.clone() });
    }
}
