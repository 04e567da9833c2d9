//! The bodies of gRPC calls, which consist of messages.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::Bytes;
use hyper::body::{Body, Frame};
use parking_lot::Mutex;
use tokio::time::{Sleep, sleep_until};
use tonic::Status;
use tonic::codegen::StdError;

use crate::admission::{CALL_PERMIT, ProgressDeadline, RequestError};

/// The size of the prefix of a gRPC message, which consists of a flag and the length.
pub(super) const PREFIX_BYTES: usize = 5;

/// A body with messages of at most `limit` bytes each. The body fails if there is too little memory
/// for a message, and if its peer is silent or too slow. When it is polled, [`CALL_PERMIT`] must be
/// the permit of the next message.
pub(crate) struct MessageBody<B> {
    body: B,
    limit: usize,
    messages: Messages,
    /// The prefix of the next message.
    prefix: Vec<u8>,
    /// The bytes of the current message that are still to come.
    left: usize,
    /// The bytes of the current message for which no memory has been taken yet. The frame that ends
    /// a message may also contain the prefix of the next one.
    owed: usize,
    deadline: Option<(ProgressDeadline, Pin<Box<Sleep>>)>,
}

/// The messages that a call may send.
enum Messages {
    /// A single message, which has begun or not. The peer must also end the call in time.
    One { has_begun: bool },
    /// Any number of messages. Between messages the peer may be silent.
    Many(MessageStarts),
}

impl<B> MessageBody<B> {
    /// Returns the body of a call with a single message.
    pub(crate) fn single(body: B, limit: usize) -> Self {
        Self::new(body, limit, Messages::One { has_begun: false }, Some(new_deadline()))
    }

    /// Returns the body of a call with many messages.
    pub(crate) fn stream(body: B, limit: usize, starts: MessageStarts) -> Self {
        Self::new(body, limit, Messages::Many(starts), None)
    }

    fn new(
        body: B,
        limit: usize,
        messages: Messages,
        deadline: Option<(ProgressDeadline, Pin<Box<Sleep>>)>,
    ) -> Self {
        let prefix = Vec::with_capacity(PREFIX_BYTES);
        Self { body, limit, messages, prefix, left: 0, owed: 0, deadline }
    }

    fn receive(&mut self, mut data: &[u8]) -> Result<(), Status> {
        let (bytes, mut begun) = (data.len(), 0);
        while !data.is_empty() {
            let taken = match self.left {
                0 => {
                    begun += usize::from(self.prefix.is_empty());
                    self.receive_prefix(data)
                }
                left => {
                    self.left -= left.min(data.len());
                    left.min(data.len())
                }
            };
            data = &data[taken..];
        }
        match &mut self.messages {
            Messages::One { has_begun } => {
                if begun + usize::from(*has_begun) > 1 {
                    return Err(Status::internal("expected one message, got more"));
                }
                *has_begun = *has_begun || begun > 0;
                self.take_memory()?;
            }
            Messages::Many(starts) => {
                starts.push(Instant::now(), begun);
                if self.prefix.is_empty() && self.left == 0 {
                    (self.deadline, self.owed) = (None, 0);
                    return Ok(());
                }
            }
        }
        let (deadline, timer) = self.deadline.get_or_insert_with(new_deadline);
        deadline.record_progress(bytes, CALL_PERMIT.with(|permit| permit.min_rate()));
        timer.as_mut().reset(deadline.at());
        Ok(())
    }

    /// Returns the number of bytes that belong to the prefix.
    fn receive_prefix(&mut self, data: &[u8]) -> usize {
        let taken = data.len().min(PREFIX_BYTES - self.prefix.len());
        self.prefix.extend_from_slice(&data[..taken]);
        if let Some(length) = message_length(&self.prefix) {
            self.prefix.clear();
            // tonic refuses a longer message before it reads the message.
            self.owed = if length <= self.limit { length } else { 0 };
            self.left = length;
        }
        taken
    }

    fn take_memory(&mut self) -> Result<(), Status> {
        match std::mem::take(&mut self.owed) {
            0 => Ok(()),
            owed => Ok(CALL_PERMIT.with(|permit| permit.grow(owed))?),
        }
    }
}

impl<B: Body<Data = Bytes, Error: Into<StdError>> + Unpin> Body for MessageBody<B> {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        this.take_memory()?;
        let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) else {
            let Some((_, timer)) = &mut this.deadline else { return Poll::Pending };
            ready!(timer.as_mut().poll(cx));
            return Poll::Ready(Some(Err(RequestError::Stalled.into())));
        };
        let frame = frame.transpose().map_err(|why| Status::from_error(why.into()))?;
        if let Some(data) = frame.as_ref().and_then(Frame::data_ref) {
            this.receive(data)?;
        }
        Poll::Ready(frame.map(Ok))
    }
}

fn new_deadline() -> (ProgressDeadline, Pin<Box<Sleep>>) {
    let deadline = ProgressDeadline::new();
    let timer = Box::pin(sleep_until(deadline.at()));
    (deadline, timer)
}

/// Returns the length of a message, or `None` if its prefix is incomplete.
pub(super) fn message_length(start: &[u8]) -> Option<usize> {
    let length = <[u8; 4]>::try_from(start.get(1..PREFIX_BYTES)?).ok()?;
    usize::try_from(u32::from_be_bytes(length)).ok()
}

/// The times at which a call read the first bytes of its messages, in their order. A call that has
/// the maximum number of requests reads nothing.
#[derive(Debug, Clone, Default)]
pub(crate) struct MessageStarts(Arc<Mutex<VecDeque<(Instant, usize)>>>);

impl MessageStarts {
    /// Adds messages that start in the same frame, and so at the same time.
    fn push(&self, at: Instant, messages: usize) {
        if messages > 0 {
            self.0.lock().push_back((at, messages));
        }
    }

    /// Returns the time at which the next whole message started.
    pub(crate) fn next(&self) -> Instant {
        let mut starts = self.0.lock();
        let Some((at, left)) = starts.front_mut() else { return Instant::now() };
        let at = *at;
        *left -= 1;
        if *left == 0 {
            starts.pop_front();
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_message_has_its_own_start() {
        let starts = MessageStarts::default();
        let then = Instant::now().checked_sub(Duration::from_secs(60)).unwrap();
        let [one, other] = [then, then + Duration::from_secs(1)];
        starts.push(one, 2);
        starts.push(other, 0);
        starts.push(other, 1);
        assert_eq!([starts.next(), starts.next(), starts.next()], [one, one, other]);
        assert!(starts.next() > other, "a message without a recorded start starts now");
    }
}
