//! The body of a gRPC call that has a message now and then.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use tokio::time::{Sleep, sleep_until};
use tonic::Status;

use crate::admission::deliveries::Beginnings;
use crate::admission::memory_permit::RESERVED;
use crate::admission::min_rate::Patience;
use crate::transport::body::{ENVELOPE, length, poll_in_time, slowest};

/// Messages of at most `limit` bytes each. It fails when there is no memory for one, and when its
/// peer falls silent or is too slow in the middle of one. It is polled where [`RESERVED`] is the
/// memory of the message that comes.
pub(crate) struct Messages<B> {
    body: B,
    limit: usize,
    /// Of the message that comes.
    head: Vec<u8>,
    left: usize,
    /// Its bytes, before there is memory for it: a frame may have its head behind the message before.
    owed: usize,
    patience: Option<(Patience, Pin<Box<Sleep>>)>,
    beginnings: Beginnings,
}

impl<B> Messages<B> {
    pub(crate) fn new(body: B, limit: usize, beginnings: Beginnings) -> Self {
        let head = Vec::with_capacity(ENVELOPE);
        Self { body, limit, head, left: 0, owed: 0, patience: None, beginnings }
    }

    fn came(&mut self, mut data: &[u8]) {
        let (bytes, mut begun) = (data.len(), 0);
        while !data.is_empty() {
            let taken = match self.left {
                0 => {
                    begun += usize::from(self.head.is_empty());
                    self.head_came(data)
                }
                left => {
                    self.left -= left.min(data.len());
                    left.min(data.len())
                }
            };
            data = &data[taken..];
        }
        self.beginnings.push(Instant::now(), begun);
        if self.head.is_empty() && self.left == 0 {
            (self.patience, self.owed) = (None, 0);
            return;
        }
        let slowest = slowest(&RESERVED.get());
        let (patience, given_up) = self.patience.get_or_insert_with(|| {
            let patience = Patience::new();
            let given_up = Box::pin(sleep_until(patience.until()));
            (patience, given_up)
        });
        patience.moved(bytes, slowest);
        given_up.as_mut().reset(patience.until());
    }

    /// Returns how many bytes are the head's.
    fn head_came(&mut self, data: &[u8]) -> usize {
        let taken = data.len().min(ENVELOPE - self.head.len());
        self.head.extend_from_slice(&data[..taken]);
        if let Some(length) = length(&self.head) {
            self.head.clear();
            // A longer message is refused unread.
            self.owed = if length <= self.limit { length } else { 0 };
            self.left = length;
        }
        taken
    }
}

impl<B> Body for Messages<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        let owed = std::mem::take(&mut this.owed);
        if owed > 0
            && let Err(spent) = RESERVED.get().grow(owed)
        {
            return Poll::Ready(Some(Err(spent.into())));
        }
        let given_up = this.patience.as_mut().map(|(_, given_up)| given_up);
        let frame = ready!(poll_in_time(&mut this.body, given_up, cx));
        if let Some(data) = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref()) {
            this.came(data);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
