//! The bodies of requests, which are bounded in memory and in time.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Limited};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use shadowslice_datapath::access::AccessEntry;
use shadowslice_datapath::pipeline::{Pieces, RequestFailure};
use tokio::time::{timeout, timeout_at};
use tonic::codegen::StdError;

use crate::admission::{MemoryPermit, ProgressDeadline, RequestError};

/// The maximum size of requests other than inferences, in bytes.
pub(crate) const SHORT_BODY_BYTES: usize = 256 << 10;

/// The size in bytes below which pieces are joined. Each other piece keeps the buffer that it was
/// read into.
const SMALL: usize = 4096;

/// The time that an answer waits for the rest of a request that it does not need.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(1);

/// Reads a body. If it announces more than `limit` bytes, or more than the available memory, reads
/// nothing. `bound` explains the limit.
pub(crate) async fn read<B>(
    mut body: B,
    limit: usize,
    bound: &str,
    permit: &MemoryPermit,
) -> Result<Pieces, RequestError>
where
    B: Body<Data = Bytes, Error: ToString> + Unpin,
{
    let too_large = || RequestError::TooLarge(format!("the request is larger than {limit} bytes ({bound})"));
    let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    if announced > limit {
        return Err(too_large());
    }
    permit.grow(announced)?;
    let (mut whole, mut small, mut deadline) = (Pieces::default(), BytesMut::new(), ProgressDeadline::new());
    let mut received = 0;
    while let Some(frame) =
        timeout_at(deadline.at(), body.frame()).await.map_err(|_| RequestError::Stalled)?
    {
        let broken = |why: B::Error| {
            RequestFailure::Invalid(format!("failed to read the request: {}", why.to_string()))
        };
        let Ok(data) = frame.map_err(broken)?.into_data() else { continue };
        deadline.record_progress(data.len(), permit.min_rate());
        if data.len() > limit - received {
            return Err(too_large());
        }
        let unannounced = (received + data.len()).saturating_sub(announced.max(received));
        received += data.len();
        if unannounced > 0 {
            permit.grow(unannounced)?;
        }
        let is_only_piece = whole.is_empty() && small.is_empty() && body.is_end_stream();
        if data.len() < SMALL && !is_only_piece {
            small.extend_from_slice(&data);
            continue;
        }
        whole.push(small.split().freeze());
        whole.push(data);
    }
    whole.push(small.freeze());
    Ok(whole)
}

/// Reads a short body to its end and discards it, so that its connection can continue. Returns
/// false if the body is long, late or broken.
pub(crate) async fn discard<B>(body: B) -> bool
where
    B: Body<Data = Bytes, Error: Into<StdError>> + Unpin,
{
    if body.size_hint().lower() > SHORT_BODY_BYTES as u64 {
        return false;
    }
    let mut body = Limited::new(body, SHORT_BODY_BYTES);
    let read = async {
        while body.frame().await.transpose()?.is_some() {}
        Ok::<_, StdError>(())
    };
    timeout(DISCARD_TIMEOUT, read).await.is_ok_and(|read| read.is_ok())
}

/// A request's body whose bytes the access log counts.
pub(crate) struct CountedBody {
    body: Incoming,
    entry: Option<AccessEntry>,
}

impl CountedBody {
    pub(crate) fn new(body: Incoming, entry: Option<AccessEntry>) -> Self {
        Self { body, entry }
    }
}

impl Body for CountedBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if let (Some(entry), Poll::Ready(Some(Ok(frame)))) = (&self.entry, &frame) {
            entry.add_received(frame.data_ref().map_or(0, Bytes::len));
        }
        frame
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
    use tokio::time::{Instant, sleep};
    use tokio_stream::StreamExt;

    use super::super::message_body::{MessageBody, PREFIX_BYTES};
    use super::*;
    use crate::admission::{CALL_PERMIT, MIN_CONNECTION_RATE, unlimited};

    fn pieces(pieces: &[&'static str]) -> impl Body<Data = Bytes, Error = Infallible> + Unpin {
        let frames: VecDeque<_> = pieces.iter().map(|piece| Ok(Frame::data(Bytes::from(*piece)))).collect();
        StreamBody::new(tokio_stream::iter(frames))
    }

    async fn read<B>(body: B, limit: usize) -> Result<Pieces, RequestError>
    where
        B: Body<Data = Bytes, Error = Infallible> + Unpin,
    {
        super::read(body, limit, "a test", &unlimited()).await
    }

    #[tokio::test]
    async fn a_body_in_pieces_comes_whole() {
        assert_eq!(read(pieces(&["ab", "", "cde"]), 5).await, Ok(Bytes::from("abcde").into()));
        assert_eq!(read(pieces(&[]), 0).await, Ok(Pieces::default()));
    }

    #[tokio::test]
    async fn a_body_over_the_limit_is_refused_when_it_passes_it() {
        let refused = Err(RequestError::TooLarge("the request is larger than 5 bytes (a test)".to_owned()));
        assert_eq!(read(pieces(&["abc", "def", "never read"]), 5).await, refused);
        assert_eq!(read(Full::new(Bytes::from("abcdef")), 5).await, refused);
    }

    /// Waits for a frame of a call that has a permit.
    async fn within<T>(frame: impl Future<Output = T>) -> T {
        CALL_PERMIT.scope(unlimited(), frame).await
    }

    #[tokio::test]
    async fn a_silent_peer_is_given_up() {
        tokio::time::pause();
        let silent = StreamBody::new(tokio_stream::pending::<Result<Frame<Bytes>, Infallible>>());
        assert_eq!(read(silent, 5).await, Err(RequestError::Stalled));
        let silent = StreamBody::new(tokio_stream::pending::<Result<Frame<Bytes>, Infallible>>());
        let status = within(MessageBody::single(silent, 9).frame()).await.unwrap().unwrap_err();
        assert_eq!(status.code(), tonic::Code::DeadlineExceeded);
    }

    const PIECES: usize = 18;

    /// Returns a message that arrives in six minutes, in a piece of this size every 20 s.
    fn slow(bytes: usize) -> impl Body<Data = Bytes, Error = Infallible> + Unpin {
        let mut whole = vec![0; PIECES * bytes];
        let length = u32::try_from(whole.len() - PREFIX_BYTES).unwrap();
        whole[1..PREFIX_BYTES].copy_from_slice(&length.to_be_bytes());
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
        assert_eq!(read(slow(1), 1 << 20).await, Err(RequestError::Stalled));
        let mut body = MessageBody::single(slow(1), 9);
        while within(body.frame()).await.unwrap().is_ok() {}
        assert!(begun.elapsed() < Duration::from_secs(2 * 32), "{:?}", begun.elapsed());
    }

    #[tokio::test]
    async fn a_slow_peer_is_served() {
        tokio::time::pause();
        let bytes = 20 * MIN_CONNECTION_RATE as usize;
        assert_eq!(read(slow(bytes), PIECES * bytes).await.unwrap().len(), PIECES * bytes);
        let mut body = MessageBody::single(slow(bytes), PIECES * bytes);
        while let Some(frame) = within(body.frame()).await {
            frame.unwrap();
        }
    }
}
