//! A future that is polled only after it was woken.
//!
//! The task of a connection runs several times for each request. Each time it would also poll for
//! rare events: the end of serving, the need to make room, and a client that is too slow. Together
//! these polls take as long as parsing a small request.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use parking_lot::Mutex;

/// Waits for a future, which is polled at first and then only after it was woken. If it was not woken,
/// a poll is a load and two comparisons, which is much cheaper than a poll of `FuturesUnordered`.
pub(super) async fn on_wake<T>(future: impl Future<Output = T>) -> T {
    let task = Waker::noop().clone();
    let flag = Arc::new(WakeFlag { is_woken: AtomicBool::new(true), task: Mutex::new(task.clone()) });
    OnWake { future: pin!(future), task, waker: Arc::clone(&flag).into(), flag }.await
}

struct OnWake<F> {
    future: F,
    /// A copy of the task's waker in `flag`. It shows without a lock whether the task has changed.
    task: Waker,
    flag: Arc<WakeFlag>,
    waker: Waker,
}

/// The waker of the future, which records the wake and wakes the task.
struct WakeFlag {
    is_woken: AtomicBool,
    task: Mutex<Waker>,
}

impl<F: Future + Unpin> Future for OnWake<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let Self { future, task, flag, waker } = &mut *self;
        if !task.will_wake(cx.waker()) {
            task.clone_from(cx.waker());
            flag.task.lock().clone_from(cx.waker());
        }
        // A load is nearly always enough. The exchange sees everything that was written before a
        // wake.
        if !flag.is_woken.load(Ordering::Relaxed) || !flag.is_woken.swap(false, Ordering::AcqRel) {
            return Poll::Pending;
        }
        Pin::new(future).poll(&mut Context::from_waker(waker))
    }
}

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_woken.store(true, Ordering::Release);
        let task = self.task.lock().clone();
        task.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::atomic::AtomicUsize;

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
