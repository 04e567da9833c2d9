//! Streams of which only what comes in is looked at; what goes out is left alone.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// What is done with the bytes that come in.
pub(crate) trait Reads: Unpin {
    fn poll_read<S: AsyncRead + Unpin>(
        &mut self,
        stream: &mut S,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>>;

    /// Shuts the stream down for writing. Nothing is read afterwards.
    fn poll_shutdown<S: AsyncRead + AsyncWrite + Unpin>(
        &mut self,
        stream: &mut S,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(stream).poll_shutdown(cx)
    }
}

pub(crate) struct Inward<S, R> {
    stream: S,
    reads: R,
}

impl<S, R> Inward<S, R> {
    pub(crate) fn new(stream: S, reads: R) -> Self {
        Self { stream, reads }
    }
}

impl<S: AsyncRead + Unpin, R: Reads> AsyncRead for Inward<S, R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { stream, reads } = &mut *self;
        reads.poll_read(stream, cx, buf)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin, R: Reads> AsyncWrite for Inward<S, R> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Self { stream, reads } = &mut *self;
        reads.poll_shutdown(stream, cx)
    }
}
