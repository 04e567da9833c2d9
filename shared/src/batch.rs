//! The wire of the data path: one message each on a `SOCK_SEQPACKET` socket. Tensors stay in the
//! slabs; messages carry where they lie.
//!
//! The end of the socket means to a worker that there is no more work, and to the supervisor that
//! the worker is dead.

use serde::{Deserialize, Serialize};

use crate::groups::Groups;

/// The largest message either way, in bytes. A batch has at most [`MAX_REQUESTS`] requests.
pub const MAX_MESSAGE_BYTES: usize = 128 * 1024;

pub const MAX_REQUESTS: usize = 1024;

/// One batch runs, and one is there when it ends.
pub const IN_FLIGHT: usize = 2;

/// The id under which a worker answers a message that it could not read.
pub const UNREADABLE: u64 = u64::MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    pub offset: u64,
    pub len: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    Run(Batch),
    /// Give the next answer of a stream, for which a batch of its own stands.
    Next(StreamStep),
    /// The client of this stream wants no more of it, or has gone.
    Close(u64),
    /// Make a partition ready, beside what runs, and say so.
    Prepare(Groups),
    /// Let go of a partition. No batch names it from then on.
    Forget(Groups),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkerMessage {
    Answer(BatchAnswer),
    Prepared(PartitionReply),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionReply {
    pub groups: Groups,
    /// Else why the model cannot have the partition.
    pub result: Result<(), String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batch {
    pub id: u64,
    /// Which of the [`IN_FLIGHT`] parts of the response slab the answer goes to.
    pub slot: u8,
    /// `CLOCK_MONOTONIC` in nanoseconds when it was sent: a clock that both processes share.
    pub sent_ns: u64,
    /// A partition that was made ready, or the whole: all SMs that the process has.
    pub groups: Groups,
    /// Per input, in the model's order: the shape without the batch axis, which is the same for all
    /// requests (the whole shape for a model without a batch axis).
    pub shapes: Vec<Vec<i64>>,
    /// In the order in which their rows are stacked.
    pub requests: Vec<BatchRequest>,
    /// The optional inputs that its only request gives; none in other batches.
    pub optional: Vec<OptionalTensor>,
}

/// The tensor of an optional input, which would have its default otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OptionalTensor {
    /// The place among the model's optional inputs.
    pub input: u32,
    /// The whole shape: an optional input has no batch axis.
    pub shape: Vec<i64>,
    /// In the request slab.
    pub part: Extent,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchRequest {
    /// The size along the batch axis; 1 for a model without one.
    pub rows: u32,
    /// Per input of the model, in the request slab.
    pub inputs: Vec<Extent>,
}

/// Its fields are those of a [`Batch`], but for its stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamStep {
    pub id: u64,
    pub slot: u8,
    pub sent_ns: u64,
    pub groups: Groups,
    /// The id of the batch that began the stream.
    pub stream: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchAnswer {
    pub id: u64,
    /// In microseconds; waiting for the GPU is excluded.
    pub execution_us: u64,
    /// At the end of a stream, no outputs.
    pub result: Result<Vec<BatchOutput>, RunFailure>,
    /// Whether it opens a stream or belongs to an open one, so that [`Command::Next`] asks for more.
    pub more: bool,
}

/// One output of a whole batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchOutput {
    /// Without the batch axis (the whole shape for a model without one).
    pub shape: Vec<i64>,
    /// Per request, in the response slab.
    pub parts: Vec<Extent>,
}

/// Why a batch has no answer though its worker lives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum RunFailure {
    #[error("the model could not be run on this input: {0}")]
    Engine(String),
    /// An answer does not have the rows of its batch.
    #[error("the model could not be run on this input: {0}; set batch.max: 0 for this model")]
    NotBatched(String),
    /// The input is at fault: a token that is not in the vocabulary, say.
    #[error("the model refuses this input: {0}")]
    Input(String),
    #[error("the answer has {needed} bytes and only {room} fit; raise limits.response_bytes")]
    AnswerTooLarge { needed: u64, room: u64 },
    /// A fault of the supervisor.
    #[error("the worker could not use the batch: {0}")]
    BadBatch(String),
}

#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    #[error("a message does not fit into {MAX_MESSAGE_BYTES} bytes")]
    Encode(#[source] postcard::Error),
    #[error("a message could not be understood")]
    Decode(#[source] postcard::Error),
}

pub fn encode<'b, M: Serialize>(message: &M, buffer: &'b mut [u8]) -> Result<&'b [u8], MessageError> {
    postcard::to_slice(message, buffer).map(|written| &*written).map_err(MessageError::Encode)
}

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
    fn messages_come_back_whole() {
        let mut buffer = vec![0; MAX_MESSAGE_BYTES];
        let bytes = encode(&answer(), &mut buffer).unwrap();
        assert_eq!(decode::<BatchAnswer>(bytes).unwrap(), answer());
    }

    #[test]
    fn a_cut_message_is_an_error() {
        let mut buffer = vec![0; MAX_MESSAGE_BYTES];
        let bytes = encode(&answer(), &mut buffer).unwrap();
        for cut in 0..bytes.len() {
            assert!(decode::<BatchAnswer>(&bytes[..cut]).is_err(), "cut to {cut} bytes");
        }
    }
}
