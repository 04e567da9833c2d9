//! The body of a gRPC call with many messages.

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

use super::single_message::{PREFIX_BYTES, message_length, poll_in_time};
use crate::admission::{CALL_PERMIT, ProgressDeadline};

/// A body with messages of at most `limit` bytes each. The body fails if there is too little memory
/// for a message, and if its peer is silent or too slow within a message. When it is polled,
/// [`CALL_PERMIT`] must be the permit of the next message.
pub(crate) struct MessageStream<B> {
    body: B,
    limit: usize,
    /// The prefix of the next message.
    prefix: Vec<u8>,
    /// The bytes of the current message that are still to come.
    left: usize,
    /// The bytes of the current message for which no memory has been taken yet. The frame that ends
    /// a message may also contain the prefix of the next one.
    owed: usize,
    deadline: Option<(ProgressDeadline, Pin<Box<Sleep>>)>,
    starts: MessageStarts,
}

impl<B> MessageStream<B> {
    pub(crate) fn new(body: B, limit: usize, starts: MessageStarts) -> Self {
        let prefix = Vec::with_capacity(PREFIX_BYTES);
        Self { body, limit, prefix, left: 0, owed: 0, deadline: None, starts }
    }

    fn receive(&mut self, mut data: &[u8]) {
        let (bytes, mut started) = (data.len(), 0);
        while !data.is_empty() {
            let taken = match self.left {
                0 => {
                    started += usize::from(self.prefix.is_empty());
                    self.receive_prefix(data)
                }
                left => {
                    self.left -= left.min(data.len());
                    left.min(data.len())
                }
            };
            data = &data[taken..];
        }
        self.starts.push(Instant::now(), started);
        if self.prefix.is_empty() && self.left == 0 {
            (self.deadline, self.owed) = (None, 0);
            return;
        }
        let min_rate = CALL_PERMIT.get().min_rate();
        let (deadline, timer) = self.deadline.get_or_insert_with(|| {
            let deadline = ProgressDeadline::new();
            let timer = Box::pin(sleep_until(deadline.at()));
            (deadline, timer)
        });
        deadline.record_progress(bytes, min_rate);
        timer.as_mut().reset(deadline.at());
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
}

impl<B: Body<Data = Bytes, Error: Into<StdError>> + Unpin> Body for MessageStream<B> {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        let owed = std::mem::take(&mut this.owed);
        if owed > 0
            && let Err(exhausted) = CALL_PERMIT.get().grow(owed)
        {
            return Poll::Ready(Some(Err(exhausted.into())));
        }
        let timer = this.deadline.as_mut().map(|(_, timer)| timer);
        let frame = ready!(poll_in_time(&mut this.body, timer, cx));
        if let Some(data) = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref()) {
            this.receive(data);
        }
        Poll::Ready(frame)
    }
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
