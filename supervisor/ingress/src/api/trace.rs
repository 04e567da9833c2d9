//! The traces of inferences. The extensions of a request contain its arrival, with a journal if the
//! request is traced or logged.

use hyper::http::Extensions;
use hyper::{HeaderMap, Response};
use shadowslice_datapath::pipeline::RequestArrival;
use shadowslice_datapath::trace::{Journal, RequestSpan, SpanProtocol, SpanStatus};
use tonic::Status;

use super::frontend::Frontend;

impl Frontend {
    /// Begins the span of an inference, if it is traced. The access log and the trace share one
    /// journal.
    pub(super) fn begin_span(
        &self,
        headers: &HeaderMap,
        extensions: &mut Extensions,
        protocol: impl FnOnce() -> SpanProtocol,
    ) -> Option<RequestSpan<'_>> {
        let span = self.tracer.as_deref()?.begin(headers, protocol)?;
        let arrival = extensions.get_mut::<RequestArrival>()?;
        match &arrival.journal {
            Some(logged) => Some(span.of(logged.clone())),
            None => {
                arrival.journal = Some(span.journal().clone());
                Some(span)
            }
        }
    }
}

pub(super) fn arrival(extensions: &Extensions) -> RequestArrival {
    extensions.get().cloned().unwrap_or_else(|| RequestArrival::now(None))
}

pub(super) fn journal(extensions: &Extensions) -> Option<&Journal> {
    extensions.get::<RequestArrival>()?.journal.as_ref()
}

/// Ends the span of a gRPC call. A response without a status in its head contains a message.
pub(super) fn end_grpc<B>(span: RequestSpan<'_>, response: &Response<B>) {
    let code = match Status::from_header_map(response.headers()) {
        Some(status) => {
            span.journal().record_failure(status.message().to_owned());
            status.code()
        }
        None => tonic::Code::Ok,
    };
    span.end(SpanStatus::Grpc(code.into()));
}
