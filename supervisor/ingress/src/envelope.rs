//! gRPC calls with a compressed message: decompressed before tonic sees them, and answered in the
//! same way. Tonic would do it on the thread that serves the connection, and would compress for
//! every client that can read compressed answers, which is every client.

use bytes::{BufMut, Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::{Request, Response};
use tonic::Status;
use tonic::body::Body;

use super::body::{self, Unread};
use super::compression::Encoding;
use super::tensors::Clipped;

const ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const ACCEPTED: HeaderName = HeaderName::from_static("grpc-accept-encoding");
const ALL: &str = "identity,deflate,gzip";

/// A message's flag and length.
const ENVELOPE: usize = 5;

pub(super) fn encoding(headers: &HeaderMap) -> Result<Option<Encoding>, Status> {
    let Some(name) = headers.get(ENCODING).filter(|name| *name != "identity") else { return Ok(None) };
    let name = String::from_utf8_lossy(name.as_bytes());
    Encoding::named(&name).map(Some).ok_or_else(|| {
        let why = format!("grpc-encoding {} is not supported; use gzip or deflate", Clipped(&name));
        let mut status = Status::unimplemented(why);
        status.metadata_mut().insert("grpc-accept-encoding", ALL.parse().expect("a constant that is ASCII"));
        status
    })
}

/// A caller that does not say which forms it reads, reads the form that it writes.
pub(super) fn accepts(headers: &HeaderMap, encoding: Encoding) -> bool {
    let said = headers.get(ACCEPTED).map(|value| String::from_utf8_lossy(value.as_bytes()));
    said.is_none_or(|said| said.split(',').any(|name| Encoding::named(name.trim()) == Some(encoding)))
}

/// The call as if its only message, of at most `limit` bytes, had not been compressed.
pub(super) async fn decompressed(
    request: Request<Incoming>,
    encoding: Encoding,
    limit: usize,
) -> Result<Request<Full<Bytes>>, Status> {
    let (mut head, body) = request.into_parts();
    head.headers.remove(ENCODING);
    let body = body::read(body, limit.saturating_add(ENVELOPE)).await.map_err(|why| unread(&why, limit))?;
    let body = body.into_bytes();
    let body = match body.first() {
        Some(1) => {
            let message = message(&body)?;
            let message = encoding.decompress(message, limit).await?;
            enveloped(0, &message)?
        }
        // Not compressed after all, or for tonic to refuse.
        _ => body,
    };
    Ok(Request::from_parts(head, Full::new(body)))
}

/// An answer without a message stays as it is: a refusal ends with its head, and only the original
/// body says so.
pub(super) async fn compressed(
    response: Response<Body>,
    encoding: Encoding,
) -> Result<Response<Body>, Status> {
    if response.headers().contains_key(Status::GRPC_STATUS) {
        return Ok(response);
    }
    let (mut head, body) = response.into_parts();
    let body = body.collect().await?;
    let trailers = body.trailers().cloned();
    let mut body = body.to_bytes();
    if body.len() >= ENVELOPE {
        let message = encoding.compress(message(&body)?).await?;
        body = enveloped(1, &message)?;
        head.headers.insert(ENCODING, HeaderValue::from_static(encoding.name()));
    }
    head.headers.insert(ACCEPTED, HeaderValue::from_static(ALL));
    let body = Full::new(body).with_trailers(async move { trailers.map(Ok) });
    Ok(Response::from_parts(head, Body::new(body)))
}

/// The message of a body; it must be the body's only message.
fn message(body: &Bytes) -> Result<Bytes, Status> {
    let length = body.get(1..ENVELOPE).and_then(|length| <[u8; 4]>::try_from(length).ok());
    let length = length.and_then(|length| usize::try_from(u32::from_be_bytes(length)).ok());
    match length {
        Some(length) if length == body.len() - ENVELOPE => Ok(body.slice(ENVELOPE..)),
        _ => Err(Status::internal("expected one whole message, as its length says")),
    }
}

fn enveloped(flag: u8, message: &[u8]) -> Result<Bytes, Status> {
    let length = u32::try_from(message.len()).map_err(|_| Status::internal("a message of 4 GiB"))?;
    let mut body = BytesMut::with_capacity(ENVELOPE + message.len());
    body.put_u8(flag);
    body.put_u32(length);
    body.put_slice(message);
    Ok(body.freeze())
}

fn unread(why: &Unread, limit: usize) -> Status {
    match why {
        Unread::TooLarge => Status::out_of_range(format!("the request is larger than {limit} bytes")),
        Unread::Stalled => Status::deadline_exceeded("the request did not go on"),
        Unread::Broken(why) => Status::internal(format!("failed to read the request: {why}")),
    }
}
