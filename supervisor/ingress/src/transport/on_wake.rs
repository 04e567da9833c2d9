//! A future that is polled only after it was woken.
//!
//! The task of a connection runs several times for each request. Each time it would also poll for
//! rare events: the end of serving, the need to make room, and a client that is too slow. Together
//! these polls take as long as parsing a small request.

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

/// Waits for a future, which is polled at first and then only after it was woken.
pub(super) async fn on_wake<T>(future: impl Future<Output = T>) -> T {
    let mut only = FuturesUnordered::from_iter([future]);
    only.next().await.expect("the only future is removed when it has ended, which ends this wait")
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Poll;

    use tokio::sync::Notify;
    use tokio::time::{Duration, sleep, timeout};

    use super::*;

    #[tokio::test]
    async fn a_future_is_polled_at_first_and_after_it_was_woken() {
        let (polls, notify) = (AtomicUsize::new(0), Notify::new());
        let mut notified = std::pin::pin!(notify.notified());
        let counted = poll_fn(|cx| {
            polls.fetch_add(1, Ordering::Relaxed);
            notified.as_mut().poll(cx)
        });
        let mut future = std::pin::pin!(on_wake(counted));
        for _ in 0..5 {
            assert!(poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await.is_pending());
        }
        assert_eq!(polls.load(Ordering::Relaxed), 1);
        notify.notify_one();
        future.await;
        assert_eq!(polls.load(Ordering::Relaxed), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_wake_reaches_the_task_that_polled_last() {
        let mut future = Box::pin(on_wake(sleep(Duration::from_secs(2))));
        assert!(timeout(Duration::from_secs(1), &mut future).await.is_err());
        tokio::spawn(future).await.unwrap();
    }
}
