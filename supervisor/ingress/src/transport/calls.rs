//! The calls of a gRPC connection, which run in the connection's task. If each call were a task,
//! thousands of calls could delay the requests of all other connections. Tasks would also remain
//! after the end of their connection, and would then have memory without a permit.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use hyper::rt::Executor;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::task::yield_now;

use super::stream_filter::StreamFilter;

/// The number of calls that start before other connections have their turn.
const CALLS_PER_TURN: usize = 32;

/// The number of cancelled calls that are freed before other connections have their turn.
const FREED_PER_TURN: usize = 256;

type Call = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The calls that have arrived and not started.
#[derive(Clone, Default)]
pub(super) struct NewCalls(Arc<Mutex<VecDeque<Call>>>);

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for NewCalls {
    fn execute(&self, call: F) {
        self.0.lock().push_back(Box::pin(call));
    }
}

#[derive(Default)]
pub(super) struct Calls {
    new: NewCalls,
    started: FuturesUnordered<Call>,
}

impl Calls {
    pub(super) fn new_calls(&self) -> NewCalls {
        self.new.clone()
    }

    /// Returns whether all calls have started, so that more calls may be read.
    pub(super) fn all_started(&self) -> bool {
        self.new.0.lock().is_empty()
    }

    /// Polls the calls that have started.
    pub(super) fn poll_started(&mut self, cx: &mut Context<'_>) {
        while let Poll::Ready(Some(())) = self.started.poll_next_unpin(cx) {}
    }

    /// Starts some calls, and polls the calls that have started.
    pub(super) fn start_some(&mut self, cx: &mut Context<'_>) {
        let mut new = self.new.0.lock();
        let some = new.len().min(CALLS_PER_TURN);
        self.started.extend(new.drain(..some));
        let more = !new.is_empty();
        drop(new);
        self.poll_started(cx);
        if more {
            cx.waker().wake_by_ref();
        }
    }

    /// Cancels the remaining calls, some at a time, because freeing thousands takes milliseconds.
    pub(super) async fn cancel(self) {
        let new = std::mem::take(&mut *self.new.0.lock());
        let mut left = self.started.into_iter().chain(new);
        while left.by_ref().take(FREED_PER_TURN).count() == FREED_PER_TURN {
            yield_now().await;
        }
    }
}

// While more calls wait than can start in one turn, nothing is read.
impl StreamFilter for NewCalls {
    fn poll_read<S: AsyncRead + Unpin>(
        &mut self,
        stream: &mut S,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.0.lock().len() > CALLS_PER_TURN {
            // The task runs again as soon as some calls have started.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Pin::new(stream).poll_read(cx, buf)
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, poll_fn};
    use std::task::Waker;

    use super::*;

    #[tokio::test]
    async fn calls_start_a_few_at_a_time_and_end_with_their_connection() {
        let (mut calls, started) = (Calls::default(), Arc::new(Mutex::new(0)));
        for _ in 0..2 * CALLS_PER_TURN + 1 {
            let started = Arc::clone(&started);
            calls.new_calls().execute(async move {
                *started.lock() += 1;
                pending().await
            });
        }
        let cx = &mut Context::from_waker(Waker::noop());
        calls.start_some(cx);
        assert_eq!((*started.lock(), calls.all_started()), (CALLS_PER_TURN, false));
        // The task is woken until all calls have started.
        let all = poll_fn(|cx| {
            calls.start_some(cx);
            if calls.all_started() { Poll::Ready(()) } else { Poll::Pending }
        });
        all.await;
        assert_eq!(*started.lock(), 2 * CALLS_PER_TURN + 1);
        calls.cancel().await;
        assert_eq!(Arc::strong_count(&started), 1);
    }
}
