//! Splits a worker's answer into the outputs of each request. Every number from a worker is
//! checked, because the worker may be faulty.

use bytes::Bytes;
use shadowslice_shared::batch::{BatchOutput, Extent};
use shadowslice_shared::slab::{AnswerSlab, CopyError};
use shadowslice_shared::tensor::{TensorSpec, count_byte_strings, elements};

use super::pending::WaitingRequest;
use super::request::{Metadata, RequestFailure, RequestOutput};

/// Returns, for each request, either its outputs or a failure because there is not enough memory
/// for the outputs. An error says why the answer is invalid.
pub(crate) fn split(
    model: &Metadata,
    slab: &AnswerSlab,
    (outputs, more): (&[BatchOutput], bool),
    requests: &[WaitingRequest],
) -> Result<Vec<Result<Vec<RequestOutput>, RequestFailure>>, String> {
    if more && (model.streams.is_none() || requests.len() != 1) {
        return Err(
            "the worker announced further answers, but the model gives one answer to a request".to_owned()
        );
    }
    // A stream can end without another answer, or open before its first answer.
    if outputs.is_empty() && model.streams.is_some() {
        return Ok(requests.iter().map(|_| Ok(Vec::new())).collect());
    }
    if outputs.len() != model.outputs.len() {
        return Err(format!("the answer has {} outputs instead of {}", outputs.len(), model.outputs.len()));
    }
    for (output, spec) in outputs.iter().zip(&model.outputs) {
        if output.parts.len() != requests.len() {
            let (got, want) = (output.parts.len(), requests.len());
            return Err(format!("output {} has {got} parts for {want} requests", spec.name));
        }
    }
    check_lengths(slab, outputs.iter())?;
    let of_request = |(index, request): (usize, &WaitingRequest)| {
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

/// Returns an error unless the parts of these outputs fit into the slab side by side. The parts must not
/// overlap. Otherwise a worker could name the same parts repeatedly until the supervisor's memory is
/// full.
pub(crate) fn check_lengths<'o>(
    slab: &AnswerSlab,
    outputs: impl Iterator<Item = &'o BatchOutput>,
) -> Result<(), String> {
    let parts = outputs.flat_map(|output| &output.parts);
    if parts.fold(0, |sum: u64, part| sum.saturating_add(part.len)) > slab.bytes() {
        return Err(format!(
            "the answer's parts have more bytes than their slab, which has {}",
            slab.bytes()
        ));
    }
    Ok(())
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
) -> Result<Result<RequestOutput, RequestFailure>, String> {
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
        Err(CopyError::NoMemory(bytes)) => return Ok(Err(RequestFailure::no_memory(bytes))),
        Err(CopyError::Outside(error)) => {
            return Err(format!("output {name} lies outside its slab: {error}"));
        }
    };
    if expected.is_none() && count_byte_strings(&data) != elements {
        return Err(wrong());
    }
    Ok(Ok(RequestOutput { shape, data: Bytes::from(data) }))
}
