//! The calls of a gRPC connection, which run in the connection's task. If each call were a task,
//! thousands of calls could delay the requests of all other connections. Tasks would also remain
//! after the end of their connection, and would then have memory without a permit.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use hyper::rt::Executor;
use parking_lot::Mutex;
use tokio::task::yield_now;

/// The number of calls that start before other connections have their turn.
const CALLS_PER_TURN: usize = 32;

/// The number of cancelled calls that are freed before other connections have their turn.
const FREED_PER_TURN: usize = 256;

type Call = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The calls that have arrived and not started.
#[derive(Clone, Default)]
pub(super) struct NewCalls(Arc<Mutex<VecDeque<Call>>>);

impl NewCalls {
    /// Waits until the calls that have arrived can start in one turn. Meanwhile nothing is read.
    pub(super) fn poll_few(&self, cx: &Context<'_>) -> Poll<()> {
        if self.0.lock().len() <= CALLS_PER_TURN {
            return Poll::Ready(());
        }
        // The task runs again as soon as some calls have started.
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

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
