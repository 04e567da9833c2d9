//! A request from its arrival to the delivery of its answer: its tensors, its memory, and the party
//! that settles it.

pub(crate) mod answer;
mod answers;
mod claim;
mod delivery;
mod memory;
mod pending;
mod pieces;
mod request;
mod streams;

pub use answers::Answers;
pub use delivery::Delivery;
pub use pieces::Pieces;
pub use request::{
    Metadata, ModelContent, RequestArrival, RequestFailure, RequestInput, RequestOptions, RequestOutput,
};

pub(crate) use answers::{Continuation, WorkerAnswer};
pub(crate) use claim::{AnswerWait, Claim};
pub(crate) use delivery::{RequestEnd, UnwrittenAnswer};
pub(crate) use memory::{RequestMemory, Reservation, taken};
pub(crate) use pending::{InFlightBatch, PendingRequest, ReplyTarget, Shapes, WaitingRequest};
pub(crate) use request::LEFT_OUT;
pub(crate) use streams::{OpenStream, StreamKey, StreamState, broken_off, died_in_step};
