//! How slow a peer may be. A client that takes or sends a byte now and then would keep memory and
//! its place for ever.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

/// How long a peer may be silent in the middle of a request, or take nothing of an answer.
pub(crate) const SILENCE: Duration = Duration::from_secs(30);

/// The least bytes a second that a connection moves, beside one silence,
pub(crate) const SLOWEST: f64 = 64.0 * 1024.0;
/// and that each of its streams does.
pub(crate) const SLOWEST_STREAM: f64 = 1024.0;

/// Until when a peer is waited for.
#[derive(Debug)]
pub(crate) struct Patience {
    until: Instant,
    /// The end at the slowest pace.
    at_pace: Instant,
}

impl Patience {
    pub(crate) fn new() -> Self {
        let until = Instant::now() + SILENCE;
        Self { until, at_pace: until }
    }

    pub(crate) fn until(&self) -> Instant {
        self.until
    }

    /// `slowest`: in bytes a second.
    pub(crate) fn moved(&mut self, bytes: usize, slowest: f64) {
        self.at_pace += Duration::from_secs_f64(bytes as f64 / slowest);
        self.until = self.at_pace.min(Instant::now() + SILENCE);
    }
}

/// A stream whose writes fail when its peer takes what it is sent too slowly.
pub(crate) struct Paced<S> {
    stream: S,
    /// From the first write that had to wait until all is written.
    waiting: Option<Patience>,
    given_up: Pin<Box<Sleep>>,
}

impl<S> Paced<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, waiting: None, given_up: Box::pin(sleep_until(Instant::now())) }
    }

    fn wrote(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(written) = written {
            if let (Some(patience), Ok(bytes)) = (&mut self.waiting, &written) {
                patience.moved(*bytes, SLOWEST);
            }
            return Poll::Ready(written);
        }
        let until = self.waiting.get_or_insert_with(Patience::new).until();
        if self.given_up.deadline() != until {
            self.given_up.as_mut().reset(until);
        }
        ready!(self.given_up.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Paced<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Paced<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.wrote(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.wrote(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// hyper flushes when it has written all that it had.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.waiting = None;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixStream;
    use tokio::time::sleep;

    use super::*;

    const LONG: usize = 16 << 20;

    /// How long a peer that takes so many bytes a second may go on, and whether it gets all.
    async fn taken(bytes: usize) -> (Duration, bool) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let begun = Instant::now();
        let reading = tokio::spawn(async move {
            let mut room = vec![0; bytes];
            while bytes == 0 || theirs.read(&mut room).await.is_ok_and(|read| read > 0) {
                sleep(Duration::from_secs(1)).await;
            }
        });
        let written = Paced::new(ours).write_all(&vec![0; LONG]).await;
        reading.abort();
        assert!(written.as_ref().err().is_none_or(|why| why.kind() == io::ErrorKind::TimedOut));
        (begun.elapsed(), written.is_ok())
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_takes_nothing_or_little_is_given_up_and_a_slow_one_is_not() {
        for slow in [0, 1024] {
            let (took, all) = taken(slow).await;
            assert!(!all && took < 2 * SILENCE, "{slow}: {took:?}");
        }
        let (took, all) = taken(2 * SLOWEST as usize).await;
        assert!(all && took > 2 * SILENCE, "{took:?}");
    }
}
