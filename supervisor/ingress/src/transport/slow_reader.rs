//! Answers over gRPC that their peer does not take. Bytes that flow control holds back are not
//! written, so the stream's pace of writing does not see them; the peer goes on answering pings
//! meanwhile.

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

use crate::admission::deliveries::Deliveries;
use crate::admission::memory_permit::Reserved;
use crate::admission::min_rate::{Patience, SILENCE, SLOWEST, SLOWEST_STREAM};
use crate::api::traced::note_grpc;
use crate::transport::guarded_body::{Goes, Kept};
use shadowslice_datapath::access::AccessEntry;

/// Answers go on in pieces of at most so many bytes, and the peer must take each piece in time.
const PIECE: usize = 256 << 10;

/// What a connection's peer has not taken yet.
#[derive(Debug, Default)]
pub(crate) struct Untaken {
    pieces: Mutex<Pieces>,
    begun: Notify,
}

#[derive(Debug, Default)]
struct Pieces {
    next: u64,
    until: HashMap<u64, Instant>,
    /// Of all of them together, while there are any.
    patience: Option<Patience>,
}

impl Untaken {
    /// Returns when a piece has waited for too long, or all of them go too slowly.
    pub(crate) async fn overdue(&self) {
        loop {
            match self.first() {
                None => self.begun.notified().await,
                Some(until) if until <= Instant::now() => return,
                // A piece that began to wait later may be due sooner.
                Some(until) => sleep_until(until.min(Instant::now() + SILENCE)).await,
            }
        }
    }

    fn first(&self) -> Option<Instant> {
        let pieces = self.pieces.lock();
        pieces.until.values().copied().chain(pieces.patience.as_ref().map(Patience::until)).min()
    }

    fn waits(self: &Arc<Self>, bytes: usize) -> Waits {
        let mut pieces = self.pieces.lock();
        let number = pieces.next;
        pieces.next += 1;
        pieces.until.insert(number, Instant::now() + patience(bytes));
        if pieces.patience.is_none() {
            pieces.patience = Some(Patience::new());
            self.begun.notify_one();
        }
        Waits { untaken: Arc::clone(self), number, bytes }
    }
}

/// A piece that has not been written; dropped when it has been.
#[derive(Debug)]
pub(crate) struct Waits {
    untaken: Arc<Untaken>,
    number: u64,
    bytes: usize,
}

impl Drop for Waits {
    fn drop(&mut self) {
        let mut pieces = self.untaken.pieces.lock();
        pieces.until.remove(&self.number);
        if pieces.until.is_empty() {
            pieces.patience = None;
        } else if let Some(patience) = &mut pieces.patience {
            patience.moved(self.bytes, SLOWEST);
        }
    }
}

/// An answer that notes when it waits for its peer, and keeps its memory reserved meanwhile.
#[derive(Debug)]
pub(crate) struct Answer<B> {
    body: B,
    /// The rest of a frame.
    rest: Bytes,
    /// The deliveries of the answers in that frame.
    deliveries: Deliveries,
    untaken: Arc<Untaken>,
    reserved: Option<Arc<Reserved>>,
    access: Option<AccessEntry>,
}

impl<B: Body> Answer<B> {
    pub(crate) fn new(
        body: B,
        untaken: Arc<Untaken>,
        reserved: Option<Arc<Reserved>>,
        access: Option<AccessEntry>,
    ) -> Self {
        if let Some(access) = access.as_ref().filter(|_| body.is_end_stream()) {
            access.mark_delivered();
        }
        Self { body, rest: Bytes::new(), deliveries: Deliveries::default(), untaken, reserved, access }
    }
}

impl<B> Answer<B> {
    /// Notes for the access log that the client takes the end of the answer.
    fn ends(&self, trailers: Option<&HeaderMap>) {
        let Some(access) = &self.access else { return };
        if let Some(trailers) = trailers {
            note_grpc(access, trailers);
        }
        access.mark_delivered();
    }
}

/// The companions of a piece.
#[derive(Debug)]
pub(crate) struct Piece {
    _waits: Waits,
    _reserved: Option<Arc<Reserved>>,
    /// The deliveries of the answers that end with it.
    deliveries: Deliveries,
    access: Option<AccessEntry>,
}

impl Goes for Piece {
    fn advanced(&mut self, bytes: usize) {
        if let Some(access) = &self.access {
            access.add_sent(bytes);
        }
    }

    fn written(&mut self) {
        self.deliveries.written();
    }
}

/// How long so many bytes of an answer may wait.
fn patience(bytes: usize) -> Duration {
    SILENCE + Duration::from_secs_f64(bytes as f64 / SLOWEST_STREAM)
}

impl<B: Body<Data = Bytes> + Unpin> Body for Answer<B> {
    type Data = Kept<Bytes, Piece>;
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
                    this.ends(end.as_ref());
                    return Poll::Ready(end.map(|end| Ok(Frame::trailers(end))));
                }
                None => {
                    this.ends(None);
                    return Poll::Ready(None);
                }
            }
            if let Some(reserved) = &this.reserved {
                // The answer was there twice until now.
                reserved.shrink_to(this.rest.len());
                // tonic's frame has all messages that it has polled so far.
                this.deliveries.add(reserved.deliveries());
            }
        }
        let piece = this.rest.split_to(this.rest.len().min(PIECE));
        let last = this.rest.is_empty().then(|| std::mem::take(&mut this.deliveries));
        let with = Piece {
            _waits: this.untaken.waits(piece.len()),
            _reserved: this.reserved.clone(),
            deliveries: last.unwrap_or_default(),
            access: this.access.clone(),
        };
        Poll::Ready(Some(Ok(Frame::data(Kept::new(piece, with)))))
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

    fn long(bytes: usize, untaken: &Arc<Untaken>) -> Answer<Full<Bytes>> {
        Answer::new(Full::new(vec![7; bytes].into()), Arc::clone(untaken), None, None)
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_stops_or_is_too_slow_is_overdue_up_to_the_last_byte() {
        for bytes in [1, 9 * PIECE] {
            let untaken = Arc::new(Untaken::default());
            let mut answer = long(bytes, &untaken);
            let piece = answer.frame().await.unwrap().unwrap();
            assert!(timeout(SILENCE - Duration::from_secs(1), untaken.overdue()).await.is_err());
            let mut next = (bytes > 1).then(|| untaken.waits(PIECE));
            drop(piece);
            // At the least pace the piece that has gone bought four seconds.
            assert!(timeout(Duration::from_secs(6), untaken.overdue()).await.is_ok() == next.is_some());
            next.take();
            assert!(timeout(2 * patience(PIECE), untaken.overdue()).await.is_err(), "all has gone");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_stands_still_beside_others_is_overdue() {
        let untaken = Arc::new(Untaken::default());
        let begun = Instant::now();
        let _stands = long(PIECE, &untaken).frame().await.unwrap().unwrap();
        let others = async {
            loop {
                let moves = long(PIECE, &untaken).frame().await.unwrap().unwrap();
                tokio::time::sleep(Duration::from_secs(1)).await;
                drop(moves);
            }
        };
        tokio::select! {
            () = untaken.overdue() => {}
            () = others => {}
        }
        assert!(begun.elapsed() >= patience(PIECE) && begun.elapsed() < patience(PIECE) + SILENCE);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_with_nothing_to_take_is_not_overdue() {
        let untaken = Arc::new(Untaken::default());
        let silent = StreamBody::new(tokio_stream::pending::<Result<Frame<Bytes>, Infallible>>());
        let mut answer = Answer::new(silent, Arc::clone(&untaken), None, None);
        assert!(timeout(2 * SILENCE, answer.frame()).await.is_err());
        assert!(timeout(2 * SILENCE, untaken.overdue()).await.is_err());
    }
}
