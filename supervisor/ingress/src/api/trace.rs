//! The traces of inferences. The extensions of a request contain its arrival, with a journal if the
//! request is traced or logged.

use hyper::http::Extensions;
use hyper::http::request::Parts;
use hyper::{Method, Request, Response};
use shadowslice_datapath::access::AccessEntry;
use shadowslice_datapath::pipeline::RequestArrival;
use shadowslice_datapath::trace::{Journal, RequestSpan, SpanProtocol, SpanStatus};
use tonic::Status;

use super::frontend::Frontend;
use crate::admission::{Clipped, access_entry};

impl Frontend {
    pub(super) fn begin_http(&self, head: &mut Parts) -> Option<RequestSpan<'_>> {
        let path = head.uri.path();
        let infers =
            head.method == Method::POST && path.starts_with("/v2/models/") && path.ends_with("/infer");
        let protocol = || SpanProtocol::Http(Clipped(path).to_string());
        let tracer = self.tracer.as_deref().filter(|_| infers);
        let span = tracer.and_then(|tracer| tracer.begin(&head.headers, protocol));
        let (span, journal) = share_journal(span, logged_journal(&head.extensions));
        head.extensions.insert(RequestArrival::now(journal));
        span
    }

    pub(super) fn begin_grpc<B>(&self, request: &mut Request<B>) -> Option<RequestSpan<'_>> {
        let tracer = self.tracer.as_deref();
        let span = tracer.and_then(|tracer| tracer.begin(request.headers(), || SpanProtocol::Grpc));
        let Some(arrival) = request.extensions_mut().get_mut::<RequestArrival>() else { return span };
        let (span, journal) = share_journal(span, arrival.journal.take());
        arrival.journal = journal;
        span
    }
}

/// Returns a span and the journal of its request. The access log and the trace share one journal.
fn share_journal(
    span: Option<RequestSpan<'_>>,
    logged: Option<Journal>,
) -> (Option<RequestSpan<'_>>, Option<Journal>) {
    let span = match &logged {
        Some(journal) => span.map(|span| span.of(journal.clone())),
        None => span,
    };
    let journal = logged.or_else(|| span.as_ref().map(|span| span.journal().clone()));
    (span, journal)
}

fn logged_journal(extensions: &Extensions) -> Option<Journal> {
    access_entry(extensions).map(|entry| entry.journal().clone())
}

/// Records the arrival of a gRPC call. A call begins with its headers, before it has its turn.
pub(super) fn mark_arrival<B>(request: &mut Request<B>) {
    let journal = logged_journal(request.extensions());
    request.extensions_mut().insert(RequestArrival::now(journal));
}

pub(super) fn arrival(extensions: &Extensions) -> RequestArrival {
    extensions.get().cloned().unwrap_or_else(|| RequestArrival::now(None))
}

/// Returns the journal of a request, which only a log needs before the request has arrived.
pub(super) fn journal(extensions: &Extensions) -> Option<&Journal> {
    match extensions.get::<RequestArrival>() {
        Some(arrival) => arrival.journal.as_ref(),
        None => access_entry(extensions).map(AccessEntry::journal),
    }
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
