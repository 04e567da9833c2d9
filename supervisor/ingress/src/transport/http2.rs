//! HTTP/2 connections with gRPC calls.

use std::convert::Infallible;
use std::future::{pending, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::Poll;
use std::time::Duration;

use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use shadowslice_datapath::access::AccessEntry;
use tokio::time::sleep;

use super::accept::Stream;
use super::call_head::{GrpcAnswer, MAX_FRAME_BYTES, MAX_HEADER_LIST_BYTES};
use super::calls::{Calls, NewCalls};
use super::incoming_frames::RepairedStream;
use super::on_wake::on_wake;
use super::slow_reader::{MonitoredBody, UnsentPieces};
use crate::admission::{Client, MemoryPermit, Stop};

/// The maximum number of concurrent calls on a connection. Clients hold back further calls.
const MAX_STREAMS: u32 = 1024;

/// The time that a client has to send its first call.
const FIRST_CALL_TIMEOUT: Duration = Duration::from_secs(75);

/// The interval at which a silent connection is pinged.
const PING_INTERVAL: Duration = Duration::from_secs(60);

/// The time that a peer has to answer a ping before the connection is closed.
const PONG_TIMEOUT: Duration = Duration::from_secs(20);

/// The answer to a call, and what the answer keeps until it has been written.
pub(crate) struct ServedCall {
    pub(crate) answer: GrpcAnswer,
    pub(crate) permit: Option<Arc<MemoryPermit>>,
    pub(crate) entry: Option<AccessEntry>,
}

/// Serves the calls of a connection, which is local if it uses a Unix socket. `begin` is called when
/// the headers of a call have been read. The future that it returns runs when it is the call's turn.
pub(crate) async fn serve<F>(
    stream: Stream,
    is_local: bool,
    client: &Client,
    stop: Stop,
    begin: impl Fn(Request<Incoming>) -> F,
) where
    F: Future<Output = ServedCall> + Send + 'static,
{
    let (has_called, unsent) = (AtomicBool::new(false), Arc::new(UnsentPieces::default()));
    let mut calls = Calls::default();
    let service = service_fn(|request| {
        has_called.store(true, Relaxed);
        let (call, unsent) = (begin(request), Arc::clone(&unsent));
        async move {
            let ServedCall { answer, permit, entry } = call.await;
            Ok::<_, Infallible>(answer.map(|body| MonitoredBody::new(body, unsent, permit, entry)))
        }
    });
    let stream = RepairedStream::new(stream, calls.new_calls(), is_local);
    let mut connection = builder(calls.new_calls()).serve_connection(TokioIo::new(stream), service);
    let serving = on_wake(async {
        tokio::select! {
            biased;
            () = on_wake(must_end(&has_called, client, stop.clone())) => {}
            ended = &mut connection => return ended,
        }
        // During a hand-over, a client that is about to call is asked to connect again.
        if !has_called.load(Relaxed) && !stop.hands_over() {
            return Ok(());
        }
        Pin::new(&mut connection).graceful_shutdown();
        connection.await
    });
    let (mut serving, mut overdue) = (pin!(serving), pin!(on_wake(unsent.overdue())));
    let ended = poll_fn(|cx| {
        if overdue.as_mut().poll(cx).is_ready() {
            tracing::debug!("cut a gRPC connection whose client does not read its responses");
            return Poll::Ready(Ok(()));
        }
        // The calls run first, so that the connection writes their answers in the same pass.
        calls.poll_started(cx);
        if !calls.all_started() {
            // The connection continues when all calls have started.
            cx.waker().wake_by_ref();
        } else if let Poll::Ready(ended) = serving.as_mut().poll(cx) {
            return Poll::Ready(ended);
        }
        calls.start_some(cx);
        Poll::Pending
    });
    if let Err(error) = ended.await {
        tracing::debug!(%error, "gRPC connection failed");
    }
    calls.cancel().await;
}

fn builder(calls: NewCalls) -> http2::Builder<NewCalls> {
    let mut builder = http2::Builder::new(calls);
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_frame_size(MAX_FRAME_BYTES)
        .max_header_list_size(MAX_HEADER_LIST_BYTES)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PONG_TIMEOUT);
    builder
}

/// Waits until a connection must end. A connection without a call ends, too: its client may never
/// have sent the HTTP/2 preface, and would never close the connection.
async fn must_end(has_called: &AtomicBool, client: &Client, stop: Stop) {
    let without_call = async {
        sleep(FIRST_CALL_TIMEOUT).await;
        if has_called.load(Relaxed) {
            pending::<()>().await;
        }
    };
    tokio::select! {
        () = client.must_end(stop) => {}
        () = without_call => {}
    }
}
