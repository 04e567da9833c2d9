//! The check of a request's tensors against a model's description. It does no I/O.

use std::fmt;
use std::time::Duration;

use shadowslice_datapath::pipeline::{Metadata, Pieces, RequestFailure, RequestInput, RequestOptions};
use shadowslice_shared::tensor::{Datatype, TensorSpec, UnknownDatatype, count_byte_strings};

use super::outputs::RequestedOutput;
use super::shared_memory::SharedTensor;
use crate::admission::{Clipped, invalid};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InferRequest {
    /// The client's name for the request, which the answer repeats.
    pub(crate) id: String,
    pub(crate) inputs: Vec<NamedTensor>,
    /// The requested outputs in the order of the answer. The list is empty if all are requested.
    pub(crate) outputs: Vec<RequestedOutput>,
    /// True if the outputs of a request that names none are binary.
    pub(crate) is_binary: bool,
    pub(crate) options: RequestOptions,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamedTensor {
    pub(crate) name: String,
    pub(crate) datatype: Datatype,
    pub(crate) shape: Vec<i64>,
    /// The elements, as in [`RequestInput::data`]. They are empty if they are in shared memory.
    pub(crate) data: Pieces,
    pub(crate) region: Option<SharedTensor>,
}

/// The maximum number of elements of a shape. Zeros count as ones, so that an empty tensor cannot
/// pass a huge axis to the model.
const MAX_ELEMENTS: usize = i32::MAX as usize;

/// Returns the options for the parameters `priority` and `timeout`. The value 0 requests nothing.
pub(super) fn options(priority: u64, timeout_us: u64) -> RequestOptions {
    RequestOptions { priority, timeout: (timeout_us > 0).then(|| Duration::from_micros(timeout_us)) }
}

pub(super) fn datatype(input: &str, datatype: &str) -> Result<Datatype, RequestFailure> {
    datatype.parse().or_else(|UnknownDatatype(got)| {
        invalid(format!("input '{}' has the unknown datatype '{}'", Clipped(input), Clipped(&got)))
    })
}

pub(super) fn invalid_number(name: &str, got: &str) -> RequestFailure {
    let unit = if name == "timeout" { " of microseconds" } else { "" };
    RequestFailure::Invalid(format!(
        "the parameter '{name}' must be a whole number{unit} from 0 to {}, got {}",
        u64::MAX,
        Clipped(got)
    ))
}

/// Returns the inputs in the model's order. If the request has an optional input, all optional
/// inputs follow.
pub(crate) fn check_inputs(
    model: &Metadata,
    tensors: Vec<NamedTensor>,
) -> Result<Vec<RequestInput>, RequestFailure> {
    let required = model.inputs.len();
    let specs = || model.inputs.iter().chain(&model.optional);
    let mut inputs: Vec<Option<RequestInput>> = vec![None; required + model.optional.len()];
    for tensor in tensors {
        let found = specs().enumerate().find(|(_, spec)| spec.name == tensor.name);
        let Some((place, spec)) = found else {
            return Err(unexpected("input", &tensor.name, model, specs()));
        };
        if inputs[place].is_some() {
            return invalid(format!("input '{}' is given twice for model '{}'", spec.name, model.name));
        }
        check_tensor(model, (spec, place >= required), &tensor)?;
        inputs[place] = Some(RequestInput { shape: tensor.shape, data: tensor.data });
    }
    if let Some(missing) = inputs[..required].iter().position(Option::is_none) {
        let given = inputs[..required].iter().flatten().count();
        let (name, model) = (&model.inputs[missing].name, &model.name);
        return invalid(format!(
            "expected {required} inputs but got {given} inputs for model '{model}': input '{name}' is missing"
        ));
    }
    if inputs[required..].iter().all(Option::is_none) {
        inputs.truncate(required);
    }
    let inputs: Vec<_> =
        inputs.into_iter().map(|input| input.unwrap_or_else(RequestInput::left_out)).collect();
    if model.max_batch > 0 {
        check_rows(model, &inputs[..required])?;
    }
    Ok(inputs)
}

/// Returns the shape that clients see, where a batch axis has any size.
pub(crate) fn public_shape(model: &Metadata, spec: &TensorSpec) -> Vec<i64> {
    let mut shape = spec.shape.clone();
    if let (true, Some(batch)) = (model.max_batch > 0, shape.first_mut()) {
        *batch = -1;
    }
    shape
}

/// Returns the number of elements of a shape.
pub(super) fn count(shape: &[i64]) -> Result<usize, String> {
    if let Some(axis) = shape.iter().find(|&&axis| axis < 0) {
        return Err(format!("shape {} has the negative dimension {axis}", Shape(shape)));
    }
    let sizes = shape.iter().map(|&axis| usize::try_from(axis).unwrap_or(usize::MAX));
    let product = sizes.clone().try_fold(1_usize, |product, size| product.checked_mul(size.max(1)));
    match product {
        Some(product) if product <= MAX_ELEMENTS => Ok(sizes.product()),
        _ => Err(format!("shape {} is too large: at most {MAX_ELEMENTS} elements", Shape(shape))),
    }
}

fn check_tensor(
    model: &Metadata,
    (spec, is_optional): (&TensorSpec, bool),
    tensor: &NamedTensor,
) -> Result<(), RequestFailure> {
    let (name, model_name) = (&spec.name, &model.name);
    if tensor.datatype != spec.datatype {
        let (expected, got) = (spec.datatype, tensor.datatype);
        return invalid(format!(
            "input '{name}' has datatype {got}, but model '{model_name}' expects {expected}"
        ));
    }
    let has_batch = model.max_batch > 0 && !is_optional;
    let expected = if has_batch { public_shape(model, spec) } else { spec.shape.clone() };
    let fits = expected.len() == tensor.shape.len()
        && expected.iter().zip(&tensor.shape).all(|(&expected, &got)| expected < 0 || expected == got);
    if !fits {
        let note = if has_batch { "; the first axis is the batch" } else { "" };
        return invalid(format!(
            "unexpected shape for input '{name}' for model '{model_name}': expected {}, got {}{note}",
            Shape(&expected),
            Shape(&tensor.shape),
        ));
    }
    let checked = count(&tensor.shape).and_then(|elements| check_data(tensor, elements));
    checked.or_else(|why| invalid(format!("input '{name}' for model '{model_name}': {why}")))
}

fn check_data(tensor: &NamedTensor, elements: usize) -> Result<(), String> {
    let (datatype, shape, got) = (tensor.datatype, Shape(&tensor.shape), tensor.data.len());
    if let Some(size) = datatype.size() {
        let expected = elements.saturating_mul(size);
        if expected != got {
            return Err(format!(
                "expected {expected} bytes for {datatype} of shape {shape}, got {got} bytes"
            ));
        }
    } else {
        let Some(strings) = count_byte_strings(&tensor.data.clone().into_bytes()) else {
            return Err(format!(
                "the {got} bytes are not valid BYTES elements; each element is its length, 4 bytes little-endian, followed by that number of bytes"
            ));
        };
        if strings != elements {
            return Err(format!(
                "expected {elements} BYTES elements for shape {shape}, got {strings} elements"
            ));
        }
    }
    let mut bytes = tensor.data.iter().filter(|_| datatype == Datatype::Bool).flatten();
    let no_bool = bytes.find(|&&byte| byte > 1);
    no_bool.map_or(Ok(()), |byte| Err(format!("expected 0 or 1 for each BOOL, got the byte {byte}")))
}

fn check_rows(model: &Metadata, inputs: &[RequestInput]) -> Result<(), RequestFailure> {
    let rows = |input: &RequestInput| input.shape.first().copied().unwrap_or(0);
    let Some(first) = inputs.first().map(rows) else { return Ok(()) };
    let (name, max) = (&model.name, model.max_batch);
    if let Some((spec, input)) = model.inputs.iter().zip(inputs).find(|(_, input)| rows(input) != first) {
        return invalid(format!(
            "input '{}' has batch size {}, but input '{}' of the same request has {first}, for model '{name}'",
            spec.name,
            rows(input),
            model.inputs[0].name,
        ));
    }
    if !(1..=i64::from(max)).contains(&first) {
        let advice = match first > i64::from(max) {
            true => "; if the first axis is not a batch, set batch.max to 0",
            false => "",
        };
        return invalid(format!(
            "inference request batch-size must be between 1 and {max} for '{name}', got {first}{advice}"
        ));
    }
    Ok(())
}

pub(super) fn unexpected<'s>(
    kind: &str,
    name: &str,
    model: &Metadata,
    specs: impl Iterator<Item = &'s TensorSpec>,
) -> RequestFailure {
    let known: Vec<&str> = specs.map(|spec| spec.name.as_str()).collect();
    let (name, model, known) = (Clipped(name), &model.name, known.join(", "));
    RequestFailure::Invalid(format!(
        "unexpected inference {kind} '{name}' for model '{model}', whose {kind}s are: {known}"
    ))
}

/// A shape in a message, as Triton writes it. Long shapes are cut.
pub(super) struct Shape<'a>(pub(super) &'a [i64]);

impl fmt::Display for Shape<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const AXES: usize = 16;
        let axes: Vec<String> = self.0.iter().take(AXES).map(ToString::to_string).collect();
        let more = if self.0.len() > AXES { format!(",.. {} axes", self.0.len()) } else { String::new() };
        write!(f, "[{}{more}]", axes.join(","))
    }
}

#[cfg(test)]
#[path = "check_tests.rs"]
mod tests;
