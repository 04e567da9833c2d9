//! Reads the key `warmup` of models: the inputs for the warm-up.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use shadowslice_shared::boot::{ElementValue, InputValues};
use shadowslice_shared::errors;

use super::arrays::{self, Array, ArrayFile, Arrays};
use super::engine::{check_size, shape};
use super::onnx::OnnxInput;
use super::reader::{Fields, Value};
use super::types::{EngineConfig, LimitsConfig, WarmupConfig, WarmupInput, WarmupValues};
use super::warmup_fit::mismatch;
use super::{Context, absolute};

/// The parts of a model that are needed to check the inputs for the warm-up.
pub(super) struct WarmupModel<'a> {
    pub(super) engine: &'a EngineConfig,
    pub(super) limits: &'a LimitsConfig,
    /// The inputs that the model's file or `tensors` declares, if they are known.
    pub(super) inputs: &'a [OnnxInput],
}

/// Reads a map of inputs, or the path of a file with all inputs.
///
/// An unknown input or an unusable file is a fault of the model's files. A shape is a fault if it
/// contradicts the emulated engine's inputs, or if it is too large for a request.
pub(super) fn warmup(fields: &Fields<'_>, model: &WarmupModel<'_>, context: &Context<'_>) -> WarmupConfig {
    let Some(value) = fields.get("warmup") else { return WarmupConfig::default() };
    if value.is_scalar() {
        return whole_file(&value, model, context);
    }
    let mut inputs = BTreeMap::new();
    for (input, value) in value.any_fields() {
        let Some(given) = warmup_input(input, &value, context) else { continue };
        let known = model.inputs.iter().find(|known| known.name == input);
        if let Some(mismatch) = model.mismatch(input, &given) {
            model.fault(&value, mismatch, context);
        } else if !model.has(input) {
            let hint = match input {
                "file" => "; for one file with all inputs, use `warmup: PATH`",
                _ => "",
            };
            let message = format!("unknown input; the model has {}{hint}", model.names());
            model.fault(&value, message, context);
        }
        if let Some(shape) = &given.shape {
            check_size(&value, shape, known.and_then(|known| known.datatype), model.limits);
        }
        inputs.insert(input.to_owned(), given);
    }
    WarmupConfig { file: None, inputs }
}

impl WarmupModel<'_> {
    /// Returns whether the model may have an input with this name.
    fn has(&self, input: &str) -> bool {
        self.inputs.is_empty() || self.inputs.iter().any(|known| known.name == input)
    }

    /// Returns the names of the inputs that have no default value.
    fn required(&self) -> impl Iterator<Item = &str> {
        self.inputs.iter().filter(|input| !input.has_default).map(|input| input.name.as_str())
    }

    fn names(&self) -> String {
        self.required().collect::<Vec<_>>().join(", ")
    }

    /// Returns the reason why the given shape or values do not fit the input in the model's file or in
    /// `tensors`.
    fn mismatch(&self, input: &str, given: &WarmupInput) -> Option<String> {
        let known = self.inputs.iter().find(|known| known.name == input)?;
        let declared = match self.engine {
            EngineConfig::OnnxRuntime { path, .. } => path.file_name()?.to_string_lossy(),
            EngineConfig::Python { .. } | EngineConfig::Emulated { .. } => "`tensors`".into(),
        };
        Some(format!("{declared} {}", mismatch(known, given)?))
    }

    /// Records a fault of the model's file, or of the configuration if that declares the inputs.
    fn fault(&self, value: &Value<'_>, message: String, context: &Context<'_>) {
        match self.engine {
            EngineConfig::Emulated { .. } => value.fault(message),
            EngineConfig::OnnxRuntime { .. } | EngineConfig::Python { .. } => {
                context.file_fault(value, message);
            }
        }
    }

    /// Returns the name of the model's input if the model has exactly one.
    fn only_input(&self) -> Option<&str> {
        let mut required = self.required();
        required.next().filter(|_| required.next().is_none())
    }
}

/// Reads the inputs in a file. If the file has a single array without a name, the array is for the
/// model's only input.
fn whole_file(value: &Value<'_>, model: &WarmupModel<'_>, context: &Context<'_>) -> WarmupConfig {
    let Some(file) = context.path(value) else { return WarmupConfig::default() };
    let path = absolute(&file);
    let mut arrays = read(value, &file, context);
    if let Some(array) = arrays.remove("") {
        if let Some(input) = model.only_input() {
            arrays.insert(input.to_owned(), array);
        } else {
            let message = format!(
                "{} has one array without a name; name its input with `warmup: {{INPUT: {{file: {}}}}}`",
                file.display(),
                value.word().unwrap_or_default()
            );
            context.file_fault(value, message);
        }
    }
    if let Some(input) = arrays.keys().find(|input| !model.has(input)) {
        let (file, names) = (file.display(), model.names());
        context.file_fault(
            value,
            format!("{file} has an array for the unknown input `{input}`; the model has {names}"),
        );
    }
    let input = |(name, array): (String, Arc<Array>)| {
        let file = ArrayFile { path: path.clone(), array: Some(array) };
        let given = WarmupInput { shape: None, values: Some(WarmupValues::File(file)) };
        if let Some(mismatch) = model.mismatch(&name, &given) {
            context.file_fault(value, format!("`{name}`: {mismatch}"));
        }
        (name, given)
    };
    WarmupConfig { inputs: arrays.into_iter().map(input).collect(), file: Some(path) }
}

/// Returns the arrays of a file, or none if the file cannot be used.
fn read(value: &Value<'_>, file: &Path, context: &Context<'_>) -> Arrays {
    arrays::read(file).unwrap_or_else(|error| {
        context.file_fault(value, format!("cannot use {}: {}", file.display(), errors::chain(&error)));
        Arrays::new()
    })
}

/// Reads an input: a shape, one value for all elements, or a map. A map with `file` has no other
/// key. Any other map has `shape`, or one of `values` and `range`, or both.
fn warmup_input(input: &str, value: &Value<'_>, context: &Context<'_>) -> Option<WarmupInput> {
    if value.is_list() {
        return Some(WarmupInput { shape: Some(shape(value)?), values: None });
    }
    if value.is_scalar() {
        let values = WarmupValues::Written(InputValues::Listed(vec![element(value)?]));
        return Some(WarmupInput { shape: None, values: Some(values) });
    }
    let fields = value.fields();
    if let Some(file) = fields.get("file") {
        fields.forbid(&["shape", "values", "range"], "the array in `file` gives shape and values");
        let values = Some(WarmupValues::File(array_file(input, &file, context)?));
        return Some(WarmupInput { shape: None, values });
    }
    let shape = fields.optional("shape", shape);
    let listed = fields.get("values").and_then(|value| {
        let items = if value.is_scalar() { vec![value.clone()] } else { value.items() };
        let elements: Vec<ElementValue> = items.iter().map(element).collect::<Option<_>>()?;
        Some(InputValues::Listed(elements))
    });
    if listed.is_some() {
        fields.forbid(&["range"], "the input has `values` already");
    }
    let range = fields.optional("range", range);
    Some(WarmupInput { shape, values: listed.or(range).map(WarmupValues::Written) })
}

/// Reads the array of one input. If the file has several arrays, uses the array with the input's
/// name.
fn array_file(input: &str, value: &Value<'_>, context: &Context<'_>) -> Option<ArrayFile> {
    let file = context.path(value)?;
    let mut arrays = read(value, &file, context);
    let array = arrays.remove("").or_else(|| arrays.remove(input));
    if array.is_none() && !arrays.is_empty() {
        let names = arrays.into_keys().collect::<Vec<_>>().join(", ");
        context.file_fault(value, format!("{} has no array `{input}`, only {names}", file.display()));
    }
    Some(ArrayFile { path: absolute(&file), array })
}

fn range(value: &Value<'_>) -> Option<InputValues> {
    let items = value.items();
    let [from, to] = &items[..] else { return None };
    let (from, to) = (from.number()?, to.number()?);
    if from > to {
        value.fault("the first number is larger than the second; swap them");
    }
    Some(InputValues::Range { from, to })
}

/// Reads the value of an element. Text in quotes stays text, even if it looks like a number.
fn element(value: &Value<'_>) -> Option<ElementValue> {
    let text = value.text()?;
    if !value.is_plain() {
        return Some(ElementValue::Text(text.to_owned()));
    }
    let whole = match text {
        "true" => Some(1),
        "false" => Some(0),
        _ => text.parse().ok(),
    };
    let number = || text.parse().ok().filter(|number: &f64| number.is_finite()).map(ElementValue::Number);
    Some(
        whole.map(ElementValue::Whole).or_else(number).unwrap_or_else(|| ElementValue::Text(text.to_owned())),
    )
}
