//! The beginning and end of inferences. The extensions of a request hold the moment when it began
//! to arrive, and its journal if it is traced
//! or logged.

use hyper::http::Extensions;
use hyper::http::request::Parts;
use hyper::{HeaderMap, Method, Request, Response};
use tonic::Status;

use crate::Frontend;
use crate::admission::access;
use crate::tensors::check::Clipped;
use shadowslice_datapath::access::AccessEntry;
use shadowslice_datapath::pipeline::RequestArrival;
use shadowslice_datapath::trace::{Journal, RequestSpan, SpanProtocol, SpanStatus};

impl Frontend {
    pub(crate) fn begin_http(&self, head: &mut Parts) -> Option<RequestSpan<'_>> {
        let path = head.uri.path();
        let infers =
            head.method == Method::POST && path.starts_with("/v2/models/") && path.ends_with("/infer");
        let protocol = || SpanProtocol::Http(Clipped(path).to_string());
        let tracer = self.tracer.as_deref().filter(|_| infers);
        let span = tracer.and_then(|tracer| tracer.begin(&head.headers, protocol));
        let logged = access::of(&head.extensions).map(|access| access.journal().clone());
        let (span, journal) = joined(span, logged);
        head.extensions.insert(RequestArrival::now(journal));
        span
    }

    pub(crate) fn begin_grpc<B>(&self, request: &mut Request<B>) -> Option<RequestSpan<'_>> {
        let tracer = self.tracer.as_deref();
        let span = tracer.and_then(|tracer| tracer.begin(request.headers(), || SpanProtocol::Grpc));
        let Some(coming) = request.extensions_mut().get_mut::<RequestArrival>() else { return span };
        let (span, journal) = joined(span, coming.journal.take());
        coming.journal = journal;
        span
    }
}

/// Returns a span and the journal of its request; the access log and the trace tell the same journal.
fn joined(
    span: Option<RequestSpan<'_>>,
    logged: Option<Journal>,
) -> (Option<RequestSpan<'_>>, Option<Journal>) {
    match (span, logged) {
        (Some(span), Some(journal)) => (Some(span.of(journal.clone())), Some(journal)),
        (Some(span), None) => {
            let journal = span.journal().clone();
            (Some(span), Some(journal))
        }
        (None, logged) => (None, logged),
    }
}

/// Notes that a gRPC call arrives: it begins with its headers, before it has its turn.
pub(crate) fn arrives<B>(request: &mut Request<B>) {
    let journal = access::of(request.extensions()).map(|access| access.journal().clone());
    request.extensions_mut().insert(RequestArrival::now(journal));
}

pub(crate) fn coming(of: &Extensions) -> RequestArrival {
    of.get().cloned().unwrap_or_else(|| RequestArrival::now(None))
}

pub(crate) fn journal(of: &Extensions) -> Option<&Journal> {
    of.get::<RequestArrival>()?.journal.as_ref()
}

/// Notes how a gRPC call ended, if these headers or trailers say so. A call of which they say nothing
/// is answered by a message.
pub(crate) fn note_grpc(access: &AccessEntry, headers: &HeaderMap) {
    if let Some(status) = Status::from_header_map(headers) {
        if !status.message().is_empty() {
            access.journal().record_failure(status.message().to_owned());
        }
        access.set_code(i32::from(status.code()).try_into().unwrap_or_default());
    }
}

/// An answer without a status in its head has a message.
pub(crate) fn end_grpc<B>(span: RequestSpan<'_>, response: &Response<B>) {
    let code = match Status::from_header_map(response.headers()) {
        Some(status) => {
            span.journal().record_failure(status.message().to_owned());
            status.code()
        }
        None => tonic::Code::Ok,
    };
    span.end(SpanStatus::Grpc(code.into()));
}
