//! The beginning and end of inferences. The extensions of a request hold the moment when it began
//! to arrive, and its journal if it is traced.

use hyper::http::Extensions;
use hyper::http::request::Parts;
use hyper::{Method, Request, Response};
use tonic::Status;

use super::Frontend;
use super::tensors::Clipped;
use shadowslice_datapath::pipeline::Coming;
use shadowslice_datapath::trace::{Journal, Outcome, Protocol, Span};

impl Frontend {
    pub(super) fn begin_http(&self, head: &mut Parts) -> Option<Span<'_>> {
        let path = head.uri.path();
        let infers =
            head.method == Method::POST && path.starts_with("/v2/models/") && path.ends_with("/infer");
        let protocol = || Protocol::Http(Clipped(path).to_string());
        let tracer = self.tracer.as_deref().filter(|_| infers);
        let span = tracer.and_then(|tracer| tracer.begin(&head.headers, protocol));
        head.extensions.insert(Coming::now(span.as_ref().map(|span| span.journal().clone())));
        span
    }

    pub(super) fn begin_grpc<B>(&self, request: &mut Request<B>) -> Option<Span<'_>> {
        let tracer = self.tracer.as_deref();
        let span = tracer.and_then(|tracer| tracer.begin(request.headers(), || Protocol::Grpc));
        if let Some((coming, span)) = request.extensions_mut().get_mut::<Coming>().zip(span.as_ref()) {
            coming.journal = Some(span.journal().clone());
        }
        span
    }
}

/// Notes that a gRPC call arrives: it begins with its headers, before it has its turn.
pub(super) fn arrives<B>(request: &mut Request<B>) {
    request.extensions_mut().insert(Coming::now(None));
}

pub(super) fn coming(of: &Extensions) -> Coming {
    of.get().cloned().unwrap_or_else(|| Coming::now(None))
}

pub(super) fn journal(of: &Extensions) -> Option<&Journal> {
    of.get::<Coming>()?.journal.as_ref()
}

/// An answer without a status in its head has a message.
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
