//! The calls of a gRPC connection, which the connection's own task carries on. As tasks of their own
//! thousands of them would stand before the requests of all other connections, and would be there,
//! with no memory reserved, when their connection has long gone.

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

use crate::transport::read_filter::Reads;

/// So many calls begin before other connections have their turn.
const TURN: usize = 32;

/// The same of calls that are given up.
const FREED: usize = 256;

type Call = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Those that have come and not begun.
#[derive(Clone, Default)]
pub(crate) struct Coming(Arc<Mutex<VecDeque<Call>>>);

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Coming {
    fn execute(&self, call: F) {
        self.0.lock().push_back(Box::pin(call));
    }
}

#[derive(Default)]
pub(crate) struct Calls {
    coming: Coming,
    begun: FuturesUnordered<Call>,
}

impl Calls {
    pub(crate) fn coming(&self) -> Coming {
        self.coming.clone()
    }

    /// Whether no call waits for its begin, so that more of them may be read.
    pub(crate) fn all_begun(&self) -> bool {
        self.coming.0.lock().is_empty()
    }

    /// Carries on the calls that can go on.
    pub(crate) fn carry_on(&mut self, cx: &mut Context<'_>) {
        while let Poll::Ready(Some(())) = self.begun.poll_next_unpin(cx) {}
    }

    /// Lets some calls begin, and carries on those that can go on.
    pub(crate) fn begin(&mut self, cx: &mut Context<'_>) {
        let mut coming = self.coming.0.lock();
        let some = coming.len().min(TURN);
        self.begun.extend(coming.drain(..some));
        let more = !coming.is_empty();
        drop(coming);
        self.carry_on(cx);
        if more {
            cx.waker().wake_by_ref();
        }
    }

    /// Gives up those that are left, some at a time: to free thousands takes milliseconds.
    pub(crate) async fn give_up(self) {
        let coming = std::mem::take(&mut *self.coming.0.lock());
        let mut left = self.begun.into_iter().chain(coming);
        while left.by_ref().take(FREED).count() == FREED {
            yield_now().await;
        }
    }
}

/// While more calls wait for their begin than have a turn, nothing is read.
impl Reads for Coming {
    fn poll_read<S: AsyncRead + Unpin>(
        &mut self,
        stream: &mut S,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.0.lock().len() > TURN {
            // As soon as they have begun.
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
    async fn calls_begin_a_few_at_a_time_and_go_with_their_connection() {
        let (mut calls, begun) = (Calls::default(), Arc::new(Mutex::new(0)));
        for _ in 0..2 * TURN + 1 {
            let begun = Arc::clone(&begun);
            calls.coming().execute(async move {
                *begun.lock() += 1;
                pending().await
            });
        }
        let cx = &mut Context::from_waker(Waker::noop());
        calls.begin(cx);
        assert_eq!((*begun.lock(), calls.all_begun()), (TURN, false));
        // It is woken until all have begun.
        let all = poll_fn(|cx| {
            calls.begin(cx);
            if calls.all_begun() { Poll::Ready(()) } else { Poll::Pending }
        });
        all.await;
        assert_eq!(*begun.lock(), 2 * TURN + 1);
        calls.give_up().await;
        assert_eq!(Arc::strong_count(&begun), 1);
    }
}
