//! The inputs of a batch as ONNX Runtime values.

use ort::session::SessionInputValue;
use shadowslice_shared::batch::RunFailure;
use shadowslice_shared::tensor::Datatype;

use super::gather::GatherBuffer;
use super::{strings, tensor};
use crate::inputs::Inputs;

/// Returns the ONNX Runtime value of a required input. The tensor of a single request is read in
/// place. Booleans and the tensors of several requests are stacked in `buffer`.
pub(super) fn value<'b>(
    inputs: &Inputs<'b>,
    input: usize,
    buffer: &'b mut GatherBuffer,
) -> Result<SessionInputValue<'b>, RunFailure> {
    let shape = inputs.shape(input).collect::<Vec<i64>>();
    match inputs.specs()[input].datatype {
        Datatype::Bytes => strings::tensor(shape, inputs, input),
        Datatype::Bool => tensor::of_bytes(Datatype::Bool, &shape, buffer.booleans(inputs, input)),
        datatype => tensor::of_bytes(datatype, &shape, buffer.whole(inputs, input)),
    }
}

/// Returns the ONNX Runtime value of an optional input, whose bytes are contiguous and aligned.
pub(super) fn whole<'b>(
    datatype: Datatype,
    shape: &[i64],
    bytes: &'b [u8],
) -> Result<SessionInputValue<'b>, RunFailure> {
    let bad = |why: &str| Err(RunFailure::BadBatch(why.to_owned()));
    match datatype {
        Datatype::Bytes => bad("an optional input cannot have datatype BYTES"),
        Datatype::Bool if bytes.iter().any(|&byte| byte > 1) => {
            bad("an element of datatype BOOL is neither 0 nor 1")
        }
        _ => tensor::of_bytes(datatype, shape, bytes),
    }
}
