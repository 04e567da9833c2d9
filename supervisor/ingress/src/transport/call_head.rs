//! The check of the head of a gRPC call, before the rest of the call is read.

use http_body_util::Full;
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use tonic::Status;

use crate::admission::RequestError;
use shadowslice_datapath::pipeline::RequestFailure;

pub(crate) type GrpcAnswer = Response<tonic::body::Body>;

/// The maximum size of a frame, in bytes. A connection holds one incomplete frame. Compared with
/// the protocol's 16 KiB, tensors of 600 kB take a quarter less of the supervisor's CPU time, and
/// arrive in two thirds of the time.
pub(super) const MAX_FRAME_BYTES: u32 = 256 << 10;

/// The maximum metadata of a call, in bytes. It is as large as the head of an HTTP request.
const METADATA_BYTES: usize = 64 << 10;

/// The maximum head that h2 reads, in bytes. It exceeds [`METADATA_BYTES`], so that most of the
/// clients that send too much receive a gRPC status. To the others, h2 answers 431. It fits five
/// frames of 16 KiB after the first one, which some clients send.
pub(super) const MAX_HEADER_LIST_BYTES: u32 = 96 << 10;

/// The size of a field besides its name and value, as HTTP/2 counts.
const FIELD_BYTES: usize = 32;

const TYPE: &[u8] = b"application/grpc";

/// Returns the size of a call's metadata in bytes. Fails with the answer to a call whose head is
/// refused.
pub(crate) fn check_head<B>(request: &Request<B>) -> Result<usize, Box<GrpcAnswer>> {
    if !request.headers().get(CONTENT_TYPE).is_some_and(is_grpc) {
        let why = "this address serves gRPC: the content type must be application/grpc\n";
        return Err(Box::new(plain(StatusCode::UNSUPPORTED_MEDIA_TYPE, why)));
    }
    if request.method() != Method::POST {
        let mut answer = plain(StatusCode::METHOD_NOT_ALLOWED, "gRPC calls are POST requests\n");
        answer.headers_mut().insert(ALLOW, HeaderValue::from_static("POST"));
        return Err(Box::new(answer));
    }
    let bytes = metadata_bytes(request.headers());
    if bytes > METADATA_BYTES {
        let why =
            format!("the call has {bytes} bytes of metadata; the server reads at most {METADATA_BYTES}");
        let refusal = RequestError::from(RequestFailure::Exhausted(why));
        return Err(Box::new(Status::from(refusal).into_http()));
    }
    Ok(bytes)
}

/// Returns whether a content type is gRPC's, with any form of messages. An example is
/// `application/grpc+proto`, but not `application/grpc-web`.
fn is_grpc(content_type: &HeaderValue) -> bool {
    let Some((start, rest)) = content_type.as_bytes().split_at_checked(TYPE.len()) else { return false };
    start.eq_ignore_ascii_case(TYPE) && matches!(rest.first(), None | Some(b'+' | b';' | b' '))
}

fn metadata_bytes(headers: &HeaderMap) -> usize {
    headers.iter().map(|(name, value)| name.as_str().len() + value.len() + FIELD_BYTES).sum()
}

fn plain(status: StatusCode, why: &'static str) -> GrpcAnswer {
    let mut response = Response::new(tonic::body::Body::new(Full::from(why)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(method: Method, content_type: Option<&'static str>, metadata: usize) -> Result<(), StatusCode> {
        let mut request = Request::new(());
        *request.method_mut() = method;
        let headers = request.headers_mut();
        if let Some(content_type) = content_type {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        }
        if metadata > 0 {
            headers.insert("x", HeaderValue::from_bytes(&vec![b'x'; metadata]).unwrap());
        }
        check_head(&request).map(drop).map_err(|answer| answer.status())
    }

    #[test]
    fn only_grpc_calls_are_accepted() {
        for accepted in ["application/grpc", "application/grpc+proto", "APPLICATION/gRPC; charset=utf-8"] {
            assert_eq!(status(Method::POST, Some(accepted), 0), Ok(()), "{accepted}");
        }
        let unsupported = Err(StatusCode::UNSUPPORTED_MEDIA_TYPE);
        for other in ["", "application/json", "text/plain", "application/grpc-web+proto", "application/grpcx"]
        {
            assert_eq!(status(Method::POST, Some(other), 0), unsupported, "{other}");
        }
        assert_eq!(status(Method::POST, None, 0), unsupported);
        assert_eq!(status(Method::GET, None, 0), unsupported);
        assert_eq!(status(Method::GET, Some("application/grpc"), 0), Err(StatusCode::METHOD_NOT_ALLOWED));
    }

    #[test]
    fn metadata_is_bounded() {
        assert_eq!(status(Method::POST, Some("application/grpc"), METADATA_BYTES - 100), Ok(()));
        // gRPC's own refusals are answered with 200.
        assert_eq!(status(Method::POST, Some("application/grpc"), METADATA_BYTES), Err(StatusCode::OK));
    }
}
