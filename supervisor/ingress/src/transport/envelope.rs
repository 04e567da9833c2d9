//! gRPC calls with a compressed message: decompressed before tonic sees them, and answered in the
//! same way. Tonic would do it on the thread that serves the connection, and would compress for
//! every client that can read compressed answers, which is every client.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::{Request, Response};
use tonic::Status;
use tonic::body::Body;

use crate::admission::access::Counted;
use crate::admission::memory_permit::Reserved;
use crate::tensors::check::Clipped;
use crate::transport::body::{self, ENVELOPE, Unread};
use crate::transport::compression::Encoding;
use shadowslice_datapath::pipeline::Pieces;

const ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const ACCEPTED: HeaderName = HeaderName::from_static("grpc-accept-encoding");
const ALL: &str = "identity,deflate,gzip";

pub(crate) fn encoding(headers: &HeaderMap) -> Result<Option<Encoding>, Status> {
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
pub(crate) fn accepts(headers: &HeaderMap, encoding: Encoding) -> bool {
    let said = headers.get(ACCEPTED).map(|value| String::from_utf8_lossy(value.as_bytes()));
    said.is_none_or(|said| said.split(',').any(|name| Encoding::named(name.trim()) == Some(encoding)))
}

/// A body as it came, or in pieces.
pub(crate) type Plain = StreamBody<tokio_stream::Iter<std::vec::IntoIter<Result<Frame<Bytes>, Infallible>>>>;

/// The call as if its only message, of at most `limit` bytes, had not been compressed.
pub(crate) async fn decompressed(
    request: Request<Counted>,
    encoding: Encoding,
    limit: usize,
    reserved: &Arc<Reserved>,
) -> Result<Request<Plain>, Status> {
    let (mut head, body) = request.into_parts();
    head.headers.remove(ENCODING);
    let body = body::read(body, limit.saturating_add(ENVELOPE), reserved).await;
    let body = reserved.joined(body.map_err(|why| unread(why, limit))?)?;
    let pieces = match body.first() {
        Some(1) => {
            let (message, _turn) = encoding.decompress(message(&body)?, limit, Arc::clone(reserved)).await?;
            let mut whole = Pieces::from(envelope(0, message.len())?.to_vec());
            message.iter().for_each(|piece| whole.push(piece.clone()));
            whole
        }
        // Not compressed after all, or for tonic to refuse.
        _ => body.into(),
    };
    // tonic copies it.
    reserved.replace(2 * pieces.len())?;
    let frames: Vec<_> = pieces.iter().map(|piece| Ok(Frame::data(piece.clone()))).collect();
    Ok(Request::from_parts(head, StreamBody::new(tokio_stream::iter(frames))))
}

/// An answer without a message stays as it is: a refusal ends with its head, and only the original
/// body says so.
pub(crate) async fn compressed(
    response: Response<Body>,
    encoding: Encoding,
    reserved: &Reserved,
) -> Result<Response<Body>, Status> {
    if response.headers().contains_key(Status::GRPC_STATUS) {
        return Ok(response);
    }
    let (mut head, body) = response.into_parts();
    let body = body.collect().await?;
    let trailers = body.trailers().cloned();
    let mut body = body.to_bytes();
    if body.len() >= ENVELOPE {
        let message = encoding.compress(message(&body)?, reserved).await?;
        let mut whole = BytesMut::with_capacity(ENVELOPE + message.len());
        whole.put_slice(&envelope(1, message.len())?);
        whole.put_slice(&message);
        body = whole.freeze();
        head.headers.insert(ENCODING, HeaderValue::from_static(encoding.name()));
    }
    head.headers.insert(ACCEPTED, HeaderValue::from_static(ALL));
    let body = Full::new(body).with_trailers(async move { trailers.map(Ok) });
    Ok(Response::from_parts(head, Body::new(body)))
}

/// The message of a body; it must be the body's only message.
fn message(body: &Bytes) -> Result<Bytes, Status> {
    match body::length(body) {
        Some(length) if length == body.len() - ENVELOPE => Ok(body.slice(ENVELOPE..)),
        _ => Err(Status::internal("expected one whole message of the announced length")),
    }
}

fn envelope(flag: u8, message: usize) -> Result<[u8; ENVELOPE], Status> {
    let length = u32::try_from(message).map_err(|_| Status::internal("the message has 4 GiB or more"))?;
    let [a, b, c, d] = length.to_be_bytes();
    Ok([flag, a, b, c, d])
}

fn unread(why: Unread, limit: usize) -> Status {
    match why {
        Unread::TooLarge => Status::out_of_range(format!("the request is larger than {limit} bytes")),
        Unread::Stalled => Status::deadline_exceeded("timed out waiting for the rest of the request"),
        Unread::Broken(why) => Status::internal(format!("failed to read the request: {why}")),
        Unread::NoMemory(why) => why.into(),
    }
}
