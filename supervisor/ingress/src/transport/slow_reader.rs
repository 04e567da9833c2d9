//! gRPC answers whose peer does not read them. Flow control holds back their bytes. So the minimum
//! rate of writing does not apply to them, and the peer continues to answer pings.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hyper::HeaderMap;
use hyper::body::{Body, Frame};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::guarded_body::{BodyGuard, GuardedBody};
use crate::admission::{
    Deliveries, MIN_CONNECTION_RATE, MIN_STREAM_RATE, MemoryPermit, ProgressDeadline, SILENCE_TIMEOUT,
    log_grpc_status,
};
use shadowslice_datapath::access::AccessEntry;

/// The maximum size of a piece of an answer, in bytes. The peer must read each piece in time.
const PIECE_BYTES: usize = 256 << 10;

/// The pieces that a connection's peer has not read yet.
#[derive(Debug, Default)]
pub(super) struct UnsentPieces {
    waiting: Mutex<WaitingPieces>,
    first_added: Notify,
}

#[derive(Debug, Default)]
struct WaitingPieces {
    next: u64,
    deadlines: HashMap<u64, Instant>,
    /// The deadline of all pieces together, if there are any.
    common: Option<ProgressDeadline>,
}

impl UnsentPieces {
    /// Waits until a piece has waited for too long, or the pieces move too slowly.
    pub(super) async fn overdue(&self) {
        loop {
            match self.first_deadline() {
                None => self.first_added.notified().await,
                Some(deadline) if deadline <= Instant::now() => return,
                // A piece that was added later may have an earlier deadline.
                Some(deadline) => sleep_until(deadline.min(Instant::now() + SILENCE_TIMEOUT)).await,
            }
        }
    }

    fn first_deadline(&self) -> Option<Instant> {
        let pieces = self.waiting.lock();
        pieces.deadlines.values().copied().chain(pieces.common.as_ref().map(ProgressDeadline::at)).min()
    }

    fn add(self: &Arc<Self>, bytes: usize) -> UnsentPiece {
        let mut pieces = self.waiting.lock();
        let number = pieces.next;
        pieces.next += 1;
        pieces.deadlines.insert(number, Instant::now() + piece_timeout(bytes));
        if pieces.common.is_none() {
            pieces.common = Some(ProgressDeadline::new());
            self.first_added.notify_one();
        }
        UnsentPiece { unsent: Arc::clone(self), number, bytes }
    }
}

/// A piece that has not been written. It is dropped when it has been written.
#[derive(Debug)]
pub(super) struct UnsentPiece {
    unsent: Arc<UnsentPieces>,
    number: u64,
    bytes: usize,
}

impl Drop for UnsentPiece {
    fn drop(&mut self) {
        let mut pieces = self.unsent.waiting.lock();
        pieces.deadlines.remove(&self.number);
        if pieces.deadlines.is_empty() {
            pieces.common = None;
        } else if let Some(deadline) = &mut pieces.common {
            deadline.record_progress(self.bytes, MIN_CONNECTION_RATE);
        }
    }
}

/// An answer that records how long it waits for its peer, and keeps its memory permit meanwhile.
#[derive(Debug)]
pub(super) struct MonitoredBody<B> {
    body: B,
    /// The rest of the current frame.
    rest: Bytes,
    /// The deliveries of the answers in that frame.
    deliveries: Deliveries,
    unsent: Arc<UnsentPieces>,
    permit: Option<Arc<MemoryPermit>>,
    entry: Option<AccessEntry>,
}

impl<B: Body> MonitoredBody<B> {
    pub(super) fn new(
        body: B,
        unsent: Arc<UnsentPieces>,
        permit: Option<Arc<MemoryPermit>>,
        entry: Option<AccessEntry>,
    ) -> Self {
        if let Some(entry) = entry.as_ref().filter(|_| body.is_end_stream()) {
            entry.mark_delivered();
        }
        Self { body, rest: Bytes::new(), deliveries: Deliveries::default(), unsent, permit, entry }
    }
}

impl<B> MonitoredBody<B> {
    /// Records in the access log that the client has the end of the answer.
    fn record_end(&self, trailers: Option<&HeaderMap>) {
        let Some(entry) = &self.entry else { return };
        if let Some(trailers) = trailers {
            log_grpc_status(entry, trailers);
        }
        entry.mark_delivered();
    }
}

/// Returns the time that a piece may wait.
fn piece_timeout(bytes: usize) -> Duration {
    SILENCE_TIMEOUT + Duration::from_secs_f64(bytes as f64 / MIN_STREAM_RATE)
}

impl<B: Body<Data = Bytes> + Unpin> Body for MonitoredBody<B> {
    type Data = GuardedBody<Bytes>;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let this = self.get_mut();
        if this.rest.is_empty() {
            let frame = ready!(Pin::new(&mut this.body).poll_frame(cx)).transpose()?;
            match frame.map(Frame::into_data) {
                Some(Ok(data)) => this.rest = data,
                Some(Err(other)) => {
                    let end = other.into_trailers().ok();
                    this.record_end(end.as_ref());
                    return Poll::Ready(end.map(|end| Ok(Frame::trailers(end))));
                }
                None => {
                    this.record_end(None);
                    return Poll::Ready(None);
                }
            }
            if let Some(permit) = &this.permit {
                // Until now, the answer was in memory twice.
                permit.shrink_to(this.rest.len());
                // tonic's frame contains all messages that it has polled so far.
                this.deliveries.add(permit.take_deliveries());
            }
        }
        let piece = this.rest.split_to(this.rest.len().min(PIECE_BYTES));
        let last = this.rest.is_empty().then(|| std::mem::take(&mut this.deliveries));
        let guard = BodyGuard {
            _permit: this.permit.clone(),
            deliveries: last.unwrap_or_default(),
            entry: this.entry.clone(),
            _unsent: Some(this.unsent.add(piece.len())),
            _written_tx: None,
        };
        Poll::Ready(Some(Ok(Frame::data(GuardedBody::new(piece, guard)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http_body_util::{BodyExt, Full, StreamBody};
    use tokio::time::timeout;

    use super::*;

    fn long(bytes: usize, unsent: &Arc<UnsentPieces>) -> MonitoredBody<Full<Bytes>> {
        MonitoredBody::new(Full::new(vec![7; bytes].into()), Arc::clone(unsent), None, None)
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_stops_or_is_too_slow_is_overdue_up_to_the_last_byte() {
        for bytes in [1, 9 * PIECE_BYTES] {
            let unsent = Arc::new(UnsentPieces::default());
            let mut answer = long(bytes, &unsent);
            let piece = answer.frame().await.unwrap().unwrap();
            assert!(timeout(SILENCE_TIMEOUT - Duration::from_secs(1), unsent.overdue()).await.is_err());
            let mut next = (bytes > 1).then(|| unsent.add(PIECE_BYTES));
            drop(piece);
            // At the minimum rate, the written piece moves the deadline by four seconds.
            assert!(timeout(Duration::from_secs(6), unsent.overdue()).await.is_ok() == next.is_some());
            next.take();
            assert!(
                timeout(2 * piece_timeout(PIECE_BYTES), unsent.overdue()).await.is_err(),
                "everything has been written"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stalled_answer_is_overdue_even_if_others_move() {
        let unsent = Arc::new(UnsentPieces::default());
        let begun = Instant::now();
        let _stalled = long(PIECE_BYTES, &unsent).frame().await.unwrap().unwrap();
        let others = async {
            loop {
                let moves = long(PIECE_BYTES, &unsent).frame().await.unwrap().unwrap();
                tokio::time::sleep(Duration::from_secs(1)).await;
                drop(moves);
            }
        };
        tokio::select! {
            () = unsent.overdue() => {}
            () = others => {}
        }
        assert!(
            begun.elapsed() >= piece_timeout(PIECE_BYTES)
                && begun.elapsed() < piece_timeout(PIECE_BYTES) + SILENCE_TIMEOUT
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_with_nothing_to_read_is_not_overdue() {
        let unsent = Arc::new(UnsentPieces::default());
        let silent = StreamBody::new(tokio_stream::pending::<Result<Frame<Bytes>, Infallible>>());
        let mut answer = MonitoredBody::new(silent, Arc::clone(&unsent), None, None);
        assert!(timeout(2 * SILENCE_TIMEOUT, answer.frame()).await.is_err());
        assert!(timeout(2 * SILENCE_TIMEOUT, unsent.overdue()).await.is_err());
    }
}
