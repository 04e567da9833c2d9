//! Bodies of requests: bounded in size and in time.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep, timeout};
use tonic::Status;

use crate::pipeline::Pieces;

/// How long a peer may be silent in the middle of a body.
const SILENCE: Duration = Duration::from_secs(30);

/// Pieces smaller than this, in bytes, are put together: each keeps the buffer that it was read into.
const SMALL: usize = 4096;

/// Why a body was not read to its end.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unread {
    /// It is longer than the limit.
    TooLarge,
    /// Nothing came for [`SILENCE`].
    Stalled,
    /// It is malformed, or the connection is gone.
    Broken(String),
}

/// Reads a whole body of at most `limit` bytes; one that announces more is not read at all.
pub(super) async fn read<B>(mut body: B, limit: usize) -> Result<Pieces, Unread>
where
    B: Body<Data = Bytes, Error: ToString> + Unpin,
{
    let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    if announced > limit {
        return Err(Unread::TooLarge);
    }
    let (mut whole, mut small) = (Pieces::default(), BytesMut::new());
    while let Some(frame) = timeout(SILENCE, body.frame()).await.map_err(|_| Unread::Stalled)? {
        let Ok(data) = frame.map_err(|why| Unread::Broken(why.to_string()))?.into_data() else { continue };
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

/// A gRPC body that fails when its peer falls silent.
pub(super) struct Impatient<B> {
    body: B,
    silence: Pin<Box<Sleep>>,
}

impl<B> Impatient<B> {
    pub(super) fn new(body: B) -> Self {
        Self { body, silence: Box::pin(sleep(SILENCE)) }
    }
}

impl<B> Body for Impatient<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) {
            self.silence.as_mut().reset(Instant::now() + SILENCE);
            return Poll::Ready(frame.map(|frame| frame.map_err(|why| Status::from_error(why.into()))));
        }
        ready!(self.silence.as_mut().poll(cx));
        let message = format!("the request did not go on for {} s", SILENCE.as_secs());
        Poll::Ready(Some(Err(Status::deadline_exceeded(message))))
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
}
