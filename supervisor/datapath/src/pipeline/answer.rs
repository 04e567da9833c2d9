//! From a worker's answer to the outputs of each request. A worker's numbers are never trusted.

use bytes::Bytes;
use shadowslice_shared::batch::{BatchOutput, Extent};
use shadowslice_shared::slab::{AnswerSlab, CopyError};
use shadowslice_shared::tensor::{TensorSpec, count_byte_strings, elements};

use super::pending::Waiting;
use super::request::{Failure, Metadata, Output};

/// For each request its outputs, or that there is no memory for them. An error says why the answer
/// makes no sense.
pub(crate) fn split(
    model: &Metadata,
    slab: &AnswerSlab,
    (outputs, more): (&[BatchOutput], bool),
    requests: &[Waiting],
) -> Result<Vec<Result<Vec<Output>, Failure>>, String> {
    if more && (model.streams.is_none() || requests.len() != 1) {
        return Err("there is more of it, and the model gives one answer to a request".to_owned());
    }
    // The end of a stream.
    if outputs.is_empty() && model.streams.is_some() && !more {
        return Ok(requests.iter().map(|_| Ok(Vec::new())).collect());
    }
    if outputs.len() != model.outputs.len() {
        return Err(format!("it has {} outputs instead of {}", outputs.len(), model.outputs.len()));
    }
    for (output, spec) in outputs.iter().zip(&model.outputs) {
        if output.parts.len() != requests.len() {
            let (got, want) = (output.parts.len(), requests.len());
            return Err(format!("output {} has {got} parts for {want} requests", spec.name));
        }
    }
    // Parts do not overlap; else a few could be named over and over until memory is full.
    let parts = outputs.iter().flat_map(|output| &output.parts);
    if parts.fold(0, |sum: u64, part| sum.saturating_add(part.len)) > slab.bytes() {
        return Err(format!("its parts have more bytes than their slab, {}", slab.bytes()));
    }
    let of_request = |(index, request): (usize, &Waiting)| {
        let mut copies = Ok(Vec::with_capacity(outputs.len()));
        for (output, spec) in outputs.iter().zip(&model.outputs) {
            let shape = whole_shape(model, request.rows, &output.shape);
            match (copy(slab, spec, shape, output.parts[index])?, &mut copies) {
                (Ok(copy), Ok(copies)) => copies.push(copy),
                (Err(no_memory), _) => copies = Err(no_memory),
                (Ok(_), Err(_)) => {}
            }
        }
        Ok(copies)
    };
    requests.iter().enumerate().map(of_request).collect()
}

fn whole_shape(model: &Metadata, rows: u32, shape: &[i64]) -> Vec<i64> {
    let batch = (model.max_batch > 0).then_some(i64::from(rows));
    batch.into_iter().chain(shape.iter().copied()).collect()
}

fn copy(
    slab: &AnswerSlab,
    spec: &TensorSpec,
    shape: Vec<i64>,
    part: Extent,
) -> Result<Result<Output, Failure>, String> {
    let name = &spec.name;
    let wrong = || format!("output {name} of shape {shape:?} does not have {} bytes", part.len);
    let elements = elements(&shape);
    let expected = spec.datatype.size().map(|size| elements.and_then(|count| count.checked_mul(size)));
    if expected.is_some_and(|expected| expected.map(|bytes| bytes as u64) != Some(part.len)) {
        return Err(wrong());
    }
    let data = slab.copy(part.offset, part.len);
    let data = match data {
        Ok(data) => data,
        Err(CopyError::NoMemory(bytes)) => return Ok(Err(Failure::no_memory(bytes))),
        Err(CopyError::Outside(error)) => {
            return Err(format!("output {name} lies outside of its slab: {error}"));
        }
    };
    if expected.is_none() && count_byte_strings(&data) != elements {
        return Err(wrong());
    }
    Ok(Ok(Output { shape, data: Bytes::from(data) }))
}
