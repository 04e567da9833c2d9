//! The floor that moves bytes: listeners, TLS, HTTP/1.1 and HTTP/2 connections, bodies with their
//! limits, compression, and clients that send or read too slowly.
//!
//! It serves any [`Service`]. It uses the floor `admission` and does not know what requests mean.

mod accept;
mod answer_body;
mod authority;
mod body;
mod call_head;
mod calls;
mod certificate_expiry;
mod compression;
mod envelope;
mod guarded_body;
mod http1;
mod http2;
mod incoming_frames;
mod listen;
mod message_body;
mod on_wake;
mod slow_reader;
mod tls;
mod write_rate;

pub use certificate_expiry::{CertificateExpiry, expiry_warnings};
pub use listen::Certificates;

pub(crate) use accept::{Connection, Service, run};
pub(crate) use answer_body::{AnswerBody, HttpAnswer, StreamedPiece, guard_answer};
pub(crate) use body::{CountedBody, SHORT_BODY_BYTES, discard, read};
pub(crate) use call_head::{GrpcAnswer, check_head};
pub(crate) use compression::{Encoding, preferred_encoding};
pub(crate) use envelope::{accepts, compress_answer, decompress_call, message_encoding};
pub(crate) use http1::{RequestProgress, serve as serve_http};
pub(crate) use http2::{ServedCall, serve as serve_grpc};
pub(crate) use listen::{BoundListener, Protocol, bind_all};
pub(crate) use message_body::{MessageBody, MessageStarts};
