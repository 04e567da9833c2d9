//! Bodies of requests: bounded in memory and in time.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep_until, timeout_at};
use tonic::Status;

use crate::admission::memory_permit::Reserved;
use crate::admission::min_rate::{Patience, SLOWEST, SLOWEST_STREAM};
use crate::admission::request_error::RequestError;
use shadowslice_datapath::pipeline::Pieces;

/// In bytes, of requests besides inferences.
pub(crate) const SHORT: usize = 256 << 10;

/// Smaller pieces, in bytes, are put together: each keeps the buffer that it was read into.
const SMALL: usize = 4096;

/// A gRPC message's flag and length.
pub(crate) const ENVELOPE: usize = 5;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unread {
    TooLarge,
    /// It fell silent, or came too slowly.
    Stalled,
    Broken(String),
    NoMemory(RequestError),
}

/// A body that announces more than `limit` bytes, or more than there is memory for, is not read at
/// all.
pub(crate) async fn read<B>(mut body: B, limit: usize, reserved: &Reserved) -> Result<Pieces, Unread>
where
    B: Body<Data = Bytes, Error: ToString> + Unpin,
{
    let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    if announced > limit {
        return Err(Unread::TooLarge);
    }
    reserved.grow(announced).map_err(Unread::NoMemory)?;
    let (mut whole, mut small, mut patience) = (Pieces::default(), BytesMut::new(), Patience::new());
    let mut came = 0;
    while let Some(frame) = timeout_at(patience.until(), body.frame()).await.map_err(|_| Unread::Stalled)? {
        let Ok(data) = frame.map_err(|why| Unread::Broken(why.to_string()))?.into_data() else { continue };
        patience.moved(data.len(), slowest(reserved));
        if data.len() > limit - came {
            return Err(Unread::TooLarge);
        }
        let unannounced = (came + data.len()).saturating_sub(announced.max(came));
        came += data.len();
        if unannounced > 0 {
            reserved.grow(unannounced).map_err(Unread::NoMemory)?;
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

/// How long an answer waits for the rest of a request that it does not need.
const REST: Duration = Duration::from_secs(1);

/// Reads a short body to its end and keeps nothing of it, so that its connection can go on. `false`
/// if it is long, late or broken.
pub(crate) async fn discarded<B>(mut body: B) -> bool
where
    B: Body<Data = Bytes> + Unpin,
{
    let mut left = SHORT;
    if body.size_hint().lower() > left as u64 {
        return false;
    }
    let until = Instant::now() + REST;
    loop {
        let frame = match timeout_at(until, body.frame()).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(None) => return true,
            Ok(Some(Err(_))) | Err(_) => return false,
        };
        match left.checked_sub(frame.data_ref().map_or(0, Bytes::len)) {
            Some(rest) => left = rest,
            None => return false,
        }
    }
}

/// The least bytes a second of one body: the streams of a connection share its pace.
pub(crate) fn slowest(reserved: &Reserved) -> f64 {
    (SLOWEST / reserved.client().calls() as f64).max(SLOWEST_STREAM)
}

/// The body of a gRPC call, with one message of at most `limit` bytes. It fails when there is no
/// memory for the message, and when its peer falls silent or is too slow.
pub(crate) struct OneMessage<B> {
    body: B,
    limit: usize,
    head: BytesMut,
    /// Of the message, once its head has come.
    left: Option<usize>,
    patience: Patience,
    given_up: Pin<Box<Sleep>>,
    reserved: Arc<Reserved>,
}

impl<B> OneMessage<B> {
    pub(crate) fn new(body: B, limit: usize, reserved: Arc<Reserved>) -> Self {
        let patience = Patience::new();
        let given_up = Box::pin(sleep_until(patience.until()));
        Self { body, limit, head: BytesMut::new(), left: None, patience, given_up, reserved }
    }

    fn came(&mut self, mut data: &[u8]) -> Result<(), Status> {
        self.patience.moved(data.len(), slowest(&self.reserved));
        self.given_up.as_mut().reset(self.patience.until());
        let left = match self.left {
            Some(left) => left,
            None => {
                let head = data.len().min(ENVELOPE - self.head.len());
                self.head.extend_from_slice(&data[..head]);
                data.advance(head);
                let Some(length) = length(&self.head) else { return Ok(()) };
                // A longer message is refused unread.
                if length <= self.limit {
                    self.reserved.grow(length)?;
                }
                length
            }
        };
        let rest = left.checked_sub(data.len());
        self.left = Some(rest.ok_or_else(|| Status::internal("expected one message, got more"))?);
        Ok(())
    }
}

/// The next frame of a gRPC body, which must come before `given_up` if that is there.
pub(crate) fn poll_in_time<B>(
    body: &mut B,
    given_up: Option<&mut Pin<Box<Sleep>>>,
    cx: &mut Context<'_>,
) -> Poll<Option<Result<Frame<Bytes>, Status>>>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    if let Poll::Ready(frame) = Pin::new(body).poll_frame(cx) {
        return Poll::Ready(frame.map(|frame| frame.map_err(|why| Status::from_error(why.into()))));
    }
    let Some(given_up) = given_up else { return Poll::Pending };
    ready!(given_up.as_mut().poll(cx));
    Poll::Ready(Some(Err(Status::deadline_exceeded("timed out waiting for the rest of the request"))))
}

/// The length of a message by its first bytes.
pub(crate) fn length(head: &[u8]) -> Option<usize> {
    let length = <[u8; 4]>::try_from(head.get(1..ENVELOPE)?).ok()?;
    usize::try_from(u32::from_be_bytes(length)).ok()
}

impl<B> Body for OneMessage<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        let frame = ready!(poll_in_time(&mut this.body, Some(&mut this.given_up), cx));
        let frame = frame.map(|frame| {
            let frame = frame?;
            frame.data_ref().map_or(Ok(()), |data| this.came(data))?;
            Ok(frame)
        });
        Poll::Ready(frame)
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
    use crate::admission::memory_permit::enough;

    fn pieces(pieces: &[&'static str]) -> impl Body<Data = Bytes, Error = Infallible> + Unpin {
        let frames: VecDeque<_> = pieces.iter().map(|piece| Ok(Frame::data(Bytes::from(*piece)))).collect();
        StreamBody::new(tokio_stream::iter(frames))
    }

    #[tokio::test]
    async fn a_body_in_pieces_comes_whole() {
        assert_eq!(read(pieces(&["ab", "", "cde"]), 5, &enough()).await, Ok(Bytes::from("abcde").into()));
        assert_eq!(read(pieces(&[]), 0, &enough()).await, Ok(Pieces::default()));
    }

    #[tokio::test]
    async fn a_body_over_the_limit_is_refused_when_it_passes_it() {
        assert_eq!(read(pieces(&["abc", "def", "never read"]), 5, &enough()).await, Err(Unread::TooLarge));
        assert_eq!(read(Full::new(Bytes::from("abcdef")), 5, &enough()).await, Err(Unread::TooLarge));
    }

    #[tokio::test]
    async fn a_silent_peer_is_given_up() {
        tokio::time::pause();
        let silent = StreamBody::new(tokio_stream::pending::<Result<Frame<Bytes>, Infallible>>());
        assert_eq!(read(silent, 5, &enough()).await, Err(Unread::Stalled));
        let silent = StreamBody::new(tokio_stream::pending::<Result<Frame<Bytes>, Infallible>>());
        let status = OneMessage::new(silent, 9, enough()).frame().await.unwrap().unwrap_err();
        assert_eq!(status.code(), tonic::Code::DeadlineExceeded);
    }

    const PIECES: usize = 18;

    /// A message of which so many bytes come every 20 s, for six minutes.
    fn slow(bytes: usize) -> impl Body<Data = Bytes, Error = Infallible> + Unpin {
        let mut whole = vec![0; PIECES * bytes];
        let length = u32::try_from(whole.len() - ENVELOPE).unwrap();
        whole[1..ENVELOPE].copy_from_slice(&length.to_be_bytes());
        let pieces: Vec<_> =
            whole.chunks(bytes).map(|piece| Ok(Frame::data(piece.to_vec().into()))).collect();
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
        assert_eq!(read(slow(1), 1 << 20, &enough()).await, Err(Unread::Stalled));
        let mut body = OneMessage::new(slow(1), 9, enough());
        while body.frame().await.unwrap().is_ok() {}
        assert!(begun.elapsed() < Duration::from_secs(2 * 32), "{:?}", begun.elapsed());
    }

    #[tokio::test]
    async fn a_slow_peer_is_not() {
        tokio::time::pause();
        let bytes = 20 * SLOWEST as usize;
        assert_eq!(read(slow(bytes), PIECES * bytes, &enough()).await.unwrap().len(), PIECES * bytes);
        let mut body = OneMessage::new(slow(bytes), PIECES * bytes, enough());
        while let Some(frame) = body.frame().await {
            frame.unwrap();
        }
    }
}
