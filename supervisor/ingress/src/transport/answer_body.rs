//! The bodies of HTTP answers. An answer is written whole, or piece by piece while it is computed.
//!
//! A piece is computed only when the socket has accepted the piece before it. As a result, a stream
//! has at most one piece in memory, and a client that reads slowly delays its own stream alone.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use http_body_util::Full;
use hyper::Response;
use hyper::body::{Body, Frame, SizeHint};
use shadowslice_datapath::access::AccessEntry;
use shadowslice_datapath::pipeline::Pieces;
use tokio::sync::oneshot;

use super::guarded_body::{BodyGuard, GuardedBody};
use crate::admission::{Deliveries, MemoryPermit};

pub(crate) type HttpAnswer = Response<AnswerBody>;

pub(crate) enum AnswerBody {
    Whole(Pieces),
    /// The pieces follow each other without a known end.
    Streamed(BoxStream<'static, StreamedPiece>),
}

/// A piece of a body that is computed step by step.
#[derive(Debug, Default)]
pub(crate) struct StreamedPiece {
    pub(crate) bytes: Bytes,
    /// The deliveries of the answers that end with the bytes.
    pub(crate) deliveries: Deliveries,
}

impl AnswerBody {
    pub(crate) fn is_empty(&self) -> bool {
        matches!(self, Self::Whole(pieces) if pieces.is_empty())
    }
}

impl From<Pieces> for AnswerBody {
    fn from(pieces: Pieces) -> Self {
        Self::Whole(pieces)
    }
}

impl From<Vec<u8>> for AnswerBody {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Whole(bytes.into())
    }
}

/// An answer's body that keeps the memory permit until it has been written, and then counts as
/// delivered.
pub(crate) enum WatchedBody {
    Whole(Full<GuardedBody<Pieces>>),
    Streamed(PieceWriter),
}

/// The rest of a streamed body.
pub(crate) struct PieceWriter {
    pieces: BoxStream<'static, StreamedPiece>,
    /// A receiver that ends when the previous piece has been written.
    written_rx: Option<oneshot::Receiver<()>>,
    permit: Option<Arc<MemoryPermit>>,
    entry: Option<AccessEntry>,
}

/// Returns an answer that keeps its memory permit until it has been written, and then counts as
/// delivered. An empty answer, and an answer to HEAD, counts at once, because no body is written.
pub(crate) fn guard_answer(
    answer: HttpAnswer,
    permit: Option<Arc<MemoryPermit>>,
    entry: Option<AccessEntry>,
    is_head: bool,
) -> Response<WatchedBody> {
    if let Some(entry) = &entry {
        entry.set_code(answer.status().as_u16());
        if is_head || answer.body().is_empty() {
            entry.mark_delivered();
        }
    }
    answer.map(|body| match body {
        AnswerBody::Whole(pieces) => {
            let mut deliveries = permit.as_ref().map(|permit| permit.take_deliveries()).unwrap_or_default();
            deliveries.add(entry.clone().map(Deliveries::from).unwrap_or_default());
            let guard = BodyGuard { _permit: permit, deliveries, entry, ..BodyGuard::default() };
            WatchedBody::Whole(Full::new(GuardedBody::new(pieces, guard)))
        }
        AnswerBody::Streamed(pieces) => {
            WatchedBody::Streamed(PieceWriter { pieces, written_rx: None, permit, entry })
        }
    })
}

impl PieceWriter {
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<GuardedBody<Pieces>>> {
        if let Some(written_rx) = &mut self.written_rx {
            // Nothing is sent. The sender is dropped with the piece.
            let _ = ready!(Pin::new(written_rx).poll(cx));
            self.written_rx = None;
        }
        let Some(StreamedPiece { bytes, deliveries }) = ready!(self.pieces.poll_next_unpin(cx)) else {
            if let Some(entry) = &self.entry {
                entry.mark_delivered();
            }
            return Poll::Ready(None);
        };
        let (written_tx, written_rx) = oneshot::channel();
        self.written_rx = Some(written_rx);
        let guard = BodyGuard {
            _permit: self.permit.clone(),
            deliveries,
            entry: self.entry.clone(),
            _written_tx: Some(written_tx),
            ..BodyGuard::default()
        };
        Poll::Ready(Some(GuardedBody::new(bytes.into(), guard)))
    }
}

impl Body for WatchedBody {
    type Data = GuardedBody<Pieces>;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Infallible>>> {
        match self.get_mut() {
            Self::Whole(body) => Pin::new(body).poll_frame(cx),
            Self::Streamed(writer) => {
                writer.poll_piece(cx).map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(body) if body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(body) => body.size_hint(),
            Self::Streamed(_) => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Buf;
    use futures_util::{FutureExt, stream};
    use http_body_util::BodyExt;

    use super::*;

    #[tokio::test]
    async fn a_piece_is_computed_when_the_piece_before_it_has_been_written() {
        let pieces =
            ["one", "two"].map(|text| StreamedPiece { bytes: text.into(), ..StreamedPiece::default() });
        let answer = Response::new(AnswerBody::Streamed(stream::iter(pieces).boxed()));
        let mut body = guard_answer(answer, None, None, false).into_body();
        assert!(!body.is_end_stream() && body.size_hint().exact().is_none());
        let mut first = body.frame().await.unwrap().unwrap().into_data().unwrap();
        first.advance(2);
        assert!(body.frame().now_or_never().is_none(), "a byte of the first piece is unwritten");
        drop(first);
        let second = body.frame().now_or_never().unwrap().unwrap().unwrap().into_data().unwrap();
        assert_eq!(second.chunk(), b"two");
        drop(second);
        assert!(body.frame().await.is_none());
    }
}
