//! The inputs of the requests with which `cost` measures.

use bytes::Bytes;
use half::{bf16, f16};
use shadowslice_config::ModelConfig;
use shadowslice_datapath::pipeline::{Metadata, RequestInput};
use shadowslice_shared::tensor::{Datatype, TensorSpec, elements, push_byte_string};

/// Returns the inputs of a request with one row. Floats are random between 0 and 1, because the power of a
/// GPU depends on its data. Whole numbers are 0 or 1, which are valid tokens.
pub(super) fn one_row(model: &ModelConfig, metadata: &Metadata) -> Result<Vec<RequestInput>, String> {
    metadata.inputs.iter().map(|spec| input(model, metadata, spec)).collect()
}

fn input(model: &ModelConfig, metadata: &Metadata, spec: &TensorSpec) -> Result<RequestInput, String> {
    let given = model.warmup.inputs.get(&spec.name).and_then(|input| input.shape.clone());
    let tail = given.unwrap_or_else(|| metadata.tail(&spec.shape).to_vec());
    let count = elements(&tail).ok_or_else(|| {
        format!("input '{0}' has free axes; give its shape in `warmup: {{{0}: [...]}}`", spec.name)
    })?;
    let batch = (metadata.max_batch > 0).then_some(1);
    Ok(RequestInput {
        shape: batch.into_iter().chain(tail).collect(),
        data: Bytes::from(data(spec.datatype, count)).into(),
    })
}

fn data(datatype: Datatype, count: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..count {
        match datatype {
            Datatype::Fp16 => bytes.extend(f16::from_f32(fastrand::f32()).to_le_bytes()),
            Datatype::Bf16 => bytes.extend(bf16::from_f32(fastrand::f32()).to_le_bytes()),
            Datatype::Fp32 => bytes.extend(fastrand::f32().to_le_bytes()),
            Datatype::Fp64 => bytes.extend(fastrand::f64().to_le_bytes()),
            whole => match whole.size() {
                Some(size) => {
                    bytes.push(u8::from(fastrand::bool()));
                    bytes.resize(bytes.len() + size - 1, 0);
                }
                None => push_byte_string(&mut bytes, b"cost"),
            },
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_has_the_size_of_its_elements() {
        for datatype in Datatype::ALL {
            let size = datatype.size().unwrap_or(4 + b"cost".len());
            assert_eq!(data(datatype, 3).len(), 3 * size, "{datatype}");
        }
    }
}
