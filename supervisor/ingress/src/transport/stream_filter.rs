//! Streams whose bytes pass through a filter.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A filter of a stream. By default everything passes unchanged.
pub(super) trait StreamFilter: Unpin {
    fn poll_read<S: AsyncRead + Unpin>(
        &mut self,
        stream: &mut S,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(stream).poll_read(cx, buf)
    }

    /// Receives the outcome of a write, and may change it.
    fn after_write(
        &mut self,
        _: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        written
    }

    /// Records that everything has been written.
    fn before_flush(&mut self) {}

    /// Shuts the stream down for writing. Nothing is read afterwards.
    fn poll_shutdown<S: AsyncRead + AsyncWrite + Unpin>(
        &mut self,
        stream: &mut S,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(stream).poll_shutdown(cx)
    }
}

pub(super) struct FilteredStream<S, F> {
    stream: S,
    filter: F,
}

impl<S, F> FilteredStream<S, F> {
    pub(super) fn new(stream: S, filter: F) -> Self {
        Self { stream, filter }
    }
}

impl<S: AsyncRead + Unpin, F: StreamFilter> AsyncRead for FilteredStream<S, F> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { stream, filter } = &mut *self;
        filter.poll_read(stream, cx, buf)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin, F: StreamFilter> AsyncWrite for FilteredStream<S, F> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.filter.after_write(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.filter.after_write(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.filter.before_flush();
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Self { stream, filter } = &mut *self;
        filter.poll_shutdown(stream, cx)
    }
}
