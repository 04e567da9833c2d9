//! The body of a gRPC call with a single message.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use hyper::body::{Body, Frame};
use tokio::time::{Sleep, sleep_until};
use tonic::Status;
use tonic::codegen::StdError;

use crate::admission::{MemoryPermit, ProgressDeadline};

/// The size of the prefix of a gRPC message, which consists of a flag and the length.
pub(super) const PREFIX_BYTES: usize = 5;

/// A body with a single message of at most `limit` bytes. The body fails if there is too little
/// memory for the message, and if its peer is silent or too slow.
pub(crate) struct SingleMessage<B> {
    body: B,
    limit: usize,
    prefix: BytesMut,
    /// The bytes of the message that are still to come, or `None` until the prefix has come.
    left: Option<usize>,
    deadline: ProgressDeadline,
    timer: Pin<Box<Sleep>>,
    permit: Arc<MemoryPermit>,
}

impl<B> SingleMessage<B> {
    pub(crate) fn new(body: B, limit: usize, permit: Arc<MemoryPermit>) -> Self {
        let deadline = ProgressDeadline::new();
        let timer = Box::pin(sleep_until(deadline.at()));
        Self { body, limit, prefix: BytesMut::new(), left: None, deadline, timer, permit }
    }

    fn receive(&mut self, mut data: &[u8]) -> Result<(), Status> {
        self.deadline.record_progress(data.len(), self.permit.min_rate());
        self.timer.as_mut().reset(self.deadline.at());
        let left = match self.left {
            Some(left) => left,
            None => {
                let prefix = data.len().min(PREFIX_BYTES - self.prefix.len());
                self.prefix.extend_from_slice(&data[..prefix]);
                data.advance(prefix);
                let Some(length) = message_length(&self.prefix) else { return Ok(()) };
                // tonic refuses a longer message before it reads the message.
                if length <= self.limit {
                    self.permit.grow(length)?;
                }
                length
            }
        };
        let rest = left.checked_sub(data.len());
        self.left = Some(rest.ok_or_else(|| Status::internal("expected one message, got more"))?);
        Ok(())
    }
}

/// Returns the next frame of a body. Fails if `timer` runs out first.
pub(super) fn poll_in_time(
    body: &mut (impl Body<Data = Bytes, Error: Into<StdError>> + Unpin),
    timer: Option<&mut Pin<Box<Sleep>>>,
    cx: &mut Context<'_>,
) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
    if let Poll::Ready(frame) = Pin::new(body).poll_frame(cx) {
        return Poll::Ready(frame.map(|frame| frame.map_err(|why| Status::from_error(why.into()))));
    }
    let Some(timer) = timer else { return Poll::Pending };
    ready!(timer.as_mut().poll(cx));
    Poll::Ready(Some(Err(Status::deadline_exceeded("timed out waiting for the rest of the request"))))
}

/// Returns the length of a message, or `None` if its prefix is incomplete.
pub(super) fn message_length(start: &[u8]) -> Option<usize> {
    let length = <[u8; 4]>::try_from(start.get(1..PREFIX_BYTES)?).ok()?;
    usize::try_from(u32::from_be_bytes(length)).ok()
}

impl<B: Body<Data = Bytes, Error: Into<StdError>> + Unpin> Body for SingleMessage<B> {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        let frame = ready!(poll_in_time(&mut this.body, Some(&mut this.timer), cx));
        let frame = frame.map(|frame| {
            let frame = frame?;
            frame.data_ref().map_or(Ok(()), |data| this.receive(data))?;
            Ok(frame)
        });
        Poll::Ready(frame)
    }
}
