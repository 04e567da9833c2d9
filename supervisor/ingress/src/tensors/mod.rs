//! The floor that reads and writes tensors: JSON and gRPC messages, binary tensors, clients' shared
//! memory, and the comparison with the description of a model.
//!
//! It uses the floor `admission`. It knows descriptions of models, but neither models nor
//! connections.

mod answer;
mod check;
mod codec;
mod contents;
mod fields;
mod json;
mod nested;
mod numbers;
mod object;
mod outputs;
mod parameters;
mod shared_memory;
mod values;

pub use shared_memory::{Region, SharedMemory};

pub(crate) use answer::{JsonAnswer, text_bytes, write_answer};
pub(crate) use check::{InferRequest, NamedTensor, check_inputs, public_shape};
pub(crate) use codec::BoundedCodec;
pub(crate) use contents::{is_quick, parse_message};
pub(crate) use fields::{FieldObject, field_bytes, field_tensor, parse_generate, write_fields};
pub(crate) use json::{BoundedList, parse_body};
pub(crate) use numbers::{floats, integers};
pub(crate) use object::parse_object;
pub(crate) use outputs::{OutputForm, OutputSelection, OutputTensor, RequestedOutput};
