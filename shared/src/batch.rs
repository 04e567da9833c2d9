//! The messages of the data path between supervisor and worker, one per packet on a `SOCK_SEQPACKET`
//! socket. Tensors stay in the slabs; messages carry their offsets and lengths.
//!
//! If the socket closes, the worker has no more work, and the supervisor treats the worker as dead.

use serde::{Deserialize, Serialize};

use crate::groups::Groups;

/// The largest message in either direction, in bytes. A batch has at most [`MAX_REQUESTS`] requests.
pub const MAX_MESSAGE_BYTES: usize = 128 * 1024;

/// The largest number of requests in a batch.
pub const MAX_REQUESTS: usize = 1024;

/// The number of batches that a worker has at once: one runs, and the next one is already there when
/// it ends. The response slab has as many slots.
pub const IN_FLIGHT: usize = 2;

/// The batch id in the answer to a message that the worker could not read.
pub const UNREADABLE: u64 = u64::MAX;

/// A range of bytes in a slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// The offset of the first byte from the start of the slab.
    pub offset: u64,
    /// The number of bytes.
    pub len: u64,
}

/// A message from the supervisor to a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// The worker runs a batch.
    Run(Batch),
    /// The worker computes the next answer of a stream. The step counts as a batch of its own.
    Next(StreamStep),
    /// The worker ends the stream with this id, because its client cancelled it or disconnected.
    Close(u64),
    /// The worker prepares a partition while batches run, and replies when it is ready.
    Prepare(Groups),
    /// The worker releases a partition. Later batches do not use it.
    Forget(Groups),
}

/// A message from a worker to the supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkerMessage {
    /// The answer to a batch or to a step of a stream.
    Answer(BatchAnswer),
    /// The reply to [`Command::Prepare`].
    Prepared(PartitionReply),
}

/// The reply to a request for a partition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionReply {
    /// The groups of the partition.
    pub groups: Groups,
    /// Success if the partition is ready, or the reason why the model cannot use it.
    pub result: Result<(), String>,
}

/// A batch of requests that the model runs together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batch {
    /// The number of the batch, which its answer repeats.
    pub id: u64,
    /// The slot of the response slab for the answer, below [`IN_FLIGHT`].
    pub slot: u8,
    /// The time at which the supervisor sent the batch, in ns of `CLOCK_MONOTONIC`, which both
    /// processes read.
    pub sent_ns: u64,
    /// The prepared partition that runs the batch, or [`Groups::WHOLE`] for all SMs of the process.
    pub groups: Groups,
    /// The shape of each input, in the model's order and without the batch axis, for all requests. For
    /// a model without a batch axis it is the whole shape.
    pub shapes: Vec<Vec<i64>>,
    /// The requests, in the order in which their rows are stacked.
    pub requests: Vec<BatchRequest>,
    /// The optional inputs of the request, if the batch has only one request; otherwise empty.
    pub optional: Vec<OptionalTensor>,
}

/// A tensor for an optional input, which replaces the model's default.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OptionalTensor {
    /// The index among the model's optional inputs.
    pub input: u32,
    /// The whole shape, because optional inputs have no batch axis.
    pub shape: Vec<i64>,
    /// The tensor's bytes in the request slab.
    pub part: Extent,
}

/// The rows of a request in a batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchRequest {
    /// The length of the request's batch axis; 1 for a model without a batch axis.
    pub rows: u32,
    /// The bytes of each input in the request slab, in the model's order.
    pub inputs: Vec<Extent>,
}

/// A request for the next answer of a stream. Its first four fields are like those of a [`Batch`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamStep {
    /// The number of the step, which its answer repeats.
    pub id: u64,
    /// The slot of the response slab for the answer, below [`IN_FLIGHT`].
    pub slot: u8,
    /// The time at which the supervisor sent the step, in ns of `CLOCK_MONOTONIC`.
    pub sent_ns: u64,
    /// The prepared partition that runs the step, or [`Groups::WHOLE`].
    pub groups: Groups,
    /// The id of the batch that opened the stream.
    pub stream: u64,
}

/// The answer to a batch or to a step of a stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchAnswer {
    /// The id of the batch or step.
    pub id: u64,
    /// The execution time in µs, without the time that the batch waited for the GPU.
    pub execution_us: u64,
    /// The outputs, none at the end of a stream, or the reason why the batch failed.
    pub result: Result<Vec<BatchOutput>, RunFailure>,
    /// True if the answer opens or continues a stream. [`Command::Next`] then requests the next answer.
    pub more: bool,
}

/// One output of a whole batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchOutput {
    /// The shape without the batch axis, or the whole shape for a model without a batch axis.
    pub shape: Vec<i64>,
    /// The bytes for each request in the response slab.
    pub parts: Vec<Extent>,
}

/// The reason why a batch failed although its worker still runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum RunFailure {
    /// The engine failed. The text is the engine's error.
    #[error("the model could not be run on this input: {0}")]
    Engine(String),
    /// An output does not have as many rows as its batch. The text names the output.
    #[error("the model could not be run on this input: {0}; set batch.max: 0 for this model")]
    NotBatched(String),
    /// The input is invalid, for example because a token is not in the vocabulary.
    #[error("the model refuses this input: {0}")]
    Input(String),
    /// The outputs do not fit into the slot of the response slab.
    #[error("the answer has {needed} bytes and only {room} fit; raise limits.response_bytes")]
    AnswerTooLarge {
        /// The size of the outputs in bytes.
        needed: u64,
        /// The size of the slot in bytes.
        room: u64,
    },
    /// The message was invalid, which is a bug in the supervisor.
    #[error("the worker could not use the batch: {0}")]
    BadBatch(String),
}

/// The error of encoding or decoding a message.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// The message is too long for the buffer.
    #[error(
        "a message between supervisor and worker does not fit into {MAX_MESSAGE_BYTES} bytes; lower batch.max"
    )]
    Encode(#[source] postcard::Error),
    /// The bytes are not such a message.
    #[error("cannot decode a message between supervisor and worker; install both programs from one build")]
    Decode(#[source] postcard::Error),
}

/// Encodes a message into `buffer` and returns the bytes that it takes.
///
/// # Errors
///
/// [`MessageError::Encode`] if the buffer is too small.
pub fn encode<'b, M: Serialize>(message: &M, buffer: &'b mut [u8]) -> Result<&'b [u8], MessageError> {
    postcard::to_slice(message, buffer).map(|written| &*written).map_err(MessageError::Encode)
}

/// Decodes a message.
///
/// # Errors
///
/// [`MessageError::Decode`] if the bytes are not a whole message of this type.
pub fn decode<'b, M: Deserialize<'b>>(bytes: &'b [u8]) -> Result<M, MessageError> {
    postcard::from_bytes(bytes).map_err(MessageError::Decode)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer() -> BatchAnswer {
        BatchAnswer {
            id: 7,
            execution_us: 1200,
            result: Ok(vec![BatchOutput { shape: vec![10], parts: vec![Extent { offset: 64, len: 40 }] }]),
            more: false,
        }
    }

    #[test]
    fn a_decoded_message_equals_the_encoded_one() {
        let mut buffer = vec![0; MAX_MESSAGE_BYTES];
        let bytes = encode(&answer(), &mut buffer).unwrap();
        assert_eq!(decode::<BatchAnswer>(bytes).unwrap(), answer());
    }

    #[test]
    fn a_truncated_message_is_an_error() {
        let mut buffer = vec![0; MAX_MESSAGE_BYTES];
        let bytes = encode(&answer(), &mut buffer).unwrap();
        for cut in 0..bytes.len() {
            assert!(decode::<BatchAnswer>(&bytes[..cut]).is_err(), "cut to {cut} bytes");
        }
    }
}
