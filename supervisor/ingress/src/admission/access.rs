//! Requests for the access log: what they bring, and how they are answered.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use hyper::Request;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::http::Extensions;

use crate::Frontend;
use crate::admission::request_error::RequestError;
use shadowslice_datapath::access::{AccessEntry, AccessProtocol, RequestHead};
use shadowslice_datapath::peer::Peer;

/// The header by which proxies name requests.
const REQUEST_ID: &str = "x-request-id";

impl Frontend {
    /// Begins the request's record, which lies in its extensions and counts its body.
    pub(crate) fn logged(
        &self,
        protocol: AccessProtocol,
        mut request: Request<Incoming>,
        peer: &Arc<Peer>,
    ) -> (Request<Counted>, Option<AccessEntry>) {
        let access = self.access.as_ref().map(|log| {
            let head = head(protocol, &request);
            log.begin(head, peer, Instant::now())
        });
        if let Some(access) = &access {
            request.extensions_mut().insert(access.clone());
        }
        (request.map(|body| Counted { body, access: access.clone() }), access)
    }
}

fn head(protocol: AccessProtocol, request: &Request<Incoming>) -> RequestHead<'_> {
    let request_id = request.headers().get(REQUEST_ID).and_then(|id| id.to_str().ok());
    RequestHead { protocol, method: request.method().as_str(), path: request.uri().path(), request_id }
}

/// Returns a request's record, if answers are logged.
pub(crate) fn of(extensions: &Extensions) -> Option<&AccessEntry> {
    extensions.get()
}

/// Notes that the client gets this error as its answer.
pub(crate) fn failed(access: &AccessEntry, why: &RequestError) {
    access.journal().record_failure(why.message());
    access.set_code(why.code() as u16);
}

/// A request's body, of which the record counts the bytes.
pub(crate) struct Counted {
    body: Incoming,
    access: Option<AccessEntry>,
}

impl Body for Counted {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if let (Some(access), Poll::Ready(Some(Ok(frame)))) = (&self.access, &frame) {
            access.add_received(frame.data_ref().map_or(0, Bytes::len));
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
