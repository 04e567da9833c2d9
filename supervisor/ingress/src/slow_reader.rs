//! Answers over gRPC that their peer does not take. Bytes that flow control holds back are not
//! written, so the stream's time limit on writing does not see them; the peer goes on answering
//! pings meanwhile.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::accept::UNREAD;
use super::body::SLOWEST;

/// Answers go on in pieces of at most so many bytes, and the peer must make room for each piece in
/// time. hyper does not wait until the last piece has gone, so as many bytes may stay.
const PIECE: usize = 256 << 10;

#[derive(Debug, Default)]
pub(super) struct Untaken {
    answers: AtomicU64,
    until: Mutex<HashMap<u64, Instant>>,
    begun: Notify,
}

impl Untaken {
    pub(super) async fn overdue(&self) {
        loop {
            let first = self.until.lock().values().min().copied();
            match first {
                None => self.begun.notified().await,
                Some(until) if until <= Instant::now() => return,
                // An answer that began to wait later may be due sooner.
                Some(until) => sleep_until(until.min(Instant::now() + UNREAD)).await,
            }
        }
    }
}

/// An answer that notes when it waits for its peer: hyper asks for the next piece when the last
/// piece may go.
#[derive(Debug)]
pub(super) struct Answer<B> {
    body: B,
    /// The rest of a frame.
    rest: Bytes,
    number: u64,
    waits: bool,
    untaken: Arc<Untaken>,
}

impl<B> Answer<B> {
    pub(super) fn new(body: B, untaken: Arc<Untaken>) -> Self {
        let number = untaken.answers.fetch_add(1, Ordering::Relaxed);
        Self { body, rest: Bytes::new(), number, waits: false, untaken }
    }

    fn piece(&mut self) -> Frame<Bytes> {
        let piece = self.rest.split_to(self.rest.len().min(PIECE));
        self.untaken.until.lock().insert(self.number, Instant::now() + patience(piece.len()));
        self.untaken.begun.notify_one();
        self.waits = true;
        Frame::data(piece)
    }

    fn goes_on(&mut self) {
        if std::mem::take(&mut self.waits) {
            self.untaken.until.lock().remove(&self.number);
        }
    }
}

/// How long so many bytes may wait: a reading peer may be as slow as a sending peer.
fn patience(bytes: usize) -> Duration {
    UNREAD + Duration::from_secs_f64(bytes as f64 / SLOWEST)
}

impl<B: Body<Data = Bytes> + Unpin> Body for Answer<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = self.get_mut();
        this.goes_on();
        if this.rest.is_empty() {
            match ready!(Pin::new(&mut this.body).poll_frame(cx)).transpose()?.map(Frame::into_data) {
                Some(Ok(data)) => this.rest = data,
                Some(Err(trailers)) => return Poll::Ready(Some(Ok(trailers))),
                None => return Poll::Ready(None),
            }
        }
        Poll::Ready(Some(Ok(this.piece())))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }
}

impl<B> Drop for Answer<B> {
    fn drop(&mut self) {
        self.goes_on();
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http_body_util::{BodyExt, Full, StreamBody};
    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_client_that_takes_a_piece_now_and_then_is_not_overdue_but_one_that_stops_is() {
        let untaken = Arc::new(Untaken::default());
        let long = Bytes::from(vec![7; 2 * PIECE + 1]);
        let mut answer = Answer::new(Full::new(long.clone()), Arc::clone(&untaken));
        let mut got = Vec::new();
        while let Some(frame) = answer.frame().await {
            let piece = frame.unwrap().into_data().unwrap();
            got.extend_from_slice(&piece);
            let almost = patience(piece.len()) - Duration::from_secs(1);
            let overdue = timeout(almost, untaken.overdue()).await;
            assert!(overdue.is_err(), "after {} bytes", got.len());
        }
        assert_eq!(got, long);
        let mut answer = Answer::new(Full::new(long), Arc::clone(&untaken));
        answer.frame().await.unwrap().unwrap();
        assert!(timeout(patience(PIECE + 1), untaken.overdue()).await.is_ok());
        drop(answer);
        assert!(timeout(2 * patience(PIECE), untaken.overdue()).await.is_err(), "it has gone");
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_with_nothing_to_take_is_not_overdue() {
        let untaken = Arc::new(Untaken::default());
        let silent = StreamBody::new(tokio_stream::pending::<Result<Frame<Bytes>, Infallible>>());
        let mut answer = Answer::new(silent, Arc::clone(&untaken));
        assert!(timeout(2 * UNREAD, answer.frame()).await.is_err());
        assert!(timeout(2 * UNREAD, untaken.overdue()).await.is_err());
    }
}
