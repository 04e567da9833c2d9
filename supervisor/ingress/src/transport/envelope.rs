//! The compression of gRPC messages. A compressed call is decompressed before tonic sees it, and
//! its answer is compressed in the same way. tonic would do this on the thread that serves the
//! connection, and would compress answers for all clients that can read them, which are nearly all.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::{Request, Response};
use tonic::Status;
use tonic::body::Body;

use super::body::{self, CountedBody};
use super::compression::Encoding;
use super::message_body::{PREFIX_BYTES, message_length};
use crate::admission::{Clipped, MemoryPermit};
use shadowslice_datapath::pipeline::Pieces;

const ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const ACCEPTED: HeaderName = HeaderName::from_static("grpc-accept-encoding");
const ALL_ENCODINGS: &str = "identity,deflate,gzip";

/// Returns the format of a call's message, or `None` if it is not compressed.
pub(crate) fn message_encoding(headers: &HeaderMap) -> Result<Option<Encoding>, Status> {
    let Some(name) = headers.get(ENCODING).filter(|name| *name != "identity") else { return Ok(None) };
    let name = String::from_utf8_lossy(name.as_bytes());
    Encoding::parse(&name).map(Some).ok_or_else(|| {
        let why = format!("grpc-encoding {} is not supported; use gzip or deflate", Clipped(&name));
        let mut status = Status::unimplemented(why);
        status
            .metadata_mut()
            .insert("grpc-accept-encoding", ALL_ENCODINGS.parse().expect("the constant is ASCII"));
        status
    })
}

/// Returns whether a client reads a format. A client that names no formats reads the one it writes.
pub(crate) fn accepts(headers: &HeaderMap, encoding: Encoding) -> bool {
    let accepted = headers.get(ACCEPTED).map(|value| String::from_utf8_lossy(value.as_bytes()));
    accepted.is_none_or(|names| names.split(',').any(|name| Encoding::parse(name.trim()) == Some(encoding)))
}

/// A body in pieces.
type Plain = StreamBody<tokio_stream::Iter<std::vec::IntoIter<Result<Frame<Bytes>, Infallible>>>>;

/// Decompresses the only message of a call, which has at most `limit` bytes.
pub(crate) async fn decompress_call(
    request: Request<CountedBody>,
    encoding: Encoding,
    limit: usize,
    permit: &Arc<MemoryPermit>,
) -> Result<Request<Plain>, Status> {
    let (mut head, body) = request.into_parts();
    head.headers.remove(ENCODING);
    let most = limit.saturating_add(PREFIX_BYTES);
    let body = permit.join(body::read(body, most, "limits.request_bytes", permit).await?)?;
    let pieces = match body.first() {
        Some(1) => {
            let (message, _turn) =
                encoding.decompress(only_message(&body)?, limit, Arc::clone(permit)).await?;
            let mut whole = Pieces::from(prefix(0, message.len())?.to_vec());
            message.iter().for_each(|piece| whole.push(piece.clone()));
            whole
        }
        // The message is not compressed, or tonic refuses it.
        _ => body.into(),
    };
    // tonic copies the message.
    permit.replace(2 * pieces.len())?;
    let frames: Vec<_> = pieces.iter().map(|piece| Ok(Frame::data(piece.clone()))).collect();
    Ok(Request::from_parts(head, StreamBody::new(tokio_stream::iter(frames))))
}

/// Compresses the message of an answer. Returns an answer without a message unchanged, because a
/// refusal ends with its head, and only the original body signals that.
pub(crate) async fn compress_answer(
    response: Response<Body>,
    encoding: Encoding,
    permit: &MemoryPermit,
) -> Result<Response<Body>, Status> {
    if response.headers().contains_key(Status::GRPC_STATUS) {
        return Ok(response);
    }
    let (mut head, body) = response.into_parts();
    let body = body.collect().await?;
    let trailers = body.trailers().cloned();
    let mut body = body.to_bytes();
    if body.len() >= PREFIX_BYTES {
        let message = encoding.compress(only_message(&body)?, permit).await?;
        let mut whole = BytesMut::with_capacity(PREFIX_BYTES + message.len());
        whole.put_slice(&prefix(1, message.len())?);
        whole.put_slice(&message);
        body = whole.freeze();
        head.headers.insert(ENCODING, HeaderValue::from_static(encoding.name()));
    }
    head.headers.insert(ACCEPTED, HeaderValue::from_static(ALL_ENCODINGS));
    let body = Full::new(body).with_trailers(async move { trailers.map(Ok) });
    Ok(Response::from_parts(head, Body::new(body)))
}

/// Returns the message of a body. Fails if it is not the body's only message.
fn only_message(body: &Bytes) -> Result<Bytes, Status> {
    match message_length(body) {
        Some(length) if length == body.len() - PREFIX_BYTES => Ok(body.slice(PREFIX_BYTES..)),
        _ => Err(Status::internal("expected one whole message of the announced length")),
    }
}

fn prefix(flag: u8, message: usize) -> Result<[u8; PREFIX_BYTES], Status> {
    let length = u32::try_from(message).map_err(|_| Status::internal("the message has 4 GiB or more"))?;
    let [a, b, c, d] = length.to_be_bytes();
    Ok([flag, a, b, c, d])
}
