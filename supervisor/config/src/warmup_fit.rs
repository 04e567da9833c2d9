//! Checks shapes and values for the warm-up against the inputs of a model. This module does no I/O.

use shadowslice_shared::boot::{ElementValue, InputValues};
use shadowslice_shared::tensor::{Datatype, TensorSpec};

use super::onnx::OnnxInput;
use super::types::{WarmupInput, WarmupValues};

/// Checks that an input of this datatype can have these values.
///
/// # Errors
///
/// A message that says what is wrong and what to write instead.
pub fn check_values(datatype: Datatype, values: &InputValues) -> Result<(), String> {
    let holds_text = datatype == Datatype::Bytes;
    let holds_fractions =
        matches!(datatype, Datatype::Fp16 | Datatype::Bf16 | Datatype::Fp32 | Datatype::Fp64);
    let fits = |value: &ElementValue| match value {
        ElementValue::Text(_) => holds_text,
        ElementValue::Whole(_) => !holds_text,
        ElementValue::Number(_) => holds_fractions,
    };
    match values {
        InputValues::Range { .. } if holds_text => {
            Err("the input has texts, which have no range; use `values`".to_owned())
        }
        InputValues::Listed(listed) => {
            let Some(wrong) = listed.iter().find(|value| !fits(value)) else { return Ok(()) };
            let given = match wrong {
                ElementValue::Text(_) => "text",
                ElementValue::Whole(_) => "a number",
                ElementValue::Number(_) => "a fraction",
            };
            let kind = if holds_text { "texts in quotes" } else { "numbers of that type" };
            Err(format!("the input is {datatype}, but `values` has {given}; use {kind}"))
        }
        InputValues::Range { .. } | InputValues::Rows(_) => Ok(()),
    }
}

/// Returns whether a shape matches `open`. For each free axis (-1) of `open`, the shape may have
/// any length above 0.
pub fn shape_fits(shape: &[i64], open: &[i64]) -> bool {
    shape.len() == open.len()
        && shape.iter().zip(open).all(|(&axis, &open)| axis > 0 && (open < 0 || axis == open))
}

/// Returns the reason why the given shape or values do not fit this input. This check uses only the
/// model's file. A worker checks the values again after it has loaded the model.
pub(super) fn mismatch(input: &OnnxInput, given: &WarmupInput) -> Option<String> {
    if input.has_default {
        return Some("has a default for this input, which the warm-up uses; remove the key".to_owned());
    }
    if let (Some(expected), Some(shape)) = (&input.shape, &given.shape) {
        let is_batched = !input.is_row && expected.first().is_some_and(|first| *first < 0);
        let fits = shape_fits(shape, expected) || is_batched && shape_fits(shape, &expected[1..]);
        if !fits {
            let batch = if is_batched { "; omit the first axis if it is the batch" } else { "" };
            return Some(format!(
                "has this input with shape {expected:?} (-1: any size{batch}), not {shape:?}"
            ));
        }
    }
    match (&given.values, input.datatype) {
        (Some(WarmupValues::Written(values)), Some(datatype)) => {
            check_values(datatype, values).err().map(|why| format!("cannot have these values: {why}"))
        }
        // Only a worker knows whether the arrays of an emulated model have a batch axis.
        (Some(WarmupValues::File(_)), _) if input.is_row => None,
        (Some(WarmupValues::File(file)), Some(datatype)) => {
            let shape = input.shape.clone()?;
            let is_batched = shape.first().is_some_and(|first| *first < 0);
            let spec = TensorSpec { name: input.name.clone(), datatype, shape };
            // An unusable file has already been recorded as a fault.
            let why = file.fit(&spec, is_batched).err().filter(|_| file.array.is_some())?;
            Some(format!("cannot have the array in {}: {why}", file.path.display()))
        }
        (None, _) | (_, None) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(datatype: Datatype, shape: Option<Vec<i64>>) -> OnnxInput {
        OnnxInput { name: "x".to_owned(), datatype: Some(datatype), shape, is_row: false, has_default: false }
    }

    fn of_shape(shape: &[i64]) -> WarmupInput {
        WarmupInput { shape: Some(shape.to_vec()), values: None }
    }

    #[test]
    fn a_shape_may_omit_a_free_first_axis() {
        let fits = |expected: &[i64], shape: &[i64]| {
            mismatch(&input(Datatype::Fp32, Some(expected.to_vec())), &of_shape(shape)).is_none()
        };
        assert!(fits(&[-1, -1, 3], &[16, 3]) && fits(&[-1, -1, 3], &[2, 16, 3]));
        assert!(!fits(&[-1, -1, 3], &[16, 4]) && !fits(&[-1, -1, 3], &[3]));
        assert!(fits(&[1, 512], &[1, 512]) && !fits(&[1, 512], &[512]) && !fits(&[1, 512], &[2, 512]));
        assert!(fits(&[], &[]) && !fits(&[], &[1]));
        assert!(mismatch(&input(Datatype::Fp32, None), &of_shape(&[7, 7, 7])).is_none(), "not known");
    }

    #[test]
    fn values_must_be_of_the_inputs_kind() {
        let whole = InputValues::Listed(vec![ElementValue::Whole(7)]);
        let fraction = InputValues::Listed(vec![ElementValue::Whole(7), ElementValue::Number(0.5)]);
        let text = InputValues::Listed(vec![ElementValue::Text("Wien".to_owned())]);
        let range = InputValues::Range { from: 0.0, to: 1.0 };
        let kinds = |values| {
            [Datatype::Int64, Datatype::Fp32, Datatype::Bytes].map(|kind| check_values(kind, values).is_ok())
        };
        assert_eq!(kinds(&whole), [true, true, false]);
        assert_eq!(kinds(&fraction), [false, true, false]);
        assert_eq!(kinds(&text), [false, false, true]);
        assert_eq!(kinds(&range), [true, true, false]);
        let why = check_values(Datatype::Int64, &fraction).unwrap_err();
        assert_eq!(why, "the input is INT64, but `values` has a fraction; use numbers of that type");
    }
}
