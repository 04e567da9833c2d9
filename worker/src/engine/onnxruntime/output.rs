//! What ONNX Runtime answered, divided among the requests.
#![allow(unsafe_code)] // reads the tensors of ONNX Runtime

use std::ptr::NonNull;

use ort::value::{DynTensorValueType, DynValue, ValueType};
use shadowslice_shared::batch::{Extent, Output, RunFailure};
use shadowslice_shared::tensor::{TensorSpec, elements};

use super::strings::Strings;
use super::{broken, datatype, failed};
use crate::answer::AnswerSlot;
use crate::device::cuda::CudaGpu;
use crate::inputs::Inputs;

/// Writes the parts of an output into the slot, in the order of the requests.
pub(super) fn split(
    spec: &TensorSpec,
    value: &DynValue,
    inputs: &Inputs<'_>,
    slot: &mut AnswerSlot<'_>,
) -> Result<Output, RunFailure> {
    let (shape, row) = checked_shape(spec, value, inputs)?;
    let counts = (0..inputs.requests()).map(|request| row * inputs.rows_of(request) as usize);
    let parts = match spec.datatype.size() {
        Some(size) => put_numbers(bytes(value)?, counts.map(|count| count * size), slot)
            .ok_or_else(|| odd(spec, "is shorter than its shape"))?,
        None => {
            let total = row * inputs.rows().unwrap_or(1) as usize;
            put_strings(&Strings::of(value, total).map_err(|fault| failed(&fault))?, counts, slot)
        }
    };
    Ok(Output { shape: shape.to_vec(), parts })
}

/// Lets the parts of an output of numbers travel from the GPU into the slot.
pub(super) fn fetch(
    spec: &TensorSpec,
    size: usize,
    value: &DynValue,
    inputs: &Inputs<'_>,
    (gpu, slot): (&CudaGpu, &mut AnswerSlot<'_>),
) -> Result<Output, RunFailure> {
    let tensor = value.view().downcast::<DynTensorValueType>().map_err(|fault| failed(&fault))?;
    // A constant, say, which ONNX Runtime has on the host already.
    if tensor.memory_info().is_cpu_accessible() {
        return split(spec, value, inputs, slot);
    }
    let (shape, row) = checked_shape(spec, value, inputs)?;
    let start = NonNull::new(tensor.data_ptr().cast::<u8>().cast_mut());
    let mut done = 0;
    let parts = (0..inputs.requests()).map(|request| {
        let len = row * inputs.rows_of(request) as usize * size;
        let (extent, place) = slot.reserve(len as u64);
        if let (Some(start), Some(place)) = (start, place) {
            // SAFETY: the tensor has as many bytes as its shape says, and memory of an output is freed on the
            // stream that computes; the place is this batch's until it is answered.
            unsafe { gpu.copy_out(start.add(done), place, len) }.map_err(|fault| broken(&fault))?;
        }
        done += len;
        Ok(extent)
    });
    let parts = parts.collect::<Result<_, RunFailure>>()?;
    Ok(Output { shape: shape.to_vec(), parts })
}

/// An output's shape without the batch axis, and the number of elements of a row.
fn checked_shape<'v>(
    spec: &TensorSpec,
    value: &'v DynValue,
    inputs: &Inputs<'_>,
) -> Result<(&'v [i64], usize), RunFailure> {
    let ValueType::Tensor { ty, shape, .. } = value.dtype() else { return Err(odd(spec, "is no tensor")) };
    if datatype(*ty) != Some(spec.datatype) {
        return Err(odd(spec, &format!("holds {ty} instead of {}", spec.datatype)));
    }
    let shape = row_shape(shape, inputs.rows()).ok_or_else(|| {
        let why = "whose first axis is not the batch; set batch.max: 0 for this model";
        odd(spec, &format!("has the shape {shape:?}, {why}"))
    })?;
    let row = elements(shape).ok_or_else(|| odd(spec, "has an impossible shape"))?;
    Ok((shape, row))
}

fn odd(spec: &TensorSpec, what: &str) -> RunFailure {
    RunFailure::Engine(format!("output `{}` {what}", spec.name))
}

/// Puts numbers, as many bytes per request as `lens` says; `None` if there are fewer.
fn put_numbers(
    mut rest: &[u8],
    lens: impl Iterator<Item = usize>,
    slot: &mut AnswerSlot<'_>,
) -> Option<Vec<Extent>> {
    let take = |len| {
        let (part, after) = rest.split_at_checked(len)?;
        rest = after;
        Some(slot.put(part))
    };
    lens.map(take).collect()
}

/// Puts strings, as many per request as `counts` says.
fn put_strings(
    strings: &Strings,
    counts: impl Iterator<Item = usize>,
    slot: &mut AnswerSlot<'_>,
) -> Vec<Extent> {
    let (mut first, mut part) = (0, Vec::new());
    let take = |count| {
        part.clear();
        strings.encode(first, count, &mut part);
        first += count;
        slot.put(&part)
    };
    counts.map(take).collect()
}

/// The shape without the batch axis; `None` if the batch is not its first axis.
fn row_shape(shape: &[i64], rows: Option<u32>) -> Option<&[i64]> {
    let Some(rows) = rows else { return Some(shape) };
    let (first, rest) = shape.split_first()?;
    (*first == i64::from(rows)).then_some(rest)
}

/// The bytes of a tensor of numbers. They are read as bytes since nothing but the model vouches for
/// its booleans being 0 or 1.
fn bytes(value: &DynValue) -> Result<&[u8], RunFailure> {
    let tensor = value.view().downcast::<DynTensorValueType>().map_err(|fault| failed(&fault))?;
    let size = tensor.size().ok_or_else(|| RunFailure::Engine("an output has no size".to_owned()))?;
    if size == 0 {
        return Ok(&[]);
    }
    if !tensor.memory_info().is_cpu_accessible() {
        return Err(RunFailure::Engine("an output was left in the device's memory".to_owned()));
    }
    // SAFETY: the tensor's data, initialised by the run, in the host's memory; it lives as long as
    // `value`, and nobody writes it.
    Ok(unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<u8>(), size) })
}
