//! HTTP/1.1 connections.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{CONNECTION, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::{HttpService, service_fn};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Serialize;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::Frontend;
use super::accept::Stream;
use super::body::{self, SHORT, Unread};
use super::routes::{self, Route};
use super::stop::Stop;
use shadowslice_datapath::pipeline::Pieces;
use shadowslice_datapath::readiness::Host;
use shadowslice_datapath::trace::Outcome;

pub(super) type Answer = Response<Full<Pieces>>;

const CLOSE: HeaderValue = HeaderValue::from_static("close");

/// How long a connection may lie idle, or take over the head of a request.
const IDLE: Duration = Duration::from_secs(75);

/// How long a refused peer may go on sending before its connection is cut. If it were cut at once,
/// the peer might lose the refusal: a reset overtakes answers that the peer has not read.
const LINGER: Duration = Duration::from_secs(2);

/// How long, once serving is to end, a peer may take over the rest of a request that it has begun.
const UNASKED: Duration = Duration::from_secs(5);

pub(super) async fn serve(io: Stream, front: Arc<Frontend>, stop: Stop) {
    let (asked, refused) = (AtomicBool::new(false), AtomicBool::new(false));
    let service = service_fn(|request| Box::pin(answer(&front, &asked, &refused, request)));
    tokio::select! {
        io = speak(io, service, stop.clone()) => close(io, refused.load(Ordering::Relaxed)).await,
        () = unasked(&asked, stop) => tracing::debug!("cut an HTTP connection in mid-request"),
    }
}

/// Returns when serving is over and the peer, given time, has still not sent a whole request.
async fn unasked(asked: &AtomicBool, stop: Stop) {
    stop.begun().await;
    tokio::time::sleep(UNASKED).await;
    if asked.load(Ordering::Relaxed) {
        std::future::pending::<()>().await;
    }
}

/// To close the connection is left to the caller.
pub(super) async fn speak<S>(io: Stream, service: S, stop: Stop) -> Stream
where
    S: HttpService<Incoming, ResBody = Full<Pieces>, Error = Infallible> + Unpin,
    S::Future: Unpin,
{
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .serve_connection(TokioIo::new(io), service);
    let mut begun = std::pin::pin!(stop.begun());
    let mut told = false;
    let ended = std::future::poll_fn(|cx| {
        if !told && begun.as_mut().poll(cx).is_ready() {
            told = true;
            Pin::new(&mut connection).graceful_shutdown();
        }
        connection.poll_without_shutdown(cx)
    });
    if let Err(error) = ended.await {
        tracing::debug!(%error, "HTTP connection failed");
    }
    connection.into_parts().io.into_inner()
}

/// Where a request was refused in mid-body, waits a little until the peer has read why.
async fn close(mut io: Stream, linger: bool) {
    if io.shutdown().await.is_err() || !linger {
        return;
    }
    let mut rest = vec![0; 64 * 1024];
    let silent = async { while io.read(&mut rest).await.is_ok_and(|read| read > 0) {} };
    // Too late is as good as silent: either way the connection ends now.
    let _ = tokio::time::timeout(LINGER, silent).await;
}

async fn answer(
    front: &Frontend,
    asked: &AtomicBool,
    refused: &AtomicBool,
    request: Request<Incoming>,
) -> Result<Answer, Infallible> {
    let (mut head, body) = request.into_parts();
    let span = front.begin_http(&mut head);
    asked.store(false, Ordering::Relaxed);
    let route = Route::parse(head.uri.path());
    let inference = route.as_ref().is_some_and(Route::is_inference);
    let limit = if inference { front.request_bytes } else { front.request_bytes.min(SHORT) };
    let body = body::read(body, limit).await;
    asked.store(true, Ordering::Relaxed);
    let mut response = match body {
        Ok(body) => routes::answer(front, route, &head, body).await,
        Err(unread) => {
            refused.store(true, Ordering::Relaxed);
            refuse(unread, limit, inference)
        }
    };
    if front.router.host() != Host::Serving {
        // The client connects anew, and finds another host if there is one.
        response.headers_mut().insert(CONNECTION, CLOSE);
    }
    if let Some(span) = span {
        span.end(Outcome::Http(response.status().as_u16()));
    }
    Ok(response)
}

/// The body was not read to its end, after which the connection cannot go on.
fn refuse(unread: Unread, limit: usize, inference: bool) -> Answer {
    let mut response = match unread {
        Unread::TooLarge => {
            let bound = if inference { "limits.request_bytes" } else { "it is no inference" };
            let message = format!("the request is larger than {limit} bytes ({bound})");
            error(StatusCode::PAYLOAD_TOO_LARGE, &message)
        }
        Unread::Stalled => error(StatusCode::REQUEST_TIMEOUT, "the request's body did not go on"),
        Unread::Broken(why) => {
            error(StatusCode::BAD_REQUEST, &format!("failed to read the request's body: {why}"))
        }
    };
    response.headers_mut().insert(CONNECTION, CLOSE);
    response
}

pub(super) fn empty(status: StatusCode) -> Answer {
    let mut response = Response::new(Full::default());
    *response.status_mut() = status;
    response
}

pub(super) fn document(json: &impl Serialize) -> Answer {
    let json = serde_json::to_vec(json).expect("keys of messages are texts, which is all that can fail");
    let mut response = Response::new(Full::new(json.into()));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

pub(super) fn error(status: StatusCode, message: &str) -> Answer {
    let mut response = document(&json!({"error": message}));
    *response.status_mut() = status;
    response
}
