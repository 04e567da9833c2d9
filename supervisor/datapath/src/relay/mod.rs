//! Requests that one supervisor passes to the next, whose workers serve the model already, for
//! clients that are still connected to the first.
//!
//! A connection of a Unix socket carries one request at a time, and its answer: a frame of at most
//! [`MAX_HEAD`] bytes after its length, and the tensors' bytes behind it. Where there is more, the
//! byte [`NEXT`] asks for the next answer. A client that gives its request up closes the connection.

mod far;
mod near;

pub use far::RelayServer;
pub(crate) use near::RelayedStream;
pub use near::{Relay, is_responding};

use std::io;
use std::time::Duration;

use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::pipeline::{OutputTensor, RequestFailure, RequestOptions};

/// Of what describes a request or an answer, without the tensors' bytes.
const MAX_HEAD: u32 = 1 << 20;

#[derive(Debug, Serialize, Deserialize)]
struct RelayRequest {
    model: String,
    /// How long ago its head was read.
    arrival: Duration,
    options: RequestOptions,
    inputs: Vec<TensorHead>,
}

/// Asks for the next answer of a stream.
const NEXT: u8 = 1;

type RelayReply = Result<AnswerHead, RequestFailure>;

#[derive(Debug, Serialize, Deserialize)]
struct AnswerHead {
    outputs: Vec<TensorHead>,
    /// Whether it is one answer of several; its end has no outputs.
    more: bool,
}

/// A tensor, whose bytes follow.
#[derive(Debug, Serialize, Deserialize)]
struct TensorHead {
    shape: Vec<i64>,
    bytes: u64,
}

async fn write_head(stream: &mut UnixStream, head: &impl Serialize) -> io::Result<()> {
    let head = postcard::to_stdvec(head).map_err(io::Error::other)?;
    let length = u32::try_from(head.len()).ok().filter(|length| *length <= MAX_HEAD);
    stream.write_u32_le(length.ok_or(io::ErrorKind::FileTooLarge)?).await?;
    stream.write_all(&head).await
}

async fn read_head<T: DeserializeOwned>(stream: &mut UnixStream) -> io::Result<T> {
    let length = stream.read_u32_le().await?;
    if length > MAX_HEAD {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let mut head = vec![0; length as usize];
    stream.read_exact(&mut head).await?;
    postcard::from_bytes(&head).map_err(io::Error::other)
}

/// The bytes of these tensors, of `max_bytes` bytes together.
async fn read_parts(
    stream: &mut UnixStream,
    parts: Vec<TensorHead>,
    max_bytes: u64,
) -> io::Result<Vec<OutputTensor>> {
    let (mut tensors, mut left) = (Vec::with_capacity(parts.len()), max_bytes);
    for TensorHead { shape, bytes } in parts {
        left = left.checked_sub(bytes).ok_or(io::ErrorKind::FileTooLarge)?;
        let length = usize::try_from(bytes).map_err(io::Error::other)?;
        let mut data = Vec::new();
        data.try_reserve_exact(length).map_err(|_| io::ErrorKind::OutOfMemory)?;
        if (&mut *stream).take(bytes).read_to_end(&mut data).await? < length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        tensors.push(OutputTensor { shape, data: Bytes::from(data) });
    }
    Ok(tensors)
}
