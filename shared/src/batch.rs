//! The wire of the data path: batches to a worker and answers back, one message each on a
//! `SOCK_SEQPACKET` socket. Tensors stay in the slabs; messages carry where they lie.
//!
//! Only the end of the socket says anything more: to a worker it means that there is no more work,
//! to the supervisor that the worker is dead.

use serde::{Deserialize, Serialize};

use crate::groups::Groups;

/// The largest message either way, in bytes. A batch has at most [`MAX_REQUESTS`] requests.
pub const MAX_MESSAGE_BYTES: usize = 128 * 1024;

/// The most requests in one batch.
pub const MAX_REQUESTS: usize = 1024;

/// Batches that a worker holds at once: one that runs, and one that is there when it ends.
pub const IN_FLIGHT: usize = 2;

/// The id under which a worker answers a message that it could not read.
pub const UNREADABLE: u64 = u64::MAX;

/// Where bytes lie in a slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// The first byte's offset.
    pub offset: u64,
    /// The number of bytes.
    pub len: u64,
}

/// Supervisor to worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// Run a batch.
    Run(Batch),
    /// Make a partition ready, beside what runs, and say so.
    Prepare(Groups),
    /// Let go of a partition that was made ready. No batch names it from then on.
    Forget(Groups),
}

/// Worker to supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromWorker {
    /// What became of a batch.
    Answer(Answer),
    /// What became of a partition that was to be made ready.
    Prepared(Prepared),
}

/// Whether batches may name a partition from now on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prepared {
    /// The partition.
    pub groups: Groups,
    /// Whether they may; else why the model cannot have the partition.
    pub result: Result<(), String>,
}

/// Requests that run as one batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batch {
    /// Comes back with the answer.
    pub id: u64,
    /// Which of the [`IN_FLIGHT`] parts of the response slab the answer goes to.
    pub slot: u8,
    /// `CLOCK_MONOTONIC` in nanoseconds when it was sent; both processes read the same clock.
    pub sent_ns: u64,
    /// The partition on which it runs, which was made ready; the whole, for all SMs that the
    /// process has.
    pub groups: Groups,
    /// Per input of the model, in its order: the shape without the batch axis, the same for all
    /// requests (the whole shape for a model without a batch axis).
    pub shapes: Vec<Vec<i64>>,
    /// The requests, in the order in which their rows are stacked.
    pub requests: Vec<BatchRequest>,
}

/// One request of a batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchRequest {
    /// Its size along the batch axis; 1 for a model without one.
    pub rows: u32,
    /// Per input of the model: where its bytes lie in the request slab.
    pub inputs: Vec<Extent>,
}

/// What became of a batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// The batch's id.
    pub id: u64,
    /// How long it executed, in microseconds, waiting for the GPU excluded.
    pub execution_us: u64,
    /// What came out.
    pub result: Result<Vec<Output>, RunFailure>,
}

/// One output of a whole batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Output {
    /// The shape without the batch axis (the whole shape for a model without one).
    pub shape: Vec<i64>,
    /// Per request: where its part lies in the response slab.
    pub parts: Vec<Extent>,
}

/// Why a batch has no answer though its worker lives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum RunFailure {
    /// The engine refused or failed.
    #[error("the model could not be run on this input: {0}")]
    Engine(String),
    /// The answer does not fit into its slot.
    #[error("the answer has {needed} bytes and only {room} fit; raise limits.response_bytes")]
    AnswerTooLarge {
        /// Bytes of the answer.
        needed: u64,
        /// Bytes of the slot.
        room: u64,
    },
    /// The batch itself makes no sense; a fault of the supervisor.
    #[error("the worker could not use the batch: {0}")]
    BadBatch(String),
}

/// A message that could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// It did not fit into [`MAX_MESSAGE_BYTES`].
    #[error("a message does not fit into {MAX_MESSAGE_BYTES} bytes")]
    Encode(#[source] postcard::Error),
    /// It was none of this protocol's messages.
    #[error("a message could not be understood")]
    Decode(#[source] postcard::Error),
}

/// Writes a message into `buffer` and returns its bytes.
pub fn encode<'b, M: Serialize>(message: &M, buffer: &'b mut [u8]) -> Result<&'b [u8], MessageError> {
    postcard::to_slice(message, buffer).map(|written| &*written).map_err(MessageError::Encode)
}

/// Reads a message.
pub fn decode<'b, M: Deserialize<'b>>(bytes: &'b [u8]) -> Result<M, MessageError> {
    postcard::from_bytes(bytes).map_err(MessageError::Decode)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer() -> Answer {
        Answer {
            id: 7,
            execution_us: 1200,
            result: Ok(vec![Output { shape: vec![10], parts: vec![Extent { offset: 64, len: 40 }] }]),
        }
    }

    #[test]
    fn messages_come_back_whole() {
        let mut buffer = vec![0; MAX_MESSAGE_BYTES];
        let bytes = encode(&answer(), &mut buffer).unwrap();
        assert_eq!(decode::<Answer>(bytes).unwrap(), answer());
    }

    #[test]
    fn a_cut_message_is_an_error() {
        let mut buffer = vec![0; MAX_MESSAGE_BYTES];
        let bytes = encode(&answer(), &mut buffer).unwrap();
        for cut in 0..bytes.len() {
            assert!(decode::<Answer>(&bytes[..cut]).is_err(), "cut to {cut} bytes");
        }
    }
}
