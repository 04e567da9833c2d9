//! Whether what a warm-up gives can be an input's. Pure.

use shadowslice_shared::boot::{ElementValue, InputValues};
use shadowslice_shared::tensor::{Datatype, TensorSpec};

use super::arrays::Misfit;
use super::onnx::OnnxInput;
use super::types::{WarmupInput, WarmupValues};

/// Checks that values are of the kind that an input holds. An error says what is given, and what to
/// give.
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
            Err("the input holds text, which has no range; give `values`".to_owned())
        }
        InputValues::Listed(listed) => {
            let Some(wrong) = listed.iter().find(|value| !fits(value)) else { return Ok(()) };
            let given = match wrong {
                ElementValue::Text(_) => "text",
                ElementValue::Whole(_) => "a number",
                ElementValue::Number(_) => "a fraction",
            };
            let kind = if holds_text { "text in quotes" } else { "numbers of that type" };
            Err(format!("the input holds {datatype}, and {given} is given; give {kind}"))
        }
        InputValues::Range { .. } | InputValues::Rows(_) => Ok(()),
    }
}

/// Returns whether a shape has the axes of `open`, with a size for each that is free.
pub fn shape_fits(shape: &[i64], open: &[i64]) -> bool {
    shape.len() == open.len()
        && shape.iter().zip(open).all(|(&axis, &open)| axis > 0 && (open < 0 || axis == open))
}

/// Returns why what is given cannot be this input's, as far as the model's file shows that. A worker
/// knows the model and looks again.
pub(super) fn objection(input: &OnnxInput, given: &WarmupInput) -> Option<String> {
    if input.has_default {
        return Some("has a default for this input, with which models are warmed up; remove it".to_owned());
    }
    if let (Some(expected), Some(shape)) = (&input.shape, &given.shape) {
        let is_batched = expected.first().is_some_and(|first| *first < 0);
        let fits = shape_fits(shape, expected) || is_batched && shape_fits(shape, &expected[1..]);
        if !fits {
            let batch = if is_batched { "; the first axis may be the batch, which is left out" } else { "" };
            return Some(format!(
                "has this input with the shape {expected:?} (-1: any size{batch}), and {shape:?} is given"
            ));
        }
    }
    match (&given.values, input.datatype) {
        (Some(WarmupValues::Written(values)), Some(datatype)) => {
            check_values(datatype, values).err().map(|why| format!("has other values: {why}"))
        }
        (Some(WarmupValues::File(file)), Some(datatype)) => {
            let shape = input.shape.clone()?;
            let is_batched = shape.first().is_some_and(|first| *first < 0);
            let spec = TensorSpec { name: input.name.clone(), datatype, shape };
            match file.fit(&spec, is_batched) {
                // There is a fault already.
                Ok(_) | Err(Misfit::NoArray) => None,
                Err(misfit) => Some(format!("does not take the array of {}: {misfit}", file.path.display())),
            }
        }
        (None, _) | (_, None) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(datatype: Datatype, shape: Option<Vec<i64>>) -> OnnxInput {
        OnnxInput { name: "x".to_owned(), datatype: Some(datatype), shape, has_default: false }
    }

    fn of_shape(shape: &[i64]) -> WarmupInput {
        WarmupInput { shape: Some(shape.to_vec()), values: None }
    }

    #[test]
    fn a_shape_may_leave_a_free_first_axis_out() {
        let fits = |expected: &[i64], shape: &[i64]| {
            objection(&input(Datatype::Fp32, Some(expected.to_vec())), &of_shape(shape)).is_none()
        };
        assert!(fits(&[-1, -1, 3], &[16, 3]) && fits(&[-1, -1, 3], &[2, 16, 3]));
        assert!(!fits(&[-1, -1, 3], &[16, 4]) && !fits(&[-1, -1, 3], &[3]));
        assert!(fits(&[1, 512], &[1, 512]) && !fits(&[1, 512], &[512]) && !fits(&[1, 512], &[2, 512]));
        assert!(fits(&[], &[]) && !fits(&[], &[1]));
        assert!(objection(&input(Datatype::Fp32, None), &of_shape(&[7, 7, 7])).is_none(), "not known");
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
        assert_eq!(why, "the input holds INT64, and a fraction is given; give numbers of that type");
    }
}
