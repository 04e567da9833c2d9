//! Requests and answers in which each tensor is a field of a JSON object: a scalar or a nested array.
//! The model's description determines the datatype, and adds axes that the value omits.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use serde_json::value::RawValue;
use shadowslice_datapath::pipeline::{Metadata, Pieces, RequestFailure};
use shadowslice_shared::tensor::{Datatype, TensorSpec};

use super::answer;
use super::check::{self, InferRequest, NamedTensor, Shape, public_shape};
use super::json::{HEADER_TIMES, MAX_HEADER_BYTES, MAX_TENSORS, options};
use super::outputs::OutputTensor;
use super::{nested, object, values};
use crate::admission::{Clipped, MemoryPermit, RequestError};

/// The fields of a generate request that are not inputs.
const ID: &str = "id";
const PARAMETERS: &str = "parameters";

/// The parameters that have the same meaning as in other requests, so that they are never inputs.
const PRIORITY: &str = "priority";
const TIMEOUT: &str = "timeout";

/// The size in bytes of a number or a boolean in a tensor.
const SCALAR_BYTES: usize = 8;

/// The fields of a JSON object, in their order.
#[derive(Debug)]
pub(crate) struct FieldObject<'a>(Vec<(String, &'a RawValue)>);

impl<'a> FieldObject<'a> {
    /// Parses the body of a request, which must be a JSON object.
    pub(crate) fn parse(body: &'a [u8], permit: &MemoryPermit) -> Result<Self, RequestError> {
        permit.grow(body.len().saturating_mul(HEADER_TIMES).min(MAX_HEADER_BYTES))?;
        Ok(object::parse_object(body, "an object")?)
    }

    /// Removes a field, and returns its value. A field with the value `null` is absent.
    pub(crate) fn take(&mut self, name: &str) -> Option<&'a RawValue> {
        let place = self.0.iter().position(|(field, _)| field == name)?;
        let (_, value) = self.0.swap_remove(place);
        (value.get() != "null").then_some(value)
    }

    /// Removes a field, and parses its value, which must be `expected`.
    pub(crate) fn take_as<T: Deserialize<'a>>(
        &mut self,
        name: &str,
        expected: &str,
    ) -> Result<Option<T>, RequestFailure> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let parsed = serde_json::from_str(value.get());
        parsed.map(Some).map_err(|_| RequestFailure::Invalid(format!("'{name}' must be {expected}")))
    }

    /// Returns the fields that are left.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &'a RawValue)> {
        self.0.iter().map(|(name, value)| (name.as_str(), *value))
    }
}

impl<'de> Deserialize<'de> for FieldObject<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldVisitor)
    }
}

struct FieldVisitor;

impl<'de> Visitor<'de> for FieldVisitor {
    type Value = FieldObject<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<FieldObject<'de>, A::Error> {
        let mut fields: Vec<(String, &RawValue)> = Vec::new();
        while let Some((name, value)) = map.next_entry::<String, _>()? {
            if fields.len() == MAX_TENSORS {
                return Err(A::Error::custom(format_args!("an object of more than {MAX_TENSORS} fields")));
            }
            fields.push((name, value));
        }
        let mut names: Vec<&str> = fields.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        match names.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(A::Error::custom(format_args!("field '{}' is given twice", Clipped(pair[0])))),
            None => Ok(FieldObject(fields)),
        }
    }
}

/// Parses a generate request. Its fields are the inputs of the model, besides `id` and `parameters`.
/// An input can also be in `parameters`, as in Triton. Other parameters are ignored there, as in
/// inference requests.
pub(crate) fn parse_generate(
    body: Pieces,
    model: &Metadata,
    permit: &MemoryPermit,
) -> Result<InferRequest, RequestError> {
    let body = permit.join(body)?;
    let mut fields = FieldObject::parse(&body, permit)?;
    let id = fields.take_as(ID, "a string")?.unwrap_or_default();
    let mut parameters: FieldObject<'_> =
        fields.take_as(PARAMETERS, "an object of parameters")?.unwrap_or(FieldObject(Vec::new()));
    let options = options(parameters.take(PRIORITY), parameters.take(TIMEOUT))?;
    let nested = parameters.iter().filter(|(name, _)| find_input(model, name).is_some());
    let inputs = fields.iter().chain(nested).map(|(name, value)| field_tensor(model, name, value, permit));
    let inputs = inputs.collect::<Result<_, _>>()?;
    Ok(InferRequest { id, inputs, outputs: Vec::new(), is_binary: false, options })
}

/// An input of a model, as a client sees it.
struct PublicInput<'m> {
    spec: &'m TensorSpec,
    /// The shape, in which a batch axis has any size.
    shape: Vec<i64>,
}

fn find_input<'m>(model: &'m Metadata, name: &str) -> Option<PublicInput<'m>> {
    let required = model.inputs.iter().find(|spec| spec.name == name);
    let has_batch = required.is_some() && model.max_batch > 0;
    let spec = required.or_else(|| model.optional.iter().find(|spec| spec.name == name))?;
    let shape = if has_batch { public_shape(model, spec) } else { spec.shape.clone() };
    Some(PublicInput { spec, shape })
}

impl PublicInput<'_> {
    /// Returns the shape of a tensor for a value of this shape. Each open axis of a scalar's tensor
    /// is 1. A value without the first axis is one row.
    fn fit(&self, given: Vec<i64>) -> Vec<i64> {
        if given.is_empty() {
            return self.shape.iter().map(|&axis| if axis < 0 { 1 } else { axis }).collect();
        }
        let is_row = given.len() + 1 == self.shape.len() && matches!(self.shape[0], -1 | 1);
        if is_row { [vec![1], given].concat() } else { given }
    }
}

/// Returns the tensor for an input that is a field of a request.
pub(crate) fn field_tensor(
    model: &Metadata,
    name: &str,
    value: &RawValue,
    permit: &MemoryPermit,
) -> Result<NamedTensor, RequestError> {
    let Some(input) = find_input(model, name) else {
        let known = model.inputs.iter().chain(&model.optional);
        return Err(check::unexpected("input", name, model, known).into());
    };
    let wrong = |why| RequestFailure::Invalid(format!("input '{}': {why}", Clipped(name)));
    let shape = input.fit(nested::shape_of(value).map_err(wrong)?);
    let datatype = input.spec.datatype;
    let wrong =
        |why| RequestFailure::Invalid(format!("input '{}' of shape {}: {why}", Clipped(name), Shape(&shape)));
    let elements = check::count(&shape).map_err(wrong)?;
    let bytes = permit.buffer(values::max_bytes(datatype, value, elements) + SCALAR_BYTES)?;
    let data = values::encode_any(datatype, value, elements, bytes).map(Pieces::from).map_err(wrong)?;
    Ok(NamedTensor { name: name.to_owned(), datatype, shape, data, region: None })
}

/// Returns the maximum size in bytes of an answer with this id and these outputs.
pub(crate) fn field_bytes(id: &str, outputs: &[OutputTensor]) -> usize {
    let brackets = outputs.iter().map(|output| output.name.len() + nested::bracket_bytes(&output.shape));
    let id = values::text_bytes(Datatype::Bytes, id.len());
    answer::JSON_BYTES + id + answer::text_bytes(outputs) + brackets.sum::<usize>()
}

/// Appends an answer to `json`, in which each output is a field.
pub(crate) fn write_fields(
    model: &Metadata,
    id: &str,
    outputs: &[OutputTensor],
    json: &mut Vec<u8>,
) -> Result<(), RequestFailure> {
    let bytes = field_bytes(id, outputs);
    json.try_reserve_exact(bytes).map_err(|_| RequestFailure::no_memory(bytes))?;
    json.push(b'{');
    if !id.is_empty() {
        json.extend_from_slice(b"\"id\":");
        values::write(json, id);
        json.push(b',');
    }
    json.extend_from_slice(b"\"model_name\":");
    values::write(json, &model.name);
    json.extend_from_slice(b",\"model_version\":");
    values::write(json, &model.version);
    for output in outputs {
        json.push(b',');
        values::write(json, &output.name);
        json.push(b':');
        nested::write(output.datatype, &output.shape, &output.data, json)
            .map_err(|why| answer::unwritable(output, &why))?;
    }
    json.push(b'}');
    Ok(())
}

#[cfg(test)]
#[path = "fields_tests.rs"]
mod tests;
