//! The messages that the supervisor and a worker exchange to run batches. Each message is one packet on
//! a `SOCK_SEQPACKET` socket. Tensors stay in shared memory (slabs), and messages carry their offsets
//! and lengths.
//!
//! If the supervisor closes the socket, the worker exits. If the worker closes it, the supervisor
//! treats the worker as dead.

use serde::{Deserialize, Serialize};

use crate::groups::Groups;

/// The maximum size of a message in either direction, in bytes. A batch of [`MAX_REQUESTS`] requests
/// fits into it.
pub const MAX_MESSAGE_BYTES: usize = 128 * 1024;

/// The maximum number of requests in a batch.
pub const MAX_REQUESTS: usize = 1024;

/// The maximum number of batches that a worker holds at a time. The second batch waits while the first
/// one runs, so that the worker can start the second batch immediately. The response slab has one slot
/// for each of these batches.
pub const IN_FLIGHT: usize = 2;

/// The batch id in the answer to a message that the worker could not decode.
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
    /// The order to run a batch.
    Run(Batch),
    /// The order to compute the next answer of each of these streams. The supervisor treats this step
    /// like a batch. The reply is [`WorkerMessage::Stepped`].
    Next(StreamStep),
    /// The order to end the stream with this id, because the client cancelled the stream or
    /// disconnected.
    Close(u64),
    /// The order to prepare a partition while batches run. The reply is [`WorkerMessage::Prepared`].
    Prepare(Groups),
    /// The order to release a partition. No later batch uses this partition.
    Forget(Groups),
    /// The order to release the model's weights on the GPU. No batch is in flight. The reply is
    /// [`WorkerMessage::Asleep`].
    Sleep {
        /// True if the worker may keep the weights in host memory from which the GPU reads directly.
        /// Otherwise, the worker reads the weights from a file when it wakes.
        pin: bool,
    },
    /// The order to bring the weights back. Batches can follow at once. The reply is
    /// [`WorkerMessage::Awake`].
    Wake,
}

/// A message from a worker to the supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkerMessage {
    /// The answer to a batch.
    Answer(BatchAnswer),
    /// The answers to a step of streams.
    Stepped(StepAnswer),
    /// The reply to [`Command::Prepare`].
    Prepared(PartitionReply),
    /// The reply to [`Command::Sleep`]: success, or the reason why the weights are still on the GPU.
    Asleep(Result<SleepReply, String>),
    /// The reply to [`Command::Wake`]: the time until the weights were on the GPU in µs, or the reason
    /// why the model still sleeps.
    Awake(Result<u64, String>),
}

/// The state of a worker that has just fallen asleep.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SleepReply {
    /// The time from the order until the GPU memory was free, in µs.
    pub took_us: u64,
    /// The size of the released GPU memory in bytes.
    pub released: u64,
    /// The size of the host memory from which the GPU can copy the weights directly, in bytes.
    pub pinned: u64,
    /// The reason why the weights are not in such memory, although the order permits it.
    pub unpinned: Option<String>,
}

/// The reply to a request for a partition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionReply {
    /// The groups of the partition.
    pub groups: Groups,
    /// Success if the partition is ready, otherwise the reason why the model cannot use it.
    pub result: Result<(), String>,
}

/// A batch of requests that the model runs together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batch {
    /// The id of the batch, which the answer repeats.
    pub id: u64,
    /// The slot of the response slab for the answer, below [`IN_FLIGHT`].
    pub slot: u8,
    /// The time at which the supervisor sent the batch, in ns of `CLOCK_MONOTONIC`, a clock that both
    /// processes read.
    pub sent_ns: u64,
    /// The prepared partition on which the batch runs, or [`Groups::WHOLE`] for all SMs of the process.
    pub groups: Groups,
    /// The shape of each input, in the model's order. All requests of the batch have these shapes. If
    /// the model has a batch axis, the shapes omit it.
    pub shapes: Vec<Vec<i64>>,
    /// The requests. The worker stacks their rows in this order.
    pub requests: Vec<BatchRequest>,
    /// The tensors for optional inputs. Only a batch of one request can have optional inputs.
    pub optional: Vec<OptionalTensor>,
}

/// A tensor for one of the model's optional inputs. It replaces the default value of the input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OptionalTensor {
    /// The index of the input among the model's optional inputs.
    pub input: u32,
    /// The shape of the tensor. Optional inputs have no batch axis.
    pub shape: Vec<i64>,
    /// The position of the tensor's bytes in the request slab.
    pub part: Extent,
}

/// A request in a batch: the number of its rows, and the position of its bytes in the request slab.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchRequest {
    /// The number of rows in the request, which is the length of its batch axis. It is 1 for a model
    /// without a batch axis.
    pub rows: u32,
    /// The position of each input's bytes in the request slab, in the model's order.
    pub inputs: Vec<Extent>,
}

/// The number of streams that a worker can generate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamLimits {
    /// The maximum number of open streams, at least 1.
    pub open: u32,
    /// The maximum number of streams that one step advances. It is 1 if streams take turns, otherwise
    /// `open`.
    pub per_step: u32,
}

/// A request for the next answer of streams.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamStep {
    /// The id of the step, which the answer repeats.
    pub id: u64,
    /// The slot of the response slab for the answer, below [`IN_FLIGHT`].
    pub slot: u8,
    /// The time at which the supervisor sent the step, in ns of `CLOCK_MONOTONIC`.
    pub sent_ns: u64,
    /// The prepared partition on which the step runs, or [`Groups::WHOLE`].
    pub groups: Groups,
    /// The streams to advance, each by the id of the batch that opened it.
    pub streams: Vec<u64>,
}

/// The answer to a step of streams.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepAnswer {
    /// The id of the step.
    pub id: u64,
    /// The execution time in µs, as in [`BatchAnswer`].
    pub execution_us: u64,
    /// The answer of each stream, in the order of [`StreamStep::streams`].
    pub streams: Vec<StreamAnswer>,
}

/// The answer of one stream in a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamAnswer {
    /// The outputs, each with one part, or the reason why the stream failed. The list of outputs is empty
    /// if the stream ended without another answer, or needs more steps for its next answer.
    pub result: Result<Vec<BatchOutput>, RunFailure>,
    /// True if the stream has more answers. A stream without more answers has ended.
    pub more: bool,
}

/// The answer to a batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchAnswer {
    /// The id of the batch.
    pub id: u64,
    /// The execution time in µs. It does not include the time for which the batch waited for the GPU.
    pub execution_us: u64,
    /// The outputs, or the reason why the batch failed. The list of outputs is empty if the batch opened a
    /// stream whose first answer needs a step, or a stream without any answer.
    pub result: Result<Vec<BatchOutput>, RunFailure>,
    /// True if the batch opened a stream. The supervisor then requests further answers with
    /// [`Command::Next`].
    pub more: bool,
}

/// One output of the model for a whole batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchOutput {
    /// The shape of the output. If the model has a batch axis, the shape omits it.
    pub shape: Vec<i64>,
    /// The position of each request's bytes in the response slab.
    pub parts: Vec<Extent>,
}

/// The reason why a batch failed. The worker continues to serve after such a failure.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum RunFailure {
    /// The engine failed. The text is the engine's error message.
    #[error("the model could not be run on this input: {0}")]
    Engine(String),
    /// An output does not have as many rows as the batch. The text names the output.
    #[error("the model could not be run on this input: {0}; set batch.max: 0 for this model")]
    NotBatched(String),
    /// The input is invalid, for example because it contains a token that is not in the vocabulary.
    #[error("the model refuses this input: {0}")]
    Input(String),
    /// The outputs do not fit into a slot of the response slab.
    #[error("the answer has {needed} bytes and only {room} fit; raise limits.response_bytes")]
    AnswerTooLarge {
        /// The size of the outputs in bytes.
        needed: u64,
        /// The size of a slot of the response slab in bytes.
        room: u64,
    },
    /// The model sleeps, because it could not be woken. The batch has not run.
    #[error("the model sleeps, and the worker cannot wake it")]
    Asleep,
    /// The supervisor sent an invalid message. This is a bug in the supervisor.
    #[error("the worker could not use the batch, which is a bug in shadowslice; please report it: {0}")]
    BadBatch(String),
}

/// The error of encoding or decoding a message.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// The encoded message does not fit into the buffer.
    #[error(
        "a message between supervisor and worker does not fit into {MAX_MESSAGE_BYTES} bytes; lower batch.max"
    )]
    Encode(#[source] postcard::Error),
    /// The bytes are not a valid message.
    #[error("cannot decode a message between supervisor and worker; install both programs from one build")]
    Decode(#[source] postcard::Error),
}

/// Encodes a message into `buffer` and returns the encoded bytes.
///
/// # Errors
///
/// Returns [`MessageError::Encode`] if the buffer is too small.
pub fn encode<'b, M: Serialize>(message: &M, buffer: &'b mut [u8]) -> Result<&'b [u8], MessageError> {
    postcard::to_slice(message, buffer).map(|written| &*written).map_err(MessageError::Encode)
}

/// Decodes a message.
///
/// # Errors
///
/// Returns [`MessageError::Decode`] if the bytes are not a complete message of this type.
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
