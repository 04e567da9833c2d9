//! Splits the outputs of ONNX Runtime into one part for each request.
#![allow(unsafe_code)] // This module reads the tensors of ONNX Runtime.

use std::ptr::NonNull;

use ort::value::{DynTensorValueType, DynValue, ValueType};
use shadowslice_shared::batch::{BatchOutput, Extent, RunFailure};
use shadowslice_shared::tensor::{TensorSpec, elements};

use super::strings::Strings;
use super::{datatype, run_failure};
use crate::answer::AnswerSlot;
use crate::inputs::Inputs;

pub(super) fn split(
    spec: &TensorSpec,
    value: &DynValue,
    inputs: &Inputs<'_>,
    slot: &mut AnswerSlot<'_>,
) -> Result<BatchOutput, RunFailure> {
    let RowLayout { shape, row } = layout(spec, value, inputs.rows())?;
    let counts = (0..inputs.requests()).map(|request| row * inputs.rows_of(request) as usize);
    let parts = match spec.datatype.size() {
        Some(size) => put_numbers(bytes(value)?, counts.map(|count| count * size), slot)
            .ok_or_else(|| invalid_output(spec, "is shorter than its shape requires"))?,
        None => {
            let total = row * inputs.rows().unwrap_or(1) as usize;
            put_strings(&Strings::of(value, total).map_err(|fault| run_failure(&fault))?, counts, slot)
        }
    };
    Ok(BatchOutput { shape, parts })
}

/// Returns the address of an output that ONNX Runtime allocated on the GPU, or `None` if the output
/// is in host memory. Constants, for example, are in host memory.
pub(super) fn on_device(value: &DynValue) -> Result<Option<NonNull<u8>>, RunFailure> {
    let tensor = value.view().downcast::<DynTensorValueType>().map_err(|fault| run_failure(&fault))?;
    if tensor.memory_info().is_cpu_accessible() {
        return Ok(None);
    }
    // An output without elements may have no address. A dangling pointer is enough, because nothing
    // reads from it.
    Ok(Some(NonNull::new(tensor.data_ptr().cast::<u8>().cast_mut()).unwrap_or(NonNull::dangling())))
}

/// The layout of an output that consists of rows.
#[derive(Debug)]
pub(super) struct RowLayout {
    /// The shape without the batch axis.
    pub(super) shape: Vec<i64>,
    /// The number of elements in a row.
    pub(super) row: usize,
}

pub(super) fn layout(
    spec: &TensorSpec,
    value: &DynValue,
    rows: Option<u32>,
) -> Result<RowLayout, RunFailure> {
    let ValueType::Tensor { ty, shape, .. } = value.dtype() else {
        return Err(invalid_output(spec, "is not a tensor"));
    };
    if datatype(*ty) != Some(spec.datatype) {
        return Err(invalid_output(spec, &format!("holds {ty} instead of {}", spec.datatype)));
    }
    let shape = row_shape(shape, rows).ok_or_else(|| {
        let name = &spec.name;
        RunFailure::NotBatched(format!(
            "output `{name}` has the shape {shape:?}, whose first axis is not the batch"
        ))
    })?;
    let row = elements(shape).ok_or_else(|| invalid_output(spec, "has an invalid shape"))?;
    Ok(RowLayout { shape: shape.to_vec(), row })
}

fn invalid_output(spec: &TensorSpec, what: &str) -> RunFailure {
    RunFailure::Engine(format!("output `{}` {what}", spec.name))
}

/// Copies each request's part into the slot, and returns the parts. `lens` are the lengths of the
/// parts, in bytes. Returns `None` if the output has fewer bytes than the parts need.
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

/// Returns the shape of a row, or `None` if the first axis is not the batch axis.
fn row_shape(shape: &[i64], rows: Option<u32>) -> Option<&[i64]> {
    let Some(rows) = rows else { return Some(shape) };
    let (first, rest) = shape.split_first()?;
    (*first == i64::from(rows)).then_some(rest)
}

/// Returns the data as bytes instead of typed elements, because a model may write booleans other
/// than 0 and 1.
fn bytes(value: &DynValue) -> Result<&[u8], RunFailure> {
    let tensor = value.view().downcast::<DynTensorValueType>().map_err(|fault| run_failure(&fault))?;
    let size = tensor.size().ok_or_else(|| RunFailure::Engine("an output has no known size".to_owned()))?;
    if size == 0 {
        return Ok(&[]);
    }
    if !tensor.memory_info().is_cpu_accessible() {
        return Err(RunFailure::Engine("an output is still in the GPU's memory".to_owned()));
    }
    // SAFETY: the run has initialised the tensor's data. The data is in host memory, exists while
    // `value` exists, and does not change.
    Ok(unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<u8>(), size) })
}
