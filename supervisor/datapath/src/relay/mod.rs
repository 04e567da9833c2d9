//! Relays requests between the two supervisors of an upgrade. Some clients may still be connected
//! to the old supervisor when its models have moved. The old supervisor then relays the clients'
//! requests to the new supervisor, whose workers serve the models.
//!
//! A Unix socket connection carries one request and its answer at a time. A request or an answer is
//! a frame: its length, a head of at most `MAX_HEAD` bytes, and the tensors' bytes. If a stream has
//! more answers, the byte `NEXT` requests the next answer. To abandon a request, the client side
//! closes the connection.

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

use crate::pipeline::{RequestFailure, RequestOptions, RequestOutput};

/// The largest head of a request or an answer, in bytes. The head does not include the tensors'
/// bytes.
const MAX_HEAD: u32 = 1 << 20;

/// The head of a relayed request.
#[derive(Debug, Serialize, Deserialize)]
struct RelayRequest {
    model: String,
    /// The time since the head of the original request was read.
    elapsed: Duration,
    options: RequestOptions,
    inputs: Vec<TensorHead>,
}

/// The byte that requests the next answer of a stream.
const NEXT: u8 = 1;

type RelayReply = Result<AnswerHead, RequestFailure>;

/// The head of an answer.
#[derive(Debug, Serialize, Deserialize)]
struct AnswerHead {
    outputs: Vec<TensorHead>,
    /// True if more answers follow. The end of a stream has no outputs.
    more: bool,
}

/// The description of a tensor. The bytes of the tensor follow the head.
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

/// Reads the bytes of these tensors. Fails if all tensors together are longer than `max_bytes`.
async fn read_parts(
    stream: &mut UnixStream,
    parts: Vec<TensorHead>,
    max_bytes: u64,
) -> io::Result<Vec<RequestOutput>> {
    let (mut tensors, mut left) = (Vec::with_capacity(parts.len()), max_bytes);
    for TensorHead { shape, bytes } in parts {
        left = left.checked_sub(bytes).ok_or(io::ErrorKind::FileTooLarge)?;
        let length = usize::try_from(bytes).map_err(io::Error::other)?;
        let mut data = Vec::new();
        data.try_reserve_exact(length).map_err(|_| io::ErrorKind::OutOfMemory)?;
        if (&mut *stream).take(bytes).read_to_end(&mut data).await? < length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        tensors.push(RequestOutput { shape, data: Bytes::from(data) });
    }
    Ok(tensors)
}
