//! HTTP/1.1 connections.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Body, Incoming};
use hyper::header::{CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HeaderValue};
use hyper::http::request::Parts;
use hyper::server::conn::http1;
use hyper::service::{HttpService, service_fn};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Serialize;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::Frontend;
use crate::admission::access;
use crate::admission::access::Counted;
use crate::admission::budgets::{Client, Pool};
use crate::admission::caller::{Asked, Caller};
use crate::admission::memory_permit::Reserved;
use crate::admission::request_error::RequestError;
use crate::admission::stop::Stop;
use crate::api::routes::{self, Goal};
use crate::api::traced;
use crate::transport::accept::Stream;
use crate::transport::body::{self, SHORT, Unread};
use crate::transport::guarded_body::{Goes, Kept};
use crate::transport::listen::Spoken;
use crate::transport::on_wake::OnWake;
use shadowslice_datapath::access::{AccessEntry, AccessProtocol};
use shadowslice_datapath::pipeline::Pieces;
use shadowslice_datapath::readiness::HostState;
use shadowslice_datapath::trace::SpanStatus;

pub(crate) type Answer = Response<Pieces>;

/// The body of an answer. When it has been written, its memory is given back and its request counts.
type Written = Full<Kept<Pieces, Companions>>;

/// An answer with the memory of its request.
type Reply = Response<(Pieces, Option<Arc<Reserved>>)>;

pub(crate) const SPOKEN: Spoken = Spoken { name: "HTTP", alpn: b"http/1.1" };

const HEALTH: &str = "/v2/health/";

const CLOSE: HeaderValue = HeaderValue::from_static("close");

/// The longest head of a request.
const HEAD_BYTES: usize = 64 << 10;

/// How long a refused peer may go on sending before its connection is cut. If it were cut at once,
/// the peer might lose the refusal: a reset overtakes answers that the peer has not read.
const LINGER: Duration = Duration::from_secs(2);

/// How long, once serving is to end, a peer may take over the rest of a request that it has begun.
const UNASKED: Duration = Duration::from_secs(5);

pub(crate) async fn serve(
    io: Stream,
    front: Arc<Frontend>,
    (client, caller): (&Arc<Client>, Caller),
    stop: Stop,
) {
    let (asked, refused) = (AtomicBool::new(false), AtomicBool::new(false));
    let counted = async |request: Request<Incoming>| {
        let is_head = request.method() == Method::HEAD;
        let (request, access) = front.logged(AccessProtocol::Http, request, &caller.peer);
        let reply = answer(&front, (client, &caller), (&asked, &refused), &stop, request).await;
        client.tally().count_http(reply.status().as_u16());
        Ok::<_, Infallible>(written(reply, access, is_head))
    };
    let service = service_fn(|request| Box::pin(counted(request)));
    let mut unasked = std::pin::pin!(unasked(&asked, stop.clone()));
    tokio::select! {
        io = speak(io, service, client, stop.clone()) => close(io, refused.load(Ordering::Relaxed)).await,
        () = OnWake::new(unasked.as_mut()) => tracing::debug!("cut an HTTP connection in the middle of a request"),
    }
}

/// Returns when serving is over and the peer, given time, has still not sent a whole request.
async fn unasked(asked: &AtomicBool, stop: Stop) {
    stop.ends_idle().await;
    tokio::time::sleep(UNASKED).await;
    if asked.load(Ordering::Relaxed) {
        std::future::pending::<()>().await;
    }
}

/// To close the connection is left to the caller.
pub(crate) async fn speak<S>(io: Stream, service: S, client: &Client, stop: Stop) -> Stream
where
    S: HttpService<Incoming, Error = Infallible> + Unpin,
    S::Future: Unpin,
    S::ResBody: Body<Error = Infallible> + 'static,
{
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        // Also how long a connection may be idle.
        .header_read_timeout(stop.keep_alive())
        .max_header_size(HEAD_BYTES)
        .serve_connection(TokioIo::new(io), service);
    let begun = std::pin::pin!(async {
        tokio::select! {
            () = stop.ends_idle() => {}
            () = client.left() => {}
        }
    });
    let mut begun = OnWake::new(begun);
    let mut told = false;
    let ended = std::future::poll_fn(|cx| {
        if !told && Pin::new(&mut begun).poll(cx).is_ready() {
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
    (client, caller): (&Arc<Client>, &Caller),
    (asked, refused): (&AtomicBool, &AtomicBool),
    stop: &Stop,
    request: Request<Counted>,
) -> Reply {
    let (mut head, mut body) = request.into_parts();
    let health = head.uri.path().starts_with(HEALTH);
    let about = if health { Asked::Open } else { Asked::Guarded };
    match caller.identify(&head.uri, &head.headers, about) {
        Ok(peer) => {
            if let Some(access) = access::of(&head.extensions) {
                access.set_peer(&peer);
            }
            head.extensions.insert(peer);
        }
        Err(refusal) => {
            if let Some(access) = access::of(&head.extensions) {
                access.journal().record_failure(refusal.message());
            }
            // Its body is not read.
            refused.store(true, Ordering::Relaxed);
            asked.store(true, Ordering::Relaxed);
            let mut answer = error(refusal.status(), &refusal.message());
            refusal.describe(answer.headers_mut());
            answer.headers_mut().insert(CONNECTION, CLOSE);
            return answer.map(|pieces| (pieces, None));
        }
    }
    let span = front.begin_http(&mut head);
    asked.store(false, Ordering::Relaxed);
    let served = match routes::goal(front, &head) {
        Goal::Answered(answer) => Err(Refused::BeforeBody(answer)),
        goal => serve_goal(front, client, goal, &head, &mut body, asked).await,
    };
    let (mut answer, reserved, cut) = match served {
        Ok((answer, reserved)) => (answer, Some(reserved), false),
        Err(Refused::BeforeBody(answer)) => (answer, None, !body::discarded(&mut body).await),
        Err(Refused::InBody(answer)) => (answer, None, true),
    };
    asked.store(true, Ordering::Relaxed);
    if reserved.is_none() {
        client.touch();
    }
    if let Some(span) = span {
        span.end(SpanStatus::Http(answer.status().as_u16()));
    }
    if head.method == Method::HEAD && answer.body().is_empty() {
        // hyper adds this to answers to GET, and the length of a body that is there to both.
        answer.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
    }
    if cut {
        refused.store(true, Ordering::Relaxed);
        answer.headers_mut().insert(CONNECTION, CLOSE);
    }
    if front.router.host() != HostState::Serving || stop.leaves() {
        // The client connects anew, and finds another host, or the next supervisor, if there is one.
        answer.headers_mut().insert(CONNECTION, CLOSE);
    }
    answer.map(|pieces| (pieces, reserved))
}

/// An answer on its way. An empty one, as one to HEAD, is not written, and so arrives at once.
fn written(reply: Reply, access: Option<AccessEntry>, is_head: bool) -> Response<Written> {
    if let Some(access) = &access {
        access.set_code(reply.status().as_u16());
        if is_head || reply.body().0.is_empty() {
            access.mark_delivered();
        }
    }
    reply.map(|(pieces, reserved)| Full::new(Kept::new(pieces, Companions { reserved, access })))
}

/// The companions of an answer's bytes.
#[derive(Debug)]
struct Companions {
    reserved: Option<Arc<Reserved>>,
    access: Option<AccessEntry>,
}

impl Goes for Companions {
    fn advanced(&mut self, bytes: usize) {
        if let Some(access) = &self.access {
            access.add_sent(bytes);
        }
    }

    fn written(&mut self) {
        if let Some(reserved) = &self.reserved {
            reserved.deliveries().written();
        }
        if let Some(access) = &self.access {
            access.mark_delivered();
        }
    }
}

/// An answer without all of the request's body.
enum Refused {
    BeforeBody(Answer),
    /// After this the connection cannot go on.
    InBody(Answer),
}

/// Room is taken before the body is read.
async fn serve_goal(
    front: &Frontend,
    client: &Arc<Client>,
    goal: Goal,
    head: &Parts,
    body: &mut Counted,
    asked: &AtomicBool,
) -> Result<(Answer, Arc<Reserved>), Refused> {
    let refused = |why: RequestError| Refused::BeforeBody(routes::refusal(&why, head));
    let cut = |why: RequestError| Refused::InBody(routes::refusal(&why, head));
    client.regular().await.map_err(cut)?;
    let inference = matches!(goal, Goal::Infer(_));
    let reserved = Reserved::new(client, Pool::Memory).map_err(refused)?;
    let limit = if inference { front.request_bytes } else { front.request_bytes.min(SHORT) };
    let unread = |why| Refused::InBody(refuse(why, limit, inference, head));
    let body = body::read(body, limit, &reserved).await.map_err(unread)?;
    asked.store(true, Ordering::Relaxed);
    let answer = match goal {
        Goal::Infer(target) => routes::infer(front, &target, head, body, &reserved).await,
        Goal::Other(route) => routes::other(front, route, head, body).await,
        Goal::Answered(answer) => Ok(answer),
    };
    let answer = answer.unwrap_or_else(|why| {
        reserved.deliveries().failed(&why);
        reserved.shrink_to(0);
        routes::refusal(&why, head)
    });
    Ok((answer, reserved))
}

/// The body was not read to its end.
fn refuse(unread: Unread, limit: usize, inference: bool, head: &Parts) -> Answer {
    let (status, message) = match unread {
        Unread::TooLarge => {
            let bound = if inference { "limits.request_bytes" } else { "not an inference request" };
            let message = format!("the request is larger than {limit} bytes ({bound})");
            (StatusCode::PAYLOAD_TOO_LARGE, message)
        }
        Unread::Stalled => {
            (StatusCode::REQUEST_TIMEOUT, "timed out waiting for the rest of the request's body".to_owned())
        }
        Unread::Broken(why) => (StatusCode::BAD_REQUEST, format!("failed to read the request's body: {why}")),
        Unread::NoMemory(why) => (why.status(), why.message()),
    };
    if let Some(journal) = traced::journal(&head.extensions) {
        journal.record_failure(message.clone());
    }
    error(status, &message)
}

pub(crate) fn empty(status: StatusCode) -> Answer {
    let mut response = Response::new(Pieces::default());
    *response.status_mut() = status;
    response
}

pub(crate) fn document(json: &impl Serialize) -> Answer {
    let json = serde_json::to_vec(json).expect("keys of messages are texts, which is all that can fail");
    let mut response = Response::new(json.into());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

pub(crate) fn error(status: StatusCode, message: &str) -> Answer {
    let mut response = document(&json!({"error": message}));
    *response.status_mut() = status;
    response
}
