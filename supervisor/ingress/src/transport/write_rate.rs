//! The minimum rate of writes. They fail if the peer reads too slowly.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::admission::{MIN_CONNECTION_RATE, ProgressDeadline};

/// A stream whose writes fail if the peer reads less than the minimum rate.
pub(super) struct MinRateStream<S> {
    stream: S,
    /// The deadline, from the first write that had to wait until everything is written.
    deadline: Option<ProgressDeadline>,
    timer: Pin<Box<Sleep>>,
}

impl<S> MinRateStream<S> {
    pub(super) fn new(stream: S) -> Self {
        Self { stream, deadline: None, timer: Box::pin(sleep_until(Instant::now())) }
    }

    /// Returns the outcome of a write, or an error if the peer is too slow.
    fn check(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(written) = written {
            if let (Some(deadline), Ok(bytes)) = (&mut self.deadline, &written) {
                deadline.record_progress(*bytes, MIN_CONNECTION_RATE);
            }
            return Poll::Ready(written);
        }
        let until = self.deadline.get_or_insert_with(ProgressDeadline::new).at();
        if self.timer.deadline() != until {
            self.timer.as_mut().reset(until);
        }
        ready!(self.timer.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for MinRateStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for MinRateStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.check(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.check(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    // hyper flushes when it has written everything.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.deadline = None;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixStream;
    use tokio::time::sleep;

    use super::*;
    use crate::admission::SILENCE_TIMEOUT;

    const LONG: usize = 16 << 20;

    /// Returns how long a peer that reads this number of bytes per second is served, and whether it
    /// receives everything.
    async fn taken(bytes: usize) -> (Duration, bool) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let begun = Instant::now();
        let reading = tokio::spawn(async move {
            let mut room = vec![0; bytes];
            while bytes == 0 || theirs.read(&mut room).await.is_ok_and(|read| read > 0) {
                sleep(Duration::from_secs(1)).await;
            }
        });
        let written = MinRateStream::new(ours).write_all(&vec![0; LONG]).await;
        reading.abort();
        assert!(written.as_ref().err().is_none_or(|why| why.kind() == io::ErrorKind::TimedOut));
        (begun.elapsed(), written.is_ok())
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_takes_nothing_or_little_is_given_up_and_a_slow_one_is_not() {
        for slow in [0, 1024] {
            let (took, all) = taken(slow).await;
            assert!(!all && took < 2 * SILENCE_TIMEOUT, "{slow}: {took:?}");
        }
        let (took, all) = taken(2 * MIN_CONNECTION_RATE as usize).await;
        assert!(all && took > 2 * SILENCE_TIMEOUT, "{took:?}");
    }
}
