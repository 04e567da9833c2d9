//! A traced request, from its start to its end.

use shadowslice_shared::units::Timestamp;

use super::journal::{Journal, RequestTrace};
use super::parent::TraceParent;
use super::tracer::Tracer;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SpanProtocol {
    /// An HTTP request with this path.
    Http(String),
    Grpc,
}

/// The status of a request in the terms of its protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpanStatus {
    /// The client disconnected before the status was known.
    Cancelled,
    Http(u16),
    /// The gRPC status code. 0 means OK.
    Grpc(i32),
}

/// The span of a traced request. Dropping the span exports the request. If no status was set, the
/// request counts as cancelled by its client.
#[derive(Debug)]
pub struct RequestSpan<'t> {
    pub(super) tracer: &'t Tracer,
    pub(super) journal: Journal,
    /// The exported data of the request, except for its end and its steps.
    pub(super) traced: TracedRequest,
}

/// A traced request that has ended.
#[derive(Debug, Clone)]
pub struct TracedRequest {
    pub trace_id: u128,
    pub span_id: u64,
    pub parent: Option<TraceParent>,
    /// The vendors' state of the trace. It may be empty.
    pub state: String,
    pub protocol: SpanProtocol,
    pub began: Timestamp,
    /// The time at which the request was answered or cancelled.
    pub ended: Timestamp,
    pub outcome: SpanStatus,
    pub trace: RequestTrace,
}

impl RequestSpan<'_> {
    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    /// Replaces the journal. The journal's steps are exported with the span.
    #[must_use]
    pub fn of(mut self, journal: Journal) -> Self {
        self.journal = journal;
        self
    }

    /// Ends the span with the given status.
    pub fn end(mut self, outcome: SpanStatus) {
        self.traced.outcome = outcome;
    }
}

impl Drop for RequestSpan<'_> {
    fn drop(&mut self) {
        let (ended, trace) = (self.tracer.now(), self.journal.take());
        self.tracer.export(TracedRequest { ended, trace, ..self.traced.clone() });
    }
}
