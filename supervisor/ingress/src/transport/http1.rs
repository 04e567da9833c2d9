//! HTTP/1.1 connections.

use std::convert::Infallible;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use hyper::body::{Body, Incoming};
use hyper::server::conn::http1;
use hyper::service::HttpService;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::accept::Stream;
use super::on_wake::on_wake;
use crate::admission::{Client, Stop};

/// The maximum length of the head of a request, in bytes.
const HEAD_BYTES: usize = 64 << 10;

/// The time that a refused peer may continue to send before its connection is closed. If the
/// connection were closed at once, the peer could lose the refusal: a reset overtakes answers that
/// the peer has not read.
const LINGER_TIMEOUT: Duration = Duration::from_secs(2);

/// The time that a peer has at the end of serving to send the rest of a request.
const REST_TIMEOUT: Duration = Duration::from_secs(5);

/// The progress of the request that a connection serves. It decides how the connection ends.
#[derive(Debug, Default)]
pub(crate) struct RequestProgress {
    /// True if the current request has been received, or needs not be received.
    is_received: AtomicBool,
    /// True if a request was refused before its body was received.
    is_cut: AtomicBool,
}

impl RequestProgress {
    pub(crate) fn begin(&self) {
        self.is_received.store(false, Relaxed);
    }

    pub(crate) fn mark_received(&self) {
        self.is_received.store(true, Relaxed);
    }

    pub(crate) fn mark_cut(&self) {
        self.is_cut.store(true, Relaxed);
    }
}

/// Serves the requests of a connection, and closes it.
pub(crate) async fn serve<S>(
    stream: Stream,
    service: S,
    client: &Client,
    progress: &RequestProgress,
    stop: Stop,
) where
    S: HttpService<Incoming, Error = Infallible> + Unpin,
    S::Future: Unpin,
    S::ResBody: Body<Error = Infallible> + 'static,
{
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        // This is also the time that a connection may be idle.
        .header_read_timeout(stop.keep_alive())
        .max_header_size(HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    let rest_is_late = on_wake(rest_is_late(progress, stop.clone()));
    let must_end = on_wake(async {
        tokio::select! {
            () = stop.ends_idle() => {}
            () = client.must_leave() => {}
        }
    });
    let serving = async {
        let ended = tokio::select! {
            biased;
            () = must_end => {
                std::pin::Pin::new(&mut connection).graceful_shutdown();
                poll_fn(|cx| connection.poll_without_shutdown(cx)).await
            }
            ended = poll_fn(|cx| connection.poll_without_shutdown(cx)) => ended,
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "HTTP connection failed");
        }
        close(connection.into_parts().io.into_inner(), progress.is_cut.load(Relaxed)).await;
    };
    tokio::select! {
        () = serving => {}
        () = rest_is_late => {
            tracing::debug!("cut an HTTP connection in the middle of a request");
        }
    }
}

/// Waits until serving has ended, and the peer has had the time to send the rest of its request.
async fn rest_is_late(progress: &RequestProgress, stop: Stop) {
    stop.ends_idle().await;
    tokio::time::sleep(REST_TIMEOUT).await;
    if progress.is_received.load(Relaxed) {
        std::future::pending::<()>().await;
    }
}

/// Closes a connection. If a request was refused before its body was received, first waits a little
/// so that the peer can read the refusal.
async fn close(mut stream: Stream, linger: bool) {
    if stream.shutdown().await.is_err() || !linger {
        return;
    }
    let mut rest = vec![0; 64 * 1024];
    let silent = async { while stream.read(&mut rest).await.is_ok_and(|read| read > 0) {} };
    // The connection also ends if the peer continues to send.
    let _ = tokio::time::timeout(LINGER_TIMEOUT, silent).await;
}
