//! The inputs of a batch as ONNX Runtime values.

use std::fmt::Debug;

use half::{bf16, f16};
use ort::session::SessionInputValue;
use ort::value::{PrimitiveTensorElementType, TensorRef};
use shadowslice_shared::batch::RunFailure;
use shadowslice_shared::tensor::Datatype;
use zerocopy::{FromBytes, Immutable, KnownLayout, TryFromBytes};

use super::gather::GatherBuffer;
use super::{run_failure, strings};
use crate::inputs::Inputs;

/// Returns the ONNX Runtime value of a required input. The tensor of a single request is read in
/// place. The tensors of several requests are stacked in `buffer`.
pub(super) fn value<'b>(
    inputs: &Inputs<'b>,
    input: usize,
    buffer: &'b mut GatherBuffer,
) -> Result<SessionInputValue<'b>, RunFailure> {
    let shape = inputs.shape(input).collect::<Vec<i64>>();
    match inputs.specs()[input].datatype {
        Datatype::Bool => view(shape, booleans(buffer, inputs, input)),
        Datatype::Uint8 => view(shape, elements::<u8>(buffer, inputs, input)),
        Datatype::Uint16 => view(shape, elements::<u16>(buffer, inputs, input)),
        Datatype::Uint32 => view(shape, elements::<u32>(buffer, inputs, input)),
        Datatype::Uint64 => view(shape, elements::<u64>(buffer, inputs, input)),
        Datatype::Int8 => view(shape, elements::<i8>(buffer, inputs, input)),
        Datatype::Int16 => view(shape, elements::<i16>(buffer, inputs, input)),
        Datatype::Int32 => view(shape, elements::<i32>(buffer, inputs, input)),
        Datatype::Int64 => view(shape, elements::<i64>(buffer, inputs, input)),
        Datatype::Fp16 => view(shape, elements::<f16>(buffer, inputs, input)),
        Datatype::Bf16 => view(shape, elements::<bf16>(buffer, inputs, input)),
        Datatype::Fp32 => view(shape, elements::<f32>(buffer, inputs, input)),
        Datatype::Fp64 => view(shape, elements::<f64>(buffer, inputs, input)),
        Datatype::Bytes => strings::tensor(shape, inputs, input),
    }
}

/// Returns the ONNX Runtime value of an optional input, whose bytes are contiguous.
pub(super) fn whole<'b>(
    datatype: Datatype,
    shape: &[i64],
    bytes: &'b [u8],
) -> Result<SessionInputValue<'b>, RunFailure> {
    let shape = shape.to_vec();
    match datatype {
        Datatype::Bool => match <[bool]>::try_ref_from_bytes(bytes) {
            Ok(booleans) => view(shape, booleans),
            Err(_) => Err(RunFailure::BadBatch("an element of datatype BOOL is neither 0 nor 1".to_owned())),
        },
        Datatype::Uint8 => view(shape, typed::<u8>(bytes)),
        Datatype::Uint16 => view(shape, typed::<u16>(bytes)),
        Datatype::Uint32 => view(shape, typed::<u32>(bytes)),
        Datatype::Uint64 => view(shape, typed::<u64>(bytes)),
        Datatype::Int8 => view(shape, typed::<i8>(bytes)),
        Datatype::Int16 => view(shape, typed::<i16>(bytes)),
        Datatype::Int32 => view(shape, typed::<i32>(bytes)),
        Datatype::Int64 => view(shape, typed::<i64>(bytes)),
        Datatype::Fp16 => view(shape, typed::<f16>(bytes)),
        Datatype::Bf16 => view(shape, typed::<bf16>(bytes)),
        Datatype::Fp32 => view(shape, typed::<f32>(bytes)),
        Datatype::Fp64 => view(shape, typed::<f64>(bytes)),
        Datatype::Bytes => {
            Err(RunFailure::BadBatch("an optional input cannot have datatype BYTES".to_owned()))
        }
    }
}

fn typed<T: FromBytes + KnownLayout + Immutable>(bytes: &[u8]) -> &[T] {
    <[T]>::ref_from_bytes(bytes)
        .expect("the bytes are aligned for every type, and `Inputs` checked their length")
}

fn view<'b, T>(shape: Vec<i64>, elements: &'b [T]) -> Result<SessionInputValue<'b>, RunFailure>
where
    T: PrimitiveTensorElementType + Clone + Debug + 'static,
{
    let tensor = TensorRef::from_array_view((shape, elements)).map_err(|fault| run_failure(&fault))?;
    Ok(tensor.into())
}

fn elements<'b, T>(buffer: &'b mut GatherBuffer, inputs: &Inputs<'b>, input: usize) -> &'b [T]
where
    T: FromBytes + KnownLayout + Immutable,
{
    typed(buffer.whole(inputs, input))
}

/// Returns the booleans of an input. The input of a single request is read in place, unless a byte
/// is neither 0 nor 1. Such a byte would be an invalid `bool` in Rust.
fn booleans<'b>(buffer: &'b mut GatherBuffer, inputs: &Inputs<'b>, input: usize) -> &'b [bool] {
    if inputs.requests() == 1
        && let Ok(booleans) = <[bool]>::try_ref_from_bytes(inputs.part(0, input))
    {
        return booleans;
    }
    <[bool]>::try_ref_from_bytes(buffer.booleans(inputs, input)).expect("all of them are 0 or 1 now")
}
