//! Inference requests as HTTP carries them: a JSON header, and after it the binary tensors.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::admission::memory_permit::Reserved;
use crate::admission::request_error::{RequestError, invalid};
use crate::tensors::check::{self, Clipped, InferRequest, NamedTensor, Shape, WantedOutput};
use crate::tensors::object::{self, Object};
use crate::tensors::shared_memory::SharedTensor;
use crate::tensors::values;
use shadowslice_datapath::pipeline::{Metadata, Pieces, RequestFailure, RequestOptions};

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct HttpRequest {
    pub(crate) request: InferRequest,
    pub(crate) form: Form,
}

/// Which outputs of an answer are binary; the others are JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Form {
    All(bool),
    /// One entry for each requested output, in the order of the request.
    Each(Vec<bool>),
}

impl Form {
    pub(crate) fn binary(&self, place: usize) -> bool {
        match self {
            Self::All(binary) => *binary,
            Self::Each(each) => each.get(place).copied().unwrap_or_default(),
        }
    }
}

/// The most inputs, or outputs, of a request: a few bytes of text are some hundred in memory.
const MAX_TENSORS: usize = 8192;

/// Besides values, the most that a byte of a header becomes in memory, and that all of it does.
const HEADER_TIMES: usize = 4;
const MAX_HEADER_BYTES: usize = 8 << 20;

/// The most axes of a shape, which may take one byte of text each. Few models have more than six.
const MAX_AXES: usize = 64;

const HEADER: &str = "an object with `inputs`";

#[derive(serde::Deserialize)]
#[serde(expecting = "an object with `inputs`")]
struct Header<'a> {
    id: Option<String>,
    #[serde(borrow)]
    parameters: Option<Object<RequestParameters<'a>>>,
    #[serde(borrow)]
    inputs: Few<Object<InputHeader<'a>>, MAX_TENSORS>,
    outputs: Option<Few<Object<OutputHeader>, MAX_TENSORS>>,
}

/// A list that is not read any further than `MAX`.
struct Few<T, const MAX: usize>(Vec<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for Few<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(OneByOne(PhantomData))
    }
}

struct OneByOne<T, const MAX: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for OneByOne<T, MAX> {
    type Value = Few<T, MAX>;

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
        Ok(Few(few))
    }
}

#[derive(serde::Deserialize)]
#[serde(expecting = "an input: an object with `name`, `datatype`, `shape` and `data`")]
struct InputHeader<'a> {
    name: String,
    datatype: String,
    shape: Few<i64, MAX_AXES>,
    parameters: Option<Object<InputParameters>>,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
}

#[derive(serde::Deserialize)]
#[serde(expecting = "an output: an object with `name`")]
struct OutputHeader {
    name: String,
    parameters: Option<Object<OutputParameters>>,
}

/// Parameters that ask for an extension that is not served are named here, to be refused; others
/// are hints. A number is read as a number only: a list would take many times its text in memory.
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
    fn terms(&self) -> Result<RequestOptions, RequestFailure> {
        let number = |name: &str, value: Option<&RawValue>| match value.map(RawValue::get) {
            None => Ok(0),
            Some(text) => text.parse().map_err(|_| check::no_number(name, text)),
        };
        let (priority, timeout) = (number("priority", self.priority)?, number("timeout", self.timeout)?);
        Ok(check::terms(priority, timeout))
    }
}

#[derive(serde::Deserialize, Default)]
#[serde(expecting = "an object of parameters")]
struct InputParameters {
    binary_data_size: Option<u64>,
    shared_memory_region: Option<String>,
    shared_memory_byte_size: Option<u64>,
    shared_memory_offset: Option<u64>,
}

#[derive(serde::Deserialize, Default)]
#[serde(expecting = "an object of parameters")]
struct OutputParameters {
    binary_data: Option<bool>,
    classification: Option<u64>,
    shared_memory_region: Option<String>,
    shared_memory_byte_size: Option<u64>,
    shared_memory_offset: Option<u64>,
}

/// `header_length` is the header `Inference-Header-Content-Length`. Without it everything is JSON;
/// with 0 everything is the model's only input.
pub(crate) fn parse(
    mut body: Pieces,
    header_length: Option<usize>,
    model: &Metadata,
    reserved: &Reserved,
) -> Result<HttpRequest, RequestError> {
    let header_length = match header_length {
        None => body.len(),
        Some(0) => return raw(body, model, reserved),
        Some(length) if length <= body.len() => length,
        Some(length) => {
            return invalid(format!(
                "Inference-Header-Content-Length is {length}, but the body has only {} bytes",
                body.len()
            ));
        }
    };
    let header = reserved.joined(body.split_to(header_length))?;
    reserved.grow(header_length.saturating_mul(HEADER_TIMES).min(MAX_HEADER_BYTES))?;
    let mut binary = body;
    let header: Header<'_> = object::body(&header, HEADER)
        .map_err(|why| RequestFailure::Invalid(format!("failed to parse the request JSON: {why}")))?;
    let mut inputs = Vec::new();
    for Object(input) in header.inputs.0 {
        inputs.push(tensor(input, &mut binary, reserved)?);
    }
    if !binary.is_empty() {
        return invalid(format!(
            "{} bytes are left after the last tensor: the sizes in binary_data_size do not add up to the body",
            binary.len()
        ));
    }
    let Object(parameters) = header.parameters.unwrap_or_default();
    let default = parameters.binary_data_output.unwrap_or_default();
    let terms = parameters.terms()?;
    let (outputs, form) = outputs(header.outputs.map_or_else(Vec::new, |Few(outputs)| outputs), default)?;
    let request = InferRequest { id: header.id.unwrap_or_default(), inputs, outputs, terms };
    Ok(HttpRequest { request, form })
}

fn tensor(
    input: InputHeader<'_>,
    binary: &mut Pieces,
    reserved: &Reserved,
) -> Result<NamedTensor, RequestError> {
    let Few(shape) = input.shape;
    let Object(parameters) = input.parameters.unwrap_or_default();
    let name = Clipped(&input.name);
    let InputParameters { shared_memory_region, shared_memory_byte_size, shared_memory_offset, .. } =
        parameters;
    let place = SharedTensor::named(shared_memory_region, shared_memory_byte_size, shared_memory_offset)
        .map_err(|why| RequestFailure::Invalid(format!("input '{name}': {why}")))?;
    let datatype = check::datatype(&input.name, &input.datatype)?;
    let data = match (parameters.binary_data_size, input.data) {
        (None, None) if place.is_some() => Pieces::default(),
        (Some(_), _) | (_, Some(_)) if place.is_some() => {
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
            let bytes = reserved.buffer(values::room(datatype, data, elements))?;
            values::encode(datatype, data, elements, bytes).map(Pieces::from).map_err(wrong)?
        }
        (Some(_), Some(_)) => return invalid(format!("input '{name}' has both data and binary_data_size")),
        (None, None) => return invalid(format!("input '{name}' has neither data nor binary_data_size")),
    };
    Ok(NamedTensor { name: input.name, datatype, shape, data, place })
}

fn outputs(
    headers: Vec<Object<OutputHeader>>,
    default: bool,
) -> Result<(Vec<WantedOutput>, Form), RequestFailure> {
    if headers.is_empty() {
        return Ok((Vec::new(), Form::All(default)));
    }
    let mut wanted = Vec::new();
    let mut each = Vec::new();
    for Object(OutputHeader { name, parameters }) in headers {
        let Object(parameters) = parameters.unwrap_or_default();
        if parameters.classification.is_some_and(|classes| classes > 0) {
            return invalid(format!("output '{}': classification is not supported", Clipped(&name)));
        }
        let OutputParameters { shared_memory_region, shared_memory_byte_size, shared_memory_offset, .. } =
            parameters;
        let place = SharedTensor::named(shared_memory_region, shared_memory_byte_size, shared_memory_offset)
            .map_err(|why| RequestFailure::Invalid(format!("output '{}': {why}", Clipped(&name))))?;
        wanted.push(WantedOutput { name, place });
        each.push(parameters.binary_data.unwrap_or(default));
    }
    Ok((wanted, Form::Each(each)))
}

/// A body that is the only input of the model: one row, as large as the body where the model leaves
/// an axis open, or a BYTES tensor of one element. The outputs are binary.
fn raw(body: Pieces, model: &Metadata, reserved: &Reserved) -> Result<HttpRequest, RequestError> {
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
            byte_string(body, reserved)?
        }
    };
    if open.len() > 1 && spec.datatype.size().is_some() {
        return invalid(format!(
            "a raw binary request requires an input with at most one open dimension, but input '{}' has shape {}",
            spec.name,
            Shape(&spec.shape)
        ));
    }
    let input = NamedTensor { name: spec.name.clone(), datatype: spec.datatype, shape, data, place: None };
    let request = InferRequest {
        id: String::new(),
        inputs: vec![input],
        outputs: Vec::new(),
        terms: RequestOptions::default(),
    };
    Ok(HttpRequest { request, form: Form::All(true) })
}

fn byte_string(body: Pieces, reserved: &Reserved) -> Result<Pieces, RequestError> {
    let length = u32::try_from(body.len())
        .map_err(|_| RequestFailure::Invalid("a BYTES element must be smaller than 4 GiB".to_owned()))?;
    let mut string = reserved.buffer(size_of::<u32>() + body.len())?;
    string.extend_from_slice(&length.to_le_bytes());
    body.iter().for_each(|piece| string.extend_from_slice(piece));
    Ok(string.into())
}

#[cfg(test)]
#[path = "json_tests.rs"]
mod tests;
