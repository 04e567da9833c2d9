//! What ONNX Runtime answered, divided among the requests.
#![allow(unsafe_code)] // reads the tensors of ONNX Runtime

use std::ptr::NonNull;

use ort::value::{DynTensorValueType, DynValue, ValueType};
use shadowslice_shared::batch::{BatchOutput, Extent, RunFailure};
use shadowslice_shared::tensor::{TensorSpec, elements};

use super::strings::Strings;
use super::{datatype, failed};
use crate::answer::AnswerSlot;
use crate::inputs::Inputs;

pub(super) fn split(
    spec: &TensorSpec,
    value: &DynValue,
    inputs: &Inputs<'_>,
    slot: &mut AnswerSlot<'_>,
) -> Result<BatchOutput, RunFailure> {
    let Layout { shape, row } = layout(spec, value, inputs.rows())?;
    let counts = (0..inputs.requests()).map(|request| row * inputs.rows_of(request) as usize);
    let parts = match spec.datatype.size() {
        Some(size) => put_numbers(bytes(value)?, counts.map(|count| count * size), slot)
            .ok_or_else(|| odd(spec, "is shorter than its shape"))?,
        None => {
            let total = row * inputs.rows().unwrap_or(1) as usize;
            put_strings(&Strings::of(value, total).map_err(|fault| failed(&fault))?, counts, slot)
        }
    };
    Ok(BatchOutput { shape, parts })
}

/// The address of an output that ONNX Runtime allotted; `None` if it is on the host, as a constant
/// may be.
pub(super) fn on_device(value: &DynValue) -> Result<Option<NonNull<u8>>, RunFailure> {
    let tensor = value.view().downcast::<DynTensorValueType>().map_err(|fault| failed(&fault))?;
    if tensor.memory_info().is_cpu_accessible() {
        return Ok(None);
    }
    // An output without elements may have no address; no byte is copied from it.
    Ok(Some(NonNull::new(tensor.data_ptr().cast::<u8>().cast_mut()).unwrap_or(NonNull::dangling())))
}

#[derive(Debug)]
pub(super) struct Layout {
    /// Without the batch axis.
    pub(super) shape: Vec<i64>,
    /// Elements of a row.
    pub(super) row: usize,
}

pub(super) fn layout(spec: &TensorSpec, value: &DynValue, rows: Option<u32>) -> Result<Layout, RunFailure> {
    let ValueType::Tensor { ty, shape, .. } = value.dtype() else { return Err(odd(spec, "is no tensor")) };
    if datatype(*ty) != Some(spec.datatype) {
        return Err(odd(spec, &format!("holds {ty} instead of {}", spec.datatype)));
    }
    let shape = row_shape(shape, rows).ok_or_else(|| {
        let name = &spec.name;
        RunFailure::NotBatched(format!(
            "output `{name}` has the shape {shape:?}, whose first axis is not the batch"
        ))
    })?;
    let row = elements(shape).ok_or_else(|| odd(spec, "has an impossible shape"))?;
    Ok(Layout { shape: shape.to_vec(), row })
}

fn odd(spec: &TensorSpec, what: &str) -> RunFailure {
    RunFailure::Engine(format!("output `{}` {what}", spec.name))
}

/// `lens`: bytes of each request; `None` if there are fewer.
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

/// `None` if the batch is not the first axis.
fn row_shape(shape: &[i64], rows: Option<u32>) -> Option<&[i64]> {
    let Some(rows) = rows else { return Some(shape) };
    let (first, rest) = shape.split_first()?;
    (*first == i64::from(rows)).then_some(rest)
}

/// Read as bytes because only the model could ensure that its booleans are 0 or 1.
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
    // `value`, and is not written.
    Ok(unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<u8>(), size) })
}
