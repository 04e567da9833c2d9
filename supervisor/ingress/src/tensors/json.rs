//! Inference requests in HTTP: a JSON header, followed by the binary tensors.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};
use serde_json::value::RawValue;
use shadowslice_datapath::pipeline::{Metadata, Pieces, RequestFailure, RequestOptions};

use super::check::{self, InferRequest, NamedTensor, Shape};
use super::object::{self, Object};
use super::outputs::{OutputForm, RequestedOutput};
use super::parameters::TensorParameters;
use super::values;
use crate::admission::{Clipped, MemoryPermit, RequestError, invalid};

/// The maximum number of inputs, and of outputs, of a request. A few bytes of text become some
/// hundred bytes in memory.
pub(super) const MAX_TENSORS: usize = 8192;

/// The maximum number of bytes in memory for each byte of a header, without values.
pub(super) const HEADER_TIMES: usize = 4;

/// The maximum size of a header in memory, without values, in bytes.
pub(super) const MAX_HEADER_BYTES: usize = 8 << 20;

/// The maximum number of axes of a shape. Each may take one byte of text. Few models have more than
/// six.
pub(super) const MAX_AXES: usize = 64;

const HEADER: &str = "an object with `inputs`";

#[derive(serde::Deserialize)]
#[serde(expecting = "an object with `inputs`")]
struct Header<'a> {
    id: Option<String>,
    #[serde(borrow)]
    parameters: Option<Object<RequestParameters<'a>>>,
    #[serde(borrow)]
    inputs: BoundedList<Object<InputHeader<'a>>, MAX_TENSORS>,
    outputs: Option<BoundedList<Object<OutputHeader>, MAX_TENSORS>>,
}

/// A list with at most `MAX` entries. Parsing fails at the first entry that exceeds the maximum.
pub(crate) struct BoundedList<T, const MAX: usize>(pub(crate) Vec<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for BoundedList<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(BoundedListVisitor(PhantomData))
    }
}

struct BoundedListVisitor<T, const MAX: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for BoundedListVisitor<T, MAX> {
    type Value = BoundedList<T, MAX>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {MAX} entries")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Self::Value, A::Error> {
        let mut few = Vec::new();
        while let Some(value) = values.next_element()? {
            if few.len() == MAX {
                return Err(A::Error::custom(format_args!("a list of more than {MAX} entries")));
            }
            few.push(value);
        }
        Ok(BoundedList(few))
    }
}

#[derive(serde::Deserialize)]
#[serde(expecting = "an input: an object with `name`, `datatype`, `shape` and `data`")]
struct InputHeader<'a> {
    name: String,
    datatype: String,
    shape: BoundedList<i64, MAX_AXES>,
    parameters: Option<Object<TensorParameters>>,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
}

#[derive(serde::Deserialize)]
#[serde(expecting = "an output: an object with `name`")]
struct OutputHeader {
    name: String,
    parameters: Option<Object<TensorParameters>>,
}

/// The parameters of a request. Parameters for unsupported extensions are refused, all other
/// unknown parameters are ignored. Only numbers are parsed as numbers, because a list would take
/// many times its text in memory.
#[derive(serde::Deserialize, Default)]
#[serde(expecting = "an object of parameters")]
struct RequestParameters<'a> {
    binary_data_output: Option<bool>,
    #[serde(borrow)]
    priority: Option<&'a RawValue>,
    #[serde(borrow)]
    timeout: Option<&'a RawValue>,
}

impl RequestParameters<'_> {
    fn options(&self) -> Result<RequestOptions, RequestFailure> {
        options(self.priority, self.timeout)
    }
}

/// Returns the options for the values of the parameters `priority` and `timeout`.
pub(super) fn options(
    priority: Option<&RawValue>,
    timeout: Option<&RawValue>,
) -> Result<RequestOptions, RequestFailure> {
    let number = |name: &str, value: Option<&RawValue>| match value.map(RawValue::get) {
        None => Ok(0),
        Some(text) => text.parse().map_err(|_| check::invalid_number(name, text)),
    };
    Ok(check::options(number("priority", priority)?, number("timeout", timeout)?))
}

/// Parses a body. `header_length` is the header `Inference-Header-Content-Length`. Without this
/// header the whole body is JSON. If the header is 0, the whole body is the model's only input.
pub(crate) fn parse_body(
    mut body: Pieces,
    header_length: Option<usize>,
    model: &Metadata,
    permit: &MemoryPermit,
) -> Result<InferRequest, RequestError> {
    let header_length = match header_length {
        None => body.len(),
        Some(0) => return raw(body, model, permit),
        Some(length) if length <= body.len() => length,
        Some(length) => {
            return invalid(format!(
                "Inference-Header-Content-Length is {length}, but the body has only {} bytes",
                body.len()
            ));
        }
    };
    let header = permit.join(body.split_to(header_length))?;
    permit.grow(header_length.saturating_mul(HEADER_TIMES).min(MAX_HEADER_BYTES))?;
    let mut binary = body;
    let header: Header<'_> = object::parse_object(&header, HEADER)?;
    let mut inputs = Vec::new();
    for Object(input) in header.inputs.0 {
        inputs.push(tensor(input, &mut binary, permit)?);
    }
    if !binary.is_empty() {
        return invalid(format!(
            "{} bytes are left after the last tensor: the sizes in binary_data_size do not add up to the body",
            binary.len()
        ));
    }
    let Object(parameters) = header.parameters.unwrap_or_default();
    let is_binary = parameters.binary_data_output.unwrap_or_default();
    let options = parameters.options()?;
    let outputs = header.outputs.into_iter().flat_map(|BoundedList(outputs)| outputs);
    let outputs = outputs.map(|Object(output)| requested(output, is_binary)).collect::<Result<_, _>>()?;
    Ok(InferRequest { id: header.id.unwrap_or_default(), inputs, outputs, is_binary, options })
}

fn tensor(
    input: InputHeader<'_>,
    binary: &mut Pieces,
    permit: &MemoryPermit,
) -> Result<NamedTensor, RequestError> {
    let BoundedList(shape) = input.shape;
    let Object(parameters) = input.parameters.unwrap_or_default();
    let name = Clipped(&input.name);
    let region = parameters.region("input", &input.name)?;
    let datatype = check::datatype(&input.name, &input.datatype)?;
    let data = match (parameters.binary_data_size, input.data) {
        (None, None) if region.is_some() => Pieces::default(),
        (Some(_), _) | (_, Some(_)) if region.is_some() => {
            return invalid(format!("input '{name}' has both data and a shared memory region"));
        }
        (Some(size), None) => {
            let left = binary.len();
            match usize::try_from(size) {
                Ok(size) if size <= left => binary.split_to(size),
                _ => {
                    return invalid(format!(
                        "input '{name}': binary_data_size is {size}, but only {left} bytes are left in the body"
                    ));
                }
            }
        }
        (None, Some(data)) => {
            let wrong =
                |why| RequestFailure::Invalid(format!("input '{name}' of shape {}: {why}", Shape(&shape)));
            let elements = check::count(&shape).map_err(wrong)?;
            let bytes = permit.buffer(values::max_bytes(datatype, data, elements))?;
            values::encode(datatype, data, elements, bytes).map(Pieces::from).map_err(wrong)?
        }
        (Some(_), Some(_)) => return invalid(format!("input '{name}' has both data and binary_data_size")),
        (None, None) => return invalid(format!("input '{name}' has neither data nor binary_data_size")),
    };
    Ok(NamedTensor { name: input.name, datatype, shape, data, region })
}

/// Returns an output that a request names. `is_binary` is the request's default.
fn requested(output: OutputHeader, is_binary: bool) -> Result<RequestedOutput, RequestFailure> {
    let OutputHeader { name, parameters } = output;
    let Object(parameters) = parameters.unwrap_or_default();
    let form = match parameters.region("output", &name)? {
        Some(part) => OutputForm::Shared(part),
        None if parameters.binary_data.unwrap_or(is_binary) => OutputForm::Binary,
        None => OutputForm::Json,
    };
    Ok(RequestedOutput { name, form })
}

/// Returns a request whose body is the model's only input. The input is one row or, for BYTES, one
/// element. If the shape has an open axis, the size of the body determines it. The outputs are
/// binary.
fn raw(body: Pieces, model: &Metadata, permit: &MemoryPermit) -> Result<InferRequest, RequestError> {
    let [spec] = &model.inputs[..] else {
        return invalid(format!(
            "a raw binary request requires a model with one input, but model '{}' has {}",
            model.name,
            model.inputs.len()
        ));
    };
    let mut shape = spec.shape.clone();
    if let (true, Some(batch)) = (model.max_batch > 0, shape.first_mut()) {
        *batch = 1;
    }
    let open: Vec<usize> = (0..shape.len()).filter(|&axis| shape[axis] < 0).collect();
    let data = match spec.datatype.size() {
        Some(size) => {
            if let [axis] = open[..] {
                shape[axis] = 1;
                let row = check::count(&shape).map_err(RequestFailure::Invalid)?.saturating_mul(size).max(1);
                shape[axis] = i64::try_from(body.len() / row).unwrap_or(i64::MAX);
            }
            body
        }
        None => {
            open.iter().for_each(|&axis| shape[axis] = 1);
            byte_string(body, permit)?
        }
    };
    if open.len() > 1 && spec.datatype.size().is_some() {
        return invalid(format!(
            "a raw binary request requires an input with at most one open dimension, but input '{}' has shape {}",
            spec.name,
            Shape(&spec.shape)
        ));
    }
    let input = NamedTensor { name: spec.name.clone(), datatype: spec.datatype, shape, data, region: None };
    Ok(InferRequest {
        id: String::new(),
        inputs: vec![input],
        outputs: Vec::new(),
        is_binary: true,
        options: RequestOptions::default(),
    })
}

fn byte_string(body: Pieces, permit: &MemoryPermit) -> Result<Pieces, RequestError> {
    let length = u32::try_from(body.len())
        .map_err(|_| RequestFailure::Invalid("a BYTES element must be smaller than 4 GiB".to_owned()))?;
    let mut string = permit.buffer(size_of::<u32>() + body.len())?;
    string.extend_from_slice(&length.to_le_bytes());
    body.iter().for_each(|piece| string.extend_from_slice(piece));
    Ok(string.into())
}

#[cfg(test)]
#[path = "json_tests.rs"]
mod tests;
