//! Inferences that are traced: a span begins where one comes in and ends where it is answered. What lies between
//! finds the span's journal among the request's extensions.

use hyper::http::Extensions;
use hyper::http::request::Parts;
use hyper::{Method, Request, Response};
use tonic::Status;

use super::Frontend;
use super::tensors::Clipped;
use crate::trace::{Journal, Outcome, Protocol, Span};

impl Frontend {
    /// The span of an inference over HTTP, if it is traced.
    pub(super) fn http_span(&self, head: &mut Parts) -> Option<Span<'_>> {
        let tracer = self.tracer.as_deref()?;
        let path = head.uri.path();
        let infers =
            head.method == Method::POST && path.starts_with("/v2/models/") && path.ends_with("/infer");
        let protocol = || Protocol::Http(Clipped(path).to_string());
        let span = infers.then(|| tracer.begin(&head.headers, protocol)).flatten()?;
        head.extensions.insert(span.journal().clone());
        Some(span)
    }

    /// The span of an inference over gRPC, if it is traced.
    pub(super) fn grpc_span<B>(&self, request: &mut Request<B>) -> Option<Span<'_>> {
        let span = self.tracer.as_deref()?.begin(request.headers(), || Protocol::Grpc)?;
        request.extensions_mut().insert(span.journal().clone());
        Some(span)
    }
}

/// Where what happens to a request is noted, if it is traced.
pub(super) fn journal(of: &Extensions) -> Option<&Journal> {
    of.get()
}

/// A traced request is answered over HTTP.
pub(super) fn end_http<B>(span: Span<'_>, response: &Response<B>) {
    span.end(Outcome::Http(response.status().as_u16()));
}

/// A traced request is answered over gRPC. An answer without a status in its head is one that has a message.
pub(super) fn end_grpc<B>(span: Span<'_>, response: &Response<B>) {
    let code = match Status::from_header_map(response.headers()) {
        Some(status) => {
            span.journal().failed(status.message().to_owned());
            status.code()
        }
        None => tonic::Code::Ok,
    };
    span.end(Outcome::Grpc(code.into()));
}
