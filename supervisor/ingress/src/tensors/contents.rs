//! Inference requests in gRPC, with raw or typed contents. This file does no I/O.

use std::collections::HashMap;

use bytes::Bytes;
use prost::Message;
use shadowslice_shared::tensor::{self, Datatype};

use super::check::{self, InferRequest, NamedTensor};
use super::outputs::{OutputForm, RequestedOutput};
use super::parameters::TensorParameters;
use super::shared_memory::SharedTensor;
use crate::admission::{Clipped, invalid};
use crate::proto::model_infer_request::InferInputTensor;
use crate::proto::{
    InferParameter, InferTensorContents, ModelInferRequest, infer_parameter::ParameterChoice,
};
use shadowslice_datapath::pipeline::RequestFailure;

const REGION: &str = "shared_memory_region";
const OFFSET: &str = "shared_memory_offset";
const BYTE_SIZE: &str = "shared_memory_byte_size";

/// The size of typed contents in a message, in bytes, that become tensors within a millisecond.
const QUICK_BYTES: usize = 128 << 10;

/// Returns whether a request's tensors can be parsed at once.
pub(crate) fn is_quick(request: &ModelInferRequest) -> bool {
    let contents = request.inputs.iter().filter_map(|input| input.contents.as_ref());
    contents.map(Message::encoded_len).sum::<usize>() <= QUICK_BYTES
}

pub(crate) fn parse_message(request: ModelInferRequest) -> Result<InferRequest, RequestFailure> {
    let ModelInferRequest { id, parameters, inputs, outputs, raw_input_contents: raw, .. } = request;
    let sent = inputs.iter().filter(|input| !input.parameters.contains_key(REGION)).count();
    if !raw.is_empty() && raw.len() != sent {
        return invalid(format!(
            "expected raw_input_contents for all {sent} inputs that are not in shared memory or for none, got {}",
            raw.len()
        ));
    }
    let mut raw = raw.into_iter();
    let mut read = Vec::new();
    for input in inputs {
        let raw = if input.parameters.contains_key(REGION) { None } else { raw.next() };
        read.push(tensor(input, raw)?);
    }
    let mut requested = Vec::new();
    for output in outputs {
        let form = match region("output", &output.name, &output.parameters)? {
            Some(part) => OutputForm::Shared(part),
            None => OutputForm::Binary,
        };
        requested.push(RequestedOutput { name: output.name, form });
    }
    let options = check::options(number("priority", &parameters)?, number("timeout", &parameters)?);
    Ok(InferRequest { id, inputs: read, outputs: requested, is_binary: true, options })
}

fn number(name: &str, parameters: &HashMap<String, InferParameter>) -> Result<u64, RequestFailure> {
    let Some(parameter) = parameters.get(name) else { return Ok(0) };
    match &parameter.parameter_choice {
        Some(ParameterChoice::Uint64Param(number)) => Ok(*number),
        Some(ParameterChoice::Int64Param(number)) => {
            u64::try_from(*number).map_err(|_| check::invalid_number(name, &number.to_string()))
        }
        Some(other) => Err(check::invalid_number(name, &format!("{other:?}"))),
        None => Err(check::invalid_number(name, "nothing")),
    }
}

fn tensor(input: InferInputTensor, raw: Option<Bytes>) -> Result<NamedTensor, RequestFailure> {
    let InferInputTensor { name, datatype, shape, parameters, contents } = input;
    let region = region("input", &name, &parameters)?;
    let datatype = check::datatype(&name, &datatype)?;
    let data = match (raw, contents) {
        (_, None) if region.is_some() => Bytes::new(),
        (_, Some(_)) if region.is_some() => {
            return invalid(format!(
                "input '{}' has both contents and a shared memory region",
                Clipped(&name)
            ));
        }
        (Some(raw), None) => raw,
        (Some(_), Some(_)) => {
            return invalid(format!("input '{}' has both contents and raw_input_contents", Clipped(&name)));
        }
        (None, contents) => typed(datatype, &contents.unwrap_or_default())
            .map_err(|why| RequestFailure::Invalid(format!("input '{}': {why}", Clipped(&name))))?,
    };
    Ok(NamedTensor { name, datatype, shape, data: data.into(), region })
}

/// Returns the part of shared memory that the parameters of a tensor name.
fn region(
    kind: &str,
    name: &str,
    parameters: &HashMap<String, InferParameter>,
) -> Result<Option<SharedTensor>, RequestFailure> {
    if parameters.is_empty() {
        return Ok(None);
    }
    let number = |name| parameters.contains_key(name).then(|| number(name, parameters)).transpose();
    let region = match parameters.get(REGION).map(|region| &region.parameter_choice) {
        None => None,
        Some(Some(ParameterChoice::StringParam(region))) => Some(region.clone()),
        Some(_) => return invalid(format!("{kind} '{}': {REGION} must be a string", Clipped(name))),
    };
    let parameters = TensorParameters {
        classification: number("classification")?,
        shared_memory_region: region,
        shared_memory_byte_size: number(BYTE_SIZE)?,
        shared_memory_offset: number(OFFSET)?,
        ..TensorParameters::default()
    };
    parameters.region(kind, name)
}

/// Returns the bytes of typed contents, which must have the kind of the datatype.
fn typed(datatype: Datatype, contents: &InferTensorContents) -> Result<Bytes, String> {
    let (expected, data) = match datatype {
        Datatype::Bool => {
            ("bool_contents", contents.bool_contents.iter().map(|&value| u8::from(value)).collect())
        }
        Datatype::Int8 => ("int_contents", pack(datatype, &contents.int_contents, i8::to_le_bytes)?),
        Datatype::Int16 => ("int_contents", pack(datatype, &contents.int_contents, i16::to_le_bytes)?),
        Datatype::Int32 => ("int_contents", pack(datatype, &contents.int_contents, i32::to_le_bytes)?),
        Datatype::Int64 => ("int64_contents", pack(datatype, &contents.int64_contents, i64::to_le_bytes)?),
        Datatype::Uint8 => ("uint_contents", pack(datatype, &contents.uint_contents, u8::to_le_bytes)?),
        Datatype::Uint16 => ("uint_contents", pack(datatype, &contents.uint_contents, u16::to_le_bytes)?),
        Datatype::Uint32 => ("uint_contents", pack(datatype, &contents.uint_contents, u32::to_le_bytes)?),
        Datatype::Uint64 => ("uint64_contents", pack(datatype, &contents.uint64_contents, u64::to_le_bytes)?),
        Datatype::Fp32 => ("fp32_contents", pack(datatype, &contents.fp32_contents, f32::to_le_bytes)?),
        Datatype::Fp64 => ("fp64_contents", pack(datatype, &contents.fp64_contents, f64::to_le_bytes)?),
        Datatype::Bytes => ("bytes_contents", strings(&contents.bytes_contents)),
        Datatype::Fp16 | Datatype::Bf16 => ("raw_input_contents", Vec::new()),
    };
    let given = [
        ("bool_contents", contents.bool_contents.is_empty()),
        ("int_contents", contents.int_contents.is_empty()),
        ("int64_contents", contents.int64_contents.is_empty()),
        ("uint_contents", contents.uint_contents.is_empty()),
        ("uint64_contents", contents.uint64_contents.is_empty()),
        ("fp32_contents", contents.fp32_contents.is_empty()),
        ("fp64_contents", contents.fp64_contents.is_empty()),
        ("bytes_contents", contents.bytes_contents.is_empty()),
    ];
    match given.into_iter().find(|&(kind, empty)| !empty && kind != expected) {
        Some((kind, _)) => Err(format!("{datatype} is sent in {expected}, got {kind}")),
        None => Ok(data.into()),
    }
}

/// Packs values, which must be in the range of the datatype.
fn pack<T, U, const N: usize>(
    datatype: Datatype,
    values: &[T],
    bytes: fn(U) -> [u8; N],
) -> Result<Vec<u8>, String>
where
    T: Copy + std::fmt::Display,
    U: TryFrom<T>,
{
    let mut data = Vec::with_capacity(values.len() * N);
    for &value in values {
        let value = U::try_from(value).map_err(|_| format!("{value} is out of range for {datatype}"))?;
        data.extend_from_slice(&bytes(value));
    }
    Ok(data)
}

fn strings(values: &[Bytes]) -> Vec<u8> {
    let mut data = Vec::with_capacity(values.iter().map(|value| value.len() + 4).sum());
    values.iter().for_each(|value| tensor::push_byte_string(&mut data, value));
    data
}

#[cfg(test)]
#[path = "contents_tests.rs"]
mod tests;
