//! From a worker's answer to the outputs of each request. A worker's numbers are never trusted.

use bytes::Bytes;
use shadowslice_shared::batch::{Extent, Output as WireOutput};
use shadowslice_shared::slab::{AnswerSlab, OutOfSlab};
use shadowslice_shared::tensor::{TensorSpec, byte_strings, elements};

use super::pending::Waiting;
use super::request::{Metadata, Output};

/// Why an answer makes no sense.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadAnswer {
    #[error("it has {got} outputs instead of {want}")]
    Outputs { got: usize, want: usize },
    #[error("output {name} has {got} parts for {want} requests")]
    Parts { name: String, got: usize, want: usize },
    #[error("its parts have more bytes than their slab, {bytes}")]
    TooLong { bytes: u64 },
    #[error("output {name} lies outside of its slab")]
    Outside {
        name: String,
        #[source]
        source: OutOfSlab,
    },
    #[error("output {name} of shape {shape:?} does not have {got} bytes")]
    Size { name: String, shape: Vec<i64>, got: u64 },
}

/// The outputs of each request of a batch, copied out of the worker's slab.
pub(crate) fn split(
    model: &Metadata,
    slab: &AnswerSlab,
    outputs: &[WireOutput],
    requests: &[Waiting],
) -> Result<Vec<Vec<Output>>, BadAnswer> {
    if outputs.len() != model.outputs.len() {
        return Err(BadAnswer::Outputs { got: outputs.len(), want: model.outputs.len() });
    }
    for (output, spec) in outputs.iter().zip(&model.outputs) {
        if output.parts.len() != requests.len() {
            let (got, want) = (output.parts.len(), requests.len());
            return Err(BadAnswer::Parts { name: spec.name.clone(), got, want });
        }
    }
    // Parts do not overlap, so this holds; else a few could be named over and over until memory is full.
    let parts = outputs.iter().flat_map(|output| &output.parts);
    if parts.fold(0, |sum: u64, part| sum.saturating_add(part.len)) > slab.bytes() {
        return Err(BadAnswer::TooLong { bytes: slab.bytes() });
    }
    let of_request = |(index, request): (usize, &Waiting)| {
        let parts = outputs.iter().zip(&model.outputs);
        parts
            .map(|(output, spec)| {
                let shape = whole_shape(model, request.rows, &output.shape);
                copy(slab, spec, shape, output.parts[index])
            })
            .collect()
    };
    requests.iter().enumerate().map(of_request).collect()
}

fn whole_shape(model: &Metadata, rows: u32, shape: &[i64]) -> Vec<i64> {
    let batch = (model.max_batch > 0).then_some(i64::from(rows));
    batch.into_iter().chain(shape.iter().copied()).collect()
}

fn copy(slab: &AnswerSlab, spec: &TensorSpec, shape: Vec<i64>, part: Extent) -> Result<Output, BadAnswer> {
    let name = || spec.name.clone();
    let elements = elements(&shape);
    let expected = spec.datatype.size().map(|size| elements.and_then(|count| count.checked_mul(size)));
    if let Some(expected) = expected
        && expected.map(|bytes| bytes as u64) != Some(part.len)
    {
        return Err(BadAnswer::Size { name: name(), shape, got: part.len });
    }
    let data =
        slab.copy(part.offset, part.len).map_err(|source| BadAnswer::Outside { name: name(), source })?;
    if expected.is_none() && byte_strings(&data).map(|strings| strings.len()) != elements {
        return Err(BadAnswer::Size { name: name(), shape, got: part.len });
    }
    Ok(Output { shape, data: Bytes::from(data) })
}
