//! Bodies of requests: bounded in size and in time.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep_until, timeout_at};
use tonic::Status;

use shadowslice_datapath::pipeline::Pieces;

/// How long a peer may be silent in the middle of a body.
const SILENCE: Duration = Duration::from_secs(30);

/// The least bytes a second of a body, beside one silence: a client that sends a byte now and then
/// would keep its place for ever.
pub(super) const SLOWEST: f64 = 1024.0;

/// In bytes, of requests besides inferences: they are not admitted before they are read.
pub(super) const SHORT: usize = 256 << 10;

/// Smaller pieces, in bytes, are put together: each keeps the buffer that it was read into.
const SMALL: usize = 4096;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unread {
    TooLarge,
    /// Nothing came for [`SILENCE`], or all of it too slowly.
    Stalled,
    Broken(String),
}

struct Patience {
    begun: Instant,
    bytes: f64,
    until: Instant,
}

impl Patience {
    fn new() -> Self {
        let begun = Instant::now();
        Self { begun, bytes: 0.0, until: begun + SILENCE }
    }

    fn came(&mut self, bytes: usize) {
        self.bytes += bytes as f64;
        let at_pace = self.begun + SILENCE + Duration::from_secs_f64(self.bytes / SLOWEST);
        self.until = at_pace.min(Instant::now() + SILENCE);
    }
}

/// A body that announces more than `limit` bytes is not read at all.
pub(super) async fn read<B>(mut body: B, limit: usize) -> Result<Pieces, Unread>
where
    B: Body<Data = Bytes, Error: ToString> + Unpin,
{
    let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    if announced > limit {
        return Err(Unread::TooLarge);
    }
    let (mut whole, mut small, mut patience) = (Pieces::default(), BytesMut::new(), Patience::new());
    while let Some(frame) = timeout_at(patience.until, body.frame()).await.map_err(|_| Unread::Stalled)? {
        let Ok(data) = frame.map_err(|why| Unread::Broken(why.to_string()))?.into_data() else { continue };
        patience.came(data.len());
        if data.len() > limit - whole.len() - small.len() {
            return Err(Unread::TooLarge);
        }
        let alone = whole.is_empty() && small.is_empty() && body.is_end_stream();
        if data.len() < SMALL && !alone {
            small.extend_from_slice(&data);
            continue;
        }
        whole.push(small.split().freeze());
        whole.push(data);
    }
    whole.push(small.freeze());
    Ok(whole)
}

/// A gRPC body that fails when its peer falls silent, or is too slow.
pub(super) struct Impatient<B> {
    body: B,
    patience: Patience,
    given_up: Pin<Box<Sleep>>,
}

impl<B> Impatient<B> {
    pub(super) fn new(body: B) -> Self {
        let patience = Patience::new();
        Self { body, given_up: Box::pin(sleep_until(patience.until)), patience }
    }
}

impl<B> Body for Impatient<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Self { body, patience, given_up } = self.get_mut();
        if let Poll::Ready(frame) = Pin::new(body).poll_frame(cx) {
            let came = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref());
            patience.came(came.map_or(0, Bytes::len));
            given_up.as_mut().reset(patience.until);
            return Poll::Ready(frame.map(|frame| frame.map_err(|why| Status::from_error(why.into()))));
        }
        ready!(given_up.as_mut().poll(cx));
        Poll::Ready(Some(Err(Status::deadline_exceeded("the request did not go on"))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::convert::Infallible;

    use http_body_util::{Full, StreamBody};
    use tokio::time::sleep;
    use tokio_stream::StreamExt;

    use super::*;

    fn pieces(pieces: &[&'static str]) -> impl Body<Data = Bytes, Error = Infallible> + Unpin {
        let frames: VecDeque<_> = pieces.iter().map(|piece| Ok(Frame::data(Bytes::from(*piece)))).collect();
        StreamBody::new(tokio_stream::iter(frames))
    }

    #[tokio::test]
    async fn a_body_in_pieces_comes_whole() {
        assert_eq!(read(pieces(&["ab", "", "cde"]), 5).await, Ok(Bytes::from("abcde").into()));
        assert_eq!(read(pieces(&[]), 0).await, Ok(Pieces::default()));
    }

    #[tokio::test]
    async fn a_body_over_the_limit_is_refused_when_it_passes_it() {
        assert_eq!(read(pieces(&["abc", "def", "never read"]), 5).await, Err(Unread::TooLarge));
        assert_eq!(read(Full::new(Bytes::from("abcdef")), 5).await, Err(Unread::TooLarge));
    }

    #[tokio::test]
    async fn a_silent_peer_is_given_up() {
        tokio::time::pause();
        let silent = StreamBody::new(tokio_stream::pending::<Result<Frame<Bytes>, Infallible>>());
        assert_eq!(read(silent, 5).await, Err(Unread::Stalled));
        let silent = StreamBody::new(tokio_stream::pending::<Result<Frame<Bytes>, Infallible>>());
        let status = Impatient::new(silent).frame().await.unwrap().unwrap_err();
        assert_eq!(status.code(), tonic::Code::DeadlineExceeded);
    }

    /// A body of which so many bytes come every 20 s, for an hour.
    fn slow(bytes: usize) -> impl Body<Data = Bytes, Error = Infallible> + Unpin {
        let pieces = (0..180).map(move |_| Ok(Frame::data(vec![0; bytes].into())));
        let piece = |piece| async move {
            sleep(Duration::from_secs(20)).await;
            piece
        };
        StreamBody::new(Box::pin(tokio_stream::iter(pieces).then(piece)))
    }

    #[tokio::test]
    async fn a_peer_that_sends_a_byte_now_and_then_is_given_up() {
        tokio::time::pause();
        let begun = Instant::now();
        assert_eq!(read(slow(1), 1 << 20).await, Err(Unread::Stalled));
        let mut body = Impatient::new(slow(1));
        while body.frame().await.unwrap().is_ok() {}
        assert!(begun.elapsed() < Duration::from_secs(2 * 32), "{:?}", begun.elapsed());
    }

    #[tokio::test]
    async fn a_slow_peer_is_not() {
        tokio::time::pause();
        let bytes = 20 << 10;
        assert_eq!(read(slow(bytes), 180 * bytes).await.unwrap().len(), 180 * bytes);
        let mut body = Impatient::new(slow(bytes));
        while let Some(frame) = body.frame().await {
            frame.unwrap();
        }
    }
}
